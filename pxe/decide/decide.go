// Package decide is the one place that says what a machine gets when it asks to boot, over DHCP, TFTP and HTTP alike.
package decide

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/mandate"
	"github.com/better-compute/site-appliance/pxe/productuuid"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// Action is what the client gets in the end.
type Action int

const (
	// None: it did not ask to boot.
	None Action = iota
	// Deny: nothing, for the reason that is given.
	Deny
	// RunAgent: the ramdisk, by the script and what it names.
	RunAgent
	// Kernel: an assigned kernel and initrd.
	Kernel
	// UKI: an assigned unified kernel image.
	UKI
	// SanbootISO: iPXE gives the image out as a drive.
	SanbootISO
	// HTTPISO: the firmware loads the image into memory by itself.
	HTTPISO
	// LocalDisk: back to the firmware's next boot entry.
	LocalDisk
)

var actions = [...]string{None: "none", Deny: "deny", RunAgent: "agent", Kernel: "kernel", UKI: "uki", SanbootISO: "sanboot-iso", HTTPISO: "http-iso", LocalDisk: "local-disk"}

func (a Action) String() string { return named(actions[:], int(a), "action") }

// Boots says whether the action starts something that the box gives.
func (a Action) Boots() bool { return a >= RunAgent && a <= HTTPISO }

// Exit is how the client is sent to its disk.
type Exit int

const (
	// NoAnswer: DHCP names no file.
	NoAnswer Exit = iota
	// ExitCode: the script ends.
	ExitCode
	// NotFound: HTTP answers 404.
	NotFound
	// Sanboot: the script boots the first disk itself, where its end only started the machine anew.
	Sanboot
)

var exits = [...]string{NoAnswer: "no-answer", ExitCode: "exit", NotFound: "404", Sanboot: "sanboot"}

func (e Exit) String() string { return named(exits[:], int(e), "exit") }

// loaders is the program that comes first, by architecture.
var loaders = map[Arch]string{BIOS: files.BIOSLoader, X64: files.UEFILoader, ARM64: files.ARM64Loader}

// Bounds.
const (
	// MaxBoots is how often a machine boots in one window if its assignment says nothing.
	MaxBoots = 8
	// unknownRAMISO is the largest image that goes into memory whose size nobody
	// knows, where the machine has no other way.
	unknownRAMISO = 1 << 30
	// besideISO is the memory that firmware and the image's system need beside it.
	besideISO = 1 << 30
	// below4G is as much memory as lies apart from the rest, below the devices' hole.
	below4G = 4 << 30
	// maxBIOSISO is what an iPXE of 32 bits can count: beyond it, it reads from the
	// image's start again.
	maxBIOSISO = 1 << 32
	// returns is how often a BIOS machine may come back from its exit before its disk is booted directly.
	returns = 2
)

// Request is who asks. Machine is nil for one that nobody assigned.
type Request struct {
	Machine *pxev1.Machine
	// Unknown is the policy for machines without an assignment; nil: nothing.
	Unknown   *pxev1.Unknown
	MAC, UUID string
	Client    Client
	// Boots is how often the machine has booted in its window, and Done whether
	// what the window was for is done.
	Boots int
	Done  bool
	// Returned is how often it was sent to its disk in the last minutes.
	Returned int
	Now      time.Time
}

// Decision is the answer.
type Decision struct {
	Action Action
	// Loader is the boot program that comes first, a name of package files; empty: none.
	Loader string
	// HTTP: by URL, not by TFTP name.
	HTTP bool
	// Firmware: it boots the image by itself.
	Firmware bool
	// Exit is how LocalDisk is reached.
	Exit   Exit
	Reason string
}

// File is the name that the loader travels under in DHCP, TFTP and HTTP.
func (d Decision) File() string {
	if d.Loader == "" {
		return ""
	}
	return path.Base(d.Loader)
}

// Decide says what the client gets, and why.
func Decide(r Request) Decision {
	if r.Client.Program == System {
		return Decision{Reason: "not a boot request"}
	}
	m, why := r.machine()
	if m == nil {
		return deny(why)
	}
	if why := over(r, m); why != "" {
		return r.localDisk(why)
	}
	action, ok := assigned[m.Action]
	if !ok {
		return deny(fmt.Sprintf("action %d is not served", m.Action))
	}
	return action(r, m)
}

