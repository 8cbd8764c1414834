package artifact

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// readAt reads a range of an artifact by a reader of its own.
func readAt(t *testing.T, c *Cache, digest string, off, n int64) ([]byte, error) {
	t.Helper()
	r, err := c.Open(t.Context(), digest)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	if _, err := r.Seek(off, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, n)
	got, err := io.ReadFull(r, b)
	return b[:got], err
}

// TestRangesOfAPart: of an artifact of which some chunks are there, those are
// served with the line down, and what is not there is no byte of anything.
func TestRangesOfAPart(t *testing.T) {
	want := noise(8*chunkSize+100, 1)
	g := newGateway(want)
	g.only = map[int64]bool{3: true, 8: true}
	c := newCache(t, t.TempDir(), 10<<20, g)
	for _, chunk := range []int64{3, 8} {
		if _, err := readAt(t, c, sum(want), chunk*chunkSize, 1); err != nil {
			t.Fatal(err)
		}
	}
	g.mu.Lock()
	g.offline = true
	g.mu.Unlock()
	for _, tt := range []struct {
		off, n int64
		there  int64 // of them
	}{
		{3 * chunkSize, chunkSize, chunkSize}, {3*chunkSize + 5, 7, 7}, {8 * chunkSize, 100, 100}, {8*chunkSize + 99, 1, 1},
		{4*chunkSize - 10, 20, 10}, {5 * chunkSize, 1, 0}, {3*chunkSize - 1, 2, 0},
	} {
		got, err := readAt(t, c, sum(want), tt.off, tt.n)
		if !bytes.Equal(got, want[tt.off:tt.off+tt.there]) || (err == nil) != (tt.there == tt.n) {
			t.Errorf("bytes %d+%d: %d bytes, %v, want %d of them", tt.off, tt.n, len(got), err, tt.there)
		}
	}
	r, err := c.Open(t.Context(), sum(want))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for _, tt := range []struct {
		off, n int64
		want   bool
	}{
		{3 * chunkSize, chunkSize, true}, {3*chunkSize + 5, 7, true}, {4*chunkSize - 1, 1, true}, {4*chunkSize - 1, 2, false}, {3*chunkSize - 1, 2, false},
		{4 * chunkSize, 1, false}, {8 * chunkSize, 100, true}, {8 * chunkSize, chunkSize, true}, {0, int64(len(want)), false}, {int64(len(want)), 1, true},
	} {
		if got := r.Has(tt.off, tt.n); got != tt.want {
			t.Errorf("Has(%d, %d) = %v, want %v", tt.off, tt.n, got, tt.want)
		}
	}
	if _, err := readAt(t, c, sum(want), int64(len(want)), 1); !errors.Is(err, io.EOF) {
		t.Errorf("behind the end: %v, want %v", err, io.EOF)
	}
}

// TestWishGoesFirst: a chunk that nobody waits for makes way in its middle for one
// that somebody waits for, and comes after it.
func TestWishGoesFirst(t *testing.T) {
	want := noise(8*chunkSize, 1)
	g := newGateway(want)
	g.gate, g.step = make(chan struct{}, 100), chunkSize/4
	c := newCache(t, t.TempDir(), 10<<20, g)
	c.piece = chunkSize / 4
	for range 4 + 2 { // chunk 0, and half of chunk 1
		g.gate <- struct{}{}
	}
	if _, err := readAt(t, c, sum(want), 0, chunkSize); err != nil {
		t.Fatal(err)
	}
	got := make(chan []byte, 1)
	go func() {
		b, err := readAt(t, c, sum(want), 6*chunkSize, 10)
		if err != nil {
			t.Error(err)
		}
		got <- b
	}()
	e := c.entries[sum(want)]
	for waits := false; !waits; time.Sleep(time.Millisecond) {
		c.mu.Lock()
		waits = len(e.wishes) > 0
		c.mu.Unlock()
	}
	for range 1 + 4 { // what chunk 1 was waiting for, and chunk 6
		g.gate <- struct{}{}
	}
	if b := <-got; !bytes.Equal(b, want[6*chunkSize:][:10]) {
		t.Errorf("read %x", b)
	}
	c.mu.Lock()
	first := e.have[1]
	c.mu.Unlock()
	if first {
		t.Error("chunk 1, which nobody waits for, came first")
	}
	g.mu.Lock()
	fetches := fmt.Sprint(g.fetches)
	g.mu.Unlock()
	if !strings.HasPrefix(fetches, "[one@0 one@6") {
		t.Errorf("fetches = %s, want chunk 0 and then chunk 6", fetches)
	}
	close(g.gate)
	if b, err := read(t, c, sum(want)); err != nil || !bytes.Equal(b, want) {
		t.Errorf("the whole: %d bytes, %v", len(b), err)
	}
}

