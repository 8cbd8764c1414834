// Package session holds the one stream home: Hello and Welcome, heartbeats,
// and a new attempt whenever it ends.
package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

const (
	defaultHeartbeat = 20 * time.Second
	// silences is how many heartbeats may be missing before the line counts as dead.
	silences = 3
	// welcomeWithin bounds the wait for Welcome.
	welcomeWithin = 30 * time.Second
	// steady is how long a session must have held for back-off to begin anew.
	steady = 30 * time.Second
	// maxRetryAfter bounds what a Close may ask for.
	maxRetryAfter = time.Hour
	// eventBatch is how many events go out between two looks at the rest.
	eventBatch = 64
)

// Stream is the client's end of SessionService.Connect.
type Stream interface {
	Send(*agentv1.AgentFrame) error
	Receive() (*agentv1.GatewayFrame, error)
	CloseRequest() error
	CloseResponse() error
}

// Work is the dispatcher's side. None of its methods blocks for long.
type Work interface {
	Begin() (open []*agentv1.OpenCommand, lanes map[string]uint32)
	Offer(*agentv1.SignedCommand)
	Cancel(id string)
	ResultAcked(id string)
	Frames() []*agentv1.AgentFrame
	Wake() <-chan struct{}
}

// Events is the outbox's side.
type Events interface {
	Epoch() string
	NextSeq() uint64
	Rewind(acked uint64)
	Acked(seq uint64) error
	Events(n int) ([]*agentv1.Event, error)
	Wake() <-chan struct{}
}

// Config is what the line home needs. All fields but Ended, Up and Rand must be set.
type Config struct {
	// Connect opens a stream; ctx ends with the session.
	Connect func(ctx context.Context) (Stream, error)
	// Hello returns a Hello of its own with everything that neither Work nor
	// Events knows.
	Hello func() *agentv1.Hello
	// Welcomed takes the gateway's time and newer bundles before the first
	// command is accepted. An error ends the session.
	Welcomed func(*agentv1.Welcome) error
	// Time takes a heartbeat's gateway time.
	Time   func(server time.Time)
	Work   Work
	Events Events
	// Wake ends a wait between attempts, for example at link-up.
	Wake <-chan struct{}
	// Ended hears why each session ended or could not begin.
	Ended func(error)
	// Up hears when a session begins and ends.
	Up  func(bool)
	Log *slog.Logger
	// Rand returns numbers in [0,1) for jitter; nil: math/rand.
	Rand func() float64
}

// Closed is a Close frame from the gateway.
type Closed struct {
	Code       errs.Code
	Message    string
	RetryAfter time.Duration
}

func (c *Closed) Error() string {
	return fmt.Sprintf("the gateway closed the session: %s: %s", c.Code, c.Message)
}

// As lets errs.From see the code.
func (c *Closed) As(target any) bool {
	if e, ok := target.(**errs.Error); ok {
		*e = errs.New(c.Code, "%s", c.Message)
		return true
	}
	return false
}

// Run holds sessions until ctx ends.
func Run(ctx context.Context, cfg Config) error {
	if cfg.Rand == nil {
		cfg.Rand = rand.Float64
	}
	policy := backoff.Policy{Min: time.Second, Max: time.Minute, Rand: cfg.Rand}
	for n := 0; ; n++ {
		began := time.Now()
		err := once(ctx, cfg)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if cfg.Ended != nil {
			cfg.Ended(err)
		}
		if time.Since(began) >= steady {
			n = 0
		}
		if err := sleep(ctx, wait(err), cfg.Wake); err != nil {
			return err
		}
		if err := policy.Wait(ctx, n, cfg.Wake); err != nil {
			return err
		}
	}
}

// wait is what an ended session asks for beside the back-off.
func wait(err error) time.Duration {
	var closed *Closed
	if !errors.As(err, &closed) {
		return 0
	}
	after := min(closed.RetryAfter, maxRetryAfter)
	switch closed.Code {
	case errs.Superseded, errs.IdentityCloned, errs.Revoked, errs.NotEnrolled, errs.ProtocolUnsupported:
		// A person must act, or another process of ours is up: no hurry.
		after = max(after, time.Minute)
	}
	return after
}

func sleep(ctx context.Context, d time.Duration, wake <-chan struct{}) error {
	if d <= 0 {
		return nil
	}
	return backoff.Policy{Min: d, Max: d}.Wait(ctx, 0, wake)
}

// line is one session.
type line struct {
	cfg       Config
	stream    Stream
	heard     atomic.Int64 // nanoseconds since began, of the last frame
	began     time.Time
	seen      atomic.Uint64 // the gateway's last heartbeat seq
	welcome   chan *agentv1.Welcome
	heartbeat time.Duration
}

// once runs one session to its end. It returns only when all its goroutines have.
func once(ctx context.Context, cfg Config) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stream, err := cfg.Connect(ctx)
	if err != nil {
		return err
	}
	l := &line{cfg: cfg, stream: stream, began: time.Now(), welcome: make(chan *agentv1.Welcome, 1)}

	open, lanes := cfg.Work.Begin()
	hello := cfg.Hello()
	hello.Open, hello.Lanes = open, lanes
	hello.EventEpoch, hello.EventNextSeq = cfg.Events.Epoch(), cfg.Events.NextSeq()

	// Send blocks while the connection is made: it must not outlive the watch.
	watched := make(chan struct{})
	timer := time.AfterFunc(welcomeWithin, func() {
		cancel(errs.Retry(errs.Timeout, "no Welcome within %s", welcomeWithin))
	})
	sendErr := stream.Send(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Hello{Hello: hello}})

	// The reader alone knows the real reason behind a failed Send.
	go func() {
		defer close(watched)
		cancel(l.read())
	}()
	if sendErr == nil || errors.Is(sendErr, io.EOF) {
		select {
		case w := <-l.welcome:
			timer.Stop()
			l.up(ctx, cancel, w)
		case <-ctx.Done():
		}
	} else {
		cancel(sendErr)
	}
	timer.Stop()
	cancel(nil) // keeps an earlier cause
	stream.CloseRequest()
	stream.CloseResponse()
	<-watched
	return context.Cause(ctx)
}

