package site

import (
	"context"
	"crypto/ed25519"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent"
	"github.com/better-compute/site-appliance/appliance/agent/grants"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/gatewaytest"
	gatewaygrants "github.com/better-compute/site-appliance/appliance/gateway/grants"
	"github.com/better-compute/site-appliance/appliance/gateway/keys"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/bmc/redfish"
	"github.com/better-compute/site-appliance/bmc/relay"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/pxe/assign"
	"github.com/better-compute/site-appliance/pxe/boots"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// field is a real gateway, a box's real agent, relay and Redfish driver, and BMCs
// of the rig. Two of three approvers must agree.
type field struct {
	t        *testing.T
	g        *gatewaytest.Gateway
	fleet    *bmctest.Fleet
	machines []store.Machine
	people   []ed25519.PrivateKey
	state    string
	box      *agent.Agent
	stop     func()

	decisions *assign.Store // the box's
}

const fieldRef = "secret://default/bmc"

func newField(t *testing.T, machines int) *field {
	t.Helper()
	f := &field{t: t, g: gatewaytest.Make(t), state: t.TempDir()}
	f.appoint()
	f.begin(machines)
	return f
}

// appoint makes three approvers and the bundle that names them; the gateway stands still.
func (f *field) appoint() {
	f.t.Helper()
	root, err := keys.ReadPrivate(filepath.Join(f.g.Dir, keys.RootFile))
	f.must(err)
	var public []ed25519.PublicKey
	for n := range 3 {
		path := filepath.Join(f.t.TempDir(), fmt.Sprint(n, ".key"))
		_, err := keys.NewApprover(path)
		f.must(err)
		key, err := keys.ReadPrivate(path)
		f.must(err)
		f.people, public = append(f.people, key), append(public, key.Public().(ed25519.PublicKey))
	}
	_, err = keys.NextBundle(f.g.Dir, []ed25519.PrivateKey{root}, func(b *agentv1.TrustBundle) error { return keys.AddApprovers(b, public, 2) }, time.Now())
	f.must(err)
}

// begin starts everything.
func (f *field) begin(machines int) {
	t := f.t
	t.Helper()
	f.g.Start()
	var err error

	f.fleet, err = bmctest.StartFleet(t.Context(), machines, "root", "calvin", nil)
	f.must(err)
	t.Cleanup(func() { f.fleet.Close() })
	f.must(f.g.Store.AddSite(t.Context(), store.Site{ID: "site_1", TenantID: "default", Name: "lab", Created: time.Now()}))
	f.must(f.g.Store.AddPool(t.Context(), store.Pool{ID: "pool_1", TenantID: "default", Name: "metal", SiteID: "site_1", Created: time.Now()}))
	for n, bmc := range f.fleet.BMCs {
		m := store.Machine{
			ID: fmt.Sprint("node_", n), TenantID: "default", Name: fmt.Sprint("m", n), PoolID: "pool_1", SiteID: "site_1", State: "enrolled", Created: time.Now(),
			BMC:  store.BMC{Driver: "redfish", Address: bmc.Addr(), CredentialsRef: fieldRef, TLSSPKISHA256: bmc.SPKI()},
			MACs: []string{fmt.Sprintf("52:54:00:00:00:%02x", n)},
		}
		f.must(f.g.Store.AddMachine(t.Context(), m))
		f.machines = append(f.machines, m)
	}
	_, err = f.g.Secrets.Put(t.Context(), "default", "bmc", secret.New([]byte(`{"username":"root","password":"calvin"}`)))
	f.must(err)
	text, err := f.g.Enrol.NewToken(t.Context(), agentv1.Role_ROLE_SITE, "site_1", "", time.Hour)
	f.must(err)
	join, err := trust.ParseJoin(text)
	f.must(err)
	f.start(&join)
	t.Cleanup(func() { f.stop() })
}

func (f *field) must(err error) {
	f.t.Helper()
	if err != nil {
		f.t.Fatal(err)
	}
}

// start runs the box's agent on its state, as bcd site does.
func (f *field) start(join *trust.Join) {
	f.t.Helper()
	book, _, err := addressbook.OpenOrSetAside(filepath.Join(f.state, "addressbook.json"))
	f.must(err)
	boot, err := assign.Open(filepath.Join(f.state, "assignments"))
	f.must(err)
	counts, err := boots.Open(filepath.Join(f.state, "boots"), windowOf(boot))
	f.must(err)
	f.decisions = boot
	own, logOut, err := redfish.New(redfish.Options{Log: slog.New(slog.DiscardHandler)})
	f.must(err)
	r := relay.New(relay.Options{Book: book, BuiltIn: []*driver.Definition{own}})
	f.box, err = agent.New(agent.Config{
		Role: agentv1.Role_ROLE_SITE, StateDir: filepath.Join(f.state, "agent"), Join: join,
		Kinds: append(BMCKinds(r), assignKind(boot, func(name, class, key string, body any) { f.must(f.box.Emit(name, class, key, body)) })), Version: "test", Build: time.Now().Add(-time.Hour), Log: slog.New(slog.DiscardHandler),
	})
	f.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	s := &site{Config: Config{Log: slog.New(slog.DiscardHandler)}, agent: f.box, assign: boot, boots: counts}
	go s.tellDecisions(ctx)
	go func() {
		defer close(ended)
		f.box.Run(ctx)
	}()
	f.stop = func() {
		cancel()
		<-ended
		logOut(context.Background())
	}
	f.online()
}

func (f *field) online() {
	f.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); f.box.AgentID() == "" || !f.g.Sessions.Online(f.box.AgentID()); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			f.t.Fatal("the box does not come home")
		}
	}
}

