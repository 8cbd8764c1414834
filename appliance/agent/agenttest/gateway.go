package agenttest

import (
	"context"
	"crypto/ecdsa"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/agentv1/agentv1connect"
	"github.com/better-compute/site-appliance/appliance/base/secret"
)

// SiteID is the site of every join string that a Gateway makes.
const SiteID = "site_test"

// Gateway serves the line home. Fields may be set before an agent starts.
type Gateway struct {
	*Authority
	URL string
	// Life is how long certificates hold; renewal is due at half of it.
	Life time.Duration
	// Secrets answers Resolve.
	Secrets map[string][]byte
	// HoldResultAcks leaves results unacknowledged.
	HoldResultAcks bool

	t      testing.TB
	server *httptest.Server

	mu       sync.Mutex
	tokens   map[string]*enrolled
	vouchers map[string]*enrolled
	keys     map[string]*ecdsa.PublicKey // agents' own, by agent id
	agents   int
	renewals int
	refusal  error
	bundles  []*agentv1.SignedBundle
	sessions []*Session
	changed  chan struct{}
}

type enrolled struct {
	csr    [32]byte
	answer *agentv1.EnrollResponse
	role   agentv1.Role
}

// Start serves a gateway until the test ends.
func Start(t testing.TB) *Gateway {
	t.Helper()
	g := &Gateway{
		Authority: NewAuthority(t), Life: 24 * time.Hour, Secrets: map[string][]byte{}, t: t,
		tokens: map[string]*enrolled{}, vouchers: map[string]*enrolled{}, keys: map[string]*ecdsa.PublicKey{},
		changed: make(chan struct{}),
	}
	mux := http.NewServeMux()
	mux.Handle(agentv1connect.NewEnrolmentServiceHandler(g))
	mux.Handle(agentv1connect.NewSessionServiceHandler(g))
	mux.Handle(agentv1connect.NewSecretServiceHandler(g))
	mux.Handle(agentv1connect.NewArtifactServiceHandler(g))
	mux.HandleFunc("GET /whoami", func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, peer(r.TLS)) })
	mux.HandleFunc("GET /away", func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "https://127.0.0.2:1/", http.StatusFound)
	})
	g.server = httptest.NewUnstartedServer(identify(mux))
	pool := x509.NewCertPool()
	pool.AddCert(g.CA)
	g.server.EnableHTTP2 = true
	g.server.TLS = &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{g.ServerCertificate(t)},
		ClientAuth: tls.VerifyClientCertIfGiven, ClientCAs: pool,
	}
	g.server.StartTLS()
	g.URL = g.server.URL
	g.bundles = []*agentv1.SignedBundle{g.Sign(t, g.Content(1, g.URL))}
	t.Cleanup(func() {
		g.DropAll()
		g.server.CloseClientConnections()
		g.server.Close()
	})
	return g
}

type peerKey struct{}

// identify passes the client certificate's name on to the handlers.
func identify(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), peerKey{}, peer(r.TLS))))
	})
}

func peer(s *tls.ConnectionState) string {
	if s == nil || len(s.PeerCertificates) == 0 {
		return ""
	}
	return s.PeerCertificates[0].Subject.CommonName
}

func caller(ctx context.Context) (string, error) {
	id, _ := ctx.Value(peerKey{}).(string)
	if id == "" {
		return "", connect.NewError(connect.CodeUnauthenticated, errors.New("not-enrolled: no client certificate"))
	}
	return id, nil
}

// Addr is host:port of the gateway.
func (g *Gateway) Addr() string { return g.server.Listener.Addr().String() }

// Join makes a join string's content with a new token.
func (g *Gateway) Join(token string) *trust.Join {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.tokens[token] = nil
	return &trust.Join{
		URLs: []string{g.URL}, CASPKI: trust.SPKI(g.CA), RootSet: g.RootSet(),
		SiteID: SiteID, Token: secret.New([]byte(token)),
	}
}

// Refuse makes Enroll, Renew and Connect answer err; nil: no more.
func (g *Gateway) Refuse(err error) {
	g.mu.Lock()
	g.refusal = err
	g.mu.Unlock()
}

