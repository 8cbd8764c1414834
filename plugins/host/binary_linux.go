package host

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// openBinary opens a plugin for verify, which hashes it through that descriptor,
// and for the exec of it. A read lease keeps writers out until after both;
// a file system without leases gets a sealed copy in memory instead. The caller
// closes the file once the plugin runs.
func openBinary(path string) (*os.File, error) {
	// O_NONBLOCK: a FIFO in the folder must not hold up the agent.
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
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

// verify says why f must not be executed.
func verify(f *os.File, path string, want [32]byte) error {
	head, err := checkPin(f, path, want)
	if err != nil {
		return err
	}
	// A pin on a script would leave what its interpreter loads unpinned.
	if !isELF(head) {
		return fmt.Errorf("%s is not an ELF executable", path)
	}
	return nil
}

// lease keeps writers out for as long as f is open. A process between fork and
// exec holds copies of descriptors that were closed long ago: what looks like a
// writer may be gone in a moment.
func lease(f *os.File) (err error) {
	for range 10 {
		if _, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_RDLCK); !errors.Is(err, unix.EAGAIN) {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
	return err
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
	_, err = io.Copy(m, io.NewSectionReader(f, 0, 1<<62))
	if err == nil {
		err = m.Chmod(0o555)
	}
	if err == nil {
		_, err = unix.FcntlInt(m.Fd(), unix.F_ADD_SEALS,
			unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE)
	}
	if err != nil {
		m.Close()
		return nil, err
	}
	// The writable descriptor would make the exec fail with ETXTBSY.
	r, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", m.Fd()))
	m.Close()
	return r, err
}
