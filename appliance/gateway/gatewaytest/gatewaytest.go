// Package gatewaytest runs a real gateway inside a test, over real TLS, and
// plays agents against it frame by frame.
package gatewaytest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/agentv1/agentv1connect"
	"github.com/better-compute/site-appliance/appliance/gateway"
	"github.com/better-compute/site-appliance/appliance/gateway/keys"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/provision"
	"github.com/better-compute/site-appliance/appliance/gateway/sessions"
)

// Clock is a clock that tests move.
type Clock struct {
	mu     sync.Mutex
	offset time.Duration
}

// Now is the real time and what was added.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Add(c.offset)
}

// Add moves the clock.
func (c *Clock) Add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.offset += d
}

// Gateway is a gateway that serves on loopback and can be stopped and started again.
type Gateway struct {
	*gateway.Gateway
	Dir, URL string
	Clock    *Clock
	Log      *slog.Logger
	Timing   sessions.Timing
	// Modules are the gateway's; New and Make set metal and provision.
	Modules []gateway.Module
	// Prepare, where set, runs between New and Serve: the place to add hooks and handlers.
	Prepare func(*gateway.Gateway)

	t       testing.TB
	address string
	// listener holds the port until the first start takes it over.
	listener net.Listener
	stop     context.CancelFunc
	served   chan error
}

// New makes keys and starts a gateway; the test's end stops it.
func New(t testing.TB) *Gateway {
	g := Make(t)
	g.Start()
	return g
}

// Make makes keys and leaves starting to the caller.
func Make(t testing.TB) *Gateway {
	t.Helper()
	l, err := gateway.Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	hardware, err := metal.Module(metal.Options{})
	if err != nil {
		t.Fatal(err)
	}
	g := &Gateway{Modules: []gateway.Module{hardware, provision.Module()}, Dir: t.TempDir(), URL: "https://" + address, Clock: &Clock{}, Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Timing: sessions.DefaultTiming, t: t, address: address, listener: l}
	if _, err := keys.Init(g.Dir, []string{g.URL}, time.Now()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Stop)
	return g
}

// Start opens the folder and serves.
func (g *Gateway) Start() {
	g.t.Helper()
	var err error
	g.Gateway, err = gateway.New(g.Dir, gateway.Options{Log: g.Log, Now: g.Clock.Now, Timing: g.Timing, Modules: g.Modules})
	if err != nil {
		g.t.Fatal(err)
	}
	if g.Prepare != nil {
		g.Prepare(g.Gateway)
	}
	ctx, stop := context.WithCancel(context.Background())
	l := g.listener
	if g.listener = nil; l == nil {
		if l, err = gateway.Listen(ctx, g.address); err != nil {
			stop()
			g.t.Fatal(err)
		}
	}
	g.stop, g.served = stop, make(chan error, 1)
	go func(gw *gateway.Gateway, served chan<- error) { served <- gw.ServeListener(ctx, l) }(g.Gateway, g.served)
}

// Stop ends the gateway and waits for it; stopping twice is fine.
func (g *Gateway) Stop() {
	if g.listener != nil { // never started
		if err := g.listener.Close(); err != nil {
			g.t.Errorf("close: %v", err)
		}
		g.listener = nil
	}
	if g.stop == nil {
		return
	}
	g.stop()
	g.stop = nil
	if err := <-g.served; err != nil {
		g.t.Errorf("serve: %v", err)
	}
	if err := g.Close(); err != nil {
		g.t.Errorf("close: %v", err)
	}
}

// Agent is one identity that a test plays.
type Agent struct {
	ID     string
	Role   agentv1.Role
	Key    *ecdsa.PrivateKey
	Leaf   *x509.Certificate
	Bundle *trust.Bundle
	Answer *agentv1.EnrollResponse
	// BootID, JournalEpoch and EventEpoch go into Hello.
	BootID, JournalEpoch, EventEpoch string

	g *Gateway
	t testing.TB
}

// Client is an HTTP/2 client that shows a certificate, or none.
func (g *Gateway) Client(cert *tls.Certificate) *http.Client {
	spki := g.Keys.Authority.SPKI()
	config := trust.PinnedTLS(spki, "127.0.0.1", func(notBefore time.Time) time.Time { return g.Clock.Now() })
	if cert != nil {
		config.Certificates = []tls.Certificate{*cert}
	}
	transport := &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true}
	g.t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// NewKey makes an agent's key.
func NewKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// CSR is a certificate request by key.
func CSR(t testing.TB, key *ecdsa.PrivateKey) []byte {
	t.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

// Enroll sends one request as it is.
func (g *Gateway) Enroll(ctx context.Context, m *agentv1.EnrollRequest) (*agentv1.EnrollResponse, error) {
	m.ProtocolMin, m.ProtocolMax = max(m.ProtocolMin, 1), max(m.ProtocolMax, 1)
	res, err := agentv1connect.NewEnrolmentServiceClient(g.Client(nil), g.URL).Enroll(ctx, connect.NewRequest(m))
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}

// Join enrols with a join string and fails the test if that does not work.
func (g *Gateway) Join(join string, role agentv1.Role) *Agent {
	g.t.Helper()
	j, err := trust.ParseJoin(join)
	if err != nil {
		g.t.Fatal(err)
	}
	key := NewKey(g.t)
	answer, err := g.Enroll(g.t.Context(), &agentv1.EnrollRequest{
		Credential: &agentv1.EnrollRequest_Token{Token: string(j.Token.Reveal())}, Csr: CSR(g.t, key), Role: role, SiteId: j.SiteID,
	})
	if err != nil {
		g.t.Fatalf("Enroll: %v", err)
	}
	return g.Adopt(answer, key, role)
}

// Adopt makes an Agent of an enrolment's answer.
func (g *Gateway) Adopt(answer *agentv1.EnrollResponse, key *ecdsa.PrivateKey, role agentv1.Role) *Agent {
	g.t.Helper()
	leaf, err := x509.ParseCertificate(answer.Chain[0])
	if err != nil {
		g.t.Fatal(err)
	}
	bundle, err := trust.VerifyFirst(g.Keys.Current.RootSet(), answer.Bundle, g.Clock.Now())
	if err != nil {
		g.t.Fatalf("trust bundle: %v", err)
	}
	return &Agent{ID: answer.AgentId, Role: role, Key: key, Leaf: leaf, Bundle: bundle, Answer: answer, BootID: "boot-1", JournalEpoch: "journal-1", EventEpoch: "events-1", g: g, t: g.t}
}

// Site makes a site box with an id of its own choice and enrols it.
func (g *Gateway) Site(siteID string) *Agent {
	g.t.Helper()
	join, err := g.Enrol.NewToken(g.t.Context(), agentv1.Role_ROLE_SITE, siteID, "", time.Hour)
	if err != nil {
		g.t.Fatal(err)
	}
	return g.Join(join, agentv1.Role_ROLE_SITE)
}

// HTTP is a client that shows the agent's certificate.
func (a *Agent) HTTP() *http.Client {
	return a.g.Client(&tls.Certificate{Certificate: [][]byte{a.Leaf.Raw, a.Answer.Chain[1]}, PrivateKey: a.Key})
}

// Voucher signs a voucher as this site box.
func (a *Agent) Voucher(v *agentv1.Voucher) *agentv1.SignedVoucher {
	a.t.Helper()
	signed, err := trust.SignVoucher(a.Key, a.ID, v)
	if err != nil {
		a.t.Fatal(err)
	}
	return signed
}

// Session is one open stream.
type Session struct {
	Stream  *connect.BidiStreamForClient[agentv1.AgentFrame, agentv1.GatewayFrame]
	Welcome *agentv1.Welcome
	t       testing.TB
	frames  chan *agentv1.GatewayFrame
	err     error // why frames was closed
	cancel  context.CancelFunc
}

// Hello is the agent's usual first frame.
func (a *Agent) Hello() *agentv1.Hello {
	return &agentv1.Hello{
		AgentId: a.ID, Role: a.Role, BootId: a.BootID, JournalEpoch: a.JournalEpoch, EventEpoch: a.EventEpoch, EventNextSeq: 1,
		ProtocolMin: 1, ProtocolMax: 1, Version: "test", ClockSource: "ntp",
		Lanes: map[string]uint32{"query": 64, "power": 64, "provision": 16, "proxy": 8, "transfer": 4, "update": 1},
	}
}

// Dial opens a stream and sends first, and nothing else.
func (a *Agent) Dial(first *agentv1.AgentFrame) *Session {
	a.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	stream := agentv1connect.NewSessionServiceClient(a.HTTP(), a.g.URL).Connect(ctx)
	s := &Session{Stream: stream, t: a.t, frames: make(chan *agentv1.GatewayFrame, 1024), cancel: cancel}
	a.t.Cleanup(s.Cut)
	if err := stream.Send(first); err != nil {
		a.t.Logf("send first frame: %v", err) // Receive says what the gateway answered
	}
	go func() {
		defer close(s.frames)
		for {
			f, err := stream.Receive()
			if err != nil {
				s.err = err
				return
			}
			s.frames <- f
		}
	}()
	return s
}

// Connect opens a session with the usual Hello, changed by edit, and reads Welcome.
func (a *Agent) Connect(edit ...func(*agentv1.Hello)) *Session {
	a.t.Helper()
	hello := a.Hello()
	for _, f := range edit {
		f(hello)
	}
	s := a.Dial(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Hello{Hello: hello}})
	f := s.Next()
	if s.Welcome = f.GetWelcome(); s.Welcome == nil {
		a.t.Fatalf("first frame = %v, want Welcome", f)
	}
	return s
}

