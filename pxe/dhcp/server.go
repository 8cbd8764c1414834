package dhcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/bound"
	"github.com/better-compute/site-appliance/pxe/chain"
	"github.com/better-compute/site-appliance/pxe/inbox"
	"github.com/better-compute/site-appliance/pxe/limit"
)

const (
	// proxyPort is the one that firmware asks a proxy on.
	proxyPort = 4011
	// receiveBuffer takes a burst while a packet is answered.
	receiveBuffer = 1 << 20
	maxPacket     = 2048
	// probation is how long a server that was not heard at the start, over a link
	// that was slow to come, still ends the serving.
	probation = time.Minute
)

// Server answers the requests of one interface.
type Server struct {
	cfg Config
	// door is port 67; nil while another server of this host has it, beside a proxy.
	door    atomic.Pointer[door]
	proxied *net.UDPConn // port 4011, in mode Proxy
	frame   *framer
	ear     *listener // in mode Authoritative

	holders holders
	logged  limit.Seldom
	others  limit.Seldom

	in      inbox.Inbox[packetIn]
	dropped limit.Seldom
}

// door is port 67: what clients send themselves, what relays pass on, and apart from
// them, what comes from another MAC than it names.
type door struct {
	*net.UDPConn
	strangers *listener
}

func (d *door) Close() error { return errors.Join(d.UDPConn.Close(), d.strangers.Close()) }

func openDoor(ctx context.Context, iface string) (*door, error) {
	conn, err := bound.ListenPacket(ctx, iface, netip.AddrPortFrom(netip.IPv4Unspecified(), dhcpv4.ServerPort))
	if err != nil {
		return nil, err
	}
	_ = conn.SetReadBuffer(receiveBuffer)
	strangers, err := listen(iface, strange, false)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	d := &door{conn, strangers}
	if err := onlyOwn(conn); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// packetIn is a packet that waits to be answered.
type packetIn struct {
	data []byte
	from source
}

// Listen opens the sockets. It fails if another server on this host has port
// 67; a proxy then serves port 4011 alone.
func Listen(ctx context.Context, cfg Config) (*Server, error) {
	s := newServer(cfg)
	err := s.open(ctx)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("dhcp: %w", err), s.Close())
	}
	return s, nil
}

func newServer(cfg Config) *Server {
	if cfg.Chains == nil {
		cfg.Chains = new(chain.Memory)
	}
	if cfg.Probing.Tries == 0 {
		cfg.Probing = DefaultProbing
	}
	return &Server{cfg: cfg, in: inbox.New[packetIn]()}
}

func (s *Server) open(ctx context.Context) (err error) {
	if s.cfg.Mode == Proxy {
		if s.proxied, err = bound.ListenPacket(ctx, s.cfg.Interface, netip.AddrPortFrom(netip.IPv4Unspecified(), proxyPort)); err != nil {
			return err
		}
	}
	d, err := openDoor(ctx, s.cfg.Interface)
	switch {
	case errors.Is(err, unix.EADDRINUSE) && s.cfg.Mode == Proxy:
		s.cfg.Log.Warn("another DHCP server of this host has port 67: until it leaves it, only what comes to port 4011 is answered", "err", err)
	case err != nil:
		return err
	default:
		s.door.Store(d)
	}
	if s.frame, err = newFramer(s.cfg.Interface, s.cfg.Local.Server); err != nil {
		return err
	}
	if s.cfg.Mode == Authoritative {
		s.ear, err = listen(s.cfg.Interface, toClients, false)
	}
	return err
}

// Close releases the sockets and ends Serve.
func (s *Server) Close() error {
	var all []error
	if d := s.door.Load(); d != nil {
		all = append(all, d.Close())
	}
	if s.proxied != nil {
		all = append(all, s.proxied.Close())
	}
	if s.frame != nil {
		all = append(all, s.frame.Close())
	}
	if s.ear != nil {
		all = append(all, s.ear.Close())
	}
	return errors.Join(all...)
}

