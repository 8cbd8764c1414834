package instances_test

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/api/computev1/computev1connect"
	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway"
	"github.com/better-compute/site-appliance/appliance/gateway/api"
	"github.com/better-compute/site-appliance/appliance/gateway/gatewaytest"
	"github.com/better-compute/site-appliance/appliance/gateway/instances"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

// rig is a real gateway with one machine, whose agent the test plays.
type rig struct {
	*gatewaytest.Gateway
	t    *testing.T
	node *gatewaytest.Agent
}

const machineID = "mach_1"

func start(t *testing.T) *rig {
	t.Helper()
	r := &rig{Gateway: gatewaytest.Make(t), t: t}
	r.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	r.Timing.Heartbeat = 50 * time.Millisecond // by which a cut line is noticed
	r.Modules = append(r.Modules, instances.Module())
	var wg sync.WaitGroup
	var stop context.CancelFunc = func() {}
	t.Cleanup(func() { stop(); wg.Wait() })
	r.Prepare = func(g *gateway.Gateway) {
		stop()
		wg.Wait()
		s := instances.New(instances.Config{
			Store: g.Store, Commands: g.Commands, Online: g.Sessions.Online, Log: r.Log,
			Backoff: backoff.Policy{Min: time.Millisecond, Max: time.Millisecond},
		})
		g.Sessions.OnState(s.Came)
		g.Sessions.OnEvent(s.Heard)
		api.New(api.Config{Store: g.Store, Commands: g.Commands, Instances: s, Online: g.Sessions.Online, Log: r.Log}).Register(g.Handle)
		var ctx context.Context
		ctx, stop = context.WithCancel(context.Background())
		wg.Go(func() { s.Run(ctx) })
	}
	r.Start()
	ctx := t.Context()
	for _, err := range []error{
		r.Store.AddSite(ctx, store.Site{ID: "site_1", TenantID: "acme", Name: "fsn1", Created: r.Store.Now()}),
		r.Store.AddPool(ctx, store.Pool{ID: "pool_1", TenantID: "acme", Name: "metal", SiteID: "site_1", Created: r.Store.Now()}),
		r.machine(machineID, "web-1", "52:54:00:00:00:01"),
		r.machine("mach_2", "web-2", "52:54:00:00:00:02"),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	r.token("all", "acme", api.AllPermissions)
	r.node = r.enrol(machineID)
	return r
}

func (r *rig) machine(id, name, mac string) error {
	return r.Store.AddMachine(r.t.Context(), store.Machine{ID: id, TenantID: "acme", Name: name, PoolID: "pool_1", SiteID: "site_1", MACs: []string{mac}, State: "deployed", Created: r.Store.Now()})
}

func (r *rig) enrol(machineID string) *gatewaytest.Agent {
	r.t.Helper()
	join, err := r.Enrol.NewToken(r.t.Context(), agentv1.Role_ROLE_NODE, "site_1", machineID, time.Hour)
	if err != nil {
		r.t.Fatal(err)
	}
	return r.Join(join, agentv1.Role_ROLE_NODE)
}

func (r *rig) token(text, tenant string, permissions ...string) {
	r.t.Helper()
	err := r.Store.PutAPIToken(r.t.Context(), store.APIToken{Hash: sha256.Sum256([]byte(text)), Name: text, TenantID: tenant, Permissions: permissions, Created: r.Store.Now()})
	if err != nil {
		r.t.Fatal(err)
	}
}

type bearer struct {
	next  http.RoundTripper
	token string
}

func (b bearer) RoundTrip(q *http.Request) (*http.Response, error) {
	q = q.Clone(q.Context())
	q.Header.Set("Authorization", "Bearer "+b.token)
	return b.next.RoundTrip(q)
}

func (r *rig) as(token string) computev1connect.InstanceServiceClient {
	c := r.Client(nil)
	return computev1connect.NewInstanceServiceClient(&http.Client{Transport: bearer{c.Transport, token}}, r.URL)
}

func (r *rig) apply(name, spec string) *computev1.Instance {
	r.t.Helper()
	res, err := r.as("all").Apply(r.t.Context(), connect.NewRequest(&computev1.ApplyInstanceRequest{TenantId: "acme", Name: name, Machine: "web-1", Runtime: "process", SpecJson: spec}))
	if err != nil {
		r.t.Fatal(err)
	}
	return res.Msg.Instance
}

func (r *rig) remove(instance, machine string) {
	r.t.Helper()
	if _, err := r.as("all").Remove(r.t.Context(), connect.NewRequest(&computev1.RemoveInstanceRequest{TenantId: "acme", Instance: instance, Machine: machine})); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) list() []*computev1.Instance {
	r.t.Helper()
	res, err := r.as("all").List(r.t.Context(), connect.NewRequest(&computev1.ListInstancesRequest{TenantId: "acme", Machine: "web-1"}))
	if err != nil {
		r.t.Fatal(err)
	}
	return res.Msg.Items
}

// until waits for the list to be as ok wants it.
func (r *rig) until(what string, ok func([]*computev1.Instance) bool) {
	r.t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(r.list()); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			r.t.Fatalf("never: %s; the list is %v", what, r.list())
		}
	}
}

