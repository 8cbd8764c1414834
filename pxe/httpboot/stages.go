package httpboot

import (
	"sync"
	"time"
)

const (
	// perMinute is how many stages of one MAC are told of in a minute: several
	// boots' worth. A machine in a loop must not fill the box's events, the line
	// and the gateway's disk.
	perMinute = 64
	// mostMACs bounds what is remembered: more than an assignment's machines use.
	mostMACs = 8192
)

// stages counts what each MAC was told of. Its zero value is ready.
type stages struct {
	mu   sync.Mutex
	macs map[string]*minute
}

type minute struct {
	began time.Time
	n     int
}

// more says whether one more stage of mac is to be told of now.
func (s *stages) more(mac string, now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.macs == nil || len(s.macs) >= mostMACs {
		s.macs = make(map[string]*minute)
	}
	m := s.macs[mac]
	if m == nil || now.Sub(m.began) >= time.Minute || now.Before(m.began) {
		m = &minute{began: now}
		s.macs[mac] = m
	}
	m.n++
	return m.n <= perMinute
}
