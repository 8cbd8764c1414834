package customize

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/image/fat"
	"github.com/better-compute/site-appliance/image/layout"
)

const join = "bc1.eyJ1IjpbImh0dHBzOi8vMTAuMC4yLjIiXX0"

func TestParseJoin(t *testing.T) {
	if got, err := ParseJoin([]byte(join + "\n")); got != join || err != nil {
		t.Errorf("ParseJoin = %q, %v", got, err)
	}
	for _, in := range []string{"", "bc1.", "bc2." + join[4:], join + " " + join, join + "\"\nx = 1"} {
		if _, err := ParseJoin([]byte(in)); err == nil {
			t.Errorf("ParseJoin(%q) = nil, want an error", in)
		}
	}
}

func TestConfiguration(t *testing.T) {
	for _, tt := range []struct{ name, base, want string }{
		{"empty", "", "\njoin = \"" + join + "\"\n"},
		{"tables", "# c\n[uplink]\ninterface = \"e\"\n", "# c\njoin = \"" + join + "\"\n\n[uplink]\ninterface = \"e\"\n"},
		{"comment", "# join = \"x\"\n", "# join = \"x\"\njoin = \"" + join + "\"\n"},
	} {
		got, err := Configuration([]byte(tt.base), join)
		if err != nil || string(got) != tt.want {
			t.Errorf("%s: Configuration = %q, %v, want %q", tt.name, got, err, tt.want)
		}
	}
	if _, err := Configuration([]byte("join_file = \"x\"\n"), join); err == nil {
		t.Error("two join strings were taken")
	}
}

// box makes an image with the box's layout.
func box(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "site.img")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	l := layout.Site()
	if err := f.Truncate(l.Size); err != nil {
		t.Fatal(err)
	}
	tab, err := l.Table()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range l.Partitions {
		if p.Label == "" {
			continue
		}
		spec := fat.Spec{Start: p.Start, Size: p.Size, Label: p.Label, Time: time.Unix(1e9, 0), Files: []fat.File{{Path: layout.ConfigFile, Content: []byte("# old\n")}}}
		if err := fat.Create(f, spec); err != nil {
			t.Fatal(err)
		}
	}
	if err := tab.Write(f); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestImage(t *testing.T) {
	from := box(t)
	to := filepath.Join(t.TempDir(), "copy.img")
	text := []byte("join = \"" + join + "\"\n")
	// What others can read must not become the copy.
	if err := os.WriteFile(to+".tmp", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := Image(from, to, text, time.Unix(1e9, 0)); err != nil {
		t.Fatal(err)
	}
	if got, err := Read(to); err != nil || !bytes.Equal(got, text) {
		t.Errorf("Read(copy) = %q, %v, want %q", got, err, text)
	}
	if got, err := Read(from); err != nil || string(got) != "# old\n" {
		t.Errorf("Read(original) = %q, %v: it was changed", got, err)
	}
	if st, err := os.Stat(to); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode of the copy, which holds a secret = %v, want 0600", st.Mode())
	}
	// Nothing outside of the partition differs.
	a, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(to)
	if err != nil {
		t.Fatal(err)
	}
	p, _ := layout.Site().Partition(layout.ConfigName)
	if !bytes.Equal(a[:p.Start], b[:p.Start]) || !bytes.Equal(a[p.Start+p.Size:], b[p.Start+p.Size:]) {
		t.Error("the copy differs outside of the configuration partition")
	}
	if bytes.Contains(b[p.Start:p.Start+p.Size], []byte("# old")) {
		t.Error("the old configuration is still in the copy")
	}
	if fsck, err := exec.LookPath("fsck.vfat"); err == nil {
		part := filepath.Join(t.TempDir(), "p2")
		if err := os.WriteFile(part, b[p.Start:p.Start+p.Size], 0o600); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command(fsck, "-n", part).CombinedOutput(); err != nil {
			t.Errorf("fsck.vfat: %v\n%s", err, out)
		}
	}
}

func TestImageErrors(t *testing.T) {
	from := box(t)
	to := filepath.Join(t.TempDir(), "copy.img")
	blank := filepath.Join(t.TempDir(), "blank")
	if err := os.WriteFile(blank, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, from, to string
		config         []byte
		want           string
	}{
		{"same file", from, from, []byte("x"), "overwrite"},
		{"empty configuration", from, to, nil, "empty"},
		{"no image", blank, to, []byte("x"), "no GUID partition table"},
		{"device", from, "/dev/null", []byte("x"), "image flash"},
	} {
		if err := Image(tt.from, tt.to, tt.config, time.Unix(1e9, 0)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: Image = %v, want %q", tt.name, err, tt.want)
		}
	}
	if _, err := os.Stat(to); err == nil {
		t.Error("a failed run left a copy")
	}
}
