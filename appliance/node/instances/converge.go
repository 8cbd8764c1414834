// Package instances makes what runs on a node what its gateway wants: it keeps
// the wanted instances on disk, compares them with what each runtime lists, and
// applies or removes until both agree.
package instances

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/instance"
)

// Runtime runs instances. Its calls may come from several goroutines, for
// different instances.
type Runtime interface {
	List(ctx context.Context) ([]instance.Status, error)
	Apply(ctx context.Context, s instance.Spec) error
	Remove(ctx context.Context, id string) error
}

// notifier is a runtime that tells when something ended by itself.
type notifier interface{ Changed() <-chan struct{} }

// StateEvent is the event that tells an instance's state; its key is the
// instance, its body a Status.
const StateEvent = "instance.state"

// Config is what a Converger works with.
type Config struct {
	// File keeps what is wanted.
	File string
	// Runtimes by driver id.
	Runtimes map[string]Runtime
	// Emit keeps an event for the gateway; nil: nobody hears.
	Emit func(name, class, key string, body any) error
	// Every is how often a runtime is looked at without a reason; 0: 5 s.
	Every time.Duration
	// Backoff spaces the attempts at one instance; zero: 1 s to 1 min.
	Backoff backoff.Policy
	Log     *slog.Logger
}

const (
	// parallel bounds what one runtime does at a time.
	parallel = 8
	// listWithin and changeWithin bound one call of a runtime.
	listWithin   = time.Minute
	changeWithin = 10 * time.Minute
	// steady is how long an instance runs until its next end counts as the first.
	steady = time.Minute
	// maxObserved bounds what is taken of a runtime's list.
	maxObserved = 4 * MaxInstances
	maxMessage  = 2 << 10
)

// Converger is safe for concurrent use. Run does the work.
type Converger struct {
	c       Config
	workers map[string]*worker

	mu      sync.Mutex
	desired *desired
	current map[string]map[string]Status // by runtime and instance
	told    map[string]Status            // by instance, as the gateway was told
	holds   map[string]map[string]bool   // by runtime: what it listed last
	looked  map[string]uint64            // the generation that an attempt was made at
	moved   chan struct{}                // closed and replaced whenever a pass ended
}

// worker is one runtime's. Its fields are its goroutine's, but for the channels.
type worker struct {
	name    string
	runtime Runtime
	kick    chan struct{}
	ended   chan ending // of capacity parallel: who ends never waits
	busy    map[string]bool
	tries   map[string]*try
	trouble map[string]string
	fails   int // lists in a row that failed
}

// ending is an action that is over.
type ending struct {
	action
	err error
}

// try is how an instance's attempts went.
type try struct {
	generation uint64
	n          int
	next       time.Time
	running    time.Time // since when it runs; zero: it does not
}

// Open reads what is wanted.
func Open(c Config) (*Converger, error) {
	if c.Every == 0 {
		c.Every = 5 * time.Second
	}
	if c.Backoff.Min == 0 {
		c.Backoff.Min, c.Backoff.Max = time.Second, time.Minute
	}
	d, damaged, err := openDesired(c.File)
	if err != nil {
		return nil, err
	}
	if damaged != nil {
		c.Log.Error("the list of wanted instances is damaged: it is set aside, and what runs is reported as orphan until the gateway asks for it again", "reason", damaged.Error())
	}
	v := &Converger{
		c: c, workers: map[string]*worker{}, desired: d, current: map[string]map[string]Status{},
		told: map[string]Status{}, holds: map[string]map[string]bool{}, looked: map[string]uint64{}, moved: make(chan struct{}),
	}
	for name, r := range c.Runtimes {
		v.workers[name] = &worker{name: name, runtime: r, kick: make(chan struct{}, 1), ended: make(chan ending, parallel), busy: map[string]bool{}, tries: map[string]*try{}, trouble: map[string]string{}}
	}
	return v, nil
}

