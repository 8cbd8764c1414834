package session_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent/outbox"
	"github.com/better-compute/site-appliance/appliance/agent/session"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// wire is one stream whose far end is the test.
type wire struct {
	ctx  context.Context
	up   chan *agentv1.AgentFrame
	down chan *agentv1.GatewayFrame
}

func (w *wire) Send(f *agentv1.AgentFrame) error {
	select {
	case w.up <- f:
		return nil
	case <-w.ctx.Done():
		return io.EOF
	}
}

func (w *wire) Receive() (*agentv1.GatewayFrame, error) {
	select {
	case f, ok := <-w.down:
		if !ok {
			return nil, io.EOF
		}
		return f, nil
	case <-w.ctx.Done():
		return nil, w.ctx.Err()
	}
}

func (w *wire) CloseRequest() error  { return nil }
func (w *wire) CloseResponse() error { return nil }

// work records what the session hands to the dispatcher.
type work struct {
	mu    sync.Mutex
	calls []string
	due   []*agentv1.AgentFrame
	wake  chan struct{}
}

func (w *work) note(s string) { w.mu.Lock(); w.calls = append(w.calls, s); w.mu.Unlock() }
func (w *work) said() string  { w.mu.Lock(); defer w.mu.Unlock(); return strings.Join(w.calls, " ") }
func (w *work) Begin() ([]*agentv1.OpenCommand, map[string]uint32) {
	w.note("begin")
	return []*agentv1.OpenCommand{{CommandId: "cmd_open"}}, map[string]uint32{"power": 3}
}
func (w *work) Offer(c *agentv1.SignedCommand) { w.note("offer:" + string(c.GetPayload())) }
func (w *work) Cancel(id string)               { w.note("cancel:" + id) }
func (w *work) ResultAcked(id string)          { w.note("acked:" + id) }
func (w *work) Wake() <-chan struct{}          { return w.wake }
func (w *work) Frames() []*agentv1.AgentFrame {
	w.mu.Lock()
	defer w.mu.Unlock()
	due := w.due
	w.due = nil
	return due
}

type bench struct {
	t      *testing.T
	wires  chan *wire
	work   *work
	events *outbox.Outbox
	wake   chan struct{}
	mu     sync.Mutex
	ends   []error
	ups    []bool
	times  []time.Time
}

// run starts the loop; the test ends it.
func run(t *testing.T, welcomed func(*agentv1.Welcome) error) (*bench, func()) {
	events, err := outbox.Open("", outbox.DefaultLimit, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t, wires: make(chan *wire, 100), work: &work{wake: make(chan struct{}, 1)}, events: events, wake: make(chan struct{})}
	if welcomed == nil {
		welcomed = func(*agentv1.Welcome) error { return nil }
	}
	ctx, cancel := context.WithCancel(context.Background())
	var owned sync.WaitGroup
	owned.Go(func() {
		session.Run(ctx, session.Config{
			Connect: func(ctx context.Context) (session.Stream, error) {
				w := &wire{ctx, make(chan *agentv1.AgentFrame, 100), make(chan *agentv1.GatewayFrame, 100)}
				b.mu.Lock()
				b.times = append(b.times, time.Now())
				b.mu.Unlock()
				b.wires <- w
				return w, nil
			},
			Hello:    func() *agentv1.Hello { return &agentv1.Hello{AgentId: "ag_1"} },
			Welcomed: welcomed,
			Time:     func(time.Time) {},
			Work:     b.work, Events: events, Wake: b.wake,
			Ended: func(err error) { b.mu.Lock(); b.ends = append(b.ends, err); b.mu.Unlock() },
			Up:    func(up bool) { b.mu.Lock(); b.ups = append(b.ups, up); b.mu.Unlock() },
			Log:   slog.New(slog.DiscardHandler), Rand: func() float64 { return 0.5 },
		})
	})
	return b, func() { cancel(); owned.Wait() }
}

func (w *wire) welcome() {
	w.down <- &agentv1.GatewayFrame{Frame: &agentv1.GatewayFrame_Welcome{Welcome: &agentv1.Welcome{Protocol: 1, HeartbeatS: 20}}}
}

func (b *bench) lastEnd() error {
	synctest.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.ends) == 0 {
		return nil
	}
	return b.ends[len(b.ends)-1]
}