// send runs a command at the box and answers its code, empty for done.
func (f *field) send(kind, machine string, args proto.Message) (code errs.Code, message string) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), time.Minute)
	defer cancel()
	id, err := f.g.Commands.Submit(ctx, commands.Spec{AgentID: f.box.AgentID(), TargetNodeID: machine, Kind: kind, Args: args, SecretRefs: []string{fieldRef}})
	f.must(err)
	out, err := f.g.Commands.Wait(ctx, id)
	f.must(err)
	if out.Err == nil {
		return "", ""
	}
	return out.Err.Code, out.Err.Message
}

func (f *field) power(n int, action string) (errs.Code, string) {
	f.t.Helper()
	b := f.machines[n].BMC
	return f.send("bmc.power", f.machines[n].ID, &bmcv1.BmcOperationRequest{
		Driver: b.Driver, Address: b.Address, CredentialsRef: b.CredentialsRef, TlsSpkiSha256: b.TLSSPKISHA256, Operation: "power.setPower", ArgsJson: `["` + action + `"]`,
	})
}

func (f *field) want(what string, code, want errs.Code, message string) {
	f.t.Helper()
	if code != want {
		f.t.Errorf("%s: %q (%s), want %q", what, code, message, want)
	}
}

// off switches a machine off, and looks at its BMC for what became of it.
func (f *field) off(n int, want errs.Code) string {
	f.t.Helper()
	before := len(f.effects(n))
	code, message := f.power(n, "off")
	f.want(fmt.Sprint("off m", n), code, want, message)
	if grew := len(f.effects(n)) > before; grew != (want == "") {
		f.t.Errorf("off m%d: the BMC did something: %v, with %q", n, grew, code)
	}
	return message
}

func (f *field) effects(n int) []string { return f.fleet.BMCs[n].Log() }

// on is what nobody needs a grant for.
func (f *field) on(n int) {
	f.t.Helper()
	code, message := f.power(n, "on")
	f.want(fmt.Sprint("on m", n), code, "", message)
}

var powerOff = &agentv1.GrantOperation{Kind: "bmc.power", Operation: "power.setPower", Action: "off"}

func (f *field) propose(uses uint32, operation *agentv1.GrantOperation, machines ...store.Machine) store.Grant {
	f.t.Helper()
	g, err := f.g.Grants.Propose(f.t.Context(), gatewaygrants.Proposal{
		TenantID: "default", Operations: []*agentv1.GrantOperation{operation}, Machines: machines, Uses: uses, Reason: "rack 4 moves",
	})
	f.must(err)
	return g
}

