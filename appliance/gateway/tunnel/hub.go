// Package tunnel is the gateway's end of tunnels: it pairs the one that an agent
// opens for a command with who waits for that command's bytes.
package tunnel

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/agent/tunnel"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/agentv1/agentv1connect"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/caller"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

// openWithin bounds the wait for an agent's first frame.
const openWithin = 30 * time.Second

// Conn is one open tunnel.
type Conn = tunnel.Conn

// Commands finds commands by their ids.
type Commands interface {
	Command(ctx context.Context, id string) (store.Command, error)
}

// Hub is safe for concurrent use.
type Hub struct {
	commands Commands
	timing   tunnel.Timing
	log      *slog.Logger

	mu       sync.Mutex
	draining bool
	tickets  map[string]*Ticket
}

var _ agentv1connect.TunnelServiceHandler = (*Hub)(nil)

// New makes a hub.
func New(commands Commands, timing tunnel.Timing, log *slog.Logger) *Hub {
	return &Hub{commands: commands, timing: timing, log: log, tickets: map[string]*Ticket{}}
}

// Ticket is the right to a command's tunnel. Close must be called.
type Ticket struct {
	hub     *Hub
	command string

	conn  chan *Conn    // capacity 1
	ended chan struct{} // closed when nobody waits any more

	// Under the hub's lock.
	taken bool
	open  *Conn
	why   *errs.Error // of ended
}

// Expect announces that somebody waits for the tunnel of a command; it must come
// before the command is sent. A second one for the same command is refused.
func (h *Hub) Expect(commandID string) (*Ticket, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.draining:
		return nil, errs.Retry(errs.Draining, "the gateway is stopping")
	case h.tickets[commandID] != nil:
		return nil, errs.New(errs.DuplicateMismatch, "somebody waits for the tunnel of %s already", commandID)
	}
	t := &Ticket{hub: h, command: commandID, conn: make(chan *Conn, 1), ended: make(chan struct{})}
	h.tickets[commandID] = t
	return t, nil
}

// Opened fires once, with the tunnel, when the agent has opened it.
func (t *Ticket) Opened() <-chan *Conn { return t.conn }

// Ended is closed with the ticket; a gateway that stops closes it too.
func (t *Ticket) Ended() <-chan struct{} { return t.ended }

// Why says how the ticket ended.
func (t *Ticket) Why() error {
	t.hub.mu.Lock()
	defer t.hub.mu.Unlock()
	return t.why
}

// Close ends the tunnel, if there is one, and lets none be opened any more.
func (t *Ticket) Close() { t.close(errs.New(errs.Cancelled, "nobody waits any more")) }

func (t *Ticket) close(why *errs.Error) {
	t.hub.mu.Lock()
	first := t.hub.tickets[t.command] == t
	conn := t.open
	if first {
		delete(t.hub.tickets, t.command)
		t.why = why
		close(t.ended)
	}
	t.hub.mu.Unlock()
	if first && conn != nil {
		conn.CloseWith(why)
	}
}

// Drain ends every tunnel: the gateway stops. Nothing is opened from then on.
func (h *Hub) Drain() {
	h.mu.Lock()
	h.draining = true
	var open []*Ticket
	for _, t := range h.tickets {
		open = append(open, t)
	}
	h.mu.Unlock()
	var wg sync.WaitGroup
	for _, t := range open {
		wg.Go(func() { t.close(errs.Retry(errs.Draining, "the gateway is stopping")) })
	}
	wg.Wait()
}

// controller carries the stream's deadlines to the handler, which connect hides.
type controller struct{}

// Deadlines wraps the hub's HTTP handler so that a tunnel can be cut from this side.
func Deadlines(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), controller{}, http.NewResponseController(w))))
	})
}

// Tunnel answers TunnelService.Tunnel.
func (h *Hub) Tunnel(ctx context.Context, stream *connect.BidiStream[agentv1.TunnelFrame, agentv1.TunnelFrame]) error {
	agent, err := caller.From(ctx)
	if err != nil {
		return caller.Error(err)
	}
	rc, ok := ctx.Value(controller{}).(*http.ResponseController)
	if !ok {
		return caller.Error(errs.New(errs.Internal, "the stream has no deadlines"))
	}
	if err := rc.SetReadDeadline(time.Now().Add(openWithin)); err != nil {
		return caller.Error(err)
	}
	first, err := stream.Receive()
	if err != nil {
		return caller.Error(errs.New(errs.InvalidPayload, "no open frame came: %v", err))
	}
	if err := rc.SetReadDeadline(time.Time{}); err != nil {
		return caller.Error(err)
	}
	open := first.GetOpen()
	if open == nil {
		return caller.Error(errs.New(errs.InvalidPayload, "the first frame must be open"))
	}
	t, err := h.admit(ctx, agent.ID, open.GetCommandId())
	if err != nil {
		h.log.Info("tunnel refused", "agent", agent.ID, "command", cut(open.GetCommandId()), "err", err)
		return caller.Error(err)
	}
	if err := stream.Send(&agentv1.TunnelFrame{Frame: &agentv1.TunnelFrame_Data{}}); err != nil {
		t.close(errs.Retry(errs.Unreachable, "the tunnel broke as it was opened: %v", err))
		return caller.Error(err)
	}
	past := time.Unix(1, 0)
	conn := tunnel.New(stream, func() { _ = errors.Join(rc.SetReadDeadline(past), rc.SetWriteDeadline(past)) }, h.timing)
	h.log.Debug("tunnel open", "agent", agent.ID, "command", t.command)
	h.mu.Lock()
	t.open = conn
	gone := h.tickets[t.command] != t
	h.mu.Unlock()
	if gone {
		conn.CloseWith(errs.New(errs.Cancelled, "nobody waits any more"))
	} else {
		t.conn <- conn
	}
	// The stream is the handler's: it must not return before its last use. Who
	// holds the ticket closes.
	conn.Wait()
	h.log.Debug("tunnel ended", "agent", agent.ID, "command", t.command)
	return nil
}

// admit takes the ticket of a command for its own agent, while it is in flight, once.
func (h *Hub) admit(ctx context.Context, agentID, commandID string) (*Ticket, error) {
	c, err := h.commands.Command(ctx, commandID)
	switch {
	case errors.Is(err, store.ErrNotFound), err == nil && c.AgentID != agentID:
		return nil, errs.New(errs.WrongAgent, "this agent has no such command")
	case err != nil:
		return nil, err
	case c.State != store.CommandSent && c.State != store.CommandReceived:
		return nil, errs.New(errs.OperationNotAllowed, "the command is not in flight")
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	t := h.tickets[commandID]
	switch {
	case h.draining:
		return nil, errs.Retry(errs.Draining, "the gateway is stopping")
	case t == nil:
		return nil, errs.New(errs.Cancelled, "nobody waits for the command's tunnel")
	case t.taken:
		return nil, errs.New(errs.OperationNotAllowed, "the command's tunnel was opened before")
	}
	t.taken = true
	return t, nil
}

// cut keeps what an agent said short in the log.
func cut(s string) string { return s[:min(len(s), 128)] }
