package instances

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/host"
	"github.com/better-compute/site-appliance/plugins/instance"
)

// fake is a runtime in memory.
type fake struct {
	mu      sync.Mutex
	have    map[string]instance.Status
	calls   []string
	broken  error                    // of every call
	refuse  error                    // of apply
	sticky  error                    // of remove
	slow    map[string]chan struct{} // applies that wait
	changed chan struct{}
}

func newFake() *fake {
	return &fake{have: map[string]instance.Status{}, changed: make(chan struct{}, 1)}
}

func (f *fake) Changed() <-chan struct{} { return f.changed }

func (f *fake) List(context.Context) ([]instance.Status, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Collect(maps.Values(f.have)), f.broken
}

func (f *fake) Apply(ctx context.Context, s instance.Spec) error {
	f.mu.Lock()
	hold := f.slow[s.ID]
	f.mu.Unlock()
	if hold != nil {
		select {
		case <-hold:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, "apply "+s.ID)
	if err := errors.Join(f.broken, f.refuse); err != nil {
		return err
	}
	f.have[s.ID] = instance.Status{ID: s.ID, State: instance.Running, Generation: s.Generation}
	return nil
}

func (f *fake) Remove(_ context.Context, id string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, "remove "+id)
	if err := errors.Join(f.broken, f.sticky); err != nil {
		return err
	}
	delete(f.have, id)
	return nil
}

func (f *fake) get(id string) instance.Status { return f.all()[id] }

func (f *fake) all() map[string]instance.Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.have)
}

func (f *fake) asked() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.calls)
}

func (f *fake) set(s instance.Status) {
	f.mu.Lock()
	f.have[s.ID] = s
	f.mu.Unlock()
	select {
	case f.changed <- struct{}{}:
	default:
	}
}

func (f *fake) fault(edit func(*fake)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	edit(f)
}

func (f *fake) count(call string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, c := range f.calls {
		if c == call {
			n++
		}
	}
	return n
}

// rig is a converger over two fakes, with the events that it tells.
type rig struct {
	*Converger
	a, b   *fake
	mu     sync.Mutex
	events []Status
}

func (r *rig) emit(name, class, key string, body any) error {
	s, ok := body.(Status)
	if name != StateEvent || class != "state" || !ok || key != s.ID {
		return errors.New("a bad event")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, s)
	return nil
}

// last is the last that was told of an instance.
func (r *rig) last(id string) Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range slices.Backward(r.events) {
		if s.ID == id {
			return s
		}
	}
	return Status{}
}

// start runs a converger over file until the test's bubble ends it.
func (r *rig) start(t *testing.T, file string) (stop func()) {
	t.Helper()
	var err error
	r.Converger, err = Open(Config{File: file, Runtimes: map[string]Runtime{"alpha": r.a, "beta": r.b}, Emit: r.emit, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	return func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Run() = %v", err)
		}
	}
}

func want(id, runtime string, generation uint64) Spec {
	return Spec{Runtime: runtime, Spec: instance.Spec{ID: id, Name: id, Generation: generation, Config: json.RawMessage(`{"x":1}`)}}
}

func bubble(t *testing.T, f func(t *testing.T, r *rig, file string)) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "instances.json")
	synctest.Test(t, func(t *testing.T) { f(t, &rig{a: newFake(), b: newFake()}, file) })
}

