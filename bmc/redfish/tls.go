package redfish

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

var (
	errPin      = errors.New("the BMC's key is not the pinned one")
	errUnpinned = errors.New("the BMC's certificate is not valid under the known authorities, and no pin is enrolled")
)

// legacySuites add RSA key exchange, without forward secrecy, to the suites
// that have it. RC4 and 3DES are not among them.
var legacySuites = []uint16{
	tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
	tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384, tls.TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
	tls.TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256, tls.TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
	tls.TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA, tls.TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA,
	tls.TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA, tls.TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA,
	tls.TLS_RSA_WITH_AES_128_GCM_SHA256, tls.TLS_RSA_WITH_AES_256_GCM_SHA384,
	tls.TLS_RSA_WITH_AES_128_CBC_SHA256, tls.TLS_RSA_WITH_AES_128_CBC_SHA, tls.TLS_RSA_WITH_AES_256_CBC_SHA,
}

// curves leave the post-quantum ones out, whose shares make the first message too
// long for the TLS of old BMCs: they hang up on it, or wait for ever.
var curves = []tls.CurveID{tls.X25519, tls.CurveP256, tls.CurveP384, tls.CurveP521}

func tlsConfig(t target, legacy bool) (*tls.Config, error) {
	host, _, err := net.SplitHostPort(t.address)
	if err != nil {
		return nil, errs.New(errs.InvalidAddress, "address %q: want host:port", t.address)
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: host, RootCAs: t.roots, CurvePreferences: curves}
	if legacy {
		config.MinVersion, config.CipherSuites = tls.VersionTLS10, legacySuites
	}
	if t.pin == "" {
		return config, nil
	}
	pin, err := hex.DecodeString(t.pin)
	if err != nil || len(pin) != sha256.Size {
		return nil, errs.New(errs.InvalidConfig, "the key pin is not a hex SHA-256")
	}
	// The pin is the verification: it names the very key, which says more than
	// a name and an authority do, and BMC certificates have neither.
	config.InsecureSkipVerify = true
	config.VerifyConnection = func(state tls.ConnectionState) error {
		if len(state.PeerCertificates) == 0 {
			return errPin
		}
		got := sha256.Sum256(state.PeerCertificates[0].RawSubjectPublicKeyInfo)
		if subtle.ConstantTimeCompare(got[:], pin) != 1 {
			return fmt.Errorf("%w: it has %x", errPin, got)
		}
		return nil
	}
	return config, nil
}

// refused says why TLS failed, as far as it did; nil: something else failed.
func (c *conn) refused(ctx context.Context, err error, sent bool) error {
	var unverified *tls.CertificateVerificationError
	switch {
	case errors.Is(err, errPin):
		return errs.New(errs.PinMismatch, "%s", cause(err))
	case errors.As(err, &unverified):
		return errs.New(errs.PinMismatch, "%v: %s", errUnpinned, cause(err))
	case sent || !handshakeFailed(err):
		return nil
	}
	old, found := weakness(ctx, c.target.address)
	switch {
	case !found:
		return nil
	case c.legacy:
		return errs.New(errs.TLSUnsupported, "the BMC's TLS cannot be used, old TLS allowed or not: it offers %s", old)
	}
	return errs.New(errs.TLSUnsupported, "the BMC offers nothing but %s, which is refused; the site's configuration can allow old TLS for this one BMC", old)
}

// handshakeFailed reports whether err can come from a server that found nothing
// in common with us: an alert, a refusal of our own, or just a closed connection.
func handshakeFailed(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) ||
		strings.Contains(err.Error(), "tls: ") // these errors have no type to ask for
}

// rsaKeyExchange are the suites without forward secrecy that this Go knows.
var rsaKeyExchange = map[uint16]bool{
	tls.TLS_RSA_WITH_RC4_128_SHA: true, tls.TLS_RSA_WITH_3DES_EDE_CBC_SHA: true,
	tls.TLS_RSA_WITH_AES_128_CBC_SHA: true, tls.TLS_RSA_WITH_AES_256_CBC_SHA: true, tls.TLS_RSA_WITH_AES_128_CBC_SHA256: true,
	tls.TLS_RSA_WITH_AES_128_GCM_SHA256: true, tls.TLS_RSA_WITH_AES_256_GCM_SHA384: true,
}

// weakness names the old TLS that a server would take. It shakes hands up to the
// server's certificate and breaks off: nothing is sent over it, and nobody is
// trusted.
func weakness(ctx context.Context, address string) (name string, found bool) {
	var suites []uint16
	for _, s := range append(tls.CipherSuites(), tls.InsecureCipherSuites()...) {
		suites = append(suites, s.ID)
	}
	var seen *tls.ConnectionState
	config := &tls.Config{
		MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS12, CipherSuites: suites, CurvePreferences: curves,
		InsecureSkipVerify: true,
		VerifyConnection: func(state tls.ConnectionState) error {
			seen = &state
			return errSeen
		},
	}
	ctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	raw, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, "tcp", address)
	if err != nil {
		return "", false
	}
	defer raw.Close()
	_ = tls.Client(raw, config).HandshakeContext(ctx) // ends with errSeen at the best
	if seen == nil {
		return "", false
	}
	var parts []string
	if seen.Version < tls.VersionTLS12 {
		parts = append(parts, tls.VersionName(seen.Version))
	}
	if rsaKeyExchange[seen.CipherSuite] {
		parts = append(parts, "RSA key exchange")
	}
	for _, s := range tls.InsecureCipherSuites() {
		if s.ID == seen.CipherSuite && (strings.Contains(s.Name, "RC4") || strings.Contains(s.Name, "3DES")) {
			parts = append(parts, s.Name)
		}
	}
	return strings.Join(parts, " with "), len(parts) > 0
}

var errSeen = errors.New("seen enough")
