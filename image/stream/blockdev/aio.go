package blockdev

import (
	"fmt"
	"io"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// slot is one read or write that the kernel does on its own. A goroutine in a
// blocked system call keeps one of GOMAXPROCS places until the scheduler notices;
// on two cores that cost a fast disk up to half of its speed. Here it waits
// as for a socket.
type slot struct {
	context uintptr  // aio_context_t
	eventfd int      // counts what is done
	done    *os.File // the same, waited for by the netpoller
	memory  []byte   // in use by the kernel: neither free nor on a stack that moves
}

// These are of linux/aio_abi.h.
const (
	opRead   = 0 // IOCB_CMD_PREAD
	opWrite  = 1 // IOCB_CMD_PWRITE
	flagDone = 1 // IOCB_FLAG_RESFD
)

// iocb is struct iocb; what is blank stays 0.
type iocb struct {
	_           uint64 // aio_data
	_, _        uint32 // aio_key and aio_rw_flags
	op          uint16
	_           int16 // aio_reqprio
	fd          uint32
	buf         uint64
	bytes       uint64
	off         int64
	_           uint64
	flags, done uint32
}

// event is struct io_event.
type event struct {
	data, object uint64
	result       int64
	_            int64
}

// slots is how many reads and writes run at a time.
const slots = 4

// newSlots is nil where the kernel has none to give.
func newSlots() chan *slot {
	free := make(chan *slot, slots)
	for range slots {
		s, err := newSlot()
		if err != nil {
			for range len(free) {
				(<-free).close()
			}
			return nil
		}
		free <- s
	}
	return free
}

func newSlot() (*slot, error) {
	s := &slot{}
	if _, _, errno := unix.Syscall(unix.SYS_IO_SETUP, 1, uintptr(unsafe.Pointer(&s.context)), 0); errno != 0 {
		return nil, fmt.Errorf("io_setup: %w", errno)
	}
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		unix.Syscall(unix.SYS_IO_DESTROY, s.context, 0, 0)
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	s.eventfd, s.done = fd, os.NewFile(uintptr(fd), "eventfd")
	return s, nil
}

func (s *slot) close() {
	unix.Syscall(unix.SYS_IO_DESTROY, s.context, 0, 0)
	s.done.Close()
}

// do reads or writes all of p, or less: nothing where the kernel does not take it.
func (s *slot) do(op uint16, fd int, p []byte, off int64) (int, error) {
	s.memory = p
	defer func() { s.memory = nil }()
	control := &iocb{op: op, fd: uint32(fd), buf: uint64(uintptr(unsafe.Pointer(&p[0]))), bytes: uint64(len(p)), off: off,
		flags: flagDone, done: uint32(s.eventfd)}
	list := [1]*iocb{control}
	if _, _, errno := unix.Syscall(unix.SYS_IO_SUBMIT, s.context, 1, uintptr(unsafe.Pointer(&list))); errno != 0 {
		return 0, nil
	}
	// Where this fails, io_getevents waits instead: p is the kernel's until then.
	var count [8]byte
	io.ReadFull(s.done, count[:])
	for {
		var done event
		n, _, errno := unix.Syscall6(unix.SYS_IO_GETEVENTS, s.context, 1, 1, uintptr(unsafe.Pointer(&done)), 0, 0)
		switch {
		case errno == unix.EINTR || errno == 0 && n == 0:
			continue
		case errno != 0:
			return 0, errno
		case done.result < 0:
			return 0, syscall.Errno(-done.result)
		}
		return int(done.result), nil
	}
}
