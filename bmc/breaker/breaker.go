// Package breaker decides whether a BMC that did not answer is asked again, so
// that a dead one costs its callers nothing but the first few waits.
package breaker

import (
	"errors"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

const (
	// threshold is how many calls in a row must find nobody.
	threshold = 3
	// The circuit stays open for minOpen, twice as long after each trial that
	// found nobody, and at most for maxOpen.
	minOpen = 30 * time.Second
	maxOpen = 5 * time.Minute
	// trialLimit is how long others wait for a trial's end: a call that goes on for
	// longer, such as an update or a console, has found somebody.
	trialLimit = 30 * time.Second
)

// circuit is what is known of one BMC. The zero value is closed.
type circuit struct {
	// Silent counts the calls in a row that found nobody.
	Silent int
	// Open is how long the circuit stays open, from then until Until; zero: closed.
	Open  time.Duration
	Until time.Time
	// Trial is true while one call tries whether the BMC is back; Until is then when
	// another may.
	Trial bool
}

// admit says whether a call may go out now. wait is how long callers are kept
// off otherwise; zero where only a trial's end is waited for.
func (c circuit) admit(now time.Time) (next circuit, wait time.Duration, ok bool) {
	switch {
	case c.Open == 0:
		return c, 0, true
	case now.Before(c.Until) && c.Trial:
		return c, 0, false
	case now.Before(c.Until):
		return c, c.Until.Sub(now), false
	}
	c.Trial, c.Until = true, now.Add(trialLimit)
	return c, 0, true
}

// verdict is what a call says about the BMC.
type verdict int

const (
	nothing verdict = iota
	answered
	silent
)

// after is the circuit after a call that was admitted ended.
func (c circuit) after(v verdict, now time.Time) circuit {
	switch {
	case v == answered:
		return circuit{}
	case v == nothing:
		if c.Trial { // the next call is the trial
			c.Trial, c.Until = false, now
		}
		return c
	}
	c.Silent++
	switch {
	case c.Trial:
		c.Open = min(2*c.Open, maxOpen)
	case c.Open == 0 && c.Silent >= threshold:
		c.Open = minOpen
	default:
		return c
	}
	c.Trial, c.Until = false, now.Add(c.Open)
	return c
}

// ErrNothingLearned is what report takes of a call whose end says nothing of the BMC.
var ErrNothingLearned = errors.New("nothing was learned of the BMC")

// judge reads a call's end. A code by which nothing was sent, and the end of the
// caller's own patience, say nothing of the BMC.
func judge(err error) verdict {
	if errors.Is(err, ErrNothingLearned) {
		return nothing
	}
	switch errs.CodeOf(err) {
	case errs.Unreachable:
		return silent
	case errs.Timeout, errs.Cancelled, errs.Internal,
		errs.UnsupportedDriver, errs.UnsupportedOperation, errs.InvalidConfig, errs.InvalidArgs, errs.InvalidAddress,
		errs.InvalidPayload, errs.PinUnsupported, errs.CredentialsUnavailable, errs.Unavailable, errs.NoSpace:
		return nothing
	}
	return answered
}

// Breaker keeps the circuits of a site's BMCs. It is safe for concurrent use.
type Breaker struct {
	now func() time.Time

	mu       sync.Mutex
	circuits map[string]circuit   // none: closed, and nobody was missed
	heard    map[string]time.Time // when each BMC answered last
}

// New makes a breaker; now is time.Now outside of tests.
func New(now func() time.Time) *Breaker {
	return &Breaker{now: now, circuits: map[string]circuit{}, heard: map[string]time.Time{}}
}

// Ask admits a call to the BMC at address, or refuses it at once with
// unreachable. report takes how an admitted call ended, once.
func (b *Breaker) Ask(address string) (report func(error), err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	before := b.circuits[address]
	c, wait, ok := before.admit(b.now())
	switch {
	case !ok && wait > 0:
		return nil, errs.Retry(errs.Unreachable, "not asked: %s did not answer %d times; next try in %s", address, before.Silent, wait.Round(time.Second))
	case !ok:
		return nil, errs.Retry(errs.Unreachable, "not asked: %s did not answer %d times; another call tries it now", address, before.Silent)
	}
	b.keep(address, c)
	return func(err error) {
		b.mu.Lock()
		defer b.mu.Unlock()
		v := judge(err)
		b.keep(address, b.circuits[address].after(v, b.now()))
		switch v {
		case answered:
			b.heard[address] = b.now()
		case silent:
			delete(b.heard, address)
		}
	}, nil
}

// Heard reports whether the BMC answered within the last while, and not failed to
// since.
func (b *Breaker) Heard(address string, within time.Duration) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	at, ok := b.heard[address]
	return ok && b.now().Sub(at) < within
}

// Reset closes the circuit: the address belongs to something else now.
func (b *Breaker) Reset(address string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.circuits, address)
	delete(b.heard, address)
}

// keep forgets what says nothing; the caller holds mu.
func (b *Breaker) keep(address string, c circuit) {
	if c == (circuit{}) {
		delete(b.circuits, address)
		return
	}
	b.circuits[address] = c
}
