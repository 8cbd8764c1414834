// Package settle does what is left to do here once a BMC's rotation or
// rebinding has ended, whether or not the gateway stood meanwhile.
package settle

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

// Commands sends signed commands.
type Commands interface {
	Submit(ctx context.Context, spec commands.Spec) (id string, err error)
}

// Secrets encrypts as the store keeps secrets.
type Secrets interface {
	Seal(ref string, value secret.Value) []byte
	Unseal(ref string, sealed []byte) (secret.Value, error)
}

// Config is what the service works with.
type Config struct {
	Store    *store.Store
	Commands Commands
	Secrets  Secrets
	// Online says whether an agent holds a session.
	Online func(agentID string) bool
	Log    *slog.Logger
	// Password makes a new password; nil: NewPassword.
	Password func() secret.Value
	// Pause is the wait before the first try of its own after an unclear end; each
	// next one is twice as long. Zero: firstPause.
	Pause time.Duration
}

const (
	firstPause = 15 * time.Second
	maxPause   = 5 * time.Minute
	// maxAttempts bounds the attempts that are made without a person's word.
	maxAttempts = 5
	// every is how often it looks though nothing happened.
	every = time.Minute
)

// Service is safe for concurrent use. Nothing is settled unless Run runs.
type Service struct {
	c    Config
	kick chan struct{}

	mu       sync.Mutex
	starting map[string]bool // commands that are noted and perhaps not kept yet
	flying   map[string]bool // commands whose end is waited for
	settled  chan struct{}   // closed and made anew after each look
}

// New makes the service.
func New(c Config) *Service {
	if c.Password == nil {
		c.Password = NewPassword
	}
	if c.Pause == 0 {
		c.Pause = firstPause
	}
	return &Service{c: c, kick: make(chan struct{}, 1), starting: map[string]bool{}, flying: map[string]bool{}, settled: make(chan struct{})}
}

// Finished hears of a command's end.
func (s *Service) Finished(id string) {
	s.mu.Lock()
	ours := s.flying[id]
	s.mu.Unlock()
	if ours {
		s.wake()
	}
}

func (s *Service) wake() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// start keeps a command that is about to be sent from being taken for one that
// never was.
func (s *Service) start(id string) (over func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.starting[id], s.flying[id] = true, true
	return func() {
		s.mu.Lock()
		delete(s.starting, id)
		s.mu.Unlock()
		s.wake()
	}
}

// Run settles what has ended, now and whenever something ends, until ctx does.
func (s *Service) Run(ctx context.Context) {
	for {
		next, err := s.look(ctx)
		if err != nil && ctx.Err() == nil {
			s.c.Log.Error("what commands to BMCs left is not settled", "err", err)
		}
		timer := time.NewTimer(next)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-s.kick:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// look settles all that it can, and says when to look again.
func (s *Service) look(ctx context.Context) (time.Duration, error) {
	rotations, err := s.c.Store.Rotations(ctx)
	if err != nil {
		return every, err
	}
	rebinds, err := s.c.Store.Rebinds(ctx)
	if err != nil {
		return every, err
	}
	flying := map[string]bool{}
	next := every
	var failures []error
	for _, r := range rotations {
		open, wait, err := s.rotation(ctx, r)
		failures = append(failures, err)
		if open {
			flying[r.CommandID] = true
		}
		if wait > 0 {
			next = min(next, wait)
		}
	}
	for _, r := range rebinds {
		open, err := s.rebind(ctx, r)
		failures = append(failures, err)
		if open {
			flying[r.CommandID] = true
		}
	}
	s.mu.Lock()
	for id := range s.starting {
		flying[id] = true
	}
	// One that ended since it was looked at must not be waited for in vain.
	missed := false
	for id := range flying {
		missed = missed || !s.flying[id]
	}
	s.flying = flying
	close(s.settled)
	s.settled = make(chan struct{})
	s.mu.Unlock()
	if missed {
		s.wake()
	}
	return next, errors.Join(failures...)
}

// ended is how a command ended; open while it did not. One that is not there was
// never kept, and so never sent.
func (s *Service) ended(ctx context.Context, id string) (err *errs.Error, open bool, failure error) {
	s.mu.Lock()
	starting := s.starting[id]
	s.mu.Unlock()
	if starting {
		return nil, true, nil
	}
	c, failure := s.c.Store.Command(ctx, id)
	switch {
	case errors.Is(failure, store.ErrNotFound):
		return errs.New(errs.Expired, "it was never sent"), false, nil
	case failure != nil:
		return nil, true, failure
	case c.State != store.CommandDone:
		return nil, true, nil
	}
	return c.Err, false, nil
}

// box is the identity that stands for a site now.
func (s *Service) box(ctx context.Context, siteID string) (id string, err error) {
	agents, err := s.c.Store.Agents(ctx, store.AgentFilter{SiteID: siteID, Role: agentv1.Role_ROLE_SITE, State: store.AgentActive})
	switch {
	case err != nil:
		return "", err
	case len(agents) == 0 || !s.c.Online(agents[len(agents)-1].ID):
		return "", errs.Retry(errs.Unavailable, "the site's box is offline")
	}
	return agents[len(agents)-1].ID, nil
}

// audit records what became of a machine's BMC. It is done by then: an event that
// cannot be stored is a matter for the log.
func (s *Service) audit(ctx context.Context, m store.Machine, name string, details map[string]string) {
	body, err := json.Marshal(details)
	if err == nil {
		err = s.c.Store.AddEvent(context.WithoutCancel(ctx), store.Event{SiteID: m.SiteID, MachineID: m.ID, Name: name, Class: "audit", Key: m.ID, BodyJSON: string(body)})
	}
	if err != nil {
		s.c.Log.Error("audit event not stored", "event", name, "machine", m.ID, "err", err)
	}
}
