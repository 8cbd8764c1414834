package redfish

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmctest"
)

type entry struct {
	ID, Severity, Sensor, Message string
	Time                          *time.Time
}

func (b *bench) events() ([]entry, error) {
	b.t.Helper()
	raw, err := b.do("management", "getEventLog")
	var all []entry
	if err == nil {
		if err := json.Unmarshal(raw, &all); err != nil {
			b.t.Fatal(err)
		}
	}
	return all, err
}

func TestEventLog(t *testing.T) {
	for _, fault := range []bmctest.Fault{"", bmctest.LogUnderManager, bmctest.MembersPaged, bmctest.TerminalEscapes, bmctest.OddTypes} {
		_, b := rig(t, fault)
		got, err := b.events()
		if err != nil || len(got) == 0 {
			t.Errorf("%s: getEventLog() = %d entries, %v", fault, len(got), err)
			continue
		}
		for i, e := range got {
			if e.ID == "" || e.Message == "" || strings.ContainsAny(e.Message, "\x1b\x07\n") {
				t.Errorf("%s: entry %d is %+v", fault, i, e)
			}
			if fault == "" && (e.Time == nil || !slices.Contains([]string{"ok", "warning", "critical"}, e.Severity)) {
				t.Errorf("entry %d has severity %q and time %v", i, e.Severity, e.Time)
			}
			if i > 0 && e.Time != nil && got[i-1].Time != nil && e.Time.Before(*got[i-1].Time) {
				t.Errorf("%s: entry %d is older than the one before", fault, i)
			}
		}
	}
	_, b := rig(t, bmctest.Bare)
	if _, err := b.events(); errs.CodeOf(err) != errs.UnsupportedOperation {
		t.Errorf("getEventLog() of a BMC without = %v, want unsupported-operation", err)
	}
}

// The newest entries of a long log on many pages, the oldest of them first, of the
// System Event Log and no other.
func TestEventLogIsBounded(t *testing.T) {
	const total, size = 1000, 50
	begin := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	page := func(w http.ResponseWriter, r *http.Request) {
		skip := 0
		_, _ = fmt.Sscanf(r.URL.Query().Get("$skip"), "%d", &skip)
		var members []string
		for i := skip; i < skip+size; i++ {
			n := total - i // the newest first, as Dell has it
			members = append(members, fmt.Sprintf(`{"Id":"%d","Message":"event %d","Severity":"Warning","Created":%q}`, n, n, begin.Add(time.Duration(n)*time.Second).Format(time.RFC3339)))
		}
		next := ""
		if skip+size < total {
			next = fmt.Sprintf(`,"Members@odata.nextLink":"/redfish/v1/m/Logs/Sel/Entries?$skip=%d"`, skip+size)
		}
		fmt.Fprintf(w, `{"Members":[%s]%s}`, strings.Join(members, ","), next)
	}
	_, b := serve(t, map[string]http.HandlerFunc{
		systemGet:                              say(`{"Links":{"ManagedBy":[{"@odata.id":"/redfish/v1/m"}]}}`),
		"GET /redfish/v1/m":                    say(`{"LogServices":{"@odata.id":"/redfish/v1/m/Logs"}}`),
		"GET /redfish/v1/m/Logs":               say(`{"Members":[{"@odata.id":"/redfish/v1/m/Logs/Lclog"},{"@odata.id":"/redfish/v1/m/Logs/Sel"}]}`),
		"GET /redfish/v1/m/Logs/Lclog":         say(`{"Id":"Lclog","Name":"Lifecycle Log","Entries":{"@odata.id":"/redfish/v1/m/Logs/Lclog/Entries"}}`),
		"GET /redfish/v1/m/Logs/Sel":           say(`{"Id":"Sel","LogEntryType":"SEL","Entries":{"@odata.id":"/redfish/v1/m/Logs/Sel/Entries"}}`),
		"GET /redfish/v1/m/Logs/Sel/Entries":   page,
		"GET /redfish/v1/m/Logs/Lclog/Entries": func(http.ResponseWriter, *http.Request) { t.Error("the lifecycle log was read") },
	})
	got, err := b.events()
	if err != nil || len(got) != maxEntries {
		t.Fatalf("getEventLog() = %d entries, %v, want %d", len(got), err, maxEntries)
	}
	if first, last := got[0].ID, got[len(got)-1].ID; first != "801" || last != "1000" {
		t.Errorf("getEventLog() goes from %s to %s, want 801 to 1000", first, last)
	}
}

