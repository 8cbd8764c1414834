// Package tunnel carries the bytes of one command beside the session: both ends
// of TunnelService's stream as an io.ReadWriteCloser.
package tunnel

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/agentv1/agentv1connect"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

const (
	// chunk bounds the data of a frame that we send, maxFrame that of one we take.
	chunk    = 32 << 10
	maxFrame = 256 << 10
	// waiting frames are kept for a reader that is slower than the line; then
	// the line's own flow control holds the sender.
	waiting = 4
	// openWithin bounds the opening.
	openWithin = 30 * time.Second
	// grace is how long an end with an error waits for the other side's.
	grace = 3 * time.Second
)

// Timing is how a tunnel tells life from death: a frame goes out at least every
// Beat, and one that comes from nowhere for Dead ends it. A reader that lets
// frames wait is not taken for a dead line.
type Timing struct{ Beat, Dead time.Duration }

// DefaultTiming is the session's.
var DefaultTiming = Timing{Beat: 20 * time.Second, Dead: time.Minute}

// Wire is one end of the stream. Receive is called by one goroutine, Send by one
// at a time.
type Wire interface {
	Send(*agentv1.TunnelFrame) error
	Receive() (*agentv1.TunnelFrame, error)
}

// Conn is an open tunnel. Read answers io.EOF when the other side has closed,
// and its error where it closed with one; Write waits while the other side does
// not read. One reader and one writer may run side by side.
type Conn struct {
	wire Wire
	// hangUp ends the RPC without a word and frees a Send or Receive that waits.
	hangUp func()
	timing Timing

	frames  chan []byte
	over    chan struct{} // closed when nothing more comes
	why     error         // of over: io.EOF, or what ended it
	hung    chan struct{} // closed by the end of this side
	closing atomic.Bool
	owned   sync.WaitGroup

	reading sync.Mutex
	rest    []byte

	writing sync.Mutex
	said    bool // that no more comes
	sent    atomic.Bool

	failing sync.Mutex
	failure error
	freed   bool // the stream is used no more
}

// New makes a tunnel of a stream whose opening is done. hangUp must free a Send
// or Receive that waits; it may be called several times. Close must be called.
func New(wire Wire, hangUp func(), timing Timing) *Conn {
	c := &Conn{
		wire: wire, hangUp: hangUp, timing: timing,
		frames: make(chan []byte, waiting), over: make(chan struct{}), hung: make(chan struct{}),
	}
	c.owned.Go(c.receive)
	c.owned.Go(c.beat)
	return c
}

// Open dials a command's tunnel and answers once the gateway has paired it with
// who waits. The end of ctx closes it, and tells the other side why.
func Open(ctx context.Context, client agentv1connect.TunnelServiceClient, commandID string, timing Timing) (*Conn, error) {
	inner, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	timer := time.AfterFunc(openWithin, cancel)
	wire := client.Tunnel(inner)
	err := open(wire, commandID)
	inTime, uncut := timer.Stop(), stop()
	switch {
	case err == nil && inTime && uncut:
		hangUp := func() {
			cancel()
			// The transport sees that only once it need not wait for data to send.
			_ = wire.CloseRequest()
		}
		c := New(wire, hangUp, timing)
		cut := context.AfterFunc(ctx, func() { c.CloseWith(errs.From(context.Cause(ctx))) })
		c.owned.Go(func() {
			<-c.hung
			cut()
			cancel()
			_ = wire.CloseResponse()
		})
		return c, nil
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case !inTime:
		err = errs.Retry(errs.Unreachable, "the gateway did not open the tunnel within %s", openWithin)
	}
	cancel()
	_, _ = wire.CloseRequest(), wire.CloseResponse()
	return nil, fromWire(err)
}

