package probe

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode"

	"github.com/better-compute/site-appliance/bmc/bmctest"
)

func port(t *testing.T, address string) uint16 {
	t.Helper()
	a, err := net.ResolveUDPAddr("udp", address)
	if err != nil {
		t.Fatal(err)
	}
	return uint16(a.Port)
}

func TestProbeRig(t *testing.T) {
	const user, password = "ADMIN", "rig-only-passphrase"
	web, err := bmctest.StartRedfish(t.Context(), "127.0.0.1:0", user, password, bmctest.NewFake())
	if err != nil {
		t.Fatal(err)
	}
	defer web.Close()
	lan, err := bmctest.StartIPMI(t.Context(), "127.0.0.1:0", user, password, bmctest.NewFake())
	if err != nil {
		t.Fatal(err)
	}
	defer lan.Close()
	r, err := Probe(t.Context(), "https://"+web.Addr(), Options{IPMIPort: port(t, lan.Addr())})
	if err != nil || r.TLS == nil || r.Redfish == nil || r.IPMI == nil {
		t.Fatalf("Probe = %+v, %v, want all three", r, err)
	}
	if r.TLS.Pin != web.SPKI() || r.TLS.Trusted || r.TLS.Untrusted == "" || r.TLS.Legacy != "" || r.TLS.Version != "TLS 1.3" {
		t.Errorf("TLS = %+v, want pin %s, not trusted, today's TLS", r.TLS, web.SPKI())
	}
	if r.Redfish.Version == "" || !slices.Contains(r.Redfish.Services, "Systems") {
		t.Errorf("Redfish = %+v, want a version and Systems", r.Redfish)
	}
	if !r.IPMI.Version2 || !slices.Equal(r.IPMI.Suites, []int{3, 17}) || !r.IPMI.Ping {
		t.Errorf("IPMI = %+v, want 2.0 with suites 3 and 17, and a pong", r.IPMI)
	}
	for _, req := range web.Requests() {
		if !strings.HasPrefix(req, "GET /redfish/v1") || strings.Count(req, "/") > 3 {
			t.Errorf("the BMC was asked for %q", req)
		}
	}
	want := "better-compute metal enroll NAME --pool POOL --credentials SECRET --driver redfish --address '" + web.Addr() + "' --pin " + web.SPKI()
	if got := r.Enrol(); got != want {
		t.Errorf("Enrol() = %q, want %q", got, want)
	}
	// The pin is of the very key: the rig's own client accepts nothing else.
	web.Close()
	if r, err = Probe(t.Context(), web.Addr(), Options{IPMIPort: port(t, lan.Addr())}); err != nil || r.TLS != nil || r.IPMI == nil || len(r.Problems) != 1 {
		t.Errorf("IPMI alone: %+v, %v", r, err)
	}
	if got := r.Enrol(); !strings.Contains(got, "--driver ipmi --address '"+lan.Addr()+"'") || strings.Contains(got, "--pin") || strings.Contains(got, "--options") {
		t.Errorf("Enrol() of IPMI alone = %q", got)
	}
}

// serve is a BMC that says what a test wants it to.
func serve(t *testing.T, config *tls.Config, h http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewUnstartedServer(h)
	s.TLS = config
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

// closed is a UDP port where nobody listens: the answer is a refusal, at once.
const closed = 1

// silent is a UDP port that hears and never answers.
func silent(t *testing.T) uint16 {
	t.Helper()
	c, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return port(t, c.LocalAddr().String())
}

func body(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, text) }
}

