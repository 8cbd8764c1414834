package commands_test

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"errors"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

type signer struct{ key ed25519.PrivateKey }

func (signer) KeyID() string                         { return "key" }
func (s signer) Sign(message []byte) ([]byte, error) { return ed25519.Sign(s.key, message), nil }

// openStore has an agent ag_1, the box of site_1, that has connected.
func openStore(t *testing.T) *store.Store {
	t.Helper()
	st, err := store.Open(filepath.Join(t.TempDir(), "gateway.db"), time.Now)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	digest := sha256.Sum256([]byte("ag_1"))
	token := store.Token{Hash: digest, Role: agentv1.Role_ROLE_SITE, SiteID: "site_1", Expires: time.Now().Add(time.Hour)}
	if err := st.AddToken(t.Context(), token); err != nil {
		t.Fatal(err)
	}
	_, err = st.Enrol(t.Context(), store.Enrolment{
		Agent: store.Agent{ID: "ag_1", Role: agentv1.Role_ROLE_SITE, SiteID: "site_1"}, Token: &token,
		Certificate: store.Certificate{Fingerprint: digest, AgentID: "ag_1", CSRHash: digest, DER: []byte("x"), NotAfter: time.Now().Add(time.Hour), RenewAfter: time.Now()},
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := st.Greeted(t.Context(), "ag_1", &agentv1.Hello{AgentId: "ag_1", BootId: "b", JournalEpoch: "j", EventEpoch: "e"}); err != nil {
		t.Fatal(err)
	}
	return st
}

// TestSubmitAgainWithoutItsModule: a caller that comes back to a gateway that
// sends the kind no more, or in another lane, still gets the command that it sent.
func TestSubmitAgainWithoutItsModule(t *testing.T) {
	st := openStore(t)
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	gateway := func(lane string) *commands.Service {
		m := module.Module{Name: "test"}
		if lane != "" {
			m.Kinds = []module.Kind{{Name: "test.do", Lane: lane, Timeout: time.Minute, Roles: []agentv1.Role{agentv1.Role_ROLE_SITE}}}
		}
		set, err := module.Join(m)
		if err != nil {
			t.Fatal(err)
		}
		return commands.New(st, signer{key}, set, slog.New(slog.DiscardHandler))
	}
	sent := commands.Spec{ID: "wf_1.main.0.0", AgentID: "ag_1", Kind: "test.do", Raw: []byte("a")}
	for _, tt := range []struct {
		name, lane string
		spec       commands.Spec
		want       errs.Code
	}{
		{"first", "query", sent, ""},
		{"again", "query", sent, ""},
		{"without the module", "", sent, ""},
		{"in another lane", "power", sent, ""},
		{"other content", "", commands.Spec{ID: sent.ID, AgentID: "ag_1", Kind: "test.do", Raw: []byte("b")}, errs.DuplicateMismatch},
		{"a new one without the module", "", commands.Spec{ID: "wf_1.main.1.0", AgentID: "ag_1", Kind: "test.do"}, errs.UnknownKind},
	} {
		id, err := gateway(tt.lane).Submit(t.Context(), tt.spec)
		if errs.CodeOf(err) != tt.want || tt.want == "" && id != sent.ID {
			t.Errorf("%s: Submit = %q, %v, want code %q", tt.name, id, err, tt.want)
		}
	}
	if open, err := st.OpenCommands(t.Context(), "ag_1"); err != nil || len(open) != 1 {
		t.Errorf("%d open commands, %v, want one", len(open), err)
	}
}

// TestCompleting: what goes out under the gateway's key is completed; a command is
// known by what its caller sent; and one that cannot be completed is not sent.
func TestCompleting(t *testing.T) {
	st := openStore(t)
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	gateway := func(complete commands.Complete) *commands.Service {
		set, err := module.Join(module.Module{Name: "test", Kinds: []module.Kind{
			{Name: "test.do", Lane: "query", Timeout: time.Minute, Roles: []agentv1.Role{agentv1.Role_ROLE_SITE}},
			{Name: "test.plain", Lane: "query", Timeout: time.Minute, Roles: []agentv1.Role{agentv1.Role_ROLE_SITE}},
		}})
		if err != nil {
			t.Fatal(err)
		}
		s := commands.New(st, signer{key}, set, slog.New(slog.DiscardHandler))
		s.Completing("test.do", complete)
		return s
	}
	by := func(tail string) commands.Complete {
		return func(args []byte) ([]byte, error) { return append(args[:len(args):len(args)], tail...), nil }
	}
	refuse := func([]byte) ([]byte, error) { return nil, errs.New(errs.InvalidArgs, "not to be completed") }
	for _, tt := range []struct {
		name     string
		complete commands.Complete
		id, kind string
		want     errs.Code
		args     string // as they go out
	}{
		{"completed", by("+key1"), "c1", "test.do", "", "a+key1"},
		{"again under another key", by("+key2"), "c1", "test.do", "", "a+key1"},
		{"another kind", by("+key1"), "c2", "test.plain", "", "a"},
		{"refused", refuse, "c3", "test.do", errs.InvalidArgs, ""},
	} {
		_, err := gateway(tt.complete).Submit(t.Context(), commands.Spec{ID: tt.id, AgentID: "ag_1", Kind: tt.kind, Raw: []byte("a")})
		if errs.CodeOf(err) != tt.want {
			t.Errorf("%s: Submit = %v, want code %q", tt.name, err, tt.want)
		}
		c, err := st.Command(t.Context(), tt.id)
		if tt.want != "" {
			if !errors.Is(err, store.ErrNotFound) {
				t.Errorf("%s: the command is kept: %v, %v", tt.name, c, err)
			}
			continue
		}
		var p agentv1.CommandPayload
		if err != nil || proto.Unmarshal(c.Signed.GetPayload(), &p) != nil || string(p.Args) != tt.args {
			t.Errorf("%s: arguments %q go out, %v, want %q", tt.name, p.Args, err, tt.args)
		}
	}
}

// people cite a grant for what they know, and say of anything else that one lapsed.
type people struct{ cites bool }

func (p people) Cite(context.Context, store.Agent, *agentv1.CommandPayload) (*agentv1.GrantCitation, error) {
	if !p.cites {
		return nil, nil
	}
	payload, err := proto.Marshal(&agentv1.Grant{GrantId: "grant_2"})
	return &agentv1.GrantCitation{Grant: &agentv1.SignedGrant{Payload: payload}}, err
}

func (people) Lapsed(_ context.Context, agent store.Agent, p *agentv1.CommandPayload) (string, error) {
	return "grant_1 of " + agent.SiteID + " for " + p.GetKind() + " ended", nil
}

// TestRefusalIsExplained: a box that wants a grant is not told of those that hold
// no more; who reads the command's end is, beside what the box said.
func TestRefusalIsExplained(t *testing.T) {
	st := openStore(t)
	kinds, err := module.Join(module.Module{Name: "test", Kinds: []module.Kind{{Name: "test.do", Lane: "query", Timeout: time.Minute, Roles: []agentv1.Role{agentv1.Role_ROLE_SITE}}}})
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		cites bool
		end   *errs.Error
		want  string
	}{
		"refused":            {false, errs.New(errs.QuorumRequired, "a grant is needed"), "quorum-required: a grant is needed. The gateway knows: grant_1 of site_1 for test.do ended"},
		"refused with one":   {true, errs.New(errs.QuorumRequired, "it counts beside the grant"), "quorum-required: it counts beside the grant"},
		"refused for others": {false, errs.New(errs.BmcError, "no"), "bmc-error: no"},
	} {
		_, key, err := ed25519.GenerateKey(nil)
		if err != nil {
			t.Fatal(err)
		}
		s := commands.New(st, signer{key}, kinds, slog.New(slog.DiscardHandler))
		s.CiteFrom(people{tt.cites})
		id, err := s.Submit(t.Context(), commands.Spec{AgentID: "ag_1", Kind: "test.do"})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Finish(t.Context(), "ag_1", id, nil, tt.end); err != nil {
			t.Fatal(err)
		}
		if c, err := st.Command(t.Context(), id); err != nil || c.Err == nil || c.Err.Error() != tt.want {
			t.Errorf("%s: ended with %v, %v, want %q", name, c.Err, err, tt.want)
		}
	}
}
