package workflow

import (
	"bytes"
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/provision"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/image/imagev1"
	"github.com/better-compute/site-appliance/plugins/driver/invocation"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// world is a box, a machine and a line to both: it outlives engines.
type world struct {
	t     *testing.T
	path  string // of the store's file
	store *store.Store
	m     store.Machine
	box   string

	mu       sync.Mutex
	online   map[string]bool
	power    string
	device   string
	efi      bool
	events   uint64
	stage    string // what a machine says that boots something else than the ramdisk; none: as its assignment is
	lost     bool   // what the box says by itself does not arrive
	ask      time.Duration
	told     *pxev1.ExplainResult
	retell   func(*pxev1.ExplainResult) // edits what the box answers when it is asked; nil: nobody
	disk     string                     // SHA-256 of the image on it
	token    bool                       // a node token was minted
	secrets  map[string]string
	assigned *pxev1.AssignRequest
	commands map[string]*sent
	effects  []string // what changed something, in order
	n        int
	// fail is asked before a command runs; an error is its outcome.
	fail func(spec commands.Spec, nth int) *errs.Error
	nth  map[string]int

	// crash ends the engine at the at'th visit of a point; 0 never.
	points, at int
	crash      context.CancelFunc
	crashed    string
	silent     bool // the ramdisk reports no hardware

	profiles []module.Profile
	invoke   func(r invocation.Request, spec commands.Spec) (string, *errs.Error) // what a driver does
	cancels  []string                                                             // commands that were to be stopped
}

// modules are those of a whole gateway.
func modules(t *testing.T, profiles ...module.Profile) *module.Set {
	t.Helper()
	set, err := module.Join(module.Module{Name: "metal", Kinds: metal.Kinds()}, provision.Module(profiles...))
	must(t, err)
	return set
}

type sent struct {
	spec    commands.Spec
	outcome commands.Outcome
}

var image = &Image{Format: "raw.zst", SHA256: strings.Repeat("a", 64), SizeBytes: 10, UnpackedSHA256: strings.Repeat("b", 64), UnpackedSizeBytes: 20}

func newWorld(t *testing.T) *world {
	t.Helper()
	path := filepath.Join(t.TempDir(), "gateway.db")
	st, err := store.Open(path, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	ctx := t.Context()
	w := &world{t: t, path: path, store: st, box: "ag_box", online: map[string]bool{"ag_box": true}, power: "on", device: "disk", secrets: map[string]string{}, commands: map[string]*sent{}, nth: map[string]int{}}
	must(t, st.AddSite(ctx, store.Site{ID: "site_1", TenantID: "acme", Name: "lab", Created: st.Now()}))
	must(t, st.AddPool(ctx, store.Pool{ID: "pool_1", TenantID: "acme", Name: "metal", SiteID: "site_1", Created: st.Now()}))
	w.m = store.Machine{ID: "node_1", TenantID: "acme", Name: "m1", PoolID: "pool_1", SiteID: "site_1", MACs: []string{"52:54:00:00:00:01"}, State: metal.Enrolled, Created: st.Now(),
		BMC: store.BMC{Driver: "ipmi", Address: "10.0.0.5", CredentialsRef: "secret://acme/bmc"}}
	must(t, st.AddMachine(ctx, w.m))
	w.enrol(store.Agent{ID: w.box, Role: agentv1.Role_ROLE_SITE, SiteID: "site_1"})
	return w
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// enrol records an identity and its first Hello.
func (w *world) enrol(a store.Agent) {
	w.t.Helper()
	ctx := context.Background()
	digest := sha256.Sum256([]byte(a.ID))
	e := store.Enrolment{Agent: a, Certificate: store.Certificate{Fingerprint: digest, AgentID: a.ID, CSRHash: digest, DER: []byte(a.ID), NotAfter: time.Now().Add(time.Hour), RenewAfter: time.Now()}}
	if a.Role == agentv1.Role_ROLE_RAMDISK {
		e.WindowID, e.BootNonce = a.WindowID, []byte(a.ID)
	} else {
		token := store.Token{Hash: sha256.Sum256([]byte("token " + a.ID)), Role: a.Role, SiteID: a.SiteID, MachineID: a.MachineID, Expires: time.Now().Add(time.Hour)}
		must(w.t, w.store.AddToken(ctx, token))
		e.Token = &token
	}
	_, err := w.store.Enrol(ctx, e)
	must(w.t, err)
	_, err = w.store.Greeted(ctx, a.ID, &agentv1.Hello{AgentId: a.ID, BootId: "boot " + a.ID, JournalEpoch: "journal " + a.ID, EventEpoch: "events " + a.ID})
	must(w.t, err)
}

// point is a place where the gateway may stop.
func (w *world) point(ctx context.Context, name string) error {
	w.mu.Lock()
	w.points++
	hit := w.points == w.at
	if hit {
		w.crashed = name
	}
	w.mu.Unlock()
	if hit {
		w.crash()
		<-ctx.Done()
	}
	return ctx.Err()
}

func (w *world) Submit(ctx context.Context, spec commands.Spec) (string, error) {
	if err := w.point(ctx, "before "+spec.Kind+" of "+spec.StepID); err != nil {
		return "", err
	}
	w.submit(&spec)
	return spec.ID, w.point(ctx, "after "+spec.Kind+" of "+spec.StepID)
}

func (w *world) submit(spec *commands.Spec) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if spec.ID == "" {
		w.n++
		spec.ID = fmt.Sprintf("cmd_%d", w.n)
	}
	if have := w.commands[spec.ID]; have != nil {
		if !bytes.Equal(have.spec.Raw, spec.Raw) || have.spec.AgentID != spec.AgentID {
			w.t.Errorf("command %s was submitted twice with different content", spec.ID)
		}
		return
	}
	if spec.Kind == invocation.Kind {
		result, e := w.drive(*spec)
		w.commands[spec.ID] = &sent{spec: *spec, outcome: commands.Outcome{Result: []byte(result), Err: e}}
		return
	}
	result, e := w.run(*spec)
	c := &sent{spec: *spec, outcome: commands.Outcome{Err: e}}
	if e == nil {
		var err error
		if c.outcome.Result, err = proto.Marshal(result); err != nil {
			w.t.Error(err)
		}
	}
	w.commands[spec.ID] = c
}

// decodeArgs is what a command says.
func decodeArgs(t *testing.T, spec commands.Spec) proto.Message {
	t.Helper()
	var m proto.Message
	switch spec.Kind {
	case "bmc.query", "bmc.boot", "bmc.power", "bmc.media":
		m = new(bmcv1.BmcOperationRequest)
	case "pxe.assign":
		m = new(pxev1.AssignRequest)
	case "image.stream":
		m = new(imagev1.StreamRequest)
	case "artifact.fetch":
		m = new(pxev1.FetchRequest)
	case "disk.wipe":
		m = new(imagev1.WipeRequest)
	case "pxe.explain":
		m = new(pxev1.ExplainRequest)
	default:
		return nil
	}
	must(t, proto.Unmarshal(spec.Raw, m))
	return m
}

// run does what the agents would.
func (w *world) run(spec commands.Spec) (proto.Message, *errs.Error) {
	w.nth[spec.Kind]++
	if w.fail != nil {
		if e := w.fail(spec, w.nth[spec.Kind]); e != nil {
			return nil, e
		}
	}
	switch args := decodeArgs(w.t, spec).(type) {
	case *pxev1.AssignRequest:
		if w.assigned != nil && args.Version < w.assigned.Version {
			return nil, errs.New(errs.StaleVersion, "snapshot %d is older than %d", args.Version, w.assigned.Version)
		}
		w.assigned = args
		w.effects = append(w.effects, "assign "+strings.ToLower(strings.TrimPrefix(args.Machines[0].Action.String(), "ACTION_")))
		return &pxev1.AssignResult{Version: args.Version}, nil
	case *bmcv1.BmcOperationRequest:
		if !slices.Contains(spec.SecretRefs, args.CredentialsRef) {
			w.t.Errorf("%s does not list its credential", spec.ID)
		}
		switch args.Operation {
		case metal.GetPower:
			return &bmcv1.BmcOperationResult{ResultJson: `"` + w.power + `"`}, nil
		case metal.SetPower:
			var action []string
			must(w.t, json.Unmarshal([]byte(args.ArgsJson), &action))
			w.effects = append(w.effects, "power "+action[0])
			w.power = action[0]
			w.boot()
		case metal.SetBootDevice:
			var device []metal.BootDevice
			must(w.t, json.Unmarshal([]byte(args.ArgsJson), &device))
			w.effects = append(w.effects, "boot "+device[0].Device)
			w.device, w.efi = device[0].Device, device[0].EFI
		case "virtual-media.insert":
			w.effects = append(w.effects, "insert "+args.ArgsJson)
		}
		return &bmcv1.BmcOperationResult{ResultJson: "null"}, nil
	case *imagev1.StreamRequest:
		if !w.online[spec.AgentID] {
			return nil, errs.New(errs.Expired, "not delivered")
		}
		if w.secrets[args.Seed.NodeJoinRef] == "" || !slices.Contains(spec.SecretRefs, args.Seed.NodeJoinRef) {
			w.t.Errorf("image.stream cannot resolve %q", args.Seed.NodeJoinRef)
		}
		w.effects = append(w.effects, "stream to "+args.Disk.Serial)
		w.disk = args.Sha256
		return &imagev1.StreamResult{Sha256: args.Sha256, UnpackedSha256: args.UnpackedSha256}, nil
	case *pxev1.FetchRequest:
		w.effects = append(w.effects, "fetch "+strings.Join(args.Sha256, " "))
		return &pxev1.FetchResult{Bytes: 1}, nil
	case *pxev1.ExplainRequest:
		if w.told == nil || !slices.Contains(w.m.MACs, args.Mac) {
			return &pxev1.ExplainResult{Mac: args.Mac}, nil
		}
		if w.retell != nil {
			w.retell(w.told)
		}
		return w.told, nil
	case *imagev1.WipeRequest:
		out := &imagev1.WipeResult{}
		for _, d := range args.Disks {
			w.effects = append(w.effects, "wipe "+d.Serial)
			out.Disks = append(out.Disks, &imagev1.WipedDisk{Serial: d.Serial, Method: "discard"})
		}
		return out, nil
	}
	return nil, errs.New(errs.UnknownKind, "%s", spec.Kind)
}

// boot is what the machine does when its power changed.
func (w *world) boot() {
	for id := range w.online {
		if id != w.box {
			delete(w.online, id)
		}
	}
	if w.power != "on" {
		return
	}
	device := w.device
	w.device = "disk"
	w.n++
	switch {
	case device == "pxe" && w.assigned.Machines[0].Action == pxev1.Action_ACTION_RAMDISK:
		id := fmt.Sprintf("ag_ramdisk%d", w.n)
		w.enrol(store.Agent{ID: id, Role: agentv1.Role_ROLE_RAMDISK, SiteID: "site_1", MachineID: w.m.ID, WindowID: w.assigned.Machines[0].WindowId})
		w.online[id] = true
		if !w.silent {
			_, _, err := w.store.AddAgentEvents(context.Background(), id, []*agentv1.Event{{Seq: 1, Name: "machine.hardware", Class: "state", Key: w.m.ID, BodyJson: []byte(`{"source":"ramdisk"}`)}})
			must(w.t, err)
		}
	case device == "pxe" && w.assigned.Machines[0].Action != pxev1.Action_ACTION_LOCAL_DISK:
		w.fetched()
	case device == "disk" && w.disk != "" && w.token:
		id := fmt.Sprintf("ag_node%d", w.n)
		w.enrol(store.Agent{ID: id, Role: agentv1.Role_ROLE_NODE, SiteID: "site_1", MachineID: w.m.ID})
		w.online[id] = true
	}
}

func (w *world) Wait(ctx context.Context, id string) (commands.Outcome, error) {
	w.mu.Lock()
	c := w.commands[id]
	w.mu.Unlock()
	if c == nil {
		return commands.Outcome{}, store.ErrNotFound
	}
	if err := w.point(ctx, "outcome of "+c.spec.Kind+" of "+c.spec.StepID); err != nil {
		return commands.Outcome{}, err
	}
	return c.outcome, nil
}

func (w *world) Cancel(_ context.Context, id string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.commands[id] == nil {
		return store.ErrNotFound
	}
	w.cancels = append(w.cancels, id)
	return nil
}

func (w *world) OpenWindow(ctx context.Context, siteID, machineID, windowID, purpose string, until time.Time) error {
	if err := w.point(ctx, "before window"); err != nil {
		return err
	}
	must(w.t, w.store.OpenWindow(ctx, store.Window{ID: windowID, SiteID: siteID, MachineID: machineID, Purpose: purpose, Until: until}))
	return w.point(ctx, "after window")
}

func (w *world) NewToken(ctx context.Context, role agentv1.Role, siteID, machineID string, ttl time.Duration) (string, error) {
	if role != agentv1.Role_ROLE_NODE || siteID != "site_1" || machineID != "node_1" {
		w.t.Errorf("NewToken(%v, %q, %q)", role, siteID, machineID)
	}
	w.mu.Lock()
	w.token = true
	w.mu.Unlock()
	return "bc1.join", w.point(ctx, "after token")
}

func (w *world) Put(ctx context.Context, tenant, name string, value secret.Value) (string, error) {
	ref := "secret://" + tenant + "/" + name
	w.mu.Lock()
	w.secrets[ref] = string(value.Reveal())
	w.mu.Unlock()
	return ref, w.point(ctx, "after secret")
}

func (w *world) Online(id string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.online[id]
}

func (w *world) engine() *Engine {
	e := New(Config{Store: w.store, Modules: modules(w.t, w.profiles...), Commands: w, Enrol: w, Secrets: w, Online: w.Online, Log: slog.New(slog.DiscardHandler), Poll: 2 * time.Millisecond})
	e.between = backoff.Policy{Min: time.Millisecond, Max: time.Millisecond}
	return e
}

// runUntil runs an engine until the workflow ended or the engine crashed.
func (w *world) runUntil(e *Engine, id string) store.Workflow {
	w.t.Helper()
	ctx, stop := context.WithTimeout(w.t.Context(), 20*time.Second)
	defer stop()
	w.mu.Lock()
	w.crash = stop
	w.mu.Unlock()
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	for {
		wf, err := w.store.Workflow(context.Background(), "acme", id)
		must(w.t, err)
		if wf.State != store.StateRunning {
			stop()
		}
		select {
		case err := <-done:
			must(w.t, err)
			wf, err := w.store.Workflow(context.Background(), "acme", id)
			must(w.t, err)
			return wf
		case <-time.After(time.Millisecond):
		}
	}
}

func params(name string) Params {
	if name == Deploy {
		return Params{Image: image, DiskSerial: "S1", Hostname: "m1"}
	}
	if name == Wipe {
		return Params{DiskSerials: []string{"S1", "S2"}}
	}
	return Params{}
}

var wantEffects = map[string][]string{
	Inspect: {"assign ramdisk", "power off", "boot pxe", "power on", "assign local_disk", "power off"},
	Wipe:    {"assign ramdisk", "power off", "boot pxe", "power on", "wipe S1", "wipe S2", "assign local_disk", "power off"},
	Deploy:  {"assign ramdisk", "power off", "boot pxe", "power on", "stream to S1", "assign local_disk", "power off", "boot disk", "power on"},
}

func (w *world) check(name string, wf store.Workflow) {
	w.t.Helper()
	if wf.State != store.StateDone {
		w.t.Fatalf("workflow is %s (%s: %s), want done", wf.State, wf.ErrorCode, wf.ErrorMessage)
	}
	if !slices.Equal(w.effects, wantEffects[name]) {
		w.t.Errorf("effects = %v, want %v", w.effects, wantEffects[name])
	}
	m, err := w.store.Machine(w.t.Context(), "acme", "m1")
	must(w.t, err)
	want := map[string]string{Inspect: metal.Inspected, Deploy: metal.Deployed, Wipe: metal.Wiped}[name]
	if m.State != want || m.Assignment.Action != metal.LocalDisk {
		w.t.Errorf("machine is %s with %s, want %s with %s", m.State, m.Assignment.Action, want, metal.LocalDisk)
	}
	if name == Inspect && m.HardwareJSON != `{"source":"ramdisk"}` {
		w.t.Errorf("hardware = %q", m.HardwareJSON)
	}
	steps, err := w.store.WorkflowSteps(w.t.Context(), wf.ID)
	must(w.t, err)
	for _, s := range steps {
		if s.State != store.StateDone || s.Ended.Before(s.Started) || s.Started.IsZero() {
			w.t.Errorf("step %s is %s, %v to %v", s.ID, s.State, s.Started, s.Ended)
		}
	}
	events, err := w.store.Events(w.t.Context(), store.EventFilter{MachineID: wf.MachineID, SiteIDs: []string{"site_1"}, Name: "workflow.ended"})
	if err != nil || len(events) != 1 || !strings.Contains(events[0].BodyJSON, wf.ID) {
		w.t.Errorf("events of the end = %+v, %v, want one", events, err)
	}
	var p Params
	must(w.t, json.Unmarshal(wf.Params, &p))
	if window, err := w.store.Window(w.t.Context(), p.WindowID); err != nil || window.Until.After(time.Now()) {
		w.t.Errorf("window = %+v, %v, want one that is over", window, err)
	}
}

func TestWorkflows(t *testing.T) {
	for _, name := range []string{Inspect, Deploy, Wipe} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			e := w.engine()
			id, err := e.Start(t.Context(), name, w.m, params(name))
			must(t, err)
			if _, err := e.Start(t.Context(), name, w.m, params(name)); err == nil || !strings.Contains(err.Error(), "workflow-running") {
				t.Errorf("second Start = %v, want workflow-running", err)
			}
			w.check(name, w.runUntil(e, id))
			for id, c := range w.commands {
				if strings.HasPrefix(id, "cmd_") == (c.spec.Kind != "bmc.query") {
					t.Errorf("command %s is a %s: only queries have ids of their own", id, c.spec.Kind)
				}
			}
			// An ended workflow leaves the machine to the next one.
			if _, err := e.Start(t.Context(), name, w.m, params(name)); err != nil {
				t.Errorf("Start after the end = %v", err)
			}
		})
	}
}

