package h2

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// self is a certificate for the tests.
func self(t testing.TB) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC), DNSNames: []string{"x"}}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func socket(t testing.TB) net.Listener {
	t.Helper()
	dir, err := os.MkdirTemp("", "h2")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	l, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func serverTLS(t testing.TB) *tls.Config {
	return &tls.Config{Certificates: []tls.Certificate{self(t)}, NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS13}
}

// anyServer is for servers of the test's own.
var anyServer = &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS13}

// serve starts our server, and ends it with the test.
func serve(t testing.TB, h http.HandlerFunc) (*Server, net.Addr) {
	t.Helper()
	l := socket(t)
	s := &Server{Handler: h, TLS: serverTLS(t), Timeout: 10 * time.Second, Log: slog.New(slog.DiscardHandler)}
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Close()
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Errorf("Serve = %v", err)
		}
	})
	return s, l.Addr()
}

func dialer(a net.Addr) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, a.Network(), a.String())
	}
}

func client(t testing.TB, a net.Addr) *Client {
	c := &Client{Dial: dialer(a), TLS: anyServer, Timeout: 10 * time.Second}
	t.Cleanup(c.Close)
	return c
}

// doer is either our client or net/http's.
type doer interface {
	Do(*http.Request) (*http.Response, error)
}

// echoHandler answers the body in reverse case, and how long it was as a trailer.
func echoHandler(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/grpc")
	w.Header().Set("X-Path", r.URL.Path)
	w.Header()["X-Many"] = r.Header["X-Many"]
	total := 0
	buf := make([]byte, 10_000)
	for {
		n, err := r.Body.Read(buf)
		total += n
		if _, werr := w.Write(buf[:n]); werr != nil {
			return
		}
		if err != nil {
			break
		}
		w.(http.Flusher).Flush()
	}
	w.Header().Set(http.TrailerPrefix+"Grpc-Status", fmt.Sprint(total))
}

// exchange sends body and checks the answer of echoHandler.
func exchange(ctx context.Context, d doer, body []byte, known bool) error {
	var r io.Reader = bytes.NewReader(body)
	if !known {
		pr, pw := io.Pipe()
		go func() {
			_, err := pw.Write(body)
			pw.CloseWithError(err)
		}()
		r = pr
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://x/a.B/C", r)
	if err != nil {
		return err
	}
	if !known {
		req.ContentLength = -1
	}
	req.Header["X-Many"] = []string{"a", "b"}
	resp, err := d.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if !bytes.Equal(got, body) || resp.StatusCode != 200 || resp.Header.Get("X-Path") != "/a.B/C" || len(resp.Header["X-Many"]) != 2 ||
		resp.Header.Get("Content-Type") != "application/grpc" || resp.Trailer.Get("Grpc-Status") != fmt.Sprint(len(body)) {
		return fmt.Errorf("%d bytes came back of %d, status %d, headers %v, trailers %v", len(got), len(body), resp.StatusCode, resp.Header, resp.Trailer)
	}
	return nil
}

// Each end works with its like and with net/http's.
func TestExchange(t *testing.T) {
	_, ours := serve(t, echoHandler)
	std := &http.Server{Handler: http.HandlerFunc(echoHandler), TLSConfig: serverTLS(t), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)}
	l := socket(t)
	go std.ServeTLS(l, "", "")
	t.Cleanup(func() { std.Close() })
	transport := func(a net.Addr) doer {
		p := new(http.Protocols)
		p.SetHTTP2(true)
		tr := &http.Transport{
			DialContext:     func(ctx context.Context, _, _ string) (net.Conn, error) { return dialer(a)(ctx) },
			TLSClientConfig: anyServer.Clone(), Protocols: p, DisableCompression: true,
		}
		t.Cleanup(tr.CloseIdleConnections)
		return &http.Client{Transport: tr}
	}
	for name, d := range map[string]doer{
		"both ours": client(t, ours), "our client": client(t, l.Addr()), "our server": transport(ours),
	} {
		t.Run(name, func(t *testing.T) {
			var owned sync.WaitGroup
			for _, size := range []int{0, 1, 5, maxFrame - 1, maxFrame, maxFrame + 1, 100_000, 3 * streamWindow} {
				for _, known := range []bool{true, false} {
					owned.Go(func() {
						for range 3 {
							if err := exchange(t.Context(), d, bytes.Repeat([]byte("x"), size), known); err != nil {
								t.Errorf("%d bytes, known %v: %v", size, known, err)
							}
						}
					})
				}
			}
			owned.Wait()
		})
	}
}

