package httpboot

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

const gib = int64(1) << 30

// disc is an artifact in a sparse file: each block of 512 bytes that is marked
// begins with its own number.
type disc struct {
	*os.File
	size int64
	at   int64
}

func (d *disc) Close() error { return nil } // the test's

func (d *disc) Seek(offset int64, whence int) (int64, error) {
	d.at = [...]int64{0, d.at, d.size}[whence] + offset
	return d.at, nil
}

func (d *disc) Read(b []byte) (int, error) {
	n, err := d.ReadAt(b, d.at)
	d.at += int64(n)
	return n, err
}

func (d *disc) Next(limit int64) (*os.File, int64, int64, error) {
	if d.at >= d.size {
		return nil, 0, 0, io.EOF
	}
	n, off := min(limit, d.size-d.at), d.at
	d.at += n
	return d.File, off, n, nil
}

func (d *disc) Has(off, n int64) bool { return true }

// mark writes a block's number where it begins, and gives what it begins with.
func (d *disc) mark(t *testing.T, at int64) string {
	t.Helper()
	text := fmt.Sprintf("byte %012d.", at)
	if _, err := d.WriteAt([]byte(text), at); err != nil {
		t.Fatal(err)
	}
	return text
}

// withDisc assigns a disc image of that size, and gives its path for a loader.
func withDisc(t *testing.T, r *rig, size int64) (*disc, string) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "disc"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	r.byMAC[macA] = &pxev1.Machine{MachineId: "node_a", Macs: []string{macA}, Action: pxev1.Action_ACTION_ISO, Purpose: "iso", WindowId: "w1", WindowUntilMs: 2_000_000,
		Iso: &pxev1.Iso{Sha256: digest, Size: uint64(size), Name: "rescue"}}
	r.h.cfg.Artifacts = func(context.Context, string) (io.ReadSeekCloser, int64, error) {
		return &disc{File: f, size: size}, size, nil
	}
	return &disc{File: f, size: size}, strings.TrimPrefix(r.h.ImageURL(base, macA, r.byMAC[macA], decide.SanbootISO), base)
}

// counted has the boot counted, so that blocks are read as a drive's from then on.
func counted(t *testing.T, conn net.Conn, in *bufio.Reader, path string) {
	t.Helper()
	for range 2 {
		if resp, _ := say(t, conn, in, ipxeGet(path, "bytes=0-511"), "GET"); resp.StatusCode != 206 {
			t.Fatalf("a block = %d, want 206", resp.StatusCode)
		}
	}
}

