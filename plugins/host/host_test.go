package host_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/plugins/host"
	"github.com/better-compute/site-appliance/plugins/host/hosttest"
)

func startEcho(t *testing.T) (*hosttest.Dir, *host.Host) {
	t.Helper()
	hosttest.NeedsRoot(t)
	d := hosttest.NewDir(t)
	d.Add("echo", hosttest.Self(t))
	c := d.Config()
	c.Backoff = backoff.Policy{Min: 50 * time.Millisecond, Max: 100 * time.Millisecond}
	return d, hosttest.Start(t, c)
}

func call(h *host.Host, operation string, args ...string) (string, error) {
	c := host.Call{Driver: "echo", Kind: "echo", Operation: operation}
	if len(args) > 0 {
		c.Args = json.RawMessage(args[0])
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	out, err := h.Invoke(ctx, c)
	return string(out), err
}

func status(t *testing.T, h *host.Host, name string) host.Status {
	t.Helper()
	for _, s := range h.Status() {
		if s.Name == name {
			return s
		}
	}
	t.Fatalf("no status of %s in %+v", name, h.Status())
	return host.Status{}
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(15 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if f() {
			return
		}
	}
	t.Errorf("never happened: %s", what)
}

// gone also counts a process that only waits to be reaped.
func gone(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	rest := stat[bytes.LastIndexByte(stat, ')')+1:]
	return strings.HasPrefix(strings.TrimSpace(string(rest)), "Z")
}

func TestArgumentsAndResults(t *testing.T) {
	_, h := startEcho(t)
	for _, tt := range []struct{ args, want string }{
		{"", "null"}, {"[]", "[]"}, {"null", "[]"}, {`"a"`, `["a"]`}, {`["a",{"b":1}]`, `["a",{"b":1}]`},
		{`["a",null]`, `["a"]`}, {`[null,"a"]`, `[null,"a"]`}, {`[["a"]]`, `[["a"]]`}, {`{"b":1}`, `[{"b":1}]`},
	} {
		if got, err := call(h, "echo", tt.args); err != nil || got != tt.want {
			t.Errorf("echo(%s) = %s, %v, want %s", tt.args, got, err, tt.want)
		}
	}
	if _, err := call(h, "echo", "{"); errs.CodeOf(err) != errs.InvalidArgs {
		t.Errorf("echo({) = %v, want invalid-args", err)
	}
}

func TestCallContext(t *testing.T) {
	_, h := startEcho(t)
	var got []string
	_, err := h.Invoke(context.Background(), host.Call{Driver: "echo", Kind: "echo", Operation: "progress",
		Progress: func(phase, message string, done, total uint64) {
			got = append(got, fmt.Sprintf("%s %s %d/%d", phase, message, done, total))
		}})
	if want := []string{"count counting 1/3", "count counting 2/3", "count counting 3/3"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("progress = %v, %v, want %v", got, err, want)
	}
	out, err := h.Invoke(context.Background(), host.Call{Driver: "echo", Kind: "echo", Operation: "context",
		IdempotencyKey: "cmd_1", Traceparent: "00-ab-cd-01", TargetNodeID: "node_1"})
	if want := `["cmd_1","00-ab-cd-01","node_1"]`; err != nil || string(out) != want {
		t.Errorf("context = %s, %v, want %s", out, err, want)
	}
	secrets := map[string]secret.Value{"username": secret.New([]byte("root"))}
	for _, tt := range []struct {
		ref, want string
		code      errs.Code
	}{{`"username"`, `"root"`, ""}, {`"password"`, "", errs.CredentialsUnavailable}} {
		out, err := h.Invoke(context.Background(), host.Call{Driver: "echo", Kind: "echo", Operation: "secret",
			Args: json.RawMessage(tt.ref), Secrets: secrets})
		if string(out) != tt.want || errs.CodeOf(err) != tt.code {
			t.Errorf("secret(%s) = %s, %v, want %s %s", tt.ref, out, err, tt.want, tt.code)
		}
	}
}

func TestErrors(t *testing.T) {
	_, h := startEcho(t)
	for _, tt := range []struct {
		operation string
		want      errs.Error
	}{
		// Retryable needs the operation to be retry-safe.
		{"fail", errs.Error{Code: "fan-stuck", Message: "fan 3 does not turn"}},
		{"failSafe", errs.Error{Code: "fan-stuck", Message: "fan 3 does not turn", Retryable: true}},
		{"plain", errs.Error{Code: errs.DriverError, Message: "oh"}},
		{"panics", errs.Error{Code: errs.DriverError, Message: "the operation panicked: at the disco"}},
		{"none", errs.Error{Code: errs.UnsupportedOperation, Message: `no operation "echo.none"`}},
	} {
		_, err := call(h, tt.operation)
		if got := errs.From(err); got == nil || got.Code != tt.want.Code || got.Retryable != tt.want.Retryable || !strings.HasSuffix(got.Message, tt.want.Message) {
			t.Errorf("%s: %+v, want %+v", tt.operation, got, tt.want)
		}
	}
	_, err := h.Invoke(context.Background(), host.Call{Driver: "acme", Kind: "power", Operation: "getPower"})
	if got := errs.From(err); got.Code != errs.UnsupportedDriver || got.Message != "no hosted driver acme implements power" {
		t.Errorf("unknown driver: %v", err)
	}
}

func TestMessageLimit(t *testing.T) {
	_, h := startEcho(t)
	if _, err := call(h, "echo", `"`+strings.Repeat("x", 16<<20)+`"`); errs.CodeOf(err) != errs.InvalidArgs {
		t.Errorf("arguments over 16 MiB: %.200v, want invalid-args", err)
	}
	if _, err := call(h, "big"); errs.CodeOf(err) != errs.InvalidArgs {
		t.Errorf("result over 16 MiB: %.200v, want invalid-args", err)
	}
	// A result has a limit of its own.
	if out, err := call(h, "sized", "[4194304]"); err != nil || len(out) != 4<<20 {
		t.Errorf("result of 4 MiB: %d bytes, %.200v", len(out), err)
	}
	if out, err := call(h, "sized", "[4194305]"); errs.CodeOf(err) != errs.DriverError {
		t.Errorf("result over 4 MiB: %d bytes, %.200v, want driver-error", len(out), err)
	}
	if out, err := call(h, "sized", "[0,\""+strings.Repeat("x", 15<<20)+"\"]"); errs.CodeOf(err) != errs.InvalidArgs || !strings.Contains(err.Error(), "want a size") {
		t.Errorf("arguments of 15 MiB: %d bytes, %.200v, want them to arrive", len(out), err)
	}
	if s := status(t, h, "echo"); s.Restarts != 0 {
		t.Errorf("%d restarts: the connection must live", s.Restarts)
	}
}

func TestDeadlineAndCancel(t *testing.T) {
	_, h := startEcho(t)
	start := time.Now()
	_, err := h.Invoke(context.Background(), host.Call{Driver: "echo", Kind: "echo", Operation: "deaf",
		Deadline: start.Add(300 * time.Millisecond)})
	if took := time.Since(start); errs.CodeOf(err) != errs.Timeout || took > 3*time.Second {
		t.Errorf("an operation that ignores its deadline: %v after %v, want timeout at once", err, took)
	}
	if _, err := h.Invoke(context.Background(), host.Call{Driver: "echo", Kind: "echo", Operation: "echo",
		Deadline: start}); errs.CodeOf(err) != errs.Timeout {
		t.Errorf("past deadline: %v, want timeout", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	_, err = h.Invoke(ctx, host.Call{Driver: "echo", Kind: "echo", Operation: "wait",
		Progress: func(string, string, uint64, uint64) { cancel() }})
	if errs.CodeOf(err) != errs.Cancelled {
		t.Errorf("cancelled call: %v, want cancelled", err)
	}
	if out, err := call(h, "echo", `"on"`); err != nil || out != `["on"]` {
		t.Errorf("call after that: %s, %v", out, err)
	}
}

func TestConcurrentCalls(t *testing.T) {
	_, h := startEcho(t)
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			if out, err := call(h, "echo", strconv.Itoa(i)); err != nil || out != fmt.Sprintf("[%d]", i) {
				t.Errorf("echo(%d) = %s, %v", i, out, err)
			}
		})
	}
	wg.Wait()
}

