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

// sized is an artifact that is read.
type sized interface {
	io.ReadSeekCloser
	Size() int64
}

// prefetch opens artifacts that fit in the cache together, and holds up no machine
// that needs their place.
func (s *site) prefetch(ctx context.Context, digests []string) (all []sized, err error) {
	readers, err := s.cache.Prefetch(ctx, digests)
	for _, r := range readers {
		all = append(all, r)
	}
	return all, err
}

// fetchKind takes artifacts into the cache and answers when all of them are there.
func fetchKind(open func(ctx context.Context, digests []string) ([]sized, error)) dispatch.Kind {
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
			digests := call.Operation.Value.([]string)
			var bytes uint64
			all, err := open(ctx, digests)
			if err != nil {
				return nil, err
			}
			for _, r := range all {
				defer r.Close()
			}
			for i, r := range all {
				if err := fetchOne(r, digests[i], call.Progress); err != nil {
					return nil, fmt.Errorf("artifact %s: %w", digests[i], err)
				}
				bytes += uint64(r.Size())
			}
			// A machine that boots may have needed the place of one that was there.
			for i, r := range all {
				if err := touch(r, 0); err != nil {
					return nil, fmt.Errorf("artifact %s: %w", digests[i], err)
				}
			}
			return proto.Marshal(&pxev1.FetchResult{Bytes: bytes})
		},
		Recover: func(context.Context, dispatch.Call) dispatch.Verdict { return dispatch.Rerun() },
	}
}

// touch reads the byte at off.
func touch(r io.ReadSeeker, off int64) error {
	if _, err := r.Seek(off, io.SeekStart); err != nil {
		return err
	}
	_, err := io.ReadFull(r, make([]byte, 1))
	return err
}

func fetchOne(r sized, digest string, progress func(phase, message string, done, total uint64)) error {
	told, size := int64(-1), r.Size()
	for off := int64(0); off < size; off += fetchStep {
		if err := touch(r, off); err != nil {
			return err
		}
		if mib := off >> 20; mib != told {
			told = mib
			progress("fetch", fmt.Sprintf("the box fetches artifact %.12s…: %d of %d MiB", digest, mib, size>>20), uint64(off), uint64(size))
		}
	}
	return nil
}
