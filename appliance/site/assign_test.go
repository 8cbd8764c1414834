package site

import (
	"path/filepath"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/pxe/assign"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// TestAssignCounts: a snapshot counts for each machine that it changes as this box
// knows it, and only a granted one lets go of a protection, of machines that it names.
func TestAssignCounts(t *testing.T) {
	store, err := assign.Open(filepath.Join(t.TempDir(), "assign"))
	if err != nil {
		t.Fatal(err)
	}
	kind := assignKind(store, func(string, string, string, any) {})
	machine := func(id, mac string, boot, protected bool) *pxev1.Machine {
		m := &pxev1.Machine{MachineId: id, Macs: []string{mac}, Action: pxev1.Action_ACTION_LOCAL_DISK, Protected: protected}
		if boot {
			m.Action, m.Purpose, m.WindowId, m.WindowUntilMs = pxev1.Action_ACTION_RAMDISK, "deploy", "w", 1
		}
		return m
	}
	const a, b = "52:54:00:00:00:01", "52:54:00:00:00:02"
	for i, tt := range []struct {
		machines       []*pxev1.Machine
		granted        bool
		targets        []string
		always         bool
		protectedAfter []bool // of a and b
	}{
		{machines: []*pxev1.Machine{machine("a", a, false, true), machine("b", b, false, true)}, protectedAfter: []bool{true, true}},
		{machines: []*pxev1.Machine{machine("a", a, false, false), machine("b", b, false, false)}, protectedAfter: []bool{true, true}},
		{machines: []*pxev1.Machine{machine("a", a, true, false), machine("b", b, false, false)}, granted: true,
			targets: []string{"machine:a"}, always: true, protectedAfter: []bool{false, true}},
		{machines: []*pxev1.Machine{machine("a", a, true, false), machine("b", b, false, false)}, protectedAfter: []bool{false, true}},
		{machines: []*pxev1.Machine{machine("a", a, false, false), machine("b", b, true, false)},
			targets: []string{"machine:b"}, always: true, protectedAfter: []bool{false, true}},
		{machines: []*pxev1.Machine{machine("a", a, true, false), machine("b", b, true, false)},
			targets: []string{"machine:a"}, protectedAfter: []bool{false, true}},
	} {
		args, err := proto.Marshal(&pxev1.AssignRequest{Version: uint64(i + 1), Machines: tt.machines})
		if err != nil {
			t.Fatal(err)
		}
		op, err := kind.Decode(args)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(op.Targets, tt.targets) || op.Always != tt.always || op.Counts != (len(tt.targets) > 0) || !op.Destructive {
			t.Errorf("snapshot %d: targets %v, always %v, counts %v; want %v, %v", i, op.Targets, op.Always, op.Counts, tt.targets, tt.always)
		}
		if _, err := kind.Run(t.Context(), dispatch.Call{Operation: op, Granted: tt.granted}); err != nil {
			t.Fatal(err)
		}
		if got := []bool{store.Protected("a"), store.Protected("b")}; !slices.Equal(got, tt.protectedAfter) {
			t.Errorf("snapshot %d: protected = %v, want %v", i, got, tt.protectedAfter)
		}
	}
}