func TestConfinement(t *testing.T) {
	d, h := startEcho(t)
	s := status(t, h, "echo")
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.PID))
	if err != nil {
		t.Fatal(err)
	}
	lines := map[string]string{}
	for l := range strings.Lines(string(text)) {
		k, v, _ := strings.Cut(l, ":")
		lines[k] = strings.Join(strings.Fields(v), " ")
	}
	uid, _, _ := strings.Cut(lines["Uid"], " ")
	if n, _ := strconv.Atoi(uid); n < 61000 || n > 61183 {
		t.Errorf("uid = %s, want one from 61000 up", uid)
	}
	same := strings.Repeat(uid+" ", 3) + uid
	for name, want := range map[string]string{
		"Uid": same, "Gid": same, "Groups": "", "NoNewPrivs": "1", "Seccomp": "2", "CapEff": "0000000000000000", "CapPrm": "0000000000000000",
	} {
		if lines[name] != want {
			t.Errorf("%s = %q, want %q", name, lines[name], want)
		}
	}
	if s.FileWall > 0 {
		var got map[string]string
		out, err := call(h, "open", `["/etc/passwd","/usr/bin","/","/run","/home",`+strconv.Quote(filepath.Dir(d.Path))+`]`)
		if json.Unmarshal([]byte(out), &got); err != nil || got["/etc/passwd"] != "ok" || got["/usr/bin"] != "ok" {
			t.Errorf("open = %v, %v, want the system to be read", got, err)
		}
		for _, path := range []string{"/", "/run", "/home"} {
			if got[path] != "EACCES" {
				t.Errorf("open %s: %s, want EACCES", path, got[path])
			}
		}
	}
	// It runs from the descriptor that was hashed, in a group of its own.
	if exe, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", s.PID)); filepath.Base(exe) != "echo" {
		t.Errorf("exe = %s, want the pinned file", exe)
	}
	if pgid, _ := syscall.Getpgid(s.PID); pgid != s.PID {
		t.Errorf("process group = %d, want its own, %d", pgid, s.PID)
	}
	out, err := call(h, "environ")
	var env []string
	if json.Unmarshal([]byte(out), &env); err != nil || len(env) != 4 {
		t.Errorf("environment = %q, %v, want PATH and three BCX variables", env, err)
	}
	for _, v := range env {
		if name, _, _ := strings.Cut(v, "="); !slices.Contains([]string{"PATH", "BCX_MAGIC_COOKIE", "BCX_SOCKET_DIR", "BCX_CLIENT_CERT"}, name) {
			t.Errorf("environment holds %s", name)
		}
		if dir, ok := strings.CutPrefix(v, "BCX_SOCKET_DIR="); ok {
			st, err := os.Stat(dir)
			if err != nil || st.Mode().Perm() != 0o700 || strconv.Itoa(int(st.Sys().(*syscall.Stat_t).Uid)) != uid {
				t.Errorf("socket folder: %v, %v, want 0700 of uid %s", st, err, uid)
			}
		}
	}
	if out, err := call(h, "files"); err != nil || strings.Contains(out, d.Path) {
		t.Errorf("open files = %s, %v: the plugin's binary leaked", out, err)
	}
}

