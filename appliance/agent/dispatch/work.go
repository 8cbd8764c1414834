package dispatch

import (
	"context"
	"errors"
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
	cancel  context.CancelCauseFunc // set while it runs
	refused *errs.Error             // set when it must not run: it only gets its result
}

// enqueue puts t at its key's end. The caller holds mu, or is New.
func (d *Dispatcher) enqueue(t *task) {
	d.tasks[t.payload.GetCommandId()] = t
	d.inLane[t.kind.Lane]++
	q := d.queues[t.op.Key]
	if q != nil {
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
		d.mu.Unlock()
		d.handle(t)
		d.mu.Lock()
		q.tasks = q.tasks[1:]
		d.mu.Unlock()
	}
}

// enter takes a slot of the lane, and reports false when the agent stops first.
func (d *Dispatcher) enter(lane string) bool {
	d.mu.Lock()
	if d.stopping {
		d.mu.Unlock()
		return false
	}
	if d.running[lane] < d.lanes[lane] {
		d.running[lane]++
		d.mu.Unlock()
		return true
	}
	slot := make(chan struct{}, 1)
	d.waiting[lane] = append(d.waiting[lane], slot)
	d.mu.Unlock()
	_, ok := <-slot
	return ok
}

// leave hands the slot to who waits longest, or frees it.
func (d *Dispatcher) leave(lane string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if next := d.waiting[lane]; len(next) > 0 {
		next[0] <- struct{}{}
		d.waiting[lane] = next[1:]
		return
	}
	d.running[lane]--
}

// handle takes one command to its result, or leaves it in the journal when the
// agent stops first.
func (d *Dispatcher) handle(t *task) {
	lane := t.kind.Lane
	if t.refused == nil {
		if !d.enter(lane) {
			return
		}
		defer d.leave(lane)
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
		if err := d.cfg.Journal.Started(id); err != nil {
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
		Payload: t.payload, Operation: t.op, Deadline: deadline,
		Secrets: func(ctx context.Context, wanted ...string) (map[string]secret.Value, error) {
			for _, ref := range wanted {
				if !slices.Contains(refs, ref) {
					return nil, errs.New(errs.CredentialsUnavailable, "the command does not list the secret %q", ref)
				}
			}
			if len(wanted) == 0 {
				return map[string]secret.Value{}, nil
			}
			return d.cfg.Resolve(ctx, id, wanted)
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
	delete(d.tasks, id)
	delete(d.progress, id)
	delete(d.lastSent, id)
	d.inLane[t.kind.Lane]--
	if jerr := d.cfg.Journal.Done(id, outcome); jerr != nil {
		// The gateway still gets it; after a restart Recover has the word.
		d.cfg.Log.Error("result not journaled", "command", id, "error", jerr)
		d.unkept[id] = outcome
	}
	d.results[id] = time.Time{}
	d.cfg.Log.Info("command finished", "command", id, "kind", t.payload.GetKind(), "operation", t.op.Name, "code", string(code))
	if t.op.Destructive && d.cfg.Audit != nil {
		body := map[string]string{"command_id": id, "kind": t.payload.GetKind(), "operation": t.op.Name, "target": t.op.Key, "code": string(code)}
		if aerr := d.cfg.Audit("command.finished", id, body); aerr != nil {
			d.cfg.Log.Error("audit event not kept", "command", id, "error", aerr)
		}
	}
	d.nudge()
}
