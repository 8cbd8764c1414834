// Package discovery looks after machines that nobody enrolled: it keeps what boxes
// and ramdisks saw of them, keeps their boot windows open where a site inspects
// them, and says which enrolled machines they seem to be.
package discovery

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/printable"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

// Commands sends signed commands and waits for their outcomes.
type Commands interface {
	Submit(ctx context.Context, spec commands.Spec) (id string, err error)
	Wait(ctx context.Context, id string) (commands.Outcome, error)
}

// Config is what the service works with.
type Config struct {
	Store    *store.Store
	Commands Commands
	// Online says whether an agent holds a session.
	Online func(agentID string) bool
	// Expel ends the session of an agent that is not to come back.
	Expel func(ctx context.Context, agentID string, why *errs.Error) error
	Log   *slog.Logger
	// Window is how long strangers' boot windows are; each is followed by the next
	// at its half. Zero: a day. A box without a line goes on until its window ends.
	Window time.Duration
	// Every is how often it looks though nothing happened. Zero: a minute.
	Every time.Duration
}

const (
	window = 24 * time.Hour
	every  = time.Minute
	// sendAtOnce bounds the boxes that are told at the same time.
	sendAtOnce = 16
	// tellWithin bounds one telling, the grace for its result included.
	tellWithin = 4 * time.Minute
	// retellEvery is how often a box is told anew because it says that it lost what it
	// was told: one that says so without end is no pacemaker.
	retellEvery = 10 * time.Minute
	// foundLife is how long what was not seen again is remembered.
	foundLife = 30 * 24 * time.Hour
	// oldWindow is how long a window that ended is known by its name.
	oldWindow = 24 * time.Hour
)

// Service is safe for concurrent use. Run must run.
type Service struct {
	// Turn has a site's boot decisions sent in turn with whoever else sends them;
	// set before use, nil: nobody else does.
	Turn func(ctx context.Context, siteID string) (over func(), err error)

	c    Config
	kick chan struct{}
	room chan struct{} // of those that are told at once
	wg   sync.WaitGroup

	mu     sync.Mutex
	flying map[string]bool // sites that are tended; true: something happened meanwhile
	losses map[string]loss // of sites whose boxes lost what they were told
}

// loss is whether a box lost what it was told since it was told anew, and when that was.
type loss struct {
	again bool
	told  time.Time
}

func (l loss) waits(now time.Time) bool {
	return l.again && now.Sub(l.told) < retellEvery && !now.Before(l.told)
}

// New makes the service.
func New(c Config) *Service {
	if c.Window == 0 {
		c.Window = window
	}
	if c.Every == 0 {
		c.Every = every
	}
	return &Service{c: c, kick: make(chan struct{}, 1), room: make(chan struct{}, sendAtOnce), flying: map[string]bool{}, losses: map[string]loss{}}
}

// Changed has it look now.
func (s *Service) Changed() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// Lost hears of a site whose box lacks what it was told: it is told anew, and not all the time.
func (s *Service) Lost(siteID string) {
	s.mu.Lock()
	l := s.losses[siteID]
	l.again = true
	s.losses[siteID] = l
	s.mu.Unlock()
	if !l.waits(s.c.Store.Now()) {
		s.Changed()
	}
}

// mayTell says whether a site's box may be told now, and counts on it.
func (s *Service) mayTell(siteID string, now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.losses[siteID]
	if l.waits(now) {
		return false
	}
	if l.again {
		s.losses[siteID] = loss{told: now}
	}
	return true
}

// Came hears of agents that come and go: a box may be one that lacks something.
func (s *Service) Came(_ string, online bool) {
	if online {
		s.Changed()
	}
}

// discovered is the part of a box's pxe.discovered that is kept.
type discovered struct {
	MAC         string `json:"mac"`
	Interface   string `json:"interface"`
	Client      string `json:"client"`
	ProductUUID string `json:"product_uuid"`
	Class       string `json:"class"`
	IP          string `json:"ip"`
}

