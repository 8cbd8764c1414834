package external

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/peer"
)

// run is one process of the plugin.
type run struct {
	cmd    *exec.Cmd
	peer   *peer.Peer
	stdin  *os.File
	exited chan struct{} // closed once the process is gone and its output drained
	err    error         // how it ended; set before exited is closed
	broken chan struct{} // closed when its connection is lost
	once   sync.Once

	mu     sync.Mutex
	reaped bool // its number, and its group's, may be another's by now
}

func (r *run) pid() int { return r.cmd.Process.Pid }

// lose says that the connection is gone.
func (r *run) lose() { r.once.Do(func() { close(r.broken) }) }

// kill ends the process and its group.
func (r *run) kill() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.reaped {
		killGroup(r.cmd.Process)
	}
}

// wait reaps the process; nothing is killed by its number after that.
func (r *run) wait() error {
	r.mu.Lock()
	r.reaped = true
	r.mu.Unlock()
	return r.cmd.Wait()
}

// over reports whether it can take no call any more.
func (r *run) over() bool {
	select {
	case <-r.exited:
		return true
	case <-r.broken:
		return true
	default:
		return false
	}
}

// launch verifies the pin and runs the plugin up to its description. The
// goroutine of the caller keeps its thread for as long as the process lives.
func (d *Driver) launch(ctx context.Context) (*run, error) {
	r, err := d.begin(ctx)
	if coded := new(errs.Error); err != nil && !errors.As(err, &coded) {
		err = errs.New(errs.DriverError, "start plugin %s: %v", d.name, err)
	}
	return r, err
}

func (d *Driver) begin(ctx context.Context) (*run, error) {
	folder, err := makeFolder(os.TempDir(), d.log)
	if err != nil {
		return nil, err
	}
	started := false
	defer func() {
		if !started {
			folder.remove()
		}
	}()
	self, err := bcx.NewIdentity()
	if err != nil {
		return nil, err
	}
	program, err := d.program()
	if err != nil {
		return nil, err
	}
	defer program.close()
	r := &run{exited: make(chan struct{}), broken: make(chan struct{})}
	env := environment(os.Environ(), d.o.Env, map[string]string{
		bcx.CookieVariable: bcx.Cookie, bcx.SocketDirVariable: folder.path, bcx.ClientCertVariable: self.PEM(),
	})
	stdout, stderr, err := r.start(program.path, d.o.Command, env)
	if err != nil {
		return nil, err
	}
	started = true
	out := peer.Watch(stdout, stderr, d.log, d.redact)
	d.running.Go(func() { r.reap(out, folder, stdout, stderr) })
	// The process has the program open by now: writers may go on.
	program.close()

	ctx, cancel := context.WithTimeout(ctx, d.o.StartTimeout)
	defer cancel()
	if err := r.meet(ctx, self, out, folder.path, d); err != nil {
		r.kill()
		<-r.exited
		return nil, err
	}
	return r, nil
}

// program is what to execute.
type program struct {
	path string
	file *os.File // nil: by path
}

func (p *program) close() {
	if p.file != nil {
		p.file.Close()
	}
}

// program checks the pin of what will run. A native program is executed from
// the very file that was hashed, where the system can.
func (d *Driver) program() (*program, error) {
	pinned, err := PinnedFile(d.o.Command)
	if err != nil {
		return nil, err
	}
	if interpreter(d.o.Command[0]) == "" {
		return openPinned(pinned, d.o.SHA256)
	}
	sum, err := SHA256File(pinned)
	if err != nil {
		return nil, err
	}
	if err := judge(pinned, sum, d.o.SHA256); err != nil {
		return nil, err
	}
	path, err := exec.LookPath(d.o.Command[0])
	if err != nil {
		return nil, err
	}
	return &program{path: path}, nil
}

