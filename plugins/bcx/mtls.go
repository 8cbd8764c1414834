package bcx

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"time"
)

// Identity is one side's ephemeral key and self-signed certificate.
type Identity struct{ cert tls.Certificate }

// NewIdentity makes a P-256 identity. It is valid from 1970 to 9999, since
// clocks step and the leaf itself is what the other side compares.
func NewIdentity() (*Identity, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make key: %w", err)
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, fmt.Errorf("make serial: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: serverName}, DNSNames: []string{serverName},
		NotBefore:   time.Unix(0, 0),
		NotAfter:    time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make certificate: %w", err)
	}
	return &Identity{tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}}, nil
}

const serverName = "bcx"

// DER is the certificate.
func (i *Identity) DER() []byte { return i.cert.Certificate[0] }

// PEM is the certificate as BCX_CLIENT_CERT carries it.
func (i *Identity) PEM() string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: i.DER()}))
}

// parsePEM reads exactly one certificate.
func parsePEM(text string) ([]byte, error) {
	block, rest := pem.Decode([]byte(text))
	if block == nil || block.Type != "CERTIFICATE" {
		return nil, errors.New("no PEM certificate")
	}
	if next, _ := pem.Decode(rest); next != nil {
		return nil, errors.New("more than one PEM block")
	}
	if _, err := x509.ParseCertificate(block.Bytes); err != nil {
		return nil, err
	}
	return block.Bytes, nil
}

// only accepts exactly one peer, byte for byte: another certificate of the same
// key is another peer.
func only(der []byte) func(tls.ConnectionState) error {
	return func(cs tls.ConnectionState) error {
		if len(cs.PeerCertificates) == 0 || subtle.ConstantTimeCompare(cs.PeerCertificates[0].Raw, der) != 1 {
			return errors.New("bcx: the peer's certificate is not the one agreed on")
		}
		return nil
	}
}

func (i *Identity) server(peer []byte) *tls.Config {
	return &tls.Config{
		Certificates: []tls.Certificate{i.cert}, MinVersion: tls.VersionTLS13, NextProtos: []string{"h2"},
		ClientAuth: tls.RequireAnyClientCert, VerifyConnection: only(peer), SessionTicketsDisabled: true,
		DynamicRecordSizingDisabled: true, // small records help a browser
	}
}

func (i *Identity) client(peer []byte) *tls.Config {
	return &tls.Config{
		Certificates: []tls.Certificate{i.cert}, MinVersion: tls.VersionTLS13, NextProtos: []string{"h2"},
		ServerName: serverName,
		// The chain means nothing here: VerifyConnection compares the leaf itself.
		InsecureSkipVerify: true, VerifyConnection: only(peer),
		DynamicRecordSizingDisabled: true,
	}
}
