package instances

import (
	"context"
	"encoding/json"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// The command kinds.
const (
	ApplyKind    = "instance.apply"
	RemoveKind   = "instance.remove"
	ListKind     = "instance.list"
	SnapshotKind = "instance.snapshot"
)

const lane = "provision"

var nodeOnly = []agentv1.Role{agentv1.Role_ROLE_NODE}

// Kinds are the command kinds that the converger serves. All may run twice: a
// generation that is there already changes nothing.
func (v *Converger) Kinds() []dispatch.Kind {
	again := func(context.Context, dispatch.Call) dispatch.Verdict { return dispatch.Rerun() }
	kind := func(name string, decode func([]byte) (dispatch.Operation, error), run func(context.Context, dispatch.Call) ([]byte, error)) dispatch.Kind {
		return dispatch.Kind{Name: name, Lane: lane, Roles: nodeOnly, Decode: decode, Run: run, Recover: again}
	}
	return []dispatch.Kind{
		kind(ApplyKind, decodeApply, func(ctx context.Context, call dispatch.Call) ([]byte, error) {
			s, err := v.Apply(ctx, call.Operation.Value.(Spec))
			if err != nil {
				return nil, err
			}
			return answer(s)
		}),
		kind(RemoveKind, decodeRemove, func(ctx context.Context, call dispatch.Call) ([]byte, error) {
			req := call.Operation.Value.(*agentv1.InstanceRemoveRequest)
			s, gone, err := v.Remove(ctx, req.GetInstanceId(), req.GetGeneration())
			switch {
			case err != nil:
				return nil, err
			case gone:
				return answer()
			}
			return answer(s)
		}),
		kind(ListKind, decodeList, func(context.Context, dispatch.Call) ([]byte, error) { return answer(v.List()...) }),
		// No runtime takes snapshots: a command that asks for one is refused by a
		// name that tells it from a kind that is not known.
		kind(SnapshotKind, decodeSnapshot, func(context.Context, dispatch.Call) ([]byte, error) { return nil, errSnapshot }),
	}
}

func operation(name, id string, value any) dispatch.Operation {
	return dispatch.Operation{Name: name, Key: "instance " + id, RetrySafe: true, Value: value}
}

func decodeApply(args []byte) (dispatch.Operation, error) {
	req := &agentv1.InstanceApplyRequest{}
	if err := envelope.StrictUnmarshal(args, req); err != nil {
		return dispatch.Operation{}, err
	}
	in := req.GetInstance()
	s := Spec{Runtime: in.GetRuntime()}
	s.ID, s.Name, s.Generation, s.Config = in.GetInstanceId(), in.GetName(), in.GetGeneration(), json.RawMessage(in.GetSpecJson())
	if err := s.check(); err != nil {
		return dispatch.Operation{}, err
	}
	return operation(ApplyKind, s.ID, s), nil
}

func decodeRemove(args []byte) (dispatch.Operation, error) {
	req := &agentv1.InstanceRemoveRequest{}
	if err := envelope.StrictUnmarshal(args, req); err != nil {
		return dispatch.Operation{}, err
	}
	if !idForm.MatchString(req.GetInstanceId()) || req.GetGeneration() == 0 {
		return dispatch.Operation{}, errs.New(errs.InvalidArgs, "instance %.80q, generation %d: want an id, and a generation from 1", req.GetInstanceId(), req.GetGeneration())
	}
	return operation(RemoveKind, req.GetInstanceId(), req), nil
}

func decodeList(args []byte) (dispatch.Operation, error) {
	req := &agentv1.InstanceListRequest{}
	if err := envelope.StrictUnmarshal(args, req); err != nil {
		return dispatch.Operation{}, err
	}
	return dispatch.Operation{Name: ListKind, Key: ListKind, RetrySafe: true, Value: req}, nil
}

var errSnapshot = errs.New(errs.UnsupportedOperation, "no runtime of this node takes snapshots")

func decodeSnapshot([]byte) (dispatch.Operation, error) { return dispatch.Operation{}, errSnapshot }

func answer(all ...Status) ([]byte, error) {
	res := &agentv1.InstanceResult{}
	for _, s := range all {
		res.Instances = append(res.Instances, &agentv1.InstanceStatus{
			InstanceId: s.ID, Runtime: s.Runtime, State: s.State, Message: s.Message, Generation: s.Generation, Orphan: s.Orphan,
		})
	}
	return proto.Marshal(res)
}