// TestRestart stops the gateway at every point of every step, once each, and
// wants the next one to finish with no command run twice.
func TestRestart(t *testing.T) {
	for _, name := range []string{Inspect, Deploy, Wipe} {
		steps := map[string]bool{}
		for at := 1; ; at++ {
			w := newWorld(t)
			w.at = at
			e := w.engine()
			id, err := e.Start(t.Context(), name, w.m, params(name))
			must(t, err)
			wf := w.runUntil(e, id)
			if w.crashed == "" {
				w.check(name, wf)
				t.Logf("%s was stopped at %d points", name, at-1)
				break
			}
			if wf.State != store.StateRunning {
				t.Fatalf("%s stopped %s: workflow is %s (%s), want running", name, w.crashed, wf.State, wf.ErrorMessage)
			}
			t.Run(fmt.Sprintf("%s %d %s", name, at, w.crashed), func(t *testing.T) {
				w.t = t
				w.check(name, w.runUntil(w.engine(), id))
			})
			_, step, _ := strings.Cut(w.crashed, " of ")
			steps[step[strings.LastIndex(step, " ")+1:]] = true
		}
		actions, err := plan(name)
		must(t, err)
		for i := range actions {
			id := fmt.Sprintf("main.%d", i)
			switch actions[i].name {
			case "window.open", "seed.prepare", "ramdisk.wait", "hardware.wait", "node.wait":
				continue // these send no command; TestRestartWhileWaiting has them
			}
			if !steps[id] {
				t.Errorf("%s was never stopped in %s (%s)", name, id, actions[i].name)
			}
		}
	}
}