func TestHostileServiceRoots(t *testing.T) {
	var elsewhere atomic.Int32
	other := serve(t, nil, func(http.ResponseWriter, *http.Request) { elsewhere.Add(1) })
	for _, tt := range []struct {
		name    string
		h       http.HandlerFunc
		vendor  string
		problem string // empty: it is read
	}{
		{"plain", body(`{"Vendor":"ACME","RedfishVersion":"1.11.0","Systems":{"@odata.id":"/redfish/v1/Systems"}}`), "ACME", ""},
		{"vendor by its own section", body(`{"RedfishVersion":"1.0.2","Oem":{"Supermicro":{}}}`), "Supermicro", ""},
		{"escapes", body(`{"Vendor":"A\u001b[2J\u009b31mB\u202e","RedfishVersion":"1.0.2"}`), "A·[2J·31mB·", ""},
		{"endless name", body(`{"Vendor":"` + strings.Repeat("A", 5000) + `","RedfishVersion":"1.0.2"}`), strings.Repeat("A", maxText) + "…", ""},
		{"odd types", body(`{"Vendor":7,"Product":[],"UUID":{},"RedfishVersion":"1.0.2","Systems":"no link","Managers":{"@odata.id":5}}`), "", ""},
		{"wants no slash", func(w http.ResponseWriter, r *http.Request) {
			if strings.HasSuffix(r.URL.Path, "/") {
				http.NotFound(w, r)
				return
			}
			body(`{"Vendor":"ACME","RedfishVersion":"1.0.2"}`)(w, r)
		}, "ACME", ""},
		{"redirects", func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "https://"+other+"/redfish/v1/", http.StatusFound)
		}, "", "answers 302"},
		{"a login page", body("<html>"), "", "no JSON object"},
		{"null", body("null"), "", "no JSON object"},
		{"other JSON", body(`{"a":1}`), "", "no Redfish service root"},
		{"deep", body(strings.Repeat(`{"a":`, 100000)), "", "no JSON object"},
		{"endless", func(w http.ResponseWriter, r *http.Request) {
			for r.Context().Err() == nil {
				if _, err := w.Write(bytes.Repeat([]byte(" "), 4096)); err != nil {
					return
				}
			}
		}, "", "larger than"},
		{"closed", func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusUnauthorized) }, "", "answers 401"},
		{"never answers", func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, "", "deadline"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var mu atomic.Value
			address := serve(t, nil, func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Authorization") != "" || r.Header.Get("X-Auth-Token") != "" || r.Method != http.MethodGet {
					mu.Store(fmt.Sprint(r.Method, r.Header))
				}
				tt.h(w, r)
			})
			o := Options{IPMIPort: closed, Timeout: 10 * time.Second}
			if tt.name == "never answers" {
				o = Options{IPMIPort: silent(t), Timeout: 300 * time.Millisecond}
			}
			r, err := Probe(t.Context(), address, o)
			if err != nil || r.TLS == nil {
				t.Fatalf("Probe = %+v, %v, want TLS", r, err)
			}
			problems := strings.Join(r.Problems, "; ")
			if tt.problem == "" && (r.Redfish == nil || r.Redfish.Vendor != tt.vendor) || tt.problem != "" && (r.Redfish != nil || !strings.Contains(problems, tt.problem)) {
				t.Errorf("Redfish = %+v, problems %q, want vendor %q or problem %q", r.Redfish, problems, tt.vendor, tt.problem)
			}
			if r.IPMI != nil || !strings.Contains(problems, "ipmi: UDP") {
				t.Errorf("IPMI = %+v, problems %q, want none", r.IPMI, problems)
			}
			if bad := mu.Load(); bad != nil {
				t.Errorf("the BMC was sent %v", bad)
			}
		})
	}
	if n := elsewhere.Load(); n != 0 {
		t.Errorf("a redirect was followed %d times", n)
	}
}

// certificate is a self-signed one for 127.0.0.1.
func certificate(t *testing.T, legacy bool, name string) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment | x509.KeyUsageCertSign,
	}
	var public, key any
	if legacy {
		k, err := rsa.GenerateKey(rand.Reader, 2048)
		if err != nil {
			t.Fatal(err)
		}
		public, key = k.Public(), k
	} else {
		k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		public, key = k.Public(), k
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, public, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(leaf)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pool
}

