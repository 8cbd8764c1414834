package httpproxy

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/bmc/addressbook"
)

// lan is a site's network in memory: addresses lead to servers of the test, and
// names to addresses.
type lan struct {
	t     *testing.T
	book  *addressbook.Book
	proxy *Proxy
	logs  bytes.Buffer

	mu      sync.Mutex
	servers map[string]string // by the address that is dialled
	names   map[string][][]string
	dialled []string
	lookups []string
}

func newLAN(t *testing.T) *lan {
	t.Helper()
	book, err := addressbook.Open("")
	if err != nil {
		t.Fatal(err)
	}
	l := &lan{t: t, book: book, servers: map[string]string{}, names: map[string][][]string{}}
	l.proxy = New(Options{
		Book: book,
		Networks: func() []netip.Prefix {
			return []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24"), netip.MustParsePrefix("fd00:1::/64")}
		},
		Own: func() ([]netip.Addr, error) {
			return []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00:1::1")}, nil
		},
		Resolve: l.resolve, Dial: l.dial, Log: slog.New(slog.NewTextHandler(&l.logs, nil)),
	})
	return l
}

// name has each look-up answer the next of lists, and the last from then on.
func (l *lan) name(host string, lists ...string) {
	for _, list := range lists {
		l.names[host] = append(l.names[host], strings.Fields(list))
	}
}

func (l *lan) resolve(_ context.Context, host string) ([]netip.Addr, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lookups = append(l.lookups, host)
	lists := l.names[host]
	if len(lists) == 0 {
		return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
	}
	if len(lists) > 1 {
		l.names[host] = lists[1:]
	}
	var out []netip.Addr
	for _, text := range lists[0] {
		if text == "fail" {
			return nil, errors.New("the resolver is down")
		}
		out = append(out, netip.MustParseAddr(text))
	}
	return out, nil
}

func (l *lan) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	l.mu.Lock()
	l.dialled = append(l.dialled, addr)
	to := l.servers[addr]
	l.mu.Unlock()
	if to == "" {
		return nil, fmt.Errorf("nobody at %s", addr)
	}
	return (&net.Dialer{}).DialContext(ctx, network, to)
}

// serve puts a server at an address of the LAN.
func (l *lan) serve(addr string, h http.HandlerFunc) *httptest.Server {
	s := httptest.NewServer(h)
	l.t.Cleanup(s.Close)
	l.servers[addr] = s.Listener.Addr().String()
	return s
}

// tunnel keeps what goes through it.
type tunnel struct {
	bytes.Buffer
	closed bool
}

func (t *tunnel) Close() error { t.closed = true; return nil }

func noSecrets(context.Context, ...string) (map[string]secret.Value, error) {
	return nil, errs.New(errs.CredentialsUnavailable, "there are none")
}

// ask makes a request and answers its head, body and result.
func (l *lan) ask(req *agentv1.HttpProxyRequest) (head *agentv1.HttpProxyResult, body string, result *agentv1.HttpProxyResult, err error) {
	l.t.Helper()
	if req.Method == "" {
		req.Method = "GET"
	}
	out := &tunnel{}
	result, err = l.proxy.Do(l.t.Context(), req, noSecrets, func(context.Context) (io.ReadWriteCloser, error) { return out, nil })
	if out.Len() < 4 {
		return nil, "", result, err
	}
	data := out.Bytes()
	n := binary.BigEndian.Uint32(data)
	head = &agentv1.HttpProxyResult{}
	if err := proto.Unmarshal(data[4:4+n], head); err != nil {
		l.t.Fatal(err)
	}
	if err == nil && !out.closed {
		l.t.Error("the tunnel was left open")
	}
	return head, string(data[4+n:]), result, err
}

func get(url string, redirects uint32) *agentv1.HttpProxyRequest {
	return &agentv1.HttpProxyRequest{Method: "GET", Url: url, Redirects: redirects}
}

