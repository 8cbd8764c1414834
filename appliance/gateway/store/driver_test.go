package store

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/plugins/driver/binding"
)

// TestMigrateKeepsMachines: a database of before bindings keeps its pools,
// machines and agents, and its machines get what their BMC binds.
func TestMigrateKeepsMachines(t *testing.T) {
	path := filepath.Join(t.TempDir(), "gateway.db")
	before := fstest.MapFS{}
	names, err := fs.Glob(migrations, "migrations/*.sql")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names[:3] {
		text, err := fs.ReadFile(migrations, name)
		if err != nil {
			t.Fatal(err)
		}
		before[name] = &fstest.MapFile{Data: text}
	}
	old, err := open(path, time.Now, before)
	if err != nil {
		t.Fatal(err)
	}
	for _, q := range []string{
		`INSERT INTO sites (id, tenant_id, name, created_ms) VALUES ('site_1', 'acme', 'lab', 1)`,
		`INSERT INTO pools (id, tenant_id, name, site_id, created_ms) VALUES ('pool_1', 'acme', 'metal', 'site_1', 1)`,
		`INSERT INTO machines (id, tenant_id, name, pool_id, site_id, driver, address, credentials_ref, tls_spki_sha256, driver_options, product_uuid, state, created_ms)
			VALUES ('node_1', 'acme', 'm1', 'pool_1', 'site_1', 'ipmi', '10.0.0.5', 'secret://acme/bmc', '', '{"cipherSuite":3}', '', 'deployed', 7)`,
		`INSERT INTO machine_macs (site_id, mac, machine_id) VALUES ('site_1', '52:54:00:00:00:01', 'node_1')`,
		`INSERT INTO agents (id, role, site_id, machine_id, window_id, state, product_uuid, macs, enrolled_ms, bundle_version, version)
			VALUES ('ag_1', 1, 'site_1', '', '', 'active', '', '[]', 1, 1, '')`,
	} {
		if _, err := old.w.Exec(q); err != nil {
			t.Fatalf("%s: %v", q, err)
		}
	}
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}

	s, err := Open(path, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	m, err := s.Machine(t.Context(), "acme", "m1")
	if err != nil || m.State != "deployed" || m.BMC.DriverOptions != `{"cipherSuite":3}` || !slices.Equal(m.MACs, []string{"52:54:00:00:00:01"}) || m.HardwareProfile != "" {
		t.Errorf("machine after the migration = %+v, %v", m, err)
	}
	if got := slices.Sorted(maps.Keys(m.Drivers)); !slices.Equal(got, []string{"management", "power", "virtual-media"}) {
		t.Errorf("kinds after the migration = %q", got)
	}
	for kind, want := range binding.BMC("ipmi", "10.0.0.5", "secret://acme/bmc") {
		if got := m.Drivers[kind]; got.Driver != want.Driver || string(got.Config) != string(want.Config) {
			t.Errorf("%s after the migration = %s %s, want %s %s", kind, got.Driver, got.Config, want.Driver, want.Config)
		}
	}
	if p, err := s.Pool(t.Context(), "acme", "metal"); err != nil || p.HardwareProfile != "" {
		t.Errorf("pool after the migration = %+v, %v", p, err)
	}
	if labels, err := s.AgentLabels(t.Context(), "ag_1"); err != nil || len(labels) != 0 {
		t.Errorf("labels after the migration = %v, %v, want none before the next Hello", labels, err)
	}
}

func TestBindingsAreKept(t *testing.T) {
	s := openControl(t)
	ctx := t.Context()
	m := machine("node_9", "m9")
	m.HardwareProfile = "gpu"
	m.Drivers = map[string]binding.Binding{"power": {Driver: "redfish"}, "boot": {Driver: "acme", Config: json.RawMessage(`{"a":{"b":1}}`)}}
	if err := s.AddMachine(ctx, m); err != nil {
		t.Fatal(err)
	}
	for what, read := range map[string]func() (Machine, error){
		"by name": func() (Machine, error) { return s.Machine(ctx, "acme", "m9") },
		"by id":   func() (Machine, error) { return s.MachineByID(ctx, "node_9") },
	} {
		got, err := read()
		if err != nil || got.HardwareProfile != "gpu" || len(got.Drivers) != 2 || got.Drivers["power"].Config != nil || string(got.Drivers["boot"].Config) != `{"a":{"b":1}}` {
			t.Errorf("machine %s = %+v, %v", what, got, err)
		}
	}
	if m, err := s.Machine(ctx, "acme", "m1"); err != nil || m.Drivers == nil || len(m.Drivers) != 0 {
		t.Errorf("machine without bindings = %+v, %v", m.Drivers, err)
	}
	if err := s.AddPool(ctx, Pool{ID: "pool_9", TenantID: "acme", Name: "nine", SiteID: "site_1", HardwareProfile: "gpu"}); err != nil {
		t.Fatal(err)
	}
	if p, err := s.Pool(ctx, "acme", "nine"); err != nil || p.HardwareProfile != "gpu" {
		t.Errorf("pool = %+v, %v", p, err)
	}
}

