// Package process is the runtime that every node has: an instance is one
// supervised process with a session, and where cgroup v2 is there a group, of
// its own. What runs outlives the agent, whose next start takes it up again.
package process

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/procstat"
	"github.com/better-compute/site-appliance/plugins/instance"
)

// Options are what a Runtime needs.
type Options struct {
	// Dir keeps records and outputs.
	Dir string
	// Cgroup is a cgroup v2 folder that is this runtime's alone; empty: none, and
	// processes are held together by session and mark.
	Cgroup string
	// Gate is the argv prefix of a program that calls GateMain with the words
	// behind it, such as {"/proc/self/exe", "instance-gate"}.
	Gate []string
	// BootID tells boots apart; empty: the kernel's.
	BootID string
	Log    *slog.Logger
}

const (
	// maxOutput is the size at which an output is cut to its last part.
	maxOutput  = 4 << 20
	keepOutput = 1 << 20
	// killWithin is how long a killed process may take to go.
	killWithin = 10 * time.Second
)

// Runtime is safe for concurrent use; calls for one instance follow each other.
type Runtime struct {
	o        Options
	lock     *os.File
	changed  chan struct{}
	watchers sync.WaitGroup

	mu     sync.Mutex
	procs  map[string]*proc
	closed bool
}

// proc is one instance.
type proc struct {
	work sync.Mutex // held while it is started or stopped

	mu   sync.Mutex
	rec  record
	stop time.Duration
	// pidfd and done are the run's at hand; done is closed once its end is recorded.
	pidfd *os.File
	done  chan struct{}
}

// Open takes up what an earlier agent started. Close must be called.
func Open(o Options) (*Runtime, error) {
	if o.BootID == "" {
		data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
		if err != nil {
			return nil, fmt.Errorf("open process runtime: %w", err)
		}
		o.BootID = strings.TrimSpace(string(data))
	}
	if len(o.Gate) == 0 {
		return nil, errors.New("open process runtime: no gate is set")
	}
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("open process runtime: %w", err)
	}
	if o.Cgroup != "" {
		if err := prepareCgroup(o.Cgroup); err != nil {
			o.Log.Warn("instances run without cgroups of their own: limits are refused", "reason", err.Error())
			o.Cgroup = ""
		}
	}
	r := &Runtime{o: o, changed: make(chan struct{}, 1), procs: map[string]*proc{}}
	// Two agents would each start what the other one runs.
	var err error
	if r.lock, err = os.Open(o.Dir); err != nil {
		return nil, fmt.Errorf("open process runtime: %w", err)
	}
	if err := lock(r.lock); err != nil {
		return nil, errors.Join(fmt.Errorf("open process runtime: another agent uses %s: %w", o.Dir, err), r.lock.Close())
	}
	all, err := r.records()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open process runtime: %w", err), r.lock.Close())
	}
	for _, rec := range all {
		p := &proc{rec: rec}
		r.procs[rec.Spec.ID] = p
		if rec.Run != nil {
			r.adopt(p)
		}
	}
	r.sweepGroups()
	return r, nil
}

// lock waits a moment: a child that a killed agent had forked holds its lock
// until it comes to its program.
func lock(f *os.File) error {
	var err error
	for range 100 {
		if err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
	return err
}

// adopt takes hold of the run in p's record, or notes that it is over.
func (r *Runtime) adopt(p *proc) {
	at := *p.rec.Run
	log := r.o.Log.With("instance", p.rec.Spec.ID, "pid", at.PID)
	f, err := at.open(r.o.BootID)
	if err == nil {
		log.Info("instance runs on under this agent")
		p.pidfd, p.done = f, make(chan struct{})
		r.watchers.Go(func() { r.watch(p, f, at, p.done) })
		return
	}
	how := ended{}
	switch {
	case at.Boot != r.o.BootID:
		how.Reason = "the machine restarted"
	case !errors.Is(err, errGone):
		how.Reason = err.Error()
	}
	log.Info("instance ended while no agent looked", "how", how.String())
	r.finish(p, at, how)
}

// watch owns one run until it ends or the runtime is closed.
func (r *Runtime) watch(p *proc, f *os.File, at run, done chan struct{}) {
	if err := awaitExit(f); err != nil {
		return // closed: the process stays, for the next agent
	}
	r.finish(p, at, reap(at.PID))
	f.Close()
	close(done)
	r.nudge()
}

// reap takes the status of a child. Its number still means it: nobody else waits
// for children of this process. What an earlier agent started is no child.
func reap(pid int) ended {
	var ws unix.WaitStatus
	for {
		got, err := unix.Wait4(pid, &ws, unix.WNOHANG, nil)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil || got != pid:
			return ended{}
		case ws.Signaled():
			return ended{Known: true, Signal: unix.SignalName(ws.Signal())}
		}
		return ended{Known: true, Code: ws.ExitStatus()}
	}
}

