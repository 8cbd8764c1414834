package redfish

import (
	"encoding/json"
	"fmt"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	bmclib "github.com/bmc-toolbox/bmclib/v2"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
)

func TestPower(t *testing.T) {
	r, b := rig(t)
	for _, tt := range []struct {
		action string
		state  string
		code   errs.Code
	}{
		{"cycle", "off", errs.BmcError},
		{"reset", "off", errs.BmcError},
		{"on", "on", ""},
		{"on", "on", ""},
		{"reset", "on", ""},
		{"cycle", "on", ""},
		{"nmi", "on", ""},
		{"sideways", "on", errs.InvalidArgs},
		{"soft", "off", ""},
		{"soft", "off", ""},
		{"off", "off", ""},
		{"on", "on", ""},
		{"off", "off", ""},
	} {
		if _, err := b.do("power", "setPower", tt.action); errs.CodeOf(err) != tt.code {
			t.Errorf("setPower(%q) = %v, want code %q", tt.action, err, tt.code)
		}
		if got, err := b.power(); got != tt.state || err != nil {
			t.Errorf("getPower() after %s = %q, %v, want %q", tt.action, got, err, tt.state)
		}
	}
	if got, want := r.Log(), []string{"on none", "reset none", "cycle none", "nmi", "soft", "on none", "off"}; !slices.Equal(got, want) {
		t.Errorf("the machine saw %q, want %q", got, want)
	}
}

