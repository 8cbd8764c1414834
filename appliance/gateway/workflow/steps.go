package workflow

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/image/imagev1"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

func openWindow(ctx context.Context, r *run) error {
	return r.e.Enrol.OpenWindow(ctx, r.machine.SiteID, r.machine.ID, r.params.WindowID, r.w.Name, r.params.WindowUntil)
}

func assignRamdisk(ctx context.Context, r *run) error {
	a := store.Assignment{Action: metal.Ramdisk, Purpose: r.w.Name, WindowID: r.params.WindowID, WindowUntil: r.params.WindowUntil}
	if r.params.Image != nil {
		a.Artifacts = []string{r.params.Image.SHA256}
	}
	return r.assign(ctx, a)
}

// assignLocalDisk also ends the window: no voucher of it enrols any more.
func assignLocalDisk(ctx context.Context, r *run) error {
	if err := r.assign(ctx, store.Assignment{Action: metal.LocalDisk}); err != nil {
		return err
	}
	return r.e.Store.CloseWindow(ctx, r.params.WindowID)
}

// assign sends the site's snapshot with the machine's new part. The site's
// lock is held until the box has it, so that versions arrive in order.
func (r *run) assign(ctx context.Context, a store.Assignment) error {
	unlock, err := r.e.LockSite(ctx, r.machine.SiteID)
	if err != nil {
		return err
	}
	defer unlock()
	for {
		if r.data.Command == nil {
			box, err := r.box(ctx)
			if err != nil {
				return err
			}
			if err := r.snapshot(ctx, box, a); err != nil {
				return err
			}
		}
		c := r.data.Command
		result, err := r.send(ctx, CommandID(r.w.ID, r.step.ID, r.step.Attempt), c)
		if err == nil {
			var answer pxev1.AssignResult
			if err := proto.Unmarshal(result, &answer); err != nil {
				return errs.New(errs.InvalidPayload, "read the answer to pxe.assign: %v", err)
			}
			if answer.Version < c.Version {
				return errs.New(errs.Internal, "the box keeps snapshot %d after %d was sent", answer.Version, c.Version)
			}
			return nil
		}
		if ctx.Err() != nil {
			return err
		}
		// A snapshot that was overtaken while the gateway was away is refused
		// as too old: a new one takes its place.
		latest, verr := r.e.Store.AssignVersion(ctx, r.machine.SiteID)
		// The box of a gateway that was restored is ahead, and says by how far in
		// an event of its own, which may come a moment later.
		stale := errs.CodeOf(err) == errs.StaleVersion
		overtaken := (stale || verr == nil && latest > c.Version) && r.step.Attempt+1 < maxAttempts
		if !overtaken && !again(c.RetrySafe, err, r.step.Attempt) {
			return err
		}
		if err := r.next(ctx, err); err != nil {
			return err
		}
	}
}

// snapshot stores the assignment, the site's next version and the command that
// carries it in one transaction.
func (r *run) snapshot(ctx context.Context, box string, a store.Assignment) error {
	before := r.step.Data
	err := r.e.Store.Assign(ctx, r.machine.SiteID, r.machine.ID, a, func(next store.Snapshot) (store.WorkflowStep, error) {
		c, err := saved(box, metal.AssignCommand(next, r.e.Store.Now()))
		if err != nil {
			return store.WorkflowStep{}, err
		}
		c.Version = next.Version
		r.data.Command = c
		return r.row()
	})
	if err != nil {
		r.data.Command, r.step.Data = nil, before
	}
	return err
}

