// Package gateway is the far end of the line home in one process: enrolment,
// sessions, commands, secrets and artifacts behind one HTTPS listener.
package gateway

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/net/netutil"

	line "github.com/better-compute/site-appliance/appliance/agent/tunnel"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/agentv1/agentv1connect"
	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/artifacts"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/discovery"
	"github.com/better-compute/site-appliance/appliance/gateway/enrol"
	"github.com/better-compute/site-appliance/appliance/gateway/grants"
	"github.com/better-compute/site-appliance/appliance/gateway/keys"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/nodespec"
	"github.com/better-compute/site-appliance/appliance/gateway/secretstore"
	"github.com/better-compute/site-appliance/appliance/gateway/sessions"
	"github.com/better-compute/site-appliance/appliance/gateway/settle"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/appliance/gateway/tunnel"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// DefaultListen keeps a gateway to its own machine until a person says otherwise.
const DefaultListen = "127.0.0.1:7443"

const (
	maxConnections = 8192
	// An enrolment is a few kilobytes and comes from strangers.
	enrolBytes   = 64 << 10
	enrolTime    = 30 * time.Second
	sessionBytes = 8 << 20
	callBytes    = 1 << 20
	// Heartbeats and acknowledgements are not worth compressing.
	compressBytes = 1 << 10
	// drainTime is how long a stopping gateway waits for what is open.
	drainTime = 10 * time.Second
	// eventLife is how long events other than audit are kept, commandLife how
	// long commands that have their outcome.
	eventLife   = 30 * 24 * time.Hour
	commandLife = 90 * 24 * time.Hour
)

// Options are what a person or a test may choose.
type Options struct {
	Listen string // empty: DefaultListen
	Log    *slog.Logger
	Now    func() time.Time // nil: time.Now
	Timing sessions.Timing  // zero: sessions.DefaultTiming
	// Modules are what the gateway is made of: it sends no command kind, and knows
	// no driver, step or profile, that none of them brings.
	Modules []Module
	// Drivers are registered beside the modules'.
	Drivers []*driver.Definition
}

// Module is what one part of a control plane brings.
type Module = module.Module

// Gateway is one gateway's parts. Between New and Serve more handlers and hooks may be added.
type Gateway struct {
	Dir       string
	Keys      *keys.Set
	Store     *store.Store
	Commands  *commands.Service
	Sessions  *sessions.Service
	Tunnels   *tunnel.Hub
	Enrol     *enrol.Service
	Secrets   *secretstore.Service
	Artifacts *artifacts.Service
	Nodes     *nodespec.Service
	Settle    *settle.Service
	Discovery *discovery.Service
	Grants    *grants.Service
	Modules   *module.Set
	// Drivers are the modules', and those that are registered before Serve.
	Drivers *driver.Registry
	Log     *slog.Logger

	listen string
	mux    *http.ServeMux
	lock   *os.File
}

// New opens the folder that keys.Init made. Close must be called.
func New(dir string, o Options) (*Gateway, error) {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Listen == "" {
		o.Listen = DefaultListen
	}
	if o.Timing == (sessions.Timing{}) {
		o.Timing = sessions.DefaultTiming
	}
	g := &Gateway{Dir: dir, Log: o.Log, listen: o.Listen, mux: http.NewServeMux()}
	if err := g.open(o); err != nil {
		return nil, errors.Join(fmt.Errorf("open gateway %s: %w", dir, err), g.Close())
	}
	return g, nil
}

