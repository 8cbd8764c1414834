package enroll_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/agent/agenttest"
	"github.com/better-compute/site-appliance/appliance/agent/enroll"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/clock"
)

// gateway answers as the test says.
type gateway struct {
	t         *testing.T
	authority *agenttest.Authority
	change    func(r *agentv1.EnrollResponse)
	seen      *agentv1.EnrollRequest
}

func (g *gateway) Enroll(_ context.Context, r *connect.Request[agentv1.EnrollRequest]) (*connect.Response[agentv1.EnrollResponse], error) {
	g.seen = r.Msg
	csr, err := x509.ParseCertificateRequest(r.Msg.GetCsr())
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	answer := &agentv1.EnrollResponse{
		AgentId: "ag_1", Chain: g.authority.AgentChain(g.t, "ag_1", csr.PublicKey, 24*time.Hour),
		Bundle:       g.authority.Sign(g.t, g.authority.Content(1, "https://gw.example:7443")),
		ServerTimeMs: time.Now().UnixMilli(), RenewAfterMs: time.Now().Add(12 * time.Hour).UnixMilli(),
	}
	if g.change != nil {
		g.change(answer)
	}
	return connect.NewResponse(answer), nil
}

func (g *gateway) Renew(context.Context, *connect.Request[agentv1.RenewRequest]) (*connect.Response[agentv1.RenewResponse], error) {
	return nil, connect.NewError(connect.CodeUnimplemented, errors.New("not here"))
}

func newClock() *clock.Trusted {
	return clock.New(time.Now().AddDate(-1, 0, 0), time.Time{}, time.Now)
}

func request(a *agenttest.Authority) enroll.Request {
	return enroll.Request{Token: []byte("t"), RootSet: a.RootSet(), Role: agentv1.Role_ROLE_SITE, SiteID: "site_1"}
}

func identity(t *testing.T, a *agenttest.Authority) *enroll.Identity {
	t.Helper()
	p, err := enroll.NewPending(request(a).Origin())
	if err != nil {
		t.Fatal(err)
	}
	id, err := enroll.Enroll(t.Context(), &gateway{t: t, authority: a}, newClock(), request(a), p)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// TestEnrollChecksTheAnswer: pinned TLS says who answers, and still nothing of
// the answer is taken unchecked.
func TestEnrollChecksTheAnswer(t *testing.T) {
	a, other := agenttest.NewAuthority(t), agenttest.NewAuthority(t)
	stranger, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		role   agentv1.Role
		change func(r *agentv1.EnrollResponse, key any)
		want   string
	}{
		"good":           {change: func(*agentv1.EnrollResponse, any) {}},
		"no agent id":    {change: func(r *agentv1.EnrollResponse, _ any) { r.AgentId = "" }, want: "no agent id"},
		"other agent id": {change: func(r *agentv1.EnrollResponse, _ any) { r.AgentId = "ag_2" }, want: "not \"ag_2\""},
		"no chain":       {change: func(r *agentv1.EnrollResponse, _ any) { r.Chain = nil }, want: "chain of 0"},
		"garbage":        {change: func(r *agentv1.EnrollResponse, _ any) { r.Chain[0] = []byte{1} }, want: "does not parse"},
		"other key": {change: func(r *agentv1.EnrollResponse, _ any) {
			r.Chain = a.AgentChain(t, "ag_1", stranger.Public(), time.Hour)
		}, want: "another key"},
		"other CA":          {change: func(r *agentv1.EnrollResponse, key any) { r.Chain = other.AgentChain(t, "ag_1", key, time.Hour) }, want: "not of the bundle's CAs"},
		"ended certificate": {change: func(r *agentv1.EnrollResponse, key any) { r.Chain = a.AgentChain(t, "ag_1", key, -time.Second) }, want: "not of the bundle's CAs"},
		"no bundle":         {change: func(r *agentv1.EnrollResponse, _ any) { r.Bundle = nil }, want: "trust bundle"},
		"other roots' bundle": {change: func(r *agentv1.EnrollResponse, _ any) {
			r.Bundle = other.Sign(t, other.Content(1, "https://gw.example"))
		}, want: "join string pins"},
		"flipped bundle signature": {change: func(r *agentv1.EnrollResponse, _ any) { r.Bundle.Signatures[0].Signature[0] ^= 1 }, want: "signed by 0"},
		"node without a machine":   {role: agentv1.Role_ROLE_NODE, change: func(*agentv1.EnrollResponse, any) {}, want: "no machine"},
		"node with its machine":    {role: agentv1.Role_ROLE_NODE, change: func(r *agentv1.EnrollResponse, _ any) { r.MachineId = "node_1" }},
	} {
		t.Run(name, func(t *testing.T) {
			r := request(a)
			if test.role != agentv1.Role_ROLE_UNSPECIFIED {
				r.Role = test.role
			}
			p, err := enroll.NewPending(r.Origin())
			if err != nil {
				t.Fatal(err)
			}
			g := &gateway{t: t, authority: a, change: func(r *agentv1.EnrollResponse) { test.change(r, p.Key.Public()) }}
			id, err := enroll.Enroll(t.Context(), g, newClock(), r, p)
			switch {
			case test.want == "" && err != nil:
				t.Errorf("Enroll = %v, want nil", err)
			case test.want != "" && (err == nil || id != nil || !strings.Contains(err.Error(), test.want)):
				t.Errorf("Enroll = %v, %v; want an error with %q", id, err, test.want)
			}
			if g.seen.GetToken() != "t" || len(g.seen.GetNonce()) != 16 || g.seen.GetProtocolMax() != 1 {
				t.Errorf("request = %v", g.seen)
			}
		})
	}
}

