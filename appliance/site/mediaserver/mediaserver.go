// Package mediaserver hands discs and firmware to BMCs: over https under a CA of
// the site's own, on its LANs alone, each at a path that is a secret, that holds
// for one BMC, and that ends.
package mediaserver

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// Port is where BMCs fetch from.
const Port = 7444

// Artifact is what a reference names.
type Artifact struct {
	SHA256 string
	// Packed says that the stored bytes are compressed, which no BMC undoes.
	Packed bool
}

// Options are what the site serves from. All functions must be safe for
// concurrent use.
type Options struct {
	Authority *Authority
	// LANs are the box's own addresses with their prefix lengths.
	LANs []netip.Prefix
	// Port stands in URLs; 0: the package's.
	Port uint16
	// File keeps what is offered over a restart; empty: nothing does.
	File string
	// Locate finds an artifact by name or SHA-256, Open opens it by SHA-256.
	Locate func(ctx context.Context, ref string) (Artifact, error)
	Open   func(ctx context.Context, sha256 string) (io.ReadSeekCloser, int64, error)
	// Lookup resolves a BMC's host name; nil: the box's resolver.
	Lookup func(ctx context.Context, host string) ([]netip.Addr, error)
	// Now is the wall clock, by which offers end that outlived a restart; nil: time.Now.
	Now func() time.Time
	Log *slog.Logger
}

// Server offers artifacts, and serves them on the listeners that Serve is given.
type Server struct {
	Options
	ctx  context.Context // of all offers
	stop context.CancelFunc

	mu      sync.Mutex
	offers  map[string]*offer // by the digest of the path's secret
	serving map[netip.Addr]int
}

// New takes up what File holds.
func New(o Options) *Server {
	s := &Server{Options: o, offers: map[string]*offer{}, serving: map[netip.Addr]int{}}
	if s.Port == 0 {
		s.Options.Port = Port
	}
	if s.Now == nil {
		s.Options.Now = time.Now
	}
	if s.Lookup == nil {
		s.Options.Lookup = func(ctx context.Context, host string) ([]netip.Addr, error) {
			return net.DefaultResolver.LookupNetIP(ctx, "ip4", host)
		}
	}
	s.ctx, s.stop = context.WithCancel(context.Background())
	if err := s.load(); err != nil {
		s.Log.Error("BMCs lose the media that they have inserted", "err", err)
	}
	return s
}

// Close ends all offers for this process; the file keeps them for the next.
func (s *Server) Close() { s.stop() }

// Offer makes an https URL at which the BMC at bmcAddress (host:port), and nobody
// else, can fetch the artifact that ref (artifact://NAME-or-SHA256) names, until
// release is called or a day is over. Errors: invalid-args, invalid-address,
// no-space, unavailable and those of Locate and Open.
func (s *Server) Offer(ctx context.Context, bmcAddress, ref string) (url string, release func(), err error) {
	name, found := strings.CutPrefix(ref, metal.ArtifactScheme)
	if !found || name == "" {
		return "", nil, errs.New(errs.InvalidArgs, "%.100q is no reference: want %sNAME or %sSHA256", ref, metal.ArtifactScheme, metal.ArtifactScheme)
	}
	client, lan, err := s.place(ctx, bmcAddress)
	if err != nil {
		return "", nil, err
	}
	a, err := s.Locate(ctx, name)
	if err != nil {
		return "", nil, err
	}
	if a.Packed {
		return "", nil, errs.New(errs.InvalidArgs, "artifact %s is kept compressed, which a BMC cannot undo: import it uncompressed, with --format raw", name)
	}
	hold, _, err := s.Open(ctx, a.SHA256)
	if err != nil {
		return "", nil, err
	}
	token := rand.Text() // at least 128 bits
	now := s.Now()
	r := record{Token: digestOf(token), BMC: bmcAddress, Name: fileName(name), SHA256: a.SHA256, Client: client, LAN: lan, Begun: now.UnixMilli(), Expires: now.Add(life).UnixMilli()}
	if err := r.check(); err != nil {
		_ = hold.Close()
		return "", nil, errs.New(errs.InvalidArgs, "artifact %s: %v", name, err)
	}
	s.mu.Lock()
	oldest := s.surplus(client)
	if oldest == nil && len(s.offers) >= maxOffers {
		s.mu.Unlock()
		_ = hold.Close()
		return "", nil, errs.Retry(errs.NoSpace, "%d offers to BMCs are open: eject what is not needed", maxOffers)
	}
	if oldest != nil {
		s.Log.Warn("a BMC has many offers: its oldest ends", "bmc", bmcAddress)
		s.drop(oldest)
	}
	o := s.add(r, life, hold)
	s.keep()
	s.mu.Unlock()
	s.Log.Info("an artifact is offered to a BMC", "bmc", bmcAddress, "artifact", name, "sha256", a.SHA256)
	at := netip.AddrPortFrom(lan, s.Port)
	return fmt.Sprintf("https://%s/m/%s/%s", at, token, r.Name), func() { s.remove(o) }, nil
}