func TestRequestAndAnswer(t *testing.T) {
	l := newLAN(t)
	var got *http.Request
	var sent string
	l.serve("10.0.0.5:8080", func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got, sent = r, string(body)
		w.Header().Set("X-Answer", "yes")
		w.WriteHeader(http.StatusCreated)
		io.WriteString(w, "made")
	})
	head, body, result, err := l.ask(&agentv1.HttpProxyRequest{
		Method: "POST", Url: "http://10.0.0.5:8080/a/b?token=s3cret#part", Body: []byte("payload"),
		Headers: []*agentv1.HttpHeader{{Name: "content-type", Value: "text/x"}, {Name: "Connection", Value: "x-mine, close"}, {Name: "X-Mine", Value: "hop"},
			{Name: "Transfer-Encoding", Value: "chunked"}, {Name: "Host", Value: "elsewhere"}, {Name: "Content-Length", Value: "1"}, {Name: "X-Kept", Value: "kept"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if got.Host != "10.0.0.5:8080" || got.RequestURI != "/a/b?token=s3cret" || sent != "payload" || got.Header.Get("Content-Type") != "text/x" || got.Header.Get("X-Kept") != "kept" {
		t.Errorf("the server got %s %s %q %v", got.Host, got.RequestURI, sent, got.Header)
	}
	if got.Header.Get("X-Mine") != "" || got.Header.Get("Accept-Encoding") != "" || len(got.TransferEncoding) > 0 {
		t.Errorf("what is one connection's was passed on: %v", got.Header)
	}
	sum := sha256.Sum256([]byte("made"))
	if head.Status != 201 || body != "made" || result.BodyBytes != 4 || result.BodySha256 != hex.EncodeToString(sum[:]) || result.Status != 201 || result.FinalUrl != "http://10.0.0.5:8080/a/b" {
		t.Errorf("answer %v %q, result %v", head, body, result)
	}
	if v := header(head, "X-Answer"); v != "yes" {
		t.Errorf("headers %v", head.Headers)
	}
	if strings.Contains(l.logs.String(), "s3cret") {
		t.Errorf("the log holds the query: %s", l.logs.String())
	}
}

func TestEndToEnd(t *testing.T) {
	h := http.Header{"Connection": {"X-Hop, keep-alive", "close"}, "X-Hop": {"one"}, "Keep-Alive": {"5"}, "Upgrade": {"h2c"}, "Te": {"trailers"},
		"Trailer": {"X"}, "Proxy-Authenticate": {"Basic"}, "Transfer-Encoding": {"chunked"}, "X-End": {"kept"}}
	endToEnd(h)
	if len(h) != 1 || h.Get("X-End") != "kept" {
		t.Errorf("endToEnd() left %v, want X-End alone", h)
	}
}

func header(r *agentv1.HttpProxyResult, name string) string {
	for _, h := range r.Headers {
		if h.Name == name {
			return h.Value
		}
	}
	return ""
}

func TestCheckRefuses(t *testing.T) {
	head := func(name, value string) []*agentv1.HttpHeader {
		return []*agentv1.HttpHeader{{Name: name, Value: value}}
	}
	good := &agentv1.HttpProxyRequest{Method: "GET", Url: "https://10.0.0.5/", Redirects: 5, Headers: head("Authorization", "secret://t/n")}
	if err := Check(good); err != nil {
		t.Errorf("Check(%v) = %v", good, err)
	}
	for name, req := range map[string]*agentv1.HttpProxyRequest{
		"method":           {Method: "CONNECT", Url: "http://10.0.0.5/"},
		"lower-case":       {Method: "get", Url: "http://10.0.0.5/"},
		"ftp":              {Method: "GET", Url: "ftp://10.0.0.5/"},
		"file":             {Method: "GET", Url: "file:///etc/passwd"},
		"gopher":           {Method: "GET", Url: "gopher://10.0.0.5/"},
		"no scheme":        {Method: "GET", Url: "10.0.0.5/"},
		"no host":          {Method: "GET", Url: "http:///x"},
		"opaque":           {Method: "GET", Url: "http:10.0.0.5"},
		"user":             {Method: "GET", Url: "http://u:p@10.0.0.5/"},
		"control":          {Method: "GET", Url: "http://10.0.0.5/\r\nX: y"},
		"long":             {Method: "GET", Url: "http://10.0.0.5/" + strings.Repeat("a", 9000)},
		"redirects":        {Method: "GET", Url: "http://10.0.0.5/", Redirects: 6},
		"body of GET":      {Method: "GET", Url: "http://10.0.0.5/", Body: []byte("x")},
		"huge answer":      {Method: "GET", Url: "http://10.0.0.5/", MaxBodyBytes: 2 << 30},
		"pin":              {Method: "GET", Url: "http://10.0.0.5/", TlsSpkiSha256: "aa"},
		"header's name":    {Method: "GET", Url: "http://10.0.0.5/", Headers: head("X Y", "v")},
		"header's value":   {Method: "GET", Url: "http://10.0.0.5/", Headers: head("X", "a\r\nb: c")},
		"a literal secret": {Method: "GET", Url: "http://10.0.0.5/", Headers: head("authorization", "Bearer abc")},
		"a cookie":         {Method: "GET", Url: "http://10.0.0.5/", Headers: head("Cookie", "a=b")},
		"too many headers": {Method: "GET", Url: "http://10.0.0.5/", Headers: slices.Repeat(head("X", "y"), 65)},
	} {
		if err := Check(req); errs.CodeOf(err) != errs.InvalidArgs || strings.Contains(err.Error(), "u:p") || strings.Contains(err.Error(), "Bearer") {
			t.Errorf("%s: %v, want invalid-args without a secret", name, err)
		}
	}
}

// TestForbiddenPlaces: none of these is ever dialled, whatever its spelling; a
// neighbour is.
func TestForbiddenPlaces(t *testing.T) {
	l := newLAN(t)
	l.serve("10.0.0.5:80", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "fine") })
	l.serve("[fd00:1::5]:80", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "fine") })
	for addr, driver := range map[string]string{"10.0.0.9": "redfish", "10.0.0.10:6230": "ipmi", "bmc.lan": "redfish", "fd00:1::9": "redfish", "moving.lan": "redfish"} {
		if _, err := l.book.Bind(addr, "", "secret://root/a", driver); err != nil {
			t.Fatal(err)
		}
	}
	l.name("web.lan", "10.0.0.5")
	l.name("bmc.lan", "10.0.0.11")
	l.name("alias.lan", "10.0.0.9")
	l.name("moving.lan", "10.0.0.12")
	l.name("alias-of-name.lan", "10.0.0.11")
	l.name("both.lan", "10.0.0.5 10.0.0.9")
	l.name("six.lan", "10.0.0.5 fd00:1::9")
	l.name("mapped.lan", "::ffff:10.0.0.9")
	l.name("loop.lan", "127.0.0.1")
	l.name("loop6.lan", "10.0.0.5 ::1")
	l.name("away.lan", "192.0.2.7")
	l.name("meta.lan", "169.254.169.254")
	for _, url := range []string{
		"http://10.0.0.5/", "HTTP://10.0.0.5:80/x", "http://web.lan/", "http://WEB.lan:80/", "http://[fd00:1::5]/", "http://[FD00:1:0::5]:80/",
	} {
		if _, body, _, err := l.ask(get(url, 0)); err != nil || body != "fine" {
			t.Errorf("%s: %q, %v; want the neighbour's answer", url, body, err)
		}
	}
	l.dialled = nil
	for _, url := range []string{
		// A BMC, by any port, scheme, spelling and name.
		"https://10.0.0.9/", "http://10.0.0.9/", "http://10.0.0.9:8080/", "https://10.0.0.9:443/redfish", "http://10.0.0.10:6230/", "http://10.0.0.10/",
		"https://bmc.lan/", "https://BMC.LAN/", "http://10.0.0.11/", "http://alias.lan/", "http://alias-of-name.lan/", "http://both.lan/", "http://six.lan/", "http://mapped.lan/",
		"https://[fd00:1::9]/", "https://[fd00:1:0:0:0:0:0:9]:8443/", "https://[::ffff:10.0.0.9]/", "https://[::ffff:a00:9]/", "https://[64:ff9b::a00:9]/", "https://[::10.0.0.9]/", "https://[2002:a00:9::1]/",
		// Mapped forms of neighbours are no other way in.
		"http://[::ffff:10.0.0.5]/",
		// The box, and what it talks to itself by.
		"http://127.0.0.1/", "http://127.9.9.9/", "http://[::1]/", "http://loop.lan/", "http://loop6.lan/", "http://10.0.0.1/", "http://[fd00:1::1]/", "http://10.0.0.1:8080/",
		"http://169.254.1.1/", "http://169.254.169.254/latest", "http://meta.lan/", "http://[fe80::1]/",
		// Beyond the LANs.
		"http://192.0.2.7/", "http://away.lan/", "http://10.0.1.5/", "https://8.8.8.8/",
	} {
		if _, _, _, err := l.ask(get(url, 0)); errs.CodeOf(err) != errs.OperationNotAllowed {
			t.Errorf("%s: %v, want operation-not-allowed", url, err)
		}
	}
	for _, url := range []string{
		// No address of one host, or one in a form that parsers disagree about.
		"http://0.0.0.0/", "http://[::]/", "http://224.0.0.1/", "http://[ff02::1]/", "http://255.255.255.255/", "http://[fe80::1%25eth0]/",
		"http://2130706433/", "http://0x7f000001/", "http://0177.0.0.1/", "http://10.9/", "http://10.0.0.9./", "http://bmc.lan./", "http://bmc%2elan./", "http://10.0.0.9:0/", "http://10.0.0.9:99999/", "http://a b/", "http://1.2.3.4.5/",
	} {
		if _, _, _, err := l.ask(get(url, 0)); errs.CodeOf(err) != errs.InvalidArgs && errs.CodeOf(err) != errs.OperationNotAllowed {
			t.Errorf("%s: %v, want a refusal", url, err)
		}
	}
	// A BMC's own name, though it leads elsewhere each time that it is asked for.
	l.names["moving.lan"] = [][]string{{"10.0.0.5"}, {"10.0.0.12"}}
	if _, _, _, err := l.ask(get("http://moving.lan/", 0)); errs.CodeOf(err) != errs.OperationNotAllowed {
		t.Errorf("http://moving.lan/: %v, want operation-not-allowed", err)
	}
	if len(l.dialled) > 0 {
		t.Errorf("dialled %v", l.dialled)
	}
}

