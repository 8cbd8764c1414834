// Command bcx-conformance drives a plugin, given as its argv, through the rules
// of bcx, prints a report, and fails if a rule is broken.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/better-compute/site-appliance/plugins/conformance"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run answers the exit code: 1 for a broken rule, 2 for what could not be checked.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("bcx-conformance", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {
		fmt.Fprintln(stderr, "usage: bcx-conformance [-list] [-only ID,ID] [-patience 10s] PROGRAM [ARGUMENT...]")
		flags.PrintDefaults()
	}
	list := flags.Bool("list", false, "print the rules and do nothing")
	only := flags.String("only", "", "comma-separated ids of the rules to check")
	patience := flags.Duration("patience", 10*time.Second, "how long each wait for the plugin may last")
	if flags.Parse(args) != nil {
		return 2
	}
	if *list {
		for _, r := range conformance.Rules() {
			fmt.Fprintf(stdout, "%-24s %s\n", r.ID, r.Statement)
		}
		return 0
	}
	o := conformance.Options{Patience: *patience}
	if *only != "" {
		o.Only = strings.Split(*only, ",")
	}
	report, err := conformance.Run(ctx, flags.Args(), o)
	if err != nil {
		fmt.Fprintln(stderr, err)
		return 2
	}
	if err := report.Write(stdout); err != nil {
		fmt.Fprintln(stderr, err)
		return 2
	}
	if !report.OK() {
		return 1
	}
	return 0
}
