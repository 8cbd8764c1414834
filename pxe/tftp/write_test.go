package tftp

import (
	"bytes"
	"context"
	"encoding/binary"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/limit"
	"github.com/better-compute/site-appliance/pxe/pxetest"
)

// TestWriteSplits sends windows, and parts of windows again, as runs that the
// kernel splits and without its help: the datagrams are the same.
func TestWriteSplits(t *testing.T) { testWrite(t, "127.0.0.1") }

func TestWriteSplitsIPv6(t *testing.T) {
	if pxetest.InNamespace(t) {
		testWrite(t, "::1")
	}
}

func testWrite(t *testing.T, own string) {
	listen := func() *net.UDPConn {
		conn, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(own)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	type part struct{ from, to int64 }
	for _, tt := range []struct {
		name            string
		blksize, window int
		size            int
		parts           []part
	}{
		{"windows", 512, 4, 512*8 + 9, []part{{1, 5}, {5, 9}, {9, 10}}},
		{"over the ring's end", 512, 4, 512 * 10, []part{{1, 4}, {4, 7}, {7, 11}, {11, 12}}},
		{"again from a loss", 512, 4, 512 * 8, []part{{1, 5}, {3, 7}, {3, 5}, {6, 7}}},
		{"an empty last block in the run", 100, 8, 300, []part{{1, 5}}},
		{"a short last block in the run", 100, 8, 301, []part{{1, 5}}},
		{"one block", 1468, 16, 5, []part{{1, 2}}},
		{"more than the kernel takes at once", 9000, 14, 9000 * 14, []part{{1, 15}}},
		{"as many as the kernel takes", 8, 64, 8 * 64, []part{{1, 65}}},
	} {
		for name, segment := range map[string][]byte{
			"split":         segmentOf(tt.blksize + 4),
			"never split":   nil,
			"split refused": segmentOf(1), // too many parts for any kernel
		} {
			file := content[:tt.size]
			to := listen()
			_ = to.SetReadBuffer(1 << 20)
			s := newSender(listen(), to.LocalAddr().(*net.UDPAddr).AddrPort(), memory{bytes.NewReader(file)}, agreement{blksize: tt.blksize, window: tt.window})
			s.segment = segment
			buf := make([]byte, 10000)
			for _, p := range tt.parts {
				if err := s.write(p.from, p.to); err != nil {
					t.Fatalf("%s, %s: write(%d, %d) = %v", tt.name, name, p.from, p.to, err)
				}
				for i := p.from; i < p.to; i++ {
					want := binary.BigEndian.AppendUint16([]byte{0, opData}, uint16(i))
					want = append(want, file[min(int(i-1)*tt.blksize, tt.size):min(int(i)*tt.blksize, tt.size)]...)
					_ = to.SetReadDeadline(time.Now().Add(5 * time.Second))
					n, err := to.Read(buf)
					if err != nil || !bytes.Equal(buf[:n], want) {
						t.Fatalf("%s, %s: block %d of %d to %d = %d bytes, %v, want %d", tt.name, name, i, p.from, p.to, n, err, len(want))
					}
				}
			}
			_ = to.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
			if n, err := to.Read(buf); err == nil {
				t.Errorf("%s, %s: %d bytes more than were to be sent", tt.name, name, n)
			}
			if name == "split refused" && s.segment != nil {
				for _, p := range tt.parts {
					if p.to-p.from > 1 {
						t.Errorf("%s: runs are tried on after the kernel refused one", tt.name)
						break
					}
				}
			}
			if name == "split" && s.segment == nil {
				t.Errorf("%s: this kernel splits no runs", tt.name)
			}
		}
	}
}

func TestUnsplit(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want bool
	}{
		{unix.EIO, true}, // a device without checksums, or IPsec
		{unix.EINVAL, true}, {unix.EMSGSIZE, true},
		{unix.ENOBUFS, false}, {unix.ENETDOWN, false}, {unix.EPERM, false}, // losses
	} {
		if got := unsplit(&net.OpError{Op: "write", Err: tt.err}); got != tt.want {
			t.Errorf("unsplit(%v) = %v, want %v", tt.err, got, tt.want)
		}
	}
}

// A file that became shorter than it was ends its transfer.
func TestFileCutShort(t *testing.T) {
	to := client(t)
	s := newSender(client(t), to.LocalAddr().(*net.UDPAddr).AddrPort(), cut{memory{bytes.NewReader(content[:1000])}}, agreement{blksize: 512, window: 4})
	if err := s.write(1, 3); err == nil {
		t.Error("a file of 1000 bytes that says 2000 is sent, want an error")
	}
}

type cut struct{ memory }

func (cut) Size() int64 { return 2000 }

// Who has not answered costs no buffers, and of many each has a smaller window.
func TestWhatTransfersKeep(t *testing.T) {
	s := newSender(client(t), netip.MustParseAddrPort("127.0.0.1:9"), memory{bytes.NewReader(content)}, agreement{blksize: 1468, window: 64, oack: []byte{0, opOptions}})
	if err := s.write(0, 1); err != nil || s.ring != nil || s.src != nil {
		t.Errorf("after the options: %v, a ring of %d bytes, want none", err, len(s.ring))
	}
	g := newGate(client(t), 1024, 1024, time.Now)
	most := 0
	for i := range 1024 {
		kept := g.windowBytes()
		a := agree(request{blksize: "1468", windowsize: "64"}, 1500, kept, 1<<20, time.Second)
		if i == 0 && a.window != 64 {
			t.Errorf("the only transfer has a window of %d, want 64", a.window)
		}
		if kept < 4*1468 {
			t.Errorf("transfer %d keeps %d bytes, under EDK2's window", i, kept)
		}
		most += kept
		g.admit(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(i+1)), false, func() {})
	}
	if most > 64<<20 {
		t.Errorf("1024 transfers keep %d bytes", most)
	}
}

// Firmware that finds nothing asks again and again.
func TestRefusalsAreLoggedOnceAMinute(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	var log bytes.Buffer
	s := &Server{gate: newGate(client(t), 1, 1, func() time.Time { return now }), refusals: limit.Minute{Most: perMinute}, cfg: Config{
		Log:  slog.New(slog.NewTextHandler(&log, nil)),
		Open: func(context.Context, netip.Addr, string) (files.File, error) { return nil, os.ErrNotExist }}}
	for _, tt := range []struct {
		after  time.Duration
		client string
		want   string // the line's end; empty: no line
	}{
		{0, "10.0.0.1", "untold=0"},
		{time.Second, "10.0.0.1", ""},
		{time.Second, "10.0.0.2", "untold=0"},
		{time.Second, "10.0.0.1", ""},
		{time.Minute, "10.0.0.1", "untold=2"},
		{time.Second, "10.0.0.1", ""},
	} {
		now = now.Add(tt.after)
		log.Reset()
		if f, err := s.open(t.Context(), netip.MustParseAddr(tt.client), "none"); err == nil || f != nil {
			t.Fatalf("open = %v, %v, want an error", f, err)
		}
		if got := strings.TrimSpace(log.String()); !strings.HasSuffix(got, tt.want) || (got == "") != (tt.want == "") {
			t.Errorf("after %s, %s refused logs %q, want the end %q", tt.after, tt.client, got, tt.want)
		}
	}
}
