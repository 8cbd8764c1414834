package api_test

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	line "github.com/better-compute/site-appliance/appliance/agent/tunnel"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/agentv1/agentv1connect"
	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/api/computev1/computev1connect"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/gateway"
	"github.com/better-compute/site-appliance/appliance/gateway/api"
	"github.com/better-compute/site-appliance/appliance/gateway/gatewaytest"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/plugins/driver/binding"
)

// patience is how long something may take on a busy machine.
const patience = 30 * time.Second

// place is a gateway with its API and one site, whose box the test plays.
type place struct {
	*gatewaytest.Gateway
	t   *testing.T
	box *gatewaytest.Agent
	s   *gatewaytest.Session
}

func newPlace(t *testing.T) *place {
	t.Helper()
	p := &place{Gateway: gatewaytest.Make(t), t: t}
	p.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	hardware, err := metal.New(metal.Options{})
	if err != nil {
		t.Fatal(err)
	}
	p.Timing.Heartbeat = 50 * time.Millisecond // by which a cut line is noticed
	p.Prepare = func(g *gateway.Gateway) {
		api.New(api.Config{
			Store: g.Store, Commands: g.Commands, Secrets: g.Secrets, Metal: hardware, Tunnels: g.Tunnels, CancelCommand: g.Commands.Cancel,
			Online: g.Sessions.Online, Log: p.Log,
		}).Register(g.Handle)
	}
	p.Start()
	ctx, now := t.Context(), p.Store.Now()
	bmc := func(driver, address string) store.BMC {
		return store.BMC{Driver: driver, Address: address, CredentialsRef: "secret://acme/bmc"}
	}
	machine := func(name string, b store.BMC, drivers map[string]binding.Binding) error {
		return p.Store.AddMachine(ctx, store.Machine{ID: "node_" + name, TenantID: "acme", Name: name, PoolID: "pool_1", SiteID: "site_1", BMC: b, Drivers: drivers, State: "enrolled", Created: now})
	}
	for _, err := range []error{
		p.Store.AddSite(ctx, store.Site{ID: "site_1", TenantID: "acme", Name: "fsn1", Created: now}),
		p.Store.AddPool(ctx, store.Pool{ID: "pool_1", TenantID: "acme", Name: "metal", SiteID: "site_1", Created: now}),
		machine("sol", bmc("ipmi", "10.0.0.5:6230"), nil),
		machine("fish", store.BMC{Driver: "wol", Address: "52:54:00:00:00:01"}, nil),
		machine("both", bmc("redfish", "https://10.0.0.7:8443"), map[string]binding.Binding{"console": {Driver: "ipmi-sol"}}),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, value := range map[string]string{"bmc": "{}", "web": "Bearer abc"} {
		if _, err := p.Secrets.Put(ctx, "acme", name, secret.New([]byte(value))); err != nil {
			t.Fatal(err)
		}
	}
	p.token("all", "acme", time.Time{}, api.AllPermissions)
	p.token("console", "acme", time.Time{}, "compute:metal:console")
	p.token("write", "acme", time.Time{}, "compute:metal:write", "compute:metal:read", "compute:sites:write", "compute:sites:read")
	p.token("other", "umbrella", time.Time{}, api.AllPermissions)
	p.box = p.Site("site_1")
	p.s = p.box.Connect()
	return p
}

func (p *place) token(text, tenant string, expires time.Time, permissions ...string) {
	p.t.Helper()
	err := p.Store.PutAPIToken(p.t.Context(), store.APIToken{Hash: sha256.Sum256([]byte(text)), Name: text, TenantID: tenant, Permissions: permissions, Created: p.Store.Now(), Expires: expires})
	if err != nil {
		p.t.Fatal(err)
	}
}

type bearer struct {
	next  http.RoundTripper
	token string
}

func (b bearer) RoundTrip(q *http.Request) (*http.Response, error) {
	q = q.Clone(q.Context())
	q.Header.Set("Authorization", "Bearer "+b.token)
	return b.next.RoundTrip(q)
}

func (p *place) client(token string) *http.Client {
	return &http.Client{Transport: bearer{p.Client(nil).Transport, token}}
}

// console asks for a machine's console.
func (p *place) console(ctx context.Context, token string, open *computev1.ConsoleOpen) *connect.BidiStreamForClient[computev1.ConsoleRequest, computev1.ConsoleResponse] {
	p.t.Helper()
	stream := computev1connect.NewMetalServiceClient(p.client(token), p.URL).Console(ctx)
	p.t.Cleanup(func() { stream.CloseRequest() })
	if err := stream.Send(&computev1.ConsoleRequest{Request: &computev1.ConsoleRequest_Open{Open: open}}); err != nil && !errors.Is(err, io.EOF) {
		p.t.Fatal(err)
	}
	return stream
}

// command is the next one that the box gets.
func (p *place) command() *agentv1.CommandPayload {
	p.t.Helper()
	f := p.s.Next()
	for f.GetCommand() == nil { // acks of results, and cancels of what has ended
		f = p.s.Next()
	}
	c, _, err := envelope.Open(f.GetCommand(), p.box.Bundle)
	if err != nil {
		p.t.Fatal(err)
	}
	p.s.Ack(c.CommandId)
	return c
}

func (p *place) tunnel(commandID string) *line.Conn {
	p.t.Helper()
	c, err := line.Open(p.t.Context(), agentv1connect.NewTunnelServiceClient(p.box.HTTP(), p.URL), commandID, line.DefaultTiming)
	if err != nil {
		p.t.Fatalf("open tunnel: %v", err)
	}
	p.t.Cleanup(func() { c.CloseWith(errs.New(errs.Cancelled, "the test is over")) })
	return c
}

// said is the code and text of an error that a person gets.
func said(err error) (connect.Code, string) {
	var wire *connect.Error
	if errors.As(err, &wire) {
		return wire.Code(), wire.Message()
	}
	return 0, ""
}

// events lists the names of a machine's audit events.
func (p *place) events() string {
	p.t.Helper()
	list, err := p.Store.Events(p.t.Context(), store.EventFilter{})
	if err != nil {
		p.t.Fatal(err)
	}
	var names []string
	for _, e := range list {
		names = append(names, e.Name+" "+e.BodyJSON)
	}
	return strings.Join(names, "\n")
}

func TestConsole(t *testing.T) {
	p := newPlace(t)
	stream := p.console(t.Context(), "console", &computev1.ConsoleOpen{TenantId: "acme", Machine: "sol", Takeover: true, HistoryBytes: 99})
	c := p.command()
	req := &bmcv1.BmcOperationRequest{}
	if err := proto.Unmarshal(c.Args, req); err != nil {
		t.Fatal(err)
	}
	want := &bmcv1.BmcOperationRequest{Driver: "ipmi-sol", Address: "10.0.0.5:6230", CredentialsRef: "secret://acme/bmc", Operation: "console.open", ArgsJson: `[{"takeover":true,"historyBytes":99}]`}
	if c.Kind != "bmc.console" || c.Lane != "proxy" || c.TargetNodeId != "node_sol" || !proto.Equal(req, want) || len(c.SecretRefs) != 1 || c.SecretRefs[0] != "secret://acme/bmc" {
		t.Errorf("command %v with %v, want %v", c, req, want)
	}
	if life := time.Duration(c.NotAfterMs-c.IssuedAtMs) * time.Millisecond; life != 8*time.Hour {
		t.Errorf("it lives for %v, want 8 h", life)
	}
	box := p.tunnel(c.CommandId)
	if m, err := stream.Receive(); err != nil || len(m.Data) != 0 {
		t.Fatalf("first message %v, %v, want an empty one: it is open", m, err)
	}
	if _, err := box.Write([]byte("login: \x00\xff")); err != nil {
		t.Fatal(err)
	}
	if m, err := stream.Receive(); err != nil || string(m.Data) != "login: \x00\xff" {
		t.Errorf("the person sees %q, %v", m.GetData(), err)
	}
	if err := stream.Send(&computev1.ConsoleRequest{Request: &computev1.ConsoleRequest_Data{Data: []byte("root\r")}}); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 5)
	if _, err := io.ReadFull(box, got); err != nil || string(got) != "root\r" {
		t.Errorf("the box reads %q, %v", got, err)
	}

	// The person leaves: the box reads the end, and the command ends well.
	if err := stream.CloseRequest(); err != nil {
		t.Fatal(err)
	}
	if _, err := box.Read(got); !errors.Is(err, io.EOF) {
		t.Errorf("after the person left the box reads %v, want io.EOF", err)
	}
	box.Close()
	p.s.Result(c.CommandId, nil)
	if m, err := stream.Receive(); !errors.Is(err, io.EOF) {
		t.Errorf("the person gets %v, %v, want the end", m, err)
	}
	if e := p.events(); !strings.Contains(e, `console.requested {"by":"console"`) || !strings.Contains(e, `"takeover":"true"`) || !strings.Contains(e, "console.left") {
		t.Errorf("events:\n%s", e)
	}
}

