package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/plugins/host"
	"github.com/better-compute/site-appliance/plugins/host/hosttest"
	"github.com/better-compute/site-appliance/scripts/bench/benchplugin"
)

var bcxSuite = suite{
	names: []string{"bcx.start", "bcx.start.pinned", "bcx.call", "bcx.calls.1", "bcx.calls.16", "bcx.stream.down", "bcx.stream.up", "bcx.rss.plugin", "bcx.rss.host"},
	run:   measureBCX,
}

const (
	goPlugin = "hashicorp/go-plugin 1.8.0, gRPC with AutoMTLS"
	// starts is how many cold starts a round has.
	starts   = 10
	echoArgs = `["hello"]`
	// restCalls are made before memory is looked at.
	restCalls = 2000

	// hostVariable makes this program one side's host, which says what it and
	// its plugin take; pathVariable and shimVariable say which plugin, and our shim.
	hostVariable = "BENCH_HOST"
	pathVariable = "BENCH_PLUGIN"
	shimVariable = "BENCH_SHIM"
)

func whole(got int) error {
	if want := benchplugin.Chunks * benchplugin.ChunkSize; got != want {
		return fmt.Errorf("a stream brought %d bytes of %d", got, want)
	}
	return nil
}

// measureBCX puts a plugin in its sandbox, called through the agent's host and
// our SDK, beside a plugin of go-plugin called through its own client.
func measureBCX(ctx context.Context, s settings) (rows []row, err error) {
	if os.Geteuid() != 0 {
		fmt.Fprintln(s.log, "bench: bcx is left out: plugins get a uid of their own, which needs root")
		return nil, nil
	}
	err = withTB(func(tb testing.TB) error {
		b, err := bcxBench(tb)
		if err != nil {
			return err
		}
		for _, part := range []func(context.Context, settings) ([]row, error){b.coldStarts, b.calling, b.streaming, b.resident} {
			more, err := part(ctx, s)
			if err != nil {
				return err
			}
			rows = append(rows, more...)
		}
		return nil
	})
	return rows, err
}

// pluginBench is one program that is a plugin for both sides.
type pluginBench struct {
	path   string
	sum    []byte
	config host.Config
}

// bcxBench builds the plugin as the image builds plugins.
func bcxBench(tb testing.TB) (*pluginBench, error) {
	b := &pluginBench{path: filepath.Join(tb.TempDir(), "plugin")}
	for path, pkg := range map[string]string{b.path: "./scripts/bench/benchplugin/cmd", b.path + "-bcd": "./appliance/cmd/bcd"} {
		cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w -buildid=", "-o", path, pkg)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if text, err := cmd.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("build %s: %w\n%s", pkg, err, text)
		}
	}
	content, err := os.ReadFile(b.path)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(content)
	b.sum = sum[:]
	b.config, err = benchConfig(tb, b.path, b.path+"-bcd")
	return b, err
}

// benchConfig is a host of one plugin, with bcd as its shim.
func benchConfig(tb testing.TB, path, shim string) (host.Config, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return host.Config{}, err
	}
	d := hosttest.NewDir(tb)
	d.Add("echo", content)
	c := d.Config()
	c.Shim = []string{shim, "bcx-shim"}
	c.Log = slog.New(slog.DiscardHandler)
	return c, nil
}

