package flash

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestCheck(t *testing.T) {
	usb := Target{Path: "/dev/sdb", Block: true, Whole: true, Removable: true, Size: 8e9, Serial: "S1"}
	fixed := usb
	fixed.Removable = false
	change := func(t Target, f func(*Target)) Target { f(&t); return t }
	for _, tt := range []struct {
		name   string
		target Target
		serial string
		want   string
	}{
		{"a file", Target{Path: "x"}, "", ""},
		{"a stick", usb, "", ""},
		{"a stick, confirmed", usb, "S1", ""},
		{"a stick, another named", usb, "S2", `has serial number "S1", not "S2"`},
		{"a fixed disk", fixed, "", "--yes-erase S1"},
		{"a fixed disk, confirmed", fixed, "S1", ""},
		{"a fixed disk, another named", fixed, "S2", "not \"S2\""},
		{"a disk without serial", change(fixed, func(t *Target) { t.Serial = "" }), "", "no serial number"},
		{"a mounted stick", change(usb, func(t *Target) { t.InUse = []string{"the mount /"} }), "", "in use by the mount /"},
		{"a mounted disk, confirmed", change(fixed, func(t *Target) { t.InUse = []string{"the mount /"} }), "S1", "in use"},
		{"a partition", change(usb, func(t *Target) { t.Whole = false }), "", "name the whole disk"},
		{"sectors of 4096 bytes", change(usb, func(t *Target) { t.Sector = 4096 }), "", "sectors of 4096 bytes"},
		{"too small", change(usb, func(t *Target) { t.Size = 10 }), "", "holds 10 bytes"},
	} {
		err := Check(tt.target, 1e6, tt.serial)
		if (err == nil) != (tt.want == "") || err != nil && (!strings.Contains(err.Error(), tt.want) || !errors.Is(err, ErrRefused)) {
			t.Errorf("%s: Check = %v, want %q", tt.name, err, tt.want)
		}
	}
}

func TestInUse(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "sdb")
	put := func(name, text string) {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	put("dev", "8:16\n")
	put("sdb1/dev", "8:17\n")
	put("sdb1/partition", "1\n")
	put("sdb2/dev", "8:18\n")
	put("sdb2/partition", "2\n")
	mounts, swaps := filepath.Join(t.TempDir(), "m"), filepath.Join(t.TempDir(), "s")
	os.WriteFile(mounts, []byte("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"), 0o644)
	if got, err := inUse(dir, mounts, swaps); err != nil || len(got) != 0 {
		t.Errorf("inUse(idle) = %q, %v, want none", got, err)
	}
	os.WriteFile(mounts, []byte("22 1 8:17 / /media/x rw - vfat /dev/sdb1 rw\n"), 0o644)
	os.WriteFile(swaps, []byte("Filename Type\n/dev/sdb2 partition 1 2 3\n"), 0o644)
	put("sdb2/holders/dm-0/x", "")
	got, err := inUse(dir, mounts, swaps)
	if text := strings.Join(got, "; "); err != nil || text != "dm-0; the mount /media/x; swap on /dev/sdb2" {
		t.Errorf("inUse = %q, %v", text, err)
	}
}

func sample() []byte {
	b := make([]byte, 3*block/2+512)
	copy(b[block-4:], "across")
	copy(b[len(b)-3:], "end")
	return b
}

