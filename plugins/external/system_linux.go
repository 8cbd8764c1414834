package external

import (
	"errors"
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/plugins/frozen"
)

// attributes put the plugin in a group of its own, and let it die with us.
func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// await waits for the process's end and takes its group with it. The zombie is
// left until then: while it lies there, the group's number cannot come to mean
// other processes.
func (r *run) await() error {
	for {
		err := unix.Waitid(unix.P_PID, r.pid(), nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	r.kill()
	return r.wait()
}

// openPinned opens a program and hashes it through that descriptor, which is
// then executed. A script's interpreter opens it by its path, so a script runs
// by path as well.
func openPinned(path, pin string) (*program, error) {
	f, err := frozen.Open(path, true)
	if err != nil {
		return nil, err
	}
	ok := false
	defer func() {
		if !ok {
			f.Close()
		}
	}()
	first := &head{n: 2}
	sum, err := digest(f, first)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if err := judge(path, sum, pin); err != nil {
		return nil, err
	}
	if string(first.kept) == "#!" {
		return &program{path: path}, nil
	}
	ok = true
	return &program{path: fmt.Sprintf("/proc/self/fd/%d", f.Fd()), file: f}, nil
}

// head keeps the first n bytes that are written to it.
type head struct {
	kept []byte
	n    int
}

func (h *head) Write(p []byte) (int, error) {
	h.kept = append(h.kept, p[:min(len(p), h.n-len(h.kept))]...)
	return len(p), nil
}
