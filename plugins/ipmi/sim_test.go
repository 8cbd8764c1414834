package ipmi

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// simPassword is as long as ipmi_sim takes: it cuts at 19 bytes.
const simPassword = "nineteen-bytes-pass"

// simulator is OpenIPMI's BMC, in front of a machine that is a few files.
type simulator struct {
	address string
	dir     string
}

// startSimulator skips where ipmi_sim is not installed.
func startSimulator(t *testing.T) *simulator {
	t.Helper()
	const path = "/usr/bin/ipmi_sim"
	if _, err := os.Stat(path); err != nil {
		t.Skip("needs ipmi_sim, of Debian's package openipmi: ", err)
	}
	probe, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := probe.LocalAddr().(*net.UDPAddr).Port
	_ = probe.Close()
	s := &simulator{address: fmt.Sprintf("127.0.0.1:%d", port), dir: t.TempDir()}
	file := func(name, content string, mode os.FileMode) string {
		full := filepath.Join(s.dir, name)
		if err := os.WriteFile(full, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
		return full
	}
	chassis := file("chassis", `#!/bin/sh
dir=$1; op=$2; shift 2
case $op in
get) for p; do case $p in
	power) if [ -e "$dir/on" ]; then echo power:1; else echo power:0; fi;;
	boot) if [ -e "$dir/boot" ]; then echo "boot:$(cat "$dir/boot")"; else echo boot:none; fi;;
	*) exit 1;;
	esac; done;;
set) echo "$*" >>"$dir/log"
	while [ $# -gt 1 ]; do case $1 in
	power) if [ "$2" = 1 ]; then : >"$dir/on"; else rm -f "$dir/on"; fi;;
	boot) echo "$2" >"$dir/boot";;
	reset|shutdown) [ -e "$dir/on" ] || exit 1;;
	*) exit 1;;
	esac; shift 2; done;;
*) exit 1;;
esac
`, 0o755)
	lan := file("lan", `#!/bin/sh
op=$2; shift 2
[ "$op" = get ] || exit 0
for p; do case $p in
	ip_addr) echo "$p:192.0.2.10";;
	ip_addr_src) echo "$p:static";;
	subnet_mask) echo "$p:255.255.255.0";;
	mac_addr) echo "$p:52:54:00:b3:c0:02";;
	*mac_addr) echo "$p:00:00:00:00:00:00";;
	*) echo "$p:0.0.0.0";;
	esac; done
`, 0o755)
	config := file("config", fmt.Sprintf(`name "sim"
set_working_mc 0x20
  startlan 1
    addr 127.0.0.1 %d
    priv_limit admin
    allowed_auths_callback md5
    allowed_auths_user md5
    allowed_auths_operator md5
    allowed_auths_admin md5
    guid a123456789abcdefa123456789abcdef
    lan_config_program %q
  endlan
  chassis_control %q
  user 2 true %q %q admin 10 md5
`, port, lan+" sim", chassis+" "+s.dir, user, simPassword), 0o600)
	commands := file("commands", `mc_setbmc 0x20
mc_add 0x20 0 no-device-sdrs 0x23 9 8 0x9f 0x1291 0xf02
sel_enable 0x20 1000 0x0a
mc_enable 0x20
`, 0o600)
	out, err := os.Create(filepath.Join(s.dir, "output"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, "-n", "-p", "-s", s.dir, "-c", config, "-f", commands)
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = out.Close()
		if t.Failed() {
			text, _ := os.ReadFile(out.Name())
			t.Logf("ipmi_sim: %s", text)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for !s.ping(ctx) {
		if ctx.Err() != nil {
			t.Fatal("ipmi_sim does not answer")
		}
	}
	return s
}

// ping asks by RMCP's own presence ping.
func (s *simulator) ping(ctx context.Context) bool {
	conn, err := (&net.Dialer{}).DialContext(ctx, "udp4", s.address)
	if err != nil {
		return false
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(200 * time.Millisecond))
	if _, err := conn.Write([]byte{6, 0, 0xff, 6, 0, 0, 0x11, 0xbe, 0x80, 1, 0, 0}); err != nil {
		time.Sleep(50 * time.Millisecond) // nobody listens yet
		return false
	}
	_, err = conn.Read(make([]byte, 64))
	if err != nil {
		time.Sleep(50 * time.Millisecond)
	}
	return err == nil
}

// did are the commands that reached the machine.
func (s *simulator) did(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(s.dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

// The driver drives a BMC that is not of ours, by the suite that both have.
func TestAgainstSimulator(t *testing.T) {
	o := realTool(t)
	s := startSimulator(t)
	config := fmt.Sprintf(`{"address":%q,"options":{"cipherSuite":3}}`, s.address)
	for _, tt := range []struct{ operation, args, want string }{
		{"power.getPower", "", `"off"`},
		{"management.setBootDevice", `{"device":"pxe"}`, "null"},
		{"power.setPower", `"on"`, "null"},
		{"power.getPower", "", `"on"`},
		{"power.setPower", `"reset"`, "null"},
		{"management.setBootDevice", `{"device":"disk"}`, "null"},
		{"power.setPower", `"soft"`, "null"},
		{"power.setPower", `"off"`, "null"},
		{"power.getPower", "", `"off"`},
	} {
		got, err := invokeAs(t, o, simPassword, config, tt.operation, tt.args)
		if err != nil || got != tt.want {
			t.Errorf("%s(%s) = %s, %v, want %s", tt.operation, tt.args, got, err, tt.want)
		}
	}
	want := []string{"boot pxe", "power 1", "reset 1", "boot default", "shutdown 1", "power 0"}
	if got := s.did(t); !slices.Equal(got, want) {
		t.Errorf("the machine was told %q, want %q", got, want)
	}
	if got, err := invokeAs(t, o, "wrong", config, "power.getPower", ""); err == nil {
		t.Errorf("a wrong password got %s", got)
	}
}