// coldStarts lasts from nothing to a described plugin. The peer is measured as it
// is, and with a check of the plugin's SHA-256, which ours always has.
func (b *pluginBench) coldStarts(ctx context.Context, s settings) ([]row, error) {
	ours := func() (stop func() error, err error) {
		h, err := host.Start(ctx, b.config)
		if err != nil {
			return nil, err
		}
		if n := len(h.Drivers()); n != 1 {
			return nil, errors.Join(fmt.Errorf("the host has %d drivers", n), h.Close())
		}
		return h.Close, nil
	}
	theirs := func(sum []byte) func() (func() error, error) {
		return func() (func() error, error) {
			p, err := startPeer(b.path, sum)
			if err != nil {
				return nil, err
			}
			return func() error { p.close(); return nil }, nil
		}
	}
	sides := []func() (func() error, error){ours, theirs(nil), theirs(b.sum)}
	took := make([][]float64, len(sides))
	for i := range s.rounds {
		fmt.Fprintf(s.log, "bench: bcx.start, round %d of %d\n", i+1, s.rounds)
		for range starts {
			for side, start := range sides {
				begin := time.Now()
				stop, err := start()
				if err != nil {
					return nil, err
				}
				took[side] = append(took[side], time.Since(begin).Seconds()*1e3)
				if err := stop(); err != nil {
					return nil, err
				}
			}
		}
	}
	line := func(name string, side int, peer string) row {
		return row{name: name, ours: median(took[0]), unit: "ms", theirs: median(took[side]), less: true, goal: 3, peer: goPlugin + peer}
	}
	return []row{
		line("bcx.start", 1, "; ours with its SHA-256 checked, sandboxed"),
		line("bcx.start.pinned", 2, " and SecureConfig's SHA-256; ours also sandboxed"),
	}, nil
}

// invoker is a call through the host.
func invoker(h *host.Host) func(context.Context) error {
	return func(ctx context.Context) error {
		got, err := h.Invoke(ctx, host.Call{Driver: "echo", Kind: "echo", Operation: "echo", Args: json.RawMessage(echoArgs)})
		if err == nil && string(got) != echoArgs {
			err = fmt.Errorf("the plugin answered %q", got)
		}
		return err
	}
}

func (b *pluginBench) calling(ctx context.Context, s settings) (_ []row, err error) {
	h, err := host.Start(ctx, b.config)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	p, err := startPeer(b.path, nil)
	if err != nil {
		return nil, err
	}
	defer p.close()
	type figures struct{ p50, one, many []float64 }
	var ours, theirs figures
	for i := range s.rounds {
		fmt.Fprintf(s.log, "bench: bcx.calls, round %d of %d\n", i+1, s.rounds)
		for _, side := range []struct {
			call func(context.Context) error
			f    *figures
		}{{invoker(h), &ours}, {p.call, &theirs}} {
			rate, p50, err := calls(ctx, 1, side.call)
			if err != nil {
				return nil, err
			}
			side.f.p50, side.f.one = append(side.f.p50, p50*1e6), append(side.f.one, rate)
			if rate, _, err = calls(ctx, callers, side.call); err != nil {
				return nil, err
			}
			side.f.many = append(side.f.many, rate)
		}
	}
	return []row{
		{name: "bcx.call", ours: median(ours.p50), unit: "µs", theirs: median(theirs.p50), less: true, goal: 1, peer: goPlugin + ", p50 of both"},
		{name: "bcx.calls.1", ours: median(ours.one), unit: "1/s", theirs: median(theirs.one), goal: 1, peer: goPlugin + ", one caller"},
		{name: "bcx.calls.16", ours: median(ours.many), unit: "1/s", theirs: median(theirs.many), goal: 1,
			peer: fmt.Sprintf("%s, %d callers", goPlugin, callers)},
	}, nil
}

// streaming moves bytes through Stream, frame by frame.
func (b *pluginBench) streaming(ctx context.Context, s settings) (_ []row, err error) {
	h, err := host.Start(ctx, b.config)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	p, err := startPeer(b.path, nil)
	if err != nil {
		return nil, err
	}
	defer p.close()
	var ours, theirs [2][]float64
	for i := range s.rounds {
		fmt.Fprintf(s.log, "bench: bcx.stream, round %d of %d\n", i+1, s.rounds)
		for _, m := range []struct {
			move func(context.Context) error
			to   *[]float64
		}{
			{func(ctx context.Context) error { return down(ctx, h) }, &ours[0]}, {p.down, &theirs[0]},
			{func(ctx context.Context) error { return up(ctx, h) }, &ours[1]}, {p.up, &theirs[1]},
		} {
			begin := time.Now()
			if err := m.move(ctx); err != nil {
				return nil, err
			}
			*m.to = append(*m.to, benchplugin.Chunks*benchplugin.ChunkSize/1e6/time.Since(begin).Seconds())
		}
	}
	return []row{
		{name: "bcx.stream.down", ours: median(ours[0]), unit: "MB/s", theirs: median(theirs[0]), goal: 1, peer: goPlugin + ", plugin to host"},
		{name: "bcx.stream.up", ours: median(ours[1]), unit: "MB/s", theirs: median(theirs[1]), goal: 1, peer: goPlugin + ", host to plugin"},
	}, nil
}

