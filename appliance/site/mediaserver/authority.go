package mediaserver

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
)

// A BMC's clock stands at 1970 after each power cut, or anywhere: certificates
// are valid at all times (RFC 5280, 4.1.2.5, on the last of them).
var (
	always = time.Unix(0, 0).UTC()
	never  = time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)
)

// Authority is the site's own CA, which people load into BMCs. Its key signs
// the certificates of this box's LAN addresses and nothing else.
type Authority struct {
	cert *x509.Certificate
	key  crypto.Signer
}

// maxAuthority bounds the file.
const maxAuthority = 64 << 10

// OpenAuthority reads the CA from path, or makes it where there is none. A file
// that cannot be used is set aside, and named: BMCs need the new CA then. An
// empty path makes one that lasts as long as the process.
func OpenAuthority(path string) (a *Authority, aside string, err error) {
	if path != "" {
		data, err := readBounded(path, maxAuthority)
		switch {
		case err == nil:
			if a, err = parseAuthority(data); err == nil {
				return a, "", os.Chmod(path, 0o600)
			}
			if aside, err = atomicfile.SetAside(path); err != nil {
				return nil, "", err
			}
		case !errors.Is(err, fs.ErrNotExist):
			return nil, "", fmt.Errorf("read the site CA: %w", err)
		}
	}
	a, data, err := makeAuthority()
	if err != nil {
		return nil, "", fmt.Errorf("make the site CA: %w", err)
	}
	if path != "" {
		if err := atomicfile.Write(path, data, 0o600); err != nil {
			return nil, "", fmt.Errorf("keep the site CA: %w", err)
		}
	}
	return a, aside, nil
}

// makeAuthority makes a CA that can stand for no name: a thief of its key fools
// a BMC about addresses at most. Addresses are left open, so that the box's may
// change, and because the OpenSSL of older BMCs fails on constraints of that
// kind; the extension is not critical for the sake of those that know it not.
func makeAuthority() (*Authority, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	serial, err := newSerial()
	if err != nil {
		return nil, nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "better-compute site media CA " + hex.EncodeToString(serial.Bytes()[:4])},
		NotBefore: always, NotAfter: never, IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign, ExcludedDNSDomains: []string{""},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, nil, err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, err
	}
	var file bytes.Buffer
	_ = pem.Encode(&file, &pem.Block{Type: "CERTIFICATE", Bytes: der}) // a buffer takes all
	_ = pem.Encode(&file, &pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})
	a, err := parseAuthority(file.Bytes())
	return a, file.Bytes(), err
}

// parseAuthority wants one certificate and its key, and nothing else.
func parseAuthority(data []byte) (*Authority, error) {
	cert, rest := pem.Decode(data)
	if cert == nil || cert.Type != "CERTIFICATE" {
		return nil, errors.New("the file does not begin with a certificate")
	}
	key, rest := pem.Decode(rest)
	if key == nil || key.Type != "PRIVATE KEY" || len(bytes.TrimSpace(rest)) > 0 {
		return nil, errors.New("the certificate is not followed by its key alone")
	}
	c, err := x509.ParseCertificate(cert.Bytes)
	if err != nil {
		return nil, err
	}
	parsed, err := x509.ParsePKCS8PrivateKey(key.Bytes)
	if err != nil {
		return nil, err
	}
	signer, ok := parsed.(*ecdsa.PrivateKey)
	if !ok || !c.IsCA || !signer.PublicKey.Equal(c.PublicKey) {
		return nil, errors.New("certificate and key are not those of one CA")
	}
	return &Authority{cert: c, key: signer}, nil
}

// PEM is the certificate, for BMCs.
func (a *Authority) PEM() string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw}))
}

// Fingerprint is the hex SHA-256 of the certificate.
func (a *Authority) Fingerprint() string {
	sum := sha256.Sum256(a.cert.Raw)
	return hex.EncodeToString(sum[:])
}

// leaf makes a certificate for one address; its key lasts as long as the process.
func (a *Authority) leaf(address netip.Addr) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	serial, err := newSerial()
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{
		// No dot stands in the name: some verifiers take one for a host's, which the CA excludes.
		SerialNumber: serial, Subject: pkix.Name{CommonName: "better-compute site media"},
		NotBefore: always, NotAfter: never, IPAddresses: []net.IP{address.AsSlice()},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{der, a.cert.Raw}, PrivateKey: key}, nil
}

// newSerial is a positive number of 127 random bits.
func newSerial() (*big.Int, error) {
	b := make([]byte, 16)
	if _, err := rand.Read(b); err != nil {
		return nil, err
	}
	b[0] = b[0]&0x7f | 0x40
	return new(big.Int).SetBytes(b), nil
}

// readBounded reads a file of at most limit bytes.
func readBounded(path string, limit int64) ([]byte, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if st.Size() > limit {
		return nil, fmt.Errorf("%s has over %d bytes", path, limit)
	}
	return os.ReadFile(path)
}
