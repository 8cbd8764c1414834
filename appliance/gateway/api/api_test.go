package api

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/api/computev1/computev1connect"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/gateway/artifacts"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/provision"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/appliance/gateway/workflow"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/binding"
)

// rig is the API over real HTTP, with fakes behind it.
type rig struct {
	t       *testing.T
	store   *store.Store
	drivers *driver.Registry
	server  *httptest.Server

	mu       sync.Mutex
	online   map[string]bool
	specs    []commands.Spec
	outcome  commands.Outcome
	secrets  map[string][]byte
	started  []workflow.Params
	imported []byte
	// files are the disc images'.
	files       *artifacts.Service
	artifactDir string
	now         time.Time
}

func (r *rig) Submit(_ context.Context, spec commands.Spec) (string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.specs = append(r.specs, spec)
	return "cmd_1", nil
}
func (r *rig) Wait(context.Context, string) (commands.Outcome, error) { return r.outcome, nil }
func (r *rig) Progress(id string) string                              { return "progress of " + id }
func (r *rig) Note(string) string                                     { return "" }
func (r *rig) NewToken(_ context.Context, role agentv1.Role, siteID, machineID string, _ time.Duration) (string, error) {
	return "bc1." + siteID, nil
}
func (r *rig) Put(_ context.Context, tenant, name string, value secret.Value) (string, error) {
	if name == "bad name" {
		return "", errs.New(errs.InvalidArgs, "secret name")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	ref := "secret://" + tenant + "/" + name
	r.secrets[ref] = bytes.Clone(value.Reveal())
	return ref, nil
}
func (r *rig) Has(_ context.Context, ref string) (bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.secrets[ref]
	return ok, nil
}
func (r *rig) Open(sha256 string) (*os.File, error) { return r.files.Open(sha256) }
func (r *rig) Remove(ctx context.Context, name, arch string) error {
	return r.files.Remove(ctx, name, arch)
}
func (r *rig) Import(ctx context.Context, name, arch, format string, in io.Reader) (store.Artifact, error) {
	if strings.HasPrefix(name, isoPrefix) {
		return r.files.Import(ctx, name, arch, format, in)
	}
	data, err := io.ReadAll(in)
	if err != nil {
		return store.Artifact{}, err
	}
	if len(data) == 0 {
		return store.Artifact{}, errs.New(errs.InvalidArgs, "no bytes")
	}
	r.imported = data
	a := store.Artifact{Name: name, Arch: arch, Format: format, SHA256: strings.Repeat("a", 64), SizeBytes: uint64(len(data)), UnpackedSHA256: strings.Repeat("b", 64), Imported: r.now}
	return a, r.store.PutArtifact(context.Background(), a)
}
func (r *rig) Start(ctx context.Context, name string, m store.Machine, p workflow.Params) (string, error) {
	r.started = append(r.started, p)
	return r.engine().Start(ctx, name, m, p)
}
func (r *rig) StartProfile(ctx context.Context, profile string, m store.Machine, traceparent string) (string, error) {
	return r.engine().StartProfile(ctx, profile, m, traceparent)
}
func (r *rig) Cancel(ctx context.Context, tenantID, id string) error {
	return r.engine().Cancel(ctx, tenantID, id)
}

// engine is one that nobody runs: what it starts stays as it began.
func (r *rig) engine() *workflow.Engine {
	look := module.Profile{
		Name: "look", Drivers: map[string]binding.Binding{"power": {Driver: "acme-bmc"}},
		Steps: []module.ProfileStep{{Uses: "power.getPower", On: module.OnSite}},
	}
	set, err := module.Join(module.Module{Name: "metal", Kinds: metal.Kinds()}, provision.Module(look))
	if err != nil {
		panic(err)
	}
	return workflow.New(workflow.Config{Store: r.store, Modules: set, Log: slog.New(slog.DiscardHandler)})
}
func (r *rig) Online(id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.online[id]
}

func newRig(t *testing.T, edits ...func(*Config)) *rig {
	t.Helper()
	r := &rig{t: t, online: map[string]bool{}, secrets: map[string][]byte{}, now: time.UnixMilli(1_800_000_000_000)}
	st, err := store.Open(filepath.Join(t.TempDir(), "gateway.db"), func() time.Time { return r.now })
	must(t, err)
	t.Cleanup(func() { st.Close() })
	r.store = st
	r.artifactDir = filepath.Join(t.TempDir(), "artifacts")
	r.files, err = artifacts.New(r.artifactDir, st, slog.New(slog.DiscardHandler))
	must(t, err)
	r.drivers = &driver.Registry{}
	hardware, err := metal.New(hardwareOptions)
	must(t, err)
	mux := http.NewServeMux()
	c := Config{Store: st, Metal: hardware, Drivers: r.drivers, Commands: r, Enrol: r, Secrets: r, Artifacts: r, Workflows: r, Online: r.Online, Log: slog.New(slog.DiscardHandler)}
	for _, edit := range edits {
		edit(&c)
	}
	New(c).Register(mux.Handle)
	r.server = httptest.NewUnstartedServer(mux)
	r.server.EnableHTTP2 = true
	r.server.StartTLS()
	t.Cleanup(r.server.Close)
	r.token("admin", store.AllTenants, time.Time{}, AllPermissions)
	return r
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (r *rig) token(token, tenant string, expires time.Time, permissions ...string) {
	r.t.Helper()
	must(r.t, r.store.PutAPIToken(r.t.Context(), store.APIToken{Hash: sha256.Sum256([]byte(token)), Name: token, TenantID: tenant, Permissions: permissions, Created: r.now, Expires: expires}))
}

// as is an HTTP client with a token.
func (r *rig) as(token string) *http.Client {
	c := r.server.Client()
	return &http.Client{Transport: roundTripper(func(req *http.Request) (*http.Response, error) {
		if token != "" {
			req.Header.Set("Authorization", "Bearer "+token)
		}
		return c.Transport.RoundTrip(req)
	})}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (r *rig) sites(token string) computev1connect.SiteServiceClient {
	return computev1connect.NewSiteServiceClient(r.as(token), r.server.URL)
}
func (r *rig) metal(token string) computev1connect.MetalServiceClient {
	return computev1connect.NewMetalServiceClient(r.as(token), r.server.URL)
}

func call[Req, Res any](ctx context.Context, f func(context.Context, *connect.Request[Req]) (*connect.Response[Res], error), req *Req) (*Res, error) {
	res, err := f(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}

// wantError wants a wire code and a message that begins with text.
func wantError(t *testing.T, what string, err error, code connect.Code, text string) {
	t.Helper()
	var ce *connect.Error
	if !errors.As(err, &ce) || ce.Code() != code || !strings.HasPrefix(ce.Message(), text) {
		t.Errorf("%s = %v, want %v and %q", what, err, code, text)
	}
}

func TestEveryCallHasAPermission(t *testing.T) {
	var services []protoreflect.ServiceDescriptor
	for _, file := range []protoreflect.FileDescriptor{
		computev1.File_appliance_api_computev1_compute_proto, computev1.File_appliance_api_computev1_discovery_proto, computev1.File_appliance_api_computev1_iso_proto,
	} {
		for i := range file.Services().Len() {
			services = append(services, file.Services().Get(i))
		}
	}
	n := 0
	for _, service := range services {
		for j := range service.Methods().Len() {
			m := service.Methods().Get(j)
			procedure := "/" + string(service.FullName()) + "/" + string(m.Name())
			if permissions[procedure] == "" {
				t.Errorf("%s has no permission", procedure)
			}
			// In a stream of requests the first one's content names it: TestImportRefusals, TestConsoleRefusals.
			if m.Input().Fields().ByName("tenant_id") == nil && !m.IsStreamingClient() {
				t.Errorf("%s names no tenant", procedure)
			}
			n++
		}
	}
	if n != len(permissions) {
		t.Errorf("permissions hold %d calls, the API has %d", len(permissions), n)
	}
}

func TestTokens(t *testing.T) {
	r := newRig(t)
	r.token("reader", "acme", time.Time{}, "compute:sites:read")
	r.token("writer", "acme", time.Time{}, "compute:sites:write", "compute:sites:read")
	r.token("expired", "acme", r.now, AllPermissions)
	r.token("lasting", "acme", r.now.Add(time.Minute), AllPermissions)
	r.token("nothing", "acme", time.Time{})
	ctx := t.Context()
	for _, c := range []struct {
		token, tenant string
		write         bool
		code          connect.Code
		text          string
	}{
		{"reader", "acme", false, 0, ""},
		{"reader", "acme", true, connect.CodePermissionDenied, "PERMISSION_DENIED: the token lacks compute:sites:write"},
		{"writer", "acme", true, 0, ""},
		{"writer", "other", true, connect.CodePermissionDenied, "PERMISSION_DENIED: the token is not tenant other's"},
		{"writer", "", true, connect.CodeInvalidArgument, "INVALID_INPUT: tenant_id is missing"},
		{"admin", "other", true, 0, ""},
		{"admin", "*", true, connect.CodeInvalidArgument, "INVALID_INPUT: tenant_id"},
		{"admin", "../x", true, connect.CodeInvalidArgument, "INVALID_INPUT: tenant_id"},
		{"lasting", "acme", false, 0, ""},
		{"expired", "acme", false, connect.CodeUnauthenticated, "PERMISSION_DENIED: the bearer token has expired"},
		{"nothing", "acme", false, connect.CodePermissionDenied, "PERMISSION_DENIED: the token lacks"},
		{"unknown", "acme", false, connect.CodeUnauthenticated, "PERMISSION_DENIED: the bearer token is unknown"},
		{"", "acme", false, connect.CodeUnauthenticated, "PERMISSION_DENIED: a bearer token is missing"},
	} {
		var err error
		if c.write {
			_, err = call(ctx, r.sites(c.token).Add, &computev1.AddSiteRequest{TenantId: c.tenant, Name: "lab"})
		} else {
			_, err = call(ctx, r.sites(c.token).List, &computev1.ListSitesRequest{TenantId: c.tenant})
		}
		what := "call of " + c.token + " for " + c.tenant
		if c.code == 0 {
			if err != nil {
				t.Errorf("%s = %v, want nil", what, err)
			}
			continue
		}
		wantError(t, what, err, c.code, c.text)
	}
}

// TestBodyOfAStranger: nothing that a stranger sends is read.
func TestBodyOfAStranger(t *testing.T) {
	r := newRig(t)
	body := &countingReader{}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.server.URL+computev1connect.SiteServiceListProcedure, body)
	must(t, err)
	req.Header.Set("Content-Type", "application/proto")
	res, err := r.as("unknown").Do(req)
	if err == nil {
		defer res.Body.Close()
		if res.StatusCode != http.StatusUnauthorized {
			t.Errorf("status = %d, want 401", res.StatusCode)
		}
	}
	if body.n > 8<<20 {
		t.Errorf("%d bytes of a stranger were taken", body.n)
	}
}

type countingReader struct{ n int }

func (c *countingReader) Read(p []byte) (int, error) {
	if c.n > 64<<20 {
		return 0, io.EOF
	}
	clear(p)
	c.n += len(p)
	return len(p), nil
}

func TestSites(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	res, err := call(ctx, r.sites("admin").Add, &computev1.AddSiteRequest{TenantId: "acme", Name: "lab"})
	must(t, err)
	if res.JoinString != "bc1."+res.Site.Id || res.Site.State != "new" {
		t.Errorf("Add = %v", res)
	}
	_, err = call(ctx, r.sites("admin").Add, &computev1.AddSiteRequest{TenantId: "acme", Name: "lab"})
	wantError(t, "a second site of the name", err, connect.CodeAlreadyExists, "INVALID_INPUT: taken")
	_, err = call(ctx, r.sites("admin").Add, &computev1.AddSiteRequest{TenantId: "acme", Name: "Lab 1"})
	wantError(t, "a bad name", err, connect.CodeInvalidArgument, "INVALID_INPUT: name")
	_, err = call(ctx, r.sites("admin").Add, &computev1.AddSiteRequest{TenantId: "other", Name: "lab"})
	must(t, err)

	r.enrolBox(res.Site.Id)
	list, err := call(ctx, r.sites("admin").List, &computev1.ListSitesRequest{TenantId: "acme"})
	must(t, err)
	if len(list.Items) != 1 || list.Items[0].State != "offline" || list.Items[0].AgentId != "ag_box" || !slices.Equal(list.Items[0].Drivers, []string{"ipmi@1.0.0", "acme-bmc@2.0.0"}) {
		t.Errorf("List = %v", list)
	}
	r.online["ag_box"] = true
	list, err = call(ctx, r.sites("admin").List, &computev1.ListSitesRequest{TenantId: "acme"})
	must(t, err)
	if list.Items[0].State != "online" {
		t.Errorf("state = %s, want online", list.Items[0].State)
	}

	pools := computev1connect.NewPoolServiceClient(r.as("admin"), r.server.URL)
	_, err = call(ctx, pools.Add, &computev1.AddPoolRequest{TenantId: "acme", Name: "metal", Site: "nowhere"})
	wantError(t, "pool of no site", err, connect.CodeNotFound, "NOT_FOUND: ")
	_, err = call(ctx, pools.Add, &computev1.AddPoolRequest{TenantId: "third", Name: "metal", Site: res.Site.Id})
	wantError(t, "pool at another tenant's site", err, connect.CodeNotFound, "NOT_FOUND: ")
	pool, err := call(ctx, pools.Add, &computev1.AddPoolRequest{TenantId: "acme", Name: "metal", Site: "lab"})
	must(t, err)
	if got, err := call(ctx, pools.List, &computev1.ListPoolsRequest{TenantId: "acme"}); err != nil || len(got.Items) != 1 || !proto.Equal(got.Items[0], pool.Pool) {
		t.Errorf("pools = %v, %v", got, err)
	}
}

// enrolBox records a box that hosts ipmi, and acme-bmc for power only.
func (r *rig) enrolBox(siteID string) {
	r.t.Helper()
	ctx := context.Background()
	token := store.Token{Hash: sha256.Sum256([]byte(siteID)), Role: agentv1.Role_ROLE_SITE, SiteID: siteID, Expires: r.now.Add(time.Hour)}
	must(r.t, r.store.AddToken(ctx, token))
	_, err := r.store.Enrol(ctx, store.Enrolment{Token: &token, Agent: store.Agent{ID: "ag_box", Role: agentv1.Role_ROLE_SITE, SiteID: siteID},
		Certificate: store.Certificate{AgentID: "ag_box", DER: []byte{1}, NotAfter: r.now.Add(time.Hour), RenewAfter: r.now}})
	must(r.t, err)
	_, err = r.store.Greeted(ctx, "ag_box", &agentv1.Hello{BootId: "b", JournalEpoch: "j", EventEpoch: "e", Drivers: []*agentv1.AdvertisedDriver{
		{Id: "ipmi", Version: "1.0.0", Kinds: []string{"power", "management"}}, {Id: "acme-bmc", Version: "2.0.0", Kinds: []string{"power"}}}})
	must(r.t, err)
}

// fixture is a site with a box, a pool and a credential.
func (r *rig) fixture() {
	r.t.Helper()
	ctx := r.t.Context()
	must(r.t, r.store.AddSite(ctx, store.Site{ID: "site_1", TenantID: "acme", Name: "lab", Created: r.now}))
	must(r.t, r.store.AddPool(ctx, store.Pool{ID: "pool_1", TenantID: "acme", Name: "metal", SiteID: "site_1", Created: r.now}))
	r.enrolBox("site_1")
	secrets := computev1connect.NewSecretServiceClient(r.as("admin"), r.server.URL)
	res, err := call(ctx, secrets.Put, &computev1.PutSecretRequest{TenantId: "acme", Name: "bmc", Value: []byte(`{"username":"u","password":"hunter2"}`)})
	must(r.t, err)
	if res.Ref != "secret://acme/bmc" || string(r.secrets[res.Ref]) != `{"username":"u","password":"hunter2"}` {
		r.t.Fatalf("Put = %v, kept %q", res, r.secrets[res.Ref])
	}
}

func enrollment(change func(e *computev1.EnrollMachineRequest)) *computev1.EnrollMachineRequest {
	e := &computev1.EnrollMachineRequest{TenantId: "acme", Name: "m1", Pool: "metal", Macs: []string{"52-54-00-00-00-01"}, ProductUuid: "4C4C4544-0042-3010-8056-B4C04F303232",
		Bmc: &computev1.Bmc{Driver: "ipmi", Address: "10.0.0.5", CredentialsRef: "secret://acme/bmc"}}
	change(e)
	return e
}

// TestEnrollTakenMAC: who has a MAC is said of the site that it is for, though the tenant
// has a machine of that MAC elsewhere.
func TestEnrollTakenMAC(t *testing.T) {
	r := newRig(t)
	r.fixture()
	ctx := t.Context()
	const mac = "52:54:00:00:00:01"
	must(t, r.store.AddSite(ctx, store.Site{ID: "site_2", TenantID: "acme", Name: "shed", Created: r.now}))
	must(t, r.store.AddPool(ctx, store.Pool{ID: "pool_2", TenantID: "acme", Name: "wood", SiteID: "site_2", Created: r.now}))
	must(t, r.store.AddMachine(ctx, store.Machine{ID: "node_0", TenantID: "acme", Name: "elsewhere", PoolID: "pool_2", SiteID: "site_2", MACs: []string{mac}}))
	must(t, r.store.AddMachine(ctx, store.Machine{ID: "node_1", TenantID: "acme", Name: "here", PoolID: "pool_1", SiteID: "site_1", MACs: []string{mac}}))
	_, err := call(ctx, r.metal("admin").Enroll, enrollment(func(*computev1.EnrollMachineRequest) {}))
	wantError(t, "a MAC that another machine has", err, connect.CodeAlreadyExists, "INVALID_INPUT: taken: MAC "+mac+" is machine here's")
}

func TestEnroll(t *testing.T) {
	r := newRig(t)
	r.fixture()
	ctx := t.Context()
	c := r.metal("admin")
	res, err := call(ctx, c.Enroll, enrollment(func(*computev1.EnrollMachineRequest) {}))
	must(t, err)
	if m := res.Machine; m.State != "enrolled" || m.PoolId != "pool_1" || !slices.Equal(m.Macs, []string{"52:54:00:00:00:01"}) || m.AgentId != "" {
		t.Errorf("Enroll = %v", m)
	}
	for _, bad := range []struct {
		title  string
		change func(e *computev1.EnrollMachineRequest)
		code   connect.Code
		text   string
	}{
		{"same name", func(e *computev1.EnrollMachineRequest) { e.Macs = nil }, connect.CodeAlreadyExists, "INVALID_INPUT: taken"},
		{"same MAC", func(e *computev1.EnrollMachineRequest) { e.Name = "m2" }, connect.CodeAlreadyExists, "INVALID_INPUT: taken"},
		{"no pool", func(e *computev1.EnrollMachineRequest) { e.Pool = "" }, connect.CodeNotFound, "NOT_FOUND: "},
		{"bad driver", func(e *computev1.EnrollMachineRequest) { e.Bmc.Driver = "IPMI!" }, connect.CodeInvalidArgument, "INVALID_INPUT: bmc.driver"},
		{"literal secret", func(e *computev1.EnrollMachineRequest) { e.Bmc.CredentialsRef = "hunter2" }, connect.CodeInvalidArgument, "INVALID_INPUT: bmc.credentials_ref"},
		{"another tenant's secret", func(e *computev1.EnrollMachineRequest) { e.Bmc.CredentialsRef = "secret://other/bmc" }, connect.CodePermissionDenied, "PERMISSION_DENIED: "},
		{"no such secret", func(e *computev1.EnrollMachineRequest) { e.Bmc.CredentialsRef = "secret://acme/none" }, connect.CodeInvalidArgument, "INVALID_INPUT: there is no secret"},
		{"bad UUID", func(e *computev1.EnrollMachineRequest) { e.ProductUuid = "x" }, connect.CodeInvalidArgument, "INVALID_INPUT: product_uuid"},
		{"no BMC", func(e *computev1.EnrollMachineRequest) { e.Bmc = nil }, connect.CodeInvalidArgument, "INVALID_INPUT: bmc.driver"},
	} {
		_, err := call(ctx, c.Enroll, enrollment(bad.change))
		wantError(t, bad.title, err, bad.code, bad.text)
		if err != nil && strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: the error repeats the secret", bad.title)
		}
	}
	list, err := call(ctx, c.List, &computev1.ListMachinesRequest{TenantId: "acme"})
	must(t, err)
	if len(list.Items) != 1 {
		t.Errorf("%d machines, want 1: a refused enrolment left something", len(list.Items))
	}
	_, err = call(ctx, c.Get, &computev1.GetMachineRequest{TenantId: "other", Machine: res.Machine.Id})
	wantError(t, "another tenant's machine", err, connect.CodeNotFound, "NOT_FOUND: ")
	secrets := computev1connect.NewSecretServiceClient(r.as("admin"), r.server.URL)
	_, err = call(ctx, secrets.Put, &computev1.PutSecretRequest{TenantId: "acme", Name: "bad name", Value: []byte("x")})
	wantError(t, "bad secret name", err, connect.CodeInvalidArgument, "INVALID_INPUT: secret name")
}

func TestPower(t *testing.T) {
	r := newRig(t)
	r.fixture()
	ctx := t.Context()
	c := r.metal("admin")
	for name, driver := range map[string]string{"m1": "ipmi", "m2": "acme-bmc"} {
		_, err := call(ctx, c.Enroll, enrollment(func(e *computev1.EnrollMachineRequest) { e.Name, e.Bmc.Driver, e.Macs = name, driver, nil }))
		must(t, err)
	}
	_, err := call(ctx, c.GetPower, &computev1.GetPowerRequest{TenantId: "acme", Machine: "m1"})
	wantError(t, "power while the box is offline", err, connect.CodeUnavailable, "DRIVER_ERROR: unavailable: the site's box is offline")

	r.online["ag_box"] = true
	r.outcome.Result, err = proto.Marshal(&bmcv1.BmcOperationResult{ResultJson: `"off"`})
	must(t, err)
	power, err := call(ctx, c.GetPower, &computev1.GetPowerRequest{TenantId: "acme", Machine: "m1"})
	if err != nil || power.Power != "off" {
		t.Errorf("GetPower = %v, %v, want off", power, err)
	}
	set, err := call(ctx, c.SetPower, &computev1.SetPowerRequest{TenantId: "acme", Machine: "m1", Action: "on"})
	if err != nil || set.CommandId != "cmd_1" {
		t.Errorf("SetPower = %v, %v", set, err)
	}
	_, err = call(ctx, c.SetBootDevice, &computev1.SetBootDeviceRequest{TenantId: "acme", Machine: "m1", Device: "pxe", Efi: true})
	must(t, err)
	var kinds []string
	for _, spec := range r.specs {
		kinds = append(kinds, spec.Kind+" "+spec.Args.(*bmcv1.BmcOperationRequest).ArgsJson)
		if spec.AgentID != "ag_box" || !strings.HasPrefix(spec.TargetNodeID, "node_") || !slices.Equal(spec.SecretRefs, []string{"secret://acme/bmc"}) || len(spec.Traceparent) != 55 {
			t.Errorf("command %+v", spec)
		}
	}
	if want := []string{"bmc.query ", `bmc.power ["on"]`, `bmc.boot [{"device":"pxe","persistent":false,"efi":true}]`}; !slices.Equal(kinds, want) {
		t.Errorf("commands = %q, want %q", kinds, want)
	}

	events, err := r.store.Events(ctx, store.EventFilter{SiteIDs: []string{"site_1"}, Name: "power.set"})
	if err != nil || len(events) != 1 || !strings.Contains(events[0].BodyJSON, `"by":"admin"`) || !strings.Contains(events[0].BodyJSON, `"action":"on"`) {
		t.Errorf("audit = %+v, %v, want who set what", events, err)
	}

	// acme-bmc serves power, by its box's word, and nothing else.
	_, err = call(ctx, c.SetPower, &computev1.SetPowerRequest{TenantId: "acme", Machine: "m2", Action: "on"})
	must(t, err)
	_, err = call(ctx, c.SetBootDevice, &computev1.SetBootDeviceRequest{TenantId: "acme", Machine: "m2", Device: "pxe"})
	wantError(t, "boot device of acme-bmc", err, connect.CodeFailedPrecondition, "UNSUPPORTED: bmc-driver-unsupported: ")
	_, err = call(ctx, c.Inspect, &computev1.InspectRequest{TenantId: "acme", Machine: "m2"})
	wantError(t, "inspect with acme-bmc", err, connect.CodeFailedPrecondition, "UNSUPPORTED: bmc-driver-unsupported: ")

	_, err = call(ctx, c.SetPower, &computev1.SetPowerRequest{TenantId: "acme", Machine: "m1", Action: "explode"})
	wantError(t, "unknown action", err, connect.CodeInvalidArgument, "INVALID_INPUT: action")
	r.outcome = commands.Outcome{Err: errs.New(errs.BindingMismatch, "bound to another credential")}
	_, err = call(ctx, c.GetPower, &computev1.GetPowerRequest{TenantId: "acme", Machine: "m1"})
	wantError(t, "a BMC's refusal", err, connect.CodeAborted, "DRIVER_ERROR: binding-mismatch: bound to another credential")
	var ce *connect.Error
	if errors.As(err, &ce) {
		if len(ce.Details()) != 1 {
			t.Fatalf("%d details, want 1", len(ce.Details()))
		}
		value, err := ce.Details()[0].Value()
		if detail, ok := value.(*agentv1.Error); err != nil || !ok || detail.Code != "DRIVER_ERROR/binding-mismatch" || detail.Retryable {
			t.Errorf("detail = %v, %v", value, err)
		}
	}
}

func TestDeploy(t *testing.T) {
	r := newRig(t)
	r.fixture()
	ctx := t.Context()
	c := r.metal("admin")
	_, err := call(ctx, c.Enroll, enrollment(func(*computev1.EnrollMachineRequest) {}))
	must(t, err)
	_, err = call(ctx, c.Enroll, enrollment(func(e *computev1.EnrollMachineRequest) { e.Name, e.Macs = "bare", nil }))
	must(t, err)
	deploy := func(change func(d *computev1.DeployRequest)) error {
		d := &computev1.DeployRequest{TenantId: "acme", Machine: "m1", Image: "node", DiskSerial: "S1", SshAuthorizedKeys: []string{"ssh-ed25519 AAAA operator"}}
		change(d)
		_, err := call(ctx, c.Deploy, d)
		return err
	}
	wantError(t, "unknown image", deploy(func(*computev1.DeployRequest) {}), connect.CodeNotFound, "NOT_FOUND: image")

	artifacts := computev1connect.NewArtifactServiceClient(r.as("admin"), r.server.URL)
	stream := artifacts.Import(ctx)
	must(t, stream.Send(header("acme", "node")))
	for range 3 {
		must(t, stream.Send(&computev1.ImportArtifactRequest{Part: &computev1.ImportArtifactRequest_Data{Data: []byte("abc")}}))
	}
	res, err := stream.CloseAndReceive()
	must(t, err)
	if res.Msg.Artifact.SizeBytes != 9 || string(r.imported) != "abcabcabc" {
		t.Errorf("Import = %v of %q", res.Msg, r.imported)
	}

	wantError(t, "no disk", deploy(func(d *computev1.DeployRequest) { d.DiskSerial = "" }), connect.CodeInvalidArgument, "INVALID_INPUT: disk_serial")
	wantError(t, "bad key", deploy(func(d *computev1.DeployRequest) { d.SshAuthorizedKeys = []string{"x"} }), connect.CodeInvalidArgument, "INVALID_INPUT: ssh_authorized_keys[0]")
	wantError(t, "no MAC", deploy(func(d *computev1.DeployRequest) { d.Machine = "bare" }), connect.CodeFailedPrecondition, "INVALID_INPUT: no-mac")
	must(t, deploy(func(*computev1.DeployRequest) {}))
	p := r.started[len(r.started)-1]
	if p.Image == nil || p.Image.SHA256 != strings.Repeat("a", 64) || p.Hostname != "m1" || p.DiskSerial != "S1" {
		t.Errorf("workflow got %+v", p)
	}
	wantError(t, "a second workflow", deploy(func(*computev1.DeployRequest) {}), connect.CodeFailedPrecondition, "INVALID_INPUT: workflow-running")

	workflows := computev1connect.NewWorkflowServiceClient(r.as("admin"), r.server.URL)
	list, err := call(ctx, workflows.List, &computev1.ListWorkflowsRequest{TenantId: "acme"})
	must(t, err)
	if len(list.Items) != 1 || list.Items[0].State != "running" || len(list.Items[0].Steps) != 13 || list.Items[0].Steps[12].Name != "node.wait" {
		t.Errorf("List = %v", list)
	}
	_, err = call(ctx, workflows.Get, &computev1.GetWorkflowRequest{TenantId: "other", Id: list.Items[0].Id})
	wantError(t, "another tenant's workflow", err, connect.CodeNotFound, "NOT_FOUND: ")
	m, err := call(ctx, c.Get, &computev1.GetMachineRequest{TenantId: "acme", Machine: "m1"})
	if err != nil || m.Machine.State != metal.Deploying {
		t.Errorf("machine = %v, %v, want deploying", m, err)
	}
}

func header(tenant, name string) *computev1.ImportArtifactRequest {
	return &computev1.ImportArtifactRequest{Part: &computev1.ImportArtifactRequest_Header{Header: &computev1.ImportHeader{TenantId: tenant, Name: name, Arch: "amd64", Format: "raw.zst"}}}
}

// TestImportKeepsNames: a tenant cannot give another meaning to a name that
// another tenant's deploys go by, for another architecture neither.
func TestImportKeepsNames(t *testing.T) {
	r := newRig(t)
	for _, tenant := range []string{"acme", "other"} {
		r.token(tenant, tenant, time.Time{}, "compute:artifacts:write")
	}
	put := func(tenant, name, arch string) error {
		h := header(tenant, name)
		h.GetHeader().Arch = arch
		stream := computev1connect.NewArtifactServiceClient(r.as(tenant), r.server.URL).Import(t.Context())
		for _, frame := range []*computev1.ImportArtifactRequest{h, {Part: &computev1.ImportArtifactRequest_Data{Data: []byte(tenant)}}} {
			if stream.Send(frame) != nil {
				break // refused meanwhile: the answer says why
			}
		}
		_, err := stream.CloseAndReceive()
		return err
	}
	must(t, put("acme", "node", "amd64"))
	must(t, put("acme", "node", "amd64"))
	must(t, put("other", "their-node", "amd64"))
	for _, arch := range []string{"amd64", "arm64"} {
		wantError(t, "another tenant's name", put("other", "node", arch), connect.CodeAlreadyExists, "INVALID_INPUT: taken")
	}
	a, err := r.store.Artifact(t.Context(), "node", "")
	if err != nil || a.SizeBytes != uint64(len("acme")) {
		t.Errorf("node has %d bytes, %v, want the first tenant's", a.SizeBytes, err)
	}
}

func TestImportRefusals(t *testing.T) {
	r := newRig(t)
	r.token("importer", "acme", time.Time{}, "compute:artifacts:write")
	r.token("reader", "acme", time.Time{}, "compute:artifacts:read")
	data := &computev1.ImportArtifactRequest{Part: &computev1.ImportArtifactRequest_Data{Data: []byte("abc")}}
	for _, c := range []struct {
		title, token string
		frames       []*computev1.ImportArtifactRequest
		code         connect.Code
		text         string
	}{
		{"allowed", "importer", []*computev1.ImportArtifactRequest{header("acme", "node"), data}, 0, ""},
		{"no permission", "reader", []*computev1.ImportArtifactRequest{header("acme", "node"), data}, connect.CodePermissionDenied, "PERMISSION_DENIED: "},
		{"another tenant", "importer", []*computev1.ImportArtifactRequest{header("other", "node"), data}, connect.CodePermissionDenied, "PERMISSION_DENIED: "},
		{"no header", "importer", []*computev1.ImportArtifactRequest{data}, connect.CodeInvalidArgument, "INVALID_INPUT: the first message"},
		{"nothing", "importer", nil, connect.CodeInvalidArgument, "INVALID_INPUT: the first message"},
		{"two headers", "importer", []*computev1.ImportArtifactRequest{header("acme", "node"), header("acme", "node")}, connect.CodeInvalidArgument, "INVALID_INPUT: only the first"},
		{"a name like a digest", "importer", []*computev1.ImportArtifactRequest{header("acme", strings.Repeat("a", 64)), data}, connect.CodeInvalidArgument, "INVALID_INPUT: name"},
		{"a name with a path", "importer", []*computev1.ImportArtifactRequest{header("acme", "../x"), data}, connect.CodeInvalidArgument, "INVALID_INPUT: name"},
		{"no bytes", "importer", []*computev1.ImportArtifactRequest{header("acme", "node")}, connect.CodeInvalidArgument, "INVALID_INPUT: no bytes"},
	} {
		stream := computev1connect.NewArtifactServiceClient(r.as(c.token), r.server.URL).Import(t.Context())
		for _, frame := range c.frames {
			if err := stream.Send(frame); err != nil {
				break // refused meanwhile: the answer says why
			}
		}
		_, err := stream.CloseAndReceive()
		if c.code == 0 {
			must(t, err)
			continue
		}
		wantError(t, c.title, err, c.code, c.text)
	}
}

func TestEvents(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	for _, s := range []store.Site{{ID: "site_1", TenantID: "acme", Name: "lab"}, {ID: "site_2", TenantID: "other", Name: "lab"}} {
		must(t, r.store.AddSite(ctx, s))
		must(t, r.store.AddEvent(ctx, store.Event{SiteID: s.ID, Name: "thing.happened", Class: "audit", BodyJSON: `{"at":"` + s.TenantID + `"}`}))
	}
	must(t, r.store.AddEvent(ctx, store.Event{Name: "gateway.started", Class: "audit", BodyJSON: `{}`}))
	c := computev1connect.NewEventServiceClient(r.as("admin"), r.server.URL)
	for _, q := range []struct {
		req  *computev1.ListEventsRequest
		want int
	}{
		{&computev1.ListEventsRequest{TenantId: "acme"}, 1},
		{&computev1.ListEventsRequest{TenantId: "acme", Site: "lab"}, 1},
		{&computev1.ListEventsRequest{TenantId: "empty"}, 0},
	} {
		res, err := call(ctx, c.List, q.req)
		if err != nil || len(res.Items) != q.want {
			t.Errorf("List(%v) = %v, %v, want %d events", q.req, res, err, q.want)
		}
		for _, e := range res.GetItems() {
			if e.SiteId != "site_1" {
				t.Errorf("List(%v) tells %v", q.req, e)
			}
		}
	}
	_, err := call(ctx, c.List, &computev1.ListEventsRequest{TenantId: "acme", Site: "site_2"})
	wantError(t, "another tenant's site", err, connect.CodeNotFound, "NOT_FOUND: ")
	_, err = call(ctx, c.List, &computev1.ListEventsRequest{TenantId: "acme", Limit: 5000})
	wantError(t, "too many", err, connect.CodeInvalidArgument, "INVALID_INPUT: limit")
}
