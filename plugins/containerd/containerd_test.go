package containerd

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	client "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/snapshots"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/containerd/containerdtest"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
	"github.com/better-compute/site-appliance/plugins/instance"
)

// rig calls the driver as a host does.
type rig struct {
	*containerdtest.Daemon
	t      *testing.T
	driver *driver.Definition
	config map[string]any
}

func start(t *testing.T) *rig {
	t.Helper()
	d := containerdtest.Start(t)
	def, err := Driver()
	if err != nil {
		t.Fatal(err)
	}
	return &rig{d, t, def, map[string]any{"address": d.Address, "namespace": containerdtest.Namespace(), "snapshotter": d.Snapshotter, "pull": "never"}}
}

func (r *rig) invoke(operation string, args ...any) (json.RawMessage, error) {
	r.t.Helper()
	config, err := json.Marshal(r.config)
	if err != nil {
		r.t.Fatal(err)
	}
	raw, err := json.Marshal(args)
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, _ := drivertest.Context(r.t, r.t.Context(), nil)
	return r.driver.Invoke(ctx, "runtime", operation, config, raw)
}

func (r *rig) apply(id string, generation uint64, config string) error {
	r.t.Helper()
	_, err := r.invoke("apply", instance.Spec{ID: id, Name: id, Generation: generation, Config: json.RawMessage(config)})
	return err
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) list() map[string]instance.Status {
	r.t.Helper()
	raw, err := r.invoke("list")
	r.must(err)
	var all []instance.Status
	r.must(json.Unmarshal(raw, &all))
	out := map[string]instance.Status{}
	for _, s := range all {
		out[s.ID] = s
	}
	return out
}

// until waits for a task to change by itself.
func (r *rig) until(id, state string) instance.Status {
	r.t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if s := r.list()[id]; s.State == state {
			return s
		}
	}
	r.t.Fatalf("%s is never %s: %+v", id, state, r.list())
	return instance.Status{}
}

var idle = fmt.Sprintf(`{"image":%q,"stop_timeout":"5s"}`, containerdtest.Image)

func TestAppliesKillsAndRemoves(t *testing.T) {
	r := start(t)
	r.config["log_dir"] = t.TempDir()
	if got := r.list(); len(got) != 0 {
		t.Fatalf("list = %v, want nothing", got)
	}
	r.must(r.apply("i-1", 1, fmt.Sprintf(`{"image":%q,"env":{"GREETING":"hello"},"memory_max_bytes":67108864,"pids_max":64,"cpu_max":0.5}`, containerdtest.Image)))
	first := r.PID("i-1")
	if got := r.list()["i-1"]; got.State != instance.Running || got.Generation != 1 || first == 0 {
		t.Errorf("after apply: %+v, pid %d, want generation 1 running", got, first)
	}
	r.limits("i-1")
	r.spoke("i-1", "idle hello")
	// The same again changes nothing, an older one is refused, a newer one replaces.
	r.must(r.apply("i-1", 1, idle))
	if got := r.PID("i-1"); got != first {
		t.Errorf("pid = %d after the same again, want %d", got, first)
	}
	r.must(r.apply("i-1", 3, idle))
	second := r.PID("i-1")
	if got := r.list()["i-1"]; got.Generation != 3 || second == first || second == 0 {
		t.Errorf("after a newer generation: %+v, pid %d", got, second)
	}
	if err := r.apply("i-1", 2, idle); errs.CodeOf(err) != errs.OperationNotAllowed || r.PID("i-1") != second {
		t.Errorf("an older generation = %v, want %s", err, errs.OperationNotAllowed)
	}
	// A newer one that cannot run does not end the older one.
	if err := r.apply("i-1", 4, `{"image":"localhost/none:1"}`); errs.CodeOf(err) != errs.DriverError || r.PID("i-1") != second {
		t.Errorf("a newer one without its image = %v, pid %d, want %d as before", err, r.PID("i-1"), second)
	}
	// A killed task is told as failed, and started by the next apply.
	r.Kill("i-1")
	if got := r.until("i-1", instance.Failed); !strings.Contains(got.Message, "137") {
		t.Errorf("killed: %+v, want its exit code", got)
	}
	r.must(r.apply("i-1", 3, idle))
	if got := r.PID("i-1"); got == 0 || got == second {
		t.Errorf("pid = %d, want another one", got)
	}
	// A reboot takes the task away, and leaves the container.
	r.DropTask("i-1")
	if got := r.list()["i-1"]; got.State != instance.Failed || !strings.Contains(got.Message, "gone") {
		t.Errorf("without its task: %+v, want failed", got)
	}
	r.must(r.apply("i-1", 3, idle))
	if r.PID("i-1") == 0 {
		t.Error("it does not run again")
	}
	for range 2 { // twice: what is not there is no error
		if _, err := r.invoke("remove", "i-1"); err != nil {
			t.Errorf("remove = %v", err)
		}
	}
	if got := r.Left(); len(got) != 0 || len(r.list()) != 0 {
		t.Errorf("left behind: %v", got)
	}
	if _, err := r.Client().SnapshotService(r.Snapshotter).Stat(containerdtest.Context(t.Context()), "i-1"); err == nil {
		t.Error("its snapshot is left behind")
	}
	if _, err := r.invoke("snapshot", "i-1"); errs.CodeOf(err) != errs.UnsupportedOperation {
		t.Errorf("snapshot = %v, want %s", err, errs.UnsupportedOperation)
	}
}

