package site

import (
	"context"
	"encoding/json"
	"net"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/agent/grants"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/relay"
	"github.com/better-compute/site-appliance/plugins/host"
	"github.com/better-compute/site-appliance/pxe/assign"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

var siteOnly = []agentv1.Role{agentv1.Role_ROLE_SITE}

// assigned is the event by which the gateway learns which version is in force: one
// that is behind, such as one that was restored, or of a box that lost its own.
const assigned = "pxe.assigned"

// assignKind replaces the site's boot decisions.
func assignKind(store *assign.Store, emit func(name, class, key string, body any)) dispatch.Kind {
	result := func() []byte {
		out, _ := proto.Marshal(&pxev1.AssignResult{Version: store.Version()})
		return out
	}
	return dispatch.Kind{
		Name: cmdkind.Assign, Lane: cmdkind.Lane(cmdkind.Assign), Roles: siteOnly,
		Decode: func(args []byte) (dispatch.Operation, error) {
			req := &pxev1.AssignRequest{}
			if err := envelope.StrictUnmarshal(args, req); err != nil {
				return dispatch.Operation{}, err
			}
			c := store.Changes(req)
			op := dispatch.Operation{Name: "pxe.assign", Key: "pxe.assign", Destructive: true, Counts: len(c.Machines) > 0, Always: c.Protected, Artifacts: c.Artifacts, Value: req}
			// Versions make a repeat harmless: the store takes each at most once.
			op.RetrySafe = true
			for _, id := range c.Machines {
				op.Targets = append(op.Targets, grants.Machine(id))
			}
			return op, nil
		},
		Run: func(_ context.Context, call dispatch.Call) ([]byte, error) {
			// Only what people granted takes a protection away, and only where it
			// names the machine.
			var unprotect []string
			if call.Granted {
				for _, target := range call.Operation.Targets {
					unprotect = append(unprotect, strings.TrimPrefix(target, grants.Machine("")))
				}
			}
			inForce, err := store.Apply(call.Operation.Value.(*pxev1.AssignRequest), unprotect...)
			if errs.CodeOf(err) == errs.StaleVersion {
				emit(assigned, "state", "", map[string]uint64{"version": inForce})
			}
			if err != nil {
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

// explainKind says what a machine would get from network boot, and why, and what it did.
func explainKind(explain func(mac string) (*pxev1.ExplainResult, error)) dispatch.Kind {
	return dispatch.Kind{
		Name: cmdkind.Explain, Lane: cmdkind.Lane(cmdkind.Explain), Roles: siteOnly,
		Decode: func(args []byte) (dispatch.Operation, error) {
			req := &pxev1.ExplainRequest{}
			if err := envelope.StrictUnmarshal(args, req); err != nil {
				return dispatch.Operation{}, err
			}
			hw, err := net.ParseMAC(req.Mac)
			if err != nil || len(hw) != 6 {
				return dispatch.Operation{}, errs.New(errs.InvalidArgs, "mac %.40q: want six bytes such as 52:54:00:12:34:56", req.Mac)
			}
			return dispatch.Operation{Name: cmdkind.Explain, RetrySafe: true, Value: hw.String()}, nil
		},
		Run: func(_ context.Context, call dispatch.Call) ([]byte, error) {
			out, err := explain(call.Operation.Value.(string))
			if err != nil {
				return nil, err
			}
			return proto.Marshal(out)
		},
		Recover: func(context.Context, dispatch.Call) dispatch.Verdict { return dispatch.Rerun() },
	}
}

// invoker lets the relay reach the plugin host.
type invoker struct{ host *host.Host }

func (i invoker) Invoke(ctx context.Context, c relay.Call) (json.RawMessage, error) {
	return i.host.Invoke(ctx, hostCall(c))
}

// RetrySafe is what the hosted driver's manifest says.
func (i invoker) RetrySafe(driver, concern, operation string) (safe, known bool) {
	for _, m := range i.host.Drivers() {
		if m.ID == driver {
			return m.IsRetrySafe(concern, operation), true
		}
	}
	return false, false
}

func hostCall(c relay.Call) host.Call {
	return host.Call{
		Driver: c.Driver, Kind: c.Concern, Operation: c.Operation, Config: c.Config, Args: c.Args, Secrets: c.Secrets,
		IdempotencyKey: c.IdempotencyKey, Traceparent: c.Traceparent, TargetNodeID: c.TargetNodeID,
		Deadline: c.Deadline, Progress: c.Progress,
	}
}
