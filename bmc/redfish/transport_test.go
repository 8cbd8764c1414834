package redfish

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmctest"
)

// elsewhere is another host, which nothing may reach: it would see a token.
func elsewhere(t *testing.T) (*httptest.Server, func() int32) {
	t.Helper()
	var reached atomic.Int32
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		t.Errorf("another host got %s %s with token %q and authorization %q", r.Method, r.URL, r.Header.Get("X-Auth-Token"), r.Header.Get("Authorization"))
		fmt.Fprint(w, `{"PowerState":"On","Members":[]}`)
	}))
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			reached.Add(1)
		}
	}
	s.StartTLS()
	t.Cleanup(s.Close)
	return s, reached.Load
}

// A BMC that points elsewhere gets nobody to go there.
func TestStaysOnTheBMC(t *testing.T) {
	other, reached := elsewhere(t)
	host := strings.TrimPrefix(other.URL, "https://")
	redirect := func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, other.URL+"/redfish/v1/Systems/1", http.StatusFound)
	}
	for name, change := range map[string]map[string]http.HandlerFunc{
		"redirect": {systemGet: redirect},
		"redirect with slash": {systemGet: func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, other.URL+r.URL.Path+"/", http.StatusPermanentRedirect)
		}},
		"redirect at log in":   {sessionsPost: redirect},
		"absolute link":        {systemsGet: say(`{"Members":[{"@odata.id":"` + other.URL + `/redfish/v1/Systems/1"}]}`)},
		"http link":            {systemsGet: say(`{"Members":[{"@odata.id":"http://` + host + `/redfish/v1/Systems/1"}]}`)},
		"network-path link":    {systemsGet: say(`{"Members":[{"@odata.id":"//` + host + `/redfish/v1/Systems/1"}]}`)},
		"user link":            {systemsGet: say(`{"Members":[{"@odata.id":"@` + host + `/redfish/v1/Systems/1"}]}`)},
		"link out of redfish":  {systemsGet: say(`{"Members":[{"@odata.id":"/cgi/ipmi.cgi"}]}`)},
		"link up":              {systemsGet: say(`{"Members":[{"@odata.id":"/redfish/v1/../../cgi"}]}`)},
		"link up, escaped":     {systemsGet: say(`{"Members":[{"@odata.id":"/redfish/v1/%2e%2e/%2e%2e/cgi"}]}`)},
		"service elsewhere":    {"GET /redfish/v1/": say(`{"Systems":{"@odata.id":"` + other.URL + `/redfish/v1/Systems"}}`)},
		"sessions elsewhere":   {"GET /redfish/v1/": say(`{"Links":{"Sessions":{"@odata.id":"` + other.URL + `/redfish/v1/Sessions"}}}`)},
		"next page elsewhere":  {systemsGet: say(`{"Members":[],"Members@odata.nextLink":"` + other.URL + `/redfish/v1/Systems?$skip=1"}`)},
		"reset target up":      {systemGet: say(`{"PowerState":"On","Actions":{"#ComputerSystem.Reset":{"target":"/redfish/../x"}}}`)},
		"reset target another": {systemGet: say(`{"PowerState":"On","Actions":{"#ComputerSystem.Reset":{"target":"` + other.URL + `/redfish/v1/x"}}}`)},
		"settings another":     {systemGet: say(`{"PowerState":"On","@Redfish.Settings":{"SettingsObject":{"@odata.id":"` + other.URL + `/redfish/v1/x"}}}`)},
	} {
		_, b := serve(t, change)
		if got, err := b.power(); errs.CodeOf(err) != errs.BmcError {
			t.Errorf("%s: getPower() = %q, %v, want bmc-error", name, got, err)
		}
	}
	// The same of a BMC of the rig, over all that the driver does.
	for _, fault := range []bmctest.Fault{bmctest.ForeignRedirect, bmctest.ForeignLinks, bmctest.ForeignLocation, bmctest.OutsideLinks} {
		_, b := rigWith(t, bmctest.Foreign(other.URL), bmctest.WithFaults(fault))
		for _, call := range [][]any{
			{"power", "getPower"}, {"power", "setPower", "on"}, {"management", "setBootDevice", device{Device: "pxe"}}, {"management", "getEventLog"},
			{"management", "getSecureBoot"}, {"virtual-media", "status"}, {"virtual-media", "insert", "https://media.invalid/x.iso"}, {"management", "resetBmc"},
		} {
			if _, err := b.within(20*time.Second, call[0].(string), call[1].(string), call[2:]...); err == nil && fault != bmctest.ForeignLocation {
				t.Errorf("%s: %s.%s() went well", fault, call[0], call[1])
			}
		}
	}
	if n := reached(); n != 0 {
		t.Errorf("another host saw %d connections, want 0", n)
	}
	_, b := serve(t, nil)
	if got, err := b.power(); got != "on" || err != nil {
		t.Errorf("the same BMC without tricks: getPower() = %q, %v, want on", got, err)
	}
}

