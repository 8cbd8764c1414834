package h2

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"golang.org/x/net/http2"
)

// Client calls one server over one connection, which it makes at the first call
// and anew after it was lost.
type Client struct {
	// Dial connects to the server.
	Dial func(ctx context.Context) (net.Conn, error)
	// TLS must offer h2.
	TLS *tls.Config
	// Timeout bounds TLS's handshake.
	Timeout time.Duration

	mu   sync.Mutex
	conn *clientConn
	// dialing is closed when an attempt to connect has ended.
	dialing chan struct{}
}

// Do makes a call. The response's body must be read to its end or closed.
func (t *Client) Do(req *http.Request) (*http.Response, error) {
	for try := 0; ; try++ {
		c, err := t.connected(req.Context())
		if err != nil {
			closeBody(req)
			return nil, err
		}
		resp, err := c.call(req)
		if !errors.Is(err, errUnprocessed) || try == 2 {
			return resp, err
		}
		if req.Body != nil && req.Body != http.NoBody {
			if req.GetBody == nil {
				return nil, err
			}
			if req.Body, err = req.GetBody(); err != nil {
				return nil, err
			}
		}
	}
}

// Close ends the connection once its calls have ended.
func (t *Client) Close() {
	t.mu.Lock()
	c := t.conn
	t.conn = nil
	t.mu.Unlock()
	if c != nil {
		c.retire()
	}
}

func closeBody(req *http.Request) {
	if req.Body != nil {
		req.Body.Close()
	}
}

