// Package sessions is the gateway's end of the line home: one stream per
// agent, which carries commands down and results and events up.
package sessions

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/agentv1/agentv1connect"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/caller"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

// Protocol is the version of the session's frames.
const Protocol = 1

// Timing is how a session tells life from death.
type Timing struct {
	Heartbeat time.Duration // how often a frame goes down at least
	Dead      time.Duration // no frame for so long ends the session
	Send      time.Duration // one frame may take so long to leave,
	Rate      int           // and a second more for so many of its bytes; 0: no more
}

// DefaultTiming is the protocol's.
var DefaultTiming = Timing{Heartbeat: 20 * time.Second, Dead: time.Minute, Send: 30 * time.Second, Rate: 16 << 10}

// Bundles hands out the trust bundles that an agent lacks.
type Bundles interface {
	// After lists the bundles past a version, in order.
	After(version uint64) []*agentv1.SignedBundle
}

// Service is safe for concurrent use once its hooks are set.
type Service struct {
	store    *store.Store
	commands *commands.Service
	bundles  Bundles
	version  uint64
	timing   Timing
	log      *slog.Logger

	onEvent []func(ctx context.Context, agentID string, e *agentv1.Event)
	onState []func(agentID string, online bool)

	mu       sync.Mutex
	sessions map[string]*session
	reports  map[string]tally // by site and machine, and by identity
	draining bool
	wg       sync.WaitGroup
}

// tally is the events of a machine that nobody enrolled, in the hour since then.
type tally struct {
	since time.Time
	n     int
}

var _ agentv1connect.SessionServiceHandler = (*Service)(nil)

// New makes the service; version is the newest trust bundle's.
func New(st *store.Store, cs *commands.Service, bundles Bundles, version uint64, timing Timing, log *slog.Logger) *Service {
	return &Service{store: st, commands: cs, bundles: bundles, version: version, timing: timing, log: log, sessions: map[string]*session{}, reports: map[string]tally{}}
}

// OnEvent adds a hook that hears each new event after it is stored, in the
// agent's order. It must be set before the first session and must not block for long.
func (s *Service) OnEvent(f func(ctx context.Context, agentID string, e *agentv1.Event)) {
	s.onEvent = append(s.onEvent, f)
}

// OnState adds a hook that hears of agents that come and go. It must be set
// before the first session and must not block for long.
func (s *Service) OnState(f func(agentID string, online bool)) { s.onState = append(s.onState, f) }

// Online reports whether the agent holds a session now.
func (s *Service) Online(agentID string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sessions[agentID] != nil
}

// mayReport counts more events of a machine that nobody enrolled: neither another session
// nor another identity brings it more of them. What each identity says of its hardware
// counts apart, for whoever boots in that machine's name is not to silence it.
func (s *Service) mayReport(a store.Agent, batch []*agentv1.Event) bool {
	hardware := 0
	for _, e := range batch {
		if e.GetName() == store.HardwareEvent {
			hardware++
		}
	}
	if hardware > 0 && s.tally("identity "+a.ID, hardware) <= maxHardware {
		return true
	}
	return s.tally(a.SiteID+" "+a.MachineID, len(batch)) <= maxReports
}

// tally adds n, and answers how many there were since its hour began.
func (s *Service) tally(key string, n int) int {
	now := s.store.Now()
	over := func(t tally) bool { return now.Sub(t.since) >= reportsEvery || now.Before(t.since) }
	s.mu.Lock()
	defer s.mu.Unlock()
	t, known := s.reports[key]
	if !known || over(t) {
		// Those that are left are of as many identities as may enrol in that time.
		maps.DeleteFunc(s.reports, func(_ string, t tally) bool { return over(t) })
		t = tally{since: now}
	}
	t.n += n
	s.reports[key] = t
	return t.n
}

// Expel ends the agent's session with a code, and its open commands: it will
// not be let in again.
func (s *Service) Expel(ctx context.Context, agentID string, why *errs.Error) error {
	s.mu.Lock()
	if old := s.sessions[agentID]; old != nil {
		old.close(&agentv1.Close{Code: string(why.Code), Message: why.Message})
	}
	s.mu.Unlock()
	return s.commands.Abandon(ctx, agentID, why)
}

