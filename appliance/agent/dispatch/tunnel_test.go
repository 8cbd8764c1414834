package dispatch_test

import (
	"context"
	"errors"
	"io"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/better-compute/site-appliance/appliance/agent/agenttest"
	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// line is a tunnel that remembers how it was closed.
type line struct {
	mu     sync.Mutex
	closed []*errs.Error
}

func (l *line) Read([]byte) (int, error)    { return 0, io.EOF }
func (l *line) Write(b []byte) (int, error) { return len(b), nil }
func (l *line) Close() error                { l.CloseWith(nil); return nil }
func (l *line) CloseWith(why *errs.Error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = append(l.closed, why)
}

// TestTunnel: a command has one, of its own id, and it ends with the command.
func TestTunnel(t *testing.T) { synctest.Test(t, testTunnel) }

func testTunnel(t *testing.T) {
	var asked []string
	l := &line{}
	with := func(c *dispatch.Config) {
		c.Tunnel = func(_ context.Context, id string) (io.ReadWriteCloser, error) {
			asked = append(asked, id)
			if id == "cmd_down" {
				return nil, errs.Retry(errs.Unreachable, "the gateway is away")
			}
			return l, nil
		}
	}
	var late func(context.Context) (io.ReadWriteCloser, error)
	b := start(t, agenttest.NewAuthority(t), "", kind(func(ctx context.Context, c dispatch.Call) ([]byte, error) {
		conn, err := c.Tunnel(ctx)
		if err != nil {
			return nil, err
		}
		if _, err := c.Tunnel(ctx); errs.CodeOf(err) != errs.OperationNotAllowed {
			t.Errorf("a second tunnel: %v, want operation-not-allowed", err)
		}
		if _, err := conn.Write([]byte("x")); err != nil {
			t.Error(err)
		}
		late = c.Tunnel
		if c.Payload.CommandId == "cmd_fails" {
			return nil, errs.New(errs.BmcError, "it broke")
		}
		return []byte("done"), nil
	}), with)
	defer b.stop()
	b.offer("cmd_1", "a")
	b.want("cmd_1", "ok done")
	b.offer("cmd_fails", "a")
	b.want("cmd_fails", "bmc-error")
	b.offer("cmd_down", "a")
	b.want("cmd_down", "unreachable")
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(asked) != 3 || asked[0] != "cmd_1" || len(l.closed) != 2 || l.closed[0] != nil || l.closed[1] == nil || l.closed[1].Code != errs.BmcError {
		t.Errorf("asked for %v, closed with %v; want each command's once, closed plainly and with its error", asked, l.closed)
	}
	if _, err := late(t.Context()); errs.CodeOf(err) != errs.OperationNotAllowed {
		t.Errorf("a tunnel after the end: %v, want operation-not-allowed", err)
	}
}

// TestNoTunnels: an agent that has none says so.
func TestNoTunnels(t *testing.T) { synctest.Test(t, testNoTunnels) }

func testNoTunnels(t *testing.T) {
	b := start(t, agenttest.NewAuthority(t), "", kind(func(ctx context.Context, c dispatch.Call) ([]byte, error) {
		_, err := c.Tunnel(ctx)
		if err == nil {
			err = errors.New("there is one")
		}
		return nil, err
	}))
	defer b.stop()
	b.offer("cmd_1", "a")
	b.want("cmd_1", "unsupported-operation")
}
