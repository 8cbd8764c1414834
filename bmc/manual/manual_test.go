package manual

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/release"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
)

// rig is a driver with a channel that gets what people are asked.
type rig struct {
	t     *testing.T
	d     *driver.Definition
	desk  *Desk
	asked chan Asked
}

func newRig(t *testing.T, file string) *rig {
	t.Helper()
	r := &rig{t: t, asked: make(chan Asked, 16)}
	var err error
	r.d, r.desk, err = New(Options{File: file, Tell: func(a Asked) { r.asked <- a }})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *rig) invoke(ctx context.Context, operation, args string) (string, error) {
	r.t.Helper()
	call, _ := drivertest.Context(r.t, ctx, nil)
	call.TargetNodeID = "node_1"
	out, err := r.d.Invoke(call, "power", operation, json.RawMessage(`{"address":"Rack3-Node7"}`), json.RawMessage(args))
	return string(out), err
}

func (r *rig) set(ctx context.Context, action string) chan error {
	ended := make(chan error, 1)
	go func() {
		_, err := r.invoke(ctx, "setPower", `"`+action+`"`)
		ended <- err
	}()
	return ended
}

func (r *rig) power() string {
	r.t.Helper()
	out, err := r.invoke(r.t.Context(), "getPower", "")
	if err != nil {
		r.t.Fatal(err)
	}
	return out
}

func (r *rig) confirm(power string) {
	r.t.Helper()
	if err := r.desk.Confirm("rack3-node7", power); err != nil {
		r.t.Fatal(err)
	}
}

// waits fails the test when the call has ended.
func waits(t *testing.T, ended chan error) {
	t.Helper()
	select {
	case err := <-ended:
		t.Fatalf("setPower ended with %v, want it to wait", err)
	default:
	}
}

func TestAPersonIsAskedAndConfirms(t *testing.T) {
	for _, tt := range []struct {
		action    string
		elsewhere string // a confirmation that does not end the asking
		done      string
	}{{"on", "off", "on"}, {"off", "on", "off"}, {"soft", "on", "off"}, {"cycle", "off", "on"}, {"reset", "off", "on"}} {
		r := newRig(t, "")
		if got := r.power(); got != `"unknown"` {
			t.Errorf("getPower before any word = %s, want unknown", got)
		}
		ended := r.set(t.Context(), tt.action)
		if a := <-r.asked; string(a.Action) != tt.action || a.Address != "rack3-node7" || a.Machine != "node_1" {
			t.Errorf("setPower %s asks %+v", tt.action, a)
		}
		r.confirm(tt.elsewhere)
		if got := r.power(); got != `"`+tt.elsewhere+`"` {
			t.Errorf("getPower = %s, want what was confirmed: %s", got, tt.elsewhere)
		}
		waits(t, ended)
		r.confirm(tt.done)
		if err := <-ended; err != nil {
			t.Errorf("setPower %s after confirmation: %v", tt.action, err)
		}
		if a := <-r.asked; a.Action != "" {
			t.Errorf("after the confirmation %+v is asked, want nothing", a)
		}
		if got := r.power(); got != `"`+tt.done+`"` {
			t.Errorf("getPower = %s, want %s", got, tt.done)
		}
	}
}

