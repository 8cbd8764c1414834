package bmctest

import (
	"context"
	"errors"
	"io"
	"sync"

	"github.com/bougou/go-ipmi/pkg/hal"
)

// SerialLine is a Machine with a serial line of its own, which the IPMI BMC
// carries instead of the Console that it has otherwise. A line that is closed
// can be opened again; what the machine says in between is its own matter.
type SerialLine interface {
	OpenSerial(ctx context.Context) (io.ReadWriteCloser, error)
}

// lineConsole carries a SerialLine.
type lineConsole struct{ line SerialLine }

func (l lineConsole) Open(ctx context.Context) (hal.ConsoleConn, error) {
	conn, err := l.line.OpenSerial(ctx)
	if err != nil {
		return nil, err
	}
	c := &lineConn{conn: conn, room: make(chan struct{}, 1), closed: make(chan struct{}), typed: make(chan []byte, lineKeys)}
	c.work.Go(c.read)
	c.work.Go(c.write)
	return c, nil
}

// lineBytes is how much of what the machine says waits for the BMC; beyond it
// the machine waits. lineKeys is how many packets of what is typed wait for the
// machine; beyond it they are lost, as in a serial port that nobody reads.
const (
	lineBytes = 16 << 10
	lineKeys  = 256
)

// lineConn is one opening of the line.
type lineConn struct {
	conn   io.ReadWriteCloser
	room   chan struct{} // something was taken
	closed chan struct{} // by Close
	typed  chan []byte
	work   sync.WaitGroup

	mu      sync.Mutex
	waiting []byte
	err     error
	once    sync.Once
}

// read brings what the machine says until the line ends.
func (c *lineConn) read() {
	buf := make([]byte, 4096)
	for {
		n, err := c.conn.Read(buf)
		c.mu.Lock()
		c.waiting = append(c.waiting, buf[:n]...)
		if err != nil {
			c.err = err
		}
		full := len(c.waiting) >= lineBytes
		c.mu.Unlock()
		if err != nil {
			return
		}
		if full {
			select {
			case <-c.room:
			case <-c.closed:
				return
			}
		}
	}
}

// ReadAvailable implements hal.ConsoleConn.
func (c *lineConn) ReadAvailable(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := copy(p, c.waiting)
	c.waiting = c.waiting[n:]
	if n > 0 {
		select {
		case c.room <- struct{}{}:
		default:
		}
		return n, nil
	}
	return 0, c.err
}

// write brings what is typed to the machine.
func (c *lineConn) write() {
	for {
		select {
		case <-c.closed:
			return
		case p := <-c.typed:
			if _, err := c.conn.Write(p); err != nil {
				return
			}
		}
	}
}

// Write implements io.Writer without waiting for the machine.
func (c *lineConn) Write(p []byte) (int, error) {
	select {
	case c.typed <- append([]byte(nil), p...):
	default:
	}
	return len(p), nil
}

func (c *lineConn) SendBreak(context.Context) error { return hal.ErrNotSupported }

// Close ends the opening and waits for what carries it.
func (c *lineConn) Close() error {
	err := errors.New("closed already")
	c.once.Do(func() {
		close(c.closed)
		err = c.conn.Close()
		c.work.Wait()
	})
	return err
}
