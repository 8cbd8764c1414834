package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/placement"
	"github.com/better-compute/site-appliance/appliance/gateway/settle"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
)

// Settle does what is left to do when a BMC's rotation or rebinding has ended.
type Settle interface {
	// Rebind sends the command, and makes r the machine's own once it is done.
	Rebind(ctx context.Context, r store.Rebind, spec commands.Spec) (id string, err error)
	// Alone refuses a credential that several machines share.
	Alone(ctx context.Context, m store.Machine, credentialsRef string) error
	// Doubtful reports whether a rotation of the credential ended unclear, and
	// Settle has it tried again now and waits for its end.
	Doubtful(ctx context.Context, credentialsRef string) bool
	Settle(ctx context.Context, credentialsRef string) (settled bool)
}

// metalWrite is what all but queries need.
const metalWrite = "compute:metal:write"

// settleWithin bounds how long a query waits for the end of a rotation.
const settleWithin = 150 * time.Second

// allowed refuses a caller without the permission. The guard has asked for the
// least that the call may need.
func allowed(ctx context.Context, permission string) error {
	p, ok := ctx.Value(principalKey{}).(principal)
	if !ok || !slices.Contains(p.token.Permissions, permission) && !slices.Contains(p.token.Permissions, AllPermissions) {
		return apierr.Denied("the token lacks %s", permission)
	}
	return nil
}

// ask is send for a query. Where a rotation of the BMC's credential ended
// unclear, a failure may be its doing: it is settled first, and the BMC asked again.
func (s metalService) ask(ctx context.Context, m store.Machine, box store.Agent, enrolled bool, c metal.Command) (id string, result []byte, err error) {
	id, result, err = s.send(ctx, m, box, enrolled, c)
	var e *errs.Error
	if id == "" || !errors.As(err, &e) || s.Settle == nil || !s.Settle.Doubtful(ctx, m.BMC.CredentialsRef) {
		return id, result, err
	}
	within, cancel := context.WithTimeout(ctx, settleWithin)
	defer cancel()
	if !s.Settle.Settle(within, m.BMC.CredentialsRef) {
		doubt := *e
		doubt.Message += "; a rotation of its credential ended unclear, so that the BMC may have either password: metal rotate tries both again"
		return id, nil, &doubt
	}
	return s.send(ctx, m, box, enrolled, c)
}

// Operate runs one operation of the machine's BMC driver. A query is answered;
// of anything else the command's id is.
func (s metalService) Operate(ctx context.Context, req *connect.Request[computev1.OperateRequest]) (*connect.Response[computev1.OperateResponse], error) {
	in := req.Msg
	m, err := s.Store.Machine(ctx, in.TenantId, in.Machine)
	if err != nil {
		return nil, err
	}
	c, query, err := metal.Operate(m.BMC, in.Operation, in.ArgsJson)
	if !query {
		// What is no query is nobody's to try out either.
		if err := allowed(ctx, metalWrite); err != nil {
			return nil, err
		}
	}
	if err != nil {
		return nil, err
	}
	box, enrolled, err := s.serves(ctx, m, func(kinds []string) error { return s.Metal.CheckOperation(in.Operation, m.BMC.Driver, kinds) })
	if err != nil {
		return nil, err
	}
	if !query {
		id, _, err := s.sendOnly(ctx, m, box, enrolled, c)
		s.audit(ctx, m.SiteID, m.ID, "bmc.operated", map[string]string{"operation": in.Operation, "command": id, "code": string(errs.CodeOf(err))})
		if err != nil {
			return nil, err
		}
		return connect.NewResponse(&computev1.OperateResponse{CommandId: id}), nil
	}
	id, result, err := s.ask(ctx, m, box, enrolled, c)
	if err != nil {
		return nil, err
	}
	var answer bmcv1.BmcOperationResult
	if err := proto.Unmarshal(result, &answer); err != nil {
		return nil, fmt.Errorf("read the answer to %s: %w", c.Kind, err)
	}
	return connect.NewResponse(&computev1.OperateResponse{CommandId: id, ResultJson: answer.ResultJson}), nil
}

