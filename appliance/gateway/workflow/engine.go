package workflow

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

// Commands sends signed commands. Submitting one id twice with the same
// content is one command.
type Commands interface {
	Submit(ctx context.Context, spec commands.Spec) (id string, err error)
	Wait(ctx context.Context, id string) (commands.Outcome, error)
	Cancel(ctx context.Context, id string) error
}

// Enroller opens boot windows and mints the join strings of nodes.
type Enroller interface {
	OpenWindow(ctx context.Context, siteID, machineID, windowID, purpose string, until time.Time) error
	NewToken(ctx context.Context, role agentv1.Role, siteID, machineID string, ttl time.Duration) (join string, err error)
}

// Secrets keeps secrets encrypted.
type Secrets interface {
	Put(ctx context.Context, tenant, name string, value secret.Value) (ref string, err error)
}

// Config is what an engine works with.
type Config struct {
	Store *store.Store
	// Modules bring the kinds, steps and profiles that workflows are made of.
	Modules  *module.Set
	Commands Commands
	Enrol    Enroller
	Secrets  Secrets
	// Online says whether an agent holds a session.
	Online func(agentID string) bool
	Log    *slog.Logger
	// Poll is how often a waiting step looks; Wake makes it look at once. 0 stands for 2 s.
	Poll time.Duration
	// Parallel bounds the workflows of one tenant that run at a time; the rest wait
	// their turn. 0 stands for 64.
	Parallel int
}

// Engine runs workflows. All of its state is in the store.
type Engine struct {
	Config
	kick chan struct{} // of capacity one: look for workflows to run

	// grace is how long a step that is taken up after its limit still gets: its
	// command may have ended well while the gateway was away.
	grace   time.Duration
	between backoff.Policy // the attempts of a step
	pause   time.Duration  // before a workflow whose state cannot be stored is taken up again
	ask     time.Duration  // before a box is asked what a machine has fetched

	mu     sync.Mutex
	woken  chan struct{}            // closed and replaced by Wake
	notes  map[string]string        // workflow id -> what its step waits for
	sites  map[string]chan struct{} // site id -> a lock of capacity one
	active map[string]bool
	stops  map[string]context.CancelCauseFunc // of active workflows
}

// New makes an engine; Run runs it.
func New(c Config) *Engine {
	if c.Poll <= 0 {
		c.Poll = 2 * time.Second
	}
	if c.Parallel <= 0 {
		c.Parallel = 64
	}
	return &Engine{
		Config: c, kick: make(chan struct{}, 1), grace: time.Minute, pause: 10 * time.Second, ask: firstAsk, between: backoff.Policy{Min: 2 * time.Second, Max: 30 * time.Second, Rand: rand.Float64},
		woken: make(chan struct{}), notes: map[string]string{}, sites: map[string]chan struct{}{}, active: map[string]bool{}, stops: map[string]context.CancelCauseFunc{},
	}
}

// event is a workflow's event: what a person looks for when a machine did not
// come up.
func event(w store.Workflow, siteID, name string) (store.Event, error) {
	body, err := json.Marshal(map[string]string{"workflow": w.ID, "name": w.Name, "machine": w.MachineID, "state": w.State, "code": w.ErrorCode, "message": w.ErrorMessage})
	if err != nil {
		return store.Event{}, err
	}
	return store.Event{SiteID: siteID, MachineID: w.MachineID, Name: name, Class: "audit", Key: w.ID, BodyJSON: string(body)}, nil
}

// Params is what a workflow was asked for. Zero fields do not apply to it.
type Params struct {
	Traceparent string    `json:"traceparent,omitempty"`
	WindowID    string    `json:"window_id"`
	WindowUntil time.Time `json:"window_until"`
	// Of a deploy.
	Image             *Image   `json:"image,omitempty"`
	DiskSerial        string   `json:"disk_serial,omitempty"`
	Hostname          string   `json:"hostname,omitempty"`
	SSHAuthorizedKeys []string `json:"ssh_authorized_keys,omitempty"`
	// Of what boots something that is not the ramdisk. Boot is with the artifacts that
	// it needs; Window and ByHand say for how long, and that people start the machine.
	Boot     *store.Boot   `json:"boot,omitempty"`
	UKI      bool          `json:"uki,omitempty"`
	Firmware string        `json:"firmware,omitempty"` // "bios"; else UEFI
	Window   time.Duration `json:"window_ns,omitempty"`
	ByHand   bool          `json:"by_hand,omitempty"`
	// Of a wipe.
	DiskSerials []string `json:"disk_serials,omitempty"`
	// Of a profile: what it said when the workflow began.
	Plan []Planned `json:"plan,omitempty"`
	// Cancelled says that a person ended it.
	Cancelled bool `json:"cancelled,omitempty"`
}

