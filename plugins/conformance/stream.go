package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
)

// pipe is an open Stream.
type pipe struct {
	*connect.BidiStreamForClient[driverv1.StreamRequest, driverv1.StreamResponse]
	ctx    context.Context
	cancel context.CancelFunc
}

// Receive is the stream's own, with patience named as what it is.
func (s *pipe) Receive() (*driverv1.StreamResponse, error) {
	m, err := s.BidiStreamForClient.Receive()
	return m, slow(s.ctx, err)
}

// stream begins a Stream with this first frame.
func (r *run) stream(first *driverv1.StreamRequest) (*pipe, error) {
	p, err := r.plugin()
	if err != nil {
		return nil, err
	}
	ctx, cancel := r.wait()
	s := &pipe{p.conn.Stream(ctx), ctx, cancel}
	if err := s.Send(first); err != nil {
		s.end()
		return nil, fmt.Errorf("send the first frame: %w", err)
	}
	return s, nil
}

// end cancels the stream, unless it has ended.
func (s *pipe) end() {
	s.cancel()
	// An end of the request that overtakes the cancelling would be a polite end.
	for {
		if _, err := s.Receive(); err != nil {
			break
		}
	}
	_ = s.CloseRequest()
	_ = s.CloseResponse()
}

func opening(args string, change ...func(*driverv1.InvokeRequest)) *driverv1.StreamRequest {
	return &driverv1.StreamRequest{Frame: &driverv1.StreamRequest_Open{Open: request("pipe", args, change...)}}
}

func data(b []byte) *driverv1.StreamRequest {
	return &driverv1.StreamRequest{Frame: &driverv1.StreamRequest_Data{Data: b}}
}

func closing() *driverv1.StreamRequest {
	return &driverv1.StreamRequest{Frame: &driverv1.StreamRequest_Close{Close: &driverv1.StreamClose{}}}
}

// open is stream, and the empty data frame that answers an open one.
func (r *run) open(args string, change ...func(*driverv1.InvokeRequest)) (*pipe, error) {
	s, err := r.stream(opening(args, change...))
	if err != nil {
		return nil, err
	}
	m, err := s.Receive()
	switch {
	case err != nil:
		err = fmt.Errorf("wait for the answer to open: %w", err)
	case m.GetError() != nil:
		err = fmt.Errorf("open is answered by %s: %.120s", m.GetError().GetCode(), m.GetError().GetMessage())
	default:
		if d, ok := m.GetFrame().(*driverv1.StreamResponse_Data); !ok || len(d.Data) != 0 {
			err = fmt.Errorf("open is answered by %.80v: want an empty data frame", m)
		}
	}
	if err != nil {
		s.end()
		return nil, err
	}
	return s, nil
}

// echo sends b, and wants it back in whatever frames.
func (s *pipe) echo(b []byte, frame int) error {
	sent := make(chan error, 1)
	go func() {
		for part := b; ; {
			n := min(frame, len(part))
			if err := s.Send(data(part[:n])); err != nil || n == len(part) {
				sent <- err
				return
			}
			part = part[n:]
		}
	}()
	var got []byte
	for len(got) < len(b) {
		m, err := s.Receive()
		if err != nil {
			s.cancel()
			<-sent
			return fmt.Errorf("after %d of %d bytes: %w", len(got), len(b), err)
		}
		if _, ok := m.GetFrame().(*driverv1.StreamResponse_Data); !ok {
			s.cancel()
			<-sent
			return fmt.Errorf("after %d of %d bytes: %.80v", len(got), len(b), m)
		}
		got = append(got, m.GetData()...)
	}
	if err := <-sent; err != nil {
		return err
	}
	if !bytes.Equal(got, b) {
		return errors.New("other bytes came back")
	}
	return nil
}

// closes wants the plugin's close frame, and then the end.
func (s *pipe) closes() error {
	for closed := false; ; {
		m, err := s.Receive()
		switch {
		case errors.Is(err, io.EOF) && closed:
			return nil
		case errors.Is(err, io.EOF):
			return errors.New("the stream ended without a close frame")
		case err != nil:
			return fmt.Errorf("wait for close: %w", err)
		case m.GetClose() != nil:
			closed = true
		case m.GetError() != nil:
			return fmt.Errorf("it ends with %s", m.GetError().GetCode())
		case closed:
			return fmt.Errorf("after close comes %.80v", m)
		}
	}
}

// ends wants an error frame with this code, and then the end.
func (s *pipe) ends(code errs.Code) error {
	m, err := s.Receive()
	if err != nil {
		return fmt.Errorf("wait for %s: %w", code, err)
	}
	if got := m.GetError(); got.GetCode() != string(code) {
		return fmt.Errorf("it answers %.120v: want the error %s", m, code)
	}
	if m, err := s.Receive(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("after the error comes %.80v, %v", m, err)
	}
	return nil
}

