// Package h2 is HTTP/2 as gRPC needs it between two processes of one machine.
//
// net/http's HTTP/2 hands each frame from goroutine to goroutine and flushes it
// by itself; for a call that does little, that is most of its time. Here the
// goroutine that has something to say writes it, with whatever the others have to
// say by then, and a call's frames leave in one TLS record. It has what the HTTP/2
// of gRPC needs and no more: no server push, no priorities, no upgrade from
// HTTP/1, trailers by http.TrailerPrefix only.
package h2

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"runtime"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

const (
	// streamWindow is how much a stream takes that nobody has read yet.
	streamWindow = 1 << 20
	// connWindow is given back as bytes arrive: what bounds memory is a stream's
	// window times the streams that this side opened or allowed.
	connWindow = 16 << 20
	// maxStreams is how many calls a server runs at a time.
	maxStreams = 256
	// earlyStreams is how many are opened before the server has said how many it takes.
	earlyStreams = 100
	// maxHeaders bounds the headers of a message.
	maxHeaders = 64 << 10
	// maxBlock bounds them on the wire, where nobody ends a block.
	maxBlock = 4 * maxHeaders
	// maxFrame is the largest payload that is sent and taken: with it a frame
	// fills a TLS record.
	maxFrame = 16 << 10
	// maxPending is how much may wait for the other side to read before those
	// who send data wait as well.
	maxPending = 256 << 10
	// maxOwed bounds what waits because the other side made this one answer,
	// and does not read the answers.
	maxOwed = maxPending + 1<<20

	// deafLimit is how long the rest is read of what a lost peer said.
	deafLimit = time.Second

	frameHeader = 9
	maxWindow   = math.MaxInt32
)

// errUnprocessed is of a call that the other side has not looked at.
var errUnprocessed = errors.New("h2: the other side is shutting down")

// role is what differs between the two ends.
type role interface {
	// headers takes a whole block of headers; st is nil if there is no such stream.
	headers(st *stream, b *block) error
	// settled is told that the reader is about to wait.
	settled()
	// refused is told of a stream whose headers were not accepted.
	refused(id uint32)
	// endIfIdle ends the connection if it was only waiting for the last call.
	endIfIdle()
	// goAway is told that the other side takes no more streams, and none above last.
	goAway(last uint32)
}

// conn is one connection. A call's headers, data and answer pass through it
// under mu, which is never held while anything is waited for.
type conn struct {
	role role
	nc   net.Conn
	out  *patient
	br   *bufio.Reader
	fr   *http2.Framer // for reading
	in   *block
	// woken are the streams to wake before the next wait for bytes; the reader's own.
	woken []*stream
	tasks sync.WaitGroup

	mu sync.Mutex
	// room is told when a window opens, pending shrinks, or a stream ends.
	room    sync.Cond
	waiting int // for room
	pending []byte
	spare   []byte
	writing bool
	enc     *hpack.Encoder
	encoded bytes.Buffer // a block of headers
	streams map[uint32]*stream
	// lastID is the highest stream so far.
	lastID uint32

	sendWindow, recvWindow int64
	peer                   struct {
		initialWindow int64
		frame         int
		streams       uint32
		known         bool // its settings have come
	}
	// deaf is why nothing can be written any more. What the other side said before
	// it stopped listening is still read.
	deaf error
	err  error
}

func newConn(nc net.Conn, out *patient, r role) *conn {
	out.start()
	c := &conn{role: r, nc: nc, out: out, streams: map[uint32]*stream{}, sendWindow: 65535, recvWindow: connWindow}
	c.room.L = &c.mu
	c.peer.initialWindow, c.peer.frame, c.peer.streams = 65535, maxFrame, earlyStreams
	c.enc = hpack.NewEncoder(&c.encoded)
	c.br = bufio.NewReaderSize(nc, 2*(maxFrame+frameHeader))
	c.fr = http2.NewFramer(io.Discard, c.br)
	c.fr.SetReuseFrames()
	c.fr.SetMaxReadFrameSize(maxFrame)
	c.in = newBlock()
	return c
}

// greet is the first that a side says: its settings, and the connection's window.
func (c *conn) greet(settings ...http2.Setting) {
	c.pending = appendHeader(c.pending, 6*len(settings), http2.FrameSettings, 0, 0)
	for _, s := range settings {
		c.pending = binary.BigEndian.AppendUint16(c.pending, uint16(s.ID))
		c.pending = binary.BigEndian.AppendUint32(c.pending, s.Val)
	}
	c.pending = appendUint32(c.pending, http2.FrameWindowUpdate, 0, connWindow-65535)
}

func appendHeader(b []byte, length int, t http2.FrameType, flags http2.Flags, id uint32) []byte {
	return append(b, byte(length>>16), byte(length>>8), byte(length), byte(t), byte(flags), byte(id>>24), byte(id>>16), byte(id>>8), byte(id))
}

