package dispatch

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/agent/journal"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
)

const (
	// maxPerKey bounds the queue of one target, so that one that does not answer
	// cannot fill its lane.
	maxPerKey = 16
	// maxReplies bounds acks and refusals that wait for the session; the oldest
	// go first, and the gateway sends such commands again.
	maxReplies = 4096
	// maxResultBytes bounds a result on the wire.
	maxResultBytes = 4 << 20
	// progressEvery spaces a command's progress frames.
	progressEvery = 500 * time.Millisecond
	// resendEvery spaces repeats of a result that is not acked.
	resendEvery = 30 * time.Second
	// recoverWithin bounds one Recover.
	recoverWithin = 2 * time.Minute
)

// DefaultLanes are how many commands of each lane run at a time.
func DefaultLanes() map[string]int {
	return map[string]int{"query": 64, "power": 64, "provision": 16, "proxy": 8, "transfer": 4, "update": 1}
}

// Config is what a Dispatcher needs. All but Audit and AuditFull must be set.
type Config struct {
	Role agentv1.Role
	// AgentID is asked at each command: an agent learns it at enrolment.
	AgentID func() string
	// Incarnation is the journal's epoch, or a ramdisk's boot id.
	Incarnation string
	Kinds       []Kind
	// Lanes overrides DefaultLanes by name.
	Lanes   map[string]int
	Journal *journal.Journal
	// Bundle is the trust bundle in force; nil before enrolment.
	Bundle func() *trust.Bundle
	// Now is gateway time.
	Now func() time.Time
	// Resolve asks the gateway for secrets of a command in flight.
	Resolve func(ctx context.Context, commandID string, refs []string) (map[string]secret.Value, error)
	// Audit notes what became of a destructive command.
	Audit func(name, key string, body any) error
	// AuditFull reports that the next audit event would find no room.
	AuditFull func() bool
	Log       *slog.Logger
}

// Dispatcher is safe for concurrent use.
type Dispatcher struct {
	cfg   Config
	kinds map[string]Kind
	lanes map[string]int
	wake  chan struct{}
	idle  sync.WaitGroup

	mu       sync.Mutex
	stopping bool
	ctx      context.Context // of Run; nil before
	queues   map[string]*queue
	tasks    map[string]*task // every command that has no result yet
	inLane   map[string]int
	running  map[string]int
	waiting  map[string][]chan struct{} // for a lane's slot, first come, first served

	replies  []*agentv1.AgentFrame
	progress map[string]*agentv1.CommandProgress
	lastSent map[string]time.Time // of progress, by command
	results  map[string]time.Time // when an unacked result was sent last; zero: not in this session
	unkept   map[string]*agentv1.CommandResult
}

type queue struct{ tasks []*task }

type task struct {
	payload *agentv1.CommandPayload
	kind    Kind
	op      Operation
	recover bool
	cancel  context.CancelCauseFunc // set while it runs
	refused *errs.Error             // set when it must not run: it only gets its result
}

var errCancelled = errors.New("cancelled by the gateway")

// New checks the kinds and takes up what the journal left open, so that it
// stands in its queues before anything new is admitted. Run starts the work.
func New(cfg Config) (*Dispatcher, error) {
	d := &Dispatcher{
		cfg: cfg, kinds: map[string]Kind{}, lanes: DefaultLanes(), wake: make(chan struct{}, 1),
		queues: map[string]*queue{}, tasks: map[string]*task{}, inLane: map[string]int{},
		running: map[string]int{}, waiting: map[string][]chan struct{}{},
		progress: map[string]*agentv1.CommandProgress{}, lastSent: map[string]time.Time{},
		results: map[string]time.Time{}, unkept: map[string]*agentv1.CommandResult{},
	}
	for lane, n := range cfg.Lanes {
		if _, ok := d.lanes[lane]; !ok || n < 1 {
			return nil, fmt.Errorf("lane %q with cap %d: unknown, or under 1", lane, n)
		}
		d.lanes[lane] = n
	}
	for _, k := range cfg.Kinds {
		switch {
		case k.Name == "" || k.Decode == nil || k.Run == nil || len(k.Roles) == 0:
			return nil, fmt.Errorf("kind %q lacks a name, roles, Decode or Run", k.Name)
		case d.lanes[k.Lane] == 0:
			return nil, fmt.Errorf("kind %s names the unknown lane %q", k.Name, k.Lane)
		case d.kinds[k.Name].Name != "":
			return nil, fmt.Errorf("kind %s is registered twice", k.Name)
		}
		d.kinds[k.Name] = k
	}
	for _, e := range cfg.Journal.Open() {
		d.restore(e)
	}
	return d, nil
}

