package metal

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/binding"
)

func TestNewChecksOptions(t *testing.T) {
	profile := func(p HardwareProfile) Options {
		return Options{HardwareProfiles: map[string]HardwareProfile{"gpu": p}}
	}
	for _, tt := range []struct {
		title string
		in    Options
		want  string // part of the message; empty: accepted
	}{
		{"nothing", Options{}, ""},
		{"all", profile(HardwareProfile{Description: "d", Drivers: map[string]binding.Binding{"power": {Driver: "redfish"}}, BIOS: json.RawMessage(`{}`), RAID: json.RawMessage(` {"a":1}`)}), ""},
		{"profile's name", Options{HardwareProfiles: map[string]HardwareProfile{"GPU x": {}}}, "want a name"},
		{"driver", profile(HardwareProfile{Drivers: map[string]binding.Binding{"power": {Driver: "A"}}}), "drivers: kind power"},
		{"kind", profile(HardwareProfile{Drivers: map[string]binding.Binding{"Po": {Driver: "a"}}}), `kind "Po"`},
		{"config", profile(HardwareProfile{Drivers: map[string]binding.Binding{"power": {Driver: "a", Config: json.RawMessage(`[]`)}}}), "config is no JSON object"},
		{"bios", profile(HardwareProfile{BIOS: json.RawMessage(`[]`)}), "bios: want a JSON object"},
		{"raid", profile(HardwareProfile{RAID: json.RawMessage(`{`)}), "raid: want a JSON object"},
		{"large raid", profile(HardwareProfile{RAID: json.RawMessage(`{"a":"` + strings.Repeat("a", maxLayout) + `"}`)}), "raid: want a JSON object"},
		{"blank raid", profile(HardwareProfile{RAID: json.RawMessage(` `)}), "raid: want a JSON object"},
		{"description", profile(HardwareProfile{Description: strings.Repeat("d", maxDescription+1)}), "description"},
		{"bmc driver", Options{BMCDrivers: map[string][]string{"acme": {"power.getPower"}}}, ""},
		{"bmc driver's id", Options{BMCDrivers: map[string][]string{"A": {"power.getPower"}}}, "binding: driver"},
		{"operation", Options{BMCDrivers: map[string][]string{"acme": {"getPower"}}}, "want <concern>.<operation>"},
		{"no operation", Options{BMCDrivers: map[string][]string{"acme": {}}}, "0 operations"},
		{"what metal knows", Options{BMCDrivers: map[string][]string{"ipmi": {"power.getPower"}}}, "metal knows"},
	} {
		_, err := New(tt.in)
		if (err == nil) != (tt.want == "") || err != nil && (code(err) != apierr.InvalidConfig || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: New() = %v, want %q", tt.title, err, tt.want)
		}
	}
}

// TestNewKeepsItsOwn: what a caller does to its options later changes nothing.
func TestNewKeepsItsOwn(t *testing.T) {
	o := Options{HardwareProfiles: map[string]HardwareProfile{"gpu": {Drivers: map[string]binding.Binding{"power": {Driver: "redfish"}}, BIOS: json.RawMessage(`{"a":1}`)}}}
	m, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	o.HardwareProfiles["gpu"].Drivers["power"] = binding.Binding{Driver: "evil"}
	o.HardwareProfiles["gpu"].BIOS[2] = 'X'
	delete(o.HardwareProfiles, "gpu")
	if p, ok := m.Profile("gpu"); !ok || p.Drivers["power"].Driver != "redfish" || string(p.BIOS) != `{"a":1}` {
		t.Errorf("Profile(gpu) = %+v, %v", p, ok)
	}
	if bios, raid := m.Layout("gpu"); string(bios) != `{"a":1}` || raid != nil {
		t.Errorf("Layout(gpu) = %s, %s", bios, raid)
	}
	if bios, raid := m.Layout("none"); bios != nil || raid != nil {
		t.Errorf("Layout(none) = %s, %s", bios, raid)
	}
}

