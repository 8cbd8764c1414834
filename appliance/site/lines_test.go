package site

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/site/config"
	"github.com/better-compute/site-appliance/appliance/site/console"
	"github.com/better-compute/site-appliance/appliance/site/httpproxy"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/bmc/relay"
	"github.com/better-compute/site-appliance/bmc/wol"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/host"
)

// consoles is a plugin host whose consoles the test plays, and a relay's invoker.
type consoles struct {
	mu    sync.Mutex
	calls []host.Call
	far   chan net.Conn
	err   error
	cut   bool
}

func (c *consoles) Stream(ctx context.Context, call host.Call) (io.ReadWriteCloser, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, call)
	if c.err != nil {
		return nil, c.err
	}
	near, far := net.Pipe()
	c.far <- far
	return &consoleStream{Conn: near, ctx: ctx, in: c}, nil
}

// consoleStream notes whether its context ended before it was closed: a plugin
// whose stream is cut off cannot free the serial port.
type consoleStream struct {
	net.Conn
	ctx   context.Context
	in    *consoles
	first sync.Once
}

func (s *consoleStream) Close() error {
	s.first.Do(func() {
		s.in.mu.Lock()
		s.in.cut = s.in.cut || s.ctx.Err() != nil
		s.in.mu.Unlock()
	})
	return s.Conn.Close()
}

func (c *consoles) Invoke(context.Context, relay.Call) (json.RawMessage, error) {
	return nil, errs.New(errs.Internal, "a console is a stream")
}
func (c *consoles) RetrySafe(string, string, string) (safe, known bool) { return false, false }

// call is a command as dispatch would run it; order notes what happened in it.
func callOf(t *testing.T, k dispatch.Kind, args proto.Message, tunnel io.ReadWriteCloser, order *[]string) dispatch.Call {
	t.Helper()
	raw, err := proto.Marshal(args)
	if err != nil {
		t.Fatal(err)
	}
	op, err := k.Decode(raw)
	if err != nil {
		t.Fatal(err)
	}
	return dispatch.Call{
		Payload: &agentv1.CommandPayload{CommandId: "cmd_1", TargetNodeId: "node_1"}, Operation: op, Deadline: time.Now().Add(time.Hour),
		Secrets: func(_ context.Context, refs ...string) (map[string]secret.Value, error) {
			*order = append(*order, "secret "+strings.Join(refs, ","))
			return map[string]secret.Value{refs[0]: secret.New([]byte(`{"username":"admin","password":"s3cret"}`))}, nil
		},
		Release: func() { *order = append(*order, "release") },
		Tunnel: func(context.Context) (io.ReadWriteCloser, error) {
			*order = append(*order, "tunnel")
			return tunnel, nil
		},
	}
}

func consoleRequest(driver, args string) *bmcv1.BmcOperationRequest {
	return &bmcv1.BmcOperationRequest{Driver: driver, Address: "10.0.0.5:6230", CredentialsRef: "secret://acme/bmc", Operation: "console.open", ArgsJson: args, DriverOptionsJson: `{"cipherSuite":3}`}
}