// appendUint32 appends a WINDOW_UPDATE or a RST_STREAM.
func appendUint32(b []byte, t http2.FrameType, id, value uint32) []byte {
	return binary.BigEndian.AppendUint32(appendHeader(b, 4, t, 0, id), value)
}

func appendGoAway(b []byte, last uint32, code http2.ErrCode) []byte {
	b = appendHeader(b, 8, http2.FrameGoAway, 0, 0)
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(b, last), uint32(code))
}

// field adds a header to the block that appendBlock sends. mu is held.
func (c *conn) field(name, value string) {
	// A time that is left is different in each call.
	_ = c.enc.WriteField(hpack.HeaderField{Name: name, Value: value, Sensitive: name == "grpc-timeout"}) // to memory
}

// fields adds h, apart from what is the connection's own.
func (c *conn) fields(h http.Header) {
	for name, values := range h {
		lower := lowerName(name)
		if lower == "" || connectionSpecific(lower) {
			continue
		}
		for _, v := range values {
			c.field(lower, v)
		}
	}
}

// appendBlock sends the fields that were added as st's headers. mu is held.
func (c *conn) appendBlock(st *stream, end bool) {
	t, flags := http2.FrameHeaders, http2.Flags(0)
	if end {
		flags = http2.FlagHeadersEndStream
	}
	for block := c.encoded.Bytes(); ; {
		n := min(len(block), c.peer.frame)
		if n == len(block) {
			flags |= http2.FlagHeadersEndHeaders
		}
		c.pending = append(appendHeader(c.pending, n, t, flags, st.id), block[:n]...)
		if block = block[n:]; len(block) == 0 {
			break
		}
		t, flags = http2.FrameContinuation, 0
	}
	c.encoded.Reset()
	if end {
		c.localEnd(st)
	}
}

// wait waits for room. mu is held.
func (c *conn) wait() {
	c.waiting++
	c.room.Wait()
	c.waiting--
}

// appendData sends p, piece by piece as the windows allow. mu is held, though not
// while it waits.
func (c *conn) appendData(st *stream, p []byte, end bool) error {
	for {
		if st.err != nil {
			return st.err
		}
		if c.deaf != nil {
			return c.deaf
		}
		if st.localEnded {
			return errors.New("h2: write after the stream's end")
		}
		n := int(min(int64(len(p)), int64(c.peer.frame), st.sendWindow, c.sendWindow))
		if len(p) > 0 && (n <= 0 || len(c.pending) >= maxPending) {
			if c.flush(); st.err == nil && c.deaf == nil && (min(st.sendWindow, c.sendWindow) <= 0 || len(c.pending) >= maxPending) {
				c.wait()
			}
			continue
		}
		last := end && n == len(p)
		if n > 0 || last {
			flags := http2.Flags(0)
			if last {
				flags = http2.FlagDataEndStream
			}
			c.pending = append(appendHeader(c.pending, n, http2.FrameData, flags, st.id), p[:n]...)
			st.sendWindow -= int64(n)
			c.sendWindow -= int64(n)
		}
		if p = p[n:]; len(p) == 0 {
			if last {
				c.localEnd(st)
			}
			return nil
		}
	}
}

// flush writes what is pending, unless somebody is at it, who will then write
// this as well. mu is held, though not while it writes.
func (c *conn) flush() {
	if c.writing || len(c.pending) == 0 || c.err != nil || c.deaf != nil {
		return
	}
	c.writing = true
	if len(c.streams) > 1 {
		// Others may be about to say something: let them, and write it all at once.
		c.mu.Unlock()
		runtime.Gosched()
		c.mu.Lock()
	}
	c.write()
}

// write is flush for whoever has taken writing.
func (c *conn) write() {
	for len(c.pending) > 0 && c.err == nil && c.deaf == nil {
		b := c.pending
		c.pending, c.spare = c.spare[:0], nil
		c.mu.Unlock()
		c.out.cork()
		_, err := c.nc.Write(b)
		behind, oerr := c.out.uncork()
		if err == nil {
			err = oerr
		}
		c.mu.Lock()
		if c.spare = b[:0]; cap(b) > 2*maxPending {
			c.spare = nil
		}
		if c.waiting > 0 {
			c.room.Broadcast()
		}
		if err != nil {
			c.deafen(err)
			break
		}
		if behind {
			// The other side is slow: from here on a goroutine waits for it.
			c.tasks.Go(func() {
				err := c.out.finish()
				c.mu.Lock()
				defer c.mu.Unlock()
				if err != nil {
					c.deafen(err)
				}
				c.write()
			})
			return
		}
	}
	c.writing = false
	c.role.endIfIdle()
}

