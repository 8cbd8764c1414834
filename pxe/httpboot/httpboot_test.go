package httpboot

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/pxe/boots"
	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

const (
	macA, macA2, macB, macC = "52:54:00:00:00:0a", "52:54:00:00:00:1a", "52:54:00:00:00:0b", "52:54:00:00:00:0c"
	addrA, addrB, addrC     = "10.0.0.10", "10.0.0.11", "10.0.0.12"
	base                    = "http://10.0.0.1"
)

var digest = strings.Repeat("ab", 32)

type memory struct{ *bytes.Reader }

func (memory) Close() error { return nil }

type source map[string]string

func (s source) Open(name string) (files.File, error) {
	if c, ok := s[name]; ok {
		return memory{bytes.NewReader([]byte(c))}, nil
	}
	return nil, errors.New("open /secret/" + name)
}

type rig struct {
	h       *Handler
	now     time.Time
	byMAC   map[string]*pxev1.Machine
	arch    decide.Arch
	booting Booting
	minted  int
	mu      sync.Mutex // of what follows
	stages  []string
}

func newRig(t testing.TB) *rig {
	counts, err := boots.Open(t.TempDir(), func(string) (string, bool) { return "", false })
	if err != nil {
		t.Fatal(err)
	}
	a := &pxev1.Machine{MachineId: "node_a", Macs: []string{macA, macA2}, Action: pxev1.Action_ACTION_RAMDISK, Purpose: "deploy",
		WindowId: "w1", WindowUntilMs: 2_000_000, Artifacts: []string{digest}}
	b := &pxev1.Machine{MachineId: "node_b", Macs: []string{macB}, Action: pxev1.Action_ACTION_LOCAL_DISK}
	r := &rig{arch: decide.X64, now: time.UnixMilli(1_000_000), byMAC: map[string]*pxev1.Machine{macA: a, macA2: a, macB: b}}
	leases := map[string]string{addrA: macA, addrB: macB, addrC: macC}
	r.h = New(Config{
		Holder: func(ip netip.Addr) (string, bool) { mac, ok := leases[ip.String()]; return mac, ok },
		Request: func(mac string) decide.Request {
			ask := decide.Request{Machine: r.byMAC[mac], MAC: mac, Now: r.now, Client: decide.Client{Arch: r.arch}}
			if m := ask.Machine; m != nil {
				ask.Boots, ask.Done = counts.Of(m.MachineId, m.WindowId)
			}
			return ask
		},
		Counts:  counts,
		Files:   source{files.Kernel: "the kernel", files.Initrd: "initrd of 19 bytes.", files.UEFILoader: "the loader"},
		Cmdline: "console=ttyS0",
		Boot: func(_ context.Context, b Booting) ([]byte, error) {
			r.booting = b
			r.minted++
			return []byte(strings.Repeat("v", r.minted)), nil
		},
		Artifacts: func(_ context.Context, sha256 string) (io.ReadSeekCloser, int64, error) {
			return memory{bytes.NewReader([]byte("artifact"))}, 8, nil
		},
		Stage: func(mac string, m *pxev1.Machine, stage, detail string) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.stages = append(r.stages, mac+" "+m.MachineId+" "+stage)
		},
		Now: func() time.Time { return r.now }, Log: slog.New(slog.DiscardHandler),
	})
	return r
}

// told are the stages, of a handler that may still run.
func (r *rig) told() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Join(r.stages, ",")
}

func (r *rig) do(method, addr, path string, header ...string) *httptest.ResponseRecorder {
	req := httptest.NewRequest(method, base+"/", nil)
	req.URL.Path = path
	req.RemoteAddr = addr + ":1024"
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	r.h.ServeHTTP(w, req)
	return w
}

// begin fetches the script and returns the path prefix of its boot.
func (r *rig) begin(t *testing.T) string {
	t.Helper()
	w := r.do("GET", addrA, "/boot/52-54-00-00-00-0a/script.ipxe")
	_, rest, ok := strings.Cut(w.Body.String(), "kernel "+base)
	path, _, ok2 := strings.Cut(rest, "vmlinuz")
	if w.Code != 200 || !ok || !ok2 {
		t.Fatalf("script = %d %q", w.Code, w.Body)
	}
	return path
}

