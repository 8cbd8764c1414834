package node

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/agenttest"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/containerd/containerdtest"
	"github.com/better-compute/site-appliance/plugins/host/hosttest"
)

// until waits for what another process brings about.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// The plugin bcx-containerd under bcd node: apply, kill, a restart of the
// plugin, an orphan, remove.
func TestRunsContainersByAPlugin(t *testing.T) {
	d := containerdtest.Start(t)
	g := agenttest.Start(t)
	dir, plugins := t.TempDir(), hosttest.NewDir(t)
	plugins.Add("bcx-containerd", hosttest.Build(t, "github.com/better-compute/site-appliance/plugins/cmd/bcx-containerd"))
	join := filepath.Join(dir, "join")
	write(t, join, g.Join("node-token").Encode()+"\n", 0o600)
	write(t, filepath.Join(dir, "config.toml"), fmt.Sprintf(`join_file = %q
[gateway]
via = %q
[plugins]
dir = %q
privileged = "bcx-containerd"
[runtimes.containerd]
address = %q
namespace = %q
snapshotter = %q
pull = "never"
`, join, g.Addr(), plugins.Path, d.Address, containerdtest.Namespace(), d.Snapshotter), 0o600)
	c := Config{ConfigFile: filepath.Join(dir, "config.toml"), StateDir: filepath.Join(dir, "state"), Sys: dir, Version: "test", Every: 200 * time.Millisecond, Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	stop := start(t, c)
	s := g.Session(1)
	config := fmt.Sprintf(`{"image":%q}`, containerdtest.Image)
	spec := &agentv1.InstanceSpec{InstanceId: "i-1", Name: "one", Runtime: "containerd", SpecJson: config, Generation: 1}
	if got := apply(t, s, "cmd_1", spec); got.GetState() != "running" || d.PID("i-1") == 0 {
		t.Fatalf("instance.apply = %v", got)
	}
	// Killed from outside: it runs again without being asked.
	first := d.PID("i-1")
	d.Kill("i-1")
	until(t, "it runs again", func() bool { pid := d.PID("i-1"); return pid != 0 && pid != first })

	// The plugin dies: the container does not, and the next call finds a new plugin.
	second, plugin := d.PID("i-1"), pluginPID(t, "bcx-containerd")
	if err := syscall.Kill(plugin, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	until(t, "the plugin is back", func() bool { pid := findPlugin("bcx-containerd"); return pid != 0 && pid != plugin })
	if got := d.PID("i-1"); got != second {
		t.Errorf("pid = %d after the plugin's death, want %d", got, second)
	}
	d.Kill("i-1")
	until(t, "it runs again by the new plugin", func() bool { pid := d.PID("i-1"); return pid != 0 && pid != second })

	args := []byte(`{"workflowId":"wf","stepId":"s","attempt":1,"args":{"concern":"runtime","operation":"snapshot","args":["i-1"],"driver":"containerd","config":{"address":"/run/x.sock"}}}`)
	s.Command(&agentv1.CommandPayload{CommandId: "cmd_snap", Kind: "driver.invoke", Lane: "provision", Args: args, WorkflowId: "wf", StepId: "s", Attempt: 1})
	if got := s.Result("cmd_snap").GetError().GetCode(); got != string(errs.UnsupportedOperation) {
		t.Errorf("runtime.snapshot = %q, want %q", got, errs.UnsupportedOperation)
	}
	s.Command(&agentv1.CommandPayload{CommandId: "cmd_snap2", Kind: "instance.snapshot", Lane: "provision"})
	if got := s.Result("cmd_snap2").GetError().GetCode(); got != string(errs.UnsupportedOperation) {
		t.Errorf("instance.snapshot = %q, want %q", got, errs.UnsupportedOperation)
	}

	// The node forgets what is wanted: the container is an orphan that runs on,
	// until its removal is asked for.
	stop()
	if err := os.Remove(filepath.Join(c.StateDir, "instances.json")); err != nil {
		t.Fatal(err)
	}
	start(t, c)
	s = g.Session(2)
	// What the first agent told last may still come before it.
	s.Frame("an orphan's state", func(f *agentv1.AgentFrame) bool {
		var told struct{ Orphan bool }
		e := f.GetEvent()
		return e.GetName() == "instance.state" && e.GetKey() == "i-1" && json.Unmarshal(e.GetBodyJson(), &told) == nil && told.Orphan
	})
	if d.PID("i-1") == 0 {
		t.Error("an orphan was killed unasked")
	}
	rm, err := proto.Marshal(&agentv1.InstanceRemoveRequest{InstanceId: "i-1", Generation: 2})
	if err != nil {
		t.Fatal(err)
	}
	if got := status(t, s, "cmd_rm", "instance.remove", rm); got != nil {
		t.Errorf("instance.remove = %v, want nothing left", got)
	}
	if left := d.Left(); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

// findPlugin is the process of this test's plugin; 0: there is none.
func findPlugin(name string) int {
	procs, err := filepath.Glob("/proc/[0-9]*/comm")
	if err != nil {
		return 0
	}
	for _, p := range procs {
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(p)))
		if err != nil {
			continue
		}
		if argv, err := os.ReadFile(filepath.Join(filepath.Dir(p), "cmdline")); err == nil && filepath.Base(string(trimNUL(argv))) == name && parent(pid) == os.Getpid() {
			return pid
		}
	}
	return 0
}

func pluginPID(t *testing.T, name string) int {
	t.Helper()
	pid := 0
	until(t, name+" runs", func() bool { pid = findPlugin(name); return pid != 0 })
	return pid
}

func trimNUL(argv []byte) []byte {
	for i, c := range argv {
		if c == 0 {
			return argv[:i]
		}
	}
	return argv
}

func parent(pid int) int {
	data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0
	}
	var ppid int
	var state byte
	for i := len(data) - 1; i >= 0; i-- {
		if data[i] == ')' {
			fmt.Sscanf(string(data[i+1:]), " %c %d", &state, &ppid)
			break
		}
	}
	return ppid
}
