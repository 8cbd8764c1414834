package site

import (
	"context"
	"io"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/agent/grants"
	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/site/config"
	"github.com/better-compute/site-appliance/appliance/site/reach"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/bmc/manual"
	"github.com/better-compute/site-appliance/bmc/redfish"
	"github.com/better-compute/site-appliance/bmc/relay"
	"github.com/better-compute/site-appliance/bmc/wol"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// logOutWithin bounds the end of the sessions on all BMCs.
const logOutWithin = 10 * time.Second

// builtIn makes the drivers that need no plugin, the desk where people confirm
// what driver manual asked of them, and what logs out of every BMC.
func (s *site) builtIn(cfg *config.Site, book *addressbook.Book) (own []*driver.Definition, desk *manual.Desk, logOut func(), err error) {
	log := s.Log.With("part", "drivers")
	overRedfish, end, err := redfish.New(redfish.Options{
		Roots: s.authorities(cfg), Legacy: legacyBMCs(cfg), Spool: s.StateDir, Own: s.ownImage, Refuse: noImageFrom(book), Log: log,
	})
	if err != nil {
		return nil, nil, nil, err
	}
	wake, err := wol.New(wol.Options{Broadcast: broadcaster(cfg)})
	if err != nil {
		return nil, nil, nil, err
	}
	confirmed := ""
	if s.StateDir != "" {
		confirmed = filepath.Join(s.StateDir, "manual.json")
	}
	byHand, desk, err := manual.New(manual.Options{File: confirmed, Tell: s.tellAsked, Log: log})
	if err != nil {
		return nil, nil, nil, err
	}
	return []*driver.Definition{overRedfish, wake, byHand}, desk, func() {
		ctx, cancel := context.WithTimeout(context.Background(), logOutWithin)
		defer cancel()
		end(ctx)
	}, nil
}

// BMCKinds are the command kinds that the relay serves; bmc.console, a stream, is
// served elsewhere. A firmware update keeps its place in the BMC's queue to its
// end: what else is asked of a board that is being flashed can ruin it.
func BMCKinds(r *relay.Relay) []dispatch.Kind {
	kinds := []dispatch.Kind{bindKind(r)}
	for _, k := range relay.Kinds() {
		if k.Name == relay.Console {
			continue
		}
		kind := dispatch.Kind{
			Name: k.Name, Lane: k.Lane, Roles: siteOnly,
			Decode: func(args []byte) (dispatch.Operation, error) { return decodeBMC(r, k.Name, args) },
			Ready: func(ctx context.Context, op dispatch.Operation) error {
				return r.Ready(ctx, op.Value.(*bmcv1.BmcOperationRequest))
			},
			Run:     func(ctx context.Context, call dispatch.Call) ([]byte, error) { return runBMC(ctx, r, k.Name, call) },
			Recover: repeatIfSafe,
		}
		if k.Name == relay.Rotate {
			kind.Recover = func(ctx context.Context, call dispatch.Call) dispatch.Verdict { return recoverRotation(ctx, r, call) }
		}
		kinds = append(kinds, kind)
	}
	return kinds
}

// ownImage opens a firmware image that the box itself offers at a URL.
func (s *site) ownImage(ctx context.Context, url string) (io.ReadCloser, error) {
	if s.media == nil {
		return nil, nil
	}
	return s.media.Own(ctx, url)
}

// noImageFrom says why no firmware image is fetched from an address: a URL is
// anybody's word, and the box reaches what others do not.
func noImageFrom(book *addressbook.Book) func(netip.Addr) string {
	return func(a netip.Addr) string {
		own, err := reach.Own()
		if err != nil {
			return "cannot be told from the box's own"
		}
		return reach.Refuse(a.Unmap(), own, func(a netip.Addr) bool { return book.Has(a.String()) })
	}
}

// decodeBMC reads an operation for a BMC; bmc.console's too.
func decodeBMC(r *relay.Relay, kind string, args []byte) (dispatch.Operation, error) {
	op := &bmcv1.BmcOperationRequest{}
	if err := envelope.StrictUnmarshal(args, op); err != nil {
		return dispatch.Operation{}, err
	}
	o, err := r.Check(kind, op)
	if err != nil {
		return dispatch.Operation{}, err
	}
	return operationOf(op.Operation, o, op), nil
}

func operationOf(name string, o relay.Operation, value any) dispatch.Operation {
	return dispatch.Operation{
		Name: name, Key: o.Key, Destructive: o.Destructive, Counts: o.Counts, Always: o.Always, RetrySafe: o.RetrySafe,
		Targets: []string{grants.BMC(o.Key)}, Action: o.Action, Artifacts: slices.Clone(o.Artifacts), Value: value,
	}
}

func runBMC(ctx context.Context, r *relay.Relay, kind string, call dispatch.Call) ([]byte, error) {
	result, err := r.Do(ctx, requestOf(kind, call))
	if err != nil {
		return nil, err
	}
	return proto.Marshal(result)
}

// requestOf is a command as the relay takes it.
func requestOf(kind string, call dispatch.Call) relay.Request {
	return relay.Request{
		Kind: kind, Op: call.Operation.Value.(*bmcv1.BmcOperationRequest), CommandID: call.Payload.CommandId, TargetNodeID: call.Payload.TargetNodeId,
		Traceparent: call.Payload.Traceparent, Deadline: call.Deadline, Secrets: call.Secrets, Progress: call.Progress, Release: call.Release,
	}
}

// bindKind ties a BMC's address to another credential, pin, driver or protection.
func bindKind(r *relay.Relay) dispatch.Kind {
	return dispatch.Kind{
		Name: relay.Bind, Lane: cmdkind.Lane(relay.Bind), Roles: siteOnly,
		Decode: func(args []byte) (dispatch.Operation, error) {
			req := &bmcv1.BmcBindRequest{}
			if err := envelope.StrictUnmarshal(args, req); err != nil {
				return dispatch.Operation{}, err
			}
			o, err := relay.CheckBind(req)
			if err != nil {
				return dispatch.Operation{}, err
			}
			return operationOf("bind", o, req), nil
		},
		Run: func(_ context.Context, call dispatch.Call) ([]byte, error) {
			if err := r.Bind(call.Operation.Value.(*bmcv1.BmcBindRequest)); err != nil {
				return nil, err
			}
			return proto.Marshal(&bmcv1.BmcBindResult{})
		},
		Recover: repeatIfSafe,
	}
}

// askAgain is the pause before the line is asked again for the passwords of an
// interrupted rotation: the box may have just started.
const askAgain = 2 * time.Second

// recoverRotation finds out what became of a rotation that was cut off. The
// built-in driver logs in with the new password first and with the old one where
// that fails, so that rotating again ends the rotation, whichever of the two
// holds. A hosted driver promises no such thing.
func recoverRotation(ctx context.Context, r *relay.Relay, call dispatch.Call) dispatch.Verdict {
	if op := call.Operation.Value.(*bmcv1.BmcOperationRequest); op.GetDriver() != redfish.ID {
		return repeatIfSafe(ctx, call)
	}
	for {
		result, err := runBMC(ctx, r, relay.Rotate, call)
		if err == nil {
			return dispatch.Done(result)
		}
		if e := errs.From(err); e.Code != errs.CredentialsUnavailable || !e.Retryable {
			return dispatch.Interrupted()
		}
		select {
		case <-ctx.Done():
			return dispatch.Interrupted()
		case <-time.After(askAgain):
		}
	}
}

// repeatIfSafe is the recovery of what leaves no trace to look at: a repeat
// where a repeat does no harm, and an honest "interrupted" elsewhere.
func repeatIfSafe(_ context.Context, call dispatch.Call) dispatch.Verdict {
	if call.Operation.RetrySafe {
		return dispatch.Rerun()
	}
	return dispatch.Interrupted()
}