func TestDeniedSystemCalls(t *testing.T) {
	d, h := startEcho(t)
	got := func(h *host.Host) map[string]string {
		out, err := call(h, "denied")
		var m map[string]string
		if json.Unmarshal([]byte(out), &m); err != nil {
			t.Fatal(err)
		}
		return m
	}
	confined := got(h)
	for _, name := range []string{"unshare", "perf_event_open", "mount", "bpf", "ptrace", "keyctl", "io_uring_setup"} {
		if confined[name] != "EPERM" {
			t.Errorf("%s = %s, want EPERM", name, confined[name])
		}
	}
	if confined["clone3"] != "ENOSYS" {
		t.Errorf("clone3 = %s, want ENOSYS", confined["clone3"])
	}
	if !strings.Contains(confined["clone(new user and net)"], "not permitted") {
		t.Errorf("clone with namespaces = %s, want EPERM", confined["clone(new user and net)"])
	}
	if confined["getpid"] != "" || confined["run a program"] != "<nil>" {
		t.Errorf("allowed things fail: %v", confined)
	}
	// The same plugin without the sandbox is not denied, so the check can fail.
	c := d.Config()
	c.Sandbox, c.Shim = false, nil
	free := hosttest.Start(t, c)
	open := got(free)
	for _, name := range []string{"unshare", "clone3"} {
		if open[name] == confined[name] {
			t.Errorf("without a sandbox %s = %s too", name, open[name])
		}
	}
	if runtime.GOARCH == "amd64" {
		if out, err := call(free, "x32"); err != nil {
			t.Errorf("without a sandbox a call of another ABI: %s, %v, want an answer", out, err)
		}
		if out, err := call(h, "x32"); errs.CodeOf(err) != errs.Unreachable {
			t.Errorf("a call of another ABI: %s, %v, want a dead plugin", out, err)
		}
	}
}