// TestHardRefusalsAreNotTheNetworks: what is refused stays refused where a LAN's
// network holds it.
func TestHardRefusalsAreNotTheNetworks(t *testing.T) {
	l := newLAN(t)
	l.proxy.networks = func() []netip.Prefix {
		return []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}
	}
	for _, url := range []string{"http://127.0.0.1/", "http://[::1]/", "http://169.254.169.254/", "http://[fe80::1]/", "http://10.0.0.1/", "http://[64:ff9b::a00:9]/", "http://[::ffff:8.8.8.8]/", "http://[2002:a00:9::1]/"} {
		if _, _, _, err := l.ask(get(url, 0)); errs.CodeOf(err) != errs.OperationNotAllowed {
			t.Errorf("%s: %v, want operation-not-allowed", url, err)
		}
	}
	if len(l.dialled) > 0 {
		t.Errorf("dialled %v", l.dialled)
	}
}

// TestRebindingName: a resolver that answers another address the second time gets
// nowhere, since the address that was judged is the one that is dialled.
func TestRebindingName(t *testing.T) {
	l := newLAN(t)
	l.serve("10.0.0.5:80", func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "web as "+r.Host) })
	l.serve("10.0.0.9:80", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "BMC") })
	if _, err := l.book.Bind("10.0.0.9", "", "secret://root/a", "redfish"); err != nil {
		t.Fatal(err)
	}
	l.name("rebind.lan", "10.0.0.5", "10.0.0.9")
	if _, body, _, err := l.ask(get("http://rebind.lan/", 0)); err != nil || body != "web as rebind.lan" {
		t.Errorf("%q, %v, want the address that was judged", body, err)
	}
	if _, body, _, err := l.ask(get("http://rebind.lan/", 0)); errs.CodeOf(err) != errs.OperationNotAllowed || body != "" {
		t.Errorf("%q, %v, want operation-not-allowed once the name leads to a BMC", body, err)
	}
	if len(l.lookups) != 2 {
		t.Errorf("looked up %v, want once per request", l.lookups)
	}
	if !slices.Equal(l.dialled, []string{"10.0.0.5:80"}) {
		t.Errorf("dialled %v, want 10.0.0.5:80 alone", l.dialled)
	}
}