func (r *rig) state(state string) {
	r.t.Helper()
	r.until(state, func(all []*computev1.Instance) bool { return len(all) == 1 && all[0].State == state })
}

func (r *rig) gone() {
	r.t.Helper()
	r.until("gone", func(all []*computev1.Instance) bool { return len(all) == 0 })
}

func (r *rig) connect(edit ...func(*agentv1.Hello)) *gatewaytest.Session {
	return r.node.Connect(append([]func(*agentv1.Hello){func(h *agentv1.Hello) { h.Capabilities = []string{"instance.process"} }}, edit...)...)
}

// command is the next one of a kind; lists are answered on the way.
func (r *rig) command(s *gatewaytest.Session, kind string, listed ...*agentv1.InstanceStatus) *agentv1.CommandPayload {
	r.t.Helper()
	for {
		f := s.Next()
		if f.GetCommand() == nil {
			continue // acknowledgements
		}
		p, _, err := envelope.Open(f.GetCommand(), r.node.Bundle)
		if err != nil {
			r.t.Fatal(err)
		}
		s.Ack(p.CommandId)
		if p.Kind == "instance.list" {
			answer(r.t, s, p, listed...)
		}
		if p.Kind == kind {
			return p
		}
		if p.Kind != "instance.list" {
			r.t.Fatalf("command %s came, want %s", p.Kind, kind)
		}
	}
}

func answer(t *testing.T, s *gatewaytest.Session, p *agentv1.CommandPayload, all ...*agentv1.InstanceStatus) {
	t.Helper()
	data, err := proto.Marshal(&agentv1.InstanceResult{Instances: all})
	if err != nil {
		t.Fatal(err)
	}
	s.Result(p.CommandId, data)
}

func spec(t *testing.T, p *agentv1.CommandPayload) *agentv1.InstanceSpec {
	t.Helper()
	req := &agentv1.InstanceApplyRequest{}
	if err := proto.Unmarshal(p.Args, req); err != nil {
		t.Fatal(err)
	}
	return req.GetInstance()
}

func status(id, state string, generation uint64) *agentv1.InstanceStatus {
	return &agentv1.InstanceStatus{InstanceId: id, Runtime: "process", State: state, Generation: generation}
}

var seq uint64

func tell(t *testing.T, s *gatewaytest.Session, id, state string, generation uint64, orphan bool) {
	t.Helper()
	body, err := json.Marshal(map[string]any{"instance_id": id, "runtime": "process", "state": state, "generation": generation, "orphan": orphan, "message": "as told"})
	if err != nil {
		t.Fatal(err)
	}
	seq++
	s.Event(&agentv1.Event{Seq: seq, AtMs: 1, Name: "instance.state", Class: "state", Key: id, BodyJson: body})
}

