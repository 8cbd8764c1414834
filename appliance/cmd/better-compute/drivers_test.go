package main

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/gateway"
	"github.com/better-compute/site-appliance/appliance/gateway/config"
)

// configure puts a gateway.toml into the gateway's folder and starts it anew.
func (c *cli) configure(text string) {
	c.t.Helper()
	c.halt()
	if err := os.WriteFile(filepath.Join(c.dir, config.File), []byte(text), 0o600); err != nil {
		c.t.Fatal(err)
	}
	c.serve()
}

const hardwareTOML = `
[hardware_profiles.gpu-redfish]
description = "HGX hosts"
[hardware_profiles.gpu-redfish.drivers]
power = "redfish"
boot = "ipxe"
[hardware_profiles.plain.drivers]
boot = "ipxe"
[bmc_drivers]
conf-bmc = ["power.getPower"]
`

// TestDriversList: the built-in declarations, as a table and in their own form.
func TestDriversList(t *testing.T) {
	c := newCLI(t)
	defer func() { c.halt() }()
	out := c.run("", "drivers", "list")
	for _, id := range []string{"redfish", "wol", "manual", "ipxe", "image-stream"} {
		if !strings.Contains(out, id) {
			t.Errorf("drivers list = %q, want %s in it", out, id)
		}
	}
	if out := c.run("", "drivers", "list", "--kind", "boot"); !strings.Contains(out, "ipxe") || strings.Contains(out, "redfish") {
		t.Errorf("drivers list --kind boot = %q", out)
	}
	var got []map[string]any
	if err := json.Unmarshal([]byte(c.run("", "drivers", "list", "--kind", "raid", "--json")), &got); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(got)
	want := `[{"capabilities":[],"id":"redfish","kinds":["bios","console","credentials","firmware","inspect","management","power","raid","virtual-media"],` +
		`"retrySafe":{"bios":["getSettings"],"firmware":["list"],"inspect":["inspect"],"management":["getBootDevice","getEventLog","getSecureBoot","setBootDevice"],` +
		`"power":["getPower"],"raid":["getLayout"],"virtual-media":["eject","insert","status"]},"runsOn":"site","version":"1.1.0"}]`
	if err != nil || string(text) != want {
		t.Errorf("drivers list --json = %s, want %s", text, want)
	}
	if out := c.run("", "drivers", "list", "--kind", "config", "--json"); out != "[]" {
		t.Errorf("drivers list of nothing = %q, want []", out)
	}
	c.fails("INVALID_INPUT: kind", "drivers", "list", "--kind", "Power")
	token, _, err := c.runAs("", "", "gateway", "token", "--dir", c.dir, "--tenant", "acme", "--name", "reader", "--allow", "compute:drivers:read")
	if err != nil {
		t.Fatal(err)
	}
	reader := c.settings("reader", token)
	if _, _, err := c.runAs(reader, "", "drivers", "list"); err != nil {
		t.Errorf("drivers list with its permission = %v", err)
	}
	if _, _, err := c.runAs(reader, "", "place"); err == nil || !strings.HasPrefix(err.Error(), "PERMISSION_DENIED: the token lacks compute:placement:read") {
		t.Errorf("place without its permission = %v", err)
	}
}

