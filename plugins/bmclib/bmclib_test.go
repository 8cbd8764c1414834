package bmclib

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
)

// find is one vendor's driver.
func find(t *testing.T, o options, id string) *driver.Definition {
	t.Helper()
	drivers, err := define(o)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(drivers, func(d *driver.Definition) bool { return d.ID() == id })
	if i < 0 {
		t.Fatalf("there is no driver %s", id)
	}
	return drivers[i]
}

// run runs one operation of a driver in this process.
func run(t *testing.T, ctx context.Context, d *driver.Definition, config object, operation, args string) (string, error) {
	t.Helper()
	raw, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	call, _ := drivertest.Context(t, ctx, map[string]string{"username": user, "password": password})
	kind, name, _ := strings.Cut(operation, ".")
	out, err := d.Invoke(call, kind, name, raw, json.RawMessage(args))
	return string(out), err
}

func pinned(b *bmc) object { return object{"address": b.addr(), "tlsSpkiSha256": b.pin()} }

func ids() []string {
	var list []string
	for _, v := range vendors() {
		list = append(list, v.id)
	}
	return list
}

// The pin alone decides where there is one, and the authorities where there is
// none. Whatever they refuse is sent nothing: no password, not even a request.
func TestEveryVendorVerifiesTheBMC(t *testing.T) {
	for _, id := range ids() {
		b := newBMC(t, id)
		trusted := x509.NewCertPool()
		trusted.AddCert(b.Certificate())
		for _, tt := range []struct {
			name string
			o    options
			pin  string
			code errs.Code
		}{
			{"pin", options{}, b.pin(), ""},
			{"pin in upper case", options{}, strings.ToUpper(b.pin()), ""},
			{"another's pin", options{}, strings.Repeat("ab", 32), errs.PinMismatch},
			{"another's pin under a trusted authority", options{trusted}, strings.Repeat("ab", 32), errs.PinMismatch},
			{"no pin, unknown authority", options{}, "", errs.PinMismatch},
			{"no pin, trusted authority", options{trusted}, "", ""},
		} {
			before := len(b.asked())
			out, err := run(t, t.Context(), find(t, tt.o, id), object{"address": "https://" + b.addr(), "tlsSpkiSha256": tt.pin}, "power.getPower", "")
			if errs.CodeOf(err) != tt.code || err == nil && out != `"off"` {
				t.Errorf("%s, %s: getPower = %s, %v, want %q", id, tt.name, out, err, tt.code)
			}
			if n := len(b.asked()) - before; (n > 0) != (tt.code == "") {
				t.Errorf("%s, %s: the BMC got %d requests", id, tt.name, n)
			}
		}
	}
}

