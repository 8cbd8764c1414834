package process

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/procstat"
)

// identity tells one process from any other that ever has its number: a number
// is used again, but not with the same start time in the same boot.
type identity struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks since boot
	Boot  string `json:"boot"`
}

// pidfdSignalProcessGroup is a flag of pidfd_send_signal since Linux 6.9.
const pidfdSignalProcessGroup = 1 << 2

// errGone says that the process is not there any more.
var errGone = errors.New("the process is gone")

// open takes hold of the process that id means. The descriptor comes first: it
// means one process for ever, so that what is checked afterwards stays true.
func (id identity) open(boot string) (*os.File, error) {
	if id.Boot != boot || id.PID <= 1 {
		return nil, errGone
	}
	fd, err := unix.PidfdOpen(id.PID, unix.O_NONBLOCK) // PIDFD_NONBLOCK
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
		return nil, errGone
	}
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", id.PID, err)
	}
	st, err := procstat.Read(id.PID)
	if err != nil || st.Start != id.Start || st.State == 'Z' || st.State == 'X' {
		unix.Close(fd)
		return nil, errGone
	}
	return os.NewFile(uintptr(fd), "pidfd"), nil
}

// awaitExit blocks until the process has ended (nil) or f is closed.
func awaitExit(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Read(func(fd uintptr) bool {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(poll, 0)
		return err == nil && n == 1
	})
}

// signalGroup signals the process's group where the kernel can do that by
// descriptor (Linux 6.9), and the process alone elsewhere: by number it could
// hit another.
func signalGroup(f *os.File, sig unix.Signal) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var sent error
	err = raw.Control(func(fd uintptr) {
		if sent = unix.PidfdSendSignal(int(fd), sig, nil, pidfdSignalProcessGroup); errors.Is(sent, unix.EINVAL) {
			sent = unix.PidfdSendSignal(int(fd), sig, nil, 0)
		}
	})
	if errors.Is(sent, unix.ESRCH) {
		sent = nil
	}
	return errors.Join(err, sent)
}

// runMark is the variable that every process of a run inherits.
const runMark = "BC_RUN"

// sweep kills whatever carries a run's mark, wherever it moved. It serves where
// no cgroup holds the run together.
func sweep(run string) error {
	want := []byte(runMark + "=" + run)
	for range 100 {
		found := false
		dirs, err := os.ReadDir("/proc")
		if err != nil {
			return fmt.Errorf("list processes: %w", err)
		}
		for _, d := range dirs {
			pid, err := strconv.Atoi(d.Name())
			if err != nil || pid == os.Getpid() {
				continue
			}
			if !marked(pid, want) {
				continue
			}
			fd, err := unix.PidfdOpen(pid, 0)
			if err != nil {
				continue
			}
			// Again, now that the number cannot change its meaning.
			if st, err := procstat.Read(pid); err == nil && !st.Ended() && marked(pid, want) {
				found = true
				_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
			}
			unix.Close(fd)
		}
		if !found {
			return nil
		}
	}
	return errors.New("processes of the run come up faster than they can be killed")
}

func marked(pid int, want []byte) bool {
	env, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "environ"))
	if err != nil {
		return false
	}
	for v := range bytes.SplitSeq(env, []byte{0}) {
		if bytes.Equal(v, want) {
			return true
		}
	}
	return false
}
