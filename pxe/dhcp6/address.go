package dhcp6

import (
	"encoding/binary"
	"net"
	"net/netip"
)

// generations are how many addresses one machine has in the network.
const generations = 16

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
func machineAt(network netip.Prefix, ip netip.Addr) (mac [6]byte, ok bool) {
	if !ip.Is6() || ip.Zone() != "" || !network.Contains(ip) {
		return mac, false
	}
	a := ip.As16()
	copy(mac[:3], a[8:])
	copy(mac[3:], a[13:])
	return mac, binary.BigEndian.Uint16(a[11:]) < generations && ofOne(mac)
}

// ofOne says whether a MAC is one station's.
func ofOne(mac [6]byte) bool { return mac[0]&1 == 0 && mac != [6]byte{} }

// Holder is the MAC that an address of the network was made from: lower-case with
// colons. own is the box's address there.
func Holder(own netip.Prefix, ip netip.Addr) (mac string, ok bool) {
	m, ok := machineAt(own, ip)
	if !ok || ip == own.Addr() {
		return "", false
	}
	return net.HardwareAddr(m[:]).String(), true
}
