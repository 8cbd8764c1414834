package limit

import (
	"fmt"
	"testing"
	"time"
)

var t0 = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func TestLimiter(t *testing.T) {
	l := New()
	count := func(mac byte, n int, now time.Time) (passed int) {
		for range n {
			if l.Allow([6]byte{2, 0, 0, 0, 0, mac}, now) {
				passed++
			}
		}
		return passed
	}
	if got := count(1, 1000, t0); got != PerBurst {
		t.Errorf("a flood of one MAC: %d pass, want %d", got, PerBurst)
	}
	if got := count(2, 12, t0); got != 12 {
		t.Errorf("another MAC beside it: %d of 12 pass", got)
	}
	if got := count(1, 1000, t0.Add(time.Second)); got != PerSecond {
		t.Errorf("a second later: %d pass, want %d", got, PerSecond)
	}
}

// TestLimiterIsBounded: made-up MACs make it hold no more than so many, and never keep
// one that is new from its burst.
func TestLimiterIsBounded(t *testing.T) {
	l := New()
	for i := range 3 * most {
		if !l.Allow([6]byte{2, 0, 0, byte(i >> 16), byte(i >> 8), byte(i)}, t0) {
			t.Fatalf("MAC %d is not let through", i)
		}
	}
	if len(l.buckets) != most {
		t.Errorf("%d MACs are remembered, want %d", len(l.buckets), most)
	}
}

func TestSeldom(t *testing.T) {
	const every = 10 * time.Minute
	var s Seldom
	for i, want := range []bool{true, false, true} {
		if got := s.Fresh("a", t0.Add(time.Duration(i)*every/2), every); got != want {
			t.Errorf("Fresh at %d = %v, want %v", i, got, want)
		}
	}
	told := 0
	for i := range 1000 {
		if s.Fresh(fmt.Sprint(i), t0.Add(every), every) {
			told++
		}
	}
	if told != maxSeldom-1 || len(s.at) != maxSeldom {
		t.Errorf("of 1000 more keys %d are told and %d remembered, want %d and %d", told, len(s.at), maxSeldom-1, maxSeldom)
	}
}

// TestMinute: of one key so much and no more, of others all the same, and anew in
// the next minute or when the clock was set back.
func TestMinute(t *testing.T) {
	m := Minute{Most: 3}
	count := func(key string, now time.Time) (n int) {
		for range 10 {
			if m.More(key, now) {
				n++
			}
		}
		return n
	}
	for _, tt := range []struct {
		key  string
		now  time.Time
		want int
	}{{"a", t0, 3}, {"b", t0, 3}, {"a", t0.Add(59 * time.Second), 0}, {"a", t0.Add(time.Minute), 3}, {"a", t0, 3}} {
		if got := count(tt.key, tt.now); got != tt.want {
			t.Errorf("of ten of %s at %s pass %d, want %d", tt.key, tt.now.Sub(t0), got, tt.want)
		}
	}
	for i := range 3 * mostKeys {
		m.More(fmt.Sprint(i), t0)
	}
	if n := len(m.keys); n > mostKeys {
		t.Errorf("%d keys are remembered, more than %d", n, mostKeys)
	}
}

// TestMinuteIsBounded: who is remembered stays so though made-up keys come in between.
func TestMinuteIsBounded(t *testing.T) {
	m := Minute{Most: 1}
	m.More("a", t0)
	for i := range mostKeys - 1 {
		m.More(fmt.Sprint(i), t0)
	}
	if m.More("a", t0) {
		t.Error("a key was let through once more because the memory is full")
	}
	for i := range 3 * mostKeys {
		m.More(fmt.Sprint("later ", i), t0)
	}
	if len(m.keys) != mostKeys {
		t.Errorf("%d keys are remembered, want %d", len(m.keys), mostKeys)
	}
	m.forget(t0.Add(2 * time.Minute))
	if len(m.keys) != mostKeys-1 {
		t.Errorf("forget left %d keys, want one less than %d", len(m.keys), mostKeys)
	}
}