// start runs the process with pipes for its three streams.
func (r *run) start(path string, argv, env []string) (stdout, stderr *os.File, err error) {
	pipes, err := peer.NewPipes()
	if err != nil {
		return nil, nil, err
	}
	// A process that another goroutine forks just now holds all our
	// descriptors until its exec, a writable one of the program perhaps too.
	for wait := time.Millisecond; ; wait *= 2 {
		r.cmd = &exec.Cmd{Path: path, Args: slices.Clone(argv), Env: env, SysProcAttr: attributes()}
		pipes.Attach(r.cmd)
		err = r.cmd.Start()
		if !errors.Is(err, syscall.ETXTBSY) || wait > 500*time.Millisecond {
			break
		}
		time.Sleep(wait)
	}
	pipes.Started(err)
	if err != nil {
		return nil, nil, fmt.Errorf("start the process: %w", err)
	}
	r.stdin = pipes.Stdin
	return pipes.Stdout, pipes.Stderr, nil
}

// meet takes the handshake line and asks for the description.
func (r *run) meet(ctx context.Context, self *bcx.Identity, out *peer.Output, dir string, d *Driver) error {
	shake, err := out.Handshake(ctx, dir)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("no handshake line within %v", d.o.StartTimeout)
	case errors.Is(err, peer.ErrEnded):
		// It has ended, or is about to be: say how, if it does at once.
		select {
		case <-r.exited:
			return fmt.Errorf("%w (%v)", err, r.err)
		case <-time.After(time.Second):
		}
		return err
	case err != nil:
		return err
	}
	r.peer, err = peer.Meet(ctx, self, shake, peer.Options{Name: d.name, Log: d.log, Redact: d.redact})
	return err
}

// reap waits for the process and takes whatever it started with it.
func (r *run) reap(out *peer.Output, folder *folder, stdout, stderr *os.File) {
	err := r.await()
	if err == nil {
		err = errors.New("exit status 0")
	}
	r.err = err
	// A descendant that left the group may hold the pipes open.
	limit := time.Now().Add(time.Second)
	for _, f := range []*os.File{stdout, stderr} {
		if f.SetReadDeadline(limit) != nil {
			defer time.AfterFunc(time.Second, func() { f.Close() }).Stop()
		}
	}
	out.Wait()
	for _, c := range []io.Closer{stdout, stderr, r.stdin} {
		c.Close()
	}
	folder.remove()
	close(r.exited)
}

// end asks the process to end, and makes it after the grace.
func (r *run) end(grace time.Duration) {
	// With a connection open, HTTP/2's graceful end takes a second.
	r.peer.Close()
	r.stdin.Close()
	terminate(r.cmd.Process)
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-r.exited:
	case <-timer.C:
		r.kill()
		<-r.exited
	}
	r.peer.Close()
}

// inherited are the variables that a plugin gets from the host.
func inherited() []string {
	list := []string{"PATH", "TMPDIR", "TMP", "TEMP", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "USER", "LOGNAME"}
	if runtime.GOOS == "windows" {
		list = append(list, "SystemRoot", "SystemDrive", "windir", "ComSpec", "PATHEXT", "USERPROFILE", "USERNAME",
			"APPDATA", "LOCALAPPDATA", "ProgramData", "ProgramFiles")
	}
	return list
}

// environment is what a plugin gets: a few of the host's variables, the
// options', and the protocol's.
func environment(host []string, own, protocol map[string]string) []string {
	values := map[string]string{}
	for _, name := range inherited() {
		for _, pair := range host {
			if n := len(name); len(pair) > n && pair[n] == '=' && pair[:n] == name {
				values[name] = pair[n+1:]
			}
		}
	}
	for _, more := range []map[string]string{own, protocol} {
		for name, v := range more {
			values[name] = v
		}
	}
	list := make([]string, 0, len(values))
	for name, v := range values {
		list = append(list, name+"="+v)
	}
	slices.Sort(list)
	return list
}

// socket is the path that a plugin of ours listens on in dir.
func socket(dir string) string { return filepath.Join(dir, bcx.SocketName) }
