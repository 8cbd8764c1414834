package frozen

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

func copyOf(t *testing.T, program string) (path string, content []byte) {
	t.Helper()
	content, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(path, content, 0o755); err != nil {
		t.Fatal(err)
	}
	return path, content
}

// No writer gets in while the file is open, and one that is there keeps it from
// being opened.
func TestOpenKeepsWritersOut(t *testing.T) {
	path, _ := copyOf(t, "/bin/true")
	f, err := Open(path, false)
	if err != nil {
		t.Fatal(err)
	}
	write := func() error {
		fd, err := unix.Open(path, unix.O_WRONLY|unix.O_NONBLOCK, 0)
		if err == nil {
			err = unix.Close(fd)
		}
		return err
	}
	if err := write(); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("open for writing what is held: %v, want EAGAIN", err)
	}
	f.Close()
	if err := write(); err != nil {
		t.Errorf("open for writing what is closed: %v", err)
	}
	w, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path, false); !errors.Is(err, unix.ETXTBSY) {
		t.Errorf("Open beside a writer = %v, want ETXTBSY", err)
	}
	w.Close()
	if f, err = Open(path, false); err != nil {
		t.Fatalf("Open after the writer = %v", err)
	}
	f.Close()
}

func TestOpenRefuses(t *testing.T) {
	path, _ := copyOf(t, "/bin/true")
	dir := filepath.Dir(path)
	link, fifo := filepath.Join(dir, "link"), filepath.Join(dir, "fifo")
	if err := errors.Join(os.Symlink(path, link), unix.Mkfifo(fifo, 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		path   string
		follow bool
		ok     bool
	}{{path, false, true}, {path, true, true}, {link, true, true}, {link, false, false}, {fifo, true, false}, {dir, true, false}, {path + "x", true, false}} {
		f, err := Open(tt.path, tt.follow)
		if (err == nil) != tt.ok {
			t.Errorf("Open(%s, %v) = %v, want ok %v", filepath.Base(tt.path), tt.follow, err, tt.ok)
		}
		if f != nil {
			f.Close()
		}
	}
}

// Where there are no leases a copy in memory runs: the same bytes, for ever.
func TestSealedCopy(t *testing.T) {
	path, content := copyOf(t, "/bin/true")
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	m, err := sealedCopy(f, "plugin")
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	name := "/proc/self/fd/" + strconv.Itoa(int(m.Fd()))
	if got, err := os.ReadFile(name); err != nil || !bytes.Equal(got, content) {
		t.Errorf("the copy has %d bytes, %v, want the file's %d", len(got), err, len(content))
	}
	cmd := exec.Cmd{Path: "/proc/self/fd/3", Args: []string{"plugin"}, ExtraFiles: []*os.File{m}}
	if err := cmd.Run(); err != nil {
		t.Errorf("run the copy: %v", err)
	}
	if w, err := os.OpenFile(name, os.O_WRONLY, 0); err == nil {
		_, err = w.Write([]byte("x"))
		w.Close()
		if err == nil {
			t.Error("the copy was written to")
		}
	}
}