// place finds the address of a BMC and the box's own on the same LAN. There is no
// other way: nothing of the box can be reached through its uplink, and a BMC on
// the LAN has nobody in between who could change its address.
func (s *Server) place(ctx context.Context, bmcAddress string) (client, lan netip.Addr, err error) {
	host, _, err := net.SplitHostPort(bmcAddress)
	if err != nil {
		return client, lan, errs.New(errs.InvalidAddress, "address %.100q: want host:port", bmcAddress)
	}
	addrs := []netip.Addr{}
	if ip, err := netip.ParseAddr(host); err == nil {
		addrs = append(addrs, ip.Unmap())
	} else if addrs, err = s.Lookup(ctx, host); err != nil {
		return client, lan, errs.Retry(errs.Unreachable, "resolve the BMC's name: %v", err)
	}
	away := false
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range addrs {
		a = a.Unmap()
		for _, l := range s.LANs {
			if !l.Masked().Contains(a) || a == l.Addr() {
				continue
			}
			if s.serving[l.Addr()] > 0 {
				return a, l.Addr(), nil
			}
			away = true
		}
	}
	if away {
		return client, lan, errs.Retry(errs.Unavailable, "the LAN of the BMC at %s is not served now", bmcAddress)
	}
	return client, lan, errs.New(errs.InvalidArgs, "the BMC at %s is on none of the box's LANs: it cannot fetch from the box; name a URL that it can", bmcAddress)
}

// Bounds of the listeners.
const (
	headerTimeout = 30 * time.Second
	idleTimeout   = 2 * time.Minute
	writeTimeout  = time.Minute // of one piece
	maxHeader     = 16 << 10
	maxConns      = 512
	perSource     = 16
)

// Serve serves one LAN, whose own address is lan, until ctx ends. It owns ln.
func (s *Server) Serve(ctx context.Context, ln net.Listener, lan netip.Addr) error {
	leaf, err := s.Authority.leaf(lan)
	if err != nil {
		_ = ln.Close()
		return fmt.Errorf("make the certificate of %s: %w", lan, err)
	}
	server := &http.Server{
		Handler:           http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.answer(w, r, lan) }),
		TLSConfig:         &tls.Config{Certificates: []tls.Certificate{leaf}, MinVersion: tls.VersionTLS12},
		ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeader,
		// HTTP/1.1 alone: it is what BMCs speak.
		TLSNextProto: map[string]func(*http.Server, *tls.Conn, http.Handler){},
		BaseContext:  func(net.Listener) context.Context { return ctx },
		ErrorLog:     slog.NewLogLogger(s.Log.Handler(), slog.LevelDebug),
	}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	s.count(lan, 1)
	defer s.count(lan, -1)
	err = server.ServeTLS(&capped{Listener: ln, open: map[string]int{}}, "", "")
	_ = server.Close()
	if ctx.Err() != nil && errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("serve media on %s: %w", lan, err)
}

func (s *Server) count(lan netip.Addr, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.serving[lan] += n
}