// What is wanted waits for the agent, is sent, and sent again until it is taken.
func TestSendsUntilItIsTaken(t *testing.T) {
	r := start(t)
	i := r.apply("web", `{"argv":["/bin/x"]}`)
	if i.State != "pending" || i.Generation != 1 || i.MachineId != machineID {
		t.Errorf("Apply() = %v, want pending at generation 1", i)
	}
	if again := r.apply("web", `{"argv":["/bin/x"]}`); again.Id != i.Id || again.Generation != 1 {
		t.Errorf("the same again = %v, want no change", again)
	}
	s := r.connect()
	p := r.command(s, "instance.apply")
	if got := spec(t, p); got.GetInstanceId() != i.Id || got.GetName() != "web" || got.GetGeneration() != 1 || got.GetSpecJson() != `{"argv":["/bin/x"]}` || p.Lane != "provision" {
		t.Errorf("sent %v in %s", got, p.Lane)
	}
	// A refusal is shown, and tried again as another command.
	s.Fail(p.CommandId, &agentv1.Error{Code: string(errs.UnsupportedDriver), Message: "no runtime here"})
	second := r.command(s, "instance.apply")
	if second.CommandId == p.CommandId {
		t.Error("the next attempt is the same command")
	}
	r.until("the refusal is shown", func(all []*computev1.Instance) bool {
		return len(all) == 1 && all[0].State == "failed" && strings.Contains(all[0].Message, "no runtime here")
	})
	// The gateway restarts with the command under way: it is the same command.
	s.Cut()
	r.Stop()
	r.Start()
	s = r.connect(func(h *agentv1.Hello) { h.Open = []*agentv1.OpenCommand{{CommandId: second.CommandId}} })
	r.command(s, "instance.list")
	answer(t, s, second, status(i.Id, "running", 1))
	r.state("running")

	// A change rises, and only the newest counts.
	if i = r.apply("web", `{"argv":["/bin/y"]}`); i.Generation != 2 || i.State != "pending" {
		t.Errorf("a change = %v, want generation 2 pending", i)
	}
	p = r.command(s, "instance.apply")
	tell(t, s, i.Id, "failed", 1, false)
	answer(t, s, p, status(i.Id, "running", 2))
	r.state("running")

	// While the agent is away nobody knows.
	s.Cut()
	r.until("unknown", func(all []*computev1.Instance) bool {
		return all[0].State == "unknown" && strings.Contains(all[0].Message, "running")
	})
}

func TestStatesComeByEvents(t *testing.T) {
	r := start(t)
	i := r.apply("web", `{}`)
	s := r.connect()
	answer(t, s, r.command(s, "instance.apply"), status(i.Id, "running", 1))
	r.state("running")
	tell(t, s, i.Id, "failed", 1, false)
	r.until("failed as told", func(all []*computev1.Instance) bool { return all[0].State == "failed" && all[0].Message == "as told" })

	// Another machine's agent has no say, nor have states that nobody knows.
	other := r.enrol("mach_2")
	o := other.Connect()
	seq++
	o.Event(&agentv1.Event{Seq: seq, Name: "instance.state", Class: "state", Key: i.Id, BodyJson: fmt.Appendf(nil, `{"instance_id":%q,"state":"running","generation":1}`, i.Id)})
	tell(t, s, i.Id, "happy", 1, false)
	tell(t, s, i.Id, "stopped", 1, false)
	r.state("stopped")

	// An orphan that is wanted was forgotten by its node: it is sent again.
	tell(t, s, i.Id, "running", 1, true)
	answer(t, s, r.command(s, "instance.apply"), status(i.Id, "running", 1))
	r.state("running")
	// One that the node knows as newer, from before this gateway was restored, is
	// sent as newer still.
	tell(t, s, i.Id, "running", 7, true)
	p := r.command(s, "instance.apply")
	if got := spec(t, p).GetGeneration(); got != 8 {
		t.Errorf("generation = %d, want 8", got)
	}
	answer(t, s, p, status(i.Id, "running", 8))
	r.state("running")
}

func TestRemoves(t *testing.T) {
	r := start(t)
	i := r.apply("web", `{}`)
	s := r.connect()
	answer(t, s, r.command(s, "instance.apply"), status(i.Id, "running", 1))
	r.state("running")
	r.remove("web", "web-1")
	r.state("removing")
	p := r.command(s, "instance.remove")
	req := &agentv1.InstanceRemoveRequest{}
	if err := proto.Unmarshal(p.Args, req); err != nil || req.GetInstanceId() != i.Id || req.GetGeneration() != 2 {
		t.Errorf("sent %v, %v, want generation 2", req, err)
	}
	// Not done yet: it stays until the node says so.
	answer(t, s, p, status(i.Id, "removing", 2))
	tell(t, s, i.Id, "running", 2, false)
	tell(t, s, i.Id, "removed", 1, false)
	r.until("it is still there", func(all []*computev1.Instance) bool { return len(all) == 1 && all[0].State == "removing" })
	tell(t, s, i.Id, "removed", 2, false)
	r.gone()

	// One that the node removes at once, by its id.
	j := r.apply("web", `{}`)
	if j.Id == i.Id {
		t.Error("a removed instance's id came back")
	}
	answer(t, s, r.command(s, "instance.apply"), status(j.Id, "running", 1))
	r.remove(j.Id, "")
	answer(t, s, r.command(s, "instance.remove"))
	r.gone()
}

