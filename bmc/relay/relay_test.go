package relay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
)

// digest is a SHA-256.
const digest = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

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
	const key = "10.0.0.5:623"
	query := Operation{Key: key, RetrySafe: true}
	on := Operation{Key: key, Action: "on"}
	down := func(action string) Operation {
		return Operation{Key: key, Action: action, Destructive: true, Counts: true}
	}
	counts := down("")
	always := Operation{Key: key, Destructive: true, Counts: true, Always: true}
	update := always
	update.Artifacts = []string{digest}
	other := func(operation, args string) func(*request) {
		return func(o *request) { o.Operation, o.ArgsJson = operation, args }
	}
	for _, tt := range []struct {
		name, kind string
		change     func(*request)
		want       Operation
		code       errs.Code
	}{
		{"query", "bmc.query", nil, query, ""},
		{"query with options and pin", "bmc.query", func(o *request) { o.DriverOptionsJson, o.TlsSpkiSha256 = `{"cipherSuite":3}`, pin }, query, ""},
		{"boot", "bmc.boot", func(o *request) { o.Operation, o.ArgsJson = "management.setBootDevice", `{"device":"pxe"}` }, query, ""},
		{"on", "bmc.power", power(`["on"]`), on, ""},
		{"on as the single argument", "bmc.power", power(`"on"`), on, ""},
		{"off", "bmc.power", power(`["off"]`), down("off"), ""},
		{"cycle", "bmc.power", power(` "cycle" `), down("cycle"), ""},
		{"nmi", "bmc.power", power(`["nmi",null]`), down("nmi"), ""},
		{"on and what was left out", "bmc.power", power(`["on",null,null]`), on, ""},
		{"on in other letters", "bmc.power", power(`["\u006fn"]`), on, ""},
		{"on inside a list", "bmc.power", power(`[["on"]]`), counts, ""},
		{"an action that nobody knows", "bmc.power", power(`["on2"]`), counts, ""},
		{"on with something more", "bmc.power", power(`["on","off"]`), counts, ""},
		{"no action", "bmc.power", power(``), counts, ""},
		{"reset of the BMC", "bmc.power", func(o *request) { o.Operation = "management.resetBmc" }, counts, ""},
		{"redfish", "bmc.query", func(o *request) { o.Driver, o.Address = "redfish", "https://BMC.example" }, Operation{Key: "bmc.example:443", RetrySafe: true}, ""},

		{"insert", "bmc.media", func(o *request) { o.Operation, o.ArgsJson = "virtual-media.insert", `["http://10.0.0.1/x.iso"]` }, query, ""},
		{"eject", "bmc.media", func(o *request) { o.Operation = "virtual-media.eject" }, query, ""},
		{"power through media", "bmc.media", power(`["off"]`), Operation{}, errs.OperationNotAllowed},
		{"bios", "bmc.bios", other("bios.applySettings", `[{"BootMode":"Uefi"}]`), counts, ""},
		{"bios reset", "bmc.bios", other("bios.resetSettings", ``), counts, ""},
		{"raid", "bmc.raid", other("raid.applyLayout", `[{"volumes":[]}]`), always, ""},
		{"raid query", "bmc.query", other("raid.getLayout", ``), query, ""},
		{"firmware", "bmc.firmware", other("firmware.update", `{"component":"BIOS","url":"https://x/a","sha256":"`+digest+`"}`), update, ""},
		{"firmware of the site's own", "bmc.firmware", other("firmware.update", `{"component":"BIOS","url":"artifact://bios","sha256":"`+digest+`"}`), update, ""},
		{"firmware that nobody can read", "bmc.firmware", other("firmware.update", `[1]`), always, ""},
		{"console", "bmc.console", other("console.open", ``), Operation{Key: key}, ""},
		{"rotation", "bmc.rotate", other("credentials.rotate", `[{"newPassword":"secret://root/next"}]`), counts, ""},
		{"rotation of another account", "bmc.rotate", other("credentials.rotate", `{"username":"ops","newPassword":"secret://root/next"}`), counts, ""},
		{"rotation to a literal", "bmc.rotate", other("credentials.rotate", `[{"newPassword":"hunter3"}]`), Operation{}, errs.InvalidPayload},
		{"rotation with another literal", "bmc.rotate", other("credentials.rotate", `[{"newPassword":"secret://root/next","NewPassword":"hunter3"}]`), Operation{}, errs.InvalidPayload},
		{"rotation to itself", "bmc.rotate", other("credentials.rotate", `[{"newPassword":"secret://root/bmc-1"}]`), Operation{}, errs.InvalidPayload},
		{"rotation to nothing", "bmc.rotate", other("credentials.rotate", `[]`), Operation{}, errs.InvalidArgs},
		{"rotation through power", "bmc.power", other("credentials.rotate", `[{"newPassword":"secret://root/next"}]`), Operation{}, errs.OperationNotAllowed},
		{"firmware through media", "bmc.media", other("firmware.update", `[]`), Operation{}, errs.OperationNotAllowed},
		{"wake without a credential", "bmc.power", func(o *request) {
			o.Driver, o.Address, o.CredentialsRef, o.Operation, o.ArgsJson = "wol", "52:54:00:AB:CD:EF", "", "power.setPower", `["on"]`
		}, Operation{Key: "52:54:00:ab:cd:ef", Action: "on"}, ""},
		{"by hand without a credential", "bmc.power", func(o *request) {
			o.Driver, o.Address, o.CredentialsRef, o.Operation, o.ArgsJson = "manual", "Rack-3", "", "power.setPower", `["off"]`
		}, Operation{Key: "manual/rack-3", Action: "off", Destructive: true, Counts: true}, ""},
		{"unknown kind", "bmc.other", nil, Operation{}, errs.UnknownKind},
		{"bind is no operation", "bmc.bind", nil, Operation{}, errs.UnknownKind},
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
		{"args at the bound", "bmc.power", power(`"on"` + strings.Repeat(" ", maxArgs-4)), on, ""},
		{"args over the bound", "bmc.power", power(`"on"` + strings.Repeat(" ", maxArgs-3)), Operation{}, errs.InvalidArgs},
	} {
		got, err := Check(tt.kind, op(tt.change))
		if err != nil {
			got = Operation{}
		}
		if !reflect.DeepEqual(got, tt.want) || errs.CodeOf(err) != tt.code {
			t.Errorf("%s: Check() = %+v, %v, want %+v, code %q", tt.name, got, err, tt.want, tt.code)
		}
		if err != nil && strings.Contains(err.Error(), "hunter3") {
			t.Errorf("%s: the error repeats the password: %v", tt.name, err)
		}
	}
	if _, err := Check("bmc.query", nil); errs.CodeOf(err) != errs.InvalidPayload {
		t.Errorf("Check(nil) = %v, want invalid-payload", err)
	}
}

