package bmcline

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/agent"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/api/computev1/computev1connect"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/gateway"
	"github.com/better-compute/site-appliance/appliance/gateway/api"
	"github.com/better-compute/site-appliance/appliance/gateway/gatewaytest"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/provision"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/appliance/gateway/workflow"
	"github.com/better-compute/site-appliance/appliance/site"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/bmc/redfish"
	"github.com/better-compute/site-appliance/bmc/relay"
	"github.com/better-compute/site-appliance/plugins/driver"
)

const (
	user     = "ADMIN"
	password = "old-Password-1"
	ref      = "secret://acme/bmc"
)

// bench is a gateway with its API, a site's agent and one Redfish BMC. Gateway
// and box can each be stopped and started again.
type bench struct {
	*gatewaytest.Gateway
	t     *testing.T
	state string
	join  *trust.Join

	bmc    *bmctest.Redfish
	bmcURL *httptest.Server
	// before and after see each request to the BMC; before says whether it goes on,
	// after whether its answer does.
	mu            sync.Mutex
	before, after func(*http.Request) bool

	engine    *workflow.Engine
	boxCancel context.CancelFunc
	boxDone   chan struct{}
	calls     computev1connect.MetalServiceClient
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newBench(t *testing.T, opts ...bmctest.Option) *bench {
	t.Helper()
	b := &bench{t: t, state: t.TempDir()}
	b.startBMC(opts...)
	g := gatewaytest.Make(t)
	b.Gateway = g
	g.Log = slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelError}))
	hardware, err := metal.New(metal.Options{})
	must(t, err)
	brought, err := hardware.Module()
	must(t, err)
	g.Modules = []gateway.Module{brought, provision.Module(module.Profile{Name: "rotate", Steps: []module.ProfileStep{{Uses: "bmc-credentials.rotate"}}})}
	g.Prepare = func(g *gateway.Gateway) {
		b.engine = workflow.New(workflow.Config{Store: g.Store, Modules: g.Modules, Commands: g.Commands, Enrol: g.Enrol, Secrets: g.Secrets, Online: g.Sessions.Online, Log: g.Log})
		api.New(api.Config{
			Metal: hardware, Profiles: g.Modules, Drivers: g.Drivers, Settle: g.Settle, Store: g.Store, Commands: g.Commands, Enrol: g.Enrol,
			Secrets: g.Secrets, Artifacts: g.Artifacts, Workflows: b.engine, Online: g.Sessions.Online, Log: g.Log,
		}).Register(g.Handle)
	}
	g.Start()
	ctx := t.Context()
	must(t, g.Store.PutAPIToken(ctx, store.APIToken{Hash: sha256.Sum256([]byte("admin")), Name: "admin", TenantID: store.AllTenants, Permissions: []string{api.AllPermissions}, Created: time.Now()}))
	must(t, g.Store.PutAPIToken(ctx, store.APIToken{Hash: sha256.Sum256([]byte("reader")), Name: "reader", TenantID: "acme", Permissions: []string{"compute:metal:read"}, Created: time.Now()}))
	must(t, g.Store.AddSite(ctx, store.Site{ID: "site_1", TenantID: "acme", Name: "s1", Created: time.Now()}))
	must(t, g.Store.AddPool(ctx, store.Pool{ID: "pool_1", TenantID: "acme", Name: "p1", SiteID: "site_1", Created: time.Now()}))
	b.credential(password)
	text, err := g.Enrol.NewToken(ctx, agentv1.Role_ROLE_SITE, "site_1", "", time.Hour)
	must(t, err)
	join, err := trust.ParseJoin(text)
	must(t, err)
	b.join = &join
	b.calls = b.as("admin")
	b.startBox()
	t.Cleanup(b.stopBox)
	must(t, b.enroll("m1", "redfish", b.address(), ref, b.pin()))
	return b
}

func (b *bench) startBMC(opts ...bmctest.Option) {
	var err error
	b.bmc, err = bmctest.StartRedfish(b.t.Context(), "127.0.0.1:0", user, password, bmctest.NewFake(), append([]bmctest.Option{bmctest.OffInterval(time.Millisecond)}, opts...)...)
	must(b.t, err)
	b.t.Cleanup(func() { b.bmc.Close() })
	b.bmcURL = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b.mu.Lock()
		before, after := b.before, b.after
		b.mu.Unlock()
		if before != nil && !before(r) {
			panic(http.ErrAbortHandler)
		}
		if after == nil {
			b.bmc.ServeHTTP(w, r)
			return
		}
		kept := httptest.NewRecorder()
		b.bmc.ServeHTTP(kept, r)
		if !after(r) {
			panic(http.ErrAbortHandler)
		}
		for name, values := range kept.Header() {
			w.Header()[name] = values
		}
		w.WriteHeader(kept.Code)
		_, _ = io.Copy(w, kept.Body)
	}))
	b.bmcURL.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	b.bmcURL.StartTLS()
	b.t.Cleanup(b.bmcURL.Close)
}

