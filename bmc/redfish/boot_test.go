package redfish

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmctest"
)

func TestBootDevice(t *testing.T) {
	r, b := rig(t)
	for _, dev := range []device{
		{"pxe", false, true}, {"disk", true, false}, {"cdrom", false, true}, {"bios", false, false}, {"pxe", true, true}, {"none", false, false},
	} {
		if _, err := b.do("management", "setBootDevice", dev); err != nil {
			t.Errorf("setBootDevice(%+v) = %v", dev, err)
		}
		if got, err := b.bootDevice(); got != dev || err != nil {
			t.Errorf("getBootDevice() = %+v, %v, want %+v", got, err, dev)
		}
	}
	if _, err := b.do("management", "setBootDevice", device{Device: "tape"}); errs.CodeOf(err) != errs.InvalidArgs {
		t.Errorf("setBootDevice(tape) = %v, want invalid-args", err)
	}
	if got := len(r.Log()); got != 6 {
		t.Errorf("the BMC logged %q, want 6 lines", r.Log())
	}
}

// What BMCs want to be told, and what comes of it.
func TestBootFaults(t *testing.T) {
	pxe, disk := device{"pxe", false, true}, device{"disk", true, true}
	legacy := device{"pxe", false, false}
	for _, tt := range []struct {
		name  string
		fault bmctest.Fault
		ask   device
		want  device // what the BMC has afterwards
		code  errs.Code
	}{
		{"Supermicro loses the mode unless it is sent", bmctest.BootModeLost, pxe, pxe, ""},
		{"Dell refuses the mode", bmctest.BootModeRefused, pxe, pxe, ""},
		{"Dell refuses the mode, none asked for", bmctest.BootModeRefused, legacy, pxe, ""},
		{"the whole Boot object", bmctest.BootWhole, pxe, pxe, ""},
		{"the whole Boot object, none", bmctest.BootWhole, device{Device: "none"}, device{Device: "none"}, ""},
		{"Continuous refused", bmctest.BootContinuousRefused, disk, device{"disk", false, true}, errs.BootOnceOnly},
		{"Continuous becomes Once", bmctest.BootContinuousBecomesOnce, disk, device{"disk", false, true}, errs.BootOnceOnly},
		{"once where Continuous is refused", bmctest.BootContinuousRefused, pxe, pxe, ""},
		{"Supermicro reverts to Once", bmctest.BootRevertsToOnce, disk, disk, ""},
		{"iDRAC10's settings object", bmctest.BootSettings, pxe, pxe, ""},
		{"iDRAC10's settings object, persistent", bmctest.BootSettings, disk, disk, ""},
		{"shown late", bmctest.BootShownLate, pxe, pxe, ""},
		{"shown late, persistent", bmctest.BootShownLate, disk, disk, ""},
		{"ignored", bmctest.BootIgnored, pxe, device{Device: "none"}, errs.BmcError},
		{"busy in POST", bmctest.BusyInPOST.Times(3), pxe, pxe, ""},
		{"dropped before", bmctest.DropsBefore.Times(1), pxe, pxe, ""},
		{"dropped after", bmctest.DropsAfter.Times(1), pxe, pxe, ""},
		{"restarts after", bmctest.ResetsAfter.Times(1), pxe, pxe, ""},
		{"dropped before, always", bmctest.DropsBefore, pxe, device{Device: "none"}, errs.Interrupted},
		{"success as an error", bmctest.SuccessAsError, pxe, pxe, ""},
		{"unavailable for a moment", bmctest.Unavailable.Times(1), pxe, pxe, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r, b := rig(t, tt.fault)
			if tt.code == errs.BmcError || tt.code == errs.Interrupted {
				b.hurry()
			}
			_, err := b.do("management", "setBootDevice", tt.ask)
			if errs.CodeOf(err) != tt.code {
				t.Errorf("setBootDevice(%+v) = %v, want code %q", tt.ask, err, tt.code)
			}
			r.SetFaults()
			if got, err := b.bootDevice(); got != tt.want || err != nil {
				t.Errorf("getBootDevice() = %+v, %v, want %+v", got, err, tt.want)
			}
			told := slices.ContainsFunc(r.Log(), func(l string) bool { return strings.HasPrefix(l, "bootdev ") })
			if tt.code == "" && !told {
				t.Errorf("the BMC logged %q", r.Log())
			}
		})
	}
}

