package h2

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/net/http2"
)

// holdLimit is how long held bytes wait for their handler to end.
const holdLimit = time.Millisecond

const acceptPause = 50 * time.Millisecond

// Server serves a handler over TLS.
type Server struct {
	Handler http.Handler
	// TLS must offer h2.
	TLS *tls.Config
	// Timeout bounds a connection's TLS handshake and its first bytes.
	Timeout time.Duration
	Log     *slog.Logger

	owned sync.WaitGroup
	mu    sync.Mutex
	// listener is nil before Serve; once closing is true no connection is added.
	listener net.Listener
	conns    map[*serverConn]bool
	early    map[net.Conn]bool
	closing  bool
	// idle is told when a connection is gone.
	idle sync.Cond
}

// Serve takes connections until Close or Shutdown, after which it is
// http.ErrServerClosed.
func (s *Server) Serve(l net.Listener) error {
	s.mu.Lock()
	if s.closing {
		s.mu.Unlock()
		l.Close()
		return http.ErrServerClosed
	}
	s.idle.L = &s.mu
	s.listener, s.conns, s.early = l, map[*serverConn]bool{}, map[net.Conn]bool{}
	s.mu.Unlock()
	for {
		nc, err := l.Accept()
		s.mu.Lock()
		if s.closing {
			s.mu.Unlock()
			if err == nil {
				nc.Close()
			}
			return http.ErrServerClosed
		}
		if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.ECONNABORTED) {
			s.mu.Unlock()
			time.Sleep(acceptPause) // it passes
			continue
		}
		if err != nil {
			s.mu.Unlock()
			s.Close()
			return err
		}
		s.early[nc] = true
		s.owned.Go(func() { s.serve(nc) })
		s.mu.Unlock()
	}
}

// serve is one connection's life.
func (s *Server) serve(nc net.Conn) {
	defer nc.Close()
	out := newPatient(nc)
	secured := tls.Server(out, s.TLS)
	c, err := s.greeted(nc, secured, out)
	s.mu.Lock()
	delete(s.early, nc)
	if err == nil && s.closing {
		err = http.ErrServerClosed
	}
	if err == nil {
		s.conns[c] = true
	}
	s.mu.Unlock()
	if err != nil {
		s.Log.Debug("connection refused", "reason", err.Error())
		return
	}
	c.run()
	s.mu.Lock()
	delete(s.conns, c)
	s.idle.Broadcast()
	s.mu.Unlock()
}

// greeted does what comes before the first frame.
func (s *Server) greeted(nc net.Conn, secured *tls.Conn, out *patient) (*serverConn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), s.Timeout)
	defer cancel()
	if err := secured.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	state := secured.ConnectionState()
	if state.NegotiatedProtocol != http2.NextProtoTLS {
		return nil, fmt.Errorf("the client speaks %q, not HTTP/2", state.NegotiatedProtocol)
	}
	c := newServerConn(s, secured, out, &state)
	if err := nc.SetReadDeadline(time.Now().Add(s.Timeout)); err != nil {
		return nil, err
	}
	preface := make([]byte, len(http2.ClientPreface))
	if _, err := io.ReadFull(c.br, preface); err != nil {
		return nil, err
	}
	if string(preface) != http2.ClientPreface {
		return nil, errors.New("the client does not begin as HTTP/2 does")
	}
	return c, nc.SetReadDeadline(time.Time{})
}

// Shutdown takes no more calls, and waits for those that run, until ctx ends.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	s.close()
	for c := range s.conns {
		c.leave()
	}
	// What has not begun to speak yet has nothing to lose.
	for nc := range s.early {
		nc.Close()
	}
	s.mu.Unlock()
	stop := context.AfterFunc(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.idle.Broadcast()
	})
	defer stop()
	s.mu.Lock()
	for len(s.conns) > 0 && ctx.Err() == nil {
		s.idle.Wait()
	}
	left := len(s.conns)
	s.mu.Unlock()
	if left > 0 {
		return ctx.Err()
	}
	s.owned.Wait()
	return nil
}

// Close ends everything.
func (s *Server) Close() {
	s.mu.Lock()
	s.close()
	for nc := range s.early {
		nc.Close()
	}
	for c := range s.conns {
		c.mu.Lock()
		c.fail(http.ErrServerClosed)
		c.mu.Unlock()
	}
	s.mu.Unlock()
	s.owned.Wait()
}

func (s *Server) close() {
	s.closing = true
	s.idle.L = &s.mu
	if s.listener != nil {
		s.listener.Close()
	}
}

