package artifact

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"syscall"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

const (
	// attempts is how many fetches in a row may bring no chunk before those who
	// wait are told.
	attempts = 8
	// maxBad is how often one artifact's chunks may come wrong.
	maxBad    = 3
	pieceSize = 256 << 10
	// trickle is what must come of a connection for it not to count as silent.
	trickle = 16 << 10
)

// want makes sure that somebody fetches chunk i of e, for one more reader; c.mu is held.
func (c *Cache) want(e *entry, i int) {
	known := false
	for k := range e.wishes {
		if e.wishes[k].chunk == i {
			e.wishes[k].readers++
			known = true
		}
	}
	if !known {
		e.wishes = append(e.wishes, wish{i, 1})
	}
	// What nobody waits for makes way, even in its middle.
	if e.cut != nil && !e.wished(e.current) {
		e.cut()
		e.cut, e.wasCut = nil, true
	}
	c.start(e)
}

// wished reports whether a reader waits for chunk i; c.mu is held.
func (e *entry) wished(i int) bool {
	return slices.ContainsFunc(e.wishes, func(w wish) bool { return w.chunk == i })
}

// unwant is one reader that waits no more for chunk i; c.mu is held.
func (e *entry) unwant(i int) {
	e.wishes = slices.DeleteFunc(e.wishes, func(w wish) bool { return w.chunk == i && w.readers == 1 })
	for k := range e.wishes {
		if e.wishes[k].chunk == i {
			e.wishes[k].readers--
		}
	}
}

// start begins a fetch of what is missing unless one runs; c.mu is held.
func (c *Cache) start(e *entry) {
	if e.fetching || e.gone || c.closed {
		return
	}
	ctx, stop := context.WithCancel(c.ctx)
	e.fetching, e.stop, e.err = true, stop, nil
	c.owned.Go(func() {
		defer stop()
		err := c.fetch(ctx, e)
		c.mu.Lock()
		defer c.mu.Unlock()
		e.fetching, e.stop = false, nil
		if e.err == nil {
			e.err = err
		}
		c.closeFile(e)
		e.broadcast()
	})
}

// next picks the chunk to fetch after chunk at: what a reader has waited for the
// longest, else the next one that is missing. -1: none is.
func (c *Cache) next(e *entry, at int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := len(e.have)
	if len(e.wishes) > 0 {
		at = e.wishes[0].chunk
	}
	for i := range n {
		if j := (at + i) % n; !e.have[j] {
			return j
		}
	}
	return -1
}

// begin says that chunk i comes next, by a connection that cut ends. False: it is
// not to come, because somebody waits for another one.
func (c *Cache) begin(e *entry, i int, cut context.CancelFunc) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e.wasCut || len(e.wishes) > 0 && !e.wished(i) {
		return false
	}
	e.current, e.cut = i, cut
	return true
}

// end says that the connection brings no more, and reports whether it was cut.
func (c *Cache) end(e *entry) (wasCut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	wasCut, e.cut, e.wasCut = e.wasCut, nil, false
	return wasCut
}

