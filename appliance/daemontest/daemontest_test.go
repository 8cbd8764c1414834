package daemontest_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/daemontest"
	"github.com/better-compute/site-appliance/appliance/gateway"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/gatewaytest"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/provision"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/appliance/gateway/workflow"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/binding"
	"github.com/better-compute/site-appliance/plugins/driver/schema"
	"github.com/better-compute/site-appliance/plugins/host"
	"github.com/better-compute/site-appliance/plugins/sdk"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// The test binary is the plugin, too.
func TestMain(m *testing.M) {
	if os.Getenv(bcx.CookieVariable) != "" {
		d, err := acme()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(sdk.Main(sdk.Options{PluginVersion: "test"}, d))
	}
	os.Exit(m.Run())
}

type config struct {
	Address     string     `json:"address"`
	Credentials driver.Ref `json:"credentials"`
}

// machine is what the plugin's process drives.
type machine struct{ power string }

// power is the part of a metal's power kind that the test needs.
func power() driver.Kind[*part] {
	return driver.Kind[*part]{Name: "power", Operations: map[string]driver.Operation[*part]{
		"getPower": driver.Get((*part).get), "setPower": driver.Set(action, (*part).set), "pid": driver.Get((*part).pid), "break": driver.Do((*part).fail),
		"expire": driver.Do((*part).expire),
	}}
}

type part struct {
	*machine
	config config
}

func action(raw json.RawMessage) (a string, err error) {
	if json.Unmarshal(raw, &a) != nil || a != "on" && a != "off" {
		return "", errs.New(errs.InvalidArgs, "want on or off")
	}
	return a, nil
}

func (p *part) get(*driver.Context) (string, error) { return p.power, nil }
func (p *part) pid(*driver.Context) (int, error)    { return os.Getpid(), nil }
func (p *part) fail(*driver.Context) error          { return errs.Retry("fan-broken", "the fan is broken") }

func (p *part) expire(*driver.Context) error {
	return errs.New(errs.Expired, "the BMC's session is over")
}

func (p *part) set(ctx *driver.Context, action string) error {
	key, err := ctx.Secrets.Resolve(ctx, p.config.Credentials)
	if err != nil {
		return err
	}
	if !strings.Contains(string(key.Reveal()), "hunter22") {
		return errs.New(errs.CredentialsUnavailable, "another secret came")
	}
	ctx.Emit(driver.Progress{Phase: "power", Message: "setting " + action})
	p.power = action
	return nil
}

// acme is a BMC driver that serves one machine.
func acme() (*driver.Definition, error) {
	manifest, err := schema.New(schema.Fields{"address": schema.String(), "credentials": schema.Secret().Optional()})
	if err != nil {
		return nil, err
	}
	m := &machine{power: "off"}
	return driver.Define(driver.Spec[config]{
		ID: "acme-bmc", Version: "1.2.0", RunsOn: "site", Config: manifest, RetrySafe: []string{"power.getPower"},
	}, driver.Implement(power(), func(c config, _ *driver.Context) (*part, error) { return &part{m, c}, nil }))
}

const credential = "secret://acme/bmc"

// profile is a module's own, without any of metal's steps.
func profile(on string) module.Profile {
	return module.Profile{
		Name:    "cycle-" + on,
		Drivers: map[string]binding.Binding{"power": {Driver: "acme-bmc", Config: json.RawMessage(`{"address":"10.0.0.5","credentials":"` + credential + `"}`)}},
		Steps: []module.ProfileStep{
			{Uses: "power.getPower", On: on},
			{Uses: "power.setPower", On: on, With: json.RawMessage(`["on"]`)},
			{Uses: "power.getPower", On: on},
			{Uses: "power.pid", On: on},
		},
	}
}

// world is a real gateway with its engine, and a machine.
type world struct {
	*gatewaytest.Gateway
	t       *testing.T
	engine  *workflow.Engine
	machine store.Machine
}

