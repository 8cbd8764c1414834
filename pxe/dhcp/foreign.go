package dhcp

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/pxe/inet"
)

// Foreign is a DHCP server on the wire that is not the box.
type Foreign struct {
	// Server is its identifier, ServerMAC where its answer came from, empty if it was
	// only named by a client, and MAC the client that it was seen with.
	Server         netip.Addr
	ServerMAC, MAC string
	// Offered is the address that it gave, not valid if it was only named by a client.
	Offered netip.Addr
}

// ForeignError refuses to serve where another server does.
type ForeignError struct {
	Interface string
	Foreign   Foreign
}

func (e *ForeignError) Error() string {
	return fmt.Sprintf("another DHCP server, %s, answers on %s and offers %s: the box gives no addresses beside it; "+
		"it tries again by itself, once that server is gone or the lan has another dhcp mode or takeover = true",
		e.Foreign.Server, e.Interface, e.Foreign.Offered)
}

// listener hears what servers on the wire send to clients. What the box itself sends it does not hear.
type listener struct {
	file *os.File
	raw  interface {
		Read(func(fd uintptr) bool) error
	}
}

// toClients takes unfragmented UDP to the client's port, of packets that begin with their IP header.
var toClients = []unix.SockFilter{
	{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 9},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.IPPROTO_UDP, Jf: 6},
	{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: 6},
	{Code: unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K, K: 0x3fff, Jt: 4},
	{Code: unix.BPF_LDX | unix.BPF_B | unix.BPF_MSH, K: 0},
	{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_IND, K: 2},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: dhcpv4.ClientPort, Jf: 1},
	{Code: unix.BPF_RET | unix.BPF_K, K: 0xffff},
	{Code: unix.BPF_RET | unix.BPF_K, K: 0},
}

// listen opens the ear on an interface. A promiscuous one hears the answers to
// a made-up MAC too, which a switch sends everywhere.
func listen(iface string, filter []unix.SockFilter, promiscuous bool) (*listener, error) {
	i, err := net.InterfaceByName(iface)
	if err != nil {
		return nil, fmt.Errorf("interface %s: %w", iface, err)
	}
	// Protocol 0 until the filter is on.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open packet socket: %w", os.NewSyscallError("socket", err))
	}
	file := os.NewFile(uintptr(fd), "dhcp listener")
	err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})
	if err == nil && promiscuous {
		err = unix.SetsockoptPacketMreq(fd, unix.SOL_PACKET, unix.PACKET_ADD_MEMBERSHIP, &unix.PacketMreq{Ifindex: int32(i.Index), Type: unix.PACKET_MR_PROMISC})
	}
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: inet.HostToNet(unix.ETH_P_IP), Ifindex: i.Index})
	}
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer)
	}
	l := &listener{file: file}
	if err == nil {
		l.raw, err = file.SyscallConn()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen on %s: %w", iface, err), file.Close())
	}
	return l, nil
}

func (l *listener) Close() error { return l.file.Close() }

// next is the next message of a server to a client, and the MAC that it came from;
// what is none is passed over.
func (l *listener) next(buf []byte) (*dhcpv4.DHCPv4, net.HardwareAddr, error) {
	for {
		n, from, err := l.receive(buf)
		if err != nil {
			return nil, nil, err
		}
		if d, err := dhcpv4.FromBytes(payload(buf[:n])); err == nil && d.OpCode == dhcpv4.OpcodeBootReply {
			return d, from.Addr[:6], nil
		}
	}
}

// payload is what stands in UDP in IPv4, nil for anything torn.
func payload(b []byte) []byte {
	if len(b) < 20 {
		return nil
	}
	head := int(b[0]&0xf) * 4
	if head < 20 || len(b) < head+8 {
		return nil
	}
	b = b[head:]
	if n := int(binary.BigEndian.Uint16(b[4:])); n >= 8 && n <= len(b) {
		return b[8:n]
	}
	return nil
}

// foreignIn is the server that a message to a client is of, false for the box's own.
func foreignIn(d *dhcpv4.DHCPv4, from net.HardwareAddr, own func(netip.Addr) bool) (Foreign, bool) {
	switch d.MessageType() {
	case dhcpv4.MessageTypeOffer, dhcpv4.MessageTypeAck:
	default:
		return Foreign{}, false
	}
	server, ok := addr(d.ServerIdentifier())
	if !ok || own(server) {
		return Foreign{}, false
	}
	f := Foreign{Server: server, ServerMAC: from.String(), MAC: d.ClientHWAddr.String()}
	f.Offered, _ = addr(d.YourIPAddr)
	return f, true
}

