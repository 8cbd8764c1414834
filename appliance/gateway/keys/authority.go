package keys

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent/trust"
)

// Authority is the gateway's CA: it signs the gateway's own certificates and
// those of agents.
type Authority struct {
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
}

// Certificate is the CA's own.
func (a *Authority) Certificate() *x509.Certificate { return a.cert }

// SPKI is what join strings pin.
func (a *Authority) SPKI() [32]byte { return trust.SPKI(a.cert) }

// agentURI is the URI SAN of an agent's certificate.
const agentURI = "bc://agent/"

// IssueAgent signs a leaf for an agent's key. It is good from a day before now.
func (a *Authority) IssueAgent(agentID string, public *ecdsa.PublicKey, now, notAfter time.Time) ([]byte, error) {
	uri, err := url.Parse(agentURI + agentID)
	if err != nil {
		return nil, fmt.Errorf("issue certificate: %w", err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber:          serial(),
		Subject:               pkix.Name{CommonName: agentID},
		URIs:                  []*url.URL{uri},
		NotBefore:             later(now.Add(-backdate), a.cert.NotBefore),
		NotAfter:              earlier(notAfter, a.cert.NotAfter),
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, a.cert, public, a.key)
	if err != nil {
		return nil, fmt.Errorf("issue certificate: %w", err)
	}
	return der, nil
}

// AgentID reads the agent's id from its certificate.
func AgentID(leaf *x509.Certificate) (string, bool) {
	for _, u := range leaf.URIs {
		if id, ok := strings.CutPrefix(u.String(), agentURI); ok && id == leaf.Subject.CommonName && id != "" {
			return id, true
		}
	}
	return "", false
}

// serverLife is how long a certificate of the gateway's own lasts.
const serverLife = 90 * 24 * time.Hour

// IssueServer makes a key and a leaf for the hosts of the URLs and for loopback.
func (a *Authority) IssueServer(urls []string, now time.Time) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("issue server certificate: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber:          serial(),
		Subject:               pkix.Name{CommonName: "better-compute gateway"},
		DNSNames:              []string{"localhost"},
		IPAddresses:           []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback},
		NotBefore:             later(now.Add(-backdate), a.cert.NotBefore),
		NotAfter:              earlier(now.Add(serverLife), a.cert.NotAfter),
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, text := range urls {
		u, err := url.Parse(text)
		if err != nil {
			return nil, fmt.Errorf("issue server certificate: %w", err)
		}
		if ip := net.ParseIP(u.Hostname()); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, u.Hostname())
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return nil, fmt.Errorf("issue server certificate: %w", err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("issue server certificate: %w", err)
	}
	return &tls.Certificate{Certificate: [][]byte{der, a.cert.Raw}, PrivateKey: key, Leaf: leaf}, nil
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}
