package workflow

import (
	"context"
	"encoding/json"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/image/imagev1"
)

const (
	// DefaultWindow is how long a machine may boot what is assigned to it.
	DefaultWindow = 12 * time.Hour
	// MinWindow and MaxWindow bound it.
	MinWindow = time.Minute
	MaxWindow = 7 * 24 * time.Hour
	maxWindow = MaxWindow
	// DefaultBoots is how often: an installer that starts its machine anew does not
	// find itself again.
	DefaultBoots = 1
)

// booted is what the workflow boots, and the artifacts that the box needs for it.
func (r *run) booted() (*store.Boot, []string, error) {
	switch b := r.params.Boot; {
	case b != nil && b.ISO != nil:
		return b, []string{b.ISO.SHA256}, nil
	case b != nil && b.Kernel != nil && b.Kernel.InitrdSHA256 != "":
		return b, []string{b.Kernel.SHA256, b.Kernel.InitrdSHA256}, nil
	case b != nil && b.Kernel != nil:
		return b, []string{b.Kernel.SHA256}, nil
	}
	return nil, nil, errs.New(errs.InvalidPayload, "the workflow has nothing to boot")
}

// fetchArtifacts has the box take in what the machine will boot, before anything is
// switched: a disc that comes while it is read is no disc to firmware.
func fetchArtifacts(ctx context.Context, r *run) error {
	_, digests, err := r.booted()
	if err != nil {
		return err
	}
	_, err = r.command(ctx, func(ctx context.Context) (string, metal.Command, error) {
		box, err := r.box(ctx)
		return box, metal.FetchCommand(digests), err
	})
	return err
}

// assignBoot opens the window when everything else is ready.
func assignBoot(ctx context.Context, r *run) error {
	b, _, err := r.booted()
	if err != nil {
		return err
	}
	a := store.Assignment{
		Action: metal.ISO, Purpose: "iso", WindowID: r.params.WindowID, WindowUntil: r.e.Store.Now().Add(r.params.Window).Truncate(time.Millisecond), Boot: *b,
	}
	switch {
	case r.params.UKI:
		a.Action, a.Purpose = metal.UKI, "boot"
	case b.Kernel != nil:
		a.Action, a.Purpose = metal.Kernel, "boot"
	}
	return r.assign(ctx, a)
}

// lastStage is what the box says when a machine has fetched the last thing that it
// boots from.
func (r *run) lastStage() string {
	switch b := r.params.Boot; {
	case b.ISO != nil:
		return "iso"
	case r.params.UKI:
		return "uki"
	case b.Kernel.InitrdSHA256 != "":
		return "initrd"
	}
	return "kernel"
}

// waitBooted waits for the box to say that the machine boots, or for the window's end.
func waitBooted(ctx context.Context, r *run) error {
	if _, _, err := r.booted(); err != nil {
		return err
	}
	note, stage := "waiting for the machine to fetch what it boots", r.lastStage()
	if r.params.ByHand {
		note = "waiting for somebody to start the machine from the network: its driver cannot"
	}
	return r.until(ctx, note, func(ctx context.Context) (bool, error) {
		m, err := r.e.Store.Machine(ctx, r.machine.TenantID, r.machine.ID)
		if err != nil {
			return false, err
		}
		for _, mac := range m.MACs {
			events, err := r.e.Store.EventsOf(ctx, r.machine.SiteID, "pxe.stage", mac, r.w.Created)
			if err != nil {
				return false, err
			}
			for _, e := range events {
				var said struct {
					Machine string `json:"machine_id"`
					Stage   string `json:"stage"`
					Detail  string `json:"detail"`
				}
				if json.Unmarshal([]byte(e.BodyJSON), &said) == nil && said.Machine == m.ID && said.Stage == stage && strings.Contains(said.Detail, r.params.WindowID) {
					return true, nil
				}
			}
		}
		if !m.Assignment.WindowUntil.After(r.e.Store.Now()) {
			return false, errs.New(errs.Timeout, "the machine did not boot before its window ended")
		}
		return false, nil
	})
}

func bootCDROM(ctx context.Context, r *run) error { return r.boot(ctx, "cdrom") }

// insertMedia puts the disc image into the BMC's virtual drive.
func insertMedia(ctx context.Context, r *run) error {
	b, _, err := r.booted()
	if err != nil || b.ISO == nil {
		return errs.New(errs.InvalidPayload, "the workflow has no disc image")
	}
	_, err = r.command(ctx, func(ctx context.Context) (string, metal.Command, error) {
		box, err := r.box(ctx)
		if err != nil {
			return "", metal.Command{}, err
		}
		c, err := metal.InsertCommand(r.machine.BMC, b.ISO.SHA256)
		return box, c, err
	})
	return err
}

// wipeDisks clears the disks that were named, all or as far as one fails.
func wipeDisks(ctx context.Context, r *run) error {
	result, err := r.command(ctx, func(ctx context.Context) (string, metal.Command, error) {
		ramdisk, err := r.ramdisk(ctx)
		req := &imagev1.WipeRequest{}
		for _, serial := range r.params.DiskSerials {
			req.Disks = append(req.Disks, &imagev1.DiskSelector{Serial: serial})
		}
		c := metal.CommandOf(cmdkind.Wipe)
		c.Args = req
		return ramdisk, c, err
	})
	if err != nil {
		return err
	}
	var answer imagev1.WipeResult
	if err := proto.Unmarshal(result, &answer); err != nil {
		return errs.New(errs.InvalidPayload, "read the answer to disk.wipe: %v", err)
	}
	if len(answer.Disks) != len(r.params.DiskSerials) {
		return errs.New(errs.Internal, "the ramdisk wiped %d disks of %d", len(answer.Disks), len(r.params.DiskSerials))
	}
	r.data.Result, err = json.Marshal(answer.Disks)
	return err
}
