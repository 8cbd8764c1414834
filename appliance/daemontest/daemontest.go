// Package daemontest is a fake bcd for tests: a real agent over a real line to a
// real gateway, whose command kinds and drivers the test chooses.
package daemontest

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent"
	"github.com/better-compute/site-appliance/appliance/agent/bootinfo"
	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/invoke"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/host"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// Options say what a Daemon is.
type Options struct {
	// Role is site, node or ramdisk.
	Role agentv1.Role
	// Join is the join string of a site or node, as Enrol.NewToken of a gateway mints it.
	Join string
	// Boot enrols a ramdisk: what its box hands over, see Daemon.Boot.
	Boot *bootinfo.Info
	// StateDir keeps what outlives the daemon; empty: a folder of its own.
	StateDir string
	// Kinds are the command kinds that it serves beside driver.invoke.
	Kinds []dispatch.Kind
	// Host runs driver.invoke, and its drivers are advertised; nil: the daemon
	// hosts none, and answers unsupported-driver. FakeDriverInvoke makes one.
	Host invoke.Host
	// Book is a site's address book; nil: none.
	Book invoke.Book
	// GPU makes it a GPU host: it advertises the driver nvidia of kind config,
	// beside what Host hosts.
	GPU bool
	// Capabilities are advertised as they are.
	Capabilities []string
	// Log gets what the agent logs; nil: nobody.
	Log *slog.Logger
}

// Daemon is a running fake bcd.
type Daemon struct {
	*agent.Agent
	stop func()
}

// NVIDIA is what a GPU host advertises.
func NVIDIA() *agentv1.AdvertisedDriver {
	return &agentv1.AdvertisedDriver{Id: "nvidia", Version: "1.0.0", Kinds: []string{"config"}}
}

// FakeDaemon enrols an agent, runs it until the test ends, and returns when its
// session is up. It fails the test where that does not come about.
func FakeDaemon(t testing.TB, o Options) *Daemon {
	t.Helper()
	d, err := Start(t.Context(), o, t.TempDir)
	if err != nil {
		t.Fatalf("fake daemon: %v", err)
	}
	t.Cleanup(d.Stop)
	return d
}

// patience is how long a daemon may take to come home on a busy machine.
const patience = 20 * time.Second

// Start is FakeDaemon outside of a test; dir makes the state folder where the
// options name none. Stop must be called.
func Start(ctx context.Context, o Options, dir func() string) (*Daemon, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.NewTextHandler(io.Discard, nil))
	}
	c := agent.Config{
		Role: o.Role, Boot: o.Boot, StateDir: o.StateDir, Version: "fake", Capabilities: o.Capabilities, Log: o.Log,
		Kinds: append(slices.Clone(o.Kinds), invoke.New(invoke.Options{Host: o.Host, Book: o.Book, Log: o.Log})),
	}
	if c.StateDir == "" && o.Role != agentv1.Role_ROLE_RAMDISK {
		c.StateDir = dir()
	}
	if o.Join != "" {
		join, err := trust.ParseJoin(o.Join)
		if err != nil {
			return nil, fmt.Errorf("join string: %w", err)
		}
		c.Join = &join
	}
	if o.Host != nil {
		for _, m := range o.Host.Drivers() {
			c.Drivers = append(c.Drivers, &agentv1.AdvertisedDriver{
				Id: m.ID, Version: m.Version, Kinds: m.Kinds, Capabilities: m.Capabilities, RetrySafeOperations: m.RetrySafe,
			})
		}
	}
	if o.GPU {
		c.Drivers = append(c.Drivers, NVIDIA())
	}
	a, err := agent.New(c)
	if err != nil {
		return nil, err
	}
	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan error, 1)
	go func() { ended <- a.Run(running) }()
	d := &Daemon{Agent: a, stop: func() {
		cancel()
		if err := <-ended; err != nil {
			o.Log.Error("fake daemon ended", "err", err)
		}
		ended <- nil // so that stopping twice is fine
	}}
	waiting, done := context.WithTimeout(ctx, patience)
	defer done()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !a.Online() {
		select {
		case err := <-ended:
			ended <- nil
			cancel()
			return nil, fmt.Errorf("the agent ended: %w", err)
		case <-waiting.Done():
			d.Stop()
			return nil, fmt.Errorf("no session came up in %s", patience)
		case <-tick.C:
		}
	}
	return d, nil
}

