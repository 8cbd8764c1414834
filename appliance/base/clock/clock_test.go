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

// TestPassedNeverComesBack: a gateway that says the same time at every session does
// not stop the time, nor does a restart of the box beyond what was not kept.
func TestPassedNeverComesBack(t *testing.T) {
	local := build
	c := New(build, build, func() time.Time { return local })
	noon := build.Add(12 * time.Hour)
	for n := range 5 {
		if err := c.Verified(noon); err != nil {
			t.Fatal(err)
		}
		want := noon.Add(time.Duration(n) * 50 * time.Minute)
		if got := c.Passed(); !got.Equal(want) || !c.Floor().Equal(want) {
			t.Errorf("session %d: Passed() = %v, Floor() = %v, want %v", n, got, c.Floor(), want)
		}
		if !c.Now().Equal(noon) {
			t.Errorf("session %d: Now() = %v, want the gateway's %v", n, c.Now(), noon)
		}
		local = local.Add(50 * time.Minute)
	}
	kept := c.Passed()
	c = New(build, kept, func() time.Time { return local })
	if err := c.Verified(noon); err != nil || c.Passed().Before(kept) {
		t.Errorf("after a restart Passed() = %v, %v, want %v or later", c.Passed(), err, kept)
	}
}
