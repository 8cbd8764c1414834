package relay

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
)

const pin = "00112233445566778899aabbccddeeff00112233445566778899AABBCCDDEEFF"

func op(change func(*bmcv1.BmcOperationRequest)) *bmcv1.BmcOperationRequest {
	o := &bmcv1.BmcOperationRequest{Driver: "ipmi", Address: "10.0.0.5", CredentialsRef: "secret://root/bmc-1", Operation: "power.getPower"}
	if change != nil {
		change(o)
	}
	return o
}

func TestCheck(t *testing.T) {
	type request = bmcv1.BmcOperationRequest
	power := func(args string) func(*request) {
		return func(o *request) { o.Operation, o.ArgsJson = "power.setPower", args }
	}
	query := Operation{Key: "10.0.0.5:623", RetrySafe: true}
	down := Operation{Key: "10.0.0.5:623", Destructive: true}
	for _, tt := range []struct {
		name, kind string
		change     func(*request)
		want       Operation
		code       errs.Code
	}{
		{"query", "bmc.query", nil, query, ""},
		{"query with options and pin", "bmc.query", func(o *request) { o.DriverOptionsJson, o.TlsSpkiSha256 = `{"cipherSuite":3}`, pin }, query, ""},
		{"boot", "bmc.boot", func(o *request) { o.Operation, o.ArgsJson = "management.setBootDevice", `{"device":"pxe"}` }, query, ""},
		{"on", "bmc.power", power(`["on"]`), Operation{Key: "10.0.0.5:623"}, ""},
		{"on as the single argument", "bmc.power", power(`"on"`), Operation{Key: "10.0.0.5:623"}, ""},
		{"off", "bmc.power", power(`["off"]`), down, ""},
		{"cycle", "bmc.power", power(` "cycle" `), down, ""},
		{"an action that nobody knows", "bmc.power", power(`["on2"]`), down, ""},
		{"on with something more", "bmc.power", power(`["on","off"]`), down, ""},
		{"no action", "bmc.power", power(``), down, ""},
		{"reset of the BMC", "bmc.power", func(o *request) { o.Operation = "management.resetBmc" }, down, ""},
		{"redfish", "bmc.query", func(o *request) { o.Driver, o.Address = "redfish", "https://BMC.example" }, Operation{Key: "bmc.example:443", RetrySafe: true}, ""},

		{"insert", "bmc.media", func(o *request) { o.Operation, o.ArgsJson = "virtual-media.insert", `["http://10.0.0.1/x.iso"]` }, query, ""},
		{"eject", "bmc.media", func(o *request) { o.Operation = "virtual-media.eject" }, query, ""},
		{"power through media", "bmc.media", power(`["off"]`), Operation{}, errs.OperationNotAllowed},
		{"unknown kind", "bmc.firmware", nil, Operation{}, errs.UnknownKind},
		{"power through a query", "bmc.query", power(`["off"]`), Operation{}, errs.OperationNotAllowed},
		{"query through power", "bmc.power", nil, Operation{}, errs.OperationNotAllowed},
		{"boot through power", "bmc.power", func(o *request) { o.Operation = "management.setBootDevice" }, Operation{}, errs.OperationNotAllowed},
		{"no operation", "bmc.query", func(o *request) { o.Operation = "" }, Operation{}, errs.OperationNotAllowed},
		{"driver", "bmc.query", func(o *request) { o.Driver = "../ipmi" }, Operation{}, errs.InvalidPayload},
		{"literal credential", "bmc.query", func(o *request) { o.CredentialsRef = "admin:pw" }, Operation{}, errs.InvalidPayload},
		{"no credential", "bmc.query", func(o *request) { o.CredentialsRef = "" }, Operation{}, errs.InvalidPayload},
		{"address", "bmc.query", func(o *request) { o.Address = "10.0.0.5/x" }, Operation{}, errs.InvalidAddress},
		{"short pin", "bmc.query", func(o *request) { o.TlsSpkiSha256 = "aabb" }, Operation{}, errs.InvalidConfig},
		{"pin that is no hex", "bmc.query", func(o *request) { o.TlsSpkiSha256 = strings.Repeat("z", 64) }, Operation{}, errs.InvalidConfig},
		{"options array", "bmc.query", func(o *request) { o.DriverOptionsJson = `[]` }, Operation{}, errs.InvalidPayload},
		{"options null", "bmc.query", func(o *request) { o.DriverOptionsJson = `null` }, Operation{}, errs.InvalidPayload},
		{"options torn", "bmc.query", func(o *request) { o.DriverOptionsJson = `{` }, Operation{}, errs.InvalidPayload},
		{"redfish with options", "bmc.query", func(o *request) { o.Driver, o.DriverOptionsJson = "redfish", `{}` }, Operation{}, errs.InvalidConfig},
		{"args torn", "bmc.query", func(o *request) { o.ArgsJson = `["on"` }, Operation{}, errs.InvalidArgs},
	} {
		got, err := Check(tt.kind, op(tt.change))
		if got != tt.want || errs.CodeOf(err) != tt.code {
			t.Errorf("%s: Check() = %+v, %v, want %+v, code %q", tt.name, got, err, tt.want, tt.code)
		}
	}
	if _, err := Check("bmc.query", nil); errs.CodeOf(err) != errs.InvalidPayload {
		t.Errorf("Check(nil) = %v, want invalid-payload", err)
	}
}

