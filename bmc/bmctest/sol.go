package bmctest

import (
	"context"
	"sync"

	"github.com/bougou/go-ipmi/pkg/hal"
)

// Console is the machine's serial port, which the IPMI BMC carries as serial over LAN.
type Console struct {
	mu      sync.Mutex
	said    []byte // and not fetched yet
	heard   []byte
	echo    bool
	opened  int
	changed chan struct{}
}

func newConsole() *Console { return &Console{changed: make(chan struct{})} }

// Console is the machine's serial port.
func (i *IPMI) Console() *Console { return i.console }

// DropConsole ends the session that has the serial port, as a BMC does that was
// reset or that somebody else deactivated it at.
func (i *IPMI) DropConsole() { i.bmc.SOL.CloseAll() }

// Say has the machine print.
func (c *Console) Say(data []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.said = append(c.said, data...)
}

// Echo has the machine print what it is told.
func (c *Console) Echo(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.echo = on
}

// Heard is all that was typed.
func (c *Console) Heard() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]byte(nil), c.heard...)
}

// Opened counts how often the port was taken.
func (c *Console) Opened() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.opened
}

// Changed is closed when something is typed or the port is taken after the call.
func (c *Console) Changed() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.changed
}

// change wakes who waits; the caller holds mu.
func (c *Console) change() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// Open is a BMC's way to the port.
func (c *Console) Open(context.Context) (hal.ConsoleConn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.opened++
	c.change()
	return &consoleConn{c}, nil
}

// consoleConn is one taking of the port.
type consoleConn struct{ *Console }

func (c *consoleConn) ReadAvailable(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := copy(p, c.said)
	c.said = c.said[n:]
	return n, nil
}

func (c *consoleConn) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.heard = append(c.heard, p...)
	if c.echo {
		c.said = append(c.said, p...)
	}
	c.change()
	return len(p), nil
}

func (c *consoleConn) SendBreak(context.Context) error { return hal.ErrNotSupported }

func (c *consoleConn) Close() error { return nil }
