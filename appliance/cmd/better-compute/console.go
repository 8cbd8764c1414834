package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/api/computev1/computev1connect"
	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// heldFor is how long a console that comes back waits for its own old end: the box
// may hear later than the person that the line was lost.
const heldFor = 3 * time.Minute

// leaveWithin is how long the far end may take to end a console that is left.
const leaveWithin = 5 * time.Second

func metalConsole(ctx context.Context, args []string, std stdio) error {
	f := newCall("metal console NAME [--takeover] [--history BYTES]", std)
	f.about = "Opens a machine's serial console. It comes back by itself when the line to the gateway or to the BMC is lost.\nKeys, each after Enter:  ~ .  ends the console   ~ ?  shows the keys   ~ ~  sends one ~"
	takeover := f.Bool("takeover", false, "end the console that somebody else has open")
	history := f.Uint("history", 4096, "show as many `bytes` of what was said in earlier consoles; at most 262144")
	rest, c, err := f.begin(args, 1, 1)
	if err != nil {
		return err
	}
	if *history > 256<<10 {
		return fmt.Errorf("--history %d: want at most 262144", *history)
	}
	note := func(format string, args ...any) {
		fmt.Fprintf(std.err, "\r\n[%s]\r\n", fmt.Sprintf(format, args...))
	}
	if in, ok := std.in.(*os.File); ok {
		restore, err := rawTerminal(in)
		if err != nil {
			return fmt.Errorf("prepare the terminal: %w", err)
		}
		defer restore()
	}
	p := &person{
		open:  &computev1.ConsoleOpen{TenantId: c.tenant, Machine: rest[0], Takeover: *takeover, HistoryBytes: uint32(*history)},
		typed: make(chan []byte), left: make(chan struct{}), out: std.out, note: note,
		retry: backoff.Policy{Min: time.Second, Max: 15 * time.Second, Rand: rand.Float64},
	}
	go p.listen(std.in)
	return p.run(ctx, c.console())
}

// console is the machine service over a client that soon notices a dead line.
func (c *client) console() computev1connect.MetalServiceClient {
	h := *c.http
	if t, ok := h.Transport.(*http.Transport); ok {
		t = t.Clone()
		t.HTTP2 = &http.HTTP2Config{SendPingTimeout: 15 * time.Second, PingTimeout: 15 * time.Second, WriteByteTimeout: 30 * time.Second}
		h.Transport = t
	}
	return computev1connect.NewMetalServiceClient(&h, c.url, c.options...)
}

// person is a console's near end.
type person struct {
	open  *computev1.ConsoleOpen
	typed chan []byte
	left  chan struct{} // closed when the person leaves
	out   io.Writer
	note  func(format string, args ...any)
	retry backoff.Policy
}

// listen reads what is typed; it ends with the program at the latest.
func (p *person) listen(in io.Reader) {
	defer close(p.left)
	k := keyboard{fresh: true}
	buf := make([]byte, 4<<10)
	for {
		n, err := in.Read(buf)
		send, command := k.take(buf[:n])
		if len(send) > 0 {
			p.typed <- send
		}
		switch command {
		case keyEnd:
			return
		case keyHelp:
			p.note("%s", keysHelp)
		}
		if err != nil {
			return
		}
	}
}

// run opens the console, and again when the line is lost, until either side ends it.
func (p *person) run(ctx context.Context, service computev1connect.MetalServiceClient) error {
	var lost time.Time // when it was lost last
	for n := 0; ; {
		opened, err := p.once(ctx, service)
		if opened {
			n, lost = 0, time.Now()
			// What was taken over once is not taken again from whom took it since.
			p.open.Takeover, p.open.HistoryBytes = false, 0
		}
		switch {
		case errors.Is(err, errLeft), ctx.Err() != nil:
			p.note("console left")
			return nil
		case err == nil:
			p.note("the console was closed at the far end")
			return nil
		case lost.IsZero(), !again(err, time.Since(lost)):
			return plain(err)
		}
		p.note("the line was lost (%v); trying again, Enter ~ . ends", clean(plain(err).Error()))
		if err := p.pause(ctx, p.retry.Delay(n)); err != nil {
			p.note("console left")
			return nil
		}
		n++
	}
}

var errLeft = errors.New("the person left")

// again says whether opening once more can help: after a lost line, and for a
// while where the console is still held by what was lost.
func again(err error, since time.Duration) bool {
	if !connect.IsWireError(err) {
		return true
	}
	switch connect.CodeOf(err) {
	case connect.CodeUnavailable, connect.CodeUnknown:
		return true
	}
	return reason(err) == errs.OperationNotAllowed && since < heldFor
}

// reason is the code of the box's own error in what the gateway answered.
func reason(err error) errs.Code {
	var wire *connect.Error
	if !errors.As(err, &wire) {
		return ""
	}
	for _, d := range wire.Details() {
		if m, derr := d.Value(); derr == nil {
			if e, ok := m.(*agentv1.Error); ok {
				_, code, _ := strings.Cut(e.GetCode(), "/")
				return errs.Code(code)
			}
		}
	}
	return ""
}

// pause waits; what is typed meanwhile goes nowhere.
func (p *person) pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
			return nil
		case <-p.typed:
		case <-p.left:
			return errLeft
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// once is one opening of the console: nil when the far end closed it.
func (p *person) once(ctx context.Context, service computev1connect.MetalServiceClient) (opened bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream := service.Console(ctx)
	defer stream.CloseResponse()
	defer stream.CloseRequest()
	err = stream.Send(&computev1.ConsoleRequest{Request: &computev1.ConsoleRequest_Open{Open: p.open}})
	if err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	type part struct {
		data []byte
		err  error
	}
	parts, ended := make(chan part), make(chan struct{})
	defer close(ended)
	go func() {
		for {
			m, err := stream.Receive()
			select {
			case parts <- part{m.GetData(), err}:
			case <-ended:
				return
			}
			if err != nil {
				return
			}
		}
	}()
	typed, left := p.typed, p.left
	var patience <-chan time.Time
	for {
		select {
		case f := <-parts:
			switch {
			case f.err != nil && left == nil && (opened || !connect.IsWireError(f.err)):
				return opened, errLeft // an opening that was refused is told all the same
			case errors.Is(f.err, io.EOF):
				return opened, nil
			case f.err != nil:
				return opened, f.err
			case !opened:
				opened = true
				p.note("console of %s is open; Enter ~ . ends, Enter ~ ? shows the keys", clean(p.open.Machine))
			}
			if _, err := p.out.Write(f.data); err != nil {
				return opened, errLeft
			}
		case data := <-typed:
			if err := stream.Send(&computev1.ConsoleRequest{Request: &computev1.ConsoleRequest_Data{Data: data}}); err != nil && !errors.Is(err, io.EOF) {
				return opened, err
			}
		case <-left:
			// The far end closes once it has taken what was typed before.
			_ = stream.CloseRequest()
			typed, left = nil, nil
			timer := time.NewTimer(leaveWithin)
			defer timer.Stop()
			patience = timer.C
		case <-patience:
			return opened, errLeft
		case <-ctx.Done():
			return opened, ctx.Err()
		}
	}
}
