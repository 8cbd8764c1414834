package dhcp6

import (
	"net"
	"net/netip"
	"sync"
	"time"
)

const (
	// heldFor is how long an address is its machine's after it was given last. That is
	// longer than its lifetime: an iPXE neither renews an address nor gives it up.
	heldFor = 24 * time.Hour
	// mostKnown and mostOthers bound the bindings of machines that somebody vouches for,
	// and of all others.
	mostKnown, mostOthers = 8192, 16384
	// mostLooked bounds the search for a binding to forget.
	mostLooked = 64
)

// Bindings are the addresses that machines were given. Made-up MACs take none of a
// known machine's place. What is lost with them, a machine gets again by asking: its
// address says whose it is. The zero value is ready; it is safe for concurrent use.
type Bindings struct {
	mu            sync.Mutex
	known, others map[[6]byte]binding
}

// binding is one machine's: the generation of the address that it was told of last,
// and of the one that it gets next. They differ while it has declined the first and
// not asked again: a DECLINE that was forged takes no address from who uses it.
type binding struct {
	given, next uint16
	at          time.Time
}

// of is the machine's binding, unless its time is over.
func (b *Bindings) of(mac [6]byte, now time.Time) (e binding, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if e, ok = b.with(mac)[mac]; !ok || now.Sub(e.at) >= heldFor {
		return binding{}, false
	}
	return e, true
}

// with is where a machine's binding is; the caller holds mu.
func (b *Bindings) with(mac [6]byte) map[[6]byte]binding {
	if _, ok := b.known[mac]; ok {
		return b.known
	}
	return b.others
}

// give notes what a machine was told.
func (b *Bindings) give(mac [6]byte, generation uint16, known bool, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	in, out, most := &b.others, &b.known, mostOthers
	if known {
		in, out, most = out, in, mostKnown
	}
	delete(*out, mac)
	if *in == nil {
		*in = make(map[[6]byte]binding)
	}
	if _, had := (*in)[mac]; !had && len(*in) >= most {
		forget(*in, now)
	}
	(*in)[mac] = binding{generation, generation, now}
}

// forget makes room for one more: by one whose time is over, if a look at a few
// finds one.
func forget(all map[[6]byte]binding, now time.Time) {
	var last [6]byte
	looked := 0
	for last = range all {
		if looked++; looked >= mostLooked || now.Sub(all[last].at) >= heldFor {
			break
		}
	}
	delete(all, last)
}

// decline has the machine get its next address, and says whether that is new. An
// address is declined once each time that it is given.
func (b *Bindings) decline(mac [6]byte, generation uint16) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	e, ok := b.with(mac)[mac]
	if !ok || e.given != generation || e.next != generation {
		return false
	}
	e.next++
	b.with(mac)[mac] = e
	return true
}

// Holder is the MAC that an address of the network was given to: lower-case with
// colons. own is the box's address there.
func (b *Bindings) Holder(own netip.Prefix, ip netip.Addr, now time.Time) (mac string, ok bool) {
	m, generation, ok := machineAt(own, ip)
	if !ok || ip == own.Addr() {
		return "", false
	}
	e, ok := b.of(m, now)
	if !ok || e.given != generation {
		return "", false
	}
	return net.HardwareAddr(m[:]).String(), true
}
