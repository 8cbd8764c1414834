package enroll

import (
	"context"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/agentv1/agentv1connect"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// Protocol versions that this agent speaks.
const (
	ProtocolMin = 1
	ProtocolMax = 1
)

// Grace is how long past its end a certificate may still renew.
const Grace = 30 * 24 * time.Hour

// Request is what an enrolment says of the device beside its key. Exactly one
// of Token and Voucher is set.
type Request struct {
	Token       []byte
	Voucher     *agentv1.SignedVoucher
	RootSet     [32]byte
	Role        agentv1.Role
	SiteID      string
	ProductUUID string
	MACs        []string
	Version     string
}

// Origin tells this request's credential and pins from others'.
func (r Request) Origin() [32]byte {
	h := sha256.New()
	h.Write(r.RootSet[:])
	h.Write([]byte(r.SiteID))
	h.Write([]byte{0})
	h.Write(r.Token)
	if r.Voucher != nil {
		h.Write(r.Voucher.GetPayload())
	}
	return [32]byte(h.Sum(nil))
}

// Clock is the trusted time that an enrolment takes over from the gateway.
type Clock interface {
	Now() time.Time
	Judge(notBefore time.Time) time.Time
	Verified(server time.Time) error
}

// Enroll asks for an identity over a client whose TLS is pinned, and checks all
// of the answer: the certificate must be for our key, and the bundle signed by
// the pinned roots.
func Enroll(ctx context.Context, client agentv1connect.EnrolmentServiceClient, clock Clock, r Request, p *Pending) (*Identity, error) {
	nonce := make([]byte, 16)
	rand.Read(nonce)
	req := &agentv1.EnrollRequest{
		Csr: p.CSR, Role: r.Role, SiteId: r.SiteID, ProductUuid: r.ProductUUID, Macs: r.MACs, Version: r.Version,
		ProtocolMin: ProtocolMin, ProtocolMax: ProtocolMax, Nonce: nonce,
	}
	if r.Voucher != nil {
		req.Credential = &agentv1.EnrollRequest_Voucher{Voucher: r.Voucher}
	} else {
		req.Credential = &agentv1.EnrollRequest_Token{Token: string(r.Token)}
	}
	answer, err := client.Enroll(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, fmt.Errorf("ask for an identity: %w", err)
	}
	m := answer.Msg
	// The answer came over pinned TLS, so its time is worth taking. A time that
	// the clock refuses does not stop the enrolment: judgement stays at the floor.
	clockErr := clock.Verified(time.UnixMilli(m.GetServerTimeMs()))
	bundle, err := trust.VerifyFirst(r.RootSet, m.GetBundle(), clock.Now())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("take the trust bundle: %w", err), clockErr)
	}
	id := &Identity{
		AgentID: m.GetAgentId(), SiteID: r.SiteID, MachineID: m.GetMachineId(), Key: p.Key, Chain: m.GetChain(),
		RenewAfter: time.UnixMilli(m.GetRenewAfterMs()), Bundle: bundle, Origin: p.Origin, Serial: 1,
	}
	if id.AgentID == "" || len(id.AgentID) > 128 {
		return nil, errs.New(errs.InvalidPayload, "the gateway's answer names no agent id")
	}
	if r.Role != agentv1.Role_ROLE_SITE && id.MachineID == "" {
		return nil, errs.New(errs.InvalidPayload, "the gateway's answer names no machine")
	}
	if id.Leaf, err = checkChain(id.Chain, id.Key, id.AgentID, bundle, clock); err != nil {
		return nil, errors.Join(err, clockErr)
	}
	return id, nil
}

