package benchplugin

import (
	"encoding/json"
	"fmt"
	"io"

	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/sdk"
)

// servePlugin is the plugin's side.
func servePlugin() error {
	echo := driver.Kind[struct{}]{Name: "echo", Operations: map[string]driver.Operation[struct{}]{
		"echo": func(_ *driver.Context, _ struct{}, args driver.Args) (any, error) { return args, nil },
	}, Streams: map[string]driver.StreamOperation[struct{}]{
		"down": func(_ *driver.Context, _ struct{}, _ driver.Args, s io.ReadWriter) error {
			for range Chunks {
				if _, err := s.Write(Chunk); err != nil {
					return err
				}
			}
			return nil
		},
		"up": func(_ *driver.Context, _ struct{}, _ driver.Args, s io.ReadWriter) error {
			if _, err := io.CopyN(io.Discard, s, Chunks*ChunkSize); err != nil {
				return err
			}
			_, err := s.Write([]byte("."))
			return err
		},
	}}
	d, err := driver.Define(driver.Spec[struct{}]{
		ID: "echo", Version: "1.0.0", RunsOn: "site",
		Parse: func(json.RawMessage) (struct{}, error) { return struct{}{}, nil },
	}, driver.Implement(echo, func(struct{}, *driver.Context) (struct{}, error) { return struct{}{}, nil }))
	if err != nil {
		return err
	}
	if code := sdk.Main(sdk.Options{PluginVersion: "bench"}, d); code != 0 {
		return fmt.Errorf("the plugin ended with code %d", code)
	}
	return nil
}
