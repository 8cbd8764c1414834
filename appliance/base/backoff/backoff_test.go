package backoff

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestDelay(t *testing.T) {
	p := Policy{Min: time.Second, Max: time.Minute}
	for _, tt := range []struct {
		n    int
		want time.Duration
	}{{0, time.Second}, {1, 2 * time.Second}, {5, 32 * time.Second}, {6, time.Minute}, {1000, time.Minute}} {
		if got := p.Delay(tt.n); got != tt.want {
			t.Errorf("Delay(%d) = %v, want %v", tt.n, got, tt.want)
		}
	}
	p.Rand = func() float64 { return 0.5 }
	if got := p.Delay(1); got != time.Second {
		t.Errorf("jittered Delay(1) = %v, want 1s", got)
	}
}

func TestWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := Policy{Min: time.Hour, Max: time.Hour}
		wake := make(chan struct{}, 1)
		wake <- struct{}{}
		start := time.Now()
		if err := p.Wait(context.Background(), 0, wake); err != nil || time.Since(start) != 0 {
			t.Errorf("woken Wait took %v, %v", time.Since(start), err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := p.Wait(ctx, 0, nil); err != context.DeadlineExceeded || time.Since(start) != time.Minute {
			t.Errorf("Wait = %v after %v, want deadline after 1m", err, time.Since(start))
		}
	})
}