// plugins is an Invoker that records its calls.
type plugins struct {
	calls  []Call
	result string
	err    error
	wait   bool
}

func (p *plugins) Invoke(ctx context.Context, call Call) (json.RawMessage, error) {
	p.calls = append(p.calls, call)
	if p.wait {
		<-ctx.Done()
		return nil, fmt.Errorf("invoke: %w", ctx.Err())
	}
	return json.RawMessage(p.result), p.err
}

func login(context.Context) (map[string]secret.Value, error) {
	return map[string]secret.Value{
		"username": secret.New([]byte("ADMIN")), "password": secret.New([]byte("hunter2")), "more": secret.New([]byte("x")),
	}, nil
}

func relayWith(t *testing.T, p Invoker) (*Relay, *addressbook.Book) {
	t.Helper()
	book, err := addressbook.Open(filepath.Join(t.TempDir(), "bmcs.json"))
	if err != nil {
		t.Fatal(err)
	}
	return New(Options{Book: book, Plugins: p}), book
}

func TestDoInvokesThePlugin(t *testing.T) {
	p := &plugins{result: `"on"`}
	r, book := relayWith(t, p)
	deadline := time.Now().Add(time.Minute)
	got, err := r.Do(t.Context(), Request{
		Kind: "bmc.query", CommandID: "cmd_1", TargetNodeID: "node_1", Traceparent: "00-x", Deadline: deadline, Credentials: login,
		Op: op(func(o *bmcv1.BmcOperationRequest) {
			o.TlsSpkiSha256, o.DriverOptionsJson = pin, `{"address":"10.9.9.9","cipherSuite":3}`
		}),
	})
	if err != nil || got.GetResultJson() != `"on"` {
		t.Fatalf("Do() = %v, %v, want \"on\"", got, err)
	}
	call := p.calls[0]
	if got, want := string(call.Config), `{"address":"10.0.0.5","tlsSpkiSha256":"`+strings.ToLower(pin)+`","options":{"address":"10.9.9.9","cipherSuite":3}}`; got != want {
		t.Errorf("config = %s, want %s", got, want)
	}
	if call.Driver != "ipmi" || call.Concern != "power" || call.Operation != "getPower" || string(call.Args) != "[]" {
		t.Errorf("call = %s %s.%s%s, want ipmi power.getPower[]", call.Driver, call.Concern, call.Operation, call.Args)
	}
	if call.IdempotencyKey != "cmd_1" || call.TargetNodeID != "node_1" || call.Traceparent != "00-x" || !call.Deadline.Equal(deadline) {
		t.Errorf("call = %+v", call)
	}
	if len(call.Secrets) != 2 || string(call.Secrets["password"].Reveal()) != "hunter2" || string(call.Secrets["username"].Reveal()) != "ADMIN" {
		t.Errorf("secrets = %d of them, want username and password alone", len(call.Secrets))
	}
	if !book.Has("10.0.0.5:623") {
		t.Error("the address is not in the book")
	}
}

