// Package flash writes an image to a disk and reads it back, and refuses
// disks that are in use or that nobody named on purpose.
package flash

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/image/layout"
)

// Target is a disk as the system describes it.
type Target struct {
	Path string
	// Block is false for an ordinary file.
	Block     bool
	Whole     bool
	Removable bool
	Size      int64
	// Sector is the size of the disk's sectors; 0 is unknown.
	Sector int64
	Serial string
	Model  string
	// InUse names what uses the disk or a part of it.
	InUse []string
}

// ErrRefused says that the disk must not be written to.
var ErrRefused = errors.New("refused")

// Check says whether a target may be overwritten. eraseSerial is the serial
// number that a person gave for a disk that is not removable.
func Check(t Target, imageSize int64, eraseSerial string) error {
	if !t.Block {
		return nil
	}
	switch {
	case !t.Whole:
		return fmt.Errorf("%w: %s is a partition: name the whole disk", ErrRefused, t.Path)
	case len(t.InUse) > 0:
		return fmt.Errorf("%w: %s is in use by %s", ErrRefused, t.Path, strings.Join(t.InUse, ", "))
	case t.Size < imageSize:
		return fmt.Errorf("%w: %s holds %d bytes, the image has %d", ErrRefused, t.Path, t.Size, imageSize)
	case t.Sector != 0 && t.Sector != layout.Sector:
		return fmt.Errorf("%w: %s has sectors of %d bytes, images are made for %d: nothing would boot from it", ErrRefused, t.Path, t.Sector, layout.Sector)
	case eraseSerial != "" && eraseSerial != t.Serial:
		return fmt.Errorf("%w: %s has serial number %q, not %q", ErrRefused, t.Path, t.Serial, eraseSerial)
	case !t.Removable && t.Serial == "":
		return fmt.Errorf("%w: %s is not removable and has no serial number to confirm it by; dd writes it without asking", ErrRefused, t.Path)
	case !t.Removable && eraseSerial == "":
		return fmt.Errorf("%w: %s (%s, %d GB) is not removable; to erase it say --yes-erase %s", ErrRefused, t.Path, strings.TrimSpace(t.Model), t.Size/1e9, t.Serial)
	}
	return nil
}

// Describe looks at a path: a block device, or a file that is there or not.
func Describe(path, sys, mounts, swaps string) (Target, error) {
	st, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) && !strings.HasPrefix(filepath.Clean(path), "/dev/") {
		return Target{Path: path}, nil
	}
	if err != nil {
		return Target{}, fmt.Errorf("look at disk: %w", err)
	}
	if st.Mode().IsRegular() {
		return Target{Path: path, Size: st.Size()}, nil
	}
	if st.Mode()&os.ModeDevice == 0 || st.Mode()&os.ModeCharDevice != 0 {
		return Target{}, fmt.Errorf("%w: %s is neither a disk nor a file", ErrRefused, path)
	}
	var raw unix.Stat_t
	if err := unix.Stat(path, &raw); err != nil {
		return Target{}, fmt.Errorf("look at %s: %w", path, err)
	}
	dir, err := filepath.EvalSymlinks(filepath.Join(sys, "dev", "block", fmt.Sprintf("%d:%d", unix.Major(raw.Rdev), unix.Minor(raw.Rdev))))
	if err != nil {
		return Target{}, fmt.Errorf("look up %s: %w", path, err)
	}
	t := Target{Path: path, Block: true}
	_, err = os.Stat(filepath.Join(dir, "partition"))
	t.Whole = errors.Is(err, os.ErrNotExist)
	t.Removable = text(filepath.Join(dir, "removable")) == "1"
	sectors, err := strconv.ParseInt(text(filepath.Join(dir, "size")), 10, 64)
	if err != nil {
		return Target{}, fmt.Errorf("size of %s: %w", path, err)
	}
	t.Size = sectors * 512 // sysfs counts in these, whatever the disk does
	t.Sector, _ = strconv.ParseInt(text(filepath.Join(dir, "queue", "logical_block_size")), 10, 64)
	for _, f := range []string{"device/serial", "serial", "device/vpd_pg80"} {
		if s := printable(text(filepath.Join(dir, f))); s != "" && t.Serial == "" {
			t.Serial = s
		}
	}
	t.Model = text(filepath.Join(dir, "device", "model"))
	t.InUse, err = inUse(dir, mounts, swaps)
	return t, err
}

// inUse finds mounts, swap and whatever the kernel stacked on the disk in dir
// or on one of its partitions.
func inUse(dir, mounts, swaps string) ([]string, error) {
	devs := map[string]string{text(filepath.Join(dir, "dev")): filepath.Base(dir)}
	names := map[string]bool{"/dev/" + filepath.Base(dir): true}
	var out []string
	holders := func(d string) {
		entries, err := os.ReadDir(filepath.Join(d, "holders"))
		if err != nil {
			return
		}
		for _, e := range entries {
			out = append(out, e.Name())
		}
	}
	holders(dir)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("look at disk: %w", err)
	}
	for _, e := range entries {
		part := filepath.Join(dir, e.Name())
		if _, err := os.Stat(filepath.Join(part, "partition")); err == nil {
			devs[text(filepath.Join(part, "dev"))] = e.Name()
			names["/dev/"+e.Name()] = true
			holders(part)
		}
	}
	// mountinfo: id, parent, major:minor, root, mount point, …
	data, err := os.ReadFile(mounts)
	if err != nil {
		return nil, fmt.Errorf("read mounts: %w", err)
	}
	for line := range strings.SplitSeq(string(data), "\n") {
		f := strings.Fields(line)
		if len(f) < 5 {
			continue
		}
		if _, ok := devs[f[2]]; ok {
			out = append(out, "the mount "+f[4])
		}
	}
	if data, err := os.ReadFile(swaps); err == nil {
		for line := range strings.SplitSeq(string(data), "\n") {
			if f := strings.Fields(line); len(f) > 0 && names[f[0]] {
				out = append(out, "swap on "+f[0])
			}
		}
	}
	return out, nil
}

