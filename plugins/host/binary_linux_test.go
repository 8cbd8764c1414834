package host

import (
	"crypto/sha256"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/plugins/frozen"
	"github.com/better-compute/site-appliance/plugins/sandbox"
)

func openPinned(path string, want [32]byte) (*os.File, error) {
	f, err := frozen.Open(path, false)
	if err != nil {
		return nil, err
	}
	if err := verify(f, path, want); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func TestOpenPinnedKeepsWritersOut(t *testing.T) {
	content, err := os.ReadFile("/bin/true")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "plugin")
	if err := os.WriteFile(path, content, 0o755); err != nil {
		t.Fatal(err)
	}
	f, err := openPinned(path, sha256.Sum256(content))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Open(path, unix.O_WRONLY|unix.O_NONBLOCK, 0); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("open for writing between hash and exec: %v, want EAGAIN", err)
	}
	f.Close()
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatalf("open for writing afterwards: %v", err)
	}
	unix.Close(fd)
	link := path + ".link"
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	if _, err := openPinned(link, sha256.Sum256(content)); err == nil {
		t.Error("a symbolic link was opened")
	}
}

// What was hashed is what runs, whatever lies at its path by then.
func TestFileSwappedAfterHashing(t *testing.T) {
	content, err := os.ReadFile("/bin/true")
	if err != nil {
		t.Fatal(err)
	}
	other, err := os.ReadFile("/bin/false")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "plugin")
	for name, data := range map[string][]byte{path: content, path + ".new": other} {
		if err := os.WriteFile(name, data, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	f, err := openPinned(path, sha256.Sum256(content))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	cmd, err := sandbox.Command(sandbox.Spec{Binary: f, Name: "plugin", UID: -1, GID: -1})
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Run(); err != nil {
		t.Errorf("run what was hashed: %v", err)
	}
	if err := exec.Command(path).Run(); err == nil {
		t.Error("the path still has the old file: nothing was swapped")
	}
	if _, err := openPinned(path, sha256.Sum256(content)); !errors.Is(err, errPin) {
		t.Errorf("open what was swapped in: %v, want a pin mismatch", err)
	}
}
