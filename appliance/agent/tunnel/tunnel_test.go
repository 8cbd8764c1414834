package tunnel

import (
	"errors"
	"io"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// wire is one end of a stream in memory.
type wire struct {
	in, out chan *agentv1.TunnelFrame
	cut     chan struct{}
	once    *sync.Once
}

func pair() (a, b *wire) {
	x, y, cut := make(chan *agentv1.TunnelFrame), make(chan *agentv1.TunnelFrame), make(chan struct{})
	once := &sync.Once{}
	return &wire{x, y, cut, once}, &wire{y, x, cut, once}
}

var errCut = errors.New("cut")

func (w *wire) hangUp() { w.once.Do(func() { close(w.cut) }) }

func (w *wire) Send(f *agentv1.TunnelFrame) error {
	select {
	case w.out <- f:
		return nil
	case <-w.cut:
		return errCut
	}
}

func (w *wire) Receive() (*agentv1.TunnelFrame, error) {
	select {
	case f := <-w.in:
		return f, nil
	case <-w.cut:
		return nil, errCut
	}
}

// TestAliveWhileFramesCome: an idle tunnel lives by its signs of life, and one whose
// other side says nothing more ends as unreachable.
func TestAliveWhileFramesCome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x, y := pair()
		a, b := New(x, x.hangUp, DefaultTiming), New(y, y.hangUp, DefaultTiming)
		time.Sleep(time.Hour)
		go b.Write([]byte("still here"))
		buf := make([]byte, 32)
		if n, err := a.Read(buf); err != nil || string(buf[:n]) != "still here" {
			t.Errorf("after an hour: %q, %v", buf[:n], err)
		}
		go a.Close()
		if _, err := b.Read(buf); !errors.Is(err, io.EOF) {
			t.Errorf("the end: %v, want io.EOF", err)
		}
		b.Close()
		a.Wait()
		b.Wait()

		x, y = pair()
		a = New(x, x.hangUp, DefaultTiming)
		go func() { // a peer that takes everything and says nothing
			for {
				if _, err := y.Receive(); err != nil {
					return
				}
			}
		}()
		start := time.Now()
		_, err := a.Read(buf)
		if errs.CodeOf(err) != errs.Unreachable || time.Since(start) != DefaultTiming.Dead {
			t.Errorf("a silent peer: %v after %v, want unreachable after %v", err, time.Since(start), DefaultTiming.Dead)
		}
		if _, err := a.Write([]byte("x")); errs.CodeOf(err) != errs.Unreachable {
			t.Errorf("write to a silent peer: %v, want unreachable", err)
		}
		a.Close()
		a.Wait()
	})
}

// TestWaitingReaderIsNoDeadLine: frames that wait for a reader hold the receiver,
// and time stands still meanwhile.
func TestWaitingReaderIsNoDeadLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x, y := pair()
		a, b := New(x, x.hangUp, DefaultTiming), New(y, y.hangUp, DefaultTiming)
		const n = (waiting + 4) * chunk
		go func() {
			if _, err := b.Write(make([]byte, n)); err != nil {
				t.Errorf("write: %v", err)
			}
			b.Close()
		}()
		time.Sleep(10 * DefaultTiming.Dead)
		got, err := io.ReadAll(a)
		if err != nil || len(got) != n {
			t.Errorf("read %d bytes, %v, want %d", len(got), err, n)
		}
		a.Close()
		a.Wait()
		b.Wait()
	})
}

// TestCloseWithAnErrorDoesNotWaitLong for a peer that takes nothing; a plain close
// waits for what was written to be taken.
func TestCloseWithAnErrorDoesNotWaitLong(t *testing.T) {
	for _, tt := range []struct {
		why  *errs.Error
		want time.Duration
	}{{errs.New(errs.Cancelled, "enough"), grace}, {nil, DefaultTiming.Dead}} {
		synctest.Test(t, func(t *testing.T) {
			x, _ := pair()
			a := New(x, x.hangUp, DefaultTiming)
			start := time.Now()
			a.CloseWith(tt.why)
			if took := time.Since(start); took != tt.want {
				t.Errorf("CloseWith(%v) took %v, want %v", tt.why, took, tt.want)
			}
			a.Wait()
		})
	}
}

// TestAbortShortensAPatientClose: whoever cannot wait ends the wait of another.
func TestAbortShortensAPatientClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x, y := pair()
		a := New(x, x.hangUp, DefaultTiming)
		go y.Receive() // the close frame, and no answer to it
		go a.Close()
		time.Sleep(time.Second)
		start := time.Now()
		a.CloseWith(errs.New(errs.Cancelled, "enough"))
		if took := time.Since(start); took != grace {
			t.Errorf("the abort took %v, want %v", took, grace)
		}
		a.Wait()
	})
}
