package enrol

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net/http"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/api/agentv1/agentv1connect"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/caller"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/keys"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

// VerifyPeer is a tls.Config's VerifyConnection: a client certificate, where
// there is one, must come from the gateway's CA. One that ended less than
// RenewGrace ago gets through the handshake; Authenticate lets it renew only.
func (s *Service) VerifyPeer(state tls.ConnectionState) error {
	if len(state.PeerCertificates) == 0 {
		return nil
	}
	leaf := state.PeerCertificates[0]
	now := s.store.Now()
	if now.After(leaf.NotAfter) && now.Before(leaf.NotAfter.Add(RenewGrace)) {
		now = leaf.NotAfter
	}
	_, err := leaf.Verify(x509.VerifyOptions{
		Roots:       s.keys.Current.CAs(),
		CurrentTime: now,
		KeyUsages:   []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
	return err
}

// Authenticate puts the agent of the connection's certificate into the
// request's context. Only Enroll goes on without one.
func (s *Service) Authenticate(next http.Handler) http.Handler {
	refuse := connect.NewErrorWriter()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == agentv1connect.EnrolmentServiceEnrollProcedure {
			next.ServeHTTP(w, r)
			return
		}
		agent, err := s.identify(r.Context(), r.TLS, r.URL.Path)
		if err != nil {
			s.log.Warn("call refused", "peer", r.RemoteAddr, "path", r.URL.Path, "err", err)
			if r.Method == http.MethodPost && refuse.IsSupported(r) {
				if err := refuse.Write(w, r, caller.Error(hide(err))); err != nil {
					s.log.Debug("write refusal", "err", err)
				}
			} else {
				http.Error(w, string(errs.CodeOf(err)), http.StatusForbidden)
			}
			return
		}
		next.ServeHTTP(w, r.WithContext(caller.With(r.Context(), agent)))
	})
}

func (s *Service) identify(ctx context.Context, state *tls.ConnectionState, path string) (store.Agent, error) {
	renewing := path == agentv1connect.EnrolmentServiceRenewProcedure
	if state == nil || len(state.PeerCertificates) == 0 {
		return store.Agent{}, errs.New(errs.NotEnrolled, "this call needs an agent's certificate")
	}
	leaf := state.PeerCertificates[0]
	// The handshake judged the chain, but a connection may outlive a certificate.
	if s.store.Now().After(leaf.NotAfter) && !renewing {
		return store.Agent{}, errs.New(errs.Expired, "the agent's certificate ran out; only Renew is left")
	}
	id, ok := keys.AgentID(leaf)
	if !ok {
		return store.Agent{}, errs.New(errs.NotEnrolled, "the certificate names no agent")
	}
	agent, err := s.store.AgentByCertificate(ctx, sha256.Sum256(leaf.Raw))
	if errors.Is(err, store.ErrNotFound) || err == nil && agent.ID != id {
		return store.Agent{}, errs.New(errs.NotEnrolled, "the certificate is not one that this gateway issued to an agent")
	}
	if err != nil {
		return store.Agent{}, err
	}
	if err := commands.MayAct(agent); err != nil {
		return agent, err
	}
	return agent, s.mayCall(ctx, agent, path)
}
