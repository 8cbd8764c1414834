// Package secrets asks the gateway for the secrets that a command in flight
// lists; they live in memory alone.
package secrets

import (
	"context"
	"errors"
	"fmt"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/agentv1/agentv1connect"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
)

// Resolve fetches refs for the command. It returns all of them or an error
// with code credentials-unavailable, retryable if the line was at fault.
func Resolve(ctx context.Context, client agentv1connect.SecretServiceClient, commandID string, refs []string) (map[string]secret.Value, error) {
	answer, err := client.Resolve(ctx, connect.NewRequest(&agentv1.ResolveRequest{Refs: refs, CommandId: commandID}))
	if err != nil {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("resolve secrets: %w", ctx.Err())
		}
		e := errs.New(errs.CredentialsUnavailable, "the gateway gave no secrets: %v", err)
		var refused *connect.Error
		if !errors.As(err, &refused) || refused.Code() == connect.CodeUnavailable {
			e.Retryable = true
		}
		return nil, e
	}
	values := map[string]secret.Value{}
	for _, ref := range refs {
		value, ok := answer.Msg.GetValues()[ref]
		if !ok || len(value) == 0 {
			return nil, errs.New(errs.CredentialsUnavailable, "the gateway has no value for %q", ref)
		}
		values[ref] = secret.New(value)
	}
	return values, nil
}
