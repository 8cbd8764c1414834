package commands

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

// Watch answers a channel that fires when there may be something new for the
// agent. stop must be called.
func (s *Service) Watch(agentID string) (wake <-chan struct{}, stop func()) {
	ch := make(chan struct{}, 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.watchers[agentID] == nil {
		s.watchers[agentID] = map[chan struct{}]struct{}{}
	}
	s.watchers[agentID][ch] = struct{}{}
	return ch, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.watchers[agentID], ch)
		if len(s.watchers[agentID]) == 0 {
			delete(s.watchers, agentID)
		}
	}
}

func (s *Service) wake(agentID string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for ch := range s.watchers[agentID] {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}

// Greeted settles the agent's open commands with what its Hello says: one that
// the agent holds counts as received; for a new incarnation one that was never
// handed out is signed anew, and any other is interrupted, since nobody knows
// what became of it.
func (s *Service) Greeted(ctx context.Context, agent store.Agent, hello *agentv1.Hello) error {
	open, err := s.store.OpenCommands(ctx, agent.ID)
	if err != nil {
		return fmt.Errorf("settle commands: %w", err)
	}
	held := map[string][]byte{}
	for _, o := range hello.Open {
		held[o.CommandId] = o.Digest
	}
	for _, c := range open {
		var err error
		digest, holds := held[c.ID]
		switch {
		case c.Incarnation != agent.Incarnation() && c.State == store.CommandQueued:
			err = s.resign(ctx, c, agent.Incarnation())
		case c.Incarnation != agent.Incarnation():
			err = s.Finish(ctx, agent.ID, c.ID, nil, errs.New(errs.Interrupted, "the agent came back without its journal; the command may have run"))
		case holds && len(digest) > 0 && string(digest) != string(digestOf(c.Signed)):
			err = s.Finish(ctx, agent.ID, c.ID, nil, errs.New(errs.DuplicateMismatch, "the agent holds another command with this id"))
		case holds:
			err = s.Moved(ctx, agent.ID, c.ID, store.CommandReceived)
		}
		if err != nil && !errors.Is(err, store.ErrConflict) {
			return fmt.Errorf("settle command %s: %w", c.ID, err)
		}
	}
	return nil
}

func digestOf(c *agentv1.SignedCommand) []byte {
	sum := sha256.Sum256(c.Payload)
	return sum[:]
}

// resign signs a queued command for another incarnation; its times stay.
func (s *Service) resign(ctx context.Context, c store.Command, incarnation string) error {
	p := &agentv1.CommandPayload{}
	if err := proto.Unmarshal(c.Signed.Payload, p); err != nil {
		return err
	}
	p.Incarnation = incarnation
	signed, err := envelope.Seal(s.signer, p)
	if err != nil {
		return err
	}
	return s.store.Resign(ctx, c.ID, incarnation, signed)
}

// Moved records that a command was handed to a stream or is in the agent's
// journal; store.ErrConflict where it is no open command of the agent.
func (s *Service) Moved(ctx context.Context, agentID, id string, state store.CommandState) error {
	return s.store.CommandMoved(ctx, agentID, id, state)
}

// maxProgress bounds a line of progress.
const maxProgress = 512

// Report keeps the latest progress of a command that the caller knows to be open.
func (s *Service) Report(p *agentv1.CommandProgress) {
	text := p.Phase
	if p.Message != "" {
		text += ": " + p.Message
	}
	if p.Total > 0 {
		text += fmt.Sprintf(" (%d of %d)", p.Done, p.Total)
	} else if p.Done > 0 {
		text += fmt.Sprintf(" (%d)", p.Done)
	}
	if len(text) > maxProgress {
		text = strings.ToValidUTF8(text[:maxProgress], "") // no half letter: it could not be listed
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.progress[p.CommandId] = text
}

// Finish gives an open command of the agent its outcome; store.ErrConflict
// where it has one already, which stays.
func (s *Service) Finish(ctx context.Context, agentID, id string, result []byte, e *errs.Error) error {
	if e != nil && e.Code == errs.QuorumRequired {
		e = s.explain(ctx, agentID, id, e)
	}
	if err := s.store.FinishCommand(ctx, agentID, id, result, e); err != nil {
		return err
	}
	s.finished(id)
	return nil
}

// explain adds to a box's refusal what this gateway knows of a grant that would
// have covered the command: a box is not told of grants that hold no more.
func (s *Service) explain(ctx context.Context, agentID, id string, e *errs.Error) *errs.Error {
	known, ok := s.grants.(Lapses)
	if !ok {
		return e
	}
	why, err := s.lapsed(ctx, known, agentID, id)
	if err != nil {
		s.log.Warn("refusal not explained", "command", id, "err", err)
	}
	if why == "" {
		return e
	}
	return &errs.Error{Code: e.Code, Retryable: e.Retryable, Message: e.Message + ". The gateway knows: " + why}
}

func (s *Service) lapsed(ctx context.Context, known Lapses, agentID, id string) (string, error) {
	c, err := s.store.Command(ctx, id)
	if err != nil {
		return "", err
	}
	p := &agentv1.CommandPayload{}
	if err := proto.Unmarshal(c.Signed.GetPayload(), p); err != nil {
		return "", err
	}
	if c.AgentID != agentID || p.GetGrant() != nil {
		return "", nil // not its own, or one that was cited holds
	}
	agent, err := s.store.Agent(ctx, agentID)
	if err != nil {
		return "", err
	}
	return known.Lapsed(ctx, agent, p)
}

// Abandon ends every open command of an agent that will not come back.
func (s *Service) Abandon(ctx context.Context, agentID string, why *errs.Error) error {
	open, err := s.store.OpenCommands(ctx, agentID)
	if err != nil {
		return fmt.Errorf("abandon commands of %s: %w", agentID, err)
	}
	for _, c := range open {
		if err := s.Finish(ctx, agentID, c.ID, nil, why); err != nil && !errors.Is(err, store.ErrConflict) {
			return fmt.Errorf("abandon command %s: %w", c.ID, err)
		}
	}
	return nil
}

// Run ends commands whose time is over, until ctx ends.
func (s *Service) Run(ctx context.Context) {
	for {
		wait := time.Hour
		if err := s.sweep(ctx); err != nil {
			if ctx.Err() != nil {
				return
			}
			s.log.Error("end overdue commands", "err", err)
			wait = time.Minute
		} else if next, err := s.store.NextDeadline(ctx, grace); err == nil {
			wait = min(wait, max(next.Sub(s.store.Now()), 0)+time.Millisecond)
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		case <-s.poke:
			timer.Stop()
		}
	}
}

func (s *Service) sweep(ctx context.Context) error {
	due, err := s.store.DueCommands(ctx, s.store.Now(), grace)
	if err != nil {
		return err
	}
	for _, c := range due {
		if c.State == store.CommandQueued {
			err = s.store.FinishQueued(ctx, c.ID, errs.New(errs.Expired, "not delivered by %s; it did not run", c.NotAfter.UTC().Format(time.RFC3339)))
			if err == nil {
				s.finished(c.ID)
			}
		} else {
			err = s.Finish(ctx, c.AgentID, c.ID, nil, errs.New(errs.Interrupted, "no result by %s; it may have run", c.NotAfter.UTC().Format(time.RFC3339)))
		}
		if err != nil && !errors.Is(err, store.ErrConflict) {
			return err
		}
	}
	return nil
}