// Heard takes up what boxes say of machines that nobody enrolled, and what the
// ramdisks of those report. Nobody else is listened to.
func (s *Service) Heard(ctx context.Context, agentID string, e *agentv1.Event) {
	if e.GetName() != seenEvent && e.GetName() != store.HardwareEvent {
		return
	}
	agent, err := s.c.Store.Agent(ctx, agentID)
	if err == nil {
		err = s.heard(ctx, agent, e)
	}
	if err != nil && ctx.Err() == nil {
		s.c.Log.Warn("a found machine is not noted", "agent", agentID, "event", e.GetName(), "err", err)
	}
}

// seenEvent is how a box says that an unknown machine asks to boot.
const seenEvent = "pxe.discovered"

func (s *Service) heard(ctx context.Context, agent store.Agent, e *agentv1.Event) error {
	stranger, isStranger := store.StrangerMAC(agent.MachineID)
	switch {
	case e.Name == seenEvent && agent.Role == agentv1.Role_ROLE_SITE:
		var d discovered
		if err := json.Unmarshal(e.BodyJson, &d); err != nil {
			return err
		}
		mac, err := net.ParseMAC(d.MAC)
		if err != nil || len(mac) != 6 {
			return errs.New(errs.InvalidPayload, "mac %.40q: want six bytes", d.MAC)
		}
		return s.c.Store.Saw(ctx, store.Found{SiteID: agent.SiteID, MAC: mac.String(), ProductUUID: strings.ToLower(short(d.ProductUUID)),
			Interface: short(d.Interface), Client: short(d.Client), Class: short(d.Class), IP: short(d.IP)})
	case e.Name == store.HardwareEvent && agent.Role == agentv1.Role_ROLE_RAMDISK && isStranger:
		var object map[string]json.RawMessage
		if len(e.BodyJson) > store.MaxStrangerHardware || json.Unmarshal(e.BodyJson, &object) != nil || object == nil {
			return errs.New(errs.InvalidPayload, "the hardware report is no JSON object of at most %d bytes", store.MaxStrangerHardware)
		}
		return s.c.Store.SawHardware(ctx, agent.SiteID, stranger, string(e.BodyJson))
	}
	return nil
}

// short bounds what a machine says of itself.
func short(s string) string { return printable.Excerpt(s, '.', 128) }

// Run keeps windows open and boxes told until ctx ends.
func (s *Service) Run(ctx context.Context) {
	defer s.wg.Wait()
	for {
		if err := s.look(ctx); err != nil && ctx.Err() == nil {
			s.c.Log.Error("unknown machines are not looked after", "err", err)
		}
		timer := time.NewTimer(s.c.Every)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-s.kick:
			timer.Stop()
		case <-timer.C:
		}
	}
}

func (s *Service) look(ctx context.Context) error {
	now := s.c.Store.Now()
	// What fails for one holds up nobody else.
	ended, err := s.c.Store.EndStrangers(ctx, now.Add(-oldWindow))
	failed := []error{err}
	for _, id := range ended {
		if err := s.c.Expel(ctx, id, errs.New(errs.Expired, "the boot window for unknown machines is over")); err != nil {
			failed = append(failed, fmt.Errorf("end the session of %s: %w", id, err))
		}
	}
	failed = append(failed, s.c.Store.PruneFound(ctx, now.Add(-foundLife)))
	sites, err := s.c.Store.Untold(ctx)
	failed = append(failed, err)
	for _, site := range sites {
		if !s.begin(site.SiteID) {
			continue
		}
		s.wg.Go(func() {
			defer s.end(site.SiteID)
			select {
			case s.room <- struct{}{}:
				defer func() { <-s.room }()
			case <-ctx.Done():
				return
			}
			if err := s.tend(ctx, site, now); err != nil && ctx.Err() == nil {
				s.c.Log.Warn("a site's box does not have the newest boot decisions; it is tried again", "site", site.SiteID, "err", err)
			}
		})
	}
	return errors.Join(failed...)
}

