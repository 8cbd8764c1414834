package workflow

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/secretstore"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/plugins/driver/invocation"
)

// Planned is one step of a profile as it was when the workflow began.
type Planned struct {
	module.ProfileStep
	// Registered says that a module serves the step itself; else it is a driver's.
	Registered bool `json:"registered,omitempty"`
	// Driver and Config are what the profile binds to the step's concern.
	Driver string          `json:"driver,omitempty"`
	Config json.RawMessage `json:"config,omitempty"`
}

const (
	// resultGrace is how long past its time a step waits for what its agent says
	// became of the command.
	resultGrace = 3 * time.Minute
	// maxResult bounds what a step's row keeps of an answer.
	maxResult = 256 << 10
	// stopWithin is how long a cancelled workflow waits for its command's end.
	stopWithin = 30 * time.Second
)

// StartProfile stores a workflow of the profile's steps for a machine and has it
// run. It keeps the steps and bindings that the profile has now.
func (e *Engine) StartProfile(ctx context.Context, name string, m store.Machine, traceparent string) (id string, err error) {
	profile, ok := e.Modules.Profile(name)
	if !ok {
		return "", apierr.Invalid("profile %.80q: there is no such profile; there are: %s", name, strings.Join(e.Modules.Profiles(), ", "))
	}
	// Drivers may have been registered since the profile was.
	if err := e.Modules.CheckProfile(profile); err != nil {
		return "", apierr.BadConfig("%s", errs.From(err).Message)
	}
	p := Params{Traceparent: traceparent}
	var names []string
	for i, step := range profile.Steps {
		planned, err := e.planned(profile, step, m)
		if err != nil {
			return "", err
		}
		for _, ref := range invocation.SecretRefs(planned.Config) {
			tenant, err := secretstore.TenantOf(ref)
			switch {
			case err != nil:
				return "", apierr.BadConfig("profile %s: step %d: a secret's reference is not secret://<tenant>/<name>", name, i)
			case tenant != m.TenantID:
				return "", apierr.Denied("profile %s: step %d uses another tenant's secret", name, i)
			}
		}
		p.Plan = append(p.Plan, planned)
		names = append(names, step.Uses)
	}
	return e.begin(ctx, name, m, p, names, "")
}

// planned settles what a step will do, and for how long.
func (e *Engine) planned(profile module.Profile, step module.ProfileStep, m store.Machine) (Planned, error) {
	p := Planned{ProfileStep: step}
	kind := invocation.Kind
	if registered, ok := e.Modules.Step(step.Uses); ok {
		p.Registered, p.On = true, registered.On
		if p.Timeout == 0 {
			p.Timeout = registered.Timeout
		}
		kind = registered.Kind
	} else {
		concern, _, _ := strings.Cut(step.Uses, ".")
		bound := profile.Drivers[concern]
		p.Driver, p.Config = bound.Driver, bound.Config
	}
	if p.Timeout == 0 {
		known, ok := e.Modules.Kind(kind)
		if !ok {
			return Planned{}, apierr.Cannot("module-missing", "step %s sends %s, and the module that brings it is left out", step.Uses, kind)
		}
		p.Timeout = known.Timeout
	}
	if registered, ok := e.Modules.Step(step.Uses); ok && step.Timeout == 0 {
		// A machine may need longer than its kind: people switch some.
		if c, err := registered.Command(m, step.With); err == nil {
			p.Timeout = max(p.Timeout, c.Timeout)
		}
	}
	return p, nil
}

