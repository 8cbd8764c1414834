package ra

import "time"

// Times of RFC 4861, sections 6.2.1 and 10.
const (
	maxInterval = 10 * time.Minute
	minInterval = maxInterval / 3
	// The first few follow each other sooner.
	initial         = 3
	initialInterval = 16 * time.Second
	// Answers wait a little, so that those of several routers do not collide, and
	// are for all who asked meanwhile.
	maxDelay = 500 * time.Millisecond
	apart    = 3 * time.Second
)

// schedule says when to send. Everything goes to all nodes: an answer to one
// machine is what the others wait for, and a flood of questions costs one packet
// in three seconds.
type schedule struct {
	next, last time.Time
	sent       int
	// upTo is a random duration below its argument.
	upTo func(time.Duration) time.Duration
}

func newSchedule(now time.Time, upTo func(time.Duration) time.Duration) *schedule {
	return &schedule{next: now, upTo: upTo}
}

// asked brings the next advertisement forward.
func (s *schedule) asked(now time.Time) {
	at := now
	if soonest := s.last.Add(apart); !s.last.IsZero() && at.Before(soonest) {
		at = soonest
	}
	if at = at.Add(s.upTo(maxDelay)); at.Before(s.next) {
		s.next = at
	}
}

// wentOut notes that one was sent.
func (s *schedule) wentOut(now time.Time) {
	s.last = now
	s.sent++
	wait := minInterval + s.upTo(maxInterval-minInterval)
	if s.sent < initial {
		wait = min(wait, initialInterval)
	}
	s.next = now.Add(wait)
}

// failed notes that one could not be sent, as while the link is down.
func (s *schedule) failed(now time.Time) { s.next = now.Add(time.Second) }
