package bmctest

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/bmc-toolbox/bmclib/v2"
	"github.com/go-logr/logr"
	"golang.org/x/sys/unix"
)

// python is an interpreter that can import module, from PEERS_PYTHONPATH too.
func python(t *testing.T, module, debian string) *exec.Cmd {
	t.Helper()
	for _, name := range []string{"/usr/bin/python3", "python3"} {
		check := exec.CommandContext(t.Context(), name, "-c", "import "+module)
		check.Env = pythonEnv()
		if check.Run() == nil {
			cmd := exec.CommandContext(t.Context(), name)
			cmd.Env = check.Env
			return cmd
		}
	}
	t.Skipf("needs the Python module %s: Debian's package %s, or its folder in PEERS_PYTHONPATH", module, debian)
	return nil
}

func pythonEnv() []string {
	return []string{"PATH=" + os.Getenv("PATH"), "HOME=/nonexistent", "PYTHONDONTWRITEBYTECODE=1", "PYTHONPATH=" + os.Getenv("PEERS_PYTHONPATH")}
}

// The peers' BMC has a certificate that a client can verify.
func peersBMC(t *testing.T, m Machine) (c *caller, ca string) {
	t.Helper()
	s := httptest.NewTLSServer(http.NotFoundHandler())
	cert := s.TLS.Certificates[0]
	s.Close()
	ca = filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Certificate[0]}), 0o600); err != nil {
		t.Fatal(err)
	}
	return newCaller(t, m, Certificate(cert)), ca
}

// TestRedfishUnderRedfishtool has DMTF's client do what it can.
func TestRedfishUnderRedfishtool(t *testing.T) {
	tool := []string{"redfishtool"}
	if _, err := exec.LookPath(tool[0]); err != nil {
		const run = "import sys; from redfishtoollib.redfishtoolMain import main; sys.exit(main(['redfishtool'] + sys.argv[1:]))"
		tool = []string{python(t, "redfishtoollib", "redfishtool").Path, "-c", run}
	}
	c, _ := peersBMC(t, NewFake())
	config := filepath.Join(t.TempDir(), "config")
	text, err := json.Marshal(map[string]string{"user": "admin", "password": "password"})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config, text, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		args string
		want string // in the output
	}{
		{"root", `"RedfishVersion": "1.11.0"`},
		{"-A Basic Systems list", `"@odata.id": "/redfish/v1/Systems/1"`},
		{"-A Session Systems -F get", `"SerialNumber": "RIG-0001"`},
		{"-A Session Systems -I 1 setBootOverride Once Pxe", ""},
		{"-A Session Systems -I 1 reset On", ""},
		{"-A Session Systems -I 1 get -P PowerState", `"PowerState": "On"`},
		{"-A Session Systems -I 1 Processors -a", `"Model": "Rig CPU"`},
		{"-A Session Systems -I 1 EthernetInterfaces -i 1", `"52:54:00:b3:c0:11"`},
		{"-A Session Systems -I 1 Logs list", "LogServices/SEL"},
		{"-A Session Chassis -F Power", `"PowerConsumedWatts": 212`},
		{"-A Session Managers list", "/redfish/v1/Managers/1"},
		{"-A Session AccountService", `"MaxPasswordLength": 64`},
		{"-A Session SessionService", `"ServiceEnabled": true`},
		{"-A Session raw GET " + biosPath, `"ProcTurboMode": "Enabled"`},
		{"-A Session Systems -I 1 reset ForceOff", ""},
	} {
		args := append(slices.Clone(tool), "-r", c.r.Addr(), "-S", "Always", "-c", config)
		args = append(args, strings.Fields(tt.args)...)
		cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
		cmd.Env = pythonEnv()
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), tt.want) {
			t.Errorf("redfishtool %s = %s, %v, want %q in it", tt.args, out, err, tt.want)
		}
	}
	want := []string{"bootdev pxe efi once", "on pxe efi once", "off"}
	if got := c.r.Log(); !slices.Equal(got, want) {
		t.Errorf("Log() = %q, want %q", got, want)
	}
	if got := c.r.Sessions(); got != 0 {
		t.Errorf("redfishtool left %d sessions", got)
	}
}

