package boots

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

func none(string) (string, bool) { return "", false }

func TestStore(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "boots")
	s, err := Open(dir, none)
	if err != nil {
		t.Fatal(err)
	}
	want := func(what, machine, window string, boots int, done bool) {
		t.Helper()
		again, err := Open(dir, none)
		if err != nil || again.Damaged() != nil {
			t.Fatalf("%s: Open = %v, damaged %v", what, err, again.Damaged())
		}
		for where, s := range map[string]*Store{"in memory": s, "on disk": again} {
			if b, d := s.Of(machine, window); b != boots || d != done {
				t.Errorf("%s, %s: Of(%s, %s) = %d, %v, want %d, %v", what, where, machine, window, b, d, boots, done)
			}
		}
		if s.Token(machine, window) != again.Token(machine, window) {
			t.Errorf("%s: the token does not outlive a restart", what)
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	want("new", "a", "w1", 0, false)
	must(s.Booted("a", "w1"))
	must(s.Booted("a", "w1"))
	want("booted twice", "a", "w1", 2, false)
	want("another machine", "b", "w1", 0, false)
	must(s.Done("a", "w1"))
	want("done", "a", "w1", 2, true)
	want("the next window", "a", "w2", 0, false)
	must(s.Booted("a", "w2"))
	want("booted in the next", "a", "w2", 1, false)
	s.Keep(func(m string) bool { return m != "a" })
	want("forgotten", "a", "w2", 0, false)
	for _, bad := range []string{"", "../x", "a b"} {
		if s.Booted(bad, "w1") == nil || s.Booted("a", bad) == nil {
			t.Errorf("Booted of %q = nil, want an error", bad)
		}
	}
}

// TestStrangersGiveWay: made-up machines take no enrolled one's place, whose count ends
// its boot loop.
func TestStrangersGiveWay(t *testing.T) {
	s, err := Open(t.TempDir(), none)
	if err != nil {
		t.Fatal(err)
	}
	for i := range most {
		s.machines[fmt.Sprintf("mac-%012x", i)] = State{Window: "u", Boots: 1}
	}
	if err := s.Booted("mac-ffffffffffff", "u"); err == nil {
		t.Error("one stranger more than are kept = nil, want an error")
	}
	if err := s.Booted("node_1", "w"); err != nil {
		t.Errorf("an enrolled machine among too many strangers: %v", err)
	}
	if boots, _ := s.Of("node_1", "w"); boots != 1 || len(s.machines) != most {
		t.Errorf("%d boots and %d machines, want 1 and %d", boots, len(s.machines), most)
	}
}

func TestToken(t *testing.T) {
	s, err := Open(t.TempDir(), none)
	if err != nil {
		t.Fatal(err)
	}
	token := s.Token("a", "w1")
	for _, tt := range []struct {
		token, machine, window string
		want                   bool
	}{{token, "a", "w1", true}, {token, "b", "w1", false}, {token, "a", "w2", false}, {"", "a", "w1", false}, {token + "x", "a", "w1", false}} {
		if got := s.Holds(tt.token, tt.machine, tt.window); got != tt.want {
			t.Errorf("Holds(%q, %s, %s) = %v, want %v", tt.token, tt.machine, tt.window, got, tt.want)
		}
	}
}

// TestDamaged: what was lost counts as done, and no more than that.
func TestDamaged(t *testing.T) {
	for name, damage := range map[string]func([]byte) []byte{
		"torn": func(b []byte) []byte { return b[:len(b)/2] }, "empty": func([]byte) []byte { return nil },
		"another count": func(b []byte) []byte { b[3] = '0'; return b }, "large": func([]byte) []byte { return make([]byte, maxBytes+1) },
	} {
		dir := t.TempDir()
		s, err := Open(dir, none)
		if err != nil {
			t.Fatal(err)
		}
		for _, machine := range []string{"a", "b", "gone"} {
			if err := s.Booted(machine, "w1"); err != nil {
				t.Fatal(err)
			}
		}
		for _, machine := range []string{"a", "gone"} {
			path := filepath.Join(dir, machine+suffix)
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, damage(data), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		s, err = Open(dir, func(m string) (string, bool) { return "w1", m != "gone" })
		if err != nil || s.Damaged() == nil {
			t.Fatalf("%s: Open = %v, damaged %v, want a reason", name, err, s.Damaged())
		}
		again, err := Open(dir, none)
		if err != nil || again.Damaged() != nil {
			t.Fatalf("%s: Open again = %v, damaged %v, want it mended", name, err, again.Damaged())
		}
		for _, s := range []*Store{s, again} {
			if _, done := s.Of("a", "w1"); !done {
				t.Errorf("%s: the window of then is not done", name)
			}
			if boots, done := s.Of("a", "w2"); done || boots != 0 {
				t.Errorf("%s: a new window is not new", name)
			}
			if boots, done := s.Of("b", "w1"); done || boots != 1 {
				t.Errorf("%s: another machine's = %d, %v, want 1, false", name, boots, done)
			}
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("w1 1 true \n")
	f.Fuzz(func(t *testing.T, text string) {
		if st, err := parse(text); err == nil && (!validID(st.Window) || st.Boots < 0) {
			t.Errorf("parse(%q) = %+v", text, st)
		}
	})
}
