package ipmi

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// invoke runs one operation in this process.
func invoke(t *testing.T, o options, config, operation, args string) (string, error) {
	t.Helper()
	return invokeAs(t, o, password, config, operation, args)
}

func invokeAs(t *testing.T, o options, password, config, operation, args string) (string, error) {
	t.Helper()
	d, err := define(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, _ := drivertest.Context(t, context.Background(), map[string]string{"username": user, "password": password})
	kind, op, _ := strings.Cut(operation, ".")
	out, err := d.Invoke(ctx, kind, op, json.RawMessage(config), json.RawMessage(args))
	return string(out), err
}

// fakeTool puts a shell script in ipmitool's place.
func fakeTool(t *testing.T, script string) options {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "ipmitool"), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return options{dirs: []string{"/nowhere", dir}, timeout: 2 * time.Second}
}

const anyConfig = `{"address":"192.0.2.5:6230","options":{"cipherSuite":3}}`

// What a process listing or /proc/<pid>/environ shows never holds the password.
func TestPasswordOnlyThroughThePipe(t *testing.T) {
	t.Setenv("SOMETHING", "inherited")
	seen := filepath.Join(t.TempDir(), "seen")
	o := fakeTool(t, fmt.Sprintf(`{ echo "args: $*"; tr '\0' '\n' </proc/$$/environ; printf 'pipe: '; cat /dev/fd/3; echo; ls /proc/$$/fd | wc -l; } >%s
echo Chassis Power is on`, seen))
	if out, err := invoke(t, o, anyConfig, "power.getPower", ""); err != nil || out != `"on"` {
		t.Fatalf("getPower = %s, %v", out, err)
	}
	data, err := os.ReadFile(seen)
	if err != nil {
		t.Fatal(err)
	}
	text := string(data)
	want := "args: -I lanplus -C 3 -H 192.0.2.5 -p 6230 -U ADMIN -L ADMINISTRATOR -f /dev/fd/3 -N 3 chassis power status\n"
	if !strings.HasPrefix(text, want) {
		t.Errorf("ipmitool got %q, want %q", text, want)
	}
	if n := strings.Count(text, password); n != 1 || !strings.Contains(text, "pipe: "+password+"\n") {
		t.Errorf("the password shows %d times, want once, in the pipe:\n%s", n, text)
	}
	if strings.Contains(text, "inherited") || !strings.Contains(text, "PATH=/usr/sbin:/usr/bin:/sbin:/bin\n") {
		t.Errorf("environment is not the fixed one:\n%s", text)
	}
}

func TestFailures(t *testing.T) {
	for _, tt := range []struct {
		name, script, operation, args string
		code                          errs.Code
		retryable                     bool
		message                       string
	}{
		{"exit code", `echo; echo "Error: no session" >&2; echo second >&2; exit 1`, "power.getPower", "", errs.BmcError, true, "Error: no session"},
		{"silence", "exit 1", "power.getPower", "", errs.BmcError, true, "without a word"},
		{"password in the output", `echo "bad $(cat /dev/fd/3)" >&2; exit 1`, "power.getPower", "", errs.BmcError, true, "bad [redacted]"},
		{"signal", "kill -ABRT $$", "power.getPower", "", errs.BmcError, true, "aborted (cipher suite 3)"},
		{"no answer", "exec sleep 20", "power.getPower", "", errs.Unreachable, true, "did not answer within 2s"},
		{"bootdev lies", `case "$*" in *raw*) exit 0;; esac; echo "Error setting Chassis Boot Parameter 5"; exit 0`,
			"management.setBootDevice", `{"device":"pxe"}`, errs.BmcError, true, "Error setting Chassis Boot Parameter 5"},
		{"bootdev of another device", `echo "Set Boot Device to disk"`, "management.setBootDevice", `{"device":"pxe"}`, errs.BmcError, true, "Set Boot Device to disk"},
		{"power says nothing", "exit 0", "power.setPower", `"on"`, errs.BmcError, true, "did not say"},
		{"boot flags", "echo Boot parameter data: zz", "management.getBootDevice", "", errs.BmcError, true, "cannot be read"},
		{"no FRU", `case "$*" in *fru*) echo no FRU >&2; exit 1;; esac; echo Chassis Power is on`, "inspect.inspect", "", errs.BmcError, true, "no FRU"},
	} {
		_, err := invoke(t, fakeTool(t, tt.script), anyConfig, tt.operation, tt.args)
		e := errs.From(err)
		if e == nil || e.Code != tt.code || e.Retryable != tt.retryable || !strings.Contains(e.Message, tt.message) {
			t.Errorf("%s: %v, want %s with %q", tt.name, err, tt.code, tt.message)
		}
	}
	if out, err := invoke(t, fakeTool(t, "echo Chassis Power is dim"), anyConfig, "power.getPower", ""); err != nil || out != `"unknown"` {
		t.Errorf("an unknown power state = %s, %v, want unknown", out, err)
	}
	// A BMC without the boot flag timer still gets its device.
	o := fakeTool(t, `case "$*" in *raw*) exit 1;; esac; echo "Set Boot Device to pxe"`)
	if _, err := invoke(t, o, anyConfig, "management.setBootDevice", `{"device":"pxe"}`); err != nil {
		t.Errorf("setBootDevice of a BMC without the timer: %v", err)
	}
}

