package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"

	"github.com/better-compute/site-appliance/appliance/node"
)

func runNode(ctx context.Context, args []string, log *slog.Logger) error {
	flags := flag.NewFlagSet("bcd node", flag.ContinueOnError)
	c := node.Config{Version: version, Build: built(), Log: log}
	flags.StringVar(&c.ConfigFile, "config", "/etc/bcd/config.toml", "configuration `FILE`")
	flags.StringVar(&c.StateDir, "state", "/var/lib/bcd", "state `DIR`")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	return node.Run(ctx, c)
}
