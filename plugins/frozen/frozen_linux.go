package frozen

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Open opens a regular file whose bytes cannot change until it is closed: a read
// lease keeps writers out, and a file system without leases gets a sealed copy
// in memory instead. A file that somebody has open for writing is ETXTBSY.
// follow says whether path may be a symbolic link.
func Open(path string, follow bool) (*os.File, error) {
	// O_NONBLOCK: a FIFO must not hold the caller up.
	flags := unix.O_RDONLY | unix.O_CLOEXEC | unix.O_NONBLOCK
	if !follow {
		flags |= unix.O_NOFOLLOW
	}
	fd, err := unix.Open(path, flags, 0)
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
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	err = lease(f)
	switch {
	case errors.Is(err, unix.EAGAIN):
		return nil, fmt.Errorf("%s is open for writing: %w", path, unix.ETXTBSY)
	case err != nil:
		copied, cerr := sealedCopy(f, path)
		if cerr != nil {
			return nil, fmt.Errorf("%s: no lease (%v), and no sealed copy: %w", path, err, cerr)
		}
		f.Close()
		f = copied
	}
	ok = true
	return f, nil
}

// lease keeps writers out for as long as f is open. A process between fork and
// exec holds copies of descriptors that were closed long ago: what looks like a
// writer may be gone in a moment.
func lease(f *os.File) (err error) {
	for range 25 {
		if _, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_RDLCK); !errors.Is(err, unix.EAGAIN) {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
	return err
}

// sealedCopy is f's content in memory that nobody can write to.
func sealedCopy(f *os.File, name string) (*os.File, error) {
	fd, err := unix.MemfdCreate("frozen", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) {
		// Before Linux 6.3 there is no such flag, and every such file can be executed.
		fd, err = unix.MemfdCreate("frozen", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return nil, fmt.Errorf("make memory file: %w", err)
	}
	m := os.NewFile(uintptr(fd), name)
	// Held open for writing, it could not be executed.
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
