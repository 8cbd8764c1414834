// Package host runs an agent's driver plugins: pinned, confined, supervised,
// and invoked over bcx.
package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/sandbox"
)

// Config is the [plugins] section and what the agent adds to it.
type Config struct {
	// Dir holds the binaries and the pins file; empty: no plugins.
	Dir string
	// User is shared by all plugins; empty: each has a uid of its own.
	User string
	// Privileged names plugins that keep the agent's uid, unfiltered.
	Privileged []string
	// Sandbox sets no_new_privs, the wall around files and the system call filter
	// through the shim. It is for Linux: elsewhere no plugin starts with it.
	// Without it plugins still drop to their uid, when the agent is root.
	Sandbox bool
	// Cgroup is the cgroup v2 directory for the plugins; empty: the agent's own.
	Cgroup string
	// MemoryMax (bytes) and PidsMax limit each plugin; 0: no limit.
	MemoryMax, PidsMax int64
	// Shim is the argv prefix of a program that calls sandbox.ShimMain, such as
	// {"/proc/self/exe", "bcx-shim"}.
	Shim []string
	// SocketRoot is the folder of the sockets; empty: /run/bcx.
	SocketRoot string
	Log        *slog.Logger

	// Egress opens the way to the addresses of each call; nil: nothing is opened.
	Egress Egress

	// Backoff spaces restarts; zero: 1 s to 1 minute.
	Backoff backoff.Policy
	// StartTimeout and ShutdownGrace; zero: those of bcx.
	StartTimeout, ShutdownGrace time.Duration
}

// Host runs plugins until Close.
type Host struct {
	log     *slog.Logger
	plugins []*plugin
	drivers []driver.Manifest
	routes  map[route]*plugin
	ids     map[string]*plugin // by driver, the one of the highest version
	stop    context.CancelFunc
	running sync.WaitGroup

	calls    sync.WaitGroup
	mu       sync.Mutex
	closed   bool
	rejected []Status
}

type route struct{ driver, kind string }

// Status is how a listed plugin fares.
type Status struct {
	Name string
	// State is running, restarting, failed (it never started) or stopped.
	State string
	// Reason says why it does not run, or last did not.
	Reason   string
	PID      int
	Restarts int
	Drivers  []string
	// Confined says that it runs with no_new_privs, a filter of system calls
	// (Filtered: where there is one for this architecture), and, with FileWall
	// over 0, that version of Landlock around its files.
	Confined, Filtered bool
	FileWall           int
}

// defaultRoot is the folder of the sockets.
const defaultRoot = "/run/bcx"

// plugin is one pinned binary under supervision.
type plugin struct {
	launch  launch
	backoff backoff.Policy
	// first is what it described at its first start, addresses the fields of its
	// drivers' configurations that hold one.
	first     []driver.Manifest
	addresses map[string][]string

	mu      sync.Mutex
	current *process
	status  Status
}

// Start runs every plugin of the pins file and returns when each has described
// itself or failed. A plugin that fails is logged and skipped, and Status keeps
// why; an error means that the configuration lets no plugin run. ctx bounds
// starting only: the plugins run until Close.
func Start(ctx context.Context, c Config) (*Host, error) {
	life, stop := context.WithCancel(context.WithoutCancel(ctx))
	h := &Host{log: c.Log, routes: map[route]*plugin{}, ids: map[string]*plugin{}, stop: stop}
	sweep(cmp.Or(c.SocketRoot, defaultRoot), h.log)
	pins, err := h.readPins(c)
	if err == nil && len(pins) > 0 {
		err = h.prepare(c, pins)
	}
	if err != nil {
		stop()
		return nil, err
	}
	results := make([]chan error, len(h.plugins))
	for i, p := range h.plugins {
		results[i] = make(chan error, 1)
		h.running.Go(func() { p.supervise(ctx, life, results[i]) })
	}
	for i, p := range h.plugins {
		if err := <-results[i]; err != nil {
			h.log.Error("plugin did not start and is skipped", "plugin", p.launch.pin.Name, "reason", err.Error())
		}
	}
	h.route()
	return h, nil
}