// fetch brings every missing chunk, the wanted ones first.
func (c *Cache) fetch(ctx context.Context, e *entry) error {
	failed, bad, at, turn := 0, 0, 0, 0
	piece := make([]byte, c.piece)
	for {
		i := c.next(e, at)
		if i < 0 {
			return c.whole(ctx, e, piece)
		}
		// What an earlier process left is looked at before it is fetched again.
		if c.known(e, i, piece) {
			at = i + 1
			continue
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		url := e.URLs[turn%len(e.URLs)]
		got, err := c.fetchFrom(ctx, e, url, i, piece)
		at = i + got
		if got > 0 {
			failed = 0
		}
		var coded *errs.Error
		switch {
		case err == nil:
			continue
		case ctx.Err() != nil:
			return ctx.Err()
		case errs.CodeOf(err) == errs.DigestMismatch:
			c.log.Warn("a chunk of an artifact came wrong", "sha256", e.SHA256, "url", url, "err", err)
			if bad++; bad >= maxBad {
				return err
			}
		case errors.As(err, &coded) && !coded.Retryable:
			return err
		default:
			c.log.Info("the fetch of an artifact is interrupted", "sha256", e.SHA256, "chunk", at, "err", err)
		}
		turn++
		if failed++; failed >= attempts {
			return errs.Retry(errs.Unreachable, "fetch artifact %s: %d attempts brought nothing, the last: %v", e.SHA256, failed, err)
		}
		if err := c.retry.Wait(ctx, failed-1, nil); err != nil {
			return err
		}
	}
}

// fetchFrom reads chunks from one connection, starting with chunk i, for as long
// as the next one is what is wanted. It tells how many it brought.
func (c *Cache) fetchFrom(ctx context.Context, e *entry, url string, i int, piece []byte) (got int, err error) {
	ctx, cut := context.WithCancel(ctx)
	defer cut()
	if c.begin(e, i, cut) {
		got, err = c.stream(ctx, cut, e, url, i, piece)
	}
	if c.end(e) {
		return got, nil
	}
	return got, err
}

func (c *Cache) stream(ctx context.Context, cut context.CancelFunc, e *entry, url string, i int, piece []byte) (got int, err error) {
	silence := time.AfterFunc(c.stall, cut)
	defer silence.Stop()
	body, err := c.source.Fetch(ctx, url, int64(i)*e.ChunkSize)
	if err != nil {
		return 0, fmt.Errorf("fetch from %s: %w", url, err)
	}
	defer body.Close()
	from := &awake{Reader: body, silence: silence, limit: c.stall}
	for {
		sum, err := c.store(ctx, e, i, from, piece)
		if err != nil {
			return got, err
		}
		if want := e.digest(i); sum != want {
			return got, errs.New(errs.DigestMismatch, "chunk %d of artifact %s has SHA-256 %x, want %x", i, e.SHA256, sum, want)
		}
		c.arrived(e, i)
		got++
		i++
		if c.next(e, i) != i || c.maybe(e, i) || !c.begin(e, i, cut) {
			return got, nil
		}
	}
}

// awake puts the end of a silent connection off whenever a little has come.
type awake struct {
	io.Reader
	silence *time.Timer
	limit   time.Duration
	since   int // bytes since it was put off
}

func (a *awake) Read(p []byte) (int, error) {
	n, err := a.Reader.Read(p)
	if a.since += n; a.since >= min(trickle, len(p)) {
		a.since = 0
		a.silence.Reset(a.limit)
	}
	return n, err
}

// store writes one chunk to the file and gives the digest of what came. Nobody
// reads it before arrived.
func (c *Cache) store(ctx context.Context, e *entry, i int, body io.Reader, piece []byte) (sum [sha256.Size]byte, err error) {
	h := sha256.New()
	off, left := int64(i)*e.ChunkSize, e.length(i)
	for left > 0 {
		p := piece[:min(left, int64(len(piece)))]
		if _, err := io.ReadFull(body, p); err != nil {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return sum, fmt.Errorf("read chunk %d: %w", i, err)
		}
		h.Write(p)
		if err := c.write(ctx, e, p, off); err != nil {
			return sum, err
		}
		off, left = off+int64(len(p)), left-int64(len(p))
	}
	return [sha256.Size]byte(h.Sum(nil)), nil
}

// write makes room on a full disk as long as there is something to evict.
func (c *Cache) write(ctx context.Context, e *entry, p []byte, off int64) error {
	for {
		_, err := e.file.WriteAt(p, off)
		if err == nil {
			return nil
		}
		if !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) {
			return errs.New(errs.Internal, "store artifact %s: %v", e.SHA256, err)
		}
		c.mu.Lock()
		oldest := c.oldest(e, c.keep())
		if oldest != nil && oldest.yielding > 0 && e.readers == 0 {
			oldest = nil // it gives way to readers only
		}
		if oldest != nil {
			c.remove(oldest, nil)
		}
		c.mu.Unlock()
		if oldest == nil {
			return errs.New(errs.NoSpace, "store artifact %s: the disk is full, and all else in the cache is read now or named by assignments", e.SHA256)
		}
		// Its file holds the disk until its own fetch has ended.
		if err := c.ended(ctx, oldest); err != nil {
			return err
		}
	}
}

// ended waits for the fetch of a removed entry to end.
func (c *Cache) ended(ctx context.Context, e *entry) error {
	for {
		c.mu.Lock()
		fetching, changed := e.fetching, e.changed
		c.mu.Unlock()
		if !fetching {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// arrived makes a verified chunk readable.
func (c *Cache) arrived(e *entry, i int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e.unknown[i] = false
	if !e.have[i] {
		e.have[i] = true
		e.missing--
	}
	e.wishes = slices.DeleteFunc(e.wishes, func(w wish) bool { return w.chunk == i })
	e.cut = nil // until the next one begins
	e.broadcast()
}

// maybe reports whether the file may hold chunk i from an earlier process.
func (c *Cache) maybe(e *entry, i int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return e.unknown[i]
}

// known reports whether the file already holds chunk i, from an earlier process.
func (c *Cache) known(e *entry, i int, piece []byte) bool {
	c.mu.Lock()
	unknown := e.unknown[i]
	e.unknown[i] = false
	c.mu.Unlock()
	if !unknown {
		return false
	}
	h := sha256.New()
	if _, err := io.CopyBuffer(struct{ io.Writer }{h}, struct{ io.Reader }{io.NewSectionReader(e.file, int64(i)*e.ChunkSize, e.length(i))}, piece); err != nil {
		return false
	}
	if want := e.digest(i); [sha256.Size]byte(h.Sum(nil)) != want {
		return false
	}
	c.arrived(e, i)
	return true
}

// whole compares the complete artifact with its own digest: the chunk list is
// the gateway's word, the digest is what was asked for.
func (c *Cache) whole(ctx context.Context, e *entry, piece []byte) error {
	h := sha256.New()
	for off := int64(0); off < e.Size; {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		n, err := e.file.ReadAt(piece[:min(int64(len(piece)), e.Size-off)], off)
		if err != nil {
			return errs.New(errs.Internal, "read artifact %s: %v", e.SHA256, err)
		}
		h.Write(piece[:n])
		off += int64(n)
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != e.SHA256 {
		err := errs.New(errs.DigestMismatch, "artifact %s: its chunks are as listed, but together have SHA-256 %s", e.SHA256, got)
		c.mu.Lock()
		c.remove(e, err)
		c.mu.Unlock()
		return err
	}
	if err := e.file.Sync(); err != nil {
		return errs.New(errs.Internal, "store artifact %s: %v", e.SHA256, err)
	}
	c.log.Info("artifact is complete", "sha256", e.SHA256, "bytes", e.Size)
	return nil
}
