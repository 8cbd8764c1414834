package tunnel_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	line "github.com/better-compute/site-appliance/appliance/agent/tunnel"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/agentv1/agentv1connect"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/gatewaytest"
	"github.com/better-compute/site-appliance/appliance/gateway/tunnel"
)

// patience is how long something may take on a busy machine.
const patience = 30 * time.Second

// site is a gateway with one box, whose commands a test hands out.
type site struct {
	t     *testing.T
	g     *gatewaytest.Gateway
	agent *gatewaytest.Agent
	s     *gatewaytest.Session
	n     int
}

func newSite(t *testing.T) *site {
	t.Helper()
	g := gatewaytest.New(t)
	agent := g.Site("site_a")
	return &site{t: t, g: g, agent: agent, s: agent.Connect()}
}

// send makes a command that is in flight, with somebody who waits for its tunnel.
func (x *site) send() (string, *tunnel.Ticket) {
	x.t.Helper()
	x.n++
	id := fmt.Sprintf("cmd_tunnel_%d", x.n)
	ticket, err := x.g.Tunnels.Expect(id)
	if err != nil {
		x.t.Fatal(err)
	}
	x.t.Cleanup(ticket.Close)
	x.submit(id)
	return id, ticket
}

func (x *site) submit(id string) {
	x.t.Helper()
	if _, err := x.g.Commands.Submit(x.t.Context(), commands.Spec{ID: id, AgentID: x.agent.ID, Kind: "bmc.console", Raw: []byte{}}); err != nil {
		x.t.Fatal(err)
	}
	x.s.Command(x.agent)
	x.s.Ack(id)
}

func (x *site) client(a *gatewaytest.Agent) agentv1connect.TunnelServiceClient {
	return agentv1connect.NewTunnelServiceClient(a.HTTP(), x.g.URL)
}

// open opens a command's tunnel from the box, and answers both ends.
func (x *site) open(ctx context.Context, id string, ticket *tunnel.Ticket) (box, person *line.Conn) {
	x.t.Helper()
	box, err := line.Open(ctx, x.client(x.agent), id, line.DefaultTiming)
	if err != nil {
		x.t.Fatalf("Open: %v", err)
	}
	x.t.Cleanup(func() { box.CloseWith(errs.New(errs.Cancelled, "the test is over")) })
	select {
	case person = <-ticket.Opened():
	case <-time.After(patience):
		x.t.Fatal("nobody got the tunnel")
	}
	return box, person
}

func TestBytesGoBothWaysAndEnd(t *testing.T) {
	x := newSite(t)
	id, ticket := x.send()
	box, person := x.open(t.Context(), id, ticket)
	up, down := random(3<<20, 1), random(1<<20, 2)
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := box.Write(up); err != nil {
			t.Errorf("box writes: %v", err)
		}
	})
	wg.Go(func() {
		if _, err := person.Write(down); err != nil {
			t.Errorf("person writes: %v", err)
		}
	})
	got := make([]byte, len(up))
	if _, err := io.ReadFull(person, got); err != nil || !bytes.Equal(got, up) {
		t.Errorf("person read other bytes than the box wrote: %v", err)
	}
	got = make([]byte, len(down))
	if _, err := io.ReadFull(box, got); err != nil || !bytes.Equal(got, down) {
		t.Errorf("box read other bytes than the person wrote: %v", err)
	}
	wg.Wait()

	// The last bytes come before the end.
	if _, err := box.Write([]byte("bye")); err != nil {
		t.Fatal(err)
	}
	go box.Close()
	if rest, err := io.ReadAll(person); err != nil || string(rest) != "bye" {
		t.Errorf("the end: %q, %v; want bye and no error", rest, err)
	}
	if _, err := person.Write([]byte("x")); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("write after the end: %v, want io.ErrClosedPipe", err)
	}
	person.Close()
}

func random(n int, seed uint64) []byte {
	r := rand.NewChaCha8([32]byte{byte(seed)})
	out := make([]byte, n)
	_, _ = r.Read(out)
	return out
}

// TestErrorsTravel: whoever closes with an error, the other side reads it.
func TestErrorsTravel(t *testing.T) {
	x := newSite(t)
	id, ticket := x.send()
	box, person := x.open(t.Context(), id, ticket)
	go box.CloseWith(errs.Retry(errs.BmcError, "the BMC is gone"))
	if _, err := person.Read(make([]byte, 1)); errs.CodeOf(err) != errs.BmcError || !errs.From(err).Retryable {
		t.Errorf("person reads %v, want the box's error", err)
	}
	person.Close()

	id, ticket = x.send()
	box, person = x.open(t.Context(), id, ticket)
	go person.CloseWith(errs.New(errs.Cancelled, "enough"))
	if _, err := box.Read(make([]byte, 1)); errs.CodeOf(err) != errs.Cancelled {
		t.Errorf("box reads %v, want the person's error", err)
	}
	box.Close()
}

