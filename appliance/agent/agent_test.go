package agent_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent"
	"github.com/better-compute/site-appliance/appliance/agent/agenttest"
	"github.com/better-compute/site-appliance/appliance/agent/bootinfo"
	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/secret"
)

const ref = "secret://t/bmc"

// echo answers its args, after what the test does in between.
func echo(role agentv1.Role, between func(ctx context.Context, c dispatch.Call) error) dispatch.Kind {
	return dispatch.Kind{
		Name: "test.echo", Lane: "power", Roles: []agentv1.Role{role},
		Decode: func(args []byte) (dispatch.Operation, error) {
			return dispatch.Operation{Name: "test.echo", Key: "k", Destructive: true}, nil
		},
		Run: func(ctx context.Context, c dispatch.Call) ([]byte, error) {
			if between != nil {
				if err := between(ctx, c); err != nil {
					return nil, err
				}
			}
			return c.Payload.GetArgs(), nil
		},
	}
}

// logs is a log that the test can read.
type logs struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logs) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

type running struct {
	*agent.Agent
	stop func()
	logs *logs
}

// start runs an agent until stop or the test's end.
func start(t *testing.T, cfg agent.Config) *running {
	t.Helper()
	r := &running{logs: new(logs)}
	cfg.Log = slog.New(slog.NewTextHandler(r.logs, nil))
	cfg.Version = "test"
	if cfg.Role == agentv1.Role_ROLE_UNSPECIFIED {
		cfg.Role = agentv1.Role_ROLE_SITE
	}
	a, err := agent.New(cfg)
	if err != nil {
		t.Fatalf("New = %v, want nil", err)
	}
	r.Agent = a
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	r.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if !errors.Is(err, context.Canceled) {
				t.Errorf("Run = %v, want the context's end", err)
			}
		case <-time.After(20 * time.Second):
			t.Error("Run did not end within 20 s of its context")
		}
	})
	t.Cleanup(func() {
		r.stop()
		if t.Failed() {
			t.Logf("agent's log:\n%s", r.logs.text())
		}
	})
	return r
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !f(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited 20 s for %s", what)
		}
	}
}

func command(id string) *agentv1.CommandPayload {
	return &agentv1.CommandPayload{CommandId: id, Kind: "test.echo", Lane: "power", Args: []byte("hello"), SecretRefs: []string{ref}}
}

// TestEndToEnd is a site's whole life over real TLS and HTTP/2: enrol by token,
// run a signed command with a secret and progress, send events, restart with
// the same identity, and need no token any more.
func TestEndToEnd(t *testing.T) {
	g := agenttest.Start(t)
	g.Secrets[ref] = []byte("hunter2")
	dir := t.TempDir()
	var got string
	kind := echo(agentv1.Role_ROLE_SITE, func(ctx context.Context, c dispatch.Call) error {
		c.Progress("work", "half way", 1, 2)
		values, err := c.Secrets(ctx, ref)
		if err == nil {
			got = string(values[ref].Reveal())
		}
		return err
	})
	a := start(t, agent.Config{StateDir: dir, Join: g.Join("token-4711"), Kinds: []dispatch.Kind{kind}})
	s := g.Session(1)
	if s.Hello.GetRole() != agentv1.Role_ROLE_SITE || s.Hello.GetAgentId() != a.AgentID() || s.Hello.GetJournalEpoch() == "" ||
		s.Hello.GetBootId() == "" || s.Hello.GetLanes()["power"] != 64 || s.Hello.GetClockSource() != "gateway" {
		t.Errorf("Hello = %v", s.Hello)
	}
	if a.SiteID() != agenttest.SiteID || a.BaseURL() != g.URL || a.Bundle().Version() != 1 {
		t.Errorf("agent is of %q at %q with bundle %d", a.SiteID(), a.BaseURL(), a.Bundle().Version())
	}
	eventually(t, "the session", a.Online)
	if err := a.Emit("pxe.discovered", "telemetry", "52:54:00:00:00:01", map[string]int{"n": 1}); err != nil {
		t.Fatal(err)
	}
	if body := s.Event("pxe.discovered", "52:54:00:00:00:01").GetBodyJson(); string(body) != `{"n":1}` {
		t.Errorf("event body = %s", body)
	}

	s.Command(command("cmd_1"))
	s.Ack("cmd_1")
	if r := s.Result("cmd_1"); string(r.GetResult()) != "hello" || got != "hunter2" {
		t.Errorf("result = %v with secret %q, want the echo and the secret", r, got)
	}
	s.Event("command.finished", "cmd_1")

	// Mutual TLS outside of the session, and no following elsewhere.
	answer, err := a.HTTPClient().Get(a.BaseURL() + "/whoami")
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(answer.Body)
	answer.Body.Close()
	if string(body) != a.AgentID() || answer.ProtoMajor != 2 {
		t.Errorf("GET /whoami = %q over HTTP/%d, want the agent's id over HTTP/2", body, answer.ProtoMajor)
	}
	if r, err := a.HTTPClient().Get(a.BaseURL() + "/away"); err == nil {
		r.Body.Close()
		t.Error("HTTPClient followed a redirect, want an error")
	}
	if l, err := a.Locate(t.Context(), "abc", "amd64"); err != nil || l.GetSha256() != "abc" {
		t.Errorf("Locate = %v, %v", l, err)
	}

	id, epoch := a.AgentID(), s.Hello.GetJournalEpoch()
	a.stop()
	b := start(t, agent.Config{StateDir: dir, Kinds: []dispatch.Kind{kind}})
	s = g.Session(2)
	if b.AgentID() != id || s.Hello.GetJournalEpoch() != epoch {
		t.Errorf("restarted as %s with epoch %s, want %s with %s", b.AgentID(), s.Hello.GetJournalEpoch(), id, epoch)
	}
	for _, text := range []string{a.logs.text(), b.logs.text()} {
		if strings.Contains(text, "hunter2") || strings.Contains(text, "4711") {
			t.Error("a secret stands in the log")
		}
	}
	filepath.WalkDir(dir, func(path string, _ os.DirEntry, _ error) error {
		info, err := os.Stat(path)
		if err == nil && !info.IsDir() && info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %o, want 600", path, info.Mode().Perm())
		}
		if data, _ := os.ReadFile(path); bytes.Contains(data, []byte("hunter2")) || bytes.Contains(data, []byte("4711")) {
			t.Errorf("%s holds a secret", path)
		}
		return nil
	})
}

