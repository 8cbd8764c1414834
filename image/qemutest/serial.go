package qemutest

import (
	"bytes"
	"io"
	"os"
	"strings"
	"sync"
)

// keepSerial bounds what is held in memory, half of it at least is kept;
// serial.log has everything.
const keepSerial = 16 << 20

// serialLog collects the serial line and wakes those who wait for words in it.
type serialLog struct {
	file    *os.File
	console io.Writer

	mu      sync.Mutex
	buf     []byte
	from    int           // where the last mark stands in buf
	changed chan struct{} // closed and replaced when buf grows
}

func newSerialLog(file *os.File, console io.Writer) *serialLog {
	return &serialLog{file: file, console: console, changed: make(chan struct{})}
}

// drain reads until the line closes. A full disk or a broken console does not
// stop it, for that would stop the machine.
func (s *serialLog) drain(r io.Reader) {
	chunk := make([]byte, 32<<10)
	for {
		n, err := r.Read(chunk)
		if n > 0 {
			s.file.Write(chunk[:n])
			if s.console != nil {
				s.console.Write(chunk[:n])
			}
			s.add(chunk[:n])
		}
		if err != nil {
			return
		}
	}
}

func (s *serialLog) add(p []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.buf = append(s.buf, p...)
	if len(s.buf) > keepSerial {
		cut := len(s.buf) - keepSerial/2
		s.buf = bytes.Clone(s.buf[cut:])
		s.from = max(0, s.from-cut)
	}
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *serialLog) text() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return string(s.buf)
}

func (s *serialLog) mark() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.from = len(s.buf)
}

// find looks for marker since the last mark; the channel closes at the next change.
func (s *serialLog) find(marker string) (<-chan struct{}, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed, bytes.Contains(s.buf[s.from:], []byte(marker))
}

// Plain removes terminal control sequences and carriage returns.
func Plain(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == 0x1b && i+1 < len(s) && s[i+1] == '[':
			i += 2
			for i < len(s) && (s[i] < 0x40 || s[i] > 0x7e) {
				i++
			}
		case c == 0x1b:
			i++
		case c == '\n' || c == '\t' || c >= 0x20 && c != 0x7f:
			b.WriteByte(c)
		}
	}
	return b.String()
}
