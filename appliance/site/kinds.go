package site

import (
	"context"
	"encoding/json"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/bmc/relay"
	"github.com/better-compute/site-appliance/plugins/host"
	"github.com/better-compute/site-appliance/pxe/assign"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

var siteOnly = []agentv1.Role{agentv1.Role_ROLE_SITE}

// bmcKinds are the command kinds that the relay serves.
func bmcKinds(r *relay.Relay) []dispatch.Kind {
	var kinds []dispatch.Kind
	for _, k := range []struct{ name, lane string }{{"bmc.query", "query"}, {"bmc.boot", "power"}, {"bmc.power", "power"}, {"bmc.media", "provision"}} {
		kinds = append(kinds, dispatch.Kind{
			Name: k.name, Lane: k.lane, Roles: siteOnly,
			Decode: func(args []byte) (dispatch.Operation, error) {
				op := &bmcv1.BmcOperationRequest{}
				if err := envelope.StrictUnmarshal(args, op); err != nil {
					return dispatch.Operation{}, err
				}
				o, err := relay.Check(k.name, op)
				if err != nil {
					return dispatch.Operation{}, err
				}
				return dispatch.Operation{Name: op.Operation, Key: o.Key, Destructive: o.Destructive, Counts: o.Destructive, RetrySafe: o.RetrySafe, Value: op}, nil
			},
			Run:     func(ctx context.Context, call dispatch.Call) ([]byte, error) { return runBMC(ctx, r, k.name, call) },
			Recover: repeatIfSafe,
		})
	}
	return kinds
}

func runBMC(ctx context.Context, r *relay.Relay, kind string, call dispatch.Call) ([]byte, error) {
	op := call.Operation.Value.(*bmcv1.BmcOperationRequest)
	result, err := r.Do(ctx, relay.Request{
		Kind: kind, Op: op, CommandID: call.Payload.CommandId, TargetNodeID: call.Payload.TargetNodeId, Traceparent: call.Payload.Traceparent, Deadline: call.Deadline,
		Credentials: func(ctx context.Context) (map[string]secret.Value, error) {
			values, err := call.Secrets(ctx, op.CredentialsRef)
			if err != nil {
				return nil, err
			}
			return credential(op.CredentialsRef, values[op.CredentialsRef])
		},
		Progress: call.Progress,
	})
	if err != nil {
		return nil, err
	}
	return proto.Marshal(result)
}

// credential takes a BMC credential, {"username", "password"}, apart.
func credential(ref string, value secret.Value) (map[string]secret.Value, error) {
	var c struct {
		Username string `json:"username"`
		Password string `json:"password"`
	}
	if err := json.Unmarshal(value.Reveal(), &c); err != nil {
		return nil, errs.New(errs.CredentialsUnavailable, "%s is no JSON object with username and password", ref)
	}
	return map[string]secret.Value{"username": secret.New([]byte(c.Username)), "password": secret.New([]byte(c.Password))}, nil
}

// repeatIfSafe is the recovery of what leaves no trace to look at: a repeat
// where a repeat does no harm, and an honest "interrupted" elsewhere.
func repeatIfSafe(_ context.Context, call dispatch.Call) dispatch.Verdict {
	if call.Operation.RetrySafe {
		return dispatch.Rerun()
	}
	return dispatch.Interrupted()
}

// assignKind replaces the site's boot decisions.
func assignKind(store *assign.Store) dispatch.Kind {
	result := func() []byte {
		out, _ := proto.Marshal(&pxev1.AssignResult{Version: store.Version()})
		return out
	}
	return dispatch.Kind{
		Name: "pxe.assign", Lane: "provision", Roles: siteOnly,
		Decode: func(args []byte) (dispatch.Operation, error) {
			req := &pxev1.AssignRequest{}
			if err := envelope.StrictUnmarshal(args, req); err != nil {
				return dispatch.Operation{}, err
			}
			// Versions make a repeat harmless: the store takes each at most once.
			return dispatch.Operation{Name: "pxe.assign", Key: "pxe.assign", Destructive: true, Counts: true, RetrySafe: true, Value: req}, nil
		},
		Run: func(_ context.Context, call dispatch.Call) ([]byte, error) {
			if _, err := store.Apply(call.Operation.Value.(*pxev1.AssignRequest)); err != nil {
				return nil, err
			}
			return result(), nil
		},
		Recover: func(_ context.Context, call dispatch.Call) dispatch.Verdict {
			if store.Version() >= call.Operation.Value.(*pxev1.AssignRequest).Version {
				return dispatch.Done(result())
			}
			return dispatch.Rerun()
		},
	}
}

// invoker lets the relay reach the plugin host.
type invoker struct{ host *host.Host }

func (i invoker) Invoke(ctx context.Context, c relay.Call) (json.RawMessage, error) {
	return i.host.Invoke(ctx, host.Call{
		Driver: c.Driver, Kind: c.Concern, Operation: c.Operation, Config: c.Config, Args: c.Args, Secrets: c.Secrets,
		IdempotencyKey: c.IdempotencyKey, Traceparent: c.Traceparent, TargetNodeID: c.TargetNodeID,
		Deadline: c.Deadline, Progress: c.Progress,
	})
}
