package h2

import (
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
)

// hostile is a server of the test's own: f gets the connection once the client's
// first call has come. The client's frames are read no further.
func hostile(t *testing.T, f func(nc *tls.Conn)) net.Addr {
	t.Helper()
	l := socket(t)
	ended := make(chan struct{})
	stop := make(chan struct{})
	go func() {
		defer close(ended)
		nc, err := l.Accept()
		if err != nil {
			return
		}
		defer nc.Close()
		s := tls.Server(nc, serverTLS(t))
		if s.Handshake() == nil {
			f(s)
		}
		<-stop
	}()
	t.Cleanup(func() {
		close(stop)
		l.Close()
		<-ended
	})
	return l.Addr()
}

// A server that makes the client answer, and never reads, is let go: by a frame
// that is wrong for its stream alone, too.
func TestClientOwesNoMore(t *testing.T) {
	ping := append([]byte{0, 0, 8, byte(http2.FramePing), 0, 0, 0, 0, 0}, make([]byte, 8)...)
	// A window that grows by nothing is an error of the stream.
	grow := append([]byte{0, 0, 4, byte(http2.FrameWindowUpdate), 0, 0, 0, 0, 1}, 0, 0, 0, 0)
	for name, frame := range map[string][]byte{"pings": ping, "stream errors": grow} {
		t.Run(name, func(t *testing.T) {
			wrote := make(chan error, 1)
			a := hostile(t, func(nc *tls.Conn) {
				f := http2.NewFramer(nc, nc)
				_ = f.WriteSettings()
				var many []byte
				for range 1000 {
					many = append(many, frame...)
				}
				var err error
				for i := 0; i < 2000 && err == nil; i++ {
					_, err = nc.Write(many)
				}
				wrote <- err
			})
			c := client(t, a)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			if resp, err := get(ctx, c); err == nil {
				resp.Body.Close()
			}
			if err := <-wrote; err == nil {
				t.Error("two million unread answers were kept")
			}
		})
	}
}

// TLS answers a request for new keys by itself, on the reader's goroutine.
func TestPatientIsBounded(t *testing.T) {
	l := socket(t)
	defer l.Close()
	go func() {
		if nc, err := l.Accept(); err == nil {
			<-t.Context().Done()
			nc.Close()
		}
	}()
	nc, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	p := newPatient(nc)
	p.start()
	b := make([]byte, 1024)
	for i := 0; i < 64<<10; i++ {
		if _, err := p.Write(b); err != nil {
			return
		}
	}
	t.Errorf("%d bytes are kept of what TLS wrote by itself", len(p.kept))
}

// A connection that is lost lets Close end, though the caller of a call has not
// heard of it yet.
func TestCloseAfterLossWithAnOpenStream(t *testing.T) {
	s, a := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	c := client(t, a)
	pr, pw := io.Pipe()
	defer pw.Close()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://x/a", pr)
	if err != nil {
		t.Fatal(err)
	}
	req.ContentLength = -1
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	conn := c.conn
	<-conn.done
	closed := make(chan struct{})
	go func() { c.Close(); close(closed) }()
	select {
	case <-closed:
	case <-time.After(3 * time.Second):
		t.Error("Close waits for the caller of a call on a connection that is lost")
	}
	resp.Body.Close()
}

// Calls to a server that reads nothing leave little behind.
func TestCallsToADeafServerAreBounded(t *testing.T) {
	a := hostile(t, func(nc *tls.Conn) {
		f := http2.NewFramer(nc, nc)
		_ = f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: maxWindow})
		_ = f.WriteWindowUpdate(0, maxWindow-65535)
	})
	c := client(t, a)
	patience := 500 * time.Millisecond // the first call connects
	for i := range 500 {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		patience = 200 * time.Microsecond
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://x/a", nil)
		if err != nil {
			t.Fatal(err)
		}
		// One that no table of headers holds.
		req.Header.Set("X-Big", strings.Repeat(string(rune('a'+i%26)), 8<<10))
		if resp, err := c.Do(req); err == nil {
			resp.Body.Close()
		}
		cancel()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn == nil {
		t.Fatal("the connection is gone")
	}
	c.conn.mu.Lock()
	defer c.conn.mu.Unlock()
	if n := len(c.conn.pending); n > 2*maxPending {
		t.Errorf("%d bytes are pending", n)
	}
}

// A block of headers that never ends ends the connection.
func TestEndlessHeaders(t *testing.T) {
	for name, part := range map[string][]byte{"empty parts": nil, "fields": {0x40, 1, 'x', 1, 'y'}} {
		wrote := make(chan error, 1)
		a := hostile(t, func(nc *tls.Conn) {
			f := http2.NewFramer(nc, nc)
			_ = f.WriteSettings()
			go func() {
				for {
					if _, err := f.ReadFrame(); err != nil {
						return
					}
				}
			}()
			err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: []byte{0x88}})
			for i := 0; i < 300_000 && err == nil; i++ {
				err = f.WriteContinuation(1, false, part)
			}
			wrote <- err
		})
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		if resp, err := get(ctx, client(t, a)); err == nil {
			resp.Body.Close()
			t.Errorf("%s: a call was answered", name)
		}
		cancel()
		if err := <-wrote; err == nil {
			t.Errorf("%s: three hundred thousand parts of one block were taken", name)
		}
	}
}

// A call that is tried again sends its own body, whole.
func TestTriedAgainWithALargeBody(t *testing.T) {
	l := socket(t)
	defer l.Close()
	body := bytes.Repeat([]byte("0123456789"), 20_000)
	got := make(chan int, 1)
	go func() {
		nc, err := l.Accept()
		if err != nil {
			return
		}
		defer nc.Close()
		s := tls.Server(nc, serverTLS(t))
		if s.Handshake() != nil {
			return
		}
		_, _ = io.ReadFull(s, make([]byte, len(http2.ClientPreface)))
		f := http2.NewFramer(s, s)
		_ = f.WriteSettings()
		total := 0
		for {
			frame, err := f.ReadFrame()
			if err != nil {
				return
			}
			switch frame := frame.(type) {
			case *http2.HeadersFrame:
				if frame.StreamID == 1 {
					_ = f.WriteRSTStream(1, http2.ErrCodeRefusedStream)
				}
			case *http2.DataFrame:
				if n := uint32(frame.Length); n > 0 {
					_ = f.WriteWindowUpdate(0, n)
					if frame.StreamID == 3 {
						_ = f.WriteWindowUpdate(3, n)
					}
				}
				if frame.StreamID != 3 {
					continue
				}
				if total += len(frame.Data()); frame.StreamEnded() {
					got <- total
					_ = f.WriteRSTStream(3, http2.ErrCodeCancel)
				}
			case *http2.RSTStreamFrame:
				if frame.StreamID == 3 {
					got <- total
				}
			}
		}
	}()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://x/a", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if resp, err := client(t, l.Addr()).Do(req); err == nil {
		resp.Body.Close()
	}
	select {
	case n := <-got:
		if n != len(body) {
			t.Errorf("%d bytes came, want %d", n, len(body))
		}
	case <-time.After(5 * time.Second):
		t.Error("the body did not come")
	}
}
