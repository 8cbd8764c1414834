package trust

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// Judge picks the time at which a certificate is judged, given its NotBefore:
// a box whose clock stands in the past must still be able to come home.
type Judge func(notBefore time.Time) time.Time

// SPKI is the SHA-256 of a certificate's public key.
func SPKI(c *x509.Certificate) [32]byte { return sha256.Sum256(c.RawSubjectPublicKeyInfo) }

// PinnedTLS is the client configuration before enrolment: the chain must hold
// a CA certificate with this SPKI that signs the leaf, and the leaf must be
// valid for host (a name or an address; crypto/tls tells a verifier only names).
func PinnedTLS(caSPKI [32]byte, host string, judge Judge) *tls.Config {
	return clientTLS(host, func(chain []*x509.Certificate) error {
		for _, c := range chain[1:] {
			if c.IsCA && SPKI(c) == caSPKI {
				return verify(chain, []*x509.Certificate{c}, host, judge)
			}
		}
		return errs.New(errs.PinMismatch, "the gateway shows no CA with the pinned key: wrong gateway, or something between us reads along")
	})
}

// TLS is the client configuration after enrolment: the leaf must come from a
// gateway CA of the bundle and be valid for host.
func (b *Bundle) TLS(host string, judge Judge) *tls.Config {
	return clientTLS(host, func(chain []*x509.Certificate) error {
		return verify(chain, b.cas, host, judge)
	})
}

// clientTLS replaces the library's verification by check, since neither a CA
// known only by its hash nor a judged time can be told to it otherwise.
func clientTLS(host string, check func(chain []*x509.Certificate) error) *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		NextProtos:         []string{"h2"},
		ServerName:         host,
		InsecureSkipVerify: true, // VerifyConnection decides, also for resumed sessions
		VerifyConnection: func(s tls.ConnectionState) error {
			if len(s.PeerCertificates) == 0 {
				return errors.New("the gateway shows no certificate")
			}
			return check(s.PeerCertificates)
		},
	}
}

// verify tries each CA by itself, so that the time is judged by that CA's
// NotBefore too: a leaf may be dated back to before its CA was made.
func verify(chain, cas []*x509.Certificate, host string, judge Judge) error {
	leaf := chain[0]
	between := x509.NewCertPool()
	for _, c := range chain[1:] {
		between.AddCert(c)
	}
	var err error
	for _, ca := range cas {
		roots := x509.NewCertPool()
		roots.AddCert(ca)
		notBefore := leaf.NotBefore
		if ca.NotBefore.After(notBefore) {
			notBefore = ca.NotBefore
		}
		if _, err = leaf.Verify(x509.VerifyOptions{
			DNSName:       host,
			Roots:         roots,
			Intermediates: between,
			CurrentTime:   judge(notBefore),
			KeyUsages:     []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		}); err == nil {
			return nil
		}
	}
	return fmt.Errorf("verify the gateway's certificate: %w", err)
}
