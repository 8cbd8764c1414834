package mediaserver

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestAuthorityIsKept(t *testing.T) {
	path := filepath.Join(t.TempDir(), "media-ca.pem")
	first, aside, err := OpenAuthority(path)
	if err != nil || aside != "" {
		t.Fatalf("OpenAuthority = %q, %v", aside, err)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	again, aside, err := OpenAuthority(path)
	if err != nil || aside != "" || again.PEM() != first.PEM() || again.Fingerprint() != first.Fingerprint() {
		t.Errorf("OpenAuthority of the same file = %q, %v, the same CA: %v", aside, err, err == nil && again.PEM() == first.PEM())
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%s: %v, %v, want mode 0600", path, st.Mode(), err)
	}
	if strings.Contains(first.PEM(), "PRIVATE") {
		t.Error("what BMCs get holds the key")
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	other, _, err := OpenAuthority(filepath.Join(t.TempDir(), "other.pem"))
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"cut": string(data[:len(data)/2]), "empty": "", "noise": "\x00\xff", "key alone": string(data[strings.Index(string(data), "-----BEGIN PRIVATE"):]),
		"another's certificate": other.PEM() + string(data[strings.Index(string(data), "-----BEGIN PRIVATE"):]), "more behind it": string(data) + "x", "huge": strings.Repeat(" ", maxAuthority+1),
	} {
		path := filepath.Join(t.TempDir(), "media-ca.pem")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		a, aside, err := OpenAuthority(path)
		if name == "huge" {
			if err == nil {
				t.Error("a huge file was read")
			}
			continue
		}
		if err != nil || aside == "" || a.PEM() == first.PEM() {
			t.Errorf("%s: OpenAuthority = %q, %v, want another CA and the old one aside", name, aside, err)
			continue
		}
		if kept, _ := os.ReadFile(aside); string(kept) != text {
			t.Errorf("%s: what was set aside changed", name)
		}
	}
}

// A leaf of the CA stands for its address, at any time, and for no name.
func TestWhatTheCACanStandFor(t *testing.T) {
	a, _, err := OpenAuthority("")
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM([]byte(a.PEM()))
	leaf, err := a.leaf(netip.MustParseAddr("10.0.0.1"))
	if err != nil {
		t.Fatal(err)
	}
	c, err := x509.ParseCertificate(leaf.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	for _, year := range []int{1970, 2026, 9999} {
		at := time.Date(year, 6, 1, 0, 0, 0, 0, time.UTC)
		if _, err := c.Verify(x509.VerifyOptions{Roots: pool, CurrentTime: at, DNSName: "10.0.0.1"}); err != nil {
			t.Errorf("in %d: %v", year, err)
		}
	}
	if _, err := c.Verify(x509.VerifyOptions{Roots: pool, DNSName: "10.0.0.2"}); err == nil {
		t.Error("the leaf stands for another address")
	}
	// Who stole the key.
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for _, forged := range []*x509.Certificate{
		{DNSNames: []string{"ldap.example.com"}},
		{DNSNames: []string{"localhost"}, IPAddresses: []net.IP{net.IPv4(10, 0, 0, 1)}},
		{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}, // one more below it
	} {
		forged.SerialNumber, forged.NotBefore, forged.NotAfter, forged.Subject = big.NewInt(9), always, never, pkix.Name{CommonName: "x"}
		der, err := x509.CreateCertificate(rand.Reader, forged, a.cert, key.Public(), a.key)
		if err != nil {
			t.Fatal(err)
		}
		f, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		if !forged.IsCA {
			if _, err := f.Verify(x509.VerifyOptions{Roots: pool}); err == nil {
				t.Errorf("the CA vouches for %v", forged.DNSNames)
			}
			continue
		}
		below := &x509.Certificate{SerialNumber: big.NewInt(10), NotBefore: always, NotAfter: never, IPAddresses: []net.IP{net.IPv4(10, 0, 0, 1)}}
		if der, err = x509.CreateCertificate(rand.Reader, below, f, key.Public(), key); err != nil {
			t.Fatal(err)
		}
		if below, err = x509.ParseCertificate(der); err != nil {
			t.Fatal(err)
		}
		between := x509.NewCertPool()
		between.AddCert(f)
		if _, err := below.Verify(x509.VerifyOptions{Roots: pool, Intermediates: between}); err == nil {
			t.Error("the CA vouches for a CA below it")
		}
	}
}

// OpenSSL, which most BMCs have, takes the chain too.
func TestOpenSSLAgrees(t *testing.T) {
	openssl, err := exec.LookPath("openssl")
	if err != nil {
		t.Fatal(err)
	}
	a, _, err := OpenAuthority("")
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := a.leaf(netip.MustParseAddr("10.0.0.1"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	ca, cert := filepath.Join(dir, "ca.pem"), filepath.Join(dir, "leaf.pem")
	if err := os.WriteFile(ca, []byte(a.PEM()), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leaf.Certificate[0]}), 0o600); err != nil {
		t.Fatal(err)
	}
	for address, want := range map[string]bool{"10.0.0.1": true, "10.0.0.2": false} {
		// 86400: a clock that stands a day after its beginning.
		for _, at := range [][]string{nil, {"-attime", "86400"}} {
			args := append(append([]string{"verify", "-x509_strict", "-purpose", "sslserver", "-verify_ip", address}, at...), "-CAfile", ca, cert)
			out, err := exec.CommandContext(t.Context(), openssl, args...).CombinedOutput()
			if (err == nil) != want {
				t.Errorf("openssl %s: %v, %s, want accepted %v", strings.Join(args, " "), err, out, want)
			}
		}
	}
}