// TestOnlyTheCommandsOwnAgentWhileItIsInFlightOnce is the hub's admission.
func TestOnlyTheCommandsOwnAgentWhileItIsInFlightOnce(t *testing.T) {
	x := newSite(t)
	other := x.g.Site("site_b")
	id, ticket := x.send()
	refused := func(what string, client agentv1connect.TunnelServiceClient, id string, want errs.Code) {
		t.Helper()
		c, err := line.Open(t.Context(), client, id, line.DefaultTiming)
		if err == nil {
			c.Close()
		}
		if errs.CodeOf(err) != want {
			t.Errorf("%s: %v, want %s", what, err, want)
		}
	}
	refused("another box", x.client(other), id, errs.WrongAgent)
	refused("no such command", x.client(x.agent), "cmd_nobody", errs.WrongAgent)
	refused("no certificate", agentv1connect.NewTunnelServiceClient(x.g.Client(nil), x.g.URL), id, errs.NotEnrolled)

	// Submitted, but the lane is full: nobody handed it out.
	queued := "cmd_queued"
	late, err := x.g.Tunnels.Expect(queued)
	if err != nil {
		t.Fatal(err)
	}
	defer late.Close()
	x.s.Send(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Credit{Credit: &agentv1.Credit{Lanes: map[string]uint32{"proxy": 1}}}})
	if _, err := x.g.Commands.Submit(t.Context(), commands.Spec{ID: queued, AgentID: x.agent.ID, Kind: "bmc.console", Raw: []byte{}}); err != nil {
		t.Fatal(err)
	}
	refused("a command that was not handed out", x.client(x.agent), queued, errs.OperationNotAllowed)

	x.open(t.Context(), id, ticket)
	refused("a second time", x.client(x.agent), id, errs.OperationNotAllowed)
	ticket.Close()
	refused("when nobody waits any more", x.client(x.agent), id, errs.Cancelled)

	x.s.Result(id, nil)
	for f := x.s.Next(); f.GetResultAck() == nil; f = x.s.Next() {
	}
	again, err := x.g.Tunnels.Expect(id)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	refused("after its outcome", x.client(x.agent), id, errs.OperationNotAllowed)
	if _, err := x.g.Tunnels.Expect(id); errs.CodeOf(err) != errs.DuplicateMismatch {
		t.Errorf("a second ticket: %v, want duplicate-mismatch", err)
	}
}

// TestRevokedAgentOpensNone: the certificate still holds, the identity does not.
func TestRevokedAgentOpensNone(t *testing.T) {
	x := newSite(t)
	id, _ := x.send()
	client := x.client(x.agent)
	if err := x.g.Revoke(t.Context(), x.agent.ID); err != nil {
		t.Fatal(err)
	}
	if c, err := line.Open(t.Context(), client, id, line.DefaultTiming); errs.CodeOf(err) != errs.Revoked {
		t.Errorf("Open() = %v, %v, want revoked", c, err)
	}
}

// TestSlowReaderHoldsTheWriter: what waits is bounded, nothing is lost, and the
// pause is not taken for a dead line.
func TestSlowReaderHoldsTheWriter(t *testing.T) {
	x := newSite(t)
	id, ticket := x.send()
	box, person := x.open(t.Context(), id, ticket)
	const total = 64 << 20
	var written atomic.Int64
	done := make(chan error, 1)
	go func() {
		part := make([]byte, 64<<10)
		for sent := 0; sent < total; sent += len(part) {
			for i := range part {
				part[i] = byte(sent >> 16)
			}
			if _, err := box.Write(part); err != nil {
				done <- err
				return
			}
			written.Add(int64(len(part)))
		}
		done <- box.Close()
	}()
	// It stands still once what may wait is full.
	held := int64(-1)
	for now := written.Load(); now != held; now = written.Load() {
		held = now
		time.Sleep(500 * time.Millisecond)
	}
	if held == 0 || held > 16<<20 {
		t.Errorf("%d bytes were written though nobody reads, want some, and at most 16 MiB", held)
	}
	n := 0
	buf := make([]byte, 64<<10)
	for {
		if _, err := io.ReadFull(person, buf); err != nil {
			if !errors.Is(err, io.EOF) {
				t.Fatal(err)
			}
			break
		}
		if buf[0] != byte(n>>16) || buf[len(buf)-1] != byte(n>>16) {
			t.Fatalf("other bytes at %d", n)
		}
		n += len(buf)
	}
	person.Close()
	if err := <-done; err != nil || n != total {
		t.Errorf("read %d of %d bytes, the writer ended with %v", n, total, err)
	}
}