// deafen notes that the other side does not listen. mu is held.
func (c *conn) deafen(err error) {
	c.deaf = fmt.Errorf("write: %w", err)
	c.pending = nil
	c.room.Broadcast()
	// The reader comes to the end soon, or is made to.
	_ = c.nc.SetReadDeadline(time.Now().Add(deafLimit))
}

// fail ends the connection and all that is on it. mu is held.
func (c *conn) fail(err error) {
	if c.err != nil {
		return
	}
	c.err = err
	for id, st := range c.streams {
		delete(c.streams, id)
		st.fail(err)
		if st.dropped != nil {
			st.dropped()
		}
	}
	c.room.Broadcast()
	c.nc.Close()
}

// read takes frames until the connection ends, and says why it did.
func (c *conn) read() error {
	for {
		if !c.frameIsHere() {
			c.settle()
		}
		f, err := c.fr.ReadFrame()
		if err == nil {
			c.mu.Lock()
			err = c.take(f)
			if err == nil && len(c.pending) > maxOwed {
				err = http2.ConnectionError(http2.ErrCodeEnhanceYourCalm)
			}
			c.mu.Unlock()
		}
		var se http2.StreamError
		if errors.As(err, &se) {
			c.mu.Lock()
			c.role.refused(se.StreamID)
			if st := c.streams[se.StreamID]; st != nil {
				c.reset(st, se.Code, se)
			} else {
				c.pending = appendUint32(c.pending, http2.FrameRSTStream, se.StreamID, uint32(se.Code))
			}
			owed := len(c.pending)
			c.mu.Unlock()
			if owed <= maxOwed {
				continue
			}
			err = http2.ConnectionError(http2.ErrCodeEnhanceYourCalm)
		}
		if err == io.EOF {
			err = io.ErrUnexpectedEOF // for a call it is no end
		}
		if err != nil {
			c.mu.Lock()
			var ce http2.ConnectionError
			if errors.As(err, &ce) {
				// Said in passing: the error is the other side's.
				c.pending = appendGoAway(c.pending, c.lastID, http2.ErrCode(ce))
				c.flush()
			}
			c.fail(err)
			c.mu.Unlock()
			c.settle()
			return err
		}
	}
}

// frameIsHere reports whether the next frame can be read without waiting. As long
// as it can, those who wait for the ones before are left asleep: most often the
// next one is for them too.
func (c *conn) frameIsHere() bool {
	if c.br.Buffered() < frameHeader {
		return false
	}
	h, err := c.br.Peek(frameHeader)
	if err != nil || len(c.woken) >= 64 {
		return false
	}
	if t := http2.FrameType(h[3]); t == http2.FrameHeaders && http2.Flags(h[4])&http2.FlagHeadersEndHeaders == 0 {
		return false
	}
	return c.br.Buffered() >= frameHeader+int(h[0])<<16+int(h[1])<<8+int(h[2])
}

// wake has st woken before the reader waits. The reader calls it with mu held.
func (c *conn) wake(st *stream) {
	if !st.woken {
		st.woken = true
		c.woken = append(c.woken, st)
	}
}

// settle wakes whoever has got something, and sends what the reader owes. It
// wakes without mu, which those who are woken need first.
func (c *conn) settle() {
	c.mu.Lock()
	for _, st := range c.woken {
		st.woken = false
	}
	owes := len(c.pending) > 0
	c.mu.Unlock()
	for i, st := range c.woken {
		st.data.Broadcast()
		c.woken[i] = nil
	}
	c.woken = c.woken[:0]
	c.role.settled()
	if owes {
		c.mu.Lock()
		c.flush()
		c.mu.Unlock()
	}
}

