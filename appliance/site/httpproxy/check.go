// Package httpproxy makes single HTTP requests to hosts of a site's LANs, never to
// its BMCs, the box itself, or anything beyond.
package httpproxy

import (
	"context"
	"encoding/hex"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"net/textproto"
	"net/url"
	"slices"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/site/reach"
	"github.com/better-compute/site-appliance/bmc/addressbook"
)

const (
	maxURL      = 8 << 10
	maxHeaders  = 64
	maxHeadSize = 32 << 10
	// maxRedirects is the most that a request may ask for.
	maxRedirects = 5
	// defaultBody is the most of an answer's body where the request says nothing,
	// maxBody what it may say.
	defaultBody = 64 << 20
	maxBody     = 1 << 30
)

// methods are the ones that are served.
var methods = []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete}

// hopByHop headers speak of one connection (RFC 9110, 7.6.1), and of proxies on it.
var hopByHop = []string{
	"Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

// ours are what the connection says by itself.
var ours = []string{"Host", "Content-Length", "Expect", "Accept-Encoding"}

// proving are the headers that say who asks. A command is written down on its way,
// so that they hold references to secrets, never secrets.
var proving = []string{"Authorization", "Cookie", "X-Api-Key", "X-Auth-Token"}

const secretScheme = "secret://"

// Check judges a request without a look at the network. Code: invalid-args.
func Check(req *agentv1.HttpProxyRequest) error {
	_, err := parse(req)
	return err
}

// request is a checked HttpProxyRequest.
type request struct {
	method    string
	url       *url.URL
	headers   http.Header
	body      []byte
	redirects int
	maxBody   int64
	pin       []byte
	revealed  []string // headers that a secret went into
}

func parse(req *agentv1.HttpProxyRequest) (*request, error) {
	bad := func(format string, args ...any) (*request, error) {
		return nil, errs.New(errs.InvalidArgs, format, args...)
	}
	r := &request{method: req.GetMethod(), body: req.GetBody(), redirects: int(req.GetRedirects()), maxBody: defaultBody}
	switch {
	case !slices.Contains(methods, r.method):
		return bad("method %.20q: want %s", r.method, strings.Join(methods, ", "))
	case req.GetRedirects() > maxRedirects:
		return bad("redirects %d: want at most %d", req.GetRedirects(), maxRedirects)
	case req.GetMaxBodyBytes() > maxBody:
		return bad("max_body_bytes %d: want at most %d", req.GetMaxBodyBytes(), maxBody)
	case len(r.body) > 0 && (r.method == http.MethodGet || r.method == http.MethodHead):
		return bad("%s has no body", r.method)
	}
	if n := req.GetMaxBodyBytes(); n > 0 {
		r.maxBody = int64(n)
	}
	if pin := req.GetTlsSpkiSha256(); pin != "" {
		var err error
		if r.pin, err = hex.DecodeString(pin); err != nil || len(r.pin) != 32 {
			return bad("tls_spki_sha256 is not a hex SHA-256")
		}
	}
	var err error
	if r.url, err = parseURL(req.GetUrl()); err != nil {
		return nil, err
	}
	if r.headers, err = headers(req.GetHeaders()); err != nil {
		return nil, err
	}
	return r, nil
}

// parseURL takes an absolute http or https URL without a user. Its host is judged later.
func parseURL(text string) (*url.URL, error) {
	if len(text) > maxURL {
		return nil, errs.New(errs.InvalidArgs, "the URL has %d bytes, more than %d", len(text), maxURL)
	}
	u, err := url.Parse(text)
	switch {
	case err != nil:
		var inner *url.Error
		if errors.As(err, &inner) {
			err = inner.Err // without the URL, which may hold a secret
		}
		return nil, errs.New(errs.InvalidArgs, "the URL cannot be read: %v", err)
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, errs.New(errs.InvalidArgs, "scheme %.20q: want http or https", u.Scheme)
	case u.Opaque != "" || u.Host == "":
		return nil, errs.New(errs.InvalidArgs, "the URL names no host")
	case u.User != nil:
		return nil, errs.New(errs.InvalidArgs, "the URL holds a user: send a header instead")
	}
	u.Fragment, u.RawFragment = "", ""
	return u, nil
}

// headers are a request's own, without what is the connection's.
func headers(list []*agentv1.HttpHeader) (http.Header, error) {
	out, size := http.Header{}, 0
	if len(list) > maxHeaders {
		return nil, errs.New(errs.InvalidArgs, "%d headers: want at most %d", len(list), maxHeaders)
	}
	for _, h := range list {
		size += len(h.GetName()) + len(h.GetValue())
		if !httpguts.ValidHeaderFieldName(h.GetName()) || !httpguts.ValidHeaderFieldValue(h.GetValue()) || size > maxHeadSize {
			return nil, errs.New(errs.InvalidArgs, "header %.40q is malformed, or all are over %d bytes", h.GetName(), maxHeadSize)
		}
		if slices.Contains(proving, http.CanonicalHeaderKey(h.GetName())) && !strings.HasPrefix(h.GetValue(), secretScheme) {
			return nil, errs.New(errs.InvalidArgs, "header %s: want a reference to a secret, %s<tenant>/<name>", h.GetName(), secretScheme)
		}
		out.Add(h.GetName(), h.GetValue())
	}
	endToEnd(out)
	for _, name := range ours {
		out.Del(name)
	}
	return out, nil
}

// endToEnd takes out what speaks of one connection.
func endToEnd(h http.Header) {
	for _, list := range h["Connection"] {
		for name := range strings.SplitSeq(list, ",") {
			h.Del(textproto.TrimString(name))
		}
	}
	for _, name := range hopByHop {
		h.Del(name)
	}
}

// Book is the BMC address book.
type Book interface {
	// Has reports whether a known BMC has the address; without a port any counts.
	Has(addr string) bool
	// Addresses are those of all known BMCs, as host:port.
	Addresses() []string
}

// place is where one request goes.
type place struct {
	host string // as the URL names it, for TLS and the Host header
	addr netip.AddrPort
}

// locate finds the one address that a URL's request goes to: the host is looked
// up once, and nobody asks again. Code operation-not-allowed for what is forbidden.
func (p *Proxy) locate(ctx context.Context, u *url.URL) (place, error) {
	plain, err := addressbook.Normalise(u.Scheme+"://"+u.Host, "")
	if err != nil {
		return place{}, errs.New(errs.InvalidArgs, "the URL's host: %v", errs.From(err).Message)
	}
	host, port, err := net.SplitHostPort(plain)
	if err != nil {
		return place{}, errs.New(errs.InvalidArgs, "the URL's host: %v", err)
	}
	// Another port of a BMC's host is the BMC too.
	if p.book.Has(host) {
		return place{}, forbidden(host, "is a BMC")
	}
	// Normalise makes one of a mapped address and a plain one.
	if given, err := netip.ParseAddr(strings.Trim(u.Hostname(), "[]")); err == nil && given.Is4In6() {
		return place{}, forbidden(given.String(), "is an IPv4 address in IPv6's form")
	}
	addrs, err := p.lookup(ctx, host)
	if err != nil {
		return place{}, err
	}
	own, err := p.own()
	if err != nil {
		return place{}, errs.New(errs.Internal, "the box's own addresses: %v", err)
	}
	bmcs, err := p.bmcAddrs(ctx)
	if err != nil {
		return place{}, err
	}
	isBMC := func(a netip.Addr) bool { return bmcs[a] }
	networks := p.networks()
	var chosen netip.Addr
	for _, a := range addrs {
		if why := reach.Refuse(a, own, isBMC); why != "" {
			return place{}, forbidden(host, why)
		}
		if !chosen.IsValid() && slices.ContainsFunc(networks, func(n netip.Prefix) bool { return n.Contains(a) }) {
			chosen = a
		}
	}
	if !chosen.IsValid() {
		return place{}, forbidden(host, "lies in no network of the site's LANs")
	}
	to, err := netip.ParseAddrPort(net.JoinHostPort(chosen.String(), port))
	if err != nil {
		return place{}, errs.New(errs.InvalidArgs, "the URL's host: %v", err)
	}
	return place{host: host, addr: to}, nil
}

func forbidden(host, why string) error {
	return errs.New(errs.OperationNotAllowed, "%s %s: no request goes there", host, why)
}

// lookup is all addresses of a host.
func (p *Proxy) lookup(ctx context.Context, host string) ([]netip.Addr, error) {
	if a, err := netip.ParseAddr(host); err == nil {
		return []netip.Addr{a}, nil
	}
	addrs, err := p.resolve(ctx, host)
	if err != nil {
		return nil, errs.Retry(errs.Unreachable, "look %s up: %v", host, err)
	}
	// The system answers IPv4 addresses in either form.
	for i, a := range addrs {
		addrs[i] = a.Unmap()
	}
	return addrs, nil
}

// maxNames bounds the BMCs that are known by a name alone.
const maxNames = 256

// bmcAddrs are the addresses of all known BMCs, those of names as they are now. A
// name that nothing answers is nowhere; one that cannot be looked up could be anywhere.
func (p *Proxy) bmcAddrs(ctx context.Context) (map[netip.Addr]bool, error) {
	found, names := map[netip.Addr]bool{}, []string{}
	for _, address := range p.book.Addresses() {
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			continue // not an address of the network
		}
		if a, err := netip.ParseAddr(host); err == nil {
			found[a.Unmap()] = true
		} else if !slices.Contains(names, host) {
			names = append(names, host)
		}
	}
	if len(names) > maxNames {
		return nil, errs.New(errs.OperationNotAllowed, "%d BMCs are known by a name alone: whether the host is one cannot be told", len(names))
	}
	for _, name := range names {
		addrs, err := p.resolve(ctx, name)
		var dns *net.DNSError
		if errors.As(err, &dns) && dns.IsNotFound {
			continue
		}
		if err != nil {
			return nil, errs.Retry(errs.Unreachable, "whether the host is a BMC cannot be told: look %s up: %v", name, err)
		}
		for _, a := range addrs {
			found[a.Unmap()] = true
		}
	}
	return found, nil
}