// TestBMCsByName: whether an address is that of a BMC which is known by a name
// must be told before anything is sent.
func TestBMCsByName(t *testing.T) {
	l := newLAN(t)
	l.serve("10.0.0.5:80", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "fine") })
	if _, err := l.book.Bind("gone.lan", "", "secret://root/a", "redfish"); err != nil {
		t.Fatal(err)
	}
	if _, body, _, err := l.ask(get("http://10.0.0.5/", 0)); err != nil || body != "fine" {
		t.Errorf("with a BMC that is nowhere: %q, %v", body, err)
	}
	l.name("gone.lan", "fail")
	if _, _, _, err := l.ask(get("http://10.0.0.5/", 0)); errs.CodeOf(err) != errs.Unreachable {
		t.Errorf("with a BMC that cannot be looked up: %v, want unreachable", err)
	}
}

// TestRedirects: each goes through every check again, and no more are followed than
// were asked for.
func TestRedirects(t *testing.T) {
	l := newLAN(t)
	if _, err := l.book.Bind("10.0.0.9", "", "secret://root/a", "redfish"); err != nil {
		t.Fatal(err)
	}
	l.name("evil.lan", "10.0.0.5", "10.0.0.5", "10.0.0.9")
	var seen []string
	l.serve("10.0.0.5:80", func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		seen = append(seen, fmt.Sprint(r.Method, " ", r.URL.Path, " ", r.Header.Get("Authorization"), " ", string(body)))
		to := map[string]string{
			"/bmc": "https://10.0.0.9/redfish/v1", "/bmc-name": "http://evil.lan/x", "/loop": "http://127.0.0.1/", "/ftp": "ftp://10.0.0.5/",
			"/user": "http://u:p@10.0.0.5/", "/same": "/end", "/other": "http://10.0.0.6/end", "/chain": "/same", "/again": "/again", "/scheme": "//10.0.0.9/", "/broken": "http://[::1",
		}[r.URL.Path]
		if to == "" {
			io.WriteString(w, "end")
			return
		}
		w.Header().Set("Location", to)
		status := http.StatusFound
		if r.URL.Query().Get("s") != "" {
			fmt.Sscan(r.URL.Query().Get("s"), &status)
		}
		w.WriteHeader(status)
	})
	l.serve("10.0.0.6:80", func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		io.WriteString(w, fmt.Sprint(r.Method, " [", r.Header.Get("Authorization"), r.Header.Get("Cookie"), r.Header.Get("X-Own"), "] ", r.Header.Get("X-Plain"), string(body)))
	})
	for _, path := range []string{"/bmc", "/loop", "/ftp", "/user", "/scheme", "/broken"} {
		if _, body, _, err := l.ask(get("http://10.0.0.5"+path, 5)); errs.CodeOf(err) != errs.OperationNotAllowed || body != "" {
			t.Errorf("%s: %q, %v, want operation-not-allowed", path, body, err)
		}
	}
	// The name pointed elsewhere when it was asked for the redirect.
	l.names["evil.lan"] = [][]string{{"10.0.0.9"}}
	if _, _, _, err := l.ask(get("http://10.0.0.5/bmc-name", 5)); errs.CodeOf(err) != errs.OperationNotAllowed {
		t.Errorf("/bmc-name: %v, want operation-not-allowed", err)
	}
	for _, tt := range []struct {
		path      string
		redirects uint32
		status    uint32
		body      string
	}{
		{"/same", 0, 302, ""}, {"/same", 1, 200, "end"}, {"/chain", 1, 302, ""}, {"/chain", 2, 200, "end"}, {"/again", 5, 302, ""},
	} {
		head, body, _, err := l.ask(get("http://10.0.0.5"+tt.path, tt.redirects))
		if err != nil || head.Status != tt.status || body != tt.body {
			t.Errorf("%s with %d redirects: %v %q, %v, want %d %q", tt.path, tt.redirects, head, body, err, tt.status, tt.body)
		}
	}
	for _, addr := range l.dialled {
		if addr != "10.0.0.5:80" {
			t.Errorf("dialled %s", addr)
		}
	}

	// What proves who asks stays with its host; the rest travels.
	reveal := func(_ context.Context, refs ...string) (map[string]secret.Value, error) {
		return map[string]secret.Value{refs[0]: secret.New([]byte("s3cret"))}, nil
	}
	for _, tt := range []struct {
		method, path, want string
	}{
		{"GET", "/other", "GET [] plain"},
		{"POST", "/other?s=302", "GET [] plain"},
		{"POST", "/other?s=303", "GET [] plain"},
		{"POST", "/other?s=307", "POST [] plainpayload"},
		{"PUT", "/other?s=308", "PUT [] plainpayload"},
		{"HEAD", "/other?s=303", ""},
	} {
		seen = nil
		req := &agentv1.HttpProxyRequest{Method: tt.method, Url: "http://10.0.0.5" + tt.path, Redirects: 1, Headers: []*agentv1.HttpHeader{
			{Name: "Authorization", Value: "secret://t/a"}, {Name: "Cookie", Value: "secret://t/c"}, {Name: "X-Own", Value: "secret://t/o"}, {Name: "X-Plain", Value: "plain"}}}
		if tt.method == "POST" || tt.method == "PUT" {
			req.Body = []byte("payload")
		}
		out := &tunnel{}
		_, err := l.proxy.Do(t.Context(), req, reveal, func(context.Context) (io.ReadWriteCloser, error) { return out, nil })
		if err != nil || !strings.HasSuffix(out.String(), tt.want) || strings.Contains(out.String(), "s3cret") {
			t.Errorf("%s %s: %q, %v, want %q", tt.method, tt.path, out.String(), err, tt.want)
		}
		if len(seen) != 1 || !strings.Contains(seen[0], " s3cret ") {
			t.Errorf("%s %s: the first host saw %q, want the secret", tt.method, tt.path, seen)
		}
	}
	if strings.Contains(l.logs.String(), "s3cret") {
		t.Error("the log holds a secret")
	}
}

