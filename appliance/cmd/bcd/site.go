package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"

	"github.com/better-compute/site-appliance/appliance/site"
)

func runSite(ctx context.Context, args []string, log *slog.Logger) error {
	flags := flag.NewFlagSet("bcd site", flag.ContinueOnError)
	c := site.Config{Version: version, Build: built(), Log: log, Shim: []string{"/proc/self/exe", shimName}}
	flags.StringVar(&c.ConfigFile, "config", "/etc/bcd/site.toml", "configuration `FILE`")
	flags.StringVar(&c.StateDir, "state", "/var/lib/bcd", "state `DIR`; empty: nothing is kept, and what destroys is refused")
	flags.StringVar(&c.IdentityDevice, "identity", "", "partition `DEVICE` for the identity's second copy")
	flags.StringVar(&c.NetbootDir, "netboot", "/usr/share/bc/netboot", "`DIR` of boot loaders and the ramdisk")
	flags.StringVar(&c.PluginsDir, "plugins", "", "plugin `DIR` where site.toml names none")
	flags.StringVar(&c.PluginsCgroup, "plugins-cgroup", "", "cgroup `DIR` of those plugins")
	flags.StringVar(&c.ProblemsFile, "problems", "", "`FILE` in which init lists what went wrong, to be sent home")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	return site.Run(ctx, c)
}
