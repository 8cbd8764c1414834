package peer

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
)

// chunk bounds the data of one frame.
const chunk = 256 << 10

// Stream opens a stream operation and answers its bytes once the plugin has
// taken it. The call's deadline, and one of ctx, bound the opening only; a
// cancelled ctx ends the stream at any time. Reading ends with io.EOF when the
// plugin closes. The caller closes the stream, and may close only its writing
// side before, with CloseWrite; a reader and a writer may run side by side.
func (p *Peer) Stream(ctx context.Context, c Call) (io.ReadWriteCloser, error) {
	req, err := c.request()
	if err != nil {
		return nil, err
	}
	s := &stream{peer: p, caller: ctx, release: p.guard(c.Secrets)}
	var cancel context.CancelFunc
	s.ctx, cancel = context.WithCancel(context.WithoutCancel(ctx))
	s.wire = p.client.Stream(s.ctx)
	s.cancel = func() {
		cancel()
		// The transport sees that only once it need not wait for data to send.
		_ = s.wire.CloseRequest()
	}
	s.detach = context.AfterFunc(ctx, func() {
		// Once the stream is open, time alone does not end it.
		if !s.opened.Load() || errors.Is(ctx.Err(), context.Canceled) {
			s.cancel()
			s.release()
		}
	})
	opening, done := until(ctx, c.Deadline)
	defer done()
	stop := context.AfterFunc(opening, s.cancel)
	err = s.open(req)
	if err == nil && !stop() {
		err = opening.Err()
	}
	if err != nil {
		err = p.explain(ctx, opening, err)
		s.end()
		return nil, err
	}
	s.opened.Store(true)
	if ctx.Err() != nil {
		// It may have ended between the plugin's answer and here.
		s.end()
		return nil, p.explain(ctx, ctx, ctx.Err())
	}
	return s, nil
}

type stream struct {
	peer    *Peer
	caller  context.Context
	ctx     context.Context
	cancel  func()
	detach  func() bool
	release func()
	wire    *connect.BidiStreamForClient[driverv1.StreamRequest, driverv1.StreamResponse]
	opened  atomic.Bool
	// closed is this side's doing, ended the plugin's.
	closed, ended atomic.Bool
	once          sync.Once

	reading sync.Mutex
	rest    []byte
	readErr error

	writing sync.Mutex
	said    bool // that no more comes
}

// open sends the call and waits for the empty data frame.
func (s *stream) open(req *driverv1.InvokeRequest) error {
	err := s.wire.Send(&driverv1.StreamRequest{Frame: &driverv1.StreamRequest_Open{Open: req}})
	// io.EOF says only that the other side has ended; why is received.
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	m, err := s.wire.Receive()
	switch {
	case errors.Is(err, io.EOF):
		return s.peer.lost("the stream ended before it was open")
	case err != nil:
		return err
	}
	switch f := m.GetFrame().(type) {
	case *driverv1.StreamResponse_Data:
		if len(f.Data) == 0 {
			return nil
		}
		return errs.New(errs.DriverError, "plugin %s answered the open frame with data", s.peer.o.Name)
	case *driverv1.StreamResponse_Error:
		return s.peer.fromWire(f.Error)
	}
	return errs.New(errs.DriverError, "plugin %s answered the open frame with a frame that does not open it", s.peer.o.Name)
}

// Read gives bytes as they come. After the last it answers io.EOF, or why the
// stream ended.
func (s *stream) Read(b []byte) (int, error) {
	s.reading.Lock()
	defer s.reading.Unlock()
	if len(b) == 0 {
		return 0, nil
	}
	for len(s.rest) == 0 {
		if s.closed.Load() {
			return 0, io.ErrClosedPipe
		}
		if s.readErr != nil {
			return 0, s.readErr
		}
		s.rest, s.readErr = s.receive()
	}
	n := copy(b, s.rest)
	s.rest = s.rest[n:]
	return n, nil
}

// receive takes one frame.
func (s *stream) receive() ([]byte, error) {
	m, err := s.wire.Receive()
	switch {
	case errors.Is(err, io.EOF):
		return nil, s.peer.lost("the stream ended without a close")
	case err != nil && s.closed.Load():
		return nil, io.ErrClosedPipe
	case err != nil:
		return nil, s.explain(err)
	}
	switch f := m.GetFrame().(type) {
	case *driverv1.StreamResponse_Data:
		return f.Data, nil
	case *driverv1.StreamResponse_Close:
		s.ended.Store(true)
		return nil, io.EOF
	case *driverv1.StreamResponse_Error:
		s.ended.Store(true)
		return nil, s.peer.fromWire(f.Error)
	}
	return nil, errs.New(errs.DriverError, "plugin %s sent a frame that is none", s.peer.o.Name)
}

// explain looks at the caller only while it can end the stream.
func (s *stream) explain(err error) error {
	if s.ctx.Err() != nil && errors.Is(s.caller.Err(), context.Canceled) {
		return s.peer.explain(s.caller, s.ctx, err)
	}
	return s.peer.explain(s.ctx, s.ctx, err)
}

// Write sends b and waits while the plugin does not read. Once the plugin has
// closed, or the stream is closed, it is io.ErrClosedPipe.
func (s *stream) Write(b []byte) (int, error) {
	s.writing.Lock()
	defer s.writing.Unlock()
	n := 0
	for n < len(b) {
		if s.said || s.closed.Load() || s.ended.Load() {
			return n, io.ErrClosedPipe
		}
		part := b[n:min(n+chunk, len(b))]
		err := s.wire.Send(&driverv1.StreamRequest{Frame: &driverv1.StreamRequest_Data{Data: part}})
		switch {
		case err == nil:
			n += len(part)
		case errors.Is(err, io.EOF) && s.ctx.Err() == nil || s.closed.Load():
			// The plugin has ended the call: Read says how.
			return n, io.ErrClosedPipe
		default:
			return n, s.explain(err)
		}
	}
	return n, nil
}

// CloseWrite tells the plugin that no more comes, and leaves reading open.
func (s *stream) CloseWrite() error {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.closeWrite()
	return nil
}

func (s *stream) closeWrite() {
	if s.said {
		return
	}
	s.said = true
	_ = s.wire.Send(&driverv1.StreamRequest{Frame: &driverv1.StreamRequest_Close{Close: &driverv1.StreamClose{}}})
	_ = s.wire.CloseRequest()
}

// Close tells the plugin, and gives it the grace to take what was written
// before. What it still sends is dropped.
func (s *stream) Close() error {
	if s.closed.Swap(true) {
		return nil
	}
	timer := time.AfterFunc(bcx.Grace, s.cancel)
	defer timer.Stop()
	s.writing.Lock()
	s.closeWrite()
	s.writing.Unlock()
	s.reading.Lock()
	defer s.reading.Unlock()
	for {
		if _, err := s.wire.Receive(); err != nil {
			break
		}
	}
	s.end()
	return nil
}

// end frees both sides.
func (s *stream) end() {
	s.once.Do(func() {
		s.detach()
		s.cancel()
		_ = s.wire.CloseResponse()
		s.release()
	})
}