// Probing says how long is listened before an address is given away.
type Probing struct {
	// Every is the time between two questions, of which there are Tries, and the
	// last answer is waited for twice as long: servers ping an address first.
	Every time.Duration
	Tries int
}

// DefaultProbing hears a server that pings for three seconds before it offers.
var DefaultProbing = Probing{Every: 2 * time.Second, Tries: 3}

// Probe asks, as a machine that does not exist, whether a server answers on the
// interface. It returns a *ForeignError if one does. It waits for the link
// first, however long that takes: nobody needs an address before.
func Probe(ctx context.Context, iface string, own netip.Addr, p Probing) error {
	if err := waitLink(ctx, iface); err != nil {
		return err
	}
	l, err := listen(iface, toClients, true)
	if err != nil {
		return fmt.Errorf("probe for DHCP servers: %w", err)
	}
	defer l.Close()
	f, err := newFramer(iface, netip.IPv4Unspecified())
	if err != nil {
		return fmt.Errorf("probe for DHCP servers: %w", err)
	}
	defer f.Close()
	ask, err := newQuestion()
	if err != nil {
		return fmt.Errorf("probe for DHCP servers: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	buf := make([]byte, 2048)
	for try := range p.Tries {
		if err := sendUp(ctx, iface, func() error { return ask.send(f) }); err != nil {
			return fmt.Errorf("probe for DHCP servers: %w", err)
		}
		wait := p.Every
		if try == p.Tries-1 {
			wait *= 2
		}
		_ = l.file.SetReadDeadline(time.Now().Add(wait))
		for {
			d, from, err := l.next(buf)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				break
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				return fmt.Errorf("probe for DHCP servers: %w", err)
			}
			if found, ok := foreignIn(d, from, func(a netip.Addr) bool { return a == own }); ok && ask.isAnswer(d) {
				return &ForeignError{iface, found}
			}
		}
	}
	return nil
}

// question is a DISCOVER of a machine that does not exist.
type question struct {
	mac net.HardwareAddr
	xid dhcpv4.TransactionID
}

func newQuestion() (question, error) {
	q := question{mac: make(net.HardwareAddr, 6)}
	if _, err := rand.Read(q.mac); err != nil {
		return q, err
	}
	q.mac[0] = q.mac[0]&^1 | 2 // one station's, and nobody's product
	_, err := rand.Read(q.xid[:])
	return q, err
}

func (q question) send(f *framer) error {
	d, err := dhcpv4.New(dhcpv4.WithMessageType(dhcpv4.MessageTypeDiscover), dhcpv4.WithHwAddr(q.mac), dhcpv4.WithTransactionID(q.xid),
		dhcpv4.WithBroadcast(true), dhcpv4.WithRequestedOptions(dhcpv4.OptionSubnetMask, dhcpv4.OptionRouter))
	if err != nil {
		return err
	}
	return f.sendFrom(dhcpv4.ClientPort, dhcpv4.ServerPort, broadcastMAC, everyone, d.ToBytes())
}

func (q question) isAnswer(d *dhcpv4.DHCPv4) bool {
	return d.TransactionID == q.xid && d.ClientHWAddr.String() == q.mac.String()
}

// linkEvery is how often a link that is down is looked at.
const linkEvery = 200 * time.Millisecond

// sendUp repeats send until the link takes the packet. One that comes or goes at
// the moment says that it is down, or that its queue, which is not there, is full.
func sendUp(ctx context.Context, iface string, send func() error) error {
	for {
		err := send()
		if !errors.Is(err, unix.ENETDOWN) && !errors.Is(err, unix.ENOBUFS) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(linkEvery):
		}
		if err := waitLink(ctx, iface); err != nil {
			return err
		}
	}
}

func waitLink(ctx context.Context, iface string) error {
	for {
		i, err := net.InterfaceByName(iface)
		if err != nil {
			return fmt.Errorf("interface %s: %w", iface, err)
		}
		if i.Flags&net.FlagRunning != 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(linkEvery):
		}
	}
}