func TestManyCallers(t *testing.T) {
	_, a := serve(t, echoHandler)
	c := client(t, a)
	var owned sync.WaitGroup
	for i := range 2 * maxStreams { // more than run at a time: they wait
		owned.Go(func() {
			if err := exchange(t.Context(), c, bytes.Repeat([]byte{byte(i)}, 100*i), i%2 == 0); err != nil {
				t.Error(err)
			}
		})
	}
	owned.Wait()
}

func get(ctx context.Context, c doer) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://x/", http.NoBody)
	if err != nil {
		return nil, err
	}
	return c.Do(req)
}

// A caller who gives up frees the handler, however far the call is.
func TestCancel(t *testing.T) {
	ended := make(chan error, 1)
	_, a := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		_, err := w.Write(make([]byte, 2*maxFrame))
		ended <- err
	})
	c := client(t, a)
	ctx, cancel := context.WithCancel(t.Context())
	resp, err := get(ctx, c)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := resp.Body.Read(make([]byte, 1)); !errors.Is(err, context.Canceled) {
		t.Errorf("Read = %v, want that it was cancelled", err)
	}
	if err := <-ended; err == nil {
		t.Error("the handler could still write")
	}
	resp, err = get(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if err := <-ended; err == nil {
		t.Error("the handler could still write after Close")
	}
}

// A server that reads nothing holds nobody longer than the caller says.
func TestServerReadsNothing(t *testing.T) {
	_, a := serve(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	c := client(t, a)
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://x/", bytes.NewReader(make([]byte, 2*streamWindow)))
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(20*time.Millisecond, cancel)
	if _, err := c.Do(req); !errors.Is(err, context.Canceled) {
		t.Errorf("Do = %v, want that it was cancelled", err)
	}
}

// A process that is stopped does not read its socket at all: calls still end
// when their context does.
func TestStoppedPeer(t *testing.T) {
	l := socket(t)
	defer l.Close()
	stopped := make(chan struct{})
	go func() {
		nc, err := l.Accept()
		if err != nil {
			return
		}
		defer nc.Close()
		s := tls.Server(nc, serverTLS(t))
		if s.Handshake() == nil {
			// It allows more than the socket holds, and reads no further.
			f := http2.NewFramer(s, s)
			_ = f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: maxWindow})
			_ = f.WriteWindowUpdate(0, maxWindow-65535)
		}
		<-stopped
	}()
	defer close(stopped)
	c := client(t, l.Addr())
	var owned sync.WaitGroup
	for range 4 {
		owned.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://x/", bytes.NewReader(make([]byte, 4<<20)))
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := c.Do(req); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("Do = %v, want that its time is over", err)
			}
		})
	}
	owned.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn == nil {
		return
	}
	c.conn.mu.Lock()
	defer c.conn.mu.Unlock()
	if n := len(c.conn.pending); n > maxPending+2*maxFrame {
		t.Errorf("%d bytes are pending", n)
	}
}

func TestAnswerBeforeTheBodyIsRead(t *testing.T) {
	_, a := serve(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })
	c := client(t, a)
	for _, known := range []bool{true, false} {
		body := io.Reader(bytes.NewReader(make([]byte, 3*streamWindow)))
		if !known {
			body = io.MultiReader(body)
		}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://x/", body)
		if err != nil {
			t.Fatal(err)
		}
		if !known {
			req.ContentLength = -1
		}
		resp, err := c.Do(req)
		if err != nil || resp.StatusCode != http.StatusTeapot {
			t.Fatalf("Do = %v, %v", resp, err)
		}
		if _, err := io.ReadAll(resp.Body); err != nil {
			t.Errorf("read the answer: %v", err)
		}
		resp.Body.Close()
	}
}

