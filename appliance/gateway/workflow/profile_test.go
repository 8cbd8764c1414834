package workflow

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/provision"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/plugins/driver/binding"
	"github.com/better-compute/site-appliance/plugins/driver/invocation"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// drive does what the agent's driver would, after the agent's own check.
func (w *world) drive(spec commands.Spec) (string, *errs.Error) {
	r, err := invocation.Parse(spec.Raw)
	if err != nil {
		w.t.Errorf("driver.invoke of %s: %v", spec.StepID, err)
		return "", errs.From(err)
	}
	if r.WorkflowID != spec.WorkflowID || r.StepID != spec.StepID || r.Attempt != spec.Attempt || r.TargetNodeID != spec.TargetNodeID {
		w.t.Errorf("invocation %+v does not fit its command %+v", r, spec)
	}
	w.nth[spec.Kind]++
	if w.fail != nil {
		if e := w.fail(spec, w.nth[spec.Kind]); e != nil {
			return "", e
		}
	}
	w.effects = append(w.effects, strings.TrimSpace(r.Driver+" "+r.Name()+" "+string(r.Args)))
	if w.invoke != nil {
		return w.invoke(r, spec)
	}
	return `"done"`, nil
}

const credential = "secret://acme/bmc"

// cycle is a profile without any of metal's steps.
func cycle() module.Profile {
	return module.Profile{
		Name: "cycle",
		Drivers: map[string]binding.Binding{"power": {Driver: "acme-bmc",
			Config: json.RawMessage(`{"address":"10.0.0.5","credentials":"secret://acme/bmc"}`)}},
		Steps: []module.ProfileStep{
			{Uses: "power.getPower", On: module.OnSite},
			{Uses: "power.setPower", On: module.OnSite, With: json.RawMessage(`"off"`), Timeout: 5 * time.Minute},
			{Uses: "power.setPower", On: module.OnSite, With: json.RawMessage(`["on"]`)},
		},
	}
}

var cycled = []string{"acme-bmc power.getPower", `acme-bmc power.setPower "off"`, `acme-bmc power.setPower ["on"]`}

// newProfileWorld is a world whose gateway has these profiles.
func newProfileWorld(t *testing.T, profiles ...module.Profile) *world {
	w := newWorld(t)
	w.profiles = profiles
	return w
}

func (w *world) checkProfile(wf store.Workflow, want []string) {
	w.t.Helper()
	if wf.State != store.StateDone {
		w.t.Fatalf("workflow is %s (%s: %s), want done", wf.State, wf.ErrorCode, wf.ErrorMessage)
	}
	if !slices.Equal(w.effects, want) {
		w.t.Errorf("effects = %q, want %q", w.effects, want)
	}
	m, err := w.store.Machine(w.t.Context(), "acme", "m1")
	must(w.t, err)
	if m.State != metal.Enrolled {
		w.t.Errorf("machine is %s, want enrolled as before", m.State)
	}
}

