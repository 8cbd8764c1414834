// Package limit bounds what one sender of packets can cost, in work and in lines of the log.
package limit

import (
	"sync"
	"time"
)

const (
	// PerSecond is how many packets of one MAC are read, after a burst of PerBurst:
	// firmware, iPXE and a system make a dozen in half a minute.
	PerSecond, PerBurst = 10, 30
	// most bounds the memory: one MAC more takes the place of any other, which then has
	// its burst again.
	most = 1 << 13
)

// Limiter bounds what one MAC can cost. It serves one goroutine.
type Limiter struct{ buckets map[[6]byte]bucket }

type bucket struct {
	tokens float64
	at     time.Time
}

// New makes a limiter under which every MAC has its burst.
func New() *Limiter {
	return &Limiter{make(map[[6]byte]bucket)}
}

// Allow takes a token of mac's.
func (l *Limiter) Allow(mac [6]byte, now time.Time) bool {
	b, known := l.buckets[mac]
	if !known {
		b = bucket{tokens: PerBurst, at: now}
		if len(l.buckets) >= most {
			for other := range l.buckets {
				delete(l.buckets, other)
				break
			}
		}
	}
	if since := now.Sub(b.at).Seconds(); since > 0 {
		b.tokens = min(PerBurst, b.tokens+since*PerSecond)
		b.at = now
	}
	allowed := b.tokens >= 1
	if allowed {
		b.tokens--
	}
	l.buckets[mac] = b
	return allowed
}

// Seldom says of each key whether it is time to tell of it again. Of more than
// maxSeldom keys at a time it tells no more. It is safe for concurrent use; its
// zero value is ready.
type Seldom struct {
	mu sync.Mutex
	at map[string]time.Time
}

const maxSeldom = 64

// Fresh says whether key was not told within every, and counts it as told.
func (s *Seldom) Fresh(key string, now time.Time, every time.Duration) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	recent := func(at time.Time) bool { return now.Sub(at) < every && !now.Before(at) }
	if at, ok := s.at[key]; ok && recent(at) {
		return false
	}
	if s.at == nil {
		s.at = make(map[string]time.Time)
	}
	if _, ok := s.at[key]; !ok && len(s.at) >= maxSeldom {
		for k, at := range s.at {
			if !recent(at) {
				delete(s.at, k)
			}
		}
		if len(s.at) >= maxSeldom {
			return false
		}
	}
	s.at[key] = now
	return true
}

// Apart limits known machines and others apart: no flood of made-up MACs makes it forget
// what a known one has sent. It serves one goroutine.
type Apart struct{ known, others *Limiter }

// NewApart makes one under which every MAC has its burst.
func NewApart() Apart { return Apart{New(), New()} }

// Allow takes a token of mac's.
func (a Apart) Allow(mac [6]byte, known bool, now time.Time) bool {
	if known {
		return a.known.Allow(mac, now)
	}
	return a.others.Allow(mac, now)
}
