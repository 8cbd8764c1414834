package api

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/api/computev1/computev1connect"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/provision"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/binding"
)

// hardwareOptions are what the rig's gateway knows about hardware.
var hardwareOptions = metal.Options{
	HardwareProfiles: map[string]metal.HardwareProfile{
		"gpu-redfish": {Description: "HGX hosts", Drivers: map[string]binding.Binding{
			"power": {Driver: "redfish"}, "management": {Driver: "redfish"}, "boot": {Driver: "ipxe"},
			"deploy": {Driver: "image-stream", Config: json.RawMessage(`{"window":"1h"}`)}}},
		"plain": {Drivers: map[string]binding.Binding{"boot": {Driver: "ipxe"}}},
	},
	BMCDrivers: map[string][]string{
		"conf-bmc": {"power.getPower", "power.setPower"}, "chooses": {"management.setBootDevice"},
		"drive-only": {"power.getPower", "power.setPower", "virtual-media.insert"},
	},
}

// nowhere is a driver of a process that a test does not have.
type nowhere struct{}

func (nowhere) Invoke(*driver.Context, string, string, json.RawMessage, json.RawMessage) (json.RawMessage, error) {
	return nil, io.EOF
}
func (nowhere) Stream(*driver.Context, string, string, json.RawMessage, json.RawMessage, io.ReadWriter) error {
	return io.EOF
}
func (nowhere) Validate(*driver.Context, json.RawMessage) error { return io.EOF }
func (nowhere) Health(context.Context) error                    { return io.EOF }

func (r *rig) register(m driver.Manifest) error {
	d, err := driver.Remote(m, nowhere{})
	must(r.t, err)
	return r.drivers.Register(d)
}

func (r *rig) driverService(token string) computev1connect.DriverServiceClient {
	return computev1connect.NewDriverServiceClient(r.as(token), r.server.URL)
}

func acme(version string) driver.Manifest {
	return driver.Manifest{ID: "acme-bmc", Version: version, RunsOn: "site", Kinds: []string{"virtual-media", "power"}, Capabilities: []string{"virtual-media", "nmi"},
		RetrySafe:    []string{"virtual-media.insert", "power.getPower", "virtual-media.eject"},
		ConfigSchema: json.RawMessage(`{"type":"object","properties":{"credentials":{"type":"string","x-bc":{"kind":"secret"},"default":"secret://root/hidden"}}}`)}
}

// TestListDrivers: declarations only, by id and then version, everything in
// them sorted, and narrowed by kind.
func TestListDrivers(t *testing.T) {
	r := newRig(t)
	for _, m := range []driver.Manifest{acme("1.10.0"), {ID: "redfish", Version: "1.0.0", RunsOn: "site", Kinds: []string{"power"}},
		acme("1.9.0"), {ID: "ipxe", Version: "1.0.0", RunsOn: "site", Kinds: []string{"boot"}}} {
		must(t, r.register(m))
	}
	ctx := t.Context()
	for kind, want := range map[string]string{
		"": "acme-bmc@1.9.0 acme-bmc@1.10.0 ipxe@1.0.0 redfish@1.0.0", "power": "acme-bmc@1.9.0 acme-bmc@1.10.0 redfish@1.0.0",
		"virtual-media": "acme-bmc@1.9.0 acme-bmc@1.10.0", "boot": "ipxe@1.0.0", "0-9": "", "raid": "",
	} {
		res, err := call(ctx, r.driverService("admin").List, &computev1.ListDriversRequest{TenantId: "root", Kind: kind})
		must(t, err)
		var got []string
		for _, d := range res.Items {
			got = append(got, d.Id+"@"+d.Version)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("List(%q) = %q, want %q", kind, got, want)
		}
	}
	for _, kind := range []string{"Power", "virtual_media", "a b", "a.b", "é", strings.Repeat("a", 65)} {
		_, err := call(ctx, r.driverService("admin").List, &computev1.ListDriversRequest{TenantId: "root", Kind: kind})
		wantError(t, "List of kind "+kind, err, connect.CodeInvalidArgument, "INVALID_INPUT: kind")
	}
}

