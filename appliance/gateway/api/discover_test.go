package api

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/api/computev1/computev1connect"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/appliance/gateway/workflow"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

const (
	productUUID = "4c4c4544-0042-3010-8056-b4c04f303232"
	otherUUID   = "44454c4c-4200-1030-8056-b4c04f303232" // in the other byte order
	macA        = "52:54:00:00:00:0a"
	macB        = "52:54:00:00:00:0b"
)

func (r *rig) saw(siteID, mac, uuid string) {
	r.t.Helper()
	must(r.t, r.store.Saw(r.t.Context(), store.Found{SiteID: siteID, MAC: mac, ProductUUID: uuid, Interface: "lan0", Client: "pxe uefi-x64", IP: "10.0.0.9"}))
}

// audited is the bodies of the audit events of a name.
func (r *rig) audited(name string) (bodies []string) {
	r.t.Helper()
	events, err := r.store.Events(r.t.Context(), store.EventFilter{SiteIDs: []string{"site_1"}, Name: name})
	must(r.t, err)
	for _, e := range events {
		if e.Class == "audit" {
			bodies = append(bodies, e.BodyJSON)
		}
	}
	return bodies
}

func TestUnknownPolicy(t *testing.T) {
	r := newRig(t)
	r.fixture()
	ctx := t.Context()
	c := r.sites("admin")
	get := func() *computev1.UnknownPolicy {
		t.Helper()
		res, err := call(ctx, c.GetUnknown, &computev1.GetUnknownRequest{TenantId: "acme", Site: "lab"})
		must(t, err)
		return res.Policy
	}
	if p := get(); p.Inspect || !p.Told || len(p.Expected) != 0 {
		t.Errorf("policy = %v, want unknown machines left alone", p)
	}
	for _, bad := range []struct {
		title string
		edit  func(*computev1.SetUnknownRequest)
		code  connect.Code
		text  string
	}{
		{"no policy", func(q *computev1.SetUnknownRequest) { q.Policy = nil }, connect.CodeInvalidArgument, "INVALID_INPUT: policy is missing"},
		{"no site", func(q *computev1.SetUnknownRequest) { q.Site = "nowhere" }, connect.CodeNotFound, "NOT_FOUND: "},
		{"another tenant's site", func(q *computev1.SetUnknownRequest) { q.TenantId = "other" }, connect.CodeNotFound, "NOT_FOUND: "},
		{"a list of nobody's", func(q *computev1.SetUnknownRequest) { q.Policy.Inspect = false }, connect.CodeInvalidArgument, "INVALID_INPUT: policy.expected: "},
		{"no MAC", func(q *computev1.SetUnknownRequest) { q.Policy.Expected = []string{macA, "x"} }, connect.CodeInvalidArgument, `INVALID_INPUT: policy.expected[1] "x"`},
		{"an empty line", func(q *computev1.SetUnknownRequest) { q.Policy.Expected = []string{""} }, connect.CodeInvalidArgument, "INVALID_INPUT: policy.expected[0]"},
		{"a group's MAC", func(q *computev1.SetUnknownRequest) { q.Policy.Expected = []string{"01:00:5e:00:00:01"} }, connect.CodeInvalidArgument, "INVALID_INPUT: policy.expected[0]"},
		{"zeros", func(q *computev1.SetUnknownRequest) {
			q.Policy.Expected = []string{"00000000-0000-0000-0000-000000000000"}
		}, connect.CodeInvalidArgument, "INVALID_INPUT: policy.expected[0]: many machines"},
		{"a maker's", func(q *computev1.SetUnknownRequest) {
			q.Policy.Expected = []string{"03000200-0400-0500-0006-000700080009"}
		}, connect.CodeInvalidArgument, "INVALID_INPUT: policy.expected[0]: many machines"},
		{"too many", func(q *computev1.SetUnknownRequest) { q.Policy.Expected = make([]string, metal.MaxExpected+1) }, connect.CodeInvalidArgument, "INVALID_INPUT: policy.expected: at most"},
	} {
		q := &computev1.SetUnknownRequest{TenantId: "acme", Site: "lab", Policy: &computev1.UnknownPolicy{Inspect: true, Expected: []string{macA}}}
		bad.edit(q)
		_, err := call(ctx, c.SetUnknown, q)
		wantError(t, bad.title, err, bad.code, bad.text)
	}
	if p := get(); p.Inspect || len(r.audited("site.unknown-set")) != 0 {
		t.Errorf("policy = %v after refusals, want it as it was", p)
	}
	res, err := call(ctx, c.SetUnknown, &computev1.SetUnknownRequest{TenantId: "acme", Site: "site_1", Policy: &computev1.UnknownPolicy{Inspect: true,
		Expected: []string{strings.ToUpper(productUUID), "52-54-00-00-00-0B", macA, macB}}})
	if want := []string{productUUID, macA, macB}; err != nil || !res.Policy.Inspect || !slices.Equal(res.Policy.Expected, want) || res.Policy.Told {
		t.Errorf("SetUnknown = %v, %v, want %q that the box does not know", res, err, want)
	}
	if bodies := r.audited("site.unknown-set"); len(bodies) != 1 || !strings.Contains(bodies[0], `"by":"admin"`) || !strings.Contains(bodies[0], `"expected":"3"`) || !strings.Contains(bodies[0], `"inspect":"true"`) {
		t.Errorf("audit = %q", bodies)
	}
	must(t, r.store.RollUnknown(ctx, "site_1", "win_1", r.now.Add(time.Hour)))
	must(t, r.store.Told(ctx, "site_1", 2, "ag_box j"))
	if p := get(); !p.Told || p.WindowUntilMs != r.now.Add(time.Hour).UnixMilli() {
		t.Errorf("policy = %v, want the window, and a box that knows", p)
	}
	must(t, r.store.Told(ctx, "site_1", 2, "ag_box another journal"))
	if get().Told {
		t.Error("a box that lost its journal is taken for one that knows")
	}
}

