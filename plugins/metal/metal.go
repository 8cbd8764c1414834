// Package metal declares the kinds of bare-metal drivers: power, management and inspect.
package metal

import (
	"encoding/json"
	"slices"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// PowerState is what a machine's power is.
type PowerState string

// The states of power.
const (
	PowerOn      PowerState = "on"
	PowerOff     PowerState = "off"
	PowerUnknown PowerState = "unknown"
)

// PowerAction is what setPower does.
type PowerAction string

// The actions of setPower. Soft asks the operating system; NMI is optional for a driver.
const (
	ActionOn    PowerAction = "on"
	ActionOff   PowerAction = "off"
	ActionSoft  PowerAction = "soft"
	ActionCycle PowerAction = "cycle"
	ActionReset PowerAction = "reset"
	ActionNMI   PowerAction = "nmi"
)

// Device is what a machine boots from.
type Device string

// The boot devices. None takes an override back.
const (
	DeviceNone  Device = "none"
	DevicePXE   Device = "pxe"
	DeviceDisk  Device = "disk"
	DeviceCDROM Device = "cdrom"
	DeviceBIOS  Device = "bios"
)

// BootDevice is a boot override. Without Persistent it holds for one boot.
type BootDevice struct {
	Device     Device `json:"device"`
	Persistent bool   `json:"persistent"`
	EFI        bool   `json:"efi"`
}

// Power is the kind "power".
type Power interface {
	GetPower(*driver.Context) (PowerState, error)
	SetPower(*driver.Context, PowerAction) error
}

// Management is the kind "management".
type Management interface {
	SetBootDevice(*driver.Context, BootDevice) error
}

// BootDeviceGetter is management's optional getBootDevice.
type BootDeviceGetter interface {
	GetBootDevice(*driver.Context) (BootDevice, error)
}

// BMCResetter is management's optional resetBmc.
type BMCResetter interface {
	ResetBMC(*driver.Context) error
}

// Inspector is the kind "inspect".
type Inspector interface {
	Inspect(*driver.Context) (Inspection, error)
}

// PowerKind is power {getPower, setPower}.
func PowerKind() driver.Kind[Power] {
	return driver.Kind[Power]{Name: "power", Operations: map[string]driver.Operation[Power]{
		"getPower": driver.Get(Power.GetPower),
		"setPower": driver.Set(ParseAction, Power.SetPower),
	}}
}

// ManagementKind is management {setBootDevice; getBootDevice, resetBmc}.
func ManagementKind() driver.Kind[Management] {
	return driver.Kind[Management]{Name: "management", Operations: map[string]driver.Operation[Management]{
		"setBootDevice": driver.Set(ParseBootDevice, Management.SetBootDevice),
		"getBootDevice": driver.Optional[Management](driver.Get(BootDeviceGetter.GetBootDevice)),
		"resetBmc": driver.Optional[Management](driver.Get(func(r BMCResetter, ctx *driver.Context) (any, error) {
			return nil, r.ResetBMC(ctx)
		})),
	}}
}

// InspectKind is inspect {inspect}.
func InspectKind() driver.Kind[Inspector] {
	return driver.Kind[Inspector]{Name: "inspect", Operations: map[string]driver.Operation[Inspector]{
		"inspect": driver.Get(Inspector.Inspect),
	}}
}

// ParseAction reads setPower's argument; an unknown action is invalid-args.
func ParseAction(raw json.RawMessage) (PowerAction, error) {
	var a PowerAction
	if err := json.Unmarshal(raw, &a); err != nil {
		return "", errs.New(errs.InvalidArgs, "power action is not a string")
	}
	if !slices.Contains([]PowerAction{ActionOn, ActionOff, ActionSoft, ActionCycle, ActionReset, ActionNMI}, a) {
		return "", errs.New(errs.InvalidArgs, "unknown power action %.40q: want on, off, soft, cycle, reset or nmi", a)
	}
	return a, nil
}

// ParseBootDevice reads setBootDevice's argument; an unknown device or field is invalid-args.
func ParseBootDevice(raw json.RawMessage) (BootDevice, error) {
	var b BootDevice
	if err := driver.StrictJSON(raw, &b, "device", "persistent", "efi"); err != nil {
		return b, errs.New(errs.InvalidArgs, "boot device: %v", err)
	}
	if !slices.Contains([]Device{DeviceNone, DevicePXE, DeviceDisk, DeviceCDROM, DeviceBIOS}, b.Device) {
		return b, errs.New(errs.InvalidArgs, "unknown boot device %.40q: want none, pxe, disk, cdrom or bios", b.Device)
	}
	return b, nil
}