func TestHelloWelcomeAndFrames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, stop := run(t, nil)
		defer stop()
		w := <-b.wires
		hello := (<-w.up).GetHello()
		if hello.GetAgentId() != "ag_1" || hello.GetLanes()["power"] != 3 || len(hello.GetOpen()) != 1 ||
			hello.GetEventEpoch() != b.events.Epoch() || hello.GetEventNextSeq() != 1 {
			t.Errorf("Hello = %v, want agent, lanes, open commands and event numbers", hello)
		}
		if err := b.events.Emit("e", outbox.State, "k", nil); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if len(w.up) != 0 {
			t.Error("frames went out before Welcome")
		}
		w.welcome()
		if got := (<-w.up).GetEvent().GetName(); got != "e" {
			t.Errorf("first frame after Welcome = %q, want the event", got)
		}
		for _, f := range []*agentv1.GatewayFrame{
			{Frame: &agentv1.GatewayFrame_Command{Command: &agentv1.SignedCommand{Payload: []byte("p")}}},
			{Frame: &agentv1.GatewayFrame_Cancel{Cancel: &agentv1.Cancel{CommandId: "c"}}},
			{Frame: &agentv1.GatewayFrame_ResultAck{ResultAck: &agentv1.ResultAck{CommandId: "r"}}},
			{Frame: &agentv1.GatewayFrame_EventAck{EventAck: &agentv1.EventAck{Seq: 1}}},
			{},
		} {
			w.down <- f
		}
		synctest.Wait()
		if got, want := b.work.said(), "begin offer:p cancel:c acked:r"; got != want {
			t.Errorf("dispatcher heard %q, want %q", got, want)
		}
		b.work.mu.Lock()
		b.work.due = []*agentv1.AgentFrame{{Frame: &agentv1.AgentFrame_Ack{Ack: &agentv1.CommandAck{CommandId: "a"}}}}
		b.work.mu.Unlock()
		b.work.wake <- struct{}{}
		if got := (<-w.up).GetAck().GetCommandId(); got != "a" {
			t.Errorf("frame of the dispatcher = %q, want its ack", got)
		}
		if b.lastEnd() != nil {
			t.Errorf("session ended: %v", b.lastEnd())
		}
	})
}

// TestRefusals: each thing a gateway must not do ends the session, and another begins.
func TestRefusals(t *testing.T) {
	for name, test := range map[string]struct {
		act      func(w *wire)
		welcomed func(*agentv1.Welcome) error
		want     string
	}{
		"command before Welcome": {act: func(w *wire) {
			w.down <- &agentv1.GatewayFrame{Frame: &agentv1.GatewayFrame_Command{Command: &agentv1.SignedCommand{}}}
		}, want: "no Welcome"},
		"two Welcomes":    {act: func(w *wire) { w.welcome(); w.welcome() }, want: "welcomed twice"},
		"refused Welcome": {act: func(w *wire) { w.welcome() }, welcomed: func(*agentv1.Welcome) error { return errors.New("odd") }, want: "odd"},
		"ack of an event never sent": {act: func(w *wire) {
			w.welcome()
			w.down <- &agentv1.GatewayFrame{Frame: &agentv1.GatewayFrame_EventAck{EventAck: &agentv1.EventAck{Seq: 99}}}
		}, want: "acknowledged event 99"},
		"end of stream": {act: func(w *wire) { w.welcome(); close(w.down) }, want: "ended the session"},
		"close":         {act: func(w *wire) { w.down <- closed("draining", 0) }, want: "draining"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b, stop := run(t, test.welcomed)
				defer stop()
				test.act(<-b.wires)
				synctest.Wait()
				if err := b.lastEnd(); err == nil || !strings.Contains(err.Error(), test.want) {
					t.Errorf("session ended with %v, want %q", err, test.want)
				}
				if w := <-b.wires; w == nil {
					t.Error("no second session")
				}
				if n := len(b.work.wake); b.work.said() != "begin begin" || n != 0 {
					t.Errorf("dispatcher heard %q, want only two beginnings", b.work.said())
				}
			})
		})
	}
}

func closed(code string, after uint32) *agentv1.GatewayFrame {
	return &agentv1.GatewayFrame{Frame: &agentv1.GatewayFrame_Close{Close: &agentv1.Close{Code: code, Message: "m", RetryAfterS: after}}}
}

