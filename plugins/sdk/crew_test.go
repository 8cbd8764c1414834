package sdk

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
)

// Goroutines of operations are used again, but for those whose callers gave up
// and those that ended; what is not used ends. synctest fails where one is left.
func TestCrew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := handler(t, define(t, "acme", nil))
		idle := func() int {
			h.crew.mu.Lock()
			defer h.crew.mu.Unlock()
			return len(h.crew.idle)
		}
		for _, tt := range []struct {
			operation string
			left      time.Duration
			want      int
		}{
			{"echo", 0, 1}, {"echo", 0, 1}, {"panics", 0, 1}, {"own", time.Minute, 1}, {"leaves", 0, 0}, {"leaves", 0, 0},
			{"echo", 0, 1}, {"late", time.Second, 0}, {"echo", 0, 1},
		} {
			m := &driverv1.InvokeRequest{Driver: "acme", Kind: "test", Operation: tt.operation}
			if tt.left > 0 {
				m.DeadlineMs = time.Now().Add(tt.left).UnixMilli()
			}
			ask(t, h, t.Context(), m)
			// A late operation ends at the moment at which its caller gives up.
			if got := idle(); got != tt.want && tt.operation != "late" {
				t.Errorf("after %s %d goroutines are idle, want %d", tt.operation, got, tt.want)
			}
		}
		h.crew.running.Wait()
		time.Sleep(idleLimit + time.Second)
		synctest.Wait()
		if got := idle(); got != 0 {
			t.Errorf("%d goroutines are idle after %v, want none", got, idleLimit)
		}
	})
}