func TestFoundAndConfirmed(t *testing.T) {
	r := newRig(t)
	r.fixture()
	ctx := t.Context()
	c := r.metal("admin")
	must(t, r.store.AddSite(ctx, store.Site{ID: "site_2", TenantID: "acme", Name: "shed", Created: r.now}))
	must(t, r.store.AddSite(ctx, store.Site{ID: "site_3", TenantID: "other", Name: "theirs", Created: r.now}))
	enrolled, err := call(ctx, c.Enroll, enrollment(func(e *computev1.EnrollMachineRequest) { e.Macs, e.ProductUuid = nil, productUUID }))
	must(t, err)
	_, err = call(ctx, c.Enroll, enrollment(func(e *computev1.EnrollMachineRequest) { e.Name, e.ProductUuid = "m2", "" }))
	must(t, err)
	_, err = call(ctx, c.Inspect, &computev1.InspectRequest{TenantId: "acme", Machine: "m1"})
	wantError(t, "inspect without a MAC", err, connect.CodeFailedPrecondition, "INVALID_INPUT: no-mac")

	r.saw("site_1", macA, otherUUID)
	r.saw("site_2", macB, productUUID) // that of a machine of another site
	r.saw("site_3", "52:54:00:00:00:0c", "")
	must(t, r.store.SawHardware(ctx, "site_1", macA, `{"source":"ramdisk","manufacturer":"Acme","model":"R1","serial":"S1","productUuid":"`+otherUUID+`",
		"processors":[{"model":"Xeon","cores":16}],"memory":[{"size_bytes":34359738368}],"nics":[{"mac":"52:54:00:00:00:0A"},{"mac":"52:54:00:00:00:0d"}]}`))
	list := func(q *computev1.ListFoundRequest) string {
		t.Helper()
		q.TenantId = "acme"
		res, err := call(ctx, c.ListFound, q)
		must(t, err)
		var out []string
		for _, m := range res.Items {
			out = append(out, m.Site+" "+m.Mac[15:])
		}
		return strings.Join(out, ", ")
	}
	if got, want := list(&computev1.ListFoundRequest{}), "lab 0a, shed 0b"; got != want {
		t.Errorf("ListFound = %q, want %q", got, want)
	}
	if got, want := list(&computev1.ListFoundRequest{Site: "shed"}), "shed 0b"; got != want {
		t.Errorf("ListFound(shed) = %q, want %q", got, want)
	}
	if res, err := call(ctx, c.ListFound, &computev1.ListFoundRequest{TenantId: "acme", Site: "shed"}); err != nil || len(res.Items[0].Proposals) != 0 || res.Items[0].HardwareJson != "" {
		t.Errorf("ListFound(shed) = %v, %v, want no machine of another site proposed", res, err)
	}
	one, err := call(ctx, c.ListFound, &computev1.ListFoundRequest{TenantId: "acme", Mac: "52-54-00-00-00-0A"})
	must(t, err)
	m := one.Items[0]
	if m.ProductUuid != otherUUID || m.Serial != "S1" || m.Manufacturer != "Acme" || m.Model != "R1" || m.Processors != "1 x Xeon (16 cores)" || m.MemoryBytes != 1<<35 || m.Ip != "10.0.0.9" ||
		!slices.Equal(m.Macs, []string{macA, "52:54:00:00:00:0d"}) || m.InspectedMs == 0 || m.FirstSeenMs == 0 || !strings.Contains(m.HardwareJson, "Xeon") {
		t.Errorf("found = %v", m)
	}
	if len(m.Proposals) != 1 || m.Proposals[0].Machine != "m1" || m.Proposals[0].MachineId != enrolled.Machine.Id || m.Proposals[0].By != "product-uuid-swapped" || !strings.Contains(m.Proposals[0].Reason, "other byte order") {
		t.Errorf("proposals = %v, want m1, in the other byte order", m.Proposals)
	}
	_, err = call(ctx, c.ListFound, &computev1.ListFoundRequest{TenantId: "acme", Mac: "52:54:00:00:00:0c"})
	wantError(t, "another tenant's found machine", err, connect.CodeNotFound, "NOT_FOUND: MAC 52:54:00:00:00:0c")
	_, err = call(ctx, c.ListFound, &computev1.ListFoundRequest{TenantId: "acme", Site: "theirs"})
	wantError(t, "another tenant's site", err, connect.CodeNotFound, "NOT_FOUND: ")

	for _, bad := range []struct {
		title string
		edit  func(*computev1.ConfirmMacRequest)
		code  connect.Code
		text  string
	}{
		{"no MAC", func(q *computev1.ConfirmMacRequest) { q.Mac = "" }, connect.CodeInvalidArgument, "INVALID_INPUT: mac"},
		{"a group's MAC", func(q *computev1.ConfirmMacRequest) { q.Mac = "ff:ff:ff:ff:ff:ff" }, connect.CodeInvalidArgument, "INVALID_INPUT: mac"},
		{"no machine", func(q *computev1.ConfirmMacRequest) { q.Machine = "m9" }, connect.CodeNotFound, "NOT_FOUND: "},
		{"another tenant's machine", func(q *computev1.ConfirmMacRequest) { q.TenantId = "other" }, connect.CodeNotFound, "NOT_FOUND: "},
		{"another machine's MAC", func(q *computev1.ConfirmMacRequest) { q.Mac, q.Unseen = "52:54:00:00:00:01", true }, connect.CodeAlreadyExists, "INVALID_INPUT: taken: MAC 52:54:00:00:00:01 is machine m2's"},
		{"never seen", func(q *computev1.ConfirmMacRequest) { q.Mac = "52:54:00:00:00:ee" }, connect.CodeFailedPrecondition, "INVALID_INPUT: mac-not-seen: "},
		{"seen by another tenant's box", func(q *computev1.ConfirmMacRequest) { q.Mac = "52:54:00:00:00:0c" }, connect.CodeFailedPrecondition, "INVALID_INPUT: mac-not-seen: "},
		{"seen at another site", func(q *computev1.ConfirmMacRequest) { q.Mac = macB }, connect.CodeFailedPrecondition, "INVALID_INPUT: other-site: MAC " + macB + " was found at shed, and machine m1 is at another site"},
		{"seen at another site, and sure of it", func(q *computev1.ConfirmMacRequest) { q.Mac, q.Unseen = macB, true }, connect.CodeFailedPrecondition, "INVALID_INPUT: other-site: "},
	} {
		q := &computev1.ConfirmMacRequest{TenantId: "acme", Machine: "m1", Mac: macA}
		bad.edit(q)
		_, err := call(ctx, c.ConfirmMac, q)
		wantError(t, bad.title, err, bad.code, bad.text)
	}
	if u, err := r.store.SiteUntold(ctx, "site_1"); err != nil || u.Changes != 0 || len(r.audited("machine.mac-confirmed")) != 0 {
		t.Errorf("refusals left %+v, %v", u, err)
	}
	for i, tt := range []struct {
		mac    string
		unseen bool
		want   []string
		seen   string
	}{
		{"52-54-00-00-00-0A", false, []string{macA}, "true"},
		{macA, false, []string{macA}, "false"}, // again: it is not found any more
		{"52:54:00:00:00:ee", true, []string{macA, "52:54:00:00:00:ee"}, "false"},
	} {
		res, err := call(ctx, c.ConfirmMac, &computev1.ConfirmMacRequest{TenantId: "acme", Machine: "m1", Mac: tt.mac, Unseen: tt.unseen})
		if err != nil || !slices.Equal(res.Machine.Macs, tt.want) {
			t.Errorf("ConfirmMac(%s) = %v, %v, want %q", tt.mac, res, err, tt.want)
		}
		if bodies := r.audited("machine.mac-confirmed"); len(bodies) != i+1 || !strings.Contains(bodies[i], `"seen":"`+tt.seen+`"`) || !strings.Contains(bodies[i], `"by":"admin"`) {
			t.Errorf("audit = %q, want seen %s last", bodies, tt.seen)
		}
	}
	if got, want := list(&computev1.ListFoundRequest{}), "shed 0b"; got != want {
		t.Errorf("ListFound after that = %q, want %q", got, want)
	}
	// The next snapshot names them, and the box is to hear of it.
	next, err := r.store.NextSnapshot(ctx, "site_1")
	must(t, err)
	req := metal.AssignCommand(next, r.now).Args.(*pxev1.AssignRequest)
	if next.Change != 2 || len(req.Machines) != 2 || !slices.ContainsFunc(req.Machines, func(m *pxev1.Machine) bool {
		return m.MachineId == enrolled.Machine.Id && slices.Equal(m.Macs, []string{macA, "52:54:00:00:00:ee"})
	}) {
		t.Errorf("the next snapshot = %v with %d changes", req, next.Change)
	}
	for i := range metal.MaxMACs - 2 {
		_, err := call(ctx, c.ConfirmMac, &computev1.ConfirmMacRequest{TenantId: "acme", Machine: "m1", Mac: fmt.Sprintf("52:54:00:00:01:%02x", i), Unseen: true})
		must(t, err)
	}
	_, err = call(ctx, c.ConfirmMac, &computev1.ConfirmMacRequest{TenantId: "acme", Machine: "m1", Mac: "52:54:00:00:02:00", Unseen: true})
	wantError(t, "one MAC too many", err, connect.CodeFailedPrecondition, "INVALID_INPUT: too-many-macs: ")
}

