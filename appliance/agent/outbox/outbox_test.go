package outbox_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent/outbox"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

func at() time.Time { return time.UnixMilli(1_700_000_000_000) }

func open(t testing.TB, path string, limit int) *outbox.Outbox {
	t.Helper()
	o, err := outbox.Open(path, limit, at)
	if err != nil {
		t.Fatalf("Open = %v, want nil", err)
	}
	return o
}

func emit(t testing.TB, o *outbox.Outbox, name, class, key string, body any) {
	t.Helper()
	if err := o.Emit(name, class, key, body); err != nil {
		t.Fatalf("Emit(%s) = %v, want nil", name, err)
	}
}

// take prints what the next session would send.
func take(t testing.TB, o *outbox.Outbox) string {
	t.Helper()
	var out []string
	for {
		events, err := o.Events(2)
		if err != nil {
			t.Fatal(err)
		}
		if len(events) == 0 {
			return strings.Join(out, " ")
		}
		for _, e := range events {
			out = append(out, fmt.Sprintf("%d:%s/%s", e.Seq, e.Name, e.Key))
		}
	}
}

func TestOrderCoalescingAndAcks(t *testing.T) {
	for _, path := range []string{"", filepath.Join(t.TempDir(), "events")} {
		o := open(t, path, outbox.DefaultLimit)
		emit(t, o, "driver.state", outbox.State, "a", 1)
		emit(t, o, "driver.state", outbox.State, "b", 1)
		emit(t, o, "pxe.stage", outbox.Telemetry, "a", 1)
		emit(t, o, "driver.state", outbox.State, "a", 2)
		emit(t, o, "command.finished", outbox.Audit, "a", 1)
		emit(t, o, "command.finished", outbox.Audit, "a", 1)
		want := "2:driver.state/b 3:pxe.stage/a 4:driver.state/a 5:command.finished/a 6:command.finished/a"
		if got := take(t, o); got != want {
			t.Errorf("Events = %s, want %s", got, want)
		}
		if got := take(t, o); got != "" {
			t.Errorf("Events again = %s, want none", got)
		}
		if err := o.Acked(3); err != nil {
			t.Error(err)
		}
		if err := o.Acked(99); err == nil {
			t.Error("Acked(a number never given) = nil, want an error")
		}
		o.Rewind(4)
		if got, want := take(t, o), "5:command.finished/a 6:command.finished/a"; got != want {
			t.Errorf("Events of the next session = %s, want %s", got, want)
		}
	}
}

// TestReopen stops after every event without closing, as a kill does.
func TestReopen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "events")
	epoch := open(t, path, outbox.DefaultLimit).Epoch()
	for n := range 5 {
		o := open(t, path, outbox.DefaultLimit)
		if o.Epoch() != epoch || o.NextSeq() != uint64(n+1) {
			t.Fatalf("reopened: epoch %s, next %d; want %s, %d", o.Epoch(), o.NextSeq(), epoch, n+1)
		}
		emit(t, o, "e", outbox.Audit, fmt.Sprint(n), nil)
	}
	o := open(t, path, outbox.DefaultLimit)
	if err := o.Acked(4); err != nil {
		t.Fatal(err)
	}
	if got, want := take(t, open(t, path, outbox.DefaultLimit)), "5:e/4"; got != want {
		t.Errorf("reopened after an ack: %s, want %s", got, want)
	}
}

// TestNumbersAreNotUsedAgain acks everything, compacts, and reopens.
func TestNumbersAreNotUsedAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "events")
	o := open(t, path, outbox.DefaultLimit)
	body := strings.Repeat("x", 200<<10)
	for range 12 {
		emit(t, o, "e", outbox.State, "k", body)
	}
	take(t, o)
	if err := o.Acked(12); err != nil {
		t.Fatal(err)
	}
	emit(t, o, "e", outbox.State, "k", 1)
	if info, err := os.Stat(path); err != nil || info.Size() > 2<<20 {
		t.Errorf("file has %d bytes (%v), want it compacted", info.Size(), err)
	}
	if got := open(t, path, outbox.DefaultLimit).NextSeq(); got != 14 {
		t.Errorf("NextSeq after reopening = %d, want 14", got)
	}
}

func TestRoom(t *testing.T) {
	path := filepath.Join(t.TempDir(), "events")
	o := open(t, path, 64<<10)
	body := strings.Repeat("x", 10<<10)
	for n := range 8 {
		emit(t, o, "pxe.stage", outbox.Telemetry, fmt.Sprint(n), body)
	}
	if o.Full() {
		t.Error("Full() with telemetry alone = true, want false: it gives way")
	}
	for n := range 5 {
		emit(t, o, "audit", outbox.Audit, fmt.Sprint(n), body)
	}
	want := "10:audit/1 11:audit/2 12:audit/3 13:audit/4 14:events.dropped/"
	if got := take(t, o); !strings.HasSuffix(got, want) || !strings.Contains(got, "pxe.stage/7") || strings.Contains(got, "pxe.stage/6 ") {
		t.Errorf("Events = %s, want the last telemetry, every audit, and a count", got)
	}
	emit(t, o, "audit", outbox.Audit, "5", body)
	if !o.Full() {
		t.Error("Full() with audit up to the limit = false, want true")
	}
	if err := o.Emit("audit", outbox.Audit, "6", body); errs.CodeOf(err) != errs.NoSpace {
		t.Errorf("Emit(audit without room) = %v, want no-space", err)
	}
	if err := o.Emit("pxe.stage", outbox.Telemetry, "9", body); errs.CodeOf(err) != errs.NoSpace {
		t.Errorf("Emit(telemetry without room) = %v, want no-space", err)
	}
	again := open(t, path, 64<<10)
	if got := take(t, again); strings.Contains(got, "pxe.stage/0") || !strings.Contains(got, "audit/0") {
		t.Errorf("reopened: %s, want dropped telemetry gone and audit kept", got)
	}
	if err := o.Acked(12); err != nil {
		t.Fatal(err)
	}
	if o.Full() {
		t.Error("Full() after acks = true, want false")
	}
}

func TestDamage(t *testing.T) {
	path := filepath.Join(t.TempDir(), "events")
	o := open(t, path, outbox.DefaultLimit)
	emit(t, o, "e", outbox.Audit, "0", nil)
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	emit(t, o, "e", outbox.Audit, "1", nil)
	emit(t, o, "e", outbox.Audit, "2", nil)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	data[info.Size()+10] ^= 1
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	again := open(t, path, outbox.DefaultLimit)
	if !again.Damaged() || again.Epoch() == o.Epoch() {
		t.Errorf("Open(damaged): damaged %v, want a new epoch", again.Damaged())
	}
	if got := take(t, again); got != "1:e/0" {
		t.Errorf("Open(damaged) keeps %s, want what stood before the damage", got)
	}
}

func TestEmitRefuses(t *testing.T) {
	o := open(t, "", outbox.DefaultLimit)
	for _, test := range []struct {
		name, class string
		body        any
		ok          bool
	}{
		{"e", outbox.State, nil, true},
		{"", outbox.State, nil, false},
		{"e", "other", nil, false},
		{"e", outbox.State, func() {}, false},
		{"e", outbox.State, strings.Repeat("x", 300<<10), false},
	} {
		if err := o.Emit(test.name, test.class, "", test.body); (err == nil) != test.ok {
			t.Errorf("Emit(%q, %q) = %v, want ok %v", test.name, test.class, err, test.ok)
		}
	}
}
