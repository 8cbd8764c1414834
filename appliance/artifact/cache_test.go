package artifact

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

const chunkSize = 64 << 10

func sum(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}

// gateway is a Source over bytes, with faults to order.
type gateway struct {
	mu        sync.Mutex
	artifacts map[string][]byte
	lists     map[string][]byte // in place of the true ones
	offline   bool
	cut       int64                            // each body ends after so many bytes; 0: whole
	flip      func(url string, off int64) bool // a chunk's first byte comes wrong
	silent    int                              // so many bodies never say anything
	gate      chan struct{}                    // when set, each chunk waits for one token
	step      int64                            // … or each so many bytes
	only      map[int64]bool                   // when set, the chunks that come at all
	shift     int64                            // bodies begin so many bytes late
	endless   bool                             // bodies and lists never end
	drip      int                              // at most so many bytes come at a time
	answer    chan struct{}                    // when set, each Locate waits for one token
	locates   int
	fetches   []string
}

func newGateway(artifacts ...[]byte) *gateway {
	g := &gateway{artifacts: map[string][]byte{}, lists: map[string][]byte{}}
	for _, a := range artifacts {
		g.artifacts[sum(a)] = a
	}
	return g
}

func list(b []byte) []byte {
	var out []byte
	for at := 0; at < len(b); at += chunkSize {
		h := sha256.Sum256(b[at:min(at+chunkSize, len(b))])
		out = append(out, h[:]...)
	}
	return out
}

func (g *gateway) Locate(ctx context.Context, ref string) (*agentv1.LocateResponse, error) {
	g.mu.Lock()
	g.locates++
	g.mu.Unlock()
	if g.answer != nil {
		select {
		case <-g.answer:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.offline {
		return nil, errs.Retry(errs.Unreachable, "the line is down")
	}
	b, found := g.artifacts[ref]
	if !found {
		return nil, errs.New(errs.InvalidArgs, "no such artifact")
	}
	return &agentv1.LocateResponse{Sha256: ref, SizeBytes: uint64(len(b)), ChunkSizeBytes: chunkSize, ChunksSha256: sum(list(b)), Urls: []string{"/one/" + ref, "/two/" + ref}}, nil
}

func (g *gateway) Fetch(ctx context.Context, url string, off int64) (io.ReadCloser, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.offline {
		return nil, errs.Retry(errs.Unreachable, "the line is down")
	}
	ref := strings.Split(url, "/")[2]
	if strings.HasSuffix(url, "/chunks") {
		l := list(g.artifacts[ref])
		if other := g.lists[ref]; other != nil {
			l = other
		}
		if g.endless {
			return io.NopCloser(io.MultiReader(bytes.NewReader(l), zeros{})), nil
		}
		return io.NopCloser(bytes.NewReader(l)), nil
	}
	g.fetches = append(g.fetches, fmt.Sprintf("%s@%d", strings.Split(url, "/")[1], off/chunkSize))
	if g.silent > 0 {
		g.silent--
		r, w := io.Pipe()
		context.AfterFunc(ctx, func() { w.CloseWithError(ctx.Err()) })
		return r, nil
	}
	b := g.artifacts[ref][min(off+g.shift, int64(len(g.artifacts[ref]))):]
	if g.cut > 0 {
		b = b[:min(int64(len(b)), g.cut)]
	}
	return &body{ctx: ctx, g: g, url: url, off: off, rest: b}, nil
}

type body struct {
	ctx  context.Context
	g    *gateway
	url  string
	off  int64
	rest []byte
}

func (b *body) Read(p []byte) (int, error) {
	if len(b.rest) == 0 && b.g.endless {
		return zeros{}.Read(p)
	}
	if len(b.rest) == 0 {
		return 0, io.EOF
	}
	step := cmp.Or(b.g.step, chunkSize)
	most := min(int64(len(b.rest)), step-b.off%step)
	if b.g.drip > 0 {
		most = min(most, int64(b.g.drip))
	}
	n := copy(p, b.rest[:most])
	if b.off%step == 0 {
		b.g.mu.Lock()
		held := b.g.only != nil && !b.g.only[b.off/chunkSize]
		b.g.mu.Unlock()
		if held {
			<-b.ctx.Done()
			return 0, b.ctx.Err()
		}
		if b.g.gate != nil {
			select {
			case <-b.g.gate:
			case <-b.ctx.Done():
				return 0, b.ctx.Err()
			}
		}
		if b.g.flip != nil && b.g.flip(b.url, b.off) {
			p[0] ^= 1
		}
	}
	b.off += int64(n)
	b.rest = b.rest[n:]
	return n, nil
}

func (b *body) Close() error { return nil }

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func noise(n int, seed byte) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{seed}).Read(b)
	return b
}

