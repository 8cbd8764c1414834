package arp

import (
	"encoding/binary"
	"net"
	"net/netip"
)

const (
	headerLen = 14
	packetLen = 28
)

// probe asks who has ip, in an Ethernet frame. The sender tells no address of its
// own, so that nobody's ARP cache changes (RFC 5227, 2.1.1).
func probe(from net.HardwareAddr, ip netip.Addr) []byte {
	b := make([]byte, 60) // the least that goes over a wire
	for i := range 6 {
		b[i] = 0xff
	}
	copy(b[6:], from)
	binary.BigEndian.PutUint16(b[12:], 0x0806)
	a := b[headerLen:]
	binary.BigEndian.PutUint16(a[0:], 1)      // Ethernet
	binary.BigEndian.PutUint16(a[2:], 0x0800) // IPv4
	a[4], a[5] = 6, 4
	binary.BigEndian.PutUint16(a[6:], 1) // request
	copy(a[8:], from)
	target := ip.As4()
	copy(a[24:], target[:])
	return b
}

// parseReply is who says that it has which address. Requests, and what no
// machine can be, are not ok.
func parseReply(frame []byte) (ip netip.Addr, mac net.HardwareAddr, ok bool) {
	if len(frame) < headerLen+packetLen || binary.BigEndian.Uint16(frame[12:]) != 0x0806 {
		return netip.Addr{}, nil, false
	}
	a := frame[headerLen:]
	if binary.BigEndian.Uint16(a[0:]) != 1 || binary.BigEndian.Uint16(a[2:]) != 0x0800 || a[4] != 6 || a[5] != 4 || binary.BigEndian.Uint16(a[6:]) != 2 {
		return netip.Addr{}, nil, false
	}
	mac = net.HardwareAddr(append([]byte(nil), a[8:14]...))
	ip = netip.AddrFrom4([4]byte(a[14:18]))
	zero := mac[0]|mac[1]|mac[2]|mac[3]|mac[4]|mac[5] == 0
	return ip, mac, mac[0]&1 == 0 && !zero && !ip.IsUnspecified() && !ip.IsMulticast()
}