// release gives the machine of a failing workflow back to its own disk, as far
// as that is possible now: the window ends by itself at its time.
func (r *run) release(ctx context.Context) error {
	if err := r.e.Store.CloseWindow(ctx, r.params.WindowID); err != nil {
		return err
	}
	if err := r.reached(ctx); err != nil {
		return err
	}
	if r.step == nil || r.step.Seq == 0 {
		return nil // nothing was assigned
	}
	ctx, stop := context.WithTimeout(ctx, 40*time.Second)
	defer stop()
	unlock, err := r.e.LockSite(ctx, r.machine.SiteID)
	if err != nil {
		return err
	}
	defer unlock()
	boxes, err := r.e.Store.Agents(ctx, store.AgentFilter{SiteID: r.machine.SiteID, Role: agentv1.Role_ROLE_SITE, State: store.AgentActive})
	if err != nil {
		return err
	}
	if len(boxes) == 0 || !r.e.Online(boxes[len(boxes)-1].ID) {
		return errs.New(errs.Unavailable, "the site's box is offline")
	}
	var c *savedCommand
	err = r.e.Store.Assign(ctx, r.machine.SiteID, r.machine.ID, store.Assignment{Action: metal.LocalDisk}, func(next store.Snapshot) (store.WorkflowStep, error) {
		c, err = saved(boxes[len(boxes)-1].ID, metal.AssignCommand(next, r.e.Store.Now()))
		if err != nil {
			return store.WorkflowStep{}, err
		}
		c.Version = next.Version
		return *r.step, nil // as it is: the failed step keeps its own command
	})
	if err != nil {
		return err
	}
	_, err = r.send(ctx, fmt.Sprintf("%s.release.%d", r.w.ID, c.Version), c)
	return err
}

// reached takes the last step that began for the present one, where this engine
// has run none.
func (r *run) reached(ctx context.Context) error {
	if r.step != nil {
		return nil
	}
	steps, err := r.e.Store.WorkflowSteps(ctx, r.w.ID)
	for i := range steps {
		if steps[i].State != store.StateWaiting {
			r.step = &steps[i]
		}
	}
	return err
}

// power asks the BMC; a query is repeated freely.
func (r *run) power(ctx context.Context) (string, error) {
	for attempt := uint32(0); ; attempt++ {
		box, err := r.box(ctx)
		if err != nil {
			return "", err
		}
		c, err := saved(box, metal.PowerQuery(r.machine.BMC))
		if err != nil {
			return "", err
		}
		result, err := r.send(ctx, "", c)
		if err == nil {
			var answer bmcv1.BmcOperationResult
			if err := proto.Unmarshal(result, &answer); err != nil {
				return "", errs.New(errs.InvalidPayload, "read the answer to bmc.query: %v", err)
			}
			return metal.PowerState(&answer)
		}
		if ctx.Err() != nil || !again(true, err, attempt) {
			return "", err
		}
		if err := r.e.between.Wait(ctx, int(attempt), nil); err != nil {
			return "", context.Cause(ctx)
		}
	}
}

func powerOff(ctx context.Context, r *run) error { return r.setPower(ctx, "off") }
func powerOn(ctx context.Context, r *run) error  { return r.setPower(ctx, "on") }

// setPower brings the machine to the state. on and off say where to arrive, so
// a restart between them does no harm, which a cycle would.
func (r *run) setPower(ctx context.Context, want string) error {
	if r.data.Command == nil {
		state, err := r.power(ctx)
		if err != nil {
			return err
		}
		if state == want {
			return nil
		}
	}
	_, err := r.command(ctx, func(ctx context.Context) (string, metal.Command, error) {
		box, err := r.box(ctx)
		if err != nil {
			return "", metal.Command{}, err
		}
		c, err := metal.PowerCommand(r.machine.BMC, want)
		return box, c, err
	})
	if err != nil {
		return err
	}
	return r.until(ctx, "waiting for the BMC to say "+want, func(ctx context.Context) (bool, error) {
		state, err := r.power(ctx)
		return state == want, err
	})
}

func bootPXE(ctx context.Context, r *run) error  { return r.boot(ctx, "pxe") }
func bootDisk(ctx context.Context, r *run) error { return r.boot(ctx, "disk") }

// boot chooses the device of the next boot, under UEFI unless something else was
// asked for.
func (r *run) boot(ctx context.Context, device string) error {
	_, err := r.command(ctx, func(ctx context.Context) (string, metal.Command, error) {
		box, err := r.box(ctx)
		if err != nil {
			return "", metal.Command{}, err
		}
		c, err := metal.BootCommand(r.machine.BMC, metal.BootDevice{Device: device, EFI: r.params.Firmware != metal.BIOS})
		return box, c, err
	})
	return err
}

func waitRamdisk(ctx context.Context, r *run) error {
	_, err := r.ramdisk(ctx)
	return err
}

// maxHardware bounds what a ramdisk may have recorded about its machine.
const maxHardware = 1 << 20