// TestNobodyStarves: those who wait are served in the order in which they came,
// however many come after them.
func TestNobodyStarves(t *testing.T) {
	want := noise(40*chunkSize, 1)
	g := newGateway(want)
	g.gate = make(chan struct{})
	c := newCache(t, t.TempDir(), 10<<20, g)
	var readers sync.WaitGroup
	served := make(chan int64, 40)
	come := func(chunk int64) {
		readers.Go(func() {
			b, err := readAt(t, c, sum(want), chunk*chunkSize, 9)
			if err != nil || !bytes.Equal(b, want[chunk*chunkSize:][:9]) {
				t.Errorf("chunk %d: %x, %v", chunk, b, err)
			}
			served <- chunk
		})
		for waits := false; !waits; time.Sleep(time.Millisecond) {
			c.mu.Lock()
			e := c.entries[sum(want)]
			waits = e != nil && e.wished(int(chunk))
			c.mu.Unlock()
		}
	}
	order := []int64{0, 39, 1, 34, 2, 29, 3, 24, 4}
	come(order[0])
	come(order[1])
	for i, chunk := range order {
		if i+2 < len(order) {
			come(order[i+2]) // so that two wait beside the one that is under way
		}
		g.gate <- struct{}{}
		select {
		case got := <-served:
			if got != chunk {
				t.Errorf("chunk %d was served in the place of %d", got, chunk)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("the reader of chunk %d still waits", chunk)
		}
	}
	close(g.gate)
	readers.Wait()
}

// TestKeep: what is named is not evicted though nobody reads it, and what does not
// fit beside it is told so.
func TestKeep(t *testing.T) {
	a, b, d := noise(3*chunkSize, 1), noise(3*chunkSize, 2), noise(3*chunkSize, 3)
	g := newGateway(a, b, d)
	c := newCache(t, t.TempDir(), 7*chunkSize, g)
	named := map[string]bool{sum(a): true}
	c.Keep(func() map[string]bool { return named })
	for _, x := range [][]byte{a, b, d} {
		if _, err := read(t, c, sum(x)); err != nil {
			t.Fatal(err)
		}
	}
	if c.entries[sum(a)] == nil || c.entries[sum(b)] != nil {
		t.Error("the named one was evicted, or the other was not")
	}
	named = map[string]bool{sum(a): true, sum(d): true}
	if _, err := c.Open(t.Context(), sum(b)); errs.CodeOf(err) != errs.NoSpace || !strings.Contains(err.Error(), "named by assignments") {
		t.Errorf("Open(no room beside what is named) = %v, want %s that says so", err, errs.NoSpace)
	}
	if c.entries[sum(a)] == nil || c.entries[sum(d)] == nil {
		t.Error("a named one was evicted")
	}
	named = nil
	if _, err := read(t, c, sum(b)); err != nil {
		t.Errorf("Open(nothing is named any more) = %v", err)
	}
}

// TestEvictsNothingInVain: what cannot fit costs nobody their artifact.
func TestEvictsNothingInVain(t *testing.T) {
	a, b, big := noise(2*chunkSize, 1), noise(2*chunkSize, 2), noise(5*chunkSize, 3)
	for _, named := range []bool{false, true} {
		c := newCache(t, t.TempDir(), 6*chunkSize, newGateway(a, b, big))
		if _, err := read(t, c, sum(a)); err != nil {
			t.Fatal(err)
		}
		held, err := c.Open(t.Context(), sum(b))
		if err != nil {
			t.Fatal(err)
		}
		if named {
			held.Close()
			c.Keep(func() map[string]bool { return map[string]bool{sum(b): true} })
		}
		if _, err := c.Open(t.Context(), sum(big)); errs.CodeOf(err) != errs.NoSpace {
			t.Errorf("Open = %v, want %s", err, errs.NoSpace)
		}
		if c.entries[sum(a)] == nil {
			t.Error("an artifact was evicted for one that does not fit all the same")
		}
		held.Close()
	}
}

// TestWishEndsWithItsReader: a reader that gave up leads no fetch anywhere.
func TestWishEndsWithItsReader(t *testing.T) {
	want := noise(4*chunkSize, 1)
	g := newGateway(want)
	g.only = map[int64]bool{}
	c := newCache(t, t.TempDir(), 10<<20, g)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	r, err := c.Open(ctx, sum(want))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := r.Read(make([]byte, 1)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Read = %v, want %v", err, context.DeadlineExceeded)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if left := c.entries[sum(want)].wishes; len(left) != 0 {
		t.Errorf("wishes = %v, want none", left)
	}
}

// TestFullDiskTakesWhatIsFetched: an artifact that nobody reads makes room on a
// full disk though it still arrives.
func TestFullDiskTakesWhatIsFetched(t *testing.T) {
	dir := smallDisk(t)
	old, small := noise(9*chunkSize, 1), noise(9*chunkSize, 3)
	g := newGateway(old, small)
	g.only = map[int64]bool{0: true, 1: true, 2: true, 3: true, 4: true, 5: true, 6: true, 7: true}
	c := newCache(t, dir, 1<<30, g)
	if _, err := readAt(t, c, sum(old), 0, 8*chunkSize); err != nil {
		t.Fatal(err)
	}
	g.mu.Lock()
	g.only = nil
	g.mu.Unlock()
	if got, err := read(t, c, sum(small)); err != nil || !bytes.Equal(got, small) {
		t.Errorf("read %d bytes, %v", len(got), err)
	}
	c.Close()
}

// TestHostileGateway: whatever the gateway sends, a reader gets the artifact's own
// bytes or an error, and that in a bounded time.
func TestHostileGateway(t *testing.T) {
	want := noise(5*chunkSize+77, 1)
	for name, tt := range map[string]struct {
		set  func(*gateway)
		want errs.Code // empty: the artifact
		open errs.Code // of Open
	}{
		"bodies that never end":               {set: func(g *gateway) { g.endless = true }, open: errs.InvalidPayload},
		"bodies that end early":               {set: func(g *gateway) { g.cut = chunkSize - 1 }, want: errs.Unreachable},
		"bodies of one chunk":                 {set: func(g *gateway) { g.cut = chunkSize }},
		"bodies from elsewhere":               {set: func(g *gateway) { g.shift = 512 }, want: errs.DigestMismatch},
		"bodies from the end":                 {set: func(g *gateway) { g.shift = 1 << 40 }, want: errs.Unreachable},
		"a byte at a time":                    {set: func(g *gateway) { g.drip = 1; g.step = 1 << 40 }},
		"a byte at a time, of ever less time": {set: func(g *gateway) { g.drip = 1; g.step = 1; g.gate = make(chan struct{}) }, want: errs.Unreachable},
		"every chunk wrong":                   {set: func(g *gateway) { g.flip = func(string, int64) bool { return true } }, want: errs.DigestMismatch},
	} {
		t.Run(name, func(t *testing.T) {
			g := newGateway(want)
			tt.set(g)
			if g.gate != nil { // the gateway lives, and sends next to nothing
				ended := make(chan struct{})
				defer close(ended)
				go func() {
					for {
						select {
						case g.gate <- struct{}{}:
							time.Sleep(time.Millisecond)
						case <-ended:
							return
						}
					}
				}()
			}
			c := newCache(t, t.TempDir(), 10<<20, g)
			c.stall = 100 * time.Millisecond
			if name == "a byte at a time" {
				c.stall = time.Minute
			}
			r, err := c.Open(t.Context(), sum(want))
			if errs.CodeOf(err) != tt.open {
				t.Fatalf("Open = %v, want %q", err, tt.open)
			}
			if err != nil {
				return
			}
			defer r.Close()
			got, err := io.ReadAll(r)
			if errs.CodeOf(err) != tt.want || !bytes.Equal(got, want[:len(got)]) || err == nil && len(got) != len(want) {
				t.Errorf("read %d bytes, right: %v; %v, want %q", len(got), bytes.Equal(got, want[:len(got)]), err, tt.want)
			}
		})
	}
}

// TestEndlessBody: a body that goes on after the artifact's end is left.
func TestEndlessBody(t *testing.T) {
	want := noise(3*chunkSize, 1)
	g := newGateway(want)
	c := newCache(t, t.TempDir(), 10<<20, g)
	r, err := c.Open(t.Context(), sum(want))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	g.mu.Lock()
	g.endless = true
	g.mu.Unlock()
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, want) {
		t.Errorf("read %d bytes, %v", len(got), err)
	}
	if st, err := os.Stat(c.dataPath(sum(want))); err != nil || st.Size() != int64(len(want)) {
		t.Errorf("the file has %d bytes, %v, want %d", st.Size(), err, len(want))
	}
}

