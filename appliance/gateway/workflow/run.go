package workflow

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

// run is a workflow while it runs.
type run struct {
	e       *Engine
	w       store.Workflow
	params  Params
	machine store.Machine
	log     *slog.Logger

	step *store.WorkflowStep
	data stepData
}

// stepData is a step's row beyond its state.
type stepData struct {
	// Command is the one of the current attempt; nil before it is decided.
	Command *savedCommand `json:"command,omitempty"`
	// Result is what a done step answered.
	Result json.RawMessage `json:"result,omitempty"`
}

// Result is the JSON that a done step answered, or nothing.
func Result(step store.WorkflowStep) (json.RawMessage, error) {
	var data stepData
	if len(step.Data) == 0 {
		return nil, nil
	}
	if err := json.Unmarshal(step.Data, &data); err != nil {
		return nil, fmt.Errorf("read the data of step %s: %w", step.ID, err)
	}
	return data.Result, nil
}

// savedCommand is a command exactly as it is submitted, so that it is the same
// after a restart.
type savedCommand struct {
	AgentID    string        `json:"agent_id"`
	Kind       string        `json:"kind"`
	Lane       string        `json:"lane"`
	Args       []byte        `json:"args"`
	SecretRefs []string      `json:"secret_refs,omitempty"`
	Timeout    time.Duration `json:"timeout_ns"`
	RetrySafe  bool          `json:"retry_safe,omitempty"`
	// NotAfter bounds every attempt of a profile's step alike; zero: Timeout counts
	// from the submission.
	NotAfter time.Time `json:"not_after,omitzero"`
	// Itself says that the command goes to the machine, which needs no target.
	Itself bool `json:"itself,omitempty"`
	// Version is the snapshot's, of a pxe.assign.
	Version uint64 `json:"version,omitempty"`
}

func (e *Engine) load(ctx context.Context, w store.Workflow, log *slog.Logger) (*run, error) {
	r := &run{e: e, w: w, log: log}
	if err := json.Unmarshal(w.Params, &r.params); err != nil {
		return nil, fmt.Errorf("read parameters: %w", err)
	}
	machine, err := e.Store.Machine(ctx, w.TenantID, w.MachineID)
	if err != nil {
		return nil, err
	}
	r.machine = machine
	return r, nil
}

// all runs the steps that are not done.
func (r *run) all(ctx context.Context) error {
	actions, err := r.plan()
	if err != nil {
		return err
	}
	steps, err := r.e.Store.WorkflowSteps(ctx, r.w.ID)
	if err != nil {
		return err
	}
	if len(steps) != len(actions) {
		return fmt.Errorf("workflow has %d steps, its plan has %d: it was started by another version", len(steps), len(actions))
	}
	for i := range steps {
		if steps[i].Name != actions[i].name {
			return fmt.Errorf("step %s is %s, the plan says %s: it was started by another version", steps[i].ID, steps[i].Name, actions[i].name)
		}
		if steps[i].State == store.StateDone {
			continue
		}
		if err := r.one(ctx, &steps[i], actions[i]); err != nil {
			return fmt.Errorf("%s (%s): %w", steps[i].ID, steps[i].Name, err)
		}
	}
	return nil
}

// one runs a step, from its start or from where a restart left it.
func (r *run) one(ctx context.Context, step *store.WorkflowStep, a action) error {
	now := r.e.Store.Now()
	r.step, r.data = step, stepData{}
	if len(step.Data) > 0 {
		if err := json.Unmarshal(step.Data, &r.data); err != nil {
			return fmt.Errorf("read the step's data: %w", err)
		}
	}
	if step.State != store.StateRunning {
		step.State, step.Started = store.StateRunning, now
		if err := r.save(ctx); err != nil {
			return err
		}
	}
	left := max(step.Started.Add(a.limit).Sub(now), r.e.grace)
	over := errs.New(errs.Timeout, "it took longer than %s", a.limit)
	limited, stop := context.WithTimeoutCause(ctx, left, over)
	defer stop()
	r.log.Info("step runs", "step", step.ID, "action", a.name, "attempt", step.Attempt)
	if err := a.run(limited, r); err != nil {
		if ctx.Err() == nil && limited.Err() != nil {
			note := r.e.Note(r.w.ID)
			if note != "" {
				return errs.New(errs.Timeout, "it took longer than %s: %s", a.limit, note)
			}
			return over
		}
		return err
	}
	r.e.note(r.w.ID, "")
	step.State, step.Ended = store.StateDone, r.e.Store.Now()
	return r.save(ctx)
}

