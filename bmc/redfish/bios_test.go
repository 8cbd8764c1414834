package redfish

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// hasty makes a BMC that never shows something be given up soon.
func (b *bench) hasty() *bench {
	b.pool.timing.settle = 60 * time.Millisecond
	return b
}

func (b *bench) applied(kind, operation string, args ...any) (metal.Applied, error) {
	b.t.Helper()
	raw, err := b.do(kind, operation, args...)
	return into[metal.Applied](b.t, raw), err
}

// logged are the effects of one sort.
func logged(r *bmctest.Redfish, prefix string) []string {
	var lines []string
	for _, l := range r.Log() {
		if strings.HasPrefix(l, prefix) {
			lines = append(lines, l)
		}
	}
	return lines
}

func TestBIOSSettings(t *testing.T) {
	for _, faults := range [][]bmctest.Fault{
		nil, {bmctest.BiosOnlyInSettings}, {bmctest.BiosShownEarly}, {bmctest.BiosWantsApplyTime}, {bmctest.BiosRefusesApplyTime}, {bmctest.TaskMonitorOnly},
		{bmctest.TaskUnnamed}, {bmctest.TaskInLocation}, {bmctest.EtagNeeded}, {bmctest.EtagStrong}, {bmctest.EtagDoubledQuotes}, {bmctest.EtagStarOnly}, {bmctest.EtagRaces.Times(1)},
		{bmctest.BusyInPOST.Times(2)}, {bmctest.SuccessAsError, bmctest.BiosRefusesApplyTime}, {bmctest.AbsoluteLinks}, {bmctest.SlashNeeded}, {bmctest.MembersPaged},
		{bmctest.FailsAfter.Times(1)}, {bmctest.DropsAfter.Times(1)}, {bmctest.ResetsAfter.Times(1)}, {bmctest.ForeignLocation},
	} {
		t.Run(fmt.Sprint(faults), func(t *testing.T) {
			r, b := rig(t, faults...)
			raw, err := b.do("bios", "getSettings")
			before := into[map[string]any](t, raw)
			if err != nil || before["ProcTurboMode"] != "Enabled" || before["NodesPerSocket"] != 1.0 || before["SriovGlobal"] != false {
				t.Fatalf("getSettings = %s, %v", raw, err)
			}
			want := map[string]any{"ProcTurboMode": "Disabled", "NodesPerSocket": 2, "BootMode": "Uefi"}
			if got, err := b.applied("bios", "applySettings", want); err != nil || !got.RebootNeeded {
				t.Fatalf("applySettings = %+v, %v, want a reboot", got, err)
			}
			// Only what is new was sent.
			// Only a lost answer makes the same go out again.
			once := []string{"bios set NodesPerSocket=2,ProcTurboMode=Disabled"}
			if got := slices.Compact(logged(r, "bios")); !slices.Equal(got, once) {
				t.Errorf("the BMC saw %q, want %q", got, once)
			}
			// The same again changes nothing, and still waits for the boot.
			if got, err := b.applied("bios", "applySettings", want); err != nil || !got.RebootNeeded && !slices.Contains(faults, bmctest.BiosOnlyInSettings) {
				t.Errorf("applySettings again = %+v, %v, want a reboot", got, err)
			}
			if got := slices.Compact(logged(r, "bios")); len(got) != 1 {
				t.Errorf("the BMC saw %q, want one change", got)
			}
			r.SetFaults()
			if _, err := b.do("power", "setPower", "on"); err != nil {
				t.Fatal(err)
			}
			raw, err = b.do("bios", "getSettings")
			if after := into[map[string]any](t, raw); err != nil || after["ProcTurboMode"] != "Disabled" || after["NodesPerSocket"] != 2.0 {
				t.Errorf("getSettings after the boot = %s, %v", raw, err)
			}
			if got, err := b.applied("bios", "applySettings", want); err != nil || got.RebootNeeded {
				t.Errorf("applySettings of what is so = %+v, %v, want no reboot", got, err)
			}
		})
	}
}

