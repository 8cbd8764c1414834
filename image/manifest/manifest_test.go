package manifest

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestManifest(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "site.efi"), []byte("image"), 0o644); err != nil {
		t.Fatal(err)
	}
	f, err := Describe(dir, "site.efi")
	if err != nil || f.Size != 5 {
		t.Fatalf("Describe = %+v, %v", f, err)
	}
	m := &Manifest{Board: "b", Version: "1", Built: time.Unix(1, 0).UTC(), Files: []File{f}, Parts: map[string]int64{"kernel": 1}, Packages: []Package{{Name: "z"}, {Name: "a"}}}
	path := filepath.Join(dir, "manifest.json")
	if err := m.Store(path); err != nil {
		t.Fatal(err)
	}
	back, err := Load(path)
	if err != nil || !reflect.DeepEqual(back, m) {
		t.Errorf("Load = %+v, %v, want %+v", back, err, m)
	}
	if err := back.Verify(dir); err != nil {
		t.Errorf("Verify = %v", err)
	}
	for content, want := range map[string]string{"imagE": "digest", "imag": "4 bytes"} {
		if err := os.WriteFile(filepath.Join(dir, "site.efi"), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := back.Verify(dir); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Verify(%q) = %v, want %q", content, err, want)
		}
	}
	os.Remove(filepath.Join(dir, "site.efi"))
	if err := back.Verify(dir); err == nil {
		t.Error("Verify without the file = nil")
	}
}

func TestParseErrors(t *testing.T) {
	sum := strings.Repeat("0", 64)
	for _, tt := range []string{
		`{`, `{"nonsense":1}`, `{"files":[{"name":"../x","size":1,"sha256":"` + sum + `"}]}`, `{"files":[{"name":"x","size":1,"sha256":"00"}]}`,
	} {
		if _, err := Parse([]byte(tt)); err == nil {
			t.Errorf("Parse(%s) = nil, want an error", tt)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"board":"b","files":[]}`))
	f.Fuzz(func(t *testing.T, b []byte) { Parse(b) })
}
