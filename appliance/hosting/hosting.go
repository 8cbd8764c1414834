// Package hosting runs an agent's driver plugins by its [plugins] section, and
// says what they serve. It is the same on a site's box and on a node.
package hosting

import (
	"context"
	"log/slog"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/site/config"
	"github.com/better-compute/site-appliance/plugins/host"
)

// Options are what Start needs beside the section.
type Options struct {
	// Shim is the argv prefix of the plugin shim.
	Shim []string
	// Egress opens the way to the addresses of each call; nil: nothing is opened.
	Egress host.Egress
	Log    *slog.Logger
}

// Start runs the pinned plugins. A section that lets none run costs the plugins,
// not the agent. Close the host at the end.
func Start(ctx context.Context, p config.Plugins, o Options) (*host.Host, error) {
	h, err := host.Start(ctx, host.Config{
		Dir: p.Dir, User: p.User, Privileged: p.PrivilegedNames(), Sandbox: p.Sandboxed(), Cgroup: p.Cgroup,
		MemoryMax: p.MemoryMax, PidsMax: p.PidsMax, Shim: o.Shim, Egress: o.Egress, Log: o.Log,
	})
	if err != nil {
		o.Log.Error("no plugin runs", "err", err)
		return host.Start(ctx, host.Config{Log: o.Log})
	}
	return h, nil
}

// Advertised is what Hello says of the drivers that h hosts.
func Advertised(h *host.Host) []*agentv1.AdvertisedDriver {
	out := []*agentv1.AdvertisedDriver{}
	for _, m := range h.Drivers() {
		out = append(out, &agentv1.AdvertisedDriver{
			Id: m.ID, Version: m.Version, Kinds: m.Kinds, Capabilities: m.Capabilities, RetrySafeOperations: m.RetrySafe,
		})
	}
	return out
}
