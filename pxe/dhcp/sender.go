package dhcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/pxe/limit"
)

// A client on the wire sends from the MAC that it names, and a flood in another's
// name does not. The kernel tells the two apart, at a cost that no flood feels:
// the server's socket takes the first and what relays pass on, a packet socket the
// rest.

// fromEthernet is where a filter finds the frame's own header.
const fromEthernet = ^uint32(0x200000 - 1)

// sameSender is the end of a filter: same if the frame comes from the MAC that
// stands at, else other. Both are what the filter keeps. at may use X; scratch
// places 0 and 1 are taken.
func sameSender(at func(offset uint32) []unix.SockFilter, same, other uint32) []unix.SockFilter {
	const hardware = 28
	prog := append(at(hardware), unix.SockFilter{Code: unix.BPF_ST, K: 0})
	prog = append(prog, at(hardware+2)...)
	return append(prog,
		unix.SockFilter{Code: unix.BPF_ST, K: 1},
		unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: fromEthernet + 6},
		unix.SockFilter{Code: unix.BPF_LDX | unix.BPF_MEM, K: 0},
		unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_X, Jf: 4},
		unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: fromEthernet + 8},
		unix.SockFilter{Code: unix.BPF_LDX | unix.BPF_MEM, K: 1},
		unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_X, Jf: 1},
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: same},
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: other})
}

const giaddr = 24 // in the message

// own takes, on the server's socket, what a relay passed on and what a client sent
// itself. Such a filter begins at the UDP header.
var own = append([]unix.SockFilter{
	{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 8 + giaddr},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: 0, Jt: 1},
	{Code: unix.BPF_RET | unix.BPF_K, K: 0xffff},
}, sameSender(func(offset uint32) []unix.SockFilter {
	return []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 8 + offset}}
}, 0xffff, 0)...)

// strange takes, on a packet socket, unfragmented UDP to the server's port that no
// relay passed on and that comes from another MAC than it names.
var strange = append([]unix.SockFilter{
	{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 9},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.IPPROTO_UDP, Jf: 7},
	{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: 6},
	{Code: unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K, K: 0x3fff, Jt: 5},
	{Code: unix.BPF_LDX | unix.BPF_B | unix.BPF_MSH, K: 0},
	{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_IND, K: 2},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: dhcpv4.ServerPort, Jf: 2},
	{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_IND, K: 8 + giaddr},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: 0, Jt: 1},
	{Code: unix.BPF_RET | unix.BPF_K, K: 0},
}, sameSender(func(offset uint32) []unix.SockFilter {
	return []unix.SockFilter{{Code: unix.BPF_LDX | unix.BPF_B | unix.BPF_MSH, K: 0}, {Code: unix.BPF_LD | unix.BPF_W | unix.BPF_IND, K: 8 + offset}}
}, 0, 0xffff)...)

// onlyOwn has the socket take what own does.
func onlyOwn(conn *net.UDPConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var opt error
	err = raw.Control(func(fd uintptr) {
		opt = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(own)), Filter: &own[0]})
	})
	if err = errors.Join(err, opt); err != nil {
		return fmt.Errorf("tell senders apart: %w", err)
	}
	return nil
}

// readStrange sorts what comes from another MAC than it names. Of a machine that
// is known it is dropped, since that can speak for itself. Some of the rest is well
// meant: boxes and others that look for servers make up a MAC, and what a machine
// behind a relay renews comes from its router.
func (s *Server) readStrange(ctx context.Context, strangers *listener) error {
	limits := limit.NewApart()
	buf := make([]byte, maxPacket)
	for {
		n, from, err := strangers.receive(buf)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		const source = 12 // in the IP header
		data := payload(buf[:n])
		if len(data) < bootpHeader {
			continue
		}
		head := buf[int(buf[0]&0xf)*4:]
		at := netip.AddrPortFrom(netip.AddrFrom4([4]byte(buf[source:])), uint16(head[0])<<8|uint16(head[1]))
		s.sortStrange(limits, data, [6]byte(from.Addr[:6]), at, time.Now())
	}
}

func (s *Server) sortStrange(limits limit.Apart, data []byte, frame [6]byte, from netip.AddrPort, now time.Time) bool {
	const ciaddr, hardware = 12, 28
	mac := [6]byte(data[hardware:])
	if name := net.HardwareAddr(mac[:]).String(); s.known(name) && holding(s.cfg.Relayed, netip.AddrFrom4([4]byte(data[ciaddr:]))) == nil {
		s.drop("another MAC, "+net.HardwareAddr(frame[:]).String()+", speaks for the machine", name)
		return false
	}
	return s.enqueue(limits, mac, data, source{addr: from}, now)
}

// receive is the next packet, and who sent it.
func (l *listener) receive(buf []byte) (n int, from *unix.SockaddrLinklayer, err error) {
	for {
		var sender unix.Sockaddr
		if rerr := l.raw.Read(func(fd uintptr) bool {
			n, sender, err = unix.Recvfrom(int(fd), buf, 0)
			return !errors.Is(err, unix.EAGAIN)
		}); rerr != nil {
			return 0, nil, rerr
		}
		switch from, ok := sender.(*unix.SockaddrLinklayer); {
		case errors.Is(err, unix.ENETDOWN): // told once; the socket lives on
		case err != nil:
			return 0, nil, os.NewSyscallError("recvfrom", err)
		case ok && n >= 20:
			return n, from, nil
		}
	}
}
