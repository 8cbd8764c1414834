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
	"github.com/better-compute/site-appliance/appliance/base/printable"
)

// Port is syslog's over UDP (RFC 5426).
const Port = 514

// Bounds: of a line, of a machine's lines, of machines, and of what one machine, all
// together and all strangers together may send in a second.
const (
	maxLine     = 480
	maxLines    = 200
	maxMachines = 1024
	perMachine  = 100
	inAll       = 2000
	inStrange   = inAll / 4
)

// Store has the lines by MAC. It is safe for concurrent use. Its zero value is ready.
type Store struct {
	mu     sync.Mutex
	byMAC  map[string]*lines
	all    budget
	others budget
	missed int
}

type lines struct {
	text   []string
	known  bool
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

// Add keeps a line, unless the machine sends too many. Machines that are not known,
// whose MACs may be made up, are bounded together, and keep out no known one.
func (s *Store) Add(mac string, known bool, text string, now time.Time) {
	text = clean(text)
	if text == "" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.byMAC[mac]
	if l == nil {
		l = &lines{}
	}
	// The machine's own first: what it has too much of is not taken from the others.
	if !l.budget.take(now, perMachine) || !known && !s.others.take(now, inStrange) || !s.all.take(now, inAll) || !s.place(mac, known, l) {
		s.missed++
		return
	}
	l.last = now
	l.text = append(l.text, now.UTC().Format("15:04:05 ")+text)
	if len(l.text) > maxLines {
		l.text = append(l.text[:0:0], l.text[len(l.text)-maxLines:]...)
	}
}

// place says whether there is room for the machine. The one that was quiet the longest
// makes it: one that is not known, as long as there is any.
func (s *Store) place(mac string, known bool, l *lines) bool {
	l.known = known
	if s.byMAC[mac] != nil {
		return true
	}
	if s.byMAC == nil {
		s.byMAC = make(map[string]*lines)
	}
	if len(s.byMAC) >= maxMachines {
		oldest, at := "", (*lines)(nil)
		for mac, l := range s.byMAC {
			if at == nil || !l.known && at.known || l.known == at.known && l.last.Before(at.last) {
				oldest, at = mac, l
			}
		}
		if at.known && !known {
			return false
		}
		delete(s.byMAC, oldest)
	}
	s.byMAC[mac] = l
	return true
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
	s = strings.NewReplacer("\t", " ", "\n", " ").Replace(s)
	return printable.ASCII(strings.TrimSpace(printable.ASCII(s, len(s))), maxLine)
}

// Config is one interface's.
type Config struct {
	Interface string
	Address   netip.Addr
	// Holder is the MAC that DHCP gave an address to: lines of others are dropped.
	Holder func(netip.Addr) (mac string, ok bool)
	// Known says whether a MAC is of a machine that somebody vouches for.
	Known func(mac string) bool
	Store *Store
	Now   func() time.Time
	Log   *slog.Logger
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
			s.cfg.Store.Add(mac, s.cfg.Known(mac), string(buf[:n]), s.cfg.Now())
		}
	}
}