// copied is a Copy in memory.
type copied struct{ data []byte }

func (c *copied) Load() ([]byte, error)   { return c.data, nil }
func (c *copied) Store(data []byte) error { c.data = bytes.Clone(data); return nil }

// broken is a Copy on a medium that fails.
type broken struct{}

func (broken) Load() ([]byte, error) { return nil, errors.New("medium error") }
func (broken) Store([]byte) error    { return errors.New("medium error") }

func TestStore(t *testing.T) {
	a := agenttest.NewAuthority(t)
	dir, second := t.TempDir(), new(copied)
	s := enroll.NewStore(dir, second)
	if id, err := s.Load(); id != nil || err != nil {
		t.Errorf("Load(nothing) = %v, %v; want nothing", id, err)
	}
	first := identity(t, a)
	if fatal, partial := s.Save(first); fatal != nil || partial != nil {
		t.Fatal(fatal, partial)
	}
	got, err := s.Load()
	if err != nil || got.AgentID != "ag_1" || !got.Key.Equal(first.Key) || got.Bundle.Version() != 1 || got.Origin != first.Origin {
		t.Fatalf("Load = %+v, %v; want what was saved", got, err)
	}

	// The newer copy wins and mends the older.
	newer := first.WithBundle(first.Bundle)
	if fatal, _ := enroll.NewStore("", second).Save(newer); fatal != nil {
		t.Fatal(fatal)
	}
	if got, err = s.Load(); err != nil || got.Serial != newer.Serial {
		t.Errorf("Load with a newer copy = serial %d, %v; want %d", got.Serial, err, newer.Serial)
	}
	if got, err = enroll.NewStore(dir, nil).Load(); err != nil || got.Serial != newer.Serial {
		t.Errorf("the older copy was not mended: serial %d, %v", got.Serial, err)
	}

	// Every damaged byte is seen, whatever it says.
	path := filepath.Join(dir, "identity.json")
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for at := 0; at < len(good); at += 97 {
		bad := bytes.Clone(good)
		bad[at] ^= 1
		if err := os.WriteFile(path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		if id, err := enroll.NewStore(dir, nil).Load(); id != nil || err == nil {
			t.Errorf("Load with byte %d flipped = %v, %v; want an error", at, id, err)
		}
	}
	if id, err := s.Load(); id == nil || err == nil || id.Serial != newer.Serial {
		t.Errorf("Load with one damaged copy = %v, %v; want the good one and a complaint", id, err)
	}
	if mended, err := os.ReadFile(path); err != nil || !bytes.Equal(mended, good) {
		t.Errorf("the damaged copy was not mended (%v)", err)
	}
}

func TestStoreWithBrokenPlaces(t *testing.T) {
	a := agenttest.NewAuthority(t)
	id := identity(t, a)
	dir := t.TempDir()
	if fatal, partial := enroll.NewStore(dir, broken{}).Save(id); fatal != nil || partial == nil {
		t.Errorf("Save with one broken place = %v, %v; want only a complaint", fatal, partial)
	}
	if got, err := enroll.NewStore(dir, broken{}).Load(); got == nil || err == nil {
		t.Errorf("Load with one broken place = %v, %v; want the other and a complaint", got, err)
	}
	if fatal, _ := enroll.NewStore(filepath.Join(dir, "missing"), broken{}).Save(id); fatal == nil {
		t.Error("Save with every place broken = nil, want an error")
	}
	if fatal, partial := enroll.NewStore("", nil).Save(id); fatal != nil || partial != nil {
		t.Errorf("Save with no places = %v, %v; want nothing", fatal, partial)
	}
}

// TestPendingStays: a restart before the answer asks with the same request.
func TestPendingStays(t *testing.T) {
	a := agenttest.NewAuthority(t)
	dir := t.TempDir()
	origin := request(a).Origin()
	first, err := enroll.NewStore(dir, nil).Pending(origin)
	if err != nil {
		t.Fatal(err)
	}
	again, err := enroll.NewStore(dir, nil).Pending(origin)
	if err != nil || !bytes.Equal(first.CSR, again.CSR) || !first.Key.Equal(again.Key) {
		t.Errorf("Pending after a restart (%v): another request, want the same", err)
	}
	other, err := enroll.NewStore(dir, nil).Pending([32]byte{1})
	if err != nil || bytes.Equal(first.CSR, other.CSR) {
		t.Errorf("Pending of another join string (%v): the same request, want another", err)
	}
	if _, err := enroll.NewStore(filepath.Join(dir, "missing"), nil).Pending(origin); err == nil {
		t.Error("Pending that cannot be kept = nil, want an error: the token would be spent on a key that a power cut loses")
	}
}

func TestLapsedAndRenewAt(t *testing.T) {
	id := identity(t, agenttest.NewAuthority(t))
	end := id.Leaf.NotAfter
	for _, test := range []struct {
		at              time.Time
		over, renewable bool
	}{
		{end.Add(-time.Second), false, true},
		{end.Add(time.Second), true, true},
		{end.Add(enroll.Grace - time.Second), true, true},
		{end.Add(enroll.Grace + time.Second), true, false},
	} {
		if over, renewable := id.Lapsed(test.at); over != test.over || renewable != test.renewable {
			t.Errorf("Lapsed(end%+d s) = %v, %v; want %v, %v", int(test.at.Sub(end).Seconds()), over, renewable, test.over, test.renewable)
		}
	}
	if at := id.RenewAt(0); !at.Equal(id.RenewAfter) {
		t.Errorf("RenewAt(0) = %s, want renew_after", at)
	}
	if at := id.RenewAt(0.99); !at.After(id.RenewAfter) || !at.Before(end) {
		t.Errorf("RenewAt(0.99) = %s, want between renew_after and the end", at)
	}
}

func FuzzVoucherFrom(f *testing.F) {
	f.Add([]byte{0x0a, 0x01, 0x00})
	f.Fuzz(func(t *testing.T, data []byte) {
		if v, err := enroll.VoucherFrom(data); (v == nil) == (err == nil) {
			t.Errorf("VoucherFrom(%x) = %v, %v", data, v, err)
		}
	})
}