func (f *field) approve(g store.Grant, person int) {
	f.t.Helper()
	_, err := f.g.Grants.Approve(f.t.Context(), "default", g.ID, grants.Sign(f.people[person], g.Payload))
	f.must(err)
}

// TestGrantsEndToEnd: four machines may be switched off, the fifth only once two
// people agree, and then as often as they said.
func TestGrantsEndToEnd(t *testing.T) {
	f := newField(t, 8)
	for n := range f.machines {
		f.on(n)
	}
	for n := range 4 {
		f.off(n, "")
	}
	message := f.off(4, errs.QuorumRequired)
	for _, want := range []string{"4 distinct targets", "10 minutes", "better-compute grant propose --allow bmc.power:power.setPower:off", "2 of the approvers"} {
		if !strings.Contains(message, want) {
			t.Errorf("quorum-required says %q, want %q in it", message, want)
		}
	}
	f.on(0)
	f.off(0, "") // one of the four again

	g := f.propose(1, powerOff, f.machines[4:7]...)
	f.off(4, errs.QuorumRequired)
	f.approve(g, 0)
	f.approve(g, 0) // the same person again
	f.off(4, errs.QuorumRequired)
	f.approve(g, 2)
	f.off(4, "")
	f.off(5, "")
	f.on(4)
	f.off(4, errs.QuorumRequired) // used
	f.off(7, errs.QuorumRequired) // not named
	code, text := f.power(6, "cycle")
	f.want("cycle m6", code, errs.QuorumRequired, text) // another action

	// A restart of both forgets neither what was counted nor what was used.
	f.g.Stop()
	f.stop()
	f.g.Start()
	f.start(nil)
	f.off(7, errs.QuorumRequired)
	f.off(5, errs.QuorumRequired)
	f.off(6, "")

	// A command that is restored carries its citation; signing it anew for another
	// life of the box keeps it.
	again := f.propose(1, powerOff, f.machines[7])
	f.approve(again, 0)
	f.approve(again, 1)
	f.stop()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	b := f.machines[7].BMC
	id, err := f.g.Commands.Submit(ctx, commands.Spec{AgentID: f.box.AgentID(), TargetNodeID: "node_7", Kind: "bmc.power", SecretRefs: []string{fieldRef}, Args: &bmcv1.BmcOperationRequest{
		Driver: b.Driver, Address: b.Address, CredentialsRef: b.CredentialsRef, TlsSpkiSha256: b.TLSSPKISHA256, Operation: "power.setPower", ArgsJson: `["off"]`,
	}})
	f.must(err)
	f.loseJournal()
	f.start(nil)
	out, err := f.g.Commands.Wait(ctx, id)
	f.must(err)
	// The box lost its memory: it cannot know whether this grant was used.
	if out.Err == nil || out.Err.Code != errs.GrantInvalid || !strings.Contains(out.Err.Message, "may have been used") {
		t.Errorf("off m7 after the journal was lost = %v, want grant-invalid", out.Err)
	}
	f.off(0, errs.QuorumRequired)
}

// TestGrantSurvivesAnotherIncarnation: a command that waited while the box got
// another journal is signed anew, with what people approved.
func TestGrantSurvivesAnotherIncarnation(t *testing.T) {
	f := newField(t, 5)
	for n := range f.machines {
		f.on(n)
	}
	for n := range 4 {
		f.off(n, "")
	}
	f.stop()
	g := f.propose(1, powerOff, f.machines[4])
	f.approve(g, 0)
	f.approve(g, 1)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	b := f.machines[4].BMC
	id, err := f.g.Commands.Submit(ctx, commands.Spec{AgentID: f.box.AgentID(), TargetNodeID: "node_4", Kind: "bmc.power", SecretRefs: []string{fieldRef}, Args: &bmcv1.BmcOperationRequest{
		Driver: b.Driver, Address: b.Address, CredentialsRef: b.CredentialsRef, TlsSpkiSha256: b.TLSSPKISHA256, Operation: "power.setPower", ArgsJson: `["off"]`,
	}})
	f.must(err)
	before, err := f.g.Store.Command(ctx, id)
	f.must(err)
	// As the gateway does when the box says hello with another journal.
	agents, err := f.g.Store.Agents(ctx, store.AgentFilter{SiteID: "site_1", State: store.AgentActive})
	f.must(err)
	agents[0].JournalEpoch = "another"
	f.must(f.g.Commands.Greeted(ctx, agents[0], &agentv1.Hello{}))
	after, err := f.g.Store.Command(ctx, id)
	f.must(err)
	var was, is agentv1.CommandPayload
	f.must(proto.Unmarshal(before.Signed.Payload, &was))
	f.must(proto.Unmarshal(after.Signed.Payload, &is))
	if is.Incarnation != "another" || was.Grant == nil || !proto.Equal(was.Grant, is.Grant) {
		t.Errorf("signed anew for %q with %v, want what %v was", is.Incarnation, is.Grant, was.Grant)
	}
	f.start(nil)
}

