package site

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	gatewaygrants "github.com/better-compute/site-appliance/appliance/gateway/grants"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/pxe/assign"
	"github.com/better-compute/site-appliance/pxe/boots"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// damage breaks a file of a box that stands still, and starts the box.
func (f *field) damage(file string) {
	f.t.Helper()
	f.stop()
	f.must(os.WriteFile(filepath.Join(f.state, file), []byte("{torn"), 0o600))
	f.start(nil)
}

// granted is a grant that two people approved, for one use.
func (f *field) granted(operation *agentv1.GrantOperation, machines ...store.Machine) {
	f.t.Helper()
	g := f.propose(1, operation, machines...)
	f.approve(g, 0)
	f.approve(g, 1)
}

// bind sends a rebinding of a machine's BMC as it is.
func (f *field) bind(n int, protected bool) (errs.Code, string) {
	f.t.Helper()
	b := f.machines[n].BMC
	return f.send("bmc.bind", f.machines[n].ID, &bmcv1.BmcBindRequest{
		Driver: b.Driver, Address: b.Address, CredentialsRef: b.CredentialsRef, TlsSpkiSha256: b.TLSSPKISHA256, Protected: protected,
	})
}

// TestDamagedAddressBook: protections that were lost are taken for all BMCs, until
// people say of one that it has none; a restart changes nothing of that.
func TestDamagedAddressBook(t *testing.T) {
	f := newField(t, 3)
	for n := range f.machines {
		f.on(n)
	}
	f.off(0, "")
	f.damage("addressbook.json")

	f.on(0)
	f.off(0, errs.QuorumRequired)
	f.granted(powerOff, f.machines[0])
	f.off(0, "")
	f.on(0)
	f.off(0, errs.QuorumRequired) // the grant was for once, and changed no protection

	bind := &agentv1.GrantOperation{Kind: "bmc.bind", Operation: "bind"}
	code, message := f.bind(0, false)
	f.want("a rebinding without a grant", code, errs.QuorumRequired, message)
	f.granted(bind, f.machines[0])
	code, message = f.bind(0, false)
	f.want("a granted rebinding", code, "", message)
	f.off(0, "")
	f.off(1, errs.QuorumRequired)

	f.stop()
	f.start(nil)
	f.on(0)
	f.off(0, "")
	f.off(1, errs.QuorumRequired) // first seen after the damage
	f.off(2, errs.QuorumRequired) // not seen since
}

// TestForgetNeedsItsOwnGrant: who approved a rebinding did not approve that an
// address, and its protection, is forgotten.
func TestForgetNeedsItsOwnGrant(t *testing.T) {
	f := newField(t, 1)
	f.on(0)
	f.granted(&agentv1.GrantOperation{Kind: "bmc.bind", Operation: "bind", Action: "protect"}, f.machines[0])
	code, message := f.bind(0, true)
	f.want("protect", code, "", message)
	f.off(0, errs.QuorumRequired)

	forget := func() (errs.Code, string) {
		return f.send("bmc.bind", "", &bmcv1.BmcBindRequest{Driver: "redfish", Address: f.machines[0].BMC.Address, Forget: true})
	}
	for _, action := range []string{"", "protect"} {
		f.granted(&agentv1.GrantOperation{Kind: "bmc.bind", Operation: "bind", Action: action}, f.machines[0])
		code, message = forget()
		f.want("forget with a grant for "+action, code, errs.QuorumRequired, message)
	}
	// Without a machine: by its address alone.
	g, err := f.g.Grants.Propose(t.Context(), gatewaygrants.Proposal{TenantID: "default", SiteID: "site_1", Reason: "it was sold",
		Operations: []*agentv1.GrantOperation{{Kind: "bmc.bind", Operation: "bind", Action: "forget"}}, BMCs: []store.BMC{f.machines[0].BMC}})
	f.must(err)
	f.approve(g, 0)
	f.approve(g, 2)
	code, message = f.send("bmc.bind", "", &bmcv1.BmcBindRequest{Driver: "redfish", Address: f.machines[0].BMC.Address, CredentialsRef: fieldRef, Forget: true})
	f.want("forget that binds too", code, errs.InvalidPayload, message)
	code, message = forget()
	f.want("forget", code, "", message)
	f.on(0)
	f.off(0, "")
}

// TestDamagedAssignments: a machine whose protection was lost boots nothing else
// than its disk without people; the gateway's own word for it does not count.
func TestDamagedAssignments(t *testing.T) {
	f := newField(t, 2)
	snapshot := func(version uint64, ramdisk bool) *pxev1.AssignRequest {
		m := &pxev1.Machine{MachineId: "node_0", Macs: f.machines[0].MACs, Action: pxev1.Action_ACTION_LOCAL_DISK}
		if ramdisk {
			m.Action, m.Purpose, m.WindowId, m.WindowUntilMs = pxev1.Action_ACTION_RAMDISK, "inspect", "w1", time.Now().Add(time.Hour).UnixMilli()
		}
		return &pxev1.AssignRequest{Version: version, Machines: []*pxev1.Machine{m}}
	}
	code, message := f.send("pxe.assign", "node_0", snapshot(1, true))
	f.want("one machine", code, "", message)
	f.damage("assignments")

	code, message = f.send("pxe.assign", "node_0", snapshot(2, true))
	f.want("a machine that nobody knows any more", code, errs.QuorumRequired, message)
	code, message = f.send("pxe.assign", "node_0", snapshot(3, false))
	f.want("to its own disk", code, "", message)
	code, message = f.send("pxe.assign", "node_0", snapshot(4, true))
	f.want("a machine that only the gateway calls unprotected", code, errs.QuorumRequired, message)
	f.granted(&agentv1.GrantOperation{Kind: "pxe.assign", Operation: "pxe.assign"}, f.machines[0])
	code, message = f.send("pxe.assign", "node_0", snapshot(5, true))
	f.want("a granted boot", code, "", message)
	f.stop()
	f.start(nil)
	code, message = f.send("pxe.assign", "node_0", snapshot(6, false))
	f.want("back to its disk", code, "", message)
	code, message = f.send("pxe.assign", "node_0", snapshot(7, true))
	f.want("a machine that people released", code, "", message)
}