// take handles a frame. mu is held.
func (c *conn) take(f http2.Frame) error {
	id := f.Header().StreamID
	st := c.streams[id]
	switch f := f.(type) {
	case *http2.DataFrame:
		return c.takeData(st, f)
	case *http2.HeadersFrame:
		c.in.begin(f)
		return c.takeBlock(st, f.HeaderBlockFragment(), f.HeadersEnded())
	case *http2.ContinuationFrame: // of the block that began: the framer sees to that
		return c.takeBlock(st, f.HeaderBlockFragment(), f.HeadersEnded())
	case *http2.RSTStreamFrame:
		if id > c.lastID {
			return http2.ConnectionError(http2.ErrCodeProtocol)
		}
		if st != nil {
			err := error(http2.StreamError{StreamID: id, Code: f.ErrCode, Cause: errors.New("received from the other side")})
			if f.ErrCode == http2.ErrCodeRefusedStream {
				err = errUnprocessed
			}
			c.drop(st, err)
			c.wake(st)
		}
	case *http2.SettingsFrame:
		return c.takeSettings(f)
	case *http2.PingFrame:
		if !f.IsAck() {
			c.pending = append(appendHeader(c.pending, len(f.Data), http2.FramePing, http2.FlagPingAck, 0), f.Data[:]...)
		}
	case *http2.GoAwayFrame:
		c.role.goAway(f.LastStreamID)
	case *http2.WindowUpdateFrame:
		window := &c.sendWindow
		if id != 0 {
			if id > c.lastID {
				return http2.ConnectionError(http2.ErrCodeProtocol)
			}
			if st == nil {
				return nil
			}
			window = &st.sendWindow
		}
		if *window += int64(f.Increment); *window > maxWindow {
			if id != 0 {
				return http2.StreamError{StreamID: id, Code: http2.ErrCodeFlowControl}
			}
			return http2.ConnectionError(http2.ErrCodeFlowControl)
		}
		if c.waiting > 0 {
			c.room.Broadcast()
		}
	case *http2.PushPromiseFrame:
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	return nil
}

func (c *conn) takeBlock(st *stream, part []byte, last bool) error {
	if err := c.in.write(part); err != nil || !last {
		return err
	}
	if err := c.in.done(); err != nil {
		return err
	}
	return c.role.headers(st, c.in)
}

func (c *conn) takeData(st *stream, f *http2.DataFrame) error {
	n := int64(f.Length)
	if c.recvWindow -= n; c.recvWindow < 0 {
		return http2.ConnectionError(http2.ErrCodeFlowControl)
	}
	if given := connWindow - c.recvWindow; given >= connWindow/2 {
		c.pending = appendUint32(c.pending, http2.FrameWindowUpdate, 0, uint32(given))
		c.recvWindow = connWindow
	}
	if st == nil {
		if f.StreamID > c.lastID {
			return http2.ConnectionError(http2.ErrCodeProtocol)
		}
		return nil // sent before the other side knew that the stream is over
	}
	if st.remoteEnded {
		return http2.StreamError{StreamID: st.id, Code: http2.ErrCodeStreamClosed}
	}
	if !st.headed {
		return http2.StreamError{StreamID: st.id, Code: http2.ErrCodeProtocol}
	}
	if st.recvWindow -= n; st.recvWindow < 0 {
		return http2.StreamError{StreamID: st.id, Code: http2.ErrCodeFlowControl}
	}
	data := f.Data()
	st.put(data)
	st.consumed(int(n) - len(data)) // padding
	if f.StreamEnded() {
		c.remoteEnd(st)
	}
	c.wake(st)
	return nil
}

func (c *conn) takeSettings(f *http2.SettingsFrame) error {
	if f.IsAck() {
		return nil
	}
	if !c.peer.known {
		c.peer.known, c.peer.streams = true, math.MaxUint32
	}
	err := f.ForeachSetting(func(s http2.Setting) error {
		if err := s.Valid(); err != nil {
			return err
		}
		switch s.ID {
		case http2.SettingInitialWindowSize:
			delta := int64(s.Val) - c.peer.initialWindow
			c.peer.initialWindow = int64(s.Val)
			for _, st := range c.streams {
				if st.sendWindow += delta; st.sendWindow > maxWindow {
					return http2.ConnectionError(http2.ErrCodeFlowControl)
				}
			}
		case http2.SettingMaxFrameSize:
			c.peer.frame = int(min(s.Val, maxFrame))
		case http2.SettingMaxConcurrentStreams:
			c.peer.streams = s.Val
		case http2.SettingHeaderTableSize:
			c.enc.SetMaxDynamicTableSizeLimit(min(s.Val, 4096))
		}
		return nil
	})
	if err != nil {
		return err
	}
	c.pending = appendHeader(c.pending, 0, http2.FrameSettings, http2.FlagSettingsAck, 0)
	c.room.Broadcast()
	return nil
}

// localEnd notes that this side has said its last on st. mu is held.
func (c *conn) localEnd(st *stream) {
	if st.localEnded = true; st.remoteEnded {
		c.drop(st, nil)
	}
}

// remoteEnd notes that the other side has said its last on st. mu is held.
func (c *conn) remoteEnd(st *stream) {
	if st.remoteEnded = true; st.localEnded {
		c.drop(st, nil)
	}
}

// drop forgets st. An error is what its users get. mu is held.
func (c *conn) drop(st *stream, err error) {
	if c.streams[st.id] != st {
		return
	}
	delete(c.streams, st.id)
	if err != nil {
		st.fail(err)
	}
	if st.dropped != nil {
		st.dropped()
	}
	if c.waiting > 0 {
		c.room.Broadcast()
	}
}

// reset ends a stream before its time, unless it is over. mu is held.
func (c *conn) reset(st *stream, code http2.ErrCode, err error) {
	if c.streams[st.id] != st {
		return
	}
	c.pending = appendUint32(c.pending, http2.FrameRSTStream, st.id, uint32(code))
	c.drop(st, err)
}
