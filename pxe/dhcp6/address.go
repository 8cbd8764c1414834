package dhcp6

import (
	"encoding/binary"
	"net/netip"
)

// AddressOf is the address of a machine: its MAC stands in the last 64 bits around
// the generation, 0 until somebody else was found to use that one. So an address
// is never two machines', needs no lease file to stay a machine's for ever, and
// says by itself whose it is.
func AddressOf(network netip.Prefix, mac [6]byte, generation uint16) netip.Addr {
	a := network.Masked().Addr().As16()
	copy(a[8:], mac[:3])
	binary.BigEndian.PutUint16(a[11:], generation)
	copy(a[13:], mac[3:])
	return netip.AddrFrom16(a)
}

// machineAt is the inverse of AddressOf.
func machineAt(network netip.Prefix, ip netip.Addr) (mac [6]byte, generation uint16, ok bool) {
	if !ip.Is6() || ip.Zone() != "" || !network.Contains(ip) {
		return mac, 0, false
	}
	a := ip.As16()
	copy(mac[:3], a[8:])
	copy(mac[3:], a[13:])
	return mac, binary.BigEndian.Uint16(a[11:]), ofOne(mac)
}

// ofOne says whether a MAC is one station's.
func ofOne(mac [6]byte) bool { return mac[0]&1 == 0 && mac != [6]byte{} }
