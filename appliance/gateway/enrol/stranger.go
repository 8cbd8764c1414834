package enrol

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/agentv1/agentv1connect"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

// stranger judges the voucher of a machine that nobody enrolled: whoever is on a
// site's LAN can get one.
func stranger(w store.Window, v *agentv1.Voucher) error {
	_, ok := store.StrangerMAC(v.MachineId)
	switch {
	case !ok:
		return errs.New(errs.WrongAgent, "boot window %s is for machines that nobody enrolled, which %.64q is not", w.ID, v.MachineId)
	case w.Purpose != store.StrangersPurpose || v.Purpose != w.Purpose:
		return errs.New(errs.WrongAgent, "boot window %s is for %s, not for %.40q", w.ID, store.StrangersPurpose, v.Purpose)
	}
	return nil
}

// room bounds how many strangers a site has, and how fast they come.
func (s *Service) room(ctx context.Context, siteID, machineID string) error {
	n, err := s.store.Strangers(ctx, siteID, machineID)
	switch {
	case err != nil:
		return err
	case n >= store.MaxStrangers:
		return errs.Retry(errs.RateLimited, "the site has %d machines that nobody enrolled already, of at most %d", n, store.MaxStrangers)
	case !s.paces.take(siteID, s.store.Now()):
		return errs.Retry(errs.RateLimited, "too many machines that nobody enrolled come at once")
	}
	return nil
}

// How fast the strangers of one site may enrol: a rack at once, and then four a second.
const (
	strangerBurst  = 256
	strangerPerSec = 4
)

// paces is a token bucket for each site. Its zero value is ready.
type paces struct {
	mu    sync.Mutex
	sites map[string]pace
}

type pace struct {
	left float64
	at   time.Time
}

func (p *paces) take(siteID string, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.sites == nil {
		p.sites = map[string]pace{}
	}
	one, known := p.sites[siteID]
	if !known {
		one = pace{left: strangerBurst, at: now}
	}
	one.left = min(strangerBurst, one.left+max(now.Sub(one.at).Seconds(), 0)*strangerPerSec)
	one.at = now
	ok := one.left >= 1
	if ok {
		one.left--
	}
	p.sites[siteID] = one
	return ok
}

// mayCall holds a stranger to what it is there for: one session, in which it
// reports its hardware, until its boot window ends.
func (s *Service) mayCall(ctx context.Context, a store.Agent, path string) error {
	if !a.IsStranger() {
		return nil
	}
	if path != agentv1connect.SessionServiceConnectProcedure {
		return errs.New(errs.OperationNotAllowed, "a machine that nobody enrolled reports its hardware and does no more")
	}
	w, err := s.store.Window(ctx, a.WindowID)
	switch {
	case errors.Is(err, store.ErrNotFound) || err == nil && !s.store.Now().Before(w.Until):
		return errs.New(errs.Expired, "the boot window for machines that nobody enrolled is over")
	case err != nil:
		return fmt.Errorf("read boot window: %w", err)
	}
	return nil
}
