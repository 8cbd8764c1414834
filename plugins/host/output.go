package host

import (
	"bufio"
	"errors"
	"io"
	"log/slog"
	"sync/atomic"
)

const (
	// maxLine bounds a logged line; a longer one is cut and marked.
	maxLine = 64 << 10
	// maxQueue bounds the lines that wait for the log. More are dropped and
	// counted: a slow log must not hold up a plugin.
	maxQueue = 256
)

// line is one line of a plugin's output.
type line struct {
	stream, text string
	cut          bool
}

// output carries a plugin's lines to the log.
type output struct {
	lines   chan line
	dropped atomic.Int64
	done    chan struct{}
}

func newOutput(log *slog.Logger) *output {
	o := &output{lines: make(chan line, maxQueue), done: make(chan struct{})}
	go func() {
		defer close(o.done)
		for l := range o.lines {
			attrs := []any{"stream", l.stream, "line", l.text}
			if l.cut {
				attrs = append(attrs, "cut", true)
			}
			log.Info("plugin output", attrs...)
		}
		if n := o.dropped.Load(); n > 0 {
			log.Warn("plugin output dropped", "lines", n)
		}
	}()
	return o
}

// drain reads r to its end.
func (o *output) drain(stream string, r *bufio.Reader) {
	for {
		text, cut, err := readLine(r, maxLine)
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

// close ends the log's side once no drain runs.
func (o *output) close() {
	close(o.lines)
	<-o.done
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
		return nil, errors.New("stdout ended before the handshake line")
	case err != nil:
		return nil, err
	}
	return append([]byte(nil), l...), nil
}
