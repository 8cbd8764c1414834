package fleet

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// Ether sends what machines broadcast to DHCP servers, each from its own MAC. It is
// safe for concurrent use.
type Ether struct {
	file *os.File
	to   unix.SockaddrLinklayer
}

// OpenEther opens the interface; it needs root.
func OpenEther(iface string) (*Ether, error) {
	i, err := net.InterfaceByName(iface)
	if err != nil {
		return nil, fmt.Errorf("interface %s: %w", iface, err)
	}
	// Protocol 0: the socket only sends.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open packet socket: %w", os.NewSyscallError("socket", err))
	}
	return &Ether{os.NewFile(uintptr(fd), "ether"), unix.SockaddrLinklayer{Ifindex: i.Index, Halen: 6}}, nil
}

// Close ends the sending.
func (e *Ether) Close() error { return e.file.Close() }

const headers = 14 + 20 + 8

// Broadcast sends a message from mac, which is at 0.0.0.0, port 68, to DHCP servers.
func (e *Ether) Broadcast(mac net.HardwareAddr, message []byte) error {
	return e.SendUDP(mac, netip.MustParseAddrPort("0.0.0.0:68"), netip.MustParseAddrPort("255.255.255.255:67"), message)
}

// SendUDP sends a message in IPv4's UDP from mac to all, whatever its addresses are.
func (e *Ether) SendUDP(mac net.HardwareAddr, from, to netip.AddrPort, message []byte) error {
	b := make([]byte, headers+len(message))
	copy(b, []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
	copy(b[6:], mac)
	binary.BigEndian.PutUint16(b[12:], unix.ETH_P_IP)
	ip := b[14:34]
	ip[0], ip[8], ip[9] = 0x45, 64, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(ip[2:], uint16(20+8+len(message)))
	copy(ip[12:], from.Addr().AsSlice())
	copy(ip[16:], to.Addr().AsSlice())
	sum := uint32(0)
	for i := 0; i < len(ip); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(ip[i:]))
	}
	sum = sum>>16 + sum&0xffff
	binary.BigEndian.PutUint16(ip[10:], ^uint16(sum>>16+sum))
	udp := b[34:headers] // without a checksum
	binary.BigEndian.PutUint16(udp, from.Port())
	binary.BigEndian.PutUint16(udp[2:], to.Port())
	binary.BigEndian.PutUint16(udp[4:], uint16(8+len(message)))
	copy(b[headers:], message)
	return e.Frame(b)
}

// Frame sends a whole frame.
func (e *Ether) Frame(b []byte) error {
	raw, err := e.file.SyscallConn()
	if err != nil {
		return err
	}
	to := e.to
	copy(to.Addr[:], b[:6])
	var sent error
	if err := raw.Control(func(fd uintptr) { sent = unix.Sendto(int(fd), b, 0, &to) }); err != nil {
		return err
	}
	return os.NewSyscallError("sendto", sent)
}