// TestConsoleEnds: each side's end reaches the other, with its reason.
func TestConsoleEnds(t *testing.T) {
	p := newPlace(t)
	open := &computev1.ConsoleOpen{TenantId: "acme", Machine: "sol"}

	// The command fails before its tunnel.
	stream := p.console(t.Context(), "all", open)
	p.s.Fail(p.command().CommandId, &agentv1.Error{Code: "operation-not-allowed", Message: "the console is open since then by command x"})
	if _, err := stream.Receive(); !strings.Contains(err.Error(), "open since then") {
		t.Errorf("a command that fails: %v", err)
	}

	// The console fails while it is open: the command's own reason counts.
	stream = p.console(t.Context(), "all", open)
	c := p.command()
	box := p.tunnel(c.CommandId)
	if _, err := stream.Receive(); err != nil {
		t.Fatal(err)
	}
	go box.CloseWith(errs.New(errs.Cancelled, "the console was taken over by another person"))
	p.s.Fail(c.CommandId, &agentv1.Error{Code: "cancelled", Message: "the console was taken over by another person"})
	if _, err := stream.Receive(); err == nil || !strings.Contains(err.Error(), "taken over") {
		t.Errorf("a console that was taken over: %v", err)
	}

	// The person's line breaks: the box's tunnel ends, and its command is cancelled.
	ctx, cancel := context.WithCancel(t.Context())
	stream = p.console(ctx, "all", open)
	c = p.command()
	box = p.tunnel(c.CommandId)
	if _, err := stream.Receive(); err != nil {
		t.Fatal(err)
	}
	cancel()
	stream.CloseRequest() // the end of the context alone is seen with the next byte
	if _, err := box.Read(make([]byte, 1)); err == nil {
		t.Error("the box reads on")
	}
	for f := p.s.Next(); f.GetCancel().GetCommandId() != c.CommandId; f = p.s.Next() {
	}
	box.Close()
	p.s.Fail(c.CommandId, &agentv1.Error{Code: "cancelled", Message: "as asked"})

	// The person leaves before the box has opened anything.
	ctx, cancel = context.WithCancel(t.Context())
	stream = p.console(ctx, "all", open)
	c = p.command()
	cancel()
	stream.CloseRequest()
	for f := p.s.Next(); f.GetCancel().GetCommandId() != c.CommandId; f = p.s.Next() {
	}
	p.s.Fail(c.CommandId, &agentv1.Error{Code: "cancelled", Message: "as asked"})

	// The token runs out.
	p.token("short", "acme", p.Store.Now().Add(2*time.Second), api.AllPermissions)
	stream = p.console(t.Context(), "short", open)
	c = p.command()
	box = p.tunnel(c.CommandId)
	for err := error(nil); err == nil; {
		if _, err = stream.Receive(); err != nil {
			if code, text := said(err); code != connect.CodeUnauthenticated {
				t.Errorf("a token that ran out: %s %q", code, text)
			}
		}
	}
	box.Close()
	p.s.Fail(c.CommandId, &agentv1.Error{Code: "cancelled", Message: "as asked"})

	// The gateway stops.
	stream = p.console(t.Context(), "all", open)
	c = p.command()
	p.tunnel(c.CommandId)
	if _, err := stream.Receive(); err != nil {
		t.Fatal(err)
	}
	stopped := make(chan struct{})
	go func() { defer close(stopped); p.Stop() }()
	if _, err := stream.Receive(); err == nil {
		t.Error("a gateway that stops: no error")
	} else if code, text := said(err); code != connect.CodeUnavailable {
		t.Errorf("a gateway that stops: %s %q, want unavailable", code, text)
	}
	<-stopped
}

