package builder

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/board"
	"github.com/better-compute/site-appliance/image/manifest"
	"github.com/better-compute/site-appliance/initramfs/archive"
)

func silent() *slog.Logger { return slog.New(slog.DiscardHandler) }

func TestReadLock(t *testing.T) {
	sum := strings.Repeat("a", 64)
	path := filepath.Join(t.TempDir(), "lock")
	for _, tt := range []struct {
		text, want string
	}{
		{"# c\n\nlinux-image-6.1 6.1-1 " + sum + "\n", ""},
		{"linux-image-6.1 6.1-1\n", ":1: want a package"},
		{"# c\nlinux-image-6.1 6.1-1 abc\n", ":2: want a package"},
		{"../x 1 " + sum + "\n", "want a package"},
	} {
		if err := os.WriteFile(path, []byte(tt.text), 0o644); err != nil {
			t.Fatal(err)
		}
		got, err := readLock(path)
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("readLock(%q) = %v, want %q", tt.text, err, tt.want)
		}
		if err == nil && got["linux-image-6.1"] != (locked{"6.1-1", sum}) {
			t.Errorf("readLock(%q) = %+v", tt.text, got)
		}
	}
	if got, err := readLock(filepath.Join(t.TempDir(), "none")); err != nil || len(got) != 0 {
		t.Errorf("readLock of no file = %v, %v", got, err)
	}
}

func TestLock(t *testing.T) {
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "board", "b"), 0o755); err != nil {
		t.Fatal(err)
	}
	m := &manifest.Manifest{Packages: []manifest.Package{{Name: "linux-image-6.1", Version: "6.1-1", SHA256: strings.Repeat("b", 64)}, {Name: "ipxe", Version: "1"}}}
	if err := Lock(root, "b", m); err != nil {
		t.Fatal(err)
	}
	got, err := readLock(filepath.Join(root, "board", "b", lockFile))
	if err != nil || len(got) != 1 || got["linux-image-6.1"].version != "6.1-1" {
		t.Errorf("the lock reads back as %+v, %v", got, err)
	}
}

// modules makes a kernel's folder of two modules, one linked to the other.
func modules(t *testing.T) *kernel {
	dir := t.TempDir()
	put := func(name, text string) {
		p := filepath.Join(dir, "lib", "modules", "6.1-x", name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	put("modules.dep", "kernel/a-b.ko: kernel/c.ko\nkernel/c.ko:\nkernel/d.ko:\n")
	put("modules.builtin", "kernel/virtio.ko\n")
	put("modules.builtin.modinfo", "")
	put("modules.order", "")
	for _, m := range []string{"kernel/a-b.ko", "kernel/c.ko", "kernel/d.ko"} {
		put(m, m)
	}
	return &kernel{release: "6.1-x", dir: dir}
}

func TestSubset(t *testing.T) {
	if _, err := exec.LookPath(depmod()); err != nil {
		t.Skip("needs depmod")
	}
	dst := t.TempDir()
	unknown, err := modules(t).subset(context.Background(), dst, []string{"a_b", "virtio", "nonsense"})
	if err != nil || len(unknown) != 1 || unknown[0] != "nonsense" {
		t.Fatalf("subset = %v, %v, want nonsense alone to be unknown", unknown, err)
	}
	base := filepath.Join(dst, "lib", "modules", "6.1-x")
	for name, want := range map[string]bool{"kernel/a-b.ko": true, "kernel/c.ko": true, "kernel/d.ko": false, "modules.dep": true, "modules.order": false} {
		if _, err := os.Stat(filepath.Join(base, name)); (err == nil) != want {
			t.Errorf("%s is there: %v, want %v", name, err == nil, want)
		}
	}
}

func TestAddProgram(t *testing.T) {
	const program = "/usr/sbin/mke2fs"
	if _, err := os.Stat(program); err != nil {
		t.Skip("needs e2fsprogs")
	}
	b := &build{Options: Options{Log: silent()}, board: &board.Board{Arch: "amd64"}, m: &manifest.Manifest{}}
	tree := archive.New()
	if err := b.addProgram(tree, program); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{program, "lib64/ld-linux-x86-64.so.2", "lib/x86_64-linux-gnu/libc.so.6"} {
		if !tree.Has(p) {
			t.Errorf("%s is not in the image", p)
		}
	}
	named := false
	for _, p := range b.m.Packages {
		named = named || p.Name == "e2fsprogs" && p.Version != ""
	}
	if !named {
		t.Errorf("packages = %+v: e2fsprogs is not among them", b.m.Packages)
	}
	if err := b.addProgram(tree, "/etc/passwd"); err == nil {
		t.Error("a text file was taken for a program")
	}
}

func TestBudget(t *testing.T) {
	if err := budget("x", 10, 10); err != nil {
		t.Errorf("budget(10 of 10) = %v", err)
	}
	if err := budget("x", 11, 10); !errors.Is(err, ErrBudget) {
		t.Errorf("budget(11 of 10) = %v, want ErrBudget", err)
	}
	if err := budget("x", 11, 0); err != nil {
		t.Errorf("budget without a limit = %v", err)
	}
}

func TestBuildRefuses(t *testing.T) {
	o := Options{Root: "../..", Out: t.TempDir(), Cache: t.TempDir(), Board: "qemu-amd64", Log: silent(), Version: "1 2"}
	if _, err := Build(context.Background(), o); err == nil || !strings.Contains(err.Error(), "version") {
		t.Errorf("Build of version %q = %v", o.Version, err)
	}
	o.Version, o.Board = "1", "nonsense"
	if _, err := Build(context.Background(), o); err == nil || !strings.Contains(err.Error(), "read board") {
		t.Errorf("Build of board %q = %v", o.Board, err)
	}
}