// TestFlippedBytes: one flipped byte of a command in flight is refused, beside
// the same command unharmed.
func TestFlippedBytes(t *testing.T) {
	g := agenttest.Start(t)
	runs := 0
	start(t, agent.Config{StateDir: t.TempDir(), Join: g.Join("t"), Kinds: []dispatch.Kind{
		echo(agentv1.Role_ROLE_SITE, func(context.Context, dispatch.Call) error { runs++; return nil }),
	}})
	s := g.Session(1)
	seal := func(id string) *agentv1.SignedCommand {
		p := command(id)
		p.AgentId, p.Incarnation = s.AgentID, s.Hello.GetJournalEpoch()
		p.IssuedAtMs, p.NotAfterMs = time.Now().UnixMilli(), time.Now().Add(time.Minute).UnixMilli()
		return g.Seal(t, p)
	}
	bad := seal("cmd_sig")
	bad.Signature[10] ^= 1
	s.SendCommand(bad)
	if code := s.Result("cmd_sig").GetError().GetCode(); code != "signature-invalid" {
		t.Errorf("flipped signature: %q, want signature-invalid", code)
	}
	bad = seal("cmd_pay")
	bad.Payload[len(bad.Payload)-1] ^= 1
	s.SendCommand(bad)
	if code := s.Result("cmd_pay").GetError().GetCode(); code != "signature-invalid" {
		t.Errorf("flipped payload: %q, want signature-invalid", code)
	}
	if runs != 0 {
		t.Errorf("refused commands ran %d times", runs)
	}
	s.SendCommand(seal("cmd_good"))
	if r := s.Result("cmd_good"); r.GetError() != nil || runs != 1 {
		t.Errorf("unharmed command: %v with %d runs, want a result", r, runs)
	}
}

// TestDroppedSession: a command survives the loss of its session, and its
// result comes in the next one, once.
func TestDroppedSession(t *testing.T) {
	g := agenttest.Start(t)
	release := make(chan struct{})
	runs := 0
	start(t, agent.Config{StateDir: t.TempDir(), Join: g.Join("t"), Kinds: []dispatch.Kind{
		echo(agentv1.Role_ROLE_SITE, func(context.Context, dispatch.Call) error { runs++; <-release; return nil }),
	}})
	s := g.Session(1)
	c := s.Command(command("cmd_1"))
	s.Ack("cmd_1")
	s.Drop()
	s = g.Session(2)
	if open := s.Hello.GetOpen(); len(open) != 1 || open[0].GetCommandId() != "cmd_1" || open[0].GetState() != "started" {
		t.Errorf("Hello.open = %v, want cmd_1 started", open)
	}
	s.SendCommand(c) // as a gateway does that missed the ack
	s.Ack("cmd_1")
	close(release)
	if r := s.Result("cmd_1"); string(r.GetResult()) != "hello" || runs != 1 {
		t.Errorf("result = %v after %d runs, want the echo after 1", r, runs)
	}
}