// Image is the artifact as it was when the workflow began: a name that is
// given to other bytes meanwhile changes nothing.
type Image struct {
	Format            string `json:"format"`
	SHA256            string `json:"sha256"`
	SizeBytes         uint64 `json:"size_bytes"`
	UnpackedSHA256    string `json:"unpacked_sha256"`
	UnpackedSizeBytes uint64 `json:"unpacked_size_bytes"`
}

// Start stores a workflow of the engine's own for a machine and has it run. The
// window's fields are the engine's to set.
func (e *Engine) Start(ctx context.Context, name string, m store.Machine, p Params) (id string, err error) {
	if p.ByHand {
		name += byHand
	}
	actions, err := plan(name)
	if err != nil {
		return "", err
	}
	for _, kind := range kindsOf(name) {
		if _, known := e.Modules.Kind(kind); !known {
			return "", apierr.Cannot("module-missing", "%s sends %s, and the module that brings it is left out", name, kind)
		}
	}
	p.WindowID, p.WindowUntil = e.Store.NewID("win"), e.Store.Now().Add(windowLength(name)).Truncate(time.Millisecond)
	var names []string
	for _, a := range actions {
		names = append(names, a.name)
	}
	return e.begin(ctx, name, m, p, names, states[name].during)
}

// encode is JSON that leaves values inside it as they were written.
func encode(v any) ([]byte, error) {
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(out.Bytes(), []byte("\n")), nil
}

// begin stores a workflow and has it run; an empty state leaves the machine's as it is.
func (e *Engine) begin(ctx context.Context, name string, m store.Machine, p Params, names []string, state string) (id string, err error) {
	params, err := encode(p)
	if err != nil {
		return "", fmt.Errorf("start workflow: %w", err)
	}
	w := store.Workflow{ID: e.Store.NewID("wf"), TenantID: m.TenantID, Name: name, MachineID: m.ID, State: store.StateRunning, Params: params, Created: e.Store.Now()}
	var steps []store.WorkflowStep
	for i, name := range names {
		steps = append(steps, store.WorkflowStep{WorkflowID: w.ID, Seq: i, ID: fmt.Sprintf("main.%d", i), Name: name})
	}
	begun, err := event(w, m.SiteID, "workflow.started")
	if err != nil {
		return "", fmt.Errorf("start workflow: %w", err)
	}
	if err := e.Store.AddWorkflow(ctx, w, steps, state, begun); err != nil {
		if errors.Is(err, store.ErrConflict) {
			return "", apierr.Busy("workflow-running", "machine %s has a workflow that runs", m.Name)
		}
		return "", err
	}
	select {
	case e.kick <- struct{}{}:
	default:
	}
	return w.ID, nil
}

// Wake has every waiting step look again; the gateway calls it when an agent
// came, went or said something.
func (e *Engine) Wake() {
	e.mu.Lock()
	defer e.mu.Unlock()
	close(e.woken)
	e.woken = make(chan struct{})
}

func (e *Engine) wakeup() <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.woken
}

// Note is what the running step of a workflow waits for, or empty.
func (e *Engine) Note(workflowID string) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.notes[workflowID]
}

func (e *Engine) note(workflowID, text string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if text == "" {
		delete(e.notes, workflowID)
		return
	}
	e.notes[workflowID] = text
}

// Run takes up every unfinished workflow and runs new ones until ctx ends. It
// returns when all of them have stopped; they stay unfinished in the store.
func (e *Engine) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	for {
		if err := e.launch(ctx, &wg); err != nil && ctx.Err() == nil {
			return fmt.Errorf("run workflows: %w", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-e.kick:
		}
	}
}

// turns are the workflows whose turn it is, of all that are unfinished, the oldest
// first. A tenant whose workflows wait for hours holds up its own alone, and one that
// was cancelled only has to end.
func turns(unfinished []store.Workflow, active map[string]bool, parallel int) (due []store.Workflow) {
	busy := map[string]int{}
	for _, w := range unfinished {
		if active[w.ID] {
			busy[w.TenantID]++
		}
	}
	for _, w := range unfinished {
		var p struct {
			Cancelled bool `json:"cancelled"`
		}
		ends := json.Unmarshal(w.Params, &p) == nil && p.Cancelled
		if active[w.ID] || !ends && busy[w.TenantID] >= parallel {
			continue
		}
		busy[w.TenantID]++
		due = append(due, w)
	}
	return due
}