// TestListDriversForm is the answer's JSON, byte for byte but for spaces: it
// holds no schema and thus nothing that a schema might hold.
func TestListDriversForm(t *testing.T) {
	r := newRig(t)
	must(t, r.register(acme("1.0.0")))
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.server.URL+computev1connect.DriverServiceListProcedure, strings.NewReader(`{"tenantId":"root","kind":"power"}`))
	must(t, err)
	req.Header.Set("Content-Type", "application/json")
	res, err := r.as("admin").Do(req)
	must(t, err)
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	must(t, err)
	var got any
	must(t, json.Unmarshal(body, &got))
	text, err := json.Marshal(got)
	must(t, err)
	want := `{"items":[{"capabilities":["nmi","virtual-media"],"id":"acme-bmc","kinds":["power","virtual-media"],"retrySafe":{"power":["getPower"],"virtual-media":["eject","insert"]},"runsOn":"site","version":"1.0.0"}]}`
	if res.StatusCode != http.StatusOK || string(text) != want {
		t.Errorf("List = %d %s, want %s", res.StatusCode, text, want)
	}
}

// TestNewCallsByPermissionAndTenant: each call is let through by its own
// permission on its own tenant, and by nothing else.
func TestNewCallsByPermissionAndTenant(t *testing.T) {
	r := newRig(t)
	r.fixture()
	calls := map[string]func(token, tenant string) error{
		"compute:drivers:read": func(token, tenant string) error {
			_, err := call(t.Context(), r.driverService(token).List, &computev1.ListDriversRequest{TenantId: tenant})
			return err
		},
		"compute:placement:read": func(token, tenant string) error {
			_, err := call(t.Context(), computev1connect.NewPlacementServiceClient(r.as(token), r.server.URL).Find, &computev1.PlacementRequest{TenantId: tenant})
			return err
		},
	}
	for _, permission := range []string{"compute:drivers:read", "compute:placement:read", "compute:metal:write", "compute:sites:read"} {
		r.token(permission, "acme", time.Time{}, permission)
	}
	r.token("other", "other", time.Time{}, AllPermissions)
	for permission, do := range calls {
		for _, token := range []string{"compute:drivers:read", "compute:placement:read", "compute:metal:write", "compute:sites:read"} {
			err := do(token, "acme")
			if token == permission {
				if err != nil {
					t.Errorf("%s with a token that may = %v", permission, err)
				}
				wantError(t, permission+" on another tenant", do(token, "other"), connect.CodePermissionDenied, "PERMISSION_DENIED: the token is not tenant other's")
				wantError(t, permission+" on no tenant", do(token, ""), connect.CodeInvalidArgument, "INVALID_INPUT: tenant_id")
				continue
			}
			wantError(t, permission+" with "+token, err, connect.CodePermissionDenied, "PERMISSION_DENIED: the token lacks "+permission)
		}
		wantError(t, permission+" without a token", do("", "acme"), connect.CodeUnauthenticated, "PERMISSION_DENIED: a bearer token is missing")
		wantError(t, permission+" by another tenant's token", do("other", "acme"), connect.CodePermissionDenied, "PERMISSION_DENIED: ")
		if err := do("admin", "acme"); err != nil {
			t.Errorf("%s by the administrator = %v", permission, err)
		}
	}
	for name, want := range map[string]string{
		computev1connect.WorkflowServiceStartProcedure: "compute:workflows:write", computev1connect.WorkflowServiceCancelProcedure: "compute:workflows:write",
		computev1connect.InstanceServiceApplyProcedure: "compute:instances:write", computev1connect.InstanceServiceRemoveProcedure: "compute:instances:write",
		computev1connect.InstanceServiceListProcedure: "compute:instances:read",
	} {
		if permissions[name] != want || !slices.Contains(Permissions(), want) {
			t.Errorf("%s needs %q, want %q", name, permissions[name], want)
		}
	}
}

