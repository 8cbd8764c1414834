package dhcp

import (
	"sync"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

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

// chains remember what was given to whom, to tell our iPXE from others: nothing
// that it sends does. An iPXE whose machine was not given ours is foreign, once.
// And firmware that fetched ours and then asks just the same, again and again,
// is an iPXE that hides what it is.
type chains struct {
	mu    sync.Mutex
	byMAC map[string]*chain
	old   []string // the order of their coming
}

type chain struct {
	// The present exchange, which is answered in one way.
	xid              dhcpv4.TransactionID
	told             decide.Client
	foreign, looping bool
	// given is when our iPXE was named to an iPXE, and fetched when firmware had
	// all of it; as is who fetched.
	given, fetched time.Time
	as             decide.Client
	again          int
}

// judge completes who with what the machine was given before.
func (c *chains) judge(who *Who, xid dhcpv4.TransactionID, now time.Time) {
	told := who.Client
	if !isIPXE(told) && !isFirmware(told) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	h := c.of(who.MAC)
	if h.xid != xid || h.told != told {
		h.xid, h.told = xid, told
		h.foreign, h.looping = h.find(told, now)
	}
	who.Client.Foreign, who.Client.Looping = h.foreign, h.looping
}

func (h *chain) find(told decide.Client, now time.Time) (foreign, looping bool) {
	recent := func(at time.Time, d time.Duration) bool { return !at.IsZero() && now.Sub(at) < d }
	switch {
	case isIPXE(told):
		h.again = 0
		if !recent(h.given, oursFor) && !recent(h.fetched, oursFor) {
			h.given = now
			return true, false
		}
	case recent(h.fetched, againWithin) && h.as == told:
		h.fetched = time.Time{} // the next fetch counts anew
		if h.again++; h.again >= patience {
			h.again = 0
			return false, true
		}
	default:
		h.again = 0
	}
	return false, false
}

// loaded notes that the machine has all of our iPXE.
func (c *chains) loaded(mac string, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	h := c.of(mac)
	h.fetched, h.as = now, h.told
}

func (c *chains) of(mac string) *chain {
	if h := c.byMAC[mac]; h != nil {
		return h
	}
	if c.byMAC == nil {
		c.byMAC = make(map[string]*chain)
	}
	if len(c.old) >= maxChains {
		delete(c.byMAC, c.old[0])
		c.old = c.old[1:]
	}
	h := &chain{}
	c.byMAC[mac], c.old = h, append(c.old, mac)
	return h
}