// Nothing is sent to an address with a credential, pin or driver that is not its own.
func TestDoKeepsCredentialsApart(t *testing.T) {
	p := &plugins{result: `"on"`}
	r, _ := relayWith(t, p)
	fetched := 0
	do := func(change func(*bmcv1.BmcOperationRequest)) error {
		_, err := r.Do(t.Context(), Request{Kind: "bmc.query", Op: op(change), Credentials: func(ctx context.Context) (map[string]secret.Value, error) {
			fetched++
			return login(ctx)
		}})
		return err
	}
	if err := do(nil); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*bmcv1.BmcOperationRequest){
		"another credential": func(o *bmcv1.BmcOperationRequest) { o.CredentialsRef = "secret://root/bmc-2" },
		"another pin":        func(o *bmcv1.BmcOperationRequest) { o.TlsSpkiSha256 = pin },
		"another driver":     func(o *bmcv1.BmcOperationRequest) { o.Driver, o.Address = "acme", "10.0.0.5:623" },
	} {
		if err := do(change); errs.CodeOf(err) != errs.BindingMismatch {
			t.Errorf("%s: Do() = %v, want binding-mismatch", name, err)
		}
	}
	if err := do(func(o *bmcv1.BmcOperationRequest) { o.Address = "ipmi://10.0.0.5:623" }); err != nil {
		t.Errorf("the same BMC, written otherwise: Do() = %v", err)
	}
	if len(p.calls) != 2 || fetched != 2 {
		t.Errorf("%d calls and %d credentials fetched, want 2 and 2", len(p.calls), fetched)
	}
}

func TestDoErrors(t *testing.T) {
	for _, tt := range []struct {
		name    string
		plugins Invoker
		request func(*Request)
		code    errs.Code
		retry   bool
		learned bool
	}{
		{"no plugins", nil, nil, errs.UnsupportedDriver, false, false},
		{"no such driver", &plugins{err: errs.New(errs.UnsupportedDriver, "no hosted driver ipmi implements power")}, nil, errs.UnsupportedDriver, false, false},
		{"pin that the driver cannot check", &plugins{err: errs.New(errs.PinUnsupported, "no TLS")}, nil, errs.PinUnsupported, false, false},
		{"a driver's own code", &plugins{err: errs.Retry("fan-stuck", "fan 3")}, nil, "fan-stuck", true, true},
		{"wrapped", &plugins{err: fmt.Errorf("invoke: %w", errs.Retry(errs.BmcError, "no answer"))}, nil, errs.BmcError, true, true},
		{"plugin restarts", &plugins{err: errs.Retry(errs.Unavailable, "restarting")}, nil, errs.Unavailable, true, false},
		{"no JSON", &plugins{result: "Chassis Power is on"}, nil, errs.BmcError, false, true},
		{"no UTF-8", &plugins{result: "\"\xff\""}, nil, errs.BmcError, false, true},
		{"nothing", &plugins{}, nil, errs.BmcError, false, true},
		{"no code", &plugins{err: errors.New("broken")}, nil, errs.Internal, false, true},
		{"late", &plugins{wait: true}, func(r *Request) { r.Deadline = time.Now().Add(20 * time.Millisecond) }, errs.Timeout, true, true},
		{"no credential", &plugins{result: "1"}, func(r *Request) {
			r.Credentials = func(context.Context) (map[string]secret.Value, error) {
				return nil, errs.New(errs.CredentialsUnavailable, "no such secret")
			}
		}, errs.CredentialsUnavailable, false, false},
		{"no password", &plugins{result: "1"}, func(r *Request) {
			r.Credentials = func(context.Context) (map[string]secret.Value, error) {
				return map[string]secret.Value{"username": secret.New([]byte("u"))}, nil
			}
		}, errs.CredentialsUnavailable, false, false},
		{"not allowed", &plugins{result: "1"}, func(r *Request) { r.Kind = "bmc.boot" }, errs.OperationNotAllowed, false, false},
	} {
		r, book := relayWith(t, tt.plugins)
		req := Request{Kind: "bmc.query", Op: op(nil), Credentials: login}
		if tt.request != nil {
			tt.request(&req)
		}
		got, err := r.Do(t.Context(), req)
		if got != nil || errs.CodeOf(err) != tt.code || errs.From(err).Retryable != tt.retry {
			t.Errorf("%s: Do() = %v, %v, want code %q, retryable %v", tt.name, got, err, tt.code, tt.retry)
		}
		if book.Has("10.0.0.5") != tt.learned {
			t.Errorf("%s: the address is in the book: %v, want %v", tt.name, !tt.learned, tt.learned)
		}
		if err != nil && strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: the error holds the password: %v", tt.name, err)
		}
	}
}

// What an earlier use taught stays, whatever a later one meets.
func TestDoForgetsOnlyItsOwn(t *testing.T) {
	p := &plugins{result: `"on"`}
	r, book := relayWith(t, p)
	if _, err := r.Do(t.Context(), Request{Kind: "bmc.query", Op: op(nil), Credentials: login}); err != nil {
		t.Fatal(err)
	}
	p.err = errs.New(errs.InvalidConfig, "no")
	if _, err := r.Do(t.Context(), Request{Kind: "bmc.query", Op: op(nil), Credentials: login}); errs.CodeOf(err) != errs.InvalidConfig {
		t.Fatal(err)
	}
	if !book.Has("10.0.0.5") {
		t.Error("a known binding was forgotten")
	}
}