// TestEnrollBindsDrivers: BMC, then hardware profile (the enrolment's before
// the pool's), then the enrolment's own drivers, each over the one before.
func TestEnrollBindsDrivers(t *testing.T) {
	r := newRig(t)
	r.fixture()
	ctx := t.Context()
	pools := computev1connect.NewPoolServiceClient(r.as("admin"), r.server.URL)
	pool, err := call(ctx, pools.Add, &computev1.AddPoolRequest{TenantId: "acme", Name: "gpu", Site: "lab", Policy: &computev1.PoolPolicy{HardwareProfile: "gpu-redfish"}})
	must(t, err)
	if pool.Pool.Policy.GetHardwareProfile() != "gpu-redfish" {
		t.Errorf("pool = %v", pool.Pool)
	}
	list, err := call(ctx, pools.List, &computev1.ListPoolsRequest{TenantId: "acme"})
	if err != nil || len(list.Items) != 2 || list.Items[0].Policy.GetHardwareProfile() != "gpu-redfish" || list.Items[1].Policy != nil {
		t.Errorf("pools = %v, %v", list, err)
	}
	_, err = call(ctx, pools.Add, &computev1.AddPoolRequest{TenantId: "acme", Name: "none", Site: "lab", Policy: &computev1.PoolPolicy{HardwareProfile: "nope"}})
	wantError(t, "pool with an unknown profile", err, connect.CodeInvalidArgument, `INVALID_INPUT: policy.hardware_profile "nope"`)

	bmc := `ipmi {"address":"10.0.0.5","credentials":"secret://acme/bmc"}`
	for i, tt := range []struct {
		title, pool, profile string
		own                  map[string]*computev1.DriverBinding
		want                 map[string]string
		named                string
	}{
		{"bmc alone", "metal", "", nil, map[string]string{"power": bmc, "management": bmc, "virtual-media": bmc}, ""},
		{"the pool's profile", "gpu", "", nil,
			map[string]string{"power": "redfish ", "management": "redfish ", "virtual-media": bmc, "boot": "ipxe ", "deploy": `image-stream {"window":"1h"}`}, "gpu-redfish"},
		{"the enrolment's profile before the pool's", "gpu", "plain", nil, map[string]string{"power": bmc, "management": bmc, "virtual-media": bmc, "boot": "ipxe "}, "plain"},
		{"own drivers over both", "gpu", "", map[string]*computev1.DriverBinding{"power": {Driver: "acme-bmc", ConfigJson: `{ "address": "x" }`}, "virtual-media": {Driver: "acme-bmc"}, "acme-cooling": {Driver: "fan"}},
			map[string]string{"power": `acme-bmc {"address":"x"}`, "management": "redfish ", "virtual-media": "acme-bmc ", "boot": "ipxe ", "deploy": `image-stream {"window":"1h"}`, "acme-cooling": "fan "}, "gpu-redfish"},
	} {
		res, err := call(ctx, r.metal("admin").Enroll, enrollment(func(e *computev1.EnrollMachineRequest) {
			e.Name, e.Macs, e.Pool, e.HardwareProfile, e.Drivers = fmt.Sprintf("b%d", i), nil, tt.pool, tt.profile, tt.own
		}))
		must(t, err)
		got, err := call(ctx, r.metal("admin").Get, &computev1.GetMachineRequest{TenantId: "acme", Machine: res.Machine.Id})
		must(t, err)
		for _, m := range []*computev1.Machine{res.Machine, got.Machine} {
			bound := map[string]string{}
			for kind, b := range m.Drivers {
				bound[kind] = b.Driver + " " + b.ConfigJson
			}
			if fmt.Sprint(bound) != fmt.Sprint(tt.want) || m.HardwareProfile != tt.named {
				t.Errorf("%s: bound %v by profile %q, want %v by %q", tt.title, bound, m.HardwareProfile, tt.want, tt.named)
			}
		}
	}
}

// TestEnrollRefusesBindings: what is wrong is said, and nothing is enrolled.
// nobody backs a declaration that is never invoked.
type nobody struct{ driver.Backend }