func dial(t *testing.T, at net.Addr) (net.Conn, *bufio.Reader) {
	t.Helper()
	conn, err := net.Dial("tcp4", at.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn, bufio.NewReader(conn)
}

// The requests are built from the sources of the loaders that are named: none is captured.
func ipxeGet(path, span string) string {
	return "GET " + path + " HTTP/1.1\r\nConnection: keep-alive\r\nRange: " + span + "\r\nUser-Agent: iPXE/1.0.0+git-20190125.36a4c85-5.1\r\nHost: 10.0.0.1\r\n\r\n"
}

func ipxeHead(path string) string {
	return "HEAD " + path + " HTTP/1.1\r\nConnection: keep-alive\r\nUser-Agent: iPXE/1.0.0+git-20190125.36a4c85-5.1\r\nHost: 10.0.0.1\r\n\r\n"
}

func edk2(method, path, more string) string {
	return method + " " + path + " HTTP/1.1\r\nHost: 10.0.0.1\r\nAccept: */*\r\nUser-Agent: UefiHttpBoot/1.0\r\n" + more + "\r\n"
}

func grubGet(path, more string) string {
	return "GET " + path + " HTTP/1.1\r\nHost: 10.0.0.1\r\nUser-Agent: GRUB 2.06\r\n" + more + "\r\n"
}

// TestDrive reads a disc of more than 4 GiB as iPXE for UEFI reads a drive: its
// size, then block after block on one connection, in blocks of 512 bytes until it
// has found a disc's descriptor, and of 2048 and more from then on.
func TestDrive(t *testing.T) {
	r := newRig(t)
	d, path := withDisc(t, r, 5*gib+1024)
	at := wired(t, r)
	conn, in := dial(t, at)
	if resp, _ := say(t, conn, in, ipxeHead(path), "HEAD"); resp.StatusCode != 200 || resp.ContentLength != d.size || resp.Close {
		t.Fatalf("HEAD = %d, length %d, want 200 and %d", resp.StatusCode, resp.ContentLength, d.size)
	}
	for _, tt := range []struct{ first, n int64 }{
		{32768, 512}, {32768, 2048}, {0, 512}, {2*gib - 2048, 4096}, {4*gib - 2048, 2048}, {4*gib - 2048, 4096}, {4 * gib, 2048},
		{5*gib - 2048, 2048}, {4*gib + 4096, 65536}, {4 * gib, 5 << 20}, {64 << 10, 2048}, {5 * gib, 2048},
	} {
		want := d.mark(t, tt.first)
		last := min(tt.first+tt.n, d.size) - 1
		resp, body := say(t, conn, in, ipxeGet(path, fmt.Sprintf("bytes=%d-%d", tt.first, tt.first+tt.n-1)), "GET")
		if got := fmt.Sprintf("bytes %d-%d/%d", tt.first, last, d.size); resp.StatusCode != 206 || resp.Header.Get("Content-Range") != got || !bytes.HasPrefix(body, []byte(want)) || int64(len(body)) != last-tt.first+1 || resp.Close {
			t.Errorf("bytes %d+%d = %d, Content-Range %q, %d bytes from %.20q, close %v", tt.first, tt.n, resp.StatusCode, resp.Header.Get("Content-Range"), len(body), body, resp.Close)
		}
	}
	if got := r.told(); got != macA+" node_a iso" {
		t.Errorf("stages = %s, want the disc once", got)
	}
	// What is no request for a block is served on the same connection, and blocks are after it.
	for _, tt := range []struct {
		text, method string
		code         int
	}{
		{ipxeHead(path), "HEAD", 200},
		{ipxeGet(path, "bytes=0-511"), "GET", 206},
		{"GET /boot/52-54-00-00-00-0a/script.ipxe HTTP/1.1\r\nHost: 10.0.0.1\r\n\r\n", "GET", 200},
		{ipxeGet(path, "bytes=0-511"), "GET", 206},
		{ipxeGet(path, fmt.Sprintf("bytes=%d-", d.size)), "GET", 416},
		{ipxeGet(path, "bytes=0-511"), "GET", 206},
		{strings.Replace(ipxeGet(path, "bytes=0-511"), "iPXE/", strings.Repeat("i", 2*driveHead), 1), "GET", 206},
		{ipxeGet(path, "bytes=0-511"), "GET", 206},
		{ipxeGet("/boot/52-54-00-00-00-0a/abc/rescue.iso", "bytes=0-511"), "GET", 403},
		{ipxeGet(path, "bytes=0-511"), "GET", 206},
		{"POST " + path + " HTTP/1.1\r\nHost: 10.0.0.1\r\nContent-Length: 0\r\n\r\n", "POST", 405},
		{strings.Replace(ipxeGet(path, "bytes=0-511"), "keep-alive", "close", 1), "GET", 206},
	} {
		if resp, _ := say(t, conn, in, tt.text, tt.method); resp.StatusCode != tt.code {
			t.Errorf("%q after blocks = %d, want %d", tt.text, resp.StatusCode, tt.code)
		}
	}
	if _, err := in.ReadByte(); !errors.Is(err, io.EOF) {
		t.Errorf("after a request with close: %v, want the end", err)
	}
}

// patchy is a disc of which every third block comes only when it is asked for.
type patchy struct{ disc }

func (p *patchy) Has(off, n int64) bool { return off/2048%3 != 1 }

// TestDriveInPieces sends requests for blocks byte by byte and several at once, of a
// disc that is there and of one that still arrives.
func TestDriveInPieces(t *testing.T) {
	for _, arrives := range []bool{false, true} {
		r := newRig(t)
		d, path := withDisc(t, r, 1<<20)
		if arrives {
			r.h.cfg.Artifacts = func(context.Context, string) (io.ReadSeekCloser, int64, error) { return &patchy{*d}, d.size, nil }
		}
		for at := int64(0); at < 1<<16; at += 2048 {
			d.mark(t, at)
		}
		conn, in := dial(t, wired(t, r))
		_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
		var all strings.Builder
		for i := range 32 {
			all.WriteString(ipxeGet(path, fmt.Sprintf("bytes=%d-%d", i*2048, i*2048+2047)))
		}
		go func() {
			text := all.String()
			first := strings.Index(text, "\r\n\r\n") + 100
			for i := range first {
				if _, err := io.WriteString(conn, text[i:i+1]); err != nil {
					return
				}
			}
			_, _ = io.WriteString(conn, text[first:])
		}()
		for i := range 32 {
			resp, err := http.ReadResponse(in, nil)
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(resp.Body)
			if want := fmt.Sprintf("byte %012d.", i*2048); err != nil || resp.StatusCode != 206 || !strings.HasPrefix(string(body), want) {
				t.Fatalf("block %d = %d %.20q, %v, want %s", i, resp.StatusCode, body, err, want)
			}
		}
	}
}

// TestDriveIsTakenAway: a connection on which blocks are read outlives no assignment.
func TestDriveIsTakenAway(t *testing.T) {
	r := newRig(t)
	_, path := withDisc(t, r, 1<<20)
	var gone atomic.Bool
	ask := r.h.cfg.Request
	r.h.cfg.Request = func(mac string) decide.Request {
		out := ask(mac)
		if gone.Load() {
			out.Machine = r.byMAC[macB]
		}
		return out
	}
	conn, in := dial(t, wired(t, r))
	counted(t, conn, in, path)
	gone.Store(true)
	for end := time.Now().Add(20 * time.Second); ; {
		resp, _ := say(t, conn, in, ipxeGet(path, "bytes=0-511"), "GET")
		if resp.StatusCode == 404 || resp.StatusCode == 403 {
			return
		}
		if time.Now().After(end) {
			t.Fatal("blocks are still read of what is not assigned any more")
		}
	}
}

// TestLoaders are sessions of loaders on a disc of 3 GiB; on each connection, the
// requests follow each other.
func TestLoaders(t *testing.T) {
	r := newRig(t)
	d, path := withDisc(t, r, 3*gib)
	d.mark(t, 0)
	beyond := d.mark(t, 2754093056)
	middle := d.mark(t, 2147483136)
	start := "byte 000000000000."
	at := wired(t, r)
	type step struct {
		text, method string
		code         int
		span         string
		length       int64
		begins       string
	}
	etag := `"` + digest + `"`
	const all = 3 * gib
	for name, steps := range map[string][]step{
		"EDK2's HTTP boot: the size, then the whole": {
			{edk2("HEAD", path, ""), "HEAD", 200, "", all, ""}, {edk2("GET", path, ""), "GET", 200, "", all, start}},
		"EDK2 of 2024 resumes what broke off": {
			{edk2("GET", path, "Range: bytes=2754093056-3221225471\r\nIf-Match: "+etag+"\r\n"), "GET", 206, "bytes 2754093056-3221225471/3221225472", 467132416, beyond}},
		"EDK2 of 2024 resumes another image": {
			{edk2("GET", path, "Range: bytes=2754093056-3221225471\r\nIf-Match: \"other\"\r\n"), "GET", 412, "", 0, ""}},
		"GRUB opens, and seeks by another connection": {
			{grubGet(path, "Range: bytes=2754093056-\r\n"), "GET", 206, "bytes 2754093056-3221225471/3221225472", 467132416, beyond}},
		"iPXE for BIOS, which has 32 bits and a sign": {
			{ipxeHead(path), "HEAD", 200, "", all, ""},
			{ipxeGet(path, "bytes=32768-34815"), "GET", 206, "bytes 32768-34815/3221225472", 2048, "\x00"},
			{ipxeGet(path, "bytes=-1540874240--1540857857"), "GET", 206, "bytes 2754093056-2754109439/3221225472", 16384, beyond},
			{ipxeGet(path, "bytes=2147483136--2147481601"), "GET", 206, "bytes 2147483136-2147485695/3221225472", 2560, middle},
			{ipxeGet(path, "bytes=-512--1"), "GET", 416, "bytes */3221225472", 0, ""}},
		"an iPXE that prints no numbers": {{ipxeGet(path, "bytes=u-u"), "GET", 200, "", all, start}},
		"gPXE":                           {{"GET " + path + " HTTP/1.0\r\nUser-Agent: gPXE/1.0.1\r\nHost: 10.0.0.1\r\n\r\n", "GET", 200, "", all, start}},
		"a client with names in lower case": {
			{"GET " + path + " HTTP/1.1\r\nhost: 10.0.0.1\r\nrange: bytes=0-17\r\n\r\n", "GET", 206, "bytes 0-17/3221225472", 18, start},
			{"GET " + path + " HTTP/1.1\r\nHOST: 10.0.0.1\r\nRANGE: BYTES=0-17\r\n\r\n", "GET", 206, "bytes 0-17/3221225472", 18, start}},
		"a client that resumes if nothing changed": {
			{"GET " + path + " HTTP/1.1\r\nHost: 10.0.0.1\r\nRange: bytes=0-17\r\nIf-Range: " + etag + "\r\n\r\n", "GET", 206, "bytes 0-17/3221225472", 18, start},
			{"GET " + path + " HTTP/1.1\r\nHost: 10.0.0.1\r\nRange: bytes=5-17\r\nIf-Range: \"other\"\r\n\r\n", "GET", 200, "", all, start}},
		"a BMC that asks for the head of a part": {
			{"HEAD " + path + " HTTP/1.1\r\nHost: 10.0.0.1\r\nRange: bytes=0-1000\r\n\r\n", "HEAD", 206, "bytes 0-1000/3221225472", 1001, ""}},
		"several parts, which no loader reads": {{ipxeGet(path, "bytes=0-1,4-5"), "GET", 200, "", all, start}},
	} {
		conn, in := dial(t, at)
		for _, s := range steps {
			_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
			if _, err := io.WriteString(conn, s.text); err != nil {
				t.Fatal(err)
			}
			resp, err := http.ReadResponse(in, &http.Request{Method: s.method})
			if err != nil {
				t.Fatalf("%s: %q: %v", name, s.text, err)
			}
			if resp.StatusCode != s.code || resp.Header.Get("Content-Range") != s.span || s.code < 300 && resp.ContentLength != s.length || resp.Header.Get("Location") != "" || len(resp.TransferEncoding) > 0 {
				t.Errorf("%s: %q = %d, %v, length %d, want %d, %s, %d", name, s.text, resp.StatusCode, resp.Header, resp.ContentLength, s.code, s.span, s.length)
			}
			if s.method == "HEAD" {
				continue
			}
			got := make([]byte, len(s.begins))
			if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != s.begins {
				t.Errorf("%s: %q begins with %q, %v, want %q", name, s.text, got, err, s.begins)
			}
			if resp.ContentLength > 1<<20 {
				break // the rest is not awaited, as a loader that seeks does not
			}
			if _, err := io.Copy(io.Discard, resp.Body); err != nil {
				t.Errorf("%s: %q: %v", name, s.text, err)
			}
		}
		conn.Close()
	}
}

// TestHeadIsGet: a HEAD has the status and the headers of a GET, whatever is asked for.
func TestHeadIsGet(t *testing.T) {
	for _, more := range []string{"", "Range: bytes=2-3\r\n", "Range: bytes=-3\r\n", "Range: bytes=999999999999-\r\n", "Range: bytes=0-1,4-5\r\n", "If-None-Match: \"" + digest + "\"\r\n"} {
		for _, what := range []string{"script.ipxe", "snponly.efi", "vmlinuz", "ramdisk.img", "boot.img", "nothing", "/artifacts/" + digest, "/artifacts/x", "/etc/passwd", "rescue.iso"} {
			r := newRig(t)
			path := "/boot/52-54-00-00-00-0a/" + what
			switch {
			case what == "rescue.iso":
				_, path = withDisc(t, r, 1<<20)
			case strings.HasPrefix(what, "/"):
				path = what
			case strings.HasSuffix(what, ".img") || what == "vmlinuz" || what == "nothing":
				path = r.begin(t) + what
			}
			at := wired(t, r)
			var got [2]string
			for i, method := range []string{"HEAD", "GET"} {
				conn, in := dial(t, at)
				resp, body := say(t, conn, in, method+" "+path+" HTTP/1.1\r\nHost: 10.0.0.1\r\n"+more+"\r\n", method)
				if method == "GET" && resp.StatusCode != 304 && resp.Header.Get("Content-Length") != fmt.Sprint(len(body)) {
					t.Errorf("GET %s (%q) = %d with Content-Length %q of %d bytes", path, more, resp.StatusCode, resp.Header.Get("Content-Length"), len(body))
				}
				resp.Header.Del("Date")
				got[i] = fmt.Sprint(resp.StatusCode, resp.Header, resp.Close)
			}
			if got[0] != got[1] {
				t.Errorf("%s (%q): HEAD = %s, GET = %s", path, more, got[0], got[1])
			}
		}
	}
}

// TestDriveHeaders: a block is answered with the headers that net/http gives it.
func TestDriveHeaders(t *testing.T) {
	r := newRig(t)
	_, path := withDisc(t, r, 1<<20)
	conn, in := dial(t, wired(t, r))
	counted(t, conn, in, path)
	block, _ := say(t, conn, in, ipxeGet(path, "bytes=0-511"), "GET")
	other, _ := say(t, conn, in, strings.Replace(ipxeGet(path, "bytes=0-511"), "User-Agent", "X-Whatever", 1), "GET")
	for _, resp := range []*http.Response{block, other} {
		if _, err := http.ParseTime(resp.Header.Get("Date")); err != nil {
			t.Errorf("Date %q: %v", resp.Header.Get("Date"), err)
		}
		resp.Header.Del("Date")
	}
	if !maps.EqualFunc(block.Header, other.Header, func(a, b []string) bool { return fmt.Sprint(a) == fmt.Sprint(b) }) || block.StatusCode != other.StatusCode || block.Proto != other.Proto {
		t.Errorf("a block has %v, by net/http %v", block.Header, other.Header)
	}
}

// copied counts what goes to a connection from this process's memory.
type copied struct {
	*net.TCPConn
	bytes *atomic.Int64
}

func (c copied) Write(b []byte) (int, error) {
	c.bytes.Add(int64(len(b)))
	return c.TCPConn.Write(b)
}

func (c copied) ReadFrom(r io.Reader) (int64, error) {
	return io.Copy(struct{ io.Writer }{c}, r)
}

func (c copied) SyscallConn() (syscall.RawConn, error) { return c.TCPConn.SyscallConn() }

type copiedListener struct {
	net.Listener
	bytes *atomic.Int64
}

func (l copiedListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return copied{conn.(*net.TCPConn), l.bytes}, nil
}

// TestSendfileOfArtifacts: the kernel sends an artifact, whole or in part, and this
// process copies no more than the heads.
func TestSendfileOfArtifacts(t *testing.T) {
	r := newRig(t)
	d, path := withDisc(t, r, 24<<20)
	r.h.cfg.Holder = func(netip.Addr) (string, bool) { return macA, true }
	end := d.mark(t, 24<<20-512)
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var bytes atomic.Int64
	serving(t, copiedListener{ln, &bytes}, r.h, usual)
	conn, in := dial(t, ln.Addr())
	for _, text := range []string{edk2("GET", path, ""), ipxeGet(path, "bytes=1048576-25165823")} {
		bytes.Store(0)
		resp, body := say(t, conn, in, text, "GET")
		if resp.StatusCode >= 300 || !strings.Contains(string(body[len(body)-512:]), end) {
			t.Errorf("%q = %d, %d bytes", text, resp.StatusCode, len(body))
		}
		if n := bytes.Load(); n > 8<<10 {
			t.Errorf("%q: %d of %d bytes were copied", text, n, len(body))
		}
	}
}

// serving runs serve with other limits until the test ends.
func serving(t *testing.T, ln net.Listener, h http.Handler, l limits) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- serve(ctx, ln, h, slog.New(slog.DiscardHandler), l) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("serve = %v, want nil", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// TestSlowClients: who takes nothing, says nothing or says nothing more is dropped,
// and a client that takes its time is not.
func TestSlowClients(t *testing.T) {
	r := newRig(t)
	r.h.cfg.Holder = func(netip.Addr) (string, bool) { return macA, true }
	_, path := withDisc(t, r, 64<<20)
	first, in := dial(t, wired(t, r))
	counted(t, first, in, path)
	short := limits{request: 300 * time.Millisecond, idle: 300 * time.Millisecond, stall: 300 * time.Millisecond}
	for name, tt := range map[string]struct {
		text string
		mean func(limits) limits
	}{
		"takes nothing of a whole":         {edk2("GET", path, ""), func(l limits) limits { l.idle, l.request = time.Hour, time.Hour; return l }},
		"takes nothing of a part":          {ipxeGet(path, "bytes=0-67108863"), func(l limits) limits { l.idle, l.request = time.Hour, time.Hour; return l }},
		"says nothing":                     {"", func(l limits) limits { l.idle, l.stall = time.Hour, time.Hour; return l }},
		"says half of a request":           {"GET " + path[:20], func(l limits) limits { l.idle, l.stall = time.Hour, time.Hour; return l }},
		"says nothing after a block":       {ipxeGet(path, "bytes=0-511"), func(l limits) limits { l.stall = time.Hour; return l }},
		"says half a request after blocks": {ipxeGet(path, "bytes=0-511") + "GET " + path[:20], func(l limits) limits { l.idle, l.stall = time.Hour, time.Hour; return l }},
	} {
		ln, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		closed := make(chan struct{}, 1)
		stop := serving(t, closing{ln, closed}, r.h, tt.mean(short))
		conn, _ := dial(t, ln.Addr())
		if _, err := io.WriteString(conn, tt.text); err != nil {
			t.Fatal(err)
		}
		select {
		case <-closed:
		case <-time.After(20 * time.Second):
			t.Errorf("a client that %s holds its connection", name)
		}
		conn.Close()
		stop()
	}
}

// TestDriveAtRest: a drive that nobody reads for a while keeps its connection, for
// longer than a request may take to be said.
func TestDriveAtRest(t *testing.T) {
	r := newRig(t)
	r.h.cfg.Holder = func(netip.Addr) (string, bool) { return macA, true }
	_, path := withDisc(t, r, 1<<20)
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	entered := make(chan string, 100)
	serving(t, ln, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		r.h.ServeHTTP(w, req)
		entered <- req.RemoteAddr
	}), limits{request: 50 * time.Millisecond, idle: time.Minute, stall: time.Minute})
	conn, in := dial(t, ln.Addr())
	counted(t, conn, in, path)
	<-entered
	<-entered // the drive has been given back
	time.Sleep(200 * time.Millisecond)
	if resp, _ := say(t, conn, in, ipxeGet(path, "bytes=0-511"), "GET"); resp.StatusCode != 206 {
		t.Errorf("a block after a rest = %d, want 206", resp.StatusCode)
	}
}

