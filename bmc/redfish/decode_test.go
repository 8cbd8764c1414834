package redfish

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// What the driver declares.
func TestDefinition(t *testing.T) {
	d, closer, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	closer(t.Context())
	m := d.Manifest()
	want := []string{"bios", "console", "credentials", "firmware", "inspect", "management", "power", "raid", "virtual-media"}
	if m.ID != "redfish" || m.RunsOn != "site" || !slices.Equal(m.Kinds, want) {
		t.Errorf("the driver is %s on %s with %q, want redfish on site with %q", m.ID, m.RunsOn, m.Kinds, want)
	}
	if !slices.Equal(sorted(served), want) {
		t.Errorf("served = %q, want the kinds that are implemented", served)
	}
	for op, safe := range map[string]bool{"getPower": true, "setPower": false} {
		if got := d.IsRetrySafe("power", op); got != safe {
			t.Errorf("power.%s is retry-safe: %v, want %v", op, got, safe)
		}
	}
	if d.IsRetrySafe("credentials", "rotate") || d.IsRetrySafe("firmware", "update") || d.IsRetrySafe("management", "resetBmc") {
		t.Error("an operation that is none is retry-safe")
	}
}

func sorted(list []string) []string {
	list = slices.Clone(list)
	slices.Sort(list)
	return list
}

// Boot and power of recorded BMCs, with the BMC's own words for what is changed.
func TestRealBootAndPower(t *testing.T) {
	dir := bodiesDir(t)
	for _, tt := range []struct {
		vendor string
		boot   device
		cdrom  string // the BMC's word for it
		cycle  bool   // has one of its own
	}{
		{"generic", device{"pxe", false, true}, "Cd", false},
		{"idrac", device{"none", false, false}, "Cd", true},
		{"lenovo", device{"none", false, false}, "Cd", false},
		{"supermicro_x10", device{"none", false, false}, "CD/DVD", false},
	} {
		rec := &recording{dir: filepath.Join(dir, tt.vendor)}
		var mu sync.Mutex
		var patches, resets []string
		s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			r.Body = io.NopCloser(strings.NewReader(string(body)))
			o, _ := parseObject(body)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case r.Method == http.MethodPatch:
				patches = append(patches, o.object("Boot").text(bootTarget))
				w.WriteHeader(http.StatusNoContent)
			case r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/Actions/ComputerSystem.Reset"):
				resets = append(resets, o.text("ResetType"))
				w.WriteHeader(http.StatusNoContent)
			default:
				rec.ServeHTTP(w, r)
			}
		}))
		b := newBench(t, s.Listener.Addr().String(), pinOf(s), "root", "calvin")
		if got, err := b.power(); got != "on" || err != nil {
			t.Errorf("%s: getPower() = %q, %v, want on", tt.vendor, got, err)
		}
		if got, err := b.bootDevice(); got != tt.boot || err != nil {
			t.Errorf("%s: getBootDevice() = %+v, %v, want %+v", tt.vendor, got, err, tt.boot)
		}
		// The recording does not change, so the read-back tells.
		b.hurry()
		_, err := b.do("management", "setBootDevice", device{Device: "cdrom"})
		if errs.CodeOf(err) != errs.BmcError || !slices.Equal(patches, []string{tt.cdrom}) {
			t.Errorf("%s: setBootDevice(cdrom) = %v with %q, want bmc-error with %q", tt.vendor, err, patches, tt.cdrom)
		}
		if _, err := b.do("power", "setPower", "reset"); err != nil || !slices.Equal(resets, []string{"ForceRestart"}) {
			t.Errorf("%s: setPower(reset) = %v with %q", tt.vendor, err, resets)
		}
		if tt.cycle {
			if _, err := b.do("power", "setPower", "cycle"); err != nil || !slices.Equal(resets, []string{"ForceRestart", "PowerCycle"}) {
				t.Errorf("%s: setPower(cycle) = %v with %q", tt.vendor, err, resets)
			}
		}
		s.Close()
	}
}

func TestLegible(t *testing.T) {
	for in, want := range map[string]string{
		"plain":                          "plain",
		"\x1b[2J\x1b]0;owned\x07serial":  " [2J ]0;owned serial",
		"a\r\nb\u202ec\u2028d\u0085e":    "a  b c d e",
		"\xff\xfe":                       "?",
		strings.Repeat("é", maxReason+1): strings.Repeat("é", maxReason) + "…",
	} {
		if got := legible(in); got != want {
			t.Errorf("legible(%q) = %q, want %q", in, got, want)
		}
	}
}

// An object gives what is asked of it, or nothing.
func TestObject(t *testing.T) {
	o, err := parseObject([]byte(`{"t":"x","n":1.5,"b":false,"z":null,"l":["a",1,null,"b"],"o":{"t":"y"},"r":[{"@odata.id":"/a"},{"x":1},3,null]}`))
	if err != nil {
		t.Fatal(err)
	}
	_, isBool := o.boolean("b")
	_, nullBool := o.boolean("z")
	_, textBool := o.boolean("t")
	n, isNumber := o.number("n")
	_, nullNumber := o.number("z")
	_, textNumber := o.number("t")
	if !isBool || nullBool || textBool || n != 1.5 || !isNumber || nullNumber || textNumber {
		t.Errorf("booleans and numbers are taken for others: %v %v %v %v %v %v", isBool, nullBool, textBool, isNumber, nullNumber, textNumber)
	}
	if o.text("t") != "x" || o.text("n") != "" || o.text("z") != "" || o.text("none") != "" {
		t.Error("text is not text")
	}
	if got := o.texts("l"); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("texts() = %q", got)
	}
	if got := o.links("r"); !slices.Equal(got, []string{"/a"}) {
		t.Errorf("links() = %q", got)
	}
	if len(o.objects("r")) != 2 || o.object("o").text("t") != "y" || o.object("n").object("x").text("y") != "" {
		t.Error("objects are not objects")
	}
}