// A handler that panics or aborts ends its call, not the connection.
func TestBrokenHandler(t *testing.T) {
	_, a := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/" {
			echoHandler(w, r)
			return
		}
		w.(http.Flusher).Flush()
		panic("x")
	})
	c := client(t, a)
	resp, err := get(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	var se http2.StreamError
	if _, err := io.ReadAll(resp.Body); !errors.As(err, &se) || se.Code != http2.ErrCodeInternal {
		t.Errorf("read the answer: %v, want an internal error of the stream", err)
	}
	if err := exchange(t.Context(), c, []byte("x"), true); err != nil {
		t.Errorf("the next call: %v", err)
	}
}

// What is held comes even if the handler goes on; without Hold, Flush is enough.
func TestHold(t *testing.T) {
	for _, held := range []bool{true, false} {
		release := make(chan struct{})
		_, a := serve(t, func(w http.ResponseWriter, r *http.Request) {
			if held {
				Hold(r.Context())
			}
			io.WriteString(w, "x")
			w.(http.Flusher).Flush()
			for i := 0; ; i++ {
				select {
				case <-release:
					return
				default:
					// What is held goes out while the handler prepares its trailers.
					w.Header().Set(http.TrailerPrefix+"X-"+fmt.Sprint(i%100), "y")
				}
			}
		})
		resp, err := get(t.Context(), client(t, a))
		if err != nil {
			t.Fatal(err)
		}
		if n, err := resp.Body.Read(make([]byte, 2)); n != 1 || err != nil {
			t.Errorf("held %v: Read = %d, %v", held, n, err)
		}
		close(release)
		resp.Body.Close()
	}
	Hold(t.Context()) // of nobody: nothing
}

func TestShutdown(t *testing.T) {
	began, release := make(chan struct{}), make(chan struct{})
	s, a := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		began <- struct{}{}
		<-release
		io.WriteString(w, "done")
	})
	c := client(t, a)
	got := make(chan error, 1)
	go func() {
		resp, err := get(t.Context(), c)
		if err == nil {
			var b []byte
			if b, err = io.ReadAll(resp.Body); string(b) != "done" {
				err = fmt.Errorf("the answer is %q, %w", b, err)
			}
		}
		got <- err
	}()
	<-began
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Shutdown(over); !errors.Is(err, context.Canceled) {
		t.Errorf("Shutdown without time = %v", err)
	}
	down := make(chan error, 1)
	go func() { down <- s.Shutdown(t.Context()) }()
	close(release)
	if err := <-got; err != nil {
		t.Errorf("the call that ran: %v", err)
	}
	if err := <-down; err != nil {
		t.Errorf("Shutdown = %v", err)
	}
	if _, err := get(t.Context(), c); err == nil {
		t.Error("a call after Shutdown succeeded")
	}
}

// A client comes back after a server that went away.
func TestReconnect(t *testing.T) {
	_, a := serve(t, echoHandler)
	c := client(t, a)
	if err := exchange(t.Context(), c, []byte("x"), true); err != nil {
		t.Fatal(err)
	}
	c.mu.Lock()
	old := c.conn
	c.mu.Unlock()
	old.nc.Close()
	<-old.done
	if err := exchange(t.Context(), c, []byte("x"), true); err != nil {
		t.Errorf("after the connection was lost: %v", err)
	}
	c.Close()
	if err := exchange(t.Context(), c, []byte("x"), true); err != nil {
		t.Errorf("after Close: %v", err)
	}
}

// A connection that is lost is no end of an answer.
func TestLost(t *testing.T) {
	s, a := serve(t, func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "half")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	resp, err := get(t.Context(), client(t, a))
	if err != nil {
		t.Fatal(err)
	}
	go s.Close()
	if b, err := io.ReadAll(resp.Body); err == nil {
		t.Errorf("ReadAll = %q, want an error", b)
	}
}

