package dhcp

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/pxe/inet"
)

// framer sends UDP packets to a MAC that answers no ARP yet. It is safe for concurrent use.
type framer struct {
	index int
	src   netip.Addr

	mu sync.Mutex
	fd int // -1 once it is closed: the number may be another file's by then
}

func newFramer(iface string, src netip.Addr) (*framer, error) {
	i, err := net.InterfaceByName(iface)
	if err != nil {
		return nil, fmt.Errorf("interface %s: %w", iface, err)
	}
	// Protocol 0: the socket sends and receives nothing.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open packet socket: %w", os.NewSyscallError("socket", err))
	}
	return &framer{fd: fd, index: i.Index, src: src}, nil
}

func (f *framer) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fd < 0 {
		return net.ErrClosed
	}
	fd := f.fd
	f.fd = -1
	return unix.Close(fd)
}

// send sends from the server's port to the client's.
func (f *framer) send(mac net.HardwareAddr, dst netip.Addr, payload []byte) error {
	return f.sendFrom(dhcpv4.ServerPort, dhcpv4.ClientPort, mac, dst, payload)
}

func (f *framer) sendFrom(from, port uint16, mac net.HardwareAddr, dst netip.Addr, payload []byte) error {
	to := unix.SockaddrLinklayer{Protocol: inet.HostToNet(unix.ETH_P_IP), Ifindex: f.index, Halen: 6}
	copy(to.Addr[:], mac)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fd < 0 {
		return net.ErrClosed
	}
	return os.NewSyscallError("sendto", unix.Sendto(f.fd, packet(netip.AddrPortFrom(f.src, from), netip.AddrPortFrom(dst, port), payload), 0, &to))
}

// packet is payload in UDP in IPv4, with both checksums.
func packet(src, dst netip.AddrPort, payload []byte) []byte {
	const ipLen, udpLen = 20, 8
	b := make([]byte, ipLen+udpLen+len(payload))
	ip, udp := b[:ipLen], b[ipLen:]
	ip[0] = 0x45
	ip[1] = 0xc0 // internetwork control, as DHCP servers mark their answers
	binary.BigEndian.PutUint16(ip[2:], uint16(len(b)))
	ip[8], ip[9] = 64, unix.IPPROTO_UDP
	copy(ip[12:], src.Addr().AsSlice())
	copy(ip[16:], dst.Addr().AsSlice())
	binary.BigEndian.PutUint16(ip[10:], ^inet.Sum(0, ip))

	binary.BigEndian.PutUint16(udp, src.Port())
	binary.BigEndian.PutUint16(udp[2:], dst.Port())
	binary.BigEndian.PutUint16(udp[4:], uint16(len(udp)))
	copy(udp[udpLen:], payload)
	binary.BigEndian.PutUint16(udp[6:], inet.UDPChecksum(ip[12:20], udp))
	return b
}