// TestRedfishUnderSushy has OpenStack's client, by which Ironic drives BMCs,
// do what Ironic does with it.
func TestRedfishUnderSushy(t *testing.T) {
	cmd := python(t, "sushy", "python3-sushy")
	const script = `
import json, sys
import sushy
from sushy import auth

cfg = json.load(sys.stdin)
def say(*words): print(*words, flush=True)
def follow(monitor):
    # sushy takes the body's task for the monitor, which is 200 from the start.
    task = monitor.get_task()
    for _ in range(20):
        if task.task_state == sushy.TASK_STATE_COMPLETED: return
        task.refresh()
for kind in (auth.BasicAuth, auth.SessionAuth):
    root = sushy.Sushy(cfg["url"], auth=kind(cfg["user"], cfg["password"]), verify=cfg["ca"])
    system = root.get_system("/redfish/v1/Systems/1")
    say(kind.__name__, system.power_state.value, system.uuid)
say("systems", [s.path for s in root.get_system_collection().get_members()])
say("allowed", sorted(v.value for v in system.get_allowed_reset_system_values()))
system.set_system_boot_options(sushy.BOOT_SOURCE_TARGET_PXE, enabled=sushy.BOOT_SOURCE_ENABLED_ONCE, mode=sushy.BOOT_SOURCE_MODE_UEFI)
system.refresh()
say("boot", system.boot.target.value, system.boot.enabled.value, system.boot.mode.value)
system.reset_system(sushy.RESET_ON)
system.refresh()
say("power", system.power_state.value)
system.bios.set_attributes({"ProcTurboMode": "Disabled"}, apply_time=sushy.APPLY_TIME_ON_RESET)
say("pending", system.bios.pending_attributes)
system.reset_system(sushy.RESET_FORCE_RESTART)
system.bios.refresh()
say("bios", system.bios.attributes["ProcTurboMode"])
say("registry", len(system.bios.get_attribute_registry().registry_entries.attributes))
manager = system.managers[0]
media = [m for m in manager.virtual_media.get_members() if sushy.VIRTUAL_MEDIA_CD in m.media_types][0]
media.insert_media(cfg["image"])
media.refresh()
say("media", media.inserted, media.image == cfg["image"])
media.eject_media()
media.refresh()
say("media", media.inserted)
storage = system.storage.get_members()[0]
say("drives", len(storage.drives), storage.drives[0].capacity_bytes)
monitor = storage.volumes.create({"Name": "os", "RAIDType": "RAID1", "Links": {"Drives": [{"@odata.id": d.path} for d in storage.drives[:2]]}})
follow(monitor)
storage.volumes.refresh()
say("volumes", [(v.name, v.raid_type.value) for v in storage.volumes.get_members()])
storage.volumes.get_members()[0].delete()
say("secure boot", system.secure_boot.enabled)
system.secure_boot.set_enabled(True)
service = root.get_update_service()
task = service.simple_update(cfg["firmware"], targets=["/redfish/v1/UpdateService/FirmwareInventory/BIOS"], transfer_protocol=sushy.UPDATE_PROTOCOL_HTTPS)
follow(task)
inventory = {f.identity: f.version for f in service.firmware_inventory.get_members()}
say("firmware", inventory["BIOS"])
say("processors", system.processors.summary.count, "memory", system.memory_summary.size_gib)
say("macs", sorted(system.ethernet_interfaces.summary))
root.get_chassis("/redfish/v1/Chassis/1")
system.reset_system(sushy.RESET_FORCE_OFF)
root._conn._auth.close()
`
	c, ca := peersBMC(t, NewFake())
	cmd.Args = append(cmd.Args, "-c", script)
	in, err := json.Marshal(map[string]string{
		"url": "https://" + c.r.Addr(), "user": "admin", "password": "password", "ca": ca, "image": c.media.URL + "/x.iso", "firmware": c.media.URL + "/bios",
	})
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin = bytes.NewReader(in)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("sushy: %v\n%s", err, out)
	}
	want := strings.TrimSpace(`
BasicAuth Off 42435249-4700-0000-0000-000000000002
SessionAuth Off 42435249-4700-0000-0000-000000000002
systems ['/redfish/v1/Systems/1']
allowed ['ForceOff', 'ForceRestart', 'GracefulRestart', 'GracefulShutdown', 'Nmi', 'On', 'PowerCycle']
boot Pxe Once UEFI
power On
pending {'ProcTurboMode': 'Disabled'}
bios Disabled
registry 6
media True True
media False
drives 4 960197124096
volumes [('os', 'RAID1')]
secure boot False
firmware 2.0
processors 64 memory 64
macs ['52:54:00:B3:C0:12', '52:54:00:b3:c0:11']
`)
	if got := strings.TrimSpace(string(out)); got != want {
		t.Errorf("sushy said\n%s\nwant\n%s", got, want)
	}
	wantLog := []string{
		"bootdev pxe efi once", "on pxe efi once", "bios set ProcTurboMode=Disabled", "reset none", "media insert " + c.media.URL + "/x.iso", "media eject",
		"volume create RAID1 os drives 1,2", "volume delete os", "secure boot on", "firmware BIOS 2.0", "off",
	}
	if got := c.r.Log(); !slices.Equal(got, wantLog) {
		t.Errorf("Log() =\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(wantLog, "\n"))
	}
}