func TestConsoleRefusals(t *testing.T) {
	p := newPlace(t)
	for _, tt := range []struct {
		name, token string
		open        *computev1.ConsoleOpen
		code        connect.Code
		text        string
	}{
		{"no token", "nobody", &computev1.ConsoleOpen{TenantId: "acme", Machine: "sol"}, connect.CodeUnauthenticated, ""},
		{"no permission", "write", &computev1.ConsoleOpen{TenantId: "acme", Machine: "sol"}, connect.CodePermissionDenied, "compute:metal:console"},
		{"another tenant's token", "other", &computev1.ConsoleOpen{TenantId: "acme", Machine: "sol"}, connect.CodePermissionDenied, ""},
		{"another tenant's machine", "other", &computev1.ConsoleOpen{TenantId: "umbrella", Machine: "sol"}, connect.CodeNotFound, ""},
		{"no tenant", "all", &computev1.ConsoleOpen{Machine: "sol"}, connect.CodeInvalidArgument, ""},
		{"no machine", "all", &computev1.ConsoleOpen{TenantId: "acme", Machine: "none"}, connect.CodeNotFound, ""},
		{"no console", "all", &computev1.ConsoleOpen{TenantId: "acme", Machine: "fish"}, connect.CodeFailedPrecondition, "console=ipmi-sol"},
		{"too much history", "all", &computev1.ConsoleOpen{TenantId: "acme", Machine: "sol", HistoryBytes: 256<<10 + 1}, connect.CodeInvalidArgument, "history_bytes"},
	} {
		stream := p.console(t.Context(), tt.token, tt.open)
		_, err := stream.Receive()
		if code, text := said(err); code != tt.code || !strings.Contains(text, tt.text) {
			t.Errorf("%s: %v, want %s %q", tt.name, err, tt.code, tt.text)
		}
	}
	// A binding of its own, which needs no more than its driver's name.
	p.console(t.Context(), "all", &computev1.ConsoleOpen{TenantId: "acme", Machine: "both"})
	req := &bmcv1.BmcOperationRequest{}
	if err := proto.Unmarshal(p.command().Args, req); err != nil || req.Driver != "ipmi-sol" || req.Address != "10.0.0.7" || req.CredentialsRef != "secret://acme/bmc" {
		t.Errorf("the command of a bound console: %v, %v", req, err)
	}
	// A first request that opens nothing.
	stream := computev1connect.NewMetalServiceClient(p.client("all"), p.URL).Console(t.Context())
	if err := stream.Send(&computev1.ConsoleRequest{Request: &computev1.ConsoleRequest_Data{Data: []byte("x")}}); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Receive(); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("data first: %v", err)
	}
	p.s.Cut()
	for start := time.Now(); p.Sessions.Online(p.box.ID) && time.Since(start) < patience; time.Sleep(10 * time.Millisecond) {
	}
	stream = p.console(t.Context(), "all", &computev1.ConsoleOpen{TenantId: "acme", Machine: "sol"})
	if _, err := stream.Receive(); connect.CodeOf(err) != connect.CodeUnavailable {
		t.Errorf("a box that is offline: %v, want unavailable", err)
	}
}

