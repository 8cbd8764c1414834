package dispatch_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
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
)

// bench is one dispatcher under test. Its kinds decode args as
// "key flags…", where flags are d (destructive), c (counts for quorum), a (always
// needs a grant) and r (retry-safe).
type bench struct {
	*dispatch.Dispatcher
	t         *testing.T
	authority *agenttest.Authority
	journal   *journal.Journal
	bundle    *trust.Bundle
	epoch     string
	stop      func()
	audits    []string

	mu      sync.Mutex
	acks    []string
	results map[string]*agentv1.CommandResult
	times   map[string]int    // how often each result came
	credits map[string]uint32 // as the gateway knows them
	latest  *agentv1.CommandProgress
	lines   int // of progress
}

type option func(*dispatch.Config)

var site = []agentv1.Role{agentv1.Role_ROLE_SITE}

func decode(args []byte) (dispatch.Operation, error) {
	key, flags, _ := strings.Cut(string(args), " ")
	if key == "bad" {
		return dispatch.Operation{}, errs.New(errs.OperationNotAllowed, "bad args")
	}
	return dispatch.Operation{
		Name: "test.do", Key: key, Destructive: strings.Contains(flags, "d"), Counts: strings.Contains(flags, "c"), Always: strings.Contains(flags, "a"), RetrySafe: strings.Contains(flags, "r"), Value: string(args),
	}, nil
}

func kind(run func(ctx context.Context, c dispatch.Call) ([]byte, error)) dispatch.Kind {
	return dispatch.Kind{Name: "test.do", Lane: "power", Roles: site, Decode: decode, Run: run}
}

func start(t *testing.T, authority *agenttest.Authority, path string, k dispatch.Kind, options ...option) *bench {
	t.Helper()
	j, err := journal.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{
		t: t, authority: authority, journal: j, bundle: authority.Bundle(t, nil),
		results: map[string]*agentv1.CommandResult{}, times: map[string]int{}, credits: map[string]uint32{},
	}
	ramdisk := k
	ramdisk.Name, ramdisk.Roles = "test.ramdisk", []agentv1.Role{agentv1.Role_ROLE_RAMDISK}
	update := k
	update.Name, update.Lane = "test.update", "update"
	cfg := dispatch.Config{
		Role: agentv1.Role_ROLE_SITE, AgentID: func() string { return "ag_1" }, Incarnation: j.Epoch(),
		Kinds: []dispatch.Kind{k, ramdisk, update}, Journal: j,
		Bundle: func() *trust.Bundle { return b.bundle }, Now: time.Now,
		Resolve: func(_ context.Context, id string, refs []string) (map[string]secret.Value, error) {
			return map[string]secret.Value{refs[0]: secret.New([]byte(id))}, nil
		},
		Audit: func(name, key string, body any) error {
			b.audits = append(b.audits, fmt.Sprintf("%s %v", name, body.(map[string]string)["code"]))
			return nil
		},
		Log: slog.New(slog.DiscardHandler),
	}
	for _, o := range options {
		o(&cfg)
	}
	b.epoch = cfg.Incarnation
	if b.Dispatcher, err = dispatch.New(cfg); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var owned sync.WaitGroup
	owned.Go(func() { b.Run(ctx) })
	owned.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-b.Wake():
				b.pull()
			}
		}
	})
	b.stop = sync.OnceFunc(func() { cancel(); owned.Wait(); b.pull(); j.Close() })
	_, lanes := b.Begin()
	b.mu.Lock()
	maps.Copy(b.credits, lanes)
	b.mu.Unlock()
	return b
}

func (b *bench) pull() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, f := range b.Frames() {
		if a := f.GetAck(); a != nil {
			b.acks = append(b.acks, a.GetCommandId())
		}
		if c := f.GetCredit(); c != nil {
			maps.Copy(b.credits, c.GetLanes())
		}
		if p := f.GetProgress(); p != nil {
			b.latest = p
			b.lines++
		}
		if r := f.GetResult(); r != nil {
			b.results[r.GetCommandId()] = r
			b.times[r.GetCommandId()]++
		}
	}
}