// Capabilities are what Hello says of the runtimes: instance.<id>, sorted.
func (v *Converger) Capabilities() []string {
	var all []string
	for name := range v.workers {
		all = append(all, "instance."+name)
	}
	slices.Sort(all)
	return all
}

// Run converges until ctx ends; what runs stays running.
func (v *Converger) Run(ctx context.Context) error {
	v.strand()
	var wg sync.WaitGroup
	for _, w := range v.workers {
		wg.Go(func() { v.work(ctx, w) })
	}
	wg.Wait()
	return ctx.Err()
}

// strand tells of wanted instances whose runtime this node does not have any more.
func (v *Converger) strand() {
	v.mu.Lock()
	byRuntime := map[string]map[string]Status{}
	for id, e := range v.desired.entries {
		if v.workers[e.Runtime] != nil {
			continue
		}
		if byRuntime[e.Runtime] == nil {
			byRuntime[e.Runtime] = map[string]Status{}
		}
		byRuntime[e.Runtime][id] = Status{ID: id, Runtime: e.Runtime, State: instance.Failed, Generation: e.Generation,
			Message: "this node has no runtime " + e.Runtime + " now"}
	}
	v.mu.Unlock()
	for name, all := range byRuntime {
		v.publish(name, all, nil)
	}
}

func (v *Converger) work(ctx context.Context, w *worker) {
	var changed <-chan struct{}
	if n, ok := w.runtime.(notifier); ok {
		changed = n.Changed()
	}
	// One slow instance, such as a large image on a thin line, holds up no other.
	var wg sync.WaitGroup
	defer wg.Wait()
	for ctx.Err() == nil {
		timer := time.NewTimer(v.pass(ctx, w, &wg))
		select {
		case <-ctx.Done():
		case <-w.kick:
		case <-changed:
		case <-timer.C:
		case e := <-w.ended:
			w.note(e, v.c.Backoff, v.c.Log)
		}
		timer.Stop()
		for len(w.ended) > 0 {
			w.note(<-w.ended, v.c.Backoff, v.c.Log)
		}
	}
}

// pass compares once, begins what is due, and says when to look again.
func (v *Converger) pass(ctx context.Context, w *worker, wg *sync.WaitGroup) time.Duration {
	observed, err := w.list(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return 0
		}
		v.c.Log.Error("a runtime does not list its instances", "runtime", w.name, "err", err)
		w.fails++
		v.unseen(w, err)
		return v.c.Backoff.Delay(w.fails - 1)
	}
	w.fails = 0
	v.mu.Lock()
	d := v.desired.clone()
	v.mu.Unlock()
	now, wait := time.Now(), v.c.Every
	w.settle(d, observed, now)
	open := map[string]bool{} // what no attempt was made at yet
	for _, a := range plan(w.name, d, observed) {
		t := w.tries[a.id]
		fresh := t == nil || t.generation != a.generation
		open[a.id] = fresh
		switch {
		case w.busy[a.id] || !a.remove && (v.heldElsewhere(w.name, a.id) || v.leaves(d.entries[a.id])):
			// Its end wakes this worker. One that moves is let go by the other
			// runtime first, which wakes this one then.
		case !fresh && now.Before(t.next):
			wait = min(wait, t.next.Sub(now)+time.Millisecond)
		case len(w.busy) < parallel:
			w.begin(ctx, a, wg)
		}
	}
	v.conclude(w, d, observed, open)
	return wait
}

// begin starts one action.
func (w *worker) begin(ctx context.Context, a action, wg *sync.WaitGroup) {
	w.busy[a.id] = true
	wg.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, changeWithin)
		defer cancel()
		var err error
		if a.remove {
			err = w.runtime.Remove(ctx, a.id)
		} else {
			err = w.runtime.Apply(ctx, a.spec)
		}
		w.ended <- ending{a, err}
	})
}

