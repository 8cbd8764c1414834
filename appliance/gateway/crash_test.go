package gateway_test

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/gateway"
	"github.com/better-compute/site-appliance/appliance/gateway/gatewaytest"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

// childEnv tells this test's binary to be a gateway that is about to be killed:
// folder, address and agent, separated by spaces.
const childEnv = "BC_GATEWAY_CHILD"

func TestMain(m *testing.M) {
	if args := strings.Fields(os.Getenv(childEnv)); len(args) == 3 {
		if err := child(args[0], args[1], args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// child serves, submits two commands as soon as the agent is there, and says so.
func child(dir, address, agentID string) error {
	hardware, err := metal.Module(metal.Options{})
	if err != nil {
		return err
	}
	g, err := gateway.New(dir, gateway.Options{Modules: []gateway.Module{hardware}, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	online := make(chan struct{}, 1)
	g.Sessions.OnState(func(_ string, up bool) {
		if up {
			online <- struct{}{}
		}
	})
	ctx := context.Background()
	l, err := gateway.Listen(ctx, address)
	if err != nil {
		return err
	}
	go func() {
		<-online
		for n := range 2 {
			spec := powerOn(agentID)
			spec.ID = fmt.Sprintf("wf_1.power.%d", n)
			if _, err := g.Commands.Submit(ctx, spec); err != nil {
				fmt.Println("submit:", err)
				return
			}
		}
		fmt.Println("submitted")
	}()
	fmt.Println("ready")
	return g.ServeListener(ctx, l)
}

// TestKilledGateway kills a gateway that handed out one command, kept another
// back, and acknowledged an event; its successor must know of all three.
func TestKilledGateway(t *testing.T) {
	g := gatewaytest.New(t)
	box := g.Site("site_1")
	g.Stop()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+strings.Join([]string{g.Dir, strings.TrimPrefix(g.URL, "https://"), box.ID}, " "))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	expect := func(want string) {
		t.Helper()
		if !lines.Scan() || lines.Text() != want {
			t.Fatalf("child said %q, want %q", lines.Text(), want)
		}
	}
	expect("ready")
	s := box.Connect(func(h *agentv1.Hello) { h.Lanes = map[string]uint32{"power": 1} })
	first := s.Command(box)
	expect("submitted")
	s.Event(&agentv1.Event{Seq: 7, Name: "audit", Class: "audit", BodyJson: []byte(`{}`)})
	if f := s.Next(); f.GetEventAck().GetSeq() != 7 {
		t.Fatalf("frame = %v, want the event's ack", f)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed, as it should be
	if c, err := s.End(); c != nil || err == nil {
		t.Errorf("stream of a killed gateway ended with %v, %v", c, err)
	}

	g.Start()
	s = box.Connect(func(h *agentv1.Hello) { h.Lanes = map[string]uint32{"power": 1} })
	if s.Welcome.AckedEventSeq != 7 {
		t.Errorf("acked event = %d, want 7", s.Welcome.AckedEventSeq)
	}
	if again := s.Command(box); !proto.Equal(again, first) {
		t.Errorf("sent again as %v, want the same bytes", again)
	}
	s.Result("wf_1.power.0", []byte("on"))
	if out := wait(t, g, "wf_1.power.0"); out.Err != nil || string(out.Result) != "on" {
		t.Errorf("outcome = %+v", out)
	}
	if f := s.Next(); f.GetResultAck() == nil {
		t.Fatalf("frame = %v, want the result's ack", f)
	}
	if id := commandID(t, s.Command(box)); id != "wf_1.power.1" {
		t.Errorf("next command = %s, want wf_1.power.1", id)
	}
	events, err := g.Store.Events(t.Context(), store.EventFilter{AgentID: box.ID, Name: "audit"})
	if err != nil || len(events) != 1 {
		t.Errorf("events = %+v, %v, want the audit one", events, err)
	}
}
