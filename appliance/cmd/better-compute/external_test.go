package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/gateway"
	"github.com/better-compute/site-appliance/appliance/gateway/config"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/external"
	"github.com/better-compute/site-appliance/plugins/sdk"
)

// servedEnv names the driver that this binary serves when a host runs it as a plugin.
const servedEnv = "TEST_SERVED_DRIVER"

func TestMain(m *testing.M) {
	if id, version, ok := strings.Cut(os.Getenv(servedEnv), "@"); ok {
		os.Exit(servePlugin(id, version))
	}
	os.Exit(m.Run())
}

func servePlugin(id, version string) int {
	d, err := driver.Define(driver.Spec[int]{ID: id, Version: version, RunsOn: "control-plane", RetrySafe: []string{"acme-cooling.get"},
		Parse: func(json.RawMessage) (int, error) { return 7, nil }},
		driver.Implement(driver.Kind[int]{Name: "acme-cooling", Operations: map[string]driver.Operation[int]{
			"get": func(_ *driver.Context, n int, _ driver.Args) (any, error) { return n, nil },
		}}, func(n int, _ *driver.Context) (int, error) { return n, nil }))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return sdk.Main(sdk.Options{PluginVersion: "0.0.1"}, d)
}

// pluginTOML has the gateway run this test binary as plugins.
func pluginTOML(t *testing.T, served ...string) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	sum, err := external.SHA256File(self)
	if err != nil {
		t.Fatal(err)
	}
	text := ""
	for _, s := range served {
		text += fmt.Sprintf("[[external_drivers]]\ncommand = [%q]\nsha256 = %q\nenv = { %s = %q }\n", self, sum, servedEnv, s)
	}
	return text
}

// TestExternalDrivers: the gateway runs pinned plugins, registers what they
// serve beside the built-in drivers, and ends them with itself.
func TestExternalDrivers(t *testing.T) {
	c := newCLI(t)
	c.halt()
	if err := os.WriteFile(filepath.Join(c.dir, config.File), []byte(pluginTOML(t, "acme-switch@1.2.0", "acme-switch@1.10.0")), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var seen *gateway.Gateway
	err := serveGateway(ctx, c.dir, gateway.Options{Listen: c.listen, Log: slog.New(slog.DiscardHandler)}, func(g *gateway.Gateway) {
		seen = g
		d, ok := g.Drivers.Find("acme-switch", "acme-cooling")
		if !ok || d.Manifest().Version != "1.10.0" {
			t.Errorf("Find(acme-switch) = %v, %v, want the highest version", d, ok)
		} else if got, err := d.Invoke(driver.NewContext(ctx, nil, slog.New(slog.DiscardHandler), nil), "acme-cooling", "get", json.RawMessage(`{}`), nil); err != nil || string(got) != "7" {
			t.Errorf("Invoke through the registry = %s, %v", got, err)
		}
		stop()
	})
	if err != nil || seen == nil {
		t.Fatalf("gateway serve = %v", err)
	}
	var keys []string
	for _, m := range seen.Drivers.List("acme-cooling") {
		keys = append(keys, m.Key())
	}
	if strings.Join(keys, " ") != "driver:acme-switch@1.2.0 driver:acme-switch@1.10.0" {
		t.Errorf("registered %q", keys)
	}
	d, _ := seen.Drivers.Find("acme-switch", "")
	if _, err := d.Invoke(driver.NewContext(t.Context(), nil, slog.New(slog.DiscardHandler), nil), "acme-cooling", "get", json.RawMessage(`{}`), nil); err == nil {
		t.Error("Invoke after the gateway's end = nil, want an error: the plugin is stopped")
	}
}

// TestExternalDriversRefused: what cannot be registered, or is not what was
// pinned, stops the gateway with the reason.
func TestExternalDriversRefused(t *testing.T) {
	c := newCLI(t)
	c.halt()
	wrongPin := strings.Replace(pluginTOML(t, "acme-switch@1.0.0"), "sha256 = \"", "sha256 = \""+strings.Repeat("0", 8), 1)
	wrongPin = wrongPin[:strings.Index(wrongPin, "sha256 = \"")+10+64] + "\"\nenv = { " + servedEnv + " = \"acme-switch@1.0.0\" }\n"
	for name, tt := range map[string]struct{ text, want string }{
		"the same twice":    {pluginTOML(t, "acme-switch@1.0.0", "acme-switch@1.0.0"), "INVALID_CONFIG: driver:acme-switch@1.0.0 is registered twice"},
		"a built-in driver": {pluginTOML(t, "redfish@9.0.0"), "INVALID_CONFIG: an external driver calls itself redfish"},
		"another file":      {wrongPin, "INVALID_CONFIG: start external drivers: "},
	} {
		if err := os.WriteFile(filepath.Join(c.dir, config.File), []byte(tt.text), 0o600); err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		err := serveGateway(ctx, c.dir, gateway.Options{Listen: c.listen, Log: slog.New(slog.DiscardHandler)}, func(*gateway.Gateway) { stop() })
		stop()
		if err == nil || !strings.HasPrefix(err.Error(), tt.want) {
			t.Errorf("%s: gateway serve = %v, want %q", name, err, tt.want)
		}
	}
}
