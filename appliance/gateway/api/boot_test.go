package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand"
	"os"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/api/computev1/computev1connect"
	"github.com/better-compute/site-appliance/appliance/gateway/artifacts"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/appliance/gateway/workflow"
	"github.com/better-compute/site-appliance/pxe/isoclass/isotest"
)

func (r *rig) isos(token string) computev1connect.IsoServiceClient {
	return computev1connect.NewIsoServiceClient(r.as(token), r.server.URL)
}

func (r *rig) boots(token string) computev1connect.BootServiceClient {
	return computev1connect.NewBootServiceClient(r.as(token), r.server.URL)
}

// addISO sends an image in pieces.
func (r *rig) addISO(token, tenant, name, class string, data []byte) (*computev1.Iso, error) {
	stream := r.isos(token).Add(r.t.Context())
	err := stream.Send(&computev1.AddIsoRequest{Part: &computev1.AddIsoRequest_Header{Header: &computev1.AddIsoHeader{TenantId: tenant, Name: name, Class: class}}})
	for off := 0; err == nil && off < len(data); off += 7000 {
		err = stream.Send(&computev1.AddIsoRequest{Part: &computev1.AddIsoRequest_Data{Data: data[off:min(off+7000, len(data))]}})
	}
	res, err := stream.CloseAndReceive()
	if err != nil {
		return nil, err
	}
	return res.Msg.Iso, nil
}

func (r *rig) stored() (names []string) {
	r.t.Helper()
	entries, err := os.ReadDir(r.artifactDir)
	must(r.t, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

var (
	memtest = isotest.Image(isotest.Options{Label: "MT86", BIOS: true, UEFI: true, Files: []string{"MEMTEST.BIN;1"}})
	windows = isotest.Image(isotest.Options{Label: "WIN", BIOS: true, Files: []string{"BOOTMGR;1"}})
)

func TestISOCatalog(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	iso, err := r.addISO("admin", "acme", "memtest", "", memtest)
	must(t, err)
	if iso.Class != "self-contained" || !iso.Bios || !iso.Uefi || iso.Label != "MT86" || iso.SizeBytes != uint64(len(memtest)) || iso.ClassGiven {
		t.Errorf("Add = %v", iso)
	}
	if iso, err := r.addISO("admin", "acme", "mine", "refetches", windows); err != nil || iso.Class != "refetches" || !iso.ClassGiven || iso.Layout != "Windows" {
		t.Errorf("Add with a class = %v, %v, want the class that was said", iso, err)
	}
	_, err = r.addISO("admin", "acme", "memtest", "", windows)
	wantError(t, "a second image of a name", err, connect.CodeAlreadyExists, "INVALID_INPUT: taken")
	before := r.stored()
	_, err = r.addISO("admin", "acme", "noise", "", bytes.Repeat([]byte("noise"), 20000))
	wantError(t, "what is no image", err, connect.CodeInvalidArgument, "INVALID_INPUT: noise: it is no ISO 9660 image")
	_, err = r.addISO("admin", "acme", "cut", "", memtest[:len(memtest)/2])
	wantError(t, "an image that ends early", err, connect.CodeInvalidArgument, "INVALID_INPUT: cut: ")
	_, err = r.addISO("admin", "acme", "x", "drive", memtest)
	wantError(t, "a class of no kind", err, connect.CodeInvalidArgument, "INVALID_INPUT: class")
	_, err = r.addISO("admin", "acme", "../x", "", memtest)
	wantError(t, "a name that is a path", err, connect.CodeInvalidArgument, "INVALID_INPUT: name")
	if after := r.stored(); len(after) != len(before) {
		t.Errorf("after refusals %v are stored, want %v", after, before)
	}
	// Another tenant has its own catalog, and the bytes are there once.
	if _, err := call(ctx, r.isos("admin").Get, &computev1.GetIsoRequest{TenantId: "other", Iso: "memtest"}); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("another tenant's image = %v, want not found", err)
	}
	if _, err := r.addISO("admin", "other", "memtest", "", memtest); err != nil {
		t.Errorf("the same image of another tenant = %v", err)
	}
	if after := r.stored(); len(after) != len(before) {
		t.Errorf("the same bytes are stored twice: %v", after)
	}
	list, err := call(ctx, r.isos("admin").List, &computev1.ListIsosRequest{TenantId: "acme"})
	must(t, err)
	if len(list.Items) != 2 || list.Items[0].Name != "memtest" || list.Items[1].Name != "mine" {
		t.Errorf("List = %v", list)
	}
	// The catalog's artifacts are no images to deploy.
	arts, err := call(ctx, computev1connect.NewArtifactServiceClient(r.as("admin"), r.server.URL).List, &computev1.ListArtifactsRequest{TenantId: "acme"})
	must(t, err)
	if len(arts.Items) != 0 {
		t.Errorf("artifacts = %v, want none", arts)
	}
	r.token("reader", "acme", time.Time{}, "compute:isos:read")
	_, err = r.addISO("reader", "acme", "more", "", memtest)
	wantError(t, "a reader's image", err, connect.CodePermissionDenied, "PERMISSION_DENIED: the token lacks compute:isos:write")
	r.token("writer", "acme", time.Time{}, "compute:isos:write")
	_, err = r.addISO("writer", "other", "more", "", memtest)
	wantError(t, "an image for another tenant", err, connect.CodePermissionDenied, "PERMISSION_DENIED: the token is not tenant other's")
	_, err = call(ctx, r.isos("reader").Remove, &computev1.RemoveIsoRequest{TenantId: "acme", Iso: "memtest"})
	wantError(t, "a reader's removal", err, connect.CodePermissionDenied, "PERMISSION_DENIED")
	for _, tenant := range []string{"other", "acme"} {
		if files := r.stored(); len(files) != len(before) {
			t.Errorf("%d files before the last removal, want %d", len(files), len(before))
		}
		_, err = call(ctx, r.isos("admin").Remove, &computev1.RemoveIsoRequest{TenantId: tenant, Iso: "memtest"})
		must(t, err)
	}
	if files := r.stored(); len(files) != len(before)-2 {
		t.Errorf("%v are stored, want the file and its chunk list gone", files)
	}
}

// TestISODiskFull: an image that finds no room is refused with that, and nothing of it stays.
func TestISODiskFull(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount a small file system")
	}
	r := newRig(t)
	if err := unix.Mount("tmpfs", r.artifactDir, "tmpfs", 0, "size=256k"); err != nil {
		t.Skipf("needs root with the right to mount: %v", err)
	}
	defer unix.Unmount(r.artifactDir, unix.MNT_DETACH)
	large := isotest.Image(isotest.Options{Label: "LARGE", BIOS: true, Size: 1 << 20})
	rand.New(rand.NewSource(1)).Read(large[64<<10:])
	_, err := r.addISO("admin", "acme", "large", "", large)
	wantError(t, "an image that finds no room", err, connect.CodeFailedPrecondition, "INVALID_INPUT: no-space: the gateway's disk has no room")
	if left := r.stored(); len(left) != 0 {
		t.Errorf("%q stay", left)
	}
	if _, err := r.addISO("admin", "acme", "memtest", "", memtest); err != nil {
		t.Errorf("an image that finds room after that: %v", err)
	}
}

