// Package console keeps the serial consoles of a site's BMCs: who has each, and
// the last of what its machine said.
package console

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

const (
	// HistoryBytes is what is kept of one machine's words, in memory.
	HistoryBytes = 256 << 10
	// maxHistories bounds the machines of which anything is kept; the one whose
	// console was used longest ago goes first.
	maxHistories = 64
	// steady is how long a session with a BMC lasts before the next loss of it
	// counts as a first one.
	steady = time.Minute
)

// Options are what a desk works with.
type Options struct {
	// Retry spaces the attempts to open a console again; zero: 1 s to 30 s with jitter.
	Retry backoff.Policy
	Log   *slog.Logger
	// Now tells when a console was used; nil: time.Now.
	Now func() time.Time
}

// Desk is safe for concurrent use.
type Desk struct {
	retry backoff.Policy
	log   *slog.Logger
	now   func() time.Time

	mu       sync.Mutex
	consoles map[string]*serial
}

// serial is one BMC's console. The desk's lock covers all but the ring.
type serial struct {
	said  *ring
	owner *owner
	used  time.Time
}

// owner is the command that has a console.
type owner struct {
	command string
	since   time.Time
	end     context.CancelCauseFunc
	gone    chan struct{}
}

// Session is one person's use of a console.
type Session struct {
	// BMC is the console's name, Command who uses it.
	BMC, Command string
	// Takeover ends the console that another command, or another session with the
	// BMC, has open.
	Takeover bool
	// History is how many bytes of what was said before are shown.
	History int
	// Open reaches the BMC. A serial port that somebody else has there is
	// operation-not-allowed without takeover.
	Open func(ctx context.Context, takeover bool) (io.ReadWriteCloser, error)
	// Line reaches the person; it is called once, when the console is open.
	Line func(ctx context.Context) (io.ReadWriteCloser, error)
	// Audit keeps an event; a console that cannot be audited is not taken over.
	Audit func(name string, details map[string]string) error
}

// Report is how a session went.
type Report struct {
	Received   int64 `json:"received"`
	Sent       int64 `json:"sent"`
	Reconnects int   `json:"reconnects"`
}

// errTaken ends the session of an owner that lost its console.
var errTaken = errs.New(errs.Cancelled, "the console was taken over by another person")

