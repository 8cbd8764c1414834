// Package outbox keeps events until the gateway has them: state coalesced by
// name and key, telemetry as long as there is room, audit always.
package outbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/reclog"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// The classes of events.
const (
	State     = "state"
	Telemetry = "telemetry"
	Audit     = "audit"
)

// DefaultLimit is how many bytes of events are kept.
const DefaultLimit = 16 << 20

// maxBody bounds one event's body.
const maxBody = 256 << 10

// Dropped is the state event that counts lost telemetry.
const Dropped = "events.dropped"

// Outbox is safe for concurrent use.
type Outbox struct {
	limit int
	now   func() time.Time
	wake  chan struct{}

	mu      sync.Mutex
	log     *reclog.Log // nil: memory only
	dirty   bool        // the log holds records that are not synced
	epoch   string
	told    string // the epoch that the session at hand knows; empty before the first
	next    uint64
	sent    uint64 // the highest seq handed out in this session
	pending []*item
	bytes   int
	dropped uint64
	damaged bool
	lost    error // why the file was given up
}

type item struct {
	event *agentv1.Event
	size  int
}

type record struct {
	Type  string `json:"t"` // "epoch", "event", "ack" or "drop"
	Epoch string `json:"e,omitempty"`
	Seq   uint64 `json:"n,omitempty"`
	Event []byte `json:"v,omitempty"`
}

// Open reads the events kept at path, or begins anew; with an empty path they
// live in memory. now is gateway time, for the events' stamps.
func Open(path string, limit int, now func() time.Time) (*Outbox, error) {
	o := &Outbox{limit: limit, now: now, wake: make(chan struct{}, 1), next: 1}
	if path == "" {
		o.epoch = reclog.NewEpoch()
		return o, nil
	}
	log, records, damaged, err := reclog.OpenOrSalvage(path)
	if err != nil {
		return nil, fmt.Errorf("open events: %w", err)
	}
	// Unsynced telemetry may be lost out of order: what is whole is kept, under a
	// new epoch, since numbers of lost events may be used again.
	o.log, o.damaged = log, damaged
	for _, data := range records {
		if err := o.replay(data); err != nil {
			log.Close()
			return nil, fmt.Errorf("open events %s: %w", path, err)
		}
	}
	if o.damaged || o.epoch == "" {
		o.epoch = reclog.NewEpoch()
		if err := o.compact(); err != nil {
			log.Close()
			return nil, fmt.Errorf("begin events: %w", err)
		}
	}
	return o, nil
}

func (o *Outbox) replay(data []byte) error {
	var r record
	if err := json.Unmarshal(data, &r); err != nil {
		return fmt.Errorf("decode record: %w", err)
	}
	switch r.Type {
	case "epoch":
		o.epoch = r.Epoch
		o.next = max(o.next, r.Seq)
	case "event":
		e := new(agentv1.Event)
		if err := proto.Unmarshal(r.Event, e); err != nil {
			return fmt.Errorf("decode event: %w", err)
		}
		o.next = max(o.next, e.GetSeq()+1)
		o.add(e, len(r.Event))
	case "ack":
		o.forget(r.Seq)
	case "drop":
		o.remove(func(e *agentv1.Event) bool { return e.GetSeq() == r.Seq })
	default:
		return fmt.Errorf("record of type %q is unknown", r.Type)
	}
	return nil
}

