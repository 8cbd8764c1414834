package sdk

import (
	"os"

	"golang.org/x/sys/unix"
)

// takeStdout answers the process's stdout, and lets descriptor 1 be stderr, also
// for programs that a driver runs.
func takeStdout() (*os.File, error) {
	fd, err := unix.FcntlInt(1, unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, err
	}
	if err := unix.Dup3(2, 1, 0); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), "stdout"), nil
}
