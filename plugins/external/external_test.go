//go:build linux

package external

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
)

// self is the test binary, and its pin.
func self(t testing.TB) (path, pin string) {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	pin, err = SHA256File(path)
	if err != nil {
		t.Fatal(err)
	}
	return path, pin
}

// options are those of a plugin in a mode, with a temporary folder of the test's.
func options(t testing.TB, mode string) Options {
	t.Helper()
	t.Setenv("TMPDIR", t.TempDir())
	path, pin := self(t)
	return Options{
		Command: []string{path}, SHA256: pin, Env: map[string]string{"MODE": mode},
		Backoff: backoff.Policy{Min: 20 * time.Millisecond, Max: 50 * time.Millisecond},
		Secrets: vault{"secret://root/bmc": "hunter2"},
		Log:     slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
}

type vault map[string]string

func (v vault) Resolve(_ context.Context, ref driver.Ref) (secret.Value, error) {
	s, ok := v[string(ref)]
	if !ok {
		return secret.Value{}, errors.New("no such secret")
	}
	return secret.New([]byte(s)), nil
}

// run1 starts a plugin and answers its first driver.
func run1(t testing.TB, o Options) (*Driver, *driver.Definition) {
	t.Helper()
	d := New(o)
	t.Cleanup(func() { d.Close() })
	list, err := d.Start(t.Context())
	if err != nil {
		t.Fatalf("Start: %v", err)
	}
	return d, list[0]
}

func invoke(t testing.TB, def *driver.Definition, operation, config, args string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	c, _ := drivertest.Context(nil, ctx, nil)
	out, err := def.Invoke(c, "echo", operation, json.RawMessage(config), json.RawMessage(args))
	return string(out), err
}

func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.HasPrefix(strings.TrimSpace(string(stat[bytes.LastIndexByte(stat, ')')+1:])), "Z")
}

func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(15 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if f() {
			return
		}
	}
	t.Errorf("never happened: %s", what)
}

func TestStart(t *testing.T) {
	d := New(options(t, "two"))
	defer d.Close()
	list, err := d.Start(t.Context())
	if err != nil || len(list) != 2 {
		t.Fatalf("Start = %v, %v, want two drivers", list, err)
	}
	m := list[0].Manifest()
	if m.ID != "echo" || m.RunsOn != "control-plane" || !slices.Equal(m.Capabilities, []string{"virtual-media"}) ||
		!m.IsRetrySafe("echo", "echo") || m.IsRetrySafe("echo", "pid") || !m.IsStream("echo", "pipe") || list[0].Extension() != "driver" {
		t.Errorf("manifest = %+v", m)
	}
	if list[0].Key() != "driver:echo@1.0.0" || list[1].Key() != "driver:second@1.0.0" {
		t.Errorf("keys = %s, %s", list[0].Key(), list[1].Key())
	}
	for _, def := range list {
		if got, err := invoke(t, def, "echo", "", `["a"]`); err != nil || got != `["a"]` {
			t.Errorf("echo of %s = %s, %v", def.ID(), got, err)
		}
	}
	if _, err := d.Start(t.Context()); errs.CodeOf(err) != errs.Unavailable {
		t.Errorf("second Start = %v, want unavailable", err)
	}
}

func TestDefaults(t *testing.T) {
	o := New(Options{}).o
	if o.StartTimeout != 10*time.Second || o.CallTimeout != time.Minute || o.ShutdownGrace != 5*time.Second ||
		o.Backoff.Min != time.Second || o.Backoff.Max != time.Minute || o.Log == nil {
		t.Errorf("defaults = %+v", o)
	}
}

func TestNotStarted(t *testing.T) {
	d := New(options(t, ""))
	defer d.Close()
	if _, err := d.Health(t.Context()); errs.CodeOf(err) != errs.Unavailable {
		t.Errorf("Health before Start = %v, want unavailable", err)
	}
}

func TestArgumentsAndResults(t *testing.T) {
	_, def := run1(t, options(t, ""))
	for _, tt := range []struct{ operation, args, want string }{
		{"echo", "", "null"}, {"echo", "[]", "[]"}, {"echo", `["a",{"b":1}]`, `["a",{"b":1}]`}, {"echo", `["a",null]`, `["a"]`},
		{"echo", `{"b":1}`, `[{"b":1}]`}, {"nothing", "", "null"},
	} {
		if got, err := invoke(t, def, tt.operation, "", tt.args); err != nil || got != tt.want {
			t.Errorf("%s(%s) = %s, %v, want %s", tt.operation, tt.args, got, err, tt.want)
		}
	}
	for operation, want := range map[string]errs.Error{
		"fail":  {Code: "fan-stuck", Message: "fan 3", Retryable: true},
		"plain": {Code: errs.DriverError, Message: "oh"},
	} {
		_, err := invoke(t, def, operation, "", "")
		if got := errs.From(err); got == nil || *got != want {
			t.Errorf("%s = %+v, want %+v", operation, got, want)
		}
	}
	if _, err := invoke(t, def, "none", "", ""); errs.CodeOf(err) != errs.UnsupportedOperation {
		t.Errorf("none = %v, want unsupported-operation", err)
	}
	if _, err := invoke(t, def, "big", "", ""); errs.CodeOf(err) != errs.InvalidArgs {
		t.Errorf("result over the limit = %v, want invalid-args", err)
	}
	c, _ := drivertest.Context(nil, t.Context(), nil)
	c.IdempotencyKey, c.Traceparent, c.TargetNodeID = "cmd_1", "00-ab", "node_1"
	if got, err := def.Invoke(c, "echo", "context", nil, nil); err != nil || string(got) != `["cmd_1","00-ab","node_1"]` {
		t.Errorf("context = %s, %v", got, err)
	}
}