func (b *bench) payload(id, args string) *agentv1.CommandPayload {
	return &agentv1.CommandPayload{
		CommandId: id, Kind: "test.do", AgentId: "ag_1", Incarnation: b.epoch, Lane: "power",
		IssuedAtMs: time.Now().UnixMilli(), NotAfterMs: time.Now().Add(time.Hour).UnixMilli(),
		SecretRefs: []string{"secret://t/a"}, Args: []byte(args),
	}
}

func (b *bench) offer(id, args string) { b.Offer(b.authority.Seal(b.t, b.payload(id, args))) }

// outcome is a command's result or error code once everything has settled.
func (b *bench) outcome(id string) string {
	synctest.Wait()
	b.pull()
	b.mu.Lock()
	defer b.mu.Unlock()
	r := b.results[id]
	switch {
	case r == nil:
		return "none"
	case r.GetError() != nil:
		text := r.GetError().GetCode()
		if r.GetError().GetRetryable() {
			text += " (retryable)"
		}
		return text
	}
	return "ok " + string(r.GetResult())
}

func (b *bench) want(id, want string) {
	b.t.Helper()
	if got := b.outcome(id); got != want {
		b.t.Errorf("outcome of %s = %s, want %s", id, got, want)
	}
}

func done(context.Context, dispatch.Call) ([]byte, error) { return []byte("done"), nil }

// TestAdmission offers one command for each refusal, beside the one that passes.
func TestAdmission(t *testing.T) {
	authority := agenttest.NewAuthority(t)
	stranger := agenttest.NewAuthority(t)
	for name, test := range map[string]struct {
		change  func(b *bench, p *agentv1.CommandPayload)
		send    func(c *agentv1.SignedCommand)
		options []option
		want    string
	}{
		"good":              {want: "ok done"},
		"destructive":       {change: args("k d"), want: "ok done"},
		"no signature":      {send: func(c *agentv1.SignedCommand) { c.Signature = nil }, want: "signature-required"},
		"flipped signature": {send: func(c *agentv1.SignedCommand) { c.Signature[0] ^= 1 }, want: "signature-invalid"},
		"unknown key":       {send: func(c *agentv1.SignedCommand) { c.KeyId = strings.Repeat("0", 64) }, want: "key-unknown"},
		"stranger's key": {send: func(c *agentv1.SignedCommand) {
			other := stranger.Seal(t, &agentv1.CommandPayload{CommandId: "x", Kind: "k", AgentId: "a", IssuedAtMs: 1, NotAfterMs: 2})
			c.KeyId = other.KeyId
		}, want: "key-unknown"},
		"other agent":       {change: func(_ *bench, p *agentv1.CommandPayload) { p.AgentId = "ag_2" }, want: "wrong-agent"},
		"other incarnation": {change: func(_ *bench, p *agentv1.CommandPayload) { p.Incarnation = "older" }, want: "wrong-incarnation"},
		"no incarnation":    {change: func(_ *bench, p *agentv1.CommandPayload) { p.Incarnation = "" }, want: "wrong-incarnation"},
		"unknown kind":      {change: func(_ *bench, p *agentv1.CommandPayload) { p.Kind = "disk.wipe" }, want: "unknown-kind"},
		"other role's kind": {change: func(_ *bench, p *agentv1.CommandPayload) { p.Kind = "test.ramdisk" }, want: "role-mismatch"},
		"other lane":        {change: func(_ *bench, p *agentv1.CommandPayload) { p.Lane = "query" }, want: "invalid-payload"},
		"expired": {change: func(_ *bench, p *agentv1.CommandPayload) {
			p.IssuedAtMs, p.NotAfterMs = p.IssuedAtMs-2000, p.IssuedAtMs-1000
		}, want: "expired"},
		"dated ahead": {change: func(_ *bench, p *agentv1.CommandPayload) {
			p.IssuedAtMs, p.NotAfterMs = p.IssuedAtMs+600_000, p.NotAfterMs+600_000
		}, want: "invalid-payload"},
		"bad args":                     {change: args("bad"), want: "operation-not-allowed"},
		"always, quorum in force":      {change: args("k da"), options: []option{quorum(authority, t)}, want: "quorum-required"},
		"always, no quorum in force":   {change: args("k da"), want: "ok done"},
		"counts, quorum in force":      {change: args("k dc"), options: []option{quorum(authority, t)}, want: "ok done"},
		"destructive, quorum in force": {change: args("k d"), options: []option{quorum(authority, t)}, want: "ok done"},
		"harmless, quorum in force":    {options: []option{quorum(authority, t)}, want: "ok done"},
		"destructive, no room for audit": {change: args("k d"), options: []option{func(c *dispatch.Config) {
			c.AuditFull = func() bool { return true }
		}}, want: "no-space"},
		"no bundle": {options: []option{func(c *dispatch.Config) { c.Bundle = func() *trust.Bundle { return nil } }}, want: "key-unknown"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "journal")
			synctest.Test(t, func(t *testing.T) {
				b := start(t, authority, path, kind(done), test.options...)
				defer b.stop()
				p := b.payload("cmd_1", "k")
				if test.change != nil {
					test.change(b, p)
				}
				c := authority.Seal(t, p)
				if test.send != nil {
					test.send(c)
				}
				b.Offer(c)
				b.want("cmd_1", test.want)
				if _, known := b.journal.Get("cmd_1"); known != strings.HasPrefix(test.want, "ok") {
					t.Errorf("journaled = %v with outcome %s", known, test.want)
				}
			})
		})
	}
	t.Run("destructive, journal in memory", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := start(t, authority, "", kind(done))
			defer b.stop()
			b.offer("cmd_1", "k d")
			b.want("cmd_1", "operation-not-allowed")
			b.offer("cmd_2", "k")
			b.want("cmd_2", "ok done")
		})
	})
}