func TestBoot(t *testing.T) {
	r := newRig(t)
	prefix := r.begin(t)
	for _, tt := range []struct{ path, want string }{
		{prefix + "vmlinuz", "the kernel"},
		{prefix + "ramdisk.img", "initrd of 19 bytes.\x00"},
		{prefix + "boot.img", "v"},
		{prefix + "boot.img", "v"}, // the same boot: the same voucher
		{"//boot//52-54-00-00-00-0a//snponly.efi", "the loader"},
		{"/boot/52:54:00:00:00:0A/snponly.efi", "the loader"},
		{"/artifacts/" + digest, "artifact"},
	} {
		head := r.do("HEAD", addrA, tt.path)
		if head.Code != 200 || head.Body.Len() != 0 || head.Result().ContentLength != int64(len(tt.want)) {
			t.Errorf("HEAD %s = %d, %d bytes, length %d, want 200, 0, %d", tt.path, head.Code, head.Body.Len(), head.Result().ContentLength, len(tt.want))
		}
		if w := r.do("GET", addrA, tt.path); w.Code != 200 || w.Body.String() != tt.want {
			t.Errorf("GET %s = %d %q, want %q", tt.path, w.Code, w.Body, tt.want)
		}
	}
	if r.minted != 1 {
		t.Errorf("%d vouchers minted for one boot, want 1", r.minted)
	}
	if w := r.do("GET", addrA, prefix+"ramdisk.img", "Range", "bytes=17-"); w.Code != 206 || w.Body.String() != "s.\x00" {
		t.Errorf("GET with Range = %d %q, want 206 \"s.\\x00\"", w.Code, w.Body)
	}
	if again := r.begin(t); again == prefix {
		t.Error("two boots share a token")
	} else if w := r.do("GET", addrA, again+"boot.img"); w.Body.String() != "vv" {
		t.Errorf("boot.img of the next boot = %q, want a new one", w.Body)
	}
	got := strings.Join(r.stages, ",")
	for _, want := range []string{"script", "kernel", "initrd", "boot", "http-loader"} {
		if !strings.Contains(got, macA+" node_a "+want) {
			t.Errorf("stages = %s, want %s among them", got, want)
		}
	}
}

func TestOtherPortOfTheMachine(t *testing.T) {
	r := newRig(t)
	if w := r.do("GET", addrA, "/boot/52-54-00-00-00-1a/script.ipxe"); w.Code != 200 {
		t.Errorf("script by the machine's other MAC = %d, want 200", w.Code)
	}
}

func TestRefused(t *testing.T) {
	r := newRig(t)
	prefix := r.begin(t)
	for _, tt := range []struct {
		name, method, addr, path string
		want                     int
	}{
		{"no lease", "GET", "10.0.0.99", "/boot/52-54-00-00-00-0a/script.ipxe", 403},
		{"unknown machine", "GET", addrC, "/boot/52-54-00-00-00-0c/script.ipxe", 404},
		{"another's script", "GET", addrB, "/boot/52-54-00-00-00-0a/script.ipxe", 403},
		{"another's voucher", "GET", addrB, prefix + "boot.img", 403},
		{"made-up token", "GET", addrA, "/boot/52-54-00-00-00-0a/abc/boot.img", 403},
		{"another file", "GET", addrA, prefix + "shadow", 404},
		{"loader for local disk", "GET", addrB, "/boot/52-54-00-00-00-0b/snponly.efi", 404},
		{"artifact not listed", "GET", addrA, "/artifacts/" + strings.Repeat("cd", 32), 403},
		{"artifact for local disk", "GET", addrB, "/artifacts/" + digest, 403},
		{"outside", "GET", addrA, "/etc/passwd", 404},
		{"dots", "GET", addrA, "/boot/52-54-00-00-00-0a/../../etc/passwd", 404},
		{"root", "GET", addrA, "/", 404},
		{"no MAC", "GET", addrA, "/boot/x/script.ipxe", 404},
		{"POST", "POST", addrA, "/boot/52-54-00-00-00-0a/script.ipxe", 405},
	} {
		w := r.do(tt.method, tt.addr, tt.path)
		if w.Code != tt.want || strings.Contains(w.Body.String(), "secret") || w.Header().Get("Location") != "" {
			t.Errorf("%s: %s %s = %d %q, want %d", tt.name, tt.method, tt.path, w.Code, w.Body, tt.want)
		}
	}
	if r.minted != 0 {
		t.Errorf("%d vouchers minted by refused requests, want 0", r.minted)
	}
}

