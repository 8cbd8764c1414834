package metal

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/secretstore"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
)

var overRedfish = store.BMC{Driver: "redfish", Address: "10.0.0.5", CredentialsRef: "secret://acme/bmc"}

// TestOperate: each operation travels as the kind that carries it, in that kind's
// time, and what a driver would refuse is refused here.
func TestOperate(t *testing.T) {
	const digest = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
	for _, tt := range []struct {
		operation, args, kind, sent string
		timeout                     time.Duration
		query                       bool
	}{
		{"power.getPower", ``, "bmc.query", ``, time.Minute, true},
		{"power.getPower", ` [null] `, "bmc.query", ``, time.Minute, true},
		{"inspect.inspect", `[]`, "bmc.query", ``, 3 * time.Minute, true},
		{"power.setPower", `"nmi"`, "bmc.power", `["nmi"]`, 2 * time.Minute, false},
		{"management.resetBmc", ``, "bmc.power", ``, 2 * time.Minute, false},
		{"management.setSecureBoot", `{"enabled":true}`, "bmc.boot", `[{"enabled":true}]`, 2 * time.Minute, false},
		{"virtual-media.insert", `["https://x/a.iso"]`, "bmc.media", `["https://x/a.iso"]`, 5 * time.Minute, false},
		{"virtual-media.insert", `["artifact://rescue-1.2"]`, "bmc.media", `["artifact://rescue-1.2"]`, 5 * time.Minute, false},
		{"bios.applySettings", `[{"BootMode":"Uefi"}]`, "bmc.bios", `[{"BootMode":"Uefi"}]`, 30 * time.Minute, false},
		{"bios.resetSettings", ``, "bmc.bios", ``, 30 * time.Minute, false},
		{"raid.applyLayout", `{"volumes":[]}`, "bmc.raid", `[{"volumes":[]}]`, 30 * time.Minute, false},
		{"firmware.update", `{"component":"BIOS","url":"artifact://bios","sha256":"` + digest + `"}`, "bmc.firmware", `[{"component":"BIOS","url":"artifact://bios","sha256":"` + digest + `"}]`, time.Hour, false},
	} {
		c, query, err := Operate(overRedfish, tt.operation, tt.args)
		if err != nil {
			t.Errorf("Operate(%s, %s) = %v", tt.operation, tt.args, err)
			continue
		}
		req := c.Args.(*bmcv1.BmcOperationRequest)
		if c.Kind != tt.kind || query != tt.query || req.Operation != tt.operation || req.ArgsJson != tt.sent || c.Timeout != tt.timeout || !slices.Equal(c.SecretRefs, []string{"secret://acme/bmc"}) {
			t.Errorf("Operate(%s, %s) = %+v, query %v, want %s with %s in %s", tt.operation, tt.args, c, query, tt.kind, tt.sent, tt.timeout)
		}
	}
	for operation, args := range map[string][]string{
		"power.getPower":           {`1`, `["on"]`, `{`},
		"power.setPower":           {``, `null`, `["sideways"]`, `["on","off"]`, `[["on"]]`, `{"action":"on"}`},
		"management.setBootDevice": {`"pxe"`, `{"device":"floppy"}`, `{"device":"pxe","speed":1}`},
		"management.setSecureBoot": {`true`},
		"virtual-media.insert":     {`"file:///etc/passwd"`, `"artifact://"`, `"artifact://../x"`, `"https://u:p@x/a.iso"`},
		"bios.applySettings":       {`{}`, `{"A":{}}`, `[1]`},
		"raid.applyLayout":         {`{}`, `[]`},
		"firmware.update":          {`{"component":"BIOS","url":"artifact://bios"}`, `{"component":"BIOS","url":"artifact://a/b","sha256":"` + digest + `"}`},
		"credentials.rotate":       {``, `{"newPassword":"secret://acme/x"}`},
		"console.open":             {``},
		"no.such":                  {``},
		"":                         {``},
	} {
		for _, arg := range args {
			if _, _, err := Operate(overRedfish, operation, arg); code(err) != apierr.InvalidInput {
				t.Errorf("Operate(%s, %s) = %v, want INVALID_INPUT", operation, arg, err)
			}
		}
	}
	if _, _, err := Operate(overRedfish, "power.setPower", `"on"`+strings.Repeat(" ", maxArguments)); code(err) != apierr.InvalidInput {
		t.Errorf("Operate of very long arguments = %v, want INVALID_INPUT", err)
	}
	if c, _, err := Operate(store.BMC{Driver: Manual, Address: "rack-3"}, "power.setPower", `"off"`); err != nil || c.Timeout != manualTimeout || len(c.SecretRefs) != 0 {
		t.Errorf("Operate of a machine that people switch = %+v, %v, want a day and no secret", c, err)
	}
}

