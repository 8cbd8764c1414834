package redfish

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// bodiesDir holds answers of real BMCs, a folder for each vendor. A file's name
// is the path with / as _.
func bodiesDir(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("REDFISH_BODIES")
	if dir == "" {
		t.Skip("needs answers of real BMCs: set REDFISH_BODIES to their folder")
	}
	return dir
}

// recording is a BMC that answers with a vendor's recorded bodies, and takes no
// change.
type recording struct {
	dir string

	mu      sync.Mutex
	changes []string // every request that is no GET, but for sessions
}

func (r *recording) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	switch {
	case req.Method == http.MethodPost && strings.HasSuffix(req.URL.Path, "/Sessions"):
		w.Header().Set("X-Auth-Token", "token")
		w.Header().Set("Location", req.URL.Path+"/1")
		w.WriteHeader(http.StatusCreated)
	case req.Method == http.MethodDelete && strings.HasSuffix(req.URL.Path, "/Sessions/1"):
		w.WriteHeader(http.StatusNoContent)
	case req.Method != http.MethodGet:
		r.mu.Lock()
		r.changes = append(r.changes, req.Method+" "+req.URL.Path)
		r.mu.Unlock()
		w.WriteHeader(http.StatusMethodNotAllowed)
	default:
		name := strings.ReplaceAll(strings.TrimSuffix(req.URL.Path, "/"), "/", "_") + ".json"
		body, err := os.ReadFile(filepath.Join(r.dir, filepath.Base(name)))
		if err != nil {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(body)
	}
}

func replay(t *testing.T, dir string) (*recording, *bench) {
	t.Helper()
	r := &recording{dir: dir}
	s := httptest.NewTLSServer(r)
	t.Cleanup(s.Close)
	return r, newBench(t, s.Listener.Addr().String(), pinOf(s), "root", "calvin")
}

// getters are all operations that only read.
var getters = []string{
	"inspect.inspect", "power.getPower", "management.getBootDevice", "management.getEventLog", "management.getSecureBoot",
	"bios.getSettings", "raid.getLayout", "firmware.list", "virtual-media.status",
}

// recordedFacts are what a vendor's bodies say, as far as it was looked up in them.
type recordedFacts struct {
	manufacturer, model, serial, uuid string
	bmcFirmware, bmcMAC, bmcAddress   string
	cpu                               string
	cpus, cores, modules              int
	moduleBytes                       uint64
	slot                              string
	nics                              []string
	firmware                          map[string]string
	sensor                            string
	value                             float64
	listed                            int // components that firmware.list tells
	settings                          map[string]any
	events                            int
	media                             string
	boot                              device
	console                           string // ways to its serial console
	// refused are the operations of services that these bodies do not have.
	refused map[string]errs.Code
}

const no = errs.UnsupportedOperation

var recorded = map[string]recordedFacts{
	"generic": {
		manufacturer: "Contoso", model: "3500", serial: "437XR1138R2", uuid: "38947555-7742-3448-3784-823347823834",
		bmcFirmware: "1.45.455b66-rev4", bmcMAC: "23:11:8a:33:cf:ea", bmcAddress: "192.168.0.10",
		cpu: "Multi-Core Intel(R) Xeon(R) processor 7xxx Series", cpus: 1, cores: 8, modules: 3, moduleBytes: 32 << 30, slot: "DIMM 1",
		nics:     []string{"12:44:6a:3b:04:11", "12:44:6a:3b:88:90"}, // neither ToManager nor VLAN1
		firmware: map[string]string{"BIOS": "P79 v1.45", "BMC": "1.45.455b66-rev4", "SS": "2.50"}, listed: 3,
		sensor: "CPU1 Temp", value: 41, events: 2, media: "redfish.dmtf.org/freeImages/freeOS.1.1.iso", console: "reached by IPMI, SSH, Telnet; enroll the machine with --driver console=ipmi-sol", boot: device{Device: "pxe", EFI: true},
		refused: map[string]errs.Code{"bios.getSettings": no, "raid.getLayout": no},
	},
	"idrac": {
		manufacturer: "Dell Inc.", model: "PowerEdge Mock", bmcFirmware: "7.00.00.00",
		firmware: map[string]string{"BIOS": "2.19.1"}, listed: 1, sensor: "System Board Inlet Temp", value: 23,
		settings: map[string]any{"BootMode": "Uefi", "SysMemSize": "768 GB", "SystemModelName": "PowerEdge R740"}, console: "reached by IPMI, SSH; enroll", boot: device{Device: "none"},
		// The recording lists a volume and does not have it.
		refused: map[string]errs.Code{"raid.getLayout": errs.BmcError, "virtual-media.status": no, "management.getEventLog": no, "management.getSecureBoot": no},
	},
	"lenovo": {
		manufacturer: "Lenovo", model: "ThinkSystem", serial: "REDACTED", bmcFirmware: "1.00",
		firmware: map[string]string{"BIOS": "M5E101Q", "BMC": "1.00"},
		settings: map[string]any{"Memory_MemorySpeed": "MaxPerformance", "Processors_CStates": "Disable"}, console: "names no other way", boot: device{Device: "none"},
		refused: map[string]errs.Code{
			"raid.getLayout": no, "firmware.list": no, "virtual-media.status": no, "management.getEventLog": no, "management.getSecureBoot": no,
		},
	},
	"supermicro_x10": {
		manufacturer: "Supermicro", model: "Super Server", uuid: "00000000-0000-0000-0000-ac1f6b18a45a",
		bmcFirmware: "4.0", bmcMAC: "ac:1f:6b:18:a2:41", bmcAddress: "192.168.254.120",
		cpu: "Intel(R) Xeon(R) CPU D-1541 @ 2.10GHz", cpus: 1, cores: 8, modules: 4, moduleBytes: 16 << 30, slot: "DIMMA1",
		nics:     []string{"ac:1f:6b:18:a4:5a", "ac:1f:6b:18:a4:5b", "ac:1f:6b:18:a6:b2", "ac:1f:6b:18:a6:b3"},
		firmware: map[string]string{"BIOS": "1.2", "BMC": "4.0"}, sensor: "System Power Control", value: 0, events: 65, console: "reached by IPMI, SSH; enroll", boot: device{Device: "none"},
		refused: map[string]errs.Code{"bios.getSettings": no, "firmware.list": no, "virtual-media.status": no, "management.getSecureBoot": no},
	},
}

