package workflow

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// fetched has the box say that the machine has fetched what it boots.
func (w *world) fetched() {
	m := w.assigned.Machines[0]
	stage := w.stage
	if stage == "" {
		stage = map[pxev1.Action]string{pxev1.Action_ACTION_ISO: "iso", pxev1.Action_ACTION_KERNEL: "initrd", pxev1.Action_ACTION_UKI: "uki"}[m.Action]
	}
	if w.lost {
		step := func(stage, detail string) *pxev1.Step { return &pxev1.Step{Stage: stage, Detail: detail} }
		w.told = &pxev1.ExplainResult{Mac: m.Macs[0], MachineId: m.MachineId, Attempts: []*pxev1.Attempt{
			{Steps: []*pxev1.Step{step("dhcp", "iso"), step("script", "window "+m.WindowId)}}, {Steps: []*pxev1.Step{step("dhcp", "iso"), step(stage, "window "+m.WindowId)}},
		}}
		return
	}
	body, err := json.Marshal(map[string]string{"mac": m.Macs[0], "machine_id": m.MachineId, "stage": stage, "detail": "window " + m.WindowId})
	must(w.t, err)
	w.events++
	_, _, err = w.store.AddAgentEvents(context.Background(), w.box, []*agentv1.Event{{Seq: w.events, AtMs: time.Now().UnixMilli(), Name: "pxe.stage", Class: "telemetry", Key: m.Macs[0], BodyJson: body}})
	must(w.t, err)
}

var (
	isoDigest, kernelDigest, initrdDigest = strings.Repeat("1", 64), strings.Repeat("2", 64), strings.Repeat("3", 64)
	disc                                  = &store.Boot{ISO: &store.BootISO{Name: "memtest", SHA256: isoDigest, SizeBytes: 5 << 20, Class: 1}, MaxBoots: 1}
	linux                                 = &store.Boot{Kernel: &store.BootKernel{SHA256: kernelDigest, InitrdSHA256: initrdDigest, Cmdline: "quiet"}, MaxBoots: 2}
	unified                               = &store.Boot{Kernel: &store.BootKernel{SHA256: kernelDigest}, MaxBoots: 1}
)

// boots are the workflows that boot something else than the ramdisk, and what they do.
var bootCases = []struct {
	name     string
	workflow string
	params   Params
	effects  []string
	action   pxev1.Action // that stays; 0: the machine's disk
	efi      bool
}{
	{"iso", BootISO, Params{Boot: disc, Window: time.Hour}, []string{"fetch " + isoDigest, "assign iso", "power off", "boot pxe", "power on"}, pxev1.Action_ACTION_ISO, true},
	{"iso under BIOS", BootISO, Params{Boot: disc, Window: time.Hour, Firmware: metal.BIOS}, []string{"fetch " + isoDigest, "assign iso", "power off", "boot pxe", "power on"}, pxev1.Action_ACTION_ISO, false},
	{"kernel", BootKernel, Params{Boot: linux, Window: time.Hour}, []string{"fetch " + kernelDigest + " " + initrdDigest, "assign kernel", "power off", "boot pxe", "power on"}, pxev1.Action_ACTION_KERNEL, true},
	{"unified kernel image", BootKernel, Params{Boot: unified, UKI: true, Window: time.Hour}, []string{"fetch " + kernelDigest, "assign uki", "power off", "boot pxe", "power on"}, pxev1.Action_ACTION_UKI, true},
	{"virtual drive", BootMedia, Params{Boot: disc, Window: time.Hour}, []string{"fetch " + isoDigest, "power off", `insert ["artifact://` + isoDigest + `"]`, "boot cdrom", "power on"}, 0, true},
	{"disk", BootDisk, Params{}, []string{"assign local_disk", "power off", "boot disk", "power on"}, 0, true},
	{"disk, by hand", BootDisk, Params{ByHand: true}, []string{"assign local_disk"}, 0, false},
}

