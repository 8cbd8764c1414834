package workflow

import (
	"context"
	"crypto/ed25519"
	"encoding/hex"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

type testSigner struct{ key ed25519.PrivateKey }

func (s testSigner) KeyID() string { return hex.EncodeToString(s.key.Public().(ed25519.PublicKey)) }
func (s testSigner) Sign(msg []byte) ([]byte, error) {
	return ed25519.Sign(s.key, msg), nil
}

func newSigner(t *testing.T) testSigner {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	must(t, err)
	return testSigner{key}
}

// TestReattach: with the real command service, an engine that comes back finds
// its command again, neither refused as another one nor sent a second time.
func TestReattach(t *testing.T) {
	w := newWorld(t)
	service := commands.New(w.store, newSigner(t), modules(t), slog.New(slog.DiscardHandler))
	engine := func() *Engine {
		c := w.engine().Config
		c.Commands = service
		return New(c)
	}
	e := engine()
	id, err := e.Start(t.Context(), Inspect, w.m, Params{Traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"})
	must(t, err)

	open := func() store.Command {
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
	run := func(e *Engine) (stop func()) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- e.Run(ctx) }()
		return func() { cancel(); must(t, <-done) }
	}
	stop := run(e)
	c := open()
	stop()
	if want := CommandID(id, "main.1", 0); c.ID != want || c.Kind != "pxe.assign" || c.Lane != "provision" || c.WorkflowID != id || c.StepID != "main.1" || c.TargetNodeID != w.m.ID {
		t.Fatalf("command = %+v, want %s", c, want)
	}
	stop = run(engine())
	time.Sleep(20 * time.Millisecond) // time to do it wrong
	if list, err := w.store.OpenCommands(t.Context(), w.box); err != nil || len(list) != 1 {
		t.Errorf("%d open commands, %v, want the one", len(list), err)
	}
	stop()
	// The result arrives while no engine runs.
	result, err := proto.Marshal(&pxev1.AssignResult{Version: 1})
	must(t, err)
	must(t, service.Finish(t.Context(), w.box, c.ID, result, nil))
	stop = run(engine())
	defer stop()
	if next := open(); next.Kind != "bmc.query" || next.StepID != "main.2" {
		t.Errorf("after the restart came %s of %s, want bmc.query of main.2", next.Kind, next.StepID)
	}
}

// TestOneSite: workflows of many machines at one site hand the box snapshots
// in the order of their versions, and none undoes another's part.
func TestOneSite(t *testing.T) {
	w := newWorld(t)
	inner := w.fail
	var mu sync.Mutex
	var versions []uint64
	w.fail = inner
	machines := []store.Machine{w.m}
	for i := 2; i <= 8; i++ {
		m := w.m
		m.ID, m.Name, m.MACs = fmt.Sprintf("node_%d", i), fmt.Sprintf("m%d", i), []string{fmt.Sprintf("52:54:00:00:00:%02x", i)}
		must(t, w.store.AddMachine(t.Context(), m))
		machines = append(machines, m)
	}
	e := New(w.engine().Config)
	e.Commands = watch{w, func(spec commands.Spec) {
		if a, ok := decodeArgs(t, spec).(*pxev1.AssignRequest); ok {
			mu.Lock()
			defer mu.Unlock()
			versions = append(versions, a.Version)
		}
	}}
	for _, m := range machines {
		_, err := e.Start(t.Context(), Inspect, m, Params{})
		must(t, err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		mu.Lock()
		n := len(versions)
		mu.Unlock()
		if n >= len(machines) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d snapshots came, want %d", n, len(machines))
		}
	}
	stop()
	must(t, <-done)
	mu.Lock()
	defer mu.Unlock()
	for i := 1; i < len(versions); i++ {
		if versions[i] <= versions[i-1] {
			t.Errorf("snapshot %d came after %d", versions[i], versions[i-1])
		}
	}
}

// TestOvertaken: a snapshot that another one overtook while the gateway was
// away is made anew, not failed.
func TestOvertaken(t *testing.T) {
	w := newWorld(t)
	w.at = 3 // before pxe.assign of main.1 is submitted: version 1 is stored
	e := w.engine()
	id, err := e.Start(t.Context(), Inspect, w.m, Params{})
	must(t, err)
	w.runUntil(e, id)
	if w.crashed != "before pxe.assign of main.1" {
		t.Fatalf("stopped %s", w.crashed)
	}
	// Another machine's workflow has the box take version 2 meanwhile.
	other := w.m
	other.ID, other.Name, other.MACs = "node_2", "m2", []string{"52:54:00:00:00:02"}
	must(t, w.store.AddMachine(t.Context(), other))
	must(t, w.store.AddWorkflow(t.Context(), store.Workflow{ID: "wf_other", TenantID: "acme", Name: "other", MachineID: "node_2", State: store.StateDone, Params: []byte("{}")},
		[]store.WorkflowStep{{Seq: 0, ID: "main.0", Name: "x"}}, metal.Enrolled, store.Event{}))
	must(t, w.store.Assign(t.Context(), "site_1", "node_2", store.Assignment{Action: metal.LocalDisk}, func(next store.Snapshot) (store.WorkflowStep, error) {
		w.assigned = metal.AssignCommand(next, time.Now()).Args.(*pxev1.AssignRequest)
		return store.WorkflowStep{WorkflowID: "wf_other", State: store.StateDone}, nil
	}))
	w.check(Inspect, w.runUntil(w.engine(), id))
}

// TestAheadBox: the box of a gateway that was restored is ahead. Its word comes in
// an event, which may be later than its refusal.
func TestAheadBox(t *testing.T) {
	w := newWorld(t)
	w.assigned = &pxev1.AssignRequest{Version: 90}
	refused := 0
	heard := func(agent string, version uint64, behind string) {
		t.Helper()
		if site, err := w.store.HeardAssignVersion(t.Context(), agent, version); site != behind || err != nil {
			t.Errorf("HeardAssignVersion(%s, %d) = %q, %v, want %q behind", agent, version, site, err, behind)
		}
	}
	w.fail = func(spec commands.Spec, nth int) *errs.Error {
		if spec.Kind == "pxe.assign" && nth == 3 {
			refused = nth - 1
			heard("ag_box", 90, "")
		}
		return nil
	}
	w.enrol(store.Agent{ID: "ag_ram", Role: agentv1.Role_ROLE_RAMDISK, SiteID: "site_1", MachineID: w.m.ID, WindowID: "win_old"})
	heard("ag_ram", 90, "")
	heard("ag_ram", 0, "")
	if v, err := w.store.AssignVersion(t.Context(), "site_1"); v != 0 || err != nil {
		t.Errorf("a machine raised the version to %d, %v", v, err)
	}
	e := w.engine()
	id, err := e.Start(t.Context(), Inspect, w.m, Params{})
	must(t, err)
	wf := w.runUntil(e, id)
	if wf.State != store.StateDone || refused != 2 || w.assigned.Version <= 90 {
		t.Errorf("the workflow ended %s (%s) after %d refusals, at snapshot %d", wf.State, wf.ErrorMessage, refused, w.assigned.Version)
	}
	before, err := w.store.AssignVersion(t.Context(), "site_1")
	must(t, err)
	heard(w.box, 7, "site_1")
	heard(w.box, 1<<64-1, "")
	heard(w.box, 1<<31, "")
	if v, err := w.store.AssignVersion(t.Context(), "site_1"); v != 1<<31 || before >= v || err != nil {
		t.Errorf("a box that lies raised the version from %d to %d, %v; want no more than 2^31", before, v, err)
	}
}

type watch struct {
	Commands
	seen func(commands.Spec)
}

func (w watch) Submit(ctx context.Context, spec commands.Spec) (string, error) {
	id, err := w.Commands.Submit(ctx, spec)
	if err == nil {
		w.seen(spec)
	}
	return id, err
}
