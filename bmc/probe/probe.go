// Package probe looks at a BMC from outside and without any credential: its TLS
// key, its Redfish service root, and what it says of IPMI.
package probe

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/printable"
	"github.com/better-compute/site-appliance/bmc/addressbook"
)

// Bounds of what a BMC may say.
const (
	maxBody     = 1 << 20
	maxHeader   = 64 << 10
	maxText     = 128 // runes of one value
	maxServices = 64
)

// Options say where and how long to look. The zero value serves.
type Options struct {
	// IPMIPort is 623 when it is 0.
	IPMIPort uint16
	// Roots judge the certificate; nil: the system's.
	Roots *x509.CertPool
	// Timeout bounds each protocol's questions; 0: 15 s.
	Timeout time.Duration
}

// Report is what a BMC showed. Every text in it is printable and short, whatever
// the BMC sent.
type Report struct {
	// Address is host:port of the Redfish service.
	Address string   `json:"address"`
	TLS     *TLS     `json:"tls,omitempty"`
	Redfish *Redfish `json:"redfish,omitempty"`
	IPMI    *IPMI    `json:"ipmi,omitempty"`
	// Problems say what was not learned, and why.
	Problems []string `json:"problems,omitempty"`
}

// TLS is what the handshake showed.
type TLS struct {
	// Pin is the hex SHA-256 of the public key of the BMC's certificate.
	Pin       string    `json:"spki_sha256"`
	Subject   string    `json:"subject"`
	Issuer    string    `json:"issuer"`
	Names     []string  `json:"names,omitempty"`
	NotBefore time.Time `json:"not_before"`
	NotAfter  time.Time `json:"not_after"`
	Version   string    `json:"version"`
	Suite     string    `json:"cipher_suite"`
	// Trusted says that the authorities of this computer accept it; Untrusted why not.
	Trusted   bool   `json:"trusted"`
	Untrusted string `json:"untrusted,omitempty"`
	// Legacy names what a BMC offers in place of today's TLS: TLS 1.0 or 1.1, or
	// key exchange by RSA. Empty: it needs no exception.
	Legacy string `json:"legacy,omitempty"`
}

// Redfish is the service root.
type Redfish struct {
	Vendor   string   `json:"vendor,omitempty"`
	Product  string   `json:"product,omitempty"`
	Version  string   `json:"version,omitempty"`
	UUID     string   `json:"uuid,omitempty"`
	Services []string `json:"services,omitempty"`
}

// Probe asks address (a host, with an optional https:// and port) by TLS,
// Redfish and IPMI, side by side. Its error is a bad address alone; what does
// not answer stands in Problems.
func Probe(ctx context.Context, address string, o Options) (*Report, error) {
	if strings.HasPrefix(strings.ToLower(address), "http://") {
		return nil, errors.New("a BMC is spoken to over TLS alone: leave http:// out")
	}
	target, err := addressbook.Normalise(address, "redfish")
	if err != nil {
		return nil, err
	}
	host, _, _ := net.SplitHostPort(target)
	if o.IPMIPort == 0 {
		o.IPMIPort = 623
	}
	if o.Timeout == 0 {
		o.Timeout = 15 * time.Second
	}
	r := &Report{Address: target}
	var web, lan []string
	var wg sync.WaitGroup
	wg.Go(func() { web = r.web(ctx, target, host, o) })
	wg.Go(func() {
		r.IPMI, lan = askIPMI(ctx, net.JoinHostPort(host, fmt.Sprint(o.IPMIPort)), o.Timeout)
	})
	wg.Wait()
	r.Problems = append(web, lan...)
	return r, nil
}

// web asks by TLS and Redfish, and tells the problems.
func (r *Report) web(ctx context.Context, target, host string, o Options) []string {
	state, legacy, err := handshake(ctx, target, o.Timeout)
	if err != nil {
		return []string{"tls: " + legible(err.Error())}
	}
	r.TLS = describe(state, host, o.Roots)
	if legacy {
		r.TLS.Legacy = legacyCause(state)
	}
	root, err := serviceRoot(ctx, target, r.TLS.Pin, legacy, o.Timeout)
	if err != nil {
		return []string{"redfish: " + legible(err.Error())}
	}
	r.Redfish = root
	return nil
}

// config is a TLS client that judges nothing: what is seen is only reported, and
// no secret is ever sent. With legacy it takes what old BMCs have.
func config(host string, legacy bool) *tls.Config {
	c := &tls.Config{InsecureSkipVerify: true, ServerName: host, MinVersion: tls.VersionTLS12}
	if legacy {
		c.MinVersion = tls.VersionTLS10
		for _, suite := range slices.Concat(tls.CipherSuites(), tls.InsecureCipherSuites()) {
			c.CipherSuites = append(c.CipherSuites, suite.ID)
		}
	}
	return c
}

// handshake tries today's TLS, and then what is left.
func handshake(ctx context.Context, target string, timeout time.Duration) (state tls.ConnectionState, legacy bool, err error) {
	host, _, _ := net.SplitHostPort(target)
	try := func(legacy bool) error {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		conn, err := (&tls.Dialer{Config: config(host, legacy)}).DialContext(ctx, "tcp", target)
		if err != nil {
			return err
		}
		defer conn.Close()
		state = conn.(*tls.Conn).ConnectionState()
		if len(state.PeerCertificates) == 0 {
			return errors.New("it shows no certificate")
		}
		return nil
	}
	first := try(false)
	var op *net.OpError
	if first == nil || errors.As(first, &op) && op.Op == "dial" || ctx.Err() != nil {
		return state, false, first
	}
	if try(true) != nil {
		return state, false, first
	}
	return state, true, nil
}