// New makes a desk without consoles.
func New(o Options) *Desk {
	if o.Retry.Max == 0 {
		o.Retry = backoff.Policy{Min: time.Second, Max: 30 * time.Second, Rand: rand.Float64}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	return &Desk{retry: o.Retry, log: o.Log, now: o.Now, consoles: map[string]*serial{}}
}

// Serve carries a console until the person leaves, which is nil, or ctx ends. A
// session with the BMC that breaks is opened again by itself.
func (d *Desk) Serve(ctx context.Context, s Session) (Report, error) {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	own, said, leave, err := d.claim(ctx, s, end)
	if err != nil {
		return Report{}, err
	}
	defer leave()
	x := &session{Session: s, desk: d, said: said, own: own}
	report, err := x.run(ctx, end)
	if err != nil && errors.Is(context.Cause(ctx), errTaken) {
		err = errTaken
	}
	return report, err
}

// claim makes the session the console's owner, and ends another's where that was
// asked for.
func (d *Desk) claim(ctx context.Context, s Session, end context.CancelCauseFunc) (*owner, *ring, func(), error) {
	for {
		d.mu.Lock()
		c := d.consoles[s.BMC]
		if c == nil {
			c = &serial{said: newRing()}
			d.consoles[s.BMC] = c
			d.forget(s.BMC)
		}
		c.used = d.now()
		old := c.owner
		if old == nil {
			own := &owner{command: s.Command, since: d.now(), end: end, gone: make(chan struct{})}
			c.owner = own
			d.mu.Unlock()
			return own, c.said, func() {
				d.mu.Lock()
				c.owner, c.used = nil, d.now()
				d.mu.Unlock()
				close(own.gone)
			}, nil
		}
		d.mu.Unlock()
		if !s.Takeover {
			return nil, nil, nil, errs.New(errs.OperationNotAllowed, "the console is open since %s by command %s, which only a takeover ends", old.since.UTC().Format(time.RFC3339), old.command)
		}
		if err := d.audit(s, "console.taken", map[string]string{"from": old.command}); err != nil {
			return nil, nil, nil, err
		}
		old.end(errTaken)
		select {
		case <-old.gone:
		case <-ctx.Done():
			return nil, nil, nil, context.Cause(ctx)
		}
	}
}

// forget drops the oldest history that nobody uses where there are too many; the
// caller holds mu.
func (d *Desk) forget(keep string) {
	for len(d.consoles) > maxHistories {
		oldest := ""
		for bmc, c := range d.consoles {
			if bmc != keep && c.owner == nil && (oldest == "" || c.used.Before(d.consoles[oldest].used)) {
				oldest = bmc
			}
		}
		if oldest == "" {
			return
		}
		delete(d.consoles, oldest)
	}
}

func (d *Desk) audit(s Session, name string, details map[string]string) error {
	body := map[string]string{"bmc": s.BMC, "command": s.Command}
	for k, v := range details {
		body[k] = v
	}
	if err := s.Audit(name, body); err != nil {
		d.log.Error("audit event not kept", "event", name, "command", s.Command, "err", err)
		return errs.Retry(errs.NoSpace, "there is no room for the audit event %s: %v", name, err)
	}
	return nil
}

// session is one Serve.
type session struct {
	Session
	desk *Desk
	said *ring
	own  *owner

	mu     sync.Mutex
	bmc    io.ReadWriteCloser // nil while it is lost
	report Report
}

func (x *session) run(ctx context.Context, end context.CancelCauseFunc) (_ Report, err error) {
	bmc, err := x.first(ctx)
	if err != nil {
		return Report{}, err
	}
	if !x.said.empty() {
		x.tell("opened again; what the machine said in between was not kept")
	}
	offset := x.said.back(x.History)
	_ = x.desk.audit(x.Session, "console.opened", nil)
	defer func() {
		_ = x.desk.audit(x.Session, "console.closed", map[string]string{"code": string(errs.CodeOf(err)), "reconnects": fmt.Sprint(x.report.Reconnects)})
	}()

	// Whatever ends first ends all.
	var wg sync.WaitGroup
	defer wg.Wait()
	defer end(nil)
	ended := make(chan error, 3)
	wg.Go(func() { ended <- x.fromMachine(ctx, bmc) })
	line, err := x.Line(ctx)
	if err != nil {
		return x.done(), err
	}
	wg.Go(func() { ended <- x.toMachine(line) })
	wg.Go(func() { ended <- x.toPerson(ctx, line, offset) })
	select {
	case err = <-ended:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	end(nil)
	// It frees who waits for the person; the other side hears why.
	if c, ok := line.(interface{ CloseWith(*errs.Error) }); ok {
		if errors.Is(context.Cause(ctx), errTaken) {
			err = errTaken
		}
		c.CloseWith(errs.From(err))
	} else {
		_ = line.Close()
	}
	x.drop()
	wg.Wait()
	return x.done(), err
}

func (x *session) done() Report {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.report
}

// first opens the console, over another session with the BMC where that was asked for.
func (x *session) first(ctx context.Context) (io.ReadWriteCloser, error) {
	bmc, err := x.Open(ctx, false)
	if !x.Takeover || errs.CodeOf(err) != errs.OperationNotAllowed {
		return bmc, err
	}
	if err := x.desk.audit(x.Session, "console.taken", map[string]string{"from": "another session with the BMC"}); err != nil {
		return nil, err
	}
	return x.Open(ctx, true)
}

// tell adds a line of ours to what the machine said, where it belongs in time.
func (x *session) tell(format string, args ...any) {
	_, _ = x.said.Write([]byte("\r\n[better-compute: " + clean(fmt.Sprintf(format, args...)) + "]\r\n"))
}

// clean keeps what a BMC said out of the terminal's commands.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return '.'
		}
		return r
	}, s)
}

