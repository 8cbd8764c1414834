// Package artifacts keeps files by digest and serves them to agents, who check
// them chunk by chunk.
package artifacts

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"github.com/klauspost/compress/zstd"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/agentv1/agentv1connect"
	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/caller"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
)

const (
	// ChunkBytes is how much of a file each digest of its chunk list covers.
	ChunkBytes = 4 << 20
	// maxUnpacked stops a small file that unpacks without end.
	maxUnpacked = 1 << 40
	// decoderMemory bounds what a frame's window may ask for.
	decoderMemory = 256 << 20
	// locateLife is how long an answer of Locate holds.
	locateLife = time.Hour
)

// Path is where files are served, to agents only.
const Path = "/artifacts/"

// Service is safe for concurrent use.
type Service struct {
	dir   string
	store *store.Store
	log   *slog.Logger
	// mu makes one of a file and its row: a file goes only where no row has it.
	mu sync.Mutex
}

var _ agentv1connect.ArtifactServiceHandler = (*Service)(nil)

// New keeps files under dir, which it makes, and removes what imports and changes of
// the catalog that were cut off left behind: nothing else may use dir and st yet.
func New(dir string, st *store.Store, log *slog.Logger) (*Service, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open artifacts: %w", err)
	}
	left, err := filepath.Glob(filepath.Join(dir, partPattern))
	if err != nil {
		return nil, fmt.Errorf("open artifacts: %w", err)
	}
	for _, name := range left {
		if err := os.Remove(name); err != nil {
			return nil, fmt.Errorf("open artifacts: %w", err)
		}
	}
	s := &Service{dir: dir, store: st, log: log}
	return s, s.sweep(context.Background())
}

const partPattern = ".part-*"

// The formats: a disk image that machines unpack, and what is handed on as it
// is, such as a disc or firmware for a BMC.
const (
	Packed = "raw.zst"
	Plain  = "raw"
)

// Import reads a file to its end, keeps it under its digest, and gives it a
// name, replacing the name's older meaning.
func (s *Service) Import(ctx context.Context, name, arch, format string, r io.Reader) (store.Artifact, error) {
	if err := checkName(name, arch, format); err != nil {
		return store.Artifact{}, err
	}
	a := store.Artifact{Name: name, Arch: arch, Format: format, ChunkSizeBytes: ChunkBytes}
	err := s.receive(ctx, &a, r)
	if errors.Is(err, syscall.ENOSPC) {
		return store.Artifact{}, apierr.Busy("no-space", "the gateway's disk has no room for all of it; nothing of it is kept")
	}
	if err != nil {
		return store.Artifact{}, fmt.Errorf("import %s: %w", name, err)
	}
	s.log.Info("artifact imported", "name", name, "arch", arch, "sha256", a.SHA256, "bytes", a.SizeBytes, "unpacked_bytes", a.UnpackedSizeBytes)
	return a, nil
}

func checkName(name, arch, format string) error {
	if format != Packed && format != Plain {
		return errs.New(errs.InvalidArgs, "artifact format %q is not supported; want %s or, for discs and firmware, %s", format, Packed, Plain)
	}
	for what, text := range map[string]string{"name": name, "arch": arch} {
		bad := strings.IndexFunc(text, func(r rune) bool {
			return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '.' && r != '_' && r != '-'
		})
		if text == "" || len(text) > 128 || bad >= 0 {
			return errs.New(errs.InvalidArgs, "artifact %s %q: want 1 to 128 of a-z, A-Z, 0-9, '.', '_' and '-'", what, text)
		}
	}
	if _, ok := parseDigest(name); ok {
		return errs.New(errs.InvalidArgs, "artifact name %q looks like a digest", name)
	}
	return nil
}

func parseDigest(text string) (string, bool) {
	raw, err := hex.DecodeString(text)
	return text, err == nil && len(raw) == sha256.Size && text == strings.ToLower(text)
}

