// Command probe takes the agent's place in a box image: it runs a plugin host as
// the agent does, with itself as the shim and as every plugin, tries what
// plugins must not do, and says on the console how each check went.
package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/host"
	"github.com/better-compute/site-appliance/plugins/sandbox"
)

const (
	shimWord = "bcx-shim"
	// dir gets the plugins: copies of this program, and the foreign one.
	dir         = "/run/boxtest"
	foreignPath = "/usr/lib/boxtest/foreign"
	// agent is the group that this program lives in, as a service's is, and cgroup
	// the plugins' in it.
	agent     = "/sys/fs/cgroup/agent"
	cgroup    = agent + "/plugins"
	memoryMax = 128 << 20
	pidsMax   = 64
)

func main() {
	switch {
	case len(os.Args) > 1 && os.Args[1] == shimWord:
		os.Exit(sandbox.ShimMain(os.Args[2:]))
	case len(os.Args) > 1 && os.Args[1] == nothing:
		if len(os.Args) > 2 { // until its parent lets go
			_, _ = io.Copy(io.Discard, os.Stdin)
		}
		return
	case os.Getenv(bcx.CookieVariable) != "":
		os.Exit(plugin(os.Args[0]))
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	check(ctx)
	fmt.Println("boxtest: done")
	<-ctx.Done()
}

// checks are what the test expects to hear of, each run once.
var checks = []struct {
	name string
	run  func(*bench) error
}{
	{"the host starts", (*bench).starts},
	{"the agent moves out of the plugins' way", (*bench).moved},
	{"the confined plugin runs the verified file", (*bench).verified},
	{"each denied call is EPERM, and not without the filter", (*bench).calls},
	{"clone with a namespace is EPERM, and not without the filter", (*bench).clones},
	{"clone3 is ENOSYS, and not without the filter", (*bench).clone3},
	{"a 386 binary is killed, and not without the filter", (*bench).foreign},
	{"data and config are walled off, and not without the wall", (*bench).files},
	{"ipmitool reads a password from its pipe, and from no other file", (*bench).ipmitool},
	{"memory_max is enforced and named", (*bench).memory},
	{"pids_max is enforced and named", (*bench).tasks},
	{"nothing is left at the end", (*bench).end},
}

// check runs all of them, and says one line for each.
func check(ctx context.Context) {
	b := &bench{ctx: ctx}
	for _, c := range checks {
		err := func() (err error) {
			defer func() {
				if r := recover(); r != nil {
					err = fmt.Errorf("panic: %v %s", r, debug.Stack())
				}
			}()
			return c.run(b)
		}()
		if err != nil {
			fmt.Printf("boxtest: FAIL %s: %s\n", c.name, strings.ReplaceAll(err.Error(), "\n", "; "))
			continue
		}
		fmt.Printf("boxtest: ok %s\n", c.name)
	}
}

// bench is the host and what the checks share.
type bench struct {
	ctx  context.Context
	host *host.Host
	sum  string // SHA-256 of the plugins
}

func (b *bench) starts() error {
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return err
	}
	foreign, err := os.ReadFile(foreignPath)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	var pins strings.Builder
	for name, content := range map[string][]byte{
		"confined": self, "free": self, "memory": self, "tasks": self, "foreign": foreign, "foreign-free": foreign,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o755); err != nil {
			return err
		}
		sum := sha256.Sum256(content)
		fmt.Fprintf(&pins, "%x  %s\n", sum, name)
		if name == "confined" {
			b.sum = hex.EncodeToString(sum[:])
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "pins"), []byte(pins.String()), 0o644); err != nil {
		return err
	}
	// As systemd does it: the agent directly in a group that was delegated to it.
	if err := os.Mkdir(agent, 0o755); err != nil {
		return err
	}
	for file, text := range map[string]string{
		"/sys/fs/cgroup/cgroup.subtree_control": "+memory +pids", agent + "/cgroup.procs": strconv.Itoa(os.Getpid()),
	} {
		if err := os.WriteFile(file, []byte(text), 0); err != nil {
			return err
		}
	}
	b.host, err = host.Start(b.ctx, host.Config{
		Dir: dir, Privileged: []string{"free", "foreign-free"}, Sandbox: true, Shim: []string{"/proc/self/exe", shimWord},
		Cgroup: cgroup, MemoryMax: memoryMax, PidsMax: pidsMax, StartTimeout: time.Minute,
		Log: slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
	if err != nil {
		return err
	}
	for _, name := range []string{"confined", "free", "memory", "tasks"} {
		if s := b.status(name); s.State != "running" {
			return fmt.Errorf("plugin %s is %s: %s", name, s.State, s.Reason)
		}
	}
	if s := b.status("confined"); !s.Confined || !s.Filtered || s.FileWall < 2 {
		return fmt.Errorf("plugin is not confined as the box can: %+v", s)
	}
	return nil
}

func (b *bench) status(name string) host.Status {
	for _, s := range b.host.Status() {
		if s.Name == name {
			return s
		}
	}
	return host.Status{Name: name, State: "absent"}
}

func (b *bench) invoke(plugin, operation string, into any, args ...any) error {
	raw, err := json.Marshal(args)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(b.ctx, 2*time.Minute)
	defer cancel()
	out, err := b.host.Invoke(ctx, host.Call{Driver: plugin, Kind: kind, Operation: operation, Args: raw})
	if err != nil || into == nil {
		return err
	}
	return json.Unmarshal(out, into)
}

// moved: cgroup v2 gives no controllers to the children of a group that holds
// processes.
func (b *bench) moved() error {
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return err
	}
	if !strings.Contains("\n"+string(own), "\n0::/agent/main\n") {
		return fmt.Errorf("the agent is in %q, want /agent/main", own)
	}
	for _, dir := range []string{agent, cgroup} {
		enabled, err := os.ReadFile(filepath.Join(dir, "cgroup.subtree_control"))
		if err != nil {
			return err
		}
		for _, c := range []string{"memory", "pids"} {
			if !slices.Contains(strings.Fields(string(enabled)), c) {
				return fmt.Errorf("%s enables %q, want %s in it", dir, enabled, c)
			}
		}
	}
	return nil
}

