package process

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/procstat"
	"github.com/better-compute/site-appliance/plugins/instance"
)

const gateWord = "instance-gate"

func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case gateWord:
			os.Exit(GateMain(os.Args[2:]))
		case "instance":
			play(os.Args[2:])
			os.Exit(0)
		case "agent":
			agent(os.Args[2], os.Args[3], os.Args[4])
			os.Exit(0)
		case "churn":
			churn(os.Args[2], os.Args[3], os.Args[4])
			os.Exit(0)
		}
	}
	os.Exit(m.Run())
}

// play is what instances do in these tests.
func play(args []string) {
	switch args[0] {
	case "exit":
		code, _ := strconv.Atoi(args[1])
		fmt.Println("ends")
		os.Exit(code)
	case "stubborn":
		signal.Ignore(syscall.SIGTERM)
	case "family": // a grandchild with a session of its own, which ignores SIGTERM
		cmd := exec.Command(os.Args[0], "instance", "stubborn", "")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := cmd.Start(); err != nil {
			os.Exit(9)
		}
		os.WriteFile(args[1], []byte(strconv.Itoa(cmd.Process.Pid)), 0o600)
	case "chatter":
		fmt.Println(os.Getenv("BC_INSTANCE"), os.Getenv("GREETING"), os.Getpid(), os.Getuid())
	}
	time.Sleep(time.Hour)
}

