package node

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/agenttest"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/node/process"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/host/hosttest"
	"github.com/better-compute/site-appliance/plugins/instance"
	"github.com/better-compute/site-appliance/plugins/sdk"
)

func TestMain(m *testing.M) {
	hosttest.Shim()
	if len(os.Args) > 1 && os.Args[1] == GateWord {
		os.Exit(process.GateMain(os.Args[2:]))
	}
	if os.Getenv(bcx.CookieVariable) != "" {
		os.Exit(servePlugin())
	}
	if len(os.Args) > 1 && os.Args[1] == "instance" {
		time.Sleep(time.Hour)
	}
	os.Exit(m.Run())
}

// toy is a runtime that keeps its instances in memory.
type toy struct {
	mu   sync.Mutex
	have map[string]instance.Status
}

func (r *toy) List(*driver.Context) ([]instance.Status, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Values(r.have)), nil
}

func (r *toy) Apply(_ *driver.Context, s instance.Spec) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.have[s.ID] = instance.Status{ID: s.ID, State: instance.Running, Generation: s.Generation, Message: string(s.Config)}
	return nil
}

func (r *toy) Remove(_ *driver.Context, id string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.have, id)
	return nil
}

// servePlugin serves two runtimes, one of which takes a built-in runtime's id.
func servePlugin() int {
	r := &toy{have: map[string]instance.Status{}}
	var all []*driver.Definition
	for _, id := range []string{"toy", processRuntime} {
		d, err := driver.Define(driver.Spec[struct{}]{
			ID: id, Version: "1.2.3", RunsOn: "node", RetrySafe: instance.RetrySafe(),
			Parse: func(json.RawMessage) (struct{}, error) { return struct{}{}, nil },
		}, driver.Implement(instance.RuntimeKind(), func(struct{}, *driver.Context) (instance.Runtime, error) { return r, nil }))
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		all = append(all, d)
	}
	return sdk.Main(sdk.Options{PluginVersion: "test"}, all...)
}

func write(t *testing.T, path, text string, mode fs.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}

// start runs a node until stop is called or the test ends.
func start(t *testing.T, c Config) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, c) }()
	stopped := false
	stop = func() {
		cancel()
		if stopped {
			return
		}
		stopped = true
		select {
		case <-ended:
		case <-time.After(20 * time.Second):
			t.Error("the node does not end")
		}
	}
	t.Cleanup(stop)
	return stop
}

func TestJoinsAndComesBackWithoutTheJoinFile(t *testing.T) {
	g := agenttest.Start(t)
	dir := t.TempDir()
	join, sys := filepath.Join(dir, "join"), filepath.Join(dir, "sys")
	write(t, join, g.Join("node-token").Encode()+"\n", 0o600)
	write(t, filepath.Join(dir, "config.toml"), fmt.Sprintf("join_file = %q\n\n[gateway]\nvia = %q\n", join, g.Addr()), 0o600)
	write(t, filepath.Join(sys, "class/dmi/id/product_uuid"), "5C1F3C5E-0001-4000-8000-000000000009\n", 0o400)
	write(t, filepath.Join(sys, "class/net/eth0/address"), "52:54:00:AA:00:01\n", 0o600)
	write(t, filepath.Join(sys, "class/net/eth0/device/vendor"), "x", 0o600)
	if got := macs(sys); len(got) != 1 || got[0] != "52:54:00:aa:00:01" {
		t.Errorf("macs() = %v", got)
	}
	if got, want := productUUID(sys), "5c1f3c5e-0001-4000-8000-000000000009"; got != want {
		t.Errorf("productUUID() = %q, want %q", got, want)
	}
	c := Config{ConfigFile: filepath.Join(dir, "config.toml"), StateDir: filepath.Join(dir, "state"), Sys: sys, Version: "test", Log: slog.New(slog.DiscardHandler)}
	stop := start(t, c)
	s := g.Session(1)
	if role := s.Hello.GetRole(); role != agentv1.Role_ROLE_NODE {
		t.Errorf("role = %v, want a node", role)
	}
	if got := s.Hello.GetCapabilities(); !slices.Equal(got, []string{"instance.process"}) {
		t.Errorf("capabilities = %v, want the built-in runtime's", got)
	}
	for id, tt := range map[string]struct {
		kind string
		want errs.Code
	}{
		"cmd_1": {"instance.apply", errs.InvalidArgs}, "cmd_2": {"instance.snapshot", errs.UnsupportedOperation},
		"cmd_3": {"bmc.power", errs.UnknownKind},
	} {
		s.Command(&agentv1.CommandPayload{CommandId: id, Kind: tt.kind, Lane: "provision"})
		if got := s.Result(id).GetError().GetCode(); got != string(tt.want) {
			t.Errorf("an empty %s = %q, want %q", tt.kind, got, tt.want)
		}
	}
	stop()

	if err := os.Remove(join); err != nil {
		t.Fatal(err)
	}
	start(t, c)
	if again := g.Session(2); again.AgentID != s.AgentID {
		t.Errorf("after a restart the agent is %q, was %q", again.AgentID, s.AgentID)
	}
}

