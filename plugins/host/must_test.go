package host_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/plugins/host"
	"github.com/better-compute/site-appliance/plugins/host/hosttest"
)

// unifiedCgroup makes a group for one test, and expects it to be empty at the end.
func unifiedCgroup(t testing.TB) string {
	t.Helper()
	for _, dir := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		if _, err := os.Stat(filepath.Join(dir, "cgroup.controllers")); err != nil {
			continue
		}
		path, err := os.MkdirTemp(dir, "bcx-test-")
		if err != nil {
			t.Skip("needs a writable cgroup v2: " + err.Error())
		}
		t.Cleanup(func() {
			if err := os.Remove(path); err != nil {
				t.Errorf("the cgroup is not empty: %v", err)
			}
		})
		return path
	}
	t.Skip("needs cgroup v2")
	return ""
}

// killedHost runs a host in a process of its own and kills it once it has made
// calls; its numbers are the plugin's process and what the calls answered.
func killedHost(t testing.TB, c host.Config, calls string, n int) (pids []int) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{
		"HOST_TO_KILL=" + c.Dir, "SOCKET_ROOT=" + c.SocketRoot, "PLUGIN_USER=" + c.User, "CGROUP=" + c.Cgroup, "CALLS=" + calls,
	}
	cmd.Stderr = t.Output()
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for range n {
		var pid int
		if _, err := fmt.Fscan(stdout, &pid); err != nil || gone(pid) {
			t.Fatalf("the host runs %d, %v", pid, err)
		}
		pids = append(pids, pid)
	}
	// Its load has begun: any moment will do.
	time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond)
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	return pids
}

func left(t testing.TB, root string) []string {
	t.Helper()
	entries, err := os.ReadDir(root)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// The kernel ends a plugin with its host, although the shim has changed its
// uid, which clears the death signal, and although it looks at no signal and at
// no end of stdin, and goes on writing.
func TestPluginDiesWithItsHost(t *testing.T) {
	hosttest.NeedsRoot(t)
	for _, name := range []string{"echo", "stubborn"} {
		d := hosttest.NewDir(t)
		d.Add(name, hosttest.Self(t))
		pid := killedHost(t, d.Config(), "", 1)[0]
		eventually(t, name+" dies with its host", func() bool { return gone(pid) })
	}
}

// What a killed host leaves is gone once the next one has started: a child in
// the plugin's group that cleaned its environment, one that left the group, the
// folders and the records.
func TestNextHostSweeps(t *testing.T) {
	hosttest.NeedsRoot(t)
	d := hosttest.NewDir(t)
	d.Add("echo", hosttest.Self(t))
	c := d.Config()
	pids := killedHost(t, c, "escape escape:1 spawn", 4)
	eventually(t, "the plugin dies with its host", func() bool { return gone(pids[0]) })
	for _, pid := range pids[1:] {
		if gone(pid) {
			t.Errorf("process %d did not outlive the host: there is nothing to sweep", pid)
		}
	}
	if names := left(t, c.SocketRoot); len(names) != 2 {
		t.Errorf("left behind: %v, want a folder and its record", names)
	}
	h := hosttest.Start(t, c)
	for _, pid := range pids {
		if !gone(pid) {
			t.Errorf("process %d is left after the next start", pid)
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	if out, err := call(h, "echo", `"on"`); err != nil || out != `["on"]` {
		t.Errorf("call after that: %s, %v", out, err)
	}
	h.Close()
	if names := left(t, c.SocketRoot); len(names) != 0 {
		t.Errorf("left after Close: %v", names)
	}
}

// A cgroup holds even what has left the group and has nothing in its environment.
func TestNextHostSweepsTheCgroup(t *testing.T) {
	hosttest.NeedsRoot(t)
	d := hosttest.NewDir(t)
	d.Add("echo", hosttest.Self(t))
	c := d.Config()
	c.Cgroup = unifiedCgroup(t)
	pids := killedHost(t, c, "escape", 2)
	// The plugin is gone from the pins: its group is swept all the same.
	d.WritePins("")
	hosttest.Start(t, c)
	for _, pid := range pids {
		eventually(t, fmt.Sprintf("process %d is gone", pid), func() bool { return gone(pid) })
	}
	if groups, _ := filepath.Glob(filepath.Join(c.Cgroup, "plugin-*")); len(groups) != 0 {
		t.Errorf("groups left: %v", groups)
	}
}

// Two hosts may share a folder of sockets: neither sweeps the other's plugins.
func TestSweepSparesALivingHost(t *testing.T) {
	hosttest.NeedsRoot(t)
	d := hosttest.NewDir(t)
	d.Add("echo", hosttest.Self(t))
	c := d.Config()
	first := hosttest.Start(t, c)
	pid := status(t, first, "echo").PID
	second := hosttest.Start(t, c)
	for _, h := range []*host.Host{first, second} {
		if out, err := call(h, "echo", `"on"`); err != nil || out != `["on"]` {
			t.Errorf("call: %s, %v", out, err)
		}
	}
	if s := status(t, first, "echo"); s.PID != pid || s.Restarts != 0 {
		t.Errorf("status = %+v, want the run of before", s)
	}
}

// The path of a socket is checked before anything is started.
func TestSocketPathLimit(t *testing.T) {
	hosttest.NeedsRoot(t)
	d := hosttest.NewDir(t)
	d.Add("echo", hosttest.Self(t))
	const tail = "/p12345678/plugin.sock"
	for length, runs := range map[int]bool{107: true, 108: false} {
		c := d.Config()
		c.SocketRoot += "/" + strings.Repeat("d", length-len(c.SocketRoot)-1-len(tail))
		h := hosttest.Start(t, c)
		s := status(t, h, "echo")
		if (s.State == "running") != runs {
			t.Errorf("socket path of %d bytes: %+v, want running %v", length, s, runs)
		}
		if !runs && (!strings.Contains(s.Reason, "108 bytes, limit 107") || !strings.Contains(s.Reason, c.SocketRoot)) {
			t.Errorf("reason = %q, want the path and the limit", s.Reason)
		}
		if names := left(t, c.SocketRoot); !runs && len(names) != 0 {
			t.Errorf("left behind: %v", names)
		}
	}
}

// A descendant that keeps stderr open does not hold up the restart.
func TestGrandchildHoldsStderr(t *testing.T) {
	_, h := startEcho(t)
	out, err := call(h, "escape")
	pid, _ := strconv.Atoi(out)
	if err != nil || pid == 0 {
		t.Fatalf("escape = %s, %v", out, err)
	}
	defer func() { _ = syscall.Kill(pid, syscall.SIGKILL) }()
	_, _ = call(h, "crash")
	eventually(t, "the plugin runs again", func() bool { return status(t, h, "echo").Restarts == 1 })
	if gone(pid) {
		t.Error("the descendant is gone: it held nothing")
	}
}

// busy keeps every processor busy until stop is called: a goroutine that waits for
// the kernel then goes on upon another thread, and leaves its own idle.
func busy() (stop func()) {
	var all sync.WaitGroup
	done := make(chan struct{})
	for range 4 * runtime.GOMAXPROCS(0) {
		all.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
					for end := time.Now().Add(100 * time.Microsecond); time.Now().Before(end); {
					}
					runtime.Gosched()
				}
			}
		})
	}
	return func() { close(done); all.Wait() }
}