func TestProfile(t *testing.T) {
	w := newProfileWorld(t, cycle())
	e := w.engine()
	id, err := e.StartProfile(t.Context(), "cycle", w.m, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	must(t, err)
	if _, err := e.StartProfile(t.Context(), "cycle", w.m, ""); err == nil || !strings.Contains(err.Error(), "workflow-running") {
		t.Errorf("second StartProfile = %v, want workflow-running", err)
	}
	w.checkProfile(w.runUntil(e, id), cycled)
	steps, err := w.store.WorkflowSteps(t.Context(), id)
	must(t, err)
	for _, step := range steps {
		if answer, err := Result(step); err != nil || string(answer) != `"done"` {
			t.Errorf("Result(%s) = %s, %v, want what the driver answered", step.ID, answer, err)
		}
	}
	for i := range 3 {
		spec := w.commands[CommandID(id, fmt.Sprintf("main.%d", i), 0)].spec
		if spec.Kind != "driver.invoke" || spec.Lane != "provision" || spec.AgentID != w.box || !slices.Equal(spec.SecretRefs, []string{credential}) || !strings.HasPrefix(spec.Traceparent, "00-0af7") {
			t.Errorf("command %d = %+v", i, spec)
		}
	}
}

// TestProfilePayload: what a step says as driver.invoke, byte for byte.
func TestProfilePayload(t *testing.T) {
	bios := module.Profile{
		Name:    "bios",
		Drivers: map[string]binding.Binding{"bios": {Driver: "acme-bmc"}, "config": {Driver: "nvidia", Config: json.RawMessage(`{"mig":true}`)}},
		Steps: []module.ProfileStep{
			{Uses: "bios.applySettings", On: module.OnSite, With: json.RawMessage(`{"a":"<b>"}`)},
			{Uses: "config.apply", On: module.OnNode},
		},
	}
	w := newProfileWorld(t, bios)
	w.enrol(store.Agent{ID: "ag_node", Role: agentv1.Role_ROLE_NODE, SiteID: "site_1", MachineID: w.m.ID})
	w.online["ag_node"] = true
	e := w.engine()
	id, err := e.StartProfile(t.Context(), "bios", w.m, "")
	must(t, err)
	w.checkProfile(w.runUntil(e, id), []string{`acme-bmc bios.applySettings {"a":"<b>"}`, "nvidia config.apply"})
	for step, want := range map[string]struct{ agent, target, payload string }{
		"main.0": {w.box, "node_1", `{"workflowId":"` + id + `","stepId":"main.0","attempt":0,"targetNodeId":"node_1","args":{"concern":"bios","operation":"applySettings","args":{"a":"<b>"},"driver":"acme-bmc"}}`},
		"main.1": {"ag_node", "", `{"workflowId":"` + id + `","stepId":"main.1","attempt":0,"args":{"concern":"config","operation":"apply","driver":"nvidia","config":{"mig":true}}}`},
	} {
		spec := w.commands[CommandID(id, step, 0)].spec
		if string(spec.Raw) != want.payload || spec.TargetNodeID != want.target || spec.AgentID != want.agent {
			t.Errorf("%s goes to %s for %q as\n%s\nwant %s for %q as\n%s", step, spec.AgentID, spec.TargetNodeID, spec.Raw, want.agent, want.target, want.payload)
		}
	}
}

// TestProfileRestart stops the gateway at every point of every step, once each,
// and wants the next one to finish with no command run twice.
func TestProfileRestart(t *testing.T) {
	for at := 1; ; at++ {
		w := newProfileWorld(t, cycle())
		w.at = at
		e := w.engine()
		id, err := e.StartProfile(t.Context(), "cycle", w.m, "")
		must(t, err)
		wf := w.runUntil(e, id)
		if w.crashed == "" {
			w.checkProfile(wf, cycled)
			if at <= 9 {
				t.Errorf("the gateway was stopped at %d points, want three of each step", at-1)
			}
			return
		}
		if wf.State != store.StateRunning {
			t.Fatalf("stopped %s: workflow is %s (%s), want running", w.crashed, wf.State, wf.ErrorMessage)
		}
		t.Run(fmt.Sprintf("%d %s", at, w.crashed), func(t *testing.T) {
			w.t = t
			w.checkProfile(w.runUntil(w.engine(), id), cycled)
		})
	}
}

// TestProfileKeepsItsPlan: a workflow goes on with the steps and bindings that it
// began with, whatever the profile says after a restart.
func TestProfileKeepsItsPlan(t *testing.T) {
	w := newProfileWorld(t, cycle())
	w.at = 4 // between the first step and the second
	e := w.engine()
	id, err := e.StartProfile(t.Context(), "cycle", w.m, "")
	must(t, err)
	w.runUntil(e, id)
	if w.crashed == "" {
		t.Fatal("the gateway was not stopped")
	}
	other := cycle()
	other.Drivers = map[string]binding.Binding{"power": {Driver: "other-bmc"}}
	other.Steps = other.Steps[:1]
	w.profiles = []module.Profile{other}
	w.checkProfile(w.runUntil(w.engine(), id), cycled)
	w.effects = nil
	e = w.engine()
	id, err = e.StartProfile(t.Context(), "cycle", w.m, "")
	must(t, err)
	w.checkProfile(w.runUntil(e, id), []string{"other-bmc power.getPower"})
}

func TestProfileRefused(t *testing.T) {
	foreign := cycle()
	foreign.Name, foreign.Drivers = "foreign", map[string]binding.Binding{"power": {Driver: "acme-bmc", Config: json.RawMessage(`{"credentials":"secret://other/bmc"}`)}}
	odd := cycle()
	odd.Name, odd.Drivers = "odd", map[string]binding.Binding{"power": {Driver: "acme-bmc", Config: json.RawMessage(`{"token":"secret://acme"}`)}}
	w := newProfileWorld(t, cycle(), foreign, odd)
	e := w.engine()
	for name, want := range map[string]string{
		"none":    `INVALID_INPUT: profile "none"`,
		"foreign": "PERMISSION_DENIED: profile foreign: step 0 uses another tenant's secret",
		"odd":     "INVALID_CONFIG: profile odd: step 0",
	} {
		if _, err := e.StartProfile(t.Context(), name, w.m, ""); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("StartProfile(%s) = %v, want %s", name, err, want)
		}
	}
	if _, err := e.StartProfile(t.Context(), "cycle", w.m, ""); err != nil {
		t.Errorf("StartProfile(cycle) = %v", err)
	}
}

