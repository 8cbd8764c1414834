package sessions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

const (
	// maxEventBatch is how many waiting events share one commit.
	maxEventBatch = 64
	maxBatchBytes = 4 << 20
	maxEventBody  = 256 << 10
	maxMessage    = 4 << 10
	maxResult     = 4 << 20
	// maxReports bounds the events of a machine that nobody enrolled, in reportsEvery,
	// and maxHardware the reports of hardware beside them that are of one identity.
	maxReports   = 256
	maxHardware  = 8
	reportsEvery = time.Hour
	// seenEvery is how often a heartbeat alone moves the time last seen.
	seenEvery = time.Minute
)

// serve says Welcome and then moves frames both ways.
func (x *session) serve(ctx context.Context, frames <-chan received, hello *agentv1.Hello) (*agentv1.Close, error) {
	s := x.service
	wake, stop := s.commands.Watch(x.agent.ID)
	defer stop()
	x.credits = hello.Lanes
	if err := x.send(&agentv1.GatewayFrame{Frame: &agentv1.GatewayFrame_Welcome{Welcome: &agentv1.Welcome{
		SessionId:     x.id,
		SessionEpoch:  x.agent.SessionEpoch,
		Protocol:      Protocol,
		ServerTimeMs:  s.store.Now().UnixMilli(),
		HeartbeatS:    uint32(max(s.timing.Heartbeat, time.Second) / time.Second),
		AckedEventSeq: x.agent.EventAcked,
		BundleVersion: s.version,
		// What the agent fetched since it enrolled is not known here: it skips those.
		Bundles: s.bundles.After(x.agent.BundleVersion),
	}}}); err != nil {
		return nil, fmt.Errorf("send welcome: %w", err)
	}
	held := map[string]bool{}
	for _, o := range hello.Open {
		held[o.CommandId] = true
	}
	if err := x.resume(ctx, held); err != nil {
		return nil, err
	}
	if err := x.deliver(ctx); err != nil {
		return nil, err
	}
	dead := time.NewTimer(s.timing.Dead)
	defer dead.Stop()
	beat := time.NewTimer(jitter(s.timing.Heartbeat))
	defer beat.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case reason := <-x.end:
			return reason, nil
		case <-dead.C:
			return closing(errs.Timeout, 0, "nothing was heard for %s", s.timing.Dead), nil
		case <-beat.C:
			if err := x.heartbeat(); err != nil {
				return nil, err
			}
			beat.Reset(jitter(s.timing.Heartbeat))
		case <-wake:
			if err := x.deliver(ctx); err != nil {
				return nil, err
			}
		case f := <-frames:
			f.done()
			if f.err != nil {
				return nil, f.err
			}
			dead.Reset(s.timing.Dead)
			if reason, err := x.take(ctx, f.frame, frames); reason != nil || err != nil {
				return reason, err
			}
		}
	}
}

// jitter spreads d by a fifth to both sides.
func jitter(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.8 + 0.4*rand.Float64()))
}

func (x *session) heartbeat() error {
	x.seq++
	err := x.send(&agentv1.GatewayFrame{Frame: &agentv1.GatewayFrame_Heartbeat{Heartbeat: &agentv1.Heartbeat{Seq: x.seq, Echo: x.echo, ServerTimeMs: x.service.store.Now().UnixMilli()}}})
	if err != nil {
		return fmt.Errorf("send heartbeat: %w", err)
	}
	return nil
}

// resume counts the commands that the agent holds against their lanes, and
// sends again, whatever the credits say, those that an earlier session handed
// out and that the agent may not have: it knows a repeat by its digest.
func (x *session) resume(ctx context.Context, held map[string]bool) error {
	open, err := x.service.store.OpenCommands(ctx, x.agent.ID)
	if err != nil {
		return fmt.Errorf("list open commands: %w", err)
	}
	for _, c := range open {
		switch {
		case held[c.ID]:
			x.sent[c.ID] = c.Lane
		case c.State != store.CommandQueued && x.service.store.Now().Before(c.NotAfter):
			x.sent[c.ID] = c.Lane
			if err := x.sendCommand(c); err != nil {
				return err
			}
		}
	}
	return nil
}