// Stop ends the daemon and waits for it, as a power cut would: its state stays.
func (d *Daemon) Stop() { d.stop() }

// Boot is what this daemon, being a site, hands to a machine that it boots into
// the ramdisk, of the assignment that its gateway sent: a boot window of that id
// must be open for the machine there. Without the gateway's signature in the
// assignment the ramdisk destroys nothing. via is how it reaches the gateway,
// host:port.
func (d *Daemon) Boot(m *pxev1.Machine, via string) (*bootinfo.Info, error) {
	bundle := d.Bundle()
	if bundle == nil {
		return nil, errs.New(errs.NotEnrolled, "the site is not enrolled")
	}
	nonce := make([]byte, 16)
	if _, err := rand.Read(nonce); err != nil {
		return nil, fmt.Errorf("make a boot nonce: %w", err)
	}
	signed, err := d.SignVoucher(&agentv1.Voucher{
		MachineId: m.GetMachineId(), BootNonce: nonce, WindowId: m.GetWindowId(), Purpose: m.GetPurpose(),
		IssuedAtMs: d.Clock().Now().UnixMilli(), NotAfterMs: m.GetWindowUntilMs(),
	})
	if err != nil {
		return nil, fmt.Errorf("sign voucher: %w", err)
	}
	voucher, err := proto.Marshal(signed)
	if err != nil {
		return nil, fmt.Errorf("encode voucher: %w", err)
	}
	ca, roots := bundle.CASPKI(), bundle.RootSet()
	return &bootinfo.Info{
		MachineID: m.GetMachineId(), SiteID: d.SiteID(), GatewayURLs: bundle.URLs(), Via: via,
		CASPKI: ca[:], RootSet: roots[:], Voucher: voucher, Assignment: m.GetAssignment(),
	}, nil
}

// FakeDriverInvoke hosts drivers for a Daemon: those of plugin processes, as the
// control plane's plugin host starts them, or any others. It runs driver.invoke
// as bcd does.
func FakeDriverInvoke(drivers []*driver.Definition) invoke.Host {
	return definitions(slices.Clone(drivers))
}

type definitions []*driver.Definition

// Drivers are what the definitions declare.
func (ds definitions) Drivers() []driver.Manifest {
	var out []driver.Manifest
	for _, d := range ds {
		out = append(out, d.Manifest())
	}
	return out
}

// Invoke runs an operation of the definition that serves it.
func (ds definitions) Invoke(ctx context.Context, c host.Call) (json.RawMessage, error) {
	n := slices.IndexFunc(ds, func(d *driver.Definition) bool {
		m := d.Manifest()
		return m.ID == c.Driver && slices.Contains(m.Kinds, c.Kind)
	})
	if n < 0 {
		return nil, errs.New(errs.UnsupportedDriver, "no hosted driver %s implements %s", c.Driver, c.Kind)
	}
	if !c.Deadline.IsZero() {
		var stop context.CancelFunc
		ctx, stop = context.WithDeadline(ctx, c.Deadline)
		defer stop()
	}
	call := driver.NewContext(ctx, driver.Delivered(c.Secrets), slog.New(slog.DiscardHandler), func(p driver.Progress) {
		if c.Progress != nil {
			c.Progress(p.Phase, p.Message, p.Done, p.Total)
		}
	})
	call.IdempotencyKey, call.Traceparent, call.TargetNodeID = c.IdempotencyKey, c.Traceparent, c.TargetNodeID
	return ds[n].Invoke(call, c.Kind, c.Operation, c.Config, c.Args)
}