// TestRestartWhileWaiting stops the gateway while a step waits for an agent.
func TestRestartWhileWaiting(t *testing.T) {
	for _, c := range []struct {
		name, step string
		block      func(w *world) (unblock func())
	}{
		{Inspect, "ramdisk.wait", func(w *world) func() { return w.hide("ag_ramdisk") }},
		{Deploy, "ramdisk.wait", func(w *world) func() { return w.hide("ag_ramdisk") }},
		{Deploy, "node.wait", func(w *world) func() { return w.hide("ag_node") }},
		{Inspect, "hardware.wait", func(w *world) func() {
			w.silent = true
			return func() {
				agents, err := w.store.Agents(context.Background(), store.AgentFilter{Role: agentv1.Role_ROLE_RAMDISK})
				must(w.t, err)
				_, _, err = w.store.AddAgentEvents(context.Background(), agents[0].ID, []*agentv1.Event{{Seq: 1, Name: "machine.hardware", Class: "state", BodyJson: []byte(`{"source":"ramdisk"}`)}})
				must(w.t, err)
			}
		}},
	} {
		t.Run(c.name+" "+c.step, func(t *testing.T) {
			w := newWorld(t)
			unblock := c.block(w)
			e := w.engine()
			online := w.Online
			e.Online = func(id string) bool { return online(id) && !w.hidden(id) }
			id, err := e.Start(t.Context(), c.name, w.m, params(c.name))
			must(t, err)
			ctx, stop := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- e.Run(ctx) }()
			waitStep(t, w, id, c.step)
			stop()
			must(t, <-done)
			unblock()
			w.check(c.name, w.runUntil(w.engine(), id))
		})
	}
}

