package limit

import (
	"sync"
	"time"
)

// mostKeys bounds what is remembered: more than an assignment's machines use.
const mostKeys = 8192

// mostLooked bounds the search for a key to forget.
const mostLooked = 64

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

// forget makes room: by a key whose minute is over, if a look at a few finds one.
func (m *Minute) forget(now time.Time) {
	last, looked := "", 0
	for last = range m.keys {
		if looked++; looked >= mostLooked || now.Sub(m.keys[last].began) >= time.Minute {
			break
		}
	}
	delete(m.keys, last)
}

// Count is More, and with the first of a minute it says how many were withheld in
// the minute before.
func (m *Minute) Count(key string, now time.Time) (more bool, withheld int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.keys == nil {
		m.keys = make(map[string]*minute)
	}
	k := m.keys[key]
	if k == nil && len(m.keys) >= mostKeys {
		m.forget(now)
	}
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