// connected is the connection for a new call.
func (t *Client) connected(ctx context.Context) (*clientConn, error) {
	for {
		t.mu.Lock()
		if t.conn != nil && t.conn.usable() {
			c := t.conn
			t.mu.Unlock()
			return c, nil
		}
		if wait := t.dialing; wait != nil {
			t.mu.Unlock()
			select {
			case <-wait:
				continue
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		done := make(chan struct{})
		t.dialing = done
		t.mu.Unlock()
		c, err := t.dial(ctx)
		t.mu.Lock()
		if t.dialing = nil; err == nil {
			t.conn = c
		}
		t.mu.Unlock()
		close(done)
		if err != nil {
			return nil, err
		}
	}
}

func (t *Client) dial(ctx context.Context) (*clientConn, error) {
	nc, err := t.Dial(ctx)
	if err != nil {
		return nil, err
	}
	out := newPatient(nc)
	secured := tls.Client(out, t.TLS)
	ctx, cancel := context.WithTimeout(ctx, t.Timeout)
	defer cancel()
	if err := secured.HandshakeContext(ctx); err != nil {
		nc.Close()
		return nil, err
	}
	if p := secured.ConnectionState().NegotiatedProtocol; p != http2.NextProtoTLS {
		nc.Close()
		return nil, fmt.Errorf("the server speaks %q, not HTTP/2", p)
	}
	return newClientConn(secured, out), nil
}

// clientConn is a client's connection.
type clientConn struct {
	*conn
	// nextID and retired are guarded by conn.mu. A retired connection takes no
	// more calls, and ends with the last that it has.
	nextID  uint32
	retired bool
	// done is closed when the reader has ended.
	done chan struct{}
}

func newClientConn(nc net.Conn, out *patient) *clientConn {
	c := &clientConn{nextID: 1, done: make(chan struct{})}
	c.conn = newConn(nc, out, c)
	c.pending = append(c.pending, http2.ClientPreface...)
	c.greet(
		http2.Setting{ID: http2.SettingEnablePush, Val: 0},
		http2.Setting{ID: http2.SettingInitialWindowSize, Val: streamWindow},
		http2.Setting{ID: http2.SettingMaxHeaderListSize, Val: maxHeaders},
	)
	// It ends with the connection, which the last call of a retired one ends.
	go func() {
		defer close(c.done)
		_ = c.read() // every call has the error
	}()
	return c
}

func (c *clientConn) usable() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err == nil && c.deaf == nil && !c.retired
}

// retire ends the connection once it is idle, and waits for that if it is.
func (c *clientConn) retire() {
	c.mu.Lock()
	c.retired = true
	c.room.Broadcast()
	c.endIfIdle()
	ended := c.err != nil
	c.mu.Unlock()
	if ended {
		<-c.done
		c.tasks.Wait()
	}
}

func (c *clientConn) refused(uint32) {}

func (c *clientConn) settled() {}

func (c *clientConn) endIfIdle() {
	if c.retired && len(c.streams) == 0 {
		c.fail(net.ErrClosed)
	}
}

func (c *clientConn) goAway(last uint32) {
	c.retired = true
	for id, st := range c.streams {
		if id > last {
			c.drop(st, errUnprocessed)
		}
	}
	c.room.Broadcast()
	c.endIfIdle()
}

// body is a response's. It is closed by reading it to the end, too.
type body struct {
	*stream
	resp *http.Response
	req  *http.Request
	ctx  context.Context
	stop func() bool
	// source is the request's body if it did not leave with the headers. The
	// request itself gets another one when it is tried again.
	source io.ReadCloser

	status int
	header http.Header
}

// buffers hold the bodies of requests.
var buffers = sync.Pool{New: func() any { return new([maxFrame]byte) }}

func (c *clientConn) call(req *http.Request) (*http.Response, error) {
	b := &body{stream: c.newStream(), req: req, ctx: req.Context()}
	b.owner = b
	b.dropped = b.gone
	if err := b.ctx.Err(); err != nil {
		closeBody(req)
		return nil, err
	}
	buf := buffers.Get().(*[maxFrame]byte)
	// The first part of a body whose size is known is in memory: it goes with the
	// headers. The rest, or a body that is still being written, goes as the server
	// takes it.
	whole := req.Body == nil || req.Body == http.NoBody || req.ContentLength == 0
	var first []byte
	if !whole && req.ContentLength > 0 {
		n, err := io.ReadFull(req.Body, buf[:min(req.ContentLength, maxFrame)])
		if err != nil {
			buffers.Put(buf)
			closeBody(req)
			return nil, fmt.Errorf("read the request's body: %w", err)
		}
		first, whole = buf[:n], int64(n) == req.ContentLength
	}
	if !whole {
		b.source = req.Body
	}
	b.stop = context.AfterFunc(b.ctx, b.abort)
	c.mu.Lock()
	err := c.open(b.stream, req, whole, first)
	c.flush()
	if err == nil && !whole {
		c.tasks.Go(func() { b.send(buf, first) })
	}
	for err == nil && !b.headed {
		if err = b.err; err == nil {
			b.data.Wait()
		}
	}
	c.mu.Unlock()
	if whole {
		buffers.Put(buf)
	}
	if err != nil || whole {
		closeBody(req)
	}
	if err != nil {
		b.stop()
		if ctxErr := b.ctx.Err(); ctxErr != nil {
			err = ctxErr
		}
		return nil, err
	}
	b.resp = &http.Response{
		Status: strconv.Itoa(b.status), StatusCode: b.status, Proto: "HTTP/2.0", ProtoMajor: 2,
		Header: b.header, Body: b, ContentLength: -1, Request: req,
	}
	return b.resp, nil
}

// open sends a call's headers, and its body as far as it is known. mu is held.
func (c *clientConn) open(st *stream, req *http.Request, whole bool, first []byte) error {
	full := func() bool {
		return c.err == nil && c.deaf == nil && !c.retired && st.err == nil &&
			(len(c.streams) >= int(min(c.peer.streams, maxWindow)) || len(c.pending) >= maxPending)
	}
	for full() {
		if c.flush(); full() {
			c.wait()
		}
	}
	switch {
	case c.err != nil && c.lastID == 0:
		return c.err
	case c.err != nil || c.deaf != nil || c.retired || c.nextID > maxWindow:
		c.retired = true
		return errUnprocessed
	case st.err != nil:
		return st.err
	}
	st.id = c.nextID
	st.sendWindow = c.peer.initialWindow
	c.nextID += 2
	c.lastID = st.id
	c.streams[st.id] = st
	path := req.URL.Path
	if req.URL.RawQuery != "" || req.URL.RawPath != "" {
		path = req.URL.RequestURI()
	}
	host := req.Host
	if host == "" {
		host = req.URL.Host
	}
	c.field(":method", req.Method)
	c.field(":scheme", "https")
	c.field(":authority", host)
	c.field(":path", path)
	c.fields(req.Header)
	c.appendBlock(st, whole && len(first) == 0)
	if len(first) == 0 {
		return nil
	}
	return c.appendData(st, first, whole)
}

// send sends what comes after first of a body. Of gRPC's messages, which come in
// two writes, each is flushed as a whole.
func (b *body) send(buf *[maxFrame]byte, first []byte) {
	defer buffers.Put(buf)
	c := b.c
	var m message
	m.write(first)
	for {
		n, rerr := b.source.Read(buf[:])
		whole := m.write(buf[:n])
		c.mu.Lock()
		err := c.appendData(b.stream, buf[:n], rerr == io.EOF)
		if rerr != nil && rerr != io.EOF && err == nil {
			c.reset(b.stream, http2.ErrCodeCancel, rerr)
		}
		if whole || rerr != nil {
			c.flush()
		}
		ended := b.remoteEnded || b.err != nil
		c.mu.Unlock()
		if rerr != nil || err != nil || ended {
			b.source.Close()
			return
		}
	}
}

// message follows the length-prefixed messages of gRPC.
type message struct {
	prefix [5]byte
	have   int
	left   int
}

// write takes the next bytes, and reports whether they end with a message's end.
func (m *message) write(p []byte) bool {
	for len(p) > 0 {
		if m.have < len(m.prefix) {
			n := copy(m.prefix[m.have:], p)
			m.have += n
			p = p[n:]
			if m.have < len(m.prefix) {
				return false
			}
			m.left = int(uint32(m.prefix[1])<<24 | uint32(m.prefix[2])<<16 | uint32(m.prefix[3])<<8 | uint32(m.prefix[4]))
		}
		n := min(len(p), m.left)
		m.left -= n
		p = p[n:]
		if m.left == 0 {
			m.have = 0
		}
	}
	return m.have == 0
}

// headers takes the answer's headers, and its trailers.
func (c *clientConn) headers(st *stream, h *block) error {
	id := h.id
	if st == nil {
		if id > c.lastID || id%2 == 0 {
			return http2.ConnectionError(http2.ErrCodeProtocol)
		}
		return nil
	}
	b := st.owner.(*body)
	if st.remoteEnded {
		return http2.StreamError{StreamID: id, Code: http2.ErrCodeStreamClosed}
	}
	if st.headed {
		if !h.end || len(h.pseudo) > 0 {
			return http2.StreamError{StreamID: id, Code: http2.ErrCodeProtocol}
		}
		st.trailer = h.header()
	} else {
		status, err := strconv.Atoi(h.value(":status"))
		if err != nil || status < 100 || status > 999 || status < 200 && h.end {
			return http2.StreamError{StreamID: id, Code: http2.ErrCodeProtocol}
		}
		if status < 200 {
			return nil // more will come
		}
		b.status, b.header = status, h.header()
		st.headed = true
	}
	if h.end {
		c.remoteEnd(st)
	}
	c.wake(st)
	return nil
}

// Read reads the answer.
func (b *body) Read(p []byte) (int, error) {
	n, err := b.read(p)
	if err == nil {
		return n, nil
	}
	b.stop()
	if err == io.EOF {
		b.resp.Trailer = b.trailer
	} else if ctxErr := b.ctx.Err(); ctxErr != nil {
		err = ctxErr
	}
	return n, err
}

// Close ends the call, if it has not ended.
func (b *body) Close() error {
	b.stop()
	b.end(errClosed)
	return nil
}

func (b *body) abort() { b.end(b.ctx.Err()) }

func (b *body) end(err error) {
	c := b.c
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reset(b.stream, http2.ErrCodeCancel, err)
	c.flush()
	b.fail(err)
	b.stopSending()
}

// gone is told that the connection has forgotten the call. mu is held.
func (b *body) gone() {
	if b.err != nil {
		b.stopSending()
	}
	b.stream.c.role.endIfIdle()
}

// stopSending tells whoever writes the request's body to stop.
func (b *body) stopSending() {
	if b.source != nil {
		b.source.Close()
	}
}
