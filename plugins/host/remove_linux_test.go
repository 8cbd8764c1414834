package host

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// A plugin can nest folders deeper than this process may have files open.
func TestRemoveOfADeepFolder(t *testing.T) {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	low := limit
	low.Cur = 256
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &low); err != nil {
		t.Fatal(err)
	}
	defer syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit)
	root := t.TempDir()
	n, err := newRun(root, record{Plugin: "x", Boot: "b", Host: mark{PID: 2}, UID: -1}, -1)
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(n.dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range 3000 {
		if err := unix.Mkdirat(fd, "d", 0o700); err != nil {
			t.Fatal(err)
		}
		next, err := unix.Openat(fd, "d", unix.O_RDONLY|unix.O_DIRECTORY, 0)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
		fd = next
	}
	unix.Close(fd)
	// Many in one folder, and links out of it, which stay what they lead to.
	other := t.TempDir()
	if err := os.WriteFile(filepath.Join(other, "kept"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for i := range 1500 {
		if err := os.MkdirAll(filepath.Join(n.dir, "many", strconv.Itoa(i), "x"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, link := range []string{"l", "many/0/l", "many/0/x/l"} {
		if err := os.Symlink(other, filepath.Join(n.dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mkfifo(filepath.Join(n.dir, "many/fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	n.remove()
	if _, err := os.Stat(filepath.Join(other, "kept")); err != nil {
		t.Errorf("what a link led to: %v", err)
	}
	left, err := os.ReadDir(root)
	if err != nil || len(left) != 0 {
		t.Errorf("left = %v, %v, want nothing", left, err)
	}
}

// A link in place of the folder, or within it, is not followed.
func TestRemoveFollowsNoLink(t *testing.T) {
	root, other := t.TempDir(), t.TempDir()
	kept := filepath.Join(other, "kept")
	link := filepath.Join(root, "link")
	if err := errors.Join(os.WriteFile(kept, nil, 0o600), os.Symlink(other, link)); err != nil {
		t.Fatal(err)
	}
	if f, err := openFolder(link); err == nil {
		f.Close()
		t.Error("a link was opened as a folder")
	}
	if err := removeTree(link); err != nil {
		t.Errorf("removeTree of a link = %v", err)
	}
	if _, err := os.Lstat(link); err == nil {
		t.Error("the link is left")
	}
	if _, err := os.Stat(kept); err != nil {
		t.Errorf("what the link led to: %v", err)
	}
}
