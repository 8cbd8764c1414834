package ipmi

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
)

// operations are all that the driver serves, with an argument each.
var operations = []struct{ operation, args string }{
	{"power.getPower", ""}, {"power.setPower", `"on"`}, {"power.setPower", `"off"`}, {"power.setPower", `"soft"`}, {"power.setPower", `"cycle"`},
	{"power.setPower", `"reset"`}, {"power.setPower", `"nmi"`}, {"management.setBootDevice", `{"device":"pxe"}`}, {"management.getBootDevice", ""}, {"inspect.inspect", ""},
}

// script answers as ipmitool does, and writes its arguments to file.
func script(file string) string {
	return fmt.Sprintf(`echo "$*" >>%s
case "$*" in
*"power status"*) echo Chassis Power is on;;
*"power on"*) echo "Chassis Power Control: Up/On";;
*"power off"*) echo "Chassis Power Control: Down/Off";;
*"power soft"*) echo "Chassis Power Control: Soft";;
*"power cycle"*) echo "Chassis Power Control: Cycle";;
*"power reset"*) echo "Chassis Power Control: Reset";;
*"power diag"*) echo "Chassis Power Control: Diag";;
*"bootdev pxe"*) echo "Set Boot Device to pxe";;
*"bootparam get 5"*) echo "Boot parameter data: 8004000000";;
*"fru print 0"*) echo " Product Name : X";;
*"sdr info"*) echo "Record Count : 1";;
*"sdr list"*) echo "CPU Temp | 42 degrees C | ok";;
*"mc info"*) echo "IPMI Version : 2.0";;
*"lan print"*) echo "IP Address : 10.0.0.5";;
esac`, file)
}

func lines(t *testing.T, file string) []string {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(data)), "\n")
}

// The suite that was asked for is the only one of every run: there is no downgrade.
func TestOnlyTheAskedSuite(t *testing.T) {
	for _, suite := range []int{3, 8, 12, 17} {
		for _, op := range operations {
			seen := filepath.Join(t.TempDir(), "seen")
			if _, err := invoke(t, fakeTool(t, script(seen)), fmt.Sprintf(`{"address":"192.0.2.5","options":{"cipherSuite":%d}}`, suite), op.operation, op.args); err != nil {
				t.Errorf("%s(%s): %v", op.operation, op.args, err)
			}
			for _, l := range lines(t, seen) {
				if strings.Count(l, "-C ") != 1 || !strings.Contains(l, fmt.Sprintf("-I lanplus -C %d -H", suite)) {
					t.Errorf("%s under suite %d runs ipmitool %s", op.operation, suite, l)
				}
			}
		}
	}
	// The real one, at a BMC that has suites 3 and 17 alone.
	o := realTool(t)
	bmc, fake := startBMC(t)
	for suite, code := range map[int]errs.Code{17: "", 3: "", 8: errs.BmcError} {
		_, err := invoke(t, o, fmt.Sprintf(`{"address":%q,"options":{"cipherSuite":%d}}`, bmc.Addr(), suite), "power.getPower", "")
		if errs.CodeOf(err) != code {
			t.Errorf("getPower under suite %d = %v, want %q", suite, err, code)
		}
	}
	if calls := fake.Calls(); len(calls) != 0 {
		t.Errorf("the machine saw %q", calls)
	}
}

// ipmitool repeats by itself. What may not run twice is sent once, with a long
// wait for the answer; nothing else is sent so.
func TestOnlyRetrySafeRunsRepeat(t *testing.T) {
	d, err := Driver()
	if err != nil {
		t.Fatal(err)
	}
	for _, op := range operations {
		seen := filepath.Join(t.TempDir(), "seen")
		if _, err := invoke(t, fakeTool(t, script(seen)), anyConfig, op.operation, op.args); err != nil {
			t.Errorf("%s(%s): %v", op.operation, op.args, err)
		}
		kind, name, _ := strings.Cut(op.operation, ".")
		for _, l := range lines(t, seen) {
			if once, safe := strings.Contains(l, " -R 1 -N 20 "), d.IsRetrySafe(kind, name); once == safe {
				t.Errorf("%s, retry-safe %v, runs ipmitool %s", op.operation, safe, l)
			}
		}
	}
}