func newWorld(t *testing.T, profiles ...module.Profile) *world {
	t.Helper()
	w := &world{Gateway: gatewaytest.Make(t), t: t}
	w.Modules = []gateway.Module{provision.Module(profiles...)}
	running, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	w.Prepare = func(g *gateway.Gateway) {
		w.engine = workflow.New(workflow.Config{
			Store: g.Store, Modules: g.Modules, Commands: g.Commands, Enrol: g.Enrol, Secrets: g.Secrets, Online: g.Sessions.Online,
			Log: slog.New(slog.DiscardHandler), Poll: 50 * time.Millisecond,
		})
		g.Sessions.OnState(func(string, bool) { w.engine.Wake() })
		go func() { done <- w.engine.Run(running) }()
	}
	w.Start()
	t.Cleanup(func() {
		stop()
		w.must(<-done)
	})
	ctx := t.Context()
	w.must(w.Store.AddSite(ctx, store.Site{ID: "site_1", TenantID: "acme", Name: "lab", Created: w.Store.Now()}))
	w.must(w.Store.AddPool(ctx, store.Pool{ID: "pool_1", TenantID: "acme", Name: "metal", SiteID: "site_1", Created: w.Store.Now()}))
	w.machine = store.Machine{ID: "node_1", TenantID: "acme", Name: "m1", PoolID: "pool_1", SiteID: "site_1", MACs: []string{"52:54:00:00:00:01"}, State: "enrolled", Created: w.Store.Now()}
	w.must(w.Store.AddMachine(ctx, w.machine))
	_, err := w.Secrets.Put(ctx, "acme", "bmc", secret.New([]byte(`{"username":"root","password":"hunter22"}`)))
	w.must(err)
	return w
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) join(role agentv1.Role) string {
	w.t.Helper()
	machine := ""
	if role == agentv1.Role_ROLE_NODE {
		machine = w.machine.ID
	}
	join, err := w.Enrol.NewToken(w.t.Context(), role, "site_1", machine, time.Hour)
	w.must(err)
	return join
}

// run runs a profile to its end.
func (w *world) run(name string) (store.Workflow, []store.WorkflowStep) {
	w.t.Helper()
	id, err := w.engine.StartProfile(w.t.Context(), name, w.machine, "")
	w.must(err)
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		wf, err := w.Store.Workflow(w.t.Context(), "acme", id)
		w.must(err)
		if wf.State == store.StateRunning {
			continue
		}
		steps, err := w.Store.WorkflowSteps(w.t.Context(), id)
		w.must(err)
		return wf, steps
	}
	w.t.Fatalf("workflow %s did not end: %s", id, w.engine.Note(id))
	return store.Workflow{}, nil
}

func answers(t *testing.T, steps []store.WorkflowStep) []string {
	t.Helper()
	var out []string
	for _, step := range steps {
		answer, err := workflow.Result(step)
		if err != nil {
			t.Error(err)
		}
		out = append(out, string(answer))
	}
	return out
}

// TestProfileThroughAPlugin: a profile whose power operations a plugin's driver
// serves, without metal's steps, goes through the real engine, signing, session and
// gateway to a fake daemon, which runs it in the plugin's process.
func TestProfileThroughAPlugin(t *testing.T) {
	t.Parallel()
	for on, role := range map[string]agentv1.Role{"site": agentv1.Role_ROLE_SITE, "node": agentv1.Role_ROLE_NODE} {
		t.Run(on, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, profile(on))
			d := daemontest.FakeDaemon(t, daemontest.Options{Role: role, Join: w.join(role), Host: plugin(t)})
			wf, steps := w.run("cycle-" + on)
			if wf.State != store.StateDone {
				t.Fatalf("workflow is %s (%s: %s), want done", wf.State, wf.ErrorCode, wf.ErrorMessage)
			}
			got := answers(t, steps)
			if want := []string{`"off"`, "", `"on"`}; !slices.Equal(got[:3], want) {
				t.Errorf("answers = %q, want %q", got[:3], want)
			}
			if got[3] == fmt.Sprint(os.Getpid()) || got[3] == "" {
				t.Errorf("the driver ran in process %q, want the plugin's own", got[3])
			}
			for _, step := range steps {
				c, err := w.Store.Command(t.Context(), workflow.CommandID(wf.ID, step.ID, 0))
				if err != nil || c.Kind != "driver.invoke" || c.AgentID != d.AgentID() || c.Lane != "provision" || !slices.Equal(c.SecretRefs, []string{credential}) {
					t.Errorf("command of %s = %+v, %v", step.ID, c, err)
				}
				if want := map[string]string{"site": "node_1"}[on]; c.TargetNodeID != want {
					t.Errorf("command of %s is for node %q, want %q", step.ID, c.TargetNodeID, want)
				}
				if life := c.NotAfter.Sub(c.Issued); life > 10*time.Minute || life < 9*time.Minute {
					t.Errorf("command of %s lives %s, want the kind's 10 minutes or a little less", step.ID, life)
				}
				if strings.Contains(string(c.Signed.Payload), "hunter22") {
					t.Errorf("command of %s holds the password", step.ID)
				}
			}
		})
	}
}

