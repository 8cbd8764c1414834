package module_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/provision"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/binding"
	"github.com/better-compute/site-appliance/plugins/driver/schema"
)

var site = []agentv1.Role{agentv1.Role_ROLE_SITE}

func kind(name string) module.Kind {
	return module.Kind{Name: name, Lane: "query", Timeout: time.Minute, Roles: site}
}

func step(id string) module.Step {
	return module.Step{ID: id, Kind: "test.do", On: module.OnSite, Command: func(store.Machine, json.RawMessage) (module.Command, error) {
		return module.Command{Kind: "test.do"}, nil
	}}
}

func profile() module.Profile {
	return module.Profile{Name: "p", Drivers: map[string]binding.Binding{"power": {Driver: "acme"}},
		Steps: []module.ProfileStep{{Uses: "power.getPower", On: module.OnSite}}}
}

type fan struct{}

// define is a driver of a test's kind with one string, level.
func define(t *testing.T, id, version string) *driver.Definition {
	t.Helper()
	manifest, err := schema.New(schema.Fields{"level": schema.Enum("low", "high"), "key": schema.Secret().Optional()})
	if err != nil {
		t.Fatal(err)
	}
	type config struct {
		Level string     `json:"level"`
		Key   driver.Ref `json:"key"`
	}
	d, err := driver.Define(driver.Spec[config]{ID: id, Version: version, RunsOn: "site", Config: manifest, RetrySafe: []string{"power.getPower"}},
		driver.Implement(driver.Kind[fan]{Name: "power", Operations: map[string]driver.Operation[fan]{
			"getPower": driver.Get(func(fan, *driver.Context) (string, error) { return "on", nil }),
		}}, func(config, *driver.Context) (fan, error) { return fan{}, nil }))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestJoin(t *testing.T) {
	a, b := define(t, "acme", "1.0.0"), define(t, "acme", "1.0.0")
	newer := define(t, "acme", "1.1.0")
	onNode := step("power.getPower")
	onNode.On = module.OnNode
	for name, tt := range map[string]struct {
		modules []module.Module
		want    string // of the error; empty: it fits
	}{
		"none":                              {nil, ""},
		"provision":                         {[]module.Module{provision.Module()}, ""},
		"a name twice":                      {[]module.Module{{Name: "a"}, {Name: "a"}}, "module a is there twice"},
		"no name":                           {[]module.Module{{}}, `module ""`},
		"two versions":                      {[]module.Module{{Name: "a", Drivers: []*driver.Definition{a, newer}}}, ""},
		"a driver twice":                    {[]module.Module{{Name: "a", Drivers: []*driver.Definition{a}}, {Name: "b", Drivers: []*driver.Definition{b}}}, "driver:acme@1.0.0"},
		"a kind twice":                      {[]module.Module{{Name: "a", Kinds: []module.Kind{kind("test.do")}}, {Name: "b", Kinds: []module.Kind{kind("test.do")}}}, "kind test.do is registered twice"},
		"a kind of no form":                 {[]module.Module{{Name: "a", Kinds: []module.Kind{kind("test")}}}, "want noun.verb"},
		"a kind without a lane":             {[]module.Module{{Name: "a", Kinds: []module.Kind{{Name: "test.do", Timeout: time.Minute, Roles: site}}}}, "lacks a lane or roles"},
		"a kind over a day":                 {[]module.Module{{Name: "a", Kinds: []module.Kind{{Name: "test.do", Lane: "query", Timeout: 25 * time.Hour, Roles: site}}}}, "time-out 25h"},
		"a step":                            {[]module.Module{{Name: "a", Kinds: []module.Kind{kind("test.do")}, Steps: []module.Step{step("power.getPower")}}}, ""},
		"a step twice":                      {[]module.Module{{Name: "a", Kinds: []module.Kind{kind("test.do")}, Steps: []module.Step{step("power.getPower"), step("power.getPower")}}}, "step power.getPower is registered twice"},
		"a step's kind missing":             {[]module.Module{{Name: "a", Steps: []module.Step{step("power.getPower")}}}, `sends "test.do", which no module brings`},
		"on an agent that has not its kind": {[]module.Module{{Name: "a", Kinds: []module.Kind{kind("test.do")}, Steps: []module.Step{onNode}}}, "step power.getPower is on the node, which takes no test.do"},
		"its kind comes later":              {[]module.Module{{Name: "a", Steps: []module.Step{step("power.getPower")}}, {Name: "b", Kinds: []module.Kind{kind("test.do")}}}, ""},
		"a profile":                         {[]module.Module{provision.Module(profile())}, ""},
		"a profile twice":                   {[]module.Module{provision.Module(profile(), profile())}, "profile p is there twice"},
		"a profile alone":                   {[]module.Module{{Name: "a", Profiles: []module.Profile{profile()}}}, "the module with driver.invoke is left out"},
		"one that uses a later":             {[]module.Module{{Name: "a", Profiles: []module.Profile{profile()}}, provision.Module()}, ""},
	} {
		_, err := module.Join(tt.modules...)
		switch {
		case tt.want == "" && err != nil:
			t.Errorf("%s: Join = %v, want nil", name, err)
		case tt.want != "" && (errs.CodeOf(err) != errs.InvalidConfig || !strings.Contains(err.Error(), tt.want)):
			t.Errorf("%s: Join = %v, want invalid-config with %q", name, err, tt.want)
		}
	}
}

func TestCheckProfile(t *testing.T) {
	refusing := step("power.setPower")
	refusing.Check = func(with json.RawMessage) error {
		if string(with) == `"on"` {
			return nil
		}
		return errs.New(errs.InvalidConfig, "want on")
	}
	set, err := module.Join(provision.Module(), module.Module{Name: "a", Kinds: []module.Kind{kind("test.do")}, Steps: []module.Step{refusing}, Drivers: []*driver.Definition{define(t, "acme", "1.0.0")}})
	if err != nil {
		t.Fatal(err)
	}
	level := func(config string) func(*module.Profile) {
		return func(p *module.Profile) {
			p.Drivers = map[string]binding.Binding{"power": {Driver: "acme", Config: json.RawMessage(config)}}
		}
	}
	for name, tt := range map[string]struct {
		edit func(*module.Profile)
		ok   bool
	}{
		"good":                        {func(*module.Profile) {}, true},
		"no name":                     {func(p *module.Profile) { p.Name = "" }, false},
		"a name with a dot":           {func(p *module.Profile) { p.Name = "a.b" }, false},
		"the engine's name":           {func(p *module.Profile) { p.Name = "deploy" }, false},
		"no steps":                    {func(p *module.Profile) { p.Steps = nil }, false},
		"64 steps":                    {func(p *module.Profile) { p.Steps = slices.Repeat(p.Steps, 64) }, true},
		"65 steps":                    {func(p *module.Profile) { p.Steps = slices.Repeat(p.Steps, 65) }, false},
		"no on":                       {func(p *module.Profile) { p.Steps[0].On = "" }, false},
		"on the moon":                 {func(p *module.Profile) { p.Steps[0].On = "moon" }, false},
		"on a ramdisk":                {func(p *module.Profile) { p.Steps[0].On = "ramdisk" }, true},
		"no driver":                   {func(p *module.Profile) { p.Drivers = nil }, false},
		"a driver for something else": {func(p *module.Profile) { p.Steps[0].Uses = "bios.getSettings" }, false},
		"no operation":                {func(p *module.Profile) { p.Steps[0].Uses = "power" }, false},
		"with that is none":           {func(p *module.Profile) { p.Steps[0].With = json.RawMessage("{") }, false},
		"with that has a name twice":  {func(p *module.Profile) { p.Steps[0].With = json.RawMessage(`{"a":1,"a":2}`) }, false},
		"with that is too deep": {func(p *module.Profile) {
			p.Steps[0].With = json.RawMessage(strings.Repeat("[", 65) + strings.Repeat("]", 65))
		}, false},
		"a configuration that has a name twice": {func(p *module.Profile) {
			p.Drivers["power"] = binding.Binding{Driver: "other", Config: json.RawMessage(`{"a":1,"a":2}`)}
		}, false},
		"the longest driver id": {func(p *module.Profile) {
			p.Drivers["power"] = binding.Binding{Driver: "a" + strings.Repeat("b", 63)}
		}, true},
		"a large with": {func(p *module.Profile) {
			p.Steps[0].With = json.RawMessage(`"` + strings.Repeat("x", module.MaxWithBytes) + `"`)
		}, false},
		"large ones together": {func(p *module.Profile) {
			p.Steps[0].With = json.RawMessage(`"` + strings.Repeat("x", module.MaxWithBytes-2) + `"`)
			p.Steps = slices.Repeat(p.Steps, 5)
		}, false},
		"a few of them": {func(p *module.Profile) {
			p.Steps[0].With = json.RawMessage(`"` + strings.Repeat("x", module.MaxWithBytes-2) + `"`)
			p.Steps = slices.Repeat(p.Steps, 4)
		}, true},
		"a time-out":            {func(p *module.Profile) { p.Steps[0].Timeout = time.Hour }, true},
		"a time-out over a day": {func(p *module.Profile) { p.Steps[0].Timeout = 25 * time.Hour }, false},
		"a registered step": {func(p *module.Profile) {
			p.Steps[0] = module.ProfileStep{Uses: "power.setPower", With: json.RawMessage(`"on"`)}
		}, true},
		"which refuses": {func(p *module.Profile) { p.Steps[0] = module.ProfileStep{Uses: "power.setPower"} }, false},
		"and runs elsewhere": {func(p *module.Profile) {
			p.Steps[0] = module.ProfileStep{Uses: "power.setPower", On: "node", With: json.RawMessage(`"on"`)}
		}, false},
		"a registered driver's config": {level(`{"level":"low"}`), true},
		"one that it refuses":          {level(`{"level":"middle"}`), false},
		"a field that it has not":      {level(`{"level":"low","x":1}`), false},
		"a secret by reference":        {level(`{"level":"low","key":"secret://t/key"}`), true},
		"a secret itself":              {level(`{"level":"low","key":"hunter22"}`), false},
		"a credential itself": {func(p *module.Profile) {
			p.Drivers["power"] = binding.Binding{Driver: "other", Config: json.RawMessage(`{"credentials":"hunter22"}`)}
		}, false},
		"a driver that is elsewhere": {func(p *module.Profile) {
			p.Drivers["power"] = binding.Binding{Driver: "other", Config: json.RawMessage(`{"x":1}`)}
		}, true},
		"a driver id of no form":         {func(p *module.Profile) { p.Drivers["power"] = binding.Binding{Driver: "../x"} }, false},
		"a configuration that is a list": {level(`[]`), false},
	} {
		p := profile()
		tt.edit(&p)
		if err := set.CheckProfile(p); (err == nil) != tt.ok || err != nil && errs.CodeOf(err) != errs.InvalidConfig {
			t.Errorf("%s: CheckProfile = %v, want ok %t", name, err, tt.ok)
		}
	}
}

func TestSet(t *testing.T) {
	set, err := module.Join(provision.Module(profile()), module.Module{Name: "a", Drivers: []*driver.Definition{define(t, "acme", "1.0.0")}})
	if err != nil {
		t.Fatal(err)
	}
	k, ok := set.Kind("driver.invoke")
	if !ok || k.Lane != "provision" || !k.Destructive || k.RetrySafe || k.Timeout != 10*time.Minute || len(k.Roles) != 3 {
		t.Errorf("Kind(driver.invoke) = %+v, %t", k, ok)
	}
	if _, ok := set.Kind("bmc.power"); ok {
		t.Error("Kind(bmc.power) is known without metal")
	}
	p, ok := set.Profile("p")
	if !ok || !slices.Equal(set.Profiles(), []string{"p"}) {
		t.Errorf("Profile(p) = %+v, %t of %v", p, ok, set.Profiles())
	}
	p.Steps[0].Uses, p.Drivers["power"] = "x", binding.Binding{}
	if again, _ := set.Profile("p"); again.Steps[0].Uses != "power.getPower" || again.Drivers["power"].Driver != "acme" {
		t.Errorf("Profile(p) = %+v after a caller changed its copy", again)
	}
	for op, want := range map[string]bool{"getPower": true, "setPower": false} {
		if got := set.RetrySafe("acme", "power", op); got != want {
			t.Errorf("RetrySafe(acme, power, %s) = %t, want %t", op, got, want)
		}
	}
	if set.RetrySafe("other", "power", "getPower") {
		t.Error("RetrySafe of a driver that is not registered")
	}
}