// TestHardwareProfiles: from gateway.toml to what a machine is bound to.
func TestHardwareProfiles(t *testing.T) {
	c := newCLI(t)
	defer func() { c.halt() }()
	c.enrolBox(c.run("", "site", "add", "lab"))
	c.fails("INVALID_INPUT: policy.hardware_profile", "pool", "add", "gpu", "--site", "lab", "--hardware-profile", "gpu-redfish")
	c.configure(hardwareTOML)
	if out := c.run("", "pool", "add", "gpu", "--site", "lab", "--hardware-profile", "gpu-redfish"); !strings.Contains(out, "gpu-redfish") {
		t.Errorf("pool add = %q", out)
	}
	if out := c.run("", "pool", "list"); !strings.Contains(out, "gpu-redfish") {
		t.Errorf("pool list = %q", out)
	}
	c.run(`{"username":"root","password":"hunter2"}`, "secret", "put", "bmc")
	file := filepath.Join(t.TempDir(), "cooling.json")
	if err := os.WriteFile(file, []byte(`{ "fans": 4 }`), 0o600); err != nil {
		t.Fatal(err)
	}
	enroll := []string{"metal", "enroll", "--pool", "gpu", "--address", "192.0.2.7", "--credentials", "bmc", "--uuid", "4c4c4544-0042-3010-8056-b4c04f303232"}
	c.run("", append(enroll, "m1", "--driver", "ipmi", "--driver", "acme-cooling="+"fan:"+file, "--driver", "management=acme-bmc")...)
	out := c.run("", "metal", "show", "m1")
	for _, want := range []string{"power=redfish", "boot=ipxe", "management=acme-bmc", `acme-cooling=fan {"fans":4}`, `virtual-media=ipmi {"address":"192.0.2.7","credentials":"secret://default/bmc"}`, "gpu-redfish"} {
		if !strings.Contains(out, want) {
			t.Errorf("metal show = %q, want %q in it", out, want)
		}
	}
	c.run("", append(enroll, "m2", "--driver", "conf-bmc", "--hardware-profile", "plain")...)
	if out := c.run("", "metal", "show", "m2"); !strings.Contains(out, "power=conf-bmc") || strings.Contains(out, "redfish") {
		t.Errorf("metal show = %q", out)
	}
	c.fails("UNSUPPORTED: bmc-driver-unsupported", "metal", "power", "m2", "on")
	c.fails("INVALID_INPUT: hardware_profile", append(enroll, "m3", "--driver", "ipmi", "--hardware-profile", "none")...)
	c.fails("INVALID_INPUT: drivers: kind", append(enroll, "m3", "--driver", "ipmi", "--driver", "power=Acme")...)
	c.fails("missing: --driver", append(enroll, "m3")...)
	c.fails("--driver ID, the BMC's driver, is missing", append(enroll, "m3", "--driver", "power=acme")...)
	c.fails("--driver redfish: the BMC's driver is ipmi already", append(enroll, "m3", "--driver", "ipmi", "--driver", "redfish")...)
	c.fails("--driver power=b: power is bound already", append(enroll, "m3", "--driver", "ipmi", "--driver", "power=a", "--driver", "power=b")...)
}

func TestPlaceLabels(t *testing.T) {
	c := newCLI(t)
	defer func() { c.halt() }()
	if out := c.run("", "place", "--label", "bc.dev/driver.ipmi=*"); strings.Count(out, "\n") != 0 {
		t.Errorf("place without agents = %q, want the head alone", out)
	}
	c.fails("--label \"x\": want KEY=VALUE", "place", "--label", "x")
	c.fails("--label x is given twice", "place", "--label", "x=1", "--label", "x=2")
	c.fails("NOT_FOUND: ", "place", "--site", "nowhere")
}

// TestModulesLeftOut: a gateway without metal has no machines and no built-in
// drivers, and serves the rest; one whose configuration is wrong says why.
func TestModulesLeftOut(t *testing.T) {
	c := newCLI(t)
	defer func() { c.halt() }()
	c.configure("modules = [\"provision\"]\n")
	if out := c.run("", "drivers", "list", "--json"); out != "[]" {
		t.Errorf("drivers list without metal = %q, want []", out)
	}
	if _, _, err := c.runAs(c.client, "", "metal", "list"); err == nil {
		t.Error("metal list without metal = nil, want an error")
	}
	if _, _, err := c.runAs(c.client, "", "pool", "list"); err == nil {
		t.Error("pool list without metal = nil, want an error")
	}
	c.run("", "site", "add", "lab")
	c.configure("")
	if out := c.run("", "metal", "list"); strings.Count(out, "\n") != 0 {
		t.Errorf("metal list with metal = %q", out)
	}
}

func TestWrongConfiguration(t *testing.T) {
	c := newCLI(t)
	c.halt()
	for text, want := range map[string]string{
		"modulse = []": "INVALID_CONFIG: " + filepath.Join(c.dir, config.File) + `:1: unknown key "modulse"`,
		"[hardware_profiles.gpu.drivers]\npower = \"Redfish\"\n":                                   "INVALID_CONFIG: " + filepath.Join(c.dir, config.File) + ":2: ",
		"[bmc_drivers]\nredfish = [\"power.getPower\"]\n":                                          "INVALID_CONFIG: ",
		"[profiles.x]\n[[profiles.x.steps]]\nuses = \"bios.applySettings\"\non = \"node\"\n":       "INVALID_CONFIG: ",
		"[profiles.deploy]\n[[profiles.deploy.steps]]\nuses = \"power.setPower\"\nwith = \"on\"\n": "INVALID_CONFIG: ",
	} {
		if err := os.WriteFile(filepath.Join(c.dir, config.File), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		err := serveGateway(ctx, c.dir, gateway.Options{Listen: c.listen, Log: slog.New(slog.DiscardHandler)}, func(*gateway.Gateway) { stop() })
		stop()
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("gateway serve with %q = %v, want %q", text, err, want)
		}
	}
}