func args(s string) func(*bench, *agentv1.CommandPayload) {
	return func(_ *bench, p *agentv1.CommandPayload) { p.Args = []byte(s) }
}

func quorum(a *agenttest.Authority, t *testing.T) option {
	bundle := a.Bundle(t, func(c *agentv1.TrustBundle) {
		c.ApproverKeys, c.ApproverThreshold = [][]byte{make([]byte, 32), slices.Repeat([]byte{1}, 32)}, 2
	})
	return func(c *dispatch.Config) { c.Bundle = func() *trust.Bundle { return bundle } }
}

func TestDuplicates(t *testing.T) {
	authority := agenttest.NewAuthority(t)
	synctest.Test(t, func(t *testing.T) {
		runs := 0
		b := start(t, authority, "", kind(func(context.Context, dispatch.Call) ([]byte, error) {
			runs++
			return []byte("done"), nil
		}))
		defer b.stop()
		c := authority.Seal(t, b.payload("cmd_1", "k"))
		b.Offer(c)
		b.want("cmd_1", "ok done")
		b.Offer(c)
		b.want("cmd_1", "ok done")
		if runs != 1 || b.times["cmd_1"] != 2 || len(b.acks) != 2 {
			t.Errorf("offered twice: %d runs, %d results, %d acks; want 1, 2, 2", runs, b.times["cmd_1"], len(b.acks))
		}
		b.ResultAcked("cmd_1")
		b.Offer(c)
		b.want("cmd_1", "interrupted")
		b.offer("cmd_1", "other")
		b.want("cmd_1", "duplicate-mismatch")
		if runs != 1 {
			t.Errorf("after all repeats: %d runs, want 1", runs)
		}
	})
}

