package workflow

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/image/imagev1"
	"github.com/better-compute/site-appliance/pxe/pxev1"
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
// What the box says by itself may be lost on the way, so that it is asked as well.
func waitBooted(ctx context.Context, r *run) error {
	if _, _, err := r.booted(); err != nil {
		return err
	}
	note, stage := "waiting for the machine to fetch what it boots", r.lastStage()
	if r.params.ByHand {
		note = "waiting for somebody to start the machine from the network: its driver cannot"
	}
	limit, _ := ctx.Deadline()
	asks := asking{pause: r.e.ask, limit: limit}
	asks.next(time.Now())
	return r.until(ctx, note, func(ctx context.Context) (bool, error) {
		m, err := r.e.Store.Machine(ctx, r.machine.TenantID, r.machine.ID)
		if err != nil {
			return false, err
		}
		heard, err := r.heard(ctx, m, stage)
		if heard || err != nil {
			return heard, err
		}
		over := !m.Assignment.WindowUntil.After(r.e.Store.Now())
		if !over && time.Now().Before(asks.due) {
			return false, nil
		}
		seen, silent := r.seen(ctx, m, stage)
		switch {
		case seen:
			return true, nil
		case ctx.Err() != nil:
			return false, context.Cause(ctx)
		case over && silent != nil:
			return false, errs.New(errs.Timeout, "nobody knows whether the machine booted before its window ended: %s", errs.From(silent).Message)
		case over:
			return false, errs.New(errs.Timeout, "the machine did not boot before its window ended")
		case silent != nil:
			r.log.Warn("the box does not say what the machine has fetched; it is asked again", "err", silent)
		}
		asks.next(time.Now())
		return false, nil
	})
}

const (
	// firstAsk is when the box is asked what the machine has fetched; then after twice
	// as long, up to maxAsk, which is well within what the box remembers.
	firstAsk = 30 * time.Second
	maxAsk   = 20 * time.Minute
	// lastAsk is how long before its step's limit it is asked for the last time, and
	// askWithin how long its answer may take: what it says by itself is not heard meanwhile.
	lastAsk   = time.Minute
	askWithin = 45 * time.Second
)

// asking is when a box is asked.
type asking struct {
	pause time.Duration
	limit time.Time // zero: there is none
	due   time.Time
}

// next is after the pause, which grows, or before the limit where it would else be too late.
func (a *asking) next(now time.Time) {
	a.due = now.Add(a.pause)
	if last := a.limit.Add(-lastAsk); last.After(now) && a.due.After(last) {
		a.due = last
	}
	a.pause = min(2*a.pause, maxAsk)
}

// heard says whether the box told by itself that the machine came to a stage in this
// workflow's window.
func (r *run) heard(ctx context.Context, m store.Machine, stage string) (bool, error) {
	for _, mac := range m.MACs {
		events, err := r.e.Store.EventsOf(ctx, m.SiteID, "pxe.stage", mac, r.w.Created)
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
	return false, nil
}

// seen asks the box whether the machine came to a stage in this workflow's window; the
// error says why it does not answer.
func (r *run) seen(ctx context.Context, m store.Machine, stage string) (bool, error) {
	ctx, stop := context.WithTimeoutCause(ctx, askWithin, errs.New(errs.Timeout, "the site's box did not answer within %s", askWithin))
	defer stop()
	boxes, err := r.e.Store.Agents(ctx, store.AgentFilter{SiteID: m.SiteID, Role: agentv1.Role_ROLE_SITE, State: store.AgentActive})
	if err != nil {
		return false, err
	}
	if len(boxes) == 0 || !r.e.Online(boxes[len(boxes)-1].ID) {
		return false, errs.New(errs.Unavailable, "the site's box is offline")
	}
	for _, mac := range m.MACs {
		c := metal.CommandOf(cmdkind.Explain)
		c.Args = &pxev1.ExplainRequest{Mac: mac}
		question, err := saved(boxes[len(boxes)-1].ID, c)
		if err != nil {
			return false, err
		}
		result, err := r.send(ctx, "", question)
		if err != nil {
			return false, err
		}
		var told pxev1.ExplainResult
		if err := proto.Unmarshal(result, &told); err != nil {
			return false, errs.New(errs.InvalidPayload, "read the answer to %s: %v", c.Kind, err)
		}
		for _, attempt := range told.Attempts {
			if told.MachineId == m.ID && slices.ContainsFunc(attempt.Steps, func(s *pxev1.Step) bool {
				return s.GetStage() == stage && strings.Contains(s.GetDetail(), r.params.WindowID)
			}) {
				return true, nil
			}
		}
	}
	return false, nil
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