// What went lost while the gateway or the line was down is made good when the
// agent comes: it is asked for all it has.
func TestAnAgentThatComesIsAsked(t *testing.T) {
	r := start(t)
	i := r.apply("web", `{}`)
	s := r.connect()
	answer(t, s, r.command(s, "instance.apply"), status(i.Id, "running", 1))
	r.state("running")
	s.Cut()
	r.state("unknown")
	s = r.connect()
	r.command(s, "instance.list", status(i.Id, "failed", 1))
	r.state("failed")
	// It took it, and does not know it now.
	s.Cut()
	r.state("unknown")
	s = r.connect()
	answer(t, s, r.command(s, "instance.apply"), status(i.Id, "running", 1))
	r.state("running")
	// Another incarnation has taken nothing.
	s.Cut()
	r.state("unknown")
	r.node.JournalEpoch = "journal-2"
	s = r.connect()
	answer(t, s, r.command(s, "instance.apply", status(i.Id, "running", 1)), status(i.Id, "running", 1))
	r.state("running")
	// A removal that was done, and whose end was never heard.
	r.remove("web", "web-1")
	answer(t, s, r.command(s, "instance.remove"), status(i.Id, "removing", 2))
	s.Cut()
	s = r.connect()
	answer(t, s, r.command(s, "instance.remove"))
	r.gone()
}

