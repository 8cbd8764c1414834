package process

import (
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"github.com/better-compute/site-appliance/plugins/instance"
)

// An instance may make groups inside its own, and they must not outlive it.
func TestAnInstancesOwnGroupsEndWithIt(t *testing.T) {
	o := options(t, true)
	r := o.open(t)
	if err := r.Apply(t.Context(), spec(t, "i-1", 1, Config{Argv: []string{self(t), "instance", "sleep"}})); err != nil {
		t.Fatal(err)
	}
	p, err := r.find("i-1", false)
	if err != nil {
		t.Fatal(err)
	}
	group := p.record().Run.Cgroup
	inner := filepath.Join(group, "a", "b")
	if err := os.MkdirAll(inner, 0o755); err != nil {
		t.Fatal(err)
	}
	was := pid(r, "i-1")
	if err := control(inner, "cgroup.procs", strconv.Itoa(was)); err != nil {
		t.Fatal(err)
	}
	if err := r.Remove(t.Context(), "i-1"); err != nil || alive(was) {
		t.Errorf("Remove() = %v, alive %v", err, alive(was))
	}
	if _, err := os.Stat(group); !os.IsNotExist(err) {
		t.Errorf("the group is left: %v", err)
	}
	// So with what an agent that was killed left behind.
	left := filepath.Join(o.Cgroup, "i-2.0123456789abcdef", "x")
	if err := os.MkdirAll(left, 0o755); err != nil {
		t.Fatal(err)
	}
	r.Close()
	o.open(t)
	if _, err := os.Stat(filepath.Dir(left)); !os.IsNotExist(err) {
		t.Errorf("an empty group with groups in it is left: %v", err)
	}
}

// A run whose record was lost is the older generation, which an apply replaces.
func TestApplyReplacesAGroupWithoutARecord(t *testing.T) {
	o := options(t, true)
	r := o.open(t)
	s := spec(t, "i-1", 1, Config{Argv: []string{self(t), "instance", "sleep"}})
	if err := r.Apply(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	was := pid(r, "i-1")
	r.Close()
	if err := os.WriteFile(filepath.Join(o.Dir, "i-1.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	r = o.open(t)
	if err := r.Apply(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if now := pid(r, "i-1"); now == was || !alive(now) {
		t.Errorf("runs as %d (was %d), alive %v", now, was, alive(now))
	}
	if alive(was) {
		t.Error("the instance runs twice")
	}
	if got := r.groups(); len(got) != 1 {
		t.Errorf("groups = %v, want one", got)
	}
	if err := r.Remove(t.Context(), "i-1"); err != nil {
		t.Error(err)
	}
}

// Whatever the order of calls, what runs is known, and runs once.
func TestApplyAndRemoveAtOnce(t *testing.T) {
	both(t, func(t *testing.T, o Options) {
		r := o.open(t)
		c := Config{Argv: []string{self(t), "instance", "sleep"}}
		for n := range 10 {
			s := spec(t, "i-1", uint64(n+1), c)
			if err := r.Apply(t.Context(), s); err != nil {
				t.Fatal(err)
			}
			first, err := r.find("i-1", false)
			if err != nil || first == nil {
				t.Fatal(err)
			}
			var wg sync.WaitGroup
			first.work.Lock() // both wait for the same one
			wg.Go(func() {
				if err := r.Remove(t.Context(), "i-1"); err != nil {
					t.Error(err)
				}
			})
			wg.Go(func() {
				if err := r.Apply(t.Context(), s); err != nil {
					t.Error(err)
				}
			})
			first.work.Unlock()
			wg.Wait()
			at := first.record().Run
			p, err := r.find("i-1", false)
			if err != nil {
				t.Fatal(err)
			}
			if p != first && at != nil && alive(at.PID) {
				t.Fatalf("%d: process %d runs, and the runtime does not know of it", n, at.PID)
			}
			if err := r.Remove(t.Context(), "i-1"); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// What could not be started at all leaves nothing, for nobody will remove it.
func TestAFailedStartLeavesNothing(t *testing.T) {
	o := options(t, false)
	o.Gate = []string{filepath.Join(t.TempDir(), "no-such-gate")}
	r := o.open(t)
	if err := r.Apply(t.Context(), spec(t, "i-1", 1, Config{Argv: []string{self(t), "instance", "sleep"}})); err == nil {
		t.Fatal("Apply() without a gate has no error")
	}
	if p, err := r.find("i-1", false); p != nil || err != nil {
		t.Errorf("find() = %v, %v, want nothing", p, err)
	}
	if files, err := os.ReadDir(o.Dir); err != nil || len(files) != 0 {
		t.Errorf("files = %v, %v, want none", files, err)
	}
	if got := state(t, r, "i-1"); got != (instance.Status{}) {
		t.Errorf("List() = %+v, want nothing", got)
	}
}