// TestConsoleKind: the driver is called as for any operation, holds its place only
// while it opens, and is closed gracefully however the command ends.
func TestConsoleKind(t *testing.T) {
	book, err := addressbook.Open("")
	if err != nil {
		t.Fatal(err)
	}
	plugins := &consoles{far: make(chan net.Conn, 4)}
	var events []string
	k := consoleKind(relay.New(relay.Options{Book: book, Plugins: plugins}), plugins, console.New(console.Options{}), func(name, class, key string, body any) error {
		events = append(events, fmt.Sprint(name, " ", class, " ", key, " ", body.(map[string]string)["bmc"]))
		return nil
	})
	var order []string
	near, person := net.Pipe()
	call := callOf(t, k, consoleRequest("ipmi-sol", `[{"takeover":true,"historyBytes":10}]`), near, &order)
	if op := call.Operation; op.Key != "10.0.0.5:6230" || op.RetrySafe || op.Destructive || op.Counts || k.Lane != "proxy" || k.Recover != nil {
		t.Errorf("operation %+v, want its BMC's queue, not retry-safe", op)
	}
	type ended struct {
		result []byte
		err    error
	}
	done := make(chan ended, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		result, err := k.Run(ctx, call)
		done <- ended{result, err}
	}()
	machine := <-plugins.far
	go machine.Write([]byte("login: "))
	got := make([]byte, 7)
	if _, err := io.ReadFull(person, got); err != nil || string(got) != "login: " {
		t.Errorf("the person sees %q, %v", got, err)
	}
	go person.Write([]byte("root\r"))
	if _, err := io.ReadFull(machine, got[:5]); err != nil || string(got[:5]) != "root\r" {
		t.Errorf("the machine is told %q, %v", got[:5], err)
	}
	person.Close()
	end := <-done
	result := &bmcv1.BmcOperationResult{}
	if err := proto.Unmarshal(end.result, result); end.err != nil || err != nil || result.ResultJson != `{"received":7,"sent":5,"reconnects":0}` {
		t.Errorf("Run() = %s, %v, %v", result.ResultJson, end.err, err)
	}
	if got := strings.Join(order, "; "); got != "secret secret://acme/bmc; release; tunnel" {
		t.Errorf("it did %s; want the credential, then its place given up, then the tunnel", got)
	}
	c := plugins.calls[0]
	if c.Driver != "ipmi-sol" || c.Kind != "console" || c.Operation != "open" || string(c.Config) != `{"address":"10.0.0.5:6230","options":{"cipherSuite":3}}` || string(c.Args) != "[]" ||
		string(c.Secrets["password"].Reveal()) != "s3cret" || c.IdempotencyKey != "cmd_1" || c.TargetNodeID != "node_1" || time.Until(c.Deadline) > consoleOpenWithin {
		t.Errorf("the driver was called with %+v", c)
	}
	if _, err := machine.Read(got); err != io.EOF {
		t.Errorf("the driver's stream: %v, want closed", err)
	}
	if got := strings.Join(events, "; "); got != "console.opened audit cmd_1 10.0.0.5:6230; console.closed audit cmd_1 10.0.0.5:6230" {
		t.Errorf("events: %s", got)
	}

	// A command that is cancelled leaves the driver time to free the port.
	near, person = net.Pipe()
	call = callOf(t, k, consoleRequest("ipmi-sol", ""), near, &order)
	go func() {
		result, err := k.Run(ctx, call)
		done <- ended{result, err}
	}()
	machine = <-plugins.far
	cancel()
	if end := <-done; errs.CodeOf(end.err) != errs.Cancelled {
		t.Errorf("a cancelled console: %v, want cancelled", end.err)
	}
	person.Close()
	if _, err := machine.Read(got); err != io.EOF {
		t.Errorf("the driver's stream: %v, want closed by the box", err)
	}
	plugins.mu.Lock()
	defer plugins.mu.Unlock()
	if plugins.cut {
		t.Error("the driver's stream was cut off, not closed")
	}
}

// TestConsoleKindTakesOver: the driver takes over only what was asked for, and only
// where the port is held.
func TestConsoleKindTakesOver(t *testing.T) {
	book, err := addressbook.Open("")
	if err != nil {
		t.Fatal(err)
	}
	plugins := &consoles{far: make(chan net.Conn, 4), err: errs.New(errs.OperationNotAllowed, "held")}
	k := consoleKind(relay.New(relay.Options{Book: book, Plugins: plugins}), plugins, console.New(console.Options{}), func(string, string, string, any) error { return nil })
	var order []string
	for args, want := range map[string]string{"": "[]", `[{"takeover":true}]`: `[] [{"takeover":true}]`} {
		plugins.calls = nil
		_, err := k.Run(t.Context(), callOf(t, k, consoleRequest("ipmi-sol", args), nil, &order))
		var got []string
		for _, c := range plugins.calls {
			got = append(got, string(c.Args))
		}
		if errs.CodeOf(err) != errs.OperationNotAllowed || strings.Join(got, " ") != want {
			t.Errorf("%s: %v after openings with %q, want %q", args, err, got, want)
		}
	}
	if slices.Contains(order, "tunnel") {
		t.Error("a tunnel was opened for a console that is not")
	}
}

