package host

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
)

// Call is one operation of a driver. Config and Args are passed on unchanged.
type Call struct {
	Driver, Kind, Operation string
	Config, Args            json.RawMessage
	// Secrets are keyed by reference, or by username, password and newPassword.
	Secrets        map[string]secret.Value
	IdempotencyKey string
	Traceparent    string
	TargetNodeID   string
	// Deadline is the plugin's to keep; a second later the host gives up.
	Deadline time.Time
	// Progress may be nil.
	Progress func(phase, message string, done, total uint64)
}

// Invoke runs a call in the plugin that serves it. Its errors have codes; a
// plugin's own keep theirs. The result is as the plugin sent it: whoever asked
// judges whether it is JSON, and by which code it is refused.
func (h *Host) Invoke(ctx context.Context, c Call) (json.RawMessage, error) {
	p, ok := h.routes[route{c.Driver, c.Kind}]
	if !ok {
		return nil, errs.New(errs.UnsupportedDriver, "no hosted driver %s implements %s", c.Driver, c.Kind)
	}
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		return nil, errs.Retry(errs.Unavailable, "plugins are stopped")
	}
	h.calls.Add(1)
	h.mu.Unlock()
	defer h.calls.Done()
	proc := p.process()
	if proc == nil {
		return nil, unavailable(p.launch.pin.Name)
	}
	req := &driverv1.InvokeRequest{
		Driver: c.Driver, Kind: c.Kind, Operation: c.Operation,
		ConfigJson: string(c.Config), ArgsJson: string(c.Args), Secrets: map[string]string{},
		IdempotencyKey: c.IdempotencyKey, Traceparent: c.Traceparent, TargetNodeId: c.TargetNodeID,
	}
	for name, v := range c.Secrets {
		req.Secrets[name] = string(v.Reveal())
	}
	if n := proto.Size(req); n > bcx.MaxMessage {
		return nil, errs.New(errs.InvalidArgs, "call has %d bytes, limit %d", n, bcx.MaxMessage)
	}
	caller := ctx
	if !c.Deadline.IsZero() {
		if !time.Now().Before(c.Deadline) {
			return nil, errs.New(errs.Timeout, "the deadline of %s.%s is over", c.Kind, c.Operation)
		}
		req.DeadlineMs = c.Deadline.UnixMilli()
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, c.Deadline.Add(bcx.Grace))
		defer cancel()
	}
	result, err := invoke(ctx, proc.client, req, c.Progress)
	if err != nil {
		return nil, p.judge(c, explain(caller, ctx, p.launch.pin.Name, err))
	}
	return result, nil
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

func invoke(ctx context.Context, client *bcx.Client, req *driverv1.InvokeRequest, progress func(string, string, uint64, uint64)) (json.RawMessage, error) {
	// Leaving the stream early must free the plugin's side too.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := client.Invoke(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	for stream.Receive() {
		switch e := stream.Msg().GetEvent().(type) {
		case *driverv1.InvokeResponse_Progress:
			if progress != nil {
				progress(e.Progress.GetPhase(), e.Progress.GetMessage(), e.Progress.GetDone(), e.Progress.GetTotal())
			}
		case *driverv1.InvokeResponse_Result:
			return json.RawMessage(e.Result.GetResultJson()), nil
		case *driverv1.InvokeResponse_Error:
			return nil, bcx.FromWire(e.Error)
		}
	}
	if err := stream.Err(); err != nil {
		return nil, err
	}
	return nil, errs.New(errs.DriverError, "the call ended without a result")
}

// explain gives an error of the connection its code. One that is the plugin's
// own has it already.
func explain(caller, ctx context.Context, name string, err error) error {
	var own *errs.Error
	if errors.As(err, &own) {
		return own
	}
	switch {
	case errors.Is(caller.Err(), context.Canceled):
		return errs.New(errs.Cancelled, "call of plugin %s was cancelled", name)
	case ctx.Err() != nil:
		return errs.Retry(errs.Timeout, "plugin %s did not answer in time", name)
	case connect.CodeOf(err) == connect.CodeResourceExhausted:
		return errs.New(errs.InvalidArgs, "message over %d bytes: %v", bcx.MaxMessage, err)
	case connect.CodeOf(err) == connect.CodeUnimplemented:
		return errs.New(errs.UnsupportedOperation, "plugin %s: %v", name, err)
	case connect.IsWireError(err) && connect.CodeOf(err) != connect.CodeUnavailable:
		return errs.New(errs.DriverError, "plugin %s: %v", name, err)
	}
	return errs.Retry(errs.Unreachable, "connection to plugin %s was lost: %v", name, err)
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
		r, err := proc.client.Health(ctx, connect.NewRequest(&driverv1.HealthRequest{}))
		switch {
		case err != nil:
			answers[name] = explain(ctx, ctx, name, err)
		case r.Msg.GetStatus() != driverv1.HealthResponse_STATUS_SERVING:
			answers[name] = errs.New(errs.DriverError, "not serving: %s", r.Msg.GetMessage())
		default:
			answers[name] = nil
		}
	}
	return answers
}