// TestDone: the machine's own post ends its window, and nothing else does.
func TestDone(t *testing.T) {
	r := newRig(t)
	prefix := r.begin(t)
	if w := r.do("GET", addrA, prefix+"boot.img"); w.Code != 200 {
		t.Fatalf("boot.img = %d", w.Code)
	}
	report := strings.TrimPrefix(r.booting.Report, base)
	if report == prefix || r.booting.Base != base {
		t.Fatalf("the archive was made with %+v, want another token than the files'", r.booting)
	}
	for _, tt := range []struct {
		name, addr, path string
		want             int
	}{
		{"another machine's", addrB, report + "done", 403},
		{"a made-up token", addrA, "/boot/52-54-00-00-00-0a/abc/done", 403},
		{"the files' token", addrA, prefix + "done", 403},
		{"another report", addrA, report + "other", 405},
		{"progress", addrA, report + "progress", 204},
	} {
		if w := r.do("POST", tt.addr, tt.path); w.Code != tt.want {
			t.Errorf("POST of %s = %d, want %d", tt.name, w.Code, tt.want)
		}
	}
	script := func() string { return r.do("GET", addrA, "/boot/52-54-00-00-00-0a/script.ipxe").Body.String() }
	if !strings.Contains(script(), "vmlinuz") {
		t.Errorf("script before done = %q, want the ramdisk's", script())
	}
	for range perMinute {
		r.h.stages.More(macA, r.now) // it has told all that is taken in a minute
	}
	if w := r.do("POST", addrA, report+"done"); w.Code != 204 {
		t.Errorf("POST done = %d, want 204", w.Code)
	}
	if strings.Contains(script(), "vmlinuz") {
		t.Errorf("script after done = %q, want one that exits", script())
	}
	if w := r.do("GET", addrA, "/boot/52-54-00-00-00-0a/snponly.efi"); w.Code != 404 {
		t.Errorf("loader after done = %d, want 404", w.Code)
	}
	// The next window is a new one, with another token.
	next := proto.CloneOf(r.byMAC[macA])
	next.WindowId = "w2"
	r.byMAC[macA] = next
	if !strings.Contains(script(), "vmlinuz") {
		t.Errorf("script in the next window = %q, want the ramdisk's", script())
	}
	if w := r.do("POST", addrA, report+"done"); w.Code != 403 {
		t.Errorf("the old window's done in the next = %d, want 403", w.Code)
	}
	if got := strings.Join(r.stages, ","); strings.Count(got, "node_a done") != 1 || strings.Count(got, "node_a progress") != 1 {
		t.Errorf("stages = %s, want done and progress once", got)
	}
}

// TestBoundOnBoots: a machine that never says that it is done is left to its disk
// after so many boots; the last boot still gets all of its files.
func TestBoundOnBoots(t *testing.T) {
	r := newRig(t)
	r.byMAC[macA].MaxBoots = 2
	for i := range 2 {
		prefix := r.begin(t)
		for range 2 { // asked twice, it is the same boot
			if w := r.do("GET", addrA, prefix+"boot.img"); w.Code != 200 {
				t.Fatalf("boot %d: boot.img = %d", i+1, w.Code)
			}
		}
		if w := r.do("GET", addrA, prefix+"vmlinuz"); w.Code != 200 {
			t.Errorf("boot %d: vmlinuz after its boot.img = %d, want 200", i+1, w.Code)
		}
	}
	if w := r.do("GET", addrA, "/boot/52-54-00-00-00-0a/script.ipxe"); strings.Contains(w.Body.String(), "vmlinuz") {
		t.Errorf("the third script = %q, want one that exits", w.Body)
	}
}

