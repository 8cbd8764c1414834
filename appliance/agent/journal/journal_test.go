package journal_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/journal"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

var notAfter = time.UnixMilli(1_800_000_000_000)

func open(t testing.TB, path string) *journal.Journal {
	t.Helper()
	j, err := journal.Open(path)
	if err != nil {
		t.Fatalf("Open = %v, want nil", err)
	}
	t.Cleanup(func() { j.Close() })
	return j
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func result(id string) *agentv1.CommandResult {
	return &agentv1.CommandResult{CommandId: id, Outcome: &agentv1.CommandResult_Result{Result: []byte("r")}}
}

// steps are one command's life; each is on disk before the next begins.
func steps(j *journal.Journal, id string) []func() error {
	return []func() error{
		func() error {
			return j.Received(id, [32]byte{7}, notAfter, &agentv1.SignedCommand{Payload: []byte("p"), KeyId: "k"})
		},
		func() error { return j.Started(id) },
		func() error { return j.Done(id, result(id)) },
		func() error { return j.Acked(id) },
	}
}

var states = []journal.State{"", journal.Received, journal.Started, journal.Done, journal.Acked}

// TestReopenAfterEachState stops after every step, without closing, and reads
// the file as the next process would.
func TestReopenAfterEachState(t *testing.T) {
	for n := range 5 {
		path := filepath.Join(t.TempDir(), "journal")
		j := open(t, path)
		for _, step := range steps(j, "cmd_1")[:n] {
			must(t, step())
		}
		again := open(t, path)
		if again.Epoch() != j.Epoch() || again.Damaged() {
			t.Errorf("after %d steps: epoch %s (damaged %v), want %s", n, again.Epoch(), again.Damaged(), j.Epoch())
		}
		e, ok := again.Get("cmd_1")
		if e.State != states[n] || ok != (n > 0) {
			t.Errorf("after %d steps: state %q, want %q", n, e.State, states[n])
		}
		if n > 0 && (e.Digest != [32]byte{7} || !e.NotAfter.Equal(notAfter)) {
			t.Errorf("after %d steps: entry %+v lost digest or not_after", n, e)
		}
		if want := n == 1 || n == 2; (e.Command != nil) != want {
			t.Errorf("after %d steps: command kept %v, want %v", n, e.Command != nil, want)
		}
		if want := n == 3; (e.Result != nil) != want || (want && !proto.Equal(e.Result, result("cmd_1"))) {
			t.Errorf("after %d steps: result %v, want kept %v", n, e.Result, want)
		}
		if got, want := len(again.Open()), min(n, 1)*(1-n/4); got != want {
			t.Errorf("after %d steps: %d open, want %d", n, got, want)
		}
		// The life goes on where it stopped.
		for _, step := range steps(again, "cmd_1")[n:] {
			must(t, step())
		}
	}
}

// TestTornAtEveryByte cuts the file everywhere: the state is the one of the
// last whole record, never a guess, and the epoch is new only when its record
// is gone.
func TestTornAtEveryByte(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "journal")
	j := open(t, path)
	size := func() int {
		info, err := os.Stat(path)
		must(t, err)
		return int(info.Size())
	}
	ends := []int{size()}
	for _, step := range steps(j, "cmd_1") {
		must(t, step())
		ends = append(ends, size())
	}
	data, err := os.ReadFile(path)
	must(t, err)
	for cut := range len(data) + 1 {
		torn := filepath.Join(dir, "torn")
		must(t, os.WriteFile(torn, data[:cut], 0o600))
		got := open(t, torn)
		if (got.Epoch() == j.Epoch()) != (cut >= ends[0]) {
			t.Errorf("cut at %d: epoch %s, file's was %s", cut, got.Epoch(), j.Epoch())
		}
		n := 0
		for n < 4 && cut >= ends[n+1] {
			n++
		}
		if e, _ := got.Get("cmd_1"); e.State != states[n] {
			t.Errorf("cut at %d: state %q, want %q", cut, e.State, states[n])
		}
	}
}

func TestDamageChangesTheEpoch(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := open(t, path)
	must(t, steps(j, "cmd_1")[0]())
	data, err := os.ReadFile(path)
	must(t, err)
	first := len(data)
	must(t, j.Started("cmd_1"))
	must(t, steps(j, "cmd_2")[0]())
	data, err = os.ReadFile(path)
	must(t, err)
	data[first+12] ^= 1
	must(t, os.WriteFile(path, data, 0o600))

	again := open(t, path)
	if !again.Damaged() || again.Epoch() == j.Epoch() {
		t.Errorf("Open(damaged): damaged %v, epoch kept %v; want a new epoch", again.Damaged(), again.Epoch() == j.Epoch())
	}
	if e, _ := again.Get("cmd_1"); e.State != journal.Started {
		t.Errorf("Open(damaged): cmd_1 is %q, want started: its start may be what was lost", e.State)
	}
	if aside, err := os.ReadFile(path + ".damaged"); err != nil || !bytes.Equal(aside, data) {
		t.Errorf("damaged file set aside: %v", err)
	}
	third := open(t, path)
	if third.Damaged() || third.Epoch() != again.Epoch() {
		t.Errorf("Open after salvage: damaged %v, epoch %s, want %s", third.Damaged(), third.Epoch(), again.Epoch())
	}
	if e, _ := third.Get("cmd_1"); e.State != journal.Started {
		t.Errorf("Open after salvage: cmd_1 is %q, want started", e.State)
	}
}

