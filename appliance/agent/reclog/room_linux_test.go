package reclog

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// A full disk leaves room for many records, then refuses, and what was written
// is whole.
func TestRoomOnAFullDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: mounts a small tmpfs")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=8m"); err != nil {
		t.Skipf("needs root: mount: %v", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	path := filepath.Join(dir, "log")
	l, _, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	filler, err := os.Create(filepath.Join(dir, "filler"))
	if err != nil {
		t.Fatal(err)
	}
	for size := 1 << 20; size > 0; size /= 2 {
		for err = nil; err == nil; {
			_, err = filler.Write(make([]byte, size))
		}
	}
	filler.Close()
	record, n := make([]byte, 1000), 0
	for ; n < 10000; n++ {
		if err = l.Append(record, true); err != nil {
			break
		}
	}
	if n < 500 || err == nil {
		t.Errorf("%d records of 1000 bytes on a full disk, then %v; want at least 500, then an error", n, err)
	}
	l.Close()
	l, records, err := Open(path)
	if err != nil || len(records) != n {
		t.Fatalf("opened again: %d records, %v, want %d", len(records), err, n)
	}
	l.Close()
}
