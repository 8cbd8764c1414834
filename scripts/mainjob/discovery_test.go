package mainjob

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/image/qemutest"
	"github.com/better-compute/site-appliance/scripts/lab"
)

// TestStrangerOnRealParts: a machine that is enrolled by its product UUID alone boots
// by its real firmware as one that nobody knows, is inspected by the real ramdisk,
// which reads serial number and UUID from SMBIOS, and is inspected as itself once its
// MAC is confirmed.
func TestStrangerOnRealParts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: network namespaces")
	}
	qemutest.Need(t, true)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Minute)
	defer cancel()
	l, err := lab.Start(ctx, lab.Config{Dir: t.TempDir(), Out: "../../out"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	must := func(err error) {
		t.Helper()
		if err != nil {
			if vm := l.Metal.VM(); vm != nil {
				t.Logf("the machine's serial line ends:\n%s", vm.Tail(25))
			}
			t.Fatal(err)
		}
	}
	cli := func(args ...string) string {
		t.Helper()
		out, err := l.CLI(ctx, nil, args...)
		must(err)
		return out
	}
	must(l.Keys(ctx))
	must(l.Serve(ctx))
	join, err := l.AddSite(ctx)
	must(err)
	must(l.StartSite(ctx, join, lab.SiteOptions{}))
	must(l.WaitSiteOnline(ctx))
	must(l.Site.WaitFor(ctx, "network boot is served"))
	cli("pool", "add", lab.PoolName, "--site", lab.SiteName)
	_, err = l.CLI(ctx, []byte(`{"username":"`+lab.BMCUser+`","password":"`+lab.BMCPassword+`"}`), "secret", "put", "rig-bmc")
	must(err)
	cli("metal", "enroll", lab.MachineName, "--pool", lab.PoolName, "--driver", "ipmi", "--address", lab.BMCAddr, "--credentials", "rig-bmc", "--uuid", lab.MachineUUID)
	cli("site", "unknown", lab.SiteName, "--inspect")
	must(lab.Poll(ctx, "wait for the box to know", func() (bool, error) {
		out, err := l.CLI(ctx, nil, "site", "unknown", lab.SiteName)
		return !strings.Contains(out, "does not know"), err
	}))

	cli("metal", "boot", lab.MachineName, "pxe", "--efi")
	cli("metal", "power", lab.MachineName, "on")
	var found string
	err = lab.Poll(ctx, "wait for the inspection of a machine that nobody knows", func() (bool, error) {
		found, err = l.CLI(ctx, nil, "metal", "found")
		return strings.Contains(found, lab.MachineSerial), err
	})
	if err != nil {
		t.Logf("metal found:\n%s\npxe explain:\n%s", found, cli("pxe", "explain", lab.MachineMAC, "--site", lab.SiteName))
	}
	must(err)
	for _, want := range []string{lab.MachineMAC, lab.MachineUUID, "1 GiB", lab.MachineMAC + " seems to be " + lab.MachineName + ": it is enrolled with product UUID"} {
		if !strings.Contains(found, want) {
			t.Errorf("metal found = %s, want %q", found, want)
		}
	}

	cli("metal", "confirm-mac", lab.MachineName, lab.MachineMAC)
	if out := cli("metal", "inspect", lab.MachineName, "--wait"); !strings.Contains(out, "hardware.wait") {
		t.Errorf("metal inspect = %s", out)
	}
	if out := cli("metal", "show", lab.MachineName); !strings.Contains(out, lab.DiskSerial) || !strings.Contains(out, "inspected") {
		t.Errorf("metal show = %s, want the hardware", out)
	}
}
