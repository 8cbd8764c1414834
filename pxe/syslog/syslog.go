// Package syslog keeps the last lines that booting machines send, in memory and bounded.
package syslog

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/bound"
)

// Port is syslog's over UDP (RFC 5426).
const Port = 514

// Bounds: of a line, of a machine's lines, of machines, and of what one machine
// and all together may send in a second.
const (
	maxLine     = 480
	maxLines    = 200
	maxMachines = 1024
	perMachine  = 100
	inAll       = 2000
)

// Store has the lines by MAC. It is safe for concurrent use. Its zero value is ready.
type Store struct {
	mu     sync.Mutex
	byMAC  map[string]*lines
	all    budget
	missed int
}

type lines struct {
	text   []string
	last   time.Time
	budget budget
}

// budget is what may still come in this second.
type budget struct {
	second int64
	spent  int
}

func (b *budget) take(now time.Time, most int) bool {
	if s := now.Unix(); s != b.second {
		b.second, b.spent = s, 0
	}
	b.spent++
	return b.spent <= most
}

// Add keeps a line, unless the machine sends too many.
func (s *Store) Add(mac, text string, now time.Time) {
	text = clean(text)
	if text == "" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.byMAC[mac]
	if l == nil {
		if len(s.byMAC) >= maxMachines {
			s.pushOut()
		}
		if s.byMAC == nil {
			s.byMAC = make(map[string]*lines)
		}
		l = &lines{}
		s.byMAC[mac] = l
	}
	// The machine's own first: what it has too much of is not taken from the others.
	if !l.budget.take(now, perMachine) || !s.all.take(now, inAll) {
		s.missed++
		return
	}
	l.last = now
	l.text = append(l.text, now.UTC().Format("15:04:05 ")+text)
	if len(l.text) > maxLines {
		l.text = append(l.text[:0:0], l.text[len(l.text)-maxLines:]...)
	}
}

func (s *Store) pushOut() {
	var oldest string
	for mac, l := range s.byMAC {
		if oldest == "" || l.last.Before(s.byMAC[oldest].last) {
			oldest = mac
		}
	}
	delete(s.byMAC, oldest)
}

// Tail are the machine's last lines, oldest first, at most n.
func (s *Store) Tail(mac string, n int) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.byMAC[mac]
	if l == nil {
		return nil
	}
	return append([]string(nil), l.text[max(0, len(l.text)-n):]...)
}

// clean takes the priority off and leaves what is printable.
func clean(s string) string {
	s = s[:min(len(s), 4*maxLine)]
	if end := strings.IndexByte(s, '>'); strings.HasPrefix(s, "<") && end > 0 && end <= 4 {
		s = s[end+1:]
	}
	s = strings.TrimSpace(strings.Map(func(r rune) rune {
		switch {
		case r == '\t' || r == '\n':
			return ' '
		case r < ' ' || r > '~':
			return -1
		}
		return r
	}, s))
	return s[:min(len(s), maxLine)]
}

// Config is one interface's.
type Config struct {
	Interface string
	Address   netip.Addr
	// Holder is the MAC that DHCP gave an address to: lines of others are dropped.
	Holder func(netip.Addr) (mac string, ok bool)
	Store  *Store
	Now    func() time.Time
	Log    *slog.Logger
}

// Server is the open socket.
type Server struct {
	cfg  Config
	conn *net.UDPConn
}

// Listen opens the socket.
func Listen(ctx context.Context, cfg Config) (*Server, error) {
	conn, err := bound.ListenPacket(ctx, cfg.Interface, netip.AddrPortFrom(cfg.Address, Port))
	if err != nil {
		return nil, fmt.Errorf("syslog: %w", err)
	}
	return &Server{cfg: cfg, conn: conn}, nil
}

// Close releases the socket.
func (s *Server) Close() error { return s.conn.Close() }

// Serve keeps lines until ctx ends.
func (s *Server) Serve(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = s.conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	buf := make([]byte, 2048)
	for {
		n, from, err := s.conn.ReadFromUDPAddrPort(buf)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("syslog: %w", err)
		case err != nil:
			continue // an ICMP error of somebody else's
		}
		if mac, ok := s.cfg.Holder(from.Addr().Unmap()); ok {
			s.cfg.Store.Add(mac, string(buf[:n]), s.cfg.Now())
		}
	}
}
