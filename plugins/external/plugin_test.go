//go:build linux

package external

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1/driverv1connect"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/sdk"
)

// The test binary is each plugin, by MODE.
func TestMain(m *testing.M) {
	switch {
	case os.Getenv(bcx.CookieVariable) != "":
		os.Exit(plugin(os.Getenv("MODE")))
	case os.Getenv("HOST_TO_KILL") != "":
		hostToKill()
	}
	os.Exit(m.Run())
}

func plugin(mode string) int {
	// Whatever a test forgets, no plugin outlives it for long.
	time.AfterFunc(time.Minute, func() { os.Exit(9) })
	switch mode {
	case "silent":
		time.Sleep(time.Minute)
	case "exits":
		return 3
	case "garbage":
		fmt.Println("hello, world")
		time.Sleep(time.Minute)
	case "protocol2":
		id, _ := bcx.NewIdentity()
		line, _ := bcx.Handshake{Socket: os.Getenv(bcx.SocketDirVariable) + "/plugin.sock", Certificate: id.DER()}.Line()
		fmt.Print(strings.Replace(line, "bcx|1|", "bcx|2|", 1))
		time.Sleep(time.Minute)
	case "mute":
		id, _ := bcx.NewIdentity()
		path := os.Getenv(bcx.SocketDirVariable) + "/plugin.sock"
		_, _ = net.Listen("unix", path)
		line, _ := bcx.Handshake{Socket: path, Certificate: id.DER()}.Line()
		fmt.Print(line)
		time.Sleep(time.Minute)
	case "liar":
		_ = bcx.Serve(context.Background(), liar{}, os.Stdout)
		return 0
	case "stubborn":
		signal.Ignore(syscall.SIGTERM)
		_, _ = start("/bin/sleep", "60")
		if self, err := echoDriver("echo"); err == nil {
			h, _ := sdk.NewHandler(sdk.Options{}, self)
			_ = bcx.Serve(context.Background(), h, os.Stdout)
		}
	case "told":
		// It ends by neither, nor by a reader that is gone, and says what it was told.
		signal.Ignore(syscall.SIGPIPE)
		terminated := make(chan os.Signal, 1)
		signal.Notify(terminated, syscall.SIGTERM)
		go func() {
			<-terminated
			fmt.Fprintln(os.Stderr, "SIGTERM came")
		}()
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin)
			fmt.Fprintln(os.Stderr, "stdin was closed")
		}()
		if self, err := echoDriver("echo"); err == nil {
			h, _ := sdk.NewHandler(sdk.Options{}, self)
			_ = bcx.Serve(context.Background(), h, os.Stdout)
		}
	case "flood":
		go func() {
			fmt.Fprintln(os.Stderr, strings.Repeat("x", 1<<20))
			fmt.Fprintln(os.Stderr, "after the long line")
		}()
	case "holder":
		// It leaves the group and keeps stderr.
		cmd := exec.Command("/bin/sleep", "30")
		cmd.Stderr = os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		_ = cmd.Start()
	}
	id := "echo"
	if mark := os.Getenv("MARK"); mark != "" {
		if _, err := os.Stat(mark); err == nil {
			id = "other"
		}
		_ = os.WriteFile(mark, nil, 0o600)
	}
	d, err := echoDriver(id)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	list := []*driver.Definition{d}
	if mode == "two" {
		second, _ := echoDriver("second")
		list = append(list, second)
	}
	return sdk.Main(sdk.Options{PluginVersion: "test"}, list...)
}

// liar is a plugin without the sdk that says of everything that it did not run
// and can be repeated, and describes an operation as retry-safe.
type liar struct {
	driverv1connect.UnimplementedDriverPluginHandler
}

func (liar) Describe(context.Context, *connect.Request[driverv1.DescribeRequest]) (*connect.Response[driverv1.DescribeResponse], error) {
	return connect.NewResponse(&driverv1.DescribeResponse{Protocol: bcx.Protocol, Drivers: []*driverv1.DescribedDriver{
		bcx.Described(driver.Manifest{ID: "echo", Version: "1", Kinds: []string{"echo"}, RunsOn: "control-plane", RetrySafe: []string{"echo.safe"}}),
	}}), nil
}