func TestPrivileged(t *testing.T) {
	hosttest.NeedsRoot(t)
	d := hosttest.NewDir(t)
	d.Add("echo", hosttest.Self(t))
	c := d.Config()
	c.Privileged = []string{"echo"}
	h := hosttest.Start(t, c)
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", status(t, h, "echo").PID))
	if s := status(t, h, "echo"); s.Confined || s.Filtered || s.FileWall != 0 {
		t.Errorf("status = %+v, want nothing confined", s)
	}
	if out, err := call(h, "open", `["/","/run"]`); err != nil || out != `{"/":"ok","/run":"ok"}` {
		t.Errorf("open = %s, %v, want no wall around files", out, err)
	}
	for _, want := range []string{"Uid:\t0\t0\t0\t0", "Seccomp:\t0"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("a privileged plugin's status lacks %q", want)
		}
	}
}

func TestRefusedPlugins(t *testing.T) {
	hosttest.NeedsRoot(t)
	self := hosttest.Self(t)
	d := hosttest.NewDir(t)
	for _, name := range []string{"good", "silent", "exits", "garbage", "endless", "protocol2", "outside", "builtin", "describes2", "twice"} {
		d.Add(name, self)
	}
	d.Add("script", []byte("#!/bin/sh\nsleep 100\n"))
	d.AddPinned("flipped", self, strings.Repeat("0", 63)+"1")
	d.Add("writer", self)
	pins, _ := os.ReadFile(filepath.Join(d.Path, "pins"))
	// One character of the good plugin's digest.
	text := string(pins)
	line := text[:strings.Index(text, "\n")]
	last := byte('0')
	if line[63] == last {
		last = '1'
	}
	d.Add("onebyte", self)
	pins, _ = os.ReadFile(filepath.Join(d.Path, "pins"))
	d.WritePins(strings.Replace(string(pins), line[:64]+"  onebyte", line[:63]+string(last)+"  onebyte", 1) +
		"# a comment\n\nnonsense\n" + line[:64] + "  missing\n" + line[:64] + "  ../etc/passwd\n")
	if err := os.Symlink("good", filepath.Join(d.Path, "link")); err != nil {
		t.Fatal(err)
	}
	w, err := os.OpenFile(filepath.Join(d.Path, "writer"), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	c, log := d.Config(), new(logged)
	c.StartTimeout = 2 * time.Second
	c.Log = slog.New(slog.NewTextHandler(log, nil))
	h := hosttest.Start(t, c)
	for name, want := range map[string]string{
		"silent": "no handshake line within 2s", "exits": "exit status 3", "garbage": "not a bcx handshake",
		"endless": "longer than a handshake", "protocol2": `bcx protocol "2"`, "describes2": "bcx protocol 2", "twice": "described twice",
		"outside": "does not lie in",
		"script":  "not an ELF executable", "flipped": "pin mismatch", "onebyte": "pin mismatch",
		"missing": "no such file", "writer": "open for writing",
	} {
		if s := status(t, h, name); s.State != "failed" || !strings.Contains(s.Reason, want) {
			t.Errorf("%s: %s, %q, want failed, %q", name, s.State, s.Reason, want)
		}
	}
	var bad int
	for _, s := range h.Status() {
		if s.Name == "pins" {
			bad++
		}
	}
	if bad != 2 {
		t.Errorf("%d bad lines in Status, want 2", bad)
	}
	if s := status(t, h, "good"); s.State != "running" {
		t.Errorf("good: %+v, want running", s)
	}
	if got := h.Drivers(); len(got) != 1 || got[0].ID != "echo" {
		t.Errorf("Drivers() = %+v, want echo alone: redfish is built in", got)
	}
	for _, want := range []string{
		"is a built-in driver's\" plugin=builtin driver=redfish", "is skipped\" plugin=flipped reason=", "is skipped\" plugin=silent reason=",
		"level=ERROR msg=\"pin skipped\" reason=",
	} {
		if !log.has(want) {
			t.Errorf("the log lacks %q:\n%s", want, log.buf.String())
		}
	}
}

func TestHighestVersionWinsPerKind(t *testing.T) {
	hosttest.NeedsRoot(t)
	d := hosttest.NewDir(t)
	for _, name := range []string{"older", "newer", "other"} {
		d.Add(name, hosttest.Self(t))
	}
	c, log := d.Config(), new(logged)
	c.Log = slog.New(slog.NewTextHandler(log, nil))
	h := hosttest.Start(t, c)
	if out, err := call(h, "name"); err != nil || out != `"newer"` {
		t.Errorf("echo is served by %s, %v, want newer", out, err)
	}
	out, err := h.Invoke(context.Background(), host.Call{Driver: "echo", Kind: "other", Operation: "name"})
	if err != nil || string(out) != `"other"` {
		t.Errorf("other is served by %s, %v, want other", out, err)
	}
	if !log.has("served by another plugin\" driver=echo kind=echo plugin=older served_by=newer") {
		t.Errorf("the log is %q, want the one that lost", log.buf.String())
	}
	if got := h.Drivers(); len(got) != 2 || got[0].Version != "1.10.0" || !slices.Equal(got[1].Kinds, []string{"other"}) {
		t.Errorf("Drivers() = %+v", got)
	}
}

func TestCrashAndRestart(t *testing.T) {
	d, h := startEcho(t)
	before := status(t, h, "echo").PID
	waiting, inFlight := make(chan struct{}), make(chan error, 1)
	go func() {
		_, err := h.Invoke(context.Background(), host.Call{Driver: "echo", Kind: "echo", Operation: "wait",
			Progress: func(string, string, uint64, uint64) { close(waiting) }})
		inFlight <- err
	}()
	<-waiting
	_, err := call(h, "crash")
	for name, err := range map[string]error{"the crashing call": err, "the other call in flight": <-inFlight} {
		if e := errs.From(err); e == nil || e.Code != errs.Unreachable || !e.Retryable {
			t.Errorf("%s: %v, want a retryable unreachable", name, err)
		}
	}
	// Until it is back, calls say so and nothing runs.
	eventually(t, "the plugin runs again", func() bool {
		out, err := call(h, "echo", `"on"`)
		if err != nil && errs.CodeOf(err) != errs.Unavailable && errs.CodeOf(err) != errs.Unreachable {
			t.Errorf("call during a restart: %v, want unavailable", err)
		}
		return out == `["on"]`
	})
	s := status(t, h, "echo")
	if s.Restarts != 1 || s.PID == before {
		t.Errorf("status = %+v, want one restart and another pid", s)
	}
	// It is confined anew.
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.PID))
	for _, want := range []string{"NoNewPrivs:\t1", "Seccomp:\t2"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("after a restart its status lacks %q", want)
		}
	}
	// Each restart hashes again.
	path := filepath.Join(d.Path, "echo")
	if err := os.Rename(path, path+".old"); err != nil {
		t.Fatal(err)
	}
	changed := append(hosttest.Self(t), 'x')
	if err := os.WriteFile(path, changed, 0o755); err != nil {
		t.Fatal(err)
	}
	_, _ = call(h, "crash")
	eventually(t, "the changed binary is refused", func() bool {
		s := status(t, h, "echo")
		return s.State == "restarting" && strings.Contains(s.Reason, "pin mismatch")
	})
	if _, err := call(h, "echo"); errs.CodeOf(err) != errs.Unavailable {
		t.Errorf("call of a plugin with another binary: %v, want unavailable", err)
	}
	if err := os.Rename(path+".old", path); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the pinned binary runs again", func() bool { return status(t, h, "echo").State == "running" })
}