// save stores the step. Without its row there is no going on.
func (r *run) save(ctx context.Context) error {
	step, err := r.row()
	if err == nil {
		err = r.e.Store.SaveStep(ctx, step)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errParked, err)
	}
	return nil
}

func (r *run) row() (store.WorkflowStep, error) {
	data, err := encode(r.data)
	if err != nil {
		return store.WorkflowStep{}, err
	}
	r.step.Data = data
	return *r.step, nil
}

func saved(agentID string, c metal.Command) (*savedCommand, error) {
	args, err := proto.MarshalOptions{Deterministic: true}.Marshal(c.Args)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", c.Kind, err)
	}
	return &savedCommand{AgentID: agentID, Kind: c.Kind, Lane: c.Lane, Args: args, SecretRefs: c.SecretRefs, Timeout: c.Timeout, RetrySafe: c.RetrySafe}, nil
}

// spec is the command as submitted. An empty id has one chosen.
func (r *run) spec(id string, c *savedCommand) commands.Spec {
	spec := commands.Spec{
		ID: id, AgentID: c.AgentID, TargetNodeID: r.machine.ID, Kind: c.Kind, Lane: c.Lane, Raw: c.Args, SecretRefs: c.SecretRefs, Timeout: c.Timeout,
		WorkflowID: r.w.ID, StepID: r.step.ID, Attempt: r.step.Attempt, Traceparent: r.params.Traceparent,
	}
	if c.Itself {
		spec.TargetNodeID = ""
	}
	if !c.NotAfter.IsZero() {
		spec.Timeout = c.NotAfter.Sub(r.e.Store.Now())
	}
	return spec
}

// CommandID is the id of a step's command.
func CommandID(workflowID, stepID string, attempt uint32) string {
	return fmt.Sprintf("%s.%s.%d", workflowID, stepID, attempt)
}

// send submits a command and waits for its outcome. When its time is over nothing
// is submitted any more: one that was there before has its outcome, or gets it.
func (r *run) send(ctx context.Context, id string, c *savedCommand) ([]byte, error) {
	spec := r.spec(id, c)
	over := !c.NotAfter.IsZero() && spec.Timeout < time.Millisecond
	if !over {
		var err error
		if id, err = r.e.Commands.Submit(ctx, spec); err != nil {
			return nil, fmt.Errorf("submit %s: %w", c.Kind, err)
		}
	}
	outcome, err := r.e.Commands.Wait(ctx, id)
	switch {
	case over && errors.Is(err, store.ErrNotFound):
		return nil, errs.New(errs.Expired, "%s was not sent in its time: it did not run", c.Kind)
	case err != nil:
		return nil, fmt.Errorf("wait for %s: %w", c.Kind, err)
	case outcome.Err != nil:
		return nil, fmt.Errorf("%s: %w", c.Kind, outcome.Err)
	}
	return outcome.Result, nil
}

// maxAttempts bounds the commands of one step.
const maxAttempts = 5

// again decides whether a failed command is followed by another attempt.
func again(retrySafe bool, err error, attempt uint32) bool {
	var e *errs.Error
	if attempt+1 >= maxAttempts || !errors.As(err, &e) {
		return false
	}
	if e.Retryable {
		return true
	}
	switch e.Code {
	case errs.WrongIncarnation, errs.LaneFull, errs.Expired:
		return true // it did not run
	case errs.Timeout, errs.Interrupted, errs.Unreachable, errs.BmcError:
		return retrySafe
	}
	return false
}

