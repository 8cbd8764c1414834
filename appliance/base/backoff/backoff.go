// Package backoff spaces repeats: exponential with full jitter, and woken early on request.
package backoff

import (
	"context"
	"time"
)

// Policy doubles from Min to Max. Rand returns a number in [0,1); with nil
// there is no jitter, and each wait is the bound itself.
type Policy struct {
	Min, Max time.Duration
	Rand     func() float64
}

// Delay is the wait before repeat n (0 is the first repeat).
func (p Policy) Delay(n int) time.Duration {
	bound := p.Min
	for ; n > 0 && bound < p.Max; n-- {
		bound *= 2
	}
	bound = min(bound, p.Max)
	if p.Rand == nil {
		return bound
	}
	return time.Duration(p.Rand() * float64(bound))
}

// Wait sleeps Delay(n), until ctx ends (its error) or wake fires (nil).
func (p Policy) Wait(ctx context.Context, n int, wake <-chan struct{}) error {
	timer := time.NewTimer(p.Delay(n))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-wake:
		return nil
	case <-timer.C:
		return nil
	}
}