// legacyCause names why only the second handshake worked.
func legacyCause(state tls.ConnectionState) string {
	if state.Version < tls.VersionTLS12 {
		return "it offers " + tls.VersionName(state.Version) + " at most"
	}
	return "it offers only " + tls.CipherSuiteName(state.CipherSuite)
}

// describe puts the handshake into words.
func describe(state tls.ConnectionState, host string, roots *x509.CertPool) *TLS {
	leaf := state.PeerCertificates[0]
	sum := sha256.Sum256(leaf.RawSubjectPublicKeyInfo)
	t := &TLS{
		Pin: hex.EncodeToString(sum[:]), Subject: legible(leaf.Subject.String()), Issuer: legible(leaf.Issuer.String()),
		NotBefore: leaf.NotBefore, NotAfter: leaf.NotAfter, Version: tls.VersionName(state.Version), Suite: tls.CipherSuiteName(state.CipherSuite),
	}
	for _, name := range leaf.DNSNames[:min(len(leaf.DNSNames), 8)] {
		t.Names = append(t.Names, legible(name))
	}
	for _, ip := range leaf.IPAddresses[:min(len(leaf.IPAddresses), 8)] {
		t.Names = append(t.Names, ip.String())
	}
	between := x509.NewCertPool()
	for _, c := range state.PeerCertificates[1:] {
		between.AddCert(c)
	}
	_, err := leaf.Verify(x509.VerifyOptions{DNSName: host, Roots: roots, Intermediates: between})
	if t.Trusted = err == nil; err != nil {
		t.Untrusted = legible(err.Error())
	}
	return t
}

// serviceRoot reads the one resource that Redfish shows to everybody, from
// whoever holds the key that was seen before. No redirect is followed.
func serviceRoot(ctx context.Context, target, pin string, legacy bool, timeout time.Duration) (*Redfish, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	host, _, _ := net.SplitHostPort(target)
	c := config(host, legacy)
	c.VerifyConnection = func(state tls.ConnectionState) error {
		if sum := sha256.Sum256(state.PeerCertificates[0].RawSubjectPublicKeyInfo); hex.EncodeToString(sum[:]) != pin {
			return errors.New("it showed another key than a moment before")
		}
		return nil
	}
	dialer := &net.Dialer{}
	transport := &http.Transport{
		Proxy: nil,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, network, target)
		},
		// HTTP/1.1 alone: BMCs speak nothing else well.
		TLSClientConfig: c, MaxResponseHeaderBytes: maxHeader, TLSNextProto: map[string]func(string, *tls.Conn) http.RoundTripper{},
	}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	var last error
	// Some BMCs want the path without the slash at its end.
	for _, path := range []string{"/redfish/v1/", "/redfish/v1"} {
		var root *Redfish
		if root, last = get(ctx, client, (&url.URL{Scheme: "https", Host: target, Path: path}).String()); last == nil {
			return root, nil
		}
	}
	return nil, last
}

func get(ctx context.Context, client *http.Client, url string) (*Redfish, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", "application/json")
	req.Header.Set("OData-Version", "4.0")
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("the service root answers %d", resp.StatusCode)
	}
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxBody+1))
	if err != nil {
		return nil, err
	}
	if len(data) > maxBody {
		return nil, fmt.Errorf("the service root is larger than %d bytes", maxBody)
	}
	return parseRoot(data)
}

// parseRoot takes what it knows out of a service root; a field of another type
// than it should have counts as absent.
func parseRoot(data []byte) (*Redfish, error) {
	var root map[string]json.RawMessage
	if err := json.Unmarshal(data, &root); err != nil || root == nil {
		return nil, errors.New("the service root is no JSON object")
	}
	text := func(raw json.RawMessage) string {
		var s string
		if json.Unmarshal(raw, &s) != nil {
			return ""
		}
		return legible(s)
	}
	r := &Redfish{Vendor: text(root["Vendor"]), Product: text(root["Product"]), Version: text(root["RedfishVersion"]), UUID: text(root["UUID"])}
	var oem map[string]json.RawMessage
	if r.Vendor == "" && json.Unmarshal(root["Oem"], &oem) == nil && len(oem) == 1 {
		for name := range oem {
			r.Vendor = legible(name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(root)) {
		var link struct {
			ID string `json:"@odata.id"`
		}
		if json.Unmarshal(root[name], &link) == nil && link.ID != "" && len(r.Services) < maxServices {
			r.Services = append(r.Services, legible(name))
		}
	}
	if r.Version == "" && len(r.Services) == 0 {
		return nil, errors.New("what answers is no Redfish service root")
	}
	return r, nil
}

// legible keeps a BMC's words from steering a terminal or filling it.
func legible(s string) string { return printable.Excerpt(s, '·', maxText) }

// Enrol is the command that enrols the BMC, with the driver that fits what it
// showed; empty where nothing answered.
func (r *Report) Enrol() string {
	host, port, err := net.SplitHostPort(r.Address)
	if err != nil {
		return ""
	}
	address := r.Address
	if port == "443" {
		address = host
		if strings.Contains(host, ":") {
			address = "[" + host + "]"
		}
	}
	base := "better-compute metal enroll NAME --pool POOL --credentials SECRET"
	switch {
	case r.Redfish != nil && r.TLS != nil:
		return fmt.Sprintf("%s --driver redfish --address '%s' --pin %s", base, address, r.TLS.Pin)
	case r.IPMI == nil || !r.IPMI.Version2:
		return ""
	}
	line := fmt.Sprintf("%s --driver ipmi --address '%s'", base, net.JoinHostPort(host, fmt.Sprint(r.IPMI.Port)))
	if s := r.IPMI.suite(); s != 0 && s != defaultSuite {
		line += fmt.Sprintf(` --options '{"cipherSuite":%d}'`, s)
	}
	return line
}
