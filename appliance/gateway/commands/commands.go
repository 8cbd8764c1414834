// Package commands signs and keeps commands, hands them to sessions, and gives
// each one outcome.
package commands

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

// Spec is what a caller asks for.
type Spec struct {
	// ID makes a repeat harmless: the same ID with the same content is the same
	// command, with other content it is duplicate-mismatch. Empty: one is made.
	ID           string
	AgentID      string
	TargetNodeID string
	Kind         string
	Lane         string // empty: the kind's own
	Args         proto.Message
	// Raw is the arguments as bytes, instead of Args.
	Raw         []byte
	SecretRefs  []string
	Timeout     time.Duration // zero: the kind's own; at most 24 h
	WorkflowID  string
	StepID      string
	Attempt     uint32
	Traceparent string
}

// Outcome is how a command ended: Err is nil when it did what was asked.
type Outcome struct {
	Result []byte // the kind's result message, encoded
	Err    *errs.Error
}

// Kinds finds the command kinds that modules brought.
type Kinds interface {
	Kind(name string) (module.Kind, bool)
}

// Grants finds what people approved of a command; nil where there is nothing.
type Grants interface {
	Cite(ctx context.Context, agent store.Agent, p *agentv1.CommandPayload) (*agentv1.GrantCitation, error)
}

// Lapses are Grants that know what became of those that would have covered a command.
type Lapses interface {
	// Lapsed is for people; empty where there was none.
	Lapsed(ctx context.Context, agent store.Agent, p *agentv1.CommandPayload) (string, error)
}

// grace is how long past its not_after the result of a command that an agent
// may have is waited for.
const grace = 2 * time.Minute

// Service is safe for concurrent use. Run must run for deadlines to count.
type Service struct {
	store  *store.Store
	signer envelope.Signer
	kinds  Kinds
	grants Grants // nil: no command cites any
	log    *slog.Logger

	prepare  map[string]Prepare // by kind
	complete map[string]Complete
	finishes func(id string) // nil: nobody listens

	mu       sync.Mutex
	waiters  map[string]*waiter
	watchers map[string]map[chan struct{}]struct{}
	progress map[string]string
	poke     chan struct{}
}

// waiter wakes those that wait for one command.
type waiter struct {
	done  chan struct{}
	count int
}

// New makes the service. It sends the given kinds and no others.
func New(st *store.Store, signer envelope.Signer, kinds Kinds, log *slog.Logger) *Service {
	return &Service{
		store: st, signer: signer, kinds: kinds, log: log,
		waiters:  map[string]*waiter{},
		watchers: map[string]map[chan struct{}]struct{}{},
		progress: map[string]string{},
		poke:     make(chan struct{}, 1),
	}
}

// CiteFrom has every command cite the grant that covers it, if there is one. It
// must be called before Submit is.
func (s *Service) CiteFrom(g Grants) { s.grants = g }

// Prepare brings about what must be there before a command is kept; args are
// encoded. over is called when the submission has ended, either way.
type Prepare func(ctx context.Context, spec Spec, args []byte) (over func(), err error)

// Complete puts into encoded arguments what only the gateway's key can make. The
// same arguments always come to the same.
type Complete func(args []byte) ([]byte, error)

// Completing has c complete the arguments of every command of a kind. It must be
// called before Submit is.
func (s *Service) Completing(kind string, c Complete) {
	if s.complete == nil {
		s.complete = map[string]Complete{}
	}
	s.complete[kind] = c
}

// Before has p prepare every command of a kind. It must be called before Submit is.
func (s *Service) Before(kind string, p Prepare) {
	if s.prepare == nil {
		s.prepare = map[string]Prepare{}
	}
	s.prepare[kind] = p
}

// OnFinished has f, which must not block, hear of each command that got its
// outcome. It must be called before Submit is.
func (s *Service) OnFinished(f func(id string)) { s.finishes = f }

// Submit signs a command for the agent's present incarnation and keeps it; it
// is durable when Submit returns. An agent that never connected is
// unavailable; one that may not act any more answers its state's code.
func (s *Service) Submit(ctx context.Context, spec Spec) (id string, err error) {
	id, err = s.submit(ctx, spec)
	if err != nil {
		return "", fmt.Errorf("submit %s to %s: %w", spec.Kind, spec.AgentID, err)
	}
	return id, nil
}