func (g *Gateway) open(o Options) (err error) {
	if g.Modules, err = module.Join(o.Modules...); err != nil {
		return err
	}
	g.Drivers = g.Modules.Registry()
	for _, d := range o.Drivers {
		if err := g.Drivers.Register(d); err != nil {
			return err
		}
	}
	if g.Keys, err = keys.Load(g.Dir, o.Now()); err != nil {
		return err
	}
	if g.lock, err = lockDir(g.Dir); err != nil {
		return err
	}
	if g.Store, err = store.Open(filepath.Join(g.Dir, "gateway.db"), o.Now); err != nil {
		return err
	}
	g.Commands = commands.New(g.Store, g.Keys.Command, g.Modules, g.Log.With("part", "commands"))
	g.Commands.Completing(cmdkind.Assign, metal.SignAssignments(g.Keys.Command))
	g.Grants = grants.New(g.Store, g.Keys.Current)
	g.Commands.CiteFrom(g.Grants)
	g.Sessions = sessions.New(g.Store, g.Commands, g.Keys, g.Keys.Current.Version(), o.Timing, g.Log.With("part", "sessions"))
	g.Sessions.OnEvent(g.heardVersion)
	g.Tunnels = tunnel.New(g.Store, line.Timing{Beat: o.Timing.Heartbeat, Dead: o.Timing.Dead}, g.Log.With("part", "tunnels"))
	g.Enrol = enrol.New(g.Store, g.Keys, g.Log.With("part", "enrol"))
	g.Enrol.OnSuperseded = func(ctx context.Context, agentID string) {
		if err := g.Sessions.Expel(ctx, agentID, errs.New(errs.Superseded, "a newer identity stands for the same machine or site")); err != nil {
			g.Log.Error("end replaced agent", "agent", agentID, "err", err)
		}
	}
	if g.Secrets, err = secretstore.New(g.Store, g.Keys.Store, g.Log.With("part", "secrets")); err != nil {
		return err
	}
	g.Settle = settle.New(settle.Config{Store: g.Store, Commands: g.Commands, Secrets: g.Secrets, Online: g.Sessions.Online, Log: g.Log.With("part", "settle")})
	g.Commands.Before(settle.RotateKind, g.Settle.Begin)
	g.Commands.OnFinished(g.Settle.Finished)
	g.Discovery = discovery.New(discovery.Config{Store: g.Store, Commands: g.Commands, Online: g.Sessions.Online, Expel: g.Sessions.Expel, Log: g.Log.With("part", "discovery")})
	g.Sessions.OnEvent(g.Discovery.Heard)
	g.Sessions.OnState(g.Discovery.Came)
	if g.Artifacts, err = artifacts.New(filepath.Join(g.Dir, "artifacts"), g.Store, g.Log.With("part", "artifacts")); err != nil {
		return err
	}
	agents := http.NewServeMux()
	add := func(h http.Handler, path string) { agents.Handle(path, h) }
	path, h := agentv1connect.NewEnrolmentServiceHandler(g.Enrol, connect.WithReadMaxBytes(enrolBytes))
	add(brief(h), path)
	path, h = agentv1connect.NewSessionServiceHandler(g.Sessions, connect.WithReadMaxBytes(sessionBytes), connect.WithCompressMinBytes(compressBytes))
	add(sessions.Deadlines(h), path)
	path, h = agentv1connect.NewTunnelServiceHandler(g.Tunnels, connect.WithReadMaxBytes(callBytes), connect.WithCompressMinBytes(callBytes))
	add(tunnel.Deadlines(h), path)
	path, h = agentv1connect.NewSecretServiceHandler(g.Secrets, connect.WithReadMaxBytes(callBytes))
	add(h, path)
	path, h = agentv1connect.NewArtifactServiceHandler(g.Artifacts, connect.WithReadMaxBytes(callBytes))
	add(h, path)
	add(g.Artifacts, artifacts.Path)
	g.Nodes = nodespec.New(g.Store)
	path, h = agentv1connect.NewNodeServiceHandler(g.Nodes, connect.WithReadMaxBytes(callBytes))
	add(h, path)
	for _, p := range []string{
		"/" + agentv1connect.EnrolmentServiceName + "/", "/" + agentv1connect.SessionServiceName + "/",
		"/" + agentv1connect.TunnelServiceName + "/",
		"/" + agentv1connect.SecretServiceName + "/", "/" + agentv1connect.ArtifactServiceName + "/", artifacts.Path,
		"/" + agentv1connect.NodeServiceName + "/",
	} {
		g.mux.Handle(p, g.Enrol.Authenticate(agents))
	}
	return nil
}

// lockDir keeps a second gateway out of the folder; the kernel frees it when
// this process ends, however it ends.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "gateway.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("another gateway uses the folder: %w", err), f.Close())
	}
	return f, nil
}

// brief bounds the time that a call from a stranger may take to arrive.
func brief(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		deadline := time.Now().Add(enrolTime)
		if err := errors.Join(rc.SetReadDeadline(deadline), rc.SetWriteDeadline(deadline)); err != nil {
			http.Error(w, "no deadline can be set", http.StatusInternalServerError)
			return
		}
		// Over HTTP/1.1 a deadline would stay with the connection.
		defer func() { _ = errors.Join(rc.SetReadDeadline(time.Time{}), rc.SetWriteDeadline(time.Time{})) }()
		next.ServeHTTP(w, r)
	})
}

// Handle adds a handler, which authenticates its callers itself.
func (g *Gateway) Handle(pattern string, h http.Handler) { g.mux.Handle(pattern, h) }

// Close frees the folder. Serve must have returned.
func (g *Gateway) Close() error {
	var err error
	if g.Store != nil {
		err = g.Store.Close()
	}
	if g.lock != nil {
		err = errors.Join(err, g.lock.Close())
	}
	return err
}

// Serve listens and serves until ctx ends; then it asks agents to come back
// later, lets calls finish for a while, and returns nil. No command is lost by it.
func (g *Gateway) Serve(ctx context.Context) error {
	l, err := Listen(ctx, g.listen)
	if err != nil {
		return err
	}
	return g.ServeListener(ctx, l)
}