func TestImages(t *testing.T) {
	window := func(m *pxev1.Machine) *pxev1.Machine {
		m.MachineId, m.Macs, m.WindowId, m.WindowUntilMs = "node_a", []string{macA}, "w1", 2_000_000
		return m
	}
	for name, tt := range map[string]struct {
		machine *pxev1.Machine
		arch    decide.Arch
		command string
		file    string
		kind    string
	}{
		"iso":           {&pxev1.Machine{Action: pxev1.Action_ACTION_ISO, Purpose: "iso", Iso: &pxev1.Iso{Sha256: digest, Size: 8, Name: "rescue"}}, decide.BIOS, "sanhook", "rescue.iso", "application/vnd.efi-iso"},
		"iso, odd name": {&pxev1.Machine{Action: pxev1.Action_ACTION_ISO, Purpose: "iso", Iso: &pxev1.Iso{Sha256: digest, Size: 8, Name: "a b/c.iso"}}, decide.X64, "sanhook", "disc.iso", "application/vnd.efi-iso"},
		"kernel":        {&pxev1.Machine{Action: pxev1.Action_ACTION_KERNEL, Purpose: "boot", Kernel: &pxev1.Kernel{Sha256: digest, InitrdSha256: digest, Cmdline: "quiet"}}, decide.X64, "kernel", "kernel", "application/octet-stream"},
		"uki":           {&pxev1.Machine{Action: pxev1.Action_ACTION_UKI, Purpose: "boot", Kernel: &pxev1.Kernel{Sha256: digest}}, decide.X64, "kernel", "boot.efi", "application/efi"},
	} {
		r := newRig(t)
		r.arch = tt.arch
		r.byMAC[macA] = window(tt.machine)
		text := r.do("GET", addrA, "/boot/52-54-00-00-00-0a/script.ipxe").Body.String()
		_, rest, _ := strings.Cut(text, tt.command+" ")
		url := ""
		for _, word := range strings.Fields(rest) {
			if strings.HasPrefix(word, base) {
				url = strings.TrimPrefix(word, base)
				break
			}
		}
		if !strings.HasSuffix(url, "/"+tt.file) {
			t.Errorf("%s: script = %q, want %s of %s", name, text, tt.command, tt.file)
			continue
		}
		w := r.do("GET", addrA, url, "Range", "bytes=2-3")
		if w.Code != 206 || w.Body.String() != "ti" || w.Header().Get("Content-Type") != tt.kind {
			t.Errorf("%s: Range of %s = %d %q %q, want two bytes of %s", name, url, w.Code, w.Body, w.Header().Get("Content-Type"), tt.kind)
		}
		if w := r.do("GET", addrB, url); w.Code != 403 {
			t.Errorf("%s by another machine = %d, want 403", name, w.Code)
		}
		if w := r.do("GET", addrA, path.Dir(url)+"/vmlinuz"); w.Code != 404 {
			t.Errorf("%s: the ramdisk's kernel = %d, want 404", name, w.Code)
		}
	}
	r := newRig(t)
	m := window(&pxev1.Machine{Action: pxev1.Action_ACTION_ISO, Purpose: "iso", Iso: &pxev1.Iso{Sha256: digest, Size: 8, Name: "rescue"}})
	r.byMAC[macA] = m
	url := r.h.ImageURL(base, macA, m, decide.HTTPISO)
	if again := r.h.ImageURL(base, macA, m, decide.HTTPISO); again != url {
		t.Errorf("ImageURL = %s, then %s, want the same for each packet", url, again)
	}
	if w := r.do("GET", addrA, strings.TrimPrefix(url, base)); w.Code != 200 || w.Body.String() != "artifact" {
		t.Errorf("GET %s = %d %q, want the image", url, w.Code, w.Body)
	}
	if next := r.h.ImageURL(base, macA, m, decide.HTTPISO); next == url {
		t.Error("ImageURL after a boot is the old one's")
	}
}