func head(t *testing.T, r *agentv1.HttpProxyResult) []byte {
	t.Helper()
	data, err := proto.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(data))), data...)
}

func TestHttpProxy(t *testing.T) {
	p := newPlace(t)
	body := strings.Repeat("0123456789", 20000)
	sum := sha256.Sum256([]byte(body))
	good := &agentv1.HttpProxyResult{BodyBytes: uint64(len(body)), BodySha256: hex.EncodeToString(sum[:])}
	for _, tt := range []struct {
		name   string
		send   []byte
		result *agentv1.HttpProxyResult
		fail   *agentv1.Error
		code   connect.Code
		text   string
	}{
		{"good", []byte(body), good, nil, 0, ""},
		{"other bytes", append([]byte(body[1:]), 'x'), good, nil, connect.CodeAborted, "digest-mismatch"},
		{"fewer bytes", []byte(body[1:]), good, nil, connect.CodeAborted, "digest-mismatch"},
		{"failed half-way", []byte(body[:10]), nil, &agentv1.Error{Code: "unreachable", Message: "the server hung up"}, connect.CodeAborted, "the server hung up"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			type got struct {
				status uint32
				header string
				body   string
				err    error
			}
			done := make(chan got, 1)
			go func() {
				var g got
				stream, err := computev1connect.NewSiteServiceClient(p.client("all"), p.URL).HttpProxy(context.Background(), connect.NewRequest(&computev1.SiteHttpProxyRequest{
					TenantId: "acme", Site: "fsn1", Method: "GET", Url: "http://10.0.0.9/x?token=q", Redirects: 3, TlsSpkiSha256: strings.Repeat("ab", 32),
					Headers: []*computev1.SiteHttpHeader{{Name: "Authorization", Value: "secret://acme/web"}, {Name: "X-Plain", Value: "y"}},
				}))
				if err != nil {
					done <- got{err: err}
					return
				}
				for stream.Receive() {
					if m := stream.Msg(); m.Status != 0 {
						g.status, g.header = m.Status, m.Headers[0].Value
					} else {
						g.body += string(m.Data)
					}
				}
				g.err = stream.Err()
				done <- g
			}()
			c := p.command()
			req := &agentv1.HttpProxyRequest{}
			if err := proto.Unmarshal(c.Args, req); err != nil || c.Kind != "site.httpProxy" || req.Url != "http://10.0.0.9/x?token=q" || req.Redirects != 3 || len(req.Headers) != 2 || len(c.SecretRefs) != 1 || c.SecretRefs[0] != "secret://acme/web" {
				t.Errorf("command %v with %v, %v", c, req, err)
			}
			box := p.tunnel(c.CommandId)
			if _, err := box.Write(append(head(t, &agentv1.HttpProxyResult{Status: 207, Headers: []*agentv1.HttpHeader{{Name: "X-Answer", Value: "yes"}}}), tt.send...)); err != nil {
				t.Fatal(err)
			}
			if tt.fail != nil {
				go box.CloseWith(&errs.Error{Code: errs.Code(tt.fail.Code), Message: tt.fail.Message})
				p.s.Fail(c.CommandId, tt.fail)
			} else {
				box.Close()
				raw, err := proto.Marshal(tt.result)
				if err != nil {
					t.Fatal(err)
				}
				p.s.Result(c.CommandId, raw)
			}
			g := <-done
			if code, text := said(g.err); code != tt.code || !strings.Contains(text, tt.text) || g.status != 207 || g.header != "yes" || tt.code == 0 && g.body != body {
				t.Errorf("got %d %q, %d bytes, %v; want %s %q", g.status, g.header, len(g.body), g.err, tt.code, tt.text)
			}
		})
	}
	if e := p.events(); !strings.Contains(e, `"url":"http://10.0.0.9/x"`) || strings.Contains(e, "token=q") {
		t.Errorf("events:\n%s", e)
	}

	for _, tt := range []struct {
		name, token, header, value string
		code                       connect.Code
	}{
		{"no permission", "write", "X", "y", connect.CodePermissionDenied},
		{"another tenant", "other", "X", "y", connect.CodePermissionDenied},
		{"a literal secret", "all", "authorization", "Bearer abc", connect.CodeInvalidArgument},
		{"a literal cookie", "all", "Cookie", "a=b", connect.CodeInvalidArgument},
		{"another tenant's secret", "all", "Authorization", "secret://umbrella/web", connect.CodePermissionDenied},
		{"a secret that is not there", "all", "Authorization", "secret://acme/none", connect.CodeInvalidArgument},
	} {
		stream, err := computev1connect.NewSiteServiceClient(p.client(tt.token), p.URL).HttpProxy(t.Context(), connect.NewRequest(&computev1.SiteHttpProxyRequest{
			TenantId: "acme", Site: "fsn1", Method: "GET", Url: "http://10.0.0.9/", Headers: []*computev1.SiteHttpHeader{{Name: tt.header, Value: tt.value}},
		}))
		if err == nil {
			stream.Receive()
			err = stream.Err()
		}
		if code, text := said(err); code != tt.code || strings.Contains(text, "Bearer abc") {
			t.Errorf("%s: %v, want %s", tt.name, err, tt.code)
		}
	}
}