// Each of the walls holds alone: a redirect is not followed within the BMC either,
// and a request for another host is refused before anything is dialled.
func TestWalls(t *testing.T) {
	f, b := serve(t, map[string]http.HandlerFunc{
		systemGet: func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/redfish/v1/Elsewhere", http.StatusFound)
		},
		"GET /redfish/v1/Elsewhere": say(`{"PowerState":"On"}`),
	})
	if got, err := b.power(); errs.CodeOf(err) != errs.BmcError || f.count("GET /redfish/v1/Elsewhere") != 0 {
		t.Errorf("getPower() over a redirect = %q, %v, want bmc-error, and nobody to go there", got, err)
	}
	g := guard{address: "bmc.example:443", next: roundTrip(func(*http.Request) (*http.Response, error) { return &http.Response{StatusCode: http.StatusOK}, nil })}
	for url, allowed := range map[string]bool{
		"https://bmc.example:443/redfish/v1/":     true,
		"http://bmc.example:443/redfish/v1/":      false,
		"https://other.example:443/redfish/v1/":   false,
		"https://bmc.example:444/redfish/v1/":     false,
		"https://u:p@bmc.example:443/redfish/v1/": false,
		"https://bmc.example:443/cgi/":            false,
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := g.RoundTrip(req); (err == nil) != allowed {
			t.Errorf("a request for %s: %v, want it let through: %v", url, err, allowed)
		}
	}
	// The transport dials the BMC and nothing else, whatever it is asked for.
	_, dialled := serve(t, nil)
	client, err := newClient(target{address: dialled.config["address"].(string), pin: dialled.config["tlsSpkiSha256"].(string)}, false)
	if err != nil {
		t.Fatal(err)
	}
	defer client.CloseIdleConnections()
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://other.invalid/redfish/v1/", nil)
	resp, err := client.Transport.(guard).next.RoundTrip(req)
	if err != nil {
		t.Fatalf("past the guard: %v, want the BMC's own answer", err)
	}
	_ = resp.Body.Close()
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// A whole URL of the very BMC is its path, in any spelling of its own host.
func TestOwnAbsoluteLinks(t *testing.T) {
	_, b := rig(t, bmctest.AbsoluteLinks)
	if _, err := b.do("power", "setPower", "on"); err != nil {
		t.Errorf("setPower(on) with absolute links = %v", err)
	}
	c := &conn{target: target{address: "bmc.example:443"}}
	for id, want := range map[string]string{
		"https://bmc.example/redfish/v1/x":      "/redfish/v1/x",
		"https://BMC.example:443/redfish/v1/x":  "/redfish/v1/x",
		"HTTPS://bmc.example/redfish/v1/x":      "/redfish/v1/x",
		"/redfish/v1/x":                         "/redfish/v1/x",
		"https://bmc.example:444/redfish/v1/x":  "",
		"http://bmc.example:443/redfish/v1/x":   "",
		"https://u@bmc.example/redfish/v1/x":    "",
		"https://bmc.example.evil/redfish/v1/x": "",
		"https://bmc.example/cgi":               "",
		"https://bmc.example//evil/redfish/":    "",
	} {
		if got, err := c.resource(id); got != want || (err == nil) != (want != "") {
			t.Errorf("resource(%q) = %q, %v, want %q", id, got, err, want)
		}
	}
}

