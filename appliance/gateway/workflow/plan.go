package workflow

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
)

// The workflows.
const (
	Inspect = "inspect"
	Deploy  = "deploy"
	// Wipe clears disks by the ramdisk.
	Wipe = "wipe"
	// BootISO, BootKernel and BootMedia boot what is not the ramdisk; BootDisk ends that.
	BootISO    = "boot-iso"
	BootKernel = "boot-kernel"
	BootMedia  = "boot-media"
	BootDisk   = "boot-disk"
	// byHand ends the name of a workflow of a machine that people switch: it assigns,
	// and waits.
	byHand = "-by-hand"
)

// states are the machine's while a workflow runs and after it; those of a workflow
// that is not here leave it as it is.
var states = map[string]struct{ during, after string }{
	Inspect: {metal.Inspecting, metal.Inspected},
	Deploy:  {metal.Deploying, metal.Deployed},
	Wipe:    {metal.Wiping, metal.Wiped},
}

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
	fetched := []action{
		{"artifact.fetch", 4 * time.Hour, fetchArtifacts},
		{"pxe.assign-boot", 10 * time.Minute, assignBoot},
	}
	switch name {
	case Wipe:
		return append(boot,
			action{"disk.wipe", 20*time.Hour + resultGrace, wipeDisks},
			action{"pxe.assign-local-disk", 10 * time.Minute, assignLocalDisk},
			action{"power.off", 10 * time.Minute, powerOff},
		), nil
	case BootISO, BootKernel:
		return append(fetched,
			action{"power.off", 10 * time.Minute, powerOff},
			action{"boot.pxe", 10 * time.Minute, bootPXE},
			action{"power.on", 10 * time.Minute, powerOn},
			action{"boot.wait", 30 * time.Minute, waitBooted},
		), nil
	case BootISO + byHand, BootKernel + byHand:
		return append(fetched, action{"boot.wait", maxWindow, waitBooted}), nil
	case BootMedia:
		return []action{
			fetched[0],
			{"power.off", 10 * time.Minute, powerOff},
			{"media.insert", 10 * time.Minute, insertMedia},
			{"boot.cdrom", 10 * time.Minute, bootCDROM},
			{"power.on", 10 * time.Minute, powerOn},
		}, nil
	case BootDisk:
		return []action{
			{"pxe.assign-local-disk", 10 * time.Minute, assignLocalDisk},
			{"power.off", 10 * time.Minute, powerOff},
			{"boot.disk", 10 * time.Minute, bootDisk},
			{"power.on", 10 * time.Minute, powerOn},
		}, nil
	case BootDisk + byHand:
		return []action{{"pxe.assign-local-disk", 10 * time.Minute, assignLocalDisk}}, nil
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
	switch name {
	case Deploy:
		return 3 * time.Hour
	case Wipe:
		return 22 * time.Hour
	}
	return time.Hour
}

// kindsOf are the command kinds that a workflow sends.
func kindsOf(name string) []string {
	kinds := []string{cmdkind.Query, cmdkind.Boot, cmdkind.Power, cmdkind.Assign}
	return append(kinds, map[string][]string{
		Deploy: {cmdkind.Stream}, Wipe: {cmdkind.Wipe}, BootMedia: {cmdkind.Fetch, cmdkind.Media},
		BootISO: {cmdkind.Fetch, cmdkind.Explain}, BootKernel: {cmdkind.Fetch, cmdkind.Explain},
	}[strings.TrimSuffix(name, byHand)]...)
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