// restore takes up one command that an earlier process left open.
func (d *Dispatcher) restore(e journal.Entry) {
	if e.State == journal.Done || e.State == journal.Cancelled {
		d.results[e.ID] = time.Time{}
		return
	}
	t := &task{recover: e.State == journal.Started}
	bundle := d.cfg.Bundle()
	var err error
	if bundle == nil {
		err = errs.New(errs.KeyUnknown, "no trust bundle is in force")
	} else {
		// The key may have been withdrawn since.
		t.payload, _, err = envelope.Open(e.Command, bundle)
	}
	if t.payload == nil {
		t.payload = &agentv1.CommandPayload{CommandId: e.ID, NotAfterMs: e.NotAfter.UnixMilli()}
	}
	if err == nil {
		var known bool
		if t.kind, known = d.kinds[t.payload.GetKind()]; !known {
			err = errs.New(errs.UnknownKind, "this agent does not serve %q any more", t.payload.GetKind())
		} else if t.op, err = t.kind.Decode(t.payload.GetArgs()); err == nil && t.op.Key == "" {
			t.op.Key = t.kind.Name
		}
	}
	if err != nil {
		t.refused = errs.From(err)
		if t.recover {
			t.refused = errs.New(errs.Interrupted, "the agent restarted while the command ran, and cannot look: %v", err)
		}
		t.op.Key = "restored " + e.ID
	}
	d.enqueue(t)
}

// Run works the queues until ctx ends, and returns when every command has
// stopped. Commands that were stopped by it stay started in the journal.
func (d *Dispatcher) Run(ctx context.Context) error {
	d.mu.Lock()
	if d.ctx != nil {
		d.mu.Unlock()
		return errors.New("dispatcher runs already")
	}
	d.ctx = ctx
	for key, q := range d.queues {
		d.idle.Add(1)
		go d.work(key, q)
	}
	d.mu.Unlock()

	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-tick.C:
			d.nudge()
		}
	}
	d.mu.Lock()
	d.stopping = true
	for _, slots := range d.waiting {
		for _, slot := range slots {
			close(slot)
		}
	}
	clear(d.waiting)
	d.mu.Unlock()
	d.idle.Wait()
	return nil
}

// Offer takes a command from the gateway. The answer comes out of Frames.
func (d *Dispatcher) Offer(c *agentv1.SignedCommand) {
	if err := d.offer(c); err != nil {
		id := commandID(c)
		e := errs.From(err)
		d.cfg.Log.Warn("command refused", "command", id, "code", e.Code, "reason", e.Message)
		if id != "" {
			d.reply(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Result{Result: failure(id, e)}})
		}
	}
	d.nudge()
}

// commandID names a refused command to the gateway, which must learn of the
// refusal even where the signature is what is wrong. Nothing else of an
// unverified payload is used.
func commandID(c *agentv1.SignedCommand) string {
	p := new(agentv1.CommandPayload)
	if len(c.GetPayload()) > envelope.MaxPayloadBytes || proto.Unmarshal(c.GetPayload(), p) != nil || len(p.GetCommandId()) > 128 {
		return ""
	}
	return p.GetCommandId()
}

func (d *Dispatcher) offer(c *agentv1.SignedCommand) error {
	bundle := d.cfg.Bundle()
	if bundle == nil {
		return errs.New(errs.KeyUnknown, "no trust bundle is in force")
	}
	p, digest, err := envelope.Open(c, bundle)
	if err != nil {
		return err
	}
	id := p.GetCommandId()
	d.mu.Lock()
	defer d.mu.Unlock()
	if e, ok := d.cfg.Journal.Get(id); ok && p.GetAgentId() == d.cfg.AgentID() {
		return d.again(e, digest)
	}
	kind, op, err := admit(standing{
		role: d.cfg.Role, agentID: d.cfg.AgentID(), incarnation: d.cfg.Incarnation, now: d.cfg.Now(),
		quorum: bundle.QuorumInForce(), durable: d.cfg.Journal.Durable(),
		auditFull: d.cfg.AuditFull != nil && d.cfg.AuditFull(),
	}, d.kinds, p)
	if err != nil {
		return err
	}
	// A gateway keeps to the lane's credits by counting what it has sent. It may
	// have given up on a command that still runs here: as much again may wait
	// before the lane is full.
	if d.inLane[kind.Lane] >= 2*d.lanes[kind.Lane] {
		return errs.Retry(errs.LaneFull, "lane %s holds %d commands", kind.Lane, d.inLane[kind.Lane])
	}
	if q := d.queues[op.Key]; q != nil && len(q.tasks) >= maxPerKey {
		return errs.Retry(errs.LaneFull, "%d commands wait for the same target", len(q.tasks))
	}
	if d.stopping {
		return errs.Retry(errs.Unavailable, "the agent is stopping")
	}
	if err := d.cfg.Journal.Received(id, digest, time.UnixMilli(p.GetNotAfterMs()), c); err != nil {
		return err
	}
	d.ack(id)
	d.enqueue(&task{payload: p, kind: kind, op: op})
	return nil
}

