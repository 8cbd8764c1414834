package dispatch_test

import (
	"context"
	"crypto/ed25519"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent/agenttest"
	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/agent/grants"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/secret"
)

// approvers are two people whose keys the bundle holds.
type approvers []ed25519.PrivateKey

func newApprovers() approvers {
	return approvers{ed25519.NewKeyFromSeed(make([]byte, 32)), ed25519.NewKeyFromSeed(slices.Repeat([]byte{1}, 32))}
}

func (a approvers) bundle(t *testing.T, authority *agenttest.Authority) option {
	bundle := authority.Bundle(t, func(c *agentv1.TrustBundle) {
		for _, key := range a {
			c.ApproverKeys = append(c.ApproverKeys, key.Public().(ed25519.PublicKey))
		}
		c.ApproverThreshold = 2
	})
	return func(c *dispatch.Config) {
		c.Bundle = func() *trust.Bundle { return bundle }
		c.SiteID = func() string { return "site_1" }
	}
}

var fleet = func() []string {
	var out []string
	for n := range 30 {
		out = append(out, grants.BMC(fmt.Sprintf("10.0.0.1%02d:623", n)))
	}
	return out
}()

// grant has the people sign; begins and ends are from now.
func (a approvers) grant(t *testing.T, uses uint32, begins, ends time.Duration) *agentv1.SignedGrant {
	t.Helper()
	payload, err := grants.Encode(&agentv1.Grant{
		GrantId: "grant_1", SiteId: "site_1", Operations: []*agentv1.GrantOperation{{Kind: "test.do", Operation: "power.setPower", Action: "off"}},
		TargetsRoot: grants.Root(fleet), TargetCount: uint32(len(fleet)), UsesPerTarget: uses, Reason: "test",
		NotBeforeMs: time.Now().Add(begins).UnixMilli(), NotAfterMs: time.Now().Add(ends).UnixMilli(),
	})
	if err != nil {
		t.Fatal(err)
	}
	g := &agentv1.SignedGrant{Payload: payload}
	for _, key := range a {
		g.Signatures = append(g.Signatures, grants.Sign(key, payload))
	}
	return g
}

// powered is a kind whose args are "<fleet index> <action>".
func powered(run func(ctx context.Context, c dispatch.Call) ([]byte, error)) dispatch.Kind {
	k := kind(run)
	k.Decode = func(args []byte) (dispatch.Operation, error) {
		var n int
		var action string
		if _, err := fmt.Sscan(string(args), &n, &action); err != nil {
			return dispatch.Operation{}, err
		}
		return dispatch.Operation{
			Name: "power.setPower", Action: action, Key: fleet[n], Destructive: true, Counts: action != "on", Always: action == "flash", Targets: fleet[n : n+1],
		}, nil
	}
	return k
}

func (b *bench) send(id string, target int, action string, g *agentv1.SignedGrant) {
	b.t.Helper()
	p := b.payload(id, fmt.Sprint(target, " ", action))
	if g != nil {
		p.Grant = &agentv1.GrantCitation{Grant: g, Targets: []*agentv1.TargetProof{grants.Prove(fleet, target)}}
	}
	b.Offer(b.authority.Seal(b.t, p))
}

