package newc

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

func TestBootArchive(t *testing.T) {
	cpio, err := exec.LookPath("cpio")
	if err != nil {
		t.Skip("needs cpio")
	}
	for _, content := range []string{"", "a", "ab", "abc", "abcd", `{"machine_id":"node_a"}`} {
		archive := BootArchive("/etc/bc/boot.json", []byte(content))
		if len(archive)%512 != 0 {
			t.Errorf("len(BootArchive(%q)) = %d, want a multiple of 512", content, len(archive))
		}
		dir := t.TempDir()
		cmd := exec.Command(cpio, "-idm", "--no-absolute-filenames", "--quiet")
		cmd.Dir, cmd.Stdin = dir, bytes.NewReader(archive)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("cpio: %v: %s", err, out)
		}
		got, err := os.ReadFile(filepath.Join(dir, "etc/bc/boot.json"))
		if err != nil || string(got) != content {
			t.Errorf("BootArchive(%q) unpacks to %q, %v", content, got, err)
		}
		for name, want := range map[string]os.FileMode{"etc": 0o755, "etc/bc": 0o755, "etc/bc/boot.json": 0o600} {
			if st, err := os.Stat(filepath.Join(dir, name)); err != nil || st.Mode().Perm() != want {
				t.Errorf("mode of %s = %v, %v, want %v", name, st.Mode(), err, want)
			}
		}
	}
}
