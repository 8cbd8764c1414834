package artifact

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// Reader reads one artifact, waiting for bytes that have not come yet. It is an
// io.ReadSeekCloser for one goroutine.
type Reader struct {
	ctx    context.Context
	cache  *Cache
	entry  *entry
	off    int64
	closed bool
	yields bool
}

// Size is the artifact's, in bytes.
func (r *Reader) Size() int64 { return r.entry.Size }

// Seek is io.Seeker.
func (r *Reader) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekStart:
	case io.SeekCurrent:
		offset += r.off
	case io.SeekEnd:
		offset += r.entry.Size
	default:
		return 0, errors.New("seek artifact: bad whence")
	}
	if offset < 0 {
		return 0, errors.New("seek artifact: before its start")
	}
	r.off = offset
	return offset, nil
}

// Read gives only bytes whose chunk was verified.
func (r *Reader) Read(p []byte) (int, error) {
	if len(p) == 0 && !r.closed && r.off < r.entry.Size {
		return 0, nil
	}
	f, off, n, err := r.Next(int64(len(p)))
	if err != nil {
		return 0, err
	}
	got, err := f.ReadAt(p[:n], off)
	r.off = off + int64(got)
	if errors.Is(err, fs.ErrClosed) {
		return got, r.await(int(r.off / r.entry.ChunkSize)) // it knows why
	}
	if err == io.EOF && got > 0 {
		err = nil
	}
	return got, err
}

// Next moves on by n bytes, at least one and at most limit, and tells where they
// are: verified, in the file from off on. The file is the cache's: it is for
// reading at offsets, until the reader is closed.
func (r *Reader) Next(limit int64) (f *os.File, off, n int64, err error) {
	if r.closed {
		return nil, 0, 0, fs.ErrClosed
	}
	e := r.entry
	if r.off >= e.Size {
		return nil, 0, 0, io.EOF
	}
	first := int(r.off / e.ChunkSize)
	if err := r.await(first); err != nil {
		return nil, 0, 0, err
	}
	end := e.end(first)
	r.cache.mu.Lock()
	for i := first + 1; end-r.off < limit && i < len(e.have) && e.have[i]; i++ {
		end = e.end(i)
	}
	r.cache.mu.Unlock()
	off, n = r.off, min(limit, end-r.off)
	r.off += n
	return e.file, off, n, nil
}

// Has reports that Next does not wait for any of the n bytes from off on.
func (r *Reader) Has(off, n int64) bool {
	c, e := r.cache, r.entry
	c.mu.Lock()
	defer c.mu.Unlock()
	if e.gone || c.closed {
		return true // it fails at once
	}
	end := min(off+n, e.Size)
	for i := off / e.ChunkSize; i*e.ChunkSize < end; i++ {
		if !e.have[i] {
			return false
		}
	}
	return true
}

// await returns when chunk i is there.
func (r *Reader) await(i int) error {
	c, e := r.cache, r.entry
	c.mu.Lock()
	defer c.mu.Unlock()
	if e.have[i] && !e.gone && !c.closed {
		return nil
	}
	waits := false
	defer func() {
		if waits && !e.have[i] {
			e.unwant(i)
		}
	}()
	for {
		switch {
		case c.closed:
			return errs.Retry(errs.Unavailable, "the artifact cache is closed")
		case e.have[i] && !e.gone:
			return nil
		case e.gone || waits && !e.fetching && e.err != nil:
			if e.err == nil {
				return errs.Retry(errs.Unavailable, "artifact %s was removed for another that needed its place", e.SHA256)
			}
			return e.err
		case !waits:
			waits = true
			c.want(e, i)
		default:
			c.start(e)
		}
		changed := e.changed
		c.mu.Unlock()
		select {
		case <-changed:
		case <-r.ctx.Done():
		}
		c.mu.Lock()
		if err := r.ctx.Err(); err != nil {
			return err
		}
	}
}

// yield lets the artifact be evicted though it is read.
func (r *Reader) yield() {
	r.cache.mu.Lock()
	defer r.cache.mu.Unlock()
	r.yields = true
	r.entry.readers--
	r.entry.yielding++
}

// Close gives the artifact free for eviction.
func (r *Reader) Close() error {
	if r.closed {
		return nil
	}
	r.closed = true
	c := r.cache
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.yields {
		r.entry.yielding--
	} else {
		r.entry.readers--
	}
	if !r.entry.gone {
		c.touch(r.entry)
	}
	c.closeFile(r.entry)
	return nil
}
