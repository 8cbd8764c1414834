// Package limit bounds what one sender of packets can cost, in work and in lines of the log.
package limit

import (
	"hash/maphash"
	"sync"
	"time"
)

const (
	// PerSecond is how many packets of one MAC are read, after a burst of PerBurst:
	// firmware, iPXE and a system make a dozen in half a minute.
	PerSecond, PerBurst = 10, 30
	// buckets bounds the memory: a MAC that falls into another's bucket takes it over.
	buckets = 1 << 13
)

// Limiter bounds what one MAC can cost. It serves one goroutine.
type Limiter struct {
	seed    maphash.Seed
	buckets []bucket
}

type bucket struct {
	mac    [6]byte
	tokens float64
	at     time.Time
}

// New makes a limiter under which every MAC has its burst.
func New() *Limiter {
	return &Limiter{seed: maphash.MakeSeed(), buckets: make([]bucket, buckets)}
}

// Allow takes a token of mac's.
func (l *Limiter) Allow(mac [6]byte, now time.Time) bool {
	b := &l.buckets[maphash.Comparable(l.seed, mac)%buckets]
	if b.mac != mac || b.at.IsZero() {
		*b = bucket{mac: mac, tokens: PerBurst, at: now}
	}
	if since := now.Sub(b.at).Seconds(); since > 0 {
		b.tokens = min(PerBurst, b.tokens+since*PerSecond)
		b.at = now
	}
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
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