// TestTornState is what a power cut may leave of an artifact of which five of eight
// chunks had come: what is not there any more, or not right, is fetched again; what
// is right is not; and no wrong byte is served.
func TestTornState(t *testing.T) {
	want := noise(8*chunkSize, 1)
	digest := sum(want)
	patch := func(t *testing.T, path string, off int64, b []byte) {
		t.Helper()
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err == nil {
			_, err = f.WriteAt(b, off)
		}
		if err = errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	for name, tt := range map[string]struct {
		tear    func(t *testing.T, data, meta string)
		fetched string
		located int
	}{
		"nothing":                      {func(*testing.T, string, string) {}, "[one@5]", 0},
		"a page of a chunk":            {func(t *testing.T, data, _ string) { patch(t, data, 2*chunkSize+8192, make([]byte, 4096)) }, "[one@2 one@5]", 0},
		"the first byte":               {func(t *testing.T, data, _ string) { patch(t, data, 0, []byte{want[0] ^ 1}) }, "[one@0 one@5]", 0},
		"the last chunk's last byte":   {func(t *testing.T, data, _ string) { patch(t, data, 5*chunkSize-1, []byte{want[5*chunkSize-1] ^ 1}) }, "[one@4]", 0},
		"old blocks where none were":   {func(t *testing.T, data, _ string) { patch(t, data, 6*chunkSize, noise(chunkSize, 9)) }, "[one@5 one@6]", 0},
		"half of the next chunk":       {func(t *testing.T, data, _ string) { patch(t, data, 5*chunkSize, want[5*chunkSize:][:chunkSize/2]) }, "[one@5]", 0},
		"a chunk that nobody fetched":  {func(t *testing.T, data, _ string) { patch(t, data, 7*chunkSize, want[7*chunkSize:]) }, "[one@5]", 0},
		"a file that ends early":       {func(t *testing.T, data, _ string) { os.Truncate(data, 3*chunkSize+100) }, "[one@3]", 0},
		"a file that is empty":         {func(t *testing.T, data, _ string) { os.Truncate(data, 0) }, "[one@0]", 0},
		"a file that is too long":      {func(t *testing.T, data, _ string) { patch(t, data, 9*chunkSize, []byte("x")) }, "[one@5]", 0},
		"no file":                      {func(t *testing.T, data, _ string) { os.Remove(data) }, "[one@0]", 0},
		"no description":               {func(t *testing.T, _, meta string) { os.Remove(meta) }, "[one@0]", 1},
		"an empty description":         {func(t *testing.T, _, meta string) { os.Truncate(meta, 0) }, "[one@0]", 1},
		"half a description":           {func(t *testing.T, _, meta string) { os.Truncate(meta, 200) }, "[one@0]", 1},
		"a description of another one": {func(t *testing.T, _, meta string) { patch(t, meta, 12, []byte("0000")) }, "[one@0]", 1},
		"a list with a wrong digest":   {func(t *testing.T, _, meta string) { patch(t, meta, 160, []byte("AAAA")) }, "[one@0]", 1},
	} {
		t.Run(name, func(t *testing.T) {
			g := newGateway(want)
			g.gate = make(chan struct{}, 5)
			for range 5 {
				g.gate <- struct{}{}
			}
			dir := t.TempDir()
			c := newCache(t, dir, 10<<20, g)
			if _, err := readAt(t, c, digest, 0, 5*chunkSize); err != nil {
				t.Fatal(err)
			}
			c.Close()
			tt.tear(t, filepath.Join(dir, digest+".data"), filepath.Join(dir, digest+".json"))
			g.gate, g.fetches, g.locates = nil, nil, 0
			c = newCache(t, dir, 10<<20, g)
			got, err := read(t, c, digest)
			if err != nil || !bytes.Equal(got, want) {
				t.Fatalf("read %d bytes, right: %v; %v", len(got), bytes.Equal(got, want), err)
			}
			g.mu.Lock()
			defer g.mu.Unlock()
			if got := fmt.Sprint(g.fetches); got != tt.fetched || g.locates != tt.located {
				t.Errorf("fetches = %s and %d Locates, want %s and %d", got, g.locates, tt.fetched, tt.located)
			}
		})
	}
}

// killDir makes this test's program one that fetches into that folder until it is killed.
const killDir = "ARTIFACT_TEST_DIR"

func killed() []byte { return noise(64*chunkSize, 7) }

// TestKilled kills a box's process again and again while it fetches: what had come
// is not fetched again, and at the end the artifact is right.
func TestKilled(t *testing.T) {
	want := killed()
	if dir := os.Getenv(killDir); dir != "" {
		g := newGateway(want)
		c, err := Open(dir, 10<<20, g, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		g.gate = make(chan struct{})
		go func() { // a chunk now and then, each told
			for {
				g.gate <- struct{}{}
				time.Sleep(time.Millisecond)
			}
		}()
		r, err := c.Open(t.Context(), sum(want))
		if err != nil {
			t.Fatal(err)
		}
		b := make([]byte, chunkSize)
		for i := range 64 {
			if _, err := io.ReadFull(r, b); err != nil || !bytes.Equal(b, want[i*chunkSize:][:chunkSize]) {
				t.Fatalf("chunk %d is wrong: %v", i, err)
			}
			fmt.Printf("chunk %d\n", i)
		}
		select {}
	}
	dir := t.TempDir()
	for _, until := range []int{1, 4, 5, 20, 40, 41} {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKilled$")
		cmd.Env = append(os.Environ(), killDir+"="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var text strings.Builder
		b := make([]byte, 256)
		for !strings.Contains(text.String(), fmt.Sprintf("chunk %d\n", until)) {
			n, err := out.Read(b)
			if text.Write(b[:n]); err != nil {
				t.Fatalf("the process ends before chunk %d: %s", until, text.String())
			}
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // killed
	}
	g := newGateway(want)
	c := newCache(t, dir, 10<<20, g)
	if got, err := read(t, c, sum(want)); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("read %d bytes, right: %v; %v", len(got), bytes.Equal(got, want), err)
	}
	for _, f := range g.fetches {
		var chunk int
		if _, err := fmt.Sscanf(f, "one@%d", &chunk); err != nil || chunk < 42 {
			t.Errorf("fetches = %v, want none of what the killed processes had", g.fetches)
		}
	}
	if g.locates != 0 {
		t.Errorf("%d Locates, want none", g.locates)
	}
}

// TestNext: the file that a reader shows has the bytes that it says.
func TestNext(t *testing.T) {
	want := noise(4*chunkSize+10, 1)
	g := newGateway(want)
	c := newCache(t, t.TempDir(), 10<<20, g)
	if _, err := read(t, c, sum(want)); err != nil {
		t.Fatal(err)
	}
	r, err := c.Open(t.Context(), sum(want))
	if err != nil {
		t.Fatal(err)
	}
	var got []byte
	for _, limit := range []int64{1, chunkSize, 10, 2 * chunkSize, 1 << 40} {
		f, off, n, err := r.Next(limit)
		if err != nil || n < 1 || n > limit || off != int64(len(got)) {
			t.Fatalf("Next(%d) = %d+%d, %v after %d bytes", limit, off, n, err, len(got))
		}
		b := make([]byte, n)
		if _, err := unix.Pread(int(f.Fd()), b, off); err != nil {
			t.Fatal(err)
		}
		got = append(got, b...)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%d bytes, want %d: of chunks that are there, all that is asked for comes at once", len(got), len(want))
	}
	if _, _, _, err := r.Next(1); !errors.Is(err, io.EOF) {
		t.Errorf("Next at the end = %v, want %v", err, io.EOF)
	}
	r.Close()
	if _, _, _, err := r.Next(1); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Next(closed) = %v", err)
	}
}