// quorum is grants of which only one thing is asked.
type quorum struct {
	Grants
	inForce bool
}

func (q quorum) InForce() bool { return q.inForce }

// TestConfirmMacInAWindow: where boxes count grants, a machine that may boot something
// grows no MAC, and nothing is changed; everywhere else it does.
func TestConfirmMacInAWindow(t *testing.T) {
	for _, tt := range []struct {
		title     string
		approvers bool
		action    string
		left      time.Duration // of the window
		mac       string
		refused   bool
	}{
		{"a disc image", true, metal.ISO, time.Hour, macA, true},
		{"the ramdisk", true, metal.Ramdisk, time.Hour, macA, true},
		{"without approvers", false, metal.ISO, time.Hour, macA, false},
		{"a window that is over", true, metal.ISO, -time.Second, macA, false},
		{"its disk", true, metal.LocalDisk, time.Hour, macA, false},
		{"a MAC that it has", true, metal.ISO, time.Hour, "52:54:00:00:00:01", false},
	} {
		t.Run(tt.title, func(t *testing.T) {
			r := newRig(t, func(c *Config) { c.Grants = quorum{inForce: tt.approvers} })
			ctx := t.Context()
			m := r.enrolled("ipmi", nil)
			r.saw("site_1", macA, "")
			// A step of an inspection that has assigned it.
			id, err := r.Start(ctx, workflow.Inspect, m, workflow.Params{})
			must(t, err)
			must(t, r.store.Assign(ctx, m.SiteID, m.ID, store.Assignment{Action: tt.action, Purpose: "inspect", WindowID: "w", WindowUntil: r.now.Add(tt.left)}, func(store.Snapshot) (store.WorkflowStep, error) {
				steps, err := r.store.WorkflowSteps(ctx, id)
				return steps[1], err
			}))
			res, err := call(ctx, r.metal("admin").ConfirmMac, &computev1.ConfirmMacRequest{TenantId: "acme", Machine: "m1", Mac: tt.mac})
			u, uerr := r.store.SiteUntold(ctx, "site_1")
			must(t, uerr)
			if !tt.refused {
				if err != nil || !slices.Contains(res.Machine.Macs, tt.mac) {
					t.Errorf("ConfirmMac = %v, %v, want it the machine's", res, err)
				}
				return
			}
			wantError(t, "ConfirmMac", err, connect.CodeFailedPrecondition, "INVALID_INPUT: boot-window-open: machine m1 may boot "+tt.action)
			for _, want := range []string{tt.action + " for inspect until 2027-", "when that is over", "workflow cancel while its workflow runs", "metal boot-disk m1, which switches the machine off",
				"grant propose --allow off --machine m1", "grant propose --allow netboot --machine m1"} {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("ConfirmMac = %v, want it to name %s", err, want)
				}
			}
			if m := w0(t, r); slices.Contains(m.MACs, macA) || u.Changes != 0 || len(r.audited("machine.mac-confirmed")) != 0 {
				t.Errorf("a refusal left MACs %q, %d changes", m.MACs, u.Changes)
			}
			if found, err := r.store.FoundAt(ctx, "site_1"); err != nil || len(found) != 1 {
				t.Errorf("found after a refusal = %v, %v, want it found as before", found, err)
			}
		})
	}
}

