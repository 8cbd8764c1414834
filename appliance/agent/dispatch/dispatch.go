package dispatch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
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
	// maxTextBytes bounds what an error or a progress says.
	maxTextBytes = 4 << 10
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
	// TimeKnown is closed once Now is more than this machine's own clock, which
	// may stand anywhere after a power cut: what an earlier process left open is
	// judged by not_after only then. Nil: it is known already.
	TimeKnown <-chan struct{}
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
		} else {
			t.op, err = t.kind.decode(t.payload)
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
	restored := maps.Clone(d.queues)
	d.mu.Unlock()
	known := d.cfg.TimeKnown
	if known == nil {
		now := make(chan struct{})
		close(now)
		known = now
	}

	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-known:
			known = nil
			for key, q := range restored {
				d.idle.Add(1)
				go d.work(key, q)
			}
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