// The work goes through bmclib, and to no provider but ours.
func TestOurProviderOnly(t *testing.T) {
	r, b := rig(t)
	ctx, _ := drivertest.Context(t, t.Context(), b.secrets)
	m := &machine{b.pool, config{address: r.Addr(), pin: r.SPKI()}}
	err := m.with(ctx, func(c *bmclib.Client, p *provider) error {
		if n := len(c.Registry.Drivers); n != 1 || c.Registry.GetDriverInterfaces()[0] != any(p) {
			t.Errorf("the registry holds %d providers, want ours alone", n)
		}
		if _, err := c.GetPowerState(ctx); err != nil {
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

// viaBmclib tells of each request whether a call of bmclib's makes it.
type viaBmclib struct {
	http.RoundTripper
	seen func(request string, through bool)
}

func (v viaBmclib) RoundTrip(r *http.Request) (*http.Response, error) {
	callers := make([]uintptr, 128)
	frames, through := runtime.CallersFrames(callers[:runtime.Callers(0, callers)]), false
	for {
		frame, more := frames.Next()
		through = through || strings.HasPrefix(frame.Function, "github.com/bmc-toolbox/bmclib/")
		if !more {
			break
		}
	}
	v.seen(r.Method+" "+r.URL.Path, through)
	return v.RoundTripper.RoundTrip(r)
}

// Without bmclib nothing of power, boot devices, media and the BMC's restart works:
// each of their requests is made under a call of its client.
func TestEachRequestThroughBmclib(t *testing.T) {
	url, roots := library(t)
	r, b := rigWith(t, roots)
	c, err := b.pool.take(target{address: r.Addr(), pin: r.SPKI(), username: "admin", password: secretOf("pass word")})
	if err != nil {
		t.Fatal(err)
	}
	defer b.pool.give(c)
	n := 0
	c.client.Transport = viaBmclib{c.client.Transport, func(request string, through bool) {
		if request == "GET "+rootPath || request == sessionsPost {
			return // a log-in is made aside, for all who wait for it
		}
		// A log-in, which bmclib begins too, runs beside its call.
		logIn := request == sessionsPost || request == "GET "+rootPath
		if n++; !through && !logIn {
			t.Errorf("%s is sent past bmclib", request)
		}
	}}
	for _, call := range [][]any{
		{"power", "setPower", "on"}, {"power", "getPower"}, {"power", "setPower", "nmi"}, {"management", "setBootDevice", device{Device: "pxe"}},
		{"management", "getBootDevice"}, {"virtual-media", "insert", url + "/x.iso"}, {"virtual-media", "eject"}, {"management", "resetBmc"},
	} {
		before := n
		if _, err := b.do(call[0].(string), call[1].(string), call[2:]...); err != nil || n == before {
			t.Errorf("%s.%s = %v after %d requests", call[0], call[1], err, n-before)
		}
	}
}

// What a BMC of the rig gets for an action, and what becomes of it.
func TestPowerFaults(t *testing.T) {
	for _, tt := range []struct {
		name   string
		fault  bmctest.Fault
		action string // of a machine that is on
		code   errs.Code
		text   string
		log    []string
	}{
		{"allowable values in the action info", bmctest.ActionInfoOnly, "cycle", "", "", []string{"cycle none"}},
		{"allowable values not said", bmctest.ResetTypesUnsaid, "reset", "", "", []string{"reset none"}},
		{"no power cycle", bmctest.NoPowerCycle, "cycle", "", "", []string{"off", "on none"}},
		{"no NMI", bmctest.NoNMI, "nmi", errs.UnsupportedOperation, "does not offer", nil},
		{"graceful never for hard: off", bmctest.GracefulOnly, "off", errs.UnsupportedOperation, "does not offer", nil},
		{"graceful never for hard: reset", bmctest.GracefulOnly, "reset", errs.UnsupportedOperation, "does not offer", nil},
		{"graceful never for hard: cycle", bmctest.GracefulOnly, "cycle", errs.UnsupportedOperation, "neither", nil},
		{"hard never for graceful", bmctest.ForcedOnly, "soft", errs.UnsupportedOperation, "does not offer", nil},
		{"shown late: off", bmctest.PowerShownLate, "off", "", "", []string{"off"}},
		{"shown late: soft", bmctest.PowerShownLate, "soft", "", "", []string{"soft"}},
		{"ignored: off", bmctest.PowerIgnored, "off", errs.BmcError, "still on", nil},
		{"soft ignored by the operating system", bmctest.SoftIgnored, "soft", errs.BmcError, "operating system", []string{"soft"}},
		{"If-Match on the action", bmctest.EtagOnActions, "off", "", "", []string{"off"}},
		{"dropped before: off", bmctest.DropsBefore, "off", errs.Interrupted, "not known", nil},
		{"dropped after: off is told by the state", bmctest.DropsAfter, "off", "", "", []string{"off"}},
		{"dropped after: reset is not", bmctest.DropsAfter, "reset", errs.Interrupted, "not known", []string{"reset none"}},
		{"restarts after: off is told by the state", bmctest.ResetsAfter.Times(1), "off", "", "", []string{"off"}},
		{"restarts after: cycle is not", bmctest.ResetsAfter.Times(1), "cycle", errs.Interrupted, "not known", []string{"cycle none"}},
		{"fails before", bmctest.FailsBefore, "off", errs.BmcError, "not known", nil},
		{"fails after", bmctest.FailsAfter, "reset", errs.BmcError, "not known", []string{"reset none"}},
		{"success as an error", bmctest.SuccessAsError, "reset", "", "", []string{"reset none"}},
		{"unavailable for a moment", bmctest.Unavailable.Times(2), "off", "", "", []string{"off"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r, b := rig(t)
			if _, err := b.do("power", "setPower", "on"); err != nil {
				t.Fatal(err)
			}
			if tt.code != "" {
				b.hurry()
			}
			before := len(r.Log())
			r.SetFaults(tt.fault)
			_, err := b.do("power", "setPower", tt.action)
			if errs.CodeOf(err) != tt.code || err != nil && !strings.Contains(err.Error(), tt.text) {
				t.Errorf("setPower(%s) = %v, want code %q with %q", tt.action, err, tt.code, tt.text)
			}
			if err != nil && errs.From(err).Retryable {
				t.Errorf("setPower(%s) = %v: the error is retryable", tt.action, err)
			}
			if got := r.Log()[before:]; !slices.Equal(got, tt.log) {
				t.Errorf("the machine saw %q, want %q", got, tt.log)
			}
			posts := 0
			for _, q := range r.Requests() {
				if strings.HasPrefix(q, "POST ") && strings.HasSuffix(q, "ComputerSystem.Reset") {
					posts++
				}
			}
			if most := len(tt.log) + 2; posts > most {
				t.Errorf("%d resets were sent, want at most %d with the one that switched it on", posts, most)
			}
		})
	}
}

// What the action info says is heeded like what the action says beside itself.
func TestActionInfo(t *testing.T) {
	r, b := rig(t, bmctest.ActionInfoOnly, bmctest.NoPowerCycle)
	for _, action := range []string{"on", "cycle"} {
		if _, err := b.do("power", "setPower", action); err != nil {
			t.Errorf("setPower(%s) = %v", action, err)
		}
	}
	if got, want := r.Log(), []string{"on none", "off", "on none"}; !slices.Equal(got, want) {
		t.Errorf("the machine saw %q, want %q", got, want)
	}
	r.SetFaults(bmctest.ActionInfoOnly, bmctest.ForcedOnly)
	if _, err := b.do("power", "setPower", "soft"); errs.CodeOf(err) != errs.UnsupportedOperation {
		t.Errorf("setPower(soft) of a BMC that has hard actions alone = %v, want unsupported-operation", err)
	}
}

func TestForceOnStandsInForOn(t *testing.T) {
	r, b := rig(t, bmctest.ForcedOnly)
	if _, err := b.do("power", "setPower", "on"); err != nil {
		t.Error(err)
	}
	if got := r.Log(); !slices.Equal(got, []string{"on none"}) {
		t.Errorf("the machine saw %q", got)
	}
}

// host is a fake machine: it says what power it shows and counts resets.
type host struct {
	mu     sync.Mutex
	power  string
	words  string // what the reset allows
	resets []string
	// reads counts readings since the last reset; onReset and onRead change power.
	reads           int
	onReset, onRead func(*host)
}

func (h *host) change() map[string]http.HandlerFunc {
	return map[string]http.HandlerFunc{
		systemGet: func(w http.ResponseWriter, _ *http.Request) {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.reads++
			if h.onRead != nil {
				h.onRead(h)
			}
			fmt.Fprintf(w, `{"PowerState":%q,"Actions":{"#ComputerSystem.Reset":{"target":"/redfish/v1/Systems/1/Actions/ComputerSystem.Reset",
				"ResetType@Redfish.AllowableValues":[%s]}}}`, h.power, h.words)
		},
		resetPost: func(w http.ResponseWriter, r *http.Request) {
			var in struct{ ResetType string }
			_ = json.NewDecoder(r.Body).Decode(&in)
			h.mu.Lock()
			defer h.mu.Unlock()
			h.resets, h.reads = append(h.resets, in.ResetType+" while "+h.power), 0
			if h.onReset != nil {
				h.onReset(h)
			}
			w.WriteHeader(http.StatusNoContent)
		},
	}
}

// A BMC without a power cycle of its own gets off, and on once it is off.
func TestCycleByOffAndOn(t *testing.T) {
	h := &host{power: "On", words: `"On","ForceOff","ForceRestart"`}
	h.onRead = func(h *host) {
		if len(h.resets) == 1 && h.reads == 2 {
			h.power = "Off"
		}
		if len(h.resets) == 2 && h.reads == 2 {
			h.power = "On"
		}
	}
	_, b := serve(t, h.change())
	if _, err := b.do("power", "setPower", "cycle"); err != nil {
		t.Fatal(err)
	}
	if want := []string{"ForceOff while On", "On while Off"}; !slices.Equal(h.resets, want) {
		t.Errorf("the BMC saw %q, want %q", h.resets, want)
	}
}

// A machine that does not go off is not switched on.
func TestCycleStopsWhereOffFails(t *testing.T) {
	h := &host{power: "On", words: `"On","ForceOff"`}
	_, b := serve(t, h.change())
	b.hurry()
	_, err := b.do("power", "setPower", "cycle")
	if errs.CodeOf(err) != errs.BmcError || !strings.Contains(err.Error(), "not switched on again") {
		t.Errorf("setPower(cycle) = %v, want bmc-error that says that the machine was not switched on", err)
	}
	if want := []string{"ForceOff while On"}; !slices.Equal(h.resets, want) {
		t.Errorf("the BMC saw %q, want %q", h.resets, want)
	}
}

// A machine that is as it is asked to be, shows it late and refuses to be told: done.
// One that refuses and is not is an error.
func TestRefusedBecauseItIsSo(t *testing.T) {
	for late, ok := range map[string]bool{"On": true, "Off": false} {
		h := &host{power: "PoweringOn", words: `"On"`}
		change := h.change()
		change[resetPost] = func(w http.ResponseWriter, _ *http.Request) {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.power = late
			w.WriteHeader(http.StatusConflict)
		}
		f, b := serve(t, change)
		if _, err := b.do("power", "setPower", "on"); (err == nil) != ok || f.count(resetPost) != 1 {
			t.Errorf("setPower(on) refused by a machine that is %s = %v after %d POSTs, want success %v after 1", late, err, f.count(resetPost), ok)
		}
	}
}

// A soft power-off that the operating system ignores ends in an error of its own
// before the deadline, not in one about time.
func TestSoftOffDeadline(t *testing.T) {
	h := &host{power: "On", words: `"GracefulShutdown","ForceOff"`}
	_, b := serve(t, h.change())
	_, err := b.within(2*time.Second, "power", "setPower", "soft")
	if errs.CodeOf(err) != errs.BmcError || !strings.Contains(err.Error(), "operating system") {
		t.Errorf("setPower(soft) = %v, want bmc-error about the operating system", err)
	}
	if want := []string{"GracefulShutdown while On"}; !slices.Equal(h.resets, want) {
		t.Errorf("the BMC saw %q, want %q", h.resets, want)
	}
}

// A power POST is sent again only where the answer says that nothing was done.
func TestPowerPostIsNotRepeated(t *testing.T) {
	for name, tt := range map[string]struct {
		status int
		body   string
		posts  int
	}{
		"408":                {408, ``, 1},
		"409":                {409, ``, 1},
		"429":                {429, ``, 1},
		"500":                {500, ``, 1},
		"502":                {502, ``, 1},
		"503":                {503, ``, 1},
		"504":                {504, ``, 1},
		"busy in POST":       {400, `{"error":{"@Message.ExtendedInfo":[{"MessageId":"iLO.2.14.UnableToModifyDuringSystemPOST"}]}}`, 1},
		"another complaint":  {400, `{"error":{"@Message.ExtendedInfo":[{"MessageId":"Base.1.8.ActionParameterNotSupported"}]}}`, 1},
		"412 says it":        {412, ``, 2},
		"428 says it":        {428, ``, 2},
		"400 about the ETag": {400, `{"error":{"message":"If-Match header is missing"}}`, 2},
	} {
		t.Run(name, func(t *testing.T) {
			posts := 0
			f, b := serve(t, map[string]http.HandlerFunc{
				resetPost: func(w http.ResponseWriter, r *http.Request) {
					if posts++; posts > 1 {
						w.WriteHeader(http.StatusNoContent)
						return
					}
					w.WriteHeader(tt.status)
					fmt.Fprint(w, tt.body)
				},
			})
			_, err := b.do("power", "setPower", "reset")
			if got := f.count(resetPost); got != tt.posts || (err == nil) != (tt.posts == 2) {
				t.Errorf("setPower(reset) = %v after %d POSTs, want %d", err, got, tt.posts)
			}
		})
	}
}

// The status of a change says what became of it, whatever happens to its body.
func TestCutBodyOfAChange(t *testing.T) {
	f, b := serve(t, map[string]http.HandlerFunc{resetPost: func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "1000")
		fmt.Fprint(w, `{"error":`)
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}})
	if _, err := b.do("power", "setPower", "reset"); err != nil || f.count(resetPost) != 1 {
		t.Errorf("setPower(reset) = %v after %d POSTs, want success after 1", err, f.count(resetPost))
	}
}

// Neither a time-out nor a cut connection repeats a power action, and the error
// says that nobody knows.
func TestLostPowerAnswer(t *testing.T) {
	for name, h := range map[string]http.HandlerFunc{
		"cut":      func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
		"time-out": hang,
	} {
		f, b := serve(t, map[string]http.HandlerFunc{resetPost: h})
		_, err := b.within(2*time.Second, "power", "setPower", "reset")
		want := map[string]errs.Code{"cut": errs.Interrupted, "time-out": errs.Timeout}[name]
		if errs.CodeOf(err) != want || errs.From(err).Retryable || !strings.Contains(err.Error(), "not known") {
			t.Errorf("%s: setPower(reset) = %v, want %s, not retryable, that says that it is not known", name, err, want)
		}
		if got := f.count(resetPost); got != 1 {
			t.Errorf("%s: %d POSTs, want 1", name, got)
		}
	}
}
