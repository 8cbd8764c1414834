package metal

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// builtIn are the drivers that agents have without a plugin. Their versions are
// those of their declarations, which change when what they serve does.
var builtIn = []driver.Manifest{
	{
		ID: "redfish", Version: "1.1.0", RunsOn: "site",
		Kinds:            []string{"bios", "console", "credentials", "firmware", "inspect", "management", "power", "raid", "virtual-media"},
		RetrySafe:        metal.RetrySafe("bios", "firmware", "inspect", "management", "power", "raid", "virtual-media"),
		StreamOperations: []string{"console.open"},
	},
	{ID: wakeOnLAN, Version: "1.0.0", RunsOn: "site", Kinds: []string{"power"}, RetrySafe: []string{GetPower, SetPower}},
	{ID: Manual, Version: "1.0.0", RunsOn: "site", Kinds: []string{"power"}, RetrySafe: []string{GetPower, SetPower}},
	{ID: "ipxe", Version: "1.0.0", RunsOn: "site", Kinds: []string{"boot"}},
	{ID: "image-stream", Version: "1.0.0", RunsOn: "ramdisk", Kinds: []string{"deploy"}},
}

// elsewhere stands behind a driver that runs on an agent: the control plane
// knows its declaration and reaches it by commands only.
type elsewhere struct{ id, runsOn string }

func (e elsewhere) Invoke(*driver.Context, string, string, json.RawMessage, json.RawMessage) (json.RawMessage, error) {
	return nil, e.refuse()
}
func (e elsewhere) Stream(*driver.Context, string, string, json.RawMessage, json.RawMessage, io.ReadWriter) error {
	return e.refuse()
}
func (e elsewhere) Validate(*driver.Context, json.RawMessage) error { return e.refuse() }
func (e elsewhere) Health(context.Context) error                    { return e.refuse() }
func (e elsewhere) refuse() error {
	return errs.New(errs.UnsupportedOperation, "driver %s runs on a %s agent: the control plane sends it commands", e.id, e.runsOn)
}

// Module is metal as a part of a gateway: built-in declarations, the commands to
// BMCs and ramdisks, and the steps that relay to BMCs.
func (m *Metal) Module() (module.Module, error) {
	out := module.Module{Name: "metal", Kinds: Kinds()}
	for _, manifest := range builtIn {
		d, err := driver.Remote(manifest, elsewhere{manifest.ID, manifest.RunsOn})
		if err != nil {
			return module.Module{}, fmt.Errorf("declare built-in driver: %w", err)
		}
		out.Drivers = append(out.Drivers, d)
	}
	for _, step := range Steps() {
		decide := step.Command
		step.Command = func(machine store.Machine, with json.RawMessage) (module.Command, error) {
			c, err := decide(machine, with)
			if err != nil {
				return c, err
			}
			if req, ok := c.Args.(*bmcv1.BmcOperationRequest); ok {
				if operations, known := m.operations(req.Driver); known && !slices.Contains(operations, req.Operation) {
					return module.Command{}, errs.New(unsupported, "driver %s does not serve %s", req.Driver, req.Operation)
				}
			}
			return c, nil
		}
		out.Steps = append(out.Steps, step)
	}
	return out, nil
}

// Module is New and its module in one.
func Module(o Options) (module.Module, error) {
	m, err := New(o)
	if err != nil {
		return module.Module{}, err
	}
	return m.Module()
}

// unsupported is the reason of a refusal that happens before anything is sent.
const unsupported = "bmc-driver-unsupported"

// operations are what a BMC driver serves, as far as metal or the gateway's
// configuration knows.
func (m *Metal) operations(driver string) (operations []string, known bool) {
	if operations, known = serves[driver]; !known {
		operations, known = m.options.BMCDrivers[driver]
	}
	return operations, known
}

// Serves are the operations of a driver that metal knows itself.
func Serves(driver string) []string { return slices.Clone(serves[driver]) }

// CheckVerb refuses up front what a machine's BMC driver cannot serve. Metal's
// own knowledge decides, else the gateway's configuration, else the kinds that
// the labels of the site's agent name for the driver: nil where they name
// none. A driver that none of them names is not checked in advance.
func (m *Metal) CheckVerb(verb Verb, driver string, kinds []string) error {
	return m.check(string(verb), needs[verb], driver, kinds)
}

// CheckOperation is CheckVerb for one operation.
func (m *Metal) CheckOperation(operation, driver string, kinds []string) error {
	return m.check(operation, []string{operation}, driver, kinds)
}

// CheckProfile is CheckVerb for the registered steps of a procedure.
func (m *Metal) CheckProfile(p module.Profile, driver string, kinds []string) error {
	var operations []string
	for _, step := range p.Steps {
		for _, r := range relayed {
			if r.step == step.Uses && !slices.Contains(operations, r.operation) {
				operations = append(operations, r.operation)
			}
		}
	}
	return m.check("profile "+p.Name, operations, driver, kinds)
}

func (m *Metal) check(what string, needs []string, driver string, kinds []string) error {
	operations, known := m.operations(driver)
	for _, need := range needs {
		concern, _, _ := strings.Cut(need, ".")
		switch {
		case known && !slices.Contains(operations, need):
			return apierr.Cannot(unsupported, "%s needs %s, which driver %s does not serve: it serves %s", what, need, driver, strings.Join(operations, ", "))
		case !known && kinds != nil && !slices.Contains(kinds, concern):
			return apierr.Cannot(unsupported, "%s needs %s, and the site's driver %s does not serve %s: it serves %s", what, need, driver, concern, strings.Join(kinds, ", "))
		}
	}
	return nil
}