// loseJournal is what a replaced disk does to a box whose identity is kept twice.
func (f *field) loseJournal() {
	f.t.Helper()
	f.must(os.Remove(filepath.Join(f.state, "agent", "journal")))
}

// evil is a gateway that somebody took over: it holds the command key and all that
// people ever signed, and cites what it likes.
type evil struct {
	cite func(p *agentv1.CommandPayload) *agentv1.GrantCitation
}

func (e evil) Cite(_ context.Context, _ store.Agent, p *agentv1.CommandPayload) (*agentv1.GrantCitation, error) {
	return e.cite(p), nil
}

// TestStolenGateway: with the command key and every signature that there is, nobody
// can approve, widen, repeat or revive anything.
func TestStolenGateway(t *testing.T) {
	f := newField(t, 7)
	for n := range f.machines {
		f.on(n)
	}
	for n := range 4 {
		f.off(n, "")
	}
	g := f.propose(1, powerOff, f.machines[4], f.machines[5])
	payload := func(edit func(*agentv1.Grant)) []byte {
		terms, err := grants.Parse(g.Payload)
		f.must(err)
		edit(terms)
		out, err := proto.Marshal(terms)
		f.must(err)
		return out
	}
	sign := func(payload []byte, keys ...ed25519.PrivateKey) *agentv1.SignedGrant {
		s := &agentv1.SignedGrant{Payload: payload}
		for _, key := range keys {
			s.Signatures = append(s.Signatures, grants.Sign(key, payload))
		}
		return s
	}
	command, err := keys.ReadPrivate(filepath.Join(f.g.Dir, keys.CommandFile))
	f.must(err)
	good := sign(g.Payload, f.people[0], f.people[1])
	prove := func(n int) []*agentv1.TargetProof {
		target := grants.BMC(f.machines[n].BMC.Address)
		return []*agentv1.TargetProof{grants.Prove(g.Targets, slices.Index(g.Targets, target))}
	}
	flipped := proto.CloneOf(good)
	flipped.Signatures[1].Signature[0] ^= 1
	wider := append(slices.Clone(g.Targets), grants.BMC(f.machines[6].BMC.Address))
	slices.Sort(wider)
	widened := func(p *agentv1.Grant) {
		p.TargetsRoot, p.TargetCount = grants.Root(wider), uint32(len(wider))
	}
	moved := proto.CloneOf(prove(4)[0])
	moved.Target = grants.BMC(f.machines[6].BMC.Address)
	for name, tt := range map[string]struct {
		target int
		action string
		c      *agentv1.GrantCitation
		want   string
	}{
		"nobody signed":             {4, "off", &agentv1.GrantCitation{Grant: sign(g.Payload), Targets: prove(4)}, "signed by 0"},
		"one signed":                {4, "off", &agentv1.GrantCitation{Grant: sign(g.Payload, f.people[0]), Targets: prove(4)}, "signed by 1"},
		"one signed twice":          {4, "off", &agentv1.GrantCitation{Grant: sign(g.Payload, f.people[0], f.people[0]), Targets: prove(4)}, "signed by 1"},
		"the gateway signed":        {4, "off", &agentv1.GrantCitation{Grant: sign(g.Payload, f.people[0], command), Targets: prove(4)}, "no approver's"},
		"a flipped byte":            {4, "off", &agentv1.GrantCitation{Grant: flipped, Targets: prove(4)}, "does not fit"},
		"another target":            {6, "off", &agentv1.GrantCitation{Grant: good, Targets: prove(4)}, "is not cited for the target"},
		"another target, moved":     {6, "off", &agentv1.GrantCitation{Grant: good, Targets: []*agentv1.TargetProof{moved}}, "does not hold the target"},
		"another action":            {4, "cycle", &agentv1.GrantCitation{Grant: good, Targets: prove(4)}, "does not allow"},
		"widened, old signatures":   {6, "off", &agentv1.GrantCitation{Grant: &agentv1.SignedGrant{Payload: payload(widened), Signatures: good.Signatures}, Targets: []*agentv1.TargetProof{grants.Prove(wider, slices.Index(wider, moved.Target))}}, "signed by 0"},
		"more uses, old signatures": {4, "off", &agentv1.GrantCitation{Grant: &agentv1.SignedGrant{Payload: payload(func(p *agentv1.Grant) { p.UsesPerTarget = 9 }), Signatures: good.Signatures}, Targets: prove(4)}, "signed by 0"},
		"another site's":            {4, "off", &agentv1.GrantCitation{Grant: sign(payload(func(p *agentv1.Grant) { p.SiteId = "site_2" }), f.people[0], f.people[1]), Targets: prove(4)}, "for site site_2"},
		"expired":                   {4, "off", &agentv1.GrantCitation{Grant: sign(payload(func(p *agentv1.Grant) { p.NotBeforeMs -= 2 * 3600_000; p.NotAfterMs -= 2 * 3600_000 }), f.people[0], f.people[1]), Targets: prove(4)}, "ended at"},
	} {
		f.g.Commands.CiteFrom(evil{func(*agentv1.CommandPayload) *agentv1.GrantCitation { return tt.c }})
		before := len(f.effects(tt.target))
		code, message := f.power(tt.target, tt.action)
		if code != errs.GrantInvalid || !strings.Contains(message, tt.want) || len(f.effects(tt.target)) != before {
			t.Errorf("%s: %q: %s, want grant-invalid with %q, and nothing done", name, code, message, tt.want)
		}
	}
	// What they signed goes once for each target, however it is cited.
	f.g.Commands.CiteFrom(evil{func(p *agentv1.CommandPayload) *agentv1.GrantCitation {
		return &agentv1.GrantCitation{Grant: good, Targets: append(prove(4), prove(5)...)}
	}})
	f.off(4, "")
	f.on(4)
	if message := f.off(4, errs.GrantInvalid); !strings.Contains(message, "used up") {
		t.Errorf("a second use: %s", message)
	}
	// Saying that it is tomorrow opens no window, and revives nothing.
	f.g.Stop()
	f.g.Clock.Add(25 * time.Hour)
	f.g.Start()
	f.online()
	f.g.Commands.CiteFrom(evil{func(*agentv1.CommandPayload) *agentv1.GrantCitation { return nil }})
	for deadline := time.Now().Add(30 * time.Second); f.box.Clock().Now().Before(time.Now().Add(24 * time.Hour)); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the box does not believe its gateway's time")
		}
	}
	f.off(6, errs.QuorumRequired)
	f.g.Commands.CiteFrom(evil{func(*agentv1.CommandPayload) *agentv1.GrantCitation {
		return &agentv1.GrantCitation{Grant: good, Targets: prove(5)}
	}})
	if message := f.off(5, errs.GrantInvalid); !strings.Contains(message, "ended at") {
		t.Errorf("a grant of yesterday: %s", message)
	}
	// Nor does setting the clock back.
	f.g.Stop()
	f.g.Clock.Add(-25 * time.Hour)
	f.g.Start()
	f.online()
	f.g.Commands.CiteFrom(evil{func(*agentv1.CommandPayload) *agentv1.GrantCitation {
		return &agentv1.GrantCitation{Grant: good, Targets: prove(5)}
	}})
	for deadline := time.Now().Add(30 * time.Second); f.box.Clock().Now().After(time.Now().Add(24 * time.Hour)); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the box does not believe its gateway's time")
		}
	}
	if message := f.off(5, errs.GrantInvalid); !strings.Contains(message, "ended at") {
		t.Errorf("a grant of yesterday, by a clock set back: %s", message)
	}
}

