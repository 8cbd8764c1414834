package supervise

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"syscall"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/initramfs/survive"
)

// Service is a program that is to run for ever.
type Service struct {
	Name string
	Argv []string
	// Attr is how it is started; nil is plainly.
	Attr *syscall.SysProcAttr
	// Console gets what it prints.
	Console io.Writer
	// Say reports a start or an end, one line each.
	Say func(format string, args ...any)
	// Started is called after each successful start.
	Started func()
	// Failed is told why a run ended or could not begin; nil: nobody is.
	Failed func(reason string)
	// Backoff spaces restarts. A run of Steady or longer starts it anew.
	Backoff backoff.Policy
	Steady  time.Duration
	// Grace is how long it may take to end when ctx is done.
	Grace time.Duration
	// Terminal, if set, is the service's standard input, output and error.
	Terminal *os.File
}

// lineLimit bounds one line of a service's output.
const lineLimit = 8 << 10

// Run keeps the service running until ctx is done, then stops it.
func (s Service) Run(ctx context.Context, children *Children) {
	fails := 0
	for ctx.Err() == nil {
		began := time.Now()
		status, err := s.once(ctx, children)
		if ctx.Err() != nil {
			return
		}
		ran := time.Since(began)
		if ran >= s.Steady {
			fails = 0
		}
		wait := s.Backoff.Delay(fails).Round(100 * time.Millisecond)
		if err != nil {
			s.Say("%s: failed: %v; next start in about %s", s.Name, err, wait)
			s.failed(err.Error())
		} else {
			s.Say("%s: failed: ended with %s after %s; next start in about %s", s.Name, Describe(status), ran.Round(100*time.Millisecond), wait)
			s.failed("ended with " + Describe(status))
		}
		if s.Backoff.Wait(ctx, fails, nil) != nil {
			return
		}
		fails++
	}
}

func (s Service) failed(reason string) {
	if s.Failed != nil {
		s.Failed(reason)
	}
}

func (s Service) once(ctx context.Context, children *Children) (syscall.WaitStatus, error) {
	var copied <-chan struct{}
	var p *Process
	var err error
	var r *os.File
	if s.Terminal != nil {
		p, err = children.Start(s.Argv, s.Terminal, s.Attr, s.Terminal)
	} else {
		var w *os.File
		r, w, err = os.Pipe()
		if err != nil {
			return 0, err
		}
		p, err = children.Start(s.Argv, w, s.Attr, nil)
		w.Close()
	}
	if err != nil {
		if r != nil {
			r.Close()
		}
		return 0, err
	}
	if r != nil {
		copied = survive.Go(ctx, s.Name, s.Say, func() { forward(s.Console, r) })
	}
	if s.Started != nil {
		// A panic out of here would leave the process behind, and start a second one.
		if err := survive.Once(s.Started); err != nil {
			s.Say("%s: %v", s.Name, err)
		}
	}
	var status syscall.WaitStatus
	select {
	case status = <-p.done:
	case <-ctx.Done():
		p.Stop(s.Grace)
	}
	if r != nil {
		// what it started may still hold the pipe: read on for a moment, not for ever
		r.SetReadDeadline(time.Now().Add(time.Second))
		<-copied
		r.Close()
	}
	return status, nil
}

// forward copies whole lines and cuts those that are too long.
func forward(w io.Writer, r io.Reader) {
	b := bufio.NewReaderSize(r, lineLimit)
	cut := false
	for {
		line, err := b.ReadSlice('\n')
		if len(line) > 0 && !cut {
			w.Write(line)
		}
		cut = errors.Is(err, bufio.ErrBufferFull)
		if err != nil && !cut {
			return
		}
	}
}