// AddBundle makes content the next bundle that agents are handed.
func (g *Gateway) AddBundle(content *agentv1.TrustBundle) {
	g.t.Helper()
	signed := g.Sign(g.t, content)
	g.mu.Lock()
	g.bundles = append(g.bundles, signed)
	g.mu.Unlock()
}

// Renewals counts renewed certificates.
func (g *Gateway) Renewals() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.renewals
}

func (g *Gateway) refused() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.refusal
}

// Enroll takes a token that Join made, or a voucher of an enrolled site.
func (g *Gateway) Enroll(_ context.Context, r *connect.Request[agentv1.EnrollRequest]) (*connect.Response[agentv1.EnrollResponse], error) {
	if err := g.refused(); err != nil {
		return nil, err
	}
	csr, err := x509.ParseCertificateRequest(r.Msg.GetCsr())
	if err != nil || csr.CheckSignature() != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("invalid-payload: bad certificate request"))
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	table, key, machine := g.tokens, r.Msg.GetToken(), ""
	if v := r.Msg.GetVoucher(); v != nil {
		voucher, err := trust.VerifyVoucher(g.keys[v.GetSiteAgentId()], v)
		if err != nil {
			return nil, connect.NewError(connect.CodePermissionDenied, err)
		}
		table, key, machine = g.vouchers, string(v.GetPayload()), voucher.GetMachineId()
		if _, ok := table[key]; !ok {
			table[key] = nil
		}
	} else if r.Msg.GetRole() == agentv1.Role_ROLE_NODE {
		machine = "node_test"
	}
	known, ok := table[key]
	digest := sha256.Sum256(r.Msg.GetCsr())
	switch {
	case !ok:
		return nil, connect.NewError(connect.CodePermissionDenied, errors.New("token-used: unknown token"))
	case known != nil && known.csr == digest:
		return connect.NewResponse(known.answer), nil
	case known != nil:
		return nil, connect.NewError(connect.CodePermissionDenied, errors.New("token-used: another request came first"))
	}
	g.agents++
	id := fmt.Sprintf("ag_%d", g.agents)
	public := csr.PublicKey.(*ecdsa.PublicKey)
	g.keys[id] = public
	answer := &agentv1.EnrollResponse{
		AgentId: id, Chain: g.AgentChain(g.t, id, public, g.Life), Bundle: g.bundles[0], MachineId: machine,
		ServerTimeMs: time.Now().UnixMilli(), RenewAfterMs: time.Now().Add(g.Life / 2).UnixMilli(),
	}
	table[key] = &enrolled{csr: digest, answer: answer, role: r.Msg.GetRole()}
	return connect.NewResponse(answer), nil
}

// Renew gives the caller another certificate.
func (g *Gateway) Renew(ctx context.Context, r *connect.Request[agentv1.RenewRequest]) (*connect.Response[agentv1.RenewResponse], error) {
	if err := g.refused(); err != nil {
		return nil, err
	}
	id, err := caller(ctx)
	if err != nil {
		return nil, err
	}
	csr, err := x509.ParseCertificateRequest(r.Msg.GetCsr())
	if err != nil || csr.CheckSignature() != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("invalid-payload: bad certificate request"))
	}
	g.mu.Lock()
	g.renewals++
	g.mu.Unlock()
	return connect.NewResponse(&agentv1.RenewResponse{
		Chain:        g.AgentChain(g.t, id, csr.PublicKey, 24*time.Hour),
		ServerTimeMs: time.Now().UnixMilli(), RenewAfterMs: time.Now().Add(12 * time.Hour).UnixMilli(),
	}), nil
}

// Resolve answers from Secrets.
func (g *Gateway) Resolve(ctx context.Context, r *connect.Request[agentv1.ResolveRequest]) (*connect.Response[agentv1.ResolveResponse], error) {
	if _, err := caller(ctx); err != nil {
		return nil, err
	}
	values := map[string][]byte{}
	for _, ref := range r.Msg.GetRefs() {
		if v, ok := g.Secrets[ref]; ok {
			values[ref] = v
		}
	}
	return connect.NewResponse(&agentv1.ResolveResponse{Values: values}), nil
}

// Locate echoes the reference as a digest.
func (g *Gateway) Locate(ctx context.Context, r *connect.Request[agentv1.LocateRequest]) (*connect.Response[agentv1.LocateResponse], error) {
	if _, err := caller(ctx); err != nil {
		return nil, err
	}
	return connect.NewResponse(&agentv1.LocateResponse{Sha256: r.Msg.GetRef(), Urls: []string{"/artifacts/" + r.Msg.GetRef()}}), nil
}