// limits looks at what the container was given.
func (r *rig) limits(id string) {
	r.t.Helper()
	ctx := containerdtest.Context(r.t.Context())
	c, err := r.Client().LoadContainer(ctx, id)
	r.must(err)
	s, err := c.Spec(ctx)
	r.must(err)
	l := s.Linux.Resources
	if l.Memory == nil || *l.Memory.Limit != 64<<20 || l.Pids == nil || l.Pids.Limit != 64 || l.CPU == nil || *l.CPU.Quota != 50000 || *l.CPU.Period != 100000 {
		r.t.Errorf("limits = %+v, %+v, %+v", l.Memory, l.Pids, l.CPU)
	}
}

func (r *rig) spoke(id, want string) {
	r.t.Helper()
	path := filepath.Join(r.config["log_dir"].(string), id+".log")
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if data, err := os.ReadFile(path); err == nil && strings.Contains(string(data), want) {
			return
		}
	}
	r.t.Errorf("%s never says %q", id, want)
}

func TestRestartPolicies(t *testing.T) {
	r := start(t)
	for i, tt := range []struct{ restart, code, want string }{
		{"always", "0", instance.Failed}, {"on-failure", "0", instance.Stopped},
		{"on-failure", "3", instance.Failed}, {"never", "3", instance.Stopped},
	} {
		id := fmt.Sprintf("i-%d", i)
		config := fmt.Sprintf(`{"image":%q,"args":[%q],"restart":%q}`, containerdtest.Image, tt.code, tt.restart)
		r.must(r.apply(id, 1, config))
		if got := r.until(id, tt.want); !strings.Contains(got.Message, "exit code "+tt.code) {
			t.Errorf("%s after exit %s: %+v", tt.restart, tt.code, got)
		}
		if tt.want == instance.Stopped {
			r.must(r.apply(id, 1, config))
			if got := r.list()[id]; got.State != instance.Stopped {
				t.Errorf("%s: another apply made it %+v, want it left alone", tt.restart, got)
			}
		}
		_, err := r.invoke("remove", id)
		r.must(err)
	}
}

