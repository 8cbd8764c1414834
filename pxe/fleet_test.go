package pxe

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/httpboot"
	"github.com/better-compute/site-appliance/pxe/newc"
	"github.com/better-compute/site-appliance/pxe/pxetest"
	"github.com/better-compute/site-appliance/pxe/pxetest/fleet"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// fleetMAC is of the machine with that number.
func fleetMAC(i int) net.HardwareAddr {
	return net.HardwareAddr{0x52, 0x54, 0, 0, 2 + byte(i>>8), byte(i)}
}

func fleetMachines(n int) (all []*pxev1.Machine) {
	for i := range n {
		m := ramdisk(fleetMAC(i).String())
		m.MachineId = fmt.Sprintf("node_%d", i)
		all = append(all, m)
	}
	return all
}

// reporting has the box tell machines where to report, in their archive.
func reporting(c *Config) {
	c.Boot = func(_ context.Context, b httpboot.Booting) ([]byte, error) {
		return newc.BootArchive("/etc/bc/boot.json", []byte(b.Report)), nil
	}
}

// wide has more addresses than the network of the other tests.
func wide(c *Config) {
	c.Address = netip.MustParsePrefix(boxAddr + "/16")
	c.RangeStart, c.RangeEnd = netip.MustParseAddr("10.77.16.0"), netip.MustParseAddr("10.77.23.255")
}

// onWire opens the far end of h for machines, and what they are to boot.
func onWire(t *testing.T, h *pxetest.Host, dir string, own netip.Prefix) (*fleet.Wire, fleet.Want) {
	t.Helper()
	h.SetAddress(own, netip.Addr{})
	w, err := fleet.Open(h.Iface, h.Try)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	var want fleet.Want
	for name, sum := range map[string]*uint32{files.UEFILoader: &want.Loader, files.Kernel: &want.Kernel, files.Initrd: &want.Initrd} {
		b, err := os.ReadFile(filepath.Join(dir, "netboot", name))
		if err != nil {
			t.Fatal(err)
		}
		*sum = fleet.Sum(append(b, make([]byte, padding(name, len(b)))...))
	}
	return w, want
}

// padding is what HTTP adds to the ramdisk.
func padding(name string, n int) int {
	if name != files.Initrd {
		return 0
	}
	return (4 - n%4) % 4
}

// TestFleet: 64 machines that are switched on at once all boot, from their first
// DISCOVER to their last report, each at an address of its own.
func TestFleet(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	const machines = 64
	dir := t.TempDir()
	bootFiles(t, dir)
	h := pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/16"), "m0", macStranger)
	b := start(t, "box0", dir, func(c *Config) { wide(c); reporting(c) }, fleetMachines(machines)...)
	w, want := onWire(t, h, dir, netip.MustParsePrefix("10.77.255.1/16"))
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var all sync.WaitGroup
	for i := range machines {
		all.Go(func() {
			if res, err := w.Boot(ctx, fleetMAC(i), want); err != nil {
				t.Errorf("machine %d: %v", i, err)
			} else if least := int64(3 * 150_001); res.Bytes < least {
				t.Errorf("machine %d read %d bytes, want at least %d", i, res.Bytes, least)
			}
		})
	}
	all.Wait()
	for i := range machines {
		m := fleetMAC(i).String()
		b.wait(t, 20*time.Second, fmt.Sprintf("{MAC:%s MachineID:node_%d Stage:done ", m, i))
	}
}