// TestRedfishUnderBmclib has bmclib's own Redfish provider, which is gofish, do
// what it can, with a session and without.
func TestRedfishUnderBmclib(t *testing.T) {
	for _, basic := range []bool{true, false} {
		c, _ := peersBMC(t, NewFake())
		host, port, err := net.SplitHostPort(c.r.Addr())
		if err != nil {
			t.Fatal(err)
		}
		ctx := t.Context()
		client := bmclib.NewClient(host, "admin", "password", bmclib.WithRedfishPort(port), bmclib.WithRedfishUseBasicAuth(basic),
			bmclib.WithHTTPClient(c.http), bmclib.WithPerProviderTimeout(time.Minute), bmclib.WithLogger(logr.Discard()))
		client.Registry.Drivers = client.Registry.For("gofish")
		if err := client.Open(ctx); err != nil {
			t.Fatal(err)
		}
		for _, tt := range []struct {
			name string
			do   func() (any, error)
			want any
		}{
			{"power", func() (any, error) { return client.GetPowerState(ctx) }, "Off"},
			{"on", func() (any, error) { return client.SetPowerState(ctx, "on") }, true},
			{"power on", func() (any, error) { return client.GetPowerState(ctx) }, "On"},
			{"interrupt", func() (any, error) { return nil, client.SendNMI(ctx) }, nil},
			{"boot", func() (any, error) { return client.SetBootDevice(ctx, "pxe", false, true) }, true},
			{"insert", func() (any, error) { return client.SetVirtualMedia(ctx, "CD", c.media.URL+"/x.iso") }, true},
			{"eject", func() (any, error) { return client.SetVirtualMedia(ctx, "CD", "") }, true},
			{"serial", func() (any, error) {
				device, err := client.Inventory(ctx)
				if err != nil {
					return nil, err
				}
				return fmt.Sprint(device.Serial, " ", len(device.CPUs), " ", len(device.Memory), " ", len(device.Drives)), nil
			}, "RIG-0001 2 2 4"},
			{"BIOS", func() (any, error) {
				settings, err := client.GetBiosConfiguration(ctx)
				return settings["ProcTurboMode"], err
			}, "Enabled"},
			{"BIOS reset", func() (any, error) { return nil, client.ResetBiosConfiguration(ctx) }, nil},
			{"off", func() (any, error) { return client.SetPowerState(ctx, "off") }, true},
		} {
			if got, err := tt.do(); err != nil || got != tt.want {
				t.Errorf("basic %v: %s = %v, %v, want %v", basic, tt.name, got, err, tt.want)
			}
		}
		want := []string{"on none", "nmi", "bootdev pxe efi once", "media insert " + c.media.URL + "/x.iso", "media eject", "bios reset", "off"}
		if got := c.r.Log(); !slices.Equal(got, want) {
			t.Errorf("basic %v: Log() = %q, want %q", basic, got, want)
		}
		if err := client.Close(ctx); err != nil || c.r.Sessions() != 0 {
			t.Errorf("basic %v: Close() = %v, %d sessions open", basic, err, c.r.Sessions())
		}
	}
}

