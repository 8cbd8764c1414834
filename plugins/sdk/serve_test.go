package sdk_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/sdk"
)

// TestMain lets the test binary be a plugin, by its arguments.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "plugin" {
		os.Exit(sdk.Main(sdk.Options{PluginVersion: "test"}, noisy(len(os.Args) > 2), noisy(false)))
	}
	if len(os.Args) > 1 && os.Args[1] == "one" {
		os.Exit(sdk.Main(sdk.Options{PluginVersion: "test"}, noisy(false)))
	}
	os.Exit(m.Run())
}

type part struct{}

func noisy(other bool) *driver.Definition {
	id := "noisy"
	if other {
		id = "other"
	}
	op := func(f func(*driver.Context) (any, error)) driver.Operation[part] {
		return func(ctx *driver.Context, _ part, _ driver.Args) (any, error) { return f(ctx) }
	}
	d, err := driver.Define(driver.Spec[struct{}]{
		ID: id, Version: "1.0.0", RunsOn: "site",
		Parse: func(json.RawMessage) (struct{}, error) { return struct{}{}, nil },
	}, driver.Implement(driver.Kind[part]{Name: "noise", Operations: map[string]driver.Operation[part]{
		"print": op(func(*driver.Context) (any, error) {
			fmt.Println("a stray line")
			cmd := exec.Command("/bin/echo", "a stray program")
			cmd.Stdout = os.Stdout
			return nil, cmd.Run()
		}),
		"log": op(func(ctx *driver.Context) (any, error) {
			ctx.Log.Info("a line")
			log.Print("another line")
			return nil, nil
		}),
		"ignored": op(func(*driver.Context) (any, error) {
			out, err := exec.Command("/bin/cat", "/proc/self/status").Output()
			for line := range strings.Lines(string(out)) {
				if mask, ok := strings.CutPrefix(line, "SigIgn:"); ok {
					return strings.TrimSpace(mask), nil
				}
			}
			return nil, errors.Join(err, errors.New("no SigIgn"))
		}),
	}}, func(struct{}, *driver.Context) (part, error) { return part{}, nil }))
	if err != nil {
		panic(err)
	}
	return d
}

type running struct {
	*exec.Cmd
	client      *bcx.Client
	stdin       io.Closer
	out, errors *os.File
	lines       *bufio.Reader
}

// start is a host that runs this binary as a plugin.
func start(t *testing.T, args ...string) *running {
	t.Helper()
	dir, err := os.MkdirTemp("", "bcx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return startIn(t, dir, args...)
}

func startIn(t *testing.T, dir string, args ...string) *running {
	t.Helper()
	self, err := bcx.NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &running{Cmd: exec.Command(path, args...)}
	p.Env = []string{bcx.CookieVariable + "=" + bcx.Cookie, bcx.SocketDirVariable + "=" + dir, bcx.ClientCertVariable + "=" + self.PEM()}
	if p.stdin, err = p.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	var theirs [2]*os.File
	if p.out, theirs[0], err = os.Pipe(); err != nil {
		t.Fatal(err)
	}
	if p.errors, theirs[1], err = os.Pipe(); err != nil {
		t.Fatal(err)
	}
	p.Stdout, p.Stderr = theirs[0], theirs[1]
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	theirs[0].Close()
	theirs[1].Close()
	p.lines = bufio.NewReader(p.out)
	line, err := p.lines.ReadBytes('\n')
	if err != nil {
		said, _ := io.ReadAll(p.errors)
		t.Fatalf("no handshake: %v, %s, %v", err, said, p.Wait())
	}
	h, err := bcx.ParseHandshake(line, filepath.Clean(dir))
	if err != nil {
		t.Fatal(err)
	}
	p.client = bcx.Dial(self, h)
	t.Cleanup(func() {
		p.client.Close()
		_ = p.Process.Kill()
		_ = p.Wait()
		p.out.Close()
		p.errors.Close()
	})
	return p
}

// TestSocketPath has a path of as many bytes as a socket's address holds, and of one more.
func TestSocketPath(t *testing.T) {
	root, err := os.MkdirTemp("", "bcx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	long := func(n int) string {
		dir := filepath.Join(root, strings.Repeat("d", n-len(root)-len(bcx.SocketName)-2))
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	p := startIn(t, long(bcx.MaxSocketPath), "one")
	if _, err := p.invoke(t.Context(), "log"); err != nil {
		t.Errorf("on a path of %d bytes: %v", bcx.MaxSocketPath, err)
	}
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	self, err := bcx.NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, "one")
	cmd.Env = []string{
		bcx.CookieVariable + "=" + bcx.Cookie, bcx.SocketDirVariable + "=" + long(bcx.MaxSocketPath+1), bcx.ClientCertVariable + "=" + self.PEM(),
	}
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "108 bytes, limit 107") {
		t.Errorf("on a path of %d bytes: %v, %s", bcx.MaxSocketPath+1, err, out)
	}
}

