package config

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

const good = `modules = ["metal", "provision"]

[hardware_profiles.gpu-redfish]
description = "HGX hosts"
[hardware_profiles.gpu-redfish.drivers]
power = "redfish"
management = "redfish"
boot = "ipxe"
deploy = { driver = "image-stream", config = { window = "1h", parts = [1, 2.5, true] } }
[hardware_profiles.gpu-redfish.bios]
BootMode = "Uefi"
SriovEnable = true
[hardware_profiles.gpu-redfish.raid]
volumes = [{ level = 1, drives = ["0", "1"] }]

[bmc_drivers]
acme-bmc = ["power.getPower", "power.setPower", "management.setBootDevice"]

[[external_drivers]]
command = ["/opt/bc/plugins/acme-bmc"]
sha256 = "9f3e9f3e9f3e9f3e9f3e9f3e9f3e9f3e9f3e9f3e9f3e9f3e9f3e9f3e9f3e9f3e"
env = { ACME_LOG = "debug" }
start_timeout = "5s"

[profiles.cycle]
description = "power through a plugin"
[profiles.cycle.drivers]
power = "acme-bmc"
[[profiles.cycle.steps]]
uses = "power.setPower"
on = "site"
with = ["cycle"]
timeout = "90s"
[[profiles.cycle.steps]]
uses = "bios.applySettings"
on = "node"
with = { a = { b = 1 } }
`

func TestParse(t *testing.T) {
	c, err := Parse("gateway.toml", []byte(good))
	if err != nil {
		t.Fatal(err)
	}
	p := c.MetalOptions().HardwareProfiles["gpu-redfish"]
	if p.Description != "HGX hosts" || p.Drivers["boot"].Driver != "ipxe" || p.Drivers["boot"].Config != nil ||
		p.Drivers["deploy"].Driver != "image-stream" || string(p.Drivers["deploy"].Config) != `{"parts":[1,2.5,true],"window":"1h"}` ||
		string(p.BIOS) != `{"BootMode":"Uefi","SriovEnable":true}` || string(p.RAID) != `{"volumes":[{"drives":["0","1"],"level":1}]}` {
		t.Errorf("hardware profile = %+v, bios %s, raid %s", p, p.BIOS, p.RAID)
	}
	if want := []string{"power.getPower", "power.setPower", "management.setBootDevice"}; !slices.Equal(c.MetalOptions().BMCDrivers["acme-bmc"], want) {
		t.Errorf("bmc drivers = %v", c.BMCDrivers)
	}
	if d := c.ExternalDrivers[0]; d.Env["ACME_LOG"] != "debug" || time.Duration(d.StartTimeout) != 5*time.Second || d.CallTimeout != 0 {
		t.Errorf("external driver = %+v", d)
	}
	profiles := c.ModuleProfiles()
	if len(profiles) != 1 || profiles[0].Name != "cycle" || len(profiles[0].Steps) != 2 {
		t.Fatalf("profiles = %+v", profiles)
	}
	first, second := profiles[0].Steps[0], profiles[0].Steps[1]
	if first.Uses != "power.setPower" || first.On != "site" || string(first.With) != `["cycle"]` || first.Timeout != 90*time.Second ||
		string(second.With) != `{"a":{"b":1}}` || second.Timeout != 0 || profiles[0].Drivers["power"].Driver != "acme-bmc" {
		t.Errorf("steps = %+v", profiles[0].Steps)
	}
}

