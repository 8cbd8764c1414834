package redfish

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	bmclib "github.com/bmc-toolbox/bmclib/v2"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/bmc/bmctest"
)

func start(t *testing.T, m bmctest.Machine, opts ...bmctest.Option) (*bmctest.Redfish, Target) {
	t.Helper()
	r, err := bmctest.StartRedfish(t.Context(), "127.0.0.1:0", "admin", "pass word", m, append(opts, bmctest.OffInterval(time.Millisecond))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return r, Target{Address: r.Addr(), Pin: r.SPKI(), Username: "admin", Password: secret.New([]byte("pass word"))}
}

func TestPower(t *testing.T) {
	m := bmctest.NewFake()
	r, target := start(t, m)
	for _, tt := range []struct {
		action string
		state  string
		code   errs.Code
	}{
		{"cycle", "off", errs.BmcError},
		{"on", "on", ""},
		{"on", "on", ""},
		{"reset", "on", ""},
		{"cycle", "on", ""},
		{"nmi", "on", errs.UnsupportedOperation},
		{"sideways", "on", errs.InvalidArgs},
		{"soft", "off", ""},
		{"off", "off", ""},
	} {
		if err := SetPower(t.Context(), target, tt.action); errs.CodeOf(err) != tt.code {
			t.Errorf("SetPower(%q) = %v, want code %q", tt.action, err, tt.code)
		}
		if got, err := PowerState(t.Context(), target); got != tt.state || err != nil {
			t.Errorf("PowerState() after %s = %q, %v, want %q", tt.action, got, err, tt.state)
		}
	}
	if got, want := r.Log(), []string{"on none", "reset none", "cycle none", "soft"}; !reflect.DeepEqual(got, want) {
		t.Errorf("the machine saw %q, want %q", got, want)
	}
	if got := r.Sessions(); got != 0 {
		t.Errorf("%d sessions are left open, want 0", got)
	}
}

func TestBootDevice(t *testing.T) {
	r, target := start(t, bmctest.NewFake())
	for _, dev := range []BootDevice{
		{Device: "pxe", EFI: true}, {Device: "disk", Persistent: true}, {Device: "cdrom", EFI: true}, {Device: "bios"}, {Device: "none"},
	} {
		if err := SetBootDevice(t.Context(), target, dev); err != nil {
			t.Errorf("SetBootDevice(%+v) = %v", dev, err)
		}
		if got, err := GetBootDevice(t.Context(), target); got != dev || err != nil {
			t.Errorf("GetBootDevice() = %+v, %v, want %+v", got, err, dev)
		}
	}
	if err := SetBootDevice(t.Context(), target, BootDevice{Device: "tape"}); errs.CodeOf(err) != errs.InvalidArgs {
		t.Errorf("SetBootDevice(tape) = %v, want invalid-args", err)
	}
	if got := len(r.Log()); got != 5 {
		t.Errorf("the BMC logged %q, want 5 lines", r.Log())
	}
}

// The work goes through bmclib, and to no provider but ours.
func TestOurProviderOnly(t *testing.T) {
	_, target := start(t, bmctest.NewFake())
	err := with(t.Context(), target, func(c *bmclib.Client) error {
		if n := len(c.Registry.Drivers); n != 1 {
			t.Errorf("the registry holds %d providers, want 1", n)
		}
		if _, err := c.GetPowerState(t.Context()); err != nil {
			return err
		}
		if got := c.GetMetadata().SuccessfulProvider; got != providerName {
			t.Errorf("provider %q answered, want %q", got, providerName)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func TestTrust(t *testing.T) {
	r, good := start(t, bmctest.NewFake())
	flipped := []byte(r.SPKI())
	flipped[0] ^= 1
	if _, err := hex.DecodeString(string(flipped)); err != nil {
		flipped[0] = '0'
	}
	for _, tt := range []struct {
		name   string
		change func(*Target)
		want   errs.Code
	}{
		{"the pin", func(*Target) {}, ""},
		{"a pin with one bit flipped", func(t *Target) { t.Pin = string(flipped) }, errs.PinMismatch},
		{"no pin", func(t *Target) { t.Pin = "" }, errs.PinMismatch},
		{"half a pin", func(t *Target) { t.Pin = t.Pin[:32] }, errs.InvalidConfig},
		{"a wrong password", func(t *Target) { t.Password = secret.New([]byte("guess")) }, errs.BmcError},
	} {
		target := good
		tt.change(&target)
		before := len(r.Requests())
		_, err := PowerState(t.Context(), target)
		if errs.CodeOf(err) != tt.want {
			t.Errorf("%s: PowerState() = %v, want code %q", tt.name, err, tt.want)
		}
		if tt.want == errs.PinMismatch && len(r.Requests()) != before {
			t.Errorf("%s: the BMC saw a request", tt.name)
		}
		if err != nil && errs.From(err).Retryable {
			t.Errorf("%s: the error is retryable", tt.name)
		}
	}
}

// An unpinned BMC is trusted when an authority vouches for its name, and only then.
func TestRoots(t *testing.T) {
	s := httptest.NewTLSServer(bmcWith(nil))
	defer s.Close()
	pool := x509.NewCertPool()
	pool.AddCert(s.Certificate())
	_, port, _ := net.SplitHostPort(s.Listener.Addr().String())
	target := Target{Address: "127.0.0.1:" + port, Roots: pool, Username: "u", Password: secret.New([]byte("p"))}
	if got, err := PowerState(t.Context(), target); got != "on" || err != nil {
		t.Errorf("PowerState() under a known authority = %q, %v, want on", got, err)
	}
	target.Address = "localhost:" + port
	if _, err := PowerState(t.Context(), target); errs.CodeOf(err) != errs.PinMismatch {
		t.Errorf("PowerState() under another name = %v, want pin-mismatch", err)
	}
}

// bmcWith is a small BMC whose answers change replaces, by "METHOD path".
func bmcWith(change map[string]http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if h, ok := change[r.Method+" "+r.URL.Path]; ok {
			h(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		switch r.Method + " " + r.URL.Path {
		case "GET /redfish/v1/":
			fmt.Fprint(w, `{"Systems":{"@odata.id":"/redfish/v1/Systems"}}`)
		case "POST /redfish/v1/SessionService/Sessions":
			w.Header().Set("X-Auth-Token", "token-of-this-bmc")
			w.Header().Set("Location", "/redfish/v1/SessionService/Sessions/1")
			w.WriteHeader(http.StatusCreated)
		case "DELETE /redfish/v1/SessionService/Sessions/1":
			w.WriteHeader(http.StatusNoContent)
		case "GET /redfish/v1/Systems":
			fmt.Fprint(w, `{"Members":[{"@odata.id":"/redfish/v1/Systems/1"}]}`)
		case "GET /redfish/v1/Systems/1":
			fmt.Fprint(w, `{"PowerState":"On","Actions":{"#ComputerSystem.Reset":{"target":"/redfish/v1/Systems/1/Actions/ComputerSystem.Reset"}}}`)
		case "POST /redfish/v1/Systems/1/Actions/ComputerSystem.Reset":
			w.WriteHeader(http.StatusAccepted)
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	})
}

func serve(t *testing.T, h http.Handler) Target {
	t.Helper()
	s := httptest.NewTLSServer(h)
	t.Cleanup(s.Close)
	pin := sha256.Sum256(s.Certificate().RawSubjectPublicKeyInfo)
	return Target{Address: s.Listener.Addr().String(), Pin: hex.EncodeToString(pin[:]), Username: "u", Password: secret.New([]byte("p"))}
}

func say(body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, body) }
}

// A BMC that points elsewhere gets nobody to go there.
func TestStaysOnTheBMC(t *testing.T) {
	var reached atomic.Int32
	elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		reached.Add(1)
		fmt.Fprint(w, `{"PowerState":"On"}`)
	}))
	defer elsewhere.Close()
	host := strings.TrimPrefix(elsewhere.URL, "http://")
	redirect := func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, elsewhere.URL+"/redfish/v1/Systems/1", http.StatusFound)
	}
	for name, change := range map[string]map[string]http.HandlerFunc{
		"redirect":             {"GET /redfish/v1/Systems/1": redirect},
		"redirect at log in":   {"POST /redfish/v1/SessionService/Sessions": redirect},
		"absolute link":        {"GET /redfish/v1/Systems": say(`{"Members":[{"@odata.id":"` + elsewhere.URL + `/redfish/v1/Systems/1"}]}`)},
		"network-path link":    {"GET /redfish/v1/Systems": say(`{"Members":[{"@odata.id":"//` + host + `/redfish/v1/Systems/1"}]}`)},
		"user link":            {"GET /redfish/v1/Systems": say(`{"Members":[{"@odata.id":"@` + host + `/redfish/v1/Systems/1"}]}`)},
		"link out of redfish":  {"GET /redfish/v1/Systems": say(`{"Members":[{"@odata.id":"/cgi/ipmi.cgi"}]}`)},
		"link up":              {"GET /redfish/v1/Systems": say(`{"Members":[{"@odata.id":"/redfish/v1/../../cgi"}]}`)},
		"link up, escaped":     {"GET /redfish/v1/Systems": say(`{"Members":[{"@odata.id":"/redfish/v1/%2e%2e/%2e%2e/cgi"}]}`)},
		"service elsewhere":    {"GET /redfish/v1/": say(`{"Systems":{"@odata.id":"` + elsewhere.URL + `/redfish/v1/Systems"}}`)},
		"reset target up":      {"GET /redfish/v1/Systems/1": say(`{"PowerState":"On","Actions":{"#ComputerSystem.Reset":{"target":"/redfish/../x"}}}`)},
		"reset target another": {"GET /redfish/v1/Systems/1": say(`{"PowerState":"On","Actions":{"#ComputerSystem.Reset":{"target":"` + elsewhere.URL + `/redfish/v1/x"}}}`)},
	} {
		target := serve(t, bmcWith(change))
		if got, err := PowerState(t.Context(), target); errs.CodeOf(err) != errs.BmcError {
			t.Errorf("%s: PowerState() = %q, %v, want bmc-error", name, got, err)
		}
	}
	if n := reached.Load(); n != 0 {
		t.Errorf("another host saw %d requests, want 0", n)
	}
	if got, err := PowerState(t.Context(), serve(t, bmcWith(nil))); got != "on" || err != nil {
		t.Errorf("the same BMC without tricks: PowerState() = %q, %v, want on", got, err)
	}
}