func TestRefusesOtherProtocols(t *testing.T) {
	l := socket(t)
	defer l.Close()
	go func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			_ = tls.Server(nc, &tls.Config{Certificates: []tls.Certificate{self(t)}}).Handshake()
			nc.Close()
		}
	}()
	if _, err := get(t.Context(), client(t, l.Addr())); err == nil {
		t.Error("a server without HTTP/2 was called")
	}
	_, a := serve(t, echoHandler)
	for name, config := range map[string]*tls.Config{"no protocol": {InsecureSkipVerify: true}, "HTTP/2": anyServer} {
		nc, err := tls.Dial(a.Network(), a.String(), config)
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(nc, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		if b, _ := io.ReadAll(nc); strings.Contains(string(b), "HTTP/1") {
			t.Errorf("%s: HTTP/1 was answered: %q", name, b)
		}
		nc.Close()
	}
}

// by hand: a client that speaks frames.
type hand struct {
	*http2.Framer
	nc  *tls.Conn
	enc *hpack.Encoder
	buf bytes.Buffer
}

func byHand(t *testing.T, a net.Addr) *hand {
	t.Helper()
	nc, err := tls.Dial(a.Network(), a.String(), anyServer)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nc.Close() })
	h := &hand{Framer: http2.NewFramer(nc, nc), nc: nc}
	h.enc = hpack.NewEncoder(&h.buf)
	h.AllowIllegalWrites = true
	io.WriteString(nc, http2.ClientPreface)
	h.WriteSettings()
	return h
}

func (h *hand) open(id uint32, end bool, extra ...string) {
	for _, f := range [][2]string{{":method", "POST"}, {":scheme", "https"}, {":authority", "x"}, {":path", "/"}} {
		h.enc.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]})
	}
	for i := 0; i < len(extra); i += 2 {
		h.enc.WriteField(hpack.HeaderField{Name: extra[i], Value: extra[i+1]})
	}
	part := h.buf.Next(maxFrame)
	h.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: part, EndStream: end, EndHeaders: h.buf.Len() == 0})
	for h.buf.Len() > 0 {
		part := h.buf.Next(maxFrame)
		h.WriteContinuation(id, h.buf.Len() == 0, part)
	}
}

// outcome is how the server took what was written: "ok" (stream 1 answered),
// "stream <code>" or "connection <code>".
func (h *hand) outcome() string {
	for {
		f, err := h.ReadFrame()
		if err != nil {
			return "gone"
		}
		switch f := f.(type) {
		case *http2.RSTStreamFrame:
			if f.ErrCode != http2.ErrCodeNo {
				return "stream " + f.ErrCode.String()
			}
		case *http2.GoAwayFrame:
			return "connection " + f.ErrCode.String()
		case *http2.HeadersFrame:
			return "ok"
		}
	}
}

