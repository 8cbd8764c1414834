package api

import (
	"context"
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/artifacts"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/appliance/gateway/workflow"
	"github.com/better-compute/site-appliance/pxe/isoclass"
	"github.com/better-compute/site-appliance/pxe/script"
)

type bootService struct{ metalService }

// The ways that a disc image boots.
const (
	overPXE   = "pxe"
	overDrive = "virtual-media"
)

// maxBoots is what a box takes.
const maxBoots = 1000

// target is a machine and what its BMC can do for a boot.
type target struct {
	store.Machine
	drive, byHand bool
}

// target finds the machine. What its driver can do decides how it is booted; refused is
// only one that can choose what it boots and not switch it on and off.
func (s bootService) target(ctx context.Context, tenantID, machine string, verb metal.Verb) (target, error) {
	m, err := s.Store.Machine(ctx, tenantID, machine)
	if err != nil {
		return target{}, err
	}
	t := target{Machine: m}
	_, _, err = s.serves(ctx, m, func(kinds []string) error {
		if t.byHand = s.Metal.ByHand(m.BMC.Driver, kinds); t.byHand {
			return nil
		}
		t.drive = s.Metal.HasDrive(m.BMC.Driver, kinds)
		return s.Metal.CheckVerb(verb, m.BMC.Driver, kinds)
	})
	return t, err
}

// params are those that all boots have.
func params(firmware string, windowS, boots uint32, t target) (workflow.Params, error) {
	p := workflow.Params{Firmware: firmware, Window: workflow.DefaultWindow, ByHand: t.byHand}
	if windowS != 0 {
		p.Window = time.Duration(windowS) * time.Second
	}
	switch {
	case firmware != metal.BIOS && firmware != metal.UEFI:
		return p, apierr.Invalid("firmware %.40q: want bios or uefi", firmware)
	case p.Window < workflow.MinWindow || p.Window > workflow.MaxWindow:
		return p, apierr.Invalid("window_s %d: want %d to %d", windowS, int(workflow.MinWindow.Seconds()), int(workflow.MaxWindow.Seconds()))
	case boots > maxBoots:
		return p, apierr.Invalid("max_boots %d: want at most %d", boots, maxBoots)
	}
	p.Boot = &store.Boot{MaxBoots: boots}
	if boots == 0 {
		p.Boot.MaxBoots = workflow.DefaultBoots
	}
	return p, nil
}

// BootIso tells what is known to stand in the way, and begins the boot unless something
// refuses it.
func (s bootService) BootIso(ctx context.Context, req *connect.Request[computev1.BootIsoRequest]) (*connect.Response[computev1.BootIsoResponse], error) {
	in := req.Msg
	t, err := s.target(ctx, in.TenantId, in.Machine, metal.VerbBootISO)
	if err != nil {
		return nil, err
	}
	if in.Iso == "" {
		return nil, apierr.Invalid("iso is missing")
	}
	iso, err := s.Store.ISO(ctx, in.TenantId, in.Iso)
	if err != nil {
		return nil, err
	}
	facts, err := factsOf(iso)
	if err != nil {
		return nil, err
	}
	firmware := in.Firmware
	if firmware == "" {
		firmware = metal.BIOS
		if facts.UEFI {
			firmware = metal.UEFI
		}
	}
	p, err := params(firmware, in.WindowS, in.MaxBoots, t)
	if err != nil {
		return nil, err
	}
	p.Boot.ISO = &store.BootISO{Name: iso.Name, SHA256: iso.SHA256, SizeBytes: iso.SizeBytes, Class: int32(facts.Class)}
	res := &computev1.BootIsoResponse{Way: overPXE, Firmware: firmware}
	if t.drive && !in.Pxe {
		res.Way = overDrive
	}
	boot := isoclass.Boot{Name: iso.Name, Size: iso.SizeBytes, Drive: res.Way == overDrive, UEFI: firmware == metal.UEFI, RAM: metal.Memory(t.HardwareJSON), Loader: t.Loader}
	var refusals []string
	for _, l := range isoclass.Limits(facts.Image, boot) {
		res.Limits = append(res.Limits, &computev1.BootLimit{Text: l.Text, Refuses: l.Refuses})
		if l.Refuses {
			refusals = append(refusals, l.Text)
		}
	}
	tell := func(text string) { res.Limits = append(res.Limits, &computev1.BootLimit{Text: text}) }
	switch {
	case t.drive && in.Pxe:
		tell("without --pxe it goes into the BMC's virtual drive, where its system finds it again")
	case !t.drive:
		tell(fmt.Sprintf("driver %s has no virtual drive that it can start from: it boots over the network", t.BMC.Driver))
	}
	if res.Way == overPXE && t.byHand {
		tell(fmt.Sprintf("driver %s cannot choose what the machine boots: somebody starts it from the network while its window is open", t.BMC.Driver))
	}
	if in.Check {
		return connect.NewResponse(res), nil
	}
	if len(refusals) > 0 && !in.Anyway {
		return nil, apierr.Cannot("iso-limits", "%s; --anyway boots it in spite of that", strings.Join(refusals, "; "))
	}
	if res.Way == overDrive {
		p.Traceparent, p.ByHand = traceparent(), false
		res.WorkflowId, err = s.Workflows.Start(ctx, workflow.BootMedia, t.Machine, p)
	} else {
		res.WorkflowId, err = s.start(ctx, t.Machine, workflow.BootISO, p)
	}
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(res), nil
}