// Paths with and without a slash at their end.
func TestTrailingSlash(t *testing.T) {
	for _, fault := range []bmctest.Fault{bmctest.SlashNeeded, bmctest.SlashInLinks, bmctest.SlashRefused, bmctest.SlashRedirects} {
		r, b := rig(t, fault)
		if _, err := b.do("power", "setPower", "on"); err != nil {
			t.Errorf("%s: setPower(on) = %v", fault, err)
		}
		if _, err := b.do("management", "setBootDevice", device{Device: "pxe", EFI: true}); err != nil {
			t.Errorf("%s: setBootDevice() = %v", fault, err)
		}
		b.pool.close(t.Context())
		if r.Sessions() != 0 || logins(r) > 2 {
			t.Errorf("%s: %d sessions left of %d log-ins", fault, r.Sessions(), logins(r))
		}
	}
	// A redirect to the other form of the very path is one, too.
	_, b := serve(t, map[string]http.HandlerFunc{
		systemsGet: func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/redfish/v1/Systems/", http.StatusMovedPermanently)
		},
		"GET /redfish/v1/Systems/": say(`{"Members":[{"@odata.id":"/redfish/v1/Systems/1"}]}`),
		systemGet: func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/redfish/v1/Systems/1/", http.StatusPermanentRedirect)
		},
		"GET /redfish/v1/Systems/1/": say(`{"PowerState":"On"}`),
	})
	if got, err := b.power(); got != "on" || err != nil {
		t.Errorf("getPower() over redirects to the slash = %q, %v, want on", got, err)
	}
}

func TestOddAnswers(t *testing.T) {
	system := func(body string) map[string]http.HandlerFunc {
		return map[string]http.HandlerFunc{systemGet: say(body)}
	}
	status := func(code int) map[string]http.HandlerFunc {
		return map[string]http.HandlerFunc{systemGet: func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(code)
			fmt.Fprint(w, `{"error":{"message":"general","@Message.ExtendedInfo":[{"Message":"say\u0007ing \u001b[31mwhy"}]}}`)
		}}
	}
	deep := func(n int) string {
		return `{"PowerState":"On","x":` + strings.Repeat("[", n) + `"]]]"` + strings.Repeat("]", n) + `}`
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
		{"deep as it may be", system(deep(maxDepth - 1)), "on", "", "", false},
		{"too deep", system(deep(maxDepth)), "", errs.BmcError, "nests deeper", false},
		{"too large", system(`{"PowerState":"On","x":"` + strings.Repeat("x", maxBody) + `"}`), "", errs.BmcError, "larger than", false},
		{"not found", status(404), "", errs.BmcError, "say ing  [31mwhy", false},
		{"internal", status(500), "", errs.BmcError, "say ing  [31mwhy", true},
		{"unauthorised", status(401), "", errs.BmcError, "refuses the credential", false},
		{"forbidden", status(403), "", errs.BmcError, "does not permit", false},
		{"no systems", map[string]http.HandlerFunc{systemsGet: say(`{"Members":[]}`)}, "", errs.BmcError, "lists no system", false},
	} {
		_, b := serve(t, tt.change)
		got, err := b.power()
		if got != tt.want || errs.CodeOf(err) != tt.code || err != nil && (!strings.Contains(err.Error(), tt.text) || errs.From(err).Retryable != tt.retry) {
			t.Errorf("%s: getPower() = %q, %v, want %q, code %q with %q, retryable %v", tt.name, got, err, tt.want, tt.code, tt.text, tt.retry)
		}
	}
}

