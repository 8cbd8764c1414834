package metal

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

func code(err error) apierr.Code {
	var e *apierr.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}

func TestParseBMC(t *testing.T) {
	good := func(change func(b *computev1.Bmc)) *computev1.Bmc {
		b := &computev1.Bmc{Driver: "ipmi", Address: "10.0.0.5:623", CredentialsRef: "secret://acme/bmc", TlsSpkiSha256: strings.Repeat("Ab", 32), DriverOptionsJson: `{"cipherSuite":3}`}
		change(b)
		return b
	}
	for _, c := range []struct {
		title  string
		change func(b *computev1.Bmc)
		want   apierr.Code
	}{
		{"all there", func(*computev1.Bmc) {}, ""},
		{"no pin, no options", func(b *computev1.Bmc) { b.TlsSpkiSha256, b.DriverOptionsJson = "", "" }, ""},
		{"a driver of somebody's own", func(b *computev1.Bmc) { b.Driver = "acme-bmc2" }, ""},
		{"host name", func(b *computev1.Bmc) { b.Address = "bmc-7.example.net" }, ""},
		{"url", func(b *computev1.Bmc) { b.Address = "https://[fd00::7]:8443" }, ""},
		{"bare v6", func(b *computev1.Bmc) { b.Address = "fd00::7" }, ""},
		{"no driver", func(b *computev1.Bmc) { b.Driver = "" }, apierr.InvalidInput},
		{"driver in capitals", func(b *computev1.Bmc) { b.Driver = "IPMI" }, apierr.InvalidInput},
		{"driver with a path", func(b *computev1.Bmc) { b.Driver = "../ipmi" }, apierr.InvalidInput},
		{"no address", func(b *computev1.Bmc) { b.Address = "" }, apierr.InvalidInput},
		{"address with a space", func(b *computev1.Bmc) { b.Address = "10.0.0.5 -v" }, apierr.InvalidInput},
		{"address as an option", func(b *computev1.Bmc) { b.Address = "-H" }, apierr.InvalidInput},
		{"address with a user", func(b *computev1.Bmc) { b.Address = "https://root@10.0.0.5" }, apierr.InvalidInput},
		{"address with a path", func(b *computev1.Bmc) { b.Address = "https://10.0.0.5/redfish" }, apierr.InvalidInput},
		{"port 0", func(b *computev1.Bmc) { b.Address = "10.0.0.5:0" }, apierr.InvalidInput},
		{"port too high", func(b *computev1.Bmc) { b.Address = "10.0.0.5:70000" }, apierr.InvalidInput},
		{"unspecified", func(b *computev1.Bmc) { b.Address = "0.0.0.0" }, apierr.InvalidInput},
		{"a literal secret", func(b *computev1.Bmc) { b.CredentialsRef = "hunter2" }, apierr.InvalidInput},
		{"no credential", func(b *computev1.Bmc) { b.CredentialsRef = "" }, apierr.InvalidInput},
		{"another tenant's credential", func(b *computev1.Bmc) { b.CredentialsRef = "secret://other/bmc" }, apierr.PermissionDenied},
		{"a way up", func(b *computev1.Bmc) { b.CredentialsRef = "secret://acme/../other/bmc" }, apierr.InvalidInput},
		{"short pin", func(b *computev1.Bmc) { b.TlsSpkiSha256 = "ab" }, apierr.InvalidInput},
		{"pin that is no hex", func(b *computev1.Bmc) { b.TlsSpkiSha256 = strings.Repeat("zz", 32) }, apierr.InvalidInput},
		{"options as a list", func(b *computev1.Bmc) { b.DriverOptionsJson = "[]" }, apierr.InvalidInput},
		{"options as null", func(b *computev1.Bmc) { b.DriverOptionsJson = "null" }, apierr.InvalidInput},
		{"broken options", func(b *computev1.Bmc) { b.DriverOptionsJson = "{" }, apierr.InvalidInput},
	} {
		got, err := ParseBMC("acme", good(c.change))
		if code(err) != c.want || (err == nil) != (c.want == "") {
			t.Errorf("%s: ParseBMC = %v, want code %q", c.title, err, c.want)
		}
		if err != nil && strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: the error repeats the secret: %v", c.title, err)
		}
		if err == nil && got.TLSSPKISHA256 != strings.ToLower(got.TLSSPKISHA256) {
			t.Errorf("%s: pin %q is not lower-case", c.title, got.TLSSPKISHA256)
		}
	}
	if _, err := ParseBMC("acme", nil); code(err) != apierr.InvalidInput {
		t.Errorf("ParseBMC(nil) = %v, want INVALID_INPUT", err)
	}
}

