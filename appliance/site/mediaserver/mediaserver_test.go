package mediaserver

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/bound"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/site/netnstest"
)

const sha = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

var disc = bytes.Repeat([]byte("a bootable disc "), 8192)

// library is a cache of one artifact.
type library struct {
	open  atomic.Int32 // readers
	stall chan struct{}
}

type book struct {
	io.ReadSeeker
	ctx context.Context
	l   *library
}

func (b *book) Read(p []byte) (int, error) {
	if at, _ := b.Seek(0, io.SeekCurrent); b.l.stall != nil && at >= 65536 {
		select {
		case <-b.l.stall:
		case <-b.ctx.Done():
			return 0, b.ctx.Err()
		}
	}
	return b.ReadSeeker.Read(p[:min(len(p), 65536)])
}

func (b *book) Close() error { b.l.open.Add(-1); return nil }

func (l *library) get(ctx context.Context, digest string) (io.ReadSeekCloser, int64, error) {
	if digest != sha {
		return nil, 0, errs.New(errs.InvalidArgs, "no such artifact")
	}
	l.open.Add(1)
	return &book{bytes.NewReader(disc), ctx, l}, int64(len(disc)), nil
}

func locate(_ context.Context, ref string) (Artifact, error) {
	switch ref {
	case "debian.iso", "bios-2.0", sha:
		return Artifact{SHA256: sha}, nil
	case "node.raw.zst":
		return Artifact{SHA256: sha, Packed: true}, nil
	}
	return Artifact{}, errs.New(errs.InvalidArgs, "no artifact %s", ref)
}

// The box is 127.0.0.1 on a LAN of loopback addresses, and the BMC another of them.
const (
	box   = "127.0.0.1"
	bmc   = "127.0.0.2:443"
	thief = "127.0.0.3"
)

type site struct {
	*Server
	library *library
	t       *testing.T
}

// start serves the LAN until the test's end.
func start(t *testing.T, file string, change func(*Options)) *site {
	t.Helper()
	ca, aside, err := OpenAuthority("")
	if err != nil || aside != "" {
		t.Fatalf("OpenAuthority = %q, %v", aside, err)
	}
	ln, err := net.Listen("tcp", box+":0")
	if err != nil {
		t.Fatal(err)
	}
	l := &library{}
	o := Options{
		Authority: ca, LANs: []netip.Prefix{netip.MustParsePrefix(box + "/8")}, Port: uint16(ln.Addr().(*net.TCPAddr).Port), File: file,
		Locate: locate, Open: l.get, Log: slog.New(slog.DiscardHandler),
	}
	if change != nil {
		change(&o)
	}
	s := &site{New(o), l, t}
	ctx, stop := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx, ln, netip.MustParseAddr(box)) }()
	t.Cleanup(func() {
		stop()
		if err := <-served; err != nil {
			t.Errorf("Serve = %v", err)
		}
		s.Close()
	})
	for s.up() == 0 {
		select {
		case err := <-served:
			t.Fatalf("Serve = %v", err)
		case <-time.After(time.Millisecond):
		}
	}
	return s
}

func (s *site) up() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.serving[netip.MustParseAddr(box)]
}

// from is an HTTP client at an address, that trusts the site's CA and nothing else.
func (s *site) from(address string) *http.Client {
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM([]byte(s.Authority.PEM())) {
		s.t.Fatal("the CA is no certificate")
	}
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
	transport := &http.Transport{DialContext: dialer.DialContext, TLSClientConfig: &tls.Config{RootCAs: pool}, DisableKeepAlives: true}
	return &http.Client{Transport: transport}
}

func (s *site) offer(ref string) (string, func()) {
	s.t.Helper()
	u, release, err := s.Offer(s.t.Context(), bmc, ref)
	if err != nil {
		s.t.Fatal(err)
	}
	return u, release
}

