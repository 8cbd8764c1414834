package dispatch

import (
	"context"
	"io"
	"sync"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// line is a command's tunnel: there is at most one, and it ends with the command.
type line struct {
	mu     sync.Mutex
	asked  bool
	closed bool
	conn   io.ReadWriteCloser
}

func (l *line) open(ctx context.Context, dial func(context.Context, string) (io.ReadWriteCloser, error), commandID string) (io.ReadWriteCloser, error) {
	l.mu.Lock()
	asked := l.asked || l.closed
	l.asked = true
	l.mu.Unlock()
	switch {
	case dial == nil:
		return nil, errs.New(errs.UnsupportedOperation, "this agent opens no tunnels")
	case asked:
		return nil, errs.New(errs.OperationNotAllowed, "a command has one tunnel, while it runs")
	}
	conn, err := dial(ctx, commandID)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	late := l.closed
	l.conn = conn
	l.mu.Unlock()
	if late {
		_ = conn.Close()
		return nil, errs.New(errs.Cancelled, "the command ended before its tunnel was open")
	}
	return conn, nil
}

// end closes the tunnel, and tells the other side why the command failed.
func (l *line) end(err error) {
	l.mu.Lock()
	l.closed = true
	conn := l.conn
	l.mu.Unlock()
	switch c := conn.(type) {
	case nil:
	case interface{ CloseWith(*errs.Error) }:
		c.CloseWith(errs.From(err))
	default:
		_ = c.Close()
	}
}