// launch starts the workflows whose turn it is.
func (e *Engine) launch(ctx context.Context, wg *sync.WaitGroup) error {
	running, err := e.Store.RunningWorkflows(ctx)
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, w := range turns(running, e.active, e.Parallel) {
		e.active[w.ID] = true
		mine, stop := context.WithCancelCause(ctx)
		e.stops[w.ID] = stop
		wg.Go(func() {
			e.execute(ctx, mine, w)
			stop(nil)
			e.note(w.ID, "")
			e.mu.Lock()
			delete(e.active, w.ID)
			delete(e.stops, w.ID)
			e.mu.Unlock()
			if ctx.Err() == nil {
				select {
				case e.kick <- struct{}{}:
				default:
				}
			}
		})
	}
	return nil
}

// errParked says that a workflow's state cannot be stored now: it stays
// running, and is taken up again.
var errParked = errors.New("parked")

// wait holds a workflow back that the store does not read or take now: it is taken
// up again at once where this returns.
func (e *Engine) wait(ctx context.Context, log *slog.Logger, err error) {
	log.Error("workflow waits: its state cannot be read or stored", "err", err)
	select {
	case <-ctx.Done():
	case <-time.After(e.pause):
	}
}

// execute runs a workflow from its first unfinished step to its end. mine ends
// with ctx, or when the workflow is cancelled.
func (e *Engine) execute(ctx, mine context.Context, w store.Workflow) {
	log := e.Log.With("workflow", w.ID, "name", w.Name, "machine", w.MachineID)
	// Read again now that a cancel finds it running: one that came before is in the
	// store. So is its end, if it ended between being listed and being taken up.
	w, err := e.Store.Workflow(ctx, w.TenantID, w.ID)
	if err != nil {
		if ctx.Err() == nil {
			e.wait(ctx, log, err)
		}
		return
	}
	if w.State != store.StateRunning {
		return
	}
	r, err := e.load(ctx, w, log)
	switch {
	case err != nil:
	case r.params.Cancelled:
		err = r.cancelled(ctx)
	default:
		err = r.all(mine)
		if ctx.Err() == nil && mine.Err() != nil {
			err = r.cancelled(ctx)
		}
	}
	if ctx.Err() != nil {
		return // unfinished on purpose
	}
	if errors.Is(err, errParked) {
		e.wait(ctx, log, err)
		return
	}
	w.Ended = e.Store.Now()
	w.State = store.StateDone
	profile := r != nil && len(r.params.Plan) > 0
	state := states[w.Name].after
	if err != nil {
		failure := errs.From(err)
		w.State, w.ErrorCode, w.ErrorMessage = store.StateFailed, string(failure.Code), failure.Message
		if state != "" {
			state = metal.Failed
		}
		// Before the end is stored: after it, another workflow may own the machine.
		if r != nil && !profile {
			if err := r.release(ctx); err != nil && ctx.Err() == nil {
				log.Warn("the box was not told to give the machine back to its own disk: its boot window ends by itself", "err", err, "window", r.params.WindowID)
			}
		}
	}
	if profile {
		state = "" // a profile's steps say nothing about what the machine is
	}
	siteID := ""
	if r != nil {
		siteID = r.machine.SiteID
	}
	ended, err := event(w, siteID, "workflow.ended")
	window := ""
	if r != nil && !profile {
		window = r.params.WindowID
	}
	if err == nil {
		err = e.Store.EndWorkflow(ctx, w, state, window, ended)
	}
	if err != nil {
		if ctx.Err() == nil {
			e.wait(ctx, log, err)
		}
		return
	}
	log.Info("workflow ended", "state", w.State, "code", w.ErrorCode, "message", w.ErrorMessage)
}

// LockSite makes one assignment of a site at a time, in the order of versions.
func (e *Engine) LockSite(ctx context.Context, siteID string) (unlock func(), err error) {
	e.mu.Lock()
	lock := e.sites[siteID]
	if lock == nil {
		lock = make(chan struct{}, 1)
		e.sites[siteID] = lock
	}
	e.mu.Unlock()
	select {
	case lock <- struct{}{}:
		return func() { <-lock }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}
