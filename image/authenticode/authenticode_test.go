package authenticode_test

import (
	"bytes"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"errors"
	"math/big"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/image/authenticode"
	"github.com/better-compute/site-appliance/image/authenticode/signtest"
)

// stubs are EFI programs by others that no one has signed.
var stubs = []string{"/usr/lib/systemd/boot/efi/linuxx64.efi.stub", "/usr/lib/ipxe/snponly.efi"}

func key(t *testing.T) (*x509.Certificate, *rsa.PrivateKey) {
	t.Helper()
	k, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(7), Subject: pkix.Name{CommonName: "a signer"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, k.Public(), k)
	if err != nil {
		t.Fatal(err)
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return c, k
}

func TestOf(t *testing.T) {
	cert, k := key(t)
	_, other := key(t)
	n := 0
	for _, stub := range stubs {
		image, err := os.ReadFile(stub)
		if err != nil {
			continue
		}
		n++
		if _, err := authenticode.Of(image); !errors.Is(err, authenticode.ErrUnsigned) {
			t.Errorf("%s: Of = %v, want that it is not signed", stub, err)
		}
		signed, err := signtest.Sign(image, cert, k)
		if err != nil {
			t.Fatal(err)
		}
		got, err := authenticode.Of(signed)
		if err != nil || len(got) != 1 || got[0].Issuer != "CN=a signer" || got[0].Serial.Int64() != 7 || got[0].Signer == nil {
			t.Errorf("%s: Of = %+v, %v, want one signature of a signer", stub, got, err)
		}
		byOther, err := signtest.Sign(image, cert, other)
		if err != nil {
			t.Fatal(err)
		}
		edit := func(f func([]byte) []byte) []byte { return f(bytes.Clone(signed)) }
		for name, tt := range map[string]struct {
			image []byte
			want  string
		}{
			"another program":               {edit(func(b []byte) []byte { b[0x1000] ^= 1; return b }), "over another program"},
			"a header that was changed":     {edit(func(b []byte) []byte { b[binary.LittleEndian.Uint32(b[0x3c:])+8] ^= 1; return b }), "over another program"},
			"another's key":                 {byOther, "did not make it"},
			"bytes after the signature":     {append(bytes.Clone(signed), 0), "over another program"},
			"a signature that was cut":      {signed[:len(signed)-100], "outside of the program"},
			"a signature that was damaged":  {edit(func(b []byte) []byte { b[len(b)-20] ^= 1; return b }), "did not make it"},
			"no program":                    {[]byte("MZ"), "no EFI program"},
			"nothing":                       {nil, "no EFI program"},
			"a certificate of another form": {edit(func(b []byte) []byte { b[(len(image)+7)&^7+6] = 1; return b }), "not signed"},
		} {
			if _, err := authenticode.Of(tt.image); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%s: %s: Of = %v, want %q", stub, name, err, tt.want)
			}
		}
	}
	if n == 0 {
		t.Skip("needs an EFI program: package systemd-boot-efi or ipxe")
	}
}

func FuzzOf(f *testing.F) {
	for _, stub := range stubs[:1] {
		image, err := os.ReadFile(stub)
		if err == nil {
			f.Add(image[:min(len(image), 4096)])
		}
	}
	f.Add([]byte("MZ"))
	f.Fuzz(func(t *testing.T, image []byte) {
		if got, err := authenticode.Of(image); err == nil && len(got) == 0 {
			t.Error("no signature and no error")
		}
	})
}