// up writes until the session ends.
func (l *line) up(ctx context.Context, cancel context.CancelCauseFunc, w *agentv1.Welcome) {
	l.heartbeat = defaultHeartbeat
	if s := w.GetHeartbeatS(); s > 0 {
		l.heartbeat = time.Duration(min(s, 60)) * time.Second
	}
	if l.cfg.Up != nil {
		l.cfg.Up(true)
		defer l.cfg.Up(false)
	}
	l.cfg.Log.Info("session is up", "session", w.GetSessionId(), "epoch", w.GetSessionEpoch())

	// The watch is apart from the writer, which a stalled line blocks.
	watch := make(chan struct{})
	go func() {
		defer close(watch)
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				if silent := time.Since(l.began) - time.Duration(l.heard.Load()); silent > silences*l.heartbeat {
					cancel(errs.Retry(errs.Timeout, "nothing heard from the gateway in %s", silent.Round(time.Second)))
					return
				}
			}
		}
	}()
	cancel(l.write(ctx))
	<-watch
}

func (l *line) write(ctx context.Context) error {
	var seq uint64
	beat := time.NewTimer(l.jittered())
	defer beat.Stop()
	for {
		for _, f := range l.cfg.Work.Frames() {
			if err := l.stream.Send(f); err != nil {
				return l.failed(ctx, err)
			}
		}
		events, err := l.cfg.Events.Events(eventBatch)
		if err != nil {
			return fmt.Errorf("read events: %w", err)
		}
		for _, e := range events {
			if err := l.stream.Send(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Event{Event: e}}); err != nil {
				return l.failed(ctx, err)
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-l.cfg.Work.Wake():
		case <-l.cfg.Events.Wake():
		case <-beat.C:
			seq++
			frame := &agentv1.Heartbeat{Seq: seq, Echo: l.seen.Load()}
			if err := l.stream.Send(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Heartbeat{Heartbeat: frame}}); err != nil {
				return l.failed(ctx, err)
			}
			beat.Reset(l.jittered())
		}
	}
}

// failed waits for the reader's word when the stream has ended under a Send:
// io.EOF only says that Receive knows why.
func (l *line) failed(ctx context.Context, err error) error {
	if errors.Is(err, io.EOF) {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(5 * time.Second):
		}
	}
	return fmt.Errorf("send: %w", err)
}

// jittered is the heartbeat ±20 %.
func (l *line) jittered() time.Duration {
	return time.Duration(float64(l.heartbeat) * (0.8 + 0.4*l.cfg.Rand()))
}

// read takes frames until the stream ends and returns why it did.
func (l *line) read() error {
	welcomed := false
	for {
		f, err := l.stream.Receive()
		if err != nil {
			if errors.Is(err, io.EOF) {
				return errs.Retry(errs.Unavailable, "the gateway ended the session")
			}
			return fmt.Errorf("receive: %w", err)
		}
		l.heard.Store(int64(time.Since(l.began)))
		switch m := f.GetFrame().(type) {
		case *agentv1.GatewayFrame_Close:
			return &Closed{errs.Code(m.Close.GetCode()), m.Close.GetMessage(), time.Duration(m.Close.GetRetryAfterS()) * time.Second}
		case *agentv1.GatewayFrame_Welcome:
			if welcomed {
				return errs.New(errs.InvalidPayload, "the gateway welcomed twice")
			}
			welcomed = true
			if err := l.cfg.Welcomed(m.Welcome); err != nil {
				return fmt.Errorf("welcome: %w", err)
			}
			// Before any EventAck can be read.
			l.cfg.Events.Rewind(m.Welcome.GetAckedEventSeq())
			l.welcome <- m.Welcome
			continue
		case *agentv1.GatewayFrame_Heartbeat:
			l.seen.Store(m.Heartbeat.GetSeq())
			if ms := m.Heartbeat.GetServerTimeMs(); ms != 0 && welcomed {
				l.cfg.Time(time.UnixMilli(ms))
			}
			continue
		}
		if !welcomed {
			return errs.New(errs.InvalidPayload, "the gateway's first frame is no Welcome")
		}
		switch m := f.GetFrame().(type) {
		case *agentv1.GatewayFrame_Command:
			l.cfg.Work.Offer(m.Command)
		case *agentv1.GatewayFrame_Cancel:
			l.cfg.Work.Cancel(m.Cancel.GetCommandId())
		case *agentv1.GatewayFrame_ResultAck:
			l.cfg.Work.ResultAcked(m.ResultAck.GetCommandId())
		case *agentv1.GatewayFrame_EventAck:
			if err := l.cfg.Events.Acked(m.EventAck.GetSeq()); err != nil {
				return fmt.Errorf("event ack: %w", err)
			}
		default:
			// A frame of a newer protocol than the one agreed on.
			l.cfg.Log.Warn("frame of an unknown type ignored")
		}
	}
}

var _ Stream = (*connect.BidiStreamForClient[agentv1.AgentFrame, agentv1.GatewayFrame])(nil)