// Send sends one frame.
func (s *Session) Send(f *agentv1.AgentFrame) {
	s.t.Helper()
	if err := s.Stream.Send(f); err != nil {
		s.t.Fatalf("send %v: %v", f, err)
	}
}

// patience is how long a frame may take on a busy machine.
const patience = 20 * time.Second

// Next is the next frame other than a heartbeat.
func (s *Session) Next() *agentv1.GatewayFrame {
	s.t.Helper()
	f := s.within(patience)
	if f == nil {
		s.t.Fatal("no frame came")
	}
	return f
}

// within is the next frame other than a heartbeat, nil where none comes in time.
func (s *Session) within(d time.Duration) *agentv1.GatewayFrame {
	s.t.Helper()
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		select {
		case f, ok := <-s.frames:
			if !ok {
				s.t.Fatalf("stream ended: %v", s.err)
			}
			if f.GetHeartbeat() == nil {
				return f
			}
		case <-timer.C:
			return nil
		}
	}
}

// Quiet fails the test if a frame other than a heartbeat comes within d.
func (s *Session) Quiet(d time.Duration) {
	s.t.Helper()
	if f := s.within(d); f != nil {
		s.t.Fatalf("frame %v came, want none", f)
	}
}

// End reads until the stream ends: the Close that came last, if any, and the error.
func (s *Session) End() (*agentv1.Close, error) {
	s.t.Helper()
	var last *agentv1.Close
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for {
		select {
		case f, ok := <-s.frames:
			if !ok {
				return last, s.err
			}
			if c := f.GetClose(); c != nil {
				last = c
			}
		case <-timer.C:
			s.t.Fatal("the stream did not end")
		}
	}
}

// Command reads the next frame, which must be a command, and opens it with the
// agent's trust bundle.
func (s *Session) Command(a *Agent) *agentv1.SignedCommand {
	s.t.Helper()
	f := s.Next()
	c := f.GetCommand()
	if c == nil {
		s.t.Fatalf("frame = %v, want a command", f)
	}
	return c
}

// Ack says that the command is in the journal.
func (s *Session) Ack(id string) {
	s.t.Helper()
	s.Send(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Ack{Ack: &agentv1.CommandAck{CommandId: id}}})
}

// Result sends a good result.
func (s *Session) Result(id string, result []byte) {
	s.t.Helper()
	s.Send(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Result{Result: &agentv1.CommandResult{CommandId: id, Outcome: &agentv1.CommandResult_Result{Result: result}}}})
}

// Fail sends an error as the result.
func (s *Session) Fail(id string, e *agentv1.Error) {
	s.t.Helper()
	s.Send(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Result{Result: &agentv1.CommandResult{CommandId: id, Outcome: &agentv1.CommandResult_Error{Error: e}}}})
}

// Event sends one event.
func (s *Session) Event(e *agentv1.Event) {
	s.t.Helper()
	s.Send(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Event{Event: e}})
}

// Cut ends the stream without a word.
func (s *Session) Cut() { s.cancel() }