func (w *world) hide(prefix string) func() {
	w.nth["hide "+prefix] = 1
	return func() { w.mu.Lock(); defer w.mu.Unlock(); delete(w.nth, "hide "+prefix) }
}

func (w *world) hidden(id string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for key := range w.nth {
		if prefix, ok := strings.CutPrefix(key, "hide "); ok && strings.HasPrefix(id, prefix) {
			return true
		}
	}
	return false
}

func waitStep(t *testing.T, w *world, id, name string) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for time.Now().Before(deadline) {
		steps, err := w.store.WorkflowSteps(t.Context(), id)
		must(t, err)
		for _, s := range steps {
			if s.Name == name && s.State == store.StateRunning {
				return
			}
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatalf("step %s never ran", name)
}

func TestFailures(t *testing.T) {
	for _, c := range []struct {
		title, workflow string
		kind            string
		err             *errs.Error
		wantState       string
		wantCode        errs.Code
	}{
		{"power that may have run is not repeated", Inspect, "bmc.power", errs.New(errs.Interrupted, "no result"), store.StateFailed, errs.Interrupted},
		{"power that never ran is repeated", Inspect, "bmc.power", errs.New(errs.Expired, "not delivered"), store.StateDone, ""},
		{"boot device is repeated", Inspect, "bmc.boot", errs.New(errs.Interrupted, "no result"), store.StateDone, ""},
		{"another credential is final", Inspect, "bmc.query", errs.New(errs.BindingMismatch, "bound to another"), store.StateFailed, errs.BindingMismatch},
		{"a wrong digest is final", Deploy, "image.stream", errs.New(errs.DigestMismatch, "other bytes"), store.StateFailed, errs.DigestMismatch},
		{"an image that may have been written is not repeated", Deploy, "image.stream", errs.New(errs.Interrupted, "rebooted"), store.StateFailed, errs.Interrupted},
		{"a plugin's restart is waited for", Inspect, "bmc.query", errs.Retry(errs.Unavailable, "plugin restarts"), store.StateDone, ""},
	} {
		t.Run(c.title, func(t *testing.T) {
			w := newWorld(t)
			w.fail = func(spec commands.Spec, nth int) *errs.Error {
				if spec.Kind == c.kind && nth == 1 {
					return c.err
				}
				return nil
			}
			e := w.engine()
			id, err := e.Start(t.Context(), c.workflow, w.m, params(c.workflow))
			must(t, err)
			wf := w.runUntil(e, id)
			if wf.State != c.wantState || wf.ErrorCode != string(c.wantCode) {
				t.Fatalf("workflow is %s with %q (%s), want %s with %q", wf.State, wf.ErrorCode, wf.ErrorMessage, c.wantState, c.wantCode)
			}
			if wf.State == store.StateDone {
				w.check(c.workflow, wf)
				return
			}
			// The machine is given back to its own disk, here and at the box.
			m, err := w.store.Machine(t.Context(), "acme", "m1")
			must(t, err)
			if m.State != metal.Failed || m.Assignment.Action != metal.LocalDisk {
				t.Errorf("machine is %s with %s, want failed with local-disk", m.State, m.Assignment.Action)
			}
			if got := w.assigned.Machines[0].Action; got != pxev1.Action_ACTION_LOCAL_DISK {
				t.Errorf("the box was left with %s", got)
			}
			if n := w.nth[c.kind]; c.kind != "bmc.query" && n != 1 {
				t.Errorf("%s ran %d times, want 1", c.kind, n)
			}
		})
	}
}

// TestStepLimit: a step that takes too long fails, and says what it waited for.
func TestStepLimit(t *testing.T) {
	w := newWorld(t)
	w.online[w.box] = false
	e := w.engine()
	id, err := e.Start(t.Context(), Inspect, w.m, Params{})
	must(t, err)
	wf, err := w.store.Workflow(t.Context(), "acme", id)
	must(t, err)
	r, err := e.load(t.Context(), wf, e.Log)
	must(t, err)
	steps, err := w.store.WorkflowSteps(t.Context(), id)
	must(t, err)
	e.grace = 20 * time.Millisecond
	err = r.one(t.Context(), &steps[1], action{"pxe.assign-ramdisk", 30 * time.Millisecond, assignRamdisk})
	if failure := errs.From(err); failure == nil || failure.Code != errs.Timeout || !strings.Contains(failure.Message, "waiting for the site's box") {
		t.Errorf("step = %v, want a timeout that names the box", err)
	}
	// Taken up again after its limit, it still gets the grace to find what ended well.
	w.mu.Lock()
	w.online[w.box] = true
	w.mu.Unlock()
	e.grace = 10 * time.Second
	steps, err = w.store.WorkflowSteps(t.Context(), id)
	must(t, err)
	if err := r.one(t.Context(), &steps[1], action{"pxe.assign-ramdisk", time.Nanosecond, assignRamdisk}); err != nil {
		t.Errorf("step within its grace = %v", err)
	}
}

// TestForeignReport: what another agent says about the machine is not taken.
func TestForeignReport(t *testing.T) {
	w := newWorld(t)
	w.silent = true
	_, _, err := w.store.AddAgentEvents(t.Context(), w.box, []*agentv1.Event{{Seq: 1, Name: "machine.hardware", Class: "state", Key: w.m.ID, BodyJson: []byte(`{"source":"forged"}`)}})
	must(t, err)
	w.enrol(store.Agent{ID: "ag_old", Role: agentv1.Role_ROLE_RAMDISK, SiteID: "site_1", MachineID: w.m.ID, WindowID: "win_old"})
	_, _, err = w.store.AddAgentEvents(t.Context(), "ag_old", []*agentv1.Event{{Seq: 1, Name: "machine.hardware", Class: "state", Key: w.m.ID, BodyJson: []byte(`{"source":"stale"}`)}})
	must(t, err)
	e := w.engine()
	id, err := e.Start(t.Context(), Inspect, w.m, Params{})
	must(t, err)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	waitStep(t, w, id, "hardware.wait")
	time.Sleep(50 * time.Millisecond)
	stop()
	must(t, <-done)
	m, err := w.store.Machine(t.Context(), "acme", "m1")
	must(t, err)
	if m.HardwareJSON != "" {
		t.Errorf("hardware = %s, want none", m.HardwareJSON)
	}
}

func TestAgain(t *testing.T) {
	for _, c := range []struct {
		safe    bool
		err     error
		attempt uint32
		want    bool
	}{
		{false, errs.Retry(errs.Unavailable, "x"), 0, true},
		{false, errs.Retry(errs.Unavailable, "x"), maxAttempts - 1, false},
		{false, errs.New(errs.WrongIncarnation, "x"), 0, true},
		{false, errs.New(errs.Expired, "x"), 0, true},
		{false, errs.New(errs.Timeout, "x"), 0, false},
		{true, errs.New(errs.Timeout, "x"), 0, true},
		{true, errs.New(errs.BindingMismatch, "x"), 0, false},
		{true, fmt.Errorf("wrapped: %w", errs.New(errs.Unreachable, "x")), 0, true},
		{true, errors.New("no code"), 0, false},
	} {
		if got := again(c.safe, c.err, c.attempt); got != c.want {
			t.Errorf("again(%t, %v, %d) = %t, want %t", c.safe, c.err, c.attempt, got, c.want)
		}
	}
}

// TestEndThatCannotBeStored: a workflow whose end the store refuses is tried
// again now and then, not as fast as the machine can.
func TestEndThatCannotBeStored(t *testing.T) {
	w := newWorld(t)
	db, err := sql.Open("sqlite", w.path)
	must(t, err)
	defer db.Close()
	_, err = db.Exec(`CREATE TRIGGER full BEFORE UPDATE OF state ON workflows BEGIN SELECT RAISE(FAIL, 'disk is full'); END`)
	must(t, err)
	var said atomic.Int32
	e := w.engine()
	e.Log = slog.New(slog.NewTextHandler(writer(func(p []byte) (int, error) {
		if bytes.Contains(p, []byte("disk is full")) {
			said.Add(1)
		}
		return len(p), nil
	}), nil))
	e.pause = 200 * time.Millisecond
	id, err := e.Start(t.Context(), Inspect, w.m, params(Inspect))
	must(t, err)
	time.AfterFunc(time.Second, func() {
		if _, err := db.Exec(`DROP TRIGGER full`); err != nil {
			t.Error(err)
		}
	})
	w.check(Inspect, w.runUntil(e, id))
	if n := said.Load(); n < 1 || n > 10 {
		t.Errorf("the end was tried %d times in a second, want a few", n)
	}
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// TestTurns: no tenant's workflows hold up another's, and a cancelled one needs no turn.
func TestTurns(t *testing.T) {
	w := func(id, tenant, params string) store.Workflow {
		return store.Workflow{ID: id, TenantID: tenant, Params: []byte(params)}
	}
	unfinished := []store.Workflow{w("a1", "acme", "{}"), w("a2", "acme", "{}"), w("a3", "acme", "{}"), w("a4", "acme", `{"cancelled":true}`), w("b1", "beta", "{}"), w("b2", "beta", "{}")}
	for name, tt := range map[string]struct {
		active   map[string]bool
		parallel int
		want     string
	}{
		"none runs":                {nil, 2, "a1 a2 a4 b1 b2"},
		"one tenant is full":       {map[string]bool{"a1": true, "a2": true}, 2, "a4 b1 b2"},
		"one is running":           {map[string]bool{"a2": true}, 2, "a1 a4 b1 b2"},
		"each has one at a time":   {nil, 1, "a1 a4 b1"},
		"all run, and one is over": {map[string]bool{"a1": true, "a2": true, "a3": true, "a4": true, "b1": true, "b2": true, "gone": true}, 64, ""},
	} {
		var got []string
		for _, due := range turns(unfinished, tt.active, tt.parallel) {
			got = append(got, due.ID)
		}
		if strings.Join(got, " ") != tt.want {
			t.Errorf("%s: turns = %q, want %q", name, got, tt.want)
		}
	}
}