// assigned is what each action of a snapshot comes to.
var assigned = map[pxev1.Action]func(Request, *pxev1.Machine) Decision{
	pxev1.Action_ACTION_LOCAL_DISK: func(r Request, _ *pxev1.Machine) Decision { return r.localDisk("assigned to its local disk") },
	pxev1.Action_ACTION_RAMDISK:    ramdisk,
	pxev1.Action_ACTION_KERNEL:     kernel,
	pxev1.Action_ACTION_UKI:        uki,
	pxev1.Action_ACTION_ISO:        iso,
}

func deny(why string) Decision { return Decision{Action: Deny, Reason: why} }

// over says why a window is not for booting any more.
func over(r Request, m *pxev1.Machine) string {
	switch most := int(cmp.Or(m.MaxBoots, MaxBoots)); {
	case m.Action == pxev1.Action_ACTION_LOCAL_DISK, r.Client.Program == Agent: // a booted agent may finish what it began
		return ""
	case r.Now.UnixMilli() >= m.WindowUntilMs:
		// Nothing could enrol with a voucher of this window, so the disk is the better try.
		return "the boot window " + m.WindowId + " has ended"
	case r.Done:
		return "what the boot window " + m.WindowId + " was for is done"
	case r.Boots >= most:
		return fmt.Sprintf("it has booted %d times in the boot window %s, of %d", r.Boots, m.WindowId, most)
	}
	return ""
}

// machine is the assignment, or for an unknown machine what the policy makes it; nil: why not.
func (r Request) machine() (*pxev1.Machine, string) {
	if r.Machine != nil {
		return r.Machine, ""
	}
	if why := r.uninspected(); why != "" {
		return nil, "the machine is unknown" + strings.TrimPrefix(why, ".")
	}
	return Stranger(r.MAC, r.Unknown), ""
}

// Assigned is the assignment that counts for who asks; nil: none.
func (r Request) Assigned() *pxev1.Machine {
	m, _ := r.machine()
	return m
}

func (r Request) uninspected() string {
	u := r.Unknown
	switch {
	case !u.GetInspect():
		return "."
	case len(u.Expected) == 0 || slices.ContainsFunc(u.Expected, r.expected):
		return ""
	case r.UUID == "" && slices.ContainsFunc(u.Expected, func(e *pxev1.Expected) bool { return e.GetProductUuid() != "" }):
		return " and not one of those that are expected by their MACs; its UUID was not heard yet"
	}
	return " and not one of those that are expected"
}

func (r Request) expected(e *pxev1.Expected) bool {
	same, _ := productuuid.Same(e.GetProductUuid(), r.UUID)
	return same || e.GetMac() != "" && strings.EqualFold(e.GetMac(), r.MAC)
}

// IsStranger says whether an id is of an unknown machine: whoever is on the LAN can
// make them up.
func IsStranger(machineID string) bool { return strings.HasPrefix(machineID, mandate.StrangerPrefix) }

// Stranger is what an unknown machine counts as where strangers are inspected.
func Stranger(mac string, u *pxev1.Unknown) *pxev1.Machine {
	return &pxev1.Machine{MachineId: mandate.StrangerPrefix + strings.ReplaceAll(mac, ":", ""), Macs: []string{mac}, Action: pxev1.Action_ACTION_RAMDISK,
		Purpose: "inspect", WindowId: u.GetWindowId(), WindowUntilMs: u.GetWindowUntilMs()}
}

// localDisk sends the client to its disk in the way that it knows.
func (r Request) localDisk(why string) Decision {
	d := Decision{Action: LocalDisk, Reason: why}
	switch c := r.Client; {
	case c.Program == HTTPBoot:
		d.HTTP, d.Exit = true, NotFound
	case c.Program == GRUB:
		d.HTTP, d.Exit = true, ExitCode
	case c.Program == IPXE || c.Looping && !IsGRUB(r.loader()):
		d.HTTP, d.Exit = true, ExitCode
		if c.Arch == BIOS && r.Returned >= returns {
			d.Exit, d.Reason = Sanboot, why+"; it came back from its exit, so that its first disk is booted directly"
		}
	}
	return d
}

