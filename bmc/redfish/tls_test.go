package redfish

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"io"
	"math/big"
	"net"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmctest"
)

func TestTrust(t *testing.T) {
	r, b := rig(t)
	flipped := []byte(r.SPKI())
	flipped[0] ^= 1
	if _, err := hex.DecodeString(string(flipped)); err != nil {
		flipped[0] = '0'
	}
	for _, tt := range []struct {
		name string
		pin  any
		want errs.Code
	}{
		{"the pin", r.SPKI(), ""},
		{"the pin in capitals", strings.ToUpper(r.SPKI()), ""},
		{"a pin with one bit flipped", string(flipped), errs.PinMismatch},
		{"no pin", "", errs.PinMismatch},
		{"half a pin", r.SPKI()[:32], errs.InvalidConfig},
	} {
		b.config["tlsSpkiSha256"] = tt.pin
		before := len(r.Requests())
		_, err := b.power()
		if errs.CodeOf(err) != tt.want {
			t.Errorf("%s: getPower() = %v, want code %q", tt.name, err, tt.want)
		}
		if tt.want == errs.PinMismatch && len(r.Requests()) != before {
			t.Errorf("%s: the BMC saw a request", tt.name)
		}
		if err != nil && errs.From(err).Retryable {
			t.Errorf("%s: the error is retryable", tt.name)
		}
	}
}

// An unpinned BMC is trusted when an authority vouches for its name, and only then.
func TestRoots(t *testing.T) {
	s := httptest.NewTLSServer(&fake{t: t})
	defer s.Close()
	pool := x509.NewCertPool()
	pool.AddCert(s.Certificate())
	_, port, _ := net.SplitHostPort(s.Listener.Addr().String())
	b := newBench(t, "127.0.0.1:"+port, "", "u", "p")
	b.pool.options.Roots = pool
	if got, err := b.power(); got != "on" || err != nil {
		t.Errorf("getPower() under a known authority = %q, %v, want on", got, err)
	}
	b.config["address"] = "localhost:" + port
	if _, err := b.power(); errs.CodeOf(err) != errs.PinMismatch {
		t.Errorf("getPower() under another name = %v, want pin-mismatch", err)
	}
	b.config["address"] = "127.0.0.1:" + port
	b.pool.options.Roots = x509.NewCertPool()
	b.pool.close(t.Context())
	if _, err := b.power(); errs.CodeOf(err) != errs.PinMismatch {
		t.Errorf("getPower() under no authority = %v, want pin-mismatch", err)
	}
}

// rsaServer is a BMC whose TLS is old in some way.
func rsaServer(t *testing.T, minimum, maximum uint16, suites ...uint16) (*fake, *bench) {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "bmc"}, NotBefore: time.Unix(0, 0), NotAfter: time.Unix(1<<33, 0)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{t: t}
	s := httptest.NewUnstartedServer(f)
	s.TLS = &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
		MinVersion:   minimum, MaxVersion: maximum, CipherSuites: suites,
	}
	s.StartTLS()
	t.Cleanup(s.Close)
	conn, err := tls.Dial("tcp", s.Listener.Addr().String(), &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS10, CipherSuites: legacySuites})
	if err != nil {
		// It takes 3DES alone, which is no suite of ours: the pin does not matter.
		return f, newBench(t, s.Listener.Addr().String(), strings.Repeat("00", 32), "u", "p")
	}
	defer conn.Close()
	return f, newBench(t, s.Listener.Addr().String(), pinOfCertificate(conn.ConnectionState().PeerCertificates[0]), "u", "p")
}

