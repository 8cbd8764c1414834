package bmctest

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"os"
	"os/exec"
	"reflect"
	"strings"
	"testing"
	"time"
)

const password = "twenty-bytes-pass-ok"

// ipmitool runs the real client against a rig's BMC.
func ipmitool(t *testing.T, i *IPMI, password string, args ...string) (string, error) {
	t.Helper()
	const path = "/usr/bin/ipmitool"
	if _, err := os.Stat(path); err != nil {
		t.Skip("needs ipmitool: ", err)
	}
	host, port, err := net.SplitHostPort(i.Addr())
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	_, _ = w.WriteString(password)
	_ = w.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	base := []string{"-I", "lanplus", "-C", "17", "-H", host, "-p", port, "-U", "ADMIN", "-L", "ADMINISTRATOR", "-f", "/dev/fd/3", "-N", "2", "-R", "2"}
	if len(args) > 0 && args[0] == "impatient" { // the client's own defaults, which resend
		base, args = base[:len(base)-4], args[1:]
	}
	cmd := exec.CommandContext(ctx, path, append(base, args...)...)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.ExtraFiles = []*os.File{r}
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

func startIPMI(t *testing.T, m Machine, opts ...Option) *IPMI {
	t.Helper()
	opts = append([]Option{OffInterval(10 * time.Millisecond)}, opts...)
	i, err := StartIPMI(t.Context(), "127.0.0.1:0", "ADMIN", password, m, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = i.Close() })
	return i
}

func TestIPMIUnderIpmitool(t *testing.T) {
	m := NewFake()
	i := startIPMI(t, m)
	for _, tt := range []struct {
		args string
		want string // in the output
	}{
		{"chassis power status", "Chassis Power is off"},
		{"chassis bootdev pxe options=efiboot", "Set Boot Device to pxe"},
		{"chassis bootparam get 5", "Force PXE"},
		{"chassis power on", "Chassis Power Control: Up/On"},
		{"chassis power status", "Chassis Power is on"},
		{"chassis bootparam get 5", "No override"},
		{"chassis power reset", "Chassis Power Control: Reset"},
		{"chassis bootdev disk options=persistent", "Set Boot Device to disk"},
		{"chassis power cycle", "Chassis Power Control: Cycle"},
		{"chassis power cycle", "Chassis Power Control: Cycle"},
		{"chassis power off", "Chassis Power Control: Down/Off"},
		{"fru print 0", "RIG-0001"},
		{"mc info", "Firmware Revision"},
		{"mc guid", "System GUID"},
		{"lan print", "52:54:00:b3:c0:01"},
	} {
		out, err := ipmitool(t, i, password, strings.Fields(tt.args)...)
		if err != nil || !strings.Contains(out, tt.want) {
			t.Errorf("ipmitool %s = %q, %v, want %q in it", tt.args, out, err, tt.want)
		}
	}
	want := []string{"bootdev pxe efi once", "on pxe efi once", "reset none", "bootdev disk persistent", "cycle disk persistent", "cycle disk persistent", "off"}
	if got := i.Log(); !reflect.DeepEqual(got, want) {
		t.Errorf("Log() = %q, want %q", got, want)
	}
	wantCalls := []string{"PowerOn pxe efi once", "PowerOff", "PowerOn none", "PowerOff", "PowerOn disk persistent", "PowerOff", "PowerOn disk persistent", "PowerOff"}
	if got := m.Calls(); !reflect.DeepEqual(got, wantCalls) {
		t.Errorf("Calls() = %q, want %q", got, wantCalls)
	}
}

func TestIPMIRefusesWrongPassword(t *testing.T) {
	i := startIPMI(t, NewFake())
	if out, err := ipmitool(t, i, "wrong", "chassis", "power", "on"); err == nil {
		t.Errorf("a wrong password switched the machine on: %q", out)
	}
	if got := i.Log(); len(got) != 0 {
		t.Errorf("Log() = %q, want nothing", got)
	}
}

func TestIPMIAnswersFailure(t *testing.T) {
	m := NewFake()
	i := startIPMI(t, m)
	if out, err := ipmitool(t, i, password, "chassis", "power", "cycle"); err == nil {
		t.Errorf("power cycle of a machine that is off = %q, want a failure", out)
	}
	m.Fail(errors.New("no such disk"))
	if out, err := ipmitool(t, i, password, "chassis", "power", "on"); err == nil {
		t.Errorf("power on of a machine that does not start = %q, want a failure", out)
	}
	m.Fail(nil)
	if out, err := ipmitool(t, i, password, "chassis", "power", "on"); err != nil {
		t.Errorf("power on = %q, %v", out, err)
	}
}

// A BMC that answers late is told again by a client that resends: the rig
// does as the real ones do.
func TestSlowBMCDoesWhatItIsToldTwice(t *testing.T) {
	m := NewFake()
	if err := m.PowerOn(t.Context(), BootDevice{Device: "none"}); err != nil {
		t.Fatal(err)
	}
	i := startIPMI(t, m, Delay(3500*time.Millisecond))
	if out, err := ipmitool(t, i, password, "-R", "1", "-N", "20", "chassis", "power", "cycle"); err != nil {
		t.Fatalf("patient client = %q, %v", out, err)
	}
	if got := i.Log(); len(got) != 1 {
		t.Errorf("a patient client made %q, want one cycle", got)
	}
	out, err := ipmitool(t, i, password, "impatient", "chassis", "power", "cycle")
	if got := i.Log(); len(got) < 3 {
		t.Errorf("an impatient client made %q (%q, %v), want more cycles than one", got[1:], out, err)
	}
}

