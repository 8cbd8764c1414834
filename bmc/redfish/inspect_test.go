package redfish

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/plugins/metal"
)

func (b *bench) inspect() (metal.Inspection, error) {
	b.t.Helper()
	raw, err := b.do("inspect", "inspect")
	return into[metal.Inspection](b.t, raw), err
}

func TestInspect(t *testing.T) {
	r, b := rig(t)
	found, err := b.inspect()
	if err != nil {
		t.Fatal(err)
	}
	value := 41.0
	for what, pair := range map[string][2]any{
		"source":     {found.Source, "redfish"},
		"power":      {found.Power, metal.PowerOff},
		"BMC MAC":    {found.BMC.MAC, "52:54:00:b3:c0:01"},
		"BMC":        {found.BMC.Address, "192.0.2.10"},
		"processors": {fmt.Sprint(found.Processors), fmt.Sprint([]metal.Processor{{Model: "Rig CPU", Cores: 16, Threads: 32}, {Model: "Rig CPU", Cores: 16, Threads: 32}})},
		"module":     {found.Memory[1], metal.Memory{Slot: "DIMM_A2", SizeBytes: 32 << 30, Serial: "RIG-DIMM-2"}},
		"drives":     {len(found.Drives), 4},
		"drive":      {found.Drives[0], metal.Drive{Name: "1", Serial: "RIG-DISK-0001", SizeBytes: 960_197_124_096, Model: "Rig Disk"}},
		"NICs": {fmt.Sprint(found.NICs), fmt.Sprint([]metal.NIC{
			{MAC: "52:54:00:b3:c0:11", Name: "eth0", Speed: 25000}, {MAC: "52:54:00:b3:c0:12", Name: "eth1", Speed: 25000}})},
		"firmware": {fmt.Sprint(found.Firmware), fmt.Sprint([]metal.Firmware{{Component: "BIOS", Version: "1.0"}, {Component: "BMC", Version: "1.2"}})},
		"sensor":   {fmt.Sprint(found.Sensors[0].Name, *found.Sensors[0].Value, found.Sensors[0].Unit, found.Sensors[0].Status), fmt.Sprint("CPU1 Temp", value, "C", "ok")},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s = %+v, want %+v", what, pair[0], pair[1])
		}
	}
	if found.Manufacturer == "" || found.Model == "" || found.Serial == "" || found.ProductUUID == "" {
		t.Errorf("inspect = %+v, want manufacturer, model, serial and UUID", found)
	}
	// No call of an inspection writes.
	for _, request := range r.Requests() {
		if !strings.HasPrefix(request, "GET ") && request != sessionsPost {
			t.Errorf("inspect sent %s", request)
		}
	}
	if log := r.Log(); len(log) > 0 {
		t.Errorf("inspect had effects: %q", log)
	}
}

// A field of an odd type is lost, and nothing else is.
func TestInspectOddTypes(t *testing.T) {
	_, b := rig(t, bmctest.OddTypes)
	if found, err := b.inspect(); err != nil || found.Source != "redfish" || found.Power != metal.PowerOff {
		t.Errorf("inspect of odd types = %+v, %v", found, err)
	}
	_, b = serve(t, map[string]http.HandlerFunc{
		systemGet: say(`{"PowerState":"On","Manufacturer":7,"Model":"M","SerialNumber":12,"AssetTag":"N/A","UUID":["x"],"SKU":null,"ProcessorSummary":"none",
			"Processors":{"@odata.id":"/redfish/v1/P"},"Memory":"none","EthernetInterfaces":{"@odata.id":5},"Links":3,"Storage":[]}`),
		"GET /redfish/v1/P": say(`{"Members":[{"Model":"CPU A","TotalCores":"eight","TotalThreads":16},{"Model":2},7,{"Model":"CPU B","TotalCores":-1,"TotalThreads":1.5}]}`),
	})
	found, err := b.inspect()
	want := metal.Inspection{Source: "redfish", Model: "M", Power: metal.PowerOn, Processors: []metal.Processor{{Model: "CPU A", Threads: 16}, {Model: "CPU B"}}}
	if got, w := asJSON(found), asJSON(want); err != nil || got != w {
		t.Errorf("inspect = %s, %v, want %s", got, err, w)
	}
}

