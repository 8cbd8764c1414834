package site

import (
	"encoding/json"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/bmc/manual"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
)

// A person's word ends what a power command waits for, in a queue of its own,
// needs nobody's grant, and may come twice.
func TestConfirmKind(t *testing.T) {
	asked := make(chan manual.Asked, 4)
	d, desk, err := manual.New(manual.Options{Tell: func(a manual.Asked) { asked <- a }})
	if err != nil {
		t.Fatal(err)
	}
	kind := confirmKind(desk)
	if kind.Name != "bmc.confirm" || kind.Lane != "query" {
		t.Errorf("kind %s in lane %s, want bmc.confirm in query", kind.Name, kind.Lane)
	}
	for _, tt := range []struct {
		address, power string
		code           errs.Code
	}{
		{"Shelf-2", "on", ""}, {"shelf-2", "off", ""}, {"shelf-2", "cycle", errs.InvalidArgs}, {"shelf-2", "", errs.InvalidArgs}, {"", "on", errs.InvalidAddress}, {"a/b", "on", errs.InvalidAddress},
	} {
		args, err := proto.Marshal(&bmcv1.BmcConfirmRequest{Address: tt.address, Power: tt.power})
		if err != nil {
			t.Fatal(err)
		}
		op, err := kind.Decode(args)
		if errs.CodeOf(err) != tt.code {
			t.Errorf("Decode(%q, %q) = %v, want %q", tt.address, tt.power, err, tt.code)
		}
		if err == nil && (op.Destructive || op.Counts || !op.RetrySafe || op.Key != "confirm shelf-2") {
			t.Errorf("Decode(%q, %q) = %+v", tt.address, tt.power, op)
		}
	}
	if _, err := kind.Decode([]byte{0x1a, 1, 'x'}); errs.CodeOf(err) != errs.InvalidPayload {
		t.Errorf("Decode of an unknown field = %v, want invalid-payload", err)
	}
	call, _ := drivertest.Context(t, t.Context(), nil)
	ended := make(chan error, 1)
	go func() {
		_, err := d.Invoke(call, "power", "setPower", json.RawMessage(`{"address":"shelf-2"}`), json.RawMessage(`"off"`))
		ended <- err
	}()
	<-asked
	args, _ := proto.Marshal(&bmcv1.BmcConfirmRequest{Address: "Shelf-2", Power: "off"})
	op, err := kind.Decode(args)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kind.Run(t.Context(), dispatch.Call{Operation: op}); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Errorf("setPower after the word: %v", err)
	}
	if got := kind.Recover(t.Context(), dispatch.Call{Operation: op}); got.String() != "rerun" {
		t.Errorf("Recover = %v, want rerun", got)
	}
}