// Pending values that the current resource shows at once are not applied yet.
func TestBIOSShownEarlyIsNotApplied(t *testing.T) {
	_, b := rig(t, bmctest.BiosShownEarly)
	want := map[string]any{"ProcTurboMode": "Disabled"}
	for range 2 {
		if got, err := b.applied("bios", "applySettings", want); err != nil || !got.RebootNeeded {
			t.Errorf("applySettings = %+v, %v, want a reboot", got, err)
		}
		if raw, _ := b.do("bios", "getSettings"); !strings.Contains(string(raw), `"ProcTurboMode":"Disabled"`) {
			t.Fatalf("the BMC shows %s: this test needs one that shows values early", raw)
		}
	}
}

// Where there is no settings object the attributes themselves are written.
func TestBIOSWithoutSettingsObject(t *testing.T) {
	r, b := rig(t, bmctest.BiosNoSettings)
	if got, err := b.applied("bios", "applySettings", map[string]any{"SriovGlobal": true}); err != nil || !got.RebootNeeded {
		t.Errorf("applySettings = %+v, %v, want a reboot", got, err)
	}
	if got := logged(r, "bios"); !slices.Equal(got, []string{"bios set SriovGlobal=true"}) {
		t.Errorf("the BMC saw %q", got)
	}
}

func TestBIOSRefusesWhatIsNotThere(t *testing.T) {
	r, b := rig(t)
	for _, tt := range []struct {
		name  string
		value any
		says  string
	}{
		{"ProcTurbo", "Disabled", `no setting "ProcTurbo"`}, {"SystemModel", "x", `"SystemModel" cannot be written`},
		{"ProcTurboMode", "Sometimes", "Enabled, Disabled"}, {"ProcTurboMode", true, "is text"}, {"NodesPerSocket", "2", "is a number"}, {"SriovGlobal", 1, "true or false"},
	} {
		_, err := b.do("bios", "applySettings", map[string]any{tt.name: tt.value, "AdminPhone": "1"})
		if errs.CodeOf(err) != errs.InvalidArgs || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("applySettings(%s=%v) = %v, want invalid-args with %q", tt.name, tt.value, err, tt.says)
		}
	}
	if got := logged(r, "bios"); len(got) > 0 {
		t.Errorf("the BMC saw %q, want nothing", got)
	}
}

func TestBIOSFaultsAreErrors(t *testing.T) {
	for _, tt := range []struct {
		fault bmctest.Fault
		code  errs.Code
		sent  int
	}{
		{bmctest.DropsBefore, errs.Interrupted, 0}, {bmctest.FailsBefore.Times(1), errs.BmcError, 0}, {bmctest.Bare, errs.UnsupportedOperation, 0},
	} {
		r, b := rig(t, tt.fault)
		_, err := b.hasty().do("bios", "applySettings", map[string]any{"ProcTurboMode": "Disabled"})
		if got := logged(r, "bios"); errs.CodeOf(err) != tt.code || len(got) != tt.sent {
			t.Errorf("%s: applySettings = %v with %q, want code %q", tt.fault, err, got, tt.code)
		}
	}
}

func TestBIOSReset(t *testing.T) {
	r, b := rig(t)
	if _, err := b.do("bios", "applySettings", map[string]any{"ProcTurboMode": "Disabled"}); err != nil {
		t.Fatal(err)
	}
	if got, err := b.applied("bios", "resetSettings"); err != nil || !got.RebootNeeded {
		t.Errorf("resetSettings = %+v, %v, want a reboot", got, err)
	}
	if got := logged(r, "bios reset"); len(got) != 1 {
		t.Errorf("the BMC saw %q, want one reset", r.Log())
	}
	r, b = rig(t, bmctest.DropsBefore.Times(1))
	if _, err := b.hasty().do("bios", "resetSettings"); errs.CodeOf(err) != errs.Interrupted || len(logged(r, "bios reset")) != 0 {
		t.Errorf("resetSettings that did not arrive = %v, want interrupted", err)
	}
	r, b = rig(t, bmctest.DropsAfter.Times(1))
	if _, err := b.do("bios", "resetSettings"); err != nil || len(logged(r, "bios reset")) != 1 {
		t.Errorf("resetSettings whose answer was lost = %v, %q, want it found done", err, r.Log())
	}
}

