// Package journal remembers each command's state over power cuts, so that none
// runs twice and none is forgotten.
//
// A command is received (before it is acknowledged), started (before any
// effect), then done or cancelled with its one result, then acked. Each step is
// on disk before the method returns. Acked commands stay as tombstones until
// their not_after and 24 hours have passed; from then on nothing that could be
// one of them is received. The epoch is made with the file: a
// lost or damaged journal has another one, and a command for the old one is
// refused as wrong-incarnation.
//
// With a command it keeps what the command uses of people's grants, or counts for
// without one. That is given back if the command gets its outcome before it
// started, and else outlives the command: see uses.go.
package journal

import (
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/grants"
	"github.com/better-compute/site-appliance/appliance/agent/reclog"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// State is where a command stands. The names are those of OpenCommand.state.
type State string

// The states.
const (
	Received  State = "received"
	Started   State = "started"
	Done      State = "done"
	Cancelled State = "cancelled"
	Acked     State = "acked"
)

// tombstoneLife is how long past its not_after an acked command is remembered.
const tombstoneLife = 24 * time.Hour

// maxEntries bounds memory; a box that reached it takes no more commands until
// tombstones fall due.
const maxEntries = 1 << 18

// compactBytes is the file size from which on a Compact rewrites it.
const compactBytes = 1 << 20

// Entry is one command. Callers do not change what it points to.
type Entry struct {
	ID       string
	Digest   [32]byte // of the payload bytes; zero for a command that was cancelled before it came
	State    State
	NotAfter time.Time
	Command  *agentv1.SignedCommand // while received or started
	Result   *agentv1.CommandResult // while done or cancelled
}

// Journal is safe for concurrent use.
type Journal struct {
	mu      sync.Mutex
	log     *reclog.Log // nil: memory only
	epoch   string
	entries map[string]*Entry
	order   []string // ids in order of receipt, acked ones included
	damaged bool
	fresh   bool
	forgot  time.Time // the latest not_after of a tombstone that is gone
	ledger
}

// record is one line of the file.
type record struct {
	Type       string `json:"t"` // "epoch", "forgot", one of the ledger's, or a State
	Epoch      string `json:"e,omitempty"`
	ID         string `json:"id,omitempty"`
	Digest     []byte `json:"d,omitempty"`
	NotAfterMS int64  `json:"na,omitempty"`
	Command    []byte `json:"c,omitempty"`
	Result     []byte `json:"r,omitempty"`
	// Use is what the command uses; AgeMS and Unsure are the ledger's.
	Use    *grants.Use `json:"u,omitempty"`
	AgeMS  int64       `json:"a,omitempty"`
	Unsure bool        `json:"un,omitempty"`
}

// Open reads the journal at path, or makes it; with an empty path it lives in
// memory. A damaged file is set aside: what stood before the damage is kept
// under a new epoch, and everything unfinished counts as started, since nobody
// knows what the lost records said.
func Open(path string) (*Journal, error) {
	j := &Journal{entries: map[string]*Entry{}, ledger: newLedger()}
	if path == "" {
		j.epoch = reclog.NewEpoch()
		return j, nil
	}
	log, records, damaged, err := reclog.OpenOrSalvage(path)
	if err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	j.log, j.damaged = log, damaged
	for _, data := range records {
		if err := j.replay(data); err != nil {
			log.Close()
			return nil, fmt.Errorf("open journal %s: %w", path, err)
		}
	}
	if j.damaged {
		j.epoch = ""
		for _, e := range j.entries {
			if e.State == Received {
				e.State = Started
			}
		}
		j.lose()
	}
	if j.epoch == "" {
		j.fresh = !j.damaged
		j.epoch = reclog.NewEpoch()
		if err := log.Replace(j.records()); err != nil {
			log.Close()
			return nil, fmt.Errorf("begin journal: %w", err)
		}
	}
	return j, nil
}

// replay applies one stored record. Records were checked when they were
// written, and their checksums hold: one that does not fit is another
// version's work and stops the journal rather than being guessed at.
func (j *Journal) replay(data []byte) error {
	var r record
	if err := json.Unmarshal(data, &r); err != nil {
		return fmt.Errorf("decode record: %w", err)
	}
	switch r.Type {
	case "epoch":
		j.epoch = r.Epoch
		return nil
	case "forgot":
		j.forgot = time.UnixMilli(r.NotAfterMS)
		return nil
	}
	if j.ledger.replay(r) {
		return nil
	}
	e := j.entries[r.ID]
	if e == nil {
		e = &Entry{ID: r.ID}
		j.entries[r.ID] = e
		j.order = append(j.order, r.ID)
	}
	if len(r.Digest) == 32 {
		e.Digest = [32]byte(r.Digest)
	}
	if r.NotAfterMS != 0 {
		e.NotAfter = time.UnixMilli(r.NotAfterMS)
	}
	if r.Command != nil {
		e.Command = new(agentv1.SignedCommand)
		if err := proto.Unmarshal(r.Command, e.Command); err != nil {
			return fmt.Errorf("decode command %s: %w", r.ID, err)
		}
	}
	if r.Result != nil {
		e.Result = new(agentv1.CommandResult)
		if err := proto.Unmarshal(r.Result, e.Result); err != nil {
			return fmt.Errorf("decode result of %s: %w", r.ID, err)
		}
	}
	from := e.State
	switch e.State = State(r.Type); e.State {
	case Received, Started:
		if r.Use != nil {
			j.replace(r.ID, *r.Use)
		}
	case Done, Cancelled:
		e.Command = nil
	case Acked:
		e.Command, e.Result = nil, nil
	default:
		return fmt.Errorf("record of type %q is unknown", r.Type)
	}
	j.settle(r.ID, from, e.State)
	return nil
}

// Epoch names this journal's life.
func (j *Journal) Epoch() string { return j.epoch }

// Durable reports whether the journal outlives the process.
func (j *Journal) Durable() bool { return j.log != nil }

// Damaged reports whether Open had to set a damaged file aside.
func (j *Journal) Damaged() bool { return j.damaged }

// Fresh reports whether Open began the journal: nothing is known of what was before.
func (j *Journal) Fresh() bool { return j.fresh }

// Get finds a command.
func (j *Journal) Get(id string) (Entry, bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	e, ok := j.entries[id]
	if !ok {
		return Entry{}, false
	}
	return *e, true
}

// Open returns every command that is not acked, in order of receipt.
func (j *Journal) Open() []Entry {
	j.mu.Lock()
	defer j.mu.Unlock()
	var open []Entry
	for _, id := range j.order {
		if e := j.entries[id]; e != nil && e.State != Acked {
			open = append(open, *e)
		}
	}
	return open
}

// Received notes a new command. One that is not valid for longer than a
// forgotten one was is expired: it could be the same, come again under a clock
// that was set back.
func (j *Journal) Received(id string, digest [32]byte, notAfter time.Time, c *agentv1.SignedCommand) error {
	return j.Admitted(id, digest, notAfter, c, nil)
}

// Admitted is Received for a command that uses something of a grant, or counts
// without one; nil: it does not.
func (j *Journal) Admitted(id string, digest [32]byte, notAfter time.Time, c *agentv1.SignedCommand, use *grants.Use) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if _, ok := j.entries[id]; ok {
		return errs.New(errs.Internal, "journal: command %s was received before", id)
	}
	if _, ok := j.uses[id]; ok {
		// Its entry is forgotten, what it used is not, and is kept by this id.
		return errs.New(errs.DuplicateMismatch, "journal: command %s came before, and what it used still counts", id)
	}
	if !notAfter.After(j.forgot) {
		return errs.New(errs.Expired, "not_after %s has passed by the journal, which forgot commands up to %s",
			notAfter.UTC().Format(time.RFC3339), j.forgot.UTC().Format(time.RFC3339))
	}
	if err := j.put(&Entry{ID: id, Digest: digest, State: Received, NotAfter: notAfter, Command: c}, use); err != nil {
		return err
	}
	if use != nil {
		j.add(id, *use)
	}
	return nil
}