func TestRejectMac(t *testing.T) {
	r := newRig(t)
	r.fixture()
	ctx := t.Context()
	c := r.metal("admin")
	must(t, r.store.AddSite(ctx, store.Site{ID: "site_2", TenantID: "acme", Name: "shed", Created: r.now}))
	r.saw("site_1", macA, "")
	r.saw("site_1", macB, "")
	r.saw("site_2", macB, "")
	for _, bad := range []struct {
		title string
		q     *computev1.RejectMacRequest
		code  connect.Code
		text  string
	}{
		{"no MAC", &computev1.RejectMacRequest{TenantId: "acme"}, connect.CodeInvalidArgument, "INVALID_INPUT: mac"},
		{"never found", &computev1.RejectMacRequest{TenantId: "acme", Mac: "52:54:00:00:00:ee"}, connect.CodeNotFound, "NOT_FOUND: "},
		{"never found there", &computev1.RejectMacRequest{TenantId: "acme", Mac: macA, Site: "shed"}, connect.CodeNotFound, "NOT_FOUND: "},
		{"found twice", &computev1.RejectMacRequest{TenantId: "acme", Mac: macB}, connect.CodeInvalidArgument, "INVALID_INPUT: MAC " + macB + " was found at lab and shed: name one (--site)"},
		{"another tenant", &computev1.RejectMacRequest{TenantId: "other", Mac: macA}, connect.CodeNotFound, "NOT_FOUND: "},
	} {
		_, err := call(ctx, c.RejectMac, bad.q)
		wantError(t, bad.title, err, bad.code, bad.text)
	}
	_, err := call(ctx, c.RejectMac, &computev1.RejectMacRequest{TenantId: "acme", Mac: macA})
	must(t, err)
	_, err = call(ctx, c.RejectMac, &computev1.RejectMacRequest{TenantId: "acme", Mac: macB, Site: "shed"})
	must(t, err)
	r.saw("site_1", macA, "") // it asks again, and stays out of sight
	for rejected, want := range map[bool]int{false: 1, true: 3} {
		res, err := call(ctx, c.ListFound, &computev1.ListFoundRequest{TenantId: "acme", Rejected: rejected})
		if err != nil || len(res.Items) != want {
			t.Errorf("ListFound(rejected %v) = %v, %v, want %d", rejected, res, err, want)
		}
	}
	if bodies := r.audited("machine.mac-rejected"); len(bodies) != 1 || !strings.Contains(bodies[0], macA) {
		t.Errorf("audit = %q", bodies)
	}
}