// An inspection leaves the BMC as it was, and no session behind.
func TestInspectionChangesNothing(t *testing.T) {
	for _, id := range ids() {
		b := newBMC(t, id)
		d := find(t, options{}, id)
		out, err := run(t, t.Context(), d, pinned(b), "inspect.inspect", "")
		if !slices.Contains(d.Manifest().Kinds, "inspect") {
			if errs.CodeOf(err) != errs.UnsupportedDriver {
				t.Errorf("%s: inspect = %v, want unsupported-driver", id, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: inspect: %v", id, err)
			continue
		}
		for _, r := range b.asked() {
			method, path, _ := strings.Cut(r, " ")
			if method != http.MethodGet && !strings.Contains(path, "ession") && path != "/cgi/login.cgi" && path != "/cgi/ipmi.cgi" {
				t.Errorf("%s: an inspection asked %s", id, r)
			}
		}
		if did := b.did(); len(did) != 0 || b.open() != 0 {
			t.Errorf("%s: an inspection did %q and left %d sessions", id, did, b.open())
		}
		for _, want := range []string{`"source":"` + id + `"`, `"serial":"SN?[2J-1"`, `"power":"off"`, `"component":"BIOS"`, `"processors":[{"model":"Xeon X"`} {
			if !strings.Contains(out, want) {
				t.Errorf("%s: inspect = %s, want %s in it", id, out, want)
			}
		}
	}
}

// What a provider would do in place of what was asked does not happen, and what
// it calls a success without reason is none.
func TestOneRequestThatIsTheActionAsked(t *testing.T) {
	refuse := func(path string, status int) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.Contains(r.URL.Path, path) || r.Method != http.MethodPost {
				return false
			}
			w.WriteHeader(status)
			return true
		}
	}
	amtReturns := func(w http.ResponseWriter, r *http.Request) bool {
		if r.Header.Get("Authorization") == "" {
			return false
		}
		body := make([]byte, 1<<16)
		n, _ := r.Body.Read(body)
		if !strings.Contains(string(body[:n]), "RequestPowerStateChange_INPUT") {
			return false
		}
		fmt.Fprintf(w, `<?xml version="1.0"?><s:Envelope xmlns:s="http://www.w3.org/2003/05/soap-envelope"><s:Header/><s:Body><p:RequestPowerStateChange_OUTPUT xmlns:p="%sCIM_PowerManagementService"><p:ReturnValue>2</p:ReturnValue></p:RequestPowerStateChange_OUTPUT></s:Body></s:Envelope>`, cim)
		return true
	}
	const resets = "/Actions/ComputerSystem.Reset"
	for _, tt := range []struct {
		name, id, action string
		on               bool
		set              func(b *bmc)
		code             errs.Code
		message          string
		did              []string
	}{
		{"cycle that the BMC does not list", "dell", "cycle", true, func(b *bmc) { b.resets = []string{"On", "ForceOff", "GracefulShutdown"} }, errs.BmcError, "does not take PowerCycle", nil},
		{"cycle that the BMC refuses", "openbmc", "cycle", true, func(b *bmc) { b.fault = refuse(resets, 500) }, errs.BmcError, "500", nil},
		{"reset that the BMC refuses", "supermicro", "reset", true, func(b *bmc) { b.fault = refuse(resets, 400) }, errs.BmcError, "400", nil},
		{"on that the BMC refuses", "dell", "on", false, func(b *bmc) { b.fault = refuse(resets, 503) }, errs.BmcError, "503", nil},
		{"cycle of a machine that is off", "dell", "cycle", false, nil, errs.BmcError, "is off", nil},
		{"reset of a machine that is off", "asrockrack", "reset", false, nil, errs.BmcError, "is off", nil},
		{"cycle of a machine that is off", "intel-amt", "cycle", false, nil, errs.BmcError, "is off", nil},
		{"on when on", "dell", "on", true, nil, "", "", nil},
		{"off when off", "intel-amt", "off", false, nil, "", "", nil},
		{"hard off where only graceful is offered", "intel-amt", "off", true, func(b *bmc) { b.states = []string{"12", "5"} }, errs.BmcError, "power state 12, which is not off", nil},
		{"soft off", "intel-amt", "soft", true, func(b *bmc) { b.states = []string{"12", "8", "5"} }, "", "", []string{"state 12"}},
		{"graceful cycle", "intel-amt", "cycle", true, func(b *bmc) { b.states = []string{"15", "10"} }, errs.BmcError, "which is not cycle", nil},
		{"no cycle at all", "intel-amt", "cycle", true, func(b *bmc) { b.states = []string{"8"} }, errs.BmcError, "no implemented transition", nil},
		{"a return value that is no success", "intel-amt", "off", true, func(b *bmc) { b.fault = amtReturns }, errs.BmcError, "answers 2", nil},
		{"a refused command", "asrockrack", "off", true, func(b *bmc) { b.fault = refuse("actions/power", 500) }, errs.BmcError, "500", nil},
	} {
		b := newBMC(t, tt.id)
		b.set(func(b *bmc) {
			b.on = tt.on
			if tt.set != nil {
				tt.set(b)
			}
		})
		_, err := run(t, t.Context(), find(t, options{}, tt.id), pinned(b), "power.setPower", `"`+tt.action+`"`)
		if errs.CodeOf(err) != tt.code || err != nil && !strings.Contains(err.Error(), tt.message) {
			t.Errorf("%s, %s: setPower %s = %v, want %q with %q", tt.id, tt.name, tt.action, err, tt.code, tt.message)
		}
		if did := b.did(); !slices.Equal(did, tt.did) {
			t.Errorf("%s, %s: the machine was told %q, want %q", tt.id, tt.name, did, tt.did)
		}
	}
}

