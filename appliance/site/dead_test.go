package site

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/agenttest"
	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/agent/journal"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/bmc/relay"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// rack is a site's BMCs: those whose address begins with 10.0.1 are dead.
type rack struct {
	mu    sync.Mutex
	seen  map[string][]string // commands by address, in their order
	now   int
	most  int
	asked int // dead ones by a driver
}

func dead(address string) bool { return strings.HasPrefix(address, "10.0.1.") }

func (r *rack) call(ctx context.Context, config json.RawMessage, id string) error {
	var c struct{ Address string }
	if err := json.Unmarshal(config, &c); err != nil {
		return err
	}
	r.mu.Lock()
	r.seen[c.Address] = append(r.seen[c.Address], id)
	r.now++
	r.most = max(r.most, r.now)
	if dead(c.Address) {
		r.asked++
	}
	r.mu.Unlock()
	defer func() { r.mu.Lock(); r.now--; r.mu.Unlock() }()
	if dead(c.Address) {
		time.Sleep(30 * time.Second)
		return errs.Retry(errs.Unreachable, "no answer")
	}
	time.Sleep(100 * time.Millisecond)
	return nil
}

// Invoke is the hosted driver ipmi.
func (r *rack) Invoke(ctx context.Context, c relay.Call) (json.RawMessage, error) {
	return json.RawMessage("null"), r.call(ctx, c.Config, c.IdempotencyKey)
}

func (r *rack) RetrySafe(string, string, string) (safe, known bool) { return true, true }

// slot is one BMC of the built-in driver.
type slot struct {
	r      *rack
	config json.RawMessage
}

func (s slot) GetPower(ctx *driver.Context) (metal.PowerState, error) {
	return metal.PowerOn, s.r.call(ctx, s.config, ctx.IdempotencyKey)
}
func (s slot) SetPower(*driver.Context, metal.PowerAction) error { return errors.New("not asked for") }
func (s slot) Insert(ctx *driver.Context, _ string) error {
	return s.r.call(ctx, s.config, ctx.IdempotencyKey)
}
func (s slot) Eject(ctx *driver.Context) error { return s.r.call(ctx, s.config, ctx.IdempotencyKey) }

// home is a gateway that sends in order, as far as a lane's credits go, and waits
// for results.
type home struct {
	*dispatch.Dispatcher
	mu      sync.Mutex
	credits map[string]uint32
	open    map[string]string // command -> lane
	queue   []*agentv1.SignedCommand
	ended   map[string]time.Time
	codes   map[string]string
}

func (h *home) pump() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, f := range h.Frames() {
		for lane, n := range f.GetCredit().GetLanes() {
			h.credits[lane] = n
		}
		if r := f.GetResult(); r != nil {
			delete(h.open, r.CommandId)
			h.ended[r.CommandId], h.codes[r.CommandId] = time.Now(), r.GetError().GetCode()
			h.ResultAcked(r.CommandId)
		}
	}
	used := map[string]uint32{}
	for _, lane := range h.open {
		used[lane]++
	}
	h.queue = slices.DeleteFunc(h.queue, func(c *agentv1.SignedCommand) bool {
		p := &agentv1.CommandPayload{}
		if err := proto.Unmarshal(c.Payload, p); err != nil {
			return true
		}
		if used[p.Lane] >= h.credits[p.Lane] {
			return false
		}
		used[p.Lane]++
		h.open[p.CommandId] = p.Lane
		h.Offer(c)
		return true
	})
}

