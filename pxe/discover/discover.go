// Package discover tells once a minute, and not more, of each unknown machine that asks to boot.
package discover

import (
	"sync"
	"time"
)

const (
	every = time.Minute
	// most MACs are remembered at once; a flood of made-up ones beyond it is dropped.
	most = 4096
)

// Filter remembers who was told of. Its zero value is ready; it is safe for
// concurrent use.
type Filter struct {
	mu   sync.Mutex
	told map[string]time.Time
}

// Fresh says whether mac is to be told of now.
func (f *Filter) Fresh(mac string, now time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if at, ok := f.told[mac]; ok && now.Sub(at) < every && !now.Before(at) {
		return false
	}
	if len(f.told) >= most {
		for m, at := range f.told {
			if now.Sub(at) >= every || now.Before(at) {
				delete(f.told, m)
			}
		}
		if len(f.told) >= most {
			return false
		}
	}
	if f.told == nil {
		f.told = make(map[string]time.Time)
	}
	f.told[mac] = now
	return true
}