// A BMC that takes a power-off and does not do it is found out.
func TestPowerIsReadBack(t *testing.T) {
	for _, id := range ids() {
		t.Run(id, func(t *testing.T) {
			t.Parallel()
			b := newBMC(t, id)
			b.set(func(b *bmc) { b.on, b.ignore = true, true })
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			_, err := run(t, ctx, find(t, options{}, id), pinned(b), "power.setPower", `"off"`)
			if code := errs.CodeOf(err); code != errs.Timeout {
				t.Errorf("setPower off of a machine that stays on = %v, want timeout", err)
			}
			if did := b.did(); len(did) != 1 {
				t.Errorf("the machine was told %q, want one thing", did)
			}
		})
	}
}

// A BMC that leads elsewhere is not followed, and its token goes nowhere.
func TestNoOtherHostIsAsked(t *testing.T) {
	var elsewhere []string
	var mu sync.Mutex
	trap := httptest.NewTLSServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		elsewhere = append(elsewhere, r.Method+" "+r.URL.Path)
	}))
	defer trap.Close()
	plain := httptest.NewServer(trap.Config.Handler)
	defer plain.Close()
	for _, url := range []string{trap.URL, plain.URL} {
		for _, id := range ids() {
			b := newBMC(t, id)
			b.set(func(b *bmc) {
				b.fault = func(w http.ResponseWriter, r *http.Request) bool {
					switch {
					case r.URL.Path == "/redfish/v1/Systems":
						reply(w, 200, object{"Name": "Systems", "Members": []object{{"@odata.id": url + "/redfish/v1/Systems/1"}}})
					case r.URL.Path == "/redfish/v1/Managers", strings.HasSuffix(r.URL.Path, "chassis-status"), strings.HasSuffix(r.URL.Path, "api/fru"),
						strings.HasPrefix(r.URL.Path, "/cgi/url_redirect"), r.URL.Path == "/wsman" && r.Header.Get("Authorization") != "":
						http.Redirect(w, r, url+r.URL.Path, http.StatusTemporaryRedirect)
					default:
						return false
					}
					return true
				}
			})
			for _, operation := range []string{"power.getPower", "inspect.inspect"} {
				out, err := run(t, t.Context(), find(t, options{}, id), pinned(b), operation, "")
				if code := errs.CodeOf(err); code != errs.BmcError && code != errs.UnsupportedDriver {
					t.Errorf("%s led to %s: %s = %s, %v, want bmc-error", id, url, operation, out, err)
				}
			}
		}
	}
	if len(elsewhere) != 0 {
		t.Errorf("another host was asked: %q", elsewhere)
	}
}

// A redirect is not followed, to the same BMC neither.
func TestNoRedirectIsFollowed(t *testing.T) {
	for _, id := range ids() {
		b := newBMC(t, id)
		b.set(func(b *bmc) {
			b.fault = func(w http.ResponseWriter, r *http.Request) bool {
				if r.URL.Path == "/elsewhere" || id == "intel-amt" && r.Header.Get("Authorization") == "" {
					return false
				}
				http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
				return true
			}
		})
		if out, err := run(t, t.Context(), find(t, options{}, id), pinned(b), "power.getPower", ""); errs.CodeOf(err) != errs.BmcError {
			t.Errorf("%s: getPower of a BMC that redirects = %s, %v, want bmc-error", id, out, err)
		}
		if asked := b.asked(); slices.ContainsFunc(asked, func(r string) bool { return strings.HasSuffix(r, "/elsewhere") }) {
			t.Errorf("%s followed a redirect: %q", id, asked)
		}
	}
}

