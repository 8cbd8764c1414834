package relay

import (
	"bytes"
	"context"
	"crypto/x509"
	"log/slog"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/bmc/redfish"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// TestRedfish: the built-in driver behind the relay, on a BMC of the rig.
func TestRedfish(t *testing.T) {
	b, err := bmctest.StartRedfish(t.Context(), "127.0.0.1:0", "ADMIN", "hunter2", bmctest.NewFake(), bmctest.OffInterval(time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	var logged bytes.Buffer
	log := slog.New(slog.NewTextHandler(&logged, nil))
	own, closer, err := redfish.New(redfish.Options{Roots: x509.NewCertPool(), Log: log})
	if err != nil {
		t.Fatal(err)
	}
	defer closer(context.Background())
	with := func(book *addressbook.Book) *Relay {
		return New(Options{Book: book, BuiltIn: []*driver.Definition{own}, Log: log})
	}
	r := with(memoryBook(t))
	do := func(r *Relay, kind, operation, args string, change func(*bmcv1.BmcOperationRequest)) (string, error) {
		o := op(func(o *bmcv1.BmcOperationRequest) {
			o.Driver, o.Address, o.TlsSpkiSha256, o.Operation, o.ArgsJson = "redfish", "https://"+b.Addr(), b.SPKI(), operation, args
		})
		if change != nil {
			change(o)
		}
		got, err := r.Do(t.Context(), Request{Kind: kind, Op: o, Secrets: login})
		return got.GetResultJson(), err
	}
	for _, tt := range []struct {
		kind, operation, args, want string
		code                        errs.Code
	}{
		{"bmc.query", "power.getPower", ``, `"off"`, ""},
		{"bmc.query", "power.getPower", `[1]`, ``, errs.InvalidArgs},
		{"bmc.boot", "management.setBootDevice", `[{"device":"pxe","efi":true}]`, `null`, ""},
		{"bmc.boot", "management.setBootDevice", `[{"device":"pxe","speed":3}]`, ``, errs.InvalidArgs},
		{"bmc.query", "management.getBootDevice", `[]`, `{"device":"pxe","persistent":false,"efi":true}`, ""},
		{"bmc.power", "power.setPower", `"on"`, `null`, ""},
		{"bmc.power", "power.setPower", `["sideways"]`, ``, errs.InvalidArgs},
		{"bmc.query", "power.getPower", `[]`, `"on"`, ""},
	} {
		got, err := do(r, tt.kind, tt.operation, tt.args, nil)
		if got != tt.want || errs.CodeOf(err) != tt.code {
			t.Errorf("%s %s(%s) = %s, %v, want %s, code %q", tt.kind, tt.operation, tt.args, got, err, tt.want, tt.code)
		}
	}
	if got, want := b.Log(), []string{"bootdev pxe efi once", "on pxe efi once"}; !reflect.DeepEqual(got, want) {
		t.Errorf("the machine saw %q, want %q", got, want)
	}
	// A wrong enrolment can be mended: what sent nothing taught nothing.
	flipped := []byte(b.SPKI())
	if flipped[63] = '0'; b.SPKI()[63] == '0' {
		flipped[63] = '1'
	}
	book := memoryBook(t)
	for _, tt := range []struct {
		name   string
		change func(*bmcv1.BmcOperationRequest)
		want   errs.Code
	}{
		{"over http", func(o *bmcv1.BmcOperationRequest) { o.Address = "http://" + b.Addr() }, errs.InvalidAddress},
		{"another pin", func(o *bmcv1.BmcOperationRequest) { o.TlsSpkiSha256 = string(flipped) }, errs.PinMismatch},
		{"no pin for a certificate of nobody's", func(o *bmcv1.BmcOperationRequest) { o.TlsSpkiSha256 = "" }, errs.PinMismatch},
		{"its pin", nil, ""},
	} {
		if _, err := do(with(book), "bmc.query", "power.getPower", "", tt.change); errs.CodeOf(err) != tt.want {
			t.Errorf("%s: %v, want code %q", tt.name, err, tt.want)
		}
		if book.Has(b.Addr()) != (tt.want == "") {
			t.Errorf("%s: the address is in the book: %v", tt.name, book.Has(b.Addr()))
		}
	}
	if strings.Contains(logged.String(), "hunter2") {
		t.Errorf("the log holds the password: %s", logged.String())
	}
}

// TestReady: a BMC that accepts no connection is found out before anything is
// begun; nothing knocks at an address that the credential is not for, nor again
// while the BMC answers.
func TestReady(t *testing.T) {
	knocks, fail := 0, error(nil)
	p := &plugins{result: `"on"`}
	b := &board{}
	now := time.Unix(1e9, 0)
	r := New(Options{Book: memoryBook(t), Plugins: p, BuiltIn: []*driver.Definition{definition(t, "redfish", b)}, Now: func() time.Time { return now },
		Knock: func(context.Context, string) error { knocks++; return fail }})
	over := func(change func(*bmcv1.BmcOperationRequest)) *bmcv1.BmcOperationRequest {
		return op(func(o *bmcv1.BmcOperationRequest) {
			o.Driver = "redfish"
			if change != nil {
				change(o)
			}
		})
	}
	fail = errs.New(errs.Internal, "refused")
	for n := range 5 {
		if err := r.Ready(t.Context(), over(nil)); errs.CodeOf(err) != errs.Unreachable || !errs.From(err).Retryable {
			t.Errorf("Ready() %d of a BMC that is not there = %v, want unreachable, retryable", n, err)
		}
	}
	if knocks != 3 {
		t.Errorf("%d knocks, want 3 and then the breaker", knocks)
	}
	now, fail, knocks = now.Add(time.Minute), nil, 0
	for range 3 {
		if err := r.Ready(t.Context(), over(nil)); err != nil {
			t.Errorf("Ready() of one that is back = %v", err)
		}
		if _, err := r.Do(t.Context(), Request{Kind: Query, Op: over(nil), Secrets: login}); err != nil {
			t.Errorf("Do() of one that is back = %v", err)
		}
	}
	if knocks != 1 {
		t.Errorf("%d knocks at a BMC that answers, want 1", knocks)
	}
	now = now.Add(2 * time.Minute)
	if err := r.Ready(t.Context(), over(func(o *bmcv1.BmcOperationRequest) { o.CredentialsRef = "secret://root/bmc-2" })); errs.CodeOf(err) != errs.BindingMismatch || knocks != 1 {
		t.Errorf("Ready() with another credential = %v after %d knocks, want binding-mismatch and none", err, knocks)
	}
	if err := r.Ready(t.Context(), op(nil)); err != nil || knocks != 1 {
		t.Errorf("Ready() of a driver over UDP = %v after %d knocks, want none", err, knocks)
	}
}