// TestProfileRetries: a step is repeated where its operation is retry-safe and
// the error may pass, and where nothing ran; never otherwise.
func TestProfileRetries(t *testing.T) {
	for name, c := range map[string]struct {
		safe bool
		err  *errs.Error
		want bool
	}{
		"retry-safe and retryable":      {true, errs.Retry(errs.Unreachable, "x"), true},
		"retry-safe, final":             {true, errs.New(errs.BmcError, "x"), false},
		"retry-safe and interrupted":    {true, errs.New(errs.Interrupted, "x"), true},
		"not retry-safe, retryable":     {false, errs.Retry(errs.Unreachable, "x"), false},
		"not retry-safe, interrupted":   {false, errs.New(errs.Interrupted, "x"), false},
		"not retry-safe, unavailable":   {false, errs.Retry(errs.Unavailable, "x"), true},
		"unavailable for good":          {false, errs.New(errs.Unavailable, "x"), false},
		"not retry-safe, never ran":     {false, errs.New(errs.Expired, "x"), true},
		"not retry-safe, full":          {false, errs.Retry(errs.LaneFull, "x"), true},
		"another incarnation":           {false, errs.New(errs.WrongIncarnation, "x"), true},
		"a code of the driver's own":    {true, errs.New("fan-broken", "x"), false},
		"its own, and it may pass":      {true, errs.Retry("fan-broken", "x"), true},
		"its own, not safe to run anew": {false, errs.Retry("fan-broken", "x"), false},
	} {
		t.Run(name, func(t *testing.T) {
			p := cycle()
			p.Steps = p.Steps[:1]
			w := newProfileWorld(t, p)
			if c.safe {
				w.advertise(&agentv1.AdvertisedDriver{Id: "acme-bmc", Version: "1", Kinds: []string{"power"}, RetrySafeOperations: []string{"power.getPower"}})
			}
			w.fail = func(_ commands.Spec, nth int) *errs.Error {
				if nth == 1 {
					return c.err
				}
				return nil
			}
			e := w.engine()
			id, err := e.StartProfile(t.Context(), "cycle", w.m, "")
			must(t, err)
			wf := w.runUntil(e, id)
			if got := wf.State == store.StateDone; got != c.want || !got && wf.ErrorCode != string(c.err.Code) {
				t.Errorf("workflow is %s (%s: %s), want repeated %t", wf.State, wf.ErrorCode, wf.ErrorMessage, c.want)
			}
			if n := w.nth[invocation.Kind]; n != map[bool]int{true: 2, false: 1}[c.want] {
				t.Errorf("the driver was asked %d times, want repeated %t", n, c.want)
			}
		})
	}
}

