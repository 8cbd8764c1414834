package dispatch_test

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent/agenttest"
	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// stage runs commands whose args hold p (gives up its place and waits), w (waits)
// or u (finds nobody, after 20 s).
type stage struct {
	mu    sync.Mutex
	order []string
	now   int
	most  int
	leave chan struct{}
}

func (s *stage) run(ctx context.Context, c dispatch.Call) ([]byte, error) {
	_, flags, _ := strings.Cut(c.Operation.Value.(string), " ")
	s.mu.Lock()
	s.order = append(s.order, c.Payload.GetCommandId())
	s.now++
	s.most = max(s.most, s.now)
	s.mu.Unlock()
	defer func() { s.mu.Lock(); s.now--; s.mu.Unlock() }()
	if strings.Contains(flags, "p") {
		c.Release()
		c.Release()
	}
	if strings.Contains(flags, "u") {
		time.Sleep(20 * time.Second)
		return nil, errs.Retry(errs.Unreachable, "no answer")
	}
	if strings.Contains(flags, "x") {
		return nil, ofPlugin{errs.Retry(errs.Unreachable, "plugin ipmi ended during the call")}
	}
	if strings.ContainsAny(flags, "pw") {
		select {
		case <-s.leave:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return []byte("done"), nil
}

// ofPlugin is the error of a plugin that ended, wherever it came through.
type ofPlugin struct{ error }

func (ofPlugin) OfPlugin()       {}
func (o ofPlugin) Unwrap() error { return o.error }

func (s *stage) ran(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(s.order, id)
}

// TestRelease: a command that gives up its place goes on, while its target's next
// command and its lane's others run; it can be cancelled, and has its one result.
func TestRelease(t *testing.T) {
	authority := agenttest.NewAuthority(t)
	synctest.Test(t, func(t *testing.T) {
		s := &stage{leave: make(chan struct{})}
		b := start(t, authority, "", kind(s.run), func(c *dispatch.Config) { c.Lanes = map[string]int{"power": 1} })
		defer b.stop()
		b.offer("cmd_person", "k p")
		b.offer("cmd_cancelled", "k p")
		b.offer("cmd_next", "k")
		b.offer("cmd_other", "other")
		b.want("cmd_next", "ok done")
		b.want("cmd_other", "ok done")
		b.want("cmd_person", "none")
		order := slices.DeleteFunc(slices.Clone(s.order), func(id string) bool { return id == "cmd_other" })
		if got := strings.Join(order, " "); got != "cmd_person cmd_cancelled cmd_next" {
			t.Errorf("order = %s, want first in, first out", got)
		}
		b.Cancel("cmd_cancelled")
		b.want("cmd_cancelled", "cancelled")
		b.want("cmd_person", "none")
		// One that keeps its place still holds the lane's only slot.
		b.offer("cmd_holds", "h w")
		synctest.Wait()
		b.offer("cmd_waits", "i")
		b.want("cmd_waits", "none")
		close(s.leave)
		b.want("cmd_person", "ok done")
		b.want("cmd_waits", "ok done")
		if s.most > 4 {
			t.Errorf("%d ran together", s.most)
		}
	})
}

// TestReleaseAndRestart: one that gave up its place was begun: what became of it is
// found out before anything new runs at its target.
func TestReleaseAndRestart(t *testing.T) {
	authority := agenttest.NewAuthority(t)
	path := filepath.Join(t.TempDir(), "journal")
	synctest.Test(t, func(t *testing.T) {
		s := &stage{leave: make(chan struct{})}
		b := start(t, authority, path, kind(s.run))
		b.offer("cmd_person", "k p")
		b.offer("cmd_next", "k w")
		synctest.Wait()
		b.stop()
		b.want("cmd_person", "none")
		again := &stage{leave: make(chan struct{})}
		close(again.leave)
		var looked []string
		k := kind(again.run)
		k.Recover = func(_ context.Context, c dispatch.Call) dispatch.Verdict {
			looked = append(looked, c.Payload.GetCommandId())
			return dispatch.Interrupted()
		}
		b = start(t, authority, path, k)
		defer b.stop()
		b.offer("cmd_new", "k")
		b.want("cmd_person", "interrupted")
		b.want("cmd_next", "interrupted")
		b.want("cmd_new", "ok done")
		if got := strings.Join(looked, " "); got != "cmd_person cmd_next" {
			t.Errorf("looked back at %s, want both in their order", got)
		}
	})
}

// TestReleaseIsBounded: very many commands without a place would be no bound at
// all: from then on each keeps its own.
func TestReleaseIsBounded(t *testing.T) {
	const most = 256
	authority := agenttest.NewAuthority(t)
	synctest.Test(t, func(t *testing.T) {
		s := &stage{leave: make(chan struct{})}
		b := start(t, authority, "", kind(s.run), func(c *dispatch.Config) { c.Lanes = map[string]int{"power": 2} })
		defer b.stop()
		for n := range most + 4 {
			b.offer(fmt.Sprintf("cmd_%d", n), fmt.Sprintf("key%d p", n))
			synctest.Wait()
		}
		if s.now != most+2 {
			t.Errorf("%d run, want %d without a place and the lane's 2", s.now, most)
		}
		b.pull()
		if got := b.credits["power"]; got != most+2 {
			t.Errorf("credits = %d, want %d", got, most+2)
		}
		close(s.leave)
		b.want("cmd_1", "ok done")
		time.Sleep(time.Second)
		b.pull()
		if got := b.credits["power"]; got != 2 {
			t.Errorf("credits = %d after all ended, want the lane's 2", got)
		}
	})
}

// TestCredits: what waits behind others of its own target takes no slot of the
// lane, and the gateway may send as many more.
func TestCredits(t *testing.T) {
	authority := agenttest.NewAuthority(t)
	synctest.Test(t, func(t *testing.T) {
		s := &stage{leave: make(chan struct{})}
		b := start(t, authority, "", kind(s.run), func(c *dispatch.Config) { c.Lanes = map[string]int{"power": 4} })
		defer b.stop()
		credit := func(want uint32) {
			t.Helper()
			synctest.Wait()
			b.pull()
			if got := b.credits["power"]; got != want {
				t.Errorf("credits = %d, want %d", got, want)
			}
		}
		credit(4)
		for n := range 5 {
			b.offer(fmt.Sprintf("cmd_%d", n), "k w")
		}
		credit(8)
		b.Cancel("cmd_4")
		credit(7)
		b.offer("cmd_other", "other w")
		credit(7)
		if _, lanes := b.Begin(); lanes["power"] != 7 {
			t.Errorf("a new session is told %d credits, want 7", lanes["power"])
		}
		close(s.leave)
		b.want("cmd_3", "ok done")
		credit(4)
	})
}

// TestShrinkingCredits: what was sent while the gateway knew of more credits is
// taken, though all of it wants a slot by then.
func TestShrinkingCredits(t *testing.T) {
	authority := agenttest.NewAuthority(t)
	synctest.Test(t, func(t *testing.T) {
		s, door := &stage{leave: make(chan struct{})}, make(chan struct{})
		k := kind(s.run)
		k.Ready = func(context.Context, dispatch.Operation) error {
			<-door
			return nil
		}
		b := start(t, authority, "", k, func(c *dispatch.Config) { c.Lanes = map[string]int{"power": 2} })
		defer b.stop()
		sent := 0
		for sent < 40 {
			synctest.Wait()
			b.pull()
			if credits := int(b.credits["power"]); credits <= sent {
				t.Fatalf("%d credits for %d commands that wait for nobody's slot", credits, sent)
			}
			b.offer(fmt.Sprintf("cmd_%d", sent), fmt.Sprintf("key%d w", sent))
			sent++
		}
		synctest.Wait()
		b.pull()
		close(door)
		synctest.Wait()
		// These were on their way.
		for range 2 {
			b.offer(fmt.Sprintf("cmd_%d", sent), fmt.Sprintf("key%d w", sent))
			sent++
		}
		close(s.leave)
		for n := range sent {
			b.want(fmt.Sprintf("cmd_%d", n), "ok done")
		}
		if s.most > 2 {
			t.Errorf("%d ran together, want the lane's 2", s.most)
		}
	})
}

// TestReady: what is not worth while to begin ends before it takes a slot, and is
// not asked for when a restart interrupted it.
func TestReady(t *testing.T) {
	authority := agenttest.NewAuthority(t)
	synctest.Test(t, func(t *testing.T) {
		s := &stage{leave: make(chan struct{})}
		k := kind(s.run)
		k.Ready = func(ctx context.Context, op dispatch.Operation) error {
			if strings.HasPrefix(op.Key, "dead") {
				time.Sleep(5 * time.Second)
				return errs.Retry(errs.Unreachable, "accepts no connection")
			}
			return nil
		}
		b := start(t, authority, "", k, func(c *dispatch.Config) { c.Lanes = map[string]int{"power": 1} })
		defer b.stop()
		began := time.Now()
		b.offer("cmd_dead", "dead r")
		b.offer("cmd_live", "live")
		b.want("cmd_live", "ok done")
		if took := time.Since(began); took > time.Second {
			t.Errorf("the live target waited %s behind the dead one", took)
		}
		time.Sleep(6 * time.Second)
		b.want("cmd_dead", "unreachable (retryable)")
		b.offer("cmd_gone", "dead2")
		synctest.Wait()
		b.Cancel("cmd_gone")
		b.want("cmd_gone", "cancelled")
		if s.ran("cmd_dead") || s.ran("cmd_gone") {
			t.Errorf("ran: %v", s.order)
		}
	})
}

// TestSilentTargetsHoldHalfALane: of targets that did not answer the last time at
// most half the lane runs, so that those that do answer find a slot.
func TestSilentTargetsHoldHalfALane(t *testing.T) {
	authority := agenttest.NewAuthority(t)
	synctest.Test(t, func(t *testing.T) {
		s := &stage{leave: make(chan struct{})}
		b := start(t, authority, "", kind(s.run), func(c *dispatch.Config) { c.Lanes = map[string]int{"power": 4} })
		defer b.stop()
		for n := range 4 {
			b.offer(fmt.Sprintf("cmd_first_%d", n), fmt.Sprintf("dead%d u", n))
		}
		time.Sleep(21 * time.Second)
		b.want("cmd_first_3", "unreachable")
		for n := range 4 {
			b.offer(fmt.Sprintf("cmd_again_%d", n), fmt.Sprintf("dead%d u", n))
		}
		synctest.Wait()
		if s.now != 2 {
			t.Errorf("%d silent targets are asked together, want half of 4", s.now)
		}
		began := time.Now()
		for n := range 4 {
			b.offer(fmt.Sprintf("cmd_live_%d", n), fmt.Sprintf("live%d", n))
		}
		b.want("cmd_live_3", "ok done")
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("live targets waited %s behind dead ones", took)
		}
		time.Sleep(41 * time.Second)
		b.want("cmd_again_3", "unreachable")
		// One that answers again is like any other.
		b.offer("cmd_back", "dead0")
		b.want("cmd_back", "ok done")
		for n := range 4 {
			b.offer(fmt.Sprintf("cmd_wait_%d", n), fmt.Sprintf("dead%d w", n))
		}
		synctest.Wait()
		if s.now != 3 {
			t.Errorf("%d run, want the target that answered and half the lane of the others", s.now)
		}
		close(s.leave)
		b.want("cmd_wait_3", "ok done")
	})
}

// TestPluginThatEndsSaysNothingOfTargets: the targets of a plugin that ended are
// neither silent, nor do those that were silent count as heard.
func TestPluginThatEndsSaysNothingOfTargets(t *testing.T) {
	authority := agenttest.NewAuthority(t)
	synctest.Test(t, func(t *testing.T) {
		s := &stage{leave: make(chan struct{})}
		b := start(t, authority, "", kind(s.run), func(c *dispatch.Config) { c.Lanes = map[string]int{"power": 4} })
		defer b.stop()
		for n := range 4 {
			b.offer(fmt.Sprintf("cmd_crash_%d", n), fmt.Sprintf("host%d x", n))
			b.want(fmt.Sprintf("cmd_crash_%d", n), "unreachable")
		}
		for n := range 4 {
			b.offer(fmt.Sprintf("cmd_wait_%d", n), fmt.Sprintf("host%d w", n))
		}
		synctest.Wait()
		if s.now != 4 {
			t.Errorf("%d of the crashed plugin's targets run together, want the lane's 4", s.now)
		}
		close(s.leave)
		for n := range 4 {
			b.want(fmt.Sprintf("cmd_wait_%d", n), "ok done")
			b.offer(fmt.Sprintf("cmd_dead_%d", n), fmt.Sprintf("host%d u", n))
		}
		time.Sleep(21 * time.Second)
		for n := range 4 {
			b.want(fmt.Sprintf("cmd_dead_%d", n), "unreachable")
			b.offer(fmt.Sprintf("cmd_crashed_%d", n), fmt.Sprintf("host%d x", n))
			b.want(fmt.Sprintf("cmd_crashed_%d", n), "unreachable")
		}
		s.leave = make(chan struct{})
		for n := range 4 {
			b.offer(fmt.Sprintf("cmd_later_%d", n), fmt.Sprintf("host%d w", n))
		}
		synctest.Wait()
		if s.now != 2 {
			t.Errorf("%d silent targets run together after a crash, want half of 4", s.now)
		}
		close(s.leave)
		for n := range 4 {
			b.want(fmt.Sprintf("cmd_later_%d", n), "ok done")
		}
	})
}
