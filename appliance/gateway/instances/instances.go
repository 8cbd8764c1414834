// Package instances keeps what machines are to run, hands it to their agents
// until each has taken it, and keeps what they say of it.
package instances

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// Commands sends signed commands. Submitting one id twice with the same content
// is one command.
type Commands interface {
	Submit(ctx context.Context, spec commands.Spec) (id string, err error)
	Wait(ctx context.Context, id string) (commands.Outcome, error)
}

// Config is what a Service works with.
type Config struct {
	Store    *store.Store
	Commands Commands
	// Online says whether an agent holds a session.
	Online func(agentID string) bool
	Log    *slog.Logger
	// Backoff spaces what is sent again; zero: 5 s to 5 min, with jitter.
	Backoff backoff.Policy
}

const (
	// MaxPerMachine is how many instances a machine takes.
	MaxPerMachine = 256
	// MaxSpec bounds one instance's spec, in bytes.
	MaxSpec = 256 << 10
	// parallel bounds the commands that are waited for at a time.
	parallel = 128
	// every is how often the store is looked at without a reason.
	every      = time.Minute
	maxMessage = 2 << 10
	// stateEvent tells an instance's state.
	stateEvent = "instance.state"
)

// The states of an instance.
const (
	Pending  = "pending"
	Running  = "running"
	Stopped  = "stopped"
	Failed   = "failed"
	Removing = "removing"
	Unknown  = "unknown"
	// removed is told by nodes and never stored.
	removed = "removed"
)

// Service is safe for concurrent use. Run does the sending.
type Service struct {
	c    Config
	kick chan struct{}

	mu      sync.Mutex
	flying  map[string]bool // sends at hand, by key
	later   map[string]wait // sends that failed, by instance
	refresh map[string]bool // agents that are to be asked for their list
	slots   chan struct{}
}

// wait is until when a failed send rests.
type wait struct {
	generation uint64
	until      time.Time
}

// New makes the service.
func New(c Config) *Service {
	if c.Backoff.Min == 0 {
		c.Backoff = backoff.Policy{Min: 5 * time.Second, Max: 5 * time.Minute, Rand: func() float64 { return 0.5 + rand.Float64()/2 }}
	}
	return &Service{
		c: c, kick: make(chan struct{}, 1), flying: map[string]bool{}, later: map[string]wait{}, refresh: map[string]bool{},
		slots: make(chan struct{}, parallel),
	}
}

func (s *Service) wake() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// Apply stores what a machine is to run and has it sent. The same again is no
// change. A runtime that the machine's agent does not advertise is refused;
// before the agent was ever heard, nothing is known and all is taken.
func (s *Service) Apply(ctx context.Context, m store.Machine, name, runtime, spec string) (store.Instance, error) {
	var object map[string]json.RawMessage
	switch {
	case !driver.ValidID(runtime):
		return store.Instance{}, apierr.Invalid("runtime %.80q: want a driver's id, such as process or containerd", runtime)
	case len(spec) > MaxSpec:
		return store.Instance{}, apierr.Invalid("spec_json: %d bytes, limit %d", len(spec), MaxSpec)
	case json.Unmarshal([]byte(spec), &object) != nil || object == nil:
		return store.Instance{}, apierr.Invalid("spec_json: want a JSON object")
	}
	agents, err := s.c.Store.Agents(ctx, store.AgentFilter{MachineID: m.ID, Role: agentv1.Role_ROLE_NODE, State: store.AgentActive})
	if err != nil {
		return store.Instance{}, err
	}
	if n := len(agents); n > 0 && agents[n-1].JournalEpoch != "" && !slices.Contains(agents[n-1].Capabilities, "instance."+runtime) {
		return store.Instance{}, apierr.Cannot("runtime-unsupported", "machine %s has no runtime %s; it says it has %s", m.Name, runtime, offered(agents[n-1].Capabilities))
	}
	i, changed, err := s.c.Store.PutInstance(ctx, store.Instance{
		ID: s.c.Store.NewID("inst"), TenantID: m.TenantID, MachineID: m.ID, Name: name, Runtime: runtime, SpecJSON: spec, Created: s.c.Store.Now(),
	}, MaxPerMachine)
	if errors.Is(err, store.ErrFull) {
		return store.Instance{}, apierr.Busy("machine-full", "machine %s has %d instances, which is all it takes", m.Name, MaxPerMachine)
	}
	if err != nil {
		return store.Instance{}, err
	}
	if changed {
		s.wake()
	}
	return i, nil
}

