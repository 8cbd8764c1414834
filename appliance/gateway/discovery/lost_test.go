package discovery

import (
	"context"
	"crypto/sha256"
	"log/slog"
	"path/filepath"
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

// forgetful is a box of one site that takes boot decisions, and with approvers none that
// boot anything.
type forgetful struct {
	t         *testing.T
	approvers bool
	sent      []*pxev1.AssignRequest
}

func (f *forgetful) Submit(_ context.Context, spec commands.Spec) (string, error) {
	req := new(pxev1.AssignRequest)
	data, err := proto.Marshal(spec.Args)
	if err == nil {
		err = proto.Unmarshal(data, req)
	}
	f.sent = append(f.sent, req)
	return "cmd", err
}

func (f *forgetful) Wait(context.Context, string) (commands.Outcome, error) {
	for _, m := range f.sent[len(f.sent)-1].Machines {
		if f.approvers && m.Action != pxev1.Action_ACTION_LOCAL_DISK {
			return commands.Outcome{Err: errs.New(errs.QuorumRequired, "2 of the approvers must agree")}, nil
		}
	}
	return commands.Outcome{}, nil
}

// lossy is a site with a box and two machines, of which one may boot.
type lossy struct {
	*Service
	store *store.Store
	box   *forgetful
	now   time.Time
}

func newLossy(t *testing.T, approvers bool) *lossy {
	t.Helper()
	ctx := t.Context()
	l := &lossy{box: &forgetful{t: t, approvers: approvers}, now: time.UnixMilli(1_800_000_000_000)}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var err error
	l.store, err = store.Open(filepath.Join(t.TempDir(), "gateway.db"), func() time.Time { return l.now })
	must(err)
	t.Cleanup(func() { l.store.Close() })
	must(l.store.AddSite(ctx, store.Site{ID: "site_1", TenantID: "acme", Name: "lab"}))
	must(l.store.AddPool(ctx, store.Pool{ID: "pool_1", TenantID: "acme", Name: "metal", SiteID: "site_1"}))
	for id, mac := range map[string]string{"node_1": "52:54:00:00:00:01", "node_2": "52:54:00:00:00:02"} {
		must(l.store.AddMachine(ctx, store.Machine{ID: id, TenantID: "acme", Name: id, PoolID: "pool_1", SiteID: "site_1", MACs: []string{mac}}))
	}
	must(l.store.AddWorkflow(ctx, store.Workflow{ID: "wf_1", TenantID: "acme", Name: "x", MachineID: "node_1", State: store.StateDone, Params: []byte("{}")},
		[]store.WorkflowStep{{ID: "main.0", Name: "x"}}, "", store.Event{}))
	must(l.store.Assign(ctx, "site_1", "node_1", store.Assignment{Action: metal.Ramdisk, Purpose: "deploy", WindowID: "win_1", WindowUntil: l.now.Add(24 * time.Hour)}, func(store.Snapshot) (store.WorkflowStep, error) {
		return store.WorkflowStep{WorkflowID: "wf_1", State: store.StateDone}, nil
	}))
	token := store.Token{Hash: sha256.Sum256(nil), Role: agentv1.Role_ROLE_SITE, SiteID: "site_1", Expires: l.now.Add(time.Hour)}
	must(l.store.AddToken(ctx, token))
	_, err = l.store.Enrol(ctx, store.Enrolment{Token: &token, Agent: store.Agent{ID: "box", Role: token.Role, SiteID: "site_1"}, Certificate: store.Certificate{AgentID: "box", DER: []byte{1}}})
	must(err)
	l.Service = New(Config{Store: l.store, Commands: l.box, Online: func(string) bool { return true }, Expel: func(context.Context, string, *errs.Error) error { return nil }, Log: slog.New(slog.DiscardHandler)})
	return l
}

// lost is what the gateway does with a box's word that it has nothing.
func (l *lossy) lost(t *testing.T) {
	t.Helper()
	site, err := l.store.HeardAssignVersion(t.Context(), "box", 0)
	if err != nil || site != "site_1" {
		t.Fatalf("HeardAssignVersion = %q, %v, want site_1 behind", site, err)
	}
	l.Lost(site)
}

// kicked says whether it was to look at once, since that was asked last.
func (l *lossy) kicked() bool {
	select {
	case <-l.kick:
		return true
	default:
		return false
	}
}

func (l *lossy) looked(t *testing.T) (sent int) {
	t.Helper()
	before := len(l.box.sent)
	if err := l.look(t.Context()); err != nil {
		t.Fatal(err)
	}
	l.wg.Wait()
	return len(l.box.sent) - before
}

// TestLostIsNoPacemaker: a box that says it lost its boot decisions is told at once, and
// one that says so without end at most every ten minutes, what it says last included;
// what people change meanwhile reaches a box that says nothing at once.
func TestLostIsNoPacemaker(t *testing.T) {
	l := newLossy(t, false)
	if l.lost(t); !l.kicked() {
		t.Error("nothing looks when a box has lost its decisions")
	}
	if n := l.looked(t); n != 1 {
		t.Fatalf("%d snapshots were sent, want one", n)
	}
	if err := l.store.AddMAC(t.Context(), "node_2", "52:54:00:00:00:03", 16, nil); err != nil {
		t.Fatal(err)
	}
	if n := l.looked(t); n != 1 {
		t.Errorf("%d snapshots were sent of a new MAC, want one", n)
	}
	kicks, sent := 0, 0
	for range 120 {
		for range 10 {
			l.lost(t)
		}
		if l.kicked() {
			kicks++
		}
		sent += l.looked(t)
		l.now = l.now.Add(time.Minute)
	}
	if sent < 11 || sent > 12 || kicks > 12 {
		t.Errorf("1200 times in two hours: %d snapshots, and %d looks beyond those of each minute, want 11 or 12, and at most one for each", sent, kicks)
	}
	l.now = l.now.Add(retellEvery)
	if n := l.looked(t); n != 1 {
		t.Errorf("%d snapshots after the last loss, want one", n)
	}
	l.now = l.now.Add(time.Hour)
	if n := l.looked(t); n != 0 {
		t.Errorf("%d snapshots when nothing is lacking, want none", n)
	}
}

// TestLostWithApprovers: where people approve, a box that lost its decisions opens no
// window anew by the gateway's word alone: the windows are ended, that is an event, and
// the box has the rest at once. Where nobody approves they stay open.
func TestLostWithApprovers(t *testing.T) {
	for _, approvers := range []bool{false, true} {
		l := newLossy(t, approvers)
		l.lost(t)
		want := 1
		if approvers {
			want = 2
		}
		if n := l.looked(t); n != want {
			t.Errorf("approvers %v: %d snapshots were sent, want %d", approvers, n, want)
		}
		last := l.box.sent[len(l.box.sent)-1]
		if len(last.Machines) != 2 || approvers != (last.Machines[0].Action == pxev1.Action_ACTION_LOCAL_DISK) {
			t.Errorf("approvers %v: the box has %v", approvers, last)
		}
		u, err := l.store.SiteUntold(t.Context(), "site_1")
		if err != nil || u.Told < u.Changes {
			t.Errorf("approvers %v: the box is behind still: %+v, %v", approvers, u, err)
		}
		m, err := l.store.Machine(t.Context(), "acme", "node_1")
		if err != nil || approvers != (m.Assignment.Action == metal.LocalDisk) || approvers != (m.Assignment.WindowID == "") {
			t.Errorf("approvers %v: the gateway has %+v, %v", approvers, m.Assignment, err)
		}
		events, err := l.store.Events(t.Context(), store.EventFilter{Name: "machine.window-ended"})
		if err != nil || approvers != (len(events) == 1 && events[0].MachineID == "node_1") {
			t.Errorf("approvers %v: events %v, %v", approvers, events, err)
		}
	}
}
