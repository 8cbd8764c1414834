package e2e

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/scripts/lab"
)

// TestGrants has two people approve what the box refuses to do without them, by
// the programs that they would use: the second target in ten minutes.
func TestGrants(t *testing.T) {
	b := begin(t)
	b.Gateway.Stop()
	var public, private []string
	for range 2 {
		file := filepath.Join(t.TempDir(), "me.key")
		private = append(private, file)
		public = append(public, b.cli("approver", "keygen", "--out", file))
	}
	b.cli(append([]string{"gateway", "bundle", "add-approver", "--dir", b.GatewayDir(), "--root", filepath.Join(b.GatewayDir(), "root-1.key"), "--targets-10m", "2"}, public...)...)
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
