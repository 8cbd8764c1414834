package host

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/plugins/bcx/peer"
)

// Call is one operation of a driver.
type Call = peer.Call

// attend is how long a call that lost its connection waits to hear how the
// plugin ended.
const attend = 2 * time.Second

// Invoke runs a call in the plugin that serves it. Its errors have codes; a
// plugin's own keep theirs. The result is as the plugin sent it: whoever asked
// judges whether it is JSON, and by which code it is refused.
func (h *Host) Invoke(ctx context.Context, c Call) (json.RawMessage, error) {
	p, proc, release, err := h.admit(ctx, h.routes[route{c.Driver, c.Kind}], c.Driver, c.Kind, c.Config)
	if err != nil {
		return nil, err
	}
	defer h.calls.Done()
	defer release()
	result, err := proc.peer.Invoke(ctx, c)
	if err != nil {
		return nil, p.judge(c, proc.because(ctx, p.launch.pin.Name, err))
	}
	return result, nil
}

// Validate has a driver check a configuration for itself: what cannot be known
// from its structure. Of several plugins with the driver, that of the highest
// version answers.
func (h *Host) Validate(ctx context.Context, driver string, config json.RawMessage, secrets map[string]secret.Value, deadline time.Time) error {
	p, proc, release, err := h.admit(ctx, h.ids[driver], driver, "", config)
	if err != nil {
		return err
	}
	defer h.calls.Done()
	defer release()
	if err := proc.peer.Validate(ctx, driver, config, secrets, deadline); err != nil {
		return p.judge(Call{Driver: driver}, proc.because(ctx, p.launch.pin.Name, err))
	}
	return nil
}

// Stream opens a stream operation. The call's deadline bounds the opening; the
// caller closes the stream. One that is open does not hold up Close: it breaks
// off when its plugin is stopped.
func (h *Host) Stream(ctx context.Context, c Call) (io.ReadWriteCloser, error) {
	p, proc, release, err := h.admit(ctx, h.routes[route{c.Driver, c.Kind}], c.Driver, c.Kind, c.Config)
	if err != nil {
		return nil, err
	}
	defer h.calls.Done()
	s, err := proc.peer.Stream(ctx, c)
	if err != nil {
		release()
		return nil, p.judge(c, proc.because(ctx, p.launch.pin.Name, err))
	}
	return &stream{s, sync.OnceFunc(release)}, nil
}

// stream keeps the way open for as long as it lasts.
type stream struct {
	io.ReadWriteCloser
	release func()
}

func (s *stream) Close() error {
	defer s.release()
	return s.ReadWriteCloser.Close()
}

// admit finds the run that takes a call, counts the call, and opens the way to
// the addresses in its configuration until release.
func (h *Host) admit(ctx context.Context, p *plugin, driver, kind string, config json.RawMessage) (_ *plugin, _ *process, release func(), err error) {
	switch {
	case p == nil && kind == "":
		return nil, nil, nil, errs.New(errs.UnsupportedDriver, "no hosted driver %s", driver)
	case p == nil:
		return nil, nil, nil, errs.New(errs.UnsupportedDriver, "no hosted driver %s implements %s", driver, kind)
	}
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		return nil, nil, nil, errs.Retry(errs.Unavailable, "plugins are stopped")
	}
	h.calls.Add(1)
	h.mu.Unlock()
	proc := p.process()
	if proc == nil {
		h.calls.Done()
		return nil, nil, nil, unavailable(p.launch.pin.Name)
	}
	if release, err = p.admit(ctx, driver, config); err != nil {
		h.calls.Done()
		return nil, nil, nil, err
	}
	return p, proc, release, nil
}

// because adds to an error of a call what became of the plugin: a lost
// connection alone does not say that the kernel killed it, nor does a plugin's
// own error that it could not start another task.
func (p *process) because(ctx context.Context, name string, err error) error {
	var own *errs.Error
	if !errors.As(err, &own) {
		return err
	}
	if own.Code != errs.Unreachable {
		if n := tasksRefused(p.cgroup, p.limits); n > p.refused.Swap(n) {
			return &errs.Error{Code: own.Code, Retryable: own.Retryable, Message: own.Message + ": " + refusedTask(p.limits)}
		}
		return err
	}
	timer := time.NewTimer(attend)
	defer timer.Stop()
	select {
	case <-p.ended:
		return &peer.Broken{Err: errs.Retry(errs.Unreachable, "plugin %s ended during the call: %v", name, p.err)}
	case <-timer.C:
	case <-ctx.Done():
	}
	return err
}

// judge takes a plugin's "unavailable, come again" only for an operation that
// it listed as retry-safe. The sdk does so too, but no plugin must use it, and to
// others this code alone says that nothing ran, whatever the operation.
func (p *plugin) judge(c Call, err error) error {
	var own *errs.Error
	if !errors.As(err, &own) || !own.Retryable || own.Code != errs.Unavailable {
		return err
	}
	for _, m := range p.first {
		if m.ID == c.Driver && slices.Contains(m.RetrySafe, c.Kind+"."+c.Operation) {
			return err
		}
	}
	return errs.New(own.Code, "%s", own.Message)
}

// Health asks every running plugin whether it can serve, by plugin name; the
// value is nil or says why not.
func (h *Host) Health(ctx context.Context) map[string]error {
	answers := map[string]error{}
	for _, p := range h.plugins {
		name := p.launch.pin.Name
		proc := p.process()
		if proc == nil {
			answers[name] = unavailable(name)
			continue
		}
		serving, message, err := proc.peer.Health(ctx)
		if err == nil && !serving {
			err = errs.New(errs.DriverError, "not serving: %s", message)
		}
		answers[name] = err
	}
	return answers
}
