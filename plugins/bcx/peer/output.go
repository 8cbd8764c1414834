package peer

import (
	"bufio"
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"unicode/utf8"

	"github.com/better-compute/site-appliance/plugins/bcx"
)

const (
	// maxLine bounds a logged line; a longer one is cut and marked.
	maxLine = 64 << 10
	// margin is read beyond it, so that a secret at the cut is seen whole.
	margin = 4 << 10
	// maxQueue bounds the lines that wait for the log. More are dropped and
	// counted: a slow log must not hold up a plugin.
	maxQueue = 256
)

// ErrEnded is a stdout that ended before the handshake line: the plugin has
// ended, or is about to.
var ErrEnded = errors.New("stdout ended before the handshake line")

// line is one line of a plugin's output.
type line struct {
	stream, text string
	cut          bool
}

// Output takes what a plugin prints: the handshake line first, all else to the
// log. It never holds up the plugin.
type Output struct {
	redact  *Redactor
	first   chan struct{} // closed once shake and err are set
	shake   []byte
	err     error
	lines   chan line
	dropped atomic.Int64
	drains  sync.WaitGroup
	logged  chan struct{}
}

// Watch reads both streams to their ends. Wait waits for that.
func Watch(stdout, stderr io.Reader, log *slog.Logger, redact *Redactor) *Output {
	if redact == nil {
		redact = NewRedactor()
	}
	o := &Output{redact: redact, first: make(chan struct{}), lines: make(chan line, maxQueue), logged: make(chan struct{})}
	go o.log(log)
	o.drains.Go(func() {
		r := bufio.NewReaderSize(stdout, bcx.MaxHandshake)
		o.shake, o.err = readHandshake(r)
		close(o.first)
		o.drain("stdout", r)
	})
	o.drains.Go(func() { o.drain("stderr", bufio.NewReaderSize(stderr, 16<<10)) })
	return o
}

// Handshake waits for the first line on stdout and reads it; the socket must
// lie in dir.
func (o *Output) Handshake(ctx context.Context, dir string) (bcx.Handshake, error) {
	select {
	case <-o.first:
	case <-ctx.Done():
		return bcx.Handshake{}, ctx.Err()
	}
	if o.err != nil {
		return bcx.Handshake{}, o.err
	}
	return bcx.ParseHandshake(o.shake, dir)
}

// Wait ends when both streams have, and the log has caught up.
func (o *Output) Wait() {
	o.drains.Wait()
	close(o.lines)
	<-o.logged
}

func (o *Output) log(log *slog.Logger) {
	defer close(o.logged)
	for l := range o.lines {
		text := o.redact.Scrub(l.text)
		if len(text) > maxLine {
			text, l.cut = clip(text, maxLine), true
		}
		attrs := []any{"stream", l.stream, "line", text}
		if l.cut {
			attrs = append(attrs, "cut", true)
		}
		log.Info("plugin output", attrs...)
	}
	if n := o.dropped.Load(); n > 0 {
		log.Warn("plugin output dropped", "lines", n)
	}
}

// drain reads r to its end.
func (o *Output) drain(stream string, r *bufio.Reader) {
	for {
		text, cut, err := readLine(r, maxLine+margin)
		if text != "" || cut {
			select {
			case o.lines <- line{stream, text, cut}:
			default:
				o.dropped.Add(1)
			}
		}
		if err != nil {
			return
		}
	}
}

// readLine reads one line without its end, keeps its first limit bytes and
// skips the rest. At the end of r it answers what came before, and the error.
func readLine(r *bufio.Reader, limit int) (text string, cut bool, err error) {
	var kept []byte
	for {
		part, err := r.ReadSlice('\n')
		if n := len(part); n > 0 && part[n-1] == '\n' {
			part = part[:n-1]
		}
		room := limit - len(kept)
		if len(part) > room {
			part, cut = part[:room], true
		}
		kept = append(kept, part...)
		if !errors.Is(err, bufio.ErrBufferFull) {
			return string(kept), cut, err
		}
	}
}

// readHandshake reads the first line, its newline included.
func readHandshake(r *bufio.Reader) ([]byte, error) {
	l, err := r.ReadSlice('\n')
	switch {
	case errors.Is(err, bufio.ErrBufferFull):
		return nil, errors.New("the first line on stdout is longer than a handshake")
	case errors.Is(err, io.EOF):
		return nil, ErrEnded
	case err != nil:
		return nil, err
	}
	return append([]byte(nil), l...), nil
}

// clip is s cut to at most n bytes, at a character, and valid UTF-8.
func clip(s string, n int) string {
	if len(s) > n {
		for n > 0 && !utf8.RuneStart(s[n]) {
			n--
		}
		s = s[:n]
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}