// Emit keeps an event. The body is encoded as JSON; class is State, Telemetry
// or Audit. State and audit are on disk before it returns. An error means that
// the event is lost: for audit, that there is no room for it.
func (o *Outbox) Emit(name, class, key string, body any) error {
	data, err := json.Marshal(body)
	switch {
	case err != nil:
		return fmt.Errorf("encode event %s: %w", name, err)
	case len(data) > maxBody:
		return fmt.Errorf("event %s: body of %d bytes is over %d", name, len(data), maxBody)
	case name == "" || (class != State && class != Telemetry && class != Audit):
		return fmt.Errorf("event %q of class %q: a name and a known class are needed", name, class)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	defer o.nudge()
	return o.emit(name, class, key, data)
}

func (o *Outbox) emit(name, class, key string, body []byte) error {
	e := &agentv1.Event{Seq: o.next, Name: name, AtMs: o.now().UnixMilli(), Class: class, Key: key, BodyJson: body}
	data, err := proto.Marshal(e)
	if err != nil {
		return fmt.Errorf("encode event %s: %w", name, err)
	}
	freed := 0
	if class == State {
		for _, i := range o.pending {
			if replaces(e, i.event) {
				freed += i.size
			}
		}
	}
	if !o.makeRoom(len(data)-freed, class) {
		return errs.New(errs.NoSpace, "no room for event %s among %d bytes that the gateway has not taken", name, o.bytes)
	}
	if err := o.write(record{Type: "event", Event: data}, class != Telemetry); err != nil {
		return errs.New(errs.NoSpace, "keep event %s: %v", name, err)
	}
	o.next++
	o.add(e, len(data))
	return nil
}

func replaces(e, old *agentv1.Event) bool {
	return e.GetClass() == State && old.GetClass() == State && e.GetName() == old.GetName() && e.GetKey() == old.GetKey()
}

func (o *Outbox) add(e *agentv1.Event, size int) {
	if e.GetClass() == State {
		o.remove(func(old *agentv1.Event) bool { return replaces(e, old) })
	}
	o.pending = append(o.pending, &item{e, size})
	o.bytes += size
}

func (o *Outbox) remove(is func(*agentv1.Event) bool) {
	kept := o.pending[:0]
	for _, i := range o.pending {
		if is(i.event) {
			o.bytes -= i.size
			continue
		}
		kept = append(kept, i)
	}
	clear(o.pending[len(kept):])
	o.pending = kept
}

// makeRoom drops the oldest telemetry until need bytes fit. A telemetry event
// larger than what could be freed is itself the one that is lost.
func (o *Outbox) makeRoom(need int, class string) bool {
	for o.bytes+need > o.limit {
		oldest := -1
		for n, i := range o.pending {
			if i.event.GetClass() == Telemetry {
				oldest = n
				break
			}
		}
		if oldest < 0 {
			if class == Telemetry {
				o.dropped++
			}
			return false
		}
		seq := o.pending[oldest].event.GetSeq()
		o.remove(func(e *agentv1.Event) bool { return e.GetSeq() == seq })
		o.dropped++
		if o.write(record{Type: "drop", Seq: seq}, false) != nil {
			// The event comes back after a restart: no harm.
			continue
		}
	}
	return true
}

func (o *Outbox) write(r record, sync bool) error {
	if o.log == nil {
		return nil
	}
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if o.log.Size() > int64(2*o.bytes+1<<20) {
		err = o.compact()
	}
	if err == nil {
		err = o.log.Append(data, sync)
	}
	switch {
	case err == nil:
		o.dirty = !sync
	case o.log.Err() != nil:
		o.leaveDisk(err)
		err = nil
	}
	return err
}

// leaveDisk goes on in memory when the file can be written no more: a box with
// a bad disk still tells what happens on it. Nobody knows which numbers are on
// disk, so another epoch begins.
func (o *Outbox) leaveDisk(err error) {
	o.log.Close()
	o.log, o.lost, o.epoch = nil, err, reclog.NewEpoch()
}

// compact rewrites the file with what is pending.
func (o *Outbox) compact() error {
	head, err := json.Marshal(record{Type: "epoch", Epoch: o.epoch, Seq: o.next})
	if err != nil {
		return err
	}
	records := [][]byte{head}
	for _, i := range o.pending {
		data, err := proto.Marshal(i.event)
		if err != nil {
			return err
		}
		r, err := json.Marshal(record{Type: "event", Event: data})
		if err != nil {
			return err
		}
		records = append(records, r)
	}
	return o.log.Replace(records)
}

// Epoch names this outbox's life; sequence numbers are unique within it. A
// session asks for it as it begins.
func (o *Outbox) Epoch() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.told = o.epoch
	return o.epoch
}

// NextSeq is the number that the next event gets.
func (o *Outbox) NextSeq() uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.next
}

// Durable reports whether events outlive the process.
func (o *Outbox) Durable() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.log != nil
}

// Damaged reports whether Open had to set a damaged file aside.
func (o *Outbox) Damaged() bool { return o.damaged }

// Full reports whether an audit event of ordinary size would find no room.
func (o *Outbox) Full() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	used := 0
	for _, i := range o.pending {
		if i.event.GetClass() != Telemetry {
			used += i.size
		}
	}
	return used+8<<10 > o.limit
}

// Rewind begins a session: everything after acked goes out again.
func (o *Outbox) Rewind(acked uint64) {
	o.mu.Lock()
	o.forget(acked)
	o.sent, o.next = acked, max(o.next, acked+1)
	o.mu.Unlock()
	o.nudge()
}

// Acked forgets events up to and including seq.
func (o *Outbox) Acked(seq uint64) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if seq >= o.next {
		return fmt.Errorf("the gateway acknowledged event %d; the next one is %d", seq, o.next)
	}
	o.forget(seq)
	// A lost ack is repeated by the gateway's Welcome: a full disk ends no session.
	_ = o.write(record{Type: "ack", Seq: seq}, false)
	return nil
}

func (o *Outbox) forget(seq uint64) {
	o.remove(func(e *agentv1.Event) bool { return e.GetSeq() <= seq })
}

// Events returns up to n events that this session has not sent, in order. What
// it returns is on disk: a number that the gateway has seen is never used for
// another event. An error ends the session: the next one knows the epoch in force.
func (o *Outbox) Events(n int) ([]*agentv1.Event, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.dropped > 0 {
		count := o.dropped
		body, _ := json.Marshal(map[string]uint64{"count": count})
		if o.emit(Dropped, State, "", body) == nil {
			o.dropped -= count
		}
	}
	var out []*agentv1.Event
	for _, i := range o.pending {
		if i.event.GetSeq() > o.sent && len(out) < n {
			out = append(out, i.event)
		}
	}
	if len(out) == 0 {
		return nil, nil
	}
	if o.log != nil && o.dirty {
		if err := o.log.Sync(); err != nil {
			o.leaveDisk(err)
		}
		o.dirty = false
	}
	if o.told != "" && o.told != o.epoch {
		return nil, fmt.Errorf("events are kept in memory alone from now on: %w", o.lost)
	}
	o.sent = out[len(out)-1].GetSeq()
	if len(out) == n {
		o.nudge()
	}
	return out, nil
}

// Wake fires when Events may have something.
func (o *Outbox) Wake() <-chan struct{} { return o.wake }

func (o *Outbox) nudge() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// Close makes what was emitted durable and releases the file.
func (o *Outbox) Close() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.log == nil {
		return nil
	}
	return errors.Join(o.log.Sync(), o.log.Close())
}
