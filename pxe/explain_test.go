package pxe

import (
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/better-compute/site-appliance/appliance/base/bound"
	"github.com/better-compute/site-appliance/pxe/attempts"
	"github.com/better-compute/site-appliance/pxe/pxetest"
	"github.com/better-compute/site-appliance/pxe/pxev1"
	"github.com/better-compute/site-appliance/pxe/syslog"
)

// TestRunExplains: what the box heard over DHCP and syslog is in the explanation,
// the UUID by which a machine is expected included.
func TestRunExplains(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir)
	m := pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), "m0", macStranger)
	var cfg Config
	b := start(t, "box0", dir, func(c *Config) {
		c.Heard, c.Attempts, c.Syslog, c.Now = new(Heard), new(attempts.Log), new(syslog.Store), time.Now
		cfg = *c
	})
	const id = "00112233-4455-6677-8899-aabbccddeeff"
	if _, err := b.store.Apply(&pxev1.AssignRequest{Version: b.store.Version() + 1, Unknown: &pxev1.Unknown{
		Inspect: true, WindowId: "w1", WindowUntilMs: time.Now().Add(time.Hour).UnixMilli(), Expected: []*pxev1.Expected{{ProductUuid: id}},
	}}); err != nil {
		t.Fatal(err)
	}
	before := cfg.Explain(macStranger)
	if reason := before.Answers[1].Reason; !strings.Contains(reason, "its UUID was not heard yet") || before.MachineId != "" {
		t.Errorf("before it was heard: machine %q, %q, want none, as its UUID is not known", before.MachineId, reason)
	}
	// Option 97: a type, and the UUID as SMBIOS has it, its first three fields little-endian.
	guid := []byte{0, 0x33, 0x22, 0x11, 0x00, 0x55, 0x44, 0x77, 0x66, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff}
	if file := mustDORA(t, m, asUEFI, dhcpv4.WithGeneric(dhcpv4.OptionClientMachineIdentifier, guid)).ACK.BootFileName; file != "snponly.efi" {
		t.Errorf("a machine that is expected by its UUID is told to load %q, want snponly.efi", file)
	}
	var conn net.Conn
	if err := m.Try(func() (err error) { conn, err = net.Dial("udp4", boxAddr+":514"); return err }); err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("<30>ipxe: hello\n")); err != nil {
		t.Fatal(err)
	}
	b.wait(t, 10*time.Second, "Stage:dhcp")
	var got *pxev1.ExplainResult
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if got = cfg.Explain(macStranger); len(got.Syslog) > 0 {
			break
		}
	}
	if got.MachineId != "mac-52540000000c" {
		t.Errorf("machine = %q, want what its MAC makes it", got.MachineId)
	}
	if a := got.Answers[1]; a.Protocol != "tftp" || a.Client != "pxe uefi-x64" || a.Action != "agent" || a.File != "snponly.efi" {
		t.Errorf("answer to UEFI = %v, want the loader by TFTP", a)
	}
	if len(got.Syslog) != 1 || !strings.HasSuffix(got.Syslog[0], " ipxe: hello") {
		t.Errorf("syslog = %q, want the line that was sent", got.Syslog)
	}
	if len(got.Attempts) != 1 || got.Attempts[0].Interface != "box0" || !slices.ContainsFunc(got.Attempts[0].Steps, func(s *pxev1.Step) bool { return s.Stage == "dhcp" && s.Client == "pxe uefi-x64" }) {
		t.Errorf("attempts = %v, want one with a DHCP request", got.Attempts)
	}
	if !strings.Contains(got.WaitsFor, "after dhcp: the machine asks for what DHCP named to it") {
		t.Errorf("it waits for %q", got.WaitsFor)
	}
}

// TestRunBesideASyslogServer: a syslog port that is another's does not keep
// machines from booting, and their scripts do not send lines there.
func TestRunBesideASyslogServer(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir)
	m := pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), "m0", macRAM)
	script := func() string {
		t.Helper()
		mustDORA(t, m, asUEFI)
		return string(mustGet(t, m, "http://10.77.0.1/boot/52-54-00-00-00-0a/script.ipxe"))
	}
	taken, err := bound.ListenPacket(t.Context(), "box0", netip.AddrPortFrom(netip.MustParseAddr(boxAddr), syslog.Port))
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	log := &strings.Builder{}
	b := start(t, "box0", dir, func(c *Config) { c.Log = slog.New(slog.NewTextHandler(log, nil)) }, ramdisk(macRAM))
	if got := script(); strings.Contains(got, "set syslog") || !strings.Contains(got, "kernel http") {
		t.Errorf("script = %s\nwant one that boots and sends no lines", got)
	}
	if err := b.stop(); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(log.String(), "address already in use") {
		t.Errorf("the log does not say that the port is taken:\n%s", log)
	}
	taken.Close()
	start(t, "box0", dir, nil, ramdisk(macRAM))
	if got := script(); !strings.Contains(got, "set syslog 10.77.0.1") {
		t.Errorf("script = %s\nwant one that sends its lines to the box", got)
	}
}
