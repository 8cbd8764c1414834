package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/peer"
	"github.com/better-compute/site-appliance/plugins/frozen"
	"github.com/better-compute/site-appliance/plugins/sandbox"
)

// maxResult caps what an operation may answer. What is bigger belongs into a stream.
const maxResult = 4 << 20

// process is one run of a plugin.
type process struct {
	cmd  *exec.Cmd
	peer *peer.Peer

	stdin  *os.File
	run    *run
	cgroup string
	limits limits
	grace  time.Duration
	// refused counts the tasks that the kernel refused, as far as a call has said it.
	refused atomic.Uint64

	mu     sync.Mutex
	reaped bool          // its number may mean another process by now
	ended  chan struct{} // closed once the process is gone
	err    error         // how it ended; set before ended is closed
	exited chan struct{} // closed once its output is drained, and all of it removed
}

// launch is what start needs to know.
type launch struct {
	path       string
	pin        Pin
	uid, gid   int
	confine    bool
	shim       []string
	cgroup     string
	limits     limits
	socketRoot string
	timeout    time.Duration
	grace      time.Duration
	egress     Egress
	log        *slog.Logger
}

// start runs a plugin up to its description. The caller's goroutine is locked
// to its thread for as long as the process lives.
func start(ctx context.Context, l launch) (_ *process, err error) {
	binary, err := frozen.Open(l.path, false)
	if err != nil {
		return nil, err
	}
	// Closing it ends the lease as well.
	defer binary.Close()
	// Hashing takes as long as it takes the shim to begin, so a shim begins
	// meanwhile, and executes the plugin once the hash is the pinned one.
	checked := make(chan error, 1)
	go func() { checked <- verify(binary, l.path, l.pin.SHA256) }()
	verified := sync.OnceValue(func() error { return <-checked })
	defer verified()
	held := len(l.shim) > 0
	if !held {
		if err := verified(); err != nil {
			return nil, err
		}
	}
	self, err := bcx.NewIdentity()
	if err != nil {
		return nil, err
	}
	p := &process{grace: l.grace, limits: l.limits, ended: make(chan struct{}), exited: make(chan struct{})}
	if l.cgroup != "" {
		p.cgroup = leafPath(l.cgroup, l.pin.Name)
	}
	p.run, err = newRun(l.socketRoot, record{
		Plugin: l.pin.Name, Boot: bootID(), Space: pidSpace(), Host: processMark(os.Getpid()), UID: l.uid, Cgroup: p.cgroup,
	}, l.gid)
	if err != nil {
		return nil, err
	}
	started := false
	defer func() {
		if !started {
			p.run.remove()
		}
	}()
	spec := sandbox.Spec{
		Shim: l.shim, Binary: binary, Held: held, Name: l.pin.Name, UID: l.uid, GID: l.gid, Confine: l.confine, Folder: p.run.dir,
		Env: []string{
			"PATH=/usr/sbin:/usr/bin:/sbin:/bin",
			bcx.CookieVariable + "=" + bcx.Cookie,
			bcx.SocketDirVariable + "=" + p.run.dir,
			bcx.ClientCertVariable + "=" + self.PEM(),
		},
	}
	if p.cgroup != "" {
		leaf, err := leafCgroup(p.cgroup, l.limits)
		if err != nil {
			return nil, err
		}
		defer leaf.Close()
		spec.Cgroup = leaf
	}
	if p.cmd, err = sandbox.Command(spec); err != nil {
		return nil, err
	}
	stdout, stderr, err := p.begin()
	if err != nil {
		return nil, err
	}
	started = true
	p.run.record.Process = processMark(p.cmd.Process.Pid)
	if err := p.run.save(); err != nil {
		l.log.Warn("plugin's run is not recorded: it could outlive a killed host", "reason", err.Error())
	}
	redact := peer.NewRedactor()
	out := peer.Watch(stdout, stderr, l.log, redact)
	go p.reap(l.log, out, stdout, stderr)

	err = verified()
	if err == nil && held {
		// Without it the shim ends; one that is gone shows below.
		_, _ = p.stdin.Write([]byte{sandbox.GoAhead})
	}
	if err == nil {
		ctx, cancel := context.WithTimeout(ctx, l.timeout)
		defer cancel()
		o := peer.Options{Name: l.pin.Name, Log: l.log, Redact: redact, MaxResultBytes: maxResult}
		err = p.meet(ctx, self, out, l.timeout, o)
	}
	if err != nil {
		p.kill()
		<-p.exited
		return nil, err
	}
	return p, nil
}

