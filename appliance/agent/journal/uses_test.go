package journal_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent/grants"
	"github.com/better-compute/site-appliance/appliance/agent/journal"
	"github.com/better-compute/site-appliance/appliance/agent/reclog"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
)

func useOf(target, grant string, age time.Duration) *grants.Use {
	u := &grants.Use{Age: age, Targets: []string{target}, Grant: grant}
	if grant != "" {
		u.Ends = notAfter.UnixMilli()
	}
	return u
}

func admit(t testing.TB, j *journal.Journal, id string, size int, u *grants.Use) {
	t.Helper()
	must(t, j.Admitted(id, [32]byte{7}, notAfter, &agentv1.SignedCommand{Payload: make([]byte, size)}, u))
}

// counted are the targets that a journal knows: when each was touched without a
// grant, or "grant times" where one of these grants was used for it.
func counted(t testing.TB, j *journal.Journal) map[string]string {
	t.Helper()
	past, err := j.Past(0, notAfter)
	must(t, err)
	out := map[string]string{}
	for target, age := range past.Counted {
		out[target] = age.String()
	}
	for _, grant := range []string{"grant_1", "grant_2"} {
		for _, target := range []string{"bmc:a:1", "bmc:late:1", "bmc:ended:1"} {
			if n := past.Used(grant, target); n > 0 {
				out[target] = fmt.Sprint(grant, " ", n)
			}
		}
	}
	return out
}

// TestUseIsKeptWithItsCommand: it counts from the first record on, whatever
// becomes of the command, and is given back only where nothing ran.
func TestUseIsKeptWithItsCommand(t *testing.T) {
	cancel := func(j *journal.Journal) error { return j.Cancelled("cmd_1", notAfter, result("cmd_1")) }
	start := func(j *journal.Journal) error { return j.Started("cmd_1") }
	done := func(j *journal.Journal) error { return j.Done("cmd_1", result("cmd_1")) }
	ack := func(j *journal.Journal) error { return j.Acked("cmd_1") }
	for name, tt := range map[string]struct {
		steps []func(*journal.Journal) error
		want  bool
	}{
		"received":                 {nil, true},
		"started":                  {[]func(*journal.Journal) error{start}, true},
		"done":                     {[]func(*journal.Journal) error{start, done}, true},
		"acked":                    {[]func(*journal.Journal) error{start, done, ack}, true},
		"cancelled, not started":   {[]func(*journal.Journal) error{cancel}, false},
		"refused, not started":     {[]func(*journal.Journal) error{done}, false},
		"acked, but never started": {[]func(*journal.Journal) error{done, ack}, false},
	} {
		path := filepath.Join(t.TempDir(), "journal")
		j := open(t, path)
		admit(t, j, "cmd_1", 1, useOf("bmc:a:1", "grant_1", time.Hour))
		for _, step := range tt.steps {
			must(t, step(j))
		}
		for round, j := range []*journal.Journal{j, open(t, path)} {
			if u := counted(t, j)["bmc:a:1"]; (u == "grant_1 1") != tt.want {
				t.Errorf("%s, read %d times: used = %q, want it %v", name, round, u, tt.want)
			}
			if u, ok := j.UseOf("cmd_1"); ok != tt.want || ok && (u.Grant != "grant_1" || u.Age != time.Hour || u.Ends != notAfter.UnixMilli()) {
				t.Errorf("%s, read %d times: UseOf = %+v, %v", name, round, u, ok)
			}
		}
	}
}

