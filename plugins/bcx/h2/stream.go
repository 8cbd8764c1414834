package h2

import (
	"errors"
	"io"
	"net/http"
	"sync"

	"golang.org/x/net/http2"
)

var errClosed = errors.New("h2: read after Close")

// stream is one call. Its fields are guarded by conn.mu.
type stream struct {
	c  *conn
	id uint32
	// owner is the client's or the server's part of the call.
	owner any
	// data is told when bytes, headers or the end have come.
	data  sync.Cond
	woken bool
	// dropped is called once the connection has forgotten the stream.
	dropped func()

	sendWindow, recvWindow  int64
	localEnded, remoteEnded bool
	err                     error

	// headed is true once the other side's headers are there.
	headed  bool
	trailer http.Header
	// first to last hold what came and was not read.
	first, last *chunk
	// owed is what was read and not given back to the window.
	owed int
}

func (c *conn) newStream() *stream {
	st := &stream{c: c, recvWindow: streamWindow}
	st.data.L = &c.mu
	return st
}

// fail is the end of a stream that has not ended by itself. mu is held.
func (st *stream) fail(err error) {
	if st.err == nil {
		st.err = err
	}
	st.data.Broadcast()
	if st.c.waiting > 0 {
		st.c.room.Broadcast()
	}
}

// chunk holds a part of what came.
type chunk struct {
	next *chunk
	r, w int
	b    [maxFrame]byte
}

var chunks = sync.Pool{New: func() any { return new(chunk) }}

// put takes received bytes. mu is held.
func (st *stream) put(p []byte) {
	for len(p) > 0 {
		if st.last == nil || st.last.w == maxFrame {
			k := chunks.Get().(*chunk)
			k.next, k.r, k.w = nil, 0, 0
			if st.last == nil {
				st.first = k
			} else {
				st.last.next = k
			}
			st.last = k
		}
		n := copy(st.last.b[st.last.w:], p)
		st.last.w += n
		p = p[n:]
	}
}

// get gives received bytes. mu is held.
func (st *stream) get(p []byte) (total int) {
	for len(p) > 0 && st.first != nil {
		k := st.first
		n := copy(p, k.b[k.r:k.w])
		k.r += n
		total += n
		p = p[n:]
		if k.r == k.w {
			if st.first = k.next; st.first == nil {
				st.last = nil
			}
			chunks.Put(k)
		}
	}
	return total
}

// consumed gives n bytes back to the window. mu is held.
func (st *stream) consumed(n int) {
	if st.owed += n; st.owed < streamWindow/2 || st.remoteEnded || st.err != nil {
		return
	}
	st.c.pending = appendUint32(st.c.pending, http2.FrameWindowUpdate, st.id, uint32(st.owed))
	st.recvWindow += int64(st.owed)
	st.owed = 0
}

// read copies what has come, or waits for it. At the end it is io.EOF.
func (st *stream) read(p []byte) (int, error) {
	c := st.c
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		if n := st.get(p); n > 0 {
			st.consumed(n)
			c.flush()
			return n, nil
		}
		switch {
		case st.remoteEnded && !errors.Is(st.err, errClosed):
			return 0, io.EOF
		case st.err != nil:
			return 0, st.err
		}
		if len(p) == 0 {
			return 0, nil
		}
		st.data.Wait()
	}
}