// TestAwaitAndIterate: awaiting sends progress to the context, iterating yields it.
func TestAwaitAndIterate(t *testing.T) {
	_, def := run1(t, options(t, ""))
	c, recorder := drivertest.Context(t, t.Context(), nil)
	impl, err := def.Implementation("echo", nil, c)
	if err != nil {
		t.Fatal(err)
	}
	got, err := impl.Call("progress").Await()
	if err != nil || string(got) != `"counted"` || len(recorder.Progress()) != 3 || recorder.Progress()[2].Done != 3 {
		t.Errorf("Await = %s, %v, emitted %v", got, err, recorder.Progress())
	}
	call := impl.Call("progress")
	var done []uint64
	for p, err := range call.Progress() {
		if err != nil {
			t.Fatal(err)
		}
		done = append(done, p.Done)
	}
	got, err = call.Result()
	if err != nil || string(got) != `"counted"` || !slices.Equal(done, []uint64{1, 2, 3}) || len(recorder.Progress()) != 3 {
		t.Errorf("Progress = %v, Result = %s, %v, emitted %v", done, got, err, recorder.Progress())
	}
}

// TestConfiguration: the host judges the structure and passes the value on as it is.
func TestConfiguration(t *testing.T) {
	_, def := run1(t, options(t, ""))
	odd := `{ "mode":"a",  "address" : "x" }`
	if got, err := invoke(t, def, "config", odd, ""); err != nil || got != string(mustJSON(t, odd)) {
		t.Errorf("config = %s, %v, want it unchanged", got, err)
	}
	for _, bad := range []string{`{"mode":"c"}`, `{"address":1}`, `{"unknown":1}`, `{"address":""}`, `[]`, `{`} {
		if _, err := invoke(t, def, "config", bad, ""); errs.CodeOf(err) != errs.InvalidConfig {
			t.Errorf("config(%s) = %v, want invalid-config", bad, err)
		}
	}
}

func mustJSON(t testing.TB, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestValidate(t *testing.T) {
	_, def := run1(t, options(t, ""))
	for config, want := range map[string]errs.Code{
		`{"address":"x"}`:                        "",
		`{"credentials":"secret://root/bmc"}`:    "",
		`{"address":"refused"}`:                  errs.InvalidConfig, // by the plugin
		`{"mode":"c"}`:                           errs.InvalidConfig, // by the host
		`{"credentials":"secret://root/unkept"}`: errs.CredentialsUnavailable,
	} {
		c, _ := drivertest.Context(nil, t.Context(), nil)
		if err := def.Validate(c, json.RawMessage(config)); errs.CodeOf(err) != want {
			t.Errorf("Validate(%s) = %v, want %q", config, err, want)
		}
	}
}

// TestSecretsDelivered: only references in fields that the schema calls secret.
func TestSecretsDelivered(t *testing.T) {
	o := options(t, "")
	o.Secrets = vault{"secret://root/bmc": "hunter2", "secret://root/other": "swordfish"}
	_, def := run1(t, o)
	for _, tt := range []struct {
		config, ref, want string
		code              errs.Code
	}{
		{`{"credentials":"secret://root/bmc"}`, "secret://root/bmc", "hunter2", ""},
		{`{"credentials":"secret://root/bmc"}`, "secret://root/other", "", errs.CredentialsUnavailable},
		{`{"credentials":"plain text"}`, "plain text", "", errs.CredentialsUnavailable},
		{`{"user":"secret://root/other"}`, "secret://root/other", "", errs.CredentialsUnavailable},
		{`{}`, "secret://root/bmc", "", errs.CredentialsUnavailable},
		{`{"credentials":"secret://root/unkept"}`, "", "", errs.CredentialsUnavailable},
	} {
		got, err := invoke(t, def, "secret", tt.config, string(mustJSON(t, []string{tt.ref})))
		if errs.CodeOf(err) != tt.code || err == nil && got != string(mustJSON(t, tt.want)) {
			t.Errorf("secret(%s) with %s = %s, %v, want %s %s", tt.ref, tt.config, got, err, tt.want, tt.code)
		}
	}
	// The configuration itself still holds the reference.
	if got, err := invoke(t, def, "config", `{"credentials":"secret://root/bmc"}`, ""); err != nil || strings.Contains(got, "hunter2") {
		t.Errorf("config = %s, %v", got, err)
	}
}

type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func TestSecretsScrubbedFromOutput(t *testing.T) {
	o := options(t, "")
	log := &lines{}
	o.Log = slog.New(slog.NewTextHandler(log, nil))
	d, def := run1(t, o)
	if _, err := invoke(t, def, "leak", `{"credentials":"secret://root/bmc"}`, ""); err != nil {
		t.Fatal(err)
	}
	d.Close()
	if got := log.String(); strings.Contains(got, "hunter2") || !strings.Contains(got, "the password is [redacted]") {
		t.Errorf("log = %s", got)
	}
}

func TestEnvironment(t *testing.T) {
	t.Setenv("AWS_SECRET_ACCESS_KEY", "the host's own")
	t.Setenv("HOME", "/home/host")
	o := options(t, "")
	o.Env["ACME"] = "yes"
	o.Env["HOME"] = "/home/acme"
	_, def := run1(t, o)
	got, err := invoke(t, def, "environ", "", "")
	var list []string
	if json.Unmarshal([]byte(got), &list) != nil || err != nil {
		t.Fatalf("environ = %s, %v", got, err)
	}
	names := map[string]string{}
	for _, pair := range list {
		name, value, _ := strings.Cut(pair, "=")
		names[name] = value
	}
	if names["ACME"] != "yes" || names["HOME"] != "/home/acme" || names["PATH"] != os.Getenv("PATH") || names["TMPDIR"] != os.Getenv("TMPDIR") ||
		names[bcx.CookieVariable] != bcx.Cookie || names[bcx.SocketDirVariable] == "" || names[bcx.ClientCertVariable] == "" {
		t.Errorf("environment lacks something: %q", list)
	}
	allowed := append(inherited(), "ACME", "MODE", bcx.CookieVariable, bcx.SocketDirVariable, bcx.ClientCertVariable)
	for name := range names {
		if !slices.Contains(allowed, name) {
			t.Errorf("plugin inherits %s", name)
		}
	}
}

func TestOptionsAreChecked(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*Options)
		code   errs.Code
	}{
		"good":          {func(*Options) {}, ""},
		"upper case":    {func(o *Options) { o.SHA256 = strings.ToUpper(o.SHA256) }, ""},
		"no command":    {func(o *Options) { o.Command = nil }, errs.InvalidConfig},
		"bare name":     {func(o *Options) { o.Command = []string{"acme"} }, errs.InvalidConfig},
		"no pin":        {func(o *Options) { o.SHA256 = "" }, errs.InvalidConfig},
		"short pin":     {func(o *Options) { o.SHA256 = o.SHA256[:62] }, errs.InvalidConfig},
		"other pin":     {func(o *Options) { o.SHA256 = strings.Repeat("0", 64) }, errs.InvalidConfig},
		"name with =":   {func(o *Options) { o.Env["A=B"] = "" }, errs.InvalidConfig},
		"BCX variable":  {func(o *Options) { o.Env[bcx.SocketDirVariable] = "/tmp" }, errs.InvalidConfig},
		"no such file":  {func(o *Options) { o.Command = []string{"/nowhere/acme"} }, errs.DriverError},
		"a folder":      {func(o *Options) { o.Command = []string{"/tmp/"} }, errs.DriverError},
		"no script":     {func(o *Options) { o.Command = []string{"node"} }, errs.InvalidConfig},
		"script's pin":  {func(o *Options) { o.Command = []string{"node", "/etc/hostname"} }, errs.InvalidConfig},
		"missing entry": {func(o *Options) { o.Command = []string{"node", "/nowhere/acme.js"} }, errs.DriverError},
	} {
		o := options(t, "")
		tt.change(&o)
		d := New(o)
		_, err := d.Start(t.Context())
		if errs.CodeOf(err) != tt.code {
			t.Errorf("%s: Start = %v, want %q", name, err, tt.code)
		}
		d.Close()
	}
}