func TestCloseTakesDescendants(t *testing.T) {
	hosttest.NeedsRoot(t)
	d := hosttest.NewDir(t)
	d.Add("echo", hosttest.Self(t))
	c := d.Config()
	h := hosttest.Start(t, c)
	out, err := call(h, "spawn")
	child, _ := strconv.Atoi(out)
	if err != nil || child == 0 || gone(child) {
		t.Fatalf("spawn = %s, %v", out, err)
	}
	pid := status(t, h, "echo").PID
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	if !gone(pid) {
		t.Error("the plugin outlived Close")
	}
	eventually(t, "the plugin's child is gone", func() bool { return gone(child) })
	if left, _ := os.ReadDir(c.SocketRoot); len(left) != 0 {
		t.Errorf("%d socket folders are left", len(left))
	}
	if _, err := call(h, "echo"); errs.CodeOf(err) != errs.Unavailable {
		t.Errorf("call after Close: %v, want unavailable", err)
	}
}

// A plugin that fills its outputs is neither blocked nor believed.
func TestFlood(t *testing.T) {
	hosttest.NeedsRoot(t)
	d := hosttest.NewDir(t)
	d.Add("flood", hosttest.Self(t))
	c := d.Config()
	var mu sync.Mutex
	var log bytes.Buffer
	c.Log = slog.New(slog.NewTextHandler(writer(func(p []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return log.Write(p)
	}), nil))
	h := hosttest.Start(t, c)
	if out, err := call(h, "echo", `"on"`); err != nil || out != `["on"]` {
		t.Errorf("call: %s, %v", out, err)
	}
	eventually(t, "stdout after the flood is drained", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return strings.Contains(log.String(), "still here") && strings.Contains(log.String(), "cut=true")
	})
	mu.Lock()
	defer mu.Unlock()
	for l := range strings.Lines(log.String()) {
		if len(l) > 70<<10 {
			t.Errorf("a log line has %d bytes", len(l))
		}
	}
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