// advertise has the box say Hello with these drivers.
func (w *world) advertise(drivers ...*agentv1.AdvertisedDriver) {
	w.t.Helper()
	_, err := w.store.Greeted(context.Background(), w.box, &agentv1.Hello{AgentId: w.box, BootId: "boot " + w.box, JournalEpoch: "journal " + w.box, EventEpoch: "events " + w.box, Drivers: drivers})
	must(w.t, err)
}

// TestRetrySafe: what the agent advertised decides, and else what is registered.
func TestRetrySafe(t *testing.T) {
	w := newProfileWorld(t)
	e := w.engine()
	agent := store.Agent{Drivers: []*agentv1.AdvertisedDriver{
		{Id: "acme", Kinds: []string{"power"}, RetrySafeOperations: []string{"power.getPower"}},
		{Id: "acme", Kinds: []string{"bios"}},
	}}
	for op, want := range map[string]bool{"power.getPower": true, "power.setPower": false, "bios.getSettings": false} {
		concern, operation, _ := strings.Cut(op, ".")
		if got := e.retrySafe(agent, "acme", concern, operation); got != want {
			t.Errorf("retrySafe(acme, %s) = %t, want %t", op, got, want)
		}
	}
	// Of two drivers with one id nobody knows which will run it.
	agent.Drivers = append(agent.Drivers, &agentv1.AdvertisedDriver{Id: "acme", Kinds: []string{"power"}})
	if e.retrySafe(agent, "acme", "power", "getPower") {
		t.Error("an operation that one of two drivers does not list is retry-safe")
	}
	if e.retrySafe(agent, "other", "power", "getPower") {
		t.Error("an operation that nobody knows is retry-safe")
	}
}

// TestStepTimeoutSetsNotAfter: a step's time bounds its command, and each of its
// attempts alike; without one the kind's stands.
func TestStepTimeoutSetsNotAfter(t *testing.T) {
	w := newProfileWorld(t, cycle())
	e := w.engine()
	id, err := e.StartProfile(t.Context(), "cycle", w.m, "")
	must(t, err)
	w.checkProfile(w.runUntil(e, id), cycled)
	for step, want := range map[string]time.Duration{"main.0": 10 * time.Minute, "main.1": 5 * time.Minute} {
		if got := w.commands[CommandID(id, step, 0)].spec.Timeout; got > want || got < want-time.Minute {
			t.Errorf("%s: time-out %s, want %s or a little less", step, got, want)
		}
	}
	// A step that is over sends nothing more.
	p := cycle()
	p.Steps = []module.ProfileStep{{Uses: "power.getPower", On: module.OnSite, Timeout: time.Nanosecond}}
	w.profiles = []module.Profile{p}
	w.effects = nil
	e = w.engine()
	id, err = e.StartProfile(t.Context(), "cycle", w.m, "")
	must(t, err)
	if wf := w.runUntil(e, id); wf.State != store.StateFailed || wf.ErrorCode != string(errs.Timeout) || len(w.effects) != 0 {
		t.Errorf("workflow is %s (%s) after %v, want a timeout and nothing sent", wf.State, wf.ErrorCode, w.effects)
	}
}