// closing tells of connections that the server closed.
type closing struct {
	net.Listener
	closed chan struct{}
}

func (l closing) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return closingConn{conn.(*net.TCPConn), l.closed}, nil
}

type closingConn struct {
	*net.TCPConn
	closed chan struct{}
}

func (c closingConn) Close() error {
	select {
	case c.closed <- struct{}{}:
	default:
	}
	return c.TCPConn.Close()
}

// TestClientsAreCapped: one client has so many connections and the next is closed
// at once; another client is served meanwhile.
func TestClientsAreCapped(t *testing.T) {
	r := newRig(t)
	at := wired(t, r)
	get := "GET /boot/52-54-00-00-00-0a/snponly.efi HTTP/1.1\r\nHost: 10.0.0.1\r\n\r\n"
	for range connsPerHost {
		conn, in := dial(t, at)
		if resp, _ := say(t, conn, in, get, "GET"); resp.StatusCode != 200 {
			t.Fatalf("GET = %d", resp.StatusCode)
		}
	}
	over, in := dial(t, at)
	_ = over.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := in.ReadByte(); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("one connection too many: %v, want it closed", err)
	}
	other, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}).Dial("tcp4", at.String())
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if resp, _ := say(t, other, bufio.NewReader(other), get, "GET"); resp.StatusCode != 200 {
		t.Errorf("another client's GET = %d, want 200", resp.StatusCode)
	}
}