func TestLiveness(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, stop := run(t, nil)
		defer stop()
		w := <-b.wires
		<-w.up
		w.welcome()
		// Heartbeats both ways keep it alive for as long as they come.
		for n := range 30 {
			time.Sleep(20 * time.Second)
			w.down <- &agentv1.GatewayFrame{Frame: &agentv1.GatewayFrame_Heartbeat{Heartbeat: &agentv1.Heartbeat{Seq: uint64(n + 1)}}}
		}
		synctest.Wait()
		if b.lastEnd() != nil {
			t.Fatalf("session with heartbeats ended: %v", b.lastEnd())
		}
		if n := len(w.up); n < 28 || n > 31 {
			t.Errorf("heartbeats sent in 600 s = %d, want one each 20 s", n)
		}
		for len(w.up) > 1 {
			<-w.up
		}
		if echo := (<-w.up).GetHeartbeat().GetEcho(); echo < 28 {
			t.Errorf("echo = %d, want the gateway's last number", echo)
		}
		time.Sleep(59 * time.Second)
		if b.lastEnd() != nil {
			t.Errorf("session ended after 59 s of silence: %v", b.lastEnd())
		}
		time.Sleep(3 * time.Second)
		if err := b.lastEnd(); errs.CodeOf(err) != errs.Timeout {
			t.Errorf("after 62 s of silence: %v, want timeout", err)
		}
		b.mu.Lock()
		if fmt.Sprint(b.ups) != "[true false]" {
			t.Errorf("ups = %v, want [true false]", b.ups)
		}
		b.mu.Unlock()
	})
}

func TestNoWelcome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, stop := run(t, nil)
		defer stop()
		<-b.wires
		time.Sleep(31 * time.Second)
		if err := b.lastEnd(); errs.CodeOf(err) != errs.Timeout {
			t.Errorf("without Welcome: %v, want timeout", err)
		}
	})
}

// TestBackOff counts attempts against a gateway that hangs up at once; jitter
// is fixed at half.
func TestBackOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, stop := run(t, nil)
		defer stop()
		for range 9 {
			close((<-b.wires).down)
		}
		synctest.Wait()
		b.mu.Lock()
		var gaps []string
		for n := 1; n < len(b.times); n++ {
			gaps = append(gaps, b.times[n].Sub(b.times[n-1]).String())
		}
		b.mu.Unlock()
		if got, want := strings.Join(gaps, " "), "500ms 1s 2s 4s 8s 16s 30s 30s"; got != want {
			t.Errorf("waits = %s, want %s", got, want)
		}
		// A link that comes up ends the wait.
		b.wake <- struct{}{}
		before := time.Now()
		w := <-b.wires
		if since := time.Since(before); since != 0 {
			t.Errorf("woken after %s, want at once", since)
		}
		// A session that held makes the next wait short again.
		w.welcome()
		for range 3 {
			time.Sleep(15 * time.Second)
			w.down <- &agentv1.GatewayFrame{Frame: &agentv1.GatewayFrame_Heartbeat{Heartbeat: &agentv1.Heartbeat{}}}
		}
		close(w.down)
		before = time.Now()
		<-b.wires
		if since := time.Since(before); since != 500*time.Millisecond {
			t.Errorf("wait after a steady session = %s, want 500ms", since)
		}
	})
}

func TestCloseCodes(t *testing.T) {
	for _, test := range []struct {
		code  string
		after uint32
		want  time.Duration
	}{
		{"draining", 0, 500 * time.Millisecond},
		{"rate-limited", 7, 7*time.Second + 500*time.Millisecond},
		{"revoked", 0, time.Minute + 500*time.Millisecond},
		{"identity-cloned", 300, 5*time.Minute + 500*time.Millisecond},
		{"rate-limited", 1 << 30, time.Hour + 500*time.Millisecond},
	} {
		synctest.Test(t, func(t *testing.T) {
			b, stop := run(t, nil)
			defer stop()
			(<-b.wires).down <- closed(test.code, test.after)
			before := time.Now()
			<-b.wires
			if got := time.Since(before); got != test.want {
				t.Errorf("Close(%s, %d): next attempt after %s, want %s", test.code, test.after, got, test.want)
			}
			if got := errs.CodeOf(b.lastEnd()); string(got) != test.code {
				t.Errorf("Close(%s) ended with code %q", test.code, got)
			}
		})
	}
}
