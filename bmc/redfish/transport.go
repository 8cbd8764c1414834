package redfish

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"path"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

const (
	dialTimeout      = 10 * time.Second
	handshakeTimeout = 15 * time.Second // small BMCs are slow at it
	maxBody          = 4 << 20
	maxHeader        = 64 << 10
)

var (
	errPin      = errors.New("the BMC's key is not the pinned one")
	errUnpinned = errors.New("the BMC's certificate is not valid under the known authorities, and no pin is enrolled")
)

// newClient makes an HTTP client that reaches nothing but the target, whatever
// a URL in an answer says.
func newClient(t Target) (*http.Client, error) {
	config, err := tlsConfig(t)
	if err != nil {
		return nil, err
	}
	dialer := &net.Dialer{Timeout: dialTimeout}
	transport := &http.Transport{
		Proxy: nil, // none from the environment either
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, network, t.Address)
		},
		TLSClientConfig:        config,
		TLSHandshakeTimeout:    handshakeTimeout,
		MaxResponseHeaderBytes: maxHeader,
		MaxIdleConns:           1,
		MaxConnsPerHost:        1,
		IdleConnTimeout:        30 * time.Second,
	}
	return &http.Client{
		Transport:     guard{address: t.Address, next: transport},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}, nil
}

func tlsConfig(t Target) (*tls.Config, error) {
	host, _, err := net.SplitHostPort(t.Address)
	if err != nil {
		return nil, errs.New(errs.InvalidAddress, "address %q: want host:port", t.Address)
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: host, RootCAs: t.Roots}
	if t.Pin == "" {
		return config, nil
	}
	pin, err := hex.DecodeString(t.Pin)
	if err != nil || len(pin) != sha256.Size {
		return nil, errs.New(errs.InvalidConfig, "the key pin is not a hex SHA-256")
	}
	// The pin is the verification: it names the very key, which says more than
	// a name and an authority do, and BMC certificates have neither.
	config.InsecureSkipVerify = true
	config.VerifyConnection = func(state tls.ConnectionState) error {
		if len(state.PeerCertificates) == 0 {
			return errPin
		}
		got := sha256.Sum256(state.PeerCertificates[0].RawSubjectPublicKeyInfo)
		if subtle.ConstantTimeCompare(got[:], pin) != 1 {
			return fmt.Errorf("%w: it has %x", errPin, got)
		}
		return nil
	}
	return config, nil
}

// guard refuses requests that leave the target or /redfish/.
type guard struct {
	address string
	next    http.RoundTripper
}

func (g guard) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Scheme != "https" || r.URL.Host != g.address || r.URL.User != nil || !strings.HasPrefix(r.URL.Path, "/redfish/") {
		return nil, errs.New(errs.BmcError, "refused to send a request outside of the BMC's Redfish service")
	}
	return g.next.RoundTrip(r)
}

func (g guard) CloseIdleConnections() {
	if c, ok := g.next.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}

// resource is the path that an answer's @odata.id or action target names, as
// long as it is a plain one under /redfish/.
func resource(id string) (string, error) {
	u, err := url.Parse(id)
	if err != nil || u.Scheme != "" || u.Host != "" || u.User != nil || u.Opaque != "" || u.RawQuery != "" ||
		!strings.HasPrefix(u.Path, "/redfish/") || strings.ContainsAny(u.Path, "\\%") || path.Clean(u.Path) != strings.TrimSuffix(u.Path, "/") {
		return "", errs.New(errs.BmcError, "the BMC names a resource outside of its Redfish service: %s", printable(id))
	}
	return u.Path, nil
}

// answer is a response that was read whole.
type answer struct {
	status int
	header http.Header
	body   []byte
}

// send makes one request and reads a bounded answer.
func (p *provider) send(ctx context.Context, method, path string, body []byte, header http.Header) (*answer, error) {
	req, err := http.NewRequestWithContext(ctx, method, (&url.URL{Scheme: "https", Host: p.target.Address, Path: path}).String(), bytes.NewReader(body))
	if err != nil {
		return nil, errs.New(errs.BmcError, "make a request: %v", err)
	}
	req.Header.Set("Accept", "application/json")
	req.Header.Set("OData-Version", "4.0")
	if len(body) > 0 {
		req.Header.Set("Content-Type", "application/json")
	}
	for key, values := range header {
		req.Header[key] = values
	}
	p.authorise(req)
	resp, err := p.client.Do(req)
	if err != nil {
		return nil, transportError(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxBody+1))
	if err != nil {
		return nil, transportError(err)
	}
	if len(data) > maxBody {
		return nil, errs.New(errs.BmcError, "the BMC's answer is larger than %d bytes", maxBody)
	}
	return &answer{status: resp.StatusCode, header: resp.Header, body: data}, nil
}

// transportError gives what the network or TLS said a code.
func transportError(err error) error {
	var own *errs.Error
	var unverified *tls.CertificateVerificationError
	switch {
	case errors.As(err, &own):
		return own
	case errors.Is(err, errPin):
		return errs.New(errs.PinMismatch, "%v", cause(err))
	case errors.As(err, &unverified):
		return errs.New(errs.PinMismatch, "%v: %v", errUnpinned, cause(err))
	}
	return errs.Retry(errs.Unreachable, "the BMC cannot be reached: %v", cause(err))
}

// cause leaves the URL out, which an *url.Error repeats.
func cause(err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		return u.Err
	}
	return err
}