func TestResultsRepeatUntilAcked(t *testing.T) {
	authority := agenttest.NewAuthority(t)
	synctest.Test(t, func(t *testing.T) {
		b := start(t, authority, "", kind(done))
		defer b.stop()
		b.offer("cmd_1", "k")
		b.want("cmd_1", "ok done")
		time.Sleep(95 * time.Second)
		b.want("cmd_1", "ok done")
		if got := b.times["cmd_1"]; got != 4 {
			t.Errorf("results after 95 s = %d, want 4: one each 30 s", got)
		}
		open, _ := b.Begin()
		if len(open) != 1 || open[0].State != "done" || len(open[0].Digest) != 32 {
			t.Errorf("Begin() open = %v, want cmd_1 done with its digest", open)
		}
		b.want("cmd_1", "ok done")
		if got := b.times["cmd_1"]; got != 5 {
			t.Errorf("results in a new session = %d, want one more than 4", got)
		}
		b.ResultAcked("cmd_1")
		time.Sleep(95 * time.Second)
		b.outcome("cmd_1")
		if open, _ := b.Begin(); b.times["cmd_1"] != 5 || len(open) != 0 {
			t.Errorf("after the ack: %d results, %d open; want 5, 0", b.times["cmd_1"], len(open))
		}
	})
}

// gate lets a test decide when each command ends.
type gate struct {
	mu      sync.Mutex
	order   []string
	now     int
	most    int
	release chan struct{}
}

