package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"

	"github.com/better-compute/site-appliance/appliance/agent/bootinfo"
	"github.com/better-compute/site-appliance/appliance/ramdisk"
)

func runRamdisk(ctx context.Context, args []string, log *slog.Logger) error {
	flags := flag.NewFlagSet("bcd ramdisk", flag.ContinueOnError)
	c := ramdisk.Config{Version: version, Build: built(), Log: log}
	flags.StringVar(&c.BootFile, "boot", bootinfo.Path, "what the box handed over, a `FILE`")
	flags.StringVar(&c.StateDir, "state", "", "state `DIR`, in memory")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	return ramdisk.Run(ctx, c)
}
