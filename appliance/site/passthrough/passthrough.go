// Package passthrough carries the TLS of machines without a route to the
// gateway's address and nowhere else, and never looks inside.
package passthrough

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/backoff"
)

// limits keep one machine from taking the box's descriptors or its memory.
type limits struct {
	total, perSource int
	dial             time.Duration
	// idle ends a connection on which neither side has said anything; an agent's
	// session says something every 20 s.
	idle time.Duration
	// half is idle's place once one side has closed: it may be gone altogether.
	half time.Duration
	// write ends a connection whose other side does not take what it is sent.
	write time.Duration
}

var standard = limits{total: 512, perSource: 32, dial: 10 * time.Second, idle: 5 * time.Minute, half: 30 * time.Second, write: time.Minute}

// Serve passes each connection of l to the first of targets (host:port) that
// answers, until ctx ends; then it closes all and returns nil. It owns l.
// targets is asked for each connection, so that a new gateway counts at once.
// A connection past the caps (512, 32 from one address) is closed at once.
func Serve(ctx context.Context, l net.Listener, targets func() []string, log *slog.Logger) error {
	return standard.serve(ctx, l, targets, log)
}

type server struct {
	limits
	targets func() []string
	log     *slog.Logger

	mu      sync.Mutex
	count   int
	sources map[string]int
	full    bool // said so in the log
	dead    bool // said that no target answers
}

func (m limits) serve(ctx context.Context, l net.Listener, targets func() []string, log *slog.Logger) error {
	s := &server{limits: m, targets: targets, log: log, sources: map[string]int{}}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	defer l.Close()
	retry := backoff.Policy{Min: 5 * time.Millisecond, Max: time.Second}
	for failures := 0; ; {
		conn, err := l.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				_ = conn.Close()
			}
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("pass through: %w", err)
		case err != nil: // out of descriptors, or a client that is gone already
			if retry.Wait(ctx, failures, nil) != nil {
				return nil
			}
			failures++
			continue
		}
		failures = 0
		source := sourceOf(conn)
		if !s.admit(source) {
			_ = conn.Close()
			continue
		}
		running.Go(func() {
			defer s.release(source)
			s.pass(ctx, conn)
		})
	}
}

func sourceOf(c net.Conn) string {
	host, _, err := net.SplitHostPort(c.RemoteAddr().String())
	if err != nil {
		return c.RemoteAddr().String()
	}
	return host
}

func (s *server) admit(source string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.count >= s.total || s.sources[source] >= s.perSource {
		if !s.full {
			s.full = true
			s.log.Warn("pass-through is full", "connections", s.count, "source", source, "of_source", s.sources[source])
		}
		return false
	}
	s.count++
	s.sources[source]++
	return true
}

func (s *server) release(source string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.count--
	s.sources[source]--
	// Told again only once there was room to spare: a flood is one line.
	if s.count <= s.total/2 && s.sources[source] <= s.perSource/2 {
		s.full = false
	}
	if s.sources[source] == 0 {
		delete(s.sources, source)
	}
}

// pass dials a target and copies both ways.
func (s *server) pass(ctx context.Context, client net.Conn) {
	defer client.Close()
	gateway, err := s.reach(ctx)
	if err != nil {
		return
	}
	defer gateway.Close()
	stop := context.AfterFunc(ctx, func() {
		_ = client.Close()
		_ = gateway.Close()
	})
	defer stop()
	p := &pair{limits: s.limits}
	p.touch()
	var up sync.WaitGroup
	up.Go(func() { p.copy(gateway, client) })
	p.copy(client, gateway)
	up.Wait()
}

func (s *server) reach(ctx context.Context) (net.Conn, error) {
	err := errors.New("no target is known")
	dialer := net.Dialer{Timeout: s.dial}
	for _, target := range s.targets() {
		var conn net.Conn
		if conn, err = dialer.DialContext(ctx, "tcp", target); err == nil {
			s.said(false, nil)
			return conn, nil
		}
	}
	if ctx.Err() == nil {
		s.said(true, err)
	}
	return nil, err
}

// said logs when the gateway goes out of reach and when it comes back, not for
// each machine that tries.
func (s *server) said(dead bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case dead && !s.dead:
		s.log.Warn("pass-through reaches no gateway", "error", err)
	case !dead && s.dead:
		s.log.Info("pass-through reaches a gateway again")
	}
	s.dead = dead
}

// pair is one connection's two ways. Either way's bytes keep both alive.
type pair struct {
	limits
	last   atomic.Int64 // nanoseconds since epoch, of the last byte
	closed atomic.Bool  // one side has
}

// epoch makes times monotonic.
var epoch = time.Now()

func (p *pair) touch() { p.last.Store(int64(time.Since(epoch))) }

// left is how long the connection may still be silent.
func (p *pair) left() time.Duration {
	allowed := p.idle
	if p.closed.Load() {
		allowed = p.half
	}
	return allowed - (time.Since(epoch) - time.Duration(p.last.Load()))
}

// copy moves from's bytes to to. At from's end it closes to's half; on any
// failure it closes both whole, which ends the other way too.
func (p *pair) copy(to, from net.Conn) {
	buf := make([]byte, 32<<10)
	for {
		left := p.left()
		if left <= 0 {
			break
		}
		_ = from.SetReadDeadline(time.Now().Add(left))
		n, err := from.Read(buf)
		if n > 0 {
			p.touch()
			_ = to.SetWriteDeadline(time.Now().Add(p.write))
			if _, err := to.Write(buf[:n]); err != nil {
				break
			}
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			continue // the other way may have kept it alive
		}
		if err == io.EOF {
			half, ok := to.(interface{ CloseWrite() error })
			if ok && half.CloseWrite() == nil {
				p.closed.Store(true)
				p.touch()
				_ = to.SetReadDeadline(time.Now().Add(p.half)) // wakes the other way to the new bound
				return
			}
		}
		if err != nil {
			break
		}
	}
	_ = to.Close()
	_ = from.Close()
}