// The guard lets one changing request through where an action asks for it, and
// none elsewhere. One that was refused for its login is not yet the one.
func TestTheGuardCountsChanges(t *testing.T) {
	b := newBMC(t, "dell")
	status := http.StatusUnauthorized
	b.set(func(b *bmc) {
		b.fault = func(w http.ResponseWriter, _ *http.Request) bool { w.WriteHeader(status); return true }
	})
	host, _, err := parseAddress(b.addr(), 443)
	if err != nil {
		t.Fatal(err)
	}
	post := func(g *guard) error {
		resp, err := g.client().Post(b.URL+"/write", "application/json", strings.NewReader("{}"))
		if err == nil {
			err = resp.Body.Close()
		}
		return err
	}
	c := config{host: host, port: b.Listener.Addr().(*net.TCPAddr).Port, pin: b.pin()}
	v := vendor{purpose: redfishPurpose}
	guarded := func(wanted func(*http.Request, []byte) error) *guard {
		ctx, stop := context.WithCancelCause(t.Context())
		return newGuard(ctx, stop, c, nil, v, wanted)
	}
	g := guarded(nil)
	if err := post(g); err == nil || len(b.asked()) != 0 || errs.CodeOf(g.failure()) != errs.BmcError {
		t.Errorf("a change that nobody asked for = %v, the BMC got %q", err, b.asked())
	}
	g = guarded(func(*http.Request, []byte) error { return nil })
	if err := post(g); err != nil || g.failure() == nil {
		t.Errorf("a change without a login = %v, %v", err, g.failure())
	}
	status = http.StatusNoContent
	if err := post(g); err != nil || g.failure() != nil || !g.written() {
		t.Errorf("the change after it = %v, %v", err, g.failure())
	}
	if err := post(g); err == nil || len(b.asked()) != 2 {
		t.Errorf("a second change = %v, the BMC got %q", err, b.asked())
	}
	// Another host with the same key, as BMCs of one maker can have.
	twin := newBMC(t, "dell")
	if twin.pin() != b.pin() {
		t.Fatal("the rig's BMCs have keys of their own: this shows nothing")
	}
	g = guarded(nil)
	resp, err := g.client().Get(twin.URL + "/redfish/v1")
	if err == nil {
		resp.Body.Close()
	}
	if err == nil || len(twin.asked()) != 0 || errs.CodeOf(g.failure()) != errs.BmcError {
		t.Errorf("a request to another host = %v, %v, it got %q", err, g.failure(), twin.asked())
	}
}

// bmclib panics on these answers; the call fails, and nothing else does.
func TestPanicsAreBMCErrors(t *testing.T) {
	for id, fault := range map[string]func(w http.ResponseWriter, r *http.Request) bool{
		"supermicro": func(w http.ResponseWriter, r *http.Request) bool {
			if r.URL.Path != "/cgi/ipmi.cgi" {
				return false
			}
			fmt.Fprint(w, `<?xml version="1.0"?><IPMI></IPMI>`)
			return true
		},
		"asrockrack": func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.HasSuffix(r.URL.Path, "api/fru") {
				return false
			}
			fmt.Fprint(w, `[{"board": null}]`)
			return true
		},
	} {
		b := newBMC(t, id)
		b.set(func(b *bmc) { b.fault = fault })
		d := find(t, options{}, id)
		if _, err := run(t, t.Context(), d, pinned(b), "power.getPower", ""); errs.CodeOf(err) != errs.BmcError || !strings.Contains(err.Error(), "nil pointer") {
			t.Errorf("%s: getPower = %v, want bmc-error with the panic", id, err)
		}
		if b.open() != 0 {
			t.Errorf("%s: %d sessions are left", id, b.open())
		}
		b.set(func(b *bmc) { b.fault = nil })
		if out, err := run(t, t.Context(), d, pinned(b), "power.getPower", ""); err != nil || out != `"off"` {
			t.Errorf("%s: getPower after a panic = %s, %v", id, out, err)
		}
	}
}