func TestBindingsLayers(t *testing.T) {
	m, err := New(Options{HardwareProfiles: map[string]HardwareProfile{
		"pools": {Drivers: map[string]binding.Binding{"power": {Driver: "from-pool"}, "boot": {Driver: "from-pool"}}},
		"named": {Drivers: map[string]binding.Binding{"power": {Driver: "from-named"}}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	bmc := store.BMC{Driver: "ipmi", Address: "10.0.0.5", CredentialsRef: "secret://acme/bmc"}
	own := map[string]binding.Binding{"power": {Driver: "from-own"}}
	for _, tt := range []struct {
		named, pools string
		own          map[string]binding.Binding
		want         string // driver of power, boot and management
		profile      string
	}{
		{"", "", nil, "ipmi - ipmi", ""},
		{"", "pools", nil, "from-pool from-pool ipmi", "pools"},
		{"named", "pools", nil, "from-named - ipmi", "named"},
		{"named", "", nil, "from-named - ipmi", "named"},
		{"named", "pools", own, "from-own - ipmi", "named"},
		{"", "pools", own, "from-own from-pool ipmi", "pools"},
		{"", "", own, "from-own - ipmi", ""},
		{"named", "unknown", nil, "from-named - ipmi", "named"}, // the pool's is not asked
	} {
		got, profile, err := m.Bindings("acme", bmc, tt.named, tt.pools, tt.own)
		if err != nil {
			t.Errorf("Bindings(%s, %s) = %v", tt.named, tt.pools, err)
			continue
		}
		var text []string
		for _, kind := range []string{"power", "boot", "management"} {
			id := got[kind].Driver
			if id == "" {
				id = "-"
			}
			text = append(text, id)
		}
		if strings.Join(text, " ") != tt.want || profile != tt.profile {
			t.Errorf("Bindings(%s, %s, %v) = %q by %q, want %q by %q", tt.named, tt.pools, tt.own, text, profile, tt.want, tt.profile)
		}
	}
	for _, tt := range []struct{ named, pools string }{{"unknown", ""}, {"", "unknown"}, {"unknown", "pools"}} {
		if _, _, err := m.Bindings("acme", bmc, tt.named, tt.pools, nil); code(err) != apierr.InvalidInput {
			t.Errorf("Bindings(%q, %q) = %v, want INVALID_INPUT", tt.named, tt.pools, err)
		}
	}
	// Layers that fit one by one must fit together.
	many := map[string]binding.Binding{}
	for i := range binding.MaxKinds {
		many[fmt.Sprintf("k%d", i)] = binding.Binding{Driver: "a"}
	}
	if _, _, err := m.Bindings("acme", bmc, "", "", many); code(err) != apierr.InvalidInput {
		t.Errorf("Bindings of too many kinds = %v, want INVALID_INPUT", err)
	}
}

func TestModuleDeclaresBuiltIns(t *testing.T) {
	mod, err := Module(Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := module.Join(mod); err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, d := range mod.Drivers {
		ids = append(ids, d.ID())
		_, err := d.Invoke(driver.NewContext(t.Context(), nil, nil, nil), d.Manifest().Kinds[0], "getPower", nil, nil)
		if errs.CodeOf(err) != errs.UnsupportedOperation {
			t.Errorf("Invoke of %s in the control plane = %v, want unsupported-operation", d.ID(), err)
		}
	}
	want := slices.Sorted(slices.Values(driver.BuiltIn()))
	if slices.Sort(ids); !slices.Equal(ids, want) {
		t.Errorf("built-in drivers = %q, want %q", ids, want)
	}
}

// TestStepsRefuseWhatADriverLacks: by metal's knowledge or the configuration's,
// before a command is made; a driver that neither knows gets its command.
func TestStepsRefuseWhatADriverLacks(t *testing.T) {
	mod, err := Module(Options{BMCDrivers: map[string][]string{"conf-bmc": {SetPower, "virtual-media.insert"}}})
	if err != nil {
		t.Fatal(err)
	}
	set, err := module.Join(mod)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		step, driver, with string
		kind               string // empty: refused
	}{
		{"power.setPower", "ipmi", `["cycle"]`, "bmc.power"},
		{"power.setPower", "conf-bmc", `"on"`, "bmc.power"},
		{"power.getPower", "conf-bmc", ``, ""},
		{"media.insert", "conf-bmc", `["https://x/a.iso"]`, "bmc.media"},
		{"media.insert", "ipmi", `["https://x/a.iso"]`, ""},
		{"media.eject", "unheard-of", ``, "bmc.media"},
		{"inspect.inspect", "wol", ``, ""},
		{"inspect.inspect", "redfish", ``, "bmc.query"},
		{"bmc-credentials.rotate", "ipmi", ``, ""},
		{"bmc-firmware.list", "manual", ``, ""},
		{"inspect.inspect", "ipmi", ``, "bmc.query"},
	} {
		step, ok := set.Step(tt.step)
		if !ok {
			t.Fatalf("no step %s", tt.step)
		}
		c, err := step.Command(store.Machine{BMC: store.BMC{Driver: tt.driver, Address: "10.0.0.5", CredentialsRef: "secret://acme/bmc", DriverOptions: `{"a":1}`}}, json.RawMessage(tt.with))
		if tt.kind == "" {
			if errs.CodeOf(err) != "bmc-driver-unsupported" {
				t.Errorf("%s of %s = %v, want bmc-driver-unsupported", tt.step, tt.driver, err)
			}
			continue
		}
		if err != nil || c.Kind != tt.kind {
			t.Errorf("%s of %s = %+v, %v, want a %s", tt.step, tt.driver, c, err, tt.kind)
			continue
		}
		if req := c.Args.(*bmcv1.BmcOperationRequest); req.Driver != tt.driver || req.DriverOptionsJson != `{"a":1}` || !slices.Equal(c.SecretRefs, []string{"secret://acme/bmc"}) {
			t.Errorf("%s of %s sends %v", tt.step, tt.driver, req)
		}
	}
}
