package inet

import (
	"encoding/binary"
	"testing"
)

func TestSum(t *testing.T) {
	// The example of RFC 1071, section 3.
	if got := Sum(0, []byte{0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7}); got != 0xddf2 {
		t.Errorf("Sum = %#x, want 0xddf2", got)
	}
	if got, want := Sum(0, []byte{1, 2, 3}), Sum(0, []byte{1, 2, 3, 0}); got != want {
		t.Errorf("Sum of three bytes = %#x, want that of them and a zero, %#x", got, want)
	}
}

func TestUDPChecksum(t *testing.T) {
	addresses := []byte{10, 0, 0, 1, 10, 0, 0, 2}
	udp := []byte{0, 67, 0, 68, 0, 10, 0, 0, 'h', 'i'}
	check := UDPChecksum(addresses, udp)
	binary.BigEndian.PutUint16(udp[6:], check)
	// What is right sums up to all ones with its checksum in place.
	if got := Sum(uint32(Sum(17+uint32(len(udp)), addresses)), udp); got != 0xffff {
		t.Errorf("with its checksum %#x the packet sums up to %#x, want 0xffff", check, got)
	}
	// One that would be zero is sent as all ones: 17 + 8 + 0xffde + 8 is 0xffff.
	if got := UDPChecksum(make([]byte, 8), []byte{0xff, 0xde, 0, 0, 0, 8, 0, 0}); got != 0xffff {
		t.Errorf("UDPChecksum = %#x, want 0xffff for zero", got)
	}
}

func TestHostToNet(t *testing.T) {
	var b [2]byte
	binary.NativeEndian.PutUint16(b[:], HostToNet(0x0800))
	if b != [2]byte{0x08, 0x00} {
		t.Errorf("HostToNet(0x0800) lies in memory as %x, want 0800", b)
	}
}
