package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway"
	"github.com/better-compute/site-appliance/appliance/gateway/config"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/external"
)

// startExternal runs the plugins that the configuration names and registers
// their drivers. stop ends what runs, and is never nil. A plugin has no access
// to the gateway's secrets: a call brings what it may use.
func startExternal(ctx context.Context, g *gateway.Gateway, list []config.ExternalDriver) (stop func() error, err error) {
	var plugins []*external.Driver
	stop = func() error {
		var failed error
		for _, p := range plugins {
			failed = errors.Join(failed, p.Close())
		}
		return failed
	}
	for _, d := range list {
		plugins = append(plugins, external.New(external.Options{
			Command: d.Command, SHA256: d.SHA256, Env: d.Env, Log: g.Log.With("part", "external"),
			StartTimeout: time.Duration(d.StartTimeout), CallTimeout: time.Duration(d.CallTimeout), ShutdownGrace: time.Duration(d.ShutdownGrace),
		}))
	}
	definitions, err := external.StartAll(ctx, plugins...)
	if err != nil {
		return stop, fmt.Errorf("start external drivers: %w", err)
	}
	for _, d := range definitions {
		if err := registerExternal(g.Drivers, d); err != nil {
			return stop, err
		}
	}
	return stop, nil
}

// registerExternal keeps a plugin from taking a built-in driver's place.
func registerExternal(registry *driver.Registry, d *driver.Definition) error {
	if slices.Contains(driver.BuiltIn(), d.ID()) {
		return errs.New(errs.InvalidConfig, "an external driver calls itself %s, which is built in", d.ID())
	}
	return registry.Register(d)
}
