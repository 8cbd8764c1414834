package signer

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"testing"

	"github.com/better-compute/site-appliance/appliance/agent/trust"
)

func write(t *testing.T, key any, kind string, mode os.FileMode) string {
	t.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "command.key")
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), mode); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestLoad(t *testing.T) {
	public, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	s, err := Load(write(t, key, "PRIVATE KEY", 0o600))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := s.KeyID(), trust.KeyID(public); got != want {
		t.Errorf("KeyID() = %s, want %s", got, want)
	}
	signature, err := s.Sign([]byte("message"))
	if err != nil || !ed25519.Verify(public, []byte("message"), signature) {
		t.Errorf("Sign does not verify (%v)", err)
	}
	other, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for name, path := range map[string]string{
		"readable by others": write(t, key, "PRIVATE KEY", 0o640),
		"another algorithm":  write(t, other, "PRIVATE KEY", 0o600),
		"another block":      write(t, key, "CERTIFICATE", 0o600),
		"missing":            filepath.Join(t.TempDir(), "none"),
	} {
		if _, err := Load(path); err == nil {
			t.Errorf("%s: Load succeeded", name)
		}
	}
}
