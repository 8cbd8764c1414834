package host_test

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
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1/driverv1connect"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/host"
	"github.com/better-compute/site-appliance/plugins/host/hosttest"
	"github.com/better-compute/site-appliance/plugins/sdk"
)

// The test binary is the shim, each plugin (by its name), and a host to kill.
func TestMain(m *testing.M) {
	inherited := handedOn()
	hosttest.Shim()
	switch {
	case os.Getenv(bcx.CookieVariable) != "":
		os.Exit(plugin(os.Args[0], inherited))
	case os.Getenv("HOST_TO_KILL") != "":
		hostToKill()
	}
	os.Exit(m.Run())
}

// handedOn lists the descriptors over 2 that an exec left open: Go marks its own.
func handedOn() (list []int) {
	for fd := 3; fd < 256; fd++ {
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			list = append(list, fd)
		}
	}
	return list
}

func plugin(name string, inherited []int) int {
	switch name {
	case "describes2", "twice", "stubborn":
		if name == "stubborn" {
			// It does not even look whether its stdin ends.
			signal.Ignore(syscall.SIGTERM, syscall.SIGPIPE)
			go chatter()
		}
		if err := bcx.Serve(context.Background(), describer{name: name}, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		return 1
	case "tells", "pretends":
		fmt.Fprintln(os.Stderr, name, "has run")
		time.Sleep(time.Hour)
	case "silent":
		time.Sleep(time.Hour)
	case "exits":
		fmt.Fprintln(os.Stderr, "no licence")
		return 3
	case "garbage":
		fmt.Println("hello, world")
		time.Sleep(time.Hour)
	case "endless":
		for range 1 << 20 {
			fmt.Print("endless")
		}
		time.Sleep(time.Hour)
	case "protocol2", "outside":
		id, _ := bcx.NewIdentity()
		dir := os.Getenv(bcx.SocketDirVariable)
		if name == "outside" {
			dir = "/tmp"
		}
		line, _ := bcx.Handshake{Socket: dir + "/plugin.sock", Certificate: id.DER()}.Line()
		if name == "protocol2" {
			line = strings.Replace(line, "bcx|1|", "bcx|2|", 1)
		}
		fmt.Print(line)
		time.Sleep(time.Hour)
	}
	id, version := "echo", "1.0.0"
	switch name {
	case "newer":
		version = "1.10.0"
	case "older":
		version = "1.9.0"
	case "builtin":
		id = "redfish"
	case "flood":
		go flood()
	}
	d, err := echoDriver(id, version, name, inherited)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return sdk.Main(sdk.Options{PluginVersion: "test"}, d)
}

func chatter() {
	for {
		fmt.Fprintln(os.Stderr, "still here")
		time.Sleep(time.Millisecond)
	}
}

func flood() {
	w := bufio.NewWriter(os.Stderr)
	fmt.Fprintln(w, strings.Repeat("m", 1<<20))
	for range 200 {
		fmt.Fprintln(w, strings.Repeat("x", 100<<10))
	}
	w.Flush()
	fmt.Fprintln(os.Stdout, "still here")
}

// describer is a plugin that describes what no host takes.
type describer struct {
	driverv1connect.UnimplementedDriverPluginHandler
	name string
}

func (d describer) Describe(context.Context, *connect.Request[driverv1.DescribeRequest]) (*connect.Response[driverv1.DescribeResponse], error) {
	acme := bcx.Described(driver.Manifest{ID: "acme", Version: "1.0.0", Kinds: []string{"power"}, RunsOn: "site"})
	answer := &driverv1.DescribeResponse{Protocol: bcx.Protocol, Drivers: []*driverv1.DescribedDriver{acme}}
	switch d.name {
	case "describes2":
		answer.Protocol = 2
	case "twice":
		answer.Drivers = append(answer.Drivers, acme)
	}
	return connect.NewResponse(answer), nil
}

type echo struct{ plugin string }

func text(raw json.RawMessage) (s string, err error) {
	if json.Unmarshal(raw, &s) != nil {
		return "", errs.New(errs.InvalidArgs, "want a string")
	}
	return s, nil
}

// echoDriver has an operation per thing that a plugin can do to its host.
func echoDriver(id, version, plugin string, inherited []int) (*driver.Definition, error) {
	op := func(f func(ctx *driver.Context, args driver.Args) (any, error)) driver.Operation[*echo] {
		return func(ctx *driver.Context, _ *echo, args driver.Args) (any, error) { return f(ctx, args) }
	}
	kind := driver.Kind[*echo]{Name: "echo", Operations: map[string]driver.Operation[*echo]{
		"echo": op(func(ctx *driver.Context, args driver.Args) (any, error) { return args, nil }),
		"name": op(func(*driver.Context, driver.Args) (any, error) { return plugin, nil }),
		"progress": op(func(ctx *driver.Context, _ driver.Args) (any, error) {
			for i := range 3 {
				ctx.Emit(driver.Progress{Phase: "count", Message: "counting", Done: uint64(i + 1), Total: 3})
			}
			return nil, nil
		}),
		"context": op(func(ctx *driver.Context, _ driver.Args) (any, error) {
			return []string{ctx.IdempotencyKey, ctx.Traceparent, ctx.TargetNodeID}, nil
		}),
		"secret": op(func(ctx *driver.Context, args driver.Args) (any, error) {
			ref, err := text(args[0])
			if err != nil {
				return nil, err
			}
			v, err := ctx.Secrets.Resolve(ctx, driver.Ref(ref))
			return string(v.Reveal()), err
		}),
		"fail": op(func(ctx *driver.Context, _ driver.Args) (any, error) {
			return nil, errs.Retry("fan-stuck", "fan 3 does not turn")
		}),
		"failSafe": op(func(ctx *driver.Context, _ driver.Args) (any, error) {
			return nil, errs.Retry("fan-stuck", "fan 3 does not turn")
		}),
		"plain":  op(func(*driver.Context, driver.Args) (any, error) { return nil, errors.New("oh") }),
		"panics": op(func(*driver.Context, driver.Args) (any, error) { panic("at the disco") }),
		"deaf": op(func(*driver.Context, driver.Args) (any, error) {
			time.Sleep(5 * time.Second)
			return nil, nil
		}),
		"wait": op(func(ctx *driver.Context, _ driver.Args) (any, error) {
			ctx.Emit(driver.Progress{Phase: "waiting"})
			<-ctx.Done()
			return nil, ctx.Err()
		}),
		"crash": op(func(*driver.Context, driver.Args) (any, error) {
			return nil, syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}),
		"big": op(func(*driver.Context, driver.Args) (any, error) { return strings.Repeat("x", bcx.MaxMessage), nil }),
		"spawn": op(func(*driver.Context, driver.Args) (any, error) {
			cmd := exec.Command("/bin/sleep", "600")
			if err := cmd.Start(); err != nil {
				return nil, err
			}
			return cmd.Process.Pid, nil
		}),
		// escape starts a child that leaves the group and keeps stderr; alone: with
		// nothing in its environment either.
		"escape": op(func(_ *driver.Context, args driver.Args) (any, error) {
			cmd := exec.Command("/bin/sleep", "600")
			cmd.Stderr, cmd.SysProcAttr = os.Stderr, &syscall.SysProcAttr{Setsid: true}
			if len(args) > 0 {
				cmd.Env, cmd.SysProcAttr = []string{}, nil
			}
			if err := cmd.Start(); err != nil {
				return nil, err
			}
			return cmd.Process.Pid, nil
		}),
		"leak": op(func(ctx *driver.Context, _ driver.Args) (any, error) {
			v, err := ctx.Secrets.Resolve(ctx, "password")
			if err != nil {
				return nil, err
			}
			fmt.Fprintf(os.Stderr, "stderr says %s\n", v.Reveal())
			fmt.Fprintf(os.Stdout, "stdout says %s\n", v.Reveal())
			ctx.Emit(driver.Progress{Phase: "leak", Message: "progress says " + string(v.Reveal())})
			return nil, fmt.Errorf("the error says %s", v.Reveal())
		}),
		"sized": op(func(_ *driver.Context, args driver.Args) (any, error) {
			var n int
			if len(args) != 1 || json.Unmarshal(args[0], &n) != nil {
				return nil, errs.New(errs.InvalidArgs, "want a size")
			}
			return strings.Repeat("x", n-2), nil // with its quotes, n bytes
		}),
		"inherited": op(func(*driver.Context, driver.Args) (any, error) { return inherited, nil }),
		"open": op(func(_ *driver.Context, args driver.Args) (any, error) {
			answers := map[string]string{}
			for _, a := range args {
				path, err := text(a)
				if err != nil {
					return nil, err
				}
				fd, err := unix.Open(path, unix.O_RDONLY, 0)
				if answers[path] = "ok"; err != nil {
					answers[path] = unix.ErrnoName(err.(unix.Errno))
				} else {
					unix.Close(fd)
				}
			}
			return answers, nil
		}),
		"environ": op(func(*driver.Context, driver.Args) (any, error) { return os.Environ(), nil }),
		"files": op(func(*driver.Context, driver.Args) (any, error) {
			entries, err := os.ReadDir("/proc/self/fd")
			var list []string
			for _, e := range entries {
				if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.HasPrefix(to, "/") {
					list = append(list, to)
				}
			}
			return list, err
		}),
		"x32": op(func(*driver.Context, driver.Args) (any, error) {
			_, _, e := unix.Syscall(0x40000000|unix.SYS_GETPID, 0, 0, 0)
			return unix.ErrnoName(e), nil
		}),
		"denied": op(func(*driver.Context, driver.Args) (any, error) {
			answers := map[string]string{}
			for name, c := range map[string][2]uintptr{
				"unshare": {unix.SYS_UNSHARE, unix.CLONE_NEWUSER}, "perf_event_open": {unix.SYS_PERF_EVENT_OPEN, 0},
				"mount": {unix.SYS_MOUNT, 0}, "bpf": {unix.SYS_BPF, 0}, "ptrace": {unix.SYS_PTRACE, 99},
				"keyctl": {unix.SYS_KEYCTL, 99}, "io_uring_setup": {unix.SYS_IO_URING_SETUP, 0}, "clone3": {unix.SYS_CLONE3, 0},
				"getpid": {unix.SYS_GETPID, 0},
			} {
				_, _, e := unix.Syscall(c[0], c[1], 0, 0)
				answers[name] = unix.ErrnoName(e)
			}
			cmd := exec.Command("/bin/true")
			cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNET}
			answers["clone(new user and net)"] = fmt.Sprint(cmd.Run())
			answers["run a program"] = fmt.Sprint(exec.Command("/bin/true").Run())
			return answers, nil
		}),
	}, Streams: map[string]driver.StreamOperation[*echo]{
		"tunnel": func(_ *driver.Context, _ *echo, _ driver.Args, stream io.ReadWriter) error {
			_, err := io.Copy(stream, stream)
			return err
		},
	}}
	if plugin == "other" {
		kind.Name = "other"
	}
	return driver.Define(driver.Spec[struct{}]{
		ID: id, Version: version, RunsOn: "site",
		Schema: json.RawMessage(`{"type":"object","properties":{"address":{"type":"string"},"mirror":{"type":"string","format":"uri"}}}`),
		Parse:  func(raw json.RawMessage) (struct{}, error) { return struct{}{}, nil },
		Health: func(context.Context) error {
			fmt.Fprintln(os.Stderr, "asked for its health")
			return nil
		},
		Validate: func(ctx *driver.Context, _ struct{}) error {
			if _, err := ctx.Secrets.Resolve(ctx, "password"); err != nil {
				return err
			}
			return errs.New("log-in-refused", "the BMC refuses to log in")
		},
		RetrySafe: func() []string {
			return []string{kind.Name + ".failSafe"}
		}(),
	}, driver.Implement(kind, func(struct{}, *driver.Context) (*echo, error) { return &echo{plugin}, nil }))
}

// hostToKill is a host that starts, spawns in its plugin, and says the numbers of
// all that runs.
func hostToKill() {
	h, err := host.Start(context.Background(), host.Config{
		Dir: os.Getenv("HOST_TO_KILL"), SocketRoot: os.Getenv("SOCKET_ROOT"), User: os.Getenv("PLUGIN_USER"), Cgroup: os.Getenv("CGROUP"),
		Sandbox: true, Shim: []string{"/proc/self/exe", "bcx-shim"}, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		panic(err)
	}
	line := []string{strconv.Itoa(h.Status()[0].PID)}
	for _, c := range strings.Fields(os.Getenv("CALLS")) {
		operation, args, _ := strings.Cut(c, ":")
		out, err := h.Invoke(context.Background(), host.Call{Driver: "echo", Kind: "echo", Operation: operation, Args: json.RawMessage(args)})
		if err != nil {
			panic(err)
		}
		line = append(line, string(out))
	}
	fmt.Println(strings.Join(line, " "))
	// Under load until it is killed.
	for range 4 {
		go func() {
			for {
				_, _ = h.Invoke(context.Background(), host.Call{Driver: "echo", Kind: "echo", Operation: "progress"})
			}
		}()
	}
	time.Sleep(time.Minute)
}