func TestTLS(t *testing.T) {
	old, _ := certificate(t, true, "old")
	new, roots := certificate(t, false, "new\x1b[2J")
	ok := body(`{"RedfishVersion":"1.0.2"}`)
	for _, tt := range []struct {
		name    string
		config  *tls.Config
		legacy  string
		trusted bool
	}{
		{"trusted", &tls.Config{Certificates: []tls.Certificate{new}}, "", true},
		{"today's", &tls.Config{Certificates: []tls.Certificate{old}}, "", false},
		{"TLS 1.0", &tls.Config{Certificates: []tls.Certificate{old}, MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS10}, "TLS 1.0 at most", false},
		{"TLS 1.1", &tls.Config{Certificates: []tls.Certificate{old}, MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS11}, "TLS 1.1 at most", false},
		{"RSA key exchange", &tls.Config{Certificates: []tls.Certificate{old}, MaxVersion: tls.VersionTLS12, CipherSuites: []uint16{tls.TLS_RSA_WITH_AES_128_GCM_SHA256}}, "only TLS_RSA_WITH_AES_128_GCM_SHA256", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, err := Probe(t.Context(), serve(t, tt.config, ok), Options{IPMIPort: closed, Roots: roots, Timeout: 10 * time.Second})
			if err != nil || r.TLS == nil || r.Redfish == nil {
				t.Fatalf("Probe = %+v, %v, want TLS and Redfish", r, err)
			}
			if (r.TLS.Legacy == "") != (tt.legacy == "") || !strings.Contains(r.TLS.Legacy, tt.legacy) || r.TLS.Trusted != tt.trusted {
				t.Errorf("TLS = %+v, want legacy %q and trusted %v", r.TLS, tt.legacy, tt.trusted)
			}
			if strings.ContainsRune(r.TLS.Subject, 0x1b) {
				t.Errorf("the subject holds an escape: %q", r.TLS.Subject)
			}
		})
	}

	// Another key answers than the one whose pin is told.
	var turn atomic.Int32
	swap := &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		if turn.Add(1) == 1 {
			return &tls.Config{Certificates: []tls.Certificate{new}}, nil
		}
		return &tls.Config{Certificates: []tls.Certificate{old}}, nil
	}}
	r, err := Probe(t.Context(), serve(t, swap, ok), Options{IPMIPort: closed, Timeout: 10 * time.Second})
	if err != nil || r.Redfish != nil || !strings.Contains(strings.Join(r.Problems, " "), "another key") {
		t.Errorf("a swapped key: %+v, %v", r, err)
	}
}

func TestBadAddress(t *testing.T) {
	for _, address := range []string{"", "http://10.0.0.1", "10.0.0.1:0", "a b", "0.0.0.0", "user@host", "10.0.0.1/x", "-x.example", "$(id)"} {
		if r, err := Probe(t.Context(), address, Options{}); err == nil {
			t.Errorf("Probe(%q) = %+v, want an error", address, r)
		}
	}
}

func TestProbeEndsWithItsContext(t *testing.T) {
	address := serve(t, nil, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = Probe(ctx, address, Options{IPMIPort: silent(t), Timeout: time.Hour})
	}()
	cancel()
	<-done
}

// wild answers every datagram with others: late, cut, of another session.
func wild(t *testing.T, answers func(in []byte) [][]byte) uint16 {
	t.Helper()
	c, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 512)
		for {
			n, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			for _, a := range answers(buf[:n]) {
				_, _ = c.WriteTo(a, from)
			}
		}
	}()
	t.Cleanup(func() { _ = c.Close(); <-done })
	return port(t, c.LocalAddr().String())
}

// auth is a right answer to Get Channel Authentication Capabilities.
func auth(in []byte, data ...byte) []byte {
	head := []byte{remoteConsole, appResponse}
	payload := append([]byte{bmcAddress, in[18], channelAuth, 0}, data...)
	m := slices.Concat(head, []byte{checksum(head)}, payload, []byte{checksum(payload)})
	return slices.Concat(ipmiHead, make([]byte, 9), []byte{byte(len(m))}, m)
}

