package sdk

import (
	"log/slog"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// An operation that locks its goroutine to a thread, to change that thread for
// itself, takes both along: no other operation ever runs there.
func TestAThreadOfAnOperationsOwnIsNotUsedAgain(t *testing.T) {
	c := crew{log: slog.New(slog.DiscardHandler)}
	run := func(f func()) {
		w := c.begin(func() ([]byte, error) { f(); return nil, nil })
		c.end(w, <-w.done)
	}
	var thread, next int
	run(func() {
		runtime.LockOSThread()
		runtime.LockOSThread()
		thread = unix.Gettid()
	})
	if got := len(c.idle); got != 0 {
		t.Errorf("%d goroutines are idle, want none that is locked to its thread", got)
	}
	run(func() { next = unix.Gettid() })
	if next == thread {
		t.Errorf("the next operation runs on thread %d too", thread)
	}
	run(func() {
		runtime.LockOSThread()
		runtime.UnlockOSThread()
	})
	if got := len(c.idle); got != 1 {
		t.Errorf("%d goroutines are idle, want the one that was let go", got)
	}
	c.dismiss()
	c.running.Wait()
}