func (h *Host) readPins(c Config) ([]Pin, error) {
	if c.Dir == "" {
		return nil, nil
	}
	data, err := os.ReadFile(filepath.Join(c.Dir, pinsName))
	if errors.Is(err, fs.ErrNotExist) {
		h.log.Warn("no pins file, so no plugin runs", "dir", c.Dir)
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open pins file: %w", err)
	}
	pins, bad := ParsePins(data)
	for _, err := range bad {
		h.log.Error("pin skipped", "reason", err.Error())
		h.rejected = append(h.rejected, Status{Name: pinsName, State: "failed", Reason: err.Error()})
	}
	slices.SortFunc(pins, func(a, b Pin) int { return cmp.Compare(a.Name, b.Name) })
	return pins, nil
}

// prepare decides how each plugin is run.
func (h *Host) prepare(c Config, pins []Pin) error {
	if c.Sandbox && len(c.Shim) == 0 {
		return errors.New("plugins: sandbox is on but no shim is set")
	}
	wall, filtered := sandbox.FileWall(), sandbox.Filtered(runtime.GOARCH)
	for _, missing := range unwalled(c.Sandbox, wall, filtered) {
		h.log.Warn("PLUGINS RUN WITHOUT " + missing)
	}
	limit := limits{c.MemoryMax, c.PidsMax}
	cgroup := prepareCgroup(c.Cgroup, limit)
	if cgroup != nil {
		// Plugins asked to be limited never run without their limits.
		return fmt.Errorf("plugins: no plugin runs: %w", cgroup)
	}
	names := make([]string, len(pins))
	for i, p := range pins {
		names[i] = p.Name
	}
	for _, name := range c.Privileged {
		if !slices.Contains(names, name) {
			h.log.Warn("a privileged plugin is not in the pins file", "plugin", name)
		}
	}
	uids, err := assignUIDs(names)
	if err != nil {
		return err
	}
	root := os.Geteuid() == 0 && runtime.GOOS == "linux"
	shim := shimFor(runtime.GOOS, c)
	for _, pin := range pins {
		uid, gid := uids[pin.Name], uids[pin.Name]
		if c.User != "" {
			if uid, gid, err = lookupUser(c.User); err != nil {
				return err
			}
		}
		privileged := slices.Contains(c.Privileged, pin.Name)
		switch {
		case privileged:
			h.log.Warn("plugin is privileged: it keeps the agent's uid and is not filtered", "plugin", pin.Name)
			uid, gid = -1, -1
		case !root && c.Sandbox && runtime.GOOS == "linux":
			reason := "only root can give a plugin a uid of its own"
			h.log.Error("plugin did not start and is skipped", "plugin", pin.Name, "reason", reason)
			h.rejected = append(h.rejected, Status{Name: pin.Name, State: "failed", Reason: reason})
			continue
		case !root && c.User == "":
			uid, gid = -1, -1
		}
		confine := c.Sandbox && !privileged
		status := Status{Name: pin.Name, Confined: confine}
		if confine {
			status.FileWall, status.Filtered = wall, filtered
		}
		h.plugins = append(h.plugins, &plugin{
			backoff: orPolicy(c.Backoff),
			status:  status,
			launch: launch{
				path: filepath.Join(c.Dir, pin.Name), pin: pin, uid: uid, gid: gid,
				confine: confine, shim: shim, cgroup: c.Cgroup, limits: limit,
				socketRoot: cmp.Or(c.SocketRoot, defaultRoot), egress: c.Egress,
				timeout: cmp.Or(c.StartTimeout, bcx.StartTimeout), grace: cmp.Or(c.ShutdownGrace, bcx.ShutdownGrace),
				log: h.log.With("plugin", pin.Name),
			},
		})
	}
	return nil
}