// Serve answers one packet after the other until ctx ends, a socket fails or,
// in its first minute, another server is heard: a *ForeignError then.
func (s *Server) Serve(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	run := func(f func(context.Context) error) {
		wg.Go(func() {
			if err := f(ctx); err != nil && ctx.Err() == nil {
				cancel(err)
			}
		})
	}
	through := func(d *door) {
		context.AfterFunc(ctx, func() { d.Close() }) // ctx ends with Serve
		run(func(ctx context.Context) error { return s.read(ctx, d.UDPConn, false) })
		run(func(ctx context.Context) error { return s.readStrange(ctx, d.strangers) })
	}
	if d := s.door.Load(); d != nil {
		through(d)
	} else {
		run(func(ctx context.Context) error {
			d, err := s.awaitDoor(ctx)
			if err == nil {
				through(d)
			}
			return err
		})
	}
	if s.proxied != nil {
		stop := context.AfterFunc(ctx, func() { s.proxied.Close() })
		defer stop()
		run(func(ctx context.Context) error { return s.read(ctx, s.proxied, true) })
	}
	if s.ear != nil {
		stop := context.AfterFunc(ctx, func() { s.ear.Close() })
		defer stop()
		run(s.watch)
	}
	run(s.answer)
	<-ctx.Done()
	wg.Wait()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("dhcp: %w", err)
	}
	return nil
}

// doorEvery is how often a proxy tries whether port 67 is free by now.
const doorEvery = 5 * time.Second

// awaitDoor waits until the other server of this host has left port 67.
func (s *Server) awaitDoor(ctx context.Context) (*door, error) {
	for {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(doorEvery):
		}
		d, err := openDoor(ctx, s.cfg.Interface)
		if errors.Is(err, unix.EADDRINUSE) {
			continue
		}
		if err != nil {
			return nil, err
		}
		s.door.Store(d)
		s.cfg.Log.Info("port 67 is free: what comes there is answered too")
		return d, nil
	}
}

// read sorts what comes in: known machines first, and of no MAC too much. It
// never waits for an answer to be made, so that a flood fills its own queue
// and not the kernel's.
func (s *Server) read(ctx context.Context, conn *net.UDPConn, proxy bool) error {
	limits := limit.NewApart()
	buf := make([]byte, maxPacket)
	for {
		n, from, err := conn.ReadFromUDPAddrPort(buf)
		if ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, net.ErrClosed) {
			return err
		}
		if err != nil {
			// Such as ENETDOWN while the link flaps: the socket lives on.
			s.cfg.Log.Warn("DHCP receive failed", "err", err)
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(time.Second):
			}
			continue
		}
		s.sort(limits, buf[:n], source{addr: netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), proxy: proxy}, time.Now())
	}
}

// sort queues one packet, and reports whether it did. What a relay says is bounded
// apart from what the machine itself does.
func (s *Server) sort(limits limit.Apart, data []byte, from source, now time.Time) bool {
	const hardware = 28 // chaddr
	if len(data) < bootpHeader {
		return false
	}
	mac := [6]byte(data[hardware:])
	from.at = now
	if [4]byte(data[giaddr:]) != [4]byte{} {
		mac[0] ^= 1 // no client's
	}
	return s.enqueue(limits, mac, data, from, now)
}

// enqueue bounds what is counted as who's.
func (s *Server) enqueue(limits limit.Apart, who [6]byte, data []byte, from source, now time.Time) bool {
	const hardware = 28 // chaddr
	mac := [6]byte(data[hardware:])
	name := net.HardwareAddr(mac[:]).String()
	known := s.known(name)
	if !limits.Allow(who, known, now) {
		s.drop("one MAC sends too much", name)
		return false
	}
	if !s.in.Put(known, packetIn{append([]byte(nil), data...), from}) {
		s.drop("too many packets wait", name)
		return false
	}
	return true
}

func (s *Server) drop(why, mac string) {
	if s.dropped.Fresh(why, s.cfg.Now(), time.Minute) {
		s.cfg.Log.Warn("DHCP packets dropped", "why", why, "mac", mac)
	}
}