func TestParseMACs(t *testing.T) {
	for _, c := range []struct {
		in   []string
		want []string
		ok   bool
	}{
		{nil, nil, true},
		{[]string{"52-54-00-AA-00-02", "52:54:00:aa:00:01"}, []string{"52:54:00:aa:00:01", "52:54:00:aa:00:02"}, true},
		{[]string{"5254.00aa.0001"}, []string{"52:54:00:aa:00:01"}, true},
		{[]string{"52:54:00:aa:00:01", "52-54-00-AA-00-01"}, nil, false},
		{[]string{"01:00:5e:00:00:01"}, nil, false},
		{[]string{"00:00:00:00:00:00"}, nil, false},
		{[]string{"02:00:00:00:00:00:00:01"}, nil, false},
		{[]string{"nonsense"}, nil, false},
	} {
		got, err := ParseMACs(c.in)
		if (err == nil) != c.ok || (c.ok && !slices.Equal(got, c.want)) {
			t.Errorf("ParseMACs(%q) = %q, %v, want %q", c.in, got, err, c.want)
		}
	}
}

// TestMACsFitTheBox: a box refuses the snapshot of a whole site over one machine
// with more than 16 MACs.
func TestMACsFitTheBox(t *testing.T) {
	var macs []string
	for n := range 16 {
		macs = append(macs, fmt.Sprintf("52:54:00:00:00:%02x", n))
	}
	if _, err := ParseMACs(macs); err != nil {
		t.Errorf("ParseMACs of 16 = %v", err)
	}
	if _, err := ParseMACs(append(macs, "52:54:00:00:01:00")); code(err) != apierr.InvalidInput {
		t.Errorf("ParseMACs of 17 = %v, want INVALID_INPUT", err)
	}
}

// TestCheckVerb: metal's own knowledge counts first, then the configuration,
// then what the site's agent says; nobody's word is no refusal.
func TestCheckVerb(t *testing.T) {
	m, err := New(Options{BMCDrivers: map[string][]string{"conf-bmc": {GetPower, SetPower}}})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		verb   Verb
		driver string
		kinds  []string
		want   bool
	}{
		{VerbDeploy, "ipmi", nil, true},
		{VerbDeploy, "redfish", nil, true},
		{VerbDeploy, "redfish", []string{"power"}, true}, // what an agent says of it does not count
		{VerbGetPower, "ipmi", []string{"power"}, true},
		{VerbBootISO, "ipmi", nil, true},
		{VerbRotate, "ipmi", nil, false},
		{VerbRotate, "ipmi", []string{"credentials"}, false},
		{VerbRotate, "redfish", nil, true},
		{VerbBootISO, "wol", nil, false},
		{VerbGetPower, "conf-bmc", nil, true},
		{VerbSetPower, "conf-bmc", []string{"management"}, true},
		{VerbBoot, "conf-bmc", nil, false},
		{VerbBoot, "conf-bmc", []string{"power", "management"}, false}, // the configuration comes first
		{VerbSetPower, "acme-bmc", []string{"power"}, true},
		{VerbBoot, "acme-bmc", []string{"power"}, false},
		{VerbDeploy, "acme-bmc", []string{"power"}, false},
		{VerbInspect, "acme-bmc", []string{"power", "management"}, true},
		{VerbDeploy, "unheard-of", nil, true}, // not checked in advance
	} {
		err := m.CheckVerb(c.verb, c.driver, c.kinds)
		var e *apierr.Error
		if (err == nil) != c.want || (err != nil && (!errors.As(err, &e) || e.Code != apierr.Unsupported || e.Reason != "bmc-driver-unsupported")) {
			t.Errorf("CheckVerb(%s, %s, %q) = %v, want ok %t", c.verb, c.driver, c.kinds, err, c.want)
		}
	}
}

func TestCommands(t *testing.T) {
	b := store.BMC{Driver: "ipmi", Address: "10.0.0.5", CredentialsRef: "secret://acme/bmc", DriverOptions: `{"cipherSuite":3}`}
	for _, action := range []string{"on", "off", "soft", "cycle", "reset"} {
		c, err := PowerCommand(b, action)
		if err != nil || c.RetrySafe || c.Kind != "bmc.power" || c.Args.(*bmcv1.BmcOperationRequest).ArgsJson != `["`+action+`"]` || !slices.Equal(c.SecretRefs, []string{b.CredentialsRef}) {
			t.Errorf("PowerCommand(%s) = %+v, %v", action, c, err)
		}
	}
	for _, action := range []string{"", "explode", `on"]`, "ON"} {
		if _, err := PowerCommand(b, action); code(err) != apierr.InvalidInput {
			t.Errorf("PowerCommand(%q) = %v, want INVALID_INPUT", action, err)
		}
	}
	c, err := BootCommand(b, BootDevice{Device: "pxe", EFI: true})
	if want := `[{"device":"pxe","persistent":false,"efi":true}]`; err != nil || !c.RetrySafe || c.Args.(*bmcv1.BmcOperationRequest).ArgsJson != want {
		t.Errorf("BootCommand = %+v, %v, want %s", c, err, want)
	}
	if _, err := BootCommand(b, BootDevice{Device: "floppy"}); code(err) != apierr.InvalidInput {
		t.Errorf("BootCommand(floppy) = %v, want INVALID_INPUT", err)
	}
	if q := PowerQuery(b); q.Kind != "bmc.query" || !q.RetrySafe || q.Args.(*bmcv1.BmcOperationRequest).DriverOptionsJson != b.DriverOptions {
		t.Errorf("PowerQuery = %+v", q)
	}
}