func TestWriteFile(t *testing.T) {
	image := sample()
	path := filepath.Join(t.TempDir(), "disk")
	target, err := Describe(path, "/sys", "/proc/self/mountinfo", "/proc/swaps")
	if err != nil || target.Block {
		t.Fatalf("Describe = %+v, %v", target, err)
	}
	if err := Write(context.Background(), bytes.NewReader(image), int64(len(image)), target, nil); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, image) {
		t.Errorf("the file differs from the image (%v)", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := Write(ctx, bytes.NewReader(image), int64(len(image)), target, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("Write with an ended context = %v", err)
	}
}

// flipping lies once at the second reading, as a disk does that did not keep what it was given.
type flipping struct {
	*bytes.Reader
	reads int
}

func (f *flipping) ReadAt(b []byte, off int64) (int, error) {
	n, err := f.Reader.ReadAt(b, off)
	if f.reads++; f.reads == 3 {
		b[7] ^= 1
	}
	return n, err
}

func TestWriteNoticesADifference(t *testing.T) {
	image := sample()
	path := filepath.Join(t.TempDir(), "disk")
	err := Write(context.Background(), &flipping{Reader: bytes.NewReader(image)}, int64(len(image)), Target{Path: path}, nil)
	if err == nil || !strings.Contains(err.Error(), "does not hold what was written") {
		t.Errorf("Write = %v, want a complaint", err)
	}
}

// TestFailedWriteDoesNotBoot: whenever a write ends early, the disk's first
// sectors, and with them its partition table, are empty.
func TestFailedWriteDoesNotBoot(t *testing.T) {
	image := bytes.Repeat([]byte{0x5a}, 3*block+512)
	size := int64(len(image))
	for _, tt := range []struct {
		phase string
		done  int64
	}{{"write", block}, {"write", 2*block + 512}, {"verify", block}, {"verify", 2*block + 512}, {"write", size}} {
		path := filepath.Join(t.TempDir(), "disk")
		ctx, cancel := context.WithCancel(context.Background())
		hit := false
		err := Write(ctx, bytes.NewReader(image), size, Target{Path: path}, func(phase string, done, total int64) {
			if phase == tt.phase && done == tt.done {
				hit = true
				cancel()
			}
		})
		cancel()
		if !hit || !errors.Is(err, context.Canceled) {
			t.Errorf("%s at %d: Write = %v, want %v", tt.phase, tt.done, err, context.Canceled)
		}
		if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got[:block], make([]byte, block)) {
			t.Errorf("%s at %d: the disk holds something at its start (%v)", tt.phase, tt.done, err)
		}
	}
	path := filepath.Join(t.TempDir(), "disk")
	if err := Write(context.Background(), &flipping{Reader: bytes.NewReader(image), reads: -4}, size, Target{Path: path}, nil); err == nil {
		t.Error("a disk that lost a bit of its first block was taken")
	}
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got[:block], make([]byte, block)) {
		t.Errorf("after a difference the disk holds something at its start (%v)", err)
	}
}

func TestDescribeRefuses(t *testing.T) {
	if _, err := Describe("/dev/null", "/sys", "/proc/self/mountinfo", "/proc/swaps"); !errors.Is(err, ErrRefused) {
		t.Errorf("Describe(/dev/null) = %v, want a refusal", err)
	}
	if _, err := Describe("/dev/nonsense", "/sys", "/proc/self/mountinfo", "/proc/swaps"); err == nil {
		t.Error("Describe of a device that is not there = nil: a file would be made in /dev")
	}
}

func TestWriteLoopDevice(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	image := sample()
	backing := filepath.Join(t.TempDir(), "backing")
	if err := os.WriteFile(backing, make([]byte, 16<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("losetup", "--find", "--show", backing).Output()
	if err != nil {
		t.Skipf("needs loop devices: %v", err)
	}
	dev := strings.TrimSpace(string(out))
	defer exec.Command("losetup", "-d", dev).Run()
	target, err := Describe(dev, "/sys", "/proc/self/mountinfo", "/proc/swaps")
	if err != nil || !target.Block || !target.Whole || target.Size != 16<<20 {
		t.Fatalf("Describe(%s) = %+v, %v", dev, target, err)
	}
	if err := Check(target, int64(len(image)), ""); err == nil {
		t.Error("a loop device without confirmation was taken: it is not removable")
	}
	if err := Write(context.Background(), bytes.NewReader(image), int64(len(image)), target, nil); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(backing)
	if err != nil || !bytes.Equal(got[:len(image)], image) {
		t.Errorf("the device differs from the image (%v)", err)
	}
}
