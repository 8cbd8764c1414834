package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/scripts/lab"
)

// approvers names two, whose word is needed from the second target in ten minutes on;
// the gateway must not run. It answers their key files.
func (b *bench) approvers() (private []string) {
	b.t.Helper()
	var public []string
	for range 2 {
		file := filepath.Join(b.t.TempDir(), "me.key")
		private = append(private, file)
		public = append(public, b.cli("approver", "keygen", "--out", file))
	}
	b.cli(append([]string{"gateway", "bundle", "add-approver", "--dir", b.GatewayDir(), "--root", filepath.Join(b.GatewayDir(), "root-1.key"), "--targets-10m", "2"}, public...)...)
	return private
}

// TestGrants has two people approve what the box refuses to do without them, by
// the programs that they would use: the second target in ten minutes.
func TestGrants(t *testing.T) {
	b := begin(t)
	b.Gateway.Stop()
	private := b.approvers()
	b.must(b.Serve(b.ctx))
	b.must(b.StartSite(b.ctx, b.join, lab.SiteOptions{}))
	b.must(b.WaitSiteOnline(b.ctx))
	b.must(b.EnrollMachine(b.ctx))
	// The same machine's other BMC is another target.
	b.must(b.EnrollRedfish(b.ctx))
	const second = lab.MachineName + "-redfish"

	b.cli("metal", "power", lab.MachineName, "on")
	b.cli("metal", "power", lab.MachineName, "off")
	b.cli("metal", "power", second, "on")
	refused := func() {
		t.Helper()
		b.refused([]string{"quorum-required"}, "metal", "power", second, "off")
		if !b.machine.Running() {
			t.Fatal("a refused command switched the machine off")
		}
	}
	refused()
	grant := b.cli("grant", "propose", "--allow", "off", "--machine", second, "--reason", "rack 4 moves")
	if _, err := b.CLI(b.ctx, []byte("2\n"), "approve", grant, "--key", private[0]); err == nil || !strings.Contains(err.Error(), "not signed") {
		t.Errorf("approve with a wrong number of targets = %v", err)
	}
	if got, err := b.CLI(b.ctx, []byte("1\n"), "approve", grant, "--key", private[0]); err != nil || !strings.Contains(got, "1 of 2") {
		t.Errorf("approve = %q, %v", got, err)
	}
	refused()
	b.cli("approve", grant, "--key", private[1], "--yes")
	b.cli("metal", "power", second, "off")
	if b.machine.Running() {
		t.Error("a granted command did nothing")
	}
	b.cli("metal", "power", second, "on")
	refused() // it was for once

	// Nothing of that is forgotten by a restart of the box.
	b.Site.Stop()
	b.must(b.StartSite(b.ctx, "", lab.SiteOptions{}))
	b.must(b.Site.WaitFor(b.ctx, "session is up"))
	b.must(b.WaitSiteOnline(b.ctx))
	refused()
}

// TestConfirmMACInAWindow: a MAC that comes while its machine may boot something is one
// more network boot for the box. Where people approve it is refused before anything is
// changed, and taken once that boot has been ended.
func TestConfirmMACInAWindow(t *testing.T) {
	const name, first, second = "m9", "52:54:00:00:09:01", "52:54:00:00:09:02"
	b := begin(t)
	b.Gateway.Stop()
	private := b.approvers()
	b.must(b.Serve(b.ctx))
	b.must(b.StartSite(b.ctx, b.join, lab.SiteOptions{}))
	b.must(b.WaitSiteOnline(b.ctx))
	b.must(b.EnrollMachine(b.ctx))
	b.cli("metal", "enroll", name, "--pool", lab.PoolName, "--driver", "manual", "--address", "row-9", "--mac", first)
	kernel := filepath.Join(b.Dir, "vmlinuz")
	b.must(os.WriteFile(kernel, []byte("kernel"), 0o600))
	b.cli("artifact", "import", kernel, "--name", "vmlinuz", "--format", "raw")

	b.cli("metal", "power", lab.MachineName, "on")
	b.cli("metal", "power", lab.MachineName, "off") // what comes next is the second target
	grant := b.cli("grant", "propose", "--allow", "netboot", "--machine", name, "--reason", "a look at row 9")
	for _, key := range private {
		b.cli("approve", grant, "--key", key, "--yes")
	}
	id := b.cli("metal", "boot-kernel", name, "--kernel", "vmlinuz")
	b.workflow(id, "somebody to start")
	b.refused([]string{"boot-window-open"}, "metal", "confirm-mac", name, second, "--unseen")
	if out := b.cli("metal", "show", name); strings.Contains(out, second) {
		t.Errorf("after a refusal, metal show = %s", out)
	}
	b.cli("workflow", "cancel", id)
	b.must(lab.Poll(b.ctx, "wait for the boot's end", func() (bool, error) {
		out, err := b.CLI(b.ctx, nil, "metal", "show", name)
		return !strings.Contains(out, "may boot"), err
	}))
	b.cli("metal", "confirm-mac", name, second, "--unseen")
	b.must(lab.Poll(b.ctx, "wait for the box to know the MAC", func() (bool, error) {
		out, err := b.CLI(b.ctx, nil, "pxe", "explain", second)
		return strings.Contains(out, ": "+name+" node_"), err
	}))
}