// biosFake is a BMC whose settings a test makes.
func biosFake(t *testing.T, more map[string]http.HandlerFunc) (*fake, *bench) {
	change := map[string]http.HandlerFunc{
		systemGet: say(`{"PowerState":"On","Bios":{"@odata.id":"/redfish/v1/B"},"Links":{"ManagedBy":[{"@odata.id":"/redfish/v1/Managers/1"}]},
			"Actions":{"#ComputerSystem.Reset":{"target":"/redfish/v1/x"}}}`),
		"GET /redfish/v1/B":          say(`{"Attributes":{"A":"1","Big":9007199254740993},"@Redfish.Settings":{"SettingsObject":{"@odata.id":"/redfish/v1/B/Settings"}},"Actions":{"#Bios.ResetBios":{"target":"/redfish/v1/B/Actions/Bios.ResetBios"}}}`),
		"GET /redfish/v1/B/Settings": say(`{"Attributes":{}}`),
	}
	for k, v := range more {
		change[k] = v
	}
	return serve(t, change)
}

// A number keeps every digit.
func TestBIOSNumbers(t *testing.T) {
	_, b := biosFake(t, nil)
	if raw, err := b.do("bios", "getSettings"); err != nil || string(raw) != `{"A":"1","Big":9007199254740993}` {
		t.Errorf("getSettings = %s, %v", raw, err)
	}
	for _, tt := range []struct {
		a, b string
		want bool
	}{{"1", "1.0", true}, {"1", "2", false}, {"9007199254740993", "9007199254740992", false}, {"1e999999999", "1e999999998", false}, {"10", "1e1", true}} {
		if got := same(json.Number(tt.a), json.Number(tt.b)); got != tt.want {
			t.Errorf("same(%s, %s) = %v, want %v", tt.a, tt.b, got, tt.want)
		}
	}
}

// A BMC that takes the values and does not show them has not taken them.
func TestBIOSIsReadBack(t *testing.T) {
	_, b := biosFake(t, map[string]http.HandlerFunc{"PATCH /redfish/v1/B/Settings": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }})
	if _, err := b.hasty().do("bios", "applySettings", map[string]any{"A": "2"}); errs.CodeOf(err) != errs.BmcError || !strings.Contains(err.Error(), "pending") {
		t.Errorf("applySettings that a BMC forgets = %v, want bmc-error", err)
	}
	if _, err := b.do("bios", "resetSettings"); errs.CodeOf(err) != errs.BmcError {
		t.Errorf("resetSettings of a BMC without the action = %v, want bmc-error", err)
	}
}

// What a BMC says against a setting is an error with a code, wherever it says it.
func TestBIOSResultsAreErrors(t *testing.T) {
	const blame = `{"MessageId":"Base.1.8.PropertyNotWritable","Message":"A is read only.","Severity":"Warning","MessageArgs":["A"]}`
	patched := false
	for name, change := range map[string]map[string]http.HandlerFunc{
		"a 400":    {"PATCH /redfish/v1/B/Settings": answer400(`{"error":{"@Message.ExtendedInfo":[` + blame + `]}}`)},
		"a 200":    {"PATCH /redfish/v1/B/Settings": say(`{"A@Message.ExtendedInfo":[` + blame + `]}`)},
		"an error": {"PATCH /redfish/v1/B/Settings": say(`{"error":{"@Message.ExtendedInfo":[` + blame + `]}}`)},
		"a result": {
			"PATCH /redfish/v1/B/Settings": func(w http.ResponseWriter, _ *http.Request) { patched = true; w.WriteHeader(http.StatusNoContent) },
			"GET /redfish/v1/B": func(w http.ResponseWriter, _ *http.Request) {
				messages := ""
				if patched {
					messages = blame
				}
				fmt.Fprintf(w, `{"Attributes":{"A":"1"},"@Redfish.Settings":{"SettingsObject":{"@odata.id":"/redfish/v1/B/Settings"},"Messages":[%s]}}`, messages)
			},
		},
	} {
		_, b := biosFake(t, change)
		if _, err := b.hasty().do("bios", "applySettings", map[string]any{"A": "2"}); errs.CodeOf(err) != errs.InvalidArgs || !strings.Contains(err.Error(), "A is read only") {
			t.Errorf("%s: applySettings = %v, want invalid-args", name, err)
		}
	}
}