// serverConn is a server's connection.
type serverConn struct {
	*conn
	server *Server
	// request is what all of the connection's requests have in common.
	request *http.Request
	ctx     context.Context
	cancel  context.CancelFunc
	// work hands a call to a handler's goroutine that has nothing to do.
	work chan *answer
	// begun are the calls to start before the next wait for bytes; the reader's own.
	begun []*answer
	// running counts handlers, also those whose stream was reset; leaving is
	// true once no call is taken. Both are guarded by conn.mu.
	running int
	leaving bool
}

func newServerConn(s *Server, nc net.Conn, out *patient, state *tls.ConnectionState) *serverConn {
	c := &serverConn{server: s, work: make(chan *answer), request: &http.Request{
		Proto: "HTTP/2.0", ProtoMajor: 2, ContentLength: -1, RemoteAddr: nc.RemoteAddr().String(), TLS: state,
	}}
	c.conn = newConn(nc, out, c)
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.greet(
		http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: maxStreams},
		http2.Setting{ID: http2.SettingInitialWindowSize, Val: streamWindow},
		http2.Setting{ID: http2.SettingMaxHeaderListSize, Val: maxHeaders},
	)
	return c
}

// run lasts until the connection and all its handlers have ended.
func (c *serverConn) run() {
	err := c.read()
	if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
		c.server.Log.Debug("connection ended", "reason", err.Error())
	}
	c.cancel()
	close(c.work)
	c.tasks.Wait()
}

// leave tells the client to make no more calls, and ends with those that run.
func (c *serverConn) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leaving {
		return
	}
	c.leaving = true
	c.pending = appendGoAway(c.pending, c.lastID, http2.ErrCodeNo)
	c.flush()
	c.endIfIdle()
}

func (c *serverConn) endIfIdle() {
	if c.leaving && len(c.streams) == 0 && c.running == 0 && !c.writing && len(c.pending) == 0 {
		c.fail(http.ErrServerClosed)
	}
}

func (c *serverConn) refused(id uint32) { c.lastID = max(c.lastID, id) }

// goAway: a client's says nothing, since a server opens no streams.
func (c *serverConn) goAway(uint32) {}