// TestWindowsOpenByRunningTime: the fifth target in ten minutes is refused, and so
// is the twentieth in a day.
func TestWindowsOpenByRunningTime(t *testing.T) {
	authority, people := agenttest.NewAuthority(t), newApprovers()
	path := filepath.Join(t.TempDir(), "journal")
	synctest.Test(t, func(t *testing.T) {
		b := start(t, authority, path, powered(done), people.bundle(t, authority))
		defer b.stop()
		for n := range 4 {
			b.send(fmt.Sprint("cmd_", n), n, "off", nil)
			b.want(fmt.Sprint("cmd_", n), "ok done")
		}
		b.send("on", 9, "on", nil)
		b.want("on", "ok done")
		b.send("fifth", 4, "off", nil)
		b.want("fifth", "quorum-required")
		if _, known := b.journal.Get("fifth"); known {
			t.Error("a refused command is in the journal")
		}
		b.send("again", 3, "off", nil)
		b.want("again", "ok done")
		b.send("flash", 3, "flash", nil)
		b.want("flash", "quorum-required")

		// The last of the four was counted again just now.
		time.Sleep(grants.ShortWindow)
		for n := 4; n < 8; n++ {
			b.send(fmt.Sprint("cmd_", n), n, "off", nil)
			b.want(fmt.Sprint("cmd_", n), "ok done")
		}
		for n := 8; n < 19; n++ {
			if n%4 == 0 {
				time.Sleep(grants.ShortWindow)
			}
			b.send(fmt.Sprint("cmd_", n), n, "off", nil)
			b.want(fmt.Sprint("cmd_", n), "ok done")
		}
		time.Sleep(grants.ShortWindow)
		b.send("twentieth", 19, "off", nil)
		b.want("twentieth", "quorum-required")
		b.send("known", 18, "off", nil)
		b.want("known", "ok done")
		time.Sleep(grants.LongWindow)
		b.send("tomorrow", 19, "off", nil)
		b.want("tomorrow", "ok done")
	})
}

// TestWindowsSurvive restarts the agent and moves its clocks: nothing of that takes
// a target out of a window, and running on does.
func TestWindowsSurvive(t *testing.T) {
	authority, people := agenttest.NewAuthority(t), newApprovers()
	for name, tt := range map[string]struct {
		off   time.Duration // how long the agent is off
		clock time.Duration // what gateway time says beside what has passed
	}{
		"restart":                {},
		"a week without power":   {off: 7 * 24 * time.Hour},
		"gateway says tomorrow":  {clock: 25 * time.Hour},
		"gateway says next year": {clock: 365 * 24 * time.Hour},
		"gateway says yesterday": {clock: -25 * time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "journal")
			synctest.Test(t, func(t *testing.T) {
				b := start(t, authority, path, powered(done), people.bundle(t, authority))
				time.Sleep(2 * time.Minute)
				for n := range 4 {
					b.send(fmt.Sprint("cmd_", n), n, "off", nil)
					b.want(fmt.Sprint("cmd_", n), "ok done")
				}
				time.Sleep(4 * time.Minute)
				b.stop()
				time.Sleep(tt.off)
				moved := func(c *dispatch.Config) { c.Now = func() time.Time { return time.Now().Add(tt.clock) } }
				b = start(t, authority, path, powered(done), people.bundle(t, authority), moved)
				defer func() { b.stop() }()
				send := func(id string) {
					p := b.payload(id, "4 off")
					p.IssuedAtMs, p.NotAfterMs = p.IssuedAtMs+tt.clock.Milliseconds(), p.NotAfterMs+tt.clock.Milliseconds()
					b.Offer(authority.Seal(t, p))
				}
				send("fifth")
				b.want("fifth", "quorum-required")
				// Four of the ten minutes had passed, and were kept.
				time.Sleep(grants.ShortWindow - 4*time.Minute - time.Second)
				send("still")
				b.want("still", "quorum-required")
				time.Sleep(2 * time.Second)
				send("after")
				b.want("after", "ok done")
			})
		})
	}
}

// TestWindowsEndThoughItReboots: an agent that never runs for a day in one piece
// still gets out of a day's window, and writes its running time only for that.
func TestWindowsEndThoughItReboots(t *testing.T) {
	authority, people := agenttest.NewAuthority(t), newApprovers()
	path := filepath.Join(t.TempDir(), "journal")
	synctest.Test(t, func(t *testing.T) {
		b := start(t, authority, path, powered(done), people.bundle(t, authority))
		for n := range 19 {
			if n%4 == 0 {
				time.Sleep(grants.ShortWindow)
			}
			b.send(fmt.Sprint("cmd_", n), n, "off", nil)
			b.want(fmt.Sprint("cmd_", n), "ok done")
		}
		passed := 0
		for ; passed < 48; passed++ {
			time.Sleep(time.Hour)
			id := fmt.Sprint("hour_", passed)
			b.send(id, 19, "off", nil)
			if b.outcome(id) == "ok done" {
				break
			}
			// As a power cut leaves it: nothing is written at the end.
			file, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			b.stop()
			if err := os.WriteFile(path, file, 0o600); err != nil {
				t.Fatal(err)
			}
			b = start(t, authority, path, powered(done), people.bundle(t, authority))
		}
		b.stop()
		if passed < 20 || passed > 32 {
			t.Errorf("the twentieth target went after %d hours with a reboot each, want 24 or some more", passed)
		}
	})
}

