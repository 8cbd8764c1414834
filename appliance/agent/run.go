package agent

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"regexp"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/agent/enroll"
	"github.com/better-compute/site-appliance/appliance/agent/outbox"
	"github.com/better-compute/site-appliance/appliance/agent/session"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/agentv1/agentv1connect"
	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

const (
	// callWithin bounds one enrolment or renewal.
	callWithin = 30 * time.Second
	// compactEvery spaces the journal's housekeeping.
	compactEvery = time.Hour
)

// Run enrols and stays home until ctx ends; nothing that a gateway, a network
// or a disk does ends it. It may be called once.
func (a *Agent) Run(ctx context.Context) error {
	var owned sync.WaitGroup
	defer a.close()
	defer a.client.CloseIdleConnections()
	defer a.tunnels.CloseIdleConnections()
	defer owned.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	owned.Go(func() {
		if err := a.dispatch.Run(ctx); err != nil {
			a.log.Error("dispatcher stopped", "error", err)
		}
	})
	if a.identity.Load() == nil {
		if err := a.enrolUntilDone(ctx); err != nil {
			return err
		}
	}
	a.log.Info("agent is enrolled", "agent", a.AgentID(), "site", a.SiteID(), "machine", a.MachineID())
	owned.Go(func() { a.renewWhenDue(ctx) })
	owned.Go(func() { a.compactNowAndThen(ctx) })
	return session.Run(ctx, session.Config{
		Connect:  a.connect,
		Hello:    a.hello,
		Welcomed: a.welcomed,
		Time:     a.takeTime,
		Work:     a.dispatch,
		Events:   a.outbox,
		Wake:     a.wake,
		Ended:    a.ended,
		Up:       a.up,
		Log:      a.log,
	})
}

// request is what this agent would enrol with, and where.
func (a *Agent) request() (r enroll.Request, caSPKI [32]byte, urls []string, err error) {
	r = enroll.Request{
		Role: a.cfg.Role, ProductUUID: a.cfg.ProductUUID, MACs: a.cfg.MACs, Version: a.cfg.Version,
	}
	switch boot, join := a.cfg.Boot, a.cfg.Join; {
	case boot != nil:
		if len(boot.RootSet) != 32 || len(boot.CASPKI) != 32 || len(boot.GatewayURLs) == 0 {
			return r, caSPKI, nil, errs.New(errs.InvalidConfig, "the boot file lacks pins or gateway URLs")
		}
		if r.Voucher, err = enroll.VoucherFrom(boot.Voucher); err != nil {
			return r, caSPKI, nil, err
		}
		r.RootSet, r.SiteID = [32]byte(boot.RootSet), boot.SiteID
		return r, [32]byte(boot.CASPKI), boot.GatewayURLs, nil
	case join != nil:
		r.Token, r.RootSet, r.SiteID = join.Token.Reveal(), join.RootSet, join.SiteID
		return r, join.CASPKI, join.URLs, nil
	}
	return r, caSPKI, nil, errs.New(errs.NotEnrolled, "there is neither an identity nor a join string")
}

