// Command better-compute is the person's command: the gateway, its sites and
// machines, and the images that boxes are flashed with.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"
)

// Set by the linker.
var (
	version   = "dev"
	buildTime = "0" // Unix seconds
)

// stdio is what a subcommand reads and writes.
type stdio struct {
	in       io.Reader
	out, err io.Writer
}

// command is one subcommand; args start after its name.
type command struct {
	name, summary string
	run           func(ctx context.Context, args []string, std stdio) error
}

// commands is everything that the program does.
func commands() []command {
	return []command{
		{"gateway", "make a gateway's keys, serve it, mint its API tokens", runGateway},
		{"approver", "make the keys of people who approve destructive work", runApprover},
		{"grant", "ask for approval of destructive work", runGrant},
		{"approve", "approve destructive work", runApprove},
		{"site", "add and list sites", runSite},
		{"pool", "add and list pools of machines", runPool},
		{"metal", "enroll, power, boot, inspect and deploy machines", runMetal},
		{"pxe", "look into network boot", runPxe},
		{"bmc", "look at a BMC before it is enrolled", runBMC},
		{"drivers", "list the drivers that the gateway registered", runDrivers},
		{"place", "find agents by what they advertise", runPlace},
		{"instance", "say what machines are to run", runInstance},
		{"secret", "keep secrets", runSecret},
		{"artifact", "import and list images", runArtifact},
		{"iso", "keep the catalog of disc images", runISO},
		{"workflow", "start, cancel, list and follow workflows", runWorkflow},
		{"events", "list what happened", runEvents},
		{"image", "build, customize, flash, verify and test images", runImage},
		{"version", "print the version", runVersion},
	}
}

func runVersion(_ context.Context, args []string, std stdio) error {
	if _, err := newFlags("version", std).parse(args, 0, 0); err != nil {
		return err
	}
	built := buildTime
	if seconds, err := strconv.ParseInt(buildTime, 10, 64); err == nil {
		built = time.Unix(seconds, 0).UTC().Format(time.RFC3339)
	}
	_, err := fmt.Fprintf(std.out, "%s (built at %s)\n", version, built)
	return err
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := dispatch(ctx, "better-compute", commands(), os.Args[1:], stdio{os.Stdin, os.Stdout, os.Stderr}); err != nil {
		fmt.Fprintf(os.Stderr, "better-compute: %v\n", err)
		stop()
		os.Exit(1)
	}
}

// dispatch runs the subcommand that args name, and lists them where there is none.
func dispatch(ctx context.Context, prefix string, table []command, args []string, std stdio) error {
	if len(args) > 0 {
		for _, c := range table {
			if c.name == args[0] {
				if err := c.run(ctx, args[1:], std); !errors.Is(err, flag.ErrHelp) {
					return err
				}
				return nil
			}
		}
	}
	help := len(args) > 0 && (args[0] == "help" || args[0] == "-h" || args[0] == "--help")
	out := std.err
	if help {
		out = std.out
	}
	fmt.Fprintf(out, "usage: %s COMMAND …\n\n", prefix)
	for _, c := range table {
		fmt.Fprintf(out, "  %-12s %s\n", c.name, c.summary)
	}
	switch {
	case help:
		return nil
	case len(args) == 0:
		return fmt.Errorf("a command is missing")
	}
	return fmt.Errorf("unknown command %q", args[0])
}