func TestPowerState(t *testing.T) {
	for in, want := range map[string]string{`"on"`: "on", `"off"`: "off", `"unknown"`: "unknown", `"ON"`: "", `{"power":"on"}`: "", ``: "", `on`: ""} {
		got, err := PowerState(&bmcv1.BmcOperationResult{ResultJson: in})
		if got != want || (err == nil) != (want != "") {
			t.Errorf("PowerState(%s) = %q, %v, want %q", in, got, err, want)
		}
	}
}

func TestAssignCommand(t *testing.T) {
	now := time.UnixMilli(1_000_000)
	in := func(d time.Duration) store.Assignment {
		return store.Assignment{Action: Ramdisk, Purpose: "deploy", WindowID: "win_1", WindowUntil: now.Add(d), Artifacts: []string{"aa"}}
	}
	machines := []store.Machine{
		{ID: "node_1", Name: "a", MACs: []string{"52:54:00:00:00:01"}, Assignment: in(time.Hour)},
		{ID: "node_2", Name: "b", MACs: []string{"52:54:00:00:00:02"}, Assignment: in(-time.Second)},
		{ID: "node_3", Name: "c", MACs: []string{"52:54:00:00:00:03"}, Assignment: store.Assignment{Action: LocalDisk}, Loader: "shim"},
		{ID: "node_4", Name: "d"},
	}
	req := AssignCommand(store.Snapshot{Version: 7, Machines: machines}, now).Args.(*pxev1.AssignRequest)
	if req.Version != 7 || len(req.Machines) != 3 {
		t.Fatalf("AssignCommand = %v, want version 7 of three machines", req)
	}
	if m := req.Machines[0]; m.Action != pxev1.Action_ACTION_RAMDISK || m.WindowId != "win_1" || m.Purpose != "deploy" || len(m.Artifacts) != 1 {
		t.Errorf("open window: %v", m)
	}
	if req.Machines[0].Loader != "" || req.Machines[2].Loader != "shim" {
		t.Errorf("loaders %q and %q, want the usual one and shim", req.Machines[0].Loader, req.Machines[2].Loader)
	}
	for _, m := range req.Machines[1:] {
		if m.Action != pxev1.Action_ACTION_LOCAL_DISK || m.WindowId != "" || m.Purpose != "" || m.Artifacts != nil {
			t.Errorf("no open window: %v", m)
		}
	}
}

func TestCheckSeed(t *testing.T) {
	key := "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIB0kQ5Yw operator@desk"
	for _, c := range []struct {
		serial, hostname string
		keys             []string
		ok               bool
	}{
		{"S1", "m1", []string{key}, true},
		{"WD-WCC 123", "m1.example.net", nil, true},
		{"", "m1", nil, false},
		{" S1", "m1", nil, false},
		{"S1\n", "m1", nil, false},
		{"S1", "", nil, false},
		{"S1", "-m1", nil, false},
		{"S1", "m1\nroot", nil, false},
		{"S1", strings.Repeat("a", 64), nil, false},
		{"S1", "m1", []string{key + "\n" + key}, false},
		{"S1", "m1", []string{`command="x" ` + key}, false},
		{"S1", "m1", []string{"-----BEGIN OPENSSH PRIVATE KEY-----"}, false},
		{"S1", "m1", slices.Repeat([]string{key}, 65), false},
	} {
		if err := CheckSeed(c.serial, c.hostname, c.keys); (err == nil) != c.ok {
			t.Errorf("CheckSeed(%q, %q, %d keys) = %v, want ok %t", c.serial, c.hostname, len(c.keys), err, c.ok)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("ipmi", "10.0.0.5:623", "secret://acme/bmc", "{}", "52:54:00:00:00:01", "S1", "m1")
	f.Fuzz(func(t *testing.T, driver, address, ref, options, mac, serial, host string) {
		b, err := ParseBMC("acme", &computev1.Bmc{Driver: driver, Address: address, CredentialsRef: ref, DriverOptionsJson: options})
		if err == nil && (strings.ContainsAny(b.Address, " \n\t") || !strings.HasPrefix(b.CredentialsRef, "secret://acme/")) {
			t.Errorf("ParseBMC let %+v through", b)
		}
		if macs, err := ParseMACs([]string{mac}); err == nil && (len(macs) != 1 || len(macs[0]) != 17) {
			t.Errorf("ParseMACs(%q) = %q", mac, macs)
		}
		if err := CheckSeed(serial, host, nil); err == nil && strings.ContainsAny(serial+host, "\n\r\x00") {
			t.Errorf("CheckSeed(%q, %q) = nil", serial, host)
		}
	})
}
