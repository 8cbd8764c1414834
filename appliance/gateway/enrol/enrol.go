// Package enrol gives agents their identity, for a one-time token or a boot
// window's voucher, and renews it.
package enrol

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/agentv1/agentv1connect"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/gateway/caller"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/keys"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

// Protocol is the version of the line home that this gateway speaks.
const Protocol = 1

// How long an agent's certificate lasts. A ramdisk's is short: the next boot
// brings a new identity.
const (
	longLife    = 90 * 24 * time.Hour
	ramdiskLife = 7 * 24 * time.Hour
	// RenewGrace is how far past its end a certificate may still renew, and do nothing else.
	RenewGrace = 30 * 24 * time.Hour
	// MaxTokenLife bounds a token's life.
	MaxTokenLife = 90 * 24 * time.Hour
)

// clockSkew is by how much a box's clock may be ahead of ours in a voucher.
const clockSkew = 10 * time.Minute

// Service is safe for concurrent use.
type Service struct {
	store *store.Store
	keys  *keys.Set
	log   *slog.Logger
	paces paces
	// OnSuperseded hears of an identity that a newer one replaced; set before use.
	OnSuperseded func(ctx context.Context, agentID string)
}

var _ agentv1connect.EnrolmentServiceHandler = (*Service)(nil)

// New makes the service.
func New(st *store.Store, set *keys.Set, log *slog.Logger) *Service {
	return &Service{store: st, keys: set, log: log, OnSuperseded: func(context.Context, string) {}}
}

// NewToken makes a join string that one site box or one machine's node agent
// enrols with, once, within ttl. The string holds a secret and is kept nowhere.
func (s *Service) NewToken(ctx context.Context, role agentv1.Role, siteID, machineID string, ttl time.Duration) (join string, err error) {
	switch {
	case role == agentv1.Role_ROLE_SITE && siteID != "" && machineID == "":
	case role == agentv1.Role_ROLE_NODE && siteID != "" && machineID != "":
	default:
		return "", errs.New(errs.InvalidArgs, "a token is for a site, or for a node with its site and machine")
	}
	if ttl <= 0 || ttl > MaxTokenLife {
		return "", errs.New(errs.InvalidArgs, "token life %s: want more than nothing and at most %s", ttl, MaxTokenLife)
	}
	raw := make([]byte, 32)
	rand.Read(raw)
	token := base64.RawURLEncoding.EncodeToString(raw)
	if err := s.store.AddToken(ctx, store.Token{Hash: sha256.Sum256([]byte(token)), Role: role, SiteID: siteID, MachineID: machineID, Expires: s.store.Now().Add(ttl)}); err != nil {
		return "", fmt.Errorf("make token: %w", err)
	}
	return trust.Join{
		URLs:    s.keys.Current.URLs(),
		CASPKI:  s.keys.Authority.SPKI(),
		RootSet: s.keys.Current.RootSet(),
		SiteID:  siteID,
		Token:   secret.New([]byte(token)),
	}.Encode(), nil
}

// OpenWindow lets a machine's ramdisk enrol until a time with a voucher of its
// site's box. The same window again only moves its end.
func (s *Service) OpenWindow(ctx context.Context, siteID, machineID, windowID, purpose string, until time.Time) error {
	if siteID == "" || machineID == "" || windowID == "" || purpose == "" {
		return errs.New(errs.InvalidArgs, "a boot window needs site, machine, id and purpose")
	}
	err := s.store.OpenWindow(ctx, store.Window{ID: windowID, SiteID: siteID, MachineID: machineID, Purpose: purpose, Until: until})
	if errors.Is(err, store.ErrConflict) {
		return errs.New(errs.DuplicateMismatch, "boot window %s is there for something else", windowID)
	}
	if err != nil {
		return fmt.Errorf("open boot window %s: %w", windowID, err)
	}
	return nil
}

// CloseWindow ends a window at once.
func (s *Service) CloseWindow(ctx context.Context, windowID string) error {
	return s.store.CloseWindow(ctx, windowID)
}

// Enroll answers EnrolmentService.Enroll.
func (s *Service) Enroll(ctx context.Context, req *connect.Request[agentv1.EnrollRequest]) (*connect.Response[agentv1.EnrollResponse], error) {
	res, err := s.enroll(ctx, req.Msg)
	if err != nil {
		s.log.Warn("enrolment refused", "peer", req.Peer().Addr, "role", req.Msg.Role.String(), "site", req.Msg.SiteId, "err", err)
		return nil, caller.Error(hide(err))
	}
	return connect.NewResponse(res), nil
}