// begin starts the process with pipes for its three streams.
func (p *process) begin() (stdout, stderr *os.File, err error) {
	pipes, err := peer.NewPipes()
	if err != nil {
		return nil, nil, err
	}
	pipes.Attach(p.cmd)
	err = p.cmd.Start()
	pipes.Started(err)
	if err != nil {
		return nil, nil, fmt.Errorf("start the process: %w", err)
	}
	p.stdin = pipes.Stdin
	return pipes.Stdout, pipes.Stderr, nil
}

// meet takes the handshake line and asks for the description.
func (p *process) meet(ctx context.Context, self *bcx.Identity, out *peer.Output, limit time.Duration, o peer.Options) error {
	shake, err := out.Handshake(ctx, p.run.dir)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("no handshake line within %v", limit)
	case errors.Is(err, peer.ErrEnded):
		// It has ended, or is about to be: say how, if it does at once.
		select {
		case <-p.ended:
			return fmt.Errorf("%w (%v)", err, p.err)
		case <-time.After(time.Second):
		}
		return err
	case err != nil:
		return err
	}
	p.peer, err = peer.Meet(ctx, self, shake, o)
	return err
}

// reap waits for the process and takes whatever it started with it.
func (p *process) reap(log *slog.Logger, out *peer.Output, stdout, stderr *os.File) {
	if await(p.cmd) {
		p.kill()
		p.setReaped()
	}
	p.err = exitReason(p.cmd.Wait())
	p.setReaped()
	if p.cgroup != "" {
		if v := verdict(p.cgroup, p.limits, killedBySignal(p.err)); v != "" {
			p.err = fmt.Errorf("%s (%w)", v, p.err)
		}
	}
	close(p.ended)
	// A descendant that left the group may hold the pipes open.
	limit := time.Now().Add(time.Second)
	_ = stdout.SetReadDeadline(limit)
	_ = stderr.SetReadDeadline(limit)
	out.Wait()
	for _, c := range []io.Closer{stdout, stderr, p.stdin} {
		c.Close()
	}
	if p.cgroup != "" {
		if err := removeCgroup(p.cgroup); err != nil {
			log.Error("plugin's cgroup is left", "reason", err.Error())
		}
	}
	p.run.remove()
	close(p.exited)
}

func exitReason(err error) error {
	if err == nil {
		return errors.New("exit status 0")
	}
	return err
}

// gone reports whether the process has ended.
func (p *process) gone() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// kill ends the process, its group, and what lives in its cgroup.
func (p *process) kill() {
	p.mu.Lock()
	if !p.reaped {
		killGroup(p.cmd.Process)
	}
	p.mu.Unlock()
	killCgroup(p.cgroup)
}

func (p *process) setReaped() {
	p.mu.Lock()
	p.reaped = true
	p.mu.Unlock()
}

// hangUp drops the connection, unless calls still use it.
func (p *process) hangUp() {
	if p.peer != nil {
		p.peer.Close()
	}
}

// stop asks the process to end, and makes it after the grace.
func (p *process) stop() {
	// With a connection open, HTTP/2's graceful end takes a second.
	p.hangUp()
	p.stdin.Close()
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	timer := time.NewTimer(p.grace)
	defer timer.Stop()
	select {
	case <-p.exited:
		return
	case <-timer.C:
	}
	p.kill()
	<-p.exited
}

// unavailable is what a call gets while its plugin restarts: nothing ran.
func unavailable(name string) error {
	return errs.Retry(errs.Unavailable, "plugin %s is restarting", name)
}
