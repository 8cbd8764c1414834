package pxe

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/pxe/boots"
	"github.com/better-compute/site-appliance/pxe/lease"
	"github.com/better-compute/site-appliance/pxe/pxetest"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// TestDeniedAlike: a machine that DHCP names no file to gets none by TFTP and none
// by HTTP either, for whatever reason, and one that it names a file to gets it by
// both. Built: a Raspberry Pi 4 with UEFI got its loader by TFTP from a server
// that then answered 404 to its script, and asked for ever.
func TestDeniedAlike(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir)
	h := pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), "m0", macRAM)
	window := func(edit func(*pxev1.Machine)) *pxev1.Machine {
		m := ramdisk("")
		edit(m)
		return m
	}
	cases := []struct {
		name    string
		machine *pxev1.Machine // nil: a stranger
		kind    dhcpKind
		count   func(*testing.T, *boots.Store, *pxev1.Machine)
		boots   bool
	}{
		{"assigned to the ramdisk", window(func(*pxev1.Machine) {}), asUEFI, nil, true},
		{"assigned to the ramdisk, BIOS", window(func(*pxev1.Machine) {}), asBIOS, nil, true},
		{"a stranger", nil, asUEFI, nil, false},
		{"a stranger, BIOS", nil, asBIOS, nil, false},
		{"assigned to its disk", localDisk(""), asUEFI, nil, false},
		{"whose window has ended", window(func(m *pxev1.Machine) { m.WindowUntilMs = time.Now().Add(-time.Minute).UnixMilli() }), asUEFI, nil, false},
		{"that has booted often enough", window(func(m *pxev1.Machine) { m.MaxBoots = 1 }), asUEFI, func(t *testing.T, c *boots.Store, m *pxev1.Machine) {
			if err := c.Booted(m.MachineId, m.WindowId); err != nil {
				t.Error(err)
			}
		}, false},
		{"that has said that it is done", window(func(*pxev1.Machine) {}), asUEFI, func(t *testing.T, c *boots.Store, m *pxev1.Machine) {
			if err := c.Done(m.MachineId, m.WindowId); err != nil {
				t.Error(err)
			}
		}, false},
	}
	mac := func(i int) string { return fmt.Sprintf("52:54:00:00:01:%02x", i) }
	var machines []*pxev1.Machine
	for i, tt := range cases {
		if tt.machine != nil {
			tt.machine.MachineId, tt.machine.Macs = fmt.Sprintf("node_%d", i), []string{mac(i)}
			machines = append(machines, tt.machine)
		}
	}
	var counts *boots.Store
	start(t, "box0", dir, func(c *Config) { counts = c.Counts }, machines...)
	for i, tt := range cases {
		if tt.count != nil {
			tt.count(t, counts, tt.machine)
		}
		h.SetMAC(mac(i))
		told := mustDORA(t, h, tt.kind).ACK.BootFileName
		loader := "snponly.efi"
		if strings.Contains(tt.name, "BIOS") {
			loader = "undionly.kpxe"
		}
		_, err := fetchTFTP(h, loader)
		base := "http://10.77.0.1/boot/" + strings.ReplaceAll(mac(i), ":", "-") + "/"
		code, _, herr := get(h, base+loader)
		if herr != nil {
			t.Fatal(herr)
		}
		scode, script, herr := get(h, base+"script.ipxe")
		if herr != nil {
			t.Fatal(herr)
		}
		scripted := scode == 200 && strings.Contains(string(script), "kernel http")
		if got := []bool{told == loader, err == nil, code == 200, scripted}; got[0] != tt.boots || got[1] != tt.boots || got[2] != tt.boots || got[3] != tt.boots {
			t.Errorf("a machine %s is told to load %q, TFTP: %v, HTTP: %d, script: %d %q, want that all boot it: %v", tt.name, told, err, code, scode, script, tt.boots)
		}
	}
}

// TestMACsInCapitals: reservations and paths in capitals are of the machine that
// DHCP knows in small letters. Built: people paste MACs as their hypervisor or the
// label on the case has them.
func TestMACsInCapitals(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir)
	h := pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), "m0", "52:54:00:00:00:AF")
	// Its first port has no link.
	m := ramdisk("52:54:00:00:00:ae")
	m.Macs = append(m.Macs, "52:54:00:00:00:af")
	var cfg Config
	start(t, "box0", dir, func(c *Config) {
		c.Reservations = []lease.Reservation{
			{MAC: "52-54-00-00-00-AF", Address: netip.MustParseAddr("10.77.0.50")}, {MAC: "5254.0000.00BF", Address: netip.MustParseAddr("10.77.0.51")},
		}
		cfg = *c
	}, m)
	if err := cfg.fill(); err != nil || !cfg.known("52:54:00:00:00:bf") {
		t.Errorf("a machine with a reservation in capitals is not answered before strangers: %v", err)
	}
	ack := mustDORA(t, h, asUEFI).ACK
	if got := ack.YourIPAddr.String(); got != "10.77.0.50" || ack.BootFileName != "snponly.efi" {
		t.Errorf("the machine gets %s and %q, want what is reserved for it and its loader", got, ack.BootFileName)
	}
	for _, path := range []string{"52-54-00-00-00-AF", "52:54:00:00:00:AF", "5254.0000.00af", "52-54-00-00-00-ae"} {
		if script := string(mustGet(t, h, "http://10.77.0.1/boot/"+path+"/script.ipxe")); !strings.Contains(script, "kernel http://10.77.0.1/boot/52-54-00-00-00-a") {
			t.Errorf("script of %s = %q, want the ramdisk's", path, script)
		}
	}
}