func TestAppliesRestartsAndRemoves(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig, file string) {
		stop := r.start(t, file)
		defer stop()
		s, err := r.Apply(t.Context(), want("i-1", "alpha", 1))
		if err != nil || s != (Status{ID: "i-1", Runtime: "alpha", State: instance.Running, Generation: 1}) {
			t.Fatalf("Apply() = %+v, %v", s, err)
		}
		// The same again asks nothing more of the runtime.
		if _, err := r.Apply(t.Context(), want("i-1", "alpha", 1)); err != nil || r.a.count("apply i-1") != 1 {
			t.Errorf("the same again = %v, %d calls, want 1", err, r.a.count("apply i-1"))
		}
		time.Sleep(2 * time.Minute)
		r.a.set(instance.Status{ID: "i-1", State: instance.Failed, Message: "killed", Generation: 1})
		synctest.Wait()
		if got := r.last("i-1"); got.State != instance.Running || r.a.count("apply i-1") != 2 {
			t.Errorf("after its end: %+v and %d applies, want it running by the second", got, r.a.count("apply i-1"))
		}
		r.a.set(instance.Status{ID: "i-1", State: instance.Stopped, Generation: 1})
		time.Sleep(5 * time.Minute)
		if got := r.last("i-1"); got.State != instance.Stopped || r.a.count("apply i-1") != 2 {
			t.Errorf("one that ended as it should: %+v and %d applies, want stopped and 2", got, r.a.count("apply i-1"))
		}
		if _, gone, err := r.Remove(t.Context(), "i-1", 2); err != nil || !gone {
			t.Errorf("Remove() = gone %v, %v", gone, err)
		}
		if got := r.last("i-1"); got.State != removed || got.Generation != 2 {
			t.Errorf("told %+v, want removed at generation 2", got)
		}
		if list := r.List(); len(list) != 0 {
			t.Errorf("List() = %v, want nothing", list)
		}
		// Removing again, and what never was, is fine.
		for _, id := range []string{"i-1", "i-9"} {
			if _, gone, err := r.Remove(t.Context(), id, 2); err != nil || !gone {
				t.Errorf("Remove(%s) = gone %v, %v", id, gone, err)
			}
		}
	})
}

func TestOlderNeverReplacesNewer(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig, file string) {
		stop := r.start(t, file)
		defer func() { stop() }()
		apply := func(generation uint64) error {
			_, err := r.Apply(t.Context(), want("i-1", "alpha", generation))
			return err
		}
		remove := func(generation uint64) error {
			_, _, err := r.Remove(t.Context(), "i-1", generation)
			return err
		}
		for i, step := range []struct {
			do   func(uint64) error
			gen  uint64
			want errs.Code
		}{
			{apply, 5, ""}, {apply, 4, errs.OperationNotAllowed}, {remove, 4, errs.OperationNotAllowed}, {apply, 6, ""},
			{remove, 7, ""}, {apply, 6, errs.OperationNotAllowed}, {apply, 7, errs.OperationNotAllowed}, {remove, 6, ""}, {apply, 8, ""},
		} {
			if err := step.do(step.gen); errs.CodeOf(err) != step.want {
				t.Errorf("step %d at generation %d = %v, want %q", i, step.gen, err, step.want)
			}
			if i == 4 { // what is known outlives a restart
				stop()
				stop = r.start(t, file)
			}
		}
		if got := r.a.get("i-1").Generation; got != 8 {
			t.Errorf("generation %d runs, want 8", got)
		}
		other := want("i-1", "alpha", 8)
		other.Config = json.RawMessage(`{"x":2}`)
		if _, err := r.Apply(t.Context(), other); errs.CodeOf(err) != errs.DuplicateMismatch {
			t.Errorf("other content of a generation = %v, want %s", err, errs.DuplicateMismatch)
		}
		// What runs newer than is wanted stays as it is.
		r.a.set(instance.Status{ID: "i-1", State: instance.Failed, Generation: 9})
		time.Sleep(time.Minute)
		if got := r.last("i-1"); !got.Orphan || r.a.get("i-1").Generation != 9 {
			t.Errorf("a newer one: told %+v, has %+v", got, r.a.get("i-1"))
		}
	})
}

