package blockdev

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// sysfs makes a folder like /sys from file contents.
func sysfs(t *testing.T, files map[string]string) string {
	t.Helper()
	sys := t.TempDir()
	for name, text := range files {
		path := filepath.Join(sys, "block", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return sys
}

func TestList(t *testing.T) {
	sys := sysfs(t, map[string]string{
		"vda/size": "2048\n", "vda/serial": "VIRT1\n", "vda/device/vendor": "0x1af4\n", "vda/queue/rotational": "1\n",
		"nvme0n1/size": "4096\n", "nvme0n1/device/serial": "S4EV  \n", "nvme0n1/device/model": "Fast Disk 9   \n",
		"nvme0c0n1/size": "4096\n", "nvme0c0n1/hidden": "1\n", "nvme0c0n1/device/serial": "S4EV\n",
		"sda/size": "8\n", "sda/device/vpd_pg80": "\x00\x80\x00\x08  SER-42", "sda/ro": "1\n", "sda/removable": "1\n",
		"sr0/size": "4096\n", "sr0/device/type": "5\n",
		"sdb/size": "0\n", "sdb/device/type": "0\n",
		"loop0/size": "4096\n", "dm-0/size": "4096\n",
		"cciss!c0d0/size": "16\n", "cciss!c0d0/device/model": "\x01evil\n",
	})
	disks, err := List(sys, "/dev")
	if err != nil {
		t.Fatal(err)
	}
	want := []Disk{
		{Name: "cciss!c0d0", Path: "/dev/cciss/c0d0", Model: "?evil", SizeBytes: 8192},
		{Name: "nvme0n1", Path: "/dev/nvme0n1", Serial: "S4EV", Model: "Fast Disk 9", SizeBytes: 2 << 20},
		{Name: "sda", Path: "/dev/sda", Serial: "SER-42", SizeBytes: 4096, ReadOnly: true, Removable: true},
		{Name: "vda", Path: "/dev/vda", Serial: "VIRT1", SizeBytes: 1 << 20, Rotational: true},
	}
	if len(disks) != len(want) {
		t.Fatalf("List() = %v, want %v", disks, want)
	}
	for i := range want {
		if disks[i] != want[i] {
			t.Errorf("List()[%d] = %+v, want %+v", i, disks[i], want[i])
		}
	}
	if _, err := List(filepath.Join(sys, "absent"), "/dev"); err == nil {
		t.Error("List of nothing succeeded")
	}
}

func TestFind(t *testing.T) {
	disks := []Disk{{Name: "vda", Serial: "A"}, {Name: "vdb", Serial: "B"}, {Name: "vdc", Serial: "B"}, {Name: "vdd"}, {Name: "vde", Serial: "C", ReadOnly: true}}
	for _, tt := range []struct {
		serial, want string
		err          error
	}{
		{"A", "vda", nil},
		{" A\n", "vda", nil},
		{"a", "", ErrNoDisk},
		{"B", "", ErrAmbiguousDisk},
		{"X", "", ErrNoDisk},
	} {
		got, err := Find(disks, tt.serial)
		if got.Name != tt.want || !errors.Is(err, tt.err) {
			t.Errorf("Find(%q) = %q, %v, want %q, %v", tt.serial, got.Name, err, tt.want, tt.err)
		}
		if err != nil && errs.CodeOf(err) != errs.InvalidArgs {
			t.Errorf("Find(%q) has code %q, want %q", tt.serial, errs.CodeOf(err), errs.InvalidArgs)
		}
	}
	if _, err := Find(disks, "X"); !strings.Contains(err.Error(), `vdb (serial "B"`) || !strings.Contains(err.Error(), "vdd (no serial") {
		t.Errorf("Find(X) = %v, want a list of the disks", err)
	}
	// A disk without a serial is never meant by an empty one.
	if _, err := Find(disks, ""); errs.CodeOf(err) != errs.InvalidArgs {
		t.Errorf("Find(\"\") = %v, want %s", err, errs.InvalidArgs)
	}
	if _, err := Find(disks, "C"); errs.CodeOf(err) != errs.InvalidArgs {
		t.Errorf("Find(read-only disk) = %v, want %s", err, errs.InvalidArgs)
	}
}

func FuzzVPD80(f *testing.F) {
	f.Add([]byte("\x00\x80\x00\x02AB"))
	f.Add([]byte("\x00\x80\xff\xffAB"))
	f.Add([]byte{0, 0x80})
	f.Fuzz(func(t *testing.T, page []byte) {
		if s := parseVPD80(page); len(s) > len(page) || strings.ContainsAny(s, "\n\x00") {
			t.Errorf("parseVPD80(%q) = %q", page, s)
		}
	})
}

func TestDevice(t *testing.T) {
	t.Run("asynchronous", func(t *testing.T) { testDevice(t, func(*Device) {}) })
	t.Run("synchronous", func(t *testing.T) {
		testDevice(t, func(d *Device) {
			if d.slots != nil {
				for range slots {
					(<-d.slots).close()
				}
			}
			d.slots = nil
		})
	})
	t.Run("refused by the kernel", func(t *testing.T) {
		testDevice(t, func(d *Device) {
			if d.slots != nil {
				d.directFD = -1
			}
		})
	})
}

func testDevice(t *testing.T, prepare func(*Device)) {
	path := filepath.Join(t.TempDir(), "disk")
	const size = 1<<20 + 512
	if err := os.WriteFile(path, bytes.Repeat([]byte{0xaa}, size), 0o600); err != nil {
		t.Fatal(err)
	}
	d, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	prepare(d)
	if d.Size() != size || d.SectorSize() != 512 {
		t.Errorf("size %d, sector %d, want %d, 512", d.Size(), d.SectorSize(), size)
	}
	buf, err := Buffer(3 * Align)
	if err != nil {
		t.Fatal(err)
	}
	defer Free(buf)
	// Aligned start and unaligned end; unaligned start; unaligned memory.
	for _, w := range []struct {
		data []byte
		off  int64
		fill byte
	}{{buf[:2*Align+512], 8 * Align, 1}, {buf[:512], 512, 2}, {buf[1:513], 4 * Align, 3}, {buf[:512], size - 512, 4}} {
		for i := range w.data {
			w.data[i] = w.fill
		}
		if n, err := d.WriteAt(w.data, w.off); n != len(w.data) || err != nil {
			t.Fatalf("WriteAt(%d) = %d, %v", w.off, n, err)
		}
		got := make([]byte, len(w.data))
		if _, err := d.ReadAt(got, w.off); err != nil || !bytes.Equal(got, w.data) {
			t.Errorf("ReadAt(%d): %v or other bytes", w.off, err)
		}
	}
	if err := d.Zero(16*Align, 100); err != nil {
		t.Fatal(err)
	}
	if err := d.Sync(); err != nil {
		t.Fatal(err)
	}
	if err := d.RereadPartitions(); err != nil {
		t.Error(err)
	}
	got, err := os.ReadFile(path)
	if err != nil || len(got) != size {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	if !bytes.Equal(got[16*Align:16*Align+101], append(make([]byte, 100), 0xaa)) {
		t.Error("Zero did not zero its bytes, or more than these")
	}
}

// More at a time than there are slots, with errors among them.
func TestDeviceAtOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "disk")
	const size = 256 * Align
	if err := os.WriteFile(path, make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
	d, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if !d.Direct() || d.slots == nil {
		t.Skip("the temporary folder's file system takes no direct access")
	}
	var all sync.WaitGroup
	for i := range 4 * slots {
		all.Go(func() {
			buf, err := Buffer(4 * Align)
			if err != nil {
				t.Error(err)
				return
			}
			defer Free(buf)
			got := make([]byte, len(buf)+Align)
			for round := range 20 {
				for j := range buf {
					buf[j] = byte(i*20 + round)
				}
				off := int64(i * 8 * Align)
				if n, err := d.WriteAt(buf, off); n != len(buf) || err != nil {
					t.Errorf("WriteAt(%d) = %d, %v", off, n, err)
				}
				aligned := buf[:2*Align]
				if n, err := d.ReadAt(aligned, size-Align); n != Align || err != io.EOF {
					t.Errorf("ReadAt(over the end) = %d, %v, want %d, %v", n, err, Align, io.EOF)
				}
				if n, err := d.ReadAt(got[:4*Align], off); n != 4*Align || err != nil || got[0] != byte(i*20+round) || got[4*Align-1] != got[0] {
					t.Errorf("ReadAt(%d) = %d, %v and %d, want %d", off, n, err, got[0], byte(i*20+round))
				}
			}
		})
	}
	all.Wait()
	buf, err := Buffer(Align)
	if err != nil {
		t.Fatal(err)
	}
	defer Free(buf)
	// What the kernel does not take goes another way in silence; here it does take it.
	s := <-d.slots
	n, err := s.do(opWrite, d.directFD, buf, 0)
	d.slots <- s
	if n != len(buf) || err != nil {
		t.Errorf("do(write) = %d, %v, want %d", n, err, len(buf))
	}
	if n, err := d.WriteAt(buf, -Align); n != 0 || err == nil {
		t.Errorf("WriteAt(-%d) = %d, %v, want an error", Align, n, err)
	}
}

// A full disk is told as such, whichever way the bytes went.
func TestDeviceFull(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: mounts a small file system")
	}
	dir := t.TempDir()
	image := filepath.Join(dir, "ext4.img")
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, 8<<20); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("/usr/sbin/mke2fs", "-q", "-t", "ext4", image).CombinedOutput(); err != nil {
		t.Skipf("needs mke2fs: %v %s", err, out)
	}
	at := filepath.Join(dir, "mnt")
	if err := os.Mkdir(at, 0o700); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("/usr/bin/mount", "-o", "loop", image, at).CombinedOutput(); err != nil {
		t.Skipf("needs loop devices: mount: %s", out)
	}
	defer exec.Command("/usr/bin/umount", at).Run()
	path := filepath.Join(at, "disk")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 64<<20); err != nil {
		t.Fatal(err)
	}
	d, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	buf, err := Buffer(16 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer Free(buf)
	if _, err := d.WriteAt(buf, 0); errs.CodeOf(err) != errs.NoSpace {
		t.Errorf("WriteAt(full file system) = %v, want %s", err, errs.NoSpace)
	}
}