// open sends the command's id and waits for the empty data frame.
func open(wire Wire, commandID string) error {
	err := wire.Send(&agentv1.TunnelFrame{Frame: &agentv1.TunnelFrame_Open{Open: &agentv1.TunnelOpen{CommandId: commandID}}})
	// io.EOF says only that the other side has ended; why is received.
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	f, err := wire.Receive()
	switch {
	case errors.Is(err, io.EOF):
		return errs.Retry(errs.Unreachable, "the stream ended before the tunnel was open")
	case err != nil:
		return err
	}
	switch m := f.GetFrame().(type) {
	case *agentv1.TunnelFrame_Data:
		if len(m.Data) == 0 {
			return nil
		}
	case *agentv1.TunnelFrame_Close:
		return closed(m.Close, errs.New(errs.Cancelled, "the gateway closed the tunnel at once"))
	}
	return errs.New(errs.InvalidPayload, "the gateway answered the open frame with a frame that does not open a tunnel")
}

// fromWire gives an error of the RPC the code that its detail carries.
func fromWire(err error) error {
	var refused *connect.Error
	if !errors.As(err, &refused) {
		return err
	}
	for _, d := range refused.Details() {
		if m, derr := d.Value(); derr == nil {
			if e, ok := m.(*agentv1.Error); ok {
				return told(e)
			}
		}
	}
	return errs.Retry(errs.Unreachable, "the tunnel: %v", refused)
}

// closed is what a close frame says, or plain where it is a plain end.
func closed(m *agentv1.TunnelClose, plain error) error {
	if e := m.GetError(); e != nil {
		return told(e)
	}
	return plain
}

func told(e *agentv1.Error) error {
	return &errs.Error{Code: errs.Code(e.GetCode()), Message: e.GetMessage(), Retryable: e.GetRetryable()}
}

// receive hands frames to the reader until the stream ends.
func (c *Conn) receive() {
	defer close(c.over)
	for {
		data, err := c.next()
		if err != nil {
			c.why = err
			return
		}
		if len(data) == 0 {
			continue // a sign of life
		}
		select {
		case c.frames <- data:
		case <-c.hung:
			c.why = c.failed(io.ErrClosedPipe)
			return
		}
	}
}

// next takes one frame.
func (c *Conn) next() ([]byte, error) {
	dead := time.AfterFunc(c.timing.Dead, func() {
		c.fail(errs.Retry(errs.Unreachable, "nothing came through the tunnel for %s", c.timing.Dead))
	})
	f, err := c.wire.Receive()
	dead.Stop()
	switch {
	case errors.Is(err, io.EOF):
		return nil, c.failed(errs.Retry(errs.Unreachable, "the tunnel ended without a close"))
	case err != nil:
		return nil, c.failed(errs.Retry(errs.Unreachable, "the tunnel broke: %v", err))
	}
	switch m := f.GetFrame().(type) {
	case *agentv1.TunnelFrame_Data:
		if len(m.Data) <= maxFrame {
			return m.Data, nil
		}
		err = errs.New(errs.InvalidPayload, "a frame of %d bytes came through the tunnel, limit %d", len(m.Data), maxFrame)
	case *agentv1.TunnelFrame_Close:
		return nil, closed(m.Close, io.EOF)
	default:
		err = errs.New(errs.InvalidPayload, "a frame that is neither data nor close came through the tunnel")
	}
	c.fail(err)
	return nil, err
}

// fail ends the stream for a reason of this side.
func (c *Conn) fail(err error) {
	c.failing.Lock()
	if c.failure == nil {
		c.failure = err
	}
	c.failing.Unlock()
	c.cut()
}

// cut hangs up, unless the stream is its owner's again.
func (c *Conn) cut() {
	c.failing.Lock()
	defer c.failing.Unlock()
	if !c.freed {
		c.hangUp()
	}
}

// failed is this side's reason where it has one, else err.
func (c *Conn) failed(err error) error {
	c.failing.Lock()
	defer c.failing.Unlock()
	if c.failure != nil {
		return c.failure
	}
	return err
}