func TestTransitions(t *testing.T) {
	j := open(t, "")
	if j.Durable() {
		t.Error("Durable() in memory = true, want false")
	}
	if err := j.Started("cmd_1"); err == nil {
		t.Error("Started(unknown) = nil, want an error")
	}
	must(t, j.Received("cmd_1", [32]byte{1}, notAfter, nil))
	if err := j.Received("cmd_1", [32]byte{1}, notAfter, nil); err == nil {
		t.Error("Received twice = nil, want an error")
	}
	if err := j.Acked("cmd_1"); err == nil {
		t.Error("Acked(received) = nil, want an error")
	}
	must(t, j.Started("cmd_1"))
	if err := j.Cancelled("cmd_1", notAfter, result("cmd_1")); err == nil {
		t.Error("Cancelled(started) = nil, want an error: effects may have happened")
	}
	must(t, j.Done("cmd_1", result("cmd_1")))
	if err := j.Done("cmd_1", result("cmd_1")); err == nil {
		t.Error("Done twice = nil, want an error: one result each")
	}
	must(t, j.Acked("cmd_1"))
	must(t, j.Acked("cmd_1"))

	must(t, j.Received("cmd_2", [32]byte{1}, notAfter, nil))
	must(t, j.Cancelled("cmd_2", notAfter, result("cmd_2")))
	if err := j.Started("cmd_2"); err == nil {
		t.Error("Started(cancelled) = nil, want an error")
	}
}

func TestCancelFirst(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	must(t, open(t, path).Cancelled("cmd_1", notAfter, result("cmd_1")))
	j := open(t, path)
	if e, ok := j.Get("cmd_1"); !ok || e.State != journal.Cancelled || e.Result == nil {
		t.Errorf("Get(cancelled before it came) = %+v, want cancelled with a result", e)
	}
}

func TestCompact(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := open(t, path)
	big := &agentv1.CommandResult{Outcome: &agentv1.CommandResult_Result{Result: make([]byte, 300<<10)}}
	for i := range 5 {
		id := fmt.Sprintf("cmd_%d", i)
		must(t, j.Received(id, [32]byte{byte(i)}, notAfter.Add(time.Duration(i)*time.Hour), nil))
		must(t, j.Done(id, big))
		must(t, j.Acked(id))
	}
	must(t, j.Received("cmd_open", [32]byte{9}, notAfter, &agentv1.SignedCommand{Payload: []byte("p")}))
	must(t, j.Compact(notAfter.Add(26*time.Hour+time.Minute)))
	if info, err := os.Stat(path); err != nil || info.Size() > 10<<10 {
		t.Errorf("after Compact: %d bytes (%v), want a small file", info.Size(), err)
	}
	must(t, j.Started("cmd_open"))
	for _, j := range []*journal.Journal{j, open(t, path)} {
		for id, want := range map[string]journal.State{"cmd_0": "", "cmd_2": "", "cmd_3": journal.Acked, "cmd_open": journal.Started} {
			if e, _ := j.Get(id); e.State != want {
				t.Errorf("after Compact: %s is %q, want %q", id, e.State, want)
			}
		}
		if e, _ := j.Get("cmd_3"); e.Digest != [32]byte{3} {
			t.Errorf("after Compact: tombstone's digest = %x, want kept", e.Digest)
		}
	}
}

// TestForgottenIsNotReceivedAgain offers a command again whose tombstone is
// gone, as a gateway could that sets the box's clock ahead and then back.
func TestForgottenIsNotReceivedAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := open(t, path)
	for _, step := range steps(j, "cmd_1") {
		must(t, step())
	}
	must(t, j.Compact(notAfter.Add(25*time.Hour)))
	if _, ok := j.Get("cmd_1"); ok {
		t.Fatal("the tombstone is still there")
	}
	reopened := open(t, path)
	if e, ok := reopened.Get("cmd_1"); ok && e.State != journal.Acked {
		t.Errorf("reopened, cmd_1 is %s", e.State)
	}
	must(t, reopened.Compact(notAfter.Add(25*time.Hour)))
	for name, j := range map[string]*journal.Journal{"this process": j, "the next": reopened} {
		if err := steps(j, "cmd_1")[0](); errs.CodeOf(err) != errs.Expired {
			t.Errorf("%s: Received(forgotten) = %v, want expired", name, err)
		}
		if err := j.Received("cmd_2", [32]byte{8}, notAfter.Add(time.Second), &agentv1.SignedCommand{}); err != nil {
			t.Errorf("%s: Received(a later one) = %v, want nil", name, err)
		}
	}
}

func FuzzOpen(f *testing.F) {
	path := filepath.Join(f.TempDir(), "journal")
	j := open(f, path)
	for _, step := range steps(j, "cmd_1") {
		must(f, step())
	}
	data, err := os.ReadFile(path)
	must(f, err)
	f.Add(data)
	f.Fuzz(func(t *testing.T, data []byte) {
		path := filepath.Join(t.TempDir(), "journal")
		must(t, os.WriteFile(path, data, 0o600))
		if j, err := journal.Open(path); err == nil {
			j.Open()
			j.Close()
		}
	})
}