// TestProfileOnARamdisk: a ramdisk takes driver.invoke and hosts nothing.
func TestProfileOnARamdisk(t *testing.T) {
	t.Parallel()
	w := newWorld(t, profile("ramdisk"))
	box := daemontest.FakeDaemon(t, daemontest.Options{Role: agentv1.Role_ROLE_SITE, Join: w.join(agentv1.Role_ROLE_SITE)})
	until := time.Now().Add(time.Hour)
	w.must(w.Enrol.OpenWindow(t.Context(), "site_1", w.machine.ID, "win_1", "deploy", until))
	address, err := url.Parse(w.URL)
	w.must(err)
	boot, err := box.Boot(&pxev1.Machine{MachineId: w.machine.ID, WindowId: "win_1", Purpose: "deploy", WindowUntilMs: until.UnixMilli()}, address.Host)
	w.must(err)
	ramdisk := daemontest.FakeDaemon(t, daemontest.Options{Role: agentv1.Role_ROLE_RAMDISK, Boot: boot})
	if ramdisk.MachineID() != w.machine.ID {
		t.Errorf("the ramdisk is machine %q, want %s", ramdisk.MachineID(), w.machine.ID)
	}
	wf, _ := w.run("cycle-ramdisk")
	if wf.ErrorCode != string(errs.UnsupportedDriver) || !strings.Contains(wf.ErrorMessage, "no hosted driver acme-bmc implements power") {
		t.Errorf("workflow ended with %s: %s, want unsupported-driver", wf.ErrorCode, wf.ErrorMessage)
	}
}

// TestProfileThroughBcdsHost: the same plugin under bcd's own plugin host does the same.
func TestProfileThroughBcdsHost(t *testing.T) {
	t.Parallel()
	w := newWorld(t, profile("site"))
	daemontest.FakeDaemon(t, daemontest.Options{Role: agentv1.Role_ROLE_SITE, Join: w.join(agentv1.Role_ROLE_SITE), Host: hosted(t)})
	wf, steps := w.run("cycle-site")
	if want, got := []string{`"off"`, "", `"on"`}, answers(t, steps)[:3]; wf.State != store.StateDone || !slices.Equal(got, want) {
		t.Errorf("workflow is %s (%s: %s) with answers %q, want done with %q", wf.State, wf.ErrorCode, wf.ErrorMessage, got, want)
	}
}

// TestRetryableOfADriver: an error of a plugin keeps its code all the way, unless
// by that code nothing ran, and the flag only for an operation that is retry-safe.
func TestRetryableOfADriver(t *testing.T) {
	t.Parallel()
	for operation, want := range map[string]string{"break": "fan-broken", "expire": "driver-error"} {
		t.Run(operation, func(t *testing.T) {
			t.Parallel()
			p := profile("site")
			p.Steps = []module.ProfileStep{{Uses: "power." + operation, On: "site"}}
			w := newWorld(t, p)
			daemontest.FakeDaemon(t, daemontest.Options{Role: agentv1.Role_ROLE_SITE, Join: w.join(agentv1.Role_ROLE_SITE), Host: plugin(t)})
			wf, steps := w.run("cycle-site")
			if wf.ErrorCode != want || steps[0].Attempt != 0 {
				t.Errorf("workflow ended with %s after attempt %d, want %s at once", wf.ErrorCode, steps[0].Attempt, want)
			}
			c, err := w.Store.Command(t.Context(), workflow.CommandID(wf.ID, "main.0", 0))
			if err != nil || c.Err == nil || c.Err.Retryable {
				t.Errorf("command ended with %+v, %v, want an error that is not retryable", c.Err, err)
			}
		})
	}
}

