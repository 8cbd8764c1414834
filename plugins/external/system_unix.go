//go:build unix

package external

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// lockName lies beside the socket.
const lockName = "host.lock"

// hold locks a fresh folder for as long as this process lives.
func hold(path string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(path, lockName), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		var st unix.Stat_t
		if err = unix.Fstat(int(f.Fd()), &st); err == nil && st.Nlink == 0 {
			err = errors.New("removed")
		}
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}

// abandoned reports whether a folder is ours and no host holds it. Until release
// is called none can come to hold it. One without a lock is being made, or was
// left in that moment: after an hour it is left.
func abandoned(path string) (release func(), yes bool) {
	st, err := os.Lstat(path)
	if err != nil || !st.IsDir() || st.Mode().Perm() != 0o700 {
		return nil, false
	}
	if own, ok := st.Sys().(*syscall.Stat_t); !ok || int(own.Uid) != os.Geteuid() {
		return nil, false
	}
	fd, err := unix.Open(filepath.Join(path, lockName), unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return func() {}, errors.Is(err, unix.ENOENT) && isOld(st)
	}
	if unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) != nil {
		unix.Close(fd)
		return nil, false
	}
	return func() { unix.Close(fd) }, true
}

func killGroup(p *os.Process) { _ = syscall.Kill(-p.Pid, syscall.SIGKILL) }

func terminate(p *os.Process) { _ = p.Signal(syscall.SIGTERM) }