// finish records a run's end, after whatever it left behind is gone.
func (r *Runtime) finish(p *proc, at run, how ended) {
	log := r.o.Log.With("instance", p.rec.Spec.ID)
	how.OutOfMemory = at.Cgroup != "" && outOfMemory(at.Cgroup)
	if err := r.clear(at); err != nil {
		log.Error("something of an ended instance is left", "err", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rec.Run, p.rec.Ended, p.pidfd = nil, &how, nil
	if err := r.save(p.rec); err != nil {
		// The next agent finds the process gone, and says so less well.
		log.Error("an instance's end is not recorded", "err", err)
	}
}

// clear kills what a run left behind.
func (r *Runtime) clear(at run) error {
	if at.Cgroup != "" {
		return killGroup(at.Cgroup)
	}
	if at.Boot != r.o.BootID {
		return nil
	}
	return sweep(at.Mark)
}

// Changed fires when an instance ended by itself.
func (r *Runtime) Changed() <-chan struct{} { return r.changed }

func (r *Runtime) nudge() {
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

// Close leaves what runs running, and lets go of it.
func (r *Runtime) Close() error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return nil
	}
	r.closed = true
	procs := make([]*proc, 0, len(r.procs))
	for _, p := range r.procs {
		procs = append(procs, p)
	}
	r.mu.Unlock()
	for _, p := range procs {
		p.work.Lock()
		p.mu.Lock()
		if p.pidfd != nil {
			p.pidfd.Close()
		}
		p.mu.Unlock()
		p.work.Unlock()
	}
	r.watchers.Wait()
	if r.o.Cgroup != "" {
		_ = os.Remove(r.o.Cgroup) // which only an empty one lets happen
	}
	return r.lock.Close()
}

// find gives an instance, made on request.
func (r *Runtime) find(id string, create bool) (*proc, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, errs.Retry(errs.Unavailable, "the process runtime is closed")
	}
	p := r.procs[id]
	if p == nil && create {
		p = &proc{}
		r.procs[id] = p
	}
	return p, nil
}

// hold gives an instance with its work locked: none that was removed, or let go
// of at the end, while that lock was waited for.
func (r *Runtime) hold(id string, create bool) (*proc, error) {
	for {
		p, err := r.find(id, create)
		if p == nil || err != nil {
			return nil, err
		}
		p.work.Lock()
		now, err := r.find(id, false)
		if now == p && err == nil {
			return p, nil
		}
		p.work.Unlock()
		if err != nil {
			return nil, err
		}
	}
}

// dropEmpty forgets an instance of which nothing is here. The caller holds its work.
func (r *Runtime) dropEmpty(id string, p *proc) {
	if p.record().Spec.ID != "" {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.procs, id)
}

// List tells every instance of this runtime, and groups in its cgroup folder
// that no record explains.
func (r *Runtime) List(context.Context) ([]instance.Status, error) {
	r.mu.Lock()
	procs := make([]*proc, 0, len(r.procs))
	for _, p := range r.procs {
		procs = append(procs, p)
	}
	r.mu.Unlock()
	var all []instance.Status
	known := map[string]bool{}
	for _, p := range procs {
		s, group, ok := p.status()
		if !ok {
			continue
		}
		known[group] = true
		r.trim(s.ID)
		all = append(all, s)
	}
	for _, g := range r.groups() {
		if !known[g.path] && populated(g.path) && !slices.ContainsFunc(all, func(s instance.Status) bool { return s.ID == g.id }) {
			all = append(all, instance.Status{ID: g.id, State: instance.Running, Message: "it runs in a group of this node's, which has no record of it"})
		}
	}
	slices.SortFunc(all, func(a, b instance.Status) int { return strings.Compare(a.ID, b.ID) })
	return all, nil
}

