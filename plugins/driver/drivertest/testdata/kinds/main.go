package main

import (
	"encoding/json"
	"fmt"

	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/instance"
	"github.com/better-compute/site-appliance/plugins/metal"
)

type machine struct{ on bool }

func (m *machine) GetPower(*driver.Context) (metal.PowerState, error) {
	if m.on {
		return metal.PowerOn, nil
	}
	return metal.PowerOff, nil
}

func (m *machine) SetPower(_ *driver.Context, a metal.PowerAction) error {
	m.on = a == metal.ActionOn
	return nil
}

func list(d *driver.Definition, ctx *driver.Context) ([]instance.Status, error) {
	r, err := driver.Use(d, instance.RuntimeKind(), json.RawMessage("{}"), ctx)
	if err != nil {
		return nil, err
	}
	return r.List(ctx)
}

func main() {
	d, err := driver.Define(driver.Spec[*machine]{
		ID: "acme", Version: "1.0.0", RunsOn: "site",
		Parse: func(json.RawMessage) (*machine, error) { return &machine{}, nil },
	}, driver.Implement(metal.PowerKind(), func(m *machine, _ *driver.Context) (metal.Power, error) { return m, nil }))
	if err != nil {
		panic(err)
	}
	_, err = list(d, nil)
	fmt.Println(d.Manifest().Kinds, err)
}