// A call ends with its deadline whatever the BMC does not say, and with its
// limit where it says too much.
func TestBMCsThatDoNotAnswerOrDoNotStop(t *testing.T) {
	for _, id := range ids() {
		b := newBMC(t, id)
		hang := make(chan struct{})
		var once sync.Once
		b.set(func(b *bmc) {
			b.fault = func(http.ResponseWriter, *http.Request) bool { <-hang; return true }
		})
		t.Cleanup(func() { once.Do(func() { close(hang) }) })
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		_, err := run(t, ctx, find(t, options{}, id), pinned(b), "power.getPower", "")
		cancel()
		if errs.CodeOf(err) != errs.Timeout {
			t.Errorf("%s: getPower of a BMC that does not answer = %v, want timeout", id, err)
		}
		once.Do(func() { close(hang) })

		endless := newBMC(t, id)
		endless.set(func(b *bmc) {
			b.fault = func(w http.ResponseWriter, r *http.Request) bool {
				if id == "intel-amt" && r.Header.Get("Authorization") == "" {
					return false
				}
				chunk := []byte(strings.Repeat("[", 1<<20))
				for {
					if _, err := w.Write(chunk); err != nil {
						return true
					}
				}
			}
		})
		if _, err := run(t, t.Context(), find(t, options{}, id), pinned(endless), "power.getPower", ""); errs.CodeOf(err) != errs.BmcError {
			t.Errorf("%s: getPower of a BMC that does not stop = %v, want bmc-error", id, err)
		}
	}
	// Nobody listens there.
	closed := newBMC(t, "dell")
	closed.Close()
	for _, id := range ids() {
		_, err := run(t, t.Context(), find(t, options{}, id), pinned(closed), "power.getPower", "")
		if e := errs.From(err); e == nil || e.Code != errs.Unreachable || !e.Retryable {
			t.Errorf("%s: getPower where nobody listens = %v, want unreachable", id, err)
		}
	}
}

// Calls that never come back are counted, and at sixteen nothing is asked until
// one of them does.
func TestStuckCallsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &crew{}
		hang := make(chan struct{})
		for range maxStuck {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			if err := c.do(ctx, func() error { <-hang; return nil }); !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("do = %v, want the deadline", err)
			}
			cancel()
		}
		asked := false
		err := c.do(t.Context(), func() error { asked = true; return nil })
		if e := errs.From(err); asked || e == nil || e.Code != errs.Unavailable || !e.Retryable {
			t.Errorf("do beside %d stuck calls = %v, asked %v, want unavailable", maxStuck, err, asked)
		}
		hang <- struct{}{}
		synctest.Wait()
		if err := c.do(t.Context(), func() error { asked = true; return nil }); err != nil || !asked {
			t.Errorf("do after one came back = %v", err)
		}
		close(hang)
	})
}

// A call that the guard stopped is answered at once, and why: the provider's
// nine seconds of sleep are its own.
func TestAStoppedCallIsNotWaitedFor(t *testing.T) {
	c := &crew{}
	ctx, stop := context.WithCancelCause(t.Context())
	why := errs.New(errs.BmcError, "something else was tried")
	asleep := make(chan struct{})
	defer close(asleep)
	if err := c.do(ctx, func() error { stop(why); <-asleep; return nil }); !errors.Is(err, why) {
		t.Errorf("do = %v, want %v", err, why)
	}
}

func TestAGoroutineThatEndsIsAnError(t *testing.T) {
	c := &crew{}
	for _, f := range []func() error{func() error { panic("boom") }, func() error { panic(errors.New("boom")) }} {
		if err := c.do(t.Context(), f); errs.CodeOf(err) != errs.BmcError || !strings.Contains(err.Error(), "boom") {
			t.Errorf("do of a panic = %v", err)
		}
	}
}

