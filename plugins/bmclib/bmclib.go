// Package bmclib serves bmclib's vendor providers as drivers of one sandboxed
// plugin: bmclib panics, ignores contexts and verifies no certificate, and
// here none of that reaches a BMC or a caller.
package bmclib

import (
	"crypto/x509"
	"encoding/json"
	"os"

	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
	"github.com/better-compute/site-appliance/plugins/sdk"
)

// version of the drivers.
const version = "1.0.0"

// Main serves the drivers as a plugin and returns the exit code.
func Main(pluginVersion string) int {
	// bmclib prints whole requests, passwords among them, where this is set.
	os.Unsetenv("DEBUG_BMCLIB")
	drivers, err := Drivers()
	if err != nil {
		panic(err) // a fault in this package's declarations, found by any start
	}
	return sdk.Main(sdk.Options{PluginVersion: pluginVersion}, drivers...)
}

// options are what tests change.
type options struct {
	// roots judge a BMC without a pin; nil: the system's.
	roots *x509.CertPool
}

// Drivers declares one driver for each vendor.
func Drivers() ([]*driver.Definition, error) { return define(options{}) }

func define(o options) ([]*driver.Definition, error) {
	crew := &crew{}
	var out []*driver.Definition
	for _, v := range vendors() {
		d, err := v.define(o, crew)
		if err != nil {
			return nil, err
		}
		out = append(out, d)
	}
	return out, nil
}

func (v vendor) define(o options, crew *crew) (*driver.Definition, error) {
	connect := func(c config, ctx *driver.Context) (*machine, error) {
		login, err := readCredentials(ctx, v.form)
		return &machine{vendor: v, config: c, login: login, roots: o.roots, crew: crew}, err
	}
	parts := []driver.Part[config]{
		driver.Implement(metal.PowerKind(), func(c config, ctx *driver.Context) (metal.Power, error) { return connect(c, ctx) }),
	}
	safe := []string{"power.getPower"}
	if v.inspects {
		parts = append(parts, driver.Implement(metal.InspectKind(), func(c config, ctx *driver.Context) (metal.Inspector, error) { return connect(c, ctx) }))
		safe = append(safe, "inspect.inspect")
	}
	return driver.Define(driver.Spec[config]{
		ID: v.id, Version: version, RunsOn: "site", RetrySafe: safe,
		Schema: json.RawMessage(schema),
		Parse:  func(raw json.RawMessage) (config, error) { return parseConfig(raw, v.port) },
		Validate: func(ctx *driver.Context, c config) error {
			m, err := connect(c, ctx)
			if err != nil {
				return err
			}
			_, err = m.GetPower(ctx)
			return err
		},
	}, parts...)
}
