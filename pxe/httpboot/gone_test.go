package httpboot

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// arriving is a disc of which so much is there; what is behind it is waited for
// until ctx ends.
type arriving struct {
	disc
	ctx   context.Context
	there int64
	waits chan<- struct{}
	open  *atomic.Int64
}

func (a *arriving) Close() error {
	a.open.Add(-1)
	return nil
}

func (a *arriving) Has(off, n int64) bool { return off+n <= a.there }

func (a *arriving) Next(limit int64) (*os.File, int64, int64, error) {
	if a.at < a.there {
		return a.disc.Next(min(limit, a.there-a.at))
	}
	a.waits <- struct{}{}
	<-a.ctx.Done()
	return nil, 0, 0, a.ctx.Err()
}

// TestWaitsEndWithTheClient: who leaves while the box waits for the bytes of an
// answer leaves no request, no reader and no connection behind, on a drive too, and no
// word that anything is missing.
func TestWaitsEndWithTheClient(t *testing.T) {
	const there = 1 << 20
	for name, more := range map[string]func(path string) string{
		"for more of the whole":             func(path string) string { return edk2("GET", path, "") },
		"for a block of a drive":            func(path string) string { return ipxeGet(path, "bytes=1048576-1050623") },
		"for the end of a block of a drive": func(path string) string { return ipxeGet(path, "bytes=1048064-1050623") },
		"for a block, as GRUB":              func(path string) string { return grubGet(path, "Range: bytes=1048576-\r\n") },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.h.cfg.Holder = func(netip.Addr) (string, bool) { return macA, true }
			d, path := withDisc(t, r, 4*there)
			block := d.mark(t, 4096)
			waits, open, log := make(chan struct{}, 1), new(atomic.Int64), new(bytes.Buffer)
			r.h.cfg.Log = slog.New(slog.NewTextHandler(log, nil))
			r.h.cfg.Artifacts = func(ctx context.Context, _ string) (io.ReadSeekCloser, int64, error) {
				open.Add(1)
				return &arriving{*d, ctx, there, waits, open}, d.size, nil
			}
			ln, err := net.Listen("tcp4", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			closed := make(chan struct{}, 1)
			stop := serving(t, closing{ln, closed}, r.h, usual)
			conn, in := dial(t, ln.Addr())
			counted(t, conn, in, path)
			if resp, body := say(t, conn, in, ipxeGet(path, "bytes=4096-4607"), "GET"); resp.StatusCode != 206 || string(body[:len(block)]) != block {
				t.Errorf("a block that is there = %d %.20q, want %s", resp.StatusCode, body, block)
			}
			if _, err := io.WriteString(conn, more(path)); err != nil {
				t.Fatal(err)
			}
			select {
			case <-waits:
			case <-time.After(20 * time.Second):
				t.Fatal("nothing waits")
			}
			conn.Close()
			select {
			case <-closed:
			case <-time.After(20 * time.Second):
				t.Fatal("the box waits on for a client that is gone")
			}
			stop()
			if n := open.Load(); n != 0 {
				t.Errorf("%d readers are left open", n)
			}
			if told := r.told(); strings.Contains(told, "missing") || log.Len() > 0 {
				t.Errorf("stages = %s, log = %q, want nothing of a client that left", told, log)
			}
		})
	}
}