// What can be seen of a reset decides: values that change, a flag, or the maker's
// values that are there already.
func TestBIOSAfterReset(t *testing.T) {
	is := func(value, flag string) bios {
		o, err := parseObject([]byte(`{"Attributes":{"A":"` + value + `"}` + flag + `}`))
		if err != nil {
			t.Fatal(err)
		}
		return bios{resource: o, current: o.scalars("Attributes"), next: o.scalars("Attributes")}
	}
	defaults := map[string]attribute{"A": {standard: "0"}, "R": {standard: "x", readOnly: true}}
	for _, tt := range []struct {
		name  string
		after bios
		known map[string]attribute
		want  string
	}{
		{"changed", is("0", ""), nil, "reset"}, {"a flag", is("1", `,"ResetBiosToDefaultsPending":true`), nil, "reset"},
		{"no flag", is("1", `,"ResetBiosToDefaultsPending":false`), nil, "refused"}, {"nothing", is("1", ""), nil, "nothing"},
		{"not the maker's", is("1", ""), defaults, "nothing"}, {"not the maker's, no flag", is("1", `,"ResetBiosToDefaultsPending":false`), defaults, "refused"},
		{"the maker's", is("1", `,"ResetBiosToDefaultsPending":false`), map[string]attribute{"A": {standard: "1"}}, "reset"},
	} {
		if got := tt.after.afterReset(is("1", ""), tt.known); got != tt.want {
			t.Errorf("%s: afterReset = %q, want %q", tt.name, got, tt.want)
		}
	}
	for flag, code := range map[string]errs.Code{"false": errs.BmcError, "true": ""} {
		asked := false
		_, b := biosFake(t, map[string]http.HandlerFunc{
			"GET /redfish/v1/B": func(w http.ResponseWriter, _ *http.Request) {
				fmt.Fprintf(w, `{"Attributes":{"A":"1"},"ResetBiosToDefaultsPending":%s,"Actions":{"#Bios.ResetBios":{"target":"/redfish/v1/B/Actions/Bios.ResetBios"}}}`, flag)
			},
			"POST /redfish/v1/B/Actions/Bios.ResetBios": func(http.ResponseWriter, *http.Request) { asked = true },
		})
		if _, err := b.hasty().do("bios", "resetSettings"); errs.CodeOf(err) != code || !asked {
			t.Errorf("resetSettings with the flag %s = %v, want code %q", flag, err, code)
		}
	}
}

func answer400(body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusBadRequest)
		fmt.Fprint(w, body)
	}
}

// A BMC that says that it takes an apply time and refuses it gets the values
// alone; one that refuses a value does not.
func TestBIOSApplyTimeRefused(t *testing.T) {
	for _, blame := range []string{`"Message":"no","MessageArgs":["@Redfish.SettingsApplyTime"]`, `"Message":"@Redfish.SettingsApplyTime is not known"`, `"Message":"no","MessageArgs":["A"]`} {
		blamesValue := strings.Contains(blame, `"A"`)
		var bodies []string
		pending := ""
		_, b := biosFake(t, map[string]http.HandlerFunc{
			"GET /redfish/v1/B": say(`{"Attributes":{"A":"1"},"@Redfish.Settings":{"SettingsObject":{"@odata.id":"/redfish/v1/B/Settings"},"SupportedApplyTimes":["Immediate","OnReset"]}}`),
			"PATCH /redfish/v1/B/Settings": func(w http.ResponseWriter, r *http.Request) {
				body, _ := io.ReadAll(r.Body)
				bodies = append(bodies, string(body))
				if strings.Contains(string(body), "ApplyTime") {
					answer400(`{"error":{"@Message.ExtendedInfo":[{"MessageId":"Base.1.8.PropertyUnknown",`+blame+`}]}}`)(w, r)
					return
				}
				pending = `"A":"2"`
			},
			"GET /redfish/v1/B/Settings": func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintf(w, `{"Attributes":{%s}}`, pending) },
		})
		_, err := b.do("bios", "applySettings", map[string]any{"A": "2"})
		if blamesValue && (errs.CodeOf(err) != errs.InvalidArgs || len(bodies) != 1) {
			t.Errorf("applySettings of a refused value = %v after %q, want invalid-args after one", err, bodies)
		}
		if !blamesValue && (err != nil || len(bodies) != 2 || bodies[1] != `{"Attributes":{"A":"2"}}`) {
			t.Errorf("applySettings = %v after %q, want the values alone at last", err, bodies)
		}
	}
}

