package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/better-compute/site-appliance/appliance/agent"
	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/gateway"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/gatewaytest"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
)

const (
	// callers make calls at the same time.
	callers = 16
	// period is how long a round of calls lasts.
	period   = 2 * time.Second
	barePath = "/bench.Bare/Echo"
)

var sessionSuite = suite{names: []string{"session.command"}, run: measureSession}

// measureSession counts commands that a gateway signs and stores, and an agent
// checks, writes to its journal, runs and answers, beside calls that do nothing
// but cross the same TLS. Both are in this process.
func measureSession(ctx context.Context, s settings) (rows []row, err error) {
	err = withTB(func(tb testing.TB) error {
		g := gatewaytest.Make(tb)
		g.Prepare = func(gw *gateway.Gateway) { gw.Handle(barePath, bareHandler()) }
		g.Start()
		join, err := g.Enrol.NewToken(ctx, agentv1.Role_ROLE_SITE, "site_1", "", time.Hour)
		if err != nil {
			return err
		}
		parsed, err := trust.ParseJoin(join)
		if err != nil {
			return err
		}
		a, err := agent.New(agent.Config{
			Role: agentv1.Role_ROLE_SITE, StateDir: tb.TempDir(), Join: &parsed, Version: "bench", Kinds: []dispatch.Kind{answer()},
			Log: slog.New(slog.DiscardHandler),
		})
		if err != nil {
			return err
		}
		running, stop := context.WithCancel(ctx)
		ended := make(chan error, 1)
		go func() { ended <- a.Run(running) }()
		defer func() {
			stop()
			<-ended // that it was stopped
		}()
		if err := online(ctx, a); err != nil {
			return err
		}
		var serial atomic.Int64
		command := func(ctx context.Context) error {
			id, err := g.Commands.Submit(ctx, commands.Spec{AgentID: a.AgentID(), Kind: "bmc.query", TargetNodeID: "node_1",
				Args: &bmcv1.BmcOperationRequest{Address: fmt.Sprint(serial.Add(1))}})
			if err != nil {
				return err
			}
			out, err := g.Commands.Wait(ctx, id)
			if err == nil && out.Err != nil {
				err = out.Err
			}
			return err
		}
		bare := bareClient(a.HTTPClient(), a.BaseURL())
		var ours, theirs []float64
		for i := range s.rounds {
			fmt.Fprintf(s.log, "bench: session.command, round %d of %d\n", i+1, s.rounds)
			for _, side := range []struct {
				call  func(context.Context) error
				rates *[]float64
			}{{command, &ours}, {bare, &theirs}} {
				rate, _, err := calls(ctx, callers, side.call)
				if err != nil {
					return err
				}
				*side.rates = append(*side.rates, rate)
			}
		}
		rows = []row{{name: "session.command", ours: median(ours), unit: "1/s", theirs: median(theirs),
			peer: fmt.Sprintf("bare connect unary echo over the same TLS, both with %d callers", callers)}}
		return nil
	})
	return rows, err
}

// withTB lends f what is made for tests.
func withTB(f func(tb testing.TB) error) error {
	err := errors.New("setting up failed")
	var once sync.Once
	testing.Benchmark(func(b *testing.B) { once.Do(func() { err = f(b) }) })
	return err
}

// answer is a query that does nothing; each has a queue of its own.
func answer() dispatch.Kind {
	return dispatch.Kind{
		Name: "bmc.query", Lane: "query", Roles: []agentv1.Role{agentv1.Role_ROLE_SITE},
		Decode: func(args []byte) (dispatch.Operation, error) {
			return dispatch.Operation{Name: "bench.answer", Key: string(args), RetrySafe: true}, nil
		},
		Run: func(_ context.Context, c dispatch.Call) ([]byte, error) { return c.Payload.GetArgs(), nil },
	}
}

func online(ctx context.Context, a *agent.Agent) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !a.Online() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return errors.New("the agent did not come online")
		}
	}
	return nil
}

func bareHandler() http.Handler {
	return connect.NewUnaryHandler(barePath, func(_ context.Context, req *connect.Request[wrapperspb.StringValue]) (*connect.Response[wrapperspb.StringValue], error) {
		return connect.NewResponse(req.Msg), nil
	})
}

func bareClient(client *http.Client, url string) func(context.Context) error {
	c := connect.NewClient[wrapperspb.StringValue, wrapperspb.StringValue](client, url+barePath)
	return func(ctx context.Context) error {
		_, err := c.CallUnary(ctx, connect.NewRequest(wrapperspb.String("hello")))
		return err
	}
}

// calls makes calls for a period, n at a time, and gives how many there were a
// second, and the median of how many seconds one took.
func calls(ctx context.Context, n int, call func(context.Context) error) (rate, p50 float64, err error) {
	if err := call(ctx); err != nil { // opens the connection
		return 0, 0, err
	}
	took, failed := make([][]float64, n), make([]error, n)
	start := time.Now()
	var owned sync.WaitGroup
	for i := range n {
		owned.Go(func() {
			for time.Since(start) < period && failed[i] == nil {
				begin := time.Now()
				failed[i] = call(ctx)
				took[i] = append(took[i], time.Since(begin).Seconds())
			}
		})
	}
	owned.Wait()
	all := slices.Concat(took...)
	return float64(len(all)) / time.Since(start).Seconds(), median(all), errors.Join(failed...)
}
