// Package reach decides which addresses the box dials on somebody else's word:
// one host's own, and neither a BMC's nor one that is the box itself.
package reach

import (
	"net"
	"net/netip"
	"slices"

	"github.com/better-compute/site-appliance/bmc/addressbook"
)

// Refuse says why nothing that somebody else names may be fetched from an
// address, whatever network it lies in; empty: it may. own are the box's addresses.
func Refuse(a netip.Addr, own []netip.Addr, isBMC func(netip.Addr) bool) string {
	switch {
	case a.Zone() != "":
		return "has a zone"
	case a.Is4In6():
		return "is an IPv4 address in IPv6's form"
	case a.IsLoopback():
		return "is the box itself"
	case a.IsUnspecified(), a.IsMulticast(), a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return "is no address of one host"
	case a.IsLinkLocalUnicast():
		return "is a link-local address"
	case addressbook.Translated(a):
		return "is an IPv6 address that stands for an IPv4 one"
	case slices.Contains(own, a):
		return "is the box itself"
	case isBMC(a):
		return "is a BMC"
	}
	return ""
}

// Own are the addresses of all the box's interfaces.
func Own() ([]netip.Addr, error) {
	list, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	var out []netip.Addr
	for _, a := range list {
		if n, ok := a.(*net.IPNet); ok {
			if ip, ok := netip.AddrFromSlice(n.IP); ok {
				out = append(out, ip.Unmap())
			}
		}
	}
	return out, nil
}