// TestHttpProxyHostileHead: a box cannot make the gateway hold what it likes.
func TestHttpProxyHostileHead(t *testing.T) {
	p := newPlace(t)
	for name, send := range map[string][]byte{"huge": {0xff, 0xff, 0xff, 0xff}, "short": {0, 0}, "no message": {0, 0, 0, 3, 0xff, 0xff, 0xff}} {
		t.Run(name, func(t *testing.T) {
			done := make(chan error, 1)
			go func() {
				stream, err := computev1connect.NewSiteServiceClient(p.client("all"), p.URL).HttpProxy(context.Background(), connect.NewRequest(&computev1.SiteHttpProxyRequest{TenantId: "acme", Site: "fsn1", Method: "GET", Url: "http://10.0.0.9/"}))
				if err == nil {
					stream.Receive()
					err = stream.Err()
				}
				done <- err
			}()
			c := p.command()
			box := p.tunnel(c.CommandId)
			if _, err := box.Write(send); err != nil {
				t.Fatal(err)
			}
			go box.Close()
			p.s.Result(c.CommandId, nil)
			if err := <-done; !strings.Contains(err.Error(), "invalid-payload") {
				t.Errorf("the person gets %v, want invalid-payload", err)
			}
			for f := p.s.Next(); f.GetResultAck() == nil; f = p.s.Next() {
			}
		})
	}
}