func (b *bench) verified() error {
	exe := fmt.Sprintf("/proc/%d/exe", b.status("confined").PID)
	content, err := os.ReadFile(exe)
	if err != nil {
		return err
	}
	if got := sha256.Sum256(content); hex.EncodeToString(got[:]) != b.sum {
		return fmt.Errorf("%s has SHA-256 %x, the pin is %s", exe, got, b.sum)
	}
	if to, err := os.Readlink(exe); err != nil || to != filepath.Join(dir, "confined") {
		return fmt.Errorf("%s is %s, %v", exe, to, err)
	}
	return nil
}

// both asks the confined plugin and the free one the same.
func (b *bench) both(operation string, args ...any) (confined, free map[string]string, err error) {
	if err := b.invoke("confined", operation, &confined, args...); err != nil {
		return nil, nil, err
	}
	return confined, free, b.invoke("free", operation, &free, args...)
}

func (b *bench) calls() error {
	confined, free, err := b.both("calls")
	if err != nil {
		return err
	}
	var wrong []error
	names := sandbox.Denied("amd64")
	for _, name := range names {
		if confined[name] != "EPERM" {
			wrong = append(wrong, fmt.Errorf("%s is %q, want EPERM", name, confined[name]))
		}
		if got, tried := free[name]; !tried || got == "EPERM" {
			wrong = append(wrong, fmt.Errorf("without the filter %s is %q, want anything but EPERM", name, got))
		}
	}
	if len(confined) != len(names) {
		wrong = append(wrong, fmt.Errorf("%d calls were tried, %d are denied", len(confined), len(names)))
	}
	fmt.Printf("boxtest: %d calls; without the filter %v\n", len(names), free)
	return errors.Join(wrong...)
}

func (b *bench) clones() error {
	confined, free, err := b.both("clones")
	if err != nil {
		return err
	}
	var wrong []error
	if len(confined) != 8 || confined["none"] != "" {
		wrong = append(wrong, fmt.Errorf("clones = %v", confined))
	}
	for name, got := range confined {
		if name != "none" && got != "EPERM" {
			wrong = append(wrong, fmt.Errorf("clone with %s is %q, want EPERM", name, got))
		}
		if free[name] != "" {
			wrong = append(wrong, fmt.Errorf("without the filter clone with %s is %q, want it to work", name, free[name]))
		}
	}
	return errors.Join(wrong...)
}

func (b *bench) clone3() error {
	confined, free, err := b.both("clone3")
	if err == nil && (confined["clone3"] != "ENOSYS" || free["clone3"] == "ENOSYS") {
		err = fmt.Errorf("clone3 is %q, without the filter %q", confined["clone3"], free["clone3"])
	}
	return err
}