// What others made is not listed, and not touched by whatever is asked.
func TestLeavesOthersContainersAlone(t *testing.T) {
	r := start(t)
	r.Plain("db")
	r.Plain("copied", client.WithContainerLabels(map[string]string{labelInstance: "another"}))
	r.Plain("orphan", client.WithContainerLabels(map[string]string{labelInstance: "orphan", labelGeneration: "7", labelStarted: "true"}))
	list := r.list()
	if len(list) != 1 || list["orphan"].Generation != 7 || list["orphan"].State != instance.Running {
		t.Errorf("list = %+v, want the one that carries our mark", list)
	}
	for _, id := range []string{"db", "copied"} {
		was := r.PID(id)
		if _, err := r.invoke("remove", id); errs.CodeOf(err) != errs.OperationNotAllowed {
			t.Errorf("remove of %s = %v, want %s", id, err, errs.OperationNotAllowed)
		}
		if err := r.apply(id, 9, idle); errs.CodeOf(err) != errs.OperationNotAllowed {
			t.Errorf("apply of %s = %v, want %s", id, err, errs.OperationNotAllowed)
		}
		if got := r.PID(id); got != was || got == 0 {
			t.Errorf("%s: pid %d, want %d as before", id, got, was)
		}
	}
	if _, err := r.invoke("remove", "orphan"); err != nil {
		t.Errorf("remove of one with our mark = %v", err)
	}
	left := r.Left()
	slices.Sort(left)
	if !slices.Equal(left, []string{"copied", "db"}) {
		t.Errorf("left = %v", left)
	}
}

// A snapshot is removed to make way only where a start of ours that was cut off
// had left it.
func TestLeavesOthersSnapshotsAlone(t *testing.T) {
	r := start(t)
	ctx := containerdtest.Context(t.Context())
	service := r.Client().SnapshotService(r.Snapshotter)
	// Nothing refers to them: containerd would collect them.
	const root = "containerd.io/gc.root"
	_, err := service.Prepare(ctx, "data", "", snapshots.WithLabels(map[string]string{root: "now"}))
	r.must(err)
	_, err = service.Prepare(ctx, "i-1", "", snapshots.WithLabels(map[string]string{root: "now", labelInstance: "i-1"}))
	r.must(err)
	if err := r.apply("data", 1, idle); errs.CodeOf(err) != errs.OperationNotAllowed {
		t.Errorf("apply of data = %v, want %s", err, errs.OperationNotAllowed)
	}
	if _, err := service.Stat(ctx, "data"); err != nil {
		t.Errorf("another's snapshot: %v, want it as before", err)
	}
	r.must(service.Remove(ctx, "data"))
	r.must(r.apply("i-1", 1, idle))
	_, err = r.invoke("remove", "i-1")
	r.must(err)
}

func TestFailuresHaveCodes(t *testing.T) {
	r := start(t)
	if err := r.apply("i-1", 1, `{"image":"localhost/none:1"}`); errs.CodeOf(err) != errs.DriverError || !strings.Contains(err.Error(), "localhost/none:1") {
		t.Errorf("a missing image = %v", err)
	}
	if err := r.apply("i-1", 0, idle); errs.CodeOf(err) != errs.InvalidArgs {
		t.Errorf("generation 0 = %v, want %s", err, errs.InvalidArgs)
	}
	r.config["handler"] = "io.containerd.none.v9"
	if err := r.apply("i-1", 1, idle); errs.CodeOf(err) != errs.DriverError {
		t.Errorf("a handler that is not there = %v, want %s", err, errs.DriverError)
	}
	// A start that failed is told, and can be made good.
	if got := r.list()["i-1"]; got.State != instance.Failed {
		t.Errorf("after it: %+v, want failed", got)
	}
	r.config["handler"] = "io.containerd.runc.v2"
	r.must(r.apply("i-1", 2, idle))
	if _, err := r.invoke("remove", "i-1"); err != nil {
		t.Error(err)
	}
	r.config["address"] = filepath.Join(t.TempDir(), "none.sock")
	if _, err := r.invoke("list"); errs.CodeOf(err) != errs.Unreachable || !errs.From(err).Retryable {
		t.Errorf("no containerd = %v, want %s, retryable", err, errs.Unreachable)
	}
	r.config["handler"] = "runc"
	if _, err := r.invoke("list"); errs.CodeOf(err) != errs.InvalidConfig {
		t.Errorf("a handler of no form = %v, want %s", err, errs.InvalidConfig)
	}
}

