package bmclib

import (
	"context"
	"errors"
	"sync"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// maxStuck is how many calls that ran past their end may go on sleeping: each
// holds a goroutine until the provider comes back.
const maxStuck = 16

// crew runs calls, each in its own goroutine.
type crew struct {
	mu    sync.Mutex
	stuck int
}

// do runs f and answers when it does, or when ctx ends. A panic is f's error.
func (c *crew) do(ctx context.Context, f func() error) error {
	c.mu.Lock()
	stuck := c.stuck
	c.mu.Unlock()
	if stuck >= maxStuck {
		return errs.Retry(errs.Unavailable, "%d calls of this plugin did not come back: nothing is asked until some do", stuck)
	}
	done := make(chan error, 1)
	go func() {
		err := error(errs.New(errs.BmcError, "bmclib ended the call's goroutine"))
		defer func() {
			if r := recover(); r != nil {
				err = errs.New(errs.BmcError, "bmclib failed on what the BMC says: %v", r)
			}
			done <- err
		}()
		err = f()
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	c.count(1)
	go func() {
		<-done
		c.count(-1)
	}()
	var own *errs.Error
	if cause := context.Cause(ctx); errors.As(cause, &own) {
		return own
	}
	return ctx.Err()
}

func (c *crew) count(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stuck += n
}
