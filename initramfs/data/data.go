// Package data makes and mounts the data partition: created on the rest of the
// disk at the first boot, repaired when it needs it, and left alone, with the
// box going on without it, when it cannot be repaired.
package data

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/image/gpt"
	"github.com/better-compute/site-appliance/image/layout"
	"github.com/better-compute/site-appliance/initramfs/disk"
)

// Least is the smallest data partition that is made.
const Least = 64 * layout.MiB

// Step is what has to be done.
type Step int

const (
	// Use mounts the partition as it is.
	Use Step = iota
	// Format makes a file system on a partition that has had none.
	Format
	// Create adds the partition, then makes its file system.
	Create
)

// Plan is Decide's answer.
type Plan struct {
	Step Step
	// Number is the partition's, for Use and Format.
	Number int
	// First and Last are the new partition's sectors, for Create.
	First, Last uint64
}

// ErrNoRoom says that the disk has no partition for data and no room for one.
var ErrNoRoom = errors.New("no room for a data partition")

// Decide says what the disk of this size needs. It grows t to the disk's end.
func Decide(t *gpt.Table, size uint64) (Plan, error) {
	if p, ok := t.Find(layout.TypeLinux, layout.DataName); ok {
		return Plan{Step: Use, Number: p.Number}, nil
	}
	// An older boot was cut off between the table and the end of mke2fs.
	if p, ok := t.Find(layout.TypeLinux, layout.NewDataName); ok {
		return Plan{Step: Format, Number: p.Number}, nil
	}
	if err := t.Grow(size); err != nil {
		return Plan{}, err
	}
	first, last, ok := t.Free(Least)
	if !ok {
		return Plan{}, fmt.Errorf("%w of %d MiB on a disk of %d MiB", ErrNoRoom, Least/layout.MiB, size/layout.MiB)
	}
	return Plan{Step: Create, First: first, Last: last}, nil
}

// Runner runs a program to its end.
type Runner interface {
	Run(ctx context.Context, argv ...string) (code int, output string, err error)
}

// Setup does the work.
type Setup struct {
	Runner Runner
	// Say reports what takes long or goes wrong, one line each.
	Say func(format string, args ...any)
	// NewID makes a partition's identifier.
	NewID func() uuid.UUID
}

// Prepare brings the data partition of d into shape and mounts it on target.
// Its error means that the box has to go on without.
func (s Setup) Prepare(ctx context.Context, d disk.Disk, target string) error {
	plan, err := Decide(d.Table, d.Size)
	if err != nil {
		return err
	}
	number := plan.Number
	if plan.Step == Create {
		number, err = d.Table.Add(gpt.Partition{Type: layout.TypeLinux, ID: s.NewID(), First: plan.First, Last: plan.Last, Name: layout.NewDataName})
		if err != nil {
			return err
		}
		s.Say("making partition %d of %d MiB", number, (plan.Last-plan.First+1)*d.SectorSize/layout.MiB)
		if err := s.writeTable(d); err != nil {
			return err
		}
	}
	dev := d.Partition(number)
	if err := waitFor(ctx, dev); err != nil {
		return err
	}
	if plan.Step != Use {
		s.Say("making a file system on %s", dev)
		code, out, err := s.Runner.Run(ctx, "/usr/sbin/mke2fs", "-q", "-F", "-t", "ext4", "-L", layout.DataName, "-m", "1", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard", dev)
		if err != nil {
			return err
		}
		if code != 0 {
			return fmt.Errorf("mke2fs on %s: exit code %d: %s", dev, code, lastLine(out))
		}
		// Only now does the name say that there is something to keep.
		if err := d.Table.Rename(number, layout.DataName); err != nil {
			return err
		}
		if err := s.writeTable(d); err != nil {
			return err
		}
		if err := waitFor(ctx, dev); err != nil {
			return err
		}
	} else if err := s.check(ctx, dev); err != nil {
		return err
	}
	if err := os.MkdirAll(target, 0o755); err != nil {
		return fmt.Errorf("make %s: %w", target, err)
	}
	if err := unix.Mount(dev, target, "ext4", unix.MS_NOATIME|unix.MS_NODEV|unix.MS_NOSUID, "errors=remount-ro"); err != nil {
		return fmt.Errorf("mount %s: %w", dev, err)
	}
	return nil
}

// check repairs a file system: first what is safe to repair, then whatever it takes.
func (s Setup) check(ctx context.Context, dev string) error {
	// Codes of e2fsck: 1 is "repaired", 2 "repaired, reboot a mounted root", 4 and up trouble.
	code, out, err := s.Runner.Run(ctx, "/usr/sbin/e2fsck", "-p", dev)
	if err != nil {
		return err
	}
	if code < 4 {
		if code != 0 {
			s.Say("repaired %s: %s", dev, lastLine(out))
		}
		return nil
	}
	s.Say("%s needs a full repair: %s", dev, complaint(out))
	code, out, err = s.Runner.Run(ctx, "/usr/sbin/e2fsck", "-f", "-y", dev)
	if err != nil {
		return err
	}
	if code >= 4 {
		return fmt.Errorf("%s cannot be repaired and is left as it is: e2fsck exit code %d: %s", dev, code, complaint(out))
	}
	s.Say("repaired %s", dev)
	return nil
}

// writeTable stores the table and has the kernel read it.
func (s Setup) writeTable(d disk.Disk) error {
	f, err := os.OpenFile(d.Dev, os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", d.Dev, err)
	}
	defer f.Close()
	if err := d.Table.Write(f); err != nil {
		return fmt.Errorf("%s: %w", d.Dev, err)
	}
	// Busy while something else looks at the disk.
	for range 50 {
		if err = unix.IoctlSetInt(int(f.Fd()), unix.BLKRRPART, 0); !errors.Is(err, unix.EBUSY) {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	if err != nil {
		return fmt.Errorf("have the kernel read the table of %s: %w", d.Dev, err)
	}
	return nil
}

func waitFor(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s did not appear", path)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// complaint is what e2fsck says is wrong: its last lines are advice.
func complaint(out string) string {
	said := lastLine(out)
	for line := range strings.Lines(out) {
		// It names itself by the path that it was called by.
		if _, text, ok := strings.Cut(line, "e2fsck: "); ok {
			said = strings.TrimSpace(text)
		}
	}
	return said
}

func lastLine(s string) string {
	s = strings.TrimSpace(s)
	return s[strings.LastIndexByte(s, '\n')+1:]
}

// Space gives free and total bytes of a mounted file system.
func Space(path string) (free, total uint64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, 0, fmt.Errorf("look at %s: %w", path, err)
	}
	return st.Bavail * uint64(st.Bsize), st.Blocks * uint64(st.Bsize), nil
}