// A BMC with nothing but old TLS is refused, and told why; the site can allow it
// for that one.
func TestOldTLS(t *testing.T) {
	const v10, v11, v12 = tls.VersionTLS10, tls.VersionTLS11, tls.VersionTLS12
	for _, tt := range []struct {
		name             string
		minimum, maximum uint16
		suites           []uint16
		code             errs.Code
		cause            string
		legacy           errs.Code // where it is allowed
	}{
		{"RSA key exchange", v12, v12, []uint16{tls.TLS_RSA_WITH_AES_128_GCM_SHA256}, errs.TLSUnsupported, "RSA key exchange", ""},
		{"RSA key exchange, CBC", v12, v12, []uint16{tls.TLS_RSA_WITH_AES_256_CBC_SHA}, errs.TLSUnsupported, "RSA key exchange", ""},
		{"TLS 1.0", v10, v10, []uint16{tls.TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA}, errs.TLSUnsupported, "TLS 1.0", ""},
		{"TLS 1.1", v11, v11, []uint16{tls.TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA}, errs.TLSUnsupported, "TLS 1.1", ""},
		{"both", v10, v10, []uint16{tls.TLS_RSA_WITH_AES_128_CBC_SHA}, errs.TLSUnsupported, "TLS 1.0 with RSA key exchange", ""},
		{"3DES", v12, v12, []uint16{tls.TLS_RSA_WITH_3DES_EDE_CBC_SHA}, errs.TLSUnsupported, "3DES", errs.TLSUnsupported},
		{"TLS 1.2 with forward secrecy", v12, v12, []uint16{tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256}, "", "", ""},
		{"TLS 1.3", v12, tls.VersionTLS13, nil, "", "", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f, b := rsaServer(t, tt.minimum, tt.maximum, tt.suites...)
			_, err := b.power()
			if errs.CodeOf(err) != tt.code || err != nil && (!strings.Contains(err.Error(), tt.cause) || errs.From(err).Retryable) {
				t.Errorf("getPower() = %v, want code %q with %q, not retryable", err, tt.code, tt.cause)
			}
			if len(f.seen) != 0 && tt.code != "" {
				t.Errorf("the BMC saw %q", f.seen)
			}
			b.pool.options.Legacy = func(string) bool { return false }
			if _, err := b.power(); errs.CodeOf(err) != tt.code {
				t.Errorf("getPower() allowed for another BMC = %v, want code %q", err, tt.code)
			}
			b.pool.close(t.Context())
			b.pool.options.Legacy = func(address string) bool { return address == b.config["address"] }
			if _, err := b.power(); errs.CodeOf(err) != tt.legacy {
				t.Errorf("getPower() allowed for this BMC = %v, want code %q", err, tt.legacy)
			}
			// Old TLS is no way around the pin.
			b.config["tlsSpkiSha256"] = strings.Repeat("11", 32)
			if _, err := b.power(); errs.CodeOf(err) != errs.PinMismatch && tt.legacy == "" {
				t.Errorf("getPower() with another pin = %v, want pin-mismatch", err)
			}
		})
	}
	for fault, cause := range map[bmctest.Fault]string{bmctest.OldTLS: "TLS 1.0", bmctest.RSAKeyExchange: "RSA key exchange"} {
		r, b := rig(t, fault)
		if _, err := b.power(); errs.CodeOf(err) != errs.TLSUnsupported || !strings.Contains(err.Error(), cause) || len(r.Requests()) != 0 {
			t.Errorf("%s: getPower() = %v, want tls-unsupported with %q", fault, err, cause)
		}
		b.pool.options.Legacy = func(string) bool { return true }
		if _, err := b.power(); err != nil {
			t.Errorf("%s: getPower() where it is allowed = %v", fault, err)
		}
	}
}

// The first message of a handshake fits into one packet, which old BMCs want.
func TestFirstMessageIsShort(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	length := make(chan int, 4)
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			header := make([]byte, 5) // type, version, length of the record
			_, _ = io.ReadFull(c, header)
			select {
			case length <- int(header[3])<<8 | int(header[4]):
			default:
			}
			_ = c.Close()
		}
	}()
	b := newBench(t, listener.Addr().String(), strings.Repeat("ab", 32), "u", "p")
	if _, err := b.power(); err == nil {
		t.Error("getPower() of what is no BMC went well")
	}
	if got := <-length; got == 0 || got > 1000 {
		t.Errorf("the first message has %d bytes, want at most 1000", got)
	}
}

// A server that is no TLS server at all, or hangs up, is just out of reach.
func TestNoTLS(t *testing.T) {
	for name, reply := range map[string]string{"hangs up": "", "speaks HTTP": "HTTP/1.1 400 Bad Request\r\n\r\n"} {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			for {
				c, err := listener.Accept()
				if err != nil {
					return
				}
				_, _ = c.Write([]byte(reply))
				_ = c.Close()
			}
		}()
		b := newBench(t, listener.Addr().String(), strings.Repeat("ab", 32), "u", "p")
		if _, err := b.power(); errs.CodeOf(err) != errs.Unreachable {
			t.Errorf("%s: getPower() = %v, want unreachable", name, err)
		}
		_ = listener.Close()
	}
}
