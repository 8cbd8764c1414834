package store

import (
	"errors"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

func openControl(t *testing.T) *Store {
	t.Helper()
	s, err := Open(filepath.Join(t.TempDir(), "gateway.db"), time.Now)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	for _, err := range []error{
		s.AddSite(t.Context(), Site{ID: "site_1", TenantID: "acme", Name: "lab"}),
		s.AddSite(t.Context(), Site{ID: "site_2", TenantID: "acme", Name: "other"}),
		s.AddPool(t.Context(), Pool{ID: "pool_1", TenantID: "acme", Name: "metal", SiteID: "site_1"}),
		s.AddPool(t.Context(), Pool{ID: "pool_2", TenantID: "acme", Name: "more", SiteID: "site_2"}),
		s.AddMachine(t.Context(), machine("node_1", "m1", "52:54:00:00:00:01")),
		s.AddMachine(t.Context(), machine("node_2", "m2", "52:54:00:00:00:02")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func machine(id, name string, macs ...string) Machine {
	return Machine{ID: id, TenantID: "acme", Name: name, PoolID: "pool_1", SiteID: "site_1", MACs: macs, State: "enrolled", Created: time.UnixMilli(1)}
}

func TestControlNames(t *testing.T) {
	s := openControl(t)
	ctx := t.Context()
	elsewhere := machine("node_4", "m4", "52:54:00:00:00:01")
	elsewhere.SiteID, elsewhere.PoolID = "site_2", "pool_2"
	for what, c := range map[string]struct {
		err  error
		want error
	}{
		"site of the same name":          {s.AddSite(ctx, Site{ID: "site_3", TenantID: "acme", Name: "lab"}), ErrConflict},
		"the name at another tenant":     {s.AddSite(ctx, Site{ID: "site_4", TenantID: "other", Name: "lab"}), nil},
		"pool of the same name":          {s.AddPool(ctx, Pool{ID: "pool_3", TenantID: "acme", Name: "metal", SiteID: "site_1"}), ErrConflict},
		"machine of the same name":       {s.AddMachine(ctx, machine("node_3", "m1")), ErrConflict},
		"machine with a MAC of the site": {s.AddMachine(ctx, machine("node_3", "m3", "52:54:00:00:00:03", "52:54:00:00:00:01")), ErrConflict},
		"the MAC at another site":        {s.AddMachine(ctx, elsewhere), nil},
	} {
		if !errors.Is(c.err, c.want) {
			t.Errorf("%s = %v, want %v", what, c.err, c.want)
		}
	}
	// A refused machine leaves no MAC behind.
	if err := s.AddMachine(ctx, machine("node_3", "m3", "52:54:00:00:00:03")); err != nil {
		t.Errorf("AddMachine after a refusal = %v", err)
	}
	if err := s.AddPool(ctx, Pool{ID: "pool_9", TenantID: "acme", Name: "nine", SiteID: "site_none"}); err == nil {
		t.Error("pool at no site = nil, want an error")
	}
	for _, ref := range []string{"node_1", "m1"} {
		if m, err := s.Machine(ctx, "acme", ref); err != nil || m.ID != "node_1" || !slices.Equal(m.MACs, []string{"52:54:00:00:00:01"}) || m.Assignment.Action != "local-disk" {
			t.Errorf("Machine(%s) = %+v, %v", ref, m, err)
		}
	}
	if _, err := s.Machine(ctx, "other", "node_1"); !errors.Is(err, ErrNotFound) {
		t.Errorf("another tenant's machine = %v, want ErrNotFound", err)
	}
}

func TestAPIToken(t *testing.T) {
	s := openControl(t)
	ctx := t.Context()
	first := APIToken{Hash: [32]byte{1}, Name: "ci", TenantID: "acme", Permissions: []string{"compute:sites:read"}, Created: time.UnixMilli(5), Expires: time.UnixMilli(9)}
	if err := s.PutAPIToken(ctx, first); err != nil {
		t.Fatal(err)
	}
	got, err := s.APIToken(ctx, [32]byte{1})
	if err != nil || got.Name != "ci" || !got.Expires.Equal(first.Expires) || !slices.Equal(got.Permissions, first.Permissions) {
		t.Errorf("APIToken = %+v, %v", got, err)
	}
	second := first
	second.Hash, second.Expires = [32]byte{2}, time.Time{}
	if err := s.PutAPIToken(ctx, second); err != nil {
		t.Fatal(err)
	}
	if _, err := s.APIToken(ctx, [32]byte{1}); !errors.Is(err, ErrNotFound) {
		t.Errorf("replaced token = %v, want ErrNotFound", err)
	}
	if got, err := s.APIToken(ctx, [32]byte{2}); err != nil || !got.Expires.IsZero() {
		t.Errorf("new token = %+v, %v, want one without an end", got, err)
	}
	// A token of another tenant cannot take over a hash.
	stolen := second
	stolen.TenantID = "other"
	if err := s.PutAPIToken(ctx, stolen); !errors.Is(err, ErrConflict) {
		t.Errorf("token with a hash that is there = %v, want ErrConflict", err)
	}
}

func TestAssign(t *testing.T) {
	s := openControl(t)
	ctx := t.Context()
	wf := Workflow{ID: "wf_1", TenantID: "acme", Name: "deploy", MachineID: "node_1", State: StateRunning, Params: []byte("{}"), Created: time.UnixMilli(1)}
	if err := s.AddWorkflow(ctx, wf, []WorkflowStep{{Seq: 0, ID: "main.0", Name: "assign"}}, "deploying", Event{}); err != nil {
		t.Fatal(err)
	}
	a := Assignment{Action: "ramdisk", Purpose: "deploy", WindowID: "win_1", WindowUntil: time.UnixMilli(7).UTC(), Artifacts: []string{"aa"}}
	step := WorkflowStep{WorkflowID: "wf_1", Seq: 0, ID: "main.0", State: StateRunning}
	record := func(next Snapshot) (WorkflowStep, error) {
		version, machines := next.Version, next.Machines
		if len(machines) != 2 || machines[0].Assignment.WindowID != "win_1" || machines[1].Assignment.Action != "local-disk" {
			t.Errorf("snapshot = %+v", machines)
		}
		step.Data = []byte{byte(version)}
		return step, nil
	}
	for want := uint64(1); want <= 2; want++ {
		if err := s.Assign(ctx, "site_1", "node_1", a, record); err != nil {
			t.Fatal(err)
		}
		steps, err := s.WorkflowSteps(ctx, "wf_1")
		if version, verr := s.AssignVersion(ctx, "site_1"); err != nil || verr != nil || version != want || steps[0].Data[0] != byte(want) {
			t.Errorf("version %d with step %+v, want %d in both", version, steps[0], want)
		}
	}
	// What cannot be recorded did not happen.
	broken := errors.New("broken")
	err := s.Assign(ctx, "site_1", "node_2", a, func(Snapshot) (WorkflowStep, error) { return WorkflowStep{}, broken })
	if version, _ := s.AssignVersion(ctx, "site_1"); !errors.Is(err, broken) || version != 2 {
		t.Errorf("Assign = %v at version %d, want %v at 2", err, version, broken)
	}
	if m, err := s.Machine(ctx, "acme", "m2"); err != nil || m.Assignment.Action != "local-disk" {
		t.Errorf("machine of the broken assignment: %+v, %v", m.Assignment, err)
	}
	for _, pair := range [][2]string{{"site_2", "node_1"}, {"site_1", "node_9"}} {
		if err := s.Assign(ctx, pair[0], pair[1], a, record); !errors.Is(err, ErrNotFound) {
			t.Errorf("Assign(%s, %s) = %v, want ErrNotFound", pair[0], pair[1], err)
		}
	}
}

func TestWorkflowRows(t *testing.T) {
	s := openControl(t)
	ctx := t.Context()
	wf := Workflow{ID: "wf_1", TenantID: "acme", Name: "inspect", MachineID: "node_1", State: StateRunning, Params: []byte("{}"), Created: time.UnixMilli(1)}
	steps := []WorkflowStep{{Seq: 0, ID: "main.0", Name: "a"}, {Seq: 1, ID: "main.1", Name: "b"}}
	if err := s.AddWorkflow(ctx, wf, steps, "inspecting", Event{Name: "workflow.started", Class: "audit", MachineID: "node_1"}); err != nil {
		t.Fatal(err)
	}
	second := wf
	second.ID = "wf_2"
	if err := s.AddWorkflow(ctx, second, steps, "inspecting", Event{Name: "workflow.started", Class: "audit", MachineID: "node_1"}); !errors.Is(err, ErrConflict) {
		t.Errorf("second workflow of a machine = %v, want ErrConflict", err)
	}
	if err := s.SaveStep(ctx, WorkflowStep{WorkflowID: "wf_1", Seq: 0, State: StateRunning, Attempt: 2, Started: time.UnixMilli(3), Data: []byte("d")}); err != nil {
		t.Fatal(err)
	}
	if err := s.SaveStep(ctx, WorkflowStep{WorkflowID: "wf_1", Seq: 7, State: StateRunning}); !errors.Is(err, ErrNotFound) {
		t.Errorf("SaveStep of no step = %v, want ErrNotFound", err)
	}
	if running, err := s.RunningWorkflows(ctx); err != nil || len(running) != 1 || running[0].ID != "wf_1" {
		t.Errorf("RunningWorkflows = %+v, %v", running, err)
	}
	wf.State, wf.ErrorCode, wf.Ended = StateFailed, "timeout", time.UnixMilli(9)
	if err := s.EndWorkflow(ctx, wf, "failed", "", Event{Name: "workflow.ended", Class: "audit", MachineID: "node_1"}); err != nil {
		t.Fatal(err)
	}
	got, err := s.WorkflowSteps(ctx, "wf_1")
	if err != nil || got[0].State != StateFailed || got[0].Attempt != 2 || got[1].State != StateWaiting {
		t.Errorf("steps = %+v, %v", got, err)
	}
	if m, _ := s.Machine(ctx, "acme", "m1"); m.State != "failed" {
		t.Errorf("machine is %s, want failed", m.State)
	}
	if err := s.AddWorkflow(ctx, second, steps, "inspecting", Event{Name: "workflow.started", Class: "audit", MachineID: "node_1"}); err != nil {
		t.Errorf("a workflow after the end = %v", err)
	}
	// A refused workflow left no event.
	var names []string
	events, err := s.Events(ctx, EventFilter{MachineID: "node_1"})
	for _, e := range events {
		names = append(names, e.Name)
	}
	if want := []string{"workflow.started", "workflow.ended", "workflow.started"}; err != nil || !slices.Equal(names, want) {
		t.Errorf("events = %q, %v, want %q", names, err, want)
	}
	if list, err := s.Workflows(ctx, "acme", 1); err != nil || len(list) != 1 || list[0].ID != "wf_2" {
		t.Errorf("Workflows(1) = %+v, %v, want the newest", list, err)
	}
	if _, err := s.Workflow(ctx, "other", "wf_1"); !errors.Is(err, ErrNotFound) {
		t.Errorf("another tenant's workflow = %v, want ErrNotFound", err)
	}
}

// TestEndWorkflowGivesBackItsOwn: a workflow that fails takes no window from its
// machine that another opened.
func TestEndWorkflowGivesBackItsOwn(t *testing.T) {
	for window, want := range map[string]string{"w1": "local-disk", "w2": "iso", "": "iso"} {
		s := openControl(t)
		ctx := t.Context()
		wf := Workflow{ID: "wf_1", TenantID: "acme", MachineID: "node_1", Name: "boot", State: StateRunning, Params: []byte("{}"), Created: time.UnixMilli(1)}
		if err := s.AddWorkflow(ctx, wf, []WorkflowStep{{WorkflowID: "wf_1", Name: "a", State: StateWaiting}}, "", Event{Name: "workflow.started", Class: "audit", MachineID: "node_1"}); err != nil {
			t.Fatal(err)
		}
		step := WorkflowStep{WorkflowID: "wf_1", State: StateRunning}
		if err := s.Assign(ctx, "site_1", "node_1", Assignment{Action: "iso", Purpose: "iso", WindowID: "w1", WindowUntil: s.Now().Add(time.Hour)},
			func(Snapshot) (WorkflowStep, error) { return step, nil }); err != nil {
			t.Fatal(err)
		}
		wf.State, wf.Ended = StateFailed, time.UnixMilli(9)
		if err := s.EndWorkflow(ctx, wf, "", window, Event{Name: "workflow.ended", Class: "audit", MachineID: "node_1"}); err != nil {
			t.Fatal(err)
		}
		if m, err := s.Machine(ctx, "acme", "m1"); err != nil || m.Assignment.Action != want {
			t.Errorf("after the failure of a workflow with window %q the machine has %q, %v, want %q", window, m.Assignment.Action, err, want)
		}
	}
}