// command runs the step's command: decide is asked once per attempt, and what
// it decides is stored before anything is sent.
func (r *run) command(ctx context.Context, decide func(ctx context.Context) (agentID string, c metal.Command, err error)) ([]byte, error) {
	return r.attempts(ctx, again, func(ctx context.Context) (*savedCommand, error) {
		agentID, c, err := decide(ctx)
		if err != nil {
			return nil, err
		}
		return saved(agentID, c)
	})
}

// attempts is command for commands that are encoded already.
func (r *run) attempts(ctx context.Context, again func(safe bool, err error, attempt uint32) bool, decide func(ctx context.Context) (*savedCommand, error)) ([]byte, error) {
	for {
		if r.data.Command == nil {
			c, err := decide(ctx)
			if err != nil {
				return nil, err
			}
			r.data.Command = c
			if err := r.save(ctx); err != nil {
				return nil, err
			}
		}
		result, err := r.send(ctx, CommandID(r.w.ID, r.step.ID, r.step.Attempt), r.data.Command)
		if err == nil {
			return result, nil
		}
		if ctx.Err() != nil || !again(r.data.Command.RetrySafe, err, r.step.Attempt) {
			return nil, err
		}
		if err := r.next(ctx, err); err != nil {
			return nil, err
		}
	}
}

// next begins the step's next attempt after a pause.
func (r *run) next(ctx context.Context, why error) error {
	r.log.Warn("step is tried again", "step", r.step.ID, "attempt", r.step.Attempt, "err", why)
	r.e.note(r.w.ID, "tried again after: "+why.Error())
	attempt := int(r.step.Attempt)
	r.step.Attempt++
	r.data.Command = nil
	if err := r.save(ctx); err != nil {
		return err
	}
	if err := r.e.between.Wait(ctx, attempt, nil); err != nil {
		return context.Cause(ctx)
	}
	return nil
}

// until looks now, at every wake and every period, until look says yes.
func (r *run) until(ctx context.Context, note string, look func(ctx context.Context) (bool, error)) error {
	r.e.note(r.w.ID, note)
	for {
		woken := r.e.wakeup() // before looking, so that nothing is missed
		ok, err := look(ctx)
		if err != nil || ok {
			return err
		}
		timer := time.NewTimer(r.e.Poll)
		select {
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		case <-woken:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// agent waits for an active agent that fits and is online, the newest first.
func (r *run) agent(ctx context.Context, note string, f store.AgentFilter, fits func(store.Agent) bool) (id string, err error) {
	f.State = store.AgentActive
	err = r.until(ctx, note, func(ctx context.Context) (bool, error) {
		agents, err := r.e.Store.Agents(ctx, f)
		if err != nil {
			return false, err
		}
		for i := len(agents) - 1; i >= 0; i-- {
			if r.e.Online(agents[i].ID) && (fits == nil || fits(agents[i])) {
				id = agents[i].ID
				return true, nil
			}
		}
		return false, nil
	})
	if err == nil {
		r.e.note(r.w.ID, "")
	}
	return id, err
}

// box is the site's agent.
func (r *run) box(ctx context.Context) (string, error) {
	return r.agent(ctx, "waiting for the site's box to be online", store.AgentFilter{SiteID: r.machine.SiteID, Role: agentv1.Role_ROLE_SITE}, nil)
}

// ramdisk is the machine's ramdisk that enrolled in this workflow's window.
func (r *run) ramdisk(ctx context.Context) (string, error) {
	return r.agent(ctx, "waiting for the machine's ramdisk to be online",
		store.AgentFilter{MachineID: r.machine.ID, WindowID: r.params.WindowID, Role: agentv1.Role_ROLE_RAMDISK}, nil)
}
