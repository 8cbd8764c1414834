package ramdisk

import (
	"slices"
	"testing"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// TestStrangerRunsNothing: a machine that nobody enrolled reports its hardware, and
// serves no command, whatever assignment it was handed.
func TestStrangerRunsNothing(t *testing.T) {
	l := newLab(t, func(l *lab) { l.id = "mac-525400aa0001" })
	l.session.Event(HardwareEvent, l.id)
	if caps := l.session.Hello.GetCapabilities(); len(caps) != 0 {
		t.Errorf("capabilities = %q, want none", caps)
	}
	if got := l.command(t, "cmd_stream", l.request()).GetError(); got.GetCode() != string(errs.UnknownKind) {
		t.Errorf("image.stream = %v, want unknown-kind", got)
	}
	l.session.Command(&agentv1.CommandPayload{CommandId: "cmd_invoke", Kind: "driver.invoke", Lane: "provision", WorkflowId: "wf_1", StepId: "main.0", Args: []byte(`{}`)})
	if got := l.session.Result("cmd_invoke").GetError(); got.GetCode() != string(errs.UnknownKind) {
		t.Errorf("driver.invoke = %v, want unknown-kind", got)
	}
}

// TestStrangerAtGateway: a real gateway tells its box to inspect whom it does not know,
// lets such a machine's ramdisk in and keeps what it reports; once its MAC is confirmed
// the box is told whose it is.
func TestStrangerAtGateway(t *testing.T) {
	const id, mac = "mac-525400aa0001", "52:54:00:aa:00:01"
	h := newHome(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	ctx := t.Context()
	must(h.g.Store.AddSite(ctx, store.Site{ID: "site_1", TenantID: "acme", Name: "lab"}))
	must(h.g.Store.AddPool(ctx, store.Pool{ID: "pool_1", TenantID: "acme", Name: "metal", SiteID: "site_1"}))
	must(h.g.Store.AddMachine(ctx, store.Machine{ID: "node_1", TenantID: "acme", Name: "m1", PoolID: "pool_1", SiteID: "site_1"}))
	must(h.g.Store.SetUnknown(ctx, "site_1", true, nil))
	h.g.Discovery.Changed()
	u := (<-h.assigned).Unknown
	if !u.GetInspect() || u.WindowId == "" {
		t.Fatalf("the box is told %v of unknown machines", u)
	}
	agentID := h.boot(t, &pxev1.Machine{MachineId: id, Macs: []string{mac}, Purpose: "inspect", WindowId: u.WindowId, WindowUntilMs: u.WindowUntilMs})
	var found []store.Found
	h.await(t, "the report", func() bool {
		var err error
		found, err = h.g.Store.FoundAt(ctx, "site_1")
		must(err)
		return len(found) == 1 && !found[0].Inspected.IsZero()
	})
	if found[0].MAC != mac {
		t.Errorf("found = %+v, want %s", found, mac)
	}
	if _, err := h.g.Commands.Submit(ctx, commands.Spec{AgentID: agentID, TargetNodeID: id, Kind: StreamKind}); errs.CodeOf(err) != errs.OperationNotAllowed {
		t.Errorf("Submit to it = %v, want operation-not-allowed", err)
	}
	must(h.g.Store.AddMAC(ctx, "node_1", mac, 16, nil))
	h.g.Discovery.Changed()
	if m := (<-h.assigned).Machines; len(m) != 1 || m[0].MachineId != "node_1" || !slices.Equal(m[0].Macs, []string{mac}) {
		t.Errorf("the box is told of %v, want node_1 with %s", m, mac)
	}
}
