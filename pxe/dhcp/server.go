package dhcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/bound"
)

const (
	// proxyPort is the one that firmware asks a proxy on.
	proxyPort = 4011
	// Waiting packets of known machines, and of others. What does not fit is lost,
	// and clients ask again.
	maxKnown, maxUnknown = 512, 2048
	// receiveBuffer takes a burst while a packet is answered.
	receiveBuffer = 1 << 20
	maxPacket     = 2048
	// probation is how long a server that was not heard at the start, over a link
	// that was slow to come, still ends the serving.
	probation = time.Minute
)

// Server answers the requests of one interface.
type Server struct {
	cfg     Config
	conn    *net.UDPConn // nil where another server of this host has port 67
	proxied *net.UDPConn // port 4011, in mode Proxy
	frame   *framer
	ear     *listener // in mode Authoritative

	chains  chains
	holders holders
	logged  seldom
	others  seldom

	// first are of known machines
	first, later chan packetIn
	dropped      seldom
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
	if cfg.Probing.Tries == 0 {
		cfg.Probing = DefaultProbing
	}
	return &Server{cfg: cfg, first: make(chan packetIn, maxKnown), later: make(chan packetIn, maxUnknown)}
}

func (s *Server) open(ctx context.Context) (err error) {
	at := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(netip.IPv4Unspecified(), port) }
	if s.cfg.Mode == Proxy {
		if s.proxied, err = bound.ListenPacket(ctx, s.cfg.Interface, at(proxyPort)); err != nil {
			return err
		}
	}
	s.conn, err = bound.ListenPacket(ctx, s.cfg.Interface, at(dhcpv4.ServerPort))
	switch {
	case errors.Is(err, unix.EADDRINUSE) && s.cfg.Mode == Proxy:
		s.conn = nil
		s.cfg.Log.Warn("another DHCP server of this host has port 67: only what comes to port 4011 is answered", "err", err)
	case err != nil:
		return err
	default:
		_ = s.conn.SetReadBuffer(receiveBuffer)
	}
	if s.frame, err = newFramer(s.cfg.Interface, s.cfg.Local.Server); err != nil {
		return err
	}
	if s.cfg.Mode == Authoritative {
		s.ear, err = listen(s.cfg.Interface, false)
	}
	return err
}

// Close releases the sockets and ends Serve.
func (s *Server) Close() error {
	var all []error
	for _, c := range []*net.UDPConn{s.conn, s.proxied} {
		if c != nil {
			all = append(all, c.Close())
		}
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
	for _, c := range []struct {
		conn  *net.UDPConn
		proxy bool
	}{{s.conn, false}, {s.proxied, true}} {
		if c.conn != nil {
			stop := context.AfterFunc(ctx, func() { c.conn.Close() })
			defer stop()
			run(func(ctx context.Context) error { return s.read(ctx, c.conn, c.proxy) })
		}
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

// read sorts what comes in: known machines first, and of no MAC too much. It
// never waits for an answer to be made, so that a flood fills its own queue
// and not the kernel's.
func (s *Server) read(ctx context.Context, conn *net.UDPConn, proxy bool) error {
	limit := newLimiter()
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
		s.sort(limit, buf[:n], source{netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), proxy}, time.Now())
	}
}

// sort queues one packet, and reports whether it did.
func (s *Server) sort(limit *limiter, data []byte, from source, now time.Time) bool {
	const hardware = 28 // chaddr
	if len(data) < bootpHeader {
		return false
	}
	mac := [6]byte(data[hardware:])
	if !limit.allow(mac, now) {
		s.drop("one MAC sends too much", net.HardwareAddr(mac[:]).String())
		return false
	}
	queue := s.later
	if s.known(net.HardwareAddr(mac[:]).String()) {
		queue = s.first
	}
	select {
	case queue <- packetIn{append([]byte(nil), data...), from}:
		return true
	default:
		s.drop("too many packets wait", net.HardwareAddr(mac[:]).String())
		return false
	}
}

func (s *Server) drop(why, mac string) {
	if s.dropped.fresh(why, s.cfg.Now(), time.Minute) {
		s.cfg.Log.Warn("DHCP packets dropped", "why", why, "mac", mac)
	}
}

// answer works off the queues.
func (s *Server) answer(ctx context.Context) error {
	for {
		var p packetIn
		select {
		case <-ctx.Done():
			return nil
		case p = <-s.first:
		default:
			select {
			case <-ctx.Done():
				return nil
			case p = <-s.first:
			case p = <-s.later:
			}
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
	case !s.cfg.Leases.Commit(func(error) { s.send(a, data) }):
		s.drop("the disk lags behind", a.reply.ClientHWAddr.String())
	}
}

// send is called from the server's and from the leases' goroutine.
func (s *Server) send(a answer, data []byte) {
	conn := s.conn
	if a.to.proxy || conn == nil {
		conn = s.proxied
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
		d, err := s.ear.next(buf)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		f, ok := foreignIn(d, func(a netip.Addr) bool { return a == s.cfg.Local.Server })
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
	if s.cfg.Mode != Authoritative || s.cfg.Foreign == nil || !s.others.fresh(f.Server.String(), s.cfg.Now(), foreignEvery) {
		return
	}
	s.cfg.Log.Warn("another DHCP server is on the wire", "server", f.Server.String(), "mac", f.MAC, "offered", f.Offered.String())
	s.cfg.Foreign(f)
}

func (s *Server) told(what string) bool { return !s.logged.fresh(what, s.cfg.Now(), time.Second) }

// Loaded notes that a machine has fetched all of the boot program that it was given.
func (s *Server) Loaded(mac string) { s.chains.loaded(mac, s.cfg.Now()) }

// seldom says of each key whether it is time to tell of it again. Of more than
// maxSeldom keys at a time it tells no more.
type seldom struct {
	mu sync.Mutex
	at map[string]time.Time
}

const maxSeldom = 64

func (s *seldom) fresh(key string, now time.Time, every time.Duration) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	recent := func(at time.Time) bool { return now.Sub(at) < every && !now.Before(at) }
	if at, ok := s.at[key]; ok && recent(at) {
		return false
	}
	if s.at == nil {
		s.at = make(map[string]time.Time)
	}
	if _, ok := s.at[key]; !ok && len(s.at) >= maxSeldom {
		for k, at := range s.at {
			if !recent(at) {
				delete(s.at, k)
			}
		}
		if len(s.at) >= maxSeldom {
			return false
		}
	}
	s.at[key] = now
	return true
}