// stands finds the offer of a URL's path on one LAN; nil: none.
func (s *Server) stands(path string, lan netip.Addr) *offer {
	parts := strings.Split(path, "/") // "", "m", token, name
	if len(parts) != 4 || parts[1] != "m" {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	o := s.offers[digestOf(parts[2])]
	if o == nil || o.Name != parts[3] || o.LAN != lan || o.ctx.Err() != nil {
		return nil
	}
	return o
}

// find gives the offer that a request may have; nil: none, and nobody learns why.
func (s *Server) find(r *http.Request, lan netip.Addr) *offer {
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil || r.Method != http.MethodGet && r.Method != http.MethodHead {
		return nil
	}
	o := s.stands(r.URL.Path, lan)
	if o == nil || o.Client != from.Addr().Unmap() {
		return nil
	}
	return o
}

// Own opens, for the box itself, what it serves at a URL that Offer made; no
// reader and no error: the URL is none of an offer that stands. A box cannot be
// its own client: its offers are for a BMC's address.
func (s *Server) Own(ctx context.Context, address string) (io.ReadCloser, error) {
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "https" {
		return nil, nil
	}
	at, err := netip.ParseAddrPort(u.Host)
	if err != nil || at.Port() != s.Port {
		return nil, nil
	}
	o := s.stands(u.Path, at.Addr())
	if o == nil {
		return nil, nil
	}
	content, _, err := s.Open(ctx, o.SHA256)
	if err != nil {
		return nil, err
	}
	return content, nil
}

func (s *Server) answer(w http.ResponseWriter, r *http.Request, lan netip.Addr) {
	o := s.find(r, lan)
	if o == nil {
		http.Error(w, "not found", http.StatusNotFound)
		return
	}
	// The offer's end is the transfer's.
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(o.ctx, cancel)()
	content, size, err := s.Open(ctx, o.SHA256)
	if err != nil {
		s.Log.Error("a BMC cannot have its media", "bmc", o.Client, "sha256", o.SHA256, "err", err)
		http.Error(w, "try again later", http.StatusServiceUnavailable)
		return
	}
	defer content.Close()
	s.pin(o)
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("ETag", `"`+o.SHA256+`"`)
	w.Header().Set("Cache-Control", "no-store")
	s.Log.Debug("media is read", "bmc", o.Client, "range", r.Header.Get("Range"), "bytes", size)
	http.ServeContent(&paced{w, http.NewResponseController(w)}, r, "", time.Time{}, &until{content, ctx})
}

// pin keeps an artifact in the cache for the rest of an offer from before the restart.
func (s *Server) pin(o *offer) {
	s.mu.Lock()
	held := o.hold != nil
	s.mu.Unlock()
	if held {
		return
	}
	hold, _, err := s.Open(o.ctx, o.SHA256)
	if err != nil {
		return // the reader that is there serves this request
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if o.hold != nil || s.offers[o.Token] != o {
		_ = hold.Close()
		return
	}
	o.hold = hold
}

// until reads as long as ctx is.
type until struct {
	io.ReadSeeker
	ctx context.Context
}

func (u *until) Read(p []byte) (int, error) {
	if err := u.ctx.Err(); err != nil {
		return 0, err
	}
	return u.ReadSeeker.Read(p)
}

// paced ends a connection whose other side takes nothing for a while, and leaves
// time to those who wait for bytes that have yet to come.
type paced struct {
	http.ResponseWriter
	control *http.ResponseController
}

func (p *paced) Write(b []byte) (int, error) {
	_ = p.control.SetWriteDeadline(time.Now().Add(writeTimeout)) // it is a TCP connection
	return p.ResponseWriter.Write(b)
}

// capped closes connections past the caps at once.
type capped struct {
	net.Listener
	mu   sync.Mutex
	open map[string]int
	all  int
}

func (c *capped) Accept() (net.Conn, error) {
	for {
		conn, err := c.Listener.Accept()
		if err != nil {
			return nil, err
		}
		source, _, _ := net.SplitHostPort(conn.RemoteAddr().String())
		c.mu.Lock()
		full := c.all >= maxConns || c.open[source] >= perSource
		if !full {
			c.all++
			c.open[source]++
		}
		c.mu.Unlock()
		if !full {
			return &counted{Conn: conn, closed: sync.OnceFunc(func() { c.gone(source) })}, nil
		}
		_ = conn.Close()
	}
}

func (c *capped) gone(source string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all--
	if c.open[source]--; c.open[source] == 0 {
		delete(c.open, source)
	}
}

// counted says once that it was closed.
type counted struct {
	net.Conn
	closed func()
}

func (c *counted) Close() error {
	c.closed()
	return c.Conn.Close()
}