// Session is one stream of one agent.
type Session struct {
	AgentID string
	Hello   *agentv1.Hello

	g      *Gateway
	send   chan *agentv1.GatewayFrame
	end    chan struct{}
	once   sync.Once
	frames []*agentv1.AgentFrame // under g.mu
	over   bool                  // under g.mu
}

// Connect runs a session: Welcome with the bundles that the agent lacks, acks
// for events and results, and whatever the test sends.
func (g *Gateway) Connect(ctx context.Context, stream *connect.BidiStream[agentv1.AgentFrame, agentv1.GatewayFrame]) error {
	if err := g.refused(); err != nil {
		return err
	}
	id, err := caller(ctx)
	if err != nil {
		return err
	}
	first, err := stream.Receive()
	if err != nil {
		return err
	}
	hello := first.GetHello()
	if hello.GetAgentId() != id {
		return connect.NewError(connect.CodePermissionDenied, fmt.Errorf("wrong-agent: Hello says %q, the certificate %q", hello.GetAgentId(), id))
	}
	s := &Session{AgentID: id, Hello: hello, g: g, send: make(chan *agentv1.GatewayFrame, 256), end: make(chan struct{})}
	g.mu.Lock()
	welcome := &agentv1.Welcome{
		SessionId: fmt.Sprintf("s%d", len(g.sessions)+1), SessionEpoch: uint64(len(g.sessions) + 1), Protocol: 1,
		ServerTimeMs: time.Now().UnixMilli(), HeartbeatS: 1,
		BundleVersion: uint64(len(g.bundles)), Bundles: g.bundles[1:],
	}
	g.sessions = append(g.sessions, s)
	g.note()
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		s.over = true
		g.note()
		g.mu.Unlock()
	}()
	s.Send(&agentv1.GatewayFrame{Frame: &agentv1.GatewayFrame_Welcome{Welcome: welcome}})

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	received := make(chan error, 1)
	go func() { received <- s.receive(stream) }()
	beat := time.NewTicker(500 * time.Millisecond)
	defer beat.Stop()
	for seq := uint64(1); ; {
		var frame *agentv1.GatewayFrame
		select {
		case <-s.end:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case err := <-received:
			return err
		case frame = <-s.send:
		case <-beat.C:
			frame = &agentv1.GatewayFrame{Frame: &agentv1.GatewayFrame_Heartbeat{Heartbeat: &agentv1.Heartbeat{Seq: seq, ServerTimeMs: time.Now().UnixMilli()}}}
			seq++
		}
		if err := stream.Send(frame); err != nil {
			return err
		}
		if frame.GetClose() != nil {
			return nil
		}
	}
}

func (s *Session) receive(stream *connect.BidiStream[agentv1.AgentFrame, agentv1.GatewayFrame]) error {
	for {
		f, err := stream.Receive()
		if err != nil {
			return err
		}
		s.g.mu.Lock()
		hold := s.g.HoldResultAcks
		s.frames = append(s.frames, f)
		s.g.note()
		s.g.mu.Unlock()
		switch {
		case f.GetEvent() != nil:
			s.Send(&agentv1.GatewayFrame{Frame: &agentv1.GatewayFrame_EventAck{EventAck: &agentv1.EventAck{Seq: f.GetEvent().GetSeq()}}})
		case f.GetResult() != nil && !hold:
			s.Send(&agentv1.GatewayFrame{Frame: &agentv1.GatewayFrame_ResultAck{ResultAck: &agentv1.ResultAck{CommandId: f.GetResult().GetCommandId()}}})
		}
	}
}

// note wakes everyone who waits; the caller holds mu.
func (g *Gateway) note() {
	close(g.changed)
	g.changed = make(chan struct{})
}

// Hold sets HoldResultAcks while agents are connected.
func (g *Gateway) Hold(results bool) {
	g.mu.Lock()
	g.HoldResultAcks = results
	g.mu.Unlock()
}

// Send queues a frame for the agent.
func (s *Session) Send(f *agentv1.GatewayFrame) {
	select {
	case s.send <- f:
	case <-s.end:
	}
}

