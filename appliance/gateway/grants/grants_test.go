package grants

import (
	"crypto/ed25519"
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/grants"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/keys"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/image/imagev1"
	"github.com/better-compute/site-appliance/plugins/driver/invocation"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// desk is the service on a store with two tenants, whose sites have machines at
// the same private addresses.
type desk struct {
	*Service
	t      *testing.T
	now    time.Time
	people []ed25519.PrivateKey
}

func newDesk(t *testing.T) *desk {
	t.Helper()
	d := &desk{t: t, now: time.Now().Truncate(time.Millisecond)}
	dir := filepath.Join(t.TempDir(), "gw")
	_, err := keys.Init(dir, []string{"https://gateway.example.net:7443"}, time.Now())
	d.must(err)
	root, err := keys.ReadPrivate(filepath.Join(dir, keys.RootFile))
	d.must(err)
	var public []ed25519.PublicKey
	for n := range 3 {
		key := ed25519.NewKeyFromSeed(slices.Repeat([]byte{byte(n)}, 32))
		d.people, public = append(d.people, key), append(public, key.Public().(ed25519.PublicKey))
	}
	_, err = keys.NextBundle(dir, []ed25519.PrivateKey{root}, func(b *agentv1.TrustBundle) error { return keys.AddApprovers(b, public, 0) }, time.Now())
	d.must(err)
	bundle, _, err := keys.Bundle(dir, time.Now())
	d.must(err)
	st, err := store.Open(filepath.Join(dir, "gateway.db"), func() time.Time { return d.now })
	d.must(err)
	t.Cleanup(func() { st.Close() })
	for _, tenant := range []string{"acme", "zeta"} {
		d.must(st.AddSite(t.Context(), store.Site{ID: "site_" + tenant, TenantID: tenant, Name: "lab", Created: d.now}))
		d.must(st.AddPool(t.Context(), store.Pool{ID: "pool_" + tenant, TenantID: tenant, Name: "metal", SiteID: "site_" + tenant, Created: d.now}))
		for name, address := range map[string]string{"m1": "10.0.0.1", "m2": "10.0.0.2"} {
			d.must(st.AddMachine(t.Context(), store.Machine{ID: "node_" + tenant + "_" + name, TenantID: tenant, Name: name, PoolID: "pool_" + tenant, SiteID: "site_" + tenant,
				BMC: store.BMC{Driver: "ipmi", Address: address}, State: "enrolled", Created: d.now}))
		}
	}
	// A second site of acme's, with a machine at the same address.
	d.must(st.AddSite(t.Context(), store.Site{ID: "site_shed", TenantID: "acme", Name: "shed", Created: d.now}))
	d.Service = New(st, bundle)
	return d
}

func (d *desk) must(err error) {
	d.t.Helper()
	if err != nil {
		d.t.Fatal(err)
	}
}

func (d *desk) machine(tenant, name string) store.Machine {
	d.t.Helper()
	m, err := d.store.Machine(d.t.Context(), tenant, name)
	d.must(err)
	return m
}

func (d *desk) propose(edit func(*Proposal)) store.Grant {
	d.t.Helper()
	p := Proposal{TenantID: "acme", Operations: []*agentv1.GrantOperation{{Kind: "bmc.power", Operation: "power.setPower", Action: "off"}}, Machines: []store.Machine{d.machine("acme", "m1")}, Reason: "test"}
	if edit != nil {
		edit(&p)
	}
	g, err := d.Propose(d.t.Context(), p)
	d.must(err)
	return g
}

func (d *desk) approve(g store.Grant, people ...int) {
	d.t.Helper()
	for _, n := range people {
		_, err := d.Approve(d.t.Context(), g.TenantID, g.ID, grants.Sign(d.people[n], g.Payload))
		d.must(err)
	}
}

func power(driver, address, action string) *agentv1.CommandPayload {
	args, _ := proto.Marshal(&bmcv1.BmcOperationRequest{Driver: driver, Address: address, Operation: "power.setPower", ArgsJson: `["` + action + `"]`})
	return &agentv1.CommandPayload{Kind: "bmc.power", Args: args}
}

// cited is the grant that a command of the site's box cites, or empty. What it
// cites is held against the box's own judgement.
func (d *desk) cited(site string, p *agentv1.CommandPayload) string {
	d.t.Helper()
	c, err := d.Cite(d.t.Context(), store.Agent{ID: "ag_1", SiteID: site}, p)
	d.must(err)
	if c == nil {
		return ""
	}
	s, _ := Describe(p, "")
	use, err := grants.Judge(grants.Command{Kind: s.Kind, Operation: s.Operation, Action: s.Action, Targets: s.Targets, Artifacts: s.Artifacts, Citation: c},
		d.bundle, grants.Past{}, grants.Moment{SiteID: site, Now: d.now, Latest: d.now})
	if err != nil {
		d.t.Errorf("the box refuses what was cited: %v", err)
	}
	return use.Grant
}

// TestCite: a command cites the grant that covers it wholly, and no other.
func TestCite(t *testing.T) {
	d := newDesk(t)
	off := power("ipmi", "10.0.0.1", "off")
	if got := d.cited("site_acme", off); got != "" {
		t.Errorf("cited %q before anything was proposed", got)
	}
	g := d.propose(nil)
	d.approve(g, 0)
	if got := d.cited("site_acme", off); got != "" {
		t.Errorf("cited %q with one approver of two", got)
	}
	d.approve(g, 1, 1, 2)
	for name, tt := range map[string]struct {
		site string
		p    *agentv1.CommandPayload
		want string
	}{
		"covered":                     {"site_acme", off, g.ID},
		"the address written in full": {"site_acme", power("ipmi", "ipmi://10.0.0.1:623", "off"), g.ID},
		"another machine":             {"site_acme", power("ipmi", "10.0.0.2", "off"), ""},
		"another port":                {"site_acme", power("redfish", "10.0.0.1", "off"), ""},
		"another action":              {"site_acme", power("ipmi", "10.0.0.1", "cycle"), ""},
		"another tenant's machine":    {"site_zeta", off, ""},
		"another site's machine":      {"site_shed", off, ""},
		"no address":                  {"site_acme", power("ipmi", "not an address", "off"), ""},
		"another kind":                {"site_acme", &agentv1.CommandPayload{Kind: "site.update", Args: off.Args}, ""},
	} {
		if got := d.cited(tt.site, tt.p); got != tt.want {
			t.Errorf("%s: cited %q, want %q", name, got, tt.want)
		}
	}
	// Another tenant's grant is none of this site's, whatever it says.
	stray := g
	stray.ID, stray.TenantID = "grant_stray", "zeta"
	terms, err := grants.Parse(g.Payload)
	d.must(err)
	terms.GrantId, terms.Operations[0].Action = stray.ID, "cycle"
	stray.Payload, err = grants.Encode(terms)
	d.must(err)
	d.must(d.store.AddGrant(t.Context(), stray))
	d.approve(stray, 0, 1)
	if got := d.cited("site_acme", power("ipmi", "10.0.0.1", "cycle")); got != "" {
		t.Errorf("cited %q, another tenant's", got)
	}
	d.now = d.now.Add(defaultLife)
	if got := d.cited("site_acme", off); got != "" {
		t.Errorf("cited %q after its end", got)
	}
	if _, err := d.Approve(t.Context(), "acme", g.ID, grants.Sign(d.people[0], g.Payload)); err == nil || !strings.Contains(err.Error(), "grant-ended") {
		t.Errorf("Approve after its end = %v", err)
	}
}

// TestUses: a command takes its use when it is kept, and gives it back when its
// agent refused it.
func TestUses(t *testing.T) {
	d := newDesk(t)
	off := power("ipmi", "10.0.0.1", "off")
	first := d.propose(func(p *Proposal) { p.Uses = 2 })
	d.approve(first, 0, 1)
	d.addAgent()
	add := func(id string) {
		t.Helper()
		_, err := d.store.AddCommand(t.Context(), store.Command{ID: id, SpecHash: []byte(id), AgentID: "ag_1", Kind: "bmc.power", Lane: "power", Incarnation: "i",
			Issued: d.now, NotAfter: d.now.Add(time.Minute), Signed: &agentv1.SignedCommand{Payload: []byte("p"), Signature: []byte("s")},
			GrantID: first.ID, GrantTargets: []string{"bmc:10.0.0.1:623"}})
		d.must(err)
	}
	want := func(when, want string) {
		t.Helper()
		if got := d.cited("site_acme", off); got != want {
			t.Errorf("%s: cited %q, want %q", when, got, want)
		}
	}
	want("unused", first.ID)
	add("cmd_1")
	add("cmd_1") // the same command again
	want("used once", first.ID)
	add("cmd_2")
	want("used twice", "")
	d.must(d.store.FinishCommand(t.Context(), "ag_1", "cmd_1", nil, errs.New(errs.LaneFull, "full")))
	want("one was refused", first.ID)
	add("cmd_3")
	d.must(d.store.FinishCommand(t.Context(), "ag_1", "cmd_3", nil, errs.New(errs.BmcError, "it ran")))
	want("one failed, but ran", "")
	second := d.propose(nil)
	d.approve(second, 0, 1)
	want("another grant", second.ID)
}

func (d *desk) addAgent() {
	d.t.Helper()
	digest := [32]byte{1}
	token := store.Token{Hash: digest, Role: agentv1.Role_ROLE_SITE, SiteID: "site_acme", Expires: d.now.Add(time.Hour)}
	d.must(d.store.AddToken(d.t.Context(), token))
	_, err := d.store.Enrol(d.t.Context(), store.Enrolment{
		Agent: store.Agent{ID: "ag_1", Role: agentv1.Role_ROLE_SITE, SiteID: "site_acme"}, Token: &token,
		Certificate: store.Certificate{Fingerprint: digest, AgentID: "ag_1", CSRHash: digest, DER: []byte("x"), NotAfter: d.now.Add(time.Hour), RenewAfter: d.now},
	})
	d.must(err)
}

func TestPropose(t *testing.T) {
	d := newDesk(t)
	for name, tt := range map[string]struct {
		edit func(*Proposal)
		want []string // targets
		fail string
	}{
		"power": {nil, []string{"bmc:10.0.0.1:623"}, ""},
		"boot": {func(p *Proposal) {
			p.Operations[0] = &agentv1.GrantOperation{Kind: "pxe.assign", Operation: "pxe.assign"}
		}, []string{"machine:node_acme_m1"}, ""},
		"invocation": {func(p *Proposal) { p.Operations[0].Kind = "driver.invoke" }, []string{"bmc:10.0.0.1:623", "machine:node_acme_m1"}, ""},
		"two machines": {func(p *Proposal) { p.Machines = append(p.Machines, d.machine("acme", "m2"), d.machine("acme", "m2")) },
			[]string{"bmc:10.0.0.1:623", "bmc:10.0.0.2:623"}, ""},
		"a week":        {func(p *Proposal) { p.Valid = grants.MaxLife }, []string{"bmc:10.0.0.1:623"}, ""},
		"more":          {func(p *Proposal) { p.Valid = grants.MaxLife + 1 }, nil, "valid_s"},
		"no machine":    {func(p *Proposal) { p.Machines = nil }, nil, "machines"},
		"two sites":     {func(p *Proposal) { p.Machines = append(p.Machines, d.machine("zeta", "m1")) }, nil, "at another site"},
		"no operation":  {func(p *Proposal) { p.Operations = nil }, nil, "targets"},
		"odd kind":      {func(p *Proposal) { p.Operations[0].Kind = "site.update" }, nil, "none that a grant is for"},
		"odd operation": {func(p *Proposal) { p.Operations[0].Operation = "a b" }, nil, "operation"},
		"no reason":     {func(p *Proposal) { p.Reason = "" }, nil, "reason"},
		"odd artifact":  {func(p *Proposal) { p.Artifacts = []string{"x"} }, nil, "artifact"},
		"many uses":     {func(p *Proposal) { p.Uses = 5000 }, nil, "uses"},
	} {
		p := Proposal{TenantID: "acme", Operations: []*agentv1.GrantOperation{{Kind: "bmc.power", Operation: "power.setPower", Action: "off"}}, Machines: []store.Machine{d.machine("acme", "m1")}, Reason: "test"}
		if tt.edit != nil {
			tt.edit(&p)
		}
		g, err := d.Propose(t.Context(), p)
		if tt.fail != "" {
			if err == nil || !strings.Contains(err.Error(), tt.fail) || !strings.HasPrefix(err.Error(), "INVALID_INPUT") {
				t.Errorf("%s: Propose = %v, want INVALID_INPUT with %q", name, err, tt.fail)
			}
			continue
		}
		kept, kerr := d.store.Grant(t.Context(), "acme", g.ID)
		if err != nil || kerr != nil || !slices.Equal(g.Targets, tt.want) || !slices.Equal(kept.Targets, tt.want) || string(kept.Payload) != string(g.Payload) || g.SiteID != "site_acme" {
			t.Errorf("%s: Propose = %+v, %v, kept %+v, %v, want targets %v", name, g, err, kept, kerr, tt.want)
		}
	}
}

func TestDescribe(t *testing.T) {
	marshal := func(m proto.Message) []byte { out, _ := proto.Marshal(m); return out }
	invoke := func(edit func(*invocation.Request)) *agentv1.CommandPayload {
		r := invocation.Request{WorkflowID: "wf_1", StepID: "s", Attempt: 1, TargetNodeID: "node_1", Concern: "power", Operation: "setPower", Driver: "acme",
			Args: json.RawMessage(`["off"]`), Config: json.RawMessage(`{"address":"10.0.0.5"}`)}
		edit(&r)
		args, err := invocation.Encode(r)
		if err != nil {
			t.Fatal(err)
		}
		return &agentv1.CommandPayload{Kind: "driver.invoke", Args: args, TargetNodeId: r.TargetNodeID}
	}
	boot := func(target string) *agentv1.CommandPayload {
		machine := func(id string, action pxev1.Action) *pxev1.Machine {
			return &pxev1.Machine{MachineId: id, Action: action, Artifacts: []string{"of " + id}}
		}
		return &agentv1.CommandPayload{Kind: "pxe.assign", TargetNodeId: target, Args: marshal(&pxev1.AssignRequest{Version: 1, Machines: []*pxev1.Machine{
			machine("a", pxev1.Action_ACTION_RAMDISK), machine("b", pxev1.Action_ACTION_LOCAL_DISK), machine("c", pxev1.Action_ACTION_RAMDISK),
		}})}
	}
	for name, tt := range map[string]struct {
		p    *agentv1.CommandPayload
		want Subject
	}{
		"invocation":           {invoke(func(*invocation.Request) {}), Subject{Kind: "driver.invoke", Operation: "power.setPower", Action: "off", Targets: []string{"bmc:10.0.0.5:443", "machine:node_1"}}},
		"on the machine":       {invoke(func(r *invocation.Request) { r.TargetNodeID, r.Config = "", nil }), Subject{Kind: "driver.invoke", Operation: "power.setPower", Action: "off", Targets: []string{"machine:node_self"}}},
		"for a machine's sake": {boot("a"), Subject{Kind: "pxe.assign", Operation: "pxe.assign", Targets: []string{"machine:a"}, Artifacts: []string{"of a"}}},
		"for nobody's":         {boot(""), Subject{Kind: "pxe.assign", Operation: "pxe.assign", Targets: []string{"machine:a", "machine:c"}, Artifacts: []string{"of a", "of c"}}},
		"back to the disk":     {boot("b"), Subject{}},
		"a disc image": {&agentv1.CommandPayload{Kind: "pxe.assign", TargetNodeId: "a", Args: marshal(&pxev1.AssignRequest{Version: 1, Machines: []*pxev1.Machine{
			{MachineId: "a", Action: pxev1.Action_ACTION_ISO, Iso: &pxev1.Iso{Sha256: "iso"}}}})},
			Subject{Kind: "pxe.assign", Operation: "pxe.assign", Targets: []string{"machine:a"}, Artifacts: []string{"iso"}}},
		"a kernel": {&agentv1.CommandPayload{Kind: "pxe.assign", TargetNodeId: "a", Args: marshal(&pxev1.AssignRequest{Version: 1, Machines: []*pxev1.Machine{
			{MachineId: "a", Action: pxev1.Action_ACTION_KERNEL, Kernel: &pxev1.Kernel{Sha256: "kernel", InitrdSha256: "initrd"}}}})},
			Subject{Kind: "pxe.assign", Operation: "pxe.assign", Targets: []string{"machine:a"}, Artifacts: []string{"kernel", "initrd"}}},
		"image": {&agentv1.CommandPayload{Kind: "image.stream", Args: marshal(&imagev1.StreamRequest{Sha256: "ab"})},
			Subject{Kind: "image.stream", Operation: "image.stream", Targets: []string{"machine:node_self"}, Artifacts: []string{"ab"}}},
		"wipe":    {&agentv1.CommandPayload{Kind: "disk.wipe"}, Subject{Kind: "disk.wipe", Operation: "disk.wipe", Targets: []string{"machine:node_self"}}},
		"torn":    {&agentv1.CommandPayload{Kind: "image.stream", Args: []byte{0xff}}, Subject{}},
		"unknown": {&agentv1.CommandPayload{Kind: "instance.apply"}, Subject{}},
	} {
		got, ok := Describe(tt.p, "node_self")
		got.Also = nil
		if ok != (tt.want.Kind != "") || got.Kind != tt.want.Kind || got.Operation != tt.want.Operation || got.Action != tt.want.Action || !slices.Equal(got.Targets, tt.want.Targets) || !slices.Equal(got.Artifacts, tt.want.Artifacts) {
			t.Errorf("%s: Describe = %+v, %v, want %+v", name, got, ok, tt.want)
		}
	}
}

// TestLapsed: of a command that no grant covers any more people are told which one
// did, and why it holds no more.
func TestLapsed(t *testing.T) {
	d := newDesk(t)
	d.addAgent()
	off := power("ipmi", "10.0.0.1", "off")
	want := func(when string, p *agentv1.CommandPayload, want string) {
		t.Helper()
		got, err := d.Lapsed(t.Context(), store.Agent{ID: "ag_1", SiteID: "site_acme"}, p)
		if err != nil || got != want {
			t.Errorf("%s: Lapsed = %q, %v, want %q", when, got, err, want)
		}
	}
	want("nothing proposed", off, "")
	g := d.propose(nil)
	d.approve(g, 0)
	want("half approved", off, "")
	d.approve(g, 1)
	want("holds", off, "")
	_, err := d.store.AddCommand(t.Context(), store.Command{ID: "cmd_1", SpecHash: []byte("1"), AgentID: "ag_1", Kind: "bmc.power", Lane: "power", Incarnation: "i",
		Issued: d.now, NotAfter: d.now.Add(time.Minute), Signed: &agentv1.SignedCommand{Payload: []byte("p"), Signature: []byte("s")},
		GrantID: g.ID, GrantTargets: []string{"bmc:10.0.0.1:623"}})
	d.must(err)
	spent := "grant " + g.ID + " covered it and is used up for bmc:10.0.0.1:623 (1 of 1)"
	want("spent", off, spent)
	want("another action", power("ipmi", "10.0.0.1", "cycle"), "")
	want("another machine", power("ipmi", "10.0.0.2", "off"), "")
	want("another kind", &agentv1.CommandPayload{Kind: "site.update", Args: off.Args}, "")
	unapproved := d.propose(func(p *Proposal) { p.Valid = 2 * defaultLife })
	want("a later one that nobody approved", off, spent)
	d.now = d.now.Add(defaultLife)
	ended := " ended at " + g.NotAfter.UTC().Format(time.RFC3339)
	want("spent and over", off, spent+" and"+ended)
	d.approve(unapproved, 0, 1)
	d.now = d.now.Add(defaultLife)
	want("the latest counts", off, "grant "+unapproved.ID+" covered it and ended at "+unapproved.NotAfter.UTC().Format(time.RFC3339))
	other, err := d.Lapsed(t.Context(), store.Agent{ID: "ag_2", SiteID: "site_zeta"}, off)
	if err != nil || other != "" {
		t.Errorf("Lapsed for another tenant's site = %q, %v, want nothing", other, err)
	}
}