func asJSON(v any) string {
	text, _ := json.Marshal(v)
	return string(text)
}

// What a BMC fails to answer is left out, and all else is told.
func TestInspectLeavesOut(t *testing.T) {
	parts := map[string]http.HandlerFunc{
		systemGet: say(`{"PowerState":"On","Model":"M","Processors":{"@odata.id":"/redfish/v1/P"},"Memory":{"@odata.id":"/redfish/v1/M"},
			"EthernetInterfaces":{"@odata.id":"/redfish/v1/E"},"Storage":{"@odata.id":"/redfish/v1/S"},"Links":{"Chassis":[{"@odata.id":"/redfish/v1/C"}]}}`),
		"GET /redfish/v1/P":   say(`{"Members":[{"@odata.id":"/redfish/v1/P/1"},{"@odata.id":"/redfish/v1/P/2"}]}`),
		"GET /redfish/v1/P/1": say(`{"Model":"CPU 1"}`),
		"GET /redfish/v1/P/2": say(`{"Model":"CPU 2"}`),
		"GET /redfish/v1/M":   say(`{"Members":[{"DeviceLocator":"A1","CapacityMiB":1024}]}`),
		"GET /redfish/v1/E":   say(`{"Members":[{"MACAddress":"02:00:00:00:00:01"}]}`),
		"GET /redfish/v1/S":   say(`{"Members":[{"Drives":[{"@odata.id":"/redfish/v1/S/1"}]}]}`),
		"GET /redfish/v1/S/1": say(`{"Id":"Bay1","SerialNumber":"D1"}`),
		"GET /redfish/v1/C":   say(`{"Thermal":{"@odata.id":"/redfish/v1/T"}}`),
		"GET /redfish/v1/T":   say(`{"Temperatures":[{"Name":"Inlet","ReadingCelsius":20}]}`),
	}
	counts := func(i metal.Inspection) [5]int {
		return [5]int{len(i.Processors), len(i.Memory), len(i.Drives), len(i.NICs), len(i.Sensors)}
	}
	_, b := serve(t, parts)
	if found, err := b.inspect(); err != nil || counts(found) != [5]int{2, 1, 1, 1, 1} {
		t.Fatalf("inspect with all parts = %+v, %v", found, err)
	}
	status := func(code int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) }
	}
	for path, want := range map[string][5]int{
		"P": {0, 1, 1, 1, 1}, "P/1": {1, 1, 1, 1, 1}, "M": {2, 0, 1, 1, 1}, "S": {2, 1, 0, 1, 1}, "S/1": {2, 1, 0, 1, 1},
		"E": {2, 1, 1, 0, 1}, "C": {2, 1, 1, 1, 0}, "T": {2, 1, 1, 1, 0},
	} {
		for name, failing := range map[string]http.HandlerFunc{
			"404": status(http.StatusNotFound), "500": status(http.StatusInternalServerError), "403": status(http.StatusForbidden),
			"a page": say("<html>"), "no object": say("[]"), "redirect": func(w http.ResponseWriter, r *http.Request) {
				http.Redirect(w, r, "https://192.0.2.1/redfish/v1/x", http.StatusFound)
			},
			"another host": say(`{"Members":[{"@odata.id":"https://192.0.2.1/redfish/v1/x"}],"Thermal":{"@odata.id":"//192.0.2.1/redfish/v1/x"}}`),
		} {
			if name == "another host" && (path == "P/1" || path == "S/1" || path == "T") {
				continue // there it would be a resource without fields
			}
			changed := maps.Clone(parts)
			changed["GET /redfish/v1/"+path] = failing
			_, b := serve(t, changed)
			if found, err := b.inspect(); err != nil || counts(found) != want {
				t.Errorf("inspect with %s at %s = %s, %v, want %v parts", name, path, asJSON(found), err, want)
			}
		}
	}
	// A BMC that is gone is no BMC with fewer parts.
	gone := maps.Clone(parts)
	gone["GET /redfish/v1/P"] = func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }
	_, b = serve(t, gone)
	if found, err := b.inspect(); errs.CodeOf(err) != errs.Unreachable {
		t.Errorf("inspect of a BMC that goes away = %s, %v, want unreachable", asJSON(found), err)
	}
}

