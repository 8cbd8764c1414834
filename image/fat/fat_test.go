package fat

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func create(t *testing.T, files ...File) (*os.File, error) {
	f, err := os.Create(filepath.Join(t.TempDir(), "fat"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(64 << 20); err != nil {
		t.Fatal(err)
	}
	return f, Create(f, Spec{Size: 64 << 20, Label: "ESP", Time: time.Unix(1700000000, 0), Files: files})
}

var some = []File{
	{"EFI/BOOT/BOOTX64.EFI", bytes.Repeat([]byte("loader"), 40000)},
	{"EFI/Linux/bcsite_1.0.0+3-0.efi", bytes.Repeat([]byte("uki"), 500000)},
	{"loader/loader.conf", []byte("timeout 0\n")},
}

func TestCreate(t *testing.T) {
	f, err := create(t, some...)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range some {
		got, err := ReadFile(f, 0, 64<<20, want.Path)
		if err != nil || !bytes.Equal(got, want.Content) {
			t.Errorf("ReadFile(%s) = %d bytes, %v, want %d", want.Path, len(got), err, len(want.Content))
		}
	}
	if _, err := ReadFile(f, 0, 64<<20, "loader/none"); err == nil {
		t.Error("ReadFile of a file that is not there = nil")
	}
	names, err := List(f, 0, 64<<20, "EFI/Linux")
	if err != nil || len(names) != 1 || names[0] != "bcsite_1.0.0+3-0.efi" {
		t.Errorf("List = %v, %v", names, err)
	}
}

func TestCreateIsReproducible(t *testing.T) {
	a, err := create(t, some...)
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(2100 * time.Millisecond) // FAT times count two seconds
	b, err := create(t, some...)
	if err != nil {
		t.Fatal(err)
	}
	x, _ := os.ReadFile(a.Name())
	y, _ := os.ReadFile(b.Name())
	if len(x) != 64<<20 || !bytes.Equal(x, y) {
		t.Error("two file systems of the same files differ")
	}
}

func TestCreateIsClean(t *testing.T) {
	fsck, err := exec.LookPath("fsck.vfat")
	if err != nil {
		t.Skip("needs fsck.vfat")
	}
	f, err := create(t, some...)
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(fsck, "-n", "-v", f.Name()).CombinedOutput()
	text := string(out)
	if err != nil || strings.Contains(text, "Dirty") || strings.Contains(text, "wrong") || strings.Contains(text, "Start does point to root") {
		t.Errorf("fsck.vfat -n: %v\n%s", err, text)
	}
}

func TestCreateErrors(t *testing.T) {
	for _, tt := range []struct {
		file File
		want string
	}{
		{File{"a", nil}, "a is empty"},
		{File{"big", make([]byte, 70<<20)}, "do not fit"},
	} {
		if _, err := create(t, tt.file); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("Create(%s) = %v, want %q", tt.file.Path, err, tt.want)
		}
	}
}
