package api

import (
	"context"
	"crypto/sha256"
	"fmt"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
)

// byHand enrols a machine that people switch.
func (r *rig) byHand() {
	r.t.Helper()
	r.fixture()
	r.online["ag_box"] = true
	_, err := call(r.t.Context(), r.metal("admin").Enroll, enrollment(func(e *computev1.EnrollMachineRequest) {
		e.Bmc = &computev1.Bmc{Driver: "manual", Address: "Rack3-Shelf2"}
	}))
	must(r.t, err)
}

// noWait fails where an outcome is waited for.
type noWait struct{ *rig }

func (noWait) Wait(context.Context, string) (commands.Outcome, error) {
	panic("the API waits for a person")
}

func TestConfirmPower(t *testing.T) {
	r := newRig(t)
	r.byHand()
	ctx, c := t.Context(), r.metal("admin")
	_, err := call(ctx, c.ConfirmPower, &computev1.ConfirmPowerRequest{TenantId: "acme", Machine: "m1", Power: "on"})
	must(t, err)
	spec := r.specs[len(r.specs)-1]
	req, ok := spec.Args.(*bmcv1.BmcConfirmRequest)
	if spec.Kind != "bmc.confirm" || spec.AgentID != "ag_box" || !ok || req.Address != "Rack3-Shelf2" || req.Power != "on" {
		t.Errorf("ConfirmPower sends %+v", spec)
	}
	_, err = call(ctx, c.ConfirmPower, &computev1.ConfirmPowerRequest{TenantId: "acme", Machine: "m1", Power: "reset"})
	wantError(t, "another word", err, connect.CodeInvalidArgument, "INVALID_INPUT: power")
	_, err = call(ctx, c.ConfirmPower, &computev1.ConfirmPowerRequest{TenantId: "acme", Machine: "none", Power: "on"})
	wantError(t, "no machine", err, connect.CodeNotFound, "NOT_FOUND")
	_, err = call(ctx, c.Enroll, enrollment(func(e *computev1.EnrollMachineRequest) { e.Name, e.Macs = "m2", nil }))
	must(t, err)
	_, err = call(ctx, c.ConfirmPower, &computev1.ConfirmPowerRequest{TenantId: "acme", Machine: "m2", Power: "on"})
	wantError(t, "a machine with a BMC", err, connect.CodeFailedPrecondition, "UNSUPPORTED: bmc-driver-unsupported")
	r.token("reader", "acme", time.Time{}, "compute:metal:read")
	_, err = call(ctx, r.metal("reader").ConfirmPower, &computev1.ConfirmPowerRequest{TenantId: "acme", Machine: "m1", Power: "on"})
	wantError(t, "a reader", err, connect.CodePermissionDenied, "PERMISSION_DENIED")
	events, err := r.store.Events(ctx, store.EventFilter{Name: "power.confirmed"})
	if err != nil || len(events) != 1 || events[0].Class != "audit" {
		t.Errorf("audit events = %+v, %v, want the one confirmation", events, err)
	}
	r.online["ag_box"] = false
	_, err = call(ctx, c.ConfirmPower, &computev1.ConfirmPowerRequest{TenantId: "acme", Machine: "m1", Power: "on"})
	wantError(t, "a box that is away", err, connect.CodeUnavailable, "")
}

// A power command that a person carries out is answered when it is sent.
func TestPowerByHandIsNotWaitedFor(t *testing.T) {
	r := newRig(t)
	r.byHand()
	api := metalService{New(Config{Store: r.store, Metal: mustMetal(t), Drivers: r.drivers, Commands: noWait{r}, Enrol: r, Secrets: r, Artifacts: r, Workflows: r, Online: r.Online})}
	res, err := api.SetPower(t.Context(), connect.NewRequest(&computev1.SetPowerRequest{TenantId: "acme", Machine: "m1", Action: "off"}))
	if err != nil || res.Msg.CommandId != "cmd_1" {
		t.Errorf("SetPower = %v, %v", res, err)
	}
	if spec := r.specs[len(r.specs)-1]; spec.Timeout != 24*time.Hour || len(spec.SecretRefs) != 0 {
		t.Errorf("SetPower sends %+v, want 24 h and no secret", spec)
	}
}

func TestPowerAsked(t *testing.T) {
	r := newRig(t)
	r.byHand()
	ctx := t.Context()
	seq := uint64(0)
	tell := func(agent, key, body string) {
		t.Helper()
		seq++
		_, _, err := r.store.AddAgentEvents(ctx, agent, []*agentv1.Event{{Seq: seq, Name: "power.asked", Class: "state", Key: key, BodyJson: []byte(body)}})
		must(t, err)
	}
	asked := func() string {
		t.Helper()
		res, err := call(ctx, r.metal("admin").Get, &computev1.GetMachineRequest{TenantId: "acme", Machine: "m1"})
		must(t, err)
		list, err := call(ctx, r.metal("admin").List, &computev1.ListMachinesRequest{TenantId: "acme"})
		must(t, err)
		if len(list.Items) != 1 || list.Items[0].PowerAsked != res.Machine.PowerAsked {
			t.Errorf("List and Get differ: %v, %v", list.Items, res.Machine)
		}
		return res.Machine.PowerAsked
	}
	// An agent of a machine in the same site.
	token := store.Token{Hash: sha256.Sum256([]byte("ramdisk")), Role: agentv1.Role_ROLE_NODE, SiteID: "site_1", Expires: r.now.Add(time.Hour)}
	must(t, r.store.AddToken(ctx, token))
	_, err := r.store.Enrol(ctx, store.Enrolment{Token: &token, Agent: store.Agent{ID: "ag_node", Role: agentv1.Role_ROLE_NODE, SiteID: "site_1"},
		Certificate: store.Certificate{AgentID: "ag_node", Fingerprint: sha256.Sum256([]byte{2}), DER: []byte{2}, NotAfter: r.now.Add(time.Hour), RenewAfter: r.now}})
	must(t, err)
	_, err = r.store.Greeted(ctx, "ag_node", &agentv1.Hello{BootId: "b", JournalEpoch: "j", EventEpoch: "e"})
	must(t, err)

	until := func(d time.Duration) string { return r.now.Add(d).UTC().Format(time.RFC3339) }
	for _, tt := range []struct{ agent, key, body, want string }{
		{"ag_box", "rack3-shelf2", `{"action":"on"}`, "on"},
		{"ag_box", "rack3-shelf2", fmt.Sprintf(`{"action":"off","until":%q}`, until(time.Hour)), "off"},
		{"ag_node", "rack3-shelf2", `{"action":"reset"}`, "off"},
		{"ag_box", "another", `{"action":"cycle"}`, "off"},
		{"ag_box", "rack3-shelf2", fmt.Sprintf(`{"action":"on","until":%q}`, until(-time.Second)), ""},
		{"ag_box", "rack3-shelf2", `{"action":"soft"}`, "soft"},
		{"ag_box", "rack3-shelf2", `{"address":"rack3-shelf2"}`, ""},
		{"ag_box", "rack3-shelf2", `{"action":"\u001b[2J"}`, ""},
		{"ag_box", "rack3-shelf2", `[]`, ""},
	} {
		tell(tt.agent, tt.key, tt.body)
		if got := asked(); got != tt.want {
			t.Errorf("after %s about %s told %s: power_asked = %q, want %q", tt.agent, tt.key, tt.body, got, tt.want)
		}
	}
}

func mustMetal(t *testing.T) *metal.Metal {
	t.Helper()
	m, err := metal.New(hardwareOptions)
	must(t, err)
	return m
}
