package httpproxy

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/net/http/httpguts"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/site/reach"
)

// maxAnswerHead bounds an answer's status line and headers.
const maxAnswerHead = 64 << 10

// Options are what a proxy works with. Book, Networks must be set.
type Options struct {
	Book Book
	// Networks are what requests may reach: the LANs'. The uplink's network and
	// what lies behind it are not the site's to offer.
	Networks func() []netip.Prefix
	// Own are the box's addresses; nil: those of its interfaces.
	Own func() ([]netip.Addr, error)
	// Resolve looks a name up; nil: the system's resolver.
	Resolve func(ctx context.Context, host string) ([]netip.Addr, error)
	// Dial opens a connection to an address; nil: a net.Dialer.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// Roots judge certificates where no pin does; nil: the system's.
	Roots *x509.CertPool
	Log   *slog.Logger
}

// Proxy is safe for concurrent use.
type Proxy struct {
	book     Book
	networks func() []netip.Prefix
	own      func() ([]netip.Addr, error)
	resolve  func(ctx context.Context, host string) ([]netip.Addr, error)
	dial     func(ctx context.Context, network, addr string) (net.Conn, error)
	roots    *x509.CertPool
	log      *slog.Logger
}

// New makes a proxy.
func New(o Options) *Proxy {
	p := &Proxy{book: o.Book, networks: o.Networks, own: o.Own, resolve: o.Resolve, dial: o.Dial, roots: o.Roots, log: o.Log}
	if p.own == nil {
		p.own = reach.Own
	}
	if p.resolve == nil {
		p.resolve = func(ctx context.Context, host string) ([]netip.Addr, error) {
			return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		}
	}
	if p.dial == nil {
		p.dial = (&net.Dialer{Timeout: 10 * time.Second}).DialContext
	}
	if p.log == nil {
		p.log = slog.New(slog.DiscardHandler)
	}
	return p
}

// Secrets resolves references of the command.
type Secrets func(ctx context.Context, refs ...string) (map[string]secret.Value, error)

// reveal puts secrets in the place of their references.
func (r *request) reveal(ctx context.Context, secrets Secrets) error {
	for name, values := range r.headers {
		for i, ref := range values {
			if !strings.HasPrefix(ref, secretScheme) {
				continue
			}
			found, err := secrets(ctx, ref)
			if err != nil {
				return err
			}
			value := string(found[ref].Reveal())
			if value == "" || !httpguts.ValidHeaderFieldValue(value) {
				return errs.New(errs.CredentialsUnavailable, "the secret of header %s is empty, or cannot stand in a header", name)
			}
			values[i] = value
			r.revealed = append(r.revealed, name)
		}
	}
	return nil
}

// Do makes the request. Once the answer's head is there it opens the line and
// sends it: four bytes of length, big-endian, a HttpProxyResult with status and
// headers, and the body. What it returns has the body's size and digest too.
func (p *Proxy) Do(ctx context.Context, in *agentv1.HttpProxyRequest, secrets Secrets, line func(ctx context.Context) (io.ReadWriteCloser, error)) (*agentv1.HttpProxyResult, error) {
	r, err := parse(in)
	if err != nil {
		return nil, err
	}
	// Before a secret is fetched.
	to, err := p.locate(ctx, r.url)
	if err != nil {
		return nil, err
	}
	if err := r.reveal(ctx, secrets); err != nil {
		return nil, err
	}
	res, err := p.follow(ctx, r, to)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	result := &agentv1.HttpProxyResult{Status: uint32(res.StatusCode), FinalUrl: withoutQuery(r.url)}
	endToEnd(res.Header)
	for _, name := range slices.Sorted(maps.Keys(res.Header)) {
		for _, value := range res.Header[name] {
			result.Headers = append(result.Headers, &agentv1.HttpHeader{Name: name, Value: toUTF8(value)})
		}
	}
	out, err := line(ctx)
	if err != nil {
		return nil, err
	}
	if err := sendHead(out, result); err != nil {
		return nil, fmt.Errorf("send the answer's head: %w", err)
	}
	sum := sha256.New()
	n, err := io.Copy(io.MultiWriter(out, sum), io.LimitReader(res.Body, r.maxBody))
	if err != nil {
		return nil, p.failed(ctx, "carry the answer's body", err)
	}
	if n == r.maxBody {
		var more [1]byte
		if extra, _ := io.ReadFull(res.Body, more[:]); extra > 0 {
			return nil, errs.New(errs.NoSpace, "the answer's body is longer than %d bytes", r.maxBody)
		}
	}
	result.BodyBytes, result.BodySha256 = uint64(n), hex.EncodeToString(sum.Sum(nil))
	return result, out.Close()
}