// TestEnrollIdentity: what its site could never boot is not enrolled.
func TestEnrollIdentity(t *testing.T) {
	r := newRig(t)
	r.fixture()
	ctx := t.Context()
	must(t, r.store.AddSite(ctx, store.Site{ID: "site_2", TenantID: "acme", Name: "shed", Created: r.now}))
	must(t, r.store.AddPool(ctx, store.Pool{ID: "pool_2", TenantID: "acme", Name: "early", SiteID: "site_2", Created: r.now}))
	for i, tt := range []struct {
		title string
		edit  func(*computev1.EnrollMachineRequest)
		text  string // of the refusal; empty: it is enrolled
	}{
		{"ipmi with a MAC", func(e *computev1.EnrollMachineRequest) { e.ProductUuid = "" }, ""},
		{"ipmi with a UUID", func(e *computev1.EnrollMachineRequest) { e.Macs = nil }, ""},
		{"ipmi with neither", func(e *computev1.EnrollMachineRequest) { e.Macs, e.ProductUuid = nil, "" }, "INVALID_INPUT: boot-identity-missing: "},
		{"ipmi with zeros", func(e *computev1.EnrollMachineRequest) {
			e.Macs, e.ProductUuid = nil, "00000000-0000-0000-0000-000000000000"
		}, "INVALID_INPUT: product_uuid"},
		{"ipmi with a maker's", func(e *computev1.EnrollMachineRequest) {
			e.Macs, e.ProductUuid = nil, "03000200-0400-0500-0006-000700080009"
		}, "INVALID_INPUT: product_uuid"},
		{"ipmi in a pool without an agent", func(e *computev1.EnrollMachineRequest) { e.Pool, e.Macs = "early", []string{macA} }, "INVALID_INPUT: pool-without-agent: "},
		{"redfish with neither, in that pool", func(e *computev1.EnrollMachineRequest) {
			e.Pool, e.Macs, e.ProductUuid, e.Bmc.Driver = "early", nil, "", "redfish"
		}, ""},
		{"redfish with ones", func(e *computev1.EnrollMachineRequest) {
			e.Macs, e.ProductUuid, e.Bmc.Driver = nil, "ffffffff-ffff-ffff-ffff-ffffffffffff", "redfish"
		}, "INVALID_INPUT: product_uuid"},
		{"wol, which its address names", func(e *computev1.EnrollMachineRequest) {
			e.Macs, e.ProductUuid, e.Bmc = nil, "", &computev1.Bmc{Driver: "wol", Address: macB}
		}, ""},
		{"manual, which a person names", func(e *computev1.EnrollMachineRequest) {
			e.Macs, e.ProductUuid, e.Bmc = nil, "", &computev1.Bmc{Driver: "manual", Address: "row4"}
		}, ""},
	} {
		e := enrollment(func(e *computev1.EnrollMachineRequest) { e.Name = fmt.Sprint("m", i) })
		tt.edit(e)
		_, err := call(ctx, r.metal("admin").Enroll, e)
		if (err == nil) != (tt.text == "") || err != nil && !strings.Contains(err.Error(), tt.text) {
			t.Errorf("%s: Enroll = %v, want %q", tt.title, err, tt.text)
		}
	}
	// Nor does a machine become one by another driver.
	_, err := call(ctx, r.metal("admin").RebindBmc, &computev1.RebindBmcRequest{TenantId: "acme", Machine: "m6", Bmc: &computev1.Bmc{Driver: "ipmi", Address: "10.0.0.6", CredentialsRef: "secret://acme/bmc"}})
	wantError(t, "rebinding to ipmi", err, connect.CodeInvalidArgument, "INVALID_INPUT: boot-identity-missing: ")
}