// slow hosts a driver whose operations begin, say so, and end when the test lets
// them or their caller is gone.
type slow struct {
	mu      sync.Mutex
	began   []string // operation and idempotency key
	release chan struct{}
}

func (*slow) Drivers() []driver.Manifest {
	return []driver.Manifest{{ID: "acme-bmc", Version: "1.0.0", Kinds: []string{"power"}, RunsOn: "site", RetrySafe: []string{"power.getPower"}}}
}

func (s *slow) Invoke(ctx context.Context, c host.Call) (json.RawMessage, error) {
	s.mu.Lock()
	s.began = append(s.began, c.Operation+" "+c.IdempotencyKey)
	s.mu.Unlock()
	c.Progress("work", "half way", 1, 2)
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-s.release:
		return json.RawMessage(`"on"`), nil
	}
}

func (s *slow) calls() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.began)
}

// begin starts a profile of one operation, and returns when the driver has begun.
func (w *world) begin(s *slow, profile string) (id string) {
	w.t.Helper()
	id, err := w.engine.StartProfile(w.t.Context(), profile, w.machine, "")
	w.must(err)
	w.until("the driver to begin and say so", func() bool {
		return len(s.calls()) > 0 && w.Commands.Progress(workflow.CommandID(id, "main.0", 0)) == "work: half way (1 of 2)"
	})
	return id
}

func (w *world) until(what string, ok func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			w.t.Fatalf("waited in vain for %s", what)
		}
	}
}

func (w *world) end(id string) store.Workflow {
	w.t.Helper()
	var wf store.Workflow
	w.until("the workflow's end", func() bool {
		var err error
		wf, err = w.Store.Workflow(w.t.Context(), "acme", id)
		w.must(err)
		return wf.State != store.StateRunning
	})
	return wf
}

func one(operation string) module.Profile {
	return module.Profile{Name: operation, Drivers: map[string]binding.Binding{"power": {Driver: "acme-bmc"}},
		Steps: []module.ProfileStep{{Uses: "power." + operation, On: "site", With: json.RawMessage(`"off"`)}}}
}

// TestDaemonDiesInTheMiddle: an agent that comes back runs an operation again only
// where it is retry-safe; any other ends as interrupted, and is not repeated.
func TestDaemonDiesInTheMiddle(t *testing.T) {
	t.Parallel()
	get, set := one("getPower"), one("setPower")
	get.Name, set.Name = "get", "set"
	for _, tt := range []struct {
		profile string
		code    errs.Code
		runs    int
	}{{"get", "", 2}, {"set", errs.Interrupted, 1}} {
		t.Run(tt.profile, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, get, set)
			s := &slow{release: make(chan struct{})}
			o := daemontest.Options{Role: agentv1.Role_ROLE_SITE, Join: w.join(agentv1.Role_ROLE_SITE), Host: s, StateDir: t.TempDir()}
			d, err := daemontest.Start(t.Context(), o, nil)
			w.must(err)
			id := w.begin(s, tt.profile)
			d.Stop()
			close(s.release)
			daemontest.FakeDaemon(t, o)
			if wf := w.end(id); wf.ErrorCode != string(tt.code) {
				t.Errorf("workflow ended with %q (%s), want %q", wf.ErrorCode, wf.ErrorMessage, tt.code)
			}
			calls := s.calls()
			if len(calls) != tt.runs || calls[0] != calls[len(calls)-1] {
				t.Errorf("the driver was asked %q, want %d times by one key", calls, tt.runs)
			}
		})
	}
}

