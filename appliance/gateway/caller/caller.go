// Package caller carries, in a request's context, the agent whose certificate
// the request came with.
package caller

import (
	"context"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

type key struct{}

// With is a context of a request that this agent made.
func With(ctx context.Context, a store.Agent) context.Context {
	return context.WithValue(ctx, key{}, a)
}

// From is the agent that made the request, or not-enrolled.
func From(ctx context.Context) (store.Agent, error) {
	a, ok := ctx.Value(key{}).(store.Agent)
	if !ok {
		return store.Agent{}, errs.New(errs.NotEnrolled, "this call needs an agent's certificate")
	}
	return a, nil
}

// Error is how an error with a code of the line home travels in an RPC: the
// code stands before the message and, with the retryable flag, in a detail.
func Error(err error) *connect.Error {
	e := errs.From(err)
	code := connect.CodeInternal
	switch e.Code {
	case errs.NotEnrolled, errs.SignatureInvalid, errs.KeyUnknown, errs.SignatureRequired:
		code = connect.CodeUnauthenticated
	case errs.Revoked, errs.Superseded, errs.IdentityCloned, errs.TokenUsed, errs.RoleMismatch, errs.WrongAgent, errs.Expired, errs.CredentialsUnavailable:
		code = connect.CodePermissionDenied
	case errs.ProtocolUnsupported, errs.InvalidPayload, errs.InvalidArgs, errs.InvalidConfig:
		code = connect.CodeInvalidArgument
	case errs.Draining, errs.Unavailable, errs.Unreachable:
		code = connect.CodeUnavailable
	case errs.RateLimited, errs.NoSpace:
		code = connect.CodeResourceExhausted
	case errs.Timeout:
		code = connect.CodeDeadlineExceeded
	case errs.Cancelled:
		code = connect.CodeCanceled
	}
	out := connect.NewError(code, e)
	if detail, derr := connect.NewErrorDetail(&agentv1.Error{Code: string(e.Code), Message: e.Message, Retryable: e.Retryable}); derr == nil {
		out.AddDetail(detail)
	}
	return out
}
