package commands_test

import (
	"crypto/ed25519"
	"crypto/sha256"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/module"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

type signer struct{ key ed25519.PrivateKey }

func (signer) KeyID() string                         { return "key" }
func (s signer) Sign(message []byte) ([]byte, error) { return ed25519.Sign(s.key, message), nil }

// TestSubmitAgainWithoutItsModule: a caller that comes back to a gateway that
// sends the kind no more, or in another lane, still gets the command that it sent.
func TestSubmitAgainWithoutItsModule(t *testing.T) {
	st, err := store.Open(filepath.Join(t.TempDir(), "gateway.db"), time.Now)
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
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
