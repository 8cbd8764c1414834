package dispatch

import (
	"context"
	"errors"
	"io"
	"slices"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
)

var errCancelled = errors.New("cancelled by the gateway")

type queue struct{ tasks []*task }

type task struct {
	payload *agentv1.CommandPayload
	kind    Kind
	op      Operation
	recover bool
	grant   string                  // that covers it, or empty
	cancel  context.CancelCauseFunc // set while it runs
	refused *errs.Error             // set when it must not run: it only gets its result
	aside   bool                    // it neither holds a slot of its lane nor waits for the next one
	apart   bool                    // it runs on without its place: see Call.Release
	suspect bool                    // its target did not answer the last time
	left    chan struct{}           // closed when it gave up its place
	line    line
}

// enqueue puts t at its key's end. The caller holds mu, or is New.
func (d *Dispatcher) enqueue(t *task) {
	d.tasks[t.payload.GetCommandId()] = t
	d.inLane[t.kind.Lane]++
	t.left = make(chan struct{})
	q := d.queues[t.op.Key]
	if q != nil {
		d.setAside(t, len(q.tasks) > 0)
		q.tasks = append(q.tasks, t)
		return
	}
	q = &queue{tasks: []*task{t}}
	d.queues[t.op.Key] = q
	if d.ctx != nil {
		d.idle.Add(1)
		go d.work(t.op.Key, q)
	}
}

// work runs a key's commands one after the other and ends when none is left.
// One that gives up its place goes on beside the next.
func (d *Dispatcher) work(key string, q *queue) {
	defer d.idle.Done()
	for {
		d.mu.Lock()
		if len(q.tasks) == 0 || d.stopping {
			delete(d.queues, key)
			d.mu.Unlock()
			return
		}
		t := q.tasks[0]
		d.setAside(t, false)
		d.mu.Unlock()
		ended := make(chan struct{})
		d.idle.Go(func() {
			defer close(ended)
			d.handle(t)
		})
		select {
		case <-ended:
		case <-t.left:
		}
		d.mu.Lock()
		q.tasks = q.tasks[1:]
		d.mu.Unlock()
	}
}

// waiter waits for a lane's slot.
type waiter struct {
	slot chan struct{}
	t    *task
}

// fits reports whether t may take a slot of its lane now: of what did not answer
// the last time at most half a lane runs, so that the rest is not held up by
// waiting in vain. The caller holds mu.
func (d *Dispatcher) fits(t *task) bool {
	lane := t.kind.Lane
	return d.running[lane] < d.lanes[lane] && (!t.suspect || d.suspected[lane] < max(1, d.lanes[lane]/2))
}

// take gives t a slot. The caller holds mu.
func (d *Dispatcher) take(t *task) {
	d.running[t.kind.Lane]++
	if t.suspect {
		d.suspected[t.kind.Lane]++
	}
}

// enter takes a slot of the lane, and reports false when the agent stops first.
func (d *Dispatcher) enter(t *task) bool {
	lane := t.kind.Lane
	d.mu.Lock()
	if d.stopping {
		d.mu.Unlock()
		return false
	}
	t.suspect = d.silent[t.op.Key]
	if d.fits(t) {
		d.take(t)
		d.mu.Unlock()
		return true
	}
	d.setAside(t, t.suspect)
	w := waiter{make(chan struct{}, 1), t}
	d.waiting[lane] = append(d.waiting[lane], w)
	d.mu.Unlock()
	_, ok := <-w.slot
	return ok
}

// setAside notes whether t leaves the lane's slots to others for now: while others
// of its key come first, while it is asked whether it is ready, and while enough
// silent targets run. The gateway may send as many more. The caller holds mu.
func (d *Dispatcher) setAside(t *task, aside bool) {
	switch {
	case aside == t.aside:
		return
	case aside:
		d.aside[t.kind.Lane]++
	default:
		d.aside[t.kind.Lane]--
	}
	t.aside = aside
	d.nudge()
}

// release lets a command go on without its places in queue and lane.
func (d *Dispatcher) release(t *task) {
	d.mu.Lock()
	defer d.mu.Unlock()
	lane := t.kind.Lane
	if t.apart || d.tasks[t.payload.GetCommandId()] != t || d.apart[lane] >= maxApart {
		return
	}
	t.apart = true
	d.apart[lane]++
	d.inLane[lane]--
	d.leave(t)
	close(t.left)
	d.nudge()
}

// leave gives t's slot back, and slots to who waits longest of those that may have
// one. The caller holds mu.
func (d *Dispatcher) leave(t *task) {
	lane := t.kind.Lane
	d.running[lane]--
	if t.suspect {
		d.suspected[lane]--
	}
	d.waiting[lane] = slices.DeleteFunc(d.waiting[lane], func(w waiter) bool {
		if !d.fits(w.t) {
			return false
		}
		d.setAside(w.t, false)
		d.take(w.t)
		w.slot <- struct{}{}
		return true
	})
}