func sendHead(w io.Writer, head *agentv1.HttpProxyResult) error {
	data, err := proto.Marshal(head)
	if err != nil {
		return err
	}
	_, err = w.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(data))), data...))
	return err
}

// follow makes the request, and as many more as redirects ask for and the request
// allows. Each goes through every check again. r.url is the last one's.
func (p *Proxy) follow(ctx context.Context, r *request, to place) (*http.Response, error) {
	for n := 0; ; n++ {
		res, err := p.once(ctx, r, to)
		if err != nil {
			return nil, err
		}
		p.log.Info("request made", "method", r.method, "url", withoutQuery(r.url), "address", to.addr, "status", res.StatusCode)
		location := res.Header.Get("Location")
		if n >= r.redirects || location == "" || !redirects(res.StatusCode) {
			return res, nil
		}
		res.Body.Close()
		target, err := r.url.Parse(location)
		if err != nil {
			return nil, errs.New(errs.OperationNotAllowed, "the redirect's URL cannot be read")
		}
		next, err := parseURL(target.String())
		if err != nil {
			return nil, errs.New(errs.OperationNotAllowed, "the redirect: %s", errs.From(err).Message)
		}
		r.redirected(res.StatusCode, next)
		if to, err = p.locate(ctx, r.url); err != nil {
			return nil, err
		}
	}
}

func redirects(status int) bool {
	return slices.Contains([]int{301, 302, 303, 307, 308}, status)
}

// redirected is the request at its next URL. What proves who asks stays with the
// host, port and scheme that it was meant for.
func (r *request) redirected(status int, next *url.URL) {
	if next.Scheme != r.url.Scheme || !sameHost(next, r.url) {
		for _, name := range proving {
			r.headers.Del(name)
		}
		for _, name := range r.revealed {
			r.headers.Del(name)
		}
	}
	if status == 303 && r.method != http.MethodHead || status <= 302 && r.method == http.MethodPost {
		r.method, r.body = http.MethodGet, nil
		for name := range r.headers {
			if strings.HasPrefix(name, "Content-") {
				r.headers.Del(name)
			}
		}
	}
	r.url = next
}

// sameHost compares hosts with their ports.
func sameHost(a, b *url.URL) bool {
	port := func(u *url.URL) string {
		switch {
		case u.Port() != "":
			return u.Port()
		case u.Scheme == "https":
			return "443"
		}
		return "80"
	}
	return a.Hostname() == b.Hostname() && port(a) == port(b)
}

// once sends one request to one address on a connection of its own.
func (p *Proxy) once(ctx context.Context, r *request, to place) (*http.Response, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: to.host, RootCAs: p.roots}
	if r.pin != nil {
		// The pin judges in the authorities' place.
		config.InsecureSkipVerify = true
		config.VerifyConnection = func(s tls.ConnectionState) error {
			sum := sha256.Sum256(s.PeerCertificates[0].RawSubjectPublicKeyInfo)
			if subtle.ConstantTimeCompare(sum[:], r.pin) != 1 {
				return errs.New(errs.PinMismatch, "%s shows another key than the pinned one", to.host)
			}
			return nil
		}
	}
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return p.dial(ctx, "tcp", to.addr.String())
		},
		TLSClientConfig: config, DisableKeepAlives: true, DisableCompression: true,
		MaxResponseHeaderBytes: maxAnswerHead, TLSHandshakeTimeout: 10 * time.Second,
	}
	req, err := http.NewRequestWithContext(ctx, r.method, r.url.String(), bytes.NewReader(r.body))
	if err != nil {
		return nil, errs.New(errs.InvalidArgs, "the request: %v", err)
	}
	if len(r.body) == 0 {
		req.Body, req.ContentLength = http.NoBody, 0
	}
	req.Header = r.headers.Clone()
	if req.Header.Get("User-Agent") == "" {
		req.Header.Set("User-Agent", "better-compute")
	}
	res, err := transport.RoundTrip(req)
	if err != nil {
		return nil, p.failed(ctx, "request "+to.host, err)
	}
	return res, nil
}

// failed gives an error of the network its code.
func (p *Proxy) failed(ctx context.Context, what string, err error) error {
	var own *errs.Error
	switch {
	case errors.As(err, &own):
		return own
	case ctx.Err() != nil:
		return fmt.Errorf("%s: %w", what, context.Cause(ctx))
	}
	var inner *url.Error
	if errors.As(err, &inner) {
		err = inner.Err
	}
	return errs.New(errs.Unreachable, "%s: %v", what, err)
}

// withoutQuery is a URL as it may be written down.
func withoutQuery(u *url.URL) string {
	return (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String()
}

// toUTF8 makes a header's bytes fit for a message: what is no UTF-8 is taken for Latin-1.
func toUTF8(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	out := make([]rune, len(s))
	for i := range len(s) {
		out[i] = rune(s[i])
	}
	return string(out)
}