// plugins is an Invoker that records its calls.
type plugins struct {
	calls  []Call
	unsafe bool
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

// RetrySafe lists every operation, or none.
func (p *plugins) RetrySafe(driver, _, _ string) (safe, known bool) {
	return !p.unsafe, driver == "ipmi"
}

// login is every credential's, and the new password of every rotation.
func login(_ context.Context, refs ...string) (map[string]secret.Value, error) {
	values := map[string]secret.Value{}
	for _, ref := range refs {
		values[ref] = secret.New([]byte(`{"username":"ADMIN","password":"hunter2","more":"x"}`))
		if strings.HasSuffix(ref, "/next") {
			values[ref] = secret.New([]byte("hunter3"))
		}
	}
	return values, nil
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
		Kind: "bmc.query", CommandID: "cmd_1", TargetNodeID: "node_1", Traceparent: "00-x", Deadline: deadline, Secrets: login,
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
		_, err := r.Do(t.Context(), Request{Kind: "bmc.query", Op: op(change), Secrets: func(ctx context.Context, refs ...string) (map[string]secret.Value, error) {
			fetched++
			return login(ctx, refs...)
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
			r.Secrets = func(context.Context, ...string) (map[string]secret.Value, error) {
				return nil, errs.New(errs.CredentialsUnavailable, "no such secret")
			}
		}, errs.CredentialsUnavailable, false, false},
		{"no password", &plugins{result: "1"}, func(r *Request) {
			r.Secrets = func(_ context.Context, refs ...string) (map[string]secret.Value, error) {
				return map[string]secret.Value{refs[0]: secret.New([]byte(`{"username":"u"}`))}, nil
			}
		}, errs.CredentialsUnavailable, false, false},
		{"credential of another form", &plugins{result: "1"}, func(r *Request) {
			r.Secrets = func(_ context.Context, refs ...string) (map[string]secret.Value, error) {
				return map[string]secret.Value{refs[0]: secret.New([]byte("hunter2"))}, nil
			}
		}, errs.CredentialsUnavailable, false, false},
		{"not listed as safe to repeat", &plugins{err: errs.Retry("fan-stuck", "fan 3"), unsafe: true}, nil, "fan-stuck", false, true},
		{"not listed, and the plugin restarts", &plugins{err: errs.Retry(errs.Unavailable, "restarting"), unsafe: true}, nil, errs.Unavailable, true, false},
		{"not allowed", &plugins{result: "1"}, func(r *Request) { r.Kind = "bmc.boot" }, errs.OperationNotAllowed, false, false},
	} {
		r, book := relayWith(t, tt.plugins)
		req := Request{Kind: "bmc.query", Op: op(nil), Secrets: login}
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
	if _, err := r.Do(t.Context(), Request{Kind: "bmc.query", Op: op(nil), Secrets: login}); err != nil {
		t.Fatal(err)
	}
	p.err = errs.New(errs.InvalidConfig, "no")
	if _, err := r.Do(t.Context(), Request{Kind: "bmc.query", Op: op(nil), Secrets: login}); errs.CodeOf(err) != errs.InvalidConfig {
		t.Fatal(err)
	}
	if !book.Has("10.0.0.5") {
		t.Error("a known binding was forgotten")
	}
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
		if err == nil && (got.Key == "" || got.RetrySafe && got.Destructive || got.Always && !got.Counts) {
			t.Errorf("Check(%q, %v) = %+v", kind, &o, got)
		}
	})
}