// A board that takes an override without its Enabled for one boot gets it each time,
// also where it shows already what is wanted.
func TestPersistentAgain(t *testing.T) {
	r, b := rig(t, bmctest.BootRevertsToOnce)
	for _, want := range []device{{"disk", true, true}, {"pxe", true, true}, {"disk", true, false}} {
		if _, err := b.do("management", "setBootDevice", want); err != nil {
			t.Errorf("setBootDevice(%+v) = %v", want, err)
		}
		if got, err := b.bootDevice(); got != want || err != nil {
			t.Errorf("getBootDevice() = %+v, %v, want %+v", got, err, want)
		}
	}
	if got := r.Log(); len(got) != 3 {
		t.Errorf("the BMC logged %q, want one change each", got)
	}
}

// A board that wants the whole Boot object and has no choice of its mode gets it
// with the mode that it shows.
func TestWholeBootWithItsOwnMode(t *testing.T) {
	boot := `{"BootSourceOverrideEnabled":"Disabled","BootSourceOverrideTarget":"None","BootSourceOverrideMode":"UEFI"}`
	f, b := serve(t, map[string]http.HandlerFunc{
		systemGet: func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintf(w, `{"Boot":%s}`, boot) },
		systemPatch: func(w http.ResponseWriter, r *http.Request) {
			o, err := parseObject(readAll(r))
			in := o.object("Boot")
			if err != nil || in.text(bootEnabled) == "" || in.text(bootTarget) == "" || in.text(bootMode) != "UEFI" {
				w.WriteHeader(http.StatusBadRequest)
				return
			}
			boot = string(o["Boot"])
		},
	})
	want := device{"pxe", false, true}
	if _, err := b.do("management", "setBootDevice", device{"pxe", false, false}); err != nil {
		t.Errorf("setBootDevice(pxe) = %v after %d PATCHes", err, f.count(systemPatch))
	}
	if got, err := b.bootDevice(); got != want || err != nil {
		t.Errorf("getBootDevice() = %+v, %v, want %+v", got, err, want)
	}
}

// A downgrade to one boot is told in progress and in the error, once it is set.
func TestDowngradeIsTold(t *testing.T) {
	_, b := rig(t, bmctest.BootContinuousRefused)
	_, err := b.do("management", "setBootDevice", device{"pxe", true, true})
	if err == nil || !strings.Contains(err.Error(), "next boot only") || errs.From(err).Retryable {
		t.Errorf("setBootDevice(persistent) = %v, want an error that says that it is set for the next boot only", err)
	}
	if !slices.ContainsFunc(b.told(), func(m string) bool { return strings.Contains(m, "next boot only") }) {
		t.Errorf("progress was %q, want the downgrade in it", b.told())
	}
}

func TestBusyInPostEnds(t *testing.T) {
	r, b := rig(t, bmctest.BusyInPOST)
	_, err := b.do("management", "setBootDevice", device{Device: "pxe", EFI: true})
	if errs.CodeOf(err) != errs.BmcError || !errs.From(err).Retryable || !strings.Contains(err.Error(), "in POST") {
		t.Errorf("setBootDevice() of a BMC that stays busy = %v, want bmc-error, retryable, with its reason", err)
	}
	if got := requests(r, "PATCH "); got < 4 || got > 8 {
		t.Errorf("%d PATCHes, want a few with growing pauses", got)
	}
}

// Every sort of tag, for what is patched.
func TestETags(t *testing.T) {
	for _, fault := range [][]bmctest.Fault{
		{bmctest.EtagNeeded}, {bmctest.EtagStrong}, {bmctest.EtagWeak}, {bmctest.EtagDoubledQuotes}, {bmctest.EtagStarOnly}, {bmctest.EtagRefused},
		{bmctest.EtagOnActions}, {bmctest.EtagOnActions, bmctest.EtagWeak}, {bmctest.EtagOnActions, bmctest.EtagDoubledQuotes},
		{bmctest.EtagInBodyOnly}, {bmctest.EtagInBodyOnly, bmctest.EtagWeak}, {bmctest.EtagRaces.Times(1)},
	} {
		r, b := rig(t, fault...)
		want := device{"pxe", false, true}
		if _, err := b.do("management", "setBootDevice", want); err != nil {
			t.Errorf("%s: setBootDevice() = %v", fault, err)
		}
		if got, err := b.bootDevice(); got != want || err != nil {
			t.Errorf("%s: getBootDevice() = %+v, %v, want %+v", fault, got, err, want)
		}
		if _, err := b.do("power", "setPower", "on"); err != nil {
			t.Errorf("%s: setPower(on) = %v", fault, err)
		}
		if got, want := r.Log(), []string{"bootdev pxe efi once", "on pxe efi once"}; !slices.Equal(got, want) {
			t.Errorf("%s: the BMC logged %q, want %q", fault, got, want)
		}
	}
	f, b := serve(t, map[string]http.HandlerFunc{
		systemPatch: func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusPreconditionFailed) },
		systemGet:   say(`{"@odata.etag":"W/\"x\"","Boot":{}}`),
	})
	_, err := b.do("management", "setBootDevice", device{Device: "pxe"})
	if got := f.count(systemPatch); errs.CodeOf(err) != errs.BmcError || got > 8 {
		t.Errorf("setBootDevice() of a BMC that no tag pleases = %v after %d PATCHes, want bmc-error after no more than there are forms", err, got)
	}
}