// deliver hands out what waits, in order, as far as each lane's credits go,
// and passes cancellations on.
func (x *session) deliver(ctx context.Context) error {
	s := x.service
	open, err := s.store.OpenCommands(ctx, x.agent.ID)
	if err != nil {
		return fmt.Errorf("list open commands: %w", err)
	}
	used := map[string]uint32{}
	still := map[string]string{}
	for _, c := range open {
		// What ended without a result, by its deadline for example, gives its place back.
		if lane, ok := x.sent[c.ID]; ok {
			still[c.ID] = lane
			used[lane]++
		}
	}
	x.sent = still
	for _, c := range open {
		_, out := x.sent[c.ID]
		if !out && c.Incarnation == x.agent.Incarnation() && c.State == store.CommandQueued && used[c.Lane] < x.credits[c.Lane] && s.store.Now().Before(c.NotAfter) {
			// Kept before it leaves: from here on the agent may have it.
			err := s.commands.Moved(ctx, x.agent.ID, c.ID, store.CommandSent)
			if errors.Is(err, store.ErrConflict) {
				continue // it ended meanwhile
			}
			if err != nil {
				return fmt.Errorf("record delivery of %s: %w", c.ID, err)
			}
			x.sent[c.ID] = c.Lane
			used[c.Lane]++
			if err := x.sendCommand(c); err != nil {
				return err
			}
			out = true
		}
		if out && c.Cancel && !x.canceled[c.ID] {
			x.canceled[c.ID] = true
			if err := x.send(&agentv1.GatewayFrame{Frame: &agentv1.GatewayFrame_Cancel{Cancel: &agentv1.Cancel{CommandId: c.ID}}}); err != nil {
				return fmt.Errorf("send cancel: %w", err)
			}
		}
	}
	return nil
}

func (x *session) sendCommand(c store.Command) error {
	if err := x.send(&agentv1.GatewayFrame{Frame: &agentv1.GatewayFrame_Command{Command: c.Signed}}); err != nil {
		return fmt.Errorf("send command %s: %w", c.ID, err)
	}
	x.log.Debug("command sent", "command", c.ID, "kind", c.Kind)
	return nil
}

// take handles one frame, and with an event those that wait behind it.
func (x *session) take(ctx context.Context, f *agentv1.AgentFrame, frames <-chan received) (*agentv1.Close, error) {
	s := x.service
	switch m := f.GetFrame().(type) {
	case *agentv1.AgentFrame_Heartbeat:
		x.echo = m.Heartbeat.Seq
		if now := s.store.Now(); now.Sub(x.lastSeen) >= seenEvery {
			x.lastSeen = now
			if err := s.store.Seen(ctx, x.agent.ID); err != nil {
				return nil, fmt.Errorf("record heartbeat: %w", err)
			}
		}
	case *agentv1.AgentFrame_Credit:
		if len(m.Credit.Lanes) > 64 {
			return closing(errs.InvalidPayload, time.Minute, "Credit lists too many lanes"), nil
		}
		// Absolute, for the lanes that are named.
		merged := map[string]uint32{}
		for lane, n := range x.credits {
			merged[lane] = n
		}
		for lane, n := range m.Credit.Lanes {
			merged[lane] = n
		}
		if len(merged) > 64 {
			return closing(errs.InvalidPayload, time.Minute, "too many lanes"), nil
		}
		x.credits = merged
		return nil, x.deliver(ctx)
	case *agentv1.AgentFrame_Ack:
		err := s.commands.Moved(ctx, x.agent.ID, m.Ack.CommandId, store.CommandReceived)
		if err != nil && !errors.Is(err, store.ErrConflict) {
			return nil, fmt.Errorf("record ack: %w", err)
		}
	case *agentv1.AgentFrame_Progress:
		if _, ok := x.sent[m.Progress.CommandId]; ok {
			s.commands.Report(m.Progress)
		}
	case *agentv1.AgentFrame_Result:
		return x.result(ctx, m.Result)
	case *agentv1.AgentFrame_Event:
		return x.events(ctx, m.Event, frames)
	case *agentv1.AgentFrame_Hello:
		return closing(errs.InvalidPayload, time.Minute, "a second Hello"), nil
	default:
		return closing(errs.InvalidPayload, time.Minute, "a frame that this version does not know"), nil
	}
	return nil, nil
}