// Renew asks for a new certificate for the same key; client shows the old one.
func Renew(ctx context.Context, client agentv1connect.EnrolmentServiceClient, clock Clock, id *Identity) (*Identity, error) {
	csr, err := request(id.Key)
	if err != nil {
		return nil, err
	}
	answer, err := client.Renew(ctx, connect.NewRequest(&agentv1.RenewRequest{Csr: csr}))
	if err != nil {
		return nil, fmt.Errorf("renew certificate: %w", err)
	}
	m := answer.Msg
	clockErr := clock.Verified(time.UnixMilli(m.GetServerTimeMs()))
	next := *id
	next.Chain, next.RenewAfter, next.Serial = m.GetChain(), time.UnixMilli(m.GetRenewAfterMs()), id.Serial+1
	if next.Leaf, err = checkChain(next.Chain, id.Key, id.AgentID, id.Bundle, clock); err != nil {
		return nil, errors.Join(fmt.Errorf("renew certificate: %w", err), clockErr)
	}
	return &next, nil
}

// WithBundle is id under a newer trust bundle.
func (id *Identity) WithBundle(b *trust.Bundle) *Identity {
	next := *id
	next.Bundle, next.Serial = b, id.Serial+1
	return &next
}

// RenewAt is when to renew: from RenewAfter on, spread by jitter in [0,1) over
// a tenth of what is left of the certificate's life.
func (id *Identity) RenewAt(jitter float64) time.Time {
	left := id.Leaf.NotAfter.Sub(id.RenewAfter)
	return id.RenewAfter.Add(time.Duration(jitter * float64(max(left, 0)) / 10))
}

// checkLeaf parses the chain's leaf and compares it with key and agent id.
func checkLeaf(chain [][]byte, key *ecdsa.PrivateKey, agentID string) (*x509.Certificate, error) {
	if len(chain) == 0 || len(chain) > 8 {
		return nil, errs.New(errs.InvalidPayload, "certificate chain of %d; 1 to 8 are allowed", len(chain))
	}
	leaf, err := x509.ParseCertificate(chain[0])
	if err != nil {
		return nil, errs.New(errs.InvalidPayload, "certificate does not parse: %v", err)
	}
	public, ok := leaf.PublicKey.(*ecdsa.PublicKey)
	if !ok || !public.Equal(&key.PublicKey) {
		return nil, errs.New(errs.InvalidPayload, "certificate is for another key")
	}
	if leaf.Subject.CommonName != agentID {
		return nil, errs.New(errs.InvalidPayload, "certificate is for %q, not %q", leaf.Subject.CommonName, agentID)
	}
	return leaf, nil
}

func checkChain(chain [][]byte, key *ecdsa.PrivateKey, agentID string, bundle *trust.Bundle, clock Clock) (*x509.Certificate, error) {
	leaf, err := checkLeaf(chain, key, agentID)
	if err != nil {
		return nil, err
	}
	uri := "bc://agent/" + agentID
	if !slices.ContainsFunc(leaf.URIs, func(u *url.URL) bool { return u.String() == uri }) {
		return nil, errs.New(errs.InvalidPayload, "certificate lacks the name %s", uri)
	}
	between := x509.NewCertPool()
	for _, der := range chain[1:] {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, errs.New(errs.InvalidPayload, "certificate chain does not parse: %v", err)
		}
		between.AddCert(c)
	}
	if _, err := leaf.Verify(x509.VerifyOptions{
		Roots: bundle.CAs(), Intermediates: between, CurrentTime: clock.Judge(leaf.NotBefore),
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}); err != nil {
		return nil, errs.New(errs.InvalidPayload, "certificate is not of the bundle's CAs: %v", err)
	}
	return leaf, nil
}

// Lapsed reports whether the certificate is past its end at now, and whether
// even its time to renew is over.
func (id *Identity) Lapsed(now time.Time) (over, renewable bool) {
	return now.After(id.Leaf.NotAfter), !now.After(id.Leaf.NotAfter.Add(Grace))
}

// VoucherFrom decodes the voucher of a boot file.
func VoucherFrom(data []byte) (*agentv1.SignedVoucher, error) {
	v := new(agentv1.SignedVoucher)
	if err := proto.Unmarshal(data, v); err != nil {
		return nil, errs.New(errs.InvalidPayload, "voucher does not decode: %v", err)
	}
	return v, nil
}
