package mainjob

import (
	"context"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/image/qemutest"
	"github.com/better-compute/site-appliance/scripts/lab"
)

// TestDeployOutlivesTheLine: the gateway is killed while the real ramdisk writes. The
// ramdisk says to the box that it is done, and from then on the box alone sends the
// machine to its disk, over a power cut of its own and with the gateway away; the machine
// starts from what was written, and the gateway learns of it once when it is back.
func TestDeployOutlivesTheLine(t *testing.T) {
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
			if l.Site != nil {
				t.Logf("the box printed:\n%s", l.Site.Output())
			}
			t.Fatal(err)
		}
	}
	cli := func(args ...string) string {
		t.Helper()
		out, err := l.CLI(ctx, nil, args...)
		must(err)
		return strings.TrimSpace(out)
	}
	qmp := func(command string) {
		t.Helper()
		_, err := l.Metal.VM().QMP(ctx, command, nil)
		must(err)
	}
	must(l.Keys(ctx))
	must(l.Serve(ctx))
	join, err := l.AddSite(ctx)
	must(err)
	must(l.StartSite(ctx, join, lab.SiteOptions{}))
	must(l.WaitSiteOnline(ctx))
	must(l.Site.WaitFor(ctx, "network boot is served"))
	must(l.EnrollMachine(ctx))
	cli("artifact", "import", "../../out/qemu-amd64/node.raw.zst", "--name", lab.ImageName)
	id := cli("metal", "deploy", lab.MachineName, "--image", lab.ImageName, "--disk-serial", lab.DiskSerial, "--hostname", "node-1")

	// The machine stands still while the gateway goes: it surely goes in the middle.
	must(l.Site.WaitFor(ctx, `msg="artifact is complete"`))
	qmp("stop")
	l.Gateway.Kill()
	const done = `stage=done client="" ip="" detail="image written to vda"`
	if strings.Contains(l.Site.Output(), done) {
		t.Fatal("the image was written before the gateway was killed: the test would show nothing")
	}
	qmp("cont")
	must(l.Site.WaitFor(ctx, done))
	must(lab.CompareDisk("../../out/qemu-amd64/node.raw.zst", l.Metal.Disk))

	// The power of the box goes between the ramdisk's word and the next boot.
	l.Site.Kill()
	must(l.StartSite(ctx, "", lab.SiteOptions{}))
	must(l.Site.WaitFor(ctx, "network boot is served"))
	// Its real firmware is offered nothing, though it asks the network first, and then
	// its disk boots.
	vm := l.Metal.VM()
	vm.Mark()
	must(l.Metal.Reset(ctx))
	must(vm.WaitMarker(ctx, "PXE-E16: No valid offer received", 70*time.Second))
	must(l.Metal.PowerOff(ctx))
	must(l.Metal.PowerOn(ctx, bmctest.BootDevice{}))
	must(l.Metal.WaitMarker(ctx, "role node, kernel", time.Minute))
	if out := l.Site.Output(); strings.Contains(out, "stage=tftp") || strings.Contains(out, "stage=script") {
		t.Errorf("the box gave the machine something to boot:\n%s", out)
	}

	must(l.Serve(ctx))
	must(l.WaitSiteOnline(ctx))
	must(l.Metal.WaitMarker(ctx, `msg="session is up" role=node`, time.Minute))
	events := func() string { return cli("events", "--site", lab.SiteName, "--limit", "1000") }
	must(lab.Poll(ctx, "wait for the gateway to learn of it", func() (bool, error) { return strings.Contains(events(), `"stage":"done"`), nil }))
	if n := strings.Count(events(), `"stage":"done"`); n != 1 {
		t.Errorf("the gateway learnt %d times that the image is written, want once", n)
	}
	explained := cli("pxe", "explain", lab.MachineMAC)
	if !strings.Contains(explained, "local-disk") || !strings.Contains(explained, " was for is done") || !strings.Contains(explained, "attempt 1") {
		t.Errorf("pxe explain = %s, want an attempt that was sent to the disk since all is done", explained)
	}
	if out := cli("workflow", "show", id); strings.Contains(out, "tried again") {
		t.Errorf("the deployment is tried again:\n%s", out)
	}
	if got, want := l.IPMI.Log(), []string{"bootdev pxe efi once", "on pxe efi once"}; !slices.Equal(got, want) {
		t.Errorf("the BMC did %q, want %q", got, want)
	}
}
