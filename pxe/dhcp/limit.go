package dhcp

import (
	"hash/maphash"
	"time"
)

const (
	// perSecond is how many packets of one MAC are read, after a burst of perBurst:
	// firmware, iPXE and a system make a dozen in half a minute.
	perSecond, perBurst = 10, 30
	// buckets bounds the memory: a MAC that falls into another's bucket takes it over.
	buckets = 1 << 13
)

// limiter bounds what one MAC can cost. It serves one goroutine.
type limiter struct {
	seed    maphash.Seed
	buckets []bucket
}

type bucket struct {
	mac    [6]byte
	tokens float64
	at     time.Time
}

func newLimiter() *limiter {
	return &limiter{seed: maphash.MakeSeed(), buckets: make([]bucket, buckets)}
}

// allow takes a token of mac's.
func (l *limiter) allow(mac [6]byte, now time.Time) bool {
	b := &l.buckets[maphash.Comparable(l.seed, mac)%buckets]
	if b.mac != mac || b.at.IsZero() {
		*b = bucket{mac: mac, tokens: perBurst, at: now}
	}
	if since := now.Sub(b.at).Seconds(); since > 0 {
		b.tokens = min(perBurst, b.tokens+since*perSecond)
		b.at = now
	}
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
}
