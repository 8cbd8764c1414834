package redfish

import (
	"bufio"
	"context"
	"crypto/rand"
	"crypto/sha1" //nolint:gosec // RFC 6455 has it, and nothing is kept secret by it
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// The frames of a WebSocket (RFC 6455, section 5.2).
const (
	frameMore   = 0x0
	frameText   = 0x1
	frameBinary = 0x2
	frameClose  = 0x8
	framePing   = 0x9
	framePong   = 0xa

	frameLast    = 0x80
	frameMasked  = 0x80
	frameControl = 0x8

	// maxControl is the standard's, maxFrame ours: a console's have some KiB.
	maxControl = 125
	maxFrame   = 1 << 20

	socketKey  = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
	normalExit = 1000
)

// socketTiming is how long things of a socket last.
type socketTiming struct {
	// A BMC from which nothing comes for alive/2 is pinged, and given up after alive.
	alive time.Duration
	// write bounds one frame's writing, and leave the end of a socket.
	write, leave time.Duration
}

var standardSocket = socketTiming{alive: 90 * time.Second, write: 30 * time.Second, leave: 2 * time.Second}

// webSocket is the client's end of one.
type webSocket struct {
	conn   io.ReadWriteCloser
	r      *bufio.Reader
	secret string // what it was opened with, and no error repeats
	timing socketTiming

	heard atomic.Int64 // bytes that came
	left  atomic.Bool  // we said that we leave
	mute  atomic.Bool  // given up: nothing came, or nothing went

	writing sync.Mutex
	ending  sync.Once
	closed  chan struct{}
}

// offerSocket asks for a socket in a request's header; the key proves the answer.
func offerSocket(h http.Header) (key string) {
	var nonce [16]byte
	_, _ = rand.Read(nonce[:]) // never fails
	key = base64.StdEncoding.EncodeToString(nonce[:])
	h.Set("Connection", "Upgrade")
	h.Set("Upgrade", "websocket")
	h.Set("Sec-WebSocket-Version", "13")
	h.Set("Sec-WebSocket-Key", key)
	return key
}

func socketProof(key string) string {
	sum := sha1.Sum([]byte(key + socketKey)) //nolint:gosec // as above
	return base64.StdEncoding.EncodeToString(sum[:])
}

// acceptSocket judges an answer that switches protocols.
func acceptSocket(resp *http.Response, key, secret string) (*webSocket, error) {
	conn, ok := resp.Body.(io.ReadWriteCloser)
	wrong := ""
	switch h := resp.Header; {
	case !ok || !strings.EqualFold(h.Get("Upgrade"), "websocket"):
		wrong = "it switches to another protocol than WebSocket"
	case h.Get("Sec-WebSocket-Accept") != socketProof(key):
		wrong = "its answer is not to this request"
	case h.Get("Sec-WebSocket-Extensions") != "" || h.Get("Sec-WebSocket-Protocol") != "":
		wrong = "it chose what was not offered"
	}
	if wrong != "" {
		resp.Body.Close()
		return nil, errs.New(errs.BmcError, "the BMC's console is no WebSocket: %s", wrong)
	}
	w := &webSocket{conn: conn, secret: secret, timing: standardSocket, closed: make(chan struct{})}
	w.r = bufio.NewReaderSize(&heeded{conn, &w.heard}, 8<<10)
	return w, nil
}

// heeded counts what comes.
type heeded struct {
	io.Reader
	n *atomic.Int64
}

func (c *heeded) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.n.Add(int64(n))
	return n, err
}

// carry opens the stream and carries bytes both ways until one side or ctx ends.
func (w *webSocket) carry(ctx context.Context, stream io.ReadWriter) error {
	defer w.cut()
	if _, err := stream.Write(nil); err != nil { // it opens the stream
		w.leave()
		return err
	}
	over := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() { w.watch(over) })
	defer watching.Wait()
	defer close(over)
	stop := context.AfterFunc(ctx, w.leave)
	defer stop()
	go w.toMachine(stream) // ends with the stream, at the latest
	ended := make(chan error, 1)
	go func() { ended <- w.fromMachine(stream) }()
	var err error
	select {
	case err = <-ended:
	case <-w.closed: // by one of the reasons below: a person who reads nothing holds nothing up
	}
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("console: %w", ctx.Err())
	case w.mute.Load():
		return errs.Retry(errs.Unreachable, "the console's connection to the BMC is dead: nothing came for %v, or nothing could be sent for %v", w.timing.alive, w.timing.write)
	case w.left.Load():
		return nil
	}
	return err
}

// watch pings a BMC that says nothing, and gives it up.
func (w *webSocket) watch(over chan struct{}) {
	ticker := time.NewTicker(w.timing.alive / 2)
	defer ticker.Stop()
	before, silent := w.heard.Load(), 0
	for {
		select {
		case <-over:
			return
		case <-ticker.C:
		}
		now := w.heard.Load()
		if now != before {
			before, silent = now, 0
			continue
		}
		if silent++; silent > 1 {
			w.giveUp()
			return
		}
		if w.writing.TryLock() { // who writes has a limit of its own
			err := w.put(framePing, nil)
			w.writing.Unlock()
			if err != nil {
				return // reading ends too
			}
		}
	}
}

func (w *webSocket) giveUp() {
	w.mute.Store(true)
	w.cut()
}

func (w *webSocket) cut() {
	w.ending.Do(func() {
		_ = w.conn.Close()
		close(w.closed)
	})
}