// TestRegisteredStep: a step that a module serves relays a typed command to the
// machine's own BMC, whatever the profile binds; without the module the very
// same profile goes out as driver.invoke.
func TestRegisteredStep(t *testing.T) {
	relaying := cycle()
	w := newProfileWorld(t, relaying)
	e := w.engine()
	set, err := module.Join(module.Module{Name: "metal", Kinds: metal.Kinds(), Steps: metal.Steps()}, provision.Module(relaying))
	must(t, err)
	e.Modules = set
	id, err := e.StartProfile(t.Context(), "cycle", w.m, "")
	must(t, err)
	w.checkProfile(w.runUntil(e, id), []string{"power off", "power on"})
	var kinds []string
	for i := range 3 {
		kinds = append(kinds, w.commands[CommandID(id, fmt.Sprintf("main.%d", i), 0)].spec.Kind)
	}
	if want := []string{"bmc.query", "bmc.power", "bmc.power"}; !slices.Equal(kinds, want) {
		t.Errorf("kinds = %q, want %q", kinds, want)
	}
	steps, err := w.store.WorkflowSteps(t.Context(), id)
	must(t, err)
	if answer, err := Result(steps[0]); err != nil || string(answer) != `"on"` {
		t.Errorf("Result(getPower) = %s, %v, want \"on\"", answer, err)
	}
	if answer, err := Result(steps[1]); err != nil || answer != nil {
		t.Errorf("Result(setPower) = %s, %v, want nothing", answer, err)
	}

	w = newProfileWorld(t, cycle())
	e = w.engine()
	id, err = e.StartProfile(t.Context(), "cycle", w.m, "")
	must(t, err)
	w.checkProfile(w.runUntil(e, id), cycled)
}

// TestResultThatIsNoJSON: an agent's driver.invoke answers JSON or fails.
func TestResultThatIsNoJSON(t *testing.T) {
	for answer, code := range map[string]errs.Code{"{": errs.DriverError, "\"\xff\"": errs.DriverError, `{"a":1}`: "", "null": "", `"` + strings.Repeat("x", maxResult) + `"`: errs.DriverError,
		strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000): errs.DriverError} {
		p := cycle()
		p.Steps = p.Steps[:1]
		w := newProfileWorld(t, p)
		w.invoke = func(invocation.Request, commands.Spec) (string, *errs.Error) { return answer, nil }
		e := w.engine()
		id, err := e.StartProfile(t.Context(), "cycle", w.m, "")
		must(t, err)
		if wf := w.runUntil(e, id); wf.ErrorCode != string(code) {
			t.Errorf("answer %.10s: workflow is %s (%s), want code %q", answer, wf.State, wf.ErrorCode, code)
		}
	}
}

// TestModulesLeftOut: without metal there is no inspection, and without provision
// no driver step.
func TestModulesLeftOut(t *testing.T) {
	w := newProfileWorld(t, cycle())
	e := w.engine()
	set, err := module.Join(provision.Module(cycle()))
	must(t, err)
	e.Modules = set
	if _, err := e.Start(t.Context(), Inspect, w.m, Params{}); err == nil || !strings.Contains(err.Error(), "UNSUPPORTED: module-missing") {
		t.Errorf("Start(inspect) without metal = %v, want module-missing", err)
	}
	id, err := e.StartProfile(t.Context(), "cycle", w.m, "")
	must(t, err)
	w.checkProfile(w.runUntil(e, id), cycled)
	bare := provision.Module(cycle())
	bare.Kinds = nil
	if _, err := module.Join(bare); errs.CodeOf(err) != errs.InvalidConfig {
		t.Errorf("Join(profile without driver.invoke) = %v, want invalid-config", err)
	}
}

// realCommands is an engine on the real command service, whose commands stay
// open until the test ends them.
func (w *world) realCommands(t *testing.T) (*commands.Service, func() *Engine) {
	service := commands.New(w.store, newSigner(t), modules(t, w.profiles...), slog.New(slog.DiscardHandler))
	return service, func() *Engine {
		e := w.engine()
		e.Commands = service
		return e
	}
}

func (w *world) openCommand(t *testing.T) store.Command {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		list, err := w.store.OpenCommands(t.Context(), w.box)
		must(t, err)
		if len(list) > 0 {
			return list[0]
		}
	}
	t.Fatal("no command came")
	return store.Command{}
}

func (w *world) awaitEnd(t *testing.T, id string) store.Workflow {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		wf, err := w.store.Workflow(t.Context(), "acme", id)
		must(t, err)
		if wf.State != store.StateRunning {
			return wf
		}
	}
	t.Fatal("the workflow did not end")
	return store.Workflow{}
}

func runEngine(t *testing.T, e *Engine) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	return func() { cancel(); must(t, <-done) }
}