func TestBacksOff(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig, file string) {
		stop := r.start(t, file)
		defer stop()
		r.a.fault(func(f *fake) { f.refuse = errs.New(errs.DriverError, "no such image") })
		s, err := r.Apply(t.Context(), want("i-1", "alpha", 1))
		if err != nil || s.State != instance.Failed || !strings.Contains(s.Message, "no such image") {
			t.Fatalf("Apply() = %+v, %v, want a failed state that says why", s, err)
		}
		time.Sleep(65 * time.Second) // attempts at 0, 1, 3, 7, 15, 31 and 63 s
		if got := r.a.count("apply i-1"); got != 7 {
			t.Errorf("attempts within 65 s = %d, want 7", got)
		}
		// Another instance is not held up, and a new generation is tried at once.
		if s, err := r.Apply(t.Context(), want("i-2", "beta", 1)); err != nil || s.State != instance.Running {
			t.Errorf("another instance = %+v, %v", s, err)
		}
		r.a.fault(func(f *fake) { f.refuse = nil })
		if s, err := r.Apply(t.Context(), want("i-1", "alpha", 2)); err != nil || s.State != instance.Running {
			t.Errorf("the next generation = %+v, %v", s, err)
		}
		if got := r.last("i-1"); got.State != instance.Running || got.Message != "" {
			t.Errorf("told %+v, want it running without a complaint", got)
		}
	})
}

// One that takes long, such as a large image on a thin line, holds up no other.
func TestASlowInstanceHoldsUpNoOther(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig, file string) {
		stop := r.start(t, file)
		defer stop()
		hold := make(chan struct{})
		r.a.fault(func(f *fake) { f.slow = map[string]chan struct{}{"slow": hold} })
		came := make(chan Status, 1)
		go func() {
			s, err := r.Apply(t.Context(), want("slow", "alpha", 1))
			if err != nil {
				t.Error(err)
			}
			came <- s
		}()
		synctest.Wait()
		if s, err := r.Apply(t.Context(), want("i-1", "alpha", 1)); err != nil || s.State != instance.Running {
			t.Errorf("beside it: Apply() = %+v, %v", s, err)
		}
		r.a.set(instance.Status{ID: "i-1", State: instance.Failed, Generation: 1})
		time.Sleep(10 * time.Second)
		if got := r.last("i-1"); got.State != instance.Running {
			t.Errorf("beside it: %+v, want it started again", got)
		}
		if got := r.last("slow"); got.State != instance.Pending || len(came) != 0 {
			t.Errorf("the slow one: told %+v, answered %v, want pending and no answer", got, len(came) != 0)
		}
		close(hold)
		if s := <-came; s.State != instance.Running || r.a.count("apply slow") != 1 {
			t.Errorf("the slow one = %+v after %d calls, want it running by one", s, r.a.count("apply slow"))
		}
	})
}

func TestSilentRuntime(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig, file string) {
		stop := r.start(t, file)
		defer stop()
		r.a.fault(func(f *fake) { f.broken = errs.Retry(errs.Unavailable, "plugin x is restarting") })
		s, err := r.Apply(t.Context(), want("i-1", "alpha", 1))
		if err != nil || s.State != instance.Pending || !strings.Contains(s.Message, "restarting") {
			t.Errorf("Apply() = %+v, %v, want pending and the reason", s, err)
		}
		r.a.fault(func(f *fake) { f.broken = nil })
		time.Sleep(2 * time.Minute)
		if got := r.last("i-1"); got.State != instance.Running {
			t.Errorf("once it answers: %+v, want running", got)
		}
	})
}

// Orphans are told and left alone, but for those whose removal was asked for.
func TestOrphans(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig, file string) {
		r.a.set(instance.Status{ID: "stranger", State: instance.Running, Generation: 3})
		r.a.set(instance.Status{ID: "unmarked", State: instance.Running})
		stop := r.start(t, file)
		defer stop()
		time.Sleep(time.Hour)
		for _, id := range []string{"stranger", "unmarked"} {
			if got := r.last(id); !got.Orphan || got.State != instance.Running || r.a.count("remove "+id) != 0 {
				t.Errorf("%s: told %+v and %d removals, want an orphan that is left alone", id, got, r.a.count("remove "+id))
			}
		}
		// A removal that was asked for an older generation does not touch it.
		if _, _, err := r.Remove(t.Context(), "stranger", 2); err != nil || r.a.count("remove stranger") != 0 {
			t.Errorf("an older removal = %v, %d removals, want none", err, r.a.count("remove stranger"))
		}
		if _, gone, err := r.Remove(t.Context(), "stranger", 3); err != nil || !gone || r.a.count("remove stranger") != 1 {
			t.Errorf("Remove() = gone %v, %v, %d removals", gone, err, r.a.count("remove stranger"))
		}
		if got := r.last("stranger"); got.State != removed {
			t.Errorf("told %+v, want removed", got)
		}
		// Removed, and back: it is removed again without being asked again.
		r.a.set(instance.Status{ID: "stranger", State: instance.Running, Generation: 3})
		time.Sleep(time.Minute)
		if r.a.count("remove stranger") != 2 || r.a.count("remove unmarked") != 0 {
			t.Errorf("calls = %v", r.a.asked())
		}
	})
}