// TestKilledAgent leaves a command started and a result unacknowledged, and
// begins again on the same state.
func TestKilledAgent(t *testing.T) {
	g := agenttest.Start(t)
	dir := t.TempDir()
	block := make(chan struct{})
	kind := echo(agentv1.Role_ROLE_SITE, func(ctx context.Context, c dispatch.Call) error {
		if c.Payload.GetCommandId() == "cmd_hang" {
			close(block)
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	})
	a := start(t, agent.Config{StateDir: dir, Join: g.Join("t"), Kinds: []dispatch.Kind{kind}})
	g.Hold(true)
	s := g.Session(1)
	s.Command(command("cmd_done"))
	s.Result("cmd_done")
	s.Command(command("cmd_hang"))
	<-block
	a.stop()
	g.Hold(false)

	start(t, agent.Config{StateDir: dir, Kinds: []dispatch.Kind{kind}})
	s = g.Session(2)
	if r := s.Result("cmd_done"); string(r.GetResult()) != "hello" {
		t.Errorf("unacknowledged result after a restart = %v, want it again", r)
	}
	if code := s.Result("cmd_hang").GetError().GetCode(); code != "interrupted" {
		t.Errorf("started command after a restart: %q, want interrupted", code)
	}
}

// TestLostJournal: a command for the journal that was lost is not run again.
func TestLostJournal(t *testing.T) {
	g := agenttest.Start(t)
	dir := t.TempDir()
	runs := 0
	kind := echo(agentv1.Role_ROLE_SITE, func(context.Context, dispatch.Call) error { runs++; return nil })
	a := start(t, agent.Config{StateDir: dir, Join: g.Join("t"), Kinds: []dispatch.Kind{kind}})
	s := g.Session(1)
	c := s.Command(command("cmd_1"))
	s.Result("cmd_1")
	a.stop()
	if err := os.Remove(filepath.Join(dir, "journal")); err != nil {
		t.Fatal(err)
	}
	start(t, agent.Config{StateDir: dir, Kinds: []dispatch.Kind{kind}})
	s = g.Session(2)
	s.SendCommand(c)
	if code := s.Result("cmd_1").GetError().GetCode(); code != "wrong-incarnation" || runs != 1 {
		t.Errorf("replay after a lost journal: %q with %d runs, want wrong-incarnation and 1", code, runs)
	}
}

// copied is an enroll.Copy in memory.
type copied struct {
	data []byte
	err  error
}

func (c *copied) Load() ([]byte, error)   { return c.data, c.err }
func (c *copied) Store(data []byte) error { c.data = data; return c.err }

// TestLostState: the second copy of the identity brings a box home without a token.
func TestLostState(t *testing.T) {
	g := agenttest.Start(t)
	second := new(copied)
	a := start(t, agent.Config{StateDir: t.TempDir(), Identity: second, Join: g.Join("t")})
	g.Session(1)
	id := a.AgentID()
	a.stop()
	dir := t.TempDir()
	b := start(t, agent.Config{StateDir: dir, Identity: second})
	g.Session(2)
	if b.AgentID() != id {
		t.Errorf("with the second copy alone: %s, want %s", b.AgentID(), id)
	}
	b.stop()
	second.data[len(second.data)/2] ^= 1
	c := start(t, agent.Config{StateDir: dir, Identity: second})
	s := g.Session(3)
	if c.AgentID() != id {
		t.Errorf("with a damaged second copy: %s, want %s", c.AgentID(), id)
	}
	s.Event("state.degraded", "identity")
	c.stop()
	if d := start(t, agent.Config{Identity: second}); d.AgentID() != id {
		t.Errorf("the damaged copy was not mended: agent %q, want %s", d.AgentID(), id)
	}
}

// TestGatewayDown: the box keeps trying, says so once per distinct fault, and
// comes home by itself; the events of the outage are there.
func TestGatewayDown(t *testing.T) {
	g := agenttest.Start(t)
	g.Refuse(connect.NewError(connect.CodeUnavailable, errors.New("maintenance")))
	a := start(t, agent.Config{StateDir: t.TempDir(), Join: g.Join("t")})
	eventually(t, "a complaint", func() bool { return strings.Contains(a.logs.text(), "maintenance") })
	a.LinkUp()
	time.Sleep(200 * time.Millisecond)
	a.LinkUp()
	time.Sleep(200 * time.Millisecond)
	if n := strings.Count(a.logs.text(), "maintenance"); n != 1 {
		t.Errorf("the same fault was logged %d times, want once", n)
	}
	g.Refuse(nil)
	a.LinkUp()
	s := g.Session(1)
	s.Event("enrolment.failed", "enrolment")
	s.Event("enrolment.restored", "enrolment")
}

// TestWrongJoin: each wrong part of a join string is one clear line, and no
// identity comes of it.
func TestWrongJoin(t *testing.T) {
	g := agenttest.Start(t)
	for name, test := range map[string]struct {
		change func(j *trust.Join)
		want   string
	}{
		"CA pin":   {func(j *trust.Join) { j.CASPKI[0] ^= 1 }, "pinned key"},
		"root set": {func(j *trust.Join) { j.RootSet[0] ^= 1 }, "roots are not the ones"},
		"token":    {func(j *trust.Join) { j.Token = secret.New([]byte("other")) }, "token-used"},
		"host":     {func(j *trust.Join) { j.URLs = []string{strings.Replace(g.URL, "127.0.0.1", "127.0.0.2", 1)} }, "127.0.0.2"},
		"nobody":   {func(j *trust.Join) { j.URLs = []string{"https://127.0.0.1:1"} }, "refused"},
	} {
		t.Run(name, func(t *testing.T) {
			join := g.Join("token-" + name)
			test.change(join)
			a := start(t, agent.Config{StateDir: t.TempDir(), Join: join})
			eventually(t, "a line with "+test.want, func() bool { return strings.Contains(a.logs.text(), test.want) })
			if a.AgentID() != "" || a.Online() {
				t.Errorf("agent %q is online %v, want neither", a.AgentID(), a.Online())
			}
		})
	}
}

// TestVoucher is a ramdisk's life: through the box to the gateway, by a voucher
// that the box signed, everything in memory.
func TestVoucher(t *testing.T) {
	g := agenttest.Start(t)
	box := start(t, agent.Config{StateDir: t.TempDir(), Join: g.Join("t")})
	g.Session(1)
	signed, err := box.SignVoucher(&agentv1.Voucher{
		MachineId: "node_7", BootNonce: make([]byte, 16), WindowId: "win_1", Purpose: "deploy",
		IssuedAtMs: time.Now().UnixMilli(), NotAfterMs: time.Now().Add(time.Hour).UnixMilli(),
	})
	if err != nil {
		t.Fatal(err)
	}
	voucher, err := proto.Marshal(signed)
	if err != nil {
		t.Fatal(err)
	}
	join := g.Join("unused")
	boot := &bootinfo.Info{
		MachineID: "node_7", SiteID: agenttest.SiteID, GatewayURLs: join.URLs, Via: "198.51.100.1:7443",
		CASPKI: join.CASPKI[:], RootSet: join.RootSet[:], Voucher: voucher,
	}
	dialled := map[string]bool{}
	var mu sync.Mutex
	ramdisk := start(t, agent.Config{
		Role: agentv1.Role_ROLE_RAMDISK, Boot: boot, ProductUUID: "label", MACs: []string{"52:54:00:00:00:01"},
		Kinds: []dispatch.Kind{echo(agentv1.Role_ROLE_RAMDISK, nil)},
		Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
			mu.Lock()
			dialled[addr] = true
			mu.Unlock()
			return new(net.Dialer).DialContext(ctx, network, g.Addr())
		},
	})
	s := g.Session(2)
	if ramdisk.MachineID() != "node_7" || s.Hello.GetRole() != agentv1.Role_ROLE_RAMDISK {
		t.Errorf("ramdisk of machine %q said %v", ramdisk.MachineID(), s.Hello)
	}
	mu.Lock()
	if fmt.Sprint(dialled) != "map[198.51.100.1:7443:true]" {
		t.Errorf("dialled %v, want only the box", dialled)
	}
	mu.Unlock()
	s.Command(command("cmd_1")) // its incarnation is the boot id
	if r := s.Result("cmd_1"); r.GetError() != nil {
		t.Errorf("result = %v, want the echo: a ramdisk's journal may be in memory", r)
	}
	p := command("cmd_2")
	p.Incarnation = s.Hello.GetJournalEpoch()
	s.Command(p)
	if code := s.Result("cmd_2").GetError().GetCode(); code != "wrong-incarnation" {
		t.Errorf("command for the journal's epoch: %q, want wrong-incarnation", code)
	}

	boot.Voucher = bytes.Clone(voucher)
	boot.Voucher[10] ^= 1
	forged := start(t, agent.Config{Role: agentv1.Role_ROLE_RAMDISK, Boot: boot, Via: g.Addr()})
	eventually(t, "a refusal", func() bool { return strings.Contains(forged.logs.text(), "reason=") })
	if forged.AgentID() != "" {
		t.Errorf("forged voucher became %q", forged.AgentID())
	}
}