func (g *gate) run(ctx context.Context, c dispatch.Call) ([]byte, error) {
	g.mu.Lock()
	g.order = append(g.order, c.Payload.GetCommandId())
	g.now++
	g.most = max(g.most, g.now)
	g.mu.Unlock()
	defer func() { g.mu.Lock(); g.now--; g.mu.Unlock() }()
	select {
	case <-g.release:
		return []byte("done"), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func TestOneAtATimePerKey(t *testing.T) {
	authority := agenttest.NewAuthority(t)
	synctest.Test(t, func(t *testing.T) {
		g := &gate{release: make(chan struct{})}
		b := start(t, authority, "", kind(g.run))
		defer b.stop()
		for n := range 4 {
			b.offer(fmt.Sprintf("cmd_%d", n), "same")
		}
		b.offer("cmd_other", "other")
		synctest.Wait()
		if g.now != 2 {
			t.Errorf("running = %d, want 2: one of each key", g.now)
		}
		close(g.release)
		b.want("cmd_3", "ok done")
		same := slices.DeleteFunc(slices.Clone(g.order), func(id string) bool { return id == "cmd_other" })
		if got := strings.Join(same, " "); got != "cmd_0 cmd_1 cmd_2 cmd_3" {
			t.Errorf("order = %s, want first in, first out", got)
		}
	})
}

func TestLanes(t *testing.T) {
	authority := agenttest.NewAuthority(t)
	synctest.Test(t, func(t *testing.T) {
		g := &gate{release: make(chan struct{})}
		b := start(t, authority, "", kind(g.run), func(c *dispatch.Config) { c.Lanes = map[string]int{"power": 2} })
		defer b.stop()
		_, lanes := b.Begin()
		if lanes["power"] != 2 || lanes["query"] != 64 || lanes["update"] != 1 {
			t.Errorf("credits = %v, want power 2 and the defaults", lanes)
		}
		for n := range 5 {
			b.offer(fmt.Sprintf("cmd_%d", n), fmt.Sprint("key", n))
		}
		b.want("cmd_4", "lane-full (retryable)")
		if g.most != 2 {
			t.Errorf("running at most = %d, want the lane's 2", g.most)
		}
		close(g.release)
		b.want("cmd_3", "ok done")
		if g.most != 2 {
			t.Errorf("running at most = %d, want the lane's 2", g.most)
		}
		b.offer("cmd_5", "key5")
		b.want("cmd_5", "ok done")
	})
}

func TestKeyQueueIsBounded(t *testing.T) {
	authority := agenttest.NewAuthority(t)
	synctest.Test(t, func(t *testing.T) {
		g := &gate{release: make(chan struct{})}
		b := start(t, authority, "", kind(g.run))
		defer b.stop()
		for n := range 17 {
			b.offer(fmt.Sprintf("cmd_%d", n), "dead")
		}
		b.want("cmd_16", "lane-full (retryable)")
		close(g.release)
		b.want("cmd_15", "ok done")
	})
}

func TestCancel(t *testing.T) {
	authority := agenttest.NewAuthority(t)
	synctest.Test(t, func(t *testing.T) {
		g := &gate{release: make(chan struct{})}
		b := start(t, authority, "", kind(g.run))
		defer b.stop()
		b.offer("cmd_run", "k")
		b.offer("cmd_wait", "k")
		synctest.Wait()
		b.Cancel("cmd_wait")
		b.want("cmd_wait", "cancelled")
		b.Cancel("cmd_run")
		b.want("cmd_run", "cancelled")
		b.Cancel("cmd_early")
		b.want("cmd_early", "cancelled")
		b.offer("cmd_early", "k")
		b.want("cmd_early", "cancelled")
		if got := strings.Join(g.order, " "); got != "cmd_run" {
			t.Errorf("ran: %s, want only cmd_run", got)
		}
		b.offer("cmd_next", "k")
		close(g.release)
		b.want("cmd_next", "ok done")
		b.Cancel("cmd_next")
		b.want("cmd_next", "ok done")
	})
}

// TestCancelPastNoReturn: a kind that finishes all the same has the last word.
func TestCancelPastNoReturn(t *testing.T) {
	authority := agenttest.NewAuthority(t)
	synctest.Test(t, func(t *testing.T) {
		b := start(t, authority, "", kind(func(ctx context.Context, _ dispatch.Call) ([]byte, error) {
			<-ctx.Done()
			return []byte("done"), nil
		}))
		defer b.stop()
		b.offer("cmd_1", "k")
		synctest.Wait()
		b.Cancel("cmd_1")
		b.want("cmd_1", "ok done")
	})
}

func TestErrors(t *testing.T) {
	authority := agenttest.NewAuthority(t)
	for name, test := range map[string]struct {
		err             error
		safe, notSafely string
	}{
		"plain":       {errors.New("boom"), "internal", "internal"},
		"retryable":   {errs.Retry(errs.Unreachable, "no answer"), "unreachable (retryable)", "unreachable"},
		"wrapped":     {fmt.Errorf("do: %w", errs.Retry(errs.BmcError, "busy")), "bmc-error (retryable)", "bmc-error"},
		"unavailable": {errs.Retry(errs.Unavailable, "plugin restarts"), "unavailable (retryable)", "unavailable (retryable)"},
		// Of a command that has begun nobody may say by a code that it did not: such
		// a one is sent again, whatever it is.
		"a driver's expired":           {errs.New(errs.Expired, "the login is"), "driver-error", "driver-error"},
		"a driver's lane-full":         {errs.Retry(errs.LaneFull, "its own lane"), "driver-error (retryable)", "driver-error"},
		"a driver's wrong-incarnation": {fmt.Errorf("do: %w", errs.New(errs.WrongIncarnation, "x")), "driver-error", "driver-error"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := start(t, authority, "", kind(func(context.Context, dispatch.Call) ([]byte, error) { return nil, test.err }))
				defer b.stop()
				b.offer("cmd_safe", "a r")
				b.want("cmd_safe", test.safe)
				b.offer("cmd_not", "b")
				b.want("cmd_not", test.notSafely)
			})
		})
	}
	t.Run("panic", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := start(t, authority, "", kind(func(context.Context, dispatch.Call) ([]byte, error) { panic("boom") }))
			defer b.stop()
			b.offer("cmd_1", "k")
			b.want("cmd_1", "internal")
		})
	})
	t.Run("deadline", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			g := &gate{release: make(chan struct{})}
			b := start(t, authority, "", kind(g.run))
			defer b.stop()
			p := b.payload("cmd_1", "k")
			p.NotAfterMs = p.IssuedAtMs + 5000
			b.Offer(authority.Seal(t, p))
			p = b.payload("cmd_2", "k")
			p.NotAfterMs = p.IssuedAtMs + 4000
			b.Offer(authority.Seal(t, p))
			time.Sleep(4900 * time.Millisecond)
			b.want("cmd_1", "none")
			time.Sleep(200 * time.Millisecond)
			b.want("cmd_1", "timeout")
			b.want("cmd_2", "expired")
		})
	})
	t.Run("audit", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "journal")
		synctest.Test(t, func(t *testing.T) {
			b := start(t, authority, path, kind(done))
			defer b.stop()
			b.offer("cmd_1", "k d")
			b.offer("cmd_2", "k")
			b.want("cmd_2", "ok done")
			if got := strings.Join(b.audits, ","); got != "command.finished " {
				t.Errorf("audit events = %q, want one, of the destructive command", got)
			}
		})
	})
}

