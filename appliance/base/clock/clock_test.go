package clock

import (
	"testing"
	"time"
)

var build = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func TestNowNeverBehindFloor(t *testing.T) {
	local := time.Unix(0, 0)
	c := New(build, build.Add(48*time.Hour), func() time.Time { return local })
	if got, want := c.Now(), build.Add(48*time.Hour); !got.Equal(want) {
		t.Errorf("Now() = %v, want %v", got, want)
	}
	leaf := build.Add(72 * time.Hour)
	if got := c.Judge(leaf); !got.Equal(leaf) {
		t.Errorf("Judge(%v) = %v, want the leaf's NotBefore", leaf, got)
	}
	if err := c.Verified(build.Add(96 * time.Hour)); err != nil {
		t.Fatal(err)
	}
	local = local.Add(time.Minute)
	if got, want := c.Now(), build.Add(96*time.Hour+time.Minute); !got.Equal(want) {
		t.Errorf("Now() after Verified = %v, want %v", got, want)
	}
}

func TestVerifiedBounds(t *testing.T) {
	c := New(build, time.Time{}, func() time.Time { return build })
	for _, tt := range []struct {
		name string
		in   time.Time
		ok   bool
	}{
		{"past the horizon", build.Add(11 * 365 * 24 * time.Hour), false},
		{"before the build", build.Add(-48 * time.Hour), false},
		{"now", build.Add(time.Hour), true},
	} {
		if err := c.Verified(tt.in); (err == nil) != tt.ok {
			t.Errorf("%s: Verified(%v) = %v", tt.name, tt.in, err)
		}
	}
	if err := c.Verified(build.Add(5 * 365 * 24 * time.Hour)); err != nil {
		t.Fatal(err)
	}
	if got, limit := c.Floor(), build.Add(time.Hour+maxStep); got.After(limit) {
		t.Errorf("Floor() = %v, want at most %v", got, limit)
	}
}

func TestSavedFloorPastHorizonIsIgnored(t *testing.T) {
	c := New(build, build.Add(20*365*24*time.Hour), func() time.Time { return build })
	if got := c.Floor(); !got.Equal(build) {
		t.Errorf("Floor() = %v, want the build", got)
	}
}

// TestFloorMovesOncePerProcess: a gateway whose clock is far ahead, at every
// heartbeat, must not leave a floor behind under which no certificate of its
// own is valid any more after a restart.
func TestFloorMovesOncePerProcess(t *testing.T) {
	local := build
	c := New(build, time.Time{}, func() time.Time { return local })
	for n := range 100 {
		local = local.Add(20 * time.Second)
		if err := c.Verified(build.Add(time.Duration(n) * 30 * 24 * time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
	if got, limit := c.Floor(), local.Add(maxStep); got.After(limit) {
		t.Errorf("Floor() = %v, want at most %v", got, limit)
	}
	// A serving gateway's certificate always has more than this left.
	if maxStep >= 45*24*time.Hour {
		t.Errorf("maxStep = %s, want less than half of a certificate's life", maxStep)
	}
}