// TestGrantsAreUsed: a grant lets through what the windows do not, so often and no
// more, and only what runs or may run uses it.
func TestGrantsAreUsed(t *testing.T) {
	authority, people := agenttest.NewAuthority(t), newApprovers()
	path := filepath.Join(t.TempDir(), "journal")
	synctest.Test(t, func(t *testing.T) {
		var granted []bool
		hold := make(chan struct{})
		run := func(ctx context.Context, c dispatch.Call) ([]byte, error) {
			granted = append(granted, c.Granted)
			if strings.HasPrefix(c.Payload.CommandId, "slow") {
				<-hold
			}
			return []byte("done"), nil
		}
		b := start(t, authority, path, powered(run), people.bundle(t, authority))
		for n := range 4 {
			b.send(fmt.Sprint("cmd_", n), n, "off", nil)
			b.want(fmt.Sprint("cmd_", n), "ok done")
		}
		g := people.grant(t, 1, -time.Minute, time.Hour)
		for n := 4; n < 12; n++ {
			b.send(fmt.Sprint("cmd_", n), n, "off", g)
			b.want(fmt.Sprint("cmd_", n), "ok done")
		}
		if want := append(make([]bool, 4), slices.Repeat([]bool{true}, 8)...); !slices.Equal(granted, want) {
			t.Errorf("granted = %v, want %v", granted, want)
		}
		b.send("used", 4, "off", g)
		b.want("used", "grant-invalid")
		b.send("cmd_5", 5, "off", g) // the same command again: its result, and no other use
		b.want("cmd_5", "ok done")
		b.send("another", 12, "cycle", g)
		b.want("another", "grant-invalid")

		// Refused for another reason, or cancelled before it ran: nothing is used.
		p := b.payload("old", "12 off")
		p.Grant = &agentv1.GrantCitation{Grant: g, Targets: []*agentv1.TargetProof{grants.Prove(fleet, 12)}}
		p.Incarnation = "older"
		b.Offer(authority.Seal(t, p))
		b.want("old", "wrong-incarnation")
		b.send("slow_1", 12, "on", nil)
		b.send("waits", 12, "off", g)
		synctest.Wait()
		b.send("too_many", 12, "off", g) // while the first may still use it
		b.want("too_many", "grant-invalid")
		b.Cancel("waits")
		b.want("waits", "cancelled")
		close(hold)
		b.want("slow_1", "ok done")
		b.send("now", 12, "off", g)
		b.want("now", "ok done")
		b.send("no_more", 12, "off", g)
		b.want("no_more", "grant-invalid")

		// All of it is still so after a restart.
		b.stop()
		b = start(t, authority, path, powered(done), people.bundle(t, authority))
		defer func() { b.stop() }()
		b.send("used_later", 7, "off", g)
		b.want("used_later", "grant-invalid")
		b.send("fresh", 13, "off", g)
		b.want("fresh", "ok done")
		b.send("fifth", 14, "off", nil)
		b.want("fifth", "quorum-required")
		time.Sleep(time.Hour)
		b.send("ended", 14, "off", g)
		b.want("ended", "grant-invalid")
	})
}

// TestGrantsEndOnce: a grant that ended does not come back with a clock that is set back.
func TestGrantsEndOnce(t *testing.T) {
	authority, people := agenttest.NewAuthority(t), newApprovers()
	synctest.Test(t, func(t *testing.T) {
		floor := time.Now()
		b := start(t, authority, filepath.Join(t.TempDir(), "journal"), powered(done), people.bundle(t, authority), func(c *dispatch.Config) {
			c.Latest = func() time.Time { return floor }
		})
		defer b.stop()
		g := people.grant(t, 9, -time.Minute, time.Hour)
		b.send("cmd_1", 1, "off", g)
		b.want("cmd_1", "ok done")
		floor = floor.Add(time.Hour)
		b.send("cmd_2", 1, "off", g)
		b.want("cmd_2", "grant-invalid")
	})
}

