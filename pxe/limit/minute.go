package limit

import (
	"sync"
	"time"
)

// mostKeys bounds what is remembered: more than an assignment's machines use.
const mostKeys = 8192

// Minute lets so much of each key through in a minute. It is safe for concurrent use.
type Minute struct {
	Most int

	mu   sync.Mutex
	keys map[string]*minute
}

type minute struct {
	began time.Time
	n     int
}

// More says whether one more of key is to be let through now.
func (m *Minute) More(key string, now time.Time) bool {
	more, _ := m.Count(key, now)
	return more
}

// Count is More, and with the first of a minute it says how many were withheld in
// the minute before.
func (m *Minute) Count(key string, now time.Time) (more bool, withheld int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.keys == nil || len(m.keys) >= mostKeys {
		m.keys = make(map[string]*minute)
	}
	k := m.keys[key]
	if k == nil || now.Sub(k.began) >= time.Minute || now.Before(k.began) {
		if k != nil {
			withheld = max(k.n-m.Most, 0)
		}
		k = &minute{began: now}
		m.keys[key] = k
	}
	k.n++
	return k.n <= m.Most, withheld
}
