// Command bench measures parts of the appliance beside a peer that does the
// same, both in one run and in turn, and writes the medians to out/bench.tsv.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
)

// row is one line of the table. Ratio is over 1 where ours is ahead.
type row struct {
	name, unit, peer string
	ours, theirs     float64
	// less is true where a smaller figure is the better one.
	less bool
	// goal is the least ratio that will do; 0: none.
	goal float64
}

func (r row) ratio() float64 {
	if r.less {
		return r.theirs / r.ours
	}
	return r.ours / r.theirs
}

func (r row) fields() []string {
	goal := ""
	if r.goal > 0 {
		goal = strconv.FormatFloat(r.goal, 'g', 3, 64)
	}
	return []string{r.name, figure(r.ours), r.unit, r.peer, figure(r.theirs), strconv.FormatFloat(r.ratio(), 'f', 2, 64), goal}
}

// figure has three digits or more, and no exponent.
func figure(f float64) string {
	decimals := 0
	for limit := 100.0; f < limit && decimals < 3; limit /= 10 {
		decimals++
	}
	return strconv.FormatFloat(f, 'f', decimals, 64)
}

var header = []string{"name", "ours", "unit", "peer", "peer's value", "ratio", "goal"}

// suite measures some rows together.
type suite struct {
	// names of the rows that it can give.
	names []string
	run   func(ctx context.Context, s settings) ([]row, error)
}

// settings are what all suites share.
type settings struct {
	rounds  int
	sizeMiB int64
	dir     string // on a real disk
	memory  string // in memory
	log     io.Writer
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out, log io.Writer) error {
	if name := os.Getenv(hostVariable); name == fleetPeer {
		return beFleetPeer(ctx, out)
	} else if name == stormServer {
		return beStormServer(ctx)
	} else if name == stormClients {
		return beStormClients(ctx, out)
	} else if name == tftpClient {
		return beTFTPClient(out)
	} else if server, ok := strings.CutPrefix(name, tftpServer); ok {
		return beTFTPServer(ctx, server)
	} else if server, ok := strings.CutPrefix(name, httpServer); ok {
		return beHTTPServer(ctx, server)
	} else if name == httpLoad {
		return beHTTPLoad(out)
	} else if name != "" {
		return beHost(ctx, name, out)
	}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	only := flags.String("only", "", "measure only the rows whose names begin with this")
	path := flags.String("out", "out/bench.tsv", "the table")
	s := settings{log: log}
	flags.IntVar(&s.rounds, "rounds", 3, "how often each is measured, in turn; the median counts")
	flags.Int64Var(&s.sizeMiB, "size", 2048, "the size of a disk image, in MiB")
	flags.StringVar(&s.dir, "dir", "out", "a folder on the disk that is written to")
	flags.StringVar(&s.memory, "memory", "/dev/shm", "a folder in memory, where images are read from")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if s.rounds < 1 || s.sizeMiB < 16 || s.sizeMiB%4 != 0 {
		return errors.New("-rounds is 1 or more, -size is 16 or more and divides by 4")
	}
	if err := os.MkdirAll(s.dir, 0o755); err != nil {
		return err
	}
	rows, err := measure(ctx, []suite{streamSuite, sessionSuite, bcxSuite, fleetSuite, dhcpSuite, tftpSuite, httpSuite, stormSuite}, *only, s)
	if len(rows) == 0 {
		return err
	}
	return errors.Join(err, print(out, rows), os.MkdirAll(filepath.Dir(*path), 0o755), os.WriteFile(*path, []byte(table(rows)), 0o644))
}

// measure runs the suites that have a row whose name begins with only. One that
// fails costs no other its rows.
func measure(ctx context.Context, suites []suite, only string, s settings) ([]row, error) {
	wanted := func(name string) bool { return strings.HasPrefix(name, only) }
	var rows []row
	var failed []error
	fits := false
	for _, suite := range suites {
		if !slices.ContainsFunc(suite.names, wanted) {
			continue
		}
		fits = true
		got, err := suite.run(ctx, s)
		if err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", suite.names[0], err))
			if ctx.Err() != nil {
				break
			}
			continue
		}
		rows = append(rows, slices.DeleteFunc(got, func(r row) bool { return !wanted(r.name) })...)
	}
	if !fits {
		return nil, fmt.Errorf("no row's name begins with %q", only)
	}
	return rows, errors.Join(failed...)
}

// missed are the rows that are under their goals, in words.
func missed(rows []row) (all []string) {
	for _, r := range rows {
		if r.goal > 0 && r.ratio() < r.goal {
			all = append(all, fmt.Sprintf("%s (%.2f of %g)", r.name, r.ratio(), r.goal))
		}
	}
	return all
}

func table(rows []row) string {
	lines := []string{strings.Join(header, "\t")}
	for _, r := range rows {
		lines = append(lines, strings.Join(r.fields(), "\t"))
	}
	return strings.Join(lines, "\n") + "\n"
}

func print(out io.Writer, rows []row) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	io.WriteString(w, table(rows))
	if err := w.Flush(); err != nil {
		return err
	}
	if under := missed(rows); len(under) > 0 {
		fmt.Fprintf(out, "goals missed: %s\n", strings.Join(under, ", "))
	}
	_, err := fmt.Fprintf(out, "on %d cores of %s, load %s\n", runtime.NumCPU(), cpu(), load())
	return err
}

// cpu is the processor's name.
func cpu() string {
	info, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(info)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return runtime.GOARCH
}

// load is the average of the last minute: figures of a busy machine say little.
func load() string {
	text, _ := os.ReadFile("/proc/loadavg")
	first, _, _ := strings.Cut(string(text), " ")
	return first
}

func median(s []float64) float64 {
	s = slices.Sorted(slices.Values(s))
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}
