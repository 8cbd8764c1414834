// Package agenttest is a gateway in the test's own process: real TLS, real
// signatures, and a test that decides what it answers.
package agenttest

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net"
	"net/url"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
)

// Authority holds a gateway's keys: one root, one command key, one CA.
type Authority struct {
	Root    ed25519.PrivateKey
	Command ed25519.PrivateKey
	CA      *x509.Certificate
	caKey   *ecdsa.PrivateKey
}

// NewAuthority makes fresh keys.
func NewAuthority(t testing.TB) *Authority {
	t.Helper()
	a := &Authority{Root: ed25519Key(t), Command: ed25519Key(t), caKey: ecdsaKey(t)}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test gateway CA"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(10, 0, 0),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	a.CA = a.issue(t, template, template, a.caKey.Public())
	return a
}

func ed25519Key(t testing.TB) ed25519.PrivateKey {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func ecdsaKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func (a *Authority) issue(t testing.TB, template, parent *x509.Certificate, public crypto.PublicKey) *x509.Certificate {
	t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, template, parent, public, a.caKey)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

// ServerCertificate is a gateway's, for 127.0.0.1.
func (a *Authority) ServerCertificate(t testing.TB) tls.Certificate {
	t.Helper()
	key := ecdsaKey(t)
	leaf := a.issue(t, &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "test gateway"},
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().AddDate(1, 0, 0),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}, a.CA, key.Public())
	return tls.Certificate{Certificate: [][]byte{leaf.Raw, a.CA.Raw}, PrivateKey: key}
}

// AgentChain is an agent's certificate and the CA's, DER.
func (a *Authority) AgentChain(t testing.TB, agentID string, public crypto.PublicKey, life time.Duration) [][]byte {
	t.Helper()
	leaf := a.issue(t, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: agentID},
		URIs:      []*url.URL{{Scheme: "bc", Host: "agent", Path: "/" + agentID}},
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(life),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, a.CA, public)
	return [][]byte{leaf.Raw, a.CA.Raw}
}

// Content is a trust bundle's content with this authority's keys.
func (a *Authority) Content(version uint64, urls ...string) *agentv1.TrustBundle {
	return &agentv1.TrustBundle{
		Version: version, IssuedAtMs: time.Now().UnixMilli(), ValidUntilMs: time.Now().AddDate(1, 0, 0).UnixMilli(),
		Roots: [][]byte{a.Root.Public().(ed25519.PublicKey)}, RootThreshold: 1,
		CommandKeys: [][]byte{a.Command.Public().(ed25519.PublicKey)},
		GatewayCas:  [][]byte{a.CA.Raw}, GatewayUrls: urls,
	}
}

// Sign signs a bundle with the root.
func (a *Authority) Sign(t testing.TB, content *agentv1.TrustBundle) *agentv1.SignedBundle {
	t.Helper()
	s, err := trust.SignBundle(content, a.Root)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Bundle is a verified bundle with this authority's keys.
func (a *Authority) Bundle(t testing.TB, change func(*agentv1.TrustBundle)) *trust.Bundle {
	t.Helper()
	content := a.Content(1, "https://127.0.0.1:1")
	if change != nil {
		change(content)
	}
	b, err := trust.Restore(a.Sign(t, content))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// RootSet is what a join string pins.
func (a *Authority) RootSet() [32]byte {
	return trust.RootSetHash([][]byte{a.Root.Public().(ed25519.PublicKey)}, 1)
}

// Seal signs a command with the command key.
func (a *Authority) Seal(t testing.TB, p *agentv1.CommandPayload) *agentv1.SignedCommand {
	t.Helper()
	c, err := envelope.Seal(signer{a.Command}, p)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

type signer struct{ key ed25519.PrivateKey }

func (s signer) KeyID() string                   { return trust.KeyID(s.key.Public().(ed25519.PublicKey)) }
func (s signer) Sign(msg []byte) ([]byte, error) { return ed25519.Sign(s.key, msg), nil }
