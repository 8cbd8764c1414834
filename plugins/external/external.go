// Package external is the control plane's host of drivers in processes of
// their own: each pinned, supervised, and used like any other definition.
package external

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/peer"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// Options of a Driver.
type Options struct {
	// Command is the plugin's argv.
	Command []string
	// SHA256 pins the file that PinnedFile names, in hex.
	SHA256 string
	// Env is added to the few variables that a plugin gets.
	Env map[string]string
	// StartTimeout bounds a start up to the description; zero: 10 s.
	StartTimeout time.Duration
	// CallTimeout bounds a call whose context has no deadline; zero: 60 s.
	CallTimeout time.Duration
	// ShutdownGrace is how long the plugin has to end after SIGTERM; zero: 5 s.
	ShutdownGrace time.Duration
	// Log may be nil.
	Log *slog.Logger
	// Secrets resolves what configurations refer to; nil: each call's own context.
	Secrets driver.Secrets
	// Backoff spaces restarts; zero: 1 s to 1 minute.
	Backoff backoff.Policy
}

// steady is how long a run lasts before its end counts as the first again.
const steady = time.Minute

// Driver is a plugin under supervision, with all drivers that it serves.
type Driver struct {
	o       Options
	name    string
	log     *slog.Logger
	redact  *peer.Redactor
	life    context.Context
	stop    context.CancelFunc
	running sync.WaitGroup

	mu      sync.Mutex
	started bool
	current *run
	changed chan struct{} // closed when current or dead changes
	dead    error         // why no run comes any more
	reason  string        // why there is no run now
}

// Health is what a plugin says of itself.
type Health struct {
	Serving bool
	// Message says why it does not serve.
	Message string
}

// New makes a Driver. Nothing runs before Start.
func New(o Options) *Driver {
	o.Command, o.Env = slices.Clone(o.Command), maps.Clone(o.Env)
	for d, standard := range map[*time.Duration]time.Duration{
		&o.StartTimeout: bcx.StartTimeout, &o.CallTimeout: time.Minute, &o.ShutdownGrace: bcx.ShutdownGrace,
	} {
		if *d <= 0 {
			*d = standard
		}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Backoff.Max <= 0 {
		o.Backoff.Min, o.Backoff.Max = time.Second, time.Minute
	}
	d := &Driver{o: o, redact: peer.NewRedactor(), changed: make(chan struct{})}
	if file, err := PinnedFile(o.Command); err == nil {
		d.name = filepath.Base(file)
	}
	d.log = o.Log.With("plugin", d.name)
	d.life, d.stop = context.WithCancel(context.Background())
	return d
}

// check refuses options that no start can use.
func (o Options) check() error {
	if _, err := PinnedFile(o.Command); err != nil {
		return err
	}
	if sum, err := hex.DecodeString(o.SHA256); err != nil || len(sum) != 32 {
		return errs.New(errs.InvalidConfig, "the pin is not a SHA-256 of 64 hex digits")
	}
	for name, value := range o.Env {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.Contains(value, "\x00") {
			return errs.New(errs.InvalidConfig, "environment variable %q cannot be set", name)
		}
		if strings.HasPrefix(name, "BCX_") {
			return errs.New(errs.InvalidConfig, "environment variable %s is the protocol's", name)
		}
	}
	return nil
}

// Start runs the plugin and answers a definition for each driver that it
// serves. It runs until Close; ctx bounds the start only.
func (d *Driver) Start(ctx context.Context) ([]*driver.Definition, error) {
	if err := d.o.check(); err != nil {
		return nil, err
	}
	d.mu.Lock()
	if d.started || d.dead != nil {
		defer d.mu.Unlock()
		if d.dead != nil {
			return nil, d.dead
		}
		return nil, errs.New(errs.Unavailable, "plugin %s was started before", d.name)
	}
	d.started = true
	first := make(chan started, 1)
	d.running.Go(func() { d.supervise(ctx, first) })
	d.mu.Unlock()
	s := <-first
	if s.err != nil {
		return nil, s.err
	}
	return s.definitions, nil
}

type started struct {
	definitions []*driver.Definition
	err         error
}

// define makes a definition of each manifest.
func (d *Driver) define(list []driver.Manifest) ([]*driver.Definition, error) {
	var out []*driver.Definition
	for _, m := range list {
		b := &backend{d: d, id: m.ID}
		def, err := driver.Remote(m, b)
		if err != nil {
			return nil, errs.New(errs.DriverError, "plugin %s: %v", d.name, err)
		}
		b.definition = def
		out = append(out, def)
	}
	return out, nil
}

// supervise owns the plugin's processes, one after the other.
func (d *Driver) supervise(starting context.Context, first chan<- started) {
	// The death signal follows the thread that started the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	bound, release := context.WithCancel(starting)
	defer release()
	defer context.AfterFunc(d.life, release)()
	r, err := d.launch(bound)
	var definitions []*driver.Definition
	if err == nil {
		if definitions, err = d.define(r.peer.Manifests()); err != nil {
			r.end(d.o.ShutdownGrace)
		}
	}
	if err != nil {
		d.mu.Lock()
		d.started = false // another Start may fare better
		d.mu.Unlock()
		first <- started{err: err}
		return
	}
	manifests := r.peer.Manifests()
	d.log.Info("plugin runs", "pid", r.pid(), "version", r.peer.PluginVersion())
	d.set(r, "")
	first <- started{definitions: definitions}
	for attempt := 0; ; {
		if r != nil {
			began := time.Now()
			select {
			case <-d.life.Done():
				d.set(nil, "the host stops")
				r.end(d.o.ShutdownGrace)
				return
			case <-r.exited:
				err = fmt.Errorf("process ended: %w", r.err)
			case <-r.broken:
				err = errors.New("connection was lost")
			}
			d.set(nil, err.Error())
			r.kill()
			<-r.exited
			r.peer.Close()
			if time.Since(began) >= steady {
				attempt = 0
			}
		}
		d.log.Warn("plugin is down", "reason", err.Error(), "restart_in", d.o.Backoff.Delay(attempt).String())
		if d.o.Backoff.Wait(d.life, attempt, nil) != nil {
			return
		}
		attempt++
		if r, err = d.launch(d.life); err != nil {
			if errors.Is(err, errPin) {
				d.log.Error("plugin is not restarted any more", "reason", err.Error())
				d.die(err)
				return
			}
			r = nil
			d.set(nil, err.Error())
			continue
		}
		if !sameDrivers(manifests, r.peer.Manifests()) {
			d.log.Warn("plugin came back with other drivers: the registered ones stay", "version", r.peer.PluginVersion())
		}
		d.log.Info("plugin runs again", "pid", r.pid(), "version", r.peer.PluginVersion())
		d.set(r, "")
	}
}

func sameDrivers(a, b []driver.Manifest) bool {
	return len(a) == len(b) && !slices.ContainsFunc(a, func(m driver.Manifest) bool {
		return !slices.ContainsFunc(b, m.Same)
	})
}

func (d *Driver) set(r *run, reason string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.current, d.reason = r, reason
	close(d.changed)
	d.changed = make(chan struct{})
}

func (d *Driver) die(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dead == nil {
		d.dead = err
	}
	d.current = nil
	close(d.changed)
	d.changed = make(chan struct{})
}

// acquire waits for a run that can take a call: through a restart, but not
// longer than ctx.
func (d *Driver) acquire(ctx context.Context) (*run, error) {
	for {
		d.mu.Lock()
		r, changed, dead, reason, ever := d.current, d.changed, d.dead, d.reason, d.started
		d.mu.Unlock()
		switch {
		case dead != nil:
			return nil, dead
		case !ever:
			return nil, errs.New(errs.Unavailable, "plugin %s was not started", d.name)
		case r != nil && !r.over():
			return r, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.Canceled) {
				return nil, errs.New(errs.Cancelled, "call of plugin %s was cancelled", d.name)
			}
			return nil, errs.Retry(errs.Timeout, "plugin %s was not back in time: %s", d.name, reason)
		}
	}
}