// begin is false for a site that is tended already: one slow box holds up no other.
func (s *Service) begin(siteID string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.flying[siteID]; ok {
		s.flying[siteID] = true
		return false
	}
	s.flying[siteID] = false
	return true
}

func (s *Service) end(siteID string) {
	s.mu.Lock()
	again := s.flying[siteID]
	delete(s.flying, siteID)
	s.mu.Unlock()
	if again {
		s.Changed()
	}
}

// tend opens a site's next window in time, and tells its box what it lacks.
func (s *Service) tend(ctx context.Context, site store.Untold, now time.Time) error {
	if u := site.Unknown; u.Inspect && u.WindowUntil.Sub(now) < s.c.Window/2 {
		err := s.c.Store.RollUnknown(ctx, site.SiteID, s.c.Store.NewID("win"), now.Add(s.c.Window))
		if errors.Is(err, store.ErrNotFound) {
			return nil // the policy was changed meanwhile, and that is looked at next
		}
		if err != nil {
			return err
		}
		if site, err = s.c.Store.SiteUntold(ctx, site.SiteID); err != nil {
			return err
		}
	}
	boxes, err := s.c.Store.Agents(ctx, store.AgentFilter{SiteID: site.SiteID, Role: agentv1.Role_ROLE_SITE, State: store.AgentActive})
	if err != nil || len(boxes) == 0 {
		return err
	}
	box := boxes[len(boxes)-1]
	if !s.c.Online(box.ID) || !site.Behind(Life(box)) || !s.mayTell(site.SiteID, now) {
		return nil
	}
	return s.tell(ctx, site.SiteID, box)
}

// Life names one life of a box: it starts with nothing.
func Life(box store.Agent) string { return box.ID + " " + box.Incarnation() }

// tell sends the site's boot decisions as they are. One that another snapshot
// overtook is sent again: the box says the same of a gateway that is behind it.
func (s *Service) tell(ctx context.Context, siteID string, box store.Agent) error {
	ctx, cancel := context.WithTimeout(ctx, tellWithin)
	defer cancel()
	if s.Turn != nil {
		over, err := s.Turn(ctx, siteID)
		if err != nil {
			return err
		}
		defer over()
	}
	change, err := s.send(ctx, siteID, box)
	if errs.CodeOf(err) == errs.QuorumRequired {
		// The box would open windows anew that it knows nothing of. Nobody is asked to
		// approve that, and while they are open nothing else would be taken either.
		ended, eerr := s.c.Store.EndBoots(ctx, siteID, "the site's box knows this boot window no more, and opens it anew only with people's approval: begin again what booted by it, with a grant")
		if eerr != nil || ended == 0 {
			return errors.Join(err, eerr)
		}
		s.c.Log.Warn("boot windows are ended: the box does not open them anew without approvals", "site", siteID, "machines", ended)
		change, err = s.send(ctx, siteID, box)
	}
	if err != nil {
		return err
	}
	return s.c.Store.Told(ctx, siteID, change, Life(box))
}

// send sends the next snapshot, and answers how many changes the box has with it.
func (s *Service) send(ctx context.Context, siteID string, box store.Agent) (change int64, err error) {
	next, err := s.c.Store.NextSnapshot(ctx, siteID)
	if err != nil {
		return 0, err
	}
	c := metal.AssignCommand(next, s.c.Store.Now())
	// Sent for no machine's sake: it spends nothing of what people granted for one.
	id, err := s.c.Commands.Submit(ctx, commands.Spec{AgentID: box.ID, TargetNodeID: store.Strangers, Kind: c.Kind, Lane: c.Lane, Args: c.Args, Timeout: c.Timeout})
	if err != nil {
		return 0, err
	}
	outcome, err := s.c.Commands.Wait(ctx, id)
	if err == nil && outcome.Err != nil {
		err = outcome.Err
	}
	return next.Change, err
}