func (b *bench) foreign() error {
	if s := b.status("foreign"); s.State != "failed" || !strings.Contains(s.Reason, "bad system call") {
		return fmt.Errorf("the 386 binary is %s: %s", s.State, s.Reason)
	}
	if s := b.status("foreign-free"); s.State != "failed" || !strings.Contains(s.Reason, "exit status 42") {
		return fmt.Errorf("without the filter it is %s: %s, want it to run to its end", s.State, s.Reason)
	}
	return nil
}

func (b *bench) files() error {
	mine := "/data/boxtest"
	if err := os.WriteFile(mine, []byte("x"), 0o644); err != nil {
		return err
	}
	// Modes are no wall here: what is refused is refused by Landlock.
	for _, path := range []string{"/data", "/config"} {
		if st, err := os.Stat(path); err != nil || !st.IsDir() {
			return fmt.Errorf("%s is not there: %v", path, err)
		}
	}
	if err := os.Chmod("/data", 0o755); err != nil {
		return err
	}
	refused := []string{"/", "/data", mine, "/config", "/run", "/run/bc", "/root", "/var/lib"}
	refused = slices.DeleteFunc(refused, func(path string) bool {
		_, err := os.Stat(path)
		return errors.Is(err, fs.ErrNotExist)
	})
	allowed := []string{"/etc", "/usr/lib", "/proc/self/status", "/sys/class", "/dev/null", "/dev/urandom"}
	var paths []any
	for _, p := range append(slices.Clone(refused), allowed...) {
		paths = append(paths, p)
	}
	confined, free, err := b.both("open", paths...)
	if err != nil {
		return err
	}
	var wrong []error
	for _, p := range refused {
		if confined[p] != "EACCES" {
			wrong = append(wrong, fmt.Errorf("open %s: %q, want EACCES", p, confined[p]))
		}
	}
	for _, p := range allowed {
		if confined[p] != "" {
			wrong = append(wrong, fmt.Errorf("open %s: %q, want it to work", p, confined[p]))
		}
	}
	for p, got := range free {
		if got != "" {
			wrong = append(wrong, fmt.Errorf("without the wall open %s: %q", p, got))
		}
	}
	fmt.Printf("boxtest: walled off %v\n", refused)
	return errors.Join(wrong...)
}

func (b *bench) ipmitool() error {
	const refused, tried = "Unable to open password file", "Unable to establish"
	for path, want := range map[string]string{"/dev/fd/3": tried, "/data/boxtest": refused} {
		var got string
		if err := b.invoke("confined", "ipmitool", &got, path); err != nil {
			return err
		}
		if !strings.Contains(got, want) || want == tried && strings.Contains(got, refused) {
			return fmt.Errorf("ipmitool -f %s says %q, want %q", path, got, want)
		}
	}
	return nil
}

// exceeds has a plugin use up what it is given, expects the error to name the
// limit, and the plugin to serve again.
func (b *bench) exceeds(plugin, operation, want string) error {
	err := b.invoke(plugin, operation, nil)
	var e *errs.Error
	if !errors.As(err, &e) || !strings.Contains(e.Message, want) {
		return fmt.Errorf("%s = %v, want %q", operation, err, want)
	}
	fmt.Printf("boxtest: %v\n", err)
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if err = b.invoke(plugin, "clone3", nil); err == nil {
			return nil
		}
	}
	return fmt.Errorf("it does not serve again: %w", err)
}

func (b *bench) memory() error {
	if err := b.exceeds("memory", "fill", fmt.Sprintf("killed by the kernel: out of memory, limit %d bytes", memoryMax)); err != nil {
		return err
	}
	if s := b.status("memory"); s.Restarts != 1 {
		return fmt.Errorf("%d restarts, want 1: %+v", s.Restarts, s)
	}
	return nil
}

func (b *bench) tasks() error {
	return b.exceeds("tasks", "breed", fmt.Sprintf("refused the plugin a new task: limit %d", pidsMax))
}

func (b *bench) end() error {
	if err := b.host.Close(); err != nil {
		return err
	}
	var wrong []error
	for _, pattern := range []string{cgroup + "/plugin-*", "/run/bcx/*"} {
		if names, err := filepath.Glob(pattern); err != nil || len(names) > 0 {
			wrong = append(wrong, fmt.Errorf("left: %v, %v", names, err))
		}
	}
	return errors.Join(wrong...)
}