// TestForgetBmc: the box is asked, and its answer is the call's; no machine stands
// behind the address.
func TestForgetBmc(t *testing.T) {
	p := newPlace(t)
	forget := func(b *computev1.BmcAddress) <-chan error {
		done := make(chan error, 1)
		go func() {
			_, err := computev1connect.NewSiteServiceClient(p.client("all"), p.URL).ForgetBmc(context.Background(), connect.NewRequest(&computev1.ForgetBmcRequest{TenantId: "acme", Site: "fsn1", Bmc: b}))
			done <- err
		}()
		return done
	}
	for _, fail := range []*agentv1.Error{nil, {Code: "quorum-required", Message: "no grant"}} {
		done := forget(&computev1.BmcAddress{Driver: "redfish", Address: "10.9.9.9"})
		c := p.command()
		var args bmcv1.BmcBindRequest
		if err := proto.Unmarshal(c.Args, &args); err != nil || c.Kind != "bmc.bind" || !proto.Equal(&args, &bmcv1.BmcBindRequest{Driver: "redfish", Address: "10.9.9.9", Forget: true}) {
			t.Fatalf("the box got %s %v, %v", c.Kind, &args, err)
		}
		if fail != nil {
			p.s.Fail(c.CommandId, fail)
		} else {
			p.s.Result(c.CommandId, nil)
		}
		err := <-done
		if _, text := said(err); (err != nil) != (fail != nil) || fail != nil && !strings.Contains(text, "no grant") {
			t.Errorf("ForgetBmc() = %v, want %v", err, fail)
		}
	}
	for _, b := range []*computev1.BmcAddress{nil, {Driver: "redfish", Address: "10.9.9.9/x"}} {
		if code, text := said(<-forget(b)); code != connect.CodeInvalidArgument || !strings.Contains(text, "bmc: ") {
			t.Errorf("ForgetBmc(%v) = %v %q", b, code, text)
		}
	}
}