func TestOddAnswers(t *testing.T) {
	system := func(body string) map[string]http.HandlerFunc {
		return map[string]http.HandlerFunc{"GET /redfish/v1/Systems/1": say(body)}
	}
	status := func(code int) map[string]http.HandlerFunc {
		return map[string]http.HandlerFunc{"GET /redfish/v1/Systems/1": func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(code)
			fmt.Fprint(w, `{"error":{"message":"general","@Message.ExtendedInfo":[{"Message":"say\u0007ing why"}]}}`)
		}}
	}
	for _, tt := range []struct {
		name   string
		change map[string]http.HandlerFunc
		want   string
		code   errs.Code
		text   string
		retry  bool
	}{
		{"numbers for strings", system(`{"PowerState":"On","SerialNumber":12,"MemorySummary":"N/A","Actions":[],"Boot":null}`), "on", "", "", false},
		{"lower case", system(`{"PowerState":"off"}`), "off", "", "", false},
		{"between", system(`{"PowerState":"PoweringOn"}`), "unknown", "", "", false},
		{"no state", system(`{"PowerState":null}`), "unknown", "", "", false},
		{"a number for a state", system(`{"PowerState":1}`), "unknown", "", "", false},
		{"byte order mark", system("\xef\xbb\xbf" + `{"PowerState":"On"}`), "on", "", "", false},
		{"not JSON", system(`<html>`), "", errs.BmcError, "not a JSON object", false},
		{"an array", system(`[]`), "", errs.BmcError, "not a JSON object", false},
		{"too large", system(`{"PowerState":"On","x":"` + strings.Repeat("x", maxBody) + `"}`), "", errs.BmcError, "larger than", false},
		{"not found", status(404), "", errs.BmcError, "say ing why", false},
		{"busy", status(503), "", errs.BmcError, "say ing why", true},
		{"forbidden", status(403), "", errs.BmcError, "refuses the credential", false},
		{"no systems", map[string]http.HandlerFunc{"GET /redfish/v1/Systems": say(`{"Members":[]}`)}, "", errs.BmcError, "lists no system", false},
	} {
		target := serve(t, bmcWith(tt.change))
		got, err := PowerState(t.Context(), target)
		if got != tt.want || errs.CodeOf(err) != tt.code || err != nil && (!strings.Contains(err.Error(), tt.text) || errs.From(err).Retryable != tt.retry) {
			t.Errorf("%s: PowerState() = %q, %v, want %q, code %q with %q, retryable %v", tt.name, got, err, tt.want, tt.code, tt.text, tt.retry)
		}
	}
}

