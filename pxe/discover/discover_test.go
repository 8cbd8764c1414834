package discover

import (
	"fmt"
	"testing"
	"time"
)

func TestFresh(t *testing.T) {
	t0 := time.Unix(1000, 0)
	var f Filter
	for _, tt := range []struct {
		mac  string
		at   time.Duration
		want bool
	}{
		{"a", 0, true}, {"a", 59 * time.Second, false}, {"b", 59 * time.Second, true}, {"a", 60 * time.Second, true},
		{"a", 61 * time.Second, false}, {"a", -time.Hour, true}, // the clock was set back
	} {
		if got := f.Fresh(tt.mac, t0.Add(tt.at)); got != tt.want {
			t.Errorf("Fresh(%s at %v) = %v, want %v", tt.mac, tt.at, got, tt.want)
		}
	}
}

func TestFlood(t *testing.T) {
	t0 := time.Unix(1000, 0)
	var f Filter
	for i := range 2 * most {
		if got, want := f.Fresh(fmt.Sprint(i), t0), i < most; got != want {
			t.Fatalf("Fresh(%d) = %v, want %v", i, got, want)
		}
	}
	if len(f.told) != most {
		t.Errorf("%d MACs remembered, want %d", len(f.told), most)
	}
	if !f.Fresh("later", t0.Add(time.Minute)) {
		t.Error("Fresh(after the flood) = false, want true")
	}
}