// The BMC's own ports and the wires between it and the machine are no NICs.
func TestInspectNICs(t *testing.T) {
	_, b := serve(t, map[string]http.HandlerFunc{
		systemGet:                    say(`{"PowerState":"On","EthernetInterfaces":{"@odata.id":"/redfish/v1/E"},"Links":{"Chassis":[{"@odata.id":"/redfish/v1/C"}],"ManagedBy":[{"@odata.id":"/redfish/v1/Managers/1"}]}}`),
		"GET /redfish/v1/Managers/1": say(`{"ManagerType":"BMC","EthernetInterfaces":{"@odata.id":"/redfish/v1/ME"},"HostInterfaces":{"@odata.id":"/redfish/v1/HI"}}`),
		"GET /redfish/v1/ME": say(`{"Members":[{"Id":"ToHost","MACAddress":"02:00:00:00:00:AA","Links":{"HostInterface":{"@odata.id":"/redfish/v1/HI/1"}}},
			{"Id":"1","MACAddress":"02:00:00:00:00:A1","InterfaceEnabled":false,"IPv4Addresses":[{"Address":"192.0.2.9"}]},{"Id":"2","MACAddress":"02:00:00:00:00:A2"},
			{"Id":"eth0","MACAddress":"02:00:00:00:00:BB","IPv4Addresses":[{"Address":"0.0.0.0"},{"Address":"192.0.2.7"}]}]}`),
		"GET /redfish/v1/HI": say(`{"Members":[{"Id":"1","HostEthernetInterfaces":{"@odata.id":"/redfish/v1/HE"}}]}`),
		"GET /redfish/v1/HE": say(`{"Members":[{"MACAddress":"02:00:00:00:00:CC"}]}`),
		"GET /redfish/v1/E": say(`{"Members":[
			{"Id":"NIC.1","MACAddress":"020000000001","SpeedMbps":1000},{"Id":"2","Name":"Port two","PermanentMACAddress":"02-00-00-00-00-02","MACAddress":"02:00:00:00:00:99"},
			{"Id":"Bmc","MACAddress":"02:00:00:00:00:bb"},{"Id":"Usb","MACAddress":"02:00:00:00:00:cc"},
			{"Id":"ToManager","MACAddress":"02:00:00:00:00:dd"},{"Id":"x","MACAddress":"02:00:00:00:00:ee","Links":{"HostInterface":{"@odata.id":"/redfish/v1/HI/1"}}},
			{"Id":"vlan","MACAddress":"02:00:00:00:00:ab","EthernetInterfaceType":"Virtual"},{"Id":"vlan2","MACAddress":"02:00:00:00:00:ac","Links":{"RelatedInterfaces":[{"@odata.id":"/redfish/v1/E/1"}]}},{"Id":"none","MACAddress":"00:00:00:00:00:00"},{"Id":"odd","MACAddress":"N/A"},{"Id":"again","MACAddress":"02:00:00:00:00:01"}]}`),
		"GET /redfish/v1/C":    say(`{"NetworkAdapters":{"@odata.id":"/redfish/v1/NA"}}`),
		"GET /redfish/v1/NA":   say(`{"Members":[{"Id":"A","Model":"m","NetworkPorts":{"@odata.id":"/redfish/v1/NP"}},{"Id":"B","Model":"m","NetworkDeviceFunctions":{"@odata.id":"/redfish/v1/NF"}}]}`),
		"GET /redfish/v1/NP":   say(`{"Members":[{"Id":"P1","CurrentLinkSpeedMbps":10000,"AssociatedNetworkAddresses":["02:00:00:00:00:03","02:00:00:00:00:ee"]}]}`),
		"GET /redfish/v1/NF":   say(`{"Members":[{"Id":"F1","Ethernet":{"PermanentMACAddress":"02:00:00:00:00:04"}}]}`),
		"GET /redfish/v1/HI/1": say(`{}`),
	})
	found, err := b.inspect()
	want := []metal.NIC{
		{MAC: "02:00:00:00:00:01", Name: "NIC.1", Speed: 1000}, {MAC: "02:00:00:00:00:02", Name: "Port two"},
		{MAC: "02:00:00:00:00:03", Name: "P1", Speed: 10000}, {MAC: "02:00:00:00:00:04", Name: "F1"},
	}
	if err != nil || !slices.Equal(found.NICs, want) {
		t.Errorf("NICs = %+v, %v, want %+v", found.NICs, err, want)
	}
	if found.BMC == nil || found.BMC.MAC != "02:00:00:00:00:bb" || found.BMC.Address != "192.0.2.7" {
		t.Errorf("BMC = %+v, want its own port", found.BMC)
	}
}