// BootKernel begins the boot of a kernel or a unified kernel image.
func (s bootService) BootKernel(ctx context.Context, req *connect.Request[computev1.BootKernelRequest]) (*connect.Response[computev1.BootKernelResponse], error) {
	in := req.Msg
	t, err := s.target(ctx, in.TenantId, in.Machine, metal.VerbBootKernel)
	if err != nil {
		return nil, err
	}
	firmware := in.Firmware
	if firmware == "" {
		firmware = metal.UEFI
	}
	p, err := params(firmware, in.WindowS, in.MaxBoots, t)
	if err != nil {
		return nil, err
	}
	switch {
	case in.Kernel == "":
		return nil, apierr.Invalid("kernel is missing")
	case in.Uki && (in.Initrd != "" || in.Cmdline != ""):
		return nil, apierr.Invalid("a unified kernel image has its initrd and its command line inside")
	case in.Uki && firmware != metal.UEFI:
		return nil, apierr.Invalid("a unified kernel image boots under UEFI alone")
	}
	if err := script.CheckCmdline(in.Cmdline); err != nil {
		return nil, apierr.Invalid("cmdline: %s", strings.TrimPrefix(err.Error(), "script: "))
	}
	p.Boot.Kernel, p.UKI = &store.BootKernel{Cmdline: in.Cmdline}, in.Uki
	if p.Boot.Kernel.SHA256, err = s.plain(ctx, in.Kernel); err != nil {
		return nil, err
	}
	if in.Initrd != "" {
		if p.Boot.Kernel.InitrdSHA256, err = s.plain(ctx, in.Initrd); err != nil {
			return nil, err
		}
	}
	id, err := s.start(ctx, t.Machine, workflow.BootKernel, p)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.BootKernelResponse{WorkflowId: id}), nil
}

// plain is the digest of an artifact that is handed on as it is.
func (s bootService) plain(ctx context.Context, ref string) (string, error) {
	a, err := s.Store.Artifact(ctx, ref, "")
	if err != nil {
		return "", fmt.Errorf("artifact %q: %w", ref, err)
	}
	if a.Format != artifacts.Plain {
		return "", apierr.Cannot("image-format-unsupported", "artifact %s is %s; a machine boots raw ones, as they are", ref, a.Format)
	}
	return a.SHA256, nil
}

// BootDisk gives the machine back to its own disk, and starts it from there.
func (s bootService) BootDisk(ctx context.Context, req *connect.Request[computev1.BootDiskRequest]) (*connect.Response[computev1.BootDiskResponse], error) {
	in := req.Msg
	t, err := s.target(ctx, in.TenantId, in.Machine, metal.VerbBootDisk)
	if err != nil {
		return nil, err
	}
	firmware := in.Firmware
	if firmware == "" {
		firmware = metal.UEFI
	}
	p, err := params(firmware, 0, 0, t)
	if err != nil {
		return nil, err
	}
	p.Boot, p.Window, p.Traceparent = nil, 0, traceparent()
	id, err := s.Workflows.Start(ctx, workflow.BootDisk, t.Machine, p)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.BootDiskResponse{WorkflowId: id}), nil
}

// Wipe begins the workflow that clears disks of the machine.
func (s bootService) Wipe(ctx context.Context, req *connect.Request[computev1.WipeRequest]) (*connect.Response[computev1.WipeResponse], error) {
	in := req.Msg
	m, _, _, err := s.able(ctx, in.TenantId, in.Machine, metal.VerbWipe)
	if err != nil {
		return nil, err
	}
	if err := metal.CheckSerials(in.DiskSerials); err != nil {
		return nil, err
	}
	id, err := s.start(ctx, m, workflow.Wipe, workflow.Params{DiskSerials: in.DiskSerials})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&computev1.WipeResponse{WorkflowId: id}), nil
}