func (s *Service) submit(ctx context.Context, spec Spec) (string, error) {
	args := spec.Raw
	if spec.Args != nil {
		var err error
		if args, err = (proto.MarshalOptions{Deterministic: true}).Marshal(spec.Args); err != nil {
			return "", errs.New(errs.InvalidArgs, "encode arguments: %v", err)
		}
	}
	if spec.ID != "" {
		// A caller that comes back after a restart gets its command even if the
		// agent, or the module with the kind, is gone since.
		have, err := s.store.Command(ctx, spec.ID)
		if err == nil {
			return sameAs(have, spec, args)
		}
		if !errors.Is(err, store.ErrNotFound) {
			return "", err
		}
	}
	kind, known := s.kinds.Kind(spec.Kind)
	if !known {
		return "", errs.New(errs.UnknownKind, "no module of this gateway brings the kind %q", spec.Kind)
	}
	if spec.Lane == "" {
		spec.Lane = kind.Lane
	}
	if spec.Timeout == 0 {
		spec.Timeout = kind.Timeout
	}
	switch {
	case spec.Lane != kind.Lane:
		return "", errs.New(errs.InvalidPayload, "%s travels in lane %q, not %q", spec.Kind, kind.Lane, spec.Lane)
	case spec.Timeout <= 0 || spec.Timeout > envelope.MaxLife:
		return "", errs.New(errs.InvalidPayload, "time-out %s: want more than nothing and at most %s", spec.Timeout, envelope.MaxLife)
	}
	for _, ref := range spec.SecretRefs {
		if !strings.HasPrefix(ref, "secret://") {
			return "", errs.New(errs.InvalidPayload, "a secret reference does not begin with secret://")
		}
	}
	hash, err := specHash(spec, args)
	if err != nil {
		return "", err
	}
	agent, err := s.store.Agent(ctx, spec.AgentID)
	if errors.Is(err, store.ErrNotFound) {
		return "", errs.New(errs.NotEnrolled, "no such agent")
	}
	if err != nil {
		return "", err
	}
	if err := MayAct(agent); err != nil {
		return "", err
	}
	if agent.IsStranger() {
		return "", errs.New(errs.OperationNotAllowed, "agent %s is of a machine that nobody enrolled: it runs nothing", agent.ID)
	}
	if !slices.Contains(kind.Roles, agent.Role) {
		return "", errs.New(errs.RoleMismatch, "%s is not for an agent of this role", spec.Kind)
	}
	if agent.Incarnation() == "" {
		return "", errs.Retry(errs.Unavailable, "the agent has not connected yet")
	}
	if spec.ID == "" {
		spec.ID = s.store.NewID("cmd")
	}
	if prepare := s.prepare[spec.Kind]; prepare != nil {
		over, err := prepare(ctx, spec, args)
		if err != nil {
			return "", err
		}
		defer over()
	}
	if complete := s.complete[spec.Kind]; complete != nil {
		if args, err = complete(args); err != nil {
			return "", err
		}
	}
	now := s.store.Now()
	c := store.Command{
		ID: spec.ID, SpecHash: hash, AgentID: spec.AgentID, TargetNodeID: spec.TargetNodeID, Kind: spec.Kind, Lane: spec.Lane,
		WorkflowID: spec.WorkflowID, StepID: spec.StepID, Attempt: spec.Attempt, SecretRefs: spec.SecretRefs,
		Incarnation: agent.Incarnation(), Issued: now, NotAfter: now.Add(spec.Timeout),
	}
	payload := &agentv1.CommandPayload{
		CommandId: c.ID, Kind: c.Kind, AgentId: c.AgentID, Incarnation: c.Incarnation, TargetNodeId: c.TargetNodeID,
		WorkflowId: c.WorkflowID, StepId: c.StepID, Attempt: c.Attempt, Lane: c.Lane,
		IssuedAtMs: c.Issued.UnixMilli(), NotAfterMs: c.NotAfter.UnixMilli(),
		Traceparent: spec.Traceparent, SecretRefs: c.SecretRefs, Args: args,
	}
	if s.grants != nil {
		if payload.Grant, err = s.grants.Cite(ctx, agent, payload); err != nil {
			return "", err
		}
		if c.GrantID, c.GrantTargets, err = usedBy(payload.Grant); err != nil {
			return "", err
		}
	}
	if c.Signed, err = envelope.Seal(s.signer, payload); err != nil {
		return "", err
	}
	switch _, err = s.store.AddCommand(ctx, c); {
	case errors.Is(err, store.ErrConflict):
		return "", errs.New(errs.DuplicateMismatch, "command %s is there with other content", spec.ID)
	case err != nil:
		return "", err
	}
	s.wake(c.AgentID)
	select {
	case s.poke <- struct{}{}:
	default:
	}
	return c.ID, nil
}