// profileStep runs one step of a profile: by its own code where a module
// registered the step, and else as one driver.invoke.
func (r *run) profileStep(ctx context.Context, p Planned) error {
	until := r.step.Started.Add(p.Timeout)
	var answer func([]byte) (json.RawMessage, error)
	decide, retry := r.driverCommand, againDriver
	if p.Registered {
		// Looked up late: of a command that runs already the outcome is waited for.
		step := func() (module.Step, error) {
			step, ok := r.e.Modules.Step(p.Uses)
			if !ok {
				return step, errs.New(errs.UnsupportedOperation, "no module brings the step %s any more", p.Uses)
			}
			return step, nil
		}
		retry = again
		decide = func(ctx context.Context, p Planned, agent store.Agent) (*savedCommand, error) {
			step, err := step()
			if err != nil {
				return nil, err
			}
			c, err := step.Command(r.machine, p.With)
			if err != nil {
				return nil, err
			}
			return saved(agent.ID, c)
		}
		answer = func(result []byte) (json.RawMessage, error) {
			step, err := step()
			if err != nil || step.Result == nil {
				return nil, err
			}
			return step.Result(result)
		}
	} else {
		answer = func(result []byte) (json.RawMessage, error) {
			if !json.Valid(result) {
				return nil, errs.New(errs.DriverError, "driver %s answered what is not JSON", p.Driver)
			}
			return result, nil
		}
	}
	result, err := r.attempts(ctx, retry, func(ctx context.Context) (*savedCommand, error) {
		over := errs.New(errs.Timeout, "it took longer than %s", p.Timeout)
		left := until.Sub(r.e.Store.Now())
		if left <= 0 {
			return nil, over
		}
		waiting, stop := context.WithTimeoutCause(ctx, left, over)
		defer stop()
		agent, err := r.on(waiting, p.On)
		if err != nil {
			return nil, err
		}
		c, err := decide(ctx, p, agent)
		if err != nil {
			return nil, err
		}
		c.NotAfter, c.Itself = until, p.On != module.OnSite
		return c, nil
	})
	if err != nil {
		return err
	}
	value, err := answer(result)
	switch {
	case err != nil:
		return err
	case len(value) > maxResult:
		return errs.New(errs.DriverError, "the answer has %d bytes, more than the %d that a step keeps", len(value), maxResult)
	case !utf8.Valid(value):
		return errs.New(errs.DriverError, "the answer is not UTF-8")
	case len(value) == 0 || string(value) == "null":
		return nil
	}
	r.data.Result = value
	row, err := r.row()
	if err == nil {
		_, err = Result(row)
	}
	if err != nil {
		r.data.Result = nil
		return errs.New(errs.DriverError, "the answer cannot be kept: %v", err)
	}
	return nil
}

// on waits for the agent that a step goes to.
func (r *run) on(ctx context.Context, on string) (store.Agent, error) {
	role, _ := module.Role(on)
	f, what := store.AgentFilter{MachineID: r.machine.ID, Role: role}, "the machine's "+on+" agent"
	if role == agentv1.Role_ROLE_SITE {
		f, what = store.AgentFilter{SiteID: r.machine.SiteID, Role: role}, "the site's box"
	}
	id, err := r.agent(ctx, "waiting for "+what+" to be online", f, nil)
	if err != nil {
		return store.Agent{}, err
	}
	return r.e.Store.Agent(ctx, id)
}

// driverCommand is a step as driver.invoke.
func (r *run) driverCommand(_ context.Context, p Planned, agent store.Agent) (*savedCommand, error) {
	concern, operation, ok := invocation.Split(p.Uses)
	if !ok {
		return nil, errs.New(errs.InvalidPayload, "step %q is not <concern>.<operation>", p.Uses)
	}
	kind, ok := r.e.Modules.Kind(invocation.Kind)
	if !ok {
		return nil, errs.New(errs.UnknownKind, "no module brings %s any more", invocation.Kind)
	}
	request := invocation.Request{
		WorkflowID: r.w.ID, StepID: r.step.ID, Attempt: r.step.Attempt,
		Concern: concern, Operation: operation, Args: p.With, Driver: p.Driver, Config: p.Config,
	}
	if p.On == module.OnSite {
		request.TargetNodeID = r.machine.ID
	}
	args, err := invocation.Encode(request)
	if err != nil {
		return nil, err
	}
	return &savedCommand{
		AgentID: agent.ID, Kind: invocation.Kind, Lane: kind.Lane, Args: args, SecretRefs: invocation.SecretRefs(p.Config),
		Timeout: p.Timeout, RetrySafe: r.e.retrySafe(agent, p.Driver, concern, operation),
	}, nil
}