func TestBoots(t *testing.T) {
	stopped := map[string]bool{}
	for _, tt := range bootCases {
		// Without a crash, and for one of each kind with one at every point.
		once := stopped[tt.workflow]
		stopped[tt.workflow] = true
		for at := 0; at == 0 || !once; at++ {
			w := newWorld(t)
			w.at = at
			id, err := w.engine().Start(t.Context(), tt.workflow, w.m, tt.params)
			must(t, err)
			wf := w.runUntil(w.engine(), id)
			if at > 0 && w.crashed == "" {
				if at < 3 {
					t.Errorf("%s was stopped at %d points", tt.name, at-1)
				}
				break
			}
			if w.crashed != "" {
				wf = w.runUntil(w.engine(), id)
			}
			what := fmt.Sprintf("%s, stopped at %d %s", tt.name, at, w.crashed)
			if wf.State != store.StateDone || !slices.Equal(w.effects, tt.effects) {
				t.Fatalf("%s: %s (%s), effects %q, want %q", what, wf.State, wf.ErrorMessage, w.effects, tt.effects)
			}
			m, err := w.store.Machine(t.Context(), "acme", "m1")
			must(t, err)
			if m.State != metal.Enrolled {
				t.Errorf("%s: the machine is %s, want %s as before", what, m.State, metal.Enrolled)
			}
			if len(tt.effects) > 2 && w.efi != tt.efi {
				t.Errorf("%s: boots under UEFI: %v, want %v", what, w.efi, tt.efi)
			}
			if tt.action == 0 {
				if m.Assignment.Action != metal.LocalDisk {
					t.Errorf("%s: the machine is left with %s", what, m.Assignment.Action)
				}
				continue
			}
			got := w.assigned.Machines[0]
			if got.Action != tt.action || got.MaxBoots != tt.params.Boot.MaxBoots || time.Until(time.UnixMilli(got.WindowUntilMs)) < 30*time.Minute {
				t.Errorf("%s: the box is left with %v", what, got)
			}
		}
	}
}

// The box is told what it needs to decide: image, class and memory, or kernel, initrd and command line.
func TestWhatTheBoxIsTold(t *testing.T) {
	w := newWorld(t)
	must(t, w.store.RecordHardware(t.Context(), w.m.ID, `{"source":"ramdisk","memory":[{"size_bytes":8589934592},{"size_bytes":8589934592}]}`))
	id, err := w.engine().Start(t.Context(), BootISO, w.m, Params{Boot: disc, Window: time.Hour})
	must(t, err)
	w.runUntil(w.engine(), id)
	m := w.assigned.Machines[0]
	if iso := m.Iso; iso == nil || iso.Sha256 != isoDigest || iso.Name != "memtest" || iso.Size != 5<<20 || iso.Class != pxev1.IsoClass_ISO_CLASS_SELF_CONTAINED || m.Purpose != "iso" || m.RamBytes != 16<<30 {
		t.Errorf("the box is told %v", m)
	}
	id, err = w.engine().Start(t.Context(), BootKernel, w.m, Params{Boot: linux, Window: time.Hour})
	must(t, err)
	w.runUntil(w.engine(), id)
	m = w.assigned.Machines[0]
	if k := m.Kernel; k == nil || k.Sha256 != kernelDigest || k.InitrdSha256 != initrdDigest || k.Cmdline != "quiet" || m.Purpose != "boot" || m.Iso != nil || m.MaxBoots != 2 {
		t.Errorf("the box is told %v", m)
	}
	// An inspection takes its place, without what was of the kernel.
	id, err = w.engine().Start(t.Context(), Inspect, w.m, Params{})
	must(t, err)
	w.runUntil(w.engine(), id)
	if m, err := w.store.Machine(t.Context(), "acme", "m1"); err != nil || m.Assignment.Boot != (store.Boot{}) {
		t.Errorf("after an inspection the machine boots %+v, %v", m.Assignment.Boot, err)
	}
}