// script is an action that a script of ours carries out: at once where our iPXE
// asks, after it elsewhere.
func (r Request) script(a Action, why string) Decision {
	c := r.Client
	loader := r.loader()
	switch {
	case c.Program == Agent || c.Program == GRUB || c.Program == IPXE && c.Arch == ARM64:
		// There is no iPXE for arm64 that is better than the one that asks.
		return Decision{Action: a, HTTP: true, Reason: why}
	case IsGRUB(loader):
		// Whoever asks anew comes from a start that failed: nothing hides here.
		return Decision{Action: a, Loader: loader, HTTP: c.Program == HTTPBoot, Reason: why}
	case !bootable(c.Arch):
		return deny("there is no boot program for " + c.Arch.String())
	case c.Looping:
		return Decision{Action: a, HTTP: true, Reason: why + "; it does not start the boot program that it fetched, so that it gets what iPXE gets"}
	case c.Program == IPXE && !c.Foreign:
		return Decision{Action: a, HTTP: true, Reason: why}
	}
	d := Decision{Action: a, Loader: loader, HTTP: c.Program == HTTPBoot, Reason: why}
	if d.HTTP && c.Arch == BIOS {
		return deny("there is no boot program for HTTP boot of a BIOS")
	}
	return d
}

// loader is the boot program that comes first.
func (r Request) loader() string {
	if chosen := files.Choices[r.Assigned().GetLoader()]; chosen != "" && r.Client.Arch == X64 {
		return chosen
	}
	return loaders[r.Client.Arch]
}

// IsGRUB says whether a boot program is GRUB or leads to it.
func IsGRUB(loader string) bool { return loader == files.ARM64Loader || loader == files.Shim }

// Second is the boot program that a first one fetches from beside itself; empty: none.
func Second(loader string) string {
	if loader == files.Shim {
		return files.ShimSecond
	}
	return ""
}

func ramdisk(r Request, m *pxev1.Machine) Decision {
	return r.script(RunAgent, "assigned to the ramdisk for "+m.Purpose)
}

func kernel(r Request, _ *pxev1.Machine) Decision {
	if r.Client.Program == Agent {
		return deny("no ramdisk is assigned")
	}
	return r.script(Kernel, "assigned to a kernel")
}

func uki(r Request, _ *pxev1.Machine) Decision {
	const why = "assigned to a unified kernel image"
	switch c := r.Client; {
	case c.Program == Agent:
		return deny("no ramdisk is assigned")
	case !c.Arch.uefi():
		return deny("a unified kernel image needs UEFI, and this is " + c.Arch.String())
	case c.Program == HTTPBoot:
		// The firmware starts and verifies it by itself.
		return Decision{Action: UKI, HTTP: true, Firmware: true, Reason: why}
	}
	return r.script(UKI, why)
}

func iso(r Request, m *pxev1.Machine) Decision {
	why := "assigned to the disc image " + m.GetIso().GetName()
	switch c := r.Client; {
	case c.Program == Agent:
		return deny("no ramdisk is assigned")
	case c.Arch == ARM64 && c.Program != HTTPBoot:
		return deny("a disc image boots on arm64 by HTTP boot only")
	case c.Program == GRUB || IsGRUB(r.loader()) && c.Program != HTTPBoot:
		return deny("a disc image boots by shim and GRUB by HTTP boot only: GRUB gives no drives out, which the loaders snponly and ipxe do")
	case c.Program == HTTPBoot && c.Arch.uefi():
		fits, told := fitsRAM(m.GetIso().GetSize(), m.GetRamBytes(), c.Arch)
		if fits {
			return Decision{Action: HTTPISO, HTTP: true, Firmware: true, Reason: why + ", into memory: " + told + limits(m.GetIso().GetClass(), HTTPISO, c.Arch)}
		}
		if IsGRUB(r.loader()) {
			return deny(why + ", and " + told)
		}
		why += "; " + told + ", so that it is given as a drive"
	}
	if c, size := r.Client, m.GetIso().GetSize(); c.Arch == BIOS && size > maxBIOSISO {
		return deny(fmt.Sprintf("%s, and %d MiB are more than the %d MiB that iPXE can read of a drive in a BIOS", why, size>>20, maxBIOSISO>>20))
	}
	return r.script(SanbootISO, why+limits(m.GetIso().GetClass(), SanbootISO, r.Client.Arch))
}

