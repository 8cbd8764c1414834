package h2

import (
	"bufio"
	"errors"
	"net"
	"sync"
	"syscall"
)

// maxKept is when nothing more is kept of what TLS says by itself: it answers
// each new key that the other side asks for. It is more than a write that the
// connection asked for can leave.
const maxKept = 2 * maxOwed

// patient is a connection below TLS whose Write never waits for the other side:
// what the socket does not take at once is kept for finish. So whoever has
// something to say can write it, without a goroutine in between.
type patient struct {
	net.Conn
	raw syscall.RawConn // nil: all is left to finish
	in  *bufio.Reader   // several records at a time

	mu sync.Mutex
	// started is false during TLS's handshake, which waits by itself.
	started, corked bool
	kept, spare     []byte
	// finishing is true while finish writes what was kept earlier.
	finishing bool

	// attempt writes kept once; n and err are its results.
	n       int
	err     error
	attempt func(fd uintptr) bool
}

func newPatient(nc net.Conn) *patient {
	p := &patient{Conn: nc, in: bufio.NewReaderSize(nc, 4*maxFrame)}
	if sc, ok := nc.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			p.raw, p.attempt = once(p, raw)
		}
	}
	return p
}

func (p *patient) Read(b []byte) (int, error) { return p.in.Read(b) }

func (p *patient) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.started {
		return p.Conn.Write(b)
	}
	if !p.corked && len(p.kept) > maxKept {
		return 0, errors.New("h2: the other side does not read")
	}
	p.kept = append(p.kept, b...)
	if p.corked || p.finishing {
		return len(b), nil
	}
	return len(b), p.try()
}

// cork keeps what is written until uncork: TLS writes each record by itself.
func (p *patient) cork() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.corked = true
}

// uncork writes what the socket takes, and reports whether finish has something to do.
func (p *patient) uncork() (behind bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.corked = false
	if !p.finishing {
		err = p.try()
	}
	return len(p.kept) > 0, err
}

// try writes what the socket takes. mu is held.
func (p *patient) try() error {
	for p.raw != nil && len(p.kept) > 0 {
		if err := p.raw.Write(p.attempt); err != nil {
			return err
		}
		if errors.Is(p.err, syscall.EAGAIN) {
			return nil
		}
		if p.err != nil {
			return p.err
		}
		p.kept = p.kept[:copy(p.kept, p.kept[p.n:])]
	}
	return nil
}

func (p *patient) start() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.started = true
}

// finish writes what was kept, and waits until the other side has taken it.
func (p *patient) finish() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.finishing = true
	defer func() { p.finishing = false }()
	for len(p.kept) > 0 {
		b := p.kept
		p.kept, p.spare = p.spare[:0], nil
		p.mu.Unlock()
		_, err := p.Conn.Write(b)
		p.mu.Lock()
		p.spare = b[:0]
		if err != nil {
			return err
		}
	}
	return nil
}
