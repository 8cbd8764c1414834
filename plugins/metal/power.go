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

// Power is the kind "power".
type Power interface {
	GetPower(*driver.Context) (PowerState, error)
	SetPower(*driver.Context, PowerAction) error
}

// PowerKind is power {getPower, setPower}.
func PowerKind() driver.Kind[Power] {
	return driver.Kind[Power]{
		Name: "power",
		Operations: map[string]driver.Operation[Power]{
			"getPower": driver.Get(Power.GetPower),
			"setPower": driver.Set(ParseAction, Power.SetPower),
		},
		Proxy: func(i *driver.Implementation) Power { return powerProxy{i} },
	}
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

type powerProxy struct{ i *driver.Implementation }

func (p powerProxy) GetPower(ctx *driver.Context) (PowerState, error) {
	s, err := ask[PowerState](p.i, ctx, "getPower")
	if err == nil && !slices.Contains([]PowerState{PowerOn, PowerOff, PowerUnknown}, s) {
		err = strange("getPower", "%.40q: want on, off or unknown", s)
	}
	return s, err
}

func (p powerProxy) SetPower(ctx *driver.Context, a PowerAction) error {
	return do(p.i, ctx, "setPower", a)
}