func (s *site) do(from, method, url string, header ...string) (*http.Response, []byte) {
	s.t.Helper()
	req, err := http.NewRequestWithContext(s.t.Context(), method, url, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := s.from(from).Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return resp, body
}

func (s *site) get(url string) int {
	s.t.Helper()
	resp, _ := s.do("127.0.0.2", http.MethodGet, url)
	return resp.StatusCode
}

func TestFetch(t *testing.T) {
	s := start(t, "", nil)
	u, release := s.offer("artifact://debian.iso")
	if !regexp.MustCompile(`^https://127\.0\.0\.1:\d+/m/[A-Z2-7]{26,}/debian\.iso$`).MatchString(u) {
		t.Errorf("Offer = %s, want https, a secret of 128 bits and the name", u)
	}
	other, _ := s.offer("artifact://debian.iso")
	if other == u {
		t.Error("two offers share a path")
	}
	n := len(disc)
	for _, tt := range []struct {
		method string
		header []string
		status int
		want   []byte
	}{
		{"GET", nil, 200, disc},
		{"HEAD", nil, 200, nil},
		{"GET", []string{"Range", "bytes=0-2047"}, 206, disc[:2048]},
		{"GET", []string{"Range", "bytes=32768-34815"}, 206, disc[32768:34816]},
		{"GET", []string{"Range", fmt.Sprintf("bytes=%d-", n-7)}, 206, disc[n-7:]},
		{"GET", []string{"Range", "bytes=-5"}, 206, disc[n-5:]},
		{"GET", []string{"Range", fmt.Sprintf("bytes=%d-", n)}, 416, nil},
		{"GET", []string{"Range", "bytes=0-9", "If-Range", `"` + sha + `"`}, 206, disc[:10]},
		{"GET", []string{"Range", "bytes=0-9", "If-Range", `"other"`}, 200, disc},
		{"GET", []string{"If-None-Match", `"` + sha + `"`}, 304, nil},
	} {
		resp, got := s.do("127.0.0.2", tt.method, u, tt.header...)
		if resp.StatusCode != tt.status || tt.want != nil && !bytes.Equal(got, tt.want) || tt.method == "HEAD" && resp.ContentLength != int64(n) {
			t.Errorf("%s %v = %s and %d bytes (length %d), want %d", tt.method, tt.header, resp.Status, len(got), resp.ContentLength, tt.status)
		}
		if tt.status == 200 && resp.Header.Get("Accept-Ranges") != "bytes" {
			t.Errorf("%s %v: no word of ranges", tt.method, tt.header)
		}
	}
	release()
	if got := s.get(u); got != 404 {
		t.Errorf("after release: %d, want 404", got)
	}
	if got := s.get(other); got != 200 {
		t.Errorf("the other offer: %d, want 200", got)
	}
	release() // twice is fine
}

// Whoever may not have it learns nothing, not even that it is there.
func TestOnlyTheBMCAtItsPath(t *testing.T) {
	s := start(t, "", nil)
	u, _ := s.offer("artifact://debian.iso")
	parsed, err := url.Parse(u)
	if err != nil {
		t.Fatal(err)
	}
	base, token := "https://"+parsed.Host, strings.Split(parsed.Path, "/")[2]
	ended, release := s.offer("artifact://debian.iso")
	release()
	type answer struct {
		status int
		body   string
		header http.Header
	}
	var first *answer
	for _, tt := range []struct{ name, from, method, url string }{
		{"never offered", "127.0.0.2", "GET", base + "/m/" + strings.Repeat("A", len(token)) + "/debian.iso"},
		{"another address", thief, "GET", u},
		{"the box itself", box, "GET", u},
		{"ended", "127.0.0.2", "GET", ended},
		{"another name", "127.0.0.2", "GET", base + "/m/" + token + "/other.iso"},
		{"no name", "127.0.0.2", "GET", base + "/m/" + token + "/"},
		{"more path", "127.0.0.2", "GET", u + "/x"},
		{"another folder", "127.0.0.2", "GET", base + "/x/" + token + "/debian.iso"},
		{"the top", "127.0.0.2", "GET", base + "/"},
		{"the folder", "127.0.0.2", "GET", base + "/m/"},
		{"a change", "127.0.0.2", "POST", u},
		{"a cut secret", "127.0.0.2", "GET", base + "/m/" + token[:len(token)-1] + "/debian.iso"},
	} {
		resp, body := s.do(tt.from, tt.method, tt.url)
		h := maps.Clone(resp.Header)
		h.Del("Date")
		got := &answer{resp.StatusCode, string(body), h}
		if first == nil {
			first = got
		}
		if got.status != 404 || fmt.Sprint(got) != fmt.Sprint(first) {
			t.Errorf("%s: %+v, want 404 and nothing that tells it from %+v", tt.name, got, first)
		}
	}
	if got := s.get(u); got != 200 {
		t.Errorf("the BMC at its path: %d, want 200", got)
	}
}

// An offer of one LAN does not hold at the listener of another.
func TestOtherLAN(t *testing.T) {
	const second = "127.0.1.1"
	s := start(t, "", func(o *Options) {
		o.LANs = []netip.Prefix{netip.MustParsePrefix(box + "/24"), netip.MustParsePrefix(second + "/24")}
	})
	ln, err := net.Listen("tcp", second+":0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx, ln, netip.MustParseAddr(second)) }()
	defer func() { stop(); <-served }()
	u, _ := s.offer("artifact://debian.iso")
	parsed, _ := url.Parse(u)
	if got := s.get(u); got != 200 {
		t.Errorf("its own LAN: %d, want 200", got)
	}
	if got := s.get("https://" + ln.Addr().String() + parsed.Path); got != 404 {
		t.Errorf("another LAN: %d, want 404", got)
	}
}

func TestOfferRefuses(t *testing.T) {
	s := start(t, "", func(o *Options) {
		o.LANs = append(o.LANs, netip.MustParsePrefix("10.7.0.1/24"))
		o.Lookup = func(_ context.Context, host string) ([]netip.Addr, error) {
			if host == "bmc.example" {
				return []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("127.0.0.2")}, nil
			}
			return nil, errors.New("no such host")
		}
	})
	for _, tt := range []struct {
		bmc, ref string
		want     errs.Code
	}{
		{bmc, "artifact://debian.iso", ""},
		{bmc, "artifact://" + sha, ""},
		{"bmc.example:443", "artifact://debian.iso", ""},
		{"nowhere.example:443", "artifact://debian.iso", errs.Unreachable},
		{bmc, "artifact://", errs.InvalidArgs},
		{bmc, "https://example/debian.iso", errs.InvalidArgs},
		{bmc, "artifact://unknown", errs.InvalidArgs},
		{bmc, "artifact://node.raw.zst", errs.InvalidArgs},
		{"192.0.2.1:443", "artifact://debian.iso", errs.InvalidArgs},     // beyond the uplink
		{"127.0.0.1:443", "artifact://debian.iso", errs.InvalidArgs},     // the box itself
		{"10.7.0.9:443", "artifact://debian.iso", errs.Unavailable},      // a LAN whose port is away
		{"[2001:db8::1]:443", "artifact://debian.iso", errs.InvalidArgs}, // LANs are IPv4
		{"127.0.0.2", "artifact://debian.iso", errs.InvalidAddress},
	} {
		u, release, err := s.Offer(t.Context(), tt.bmc, tt.ref)
		if errs.CodeOf(err) != tt.want || (err == nil) != (u != "" && release != nil) {
			t.Errorf("Offer(%s, %s) = %q, %v, want code %q", tt.bmc, tt.ref, u, err, tt.want)
		}
	}
}

// Every way that an offer ends gives the artifact free, and ends what is being read.
func TestEnds(t *testing.T) {
	s := start(t, "", nil)
	open := func() int32 { return s.library.open.Load() }
	await := func(what string, want int32) {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); open() != want; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: %d readers are open, want %d", what, open(), want)
			}
		}
	}
	_, release := s.offer("artifact://debian.iso")
	await("offered", 1)
	release()
	await("released", 0)

	// Its time is over.
	s.mu.Lock()
	r := record{Token: digestOf("T"), Name: "a.iso", SHA256: sha, Client: netip.MustParseAddr("127.0.0.2"), LAN: netip.MustParseAddr(box)}
	hold, _, _ := s.library.get(t.Context(), sha)
	o := s.add(r, time.Millisecond, hold)
	s.mu.Unlock()
	<-o.ctx.Done()
	await("expired", 0)
	if got := s.get(fmt.Sprintf("https://%s:%d/m/T/a.iso", box, s.Port)); got != 404 {
		t.Errorf("expired: %d, want 404", got)
	}

	// A BMC's oldest goes when it has too many, and other BMCs' stay.
	other, _, err := s.Offer(t.Context(), "127.0.0.9:443", "artifact://debian.iso")
	if err != nil {
		t.Fatal(err)
	}
	tick := time.Now()
	s.Options.Now = func() time.Time { tick = tick.Add(time.Second); return tick }
	var urls []string
	for range perBMC + 2 {
		u, _ := s.offer("artifact://debian.iso")
		urls = append(urls, u)
	}
	await("too many", perBMC+1)
	for i, u := range urls {
		if got, want := s.get(u), map[bool]int{true: 404, false: 200}[i < 2]; got != want {
			t.Errorf("offer %d of %d: %d, want %d", i, len(urls), got, want)
		}
	}
	if resp, _ := s.do("127.0.0.9", "GET", other); resp.StatusCode != 200 {
		t.Errorf("another BMC's offer: %s, want 200", resp.Status)
	}
}