func (a *Agent) enrolUntilDone(ctx context.Context) error {
	policy := backoff.Policy{Min: time.Second, Max: time.Minute, Rand: rand.Float64}
	for n := 0; ; n++ {
		err := a.enrolOnce(ctx, n)
		if err == nil {
			a.calm("enrolment")
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		a.trouble("enrolment", err)
		if err := policy.Wait(ctx, n, a.wake); err != nil {
			return err
		}
	}
}

// enrolOnce asks one gateway URL for an identity and puts it in force.
func (a *Agent) enrolOnce(ctx context.Context, n int) error {
	r, caSPKI, urls, err := a.request()
	if err != nil {
		return err
	}
	pending, err := a.store.Pending(r.Origin())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	transport := a.transport(a.pinned(caSPKI))
	defer transport.CloseIdleConnections()
	client := agentv1connect.NewEnrolmentServiceClient(
		&http.Client{Transport: transport, CheckRedirect: noRedirect}, urls[n%len(urls)], clientOptions)
	id, err := enroll.Enroll(ctx, client, a.clock, r, pending)
	if err != nil {
		return err
	}
	a.heard.Store(true)
	a.replace(func(old *enroll.Identity) *enroll.Identity {
		if old != nil {
			id.Serial = old.Serial + 1
		}
		return id
	})
	a.saveFloor()
	return nil
}

// replace puts another identity in force and keeps it.
func (a *Agent) replace(next func(old *enroll.Identity) *enroll.Identity) {
	a.change.Lock()
	defer a.change.Unlock()
	id := next(a.identity.Load())
	a.identity.Store(id)
	// Later connections show the new certificate and trust the new bundle.
	a.client.CloseIdleConnections()
	a.tunnels.CloseIdleConnections()
	fatal, partial := a.store.Save(id)
	if err := errors.Join(fatal, partial); err != nil {
		a.complain("state.degraded", "identity", err)
	}
	select {
	case a.renewed <- struct{}{}:
	default:
	}
}

// rejoin follows a join string that differs from the one that the identity
// came from. The old identity stays in force until the new one is there.
func (a *Agent) rejoin(ctx context.Context) {
	r, _, _, err := a.request()
	id := a.identity.Load()
	if err != nil || id.Origin == r.Origin() || a.rejoined.Load() {
		return
	}
	a.log.Info("the join string is another one than this agent enrolled with; enrolling anew")
	if err := a.enrolOnce(ctx, 0); err != nil {
		a.trouble("enrolment", fmt.Errorf("enrol with the new join string; the old identity stays: %w", err))
		var refused *connect.Error
		if errors.As(err, &refused) && (refused.Code() == connect.CodePermissionDenied || refused.Code() == connect.CodeUnauthenticated) {
			a.rejoined.Store(true)
		}
		return
	}
	a.calm("enrolment")
}

// connect opens a stream on a connection of its own: an attempt after a dead
// line must not find that line again, and bulk must not stand in its way.
func (a *Agent) connect(ctx context.Context) (session.Stream, error) {
	a.rejoin(ctx)
	transport := a.transport(a.mutual)
	context.AfterFunc(ctx, transport.CloseIdleConnections)
	client := agentv1connect.NewSessionServiceClient(
		&http.Client{Transport: transport, CheckRedirect: noRedirect}, a.BaseURL(), clientOptions)
	return closing{client.Connect(ctx), transport}, nil
}

// closing ends a session's connection with its stream.
type closing struct {
	*connect.BidiStreamForClient[agentv1.AgentFrame, agentv1.GatewayFrame]
	transport *http.Transport
}

func (c closing) CloseResponse() error {
	defer c.transport.CloseIdleConnections()
	return c.BidiStreamForClient.CloseResponse()
}

func (a *Agent) hello() *agentv1.Hello {
	return &agentv1.Hello{
		AgentId: a.AgentID(), Role: a.cfg.Role, BootId: a.bootID, JournalEpoch: a.journal.Epoch(),
		ProtocolMin: enroll.ProtocolMin, ProtocolMax: enroll.ProtocolMax, Version: a.cfg.Version,
		Drivers: a.cfg.Drivers, Capabilities: a.cfg.Capabilities, ClockSource: a.clockSource(),
	}
}

func (a *Agent) clockSource() string {
	switch {
	case a.heard.Load():
		return "gateway"
	case a.clock.Now().Equal(a.clock.Floor()):
		return "floor"
	}
	return "rtc"
}

func (a *Agent) welcomed(w *agentv1.Welcome) error {
	if p := w.GetProtocol(); p < enroll.ProtocolMin || p > enroll.ProtocolMax {
		return errs.New(errs.ProtocolUnsupported, "the gateway chose protocol %d; %d to %d are spoken here", p, enroll.ProtocolMin, enroll.ProtocolMax)
	}
	a.reached.Store(true)
	a.takeTime(time.UnixMilli(w.GetServerTimeMs()))
	a.welcome() // also where the clock refused the time: there is no better one
	for i, signed := range w.GetBundles() {
		if err := a.takeBundle(signed, i == len(w.GetBundles())-1); err != nil {
			// The bundle in force stays, and with it the line.
			a.trouble("trust", err)
			break
		}
	}
	return nil
}

// takeBundle puts the next bundle in force. Only the last one handed out must
// not have run out.
func (a *Agent) takeBundle(signed *agentv1.SignedBundle, last bool) error {
	current := a.Bundle()
	if v := trust.PeekVersion(signed); v != 0 && v <= current.Version() {
		return nil
	}
	next, err := current.VerifyMissed(signed)
	if last && err == nil {
		next, err = current.VerifyNext(signed, a.clock.Now())
	}
	if err != nil {
		return fmt.Errorf("refuse a trust bundle from the gateway: %w", err)
	}
	a.replace(func(old *enroll.Identity) *enroll.Identity { return old.WithBundle(next) })
	a.log.Info("trust bundle is in force", "version", next.Version())
	a.calm("trust")
	if err := a.Emit("bundle.applied", outbox.Audit, fmt.Sprint(next.Version()), map[string]uint64{"version": next.Version()}); err != nil {
		a.log.Error("event not kept", "event", "bundle.applied", "error", err)
	}
	return nil
}

func (a *Agent) takeTime(server time.Time) {
	if err := a.clock.Verified(server); err != nil {
		a.trouble("clock", fmt.Errorf("refuse the gateway's time: %w", err))
		return
	}
	a.heard.Store(true)
	a.calm("clock")
	a.saveFloor()
}

func (a *Agent) up(online bool) {
	a.online.Store(online)
	if online {
		a.calm("line")
	}
}

func (a *Agent) ended(err error) {
	if !a.reached.Swap(false) {
		a.url.Add(1) // try the next URL, whatever was wrong with this one
	}
	a.trouble("line", err)
}

// renewWhenDue renews the certificate from half of its life on.
func (a *Agent) renewWhenDue(ctx context.Context) {
	policy := backoff.Policy{Min: time.Minute, Max: time.Hour, Rand: rand.Float64}
	jitter := rand.Float64()
	for n := 0; ctx.Err() == nil; {
		id := a.identity.Load()
		due := id.RenewAt(jitter).Sub(a.clock.Now())
		if due > 0 {
			// The clock may step when a gateway is heard: look again now and then.
			if (backoff.Policy{Min: min(due, time.Hour), Max: time.Hour}).Wait(ctx, 0, a.renewed) != nil {
				return
			}
			continue
		}
		if _, renewable := id.Lapsed(a.clock.Now()); !renewable {
			a.trouble("renewal", errs.New(errs.NotEnrolled, "the certificate ended on %s, over %d days ago: a new join string is needed",
				id.Leaf.NotAfter.UTC().Format(time.DateOnly), int(enroll.Grace.Hours()/24)))
		} else if err := a.renewOnce(ctx, id); err != nil {
			a.trouble("renewal", err)
		} else {
			a.calm("renewal")
			n, jitter = 0, rand.Float64()
			continue
		}
		if policy.Wait(ctx, n, a.renewed) != nil {
			return
		}
		n++
	}
}

func (a *Agent) renewOnce(ctx context.Context, id *enroll.Identity) error {
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	next, err := enroll.Renew(ctx, agentv1connect.NewEnrolmentServiceClient(a.client, a.BaseURL(), clientOptions), a.clock, id)
	if err != nil {
		return err
	}
	a.replace(func(old *enroll.Identity) *enroll.Identity {
		if old.AgentID != next.AgentID {
			return old // another enrolment came in between
		}
		merged := *next
		merged.Bundle, merged.Serial = old.Bundle, old.Serial+1
		return &merged
	})
	a.log.Info("certificate renewed", "until", next.Leaf.NotAfter.UTC().Format(time.RFC3339))
	return nil
}

// compactNowAndThen forgets tombstones, by gateway time alone, and keeps the clock's floor.
func (a *Agent) compactNowAndThen(ctx context.Context) {
	tick := time.NewTicker(compactEvery)
	defer tick.Stop()
	floor := time.NewTicker(saveFloorEvery)
	defer floor.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-floor.C:
			if a.heard.Load() {
				a.saveFloor()
			}
		case <-tick.C:
			if !a.heard.Load() {
				continue
			}
			if err := a.journal.Compact(a.forgettable()); err != nil {
				a.trouble("journal", err)
			}
		}
	}
}

