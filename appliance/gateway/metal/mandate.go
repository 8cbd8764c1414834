package metal

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/pxe/mandate"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// SignAssignments completes the arguments of a pxe.assign command: each machine
// that boots the ramdisk is handed what it is there for, under the command key.
func SignAssignments(key mandate.Signer) func(args []byte) ([]byte, error) {
	return func(args []byte) ([]byte, error) {
		var req pxev1.AssignRequest
		if err := proto.Unmarshal(args, &req); err != nil {
			return nil, fmt.Errorf("sign assignments: %w", err)
		}
		for _, m := range req.GetMachines() {
			if m.GetAction() != pxev1.Action_ACTION_RAMDISK {
				continue
			}
			signed, err := mandate.Sign(key, &pxev1.Assignment{
				MachineId: m.GetMachineId(), Purpose: m.GetPurpose(), WindowId: m.GetWindowId(), WindowUntilMs: m.GetWindowUntilMs(),
			})
			if err != nil {
				return nil, fmt.Errorf("machine %s: %w", m.GetMachineId(), err)
			}
			m.Assignment = signed
		}
		return proto.MarshalOptions{Deterministic: true}.Marshal(&req)
	}
}
