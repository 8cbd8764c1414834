// Package instances proves the way of an instance from a person's call to a
// process on a node, without virtual machines or namespaces: a real gateway, a
// real agent, and kill -9 between them.
package instances

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/api/computev1/computev1connect"
	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/gateway"
	"github.com/better-compute/site-appliance/appliance/gateway/api"
	"github.com/better-compute/site-appliance/appliance/gateway/gatewaytest"
	"github.com/better-compute/site-appliance/appliance/gateway/instances"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/appliance/node"
	"github.com/better-compute/site-appliance/appliance/node/process"
)

const token = "token"

// dirVariable makes the test binary a node with this folder.
const dirVariable = "BC_TEST_NODE_DIR"

func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case node.GateWord:
			os.Exit(process.GateMain(os.Args[2:]))
		case "instance":
			play(os.Args[2:])
		}
	}
	if dir := os.Getenv(dirVariable); dir != "" {
		err := node.Run(context.Background(), config(dir, slog.New(slog.NewTextHandler(os.Stderr, nil))))
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// play writes its process number, and ends when a file says so.
func play(args []string) {
	if err := os.WriteFile(args[0], []byte(strconv.Itoa(os.Getpid())+" "+args[1]), 0o600); err != nil {
		os.Exit(9)
	}
	time.Sleep(time.Hour)
}

func config(dir string, log *slog.Logger) node.Config {
	return node.Config{
		ConfigFile: filepath.Join(dir, "config.toml"), StateDir: filepath.Join(dir, "state"), Sys: dir, Version: "test",
		Every: 200 * time.Millisecond, Log: log,
	}
}

// rig is a gateway with one machine, whose node lives in dir.
type rig struct {
	*gatewaytest.Gateway
	t    *testing.T
	dir  string
	mark string // the file in which the instance writes who it is
}

func start(t *testing.T) *rig {
	t.Helper()
	r := &rig{Gateway: gatewaytest.Make(t), t: t, dir: t.TempDir()}
	r.mark = filepath.Join(r.dir, "mark")
	r.Modules = append(r.Modules, instances.Module())
	r.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	r.Timing.Heartbeat = 200 * time.Millisecond // by which a killed agent is noticed
	var wg sync.WaitGroup
	var stop context.CancelFunc = func() {}
	t.Cleanup(func() { stop(); wg.Wait() })
	r.Prepare = func(g *gateway.Gateway) {
		stop()
		wg.Wait()
		s := instances.New(instances.Config{
			Store: g.Store, Commands: g.Commands, Online: g.Sessions.Online, Log: r.Log.With("part", "instances"),
			Backoff: backoff.Policy{Min: 50 * time.Millisecond, Max: 50 * time.Millisecond},
		})
		g.Sessions.OnState(s.Came)
		g.Sessions.OnEvent(s.Heard)
		api.New(api.Config{Store: g.Store, Commands: g.Commands, Instances: s, Online: g.Sessions.Online, Log: r.Log}).Register(g.Handle)
		var ctx context.Context
		ctx, stop = context.WithCancel(context.Background())
		wg.Go(func() { s.Run(ctx) })
	}
	r.Start()
	ctx, now := t.Context(), r.Store.Now()
	for _, err := range []error{
		r.Store.AddSite(ctx, store.Site{ID: "site_1", TenantID: "acme", Name: "fsn1", Created: now}),
		r.Store.AddPool(ctx, store.Pool{ID: "pool_1", TenantID: "acme", Name: "metal", SiteID: "site_1", Created: now}),
		r.Store.AddMachine(ctx, store.Machine{ID: "mach_1", TenantID: "acme", Name: "web-1", PoolID: "pool_1", SiteID: "site_1", MACs: []string{"52:54:00:00:00:01"}, State: "deployed", Created: now}),
		r.Store.PutAPIToken(ctx, store.APIToken{Hash: sha256.Sum256([]byte(token)), Name: token, TenantID: "acme", Permissions: []string{api.AllPermissions}, Created: now}),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	join, err := r.Enrol.NewToken(ctx, agentv1.Role_ROLE_NODE, "site_1", "mach_1", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	r.write("join", join+"\n")
	r.write("config.toml", fmt.Sprintf("join_file = %q\n[gateway]\nvia = %q\n[instances]\ncgroup = \"off\"\n", filepath.Join(r.dir, "join"), strings.TrimPrefix(r.URL, "https://")))
	return r
}

func (r *rig) write(name, text string) {
	r.t.Helper()
	if err := os.WriteFile(filepath.Join(r.dir, name), []byte(text), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

type bearer struct{ next http.RoundTripper }

func (b bearer) RoundTrip(q *http.Request) (*http.Response, error) {
	q = q.Clone(q.Context())
	q.Header.Set("Authorization", "Bearer "+token)
	return b.next.RoundTrip(q)
}

func (r *rig) calls() computev1connect.InstanceServiceClient {
	return computev1connect.NewInstanceServiceClient(&http.Client{Transport: bearer{r.Client(nil).Transport}}, r.URL)
}

// apply asks for an instance that says word.
func (r *rig) apply(word string) *computev1.Instance {
	r.t.Helper()
	self, err := os.Executable()
	if err != nil {
		r.t.Fatal(err)
	}
	spec, err := json.Marshal(map[string]any{"argv": []string{self, "instance", r.mark, word}, "stop_timeout": "5s"})
	if err != nil {
		r.t.Fatal(err)
	}
	res, err := r.calls().Apply(r.t.Context(), connect.NewRequest(&computev1.ApplyInstanceRequest{TenantId: "acme", Name: "one", Machine: "web-1", Runtime: "process", SpecJson: string(spec)}))
	if err != nil {
		r.t.Fatal(err)
	}
	return res.Msg.Instance
}

func (r *rig) remove() {
	r.t.Helper()
	if _, err := r.calls().Remove(r.t.Context(), connect.NewRequest(&computev1.RemoveInstanceRequest{TenantId: "acme", Instance: "one", Machine: "web-1"})); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) until(what string, ok func() bool) {
	r.t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			r.t.Fatalf("never: %s; the list is %v", what, r.list())
		}
	}
}

func (r *rig) list() []*computev1.Instance {
	r.t.Helper()
	res, err := r.calls().List(r.t.Context(), connect.NewRequest(&computev1.ListInstancesRequest{TenantId: "acme"}))
	if err != nil {
		r.t.Fatal(err)
	}
	return res.Msg.Items
}

func (r *rig) state(state string, generation uint64) {
	r.t.Helper()
	r.until(fmt.Sprintf("%s at generation %d", state, generation), func() bool {
		all := r.list()
		return len(all) == 1 && all[0].State == state && all[0].Generation == generation
	})
}

func (r *rig) gone() {
	r.t.Helper()
	r.until("gone", func() bool { return len(r.list()) == 0 })
}

// runs waits until the instance said word, and gives its process.
func (r *rig) runs(word string, not int) (pid int) {
	r.t.Helper()
	r.until("an instance says "+word, func() bool {
		data, err := os.ReadFile(r.mark)
		if err != nil {
			return false
		}
		number, said, _ := strings.Cut(string(data), " ")
		pid, err = strconv.Atoi(number)
		return err == nil && said == word && pid != not && alive(pid)
	})
	return pid
}

// alive is false for a process that ended and was not waited for.
func alive(pid int) bool {
	data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	return err == nil && !strings.Contains(string(data), ") Z ")
}

// From a call to a process and back, with the agent in this process.
func TestFromACallToAProcess(t *testing.T) {
	r := start(t)
	if i := r.apply("hello"); i.State != "pending" || i.Generation != 1 {
		t.Errorf("Apply() before the node ever came = %v, want pending", i)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- node.Run(ctx, config(r.dir, r.Log.With("role", "node"))) }()
	stop := sync.OnceFunc(func() { cancel(); <-ended })
	t.Cleanup(stop)
	first := r.runs("hello", 0)
	r.state("running", 1)

	// It dies: it is started again.
	if err := syscall.Kill(first, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	second := r.runs("hello", first)
	r.state("running", 1)

	// What cannot run is told, and made good by the next generation.
	res, err := r.calls().Apply(t.Context(), connect.NewRequest(&computev1.ApplyInstanceRequest{TenantId: "acme", Name: "one", Machine: "web-1", Runtime: "process", SpecJson: `{"argv":["/no/such/program"]}`}))
	if err != nil || res.Msg.Instance.Generation != 2 {
		t.Fatalf("Apply() = %v, %v", res, err)
	}
	r.until("the failure is told", func() bool {
		all := r.list()
		return len(all) == 1 && all[0].State == "failed" && strings.Contains(all[0].Message, "/no/such/program")
	})
	if !alive(second) {
		t.Error("a generation that cannot run ended the one that does")
	}
	r.apply("again")
	third := r.runs("again", second)
	r.state("running", 3)
	if alive(second) {
		t.Error("the older generation still runs")
	}
	// The gateway restarts: nothing changes on the node.
	r.Stop()
	r.Start()
	r.state("running", 3)
	r.remove()
	r.gone()
	if alive(third) {
		t.Error("a removed instance still runs")
	}
	stop()
}

// kill -9 of the agent: the instance runs on, the next agent takes it up and
// catches up with what was asked meanwhile.
func TestKilledAgent(t *testing.T) {
	r := start(t)
	agent := r.agent()
	r.apply("hello")
	first := r.runs("hello", 0)
	r.state("running", 1)
	agent.kill()
	if !alive(first) {
		t.Fatal("the instance died with its agent")
	}
	r.state("unknown", 1)
	agent = r.agent()
	r.state("running", 1)
	if pid := r.runs("hello", 0); pid != first {
		t.Errorf("process %d runs, want %d as before", pid, first)
	}
	// Its death is seen by an agent that is not its parent.
	if err := syscall.Kill(first, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	second := r.runs("hello", first)
	agent.kill()
	r.apply("changed")
	agent = r.agent()
	r.runs("changed", second)
	r.state("running", 2)
	if alive(second) {
		t.Error("the older generation still runs")
	}
	agent.kill()
	r.remove()
	if got := r.list(); len(got) != 1 || got[0].State != "removing" {
		t.Errorf("list = %v, want it removing until its node says more", got)
	}
	r.agent()
	r.gone()
	r.until("the process is gone", func() bool {
		data, err := os.ReadFile(r.mark)
		pid, _ := strconv.Atoi(strings.Fields(string(data) + " 0")[0])
		return err == nil && !alive(pid)
	})
}

// daemon is an agent of its own process.
type daemon struct{ cmd *exec.Cmd }

func (r *rig) agent() *daemon {
	r.t.Helper()
	self, err := os.Executable()
	if err != nil {
		r.t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), dirVariable+"="+r.dir)
	cmd.Stdout, cmd.Stderr = r.t.Output(), r.t.Output()
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	p := &daemon{cmd}
	r.t.Cleanup(p.kill)
	return p
}

func (p *daemon) kill() {
	p.cmd.Process.Kill()
	p.cmd.Wait()
}