// TestHandshake: what a plugin can do instead of starting.
func TestHandshake(t *testing.T) {
	for mode, want := range map[string]string{
		"mute":   "describe",
		"silent": "no handshake line within 300ms", "exits": "exit status 3", "garbage": "not a bcx handshake", "protocol2": `protocol "2": want 1`, "": "",
	} {
		o := options(t, mode)
		if mode == "silent" || mode == "mute" {
			o.StartTimeout = 300 * time.Millisecond
		}
		d := New(o)
		_, err := d.Start(t.Context())
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: Start = %v, want %q", mode, err, want)
		}
		d.Close()
		if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "*")); len(left) > 0 {
			t.Errorf("%s: %v is left", mode, left)
		}
	}
}

// TestPluginCannotAskForARepeat: only what it listed as retry-safe may be
// repeated on its word.
func TestPluginCannotAskForARepeat(t *testing.T) {
	_, def := run1(t, options(t, "liar"))
	for operation, want := range map[string]bool{"safe": true, "unsafe": false} {
		_, err := invoke(t, def, operation, "", "")
		if got := errs.From(err); got == nil || got.Code != errs.Unavailable || got.Message != "come again" || got.Retryable != want {
			t.Errorf("%s = %+v, want unavailable, retryable %v", operation, got, want)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := def.Invoke(driver.NewContext(ctx, nil, nil, nil), "echo", "late", nil, nil)
	if got := errs.From(err); got == nil || got.Code != errs.Timeout || got.Message != "said late" {
		t.Errorf("an answer after the deadline = %v, want the plugin's own", err)
	}
	if _, err := invoke(t, def, "nothing", "", ""); errs.CodeOf(err) != errs.Unreachable || !errs.From(err).Retryable {
		t.Errorf("a call without an end = %v, want unreachable, retryable", err)
	}
	if _, err := invoke(t, def, "text", "", ""); errs.CodeOf(err) != errs.DriverError {
		t.Errorf("a result that is not JSON = %v, want driver-error", err)
	}
}

// TestHostIsKilled: the plugin goes with it, although it looks at no end of
// stdin, and the next host sweeps its folder and what it had started.
func TestHostIsKilled(t *testing.T) {
	for _, mode := range []string{"echo", "told"} {
		o := options(t, "")
		cmd := exec.Command(o.Command[0])
		cmd.Env = append(os.Environ(), "HOST_TO_KILL="+mode)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var pid, child, escaped int
		if _, err := fmt.Fscan(out, &pid, &child, &escaped); err != nil || !alive(pid) || !alive(child) || !alive(escaped) {
			t.Errorf("%s: plugin %d with %d and %d: %v", mode, pid, child, escaped, err)
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		eventually(t, mode+" is gone", func() bool { return !alive(pid) })
		if left, _ := filepath.Glob(filepath.Join(os.TempDir(), prefix+"*")); len(left) != 1 {
			t.Errorf("%s: the killed host left %v, want its folder", mode, left)
		}
		if !alive(child) || !alive(escaped) {
			t.Errorf("%s: its children are gone: there is nothing to sweep", mode)
		}
		d, def := run1(t, o)
		eventually(t, mode+"'s children are gone", func() bool { return !alive(child) && !alive(escaped) })
		if got, err := invoke(t, def, "echo", "", "[1]"); err != nil || got != "[1]" {
			t.Errorf("%s: the next host's plugin = %s, %v", mode, got, err)
		}
		d.Close()
		if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "*")); len(left) > 0 {
			t.Errorf("%s: %v is left", mode, left)
		}
	}
}

func TestStartIsCancelled(t *testing.T) {
	d := New(options(t, "silent"))
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := d.Start(ctx); err == nil {
		t.Error("Start of a silent plugin ended well")
	}
	d.Close()
}

func TestDeadline(t *testing.T) {
	o := options(t, "")
	o.CallTimeout = 5 * time.Second
	_, def := run1(t, o)
	before := time.Now()
	c, _ := drivertest.Context(nil, t.Context(), nil)
	for name, limit := range map[string]time.Duration{"call time-out": 0, "context": 30 * time.Second} {
		ctx, cancel := context.WithCancel(t.Context())
		want := 5 * time.Second
		if limit > 0 {
			ctx, cancel = context.WithTimeout(t.Context(), limit)
			want = limit
		}
		c.Context = ctx
		raw, err := def.Invoke(c, "echo", "left", nil, nil)
		cancel()
		var millis int64
		if err != nil || json.Unmarshal(raw, &millis) != nil {
			t.Fatalf("%s: %s, %v", name, raw, err)
		}
		if at := time.UnixMilli(millis); at.Before(before.Add(want-time.Second)) || at.After(time.Now().Add(want+time.Second)) {
			t.Errorf("%s: the plugin's deadline is in %v, want %v", name, time.Until(at), want)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	c.Context = ctx
	_, err := def.Invoke(c, "echo", "deaf", nil, nil)
	// The plugin's own answer, which comes after the context's end.
	if got := errs.From(err); got == nil || got.Code != errs.Timeout || strings.Contains(got.Message, "did not answer") {
		t.Errorf("deaf = %+v, want the plugin's timeout", got)
	}
}

func TestCancel(t *testing.T) {
	_, def := run1(t, options(t, ""))
	ctx, cancel := context.WithCancel(t.Context())
	c := driver.NewContext(ctx, nil, nil, func(driver.Progress) { cancel() })
	if _, err := def.Invoke(c, "echo", "wait", nil, nil); errs.CodeOf(err) != errs.Cancelled {
		t.Errorf("cancelled call = %v, want cancelled", err)
	}
	if got, err := invoke(t, def, "echo", "", "[1]"); err != nil || got != "[1]" {
		t.Errorf("call after it = %s, %v", got, err)
	}
}

// TestCrash: calls in flight fail as unreachable, new ones wait for the restart.
func TestCrash(t *testing.T) {
	for _, how := range []string{"crash", "hangUp", "hangUpStream"} {
		t.Run(how, func(t *testing.T) {
			_, def := run1(t, options(t, ""))
			first, err := invoke(t, def, "pid", "", "")
			if err != nil {
				t.Fatal(err)
			}
			waiting, failed := make(chan struct{}), make(chan error, 1)
			go func() {
				c := driver.NewContext(t.Context(), nil, nil, func(driver.Progress) { close(waiting) })
				_, err := def.Invoke(c, "echo", "wait", nil, nil)
				failed <- err
			}()
			<-waiting
			if how == "hangUpStream" {
				idle, other := net.Pipe()
				defer other.Close()
				err = def.Stream(driver.NewContext(t.Context(), nil, nil, nil), "echo", how, nil, nil, idle)
			} else {
				_, err = invoke(t, def, how, "", "")
			}
			for name, err := range map[string]error{how: err, "call in flight": <-failed} {
				if e := errs.From(err); e == nil || e.Code != errs.Unreachable || !e.Retryable {
					t.Errorf("%s = %v, want unreachable, retryable", name, err)
				}
			}
			second, err := invoke(t, def, "pid", "", "")
			if err != nil || second == first {
				t.Errorf("new call = %s, %v, want another process than %s", second, err, first)
			}
		})
	}
}

// TestCallsDuringRestart: none fails but those in flight, and none is "cancelled".
func TestCallsDuringRestart(t *testing.T) {
	_, def := run1(t, options(t, ""))
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for range 20 {
				if i == 0 {
					_, err := invoke(t, def, "crash", "", "")
					if errs.CodeOf(err) != errs.Unreachable {
						t.Errorf("crash = %v, want unreachable", err)
					}
					continue
				}
				got, err := invoke(t, def, "echo", "", "[1]")
				if err == nil && got != "[1]" || err != nil && (errs.CodeOf(err) != errs.Unreachable || !errs.From(err).Retryable) {
					t.Errorf("echo = %s, %v", got, err)
				}
			}
		})
	}
	wg.Wait()
}