func offered(capabilities []string) string {
	var names []string
	for _, c := range capabilities {
		if name, ok := strings.CutPrefix(c, "instance."); ok {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}

// Remove has an instance removed; it is listed until its machine says that
// nothing of it is left. Where no agent ever stood for the machine, it goes at once.
func (s *Service) Remove(ctx context.Context, i store.Instance) error {
	i, err := s.c.Store.RemoveInstance(ctx, i.ID)
	if err != nil {
		return err
	}
	agents, err := s.c.Store.Agents(ctx, store.AgentFilter{MachineID: i.MachineID, Role: agentv1.Role_ROLE_NODE})
	if err == nil && len(agents) == 0 {
		_, err = s.c.Store.InstanceGone(ctx, i.MachineID, i.ID, i.Generation)
	}
	s.wake()
	return err
}

// List tells the instances of a tenant, or of one machine of it.
func (s *Service) List(ctx context.Context, tenantID, machineID string) ([]store.Instance, error) {
	return s.c.Store.Instances(ctx, store.InstanceFilter{TenantID: tenantID, MachineID: machineID})
}

// State tells what is known of an instance's machine: its state as it was last
// heard, or unknown while the agent is away.
func (s *Service) State(ctx context.Context, i store.Instance) (state, message string, err error) {
	if i.Removing || i.State == Pending && i.Observed.IsZero() {
		return i.State, i.Message, nil
	}
	agents, err := s.c.Store.Agents(ctx, store.AgentFilter{MachineID: i.MachineID, Role: agentv1.Role_ROLE_NODE, State: store.AgentActive})
	if err != nil {
		return "", "", err
	}
	if n := len(agents); n > 0 && s.c.Online(agents[n-1].ID) {
		return i.State, i.Message, nil
	}
	return Unknown, "the machine's agent is away; it last said " + i.State, nil
}

// Came hears of agents that come and go: one that comes is asked what it runs.
func (s *Service) Came(agentID string, online bool) {
	if !online {
		return
	}
	s.mu.Lock()
	s.refresh[agentID] = true
	s.mu.Unlock()
	s.wake()
}

// said is the body of a state event.
type said struct {
	InstanceID string `json:"instance_id"`
	Runtime    string `json:"runtime"`
	State      string `json:"state"`
	Message    string `json:"message"`
	Generation uint64 `json:"generation"`
	Orphan     bool   `json:"orphan"`
}

// ParseEvent reads the body of a state event; anything else is an error.
func ParseEvent(body []byte) (instanceID string, o store.Observation, orphan bool, err error) {
	var e said
	if err := json.Unmarshal(body, &e); err != nil {
		return "", o, false, fmt.Errorf("state event: %w", err)
	}
	if err := known(e); err != nil {
		return "", o, false, err
	}
	return e.InstanceID, store.Observation{State: e.State, Message: cut(e.Message), Generation: e.Generation}, e.Orphan, nil
}

func known(e said) error {
	if len(e.InstanceID) == 0 || len(e.InstanceID) > 128 || e.Generation > 1<<62 {
		return errors.New("it names no instance")
	}
	if !slices.Contains([]string{Pending, Running, Stopped, Failed, Removing, removed}, e.State) {
		return fmt.Errorf("state %.40q is not known", e.State)
	}
	return nil
}

func cut(s string) string { return strings.ToValidUTF8(s[:min(len(s), maxMessage)], "") }

// Heard takes an agent's event.
func (s *Service) Heard(ctx context.Context, agentID string, e *agentv1.Event) {
	if e.GetName() != stateEvent {
		return
	}
	id, o, orphan, err := ParseEvent(e.GetBodyJson())
	var agent store.Agent
	if err == nil {
		agent, err = s.c.Store.Agent(ctx, agentID)
	}
	if err == nil && agent.Role == agentv1.Role_ROLE_NODE && agent.MachineID != "" {
		err = s.observe(ctx, agent.MachineID, id, o, orphan)
	}
	if err != nil && ctx.Err() == nil {
		s.c.Log.Warn("an instance's state is not taken", "agent", agentID, "err", err)
	}
}

// observe records what a machine says of an instance. What nobody here asked
// for, or another machine's, changes nothing.
func (s *Service) observe(ctx context.Context, machineID, id string, o store.Observation, orphan bool) error {
	st := s.c.Store
	row, err := st.InstanceOn(ctx, machineID, id)
	if errors.Is(err, store.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	switch {
	case o.State == removed && o.Generation < row.Generation:
		return nil // of something older
	case o.State == removed && row.Removing:
		_, err := st.InstanceGone(ctx, machineID, id, o.Generation)
		return err
	case o.State == removed:
		// Removed there, and wanted here: the node heard of a removal that this
		// gateway, restored from a copy, does not know.
		return s.again(ctx, machineID, id, o.Generation+1)
	case orphan:
		return s.again(ctx, machineID, id, o.Generation)
	}
	return st.ObserveInstance(ctx, machineID, id, o)
}

// again has an instance sent once more, as newer than what the machine knows.
func (s *Service) again(ctx context.Context, machineID, id string, knows uint64) error {
	err := s.c.Store.RaiseInstance(ctx, machineID, id, knows)
	if err == nil {
		err = s.c.Store.ForgetTaken(ctx, machineID, id)
	}
	s.wake()
	return err
}

// Run sends what is not taken yet until ctx ends.
func (s *Service) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		next, err := s.sweep(ctx, &wg)
		if err != nil && ctx.Err() == nil {
			s.c.Log.Error("instances are not sent", "err", err)
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

// sweep begins what is due, and says when to look again.
func (s *Service) sweep(ctx context.Context, wg *sync.WaitGroup) (time.Duration, error) {
	s.mu.Lock()
	var ask []string
	for agent := range s.refresh {
		ask = append(ask, agent)
	}
	s.mu.Unlock()
	for _, agent := range ask {
		if s.begin(ctx, wg, "list "+agent, func() { s.list(ctx, agent) }) {
			s.mu.Lock()
			delete(s.refresh, agent)
			s.mu.Unlock()
		}
	}
	pending, err := s.c.Store.PendingInstances(ctx)
	if err != nil {
		return every, err
	}
	next, now := every, time.Now()
	s.forget(pending)
	for _, p := range pending {
		if !s.c.Online(p.AgentID) {
			continue // Came wakes this loop
		}
		s.mu.Lock()
		w, failed := s.later[p.ID]
		s.mu.Unlock()
		if failed && w.generation == p.Generation && now.Before(w.until) {
			next = min(next, w.until.Sub(now)+time.Millisecond)
			continue
		}
		s.begin(ctx, wg, commandID(p), func() { s.send(ctx, p) })
	}
	return next, nil
}

// forget drops the waits of what is not to be sent any more.
func (s *Service) forget(pending []store.PendingInstance) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.later, func(id string, _ wait) bool {
		return !slices.ContainsFunc(pending, func(p store.PendingInstance) bool { return p.ID == id })
	})
}

// begin runs f unless it runs already or too much does; then the end of another
// wakes the loop.
func (s *Service) begin(ctx context.Context, wg *sync.WaitGroup, key string, f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.flying[key] {
		return false
	}
	select {
	case s.slots <- struct{}{}:
	default:
		return false
	}
	s.flying[key] = true
	wg.Go(func() {
		f()
		s.mu.Lock()
		delete(s.flying, key)
		s.mu.Unlock()
		<-s.slots
		s.wake()
	})
	return true
}

// commandID is the same whenever the same thing is sent: after a restart of the
// gateway it is the same command.
func commandID(p store.PendingInstance) string {
	life := sha256.Sum256([]byte(p.Life))
	return fmt.Sprintf("%s-%d-%s-%d", p.ID, p.Generation, hex.EncodeToString(life[:6]), p.Attempt)
}

// send has an agent take an instance, and records what it says.
func (s *Service) send(ctx context.Context, p store.PendingInstance) {
	spec := commands.Spec{ID: commandID(p), AgentID: p.AgentID, Kind: applyKind, Args: &agentv1.InstanceApplyRequest{Instance: &agentv1.InstanceSpec{
		InstanceId: p.ID, Name: p.Name, Runtime: p.Runtime, SpecJson: p.SpecJSON, Generation: p.Generation,
	}}}
	if p.Removing {
		spec.Kind, spec.Args = removeKind, &agentv1.InstanceRemoveRequest{InstanceId: p.ID, Generation: p.Generation}
	}
	result, refused, err := s.do(ctx, spec)
	if err == nil {
		s.mu.Lock()
		delete(s.later, p.ID)
		if refused != nil {
			n := int(p.Attempt)
			s.later[p.ID] = wait{p.Generation, time.Now().Add(s.c.Backoff.Delay(n))}
		}
		s.mu.Unlock()
		err = s.record(ctx, p, result, refused)
	} else if ctx.Err() == nil {
		s.mu.Lock()
		s.later[p.ID] = wait{p.Generation, time.Now().Add(s.c.Backoff.Delay(0))}
		s.mu.Unlock()
	}
	if err != nil && ctx.Err() == nil {
		s.c.Log.Error("an instance is not handed over", "instance", p.ID, "agent", p.AgentID, "err", err)
	}
}

// do sends a command and waits for its outcome: refused is the agent's error.
func (s *Service) do(ctx context.Context, spec commands.Spec) (result *agentv1.InstanceResult, refused *errs.Error, err error) {
	id, err := s.c.Commands.Submit(ctx, spec)
	if err != nil {
		return nil, nil, err
	}
	outcome, err := s.c.Commands.Wait(ctx, id)
	if err != nil {
		return nil, nil, err
	}
	if outcome.Err != nil {
		return nil, outcome.Err, nil
	}
	result = &agentv1.InstanceResult{}
	if err := proto.Unmarshal(outcome.Result, result); err != nil {
		return nil, errs.New(errs.InvalidPayload, "the agent's answer is no instance result"), nil
	}
	return result, nil, nil
}

func (s *Service) record(ctx context.Context, p store.PendingInstance, result *agentv1.InstanceResult, refused *errs.Error) error {
	st := s.c.Store
	if refused != nil {
		state := Failed
		switch {
		case p.Removing:
			state = Removing
		case refused.Retryable || refused.Code == errs.Expired || refused.Code == errs.Interrupted:
			state = Pending
		}
		return st.InstanceRefused(ctx, p.ID, p.Generation, p.Attempt, state, cut(refused.Error()))
	}
	o := store.Observation{State: Pending, Generation: p.Generation}
	there := false
	for _, one := range result.GetInstances() {
		e := said{InstanceID: one.GetInstanceId(), State: one.GetState(), Generation: one.GetGeneration()}
		if e.InstanceID == p.ID && known(e) == nil {
			there = true
			o = store.Observation{State: e.State, Message: cut(one.GetMessage()), Generation: e.Generation}
		}
	}
	if p.Removing {
		if !there {
			_, err := st.InstanceGone(ctx, p.MachineID, p.ID, p.Generation)
			return err
		}
		o.State = Removing // its end is told by an event
	}
	return st.InstanceTaken(ctx, p.ID, p.Generation, p.Life, o)
}

// list asks an agent that came what it runs. What was missed while this gateway
// or the line was down is made good by its answer.
func (s *Service) list(ctx context.Context, agentID string) {
	agent, err := s.c.Store.Agent(ctx, agentID)
	if err == nil && (agent.Role != agentv1.Role_ROLE_NODE || agent.MachineID == "" || !s.c.Online(agentID)) {
		return
	}
	var rows []store.Instance
	if err == nil {
		rows, err = s.c.Store.Instances(ctx, store.InstanceFilter{MachineID: agent.MachineID})
	}
	if err != nil {
		s.c.Log.Error("an agent's instances are not asked for", "agent", agentID, "err", err)
		return
	}
	if len(rows) == 0 {
		return
	}
	result, refused, err := s.do(ctx, commands.Spec{
		ID: fmt.Sprintf("list-%s-%d", agentID, agent.SessionEpoch), AgentID: agentID, Kind: listKind, Args: &agentv1.InstanceListRequest{}, Timeout: time.Minute,
	})
	if err != nil || refused != nil {
		if ctx.Err() == nil {
			s.c.Log.Warn("an agent does not list its instances", "agent", agentID, "err", errors.Join(err, refusal(refused)))
		}
		return
	}
	for _, row := range rows {
		if err := s.compare(ctx, agent.MachineID, row, result.GetInstances()); err != nil && ctx.Err() == nil {
			s.c.Log.Error("an instance's state is not taken", "instance", row.ID, "err", err)
		}
	}
}

func refusal(e *errs.Error) error {
	if e == nil {
		return nil // a nil *errs.Error is no nil error
	}
	return e
}

// compare settles one row with an agent's whole list.
func (s *Service) compare(ctx context.Context, machineID string, row store.Instance, all []*agentv1.InstanceStatus) error {
	for _, one := range all {
		if e := (said{InstanceID: one.GetInstanceId(), State: one.GetState(), Generation: one.GetGeneration()}); e.InstanceID == row.ID && known(e) == nil {
			return s.observe(ctx, machineID, row.ID, store.Observation{State: e.State, Message: cut(one.GetMessage()), Generation: e.Generation}, one.GetOrphan())
		}
	}
	if row.TakenGeneration == row.Generation {
		// The agent took it, and does not know it now.
		return s.again(ctx, machineID, row.ID, 0)
	}
	return nil
}
