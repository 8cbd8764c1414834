package bmclib

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/cookiejar"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

const (
	// maxBody bounds one answer: providers read them whole.
	maxBody = 16 << 20
	// maxWrite bounds a changing request and its answer.
	maxWrite = 1 << 20
	// dialTimeout bounds connecting and the handshake.
	dialTimeout = 20 * time.Second
)

// purpose is what a request is for.
type purpose int

const (
	asRead purpose = iota
	asSession
	asWrite
)

// guard is the way of one call's requests to one BMC. It verifies the BMC,
// goes nowhere else, ends with the call, and lets through one changing request
// at most: a provider that tries something else after a failure, or says
// success of one, is stopped.
type guard struct {
	config  config
	roots   *x509.CertPool
	purpose func(r *http.Request, body []byte) purpose
	wanted  func(r *http.Request, body []byte) error // judges the changing request before it goes
	judge   func(answer []byte) error                // judges its answer; nil: the status says it all
	base    *http.Transport
	stop    context.CancelCauseFunc // ends the call

	mu     sync.Mutex
	ctx    context.Context
	writes int  // changing requests that may still go
	tried  bool // a changing request may have been taken
	fault  *errs.Error
	write  error // why the changing request failed
}

// newGuard lets wanted through, once; with nil nothing that changes the BMC.
func newGuard(ctx context.Context, stop context.CancelCauseFunc, c config, roots *x509.CertPool, v vendor, wanted func(r *http.Request, body []byte) error) *guard {
	g := &guard{config: c, roots: roots, purpose: v.purpose, wanted: wanted, judge: v.judge, stop: stop, ctx: ctx}
	if wanted != nil {
		g.writes = 1
	}
	g.base = &http.Transport{
		DialTLSContext: g.dial,
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			return nil, errs.New(errs.BmcError, "the BMC led to an address without TLS")
		},
		DisableKeepAlives: false, MaxIdleConnsPerHost: 2, MaxResponseHeaderBytes: 256 << 10, ResponseHeaderTimeout: 2 * time.Minute,
	}
	return g
}

// close drops the connections.
func (g *guard) close() { g.base.CloseIdleConnections() }

// client is an http.Client for a provider. It follows no redirect, which could
// take a token elsewhere.
func (g *guard) client() *http.Client {
	jar, _ := cookiejar.New(nil) // it never fails
	c := &http.Client{Jar: jar}
	g.take(c)
	return c
}

// take makes an http.Client that a provider built for itself the guard's.
func (g *guard) take(c *http.Client) {
	c.Transport = g
	c.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
}

// rebase gives what follows another context: a session is closed after the
// call's own time is over, too.
func (g *guard) rebase(ctx context.Context) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.ctx = ctx
}

// failure is why the call failed whatever the provider says, or nil.
func (g *guard) failure() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.fault != nil:
		return g.fault
	case g.write != nil:
		return g.write
	}
	return nil
}

// written reports whether a changing request was made and taken.
func (g *guard) written() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.tried && g.write == nil
}

// blame keeps the first fault.
func (g *guard) blame(e *errs.Error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.fault == nil {
		g.fault = e
	}
	return e
}

// refuse blames and ends the call: what a provider would do next is not wanted.
func (g *guard) refuse(format string, args ...any) error {
	e := errs.New(errs.BmcError, format, args...)
	err := g.blame(e)
	g.stop(e)
	return err
}

// dial connects to the one BMC and verifies it.
func (g *guard) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	raw, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err != nil {
		return nil, g.unreachable(err)
	}
	conn := tls.Client(raw, g.tlsConfig())
	if err := conn.HandshakeContext(ctx); err != nil {
		raw.Close()
		var own *errs.Error
		var unverified *tls.CertificateVerificationError
		switch {
		case errors.As(err, &own):
			return nil, g.blame(own)
		case errors.As(err, &unverified):
			return nil, g.blame(errs.New(errs.PinMismatch, "the BMC has no key pin, and its certificate is not trusted: %v", unverified.Err))
		}
		return nil, g.unreachable(err)
	}
	return conn, nil
}

func (g *guard) unreachable(err error) error {
	return g.blame(errs.Retry(errs.Unreachable, "the BMC cannot be reached: %v", err))
}

// tlsConfig verifies the pin, or, where there is none, the certificate.
func (g *guard) tlsConfig() *tls.Config {
	c := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: g.config.host, RootCAs: g.roots}
	if g.config.pin == "" {
		return c
	}
	c.InsecureSkipVerify = true // the key is verified instead
	c.VerifyConnection = func(state tls.ConnectionState) error {
		sum := sha256.Sum256(state.PeerCertificates[0].RawSubjectPublicKeyInfo)
		if got := hex.EncodeToString(sum[:]); got != g.config.pin {
			return errs.New(errs.PinMismatch, "the BMC shows another key than the one that is pinned: %s", got)
		}
		return nil
	}
	return c
}