// The exit code is 0 whatever happened: the line that says what was done counts,
// and only for what was asked.
func TestTheSuccessLineCounts(t *testing.T) {
	for _, tt := range []struct{ script, operation, args string }{
		{"echo Error: nothing", "power.getPower", ""},
		{"exit 0", "power.getPower", ""},
		{`echo "Chassis Power Control: Up/On"`, "power.setPower", `"off"`},
		{`echo "Chassis Power Control: Reset"`, "power.setPower", `"cycle"`},
		{`echo "Chassis Power Control: "`, "power.setPower", `"on"`},
		{`echo "Set Chassis Power Control to Up/On failed: x"`, "power.setPower", `"on"`},
		{`echo "Set Boot Device to pxelinux"`, "management.setBootDevice", `{"device":"pxe"}`},
		{`case "$*" in *fru*) echo "FRU Device Description : Builtin FRU Device (ID 0)"; echo " Device not present (Timeout)";; *) echo Chassis Power is on;; esac`, "inspect.inspect", ""},
	} {
		_, err := invoke(t, fakeTool(t, tt.script), anyConfig, tt.operation, tt.args)
		if e := errs.From(err); e == nil || e.Code != errs.BmcError || !e.Retryable {
			t.Errorf("%s(%s) of %s = %v, want a retryable bmc-error", tt.operation, tt.args, tt.script, err)
		}
	}
	// A warning before it takes nothing from it.
	for operation, args := range map[string]string{"power.getPower": "", "power.setPower": `"on"`} {
		if _, err := invoke(t, fakeTool(t, `echo "a warning"; echo "Chassis Power is on"; echo "Chassis Power Control: Up/On"`), anyConfig, operation, args); err != nil {
			t.Errorf("%s after a warning: %v", operation, err)
		}
	}
}

// A failed part of an inspection is left out, unless it is the FRU or the power.
func TestInspectionsLeaveFailedPartsOut(t *testing.T) {
	for part, tt := range map[string]struct {
		absent string // what is missing then
		fails  bool
	}{
		"fru print": {fails: true}, "power status": {fails: true}, "mc info": {absent: `"version"`}, "lan print": {absent: `"address"`}, "sdr list": {absent: `"sensors"`}, "sdr info": {absent: `"sensors"`},
	} {
		all := script(filepath.Join(t.TempDir(), "seen"))
		o := fakeTool(t, fmt.Sprintf("case \"$*\" in *%q*) echo broken >&2; exit 1;; esac\n%s", part, all))
		out, err := invoke(t, o, anyConfig, "inspect.inspect", "")
		if (err != nil) != tt.fails || tt.fails && errs.CodeOf(err) != errs.BmcError {
			t.Errorf("inspect with a broken %s = %v, want a failure %v", part, err, tt.fails)
		}
		if err == nil && (strings.Contains(out, tt.absent) || !strings.Contains(out, `"model":"X"`)) {
			t.Errorf("inspect with a broken %s = %s, want no %s", part, out, tt.absent)
		}
	}
}

// readOnly are IPMI commands that change nothing but the session that they come in.
var readOnly = []string{
	"Get ", "Read ", "Reserve SDR Repository", "Set Session Privilege Level", "Close Session", "Activate Session",
}

// questions have no name in the log: with them ipmitool asks which extensions a
// BMC has (PICMG and VITA properties, HPM.2 LAN capabilities).
var questions = []string{"2c.00 ", "2c.3e "}

// No call of an inspection, nor of any getter, writes to the BMC: its own log says so.
func TestInspectionsWriteNothing(t *testing.T) {
	o := realTool(t)
	bmc, fake := startBMC(t)
	config := fmt.Sprintf(`{"address":%q}`, bmc.Addr())
	for _, operation := range []string{"inspect.inspect", "power.getPower", "management.getBootDevice"} {
		before := len(bmc.Commands())
		if _, err := invoke(t, o, config, operation, ""); err != nil {
			t.Errorf("%s: %v", operation, err)
		}
		sent := bmc.Commands()[before:]
		if len(sent) == 0 {
			t.Errorf("%s sent nothing that the BMC has seen", operation)
		}
		for _, c := range sent {
			_, name, _ := strings.Cut(c, " ")
			if !slices.Contains(questions, c) && !slices.ContainsFunc(readOnly, func(prefix string) bool { return strings.HasPrefix(name, prefix) }) {
				t.Errorf("%s sent %s", operation, c)
			}
		}
	}
	if len(bmc.Log()) != 0 || len(fake.Calls()) != 0 {
		t.Errorf("the BMC did %q, the machine saw %q", bmc.Log(), fake.Calls())
	}
	// The log can tell: a write is in it, and is none of these.
	if _, err := invoke(t, o, config, "management.setBootDevice", `{"device":"pxe"}`); err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(bmc.Commands(), func(c string) bool { return strings.HasSuffix(c, "Set System Boot Options") }) {
		t.Errorf("the log of commands has no write: %q", bmc.Commands())
	}
}

