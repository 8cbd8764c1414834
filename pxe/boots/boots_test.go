package boots

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
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

// TestNobodyWaitsForTheDisk: while a disk is slow, what is known of every machine is said,
// the newest included; and who counts hears nothing before it is on disk.
func TestNobodyWaitsForTheDisk(t *testing.T) {
	dir := t.TempDir()
	s, err := Open(dir, none)
	if err != nil {
		t.Fatal(err)
	}
	writing, write := make(chan struct{}, 16), make(chan struct{})
	s.replace = func(path string, data []byte, mode os.FileMode) error {
		writing <- struct{}{}
		<-write
		return atomicfile.Write(path, data, mode)
	}
	counted := make(chan error, 3)
	for _, machine := range []string{"a", "a", "b"} {
		go func() { counted <- s.Booted(machine, "w1") }()
	}
	<-writing
	asked := make(chan struct{})
	go func() {
		defer close(asked)
		for {
			a, _ := s.Of("a", "w1")
			b, _ := s.Of("b", "w1")
			if a == 2 && b == 1 {
				return
			}
			runtime.Gosched()
		}
	}()
	select {
	case <-asked:
	case <-time.After(30 * time.Second):
		t.Fatal("who asks waits for the disk, or does not hear of what is being written")
	}
	select {
	case err := <-counted:
		t.Fatalf("Booted = %v before anything is on disk", err)
	default:
	}
	close(write)
	for range 3 {
		if err := <-counted; err != nil {
			t.Error(err)
		}
	}
	again, err := Open(dir, none)
	if err != nil || again.Damaged() != nil {
		t.Fatalf("Open = %v, damaged %v", err, again.Damaged())
	}
	for machine, want := range map[string]int{"a": 2, "b": 1} {
		if got, _ := again.Of(machine, "w1"); got != want {
			t.Errorf("on disk %s has booted %d times, want %d", machine, got, want)
		}
	}
}

// TestOneWritesForAll: of many that count at once, one writes for all who come while the
// disk is busy, after an error too; and what a file says already is not written again.
func TestOneWritesForAll(t *testing.T) {
	const posts = 20
	dir := t.TempDir()
	s, err := Open(dir, none)
	if err != nil {
		t.Fatal(err)
	}
	writes, slow, fails, first, write := 0, true, true, make(chan struct{}), make(chan struct{})
	s.replace = func(path string, data []byte, mode os.FileMode) error {
		if writes++; slow {
			slow = false
			close(first)
			<-write
		}
		if fails {
			fails = false
			return errors.New("the disk is full")
		}
		return atomicfile.Write(path, data, mode)
	}
	counted := make(chan error, posts)
	count := func() { counted <- s.Booted("a", "w1") }
	go count()
	<-first
	for range posts - 1 {
		go count()
	}
	for n := 0; n < posts; n, _ = s.Of("a", "w1") {
		runtime.Gosched()
	}
	close(write)
	failed := 0
	for range posts {
		if <-counted != nil {
			failed++
		}
	}
	if failed != 1 || writes != 2 {
		t.Errorf("%d posts make %d writes and %d errors, want the one that fails and one more", posts, writes, failed)
	}
	fails, writes = true, 0
	for i := range 3 {
		if err := s.Done("a", "w1"); (err != nil) != (i == 0) || writes != min(i+1, 2) {
			t.Errorf("Done, the first of which fails: %v at %d, %d writes", err, i+1, writes)
		}
	}
	writes = 0
	for i := range 3 {
		s.Keep(func(string) bool { return false })
		if err := s.Booted("a", "w1"); err != nil || writes != i+1 {
			t.Errorf("forgotten and counted again: %v, %d writes, want %d", err, writes, i+1)
		}
	}
	writes = 0
	for range 2 { // the second time it is read from the disk
		if err := s.Done("a", "w1"); err != nil || writes != 1 {
			t.Errorf("done again: %v, %d writes, want one", err, writes)
		}
		count := s.replace
		if s, err = Open(dir, none); err != nil {
			t.Fatal(err)
		}
		s.replace = count
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

// TestSettle: a damaged count of a window that nobody knows counts for each, until it is
// known which is in force; then for that one alone, and for none where there is none.
func TestSettle(t *testing.T) {
	dir := t.TempDir()
	for _, machine := range []string{"a", "gone"} {
		if err := os.WriteFile(filepath.Join(dir, machine+suffix), []byte("torn"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want := func(when string, s *Store, machine, window string, done bool) {
		t.Helper()
		if _, got := s.Of(machine, window); got != done {
			t.Errorf("%s: %s in %s is done: %v, want %v", when, machine, window, got, done)
		}
	}
	for start := range 2 { // it is known after a restart as well
		s, err := Open(dir, func(string) (string, bool) { return AnyWindow, true })
		if err != nil || (s.Damaged() == nil) != (start > 0) || !s.Any() {
			t.Fatalf("Open = %v, damaged %v, any %v", err, s.Damaged(), s.Any())
		}
		for _, window := range []string{"w1", "w2"} {
			want("before", s, "a", window, true)
			want("before", s, "gone", window, true)
			want("before", s, "another", window, false)
		}
	}
	s, err := Open(dir, none)
	if err != nil {
		t.Fatal(err)
	}
	s.Settle(func(machine string) (string, bool) { return "w1", machine == "a" })
	again, err := Open(dir, none)
	if err != nil || again.Damaged() != nil {
		t.Fatalf("Open = %v, damaged %v", err, again.Damaged())
	}
	for _, s := range []*Store{s, again} {
		want("settled", s, "a", "w1", true)
		want("settled", s, "a", "w2", false)
		want("settled", s, "gone", "w1", false)
	}
	s.Keep(func(string) bool { return false })
	if s.Any() {
		t.Error("there are boots of machines that are forgotten")
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
