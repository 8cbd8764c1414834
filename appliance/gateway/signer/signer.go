// Package signer signs commands with an Ed25519 key that is kept in a file.
package signer

import (
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"

	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
)

// File is a key that was read from a file. It is safe for concurrent use.
type File struct {
	key ed25519.PrivateKey
	id  string
}

var _ envelope.Signer = (*File)(nil)

// Load reads a PKCS #8 PEM file, which only its owner may read.
func Load(path string) (*File, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("load signing key: %w", err)
	}
	if st.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("load signing key: %s may be read by others (mode %04o): chmod 600", path, st.Mode().Perm())
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("load signing key: %w", err)
	}
	block, _ := pem.Decode(text)
	if block == nil || block.Type != "PRIVATE KEY" {
		return nil, fmt.Errorf("load signing key: %s is not a PEM private key", path)
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("load signing key %s: %w", path, err)
	}
	key, ok := parsed.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("load signing key: %s is not an Ed25519 key", path)
	}
	return &File{key: key, id: trust.KeyID(key.Public().(ed25519.PublicKey))}, nil
}

// KeyID is the lower-case hex SHA-256 of the public key.
func (f *File) KeyID() string { return f.id }

// Sign is the Ed25519 signature of msg.
func (f *File) Sign(msg []byte) ([]byte, error) { return ed25519.Sign(f.key, msg), nil }
