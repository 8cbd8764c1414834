package pxe

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/better-compute/site-appliance/image/qemutest"
	"github.com/better-compute/site-appliance/pxe/httpboot"
	"github.com/better-compute/site-appliance/pxe/pxetest"
)

const nft = "/usr/sbin/nft"

// TestQEMUIPv6 lets EDK2 boot by PXE over IPv6 alone, from a machine without a
// UUID: the loader, what Debian's iPXE asks for, and what its script names.
func TestQEMUIPv6(t *testing.T) {
	qemutest.Need(t, true)
	bootQEMU6(t, qemutest.Config{UEFI: true, Extra: edk2Without("IPv4PXESupport")}, "52:54:00:00:06:01", "Stage:tftp Client: IP:fd00:77::5254:0:0:601 ")
}

// TestQEMUIPv6HTTP is the same by HTTP boot, from a machine with a UUID. EDK2 asks
// for an IPv4 address first, for a minute.
func TestQEMUIPv6HTTP(t *testing.T) {
	if os.Getenv("BC_QEMU_LONG") == "" {
		t.Skip("runs in make soak: BC_QEMU_LONG is not set")
	}
	qemutest.Need(t, true)
	extra := append(edk2Without("IPv4PXESupport", "IPv6PXESupport"), "-uuid", "01020304-0506-0708-090a-0b0c0d0e0f10")
	bootQEMU6(t, qemutest.Config{UEFI: true, Extra: extra}, "52:54:00:00:06:02", "Stage:http-loader ")
}

// edk2Without leaves out boot entries of EDK2.
func edk2Without(names ...string) (args []string) {
	for _, name := range names {
		args = append(args, "-fw_cfg", "name=opt/org.tianocore/"+name+",string=n")
	}
	return args
}

func bootQEMU6(t *testing.T, cfg qemutest.Config, mac, loader string) {
	t.Helper()
	for _, name := range []string{snponlyFile, "/dev/net/tun", nft} {
		if _, err := os.Stat(name); err != nil {
			t.Skipf("needs QEMU: %v", err)
		}
	}
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir)
	copyFile(t, snponlyFile, filepath.Join(dir, "netboot", "ipxe/snponly.efi"))
	pxetest.Bridge(t, "br0", netip.MustParsePrefix(boxAddr+"/24"), "tap0")
	pxetest.AddAddress(t, "br0", boxNet6)
	// IPv4 is silent: what boots here did so without it.
	rules := "add table ip t; add chain ip t in { type filter hook input priority 0; }; add rule ip t in iifname != lo drop"
	if out, err := exec.Command(nft, rules).CombinedOutput(); err != nil {
		t.Fatalf("nft: %v: %s", err, out)
	}
	b := start(t, "br0", dir, func(c *Config) {
		c.IPv6.Address = boxNet6
		c.Boot = func(context.Context, httpboot.Booting) ([]byte, error) { return nil, errors.New("refused by the test") }
	}, ramdisk(mac))
	runQEMU(t, cfg, qemutest.NIC{MAC: mac, ROM: "none"})
	for _, stage := range []string{"Stage:dhcp Client:", loader, "Stage:script Client: IP: Detail:agent: ", "Stage:kernel"} {
		b.wait(t, 5*quiet, "pxe.stage telemetry "+mac+" {MAC:"+mac+" MachineID:node_a "+stage)
	}
}
