package tftp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/limit"
)

// awaited is a file that has blocks so far, and waits for the rest until ctx ends.
type awaited struct {
	memory
	ctx   context.Context
	waits chan<- struct{}
	ended chan<- struct{}
}

func (f awaited) Read(p []byte) (int, error) {
	if f.Len() > 0 {
		return f.memory.Read(p)
	}
	f.waits <- struct{}{}
	<-f.ctx.Done()
	f.ended <- struct{}{}
	return 0, f.ctx.Err()
}

func (awaited) Size() int64 { return 200_000 }

// TestWaitsEndWithTheClient: what waits for bytes that have not come ends when no
// client can be waiting any more, and when its place goes to another; the place is
// free then.
func TestWaitsEndWithTheClient(t *testing.T) {
	const never = time.Hour
	for _, tt := range []struct {
		name     string
		options  []string
		there    int // bytes
		acks     []byte
		opens    bool // it is opening that waits
		patience time.Duration
		dropped  bool
		outcome  Outcome // empty: none is told
	}{
		{"the library's, before the first block", nil, 0, nil, false, 50 * time.Millisecond, false, Failed},
		{"the library's, later", []string{"blksize", "1024"}, readAhead, []byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, false, 50 * time.Millisecond, false, Failed},
		{"ours, before the first block", []string{"windowsize", "4"}, 0, []byte{0}, false, 50 * time.Millisecond, false, Failed},
		{"ours, later", []string{"windowsize", "4"}, readAhead, []byte{0, 4, 8, 12, 16, 20, 24, 28, 32}, false, 50 * time.Millisecond, false, Failed},
		{"opening by the library", nil, 0, nil, true, 50 * time.Millisecond, false, ""},
		{"opening by ours", []string{"timeout", "5"}, 0, nil, true, 50 * time.Millisecond, false, ""},
		{"opening, whose place is needed", []string{"windowsize", "4"}, 0, nil, true, never, true, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
			if err != nil {
				t.Fatal(err)
			}
			var log bytes.Buffer
			waits, ended, told := make(chan struct{}, 1), make(chan struct{}, 1), make(chan Transfer, 1)
			gate := newGate(conn, 1, 1, time.Now)
			srv := &Server{mtu: 1500, retransmit: never, patience: tt.patience, gate: gate, refusals: limit.Minute{Most: perMinute}, others: limit.Minute{Most: othersPerMinute}, cfg: Config{
				Interface: "lo", Address: netip.MustParseAddr("127.0.0.1"), Log: slog.New(slog.NewTextHandler(&log, nil)), Ended: func(tr Transfer) { told <- tr },
				Refuse: func(netip.Addr, string) error { return nil },
				Open: func(ctx context.Context, _ netip.Addr, name string) (files.File, error) {
					if name == "other" {
						return nil, errors.New("it only needs the place")
					}
					f := awaited{memory{bytes.NewReader(content[:tt.there])}, ctx, waits, ended}
					if tt.opens {
						_, err := f.Read(nil)
						return nil, err
					}
					return f, nil
				},
			}}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- srv.Serve(ctx) }()
			defer func() {
				if cancel(); !t.Failed() { // or what still waits holds it up
					<-done
				}
			}()

			c, server := client(t), conn.LocalAddr().(*net.UDPAddr).AddrPort()
			if _, err := c.WriteToUDPAddrPort(packetOf(opRead, append([]string{"late", "octet"}, tt.options...)...), server); err != nil {
				t.Fatal(err)
			}
			buf := make([]byte, 2048)
			for _, block := range tt.acks {
				for got := byte(255); got != block; got = buf[3] {
					_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
					_, from, err := c.ReadFromUDPAddrPort(buf)
					if err != nil {
						t.Fatalf("before block %d: %v", block, err)
					}
					if buf[1] == opOptions {
						buf[3] = 0
					}
					if buf[3] == block {
						_, _ = c.WriteToUDPAddrPort([]byte{0, opAck, 0, block}, from)
					}
				}
			}
			after := func(what string, c <-chan struct{}) {
				t.Helper()
				select {
				case <-c:
				case <-time.After(20 * time.Second):
					t.Fatal(what)
				}
			}
			after("nothing waits", waits)
			if !tt.dropped {
				c.Close()
			} else {
				if _, err := client(t).WriteToUDPAddrPort(packetOf(opRead, "other", "octet"), server); err != nil {
					t.Fatal(err)
				}
			}
			after("it waits on for a client that is gone", ended)
			if tt.outcome != "" {
				if tr := <-told; tr.Outcome != tt.outcome || tr.Err == nil {
					t.Errorf("transfer = %+v, want one that %s", tr, tt.outcome)
				}
			}
			for left, end := 1, time.Now().Add(20*time.Second); left > 0; time.Sleep(time.Millisecond) {
				gate.mu.Lock()
				left = len(gate.active)
				gate.mu.Unlock()
				if time.Now().After(end) {
					t.Fatal("its place is not free")
				}
			}
			if tt.dropped {
				cancel()
				<-done
				done <- nil
				silent(t, c)
				if strings.Contains(log.String(), "file=late") {
					t.Errorf("the log has %s", log.String())
				}
			}
		})
	}
}

// silent checks that nothing has come for c: who waits, and is told an error, gives up.
func silent(t *testing.T, c *net.UDPConn) {
	t.Helper()
	if _, err := c.WriteToUDPAddrPort([]byte("mine"), c.LocalAddr().(*net.UDPAddr).AddrPort()); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 2048)
	_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
	if n, _, err := c.ReadFromUDPAddrPort(buf); err != nil || string(buf[:n]) != "mine" {
		t.Errorf("the client is told %q, %v, want nothing", buf[:n], err)
	}
}