// with runs f towards the plugin; ctx bounds the wait for it. A call that did
// not reach the plugin, which had just crashed, waits for the restart like a
// new one.
func (d *Driver) with(ctx context.Context, f func(*run) error) error {
	for {
		r, err := d.acquire(ctx)
		if err != nil {
			return err
		}
		err = f(r)
		var lost *peer.Lost
		if !errors.As(err, &lost) {
			return err
		}
		r.lose()
		if !lost.Unsent {
			return err
		}
	}
}

// Health asks the plugin whether it can serve.
func (d *Driver) Health(ctx context.Context) (Health, error) {
	ctx, cancel := context.WithDeadline(ctx, d.deadline(ctx))
	defer cancel()
	var h Health
	err := d.with(ctx, func(r *run) (err error) {
		h.Serving, h.Message, err = r.peer.Health(ctx)
		return err
	})
	if err != nil {
		return Health{}, err
	}
	return h, nil
}

// deadline is the context's, or that of a call without one.
func (d *Driver) deadline(ctx context.Context) time.Time {
	if t, ok := ctx.Deadline(); ok {
		return t
	}
	return time.Now().Add(d.o.CallTimeout)
}

// Close ends the plugin and waits for it: stdin closes, SIGTERM where there is
// one, SIGKILL to the whole group after the grace.
func (d *Driver) Close() error {
	d.die(errs.New(errs.Unavailable, "plugin %s is closed", d.name))
	d.stop()
	d.running.Wait()
	return nil
}

// StartAll starts several and answers all their drivers, in order. When one
// fails, the others are closed.
func StartAll(ctx context.Context, drivers ...*Driver) ([]*driver.Definition, error) {
	results := make([]started, len(drivers))
	var wg sync.WaitGroup
	for i, d := range drivers {
		wg.Go(func() { results[i].definitions, results[i].err = d.Start(ctx) })
	}
	wg.Wait()
	var all []*driver.Definition
	var failed error
	for i, r := range results {
		if r.err != nil && failed == nil {
			failed = fmt.Errorf("start plugin %s: %w", drivers[i].name, r.err)
		}
		all = append(all, r.definitions...)
	}
	if failed == nil {
		return all, nil
	}
	for _, d := range drivers {
		wg.Go(func() { _ = d.Close() })
	}
	wg.Wait()
	return nil, failed
}
