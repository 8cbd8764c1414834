package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"

	"github.com/better-compute/site-appliance/scripts/lab"
)

// firmware boots the machine's namespace as UEFI firmware does, and gives the name
// of the boot program.
func (b *bench) firmware(guid []byte) (file string) {
	b.t.Helper()
	b.must(b.InNetns("mach", func() error {
		client, err := nclient4.New("eth0")
		if err != nil {
			return err
		}
		defer client.Close()
		lease, err := client.Request(b.ctx, dhcpv4.WithOption(dhcpv4.OptClassIdentifier("PXEClient:Arch:00007:UNDI:003016")),
			dhcpv4.WithGeneric(dhcpv4.OptionClientSystemArchitectureType, []byte{0, 7}), dhcpv4.WithGeneric(dhcpv4.OptionClientMachineIdentifier, guid),
			dhcpv4.WithRequestedOptions(dhcpv4.OptionTFTPServerName, dhcpv4.OptionBootfileName))
		if err != nil {
			return err
		}
		file = lease.ACK.BootFileName
		size, _ := lease.ACK.SubnetMask().Size()
		_, err = b.Exec(b.ctx, "mach", "ip", "addr", "replace", fmt.Sprintf("%s/%d", lease.ACK.YourIPAddr, size), "dev", "eth0")
		return err
	}))
	return file
}

