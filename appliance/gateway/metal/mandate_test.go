package metal

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/pxe/mandate"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

type commandKey struct{ ed25519.PrivateKey }

func (k commandKey) KeyID() string {
	id := sha256.Sum256(k.Public().(ed25519.PublicKey))
	return hex.EncodeToString(id[:])
}

func (k commandKey) Sign(message []byte) ([]byte, error) {
	return ed25519.Sign(k.PrivateKey, message), nil
}

// TestSignAssignments: who boots the ramdisk is handed what the gateway's key says
// it is there for, whatever a caller wrote there; nobody else is handed anything.
func TestSignAssignments(t *testing.T) {
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	key := commandKey{private}
	complete := SignAssignments(key)
	req := &pxev1.AssignRequest{Version: 7, Machines: []*pxev1.Machine{
		{MachineId: "a", Action: pxev1.Action_ACTION_RAMDISK, Purpose: "deploy", WindowId: "w1", WindowUntilMs: 5, Assignment: []byte("a caller's")},
		{MachineId: "b", Action: pxev1.Action_ACTION_RAMDISK, Purpose: "inspect", WindowId: "w2", WindowUntilMs: 6},
		{MachineId: "c", Action: pxev1.Action_ACTION_LOCAL_DISK},
		{MachineId: "d", Action: pxev1.Action_ACTION_ISO, Purpose: "iso", WindowId: "w3"},
	}}
	args, err := proto.Marshal(req)
	if err != nil {
		t.Fatal(err)
	}
	out, err := complete(args)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := complete(args); err != nil || !bytes.Equal(again, out) {
		t.Errorf("the same arguments come to other bytes: %v", err)
	}
	if again, err := complete(out); err != nil || !bytes.Equal(again, out) {
		t.Errorf("completed arguments come to other bytes: %v", err)
	}
	var got pxev1.AssignRequest
	if err := proto.Unmarshal(out, &got); err != nil {
		t.Fatal(err)
	}
	find := func(id string) (ed25519.PublicKey, bool) { return public, id == key.KeyID() }
	for i, want := range []*pxev1.Assignment{
		{MachineId: "a", Purpose: "deploy", WindowId: "w1", WindowUntilMs: 5},
		{MachineId: "b", Purpose: "inspect", WindowId: "w2", WindowUntilMs: 6},
		nil, nil,
	} {
		m := got.Machines[i]
		switch a, err := mandate.Verify(m.Assignment, find); {
		case want == nil && len(m.Assignment) > 0:
			t.Errorf("%s is handed an assignment, want none", m.MachineId)
		case want != nil && (err != nil || !proto.Equal(a, want)):
			t.Errorf("%s: %v, %v, want %v", m.MachineId, a, err, want)
		}
		m.Assignment, req.Machines[i].Assignment = nil, nil
	}
	if !proto.Equal(&got, req) {
		t.Errorf("beside the assignments, %v came of %v", &got, req)
	}
	if _, err := complete([]byte("\xff")); err == nil {
		t.Error("arguments that are none are completed")
	}
	if _, err := mandate.Verify(got.Machines[0].Assignment, find); errs.CodeOf(err) != errs.InvalidPayload {
		t.Errorf("an assignment of nothing: %v", err)
	}
}