func TestEnrollRefusesBindings(t *testing.T) {
	r := newRig(t)
	r.fixture()
	ctx := t.Context()
	marked, err := driver.Remote(driver.Manifest{ID: "marked", Version: "1", RunsOn: "site", Kinds: []string{"power"},
		ConfigSchema: json.RawMessage(`{"type":"object","properties":{"token":{"type":"string","writeOnly":true}}}`)}, nobody{})
	must(t, err)
	must(t, r.drivers.Register(marked))
	many := map[string]*computev1.DriverBinding{}
	for i := range 33 {
		many[fmt.Sprintf("k%d", i)] = &computev1.DriverBinding{Driver: "a"}
	}
	one := func(kind, id, config string) map[string]*computev1.DriverBinding {
		return map[string]*computev1.DriverBinding{kind: {Driver: id, ConfigJson: config}}
	}
	for _, tt := range []struct {
		title, profile string
		own            map[string]*computev1.DriverBinding
		code           connect.Code
		text           string
	}{
		{"unknown profile", "nope", nil, connect.CodeInvalidArgument, `INVALID_INPUT: hardware_profile "nope"`},
		{"driver id", "", one("power", "Acme", ""), connect.CodeInvalidArgument, "INVALID_INPUT: drivers: kind"},
		{"no driver", "", one("power", "", "{}"), connect.CodeInvalidArgument, "INVALID_INPUT: drivers: kind"},
		{"config", "", one("power", "acme", "[]"), connect.CodeInvalidArgument, "INVALID_INPUT: drivers: kind"},
		{"kind", "", one("Power", "acme", ""), connect.CodeInvalidArgument, "INVALID_INPUT: drivers: kind"},
		{"too many", "", many, connect.CodeInvalidArgument, "INVALID_INPUT: drivers: 33 kinds"},
		{"another tenant's secret", "", one("power", "acme", `{"a":[{"credentials":"secret://other/bmc"}]}`), connect.CodePermissionDenied, "PERMISSION_DENIED: drivers"},
		{"a secret itself", "", one("power", "acme", `{"credentials":"hunter22"}`), connect.CodeInvalidArgument, "INVALID_INPUT: drivers: kind power: binding of acme: config.credentials: want a reference"},
		{"a secret itself in a field that the schema marks", "", one("power", "marked", `{"token":"hunter22"}`), connect.CodeInvalidArgument, "INVALID_INPUT: drivers.power: binding of marked: config.token: want a reference"},
		{"no reference", "", one("power", "acme", `{"credentials":"secret://acme"}`), connect.CodeInvalidArgument, "INVALID_INPUT: drivers"},
	} {
		_, err := call(ctx, r.metal("admin").Enroll, enrollment(func(e *computev1.EnrollMachineRequest) { e.HardwareProfile, e.Drivers = tt.profile, tt.own }))
		wantError(t, tt.title, err, tt.code, tt.text)
	}
	if list, err := call(ctx, r.metal("admin").List, &computev1.ListMachinesRequest{TenantId: "acme"}); err != nil || len(list.Items) != 0 {
		t.Errorf("%v, %v: a refused enrolment left something", list, err)
	}
	// The same with what is allowed.
	_, err = call(ctx, r.metal("admin").Enroll, enrollment(func(e *computev1.EnrollMachineRequest) {
		e.HardwareProfile, e.Drivers = "plain", one("power", "acme", `{"a":[{"credentials":"secret://acme/bmc"}]}`)
	}))
	must(t, err)
}

