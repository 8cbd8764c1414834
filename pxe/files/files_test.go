package files

import (
	"io"
	"os"
	"path/filepath"
	"testing"
)

func TestDir(t *testing.T) {
	top := t.TempDir()
	dir := filepath.Join(top, "netboot")
	if err := os.MkdirAll(filepath.Join(dir, "ipxe"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"secret", "netboot/ipxe/snponly.efi"} {
		if err := os.WriteFile(filepath.Join(top, name), []byte("bytes of "+name), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("../secret", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	f, err := Dir(dir).Open(UEFILoader)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if got, err := io.ReadAll(f); err != nil || string(got) != "bytes of netboot/ipxe/snponly.efi" || f.Size() != int64(len(got)) {
		t.Errorf("Open(%s) = %q, %v, size %d", UEFILoader, got, err, f.Size())
	}
	for _, name := range []string{"../secret", "link", "ipxe", "missing", "", "/etc/passwd"} {
		if f, err := Dir(dir).Open(name); err == nil {
			f.Close()
			t.Errorf("Open(%q) succeeded, want an error", name)
		}
	}
}
