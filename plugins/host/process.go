package host

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/sandbox"
)

// process is one run of a plugin.
type process struct {
	cmd     *exec.Cmd
	client  *bcx.Client
	drivers []driver.Manifest
	version string

	stdin  *os.File
	dir    string
	cgroup string
	grace  time.Duration
	exited chan struct{} // closed once the process is gone and its output drained
	err    error         // how it ended; set before exited is closed
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
	log        *slog.Logger
}

// start runs a plugin up to its description. The caller's goroutine is locked
// to its thread for as long as the process lives.
func start(ctx context.Context, l launch) (_ *process, err error) {
	binary, err := openPinned(l.path, l.pin.SHA256)
	if err != nil {
		return nil, err
	}
	// Closing it ends the lease as well.
	defer binary.Close()
	self, err := bcx.NewIdentity()
	if err != nil {
		return nil, err
	}
	p := &process{grace: l.grace, exited: make(chan struct{})}
	if p.dir, err = socketDir(l.socketRoot, l.uid, l.gid); err != nil {
		return nil, err
	}
	started := false
	defer func() {
		if !started {
			os.RemoveAll(p.dir)
		}
	}()
	spec := sandbox.Spec{
		Shim: l.shim, Binary: binary, Name: l.pin.Name, UID: l.uid, GID: l.gid, Confine: l.confine,
		Env: []string{
			"PATH=/usr/sbin:/usr/bin:/sbin:/bin",
			bcx.CookieVariable + "=" + bcx.Cookie,
			bcx.SocketDirVariable + "=" + p.dir,
			bcx.ClientCertVariable + "=" + self.PEM(),
		},
	}
	if l.cgroup != "" {
		leaf, err := leafCgroup(l.cgroup, l.pin.Name, l.limits)
		if err != nil {
			return nil, err
		}
		defer leaf.Close()
		spec.Cgroup, p.cgroup = leaf, leaf.Name()
	}
	if p.cmd, err = sandbox.Command(spec); err != nil {
		return nil, err
	}
	stdout, stderr, err := p.run()
	if err != nil {
		return nil, err
	}
	started = true
	out := newOutput(l.log)
	first := make(chan handshakeLine, 1)
	var drains sync.WaitGroup
	drains.Go(func() {
		r := bufio.NewReaderSize(stdout, bcx.MaxHandshake)
		line, err := readHandshake(r)
		first <- handshakeLine{line, err}
		out.drain("stdout", r)
	})
	drains.Go(func() { out.drain("stderr", bufio.NewReaderSize(stderr, 16<<10)) })
	go p.reap(l.log, out, &drains, stdout, stderr)

	ctx, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()
	if err := p.meet(ctx, self, first, l.timeout); err != nil {
		p.kill()
		<-p.exited
		p.hangUp()
		return nil, err
	}
	return p, nil
}

type handshakeLine struct {
	line []byte
	err  error
}

// run starts the process with pipes for its three streams.
func (p *process) run() (stdout, stderr *os.File, err error) {
	var files [6]*os.File
	defer func() {
		for i, f := range files {
			// The plugin's ends are 0, 3 and 5.
			if f != nil && (err != nil || i == 0 || i == 3 || i == 5) {
				f.Close()
			}
		}
	}()
	for i := 0; i < len(files); i += 2 {
		if files[i], files[i+1], err = os.Pipe(); err != nil {
			return nil, nil, fmt.Errorf("make pipe: %w", err)
		}
	}
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = files[0], files[3], files[5]
	p.stdin, stdout, stderr = files[1], files[2], files[4]
	if err = p.cmd.Start(); err != nil {
		return nil, nil, fmt.Errorf("start the process: %w", err)
	}
	return stdout, stderr, nil
}

