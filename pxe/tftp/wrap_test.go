package tftp

import (
	"bytes"
	"context"
	"crypto/sha256"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/tftp/tftptest"
)

// TestBlockNumbersWrap: files of more blocks than 16 bits count are whole, over the
// wire, by the library and by ours, in lock-step and by windows.
func TestBlockNumbersWrap(t *testing.T) {
	const blocks = 1 << 16
	for _, tt := range []struct {
		name            string
		blksize, window int
		size            int
		library         bool
	}{
		{"the library's", 512, 0, 512*blocks + 100, true},
		{"the library's, to an empty block 0", 512, 0, 512 * (blocks - 1), true},
		{"ours, in lock-step", 8, 0, 8*2*blocks + 3, false},
		{"ours, by windows", 8, 64, 8*2*blocks + 3, false},
		{"ours, by windows that do not divide the count", 8, 7, 8*2*blocks + 3, false},
		{"ours, by windows, to an empty block 0", 8, 16, 8 * (2*blocks - 1), false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
			if err != nil {
				t.Fatal(err)
			}
			want := make([]byte, tt.size)
			_, _ = rand.NewChaCha8([32]byte{1}).Read(want)
			library := make(chan bool, 1)
			gate := newGate(conn, 1, 1, time.Now)
			srv := &Server{mtu: 1500, retransmit: time.Second, patience: patience, gate: gate, cfg: Config{
				Interface: "lo", Address: netip.MustParseAddr("127.0.0.1"), Log: slog.New(slog.DiscardHandler), Ended: func(Transfer) {},
				Refuse: func(netip.Addr, string) error { return nil },
				Open: func(context.Context, netip.Addr, string) (files.File, error) {
					gate.mu.Lock()
					defer gate.mu.Unlock()
					for _, s := range gate.active {
						library <- s.library
					}
					return memory{bytes.NewReader(want)}, nil
				},
			}}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- srv.Serve(ctx) }()
			got := sha256.New()
			n, err := tftptest.Fetch(conn.LocalAddr().(*net.UDPAddr).AddrPort(), "disc", tt.blksize, tt.window, got)
			if sum := sha256.Sum256(want); err != nil || n != int64(tt.size) || !bytes.Equal(got.Sum(nil), sum[:]) {
				t.Errorf("read %d bytes, %v, want the file's %d", n, err, tt.size)
			}
			if got := <-library; got != tt.library {
				t.Errorf("the library's transfer: %v, want %v", got, tt.library)
			}
			cancel()
			<-done
		})
	}
}