// Drain refuses new sessions, asks each open one to come back later, and waits
// for their ends or for ctx.
func (s *Service) Drain(ctx context.Context) error {
	s.mu.Lock()
	s.draining = true
	for _, open := range s.sessions {
		open.close(&agentv1.Close{Code: string(errs.Draining), Message: "the gateway is stopping", RetryAfterS: 1})
	}
	s.mu.Unlock()
	done := make(chan struct{})
	go func() {
		s.wg.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("drain sessions: %w", ctx.Err())
	}
}

// controller carries the stream's deadlines to the handler, which connect hides.
type controller struct{}

// Deadlines wraps the service's HTTP handler so that one peer that does not
// read cannot hold a session for ever.
func Deadlines(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), controller{}, http.NewResponseController(w))))
	})
}

// session is one open stream. Its handler's goroutine owns everything but end.
type session struct {
	agent   store.Agent
	id      string
	service *Service
	stream  *connect.BidiStream[agentv1.AgentFrame, agentv1.GatewayFrame]
	rc      *http.ResponseController // nil in tests over other transports
	log     *slog.Logger

	end    chan *agentv1.Close // capacity 1: the first reason wins
	ending atomic.Bool         // sends are cut short from now on
	gone   chan struct{}       // closed when the handler returns

	credits  map[string]uint32
	sent     map[string]string // command handed out and not ended -> lane
	canceled map[string]bool
	echo     uint64
	seq      uint64
	lastSeen time.Time
}

// close asks the session's owner to end it.
func (x *session) close(c *agentv1.Close) {
	select {
	case x.end <- c:
	default:
	}
	x.ending.Store(true)
	if x.rc != nil {
		// A send that hangs now must not hold up whoever waits for the end.
		if err := x.rc.SetWriteDeadline(time.Now().Add(lastWords)); err != nil {
			x.log.Debug("shorten deadline", "err", err)
		}
	}
}

// lastWords is how long a session that ends may take to say so.
const lastWords = 2 * time.Second

// Connect answers SessionService.Connect.
func (s *Service) Connect(ctx context.Context, stream *connect.BidiStream[agentv1.AgentFrame, agentv1.GatewayFrame]) error {
	agent, err := caller.From(ctx)
	if err != nil {
		return caller.Error(err)
	}
	s.mu.Lock()
	if s.draining {
		s.mu.Unlock()
		return caller.Error(errs.Retry(errs.Draining, "the gateway is stopping"))
	}
	s.wg.Add(1)
	s.mu.Unlock()
	defer s.wg.Done()

	x := &session{
		service: s, stream: stream, agent: agent,
		log: s.log.With("agent", agent.ID, "role", agent.Role.String()),
		end: make(chan *agentv1.Close, 1), gone: make(chan struct{}),
		credits: map[string]uint32{}, sent: map[string]string{}, canceled: map[string]bool{},
	}
	x.rc, _ = ctx.Value(controller{}).(*http.ResponseController)
	defer close(x.gone)

	frames := s.read(x)
	reason, err := x.run(ctx, frames)
	if reason != nil {
		x.log.Info("session closed", "session", x.id, "code", reason.Code, "reason", reason.Message)
		if err := x.send(&agentv1.GatewayFrame{Frame: &agentv1.GatewayFrame_Close{Close: reason}}); err != nil {
			x.log.Debug("send close", "err", err)
		}
		return nil
	}
	if err != nil && ctx.Err() == nil && !errors.Is(err, io.EOF) {
		x.log.Info("session lost", "session", x.id, "err", err)
		return caller.Error(err)
	}
	x.log.Info("session ended", "session", x.id)
	return nil
}

// received is one frame, or how the stream ended. Who takes it calls done.
type received struct {
	frame *agentv1.AgentFrame
	err   error
	room  <-chan struct{} // the place that a large frame holds
}

func (r received) done() {
	if r.room != nil {
		<-r.room
	}
}