func (p *proc) status() (s instance.Status, group string, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	spec := p.rec.Spec
	if spec.ID == "" {
		return s, "", false // being made
	}
	s = instance.Status{ID: spec.ID, Generation: spec.Generation, State: instance.Pending}
	switch {
	case p.rec.Run != nil:
		s.State, group = instance.Running, p.rec.Run.Cgroup
	case p.rec.Ended != nil:
		restart := always
		if c, err := ParseConfig(spec.Config); err == nil {
			restart = c.Restart
		}
		s.State, s.Message = p.rec.Ended.state(restart), p.rec.Ended.String()
	}
	return s, group, true
}

// group is one run's cgroup.
type group struct{ id, path string }

// groups are those that there are, "<id>.<mark>".
func (r *Runtime) groups() []group {
	if r.o.Cgroup == "" {
		return nil
	}
	dirs, err := os.ReadDir(r.o.Cgroup)
	if err != nil {
		r.o.Log.Warn("cgroups cannot be listed", "err", err)
	}
	var all []group
	for _, d := range dirs {
		if id, _, ok := strings.Cut(d.Name(), "."); ok && d.IsDir() && idForm.MatchString(id) {
			all = append(all, group{id, filepath.Join(r.o.Cgroup, d.Name())})
		}
	}
	return all
}

// sweepGroups removes groups in which nothing lives: an agent that was killed
// while it started something left them.
func (r *Runtime) sweepGroups() {
	used := map[string]bool{}
	for _, p := range r.procs {
		if at := p.record().Run; at != nil {
			used[at.Cgroup] = true
		}
	}
	for _, g := range r.groups() {
		if !used[g.path] && !populated(g.path) {
			if err := removeGroup(g.path); err != nil {
				r.o.Log.Warn("an empty cgroup is left", "cgroup", g.path, "err", err)
			}
		}
	}
}

// Apply makes one generation run: it starts what does not run, replaces an
// older generation, and does nothing where all is as it should be.
func (r *Runtime) Apply(ctx context.Context, s instance.Spec) error {
	if !idForm.MatchString(s.ID) || s.Generation == 0 {
		return errs.New(errs.InvalidArgs, "process: an instance needs an id and a generation")
	}
	c, err := ParseConfig(s.Config)
	if err != nil {
		return err
	}
	credential, err := c.credential(os.Geteuid())
	if err != nil {
		return err
	}
	// What can be found wrong is, before an older generation ends for this one.
	if err := c.runnable(); err != nil {
		return err
	}
	if err := c.Limits.enable(r.o.Cgroup); err != nil {
		return err
	}
	p, err := r.hold(s.ID, true)
	if err != nil {
		return err
	}
	defer p.work.Unlock()
	defer r.dropEmpty(s.ID, p)
	have := p.record()
	switch {
	case have.Spec.Generation > s.Generation:
		return errs.New(errs.OperationNotAllowed, "process: generation %d is older than %d, which is here", s.Generation, have.Spec.Generation)
	case have.Spec.Generation == s.Generation && have.Run != nil:
		return nil
	case have.Spec.Generation == s.Generation && have.Ended != nil && have.Ended.state(c.Restart) == instance.Stopped:
		return nil
	}
	if err := r.halt(ctx, p); err != nil {
		return err
	}
	// A run whose record was lost is older than what is to run now.
	if err := r.killGroups(s.ID); err != nil {
		return err
	}
	if err := r.start(p, s, c, credential); err != nil {
		if p.record().Spec.ID == "" {
			// Nobody hears of it, so nobody would have it removed.
			err = errors.Join(err, r.forget(s.ID))
		}
		return err
	}
	return nil
}