// TestDrivesKeepTheirPlace: a connection that goes to and fro between blocks and
// other requests counts as one, and is given free once.
func TestDrivesKeepTheirPlace(t *testing.T) {
	r := newRig(t)
	_, path := withDisc(t, r, 1<<20)
	at := wired(t, r)
	for range 3 * connsPerHost {
		conn, in := dial(t, at)
		for _, text := range []string{ipxeGet(path, "bytes=0-511"), edk2("GET", path, "Range: bytes=0-511\r\nIf-Match: *\r\n"), ipxeGet(path, "bytes=0-511")} {
			if resp, _ := say(t, conn, in, text, "GET"); resp.StatusCode != 206 {
				t.Fatalf("%q = %d, want 206", text, resp.StatusCode)
			}
		}
		conn.Close()
		// The server sees the end a moment later.
		for end := time.Now().Add(20 * time.Second); ; {
			probe, in := dial(t, at)
			resp, _ := say(t, probe, in, strings.Replace(ipxeHead(path), "keep-alive", "close", 1), "HEAD")
			probe.Close()
			if resp.StatusCode == 200 {
				break
			}
			if time.Now().After(end) {
				t.Fatal("connections that ended are still counted")
			}
		}
	}
}

// TestDriveEndsWithTheServer: a drive at rest holds nothing up.
func TestDriveEndsWithTheServer(t *testing.T) {
	r := newRig(t)
	r.h.cfg.Holder = func(netip.Addr) (string, bool) { return macA, true }
	_, path := withDisc(t, r, 1<<20)
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	stop := serving(t, ln, r.h, usual)
	conn, in := dial(t, ln.Addr())
	counted(t, conn, in, path)
	stopped := make(chan struct{})
	go func() { stop(); close(stopped) }()
	select {
	case <-stopped:
	case <-time.After(30 * time.Second):
		t.Fatal("the server waits for a drive at rest")
	}
	if _, err := in.ReadByte(); !errors.Is(err, io.EOF) {
		t.Errorf("the drive's connection: %v, want the end", err)
	}
}