// TestWriterIsFreedByTheEnd: a Write that waits for a reader ends with the context,
// with the ticket and with the gateway.
func TestWriterIsFreedByTheEnd(t *testing.T) {
	for name, end := range map[string]func(x *site, cancel context.CancelFunc, ticket *tunnel.Ticket){
		"context": func(_ *site, cancel context.CancelFunc, _ *tunnel.Ticket) { cancel() },
		"ticket":  func(_ *site, _ context.CancelFunc, ticket *tunnel.Ticket) { ticket.Close() },
		"gateway": func(x *site, _ context.CancelFunc, _ *tunnel.Ticket) { x.g.Stop() },
	} {
		t.Run(name, func(t *testing.T) {
			x := newSite(t)
			id, ticket := x.send()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			box, _ := x.open(ctx, id, ticket)
			done := make(chan error, 1)
			go func() {
				part := make([]byte, 1<<20)
				for {
					if _, err := box.Write(part); err != nil {
						done <- err
						return
					}
				}
			}()
			end(x, cancel, ticket)
			select {
			case <-done:
			case <-time.After(patience):
				t.Fatal("the writer waits on")
			}
			if name == "gateway" && errs.CodeOf(ticket.Why()) != errs.Draining {
				t.Errorf("the ticket ended with %v, want draining", ticket.Why())
			}
		})
	}
}

// TestContextEndTellsTheOtherSide: a cancelled command's tunnel says so.
func TestContextEndTellsTheOtherSide(t *testing.T) {
	x := newSite(t)
	id, ticket := x.send()
	ctx, cancel := context.WithCancelCause(t.Context())
	_, person := x.open(ctx, id, ticket)
	cancel(errs.New(errs.Cancelled, "cancelled by the gateway"))
	if _, err := person.Read(make([]byte, 1)); errs.CodeOf(err) != errs.Cancelled {
		t.Errorf("person reads %v, want cancelled", err)
	}
	person.Close()
}

// TestHostileFrames: a peer that breaks the rules ends its own tunnel and no more.
func TestHostileFrames(t *testing.T) {
	x := newSite(t)
	data := func(n int) *agentv1.TunnelFrame {
		return &agentv1.TunnelFrame{Frame: &agentv1.TunnelFrame_Data{Data: make([]byte, n)}}
	}
	opening := func(id string) *agentv1.TunnelFrame {
		return &agentv1.TunnelFrame{Frame: &agentv1.TunnelFrame_Open{Open: &agentv1.TunnelOpen{CommandId: id}}}
	}
	for name, tt := range map[string]struct {
		second *agentv1.TunnelFrame
		want   errs.Code
	}{
		"a second open":       {opening("cmd_x"), errs.InvalidPayload},
		"an empty frame":      {&agentv1.TunnelFrame{}, errs.InvalidPayload},
		"a huge frame":        {data(512 << 10), errs.InvalidPayload},
		"over the RPC's size": {data(4 << 20), errs.Unreachable},
	} {
		t.Run(name, func(t *testing.T) {
			id, ticket := x.send()
			stream := x.client(x.agent).Tunnel(t.Context())
			defer stream.CloseRequest()
			if err := stream.Send(opening(id)); err != nil {
				t.Fatal(err)
			}
			if f, err := stream.Receive(); err != nil || len(f.GetData()) != 0 {
				t.Fatalf("answer to open = %v, %v", f, err)
			}
			person := <-ticket.Opened()
			_ = stream.Send(tt.second)
			if _, err := person.Read(make([]byte, 1)); errs.CodeOf(err) != tt.want {
				t.Errorf("person reads %v, want %s", err, tt.want)
			}
			person.Close()
		})
	}
	t.Run("data first", func(t *testing.T) {
		stream := x.client(x.agent).Tunnel(t.Context())
		if err := stream.Send(data(3)); err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Receive(); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("answer: %v, want invalid-payload", err)
		}
	})
	// The hub still serves.
	id, ticket := x.send()
	box, person := x.open(t.Context(), id, ticket)
	go box.Write([]byte("ok"))
	if _, err := io.ReadFull(person, make([]byte, 2)); err != nil {
		t.Error(err)
	}
}

// TestRaces: opening, waiting and leaving at the same time never pair two, hang, or
// leave anything behind.
func TestRaces(t *testing.T) {
	x := newSite(t)
	client := x.client(x.agent)
	for range 30 {
		id, ticket := x.send()
		var wg sync.WaitGroup
		var opened atomic.Int32
		for range 3 {
			wg.Go(func() {
				c, err := line.Open(t.Context(), client, id, line.DefaultTiming)
				if err != nil {
					return
				}
				opened.Add(1)
				c.Write([]byte("x"))
				c.Close()
			})
		}
		leave := rand.IntN(2) == 0
		wg.Go(func() {
			if leave {
				ticket.Close()
				return
			}
			select {
			case c := <-ticket.Opened():
				io.Copy(io.Discard, c)
				c.Close()
			case <-ticket.Ended():
			}
		})
		wg.Wait()
		ticket.Close()
		if n := opened.Load(); n > 1 || n == 0 && !leave {
			t.Fatalf("the tunnel was opened %d times, ticket closed %v", n, leave)
		}
		x.s.Result(id, nil)
		for f := x.s.Next(); f.GetResultAck() == nil; f = x.s.Next() {
		}
	}
}
