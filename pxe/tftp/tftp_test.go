package tftp

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pin/tftp/v3"

	"github.com/better-compute/site-appliance/pxe/files"
)

func packetOf(op byte, parts ...string) []byte {
	b := []byte{0, op}
	for _, p := range parts {
		b = append(append(b, p...), 0)
	}
	return b
}

func TestParse(t *testing.T) {
	for _, tt := range []struct {
		name string
		in   []byte
		want request
		err  error
	}{
		{"EDK2's probe", packetOf(1, "snponly.efi", "octet", "tsize", "0", "blksize", "1468", "windowsize", "4"),
			request{name: "snponly.efi", mode: "octet", blksize: "1468", tsize: "0", windowsize: "4"}, nil},
		{"U-Boot's", packetOf(1, "a", "octet", "timeout", "5", "blksize", "1468", "windowsize", "64"),
			request{name: "a", mode: "octet", blksize: "1468", timeout: "5", windowsize: "64"}, nil},
		{"upper case", packetOf(1, "/snponly.efi", "OCTET", "BLKSIZE", "1468"), request{name: "snponly.efi", mode: "octet", blksize: "1468"}, nil},
		{"spellings", packetOf(1, `\\ipxe//a\.\b`+"\xff", "octet"), request{name: "ipxe/a/b", mode: "octet"}, nil},
		{"dots stay to be refused", packetOf(1, "../etc/passwd", "octet"), request{name: "../etc/passwd", mode: "octet"}, nil},
		{"not a number", packetOf(1, "a", "octet", "blksize", "12x"), request{name: "a", mode: "octet"}, nil},
		{"write", packetOf(2, "a", "octet"), request{}, errWrite},
		{"netascii", packetOf(1, "a", "netascii"), request{}, errMalformed},
		{"no mode", packetOf(1, "a"), request{}, errMalformed},
		{"no name", packetOf(1, "", "octet"), request{}, errMalformed},
		{"odd options", packetOf(1, "a", "octet", "blksize"), request{}, errMalformed},
		{"no NUL", []byte("\x00\x01a\x00octet"), request{}, errMalformed},
		{"long name", packetOf(1, strings.Repeat("a", 300), "octet"), request{}, errMalformed},
		{"data", packetOf(3, "a", "octet"), request{}, errMalformed},
		{"short", []byte{0}, request{}, errMalformed},
		{"empty", nil, request{}, errMalformed},
	} {
		got, err := parse(tt.in)
		if got != tt.want || !errors.Is(err, tt.err) {
			t.Errorf("parse(%s) = %+v, %v, want %+v, %v", tt.name, got, err, tt.want, tt.err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(packetOf(1, "snponly.efi", "octet", "tsize", "0", "blksize", "1468", "windowsize", "4"))
	f.Add(packetOf(2, "a", "octet"))
	f.Fuzz(func(t *testing.T, p []byte) {
		r, err := parse(p)
		if err != nil {
			return
		}
		b := make([]byte, 516) // what the library reads into
		n := r.marshal(b)
		if n > len(b) {
			t.Fatalf("marshal(%+v) = %d bytes, more than %d", r, n, len(b))
		}
		if again, err := parse(b[:n]); err != nil || again != r {
			t.Errorf("parse(marshal(%+v)) = %+v, %v", r, again, err)
		}
	})
}

type memory struct{ *bytes.Reader }

func (memory) Close() error { return nil }

type server struct {
	addr  string
	mu    sync.Mutex
	ended []Transfer
}

func (s *server) transfers() []Transfer {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Transfer(nil), s.ended...)
}

var content = func() []byte {
	b := make([]byte, 200_000)
	_, _ = rand.Read(b)
	return b
}()

// start serves content as "snponly.efi" on an ephemeral port of the loopback.
func start(t testing.TB, transfers, perClient int) *server {
	t.Helper()
	conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	s := &server{addr: conn.LocalAddr().String()}
	srv := &Server{mtu: 1500, retransmit: 200 * time.Millisecond, patience: patience, gate: newGate(conn, transfers, perClient, time.Now), cfg: Config{
		Interface: "lo", Address: netip.MustParseAddr("127.0.0.1"),
		Log: slog.New(slog.DiscardHandler),
		Open: func(_ context.Context, _ netip.Addr, name string) (files.File, error) {
			if name != "snponly.efi" {
				return nil, &os.PathError{Op: "open", Path: "/secret/place/" + name, Err: os.ErrNotExist}
			}
			return memory{bytes.NewReader(content)}, nil
		},
		Ended: func(tr Transfer) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.ended = append(s.ended, tr)
		},
	}}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- srv.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Serve = %v, want nil", err)
		}
	})
	return s
}

