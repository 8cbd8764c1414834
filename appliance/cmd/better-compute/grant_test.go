package main

import (
	"crypto/ed25519"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/grants"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/keys"
)

// approverKeys makes the keys of n people, each in a folder of their own.
func (c *cli) approverKeys(n int) (files, public []string) {
	c.t.Helper()
	for range n {
		file := filepath.Join(c.t.TempDir(), "me.key")
		out, notes, err := c.runAs("", "", "approver", "keygen", "--out", file)
		if err != nil || !strings.HasPrefix(out, "bca1.") || !strings.HasPrefix(notes, "key id ") {
			c.t.Fatalf("approver keygen = %q, %q, %v", out, notes, err)
		}
		files, public = append(files, file), append(public, out)
	}
	return files, public
}

// ownCommand runs what works on files alone.
func (c *cli) ownCommand(args ...string) (string, error) {
	out, _, err := c.runAs("", "", args...)
	return out, err
}

func TestApproverKeys(t *testing.T) {
	c := newCLI(t)
	defer func() { c.halt() }()
	files, public := c.approverKeys(2)
	if st, err := os.Stat(files[0]); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the key file's mode is %v, %v, want 0600", st.Mode(), err)
	}
	if _, err := c.ownCommand("approver", "keygen", "--out", files[0]); err == nil {
		t.Error("keygen over a key = nil, want a refusal")
	}
	if out, err := c.ownCommand("approver", "show", files[0]); err != nil || out != public[0] {
		t.Errorf("approver show = %q, %v, want %q", out, err, public[0])
	}
	root := filepath.Join(c.dir, keys.RootFile)
	add := func(args ...string) (string, error) {
		return c.ownCommand(append([]string{"gateway", "bundle", "add-approver", "--dir", c.dir, "--root", root}, args...)...)
	}
	if out, err := c.ownCommand("gateway", "bundle", "show", "--dir", c.dir); err != nil || !strings.Contains(out, "version 1") || !strings.Contains(out, "no grants") {
		t.Errorf("bundle show = %q, %v", out, err)
	}
	for name, args := range map[string][]string{
		"a private key":   {files[0]},
		"nonsense":        {"bca1.nonsense"},
		"too many needed": {"--threshold", "3", public[0], public[1]},
		"one twice":       {public[0], public[0]},
	} {
		if out, err := add(args...); err == nil || strings.Contains(err.Error(), "BEGIN") {
			t.Errorf("add-approver of %s = %q, %v, want a refusal", name, out, err)
		}
	}
	if _, err := c.ownCommand("gateway", "bundle", "add-approver", "--dir", c.dir, "--root", filepath.Join(c.dir, keys.CommandFile), public[0]); err == nil {
		t.Error("a bundle signed by the command key was made")
	}
	file := filepath.Join(t.TempDir(), "public")
	if err := os.WriteFile(file, []byte(public[1]+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := add("--targets-10m", "3", public[0], file)
	if err != nil || !strings.Contains(out, "version 2") || !strings.Contains(out, "2 approvers must agree from 3 targets in 10 minutes or 20 in 24 hours") {
		t.Fatalf("add-approver = %q, %v", out, err)
	}
	set := func(args ...string) (string, error) {
		return c.ownCommand(append([]string{"gateway", "bundle", "set", "--dir", c.dir, "--root", root}, args...)...)
	}
	if _, err := set(); err == nil || !strings.Contains(err.Error(), "nothing is given") {
		t.Errorf("bundle set without a number = %v", err)
	}
	if out, err := set("--targets-24h", "9"); err != nil || !strings.Contains(out, "version 3") || !strings.Contains(out, "2 approvers must agree from 3 targets in 10 minutes or 9 in 24 hours") {
		t.Errorf("bundle set = %q, %v", out, err)
	}
	if _, err := set("--threshold", "3"); err == nil {
		t.Error("a threshold of three of two approvers was taken")
	}
	key, err := keys.ReadPrivate(files[0])
	if err != nil {
		t.Fatal(err)
	}
	id := trust.KeyID(key.Public().(ed25519.PublicKey))
	remove := func(args ...string) (string, error) {
		return c.ownCommand(append([]string{"gateway", "bundle", "remove-approver", "--dir", c.dir, "--root", root}, args...)...)
	}
	if _, err := remove(id); err == nil || !strings.Contains(err.Error(), "--threshold") {
		t.Errorf("remove-approver below the threshold = %v", err)
	}
	if _, err := remove(id[:4]); err == nil {
		t.Error("remove-approver of four digits = nil, want a refusal")
	}
	if out, err := remove("--threshold", "1", id[:12]); err != nil || !strings.Contains(out, "version 4") || strings.Contains(out, id) || !strings.Contains(out, "1 approvers: boxes ask for no grants") {
		t.Errorf("remove-approver = %q, %v", out, err)
	}
	// Every bundle follows from the one before: the gateway takes them all.
	c.halt()
	c.serve()
}

// TestGrantsByCommandLine: a person proposes, people approve on their own machines,
// and who is no approver does not count.
func TestGrantsByCommandLine(t *testing.T) {
	c := newCLI(t)
	defer func() { c.halt() }()
	c.enrolBox(c.run("", "site", "add", "lab"))
	c.enrolBox(c.run("", "site", "add", "shed"))
	c.run("", "pool", "add", "metal", "--site", "lab")
	c.run("", "pool", "add", "other", "--site", "shed")
	c.run(`{"username":"root","password":"hunter2"}`, "secret", "put", "bmc")
	for name, address := range map[string]string{"m1": "BMC1.lan", "m2": "192.0.2.8:6230"} {
		c.run("", "metal", "enroll", name, "--pool", "metal", "--driver", "ipmi", "--address", address, "--credentials", "bmc", "--uuid", "4c4c4544-0042-3010-8056-b4c04f303232")
	}
	c.run("", "metal", "enroll", "m3", "--pool", "other", "--driver", "ipmi", "--address", "192.0.2.9", "--credentials", "bmc", "--uuid", "4c4c4544-0042-3010-8056-b4c04f303232")
	propose := []string{"grant", "propose", "--allow", "off", "--machine", "m1", "--machine", "m2", "--reason", "rack 4 moves", "--uses", "2", "--for", "90m"}
	c.fails("UNSUPPORTED: no-approvers: ", propose...)

	files, public := c.approverKeys(4)
	c.halt()
	if _, err := c.ownCommand("gateway", "bundle", "add-approver", "--dir", c.dir, "--root", filepath.Join(c.dir, keys.RootFile), public[0], public[1], public[2]); err != nil {
		t.Fatal(err)
	}
	// The root is away from here on.
	if err := os.Remove(filepath.Join(c.dir, keys.RootFile)); err != nil {
		t.Fatal(err)
	}
	c.serve()

	id := c.run("", propose...)
	if !strings.HasPrefix(id, "grant_") {
		t.Fatalf("grant propose = %q", id)
	}
	out := c.run("", "grant", "show", id)
	for _, want := range []string{"switch the power off, hard  (bmc.power:power.setPower:off)", "2 times for each target", "rack 4 moves", "bmc:bmc1.lan:623  (the gateway calls it m1)", "bmc:192.0.2.8:6230  (the gateway calls it m2)", "by 0 of 2"} {
		if !strings.Contains(out, want) {
			t.Errorf("grant show = %s\nwant %q in it", out, want)
		}
	}
	approve := func(stdin, key string, more ...string) (string, string, error) {
		return c.runAs(c.client, stdin, append([]string{"approve", id, "--key", key}, more...)...)
	}
	if _, notes, err := approve("1\n", files[0]); err == nil || !strings.Contains(err.Error(), "not signed") || !strings.Contains(notes, "rack 4 moves") {
		t.Errorf("approve with another number = %v after %q, want it not signed", err, notes)
	}
	if _, _, err := approve("", files[0]); err == nil {
		t.Error("approve without an answer was signed")
	}
	if out, _, err := approve("2\n", files[0]); err != nil || !strings.Contains(out, "1 of 2") {
		t.Errorf("approve = %q, %v", out, err)
	}
	if out, _, err := approve("", files[0], "--yes"); err != nil || !strings.Contains(out, "1 of 2") {
		t.Errorf("approve by the same person = %q, %v, want one approver still", out, err)
	}
	if _, _, err := approve("", files[3], "--yes"); err == nil || !strings.HasPrefix(err.Error(), "PERMISSION_DENIED: key-unknown: ") {
		t.Errorf("approve by who is no approver = %v", err)
	}
	if _, _, err := approve("", filepath.Join(c.dir, keys.CommandFile), "--yes"); err == nil || !strings.HasPrefix(err.Error(), "PERMISSION_DENIED: key-unknown: ") {
		t.Errorf("approve by the gateway's own key = %v", err)
	}
	if out, _, err := approve("", files[2], "--yes"); err != nil || !strings.Contains(out, "2 of 2") {
		t.Errorf("approve by a second person = %q, %v", out, err)
	}
	if out := c.run("", "grant", "list"); !strings.Contains(out, id) || !strings.Contains(out, "2 of 2") || !strings.Contains(out, "bmc.power:power.setPower:off") {
		t.Errorf("grant list = %q", out)
	}
	if out := c.run("", "grant", "propose", "--allow", "deploy", "--machine", "m1", "--reason", "a new image", "--json"); !strings.Contains(out, `"bmc:bmc1.lan:623"`) || !strings.Contains(out, `"machine:node_`) {
		t.Errorf("grant propose --allow deploy = %s, want BMC and machine", out)
	}
	if out := c.run("", "grant", "propose", "--allow", "cycle", "--pool", "metal", "--reason", "all of them", "--json"); !strings.Contains(out, `"bmc:bmc1.lan:623"`) ||
		!strings.Contains(out, `"bmc:192.0.2.8:6230"`) || strings.Contains(out, "192.0.2.9") {
		t.Errorf("grant propose --pool = %s, want the pool's two", out)
	}
	if out := c.run("", "grant", "propose", "--allow", "forget", "--site", "lab", "--bmc", "redfish=https://10.0.0.5", "--reason", "it was sold", "--json"); !strings.Contains(out, `"bmc:10.0.0.5:443"`) {
		t.Errorf("grant propose --bmc = %s", out)
	}
	c.fails("INVALID_INPUT: bmc: ", "site", "forget-bmc", "lab", "redfish=10.0.0.5/x")
	c.fails(`"10.0.0.5": want DRIVER=ADDRESS`, "site", "forget-bmc", "lab", "10.0.0.5")
	c.fails("DRIVER_ERROR: unavailable: the site's box is offline", "site", "forget-bmc", "lab", "redfish=10.0.0.5")
	for want, args := range map[string]string{
		"grant propose: --machine, --pool or --bmc":                "--allow off --reason x",
		"INVALID_INPUT: site: it is missing beside bmcs":           "--allow forget --bmc redfish=10.0.0.5 --reason x",
		`--bmc "10.0.0.5": want DRIVER=ADDRESS`:                    "--allow forget --bmc 10.0.0.5 --site lab --reason x",
		"INVALID_INPUT: bmcs: image.stream is done to a machine":   "--allow image --bmc redfish=10.0.0.5 --site lab --reason x",
		"INVALID_INPUT: bmcs: address \"10.0.0.5/x\" under driver": "--allow forget --bmc redfish=10.0.0.5/x --site lab --reason x",
		`NOT_FOUND: site "nowhere"`:                                "--allow forget --bmc redfish=10.0.0.5 --site nowhere --reason x",
		`grant propose: there is no pool "none"`:                   "--allow off --pool none --reason x",
		"INVALID_INPUT: machines: m3 is at another site":           "--allow off --machine m1 --machine m3 --reason x",
		"NOT_FOUND: ":                         "--allow off --machine m9 --reason x",
		`--allow "melt"`:                      "--allow melt --machine m1 --reason x",
		"INVALID_INPUT: operations: kind \"x": "--allow x:y --machine m1 --reason x",
		"INVALID_INPUT: grant: artifact":      "--allow firmware --machine m1 --reason x --artifact abc",
		"grant propose: --uses":               "--allow off --machine m1 --reason x --for 200h",
		"missing: --reason":                   "--allow off --machine m1",
	} {
		c.fails(want, append([]string{"grant", "propose"}, strings.Fields(args)...)...)
	}

	// Another tenant sees nothing, and who may only read does not approve.
	token, err := c.ownCommand("gateway", "token", "--dir", c.dir, "--tenant", "acme", "--name", "all", "--allow", "compute:grants:read", "--allow", "compute:grants:write")
	if err != nil {
		t.Fatal(err)
	}
	acme := c.settings("acme", token)
	if out, _, err := c.runAs(acme, "", "grant", "list"); err != nil || strings.Contains(out, "grant_") {
		t.Errorf("grant list of another tenant = %q, %v", out, err)
	}
	for _, args := range [][]string{{"grant", "show", id}, {"approve", id, "--key", files[1], "--yes"}} {
		if _, _, err := c.runAs(acme, "", args...); err == nil || !strings.HasPrefix(err.Error(), "NOT_FOUND: ") {
			t.Errorf("%v of another tenant = %v, want NOT_FOUND", args, err)
		}
	}
	token, err = c.ownCommand("gateway", "token", "--dir", c.dir, "--tenant", "default", "--name", "reader", "--allow", "compute:grants:read")
	if err != nil {
		t.Fatal(err)
	}
	reader := c.settings("reader", token)
	if _, _, err := c.runAs(reader, "", "approve", id, "--key", files[1], "--yes", "--tenant", "default"); err == nil || !strings.HasPrefix(err.Error(), "PERMISSION_DENIED: the token lacks compute:grants:write") {
		t.Errorf("approve by a reader = %v", err)
	}
	if out := c.run("", "events"); !strings.Contains(out, "grant.proposed") || !strings.Contains(out, "grant.approved") {
		t.Errorf("events = %q, want proposal and approval", out)
	}
	for _, file := range files {
		key, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		secret := strings.Split(string(key), "\n")[1]
		if strings.Contains(c.log.String(), secret) {
			t.Error("the gateway's log holds an approver's key")
		}
	}
}

// TestLyingGateway: what a person reads is what the signature covers, whatever the
// gateway lists.
func TestLyingGateway(t *testing.T) {
	all, err := grants.Sorted([]string{"bmc:10.0.0.1:623", "bmc:10.0.0.2:623", "machine:node_1"})
	if err != nil {
		t.Fatal(err)
	}
	payload, err := grants.Encode(&agentv1.Grant{
		GrantId: "grant_1", SiteId: "site_1", Operations: []*agentv1.GrantOperation{{Kind: "bmc.power", Operation: "power.setPower", Action: "off"}},
		TargetsRoot: grants.Root(all), TargetCount: 3, UsesPerTarget: 1, NotBeforeMs: time.Now().UnixMilli(), NotAfterMs: time.Now().Add(time.Hour).UnixMilli(), Reason: "test",
	})
	if err != nil {
		t.Fatal(err)
	}
	good := &computev1.GrantRecord{GrantId: "grant_1", Payload: payload, Targets: all}
	if _, err := checkRecord("grant_1", good); err != nil {
		t.Errorf("checkRecord of an honest record = %v", err)
	}
	for name, change := range map[string]func(*computev1.GrantRecord){
		"one left out":   func(r *computev1.GrantRecord) { r.Targets = r.Targets[:2] },
		"another":        func(r *computev1.GrantRecord) { r.Targets[0] = "bmc:10.0.0.0:623" },
		"one more":       func(r *computev1.GrantRecord) { r.Targets = append(r.Targets, "machine:node_2") },
		"none":           func(r *computev1.GrantRecord) { r.Targets = nil },
		"one twice":      func(r *computev1.GrantRecord) { r.Targets = append(r.Targets[:1], r.Targets...) },
		"another order":  func(r *computev1.GrantRecord) { slices.Reverse(r.Targets) },
		"what steers":    func(r *computev1.GrantRecord) { r.Targets[0] = "bmc:\x1b[2K" },
		"another grant":  func(r *computev1.GrantRecord) { r.Payload = bytesOf(t, payload, "grant_2") },
		"other bytes":    func(r *computev1.GrantRecord) { r.Payload = append(r.Payload, 0xf8, 0x3f, 0x01) },
		"no payload":     func(r *computev1.GrantRecord) { r.Payload = nil },
		"a torn payload": func(r *computev1.GrantRecord) { r.Payload = r.Payload[:len(r.Payload)-1] },
	} {
		r := proto.CloneOf(good)
		change(r)
		if _, err := checkRecord("grant_1", r); errs.CodeOf(err) != errs.GrantInvalid {
			t.Errorf("%s: checkRecord = %v, want grant-invalid", name, err)
		}
	}
}

// bytesOf is a grant's bytes under another id.
func bytesOf(t *testing.T, payload []byte, id string) []byte {
	t.Helper()
	g, err := grants.Parse(payload)
	if err != nil {
		t.Fatal(err)
	}
	g.GrantId = id
	out, err := grants.Encode(g)
	if err != nil {
		t.Fatal(err)
	}
	return out
}