// TestSecretsOnlyForAllowedHosts: nothing is fetched for a host that is refused.
func TestSecretsOnlyForAllowedHosts(t *testing.T) {
	l := newLAN(t)
	asked := 0
	reveal := func(context.Context, ...string) (map[string]secret.Value, error) {
		asked++
		return map[string]secret.Value{"secret://t/a": secret.New([]byte("a\r\nb"))}, nil
	}
	req := &agentv1.HttpProxyRequest{Method: "GET", Url: "http://127.0.0.1/", Headers: []*agentv1.HttpHeader{{Name: "Authorization", Value: "secret://t/a"}}}
	line := func(context.Context) (io.ReadWriteCloser, error) { return &tunnel{}, nil }
	if _, err := l.proxy.Do(t.Context(), req, reveal, line); errs.CodeOf(err) != errs.OperationNotAllowed || asked != 0 {
		t.Errorf("refused host: %v, %d secrets fetched", err, asked)
	}
	req.Url = "http://10.0.0.5/"
	if _, err := l.proxy.Do(t.Context(), req, reveal, line); errs.CodeOf(err) != errs.CredentialsUnavailable || asked != 1 || len(l.dialled) > 0 {
		t.Errorf("a secret that cannot stand in a header: %v, dialled %v", err, l.dialled)
	}
}

