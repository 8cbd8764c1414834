package agent

import (
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/clock"
)

// TestTimesOfAStolenGateway: one that says next year has nothing forgotten up to
// then, after which an honest one could say nothing that is still valid; one that
// says the same time at every session does not keep a grant from its end.
func TestTimesOfAStolenGateway(t *testing.T) {
	build := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	local := build
	a := &Agent{clock: clock.New(build, build, func() time.Time { return local })}
	say := func(server time.Time) {
		t.Helper()
		if err := a.clock.Verified(server); err != nil {
			t.Fatal(err)
		}
	}
	say(build.AddDate(9, 0, 0))
	if got, most := a.forgettable(), build.AddDate(0, 1, 0); got.After(most) {
		t.Errorf("forgettable up to %v, want at most %v", got, most)
	}

	a = &Agent{clock: clock.New(build, build, func() time.Time { return local })}
	for range 3 {
		say(build.Add(time.Hour))
		local = local.Add(50 * time.Minute)
	}
	if got, want := a.latest(), build.Add(time.Hour+150*time.Minute); got.Before(want) {
		t.Errorf("the latest time known = %v, want %v", got, want)
	}
	if got, most := a.forgettable(), a.clock.Now(); got.After(most) {
		t.Errorf("forgettable up to %v, which is after now, %v", got, most)
	}
	// It goes on with an honest one.
	say(build.Add(48 * time.Hour))
	local = local.Add(10 * 24 * time.Hour)
	if got, want := a.forgettable(), build.Add(12*24*time.Hour); !got.Equal(want) {
		t.Errorf("forgettable in a long session up to %v, want %v", got, want)
	}
}