// TestUsesInTornFiles cuts the file around every record's end and in between: it
// has a command with its use, or neither.
func TestUsesInTornFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := open(t, path)
	for n := range 4 {
		admit(t, j, fmt.Sprintf("cmd_%d", n), 1, useOf(fmt.Sprintf("bmc:%d:1", n), "", time.Duration(n)*time.Minute))
		if n%2 == 0 {
			must(t, j.Started(fmt.Sprintf("cmd_%d", n)))
		}
	}
	whole, err := os.ReadFile(path)
	must(t, err)
	whole = bytes.TrimRight(whole, "\x00")
	cuts := map[int]bool{}
	for at := 0; at <= len(whole); at += 11 {
		cuts[at] = true
	}
	records, _ := reclog.Split(whole)
	end := 0
	for _, r := range records {
		end += len(reclog.Encode(nil, r))
		cuts[end-1], cuts[end], cuts[min(end+1, len(whole))] = true, true, true
	}
	seen := map[int]bool{}
	for cut := range cuts {
		torn := filepath.Join(t.TempDir(), "journal")
		must(t, os.WriteFile(torn, whole[:cut], 0o600))
		j, err := journal.Open(torn)
		must(t, err)
		uses, n := counted(t, j), 0
		for ; ; n++ {
			if _, known := j.Get(fmt.Sprintf("cmd_%d", n)); !known {
				break
			}
			if _, ok := uses[fmt.Sprintf("bmc:%d:1", n)]; !ok {
				t.Fatalf("cut at %d: cmd_%d is there without its use", cut, n)
			}
		}
		if len(uses) != n {
			t.Fatalf("cut at %d: %d commands, %d uses", cut, n, len(uses))
		}
		if want := time.Duration(max(n-1, 0)) * time.Minute; j.Age() != want {
			t.Fatalf("cut at %d: running time %s, want %s", cut, j.Age(), want)
		}
		seen[n] = true
		j.Close()
	}
	if len(seen) != 5 {
		t.Errorf("cuts left %v commands, want 0 to 4", seen)
	}
}

// TestUsesOutliveTheirCommands rewrites the file without the commands.
func TestUsesOutliveTheirCommands(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := open(t, path)
	later := useOf("bmc:late:1", "grant_2", 2*time.Hour)
	later.Ends = notAfter.Add(100 * time.Hour).UnixMilli()
	for id, u := range map[string]*grants.Use{"cmd_1": useOf("bmc:a:1", "", time.Hour), "cmd_2": later, "cmd_3": useOf("bmc:ended:1", "grant_1", time.Hour)} {
		admit(t, j, id, 1<<20, u)
		must(t, j.Started(id))
		must(t, j.Done(id, result(id)))
		must(t, j.Acked(id))
	}
	must(t, j.Compact(notAfter.Add(49*time.Hour)))
	if st, err := os.Stat(path); err != nil || st.Size() > 64<<10 {
		t.Fatalf("the file was not rewritten: %v, %v", st.Size(), err)
	}
	for round, j := range []*journal.Journal{j, open(t, path)} {
		if _, known := j.Get("cmd_1"); known {
			t.Fatal("cmd_1 is still there")
		}
		past, err := j.Past(2*time.Hour, notAfter)
		must(t, err)
		if got := counted(t, j); len(got) != 2 || got["bmc:a:1"] != "1h0m0s" || got["bmc:late:1"] != "grant_2 1" {
			t.Errorf("read %d times: uses = %v, want what stands in a window, and what a grant may still be asked for", round, got)
		}
		// What is forgotten is refused by its end.
		if past.Forgotten != notAfter.UnixMilli() {
			t.Errorf("read %d times: forgotten up to %d, want %d", round, past.Forgotten, notAfter.UnixMilli())
		}
		if j.Age() != 2*time.Hour {
			t.Errorf("read %d times: running time %s, want 2h", round, j.Age())
		}
	}
	// A window's end lets go, on disk too.
	must(t, j.KeepAge(26*time.Hour))
	if uses := counted(t, j); len(uses) != 1 {
		t.Errorf("uses a day later = %v, want the grant's alone", uses)
	}
	if j := open(t, path); j.Age() != 26*time.Hour {
		t.Errorf("running time read again = %s, want 26h", j.Age())
	}
}

// TestRunningTimeIsKeptWhileItMatters: an agent that destroys nothing writes nothing.
func TestRunningTimeIsKeptWhileItMatters(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := open(t, path)
	must(t, j.KeepAge(time.Hour))
	if j.Age() != 0 {
		t.Errorf("running time without uses = %s, want none kept", j.Age())
	}
	admit(t, j, "cmd_1", 1, useOf("bmc:a:1", "", time.Hour))
	must(t, j.KeepAge(2*time.Hour))
	must(t, j.KeepAge(90*time.Minute)) // it never goes back
	if got := open(t, path).Age(); got != 2*time.Hour {
		t.Errorf("running time = %s, want 2h", got)
	}
}