func TestHostileBodies(t *testing.T) {
	for fault, text := range map[bmctest.Fault]string{
		bmctest.DeepJSON: "nests deeper", bmctest.EndlessBody: "larger than", bmctest.NotJSON: "not a JSON object", bmctest.CutJSON: "not a JSON object",
	} {
		_, b := rig(t, fault)
		if got, err := b.power(); errs.CodeOf(err) != errs.BmcError || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: getPower() = %q, %v, want bmc-error with %q", fault, got, err, text)
		}
	}
	// What never ends is read no further than its bound, and what a socket holds.
	sent := make(chan int, 8)
	_, endless := serve(t, map[string]http.HandlerFunc{systemGet: func(w http.ResponseWriter, _ *http.Request) {
		n, piece := 0, []byte(strings.Repeat(" ", 64<<10))
		for n < 1<<30 {
			k, err := w.Write(piece)
			if n += k; err != nil {
				break
			}
		}
		sent <- n
	}})
	if got, err := endless.power(); errs.CodeOf(err) != errs.BmcError {
		t.Errorf("getPower() of an endless answer = %q, %v, want bmc-error", got, err)
	}
	if n := <-sent; n > maxBody+32<<20 {
		t.Errorf("%d bytes of an endless answer were taken, want little more than %d", n, maxBody)
	}
	for _, fault := range []bmctest.Fault{bmctest.OddTypes, bmctest.MembersPaged} {
		_, b := rig(t, fault)
		if got, err := b.power(); got != "off" || err != nil {
			t.Errorf("%s: getPower() = %q, %v, want off", fault, got, err)
		}
	}
	_, b := rig(t, bmctest.MembersEndless)
	if got, err := b.power(); errs.CodeOf(err) != errs.BmcError || !strings.Contains(err.Error(), "without an end") {
		t.Errorf("getPower() of systems on pages without an end = %q, %v, want bmc-error", got, err)
	}
}

// A BMC that has too much to do is asked again when it says, within the deadline.
func TestBusyReads(t *testing.T) {
	busy := func(header string, times int) (map[string]http.HandlerFunc, *int) {
		n := 0
		return map[string]http.HandlerFunc{systemGet: func(w http.ResponseWriter, _ *http.Request) {
			if n++; n <= times {
				w.Header().Set("Retry-After", header)
				w.WriteHeader([]int{429, 503}[n%2])
				return
			}
			fmt.Fprint(w, `{"PowerState":"On"}`)
		}}, &n
	}
	for _, header := range []string{"0", "", "soon"} {
		change, n := busy(header, 3)
		_, b := serve(t, change)
		if got, err := b.power(); got != "on" || err != nil || *n != 4 {
			t.Errorf("getPower() of a busy BMC (Retry-After %q) = %q, %v after %d reads, want on after 4", header, got, err, *n)
		}
	}
	change, n := busy("60", 1)
	_, b := serve(t, change)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := b.in(ctx, "power", "getPower"); errs.CodeOf(err) != errs.BmcError || !errs.From(err).Retryable || *n != 1 || ctx.Err() != nil {
		t.Errorf("getPower() of a BMC that is busy past the deadline = %v after %d reads, want bmc-error, retryable, after 1", err, *n)
	}
	change, n = busy("0", 1000)
	_, b = serve(t, change)
	if _, err := b.power(); errs.CodeOf(err) != errs.BmcError || *n != maxBusy+1 {
		t.Errorf("getPower() of a BMC that stays busy = %v after %d reads, want bmc-error after %d", err, *n, maxBusy+1)
	}
	for header, want := range map[string]time.Duration{"3": 3 * time.Second, "": 7, "-1": 7, "Wed, 21 Oct 2015 07:28:00 GMT": 7, "60000": maxRetryAfter} {
		if got := retryAfter(header, 7); got != want {
			t.Errorf("retryAfter(%q) = %v, want %v", header, got, want)
		}
	}
}