// A machine that fetches something else, or another window's, has not booted yet; a
// workflow that fails gives the machine back to its disk.
func TestBootFails(t *testing.T) {
	t.Run("the box cannot fetch it", func(t *testing.T) {
		w := newWorld(t)
		w.fail = func(spec commands.Spec, _ int) *errs.Error {
			if spec.Kind == "artifact.fetch" {
				return errs.New(errs.NoSpace, "too large")
			}
			return nil
		}
		id, err := w.engine().Start(t.Context(), BootISO, w.m, Params{Boot: disc, Window: time.Hour})
		must(t, err)
		if wf := w.runUntil(w.engine(), id); wf.State != store.StateFailed || wf.ErrorCode != "no-space" || len(w.effects) != 0 {
			t.Errorf("workflow %s %s, effects %q, want it failed before anything was done", wf.State, wf.ErrorCode, w.effects)
		}
	})
	t.Run("another stage", func(t *testing.T) {
		w := newWorld(t)
		w.stage = "script"
		id, err := w.engine().Start(t.Context(), BootISO, w.m, Params{Boot: disc, Window: 300 * time.Millisecond})
		must(t, err)
		wf := w.runUntil(w.engine(), id)
		if wf.State != store.StateFailed || wf.ErrorCode != "timeout" || !strings.Contains(wf.ErrorMessage, "before its window ended") {
			t.Errorf("workflow %s %s %s, want it failed when the window ended", wf.State, wf.ErrorCode, wf.ErrorMessage)
		}
		m, err := w.store.Machine(t.Context(), "acme", "m1")
		must(t, err)
		if got := w.assigned.Machines[0]; got.Action != pxev1.Action_ACTION_LOCAL_DISK || m.Assignment.Action != metal.LocalDisk || m.Assignment.Boot != (store.Boot{}) || m.State != metal.Enrolled {
			t.Errorf("the box has %v, the machine %s with %+v, want its disk, and its state as it was", got.Action, m.State, m.Assignment)
		}
	})
	t.Run("another stage, and the box is away", func(t *testing.T) {
		w := newWorld(t)
		w.stage = "script"
		e := w.engine()
		id, err := e.Start(t.Context(), BootISO, w.m, Params{Boot: disc, Window: time.Second})
		must(t, err)
		var waits sync.WaitGroup
		waits.Go(func() {
			for t.Context().Err() == nil && !strings.Contains(e.Note(id), "waiting for the machine to fetch") {
				time.Sleep(time.Millisecond)
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			delete(w.online, w.box)
		})
		w.runUntil(e, id)
		waits.Wait()
		m, err := w.store.Machine(t.Context(), "acme", "m1")
		must(t, err)
		if m.Assignment.Action != metal.LocalDisk || m.Assignment.Boot != (store.Boot{}) {
			t.Errorf("the machine is left with %+v, want its disk in the next snapshot", m.Assignment)
		}
	})
	t.Run("a window that is over is not opened again", func(t *testing.T) {
		w := newWorld(t)
		id, err := w.engine().Start(t.Context(), BootISO, w.m, Params{Boot: disc, Window: 200 * time.Millisecond})
		must(t, err)
		w.runUntil(w.engine(), id)
		machines, err := w.store.Machines(t.Context(), "acme")
		must(t, err)
		for _, now := range []struct {
			at   time.Time
			want pxev1.Action
		}{{time.Now().Add(-time.Hour), pxev1.Action_ACTION_ISO}, {time.Now().Add(time.Hour), pxev1.Action_ACTION_LOCAL_DISK}} {
			req := metal.AssignCommand(store.Snapshot{Version: 9, Machines: machines}, now.at).Args.(*pxev1.AssignRequest)
			if got := req.Machines[0]; got.Action != now.want || got.Action == pxev1.Action_ACTION_LOCAL_DISK && got.Iso != nil {
				t.Errorf("the snapshot of %s says %v, want %v", now.at, got, now.want)
			}
		}
	})
}

// A machine that people start is assigned, and waited for.
func TestBootByHand(t *testing.T) {
	w := newWorld(t)
	id, err := w.engine().Start(t.Context(), BootISO, w.m, Params{Boot: disc, Window: time.Hour, ByHand: true})
	must(t, err)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	e := w.engine()
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	deadline := time.Now().Add(10 * time.Second)
	for !strings.Contains(e.Note(id), "somebody to start") {
		if time.Now().After(deadline) {
			t.Fatalf("the workflow never waits for anybody: %q", e.Note(id))
		}
		time.Sleep(time.Millisecond)
	}
	w.mu.Lock()
	w.fetched()
	w.mu.Unlock()
	for {
		wf, err := w.store.Workflow(t.Context(), "acme", id)
		must(t, err)
		if wf.State == store.StateDone {
			break
		}
		if time.Now().After(deadline) || wf.State == store.StateFailed {
			t.Fatalf("workflow %s %s", wf.State, wf.ErrorMessage)
		}
		time.Sleep(time.Millisecond)
	}
	stop()
	must(t, <-done)
	if want := []string{"fetch " + isoDigest, "assign iso"}; !slices.Equal(w.effects, want) {
		t.Errorf("effects %q, want %q: nobody but people switches it", w.effects, want)
	}
}

// TestLostReport: a boot of which nothing arrived is found by asking the box, which is
// asked until it answers; what it says of another machine, window or stage is no boot.
func TestLostReport(t *testing.T) {
	for _, tt := range []struct {
		name   string
		params Params
		kind   string
		spoil  func(w *world)
		booted bool
	}{
		{"a disc image", Params{Boot: disc}, BootISO, func(*world) {}, true},
		{"a kernel", Params{Boot: linux}, BootKernel, func(*world) {}, true},
		{"the box does not answer at first", Params{Boot: disc}, BootISO, func(w *world) {
			w.fail = func(spec commands.Spec, nth int) *errs.Error {
				if spec.Kind == "pxe.explain" && nth < 3 {
					return errs.Retry(errs.Timeout, "no result")
				}
				return nil
			}
		}, true},
		{"an earlier stage", Params{Boot: disc}, BootISO, func(w *world) { w.stage = "script" }, false},
		{"another machine", Params{Boot: disc}, BootISO, func(w *world) {
			w.retell = func(r *pxev1.ExplainResult) { r.MachineId = "node_2" }
		}, false},
		{"another window", Params{Boot: disc}, BootISO, func(w *world) {
			w.retell = func(r *pxev1.ExplainResult) { r.Attempts[1].Steps[1].Detail = "window win_1" }
		}, false},
		{"the window ends before it is asked", Params{Boot: disc, Window: 300 * time.Millisecond}, BootISO, func(w *world) { w.ask = time.Hour }, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			w.lost, w.ask = true, time.Millisecond
			if tt.params.Window == 0 {
				tt.params.Window = time.Hour
			}
			if !tt.booted {
				tt.params.Window = 300 * time.Millisecond
			}
			tt.spoil(w)
			e := w.engine()
			e.ask = w.ask
			id, err := e.Start(t.Context(), tt.kind, w.m, tt.params)
			must(t, err)
			wf := w.runUntil(e, id)
			if tt.booted != (wf.State == store.StateDone) || !tt.booted && !strings.Contains(wf.ErrorMessage, "before its window ended") {
				t.Errorf("workflow %s %s %s, want it booted: %v", wf.State, wf.ErrorCode, wf.ErrorMessage, tt.booted)
			}
			if w.nth["pxe.explain"] == 0 {
				t.Error("the box was never asked")
			}
		})
	}
}

