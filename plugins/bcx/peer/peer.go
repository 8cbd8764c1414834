// Package peer is a host's half of bcx towards one running plugin: it meets the
// plugin, calls it, and takes what it prints.
package peer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1/driverv1connect"
	"github.com/better-compute/site-appliance/plugins/driver"
)

const (
	// maxDrivers bounds what one plugin may describe.
	maxDrivers = 64
	// maxText bounds a message of a plugin that a person will read.
	maxText = 64 << 10
)

// Options of a Peer.
type Options struct {
	// Name is the plugin's in errors and logs.
	Name string
	Log  *slog.Logger
	// MaxResultBytes caps a result; 0: only the protocol's limit on a message.
	MaxResultBytes int
	// Redact may be nil.
	Redact *Redactor
}

// Peer is one run of a plugin, ready for calls.
type Peer struct {
	client    driverv1connect.DriverPluginClient
	hangUp    func()
	o         Options
	manifests []driver.Manifest
	version   string
}

// Meet dials a plugin that said h and asks what it serves. A plugin that speaks
// another protocol, serves nothing, or describes a driver badly or twice is
// refused.
func Meet(ctx context.Context, self *bcx.Identity, h bcx.Handshake, o Options) (*Peer, error) {
	client := bcx.Dial(self, h)
	p, err := New(ctx, client, client.Close, o)
	if err != nil {
		client.Close()
		return nil, err
	}
	return p, nil
}

// New is Meet over a connection that the caller made.
func New(ctx context.Context, client driverv1connect.DriverPluginClient, hangUp func(), o Options) (*Peer, error) {
	if o.Redact == nil {
		o.Redact = NewRedactor()
	}
	p := &Peer{client: client, hangUp: hangUp, o: o}
	answer, err := client.Describe(ctx, connect.NewRequest(&driverv1.DescribeRequest{}))
	if err != nil {
		return nil, fmt.Errorf("describe: %w", err)
	}
	if p.version, p.manifests, err = described(answer.Msg); err != nil {
		return nil, err
	}
	return p, nil
}

// described checks what a plugin says of itself.
func described(m *driverv1.DescribeResponse) (version string, list []driver.Manifest, err error) {
	if m.GetProtocol() != bcx.Protocol {
		return "", nil, fmt.Errorf("plugin describes bcx protocol %d: want %d", m.GetProtocol(), bcx.Protocol)
	}
	switch n := len(m.GetDrivers()); {
	case n == 0:
		return "", nil, errors.New("plugin describes no driver")
	case n > maxDrivers:
		return "", nil, fmt.Errorf("plugin describes %d drivers, limit %d", n, maxDrivers)
	}
	seen := map[string]bool{}
	for _, d := range m.GetDrivers() {
		manifest, err := bcx.Manifest(d)
		if err != nil {
			return "", nil, fmt.Errorf("describe: %w", err)
		}
		if seen[manifest.ID] {
			return "", nil, fmt.Errorf("describe: driver %s is described twice", manifest.ID)
		}
		seen[manifest.ID] = true
		list = append(list, manifest)
	}
	return clip(m.GetPluginVersion(), 64), list, nil
}

// Manifests are the drivers that the plugin serves.
func (p *Peer) Manifests() []driver.Manifest { return slices.Clone(p.manifests) }

// PluginVersion is the plugin's own, apart from its drivers'.
func (p *Peer) PluginVersion() string { return p.version }

// Close drops the connection once its calls have ended.
func (p *Peer) Close() {
	if p.hangUp != nil {
		p.hangUp()
	}
}

// Health asks whether the plugin can serve, and why not.
func (p *Peer) Health(ctx context.Context) (serving bool, message string, err error) {
	r, err := p.client.Health(ctx, connect.NewRequest(&driverv1.HealthRequest{}))
	if err != nil {
		return false, "", p.explain(ctx, ctx, err)
	}
	return r.Msg.GetStatus() == driverv1.HealthResponse_STATUS_SERVING, p.text(r.Msg.GetMessage()), nil
}

// fromWire is a plugin's own error, fit to be shown.
func (p *Peer) fromWire(e *driverv1.Error) error {
	err := bcx.FromWire(e)
	err.Message = p.text(err.Message)
	return err
}

// text is a plugin's message without secrets, and bounded.
func (p *Peer) text(s string) string { return clip(p.o.Redact.Scrub(s), maxText) }

// explain gives an error of the connection its code. One that is the plugin's
// own has it already. What the transport calls cancelled is so only if the
// caller gave up or the plugin said it: a connection that dies reads much alike.
func (p *Peer) explain(caller, ctx context.Context, err error) error {
	if own := new(errs.Error); errors.As(err, &own) {
		return err
	}
	wire := connect.IsWireError(err)
	code := connect.CodeOf(err)
	text := p.text(err.Error())
	switch {
	case errors.Is(caller.Err(), context.Canceled):
		return errs.New(errs.Cancelled, "call of plugin %s was cancelled", p.o.Name)
	case ctx.Err() != nil || caller.Err() != nil:
		return errs.Retry(errs.Timeout, "plugin %s did not answer in time", p.o.Name)
	case code == connect.CodeResourceExhausted:
		return errs.New(errs.InvalidArgs, "message over %d bytes: %s", bcx.MaxMessage, text)
	case code == connect.CodeUnimplemented:
		return errs.New(errs.UnsupportedOperation, "plugin %s: %s", p.o.Name, text)
	case wire && code == connect.CodeCanceled:
		return errs.New(errs.Cancelled, "plugin %s cancelled the call: %s", p.o.Name, text)
	case wire && code == connect.CodeDeadlineExceeded:
		return errs.Retry(errs.Timeout, "plugin %s: %s", p.o.Name, text)
	case wire && code != connect.CodeUnavailable:
		return errs.New(errs.DriverError, "plugin %s: %s", p.o.Name, text)
	}
	lost := &Lost{Err: p.lost(text)}
	if strings.Contains(text, "stream error:") || strings.Contains(text, "protocol error:") && !strings.Contains(text, "unexpected EOF") {
		// The plugin broke off this call, not the connection.
		return &Broken{lost.Err}
	}
	var dial *net.OpError
	lost.Unsent = errors.As(err, &dial) && dial.Op == "dial"
	return lost
}

// lost is the error of a connection or stream that broke off.
func (p *Peer) lost(why string) *errs.Error {
	return errs.Retry(errs.Unreachable, "connection to plugin %s was lost: %s", p.o.Name, why)
}

// Lost says that the connection itself is gone.
type Lost struct {
	Err *errs.Error
	// Unsent: the call did not reach the plugin.
	Unsent bool
}

func (l *Lost) Error() string { return l.Err.Error() }

// Unwrap gives the error its code.
func (l *Lost) Unwrap() error { return l.Err }

// OfPlugin says that the plugin failed, and not what it speaks to.
func (l *Lost) OfPlugin() {}

// Broken says that a plugin did not go on with a call.
type Broken struct{ Err *errs.Error }

func (b *Broken) Error() string { return b.Err.Error() }

// Unwrap gives the error its code.
func (b *Broken) Unwrap() error { return b.Err }

// OfPlugin says that the plugin failed, and not what it speaks to.
func (b *Broken) OfPlugin() {}

// until bounds ctx by the plugin's deadline and the grace that it has to answer
// for itself.
func until(ctx context.Context, deadline time.Time) (context.Context, context.CancelFunc) {
	if deadline.IsZero() {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, deadline.Add(bcx.Grace))
}