// receive writes the file and its chunk list, one pass over the bytes, and the row.
func (s *Service) receive(ctx context.Context, a *store.Artifact, r io.Reader) (err error) {
	file, err := os.CreateTemp(s.dir, partPattern)
	if err != nil {
		return err
	}
	defer os.Remove(file.Name())
	defer file.Close()

	whole, chunks := sha256.New(), &chunker{left: ChunkBytes, current: sha256.New()}
	packed, feed := io.Pipe()
	unpacked := make(chan error, 1)
	go func() {
		err := unpack(a, packed)
		packed.CloseWithError(errOr(err, io.ErrClosedPipe))
		unpacked <- err
	}()
	n, copyErr := io.Copy(io.MultiWriter(whole, chunks, file, feed), &contextReader{ctx, r})
	feed.CloseWithError(errOr(copyErr, io.EOF))
	if err := <-unpacked; err != nil && (copyErr == nil || errors.Is(copyErr, err)) {
		return err
	}
	if copyErr != nil {
		return fmt.Errorf("read: %w", copyErr)
	}
	list := chunks.finish()
	sum := sha256.Sum256(list)
	a.SHA256, a.SizeBytes, a.ChunksSHA256 = hex.EncodeToString(whole.Sum(nil)), uint64(n), hex.EncodeToString(sum[:])
	if err := file.Sync(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	// The chunk list first: a file that is there always has its list.
	if err := atomicfile.Write(s.path(a.SHA256)+".chunks", list, 0o600); err != nil {
		return err
	}
	if err := os.Rename(file.Name(), s.path(a.SHA256)); err != nil {
		return err
	}
	if err := atomicfile.SyncDir(s.dir); err != nil {
		return err
	}
	a.Imported = s.store.Now()
	return s.store.PutArtifact(ctx, *a)
}

// sweep removes what the catalog of disc images lost.
func (s *Service) sweep(ctx context.Context) error {
	lost, err := s.store.LostISOs(ctx)
	for _, a := range lost {
		if err == nil {
			err = s.Remove(ctx, a.Name, a.Arch)
		}
	}
	if err != nil {
		return fmt.Errorf("remove lost disc images: %w", err)
	}
	return nil
}

// Open reads a file that is there.
func (s *Service) Open(sha256 string) (*os.File, error) {
	digest, ok := parseDigest(sha256)
	if !ok {
		return nil, errs.New(errs.InvalidArgs, "%.80q is no SHA-256", sha256)
	}
	return os.Open(s.path(digest))
}

// Remove takes a name away, and the file with it where that was its last.
func (s *Service) Remove(ctx context.Context, name, arch string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	digest, named, err := s.store.RemoveArtifact(ctx, name, arch)
	if err != nil || named {
		return err
	}
	// The file first: its list without it is nothing.
	for _, path := range []string{s.path(digest), s.path(digest) + ".chunks"} {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove artifact %s: %w", name, err)
		}
	}
	s.log.Info("artifact removed", "name", name, "arch", arch, "sha256", digest)
	return atomicfile.SyncDir(s.dir)
}

func errOr(err, other error) error {
	if err != nil {
		return err
	}
	return other
}

// unpack measures what the file holds.
func unpack(a *store.Artifact, r io.Reader) error {
	if a.Format == Plain {
		sum := sha256.New()
		n, err := io.Copy(sum, io.LimitReader(r, maxUnpacked+1))
		switch {
		case err != nil:
			return err
		case n == 0:
			return errs.New(errs.InvalidArgs, "the file is empty")
		case n > maxUnpacked:
			return errs.New(errs.InvalidArgs, "the file has more than %d bytes", int64(maxUnpacked))
		}
		a.UnpackedSHA256, a.UnpackedSizeBytes = hex.EncodeToString(sum.Sum(nil)), uint64(n)
		return nil
	}
	dec, err := zstd.NewReader(r, zstd.WithDecoderMaxMemory(decoderMemory), zstd.WithDecoderMaxWindow(decoderMemory/2), zstd.WithDecoderConcurrency(1))
	if err != nil {
		return err
	}
	defer dec.Close()
	sum := sha256.New()
	n, err := io.Copy(sum, io.LimitReader(dec, maxUnpacked+1))
	switch {
	case err != nil:
		return errs.New(errs.InvalidArgs, "the file is not whole zstd data: %v", err)
	case n == 0:
		return errs.New(errs.InvalidArgs, "the file unpacks to nothing")
	case n > maxUnpacked:
		return errs.New(errs.InvalidArgs, "the file unpacks to more than %d bytes", int64(maxUnpacked))
	}
	a.UnpackedSHA256, a.UnpackedSizeBytes = hex.EncodeToString(sum.Sum(nil)), uint64(n)
	return nil
}

