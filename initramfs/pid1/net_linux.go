package pid1

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"time"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/site/config"
	"github.com/better-compute/site-appliance/initramfs/network"
)

// Network is bc-net, the network's own process: what strangers on the wire
// can make it do ends it, not PID 1.
func Network(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("usage: bc-net ROLE")
	}
	role, err := ParseRole(args[0])
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM)
	defer stop()
	say := func(format string, args ...any) { fmt.Printf("bc-init: network: "+format+"\n", args...) }
	const sys = "/sys/class/net"
	m := &network.Manager{
		Links: network.Kernel{},
		Client: network.DHCP{
			Say:     say,
			Carrier: func(name string) bool { return network.Carrier(sys, name) },
			Retry:   backoff.Policy{Min: 500 * time.Millisecond, Max: 30 * time.Second, Rand: rand.Float64},
		},
		Wired:     func() ([]network.Interface, error) { return network.Wired(sys) },
		Say:       say,
		Resolv:    "/etc/resolv.conf",
		StateFile: networkPath,
		Poll:      time.Second,
	}
	m.Start()
	if err := (network.Kernel{}).Up("lo"); err != nil {
		say("%v", err)
	}
	if role != Site {
		m.RunAll(ctx)
		return nil
	}
	raw, err := os.ReadFile(sitePath)
	if err != nil {
		return fmt.Errorf("read configuration: %w", err)
	}
	site, err := config.ParseSite(sitePath, raw)
	if err != nil {
		return err
	}
	m.RunSite(ctx, site)
	return nil
}
