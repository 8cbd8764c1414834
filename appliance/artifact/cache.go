// Package artifact keeps images by their digest on the box: each is fetched
// once, checked chunk by chunk, and served while it still arrives.
package artifact

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// Source is the gateway. An error that is coded and not retryable is final.
type Source interface {
	Locate(ctx context.Context, ref string) (*agentv1.LocateResponse, error)
	// Fetch gives the bytes of an URL of the answer from offset on; the URL with
	// "/chunks" appended gives the chunk list.
	Fetch(ctx context.Context, url string, offset int64) (io.ReadCloser, error)
}

// Bounds of what a gateway may name.
const (
	minChunk     = 64 << 10
	maxChunk     = 64 << 20
	maxChunks    = 1 << 20
	maxURLs      = 16
	maxArtifacts = 4096
)

// defaultShare of the file system is used when no bound is set.
const defaultShare = 0.8

// Cache is a folder of artifacts. It is safe for concurrent use.
type Cache struct {
	dir    string
	max    int64
	source Source
	log    *slog.Logger
	now    func() time.Time
	retry  backoff.Policy
	stall  time.Duration // how long a connection may stay silent
	piece  int           // what is read of one at a time
	lock   *os.File

	ctx    context.Context // of the fetches
	cancel context.CancelFunc
	owned  sync.WaitGroup

	mu      sync.Mutex
	entries map[string]*entry
	opening map[string]*opening
	closed  bool
	named   func() map[string]bool // see Keep; nil: nothing
}

// description is what is known of an artifact, kept beside its bytes.
type description struct {
	SHA256    string   `json:"sha256"`
	Size      int64    `json:"size"`
	ChunkSize int64    `json:"chunk_size"`
	Chunks    []byte   `json:"chunks"`
	ListSum   string   `json:"chunks_sha256"`
	URLs      []string `json:"urls"`
}

// entry is one artifact. Its fields below state are guarded by Cache.mu.
type entry struct {
	description
	file *os.File

	have     []bool // chunks that this process has verified
	unknown  []bool // chunks that an earlier process may have left whole
	missing  int    // how many are not in have
	readers  int
	yielding int    // readers from which it may be taken
	wishes   []wish // the chunks that readers wait for, the oldest first
	used     time.Time
	marked   time.Time // used as the disk has it
	fetching bool
	stop     context.CancelFunc // ends the fetch
	current  int                // the chunk that comes now
	cut      context.CancelFunc // ends its connection; nil: there is none
	wasCut   bool
	err      error         // why the last fetch ended; cleared by the next
	gone     bool          // removed: nobody may start on it again
	changed  chan struct{} // closed and replaced at every change
}

// opening is an artifact that the source is being asked for.
type opening struct {
	done chan struct{}
	err  error // why that was in vain; set before done is closed
}

// wish is a chunk and how many readers wait for it.
type wish struct{ chunk, readers int }

var digestPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)

// Open takes over the folder, making it when it is not there. maxBytes bounds
// what artifacts take together; 0 is 80 % of the file system.
func Open(dir string, maxBytes int64, source Source, log *slog.Logger) (*Cache, error) {
	c, err := open(dir, maxBytes, source, log)
	if err != nil {
		return nil, fmt.Errorf("open artifact cache: %w", err)
	}
	return c, nil
}

