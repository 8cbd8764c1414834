// Package clock is the time that a box may trust: never behind its floor,
// whatever the hardware clock says.
package clock

import (
	"fmt"
	"sync"
	"time"
)

// Trusted judges times against a floor: the later of the build and the last
// verified gateway time. It is safe for concurrent use.
type Trusted struct {
	build time.Time
	now   func() time.Time
	first time.Time // the floor that it began with
	began time.Time // local reading then, with its monotonic part

	mu     sync.Mutex
	floor  time.Time
	since  time.Time // local reading when the floor was set, with its monotonic part
	server time.Time // gateway time at mark
	mark   time.Time // local reading, with its monotonic part
}

// horizon is how far past the build a time is still believed.
const horizon = 10 * 365 * 24 * time.Hour

// New starts at the later of build and saved; now is time.Now outside of tests.
func New(build, saved time.Time, now func() time.Time) *Trusted {
	floor := build
	if saved.After(floor) && saved.Before(build.Add(horizon)) {
		floor = saved
	}
	began := now()
	return &Trusted{build: build, now: now, first: floor, began: began, floor: floor, since: began}
}

// Now is gateway time carried on by the monotonic clock once a gateway was
// heard, and otherwise the later of the local clock and the floor.
func (t *Trusted) Now() time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	local := t.now()
	if !t.server.IsZero() {
		return t.server.Add(local.Sub(t.mark))
	}
	if local.Before(t.floor) || local.After(t.build.Add(horizon)) {
		return t.floor
	}
	return local
}

// Judge is the time at which a certificate under the pinned CA is judged:
// max(now, floor, notBefore), so that a box whose clock stands in the past can
// still come home.
func (t *Trusted) Judge(notBefore time.Time) time.Time {
	now := t.Now()
	if notBefore.After(now) && notBefore.Before(t.build.Add(horizon)) {
		return notBefore
	}
	return now
}

// Floor is what to save for the next boot.
func (t *Trusted) Floor() time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.floor
}

// Passed is a time that has passed whatever the gateway says now: the floor, and
// what this process ran for since it was set.
func (t *Trusted) Passed() time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.passed(t.now())
}

func (t *Trusted) passed(local time.Time) time.Time { return t.floor.Add(max(0, local.Sub(t.since))) }

// maxStep bounds what one process may add to the floor beyond elapsed time. It
// is less than a gateway's certificate always has left: a floor that a wrong
// clock of the gateway's left behind must not keep the box from coming home.
const maxStep = 30 * 24 * time.Hour

// Verified takes a gateway's time from an authenticated answer. It refuses a
// time past build + 10 years, and moves the floor by at most 30 days beyond
// what has elapsed since New, however often it is called.
func (t *Trusted) Verified(server time.Time) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if server.After(t.build.Add(horizon)) {
		return fmt.Errorf("gateway time %s is past build + 10 years (%s)", server.UTC().Format(time.RFC3339), t.build.UTC().Format(time.RFC3339))
	}
	if server.Before(t.build.Add(-24 * time.Hour)) {
		return fmt.Errorf("gateway time %s is before the build (%s)", server.UTC().Format(time.RFC3339), t.build.UTC().Format(time.RFC3339))
	}
	local := t.now()
	t.server, t.mark = server, local
	if limit := t.first.Add(local.Sub(t.began) + maxStep); server.After(limit) {
		server = limit
	}
	t.floor, t.since = t.passed(local), local
	if server.After(t.floor) {
		t.floor = server
	}
	return nil
}