func TestRemovalGoesOnUntilItIsDone(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig, file string) {
		stop := r.start(t, file)
		if _, err := r.Apply(t.Context(), want("i-1", "alpha", 1)); err != nil {
			t.Fatal(err)
		}
		r.a.fault(func(f *fake) { f.sticky = errs.New(errs.DriverError, "busy") })
		s, gone, err := r.Remove(t.Context(), "i-1", 2)
		if err != nil || gone || s.State != removing || !strings.Contains(s.Message, "busy") {
			t.Errorf("Remove() = %+v, %v, %v, want removing and the reason", s, gone, err)
		}
		stop()
		stop = r.start(t, file) // asked before a restart, done after it
		defer func() { stop() }()
		r.a.fault(func(f *fake) { f.sticky = nil })
		time.Sleep(2 * time.Minute)
		if got := r.last("i-1"); got.State != removed || len(r.a.all()) != 0 {
			t.Errorf("told %+v, runs %v, want it removed", got, r.a.all())
		}
	})
}

func TestMovesToAnotherRuntime(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig, file string) {
		stop := r.start(t, file)
		defer stop()
		if _, err := r.Apply(t.Context(), want("i-1", "alpha", 1)); err != nil {
			t.Fatal(err)
		}
		if s, err := r.Apply(t.Context(), want("i-1", "beta", 2)); err != nil || s.Runtime != "beta" {
			t.Fatalf("Apply() = %+v, %v", s, err)
		}
		time.Sleep(time.Minute)
		if len(r.a.all()) != 0 || r.b.get("i-1").Generation != 2 {
			t.Errorf("alpha has %v, beta %v", r.a.all(), r.b.all())
		}
		if got := r.last("i-1"); got.Runtime != "beta" || got.State != instance.Running {
			t.Errorf("told %+v, want it running by beta", got)
		}
	})
}

func TestKeepsWhatIsWantedOverARestart(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig, file string) {
		stop := r.start(t, file)
		if _, err := r.Apply(t.Context(), want("i-1", "alpha", 1)); err != nil {
			t.Fatal(err)
		}
		stop()
		r.a.fault(func(f *fake) { clear(f.have) }) // the machine restarted
		stop = r.start(t, file)
		synctest.Wait()
		if got := r.a.get("i-1"); got.State != instance.Running {
			t.Errorf("after a restart: %+v, want it running", got)
		}
		stop()
		// Damage costs the list, and kills nothing.
		if err := os.WriteFile(file, []byte(`{"version":1,"instances":[{}]}`), 0o600); err != nil {
			t.Fatal(err)
		}
		stop = r.start(t, file)
		defer func() { stop() }()
		synctest.Wait()
		if got := r.last("i-1"); !got.Orphan || r.a.get("i-1").ID == "" {
			t.Errorf("told %+v, has %+v, want an orphan that runs", got, r.a.get("i-1"))
		}
		// The gateway asks again, and all is well without a second start.
		before := r.a.count("apply i-1")
		if s, err := r.Apply(t.Context(), want("i-1", "alpha", 1)); err != nil || s.Orphan || r.a.count("apply i-1") != before {
			t.Errorf("asked again = %+v, %v, %d applies, want %d", s, err, r.a.count("apply i-1"), before)
		}
	})
}