// serves finds the machine's box and has judge refuse what its driver cannot do.
func (s metalService) serves(ctx context.Context, m store.Machine, judge func(kinds []string) error) (box store.Agent, enrolled bool, err error) {
	if box, enrolled, err = s.siteAgent(ctx, m.SiteID); err != nil {
		return store.Agent{}, false, err
	}
	var labels map[string]string
	if enrolled {
		if labels, err = s.Store.AgentLabels(ctx, box.ID); err != nil {
			return store.Agent{}, false, err
		}
	}
	return box, enrolled, judge(placement.Kinds(labels, m.BMC.Driver))
}

// GetCommand tells how far a command for one of the tenant's machines is.
func (s metalService) GetCommand(ctx context.Context, req *connect.Request[computev1.GetCommandRequest]) (*connect.Response[computev1.GetCommandResponse], error) {
	missing := apierr.Missing("command %.80q: there is none for a machine of this tenant", req.Msg.CommandId)
	c, err := s.Store.Command(ctx, req.Msg.CommandId)
	if errors.Is(err, store.ErrNotFound) || err == nil && c.TargetNodeID == "" {
		return nil, missing
	}
	if err != nil {
		return nil, err
	}
	m, err := s.Store.MachineByID(ctx, c.TargetNodeID)
	if errors.Is(err, store.ErrNotFound) || err == nil && m.TenantID != req.Msg.TenantId {
		return nil, missing
	}
	if err != nil {
		return nil, err
	}
	out := &computev1.GetCommandResponse{State: string(c.State), Progress: s.Commands.Progress(c.ID)}
	switch {
	case c.Err != nil:
		out.ErrorCode, out.ErrorMessage = string(c.Err.Code), c.Err.Message
	case c.State == store.CommandDone:
		out.ResultJson = resultJSON(c)
	}
	return connect.NewResponse(out), nil
}

// resultJSON is what a done command answered, where that is JSON.
func resultJSON(c store.Command) string {
	if strings.HasPrefix(c.Kind, "bmc.") {
		var answer bmcv1.BmcOperationResult
		if proto.Unmarshal(c.Result, &answer) == nil {
			return answer.ResultJson
		}
		return ""
	}
	if json.Valid(c.Result) {
		return string(c.Result)
	}
	return ""
}

// RotateCredentials begins a rotation, or goes on with one whose end is unclear.
func (s metalService) RotateCredentials(ctx context.Context, req *connect.Request[computev1.RotateCredentialsRequest]) (*connect.Response[computev1.RotateCredentialsResponse], error) {
	m, box, enrolled, err := s.able(ctx, req.Msg.TenantId, req.Msg.Machine, metal.VerbRotate)
	if err != nil {
		return nil, err
	}
	if s.Settle == nil {
		return nil, apierr.Cannot("rotation-unsupported", "this gateway keeps no pending passwords")
	}
	if err := s.Settle.Alone(ctx, m, m.BMC.CredentialsRef); err != nil {
		return nil, busy(err)
	}
	c, err := metal.RotateCommand(m.BMC)
	if err != nil {
		return nil, err
	}
	id, _, err := s.sendOnly(ctx, m, box, enrolled, c)
	s.audit(ctx, m.SiteID, m.ID, "credentials.rotate", map[string]string{"credentials": m.BMC.CredentialsRef, "command": id, "code": string(errs.CodeOf(err))})
	if err != nil {
		return nil, busy(err)
	}
	return connect.NewResponse(&computev1.RotateCredentialsResponse{CommandId: id}), nil
}

// busy is how a caller is told of what stands in the way on this side.
func busy(err error) error {
	e := errs.From(err)
	switch e.Code {
	case settle.Shared, settle.InProgress:
		return apierr.Busy(string(e.Code), "%s", e.Message)
	}
	return err
}

