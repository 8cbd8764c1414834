package dispatch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/agent/grants"
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
	// maxAside bounds what of a lane leaves its slots to others for now, and
	// maxApart what runs without its place, each beside what the lane holds.
	maxAside, maxApart = 512, 256
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
	// keepAgeEvery spaces the notes of the running time, by which the windows of
	// destructive work are measured: a reboot costs at most so much of it.
	keepAgeEvery = 10 * time.Minute
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
	// SiteID is the site that grants must name; nil: none is known.
	SiteID func() string
	// Now is gateway time.
	Now func() time.Time
	// Latest is the latest gateway time that is known to have been, which a clock
	// that is set back does not take back; nil: Now.
	Latest func() time.Time
	// TimeKnown is closed once Now is more than this machine's own clock, which
	// may stand anywhere after a power cut: what an earlier process left open is
	// judged by not_after only then. Nil: it is known already.
	TimeKnown <-chan struct{}
	// Resolve asks the gateway for secrets of a command in flight.
	Resolve func(ctx context.Context, commandID string, refs []string) (map[string]secret.Value, error)
	// Tunnel opens the tunnel of a command in flight; nil: there are none.
	Tunnel func(ctx context.Context, commandID string) (io.ReadWriteCloser, error)
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
	// The running time goes on from the journal's.
	began    time.Time
	firstAge time.Duration

	mu       sync.Mutex
	stopping bool
	ctx      context.Context // of Run; nil before
	queues   map[string]*queue
	tasks    map[string]*task // every command that has no result yet
	inLane   map[string]int
	aside    map[string]int    // of inLane: what leaves the lane's slots to others for now
	apart    map[string]int    // what runs without its place, beside inLane
	told     map[string]uint32 // credits by lane, as the gateway knows them
	peak     map[string]uint32 // the most that this session was told
	running  map[string]int
	waiting  map[string][]waiter // for a lane's slot, first come, first served

	silent    map[string]bool // keys of targets that did not answer the last time
	suspected map[string]int  // of running: whose target is among them

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
		cfg: cfg, kinds: map[string]Kind{}, lanes: DefaultLanes(), wake: make(chan struct{}, 1), began: time.Now(), firstAge: cfg.Journal.Age(),
		queues: map[string]*queue{}, tasks: map[string]*task{}, inLane: map[string]int{},
		aside: map[string]int{}, apart: map[string]int{}, told: map[string]uint32{}, peak: map[string]uint32{},
		running: map[string]int{}, waiting: map[string][]waiter{},
		silent: map[string]bool{}, suspected: map[string]int{},
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
	use, _ := d.cfg.Journal.UseOf(e.ID)
	t := &task{recover: e.State == journal.Started, grant: use.Grant}
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
			d.keepAge(keepAgeEvery)
		}
	}
	d.mu.Lock()
	d.stopping = true
	for _, waiters := range d.waiting {
		for _, w := range waiters {
			close(w.slot)
		}
	}
	clear(d.waiting)
	d.mu.Unlock()
	d.idle.Wait()
	d.keepAge(time.Second)
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
		durable: d.cfg.Journal.Durable(), auditFull: d.cfg.AuditFull != nil && d.cfg.AuditFull(),
	}, d.kinds, p)
	if err != nil {
		return err
	}
	// A gateway keeps to the lane's credits by counting what it has sent. It may
	// have given up on a command that still runs here, and the credits may have
	// shrunk while commands were on their way: as much again as the lane runs may
	// wait before it is full.
	if d.inLane[kind.Lane] >= d.lanes[kind.Lane]+int(max(d.peak[kind.Lane], d.credit(kind.Lane))) {
		return errs.Retry(errs.LaneFull, "lane %s holds %d commands", kind.Lane, d.inLane[kind.Lane])
	}
	if q := d.queues[op.Key]; q != nil && len(q.tasks) >= maxPerKey {
		return errs.Retry(errs.LaneFull, "%d commands wait for the same target", len(q.tasks))
	}
	if d.stopping {
		return errs.Retry(errs.Unavailable, "the agent is stopping")
	}
	// Last, so that what is refused for another reason uses nothing.
	use, err := d.judge(bundle, p, op, "")
	if err != nil {
		return err
	}
	if err := d.cfg.Journal.Admitted(id, digest, time.UnixMilli(p.GetNotAfterMs()), c, use); err != nil {
		return err
	}
	t := &task{payload: p, kind: kind, op: op}
	if use != nil {
		t.grant = use.Grant
	}
	d.ack(id)
	d.enqueue(t)
	return nil
}

// judge says what the command uses of people's grants or counts for, nil where it
// needs none. but is the command itself, where the journal knows what it uses.
func (d *Dispatcher) judge(bundle *trust.Bundle, p *agentv1.CommandPayload, op Operation, but string) (*grants.Use, error) {
	if !(op.Counts || op.Always) || bundle == nil || !bundle.QuorumInForce() {
		return nil, nil
	}
	m := grants.Moment{Now: d.cfg.Now()}
	m.Latest = m.Now
	if d.cfg.Latest != nil {
		m.Latest = d.cfg.Latest()
	}
	if d.cfg.SiteID != nil {
		m.SiteID = d.cfg.SiteID()
	}
	past, err := d.cfg.Journal.PastBut(but, d.age(), m.Latest)
	if err != nil {
		return nil, err
	}
	use, err := grants.Judge(asks(p, op), bundle, past, m)
	if err != nil {
		return nil, err
	}
	return &use, nil
}

// begin judges a destructive command once more when its turn has come, and notes
// that it starts. It may have waited for as long as its sender liked: what counts is
// when a target is touched, not when that was announced, and neither what a grant
// allows nor what the command would do need be what it was. The caller holds mu.
func (d *Dispatcher) begin(t *task) error {
	id := t.payload.GetCommandId()
	if !t.op.Destructive {
		return d.cfg.Journal.Started(id)
	}
	op, err := t.kind.decode(t.payload)
	if err != nil {
		return err
	}
	use, err := d.judge(d.cfg.Bundle(), t.payload, op, id)
	if err != nil {
		return err
	}
	if err := d.cfg.Journal.Begun(id, use); err != nil {
		return err
	}
	op.Key = t.op.Key // where it stands
	t.op = op
	if use != nil {
		t.grant = use.Grant
	}
	return nil
}

// age is the agent's running time.
func (d *Dispatcher) age() time.Duration { return d.firstAge + time.Since(d.began) }

// keepAge notes the running time once it has gone on by step.
func (d *Dispatcher) keepAge(step time.Duration) {
	age := d.age()
	if age-d.cfg.Journal.Age() < step {
		return
	}
	if err := d.cfg.Journal.KeepAge(age); err != nil {
		d.cfg.Log.Error("running time not kept", "error", err)
	}
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
		d.setAside(t, false)
		d.inLane[t.kind.Lane]--
	}
	d.results[id] = time.Time{}
}