func TestServe(t *testing.T) {
	s := start(t, 10, 10)
	for _, blksize := range []int{0, 512, 1468, 9000} {
		c, err := tftp.NewClient(s.addr)
		if err != nil {
			t.Fatal(err)
		}
		if blksize > 0 {
			c.SetBlockSize(blksize)
		}
		c.RequestTSize(true)
		wt, err := c.Receive("//snponly.efi", "octet")
		if err != nil {
			t.Fatal(err)
		}
		if n, ok := wt.(tftp.IncomingTransfer).Size(); !ok || n != int64(len(content)) {
			t.Errorf("tsize at blksize %d = %d, %v, want %d", blksize, n, ok, len(content))
		}
		var got bytes.Buffer
		if _, err := wt.WriteTo(&got); err != nil || !bytes.Equal(got.Bytes(), content) {
			t.Errorf("read at blksize %d: %d bytes, %v, want the file", blksize, got.Len(), err)
		}
	}
}

func exchange(t *testing.T, conn *net.UDPConn, to string, p []byte) ([]byte, *net.UDPAddr) {
	t.Helper()
	addr, err := net.ResolveUDPAddr("udp4", to)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.WriteToUDP(p, addr); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 9000)
	_ = conn.SetReadDeadline(time.Now().Add(3 * time.Second))
	n, from, err := conn.ReadFromUDP(b)
	if err != nil {
		t.Fatalf("no answer to %q: %v", p, err)
	}
	return b[:n], from
}