func TestNoPinsFile(t *testing.T) {
	d := hosttest.NewDir(t)
	c, log := d.Config(), new(logged)
	c.Log = slog.New(slog.NewTextHandler(log, nil))
	h := hosttest.Start(t, c)
	if got := h.Drivers(); len(got) != 0 {
		t.Errorf("Drivers() = %v, want none", got)
	}
	if !log.has("level=WARN msg=\"no pins file, so no plugin runs\" dir=" + d.Path) {
		t.Errorf("the log is %q, want a warning", log.buf.String())
	}
	if _, err := call(h, "echo"); errs.CodeOf(err) != errs.UnsupportedDriver {
		t.Errorf("call: %v, want unsupported-driver", err)
	}
}

func TestConfigurationThatRunsNothing(t *testing.T) {
	hosttest.NeedsRoot(t)
	for name, tt := range map[string]struct {
		change func(*host.Config)
		want   string
	}{
		"sandbox without a shim":      {func(c *host.Config) { c.Shim = nil }, "no shim is set"},
		"limit without a cgroup":      {func(c *host.Config) { c.MemoryMax = 1 << 30 }, "no cgroup to hold them"},
		"cgroup outside the tree":     {func(c *host.Config) { c.Cgroup = "/tmp/plugins" }, "cgroup /tmp/plugins does not lie in /sys/fs/cgroup"},
		"cgroup by a detour":          {func(c *host.Config) { c.Cgroup = "/sys/fs/cgroup/../../../tmp" }, "does not lie in /sys/fs/cgroup"},
		"cgroup that cannot be made":  {func(c *host.Config) { c.Cgroup = "/sys/fs/cgroup/" + strings.Repeat("x", 256) }, "make cgroup: mkdir /sys/fs/cgroup/xxx"},
		"the tree itself as a cgroup": {func(c *host.Config) { c.Cgroup = "/sys/fs/cgroup" }, "does not lie in /sys/fs/cgroup"},
		"unknown user":                {func(c *host.Config) { c.User = "nobody-by-this-name" }, "nobody-by-this-name"},
	} {
		d := hosttest.NewDir(t)
		d.Add("echo", hosttest.Self(t))
		c := d.Config()
		tt.change(&c)
		h, err := host.Start(context.Background(), c)
		if err == nil {
			h.Close()
		}
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: Start = %v, want %q", name, err, tt.want)
		}
	}
}

