package passthrough

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

// logs is a slog destination that can be read while it is written.
type logs struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logs) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.buf.String(), text)
}

// start serves with limits m, and ends with the test.
func start(t *testing.T, m limits, targets ...string) (address string, log *logs) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	log = &logs{}
	done := make(chan error, 1)
	go func() {
		done <- m.serve(ctx, l, func() []string { return targets }, slog.New(slog.NewTextHandler(log, nil)))
	}()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("Serve() = %v, want nil", err)
			}
		case <-time.After(5 * time.Second):
			t.Error("Serve() does not end with its context")
		}
	})
	return l.Addr().String(), log
}

// peer is a TCP server that hands out its connections.
func peer(t *testing.T) (address string, conns chan net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	conns = make(chan net.Conn, 64)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			conns <- c
		}
	}()
	t.Cleanup(func() { _ = l.Close(); <-done })
	return l.Addr().String(), conns
}

func dial(t *testing.T, address string) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	return c.(*net.TCPConn)
}

func next(t *testing.T, conns chan net.Conn) *net.TCPConn {
	t.Helper()
	select {
	case c := <-conns:
		t.Cleanup(func() { _ = c.Close() })
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		return c.(*net.TCPConn)
	case <-time.After(5 * time.Second):
		t.Fatal("the target saw no connection")
		return nil
	}
}

// Mutual TLS goes through whole: the machine verifies the gateway, not the box.
func TestTLSPassesThrough(t *testing.T) {
	gateway := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(w, r.Body)
	}))
	defer gateway.Close()
	address, _ := start(t, standard, gateway.Listener.Addr().String())
	pool := x509.NewCertPool()
	pool.AddCert(gateway.Certificate())
	transport := &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: pool, ServerName: "example.com"},
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, address)
		},
	}
	defer transport.CloseIdleConnections()
	body := make([]byte, 1<<20)
	_, _ = rand.Read(body)
	resp, err := (&http.Client{Transport: transport}).Post("https://example.com/x", "text/plain", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if got, err := io.ReadAll(resp.Body); err != nil || !bytes.Equal(got, body) {
		t.Errorf("1 MiB came back as %d bytes, %v", len(got), err)
	}
}

func TestHalfClose(t *testing.T) {
	target, conns := peer(t)
	address, _ := start(t, standard, target)
	client := dial(t, address)
	gateway := next(t, conns)
	if _, err := client.Write([]byte("question")); err != nil {
		t.Fatal(err)
	}
	if err := client.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(gateway); string(got) != "question" || err != nil {
		t.Errorf("the target read %q, %v, want the question and its end", got, err)
	}
	if _, err := gateway.Write([]byte("answer")); err != nil {
		t.Fatal(err)
	}
	_ = gateway.Close()
	if got, err := io.ReadAll(client); string(got) != "answer" || err != nil {
		t.Errorf("the client read %q, %v, want the answer after its own end", got, err)
	}
}

// What the client says never chooses where it goes.
func TestGoesNowhereElse(t *testing.T) {
	target, conns := peer(t)
	elsewhere, others := peer(t)
	address, _ := start(t, standard, target)
	for _, hello := range []string{"CONNECT " + elsewhere + " HTTP/1.1\r\n\r\n", "GET http://" + elsewhere + "/ HTTP/1.1\r\n\r\n", "\x05\x01\x00"} {
		client := dial(t, address)
		if _, err := client.Write([]byte(hello)); err != nil {
			t.Fatal(err)
		}
		_ = client.CloseWrite()
		if got, err := io.ReadAll(next(t, conns)); string(got) != hello || err != nil {
			t.Errorf("the target read %q, %v, want %q untouched", got, err, hello)
		}
	}
	if len(others) != 0 {
		t.Error("another host was reached")
	}
}

func TestNextTarget(t *testing.T) {
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = dead.Close()
	target, conns := peer(t)
	address, log := start(t, standard, dead.Addr().String(), target)
	client := dial(t, address)
	_, _ = next(t, conns).Write([]byte("x"))
	if n, err := client.Read(make([]byte, 4)); n != 1 || err != nil {
		t.Errorf("through the second target: read %d bytes, %v", n, err)
	}
	if log.count("reaches no gateway") != 0 {
		t.Error("a second target that answers was logged as none")
	}
}

func TestNoTarget(t *testing.T) {
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = dead.Close()
	address, log := start(t, standard, dead.Addr().String())
	for range 3 {
		if _, err := dial(t, address).Read(make([]byte, 1)); err == nil {
			t.Error("a connection without a target was kept open")
		}
	}
	if got := log.count("reaches no gateway"); got != 1 {
		t.Errorf("three failures are %d lines in the log, want 1", got)
	}
}

func TestCaps(t *testing.T) {
	target, conns := peer(t)
	m := standard
	m.total, m.perSource = 8, 3
	m.half = 200 * time.Millisecond // the target never closes its side
	address, log := start(t, m, target)
	held := []*net.TCPConn{}
	for range 3 {
		held = append(held, dial(t, address))
		next(t, conns)
	}
	for range 2 {
		if _, err := dial(t, address).Read(make([]byte, 1)); err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the connection past the cap: read = %v, want its end", err)
		}
	}
	if got := log.count("is full"); got != 1 {
		t.Errorf("two refusals are %d lines in the log, want 1", got)
	}
	_ = held[0].Close()
	deadline := time.Now().Add(5 * time.Second)
	for { // room comes when the box has seen the end
		client := dial(t, address)
		_ = client.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		var timeout net.Error
		if _, err := client.Read(make([]byte, 1)); errors.As(err, &timeout) && timeout.Timeout() {
			break // open, and nothing was said
		}
		if time.Now().After(deadline) {
			t.Fatal("no room after a connection ended")
		}
	}
}

func TestIdle(t *testing.T) {
	target, conns := peer(t)
	m := standard
	m.idle = 300 * time.Millisecond
	address, _ := start(t, m, target)

	quiet := dial(t, address)
	next(t, conns)
	begin := time.Now()
	if _, err := quiet.Read(make([]byte, 1)); err == nil {
		t.Error("an idle connection said something")
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("an idle connection ended after %v, want 300 ms", took)
	}

	// One way's bytes keep the other way open.
	busy := dial(t, address)
	gateway := next(t, conns)
	for range 10 {
		time.Sleep(100 * time.Millisecond)
		if _, err := gateway.Write([]byte("x")); err != nil {
			t.Fatalf("a busy connection was ended: %v", err)
		}
		if _, err := busy.Read(make([]byte, 1)); err != nil {
			t.Fatalf("a busy connection was ended: %v", err)
		}
	}
	if _, err := busy.Write([]byte("y")); err != nil {
		t.Fatal(err)
	}
	if _, err := gateway.Read(make([]byte, 1)); err != nil {
		t.Errorf("the quiet way of a busy connection was ended: %v", err)
	}
}

// A side that stops reading holds nothing for ever.
func TestStuckReader(t *testing.T) {
	target, conns := peer(t)
	m := standard
	m.write, m.idle = 300*time.Millisecond, time.Hour
	address, _ := start(t, m, target)
	client := dial(t, address)
	next(t, conns) // which never reads
	block := make([]byte, 1<<20)
	var err error
	for range 64 {
		if _, err = client.Write(block); err != nil {
			break
		}
	}
	if err == nil {
		t.Error("64 MiB went to a target that does not read, want the connection's end")
	}
}

func TestServeEndsWithItsListener(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
	if err := Serve(t.Context(), l, func() []string { return nil }, slog.New(slog.DiscardHandler)); err == nil {
		t.Error("Serve() on a closed listener = nil, want an error")
	}
}