func (p *proc) record() record {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.rec
}

// runnable looks at what is to be run, and where.
func (c Config) runnable() error {
	st, err := os.Stat(c.Argv[0])
	if err != nil {
		return errs.New(errs.InvalidConfig, "process: %v", err)
	}
	if !st.Mode().IsRegular() || st.Mode().Perm()&0o111 == 0 {
		return errs.New(errs.InvalidConfig, "process: %s is no program", c.Argv[0])
	}
	if st, err = os.Stat(c.Dir); err != nil {
		return errs.New(errs.InvalidConfig, "process: dir: %v", err)
	}
	if !st.IsDir() {
		return errs.New(errs.InvalidConfig, "process: dir %s is no folder", c.Dir)
	}
	return nil
}

// start runs a generation. The caller holds p.work, and nothing of it runs.
func (r *Runtime) start(p *proc, s instance.Spec, c Config, credential *syscall.Credential) (err error) {
	stop, err := c.stopTimeout()
	if err != nil {
		return err
	}
	var raw [8]byte
	rand.Read(raw[:])
	at := run{Mark: hex.EncodeToString(raw[:])}
	if at.Cgroup, err = makeGroup(r.o.Cgroup, s.ID+"."+at.Mark, c.Limits); err != nil {
		return err
	}
	started := false
	defer func() {
		if !started {
			err = errors.Join(err, killGroup(at.Cgroup))
		}
	}()
	gate, open, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("start instance: %w", err)
	}
	defer gate.Close()
	defer open.Close() // without a word: the gate gives up
	cmd, pidfd, err := r.spawn(s.ID, at, c, credential, gate)
	if err != nil {
		return err
	}
	pid := cmd.Process.Pid
	_ = cmd.Process.Release() // the watcher waits for it, by descriptor
	f := os.NewFile(uintptr(pidfd), "pidfd")
	giveUp := func(err error) error {
		open.Close()
		if werr := awaitExit(f); werr == nil {
			reap(pid)
		}
		return errors.Join(err, f.Close())
	}
	st, err := procstat.Read(pid)
	if err != nil {
		return giveUp(fmt.Errorf("start instance: %w", err))
	}
	at.identity = identity{PID: pid, Start: st.Start, Boot: r.o.BootID}
	if err := r.save(record{Spec: s, Run: &at}); err != nil {
		return giveUp(err)
	}
	if _, err := open.Write([]byte{1}); err != nil {
		err = fmt.Errorf("start instance: %w", err)
		if before := p.record(); before.Spec.ID != "" {
			err = errors.Join(err, r.save(before)) // as it is in memory, and tried again
		}
		return giveUp(err)
	}
	started = true
	done := make(chan struct{})
	p.mu.Lock()
	p.rec, p.stop, p.pidfd, p.done = record{Spec: s, Run: &at}, stop, f, done
	p.mu.Unlock()
	r.watchers.Go(func() { r.watch(p, f, at, done) })
	r.o.Log.Info("instance starts", "instance", s.ID, "generation", s.Generation, "pid", pid)
	return nil
}

// spawn starts the gate in front of the program.
func (r *Runtime) spawn(id string, at run, c Config, credential *syscall.Credential, gate *os.File) (*exec.Cmd, int, error) {
	out, err := os.OpenFile(r.outputPath(id), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, 0, fmt.Errorf("start instance: %w", err)
	}
	defer out.Close()
	argv := append(slices.Clone(r.o.Gate), c.Argv...)
	pidfd := -1
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env, cmd.Dir, cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = c.environment(id, at.Mark), c.Dir, out, out, []*os.File{gate}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: credential, PidFD: &pidfd}
	if at.Cgroup != "" {
		group, err := os.Open(at.Cgroup)
		if err != nil {
			return nil, 0, fmt.Errorf("open cgroup: %w", err)
		}
		defer group.Close()
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(group.Fd())
	}
	if err := cmd.Start(); err != nil {
		return nil, 0, fmt.Errorf("start instance: %w", err)
	}
	if pidfd < 0 {
		err := errs.New(errs.UnsupportedOperation, "process: this kernel has no process descriptors")
		return nil, 0, errors.Join(err, cmd.Process.Kill(), cmd.Wait())
	}
	if err := unix.SetNonblock(pidfd, true); err != nil {
		return nil, 0, errors.Join(fmt.Errorf("start instance: %w", err), cmd.Process.Kill(), cmd.Wait())
	}
	return cmd, pidfd, nil
}