// Started notes that effects may follow.
func (j *Journal) Started(id string) error {
	return j.Begun(id, nil)
}

// Begun is Started for a command that was judged once more when its turn came: use
// takes the place of what Admitted kept; nil: that stays.
func (j *Journal) Begun(id string, use *grants.Use) error {
	return j.move(id, Started, nil, use, Received)
}

// Done notes a command's one result.
func (j *Journal) Done(id string, result *agentv1.CommandResult) error {
	return j.move(id, Done, result, nil, Received, Started)
}

// Cancelled notes that a command was cancelled before it started, or before it
// came at all; such a one is remembered until notAfter, the latest that it
// can still be valid.
func (j *Journal) Cancelled(id string, notAfter time.Time, result *agentv1.CommandResult) error {
	j.mu.Lock()
	_, known := j.entries[id]
	if !known {
		defer j.mu.Unlock()
		return j.put(&Entry{ID: id, State: Cancelled, NotAfter: notAfter, Result: result}, nil)
	}
	j.mu.Unlock()
	return j.move(id, Cancelled, result, nil, Received)
}

// Acked notes that the gateway has the result. It is no error to say so twice.
func (j *Journal) Acked(id string) error {
	if e, ok := j.Get(id); ok && e.State == Acked {
		return nil
	}
	return j.move(id, Acked, nil, nil, Done, Cancelled)
}

