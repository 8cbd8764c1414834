package blockdev

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// Align is what offsets, lengths and memory must be multiples of for direct
// access: no disk asks for more than a page.
const Align = 4096

// Device is a disk, or a file that stands for one, opened for writing. Reads
// and writes go past the page cache where they are aligned and the device can.
type Device struct {
	name     string
	buffered *os.File
	direct   *os.File // nil: not possible here
	directFD int
	slots    chan *slot // for direct; nil: the kernel has none
	size     int64
	sector   int
	block    bool
}

// Open claims the device for this process alone: a disk that is mounted or
// claimed otherwise is refused.
func Open(path string) (*Device, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("open disk: %w", err)
	}
	d := &Device{name: path, sector: 512, block: st.Mode()&os.ModeDevice != 0 && st.Mode()&os.ModeCharDevice == 0}
	flags := os.O_RDWR
	if d.block {
		flags |= unix.O_EXCL
	} else if !st.Mode().IsRegular() {
		return nil, errs.New(errs.InvalidArgs, "open disk: %s is neither a block device nor a file", path)
	}
	if d.buffered, err = os.OpenFile(path, flags, 0); err != nil {
		if errors.Is(err, syscall.EBUSY) {
			return nil, errs.New(errs.InvalidArgs, "open disk: %s is in use", path)
		}
		return nil, fmt.Errorf("open disk: %w", err)
	}
	if d.direct, err = os.OpenFile(path, os.O_RDWR|unix.O_DIRECT, 0); err != nil {
		d.direct = nil // tmpfs, for one
	} else {
		d.directFD = int(d.direct.Fd())
		d.slots = newSlots()
	}
	if err := d.measure(); err != nil {
		d.Close()
		return nil, fmt.Errorf("open disk: %w", err)
	}
	return d, nil
}

func (d *Device) measure() error {
	size, err := d.buffered.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	d.size = size
	if d.block {
		if d.sector, err = unix.IoctlGetInt(int(d.buffered.Fd()), unix.BLKSSZGET); err != nil {
			return fmt.Errorf("%s: read the sector size: %w", d.name, err)
		}
	}
	return nil
}

// Size is in bytes.
func (d *Device) Size() int64 { return d.size }

// SectorSize is the logical one, in bytes.
func (d *Device) SectorSize() int { return d.sector }

// Direct reports whether aligned access goes past the page cache.
func (d *Device) Direct() bool { return d.direct != nil }

// Buffer makes memory that direct access takes. It is never given back.
func Buffer(n int) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("get %d bytes of memory: %w", n, err)
	}
	return b, nil
}

// Free gives a Buffer's memory back.
func Free(b []byte) { unix.Munmap(b[:cap(b)]) }

// split is how many of p's bytes at off can go directly.
func (d *Device) split(p []byte, off int64) int {
	if d.direct == nil || off%Align != 0 || len(p) < Align || uintptr(unsafe.Pointer(&p[0]))%Align != 0 {
		return 0
	}
	return len(p) &^ (Align - 1)
}

// transfer reads or writes all of p directly.
func (d *Device) transfer(op uint16, p []byte, off int64) (n int, err error) {
	if d.slots != nil {
		s := <-d.slots
		n, err = s.do(op, d.directFD, p, off)
		d.slots <- s
		if err != nil || n == len(p) {
			return n, err
		}
	}
	// What is left says by itself why it was.
	var done int
	if op == opWrite {
		done, err = d.direct.WriteAt(p[n:], off+int64(n))
	} else {
		done, err = d.direct.ReadAt(p[n:], off+int64(n))
	}
	return n + done, err
}

// WriteAt is io.WriterAt.
func (d *Device) WriteAt(p []byte, off int64) (int, error) {
	n := d.split(p, off)
	if n > 0 {
		if done, err := d.transfer(opWrite, p[:n], off); err != nil {
			return done, d.wrote(off, err)
		}
	}
	if n == len(p) {
		return n, nil
	}
	done, err := d.buffered.WriteAt(p[n:], off+int64(n))
	return n + done, d.wrote(off, err)
}

func (d *Device) wrote(off int64, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, syscall.ENOSPC):
		return errs.New(errs.NoSpace, "write at %d: %v", off, err)
	}
	return fmt.Errorf("write at %d: %w", off, err)
}

// ReadAt is io.ReaderAt.
func (d *Device) ReadAt(p []byte, off int64) (int, error) {
	n := d.split(p, off)
	if n > 0 {
		if done, err := d.transfer(opRead, p[:n], off); err != nil {
			return done, err
		}
	}
	if n == len(p) {
		return n, nil
	}
	done, err := d.buffered.ReadAt(p[n:], off+int64(n))
	return n + done, err
}

var zeros = sync.OnceValues(func() ([]byte, error) { return Buffer(1 << 20) })

// Zero makes n bytes at off read as zeros. The device does it by itself where it
// can; where it cannot, zeros are written.
func (d *Device) Zero(off, n int64) error {
	if n <= 0 {
		return nil
	}
	if d.block && off%int64(d.sector) == 0 && n%int64(d.sector) == 0 {
		span := [2]uint64{uint64(off), uint64(n)}
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, d.buffered.Fd(), unix.BLKZEROOUT, uintptr(unsafe.Pointer(&span))); errno == 0 {
			return nil
		}
	}
	if !d.block && unix.Fallocate(int(d.buffered.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n) == nil {
		return nil
	}
	block, err := zeros()
	if err != nil {
		return err
	}
	for n > 0 {
		m := min(n, int64(len(block)))
		if _, err := d.WriteAt(block[:m], off); err != nil {
			return err
		}
		off, n = off+m, n-m
	}
	return nil
}

// Sync returns when everything written is on the medium, and makes later reads
// come from there too.
func (d *Device) Sync() error {
	if err := d.buffered.Sync(); err != nil {
		return fmt.Errorf("flush %s: %w", d.name, err)
	}
	// Only the cache is lost where this fails, not its benefit.
	unix.Fadvise(int(d.buffered.Fd()), 0, 0, unix.FADV_DONTNEED)
	return nil
}

// RereadPartitions makes the kernel see the new table. A file has none to see.
func (d *Device) RereadPartitions() error {
	if !d.block {
		return nil
	}
	var err error
	// Whoever probes the disk just now holds it for a moment.
	for range 20 {
		err = unix.IoctlSetInt(int(d.buffered.Fd()), unix.BLKRRPART, 0)
		if err != unix.EBUSY {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	if err != nil {
		return fmt.Errorf("re-read the partitions of %s: %w", d.name, err)
	}
	return nil
}

// Close gives the device free.
func (d *Device) Close() error {
	err := d.buffered.Close()
	if d.direct != nil {
		err = errors.Join(err, d.direct.Close())
	}
	if d.slots != nil {
		for range slots {
			(<-d.slots).close()
		}
	}
	return err
}