// hide keeps what went wrong inside from a caller whom nobody knows yet.
func hide(err error) error {
	if e := errs.From(err); e.Code == errs.Internal {
		return errs.Retry(errs.Internal, "the gateway could not do it; its log says why")
	}
	return err
}

func (s *Service) enroll(ctx context.Context, m *agentv1.EnrollRequest) (*agentv1.EnrollResponse, error) {
	if m.ProtocolMin > Protocol || m.ProtocolMax < Protocol {
		return nil, errs.New(errs.ProtocolUnsupported, "this gateway speaks protocol %d, the agent %d to %d", Protocol, m.ProtocolMin, m.ProtocolMax)
	}
	if len(m.ProductUuid) > 64 || len(m.Macs) > 64 || len(m.Version) > 128 {
		return nil, errs.New(errs.InvalidPayload, "product_uuid, macs or version is too long")
	}
	for _, mac := range m.Macs {
		if len(mac) > 64 {
			return nil, errs.New(errs.InvalidPayload, "a MAC address is too long")
		}
	}
	public, err := parseCSR(m.Csr)
	if err != nil {
		return nil, err
	}
	e := store.Enrolment{Agent: store.Agent{Role: m.Role, ProductUUID: m.ProductUuid, MACs: m.Macs, Version: m.Version, BundleVersion: s.keys.Current.Version()}}
	switch c := m.Credential.(type) {
	case *agentv1.EnrollRequest_Token:
		err = s.byToken(ctx, m, c.Token, &e)
	case *agentv1.EnrollRequest_Voucher:
		err = s.byVoucher(ctx, m, c.Voucher, &e)
	default:
		err = errs.New(errs.NotEnrolled, "neither token nor voucher")
	}
	if err != nil {
		return nil, err
	}
	e.Agent.ID = s.store.NewID("ag")
	if e.Certificate, err = s.issue(e.Agent, m.Csr, public, e.Certificate.NotAfter); err != nil {
		return nil, err
	}
	done, err := s.store.Enrol(ctx, e)
	if errors.Is(err, store.ErrSpent) {
		s.alarm(ctx, e.Agent, "enrolment.refused", "the credential was used before with another CSR: someone else has a copy of it")
		return nil, errs.New(errs.TokenUsed, "the credential was used before with another CSR")
	}
	if err != nil {
		return nil, fmt.Errorf("enrol: %w", err)
	}
	if err := commands.MayAct(done.Agent); err != nil {
		return nil, err
	}
	for _, id := range done.Superseded {
		s.OnSuperseded(ctx, id)
	}
	if !done.Again {
		s.log.Info("agent enrolled", "agent", done.Agent.ID, "role", done.Agent.Role.String(), "site", done.Agent.SiteID, "machine", done.Agent.MachineID)
		s.event(ctx, done.Agent, "agent.enrolled", map[string]any{"role": roleName(done.Agent.Role), "replaced": done.Superseded})
	}
	return &agentv1.EnrollResponse{
		AgentId:      done.Agent.ID,
		Chain:        [][]byte{done.Certificate.DER, s.keys.Authority.Certificate().Raw},
		Bundle:       s.keys.Current.Raw(),
		ServerTimeMs: s.store.Now().UnixMilli(),
		RenewAfterMs: done.Certificate.RenewAfter.UnixMilli(),
		MachineId:    done.Agent.MachineID,
	}, nil
}

func roleName(r agentv1.Role) string {
	return strings.ToLower(strings.TrimPrefix(r.String(), "ROLE_"))
}

func (s *Service) byToken(ctx context.Context, m *agentv1.EnrollRequest, token string, e *store.Enrolment) error {
	t, err := s.store.Token(ctx, sha256.Sum256([]byte(token)))
	switch {
	case errors.Is(err, store.ErrNotFound):
		return errs.New(errs.NotEnrolled, "the join string's token is not known here")
	case err != nil:
		return fmt.Errorf("read token: %w", err)
	case !s.store.Now().Before(t.Expires):
		return errs.New(errs.Expired, "the join string's token ran out at %s", t.Expires.UTC().Format(time.RFC3339))
	case m.Role != t.Role:
		return errs.New(errs.RoleMismatch, "the token is for a %s, not for a %s", roleName(t.Role), roleName(m.Role))
	case m.SiteId != "" && m.SiteId != t.SiteID:
		return errs.New(errs.RoleMismatch, "the token is for another site")
	}
	e.Token = &t
	e.Agent.SiteID, e.Agent.MachineID = t.SiteID, t.MachineID
	return nil
}

