package ra

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"golang.org/x/net/ipv6"
)

// bare is an advertisement without options: its sender is no router and names no network
// and no DHCPv6 (RFC 4861, 4.2). Whoever had the sender for a router drops it (6.3.4).
var bare = []byte{0: typeAdvertisement, 15: 0}

// quietFor is how long a router counts as there after it advertised: none may be silent
// for longer (RFC 4861, 6.2.1).
const quietFor = 30 * time.Minute

// Bare answers machines that wait for a router where none was heard, be it the box's own:
// an iPXE does so for sixteen seconds before it boots what DHCP told it. The answer goes
// to the address that is made from the MAC of who asks, so that no other host hears of it.
type Bare struct {
	// expects is asked once for each answer.
	expects func(mac string) bool
	router  time.Time // when one was heard last
	conn    *net.IPConn
	p       *ipv6.PacketConn
	log     *slog.Logger
}

// ListenBare opens the socket. Whom expects says no to is not answered.
func ListenBare(ctx context.Context, iface string, expects func(mac string) bool, log *slog.Logger) (*Bare, error) {
	i, conn, p, err := open(ctx, iface, ipv6.ICMPTypeRouterAdvertisement)
	if err != nil {
		return nil, err
	}
	if err := p.JoinGroup(i, allNodes); err != nil {
		return nil, errors.Join(fmt.Errorf("router advertisements on %s: %w", iface, err), conn.Close())
	}
	return &Bare{expects: expects, conn: conn, p: p, log: log}, nil
}

// quiet says whether a router may be there.
func (b *Bare) quiet(now time.Time) bool { return !b.router.IsZero() && now.Sub(b.router) < quietFor }

// Close releases the socket.
func (b *Bare) Close() error { return b.conn.Close() }

// Serve answers until ctx ends.
func (b *Bare) Serve(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = b.conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	buf := make([]byte, 1500)
	for {
		n, cm, from, err := b.p.ReadFrom(buf)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("router advertisements: %w", err)
		case err != nil:
			select { // such as ENETDOWN while the link flaps
			case <-ctx.Done():
				return nil
			case <-time.After(time.Second):
			}
			continue
		}
		a, ok := from.(*net.IPAddr)
		if !ok || cm == nil {
			continue
		}
		ip, _ := netip.AddrFromSlice(a.IP)
		if isAdvertisement(buf[:n], cm.HopLimit, ip) {
			b.router = time.Now()
			continue
		}
		if !isSolicitation(buf[:n], cm.HopLimit, ip) || b.quiet(time.Now()) {
			continue
		}
		if mac, ok := solicitor(buf[:n]); ok && ip == linkLocal(mac) && b.expects(mac.String()) {
			if _, err := b.p.WriteTo(bare, nil, a); err != nil {
				b.log.Debug("router advertisement not sent", "to", a.String(), "err", err)
			}
		}
	}
}