// halt ends the run at hand, if there is one: SIGTERM, the instance's time for
// it, then the end of everything in it. The caller holds p.work.
func (r *Runtime) halt(ctx context.Context, p *proc) error {
	p.mu.Lock()
	f, done, stop, at := p.pidfd, p.done, p.stop, p.rec.Run
	if stop == 0 {
		stop = defaultStop
		if c, err := ParseConfig(p.rec.Spec.Config); err == nil {
			stop, _ = c.stopTimeout()
		}
	}
	p.mu.Unlock()
	if at == nil {
		return nil
	}
	// Closed: its end is on record, and done follows.
	if err := signalGroup(f, unix.SIGTERM); err != nil && !errors.Is(err, os.ErrClosed) {
		return fmt.Errorf("stop instance: %w", err)
	}
	grace := time.NewTimer(stop)
	defer grace.Stop()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("stop instance: %w", ctx.Err())
	case <-grace.C:
	}
	// The group first: what is left must not start anew what is killed.
	var kill error
	if at.Cgroup != "" {
		kill = control(at.Cgroup, "cgroup.kill", "1")
	} else {
		kill = signalGroup(f, unix.SIGKILL)
	}
	if errors.Is(kill, fs.ErrNotExist) || errors.Is(kill, os.ErrClosed) {
		kill = nil // it ended meanwhile
	}
	if kill != nil {
		return fmt.Errorf("kill instance: %w", kill)
	}
	last := time.NewTimer(killWithin)
	defer last.Stop()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("stop instance: %w", ctx.Err())
	case <-last.C:
		return errs.Retry(errs.Timeout, "process: instance %s does not end, not even when it is killed", p.rec.Spec.ID)
	}
}

// Remove stops an instance and forgets it. One that is not there is fine.
func (r *Runtime) Remove(ctx context.Context, id string) error {
	if !idForm.MatchString(id) {
		return errs.New(errs.InvalidArgs, "process: %.80q is no instance's id", id)
	}
	// Made where there is none, so that no apply comes between.
	p, err := r.hold(id, true)
	if err != nil {
		return err
	}
	defer p.work.Unlock()
	defer r.dropEmpty(id, p)
	if err := r.halt(ctx, p); err != nil {
		return err
	}
	// A group without a record has nothing but its cgroup to be stopped by.
	if err := r.killGroups(id); err != nil {
		return err
	}
	if err := r.forget(id); err != nil {
		return err
	}
	p.mu.Lock()
	p.rec = record{}
	p.mu.Unlock()
	return nil
}

// killGroups ends what lives in an instance's groups. The caller holds its work,
// and no run of it is at hand.
func (r *Runtime) killGroups(id string) error {
	for _, g := range r.groups() {
		if g.id != id {
			continue
		}
		if err := killGroup(g.path); err != nil {
			return err
		}
	}
	return nil
}

func (r *Runtime) outputPath(id string) string { return filepath.Join(r.o.Dir, id+".log") }

// trim keeps an output from filling the disk: the last part moves to a second
// file, and the first begins anew. Writers append, so none notices.
func (r *Runtime) trim(id string) {
	path := r.outputPath(id)
	st, err := os.Stat(path)
	if err != nil || st.Size() < maxOutput {
		return
	}
	if err := cut(path, st.Size()); err != nil {
		r.o.Log.Error("an instance's output is not cut", "instance", id, "err", err)
	}
}

func cut(path string, size int64) error {
	in, err := os.Open(path)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(path+".1", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, io.NewSectionReader(in, size-keepOutput, keepOutput))
	if err = errors.Join(err, out.Close()); err != nil {
		return err
	}
	return os.Truncate(path, 0)
}
