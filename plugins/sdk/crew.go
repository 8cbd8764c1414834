package sdk

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// idleLimit is how long goroutines wait for another operation.
const idleLimit = 10 * time.Second

// crew are the goroutines that run operations. One that has run an operation
// waits for the next: its stack has grown, which takes longer than a small call.
type crew struct {
	log *slog.Logger
	// running counts operations, also those that a caller gave up on.
	running sync.WaitGroup

	mu   sync.Mutex
	idle []*worker
	// resting is true while a timer is to dismiss the idle.
	resting bool
}

// worker is one goroutine. Whoever takes it gives it back with nothing to do, or
// closes jobs: it then ends with what it runs.
type worker struct {
	jobs chan func() ([]byte, error) // holds one
	done chan outcome                // holds one
}

// outcome is how an operation ended.
type outcome struct {
	result []byte
	err    error
	// left is true if the goroutine ended with it.
	left bool
}

// begin has a worker run f.
func (c *crew) begin(f func() ([]byte, error)) *worker {
	c.running.Add(1)
	var w *worker
	c.mu.Lock()
	if n := len(c.idle); n > 0 {
		w, c.idle[n-1] = c.idle[n-1], nil
		c.idle = c.idle[:n-1]
	}
	c.mu.Unlock()
	if w == nil {
		w = &worker{make(chan func() ([]byte, error), 1), make(chan outcome, 1)}
		// It ends when it is dismissed, at the latest idleLimit after its last use.
		go func() {
			for f := range w.jobs {
				if c.run(w, f) {
					return
				}
			}
		}()
	}
	w.jobs <- f
	return w
}

// run tells whether the goroutine must end with f.
func (c *crew) run(w *worker, f func() ([]byte, error)) (last bool) {
	defer c.running.Done()
	a := outcome{err: errs.New(errs.DriverError, "the operation ended its goroutine"), left: true}
	defer func() {
		if r := recover(); r != nil {
			c.log.Error("operation panicked", "panic", fmt.Sprint(r), "stack", string(debug.Stack()))
			a = outcome{err: errs.New(errs.DriverError, "the operation panicked: %v", r)}
		}
		a.left = a.left || tied()
		last = a.left
		w.done <- a
	}()
	result, err := f()
	a = outcome{result: result, err: err}
	return
}

// tied clears what an operation set on its goroutine, and tells whether it left
// it locked to its thread. Such a thread may be in another namespace, or have
// lost a privilege, and is to end with its goroutine; nothing but the goroutine's
// own stack trace says so.
func tied() bool {
	pprof.SetGoroutineLabels(context.Background())
	var head [64]byte
	line, _, _ := bytes.Cut(head[:runtime.Stack(head[:], false)], []byte("\n"))
	return bytes.Contains(line, []byte("locked to thread"))
}

// end takes back a worker that has answered.
func (c *crew) end(w *worker, a outcome) {
	if a.left {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.idle = append(c.idle, w)
	if !c.resting {
		c.resting = true
		time.AfterFunc(idleLimit, c.dismiss)
	}
}

// dismiss ends the goroutines that have nothing to do.
func (c *crew) dismiss() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, w := range c.idle {
		close(w.jobs)
	}
	c.idle, c.resting = nil, false
}