// Wrong credentials are the BMC's answer, and no answer of a BMC brings the
// password, or an escape sequence, into an error.
func TestErrorsShowNoSecret(t *testing.T) {
	for _, id := range ids() {
		b := newBMC(t, id)
		b.set(func(b *bmc) {
			b.fault = func(w http.ResponseWriter, r *http.Request) bool {
				if id == "intel-amt" && r.Header.Get("Authorization") == "" {
					return false
				}
				w.Header().Set("Content-Type", "application/json")
				w.WriteHeader(http.StatusBadRequest)
				fmt.Fprintf(w, "{\"error\":{\"message\":\"wrong %s \x1b[2J %s\"}}", password, strings.Repeat("x", 5000))
				return true
			}
		})
		_, err := run(t, t.Context(), find(t, options{}, id), pinned(b), "power.getPower", "")
		if errs.CodeOf(err) != errs.BmcError {
			t.Errorf("%s: getPower = %v, want bmc-error", id, err)
			continue
		}
		if text := err.Error(); strings.Contains(text, password) || strings.Contains(text, "\x1b") || len(text) > 500 {
			t.Errorf("%s: the error is %q", id, text)
		}
	}
}

// A provider that is built otherwise than this package believes is not used.
func TestCaptureWantsAnHTTPClient(t *testing.T) {
	type inner struct{ client *http.Client }
	type named struct {
		inner *inner
		other int
	}
	g := newGuard(t.Context(), nil, config{}, nil, vendor{}, nil)
	client := &http.Client{}
	if err := capture(g, &named{inner: &inner{client}}, "inner", "client"); err != nil || client.Transport != g {
		t.Errorf("capture = %v", err)
	}
	for _, tt := range []struct {
		p    any
		path []string
	}{
		{&named{inner: &inner{}}, []string{"inner", "client"}}, {&named{inner: &inner{client}}, []string{"inner", "gone"}},
		{&named{inner: &inner{client}, other: 1}, []string{"other"}}, {&named{inner: &inner{client}}, []string{"other", "client"}}, {&named{}, []string{"inner", "client"}}, {nil, []string{"x"}},
	} {
		if err := capture(g, tt.p, tt.path...); err == nil {
			t.Errorf("capture(%+v, %q) succeeded", tt.p, tt.path)
		}
	}
}