// meet takes the handshake line and asks for the description.
func (p *process) meet(ctx context.Context, self *bcx.Identity, first <-chan handshakeLine, limit time.Duration) error {
	var h handshakeLine
	select {
	case h = <-first:
	case <-ctx.Done():
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return fmt.Errorf("no handshake line within %v", limit)
		}
		return ctx.Err()
	}
	if h.err != nil {
		// It has ended, or is about to be: say how, if it does at once.
		select {
		case <-p.exited:
			return fmt.Errorf("%w (%v)", h.err, p.err)
		case <-time.After(time.Second):
			return h.err
		}
	}
	shake, err := bcx.ParseHandshake(h.line, p.dir)
	if err != nil {
		return err
	}
	p.client = bcx.Dial(self, shake)
	answer, err := p.client.Describe(ctx, connect.NewRequest(&driverv1.DescribeRequest{}))
	if err != nil {
		return fmt.Errorf("describe: %w", err)
	}
	if answer.Msg.GetProtocol() != bcx.Protocol {
		return fmt.Errorf("plugin describes bcx protocol %d: want %d", answer.Msg.GetProtocol(), bcx.Protocol)
	}
	p.version = answer.Msg.GetPluginVersion()
	seen := map[string]bool{}
	for _, d := range answer.Msg.GetDrivers() {
		m, err := bcx.Manifest(d)
		if err != nil {
			return fmt.Errorf("describe: %w", err)
		}
		if seen[m.ID] {
			return fmt.Errorf("describe: driver %s is described twice", m.ID)
		}
		seen[m.ID] = true
		p.drivers = append(p.drivers, m)
	}
	if len(p.drivers) == 0 {
		return errors.New("plugin describes no driver")
	}
	return nil
}

// reap waits for the process and takes whatever it started with it.
func (p *process) reap(log *slog.Logger, out *output, drains *sync.WaitGroup, stdout, stderr *os.File) {
	pid := p.cmd.Process.Pid
	// Leave the zombie for now: while it lies there, its group's number cannot
	// come to mean other processes.
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	p.kill()
	p.err = exitReason(p.cmd.Wait())
	// A descendant that left the group may hold the pipes open.
	limit := time.Now().Add(time.Second)
	_ = stdout.SetReadDeadline(limit)
	_ = stderr.SetReadDeadline(limit)
	drains.Wait()
	for _, c := range []io.Closer{stdout, stderr, p.stdin} {
		c.Close()
	}
	out.close()
	os.RemoveAll(p.dir)
	if p.cgroup != "" {
		if err := removeCgroup(p.cgroup); err != nil {
			log.Error("plugin's cgroup is left", "reason", err.Error())
		}
	}
	close(p.exited)
}

func exitReason(err error) error {
	if err == nil {
		return errors.New("exit status 0")
	}
	return err
}

// kill ends the process, its group, and what lives in its cgroup.
func (p *process) kill() {
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	if p.cgroup != "" {
		_ = write(filepath.Join(p.cgroup, "cgroup.kill"), "1")
	}
}

// hangUp drops the connection, unless calls still use it.
func (p *process) hangUp() {
	if p.client != nil {
		p.client.Close()
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

// socketDir makes the folder of one run's socket, for its uid alone.
func socketDir(root string, uid, gid int) (string, error) {
	// Plugins pass through the root to their own folder, and cannot list it.
	if err := os.MkdirAll(root, 0o711); err != nil {
		return "", fmt.Errorf("make socket folder: %w", err)
	}
	dir, err := os.MkdirTemp(root, "p")
	if err != nil {
		return "", fmt.Errorf("make socket folder: %w", err)
	}
	err = bcx.CheckSocketPath(filepath.Join(dir, bcx.SocketName))
	if err == nil && uid >= 0 {
		err = os.Chown(dir, uid, gid)
	}
	if err != nil {
		os.Remove(dir)
		return "", fmt.Errorf("make socket folder: %w", err)
	}
	return dir, nil
}

// unavailable is what a call gets while its plugin restarts: nothing ran.
func unavailable(name string) error {
	return errs.Retry(errs.Unavailable, "plugin %s is restarting", name)
}