func TestContext(t *testing.T) {
	_, b := serve(t, map[string]http.HandlerFunc{systemGet: hang})
	if _, err := b.within(200*time.Millisecond, "power", "getPower"); errs.CodeOf(err) != errs.Timeout || !errs.From(err).Retryable {
		t.Errorf("getPower() past its deadline = %v, want timeout, retryable", err)
	}
	for name, h := range map[string]http.HandlerFunc{"hangs": hang, "is cut": func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }} {
		_, b := serve(t, map[string]http.HandlerFunc{sessionsPost: h})
		if _, err := b.within(time.Second, "power", "getPower"); err == nil || !errs.From(err).Retryable || strings.Contains(err.Error(), "not known") {
			t.Errorf("getPower() whose log-in %s = %v, want a retryable error that leaves nothing open", name, err)
		}
	}
	cancelled, stop := context.WithCancel(t.Context())
	stop()
	if _, err := b.in(cancelled, "power", "getPower"); errs.CodeOf(err) != errs.Cancelled {
		t.Errorf("getPower() cancelled = %v, want cancelled", err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b.config["address"] = listener.Addr().String()
	_ = listener.Close()
	if _, err := b.power(); errs.CodeOf(err) != errs.Unreachable || !errs.From(err).Retryable {
		t.Errorf("getPower() of a closed port = %v, want unreachable, retryable", err)
	}
}

// An answer after 40 s counts, with a deadline that allows it and without any.
func TestAnswerAfter40Seconds(t *testing.T) {
	t.Parallel()
	for _, bounded := range []bool{true, false} {
		t.Run(fmt.Sprintf("bounded=%v", bounded), func(t *testing.T) {
			t.Parallel()
			r, b := rig(t)
			if _, err := b.do("power", "setPower", "on"); err != nil {
				t.Fatal(err)
			}
			r.SetFaults(bmctest.AnswersLate.Times(1))
			ctx := t.Context()
			if bounded {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, 5*time.Minute)
				defer cancel()
			}
			// Nothing but the answer tells of a reset.
			if _, err := b.in(ctx, "power", "setPower", "reset"); err != nil {
				t.Errorf("setPower(reset) answered after 40 s = %v", err)
			}
			if got := r.Log(); !slices.Equal(got, []string{"on none", "reset none"}) {
				t.Errorf("the machine saw %q, want one reset", got)
			}
		})
	}
}

func TestConfiguration(t *testing.T) {
	pin := strings.Repeat("ab", 32)
	for raw, code := range map[string]errs.Code{
		`{"address":"10.0.0.1"}`: "",
		`{"address":"https://10.0.0.1:444","tlsSpkiSha256":"` + pin + `"}`:         "",
		`{"address":"bmc.example","credentials":"secret://a/b"}`:                   "",
		`{"address":"10.0.0.1","options":{}}`:                                      errs.InvalidConfig,
		`{"address":"10.0.0.1","options":{"legacyTls":true}}`:                      errs.InvalidConfig,
		`{"address":"10.0.0.1","Address":"10.0.0.2"}`:                              errs.InvalidConfig,
		`{"address":"10.0.0.1","tlsSpkiSha256":"abcd"}`:                            errs.InvalidConfig,
		`{"address":"10.0.0.1","tlsSpkiSha256":"` + strings.Repeat("x", 64) + `"}`: errs.InvalidConfig,
		`{}`:                             errs.InvalidConfig,
		`[]`:                             errs.InvalidConfig,
		`{"address":""}`:                 errs.InvalidAddress,
		`{"address":"http://10.0.0.1"}`:  errs.InvalidAddress,
		`{"address":"10.0.0.1/redfish"}`: errs.InvalidAddress,
	} {
		if _, err := parseConfig([]byte(raw)); errs.CodeOf(err) != code {
			t.Errorf("parseConfig(%s) = %v, want code %q", raw, err, code)
		}
	}
	c, err := parseConfig([]byte(`{"address":"HTTPS://BMC.example","tlsSpkiSha256":"` + strings.ToUpper(pin) + `"}`))
	if want := (config{address: "bmc.example:443", pin: pin}); c != want || err != nil {
		t.Errorf("parseConfig() = %+v, %v, want %+v", c, err, want)
	}
}