// TestRecoveredUsesOnce stops the agent while commands run and wait: each comes
// back with the use that it had, and none more.
func TestRecoveredUsesOnce(t *testing.T) {
	authority, people := agenttest.NewAuthority(t), newApprovers()
	path := filepath.Join(t.TempDir(), "journal")
	synctest.Test(t, func(t *testing.T) {
		g := people.grant(t, 2, -time.Minute, 24*time.Hour)
		b := start(t, authority, path, powered(func(ctx context.Context, _ dispatch.Call) ([]byte, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}), people.bundle(t, authority))
		b.send("runs", 1, "off", g)
		b.send("waits", 1, "off", g)
		synctest.Wait()
		b.stop()

		var granted []string
		k := powered(func(_ context.Context, c dispatch.Call) ([]byte, error) {
			granted = append(granted, fmt.Sprint(c.Payload.CommandId, " ran ", c.Granted))
			return []byte("done"), nil
		})
		k.Recover = func(_ context.Context, c dispatch.Call) dispatch.Verdict {
			granted = append(granted, fmt.Sprint(c.Payload.CommandId, " recovered ", c.Granted))
			return dispatch.Done([]byte("was done"))
		}
		b = start(t, authority, path, k, people.bundle(t, authority))
		defer func() { b.stop() }()
		b.want("runs", "ok was done")
		b.want("waits", "ok done")
		if want := []string{"runs recovered true", "waits ran true"}; !slices.Equal(granted, want) {
			t.Errorf("after the restart %v, want %v", granted, want)
		}
		b.send("third", 1, "off", g)
		b.want("third", "grant-invalid")
		b.send("other", 2, "off", g)
		b.want("other", "ok done")
	})
}

// TestMemoryAgentsCount: an agent without a disk keeps its windows while it runs.
func TestMemoryAgentsCount(t *testing.T) {
	authority, people := agenttest.NewAuthority(t), newApprovers()
	synctest.Test(t, func(t *testing.T) {
		ramdisk := func(c *dispatch.Config) { c.Role = agentv1.Role_ROLE_RAMDISK }
		b := start(t, authority, "", powered(done), people.bundle(t, authority), ramdisk)
		defer b.stop()
		send := func(id string, n int, action string, g *agentv1.SignedGrant) {
			p := b.payload(id, fmt.Sprint(n, " ", action))
			p.Kind = "test.ramdisk"
			if g != nil {
				p.Grant = &agentv1.GrantCitation{Grant: g, Targets: []*agentv1.TargetProof{grants.Prove(fleet, n)}}
			}
			b.Offer(authority.Seal(t, p))
		}
		for n := range 4 {
			send(fmt.Sprint("cmd_", n), n, "off", nil)
			b.want(fmt.Sprint("cmd_", n), "ok done")
		}
		send("fifth", 4, "off", nil)
		b.want("fifth", "quorum-required")
		send("always", 0, "flash", nil)
		b.want("always", "quorum-required")
		send("other", 4, "off", people.grant(t, 1, -time.Minute, time.Hour))
		b.want("other", "grant-invalid") // it is for another kind
	})
}

