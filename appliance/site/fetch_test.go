package site

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// chunked records which of its pieces were asked for.
type chunked struct {
	*bytes.Reader
	pieces map[int64]bool
	fails  int64 // where reading fails; -1: nowhere
	closed bool
}

func (c *chunked) Read(p []byte) (int, error) {
	at, _ := c.Seek(0, io.SeekCurrent)
	if c.fails >= 0 && at >= c.fails {
		return 0, errs.Retry(errs.Unreachable, "the line is gone")
	}
	c.pieces[at/fetchStep] = true
	return c.Reader.Read(p)
}

func (c *chunked) Close() error { c.closed = true; return nil }

func TestFetchKind(t *testing.T) {
	const size = 5*fetchStep + 1
	digest := strings.Repeat("ab", 32)
	var have *chunked
	kind := fetchKind(func(_ context.Context, sha string) (io.ReadSeekCloser, int64, error) {
		if sha != digest {
			return nil, 0, errors.New("no such artifact")
		}
		return have, size, nil
	})
	run := func(fails int64, digests ...string) (*pxev1.FetchResult, uint64, error) {
		have = &chunked{Reader: bytes.NewReader(make([]byte, size)), pieces: map[int64]bool{}, fails: fails}
		args, err := proto.Marshal(&pxev1.FetchRequest{Sha256: digests})
		if err != nil {
			t.Fatal(err)
		}
		op, err := kind.Decode(args)
		if err != nil {
			return nil, 0, err
		}
		if op.Destructive || op.Counts || !op.RetrySafe || !slices.Equal(op.Artifacts, digests) {
			t.Errorf("Decode = %+v, want what destroys nothing, may run twice and brings %v", op, digests)
		}
		var last uint64
		out, err := kind.Run(t.Context(), dispatch.Call{Operation: op, Progress: func(_, _ string, done, _ uint64) { last = done }})
		var res pxev1.FetchResult
		if err == nil {
			err = proto.Unmarshal(out, &res)
		}
		return &res, last, err
	}
	if res, _, err := run(-1, digest); err != nil || res.Bytes != size || len(have.pieces) != 6 || !have.closed {
		t.Errorf("fetch = %v, %v, with %d of 6 pieces asked for, closed %v", res, err, len(have.pieces), have.closed)
	}
	if _, _, err := run(3*fetchStep, digest); errs.CodeOf(err) != errs.Unreachable || !have.closed {
		t.Errorf("fetch over a line that fails = %v, want %s", err, errs.Unreachable)
	}
	if _, _, err := run(-1, digest, strings.Repeat("cd", 32)); err == nil {
		t.Error("fetch with an artifact that is not there = nil, want an error")
	}
	for _, bad := range [][]string{nil, {"x"}, {strings.ToUpper(digest)}, slices.Repeat([]string{digest}, maxFetched+1)} {
		if _, _, err := run(-1, bad...); errs.CodeOf(err) != errs.InvalidArgs {
			t.Errorf("fetch of %.3q = %v, want %s", bad, err, errs.InvalidArgs)
		}
	}
}
