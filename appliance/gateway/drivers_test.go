package gateway_test

import (
	"encoding/json"
	"errors"
	"maps"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/agentv1/agentv1connect"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway"
	"github.com/better-compute/site-appliance/appliance/gateway/gatewaytest"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/binding"
)

// TestNodeSpec: a machine's own agents, by their certificates, are told what
// their machine is bound to, and nobody is told of another machine.
func TestNodeSpec(t *testing.T) {
	g := gatewaytest.Make(t)
	hardware, err := metal.New(metal.Options{HardwareProfiles: map[string]metal.HardwareProfile{
		"gpu": {BIOS: json.RawMessage(`{"BootMode":"Uefi"}`), RAID: json.RawMessage(`{"volumes":[]}`)},
	}})
	if err != nil {
		t.Fatal(err)
	}
	g.Prepare = func(g *gateway.Gateway) { g.Nodes.Layout = hardware.Layout }
	g.Start()
	ctx := t.Context()
	for _, err := range []error{
		g.Store.AddSite(ctx, store.Site{ID: "site_1", TenantID: "acme", Name: "lab"}),
		g.Store.AddPool(ctx, store.Pool{ID: "pool_1", TenantID: "acme", Name: "metal", SiteID: "site_1"}),
		g.Store.AddMachine(ctx, store.Machine{ID: "node_1", TenantID: "acme", Name: "m1", PoolID: "pool_1", SiteID: "site_1", State: metal.Deployed, HardwareProfile: "gpu",
			Drivers: binding.Resolve(binding.BMC("redfish", "10.0.0.5", "secret://acme/bmc"), map[string]binding.Binding{"boot": {Driver: "ipxe"}})}),
		g.Store.AddMachine(ctx, store.Machine{ID: "node_2", TenantID: "acme", Name: "m2", PoolID: "pool_1", SiteID: "site_1", State: metal.Deployed}),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	node := func(role agentv1.Role, machine string) *gatewaytest.Agent {
		t.Helper()
		join, err := g.Enrol.NewToken(ctx, role, "site_1", machine, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		return g.Join(join, role)
	}
	get := func(a *gatewaytest.Agent) (*agentv1.NodeSpec, error) {
		res, err := agentv1connect.NewNodeServiceClient(a.HTTP(), g.URL).GetSpec(ctx, connect.NewRequest(&agentv1.GetSpecRequest{}))
		if err != nil {
			return nil, err
		}
		return res.Msg.Spec, nil
	}

	first, second := node(agentv1.Role_ROLE_NODE, "node_1"), node(agentv1.Role_ROLE_NODE, "node_2")
	spec, err := get(first)
	if err != nil {
		t.Fatal(err)
	}
	bound := map[string]string{}
	for kind, b := range spec.Drivers {
		bound[kind] = b.Driver + b.ConfigJson
	}
	bmc := `redfish{"address":"10.0.0.5","credentials":"secret://acme/bmc"}`
	if want := map[string]string{"power": bmc, "management": bmc, "virtual-media": bmc, "boot": "ipxe"}; !maps.Equal(bound, want) ||
		spec.MachineId != "node_1" || spec.Name != "m1" || spec.HardwareProfile != "gpu" || spec.BiosJson != `{"BootMode":"Uefi"}` || spec.RaidJson != `{"volumes":[]}` {
		t.Errorf("GetSpec of node_1 = %v", spec)
	}
	if spec, err := get(second); err != nil || spec.MachineId != "node_2" || len(spec.Drivers) != 0 || spec.BiosJson != "" {
		t.Errorf("GetSpec of node_2 = %v, %v, want its own", spec, err)
	}

	// A ramdisk is its machine's agent too.
	box := g.Site("site_1")
	if err := g.Enrol.OpenWindow(ctx, "site_1", "node_1", "win_1", "inspect", g.Clock.Now().Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	key := gatewaytest.NewKey(t)
	answer, err := g.Enroll(ctx, &agentv1.EnrollRequest{Csr: gatewaytest.CSR(t, key), Role: agentv1.Role_ROLE_RAMDISK, SiteId: "site_1",
		Credential: &agentv1.EnrollRequest_Voucher{Voucher: box.Voucher(&agentv1.Voucher{MachineId: "node_1", BootNonce: []byte(strings.Repeat("n", 16)), WindowId: "win_1", Purpose: "inspect", IssuedAtMs: g.Clock.Now().UnixMilli(), NotAfterMs: g.Clock.Now().Add(time.Hour).UnixMilli()})}})
	if err != nil {
		t.Fatal(err)
	}
	ramdisk := g.Adopt(answer, key, agentv1.Role_ROLE_RAMDISK)
	if spec, err := get(ramdisk); err != nil || spec.MachineId != "node_1" {
		t.Errorf("GetSpec of node_1's ramdisk = %v, %v", spec, err)
	}

	if _, err := get(box); code(err) != errs.RoleMismatch || connect.CodeOf(err) != connect.CodePermissionDenied {
		t.Errorf("GetSpec of a site = %v, want role-mismatch", err)
	}
	_, err = agentv1connect.NewNodeServiceClient(g.Client(nil), g.URL).GetSpec(ctx, connect.NewRequest(&agentv1.GetSpecRequest{}))
	if code(err) != errs.NotEnrolled {
		t.Errorf("GetSpec without a certificate = %v, want not-enrolled", err)
	}
	if err := g.Revoke(ctx, second.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := get(second); code(err) != errs.Revoked {
		t.Errorf("GetSpec of a revoked agent = %v, want revoked", err)
	}
	if spec, err := get(first); err != nil || spec.MachineId != "node_1" {
		t.Errorf("GetSpec of the other = %v, %v", spec, err)
	}
}

// TestHelloLabels: what an agent advertises over the line is what placement
// finds, and what it leaves out next time is gone.
func TestHelloLabels(t *testing.T) {
	g := gatewaytest.New(t)
	box := g.Site("site_1")
	s := box.Connect(func(h *agentv1.Hello) {
		h.Capabilities = []string{"instance.network-policy"}
		h.Drivers = []*agentv1.AdvertisedDriver{{Id: "ipmi", Version: "1.0.0", Kinds: []string{"power", "inspect", "Not A Kind"}}}
	})
	want := map[string]string{"bc.dev/driver.ipmi": "1.0.0", "bc.dev/driver-kind.ipmi.power": "1", "bc.dev/driver-kind.ipmi.inspect": "1", "bc.dev/cap.instance.network-policy": "1"}
	if got, err := g.Store.AgentLabels(t.Context(), box.ID); err != nil || !maps.Equal(got, want) {
		t.Errorf("labels = %v, %v, want %v", got, err, want)
	}
	s.Cut()
	box.Connect(func(h *agentv1.Hello) {
		h.Drivers = []*agentv1.AdvertisedDriver{{Id: "ipmi", Version: "1.1.0", Kinds: []string{"power"}}}
	})
	want = map[string]string{"bc.dev/driver.ipmi": "1.1.0", "bc.dev/driver-kind.ipmi.power": "1"}
	if got, err := g.Store.AgentLabels(t.Context(), box.ID); err != nil || !maps.Equal(got, want) {
		t.Errorf("labels after the next Hello = %v, %v, want %v", got, err, want)
	}
	// What agents host is not registered with the control plane.
	for _, m := range g.Drivers.List("") {
		if m.ID == "ipmi" {
			t.Errorf("the registry holds %s of a Hello", m.Key())
		}
	}
}

// TestRegisteredTwice: the second driver of one id and version stops the
// gateway, whether it comes in a module or directly; another version of it does not.
func TestRegisteredTwice(t *testing.T) {
	declare := func(version string) []*driver.Definition {
		d, err := driver.Define(driver.Spec[int]{ID: "acme", Version: version, RunsOn: "site", Parse: func(json.RawMessage) (int, error) { return 0, nil }},
			driver.Implement(driver.Kind[int]{Name: "acme-cooling", Operations: map[string]driver.Operation[int]{
				"get": func(*driver.Context, int, driver.Args) (any, error) { return nil, nil },
			}}, func(n int, _ *driver.Context) (int, error) { return n, nil }))
		if err != nil {
			t.Fatal(err)
		}
		return []*driver.Definition{d}
	}
	g := gatewaytest.Make(t)
	for _, tt := range []struct {
		what string
		o    gateway.Options
		ok   bool
	}{
		{"two modules", gateway.Options{Modules: []gateway.Module{{Name: "one", Drivers: declare("1.0.0")}, {Name: "two", Drivers: declare("1.0.0")}}}, false},
		{"a module and directly", gateway.Options{Modules: []gateway.Module{{Name: "one", Drivers: declare("1.0.0")}}, Drivers: declare("1.0.0")}, false},
		{"directly twice", gateway.Options{Drivers: append(declare("1.0.0"), declare("1.0.0")...)}, false},
		{"other versions", gateway.Options{Modules: []gateway.Module{{Name: "one", Drivers: declare("1.0.0")}, {Name: "two", Drivers: declare("1.1.0")}}, Drivers: declare("1.2.0")}, true},
	} {
		tt.o.Log = g.Log
		made, err := gateway.New(g.Dir, tt.o)
		if tt.ok {
			if err != nil {
				t.Errorf("%s: New = %v", tt.what, err)
				continue
			}
			var versions []string
			for _, m := range made.Drivers.List("acme-cooling") {
				versions = append(versions, m.Version)
			}
			if strings.Join(versions, " ") != "1.0.0 1.1.0 1.2.0" {
				t.Errorf("%s: registered %q", tt.what, versions)
			}
			if err := made.Close(); err != nil {
				t.Error(err)
			}
			continue
		}
		var coded *errs.Error
		if !errors.As(err, &coded) || coded.Code != errs.InvalidConfig || !strings.Contains(err.Error(), "driver:acme@1.0.0") {
			t.Errorf("%s: New = %v, want invalid-config and the key", tt.what, err)
		}
	}
}
