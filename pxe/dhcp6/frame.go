package dhcp6

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/pxe/inet"
)

const (
	clientPort, serverPort = 546, 547
	ipHeader, udpHeader    = 40, 8
)

// toServers takes UDP to the server's port, of packets that begin with their IPv6
// header and have no other.
var toServers = []unix.SockFilter{
	{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 6},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.IPPROTO_UDP, Jf: 3},
	{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: ipHeader + 2},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: serverPort, Jf: 1},
	{Code: unix.BPF_RET | unix.BPF_K, K: 0xffff},
	{Code: unix.BPF_RET | unix.BPF_K, K: 0},
}

// nothing takes no packet at all.
var nothing = []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 0}}

// wire reads and writes the frames of one interface: they say by which MAC a
// packet came, which no other socket does.
type wire struct {
	file  *os.File
	index int
	iface string
	own   netip.Addr // the fallback as source
	raw   interface {
		Read(func(fd uintptr) bool) error
		Write(func(fd uintptr) bool) error
	}

	local  netip.Addr
	looked time.Time
}

func openWire(iface string, own netip.Addr) (*wire, net.HardwareAddr, error) {
	i, err := net.InterfaceByName(iface)
	if err != nil {
		return nil, nil, fmt.Errorf("interface %s: %w", iface, err)
	}
	if len(i.HardwareAddr) != 6 {
		return nil, nil, fmt.Errorf("interface %s has no Ethernet address", iface)
	}
	// Protocol 0 until the filter is on.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("open packet socket: %w", os.NewSyscallError("socket", err))
	}
	w := &wire{file: os.NewFile(uintptr(fd), "dhcpv6 wire"), index: i.Index, iface: iface, own: own}
	err = filter(fd, toServers)
	if err == nil {
		// An old kernel or a low bound only shortens the bursts that are taken.
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer)
		err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: inet.HostToNet(unix.ETH_P_IPV6), Ifindex: i.Index})
	}
	if err == nil {
		w.raw, err = w.file.SyscallConn()
	}
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("listen on %s: %w", iface, err), w.file.Close())
	}
	return w, i.HardwareAddr, nil
}

func filter(fd int, prog []unix.SockFilter) error {
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]})
}

func (w *wire) Close() error { return w.file.Close() }

// next is the next message, in buf, and whence it came.
func (w *wire) next(buf []byte) (message []byte, from source, err error) {
	for {
		var n int
		var sender unix.Sockaddr
		var got error
		if err := w.raw.Read(func(fd uintptr) bool {
			n, sender, got = unix.Recvfrom(int(fd), buf, 0)
			return !errors.Is(got, unix.EAGAIN)
		}); err != nil {
			return nil, source{}, err
		}
		if got != nil {
			return nil, source{}, os.NewSyscallError("recvfrom", got)
		}
		ll, ok := sender.(*unix.SockaddrLinklayer)
		// A port that is promiscuous hears what is meant for other MACs.
		if !ok || ll.Halen != 6 || ll.Pkttype != unix.PACKET_HOST && ll.Pkttype != unix.PACKET_MULTICAST {
			continue
		}
		if message, from, ok = parseFrame(buf[:n]); ok {
			from.mac = [6]byte(ll.Addr[:6])
			return message, from, nil
		}
	}
}

var allServers = netip.MustParseAddr("ff02::1:2")

// parseFrame cuts the message out of UDP in IPv6. The checksum is not looked at:
// of packets that never left this computer it is not made.
func parseFrame(b []byte) (message []byte, from source, ok bool) {
	if len(b) < ipHeader+udpHeader || b[0]>>4 != 6 || b[6] != unix.IPPROTO_UDP {
		return nil, from, false
	}
	udp := b[ipHeader:]
	n := int(binary.BigEndian.Uint16(udp[4:]))
	if binary.BigEndian.Uint16(udp[2:]) != serverPort || n < udpHeader || n > len(udp) || n > int(binary.BigEndian.Uint16(b[4:])) {
		return nil, from, false
	}
	from.addr = netip.AddrFrom16([16]byte(b[8:24]))
	to := netip.AddrFrom16([16]byte(b[24:40]))
	from.group = to == allServers
	if a := from.addr; a.IsUnspecified() || a.IsMulticast() || a.IsLoopback() || a.Is4In6() || to.IsMulticast() && !from.group {
		return nil, from, false
	}
	return udp[udpHeader:n], from, true
}

// send answers to the MAC that asked.
func (w *wire) send(to source, payload []byte) error {
	sa := unix.SockaddrLinklayer{Protocol: inet.HostToNet(unix.ETH_P_IPV6), Ifindex: w.index, Halen: 6}
	copy(sa.Addr[:], to.mac[:])
	packet := frame(w.source(), to.addr, payload)
	var sent error
	if err := w.raw.Write(func(fd uintptr) bool {
		sent = unix.Sendto(int(fd), packet, 0, &sa)
		return !errors.Is(sent, unix.EAGAIN)
	}); err != nil {
		return err
	}
	return os.NewSyscallError("sendto", sent)
}

// source is the link-local address that answers come from. The kernel makes it
// when the link comes up, and may make another.
func (w *wire) source() netip.Addr {
	const every = 5 * time.Second
	if now := time.Now(); w.looked.IsZero() || now.Sub(w.looked) > every {
		w.looked, w.local = now, linkLocal(w.iface)
	}
	if w.local.IsValid() {
		return w.local
	}
	return w.own
}

func linkLocal(iface string) netip.Addr {
	i, err := net.InterfaceByName(iface)
	if err != nil {
		return netip.Addr{}
	}
	addrs, err := i.Addrs()
	if err != nil {
		return netip.Addr{}
	}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is6() && p.Addr().IsLinkLocalUnicast() {
			return p.Addr()
		}
	}
	return netip.Addr{}
}

// frame is payload in UDP in IPv6, from the server's port to the client's.
func frame(src, dst netip.Addr, payload []byte) []byte {
	b := make([]byte, ipHeader+udpHeader+len(payload))
	udp := b[ipHeader:]
	b[0] = 0x6c // version 6, and internetwork control, as routers' own words
	binary.BigEndian.PutUint16(b[4:], uint16(len(udp)))
	b[6], b[7] = unix.IPPROTO_UDP, 64
	copy(b[8:], src.AsSlice())
	copy(b[24:], dst.AsSlice())
	binary.BigEndian.PutUint16(udp, serverPort)
	binary.BigEndian.PutUint16(udp[2:], clientPort)
	binary.BigEndian.PutUint16(udp[4:], uint16(len(udp)))
	copy(udp[udpHeader:], payload)
	binary.BigEndian.PutUint16(udp[6:], inet.UDPChecksum(b[8:40], udp))
	return b
}