func TestTagForms(t *testing.T) {
	for etag, want := range map[string][]string{
		`W/"x"`: {`W/"x"`, `"x"`, `x`, `""x""`, ``, `*`},
		`"x"`:   {`"x"`, `W/"x"`, `x`, `""x""`, ``, `*`},
		``:      {``, `*`},
	} {
		for _, form := range want {
			if !slices.Contains(forms(etag), form) {
				t.Errorf("forms(%s) = %q, want %s in it", etag, forms(etag), form)
			}
		}
		if got := forms(etag); etag != "" && got[0] != etag || got[len(got)-1] != "*" {
			t.Errorf("forms(%s) = %q, want it as it is first and * last", etag, got)
		}
	}
}

// A board that has a boot mode, accepts another one and keeps its own is found out.
func TestBootModeReadBack(t *testing.T) {
	_, b := serve(t, map[string]http.HandlerFunc{
		systemPatch: func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) },
		systemGet:   say(`{"Boot":{"BootSourceOverrideEnabled":"Once","BootSourceOverrideTarget":"Pxe","BootSourceOverrideMode":"Legacy"}}`),
	})
	b.hurry()
	_, err := b.do("management", "setBootDevice", device{"pxe", false, true})
	if errs.CodeOf(err) != errs.BmcError || !strings.Contains(err.Error(), "Legacy") {
		t.Errorf("setBootDevice(efi) = %v, want bmc-error about the mode", err)
	}
}

// UEFI that was asked for and cannot be had is an error, also where no mode can be sent.
func TestBootModeThatCannotBeHad(t *testing.T) {
	boot := `{"Boot":{"BootSourceOverrideEnabled":"Disabled","BootSourceOverrideTarget":"None","BootSourceOverrideMode":"Legacy"}}`
	_, b := serve(t, map[string]http.HandlerFunc{
		systemPatch: func(w http.ResponseWriter, r *http.Request) {
			if strings.Contains(string(readAll(r)), "Mode") {
				w.WriteHeader(http.StatusBadRequest)
				return
			}
			boot = `{"Boot":{"BootSourceOverrideEnabled":"Once","BootSourceOverrideTarget":"Pxe","BootSourceOverrideMode":"Legacy"}}`
		},
		systemGet: func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, boot) },
	})
	b.hurry()
	if _, err := b.do("management", "setBootDevice", device{"pxe", false, true}); errs.CodeOf(err) != errs.BmcError {
		t.Errorf("setBootDevice(efi) of a legacy machine = %v, want bmc-error", err)
	}
	if _, err := b.do("management", "setBootDevice", device{"pxe", false, false}); err != nil {
		t.Errorf("setBootDevice(legacy) of a legacy machine = %v", err)
	}
}