// What was confirmed last week does not switch a machine on today.
func TestAnOldConfirmationDoesNotCount(t *testing.T) {
	r := newRig(t, "")
	r.confirm("on")
	ended := r.set(t.Context(), "on")
	<-r.asked
	waits(t, ended)
	r.confirm("on")
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestOneAskingPerMachine(t *testing.T) {
	r := newRig(t, "")
	first := r.set(t.Context(), "off")
	<-r.asked
	_, err := r.invoke(t.Context(), "setPower", `"on"`)
	if e := errs.From(err); e == nil || e.Code != errs.Unavailable || !e.Retryable {
		t.Errorf("a second asking = %v, want unavailable", err)
	}
	// Another machine's is its own.
	call, _ := drivertest.Context(t, t.Context(), nil)
	other := make(chan error, 1)
	go func() {
		_, err := r.d.Invoke(call, "power", "setPower", json.RawMessage(`{"address":"other"}`), json.RawMessage(`"on"`))
		other <- err
	}()
	if a := <-r.asked; a.Address != "other" {
		t.Errorf("asked %+v, want the other machine", a)
	}
	r.confirm("off")
	if err := <-first; err != nil {
		t.Error(err)
	}
	if err := r.desk.Confirm("OTHER", "on"); err != nil {
		t.Error(err)
	}
	if err := <-other; err != nil {
		t.Error(err)
	}
}

func TestTheDeadlineEndsTheAsking(t *testing.T) {
	r := newRig(t, "")
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := <-r.set(ctx, "on"); errs.CodeOf(err) != errs.Timeout || !strings.Contains(err.Error(), "nobody confirmed") {
		t.Errorf("setPower = %v, want timeout", err)
	}
	if a, b := <-r.asked, <-r.asked; a.Action != "on" || a.Until.IsZero() || b.Action != "" {
		t.Errorf("asked %+v, then %+v: want an end to the asking", a, b)
	}
	ctx, cancel = context.WithCancel(t.Context())
	ended := r.set(ctx, "on")
	<-r.asked
	cancel()
	if err := <-ended; errs.CodeOf(err) != errs.Cancelled {
		t.Errorf("setPower = %v, want cancelled", err)
	}
	<-r.asked
	// And the next may ask again.
	ended = r.set(t.Context(), "on")
	if a := <-r.asked; a.Action != "on" {
		t.Errorf("asked %+v", a)
	}
	r.confirm("on")
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// The wait gives its place up before anybody is asked, and only a wait does.
func TestTheWaitIsReleased(t *testing.T) {
	r := newRig(t, "")
	released := make(chan struct{}, 4)
	ctx := release.With(t.Context(), func() { released <- struct{}{} })
	if _, err := r.invoke(ctx, "getPower", ""); err != nil {
		t.Fatal(err)
	}
	if _, err := r.invoke(ctx, "setPower", `"nmi"`); errs.CodeOf(err) != errs.UnsupportedOperation {
		t.Errorf("setPower nmi = %v, want unsupported-operation", err)
	}
	if len(released) != 0 {
		t.Error("what does not wait gave its place up")
	}
	ended := r.set(ctx, "on")
	<-r.asked
	if len(released) != 1 {
		t.Errorf("the wait was released %d times, want once", len(released))
	}
	r.confirm("on")
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestConfirmedStatesSurviveARestart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "manual.json")
	r := newRig(t, path)
	r.confirm("off")
	if got := newRig(t, path).power(); got != `"off"` {
		t.Errorf("after a restart getPower = %s, want off", got)
	}
	for _, damaged := range []string{"{", `{"version":2,"states":{"rack3-node7":"off"}}`, `{"version":1,"states":{"rack3-node7":"maybe"}}`} {
		if err := os.WriteFile(path, []byte(damaged), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := newRig(t, path).power(); got != `"unknown"` {
			t.Errorf("with the file %s getPower = %s, want unknown", damaged, got)
		}
	}
}

// A word that cannot be kept is not taken, and ends no asking.
func TestAConfirmationThatCannotBeKeptIsRefused(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "gone")
	r := newRig(t, filepath.Join(dir, "manual.json"))
	ended := r.set(t.Context(), "on")
	<-r.asked
	if err := r.desk.Confirm("rack3-node7", "on"); err == nil {
		t.Error("a confirmation without a place to keep it was taken")
	}
	waits(t, ended)
	if got := r.power(); got != `"unknown"` {
		t.Errorf("getPower = %s, want unknown", got)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	r.confirm("on")
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestBadConfirmations(t *testing.T) {
	r := newRig(t, "")
	for _, tt := range []struct {
		address, power string
		code           errs.Code
	}{
		{"rack3-node7", "cycle", errs.InvalidArgs}, {"rack3-node7", "", errs.InvalidArgs}, {"rack3-node7", "unknown", errs.InvalidArgs},
		{"", "on", errs.InvalidAddress}, {"a b", "on", errs.InvalidAddress}, {"x/../y", "on", errs.InvalidAddress}, {strings.Repeat("a", 65), "on", errs.InvalidAddress},
		{"\x1b[2J", "on", errs.InvalidAddress},
	} {
		if err := r.desk.Confirm(tt.address, tt.power); errs.CodeOf(err) != tt.code {
			t.Errorf("Confirm(%q, %q) = %v, want %s", tt.address, tt.power, err, tt.code)
		}
	}
}

func TestConfiguration(t *testing.T) {
	for in, code := range map[string]errs.Code{
		`{"address":"node7"}`: "", `{"address":"NODE.7_a","credentials":"secret://root/x"}`: "",
		`{"address":"node7","tlsSpkiSha256":"ab"}`: errs.PinUnsupported, `{"address":"node7","options":{}}`: errs.InvalidConfig,
		`{}`: errs.InvalidConfig, `{"address":"-x"}`: errs.InvalidAddress, `{"address":"a:b"}`: errs.InvalidAddress,
	} {
		if _, err := parseConfig(json.RawMessage(in)); errs.CodeOf(err) != code {
			t.Errorf("parseConfig(%s) = %v, want %q", in, err, code)
		}
	}
}

func TestConcurrentAskingsAndConfirmations(t *testing.T) {
	r := newRig(t, "")
	r.desk.tell = func(Asked) {}
	var wg sync.WaitGroup
	stop := make(chan struct{})
	go func() {
		for {
			select {
			case <-stop:
				return
			default:
				_ = r.desk.Confirm("rack3-node7", "on")
			}
		}
	}()
	for range 8 {
		wg.Go(func() {
			for range 50 {
				if _, err := r.invoke(t.Context(), "setPower", `"on"`); err != nil && errs.CodeOf(err) != errs.Unavailable {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	close(stop)
	r.desk.mu.Lock()
	defer r.desk.mu.Unlock()
	if len(r.desk.asking) != 0 {
		t.Errorf("%d askings are left", len(r.desk.asking))
	}
}
