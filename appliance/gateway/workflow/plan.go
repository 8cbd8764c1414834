package workflow

import (
	"context"
	"fmt"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
)

// The workflows.
const (
	Inspect = "inspect"
	Deploy  = "deploy"
)

// action is one step of a plan. limit counts from the step's first start.
type action struct {
	name  string
	limit time.Duration
	run   func(ctx context.Context, r *run) error
}

// plan is the steps of a workflow, in order. A stored workflow is taken up by
// position, so a plan that changes gets a new name.
func plan(name string) ([]action, error) {
	boot := []action{
		{"window.open", 2 * time.Minute, openWindow},
		{"pxe.assign-ramdisk", 10 * time.Minute, assignRamdisk},
		{"power.off", 10 * time.Minute, powerOff},
		{"boot.pxe", 10 * time.Minute, bootPXE},
		{"power.on", 10 * time.Minute, powerOn},
		{"ramdisk.wait", 30 * time.Minute, waitRamdisk},
	}
	switch name {
	case Inspect:
		return append(boot,
			action{"hardware.wait", 10 * time.Minute, waitHardware},
			action{"pxe.assign-local-disk", 10 * time.Minute, assignLocalDisk},
			action{"power.off", 10 * time.Minute, powerOff},
		), nil
	case Deploy:
		return append(boot,
			action{"seed.prepare", 2 * time.Minute, prepareSeed},
			action{"image.stream", 70 * time.Minute, streamImage},
			action{"pxe.assign-local-disk", 10 * time.Minute, assignLocalDisk},
			action{"power.off", 10 * time.Minute, powerOff},
			action{"boot.disk", 10 * time.Minute, bootDisk},
			action{"power.on", 10 * time.Minute, powerOn},
			action{"node.wait", 30 * time.Minute, waitNode},
		), nil
	}
	return nil, fmt.Errorf("unknown workflow %q", name)
}

// windowLength is how long a workflow's boot window stays open.
func windowLength(name string) time.Duration {
	if name == Deploy {
		return 3 * time.Hour
	}
	return time.Hour
}

// kindsOf are the command kinds that a workflow sends.
func kindsOf(name string) []string {
	kinds := []string{cmdkind.Query, cmdkind.Boot, cmdkind.Power, cmdkind.Assign}
	if name == Deploy {
		kinds = append(kinds, "image.stream")
	}
	return kinds
}

// plan is the workflow's own: a profile's as it was when the workflow began.
func (r *run) plan() ([]action, error) {
	if len(r.params.Plan) == 0 {
		return plan(r.w.Name)
	}
	var actions []action
	for _, p := range r.params.Plan {
		actions = append(actions, action{p.Uses, p.Timeout + resultGrace, func(ctx context.Context, r *run) error { return r.profileStep(ctx, p) }})
	}
	return actions, nil
}