// TestEnrollChecksNoMoreOfTheDriver: about the BMC's driver enrolment asks for
// a well-formed id, and neither for a registered driver nor for right options.
func TestEnrollChecksNoMoreOfTheDriver(t *testing.T) {
	r := newRig(t)
	r.fixture()
	ctx := t.Context()
	for i, id := range []string{"unheard-of", "a", "redfish", strings.Repeat("a", 64)} {
		res, err := call(ctx, r.metal("admin").Enroll, enrollment(func(e *computev1.EnrollMachineRequest) {
			e.Name, e.Macs, e.Bmc.Driver, e.Bmc.DriverOptionsJson = fmt.Sprintf("c%d", i), nil, id, `{"anything":["goes"]}`
		}))
		if err != nil || res.Machine.Bmc.DriverOptionsJson != `{"anything":["goes"]}` || res.Machine.Drivers["power"].Driver != id {
			t.Errorf("Enroll with driver %s = %v, %v", id, res, err)
		}
	}
	for _, id := range []string{"", "Redfish", "a b", "../a", "-a", strings.Repeat("a", 65)} {
		_, err := call(ctx, r.metal("admin").Enroll, enrollment(func(e *computev1.EnrollMachineRequest) { e.Name, e.Macs, e.Bmc.Driver = "c9", nil, id }))
		wantError(t, "driver "+id, err, connect.CodeInvalidArgument, "INVALID_INPUT: bmc.driver")
	}
}

// TestDriverOptionsAreSent: what was enrolled goes out with every command.
func TestDriverOptionsAreSent(t *testing.T) {
	r := newRig(t)
	r.fixture()
	ctx := t.Context()
	_, err := call(ctx, r.metal("admin").Enroll, enrollment(func(e *computev1.EnrollMachineRequest) { e.Bmc.DriverOptionsJson = `{"cipherSuite":3}` }))
	must(t, err)
	r.online["ag_box"] = true
	_, err = call(ctx, r.metal("admin").SetPower, &computev1.SetPowerRequest{TenantId: "acme", Machine: "m1", Action: "on"})
	must(t, err)
	if got := r.specs[0].Args.(*bmcv1.BmcOperationRequest); got.DriverOptionsJson != `{"cipherSuite":3}` || got.Driver != "ipmi" {
		t.Errorf("sent %v", got)
	}
}

// TestVerbsRefusedUpFront: by configuration, then by the labels of the site's
// agent; what neither names is sent, and it is the agent that refuses.
func TestVerbsRefusedUpFront(t *testing.T) {
	r := newRig(t)
	r.fixture()
	ctx := t.Context()
	r.online["ag_box"] = true
	boot := func(id string) error {
		name := "v-" + id
		if _, err := r.store.Machine(ctx, "acme", name); err != nil {
			_, err := call(ctx, r.metal("admin").Enroll, enrollment(func(e *computev1.EnrollMachineRequest) { e.Name, e.Macs, e.Bmc.Driver = name, nil, id }))
			must(t, err)
		}
		_, err := call(ctx, r.metal("admin").SetBootDevice, &computev1.SetBootDeviceRequest{TenantId: "acme", Machine: name, Device: "pxe"})
		return err
	}
	wantError(t, "by configuration", boot("conf-bmc"), connect.CodeFailedPrecondition, "UNSUPPORTED: bmc-driver-unsupported: boot needs management.setBootDevice")
	wantError(t, "by the agent's labels", boot("acme-bmc"), connect.CodeFailedPrecondition, "UNSUPPORTED: bmc-driver-unsupported: boot needs management.setBootDevice")
	if len(r.specs) != 0 {
		t.Errorf("%d commands were sent for what was refused", len(r.specs))
	}
	must(t, boot("unheard-of"))
	must(t, boot("ipmi"))
	if len(r.specs) != 2 {
		t.Errorf("%d commands, want 2", len(r.specs))
	}
	// The agent advertises more: the same is let through.
	_, err := r.store.Greeted(ctx, "ag_box", &agentv1.Hello{BootId: "b", JournalEpoch: "j", EventEpoch: "e", Drivers: []*agentv1.AdvertisedDriver{
		{Id: "acme-bmc", Version: "2.0.0", Kinds: []string{"power", "management"}}}})
	must(t, err)
	must(t, boot("acme-bmc"))
	// It advertises the driver no more: nobody names it.
	_, err = r.store.Greeted(ctx, "ag_box", &agentv1.Hello{BootId: "b", JournalEpoch: "j", EventEpoch: "e"})
	must(t, err)
	must(t, boot("acme-bmc"))
}

