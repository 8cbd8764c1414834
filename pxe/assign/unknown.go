package assign

import (
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/mandate"
	"github.com/better-compute/site-appliance/pxe/productuuid"
	"github.com/better-compute/site-appliance/pxe/pxev1"
	"github.com/better-compute/site-appliance/pxe/script"
)

// Bounds of the fields that a machine boots with.
const (
	maxExpected   = 4096
	maxBootsLimit = 1000
	maxIsoBytes   = 1 << 40
	maxIsoName    = 128
	maxAssignment = 4 << 10
)

// Unknown is what machines get that the snapshot does not name; nil: nothing.
func (s *Store) Unknown() *pxev1.Unknown {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.snapshot.GetUnknown()
}

// Window is the boot window that is in force for a machine.
func (s *Store) Window(machineID string) (window string, ok bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, m := range s.snapshot.GetMachines() {
		if m.GetMachineId() == machineID && m.GetWindowId() != "" {
			return m.GetWindowId(), true
		}
	}
	if u := s.snapshot.GetUnknown(); u.GetInspect() && decide.IsStranger(machineID) {
		return u.GetWindowId(), true
	}
	return "", false
}

func checkUnknown(u *pxev1.Unknown) error {
	bad := func(format string, args ...any) error {
		return errs.New(errs.InvalidArgs, "unknown machines: "+format, args...)
	}
	switch {
	case u == nil:
		return nil
	case !u.Inspect && (u.WindowId != "" || u.WindowUntilMs != 0 || len(u.Expected) > 0):
		return bad("a window or a list without inspect")
	case !u.Inspect:
		return nil
	case !validID(u.WindowId):
		return bad("window_id %.80q: want 1 to 64 of a-z, A-Z, 0-9, _ and -", u.WindowId)
	case u.WindowUntilMs <= 0:
		return bad("window_until_ms is missing")
	case len(u.Expected) > maxExpected:
		return bad("%d expected machines are more than %d", len(u.Expected), maxExpected)
	}
	for i, e := range u.Expected {
		id, ok := productuuid.Parse(e.GetProductUuid())
		switch {
		case e.GetMac() == "" && id == "":
			return bad("expected machine %d has neither mac nor product_uuid", i)
		case e.GetMac() != "" && !validMAC(e.GetMac()):
			return bad("expected machine %d: MAC %.40q: want six lower-case bytes such as 52:54:00:12:34:56", i, e.GetMac())
		case id != "" && !ok:
			return bad("expected machine %d: product_uuid %.80q is no UUID", i, e.GetProductUuid())
		// No more is refused: what else counts as none may change, and a whole snapshot with it.
		case id != "" && (strings.Trim(id, "0-") == "" || strings.Trim(id, "f-") == ""):
			return bad("expected machine %d: product_uuid %s is that of a machine that was given none", i, e.GetProductUuid())
		}
	}
	return nil
}

func validMAC(mac string) bool {
	hw, err := net.ParseMAC(mac)
	return err == nil && len(hw) == 6 && hw.String() == mac
}

// checkBoot judges what a machine boots with beside the ramdisk's fields.
func checkBoot(m *pxev1.Machine, bad func(format string, args ...any) error) error {
	if a := m.Address; a != "" {
		if ip, err := netip.ParseAddr(a); err != nil || !ip.Is4() || ip.String() != a || ip.IsUnspecified() || ip.IsMulticast() || ip.IsLoopback() {
			return bad("address %.40q: want a machine's IPv4 address", a)
		}
	}
	iso, kernel := m.Iso, m.Kernel
	switch {
	case m.Loader != "" && files.Choices[m.Loader] == "":
		return bad("loader %.40q: want %s", m.Loader, strings.Join(slices.Sorted(maps.Keys(files.Choices)), ", "))
	case m.MaxBoots > maxBootsLimit:
		return bad("max_boots %d is more than %d", m.MaxBoots, maxBootsLimit)
	case (iso != nil) != (m.Action == pxev1.Action_ACTION_ISO):
		return bad("iso and the action for it go together")
	case (kernel != nil) != (m.Action == pxev1.Action_ACTION_KERNEL || m.Action == pxev1.Action_ACTION_UKI):
		return bad("kernel and the actions for it go together")
	case len(m.Assignment) > maxAssignment:
		return bad("assignment of %d bytes: want at most %d", len(m.Assignment), maxAssignment)
	case len(m.Assignment) > 0 && m.Action != pxev1.Action_ACTION_RAMDISK:
		return bad("assignment without the ramdisk, which alone reads it")
	case iso != nil && !ValidDigest(iso.Sha256):
		return bad("iso.sha256 %.80q: want 64 lower-case hex digits", iso.Sha256)
	case iso != nil && (iso.Size == 0 || iso.Size > maxIsoBytes):
		return bad("iso.size %d: want 1 to %d", iso.Size, maxIsoBytes)
	case iso != nil && len(iso.Name) > maxIsoName:
		return bad("iso.name is longer than %d bytes", maxIsoName)
	case iso != nil && pxev1.IsoClass_name[int32(iso.Class)] == "":
		return bad("iso.class %d is unknown", iso.Class)
	case kernel != nil && !ValidDigest(kernel.Sha256):
		return bad("kernel.sha256 %.80q: want 64 lower-case hex digits", kernel.Sha256)
	case kernel != nil && kernel.InitrdSha256 != "" && !ValidDigest(kernel.InitrdSha256):
		return bad("kernel.initrd_sha256 %.80q: want 64 lower-case hex digits", kernel.InitrdSha256)
	case kernel != nil && m.Action == pxev1.Action_ACTION_UKI && (kernel.InitrdSha256 != "" || kernel.Cmdline != ""):
		return bad("a unified kernel image has its initrd and its command line inside")
	}
	if len(m.Assignment) > 0 {
		// The box does not judge the signature, but hands over nothing about another boot.
		a, err := mandate.Claims(m.Assignment)
		if err != nil || a.MachineId != m.MachineId || a.Purpose != m.Purpose || a.WindowId != m.WindowId || a.WindowUntilMs != m.WindowUntilMs {
			return bad("assignment: its signed part is not about this machine, purpose and window")
		}
	}
	if kernel != nil {
		if err := script.CheckCmdline(kernel.Cmdline); err != nil {
			return bad("kernel.cmdline: %v", err)
		}
	}
	return nil
}

// purposes are those that an action may have; nil: none.
var purposes = map[pxev1.Action][]string{
	pxev1.Action_ACTION_LOCAL_DISK: nil,
	pxev1.Action_ACTION_RAMDISK:    {"inspect", "deploy", "wipe"},
	pxev1.Action_ACTION_KERNEL:     {"boot"},
	pxev1.Action_ACTION_UKI:        {"boot"},
	pxev1.Action_ACTION_ISO:        {"iso"},
}