// Beside the host, some BMCs list boards and composed systems.
func TestManySystems(t *testing.T) {
	member := func(n int, body string) (string, http.HandlerFunc) {
		return fmt.Sprintf("GET /redfish/v1/Systems/%d", n), say(body)
	}
	const reset = `"Actions":{"#ComputerSystem.Reset":{"target":"/redfish/v1/x"}}`
	change := map[string]http.HandlerFunc{"GET /redfish/v1/Systems": say(`{"Members":[{"@odata.id":"/redfish/v1/Systems/1"},{"@odata.id":"/redfish/v1/Systems/2"}]}`)}
	k1, board := member(1, `{"PowerState":"On","SystemType":"Physical"}`)
	k2, host := member(2, `{"PowerState":"Off","SystemType":"Physical",`+reset+`}`)
	change[k1], change[k2] = board, host
	if got, err := PowerState(t.Context(), serve(t, bmcWith(change))); got != "off" || err != nil {
		t.Errorf("PowerState() of a host beside a board = %q, %v, want off", got, err)
	}
	change[k1] = host
	if got, err := PowerState(t.Context(), serve(t, bmcWith(change))); errs.CodeOf(err) != errs.BmcError {
		t.Errorf("PowerState() of two hosts = %q, %v, want bmc-error", got, err)
	}
}

