package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/scripts/lab"
)

// profiles binds the rig's BMC to bcx-ipmi, in the profile itself, and is all that
// the gateway knows: metal's steps, its commands and its API are left out.
const profiles = `modules = ["provision"]

[profiles.cycle.drivers]
power = { driver = "ipmi", config = { address = "%[1]s", credentials = "secret://default/rig-bmc" } }

[[profiles.cycle.steps]]
uses = "power.getPower"
on = "site"

[[profiles.cycle.steps]]
uses = "power.setPower"
on = "site"
with = "on"
timeout = "1m"

[[profiles.cycle.steps]]
uses = "power.getPower"
on = "site"

[profiles.halt]
drivers = { power = { driver = "ipmi", config = { address = "%[1]s", credentials = "secret://default/rig-bmc" } } }
steps = [{ uses = "power.getPower", on = "site" }, { uses = "power.setPower", on = "site", with = ["off"] }]

# What a box must refuse: another credential for the same BMC, another shape of
# configuration, and a driver that nobody hosts.
[profiles.thief]
drivers = { power = { driver = "ipmi", config = { address = "%[1]s", credentials = "secret://default/other" } } }
steps = [{ uses = "power.getPower", on = "site" }]

[profiles.odd]
drivers = { power = { driver = "ipmi", config = { address = "%[1]s", suite = 17 } } }
steps = [{ uses = "power.getPower", on = "site" }]

[profiles.unhosted]
drivers = { raid = { driver = "ipmi" } }
steps = [{ uses = "raid.getLayout", on = "site" }]

[profiles.locked]
drivers = { power = { driver = "ipmi", config = { address = "%[1]s" } } }
steps = [{ uses = "power.getPower", on = "site" }]
`

// TestProfileThroughTheBox: steps of a profile go out as driver.invoke and run in
// the sandboxed plugin of a real bcd site, which reaches a real BMC with the
// credential that the configuration names.
func TestProfileThroughTheBox(t *testing.T) {
	b := ready(t, lab.SiteOptions{})
	_, err := b.CLI(b.ctx, []byte(`{"username":"x","password":"y"}`), "secret", "put", "other")
	b.must(err)
	b.Gateway.Stop()
	b.must(os.WriteFile(filepath.Join(b.GatewayDir(), "gateway.toml"), fmt.Appendf(nil, profiles, lab.BMCAddr), 0o600))
	b.must(b.Serve(b.ctx))
	b.must(b.WaitSiteOnline(b.ctx))
	b.refused([]string{"is not implemented"}, "metal", "power", lab.MachineName)

	id := b.cli("workflow", "start", "cycle", lab.MachineName)
	b.cli("workflow", "watch", id)
	if !b.machine.Running() {
		t.Error("the machine does not run")
	}
	show := b.cli("workflow", "show", id)
	if strings.Count(show, "power.getPower") != 2 || !strings.Contains(show, `"off"`) || !strings.Contains(show, `"on"`) {
		t.Errorf("workflow show does not tell what the steps answered:\n%s", show)
	}
	if want, got := []string{"on none"}, b.IPMI.Log(); !slices.Equal(got, want) {
		t.Errorf("the BMC did %q, want %q", got, want)
	}
	b.noSecrets()

	for profile, code := range map[string]string{
		"thief": "binding-mismatch", "odd": "invalid-config", "unhosted": "no hosted driver ipmi implements raid", "locked": "credentials-unavailable",
	} {
		b.refused([]string{code}, "workflow", "start", profile, lab.MachineName, "--watch")
	}
	b.refused([]string{"workflow-ended"}, "workflow", "cancel", id)
	b.refused([]string{"INVALID_INPUT"}, "workflow", "start", "none", lab.MachineName)

	// The box is away, and the workflow waits for it. The gateway is killed, and the
	// profile says something else when it is back: what had begun goes on as it was.
	b.Site.Stop()
	id = b.cli("workflow", "start", "halt", lab.MachineName)
	b.workflow(id, "waiting for the site's box")
	b.Gateway.Kill()
	b.must(os.WriteFile(filepath.Join(b.GatewayDir(), "gateway.toml"), []byte("modules = [\"provision\"]\n"), 0o600))
	b.must(b.Serve(b.ctx))
	b.must(b.StartSite(b.ctx, "", lab.SiteOptions{}))
	b.cli("workflow", "watch", id)
	if want, got := []string{"on none", "off"}, b.IPMI.Log(); !slices.Equal(got, want) {
		t.Errorf("the BMC did %q, want each action once: %q", got, want)
	}
	b.refused([]string{"INVALID_INPUT"}, "workflow", "start", "halt", lab.MachineName)
}

// TestProfileCancelled: a person ends a workflow that waits, and nothing of it is done.
func TestProfileCancelled(t *testing.T) {
	b := ready(t, lab.SiteOptions{})
	b.Gateway.Stop()
	b.must(os.WriteFile(filepath.Join(b.GatewayDir(), "gateway.toml"), fmt.Appendf(nil, profiles, lab.BMCAddr), 0o600))
	b.must(b.Serve(b.ctx))
	b.Site.Stop()
	id := b.cli("workflow", "start", "cycle", lab.MachineName)
	b.workflow(id, "waiting for the site's box")
	b.cli("workflow", "cancel", id)
	b.workflow(id, "cancelled")
	if got := b.IPMI.Log(); len(got) != 0 {
		t.Errorf("the BMC did %q, want nothing", got)
	}
}