func (p *running) invoke(ctx context.Context, operation string) (string, error) {
	stream, err := p.client.Invoke(ctx, connect.NewRequest(&driverv1.InvokeRequest{Driver: "noisy", Kind: "noise", Operation: operation}))
	if err != nil {
		return "", err
	}
	defer stream.Close()
	for stream.Receive() {
		if e := stream.Msg().GetError(); e != nil {
			return "", bcx.FromWire(e)
		}
		if r := stream.Msg().GetResult(); r != nil {
			return r.GetResultJson(), nil
		}
	}
	return "", stream.Err()
}

func TestByHand(t *testing.T) {
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, "one")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, _ := cmd.Output()
	if code := cmd.ProcessState.ExitCode(); code != 1 || len(out) > 0 || !strings.Contains(stderr.String(), "plugin") {
		t.Errorf("by hand: code %d, stdout %q, stderr %q, want 1, nothing, and what it is", code, out, stderr.String())
	}
}

func TestOneDriverTwice(t *testing.T) {
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, "plugin")
	cmd.Env = []string{bcx.CookieVariable + "=" + bcx.Cookie}
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState.ExitCode() != 1 || !strings.Contains(string(out), "driver noisy is given twice") {
		t.Errorf("a driver given twice: %v, %s", err, out)
	}
	start(t, "plugin", "two")
}

// TestStrayPrint has a driver, and a program that it runs, print on stdout.
func TestStrayPrint(t *testing.T) {
	p := start(t, "one")
	for range 3 {
		if _, err := p.invoke(t.Context(), "print"); err != nil {
			t.Fatal(err)
		}
	}
	p.stdin.Close()
	rest, err := io.ReadAll(p.lines)
	if err != nil || len(rest) > 0 {
		t.Errorf("after the handshake stdout holds %q, %v, want nothing", rest, err)
	}
	said, err := io.ReadAll(p.errors)
	if err != nil || strings.Count(string(said), "a stray line") != 3 || strings.Count(string(said), "a stray program") != 3 {
		t.Errorf("stderr = %q, %v, want the stray lines", said, err)
	}
	if err := p.Wait(); err != nil {
		t.Errorf("it ends with %v", err)
	}
}

// TestLogsAreJSON has a driver log by its context and by package log.
func TestLogsAreJSON(t *testing.T) {
	p := start(t, "one")
	if _, err := p.invoke(t.Context(), "log"); err != nil {
		t.Fatal(err)
	}
	p.stdin.Close()
	said, err := io.ReadAll(p.errors)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for line := range strings.Lines(string(said)) {
		var entry struct{ Msg, Driver string }
		if err := json.Unmarshal([]byte(line), &entry); err != nil {
			t.Errorf("stderr has the line %q", line)
		}
		seen[entry.Msg+" "+entry.Driver] = true
	}
	if !seen["a line noisy"] || !seen["another line "] {
		t.Errorf("stderr = %s, want both lines", said)
	}
}

// TestNobodyReads closes the plugin's pipes, as the host's death does, before
// its stdin: what it logs then must not kill it.
func TestNobodyReads(t *testing.T) {
	p := start(t, "one")
	p.out.Close()
	p.errors.Close()
	for _, operation := range []string{"log", "log", "log"} {
		if _, err := p.invoke(t.Context(), operation); err != nil {
			t.Fatalf("%s with no reader: %v", operation, err)
		}
	}
	p.stdin.Close()
	if err := p.Wait(); err != nil {
		t.Errorf("it ends with %v", err)
	}
}

// TestProgramsGetSignals shows that what the SDK ignores is not ignored by the
// programs that a driver runs.
func TestProgramsGetSignals(t *testing.T) {
	if _, err := os.Stat("/proc/self/status"); err != nil {
		t.Skip("needs /proc: a program's ignored signals are read there")
	}
	p := start(t, "one")
	mask, err := p.invoke(t.Context(), "ignored")
	if err != nil {
		t.Fatal(err)
	}
	var ignored uint64
	if _, err := fmt.Sscanf(strings.Trim(mask, `"`), "%x", &ignored); err != nil {
		t.Fatal(err)
	}
	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGPIPE, syscall.SIGTERM} {
		if ignored&(1<<(s-1)) != 0 {
			t.Errorf("a program that the driver runs ignores %v", s)
		}
	}
}