// leave says so to the BMC, and waits a little for its answer, which ends reading.
func (w *webSocket) leave() {
	if w.left.Swap(true) {
		return
	}
	time.AfterFunc(w.timing.leave, w.cut)
	go func() { _ = w.send(frameClose, binary.BigEndian.AppendUint16(nil, normalExit)) }()
}

func (w *webSocket) toMachine(stream io.Reader) {
	buf := make([]byte, 4<<10)
	for {
		n, err := stream.Read(buf)
		if n > 0 && w.send(frameBinary, buf[:n]) != nil {
			return
		}
		if err != nil {
			w.leave()
			return
		}
	}
}

func (w *webSocket) send(kind byte, payload []byte) error {
	w.writing.Lock()
	defer w.writing.Unlock()
	return w.put(kind, payload)
}

// put writes one frame; the caller holds writing.
func (w *webSocket) put(kind byte, payload []byte) error {
	frame := []byte{frameLast | kind}
	if n := len(payload); n <= maxControl {
		frame = append(frame, frameMasked|byte(n))
	} else {
		frame = binary.BigEndian.AppendUint16(append(frame, frameMasked|126), uint16(n)) //nolint:gosec // 4 KiB at most
	}
	var mask [4]byte
	_, _ = rand.Read(mask[:]) // never fails
	frame = append(frame, mask[:]...)
	for i, b := range payload {
		frame = append(frame, b^mask[i%len(mask)])
	}
	limit := time.AfterFunc(w.timing.write, w.giveUp)
	defer limit.Stop()
	_, err := w.conn.Write(frame)
	return err
}

// fromMachine gives the stream what the BMC sends, piece by piece, until it ends.
func (w *webSocket) fromMachine(stream io.Writer) error {
	buf := make([]byte, 32<<10)
	within := false // a message that goes on
	for {
		f, err := w.next()
		if err != nil {
			return err
		}
		if f.kind&frameControl != 0 {
			if err := w.control(f); err != nil {
				return err
			}
			continue
		}
		if within != (f.kind == frameMore) {
			return errs.New(errs.BmcError, "the BMC's console breaks the WebSocket protocol: pieces of its messages are out of order")
		}
		within = !f.last
		for rest := f.length; rest > 0; {
			n, err := w.r.Read(buf[:min(rest, len(buf))])
			if n > 0 && !w.left.Load() {
				if _, err := stream.Write(buf[:n]); err != nil {
					w.leave()
					return err
				}
			}
			if rest -= n; err != nil {
				return w.broken(err)
			}
		}
	}
}

// control heeds a frame that is about the socket.
func (w *webSocket) control(f frame) error {
	payload := make([]byte, f.length)
	if _, err := io.ReadFull(w.r, payload); err != nil {
		return w.broken(err)
	}
	switch f.kind {
	case framePing:
		if w.writing.TryLock() { // who is written to lives
			defer w.writing.Unlock()
			_ = w.put(framePong, payload)
		}
	case frameClose:
		_ = w.send(frameClose, payload[:min(len(payload), 2)])
		return w.ended(payload)
	}
	return nil
}

// ended is the BMC's own end of a console.
func (w *webSocket) ended(payload []byte) error {
	why := ""
	if len(payload) >= 2 {
		why = fmt.Sprintf(" (code %d)", binary.BigEndian.Uint16(payload))
		if reason := string(payload[2:]); reason != "" && !strings.Contains(reason, w.secret) {
			why += ": " + legible(reason)
		}
	}
	return errs.Retry(errs.Unreachable, "the BMC ended the console's session%s", why)
}

// frame is the head of one.
type frame struct {
	kind   byte
	last   bool
	length int
}

// next reads the head of a frame.
func (w *webSocket) next() (frame, error) {
	var head [8]byte
	if _, err := io.ReadFull(w.r, head[:2]); err != nil {
		return frame{}, w.broken(err)
	}
	f := frame{kind: head[0] & 0x0f, last: head[0]&frameLast != 0}
	length, more := uint64(head[1]&0x7f), 0
	switch length {
	case 126:
		more = 2
	case 127:
		more = 8
	}
	wrong := ""
	switch {
	case head[0]&0x70 != 0:
		wrong = "a frame uses an extension that was not agreed on"
	case head[1]&frameMasked != 0:
		wrong = "a frame is masked, which only a client's are"
	case f.kind > frameBinary && f.kind < frameClose || f.kind > framePong:
		wrong = fmt.Sprintf("a frame is of the unknown kind %d", f.kind)
	case f.kind&frameControl != 0 && (more > 0 || !f.last):
		wrong = "a control frame is cut into pieces, or too long"
	}
	if wrong != "" {
		return frame{}, errs.New(errs.BmcError, "the BMC's console breaks the WebSocket protocol: %s", wrong)
	}
	if more > 0 {
		if _, err := io.ReadFull(w.r, head[:more]); err != nil {
			return frame{}, w.broken(err)
		}
		length = uint64(binary.BigEndian.Uint16(head[:]))
		if more == 8 {
			length = binary.BigEndian.Uint64(head[:])
		}
	}
	if length > maxFrame {
		return frame{}, errs.New(errs.BmcError, "the BMC's console sends a frame of %d bytes, more than %d", length, maxFrame)
	}
	f.length = int(length) //nolint:gosec // bounded just above
	return f, nil
}

// broken is an end without a word.
func (w *webSocket) broken(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errs.Retry(errs.Unreachable, "the console's connection to the BMC ended")
	}
	return errs.Retry(errs.Unreachable, "the console's connection to the BMC broke: %s", cause(err))
}