// TestModules: without the key there are all modules, with it only those that it names.
func TestModules(t *testing.T) {
	for text, want := range map[string][]string{
		"":                        {Metal, Provision},
		"modules = []":            {},
		`modules = ["provision"]`: {Provision},
		`modules = ["metal"]`:     {Metal},
		"[bmc_drivers]\nx = [\"power.getPower\"]": {Metal, Provision},
	} {
		c, err := Parse("gateway.toml", []byte(text))
		if err != nil || !slices.Equal(c.Modules, want) {
			t.Errorf("Parse(%q) = %+v, %v, want modules %q", text, c, err, want)
		}
	}
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	c, err := Load(dir)
	if err != nil || !c.Has(Metal) || !c.Has(Provision) {
		t.Errorf("Load without a file = %+v, %v, want the default", c, err)
	}
	if err := os.WriteFile(filepath.Join(dir, File), []byte(good), 0o600); err != nil {
		t.Fatal(err)
	}
	if c, err := Load(dir); err != nil || len(c.Profiles) != 1 {
		t.Errorf("Load = %+v, %v", c, err)
	}
	if err := os.WriteFile(filepath.Join(dir, File), []byte("modulse = []"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(dir); err == nil || !strings.Contains(err.Error(), `gateway.toml:1: unknown key "modulse"`) {
		t.Errorf("Load of an unknown key = %v", err)
	}
}

func TestParseErrors(t *testing.T) {
	for _, tt := range []struct{ old, new, want string }{
		{`description = "HGX`, `descripton = "HGX`, `gateway.toml:4: unknown key "hardware_profiles.gpu-redfish.descripton"`},
		{"[bmc_drivers]", "[bmc_driver]", `gateway.toml:16: unknown key "bmc_driver"`},
		{"timeout = \"90s\"", "time_out = \"90s\"", `unknown key "profiles.cycle.steps.time_out"`},
		{`"provision"]`, `"provison"]`, `unknown module "provison"`},
		{`"provision"]`, `"metal"]`, "metal is there twice"},
		{`"metal", "provision"`, `"provision"`, "hardware_profiles: they are the module metal's"},
		{`"metal", "provision"`, `"metal"`, "profiles: they are the module provision's"},
		{`power = "redfish"`, `power = "Redfish"`, "gateway.toml:6: hardware_profiles.gpu-redfish.drivers.power: binding: driver"},
		{`power = "redfish"`, `power = 7`, "gateway.toml:6: hardware_profiles.gpu-redfish.drivers.power: want a driver's id"},
		{`power = "redfish"`, `power = { driver = "redfish", confg = {} }`, `unknown key "confg"`},
		{`power = "redfish"`, `power = { config = {} }`, "driver is missing"},
		{`power = "redfish"`, `power = { driver = "redfish", config = "x" }`, "config is no table"},
		{`power = "redfish"`, `"Po wer" = "redfish"`, `kind "Po wer"`},
		{`window = "1h"`, `window = 2026-01-01`, "a date"},
		{`window = "1h"`, `window = inf`, "a number that is none"},
		{"[hardware_profiles.gpu-redfish.bios]\nBootMode = \"Uefi\"\nSriovEnable = true\n", "", ""}, // the same without it is right
		{"[hardware_profiles.gpu-redfish.bios]\nBootMode = \"Uefi\"\nSriovEnable = true\n", "[hardware_profiles.other]\nbios = 7\n", "gateway.toml:11: hardware_profiles.other.bios: want a table"},
		{"power = \"acme-bmc\"", "power = { driver = \"x\", config = { a = [{ b = 1 }] } }", ""}, // a configuration is the driver's own
		{"[[profiles.cycle.steps]]\nuses = \"bios.applySettings\"\non = \"node\"\nwith = { a = { b = 1 } }\n", "[profiles.inline]\nsteps = [{ uses = \"a.b\", wth = 1 }]\n", `gateway.toml:35: unknown key "profiles.inline.steps.wth"`},
		{"gpu-redfish", "GPU", `hardware profile "GPU"`},
		{`"power.getPower", `, `"getPower", `, `operation "getPower"`},
		{"acme-bmc = [\"power.getPower\", \"power.setPower\", \"management.setBootDevice\"]", "redfish = [\"power.getPower\"]", "metal knows what it serves"},
		{"acme-bmc = [\"power.getPower\", \"power.setPower\", \"management.setBootDevice\"]", "acme-bmc = []", "0 operations"},
		{`"/opt/bc`, `"opt/bc`, "want an absolute path"},
		{`sha256 = "9f3e`, `sha256 = "9F3E`, "sha256: want 64"},
		{`sha256 = "9f3e`, `sha256 = "9f3`, "sha256: want 64"},
		{`ACME_LOG`, `BCX_MAGIC_COOKIE`, "env"},
		{`start_timeout = "5s"`, `start_timeout = "0s"`, "want a duration over zero"},
		{`start_timeout = "5s"`, `start_timeout = 5`, "start_timeout"},
		{`power = "acme-bmc"`, `POWER = "acme-bmc"`, `profiles.cycle.drivers: kind "POWER"`},
		{`description = "HGX hosts"`, `description = "HGX hosts`, "gateway.toml:4:"},
	} {
		text := strings.ReplaceAll(good, tt.old, tt.new)
		if text == good {
			t.Fatalf("%q is not in the good text", tt.old)
		}
		_, err := Parse("gateway.toml", []byte(text))
		if tt.want == "" {
			if err != nil {
				t.Errorf("with %q: error %v, want none", tt.new, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.HasPrefix(err.Error(), "gateway.toml") {
			t.Errorf("with %q: error %v, want it to hold %q", tt.new, err, tt.want)
		}
	}
}

func TestParseGarbage(t *testing.T) {
	for name, text := range map[string]string{
		"random bytes": "\x00\xff\xfe\x01[\x7f=",
		"deep nesting": "a = " + strings.Repeat("[", maxBytes-10),
		"deep table":   "[" + strings.Repeat("a.", maxBytes/2-10) + "a]\n",
		"deep key":     strings.Repeat("a.", maxKey+1) + "a = 1\n",
		"deep inline":  "a = " + strings.Repeat("{a=", maxBytes/3-10),
		"deep lines":   "a = " + strings.Repeat("[\n", 1000),
		"too large":    strings.Repeat("#\n", maxBytes),
	} {
		_, err := Parse("gateway.toml", []byte(text))
		if err == nil || !strings.Contains(err.Error(), "gateway.toml") || !utf8.ValidString(err.Error()) || len(err.Error()) > 500 {
			t.Errorf("%s: error %v, want a short one that names the file", name, err)
		}
	}
}

// FuzzParse: whatever is accepted has bindings that can be written and read again.
func FuzzParse(f *testing.F) {
	f.Add([]byte(good))
	f.Add([]byte("modules = []\n[profiles.a]\n[[profiles.a.steps]]\nuses=\"x.y\"\nwith=[[],{}]\n"))
	f.Add([]byte("[hardware_profiles.a.drivers]\npower={driver=\"a\",config={b=1979-05-27}}"))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse("gateway.toml", data)
		if err != nil {
			return
		}
		for name, p := range c.MetalOptions().HardwareProfiles {
			raw, err := json.Marshal(p)
			if err != nil || !json.Valid(raw) {
				t.Errorf("profile %q is no JSON: %v", name, err)
			}
		}
		for _, p := range c.ModuleProfiles() {
			for _, s := range p.Steps {
				if len(s.With) > 0 && !json.Valid(s.With) {
					t.Errorf("with = %q is no JSON", s.With)
				}
			}
		}
	})
}

// Every key of gateway.toml stands in the table of docs/gateway.md.
func TestEveryKeyIsDocumented(t *testing.T) {
	page, err := os.ReadFile("../../../docs/gateway.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "\n## gateway.toml\n")
	table, _, _ = strings.Cut(table, "\n## ")
	keys := keysOf(reflect.TypeFor[Config]())
	if len(keys) < 15 {
		t.Fatalf("keys of gateway.toml = %v: too few", keys)
	}
	for _, key := range keys {
		if !strings.Contains(table, "`"+key+"`") && !strings.Contains(table, "["+key) {
			t.Errorf("docs/gateway.md does not explain %s", key)
		}
	}
	// The example of the page is read, not only looked at.
	_, example, ok := strings.Cut(table, "\n```toml\n")
	example, _, closed := strings.Cut(example, "\n```")
	if !ok || !closed {
		t.Fatal("docs/gateway.md has no example of gateway.toml")
	}
	if _, err := Parse("docs/gateway.md", []byte(example)); err != nil {
		t.Error(err)
	}
}

func keysOf(t reflect.Type) []string {
	var keys []string
	for i := range t.NumField() {
		f := t.Field(i)
		if key := f.Tag.Get("toml"); key != "" {
			keys = append(keys, key)
		}
		inner := f.Type
		for inner.Kind() == reflect.Slice || inner.Kind() == reflect.Map {
			inner = inner.Elem()
		}
		if inner.Kind() == reflect.Struct && inner.PkgPath() == t.PkgPath() {
			keys = append(keys, keysOf(inner)...)
		}
	}
	return keys
}