func TestCalls(t *testing.T) {
	r := start(t)
	r.token("reader", "acme", "compute:instances:read")
	r.token("writer", "acme", "compute:instances:write")
	r.token("stranger", "other", api.AllPermissions)
	good := func() *computev1.ApplyInstanceRequest {
		return &computev1.ApplyInstanceRequest{TenantId: "acme", Name: "web", Machine: "web-2", Runtime: "process", SpecJson: "{}"}
	}
	for name, tt := range map[string]struct {
		token string
		edit  func(*computev1.ApplyInstanceRequest)
		want  connect.Code
	}{
		"good":         {"writer", nil, 0},
		"reader":       {"reader", nil, connect.CodePermissionDenied},
		"other tenant": {"stranger", nil, connect.CodePermissionDenied},
		"name":         {"writer", func(q *computev1.ApplyInstanceRequest) { q.Name = "Web_1" }, connect.CodeInvalidArgument},
		"machine":      {"writer", func(q *computev1.ApplyInstanceRequest) { q.Machine = "nowhere" }, connect.CodeNotFound},
		"runtime":      {"writer", func(q *computev1.ApplyInstanceRequest) { q.Runtime = "../x" }, connect.CodeInvalidArgument},
		"spec":         {"writer", func(q *computev1.ApplyInstanceRequest) { q.SpecJson = "[]" }, connect.CodeInvalidArgument},
		"spec too long": {"writer", func(q *computev1.ApplyInstanceRequest) {
			q.SpecJson = `{"x":"` + strings.Repeat("y", instances.MaxSpec) + `"}`
		}, connect.CodeInvalidArgument},
		"another's machine": {"stranger", func(q *computev1.ApplyInstanceRequest) { q.TenantId = "other" }, connect.CodeNotFound},
	} {
		q := good()
		if tt.edit != nil {
			tt.edit(q)
		}
		_, err := r.as(tt.token).Apply(t.Context(), connect.NewRequest(q))
		if (err == nil) != (tt.want == 0) || err != nil && connect.CodeOf(err) != tt.want {
			t.Errorf("%s: Apply() = %v, want %v", name, err, tt.want)
		}
	}
	if _, err := r.as("writer").List(t.Context(), connect.NewRequest(&computev1.ListInstancesRequest{TenantId: "acme"})); connect.CodeOf(err) != connect.CodePermissionDenied {
		t.Errorf("List() of a writer = %v, want denied", err)
	}
	res, err := r.as("reader").List(t.Context(), connect.NewRequest(&computev1.ListInstancesRequest{TenantId: "acme"}))
	if err != nil || len(res.Msg.Items) != 1 || res.Msg.Items[0].MachineId != "mach_2" {
		t.Fatalf("List() = %v, %v, want the one of web-2", res, err)
	}
	res, err = r.as("stranger").List(t.Context(), connect.NewRequest(&computev1.ListInstancesRequest{TenantId: "other"}))
	if err != nil || len(res.Msg.Items) != 0 {
		t.Errorf("List() of another tenant = %v, %v, want nothing", res, err)
	}
	// A runtime that the machine's agent does not have is refused up front.
	s := r.connect()
	defer s.Cut()
	q := good()
	q.Machine, q.Runtime = "web-1", "containerd"
	if _, err := r.as("writer").Apply(t.Context(), connect.NewRequest(q)); connect.CodeOf(err) != connect.CodeFailedPrecondition || !strings.Contains(err.Error(), "runtime-unsupported") {
		t.Errorf("a runtime that is not there = %v, want runtime-unsupported", err)
	}
	for name, tt := range map[string]struct {
		token string
		q     *computev1.RemoveInstanceRequest
		want  connect.Code
	}{
		"reader":     {"reader", &computev1.RemoveInstanceRequest{TenantId: "acme", Instance: "web", Machine: "web-2"}, connect.CodePermissionDenied},
		"no machine": {"writer", &computev1.RemoveInstanceRequest{TenantId: "acme", Instance: "web"}, connect.CodeInvalidArgument},
		"nothing":    {"writer", &computev1.RemoveInstanceRequest{TenantId: "acme"}, connect.CodeInvalidArgument},
		"other name": {"writer", &computev1.RemoveInstanceRequest{TenantId: "acme", Instance: "db", Machine: "web-2"}, connect.CodeNotFound},
		"elsewhere":  {"writer", &computev1.RemoveInstanceRequest{TenantId: "acme", Instance: "web", Machine: "web-1"}, connect.CodeNotFound},
		"stranger":   {"stranger", &computev1.RemoveInstanceRequest{TenantId: "other", Instance: "inst_x"}, connect.CodeNotFound},
	} {
		if _, err := r.as(tt.token).Remove(t.Context(), connect.NewRequest(tt.q)); connect.CodeOf(err) != tt.want {
			t.Errorf("%s: Remove() = %v, want %v", name, err, tt.want)
		}
	}
	// No agent ever stood for web-2: nothing can be left there.
	if _, err := r.as("writer").Remove(t.Context(), connect.NewRequest(&computev1.RemoveInstanceRequest{TenantId: "acme", Instance: "web", Machine: "web-2"})); err != nil {
		t.Fatal(err)
	}
	if res, err := r.as("reader").List(t.Context(), connect.NewRequest(&computev1.ListInstancesRequest{TenantId: "acme"})); err != nil || len(res.Msg.Items) != 0 {
		t.Errorf("List() = %v, %v, want nothing", res, err)
	}
}

func TestMachineIsFull(t *testing.T) {
	r := start(t)
	for n := range instances.MaxPerMachine + 1 {
		_, _, err := r.Store.PutInstance(t.Context(), store.Instance{ID: fmt.Sprintf("inst_%d", n), TenantID: "acme", MachineID: machineID, Name: fmt.Sprintf("i-%d", n), Runtime: "process", SpecJSON: "{}"}, instances.MaxPerMachine)
		if full := n == instances.MaxPerMachine; (err != nil) != full {
			t.Fatalf("instance %d: %v", n, err)
		}
	}
	_, err := r.as("all").Apply(t.Context(), connect.NewRequest(&computev1.ApplyInstanceRequest{TenantId: "acme", Name: "more", Machine: "web-1", Runtime: "process", SpecJson: "{}"}))
	if connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Errorf("one too many = %v, want a failed precondition", err)
	}
}

func FuzzParseEvent(f *testing.F) {
	f.Add([]byte(`{"instance_id":"inst_1","runtime":"process","state":"running","message":"","generation":3,"orphan":true}`))
	f.Add([]byte(`{"state":"happy"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if id, o, _, err := instances.ParseEvent(data); err == nil && (id == "" || len(id) > 128 || o.State == "" || o.Generation > 1<<62) {
			t.Errorf("ParseEvent(%q) = %q, %+v", data, id, o)
		}
	})
}