// TestWindowsCountWhatStarts: commands that were admitted over hours and held up
// must not all start at once.
func TestWindowsCountWhatStarts(t *testing.T) {
	authority, people := agenttest.NewAuthority(t), newApprovers()
	path := filepath.Join(t.TempDir(), "journal")
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		k := powered(func(ctx context.Context, c dispatch.Call) ([]byte, error) {
			if c.Operation.Action == "on" {
				select {
				case <-gate:
				case <-ctx.Done():
				}
			}
			return []byte("done"), nil
		})
		b := start(t, authority, path, k, people.bundle(t, authority), func(c *dispatch.Config) { c.Lanes = map[string]int{"power": 18} })
		defer func() { b.stop() }()
		send := func(id string, n int, action string) {
			p := b.payload(id, fmt.Sprint(n, " ", action))
			p.NotAfterMs = time.Now().Add(20 * time.Hour).UnixMilli()
			b.Offer(authority.Seal(t, p))
		}
		for n := 12; n < len(fleet); n++ { // they take every slot of the lane
			send(fmt.Sprint("holds_", n), n, "on")
		}
		synctest.Wait()
		for n := range 12 {
			if n > 0 && n%4 == 0 {
				time.Sleep(grants.ShortWindow)
			}
			send(fmt.Sprint("cmd_", n), n, "off")
			synctest.Wait()
		}
		time.Sleep(grants.ShortWindow)
		close(gate)
		ran := 0
		for n := range 12 {
			switch got := b.outcome(fmt.Sprint("cmd_", n)); got {
			case "ok done":
				ran++
			case "quorum-required":
			default:
				t.Errorf("cmd_%d: %s", n, got)
			}
		}
		if ran < 1 || ran > 4 {
			t.Errorf("%d targets were touched at once without a grant, want 1 to 4", ran)
		}
	})
}

// TestGrantsEndForWhatWaits: a command that was admitted under a grant does not
// start when that has ended.
func TestGrantsEndForWhatWaits(t *testing.T) {
	authority, people := agenttest.NewAuthority(t), newApprovers()
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		b := start(t, authority, filepath.Join(t.TempDir(), "journal"), powered(func(context.Context, dispatch.Call) ([]byte, error) {
			<-gate
			return []byte("done"), nil
		}), people.bundle(t, authority))
		defer b.stop()
		g := people.grant(t, 2, -time.Minute, 10*time.Minute)
		b.send("first", 1, "off", g)
		b.send("waits", 1, "off", g)
		synctest.Wait()
		time.Sleep(20 * time.Minute)
		close(gate)
		b.want("first", "ok done")
		b.want("waits", "grant-invalid")
	})
}

// TestJudgedByWhatItWouldDo: what a command does may depend on what ran before it.
func TestJudgedByWhatItWouldDo(t *testing.T) {
	authority, people := agenttest.NewAuthority(t), newApprovers()
	synctest.Test(t, func(t *testing.T) {
		changed := false
		k := powered(done)
		decode := k.Decode
		k.Decode = func(args []byte) (dispatch.Operation, error) {
			op, err := decode(args)
			op.Key = "one"
			op.Always = op.Action == "restore" && changed
			op.Counts = op.Action == "restore" && changed
			return op, err
		}
		gate := make(chan struct{})
		k.Run = func(_ context.Context, c dispatch.Call) ([]byte, error) {
			if c.Operation.Action == "change" {
				<-gate
				changed = true
			}
			return []byte("done"), nil
		}
		b := start(t, authority, filepath.Join(t.TempDir(), "journal"), k, people.bundle(t, authority))
		defer b.stop()
		b.send("change", 1, "change", nil)
		b.send("restore", 2, "restore", nil)
		synctest.Wait()
		close(gate)
		b.want("change", "ok done")
		b.want("restore", "quorum-required")
	})
}

// TestSecretsComeSoon: a gateway cannot hold what has started by the secrets that
// it does not hand over.
func TestSecretsComeSoon(t *testing.T) {
	authority, people := agenttest.NewAuthority(t), newApprovers()
	synctest.Test(t, func(t *testing.T) {
		k := powered(func(ctx context.Context, c dispatch.Call) ([]byte, error) {
			if _, err := c.Secrets(ctx, "secret://t/a"); err != nil {
				return nil, err
			}
			return []byte("done"), nil
		})
		b := start(t, authority, filepath.Join(t.TempDir(), "journal"), k, people.bundle(t, authority), func(c *dispatch.Config) {
			c.Resolve = func(ctx context.Context, _ string, refs []string) (map[string]secret.Value, error) {
				select {
				case <-ctx.Done():
					return nil, ctx.Err()
				case <-time.After(30 * time.Minute):
					return map[string]secret.Value{refs[0]: secret.New([]byte("x"))}, nil
				}
			}
		})
		defer b.stop()
		b.send("held", 1, "off", nil)
		time.Sleep(time.Minute)
		b.want("held", "credentials-unavailable")
	})
}