// TestCancel: a cancelled workflow stops its command, starts no other step, and
// leaves the machine to the next workflow.
func TestCancel(t *testing.T) {
	w := newProfileWorld(t, cycle())
	service, engine := w.realCommands(t)
	e := engine()
	stop := runEngine(t, e)
	defer stop()
	id, err := e.StartProfile(t.Context(), "cycle", w.m, "")
	must(t, err)
	c := w.openCommand(t)
	if err := e.Cancel(t.Context(), "other", id); err == nil {
		t.Error("another tenant cancelled the workflow")
	}
	must(t, service.Moved(t.Context(), w.box, c.ID, store.CommandReceived))
	must(t, e.Cancel(t.Context(), "acme", id))
	// The agent is told, and says how the command ended.
	for {
		now, err := w.store.Command(t.Context(), c.ID)
		must(t, err)
		if now.Cancel {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if wf, err := w.store.Workflow(t.Context(), "acme", id); err != nil || wf.State != store.StateRunning {
		t.Errorf("workflow is %s, %v while its command runs, want running", wf.State, err)
	}
	must(t, service.Finish(t.Context(), w.box, c.ID, nil, errs.New(errs.Cancelled, "stopped")))
	wf := w.awaitEnd(t, id)
	if wf.State != store.StateFailed || wf.ErrorCode != string(errs.Cancelled) {
		t.Errorf("workflow is %s (%s), want failed as cancelled", wf.State, wf.ErrorCode)
	}
	steps, err := w.store.WorkflowSteps(t.Context(), id)
	must(t, err)
	if steps[0].State != store.StateFailed || steps[1].State != store.StateWaiting {
		t.Errorf("steps are %s and %s, want failed and waiting", steps[0].State, steps[1].State)
	}
	if err := e.Cancel(t.Context(), "acme", id); err == nil || !strings.Contains(err.Error(), "workflow-ended") {
		t.Errorf("second Cancel = %v, want workflow-ended", err)
	}
	if _, err := e.StartProfile(t.Context(), "cycle", w.m, ""); err != nil {
		t.Errorf("StartProfile after the end = %v", err)
	}
}

// TestCancelSurvivesRestart: a cancel that a gateway took and could not finish is
// finished by the next, before and after the command was submitted.
func TestCancelSurvivesRestart(t *testing.T) {
	for _, submitted := range []bool{true, false} {
		w := newProfileWorld(t, cycle())
		_, engine := w.realCommands(t)
		e := engine()
		id, err := e.StartProfile(t.Context(), "cycle", w.m, "")
		must(t, err)
		if submitted {
			stop := runEngine(t, e)
			w.openCommand(t)
			stop()
		}
		must(t, engine().Cancel(t.Context(), "acme", id)) // by an engine that runs nothing
		stop := runEngine(t, engine())
		if wf := w.awaitEnd(t, id); wf.ErrorCode != string(errs.Cancelled) {
			t.Errorf("submitted %t: workflow is %s (%s), want cancelled", submitted, wf.State, wf.ErrorCode)
		}
		stop()
		if open, err := w.store.OpenCommands(t.Context(), w.box); err != nil || len(open) != 0 {
			t.Errorf("submitted %t: %d commands are open, %v, want none", submitted, len(open), err)
		}
	}
}

// TestCancelOfADeploy gives the machine back to its own disk.
func TestCancelOfADeploy(t *testing.T) {
	w := newProfileWorld(t)
	unhide := w.hide("ag_ramdisk")
	defer unhide()
	e := w.engine()
	online := w.Online
	e.Online = func(id string) bool { return online(id) && !w.hidden(id) }
	id, err := e.Start(t.Context(), Deploy, w.m, params(Deploy))
	must(t, err)
	stop := runEngine(t, e)
	defer stop()
	waitStep(t, w, id, "ramdisk.wait")
	must(t, e.Cancel(t.Context(), "acme", id))
	if wf := w.awaitEnd(t, id); wf.ErrorCode != string(errs.Cancelled) {
		t.Errorf("workflow is %s (%s), want cancelled", wf.State, wf.ErrorCode)
	}
	m, err := w.store.Machine(t.Context(), "acme", "m1")
	must(t, err)
	if m.State != metal.Failed || m.Assignment.Action != metal.LocalDisk {
		t.Errorf("machine is %s with %s, want failed with local-disk", m.State, m.Assignment.Action)
	}
}

// TestCancelBetweenSteps: a deploy that is cancelled while the gateway is away, and
// no step of it runs, gives the machine back as well.
func TestCancelBetweenSteps(t *testing.T) {
	w := newProfileWorld(t)
	w.at = 8 // before the BMC is asked in power.off of main.2
	e := w.engine()
	id, err := e.Start(t.Context(), Deploy, w.m, params(Deploy))
	must(t, err)
	w.runUntil(e, id)
	steps, err := w.store.WorkflowSteps(t.Context(), id)
	must(t, err)
	if steps[1].State != store.StateDone || steps[2].State != store.StateRunning {
		t.Fatalf("stopped %s: steps are %s and %s, want done and running", w.crashed, steps[1].State, steps[2].State)
	}
	steps[2].State = store.StateWaiting // as if it had been stopped a moment earlier
	must(t, w.store.SaveStep(t.Context(), steps[2]))
	must(t, w.engine().Cancel(t.Context(), "acme", id))
	if wf := w.runUntil(w.engine(), id); wf.ErrorCode != string(errs.Cancelled) {
		t.Errorf("workflow is %s (%s), want cancelled", wf.State, wf.ErrorCode)
	}
	if got := w.assigned.Machines[0].Action; got != pxev1.Action_ACTION_LOCAL_DISK {
		t.Errorf("the box was left with %s, want local disk", got)
	}
}

// TestEndedWorkflowStaysEnded: a workflow that ended while the engine was about to
// take it up is not run again, and does not touch a machine that another may own.
func TestEndedWorkflowStaysEnded(t *testing.T) {
	w := newProfileWorld(t)
	w.fail = func(commands.Spec, int) *errs.Error { return errs.New(errs.Internal, "x") }
	e := w.engine()
	id, err := e.Start(t.Context(), Inspect, w.m, Params{})
	must(t, err)
	stale, err := w.store.Workflow(t.Context(), "acme", id)
	must(t, err)
	ended := w.runUntil(e, id)
	if ended.State != store.StateFailed {
		t.Fatalf("workflow is %s, want failed", ended.State)
	}
	w.fail, w.effects = nil, nil
	before := w.points
	e.execute(t.Context(), t.Context(), stale)
	again, err := w.store.Workflow(t.Context(), "acme", id)
	must(t, err)
	events, err := w.store.Events(t.Context(), store.EventFilter{MachineID: w.m.ID, SiteIDs: []string{"site_1"}, Name: "workflow.ended"})
	must(t, err)
	if again.State != ended.State || !again.Ended.Equal(ended.Ended) || len(w.effects) != 0 || w.points != before || len(events) != 1 {
		t.Errorf("workflow is %s since %s, with %q and %d ends, want as it was", again.State, again.Ended, w.effects, len(events))
	}
}

// TestNothingBeginsAfterItsTime: a command that a stopped gateway had decided and not
// submitted is not sent by the next one when the step's time is over. One that was
// submitted is waited for.
func TestNothingBeginsAfterItsTime(t *testing.T) {
	for point, want := range map[string]struct {
		effects int
		state   string
	}{"before driver.invoke of main.0": {0, store.StateFailed}, "after driver.invoke of main.0": {1, store.StateDone}} {
		p := cycle()
		p.Steps = []module.ProfileStep{{Uses: "power.setPower", On: module.OnSite, With: json.RawMessage(`"off"`), Timeout: 300 * time.Millisecond}}
		w := newProfileWorld(t, p)
		w.at = map[bool]int{true: 1, false: 2}[want.effects == 0]
		e := w.engine()
		id, err := e.StartProfile(t.Context(), "cycle", w.m, "")
		must(t, err)
		w.runUntil(e, id)
		if w.crashed != point {
			t.Fatalf("stopped %q, want %q", w.crashed, point)
		}
		time.Sleep(350 * time.Millisecond)
		wf := w.runUntil(w.engine(), id)
		if wf.State != want.state || len(w.effects) != want.effects || wf.State == store.StateFailed && wf.ErrorCode != string(errs.Timeout) {
			t.Errorf("stopped %s: workflow is %s (%s) after %q, want %s after %d effects", point, wf.State, wf.ErrorCode, w.effects, want.state, want.effects)
		}
	}
}

// TestRegisteredStepIsLeftOut: a command that runs when the gateway comes back
// without the module of its step is waited for; then the workflow fails.
func TestRegisteredStepIsLeftOut(t *testing.T) {
	w := newProfileWorld(t, cycle())
	w.at = 2
	e := w.engine()
	set, err := module.Join(module.Module{Name: "metal", Kinds: metal.Kinds(), Steps: metal.Steps()}, provision.Module(cycle()))
	must(t, err)
	e.Modules = set
	id, err := e.StartProfile(t.Context(), "cycle", w.m, "")
	must(t, err)
	w.runUntil(e, id)
	if w.crashed != "after bmc.query of main.0" {
		t.Fatalf("stopped %q", w.crashed)
	}
	before := w.points
	wf := w.runUntil(w.engine(), id)
	if wf.ErrorCode != string(errs.UnsupportedOperation) || !strings.Contains(wf.ErrorMessage, "no module brings the step power.getPower") {
		t.Errorf("workflow is %s (%s: %s), want unsupported-operation", wf.State, wf.ErrorCode, wf.ErrorMessage)
	}
	if w.points != before+3 {
		t.Errorf("%d points were passed, want those of one submission and of its outcome", w.points-before)
	}
}

// TestRegisteredStepsAnswerIsNoJSON: a box that answers nonsense to a step's command
// fails the workflow; it does not keep it running for ever.
func TestRegisteredStepsAnswerIsNoJSON(t *testing.T) {
	w := newProfileWorld(t, cycle())
	w.power = `o"n`
	e := w.engine()
	set, err := module.Join(module.Module{Name: "metal", Kinds: metal.Kinds(), Steps: metal.Steps()}, provision.Module(cycle()))
	must(t, err)
	e.Modules = set
	id, err := e.StartProfile(t.Context(), "cycle", w.m, "")
	must(t, err)
	if wf := w.runUntil(e, id); wf.State != store.StateFailed || wf.ErrorCode != string(errs.DriverError) {
		t.Errorf("workflow is %s (%s: %s), want failed as driver-error", wf.State, wf.ErrorCode, wf.ErrorMessage)
	}
}

// People who switch a machine have as long as a command may live, unless the
// profile says otherwise; a BMC has its kind's time.
func TestProfileGivesPeopleTime(t *testing.T) {
	profile := func(timeout time.Duration) module.Profile {
		return module.Profile{Name: "halt", Steps: []module.ProfileStep{{Uses: "power.setPower", On: module.OnSite, With: json.RawMessage(`"off"`), Timeout: timeout}}}
	}
	set, err := module.Join(module.Module{Name: "metal", Kinds: metal.Kinds(), Steps: metal.Steps()}, provision.Module(profile(0)))
	must(t, err)
	e := &Engine{Config: Config{Modules: set}}
	for _, tt := range []struct {
		driver        string
		timeout, want time.Duration
	}{{"ipmi", 0, 2 * time.Minute}, {"manual", 0, 24 * time.Hour}, {"manual", time.Hour, time.Hour}} {
		p := profile(tt.timeout)
		got, err := e.planned(p, p.Steps[0], store.Machine{BMC: store.BMC{Driver: tt.driver, Address: "x"}})
		if err != nil || got.Timeout != tt.want {
			t.Errorf("planned for driver %s, time-out %v = %v, %v, want %v", tt.driver, tt.timeout, got.Timeout, err, tt.want)
		}
	}
}