// TestSecondRequestOnAToken: a lost answer is asked for again with the same
// request; another device with the same token gets nothing.
func TestSecondRequestOnAToken(t *testing.T) {
	g := agenttest.Start(t)
	join := g.Join("t")
	dir := t.TempDir()
	a := start(t, agent.Config{StateDir: dir, Join: join})
	g.Session(1)
	id := a.AgentID()
	a.stop()
	thief := start(t, agent.Config{StateDir: t.TempDir(), Join: join})
	eventually(t, "the refusal", func() bool { return strings.Contains(thief.logs.text(), "token-used") })
	if thief.AgentID() != "" {
		t.Errorf("second device became %q", thief.AgentID())
	}
	b := start(t, agent.Config{StateDir: dir, Join: join})
	g.Session(2)
	if b.AgentID() != id {
		t.Errorf("restart with the spent join string: %s, want %s", b.AgentID(), id)
	}
}

// TestNewJoin: a box that is given another join string enrols with it, and
// keeps its old identity while that fails.
func TestNewJoin(t *testing.T) {
	g := agenttest.Start(t)
	dir := t.TempDir()
	a := start(t, agent.Config{StateDir: dir, Join: g.Join("t")})
	g.Session(1)
	id := a.AgentID()
	a.stop()

	wrong := g.Join("u")
	wrong.Token = secret.New([]byte("mistyped"))
	b := start(t, agent.Config{StateDir: dir, Join: wrong})
	g.Session(2).Event("enrolment.failed", "enrolment")
	if b.AgentID() != id {
		t.Errorf("with a bad new join string: %s, want %s", b.AgentID(), id)
	}
	b.stop()

	c := start(t, agent.Config{StateDir: dir, Join: g.Join("v")})
	if s := g.Session(3); c.AgentID() == id || s.AgentID != c.AgentID() {
		t.Errorf("with a new join string: %s, want another than %s", c.AgentID(), id)
	}
	c.stop()
	d := start(t, agent.Config{StateDir: dir})
	if s := g.Session(4); s.AgentID != c.AgentID() || d.AgentID() != c.AgentID() {
		t.Errorf("restarted as %s, want %s", d.AgentID(), c.AgentID())
	}
}

