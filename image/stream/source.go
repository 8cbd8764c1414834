package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// Source gives the stored bytes from an offset on. A coded error that is not
// retryable ends the stream; after any other the stream opens again where it was.
type Source interface {
	Open(ctx context.Context, offset int64) (io.ReadCloser, error)
}

// HTTP is a Source that reads one URL with Range requests.
type HTTP struct {
	Client *http.Client
	URL    string
}

// Open is Source.Open.
func (h HTTP) Open(ctx context.Context, offset int64) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, h.URL, nil)
	if err != nil {
		return nil, errs.New(errs.InvalidArgs, "fetch the image: %v", err)
	}
	if offset > 0 {
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-", offset))
	}
	res, err := h.Client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("fetch the image: %w", err)
	}
	switch {
	case offset == 0 && res.StatusCode == http.StatusOK:
		return res.Body, nil
	case offset > 0 && res.StatusCode == http.StatusPartialContent:
		if got := res.Header.Get("Content-Range"); strings.HasPrefix(got, fmt.Sprintf("bytes %d-", offset)) {
			return res.Body, nil
		}
	}
	res.Body.Close()
	message := fmt.Sprintf("fetch the image: %s at byte %d: %s", h.URL, offset, res.Status)
	if res.StatusCode >= 500 || res.StatusCode == http.StatusTooManyRequests || res.StatusCode == http.StatusRequestTimeout {
		return nil, errs.Retry(errs.Unreachable, "%s", message)
	}
	return nil, errs.New(errs.Unreachable, "%s", message)
}

// resuming reads size bytes from a source across lost and stalled connections.
type resuming struct {
	ctx    context.Context
	source Source
	size   int64
	retry  Retry

	off    int64
	failed int // connections in a row that brought nothing
	body   io.ReadCloser
	cancel context.CancelCauseFunc // ends body's request
	stall  *time.Timer
}

// Retry says how patient a stream is with its source.
type Retry struct {
	Backoff backoff.Policy
	// Attempts is how many connections in a row may bring nothing.
	Attempts int
	// Stall is how long a connection may stay silent.
	Stall time.Duration
}

// DefaultRetry rides out a box's restart, and some minutes of a cut line.
func DefaultRetry(rand func() float64) Retry {
	return Retry{Backoff: backoff.Policy{Min: time.Second, Max: 20 * time.Second, Rand: rand}, Attempts: 30, Stall: 90 * time.Second}
}

var errStalled = errors.New("the source stays silent")

func (r *resuming) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for r.off < r.size {
		if err := r.open(); err != nil {
			return 0, err
		}
		r.stall.Reset(r.retry.Stall)
		n, err := r.body.Read(p[:min(int64(len(p)), r.size-r.off)])
		r.stall.Stop()
		r.off += int64(n)
		if n > 0 {
			r.failed = 0
			return n, nil // an error comes back at the next read
		}
		if err == nil {
			continue
		}
		r.close()
		if err := r.pause(err); err != nil {
			return 0, err
		}
	}
	return 0, io.EOF
}

// open makes sure that there is a body.
func (r *resuming) open() error {
	for r.body == nil {
		ctx, cancel := context.WithCancelCause(r.ctx)
		stall := time.AfterFunc(r.retry.Stall, func() { cancel(errStalled) })
		body, err := r.source.Open(ctx, r.off)
		stall.Stop()
		if err == nil {
			r.body, r.cancel, r.stall = body, cancel, stall
			return nil
		}
		if context.Cause(ctx) == errStalled {
			err = errStalled
		}
		cancel(nil)
		var coded *errs.Error
		if errors.As(err, &coded) && !coded.Retryable {
			return err
		}
		if err := r.pause(err); err != nil {
			return err
		}
	}
	return nil
}

// pause waits after a connection that failed with err, or gives up.
func (r *resuming) pause(err error) error {
	if r.ctx.Err() != nil {
		return context.Cause(r.ctx)
	}
	r.failed++
	if r.failed >= r.retry.Attempts {
		return errs.Retry(errs.Unreachable, "read the image at byte %d of %d: %d attempts failed, the last with: %v", r.off, r.size, r.failed, err)
	}
	return r.retry.Backoff.Wait(r.ctx, r.failed-1, nil)
}

func (r *resuming) close() {
	if r.body != nil {
		r.stall.Stop()
		r.cancel(nil)
		r.body.Close()
		r.body = nil
	}
}