func TestBasicAuthWithoutSessions(t *testing.T) {
	seen := ""
	target := serve(t, bmcWith(map[string]http.HandlerFunc{
		"POST /redfish/v1/SessionService/Sessions": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotFound) },
		"GET /redfish/v1/Systems/1": func(w http.ResponseWriter, r *http.Request) {
			u, p, _ := r.BasicAuth()
			seen = u + ":" + p
			fmt.Fprint(w, `{"PowerState":"On"}`)
		},
	}))
	if got, err := PowerState(t.Context(), target); got != "on" || err != nil || seen != "u:p" {
		t.Errorf("PowerState() = %q, %v as %q, want on as u:p", got, err, seen)
	}
}

func TestContext(t *testing.T) {
	hang := map[string]http.HandlerFunc{"GET /redfish/v1/Systems/1": func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }}
	target := serve(t, bmcWith(hang))
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	begin := time.Now()
	if _, err := PowerState(ctx, target); errs.CodeOf(err) != errs.Timeout {
		t.Errorf("PowerState() past its deadline = %v, want timeout", err)
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("PowerState() took %v past a deadline of 200 ms", took)
	}
	cancelled, stop := context.WithCancel(t.Context())
	stop()
	if _, err := PowerState(cancelled, target); errs.CodeOf(err) != errs.Cancelled {
		t.Errorf("PowerState() cancelled = %v, want cancelled", err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	target.Address = listener.Addr().String()
	_ = listener.Close()
	if _, err := PowerState(t.Context(), target); errs.CodeOf(err) != errs.Unreachable || !errs.From(err).Retryable {
		t.Errorf("PowerState() of a closed port = %v, want unreachable, retryable", err)
	}
}

// A BMC without a power cycle of its own gets off, and on once it is off.
func TestCycleByOffAndOn(t *testing.T) {
	power := "On"
	var resets []string
	polls := 0
	target := serve(t, bmcWith(map[string]http.HandlerFunc{
		"GET /redfish/v1/Systems/1": func(w http.ResponseWriter, _ *http.Request) {
			if len(resets) > 0 {
				if polls++; polls == 2 {
					power = "Off"
				}
			}
			fmt.Fprintf(w, `{"PowerState":%q,"Actions":{"#ComputerSystem.Reset":{"target":"/redfish/v1/Systems/1/Actions/ComputerSystem.Reset",
				"ResetType@Redfish.AllowableValues":["On","ForceOff","ForceRestart"]}}}`, power)
		},
		"POST /redfish/v1/Systems/1/Actions/ComputerSystem.Reset": func(w http.ResponseWriter, r *http.Request) {
			var in struct{ ResetType string }
			_ = json.NewDecoder(r.Body).Decode(&in)
			resets = append(resets, in.ResetType+" while "+power)
			w.WriteHeader(http.StatusNoContent)
		},
	}))
	if err := SetPower(t.Context(), target, "cycle"); err != nil {
		t.Fatal(err)
	}
	if want := []string{"ForceOff while On", "On while Off"}; !reflect.DeepEqual(resets, want) {
		t.Errorf("the BMC saw %q, want %q", resets, want)
	}
}

// A BMC that accepts a boot device and forgets it is found out.
func TestBootDeviceReadBack(t *testing.T) {
	ignoring := map[string]http.HandlerFunc{
		"PATCH /redfish/v1/Systems/1": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) },
		"GET /redfish/v1/Systems/1":   say(`{"PowerState":"On","Boot":{"BootSourceOverrideEnabled":"Disabled","BootSourceOverrideTarget":"None"}}`),
	}
	err := SetBootDevice(t.Context(), serve(t, bmcWith(ignoring)), BootDevice{Device: "pxe"})
	if errs.CodeOf(err) != errs.BmcError || !strings.Contains(err.Error(), "still shows none") {
		t.Errorf("SetBootDevice() at a BMC that ignores it = %v, want bmc-error", err)
	}
	limited := map[string]http.HandlerFunc{
		"GET /redfish/v1/Systems/1": say(`{"Boot":{"BootSourceOverrideEnabled@Redfish.AllowableValues":["Once","Disabled"]}}`),
	}
	err = SetBootDevice(t.Context(), serve(t, bmcWith(limited)), BootDevice{Device: "pxe", Persistent: true})
	if errs.CodeOf(err) != errs.UnsupportedOperation {
		t.Errorf("SetBootDevice(persistent) at a BMC with once only = %v, want unsupported-operation", err)
	}
}