// What breaks the protocol ends the stream or the connection; the same done
// right is answered.
func TestServerRefuses(t *testing.T) {
	for _, tt := range []struct {
		name string
		do   func(h *hand)
		want string
	}{
		{"a call", func(h *hand) { h.open(1, true) }, "ok"},
		{"padded data", func(h *hand) { h.open(1, false); h.WriteDataPadded(1, true, []byte("x"), make([]byte, 9)) }, "ok"},
		{"an even stream", func(h *hand) { h.open(2, true) }, "connection PROTOCOL_ERROR"},
		{"a stream opened again", func(h *hand) { h.open(3, false); h.open(1, true) }, "connection STREAM_CLOSED"},
		{"data of no stream", func(h *hand) { h.WriteData(1, true, []byte("x")) }, "connection PROTOCOL_ERROR"},
		{"data after the end", func(h *hand) { h.open(1, false, "x-wait", "1"); h.WriteData(1, true, nil); h.WriteData(1, true, nil) }, "stream STREAM_CLOSED"},
		{"more than the stream's window", func(h *hand) {
			h.open(1, false, "x-wait", "1")
			for range streamWindow/maxFrame + 1 {
				h.WriteData(1, false, make([]byte, maxFrame))
			}
		}, "stream FLOW_CONTROL_ERROR"},
		{"a window too large", func(h *hand) { h.WriteWindowUpdate(0, maxWindow) }, "connection FLOW_CONTROL_ERROR"},
		{"a stream's window too large", func(h *hand) { h.open(1, false, "x-wait", "1"); h.WriteWindowUpdate(1, maxWindow) }, "stream FLOW_CONTROL_ERROR"},
		{"window of no stream", func(h *hand) { h.WriteWindowUpdate(7, 1) }, "connection PROTOCOL_ERROR"},
		{"end of no stream", func(h *hand) { h.WriteRSTStream(7, 0) }, "connection PROTOCOL_ERROR"},
		{"a promise", func(h *hand) {
			h.open(1, false, "x-wait", "1")
			h.WriteRawFrame(http2.FramePushPromise, 4, 1, []byte{0, 0, 0, 2})
		}, "connection PROTOCOL_ERROR"},
		{"large headers", func(h *hand) { h.open(1, true, "x-large", strings.Repeat("^", 30_000)) }, "ok"},
		{"headers too large", func(h *hand) {
			var many []string
			for i := range 3 {
				many = append(many, fmt.Sprint("x-", i), strings.Repeat("^", 30_000))
			}
			h.open(1, true, many...)
		}, "stream ENHANCE_YOUR_CALM"},
		{"a call after headers too large", func(h *hand) {
			h.open(1, true, "x-1", strings.Repeat("^", 40_000), "x-2", strings.Repeat("^", 40_000))
			h.open(3, true)
			for f, err := h.ReadFrame(); err == nil && f.Header().Type != http2.FrameRSTStream; f, err = h.ReadFrame() {
			}
		}, "ok"},
		{"headers that are no HPACK", func(h *hand) {
			h.WriteRawFrame(http2.FrameHeaders, http2.FlagHeadersEndHeaders, 1, []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
		},
			"connection COMPRESSION_ERROR"},
		{"a part of headers without their end", func(h *hand) {
			h.WriteRawFrame(http2.FrameHeaders, 0, 1, nil)
			h.WriteData(1, true, nil)
		}, "connection PROTOCOL_ERROR"},
		{"a pseudo field twice", func(h *hand) { h.open(1, true, ":path", "/b") }, "stream PROTOCOL_ERROR"},
		{"a pseudo field behind others", func(h *hand) { h.open(1, true, "a", "b", ":x", "/b") }, "stream PROTOCOL_ERROR"},
		{"a value with a line break", func(h *hand) { h.open(1, true, "a", "b\nc") }, "stream PROTOCOL_ERROR"},
		{"no path", func(h *hand) {
			h.enc.WriteField(hpack.HeaderField{Name: ":method", Value: "POST"})
			h.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: h.buf.Bytes(), EndStream: true, EndHeaders: true})
		}, "stream PROTOCOL_ERROR"},
		{"a bad setting", func(h *hand) { h.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 31}) }, "connection FLOW_CONTROL_ERROR"},
		{"trailers that do not end", func(h *hand) { h.open(1, false, "x-wait", "1"); h.open(1, false) }, "stream PROTOCOL_ERROR"},
		{"an upper-case header", func(h *hand) { h.open(1, true, "X-Upper", "1") }, "stream PROTOCOL_ERROR"},
		{"more calls than may run", func(h *hand) {
			for i := range uint32(maxStreams + 1) {
				h.open(2*i+1, false, "x-wait", "1")
			}
		}, "stream REFUSED_STREAM"},
		{"an unknown frame", func(h *hand) { h.WriteRawFrame(0x42, 0, 0, []byte("x")); h.open(1, true) }, "ok"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, a := serve(t, func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("X-Wait") != "" {
					<-r.Context().Done()
					return
				}
				io.Copy(w, r.Body)
			})
			h := byHand(t, a)
			tt.do(h)
			if got := h.outcome(); got != tt.want {
				t.Errorf("outcome = %s, want %s", got, tt.want)
			}
		})
	}
}

// A client that makes the server answer, and never reads, is let go.
func TestServerOwesNoMore(t *testing.T) {
	_, a := serve(t, echoHandler)
	h := byHand(t, a)
	var err error
	for i := 0; i < 1_000_000 && err == nil; i++ {
		err = h.WritePing(false, [8]byte{})
	}
	if err == nil {
		t.Error("a million unread answers were kept")
	}
}

// pipeConn feeds bytes to a connection, and takes what it writes.
type pipeConn struct {
	r    io.Reader
	done chan struct{}
	once sync.Once
}