func down(ctx context.Context, h *host.Host) error {
	s, err := h.Stream(ctx, host.Call{Driver: "echo", Kind: "echo", Operation: "down"})
	if err != nil {
		return err
	}
	n, err := io.Copy(io.Discard, s)
	return errors.Join(err, whole(int(n)), s.Close())
}

func up(ctx context.Context, h *host.Host) error {
	s, err := h.Stream(ctx, host.Call{Driver: "echo", Kind: "echo", Operation: "up"})
	if err != nil {
		return err
	}
	for range benchplugin.Chunks {
		if _, err := s.Write(benchplugin.Chunk); err != nil {
			return errors.Join(err, s.Close())
		}
	}
	_, err = io.ReadFull(s, make([]byte, 1)) // that all has come
	return errors.Join(err, s.Close())
}

// memory is what a host and its plugin hold, in MiB.
type memory struct{ Host, Plugin float64 }

// resident compares what processes hold that do nothing else.
func (b *pluginBench) resident(ctx context.Context, s settings) ([]row, error) {
	fmt.Fprintln(s.log, "bench: bcx.rss")
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	var sides [2]struct{ host, plugin []float64 }
	for range s.rounds {
		for i, name := range []string{"bcx", "peer"} {
			cmd := exec.CommandContext(ctx, self)
			cmd.Env = append(os.Environ(), hostVariable+"="+name, pathVariable+"="+b.path, shimVariable+"="+b.config.Shim[0])
			cmd.Stderr = os.Stderr
			out, err := cmd.Output()
			if err != nil {
				return nil, fmt.Errorf("%s's host: %w", name, err)
			}
			var m memory
			if err := json.Unmarshal(out, &m); err != nil {
				return nil, err
			}
			sides[i].host, sides[i].plugin = append(sides[i].host, m.Host), append(sides[i].plugin, m.Plugin)
		}
	}
	return []row{
		{name: "bcx.rss.plugin", ours: median(sides[0].plugin), unit: "MiB", theirs: median(sides[1].plugin), less: true, peer: goPlugin},
		{name: "bcx.rss.host", ours: median(sides[0].host), unit: "MiB", theirs: median(sides[1].host), less: true, peer: goPlugin},
	}, nil
}

// beHost starts one side's plugin, calls it for a while, and prints a memory.
func beHost(ctx context.Context, name string, out io.Writer) error {
	return withTB(func(tb testing.TB) error {
		var call func(context.Context) error
		if name == "peer" {
			p, err := startPeer(os.Getenv(pathVariable), nil)
			if err != nil {
				return err
			}
			defer p.close()
			call = p.call
		} else {
			c, err := benchConfig(tb, os.Getenv(pathVariable), os.Getenv(shimVariable))
			if err != nil {
				return err
			}
			// What it took to lay the plugin out is not the host's.
			debug.FreeOSMemory()
			call = invoker(hosttest.Start(tb, c))
		}
		for range restCalls {
			if err := call(ctx); err != nil {
				return err
			}
		}
		pids, err := children()
		if err != nil {
			return err
		}
		if len(pids) != 1 {
			return fmt.Errorf("there are %d plugins", len(pids))
		}
		var m memory
		if m.Plugin, err = rss(pids[0]); err != nil {
			return err
		}
		if m.Host, err = rss("self"); err != nil {
			return err
		}
		return json.NewEncoder(out).Encode(m)
	})
}

func children() ([]string, error) {
	lists, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil {
		return nil, err
	}
	var pids []string
	for _, path := range lists {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // the thread has ended
		}
		pids = append(pids, strings.Fields(string(text))...)
	}
	return pids, nil
}

// rss is a process's resident memory in MiB.
func rss(pid string) (float64, error) {
	text, err := os.ReadFile(filepath.Join("/proc", pid, "status"))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kib, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 64)
			return kib / 1024, err
		}
	}
	return 0, fmt.Errorf("process %s has no resident memory", pid)
}