func (liar) Invoke(_ context.Context, r *connect.Request[driverv1.InvokeRequest], s *connect.ServerStream[driverv1.InvokeResponse]) error {
	switch r.Msg.GetOperation() {
	case "nothing":
		return nil
	case "late": // within the second that a host waits beyond the deadline
		time.Sleep(time.Until(time.UnixMilli(r.Msg.GetDeadlineMs()).Add(300 * time.Millisecond)))
		return s.Send(&driverv1.InvokeResponse{Event: &driverv1.InvokeResponse_Error{
			Error: &driverv1.Error{Code: "timeout", Message: "said late"},
		}})
	case "text":
		return s.Send(&driverv1.InvokeResponse{Event: &driverv1.InvokeResponse_Result{Result: &driverv1.Result{ResultJson: "on"}}})
	}
	return s.Send(&driverv1.InvokeResponse{Event: &driverv1.InvokeResponse_Error{
		Error: &driverv1.Error{Code: "unavailable", Message: "come again", Retryable: true},
	}})
}

// hostToKill starts a plugin in the mode that its variable names, says who it
// and its children are, and waits for its end.
func hostToKill() {
	path, _ := os.Executable()
	pin, _ := SHA256File(path)
	env := map[string]string{"MODE": os.Getenv("HOST_TO_KILL")}
	list, err := New(Options{Command: []string{path}, SHA256: pin, Env: env}).Start(context.Background())
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	for _, operation := range []string{"pid", "spawn", "escape"} {
		pid, err := list[0].Invoke(driver.NewContext(context.Background(), nil, nil, nil), "echo", operation, nil, nil)
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println(string(pid))
	}
	time.Sleep(time.Minute)
	os.Exit(1)
}

func start(name string, args ...string) (int, error) {
	cmd := exec.Command(name, args...)
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	return cmd.Process.Pid, nil
}

type echo struct{ config string }