func client(t *testing.T) *net.UDPConn {
	t.Helper()
	conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func TestErrorsTellNothing(t *testing.T) {
	s := start(t, 10, 10)
	for _, tt := range []struct {
		in   []byte
		want string
	}{
		{packetOf(1, "autoexec.ipxe", "octet"), "file not found"},
		{packetOf(1, "../../etc/passwd", "octet"), "file not found"},
		{packetOf(2, "snponly.efi", "octet"), "writing is not served"},
		{packetOf(1, "snponly.efi"), "malformed request"},
		{[]byte{0}, "malformed request"},
	} {
		got, _ := exchange(t, client(t), s.addr, tt.in)
		if binary.BigEndian.Uint16(got) != opError || string(got[4:len(got)-1]) != tt.want {
			t.Errorf("answer to %q = %q, want the error %q", tt.in, got, tt.want)
		}
	}
	if got := s.transfers(); len(got) != 0 {
		t.Errorf("refused requests counted as transfers: %+v", got)
	}
}

func TestProbeIsNoFailure(t *testing.T) {
	s := start(t, 10, 10)
	conn := client(t)
	oack, from := exchange(t, conn, s.addr, packetOf(1, "snponly.efi", "octet", "tsize", "0", "blksize", "1468", "windowsize", "4"))
	if want := packetOf(6, "blksize", "1468", "tsize", "200000", "windowsize", "4"); !bytes.Equal(oack, want) {
		t.Errorf("answer to a probe = %q, want %q", oack, want)
	}
	if _, err := conn.WriteToUDP(errorPacket(8, "User aborted the transfer"), from); err != nil {
		t.Fatal(err)
	}
	for range 100 {
		if got := s.transfers(); len(got) > 0 {
			if got[0].Outcome != Probed || got[0].Err != nil {
				t.Errorf("transfer = %+v, want a probe", got[0])
			}
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Error("the probe's end was not told")
}

// The cap is one over both senders, and of transfers that a client answers.
func TestCaps(t *testing.T) {
	s := start(t, 10, 2)
	for i, window := range []string{"", "4", "4", ""} {
		conn := client(t)
		parts := []string{"snponly.efi", "octet", "blksize", "1468"}
		if window != "" {
			parts = append(parts, "windowsize", window)
		}
		got, from := exchange(t, conn, s.addr, packetOf(1, parts...))
		want := uint16(6)
		if i >= 2 {
			want = opError
		}
		if op := binary.BigEndian.Uint16(got); op != want {
			t.Errorf("request %d of one client = opcode %d (%q), want %d", i+1, op, got, want)
			continue
		}
		if want == 6 {
			exchange(t, conn, from.String(), []byte{0, 4, 0, 0})
			exchange(t, conn, from.String(), []byte{0, 4, 0, 1})
		}
	}
}

func TestRepeatStartsOneTransfer(t *testing.T) {
	s := start(t, 10, 2)
	conn := client(t)
	rrq := packetOf(1, "snponly.efi", "octet", "blksize", "1468")
	_, first := exchange(t, conn, s.addr, rrq)
	// Only the running transfer answers, with its own retransmission.
	if _, from := exchange(t, conn, s.addr, rrq); from.Port != first.Port {
		t.Errorf("a repeated request is answered from port %d, want %d", from.Port, first.Port)
	}
}

// TestEndsInTheMiddleOfARequest: a server that is to end while its port's reader
// looks at a request for the library ends.
func TestEndsInTheMiddleOfARequest(t *testing.T) {
	conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	looks, goOn := make(chan struct{}), make(chan struct{})
	srv := &Server{mtu: 1500, retransmit: 50 * time.Millisecond, patience: patience, gate: newGate(conn, 4, 4, time.Now), cfg: Config{
		Interface: "lo", Address: netip.MustParseAddr("127.0.0.1"), Log: slog.New(slog.DiscardHandler), Ended: func(Transfer) {},
		Open: func(context.Context, netip.Addr, string) (files.File, error) {
			return memory{bytes.NewReader(content)}, nil
		},
		Refuse: func(netip.Addr, string) error { close(looks); <-goOn; return nil },
	}}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- srv.Serve(ctx) }()
	c, err := net.Dial("udp4", conn.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write(packetOf(1, "snponly.efi", "octet")); err != nil {
		t.Fatal(err)
	}
	<-looks
	cancel()
	time.Sleep(100 * time.Millisecond) // so that the end has begun
	close(goOn)
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("Serve = %v, want nil", err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("the server does not end")
	}
}

// TestRefuseIsAsked: what Refuse refuses is never opened, and what it lets through
// is opened once.
func TestRefuseIsAsked(t *testing.T) {
	conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var opened []string
	srv := &Server{mtu: 1500, retransmit: 200 * time.Millisecond, patience: patience, gate: newGate(conn, 4, 4, time.Now), cfg: Config{
		Interface: "lo", Address: netip.MustParseAddr("127.0.0.1"), Log: slog.New(slog.DiscardHandler), Ended: func(Transfer) {},
		Open: func(_ context.Context, _ netip.Addr, name string) (files.File, error) {
			mu.Lock()
			defer mu.Unlock()
			opened = append(opened, name)
			return memory{bytes.NewReader(content)}, nil
		},
		Refuse: func(_ netip.Addr, name string) error {
			if name == "no" {
				return errors.New("not for you")
			}
			return nil
		},
	}}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- srv.Serve(ctx) }()
	defer func() { cancel(); <-done }()
	get := func(name string) error {
		c, err := tftp.NewClient(conn.LocalAddr().String())
		if err != nil {
			return err
		}
		to, err := c.Receive(name, "octet")
		if err != nil {
			return err
		}
		_, err = to.WriteTo(new(bytes.Buffer))
		return err
	}
	if err := get("no"); err == nil {
		t.Error("what is refused was sent")
	}
	if err := get("yes"); err != nil {
		t.Errorf("what is not refused = %v", err)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(opened) != 1 || opened[0] != "yes" {
		t.Errorf("opened %q, want yes once", opened)
	}
}