// note records how an attempt went.
func (w *worker) note(e ending, policy backoff.Policy, log *slog.Logger) {
	delete(w.busy, e.id)
	t := w.tries[e.id]
	if t == nil || t.generation != e.generation {
		t = &try{generation: e.generation}
		w.tries[e.id] = t
	}
	t.next = time.Now().Add(policy.Delay(t.n))
	t.n++
	t.running = time.Time{}
	delete(w.trouble, e.id)
	if e.err != nil {
		w.trouble[e.id] = clip(e.err.Error())
		log.Warn("an instance is not as wanted", "runtime", w.name, "instance", e.id, "remove", e.remove, "generation", e.generation, "attempt", t.n, "err", e.err)
	}
}

func clip(s string) string { return strings.ToValidUTF8(s[:min(len(s), maxMessage)], "") }

// list asks the runtime, within bounds.
func (w *worker) list(ctx context.Context) ([]instance.Status, error) {
	ctx, cancel := context.WithTimeout(ctx, listWithin)
	defer cancel()
	observed, err := w.runtime.List(ctx)
	if err != nil {
		return nil, err
	}
	if len(observed) > maxObserved {
		return nil, errs.New(errs.DriverError, "the runtime lists %d instances, limit %d", len(observed), maxObserved)
	}
	for _, o := range observed {
		if !idForm.MatchString(o.ID) {
			return nil, errs.New(errs.DriverError, "the runtime lists an instance %.80q, which is no id", o.ID)
		}
	}
	return observed, nil
}

// settle forgets attempts that do not matter any more: of instances that run
// well for a while, of older generations, and of what is not there.
func (w *worker) settle(d *desired, observed []instance.Status, now time.Time) {
	there := map[string]instance.Status{}
	for _, o := range observed {
		there[o.ID] = o
	}
	for id, t := range w.tries {
		o, seen := there[id]
		e, known := d.entries[id]
		switch {
		case !seen && !known, known && e.Generation != t.generation:
			delete(w.tries, id)
			delete(w.trouble, id)
		case seen && o.State == instance.Running && o.Generation == t.generation:
			if t.running.IsZero() {
				t.running = now
			}
			if now.Sub(t.running) >= steady {
				t.n = 0
			}
		default:
			if !t.running.IsZero() && now.Sub(t.running) >= steady {
				t.n, t.next = 0, now
			}
			t.running = time.Time{}
		}
	}
}

// heldElsewhere reports whether another runtime still has an instance.
func (v *Converger) heldElsewhere(runtime, id string) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	for other, held := range v.holds {
		if other != runtime && held[id] {
			return true
		}
	}
	return false
}

// leaves reports whether a runtime that an instance moved away from may still
// have it: after a restart, say, none was looked at yet.
func (v *Converger) leaves(e entry) bool {
	return slices.ContainsFunc(e.Left, func(name string) bool { return v.workers[name] != nil })
}

// letGo notes which instances have left a runtime for good: a pass that began
// after they moved away found neither them nor anything at work on them. The
// caller holds mu.
func (v *Converger) letGo(w *worker, d *desired, there map[string]bool) {
	var left []string
	for id, e := range d.entries {
		now := v.desired.entries[id]
		if slices.Contains(e.Left, w.name) && slices.Contains(now.Left, w.name) && e.Generation == now.Generation && !there[id] && !w.busy[id] {
			left = append(left, id)
		}
	}
	if len(left) == 0 {
		return
	}
	if err := v.desired.let(w.name, left); err != nil {
		v.c.Log.Error("it is not recorded that instances left a runtime", "runtime", w.name, "err", err)
		return
	}
	for _, id := range left {
		v.wake(v.desired.entries[id].Runtime)
	}
}