// What a gateway left behind that stopped in the middle is gone when it begins again, and
// nothing else is.
func TestISOsLeftBehind(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	_, err := r.addISO("admin", "acme", "memtest", "", memtest)
	must(t, err)
	kept := r.stored()
	_, err = r.files.Import(ctx, isoPrefix+"iso_lost", isoArch, artifacts.Plain, bytes.NewReader(windows))
	must(t, err)
	_, err = r.files.Import(ctx, "mine", "amd64", artifacts.Plain, strings.NewReader("firmware"))
	must(t, err)
	if got := r.stored(); len(got) != len(kept)+4 {
		t.Fatalf("%v are stored", got)
	}
	again, err := artifacts.New(r.artifactDir, r.store, slog.New(slog.DiscardHandler))
	must(t, err)
	if got := r.stored(); len(got) != len(kept)+2 {
		t.Errorf("%v are stored after a new start, want what was lost gone", got)
	}
	iso, err := r.store.ISO(ctx, "acme", "memtest")
	must(t, err)
	f, err := again.Open(iso.SHA256)
	must(t, err)
	f.Close()
}

// An image that a machine may boot now, or is about to, stays.
func TestISORemoveWhileAssigned(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	r.enrolled("ipmi", nil)
	iso, err := r.addISO("admin", "acme", "memtest", "", memtest)
	must(t, err)
	remove := func() error {
		_, err := call(ctx, r.isos("admin").Remove, &computev1.RemoveIsoRequest{TenantId: "acme", Iso: "memtest"})
		return err
	}
	res, err := call(ctx, r.boots("admin").BootIso, &computev1.BootIsoRequest{TenantId: "acme", Machine: "m1", Iso: "memtest"})
	must(t, err)
	wantError(t, "removal while a workflow is to assign it", remove(), connect.CodeFailedPrecondition, "INVALID_INPUT: iso-assigned: memtest may be booted by m1")
	w, err := r.store.Workflow(ctx, "acme", res.WorkflowId)
	must(t, err)
	record := func(store.Snapshot) (store.WorkflowStep, error) {
		steps, err := r.store.WorkflowSteps(ctx, w.ID)
		return steps[1], err
	}
	must(t, r.store.Assign(ctx, w0(t, r).SiteID, w.MachineID, store.Assignment{Action: metal.ISO, Purpose: "iso", WindowID: "w", WindowUntil: r.now.Add(time.Hour),
		Boot: store.Boot{ISO: &store.BootISO{Name: "memtest", SHA256: iso.Sha256}}}, record))
	w.State = store.StateDone
	must(t, r.store.EndWorkflow(ctx, w, "", "w", store.Event{}))
	wantError(t, "removal while it is assigned", remove(), connect.CodeFailedPrecondition, "INVALID_INPUT: iso-assigned")
	if got, err := call(ctx, r.isos("admin").Get, &computev1.GetIsoRequest{TenantId: "acme", Iso: iso.Sha256}); err != nil || len(got.Machines) != 1 || got.Machines[0] != "m1" {
		t.Errorf("Get by digest = %v, %v, want m1 as its machine", got, err)
	}
	r.now = r.now.Add(2 * time.Hour) // the window has ended
	if err := remove(); err != nil {
		t.Errorf("removal after the window = %v", err)
	}
}