func TestPasswordIsInNoError(t *testing.T) {
	_, target := start(t, bmctest.NewFake())
	target.Password = secret.New([]byte("hunter2-hunter2"))
	_, err := PowerState(t.Context(), target)
	if err == nil || strings.Contains(err.Error(), "hunter2") || strings.Contains(fmt.Sprintf("%+v %v", target, err), "hunter2") {
		t.Errorf("PowerState() = %v, want an error without the password", err)
	}
}

// dataDir holds answers of real BMCs, a folder for each vendor.
func dataDir(t *testing.T) string {
	dir := os.Getenv("BC_REDFISH_DATA")
	if dir == "" {
		t.Skip("needs answers of real BMCs: set BC_REDFISH_DATA to their folder")
	}
	return dir
}

func TestRealAnswers(t *testing.T) {
	dir := dataDir(t)
	for _, tt := range []struct {
		vendor string
		boot   BootDevice
		cdrom  string // the BMC's word for it
		cycle  bool   // has one of its own
	}{
		{"generic", BootDevice{Device: "pxe", EFI: true}, "Cd", false},
		{"idrac", BootDevice{Device: "none"}, "Cd", true},
		{"lenovo", BootDevice{Device: "none"}, "Cd", false},
		{"supermicro_x10", BootDevice{Device: "none"}, "CD/DVD", false},
	} {
		var patches, resets []string
		target := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch {
			case r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/Sessions"):
				w.WriteHeader(http.StatusNotFound)
			case r.Method == http.MethodPost:
				resets = append(resets, r.URL.Path)
				w.WriteHeader(http.StatusNoContent)
			case r.Method == http.MethodPatch:
				var in struct {
					Boot map[string]string
				}
				_ = json.NewDecoder(r.Body).Decode(&in)
				patches = append(patches, in.Boot["BootSourceOverrideTarget"])
				w.WriteHeader(http.StatusNoContent)
			default:
				name := strings.ReplaceAll(strings.TrimSuffix(r.URL.Path, "/"), "/", "_") + ".json"
				http.ServeFile(w, r, filepath.Join(dir, tt.vendor, filepath.Base(name)))
			}
		}))
		if got, err := PowerState(t.Context(), target); got != "on" || err != nil {
			t.Errorf("%s: PowerState() = %q, %v, want on", tt.vendor, got, err)
		}
		if got, err := GetBootDevice(t.Context(), target); got != tt.boot || err != nil {
			t.Errorf("%s: GetBootDevice() = %+v, %v, want %+v", tt.vendor, got, err, tt.boot)
		}
		// The recording does not change, so the read-back tells.
		err := SetBootDevice(t.Context(), target, BootDevice{Device: "cdrom"})
		if errs.CodeOf(err) != errs.BmcError || !reflect.DeepEqual(patches, []string{tt.cdrom}) {
			t.Errorf("%s: SetBootDevice(cdrom) = %v with %q, want bmc-error with %q", tt.vendor, err, patches, tt.cdrom)
		}
		if err := SetPower(t.Context(), target, "reset"); err != nil || len(resets) != 1 || !strings.HasSuffix(resets[0], "/Actions/ComputerSystem.Reset") {
			t.Errorf("%s: SetPower(reset) = %v with %q", tt.vendor, err, resets)
		}
		if tt.cycle {
			if err := SetPower(t.Context(), target, "cycle"); err != nil || len(resets) != 2 {
				t.Errorf("%s: SetPower(cycle) = %v with %q", tt.vendor, err, resets)
			}
		}
	}
}

