// Command bcd is the agent: bcd site on the box, bcd ramdisk on a
// network-booted machine, bcd node on a deployed one.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/better-compute/site-appliance/appliance/node"
	"github.com/better-compute/site-appliance/appliance/node/process"
	"github.com/better-compute/site-appliance/plugins/sandbox"
)

// Set by the linker.
var (
	version   = "dev"
	buildTime = "0" // Unix seconds
)

// shimName is how bcd is called to become a plugin, gateName how it becomes an instance's process.
const (
	shimName = node.ShimWord
	gateName = node.GateWord
)

const usage = `usage: bcd ROLE [flags]

  site      serve a site: --config site.toml --state DIR
  ramdisk   serve a network-booted machine: --boot boot.json
  node      serve a deployed machine: --config config.toml --state DIR
  version   print the version
`

func main() {
	// The plugin shim replaces itself with the plugin: it runs before anything else.
	if len(os.Args) > 1 && os.Args[1] == shimName {
		os.Exit(sandbox.ShimMain(os.Args[2:]))
	}
	if len(os.Args) > 1 && os.Args[1] == gateName {
		os.Exit(process.GateMain(os.Args[2:]))
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	if err := run(ctx, os.Args[1:], log); err != nil {
		fmt.Fprintf(os.Stderr, "bcd: %v\n", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, log *slog.Logger) error {
	if len(args) == 0 {
		fmt.Fprint(os.Stderr, usage)
		return fmt.Errorf("a role is missing")
	}
	roles := map[string]func(context.Context, []string, *slog.Logger) error{
		"site": runSite, "ramdisk": runRamdisk, "node": runNode,
	}
	if role, ok := roles[args[0]]; ok {
		err := role(ctx, args[1:], log.With("role", args[0]))
		if errors.Is(err, flag.ErrHelp) || ctx.Err() != nil && errors.Is(err, context.Canceled) {
			return nil // it was asked to end, and did
		}
		return err
	}
	switch args[0] {
	case "version":
		fmt.Println("bcd", version)
		return nil
	case "help", "-h", "--help":
		fmt.Print(usage)
		return nil
	}
	fmt.Fprint(os.Stderr, usage)
	return fmt.Errorf("unknown role %q", args[0])
}

// built is the build's time, the oldest that a clock may show.
func built() time.Time {
	s, err := strconv.ParseInt(buildTime, 10, 64)
	if err != nil {
		return time.Unix(0, 0)
	}
	return time.Unix(s, 0)
}
