package pxe

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/image/qemutest"
	"github.com/better-compute/site-appliance/pxe/attempts"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/httpboot"
	"github.com/better-compute/site-appliance/pxe/pxetest"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

const (
	snponlyFile  = "/usr/lib/ipxe/snponly.efi"
	undionlyFile = "/usr/lib/ipxe/undionly.kpxe"
	// driversFile is the one for a BIOS with drivers of its own, which sees every port.
	driversFile = "/usr/lib/ipxe/ipxe.pxe"
	// quiet is how long the slowest step takes on an idle machine without KVM.
	quiet = 60 * time.Second
)

// TestQEMUFirmware lets EDK2's own PXE and a BIOS option ROM boot from the box:
// the loader, the script, what it names; then a new assignment sends the
// machine, by its script, on to the firmware's next boot entry.
func TestQEMUFirmware(t *testing.T) {
	qemutest.Need(t, true)
	for _, name := range []string{snponlyFile, undionlyFile, "/dev/net/tun"} {
		if _, err := os.Stat(name); err != nil {
			t.Skipf("needs QEMU: %v", err)
		}
	}
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir) // the kernel is noise: what counts is that it is asked for
	for name, from := range map[string]string{"ipxe/snponly.efi": snponlyFile, "ipxe/undionly.kpxe": undionlyFile} {
		copyFile(t, from, filepath.Join(dir, "netboot", name))
	}
	pxetest.Bridge(t, "br0", netip.MustParsePrefix(boxAddr+"/24"), "tap0")
	b := start(t, "br0", dir, func(c *Config) {
		// BIOS iPXE runs any noise as a boot sector: its boot is made to fail one step on.
		c.Boot = func(context.Context, httpboot.Booting) ([]byte, error) { return nil, errors.New("refused by the test") }
	})

	for _, tt := range []struct {
		name, mac string
		machine   qemutest.Config
		rom       string
		loader    string // the stage by which the loader came, empty for a ROM that is iPXE itself
		next      string // what the console says when the firmware goes on; EDK2 has its HTTP boot before the disk
	}{
		{"UEFI by EDK2 PXE", "52:54:00:00:01:01", qemutest.Config{
			UEFI:  true,
			Extra: []string{"-fw_cfg", "name=opt/org.tianocore/IPv6PXESupport,string=n"}, // saves a minute of waiting for nobody
		}, "none", "Stage:tftp Client: IP:10.77.0.", ">>Start HTTP Boot over IPv4"},
		{"BIOS by QEMU's option ROM", "52:54:00:00:01:02", qemutest.Config{}, "", "", "Booting from Hard Disk"},
	} {
		version := b.store.Version() + 1
		if _, err := b.store.Apply(&pxev1.AssignRequest{Version: version, Machines: []*pxev1.Machine{ramdisk(tt.mac)}}); err != nil {
			t.Fatal(err)
		}
		vm := runQEMU(t, tt.machine, qemutest.NIC{MAC: tt.mac, ROM: tt.rom})
		stage := func(what string) {
			t.Helper()
			b.wait(t, 5*quiet, "pxe.stage telemetry "+tt.mac+" {MAC:"+tt.mac+" MachineID:node_a "+what)
		}
		began := time.Now()
		stage("Stage:dhcp ")
		if tt.loader != "" {
			stage(tt.loader)
		}
		stage("Stage:script Client: IP: Detail:agent: ")
		stage("Stage:kernel")
		t.Logf("%s: kernel asked for after %.0f s", tt.name, time.Since(began).Seconds())
		// The boot fails, and iPXE asks again: by then it has other orders.
		local := localDisk(tt.mac)
		local.MachineId = "node_a"
		if _, err := b.store.Apply(&pxev1.AssignRequest{Version: version + 1, Machines: []*pxev1.Machine{local}}); err != nil {
			t.Fatal(err)
		}
		stage("Stage:script Client: IP: Detail:local-disk: ")
		if err := vm.WaitMarker(t.Context(), tt.next, quiet); err != nil {
			t.Fatal(err)
		}
		_ = vm.Close()
	}
}