// TestAsking: a box is asked ever more rarely, but well within the hour that it
// remembers, and before the limit of the step that asks.
func TestAsking(t *testing.T) {
	start := time.UnixMilli(1_800_000_000_000)
	for _, tt := range []struct {
		name  string
		limit time.Duration // 0: none
		want  []time.Duration
	}{
		{"a boot", 30 * time.Minute, []time.Duration{30 * time.Second, 90 * time.Second, 210 * time.Second, 450 * time.Second, 930 * time.Second, 29 * time.Minute}},
		{"taken up after the limit", time.Minute, []time.Duration{30 * time.Second}},
		{"a moment that is left", 70 * time.Second, []time.Duration{10 * time.Second}},
		{"by hand", 2 * time.Hour, []time.Duration{30 * time.Second, 90 * time.Second, 210 * time.Second, 450 * time.Second, 930 * time.Second, 1890 * time.Second,
			3090 * time.Second, 4290 * time.Second, 5490 * time.Second, 6690 * time.Second, 119 * time.Minute}},
	} {
		var got []time.Duration
		a := asking{pause: firstAsk, limit: start.Add(tt.limit)}
		for a.next(start); a.due.Before(a.limit); a.next(a.due) {
			got = append(got, a.due.Sub(start))
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: asked after %v, want %v", tt.name, got, tt.want)
		}
	}
	a := asking{pause: firstAsk}
	if a.next(start); !a.due.Equal(start.Add(firstAsk)) {
		t.Errorf("without a limit: asked after %s, want %s", a.due.Sub(start), firstAsk)
	}
}

