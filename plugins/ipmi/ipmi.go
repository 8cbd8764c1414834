// Package ipmi is the drivers "ipmi", power, boot device and inspection of BMCs, and
// "ipmi-sol", their serial console: by ipmitool over IPMI-over-LAN.
package ipmi

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
	"github.com/better-compute/site-appliance/plugins/sdk"
)

// version of the driver.
const version = "1.0.0"

// Main serves the drivers ipmi and ipmi-sol as a plugin and returns the exit code.
func Main(pluginVersion string) int {
	d, err := Driver()
	if err != nil {
		panic(err) // a fault in this file's declaration, found by any start
	}
	sol, err := solDriver()
	if err != nil {
		panic(err)
	}
	return sdk.Main(sdk.Options{PluginVersion: pluginVersion}, d, sol)
}

// options are what tests change.
type options struct {
	dirs    []string
	timeout time.Duration
}

// Driver declares the driver.
func Driver() (*driver.Definition, error) {
	return define(options{dirs: searchPath(), timeout: runTimeout})
}

func define(o options) (*driver.Definition, error) {
	connect := func(c config, ctx *driver.Context) (*machine, error) {
		t, err := o.connect(ctx, c)
		return &machine{t}, err
	}
	return driver.Define(driver.Spec[config]{
		ID: "ipmi", Version: version, RunsOn: "site",
		Schema:    json.RawMessage(schema),
		Parse:     parseConfig,
		RetrySafe: []string{"power.getPower", "management.setBootDevice", "management.getBootDevice", "inspect.inspect"},
		Validate: func(ctx *driver.Context, c config) error {
			m, err := connect(c, ctx)
			if err != nil {
				return err
			}
			_, err = m.GetPower(ctx)
			return err
		},
		Health: func(context.Context) error {
			_, err := findTool(o.dirs)
			return err
		},
	},
		driver.Implement(metal.PowerKind(), func(c config, ctx *driver.Context) (metal.Power, error) { return connect(c, ctx) }),
		driver.Implement(metal.ManagementKind(), func(c config, ctx *driver.Context) (metal.Management, error) { return connect(c, ctx) }),
		driver.Implement(metal.InspectKind(), func(c config, ctx *driver.Context) (metal.Inspector, error) { return connect(c, ctx) }),
	)
}

// machine is one BMC for one call.
type machine struct{ tool *tool }

// GetPower reads the chassis power.
func (m *machine) GetPower(ctx *driver.Context) (metal.PowerState, error) {
	out, err := m.tool.run(ctx, patient, "chassis", "power", "status")
	if err != nil {
		return "", err
	}
	state, said := parsePower(out)
	if !said {
		return "", errs.Retry(errs.BmcError, "ipmitool did not say what the power is: %s", m.tool.firstLine(out))
	}
	return state, nil
}

// parsePower finds the line that tells the power.
func parsePower(out string) (state metal.PowerState, said bool) {
	for l := range strings.Lines(out) {
		switch l = strings.ToLower(strings.TrimSpace(l)); {
		case l == "chassis power is on":
			return metal.PowerOn, true
		case l == "chassis power is off":
			return metal.PowerOff, true
		case strings.HasPrefix(l, "chassis power is "):
			return metal.PowerUnknown, true
		}
	}
	return metal.PowerUnknown, false
}

// SetPower sends one power command, exactly once.
func (m *machine) SetPower(ctx *driver.Context, action metal.PowerAction) error {
	word := string(action)
	if action == metal.ActionNMI {
		word = "diag"
	}
	ctx.Emit(driver.Progress{Phase: "power", Message: "setting " + string(action)})
	out, err := m.tool.run(ctx, once, "chassis", "power", word)
	if err != nil {
		return err
	}
	// The exit code is 0 even when nothing was set.
	for l := range strings.Lines(out) {
		if strings.TrimSpace(l) == "Chassis Power Control: "+powerWords[action] {
			return nil
		}
	}
	return errs.Retry(errs.BmcError, "ipmitool did not say that power was set: %s", m.tool.firstLine(out))
}

// powerWords are ipmitool's for what it has done.
var powerWords = map[metal.PowerAction]string{
	metal.ActionOn: "Up/On", metal.ActionOff: "Down/Off", metal.ActionSoft: "Soft",
	metal.ActionCycle: "Cycle", metal.ActionReset: "Reset", metal.ActionNMI: "Diag",
}

// SetBootDevice sets the boot override.
func (m *machine) SetBootDevice(ctx *driver.Context, b metal.BootDevice) error {
	ctx.Emit(driver.Progress{Phase: "boot", Message: "setting boot device " + string(b.Device)})
	// Without this a BMC forgets the override after 60 s, and a machine that is
	// slow to start boots from elsewhere. Some BMCs do not know the parameter.
	if _, err := m.tool.run(ctx, patient, "raw", "0x00", "0x08", "0x03", "0x08"); err != nil {
		if errs.CodeOf(err) != errs.BmcError {
			return err
		}
		ctx.Log.Info("BMC keeps its 60 s limit on boot flags", "reason", err.Error())
	}
	args := []string{"chassis", "bootdev", string(b.Device)}
	var with []string
	if b.EFI {
		with = append(with, "efiboot")
	}
	if b.Persistent {
		with = append(with, "persistent")
	}
	if len(with) > 0 {
		args = append(args, "options="+strings.Join(with, ","))
	}
	out, err := m.tool.run(ctx, patient, args...)
	if err != nil {
		return err
	}
	// The exit code is 0 even when the set failed.
	for l := range strings.Lines(out) {
		if strings.TrimSpace(l) == "Set Boot Device to "+string(b.Device) {
			return nil
		}
	}
	return errs.Retry(errs.BmcError, "ipmitool did not say that the boot device was set: %s", m.tool.firstLine(out))
}

// GetBootDevice reads the boot override.
func (m *machine) GetBootDevice(ctx *driver.Context) (metal.BootDevice, error) {
	out, err := m.tool.run(ctx, patient, "chassis", "bootparam", "get", "5")
	if err != nil {
		return metal.BootDevice{}, err
	}
	return parseBootFlags(out)
}

// parseBootFlags reads the data bytes of boot option parameter 5 (IPMI 2.0,
// table 28-14): ipmitool's words for them differ between versions.
func parseBootFlags(out string) (metal.BootDevice, error) {
	none := metal.BootDevice{Device: metal.DeviceNone}
	for l := range strings.Lines(out) {
		_, text, ok := strings.Cut(l, "Boot parameter data:")
		if !ok {
			continue
		}
		data, err := hex.DecodeString(strings.TrimSpace(text))
		if err != nil || len(data) < 2 {
			return none, errs.Retry(errs.BmcError, "boot flags %.40q cannot be read", strings.TrimSpace(text))
		}
		const valid, persistent, efi = 0x80, 0x40, 0x20
		if data[0]&valid == 0 {
			return none, nil
		}
		device, known := map[byte]metal.Device{
			0: metal.DeviceNone, 1: metal.DevicePXE, 2: metal.DeviceDisk, 5: metal.DeviceCDROM, 6: metal.DeviceBIOS,
		}[data[1]>>2&0x0f]
		if !known {
			return none, errs.New(errs.BmcError, "boot device selector %d has no name here", data[1]>>2&0x0f)
		}
		return metal.BootDevice{Device: device, Persistent: data[0]&persistent != 0, EFI: data[0]&efi != 0}, nil
	}
	return none, errs.Retry(errs.BmcError, "ipmitool showed no boot flags")
}