// RoundTrip sends one request, if the call may make it.
func (g *guard) RoundTrip(r *http.Request) (*http.Response, error) {
	at := r.URL.Host
	if r.URL.Port() == "" {
		at = net.JoinHostPort(r.URL.Hostname(), "443")
	}
	if r.URL.Scheme != "https" || !strings.EqualFold(at, g.config.hostPort()) {
		return nil, g.refuse("the BMC led to another address: %.100q", r.URL.Scheme+"://"+r.URL.Host)
	}
	var body []byte
	kind := asRead
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		if r.Body != nil {
			var err error
			if body, err = io.ReadAll(io.LimitReader(r.Body, maxWrite+1)); err != nil {
				return nil, err
			}
			r.Body.Close()
			if len(body) > maxWrite {
				return nil, g.refuse("the provider sends more than %d bytes", maxWrite)
			}
		}
		kind = g.purpose(r, body)
	}
	if kind == asWrite {
		if err := g.admit(r, body); err != nil {
			return nil, err
		}
	}
	g.mu.Lock()
	ctx := g.ctx
	g.mu.Unlock()
	// The provider's own context may end earlier; the call's ends it in any case.
	own, cancel := context.WithCancelCause(r.Context())
	stop := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	done := func() { stop(); cancel(nil) }
	r = r.Clone(own)
	if len(body) == 0 {
		r.Body, r.ContentLength = http.NoBody, 0
	} else {
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
		r.GetBody = nil // it is never sent again by itself
	}
	resp, err := g.base.RoundTrip(r)
	if err != nil {
		done()
		if kind == asWrite {
			g.failed(errs.New(errs.BmcError, "nobody knows whether the BMC did it: %v", err))
		}
		return nil, err
	}
	read := &answer{ReadCloser: resp.Body, left: maxBody, done: done}
	resp.Body = read
	if kind == asWrite {
		return g.settle(resp)
	}
	if read.isNull() {
		read.Close()
		return nil, errors.New("the BMC answers null")
	}
	return resp, nil
}

// admit lets the one changing request of the call through.
func (g *guard) admit(r *http.Request, body []byte) error {
	g.mu.Lock()
	left, why := g.writes, g.write
	g.mu.Unlock()
	switch {
	case left == 0 && why != nil:
		g.stop(why) // it failed, and the provider would try something else
		return why
	case left == 0:
		return g.refuse("the provider would change more than was asked for: %s %.100s", r.Method, r.URL.Path)
	}
	if err := g.wanted(r, body); err != nil {
		return g.refuse("%v", err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.writes--
	g.tried = true
	return nil
}

// settle judges the answer to the changing request.
func (g *guard) settle(resp *http.Response) (*http.Response, error) {
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxWrite))
	resp.Body.Close()
	resp.Body = io.NopCloser(bytes.NewReader(data))
	switch {
	case resp.StatusCode == http.StatusUnauthorized:
		// Not taken: the one that follows, with a new challenge answered, is the first.
		g.mu.Lock()
		g.writes++
		g.mu.Unlock()
		g.failed(errs.New(errs.BmcError, "the BMC answers %s", resp.Status))
	case resp.StatusCode >= 300:
		g.failed(errs.New(errs.BmcError, "the BMC answers %s", resp.Status))
	case err != nil:
		g.failed(errs.New(errs.BmcError, "nobody knows whether the BMC did it: %v", err))
	case g.judge != nil:
		g.failed(g.judge(data))
	default:
		g.failed(nil)
	}
	return resp, nil
}

func (g *guard) failed(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.write = err
}

// answer is a body with an end.
type answer struct {
	io.ReadCloser
	left int
	done func()
	head []byte // what was looked at before
}

// isNull looks for JSON's null. In gofish it makes a nil pointer, which is used,
// in a goroutine where no caller can recover from the panic.
func (a *answer) isNull() bool {
	var head [64]byte
	n := 0
	for n < len(head) {
		more, err := a.Read(head[n:])
		n += more
		if text := bytes.TrimLeft(head[:n], " \t\r\n"); err != nil || len(text) >= 4 {
			break
		} else if len(text) == 0 {
			n = 0 // white space means nothing to JSON, nor to a page
		}
	}
	a.head = bytes.Clone(head[:n])
	return bytes.HasPrefix(bytes.TrimLeft(a.head, " \t\r\n"), []byte("null"))
}

func (a *answer) Read(p []byte) (int, error) {
	if len(a.head) > 0 {
		n := copy(p, a.head)
		a.head = a.head[n:]
		return n, nil
	}
	if a.left == 0 {
		return 0, fmt.Errorf("the answer is longer than %d bytes", maxBody)
	}
	n, err := a.ReadCloser.Read(p[:min(len(p), a.left)])
	a.left -= n
	return n, err
}

func (a *answer) Close() error {
	defer a.done()
	return a.ReadCloser.Close()
}