// usedBy is what a citation uses; nothing without one.
func usedBy(c *agentv1.GrantCitation) (grantID string, targets []string, err error) {
	if c == nil {
		return "", nil, nil
	}
	var g agentv1.Grant
	if err := proto.Unmarshal(c.GetGrant().GetPayload(), &g); err != nil {
		return "", nil, errs.New(errs.Internal, "read the cited grant: %v", err)
	}
	for _, t := range c.GetTargets() {
		targets = append(targets, t.GetTarget())
	}
	return g.GetGrantId(), targets, nil
}

// sameAs is the id of a command that is there, if spec asks for the same.
func sameAs(have store.Command, spec Spec, args []byte) (string, error) {
	if spec.Lane == "" {
		spec.Lane = have.Lane
	}
	hash, err := specHash(spec, args)
	if err != nil {
		return "", err
	}
	if string(have.SpecHash) != string(hash) {
		return "", errs.New(errs.DuplicateMismatch, "command %s is there with other content", spec.ID)
	}
	return spec.ID, nil
}

// specHash covers what a repeat must not change; trace and time-out may differ.
func specHash(spec Spec, args []byte) ([]byte, error) {
	data, err := json.Marshal([]any{spec.AgentID, spec.TargetNodeID, spec.Kind, spec.Lane, args, spec.SecretRefs, spec.WorkflowID, spec.StepID, spec.Attempt})
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(data)
	return sum[:], nil
}

// MayAct is nil for an active agent and the code of its state otherwise.
func MayAct(a store.Agent) error {
	switch a.State {
	case store.AgentActive:
		return nil
	case store.AgentSuperseded:
		return errs.New(errs.Superseded, "agent %s was replaced by a newer identity", a.ID)
	case store.AgentCloned:
		return errs.New(errs.IdentityCloned, "agent %s is held: two boxes used its key", a.ID)
	}
	return errs.New(errs.Revoked, "agent %s is revoked", a.ID)
}

// Wait blocks until the command has its outcome; its own error is ctx's, or
// that there is no such command.
func (s *Service) Wait(ctx context.Context, id string) (Outcome, error) {
	s.mu.Lock()
	w := s.waiters[id]
	if w == nil {
		w = &waiter{done: make(chan struct{})}
		s.waiters[id] = w
	}
	w.count++
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if w.count--; w.count == 0 && s.waiters[id] == w {
			delete(s.waiters, id)
		}
	}()
	for {
		c, err := s.store.Command(ctx, id)
		if err != nil {
			return Outcome{}, fmt.Errorf("wait for command %s: %w", id, err)
		}
		if c.State == store.CommandDone {
			return Outcome{Result: c.Result, Err: c.Err}, nil
		}
		select {
		case <-ctx.Done():
			return Outcome{}, fmt.Errorf("wait for command %s: %w", id, ctx.Err())
		case <-w.done:
		}
	}
}

// Progress is the latest line that the agent said about an open command.
func (s *Service) Progress(id string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.progress[id]
}

// Cancel asks for an end. A command that was never handed out ends at once; for
// any other the agent decides, and past its point of no return it goes on.
// Cancelling one that has its outcome does nothing.
func (s *Service) Cancel(ctx context.Context, id string) error {
	c, err := s.store.Command(ctx, id)
	if err != nil {
		return fmt.Errorf("cancel command %s: %w", id, err)
	}
	err = s.store.FinishQueued(ctx, id, errs.New(errs.Cancelled, "cancelled before it was sent"))
	if err == nil {
		s.finished(id)
		return nil
	}
	if errors.Is(err, store.ErrConflict) {
		if err = s.store.CancelCommand(ctx, id); errors.Is(err, store.ErrConflict) {
			return nil
		}
	}
	if err != nil {
		return fmt.Errorf("cancel command %s: %w", id, err)
	}
	s.wake(c.AgentID)
	return nil
}

// finished wakes whoever waits for the command.
func (s *Service) finished(id string) {
	if s.finishes != nil {
		s.finishes(id)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.progress, id)
	if w := s.waiters[id]; w != nil {
		close(w.done)
		delete(s.waiters, id)
	}
}
