package driver

import (
	"context"
	"log/slog"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
)

// Context is what one call of a driver gets. Its deadline and cancellation are
// the embedded context's.
type Context struct {
	context.Context
	// Secrets resolves what the configuration refers to.
	Secrets Secrets
	// IdempotencyKey is the same whenever the same command runs again.
	IdempotencyKey string
	// Traceparent is the caller's, in the form of W3C Trace Context.
	Traceparent string
	// TargetNodeID names the machine that the call is about, if it is about one.
	TargetNodeID string
	Log          *slog.Logger

	emit func(Progress)
}

// NewContext makes a call's context. Nil secrets resolve nothing, a nil log
// discards, and a nil emit drops progress.
func NewContext(ctx context.Context, secrets Secrets, log *slog.Logger, emit func(Progress)) *Context {
	if secrets == nil {
		secrets = Delivered{}
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Context{Context: ctx, Secrets: secrets, Log: log, emit: emit}
}

// Emit reports progress. It never blocks on the caller for longer than the
// call's own stream does.
func (c *Context) Emit(p Progress) {
	if c.emit != nil {
		c.emit(p)
	}
}

// with is c with another context and another place for its progress.
func (c *Context) with(ctx context.Context, emit func(Progress)) *Context {
	d := *c
	d.Context, d.emit = ctx, emit
	return &d
}

// Ref names a secret: secret://<tenant>/<name>, or a bare name under which a
// host delivers one, such as username and password.
type Ref string

// Secrets gives out secrets by reference.
type Secrets interface {
	// Resolve answers credentials-unavailable for what it cannot give.
	Resolve(ctx context.Context, ref Ref) (secret.Value, error)
}

// Delivered holds exactly the secrets that came with a call.
type Delivered map[string]secret.Value

// Resolve gives a delivered secret.
func (d Delivered) Resolve(_ context.Context, ref Ref) (secret.Value, error) {
	v, ok := d[string(ref)]
	if !ok {
		return secret.Value{}, errs.New(errs.CredentialsUnavailable, "secret %q was not delivered with this call", clip(string(ref)))
	}
	return v, nil
}