func TestIPMIAnswers(t *testing.T) {
	command := func(in []byte) bool { return len(in) > 19 && in[3] == 7 && in[19] == channelAuth }
	for _, tt := range []struct {
		name    string
		answers func(in []byte) [][]byte
		there   bool
		two     bool
		weak    int
	}{
		{"IPMI 2.0", func(in []byte) [][]byte { return [][]byte{auth(in, 1, 0x80, 0x04, 0x02, 0, 0, 0, 0)} }, true, true, 0},
		{"weak", func(in []byte) [][]byte { return [][]byte{auth(in, 1, 0x81, 0x03, 0x03, 0, 0, 0, 0)} }, true, true, 3},
		{"IPMI 1.5", func(in []byte) [][]byte { return [][]byte{auth(in, 1, 0x14, 0x04, 0x00, 0, 0, 0, 0)} }, true, false, 0},
		{"short", func(in []byte) [][]byte { return [][]byte{auth(in, 1)} }, true, false, 0},
		{"noise first", func(in []byte) [][]byte {
			good := auth(in, 1, 0x80, 0x04, 0x02, 0, 0, 0, 0)
			var out [][]byte
			for i := range good {
				out = append(out, good[:i]) // every cut of it
			}
			for _, at := range []int{0, 3, 4, 13, 14, 16, 18, 19, len(good) - 1} {
				bad := slices.Clone(good)
				bad[at] ^= 0x44
				out = append(out, bad)
			}
			return append(out, bytes.Repeat([]byte{0xff}, 400), good)
		}, true, true, 0},
		{"noise alone", func(in []byte) [][]byte { return [][]byte{{}, {6}, bytes.Repeat([]byte{6}, 64), in} }, false, false, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := wild(t, func(in []byte) [][]byte {
				if !command(in) {
					return nil
				}
				return tt.answers(in)
			})
			got, problems := askIPMI(t.Context(), fmt.Sprint("127.0.0.1:", p), 900*time.Millisecond)
			if (got != nil) != tt.there || got != nil && (got.Version2 != tt.two || len(got.Weak) != tt.weak) {
				t.Errorf("askIPMI = %+v, %v, want there %v, 2.0 %v, %d weaknesses", got, problems, tt.there, tt.two, tt.weak)
			}
		})
	}
}

func TestParseSuites(t *testing.T) {
	for _, tt := range []struct {
		in   []byte
		want []int
	}{
		{nil, nil},
		{[]byte{0xc0}, nil},
		{[]byte{0xc0, 3, 1, 0x41, 0x81, 0xc0, 17, 3, 0x44, 0x81}, []int{3, 17}},
		{[]byte{0xc1, 0x80, 0xc0, 9, 9, 1, 0x41, 0xc0, 0, 0, 0x40, 0x80}, []int{0}},
		{[]byte{0xc1, 0x80}, nil},
	} {
		if got := parseSuites(tt.in); !slices.Equal(got, tt.want) {
			t.Errorf("parseSuites(%x) = %v, want %v", tt.in, got, tt.want)
		}
	}
	for _, tt := range []struct {
		offered []int
		want    string
	}{{[]int{3}, `--options '{"cipherSuite":3}'`}, {[]int{3, 17}, ""}, {nil, ""}, {[]int{0, 1}, ""}, {[]int{3, 8}, `--options '{"cipherSuite":8}'`}} {
		r := &Report{Address: "[2001:db8::1]:443", IPMI: &IPMI{Port: 623, Version2: true, Suites: tt.offered}}
		got := r.Enrol()
		if !strings.Contains(got, "--address '[2001:db8::1]:623'") || !strings.HasSuffix(got, strings.TrimSpace("--address '[2001:db8::1]:623' "+tt.want)) {
			t.Errorf("Enrol() with suites %v = %q, want its end %q", tt.offered, got, tt.want)
		}
	}
}

func FuzzParseRoot(f *testing.F) {
	for _, seed := range []string{`{"Vendor":"A","RedfishVersion":"1.0.2","Oem":{"X":{}},"Systems":{"@odata.id":"/redfish/v1/Systems"}}`, `{"Vendor":"\u001b"}`, `null`, `{"A":{"@odata.id":"\ud800"}}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := parseRoot(data)
		if err != nil {
			return
		}
		for _, s := range append(r.Services, r.Vendor, r.Product, r.Version, r.UUID) {
			if strings.ContainsFunc(s, func(c rune) bool { return !unicode.IsPrint(c) }) || len([]rune(s)) > maxText+1 {
				t.Errorf("parseRoot(%q) gives %q", data, s)
			}
		}
	})
}

func FuzzResponse(f *testing.F) {
	f.Add(auth(make([]byte, 20), 1, 0x80, 4, 2, 0, 0, 0, 0), byte(0), byte(channelAuth))
	f.Add(slices.Concat(ipmiHead, make([]byte, 9), []byte{255}), byte(4), byte(0x54))
	f.Fuzz(func(t *testing.T, in []byte, seq, number byte) {
		if data, ok := response(in, seq, number); ok {
			if len(data) == 0 {
				t.Error("an answer without a completion code")
			}
			(&IPMI{}).judge(data[1:])
			parseSuites(data[1:])
		}
	})
}