// apply sends an instance and gives what became of it.
func apply(t *testing.T, s *agenttest.Session, command string, in *agentv1.InstanceSpec) *agentv1.InstanceStatus {
	t.Helper()
	args, err := proto.Marshal(&agentv1.InstanceApplyRequest{Instance: in})
	if err != nil {
		t.Fatal(err)
	}
	return status(t, s, command, "instance.apply", args)
}

func status(t *testing.T, s *agenttest.Session, command, kind string, args []byte) *agentv1.InstanceStatus {
	t.Helper()
	s.Command(&agentv1.CommandPayload{CommandId: command, Kind: kind, Lane: "provision", Args: args})
	r := s.Result(command)
	if r.GetError() != nil {
		t.Fatalf("%s = %v", kind, r.GetError())
	}
	res := &agentv1.InstanceResult{}
	if err := proto.Unmarshal(r.GetResult(), res); err != nil {
		t.Fatal(err)
	}
	if len(res.GetInstances()) == 0 {
		return nil
	}
	return res.GetInstances()[0]
}

// Plugins serve a node as they serve a box: advertised, invoked, and as runtimes.
func TestHostsPluginsAndTheirRuntimes(t *testing.T) {
	hosttest.NeedsRoot(t)
	g := agenttest.Start(t)
	dir, plugins := t.TempDir(), hosttest.NewDir(t)
	plugins.Add("acme-runtime", hosttest.Self(t))
	join := filepath.Join(dir, "join")
	write(t, join, g.Join("node-token").Encode()+"\n", 0o600)
	write(t, filepath.Join(dir, "config.toml"), fmt.Sprintf(`join_file = %q
[gateway]
via = %q
[plugins]
dir = %q
[instances]
cgroup = "off"
[runtimes.toy]
anything = "goes"
`, join, g.Addr(), plugins.Path), 0o600)
	c := Config{ConfigFile: filepath.Join(dir, "config.toml"), StateDir: filepath.Join(dir, "state"), Sys: dir, Version: "test", Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	stop := start(t, c)
	s := g.Session(1)
	var drivers []string
	for _, d := range s.Hello.GetDrivers() {
		drivers = append(drivers, d.GetId()+"@"+d.GetVersion()+" "+strings.Join(d.GetKinds(), ","))
	}
	if slices.Sort(drivers); !slices.Equal(drivers, []string{"process@1.2.3 runtime", "toy@1.2.3 runtime"}) {
		t.Errorf("drivers = %q", drivers)
	}
	if got := s.Hello.GetCapabilities(); !slices.Equal(got, []string{"instance.process", "instance.toy"}) {
		t.Errorf("capabilities = %v", got)
	}
	got := apply(t, s, "cmd_1", &agentv1.InstanceSpec{InstanceId: "i-1", Name: "one", Runtime: "toy", SpecJson: `{"a":1}`, Generation: 1})
	if got.GetState() != "running" || got.GetMessage() != `{"a":1}` {
		t.Errorf("a hosted runtime's instance = %v", got)
	}
	// The built-in runtime keeps its id: the plugin's takes nothing of it.
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	spec, err := json.Marshal(map[string]any{"argv": []string{self, "instance"}})
	if err != nil {
		t.Fatal(err)
	}
	if got := apply(t, s, "cmd_2", &agentv1.InstanceSpec{InstanceId: "i-2", Name: "two", Runtime: "process", SpecJson: string(spec), Generation: 1}); got.GetState() != "running" || got.GetMessage() != "" {
		t.Errorf("the built-in runtime's instance = %v", got)
	}
	s.Event("instance.state", "i-1")
	// driver.invoke reaches the same driver, and what no kind has is refused by it.
	for id, want := range map[string]string{"list": "", "snapshot": string(errs.UnsupportedOperation)} {
		args := fmt.Sprintf(`{"workflowId":"wf","stepId":"s","attempt":1,"args":{"concern":"runtime","operation":%q,"args":[],"driver":"toy","config":{}}}`, id)
		s.Command(&agentv1.CommandPayload{CommandId: "cmd_" + id, Kind: "driver.invoke", Lane: "provision", Args: []byte(args), WorkflowId: "wf", StepId: "s", Attempt: 1})
		if r := s.Result("cmd_" + id); r.GetError().GetCode() != want {
			t.Errorf("driver.invoke of runtime.%s = %v, want %q", id, r, want)
		}
	}
	stop()

	// The process outlived its agent; the next one takes it up.
	start(t, c)
	s = g.Session(2)
	if got := apply(t, s, "cmd_5", &agentv1.InstanceSpec{InstanceId: "i-2", Name: "two", Runtime: "process", SpecJson: string(spec), Generation: 1}); got.GetState() != "running" {
		t.Errorf("after a restart = %v", got)
	}
	for _, id := range []string{"i-1", "i-2"} {
		args, err := proto.Marshal(&agentv1.InstanceRemoveRequest{InstanceId: id, Generation: 2})
		if err != nil {
			t.Fatal(err)
		}
		if got := status(t, s, "cmd_rm_"+id, "instance.remove", args); got != nil {
			t.Errorf("instance.remove of %s = %v, want nothing left", id, got)
		}
	}
	if got := status(t, s, "cmd_ls", "instance.list", nil); got != nil {
		t.Errorf("instance.list = %v, want none", got)
	}
}

func TestRefusals(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	write(t, path("garbage"), "bc1.AAAA", 0o600)
	write(t, path("huge"), strings.Repeat("x", maxJoin+1), 0o600)
	for name, tt := range map[string]struct{ text, state, want string }{
		"unknown key":   {"join_file = \"x\"\nbogus = 1\n", "s", ":2: unknown key \"bogus\""},
		"no join file":  {fmt.Sprintf("join_file = %q\n", path("absent")), "s", "not there"},
		"nothing":       {"", "s", "not there"},
		"bad join":      {fmt.Sprintf("join_file = %q\n", path("garbage")), "s", "join string"},
		"huge join":     {fmt.Sprintf("join_file = %q\n", path("huge")), "s", "bytes"},
		"via":           {"[gateway]\nvia = \"nowhere\"\n", "s", "want host:port"},
		"runtimes":      {"[runtimes.process]\nx = 1\n", "s", "runtimes.process"},
		"no state":      {"", "", "state folder"},
		"not even toml": {"[", "s", ":1:"},
	} {
		file := path(strings.ReplaceAll(name, " ", "_") + ".toml")
		write(t, file, tt.text, 0o600)
		state := tt.state
		if state != "" {
			state = filepath.Join(t.TempDir(), state)
		}
		err := Run(t.Context(), Config{ConfigFile: file, StateDir: state, Log: slog.New(slog.DiscardHandler)})
		if err == nil || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "AAAA") {
			t.Errorf("%s: Run() = %v, want %q", name, err, tt.want)
		}
	}
	if err := Run(t.Context(), Config{ConfigFile: path("none.toml"), Log: slog.New(slog.DiscardHandler)}); err == nil {
		t.Error("Run without a configuration succeeded")
	}
}

func TestWarnsOfAnOpenJoinFile(t *testing.T) {
	g := agenttest.Start(t)
	for mode, want := range map[fs.FileMode]bool{0o600: false, 0o644: true} {
		path := filepath.Join(t.TempDir(), "join")
		write(t, path, g.Join("t").Encode(), mode)
		var log bytes.Buffer
		join, err := readJoin(path, slog.New(slog.NewTextHandler(&log, nil)))
		if err != nil || join == nil {
			t.Fatal(err)
		}
		if got := strings.Contains(log.String(), "others"); got != want {
			t.Errorf("mode %v: warned %v, want %v", mode, got, want)
		}
	}
}