// TestQEMUOtherPort lets a real iPXE whose boot fails, and whose port has lost its
// link by then, find a script by its other port.
func TestQEMUOtherPort(t *testing.T) {
	if os.Getenv("BC_QEMU_LONG") == "" {
		t.Skip("runs in make soak: BC_QEMU_LONG is not set")
	}
	qemutest.Need(t, false)
	for _, name := range []string{driversFile, "/dev/net/tun"} {
		if _, err := os.Stat(name); err != nil {
			t.Skipf("needs QEMU: %v", err)
		}
	}
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir)
	copyFile(t, driversFile, filepath.Join(dir, "netboot", files.BIOSLoader)) // noise would run, and might do anything
	pxetest.Bridge(t, "br0", netip.MustParsePrefix(boxAddr+"/24"), "tap0", "tap1")
	const first, second = "52:54:00:00:01:03", "52:54:00:00:01:04"
	m := ramdisk(first)
	m.Macs = []string{first, second}
	var heard attempts.Log
	b := start(t, "br0", dir, func(c *Config) {
		c.Boot = func(context.Context, httpboot.Booting) ([]byte, error) { return nil, errors.New("refused by the test") }
		c.Attempts = &heard
	}, m)
	t.Cleanup(func() {
		for _, mac := range m.Macs {
			if t.Failed() { // what was heard before the first acknowledgement is no event
				t.Logf("%s did: %+v", mac, heard.Of(mac, time.Now()))
			}
		}
	})
	// An e1000 tells iPXE whether there is a link.
	vm := runQEMU(t, qemutest.Config{}, qemutest.NIC{MAC: first, Model: "e1000"}, qemutest.NIC{MAC: second, Model: "e1000"})
	b.wait(t, 5*quiet, "pxe.stage telemetry "+first+" {MAC:"+first+" MachineID:node_a Stage:kernel")
	if _, err := vm.QMP(t.Context(), "set_link", map[string]any{"name": "nic0", "up": false}); err != nil {
		t.Fatal(err)
	}
	local := localDisk(second)
	local.MachineId = "node_a"
	if _, err := b.store.Apply(&pxev1.AssignRequest{Version: b.store.Version() + 1, Machines: []*pxev1.Machine{local}}); err != nil {
		t.Fatal(err)
	}
	b.wait(t, 5*quiet, "pxe.stage telemetry "+second+" {MAC:"+second+" MachineID:node_a Stage:script Client: IP: Detail:local-disk: ")
	if err := vm.WaitMarker(t.Context(), "Booting from the local disk", quiet); err != nil {
		t.Fatal(err)
	}
}

// runQEMU starts a machine on tap0 and those after it, with a small disk behind the NICs in boot order.
func runQEMU(t *testing.T, cfg qemutest.Config, nics ...qemutest.NIC) *qemutest.VM {
	t.Helper()
	esp := filepath.Join(t.TempDir(), "disk")
	if err := os.MkdirAll(filepath.Join(esp, "EFI/BOOT"), 0o755); err != nil {
		t.Fatal(err)
	}
	copyFile(t, snponlyFile, filepath.Join(esp, "EFI/BOOT/BOOTX64.EFI"))
	for i := range nics {
		nics[i].Netdev, nics[i].BootIndex = fmt.Sprintf("tap,ifname=tap%d,script=no,downscript=no", i), i+1
	}
	cfg.Dir, cfg.MemoryMiB, cfg.NICs = t.TempDir(), 512, nics
	cfg.Disks = []qemutest.Disk{{Path: "fat:" + esp, ReadOnly: true, BootIndex: len(nics) + 1}}
	vm, err := qemutest.Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = vm.Close()
		if t.Failed() {
			t.Logf("the console ends:\n%s", vm.Tail(60))
		}
	})
	return vm
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, b, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}