// A transfer that runs ends with its offer.
func TestReleaseEndsTransfers(t *testing.T) {
	s := start(t, "", nil)
	s.library.stall = make(chan struct{}) // after the first bytes
	u, release := s.offer("artifact://debian.iso")
	resp, err := s.from("127.0.0.2").Get(u)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := io.ReadFull(resp.Body, make([]byte, 4096)); err != nil {
		t.Fatal(err)
	}
	release()
	if n, err := io.Copy(io.Discard, resp.Body); err == nil {
		t.Errorf("the transfer went on for %d bytes to its end", n)
	}
}

// What a BMC has inserted is there after the box has restarted, until it ends.
func TestRestart(t *testing.T) {
	file := filepath.Join(t.TempDir(), "media.json")
	clock := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	at := func(now time.Time) func(*Options) {
		return func(o *Options) { o.Now = func() time.Time { return now } }
	}
	first := start(t, file, at(clock))
	u, release := first.offer("artifact://debian.iso")
	gone, releaseGone := first.offer("artifact://debian.iso")
	releaseGone()
	kept, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if st, _ := os.Stat(file); st.Mode().Perm() != 0o600 {
		t.Errorf("%s has mode %v, want 0600", file, st.Mode())
	}
	path, _ := url.Parse(u)
	if bytes.Contains(kept, []byte(strings.Split(path.Path, "/")[2])) {
		t.Error("the file holds the path's secret")
	}
	first.Close()
	release() // after the end of its process: the BMC still has it

	for _, tt := range []struct {
		name string
		now  time.Time
		lans string
		want int
	}{
		{"at once", clock.Add(time.Minute), box + "/8", 200},
		{"a day later", clock.Add(life + time.Second), box + "/8", 404},
		{"with a clock set back", clock.AddDate(-40, 0, 0), box + "/8", 200},
		{"with another address", clock.Add(time.Minute), "127.0.0.7/8", 404},
	} {
		copied := filepath.Join(t.TempDir(), "media.json")
		if err := os.WriteFile(copied, kept, 0o600); err != nil {
			t.Fatal(err)
		}
		s := start(t, copied, func(o *Options) { at(tt.now)(o); o.LANs = []netip.Prefix{netip.MustParsePrefix(tt.lans)} })
		path.Host = fmt.Sprintf("%s:%d", box, s.Port)
		if got := s.get(path.String()); got != tt.want {
			t.Errorf("%s: %d, want %d", tt.name, got, tt.want)
		}
		if old, _ := url.Parse(gone); s.get("https://"+path.Host+old.Path) != 404 {
			t.Errorf("%s: what was released is there again", tt.name)
		}
		s.mu.Lock()
		for _, o := range s.offers {
			if left, _ := o.ctx.Deadline(); time.Until(left) > life {
				t.Errorf("%s: an offer lives until %v", tt.name, left)
			}
		}
		s.mu.Unlock()
	}
	// What was left in the drive ends with the drive's next change.
	copied := filepath.Join(t.TempDir(), "media.json")
	if err := os.WriteFile(copied, kept, 0o600); err != nil {
		t.Fatal(err)
	}
	again := start(t, copied, at(clock))
	path.Host = fmt.Sprintf("%s:%d", box, again.Port)
	fresh, _ := again.offer("artifact://debian.iso")
	again.Forget("127.0.0.9:443")
	if got := again.get(path.String()); got != 200 {
		t.Errorf("another BMC's change: %d, want 200", got)
	}
	again.Forget(bmc)
	if got := again.get(path.String()); got != 404 {
		t.Errorf("its own change: %d, want 404", got)
	}
	if got := again.get(fresh); got != 200 {
		t.Errorf("what was offered since: %d, want 200", got)
	}
	if data, _ := os.ReadFile(copied); bytes.Count(data, []byte("token_sha256")) != 1 {
		t.Errorf("the file keeps %s", data)
	}
	// A damaged file costs what was inserted, and nothing else.
	if err := os.WriteFile(file, kept[:len(kept)/2], 0o600); err != nil {
		t.Fatal(err)
	}
	s := start(t, file, nil)
	u, _ = s.offer("artifact://debian.iso")
	if got := s.get(u); got != 200 {
		t.Errorf("over a damaged file: %d, want 200", got)
	}
}