func TestPlacement(t *testing.T) {
	r := newRig(t)
	r.fixture()
	ctx := t.Context()
	must(t, r.store.AddMachine(ctx, store.Machine{ID: "node_1", TenantID: "acme", Name: "m1", PoolID: "pool_1", SiteID: "site_1", State: metal.Deployed, Created: r.now}))
	enrol := func(id, siteID, machineID string, role agentv1.Role, h *agentv1.Hello) {
		t.Helper()
		token := store.Token{Hash: sha256.Sum256([]byte(id)), Role: role, SiteID: siteID, MachineID: machineID, Expires: r.now.Add(time.Hour)}
		must(t, r.store.AddToken(ctx, token))
		_, err := r.store.Enrol(ctx, store.Enrolment{Token: &token, Agent: store.Agent{ID: id, Role: role, SiteID: siteID, MachineID: machineID},
			Certificate: store.Certificate{Fingerprint: token.Hash, AgentID: id, DER: []byte{2}, NotAfter: r.now.Add(time.Hour), RenewAfter: r.now}})
		must(t, err)
		h.BootId, h.JournalEpoch, h.EventEpoch = "b", "j", "e"
		_, err = r.store.Greeted(ctx, id, h)
		must(t, err)
	}
	enrol("ag_node", "site_1", "node_1", agentv1.Role_ROLE_NODE, &agentv1.Hello{Capabilities: []string{"instance.network-policy"},
		Drivers: []*agentv1.AdvertisedDriver{{Id: "kata", Version: "3.0.0", Kinds: []string{"runtime"}}}})
	must(t, r.store.AddSite(ctx, store.Site{ID: "site_2", TenantID: "other", Name: "lab", Created: r.now}))
	enrol("ag_other", "site_2", "", agentv1.Role_ROLE_SITE, &agentv1.Hello{Drivers: []*agentv1.AdvertisedDriver{{Id: "ipmi", Version: "1.0.0", Kinds: []string{"power"}}}})
	r.online["ag_node"] = true

	c := computev1connect.NewPlacementServiceClient(r.as("admin"), r.server.URL)
	for _, tt := range []struct {
		title  string
		labels map[string]string
		site   string
		want   string
	}{
		{"everything, online first", nil, "", "ag_node ag_box"},
		{"a driver's version", map[string]string{"bc.dev/driver.kata": "3.0.0"}, "", "ag_node"},
		{"another version", map[string]string{"bc.dev/driver.kata": "3.0.1"}, "", ""},
		{"any version", map[string]string{"bc.dev/driver.kata": "*"}, "", "ag_node"},
		{"a kind", map[string]string{"bc.dev/driver-kind.ipmi.power": "1"}, "", "ag_box"},
		{"a capability", map[string]string{"bc.dev/cap.instance.network-policy": "*"}, "lab", "ag_node"},
		{"all of them", map[string]string{"bc.dev/driver.kata": "*", "bc.dev/driver.ipmi": "*"}, "", ""},
		{"a site", nil, "site_1", "ag_node ag_box"},
	} {
		res, err := call(ctx, c.Find, &computev1.PlacementRequest{TenantId: "acme", NodeLabels: tt.labels, Site: tt.site})
		must(t, err)
		var ids []string
		for _, p := range res.Items {
			ids = append(ids, p.AgentId)
		}
		if strings.Join(ids, " ") != tt.want {
			t.Errorf("%s: Find = %q, want %q", tt.title, ids, tt.want)
		}
	}
	res, err := call(ctx, c.Find, &computev1.PlacementRequest{TenantId: "acme"})
	must(t, err)
	if p := res.Items[0]; p.Role != "node" || p.MachineId != "node_1" || p.SiteId != "site_1" || !p.Online || p.Labels["bc.dev/driver-kind.kata.runtime"] != "1" {
		t.Errorf("candidate = %v", p)
	}
	if p := res.Items[1]; p.Role != "site" || p.MachineId != "" || p.Online {
		t.Errorf("candidate = %v", p)
	}
	_, err = call(ctx, c.Find, &computev1.PlacementRequest{TenantId: "acme", Site: "site_2"})
	wantError(t, "another tenant's site", err, connect.CodeNotFound, "NOT_FOUND: ")
	_, err = call(ctx, c.Find, &computev1.PlacementRequest{TenantId: "acme", NodeLabels: map[string]string{"k": ""}})
	wantError(t, "an empty value", err, connect.CodeInvalidArgument, "INVALID_INPUT: node_labels")
}