// maxSilent bounds what is remembered of targets that did not answer.
const maxSilent = 8192

// heard notes whether a target answered. A code by which nothing ran says nothing,
// nor does a plugin that ended, whatever its call's code is. The caller holds mu.
func (d *Dispatcher) heard(t *task, err error) {
	var broke interface{ OfPlugin() }
	if errors.As(err, &broke) {
		return
	}
	switch errs.CodeOf(err) {
	case errs.Unreachable:
		if len(d.silent) < maxSilent {
			d.silent[t.op.Key] = true
		}
	case "", errs.BmcError:
		delete(d.silent, t.op.Key)
	}
}

// handle takes one command to its result, or leaves it in the journal when the
// agent stops first.
func (d *Dispatcher) handle(t *task) {
	if t.refused == nil {
		if !t.recover && !d.ready(t) {
			return
		}
		if !d.enter(t) {
			return
		}
		defer func() {
			d.mu.Lock()
			defer d.mu.Unlock()
			if !t.apart {
				d.leave(t)
			}
		}()
	}
	id := t.payload.GetCommandId()
	remaining := time.UnixMilli(t.payload.GetNotAfterMs()).Sub(d.cfg.Now())
	deadline := time.Now().Add(remaining) // on the monotonic clock from here on

	d.mu.Lock()
	if d.tasks[id] != t { // cancelled while it waited
		d.mu.Unlock()
		return
	}
	if d.stopping || d.ctx.Err() != nil {
		d.mu.Unlock()
		return
	}
	switch {
	case t.refused != nil:
		d.finish(t, nil, t.refused)
	case !t.recover && remaining <= 0:
		d.finish(t, nil, errs.New(errs.Expired, "not_after passed while the command waited"))
	case !t.recover:
		if err := d.begin(t); err != nil {
			d.finish(t, nil, err)
		}
	}
	if d.tasks[id] != t {
		d.mu.Unlock()
		return
	}
	ctx, cancel := context.WithCancelCause(d.ctx)
	t.cancel = cancel
	d.mu.Unlock()
	defer cancel(nil)

	call := d.call(t, deadline)
	if t.recover {
		verdict := d.lookBack(ctx, t, call)
		switch {
		case d.ctx.Err() != nil && verdict.outcome != done:
			return
		case verdict.outcome == done:
			d.end(t, verdict.result, nil)
			return
		case verdict.outcome != rerun || !t.op.RetrySafe:
			d.end(t, nil, errs.New(errs.Interrupted, "the agent restarted while the command ran; what became of it is not known"))
			return
		case remaining <= 0:
			d.end(t, nil, errs.New(errs.Expired, "the agent restarted while the command ran, and not_after has passed since"))
			return
		}
	}
	runCtx, stop := context.WithDeadline(ctx, deadline)
	defer stop()
	result, err := guard(func() ([]byte, error) { return t.kind.Run(runCtx, call) })
	err = begun(err)
	t.line.end(err)
	switch {
	case err == nil:
	case context.Cause(ctx) == errCancelled:
		err = errs.New(errs.Cancelled, "cancelled while it ran: %v", err)
	case d.ctx.Err() != nil:
		// Stopped by the agent's own end: Recover decides in the next process.
		return
	case errors.Is(runCtx.Err(), context.DeadlineExceeded) && errs.CodeOf(err) != errs.Timeout:
		err = errs.Retry(errs.Timeout, "not_after passed while the command ran: %v", err)
	}
	d.end(t, result, err)
}

// ready asks the kind, while no slot is held, whether it is worth while to begin.
func (d *Dispatcher) ready(t *task) bool {
	if t.kind.Ready == nil {
		return true
	}
	d.mu.Lock()
	gone := d.tasks[t.payload.GetCommandId()] != t || d.stopping
	if !gone {
		d.setAside(t, true)
	}
	d.mu.Unlock()
	if gone {
		return false
	}
	_, err := guard(func() ([]byte, error) { return nil, t.kind.Ready(d.ctx, t.op) })
	d.mu.Lock()
	d.setAside(t, false)
	d.mu.Unlock()
	if d.ctx.Err() != nil {
		return false // it stays received
	}
	if err != nil {
		d.end(t, nil, err)
	}
	return err == nil
}

// begun keeps the codes by which a gateway knows that nothing ran for commands
// that did not: a driver may choose any code, and one that has begun to work
// must not be asked again because of its choice.
func begun(err error) error {
	switch errs.CodeOf(err) {
	case errs.WrongIncarnation, errs.LaneFull, errs.Expired:
		e := errs.From(err)
		return &errs.Error{Code: errs.DriverError, Message: string(e.Code) + ": " + e.Message, Retryable: e.Retryable}
	}
	return err
}