func TestTooDeep(t *testing.T) {
	for in, want := range map[string]bool{
		strings.Repeat("[", maxDepth):                            false,
		strings.Repeat("[", maxDepth+1):                          true,
		strings.Repeat("[]", 1000):                               false,
		`"` + strings.Repeat("[", 1000) + `"`:                    false,
		`"\"` + strings.Repeat("[", 1000) + `"`:                  false,
		`"\\"` + strings.Repeat("[", 1000):                       true,
		strings.Repeat(`{"a":`, maxDepth+1):                      true,
		strings.Repeat("]", 100) + strings.Repeat("[", 100):      false,
		strings.Repeat("]", 5) + strings.Repeat("[", maxDepth+6): true,
	} {
		if got := tooDeep([]byte(in)); got != want {
			t.Errorf("tooDeep(%.20q...) = %v, want %v", in, got, want)
		}
	}
}

func FuzzParseSystem(f *testing.F) {
	f.Add([]byte(`{"PowerState":"On","Actions":{"#ComputerSystem.Reset":{"target":"/redfish/v1/x","ResetType@Redfish.AllowableValues":["On",1]}},"Boot":{"BootSourceOverrideTarget":"Pxe"}}`))
	f.Add([]byte(`{"Actions":[],"Boot":3,"PowerState":{}}`))
	f.Add([]byte(`{"@Redfish.Settings":{"SettingsObject":{"@odata.id":"https://bmc:443/redfish/v1/s"}}}`))
	c := &conn{target: target{address: "bmc:443"}}
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := parseSystem("/redfish/v1/Systems/1", data, c.resource)
		if err != nil {
			return
		}
		s.powerState()
		s.bootDevice()
		for _, path := range []string{s.reset, s.info, s.pending} {
			if path != "" && !strings.HasPrefix(path, "/redfish/") {
				t.Errorf("parseSystem(%q) has path %q", data, path)
			}
		}
		for device := range bootTargets {
			plans, err := bootPlans(s, metal.BootDevice{Device: device, Persistent: true})
			if err == nil && len(plans) == 0 {
				t.Errorf("bootPlans(%q) has neither plans nor an error", data)
			}
		}
	})
}

// What a BMC says of media, logs, secure boot and tasks is read without a fault and
// goes home printable.
func FuzzAnswers(f *testing.F) {
	f.Add([]byte(`{"Id":"1","Message":"\u001b[31m","Severity":"OK","Created":"2026-01-01T00:00:00Z","SensorType":3}`))
	f.Add([]byte(`{"Image":"http://x","Inserted":"yes","MediaTypes":["CD"],"ImageName":7}`))
	f.Add([]byte(`{"SecureBootEnable":1,"SecureBootCurrentBoot":"Enabled","SecureBootMode":"\u0007Mode"}`))
	f.Add([]byte(`{"error":{"code":1,"@Message.ExtendedInfo":{"Message":"x"}},"@Message.ExtendedInfo":[{"MessageId":"Base.1.0.PasswordChangeRequired"}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		a := &answer{status: 400, header: http.Header{}, body: data}
		says(a, passwordChange)
		said := []string{statusError("x", a).Error()}
		o, err := parseObject(data)
		if err == nil {
			e := logEntry(o)
			s := &slot{object: o, path: "/redfish/v1/x"}
			s.inserted()
			s.drive()
			s.shows("https://h/x.iso")
			rank(o)
			said = append(said, e.ID, e.Message, e.Sensor, secureBootState(o).Mode)
		}
		for _, text := range said {
			if strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
				t.Errorf("%q makes %q", data, text)
			}
		}
	})
}

func FuzzResource(f *testing.F) {
	for _, s := range []string{"/redfish/v1/Systems/1", "//h/redfish/", "https://h/redfish/", "/redfish/../x", "/redfish/%2e%2e/x", "@h/redfish/", "/redfish/v1\\..", "/redfish/?x", "https://bmc/redfish/v1", "https://bmc:443//redfish/"} {
		f.Add(s)
	}
	c := &conn{target: target{address: "bmc:443"}}
	f.Fuzz(func(t *testing.T, s string) {
		for _, resolve := range []resolver{resource, c.resource} {
			got, err := resolve(s)
			if err == nil && (!strings.HasPrefix(got, "/redfish/") || strings.Contains(got, "/../") || strings.ContainsAny(got, "\\%?")) {
				t.Errorf("resource(%q) = %q", s, got)
			}
		}
		if path, query, err := c.page(s); err == nil && (!strings.HasPrefix(path, "/redfish/") || strings.ContainsAny(query, " #\n")) {
			t.Errorf("page(%q) = %q, %q", s, path, query)
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

// The corpus of real answers is parsed as it is.
func TestRealAnswersParse(t *testing.T) {
	dir := bodiesDir(t)
	parsed := 0
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() || !strings.HasSuffix(path, ".json") {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		var any map[string]json.RawMessage
		if json.Unmarshal(data, &any) != nil {
			return nil
		}
		parsed++
		if _, err := parseObject(data); err != nil {
			t.Errorf("%s: %v", path, err)
		}
		return nil
	})
	if err != nil || parsed < 100 {
		t.Errorf("%d answers parsed, %v, want over 100", parsed, err)
	}
}