// chunker digests each chunk of what is written to it.
type chunker struct {
	current hash.Hash
	left    int
	list    []byte
}

func (c *chunker) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		part := p[:min(len(p), c.left)]
		c.current.Write(part)
		p, c.left = p[len(part):], c.left-len(part)
		if c.left == 0 {
			c.list = c.current.Sum(c.list)
			c.current.Reset()
			c.left = ChunkBytes
		}
	}
	return n, nil
}

func (c *chunker) finish() []byte {
	if c.left < ChunkBytes {
		c.list = c.current.Sum(c.list)
	}
	return c.list
}

// contextReader ends a copy when its context ends.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c *contextReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}

func (s *Service) path(digest string) string { return filepath.Join(s.dir, digest) }

// Locate answers ArtifactService.Locate.
func (s *Service) Locate(ctx context.Context, req *connect.Request[agentv1.LocateRequest]) (*connect.Response[agentv1.LocateResponse], error) {
	if _, err := caller.From(ctx); err != nil {
		return nil, caller.Error(err)
	}
	a, err := s.store.Artifact(ctx, req.Msg.Ref, req.Msg.Arch)
	if errors.Is(err, store.ErrNotFound) {
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("no artifact %.128q for architecture %.32q", req.Msg.Ref, req.Msg.Arch))
	}
	if err != nil {
		s.log.Error("locate artifact", "ref", req.Msg.Ref, "err", err)
		return nil, caller.Error(errs.Retry(errs.Internal, "the gateway cannot read its store"))
	}
	return connect.NewResponse(&agentv1.LocateResponse{
		Sha256:            a.SHA256,
		SizeBytes:         a.SizeBytes,
		UnpackedSha256:    a.UnpackedSHA256,
		UnpackedSizeBytes: a.UnpackedSizeBytes,
		ChunkSizeBytes:    a.ChunkSizeBytes,
		ChunksSha256:      a.ChunksSHA256,
		Urls:              []string{Path + a.SHA256},
		ExpiresMs:         s.store.Now().Add(locateLife).UnixMilli(),
	}), nil
}

// ServeHTTP answers GET and HEAD of /artifacts/<sha256>, with ranges, and of
// /artifacts/<sha256>/chunks.
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if _, err := caller.From(r.Context()); err != nil {
		http.Error(w, string(errs.CodeOf(err)), http.StatusForbidden)
		return
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		http.Error(w, "only GET and HEAD", http.StatusMethodNotAllowed)
		return
	}
	rest, list := strings.CutSuffix(strings.TrimPrefix(r.URL.Path, Path), "/chunks")
	digest, ok := parseDigest(rest)
	if !ok {
		http.NotFound(w, r)
		return
	}
	name := s.path(digest)
	if list {
		name += ".chunks"
	}
	f, err := os.Open(name)
	if err != nil {
		if !errors.Is(err, os.ErrNotExist) {
			s.log.Error("open artifact", "sha256", digest, "err", err)
		}
		http.NotFound(w, r)
		return
	}
	defer f.Close()
	w.Header().Set("Content-Type", "application/octet-stream")
	if !list {
		w.Header().Set("ETag", `"`+digest+`"`)
	}
	http.ServeContent(w, r, "", time.Time{}, f)
}