// iDRACs have a # in the names of their own ports.
func TestInspectEscapedNames(t *testing.T) {
	f, b := serve(t, map[string]http.HandlerFunc{
		systemGet:                    say(`{"Links":{"ManagedBy":[{"@odata.id":"/redfish/v1/Managers/1"}]}}`),
		"GET /redfish/v1/Managers/1": say(`{"EthernetInterfaces":{"@odata.id":"/redfish/v1/ME"}}`),
		"GET /redfish/v1/ME":         say(`{"Members":[{"@odata.id":"/redfish/v1/ME/iDRAC.Embedded.1%23NIC.1"}]}`),
		"GET /redfish/v1/ME/iDRAC.Embedded.1#NIC.1": say(`{"MACAddress":"02:00:00:00:00:bb"}`),
	})
	if found, err := b.inspect(); err != nil || found.BMC == nil || found.BMC.MAC != "02:00:00:00:00:bb" {
		t.Errorf("BMC = %+v, %v after %q", found.BMC, err, f.seen)
	}
}

// A BMC that says that it expands is asked once for each collection; one that
// then does not is asked for each member.
func TestInspectExpands(t *testing.T) {
	for _, expands := range []bool{true, false} {
		var queries []string
		f, b := serve(t, map[string]http.HandlerFunc{
			"GET /redfish/v1/": say(`{"Systems":{"@odata.id":"/redfish/v1/Systems"},"ProtocolFeaturesSupported":{"ExpandQuery":{"NoLinks":true,"Levels":true}}}`),
			systemGet:          say(`{"Memory":{"@odata.id":"/redfish/v1/M"}}`),
			"GET /redfish/v1/M": func(w http.ResponseWriter, r *http.Request) {
				queries = append(queries, r.URL.RawQuery)
				switch {
				case r.URL.RawQuery == "":
					fmt.Fprint(w, `{"Members":[{"@odata.id":"/redfish/v1/M/1"}]}`)
				case expands:
					fmt.Fprint(w, `{"Members":[{"@odata.id":"/redfish/v1/M/1","DeviceLocator":"A1","CapacityMiB":1}]}`)
				default:
					w.WriteHeader(http.StatusNotImplemented)
				}
			},
			"GET /redfish/v1/M/1": say(`{"DeviceLocator":"A1","CapacityMiB":1}`),
		})
		found, err := b.inspect()
		if err != nil || len(found.Memory) != 1 || found.Memory[0].Slot != "A1" {
			t.Errorf("expands %v: inspect = %s, %v", expands, asJSON(found), err)
		}
		if want := "$expand=.($levels=1)"; queries[0] != want {
			t.Errorf("the query was %q, want %q", queries[0], want)
		}
		if single := f.count("GET /redfish/v1/M/1"); single != map[bool]int{true: 0, false: 1}[expands] {
			t.Errorf("expands %v: %d single reads", expands, single)
		}
	}
}

