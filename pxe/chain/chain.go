// Package chain remembers which boot programs machines were given, to tell our iPXE from others: nothing that it sends does.
package chain

import (
	"sync"
	"time"

	"github.com/better-compute/site-appliance/pxe/decide"
)

const (
	// oursFor is how long an iPXE counts as ours after its machine was given ours.
	oursFor = 5 * time.Minute
	// againWithin is how soon firmware comes back that did not start what it fetched.
	againWithin = 3 * time.Minute
	// patience is how often it may: a link that comes up slowly looks the same.
	patience = 2
	// maxChains bounds the memory; the MACs beyond are remembered in place of the oldest.
	maxChains = 4096
)

// Protocol is what a machine asks by. One machine may ask by both at once, and
// its firmware has a boot entry for each.
type Protocol int

const (
	DHCPv4 Protocol = iota
	DHCPv6
	protocols
)

// Memory is what was given to whom. An iPXE whose machine was not given ours is
// foreign, once. And firmware that fetched ours and then asks just the same, again
// and again, is an iPXE that hides what it is. The zero value is ready; it is safe
// for concurrent use.
type Memory struct {
	mu    sync.Mutex
	byMAC map[string]*machine
	old   []string // the order of their coming
}

// machine is one, over each protocol. fetched is when it had all of our iPXE, over
// whatever: it asks by all that it has.
type machine struct {
	sides   [protocols]side
	fetched time.Time
}

// side is a machine over one protocol.
type side struct {
	// The present exchange, which is answered in one way.
	exchange         uint32
	told             decide.Client
	foreign, looping bool
	// given is when our iPXE was named to an iPXE, and fetched when PXE firmware had
	// all of it; as is who fetched.
	given, fetched time.Time
	as             decide.Client
	again          int
}

// Exchange is which one a request is of.
type Exchange struct {
	ID uint32
	// Continued says that it goes on with the one before, under whatever number.
	Continued bool
}

// Judge completes told, which is what a request of an exchange says, with what
// the machine was given before.
func (c *Memory) Judge(p Protocol, mac string, x Exchange, told decide.Client, now time.Time) decide.Client {
	if told.Program != decide.IPXE && told.Program != decide.Firmware {
		return told
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.of(mac)
	if h := &m.sides[p]; h.exchange != x.ID && !x.Continued || h.told != told {
		h.exchange, h.told = x.ID, told
		h.foreign, h.looping = find(m, p, told, now)
	}
	judged := told
	judged.Foreign, judged.Looping = m.sides[p].foreign, m.sides[p].looping
	return judged
}

func find(m *machine, p Protocol, told decide.Client, now time.Time) (foreign, looping bool) {
	h := &m.sides[p]
	recent := func(at time.Time, d time.Duration) bool { return !at.IsZero() && now.Sub(at) < d }
	switch {
	case told.Program == decide.IPXE:
		h.again = 0
		if !recent(h.given, oursFor) && !recent(m.fetched, oursFor) {
			h.given = now
			return true, false
		}
	case recent(h.fetched, againWithin) && h.as == told:
		h.fetched, m.fetched = time.Time{}, time.Time{} // the next fetch counts anew
		if h.again++; h.again >= patience {
			h.again = 0
			return false, true
		}
	default:
		h.again = 0
	}
	return false, false
}

// Loaded notes that the machine has all of our iPXE by PXE, which it was told of over p.
func (c *Memory) Loaded(p Protocol, mac string, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.of(mac)
	h := &m.sides[p]
	m.fetched, h.fetched, h.as = now, now, h.told
}

// LoadedHTTP notes that the machine has all of it by HTTP. That is no PXE firmware's
// doing, which is all that is taken to loop.
func (c *Memory) LoadedHTTP(mac string, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.of(mac).fetched = now
}

func (c *Memory) of(mac string) *machine {
	if h := c.byMAC[mac]; h != nil {
		return h
	}
	if c.byMAC == nil {
		c.byMAC = make(map[string]*machine)
	}
	if len(c.old) >= maxChains {
		delete(c.byMAC, c.old[0])
		c.old = c.old[1:]
	}
	h := new(machine)
	c.byMAC[mac], c.old = h, append(c.old, mac)
	return h
}
