package dispatch

import (
	"crypto/sha256"
	"maps"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent/journal"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

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
	d.told = d.credits()
	d.peak = maps.Clone(d.told)
	return open, maps.Clone(d.told)
}

// credits are how many commands of each lane may be open. The caller holds mu.
func (d *Dispatcher) credits() map[string]uint32 {
	credits := map[string]uint32{}
	for lane := range d.lanes {
		credits[lane] = d.credit(lane)
	}
	return credits
}

// credit is what the lane runs, what leaves its slots to others for now, and what
// gave up its place. The caller holds mu.
func (d *Dispatcher) credit(lane string) uint32 {
	return uint32(d.lanes[lane] + min(d.aside[lane], maxAside) + d.apart[lane])
}

// Frames returns what is due to the gateway now, at most a few at a time where
// results are large; Wake fires when there is more.
func (d *Dispatcher) Frames() []*agentv1.AgentFrame {
	d.mu.Lock()
	defer d.mu.Unlock()
	frames := d.replies
	d.replies = nil
	changed := d.credits()
	maps.DeleteFunc(changed, func(lane string, n uint32) bool { return d.told[lane] == n })
	if len(changed) > 0 {
		maps.Copy(d.told, changed)
		for lane, n := range changed {
			d.peak[lane] = max(d.peak[lane], n)
		}
		frames = append(frames, &agentv1.AgentFrame{Frame: &agentv1.AgentFrame_Credit{Credit: &agentv1.Credit{Lanes: changed}}})
	}
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

func failure(id string, e *errs.Error) *agentv1.CommandResult {
	return &agentv1.CommandResult{CommandId: id, Outcome: &agentv1.CommandResult_Error{
		Error: &agentv1.Error{Code: string(e.Code), Message: text(e.Message), Retryable: e.Retryable},
	}}
}

// text makes words that a BMC or a plugin may have chosen fit for a frame: one
// that cannot be encoded, or that the gateway finds too large, would end this
// session and every later one, since a result is repeated until it is acked.
func text(s string) string {
	return strings.ToValidUTF8(s[:min(len(s), maxTextBytes)], "?")
}