// Sensors are read from the newer resources where there are no older ones.
func TestInspectNewerSensors(t *testing.T) {
	f, b := serve(t, map[string]http.HandlerFunc{
		systemGet:              say(`{"Links":{"Chassis":[{"@odata.id":"/redfish/v1/C/1"},{"@odata.id":"/redfish/v1/C/2"}]}}`),
		"GET /redfish/v1/C/1":  say(`{"Sensors":{"@odata.id":"/redfish/v1/SE"}}`),
		"GET /redfish/v1/SE":   say(`{"Members":[{"@odata.id":"/redfish/v1/SE/1"}]}`),
		"GET /redfish/v1/SE/1": say(`{"Name":"Inlet","Reading":21.5,"ReadingUnits":"Cel","Status":{"Health":"OK","State":"Enabled"}}`),
		"GET /redfish/v1/C/2":  say(`{"ThermalSubsystem":{"@odata.id":"/redfish/v1/TS"},"PowerSubsystem":{"@odata.id":"/redfish/v1/PS"}}`),
		"GET /redfish/v1/TS":   say(`{"Fans":{"@odata.id":"/redfish/v1/TS/F"},"ThermalMetrics":{"@odata.id":"/redfish/v1/TS/M"}}`),
		"GET /redfish/v1/TS/M": say(`{"TemperatureReadingsCelsius":[{"DeviceName":"CPU","Reading":55}]}`),
		"GET /redfish/v1/TS/F": say(`{"Members":[{"Name":"Fan 1","SpeedPercent":{"Reading":40,"SpeedRPM":4000},"Status":{"Health":"Warning"}}]}`),
		"GET /redfish/v1/PS":   say(`{"PowerSupplies":{"@odata.id":"/redfish/v1/PS/P"}}`),
		"GET /redfish/v1/PS/P": say(`{"Members":[{"Name":"PSU 1","PowerCapacityWatts":800,"Status":{"Health":"Critical"}}]}`),
	})
	found, err := b.inspect()
	if got, want := asJSON(found.Sensors), `[{"name":"Inlet","value":21.5,"unit":"C","status":"ok"},{"name":"CPU","value":55,"unit":"C"},`+
		`{"name":"Fan 1","value":4000,"unit":"RPM","status":"warning"},{"name":"PSU 1","status":"critical"}]`; err != nil || got != want {
		t.Errorf("sensors = %s, %v, want %s", got, err, want)
	}
	if f.count("GET /redfish/v1/SE/1") != 1 {
		t.Errorf("the sensor was read %d times, want once", f.count("GET /redfish/v1/SE/1"))
	}
}

// Where they cost one request the newer sensors are told beside the older ones.
func TestInspectSensorsOfBothSorts(t *testing.T) {
	for _, expands := range []bool{true, false} {
		root := `{"Systems":{"@odata.id":"/redfish/v1/Systems"}}`
		if expands {
			root = `{"Systems":{"@odata.id":"/redfish/v1/Systems"},"ProtocolFeaturesSupported":{"ExpandQuery":{"ExpandAll":true}}}`
		}
		_, b := serve(t, map[string]http.HandlerFunc{
			"GET /redfish/v1/":    say(root),
			systemGet:             say(`{"Links":{"Chassis":[{"@odata.id":"/redfish/v1/C/1"}]}}`),
			"GET /redfish/v1/C/1": say(`{"Thermal":{"@odata.id":"/redfish/v1/T"},"Sensors":{"@odata.id":"/redfish/v1/SE"}}`),
			"GET /redfish/v1/T":   say(`{"Temperatures":[{"Name":"Inlet","ReadingCelsius":20}]}`),
			"GET /redfish/v1/SE":  say(`{"Members":[{"Name":"Inlet","Reading":21},{"Name":"Outlet","Reading":30,"ReadingUnits":"Cel"}]}`),
		})
		want := `[{"name":"Inlet","value":20,"unit":"C"}]`
		if expands {
			want = `[{"name":"Inlet","value":20,"unit":"C"},{"name":"Outlet","value":30,"unit":"C"}]`
		}
		if found, err := b.inspect(); err != nil || asJSON(found.Sensors) != want {
			t.Errorf("expands %v: sensors = %s, %v, want %s", expands, asJSON(found.Sensors), err, want)
		}
	}
}