// beat sends an empty frame where nothing else went out.
func (c *Conn) beat() {
	for {
		timer := time.NewTimer(time.Duration(float64(c.timing.Beat) * (0.8 + 0.4*rand.Float64())))
		select {
		case <-c.over:
			timer.Stop()
			return
		case <-c.hung:
			timer.Stop()
			return
		case <-timer.C:
		}
		// Who holds the lock is sending.
		if c.sent.Swap(false) || !c.writing.TryLock() {
			continue
		}
		if !c.said {
			// That the line is gone shows where it is read.
			_ = c.wire.Send(&agentv1.TunnelFrame{Frame: &agentv1.TunnelFrame_Data{}})
		}
		c.writing.Unlock()
	}
}

// Read gives bytes as they come.
func (c *Conn) Read(b []byte) (int, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	if len(b) == 0 {
		return 0, nil
	}
	if len(c.rest) == 0 {
		select {
		case <-c.hung:
			return 0, c.failed(io.ErrClosedPipe)
		case c.rest = <-c.frames:
		case <-c.over:
			select {
			case c.rest = <-c.frames: // what came before the end
			default:
				return 0, c.why
			}
		}
	}
	n := copy(b, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

// Write sends b. Once either side has closed it is io.ErrClosedPipe, or what
// ended the tunnel.
func (c *Conn) Write(b []byte) (int, error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	n := 0
	for n < len(b) {
		if c.said {
			return n, io.ErrClosedPipe
		}
		select {
		case <-c.over:
			if errors.Is(c.why, io.EOF) {
				return n, io.ErrClosedPipe
			}
			return n, c.why
		default:
		}
		part := b[n:min(n+chunk, len(b))]
		if err := c.wire.Send(&agentv1.TunnelFrame{Frame: &agentv1.TunnelFrame_Data{Data: part}}); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrClosedPipe // the other side has ended: Read says how
			} else {
				err = errs.Retry(errs.Unreachable, "the tunnel broke: %v", err)
			}
			return n, c.failed(err)
		}
		c.sent.Store(true)
		n += len(part)
	}
	return n, nil
}

// Close says that no more comes, waits until the other side has taken what was
// written and closes too, and frees the stream. What still comes is dropped.
func (c *Conn) Close() error {
	c.CloseWith(nil)
	return nil
}

// CloseWith is Close with a reason, which the other side's Read answers; with one
// it waits for a moment only. The first close counts; each returns when the tunnel
// is gone.
func (c *Conn) CloseWith(why *errs.Error) {
	// Neither a Write that waits for a reader nor a patient Close before this one
	// must hold up the end.
	limit := c.timing.Dead
	if why != nil {
		limit = grace
	}
	timer := time.AfterFunc(limit, c.cut)
	defer timer.Stop()
	if c.closing.Swap(true) {
		<-c.over
		return
	}
	c.writing.Lock()
	c.said = true
	end := &agentv1.TunnelClose{}
	if why != nil {
		end.Error = &agentv1.Error{Code: string(why.Code), Message: why.Message, Retryable: why.Retryable}
	}
	err := c.wire.Send(&agentv1.TunnelFrame{Frame: &agentv1.TunnelFrame_Close{Close: end}})
	if up, ok := c.wire.(interface{ CloseRequest() error }); ok && err == nil {
		_ = up.CloseRequest()
	}
	c.writing.Unlock()
	for open := err == nil; open; {
		select {
		case <-c.frames:
		case <-c.over:
			open = false
		}
	}
	// Both have said that it is over: a stream that is cut now may lose the close
	// that still waits to be sent, and the other side would take that for a broken line.
	if err == nil && errors.Is(c.why, io.EOF) {
		_, _ = c.wire.Receive()
	}
	c.cut()
	c.failing.Lock()
	c.freed = true
	c.failing.Unlock()
	close(c.hung)
	<-c.over
}

// Wait returns when the tunnel has ended on this side and uses its stream no more.
func (c *Conn) Wait() {
	<-c.hung
	c.owned.Wait()
}
