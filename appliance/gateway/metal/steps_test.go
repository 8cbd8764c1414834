package metal

import (
	"encoding/json"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
)

// TestSteps: each registered step relays one operation to the machine's own BMC,
// with its credential by reference, as the kind that carries it.
func TestSteps(t *testing.T) {
	m := store.Machine{ID: "node_1", BMC: store.BMC{Driver: "ipmi", Address: "10.0.0.5", CredentialsRef: "secret://acme/bmc", DriverOptions: `{"cipherSuite":3}`, TLSSPKISHA256: "aa"}}
	steps := map[string]module.Step{}
	for _, s := range Steps() {
		steps[s.ID] = s
	}
	for _, tt := range []struct {
		id, with, kind, operation, args string
		safe                            bool
	}{
		{"power.getPower", "", "bmc.query", "power.getPower", "", true},
		{"power.setPower", `"off"`, "bmc.power", "power.setPower", `["off"]`, false},
		{"power.setPower", `["on",null]`, "bmc.power", "power.setPower", `["on"]`, false},
		{"management.setBootDevice", `{"device":"pxe"}`, "bmc.boot", "management.setBootDevice", `[{"device":"pxe"}]`, true},
		{"management.resetBmc", "", "bmc.power", "management.resetBmc", "", false},
		{"inspect.inspect", "[]", "bmc.query", "inspect.inspect", "", true},
		{"media.insert", `"http://10.0.0.1/x.iso"`, "bmc.media", "virtual-media.insert", `["http://10.0.0.1/x.iso"]`, true},
		{"media.eject", "", "bmc.media", "virtual-media.eject", "", true},
	} {
		c, err := steps[tt.id].Command(m, json.RawMessage(tt.with))
		if err != nil {
			t.Errorf("%s with %s: %v", tt.id, tt.with, err)
			continue
		}
		want := &bmcv1.BmcOperationRequest{Driver: "ipmi", Address: "10.0.0.5", CredentialsRef: "secret://acme/bmc", DriverOptionsJson: `{"cipherSuite":3}`, TlsSpkiSha256: "aa", Operation: tt.operation, ArgsJson: tt.args}
		if c.Kind != tt.kind || c.RetrySafe != tt.safe || !slices.Equal(c.SecretRefs, []string{"secret://acme/bmc"}) || !proto.Equal(c.Args, want) {
			t.Errorf("%s with %s = %+v, want %s with %v", tt.id, tt.with, c, tt.kind, want)
		}
	}
	for id, with := range map[string]string{"power.getPower": "1", "power.setPower": `"explode"`, "media.insert": "{", "management.setBootDevice": "[1,2]"} {
		if _, err := steps[id].Command(m, json.RawMessage(with)); errs.CodeOf(err) != errs.InvalidConfig {
			t.Errorf("%s with %s: %v, want invalid-config", id, with, err)
		}
		if err := steps[id].Check(json.RawMessage(with)); errs.CodeOf(err) != errs.InvalidConfig {
			t.Errorf("%s checked with %s: %v, want invalid-config", id, with, err)
		}
	}
	answer, err := proto.Marshal(&bmcv1.BmcOperationResult{ResultJson: `"on"`})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := steps["power.getPower"].Result(answer); err != nil || string(got) != `"on"` {
		t.Errorf("Result = %s, %v, want \"on\"", got, err)
	}
	if _, err := steps["power.getPower"].Result([]byte{0xff}); errs.CodeOf(err) != errs.InvalidPayload {
		t.Errorf("Result(no message) = %v, want invalid-payload", err)
	}
}