func TestParseConfig(t *testing.T) {
	pin := strings.Repeat("ab", 32)
	doc, err := jsonschema.UnmarshalJSON(strings.NewReader(schema))
	if err != nil {
		t.Fatal(err)
	}
	compiler := jsonschema.NewCompiler()
	if err := compiler.AddResource("config.json", doc); err != nil {
		t.Fatal(err)
	}
	compiled, err := compiler.Compile("config.json")
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		in     string
		want   config
		code   errs.Code
		schema bool
	}{
		{`{"address":"10.0.0.5"}`, config{"10.0.0.5", 443, ""}, "", true},
		{`{"address":"https://bmc.example:8443","tlsSpkiSha256":"` + strings.ToUpper(pin) + `","options":{}}`, config{"bmc.example", 8443, pin}, "", true},
		{`{"address":"2001:db8::1"}`, config{"2001:db8::1", 443, ""}, "", true},
		{`{"address":"[2001:db8::1]"}`, config{"2001:db8::1", 443, ""}, "", true},
		{`{"address":"[2001:db8::1]:99","credentials":"secret://root/x"}`, config{"2001:db8::1", 99, ""}, "", true},
		{`{"address":"http://10.0.0.5"}`, config{}, errs.InvalidAddress, true},
		{`{"address":"10.0.0.5/x"}`, config{}, errs.InvalidAddress, true},
		{`{"address":"user@bmc"}`, config{}, errs.InvalidAddress, true},
		{`{"address":"bmc:0"}`, config{}, errs.InvalidAddress, true},
		{`{"address":"bmc:65536"}`, config{}, errs.InvalidAddress, true},
		{`{"address":"bmc\n"}`, config{}, errs.InvalidAddress, true},
		{`{"address":"fe80::1%eth0"}`, config{}, errs.InvalidAddress, true},
		{`{"address":""}`, config{}, errs.InvalidAddress, false},
		{`{"address":"bmc","tlsSpkiSha256":"abc"}`, config{}, errs.InvalidConfig, false},
		{`{"address":"bmc","options":{"address":"other"}}`, config{}, errs.InvalidConfig, false},
		{`{"address":"bmc","options":[]}`, config{}, errs.InvalidConfig, false},
		{`{"address":"bmc","insecure":true}`, config{}, errs.InvalidConfig, false},
		{`{}`, config{}, errs.InvalidConfig, false},
		{`[]`, config{}, errs.InvalidConfig, false},
	} {
		got, err := parseConfig(json.RawMessage(tt.in), 443)
		if errs.CodeOf(err) != tt.code || err == nil && got != tt.want {
			t.Errorf("parseConfig(%s) = %+v, %v, want %+v %s", tt.in, got, err, tt.want, tt.code)
		}
		value, err := jsonschema.UnmarshalJSON(strings.NewReader(tt.in))
		if err != nil {
			t.Fatal(err)
		}
		if err := compiled.Validate(value); (err == nil) != tt.schema {
			t.Errorf("schema of %s: %v, want it taken: %v", tt.in, err, tt.schema)
		}
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add(`{"address":"10.0.0.5:623","options":{}}`)
	f.Add(`{"address":"https://[::1]:1","tlsSpkiSha256":""}`)
	f.Fuzz(func(t *testing.T, in string) {
		c, err := parseConfig(json.RawMessage(in), 443)
		if err == nil && (c.host == "" || strings.ContainsAny(c.host, " \t\n\x00/@;%[]") || c.port < 1 || c.port > 65535) {
			t.Errorf("parseConfig(%q) = %+v", in, c)
		}
	})
}

func TestReadCredentials(t *testing.T) {
	for _, tt := range []struct {
		user, password string
		json, form     bool
	}{
		{"ADMIN", "Twenty-bytes_pass.OK", true, true}, {"a.b_c@d-e", "!$()*,/:?@'\"\\^", true, true},
		{"ADMIN", "a&b", true, false}, {"ADMIN", "a=b", true, false}, {"ADMIN", "a+b", true, false}, {"ADMIN", "a%41", true, false}, {"ADMIN", "a#b", true, false},
		{"ADMIN", "a b", true, false}, {"ADMIN", "pässword", true, false},
		{"ADMIN", "", false, false}, {"ADMIN", "a\x00", false, false}, {"ADMIN", "a\nb", false, false}, {"ADMIN", "a\x1bb", false, false}, {"ADMIN", "\xff", false, false},
		{"ADMIN", strings.Repeat("p", 128), true, true}, {"ADMIN", strings.Repeat("p", 129), false, false},
		{"", "p", false, false}, {"a b", "p", false, false}, {"a\"b", "p", false, false}, {"a&b", "p", false, false}, {strings.Repeat("u", 65), "p", false, false},
	} {
		for form, ok := range map[bool]bool{false: tt.json, true: tt.form} {
			ctx, _ := drivertest.Context(t, t.Context(), map[string]string{"username": tt.user, "password": tt.password})
			_, err := readCredentials(ctx, form)
			if (err == nil) != ok || err != nil && errs.CodeOf(err) != errs.CredentialsUnavailable {
				t.Errorf("readCredentials(%q, %q, form %v) = %v, want ok %v", tt.user, tt.password, form, err, ok)
			}
			if err != nil && len(tt.password) > 3 && strings.Contains(err.Error(), tt.password) {
				t.Errorf("the error of %q shows the password", tt.user)
			}
		}
	}
}