// unwalled says, in words that a log should not be read past, what plugins run without.
func unwalled(sandboxed bool, wall int, filtered bool) (list []string) {
	if !sandboxed {
		return []string{"A SANDBOX: no_new_privs, the wall around files and the system call filter are off"}
	}
	if wall == 0 {
		list = append(list, "A WALL AROUND FILES: this kernel has no Landlock, so their uid alone keeps them from files")
	}
	if !filtered {
		list = append(list, "A SYSTEM CALL FILTER: there is none for this architecture")
	}
	return list
}

// shimFor is the shim to use. Elsewhere than on Linux one that is there but has
// nothing to confine is left out: asking for it would refuse every plugin.
func shimFor(goos string, c Config) []string {
	if goos != "linux" && !c.Sandbox {
		return nil
	}
	return c.Shim
}

func orPolicy(p backoff.Policy) backoff.Policy {
	if p.Min == 0 {
		p.Min, p.Max = time.Second, time.Minute
	}
	return p
}

func (p *plugin) set(proc *process, state, reason string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.current, p.status.State, p.status.Reason, p.status.PID = proc, state, reason, 0
	if proc != nil {
		p.status.PID = proc.cmd.Process.Pid
	}
}

// process is the run that takes calls now, or nil.
func (p *plugin) process() *process {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.current == nil || p.current.gone() {
		return nil
	}
	return p.current
}

// route decides which plugin serves which driver's kind: the highest version
// wins per kind, and nobody takes the id of a built-in driver.
func (h *Host) route() {
	type candidate struct {
		plugin   *plugin
		manifest driver.Manifest
	}
	var all []candidate
	for _, p := range h.plugins {
		for _, m := range p.first {
			if slices.Contains(driver.BuiltIn(), m.ID) {
				h.log.Error("driver skipped: its id is a built-in driver's", "plugin", p.launch.pin.Name, "driver", m.ID)
				continue
			}
			all = append(all, candidate{p, m})
		}
	}
	// Of equal versions the plugin that comes first by name wins.
	slices.SortStableFunc(all, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.manifest.ID, b.manifest.ID), driver.CompareVersions(b.manifest.Version, a.manifest.Version))
	})
	for _, c := range all {
		var kinds []string
		for _, k := range c.manifest.Kinds {
			r := route{c.manifest.ID, k}
			if other, taken := h.routes[r]; taken {
				h.log.Warn("driver's kind is served by another plugin", "driver", c.manifest.ID, "kind", k,
					"plugin", c.plugin.launch.pin.Name, "served_by", other.launch.pin.Name)
				continue
			}
			h.routes[r] = c.plugin
			kinds = append(kinds, k)
		}
		if len(kinds) == 0 {
			continue
		}
		m := c.manifest
		m.Kinds = kinds
		m.RetrySafe = ofKinds(m.RetrySafe, kinds)
		m.StreamOperations = ofKinds(m.StreamOperations, kinds)
		h.drivers = append(h.drivers, m)
		if h.ids[m.ID] == nil {
			h.ids[m.ID] = c.plugin
		}
		c.plugin.mu.Lock()
		c.plugin.status.Drivers = append(c.plugin.status.Drivers, m.ID)
		c.plugin.mu.Unlock()
	}
}

func ofKinds(operations, kinds []string) []string {
	return slices.DeleteFunc(slices.Clone(operations), func(op string) bool {
		kind, _, _ := strings.Cut(op, ".")
		return !slices.Contains(kinds, kind)
	})
}

// Drivers is what the agent advertises: it stays as it was at the start.
func (h *Host) Drivers() []driver.Manifest { return slices.Clone(h.drivers) }

// Status is how each listed plugin fares, and each line of the pins file that
// could not be read.
func (h *Host) Status() []Status {
	list := slices.Clone(h.rejected)
	for _, p := range h.plugins {
		p.mu.Lock()
		s := p.status
		s.Drivers = slices.Clone(s.Drivers)
		p.mu.Unlock()
		list = append(list, s)
	}
	return list
}

// Close refuses new calls, stops every plugin and waits for all of it.
func (h *Host) Close() error {
	h.mu.Lock()
	h.closed = true
	h.mu.Unlock()
	h.stop()
	h.running.Wait()
	h.calls.Wait()
	return nil
}