// agent applies one instance and waits to be killed.
func agent(dir, cgroup, spec string) {
	r, err := Open(Options{Dir: dir, Cgroup: cgroup, Gate: gate(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		fmt.Println("error", err)
		return
	}
	var s instance.Spec
	if err := json.Unmarshal([]byte(spec), &s); err != nil {
		fmt.Println("error", err)
		return
	}
	if err := r.Apply(context.Background(), s); err != nil {
		fmt.Println("error", err)
		return
	}
	fmt.Println("ready")
	time.Sleep(time.Hour)
}

// churn applies one generation after the other until it is killed.
func churn(dir, cgroup, id string) {
	r, err := Open(Options{Dir: dir, Cgroup: cgroup, Gate: gate(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		fmt.Println("error", err)
		return
	}
	all, err := r.List(context.Background())
	if err != nil {
		fmt.Println("error", err)
		return
	}
	generation := uint64(1)
	if len(all) > 0 {
		generation = all[0].Generation + 1
	}
	fmt.Println("ready")
	for ; ; generation++ {
		config, _ := json.Marshal(Config{Argv: []string{os.Args[0], "instance", "sleep"}, StopTimeout: "5s"})
		if err := r.Apply(context.Background(), instance.Spec{ID: id, Name: id, Generation: generation, Config: config}); err != nil {
			fmt.Println("error", err)
			return
		}
	}
}

func gate() []string { return []string{"/proc/self/exe", gateWord} }

func self(t *testing.T) string {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func spec(t *testing.T, id string, generation uint64, c Config) instance.Spec {
	t.Helper()
	raw, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	return instance.Spec{ID: id, Name: id, Generation: generation, Config: raw}
}

func (o Options) open(t *testing.T) *Runtime {
	t.Helper()
	r, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

// options gives a folder, with cgroups where this machine lets us and with is set.
func options(t *testing.T, with bool) Options {
	t.Helper()
	o := Options{Dir: t.TempDir(), Gate: gate(), Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	if with {
		parent := DefaultCgroup()
		if parent == "" || os.Geteuid() != 0 {
			t.Skip("needs root: cgroup v2 that this test may change")
		}
		o.Cgroup = filepath.Join(filepath.Dir(parent), fmt.Sprintf("bc-test-%d-%s", os.Getpid(), strings.ToLower(filepath.Base(o.Dir))))
		t.Cleanup(func() {
			groups, _ := filepath.Glob(o.Cgroup + "/*.*")
			for _, g := range groups {
				if st, err := os.Stat(g); err == nil && st.IsDir() {
					killGroup(g)
				}
			}
			os.Remove(o.Cgroup)
		})
	}
	return o
}

// until waits for a condition that another process brings about.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

func state(t *testing.T, r *Runtime, id string) instance.Status {
	t.Helper()
	all, err := r.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		if s.ID == id {
			return s
		}
	}
	return instance.Status{}
}

func pid(r *Runtime, id string) int {
	p, _ := r.find(id, false)
	if p == nil || p.record().Run == nil {
		return 0
	}
	return p.record().Run.PID
}

// starts counts what the instance's runs wrote.
func starts(t *testing.T, r *Runtime, id string) int {
	t.Helper()
	last := -1
	until(t, "the output rests", func() bool {
		data, err := os.ReadFile(r.outputPath(id))
		if err != nil {
			t.Fatal(err)
		}
		n := strings.Count(string(data), "ends")
		running := state(t, r, id).State == instance.Running
		rests := !running && n == last
		last = n
		return rests
	})
	return last
}

func alive(pid int) bool {
	st, err := procstat.Read(pid)
	return err == nil && st.State != 'Z'
}

func both(t *testing.T, f func(t *testing.T, o Options)) {
	t.Helper()
	t.Run("cgroup", func(t *testing.T) { f(t, options(t, true)) })
	t.Run("session", func(t *testing.T) { f(t, options(t, false)) })
}

func TestAppliesReplacesAndRemoves(t *testing.T) {
	both(t, func(t *testing.T, o Options) {
		r := o.open(t)
		c := Config{Argv: []string{self(t), "instance", "chatter"}, Env: map[string]string{"GREETING": "hello"}}
		if err := r.Apply(t.Context(), spec(t, "i-1", 2, c)); err != nil {
			t.Fatal(err)
		}
		first := pid(r, "i-1")
		if got := state(t, r, "i-1"); got.State != instance.Running || got.Generation != 2 {
			t.Errorf("List() = %+v, want generation 2 running", got)
		}
		until(t, "the instance speaks", func() bool {
			data, _ := os.ReadFile(r.outputPath("i-1"))
			return strings.Contains(string(data), "i-1 hello "+strconv.Itoa(first))
		})
		if sid, err := unix.Getsid(first); err != nil || sid != first {
			t.Errorf("session = %d, %v, want its own, %d", sid, err, first)
		}
		if o.Cgroup != "" {
			data, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(first), "cgroup"))
			if !strings.Contains(string(data), filepath.Base(o.Cgroup)+"/i-1.") {
				t.Errorf("cgroup = %s, want one of its own", data)
			}
		}
		// The same again changes nothing; an older one is refused.
		if err := r.Apply(t.Context(), spec(t, "i-1", 2, c)); err != nil || pid(r, "i-1") != first {
			t.Errorf("the same generation again = %v, pid %d, want none and %d", err, pid(r, "i-1"), first)
		}
		if err := r.Apply(t.Context(), spec(t, "i-1", 1, c)); errs.CodeOf(err) != errs.OperationNotAllowed || pid(r, "i-1") != first {
			t.Errorf("an older generation = %v, want %s", err, errs.OperationNotAllowed)
		}
		if err := r.Apply(t.Context(), spec(t, "i-1", 3, c)); err != nil {
			t.Fatal(err)
		}
		if pid(r, "i-1") == first || alive(first) {
			t.Error("a newer generation did not replace the older one")
		}
		second := pid(r, "i-1")
		if err := r.Remove(t.Context(), "i-1"); err != nil {
			t.Fatal(err)
		}
		if alive(second) || state(t, r, "i-1").ID != "" {
			t.Error("it is still there after Remove")
		}
		if err := r.Remove(t.Context(), "i-1"); err != nil {
			t.Errorf("Remove of nothing = %v", err)
		}
		left, _ := os.ReadDir(o.Dir)
		if len(left) != 0 {
			t.Errorf("left behind: %v", left)
		}
	})
}

func TestRestartPolicies(t *testing.T) {
	o := options(t, false)
	r := o.open(t)
	for i, tt := range []struct {
		restart, code, want string
	}{
		{"", "0", instance.Failed}, {always, "3", instance.Failed}, {onFailure, "0", instance.Stopped},
		{onFailure, "3", instance.Failed}, {never, "3", instance.Stopped},
	} {
		id := fmt.Sprintf("i-%d", i)
		s := spec(t, id, 1, Config{Argv: []string{self(t), "instance", "exit", tt.code}, Restart: tt.restart})
		if err := r.Apply(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		until(t, "it ends", func() bool { return state(t, r, id).State != instance.Running })
		got := state(t, r, id)
		if got.State != tt.want || !strings.Contains(got.Message, "exit code "+tt.code) {
			t.Errorf("restart %q after exit %s = %+v, want %s", tt.restart, tt.code, got, tt.want)
		}
		select {
		case <-r.Changed():
		case <-time.After(20 * time.Second):
			t.Error("an end was not told")
		}
		// Another Apply starts what failed, and leaves what stopped.
		before := starts(t, r, id)
		if err := r.Apply(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		if got, want := starts(t, r, id) > before, tt.want == instance.Failed; got != want {
			t.Errorf("restart %q after exit %s: another Apply started it: %v, want %v", tt.restart, tt.code, got, want)
		}
	}
}

func TestKillsWhatWillNotEndAndWhatLeft(t *testing.T) {
	both(t, func(t *testing.T, o Options) {
		r := o.open(t)
		child := filepath.Join(t.TempDir(), "pid")
		for _, s := range []instance.Spec{
			spec(t, "stubborn", 1, Config{Argv: []string{self(t), "instance", "stubborn"}, StopTimeout: "50ms"}),
			spec(t, "family", 1, Config{Argv: []string{self(t), "instance", "family", child}, StopTimeout: "5s"}),
		} {
			if err := r.Apply(t.Context(), s); err != nil {
				t.Fatal(err)
			}
		}
		var grandchild int
		until(t, "the grandchild runs", func() bool {
			data, _ := os.ReadFile(child)
			grandchild, _ = strconv.Atoi(string(data))
			return grandchild > 0 && alive(grandchild)
		})
		stubborn := pid(r, "stubborn")
		for _, id := range []string{"stubborn", "family"} {
			if err := r.Remove(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}
		if alive(stubborn) || alive(grandchild) {
			t.Errorf("after Remove: stubborn alive %v, setsid grandchild alive %v", alive(stubborn), alive(grandchild))
		}
	})
}

// kill -9 of the agent: what runs goes on, and the next agent takes it up.
func TestTakesUpWhatAKilledAgentLeft(t *testing.T) {
	both(t, func(t *testing.T, o Options) {
		s := spec(t, "i-1", 4, Config{Argv: []string{self(t), "instance", "sleep"}})
		raw, _ := json.Marshal(s)
		cmd := exec.Command(self(t), "agent", o.Dir, o.Cgroup, string(raw))
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		line, _ := bufio.NewReader(out).ReadString('\n')
		if line != "ready\n" {
			t.Fatalf("agent says %q", line)
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		cmd.Wait()

		r := o.open(t)
		if got := state(t, r, "i-1"); got.State != instance.Running || got.Generation != 4 {
			t.Fatalf("after the agent's death List() = %+v, want generation 4 running", got)
		}
		was := pid(r, "i-1")
		if err := r.Apply(t.Context(), s); err != nil || pid(r, "i-1") != was {
			t.Errorf("Apply = %v and pid %d, want the process %d that runs", err, pid(r, "i-1"), was)
		}
		// Its end is seen too, though nobody knows how it ended.
		if err := syscall.Kill(was, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		until(t, "its end is seen", func() bool { return state(t, r, "i-1").State == instance.Failed })
		if err := r.Apply(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		again := pid(r, "i-1")
		if again == was || !alive(again) {
			t.Error("it does not run again")
		}
		if err := r.Remove(t.Context(), "i-1"); err != nil || alive(again) {
			t.Errorf("Remove = %v, alive %v", err, alive(again))
		}
	})
}

// Whenever an agent is killed, the next one knows what runs: never two processes
// of an instance, never one that nobody knows.
func TestKilledAtAnyMoment(t *testing.T) {
	both(t, func(t *testing.T, o Options) {
		id := "i-" + strings.ToLower(filepath.Base(filepath.Dir(o.Dir)))[:20] + strconv.Itoa(os.Getpid())
		for round := range 10 {
			cmd := exec.Command(self(t), "churn", o.Dir, o.Cgroup, id)
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			lines := bufio.NewReader(out)
			if line, _ := lines.ReadString('\n'); line != "ready\n" {
				t.Fatalf("agent says %q", line)
			}
			time.Sleep(time.Duration(round) * 3 * time.Millisecond) // into another moment each time
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			rest, _ := io.ReadAll(lines)
			cmd.Wait()
			if len(rest) != 0 {
				t.Fatalf("agent says %q", rest)
			}
			r := o.open(t)
			// A gate whose agent died is about to give up.
			until(t, "what runs is what is known", func() bool {
				var want []int
				if known := pid(r, id); known != 0 {
					want = []int{known}
				}
				return slices.Equal(running(id), want)
			})
			r.Close()
		}
		r := o.open(t)
		if err := r.Remove(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		if got := running(id); len(got) != 0 {
			t.Errorf("left running: %v", got)
		}
		r.Close()
		if o.Cgroup != "" {
			if _, err := os.Stat(o.Cgroup); err == nil {
				left, _ := filepath.Glob(o.Cgroup + "/*.*.*")
				t.Errorf("cgroups are left: %v", left)
			}
		}
	})
}

// running are the processes that carry an instance's name.
func running(id string) []int {
	var all []int
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range dirs {
		n, err := strconv.Atoi(filepath.Base(d))
		if err == nil && marked(n, []byte("BC_INSTANCE="+id)) && alive(n) {
			all = append(all, n)
		}
	}
	return all
}

func TestClosedRuntimeLeavesInstancesRunning(t *testing.T) {
	o := options(t, false)
	r := o.open(t)
	s := spec(t, "i-1", 1, Config{Argv: []string{self(t), "instance", "sleep"}})
	if err := r.Apply(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	was := pid(r, "i-1")
	if second, err := Open(o); err == nil {
		second.Close()
		t.Error("a second runtime opened the same folder")
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if !alive(was) {
		t.Fatal("closing the runtime ended the instance")
	}
	if err := r.Apply(t.Context(), s); errs.CodeOf(err) != errs.Unavailable {
		t.Errorf("Apply after Close = %v, want %s", err, errs.Unavailable)
	}
	again := o.open(t)
	if err := again.Remove(t.Context(), "i-1"); err != nil || alive(was) {
		t.Errorf("Remove = %v, alive %v", err, alive(was))
	}
}

// A number that came to mean another process is never touched.
func TestLeavesARecycledNumberAlone(t *testing.T) {
	o := options(t, false)
	other := exec.Command(self(t), "instance", "sleep")
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { other.Process.Kill(); other.Wait() })
	st, err := procstat.Read(other.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	boot := "boot-1"
	for name, at := range map[string]identity{
		"another start": {other.Process.Pid, st.Start - 1, boot},
		"another boot":  {other.Process.Pid, st.Start, "boot-0"},
		"the very one":  {other.Process.Pid, st.Start, boot},
	} {
		dir := t.TempDir()
		s := spec(t, "i-1", 1, Config{Argv: []string{self(t), "instance", "sleep"}})
		data, _ := json.Marshal(record{Spec: s, Run: &run{identity: at, Mark: "0123456789abcdef"}})
		if err := os.WriteFile(filepath.Join(dir, "i-1.json"), data, 0o600); err != nil {
			t.Fatal(err)
		}
		o.Dir, o.BootID = dir, boot
		r := o.open(t)
		want := instance.Failed
		if name == "the very one" {
			want = instance.Running
		}
		if got := state(t, r, "i-1"); got.State != want {
			t.Errorf("%s: List() = %+v, want %s", name, got, want)
		}
		if want == instance.Failed {
			if err := r.Remove(t.Context(), "i-1"); err != nil {
				t.Error(err)
			}
		}
		if !alive(other.Process.Pid) {
			t.Fatalf("%s: the other process was killed", name)
		}
		r.Close()
	}
}

// Nothing unknown runs: a gate whose agent died before it wrote the process
// down gives up, and one that hears the word goes on.
func TestGate(t *testing.T) {
	for word, want := range map[string]int{"": exitGate, "x": 7} {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(self(t), gateWord, self(t), "instance", "exit", "7")
		cmd.ExtraFiles = []*os.File{r}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		r.Close()
		w.WriteString(word)
		w.Close()
		var exit *exec.ExitError
		if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != want {
			t.Errorf("gate that hears %q = %v, want exit code %d", word, err, want)
		}
	}
	if got := GateMain(nil); got != exitGate {
		t.Errorf("GateMain() = %d, want %d", got, exitGate)
	}
}

func TestGroupWithoutARecordIsReportedAndKilledOnRequestOnly(t *testing.T) {
	o := options(t, true)
	r := o.open(t)
	if err := r.Apply(t.Context(), spec(t, "i-1", 1, Config{Argv: []string{self(t), "instance", "sleep"}})); err != nil {
		t.Fatal(err)
	}
	was := pid(r, "i-1")
	r.Close()
	if err := os.Remove(filepath.Join(o.Dir, "i-1.json")); err != nil {
		t.Fatal(err)
	}
	empty := filepath.Join(o.Cgroup, "i-2.0123456789abcdef")
	if err := os.Mkdir(empty, 0o755); err != nil {
		t.Fatal(err)
	}
	r = o.open(t)
	if _, err := os.Stat(empty); err == nil {
		t.Error("an empty group of a start that was cut off is left")
	}
	if got := state(t, r, "i-1"); got.State != instance.Running || got.Generation != 0 || !strings.Contains(got.Message, "no record") {
		t.Errorf("List() = %+v, want it running and unknown", got)
	}
	if !alive(was) {
		t.Error("it was killed unasked")
	}
	if err := r.Remove(t.Context(), "i-1"); err != nil || alive(was) {
		t.Errorf("Remove = %v, alive %v", err, alive(was))
	}
}

func TestDamagedRecordIsSetAside(t *testing.T) {
	o := options(t, false)
	for name, text := range map[string]string{
		"a.json": "{", "b.json": `{"spec":{"id":"other","generation":1}}`, "c.json": `{"spec":{"id":"c"},"run":{"pid":1,"mark":"x"}}`,
		"d.json": `{"spec":{"id":"d","generation":1,"config":{"argv":["/bin/true"]}},"ended":{"known":true,"code":2}}`,
	} {
		if err := os.WriteFile(filepath.Join(o.Dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r := o.open(t)
	all, err := r.List(t.Context())
	if err != nil || len(all) != 1 || all[0].ID != "d" {
		t.Errorf("List() = %+v, %v, want d alone", all, err)
	}
	if damaged, _ := filepath.Glob(o.Dir + "/*.damaged"); len(damaged) != 3 {
		t.Errorf("set aside: %v, want 3", damaged)
	}
}

func TestRunsAsAnotherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: an instance gets another uid")
	}
	r := options(t, false).open(t)
	if err := r.Apply(t.Context(), spec(t, "i-1", 1, Config{Argv: []string{"/bin/sleep", "3600"}, User: "nobody"})); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	at := "/proc/" + strconv.Itoa(pid(r, "i-1"))
	if err := unix.Stat(at, &st); err != nil || st.Uid == 0 {
		t.Errorf("uid = %d, %v, want nobody's", st.Uid, err)
	}
	until(t, "the gate went on to the program", func() bool {
		exe, _ := os.Readlink(at + "/exe")
		return strings.HasSuffix(exe, "sleep") || strings.HasSuffix(exe, "busybox") || strings.HasSuffix(exe, "coreutils")
	})
	if fds, err := os.ReadDir(at + "/fd"); err != nil || len(fds) != 3 {
		t.Errorf("descriptors = %v, %v, want stdin, stdout and stderr", fds, err)
	}
	if err := r.Remove(t.Context(), "i-1"); err != nil {
		t.Error(err)
	}
}

func TestRefusals(t *testing.T) {
	r := options(t, false).open(t)
	good := Config{Argv: []string{self(t), "instance", "sleep"}}
	for name, tt := range map[string]struct {
		id   string
		gen  uint64
		edit func(*Config)
		want errs.Code
	}{
		"id":         {"../x", 1, nil, errs.InvalidArgs},
		"generation": {"a", 0, nil, errs.InvalidArgs},
		"relative":   {"a", 1, func(c *Config) { c.Argv[0] = "sleep" }, errs.InvalidConfig},
		"absent":     {"a", 1, func(c *Config) { c.Argv[0] = "/no/such/program" }, errs.InvalidConfig},
		"a folder":   {"a", 1, func(c *Config) { c.Argv[0] = "/tmp" }, errs.InvalidConfig},
		"dir":        {"a", 1, func(c *Config) { c.Dir = "/no/such/folder" }, errs.InvalidConfig},
		"dir file":   {"a", 1, func(c *Config) { c.Dir = "/proc/self/stat" }, errs.InvalidConfig},
		"user":       {"a", 1, func(c *Config) { c.User = "no-such-user" }, errs.InvalidConfig},
		"limits":     {"a", 1, func(c *Config) { c.Limits.PidsMax = 8 }, errs.UnsupportedOperation},
	} {
		c := good
		c.Argv = append([]string{}, good.Argv...)
		if tt.edit != nil {
			tt.edit(&c)
		}
		if err := r.Apply(t.Context(), spec(t, tt.id, tt.gen, c)); errs.CodeOf(err) != tt.want {
			t.Errorf("%s: Apply() = %v, want %s", name, err, tt.want)
		}
	}
	if all, err := r.List(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("List() = %v, %v, want nothing", all, err)
	}
	if err := r.Remove(t.Context(), "../x"); errs.CodeOf(err) != errs.InvalidArgs {
		t.Errorf("Remove(../x) = %v", err)
	}
	if err := r.Apply(t.Context(), spec(t, "a", 1, good)); err != nil {
		t.Errorf("the same without a fault = %v", err)
	}
	// A newer generation that cannot run does not end the older one.
	was := pid(r, "a")
	limited := good
	limited.Limits.PidsMax = 8
	if err := r.Apply(t.Context(), spec(t, "a", 2, limited)); errs.CodeOf(err) != errs.UnsupportedOperation || pid(r, "a") != was {
		t.Errorf("a newer one that cannot run = %v, pid %d, want %d as before", err, pid(r, "a"), was)
	}
	if err := r.Remove(t.Context(), "a"); err != nil {
		t.Error(err)
	}
}

func TestOutputIsCut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "out.log")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(maxOutput); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("the end"), maxOutput-7); err != nil {
		t.Fatal(err)
	}
	r := &Runtime{o: Options{Dir: filepath.Dir(path), Log: slog.New(slog.DiscardHandler)}}
	r.trim("out")
	kept, err := os.ReadFile(path + ".1")
	if err != nil || len(kept) != keepOutput || !strings.HasSuffix(string(kept), "the end") {
		t.Errorf("kept %d bytes, %v, want the last %d", len(kept), err, keepOutput)
	}
	if st, err := os.Stat(path); err != nil || st.Size() != 0 {
		t.Errorf("the output begins anew: %v, %v", st, err)
	}
}

func TestLimitSettings(t *testing.T) {
	files, controllers := Limits{MemoryMaxBytes: 1 << 20, PidsMax: 7, CPUMax: 1.5}.settings()
	want := map[string]string{"memory.max": "1048576", "pids.max": "7", "cpu.max": "150000 100000"}
	if len(files) != len(want) || len(controllers) != 3 {
		t.Errorf("settings() = %v, %v", files, controllers)
	}
	for file, value := range want {
		if files[file] != value {
			t.Errorf("%s = %q, want %q", file, files[file], value)
		}
	}
	if files, controllers := (Limits{}).settings(); len(files)+len(controllers) != 0 {
		t.Errorf("no limits = %v, %v", files, controllers)
	}
}
