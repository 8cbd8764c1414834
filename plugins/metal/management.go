package metal

import (
	"encoding/json"
	"slices"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
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

// LogEntry is one line of a BMC's event log, the oldest first.
type LogEntry struct {
	ID string `json:"id"`
	// Time is absent where the BMC keeps none.
	Time *time.Time `json:"time,omitempty"`
	// Severity is ok, warning or critical.
	Severity string `json:"severity,omitempty"`
	Sensor   string `json:"sensor,omitempty"`
	Message  string `json:"message"`
}

// SecureBoot is what setSecureBoot sets.
type SecureBoot struct {
	Enabled bool `json:"enabled"`
}

// SecureBootState is what getSecureBoot answers. Mode is the firmware's:
// setup, user, audit or deployed.
type SecureBootState struct {
	Enabled bool   `json:"enabled"`
	Mode    string `json:"mode,omitempty"`
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

// EventLogGetter is management's optional getEventLog.
type EventLogGetter interface {
	GetEventLog(*driver.Context) ([]LogEntry, error)
}

// SecureBootGetter is management's optional getSecureBoot.
type SecureBootGetter interface {
	GetSecureBoot(*driver.Context) (SecureBootState, error)
}

// SecureBootSetter is management's optional setSecureBoot. It holds from the
// next boot.
type SecureBootSetter interface {
	SetSecureBoot(*driver.Context, SecureBoot) error
}

// ManagementKind is management {setBootDevice; getBootDevice, resetBmc,
// getEventLog, getSecureBoot, setSecureBoot}.
func ManagementKind() driver.Kind[Management] {
	return driver.Kind[Management]{
		Name: "management",
		Operations: map[string]driver.Operation[Management]{
			"setBootDevice": driver.Set(ParseBootDevice, Management.SetBootDevice),
			"getBootDevice": driver.Optional[Management](driver.Get(BootDeviceGetter.GetBootDevice)),
			"resetBmc":      driver.Optional[Management](driver.Do(BMCResetter.ResetBMC)),
			"getEventLog": driver.Optional[Management](driver.Get(func(g EventLogGetter, ctx *driver.Context) ([]LogEntry, error) {
				log, err := g.GetEventLog(ctx)
				return legible(some(log)), err
			})),
			"getSecureBoot": driver.Optional[Management](driver.Get(SecureBootGetter.GetSecureBoot)),
			"setSecureBoot": driver.Optional[Management](driver.Set(ParseSecureBoot, SecureBootSetter.SetSecureBoot)),
		},
		Proxy: func(i *driver.Implementation) Management { return managementProxy{i} },
	}
}

// some answers [] rather than null for no items.
func some[E any](list []E) []E {
	if list == nil {
		return []E{}
	}
	return list
}

var devices = []Device{DeviceNone, DevicePXE, DeviceDisk, DeviceCDROM, DeviceBIOS}

// ParseBootDevice reads setBootDevice's argument; an unknown device or field is invalid-args.
func ParseBootDevice(raw json.RawMessage) (BootDevice, error) {
	var b BootDevice
	if err := strict(raw, &b, "boot device", "device", "persistent", "efi"); err != nil {
		return b, err
	}
	if !slices.Contains(devices, b.Device) {
		return b, errs.New(errs.InvalidArgs, "unknown boot device %.40q: want none, pxe, disk, cdrom or bios", b.Device)
	}
	return b, nil
}

// ParseSecureBoot reads setSecureBoot's argument, {enabled}.
func ParseSecureBoot(raw json.RawMessage) (SecureBoot, error) {
	var in struct {
		Enabled *bool `json:"enabled"`
	}
	if err := strict(raw, &in, "secure boot", "enabled"); err != nil {
		return SecureBoot{}, err
	}
	if in.Enabled == nil {
		return SecureBoot{}, errs.New(errs.InvalidArgs, "secure boot: enabled: want true or false")
	}
	return SecureBoot{*in.Enabled}, nil
}

type managementProxy struct{ i *driver.Implementation }

func (p managementProxy) SetBootDevice(ctx *driver.Context, b BootDevice) error {
	return do(p.i, ctx, "setBootDevice", b)
}

func (p managementProxy) GetBootDevice(ctx *driver.Context) (BootDevice, error) {
	b, err := ask[BootDevice](p.i, ctx, "getBootDevice")
	if err == nil && !slices.Contains(devices, b.Device) {
		err = strange("getBootDevice", "device %.40q: want none, pxe, disk, cdrom or bios", b.Device)
	}
	return b, err
}

func (p managementProxy) ResetBMC(ctx *driver.Context) error { return do(p.i, ctx, "resetBmc") }

func (p managementProxy) GetEventLog(ctx *driver.Context) ([]LogEntry, error) {
	return ask[[]LogEntry](p.i, ctx, "getEventLog")
}

func (p managementProxy) GetSecureBoot(ctx *driver.Context) (SecureBootState, error) {
	return ask[SecureBootState](p.i, ctx, "getSecureBoot")
}

func (p managementProxy) SetSecureBoot(ctx *driver.Context, s SecureBoot) error {
	return do(p.i, ctx, "setSecureBoot", s)
}
