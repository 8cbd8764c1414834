package peer

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
)

func data(b string) *driverv1.StreamResponse {
	return &driverv1.StreamResponse{Frame: &driverv1.StreamResponse_Data{Data: []byte(b)}}
}

func closing() *driverv1.StreamResponse {
	return &driverv1.StreamResponse{Frame: &driverv1.StreamResponse_Close{Close: &driverv1.StreamClose{}}}
}

func broken(code string) *driverv1.StreamResponse {
	return &driverv1.StreamResponse{Frame: &driverv1.StreamResponse_Error{Error: &driverv1.Error{Code: code, Message: "oh"}}}
}

// takes receives the open frame and answers with frames.
func takes(frames ...*driverv1.StreamResponse) func(context.Context, *duplex) error {
	return func(_ context.Context, s *duplex) error {
		if _, err := s.Receive(); err != nil {
			return err
		}
		for _, f := range frames {
			if err := s.Send(f); err != nil {
				return err
			}
		}
		return nil
	}
}

// echo sends data back until close.
func echo(_ context.Context, s *duplex) error {
	m, err := s.Receive()
	if err != nil || m.GetOpen() == nil {
		return errors.Join(err, errors.New("not opened"))
	}
	if err := s.Send(data("")); err != nil {
		return err
	}
	for {
		m, err := s.Receive()
		if err != nil {
			return err
		}
		if m.GetClose() != nil {
			return s.Send(closing())
		}
		if err := s.Send(data(string(m.GetData()))); err != nil {
			return err
		}
	}
}

func open(t *testing.T, f func(context.Context, *duplex) error) io.ReadWriteCloser {
	t.Helper()
	p, _ := meet(t, &fake{stream: f}, Options{})
	s, err := p.Stream(t.Context(), fan)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestStreamOpening(t *testing.T) {
	for name, tt := range map[string]struct {
		frames []*driverv1.StreamResponse
		code   errs.Code
	}{
		"empty data":  {[]*driverv1.StreamResponse{data("")}, ""},
		"data":        {[]*driverv1.StreamResponse{data("x")}, errs.DriverError},
		"error":       {[]*driverv1.StreamResponse{broken("fan-stuck")}, "fan-stuck"},
		"close":       {[]*driverv1.StreamResponse{closing()}, errs.DriverError},
		"empty frame": {[]*driverv1.StreamResponse{{}}, errs.DriverError},
		"nothing":     {nil, errs.Unreachable},
	} {
		p, _ := meet(t, &fake{stream: takes(tt.frames...)}, Options{})
		s, err := p.Stream(t.Context(), fan)
		if errs.CodeOf(err) != tt.code || (s == nil) != (err != nil) {
			t.Errorf("%s: Stream = %v, %v, want %q", name, s, err, tt.code)
		}
		if s != nil {
			s.Close()
		}
	}
}

func TestStreamBothWays(t *testing.T) {
	s := open(t, echo)
	for _, text := range []string{"hello", "", strings.Repeat("x", 1<<20)} {
		failed := make(chan error, 1)
		go func() {
			_, err := io.WriteString(s, text)
			failed <- err
		}()
		got := make([]byte, len(text))
		if _, err := io.ReadFull(s, got); err != nil || string(got) != text {
			t.Fatalf("read %d bytes of %d back: %v", len(got), len(text), err)
		}
		if err := <-failed; err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if _, err := s.Write([]byte("x")); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("Write after Close = %v, want io.ErrClosedPipe", err)
	}
	if _, err := s.Read(make([]byte, 1)); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("Read after Close = %v, want io.ErrClosedPipe", err)
	}
	if err := s.Close(); err != nil {
		t.Errorf("second Close = %v", err)
	}
}

func TestStreamEnds(t *testing.T) {
	for name, tt := range map[string]struct {
		last []*driverv1.StreamResponse
		code errs.Code // of the error; empty: io.EOF
	}{
		"close":           {[]*driverv1.StreamResponse{closing()}, ""},
		"data then close": {[]*driverv1.StreamResponse{data(""), data("b"), closing(), data("late")}, ""},
		"error":           {[]*driverv1.StreamResponse{broken("fan-stuck")}, "fan-stuck"},
		"no close":        {nil, errs.Unreachable},
		"frame of none":   {[]*driverv1.StreamResponse{{}}, errs.DriverError},
	} {
		s := open(t, takes(append([]*driverv1.StreamResponse{data(""), data("a")}, tt.last...)...))
		got, err := io.ReadAll(s)
		if !strings.HasPrefix(string(got), "a") || strings.Contains(string(got), "late") || errs.CodeOf(err) != tt.code {
			t.Errorf("%s: read %q, %v, want %q", name, got, err, tt.code)
		}
		_, again := s.Read(make([]byte, 1))
		if want := tt.code; want == "" && again != io.EOF || want != "" && errs.CodeOf(again) != want {
			t.Errorf("%s: second read = %v", name, again)
		}
		if name == "close" || name == "error" {
			if _, err := s.Write([]byte("x")); !errors.Is(err, io.ErrClosedPipe) {
				t.Errorf("%s: Write = %v, want io.ErrClosedPipe", name, err)
			}
		}
	}
}

