package blockdev

import (
	"errors"
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Discard tells the device that n bytes at off are not needed any more; secure, that
// it must not be able to give them back, copies included. What the bytes read as then
// is the device's own affair. errors.ErrUnsupported: it cannot.
func (d *Device) Discard(off, n int64, secure bool) error {
	var err error
	switch {
	case d.block:
		request := uintptr(unix.BLKDISCARD)
		if secure {
			request = unix.BLKSECDISCARD
		}
		span := [2]uint64{uint64(off), uint64(n)}
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, d.buffered.Fd(), request, uintptr(unsafe.Pointer(&span))); errno != 0 {
			err = errno
		}
	case secure:
		err = syscall.EOPNOTSUPP
	default:
		err = unix.Fallocate(int(d.buffered.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
	}
	if errors.Is(err, errors.ErrUnsupported) || errors.Is(err, syscall.ENOTTY) || errors.Is(err, syscall.EINVAL) {
		return fmt.Errorf("discard %s: %w", d.name, errors.ErrUnsupported)
	}
	if err != nil {
		return fmt.Errorf("discard %s at %d: %w", d.name, off, err)
	}
	return nil
}