func TestSecretsOnlyAsListed(t *testing.T) {
	authority := agenttest.NewAuthority(t)
	synctest.Test(t, func(t *testing.T) {
		b := start(t, authority, "", kind(func(ctx context.Context, c dispatch.Call) ([]byte, error) {
			values, err := c.Secrets(ctx, c.Operation.Key)
			if err != nil {
				return nil, err
			}
			return values[c.Operation.Key].Reveal(), nil
		}))
		defer b.stop()
		b.offer("cmd_1", "secret://t/a")
		b.want("cmd_1", "ok cmd_1")
		b.offer("cmd_2", "secret://t/b")
		b.want("cmd_2", "credentials-unavailable")
	})
}

func TestProgress(t *testing.T) {
	authority := agenttest.NewAuthority(t)
	synctest.Test(t, func(t *testing.T) {
		b := start(t, authority, "", kind(func(_ context.Context, c dispatch.Call) ([]byte, error) {
			for n := range 100 {
				c.Progress("write", "", uint64(n), 100)
				time.Sleep(100 * time.Millisecond)
			}
			return nil, nil
		}))
		defer b.stop()
		b.offer("cmd_1", "k")
		time.Sleep(11 * time.Second)
		synctest.Wait()
		if b.lines < 15 || b.lines > 21 {
			t.Errorf("progress frames in 10 s = %d, want about 20: at most 2 a second", b.lines)
		}
	})
}

// TestRecovery kills the agent while a command is in each state, and starts it
// again on the same journal.
func TestRecovery(t *testing.T) {
	authority := agenttest.NewAuthority(t)
	ctxErr := func(ctx context.Context, _ dispatch.Call) ([]byte, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	verdict := func(v dispatch.Verdict) func(context.Context, dispatch.Call) dispatch.Verdict {
		return func(context.Context, dispatch.Call) dispatch.Verdict { return v }
	}
	for name, test := range map[string]struct {
		args    string
		recover func(context.Context, dispatch.Call) dispatch.Verdict
		later   time.Duration
		bundle  func(*agentv1.TrustBundle)
		want    string
	}{
		"nobody can tell":       {args: "k", want: "interrupted"},
		"it was done":           {args: "k", recover: verdict(dispatch.Done([]byte("was done"))), want: "ok was done"},
		"rerun, retry-safe":     {args: "k r", recover: verdict(dispatch.Rerun()), want: "ok done"},
		"rerun, not retry-safe": {args: "k", recover: verdict(dispatch.Rerun()), want: "interrupted"},
		"rerun, expired since":  {args: "k r", recover: verdict(dispatch.Rerun()), later: 2 * time.Hour, want: "expired"},
		"done, expired since":   {args: "k", recover: verdict(dispatch.Done([]byte("was done"))), later: 2 * time.Hour, want: "ok was done"},
		"interrupted, said so":  {args: "k r", recover: verdict(dispatch.Interrupted()), want: "interrupted"},
		"recovery fails":        {args: "k r", recover: func(context.Context, dispatch.Call) dispatch.Verdict { panic("boom") }, want: "interrupted"},
		"its key was withdrawn": {args: "k r", recover: verdict(dispatch.Rerun()), bundle: func(c *agentv1.TrustBundle) { c.CommandKeys[0] = make([]byte, 32) }, want: "interrupted"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "journal")
			synctest.Test(t, func(t *testing.T) {
				b := start(t, authority, path, kind(ctxErr))
				b.offer("cmd_1", test.args)
				b.offer("cmd_2", test.args) // received, never started
				synctest.Wait()
				b.stop()
				b.want("cmd_1", "none")
				time.Sleep(test.later)

				order := []string{}
				k := kind(func(_ context.Context, c dispatch.Call) ([]byte, error) {
					order = append(order, "run "+c.Payload.GetCommandId())
					return []byte("done"), nil
				})
				if test.recover != nil {
					k.Recover = func(ctx context.Context, c dispatch.Call) dispatch.Verdict {
						order = append(order, "recover "+c.Payload.GetCommandId())
						return test.recover(ctx, c)
					}
				}
				b = start(t, authority, path, k, func(c *dispatch.Config) {
					if test.bundle != nil {
						changed := authority.Bundle(t, test.bundle)
						c.Bundle = func() *trust.Bundle { return changed }
					}
				})
				defer b.stop()
				b.want("cmd_1", test.want)
				switch {
				case test.bundle != nil:
					b.want("cmd_2", "key-unknown")
					return
				case test.later > 0:
					b.want("cmd_2", "expired")
				default:
					b.want("cmd_2", "ok done")
				}
				b.offer("cmd_3", "k")
				b.want("cmd_3", "ok done")
				got := strings.Join(order, ", ")
				if test.recover != nil && !strings.HasPrefix(got, "recover cmd_1") || !strings.HasSuffix(got, "run cmd_3") {
					t.Errorf("order = %s, want recovery first and new work last", got)
				}
			})
		})
	}
}