const (
	// largeFrame is what few frames exceed, and largeWaiting how many of those
	// may wait at once: a peer that sends faster than the store takes must not
	// have all of it kept in memory.
	largeFrame   = 64 << 10
	largeWaiting = 2
)

// read pumps frames until the stream or the handler ends. The handler's return
// ends a blocked Receive, so it cannot be waited for here; Drain waits.
func (s *Service) read(x *session) <-chan received {
	frames := make(chan received, 64)
	room := make(chan struct{}, largeWaiting)
	s.wg.Go(func() {
		for {
			f, err := x.stream.Receive()
			r := received{frame: f, err: err}
			if err == nil && proto.Size(f) > largeFrame {
				select {
				case room <- struct{}{}:
					r.room = room
				case <-x.gone:
					return
				}
			}
			select {
			case frames <- r:
			case <-x.gone:
				return
			}
			if err != nil {
				return
			}
		}
	})
	return frames
}

// send hands one frame to the stream, within the time for it.
func (x *session) send(f *agentv1.GatewayFrame) error {
	if x.rc != nil {
		limit := x.service.timing.Send
		if rate := x.service.timing.Rate; rate > 0 {
			limit += time.Duration(proto.Size(f)/rate) * time.Second
		}
		if x.ending.Load() {
			limit = min(limit, lastWords)
		}
		if err := x.rc.SetWriteDeadline(time.Now().Add(limit)); err != nil {
			return err
		}
	}
	if err := x.stream.Send(f); err != nil {
		return err
	}
	if x.rc != nil {
		return x.rc.SetWriteDeadline(time.Time{})
	}
	return nil
}

func closing(code errs.Code, retryAfter time.Duration, format string, args ...any) *agentv1.Close {
	return &agentv1.Close{Code: string(code), Message: fmt.Sprintf(format, args...), RetryAfterS: uint32(retryAfter / time.Second)}
}

// closeOf turns what forbids a session into its Close.
func closeOf(err error) *agentv1.Close {
	e := errs.From(err)
	return &agentv1.Close{Code: string(e.Code), Message: e.Message, RetryAfterS: 3600}
}

// run greets the agent and serves it until one side ends: with a Close to send
// or with an error.
func (x *session) run(ctx context.Context, frames <-chan received) (*agentv1.Close, error) {
	hello, reason, err := x.hello(ctx, frames)
	if reason != nil || err != nil {
		return reason, err
	}
	s := x.service
	agent, err := s.store.Greeted(ctx, x.agent.ID, hello)
	if errors.Is(err, store.ErrCloned) {
		return s.cloned(ctx, agent, hello)
	}
	if err != nil {
		return nil, fmt.Errorf("record hello: %w", err)
	}
	x.agent = agent
	x.id = "ses_" + agent.ID + "_" + strconv.FormatUint(agent.SessionEpoch, 10)
	// Read again: it may have been revoked or replaced since the request came in.
	if err := commands.MayAct(agent); err != nil {
		return closeOf(err), nil
	}
	if !s.enter(x) {
		return closing(errs.Superseded, 0, "a newer session of the same boot took over"), nil
	}
	defer s.leave(x)
	if err := s.commands.Greeted(ctx, agent, hello); err != nil {
		return nil, err
	}
	return x.serve(ctx, frames, hello)
}

