// Package decide is the one place that says what a machine gets when it asks to boot, over DHCP, TFTP and HTTP alike.
package decide

import (
	"fmt"
	"time"

	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// Client is the program that asks.
type Client int

const (
	// System is an operating system or anything else that does not boot: it gets an address and no more.
	System Client = iota
	// BIOS is a PXE option ROM on x86.
	BIOS
	// UEFI is UEFI PXE on x86-64.
	UEFI
	// UEFIHTTP is UEFI HTTP boot on x86-64.
	UEFIHTTP
	// IPXE is an iPXE that can run our script.
	IPXE
	// Agent is a booted machine that fetches its artifacts.
	Agent
	// OtherArch is firmware of an architecture that is not served.
	OtherArch
)

func (c Client) String() string {
	switch c {
	case System:
		return "system"
	case BIOS:
		return "bios"
	case UEFI:
		return "uefi"
	case UEFIHTTP:
		return "uefi-http"
	case IPXE:
		return "ipxe"
	case Agent:
		return "agent"
	case OtherArch:
		return "other-arch"
	}
	return fmt.Sprintf("client-%d", int(c))
}

// Action is what the client gets.
type Action int

const (
	// None: no boot instruction.
	None Action = iota
	// Chain: firmware loads our iPXE, File over TFTP or HTTP.
	Chain
	// Ramdisk: the ramdisk script and what it names.
	Ramdisk
	// LocalDisk: back to the firmware's next boot entry.
	LocalDisk
)

func (a Action) String() string {
	switch a {
	case None:
		return "none"
	case Chain:
		return "chain"
	case Ramdisk:
		return "ramdisk"
	case LocalDisk:
		return "local-disk"
	}
	return fmt.Sprintf("action-%d", int(a))
}

// The names of the boot programs, as they travel in DHCP, TFTP and HTTP.
const (
	UEFIFile = "snponly.efi"
	BIOSFile = "undionly.kpxe"
)

// Request is who asks. Machine is nil for one that nobody assigned.
type Request struct {
	Machine *pxev1.Machine
	Client  Client
	Now     time.Time
}

// Decision is the answer. File is set for Chain only.
type Decision struct {
	Action Action
	File   string
	Reason string
}

// Decide says what the client gets, and why.
func Decide(r Request) Decision {
	switch {
	case r.Client == System:
		return Decision{None, "", "not a boot request"}
	case r.Machine == nil:
		return Decision{None, "", "the machine is unknown"}
	}
	switch r.Machine.Action {
	case pxev1.Action_ACTION_LOCAL_DISK:
		return Decision{LocalDisk, "", "assigned to its local disk"}
	case pxev1.Action_ACTION_RAMDISK:
	default:
		return Decision{None, "", fmt.Sprintf("action %d is not served", r.Machine.Action)}
	}
	// A booted agent may finish what it began inside the window.
	if r.Client != Agent && r.Now.UnixMilli() >= r.Machine.WindowUntilMs {
		// Nothing could enrol with a voucher of this window, so the disk is the better try.
		return Decision{LocalDisk, "", "the boot window " + r.Machine.WindowId + " has ended"}
	}
	why := "assigned to the ramdisk for " + r.Machine.Purpose
	switch r.Client {
	case BIOS:
		return Decision{Chain, BIOSFile, why}
	case UEFI, UEFIHTTP:
		return Decision{Chain, UEFIFile, why}
	case IPXE, Agent:
		return Decision{Ramdisk, "", why}
	}
	return Decision{None, "", "the architecture is not served"}
}
