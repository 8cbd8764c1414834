package dispatch

import (
	"slices"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/agent/grants"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// skew is what issued_at may lie ahead of this agent's gateway time.
const skew = 5 * time.Minute

// standing is what admission depends on beside the command itself.
type standing struct {
	role        agentv1.Role
	agentID     string
	incarnation string
	now         time.Time
	durable     bool // the journal outlives the process
	auditFull   bool
}

// admit judges a verified payload. It is pure: queues, journal and people's
// grants are the caller's.
func admit(s standing, kinds map[string]Kind, p *agentv1.CommandPayload) (Kind, Operation, error) {
	fail := func(code errs.Code, format string, args ...any) (Kind, Operation, error) {
		return Kind{}, Operation{}, errs.New(code, format, args...)
	}
	kind, known := kinds[p.GetKind()]
	notAfter := time.UnixMilli(p.GetNotAfterMs())
	switch {
	case p.GetAgentId() != s.agentID:
		return fail(errs.WrongAgent, "the command is for agent %q, not %q", p.GetAgentId(), s.agentID)
	case p.GetIncarnation() != s.incarnation:
		return fail(errs.WrongIncarnation, "the command is for incarnation %q, not %q", p.GetIncarnation(), s.incarnation)
	case !known:
		return fail(errs.UnknownKind, "this agent does not serve %q", p.GetKind())
	case !slices.Contains(kind.Roles, s.role):
		return fail(errs.RoleMismatch, "%s is not for an agent with role %s", kind.Name, roleName(s.role))
	case p.GetLane() != "" && p.GetLane() != kind.Lane:
		return fail(errs.InvalidPayload, "%s travels in lane %q, not %q", kind.Name, kind.Lane, p.GetLane())
	case !s.now.Before(notAfter):
		return fail(errs.Expired, "not_after %s has passed; it is %s", stamp(notAfter), stamp(s.now))
	case time.UnixMilli(p.GetIssuedAtMs()).After(s.now.Add(skew)), notAfter.After(s.now.Add(envelope.MaxLife + skew)):
		return fail(errs.InvalidPayload, "the command is dated ahead: issued_at %s; it is %s", stamp(time.UnixMilli(p.GetIssuedAtMs())), stamp(s.now))
	}
	op, err := kind.decode(p)
	if err != nil {
		return Kind{}, Operation{}, err
	}
	switch {
	case op.Destructive && s.role == agentv1.Role_ROLE_SITE && !s.durable:
		return fail(errs.OperationNotAllowed, "%s is refused while this box has no journal on disk", op.Name)
	case op.Destructive && s.auditFull:
		return fail(errs.NoSpace, "%s is refused while there is no room for its audit event", op.Name)
	}
	return kind, op, nil
}

// decode is what a payload asks for.
func (k Kind) decode(p *agentv1.CommandPayload) (Operation, error) {
	op, err := k.Decode(p.GetArgs())
	if err == nil && k.Check != nil {
		op, err = k.Check(p, op)
	}
	if err != nil {
		return Operation{}, err
	}
	if op.Key == "" {
		op.Key = k.Name
	}
	return op, nil
}

// asks is what a command that counts asks of people's grants.
func asks(p *agentv1.CommandPayload, op Operation) grants.Command {
	targets := op.Targets
	if len(targets) == 0 {
		targets = []string{"key:" + op.Key}
	}
	return grants.Command{
		ID: p.GetCommandId(), Kind: p.GetKind(), Operation: op.Name, Action: op.Action, Always: op.Always,
		Targets: targets, Artifacts: op.Artifacts, Citation: p.GetGrant(),
	}
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

func roleName(r agentv1.Role) string {
	switch r {
	case agentv1.Role_ROLE_SITE:
		return "site"
	case agentv1.Role_ROLE_RAMDISK:
		return "ramdisk"
	case agentv1.Role_ROLE_NODE:
		return "node"
	}
	return "unknown"
}