// TestPin: the pinned key is enough, and another is pin-mismatch; without a pin the
// authorities decide.
func TestPin(t *testing.T) {
	l := newLAN(t)
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "fine") }))
	t.Cleanup(s.Close)
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	l.servers["10.0.0.5:443"] = s.Listener.Addr().String()
	sum := sha256.Sum256(s.Certificate().RawSubjectPublicKeyInfo)
	for _, tt := range []struct {
		pin  string
		want errs.Code
	}{{"", errs.Unreachable}, {hex.EncodeToString(sum[:]), ""}, {strings.Repeat("ab", 32), errs.PinMismatch}} {
		_, body, _, err := l.ask(&agentv1.HttpProxyRequest{Url: "https://10.0.0.5/", TlsSpkiSha256: tt.pin})
		if errs.CodeOf(err) != tt.want || err == nil && body != "fine" {
			t.Errorf("pin %q: %q, %v, want %s", tt.pin, body, err, tt.want)
		}
	}
}

// TestBounds: a body over the limit is an error, one of just that size is not, nor
// is a head without end.
func TestBounds(t *testing.T) {
	l := newLAN(t)
	l.serve("10.0.0.5:80", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/head" {
			for i := range 100 {
				w.Header().Set(fmt.Sprint("X-", i), strings.Repeat("y", 1000))
			}
		}
		io.WriteString(w, strings.Repeat("x", 1000))
	})
	for _, tt := range []struct {
		path string
		max  uint64
		want errs.Code
	}{{"/", 1000, ""}, {"/", 999, errs.NoSpace}, {"/head", 0, errs.Unreachable}} {
		if _, body, result, err := l.ask(&agentv1.HttpProxyRequest{Url: "http://10.0.0.5" + tt.path, MaxBodyBytes: tt.max}); errs.CodeOf(err) != tt.want || err == nil && (len(body) != 1000 || result.BodyBytes != 1000) {
			t.Errorf("%s with at most %d bytes: %d bytes, %v, want %s", tt.path, tt.max, len(body), err, tt.want)
		}
	}
}