// TestLostMemoryFailsClosed damages the file between its records: for a day of
// running time nothing goes without a grant, and no grant that may have been used
// goes at all; and all of that ends.
func TestLostMemoryFailsClosed(t *testing.T) {
	now := notAfter
	check := func(name string, path string, age time.Duration) {
		t.Helper()
		j := open(t, path)
		past, err := j.Past(age, now)
		must(t, err)
		if past.Lost != age+grants.LongWindow || past.Forgotten != now.Add(grants.MaxLife).UnixMilli() {
			t.Errorf("%s: lost until %s, forgotten up to %d, want %s and %d", name, past.Lost, past.Forgotten, age+grants.LongWindow, now.Add(grants.MaxLife).UnixMilli())
		}
		// It is decided once: a clock that runs on moves it no further, a restart takes nothing back.
		if past, err = j.Past(age, now.Add(time.Hour)); err != nil || past.Forgotten != now.Add(grants.MaxLife).UnixMilli() {
			t.Errorf("%s, asked again: forgotten up to %d, %v", name, past.Forgotten, err)
		}
		j.Close()
		again := open(t, path)
		past, err = again.Past(age, now.Add(time.Hour))
		must(t, err)
		if past.Lost != age+grants.LongWindow || past.Forgotten != now.Add(grants.MaxLife).UnixMilli() {
			t.Errorf("%s, again: %+v", name, past)
		}
	}

	path := filepath.Join(t.TempDir(), "journal")
	j := open(t, path)
	for n := range 6 {
		admit(t, j, fmt.Sprintf("cmd_%d", n), 1, useOf(fmt.Sprintf("bmc:%d:1", n), "", time.Hour))
	}
	j.Close()
	data, err := os.ReadFile(path)
	must(t, err)
	records, _ := reclog.Split(data)
	at := 0
	for _, r := range records[:4] {
		at += len(reclog.Encode(nil, r))
	}
	data[at+20] ^= 1
	must(t, os.WriteFile(path, data, 0o600))
	j = open(t, path)
	if !j.Damaged() || j.Fresh() || len(counted(t, j)) != 3 {
		t.Fatalf("damaged %v, fresh %v, %d uses; want damage and the 3 uses before it", j.Damaged(), j.Fresh(), len(counted(t, j)))
	}
	j.Close()
	check("damaged", path, time.Hour)

	// A journal that is gone, of an agent that had one.
	path = filepath.Join(t.TempDir(), "journal")
	j = open(t, path)
	if !j.Fresh() {
		t.Error("a new journal is not fresh")
	}
	must(t, j.Lost())
	j.Close()
	if j = open(t, path); j.Fresh() {
		t.Error("a journal that was there is fresh")
	}
	j.Close()
	check("gone", path, 0)

	// Rewritten before anybody asked, and after.
	path = filepath.Join(t.TempDir(), "journal")
	j = open(t, path)
	must(t, j.Lost())
	admit(t, j, "cmd_1", 2<<20, nil)
	must(t, j.Started("cmd_1"))
	must(t, j.Done("cmd_1", result("cmd_1")))
	must(t, j.Acked("cmd_1"))
	must(t, j.Compact(notAfter.Add(49*time.Hour)))
	if st, err := os.Stat(path); err != nil || st.Size() > 64<<10 {
		t.Fatalf("the file was not rewritten: %v, %v", st.Size(), err)
	}
	j.Close()
	check("rewritten", path, 0)

	// Lost once more, and rewritten before anybody asked again.
	j = open(t, path)
	must(t, j.Lost())
	must(t, j.Received("cmd_2", [32]byte{7}, notAfter.Add(time.Minute), &agentv1.SignedCommand{Payload: make([]byte, 2<<20)}))
	must(t, j.Started("cmd_2"))
	must(t, j.Done("cmd_2", result("cmd_2")))
	must(t, j.Acked("cmd_2"))
	must(t, j.Compact(notAfter.Add(50*time.Hour)))
	j.Close()
	now = now.Add(30 * time.Minute)
	check("lost again", path, 0)
}