func newCache(t *testing.T, dir string, max int64, s Source) *Cache {
	t.Helper()
	c, err := Open(dir, max, s, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	c.retry = backoff.Policy{Min: time.Millisecond, Max: time.Millisecond}
	t.Cleanup(func() { c.Close() })
	return c
}

func read(t *testing.T, c *Cache, digest string) ([]byte, error) {
	t.Helper()
	r, err := c.Open(t.Context(), digest)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

func TestFetchOnceForMany(t *testing.T) {
	want := noise(5*chunkSize+123, 1)
	g := newGateway(want)
	c := newCache(t, t.TempDir(), 10<<20, g)
	var readers sync.WaitGroup
	for range 8 {
		readers.Go(func() {
			got, err := read(t, c, sum(want))
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("read %d bytes, %v", len(got), err)
			}
		})
	}
	readers.Wait()
	if g.locates != 1 || len(g.fetches) != 1 {
		t.Errorf("%d Locates and fetches %v, want one of each", g.locates, g.fetches)
	}
}

func TestServesWhileItArrives(t *testing.T) {
	want := noise(4*chunkSize, 1)
	g := newGateway(want)
	g.gate = make(chan struct{}, 1)
	c := newCache(t, t.TempDir(), 10<<20, g)
	r, err := c.Open(t.Context(), sum(want))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if r.Size() != int64(len(want)) {
		t.Errorf("Size() = %d, want %d", r.Size(), len(want))
	}
	got := make([]byte, chunkSize)
	for i := range 4 {
		// One chunk is let through, and can be read before the next has come.
		g.gate <- struct{}{}
		if _, err := io.ReadFull(r, got); err != nil || !bytes.Equal(got, want[i*chunkSize:][:chunkSize]) {
			t.Fatalf("chunk %d: %v", i, err)
		}
	}
}

func TestSeekFetchesThereFirst(t *testing.T) {
	want := noise(20*chunkSize, 1)
	g := newGateway(want)
	g.gate = make(chan struct{}, 1)
	c := newCache(t, t.TempDir(), 10<<20, g)
	r, err := c.Open(t.Context(), sum(want))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := r.Seek(-chunkSize-5, io.SeekEnd); err != nil {
		t.Fatal(err)
	}
	g.gate <- struct{}{}
	got := make([]byte, 5)
	if _, err := io.ReadFull(r, got); err != nil || !bytes.Equal(got, want[19*chunkSize-5:][:5]) {
		t.Errorf("read %x, %v", got, err)
	}
	if g.fetches[0] != "one@18" {
		t.Errorf("fetches = %v, want chunk 18 first", g.fetches)
	}
	for _, bad := range []struct {
		off    int64
		whence int
	}{{-1, io.SeekStart}, {0, 7}} {
		if _, err := r.Seek(bad.off, bad.whence); err == nil {
			t.Errorf("Seek(%d, %d) succeeded", bad.off, bad.whence)
		}
	}
}

func TestResumes(t *testing.T) {
	want := noise(6*chunkSize, 1)
	g := newGateway(want)
	g.cut = 2*chunkSize + 17
	g.silent = 1
	c := newCache(t, t.TempDir(), 10<<20, g)
	c.stall = 50 * time.Millisecond
	got, err := read(t, c, sum(want))
	if err != nil || !bytes.Equal(got, want) {
		t.Fatalf("read %d bytes, %v", len(got), err)
	}
	// Silent; then chunks 0 and 1, 2 and 3, 4 and 5, from either place in turn.
	if got, want := fmt.Sprint(g.fetches), "[one@0 two@0 one@2 two@4]"; got != want {
		t.Errorf("fetches = %s, want %s", got, want)
	}
}

func TestWrongChunk(t *testing.T) {
	want := noise(4*chunkSize, 1)
	for name, tt := range map[string]struct {
		flip func(url string, off int64) bool
		good bool
	}{
		"one place lies":   {func(url string, off int64) bool { return strings.HasPrefix(url, "/one") && off == 2*chunkSize }, true},
		"both places lie":  {func(_ string, off int64) bool { return off == 2*chunkSize }, false},
		"nobody does":      {func(string, int64) bool { return false }, true},
		"the first chunk":  {func(_ string, off int64) bool { return off == 0 }, false},
		"only first bytes": {func(url string, off int64) bool { return strings.HasPrefix(url, "/one") && off == 0 }, true},
	} {
		t.Run(name, func(t *testing.T) {
			g := newGateway(want)
			g.flip = tt.flip
			c := newCache(t, t.TempDir(), 10<<20, g)
			got, err := read(t, c, sum(want))
			if tt.good && (err != nil || !bytes.Equal(got, want)) {
				t.Errorf("read %d bytes, %v", len(got), err)
			}
			if !tt.good && errs.CodeOf(err) != errs.DigestMismatch {
				t.Errorf("read = %v, want %s", err, errs.DigestMismatch)
			}
			if !bytes.Equal(got, want[:len(got)]) {
				t.Error("a wrong byte was served")
			}
		})
	}
}

func TestWrongList(t *testing.T) {
	want, other := noise(4*chunkSize, 1), noise(4*chunkSize, 2)
	g := newGateway(want)
	g.lists[sum(want)] = list(other)
	c := newCache(t, t.TempDir(), 10<<20, g)
	if _, err := c.Open(t.Context(), sum(want)); errs.CodeOf(err) != errs.DigestMismatch {
		t.Errorf("Open(another list) = %v, want %s", err, errs.DigestMismatch)
	}
	g.lists[sum(want)] = list(want)[:64]
	if _, err := c.Open(t.Context(), sum(want)); err == nil {
		t.Error("Open(short list) succeeded")
	}
}

// A gateway that lies about the bytes and lists them rightly is found out by the whole digest.
func TestWrongWhole(t *testing.T) {
	claimed, sent := noise(3*chunkSize, 1), noise(3*chunkSize, 2)
	g := newGateway(claimed)
	g.artifacts[sum(claimed)] = sent
	c := newCache(t, t.TempDir(), 10<<20, g)
	r, err := c.Open(t.Context(), sum(claimed))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for {
		if _, err = io.ReadAll(r); err != nil {
			break
		}
		r.Seek(0, io.SeekStart)
	}
	if errs.CodeOf(err) != errs.DigestMismatch {
		t.Errorf("read = %v, want %s", err, errs.DigestMismatch)
	}
	if files, _ := filepath.Glob(filepath.Join(c.dir, "*.data")); len(files) != 0 {
		t.Errorf("the lie is kept: %v", files)
	}
}

func TestEviction(t *testing.T) {
	a, b, d := noise(3*chunkSize, 1), noise(3*chunkSize, 2), noise(3*chunkSize, 3)
	g := newGateway(a, b, d, noise(9*chunkSize, 4))
	c := newCache(t, t.TempDir(), 7*chunkSize, g)
	base := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	step := 0
	c.now = func() time.Time { step++; return base.Add(time.Duration(step) * time.Second) }
	for _, x := range [][]byte{a, b, a} { // a is newer than b now
		if _, err := read(t, c, sum(x)); err != nil {
			t.Fatal(err)
		}
	}
	held, err := c.Open(t.Context(), sum(d))
	if err != nil {
		t.Fatal(err)
	}
	if c.entries[sum(b)] != nil || c.entries[sum(a)] == nil {
		t.Error("the least recently used one was not the one that left")
	}
	ra, err := c.Open(t.Context(), sum(a))
	if err != nil {
		t.Fatal(err)
	}
	// Both are in use now: nothing may leave.
	if _, err := c.Open(t.Context(), sum(b)); errs.CodeOf(err) != errs.NoSpace {
		t.Errorf("Open(no room) = %v, want %s", err, errs.NoSpace)
	}
	if got, err := io.ReadAll(held); err != nil || !bytes.Equal(got, d) {
		t.Errorf("one in use read %d bytes, %v", len(got), err)
	}
	held.Close()
	ra.Close()
	if _, err := read(t, c, sum(b)); err != nil {
		t.Errorf("Open(room again) = %v", err)
	}
	if _, err := c.Open(t.Context(), sum(noise(9*chunkSize, 4))); errs.CodeOf(err) != errs.NoSpace {
		t.Errorf("Open(larger than the cache) = %v, want %s", err, errs.NoSpace)
	}
}

// TestOpenOutlivesItsCaller: what the source is asked for one who leaves is there for
// those who wait beside him and for the next one; a source that says nothing is asked
// again.
func TestOpenOutlivesItsCaller(t *testing.T) {
	a, b := noise(2*chunkSize, 1), noise(2*chunkSize, 2)
	g := newGateway(a, b)
	g.answer = make(chan struct{})
	c := newCache(t, t.TempDir(), 10<<20, g)
	open := func(ctx context.Context, digest string) <-chan error {
		opened := make(chan error, 1)
		go func() {
			r, err := c.Open(ctx, digest)
			if err == nil {
				defer r.Close()
			}
			opened <- err
		}()
		return opened
	}
	asked := func(want int) {
		t.Helper()
		for n, end := 0, time.Now().Add(20*time.Second); n != want; time.Sleep(time.Millisecond) {
			g.mu.Lock()
			n = g.locates
			g.mu.Unlock()
			if n > want || time.Now().After(end) {
				t.Fatalf("the source was asked %d times, want %d", n, want)
			}
		}
	}
	for i, digest := range []string{sum(a), sum(b)} {
		ctx, leave := context.WithCancel(t.Context())
		first := open(ctx, digest)
		asked(i + 1)
		var beside <-chan error
		if i == 0 {
			beside = open(t.Context(), digest)
		}
		leave()
		if err := <-first; !errors.Is(err, context.Canceled) {
			t.Errorf("Open of one who leaves = %v, want %v", err, context.Canceled)
		}
		select {
		case g.answer <- struct{}{}:
		case <-time.After(20 * time.Second):
			t.Fatal("the source's answer is waited for no more")
		}
		if i == 0 {
			if err := <-beside; err != nil {
				t.Errorf("Open beside one who leaves = %v", err)
			}
		}
		if err := <-open(t.Context(), digest); err != nil {
			t.Errorf("Open after one who left = %v", err)
		}
		asked(i + 1)
	}

	c = newCache(t, t.TempDir(), 10<<20, g)
	c.stall = time.Millisecond
	for i := range 2 {
		if err := <-open(t.Context(), sum(a)); errs.CodeOf(err) != errs.Unreachable {
			t.Errorf("Open from a source that says nothing = %v, want %s", err, errs.Unreachable)
		}
		asked(3 + i)
	}
}

// TestPrefetchHoldsUpNobody: what is fetched ahead is evicted for what is read, the
// last of all, and its reader is told; no other prefetch takes its place, and one that
// cannot fit takes nobody's.
func TestPrefetchHoldsUpNobody(t *testing.T) {
	var digests []string
	g := newGateway()
	for i := range byte(6) {
		b := noise(3*chunkSize, i)
		g.artifacts[sum(b)] = b
		digests = append(digests, sum(b))
	}
	g.gate = make(chan struct{}) // nothing comes
	c := newCache(t, t.TempDir(), 9*chunkSize, g)
	now := time.Now()
	c.now = func() time.Time { now = now.Add(time.Second); return now }
	has := func(when string, want ...int) {
		t.Helper()
		c.mu.Lock()
		defer c.mu.Unlock()
		for i, digest := range digests {
			if got := c.entries[digest] != nil; got != slices.Contains(want, i) {
				t.Errorf("%s: artifact %d is in the cache: %v", when, i, got)
			}
		}
	}
	prefetch := func(which ...int) ([]*Reader, error) {
		var names []string
		for _, i := range which {
			names = append(names, digests[i])
		}
		return c.Prefetch(t.Context(), names)
	}
	open := func(i int) *Reader {
		t.Helper()
		r, err := c.Open(t.Context(), digests[i])
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	open(0).Close()
	open(1).Close()
	if _, err := prefetch(2, 3, 4, 5); errs.CodeOf(err) != errs.NoSpace || retryable(err) {
		t.Errorf("Prefetch of more than the cache = %v, want %s, for good", err, errs.NoSpace)
	}
	held := open(1)
	if _, err := prefetch(2, 3, 4); errs.CodeOf(err) != errs.NoSpace || !retryable(err) {
		t.Errorf("Prefetch of the whole cache beside a reader = %v, want %s, for now", err, errs.NoSpace)
	}
	has("after what cannot fit", 0, 1)

	ahead, err := prefetch(2, 3)
	if err != nil || len(ahead) != 2 {
		t.Fatalf("Prefetch = %d readers, %v", len(ahead), err)
	}
	has("after a prefetch", 1, 2, 3)
	if _, err := prefetch(0, 1); errs.CodeOf(err) != errs.NoSpace || !retryable(err) {
		t.Errorf("Prefetch beside another = %v, want %s, for now", err, errs.NoSpace)
	}
	has("after a prefetch beside another", 1, 2, 3)
	held.Close() // the newest, and nobody reads it
	open(4).Close()
	has("after another is opened", 2, 3, 4)
	defer open(4).Close()
	defer open(5).Close()
	has("after yet another", 3, 4, 5)
	if _, err := ahead[0].Read(make([]byte, 1)); errs.CodeOf(err) != errs.Unavailable || !retryable(err) {
		t.Errorf("Read of what was evicted = %v, want %s", err, errs.Unavailable)
	}
	for _, r := range ahead {
		r.Close()
	}
	if e := c.entries[digests[3]]; e.readers != 0 || e.yielding != 0 {
		t.Errorf("%d readers and %d that yield are left, want none", e.readers, e.yielding)
	}
}

func retryable(err error) bool {
	coded := new(errs.Error)
	return errors.As(err, &coded) && coded.Retryable
}

func TestSurvivesRestartOffline(t *testing.T) {
	whole, half := noise(4*chunkSize+9, 1), noise(4*chunkSize, 2)
	g := newGateway(whole, half)
	dir := t.TempDir()
	c := newCache(t, dir, 10<<20, g)
	if _, err := read(t, c, sum(whole)); err != nil {
		t.Fatal(err)
	}
	// Two chunks of the other one arrive, then the box restarts.
	g.gate = make(chan struct{}, 2)
	g.gate <- struct{}{}
	g.gate <- struct{}{}
	r, err := c.Open(t.Context(), sum(half))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(r, make([]byte, 2*chunkSize)); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, 0, g, slog.New(slog.DiscardHandler)); err == nil {
		t.Error("two caches share a folder")
	}
	c.Close()
	if _, err := r.Read(make([]byte, 1)); errs.CodeOf(err) != errs.Unavailable {
		t.Errorf("Read after Close = %v, want %s", err, errs.Unavailable)
	}
	r.Close()
	// What does not belong is swept out; bytes that rotted are found.
	for _, stray := range []string{"stray.tmp", sum([]byte("x")) + ".data", sum([]byte("y")) + ".json"} {
		if err := os.WriteFile(filepath.Join(dir, stray), []byte("{}"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	f, err := os.OpenFile(filepath.Join(dir, sum(half)+".data"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	f.WriteAt([]byte{half[0] ^ 1}, 0)
	f.Close()

	g.gate, g.offline, g.fetches, g.locates = nil, true, nil, 0
	c = newCache(t, dir, 10<<20, g)
	if got, err := read(t, c, sum(whole)); err != nil || !bytes.Equal(got, whole) {
		t.Errorf("offline: read %d bytes, %v", len(got), err)
	}
	if _, err := read(t, c, sum(half)); errs.CodeOf(err) != errs.Unreachable {
		t.Errorf("offline, incomplete: %v, want %s", err, errs.Unreachable)
	}
	g.mu.Lock()
	g.offline = false
	g.mu.Unlock()
	if got, err := read(t, c, sum(half)); err != nil || !bytes.Equal(got, half) {
		t.Errorf("online again: read %d bytes, %v", len(got), err)
	}
	// Chunk 1 was there; 0 had rotted, 2 and 3 were missing.
	if got, want := fmt.Sprint(g.fetches), "[one@0 one@2]"; got != want || g.locates != 0 {
		t.Errorf("fetches = %s and %d Locates, want %s and none", got, g.locates, want)
	}
	if files, _ := os.ReadDir(dir); len(files) != 5 {
		t.Errorf("%d files, want 2 artifacts and the lock: %v", len(files), files)
	}
}

func TestUnreachableIsToldAndTriedAgain(t *testing.T) {
	want := noise(3*chunkSize, 1)
	g := newGateway(want)
	c := newCache(t, t.TempDir(), 10<<20, g)
	r, err := c.Open(t.Context(), sum(want))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	g.mu.Lock()
	g.offline = true
	g.mu.Unlock()
	if _, err := io.ReadAll(r); errs.CodeOf(err) != errs.Unreachable {
		t.Errorf("read = %v, want %s", err, errs.Unreachable)
	}
	g.mu.Lock()
	g.offline = false
	g.mu.Unlock()
	r.Seek(0, io.SeekStart)
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, want) {
		t.Errorf("read again: %d bytes, %v", len(got), err)
	}
}

func TestRefusals(t *testing.T) {
	g := newGateway(noise(chunkSize, 1))
	c := newCache(t, t.TempDir(), 10<<20, g)
	for _, digest := range []string{"", "../../etc/passwd", strings.Repeat("A", 64), strings.Repeat("a", 63)} {
		if _, err := c.Open(t.Context(), digest); errs.CodeOf(err) != errs.InvalidArgs {
			t.Errorf("Open(%q) = %v, want %s", digest, err, errs.InvalidArgs)
		}
	}
	if g.locates != 0 {
		t.Error("a bad digest was asked for")
	}
	if _, err := c.Open(t.Context(), sum(nil)); errs.CodeOf(err) != errs.InvalidArgs {
		t.Errorf("Open(unknown) = %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	g.gate = make(chan struct{})
	r, err := c.Open(ctx, sum(noise(chunkSize, 1)))
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := r.Read(make([]byte, 1)); !errors.Is(err, context.Canceled) {
		t.Errorf("Read(cancelled) = %v", err)
	}
	r.Close()
	if _, err := r.Read(make([]byte, 1)); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Read(closed) = %v", err)
	}
	c.Close()
	if _, err := c.Open(t.Context(), sum(nil)); errs.CodeOf(err) != errs.Unavailable {
		t.Errorf("Open(closed) = %v, want %s", err, errs.Unavailable)
	}
}

func TestDescriptionsOfAWildGateway(t *testing.T) {
	for name, res := range map[string]*agentv1.LocateResponse{
		"empty":        {},
		"huge":         {SizeBytes: 1 << 63, ChunkSizeBytes: chunkSize, Urls: []string{"/a"}},
		"no chunks":    {SizeBytes: 10, Urls: []string{"/a"}},
		"tiny chunks":  {SizeBytes: 10, ChunkSizeBytes: 1, Urls: []string{"/a"}},
		"too many":     {SizeBytes: 1 << 60, ChunkSizeBytes: chunkSize, Urls: []string{"/a"}},
		"no URLs":      {SizeBytes: 10, ChunkSizeBytes: chunkSize},
		"other digest": {SizeBytes: 10, ChunkSizeBytes: chunkSize, Sha256: sum([]byte("other")), Urls: []string{"/a/b"}},
	} {
		c := newCache(t, t.TempDir(), 1<<62, wild{res})
		if _, err := c.Open(t.Context(), sum(nil)); err == nil {
			t.Errorf("%s: Open succeeded", name)
		}
		c.Close()
	}
}

type wild struct{ res *agentv1.LocateResponse }

func (w wild) Locate(context.Context, string) (*agentv1.LocateResponse, error) { return w.res, nil }
func (w wild) Fetch(context.Context, string, int64) (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(make([]byte, 32))), nil
}

// smallDisk is a folder on a file system of 1 MiB.
func smallDisk(t *testing.T) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: mounts a small file system")
	}
	dir := t.TempDir()
	if out, err := exec.Command("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", dir).CombinedOutput(); err != nil {
		t.Skipf("needs root: mount: %s", out)
	}
	t.Cleanup(func() { exec.Command("umount", dir).Run() })
	return dir
}

func TestFullDisk(t *testing.T) {
	dir := smallDisk(t)
	old, big, small := noise(9*chunkSize, 1), noise(14*chunkSize, 2), noise(9*chunkSize, 3)
	g := newGateway(old, big, small)
	c := newCache(t, dir, 1<<30, g) // a bound that the disk does not have
	if _, err := read(t, c, sum(old)); err != nil {
		t.Fatal(err)
	}
	// Room is made for another one while it arrives …
	if got, err := read(t, c, sum(small)); err != nil || !bytes.Equal(got, small) {
		t.Fatalf("read %d bytes, %v", len(got), err)
	}
	// … but never by taking what is read.
	r, err := c.Open(t.Context(), sum(small))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := read(t, c, sum(big)); errs.CodeOf(err) != errs.NoSpace {
		t.Errorf("read = %v, want %s", err, errs.NoSpace)
	}
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, small) {
		t.Errorf("one in use read %d bytes, %v", len(got), err)
	}
	c.Close()
}

// TestFullDiskPrefetch: on a full disk, what is fetched ahead makes room for what is
// read, and not for more that is fetched ahead.
func TestFullDiskPrefetch(t *testing.T) {
	old, small := noise(9*chunkSize, 1), noise(9*chunkSize, 3)
	c := newCache(t, smallDisk(t), 1<<30, newGateway(old, small))
	ahead, err := c.Prefetch(t.Context(), []string{sum(small), sum(old)})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []errs.Code{"", errs.NoSpace} {
		if _, err := io.ReadAll(ahead[i]); errs.CodeOf(err) != want {
			t.Errorf("read of %d fetched ahead = %v, want %s", i, err, cmp.Or(want, "the whole"))
		}
	}
	if _, err := ahead[0].Seek(0, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(ahead[0]); err != nil || !bytes.Equal(got, small) {
		t.Errorf("one fetched ahead read %d bytes, %v", len(got), err)
	}
	ahead[1].Close()
	if got, err := read(t, c, sum(old)); err != nil || !bytes.Equal(got, old) {
		t.Errorf("read beside what is fetched ahead: %d bytes, %v", len(got), err)
	}
	ahead[0].Close()
	c.Close()
}

func TestServesHTTPRanges(t *testing.T) {
	want := noise(3*chunkSize+5, 1)
	c := newCache(t, t.TempDir(), 10<<20, newGateway(want))
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		r, err := c.Open(req.Context(), sum(want))
		if err != nil {
			w.WriteHeader(500)
			return
		}
		defer r.Close()
		http.ServeContent(w, req, "", time.Time{}, r)
	}))
	defer srv.Close()
	req, err := http.NewRequest(http.MethodGet, srv.URL, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Range", fmt.Sprintf("bytes=%d-", chunkSize+1))
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	got, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != http.StatusPartialContent || !bytes.Equal(got, want[chunkSize+1:]) {
		t.Errorf("%s, %d bytes, %v", res.Status, len(got), err)
	}
}