// headers takes a call, or a call's trailers.
func (c *serverConn) headers(st *stream, h *block) error {
	id := h.id
	if st != nil {
		if st.remoteEnded {
			return http2.StreamError{StreamID: id, Code: http2.ErrCodeStreamClosed}
		}
		if !h.end || len(h.pseudo) > 0 {
			return http2.StreamError{StreamID: id, Code: http2.ErrCodeProtocol}
		}
		c.remoteEnd(st)
		c.wake(st)
		return nil
	}
	if id%2 == 0 {
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	if id <= c.lastID {
		return http2.ConnectionError(http2.ErrCodeStreamClosed)
	}
	c.lastID = id
	if c.leaving || c.running >= maxStreams {
		return http2.StreamError{StreamID: id, Code: http2.ErrCodeRefusedStream}
	}
	a := &answer{stream: c.newStream(), conn: c, path: h.value(":path"), method: h.value(":method"), host: h.value(":authority")}
	if a.path == "" || a.method == "" {
		return http2.StreamError{StreamID: id, Code: http2.ErrCodeProtocol}
	}
	a.owner = a
	a.id, a.sendWindow, a.headed = id, c.peer.initialWindow, true
	a.request = h.header()
	a.ctx, a.cancel = context.WithCancel(c.ctx)
	a.ctx = context.WithValue(a.ctx, answerKey{}, a)
	a.dropped = a.gone
	c.streams[id] = a.stream
	c.running++
	if h.end {
		c.remoteEnd(a.stream)
	}
	c.begun = append(c.begun, a)
	return nil
}

// settled starts the calls that have come: by now what came with their headers is
// there as well.
func (c *serverConn) settled() {
	for i, a := range c.begun {
		select {
		case c.work <- a:
		default:
			c.tasks.Go(func() { c.handle(a) })
		}
		c.begun[i] = nil
	}
	c.begun = c.begun[:0]
}

// handle runs a call, and then those that come while it has nothing to do.
func (c *serverConn) handle(a *answer) {
	for ok := true; ok; a, ok = <-c.work {
		c.answer(a)
	}
}

func (c *serverConn) answer(a *answer) {
	defer a.cancel()
	defer func() {
		if r := recover(); r != nil {
			if err, ok := r.(error); !ok || !errors.Is(err, http.ErrAbortHandler) {
				c.server.Log.Error("handler panicked", "path", a.path, "panic", fmt.Sprint(r), "stack", string(debug.Stack()))
			}
			a.broken = true
		}
		a.finish()
	}()
	u := &url.URL{Path: a.path}
	if strings.ContainsAny(a.path, "%?#") || a.path[0] != '/' {
		var err error
		if u, err = url.ParseRequestURI(a.path); err != nil {
			a.WriteHeader(http.StatusBadRequest)
			return
		}
	}
	r := c.request.WithContext(a.ctx)
	r.Method, r.URL, r.Header, r.Body, r.Host, r.RequestURI = a.method, u, a.request, a, a.host, a.path
	c.server.Handler.ServeHTTP(a, r)
}

// answer is a call's request body and its http.ResponseWriter. The latter's part
// is the handler's own until finish.
type answer struct {
	*stream
	conn               *serverConn
	method, path, host string
	request            http.Header
	ctx                context.Context
	cancel             context.CancelFunc
	broken             bool

	header http.Header
	status int
	// out holds what is not in a frame yet; sent is true once the headers are in
	// one; hold keeps frames from being flushed. A handler may write and flush on
	// several goroutines.
	mu   sync.Mutex
	out  []byte
	sent bool
	hold *time.Timer
}

type answerKey struct{}

// Hold says that the handler whose request has ctx ends once it has written
// what it writes now, so that a flush of it can wait for that, though not for long.
func Hold(ctx context.Context) {
	a, ok := ctx.Value(answerKey{}).(*answer)
	if !ok {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.hold == nil {
		a.hold = time.AfterFunc(holdLimit, a.release)
	}
}

// release sends what Flush has put into frames: the response itself is still the
// handler's to change.
func (a *answer) release() {
	a.c.mu.Lock()
	defer a.c.mu.Unlock()
	a.c.flush()
}

// Header is the response's.
func (a *answer) Header() http.Header {
	if a.header == nil {
		a.header = make(http.Header, 8)
	}
	return a.header
}

// WriteHeader sets the status of the response.
func (a *answer) WriteHeader(status int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.status == 0 {
		a.status = status
	}
}

// Write takes bytes of the response; Flush sends them.
func (a *answer) Write(p []byte) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.out)+len(p) <= maxFrame {
		a.out = append(a.out, p...)
		return len(p), nil
	}
	a.c.mu.Lock()
	defer a.c.mu.Unlock()
	a.head()
	err := a.c.appendData(a.stream, a.out, false)
	if a.out = a.out[:0]; err == nil {
		err = a.c.appendData(a.stream, p, false)
	}
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

// head sends the headers, once. Both mutexes are held.
func (a *answer) head() {
	if a.sent || a.stream.err != nil {
		return
	}
	a.sent = true
	if a.status == 0 {
		a.status = http.StatusOK
	}
	a.conn.field(":status", statusText(a.status))
	a.conn.fields(a.header)
	a.conn.appendBlock(a.stream, false)
}

func statusText(status int) string {
	if status == http.StatusOK {
		return "200"
	}
	return strconv.Itoa(status)
}

// Flush sends what was written.
func (a *answer) Flush() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.c.mu.Lock()
	defer a.c.mu.Unlock()
	a.head()
	if len(a.out) > 0 {
		_ = a.c.appendData(a.stream, a.out, false) // the next Write says it as well
		a.out = a.out[:0]
	}
	if a.hold == nil {
		a.c.flush()
	}
}

// finish sends all that is left, and ends the stream.
func (a *answer) finish() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.hold != nil {
		a.hold.Stop()
	}
	c := a.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case a.stream.err != nil:
	case a.broken:
		c.reset(a.stream, http2.ErrCodeInternal, errClosed)
	default:
		a.head()
		trailers := false
		for name := range a.header {
			trailers = trailers || strings.HasPrefix(name, http.TrailerPrefix)
		}
		err := error(nil)
		if len(a.out) > 0 || !trailers {
			err = c.appendData(a.stream, a.out, !trailers)
		}
		if err == nil && trailers {
			for name, values := range a.header {
				if name, ok := strings.CutPrefix(name, http.TrailerPrefix); ok {
					for _, v := range values {
						c.field(lowerName(name), v)
					}
				}
			}
			c.appendBlock(a.stream, true)
		}
		// What the client has not sent yet is not wanted.
		c.reset(a.stream, http2.ErrCodeNo, errClosed)
	}
	c.running--
	c.flush()
	c.endIfIdle()
}

// Read reads the request.
func (a *answer) Read(p []byte) (int, error) { return a.read(p) }

// Close is the handler's word that it reads no more.
func (a *answer) Close() error { return nil }

// gone ends the handler's context once its stream was reset. mu is held.
func (a *answer) gone() {
	if a.stream.err != nil {
		a.cancel()
	}
}