// A BMC that accepts a boot device and forgets it is found out, and what it does
// not offer is not asked for.
func TestBootDeviceReadBack(t *testing.T) {
	_, ignoring := serve(t, map[string]http.HandlerFunc{
		systemPatch: func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) },
		systemGet:   say(`{"PowerState":"On","Boot":{"BootSourceOverrideEnabled":"Disabled","BootSourceOverrideTarget":"None"}}`),
	})
	ignoring.hurry()
	_, err := ignoring.do("management", "setBootDevice", device{Device: "pxe"})
	if errs.CodeOf(err) != errs.BmcError || !strings.Contains(err.Error(), "still shows none") {
		t.Errorf("setBootDevice() at a BMC that ignores it = %v, want bmc-error", err)
	}
	f, limited := serve(t, map[string]http.HandlerFunc{
		systemGet: say(`{"Boot":{"BootSourceOverrideTarget@Redfish.AllowableValues":["Hdd"]}}`),
	})
	_, err = limited.do("management", "setBootDevice", device{Device: "pxe"})
	if errs.CodeOf(err) != errs.UnsupportedOperation || f.count(systemPatch) != 0 {
		t.Errorf("setBootDevice(pxe) at a BMC without = %v after %d PATCHes, want unsupported-operation", err, f.count(systemPatch))
	}
	_, strange := serve(t, map[string]http.HandlerFunc{systemGet: say(`{"Boot":{"BootSourceOverrideEnabled":"Once","BootSourceOverrideTarget":"Floppy"}}`)})
	if _, err := strange.bootDevice(); errs.CodeOf(err) != errs.BmcError {
		t.Errorf("getBootDevice() of a floppy = %v, want bmc-error", err)
	}
}

// A settings object that shows no override may still be the place to write one.
func TestSettingsObjectWithoutBoot(t *testing.T) {
	boot := `{"BootSourceOverrideEnabled":"Disabled","BootSourceOverrideTarget":"None"}`
	_, b := serve(t, map[string]http.HandlerFunc{
		systemGet: func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprintf(w, `{"@Redfish.Settings":{"SettingsObject":{"@odata.id":"/redfish/v1/Systems/1/SD"}},"Boot":%s}`, boot)
		},
		systemPatch:                    func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusMethodNotAllowed) },
		"GET /redfish/v1/Systems/1/SD": say(`{}`),
		"PATCH /redfish/v1/Systems/1/SD": func(http.ResponseWriter, *http.Request) {
			boot = `{"BootSourceOverrideEnabled":"Once","BootSourceOverrideTarget":"Pxe"}`
		},
	})
	if _, err := b.do("management", "setBootDevice", device{Device: "pxe"}); err != nil {
		t.Errorf("setBootDevice() by way of the settings object = %v", err)
	}
}

// Only an answer that the request is wrong leads to another form of it.
func TestBootRefusals(t *testing.T) {
	for status, want := range map[int]int{400: 2, 403: 1, 404: 2, 500: 1, 501: 2} {
		f, b := serve(t, map[string]http.HandlerFunc{
			systemPatch: func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) },
			systemGet:   say(`{"Boot":{"BootSourceOverrideEnabled":"Disabled","BootSourceOverrideTarget":"None","BootSourceOverrideMode":"UEFI"}}`),
		})
		_, err := b.do("management", "setBootDevice", device{Device: "pxe"})
		if got := f.count(systemPatch); errs.CodeOf(err) != errs.BmcError || (got >= 2) != (want == 2) {
			t.Errorf("setBootDevice() answered %d = %v after %d PATCHes, want at least %d", status, err, got, want)
		}
	}
}

// A persistent device that a power action turns into one for a single boot is
// made persistent again.
func TestPersistentBootSurvivesPower(t *testing.T) {
	enabled, patched := "Continuous", 0
	h := &host{power: "Off", words: `"On"`}
	change := h.change()
	change[systemGet] = func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"PowerState":%q,"Boot":{"BootSourceOverrideEnabled":%q,"BootSourceOverrideTarget":"Pxe","BootSourceOverrideMode":"UEFI"},
			"Actions":{"#ComputerSystem.Reset":{"target":"/redfish/v1/Systems/1/Actions/ComputerSystem.Reset"}}}`, h.power, enabled)
	}
	h.onReset = func(h *host) { h.power, enabled = "On", "Once" }
	change[systemPatch] = func(_ http.ResponseWriter, r *http.Request) {
		var in struct {
			Boot struct{ BootSourceOverrideEnabled string }
		}
		_ = json.NewDecoder(r.Body).Decode(&in)
		enabled = in.Boot.BootSourceOverrideEnabled
		patched++
	}
	_, b := serve(t, change)
	if _, err := b.do("power", "setPower", "on"); err != nil {
		t.Fatal(err)
	}
	if enabled != "Continuous" || patched != 1 {
		t.Errorf("after the power action the override is %s, patched %d times, want Continuous, once", enabled, patched)
	}
	if !slices.ContainsFunc(b.told(), func(m string) bool { return strings.Contains(m, "persistent again") }) {
		t.Errorf("progress was %q, want that in it", b.told())
	}
}
