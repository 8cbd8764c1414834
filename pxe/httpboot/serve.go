package httpboot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"
)

const (
	maxConns     = 512
	connsPerHost = 32
	grace        = 2 * time.Second
)

// Serve answers on ln until ctx ends. Requests that run then get two
// seconds before they are broken off.
func Serve(ctx context.Context, ln net.Listener, h http.Handler, logger *slog.Logger) error {
	var running sync.WaitGroup // handlers; closing a server does not wait for them
	defer running.Wait()
	base, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	srv := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			running.Add(1)
			defer running.Done()
			h.ServeHTTP(w, r)
		}),
		ReadHeaderTimeout: 10 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      stallTimeout,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		BaseContext:       func(net.Listener) context.Context { return base },
		ErrorLog:          log.New(debugWriter{logger}, "", 0),
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(newCapped(ln, maxConns, connsPerHost)) }()
	select {
	case err := <-served:
		srv.Close()
		return fmt.Errorf("http: %w", err)
	case <-ctx.Done():
	}
	end, stop := context.WithTimeout(context.WithoutCancel(ctx), grace)
	defer stop()
	if err := srv.Shutdown(end); err != nil {
		cancel()
		srv.Close()
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("http: %w", err)
	}
	return nil
}

// debugWriter takes what net/http says about clients that break off.
type debugWriter struct{ log *slog.Logger }

func (d debugWriter) Write(p []byte) (int, error) {
	d.log.Debug("HTTP connection", "note", string(p))
	return len(p), nil
}

// capped closes connections over its caps at once: waiting ones would hold the queue.
type capped struct {
	net.Listener
	max, perHost int

	mu    sync.Mutex
	total int
	hosts map[netip.Addr]int
}

func newCapped(ln net.Listener, limit, perHost int) *capped {
	return &capped{Listener: ln, max: limit, perHost: perHost, hosts: make(map[netip.Addr]int)}
}

func (c *capped) Accept() (net.Conn, error) {
	for {
		conn, err := c.Listener.Accept()
		if err != nil {
			return nil, err
		}
		var host netip.Addr
		if a, ok := conn.RemoteAddr().(*net.TCPAddr); ok {
			host = a.AddrPort().Addr().Unmap()
		}
		if !c.take(host) {
			conn.Close()
			continue
		}
		return &cappedConn{Conn: conn, release: sync.OnceFunc(func() { c.give(host) })}, nil
	}
}

func (c *capped) take(host netip.Addr) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.total >= c.max || c.hosts[host] >= c.perHost {
		return false
	}
	c.total++
	c.hosts[host]++
	return true
}

func (c *capped) give(host netip.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.total--
	if c.hosts[host]--; c.hosts[host] <= 0 {
		delete(c.hosts, host)
	}
}

type cappedConn struct {
	net.Conn
	release func()
}

// piece is what must have been taken before the stall time-out.
const piece = 1 << 20

// ReadFrom hands what r has to the connection, by the kernel where r is a file:
// piece by piece, each with its own deadline.
func (c *cappedConn) ReadFrom(r io.Reader) (n int64, err error) {
	to, ok := c.Conn.(io.ReaderFrom)
	if !ok {
		return io.Copy(struct{ io.Writer }{c.Conn}, r)
	}
	// net/http bounds a response this way; the kernel's copy knows only a file in one
	// such bound.
	left := int64(1<<63 - 1)
	if l, ok := r.(*io.LimitedReader); ok {
		r, left = l.R, l.N
		defer func() { l.N -= n }()
	}
	for left > 0 {
		if err := c.SetWriteDeadline(time.Now().Add(stallTimeout)); err != nil {
			return n, err
		}
		want := min(left, piece)
		m, err := to.ReadFrom(&io.LimitedReader{R: r, N: want})
		n, left = n+m, left-m
		if err != nil || m < want {
			return n, err
		}
	}
	return n, nil
}

func (c *cappedConn) Close() error {
	c.release()
	return c.Conn.Close()
}