// TestWithoutMetal: a gateway that leaves metal out serves everything else.
func TestWithoutMetal(t *testing.T) {
	r := newRig(t)
	mux := http.NewServeMux()
	New(Config{Store: r.store, Drivers: &driver.Registry{}, Commands: r, Enrol: r, Secrets: r, Artifacts: r, Workflows: r, Online: r.Online, Log: slog.New(slog.DiscardHandler)}).Register(mux.Handle)
	bare := httptest.NewServer(mux)
	defer bare.Close()
	ctx := t.Context()
	_, err := call(ctx, computev1connect.NewMetalServiceClient(r.as("admin"), bare.URL).List, &computev1.ListMachinesRequest{TenantId: "acme"})
	wantError(t, "machines", err, connect.CodeUnimplemented, "")
	_, err = call(ctx, computev1connect.NewPoolServiceClient(r.as("admin"), bare.URL).List, &computev1.ListPoolsRequest{TenantId: "acme"})
	wantError(t, "pools", err, connect.CodeUnimplemented, "")
	drivers, err := call(ctx, computev1connect.NewDriverServiceClient(r.as("admin"), bare.URL).List, &computev1.ListDriversRequest{TenantId: "acme"})
	if err != nil || len(drivers.Items) != 0 {
		t.Errorf("drivers = %v, %v, want none", drivers, err)
	}
	if _, err := call(ctx, computev1connect.NewSiteServiceClient(r.as("admin"), bare.URL).List, &computev1.ListSitesRequest{TenantId: "acme"}); err != nil {
		t.Errorf("sites = %v", err)
	}
	// Who may not is told so, whether there is anything or not.
	r.token("reader", "acme", time.Time{}, "compute:sites:read")
	_, err = call(ctx, computev1connect.NewMetalServiceClient(r.as("reader"), bare.URL).List, &computev1.ListMachinesRequest{TenantId: "acme"})
	wantError(t, "machines without the permission", err, connect.CodePermissionDenied, "PERMISSION_DENIED: ")
}

// TestPermissionMatrix: every call with every permission. One lets it through,
// and that on the token's own tenant alone.
func TestPermissionMatrix(t *testing.T) {
	r := newRig(t)
	for _, permission := range Permissions() {
		r.token(permission, "acme", time.Time{}, permission)
	}
	post := func(procedure, token, tenant string) (status int, body string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.server.URL+procedure, strings.NewReader(`{"tenantId":"`+tenant+`"}`))
		must(t, err)
		req.Header.Set("Content-Type", "application/json")
		res, err := r.as(token).Do(req)
		must(t, err)
		defer res.Body.Close()
		data, err := io.ReadAll(res.Body)
		must(t, err)
		return res.StatusCode, string(data)
	}
	for procedure, need := range permissions {
		if procedure == computev1connect.ArtifactServiceImportProcedure || procedure == computev1connect.IsoServiceAddProcedure {
			continue // streams: TestImportRefusals, TestISOCatalog
		}
		for _, permission := range Permissions() {
			status, body := post(procedure, permission, "acme")
			if denied := status == http.StatusForbidden && strings.Contains(body, "PERMISSION_DENIED: the token lacks "+need); denied == (permission == need) {
				t.Errorf("%s with %s = %d %s, want it let through: %t", procedure, permission, status, body, permission == need)
			}
		}
		if procedure == computev1connect.MetalServiceConsoleProcedure || procedure == computev1connect.SiteServiceHttpProxyProcedure {
			continue // streams, which this body opens none of: TestConsoleRefusals, TestHttpProxy
		}
		if status, body := post(procedure, need, "other"); status != http.StatusForbidden || !strings.Contains(body, "PERMISSION_DENIED: the token is not tenant other's") {
			t.Errorf("%s on another tenant = %d %s", procedure, status, body)
		}
		if status, body := post(procedure, "", "acme"); status != http.StatusUnauthorized {
			t.Errorf("%s without a token = %d %s", procedure, status, body)
		}
	}
}