func (s *Service) byVoucher(ctx context.Context, m *agentv1.EnrollRequest, signed *agentv1.SignedVoucher, e *store.Enrolment) error {
	if m.Role != agentv1.Role_ROLE_RAMDISK {
		return errs.New(errs.RoleMismatch, "a voucher is for a ramdisk, not for a %s", roleName(m.Role))
	}
	box, err := s.store.Agent(ctx, signed.GetSiteAgentId())
	switch {
	case errors.Is(err, store.ErrNotFound) || err == nil && box.Role != agentv1.Role_ROLE_SITE:
		return errs.New(errs.NotEnrolled, "the voucher names no box of this gateway")
	case err != nil:
		return fmt.Errorf("read voucher's box: %w", err)
	}
	if err := commands.MayAct(box); err != nil {
		return fmt.Errorf("voucher's box: %w", err)
	}
	v, err := s.openVoucher(ctx, box.ID, signed)
	if err != nil {
		return err
	}
	w, err := s.store.Window(ctx, v.WindowId)
	now := s.store.Now()
	switch {
	case errors.Is(err, store.ErrNotFound):
		return errs.New(errs.NotEnrolled, "there is no boot window %.64q", v.WindowId)
	case err != nil:
		return fmt.Errorf("read boot window: %w", err)
	case w.SiteID != box.SiteID:
		return errs.New(errs.WrongAgent, "boot window %s is not of the box's site", w.ID)
	case w.MachineID == store.Strangers:
		if err := stranger(w, v); err != nil {
			return err
		}
	case w.MachineID != v.MachineId || w.Purpose != v.Purpose:
		return errs.New(errs.WrongAgent, "boot window %s is for another machine or purpose", w.ID)
	}
	switch {
	case m.SiteId != "" && m.SiteId != w.SiteID:
		return errs.New(errs.RoleMismatch, "the voucher is for another site")
	case !now.Before(w.Until):
		return errs.New(errs.Expired, "boot window %s closed at %s", w.ID, w.Until.UTC().Format(time.RFC3339))
	case now.UnixMilli() >= v.NotAfterMs:
		return errs.New(errs.Expired, "the voucher ran out at %s", time.UnixMilli(v.NotAfterMs).UTC().Format(time.RFC3339))
	case v.IssuedAtMs > now.Add(clockSkew).UnixMilli():
		return errs.New(errs.Expired, "the voucher was issued in the future: the box's clock is wrong")
	}
	if w.MachineID == store.Strangers {
		if err := s.room(ctx, w.SiteID, v.MachineId); err != nil {
			return err
		}
		e.Certificate.NotAfter = w.Until
	}
	e.WindowID, e.BootNonce = w.ID, v.BootNonce
	e.Agent.SiteID, e.Agent.MachineID, e.Agent.WindowID = w.SiteID, v.MachineId, w.ID
	return nil
}

// openVoucher tries the keys of the box's certificates that still count.
func (s *Service) openVoucher(ctx context.Context, boxID string, signed *agentv1.SignedVoucher) (*agentv1.Voucher, error) {
	leaves, err := s.store.Certificates(ctx, boxID)
	if err != nil {
		return nil, fmt.Errorf("read box's certificates: %w", err)
	}
	var last error = errs.New(errs.SignatureInvalid, "the voucher's box has no certificate that counts")
	for _, c := range leaves {
		if !s.store.Now().Before(c.NotAfter) {
			continue
		}
		leaf, err := x509.ParseCertificate(c.DER)
		if err != nil {
			return nil, fmt.Errorf("read box's certificate: %w", err)
		}
		key, ok := leaf.PublicKey.(*ecdsa.PublicKey)
		if !ok {
			continue
		}
		v, err := trust.VerifyVoucher(key, signed)
		if err == nil {
			return v, nil
		}
		last = err
		if errs.CodeOf(err) != errs.SignatureInvalid {
			break
		}
	}
	return nil, last
}

