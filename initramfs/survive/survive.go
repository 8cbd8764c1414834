// Package survive keeps a panic in one goroutine of PID 1 from ending all of
// it: the kernel does not go on without its first process.
package survive

import (
	"context"
	"fmt"
	"time"
)

// pause is between a panic and the next try.
const pause = time.Second

// Once runs f and turns its panic into an error.
func Once(f func()) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v", r)
		}
	}()
	f()
	return nil
}

// Go runs f on a goroutine of its own until it returns, and again a second
// after each panic, which say hears. After the end of ctx it is not run again.
// The channel is closed when it has ended.
func Go(ctx context.Context, name string, say func(format string, args ...any), f func()) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		Run(ctx, name, say, f)
	}()
	return done
}

// Run is Go on the caller's goroutine.
func Run(ctx context.Context, name string, say func(format string, args ...any), f func()) {
	for {
		err := Once(f)
		if err == nil {
			return
		}
		// Whoever hears it may be what panics.
		_ = Once(func() { say("%s: %v", name, err) })
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
	}
}
