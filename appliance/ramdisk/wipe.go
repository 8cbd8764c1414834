package ramdisk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/image/imagev1"
	"github.com/better-compute/site-appliance/image/stream/blockdev"
)

// WipeKind is the command kind that clears disks.
const WipeKind = cmdkind.Wipe

const (
	// maxWiped is how many disks one command may name.
	maxWiped = 64
	// wipeStep is how much is cleared between two looks at whether it is still wanted.
	wipeStep = 1 << 30
	// zeroStep is the same where every byte is written.
	zeroStep = 64 << 20
)

// The ways to clear a disk, the best first.
const (
	securely    = "secure-discard"
	discarded   = "discard"
	overwritten = "overwrite"
)

func (m *imager) wipeKind() dispatch.Kind {
	return dispatch.Kind{
		Name: WipeKind, Lane: cmdkind.Lane(WipeKind), Roles: []agentv1.Role{agentv1.Role_ROLE_RAMDISK},
		Decode: decodeWipe, Run: m.wipe,
		Check: func(p *agentv1.CommandPayload, op dispatch.Operation) (dispatch.Operation, error) {
			if err := m.orders.allow(WipeKind, m.machine); err != nil {
				return op, err
			}
			return m.check(p, op)
		},
		Recover: func(context.Context, dispatch.Call) dispatch.Verdict { return dispatch.Interrupted() },
	}
}

// decodeWipe reads a WipeRequest strictly.
func decodeWipe(args []byte) (dispatch.Operation, error) {
	var req imagev1.WipeRequest
	if err := envelope.StrictUnmarshal(args, &req); err != nil {
		return dispatch.Operation{}, err
	}
	if n := len(req.Disks); n < 1 || n > maxWiped {
		return dispatch.Operation{}, errs.New(errs.InvalidArgs, "%d disks: want 1 to %d, each by its serial", n, maxWiped)
	}
	var serials []string
	for _, d := range req.Disks {
		switch serial := d.GetSerial(); {
		case serial == "":
			return dispatch.Operation{}, errs.New(errs.InvalidArgs, "a disk's serial is missing")
		case slices.Contains(serials, serial):
			return dispatch.Operation{}, errs.New(errs.InvalidArgs, "serial %q is there twice", serial)
		default:
			serials = append(serials, serial)
		}
	}
	return dispatch.Operation{Name: WipeKind, Key: WipeKind, Destructive: true, Counts: true, Value: serials}, nil
}

// wiping is a disk that is claimed.
type wiping struct {
	disk   blockdev.Disk
	device *blockdev.Device
}

// wipe claims all of the disks before it touches one: a serial that picks none, and a
// disk that is in use, stop it in time.
func (m *imager) wipe(ctx context.Context, c dispatch.Call) ([]byte, error) {
	disks, err := blockdev.List(m.sys, m.dev)
	if err != nil {
		return nil, err
	}
	var all []wiping
	defer func() {
		for _, w := range all {
			w.device.Close()
		}
	}()
	for _, serial := range c.Operation.Value.([]string) {
		disk, err := blockdev.Find(disks, serial)
		if err != nil {
			return nil, err
		}
		if disk.Removable {
			return nil, errs.New(errs.InvalidArgs, "disk %s is removable: it may be what the machine was started from, or a BMC's virtual drive", disk)
		}
		device, err := blockdev.Open(disk.Path)
		if err != nil {
			return nil, err
		}
		all = append(all, wiping{disk, device})
	}
	m.post(ctx, "progress", "disk wipe starts")
	out := &imagev1.WipeResult{}
	for _, w := range all {
		m.log.Info("disk wipe starts", "disk", w.disk.String())
		method, err := clearDisk(ctx, w.device, func(done, total int64) {
			c.Progress("wipe", fmt.Sprintf("wipe %s", w.disk.Name), uint64(done), uint64(total))
		})
		if err != nil {
			m.log.Error("disk wipe failed", "disk", w.disk.Name, "err", err)
			return nil, fmt.Errorf("wipe %s: %w%s", w.disk, err, already(out.Disks))
		}
		if err := w.device.RereadPartitions(); err != nil {
			return nil, fmt.Errorf("wipe %s: %w%s", w.disk, err, already(out.Disks))
		}
		m.log.Info("disk wipe done", "disk", w.disk.Name, "method", method)
		out.Disks = append(out.Disks, &imagev1.WipedDisk{Disk: w.disk.Path, Serial: w.disk.Serial, SizeBytes: uint64(w.device.Size()), Method: method})
	}
	// The box sends the machine to its disk from now on, line or no line.
	m.post(ctx, "done", fmt.Sprintf("%d disks wiped", len(out.Disks)))
	return proto.Marshal(out)
}