func TestHealth(t *testing.T) {
	for _, tt := range []struct {
		o  options
		ok bool
	}{{fakeTool(t, ""), true}, {options{dirs: []string{t.TempDir()}}, false}} {
		d, err := define(tt.o)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Health(context.Background()); (err == nil) != tt.ok {
			t.Errorf("Health(%v) = %v, want ok %v", tt.o.dirs, err, tt.ok)
		}
	}
	if _, err := invoke(t, options{dirs: []string{t.TempDir()}, timeout: time.Second}, anyConfig, "power.getPower", ""); errs.CodeOf(err) != errs.DriverError {
		t.Errorf("getPower without ipmitool: %v", err)
	}
}

func realTool(t *testing.T) options {
	t.Helper()
	needsIpmitool(t)
	return options{dirs: searchPath(), timeout: runTimeout}
}

// By itself ipmitool repeats, and a slow BMC then cycles a machine three times.
func TestSlowBMCCyclesOnce(t *testing.T) {
	o := realTool(t)
	bmc, fake := startBMC(t, bmctest.Delay(3500*time.Millisecond))
	if err := fake.PowerOn(context.Background(), bmctest.BootDevice{}); err != nil {
		t.Fatal(err)
	}
	before := len(fake.Calls())
	if _, err := invoke(t, o, fmt.Sprintf(`{"address":%q}`, bmc.Addr()), "power.setPower", `"cycle"`); err != nil {
		t.Fatal(err)
	}
	time.Sleep(4 * time.Second)
	ons := 0
	for _, c := range fake.Calls()[before:] {
		if strings.HasPrefix(c, "PowerOn") {
			ons++
		}
	}
	if ons != 1 {
		t.Errorf("the machine was started %d times: %v, want once", ons, fake.Calls())
	}
}

func TestUnreachable(t *testing.T) {
	o := realTool(t)
	o.timeout = 2 * time.Second
	// 192.0.2.0/24 is for documentation: nobody answers.
	for operation, args := range map[string]string{"power.getPower": "", "power.setPower": `"on"`, "management.setBootDevice": `{"device":"pxe"}`} {
		start := time.Now()
		_, err := invoke(t, o, `{"address":"192.0.2.1"}`, operation, args)
		if e := errs.From(err); e == nil || !e.Retryable || e.Code != errs.Unreachable && e.Code != errs.BmcError {
			t.Errorf("%s of a dead BMC: %v, want unreachable", operation, err)
		} else if e.Code == errs.BmcError {
			t.Logf("this machine has no route: %v", err)
		}
		if took := time.Since(start); took > 6*time.Second {
			t.Errorf("%s took %v, want one time-out of 2 s", operation, took)
		}
	}
}

func TestCancelledCall(t *testing.T) {
	o := fakeTool(t, "exec sleep 20")
	o.timeout = time.Minute
	d, err := define(o)
	if err != nil {
		t.Fatal(err)
	}
	limited, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	ctx, _ := drivertest.Context(t, limited, map[string]string{"username": user, "password": password})
	if _, err := d.Invoke(ctx, "power", "getPower", json.RawMessage(anyConfig), nil); errs.CodeOf(err) != errs.Timeout {
		t.Errorf("getPower past its deadline: %v, want timeout", err)
	}
}