// Every getter reads the bodies of every vendor, and nothing is written to any.
func TestRealBodies(t *testing.T) {
	dir := bodiesDir(t)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for _, e := range entries {
		if _, err := os.Stat(filepath.Join(dir, e.Name(), "_redfish_v1.json")); err != nil {
			continue
		}
		facts, known := recorded[e.Name()]
		if known {
			seen++
		}
		t.Run(e.Name(), func(t *testing.T) {
			r, b := replay(t, filepath.Join(dir, e.Name()))
			answers := map[string]json.RawMessage{}
			for _, op := range getters {
				kind, name, _ := strings.Cut(op, ".")
				raw, err := b.do(kind, name)
				answers[op] = raw
				switch code := errs.CodeOf(err); {
				case known && code != facts.refused[op]:
					t.Errorf("%s = %.300s, %v, want code %q", op, raw, err, facts.refused[op])
				case !known && code != "" && (code != no && code != errs.BmcError || op == "inspect.inspect"):
					t.Errorf("%s = %v, want an answer, or that the BMC has it not", op, err)
				}
			}
			// None of these is an OpenBMC; what ways they have is theirs to say.
			if err := openSeat(t.Context(), b, "[]").end(t); errs.CodeOf(err) != no || known && !strings.Contains(err.Error(), facts.console) {
				t.Errorf("console.open = %v, want %s that says %q", err, no, facts.console)
			}
			if len(r.changes) > 0 {
				t.Errorf("the BMC was sent changes: %q", r.changes)
			}
			if known {
				facts.compare(t, answers)
			}
		})
	}
	if seen != len(recorded) {
		t.Errorf("%d of %d vendors' bodies are there", seen, len(recorded))
	}
}

func into[T any](t *testing.T, raw json.RawMessage) (v T) {
	t.Helper()
	if len(raw) > 0 {
		if err := json.Unmarshal(raw, &v); err != nil {
			t.Errorf("%.200s: %v", raw, err)
		}
	}
	return v
}

func (f recordedFacts) compare(t *testing.T, answers map[string]json.RawMessage) {
	found := into[metal.Inspection](t, answers["inspect.inspect"])
	same := func(what string, got, want any) {
		t.Helper()
		if got != want {
			t.Errorf("%s = %v, want %v", what, got, want)
		}
	}
	same("source", found.Source, "redfish")
	same("power", found.Power, metal.PowerOn)
	same("manufacturer", found.Manufacturer, f.manufacturer)
	same("model", found.Model, f.model)
	same("serial", found.Serial, f.serial)
	same("productUuid", found.ProductUUID, f.uuid)
	if found.BMC == nil {
		t.Fatal("no BMC is told")
	}
	same("BMC firmware", found.BMC.Firmware, f.bmcFirmware)
	same("BMC MAC", found.BMC.MAC, f.bmcMAC)
	same("BMC address", found.BMC.Address, f.bmcAddress)
	same("processors", len(found.Processors), f.cpus)
	for _, p := range found.Processors {
		same("processor", p.Model, f.cpu)
		same("cores", p.Cores, f.cores)
		same("threads", p.Threads, 2*f.cores)
	}
	same("modules", len(found.Memory), f.modules)
	for i, m := range found.Memory {
		same("module's size", m.SizeBytes, f.moduleBytes)
		if i == 0 {
			same("module's slot", m.Slot, f.slot)
		}
	}
	var nics []string
	for _, n := range found.NICs {
		nics = append(nics, n.MAC)
	}
	if !slices.Equal(nics, f.nics) {
		t.Errorf("NICs = %q, want %q", nics, f.nics)
	}
	same("firmware entries", len(found.Firmware), len(f.firmware))
	for _, x := range found.Firmware {
		same("firmware "+x.Component, x.Version, f.firmware[x.Component])
	}
	if i := slices.IndexFunc(found.Sensors, func(s metal.Sensor) bool { return s.Name == f.sensor }); f.sensor != "" && (i < 0 || found.Sensors[i].Value == nil || *found.Sensors[i].Value != f.value) {
		t.Errorf("sensors = %+v, want %s at %v", found.Sensors, f.sensor, f.value)
	}
	same("listed firmware", len(into[[]metal.Firmware](t, answers["firmware.list"])), f.listed)
	settings := into[map[string]any](t, answers["bios.getSettings"])
	for name, value := range f.settings {
		same("setting "+name, settings[name], value)
	}
	same("events", len(into[[]metal.LogEntry](t, answers["management.getEventLog"])), f.events)
	same("media", into[metal.Media](t, answers["virtual-media.status"]).Image, f.media)
	same("boot device", into[device](t, answers["management.getBootDevice"]), f.boot)
	same("getPower", string(answers["power.getPower"]), `"on"`)
}