// TestRestartKeepsResults: a result that nobody acknowledged outlives the process.
func TestRestartKeepsResults(t *testing.T) {
	authority := agenttest.NewAuthority(t)
	path := filepath.Join(t.TempDir(), "journal")
	synctest.Test(t, func(t *testing.T) {
		b := start(t, authority, path, kind(done))
		b.offer("cmd_1", "k")
		b.Cancel("cmd_2")
		b.want("cmd_1", "ok done")
		b.stop()
		b = start(t, authority, path, kind(func(context.Context, dispatch.Call) ([]byte, error) {
			t.Error("ran again")
			return nil, nil
		}))
		defer b.stop()
		b.want("cmd_1", "ok done")
		b.want("cmd_2", "cancelled")
	})
}

func TestNewRefuses(t *testing.T) {
	good := kind(done)
	for name, change := range map[string]func(c *dispatch.Config, k *dispatch.Kind){
		"no name":      func(_ *dispatch.Config, k *dispatch.Kind) { k.Name = "" },
		"no roles":     func(_ *dispatch.Config, k *dispatch.Kind) { k.Roles = nil },
		"no run":       func(_ *dispatch.Config, k *dispatch.Kind) { k.Run = nil },
		"unknown lane": func(_ *dispatch.Config, k *dispatch.Kind) { k.Lane = "fast" },
		"lane of 0":    func(c *dispatch.Config, _ *dispatch.Kind) { c.Lanes = map[string]int{"query": 0} },
		"made-up lane": func(c *dispatch.Config, _ *dispatch.Kind) { c.Lanes = map[string]int{"fast": 1} },
	} {
		j, err := journal.Open("")
		if err != nil {
			t.Fatal(err)
		}
		k := good
		c := dispatch.Config{Journal: j, Log: slog.New(slog.DiscardHandler)}
		change(&c, &k)
		c.Kinds = []dispatch.Kind{k}
		if _, err := dispatch.New(c); err == nil {
			t.Errorf("%s: New = nil, want an error", name)
		}
	}
}

// TestWordsOfOthersFitAFrame has a BMC or a plugin choose the words of an error
// and of a progress: bytes that protobuf cannot carry, or more than the gateway takes.
func TestWordsOfOthersFitAFrame(t *testing.T) {
	for name, words := range map[string]string{"not UTF-8": "malformed header: \xff\xfe", "too long": strings.Repeat("é", 8<<20)} {
		synctest.Test(t, func(t *testing.T) {
			authority := agenttest.NewAuthority(t)
			b := start(t, authority, filepath.Join(t.TempDir(), "journal"), kind(func(_ context.Context, c dispatch.Call) ([]byte, error) {
				c.Progress(words, words, 0, 0)
				time.Sleep(time.Minute)
				return nil, errs.New(errs.BmcError, "%s", words)
			}))
			defer b.stop()
			b.offer("cmd_1", "k")
			time.Sleep(30 * time.Second)
			synctest.Wait()
			if n, err := proto.Marshal(b.latest); b.latest == nil || err != nil || len(n) > 16<<10 {
				t.Errorf("%s: progress of %d bytes = %v, want one that fits", name, len(n), err)
			}
			time.Sleep(2 * time.Minute)
			if got := b.outcome("cmd_1"); got != "bmc-error" {
				t.Fatalf("%s: outcome = %q, want bmc-error", name, got)
			}
			result, err := proto.Marshal(b.results["cmd_1"])
			if err != nil || len(result) > 16<<10 {
				t.Errorf("%s: result of %d bytes = %v, want one that fits", name, len(result), err)
			}
			if e, _ := b.journal.Get("cmd_1"); e.State != journal.Done {
				t.Errorf("%s: the journal says %s, want done", name, e.State)
			}
		})
	}
}