// conclude notes what a pass found: removals that are done, states that changed.
// open holds what is to be done, and whether no attempt was made at it yet.
func (v *Converger) conclude(w *worker, d *desired, observed []instance.Status, open map[string]bool) {
	there := map[string]bool{}
	for _, o := range observed {
		there[o.ID] = true
	}
	v.mu.Lock()
	for id := range v.holds[w.name] {
		if e := v.desired.entries[id]; !there[id] && e.Runtime != w.name {
			v.wake(e.Runtime)
		}
	}
	v.holds[w.name] = there
	v.letGo(w, d, there)
	looked := map[string]uint64{}
	for id, e := range d.entries {
		if e.Runtime != w.name {
			continue
		}
		if !open[id] && !w.busy[id] {
			looked[id] = e.Generation
		}
		newer := slices.ContainsFunc(observed, func(o instance.Status) bool { return o.ID == id && o.Generation > e.Generation })
		if e.Removing && (!there[id] || newer) {
			if err := v.desired.gone(id, e.Generation); err != nil {
				v.c.Log.Error("a removal is not recorded as done", "instance", id, "err", err)
				continue
			}
			delete(looked, id)
			delete(v.looked, id)
			// It is told as removed even where this process never saw it.
			if v.current[w.name] == nil {
				v.current[w.name] = map[string]Status{}
			}
			v.current[w.name][id] = Status{ID: id, Runtime: w.name, State: removing, Generation: e.Generation}
		}
	}
	// As it is now, not as it was when the pass began: what was asked meanwhile
	// shows as pending.
	all := map[string]Status{}
	for _, s := range statuses(w.name, v.desired, observed, w.trouble) {
		all[s.ID] = s
	}
	v.mu.Unlock()
	v.publish(w.name, all, looked)
}

// unseen notes that a runtime did not answer: nobody knows what runs.
func (v *Converger) unseen(w *worker, err error) {
	v.mu.Lock()
	all := maps.Clone(v.current[w.name])
	if all == nil {
		all = map[string]Status{}
	}
	looked := map[string]uint64{}
	for id, e := range v.desired.entries {
		if e.Runtime != w.name {
			continue
		}
		s, known := all[id]
		if !known || s.Generation != e.Generation {
			s = Status{ID: id, Runtime: w.name, State: instance.Pending, Generation: e.Generation}
		}
		if e.Removing {
			s.State = removing
		}
		s.Message = clip("the runtime does not answer: " + err.Error())
		all[id] = s
		looked[id] = e.Generation
	}
	v.mu.Unlock()
	v.publish(w.name, all, looked)
}

// publish makes all the runtime's statuses, tells the gateway what changed, and
// wakes who waits for the generations that were looked at.
func (v *Converger) publish(runtime string, all map[string]Status, looked map[string]uint64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for id, generation := range looked {
		v.looked[id] = max(v.looked[id], generation)
	}
	before := v.current[runtime]
	v.current[runtime] = all
	for id, s := range all {
		if v.told[id] != s {
			v.tell(s)
		}
	}
	for id, s := range before {
		if _, still := all[id]; still || v.elsewhere(runtime, id) {
			continue
		}
		if e, wanted := v.desired.entries[id]; wanted && e.Runtime != runtime {
			continue // it moves
		}
		v.tell(Status{ID: id, Runtime: s.Runtime, State: removed, Generation: max(s.Generation, v.desired.grave(id)), Orphan: s.Orphan})
		delete(v.told, id)
	}
	close(v.moved)
	v.moved = make(chan struct{})
}

func (v *Converger) elsewhere(runtime, id string) bool {
	for other, all := range v.current {
		if _, there := all[id]; there && other != runtime {
			return true
		}
	}
	return false
}

// tell keeps an event. The caller holds mu.
func (v *Converger) tell(s Status) {
	v.told[s.ID] = s
	if v.c.Emit == nil {
		return
	}
	if err := v.c.Emit(StateEvent, "state", s.ID, s); err != nil {
		delete(v.told, s.ID) // the next pass tells again
		v.c.Log.Error("event not kept", "event", StateEvent, "instance", s.ID, "err", err)
	}
}