// TestDamagedInOpenWindows: where people approve, a box that lost its boot decisions while
// machines might boot has them again without any of those windows, however often it is
// started before; and what people grant for one machine is taken then.
func TestDamagedInOpenWindows(t *testing.T) {
	f := newField(t, 2)
	// opens is what a workflow stores, and what it sends.
	opens := func(n int, window string) proto.Message {
		t.Helper()
		wf := fmt.Sprint("wf_", window)
		f.must(f.g.Store.AddWorkflow(t.Context(), store.Workflow{ID: wf, TenantID: "default", Name: "x", MachineID: f.machines[n].ID, State: store.StateDone, Params: []byte("{}")},
			[]store.WorkflowStep{{ID: "main.0", Name: "x"}}, "", store.Event{}))
		var args proto.Message
		a := store.Assignment{Action: "ramdisk", Purpose: "deploy", WindowID: window, WindowUntil: time.Now().Add(time.Hour)}
		f.must(f.g.Store.Assign(t.Context(), "site_1", f.machines[n].ID, a, func(next store.Snapshot) (store.WorkflowStep, error) {
			args = metal.AssignCommand(next, time.Now()).Args
			return store.WorkflowStep{WorkflowID: wf, State: store.StateDone}, nil
		}))
		return args
	}
	for n := range f.machines {
		code, message := f.send("pxe.assign", f.machines[n].ID, opens(n, fmt.Sprint("win_", n)))
		f.want("before the damage", code, "", message)
	}
	f.damage("assignments")
	f.stop()
	f.start(nil)
	for deadline := time.Now().Add(30 * time.Second); f.decisions.Version() == 0; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the box has no boot decisions")
		}
	}
	for _, m := range f.decisions.Machines() {
		if m.Action != pxev1.Action_ACTION_LOCAL_DISK {
			t.Errorf("the box boots %v anew, which nobody approved", m)
		}
	}
	if events, err := f.g.Store.Events(t.Context(), store.EventFilter{Name: "machine.window-ended"}); err != nil || len(events) != 2 {
		t.Errorf("events %v, %v, want one of each window", events, err)
	}
	f.granted(&agentv1.GrantOperation{Kind: "pxe.assign", Operation: "pxe.assign"}, f.machines[0])
	code, message := f.send("pxe.assign", "node_0", opens(0, "win_3"))
	f.want("one that people approved", code, "", message)
}

// TestLostDecisions: what a box says that it lost, as often as it is started before it is
// told; one that starts with nothing has lost nothing.
func TestLostDecisions(t *testing.T) {
	booted := func(t *testing.T, dir string) {
		counts, err := boots.Open(filepath.Join(dir, "boots"), func(string) (string, bool) { return "", false })
		if err == nil {
			err = counts.Booted("node_1", "win_1")
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	told := func(t *testing.T, dir string) {
		decisions, err := assign.Open(filepath.Join(dir, "assignments.json"))
		if err == nil {
			_, err = decisions.Apply(&pxev1.AssignRequest{Version: 1})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	torn := func(t *testing.T, dir string) {
		if err := os.WriteFile(filepath.Join(dir, "assignments.json"), []byte("torn"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		name string
		is   []func(*testing.T, string)
		want bool
	}{
		{"nothing", nil, false},
		{"whole", []func(*testing.T, string){told, booted}, false},
		{"damaged", []func(*testing.T, string){torn}, true},
		{"damaged, with boots", []func(*testing.T, string){booted, torn}, true},
		{"missing", []func(*testing.T, string){booted}, true},
	} {
		dir := t.TempDir()
		for _, do := range tt.is {
			do(t, dir)
		}
		for start := range 2 {
			decisions, err := assign.Open(filepath.Join(dir, "assignments.json"))
			if err != nil {
				t.Fatal(err)
			}
			counts, err := boots.Open(filepath.Join(dir, "boots"), windowOf(decisions))
			if err != nil {
				t.Fatal(err)
			}
			if got := lostDecisions(decisions, counts); got != tt.want {
				t.Errorf("%s, start %d: lost %v, want %v", tt.name, start+1, got, tt.want)
			}
		}
	}
}

// TestRestoredGatewayCatchesUp: the gateway of an old backup learns from the box how
// far its snapshots had come.
func TestRestoredGatewayCatchesUp(t *testing.T) {
	f := newField(t, 1)
	send := func(version uint64) (errs.Code, string) {
		return f.send("pxe.assign", "node_0", &pxev1.AssignRequest{Version: version})
	}
	code, message := send(70)
	f.want("the snapshot before the restore", code, "", message)
	next, err := f.g.Store.NextSnapshot(t.Context(), "site_1")
	f.must(err)
	version := next.Version
	code, message = send(version)
	f.want("the restored gateway's", code, errs.StaleVersion, message)
	for deadline := time.Now().Add(30 * time.Second); version < 70; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the gateway is at version %d still", version)
		}
		version, err = f.g.Store.AssignVersion(t.Context(), "site_1")
		f.must(err)
	}
	next, err = f.g.Store.NextSnapshot(t.Context(), "site_1")
	f.must(err)
	code, message = send(next.Version)
	f.want("the next one", code, "", message)
}