func TestRenewal(t *testing.T) {
	g := agenttest.Start(t)
	g.Life = 3 * time.Second
	dir := t.TempDir()
	a := start(t, agent.Config{StateDir: dir, Join: g.Join("t")})
	s := g.Session(1)
	eventually(t, "a renewal", func() bool { return g.Renewals() == 1 })
	time.Sleep(2 * time.Second) // the first certificate has ended
	if r, err := a.HTTPClient().Get(a.BaseURL() + "/whoami"); err != nil {
		t.Errorf("after the first certificate's end: %v", err)
	} else {
		r.Body.Close()
	}
	s.Drop()
	g.Session(2)
	a.stop()
	start(t, agent.Config{StateDir: dir})
	g.Session(3)
	if n := g.Renewals(); n != 1 {
		t.Errorf("renewals = %d, want 1", n)
	}
}

// TestBundles: newer bundles come with Welcome, in turn, and stay.
func TestBundles(t *testing.T) {
	g := agenttest.Start(t)
	dir := t.TempDir()
	kinds := []dispatch.Kind{echo(agentv1.Role_ROLE_SITE, nil)}
	a := start(t, agent.Config{StateDir: dir, Join: g.Join("t"), Kinds: kinds})
	s := g.Session(1)
	s.Command(command("cmd_1"))
	s.Result("cmd_1")

	second := g.Content(2, g.URL)
	g.AddBundle(second)
	third := g.Content(3, g.URL)
	third.CommandKeys = [][]byte{make([]byte, ed25519.PublicKeySize)}
	g.AddBundle(third)
	s.Drop()
	s = g.Session(2)
	s.Event("bundle.applied", "3")
	if v := a.Bundle().Version(); v != 3 {
		t.Errorf("bundle version = %d, want 3", v)
	}
	s.Command(command("cmd_2"))
	if code := s.Result("cmd_2").GetError().GetCode(); code != "key-unknown" {
		t.Errorf("command by a withdrawn key: %q, want key-unknown", code)
	}
	a.stop()
	b := start(t, agent.Config{StateDir: dir, Kinds: kinds})
	if v := b.Bundle().Version(); v != 3 {
		t.Errorf("bundle version after a restart = %d, want 3", v)
	}

	// A bundle that the roots did not sign is refused, and the line stays.
	stranger := agenttest.NewAuthority(t)
	rogue := g.Content(4, g.URL)
	rogue.Roots = [][]byte{stranger.Root.Public().(ed25519.PublicKey)}
	g.AddBundle(rogue) // signed by the old root alone
	s = g.Session(3)
	s.Drop()
	g.Session(4).Event("trust.failed", "trust")
	if v := b.Bundle().Version(); v != 3 {
		t.Errorf("bundle version after a rogue one = %d, want 3", v)
	}
}