// What a BMC begins with an answer, and what is made for its pending values, is
// followed: one that fails at once is no success, though the values show.
func TestBIOSTaskIsFollowed(t *testing.T) {
	const task = "/redfish/v1/TaskService/Tasks/1"
	for name, ends := range map[string]string{
		"exception": `{"TaskState":"Exception","Messages":[{"Message":"it broke"}]}`,
		"critical":  `{"TaskState":"Completed","TaskStatus":"Critical","Messages":[{"Message":"it broke"}]}`,
		"a job":     `{"JobState":"Failed","Message":"it broke"}`,
	} {
		for who, answers := range map[string][2]bool{"the answer's own": {true, false}, "the one that is made": {false, true}} {
			pending := ""
			begin := func(w http.ResponseWriter) {
				w.Header().Set("Location", task)
				w.WriteHeader(http.StatusAccepted)
			}
			_, b := biosFake(t, map[string]http.HandlerFunc{
				"GET /redfish/v1/Managers/1": say(`{"ManagerType":"BMC","Links":{"Oem":{"Dell":{"Jobs":{"@odata.id":"/redfish/v1/Managers/1/Jobs"}}}}}`),
				"PATCH /redfish/v1/B/Settings": func(w http.ResponseWriter, _ *http.Request) {
					if pending = `"A":"2"`; answers[0] {
						begin(w)
					}
				},
				"GET /redfish/v1/B/Settings": func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintf(w, `{"Attributes":{%s}}`, pending) },
				"POST /redfish/v1/Managers/1/Jobs": func(w http.ResponseWriter, _ *http.Request) {
					if !answers[1] {
						t.Error("a job was made beside the BMC's own")
					}
					begin(w)
				},
				"GET " + task: say(ends),
			})
			if _, err := b.hasty().do("bios", "applySettings", map[string]any{"A": "2"}); errs.CodeOf(err) != errs.BmcError || !strings.Contains(err.Error(), "it broke") {
				t.Errorf("%s, %s: applySettings = %v, want bmc-error with the reason", who, name, err)
			}
		}
	}
}

// A Dell BMC leaves pending values pending until a job is made for them, once.
func TestBIOSDellJob(t *testing.T) {
	pending, jobs := "", ""
	f, b := biosFake(t, map[string]http.HandlerFunc{
		"GET /redfish/v1/Managers/1":   say(`{"ManagerType":"BMC","Links":{"Oem":{"Dell":{"Jobs":{"@odata.id":"/redfish/v1/Managers/1/Jobs"}}}}}`),
		"PATCH /redfish/v1/B/Settings": func(w http.ResponseWriter, _ *http.Request) { pending = `"A":"2"` },
		"GET /redfish/v1/B/Settings":   func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintf(w, `{"Attributes":{%s}}`, pending) },
		"POST /redfish/v1/Managers/1/Jobs": func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			if jobs != "" {
				w.WriteHeader(http.StatusBadRequest) // one is enough
				return
			}
			jobs += string(body)
			w.Header().Set("Location", "/redfish/v1/TaskService/Tasks/JID_1")
			w.WriteHeader(http.StatusAccepted)
		},
		"GET /redfish/v1/TaskService/Tasks/JID_1": say(`{"TaskState":"Starting","PercentComplete":0,"Oem":{"Dell":{"JobState":"Scheduled"}}}`),
	})
	if got, err := b.applied("bios", "applySettings", map[string]any{"A": "2"}); err != nil || !got.RebootNeeded {
		t.Errorf("applySettings = %+v, %v, want a reboot", got, err)
	}
	if want := `{"TargetSettingsURI":"/redfish/v1/B/Settings"}`; jobs != want || f.count("POST /redfish/v1/Managers/1/Jobs") != 1 {
		t.Errorf("jobs = %s, want %s", jobs, want)
	}
	// A call after an interruption makes sure of the job.
	for _, before := range []string{jobs, ""} {
		jobs = before
		if got, err := b.applied("bios", "applySettings", map[string]any{"A": "2"}); err != nil || !got.RebootNeeded || jobs == "" {
			t.Errorf("applySettings again = %+v, %v, want a reboot and a job", got, err)
		}
	}
}