// waiting is a boot whose machine is switched on, and that waits for the box's word.
func (w *world) waiting(e *Engine) (*run, *store.WorkflowStep) {
	w.t.Helper()
	id, err := e.Start(w.t.Context(), BootISO, w.m, Params{Boot: disc, Window: time.Hour})
	must(w.t, err)
	wf, err := w.store.Workflow(w.t.Context(), "acme", id)
	must(w.t, err)
	r, err := e.load(w.t.Context(), wf, e.Log)
	must(w.t, err)
	steps, err := w.store.WorkflowSteps(w.t.Context(), id)
	must(w.t, err)
	a := store.Assignment{Action: metal.ISO, Purpose: "iso", WindowID: r.params.WindowID, WindowUntil: time.Now().Add(time.Hour), Boot: *disc}
	must(w.t, w.store.Assign(w.t.Context(), "site_1", w.m.ID, a, func(next store.Snapshot) (store.WorkflowStep, error) {
		w.assigned = metal.AssignCommand(next, time.Now()).Args.(*pxev1.AssignRequest)
		return steps[1], nil
	}))
	return r, &steps[len(steps)-1]
}

// TestAskedBeforeTheLimit: a boot whose report is lost is found before its step ends, though
// it was not the time to ask.
func TestAskedBeforeTheLimit(t *testing.T) {
	w := newWorld(t)
	w.lost = true
	e := w.engine()
	e.ask, e.grace = time.Hour, lastAsk+20*time.Millisecond
	r, step := w.waiting(e)
	w.fetched()
	done := make(chan error, 1)
	go func() { done <- r.one(t.Context(), step, action{"boot.wait", time.Nanosecond, waitBooted}) }()
	select {
	case err := <-done:
		must(t, err)
	case <-time.After(lastAsk / 2):
		t.Error("the box is not asked before the limit")
	}
}

// TestNobodyKnows: a window that ends while the box is offline is told as what it is.
func TestNobodyKnows(t *testing.T) {
	w := newWorld(t)
	e := w.engine()
	r, step := w.waiting(e)
	w.online[w.box] = false
	must(t, w.store.Assign(t.Context(), "site_1", w.m.ID, store.Assignment{Action: metal.ISO, Purpose: "iso", WindowID: r.params.WindowID, WindowUntil: time.Now().Add(-time.Second), Boot: *disc}, func(store.Snapshot) (store.WorkflowStep, error) {
		return *step, nil
	}))
	err := r.one(t.Context(), step, action{"boot.wait", time.Minute, waitBooted})
	if errs.CodeOf(err) != errs.Timeout || !strings.Contains(err.Error(), "nobody knows whether the machine booted before its window ended: the site's box is offline") {
		t.Errorf("the step ended with %v, want it said that nobody knows", err)
	}
}