// TestBundlesThatRanOutLeadOn: a box that was dark while a bundle came and ran
// out still gets to the one after it, and is given no last one that ran out.
func TestBundlesThatRanOutLeadOn(t *testing.T) {
	g := agenttest.Start(t)
	a := start(t, agent.Config{StateDir: t.TempDir(), Join: g.Join("t")})
	s := g.Session(1)
	ranOut := func(version uint64) {
		content := g.Content(version, g.URL)
		content.IssuedAtMs, content.ValidUntilMs = 1, time.Now().Add(-time.Hour).UnixMilli()
		g.AddBundle(content)
	}
	ranOut(2)
	g.AddBundle(g.Content(3, g.URL))
	ranOut(4)
	s.Drop()
	s = g.Session(2)
	s.Event("bundle.applied", "3")
	s.Event("trust.failed", "trust")
	if v := a.Bundle().Version(); v != 3 {
		t.Errorf("bundle version = %d, want 3", v)
	}
}

func TestStateFolderIsHeldOnce(t *testing.T) {
	dir := t.TempDir()
	cfg := agent.Config{Role: agentv1.Role_ROLE_SITE, StateDir: dir, Log: slog.New(slog.DiscardHandler)}
	a, err := agent.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := agent.New(cfg); err == nil || !strings.Contains(err.Error(), "held by another process") {
		t.Errorf("second New on one folder = %v, want a refusal", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	a.Run(ctx)
	if b, err := agent.New(cfg); err != nil {
		t.Errorf("New after the first has ended = %v, want nil", err)
	} else {
		b.Run(ctx)
	}
}

// TestBadJournal: a journal that cannot be read leaves the box serving, without
// destructive work.
func TestBadJournal(t *testing.T) {
	g := agenttest.Start(t)
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "journal"), 0o700); err != nil {
		t.Fatal(err)
	}
	start(t, agent.Config{StateDir: dir, Join: g.Join("t"), Kinds: []dispatch.Kind{echo(agentv1.Role_ROLE_SITE, nil)}})
	s := g.Session(1)
	s.Event("state.degraded", "journal")
	s.Command(command("cmd_1"))
	if code := s.Result("cmd_1").GetError().GetCode(); code != "operation-not-allowed" {
		t.Errorf("destructive command without a journal on disk: %q, want operation-not-allowed", code)
	}
}

// TestUnenrolled: what needs an identity says so.
func TestUnenrolled(t *testing.T) {
	a := start(t, agent.Config{StateDir: t.TempDir()})
	if _, err := a.SignVoucher(&agentv1.Voucher{}); err == nil {
		t.Error("SignVoucher before enrolment = nil, want an error")
	}
	if r, err := a.HTTPClient().Get("https://127.0.0.1:1/"); err == nil {
		r.Body.Close()
		t.Error("Get before enrolment = nil, want an error")
	}
	if a.BaseURL() != "" || a.AgentID() != "" || a.Bundle() != nil {
		t.Errorf("before enrolment: %q %q %v", a.BaseURL(), a.AgentID(), a.Bundle())
	}
	eventually(t, "a line", func() bool { return strings.Contains(a.logs.text(), "neither an identity nor a join string") })
}