func text(path string) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

func printable(s string) string {
	return strings.TrimSpace(strings.Map(func(r rune) rune {
		if r < 0x20 || r > 0x7e {
			return -1
		}
		return r
	}, s))
}

const block = 4 << 20

// Write copies size bytes of image to the target and reads everything back.
// The first block, with the partition table, comes last, when the rest is
// proven, so that a write that fails leaves no disk that boots half an image.
// progress may be nil.
func Write(ctx context.Context, image io.ReaderAt, size int64, t Target, progress func(phase string, done, total int64)) error {
	if progress == nil {
		progress = func(string, int64, int64) {}
	}
	flags := os.O_RDWR
	if t.Block {
		flags |= unix.O_EXCL // fails while something else has it
	} else {
		flags |= os.O_CREATE | os.O_TRUNC
	}
	out, err := os.OpenFile(t.Path, flags, 0o600)
	if err != nil {
		return fmt.Errorf("open %s: %w", t.Path, err)
	}
	defer out.Close()
	if !t.Block {
		if err := out.Truncate(size); err != nil {
			return fmt.Errorf("make %s: %w", t.Path, err)
		}
	}
	w := writer{image: image, size: size, target: t, out: out, progress: progress}
	first := min(block, size)
	if err := w.wipe(first); err != nil {
		return err
	}
	if err := w.write(ctx, first, size); err != nil {
		return err
	}
	if err := w.write(ctx, 0, first); err != nil {
		return errors.Join(err, w.wipe(first))
	}
	if t.Block {
		if err := unix.IoctlSetInt(int(out.Fd()), unix.BLKRRPART, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("have the kernel read the new partitions: %w", err)
		}
	}
	return nil
}

type writer struct {
	image    io.ReaderAt
	size     int64
	target   Target
	out      *os.File
	progress func(phase string, done, total int64)

	written, verified int64
}

// wipe makes the first n bytes zeros.
func (w *writer) wipe(n int64) error {
	if _, err := w.out.WriteAt(make([]byte, n), 0); err != nil {
		return fmt.Errorf("wipe the partition table of %s: %w", w.target.Path, err)
	}
	if err := w.out.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", w.target.Path, err)
	}
	return nil
}

// write copies a part of the image, syncs, drops what the system remembers of
// it, and reads it back.
func (w *writer) write(ctx context.Context, from, to int64) error {
	err := each(ctx, w.image, from, to, func(at int64, b []byte) error {
		if w.target.Block || at == 0 || !zero(b) { // a new file has its holes already
			if _, err := w.out.WriteAt(b, at); err != nil {
				return fmt.Errorf("write at %d: %w", at, err)
			}
		}
		w.written += int64(len(b))
		w.progress("write", w.written, w.size)
		return nil
	})
	if err != nil {
		return err
	}
	if err := w.out.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", w.target.Path, err)
	}
	if err := unix.Fadvise(int(w.out.Fd()), 0, w.size, unix.FADV_DONTNEED); err != nil {
		return fmt.Errorf("forget what was written: %w", err)
	}
	if w.target.Block {
		if err := unix.IoctlSetInt(int(w.out.Fd()), unix.BLKFLSBUF, 0); err != nil {
			return fmt.Errorf("flush buffers of %s: %w", w.target.Path, err)
		}
	}
	got := make([]byte, block)
	return each(ctx, w.image, from, to, func(at int64, b []byte) error {
		if _, err := w.out.ReadAt(got[:len(b)], at); err != nil {
			return fmt.Errorf("read back at %d: %w", at, err)
		}
		if !bytes.Equal(got[:len(b)], b) {
			return fmt.Errorf("%s does not hold what was written to it: it differs between byte %d and %d", w.target.Path, at, at+int64(len(b)))
		}
		w.verified += int64(len(b))
		w.progress("verify", w.verified, w.size)
		return nil
	})
}

// each reads the image's bytes from from up to to.
func each(ctx context.Context, r io.ReaderAt, from, to int64, f func(at int64, b []byte) error) error {
	buf := make([]byte, block)
	for at := from; at < to; {
		if err := ctx.Err(); err != nil {
			return err
		}
		b := buf[:min(int64(len(buf)), to-at)]
		if _, err := r.ReadAt(b, at); err != nil {
			return fmt.Errorf("read image at %d: %w", at, err)
		}
		if err := f(at, b); err != nil {
			return err
		}
		at += int64(len(b))
	}
	return nil
}

func zero(b []byte) bool {
	for len(b) >= 8 {
		if b[0]|b[1]|b[2]|b[3]|b[4]|b[5]|b[6]|b[7] != 0 {
			return false
		}
		b = b[8:]
	}
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}
