package external

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
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
// then executed. A read lease keeps writers out between the hash and the exec;
// where there is none, a sealed copy in memory runs instead. A script's
// interpreter opens it by its path, so a script runs by path as well.
func openPinned(path, pin string) (*program, error) {
	// O_NONBLOCK: a FIFO must not hold us up.
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	ok := false
	defer func() {
		if !ok {
			f.Close()
		}
	}()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	if err := lease(f); err != nil {
		if errors.Is(err, unix.EAGAIN) {
			return nil, fmt.Errorf("%s is open for writing", path)
		}
		copied, cerr := sealedCopy(f, path)
		if cerr != nil {
			return nil, fmt.Errorf("%s: no lease (%v), and no sealed copy: %w", path, err, cerr)
		}
		f.Close()
		f = copied
	}
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

// lease waits a little for a writer that may be a child between fork and exec.
func lease(f *os.File) error {
	for wait := time.Millisecond; ; wait *= 2 {
		_, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_RDLCK)
		if !errors.Is(err, unix.EAGAIN) || wait > 500*time.Millisecond {
			return err
		}
		time.Sleep(wait)
	}
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

// sealedCopy is f's content in memory that nobody can write to.
func sealedCopy(f *os.File, name string) (*os.File, error) {
	fd, err := unix.MemfdCreate("bcx-plugin", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) {
		// Before Linux 6.3 there is no such flag, and every such file can be executed.
		fd, err = unix.MemfdCreate("bcx-plugin", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return nil, fmt.Errorf("make memory file: %w", err)
	}
	m := os.NewFile(uintptr(fd), name)
	// The writable descriptor would make the exec fail with ETXTBSY.
	defer m.Close()
	_, err = io.Copy(m, io.NewSectionReader(f, 0, 1<<62))
	if err == nil {
		err = m.Chmod(0o555)
	}
	if err == nil {
		_, err = unix.FcntlInt(m.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE)
	}
	if err != nil {
		return nil, err
	}
	return os.Open(fmt.Sprintf("/proc/self/fd/%d", m.Fd()))
}