// TestApproversArriveByTheChain: a box that knew no approvers asks for grants from
// the bundle on that its gateway hands it.
func TestApproversArriveByTheChain(t *testing.T) {
	f := &field{t: t, g: gatewaytest.Make(t), state: t.TempDir()}
	f.begin(6)
	for n := range f.machines {
		f.on(n)
		f.off(n, "")
		f.on(n)
	}
	f.g.Stop()
	f.appoint()
	f.g.Start()
	f.online()
	for deadline := time.Now().Add(30 * time.Second); !f.box.Bundle().QuorumInForce(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the box does not get the next trust bundle")
		}
	}
	for n := range 4 {
		f.off(n, "")
	}
	f.off(4, errs.QuorumRequired)
	g := f.propose(1, powerOff, f.machines[4])
	f.approve(g, 0)
	f.approve(g, 1)
	f.off(4, "")
}

// TestProtectedEndToEnd: protecting a BMC needs a grant, and so does everything
// destructive on it from then on, and the way back.
func TestProtectedEndToEnd(t *testing.T) {
	f := newField(t, 2)
	f.on(0)
	f.off(0, "")
	f.on(1) // known before: it is another BMC, though the rig has it on the same host
	b := f.machines[0].BMC
	bind := func(protected bool) (errs.Code, string) {
		return f.send("bmc.bind", "node_0", &bmcv1.BmcBindRequest{Driver: b.Driver, Address: b.Address, CredentialsRef: b.CredentialsRef, TlsSpkiSha256: b.TLSSPKISHA256, Protected: protected})
	}
	code, message := bind(true)
	f.want("protect without a grant", code, errs.QuorumRequired, message)
	granted := func(operation *agentv1.GrantOperation) {
		g := f.propose(1, operation, f.machines[0])
		f.approve(g, 0)
		f.approve(g, 1)
	}
	for range 2 { // one is left when it is to be let go, and is not for that
		granted(&agentv1.GrantOperation{Kind: "bmc.bind", Operation: "bind", Action: "protect"})
	}
	code, message = bind(true)
	f.want("protect with a grant", code, "", message)
	f.on(0)
	f.off(0, errs.QuorumRequired)
	granted(powerOff)
	f.off(0, "")
	code, message = bind(false)
	f.want("let go without a grant", code, errs.QuorumRequired, message)
	f.off(1, "") // the other one is not protected
}