// TestStreamCloseDelivers: what was written before Close arrives.
func TestStreamCloseDelivers(t *testing.T) {
	got := make(chan int, 1)
	s := open(t, func(_ context.Context, s *duplex) error {
		if _, err := s.Receive(); err != nil {
			return err
		}
		if err := s.Send(data("")); err != nil {
			return err
		}
		n := 0
		for {
			m, err := s.Receive()
			if err != nil {
				got <- -1
				return err
			}
			if m.GetClose() != nil {
				got <- n
				return nil
			}
			n += len(m.GetData())
		}
	})
	for range 50 {
		if _, err := s.Write(make([]byte, 10_000)); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if n := <-got; n != 500_000 {
		t.Errorf("plugin got %d bytes, want 500000", n)
	}
}

// TestStreamDeadline bounds the opening, not the stream.
func TestStreamDeadline(t *testing.T) {
	for _, by := range []string{"call", "context"} {
		t.Run(by, func(t *testing.T) {
			t.Parallel()
			p, _ := meet(t, &fake{stream: func(ctx context.Context, s *duplex) error {
				m, err := s.Receive()
				if err != nil {
					return err
				}
				if m.GetOpen().GetOperation() == "deaf" {
					<-ctx.Done()
					return ctx.Err()
				}
				if err := s.Send(data("")); err != nil {
					return err
				}
				<-ctx.Done()
				return ctx.Err()
			}}, Options{})
			ctx, cancel, c := t.Context(), context.CancelFunc(func() {}), fan
			if by == "call" {
				c.Deadline = time.Now().Add(50 * time.Millisecond)
			} else {
				ctx, cancel = context.WithTimeout(ctx, 50*time.Millisecond)
			}
			c.Operation = "deaf"
			if _, err := p.Stream(ctx, c); errs.CodeOf(err) != errs.Timeout {
				t.Errorf("by %s: opening a deaf one = %v, want timeout", by, err)
			}
			cancel()
			ctx, cancel = context.WithCancel(t.Context())
			if by == "call" {
				c.Deadline = time.Now().Add(100 * time.Millisecond)
			} else {
				ctx, cancel = context.WithTimeout(ctx, 100*time.Millisecond)
			}
			c.Operation = "open"
			s, err := p.Stream(ctx, c)
			if err != nil {
				t.Fatal(err)
			}
			read := make(chan error, 1)
			go func() {
				_, err := s.Read(make([]byte, 1))
				read <- err
			}()
			select {
			case err := <-read:
				t.Errorf("by %s: the stream ended with its deadline: %v", by, err)
			case <-time.After(100*time.Millisecond + bcx.Grace + 300*time.Millisecond):
			}
			if by == "call" {
				cancel()
				if err := <-read; errs.CodeOf(err) != errs.Cancelled {
					t.Errorf("cancelled stream: %v, want cancelled", err)
				}
			} else {
				s.Close()
				<-read
			}
			cancel()
		})
	}
}

// TestStreamPressure: a plugin that does not read holds the writer, and Close
// and cancelling free it.
func TestStreamPressure(t *testing.T) {
	for _, by := range []string{"close", "cancel", "crash"} {
		t.Run(by, func(t *testing.T) {
			t.Parallel()
			p, server := meet(t, &fake{stream: func(ctx context.Context, s *duplex) error {
				if _, err := s.Receive(); err != nil {
					return err
				}
				if err := s.Send(data("")); err != nil {
					return err
				}
				<-ctx.Done()
				return ctx.Err()
			}}, Options{})
			ctx, cancel := context.WithCancel(t.Context())
			s, err := p.Stream(ctx, fan)
			if err != nil {
				t.Fatal(err)
			}
			var written atomic.Int64
			failed := make(chan error, 1)
			go func() {
				for {
					n, err := s.Write(make([]byte, 1<<20))
					written.Add(int64(n))
					if err != nil {
						failed <- err
						return
					}
				}
			}()
			for last := int64(-1); last != written.Load(); time.Sleep(200 * time.Millisecond) {
				last = written.Load()
			}
			if n := written.Load(); n > 64<<20 {
				t.Errorf("%d bytes went to a plugin that reads none", n)
			}
			var want error
			switch by {
			case "close":
				want = io.ErrClosedPipe
				if err := s.Close(); err != nil {
					t.Error(err)
				}
			case "cancel":
				cancel()
			case "crash":
				want = io.ErrClosedPipe
				server.CloseClientConnections()
			}
			err = <-failed
			if want != nil && !errors.Is(err, want) || want == nil && errs.CodeOf(err) != errs.Cancelled {
				t.Errorf("by %s: Write = %v", by, err)
			}
			if by == "crash" {
				if _, err := s.Read(make([]byte, 1)); errs.CodeOf(err) != errs.Unreachable || !errs.From(err).Retryable {
					t.Errorf("Read after a crash = %v, want unreachable, retryable", err)
				}
			}
			s.Close()
			cancel()
		})
	}
}

// TestStreamReaderPressure: a reader that does not read holds the plugin.
func TestStreamReaderPressure(t *testing.T) {
	var sent atomic.Int64
	s := open(t, func(ctx context.Context, s *duplex) error {
		if _, err := s.Receive(); err != nil {
			return err
		}
		if err := s.Send(data("")); err != nil {
			return err
		}
		for ctx.Err() == nil {
			if err := s.Send(data(strings.Repeat("x", 1<<20))); err != nil {
				return err
			}
			sent.Add(1 << 20)
		}
		return nil
	})
	for last := int64(-1); last != sent.Load(); time.Sleep(200 * time.Millisecond) {
		last = sent.Load()
	}
	if n := sent.Load(); n > 64<<20 {
		t.Errorf("%d bytes came to a host that reads none", n)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
