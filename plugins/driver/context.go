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
	// Secrets resolves only what was delivered with this call.
	Secrets        Secrets
	IdempotencyKey string
	Traceparent    string
	TargetNodeID   string
	Log            *slog.Logger

	emit func(Progress)
}

// NewContext makes a call's context; emit may be nil.
func NewContext(ctx context.Context, secrets Secrets, log *slog.Logger, emit func(Progress)) *Context {
	return &Context{Context: ctx, Secrets: secrets, Log: log, emit: emit}
}

// Emit reports progress. It never blocks on the caller for longer than the
// call's own stream does.
func (c *Context) Emit(p Progress) {
	if c.emit != nil {
		c.emit(p)
	}
}

// Secrets are the secrets of one call, by reference or by name.
type Secrets map[string]secret.Value

// Resolve gives a delivered secret; another is credentials-unavailable.
func (s Secrets) Resolve(ref string) (secret.Value, error) {
	v, ok := s[ref]
	if !ok {
		return secret.Value{}, errs.New(errs.CredentialsUnavailable, "secret %q was not delivered with this call", clip(ref))
	}
	return v, nil
}