// result keeps a command's outcome and acknowledges it after the commit. A
// result for a command that has its outcome, or that was never this agent's,
// is acknowledged too and changes nothing: the agent repeats it until then.
func (x *session) result(ctx context.Context, r *agentv1.CommandResult) (*agentv1.Close, error) {
	s := x.service
	var outcome *errs.Error
	switch o := r.Outcome.(type) {
	case *agentv1.CommandResult_Result:
		if len(o.Result) > maxResult {
			outcome = errs.New(errs.InvalidPayload, "the agent's result of %d bytes is over %d", len(o.Result), maxResult)
			r.Outcome = nil
		}
	case *agentv1.CommandResult_Error:
		outcome = &errs.Error{Code: errs.Code(cut(o.Error.GetCode(), 128)), Message: cut(o.Error.GetMessage(), maxMessage), Retryable: o.Error.GetRetryable()}
		if outcome.Code == "" {
			outcome.Code = errs.Internal
		}
	default:
		return closing(errs.InvalidPayload, time.Minute, "a Result without an outcome"), nil
	}
	err := s.commands.Finish(ctx, x.agent.ID, r.CommandId, r.GetResult(), outcome)
	switch {
	case errors.Is(err, store.ErrConflict):
		x.log.Info("result of a command that has its outcome", "command", cut(r.CommandId, 128))
	case err != nil:
		return nil, fmt.Errorf("keep result of %s: %w", r.CommandId, err)
	}
	delete(x.sent, r.CommandId)
	delete(x.canceled, r.CommandId)
	if err := x.send(&agentv1.GatewayFrame{Frame: &agentv1.GatewayFrame_ResultAck{ResultAck: &agentv1.ResultAck{CommandId: r.CommandId}}}); err != nil {
		return nil, fmt.Errorf("send result ack: %w", err)
	}
	return nil, x.deliver(ctx)
}

// cut is at most n bytes of s, and never half of a letter: who lists it later
// could not encode it.
func cut(s string, n int) string { return strings.ToValidUTF8(s[:min(len(s), n)], "") }

// events keeps one event and those that wait behind it in one commit, then
// acknowledges the last, then tells the hooks.
func (x *session) events(ctx context.Context, first *agentv1.Event, frames <-chan received) (*agentv1.Close, error) {
	batch, size := []*agentv1.Event{first}, proto.Size(first)
	var after *received
	for after == nil && len(batch) < maxEventBatch && size < maxBatchBytes {
		select {
		case f := <-frames:
			f.done()
			size += proto.Size(f.frame)
			if e := f.frame.GetEvent(); f.err == nil && e != nil {
				batch = append(batch, e)
			} else {
				after = &f
			}
		default:
			after = &received{}
		}
	}
	if x.agent.IsStranger() && !x.service.mayReport(x.agent, batch) {
		return closing(errs.RateLimited, reportsEvery, "more than %d events in %s of a machine that nobody enrolled", maxReports, reportsEvery), nil
	}
	for i, e := range batch {
		if e.Seq == 0 {
			return closing(errs.InvalidPayload, time.Minute, "an event without a sequence"), nil
		}
		if why := eventFault(e); why != "" {
			x.log.Warn("event replaced", "name", cut(e.Name, 128), "reason", why)
			batch[i] = refusedEvent(e, why)
		}
	}
	fresh, acked, err := x.service.store.AddAgentEvents(ctx, x.agent.ID, batch)
	if err != nil {
		return nil, fmt.Errorf("keep events: %w", err)
	}
	if err := x.send(&agentv1.GatewayFrame{Frame: &agentv1.GatewayFrame_EventAck{EventAck: &agentv1.EventAck{Seq: acked}}}); err != nil {
		return nil, fmt.Errorf("send event ack: %w", err)
	}
	for _, e := range fresh {
		for _, f := range x.service.onEvent {
			f(ctx, x.agent.ID, e)
		}
	}
	switch {
	case after == nil || after.frame == nil && after.err == nil:
		return nil, nil
	case after.err != nil:
		return nil, after.err
	}
	return x.take(ctx, after.frame, frames)
}

// eventFault says what is wrong with an event, or nothing.
func eventFault(e *agentv1.Event) string {
	switch {
	case e.Name == "" || len(e.Name) > 128 || len(e.Key) > 512:
		return "its name or key is missing or too long"
	case e.Class != "state" && e.Class != "telemetry" && e.Class != "audit":
		return "its class is not state, telemetry or audit"
	case len(e.BodyJson) > maxEventBody:
		return fmt.Sprintf("its body of %d bytes is over %d", len(e.BodyJson), maxEventBody)
	case len(e.BodyJson) > 0 && (!json.Valid(e.BodyJson) || !utf8.Valid(e.BodyJson)):
		// json.Valid lets any bytes stand in a string; a list of events with them
		// in it could not be encoded.
		return "its body is not JSON in UTF-8"
	}
	return ""
}

// refusedEvent stands in for an event that cannot be kept, so that it leaves
// the agent's queue, which would else stand still behind it for ever.
func refusedEvent(e *agentv1.Event, why string) *agentv1.Event {
	body, _ := json.Marshal(map[string]string{"name": cut(e.Name, 128), "reason": why}) // strings always encode
	return &agentv1.Event{Seq: e.Seq, AtMs: e.AtMs, Name: "event.refused", Class: "audit", BodyJson: body}
}