// endIdleThreads ends the threads that do nothing just now: goroutines that end
// locked take theirs with them, and so many at a time leave none out.
func endIdleThreads() {
	var all sync.WaitGroup
	together := make(chan struct{})
	for range 128 {
		all.Go(func() {
			runtime.LockOSThread()
			<-together
		})
	}
	time.Sleep(20 * time.Millisecond)
	close(together)
	all.Wait()
	time.Sleep(50 * time.Millisecond)
}

// The death signal comes when the thread that started the plugin ends, not the
// process: plugins outlive the threads around their start.
func TestDeathSignalFollowsTheThread(t *testing.T) {
	hosttest.NeedsRoot(t)
	d := hosttest.NewDir(t)
	for i := range 12 {
		d.Add(fmt.Sprintf("echo%d", i), hosttest.Self(t))
	}
	c := d.Config()
	for range 3 {
		stop := busy()
		h, err := host.Start(t.Context(), c)
		stop()
		if err != nil {
			t.Fatal(err)
		}
		endIdleThreads()
		for _, s := range h.Status() {
			if s.State != "running" || s.Restarts != 0 {
				t.Errorf("%+v, want the plugin to outlive the thread", s)
			}
		}
		h.Close()
	}
}

// While somebody has the file open for writing, the plugin stays down and says
// why; once he is done it comes back by itself.
func TestWriterHoldsTheFile(t *testing.T) {
	d, h := startEcho(t)
	path := filepath.Join(d.Path, "echo")
	w, err := os.OpenFile(path+".new", os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, err := w.Write(hosttest.Self(t)); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	_, _ = call(h, "crash")
	eventually(t, "the open file is refused", func() bool {
		s := status(t, h, "echo")
		return s.State == "restarting" && strings.Contains(s.Reason, "is open for writing: text file busy")
	})
	w.Close()
	eventually(t, "the plugin runs again", func() bool { return status(t, h, "echo").State == "running" })
}

// A plugin gets three descriptors, whatever the host has open.
func TestInheritedDescriptors(t *testing.T) {
	fd, err := unix.Open("/etc/passwd", unix.O_RDONLY, 0) // not close-on-exec
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	_, h := startEcho(t)
	if out, err := call(h, "inherited"); err != nil || out != "null" {
		t.Errorf("descriptors handed on beside 0, 1 and 2 = %s, %v", out, err)
	}
}

// The first calls after a crash say that the plugin is gone or restarting, and
// never that somebody cancelled them.
func TestFirstCallAfterACrash(t *testing.T) {
	_, h := startEcho(t)
	for n := range 10 {
		s := status(t, h, "echo")
		_ = syscall.Kill(s.PID, syscall.SIGKILL)
		for range 20 {
			_, err := call(h, "echo")
			if e := errs.From(err); e != nil && (!e.Retryable || e.Code != errs.Unavailable && e.Code != errs.Unreachable) {
				t.Errorf("call after a crash: %v, want a retryable unavailable or unreachable", err)
			}
		}
		eventually(t, "the plugin runs again", func() bool { return status(t, h, "echo").Restarts == n+1 })
	}
}

// What became of the plugin stands in the error of the call that it took along.
func TestCallSaysHowThePluginEnded(t *testing.T) {
	_, h := startEcho(t)
	_, err := call(h, "crash")
	if e := errs.From(err); e == nil || e.Code != errs.Unreachable || !e.Retryable || !strings.Contains(e.Message, "plugin echo ended during the call: signal: killed") {
		t.Errorf("crash: %v, want how it ended", err)
	}
	if broke := (interface{ OfPlugin() })(nil); !errors.As(err, &broke) {
		t.Errorf("crash: %v (%T) does not say that it was the plugin", err, err)
	}
}

// buffer keeps a log.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// A delivered secret does not come out by a plugin's output, progress or errors.
func TestDeliveredSecretsAreScrubbed(t *testing.T) {
	hosttest.NeedsRoot(t)
	d := hosttest.NewDir(t)
	d.Add("echo", hosttest.Self(t))
	c := d.Config()
	var log buffer
	c.Log = slog.New(slog.NewTextHandler(&log, nil))
	h := hosttest.Start(t, c)
	var progress []string
	const password = "correct-horse"
	_, err := h.Invoke(context.Background(), host.Call{Driver: "echo", Kind: "echo", Operation: "leak",
		Secrets:  map[string]secret.Value{"password": secret.New([]byte(password))},
		Progress: func(_, message string, _, _ uint64) { progress = append(progress, message) }})
	if err == nil || !strings.Contains(err.Error(), "the error says [redacted]") {
		t.Errorf("error = %v, want it without the secret", err)
	}
	if !slices.Equal(progress, []string{"progress says [redacted]"}) {
		t.Errorf("progress = %q, want it without the secret", progress)
	}
	eventually(t, "the output is logged", func() bool {
		return strings.Contains(log.String(), "stderr says [redacted]") && strings.Contains(log.String(), "stdout says [redacted]")
	})
	if strings.Contains(log.String(), password) {
		t.Errorf("the log holds the secret:\n%s", log.String())
	}
}

// The host asks for a plugin's health only when it is asked itself.
func TestNoHealthCallsOfItsOwn(t *testing.T) {
	hosttest.NeedsRoot(t)
	d := hosttest.NewDir(t)
	d.Add("echo", hosttest.Self(t))
	c := d.Config()
	var log buffer
	c.Log = slog.New(slog.NewTextHandler(&log, nil))
	h := hosttest.Start(t, c)
	const asked = "asked for its health"
	if _, err := call(h, "echo"); err != nil || strings.Contains(log.String(), asked) {
		t.Errorf("call: %v; the log is\n%s\nwant no call of Health", err, log.String())
	}
	if got := h.Health(t.Context()); len(got) != 1 || got["echo"] != nil {
		t.Errorf("Health() = %v, want echo to serve", got)
	}
	eventually(t, "the plugin was asked", func() bool { return strings.Count(log.String(), asked) == 1 })
}

// gate is a firewall that writes down what it is asked.
type gate struct {
	mu   sync.Mutex
	seen []string
	err  error
}

func (g *gate) note(text string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.seen = append(g.seen, text)
}

func (g *gate) Allow(_ context.Context, uid int, targets []string) (func(), error) {
	if g.err != nil {
		return nil, g.err
	}
	g.note(fmt.Sprintf("allow %v", targets))
	if uid < 61000 || uid > 61183 {
		g.note(fmt.Sprintf("uid %d", uid))
	}
	return func() { g.note("release") }, nil
}

// The way to a call's addresses is open before the plugin hears of the call, and
// closed after it.
func TestEgress(t *testing.T) {
	hosttest.NeedsRoot(t)
	d := hosttest.NewDir(t)
	d.Add("echo", hosttest.Self(t))
	c := d.Config()
	g := &gate{}
	c.Egress = g
	h := hosttest.Start(t, c)
	config := json.RawMessage(`{"address":"10.0.0.5:623","mirror":"https://mirror.example/x","other":"10.9.9.9"}`)
	_, err := h.Invoke(t.Context(), host.Call{Driver: "echo", Kind: "echo", Operation: "progress", Config: config,
		Progress: func(_, message string, done, _ uint64) { g.note(fmt.Sprint("progress ", done)) }})
	if err != nil {
		t.Fatal(err)
	}
	_ = h.Validate(t.Context(), "echo", config, nil, time.Time{})
	s, err := h.Stream(t.Context(), host.Call{Driver: "echo", Kind: "echo", Operation: "tunnel", Config: json.RawMessage(`{}`)})
	if err != nil {
		t.Fatal(err)
	}
	g.note("stream is open")
	s.Close()
	want := []string{
		"allow [10.0.0.5:623 mirror.example]", "progress 1", "progress 2", "progress 3", "release",
		"allow [10.0.0.5:623 mirror.example]", "release", "allow []", "stream is open", "release",
	}
	if !slices.Equal(g.seen, want) {
		t.Errorf("egress = %q, want %q", g.seen, want)
	}
	g.err = fmt.Errorf("no rule set")
	if _, err := call(h, "echo"); errs.CodeOf(err) != errs.Unavailable {
		t.Errorf("call without a way: %v, want unavailable", err)
	}
	c.Privileged = []string{"echo"}
	if _, err := call(hosttest.Start(t, c), "echo"); err != nil {
		t.Errorf("a privileged plugin's call: %v, want it not to be held back", err)
	}
}

func TestValidateAndStream(t *testing.T) {
	hosttest.NeedsRoot(t)
	d := hosttest.NewDir(t)
	d.Add("echo", hosttest.Self(t))
	c := d.Config()
	c.ShutdownGrace = 100 * time.Millisecond
	h := hosttest.Start(t, c)
	secrets := map[string]secret.Value{"password": secret.New([]byte("pw12"))}
	for _, tt := range []struct {
		driver  string
		secrets map[string]secret.Value
		want    errs.Code
	}{
		{"echo", secrets, "log-in-refused"}, {"echo", nil, errs.CredentialsUnavailable}, {"acme", secrets, errs.UnsupportedDriver},
	} {
		if err := h.Validate(t.Context(), tt.driver, json.RawMessage(`{}`), tt.secrets, time.Now().Add(time.Minute)); errs.CodeOf(err) != tt.want {
			t.Errorf("Validate(%s) = %v, want %s", tt.driver, err, tt.want)
		}
	}
	s, err := h.Stream(t.Context(), host.Call{Driver: "echo", Kind: "echo", Operation: "tunnel"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	got := make([]byte, 5)
	if _, err := s.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(s, got); err != nil || string(got) != "hello" {
		t.Errorf("read = %q, %v, want hello", got, err)
	}
	if _, err := h.Stream(t.Context(), host.Call{Driver: "acme", Kind: "console", Operation: "open"}); errs.CodeOf(err) != errs.UnsupportedDriver {
		t.Errorf("stream of an unknown driver: %v, want unsupported-driver", err)
	}
	// An open stream does not hold up the end of the host.
	h.Close()
	if _, err := io.ReadFull(s, got); err == nil {
		t.Error("the stream outlived its plugin")
	}
}

// Plugins that share a user have a wall between them.
func TestPluginsOfOneUserDoNotReadEachOther(t *testing.T) {
	hosttest.NeedsRoot(t)
	d := hosttest.NewDir(t)
	d.Add("echo", hosttest.Self(t))
	d.Add("other", hosttest.Self(t))
	c := d.Config()
	c.User = "61500"
	h := hosttest.Start(t, c)
	if status(t, h, "echo").FileWall == 0 {
		t.Skip("needs Landlock: this kernel has none, or it is not enabled")
	}
	path := fmt.Sprintf("/proc/%d/environ", status(t, h, "other").PID)
	if out, err := call(h, "open", "["+strconv.Quote(path)+"]"); err != nil || out != fmt.Sprintf(`{%q:"EACCES"}`, path) && out != fmt.Sprintf(`{%q:"EPERM"}`, path) {
		t.Errorf("open the environment of a neighbour: %s, %v, want it refused", out, err)
	}
	c.Sandbox = false
	free := hosttest.Start(t, c)
	path = fmt.Sprintf("/proc/%d/environ", status(t, free, "other").PID)
	if out, err := call(free, "open", "["+strconv.Quote(path)+"]"); err != nil || out != fmt.Sprintf(`{%q:"ok"}`, path) {
		t.Errorf("without a sandbox: %s, %v, want it to work", out, err)
	}
}
