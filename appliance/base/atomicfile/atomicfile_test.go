package atomicfile

import (
	"os"
	"path/filepath"
	"testing"
)

func TestWrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	for _, want := range []string{"one", "two"} {
		if err := Write(path, []byte(want), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil || string(got) != want {
			t.Errorf("after Write: %q, %v, want %q", got, err, want)
		}
	}
	if st, _ := os.Stat(path); st.Mode().Perm() != 0o600 {
		t.Errorf("mode = %v, want 0600", st.Mode().Perm())
	}
	if entries, _ := os.ReadDir(filepath.Dir(path)); len(entries) != 1 {
		t.Errorf("%d files beside the state, want 1", len(entries))
	}
}

func TestWriteKeepsOldOnFailure(t *testing.T) {
	if err := Write(filepath.Join(t.TempDir(), "missing", "state"), nil, 0o600); err == nil {
		t.Error("Write into a missing folder succeeded")
	}
}

func TestSetAside(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	for _, content := range []string{"one", "two"} { // the newer one replaces the older
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		aside, err := SetAside(path)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(aside); err != nil || string(got) != content {
			t.Errorf("aside lies %q, %v, want %q", got, err, content)
		}
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			t.Errorf("the damaged file is still in place: %v", err)
		}
	}
	if was, err := WasSetAside(path); !was || err != nil {
		t.Errorf("WasSetAside = %v, %v, want true", was, err)
	}
	if was, err := WasSetAside(path + "2"); was || err != nil {
		t.Errorf("WasSetAside of another = %v, %v, want false", was, err)
	}
	if _, err := SetAside(path); err == nil {
		t.Error("setting a missing file aside succeeded")
	}
}