// TestCallThatDidNotReachThePlugin waits for the restart like a new one.
func TestCallThatDidNotReachThePlugin(t *testing.T) {
	_, def := run1(t, options(t, ""))
	first, err := invoke(t, def, "pid", "", "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := invoke(t, def, "vanish", "", ""); err != nil {
		t.Fatal(err)
	}
	time.Sleep(500 * time.Millisecond)
	if second, err := invoke(t, def, "pid", "", ""); err != nil || second == first {
		t.Errorf("pid = %s, %v, want another than %s", second, err, first)
	}
}

// TestNewCallWaitsNoLongerThanItsDeadline while the plugin cannot come back.
func TestNewCallWaitsNoLongerThanItsDeadline(t *testing.T) {
	o := options(t, "")
	o.Backoff = backoff.Policy{Min: time.Hour, Max: time.Hour}
	d, def := run1(t, o)
	if _, err := invoke(t, def, "crash", "", ""); errs.CodeOf(err) != errs.Unreachable {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	c, _ := drivertest.Context(nil, ctx, nil)
	if _, err := def.Invoke(c, "echo", "echo", nil, nil); errs.CodeOf(err) != errs.Timeout || !errs.From(err).Retryable {
		t.Errorf("call during a long restart = %v, want timeout, retryable", err)
	}
	ctx, cancel = context.WithCancel(t.Context())
	time.AfterFunc(100*time.Millisecond, cancel)
	c, _ = drivertest.Context(nil, ctx, nil)
	if _, err := def.Invoke(c, "echo", "echo", nil, nil); errs.CodeOf(err) != errs.Cancelled {
		t.Errorf("call that was cancelled in it = %v, want cancelled", err)
	}
	waiting := make(chan error, 1)
	go func() {
		_, err := invoke(t, def, "echo", "", "")
		waiting <- err
	}()
	d.Close()
	if err := <-waiting; errs.CodeOf(err) != errs.Unavailable {
		t.Errorf("call that waits at Close = %v, want unavailable", err)
	}
}

// copySelf puts the test binary where a test may change it.
func copySelf(t testing.TB) string {
	t.Helper()
	from, _ := self(t)
	content, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "acme")
	if err := os.WriteFile(path, content, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestPinChangesUnderRunningHost: it is verified anew, and a mismatch is final.
func TestPinChangesUnderRunningHost(t *testing.T) {
	path := copySelf(t)
	o := options(t, "")
	o.Command = []string{path}
	d, def := run1(t, o)
	if _, err := invoke(t, def, "crash", "", ""); errs.CodeOf(err) != errs.Unreachable {
		t.Fatal(err)
	}
	// The control: the same file comes back.
	if _, err := invoke(t, def, "echo", "", "[1]"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path+".new", []byte("#!/bin/sh\nsleep 60\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	if got, err := invoke(t, def, "echo", "", "[1]"); err != nil || got != "[1]" {
		t.Errorf("the running plugin = %s, %v", got, err)
	}
	if _, err := invoke(t, def, "crash", "", ""); errs.CodeOf(err) != errs.Unreachable {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := invoke(t, def, "echo", "", "[1]"); errs.CodeOf(err) != errs.InvalidConfig || !strings.Contains(err.Error(), "its pin is") {
			t.Errorf("call after the pin changed = %v, want invalid-config", err)
		}
	}
	if _, err := d.Health(t.Context()); errs.CodeOf(err) != errs.InvalidConfig {
		t.Errorf("Health = %v, want invalid-config", err)
	}
	// Putting it right does not bring it back.
	if err := os.Rename(copySelf(t), path); err != nil {
		t.Fatal(err)
	}
	if _, err := invoke(t, def, "echo", "", "[1]"); errs.CodeOf(err) != errs.InvalidConfig {
		t.Errorf("call after it was put right = %v, want invalid-config", err)
	}
}

// TestMissingFileIsTriedAgain: a file that is away for a moment is no mismatch.
func TestMissingFileIsTriedAgain(t *testing.T) {
	path := copySelf(t)
	o := options(t, "")
	o.Command = []string{path}
	_, def := run1(t, o)
	if err := os.Rename(path, path+".away"); err != nil {
		t.Fatal(err)
	}
	if _, err := invoke(t, def, "crash", "", ""); errs.CodeOf(err) != errs.Unreachable {
		t.Fatal(err)
	}
	time.AfterFunc(200*time.Millisecond, func() { os.Rename(path+".away", path) })
	if got, err := invoke(t, def, "echo", "", "[1]"); err != nil || got != "[1]" {
		t.Errorf("echo = %s, %v", got, err)
	}
}

// TestRunsWhatWasHashed: the process is the verified file, not the path's.
func TestRunsWhatWasHashed(t *testing.T) {
	_, pin := self(t)
	_, def := run1(t, options(t, ""))
	if got, err := invoke(t, def, "exe", "", ""); err != nil || got != string(mustJSON(t, pin)) {
		t.Errorf("/proc/self/exe has SHA-256 %s, %v, want %s", got, err, pin)
	}
}

// TestSwappedAfterHashing: neither another file at the path nor other bytes in
// the same file come to run.
func TestSwappedAfterHashing(t *testing.T) {
	path := copySelf(t)
	_, pin := self(t)
	p, err := openPinned(path, pin)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	if f, err := os.OpenFile(path, os.O_WRONLY|syscall.O_NONBLOCK, 0); err == nil {
		_, _ = f.WriteString("#!/bin/sh\n")
		f.Close()
	}
	if got, err := SHA256File(p.path); err != nil || got != pin {
		t.Errorf("after writing to it, %s would run: %v, want %s", got, err, pin)
	}
	if err := os.WriteFile(path+".new", []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	if got, err := SHA256File(p.path); err != nil || got != pin {
		t.Errorf("after replacing it, %s would run: %v, want %s", got, err, pin)
	}
	// The control: by its path another file would have.
	if got, err := SHA256File(path); err != nil || got == pin {
		t.Errorf("the path still has %s, %v", got, err)
	}
	if _, err := openPinned(path, pin); errs.CodeOf(err) != errs.InvalidConfig {
		t.Errorf("opening it again = %v, want invalid-config", err)
	}
}

// TestOpenForWriting: a writer that goes away in time is waited for.
func TestOpenForWriting(t *testing.T) {
	path := copySelf(t)
	for name, hold := range map[string]bool{"for a moment": false, "for good": true} {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if !hold {
			time.AfterFunc(50*time.Millisecond, func() { f.Close() })
		}
		o := options(t, "")
		o.Command = []string{path}
		d := New(o)
		if _, err := d.Start(t.Context()); (err != nil) != hold {
			t.Errorf("open %s: Start = %v", name, err)
		}
		d.Close()
		f.Close()
	}
}

// TestScriptWithInterpreterLine is pinned itself, and runs by its path.
func TestScriptWithInterpreterLine(t *testing.T) {
	o := options(t, "")
	script := filepath.Join(t.TempDir(), "acme")
	if err := os.WriteFile(script, []byte("#!/bin/sh\nexec "+o.Command[0]+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	pin, err := SHA256File(script)
	if err != nil {
		t.Fatal(err)
	}
	o.Command, o.SHA256 = []string{script}, pin
	_, def := run1(t, o)
	if got, err := invoke(t, def, "echo", "", "[1]"); err != nil || got != "[1]" {
		t.Errorf("echo = %s, %v", got, err)
	}
}

// TestOtherDriversAfterRestart are logged, and the registered ones stay.
func TestOtherDriversAfterRestart(t *testing.T) {
	o := options(t, "")
	o.Env["MARK"] = filepath.Join(t.TempDir(), "mark")
	log := &lines{}
	o.Log = slog.New(slog.NewTextHandler(log, nil))
	_, def := run1(t, o)
	if _, err := invoke(t, def, "crash", "", ""); errs.CodeOf(err) != errs.Unreachable {
		t.Fatal(err)
	}
	if _, err := invoke(t, def, "echo", "", ""); errs.CodeOf(err) != errs.UnsupportedDriver {
		t.Errorf("echo = %v, want the plugin's own unsupported-driver", err)
	}
	if def.ID() != "echo" || !strings.Contains(log.String(), "plugin came back with other drivers") {
		t.Errorf("definition %s, log %s", def.ID(), log)
	}
}

func TestHealth(t *testing.T) {
	for mode, want := range map[string]Health{"": {Serving: true}, "sick": {Message: "echo: no licence"}} {
		d, def := run1(t, options(t, mode))
		if got, err := d.Health(t.Context()); err != nil || got != want {
			t.Errorf("Health = %+v, %v, want %+v", got, err, want)
		}
		if err := def.Health(t.Context()); (err == nil) != want.Serving {
			t.Errorf("definition's Health = %v", err)
		}
	}
}

// TestClose: asked nicely, a plugin ends by itself; else it is killed, with
// all that it started.
func TestClose(t *testing.T) {
	for mode, kills := range map[string]bool{"": false, "stubborn": true} {
		before := runtime.NumGoroutine()
		o := options(t, mode)
		if kills {
			o.ShutdownGrace = time.Second
		}
		log := &lines{}
		o.Log = slog.New(slog.NewTextHandler(log, nil))
		d := New(o)
		list, err := d.Start(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		child, err := invoke(t, list[0], "spawn", "", "")
		if err != nil {
			t.Fatal(err)
		}
		pid, err := invoke(t, list[0], "pid", "", "")
		if err != nil {
			t.Fatal(err)
		}
		if group, err := invoke(t, list[0], "group", "", ""); err != nil || group != pid {
			t.Errorf("process group = %s, %v, want its own, %s", group, err, pid)
		}
		began := time.Now()
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); (took >= d.o.ShutdownGrace) != kills {
			t.Errorf("%s: Close took %v, want a kill: %v", mode, took, kills)
		}
		for _, text := range []string{pid, child} {
			var n int
			_, _ = fmt.Sscan(text, &n)
			eventually(t, "process is gone", func() bool { return n > 0 && !alive(n) })
		}
		if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "*")); len(left) > 0 {
			t.Errorf("%v is left", left)
		}
		if err := d.Close(); err != nil {
			t.Errorf("second Close = %v", err)
		}
		if _, err := invoke(t, list[0], "echo", "", ""); errs.CodeOf(err) != errs.Unavailable {
			t.Errorf("call after Close = %v, want unavailable", err)
		}
		eventually(t, fmt.Sprintf("goroutines go down to %d", before), func() bool { return runtime.NumGoroutine() <= before })
	}
}

// TestCloseTells: stdin is closed and SIGTERM sent, each by itself, and none of
// it before Close.
func TestCloseTells(t *testing.T) {
	o := options(t, "told")
	o.ShutdownGrace = time.Second
	log := &lines{}
	o.Log = slog.New(slog.NewTextHandler(log, nil))
	d, def := run1(t, o)
	if _, err := invoke(t, def, "echo", "", ""); err != nil {
		t.Fatal(err)
	}
	told := []string{"stdin was closed", "SIGTERM came"}
	for _, text := range told {
		if strings.Contains(log.String(), text) {
			t.Errorf("%s before Close", text)
		}
	}
	d.Close()
	for _, text := range told {
		if !strings.Contains(log.String(), text) {
			t.Errorf("the plugin was not told: %s\n%s", text, log)
		}
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

// TestDeathSignalFollowsTheThread: plugins outlive the threads around their
// start, one of which would take each along.
func TestDeathSignalFollowsTheThread(t *testing.T) {
	o := options(t, "")
	for range 3 {
		drivers := make([]*Driver, 12)
		for i := range drivers {
			drivers[i] = New(o)
		}
		stop := busy()
		list, err := StartAll(t.Context(), drivers...)
		stop()
		if err != nil {
			t.Fatal(err)
		}
		var before []int
		for _, d := range drivers {
			before = append(before, d.current.pid())
		}
		endIdleThreads()
		for i, def := range list {
			if got, err := invoke(t, def, "pid", "", ""); err != nil || got != fmt.Sprint(before[i]) {
				t.Errorf("pid = %s, %v, want %d as before", got, err, before[i])
			}
		}
		for _, d := range drivers {
			d.Close()
		}
	}
}

func TestCloseEndsCallsInFlight(t *testing.T) {
	d, def := run1(t, options(t, ""))
	waiting, failed := make(chan struct{}), make(chan error, 1)
	go func() {
		c := driver.NewContext(t.Context(), nil, nil, func(driver.Progress) { close(waiting) })
		_, err := def.Invoke(c, "echo", "wait", nil, nil)
		failed <- err
	}()
	<-waiting
	d.Close()
	if err := <-failed; err == nil {
		t.Error("the call ended well")
	}
}

// TestOutput: a line of a MiB is cut, a stray print is logged, and neither
// holds up the plugin.
func TestOutput(t *testing.T) {
	o := options(t, "flood")
	log := &lines{}
	o.Log = slog.New(slog.NewTextHandler(log, nil))
	d, def := run1(t, o)
	// The plugin's runtime sends both streams to one pipe: one at a time.
	eventually(t, "stderr is logged", func() bool { return strings.Contains(log.String(), "after the long line") })
	if _, err := invoke(t, def, "print", "", ""); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the stray print is logged", func() bool { return strings.Contains(log.String(), "a stray print") })
	d.Close()
	for l := range strings.Lines(log.String()) {
		if long := strings.Contains(l, "xxxxxxxx"); long && (!strings.Contains(l, "cut=true") || strings.Count(l, "x") > 64<<10+10) || !long && strings.Contains(l, "cut=true") {
			t.Errorf("line of %d bytes: %.80s", len(l), l)
		}
	}
}

// TestGrandchildHoldsOutput: one that left the group does not hang Close.
func TestGrandchildHoldsOutput(t *testing.T) {
	d, def := run1(t, options(t, "holder"))
	if _, err := invoke(t, def, "echo", "", ""); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	d.Close()
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("Close took %v", took)
	}
}

func TestStream(t *testing.T) {
	_, def := run1(t, options(t, ""))
	ctx := func() *driver.Context {
		c, _ := drivertest.Context(nil, t.Context(), nil)
		return c
	}
	// The caller's end of input, then the plugin's last words.
	var got bytes.Buffer
	text := strings.Repeat("hello", 100_000)
	local := struct {
		io.Reader
		io.Writer
	}{strings.NewReader(text), &got}
	if err := def.Stream(ctx(), "echo", "pipe", nil, nil, local); err != nil || got.String() != text+" end" {
		t.Errorf("pipe: %d bytes of %d, %v", got.Len(), len(text)+4, err)
	}
	// The plugin ends while the caller still could say something.
	here, there := net.Pipe()
	defer here.Close()
	answer := make(chan string, 1)
	go func() {
		b := make([]byte, 4)
		_, _ = io.ReadFull(here, b)
		answer <- string(b)
	}()
	if err := def.Stream(ctx(), "echo", "say", nil, nil, there); err != nil || <-answer != "said" {
		t.Errorf("say: %v", err)
	}
	if err := def.Stream(ctx(), "echo", "refuse", nil, nil, there); errs.CodeOf(err) != "fan-stuck" {
		t.Errorf("refuse = %v, want fan-stuck", err)
	}
	// A cancelled stream.
	c, cancel := context.WithCancel(t.Context())
	time.AfterFunc(100*time.Millisecond, cancel)
	idle, other := net.Pipe()
	defer other.Close()
	if err := def.Stream(driver.NewContext(c, nil, nil, nil), "echo", "pipe", nil, nil, idle); errs.CodeOf(err) != errs.Cancelled {
		t.Errorf("cancelled = %v, want cancelled", err)
	}
	// The deadline bounds the opening only.
	brief, end := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer end()
	slow, far := net.Pipe()
	ended := make(chan error, 1)
	go func() {
		ended <- def.Stream(driver.NewContext(brief, nil, nil, nil), "echo", "pipe", nil, nil, slow)
		slow.Close()
	}()
	<-brief.Done()
	select {
	case err := <-ended:
		t.Errorf("the stream ended with its deadline: %v", err)
	case <-time.After(bcx.Grace + 200*time.Millisecond):
	}
	if _, err := io.WriteString(far, "late"); err != nil {
		t.Error(err)
	}
	late := make([]byte, 4)
	if _, err := io.ReadFull(far, late); err != nil || string(late) != "late" {
		t.Errorf("after the deadline: %q, %v", late, err)
	}
	far.Close()
	<-ended
	// Stream operations do not go over Invoke, nor others over Stream.
	if _, err := invoke(t, def, "pipe", "", ""); errs.CodeOf(err) != errs.UnsupportedOperation {
		t.Errorf("Invoke of a stream operation = %v, want unsupported-operation", err)
	}
	if err := def.Stream(ctx(), "echo", "echo", nil, nil, idle); errs.CodeOf(err) != errs.UnsupportedOperation {
		t.Errorf("Stream of another operation = %v, want unsupported-operation", err)
	}
	if err := def.Stream(ctx(), "echo", "pipe", json.RawMessage(`{"mode":"c"}`), nil, idle); errs.CodeOf(err) != errs.InvalidConfig {
		t.Errorf("Stream with a bad configuration = %v, want invalid-config", err)
	}
}

func TestStartAll(t *testing.T) {
	first, second := New(options(t, "")), New(options(t, "two"))
	defer first.Close()
	defer second.Close()
	list, err := StartAll(t.Context(), first, second)
	if err != nil || len(list) != 3 {
		t.Fatalf("StartAll = %d drivers, %v, want 3", len(list), err)
	}
	good, bad := New(options(t, "")), New(options(t, "exits"))
	if list, err := StartAll(t.Context(), good, bad); err == nil || len(list) > 0 {
		t.Errorf("StartAll with one that fails = %v, %v", list, err)
	}
	if _, err := good.Health(t.Context()); errs.CodeOf(err) != errs.Unavailable {
		t.Errorf("the other one's Health = %v, want that it is closed", err)
	}
	if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "*")); len(left) > 2 {
		t.Errorf("%v is left", left)
	}
}

// TestSocketPathLimit: 107 bytes work, 108 are refused before anything starts.
func TestSocketPathLimit(t *testing.T) {
	base, err := os.MkdirTemp("/tmp", "l")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(base)
	for length, ok := range map[int]bool{bcx.MaxSocketPath: true, bcx.MaxSocketPath + 1: false} {
		rest := length - len(socket(filepath.Join(base, "", prefix+"0123456789"))) - 1
		dir := filepath.Join(base, strings.Repeat("d", rest))
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		o := options(t, "")
		t.Setenv("TMPDIR", dir)
		d := New(o)
		_, err := d.Start(t.Context())
		if (err == nil) != ok {
			t.Errorf("socket path of %d bytes: Start = %v", length, err)
		}
		if !ok && (errs.CodeOf(err) != errs.InvalidConfig || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "limit 107")) {
			t.Errorf("Start = %v, want path and limit", err)
		}
		if left, _ := os.ReadDir(dir); !ok && len(left) > 0 {
			t.Errorf("%v was made", left)
		}
		d.Close()
	}
}

// TestSweep takes away what dead hosts left, and nothing else.
func TestSweep(t *testing.T) {
	root := t.TempDir()
	make := func(name string, mode os.FileMode, lock bool) string {
		path := filepath.Join(root, name)
		if err := os.Mkdir(path, 0o700); err != nil {
			t.Fatal(err)
		}
		if lock {
			if err := os.WriteFile(filepath.Join(path, lockName), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	old := time.Now().Add(-2 * time.Hour)
	unlocked := make(prefix+"unlocked", 0o700, false)
	if err := os.Chtimes(unlocked, old, old); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(root, filepath.Join(root, prefix+"link")); err != nil {
		t.Fatal(err)
	}
	gone := []string{make(prefix+"dead", 0o700, true), unlocked}
	kept := []string{make(prefix+"fresh", 0o700, false), make(prefix+"wide", 0o755, true), make("other", 0o700, true), filepath.Join(root, prefix+"link")}
	if os.Geteuid() == 0 {
		foreign := make(prefix+"foreign", 0o700, true)
		if err := os.Chown(foreign, 12345, -1); err != nil {
			t.Fatal(err)
		}
		kept = append(kept, foreign)
	}
	f, err := makeFolder(root, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	held := f.path
	g, err := makeFolder(root, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	kept = append(kept, held, g.path)
	for _, path := range kept {
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("%s was taken away", path)
		}
	}
	for _, path := range gone {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%s is still there", path)
		}
	}
	f.remove()
	g.remove()
	if st, err := os.Lstat(held); err == nil {
		t.Errorf("%s is left: %v", held, st)
	}
}

// TestFoldersAtOnce: no host takes another's folder for a leftover while it is
// being made.
func TestFoldersAtOnce(t *testing.T) {
	root := t.TempDir()
	log := slog.New(slog.DiscardHandler)
	var all sync.WaitGroup
	for range 16 {
		all.Go(func() {
			for range 50 {
				f, err := makeFolder(root, log)
				if err != nil {
					t.Error(err)
					return
				}
				runtime.Gosched()
				if _, err := os.Stat(filepath.Join(f.path, lockName)); err != nil {
					t.Errorf("a folder in use was taken away: %v", err)
				}
				f.remove()
			}
		})
	}
	all.Wait()
}

// TestNoDescriptorLeft: many runs leave neither descriptors nor folders.
func TestNoDescriptorLeft(t *testing.T) {
	o := options(t, "")
	count := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skip("needs Linux: /proc/self/fd")
		}
		return len(list)
	}
	before := 0
	for i := range 6 {
		d := New(o)
		list, err := d.Start(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := invoke(t, list[0], "crash", "", ""); errs.CodeOf(err) != errs.Unreachable {
			t.Fatal(err)
		}
		if _, err := invoke(t, list[0], "echo", "", ""); err != nil {
			t.Fatal(err)
		}
		d.Close()
		if i == 0 {
			before = count()
		}
	}
	eventually(t, "descriptors are closed", func() bool { return count() <= before })
	if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "*")); len(left) > 0 {
		t.Errorf("%v is left", left)
	}
}