func TestExplainBoot(t *testing.T) {
	r := newRig(t)
	r.fixture()
	ctx := t.Context()
	c := computev1connect.NewPxeServiceClient(r.as("admin"), r.server.URL)
	m, err := call(ctx, r.metal("admin").Enroll, enrollment(func(e *computev1.EnrollMachineRequest) { e.Macs = []string{macA} }))
	must(t, err)
	explain := func(mac, site string) (*computev1.ExplainBootResponse, error) {
		return call(ctx, c.Explain, &computev1.ExplainBootRequest{TenantId: "acme", Mac: mac, Site: site})
	}
	_, err = explain(macA, "")
	wantError(t, "while the box is offline", err, connect.CodeUnavailable, "DRIVER_ERROR: unavailable: the site's box is offline (site lab)")
	r.online["ag_box"] = true
	r.outcome.Result, err = proto.Marshal(&pxev1.ExplainResult{Mac: macA, MachineId: m.Machine.Id, WaitsFor: "nothing", Syslog: []string{"a line"},
		Answers:  []*pxev1.Answer{{Protocol: "tftp", Client: "pxe uefi-x64", Action: "agent", File: "snponly.efi", Reason: "because"}},
		Attempts: []*pxev1.Attempt{{BeganMs: 7, Interface: "lan0", Steps: []*pxev1.Step{{AtMs: 8, Stage: "dhcp", Client: "pxe", Detail: "d"}}}}})
	must(t, err)
	got, err := explain("52-54-00-00-00-0A", "")
	want := &computev1.ExplainBootResponse{SiteId: "site_1", Site: "lab", Mac: macA, MachineId: m.Machine.Id, Machine: "m1", WaitsFor: "nothing", Syslog: []string{"a line"},
		Answers:  []*computev1.BootAnswer{{Protocol: "tftp", Client: "pxe uefi-x64", Action: "agent", File: "snponly.efi", Reason: "because"}},
		Attempts: []*computev1.BootAttempt{{BeganMs: 7, Interface: "lan0", Steps: []*computev1.BootStep{{AtMs: 8, Stage: "dhcp", Client: "pxe", Detail: "d"}}}}}
	if err != nil || !proto.Equal(got, want) {
		t.Errorf("Explain = %v, %v, want %v", got, err, want)
	}
	if spec := r.specs[0]; len(r.specs) != 1 || spec.AgentID != "ag_box" || spec.Kind != "pxe.explain" || spec.Args.(*pxev1.ExplainRequest).Mac != macA {
		t.Errorf("commands = %+v", r.specs)
	}

	// Whose box is asked: the machine's, or the one that has found it, or the only one.
	must(t, r.store.AddSite(ctx, store.Site{ID: "site_2", TenantID: "acme", Name: "shed", Created: r.now}))
	r.saw("site_1", macB, "")
	for _, tt := range []struct {
		title, mac, site string
		code             connect.Code
		text             string // of the error; empty: site_1 is asked
	}{
		{"the machine's", macA, "", 0, ""},
		{"that of who has found it", macB, "", 0, ""},
		{"named", "52:54:00:00:00:ee", "lab", 0, ""},
		{"nobody's", "52:54:00:00:00:ee", "", connect.CodeInvalidArgument, "INVALID_INPUT: site is missing: MAC 52:54:00:00:00:ee is no machine's, and was found at 0 of 2 sites: name the one whose box is asked (--site)"},
		{"one without a box", macA, "shed", connect.CodeUnavailable, "DRIVER_ERROR: unavailable: the site's box has not enrolled yet (site shed)"},
		{"no site", macA, "nowhere", connect.CodeNotFound, "NOT_FOUND: "},
		{"no MAC", "x", "", connect.CodeInvalidArgument, "INVALID_INPUT: mac"},
	} {
		got, err := explain(tt.mac, tt.site)
		if tt.text != "" {
			wantError(t, tt.title, err, tt.code, tt.text)
		} else if err != nil || got.SiteId != "site_1" {
			t.Errorf("%s: Explain = %v, %v", tt.title, got, err)
		}
	}
	r.saw("site_2", macB, "")
	_, err = explain(macB, "")
	wantError(t, "found at two sites", err, connect.CodeInvalidArgument, "INVALID_INPUT: site is missing")
	_, err = call(ctx, c.Explain, &computev1.ExplainBootRequest{TenantId: "other", Mac: macA})
	wantError(t, "another tenant's machine", err, connect.CodeInvalidArgument, "INVALID_INPUT: site is missing")
	r.outcome = commands.Outcome{Err: errs.New(errs.InvalidArgs, "no")}
	_, err = explain(macA, "")
	wantError(t, "a box's refusal", err, connect.CodeAborted, "DRIVER_ERROR: invalid-args: no")
}
