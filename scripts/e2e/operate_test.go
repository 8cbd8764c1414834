package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/scripts/lab"
)

// redfish is the machine behind the rig's Redfish front, with a credential of its own.
const redfishMachine = "over-redfish"

// overRedfish is a site at home with that machine.
func overRedfish(t *testing.T, opts ...bmctest.Option) *bench {
	t.Helper()
	b := begin(t, opts...)
	b.must(b.StartSite(b.ctx, b.join, lab.SiteOptions{}))
	b.must(b.WaitSiteOnline(b.ctx))
	b.cli("pool", "add", lab.PoolName, "--site", lab.SiteName)
	_, err := b.CLI(b.ctx, fmt.Appendf(nil, `{"username":%q,"password":%q}`, lab.BMCUser, lab.BMCPassword), "secret", "put", "own")
	b.must(err)
	b.cli("metal", "enroll", redfishMachine, "--pool", lab.PoolName, "--driver", "redfish", "--address", "https://"+lab.BMCAddr,
		"--credentials", "own", "--pin", b.Redfish.SPKI())
	return b
}

// jsonDrives are the names of the machine's drives, as its inspection tells them.
func (b *bench) jsonDrives() []string {
	b.t.Helper()
	var found struct {
		Drives []struct{ Serial string }
	}
	if err := json.Unmarshal([]byte(b.cli("metal", "inspect-bmc", redfishMachine)), &found); err != nil || len(found.Drives) < 2 {
		b.t.Fatalf("inspect-bmc has %d drives, %v, want two at least", len(found.Drives), err)
	}
	var names []string
	for _, d := range found.Drives {
		names = append(names, d.Serial)
	}
	return names
}

// TestBMCVerbs asks a Redfish BMC, by the program that people use, for what its
// driver serves.
func TestBMCVerbs(t *testing.T) {
	b := overRedfish(t)
	for _, tt := range []struct{ args, want string }{
		{"power NAME", "off"}, {"boot NAME pxe --efi", ""}, {"boot NAME", "pxe efi"}, {"power NAME on", ""}, {"power NAME", "on"}, {"power NAME nmi", ""},
		{"inspect-bmc NAME", `"manufacturer"`}, {"event-log NAME", "ID"}, {"media NAME", `"inserted": false`}, {"media NAME eject", ""},
		{"bios NAME", "{"}, {"raid NAME", `"volumes"`}, {"firmware NAME", "COMPONENT"}, {"secure-boot NAME", `"enabled"`}, {"secure-boot NAME on", ""},
		{"show NAME", "redfish"}, {"protect NAME", ""}, {"bmc-reset NAME", ""},
	} {
		args := strings.Fields("metal " + strings.ReplaceAll(tt.args, "NAME", redfishMachine))
		if got := b.cli(args...); !strings.Contains(got, tt.want) {
			t.Errorf("%s = %q, want %q in it", strings.Join(args, " "), got, tt.want)
		}
	}
	// What changes a machine's set-up goes all the way too.
	drives := b.jsonDrives()
	layout := filepath.Join(b.Dir, "layout.json")
	b.must(os.WriteFile(layout, fmt.Appendf(nil, `{"volumes":[{"name":"os","level":"1","drives":[%q,%q]}]}`, drives[0], drives[1]), 0o600))
	b.cli("metal", "bios", redfishMachine, "apply", "BootMode=Bios")
	b.cli("metal", "raid", redfishMachine, "apply", layout)
	if log := strings.Join(b.Redfish.Log(), "\n"); strings.Count(log, "bios set BootMode=Bios") != 1 || strings.Count(log, "volume create") != 1 {
		t.Errorf("the BMC's log is\n%s\nwant one setting and one volume", log)
	}
	if got := b.cli("metal", "raid", redfishMachine); !strings.Contains(got, `"os"`) {
		t.Errorf("raid = %s, want the volume", got)
	}
	b.refused([]string{"invalid-args", "NoSuchName"}, "metal", "bios", redfishMachine, "apply", "NoSuchName=1")
	b.refused([]string{"INVALID_INPUT"}, "metal", "media", redfishMachine, "insert", "file:///etc/passwd")
	// The machine follows its box at once, but not in the same moment.
	for began := time.Now(); !strings.Contains(b.cli("metal", "show", redfishMachine), "protected"); time.Sleep(50 * time.Millisecond) {
		if time.Since(began) > 30*time.Second {
			t.Fatal("the machine is not shown as protected")
		}
	}
	b.cli("metal", "unprotect", redfishMachine)
	if got := b.cli("metal", "power", redfishMachine, "--json"); !strings.Contains(got, `"power"`) {
		t.Errorf("power --json = %s", got)
	}
}

// TestRebindIsTheWayOut: an address that the box knows with another credential is
// refused until the box is told, over the line and signed.
func TestRebindIsTheWayOut(t *testing.T) {
	b := overRedfish(t)
	b.cli("metal", "power", redfishMachine)
	_, err := b.CLI(b.ctx, fmt.Appendf(nil, `{"username":%q,"password":%q}`, lab.BMCUser, lab.BMCPassword), "secret", "put", "another")
	b.must(err)
	b.cli("metal", "enroll", "twin", "--pool", lab.PoolName, "--driver", "redfish", "--address", "https://"+lab.BMCAddr, "--credentials", "another", "--pin", b.Redfish.SPKI())
	b.refused([]string{"binding-mismatch"}, "metal", "power", "twin")
	b.cli("metal", "rebind", redfishMachine, "--credentials", "another")
	if got := b.cli("metal", "power", "twin"); got != "off" {
		t.Errorf("power after the rebinding = %q, want off", got)
	}
}

// TestRotationAndKill: the password of a BMC changes while box and gateway are
// killed around it, and both go on with the one that holds.
func TestRotationAndKill(t *testing.T) {
	b := overRedfish(t)
	b.cli("metal", "power", redfishMachine)
	b.cli("metal", "rotate", redfishMachine)
	first := b.Redfish.Password()
	if first == lab.BMCPassword {
		t.Fatal("the BMC's password did not change")
	}
	for n, wait := range []time.Duration{0, 20 * time.Millisecond, 60 * time.Millisecond, 150 * time.Millisecond} {
		before := b.Redfish.Password()
		id := b.cli("metal", "rotate", redfishMachine, "--no-wait")
		time.Sleep(wait) // wherever that is, the end is the same
		b.Site.Kill()
		if n%2 == 1 {
			b.Gateway.Kill()
			b.must(b.Serve(b.ctx))
		}
		b.must(b.StartSite(b.ctx, "", lab.SiteOptions{}))
		b.must(b.WaitSiteOnline(b.ctx))
		b.cli("metal", "command", id, "--wait")
		if got := b.cli("metal", "power", redfishMachine); got != "off" {
			t.Errorf("power after a kill %s into a rotation = %q, want off", wait, got)
		}
		if b.Redfish.Password() == before {
			t.Errorf("the password did not change after a kill %s into a rotation", wait)
		}
	}
	b.noSecrets()
}