// fromMachine keeps all that the machine says, and opens its console again when it
// is lost, until ctx ends or that cannot help.
func (x *session) fromMachine(ctx context.Context, bmc io.ReadWriteCloser) error {
	for n := 0; ; {
		since := x.desk.now()
		err := x.carry(ctx, bmc)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if x.desk.now().Sub(since) > steady {
			n = 0
		}
		x.tell("the console was lost (%v); opening it again", errs.From(err).Message)
		x.desk.log.Info("console lost", "bmc", x.BMC, "command", x.Command, "err", err)
		for told := ""; ; n++ {
			if err := x.desk.retry.Wait(ctx, n, nil); err != nil {
				return context.Cause(ctx)
			}
			bmc, err = x.Open(ctx, false)
			if err == nil {
				n++
				break
			}
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			if hopeless(errs.CodeOf(err)) {
				return err
			}
			if why := errs.From(err).Message; why != told {
				told = why
				x.tell("not open yet: %s", why)
			}
		}
		x.mu.Lock()
		x.report.Reconnects++
		x.mu.Unlock()
		x.tell("open again")
	}
}

// hopeless are the codes that no further attempt changes.
func hopeless(code errs.Code) bool {
	switch code {
	case errs.UnsupportedDriver, errs.UnsupportedOperation, errs.InvalidConfig, errs.InvalidArgs, errs.InvalidAddress,
		errs.InvalidPayload, errs.PinUnsupported, errs.BindingMismatch:
		return true
	}
	return false
}

// carry copies from one session with the BMC until it ends.
func (x *session) carry(ctx context.Context, bmc io.ReadWriteCloser) error {
	stop := context.AfterFunc(ctx, func() { _ = bmc.Close() })
	defer func() {
		stop()
		x.drop()
		_ = bmc.Close()
	}()
	x.mu.Lock()
	x.bmc = bmc
	x.mu.Unlock()
	buf := make([]byte, 32<<10)
	for {
		n, err := bmc.Read(buf)
		if n > 0 {
			_, _ = x.said.Write(buf[:n])
			x.mu.Lock()
			x.report.Received += int64(n)
			x.mu.Unlock()
		}
		switch {
		case errors.Is(err, io.EOF):
			return errs.New(errs.Unreachable, "the BMC ended it")
		case err != nil:
			return err
		}
	}
}

// drop forgets the session with the BMC.
func (x *session) drop() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.bmc = nil
}

// toMachine hands on what the person types. While the console is lost it goes
// nowhere: what a machine gets late is worse than what it never gets.
func (x *session) toMachine(line io.Reader) error {
	buf := make([]byte, 4<<10)
	for {
		n, err := line.Read(buf)
		if n > 0 {
			x.mu.Lock()
			bmc := x.bmc
			x.mu.Unlock()
			if bmc != nil {
				// That it is lost shows where it is read.
				sent, _ := bmc.Write(buf[:n])
				x.mu.Lock()
				x.report.Sent += int64(sent)
				x.mu.Unlock()
			}
		}
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrClosedPipe):
			return nil
		case err != nil:
			return err
		}
	}
}

// toPerson shows what was said from offset on. A person who reads more slowly than
// the machine talks for long loses the middle, and is told.
func (x *session) toPerson(ctx context.Context, line io.Writer, offset int64) error {
	buf := make([]byte, 32<<10)
	for {
		n, next, skipped, changed := x.said.read(offset, buf)
		offset = next
		if skipped > 0 {
			if _, err := fmt.Fprintf(line, "\r\n[better-compute: %d bytes were not shown: the line is too slow]\r\n", skipped); err != nil {
				return left(err)
			}
		}
		if n > 0 {
			if _, err := line.Write(buf[:n]); err != nil {
				return left(err)
			}
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// left is the end of a person's line, which is no failure.
func left(err error) error {
	if errors.Is(err, io.ErrClosedPipe) {
		return nil
	}
	return err
}
