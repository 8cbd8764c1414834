package decide

import (
	"testing"
	"time"

	"github.com/better-compute/site-appliance/pxe/pxev1"
)

func TestDecide(t *testing.T) {
	now := time.UnixMilli(1_000_000)
	ram := &pxev1.Machine{Action: pxev1.Action_ACTION_RAMDISK, Purpose: "deploy", WindowId: "w1", WindowUntilMs: 1_000_001}
	ended := &pxev1.Machine{Action: pxev1.Action_ACTION_RAMDISK, Purpose: "deploy", WindowId: "w1", WindowUntilMs: 1_000_000}
	local := &pxev1.Machine{Action: pxev1.Action_ACTION_LOCAL_DISK}
	for _, tt := range []struct {
		machine *pxev1.Machine
		client  Client
		want    Decision
	}{
		{ram, BIOS, Decision{Chain, "undionly.kpxe", "assigned to the ramdisk for deploy"}},
		{ram, UEFI, Decision{Chain, "snponly.efi", "assigned to the ramdisk for deploy"}},
		{ram, UEFIHTTP, Decision{Chain, "snponly.efi", "assigned to the ramdisk for deploy"}},
		{ram, IPXE, Decision{Ramdisk, "", "assigned to the ramdisk for deploy"}},
		{ram, Agent, Decision{Ramdisk, "", "assigned to the ramdisk for deploy"}},
		{ram, OtherArch, Decision{None, "", "the architecture is not served"}},
		{ram, System, Decision{None, "", "not a boot request"}},
		{ended, UEFI, Decision{LocalDisk, "", "the boot window w1 has ended"}},
		{ended, IPXE, Decision{LocalDisk, "", "the boot window w1 has ended"}},
		{ended, Agent, Decision{Ramdisk, "", "assigned to the ramdisk for deploy"}},
		{local, BIOS, Decision{LocalDisk, "", "assigned to its local disk"}},
		{local, IPXE, Decision{LocalDisk, "", "assigned to its local disk"}},
		{local, System, Decision{None, "", "not a boot request"}},
		{nil, UEFI, Decision{None, "", "the machine is unknown"}},
		{nil, IPXE, Decision{None, "", "the machine is unknown"}},
		{nil, System, Decision{None, "", "not a boot request"}},
		{&pxev1.Machine{Action: 9}, UEFI, Decision{None, "", "action 9 is not served"}},
	} {
		if got := Decide(Request{tt.machine, tt.client, now}); got != tt.want {
			t.Errorf("Decide(%v, %v) = %+v, want %+v", tt.machine, tt.client, got, tt.want)
		}
	}
}
