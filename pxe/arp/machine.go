package arp

import (
	"net/netip"
	"time"
)

const (
	// An address is asked twice, since one frame may be lost.
	probes  = 2
	spacing = time.Second
	// answerTime is how long after the last probe an answer counts.
	answerTime = 2 * time.Second
	maxAsked   = 1024

	// rate is how many probes leave in a second, after a burst of as many.
	rate  = 64
	every = time.Second / rate
	// walkTime is the pace of the walk through what nobody has.
	walkTime = 200 * time.Millisecond

	// perMAC is for how many addresses one MAC is believed; what it answered is
	// remembered as long as the leases keep an address out of use, and a little more.
	perMAC      = 8
	memory      = 12 * time.Minute
	disbelief   = time.Hour
	maxAnswerer = 1024
)

type verdict int

const (
	nothing verdict = iota
	conflict
	disbelieved
)

// machine decides what is probed when, and what an answer means. It opens no
// socket and reads no clock.
type machine struct {
	asked     map[netip.Addr]*question
	first     []netip.Addr // to ask for the first time
	again     []due        // to ask again, in the order of time
	walked    time.Time
	cleaned   time.Time
	ready     time.Time // when a probe may leave; lies back by up to a burst
	answerers map[string]*answerer
}

type question struct {
	own  string // who may answer
	left int
	open time.Time // until then an answer counts
}

type due struct {
	at time.Time
	ip netip.Addr
}

type answerer struct {
	claims   map[netip.Addr]time.Time
	disputed time.Time // when it was disbelieved
}

func newMachine() machine {
	return machine{asked: make(map[netip.Addr]*question), answerers: make(map[string]*answerer)}
}

// offered asks about ip before anything else, mac being who may answer.
func (m *machine) offered(now time.Time, ip netip.Addr, mac string) {
	if q := m.asked[ip]; q != nil {
		q.own = mac
		if q.left > 0 {
			return
		}
		delete(m.asked, ip)
	}
	m.ask(now, ip, mac)
}

func (m *machine) ask(now time.Time, ip netip.Addr, own string) {
	if len(m.asked) >= maxAsked || !ip.Is4() {
		return
	}
	m.asked[ip] = &question{own: own, left: probes, open: now.Add(answerTime)}
	m.first = append(m.first, ip)
}

// wantsIdle says that it is time for the next step of the walk.
func (m *machine) wantsIdle(now time.Time) bool {
	return len(m.asked) < maxAsked/2 && now.Sub(m.walked) >= walkTime
}

// idle takes that step.
func (m *machine) idle(now time.Time, ip netip.Addr, ok bool) {
	m.walked = now
	if ok && m.asked[ip] == nil {
		m.ask(now, ip, "")
	}
}

// due is the next address to probe now, within the rate.
func (m *machine) due(now time.Time) (netip.Addr, bool) {
	m.clean(now)
	if burst := now.Add(-time.Second); m.ready.Before(burst) {
		m.ready = burst
	}
	for !m.ready.After(now) {
		var ip netip.Addr
		switch {
		case len(m.first) > 0:
			ip, m.first = m.first[0], m.first[1:]
		case len(m.again) > 0 && !m.again[0].at.After(now):
			ip, m.again = m.again[0].ip, m.again[1:]
		default:
			return netip.Addr{}, false
		}
		q := m.asked[ip]
		if q == nil || q.left == 0 {
			continue
		}
		m.ready = m.ready.Add(every)
		q.left--
		q.open = now.Add(answerTime)
		if q.left > 0 {
			m.again = append(m.again, due{now.Add(spacing), ip})
		}
		return ip, true
	}
	return netip.Addr{}, false
}

// wait is how long there is nothing to do.
func (m *machine) wait(now time.Time) time.Duration {
	next := m.walked.Add(walkTime)
	if len(m.asked) >= maxAsked/2 {
		next = now.Add(walkTime)
	}
	var at time.Time
	switch {
	case len(m.first) > 0:
		at = m.ready
	case len(m.again) > 0:
		at = m.again[0].at
		if m.ready.After(at) {
			at = m.ready
		}
	default:
		at = next
	}
	if at.Before(next) {
		next = at
	}
	return max(next.Sub(now), time.Millisecond)
}

// answer judges that mac said to have ip.
func (m *machine) answer(now time.Time, ip netip.Addr, mac string) verdict {
	q := m.asked[ip]
	if q == nil || now.After(q.open) || q.left == probes || q.own == mac {
		return nothing
	}
	a := m.answerers[mac]
	if a == nil {
		if len(m.answerers) >= maxAnswerer {
			// So many that the leases' own bound is what counts.
			return conflict
		}
		a = &answerer{claims: make(map[netip.Addr]time.Time)}
		m.answerers[mac] = a
	}
	if !a.disputed.IsZero() && now.Sub(a.disputed) < disbelief {
		return nothing
	}
	a.claims[ip] = now
	if len(a.claims) > perMAC {
		a.disputed = now
		clear(a.claims)
		return disbelieved
	}
	return conflict
}

// clean forgets what is over, once a second.
func (m *machine) clean(now time.Time) {
	if now.Sub(m.cleaned) < time.Second {
		return
	}
	m.cleaned = now
	for ip, q := range m.asked {
		if q.left == 0 && now.After(q.open) {
			delete(m.asked, ip)
		}
	}
	for mac, a := range m.answerers {
		for ip, at := range a.claims {
			if now.Sub(at) >= memory {
				delete(a.claims, ip)
			}
		}
		if len(a.claims) == 0 && now.Sub(a.disputed) >= disbelief {
			delete(m.answerers, mac)
		}
	}
}