// TestAssignEndToEnd: a snapshot counts for every machine that it lets boot
// anything, and a grant covers the machine that it is sent for.
func TestAssignEndToEnd(t *testing.T) {
	f := newField(t, 6)
	version := uint64(0)
	snapshot := func(target string, booting ...int) (errs.Code, string) {
		version++
		req := &pxev1.AssignRequest{Version: version}
		for n, m := range f.machines {
			entry := &pxev1.Machine{MachineId: m.ID, Name: m.Name, Macs: m.MACs, Action: pxev1.Action_ACTION_LOCAL_DISK}
			if slices.Contains(booting, n) {
				entry.Action, entry.Purpose, entry.WindowId, entry.WindowUntilMs = pxev1.Action_ACTION_RAMDISK, "inspect", "win_1", time.Now().Add(time.Hour).UnixMilli()/3600_000*3600_000+3600_000
			}
			req.Machines = append(req.Machines, entry)
		}
		return f.send("pxe.assign", target, req)
	}
	code, message := snapshot("node_0")
	f.want("all at their disks", code, "", message)
	code, message = snapshot("node_0", 0, 1, 2, 3, 4)
	f.want("five at once", code, errs.QuorumRequired, message)
	code, message = snapshot("node_0", 0, 1, 2, 3)
	f.want("four at once", code, "", message)
	code, message = snapshot("node_4", 0, 1, 2, 3, 4)
	f.want("the fifth", code, errs.QuorumRequired, message)
	g := f.propose(1, &agentv1.GrantOperation{Kind: "pxe.assign", Operation: "pxe.assign"}, f.machines[4])
	f.approve(g, 1)
	f.approve(g, 2)
	code, message = snapshot("node_4", 0, 1, 2, 3, 4)
	f.want("the fifth with a grant", code, "", message)
	code, message = snapshot("node_4", 0, 1, 2, 3)
	f.want("back to the disk", code, "", message)
	code, message = snapshot("node_4", 0, 1, 2, 3, 4)
	f.want("once more", code, errs.QuorumRequired, message)
}

