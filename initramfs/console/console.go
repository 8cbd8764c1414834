// Package console writes lines to every console of the box at once, serial
// and screen, and never lets a console that does not drain hold the box up.
package console

import (
	"bytes"
	"context"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/initramfs/survive"
)

// queueLines bounds what waits for one console; what is over it is dropped and counted.
const queueLines = 512

// Console is an io.Writer of whole lines.
type Console struct {
	sinks []*sink
	wg    sync.WaitGroup

	mu     sync.RWMutex
	closed bool
}

type sink struct {
	w     io.Writer
	lines chan []byte

	mu      sync.Mutex
	dropped int
}

// Names lists the active consoles of the text in /sys/class/tty/console/active.
// tty0 stands for whatever screen is in front: tty1 is where the boot shows.
func Names(active string) []string {
	var names []string
	for name := range strings.FieldsSeq(active) {
		if name == "tty0" {
			name = "tty1"
		}
		seen := false
		for _, n := range names {
			seen = seen || n == name
		}
		if !seen {
			names = append(names, name)
		}
	}
	return names
}

// Open opens the consoles by name below /dev; those that cannot be opened are
// left out. Without any it is the kernel's own choice.
func Open(names []string) *Console {
	var ws []io.Writer
	open := func(name string) {
		// not a controlling terminal: ctrl-C on it must not reach PID 1
		if f, err := os.OpenFile("/dev/"+name, os.O_WRONLY|noCTTY, 0); err == nil {
			ws = append(ws, f)
		}
	}
	for _, n := range names {
		open(n)
	}
	if len(ws) == 0 {
		open("console")
	}
	return New(ws...)
}

// New writes to ws.
func New(ws ...io.Writer) *Console {
	c := &Console{}
	for _, w := range ws {
		s := &sink{w: w, lines: make(chan []byte, queueLines)}
		c.sinks = append(c.sinks, s)
		c.wg.Go(func() { survive.Run(context.Background(), "console", func(string, ...any) {}, s.run) })
	}
	return c
}

func (s *sink) run() {
	for line := range s.lines {
		s.w.Write(line)
		s.mu.Lock()
		n := s.dropped
		s.dropped = 0
		s.mu.Unlock()
		if n > 0 {
			io.WriteString(s.w, "bc-init: console: lines were dropped\r\n")
		}
	}
}

// Write queues b, a line or several, for every console. It never blocks and never fails.
func (c *Console) Write(b []byte) (int, error) {
	out := bytes.ReplaceAll(bytes.TrimRight(b, "\r\n"), []byte("\n"), []byte("\r\n"))
	out = append(bytes.Clone(out), '\r', '\n')
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.closed {
		return len(b), nil
	}
	for _, s := range c.sinks {
		select {
		case s.lines <- out:
		default:
			s.mu.Lock()
			s.dropped++
			s.mu.Unlock()
		}
	}
	return len(b), nil
}

// Drain waits until everything queued is written, or for the given time. What
// is written later is dropped.
func (c *Console) Drain(most time.Duration) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return
	}
	c.closed = true
	c.mu.Unlock()
	for _, s := range c.sinks {
		close(s.lines)
	}
	select {
	case <-survive.Go(context.Background(), "console", func(string, ...any) {}, c.wg.Wait):
	case <-time.After(most):
	}
}