// TestSixteenDeadBMCsStallNobody: sixteen BMCs that do not answer, four commands
// for each, come before live ones, in a lane of 64 and in one of 16. The live ones
// are served as if the dead were not there, each in its order, and the dead cost
// three waits each and no more.
func TestSixteenDeadBMCsStallNobody(t *testing.T) {
	authority := agenttest.NewAuthority(t)
	for _, tt := range []struct {
		name, driver, kind, lane, operation, args string
		before                                    bool          // the dead ones were found out before
		live                                      time.Duration // when all live ones have ended
		dead                                      time.Duration // when all dead ones have
		asked                                     int           // how often a dead one was asked by a driver
	}{
		{"redfish, lane of 64", "redfish", "bmc.query", "query", "power.getPower", ``, false, time.Second, 16 * time.Second, 0},
		{"redfish, lane of 16", "redfish", "bmc.media", "provision", "virtual-media.eject", ``, false, 2 * time.Second, 16 * time.Second, 0},
		{"ipmi, lane of 64", "ipmi", "bmc.query", "query", "power.getPower", ``, false, time.Second, 91 * time.Second, 48},
		// Over UDP only a call finds out: the first round waits for it, once.
		{"ipmi, lane of 16, known", "ipmi", "bmc.media", "provision", "virtual-media.eject", ``, true, 3 * time.Second, 125 * time.Second, 48},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := &rack{seen: map[string][]string{}}
				own, err := driver.Define(driver.Spec[json.RawMessage]{ID: "redfish", Version: "1.0.0", RunsOn: "site", Parse: func(raw json.RawMessage) (json.RawMessage, error) { return raw, nil },
					RetrySafe: metal.RetrySafe("power", "virtual-media")},
					driver.Implement(metal.PowerKind(), func(c json.RawMessage, _ *driver.Context) (metal.Power, error) { return slot{r, c}, nil }),
					driver.Implement(metal.VirtualMediaKind(), func(c json.RawMessage, _ *driver.Context) (metal.VirtualMedia, error) { return slot{r, c}, nil }))
				if err != nil {
					t.Fatal(err)
				}
				re := relay.New(relay.Options{Book: openBook(t), BuiltIn: []*driver.Definition{own}, Plugins: r, Knock: func(ctx context.Context, address string) error {
					if dead(address) {
						<-ctx.Done()
						return ctx.Err()
					}
					return nil
				}})
				j, err := journal.Open("")
				if err != nil {
					t.Fatal(err)
				}
				bundle := authority.Bundle(t, nil)
				d, err := dispatch.New(dispatch.Config{
					Role: agentv1.Role_ROLE_SITE, AgentID: func() string { return "ag_1" }, Incarnation: j.Epoch(), Kinds: BMCKinds(re), Journal: j,
					Bundle: func() *trust.Bundle { return bundle }, Now: time.Now, Log: slog.New(slog.DiscardHandler),
					Resolve: func(_ context.Context, _ string, refs []string) (map[string]secret.Value, error) {
						return map[string]secret.Value{refs[0]: secret.New([]byte(`{"username":"u","password":"p"}`))}, nil
					},
				})
				if err != nil {
					t.Fatal(err)
				}
				h := &home{Dispatcher: d, open: map[string]string{}, ended: map[string]time.Time{}, codes: map[string]string{}}
				_, h.credits = d.Begin()
				ctx, cancel := context.WithCancel(t.Context())
				var owned sync.WaitGroup
				owned.Go(func() { d.Run(ctx) })
				owned.Go(func() {
					for {
						select {
						case <-ctx.Done():
							return
						case <-d.Wake():
							h.pump()
						}
					}
				})
				defer owned.Wait()
				defer cancel()
				send := func(id, address string) {
					args, err := proto.Marshal(&bmcv1.BmcOperationRequest{Driver: tt.driver, Address: address, CredentialsRef: "secret://root/a", Operation: tt.operation, ArgsJson: tt.args})
					if err != nil {
						t.Fatal(err)
					}
					h.mu.Lock()
					defer h.mu.Unlock()
					h.queue = append(h.queue, authority.Seal(t, &agentv1.CommandPayload{
						CommandId: id, Kind: tt.kind, AgentId: "ag_1", Incarnation: j.Epoch(), Lane: tt.lane, IssuedAtMs: time.Now().UnixMilli(),
						NotAfterMs: time.Now().Add(time.Hour).UnixMilli(), SecretRefs: []string{"secret://root/a"}, Args: args,
					}))
				}
				const deadOnes, liveOnes, each, liveEach = 16, 40, 4, 2
				if tt.before {
					for n := range deadOnes {
						send(fmt.Sprintf("before_%d", n), fmt.Sprintf("10.0.1.%d", n+1))
					}
					h.pump()
					time.Sleep(31 * time.Second)
				}
				began := time.Now()
				for n := range deadOnes {
					for i := range each {
						send(fmt.Sprintf("dead_%d_%d", n, i), fmt.Sprintf("10.0.1.%d", n+1))
					}
				}
				for n := range liveOnes {
					for i := range liveEach {
						send(fmt.Sprintf("live_%d_%d", n, i), fmt.Sprintf("10.0.2.%d", n+1))
					}
				}
				h.pump()
				time.Sleep(5 * time.Minute)
				h.mu.Lock()
				defer h.mu.Unlock()
				var lastLive, lastDead time.Duration
				for id, at := range h.ended {
					switch {
					case strings.HasPrefix(id, "live"):
						lastLive = max(lastLive, at.Sub(began))
						if h.codes[id] != "" {
							t.Errorf("%s ended with %s", id, h.codes[id])
						}
					case strings.HasPrefix(id, "dead"):
						lastDead = max(lastDead, at.Sub(began))
						if h.codes[id] != string(errs.Unreachable) {
							t.Errorf("%s ended with %q, want unreachable", id, h.codes[id])
						}
					}
				}
				want := deadOnes*each + liveOnes*liveEach
				if tt.before {
					want += deadOnes
				}
				if len(h.ended) != want {
					t.Errorf("%d commands ended, want %d", len(h.ended), want)
				}
				if lastLive > tt.live || lastDead > tt.dead {
					t.Errorf("live BMCs were done after %s, dead ones after %s; want at most %s and %s", lastLive, lastDead, tt.live, tt.dead)
				}
				if r.asked != tt.asked {
					t.Errorf("drivers asked dead BMCs %d times, want %d", r.asked, tt.asked)
				}
				if limit := dispatch.DefaultLanes()[tt.lane]; r.most > limit {
					t.Errorf("%d ran together, the lane's cap is %d", r.most, limit)
				}
				for address, ids := range r.seen {
					if !slices.IsSortedFunc(ids, func(a, b string) int {
						return strings.Compare(a[strings.LastIndex(a, "_"):], b[strings.LastIndex(b, "_"):])
					}) && !dead(address) {
						t.Errorf("%s saw %q, want first in, first out", address, ids)
					}
				}
			})
		})
	}
}
