package httpboot

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"testing/iotest"
	"time"

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
	h      *Handler
	now    time.Time
	byMAC  map[string]*pxev1.Machine
	minted int
	stages []string
}

func newRig() *rig {
	a := &pxev1.Machine{MachineId: "node_a", Macs: []string{macA, macA2}, Action: pxev1.Action_ACTION_RAMDISK, Purpose: "deploy",
		WindowId: "w1", WindowUntilMs: 2_000_000, Artifacts: []string{digest}}
	b := &pxev1.Machine{MachineId: "node_b", Macs: []string{macB}, Action: pxev1.Action_ACTION_LOCAL_DISK}
	r := &rig{now: time.UnixMilli(1_000_000), byMAC: map[string]*pxev1.Machine{macA: a, macA2: a, macB: b}}
	leases := map[string]string{addrA: macA, addrB: macB, addrC: macC}
	r.h = New(Config{
		Base:    base,
		Holder:  func(ip netip.Addr) (string, bool) { mac, ok := leases[ip.String()]; return mac, ok },
		ByMAC:   func(mac string) (*pxev1.Machine, bool) { m, ok := r.byMAC[mac]; return m, ok },
		Files:   source{files.Kernel: "the kernel", files.Initrd: "initrd of 19 bytes.", files.UEFILoader: "the loader"},
		Cmdline: "console=ttyS0",
		Boot: func(context.Context, *pxev1.Machine) ([]byte, error) {
			r.minted++
			return []byte(strings.Repeat("v", r.minted)), nil
		},
		Artifacts: func(_ context.Context, sha256 string) (io.ReadSeekCloser, int64, error) {
			return memory{bytes.NewReader([]byte("artifact"))}, 8, nil
		},
		Stage: func(mac string, m *pxev1.Machine, stage, detail string) {
			r.stages = append(r.stages, mac+" "+m.MachineId+" "+stage)
		},
		Now: func() time.Time { return r.now }, Log: slog.New(slog.DiscardHandler),
	})
	return r
}

func (r *rig) do(method, addr, path string, header ...string) *httptest.ResponseRecorder {
	req := httptest.NewRequest(method, "http://box/", nil)
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
	r := newRig()
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
	r := newRig()
	if w := r.do("GET", addrA, "/boot/52-54-00-00-00-1a/script.ipxe"); w.Code != 200 {
		t.Errorf("script by the machine's other MAC = %d, want 200", w.Code)
	}
}

func TestRefused(t *testing.T) {
	r := newRig()
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

func TestLocalDiskExits(t *testing.T) {
	r := newRig()
	if w := r.do("GET", addrB, "/boot/52-54-00-00-00-0b/script.ipxe"); w.Code != 200 || !strings.Contains(w.Body.String(), "exit") || strings.Contains(w.Body.String(), "kernel") {
		t.Errorf("script for local disk = %d %q, want one that exits", w.Code, w.Body)
	}
}

func TestWindow(t *testing.T) {
	r := newRig()
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
	r := newRig()
	prefix := r.begin(t)
	r.h.cfg.Boot = func(context.Context, *pxev1.Machine) ([]byte, error) { return nil, errors.New("not enrolled") }
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
	r := newRig()
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

// TestStagesAreBounded has a machine fetch its script in a loop: not every time
// is told of, and other machines' stages are.
func TestStagesAreBounded(t *testing.T) {
	r := newRig()
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
	a, b := netip.MustParseAddr(addrA), netip.MustParseAddr(addrB)
	for i, tt := range []struct {
		host netip.Addr
		want bool
	}{{a, true}, {a, true}, {a, false}, {b, true}, {b, false}} {
		if got := c.take(tt.host); got != tt.want {
			t.Errorf("take %d (%s) = %v, want %v", i, tt.host, got, tt.want)
		}
	}
	c.give(a)
	if !c.take(b) {
		t.Error("take after give = false, want true")
	}
}

func FuzzPath(f *testing.F) {
	f.Add("/boot/52-54-00-00-00-0a/script.ipxe")
	f.Add("//artifacts//" + digest)
	f.Add("/boot/52-54-00-00-00-0a/abc/boot.img")
	r := newRig()
	f.Fuzz(func(t *testing.T, path string) {
		w := r.do("GET", addrA, path)
		if w.Code >= 300 && w.Code < 400 || r.minted != 0 {
			t.Errorf("GET %q = %d, minted %d", path, w.Code, r.minted)
		}
	})
}
