package site

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/artifact"
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
	kind := fetchKind(func(_ context.Context, digests []string) ([]sized, error) {
		if len(digests) > 1 {
			return nil, errs.New(errs.InvalidArgs, "no such artifact")
		}
		return []sized{have}, nil
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
	if _, _, err := run(-1, digest, strings.Repeat("cd", 32)); errs.CodeOf(err) != errs.InvalidArgs {
		t.Errorf("fetch with an artifact that is not there = %v, want %s", err, errs.InvalidArgs)
	}
	for _, bad := range [][]string{nil, {"x"}, {strings.ToUpper(digest)}, slices.Repeat([]string{digest}, maxFetched+1)} {
		if _, _, err := run(-1, bad...); errs.CodeOf(err) != errs.InvalidArgs {
			t.Errorf("fetch of %.3q = %v, want %s", bad, err, errs.InvalidArgs)
		}
	}
}

// shelf is a gateway's artifacts of one chunk size each, which counts what is fetched.
type shelf struct {
	artifacts map[string][]byte
	fetched   atomic.Int64
	fetching  func(digest string) // is told; nil: nothing is
}

func (s *shelf) add(artifact []byte) (digest string) {
	sum := sha256.Sum256(artifact)
	digest = hex.EncodeToString(sum[:])
	s.artifacts[digest] = artifact
	return digest
}

func (s *shelf) list(artifact []byte) (list []byte) {
	for chunk := range slices.Chunk(artifact, fetchStep) {
		sum := sha256.Sum256(chunk)
		list = append(list, sum[:]...)
	}
	return list
}

func (s *shelf) Locate(_ context.Context, digest string) (*agentv1.LocateResponse, error) {
	a := s.artifacts[digest]
	sum := sha256.Sum256(s.list(a))
	return &agentv1.LocateResponse{Sha256: digest, SizeBytes: uint64(len(a)), ChunkSizeBytes: fetchStep, ChunksSha256: hex.EncodeToString(sum[:]), Urls: []string{"/" + digest}}, nil
}

func (s *shelf) Fetch(_ context.Context, url string, offset int64) (io.ReadCloser, error) {
	digest, isList := strings.CutSuffix(strings.TrimPrefix(url, "/"), "/chunks")
	if isList {
		return io.NopCloser(bytes.NewReader(s.list(s.artifacts[digest]))), nil
	}
	s.fetched.Add(1)
	if s.fetching != nil {
		s.fetching(digest)
	}
	return io.NopCloser(bytes.NewReader(s.artifacts[digest][offset:])), nil
}

// TestFetchKeepsTogether: what one command names is in the cache together at its end;
// where it does not fit, nothing is fetched, and nothing leaves for it.
func TestFetchKeepsTogether(t *testing.T) {
	s := &shelf{artifacts: map[string][]byte{}}
	old := s.add(bytes.Repeat([]byte("o"), 2*fetchStep))
	kernel, initrd := s.add(bytes.Repeat([]byte("k"), 3*fetchStep)), s.add(bytes.Repeat([]byte("i"), 4*fetchStep))
	for _, tt := range []struct {
		room    int64
		fetched int64
		err     []string
	}{
		{7 * fetchStep, 3, nil},
		{7*fetchStep - 1, 1, []string{"the 2 artifacts are 458752 bytes together, more than the cache's 458751"}},
		{4*fetchStep - 1, 1, []string{"artifact " + initrd, "262144 bytes are more than the cache's 262143"}},
		{3*fetchStep - 1, 1, []string{"artifact " + kernel, "196608 bytes are more than the cache's 196607"}},
	} {
		s.fetched.Store(0)
		cache, err := artifact.Open(t.TempDir(), tt.room, s, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		site := &site{cache: cache}
		run := func(digests ...string) error {
			_, err := fetchKind(site.prefetch).Run(t.Context(), dispatch.Call{Operation: dispatch.Operation{Value: digests}, Progress: func(_, _ string, _, _ uint64) {}})
			return err
		}
		if err := run(old); err != nil {
			t.Fatal(err)
		}
		for range 2 { // as the gateway does, which asks again
			err = run(kernel, initrd)
			if (err == nil) != (tt.err == nil) || err != nil && errs.CodeOf(err) != errs.NoSpace {
				t.Errorf("fetch into %d bytes = %v", tt.room, err)
			}
			for _, want := range tt.err {
				if !strings.Contains(fmt.Sprint(err), want) {
					t.Errorf("fetch into %d bytes = %v, want it to say %q", tt.room, err, want)
				}
			}
		}
		if err := run(old); err != nil {
			t.Error(err)
		}
		cache.Close()
		if tt.err == nil {
			tt.fetched++ // what made room
		}
		if n := s.fetched.Load(); n != tt.fetched {
			t.Errorf("fetch into %d bytes: %d bodies, want %d", tt.room, n, tt.fetched)
		}
	}
}

// TestBootsGoBeforeFetches: a machine that boots while a command fetches gets what it
// needs, though the command's own need all of the cache, and the command says so: of
// one that has yet to come as of one that was there.
func TestBootsGoBeforeFetches(t *testing.T) {
	s := &shelf{artifacts: map[string][]byte{}}
	first, second := s.add(bytes.Repeat([]byte("1"), 3*fetchStep)), s.add(bytes.Repeat([]byte("2"), 4*fetchStep))
	disc := s.add(bytes.Repeat([]byte("d"), 2*fetchStep))
	for _, during := range []string{first, second} {
		cache, err := artifact.Open(t.TempDir(), 7*fetchStep, s, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		site := &site{cache: cache}
		booted := make(chan struct{})
		s.fetching = func(digest string) {
			if digest != during {
				return
			}
			defer close(booted)
			r, size, err := site.openArtifact(t.Context(), disc)
			if err != nil {
				t.Errorf("a machine that boots gets %v", err)
				return
			}
			defer r.Close()
			if n, err := io.Copy(io.Discard, r); n != size || err != nil {
				t.Errorf("a machine that boots gets %d bytes of %d, %v", n, size, err)
			}
		}
		_, err = fetchKind(site.prefetch).Run(t.Context(), dispatch.Call{Operation: dispatch.Operation{Value: []string{first, second}}, Progress: func(_, _ string, _, _ uint64) {}})
		if errs.CodeOf(err) != errs.Unavailable || !strings.Contains(err.Error(), "artifact "+first) {
			t.Errorf("fetch of which artifact %s had to leave = %v, want %s", first, err, errs.Unavailable)
		}
		select {
		case <-booted:
		case <-time.After(20 * time.Second):
			t.Error("no machine has booted")
		}
		cache.Close()
	}
}
