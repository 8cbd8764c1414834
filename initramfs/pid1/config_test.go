package pid1

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestChoose(t *testing.T) {
	const good, older = "join = \"bc1.new\"\n", "join = \"bc1.old\"\n"
	unread := errors.New("partition BCCONFIG (/dev/vda2) cannot be read")
	for _, tt := range []struct {
		name, raw  string
		rerr       error
		kept       string // "-": nothing can be kept
		use, keeps string
		want       string
	}{
		{"first start", good, nil, "", good, good, ""},
		{"edited", good, nil, older, good, good, ""},
		{"nothing can be kept", good, nil, "-", good, "", ""},
		{"a mistake", "jion = \"x\"\n", nil, older, older, older, `site.toml:1: unknown key "jion"; going on with the last good configuration`},
		{"a mistake at the first start", "jion = \"x\"\n", nil, "", "", "", `unknown key "jion"; going on with the defaults`},
		{"garbage", "\x00\xff\x1b[2J", nil, older, older, older, "site.toml:1: "},
		{"garbage and garbage kept", "\x00", nil, "\x01\xff", "", "\x01\xff", "going on with the defaults"},
		{"partition gone", "", unread, older, older, older, unread.Error() + "; going on with the last good configuration"},
		{"partition gone at the first start", "", unread, "", "", "", unread.Error() + "; going on with the defaults"},
		{"partition and disk gone", "", unread, "-", "", "", "going on with the defaults"},
		{"flashed and not customized", "# join = \"bc1.…\"\n", nil, "", "# join = \"bc1.…\"\n", "# join = \"bc1.…\"\n", ""},
	} {
		kept := filepath.Join(t.TempDir(), "site.toml")
		if tt.kept == "-" {
			kept = ""
		} else if tt.kept != "" {
			if err := os.WriteFile(kept, []byte(tt.kept), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		use, site, err := choose([]byte(tt.raw), tt.rerr, kept)
		keeps, _ := os.ReadFile(kept)
		if string(use) != tt.use || string(keeps) != tt.keeps || site == nil {
			t.Errorf("%s: choose = %q, site %v, keeps %q, want %q and %q", tt.name, use, site, keeps, tt.use, tt.keeps)
		}
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: choose: error %v, want %q", tt.name, err, tt.want)
		}
		if err != nil && (!utf8.ValidString(err.Error()) || strings.ContainsAny(err.Error(), "\n\x00\x1b")) {
			t.Errorf("%s: %q is not one clean line", tt.name, err)
		}
	}
}

// The list for home holds each line once and does not grow without end.
func TestNote(t *testing.T) {
	b := &boot{}
	for range 3 {
		b.note("bcd", "ended with exit code 2")
	}
	if len(b.problems) != 1 || b.problems[0] != "bcd: ended with exit code 2" {
		t.Errorf("problems = %q", b.problems)
	}
	for i := range 100 {
		b.note("x", strings.Repeat("y", i))
	}
	if len(b.problems) != 64 {
		t.Errorf("%d problems are kept, want 64", len(b.problems))
	}
}