// A neighbour on the uplink, who knows the path and even has the BMC's address, gets nothing.
func TestNothingOnTheUplink(t *testing.T) {
	const boxLAN, bmcAddr = "10.0.0.1", "10.0.0.2"
	boxNS, neighbour, machine := netnstest.New(t), netnstest.New(t), netnstest.New(t)
	boxNS.Wire("uplink", netip.MustParsePrefix("192.0.2.1/24"), neighbour, "eth0", netip.MustParsePrefix("192.0.2.2/24"))
	boxNS.Wire("lan", netip.MustParsePrefix(boxLAN+"/24"), machine, "eth0", netip.MustParsePrefix(bmcAddr+"/24"))
	neighbour.Route(netip.MustParsePrefix(boxLAN+"/32"), netip.MustParseAddr("192.0.2.1"))
	var ln, open net.Listener
	boxNS.Do(func() {
		var err error
		if ln, err = bound.Listen(t.Context(), "lan", netip.MustParseAddrPort(boxLAN+":7444")); err != nil {
			t.Error(err)
		}
		if open, err = net.Listen("tcp4", boxLAN+":81"); err != nil { // the same without the bond: the attempt can succeed
			t.Error(err)
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	defer open.Close()
	ca, _, err := OpenAuthority("")
	if err != nil {
		t.Fatal(err)
	}
	l := &library{}
	s := New(Options{Authority: ca, LANs: []netip.Prefix{netip.MustParsePrefix(boxLAN + "/24")}, Locate: locate, Open: l.get, Log: slog.New(slog.DiscardHandler)})
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.Serve(ctx, ln, netip.MustParseAddr(boxLAN)) })
	defer wg.Wait()
	defer stop()
	st := &site{s, l, t}
	var u string
	for u == "" {
		if u, _, err = s.Offer(t.Context(), bmcAddr+":443", "artifact://debian.iso"); err != nil && errs.CodeOf(err) != errs.Unavailable {
			t.Fatal(err)
		}
	}
	fetch := func(ns *netnstest.Namespace, address string) (status int, err error) {
		client := st.from("0.0.0.0")
		client.Transport.(*http.Transport).DialContext = func(context.Context, string, string) (c net.Conn, err error) {
			ns.Do(func() { c, err = net.DialTimeout("tcp4", address, time.Second) })
			return c, err
		}
		resp, err := client.Get(u)
		if err != nil {
			return 0, err
		}
		defer resp.Body.Close()
		return resp.StatusCode, nil
	}
	if status, err := fetch(machine, boxLAN+":7444"); status != 200 {
		t.Errorf("the BMC: %d, %v, want 200", status, err)
	}
	var reached error
	neighbour.Do(func() {
		c, err := net.DialTimeout("tcp4", boxLAN+":81", time.Second)
		if reached = err; err == nil {
			_ = c.Close()
		}
	})
	if reached != nil {
		t.Fatalf("the neighbour cannot reach the box at all: %v", reached)
	}
	for _, address := range []string{boxLAN + ":7444", "192.0.2.1:7444"} {
		if status, err := fetch(neighbour, address); err == nil {
			t.Errorf("the neighbour at %s: %d, want no connection", address, status)
		}
	}
}

// One BMC cannot take all connections.
func TestConnectionCap(t *testing.T) {
	s := start(t, "", nil)
	u, _ := s.offer("artifact://debian.iso")
	var held []net.Conn
	defer func() {
		for _, c := range held {
			_ = c.Close()
		}
	}()
	dial := func(from string) bool {
		c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}).Dial("tcp", net.JoinHostPort(box, fmt.Sprint(s.Port)))
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, c)
		_ = c.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
		_, err = c.Read(make([]byte, 1))
		var timeout net.Error
		return errors.As(err, &timeout) && timeout.Timeout() // it is open, and nothing is said
	}
	for i := range perSource {
		if !dial(thief) {
			t.Fatalf("connection %d is closed", i)
		}
	}
	if dial(thief) {
		t.Errorf("connection %d is open", perSource)
	}
	if got := s.get(u); got != 200 {
		t.Errorf("the BMC beside it: %d, want 200", got)
	}
	_ = held[0].Close()
	for deadline := time.Now().Add(20 * time.Second); !dial(thief); {
		if time.Now().After(deadline) {
			t.Fatal("a place that was given back is not given out")
		}
	}
}

