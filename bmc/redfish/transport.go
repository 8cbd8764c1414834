package redfish

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"path"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

const (
	dialTimeout      = 10 * time.Second
	handshakeTimeout = 15 * time.Second // small BMCs are slow at it
	// idleConnection is short: a thousand BMCs' connections cost more memory than
	// an occasional handshake costs time.
	idleConnection = 10 * time.Second
	maxBody        = 4 << 20
	maxHeader      = 64 << 10
)

// newClient makes an HTTP client that reaches nothing but the target, whatever
// a URL in an answer says. It sets no time-out on an answer: some come after a
// minute, and the operation's deadline decides.
func newClient(t target, legacy bool) (*http.Client, error) {
	config, err := tlsConfig(t, legacy)
	if err != nil {
		return nil, err
	}
	dialer := &net.Dialer{Timeout: dialTimeout}
	transport := &http.Transport{
		Proxy: nil, // none from the environment either
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, network, t.address)
		},
		TLSClientConfig:        config,
		TLSHandshakeTimeout:    handshakeTimeout,
		MaxResponseHeaderBytes: maxHeader,
		MaxIdleConns:           1,
		MaxConnsPerHost:        2, // an upload does not stop a look at its task
		IdleConnTimeout:        idleConnection,
	}
	return &http.Client{
		Transport:     guard{address: t.address, next: transport},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}, nil
}

// guard refuses requests that leave the target or /redfish/, the places for firmware
// images and for the console excepted.
type guard struct {
	address string
	next    http.RoundTripper
}

func (g guard) RoundTrip(r *http.Request) (*http.Response, error) {
	within := strings.HasPrefix(r.URL.Path, "/redfish/") || r.Method == http.MethodPost && r.Context().Value(pushed{}) == r.URL.Path ||
		r.Method == http.MethodGet && r.Context().Value(upgraded{}) == r.URL.Path
	if r.URL.Scheme != "https" || r.URL.Host != g.address || r.URL.User != nil || !within {
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
// long as it is a plain one under /redfish/. It may have a # that was escaped, as
// iDRACs name their own ports.
func resource(id string) (string, error) {
	u, err := url.Parse(id)
	if err != nil || u.Scheme != "" || u.Host != "" || u.User != nil || u.Opaque != "" || u.RawQuery != "" ||
		!strings.HasPrefix(u.Path, "/redfish/") || strings.ContainsAny(u.Path, "\\%?") || path.Clean(u.Path) != strings.TrimSuffix(u.Path, "/") {
		return "", errs.New(errs.BmcError, "the BMC names a resource outside of its Redfish service: %s", legible(id))
	}
	return u.Path, nil
}

// resource is the package's, and takes a whole URL of this very BMC for its path.
func (c *conn) resource(id string) (string, error) {
	if u, err := url.Parse(id); err == nil && strings.EqualFold(u.Scheme, "https") && u.User == nil {
		host := u.Host
		if u.Port() == "" {
			host = net.JoinHostPort(u.Hostname(), "443")
		}
		if strings.EqualFold(host, c.target.address) {
			id = strings.TrimPrefix(id[len(u.Scheme)+len("://"):], u.Host)
		}
	}
	return resource(id)
}

// page is the next page of a collection, whose link may have a query.
func (c *conn) page(id string) (path, query string, err error) {
	id, query, _ = strings.Cut(id, "?")
	if strings.ContainsFunc(query, func(r rune) bool { return r <= ' ' || r > '~' || r == '#' }) {
		return "", "", errs.New(errs.BmcError, "the BMC names a page that is no address: %s", legible(query))
	}
	path, err = c.resource(id)
	return path, query, err
}

// linkOr is the path that o's reference key names, or the standard's own.
func (c *conn) linkOr(o object, key, standard string) (string, error) {
	id := o.object(key).text("@odata.id")
	if id == "" {
		return standard, nil
	}
	return c.resource(id)
}

// request is one request to a BMC.
type request struct {
	method, path, query string
	header              http.Header
	body                []byte
	stream              io.Reader // instead of body, once
	length              int64     // of stream; -1: not known
	auth                *auth     // nil: none
	harmless            bool      // a change that can be lost without a loss
}

// answer is a response that was read whole.
type answer struct {
	status int
	header http.Header
	body   []byte
}

// object is the answer's body; empty where it is no object.
func (a *answer) object() object {
	o, err := parseObject(a.body)
	if err != nil {
		return nil
	}
	return o
}

// do sends one request and reads a bounded answer.
func (c *conn) do(ctx context.Context, r request) (*answer, error) {
	// The trace says whether any of it may have reached the BMC.
	var sent atomic.Bool
	traced := httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteHeaders: func() { sent.Store(true) }})
	body := r.stream
	if body == nil {
		body = bytes.NewReader(r.body)
	}
	address := url.URL{Scheme: "https", Host: c.target.address, Path: r.path, RawQuery: r.query}
	req, err := http.NewRequestWithContext(traced, r.method, address.String(), body)
	if err != nil {
		return nil, errs.New(errs.BmcError, "make a request: %v", err)
	}
	if r.stream != nil {
		req.ContentLength = r.length
	}
	req.Header.Set("Accept", "application/json")
	req.Header.Set("OData-Version", "4.0")
	if len(r.body) > 0 {
		req.Header.Set("Content-Type", "application/json")
	}
	for key, values := range r.header {
		req.Header[key] = values
	}
	switch {
	case r.auth == nil:
	case r.auth.token != "":
		req.Header.Set("X-Auth-Token", r.auth.token)
	default:
		req.SetBasicAuth(c.target.username, c.revealed())
	}
	resp, err := c.client.Do(req)
	if err != nil {
		return nil, c.failure(ctx, r, err, sent.Load())
	}
	defer resp.Body.Close()
	if resp.ContentLength > maxBody {
		return nil, errs.New(errs.BmcError, "the BMC's answer has %d bytes, more than %d", resp.ContentLength, maxBody)
	}
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxBody+1))
	if err != nil && (r.method == http.MethodGet || ctx.Err() != nil) {
		return nil, c.failure(ctx, r, err, true)
	}
	// A change's status says what became of it, its cut body no more than that.
	if len(data) > maxBody {
		return nil, errs.New(errs.BmcError, "the BMC's answer is larger than %d bytes", maxBody)
	}
	return &answer{status: resp.StatusCode, header: resp.Header, body: data}, nil
}

