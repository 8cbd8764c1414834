package site

import (
	"context"
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent/dispatch"
	"github.com/better-compute/site-appliance/appliance/agent/envelope"
	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/pxe/assign"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

const (
	// maxFetched is how many artifacts one command may name.
	maxFetched = 16
	// fetchStep is no longer than the cache's shortest chunk: one byte of each is
	// asked for, which brings and checks the whole of it.
	fetchStep = 64 << 10
)

// fetchKind takes artifacts into the cache and answers when all of them are there.
func fetchKind(open func(ctx context.Context, sha256 string) (io.ReadSeekCloser, int64, error)) dispatch.Kind {
	return dispatch.Kind{
		Name: cmdkind.Fetch, Lane: cmdkind.Lane(cmdkind.Fetch), Roles: siteOnly,
		Decode: func(args []byte) (dispatch.Operation, error) {
			req := &pxev1.FetchRequest{}
			if err := envelope.StrictUnmarshal(args, req); err != nil {
				return dispatch.Operation{}, err
			}
			if n := len(req.Sha256); n < 1 || n > maxFetched {
				return dispatch.Operation{}, errs.New(errs.InvalidArgs, "%d artifacts: want 1 to %d", n, maxFetched)
			}
			for _, digest := range req.Sha256 {
				if !assign.ValidDigest(digest) {
					return dispatch.Operation{}, errs.New(errs.InvalidArgs, "artifact %.80q: want 64 lower-case hex digits", digest)
				}
			}
			return dispatch.Operation{Name: cmdkind.Fetch, Key: "artifact " + req.Sha256[0], RetrySafe: true, Artifacts: req.Sha256, Value: req.Sha256}, nil
		},
		Run: func(ctx context.Context, call dispatch.Call) ([]byte, error) {
			var bytes uint64
			for _, digest := range call.Operation.Value.([]string) {
				n, err := fetchOne(ctx, open, digest, call.Progress)
				if err != nil {
					return nil, fmt.Errorf("artifact %s: %w", digest, err)
				}
				bytes += n
			}
			return proto.Marshal(&pxev1.FetchResult{Bytes: bytes})
		},
		Recover: func(context.Context, dispatch.Call) dispatch.Verdict { return dispatch.Rerun() },
	}
}

func fetchOne(ctx context.Context, open func(context.Context, string) (io.ReadSeekCloser, int64, error), digest string, progress func(phase, message string, done, total uint64)) (uint64, error) {
	r, size, err := open(ctx, digest)
	if err != nil {
		return 0, err
	}
	defer r.Close()
	one := make([]byte, 1)
	told := int64(-1)
	for off := int64(0); off < size; off += fetchStep {
		if _, err := r.Seek(off, io.SeekStart); err != nil {
			return 0, err
		}
		if _, err := io.ReadFull(r, one); err != nil {
			return 0, err
		}
		if mib := off >> 20; mib != told {
			told = mib
			progress("fetch", fmt.Sprintf("the box fetches artifact %.12s…: %d of %d MiB", digest, mib, size>>20), uint64(off), uint64(size))
		}
	}
	return uint64(size), nil
}