func open(dir string, maxBytes int64, source Source, log *slog.Logger) (*Cache, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		return nil, fmt.Errorf("%s is in use by another process", dir)
	}
	if maxBytes == 0 {
		var fs unix.Statfs_t
		if err := unix.Statfs(dir, &fs); err != nil {
			lock.Close()
			return nil, fmt.Errorf("measure %s: %w", dir, err)
		}
		maxBytes = int64(float64(fs.Blocks) * float64(fs.Bsize) * defaultShare)
	}
	c := &Cache{
		dir: dir, max: maxBytes, source: source, log: log, now: time.Now, lock: lock,
		retry: backoff.Policy{Min: time.Second, Max: 30 * time.Second, Rand: rand.Float64},
		stall: time.Minute, piece: pieceSize,
		entries: map[string]*entry{}, opening: map[string]*opening{},
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	if err := c.load(); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// load finds what an earlier process left, and removes what is no artifact.
func (c *Cache) load() error {
	files, err := os.ReadDir(c.dir)
	if err != nil {
		return err
	}
	for _, f := range files {
		digest, found := strings.CutSuffix(f.Name(), ".json")
		if !found || !digestPattern.MatchString(digest) {
			continue
		}
		if err := c.loadEntry(digest); err != nil {
			c.log.Warn("an artifact is thrown away", "sha256", digest, "err", err)
			os.Remove(c.metaPath(digest))
		}
	}
	for _, f := range files {
		digest, _, _ := strings.Cut(f.Name(), ".")
		if f.Name() != "lock" && c.entries[digest] == nil {
			os.RemoveAll(filepath.Join(c.dir, f.Name()))
		}
	}
	return nil
}

func (c *Cache) loadEntry(digest string) error {
	text, err := os.ReadFile(c.metaPath(digest))
	if err != nil {
		return err
	}
	var d description
	if err := json.Unmarshal(text, &d); err != nil {
		return err
	}
	if err := d.check(digest); err != nil {
		return err
	}
	st, err := os.Stat(c.metaPath(digest))
	if err != nil {
		return err
	}
	e, err := c.newEntry(d, false)
	if err != nil {
		return err
	}
	e.used, e.marked = st.ModTime(), st.ModTime()
	c.entries[digest] = e
	return nil
}

func (c *Cache) metaPath(digest string) string { return filepath.Join(c.dir, digest+".json") }
func (c *Cache) dataPath(digest string) string { return filepath.Join(c.dir, digest+".data") }

// check refuses a description that is not of this digest or not sound in itself.
func (d *description) check(digest string) error {
	list := sha256.Sum256(d.Chunks)
	switch {
	case d.SHA256 != digest:
		return errs.New(errs.DigestMismatch, "asked for %s, described is %s", digest, d.SHA256)
	case d.Size <= 0 || d.ChunkSize < minChunk || d.ChunkSize > maxChunk:
		return errs.New(errs.InvalidPayload, "artifact %s: %d bytes in chunks of %d", digest, d.Size, d.ChunkSize)
	case d.count() > maxChunks || int64(len(d.Chunks)) != d.count()*sha256.Size:
		return errs.New(errs.InvalidPayload, "artifact %s: a list of %d bytes for %d chunks", digest, len(d.Chunks), d.count())
	case hex.EncodeToString(list[:]) != d.ListSum:
		return errs.New(errs.DigestMismatch, "artifact %s: the chunk list is not the one that is named", digest)
	case len(d.URLs) == 0 || len(d.URLs) > maxURLs:
		return errs.New(errs.InvalidPayload, "artifact %s: %d URLs", digest, len(d.URLs))
	}
	return nil
}

// count is the number of chunks. It does not overflow: Size is checked first.
func (d *description) count() int64 { return (d.Size-1)/d.ChunkSize + 1 }

// length is that of chunk i; the last one may be short.
func (d *description) length(i int) int64 {
	return min(d.ChunkSize, d.Size-int64(i)*d.ChunkSize)
}

// end is where chunk i ends.
func (d *description) end(i int) int64 { return int64(i)*d.ChunkSize + d.length(i) }

func (d *description) digest(i int) [sha256.Size]byte {
	return [sha256.Size]byte(d.Chunks[i*sha256.Size:])
}

// newEntry opens the data file. What a file of an earlier process holds is
// checked when it is first needed.
func (c *Cache) newEntry(d description, fresh bool) (*entry, error) {
	flags := os.O_RDWR | os.O_CREATE
	if fresh {
		flags |= os.O_TRUNC
	}
	f, err := os.OpenFile(c.dataPath(d.SHA256), flags, 0o600)
	if err != nil {
		return nil, err
	}
	if err := f.Truncate(d.Size); err != nil {
		f.Close()
		return nil, err
	}
	n := int(d.count())
	e := &entry{description: d, file: f, have: make([]bool, n), unknown: make([]bool, n), missing: n, used: c.now(), changed: make(chan struct{})}
	if !fresh {
		for i := range e.unknown {
			e.unknown[i] = !hole(f, int64(i)*d.ChunkSize, d.length(i))
		}
	}
	return e, nil
}

// hole reports whether nothing was ever written there.
func hole(f *os.File, off, n int64) bool {
	data, err := f.Seek(off, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) {
		return true // no data from there on
	}
	return err == nil && data >= off+n
}

func (e *entry) broadcast() {
	close(e.changed)
	e.changed = make(chan struct{})
}

// Open gives a reader of the artifact with this digest, which may still be on
// its way. ctx bounds the caller's and the reader's waits, and not what others wait
// for, or ask for next. Errors: invalid-args, no-space, digest-mismatch, and those of
// the source.
func (c *Cache) Open(ctx context.Context, digest string) (*Reader, error) {
	if !digestPattern.MatchString(digest) {
		return nil, errs.New(errs.InvalidArgs, "%q is not a SHA-256 in lower-case hex", digest)
	}
	for {
		c.mu.Lock()
		if c.closed {
			c.mu.Unlock()
			return nil, errs.Retry(errs.Unavailable, "the artifact cache is closed")
		}
		if e := c.entries[digest]; e != nil {
			r := c.reader(ctx, e)
			c.mu.Unlock()
			return r, nil
		}
		asked := c.opening[digest]
		if asked == nil {
			asked = &opening{done: make(chan struct{})}
			c.opening[digest] = asked
			c.owned.Go(func() {
				err := c.admit(digest)
				c.mu.Lock()
				defer c.mu.Unlock()
				delete(c.opening, digest)
				asked.err = err
				close(asked.done)
			})
		}
		c.mu.Unlock()
		select {
		case <-asked.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if asked.err != nil {
			return nil, fmt.Errorf("artifact %s: %w", digest, asked.err)
		}
	}
}

// Prefetch gives readers of artifacts that fit in the cache together, of all or of
// none: where they do not fit beside what must stay, nothing is evicted. They hold up
// nobody: the cache may still evict what they read, which fails then. Errors: as Open's.
func (c *Cache) Prefetch(ctx context.Context, digests []string) (all []*Reader, err error) {
	if err := c.fit(ctx, digests); err != nil {
		return nil, err
	}
	for _, digest := range digests {
		r, err := c.Open(ctx, digest)
		if err != nil {
			for _, r := range all {
				r.Close()
			}
			return nil, err
		}
		r.yield()
		all = append(all, r)
	}
	return all, nil
}

// fit says why artifacts cannot be in the cache together, and makes those that are
// there the newest.
func (c *Cache) fit(ctx context.Context, digests []string) error {
	there := func(digest string) bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		e := c.entries[digest]
		if e != nil {
			c.touch(e)
		}
		return e != nil
	}
	sizes := map[string]int64{} // of those that are not
	for _, digest := range digests {
		if _, known := sizes[digest]; known || there(digest) {
			continue
		}
		res, err := c.source.Locate(ctx, digest)
		if err != nil {
			return fmt.Errorf("artifact %s: locate: %w", digest, err)
		}
		if res.SizeBytes > uint64(c.max) {
			return errs.New(errs.NoSpace, "artifact %s: %d bytes are more than the cache's %d", digest, res.SizeBytes, c.max)
		}
		sizes[digest] = int64(res.SizeBytes)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	keep := c.keep()
	together, held := int64(0), int64(0)
	for _, size := range sizes {
		together += size
	}
	for digest, e := range c.entries {
		_, counted := sizes[digest]
		switch {
		case counted: // it has come meanwhile
		case slices.Contains(digests, digest):
			together += e.Size
		case e.readers > 0 || e.yielding > 0 || keep[digest]:
			held += e.Size
		}
	}
	if together > c.max {
		return errs.New(errs.NoSpace, "the %d artifacts are %d bytes together, more than the cache's %d", len(digests), together, c.max)
	}
	if held+together > c.max {
		return errs.Retry(errs.NoSpace, "the %d artifacts are %d bytes together, and do not fit in the cache of %d bytes: %d of it are read now or named by assignments", len(digests), together, c.max, held)
	}
	return nil
}

// reader counts one more; c.mu is held.
func (c *Cache) reader(ctx context.Context, e *entry) *Reader {
	e.readers++
	c.touch(e)
	return &Reader{ctx: ctx, cache: c, entry: e}
}

// markEvery spaces the marks of one artifact's use: a drive is read in blocks.
const markEvery = time.Minute

// touch makes e the newest, for the next process too; c.mu is held.
func (c *Cache) touch(e *entry) {
	e.used = c.now()
	if d := e.used.Sub(e.marked); d >= 0 && d < markEvery {
		return
	}
	e.marked = e.used
	// Lost order costs a fetch at worst.
	os.Chtimes(c.metaPath(e.SHA256), e.used, e.used)
}

// Keep sets what tells which artifacts must not be evicted though nobody reads
// them: those that machines are about to ask for.
func (c *Cache) Keep(named func() map[string]bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.named = named
}

// keep is what must not be evicted; c.mu is held.
func (c *Cache) keep() map[string]bool {
	if c.named == nil {
		return nil
	}
	return c.named()
}

// admit asks the source for the artifact and makes room for it.
func (c *Cache) admit(digest string) error {
	d, err := c.describe(digest)
	var text []byte
	if err == nil {
		text, err = json.Marshal(d)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errs.Retry(errs.Unavailable, "the artifact cache is closed")
	}
	if err != nil {
		return err
	}
	if err := c.makeRoom(d.Size); err != nil {
		return err
	}
	// The description first: data without one is thrown away at the next start.
	err = atomicfile.Write(c.metaPath(digest), text, 0o600)
	var e *entry
	if err == nil {
		e, err = c.newEntry(d, true)
	}
	if err != nil {
		os.Remove(c.metaPath(digest))
		if errors.Is(err, syscall.ENOSPC) {
			return errs.Retry(errs.NoSpace, "%v", err)
		}
		return err
	}
	c.entries[digest] = e
	return nil
}

// describe asks the source, until that has said nothing for too long.
func (c *Cache) describe(digest string) (d description, err error) {
	ctx, end := context.WithCancel(c.ctx)
	defer end()
	silence := time.AfterFunc(c.stall, end)
	defer func() {
		if !silence.Stop() && err != nil {
			err = errs.Retry(errs.Unreachable, "nothing came for %v: %v", c.stall, err)
		}
	}()
	res, err := c.source.Locate(ctx, digest)
	if err != nil {
		return description{}, fmt.Errorf("locate: %w", err)
	}
	silence.Reset(c.stall)
	if res.SizeBytes == 0 || res.SizeBytes > 1<<62 {
		return description{}, errs.New(errs.InvalidPayload, "the gateway names %d bytes", res.SizeBytes)
	}
	d = description{SHA256: res.Sha256, Size: int64(res.SizeBytes), ChunkSize: int64(res.ChunkSizeBytes), ListSum: res.ChunksSha256, URLs: res.Urls}
	if d.ChunkSize < minChunk || d.count() > maxChunks || len(d.URLs) == 0 {
		return description{}, errs.New(errs.InvalidPayload, "the gateway names %d bytes in chunks of %d at %d URLs", d.Size, d.ChunkSize, len(d.URLs))
	}
	var last error
	for _, url := range d.URLs[:min(len(d.URLs), maxURLs)] {
		if d.Chunks, last = c.chunkList(ctx, silence, url, d.count()*sha256.Size); last == nil {
			if last = d.check(digest); last == nil {
				return d, nil
			}
		}
	}
	return description{}, last
}

func (c *Cache) chunkList(ctx context.Context, silence *time.Timer, url string, n int64) ([]byte, error) {
	body, err := c.source.Fetch(ctx, url+"/chunks", 0)
	if err != nil {
		return nil, fmt.Errorf("fetch the chunk list: %w", err)
	}
	defer body.Close()
	list, err := io.ReadAll(io.LimitReader(&awake{Reader: body, silence: silence, limit: c.stall}, n+1))
	if err != nil {
		return nil, fmt.Errorf("fetch the chunk list: %w", err)
	}
	return list, nil
}

// makeRoom evicts the least recently used artifacts that nobody reads and nothing
// keeps until n more bytes fit; c.mu is held. It evicts none if that is in vain.
func (c *Cache) makeRoom(n int64) error {
	if n > c.max {
		return errs.New(errs.NoSpace, "%d bytes are more than the cache's %d", n, c.max)
	}
	keep := c.keep()
	total, held := int64(0), int64(0)
	for _, e := range c.entries {
		total += e.Size
		if e.readers > 0 || keep[e.SHA256] {
			held += e.Size
		}
	}
	if held+n > c.max {
		return errs.Retry(errs.NoSpace, "%d bytes do not fit in the cache of %d bytes: %d of it are read now or named by assignments", n, c.max, held)
	}
	for total+n > c.max || len(c.entries) >= maxArtifacts {
		e := c.oldest(nil, keep)
		if e == nil {
			return errs.Retry(errs.NoSpace, "the cache has %d artifacts already, all of them read now or named by assignments", len(c.entries))
		}
		total -= e.Size
		c.remove(e, nil)
	}
	return nil
}

// oldest is the least recently used entry that nobody reads and that is not in
// keep, first of those that nobody would miss; c.mu is held.
func (c *Cache) oldest(except *entry, keep map[string]bool) *entry {
	var oldest *entry
	for _, e := range c.entries {
		if e == except || e.readers > 0 || keep[e.SHA256] {
			continue
		}
		if oldest == nil || cmp.Or(cmp.Compare(min(e.yielding, 1), min(oldest.yielding, 1)), e.used.Compare(oldest.used)) < 0 {
			oldest = e
		}
	}
	return oldest
}

// remove forgets e, for the reason err if it is a fault; c.mu is held. Open
// readers keep its file, and a running fetch ends by itself.
func (c *Cache) remove(e *entry, err error) {
	if e.gone {
		return
	}
	e.gone = true
	e.err = err
	if e.stop != nil {
		e.stop()
	}
	os.Remove(c.metaPath(e.SHA256))
	os.Remove(c.dataPath(e.SHA256))
	delete(c.entries, e.SHA256)
	c.closeFile(e)
	e.broadcast()
	c.log.Info("artifact removed", "sha256", e.SHA256, "bytes", e.Size)
}

// closeFile closes the file of a removed entry once nobody needs it; c.mu is held.
func (c *Cache) closeFile(e *entry) {
	if (e.gone || c.closed) && e.readers == 0 && !e.fetching {
		e.file.Close()
	}
}

// Close ends the fetches and waits for them. Readers fail from then on.
func (c *Cache) Close() error {
	c.mu.Lock()
	already := c.closed
	c.closed = true
	c.cancel()
	c.mu.Unlock()
	c.owned.Wait()
	if already {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.entries {
		c.closeFile(e)
		e.broadcast()
	}
	return c.lock.Close()
}