// ServeListener is Serve on a listener that is there already, and closes it.
func (g *Gateway) ServeListener(ctx context.Context, l net.Listener) error {
	cert := &serverCert{set: g.Keys, now: g.Store.Now}
	if _, err := cert.get(nil); err != nil {
		return errors.Join(err, l.Close())
	}
	server := &http.Server{
		Handler:           g.mux,
		ReadHeaderTimeout: 15 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(g.Log.Handler(), slog.LevelDebug),
		TLSConfig: &tls.Config{
			MinVersion:     tls.VersionTLS13,
			GetCertificate: cert.get,
			// Asked for and judged by VerifyPeer, which lets one that just ended renew.
			ClientAuth:       tls.RequestClientCert,
			VerifyConnection: g.Enrol.VerifyPeer,
			// A resumed connection would skip nothing here, but tickets outlive revocation for no gain.
			SessionTicketsDisabled: true,
		},
		HTTP2: &http.HTTP2Config{
			SendPingTimeout:  20 * time.Second,
			PingTimeout:      15 * time.Second,
			WriteByteTimeout: 30 * time.Second,
		},
	}
	work, stop := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	wg.Go(func() { g.Commands.Run(work) })
	wg.Go(func() { g.Settle.Run(work) })
	wg.Go(func() { g.Discovery.Run(work) })
	wg.Go(func() { g.tidy(work) })
	defer wg.Wait()
	defer stop()

	failed := make(chan error, 1)
	wg.Go(func() { failed <- server.ServeTLS(netutil.LimitListener(l, maxConnections), "", "") })
	g.Log.Info("gateway serves", "address", l.Addr().String(), "urls", g.Keys.Current.URLs())
	select {
	case err := <-failed:
		return fmt.Errorf("serve gateway: %w", err)
	case <-ctx.Done():
	}
	g.Log.Info("gateway stops")
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer cancel()
	// Before the sessions: what ends with a tunnel may still tell its result.
	g.Tunnels.Drain()
	if err := g.Sessions.Drain(grace); err != nil {
		g.Log.Warn("stop", "err", err)
	}
	if err := server.Shutdown(grace); err != nil {
		g.Log.Warn("calls were cut off", "err", err)
		if err := server.Close(); err != nil {
			g.Log.Warn("close connections", "err", err)
		}
	}
	return nil
}

// tidy removes old events and commands once a day.
func (g *Gateway) tidy(ctx context.Context) {
	for {
		now := g.Store.Now()
		events, err := g.Store.PruneEvents(ctx, now.Add(-eventLife))
		if err == nil {
			var old int64
			if old, err = g.Store.PruneCommands(ctx, now.Add(-commandLife)); events+old > 0 {
				g.Log.Info("old rows removed", "events", events, "commands", old)
			}
		}
		if err != nil && ctx.Err() == nil {
			g.Log.Error("remove old rows", "err", err)
		}
		timer := time.NewTimer(24 * time.Hour)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
	}
}

// Revoke ends an identity for good: its session, its open commands, and every later call.
func (g *Gateway) Revoke(ctx context.Context, agentID string) error {
	agent, err := g.Store.Agent(ctx, agentID)
	if err == nil {
		err = g.Store.SetAgentState(ctx, agentID, store.AgentRevoked)
	}
	if err == nil {
		err = g.Sessions.Expel(ctx, agentID, errs.New(errs.Revoked, "the identity was revoked"))
	}
	if err == nil {
		body, _ := json.Marshal(map[string]string{"agent": agentID}) // strings always encode
		err = g.Store.AddEvent(ctx, store.Event{SiteID: agent.SiteID, MachineID: agent.MachineID, AgentID: agentID, Name: "agent.revoked", Class: "audit", Key: agentID, BodyJSON: string(body)})
	}
	if err != nil {
		return fmt.Errorf("revoke %s: %w", agentID, err)
	}
	return nil
}

// serverCert makes the gateway's own certificate and replaces it at half of its life.
type serverCert struct {
	set *keys.Set
	now func() time.Time

	mu   sync.Mutex
	cert *tls.Certificate
}

func (c *serverCert) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	if c.cert != nil && now.Before(c.cert.Leaf.NotBefore.Add(c.cert.Leaf.NotAfter.Sub(c.cert.Leaf.NotBefore)/2)) {
		return c.cert, nil
	}
	fresh, err := c.set.Authority.IssueServer(c.set.Current.URLs(), now)
	if err != nil {
		return nil, err
	}
	c.cert = fresh
	return fresh, nil
}

// heardVersion follows a box whose boot decisions are other than the gateway knows.
func (g *Gateway) heardVersion(ctx context.Context, agentID string, e *agentv1.Event) {
	var body struct {
		Version uint64 `json:"version"`
	}
	if e.Name != "pxe.assigned" || json.Unmarshal(e.BodyJson, &body) != nil {
		return
	}
	behind, err := g.Store.HeardAssignVersion(ctx, agentID, body.Version)
	if err != nil {
		g.Log.Error("the version of a box's boot decisions is not kept", "agent", agentID, "err", err)
		return
	}
	if behind != "" {
		g.Discovery.Lost(behind)
	}
}
