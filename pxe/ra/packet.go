package ra

import (
	"encoding/binary"
	"net"
	"net/netip"
	"time"
)

const (
	typeSolicitation, typeAdvertisement = 133, 134

	optionSource, optionPrefix, optionMTU = 1, 3, 5

	// maxHops is the hop limit that proves that a packet crossed no router (RFC 4861, 6.1).
	maxHops = 255

	managed, other = 0x80, 0x40 // addresses, and all else, by DHCPv6
	onLink         = 0x80
	// Half an hour of lost advertisements passes before the network counts as gone.
	prefixLifetime = time.Hour
)

// advertisement says that the network is on the link, and that addresses and all
// else come by DHCPv6. The sender is no router: nothing is sent through it.
func advertisement(network netip.Prefix, mac net.HardwareAddr, mtu uint32) []byte {
	b := make([]byte, 16, 64)
	b[0] = typeAdvertisement
	b[4] = 64 // the hop limit that machines are to use
	b[5] = managed | other
	// Router lifetime, reachable time and retransmission timer: 0, no router and nothing said.
	if len(mac) == 6 {
		b = append(append(b, optionSource, 1), mac...)
	}
	if mtu != 0 {
		b = binary.BigEndian.AppendUint32(append(b, optionMTU, 1, 0, 0), mtu)
	}
	// Not autonomous: a machine has the one address that the box knows it by.
	b = append(b, optionPrefix, 4, byte(network.Bits()), onLink)
	b = binary.BigEndian.AppendUint32(b, uint32(prefixLifetime/time.Second))
	b = binary.BigEndian.AppendUint32(b, uint32(prefixLifetime/time.Second))
	b = append(b, 0, 0, 0, 0)
	return append(b, network.Masked().Addr().AsSlice()...)
}

// isSolicitation judges a packet as RFC 4861, 6.1.1, has it. The kernel has
// looked at the checksum.
func isSolicitation(b []byte, hops int, from netip.Addr) bool {
	if len(b) < 8 || b[0] != typeSolicitation || b[1] != 0 || hops != maxHops {
		return false
	}
	for options := b[8:]; len(options) > 0; {
		if len(options) < 2 {
			return false
		}
		n := int(options[1]) * 8
		if n == 0 || n > len(options) || options[0] == optionSource && from.IsUnspecified() {
			return false
		}
		options = options[n:]
	}
	return true
}

// isAdvertisement judges whether a packet is a router's, which proves that it crossed none
// (RFC 4861, 6.1.2); what it says does not matter here.
func isAdvertisement(b []byte, hops int, from netip.Addr) bool {
	return len(b) >= 16 && b[0] == typeAdvertisement && b[1] == 0 && hops == maxHops && from.IsLinkLocalUnicast()
}

// linkLocal is the address that firmware makes from its MAC (RFC 4291, appendix A).
func linkLocal(mac net.HardwareAddr) netip.Addr {
	return netip.AddrFrom16([16]byte{0xfe, 0x80, 8: mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]})
}

// solicitor is the MAC that a good solicitation says it comes from.
func solicitor(b []byte) (mac net.HardwareAddr, ok bool) {
	for options := b[8:]; len(options) > 0; options = options[int(options[1])*8:] {
		if options[0] == optionSource && options[1] == 1 {
			return net.HardwareAddr(options[2:8]), true
		}
	}
	return nil, false
}