// TestRestoredWaitForTheTime: after a power cut the clock may stand before the
// not_after of what was left open, which nothing of it may run by.
func TestRestoredWaitForTheTime(t *testing.T) {
	authority := agenttest.NewAuthority(t)
	for name, late := range map[string]time.Duration{"in time": time.Minute, "too late": 2 * time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "journal")
			blocked := &gate{release: make(chan struct{})}
			b := start(t, authority, path, kind(blocked.run))
			b.offer("cmd_first", "k")
			b.offer("cmd_wait", "k")
			synctest.Wait()
			b.stop()

			ran := &gate{release: make(chan struct{})}
			close(ran.release)
			known := make(chan struct{})
			behind := time.Now()
			now := func() time.Time {
				select {
				case <-known:
					return time.Now()
				default:
					return behind
				}
			}
			b = start(t, authority, path, kind(ran.run), func(c *dispatch.Config) { c.Now, c.TimeKnown = now, known })
			defer b.stop()
			time.Sleep(late)
			synctest.Wait()
			if len(ran.order) > 0 {
				t.Errorf("%s: %v ran by a clock that nobody set", name, ran.order)
			}
			close(known)
			want := "ok done"
			if late > time.Hour {
				want = "expired"
			}
			b.want("cmd_first", "interrupted")
			b.want("cmd_wait", want)
		})
	}
}

// TestCheck: args that do not fit the signed payload are refused before anything
// is kept, and what Check chooses as key is the queue, in the next process too.
func TestCheck(t *testing.T) {
	authority := agenttest.NewAuthority(t)
	path := filepath.Join(t.TempDir(), "journal")
	synctest.Test(t, func(t *testing.T) {
		g := &gate{release: make(chan struct{})}
		checked := func(run func(context.Context, dispatch.Call) ([]byte, error)) dispatch.Kind {
			k := kind(run)
			k.Recover = func(context.Context, dispatch.Call) dispatch.Verdict { return dispatch.Rerun() }
			k.Check = func(p *agentv1.CommandPayload, op dispatch.Operation) (dispatch.Operation, error) {
				if p.GetTargetNodeId() == "" {
					return op, errs.New(errs.InvalidPayload, "no target")
				}
				op.Key = p.GetTargetNodeId()
				return op, nil
			}
			return k
		}
		b := start(t, authority, path, checked(g.run))
		b.offer("cmd_none", "k r")
		b.want("cmd_none", "invalid-payload")
		if _, known := b.journal.Get("cmd_none"); known {
			t.Error("a refused command is in the journal")
		}
		for id, target := range map[string]string{"cmd_1": "node_1", "cmd_2": "node_2"} {
			p := b.payload(id, "same r")
			p.TargetNodeId = target
			b.Offer(b.authority.Seal(t, p))
		}
		synctest.Wait()
		if g.now != 2 {
			t.Errorf("running = %d, want 2: the key is the target", g.now)
		}
		b.stop()
		g = &gate{release: make(chan struct{})}
		b = start(t, authority, path, checked(g.run))
		defer b.stop()
		synctest.Wait()
		if g.now != 2 {
			t.Errorf("running after the restart = %d, want 2", g.now)
		}
		close(g.release)
		b.want("cmd_1", "ok done")
		b.want("cmd_2", "ok done")
	})
}
