package host

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// openPinned opens a plugin and hashes it through that descriptor, which is
// then executed. A read lease keeps writers out between the hash and the exec;
// a file system without leases gets a sealed copy in memory instead. The caller
// closes the file once the plugin runs.
func openPinned(path string, want [32]byte) (*os.File, error) {
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
	head, err := checkPin(f, path, want)
	if err != nil {
		return nil, err
	}
	// A pin on a script would leave what its interpreter loads unpinned.
	if !isELF(head) {
		return nil, fmt.Errorf("%s is not an ELF executable", path)
	}
	ok = true
	return f, nil
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