// late is a disc of which nothing comes.
type late struct {
	disc
	err error
}

func (l *late) Next(int64) (*os.File, int64, int64, error) { return nil, 0, 0, l.err }

// TestMissingArtifact: what cannot be had is not begun; while a boot is young, iPXE is
// told to ask again by itself, unless that is in vain; and it is told what is missing.
func TestMissingArtifact(t *testing.T) {
	lost, gone := errs.Retry(errs.Unreachable, "the line is down"), errs.New(errs.NoSpace, "9 bytes are more than the cache's 8")
	for _, tt := range []struct {
		name   string
		method string
		header []string
		open   error // of opening it
		next   error // of its first bytes
		later  time.Duration
		code   int
		again  string
	}{
		{"not to be opened", "GET", nil, lost, nil, 0, 503, "5"},
		{"not to be opened, its size", "HEAD", nil, lost, nil, 0, 503, "5"},
		{"does not fit", "GET", nil, gone, nil, 0, 503, ""},
		{"does not come", "GET", nil, nil, lost, 0, 503, "5"},
		{"a block does not come", "GET", []string{"Range", "bytes=0-511"}, nil, lost, 0, 503, "5"},
		{"never comes", "GET", nil, nil, gone, 0, 503, ""},
		{"does not come, to an old boot", "GET", nil, nil, lost, patience, 503, ""},
		{"its size is known", "HEAD", nil, nil, lost, 0, 200, ""},
		{"a block that there is none of", "GET", []string{"Range", "bytes=9999999-"}, nil, lost, 0, 416, ""},
	} {
		r := newRig(t)
		d, path := withDisc(t, r, 1<<20)
		r.h.cfg.Artifacts = func(context.Context, string) (io.ReadSeekCloser, int64, error) {
			if tt.open != nil {
				return nil, 0, tt.open
			}
			return &late{disc: *d, err: tt.next}, d.size, nil
		}
		r.now = r.now.Add(tt.later)
		w := r.do(tt.method, addrA, path, tt.header...)
		if w.Code != tt.code || w.Header().Get("Retry-After") != tt.again {
			t.Errorf("%s: %d, Retry-After %q, want %d, %q", tt.name, w.Code, w.Header().Get("Retry-After"), tt.code, tt.again)
		}
		if told := strings.Contains(strings.Join(r.stages, ","), macA+" node_a missing"); told != (tt.code == 503) {
			t.Errorf("%s: stages = %v", tt.name, r.stages)
		}
	}
	r := newRig(t)
	if _, path := withDisc(t, r, 1<<20); r.do("GET", addrA, path).Header().Get("Retry-After") != "" {
		t.Error("what is served says when to ask again")
	}
}

// TestISOShowsItsLimits: the script says what is known of a disc image before it boots.
func TestISOShowsItsLimits(t *testing.T) {
	r := newRig(t)
	withDisc(t, r, 1<<20)
	r.byMAC[macA].Iso.Class = pxev1.IsoClass_ISO_CLASS_NEEDS_DRIVE
	text := r.do("GET", addrA, "/boot/52-54-00-00-00-0a/script.ipxe").Body.String()
	shown, boots := strings.Index(text, "echo This machine is assigned to the disc image rescue"), strings.Index(text, "sanboot ")
	if shown < 0 || boots < shown || !strings.Contains(text[shown:boots], "the drive is gone once its kernel leaves the firmware") {
		t.Errorf("script = %s, want its limits before it boots", text)
	}
}
