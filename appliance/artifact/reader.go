package artifact

import (
	"context"
	"errors"
	"io"
	"io/fs"

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
	if r.closed {
		return 0, fs.ErrClosed
	}
	if r.off >= r.entry.Size {
		return 0, io.EOF
	}
	if len(p) == 0 {
		return 0, nil
	}
	i := int(r.off / r.entry.ChunkSize)
	if err := r.await(i); err != nil {
		return 0, err
	}
	end := int64(i)*r.entry.ChunkSize + r.entry.length(i)
	n, err := r.entry.file.ReadAt(p[:min(int64(len(p)), end-r.off)], r.off)
	r.off += int64(n)
	if err == io.EOF && n > 0 {
		err = nil
	}
	return n, err
}

// await returns when chunk i is there.
func (r *Reader) await(i int) error {
	c, e := r.cache, r.entry
	asked := false
	for {
		c.mu.Lock()
		switch {
		case c.closed:
			c.mu.Unlock()
			return errs.Retry(errs.Unavailable, "the artifact cache is closed")
		case e.have[i] && !e.gone:
			c.mu.Unlock()
			return nil
		case e.gone || asked && !e.fetching && e.err != nil:
			err := e.err
			c.mu.Unlock()
			if err == nil {
				err = errs.Retry(errs.Unavailable, "artifact %s was removed", e.SHA256)
			}
			return err
		}
		c.want(e, i)
		asked = true
		changed := e.changed
		c.mu.Unlock()
		select {
		case <-changed:
		case <-r.ctx.Done():
			return r.ctx.Err()
		}
	}
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
	r.entry.readers--
	if !r.entry.gone {
		c.touch(r.entry)
	}
	c.closeFile(r.entry)
	return nil
}