// spelt is do, and where the BMC does not know the path tries it with the slash
// at its end that is missing, or without the one that is too much: some have the
// one form only, and say so by 404 or by a redirect to the other.
func (c *conn) spelt(ctx context.Context, r request) (*answer, error) {
	asked := r.path
	c.mu.Lock()
	if form := c.spelling[asked]; form != "" {
		r.path = form
	}
	c.mu.Unlock()
	a, err := c.do(ctx, r)
	if err != nil || !c.misspelt(r.path, a) || r.stream != nil {
		return a, err
	}
	r.path = toggled(r.path)
	second, err := c.do(ctx, r)
	// Where nothing is, either form may lead to the other.
	if err != nil || second.status == a.status || c.misspelt(r.path, second) {
		return a, err
	}
	c.mu.Lock()
	if c.spelling == nil || len(c.spelling) >= 64 {
		c.spelling = map[string]string{}
	}
	c.spelling[asked] = r.path
	c.mu.Unlock()
	return second, nil
}

func toggled(path string) string {
	if strings.HasSuffix(path, "/") {
		return strings.TrimSuffix(path, "/")
	}
	return path + "/"
}

// misspelt reports whether a says that path's other form may be the right one.
// Each of these answers says that nothing was done.
func (c *conn) misspelt(path string, a *answer) bool {
	other := toggled(path)
	if !strings.HasPrefix(other, "/redfish/") {
		return false
	}
	switch a.status {
	case http.StatusNotFound:
		return true
	case http.StatusMovedPermanently, http.StatusFound, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
		to, err := c.resource(a.header.Get("Location"))
		return err == nil && to == other
	}
	return false
}

// maxBusy is how often a busy BMC is asked again.
const maxBusy = 5

// patiently is spelt for what does no harm twice: a BMC that says that it has
// too much to do is asked again when it says, within ctx.
func (c *conn) patiently(ctx context.Context, r request) (*answer, error) {
	pause := c.timing.retry
	for try := 0; ; try++ {
		a, err := c.spelt(ctx, r)
		if err != nil || try == maxBusy || a.status != http.StatusTooManyRequests && a.status != http.StatusServiceUnavailable || says(a, sessionLimit) {
			return a, err
		}
		wait := retryAfter(a.header.Get("Retry-After"), pause)
		if !fits(ctx, wait) || !sleep(ctx, wait) {
			return a, nil
		}
		pause *= 2
	}
}

// maxRetryAfter is the longest pause that a BMC can ask for.
const maxRetryAfter = 2 * time.Minute

// retryAfter reads a Retry-After in seconds, the form that BMCs send.
func retryAfter(header string, otherwise time.Duration) time.Duration {
	seconds, err := strconv.ParseUint(strings.TrimSpace(header), 10, 16)
	if err != nil {
		return otherwise
	}
	return min(time.Duration(seconds)*time.Second, maxRetryAfter)
}

// fits reports whether something is left of ctx after wait.
func fits(ctx context.Context, wait time.Duration) bool {
	deadline, ok := ctx.Deadline()
	return !ok || time.Until(deadline) > wait
}

func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// failure gives what the network or TLS said a code. What may have reached the
// BMC and is no harmless read is not known to be undone.
func (c *conn) failure(ctx context.Context, r request, err error, sent bool) error {
	var own *errs.Error
	if errors.As(err, &own) {
		return own
	}
	if refused := c.refused(ctx, err, sent); refused != nil {
		return refused
	}
	harmless := r.harmless || r.method == http.MethodGet || r.method == http.MethodHead
	switch {
	case !sent || harmless:
		return errs.Retry(errs.Unreachable, "the BMC cannot be reached: %s", cause(err))
	case ctx.Err() != nil:
		return errs.New(errs.Timeout, "the BMC did not answer %s %s in time: whether it was done is not known", r.method, r.path)
	}
	return errs.New(errs.Interrupted, "the connection broke after %s %s was sent: whether it was done is not known: %s", r.method, r.path, cause(err))
}

// cause leaves the URL out, which an *url.Error repeats. What a server sends ends
// up in these texts, too.
func cause(err error) string {
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err
	}
	return legible(err.Error())
}