// Entries that the collection only names are read one by one.
func TestEventLogOfLinks(t *testing.T) {
	_, b := serve(t, map[string]http.HandlerFunc{
		systemGet:                        say(`{"LogServices":{"@odata.id":"/redfish/v1/s/Logs"}}`),
		"GET /redfish/v1/s/Logs":         say(`{"Members":[{"@odata.id":"/redfish/v1/s/Logs/SEL"}]}`),
		"GET /redfish/v1/s/Logs/SEL":     say(`{"Id":"SEL","Entries":{"@odata.id":"/redfish/v1/s/Logs/SEL/E"}}`),
		"GET /redfish/v1/s/Logs/SEL/E":   say(`{"Members":[{"@odata.id":"/redfish/v1/s/Logs/SEL/E/1"},{"@odata.id":"/redfish/v1/s/Logs/SEL/E/2"},{"@odata.id":"/redfish/v1/s/Logs/SEL/E/3"}]}`),
		"GET /redfish/v1/s/Logs/SEL/E/1": say(`{"Id":"1","Message":"a","Severity":"OK","SensorType":"Fan"}`),
		"GET /redfish/v1/s/Logs/SEL/E/3": say(`{"Id":3,"Message":"c","Severity":"Critical","Created":"0000-00-00"}`),
	})
	got, err := b.events()
	if want := []entry{{ID: "1", Message: "a", Severity: "ok", Sensor: "Fan"}, {Message: "c", Severity: "critical"}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("getEventLog() = %+v, %v, want %+v", got, err, want)
	}
}

type secure struct {
	Enabled bool
	Mode    string
}

func (b *bench) secureBoot() (secure, error) {
	b.t.Helper()
	raw, err := b.do("management", "getSecureBoot")
	var s secure
	_ = json.Unmarshal(raw, &s)
	return s, err
}

// What is set holds from the next boot, and until then shows as what is set.
func TestSecureBoot(t *testing.T) {
	r, b := rig(t)
	if _, err := b.do("power", "setPower", "on"); err != nil {
		t.Fatal(err)
	}
	before, err := b.secureBoot()
	if err != nil || before.Mode != "user" {
		t.Fatalf("getSecureBoot() = %+v, %v, want mode user", before, err)
	}
	for range 2 {
		if _, err := b.do("management", "setSecureBoot", map[string]bool{"enabled": !before.Enabled}); err != nil {
			t.Errorf("setSecureBoot() = %v", err)
		}
	}
	if got, err := b.secureBoot(); got.Enabled != before.Enabled || err != nil {
		t.Errorf("getSecureBoot() before the boot = %+v, %v, want it as it was", got, err)
	}
	if _, err := b.do("power", "setPower", "reset"); err != nil {
		t.Fatal(err)
	}
	if got, err := b.secureBoot(); got.Enabled == before.Enabled || err != nil {
		t.Errorf("getSecureBoot() after the boot = %+v, %v, want it changed", got, err)
	}
	changes := 0
	for _, l := range r.Log() {
		changes += strings.Count(l, "secure boot ")
	}
	if changes != 1 {
		t.Errorf("the BMC logged %q, want one change of secure boot", r.Log())
	}
	_, bare := rig(t, bmctest.Bare)
	if _, err := bare.secureBoot(); errs.CodeOf(err) != errs.UnsupportedOperation {
		t.Errorf("getSecureBoot() of a BMC without = %v, want unsupported-operation", err)
	}
	_, ignoring := serve(t, map[string]http.HandlerFunc{
		systemGet:              say(`{"SecureBoot":{"@odata.id":"/redfish/v1/sb"}}`),
		"GET /redfish/v1/sb":   say(`{"SecureBootEnable":false}`),
		"PATCH /redfish/v1/sb": say(`{}`),
	})
	ignoring.hurry()
	if _, err := ignoring.do("management", "setSecureBoot", map[string]bool{"enabled": true}); errs.CodeOf(err) != errs.BmcError {
		t.Errorf("setSecureBoot() of a BMC that ignores it = %v, want bmc-error", err)
	}
}

// The BMC's restart takes the session with it, which is no error.
func TestResetBMC(t *testing.T) {
	r, b := rig(t)
	if _, err := b.do("management", "resetBmc"); err != nil {
		t.Fatal(err)
	}
	if got := r.Log(); !slices.Equal(got, []string{"manager reset"}) {
		t.Errorf("the BMC logged %q", got)
	}
	if got, err := b.power(); got != "off" || err != nil {
		t.Errorf("getPower() after the restart = %q, %v, want off", got, err)
	}
	// A BMC that goes down before it answers is told by its silence.
	r.SetFaults(bmctest.ResetsAfter.Times(1))
	if _, err := b.do("management", "resetBmc"); err != nil {
		t.Errorf("resetBmc() of a BMC that goes down at once = %v", err)
	}
	if got := r.Log(); len(got) != 2 {
		t.Errorf("the BMC logged %q, want one more restart", got)
	}
	// One whose answer is lost and that stays up is not.
	b.hurry()
	r.SetFaults(bmctest.DropsBefore)
	if _, err := b.do("management", "resetBmc"); errs.CodeOf(err) != errs.Interrupted {
		t.Errorf("resetBmc() whose answer is lost = %v, want interrupted", err)
	}
	_, graceful := serve(t, map[string]http.HandlerFunc{
		systemGet:           say(`{"Links":{"ManagedBy":[{"@odata.id":"/redfish/v1/m"}]}}`),
		"GET /redfish/v1/m": say(`{"Actions":{"#Manager.Reset":{"target":"/redfish/v1/m/Actions/Manager.Reset","ResetType@Redfish.AllowableValues":["ResetToDefaults"]}}}`),
	})
	if _, err := graceful.do("management", "resetBmc"); errs.CodeOf(err) != errs.UnsupportedOperation {
		t.Errorf("resetBmc() of a BMC that offers none = %v, want unsupported-operation", err)
	}
}