// An inspection reads so many resources and no more.
func TestInspectIsBounded(t *testing.T) {
	var members []string
	for i := range 1500 {
		members = append(members, fmt.Sprintf(`{"@odata.id":"/redfish/v1/M/%d"}`, i))
	}
	many := `{"Members":[` + strings.Join(members, ",") + `]}`
	change := map[string]http.HandlerFunc{systemGet: say(`{"Memory":{"@odata.id":"/redfish/v1/M"},"Processors":{"@odata.id":"/redfish/v1/M"},"EthernetInterfaces":{"@odata.id":"/redfish/v1/M"}}`), "GET /redfish/v1/M": say(many)}
	for i := range 1500 {
		change[fmt.Sprintf("GET /redfish/v1/M/%d", i)] = say(fmt.Sprintf(`{"DeviceLocator":"A%d","CapacityMiB":1,"Model":"m"}`, i))
	}
	f, b := serve(t, change)
	found, err := b.inspect()
	f.mu.Lock()
	requests := len(f.seen)
	f.mu.Unlock()
	if err != nil || len(found.Memory) != maxParts || requests > maxReads+20 {
		t.Errorf("inspect = %d modules, %v, by %d requests, want %d by at most %d", len(found.Memory), err, requests, maxParts, maxReads)
	}
	_, b = rig(t, bmctest.MembersEndless)
	if _, err := b.within(time.Minute, "inspect", "inspect"); errs.CodeOf(err) != errs.BmcError {
		t.Errorf("inspect of endless collections = %v, want bmc-error", err)
	}
}

// What a BMC says cannot reach a terminal.
func TestInspectTerminalEscapes(t *testing.T) {
	_, b := rig(t, bmctest.TerminalEscapes)
	raw, err := b.do("inspect", "inspect")
	found := into[metal.Inspection](t, raw)
	if err != nil || found.Serial == "" || found.Model == "" {
		t.Fatalf("inspect = %s, %v", raw, err)
	}
	for _, s := range []string{found.Serial, found.Model, found.Manufacturer} {
		if strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 }) {
			t.Errorf("%q would reach a terminal", s)
		}
	}
}

// Answers of other BMCs' faults: an error with a code, or a right inspection.
func TestInspectFaults(t *testing.T) {
	for _, tt := range []struct {
		fault bmctest.Fault
		code  errs.Code
	}{
		{bmctest.Bare, ""}, {bmctest.MembersPaged, ""}, {bmctest.AbsoluteLinks, ""}, {bmctest.SlashNeeded, ""}, {bmctest.SlashInLinks, ""}, {bmctest.SlashRefused, ""},
		{bmctest.ManagerAmongSystems, ""}, {bmctest.SessionsExpire, ""}, {bmctest.NoSessions, ""}, {bmctest.SeveralSystems, errs.BmcError},
		{bmctest.DeepJSON, errs.BmcError}, {bmctest.NotJSON, errs.BmcError}, {bmctest.CutJSON, errs.BmcError}, {bmctest.EndlessBody, errs.BmcError},
		{bmctest.ForeignLinks, errs.BmcError}, {bmctest.ForeignRedirect, errs.BmcError},
	} {
		_, b := rig(t, tt.fault)
		found, err := b.inspect()
		if errs.CodeOf(err) != tt.code || err == nil && (found.Serial == "" || found.BMC == nil) {
			t.Errorf("%s: inspect = %s, %v, want code %q", tt.fault, asJSON(found), err, tt.code)
		}
	}
}