// w0 is the rig's machine.
func w0(t *testing.T, r *rig) store.Machine {
	t.Helper()
	m, err := r.store.Machine(t.Context(), "acme", "m1")
	must(t, err)
	return m
}

// enrolled adds a machine of a driver, whose hardware is known where that is said.
func (r *rig) enrolled(driver string, hardware any) store.Machine {
	r.t.Helper()
	ctx := r.t.Context()
	must(r.t, r.store.AddSite(ctx, store.Site{ID: "site_1", TenantID: "acme", Name: "lab", Created: r.now}))
	must(r.t, r.store.AddPool(ctx, store.Pool{ID: "pool_1", TenantID: "acme", Name: "metal", SiteID: "site_1", Created: r.now}))
	must(r.t, r.store.AddMachine(ctx, store.Machine{ID: "node_1", TenantID: "acme", Name: "m1", PoolID: "pool_1", SiteID: "site_1", State: metal.Enrolled, Created: r.now,
		MACs: []string{"52:54:00:00:00:01"}, BMC: store.BMC{Driver: driver, Address: "10.0.0.5"}}))
	if hardware != nil {
		data, err := json.Marshal(hardware)
		must(r.t, err)
		must(r.t, r.store.RecordHardware(ctx, "node_1", string(data)))
	}
	return w0(r.t, r)
}

