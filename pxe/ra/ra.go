// Package ra advertises a network on one interface (RFC 4861), so that machines ask DHCPv6 for their addresses; or says that there is none to who waits for one.
package ra

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/net/ipv6"
)

// Config is one interface's.
type Config struct {
	Interface string
	Network   netip.Prefix
	// MTU is told unless it is 0.
	MTU uint32
	Log *slog.Logger
}

// Server is the open socket.
type Server struct {
	cfg   Config
	iface *net.Interface
	conn  *net.IPConn
	p     *ipv6.PacketConn
	plan  *schedule
}

var (
	allNodes   = &net.IPAddr{IP: net.ParseIP("ff02::1")}
	allRouters = &net.IPAddr{IP: net.ParseIP("ff02::2")}
)

// Listen opens the socket, which only the interface reaches.
func Listen(ctx context.Context, cfg Config) (*Server, error) {
	iface, conn, p, err := open(ctx, cfg.Interface)
	if err != nil {
		return nil, err
	}
	return &Server{cfg: cfg, iface: iface, conn: conn, p: p,
		plan: newSchedule(time.Now(), func(d time.Duration) time.Duration { return rand.N(d) })}, nil
}

// open is a socket that hears router solicitations, and more.
func open(ctx context.Context, name string, more ...ipv6.ICMPType) (*net.Interface, *net.IPConn, *ipv6.PacketConn, error) {
	iface, err := net.InterfaceByName(name)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("router advertisements: interface %s: %w", name, err)
	}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var bind error
		if err := c.Control(func(fd uintptr) { bind = syscall.BindToDevice(int(fd), iface.Name) }); err != nil {
			return err
		}
		return bind
	}}
	conn, err := lc.ListenPacket(ctx, "ip6:ipv6-icmp", "::")
	if err != nil {
		return nil, nil, nil, fmt.Errorf("router advertisements: %w", err)
	}
	p := ipv6.NewPacketConn(conn)
	var only ipv6.ICMPFilter
	only.SetAll(true)
	for _, kind := range append(more, ipv6.ICMPTypeRouterSolicitation) {
		only.Accept(kind)
	}
	for _, set := range []func() error{
		func() error { return p.SetICMPFilter(&only) },
		func() error { return p.SetControlMessage(ipv6.FlagHopLimit, true) },
		func() error { return p.SetMulticastInterface(iface) },
		func() error { return p.SetMulticastHopLimit(maxHops) },
		func() error { return p.SetHopLimit(maxHops) },
		func() error { return p.SetMulticastLoopback(false) }, // the box takes no address by it
		func() error { return p.JoinGroup(iface, allRouters) },
	} {
		if err := set(); err != nil {
			return nil, nil, nil, errors.Join(fmt.Errorf("router advertisements on %s: %w", name, err), conn.Close())
		}
	}
	return iface, conn.(*net.IPConn), p, nil
}

// Close releases the socket.
func (s *Server) Close() error { return s.conn.Close() }

// Serve advertises and answers solicitations until ctx ends.
func (s *Server) Serve(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = s.conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	packet := advertisement(s.cfg.Network, s.iface.HardwareAddr, s.cfg.MTU)
	told := ""
	buf := make([]byte, 1500)
	for {
		if now := time.Now(); !now.Before(s.plan.next) {
			_, err := s.p.WriteTo(packet, nil, allNodes)
			switch {
			case ctx.Err() != nil:
				return nil
			case errors.Is(err, net.ErrClosed):
				return fmt.Errorf("router advertisements: %w", err)
			case err != nil:
				// Without a link there is no address to send from.
				if told != err.Error() {
					told = err.Error()
					s.cfg.Log.Info("router advertisement not sent; it is tried again", "err", err)
				}
				s.plan.failed(now)
			default:
				told = ""
				s.plan.wentOut(now)
			}
		}
		_ = s.conn.SetReadDeadline(s.plan.next)
		if ctx.Err() != nil { // it may have ended before the deadline was moved
			return nil
		}
		n, cm, from, err := s.p.ReadFrom(buf)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("router advertisements: %w", err)
		case errors.Is(err, os.ErrDeadlineExceeded):
			continue
		case err != nil:
			s.plan.failed(time.Now()) // such as ENETDOWN while the link flaps
			continue
		}
		a, ok := from.(*net.IPAddr)
		if !ok || cm == nil {
			continue
		}
		if ip, ok := netip.AddrFromSlice(a.IP); ok && isSolicitation(buf[:n], cm.HopLimit, ip) {
			s.plan.asked(time.Now())
		}
	}
}