// parseCSR wants a P-256 key that signed the request; the rest of the request
// is the agent's wish and is ignored.
func parseCSR(der []byte) (*ecdsa.PublicKey, error) {
	if len(der) > 8<<10 {
		return nil, errs.New(errs.InvalidPayload, "certificate request of %d bytes is over 8192", len(der))
	}
	csr, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, errs.New(errs.InvalidPayload, "certificate request: %v", err)
	}
	key, ok := csr.PublicKey.(*ecdsa.PublicKey)
	if !ok || key.Curve != elliptic.P256() {
		return nil, errs.New(errs.InvalidPayload, "certificate request: want an ECDSA P-256 key")
	}
	if err := csr.CheckSignature(); err != nil {
		return nil, errs.New(errs.SignatureInvalid, "certificate request: %v", err)
	}
	return key, nil
}

// issue makes the leaf and says when to renew it: from half of its life on,
// spread over a tenth, so that boxes that enrolled together do not renew together.
// One with an end of its own is not renewed.
func (s *Service) issue(a store.Agent, csr []byte, public *ecdsa.PublicKey, end time.Time) (store.Certificate, error) {
	life := longLife
	if a.Role == agentv1.Role_ROLE_RAMDISK {
		life = ramdiskLife
	}
	now := s.store.Now()
	if !end.IsZero() {
		life = end.Sub(now)
	}
	renew := now.Add(life/2 + time.Duration(mathrand.Int64N(max(int64(life/10), 1))))
	if !end.IsZero() {
		renew = end
	}
	der, err := s.keys.Authority.IssueAgent(a.ID, public, now, now.Add(life))
	if err != nil {
		return store.Certificate{}, err
	}
	return store.Certificate{
		Fingerprint: sha256.Sum256(der),
		AgentID:     a.ID,
		CSRHash:     sha256.Sum256(csr),
		DER:         der,
		NotAfter:    now.Add(life),
		RenewAfter:  renew,
	}, nil
}

// Renew answers EnrolmentService.Renew. The same CSR gets the same answer
// while half of that leaf's life is not over.
func (s *Service) Renew(ctx context.Context, req *connect.Request[agentv1.RenewRequest]) (*connect.Response[agentv1.RenewResponse], error) {
	res, err := s.renew(ctx, req.Msg)
	if err != nil {
		return nil, caller.Error(hide(err))
	}
	return connect.NewResponse(res), nil
}

func (s *Service) renew(ctx context.Context, m *agentv1.RenewRequest) (*agentv1.RenewResponse, error) {
	agent, err := caller.From(ctx)
	if err != nil {
		return nil, err
	}
	public, err := parseCSR(m.Csr)
	if err != nil {
		return nil, err
	}
	have, err := s.store.Certificates(ctx, agent.ID)
	if err != nil {
		return nil, fmt.Errorf("renew: %w", err)
	}
	csrHash := sha256.Sum256(m.Csr)
	var leaf store.Certificate
	for _, c := range have {
		if bytes.Equal(c.CSRHash[:], csrHash[:]) && s.store.Now().Before(c.RenewAfter) {
			leaf = c
			break
		}
	}
	if leaf.AgentID == "" {
		if leaf, err = s.issue(agent, m.Csr, public, time.Time{}); err != nil {
			return nil, err
		}
		if err := s.store.AddCertificate(ctx, leaf); err != nil {
			return nil, fmt.Errorf("renew: %w", err)
		}
		s.log.Info("certificate renewed", "agent", agent.ID, "until", leaf.NotAfter)
	}
	return &agentv1.RenewResponse{
		Chain:        [][]byte{leaf.DER, s.keys.Authority.Certificate().Raw},
		ServerTimeMs: s.store.Now().UnixMilli(),
		RenewAfterMs: leaf.RenewAfter.UnixMilli(),
	}, nil
}

// alarm records something that a person should look at.
func (s *Service) alarm(ctx context.Context, about store.Agent, name, reason string) {
	s.log.Error("alarm", "name", name, "site", about.SiteID, "machine", about.MachineID, "reason", reason)
	about.ID = ""
	s.event(ctx, about, name, map[string]any{"alarm": true, "reason": reason, "role": roleName(about.Role)})
}

func (s *Service) event(ctx context.Context, about store.Agent, name string, body map[string]any) {
	text, err := json.Marshal(body)
	if err == nil {
		err = s.store.AddEvent(ctx, store.Event{SiteID: about.SiteID, MachineID: about.MachineID, AgentID: about.ID, Name: name, Class: "audit", Key: about.ID, BodyJSON: string(text)})
	}
	if err != nil {
		s.log.Error("record event", "name", name, "err", err)
	}
}