// starter is an engine that only counts.
type starter struct {
	Workflows
	started []string
}

func (s *starter) StartProfile(_ context.Context, profile string, m store.Machine, _ string) (string, error) {
	s.started = append(s.started, profile+" on "+m.Name)
	return "wf_1", nil
}

// TestProfilesRefusedUpFront: a procedure with a registered step that the
// machine's BMC driver does not serve is refused before its first step.
func TestProfilesRefusedUpFront(t *testing.T) {
	r := newRig(t)
	r.fixture()
	ctx := t.Context()
	hardware, err := metal.New(hardwareOptions)
	must(t, err)
	bmcs, err := hardware.Module()
	must(t, err)
	set, err := module.Join(bmcs, provision.Module(
		module.Profile{Name: "cycle", Steps: []module.ProfileStep{{Uses: "power.setPower", With: json.RawMessage(`["cycle"]`)}}},
		module.Profile{Name: "boot-iso", Steps: []module.ProfileStep{{Uses: "power.setPower", With: json.RawMessage(`["off"]`)}, {Uses: "media.insert", With: json.RawMessage(`["https://x/a.iso"]`)}}},
		module.Profile{Name: "own-driver", Drivers: map[string]binding.Binding{"bios": {Driver: "acme-bios"}}, Steps: []module.ProfileStep{{Uses: "bios.applySettings", On: "node"}}},
	))
	must(t, err)
	for i, id := range []string{"ipmi", "conf-bmc", "acme-bmc", "unheard-of"} {
		must(t, r.store.AddMachine(ctx, store.Machine{ID: fmt.Sprintf("node_%d", i), TenantID: "acme", Name: id, PoolID: "pool_1", SiteID: "site_1", BMC: store.BMC{Driver: id}, State: metal.Enrolled, Created: r.now}))
	}
	engine := &starter{}
	mux := http.NewServeMux()
	New(Config{Store: r.store, Metal: hardware, Profiles: set, Drivers: r.drivers, Commands: r, Enrol: r, Secrets: r, Artifacts: r, Workflows: engine, Online: r.Online, Log: slog.New(slog.DiscardHandler)}).Register(mux.Handle)
	server := httptest.NewServer(mux)
	defer server.Close()
	c := computev1connect.NewWorkflowServiceClient(r.as("admin"), server.URL)
	for _, tt := range []struct {
		profile, machine string
		ok               bool
	}{
		{"cycle", "ipmi", true},
		{"cycle", "conf-bmc", true},
		{"cycle", "acme-bmc", true}, // its label says power
		{"cycle", "unheard-of", true},
		{"boot-iso", "ipmi", false},
		{"boot-iso", "conf-bmc", false},
		{"boot-iso", "acme-bmc", false},
		{"boot-iso", "unheard-of", true},
		{"own-driver", "ipmi", true}, // not the BMC's driver's
		{"unknown", "ipmi", true},    // the engine says what is wrong with it
	} {
		before := len(engine.started)
		_, err := call(ctx, c.Start, &computev1.StartWorkflowRequest{TenantId: "acme", Machine: tt.machine, Profile: tt.profile})
		if tt.ok {
			if err != nil || len(engine.started) != before+1 {
				t.Errorf("Start(%s on %s) = %v, started %q", tt.profile, tt.machine, err, engine.started)
			}
			continue
		}
		wantError(t, "Start("+tt.profile+" on "+tt.machine+")", err, connect.CodeFailedPrecondition, "UNSUPPORTED: bmc-driver-unsupported: profile boot-iso needs virtual-media.insert")
		if len(engine.started) != before {
			t.Errorf("Start(%s on %s) was refused and started", tt.profile, tt.machine)
		}
	}
}