func refuses(first *driverv1.StreamRequest, code errs.Code) func(*run) error {
	return func(r *run) error {
		s, err := r.stream(first)
		if err != nil {
			return err
		}
		defer s.end()
		return s.ends(code)
	}
}

// streamRules need the driver DriverID.
func streamRules() []Rule {
	opened := func(args string, check func(*run, *pipe) error, change ...func(*driverv1.InvokeRequest)) func(*run) error {
		return func(r *run) error {
			s, err := r.open(args, change...)
			if err != nil {
				return err
			}
			defer s.end()
			return check(r, s)
		}
	}
	rules := []Rule{
		{ID: "stream.listed", Statement: "Describe lists its stream operations", check: each(func(d *driverv1.DescribedDriver) error {
			if d.GetManifest().GetId() != DriverID {
				return nil
			}
			for _, op := range d.GetStreamOperations() {
				if op == DriverID+".pipe" {
					return nil
				}
			}
			return fmt.Errorf("it lists %q", d.GetStreamOperations())
		})},
		{ID: "stream.open", Statement: "open is answered by an empty data frame", check: opened("", func(*run, *pipe) error { return nil })},
		{ID: "stream.bytes", Statement: "then bytes flow both ways", check: opened("", func(_ *run, s *pipe) error {
			if err := s.echo([]byte("hello"), 5); err != nil {
				return err
			}
			return s.echo(bytes.Repeat([]byte{0, 1, 254, 255, '\n'}, 100_000), 32<<10)
		})},
		{ID: "stream.close", Statement: "close ends it, and is answered by close", check: opened("", func(_ *run, s *pipe) error {
			if err := s.Send(closing()); err != nil {
				return err
			}
			return s.closes()
		})},
		{ID: "stream.first", Statement: "a first frame that is not open is invalid-args", check: refuses(data([]byte("x")), errs.InvalidArgs)},
		{ID: "stream.again", Statement: "a second open frame is invalid-args", check: opened("", func(_ *run, s *pipe) error {
			if err := s.Send(opening("")); err != nil {
				return err
			}
			return s.ends(errs.InvalidArgs)
		})},
		{ID: "stream.driver", Statement: "opening a driver that it does not serve is unsupported-driver",
			check: refuses(opening("", func(m *driverv1.InvokeRequest) { m.Driver = noDriver }), errs.UnsupportedDriver)},
		{ID: "stream.operation", Statement: "opening what is not a stream operation is unsupported-operation",
			check: refuses(opening("", func(m *driverv1.InvokeRequest) { m.Operation = "echo" }), errs.UnsupportedOperation)},
		{ID: "stream.invoke", Statement: "Invoke of a stream operation is unsupported-operation", check: fails("pipe", "", errs.UnsupportedOperation)},
		{ID: "stream.config", Statement: "a bad configuration refuses the opening with invalid-config",
			check: refuses(opening("", configured(`{"greeting":7}`)), errs.InvalidConfig)},
		{ID: "stream.args", Statement: "arguments that are not JSON refuse it with invalid-args", check: refuses(opening(`{`), errs.InvalidArgs)},
		{ID: "stream.refuse", Statement: "an operation that fails before it opens answers its error instead",
			check: refuses(opening(`{"refuse":{"code":"line-busy","message":"in use"}}`), "line-busy")},
		{ID: "stream.fail", Statement: "an operation that fails later ends the stream with its error", check: opened(`{"fail":{"code":"line-lost","message":"gone"}}`,
			func(_ *run, s *pipe) error {
				if err := s.echo([]byte("x"), 1); err != nil {
					return err
				}
				return s.ends("line-lost")
			})},
		{ID: "stream.deadline", Statement: "a deadline that comes before it is open is timeout", check: func(r *run) error {
			s, err := r.stream(opening(`{"openDelayMs":60000}`, within(200*time.Millisecond)))
			if err != nil {
				return err
			}
			defer s.end()
			return s.ends(errs.Timeout)
		}},
		{ID: "stream.lifetime", Statement: "a deadline does not end a stream that is open", check: func(r *run) error {
			const limit = 1500 * time.Millisecond
			deadline := time.Now().Add(limit)
			s, err := r.open("", within(limit))
			if err != nil {
				return err
			}
			defer s.end()
			if err := s.echo([]byte("before"), 6); err != nil {
				return err
			}
			select {
			case <-time.After(time.Until(deadline) + 300*time.Millisecond):
			case <-r.ctx.Done():
				return r.ctx.Err()
			}
			return s.echo([]byte("after"), 5)
		}},
		{ID: "stream.cancel", Statement: "a cancelled stream's operation is told", check: func(r *run) error {
			t := token("stream")
			s, err := r.open(`{"token":` + quote(t) + `}`)
			if err != nil {
				return err
			}
			if err := s.echo([]byte("x"), 1); err != nil {
				s.end()
				return err
			}
			s.end()
			return r.eventually("cancelled", t)
		}},
	}
	for i := range rules {
		rules[i].Driver = true
	}
	return rules
}