// clearable is the part of a device that clearDisk uses.
type clearable interface {
	io.ReaderAt
	Size() int64
	Discard(off, n int64, secure bool) error
	Zero(off, n int64) error
	Sync() error
}

// errKept says that a disk gives back what it was told to discard.
var errKept = errors.New("the disk gives back what it was told to discard")

// clearDisk clears a disk whole, and tells how. Its ends go first, so that one that is
// interrupted boots nothing, and last, since a discard promises no zeros: a disk that
// gives anything back after one is overwritten.
func clearDisk(ctx context.Context, d clearable, progress func(done, total int64)) (method string, err error) {
	if err := clearEnds(d); err != nil {
		return "", err
	}
	for _, way := range []struct {
		name  string
		step  int64
		clear func(off, n int64) error
	}{
		{securely, wipeStep, func(off, n int64) error { return d.Discard(off, n, true) }},
		{discarded, wipeStep, func(off, n int64) error { return d.Discard(off, n, false) }},
		{overwritten, zeroStep, d.Zero},
	} {
		err = inSteps(ctx, d.Size(), way.step, way.clear, progress)
		if err == nil && way.name != overwritten {
			err = looks(d)
		}
		if err == nil {
			method = way.name
			break
		}
		// What broke half-way, another way may still do whole.
		if ctx.Err() != nil || way.name == overwritten {
			return "", err
		}
	}
	if err := clearEnds(d); err != nil {
		return "", err
	}
	return method, checkEnds(d)
}

const (
	// samples is how many places of a disk are looked at after a discard.
	samples     = 1024
	sampleBytes = 4096
)

// looks reads a disk here and there.
func looks(d clearable) error {
	if err := d.Sync(); err != nil { // reads come from the medium after it
		return err
	}
	b := make([]byte, sampleBytes)
	step := max(d.Size()/samples, sampleBytes) &^ (sampleBytes - 1)
	for off := int64(0); off < d.Size(); off += step {
		p := b[:min(sampleBytes, d.Size()-off)]
		if n, err := d.ReadAt(p, off); n != len(p) && err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if len(bytes.Trim(p, "\x00")) > 0 {
			return errKept
		}
	}
	return nil
}

func inSteps(ctx context.Context, size, step int64, do func(off, n int64) error, progress func(done, total int64)) error {
	for off := int64(0); off < size; off += step {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := do(off, min(step, size-off)); err != nil {
			return err
		}
		progress(min(off+step, size), size)
	}
	return nil
}

// ends are where partition tables and boot sectors stand, at both ends of a disk.
func ends(size int64) [][2]int64 {
	n := min(lookBytes, size)
	return [][2]int64{{0, n}, {size - n, n}}
}

func clearEnds(d clearable) error {
	for _, e := range ends(d.Size()) {
		if err := d.Zero(e[0], e[1]); err != nil {
			return err
		}
	}
	return d.Sync()
}

// checkEnds reads them back.
func checkEnds(d clearable) error {
	for _, e := range ends(d.Size()) {
		b := make([]byte, e[1])
		if n, err := d.ReadAt(b, e[0]); n != len(b) && err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if len(bytes.Trim(b, "\x00")) > 0 {
			return errs.New(errs.Internal, "what was cleared at byte %d reads as something else", e[0])
		}
	}
	return nil
}

// already says which disks are gone when a later one fails.
func already(disks []*imagev1.WipedDisk) string {
	var serials []string
	for _, d := range disks {
		serials = append(serials, d.GetSerial())
	}
	if len(serials) == 0 {
		return ""
	}
	return "; wiped before it: " + strings.Join(serials, ", ")
}
