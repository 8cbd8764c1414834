package site

import (
	"log/slog"
	"os"

	"github.com/better-compute/site-appliance/appliance/site/config"
	"github.com/better-compute/site-appliance/appliance/site/firewall"
	"github.com/better-compute/site-appliance/plugins/host"
)

// confinePlugins holds the network of plugins back before the first one runs.
// Without a sandbox, and for plugins that keep the agent's uid, there is nothing
// to tell their packets by.
func confinePlugins(p config.Plugins, log *slog.Logger) (egress host.Egress, release func(), err error) {
	if p.Dir == "" || !p.Sandboxed() || os.Geteuid() != 0 {
		return nil, func() {}, nil
	}
	first, last, err := host.UIDs(p.User)
	if err != nil || first == 0 {
		// With such a user no plugin starts, or all are root's.
		log.Error("the network of plugins is not held back", "user", p.User, "err", err)
		return nil, func() {}, nil
	}
	e, err := firewall.Confine([]firewall.UIDRange{{First: uint32(first), Last: uint32(last)}})
	if err != nil {
		return nil, nil, err
	}
	return e, func() {
		if err := e.Close(); err != nil {
			log.Warn("the rules for plugins' network stay behind", "err", err)
		}
	}, nil
}