// retrySafe is what the agent said of the driver when it came, or else what the
// driver's declaration here says. What nobody knows is not retry-safe.
func (e *Engine) retrySafe(agent store.Agent, id, concern, operation string) bool {
	advertised := false
	for _, d := range agent.Drivers {
		if d.GetId() == id && slices.Contains(d.GetKinds(), concern) {
			advertised = true
			if !slices.Contains(d.GetRetrySafeOperations(), concern+"."+operation) {
				return false
			}
		}
	}
	return advertised || e.Modules.RetrySafe(id, concern, operation)
}

// againDriver decides whether a failed driver.invoke is followed by another
// attempt: where it surely did not run, and where the operation is retry-safe
// and its error may pass.
func againDriver(safe bool, err error, attempt uint32) bool {
	var e *errs.Error
	if attempt+1 >= maxAttempts || !errors.As(err, &e) {
		return false
	}
	switch e.Code {
	case errs.WrongIncarnation, errs.LaneFull, errs.Expired:
		return true
	case errs.Unavailable:
		return e.Retryable
	case errs.Interrupted:
		return safe
	}
	return safe && e.Retryable
}

// errCancelled ends a workflow that a person cancelled.
var errCancelled = errs.New(errs.Cancelled, "the workflow was cancelled")

// Cancel ends a running workflow, as failed with the code cancelled. Its command
// is stopped where it can be; what that has done stays done.
func (e *Engine) Cancel(ctx context.Context, tenantID, id string) error {
	w, err := e.Store.Workflow(ctx, tenantID, id)
	if err != nil {
		return err
	}
	ended := apierr.Busy("workflow-ended", "workflow %s does not run any more", id)
	if w.State != store.StateRunning {
		return ended
	}
	var p Params
	if err := json.Unmarshal(w.Params, &p); err != nil {
		return err
	}
	p.Cancelled = true
	params, err := encode(p)
	if err != nil {
		return err
	}
	// It is on disk before anything stops: a gateway that dies here ends it when it is back.
	if err := e.Store.SetWorkflowParams(ctx, id, params); errors.Is(err, store.ErrNotFound) {
		return ended
	} else if err != nil {
		return err
	}
	e.mu.Lock()
	if stop := e.stops[id]; stop != nil {
		stop(errCancelled)
	}
	e.mu.Unlock()
	select {
	case e.kick <- struct{}{}:
	default:
	}
	return nil
}

// cancelled stops the command of the running step and says why the workflow ends.
func (r *run) cancelled(ctx context.Context) error {
	steps, err := r.e.Store.WorkflowSteps(ctx, r.w.ID)
	if err != nil {
		return err
	}
	for i := range steps {
		if steps[i].State != store.StateRunning {
			continue
		}
		r.step, r.data = &steps[i], stepData{}
		if len(steps[i].Data) > 0 {
			if err := json.Unmarshal(steps[i].Data, &r.data); err != nil {
				return err
			}
		}
		if r.data.Command == nil {
			break
		}
		id := CommandID(r.w.ID, r.step.ID, r.step.Attempt)
		err := r.e.Commands.Cancel(ctx, id)
		if errors.Is(err, store.ErrNotFound) {
			break // it was never submitted
		}
		if err != nil {
			return err
		}
		r.e.note(r.w.ID, "waiting for the command of the cancelled step to end")
		waiting, stop := context.WithTimeout(ctx, stopWithin)
		_, err = r.e.Commands.Wait(waiting, id)
		stop()
		if err != nil && ctx.Err() == nil {
			r.log.Warn("a cancelled workflow ends before its command: the agent does not answer", "command", id, "err", err)
		}
	}
	return errCancelled
}
