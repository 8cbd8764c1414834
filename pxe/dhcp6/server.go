package dhcp6

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/bound"
	"github.com/better-compute/site-appliance/pxe/inbox"
	"github.com/better-compute/site-appliance/pxe/limit"
)

const (
	// receiveBuffer takes a burst while a packet is answered.
	receiveBuffer = 1 << 20
	maxPacket     = 2048
	// mostTold is how many declines of one machine are told of in a minute.
	mostTold = 16
	// maxReply fits in the least MTU of IPv6.
	maxReply = 1280 - ipHeader - udpHeader
)

// Server answers the requests of one interface.
type Server struct {
	cfg  Config
	duid dhcpv6.DUID
	// taken are addresses that are no machine's.
	taken map[netip.Addr]bool

	wire *wire
	// port holds the server's port and the multicast group; nothing is read from it.
	port *net.UDPConn

	dropped  limit.Seldom
	declines limit.Minute
	in       inbox.Inbox[packetIn]
}

// packetIn is a packet that waits to be answered.
type packetIn struct {
	data []byte
	from source
}

// Listen opens the sockets. It fails if another server on this host has the port.
func Listen(ctx context.Context, cfg Config) (*Server, error) {
	s := newServer(cfg)
	if err := s.open(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("dhcpv6: %w", err), s.Close())
	}
	return s, nil
}

func newServer(cfg Config) *Server {
	if cfg.Bindings == nil {
		cfg.Bindings = new(Bindings)
	}
	s := &Server{cfg: cfg, taken: map[netip.Addr]bool{cfg.Address.Addr(): true}, declines: limit.Minute{Most: mostTold},
		in: inbox.New[packetIn]()}
	for _, list := range [][]netip.Addr{cfg.DNS, cfg.NTP} {
		for _, a := range list {
			s.taken[a] = true
		}
	}
	return s
}

func (s *Server) open(ctx context.Context) (err error) {
	var mac net.HardwareAddr
	if s.wire, mac, err = openWire(s.cfg.Interface, s.cfg.Address.Addr()); err != nil {
		return err
	}
	s.duid = &dhcpv6.DUIDLL{HWType: iana.HWTypeEthernet, LinkLayerAddr: mac}
	if s.port, err = bound.ListenPacket(ctx, s.cfg.Interface, netip.AddrPortFrom(netip.IPv6Unspecified(), serverPort)); err != nil {
		return err
	}
	raw, err := s.port.SyscallConn()
	if err == nil {
		var attach error
		if err = raw.Control(func(fd uintptr) { attach = filter(int(fd), nothing) }); err == nil {
			err = attach
		}
	}
	if err == nil {
		err = ipv6.NewPacketConn(s.port).JoinGroup(&net.Interface{Index: s.wire.index}, &net.UDPAddr{IP: allServers.AsSlice()})
	}
	if err != nil {
		return fmt.Errorf("join %s on %s: %w", allServers, s.cfg.Interface, err)
	}
	return nil
}

// Close releases the sockets and ends Serve.
func (s *Server) Close() error {
	var all []error
	if s.wire != nil {
		all = append(all, s.wire.Close())
	}
	if s.port != nil {
		all = append(all, s.port.Close())
	}
	return errors.Join(all...)
}

// Serve answers one packet after the other until ctx ends or the socket fails.
func (s *Server) Serve(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { s.wire.Close() })
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { s.answer(ctx) })
	return s.read(ctx)
}

// read sorts what comes in: known machines first, and of no MAC too much.
func (s *Server) read(ctx context.Context) error {
	limits := limit.NewApart()
	buf := make([]byte, maxPacket)
	for {
		data, from, err := s.wire.next(buf)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.ENETDOWN):
			continue // told once; the socket lives on
		case err != nil:
			return fmt.Errorf("dhcpv6: %w", err)
		}
		s.sort(limits, data, from, time.Now())
	}
}

// sort queues one packet, and reports whether it did.
func (s *Server) sort(limits limit.Apart, data []byte, from source, now time.Time) bool {
	mac := net.HardwareAddr(from.mac[:]).String()
	if len(data) < dhcpv6.MessageHeaderSize {
		return false
	}
	from.at = now
	kind, counts := dhcpv6.MessageType(data[0]), from.mac
	switch kind {
	case dhcpv6.MessageTypeRelayForward:
		s.drop("relays are not served", mac)
		return false
	case dhcpv6.MessageTypeDecline, dhcpv6.MessageTypeRelease:
		counts[0] ^= 1 // no station's: those that are forged leave the machine its own
	}
	known := s.cfg.Known(mac)
	if !limits.Allow(counts, known, now) {
		s.drop("one MAC sends too much", mac)
		return false
	}
	if !s.in.Put(known, packetIn{append([]byte(nil), data...), from}) {
		s.drop("too many packets wait", mac)
		return false
	}
	return true
}

func (s *Server) drop(why, mac string) {
	if s.dropped.Fresh(why, s.cfg.Now(), time.Minute) {
		s.cfg.Log.Warn("DHCPv6 packets dropped", "why", why, "mac", mac)
	}
}

// answer works off the queues.
func (s *Server) answer(ctx context.Context) {
	for {
		p, ok := s.in.Next(ctx)
		if !ok {
			return
		}
		data := s.respond(p)
		if data == nil {
			continue
		}
		if err := s.wire.send(p.from, data); err != nil && ctx.Err() == nil {
			s.cfg.Log.Warn("DHCPv6 answer not sent", "mac", net.HardwareAddr(p.from.mac[:]).String(), "to", p.from.addr.String(), "err", err)
		}
	}
}

// respond makes the answer to one packet, nil for none.
func (s *Server) respond(p packetIn) []byte {
	m, err := dhcpv6.MessageFromBytes(p.data)
	if err != nil {
		s.cfg.Log.Debug("DHCPv6 packet dropped", "err", err)
		return nil
	}
	reply := s.handle(m, p.from)
	if reply == nil {
		return nil
	}
	data := reply.ToBytes()
	if len(data) > maxReply {
		s.drop("the answer would be too long", net.HardwareAddr(p.from.mac[:]).String())
		return nil
	}
	return data
}