// TestRanges are what loaders send; what they cannot mean gets the whole.
func TestRanges(t *testing.T) {
	r := newRig(t)
	path := "/artifacts/" + digest
	for _, tt := range []struct {
		in   string
		code int
		want string
	}{
		{"bytes=0-", 206, "artifact"}, {"bytes=2-3", 206, "ti"}, {"bytes=6-600", 206, "ct"}, {"bytes=-3", 206, "act"},
		{"bytes=4294967296-", 416, ""}, {"bytes=8-", 416, ""},
		{"bytes=", 200, "artifact"}, {"bytes=a-b", 200, "artifact"}, {"0-3", 200, "artifact"}, {"bytes=0-1,3-4", 200, "artifact"}, {"bytes=-", 200, "artifact"},
	} {
		w := r.do("GET", addrA, path, "Range", tt.in)
		if w.Code != tt.code || tt.want != "" && w.Body.String() != tt.want {
			t.Errorf("Range %q = %d %q, want %d %q", tt.in, w.Code, w.Body, tt.code, tt.want)
		}
		if tt.code != 416 && w.Header().Get("Content-Length") == "" {
			t.Errorf("Range %q: no Content-Length", tt.in)
		}
	}
}

// TestBase: URLs name the address that the client used.
func TestBase(t *testing.T) {
	local := &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 8080}
	for host, want := range map[string]string{
		"10.5.0.1": "http://10.5.0.1", "10.5.0.1:80": "http://10.5.0.1", "10.5.0.1:8080": "http://10.5.0.1:8080",
		"evil.example": "http://10.0.0.1:8080", "": "http://10.0.0.1:8080", "10.0.0.1/x": "http://10.0.0.1:8080", "10.0.0.1:x": "http://10.0.0.1:8080",
		"[fd00::1]": "http://[fd00::1]", "[fd00::1]:80": "http://[fd00::1]", "[fd00::1]:8080": "http://[fd00::1]:8080",
		"[fe80::1%25eth0]": "http://10.0.0.1:8080", "[fe80::1%eth0]:80": "http://10.0.0.1:8080", "[::ffff:10.0.0.1]": "http://10.0.0.1:8080", "[10.0.0.1]": "http://10.0.0.1:8080",
	} {
		req := httptest.NewRequest("GET", "/", nil)
		req.Host = host
		req = req.WithContext(context.WithValue(req.Context(), http.LocalAddrContextKey, net.Addr(local)))
		if got := baseOf(req); got != want {
			t.Errorf("baseOf(%q) = %q, want %q", host, got, want)
		}
	}
}

func TestReturns(t *testing.T) {
	r := newRig(t)
	r.arch = decide.BIOS
	var got []bool
	for range 3 {
		got = append(got, strings.Contains(r.do("GET", addrB, "/boot/52-54-00-00-00-0b/script.ipxe").Body.String(), "sanboot"))
		r.now = r.now.Add(time.Minute)
	}
	if want := []bool{false, false, true}; !slices.Equal(got, want) {
		t.Errorf("the first disk is booted directly: %v, want %v", got, want)
	}
}

// counting is a connection that says what it was handed.
type counting struct {
	*net.TCPConn
	files chan bool
}

func (c counting) ReadFrom(r io.Reader) (int64, error) {
	l, ok := r.(*io.LimitedReader)
	if ok {
		_, ok = l.R.(*os.File)
	}
	c.files <- ok
	return c.TCPConn.ReadFrom(r)
}

type countingListener struct {
	net.Listener
	files chan bool
}

func (l countingListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return counting{conn.(*net.TCPConn), l.files}, nil
}

