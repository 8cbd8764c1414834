package metal

import (
	"encoding/json"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/plugins/metal"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// The actions of an assignment beside local disk and the ramdisk.
const (
	ISO    = "iso"
	Kernel = "kernel"
	UKI    = "uki"
)

// The operations of a virtual drive.
const insertMedia = "virtual-media.insert"

// The kinds of firmware that a machine boots by.
const (
	BIOS = "bios"
	UEFI = "uefi"
)

var actions = map[string]pxev1.Action{
	Ramdisk: pxev1.Action_ACTION_RAMDISK, ISO: pxev1.Action_ACTION_ISO, Kernel: pxev1.Action_ACTION_KERNEL, UKI: pxev1.Action_ACTION_UKI,
}

// boots fills in what a machine boots until its window ends.
func boots(entry *pxev1.Machine, m store.Machine, now time.Time) {
	a := m.Assignment
	action, ok := actions[a.Action]
	if !ok || !a.WindowUntil.After(now) {
		return
	}
	entry.Action, entry.Purpose, entry.WindowId = action, a.Purpose, a.WindowID
	entry.WindowUntilMs, entry.Artifacts, entry.MaxBoots = a.WindowUntil.UnixMilli(), a.Artifacts, a.Boot.MaxBoots
	if iso := a.Boot.ISO; iso != nil {
		entry.Iso = &pxev1.Iso{Sha256: iso.SHA256, Size: iso.SizeBytes, Name: iso.Name, Class: pxev1.IsoClass(iso.Class)}
		entry.RamBytes = Memory(m.HardwareJSON)
	}
	if k := a.Boot.Kernel; k != nil {
		entry.Kernel = &pxev1.Kernel{Sha256: k.SHA256, InitrdSha256: k.InitrdSHA256, Cmdline: k.Cmdline}
	}
}

// Netboot says what a machine may boot from the network at a time; empty: its disk.
func Netboot(a store.Assignment, now time.Time) string {
	if _, ok := actions[a.Action]; !ok || !a.WindowUntil.After(now) {
		return ""
	}
	what := a.Action
	switch {
	case a.Boot.ISO != nil:
		what += " " + a.Boot.ISO.Name
	case a.Boot.Kernel != nil:
		what += " " + a.Boot.Kernel.SHA256
	default:
		what += " for " + a.Purpose
	}
	return what + " until " + a.WindowUntil.UTC().Format(time.RFC3339)
}

// Memory is what an inspection says that a machine has, in bytes; 0: it does not.
func Memory(hardwareJSON string) uint64 {
	var i metal.Inspection
	if json.Unmarshal([]byte(hardwareJSON), &i) != nil {
		return 0
	}
	sum := uint64(0)
	for _, m := range i.Memory {
		if m.SizeBytes > math.MaxUint64-sum {
			return 0
		}
		sum += m.SizeBytes
	}
	return sum
}

// HasDrive reports whether a machine's BMC has a virtual drive, as far as metal, the
// configuration or the kinds that the site names for its driver tell.
func (m *Metal) HasDrive(driver string, kinds []string) bool {
	operations, known := m.operations(driver)
	if known {
		return slices.Contains(operations, insertMedia)
	}
	return slices.Contains(kinds, "virtual-media")
}

// ByHand reports whether a machine's driver cannot choose what it boots: then a
// person starts it, or its own boot order does.
func (m *Metal) ByHand(driver string, kinds []string) bool {
	operations, known := m.operations(driver)
	if known {
		return !slices.Contains(operations, SetBootDevice)
	}
	return kinds != nil && !slices.Contains(kinds, "management")
}

// InsertCommand puts an artifact of the site into the virtual drive.
func InsertCommand(b store.BMC, sha256 string) (Command, error) {
	args, err := json.Marshal([]string{metal.ArtifactScheme + sha256})
	if err != nil {
		return Command{}, err
	}
	c, _, err := Operate(b, insertMedia, string(args))
	return c, err
}

// FetchCommand has the box take artifacts into its cache.
func FetchCommand(sha256 []string) Command {
	c := CommandOf(cmdkind.Fetch)
	c.Args = &pxev1.FetchRequest{Sha256: sha256}
	return c
}

// CheckLoader checks a boot program of UEFI firmware; empty is the usual one.
func CheckLoader(loader string) error {
	if loader != "" && files.Choices[loader] == "" {
		return apierr.Invalid("loader %.40q: want %s", loader, strings.Join(slices.Sorted(maps.Keys(files.Choices)), ", "))
	}
	return nil
}

// maxWiped is how many disks one command wipes.
const maxWiped = 64

// CheckSerials checks the disks that a machine is to lose.
func CheckSerials(serials []string) error {
	if len(serials) == 0 || len(serials) > maxWiped {
		return apierr.Invalid("disk_serials: %d disks: want 1 to %d, each by its serial number", len(serials), maxWiped)
	}
	for i, s := range serials {
		if err := checkSerial(s); err != nil {
			return err
		}
		if slices.Contains(serials[:i], s) {
			return apierr.Invalid("disk_serials: %s is given twice", s)
		}
	}
	return nil
}
