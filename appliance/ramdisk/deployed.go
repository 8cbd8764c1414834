package ramdisk

import (
	"bytes"
	"io"
	"os"
	"time"

	"github.com/better-compute/site-appliance/image/stream/blockdev"
)

const (
	// lookBytes at both ends of a disk are where partition tables, boot sectors and
	// the marks of file systems stand. An image.stream clears them before it writes
	// anything, and writes them last.
	lookBytes = 1 << 20
	// lookWithin bounds the look: a disk that does not answer counts as in use.
	lookWithin = 3 * time.Second
)

// deployed reports whether the machine holds something already: whether any disk
// that is built in has anything but zeros at one of its ends, or cannot be read.
func (m *imager) deployed() bool {
	found := make(chan bool, 1)
	go func() {
		disks, err := blockdev.List(m.sys, m.dev)
		for _, d := range disks {
			if !d.Removable && !blank(d) {
				found <- true
				return
			}
		}
		found <- err != nil
	}()
	timer := time.NewTimer(lookWithin)
	defer timer.Stop()
	select {
	case in := <-found:
		return in
	case <-timer.C:
		return true
	}
}

func blank(d blockdev.Disk) bool {
	f, err := os.Open(d.Path)
	if err != nil {
		return false
	}
	defer f.Close()
	buf := make([]byte, min(lookBytes, d.SizeBytes))
	for _, at := range []int64{0, d.SizeBytes - int64(len(buf))} {
		if n, err := f.ReadAt(buf, at); n != len(buf) || err != nil && err != io.EOF {
			return false
		}
		if len(bytes.Trim(buf, "\x00")) > 0 {
			return false
		}
	}
	return true
}