func (j *Journal) move(id string, to State, result *agentv1.CommandResult, use *grants.Use, from ...State) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	e, ok := j.entries[id]
	if !ok {
		return errs.New(errs.Internal, "journal: command %s is unknown", id)
	}
	for _, s := range from {
		if e.State == s {
			next := *e
			next.State = to
			switch to {
			case Done, Cancelled:
				next.Command, next.Result = nil, result
			case Acked:
				next.Command, next.Result = nil, nil
			}
			if err := j.put(&next, use); err != nil {
				return err
			}
			if use != nil {
				j.replace(id, *use)
			}
			j.settle(id, s, to)
			return nil
		}
	}
	return errs.New(errs.Internal, "journal: command %s cannot go from %s to %s", id, e.State, to)
}

// put writes e's step, and what the command uses, and then makes it the truth.
// The caller holds mu.
func (j *Journal) put(e *Entry, use *grants.Use) error {
	old, known := j.entries[e.ID]
	if !known && len(j.entries) >= maxEntries {
		return errs.Retry(errs.LaneFull, "the journal holds %d commands and takes no more for now", maxEntries)
	}
	if j.log != nil {
		r, err := encode(e, known && old.State != e.State, use)
		if err != nil {
			return err
		}
		if err := j.log.Append(r, true); err != nil {
			return errs.Retry(errs.NoSpace, "journal: %v", err)
		}
	}
	j.entries[e.ID] = e
	if !known {
		j.order = append(j.order, e.ID)
	}
	return nil
}

// encode makes e's record; a step of a known command leaves out what an
// earlier record of it said.
func encode(e *Entry, step bool, use *grants.Use) ([]byte, error) {
	r := record{Type: string(e.State), ID: e.ID, Use: use}
	if !step {
		r.NotAfterMS = e.NotAfter.UnixMilli()
		if e.Digest != [32]byte{} {
			r.Digest = e.Digest[:]
		}
	}
	var err error
	if e.Command != nil && !step {
		if r.Command, err = proto.Marshal(e.Command); err != nil {
			return nil, fmt.Errorf("encode command %s: %w", e.ID, err)
		}
	}
	if e.Result != nil {
		if r.Result, err = proto.Marshal(e.Result); err != nil {
			return nil, fmt.Errorf("encode result of %s: %w", e.ID, err)
		}
	}
	return json.Marshal(r)
}

// Compact forgets tombstones whose time has passed at now, which must be
// gateway time: an unset clock could forget too early. It rewrites the file
// once that is worth it.
func (j *Journal) Compact(now time.Time) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	forgot, order := j.forgot, j.order[:0:0]
	var gone []string
	for _, id := range j.order {
		if e := j.entries[id]; e.State == Acked && now.After(e.NotAfter.Add(tombstoneLife)) {
			gone = append(gone, id)
			if e.NotAfter.After(forgot) {
				forgot = e.NotAfter
			}
			continue
		}
		order = append(order, id)
	}
	if j.log != nil && forgot.After(j.forgot) {
		// Before they go: no cut may leave neither.
		r, err := json.Marshal(record{Type: "forgot", NotAfterMS: forgot.UnixMilli()})
		if err == nil {
			err = j.log.Append(r, true)
		}
		if err != nil {
			return fmt.Errorf("compact journal: %w", err)
		}
	}
	for _, id := range gone {
		delete(j.entries, id)
	}
	j.forgot, j.order = forgot, order
	if err := j.forgetGrants(now); err != nil {
		return err
	}
	if j.log == nil || j.log.Size() < compactBytes {
		return nil
	}
	records := j.records()
	var live int64
	for _, r := range records {
		live += int64(len(r))
	}
	if j.log.Size() < 2*live {
		return nil
	}
	if err := j.log.Replace(records); err != nil {
		return fmt.Errorf("compact journal: %w", err)
	}
	return nil
}

// records is the whole journal in its shortest form.
func (j *Journal) records() [][]byte {
	// These encode strings, byte slices and messages that were decoded or
	// encoded before: they cannot fail.
	head, _ := json.Marshal(record{Type: "epoch", Epoch: j.epoch})
	records := [][]byte{head}
	if !j.forgot.IsZero() {
		forgot, _ := json.Marshal(record{Type: "forgot", NotAfterMS: j.forgot.UnixMilli()})
		records = append(records, forgot)
	}
	for _, id := range j.order {
		if r, err := encode(j.entries[id], false, nil); err == nil {
			records = append(records, r)
		}
	}
	return append(records, j.ledger.records()...)
}

// Close releases the file.
func (j *Journal) Close() error {
	if j.log == nil {
		return nil
	}
	return j.log.Close()
}