// again answers a command that came before.
func (d *Dispatcher) again(e journal.Entry, digest [32]byte) error {
	if e.Digest != digest && e.Digest != [32]byte{} {
		return errs.New(errs.DuplicateMismatch, "command %s came before with other content", e.ID)
	}
	d.ack(e.ID)
	switch e.State {
	case journal.Done, journal.Cancelled:
		d.results[e.ID] = time.Time{}
	case journal.Acked:
		return errs.New(errs.Interrupted, "command %s ended before; its result was acknowledged and is not kept", e.ID)
	}
	return nil
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
				d.progress[id] = &agentv1.CommandProgress{CommandId: id, Phase: phase, Message: message, Done: done, Total: total}
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

func failure(id string, e *errs.Error) *agentv1.CommandResult {
	return &agentv1.CommandResult{CommandId: id, Outcome: &agentv1.CommandResult_Error{
		Error: &agentv1.Error{Code: string(e.Code), Message: e.Message, Retryable: e.Retryable},
	}}
}

// Cancel stops a command if it can still be stopped. A cancel that comes first
// is remembered, so that the command never runs.
func (d *Dispatcher) Cancel(id string) {
	defer d.nudge()
	d.mu.Lock()
	defer d.mu.Unlock()
	e, known := d.cfg.Journal.Get(id)
	switch {
	case known && e.State == journal.Started:
		// Whether it is past its point of no return is the kind's to know.
		if t := d.tasks[id]; t != nil && t.cancel != nil {
			t.cancel(errCancelled)
		}
		return
	case known && e.State != journal.Received:
		return // it has its result
	case len(id) == 0 || len(id) > 128:
		return
	}
	outcome := failure(id, errs.New(errs.Cancelled, "cancelled before it started"))
	// An unknown command may still be valid for its whole life.
	if err := d.cfg.Journal.Cancelled(id, d.cfg.Now().Add(envelope.MaxLife+skew), outcome); err != nil {
		d.cfg.Log.Error("cancel not journaled", "command", id, "error", err)
		return
	}
	if t := d.tasks[id]; t != nil {
		delete(d.tasks, id)
		d.inLane[t.kind.Lane]--
	}
	d.results[id] = time.Time{}
}

// ResultAcked notes that the gateway has committed a result.
func (d *Dispatcher) ResultAcked(id string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if outcome, ok := d.unkept[id]; ok {
		if err := d.cfg.Journal.Done(id, outcome); err != nil {
			d.cfg.Log.Error("result not journaled", "command", id, "error", err)
		}
		delete(d.unkept, id)
	}
	delete(d.results, id)
	e, ok := d.cfg.Journal.Get(id)
	if !ok || (e.State != journal.Done && e.State != journal.Cancelled) {
		return // a refusal, or an ack that crossed a repeat
	}
	if err := d.cfg.Journal.Acked(id); err != nil {
		d.cfg.Log.Error("ack not journaled", "command", id, "error", err)
	}
}

// Begin opens a session: it returns what Hello says of commands that are not
// acked, and of how many each lane takes, open ones included. Every result goes
// out again until it is acked; acks and refusals of the last session are dropped, since Hello
// tells the same.
func (d *Dispatcher) Begin() (open []*agentv1.OpenCommand, lanes map[string]uint32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	defer d.nudge()
	for _, e := range d.cfg.Journal.Open() {
		c := &agentv1.OpenCommand{CommandId: e.ID, State: string(e.State)}
		if e.Digest != [sha256.Size]byte{} {
			c.Digest = e.Digest[:]
		}
		open = append(open, c)
	}
	for id := range d.results {
		d.results[id] = time.Time{}
	}
	clear(d.lastSent)
	d.replies = nil
	lanes = map[string]uint32{}
	for lane, n := range d.lanes {
		lanes[lane] = uint32(n)
	}
	return open, lanes
}

// Frames returns what is due to the gateway now, at most a few at a time where
// results are large; Wake fires when there is more.
func (d *Dispatcher) Frames() []*agentv1.AgentFrame {
	d.mu.Lock()
	defer d.mu.Unlock()
	frames := d.replies
	d.replies = nil
	now := time.Now()
	for id, p := range d.progress {
		if now.Sub(d.lastSent[id]) >= progressEvery {
			frames = append(frames, &agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Progress{Progress: p}})
			d.lastSent[id] = now
			delete(d.progress, id)
		}
	}
	bytes := 0
	for id, sent := range d.results {
		if !sent.IsZero() && now.Sub(sent) < resendEvery {
			continue
		}
		if bytes > maxResultBytes {
			d.nudge()
			break
		}
		outcome := d.unkept[id]
		if outcome == nil {
			e, _ := d.cfg.Journal.Get(id)
			if outcome = e.Result; outcome == nil {
				delete(d.results, id)
				continue
			}
		}
		bytes += len(outcome.GetResult())
		frames = append(frames, &agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Result{Result: outcome}})
		d.results[id] = now
	}
	return frames
}

// Wake fires when Frames may have something.
func (d *Dispatcher) Wake() <-chan struct{} { return d.wake }

func (d *Dispatcher) nudge() {
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

func (d *Dispatcher) ack(id string) {
	d.push(&agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Ack{Ack: &agentv1.CommandAck{CommandId: id}}})
}

func (d *Dispatcher) reply(f *agentv1.AgentFrame) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.push(f)
}

func (d *Dispatcher) push(f *agentv1.AgentFrame) {
	if len(d.replies) >= maxReplies {
		d.replies = d.replies[1:]
	}
	d.replies = append(d.replies, f)
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
