package pxe

import (
	"context"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/dhcp"
	"github.com/better-compute/site-appliance/pxe/ra"
)

const (
	// routersFirst is how long a router of the LAN has to answer an iPXE, which believes
	// the first: it takes half a second, and longer only soon after an advertisement to
	// all, which the box has heard then (RFC 4861, 6.2.6).
	routersFirst = time.Second
	// awaitingFor is how long an iPXE that asked DHCP may still look for a router.
	awaitingFor = 20 * time.Second
	// mostAnswers is how often one is answered: an answer may be lost.
	mostAnswers = 4
	// maxAwaiting bounds what is remembered of those: who is forgotten waits, and boots.
	maxAwaiting = 4096
)

// awaiting are the machines whose iPXE has its address by DHCP and, as far as the box
// hears, still looks for a router. Its zero value is ready.
type awaiting struct {
	mu    sync.Mutex
	byMAC map[string]looking
}

// looking is since when, and how often it was answered.
type looking struct {
	since   time.Time
	answers int
}

// add notes one that has its address; told again, the first time counts.
func (a *awaiting) add(mac string, now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	l, had := a.byMAC[mac]
	if had && now.Sub(l.since) < awaitingFor {
		return
	}
	if a.byMAC == nil {
		a.byMAC = make(map[string]looking)
	}
	if !had && len(a.byMAC) >= maxAwaiting {
		for other := range a.byMAC {
			delete(a.byMAC, other)
			break
		}
	}
	a.byMAC[mac] = looking{since: now}
}

func (a *awaiting) end(mac string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.byMAC, mac)
}

// answer says whether a machine is to be answered, and counts that.
func (a *awaiting) answer(mac string, now time.Time) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	l, ok := a.byMAC[mac]
	if since := now.Sub(l.since); !ok || since < routersFirst || since >= awaitingFor || l.answers >= mostAnswers {
		return false
	}
	l.answers++
	a.byMAC[mac] = l
	return true
}

// heardDHCP ends the wait of an iPXE after which something else runs.
func (s *server) heardDHCP(who dhcp.Who) {
	if who.Client.Program != decide.IPXE {
		s.awaiting.end(who.MAC)
	}
}

// sparesWait says whether an iPXE's wait for a router is cut short here: where the box
// gives the addresses, and does not advertise a network of IPv6.
func (c *Config) sparesWait() bool {
	return c.Mode == dhcp.Authoritative && !c.BMC && !c.IPv6.Address.IsValid()
}

// serveBare spares each iPXE its wait for a router. Where it cannot, machines boot as
// they do without it.
func (s *server) serveBare(ctx context.Context) error {
	for {
		b, err := ra.ListenBare(ctx, s.Interface, func(mac string) bool { return s.awaiting.answer(mac, time.Now()) }, s.Log)
		if err == nil {
			err = b.Serve(ctx)
			_ = b.Close()
		}
		if ctx.Err() != nil {
			return nil
		}
		s.Log.Debug("machines' iPXE waits for an IPv6 router", "err", err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(again6):
		}
	}
}
