package redfish

import (
	"context"
	"maps"
	"net/http"
	"slices"
	"strings"

	bmclib "github.com/bmc-toolbox/bmclib/v2"
	"github.com/bmc-toolbox/bmclib/v2/bmc"
	schemas "github.com/stmcginnis/gofish/redfish"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// bootTargets are our devices in Redfish's words, the standard one first.
var bootTargets = map[metal.Device][]schemas.BootSourceOverrideTarget{
	metal.DeviceNone:  {schemas.NoneBootSourceOverrideTarget},
	metal.DevicePXE:   {schemas.PxeBootSourceOverrideTarget},
	metal.DeviceDisk:  {schemas.HddBootSourceOverrideTarget},
	metal.DeviceCDROM: {schemas.CdBootSourceOverrideTarget, "CD/DVD", "Usb"},
	metal.DeviceBIOS:  {schemas.BiosSetupBootSourceOverrideTarget},
}

// otherDevice stands for a target that we have no word for.
const otherDevice metal.Device = "other"

const (
	bootEnabled = "BootSourceOverrideEnabled"
	bootTarget  = "BootSourceOverrideTarget"
	bootMode    = "BootSourceOverrideMode"
)

// SetBootDevice sets the override and reads it back.
func (m *machine) SetBootDevice(ctx *driver.Context, b metal.BootDevice) error {
	return m.with(ctx, func(c *bmclib.Client, p *provider) error {
		p.tell("boot", "setting boot device "+string(b.Device))
		_, err := c.SetBootDevice(ctx, string(b.Device), b.Persistent, b.EFI)
		return err
	})
}

// GetBootDevice is the override in force; device none when there is none.
func (m *machine) GetBootDevice(ctx *driver.Context) (b metal.BootDevice, err error) {
	err = m.with(ctx, func(c *bmclib.Client, _ *provider) error {
		o, err := c.GetBootDeviceOverride(ctx)
		b = metal.BootDevice{Device: metal.Device(o.Device), Persistent: o.IsPersistent, EFI: o.IsEFIBoot}
		return err
	})
	return b, err
}

// bootDevice is the override in force.
func bootDevice(boot object) metal.BootDevice {
	enabled, target := boot.text(bootEnabled), boot.text(bootTarget)
	if enabled == "" || strings.EqualFold(enabled, "Disabled") || target == "" || strings.EqualFold(target, "None") {
		return metal.BootDevice{Device: metal.DeviceNone}
	}
	dev := metal.BootDevice{
		Device:     otherDevice,
		Persistent: strings.EqualFold(enabled, "Continuous"),
		EFI:        strings.EqualFold(boot.text(bootMode), "UEFI"),
	}
	for device, words := range bootTargets {
		for _, word := range words {
			if strings.EqualFold(string(word), target) {
				dev.Device = device
			}
		}
	}
	return dev
}

func (s *system) bootDevice() metal.BootDevice { return bootDevice(s.boot) }

// BootDeviceOverrideGet answers the override in force.
func (p *provider) BootDeviceOverrideGet(ctx context.Context) (bmc.BootDeviceOverride, error) {
	s, err := p.find(ctx)
	if err != nil {
		return bmc.BootDeviceOverride{}, err
	}
	dev := s.bootDevice()
	if dev.Device == otherDevice {
		return bmc.BootDeviceOverride{}, errs.New(errs.BmcError, "the boot override is %s, which no boot device of ours stands for", legible(s.boot.text(bootTarget)))
	}
	return bmc.BootDeviceOverride{Device: bmc.BootDeviceType(dev.Device), IsPersistent: dev.Persistent, IsEFIBoot: dev.EFI}, nil
}

// BootDeviceSet sets the override and reads it until it shows: some BMCs accept
// what they then ignore, and some show it late.
func (p *provider) BootDeviceSet(ctx context.Context, device string, persistent, efi bool) (bool, error) {
	if _, known := bootTargets[metal.Device(device)]; !known {
		return false, errs.New(errs.InvalidArgs, "unknown boot device %q", legible(device))
	}
	s, err := p.find(ctx)
	if err != nil {
		return false, err
	}
	err = p.setBoot(ctx, s, metal.BootDevice{Device: metal.Device(device), Persistent: persistent, EFI: efi})
	return err == nil, err
}

func (p *provider) setBoot(ctx context.Context, s *system, want metal.BootDevice) error {
	plans, err := bootPlans(s, want)
	if err != nil {
		return err
	}
	done, objection, err := p.tryPlans(ctx, s, plans)
	if err != nil {
		return err
	}
	if done == nil {
		return objection
	}
	got := want
	got.Persistent = want.Persistent && !done.once
	now, err := p.verifyBoot(ctx, s, got, done)
	if err == nil && want.Persistent && !done.once && !now.Persistent && now.Device != metal.DeviceNone {
		// It said yes to Continuous and shows Once: some need to be told twice.
		if done, _, err = p.tryPlans(ctx, s, plans[:1]); err == nil && done != nil {
			now, err = p.verifyBoot(ctx, s, got, done)
		}
	}
	if err != nil {
		if done != nil && done.lost != nil {
			return done.lost
		}
		return err
	}
	if want.Persistent && want.Device != metal.DeviceNone && !now.Persistent {
		p.tell("boot", "the BMC keeps the boot device for the next boot only")
		return errs.New(errs.BootOnceOnly, "the BMC refuses a persistent boot device: %s is set for the next boot only", want.Device)
	}
	return nil
}

// bootPlan is one way to say what is wanted.
type bootPlan struct {
	path   string
	boot   map[string]any
	once   bool  // instead of persistent
	noMode bool  // the mode is not sent
	lost   error // the answer was lost: what is read tells
}

// bootPlans are the ways to ask a BMC that shows s, the plainest first: with the
// boot mode, which some lose unless it is sent; without it, which some refuse;
// with all of the Boot object, which some want; and, where persistent is asked
// for, all of these for one boot.
func bootPlans(s *system, want metal.BootDevice) ([]bootPlan, error) {
	if want.Device == metal.DeviceNone {
		return []bootPlan{
			{boot: map[string]any{bootEnabled: "Disabled"}},
			{boot: map[string]any{bootEnabled: "Disabled", bootTarget: "None"}},
			{boot: whole(s.boot, map[string]any{bootEnabled: "Disabled", bootTarget: "None"})},
		}, nil
	}
	target, ok := pick(s.targets, bootTargets[want.Device]...)
	if !ok {
		return nil, errs.New(errs.UnsupportedOperation, "the BMC does not offer boot device %s", want.Device)
	}
	var words []schemas.BootSourceOverrideEnabled
	if want.Persistent {
		words = append(words, schemas.ContinuousBootSourceOverrideEnabled)
	}
	words = append(words, schemas.OnceBootSourceOverrideEnabled)
	mode := "Legacy"
	if want.EFI {
		mode = "UEFI"
	}
	var plans []bootPlan
	for _, word := range words {
		enabled, ok := pick(s.enables, word)
		if !ok {
			continue
		}
		once := word == schemas.OnceBootSourceOverrideEnabled && want.Persistent
		fields := map[string]any{bootTarget: target, bootEnabled: enabled}
		moded := maps.Clone(fields)
		moded[bootMode] = mode
		// A BMC that shows no mode has only one.
		if s.boot.text(bootMode) != "" {
			plans = append(plans, bootPlan{boot: moded, once: once})
		}
		plans = append(plans, bootPlan{boot: fields, once: once, noMode: true})
		if s.boot.text(bootMode) != "" {
			plans = append(plans, bootPlan{boot: whole(s.boot, moded), once: once})
		}
		plans = append(plans, bootPlan{boot: whole(s.boot, fields), once: once, noMode: true})
	}
	if len(plans) == 0 {
		return nil, errs.New(errs.UnsupportedOperation, "the BMC does not offer a boot override for one boot")
	}
	return plans, nil
}

// whole is all of the override that a client can write, with these changes.
func whole(boot object, changes map[string]any) map[string]any {
	all := map[string]any{}
	for name, value := range boot {
		if !strings.Contains(name, "@") && strings.HasPrefix(name, "BootSourceOverride") {
			all[name] = value
		}
	}
	maps.Copy(all, changes)
	return all
}

// tryPlans sends one plan after another until one is taken, to the settings
// object where the BMC takes boot overrides there. Only an answer that the
// request itself is wrong leads on. Without any taken, objection is the first's.
func (p *provider) tryPlans(ctx context.Context, s *system, plans []bootPlan) (done *bootPlan, objection, err error) {
	paths, err := p.bootPaths(ctx, s)
	if err != nil {
		return nil, nil, err
	}
	for _, path := range paths {
		var sent []string
		for _, one := range plans {
			raw, err := encode(one.boot)
			if err != nil {
				return nil, nil, err
			}
			if slices.Contains(sent, string(raw)) {
				continue
			}
			sent = append(sent, string(raw))
			one.path = path
			_, err = p.write(ctx, http.MethodPatch, path, map[string]any{"Boot": one.boot})
			switch {
			case err == nil:
				return &one, nil, nil
			case errs.CodeOf(err) == errs.Interrupted:
				one.lost = err
				return &one, nil, nil
			case !objected(err):
				return nil, nil, err
			case objection == nil:
				objection = err
			}
		}
	}
	return nil, objection, nil
}

// bootPaths are where a boot override may be written: the system, and its settings
// object, first where that has one.
func (p *provider) bootPaths(ctx context.Context, s *system) ([]string, error) {
	if s.pending == "" || s.pending == s.path {
		return []string{s.path}, nil
	}
	o, err := p.get(ctx, s.pending)
	if err != nil && errs.CodeOf(err) != errs.BmcError {
		return nil, err
	}
	switch boot := o.object("Boot"); {
	case err != nil:
		return []string{s.path}, nil
	case boot[bootTarget] == nil && boot[bootEnabled] == nil:
		return []string{s.path, s.pending}, nil
	}
	return []string{s.pending, s.path}, nil
}

// verifyBoot reads the override until it is what was asked for: in the system,
// or in the settings object that it went to, where it waits for the next boot.
func (p *provider) verifyBoot(ctx context.Context, s *system, want metal.BootDevice, done *bootPlan) (metal.BootDevice, error) {
	waiting, cancel := patience(ctx, p.timing.settle)
	defer cancel()
	// Only a short while for one that shows Once and may yet show Continuous.
	briefly, stop := context.WithTimeout(waiting, 3*p.timing.tick)
	defer stop()
	var last metal.BootDevice
	for {
		for _, path := range slices.Compact([]string{s.path, done.path}) {
			boot, err := p.bootAt(waiting, path)
			if err != nil {
				// One that restarts is away for a while.
				if waiting.Err() != nil || done.lost != nil && !final(err) {
					break
				}
				return last, err
			}
			if got := bootDevice(boot); path == s.path || last.Device != want.Device {
				last = got
			}
			if bootShown(boot, want, done.noMode) {
				return bootDevice(boot), nil
			}
		}
		half := want.Persistent && last.Device == want.Device && !last.Persistent
		if half && !sleep(briefly, p.timing.tick) || !half && !sleep(waiting, p.timing.tick) {
			break
		}
	}
	switch {
	case errs.CodeOf(ctx.Err()) == errs.Cancelled:
		return last, errs.New(errs.Cancelled, "the operation was cancelled before the boot device was verified")
	case last.Device != want.Device:
		return last, errs.New(errs.BmcError, "the BMC accepted boot device %s and still shows %s", want.Device, last.Device)
	case want.Persistent && !last.Persistent:
		return last, nil
	case last.Persistent != want.Persistent:
		return last, errs.New(errs.BmcError, "the BMC accepted %s for one boot and shows it for every boot", want.Device)
	}
	return last, errs.New(errs.BmcError, "the BMC accepted boot device %s, but shows boot mode %s", want.Device, modeWord(last.EFI))
}

func modeWord(efi bool) string {
	if efi {
		return "UEFI"
	}
	return "Legacy"
}

func (p *provider) bootAt(ctx context.Context, path string) (object, error) {
	o, err := p.get(ctx, path)
	return o.object("Boot"), err
}

// bootShown reports whether a Boot object shows what was asked for. A mode that a
// BMC has no choice of, because it refuses to be told one or shows none, counts
// only where UEFI was asked for and something else is shown.
func bootShown(boot object, want metal.BootDevice, noMode bool) bool {
	got := bootDevice(boot)
	switch mode := boot.text(bootMode); {
	case got.Device != want.Device:
		return false
	case want.Device == metal.DeviceNone:
		return true
	case got.Persistent != want.Persistent:
		return false
	case mode == "":
		return true
	case noMode:
		return got.EFI || !want.EFI
	}
	return got.EFI == want.EFI
}

// keepBoot sets a persistent boot device again that a power action turned into
// one for a single boot, as some BMCs do. The power action is done whatever comes
// of it, so that it is told and is no error.
func (p *provider) keepBoot(ctx context.Context, before, now *system) {
	was, is := before.bootDevice(), now.bootDevice()
	if !was.Persistent || was.Device == metal.DeviceNone || was.Device == otherDevice || is.Device != was.Device || is.Persistent {
		return
	}
	if err := p.setBoot(ctx, now, was); err != nil {
		p.tell("boot", "the persistent boot device now holds for one boot only: "+err.Error())
		return
	}
	p.tell("boot", "the power action made the persistent boot device one for a single boot; it is persistent again")
}