// waitHardware takes the latest report of a ramdisk of this window: what
// another agent says about the machine does not count.
func waitHardware(ctx context.Context, r *run) error {
	return r.until(ctx, "waiting for the ramdisk to report the hardware", func(ctx context.Context) (bool, error) {
		agents, err := r.e.Store.Agents(ctx, store.AgentFilter{MachineID: r.machine.ID, WindowID: r.params.WindowID, Role: agentv1.Role_ROLE_RAMDISK})
		if err != nil {
			return false, err
		}
		events, err := r.e.Store.Events(ctx, store.EventFilter{MachineID: r.machine.ID, Name: "machine.hardware"})
		if err != nil {
			return false, err
		}
		for _, event := range slices.Backward(events) {
			if !slices.ContainsFunc(agents, func(a store.Agent) bool { return a.ID == event.AgentID }) {
				continue
			}
			var object map[string]json.RawMessage
			if len(event.BodyJSON) > maxHardware || json.Unmarshal([]byte(event.BodyJSON), &object) != nil || object == nil {
				return false, errs.New(errs.InvalidPayload, "the ramdisk's hardware report is no JSON object of at most 1 MiB")
			}
			return true, r.e.Store.RecordHardware(ctx, r.machine.ID, event.BodyJSON)
		}
		return false, nil
	})
}

// seedName is the name of the secret that holds a workflow's node join string.
func seedName(workflowID string) string {
	return "node-join-" + strings.TrimPrefix(workflowID, "wf_")
}

// prepareSeed mints the node's join string. After a restart in between, the
// token that nobody was given stays unused until it ends.
func prepareSeed(ctx context.Context, r *run) error {
	join, err := r.e.Enrol.NewToken(ctx, agentv1.Role_ROLE_NODE, r.machine.SiteID, r.machine.ID, 24*time.Hour)
	if err != nil {
		return err
	}
	ref, err := r.e.Secrets.Put(ctx, r.machine.TenantID, seedName(r.w.ID), secret.New([]byte(join)))
	if err != nil {
		return err
	}
	if want := r.seedRef(); ref != want {
		return fmt.Errorf("node join string is kept under another reference than %s", want)
	}
	return nil
}

func (r *run) seedRef() string {
	return "secret://" + r.machine.TenantID + "/" + seedName(r.w.ID)
}

func streamImage(ctx context.Context, r *run) error {
	image := r.params.Image
	if image == nil {
		return errs.New(errs.InvalidPayload, "the workflow has no image")
	}
	result, err := r.command(ctx, func(ctx context.Context) (string, metal.Command, error) {
		ramdisk, err := r.ramdisk(ctx)
		c := metal.CommandOf(cmdkind.Stream)
		c.SecretRefs = []string{r.seedRef()}
		c.Args = &imagev1.StreamRequest{
			Format: image.Format, Sha256: image.SHA256, SizeBytes: image.SizeBytes,
			UnpackedSha256: image.UnpackedSHA256, UnpackedSizeBytes: image.UnpackedSizeBytes,
			Disk: &imagev1.DiskSelector{Serial: r.params.DiskSerial},
			Seed: &imagev1.Seed{InstanceId: r.w.ID, Hostname: r.params.Hostname, SshAuthorizedKeys: r.params.SSHAuthorizedKeys, NodeJoinRef: r.seedRef()},
		}
		return ramdisk, c, err
	})
	if err != nil {
		return err
	}
	var answer imagev1.StreamResult
	if err := proto.Unmarshal(result, &answer); err != nil {
		return errs.New(errs.InvalidPayload, "read the answer to image.stream: %v", err)
	}
	if answer.Sha256 != image.SHA256 || answer.UnpackedSha256 != image.UnpackedSHA256 {
		return errs.New(errs.DigestMismatch, "the ramdisk wrote %s (unpacked %s), not %s (%s)", answer.Sha256, answer.UnpackedSha256, image.SHA256, image.UnpackedSHA256)
	}
	return nil
}

// waitNode waits for the node that enrolled since this workflow began. Its join
// string is spent then, and forgotten.
func waitNode(ctx context.Context, r *run) error {
	since := r.w.Created.Truncate(time.Millisecond)
	_, err := r.agent(ctx, "waiting for the machine's node agent to be online",
		store.AgentFilter{MachineID: r.machine.ID, Role: agentv1.Role_ROLE_NODE}, func(a store.Agent) bool { return !a.Enrolled.Before(since) })
	if err != nil {
		return err
	}
	return r.e.Store.DeleteSecret(ctx, r.seedRef())
}