// TestCancelReachesTheDriver: ending a workflow ends the operation that runs.
func TestCancelReachesTheDriver(t *testing.T) {
	t.Parallel()
	set := one("setPower")
	set.Name = "set"
	w := newWorld(t, set)
	s := &slow{release: make(chan struct{})}
	daemontest.FakeDaemon(t, daemontest.Options{Role: agentv1.Role_ROLE_SITE, Join: w.join(agentv1.Role_ROLE_SITE), Host: s})
	id := w.begin(s, "set")
	w.must(w.engine.Cancel(t.Context(), "acme", id))
	if wf := w.end(id); wf.ErrorCode != string(errs.Cancelled) {
		t.Errorf("workflow ended with %q, want cancelled", wf.ErrorCode)
	}
	c, err := w.Store.Command(t.Context(), workflow.CommandID(id, "main.0", 0))
	if err != nil || c.Err == nil || c.Err.Code != errs.Cancelled {
		t.Errorf("command ended with %v, %v, want cancelled", c.Err, err)
	}
}

// TestGPUHost: it advertises nvidia beside what it hosts, and does not host it.
func TestGPUHost(t *testing.T) {
	t.Parallel()
	p := module.Profile{Name: "gpu", Drivers: map[string]binding.Binding{"config": {Driver: "nvidia"}}, Steps: []module.ProfileStep{{Uses: "config.apply", On: "node"}}}
	w := newWorld(t, p)
	d, err := acme()
	w.must(err)
	gpu := daemontest.FakeDaemon(t, daemontest.Options{Role: agentv1.Role_ROLE_NODE, Join: w.join(agentv1.Role_ROLE_NODE), GPU: true, Host: daemontest.FakeDriverInvoke([]*driver.Definition{d})})
	agent, err := w.Store.Agent(t.Context(), gpu.AgentID())
	w.must(err)
	var ids []string
	for _, d := range agent.Drivers {
		ids = append(ids, fmt.Sprint(d.GetId(), d.GetKinds()))
	}
	if want := []string{"acme-bmc[power]", "nvidia[config]"}; !slices.Equal(ids, want) {
		t.Errorf("advertised %v, want %v", ids, want)
	}
	if wf, _ := w.run("gpu"); wf.ErrorCode != string(errs.UnsupportedDriver) {
		t.Errorf("workflow ended with %s, want unsupported-driver", wf.ErrorCode)
	}
}

// TestKindsOfTheTest: the daemon serves what the test gives it, and nothing else.
func TestKindsOfTheTest(t *testing.T) {
	t.Parallel()
	w := &world{Gateway: gatewaytest.Make(t), t: t}
	w.Modules = []gateway.Module{{Name: "test", Kinds: []module.Kind{
		{Name: "test.echo", Lane: "query", Timeout: time.Minute, Roles: []agentv1.Role{agentv1.Role_ROLE_SITE}},
		{Name: "test.other", Lane: "query", Timeout: time.Minute, Roles: []agentv1.Role{agentv1.Role_ROLE_SITE}},
	}}}
	w.Start()
	d := daemontest.FakeDaemon(t, daemontest.Options{Role: agentv1.Role_ROLE_SITE, Join: w.join(agentv1.Role_ROLE_SITE), Kinds: []dispatch.Kind{{
		Name: "test.echo", Lane: "query", Roles: []agentv1.Role{agentv1.Role_ROLE_SITE},
		Decode: func(args []byte) (dispatch.Operation, error) {
			return dispatch.Operation{Name: "echo", Value: args}, nil
		},
		Run: func(_ context.Context, c dispatch.Call) ([]byte, error) {
			args, ok := c.Operation.Value.([]byte)
			if !ok {
				return nil, errors.New("no bytes")
			}
			return args, nil
		},
	}}})
	for kind, want := range map[string]errs.Code{"test.echo": "", "test.other": errs.UnknownKind} {
		id, err := w.Commands.Submit(t.Context(), commands.Spec{AgentID: d.AgentID(), Kind: kind, Raw: []byte("hello")})
		w.must(err)
		out, err := w.Commands.Wait(t.Context(), id)
		w.must(err)
		code := errs.Code("")
		if out.Err != nil {
			code = out.Err.Code
		}
		if code != want || want == "" && string(out.Result) != "hello" {
			t.Errorf("%s = %q, %v, want code %q", kind, out.Result, out.Err, want)
		}
	}
}
