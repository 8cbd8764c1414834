// Package inet has what packets need that are made by hand: checksums and byte order.
package inet

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// Sum is the one's complement sum of RFC 1071, going on from start.
func Sum(start uint32, b []byte) uint16 {
	for ; len(b) >= 2; b = b[2:] {
		start += uint32(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		start += uint32(b[0]) << 8
	}
	for start > 0xffff {
		start = start>>16 + start&0xffff
	}
	return uint16(start)
}

// UDPChecksum is the checksum of a UDP header and its payload between addresses,
// source and destination of one IP header together, in network order. The
// header's own checksum counts as it stands: zero, where this is to become it.
func UDPChecksum(addresses, udp []byte) uint16 {
	pseudo := Sum(uint32(unix.IPPROTO_UDP)+uint32(len(udp)), addresses)
	check := ^Sum(uint32(pseudo), udp)
	if check == 0 {
		check = 0xffff // zero is no checksum (RFC 768), which IPv6 forbids
	}
	return check
}

// HostToNet is v as the kernel takes it in network order.
func HostToNet(v uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v))
}