// Apply keeps what is wanted and waits for the first attempt at it, whose
// outcome it answers. A failed attempt is no error: it goes on.
func (v *Converger) Apply(ctx context.Context, s Spec) (Status, error) {
	if err := s.check(); err != nil {
		return Status{}, err
	}
	w := v.workers[s.Runtime]
	if w == nil {
		return Status{}, errs.New(errs.UnsupportedDriver, "this node has no runtime %s; it has %v", s.Runtime, slices.Sorted(maps.Keys(v.workers)))
	}
	v.mu.Lock()
	before := v.desired.entries[s.ID].Runtime
	err := v.desired.apply(s)
	v.mu.Unlock()
	if err != nil {
		return Status{}, err
	}
	v.wake(s.Runtime)
	if before != s.Runtime {
		v.wake(before)
	}
	for {
		v.mu.Lock()
		moved, seen := v.moved, v.looked[s.ID] >= s.Generation
		status, known := v.current[s.Runtime][s.ID]
		e, wanted := v.desired.entries[s.ID]
		v.mu.Unlock()
		switch {
		case !wanted || e.Generation > s.Generation:
			return Status{}, errs.New(errs.OperationNotAllowed, "instance %s was changed again meanwhile", s.ID)
		case seen && known && status.Generation == s.Generation:
			return status, nil
		}
		select {
		case <-ctx.Done():
			return Status{}, fmt.Errorf("apply instance %s: %w", s.ID, ctx.Err())
		case <-moved:
		}
	}
}

// Remove has an instance removed and waits for the first attempt: gone is true
// once nothing of it is left.
func (v *Converger) Remove(ctx context.Context, id string, generation uint64) (s Status, gone bool, err error) {
	if !idForm.MatchString(id) || generation == 0 {
		return Status{}, false, errs.New(errs.InvalidArgs, "instance %.80q, generation %d: want an id, and a generation from 1", id, generation)
	}
	v.mu.Lock()
	err = v.desired.remove(id, generation)
	name := v.desired.entries[id].Runtime
	if err == nil && name != "" && v.workers[name] == nil {
		err = errs.Retry(errs.UnsupportedDriver, "this node has no runtime %s now, which ran instance %s", name, id)
	}
	v.mu.Unlock()
	if err != nil {
		return Status{}, false, err
	}
	// An instance that is not wanted may still run somewhere.
	for other := range v.workers {
		v.wake(other)
	}
	for {
		v.mu.Lock()
		moved, seen := v.moved, v.looked[id] >= generation
		_, wanted := v.desired.entries[id]
		status, known := v.current[name][id]
		left, lists := v.listed(id, generation)
		v.mu.Unlock()
		switch {
		case !wanted && !lists:
			return Status{}, true, nil
		case !wanted && left.State == removing && left.Message != "":
			return left, false, nil
		case wanted && seen && known && status.Generation == generation:
			return status, false, nil
		}
		select {
		case <-ctx.Done():
			return Status{}, false, fmt.Errorf("remove instance %s: %w", id, ctx.Err())
		case <-moved:
		}
	}
}

// listed finds what a runtime still has of an instance up to a generation. The
// caller holds mu.
func (v *Converger) listed(id string, generation uint64) (Status, bool) {
	for _, all := range v.current {
		if s, there := all[id]; there && s.Generation <= generation {
			return s, true
		}
	}
	return Status{}, false
}

func (v *Converger) wake(runtime string) {
	w := v.workers[runtime]
	if w == nil {
		return
	}
	select {
	case w.kick <- struct{}{}:
	default:
	}
}

// List is what is known of every instance, orphans too.
func (v *Converger) List() []Status {
	v.mu.Lock()
	defer v.mu.Unlock()
	var all []Status
	for _, byID := range v.current {
		for _, s := range byID {
			all = append(all, s)
		}
	}
	for id, e := range v.desired.entries {
		if _, known := v.current[e.Runtime][id]; !known {
			all = append(all, Status{ID: id, Runtime: e.Runtime, State: instance.Pending, Generation: e.Generation})
		}
	}
	slices.SortFunc(all, func(a, b Status) int { return slices.Compare([]string{a.ID, a.Runtime}, []string{b.ID, b.Runtime}) })
	return all
}