// TestOpeningIsWaitedFor: who asks again from the same port while the file is being
// opened, as GRUB does every second, is neither refused nor served twice, by the
// library and by us; and one who asks there for another file is not held up.
func TestOpeningIsWaitedFor(t *testing.T) {
	for _, options := range [][]string{nil, {"blksize", "1024", "tsize", "0"}, {"windowsize", "4"}} {
		t.Run(strings.Join(options, " "), func(t *testing.T) {
			conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
			if err != nil {
				t.Fatal(err)
			}
			var mu sync.Mutex
			var log bytes.Buffer
			now, opened := time.Now(), 0
			opens, goOn, told := make(chan struct{}, 8), make(chan struct{}), make(chan Transfer, 8)
			gate := newGate(conn, 4, 4, func() time.Time { mu.Lock(); defer mu.Unlock(); return now })
			srv := &Server{mtu: 1500, retransmit: time.Hour, patience: time.Hour, gate: gate, refusals: limit.Minute{Most: perMinute}, others: limit.Minute{Most: othersPerMinute}, cfg: Config{
				Interface: "lo", Address: netip.MustParseAddr("127.0.0.1"), Log: slog.New(slog.NewTextHandler(&log, nil)), Ended: func(tr Transfer) { told <- tr },
				Refuse: func(_ netip.Addr, name string) error {
					if name == "none" {
						return os.ErrNotExist
					}
					return nil
				},
				Open: func(ctx context.Context, _ netip.Addr, _ string) (files.File, error) {
					mu.Lock()
					opened++
					mu.Unlock()
					opens <- struct{}{}
					select {
					case <-goOn:
						return memory{bytes.NewReader(content[:9])}, nil
					case <-ctx.Done():
						return nil, ctx.Err()
					}
				},
			}}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- srv.Serve(ctx) }()
			c, other, server := client(t), client(t), conn.LocalAddr().(*net.UDPAddr).AddrPort()
			buf := make([]byte, 2048)
			answer := func(c *net.UDPConn) (opcode byte, from netip.AddrPort) {
				t.Helper()
				_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
				_, from, err := c.ReadFromUDPAddrPort(buf)
				if err != nil {
					t.Fatal(err)
				}
				return buf[1], from
			}
			ask := func(c *net.UDPConn, name string, options ...string) {
				t.Helper()
				if _, err := c.WriteToUDPAddrPort(packetOf(opRead, append([]string{name, "octet"}, options...)...), server); err != nil {
					t.Fatal(err)
				}
			}
			// again asks as before, so much later, and returns when that was read.
			again := func(later time.Duration) {
				t.Helper()
				mu.Lock()
				now = now.Add(later)
				mu.Unlock()
				ask(c, "late", options...)
				ask(other, "none")
				if opcode, _ := answer(other); opcode != opError {
					t.Fatalf("opcode %d, want an error", opcode)
				}
			}
			ask(c, "late", options...)
			<-opens
			for range 5 {
				again(repeatWindow + time.Second)
			}
			silent(t, c)
			if at := c.LocalAddr().(*net.UDPAddr).AddrPort(); !gate.awaits(at, "late") || gate.awaits(at, "other") {
				t.Error("a request for another file is taken for a repeat, or a repeat for another's")
			}
			close(goOn)
			opcode, from := answer(c)
			if opcode == opError {
				t.Fatalf("it is refused: %q", buf[4:20])
			}
			again(repeatWindow / 2)
			if opcode == opOptions {
				_, _ = c.WriteToUDPAddrPort([]byte{0, opAck, 0, 0}, from)
				if opcode, from = answer(c); opcode != opData {
					t.Fatalf("opcode %d, want data", opcode)
				}
			}
			_, _ = c.WriteToUDPAddrPort([]byte{0, opAck, 0, 1}, from)
			select {
			case tr := <-told:
				if tr.Outcome != Done {
					t.Errorf("transfer = %+v, want one that is done", tr)
				}
			case <-time.After(20 * time.Second):
				t.Error("the transfer does not end")
			}
			mu.Lock()
			if opened != 1 {
				t.Errorf("the file is opened %d times, want once", opened)
			}
			mu.Unlock()
			if cancel(); t.Failed() {
				return // what was opened twice holds it up
			}
			<-done
			silent(t, c)
			if strings.Contains(log.String(), "file=late") {
				t.Errorf("the log has %s", log.String())
			}
		})
	}
}

// TestOwnFilesAreReadAtOnce: a block of a boot program of the box costs a read and no
// timer, which slowed windows by a third.
func TestOwnFilesAreReadAtOnce(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "x"), make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	s := &Server{patience: time.Minute, cfg: Config{Open: func(context.Context, netip.Addr, string) (files.File, error) { return files.Dir(dir).Open("x") }}}
	f, err := s.open(t.Context(), netip.Addr{}, "x")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	block := make([]byte, 512)
	if n := testing.AllocsPerRun(100, func() {
		_, _ = f.Seek(0, io.SeekStart)
		if n, err := f.Read(block); n != len(block) || err != nil {
			t.Fatalf("Read = %d, %v", n, err)
		}
	}); n != 0 {
		t.Errorf("a block allocates %v times, want never", n)
	}
}