func TestFileName(t *testing.T) {
	for ref, want := range map[string]string{
		"debian.iso": "debian.iso", "Windows 11.ISO": "Windows-11.ISO", "debian": "debian.iso", "bios-2.0": "bios-2.0.iso", sha: "image.iso", "": "image.iso",
		"../../etc/passwd": "-..-etc-passwd.iso", "...": "image.iso", "firmimg.d7": "firmimg.d7", "BIOS_X12.bin": "BIOS_X12.bin", "a/b?c#d.img": "a-b-c-d.img",
		strings.Repeat("x", 100) + ".iso": strings.Repeat("x", 60) + ".iso", strings.Repeat("x", 100): strings.Repeat("x", 60) + ".iso",
	} {
		if got := fileName(ref); got != want {
			t.Errorf("fileName(%q) = %q, want %q", ref, got, want)
		}
	}
}

func FuzzFileName(f *testing.F) {
	f.Add("debian.iso")
	f.Add(strings.Repeat(".", 80))
	f.Add("x" + strings.Repeat(".", 80))
	f.Fuzz(func(t *testing.T, ref string) {
		got := fileName(ref)
		if got == "" || len(got) > maxName || got[0] == '.' || unlikely.MatchString(got) || !endings.MatchString(got) || fileName(got) != got {
			t.Errorf("fileName(%q) = %q, then %q", ref, got, fileName(got))
		}
	})
}

func FuzzParseOffers(f *testing.F) {
	f.Add([]byte(`{"offers":[{"token_sha256":"` + sha + `","name":"a.iso","sha256":"` + sha + `","client":"10.0.0.2","lan":"10.0.0.1","begun_ms":1,"expires_ms":2}]}`))
	f.Add([]byte(`{"offers":[]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		records, err := parseOffers(data)
		if err != nil {
			return
		}
		for _, r := range records {
			if r.check() != nil || !slices.Contains([]int{1}, strings.Count("/"+r.Name, "/")) {
				t.Errorf("parseOffers(%q) takes %+v", data, r)
			}
			_ = r.remaining(time.Now())
		}
	})
}