// RebindBmc has the machine's box bind the BMC anew; the machine follows once it did.
func (s metalService) RebindBmc(ctx context.Context, req *connect.Request[computev1.RebindBmcRequest]) (*connect.Response[computev1.RebindBmcResponse], error) {
	in := req.Msg
	m, err := s.Store.Machine(ctx, in.TenantId, in.Machine)
	if err != nil {
		return nil, err
	}
	bmc := m.BMC
	if in.Bmc != nil {
		if bmc, err = metal.ParseBMC(in.TenantId, in.Bmc); err != nil {
			return nil, err
		}
		if err := s.credentialThere(ctx, bmc); err != nil {
			return nil, err
		}
		if err := metal.CheckIdentity(bmc.Driver, m.PoolID, true, m.MACs, m.ProductUUID); err != nil {
			return nil, err
		}
	}
	if s.Settle == nil {
		return nil, apierr.Cannot("rebind-unsupported", "this gateway rebinds nothing")
	}
	box, err := s.box(ctx, m.SiteID)
	if err != nil {
		return nil, err
	}
	c := metal.BindCommand(bmc, in.Protected)
	id, err := s.Settle.Rebind(ctx, store.Rebind{MachineID: m.ID, BMC: bmc, Protected: in.Protected},
		commands.Spec{AgentID: box.ID, TargetNodeID: m.ID, Kind: c.Kind, Lane: c.Lane, Args: c.Args, Timeout: c.Timeout, Traceparent: traceparent()})
	s.audit(ctx, m.SiteID, m.ID, "bmc.rebind", map[string]string{
		"driver": bmc.Driver, "address": bmc.Address, "credentials": bmc.CredentialsRef, "protected": fmt.Sprint(in.Protected), "command": id, "code": string(errs.CodeOf(err)),
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.RebindBmcResponse{CommandId: id}), nil
}

// credentialThere wants the secret that a BMC's credential names.
func (s metalService) credentialThere(ctx context.Context, b store.BMC) error {
	if b.CredentialsRef == "" {
		return nil
	}
	switch has, err := s.Secrets.Has(ctx, b.CredentialsRef); {
	case err != nil:
		return err
	case !has:
		return apierr.Invalid("there is no secret %s", b.CredentialsRef)
	}
	return nil
}

// ForgetBmc has a site's box forget an address of its book, and answers when it did.
func (s siteService) ForgetBmc(ctx context.Context, req *connect.Request[computev1.ForgetBmcRequest]) (*connect.Response[computev1.ForgetBmcResponse], error) {
	in := req.Msg
	site, err := s.Store.Site(ctx, in.TenantId, in.Site)
	if err != nil {
		return nil, err
	}
	bmc := store.BMC{Driver: in.Bmc.GetDriver(), Address: in.Bmc.GetAddress()}
	if _, err := addressbook.Normalise(bmc.Address, bmc.Driver); err != nil {
		return nil, apierr.Invalid("bmc: %s", errs.From(err).Message)
	}
	box, err := s.box(ctx, site.ID)
	if err != nil {
		return nil, err
	}
	c := metal.ForgetCommand(bmc)
	id, err := s.Commands.Submit(ctx, commands.Spec{AgentID: box.ID, Kind: c.Kind, Lane: c.Lane, Args: c.Args, Timeout: c.Timeout, Traceparent: traceparent()})
	if err == nil {
		var outcome commands.Outcome
		if outcome, err = s.Commands.Wait(ctx, id); err == nil && outcome.Err != nil {
			err = outcome.Err
		}
	}
	s.audit(ctx, site.ID, "", "bmc.forget", map[string]string{"driver": bmc.Driver, "address": bmc.Address, "command": id, "code": string(errs.CodeOf(err))})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.ForgetBmcResponse{}), nil
}