// lineMachine is a machine with a serial line.
type lineMachine struct {
	*Fake
	came chan net.Conn // the machine's end of each opening
}

func (m *lineMachine) OpenSerial(context.Context) (io.ReadWriteCloser, error) {
	near, far := net.Pipe()
	_ = far.SetDeadline(time.Now().Add(time.Minute))
	m.came <- far
	return near, nil
}

// terminal is a pseudo terminal: our end, and a program's.
func terminal(t *testing.T) (*os.File, *os.File) {
	t.Helper()
	ours, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skip("needs pseudo terminals: ", err)
	}
	t.Cleanup(func() { _ = ours.Close() })
	if err := unix.IoctlSetPointerInt(int(ours.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(ours.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := os.OpenFile("/dev/pts/"+strconv.Itoa(n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	return ours, theirs
}

// until reads from r until text has come.
func until(t *testing.T, r io.Reader, text string) {
	t.Helper()
	var seen []byte
	one := make([]byte, 1)
	for !bytes.Contains(seen, []byte(text)) {
		n, err := r.Read(one)
		seen = append(seen, one[:n]...)
		if err != nil {
			t.Fatalf("read %q and then %v, want %q", seen, err, text)
		}
	}
}

// ipmitool's own serial over LAN carries a machine's line both ways, ends, and
// the line can be had again.
func TestSerialOverLAN(t *testing.T) {
	m := &lineMachine{Fake: NewFake(), came: make(chan net.Conn, 1)}
	i := startIPMI(t, m)
	for round := range 2 {
		const path = "/usr/bin/ipmitool"
		if _, err := os.Stat(path); err != nil {
			t.Skip("needs ipmitool: ", err)
		}
		host, port, _ := net.SplitHostPort(i.Addr())
		secret, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		_, _ = w.WriteString(password)
		_ = w.Close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, path, "-I", "lanplus", "-C", "17", "-H", host, "-p", port, "-U", "ADMIN", "-f", "/dev/fd/3", "sol", "activate")
		cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
		cmd.ExtraFiles = []*os.File{secret}
		screen, tty := terminal(t)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, tty, tty
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		_, _ = secret.Close(), tty.Close()
		until(t, screen, "[SOL Session operational.  Use ~? for help]")
		machine := <-m.came
		if _, err := machine.Write([]byte("login: ")); err != nil {
			t.Fatal(err)
		}
		until(t, screen, "login: ")
		if _, err := screen.Write([]byte("root\r")); err != nil {
			t.Fatal(err)
		}
		until(t, machine, "root\r")
		big := bytes.Repeat([]byte("0123456789abcdef"), 2*lineBytes/16)
		go func() { _, _ = machine.Write(append(big, "END"...)) }()
		until(t, screen, string(big[:64]))
		until(t, screen, "END")
		if _, err := screen.Write([]byte("\r~.")); err != nil {
			t.Fatal(err)
		}
		drained := make(chan struct{})
		go func() {
			defer close(drained)
			_, _ = io.Copy(io.Discard, screen) // ends with the program
		}()
		err = cmd.Wait()
		<-drained
		if err != nil {
			t.Errorf("round %d: ipmitool sol activate: %v", round, err)
		}
		if _, err := machine.Write([]byte("x")); err == nil {
			t.Errorf("round %d: the line is open after the end", round)
		}
	}
	if got := i.Log(); len(got) != 0 {
		t.Errorf("Log() = %q, want nothing", got)
	}
}

func TestIPMIInterrupt(t *testing.T) {
	m := NewFake()
	i := startIPMI(t, m)
	if out, err := ipmitool(t, i, password, "chassis", "power", "diag"); err == nil {
		t.Errorf("an interrupt of a machine that is off = %q, want a failure", out)
	}
	if err := m.PowerOn(t.Context(), BootDevice{Device: "none"}); err != nil {
		t.Fatal(err)
	}
	if out, err := ipmitool(t, i, password, "chassis", "power", "diag"); err != nil {
		t.Errorf("an interrupt = %q, %v", out, err)
	}
	if got := i.Log(); !slices.Equal(got, []string{"nmi"}) {
		t.Errorf("Log() = %q, want one nmi", got)
	}
}

// What changes the BMC itself is in the log too, and reading is not.
func TestIPMIWrites(t *testing.T) {
	m := NewFake()
	i := startIPMI(t, m)
	if err := m.PowerOn(t.Context(), BootDevice{Device: "none"}); err != nil {
		t.Fatal(err)
	}
	for _, args := range []string{"mc info", "chassis status", "lan print 1", "sdr info", "fru print 0", "user list 1", "chassis bootparam get 5"} {
		if out, err := ipmitool(t, i, password, strings.Fields(args)...); err != nil && args != "user list 1" {
			t.Errorf("ipmitool %s = %q, %v", args, out, err)
		}
	}
	if got := i.Log(); len(got) != 0 {
		t.Errorf("reading left %q in the log", got)
	}
	if got := i.Commands(); !slices.Contains(got, "00.01 Get Chassis Status") || !slices.Contains(got, "0a.11 Read FRU Data") {
		t.Errorf("Commands() = %q, want the chassis status and the FRU in it", got)
	}
	// An empty repository is cleared by a client that lists it.
	_, _ = ipmitool(t, i, password, "sdr", "list")
	_, _ = ipmitool(t, i, password, "mc", "reset", "cold") // waits for no answer
	for end := time.Now().Add(10 * time.Second); len(i.Log()) < 2 && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	if got := i.Log(); !slices.Equal(got, []string{"sdr cleared", "manager reset"}) || !slices.Equal(m.Calls(), []string{"PowerOn none"}) {
		t.Errorf("Log() = %q, the machine saw %q; want the repository cleared, the manager reset, and nothing of the machine", got, m.Calls())
	}
	if out, err := ipmitool(t, i, password, "user", "set", "password", "2", "another-password", "16"); err != nil || i.Log()[len(i.Log())-1] != "password changed" {
		t.Errorf("set password = %q, %v, Log() = %q", out, err, i.Log())
	}
	if out, err := ipmitool(t, i, "another-password", "chassis", "power", "status"); err != nil {
		t.Errorf("the new password: %q, %v", out, err)
	}
}

// IPMI 2.0 has room for 20 bytes of password.
func TestIPMIPasswords(t *testing.T) {
	for _, p := range []string{"sixteen-bytes-16", "twenty-bytes-pass-ok"} {
		i, err := StartIPMI(t.Context(), "127.0.0.1:0", "ADMIN", p, NewFake())
		if err != nil {
			t.Fatal(err)
		}
		for _, suite := range []string{"3", "17"} {
			if out, err := ipmitool(t, i, p, "-C", suite, "chassis", "power", "status"); err != nil {
				t.Errorf("%d bytes, suite %s: %q, %v", len(p), suite, out, err)
			}
			if out, err := ipmitool(t, i, p[:len(p)-1], "-C", suite, "chassis", "power", "status"); err == nil {
				t.Errorf("%d bytes, suite %s: one less logs in: %q", len(p), suite, out)
			}
		}
		if err := i.Close(); err != nil {
			t.Error(err)
		}
	}
	if i, err := StartIPMI(t.Context(), "127.0.0.1:0", "ADMIN", "twenty-one-bytes-0021", NewFake()); err == nil {
		_ = i.Close()
		t.Error("a BMC with a password of 21 bytes started")
	}
}
