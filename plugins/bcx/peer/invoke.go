package peer

import (
	"context"
	"encoding/json"
	"time"
	"unicode/utf8"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
)

// tail is how long a call whose answer is there waits for the stream's own end.
// Ending it from here resets the stream, and servers count resets as abuse.
const tail = 100 * time.Millisecond

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

// request is c as it crosses the wire.
func (c Call) request() (*driverv1.InvokeRequest, error) {
	config, args := string(c.Config), string(c.Args)
	if err := isText(c.Secrets, c.Driver, c.Kind, c.Operation, config, args, c.IdempotencyKey, c.Traceparent, c.TargetNodeID); err != nil {
		return nil, err
	}
	req := &driverv1.InvokeRequest{
		Driver: c.Driver, Kind: c.Kind, Operation: c.Operation,
		ConfigJson: config, ArgsJson: args, Secrets: reveal(c.Secrets),
		IdempotencyKey: c.IdempotencyKey, Traceparent: c.Traceparent, TargetNodeId: c.TargetNodeID,
	}
	if !c.Deadline.IsZero() {
		if !time.Now().Before(c.Deadline) {
			return nil, errs.New(errs.Timeout, "the deadline of %s.%s is over", c.Kind, c.Operation)
		}
		req.DeadlineMs = c.Deadline.UnixMilli()
	}
	return req, fits(req)
}

// fits refuses a message that the other side would not take.
func fits(m proto.Message) error {
	if n := proto.Size(m); n > bcx.MaxMessage {
		return errs.New(errs.InvalidArgs, "call has %d bytes, limit %d", n, bcx.MaxMessage)
	}
	return nil
}

// isText refuses strings that have no form on the wire.
func isText(secrets map[string]secret.Value, texts ...string) error {
	for _, s := range texts {
		if !utf8.ValidString(s) {
			return errs.New(errs.InvalidArgs, "the call holds text that is not UTF-8")
		}
	}
	for name, v := range secrets {
		if !utf8.ValidString(name) || !utf8.Valid(v.Reveal()) {
			return errs.New(errs.CredentialsUnavailable, "a secret of the call is not UTF-8")
		}
	}
	return nil
}

func reveal(secrets map[string]secret.Value) map[string]string {
	if len(secrets) == 0 {
		return nil
	}
	out := make(map[string]string, len(secrets))
	for name, v := range secrets {
		out[name] = string(v.Reveal())
	}
	return out
}

// guard keeps secrets out of what the plugin prints from now on.
func (p *Peer) guard(secrets map[string]secret.Value) (release func()) {
	list := make([]secret.Value, 0, len(secrets))
	for _, v := range secrets {
		list = append(list, v)
	}
	return p.o.Redact.Add(list...)
}

// Invoke runs a call. Its errors have codes; a plugin's own keep theirs. The
// result is as the plugin sent it: whoever asked judges whether it is JSON.
// Whatever a plugin sends after its result or error is ignored.
func (p *Peer) Invoke(ctx context.Context, c Call) (json.RawMessage, error) {
	req, err := c.request()
	if err != nil {
		return nil, err
	}
	defer p.guard(c.Secrets)()
	caller := ctx
	ctx, cancel := until(ctx, c.Deadline)
	// Leaving the stream early must free the plugin's side too.
	defer cancel()
	stream, err := p.client.Invoke(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, p.explain(caller, ctx, err)
	}
	defer stream.Close()
	end := func() {
		timer := time.AfterFunc(tail, cancel)
		defer timer.Stop()
		stream.Receive()
	}
	for stream.Receive() {
		switch e := stream.Msg().GetEvent().(type) {
		case *driverv1.InvokeResponse_Progress:
			if c.Progress != nil {
				c.Progress(p.text(e.Progress.GetPhase()), p.text(e.Progress.GetMessage()), e.Progress.GetDone(), e.Progress.GetTotal())
			}
		case *driverv1.InvokeResponse_Result:
			end()
			return p.result(c, e.Result)
		case *driverv1.InvokeResponse_Error:
			end()
			return nil, p.fromWire(e.Error)
		}
	}
	if err := stream.Err(); err != nil {
		return nil, p.explain(caller, ctx, err)
	}
	return nil, p.lost("the call ended without a result")
}

func (p *Peer) result(c Call, r *driverv1.Result) (json.RawMessage, error) {
	raw := json.RawMessage(r.GetResultJson())
	if limit := p.o.MaxResultBytes; limit > 0 && len(raw) > limit {
		return nil, errs.New(errs.DriverError, "the result of %s.%s has %d bytes, limit %d", c.Kind, c.Operation, len(raw), limit)
	}
	return raw, nil
}

// Validate has a driver of the plugin check a configuration.
func (p *Peer) Validate(ctx context.Context, driver string, config json.RawMessage, secrets map[string]secret.Value, deadline time.Time) error {
	if err := isText(secrets, driver, string(config)); err != nil {
		return err
	}
	req := &driverv1.ValidateRequest{Driver: driver, ConfigJson: string(config), Secrets: reveal(secrets)}
	if err := fits(req); err != nil {
		return err
	}
	if !deadline.IsZero() {
		if !time.Now().Before(deadline) {
			return errs.New(errs.Timeout, "the deadline of validating is over")
		}
		req.DeadlineMs = deadline.UnixMilli()
	}
	defer p.guard(secrets)()
	caller := ctx
	ctx, cancel := until(ctx, deadline)
	defer cancel()
	r, err := p.client.Validate(ctx, connect.NewRequest(req))
	if err != nil {
		return p.explain(caller, ctx, err)
	}
	if e := r.Msg.GetError(); e != nil {
		return p.fromWire(e)
	}
	return nil
}