func TestARuntimeThatWentAway(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig, file string) {
		d := &desired{path: file, entries: map[string]entry{}}
		if err := d.apply(want("i-1", "gamma", 1)); err != nil {
			t.Fatal(err)
		}
		stop := r.start(t, file)
		defer stop()
		synctest.Wait()
		if got := r.last("i-1"); got.State != instance.Failed || !strings.Contains(got.Message, "no runtime gamma") {
			t.Errorf("told %+v, want a failure that names the runtime", got)
		}
		if _, err := r.Apply(t.Context(), want("i-2", "gamma", 1)); errs.CodeOf(err) != errs.UnsupportedDriver {
			t.Errorf("Apply() = %v, want %s", err, errs.UnsupportedDriver)
		}
		if _, _, err := r.Remove(t.Context(), "i-1", 2); errs.CodeOf(err) != errs.UnsupportedDriver {
			t.Errorf("Remove() = %v, want %s", err, errs.UnsupportedDriver)
		}
	})
}

func TestBounds(t *testing.T) {
	d := &desired{path: filepath.Join(t.TempDir(), "x"), entries: map[string]entry{}}
	for i := range MaxInstances {
		d.entries[strings.Repeat("a", i%60+1)+string(rune('a'+i%26))+strings.Repeat("b", i/60)] = entry{}
	}
	for len(d.entries) < MaxInstances {
		d.entries["x"+strings.Repeat("y", len(d.entries)%50)+strings.Repeat("z", len(d.entries)/50)] = entry{}
	}
	if err := d.apply(want("one-more", "alpha", 1)); errs.CodeOf(err) != errs.NoSpace {
		t.Errorf("one too many = %v, want %s", err, errs.NoSpace)
	}
	for i := range maxGraves + 5 {
		d.bury(string(rune('a'+i%26))+strings.Repeat("x", i/26), 1)
	}
	if len(d.graves) != maxGraves {
		t.Errorf("%d removals are remembered, want %d", len(d.graves), maxGraves)
	}
}