func TestBootISO(t *testing.T) {
	ram := map[string]any{"source": "ramdisk", "memory": []map[string]any{{"size_bytes": 8 << 30}, {"size_bytes": 8 << 30}}}
	for _, tt := range []struct {
		name, driver string
		hardware     any
		iso          []byte
		req          *computev1.BootIsoRequest
		way          string
		workflow     string
		tells        string // one of the limits
		refused      string // what refuses it; empty: nothing
	}{
		{"ipmi", "ipmi", ram, memtest, &computev1.BootIsoRequest{}, "pxe", "boot-iso", "driver ipmi has no virtual drive", ""},
		{"known memory", "ipmi", ram, memtest, &computev1.BootIsoRequest{}, "pxe", "boot-iso", "of 16384 MiB", ""},
		{"unknown memory", "ipmi", nil, memtest, &computev1.BootIsoRequest{}, "pxe", "boot-iso", "memory is not known", ""},
		{"redfish", "redfish", nil, memtest, &computev1.BootIsoRequest{}, "virtual-media", "boot-media", "", ""},
		{"redfish over the network", "redfish", nil, memtest, &computev1.BootIsoRequest{Pxe: true}, "pxe", "boot-iso", "virtual drive", ""},
		{"windows by a drive", "redfish", nil, windows, &computev1.BootIsoRequest{}, "virtual-media", "boot-media", "", ""},
		{"windows over the network", "ipmi", nil, windows, &computev1.BootIsoRequest{}, "pxe", "", "", "looks for its disc"},
		{"windows all the same", "ipmi", nil, windows, &computev1.BootIsoRequest{Anyway: true}, "pxe", "boot-iso", "looks for its disc", ""},
		{"no UEFI boot image", "redfish", nil, windows, &computev1.BootIsoRequest{Firmware: "uefi"}, "virtual-media", "", "", "does not boot under UEFI"},
		{"by hand", "manual", nil, memtest, &computev1.BootIsoRequest{}, "pxe", "boot-iso-by-hand", "somebody starts it", ""},
		{"woken", "wol", nil, memtest, &computev1.BootIsoRequest{}, "pxe", "boot-iso-by-hand", "somebody starts it", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t)
			ctx := t.Context()
			r.enrolled(tt.driver, tt.hardware)
			_, err := r.addISO("admin", "acme", "disc", "", tt.iso)
			must(t, err)
			req := &computev1.BootIsoRequest{TenantId: "acme", Machine: "m1", Iso: "disc", Pxe: tt.req.Pxe, Firmware: tt.req.Firmware, Anyway: tt.req.Anyway, Check: true}
			told, err := call(ctx, r.boots("admin").BootIso, req)
			must(t, err)
			var texts []string
			refuses := false
			for _, l := range told.Limits {
				texts = append(texts, l.Text)
				refuses = refuses || l.Refuses
			}
			if told.Way != tt.way || told.WorkflowId != "" || len(r.started) != 0 || !strings.Contains(strings.Join(texts, "\n"), tt.tells) {
				t.Errorf("check = %s, workflow %q, %q, want %s, nothing begun and %q", told.Way, told.WorkflowId, texts, tt.way, tt.tells)
			}
			if refuses != (tt.refused != "" || tt.req.Anyway) {
				t.Errorf("check refuses: %v, of %q", refuses, texts)
			}
			req.Check = false
			res, err := call(ctx, r.boots("admin").BootIso, req)
			if tt.refused != "" {
				wantError(t, "boot", err, connect.CodeFailedPrecondition, "UNSUPPORTED: iso-limits: ")
				if err == nil || !strings.Contains(err.Error(), tt.refused) || len(r.started) != 0 {
					t.Errorf("boot = %v, with %d workflows, want %q and none", err, len(r.started), tt.refused)
				}
				return
			}
			must(t, err)
			w, err := r.store.Workflow(ctx, "acme", res.WorkflowId)
			if err != nil || w.Name != tt.workflow {
				t.Errorf("the workflow is %s, %v, want %s", w.Name, err, tt.workflow)
			}
			p := r.started[0]
			if p.Boot.ISO == nil || p.Boot.ISO.Name != "disc" || p.Boot.MaxBoots != 1 || p.Window != workflow.DefaultWindow {
				t.Errorf("it was begun with %+v", p)
			}
		})
	}
}

