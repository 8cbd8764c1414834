// Package supervise starts processes for PID 1, reaps every child there is,
// and starts a service again when it ends.
package supervise

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/initramfs/survive"
)

// Children starts processes and waits for all children of this process, its
// own and those that were left to it. os/exec cannot do both: the two waits
// would take each other's children.
type Children struct {
	say  func(format string, args ...any)
	mu   sync.Mutex
	wait map[int]chan syscall.WaitStatus
}

// Reap begins; it ends with ctx. say hears of panics.
func Reap(ctx context.Context, say func(format string, args ...any)) *Children {
	c := &Children{say: say, wait: map[int]chan syscall.WaitStatus{}}
	sig := make(chan os.Signal, 1)
	signal.Notify(sig, unix.SIGCHLD)
	survive.Go(ctx, "reaper", say, func() {
		// A signal can stand for several children and can be lost while one waits.
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				signal.Stop(sig)
				return
			case <-sig:
			case <-tick.C:
			}
			c.collect()
		}
	})
	return c
}

func (c *Children) collect() {
	// held across start too, so that no child ends before it is known
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		if ch, ok := c.wait[pid]; ok {
			ch <- status
			delete(c.wait, pid)
		}
	}
}

// Process is one that Start started.
type Process struct {
	Pid      int
	children *Children
	done     chan syscall.WaitStatus
}

// Start runs a program by absolute path with a fixed environment. Its standard
// output and error go to out, which may be nil.
func (c *Children) Start(argv []string, out *os.File, attr *syscall.SysProcAttr, in *os.File) (*Process, error) {
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/null: %w", err)
	}
	defer null.Close()
	if in == nil {
		in = null
	}
	if out == nil {
		out = null
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	pid, err := syscall.ForkExec(argv[0], argv, &syscall.ProcAttr{
		Dir:   "/",
		Env:   []string{"PATH=/bin:/sbin:/usr/bin:/usr/sbin", "HOME=/root", "TERM=linux"},
		Files: []uintptr{in.Fd(), out.Fd(), out.Fd()},
		Sys:   attr,
	})
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", argv[0], err)
	}
	p := &Process{Pid: pid, children: c, done: make(chan syscall.WaitStatus, 1)}
	c.wait[pid] = p.done
	return p, nil
}

// Done gives the status once.
func (p *Process) Done() <-chan syscall.WaitStatus { return p.done }

// signal sends sig, unless the process was waited for: then its number may be
// another's by now.
func (p *Process) signal(sig syscall.Signal) {
	p.children.mu.Lock()
	defer p.children.mu.Unlock()
	if p.children.wait[p.Pid] == p.done {
		syscall.Kill(p.Pid, sig)
	}
}

// Stop asks the process to end, waits, and kills what did not.
func (p *Process) Stop(grace time.Duration) {
	p.signal(syscall.SIGTERM)
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-p.done:
	case <-timer.C:
		p.signal(syscall.SIGKILL)
		<-p.done
	}
}

// outputLimit bounds what Run keeps of a command's output.
const outputLimit = 64 << 10

// Run runs a command to its end and gives exit code and output. A signal's
// code is 128 and its number. When ctx ends, the command is killed.
func (c *Children) Run(ctx context.Context, argv ...string) (int, string, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return 0, "", fmt.Errorf("run %s: %w", argv[0], err)
	}
	defer r.Close()
	p, err := c.Start(argv, w, nil, nil)
	w.Close()
	if err != nil {
		return 0, "", err
	}
	var text []byte
	read := survive.Go(ctx, argv[0], c.say, func() {
		text, _ = io.ReadAll(io.LimitReader(r, outputLimit))
		io.Copy(io.Discard, r)
	})
	var status syscall.WaitStatus
	select {
	case status = <-p.done:
	case <-ctx.Done():
		p.signal(syscall.SIGKILL)
		<-p.done
		r.Close()
		<-read
		return 0, "", fmt.Errorf("run %s: %w", argv[0], ctx.Err())
	}
	<-read
	return code(status), string(text), nil
}

func code(s syscall.WaitStatus) int {
	if s.Signaled() {
		return 128 + int(s.Signal())
	}
	return s.ExitStatus()
}

// Describe says how a process ended.
func Describe(s syscall.WaitStatus) string {
	if s.Signaled() {
		return "killed by signal " + unix.SignalName(s.Signal())
	}
	return fmt.Sprintf("exit code %d", s.ExitStatus())
}
