package httpboot

import (
	"cmp"
	"container/list"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/pxe/grub"
)

const (
	maxConns     = 1024
	connsPerHost = 32
	grace        = 2 * time.Second
)

// limits are how long a client may take.
type limits struct {
	request time.Duration // to say what it wants
	idle    time.Duration // between requests
	stall   time.Duration // to take a piece of an answer
}

var usual = limits{request: 10 * time.Second, idle: 2 * time.Minute, stall: time.Minute}

// connKey finds the connection in a request's context.
type connKey struct{}

// Serve answers on ln until ctx ends. Requests that run then get two
// seconds before they are broken off.
func Serve(ctx context.Context, ln net.Listener, h http.Handler, logger *slog.Logger) error {
	return serve(ctx, ln, h, logger, usual)
}

func serve(ctx context.Context, ln net.Listener, h http.Handler, logger *slog.Logger, l limits) error {
	var running sync.WaitGroup // handlers; closing a server does not wait for them
	defer running.Wait()
	base, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	srv := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			running.Add(1)
			defer running.Done()
			if c, ok := r.Context().Value(connKey{}).(*cappedConn); ok {
				defer c.begin()()
				if grub.Asks(r.UserAgent()) {
					c.grub.Store(true)
				}
			}
			h.ServeHTTP(w, r)
		}),
		ReadHeaderTimeout: l.request,
		ReadTimeout:       l.request,
		IdleTimeout:       l.idle,
		MaxHeaderBytes:    16 << 10,
		BaseContext:       func(net.Listener) context.Context { return base },
		ConnContext:       func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
		ConnState: func(conn net.Conn, s http.ConnState) {
			if c, ok := conn.(*cappedConn); ok {
				c.asks.Store(s == http.StateNew || s == http.StateIdle)
			}
		},
		ErrorLog: log.New(debugWriter{logger}, "", 0),
	}
	served := make(chan error, 1)
	clients := newCapped(ln, maxConns, connsPerHost)
	if boots, ok := h.(*Handler); ok {
		clients.counts = boots.cfg.CountsFor
		defer boots.resets(clients)()
	}
	clients.ready = func(c *cappedConn) {
		c.limits = l
		c.again = func(in []byte) {
			c.ahead, c.rests = append([]byte(nil), in...), len(in) == 0
			one := &oneConn{Listener: ln, conn: c}
			// It ends at once: the listener has no second one.
			if err := srv.Serve(one); one.conn != nil {
				_ = c.Close()
				logger.Debug("HTTP connection is not taken back", "err", err)
			}
		}
	}
	go func() { served <- srv.Serve(clients) }()
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

// oneConn gives one connection, and none after it.
type oneConn struct {
	net.Listener
	conn net.Conn
}

func (o *oneConn) Accept() (net.Conn, error) {
	conn := o.conn
	if o.conn = nil; conn == nil {
		return nil, net.ErrClosed
	}
	return conn, nil
}

func (o *oneConn) Close() error { return nil }

// cappedConn ends an answer whose client takes too little.
type cappedConn struct {
	net.Conn
	limits limits
	again  func(in []byte) // has net/http read on, in first; nil: it cannot
	rests  bool            // its next request has not begun
	ahead  []byte          // read and given back
	raw    syscall.RawConn
	since  time.Time
	asks   atomic.Bool // nothing is answered: it is for the client to ask
	late   atomic.Bool // the client took too long to ask, or to take a piece of an answer
	grub   atomic.Bool

	caps  *capped // nil: none
	host  host
	runs  int           // requests that run; under caps' lock, as are the next
	place *list.Element // among those that wait
	given bool
}

// SetReadDeadline gives a connection that net/http takes for a new one the time
// that it has between requests.
func (c *cappedConn) SetReadDeadline(t time.Time) error {
	if c.rests && !t.IsZero() {
		c.rests, t = false, t.Add(c.limits.idle)
	}
	return c.Conn.SetReadDeadline(t)
}