// TestRotateCommand: the new password travels as a reference of the gateway's own
// choice, beside the credential.
func TestRotateCommand(t *testing.T) {
	c, err := RotateCommand(overRedfish)
	if err != nil {
		t.Fatal(err)
	}
	pending, err := secretstore.PendingRef(overRedfish.CredentialsRef)
	if err != nil {
		t.Fatal(err)
	}
	req := c.Args.(*bmcv1.BmcOperationRequest)
	if c.Kind != "bmc.rotate" || c.RetrySafe || req.Operation != "credentials.rotate" || req.ArgsJson != `[{"newPassword":"`+pending+`"}]` ||
		!slices.Equal(c.SecretRefs, []string{overRedfish.CredentialsRef, pending}) {
		t.Errorf("RotateCommand() = %+v", c)
	}
	if _, err := RotateCommand(store.BMC{Driver: wakeOnLAN, Address: "52:54:00:12:34:56"}); errs.CodeOf(err) != errs.InvalidConfig {
		t.Errorf("RotateCommand() without a credential = %v, want invalid-config", err)
	}
}

// TestStepsKeepProfilesTheirDrivers: a profile that binds bios to a driver of its
// own still reaches it, and metal's own steps have other names.
func TestStepsKeepProfilesTheirDrivers(t *testing.T) {
	names := map[string]string{}
	for _, s := range Steps() {
		names[s.ID] = s.Kind
	}
	for _, free := range []string{"bios.applySettings", "raid.applyLayout", "firmware.update", "virtual-media.insert", "credentials.rotate"} {
		if names[free] != "" {
			t.Errorf("step %s is metal's: a profile cannot bind it to a driver", free)
		}
	}
	for id, kind := range map[string]string{
		"bmc-bios.getSettings": "bmc.query", "bmc-bios.applySettings": "bmc.bios", "bmc-bios.resetSettings": "bmc.bios", "bmc-raid.getLayout": "bmc.query",
		"bmc-raid.applyLayout": "bmc.raid", "bmc-firmware.list": "bmc.query", "bmc-firmware.update": "bmc.firmware", "bmc-credentials.rotate": "bmc.rotate",
	} {
		if names[id] != kind {
			t.Errorf("step %s sends %q, want %s", id, names[id], kind)
		}
	}
}

// TestParseMachinesWithoutBMC: their address is a MAC or a name, and they log in
// nowhere.
func TestParseMachinesWithoutBMC(t *testing.T) {
	for _, tt := range []struct {
		driver, address, ref string
		ok                   bool
	}{
		{"wol", "52:54:00:12:34:56", "", true}, {"wol", "52-54-00-12-34-56@lan0", "", true}, {"wol", "10.0.0.5", "", false}, {"wol", "", "", false},
		{"wol", "52:54:00:12:34:56", "secret://acme/bmc", false}, {"manual", "Rack-3", "", true}, {"manual", "rack 3", "", false}, {"manual", "https://x", "", false},
		{"redfish", "10.0.0.5", "", false}, {"ipmi", "52:54:00:12:34:56", "secret://acme/bmc", false},
	} {
		_, err := ParseBMC("acme", &computev1.Bmc{Driver: tt.driver, Address: tt.address, CredentialsRef: tt.ref})
		if (err == nil) != tt.ok || err != nil && code(err) != apierr.InvalidInput {
			t.Errorf("ParseBMC(%s, %s, %s) = %v, want ok %v", tt.driver, tt.address, tt.ref, err, tt.ok)
		}
	}
	pending, err := secretstore.PendingRef("secret://acme/bmc")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ParseBMC("acme", &computev1.Bmc{Driver: "redfish", Address: "10.0.0.5", CredentialsRef: pending}); code(err) != apierr.InvalidInput {
		t.Errorf("ParseBMC(a pending password) = %v, want INVALID_INPUT", err)
	}
}

// TestProtectionTravels: the box learns of it with the boot decisions.
func TestProtectionTravels(t *testing.T) {
	c := AssignCommand(store.Snapshot{Version: 1, Machines: []store.Machine{{ID: "node_1", MACs: []string{"52:54:00:12:34:56"}, Protected: true}, {ID: "node_2", MACs: []string{"52:54:00:12:34:57"}}}}, time.Now())
	if text := c.Args.(interface{ String() string }).String(); strings.Count(text, "protected:true") != 1 {
		t.Errorf("the snapshot is %s, want one machine protected", text)
	}
}