func TestKindsDecode(t *testing.T) {
	v, err := Open(Config{File: filepath.Join(t.TempDir(), "x"), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[string]dispatch.Kind{}
	for _, k := range v.Kinds() {
		kinds[k.Name] = k
	}
	good := func() *agentv1.InstanceApplyRequest {
		return &agentv1.InstanceApplyRequest{Instance: &agentv1.InstanceSpec{InstanceId: "i-1", Name: "web", Runtime: "process", SpecJson: "{}", Generation: 1}}
	}
	for name, tt := range map[string]struct {
		kind string
		args proto.Message
		want errs.Code
	}{
		"good":       {ApplyKind, good(), ""},
		"no spec":    {ApplyKind, &agentv1.InstanceApplyRequest{}, errs.InvalidArgs},
		"array":      {ApplyKind, edit(good(), func(s *agentv1.InstanceSpec) { s.SpecJson = "[]" }), errs.InvalidArgs},
		"id":         {ApplyKind, edit(good(), func(s *agentv1.InstanceSpec) { s.InstanceId = "../x" }), errs.InvalidArgs},
		"runtime":    {ApplyKind, edit(good(), func(s *agentv1.InstanceSpec) { s.Runtime = "A" }), errs.InvalidArgs},
		"generation": {ApplyKind, edit(good(), func(s *agentv1.InstanceSpec) { s.Generation = 0 }), errs.InvalidArgs},
		"long":       {ApplyKind, edit(good(), func(s *agentv1.InstanceSpec) { s.SpecJson = `{"x":"` + strings.Repeat("y", maxConfig) + `"}` }), errs.InvalidArgs},
		"remove":     {RemoveKind, &agentv1.InstanceRemoveRequest{InstanceId: "i-1", Generation: 2}, ""},
		"remove 0":   {RemoveKind, &agentv1.InstanceRemoveRequest{InstanceId: "i-1"}, errs.InvalidArgs},
		"list":       {ListKind, &agentv1.InstanceListRequest{}, ""},
		"snapshot":   {SnapshotKind, &agentv1.InstanceListRequest{}, errs.UnsupportedOperation},
	} {
		args, err := proto.Marshal(tt.args)
		if err != nil {
			t.Fatal(err)
		}
		op, err := kinds[tt.kind].Decode(args)
		if errs.CodeOf(err) != tt.want {
			t.Errorf("%s: Decode() = %v, want %q", name, err, tt.want)
		}
		if err == nil && (!op.RetrySafe || op.Destructive || op.Key == "") {
			t.Errorf("%s: operation = %+v, want retry-safe, not destructive, with a key", name, op)
		}
	}
	if _, err := kinds[ApplyKind].Decode([]byte{0xff}); errs.CodeOf(err) != errs.InvalidPayload {
		t.Errorf("garbage = %v, want %s", err, errs.InvalidPayload)
	}
}

func edit(m *agentv1.InstanceApplyRequest, f func(*agentv1.InstanceSpec)) *agentv1.InstanceApplyRequest {
	f(m.Instance)
	return m
}

// plugins is a host with drivers that answer from a table.
type plugins struct {
	manifests []driver.Manifest
	calls     []host.Call
	answers   map[string]string
}

func (p *plugins) Drivers() []driver.Manifest { return p.manifests }

func (p *plugins) Invoke(_ context.Context, c host.Call) (json.RawMessage, error) {
	p.calls = append(p.calls, c)
	a, ok := p.answers[c.Operation]
	if !ok {
		return nil, errs.New(errs.UnsupportedOperation, "no %s", c.Operation)
	}
	return json.RawMessage(a), nil
}

func TestHostedRuntimes(t *testing.T) {
	schema := json.RawMessage(`{"type":"object","additionalProperties":false,"properties":{"namespace":{"type":"string"}}}`)
	m := func(id string, kinds ...string) driver.Manifest {
		return driver.Manifest{ID: id, Version: "1.0.0", RunsOn: "node", Kinds: kinds, ConfigSchema: schema}
	}
	p := &plugins{
		manifests: []driver.Manifest{m("vm", "runtime"), m("process", "runtime"), m("nvidia", "config"), m("strict", "runtime")},
		answers:   map[string]string{"list": `[{"id":"i-1","state":"running","generation":3}]`, "apply": "null", "remove": "null"},
	}
	all := Hosted(p, []string{"process"}, map[string]json.RawMessage{
		"vm": json.RawMessage(`{"namespace":"x"}`), "strict": json.RawMessage(`{"bogus":1}`), "absent": json.RawMessage(`{}`),
	}, slog.New(slog.DiscardHandler))
	if got := slices.Collect(maps.Keys(all)); !reflect.DeepEqual(got, []string{"vm"}) {
		t.Fatalf("Hosted() = %v, want vm alone", got)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	list, err := all["vm"].List(ctx)
	if err != nil || len(list) != 1 || list[0] != (instance.Status{ID: "i-1", State: instance.Running, Generation: 3}) {
		t.Errorf("List() = %+v, %v", list, err)
	}
	if err := all["vm"].Apply(ctx, instance.Spec{ID: "i-1", Name: "web", Generation: 3, Config: json.RawMessage(`{}`)}); err != nil {
		t.Error(err)
	}
	if err := all["vm"].Remove(ctx, "i-1"); err != nil {
		t.Error(err)
	}
	var got []string
	for _, c := range p.calls {
		if c.Driver != "vm" || c.Kind != "runtime" || string(c.Config) != `{"namespace":"x"}` || c.Deadline.IsZero() {
			t.Errorf("call = %+v", c)
		}
		got = append(got, c.Operation+" "+string(c.Args)+" "+c.IdempotencyKey)
	}
	wanted := []string{"list [] ", `apply [{"id":"i-1","name":"web","generation":3,"config":{}}] i-1/3`, `remove ["i-1"] i-1/remove`}
	if !reflect.DeepEqual(got, wanted) {
		t.Errorf("calls = %q, want %q", got, wanted)
	}
	for _, bad := range []string{`{}`, `[{"id":"../x","state":"running"}]`, `[{"id":"i-1","state":"happy"}]`, `nonsense`} {
		p.answers["list"] = bad
		if list, err := all["vm"].List(ctx); err == nil {
			t.Errorf("List() of %s = %v, want an error", bad, list)
		}
	}
}

func FuzzDesired(f *testing.F) {
	f.Add([]byte(`{"version":1,"instances":[{"runtime":"process","id":"a","name":"a","generation":1,"config":{}}],"removed":[{"id":"b","generation":2}]}`))
	f.Add([]byte(`{"version":2}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		d, err := parseDesired(data)
		for _, e := range d.Instances {
			if err == nil && e.check() != nil {
				t.Errorf("parseDesired(%q) took a bad entry", data)
			}
		}
	})
}

func FuzzDecodeApply(f *testing.F) {
	args, _ := proto.Marshal(&agentv1.InstanceApplyRequest{Instance: &agentv1.InstanceSpec{InstanceId: "i-1", Runtime: "process", SpecJson: "{}", Generation: 1}})
	f.Add(args)
	f.Fuzz(func(t *testing.T, data []byte) {
		if op, err := decodeApply(data); err == nil && op.Value.(Spec).check() != nil {
			t.Errorf("decodeApply(%q) took a bad spec", data)
		}
	})
}

// A runtime that was not looked at since the start may still have what moved
// away from it.
func TestAMoveThatARestartCutsNeverRunsTwice(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig, file string) {
		d := &desired{path: file, entries: map[string]entry{}}
		for _, s := range []Spec{want("i-1", "alpha", 1), want("i-1", "beta", 2), want("i-2", "beta", 1)} {
			if err := d.apply(s); err != nil {
				t.Fatal(err)
			}
		}
		r.a.set(instance.Status{ID: "i-1", State: instance.Running, Generation: 1})
		r.a.fault(func(f *fake) { f.broken = errors.New("it starts slowly") })
		stop := r.start(t, file)
		defer func() { stop() }()
		time.Sleep(time.Minute)
		if r.b.get("i-1").ID != "" {
			t.Error("beta runs it, and alpha may")
		}
		if r.b.get("i-2").State != instance.Running {
			t.Error("what did not move is held up")
		}
		r.a.fault(func(f *fake) { f.broken = nil })
		time.Sleep(5 * time.Minute)
		if len(r.a.all()) != 0 || r.b.get("i-1").Generation != 2 {
			t.Errorf("alpha has %v, beta %v, want it in beta alone", r.a.all(), r.b.all())
		}
		// It is on record that it left, and alpha matters no more.
		stop()
		r.b.fault(func(f *fake) { clear(f.have) })
		r.a.fault(func(f *fake) { f.broken = errors.New("it is away") })
		stop = r.start(t, file)
		time.Sleep(time.Minute)
		if r.b.get("i-1").State != instance.Running {
			t.Errorf("beta has %v, want it running", r.b.all())
		}
	})
}

// What a runtime is still making counts as its own.
func TestAMoveWaitsForWhatIsAtWork(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig, file string) {
		slow := make(chan struct{})
		r.a.slow = map[string]chan struct{}{"i-1": slow}
		stop := r.start(t, file)
		defer stop()
		var wg sync.WaitGroup
		defer wg.Wait()
		wg.Go(func() { _, _ = r.Apply(t.Context(), want("i-1", "alpha", 1)) })
		synctest.Wait()
		wg.Go(func() {
			if _, err := r.Apply(t.Context(), want("i-1", "beta", 2)); err != nil {
				t.Error(err)
			}
		})
		time.Sleep(time.Minute)
		if r.b.get("i-1").ID != "" {
			t.Error("beta runs it while alpha makes it")
		}
		close(slow)
		time.Sleep(time.Minute)
		if len(r.a.all()) != 0 || r.b.get("i-1").Generation != 2 {
			t.Errorf("alpha has %v, beta %v", r.a.all(), r.b.all())
		}
	})
}