func (c *cappedConn) Read(b []byte) (int, error) {
	if len(c.ahead) > 0 {
		n := copy(b, c.ahead)
		c.ahead = c.ahead[n:]
		return n, nil
	}
	n, err := c.Conn.Read(b)
	if c.asks.Load() {
		c.overdue(err)
	}
	if errors.Is(err, io.EOF) && c.grub.Load() {
		// Its FIN closes its window for good: the box's own would not leave, and what is
		// left of the connection meet the first one of the machine's next start, which has
		// the same port.
		c.breakOff()
	}
	return n, err
}

func (c *cappedConn) overdue(err error) {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		c.late.Store(true)
	}
}

// piece is what must have been taken before the stall time-out.
const piece = 1 << 20

func (c *cappedConn) hurry() error {
	c.late.Store(false)
	return c.SetWriteDeadline(time.Now().Add(c.limits.stall))
}

func (c *cappedConn) Write(b []byte) (n int, err error) {
	for {
		if err := c.hurry(); err != nil {
			return n, err
		}
		m, err := c.Conn.Write(b[n:min(len(b), n+piece)])
		c.overdue(err)
		if n += m; err != nil || n == len(b) {
			return n, err
		}
	}
}

// ReadFrom hands what r has to the connection, by the kernel where r is a file:
// piece by piece, each with its own deadline.
func (c *cappedConn) ReadFrom(r io.Reader) (n int64, err error) {
	// net/http bounds a response this way; the kernel's copy knows only a file in one
	// such bound.
	left := int64(1<<63 - 1)
	if l, ok := r.(*io.LimitedReader); ok {
		r, left = l.R, l.N
		defer func() { l.N -= n }()
	}
	if p, ok := r.(Pieces); ok {
		return c.readPieces(p, left)
	}
	to, ok := c.Conn.(io.ReaderFrom)
	if !ok {
		return io.Copy(struct{ io.Writer }{c}, io.LimitReader(r, left))
	}
	for left > 0 {
		if err := c.hurry(); err != nil {
			return n, err
		}
		want := min(left, piece)
		m, err := to.ReadFrom(&io.LimitedReader{R: r, N: want})
		c.overdue(err)
		n, left = n+m, left-m
		if err != nil || m < want {
			return n, err
		}
	}
	return n, nil
}

func (c *cappedConn) readPieces(p Pieces, left int64) (n int64, err error) {
	for n < left {
		f, off, m, err := p.Next(left - n)
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, err
		}
		if err := c.sendfile(f, off, m); err != nil {
			return n, err
		}
		n += m
	}
	return n, nil
}

// sendfile has the kernel send n bytes of f, whose position it leaves alone.
func (c *cappedConn) sendfile(f *os.File, off, n int64) error {
	if c.raw == nil {
		sc, ok := c.Conn.(syscall.Conn)
		if !ok {
			_, err := io.Copy(struct{ io.Writer }{c}, io.NewSectionReader(f, off, n))
			return err
		}
		raw, err := sc.SyscallConn()
		if err != nil {
			return err
		}
		c.raw = raw
	}
	from := int(f.Fd())
	defer runtime.KeepAlive(f)
	for n > 0 {
		if err := c.hurry(); err != nil {
			return err
		}
		left := min(n, piece)
		n -= left
		var failed error
		err := c.raw.Write(func(fd uintptr) (done bool) {
			for left > 0 {
				m, err := unix.Sendfile(int(fd), from, &off, int(left))
				switch {
				case err == unix.EINTR:
				case err == unix.EAGAIN:
					return false
				case err != nil:
					failed = os.NewSyscallError("sendfile", err)
					return true
				case m == 0:
					failed = io.ErrUnexpectedEOF // the file is shorter than it was
					return true
				default:
					left -= int64(m)
				}
			}
			return true
		})
		c.overdue(err)
		if err := cmp.Or(err, failed); err != nil {
			return err
		}
	}
	return nil
}

// breakOff closes with a reset: nothing is left of the connection.
func (c *cappedConn) breakOff() {
	if l, ok := c.Conn.(interface{ SetLinger(sec int) error }); ok {
		_ = l.SetLinger(0)
	}
	_ = c.Conn.Close()
}

// Close leaves nothing of a connection whose client has gone, as far as one can tell.
func (c *cappedConn) Close() error {
	c.release()
	if c.late.Load() {
		c.breakOff()
	}
	return c.Conn.Close()
}
