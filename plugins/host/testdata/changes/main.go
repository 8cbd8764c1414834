// Command changes is a plugin that serves another version of its driver from its
// second run on. It remembers the first beside its socket's folder, which only a
// privileged plugin may.
package main

import (
	"encoding/json"
	"os"
	"path/filepath"

	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/sdk"
)

func main() { os.Exit(run()) }

func run() int {
	version, seen := "1.0.0", filepath.Join(filepath.Dir(os.Getenv(bcx.SocketDirVariable)), "seen")
	if _, err := os.Stat(seen); err == nil {
		version = "2.0.0"
	} else if err := os.WriteFile(seen, nil, 0o600); err != nil {
		return 2
	}
	kind := driver.Kind[struct{}]{Name: "echo", Operations: map[string]driver.Operation[struct{}]{
		"version": func(*driver.Context, struct{}, driver.Args) (any, error) { return version, nil },
	}}
	d, err := driver.Define(driver.Spec[struct{}]{ID: "changes", Version: version, RunsOn: "site",
		Parse: func(json.RawMessage) (struct{}, error) { return struct{}{}, nil }},
		driver.Implement(kind, func(struct{}, *driver.Context) (struct{}, error) { return struct{}{}, nil }))
	if err != nil {
		return 3
	}
	return sdk.Main(sdk.Options{PluginVersion: version}, d)
}