// Command signs a payload, completed with this session's agent and incarnation
// where they are missing, and sends it.
func (s *Session) Command(p *agentv1.CommandPayload) *agentv1.SignedCommand {
	s.g.t.Helper()
	p = proto.CloneOf(p)
	if p.AgentId == "" {
		p.AgentId = s.AgentID
	}
	if p.Incarnation == "" {
		p.Incarnation = s.Hello.GetJournalEpoch()
		if s.Hello.GetRole() == agentv1.Role_ROLE_RAMDISK {
			p.Incarnation = s.Hello.GetBootId()
		}
	}
	if p.IssuedAtMs == 0 {
		p.IssuedAtMs = time.Now().UnixMilli()
	}
	if p.NotAfterMs == 0 {
		p.NotAfterMs = p.IssuedAtMs + 60_000
	}
	c := s.g.Seal(s.g.t, p)
	s.SendCommand(c)
	return c
}

// SendCommand sends a command as it is.
func (s *Session) SendCommand(c *agentv1.SignedCommand) {
	s.Send(&agentv1.GatewayFrame{Frame: &agentv1.GatewayFrame_Command{Command: c}})
}

// Cancel asks the agent to stop a command.
func (s *Session) Cancel(id string) {
	s.Send(&agentv1.GatewayFrame{Frame: &agentv1.GatewayFrame_Cancel{Cancel: &agentv1.Cancel{CommandId: id}}})
}

// Close ends the session with a code.
func (s *Session) Close(code string, retryAfter uint32) {
	s.Send(&agentv1.GatewayFrame{Frame: &agentv1.GatewayFrame_Close{Close: &agentv1.Close{Code: code, RetryAfterS: retryAfter}}})
}

// Drop ends the session without a word.
func (s *Session) Drop() { s.once.Do(func() { close(s.end) }) }

// DropAll drops every session.
func (g *Gateway) DropAll() {
	g.mu.Lock()
	sessions := g.sessions
	g.mu.Unlock()
	for _, s := range sessions {
		s.Drop()
	}
}

// await waits until f, called under the gateway's lock at every change, is true.
func (g *Gateway) await(what string, f func() bool) {
	g.t.Helper()
	deadline := time.After(20 * time.Second)
	for {
		g.mu.Lock()
		ok, changed := f(), g.changed
		g.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			g.t.Fatalf("waited 20 s for %s", what)
		}
	}
}

// Session waits for the n-th session, counted from 1.
func (g *Gateway) Session(n int) *Session {
	g.t.Helper()
	var s *Session
	g.await(fmt.Sprintf("session %d", n), func() bool {
		if len(g.sessions) >= n {
			s = g.sessions[n-1]
		}
		return s != nil
	})
	return s
}

// Over waits for the session's end.
func (s *Session) Over() {
	s.g.t.Helper()
	s.g.await("the session's end", func() bool { return s.over })
}

// Frame waits for a frame that matches.
func (s *Session) Frame(what string, match func(*agentv1.AgentFrame) bool) *agentv1.AgentFrame {
	s.g.t.Helper()
	var found *agentv1.AgentFrame
	s.g.await(what, func() bool {
		for _, f := range s.frames {
			if match(f) {
				found = f
				return true
			}
		}
		return false
	})
	return found
}

// Result waits for a command's result.
func (s *Session) Result(id string) *agentv1.CommandResult {
	s.g.t.Helper()
	return s.Frame("the result of "+id, func(f *agentv1.AgentFrame) bool { return f.GetResult().GetCommandId() == id }).GetResult()
}

// Ack waits for a command's acknowledgement.
func (s *Session) Ack(id string) {
	s.g.t.Helper()
	s.Frame("the ack of "+id, func(f *agentv1.AgentFrame) bool { return f.GetAck().GetCommandId() == id })
}

// Event waits for an event.
func (s *Session) Event(name, key string) *agentv1.Event {
	s.g.t.Helper()
	return s.Frame("event "+name, func(f *agentv1.AgentFrame) bool {
		return f.GetEvent().GetName() == name && f.GetEvent().GetKey() == key
	}).GetEvent()
}

// Frames returns what has come so far.
func (s *Session) Frames() []*agentv1.AgentFrame {
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	return append([]*agentv1.AgentFrame(nil), s.frames...)
}