func TestConsoleKindRefuses(t *testing.T) {
	book, err := addressbook.Open("")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := book.Bind("10.0.0.5:6230", "", "secret://acme/another", "ipmi"); err != nil {
		t.Fatal(err)
	}
	plugins := &consoles{far: make(chan net.Conn, 4)}
	k := consoleKind(relay.New(relay.Options{Book: book, Plugins: plugins}), plugins, console.New(console.Options{}), func(string, string, string, any) error { return nil })
	for args, want := range map[string]errs.Code{
		`[{"takeOver":true}]`: errs.InvalidArgs, `[{"historyBytes":262145}]`: errs.InvalidArgs, `[{"historyBytes":-1}]`: errs.InvalidArgs, `[{},{}]`: errs.InvalidArgs, `{`: errs.InvalidArgs, `[5]`: errs.InvalidArgs,
	} {
		raw, err := proto.Marshal(consoleRequest("ipmi-sol", args))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := k.Decode(raw); errs.CodeOf(err) != want {
			t.Errorf("Decode(%s) = %v, want %s", args, err, want)
		}
	}
	// A driver of this process has none, and the error says what has.
	wake, err := wol.New(wol.Options{})
	if err != nil {
		t.Fatal(err)
	}
	own := consoleKind(relay.New(relay.Options{Book: book, BuiltIn: []*driver.Definition{wake}, Plugins: plugins}), plugins, console.New(console.Options{}), func(string, string, string, any) error { return nil })
	var nothing []string
	req := &bmcv1.BmcOperationRequest{Driver: wol.ID, Address: "52:54:00:12:34:56", Operation: "console.open"}
	if _, err := own.Run(t.Context(), callOf(t, own, req, nil, &nothing)); errs.CodeOf(err) != errs.UnsupportedOperation || !strings.Contains(err.Error(), "ipmi-sol") || len(nothing) > 0 {
		t.Errorf("a built-in driver: %v after %v, want unsupported-operation that names ipmi-sol", err, nothing)
	}
	// Another credential than the BMC's: nothing is fetched, and nobody called.
	var order []string
	if _, err := k.Run(t.Context(), callOf(t, k, consoleRequest("ipmi-sol", ""), nil, &order)); errs.CodeOf(err) != errs.BindingMismatch || len(order) > 0 || len(plugins.calls) > 0 {
		t.Errorf("another's credential: %v after %v and %d calls, want binding-mismatch before anything", err, order, len(plugins.calls))
	}
}

// TestProxyKind: the kind's arguments are judged before it is taken, and its place
// is given up before the body is carried.
func TestProxyKind(t *testing.T) {
	book, err := addressbook.Open("")
	if err != nil {
		t.Fatal(err)
	}
	cfg := &config.Site{LAN: []config.LAN{{Address: netip.MustParsePrefix("10.77.0.1/24")}, {Address: netip.MustParsePrefix("fd00:1::1/64")}}}
	if got := fmt.Sprint(lanNetworks(cfg)); got != "[10.77.0.0/24 fd00:1::/64]" {
		t.Errorf("lanNetworks() = %s", got)
	}
	k := proxyKind(httpproxy.New(httpproxy.Options{Book: book, Networks: func() []netip.Prefix { return lanNetworks(cfg) }}))
	for url, want := range map[string]errs.Code{"http://10.77.0.9/": "", "ftp://10.77.0.9/": errs.InvalidArgs} {
		raw, err := proto.Marshal(&agentv1.HttpProxyRequest{Method: "GET", Url: url})
		if err != nil {
			t.Fatal(err)
		}
		if op, err := k.Decode(raw); errs.CodeOf(err) != want || op.RetrySafe || op.Destructive || op.Key != "" {
			t.Errorf("Decode(%s) = %+v, %v, want %s, in the kind's own queue", url, op, err, want)
		}
	}
	if _, err := k.Decode([]byte{0xff}); err == nil {
		t.Error("Decode(no message) = nil")
	}
	var order []string
	_, err = k.Run(t.Context(), callOf(t, k, &agentv1.HttpProxyRequest{Method: "GET", Url: "http://127.0.0.1/"}, nil, &order))
	if errs.CodeOf(err) != errs.OperationNotAllowed || len(order) > 0 {
		t.Errorf("the box itself: %v after %v, want operation-not-allowed before anything", err, order)
	}
}