func TestSharedUser(t *testing.T) {
	hosttest.NeedsRoot(t)
	d := hosttest.NewDir(t)
	d.Add("echo", hosttest.Self(t))
	c := d.Config()
	c.User = "61500"
	h := hosttest.Start(t, c)
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", status(t, h, "echo").PID))
	if !strings.Contains(string(text), "Uid:\t61500\t") {
		t.Errorf("status of a plugin with user 61500:\n%.300s", text)
	}
}

func TestCgroup(t *testing.T) {
	hosttest.NeedsRoot(t)
	root := ""
	for _, dir := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		if _, err := os.Stat(filepath.Join(dir, "cgroup.controllers")); err == nil {
			root = dir
		}
	}
	if root == "" {
		t.Skip("needs cgroup v2")
	}
	controllers, _ := os.ReadFile(filepath.Join(root, "cgroup.controllers"))
	limited := strings.Contains(string(controllers), "memory") && strings.Contains(string(controllers), "pids")
	parent := filepath.Join(root, fmt.Sprintf("bcx-test-%d", os.Getpid()))
	if err := os.Mkdir(parent, 0o755); err != nil {
		t.Skip("needs a writable cgroup v2: " + err.Error())
	}
	t.Cleanup(func() {
		os.Remove(filepath.Join(parent, "plugins"))
		if err := os.Remove(parent); err != nil {
			t.Errorf("cgroup is not empty after Close: %v", err)
		}
	})
	d := hosttest.NewDir(t)
	d.Add("echo", hosttest.Self(t))
	c := d.Config()
	c.Cgroup = filepath.Join(parent, "plugins")
	h, err := host.Start(context.Background(), c)
	if err != nil {
		t.Fatal(err)
	}
	own, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", status(t, h, "echo").PID))
	if !strings.Contains(string(own), "/plugins/plugin-echo\n") {
		t.Errorf("the plugin's cgroup is %q: %+v", own, h.Status())
	}
	h.Close()
	c.MemoryMax, c.PidsMax = 1<<30, 256
	h, err = host.Start(context.Background(), c)
	if !limited {
		if err == nil {
			h.Close()
			t.Error("limits without controllers: Start succeeded, want no plugin to run")
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	max, _ := os.ReadFile(filepath.Join(c.Cgroup, "plugin-echo", "pids.max"))
	if strings.TrimSpace(string(max)) != "256" {
		t.Errorf("pids.max = %s, want 256", max)
	}
	h.Close()
}