// A boot override waits for a machine that starts late: the BMC's timer of 60 s
// is stopped first.
func TestBootFlagsOutliveTheTimer(t *testing.T) {
	o := realTool(t)
	now := time.Unix(1000, 0)
	var late time.Duration
	bmc, _ := startBMC(t, bmctest.Clock(func() time.Time { return now.Add(late) }))
	config := fmt.Sprintf(`{"address":%q}`, bmc.Addr())
	if _, err := invoke(t, o, config, "management.setBootDevice", `{"device":"pxe","efi":true}`); err != nil {
		t.Fatal(err)
	}
	late = 10 * time.Minute
	if out, err := invoke(t, o, config, "management.getBootDevice", ""); err != nil || out != `{"device":"pxe","persistent":false,"efi":true}` {
		t.Errorf("ten minutes later getBootDevice = %s, %v, want pxe", out, err)
	}
	if _, err := invoke(t, o, config, "power.setPower", `"on"`); err != nil {
		t.Fatal(err)
	}
	if log := bmc.Log(); log[len(log)-1] != "on pxe efi once" {
		t.Errorf("the BMC did %q, want a start from pxe", log)
	}
}

// Passwords reach the BMC whole up to IPMI's 20 bytes; one byte more is refused
// before anything runs.
func TestPasswordLengths(t *testing.T) {
	o := realTool(t)
	d, err := define(o)
	if err != nil {
		t.Fatal(err)
	}
	const letters = "abcdefghijklmnopqrstuvwxyz"
	get := func(config, password string) error {
		ctx, _ := drivertest.Context(t, context.Background(), map[string]string{"username": user, "password": password})
		_, err := d.Invoke(ctx, "power", "getPower", json.RawMessage(config), nil)
		return err
	}
	for _, n := range []int{1, 15, 16, 17, 19, 20} {
		bmc, err := bmctest.StartIPMI(t.Context(), "127.0.0.1:0", user, letters[:n], bmctest.NewFake())
		if err != nil {
			t.Fatal(err)
		}
		config := fmt.Sprintf(`{"address":%q}`, bmc.Addr())
		if err := get(config, letters[:n]); err != nil {
			t.Errorf("a password of %d bytes: %v", n, err)
		}
		// Its last byte counts.
		if n == 16 || n == 20 {
			if err := get(config, letters[:n-1]+"!"); errs.CodeOf(err) != errs.BmcError {
				t.Errorf("a password of %d bytes with another last one = %v, want bmc-error", n, err)
			}
		}
		if n == 20 {
			before := len(bmc.Commands())
			if err := get(config, letters[:21]); errs.CodeOf(err) != errs.CredentialsUnavailable || len(bmc.Commands()) != before {
				t.Errorf("a password of 21 bytes = %v, want credentials-unavailable", err)
			}
		}
		if err := bmc.Close(); err != nil {
			t.Error(err)
		}
	}
}

// Escape sequences that a FRU, a sensor or an error holds do not go home.
func TestTerminalEscapes(t *testing.T) {
	o := fakeTool(t, `case "$*" in
*"fru print 0"*) printf ' Product Serial : A\033[2J\033]0;owned\007B\n';;
*"power status"*) echo Chassis Power is on;;
*"sdr info"*) echo "Record Count : 1";;
*"sdr list"*) printf 'CPU\033[31m | 42 degrees C | ok\n';;
esac`)
	out, err := invoke(t, o, anyConfig, "inspect.inspect", "")
	if err != nil || !strings.Contains(out, `"serial":"A?[2J?]0;owned?B"`) || !strings.Contains(out, `"name":"CPU?[31m"`) || strings.Contains(out, "u001b") {
		t.Errorf("inspect = %s, %v", out, err)
	}
	_, err = invoke(t, fakeTool(t, `printf 'bad \033[2J\n' >&2; exit 1`), anyConfig, "power.getPower", "")
	if err == nil || strings.Contains(err.Error(), "\x1b") || !strings.Contains(err.Error(), "bad ?[2J") {
		t.Errorf("the error is %q", err)
	}
}

// What the specification fixes by number and by path.
func TestFixedNumbers(t *testing.T) {
	if runTimeout != 30*time.Second || maxPassword != 20 || defaultSuite != 17 || defaultPort != 623 {
		t.Errorf("run %v, password %d, suite %d, port %d: want 30 s, 20, 17, 623", runTimeout, maxPassword, defaultSuite, defaultPort)
	}
	if got, want := searchPath(), []string{"/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin"}; !slices.Equal(got, want) {
		t.Errorf("searchPath() = %q, want %q", got, want)
	}
	if toolPath != "PATH=/usr/sbin:/usr/bin:/sbin:/bin" {
		t.Errorf("toolPath = %q", toolPath)
	}
	// The first that has it wins.
	first, second := t.TempDir(), t.TempDir()
	for _, dir := range []string{first, second} {
		if err := os.WriteFile(filepath.Join(dir, "ipmitool"), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := findTool([]string{"/nowhere", first, second}); err != nil || got != filepath.Join(first, "ipmitool") {
		t.Errorf("findTool = %s, %v, want the first", got, err)
	}
}