// TestForgottenIDsUseNothingAnew: whoever sets the clock a day ahead has the journal
// forget a command; another by its id must not take the place of what it used.
func TestForgottenIDsUseNothingAnew(t *testing.T) {
	for _, again := range []*grants.Use{nil, useOf("bmc:b:1", "", time.Hour)} {
		path := filepath.Join(t.TempDir(), "journal")
		j := open(t, path)
		admit(t, j, "cmd_1", 1, useOf("bmc:a:1", "", time.Hour))
		must(t, j.Started("cmd_1"))
		must(t, j.Done("cmd_1", result("cmd_1")))
		must(t, j.Acked("cmd_1"))
		must(t, j.Compact(notAfter.Add(49*time.Hour)))
		if _, known := j.Get("cmd_1"); known {
			t.Fatal("cmd_1 is still there")
		}
		later := notAfter.Add(60 * time.Hour)
		if err := j.Admitted("cmd_1", [32]byte{8}, later, &agentv1.SignedCommand{Payload: []byte("x")}, again); err == nil {
			must(t, j.Cancelled("cmd_1", later, result("cmd_1")))
		}
		for round, j := range []*journal.Journal{j, open(t, path)} {
			if got := counted(t, j)["bmc:a:1"]; got != "1h0m0s" {
				t.Errorf("again with %+v, read %d times: %q of what the first command touched, want 1h0m0s", again, round, got)
			}
		}
	}
}

// TestBegunCountsFromItsStart: what a command is judged by when its turn comes takes
// the place of what it was admitted by, on disk too, once.
func TestBegunCountsFromItsStart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := open(t, path)
	admit(t, j, "cmd_1", 1, useOf("bmc:a:1", "", time.Hour))
	admit(t, j, "cmd_2", 1, useOf("bmc:late:1", "grant_1", time.Hour))
	admit(t, j, "cmd_3", 1, useOf("bmc:late:1", "grant_1", time.Hour))
	past, err := j.PastBut("cmd_2", 2*time.Hour, notAfter)
	must(t, err)
	if n := past.Used("grant_1", "bmc:late:1"); n != 1 || len(past.Counted) != 1 {
		t.Errorf("without cmd_2: used %d times, counted %v; want 1, and cmd_1's", n, past.Counted)
	}
	if past, err = j.PastBut("cmd_1", 2*time.Hour, notAfter); err != nil || len(past.Counted) != 0 || past.Used("grant_1", "bmc:late:1") != 2 {
		t.Errorf("without cmd_1: %+v, %v; want cmd_2's and cmd_3's alone", past, err)
	}
	must(t, j.Begun("cmd_1", useOf("bmc:a:1", "", 3*time.Hour)))
	must(t, j.Begun("cmd_2", useOf("bmc:late:1", "grant_1", 3*time.Hour)))
	for round, j := range []*journal.Journal{j, open(t, path)} {
		if got := counted(t, j); got["bmc:a:1"] != "3h0m0s" || got["bmc:late:1"] != "grant_1 2" {
			t.Errorf("read %d times: %v, want 3h and grant_1 twice", round, got)
		}
	}
}

// TestBesideAGrant: what a granted command counts for stays in its window, though
// its grant ended long ago by a clock that was set ahead.
func TestBesideAGrant(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := open(t, path)
	use := useOf("machine:m", "grant_1", time.Hour)
	use.Counted = []string{"config:e"}
	admit(t, j, "cmd_1", 1, use)
	must(t, j.Started("cmd_1"))
	must(t, j.Done("cmd_1", result("cmd_1")))
	must(t, j.Acked("cmd_1"))
	must(t, j.Compact(notAfter.Add(49*time.Hour)))
	for round, j := range []*journal.Journal{j, open(t, path)} {
		if got := counted(t, j)["config:e"]; got != "1h0m0s" {
			t.Errorf("read %d times: config:e counted at %q, want 1h0m0s", round, got)
		}
	}
	must(t, j.KeepAge(26*time.Hour))
	if got := counted(t, j); len(got) != 0 {
		t.Errorf("a day later: %v, want nothing", got)
	}
}
