package site

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/site/config"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
)

// site.toml spells a BMC's address as the address book does, or the exception
// would silently hold for nobody.
func TestLegacyBMCs(t *testing.T) {
	addresses := []string{"10.0.0.9", "10.0.0.10:8443", "BMC-1.Example", "[2001:DB8::9]:443", "::ffff:10.0.0.11"}
	cfg := &config.Site{BMC: []config.BMC{{Address: "10.0.0.1"}}}
	if legacyBMCs(cfg) != nil {
		t.Error("a section without legacy_tls allows something")
	}
	for _, a := range addresses {
		cfg.BMC = append(cfg.BMC, config.BMC{Address: a, LegacyTLS: true})
	}
	allowed := legacyBMCs(cfg)
	for _, a := range addresses {
		normal, err := addressbook.Normalise(a, "redfish")
		if err != nil || !allowed(normal) {
			t.Errorf("legacyBMCs(%q) = %v, %v, want it allowed", normal, allowed(normal), err)
		}
	}
	for _, a := range []string{"10.0.0.1:443", "10.0.0.9:8443", "10.0.0.10:443", "10.0.0.99:443", ""} {
		if allowed(a) {
			t.Errorf("legacyBMCs(%q) = true, want it for the named BMCs alone", a)
		}
	}
}

// authority is a CA and a certificate of it for 127.0.0.1.
func authority(t *testing.T, name string) (caPEM []byte, leaf *x509.Certificate) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	ca := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Unix(0, 0), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, ca, ca, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	below := &x509.Certificate{SerialNumber: big.NewInt(2), DNSNames: []string{"bmc.example"}, NotBefore: time.Unix(0, 0), NotAfter: time.Now().Add(time.Hour)}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	leafDER, err := x509.CreateCertificate(rand.Reader, below, parsed, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	if leaf, err = x509.ParseCertificate(leafDER); err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), leaf
}

func TestAuthorities(t *testing.T) {
	one, leafOne := authority(t, "one")
	two, leafTwo := authority(t, "two")
	_, stranger := authority(t, "three")
	file := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(file, two, 0o600); err != nil {
		t.Fatal(err)
	}
	damaged := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("x")})
	for _, tt := range []struct {
		name  string
		a     config.Authorities
		takes []*x509.Certificate
		says  string
	}{
		{"none", config.Authorities{}, nil, ""},
		{"both", config.Authorities{PEM: string(one), File: file}, []*x509.Certificate{leafOne, leafTwo}, ""},
		{"a file that is missing", config.Authorities{PEM: string(one), File: file + "x"}, []*x509.Certificate{leafOne}, "cannot be read"},
		{"a damaged one before", config.Authorities{PEM: string(damaged) + string(one)}, []*x509.Certificate{leafOne}, "no good"},
	} {
		var log bytes.Buffer
		s := &site{Config: Config{Log: slog.New(slog.NewTextHandler(&log, nil))}}
		pool := s.authorities(&config.Site{Authorities: tt.a})
		if (pool == nil) != (tt.takes == nil) || tt.says == "" != (log.Len() == 0) || !strings.Contains(log.String(), tt.says) {
			t.Errorf("%s: pool %v, log %q", tt.name, pool != nil, log.String())
		}
		if pool == nil {
			continue
		}
		for _, leaf := range []*x509.Certificate{leafOne, leafTwo, stranger} {
			want := false
			for _, take := range tt.takes {
				want = want || take == leaf
			}
			if _, err := leaf.Verify(x509.VerifyOptions{Roots: pool, DNSName: "bmc.example"}); (err == nil) != want {
				t.Errorf("%s: a certificate of %s: %v, want accepted %v", tt.name, leaf.Issuer.CommonName, err, want)
			}
		}
	}
}

// TestRedfishTrustsAsTheSiteSays: what site.toml says of old TLS and of authorities
// is what the built-in driver goes by.
func TestRedfishTrustsAsTheSiteSays(t *testing.T) {
	power := func(cfg *config.Site, address, pin string) error {
		t.Helper()
		s := &site{Config: Config{Log: slog.New(slog.DiscardHandler)}}
		own, _, logOut, err := s.builtIn(cfg, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer logOut()
		raw, err := json.Marshal(map[string]string{"address": address, "tlsSpkiSha256": pin})
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range own {
			if d.ID() == "redfish" {
				ctx, _ := drivertest.Context(t, t.Context(), map[string]string{"username": "u", "password": "p"})
				_, err := d.Invoke(ctx, "power", "getPower", raw, nil)
				return err
			}
		}
		t.Fatal("no driver redfish")
		return nil
	}
	old, err := bmctest.StartRedfish(t.Context(), "127.0.0.1:0", "u", "p", bmctest.NewFake(), bmctest.WithFaults(bmctest.RSAKeyExchange))
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	for _, tt := range []struct {
		bmc  []config.BMC
		want errs.Code
	}{
		{nil, errs.TLSUnsupported},
		{[]config.BMC{{Address: old.Addr()}}, errs.TLSUnsupported},
		{[]config.BMC{{Address: "127.0.0.1:1", LegacyTLS: true}}, errs.TLSUnsupported},
		{[]config.BMC{{Address: old.Addr(), LegacyTLS: true}}, ""},
	} {
		if err := power(&config.Site{BMC: tt.bmc}, old.Addr(), old.SPKI()); errs.CodeOf(err) != tt.want {
			t.Errorf("getPower() over old TLS with %+v = %v, want code %q", tt.bmc, err, tt.want)
		}
	}

	var asked atomic.Int32
	vouched := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		w.WriteHeader(http.StatusNotFound)
	}))
	defer vouched.Close()
	ca := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: vouched.Certificate().Raw}))
	address := vouched.Listener.Addr().String()
	if err := power(&config.Site{}, address, ""); errs.CodeOf(err) != errs.PinMismatch || asked.Load() != 0 {
		t.Errorf("getPower() without an authority = %v after %d requests, want pin-mismatch after none", err, asked.Load())
	}
	if err := power(&config.Site{Authorities: config.Authorities{PEM: ca}}, address, ""); errs.CodeOf(err) != errs.BmcError || asked.Load() == 0 {
		t.Errorf("getPower() under the site's authority = %v after %d requests, want the BMC's own answer", err, asked.Load())
	}
}