// TestBootsNeedTheDriver: what a machine's driver cannot do is said before anything is
// assigned or switched; where it cannot choose what boots, people start the machine.
func TestBootsNeedTheDriver(t *testing.T) {
	const switches = "UNSUPPORTED: bmc-driver-unsupported: %s needs power.getPower, which driver chooses does not serve: it serves management.setBootDevice"
	const starts = "UNSUPPORTED: bmc-driver-unsupported: wipe needs "
	for _, tt := range []struct {
		driver string
		want   map[string]string // by verb, the workflow or the refusal
	}{
		{"ipmi", map[string]string{"boot-iso": "boot-iso", "boot-kernel": "boot-kernel", "boot-disk": "boot-disk", "wipe": "wipe"}},
		{"unheard-of", map[string]string{"boot-iso": "boot-iso", "boot-kernel": "boot-kernel", "boot-disk": "boot-disk", "wipe": "wipe"}},
		{"redfish", map[string]string{"boot-iso": "boot-media", "boot-kernel": "boot-kernel", "boot-disk": "boot-disk", "wipe": "wipe"}},
		{"wol", map[string]string{"boot-iso": "boot-iso-by-hand", "boot-kernel": "boot-kernel-by-hand", "boot-disk": "boot-disk-by-hand",
			"wipe": starts + "management.setBootDevice, which driver wol does not serve: it serves power.getPower, power.setPower"}},
		{"chooses", map[string]string{"boot-iso": fmt.Sprintf(switches, "boot-iso"), "boot-kernel": fmt.Sprintf(switches, "boot-kernel"),
			"boot-disk": fmt.Sprintf(switches, "boot-disk"), "wipe": fmt.Sprintf(switches, "wipe")}},
		{"drive-only", map[string]string{"boot-iso": "boot-iso-by-hand", "boot-kernel": "boot-kernel-by-hand", "boot-disk": "boot-disk-by-hand", "wipe": starts}},
	} {
		for verb, want := range tt.want {
			r := newRig(t)
			ctx := t.Context()
			r.enrolled(tt.driver, nil)
			_, err := r.addISO("admin", "acme", "disc", "", memtest)
			must(t, err)
			must(t, r.store.PutArtifact(ctx, store.Artifact{Name: "kernel", Arch: "amd64", Format: artifacts.Plain, SHA256: strings.Repeat("c", 64), SizeBytes: 1, Imported: r.now}))
			id, c := "", r.boots("admin")
			switch verb {
			case "boot-iso":
				var res *computev1.BootIsoResponse
				res, err = call(ctx, c.BootIso, &computev1.BootIsoRequest{TenantId: "acme", Machine: "m1", Iso: "disc"})
				id = res.GetWorkflowId()
			case "boot-kernel":
				var res *computev1.BootKernelResponse
				res, err = call(ctx, c.BootKernel, &computev1.BootKernelRequest{TenantId: "acme", Machine: "m1", Kernel: "kernel"})
				id = res.GetWorkflowId()
			case "boot-disk":
				var res *computev1.BootDiskResponse
				res, err = call(ctx, c.BootDisk, &computev1.BootDiskRequest{TenantId: "acme", Machine: "m1"})
				id = res.GetWorkflowId()
			case "wipe":
				var res *computev1.WipeResponse
				res, err = call(ctx, c.Wipe, &computev1.WipeRequest{TenantId: "acme", Machine: "m1", DiskSerials: []string{"S1"}})
				id = res.GetWorkflowId()
			}
			if strings.HasPrefix(want, "UNSUPPORTED") {
				wantError(t, tt.driver+", "+verb, err, connect.CodeFailedPrecondition, want)
				if m := w0(t, r); len(r.started) != 0 || m.State != metal.Enrolled || m.Assignment.Action != metal.LocalDisk {
					t.Errorf("%s, %s: a refusal began %d workflows, the machine is %s at %s", tt.driver, verb, len(r.started), m.State, m.Assignment.Action)
				}
				continue
			}
			must(t, err)
			if w, err := r.store.Workflow(ctx, "acme", id); err != nil || w.Name != want {
				t.Errorf("%s, %s: the workflow is %s, %v, want %s", tt.driver, verb, w.Name, err, want)
			}
		}
	}
}