func FuzzParseSystem(f *testing.F) {
	f.Add([]byte(`{"PowerState":"On","Actions":{"#ComputerSystem.Reset":{"target":"/redfish/v1/x","ResetType@Redfish.AllowableValues":["On",1]}},"Boot":{"BootSourceOverrideTarget":"Pxe"}}`))
	f.Add([]byte(`{"Actions":[],"Boot":3,"PowerState":{}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := parseSystem("/redfish/v1/Systems/1", data)
		if err != nil {
			return
		}
		s.powerState()
		s.bootDevice()
		if s.reset != "" && !strings.HasPrefix(s.reset, "/redfish/") {
			t.Errorf("parseSystem(%q) has reset target %q", data, s.reset)
		}
		for device, words := range bootTargets {
			_, _ = bootPatch(s, BootDevice{Device: device}, words)
		}
	})
}

func FuzzResource(f *testing.F) {
	for _, s := range []string{"/redfish/v1/Systems/1", "//h/redfish/", "https://h/redfish/", "/redfish/../x", "/redfish/%2e%2e/x", "@h/redfish/", "/redfish/v1\\..", "/redfish/?x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := resource(s)
		if err == nil && (!strings.HasPrefix(got, "/redfish/") || strings.Contains(got, "/../") || strings.ContainsAny(got, "\\%?#")) {
			t.Errorf("resource(%q) = %q", s, got)
		}
	})
}

func FuzzReason(f *testing.F) {
	f.Add([]byte(`{"error":{"message":"m","@Message.ExtendedInfo":[{"Message":"x"}]}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if got := reason(data); len([]rune(got)) > maxReason+3 || strings.ContainsAny(got, "\n\r\x1b\x00") {
			t.Errorf("reason(%q) = %q", data, got)
		}
	})
}