func TestBootFlagsExpire(t *testing.T) {
	now := time.Unix(1000, 0)
	c := newChassis(NewFake(), newOptions([]Option{Clock(func() time.Time { return now })}))
	pxe := BootDevice{Device: "pxe", EFI: true}
	c.setOverride(pxe, true)
	now = now.Add(59 * time.Second)
	if got, ok := c.current(); !ok || got != pxe {
		t.Errorf("after 59 s: current() = %v, %v, want %v", got, ok, pxe)
	}
	now = now.Add(time.Second)
	if got, ok := c.current(); ok {
		t.Errorf("after 60 s: current() = %v, want none", got)
	}
	if got := c.nextBoot(); got.Device != "none" {
		t.Errorf("after 60 s: nextBoot() = %v, want none", got)
	}
	c.keepFlags(true)
	c.setOverride(pxe, true)
	now = now.Add(time.Hour)
	if got := c.nextBoot(); got != pxe {
		t.Errorf("with the timer stopped: nextBoot() = %v, want %v", got, pxe)
	}
}

func TestBootOverrides(t *testing.T) {
	none := BootDevice{Device: "none"}
	once := BootDevice{Device: "pxe"}
	standing := BootDevice{Device: "disk", EFI: true, Persistent: true}
	c := newChassis(NewFake(), newOptions(nil))
	for _, tt := range []struct {
		name string
		do   func()
		want BootDevice
	}{
		{"fresh", func() {}, none},
		{"once", func() { c.setOverride(once, false) }, once},
		{"after once", func() {}, none},
		{"persistent", func() { c.setOverride(standing, false) }, standing},
		{"after persistent", func() {}, standing},
		{"once over persistent", func() { c.setOverride(once, false) }, once},
		{"persistent again", func() {}, standing},
		{"none once over persistent", func() { c.setOverride(none, false) }, none},
		{"and persistent again", func() {}, standing},
		{"cleared", c.clearOverride, none},
	} {
		tt.do()
		if got := c.nextBoot(); got != tt.want {
			t.Errorf("%s: nextBoot() = %v, want %v", tt.name, got, tt.want)
		}
	}
}

// A reset keeps the machine's process unless the device of the next boot differs.
func TestResetWithOverride(t *testing.T) {
	m := NewFake()
	c := newChassis(m, newOptions(nil))
	steps := []func(context.Context) error{c.powerOn, c.reset}
	for _, step := range steps {
		if err := step(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	c.setOverride(BootDevice{Device: "pxe"}, false)
	if err := c.reset(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := []string{"PowerOn none", "Reset", "PowerOff", "PowerOn pxe once"}
	if got := m.Calls(); !reflect.DeepEqual(got, want) {
		t.Errorf("Calls() = %q, want %q", got, want)
	}
}

func TestRedfish(t *testing.T) {
	m := NewFake()
	r, err := StartRedfish(t.Context(), "127.0.0.1:0", "admin", "pw", m, OffInterval(time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	call := func(method, path, user, body string) (int, map[string]any) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, "https://"+r.Addr()+path, bytes.NewBufferString(body))
		if err != nil {
			t.Fatal(err)
		}
		if user != "" {
			req.SetBasicAuth(user, "pw")
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var out map[string]any
		_ = json.NewDecoder(resp.Body).Decode(&out)
		return resp.StatusCode, out
	}
	for _, tt := range []struct {
		method, path, user, body string
		want                     int
	}{
		{"GET", "/redfish/v1/", "", "", 200},
		{"GET", system, "", "", 401},
		{"GET", system, "other", "", 401},
		{"GET", system, "admin", "", 200},
		{"POST", system + "/Actions/ComputerSystem.Reset", "", `{"ResetType":"On"}`, 401},
		{"POST", system + "/Actions/ComputerSystem.Reset", "admin", `{"ResetType":"Sideways"}`, 400},
		{"POST", system + "/Actions/ComputerSystem.Reset", "admin", `{"ResetType":"PowerCycle"}`, 409},
		{"PATCH", system, "admin", `{"Boot":{"BootSourceOverrideEnabled":"Once","BootSourceOverrideTarget":"Pxe","BootSourceOverrideMode":"UEFI"}}`, 204},
		{"PATCH", system, "admin", `{"Boot":{"BootSourceOverrideEnabled":"Once","BootSourceOverrideTarget":"Tape"}}`, 400},
		{"POST", system + "/Actions/ComputerSystem.Reset", "admin", `{"ResetType":"On"}`, 204},
	} {
		if got, body := call(tt.method, tt.path, tt.user, tt.body); got != tt.want {
			t.Errorf("%s %s %s as %q = %d %v, want %d", tt.method, tt.path, tt.body, tt.user, got, body, tt.want)
		}
	}
	_, body := call("GET", system, "admin", "")
	if body["PowerState"] != "On" {
		t.Errorf("PowerState = %v, want On", body["PowerState"])
	}
	if got := body["Boot"].(map[string]any)["BootSourceOverrideEnabled"]; got != "Disabled" {
		t.Errorf("after the boot: BootSourceOverrideEnabled = %v, want Disabled", got)
	}
	if got, want := r.Log(), []string{"bootdev pxe efi once", "on pxe efi once"}; !reflect.DeepEqual(got, want) {
		t.Errorf("Log() = %q, want %q", got, want)
	}
}
