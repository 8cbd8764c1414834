package enrol

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

func csr(t testing.TB, curve elliptic.Curve) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(curve, rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func TestParseCSR(t *testing.T) {
	good := csr(t, elliptic.P256())
	flipped := append([]byte(nil), good...)
	flipped[len(flipped)-1] ^= 1
	for name, tt := range map[string]struct {
		in   []byte
		want errs.Code
	}{
		"P-256":           {good, ""},
		"P-384":           {csr(t, elliptic.P384()), errs.InvalidPayload},
		"flipped byte":    {flipped, errs.SignatureInvalid},
		"trailing byte":   {append(append([]byte(nil), good...), 0), errs.InvalidPayload},
		"nothing":         {nil, errs.InvalidPayload},
		"larger than any": {make([]byte, 9<<10), errs.InvalidPayload},
	} {
		if key, err := parseCSR(tt.in); errs.CodeOf(err) != tt.want || (key == nil) != (tt.want != "") {
			t.Errorf("%s: parseCSR = %v, %v, want code %q", name, key != nil, err, tt.want)
		}
	}
}

func FuzzParseCSR(f *testing.F) {
	f.Add(csr(f, elliptic.P256()))
	f.Add([]byte{0x30, 0x80})
	f.Fuzz(func(t *testing.T, data []byte) {
		if key, err := parseCSR(data); (key == nil) == (err == nil) {
			t.Errorf("parseCSR(%x) = %v, %v", data, key, err)
		}
	})
}