func TestDoRedfish(t *testing.T) {
	m := bmctest.NewFake()
	b, err := bmctest.StartRedfish(t.Context(), "127.0.0.1:0", "ADMIN", "hunter2", m, bmctest.OffInterval(time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	var logged bytes.Buffer
	book, err := addressbook.Open("")
	if err != nil {
		t.Fatal(err)
	}
	r := New(Options{Book: book, Log: slog.New(slog.NewTextHandler(&logged, nil))})
	do := func(kind, operation, args string, change func(*bmcv1.BmcOperationRequest)) (string, error) {
		o := op(func(o *bmcv1.BmcOperationRequest) {
			o.Driver, o.Address, o.TlsSpkiSha256, o.Operation, o.ArgsJson = "redfish", "https://"+b.Addr(), b.SPKI(), operation, args
		})
		if change != nil {
			change(o)
		}
		got, err := r.Do(t.Context(), Request{Kind: kind, Op: o, Credentials: login})
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
		{"bmc.query", "inspect.inspect", `[]`, ``, errs.UnsupportedOperation},
		{"bmc.power", "management.resetBmc", `[]`, ``, errs.UnsupportedOperation},
	} {
		got, err := do(tt.kind, tt.operation, tt.args, nil)
		if got != tt.want || errs.CodeOf(err) != tt.code {
			t.Errorf("%s %s(%s) = %s, %v, want %s, code %q", tt.kind, tt.operation, tt.args, got, err, tt.want, tt.code)
		}
	}
	if got, want := b.Log(), []string{"bootdev pxe efi once", "on pxe efi once"}; !reflect.DeepEqual(got, want) {
		t.Errorf("the machine saw %q, want %q", got, want)
	}
	if _, err := do("bmc.query", "power.getPower", "", func(o *bmcv1.BmcOperationRequest) {
		o.Address = "http://" + b.Addr()
	}); errs.CodeOf(err) != errs.InvalidAddress {
		t.Errorf("redfish over http = %v, want invalid-address", err)
	}
	flipped := []byte(b.SPKI())
	flipped[63] = "0123456789abcdef1"[strings.IndexByte("0123456789abcdef", flipped[63])+1]
	empty := must(addressbook.Open(""))
	_, err = New(Options{Book: empty}).Do(t.Context(), Request{Kind: "bmc.query", Credentials: login, Op: op(func(o *bmcv1.BmcOperationRequest) {
		o.Driver, o.Address, o.TlsSpkiSha256 = "redfish", b.Addr(), string(flipped)
	})})
	if errs.CodeOf(err) != errs.PinMismatch {
		t.Errorf("redfish with another pin = %v, want pin-mismatch", err)
	}
	if empty.Has(b.Addr()) {
		t.Error("a pin that the BMC does not have was learned")
	}
	// A forgotten pin can be added: without it nothing was sent.
	for _, tt := range []struct {
		pin  string
		want errs.Code
	}{{"", errs.PinMismatch}, {b.SPKI(), ""}} {
		_, err := New(Options{Book: empty}).Do(t.Context(), Request{Kind: "bmc.query", Credentials: login, Op: op(func(o *bmcv1.BmcOperationRequest) {
			o.Driver, o.Address, o.TlsSpkiSha256 = "redfish", b.Addr(), tt.pin
		})})
		if errs.CodeOf(err) != tt.want {
			t.Errorf("redfish with the pin %q = %v, want code %q", tt.pin, err, tt.want)
		}
	}
	if strings.Contains(logged.String(), "hunter2") {
		t.Errorf("the log holds the password: %s", logged.String())
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func FuzzCheck(f *testing.F) {
	for _, o := range []*bmcv1.BmcOperationRequest{op(nil), op(func(o *bmcv1.BmcOperationRequest) {
		o.Operation, o.ArgsJson, o.DriverOptionsJson = "power.setPower", `["on"]`, `{"a":1}`
	})} {
		data, err := proto.Marshal(o)
		if err != nil {
			f.Fatal(err)
		}
		f.Add("bmc.power", data)
		f.Add("bmc.query", data)
	}
	f.Fuzz(func(t *testing.T, kind string, data []byte) {
		var o bmcv1.BmcOperationRequest
		if proto.Unmarshal(data, &o) != nil {
			return
		}
		got, err := Check(kind, &o)
		if err == nil && (got.Key == "" || got.RetrySafe && got.Destructive) {
			t.Errorf("Check(%q, %v) = %+v", kind, &o, got)
		}
	})
}