// hello reads the first frame and checks that it fits the certificate.
func (x *session) hello(ctx context.Context, frames <-chan received) (*agentv1.Hello, *agentv1.Close, error) {
	timer := time.NewTimer(x.service.timing.Dead)
	defer timer.Stop()
	var first received
	select {
	case <-ctx.Done():
		return nil, nil, ctx.Err()
	case <-timer.C:
		return nil, closing(errs.Timeout, 0, "no Hello came"), nil
	case first = <-frames:
		first.done()
	}
	if first.err != nil {
		return nil, nil, first.err
	}
	h := first.frame.GetHello()
	switch {
	case h == nil:
		return nil, closing(errs.InvalidPayload, time.Minute, "the first frame must be Hello"), nil
	case h.AgentId != x.agent.ID:
		return nil, closing(errs.WrongAgent, time.Hour, "Hello says %.64q, the certificate %s", h.AgentId, x.agent.ID), nil
	case h.Role != x.agent.Role:
		return nil, closing(errs.RoleMismatch, time.Hour, "Hello says %s, the identity is a %s", h.Role, x.agent.Role), nil
	case h.ProtocolMin > Protocol || h.ProtocolMax < Protocol:
		return nil, closing(errs.ProtocolUnsupported, time.Hour, "this gateway speaks protocol %d, the agent %d to %d", Protocol, h.ProtocolMin, h.ProtocolMax), nil
	case h.BootId == "" || h.JournalEpoch == "" || h.EventEpoch == "":
		return nil, closing(errs.InvalidPayload, time.Minute, "Hello lacks boot_id, journal_epoch or event_epoch"), nil
	case len(h.Drivers) > 1024 || len(h.Capabilities) > 1024 || len(h.Open) > 1<<16 || len(h.Lanes) > 64 || aboutItself(h) > maxAboutItself || x.agent.IsStranger() && aboutItself(h) > maxAboutStranger:
		return nil, closing(errs.InvalidPayload, time.Minute, "Hello lists too much"), nil
	}
	return h, nil, nil
}

// maxAboutItself bounds what an agent's row keeps of its Hello: whoever lists
// agents reads all of it, again and again.
const maxAboutItself = 256 << 10

// maxAboutStranger is that of a machine that nobody enrolled.
const maxAboutStranger = 4 << 10

// aboutItself is how many bytes of a Hello go into the agent's row.
func aboutItself(h *agentv1.Hello) int {
	n := len(h.Version) + len(h.BootId) + len(h.JournalEpoch) + len(h.EventEpoch) + len(h.ClockSource)
	for _, d := range h.Drivers {
		n += proto.Size(d)
	}
	for _, c := range h.Capabilities {
		n += len(c)
	}
	return n
}

// cloned holds both boxes that use one key, and says so where a person looks.
func (s *Service) cloned(ctx context.Context, agent store.Agent, hello *agentv1.Hello) (*agentv1.Close, error) {
	why := errs.New(errs.IdentityCloned, "two boots alternate on one key: two boxes share this identity; both are held until a person decides")
	s.log.Error("alarm", "name", "identity.cloned", "agent", agent.ID, "site", agent.SiteID, "boot", hello.BootId, "other_boot", agent.BootID)
	err := s.store.AddEvent(ctx, store.Event{SiteID: agent.SiteID, MachineID: agent.MachineID, AgentID: agent.ID, Name: "identity.cloned", Class: "audit", Key: agent.ID,
		BodyJSON: fmt.Sprintf(`{"alarm":true,"boot_ids":[%q,%q]}`, hello.BootId, agent.BootID)})
	if err != nil {
		return nil, fmt.Errorf("record clone: %w", err)
	}
	if err := s.Expel(ctx, agent.ID, why); err != nil {
		return nil, err
	}
	return closeOf(why), nil
}

// enter makes x the agent's session, in place of an older one, whose end it
// waits for. It is false when a newer one is there already.
func (s *Service) enter(x *session) bool {
	for {
		s.mu.Lock()
		old := s.sessions[x.agent.ID]
		if old != nil && old.agent.SessionEpoch > x.agent.SessionEpoch {
			s.mu.Unlock()
			return false
		}
		if old == nil {
			if s.draining {
				x.close(&agentv1.Close{Code: string(errs.Draining), Message: "the gateway is stopping", RetryAfterS: 1})
			}
			s.sessions[x.agent.ID] = x
			s.mu.Unlock()
			break
		}
		old.close(closing(errs.Superseded, 0, "a newer session of the same agent took over"))
		s.mu.Unlock()
		<-old.gone
	}
	x.log.Info("agent online", "session", x.id, "version", x.agent.Version, "clock", x.agent.ClockSource)
	for _, f := range s.onState {
		f(x.agent.ID, true)
	}
	return true
}

func (s *Service) leave(x *session) {
	s.mu.Lock()
	delete(s.sessions, x.agent.ID)
	s.mu.Unlock()
	for _, f := range s.onState {
		f(x.agent.ID, false)
	}
}