// TestSendfile: a plain file reaches the connection as a file, piece by piece, so
// that the kernel can send it; the bytes are right.
func TestSendfile(t *testing.T) {
	dir := t.TempDir()
	want := bytes.Repeat([]byte("0123456789abcdef"), 3*piece/16)
	if err := os.MkdirAll(filepath.Join(dir, "ipxe"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, files.UEFILoader), want, 0o644); err != nil {
		t.Fatal(err)
	}
	r := newRig(t)
	r.h.cfg.Files = files.Dir(dir)
	r.h.cfg.Holder = func(netip.Addr) (string, bool) { return macA, true }
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	handed := make(chan bool, 100)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, countingListener{ln, handed}, r.h, slog.New(slog.DiscardHandler)) }()
	resp, err := http.Get("http://" + ln.Addr().String() + "/boot/52-54-00-00-00-0a/snponly.efi")
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes, %v, want the file's %d", len(got), err, len(want))
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	close(handed)
	n := 0
	for file := range handed {
		if n++; !file {
			t.Error("a piece was handed on as something else than a file")
		}
	}
	if n < 3 {
		t.Errorf("the connection was handed %d pieces, want at least 3", n)
	}
}

func TestLocalDiskExits(t *testing.T) {
	r := newRig(t)
	if w := r.do("GET", addrB, "/boot/52-54-00-00-00-0b/script.ipxe"); w.Code != 200 || !strings.Contains(w.Body.String(), "exit") || strings.Contains(w.Body.String(), "kernel") {
		t.Errorf("script for local disk = %d %q, want one that exits", w.Code, w.Body)
	}
}

func TestWindow(t *testing.T) {
	r := newRig(t)
	prefix := r.begin(t)
	// A new window: the boot of the old one gets no voucher of the new.
	next := &pxev1.Machine{MachineId: "node_a", Macs: []string{macA}, Action: pxev1.Action_ACTION_RAMDISK, Purpose: "inspect", WindowId: "w2", WindowUntilMs: 2_000_000}
	old := r.byMAC[macA]
	r.byMAC[macA] = next
	if w := r.do("GET", addrA, prefix+"boot.img"); w.Code != 403 {
		t.Errorf("boot.img across windows = %d, want 403", w.Code)
	}
	// The window's end: no voucher, the script exits, a running agent still gets its artifact.
	r.byMAC[macA] = old
	r.now = time.UnixMilli(2_000_000)
	if w := r.do("GET", addrA, prefix+"boot.img"); w.Code != 404 {
		t.Errorf("boot.img after the window = %d, want 404", w.Code)
	}
	if w := r.do("GET", addrA, "/boot/52-54-00-00-00-0a/script.ipxe"); strings.Contains(w.Body.String(), "kernel") {
		t.Errorf("script after the window = %q, want one that exits", w.Body)
	}
	if w := r.do("GET", addrA, "/artifacts/"+digest); w.Code != 200 {
		t.Errorf("artifact after the window = %d, want 200", w.Code)
	}
	if r.minted != 0 {
		t.Errorf("%d vouchers minted, want 0", r.minted)
	}
}

func TestFailuresAreTemporary(t *testing.T) {
	r := newRig(t)
	prefix := r.begin(t)
	r.h.cfg.Boot = func(context.Context, Booting) ([]byte, error) { return nil, errors.New("not enrolled") }
	r.h.cfg.Files = source{}
	for _, path := range []string{prefix + "boot.img", prefix + "vmlinuz", prefix + "ramdisk.img"} {
		if w := r.do("GET", addrA, path); w.Code != 503 || strings.Contains(w.Body.String(), "secret") {
			t.Errorf("GET %s = %d %q, want 503 without a path", path, w.Code, w.Body)
		}
	}
	if got := strings.Join(r.stages, ","); strings.Contains(got, "kernel") || strings.Contains(got, "initrd") {
		t.Errorf("stages = %s: a failed fetch is told as done", got)
	}
}

func TestBootsAreBounded(t *testing.T) {
	r := newRig(t)
	first := r.begin(t)
	for range 3 * perMachine {
		r.now = r.now.Add(time.Second)
		r.begin(t)
	}
	if n := len(r.h.boots.byToken); n != perMachine {
		t.Errorf("%d boots kept, want %d", n, perMachine)
	}
	if w := r.do("GET", addrA, first+"vmlinuz"); w.Code != 403 {
		t.Errorf("the oldest boot's kernel = %d, want 403", w.Code)
	}
}