// echoDriver has an operation per thing that a plugin can do to its host.
func echoDriver(id string) (*driver.Definition, error) {
	op := func(f func(ctx *driver.Context, args driver.Args) (any, error)) driver.Operation[*echo] {
		return func(ctx *driver.Context, _ *echo, args driver.Args) (any, error) { return f(ctx, args) }
	}
	kind := driver.Kind[*echo]{Name: "echo", Operations: map[string]driver.Operation[*echo]{
		"echo": op(func(_ *driver.Context, args driver.Args) (any, error) { return args, nil }),
		"config": func(_ *driver.Context, e *echo, _ driver.Args) (any, error) {
			return e.config, nil
		},
		"nothing": op(func(*driver.Context, driver.Args) (any, error) { return nil, nil }),
		"pid":     op(func(*driver.Context, driver.Args) (any, error) { return os.Getpid(), nil }),
		"progress": op(func(ctx *driver.Context, _ driver.Args) (any, error) {
			for i := range 3 {
				ctx.Emit(driver.Progress{Phase: "count", Message: "counting", Done: uint64(i + 1), Total: 3})
			}
			return "counted", nil
		}),
		"context": op(func(ctx *driver.Context, _ driver.Args) (any, error) {
			return []string{ctx.IdempotencyKey, ctx.Traceparent, ctx.TargetNodeID}, nil
		}),
		"left": op(func(ctx *driver.Context, _ driver.Args) (any, error) {
			t, _ := ctx.Deadline()
			return t.UnixMilli(), nil
		}),
		"secret": op(func(ctx *driver.Context, args driver.Args) (any, error) {
			var ref string
			if err := json.Unmarshal(args[0], &ref); err != nil {
				return nil, err
			}
			v, err := ctx.Secrets.Resolve(ctx, driver.Ref(ref))
			return string(v.Reveal()), err
		}),
		"leak": op(func(ctx *driver.Context, args driver.Args) (any, error) {
			v, err := ctx.Secrets.Resolve(ctx, "secret://root/bmc")
			fmt.Fprintln(os.Stderr, "the password is", string(v.Reveal()))
			return nil, err
		}),
		"fail":  op(func(*driver.Context, driver.Args) (any, error) { return nil, errs.Retry("fan-stuck", "fan 3") }),
		"plain": op(func(*driver.Context, driver.Args) (any, error) { return nil, errors.New("oh") }),
		"deaf": op(func(*driver.Context, driver.Args) (any, error) {
			time.Sleep(5 * time.Second)
			return nil, nil
		}),
		"wait": op(func(ctx *driver.Context, _ driver.Args) (any, error) {
			ctx.Emit(driver.Progress{Phase: "waiting"})
			<-ctx.Done()
			return nil, ctx.Err()
		}),
		"crash": op(func(ctx *driver.Context, _ driver.Args) (any, error) {
			ctx.Emit(driver.Progress{Phase: "crashing"})
			return nil, syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}),
		"hangUp": op(func(ctx *driver.Context, _ driver.Args) (any, error) {
			for fd := 3; fd < 64; fd++ {
				_ = syscall.Shutdown(fd, syscall.SHUT_RDWR)
			}
			<-ctx.Done()
			return nil, ctx.Err()
		}),
		"vanish": op(func(*driver.Context, driver.Args) (any, error) {
			time.AfterFunc(50*time.Millisecond, func() {
				for fd := 3; fd < 64; fd++ {
					if _, err := syscall.Getpeername(fd); err == nil {
						_ = syscall.Shutdown(fd, syscall.SHUT_RDWR)
					}
				}
			})
			return nil, os.Remove(os.Getenv(bcx.SocketDirVariable) + "/" + bcx.SocketName)
		}),
		"big": op(func(*driver.Context, driver.Args) (any, error) { return strings.Repeat("x", bcx.MaxMessage), nil }),
		"spawn": op(func(*driver.Context, driver.Args) (any, error) {
			return start("/bin/sleep", "60")
		}),
		// One that leaves the group.
		"escape": op(func(*driver.Context, driver.Args) (any, error) {
			cmd := exec.Command("/bin/sleep", "60")
			cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
			if err := cmd.Start(); err != nil {
				return nil, err
			}
			return cmd.Process.Pid, nil
		}),
		"environ": op(func(*driver.Context, driver.Args) (any, error) { return os.Environ(), nil }),
		"group":   op(func(*driver.Context, driver.Args) (any, error) { return syscall.Getpgrp(), nil }),
		"exe":     op(func(*driver.Context, driver.Args) (any, error) { return SHA256File("/proc/self/exe") }),
		"print": op(func(*driver.Context, driver.Args) (any, error) {
			fmt.Fprintln(os.Stdout, "a stray print")
			return nil, nil
		}),
	}, Streams: map[string]driver.StreamOperation[*echo]{
		"pipe": func(ctx *driver.Context, _ *echo, args driver.Args, s io.ReadWriter) error {
			if _, err := io.Copy(s, s); err != nil {
				return err
			}
			_, err := io.WriteString(s, " end")
			return err
		},
		"refuse": func(ctx *driver.Context, _ *echo, _ driver.Args, s io.ReadWriter) error {
			return errs.New("fan-stuck", "fan 3")
		},
		"hangUpStream": func(ctx *driver.Context, _ *echo, _ driver.Args, s io.ReadWriter) error {
			for fd := 3; fd < 64; fd++ {
				_ = syscall.Shutdown(fd, syscall.SHUT_RDWR)
			}
			<-ctx.Done()
			return ctx.Err()
		},
		"say": func(ctx *driver.Context, _ *echo, _ driver.Args, s io.ReadWriter) error {
			_, err := io.WriteString(s, "said")
			return err
		},
	}}
	return driver.Define(driver.Spec[string]{
		ID: id, Version: "1.0.0", RunsOn: "control-plane",
		Schema: json.RawMessage(`{"$schema":"https://json-schema.org/draft/2020-12/schema","type":"object","additionalProperties":false,"properties":{
			"address":{"type":"string","minLength":1,"maxLength":64},"mode":{"enum":["a","b"]},
			"credentials":{"type":"string","writeOnly":true,"x-bc":{"kind":"secret"}},"user":{"type":"string"}}}`),
		Parse: func(raw json.RawMessage) (string, error) {
			if strings.Contains(string(raw), "refused") {
				return "", errors.New("refused by the plugin")
			}
			return string(raw), nil
		},
		Capabilities: []string{"virtual-media"},
		RetrySafe:    []string{"echo.echo", "echo.fail"},
		Validate: func(ctx *driver.Context, config string) error {
			if strings.Contains(config, "credentials") {
				if v, err := ctx.Secrets.Resolve(ctx, "secret://root/bmc"); err != nil || string(v.Reveal()) != "hunter2" {
					return errs.New(errs.CredentialsUnavailable, "log in: %v", err)
				}
			}
			return nil
		},
		Health: func(context.Context) error {
			if os.Getenv("MODE") == "sick" {
				return errors.New("no licence")
			}
			return nil
		},
	}, driver.Implement(kind, func(config string, _ *driver.Context) (*echo, error) { return &echo{config}, nil }))
}