// answer works off the queues.
func (s *Server) answer(ctx context.Context) error {
	for {
		p, ok := s.in.Next(ctx)
		if !ok {
			return nil
		}
		s.one(p)
	}
}

// respond makes the answer to one packet, false for none.
func (s *Server) respond(p packetIn) (answer, []byte, bool) {
	req, err := dhcpv4.FromBytes(p.data)
	if err != nil {
		s.cfg.Log.Debug("DHCP packet dropped", "err", err)
		return answer{}, nil, false
	}
	a, ok := s.handle(req, p.from)
	if !ok {
		return answer{}, nil, false
	}
	return a, encode(a.reply, a.most), true
}

func (s *Server) one(p packetIn) {
	a, data, ok := s.respond(p)
	switch {
	case !ok:
	case !a.kept:
		s.send(a, data)
	case !s.cfg.Leases.Commit(a.reply.ClientHWAddr.String(), func(error) { s.send(a, data) }):
		s.drop("the disk lags behind", a.reply.ClientHWAddr.String())
	}
}

// send is called from the server's and from the leases' goroutine.
func (s *Server) send(a answer, data []byte) {
	conn := s.proxied
	if d := s.door.Load(); d != nil && !a.to.proxy {
		conn = d.UDPConn
	}
	var err error
	if a.to.mac != nil {
		err = s.frame.send(a.to.mac, a.to.addr.Addr(), data)
	} else {
		// From the address that the client knows, whatever else the interface has.
		source := unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: s.cfg.Local.Server.As4()})
		_, _, err = conn.WriteMsgUDPAddrPort(data, source, a.to.addr)
	}
	if err != nil && !errors.Is(err, net.ErrClosed) {
		s.cfg.Log.Warn("DHCP answer not sent", "mac", a.reply.ClientHWAddr.String(), "to", a.to.addr.String(), "err", err)
	}
}

// watch hears other servers. In the first minute it also asks for them: a
// switch may let nothing through for half a minute after the link came up.
func (s *Server) watch(ctx context.Context) error {
	ask, err := newQuestion()
	if err != nil {
		return err
	}
	if !s.cfg.Takeover {
		var wg sync.WaitGroup
		defer wg.Wait()
		ctx, cancel := context.WithTimeout(ctx, probation)
		defer cancel()
		wg.Go(func() { s.askOn(ctx, ask) })
	}
	buf := make([]byte, maxPacket)
	for {
		d, from, err := s.ear.next(buf)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		f, ok := foreignIn(d, from, func(a netip.Addr) bool { return a == s.cfg.Local.Server })
		if !ok {
			continue
		}
		if ask.isAnswer(d) {
			return &ForeignError{s.cfg.Interface, f}
		}
		s.foreign(f)
	}
}

// askOn asks for other servers, less and less often, until ctx ends. The box's
// own answers are not heard, and cost it nothing: the question is of no MAC
// that could take an address.
func (s *Server) askOn(ctx context.Context, ask question) {
	frame, err := newFramer(s.cfg.Interface, netip.IPv4Unspecified())
	if err != nil {
		return // the interface went away, which the sockets notice
	}
	defer frame.Close()
	for wait := s.cfg.Probing.Every; ; wait *= 2 {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		_ = ask.send(frame) // a link that is down now may be up for the next
	}
}

// foreignEvery is how often one other server is told of.
const foreignEvery = 10 * time.Minute

func (s *Server) foreign(f Foreign) {
	if s.cfg.Mode != Authoritative || s.cfg.Foreign == nil || !s.others.Fresh(f.Server.String(), s.cfg.Now(), foreignEvery) {
		return
	}
	s.cfg.Log.Warn("another DHCP server is on the wire", "server", f.Server.String(), "server_mac", f.ServerMAC, "mac", f.MAC, "offered", f.Offered.String())
	s.cfg.Foreign(f)
}

func (s *Server) told(what string) bool { return !s.logged.Fresh(what, s.cfg.Now(), time.Second) }