// TestStrangersEndNobodysBoot: however many machines somebody makes up, the boots of
// assigned ones go on.
func TestStrangersEndNobodysBoot(t *testing.T) {
	var bs running
	bs.byToken = map[string]*boot{}
	now := time.Now()
	var assigned []string
	for i := range mostBoots - 10 {
		assigned = append(assigned, bs.begin(&pxev1.Machine{MachineId: fmt.Sprint("node_", i)}, now, decide.IPXE))
	}
	for i := range 200 {
		bs.begin(decide.Stranger(fmt.Sprintf("52:54:00:00:00:%02x", i), nil), now, decide.IPXE)
	}
	if n := len(bs.byToken); n != mostBoots {
		t.Errorf("%d boots are kept, want %d", n, mostBoots)
	}
	for i, token := range assigned {
		if bs.byToken[token] == nil {
			t.Fatalf("the boot of assigned machine %d was ended for a stranger's", i)
		}
	}
}

// TestStagesAreBounded has a machine fetch its script in a loop: not every time
// is told of, and other machines' stages are.
func TestStagesAreBounded(t *testing.T) {
	r := newRig(t)
	for range 1000 {
		r.do("GET", addrB, "/boot/52-54-00-00-00-0b/script.ipxe")
	}
	if len(r.stages) != perMinute {
		t.Errorf("%d stages of one machine in a minute, want %d", len(r.stages), perMinute)
	}
	r.begin(t)
	r.now = r.now.Add(time.Minute)
	r.do("GET", addrB, "/boot/52-54-00-00-00-0b/script.ipxe")
	if want := perMinute + 2; len(r.stages) != want {
		t.Errorf("%d stages with another machine's and the next minute's, want %d", len(r.stages), want)
	}
}

// crowd has machines that nobody enrolled hold the addresses 10.1.x.y, and says how
// many requests of theirs, each in turn, are answered with that status.
func (r *rig) crowd(strangers, each int, method, path string, code int) (n int) {
	lease := r.h.cfg.Holder
	r.h.cfg.CountsFor = func(ip netip.Addr) (string, bool) {
		mac, _ := r.h.cfg.Holder(ip)
		return mac, r.byMAC[mac] != nil && !decide.IsStranger(r.byMAC[mac].MachineId)
	}
	r.h.cfg.Holder = func(ip netip.Addr) (string, bool) {
		if a := ip.As4(); a[1] == 1 {
			mac := fmt.Sprintf("52:54:00:01:%02x:%02x", a[2], a[3])
			if r.byMAC[mac] == nil {
				r.byMAC[mac] = decide.Stranger(mac, &pxev1.Unknown{Inspect: true, WindowId: "w1", WindowUntilMs: 2_000_000})
			}
			return mac, true
		}
		return lease(ip)
	}
	for range each {
		for i := range strangers {
			addr := fmt.Sprintf("10.1.%d.%d", i/256, i%256)
			mac, _ := r.h.cfg.Holder(netip.MustParseAddr(addr))
			m := r.byMAC[mac]
			token := r.h.cfg.Counts.Token(m.MachineId, m.WindowId)
			if r.do(method, addr, "/boot/"+dashed(mac)+strings.ReplaceAll(path, "TOKEN", token)).Code == code {
				n++
			}
		}
	}
	return n
}