// A machine that is enrolled by its product UUID alone, and that nobody knows by its
// MAC, is left alone; by policy it is inspected, though the line home is down when it
// boots; what was seen of it proposes its MAC, and the confirmed MAC is the machine's
// in what the box boots.
func TestStrangerIsFound(t *testing.T) {
	const uuid = "5c1f3c5e-0001-4000-8000-000000000009"
	guid := []byte{0, 0x5e, 0x3c, 0x1f, 0x5c, 1, 0, 0, 0x40, 0x80, 0, 0, 0, 0, 0, 0, 9} // as SMBIOS has it
	b := begin(t)
	b.must(b.StartSite(b.ctx, b.join, lab.SiteOptions{}))
	b.must(b.WaitSiteOnline(b.ctx))
	b.boots()
	b.cli("pool", "add", lab.PoolName, "--site", lab.SiteName)
	_, err := b.CLI(b.ctx, []byte(`{"username":"x","password":"y"}`), "secret", "put", "rig-bmc")
	b.must(err)
	b.refused([]string{"boot-identity-missing"}, "metal", "enroll", "m1", "--pool", lab.PoolName, "--driver", "ipmi", "--address", lab.BMCAddr, "--credentials", "rig-bmc")
	b.cli("metal", "enroll", "m1", "--pool", lab.PoolName, "--driver", "ipmi", "--address", lab.BMCAddr, "--credentials", "rig-bmc", "--uuid", uuid)
	b.refused([]string{"no-mac"}, "metal", "inspect", "m1")

	// Left alone, it is seen all the same, and its firmware's word is a proposal.
	b.must(b.PlugMachine())
	if file := b.firmware(guid); file != "" {
		t.Errorf("a machine that is left alone is told to load %q", file)
	}
	found := func(what string) string {
		t.Helper()
		var out string
		err := lab.Poll(b.ctx, "wait for "+what, func() (bool, error) {
			out, err = b.CLI(b.ctx, nil, "metal", "found")
			return strings.Contains(out, what), err
		})
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return out
	}
	if out := found(lab.MachineMAC); !strings.Contains(out, uuid) || !strings.Contains(out, lab.MachineMAC+" seems to be m1: it is enrolled with product UUID "+uuid) {
		t.Errorf("metal found = %s, want m1 proposed", out)
	}

	b.cli("site", "unknown", lab.SiteName, "--inspect")
	b.must(lab.Poll(b.ctx, "wait for the box to know", func() (bool, error) {
		out, err := b.CLI(b.ctx, nil, "site", "unknown", lab.SiteName)
		return strings.Contains(out, "are inspected") && !strings.Contains(out, "does not know"), err
	}))
	b.Gateway.Kill()
	if file := b.firmware(guid); file != "snponly.efi" {
		t.Errorf("a machine that is to be inspected is told to load %q, want snponly.efi", file)
	}
	path := "/boot/" + strings.ReplaceAll(lab.MachineMAC, ":", "-") + "/script.ipxe"
	script, err := b.get("mach", path)
	b.must(err)
	match := regexp.MustCompile(`http://[^/]+(/boot/\S+/boot\.img)`).FindSubmatch(script)
	if match == nil {
		t.Fatalf("the script names no boot.img:\n%s", script)
	}
	archive, err := b.get("mach", string(match[1]))
	b.must(err)
	info := regexp.MustCompile(`\{"machine_id".*\}`).Find(archive)
	id := "mac-" + strings.ReplaceAll(lab.MachineMAC, ":", "")
	if !strings.Contains(string(info), `"machine_id":"`+id+`"`) || strings.Contains(string(info), `"assignment"`) {
		t.Fatalf("boot.json = %s, want %s without an assignment", info, id)
	}
	boot := filepath.Join(b.Dir, "boot.json")
	b.must(os.WriteFile(boot, info, 0o600))
	b.must(b.Serve(b.ctx))
	b.must(b.WaitSiteOnline(b.ctx))
	// This computer's own SMBIOS is covered: it would be another machine's.
	ramdisk, err := b.Spawn("mach", "ramdisk", "sh", "-c", `mount -t tmpfs none /sys/firmware && exec "$@"`, "sh", filepath.Join(b.Out, "bin", "bcd"), "ramdisk", "--boot", boot)
	b.must(err)
	b.must(ramdisk.WaitFor(b.ctx, "session is up"))
	b.must(lab.Poll(b.ctx, "wait for the inspection", func() (bool, error) {
		out, err := b.CLI(b.ctx, nil, "metal", "found", lab.MachineMAC, "--json")
		return strings.Contains(out, `\"source\":\"ramdisk\"`), err
	}))
	if out := b.cli("pxe", "explain", lab.MachineMAC); !strings.Contains(out, id) || !strings.Contains(out, "assigned to the ramdisk for inspect") || !strings.Contains(out, "attempt 1") {
		t.Errorf("pxe explain = %s, want a stranger that boots to be inspected", out)
	}

	b.refused([]string{"mac-not-seen"}, "metal", "confirm-mac", "m1", "52:54:00:99:99:99")
	b.cli("metal", "confirm-mac", "m1", lab.MachineMAC)
	if out := b.cli("metal", "found"); strings.Contains(out, lab.MachineMAC) {
		t.Errorf("metal found = %s, want none: it is m1's", out)
	}
	b.must(lab.Poll(b.ctx, "wait for the box to know the MAC as m1's", func() (bool, error) {
		out, err := b.CLI(b.ctx, nil, "pxe", "explain", lab.MachineMAC)
		return strings.Contains(out, ": m1 node_") && strings.Contains(out, "assigned to its local disk"), err
	}))
	if file := b.firmware(guid); file != "" {
		t.Errorf("m1, which is to boot nothing, is told to load %q", file)
	}

	// A stranger's voucher ends with the policy.
	b.cli("site", "unknown", lab.SiteName, "--leave")
	b.must(ramdisk.WaitFor(b.ctx, "boot window for unknown machines is over"))
	thief, err := b.Spawn("mach", "thief", filepath.Join(b.Out, "bin", "bcd"), "ramdisk", "--boot", boot)
	b.must(err)
	b.must(thief.WaitFor(b.ctx, "boot window"))
}

// A box whose file of boot decisions is damaged says so, and is sent them again.
func TestDamagedDecisionsAreSentAgain(t *testing.T) {
	const mac = "52:54:00:00:09:03"
	b := ready(t, lab.SiteOptions{})
	b.cli("metal", "confirm-mac", lab.MachineName, mac, "--unseen")
	known := func() {
		t.Helper()
		b.must(lab.Poll(b.ctx, "wait for the box to know the MAC", func() (bool, error) {
			out, err := b.CLI(b.ctx, nil, "pxe", "explain", mac)
			return strings.Contains(out, ": "+lab.MachineName+" node_"), err
		}))
	}
	known()
	b.Site.Stop()
	file := filepath.Join(b.Dir, "site", "state", "assignments.json")
	_, err := os.Stat(file)
	b.must(err)
	b.must(os.WriteFile(file, []byte("torn"), 0o600))
	b.must(b.StartSite(b.ctx, "", lab.SiteOptions{}))
	b.must(b.Site.WaitFor(b.ctx, "session is up"))
	b.must(b.WaitSiteOnline(b.ctx))
	known()
}