// fitsRAM says whether firmware finds memory for an image in one piece, with
// enough left for it and the image's system.
func fitsRAM(size, ram uint64, arch Arch) (fits bool, told string) {
	piece := max(ram/2, ram-min(ram, below4G))
	switch {
	case ram == 0 && arch != ARM64:
		return false, "the machine's memory is not known"
	case ram == 0 && size <= unknownRAMISO:
		return true, fmt.Sprintf("%d MiB, and the machine's memory is not known", size>>20)
	case ram == 0:
		return false, fmt.Sprintf("%d MiB are more than the %d MiB that fit in memory of unknown size", size>>20, unknownRAMISO>>20)
	case ram < besideISO || size > ram-besideISO:
		return false, fmt.Sprintf("%d MiB do not fit in %d MiB of memory with %d MiB left", size>>20, ram>>20, besideISO>>20)
	case size > piece:
		return false, fmt.Sprintf("%d MiB do not fit in one piece of %d MiB of memory, of which %d MiB are sure to lie together", size>>20, ram>>20, piece>>20)
	}
	return true, fmt.Sprintf("%d of %d MiB", size>>20, ram>>20)
}

// limits says what an image will miss once its own kernel runs.
func limits(class pxev1.IsoClass, a Action, arch Arch) string {
	switch {
	case class == pxev1.IsoClass_ISO_CLASS_SELF_CONTAINED:
		return ""
	case class == pxev1.IsoClass_ISO_CLASS_REFETCHES:
		return "; its system fetches the image again where its command line says from where"
	case class == pxev1.IsoClass_ISO_CLASS_NEEDS_DRIVE && a == HTTPISO:
		return "; its system looks for its disc, and finds the one in memory only if its kernel has a driver for memory that firmware names (nfit, pmem)"
	case class == pxev1.IsoClass_ISO_CLASS_NEEDS_DRIVE && arch == BIOS:
		return "; its system looks for its disc, and the drive is gone once its kernel leaves the BIOS: it will not get far"
	case class == pxev1.IsoClass_ISO_CLASS_NEEDS_DRIVE:
		return "; its system looks for its disc, and the drive is gone once its kernel leaves the firmware: it will not get far"
	}
	return "; it is not known whether its system looks for its disc, which is gone then"
}

// Fetchable says whether a client that reaches file by TFTP or HTTP may have it:
// the name alone tells which firmware asks.
func Fetchable(r Request, file string) (Decision, bool) {
	last := deny("no such file")
	for _, c := range Clients {
		r.Client = c
		d := Decide(r)
		if d.File() == file && file != "" {
			return d, true
		}
		if second := Second(d.Loader); second != "" && path.Base(second) == file {
			d.Loader = second
			return d, true
		}
		if served(c, file) {
			last = d
		}
	}
	return last, false
}

// served says whether file is a name that the client could be given.
func served(c Client, file string) bool {
	if path.Base(loaders[c.Arch]) == file {
		return true
	}
	for _, chosen := range files.Choices {
		if c.Arch == X64 && (path.Base(chosen) == file || Second(chosen) != "" && path.Base(Second(chosen)) == file) {
			return true
		}
	}
	return false
}

// Clients are the kinds that an explanation goes through.
var Clients = []Client{
	{Program: Firmware, Arch: BIOS}, {Program: Firmware, Arch: X64}, {Program: HTTPBoot, Arch: X64},
	{Program: IPXE, Arch: BIOS}, {Program: IPXE, Arch: X64}, {Program: IPXE, Arch: X64, Foreign: true},
	{Program: Firmware, Arch: ARM64}, {Program: HTTPBoot, Arch: ARM64}, {Program: GRUB, Arch: X64}, {Program: GRUB, Arch: ARM64},
}
