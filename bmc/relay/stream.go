package relay

import (
	"context"
	"io"
	"net"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// streamGrace is how long a driver of this process may take to leave its stream.
const streamGrace = 5 * time.Second

// Streams reports whether a driver of this process has the operation as a stream.
func (r *Relay) Streams(op *bmcv1.BmcOperationRequest) bool {
	concern, name := split(op.GetOperation())
	d := r.builtIn[op.GetDriver()]
	return d != nil && d.IsStream(concern, name)
}

// Stream opens a stream of a driver in this process. The call's deadline bounds
// the opening, ctx the stream; Close lets the driver leave by itself.
func (r *Relay) Stream(ctx context.Context, c Call) (io.ReadWriteCloser, error) {
	d := r.builtIn[c.Driver]
	if d == nil {
		return nil, errs.New(errs.UnsupportedDriver, "driver %s is none of this process", c.Driver)
	}
	ctx, cancel := context.WithCancel(ctx)
	near, far := net.Pipe()
	s := &innerStream{Conn: near, cancel: cancel, ended: make(chan struct{})}
	opened := make(chan struct{})
	side := &driverSide{Conn: far, open: sync.OnceFunc(func() { close(opened) })}
	go func() {
		defer close(s.ended)
		defer far.Close()
		s.err = r.carry(ctx, d, c, side)
	}()
	var late <-chan time.Time
	if !c.Deadline.IsZero() {
		timer := time.NewTimer(time.Until(c.Deadline))
		defer timer.Stop()
		late = timer.C
	}
	select {
	case <-opened:
		return s, nil
	case <-s.ended:
	case <-late:
		_ = s.Close()
		return nil, errs.Retry(errs.Timeout, "driver %s did not open its stream in time", c.Driver)
	}
	select {
	case <-opened: // and over already
		return s, nil
	default:
	}
	_ = s.Close()
	if s.err == nil {
		return nil, errs.New(errs.DriverError, "driver %s ended its stream before it was open", c.Driver)
	}
	return nil, s.err
}

// carry runs the driver's side. Its fault is its call's.
func (r *Relay) carry(ctx context.Context, d *driver.Definition, c Call, side *driverSide) (err error) {
	defer r.caught(c, &err)
	return d.Stream(r.contextOf(ctx, c), c.Concern, c.Operation, c.Config, c.Args, side)
}

// driverSide is the driver's end of a stream, which its first write opens.
type driverSide struct {
	net.Conn
	open func()
}

func (s *driverSide) Write(p []byte) (int, error) {
	s.open()
	if len(p) == 0 {
		return 0, nil // a pipe would wait for somebody to read it
	}
	return s.Conn.Write(p)
}

// innerStream is the caller's end.
type innerStream struct {
	net.Conn
	cancel context.CancelFunc
	ended  chan struct{}
	err    error // once ended
}

// Read ends with what the driver said.
func (s *innerStream) Read(p []byte) (int, error) {
	n, err := s.Conn.Read(p)
	if err == io.EOF {
		<-s.ended
		if s.err != nil {
			err = s.err
		}
	}
	return n, err
}

// Close ends what the driver reads, and waits until it has left.
func (s *innerStream) Close() error {
	err := s.Conn.Close()
	timer := time.AfterFunc(streamGrace, s.cancel)
	defer timer.Stop()
	<-s.ended
	s.cancel()
	return err
}