func TestParseBootFlags(t *testing.T) {
	for _, tt := range []struct {
		data string
		want metal.BootDevice
		ok   bool
	}{
		{"8004000000", metal.BootDevice{Device: "pxe"}, true},
		{"e008000000", metal.BootDevice{Device: "disk", Persistent: true, EFI: true}, true},
		{"a014000000", metal.BootDevice{Device: "cdrom", EFI: true}, true},
		{"8018000000", metal.BootDevice{Device: "bios"}, true},
		{"8000000000", metal.BootDevice{Device: "none"}, true},
		{"6004000000", metal.BootDevice{Device: "none"}, true},
		{"8010000000", metal.BootDevice{}, false},
		{"80", metal.BootDevice{}, false},
		{"", metal.BootDevice{}, false},
	} {
		got, err := parseBootFlags("Boot parameter version: 1\nBoot parameter data: " + tt.data + "\n Boot Flags :\n")
		if (err == nil) != tt.ok || err == nil && got != tt.want {
			t.Errorf("parseBootFlags(%s) = %+v, %v, want %+v", tt.data, got, err, tt.want)
		}
	}
}

func TestParseSensors(t *testing.T) {
	got, err := parseSensors("CPU Temp         | 42 degrees C      | ok\nFan 1            | no reading        | ns\nIntrusion        | 0x00              | ok\n\nnoise\n")
	text, _ := json.Marshal(got)
	want := `[{"name":"CPU Temp","value":42,"unit":"degrees C","status":"ok"},{"name":"Fan 1","status":"ns"},{"name":"Intrusion","status":"ok"}]`
	if err != nil || string(text) != want {
		t.Errorf("parseSensors = %s, %v, want %s", text, err, want)
	}
}

// ipmitool's lists of an empty repository erase it.
func TestInspectNeverListsAnEmptyRepository(t *testing.T) {
	script := `case "$*" in
*"fru print 0"*) echo " Product Name : X";;
*"power status"*) echo "Chassis Power is on";;
*"sdr info"*) echo "Record Count                        : 0";;
*"sdr list"*) echo "erased" >&2; exit 1;;
*"lan print"*) printf 'IP Address              : 10.0.0.5\nMAC Address             : 52:54:00:AA:BB:CC\n';;
*"mc info"*) echo broken >&2; exit 1;;
esac`
	out, err := invoke(t, fakeTool(t, script), anyConfig, "inspect.inspect", "")
	want := `{"source":"ipmi","model":"X","bmc":{"mac":"52:54:00:aa:bb:cc","address":"10.0.0.5"},"power":"on"}`
	if err != nil || out != want {
		t.Errorf("inspect = %s, %v, want %s", out, err, want)
	}
}

func FuzzParsers(f *testing.F) {
	f.Add("Boot parameter data: e004000000\n")
	f.Add("CPU Temp | 42 degrees C | ok\n")
	f.Add("MAC Address : 52:54:00:aa:bb:cc\nRecord Count : 7\n")
	f.Fuzz(func(t *testing.T, out string) {
		_, _ = parseBootFlags(out)
		power, _ := parsePower(out)
		in, bmc := metal.Inspection{Power: power}, metal.BMC{}
		fillFRU(&in, fields(out))
		fillBMC(&bmc, fields(out))
		fillLAN(&bmc, fields(out))
		in.Sensors, _ = parseSensors(out)
		if _, err := json.Marshal(in); err != nil {
			t.Errorf("an inspection of %q cannot be encoded: %v", out, err)
		}
	})
}

func TestManifest(t *testing.T) {
	d, err := Driver()
	if err != nil {
		t.Fatal(err)
	}
	m := d.Manifest()
	if m.ID != "ipmi" || m.RunsOn != "site" || m.IsRetrySafe("power", "setPower") || !m.IsRetrySafe("power", "getPower") {
		t.Errorf("manifest = %+v", m)
	}
}