func (p *pipeConn) Read(b []byte) (int, error)         { return p.r.Read(b) }
func (p *pipeConn) Write(b []byte) (int, error)        { return len(b), nil }
func (p *pipeConn) Close() error                       { p.once.Do(func() { close(p.done) }); return nil }
func (p *pipeConn) LocalAddr() net.Addr                { return &net.UnixAddr{} }
func (p *pipeConn) RemoteAddr() net.Addr               { return &net.UnixAddr{} }
func (p *pipeConn) SetDeadline(time.Time) error        { return nil }
func (p *pipeConn) SetReadDeadline(t time.Time) error  { return nil }
func (p *pipeConn) SetWriteDeadline(t time.Time) error { return nil }

func frames(write func(f *http2.Framer, enc func(...string) []byte)) []byte {
	var b bytes.Buffer
	var block bytes.Buffer
	e := hpack.NewEncoder(&block)
	write(http2.NewFramer(&b, nil), func(fields ...string) []byte {
		block.Reset()
		for i := 0; i < len(fields); i += 2 {
			e.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]})
		}
		return bytes.Clone(block.Bytes())
	})
	return b.Bytes()
}

// Whatever a client sends, the server ends with the connection, and so do its handlers.
func FuzzServer(f *testing.F) {
	f.Add(frames(func(f *http2.Framer, enc func(...string) []byte) {
		f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1})
		f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, EndHeaders: true, BlockFragment: enc(":method", "POST", ":scheme", "https", ":path", "/a", ":authority", "x", "te", "trailers")})
		f.WriteData(1, false, []byte("\x00\x00\x00\x00\x01x"))
		f.WriteWindowUpdate(1, 100)
		f.WriteData(1, true, nil)
		f.WriteHeaders(http2.HeadersFrameParam{StreamID: 3, EndHeaders: true, EndStream: true, BlockFragment: enc(":method", "POST", ":scheme", "https", ":path", "/%zz", ":authority", "x")})
		f.WritePing(false, [8]byte{1})
		f.WriteRSTStream(3, http2.ErrCodeCancel)
		f.WriteGoAway(0, 0, nil)
	}))
	f.Add([]byte{0, 0, 0, 4, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		s := &Server{Handler: http.HandlerFunc(echoHandler), Log: slog.New(slog.DiscardHandler)}
		nc := &pipeConn{r: bytes.NewReader(b), done: make(chan struct{})}
		newServerConn(s, nc, newPatient(nc), &tls.ConnectionState{}).run()
	})
}

// Whatever a server sends, a call ends with the connection.
func FuzzClient(f *testing.F) {
	f.Add(frames(func(f *http2.Framer, enc func(...string) []byte) {
		f.WriteSettings(http2.Setting{ID: http2.SettingMaxFrameSize, Val: 1 << 20}, http2.Setting{ID: http2.SettingHeaderTableSize, Val: 0})
		f.WriteWindowUpdate(0, 100)
		f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, EndHeaders: true, BlockFragment: enc(":status", "200", "content-type", "application/grpc")})
		f.WriteData(1, false, []byte("\x00\x00\x00\x00\x01x"))
		f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, EndHeaders: true, EndStream: true, BlockFragment: enc("grpc-status", "0")})
		f.WriteGoAway(1, 0, nil)
	}))
	f.Add([]byte{0, 0, 4, 3, 0, 0, 0, 0, 1, 0, 0, 0, 7})
	f.Fuzz(func(t *testing.T, b []byte) {
		// The server answers nothing before it is called.
		called := make(chan struct{})
		nc := &pipeConn{r: io.MultiReader(waitReader(called), bytes.NewReader(b)), done: make(chan struct{})}
		c := newClientConn(nc, newPatient(nc))
		req, err := http.NewRequest(http.MethodPost, "https://x/a", strings.NewReader("hello"))
		if err != nil {
			t.Fatal(err)
		}
		go close(called)
		if resp, err := c.call(req); err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
		c.retire()
		<-c.done
	})
}

type waitReader chan struct{}

func (w waitReader) Read([]byte) (int, error) { <-w; return 0, io.EOF }