// forgettable is gateway time as far as the floor believes it: what the journal
// forgets up to it takes no more commands from, and a gateway that said next year
// must not keep the box from its next, honest one for so long.
func (a *Agent) forgettable() time.Time {
	now, passed := a.clock.Now(), a.clock.Passed()
	if passed.Before(now) {
		return passed
	}
	return now
}

// troubles remembers what was said last of each part, so that an outage of a
// week is one line and not ten thousand.
type troubles struct {
	mu   sync.Mutex
	last map[string]string
}

// ephemeral is what differs between two reports of one fault: the near end of a
// connection, and the name of a file that was to take another's place.
var ephemeral = regexp.MustCompile(`[0-9a-fA-F.:\[\]]+:\d+->|\.tmp\d+`)

// trouble logs a fault of a part and leaves a state event, once per distinct fault.
func (a *Agent) trouble(part string, err error) {
	reason := ephemeral.ReplaceAllString(err.Error(), "")
	a.troubles.mu.Lock()
	if a.troubles.last == nil {
		a.troubles.last = map[string]string{}
	}
	known := a.troubles.last[part] == reason
	a.troubles.last[part] = reason
	a.troubles.mu.Unlock()
	if known {
		return
	}
	a.log.Error(part+" failed; it is tried again", "reason", reason)
	if err := a.Emit(part+".failed", outbox.State, part, map[string]string{"reason": reason}); err != nil {
		a.log.Error("event not kept", "event", part+".failed", "error", err)
	}
}

// calm ends a part's trouble.
func (a *Agent) calm(part string) {
	a.troubles.mu.Lock()
	reason, ok := a.troubles.last[part]
	delete(a.troubles.last, part)
	a.troubles.mu.Unlock()
	if !ok {
		return
	}
	a.log.Info(part+" works again", "after", reason)
	if err := a.Emit(part+".restored", outbox.State, part, map[string]string{"after": reason}); err != nil {
		a.log.Error("event not kept", "event", part+".restored", "error", err)
	}
}