// lookBack asks the kind what became of a started command.
func (d *Dispatcher) lookBack(ctx context.Context, t *task, call Call) Verdict {
	if t.kind.Recover == nil {
		return Interrupted()
	}
	ctx, cancel := context.WithTimeout(ctx, recoverWithin)
	defer cancel()
	verdict := Interrupted()
	_, err := guard(func() ([]byte, error) {
		verdict = t.kind.Recover(ctx, call)
		return nil, nil
	})
	if err != nil {
		d.cfg.Log.Error("recovery failed", "command", t.payload.GetCommandId(), "error", err)
	}
	return verdict
}

// guard turns a panic of a kind into an error: one bad command must not take
// the box down.
func guard(f func() ([]byte, error)) (result []byte, err error) {
	defer func() {
		if r := recover(); r != nil {
			result, err = nil, errs.New(errs.Internal, "the command's code failed: %v", r)
		}
	}()
	return f()
}

func (d *Dispatcher) call(t *task, deadline time.Time) Call {
	id, refs := t.payload.GetCommandId(), t.payload.GetSecretRefs()
	return Call{
		Payload: t.payload, Operation: t.op, Deadline: deadline, Granted: t.grant != "",
		Release: func() { d.release(t) },
		Tunnel: func(ctx context.Context) (io.ReadWriteCloser, error) {
			return t.line.open(ctx, d.cfg.Tunnel, id)
		},
		Secrets: func(ctx context.Context, wanted ...string) (map[string]secret.Value, error) {
			for _, ref := range wanted {
				if !slices.Contains(refs, ref) {
					return nil, errs.New(errs.CredentialsUnavailable, "the command does not list the secret %q", ref)
				}
			}
			if len(wanted) == 0 {
				return map[string]secret.Value{}, nil
			}
			return d.resolve(ctx, id, wanted)
		},
		Progress: func(phase, message string, done, total uint64) {
			d.mu.Lock()
			defer d.mu.Unlock()
			if d.tasks[id] == t {
				d.progress[id] = &agentv1.CommandProgress{CommandId: id, Phase: text(phase), Message: text(message), Done: done, Total: total}
			}
		},
	}
}

// resolveWithin bounds how long the gateway may take to hand over secrets: a command
// that has started must not be held until its sender likes.
const resolveWithin = 30 * time.Second

func (d *Dispatcher) resolve(ctx context.Context, id string, refs []string) (map[string]secret.Value, error) {
	within, cancel := context.WithTimeout(ctx, resolveWithin)
	defer cancel()
	values, err := d.cfg.Resolve(within, id, refs)
	if within.Err() != nil && ctx.Err() == nil {
		return nil, errs.Retry(errs.CredentialsUnavailable, "the gateway gave no secrets within %s", resolveWithin)
	}
	return values, err
}

func (d *Dispatcher) end(t *task, result []byte, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.finish(t, result, err)
}

// finish records a command's one result. The caller holds mu.
func (d *Dispatcher) finish(t *task, result []byte, err error) {
	id := t.payload.GetCommandId()
	if d.tasks[id] != t {
		return
	}
	if err == nil && len(result) > maxResultBytes {
		err = errs.New(errs.Internal, "result of %d bytes is over %d", len(result), maxResultBytes)
	}
	outcome := &agentv1.CommandResult{CommandId: id, Outcome: &agentv1.CommandResult_Result{Result: result}}
	code := errs.Code("")
	if err != nil {
		e := *errs.From(err)
		// Unavailable stays: nothing ran.
		if !t.op.RetrySafe && e.Code != errs.Unavailable {
			e.Retryable = false
		}
		outcome, code = failure(id, &e), e.Code
	}
	d.heard(t, err)
	d.setAside(t, false)
	delete(d.tasks, id)
	delete(d.progress, id)
	delete(d.lastSent, id)
	if t.apart {
		d.apart[t.kind.Lane]--
	} else {
		d.inLane[t.kind.Lane]--
	}
	if jerr := d.cfg.Journal.Done(id, outcome); jerr != nil {
		// The gateway still gets it; after a restart Recover has the word.
		d.cfg.Log.Error("result not journaled", "command", id, "error", jerr)
		d.unkept[id] = outcome
	}
	d.results[id] = time.Time{}
	d.cfg.Log.Info("command finished", "command", id, "kind", t.payload.GetKind(), "operation", t.op.Name, "code", string(code))
	if t.op.Destructive && d.cfg.Audit != nil {
		body := map[string]string{"command_id": id, "kind": t.payload.GetKind(), "operation": t.op.Name, "target": t.op.Key, "code": string(code)}
		if t.grant != "" {
			body["grant"] = t.grant
		}
		if aerr := d.cfg.Audit("command.finished", id, body); aerr != nil {
			d.cfg.Log.Error("audit event not kept", "command", id, "error", aerr)
		}
	}
	d.nudge()
}