// TestReportsAreBounded: of one machine so many reports are taken in a minute, and of
// all that nobody enrolled, of whom one host may be all; of others not one fewer.
func TestReportsAreBounded(t *testing.T) {
	r := newRig(t)
	report := "/boot/52-54-00-00-00-0a/" + r.h.cfg.Counts.Token("node_a", "w1") + "/progress"
	posts := func(n int) (taken, refused int) {
		for range n {
			switch r.do("POST", addrA, report).Code {
			case 204:
				taken++
			case 429:
				refused++
			}
		}
		return taken, refused
	}
	if n := r.crowd(100, perMinute, "POST", "/TOKEN/done", 204); n != ofStrangers {
		t.Errorf("%d reports of strangers are taken in a minute, want %d", n, ofStrangers)
	}
	if taken, refused := posts(3 * perMinute); taken != perMinute || refused != 2*perMinute {
		t.Errorf("of %d reports of one machine %d were taken and %d refused, want %d taken", 3*perMinute, taken, refused, perMinute)
	}
	r.now = r.now.Add(time.Minute)
	if taken, _ := posts(1); taken != 1 {
		t.Error("a report in the next minute is not taken")
	}
}

// TestStrangersHideNoRefusal: what is refused to an enrolled machine is in the log
// though others are refused without end.
func TestStrangersHideNoRefusal(t *testing.T) {
	var log bytes.Buffer
	r := newRig(t)
	r.h.cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
	r.crowd(100, perMinute, "GET", "/none", 404)
	if n := strings.Count(log.String(), "\n"); n != ofStrangers {
		t.Errorf("%d refusals of strangers are logged in a minute, want %d", n, ofStrangers)
	}
	log.Reset()
	for range 2 * perMinute {
		r.do("GET", addrA, "/boot/52-54-00-00-00-0a/none")
	}
	if n := strings.Count(log.String(), "\n"); n != perMinute {
		t.Errorf("%d refusals of an enrolled machine are logged in a minute, want %d", n, perMinute)
	}
}

func TestPad(t *testing.T) {
	for n := range 9 {
		content := strings.Repeat("x", n)
		want := content + strings.Repeat("\x00", (4-n%4)%4)
		if err := iotest.TestReader(pad(strings.NewReader(content), int64(n), 4), []byte(want)); err != nil {
			t.Errorf("pad(%d bytes): %v", n, err)
		}
	}
	if _, err := io.ReadAll(pad(strings.NewReader("ab"), 5, 4)); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("pad(a file that shrank) = %v, want %v", err, io.ErrUnexpectedEOF)
	}
}

func TestServe(t *testing.T) {
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	entered := make(chan struct{}, 1)
	go func() {
		done <- Serve(ctx, ln, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/hang" {
				entered <- struct{}{}
				<-r.Context().Done()
			}
		}), slog.New(slog.DiscardHandler))
	}()
	if resp, err := http.Get("http://" + ln.Addr().String() + "/"); err != nil || resp.StatusCode != 200 {
		t.Fatalf("GET = %v, %v", resp, err)
	} else {
		resp.Body.Close()
	}
	go func() {
		if resp, err := http.Get("http://" + ln.Addr().String() + "/hang"); err == nil {
			resp.Body.Close()
		}
	}()
	<-entered
	cancel()
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("Serve = %v, want nil", err)
		}
	case <-time.After(5 * grace):
		t.Fatal("Serve does not end with its context")
	}
}

func TestCapped(t *testing.T) {
	c := newCapped(nil, 3, 2)
	a, b := host{addrA, true}, host{addrB, true}
	for i, tt := range []struct {
		host host
		want bool
	}{{a, true}, {a, true}, {a, false}, {b, true}, {b, false}} {
		if got := c.take(tt.host); got != tt.want {
			t.Errorf("take %d (%v) = %v, want %v", i, tt.host, got, tt.want)
		}
	}
	c.count(a, -1)
	if !c.take(b) {
		t.Error("take after one left = false, want true")
	}
}

func FuzzPath(f *testing.F) {
	f.Add("/boot/52-54-00-00-00-0a/script.ipxe")
	f.Add("//artifacts//" + digest)
	f.Add("/boot/52-54-00-00-00-0a/abc/boot.img")
	r := newRig(f)
	f.Fuzz(func(t *testing.T, path string) {
		w := r.do("GET", addrA, path)
		if w.Code >= 300 && w.Code < 400 || r.minted != 0 {
			t.Errorf("GET %q = %d, minted %d", path, w.Code, r.minted)
		}
	})
}