func TestBootRefusals(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	r.enrolled("ipmi", nil)
	_, err := r.addISO("admin", "acme", "disc", "", memtest)
	must(t, err)
	for _, name := range []string{"kernel", "initrd"} {
		must(t, r.store.PutArtifact(ctx, store.Artifact{Name: name, Arch: "amd64", Format: artifacts.Plain, SHA256: strings.Repeat("c", 63) + name[:1], SizeBytes: 1, Imported: r.now}))
	}
	must(t, r.store.PutArtifact(ctx, store.Artifact{Name: "packed", Arch: "amd64", Format: artifacts.Packed, SHA256: strings.Repeat("d", 64), SizeBytes: 1, Imported: r.now}))
	iso := func(edit func(*computev1.BootIsoRequest)) error {
		req := &computev1.BootIsoRequest{TenantId: "acme", Machine: "m1", Iso: "disc"}
		edit(req)
		_, err := call(ctx, r.boots("admin").BootIso, req)
		return err
	}
	kernel := func(edit func(*computev1.BootKernelRequest)) error {
		req := &computev1.BootKernelRequest{TenantId: "acme", Machine: "m1", Kernel: "kernel", Initrd: "initrd", Cmdline: "console=ttyS0"}
		edit(req)
		_, err := call(ctx, r.boots("admin").BootKernel, req)
		return err
	}
	wipe := func(serials ...string) error {
		_, err := call(ctx, r.boots("admin").Wipe, &computev1.WipeRequest{TenantId: "acme", Machine: "m1", DiskSerials: serials})
		return err
	}
	for _, tt := range []struct {
		name string
		err  error
		code connect.Code
		text string
	}{
		{"no image of the name", iso(func(b *computev1.BootIsoRequest) { b.Iso = "none" }), connect.CodeNotFound, "NOT_FOUND"},
		{"another tenant's machine", iso(func(b *computev1.BootIsoRequest) { b.TenantId = "other" }), connect.CodeNotFound, "NOT_FOUND"},
		{"another firmware", iso(func(b *computev1.BootIsoRequest) { b.Firmware = "coreboot" }), connect.CodeInvalidArgument, "INVALID_INPUT: firmware"},
		{"a window without end", iso(func(b *computev1.BootIsoRequest) { b.WindowS = 1 << 31 }), connect.CodeInvalidArgument, "INVALID_INPUT: window_s"},
		{"boots without end", iso(func(b *computev1.BootIsoRequest) { b.MaxBoots = 1 << 20 }), connect.CodeInvalidArgument, "INVALID_INPUT: max_boots"},
		{"a packed kernel", kernel(func(b *computev1.BootKernelRequest) { b.Kernel = "packed" }), connect.CodeFailedPrecondition, "UNSUPPORTED: image-format-unsupported"},
		{"no kernel", kernel(func(b *computev1.BootKernelRequest) { b.Kernel = "" }), connect.CodeInvalidArgument, "INVALID_INPUT: kernel"},
		{"no initrd of the name", kernel(func(b *computev1.BootKernelRequest) { b.Initrd = "none" }), connect.CodeNotFound, "NOT_FOUND"},
		{"a command line with iPXE's syntax", kernel(func(b *computev1.BootKernelRequest) { b.Cmdline = "a=${mac}" }), connect.CodeInvalidArgument, "INVALID_INPUT: cmdline"},
		{"a unified image with an initrd", kernel(func(b *computev1.BootKernelRequest) { b.Uki = true }), connect.CodeInvalidArgument, "INVALID_INPUT: a unified"},
		{"a unified image under BIOS", kernel(func(b *computev1.BootKernelRequest) { b.Uki, b.Initrd, b.Cmdline, b.Firmware = true, "", "", "bios" }), connect.CodeInvalidArgument, "INVALID_INPUT: a unified"},
		{"a wipe of nothing", wipe(), connect.CodeInvalidArgument, "INVALID_INPUT: disk_serials"},
		{"a wipe of one twice", wipe("S1", "S1"), connect.CodeInvalidArgument, "INVALID_INPUT: disk_serials: S1"},
		{"a wipe of no serial", wipe("S1", " "), connect.CodeInvalidArgument, "INVALID_INPUT: disk_serial"},
	} {
		wantError(t, tt.name, tt.err, tt.code, tt.text)
	}
	if len(r.started) != 0 {
		t.Errorf("%d workflows were begun by refused calls", len(r.started))
	}
	if err := kernel(func(*computev1.BootKernelRequest) {}); err != nil || r.started[0].Boot.Kernel.InitrdSHA256 == "" || r.started[0].UKI {
		t.Errorf("boot of a kernel = %v, %+v", err, r.started)
	}
	_, err = call(ctx, r.boots("admin").BootDisk, &computev1.BootDiskRequest{TenantId: "acme", Machine: "m1"})
	wantError(t, "boot-disk beside a workflow that runs", err, connect.CodeFailedPrecondition, "INVALID_INPUT: workflow-running")
}

func TestWipeStarts(t *testing.T) {
	r := newRig(t)
	r.enrolled("ipmi", nil)
	res, err := call(t.Context(), r.boots("admin").Wipe, &computev1.WipeRequest{TenantId: "acme", Machine: "m1", DiskSerials: []string{"S1", "S2"}})
	must(t, err)
	w, err := r.store.Workflow(t.Context(), "acme", res.WorkflowId)
	if m := w0(t, r); err != nil || w.Name != workflow.Wipe || m.State != metal.Wiping {
		t.Errorf("workflow %s, %v, machine %s, want a wipe and wiping", w.Name, err, m.State)
	}
	r2 := newRig(t)
	r2.enrolled("manual", nil)
	_, err = call(t.Context(), r2.boots("admin").Wipe, &computev1.WipeRequest{TenantId: "acme", Machine: "m1", DiskSerials: []string{"S1"}})
	wantError(t, "a wipe that nobody can start", err, connect.CodeFailedPrecondition, "UNSUPPORTED: bmc-driver-unsupported")
}