func hello(boot string, capabilities []string, drivers ...string) *agentv1.Hello {
	h := &agentv1.Hello{BootId: boot, JournalEpoch: "j", EventEpoch: "e", Capabilities: capabilities}
	for _, d := range drivers {
		id, kinds, _ := strings.Cut(d, ":")
		id, version, _ := strings.Cut(id, "@")
		h.Drivers = append(h.Drivers, &agentv1.AdvertisedDriver{Id: id, Version: version, Kinds: strings.Split(kinds, ",")})
	}
	return h
}

// TestHelloSetsLabels: each Hello replaces the labels in the transaction that
// records it; one that is refused changes none.
func TestHelloSetsLabels(t *testing.T) {
	s := openTest(t)
	ctx := t.Context()
	a, other := testAgent(t, s, "ag_1"), testAgent(t, s, "ag_2")
	want := func(agent string, labels map[string]string) {
		t.Helper()
		if got, err := s.AgentLabels(ctx, agent); err != nil || !maps.Equal(got, labels) {
			t.Errorf("labels of %s = %v, %v, want %v", agent, got, err, labels)
		}
	}
	if _, err := s.Greeted(ctx, other.ID, hello("b", nil, "kata@3.0.0:runtime")); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Greeted(ctx, a.ID, hello("b1", []string{"instance.network-policy"}, "ipmi@1.0.0:power,inspect", "acme@2.0.0:power")); err != nil {
		t.Fatal(err)
	}
	full := map[string]string{"bc.dev/driver.ipmi": "1.0.0", "bc.dev/driver-kind.ipmi.power": "1", "bc.dev/driver-kind.ipmi.inspect": "1",
		"bc.dev/driver.acme": "2.0.0", "bc.dev/driver-kind.acme.power": "1", "bc.dev/cap.instance.network-policy": "1"}
	want(a.ID, full)
	// What is advertised no more goes, what changed changes.
	if _, err := s.Greeted(ctx, a.ID, hello("b2", nil, "ipmi@1.1.0:power")); err != nil {
		t.Fatal(err)
	}
	less := map[string]string{"bc.dev/driver.ipmi": "1.1.0", "bc.dev/driver-kind.ipmi.power": "1"}
	want(a.ID, less)
	// A boot that ended is back: the Hello does not count.
	if _, err := s.Greeted(ctx, a.ID, hello("b1", nil, "evil@1.0.0:power")); err == nil {
		t.Error("Hello of an earlier boot = nil, want ErrCloned")
	}
	want(a.ID, less)
	if _, err := s.Greeted(ctx, other.ID, hello("b", nil)); err != nil {
		t.Fatal(err)
	}
	want(other.ID, map[string]string{})
}

func TestCandidates(t *testing.T) {
	s := openTest(t)
	ctx := t.Context()
	for i, tenant := range []string{"acme", "acme", "other"} {
		a := testAgent(t, s, fmt.Sprintf("ag_%d", i))
		if err := s.AddSite(ctx, Site{ID: a.SiteID, TenantID: tenant, Name: fmt.Sprintf("s%d", i)}); err != nil {
			t.Fatal(err)
		}
		drivers := []string{"ipmi@1.0.0:power"}
		if i == 1 {
			drivers = append(drivers, "acme@2.0.0:bios")
		}
		if _, err := s.Greeted(ctx, a.ID, hello("b", nil, drivers...)); err != nil {
			t.Fatal(err)
		}
	}
	testAgent(t, s, "ag_of_no_site") // its site is nobody's
	for _, tt := range []struct {
		what, tenant, site string
		want               map[string]string
		ids                string
	}{
		{"all of a tenant", "acme", "", nil, "ag_0 ag_1"},
		{"the other tenant", "other", "", map[string]string{}, "ag_2"},
		{"a tenant without sites", "third", "", nil, ""},
		{"exact", "acme", "", map[string]string{"bc.dev/driver.ipmi": "1.0.0"}, "ag_0 ag_1"},
		{"another version", "acme", "", map[string]string{"bc.dev/driver.ipmi": "9"}, ""},
		{"any value", "acme", "", map[string]string{"bc.dev/driver.acme": ""}, "ag_1"},
		{"all of them", "acme", "", map[string]string{"bc.dev/driver.acme": "2.0.0", "bc.dev/driver-kind.acme.bios": "1", "bc.dev/driver.ipmi": ""}, "ag_1"},
		{"one of them missing", "acme", "", map[string]string{"bc.dev/driver.acme": "", "bc.dev/driver.kata": ""}, ""},
		{"a site", "acme", "site_ag_0", nil, "ag_0"},
		{"another tenant's site", "acme", "site_ag_2", nil, ""},
		{"a quote", "acme", "", map[string]string{`x' OR 1=1 --`: `"`}, ""},
	} {
		got, err := s.Candidates(ctx, tt.tenant, tt.site, tt.want)
		var ids []string
		for _, c := range got {
			ids = append(ids, c.AgentID)
		}
		if err != nil || strings.Join(ids, " ") != tt.ids {
			t.Errorf("%s: Candidates = %v, %v, want %s", tt.what, ids, err, tt.ids)
		}
	}
	if err := s.SetAgentState(ctx, "ag_0", AgentRevoked); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Candidates(ctx, "acme", "", nil); err != nil || len(got) != 1 || got[0].AgentID != "ag_1" || got[0].Labels["bc.dev/driver.acme"] != "2.0.0" {
		t.Errorf("Candidates without the revoked one = %+v, %v", got, err)
	}
}