// Kata is a matter of configuration, and of machines that can run machines.
func TestKataByConfiguration(t *testing.T) {
	if _, err := os.Stat("/dev/kvm"); err != nil {
		t.Skip("needs KVM: there is no /dev/kvm")
	}
	if _, err := exec.LookPath("containerd-shim-kata-v2"); err != nil {
		t.Skip("needs KVM: containerd-shim-kata-v2, which makes machines with it, is not installed")
	}
	r := start(t)
	r.config["handler"] = "io.containerd.kata.v2"
	r.must(r.apply("i-1", 1, idle))
	if got := r.list()["i-1"]; got.State != instance.Running {
		t.Errorf("under Kata: %+v, want running", got)
	}
	if _, err := r.invoke("remove", "i-1"); err != nil {
		t.Error(err)
	}
}

func TestParseSpec(t *testing.T) {
	for text, want := range map[string]string{
		`{"image":"docker.io/library/nginx:1.27","args":["-g"],"env":{"A":"1"},"restart":"never","stop_timeout":"1m","host_network":true,"memory_max_bytes":4194304,"pids_max":1,"cpu_max":2}`: "",
		`{}`:                                    "image",
		`{"image":"a b"}`:                       "image",
		`{"image":"a"} []`:                      "follows",
		`{"image":"a","privileged":true}`:       "unknown field",
		`{"image":"a","args":["\u0000"]}`:       "args",
		`{"image":"a","env":{"A=":"1"}}`:        "env",
		`{"image":"a","restart":"sometimes"}`:   "restart",
		`{"image":"a","stop_timeout":"1h"}`:     "stop_timeout",
		`{"image":"a","memory_max_bytes":4096}`: "memory_max_bytes",
		`{"image":"a","cpu_max":0.001}`:         "cpu_max",
		`{"image":"a","pids_max":-1}`:           "pids_max",
		`null`:                                  "image",
	} {
		_, err := parseSpec([]byte(text))
		switch {
		case want == "" && err != nil:
			t.Errorf("parseSpec(%s) = %v, want none", text, err)
		case want != "" && (errs.CodeOf(err) != errs.InvalidArgs || !strings.Contains(err.Error(), want)):
			t.Errorf("parseSpec(%s) = %v, want %q", text, err, want)
		}
	}
}

func TestJudge(t *testing.T) {
	zero, three := uint32(0), uint32(3)
	for _, tt := range []struct {
		restart string
		exit    *uint32
		want    string
	}{
		{always, &zero, instance.Failed}, {always, nil, instance.Failed}, {onFailure, &zero, instance.Stopped}, {onFailure, &three, instance.Failed},
		{onFailure, nil, instance.Failed}, {never, &three, instance.Stopped}, {never, nil, instance.Stopped},
	} {
		if got, _ := judge(map[string]string{labelRestart: tt.restart, labelStarted: "true"}, tt.exit); got != tt.want {
			t.Errorf("judge(%s, %v) = %s, want %s", tt.restart, tt.exit, got, tt.want)
		}
	}
	if got, _ := judge(map[string]string{labelRestart: never}, nil); got != instance.Failed {
		t.Errorf("one that never started = %s, want %s", got, instance.Failed)
	}
}

func FuzzParseSpec(f *testing.F) {
	f.Add([]byte(`{"image":"docker.io/library/nginx:1.27","env":{"A":"1"},"memory_max_bytes":4194304}`))
	f.Add([]byte(`{"image":""}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if s, err := parseSpec(data); err == nil && (s.Image == "" || s.Restart == "" || s.CPUMax < 0) {
			t.Errorf("parseSpec(%q) = %+v", data, s)
		}
	})
}