func (b *bench) hook(before, after func(*http.Request) bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.before, b.after = before, after
}

func (b *bench) address() string { return b.bmcURL.Listener.Addr().String() }

func (b *bench) pin() string {
	leaf := b.bmcURL.Certificate()
	sum := sha256.Sum256(leaf.RawSubjectPublicKeyInfo)
	return hex.EncodeToString(sum[:])
}

func (b *bench) credential(password string) {
	value, err := json.Marshal(map[string]string{"username": user, "password": password})
	must(b.t, err)
	_, err = b.Secrets.Put(b.t.Context(), "acme", "bmc", secret.New(value))
	must(b.t, err)
}

// stored is the password that the gateway keeps, and the pending one or "".
func (b *bench) stored() string {
	v, err := b.Secrets.Get(b.t.Context(), ref)
	must(b.t, err)
	var c struct{ Password string }
	must(b.t, json.Unmarshal(v.Reveal(), &c))
	return c.Password
}

func (b *bench) enroll(name, driver, address, ref, pin string) error {
	_, err := b.calls.Enroll(b.t.Context(), connect.NewRequest(&computev1.EnrollMachineRequest{TenantId: "acme", Name: name, Pool: "p1", ProductUuid: "4c4c4544-0042-3010-8056-b4c04f303232",
		Bmc: &computev1.Bmc{Driver: driver, Address: address, CredentialsRef: ref, TlsSpkiSha256: pin}}))
	return err
}

// as is a client of the API with a token.
func (b *bench) as(token string) computev1connect.MetalServiceClient {
	client := b.Client(nil)
	return computev1connect.NewMetalServiceClient(&http.Client{Transport: bearer{token, client.Transport}}, b.URL)
}

type bearer struct {
	token string
	next  http.RoundTripper
}

func (r bearer) RoundTrip(req *http.Request) (*http.Response, error) {
	req.Header.Set("Authorization", "Bearer "+r.token)
	return r.next.RoundTrip(req)
}

// startBox starts the site's agent with the relay and the built-in driver.
func (b *bench) startBox() {
	b.t.Helper()
	log := slog.New(slog.NewTextHandler(b.t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	own, closer, err := redfish.New(redfish.Options{Roots: x509.NewCertPool(), Log: log})
	must(b.t, err)
	book, err := addressbook.Open(filepath.Join(b.state, "bmcs.json"))
	must(b.t, err)
	r := relay.New(relay.Options{Book: book, BuiltIn: []*driver.Definition{own}, Log: log})
	a, err := agent.New(agent.Config{Role: agentv1.Role_ROLE_SITE, StateDir: filepath.Join(b.state, "agent"), Join: b.join, Version: "test", Kinds: site.BMCKinds(r), Log: log})
	must(b.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	b.boxCancel, b.boxDone = cancel, done
	go func() {
		defer close(done)
		_ = a.Run(ctx)
		ending, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		closer(ending)
	}()
}

// killBox stops it where it stands; stopBox also waits.
func (b *bench) killBox() { b.boxCancel() }

func (b *bench) stopBox() {
	b.boxCancel()
	<-b.boxDone
}

// boxOnline reports whether the gateway sees the box.
func (b *bench) boxOnline() bool {
	agents, err := b.Store.Agents(b.t.Context(), store.AgentFilter{SiteID: "site_1", State: store.AgentActive})
	return err == nil && len(agents) > 0 && b.Sessions.Online(agents[len(agents)-1].ID)
}

// online waits until it does.
func (b *bench) online() {
	b.t.Helper()
	b.eventually("the box", b.boxOnline)
}

func (b *bench) eventually(what string, f func() bool) {
	b.t.Helper()
	deadline := time.Now().Add(2 * time.Minute)
	for !f() {
		if time.Now().After(deadline) {
			b.t.Fatalf("%s did not come", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// ended waits for a command.
func (b *bench) ended(id string) *computev1.GetCommandResponse {
	b.t.Helper()
	var out *computev1.GetCommandResponse
	b.eventually("the end of "+id, func() bool {
		res, err := b.calls.GetCommand(b.t.Context(), connect.NewRequest(&computev1.GetCommandRequest{TenantId: "acme", CommandId: id}))
		if err != nil {
			return false
		}
		out = res.Msg
		return out.State == "done"
	})
	return out
}

// operate asks for one operation and waits for its end: its answer, or its code.
func (b *bench) operate(operation, args string) (result, code string) {
	b.t.Helper()
	res, err := b.calls.Operate(b.t.Context(), connect.NewRequest(&computev1.OperateRequest{TenantId: "acme", Machine: "m1", Operation: operation, ArgsJson: args}))
	if err != nil {
		return "", err.Error()
	}
	if res.Msg.ResultJson != "" {
		return res.Msg.ResultJson, ""
	}
	out := b.ended(res.Msg.CommandId)
	if out.ErrorCode != "" {
		return "", strings.TrimSpace(out.ErrorCode + ": " + out.ErrorMessage)
	}
	return out.ResultJson, ""
}
