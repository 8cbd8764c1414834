// Package lease gives every MAC one address of a pool and remembers it on disk.
package lease

import (
	"errors"
	"net/netip"
	"slices"
	"time"
)

const (
	// Hold is how long an offered address waits for its request.
	Hold = 2 * time.Minute
	// quarantine is how long an address that is in use elsewhere stays out of use.
	quarantine = 10 * time.Minute

	maxPool = 1 << 16
)

// ErrFull says that every address of the pool is in use.
var ErrFull = errors.New("the address pool is full")

// ErrTaken says that the address is outside of the pool or another machine's.
var ErrTaken = errors.New("the address is not available")

// Pool is a range of addresses, both ends included.
type Pool struct {
	// Name tells the pools of a Database apart.
	Name string
	// Subnet is where reservations outside of the range may lie. A pool that has
	// a subnet needs no range: it gives out what is reserved, and nothing else.
	Subnet      netip.Prefix
	First, Last netip.Addr
	// Exclude are addresses inside that are never given out, such as the box's own.
	Exclude []netip.Addr
}

// Size is the number of addresses from First to Last, 0 if that is no IPv4 range.
func (p Pool) Size() int {
	if !p.First.Is4() || !p.Last.Is4() || p.Last.Less(p.First) {
		return 0
	}
	return int(number(p.Last)) - int(number(p.First)) + 1
}

func (p Pool) within(ip netip.Addr) bool {
	return ip.Is4() && p.First.Is4() && !ip.Less(p.First) && !p.Last.Less(ip)
}

func (p Pool) holds(ip netip.Addr) bool { return p.within(ip) && !slices.Contains(p.Exclude, ip) }

func number(ip netip.Addr) uint32 {
	b := ip.As4()
	return uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
}

func address(n uint32) netip.Addr {
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
}