func TestIdentityOfDell(t *testing.T) {
	found := identity(object{
		"Manufacturer": json.RawMessage(`"Dell Inc."`), "SKU": json.RawMessage(`"H2FKGT2"`), "SerialNumber": json.RawMessage(`"CNWS3007CO0126"`), "PartNumber": json.RawMessage(`"0923K0X13"`),
	}, nil)
	if found.Serial != "H2FKGT2" || found.Board == nil || found.Board.Serial != "CNWS3007CO0126" || found.Board.PartNumber != "0923K0X13" {
		t.Errorf("identity = %s, want the service tag as serial", asJSON(found))
	}
}

func TestMAC(t *testing.T) {
	for in, want := range map[string]string{
		"AC:1F:6B:18:A2:41": "ac:1f:6b:18:a2:41", "ac-1f-6b-18-a2-41": "ac:1f:6b:18:a2:41", "AC1F6B18A241": "ac:1f:6b:18:a2:41", " AC:1F:6B:18:A2:41 ": "ac:1f:6b:18:a2:41",
		"": "", "N/A": "", "00:00:00:00:00:00": "", "FF:FF:FF:FF:FF:FF": "", "AC:1F:6B": "", "00:00:00:00:00:00:00:01": "",
	} {
		if got := mac(in); got != want {
			t.Errorf("mac(%q) = %q, want %q", in, got, want)
		}
	}
}

func FuzzInspection(f *testing.F) {
	f.Add([]byte(`{"Manufacturer":"Dell Inc.","SKU":"ABC1234","SerialNumber":"\u001b[31mX","UUID":"1-2","ProcessorSummary":{"Count":2,"Model":"x"},"Model":"M","TotalCores":4,"CapacityMiB":1024,"MACAddress":"AC1F6B18A241",
		"Status":{"State":"Absent"},"Temperatures":[{"Name":"a","ReadingCelsius":1e400}],"Attributes":{"a":1e999,"b":[]},"Members":[{"@odata.id":"/redfish/v1/x","Id":"1","Version":"1"}]}`))
	f.Add([]byte(`{"ProcessorSummary":{"Count":1e300,"Model":"x"},"Id":"Installed-1.2__BIOS","Version":"1.2","CapacityBytes":-1,"RAIDType":"RAID1","Links":{"Drives":[{"@odata.id":"x"}]}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		o, err := parseObject(data)
		if err != nil {
			return
		}
		found := identity(o, []object{o})
		found.Processors, found.Memory = processors(o, []object{o}), modules([]object{o})
		found.Firmware = told(components(&conn{}, append(o.objects("Members"), o)))
		found.Drives = []metal.Drive{drive("/redfish/v1/x", o)}
		_ = attributes(o)
		if _, err := json.Marshal(o.scalars("Attributes")); err != nil {
			t.Errorf("scalars of %q: %v", data, err)
		}
		v, _ := (&provider{conn: &conn{}}).volume("/redfish/v1/x", o, array{drives: []disk{newDisk("/redfish/v1/y", o)}})
		if strings.ContainsFunc(v.Name+v.Level, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			t.Errorf("volume %+v from %q", v.Volume, data)
		}
		if m := mac(o.text("MACAddress")); m != "" {
			found.NICs = []metal.NIC{{MAC: m, Name: portName(o)}}
		}
		text, err := json.Marshal(found)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range []string{found.Manufacturer, found.Model, found.Serial, found.AssetTag, found.ProductUUID, o.health()} {
			if len([]rune(s)) > maxReason+3 || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }) {
				t.Errorf("%q from %q", s, data)
			}
		}
		if len(found.Processors) > 65 || strings.Contains(string(text), `\u001b`) {
			t.Errorf("%s from %q", text, data)
		}
	})
}
