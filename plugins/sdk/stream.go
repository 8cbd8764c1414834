package sdk

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
)

// maxFrame bounds the data of one frame that we send.
const maxFrame = 256 << 10

// frames is one Stream, as its handler sees it.
type frames interface {
	Receive() (*driverv1.StreamRequest, error)
	Send(*driverv1.StreamResponse) error
}

// Stream runs one stream operation. It is open, and said to be, once the
// operation first reads or writes: one that fails before answers its error instead.
func (h *Handler) Stream(ctx context.Context, stream *connect.BidiStream[driverv1.StreamRequest, driverv1.StreamResponse]) error {
	return h.stream(ctx, stream)
}

func (h *Handler) stream(ctx context.Context, wire frames) error {
	first, err := wire.Receive()
	if errors.Is(err, io.EOF) {
		return nil
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(errEnded)
	b := &bytesOf{ctx: ctx, wire: wire, input: make(chan []byte)}
	m := first.GetOpen()
	if m == nil {
		return b.end(errs.New(errs.InvalidArgs, "the first frame is not open"), false)
	}
	d, err := h.find(m.GetDriver())
	if err != nil {
		return b.end(err, false)
	}
	if ms := m.GetDeadlineMs(); ms != 0 {
		left := time.Until(time.UnixMilli(ms))
		if left <= 0 {
			return b.end(errs.Retry(errs.Timeout, "the deadline is over"), false)
		}
		b.timer = time.AfterFunc(left, func() {
			if b.expire() {
				cancel(context.DeadlineExceeded)
			}
		})
		defer b.timer.Stop()
	}
	// It ends when the stream does, at the latest when this handler returns.
	h.crew.running.Go(func() { b.receive(cancel) })
	call := h.context(ctx, m, nil)
	_, err = h.run(ctx, func() ([]byte, error) {
		return nil, d.Stream(call, m.GetKind(), m.GetOperation(), []byte(m.GetConfigJson()), []byte(m.GetArgsJson()), b)
	})
	// A context that ended says so as "cancelled"; its cause knows better.
	if err != nil && ctx.Err() != nil {
		err = over(ctx)
	}
	return b.end(err, d.IsRetrySafe(m.GetKind(), m.GetOperation()))
}

// errEnded is the cause of a stream's context once the stream has ended.
var errEnded = errors.New("the stream has ended")

// bytesOf is a stream as its operation reads and writes it.
type bytesOf struct {
	ctx   context.Context
	wire  frames
	timer *time.Timer
	// input has the data frames, and is closed at the host's close.
	input chan []byte

	reading sync.Mutex
	rest    []byte

	mu              sync.Mutex // sending, and:
	opened, expired bool
	ended           bool
}

// expire ends the time for opening; it reports whether that was too late.
func (b *bytesOf) expire() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.expired = !b.opened
	return b.expired
}

// open answers the open frame, once. The caller holds mu.
func (b *bytesOf) open() error {
	switch {
	case b.ended:
		return io.ErrClosedPipe
	case b.opened:
		return nil
	case b.expired:
		return errs.Retry(errs.Timeout, "the deadline is over")
	}
	b.opened = true
	if b.timer != nil {
		b.timer.Stop()
	}
	return b.wire.Send(&driverv1.StreamResponse{Frame: &driverv1.StreamResponse_Data{}})
}

// receive hands data frames to the operation until the host closes.
func (b *bytesOf) receive(cancel context.CancelCauseFunc) {
	defer close(b.input)
	for {
		m, err := b.wire.Receive()
		if err != nil {
			if !errors.Is(err, io.EOF) {
				cancel(errs.New(errs.Cancelled, "the stream broke: %v", err))
			}
			return
		}
		switch f := m.GetFrame().(type) {
		case *driverv1.StreamRequest_Data:
			select {
			case b.input <- f.Data:
			case <-b.ctx.Done():
				return
			}
		case *driverv1.StreamRequest_Close:
			return
		default:
			cancel(errs.New(errs.InvalidArgs, "a frame after open is neither data nor close"))
			return
		}
	}
}

// Read ends with io.EOF when the host has closed the stream.
func (b *bytesOf) Read(p []byte) (int, error) {
	b.mu.Lock()
	err := b.open()
	b.mu.Unlock()
	if err != nil {
		return 0, err
	}
	b.reading.Lock()
	defer b.reading.Unlock()
	for len(b.rest) == 0 {
		select {
		case data, ok := <-b.input:
			if !ok {
				if err := over(b.ctx); err != nil {
					return 0, err
				}
				return 0, io.EOF
			}
			b.rest = data
		case <-b.ctx.Done():
			return 0, over(b.ctx)
		}
	}
	n := copy(p, b.rest)
	b.rest = b.rest[n:]
	return n, nil
}

func (b *bytesOf) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	written := 0
	for {
		if err := b.open(); err != nil {
			return written, err
		}
		if len(p) == 0 {
			return written, nil
		}
		n := min(len(p), maxFrame)
		if err := b.wire.Send(&driverv1.StreamResponse{Frame: &driverv1.StreamResponse_Data{Data: p[:n]}}); err != nil {
			return written, err
		}
		written, p = written+n, p[n:]
	}
}

// end says how the operation ended. What it does to the stream later fails.
func (b *bytesOf) end(err error, retrySafe bool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err == nil {
		err = b.open()
	}
	b.ended = true
	if err != nil {
		return b.wire.Send(&driverv1.StreamResponse{Frame: &driverv1.StreamResponse_Error{Error: errorOf(err, retrySafe)}})
	}
	return b.wire.Send(&driverv1.StreamResponse{Frame: &driverv1.StreamResponse_Close{Close: &driverv1.StreamClose{}}})
}