// TestGatewayDescribesAsTheBoxSees: what the gateway looks for in grants is what
// the box will ask of them.
func TestGatewayDescribesAsTheBoxSees(t *testing.T) {
	book, err := addressbook.Open("")
	if err != nil {
		t.Fatal(err)
	}
	kinds := BMCKinds(relay.New(relay.Options{Book: book}))
	const digest = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
	type request = bmcv1.BmcOperationRequest
	for name, tt := range map[string]struct {
		kind string
		args proto.Message
	}{
		"off":        {"bmc.power", &request{Driver: "ipmi", Address: "10.0.0.5", Operation: "power.setPower", ArgsJson: `["off"]`}},
		"cycle":      {"bmc.power", &request{Driver: "redfish", Address: "https://BMC.Example", Operation: "power.setPower", ArgsJson: ` "cycle"`}},
		"odd action": {"bmc.power", &request{Driver: "redfish", Address: "[::1]:8443", Operation: "power.setPower", ArgsJson: `["melt"]`}},
		"two":        {"bmc.power", &request{Driver: "redfish", Address: "10.0.0.5", Operation: "power.setPower", ArgsJson: `["off","on"]`}},
		"reset BMC":  {"bmc.power", &request{Driver: "acme", Address: "http://10.0.0.5", Operation: "management.resetBmc"}},
		"by hand":    {"bmc.power", &request{Driver: "manual", Address: "Rack-3", Operation: "power.setPower", ArgsJson: `["off"]`}},
		"firmware":   {"bmc.firmware", &request{Driver: "redfish", Address: "10.0.0.5", Operation: "firmware.update", ArgsJson: `{"component":"BIOS","url":"https://x/a","sha256":"` + digest + `"}`}},
		"bios":       {"bmc.bios", &request{Driver: "redfish", Address: "10.0.0.5", Operation: "bios.applySettings", ArgsJson: `[{"A":"B"}]`}},
		"raid":       {"bmc.raid", &request{Driver: "redfish", Address: "10.0.0.5", Operation: "raid.applyLayout", ArgsJson: `[{"volumes":[]}]`}},
		"rotate":     {"bmc.rotate", &request{Driver: "redfish", Address: "10.0.0.5", Operation: "credentials.rotate", ArgsJson: `[{"newPassword":"secret://default/next"}]`}},
		"let go":     {"bmc.bind", &bmcv1.BmcBindRequest{Driver: "ipmi", Address: "10.0.0.5", CredentialsRef: fieldRef}},
		"bind":       {"bmc.bind", &bmcv1.BmcBindRequest{Driver: "ipmi", Address: "10.0.0.5", CredentialsRef: fieldRef, Protected: true}},
	} {
		if r, ok := tt.args.(*request); ok && r.Driver != "manual" {
			r.CredentialsRef = fieldRef
		}
		args, err := proto.Marshal(tt.args)
		if err != nil {
			t.Fatal(err)
		}
		op, err := kindNamed(t, kinds, tt.kind).Decode(args)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		got, ok := gatewaygrants.Describe(&agentv1.CommandPayload{Kind: tt.kind, Args: args}, "")
		if !ok || got.Kind != tt.kind || got.Operation != op.Name || got.Action != op.Action || !slices.Equal(got.Targets, op.Targets) || !slices.Equal(got.Artifacts, op.Artifacts) || !op.Counts {
			t.Errorf("%s: the gateway says %+v, the box %q, %q, %v, %v, counts %v", name, got, op.Name, op.Action, op.Targets, op.Artifacts, op.Counts)
		}
	}
}
