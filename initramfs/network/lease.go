package network

import (
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

// Lease is what a DHCP server gave.
type Lease struct {
	Address netip.Prefix
	Gateway netip.Addr
	DNS     []netip.Addr
	Server  netip.Addr
	// T1, T2 and Ends are counted from the lease's start (RFC 2131, 4.4.5).
	T1, T2, Ends time.Duration
}

// never is a lease time of all ones: no end.
const never = 0xffffffff * time.Second

// ParseAck reads a server's last word.
func ParseAck(ack *dhcpv4.DHCPv4) (Lease, error) {
	addr, ok := netip.AddrFromSlice(ack.YourIPAddr.To4())
	if !ok || addr.IsUnspecified() || addr.IsMulticast() || addr.IsLoopback() {
		return Lease{}, fmt.Errorf("lease has no usable address (%v)", ack.YourIPAddr)
	}
	mask := ack.SubnetMask()
	ones, bits := net.IPMask(mask).Size()
	if bits != 32 || ones == 0 {
		return Lease{}, fmt.Errorf("lease of %s has no usable subnet mask", addr)
	}
	l := Lease{Address: netip.PrefixFrom(addr, ones)}
	if r := ack.Router(); len(r) > 0 {
		l.Gateway, _ = netip.AddrFromSlice(r[0].To4())
	}
	for _, d := range ack.DNS() {
		if a, ok := netip.AddrFromSlice(d.To4()); ok {
			l.DNS = append(l.DNS, a)
		}
	}
	if s := ack.ServerIdentifier(); s != nil {
		l.Server, _ = netip.AddrFromSlice(s.To4())
	}
	l.Ends = ack.IPAddressLeaseTime(time.Hour)
	if l.Ends < 30*time.Second { // a server that wants us back at once gets half a minute
		l.Ends = 30 * time.Second
	}
	l.T1 = ack.IPAddressRenewalTime(l.Ends / 2)
	l.T2 = ack.IPAddressRebindingTime(l.Ends * 7 / 8)
	if l.T1 <= 0 || l.T1 >= l.T2 || l.T2 >= l.Ends {
		l.T1, l.T2 = l.Ends/2, l.Ends*7/8
	}
	return l, nil
}
