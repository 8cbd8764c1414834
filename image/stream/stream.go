// Package stream writes a compressed disk image onto a disk while it arrives,
// proves that the disk holds it, and makes the disk bootable only then.
package stream

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"log/slog"
	mathrand "math/rand/v2"
	"sync"
	"sync/atomic"

	"github.com/google/uuid"
	"github.com/klauspost/compress/zstd"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/image/gpt"
	"github.com/better-compute/site-appliance/image/layout"
	"github.com/better-compute/site-appliance/image/stream/blockdev"
	"github.com/better-compute/site-appliance/image/stream/seed"
)

const (
	chunkSize = 4 << 20
	// chunks bounds the memory: that many buffers, and twice the decoder's window.
	chunks  = 8
	writers = 2
	// decoding is how many blocks of the image are in the decoder at a time. That
	// is most of the work, and is divided among cores only from 2 on.
	decoding = 4
	// zeroGrain is the least run of zeros that is left to the device.
	zeroGrain = 256 << 10
	// tailSize is kept of the image's end: the backup table stands there.
	tailSize = 64 << 10
	// maxWindow is the largest zstd window that is accepted.
	maxWindow = 128 << 20
)

// Job is one image and the disk that it goes to.
type Job struct {
	Source Source
	// SizeBytes and SHA256 (hex) are those of the stored form, the Unpacked ones
	// those of the raw image.
	SizeBytes         int64
	SHA256            string
	UnpackedSizeBytes int64
	UnpackedSHA256    string
	// Disk is the device's path.
	Disk string
	// Seed becomes a CIDATA partition at the disk's end; nil: none.
	Seed *seed.Seed

	// Progress is told the bytes of a phase ("write", then "verify", which starts
	// at 0); nil is fine. It must not block.
	Progress func(phase string, done, total uint64)
	// Retry is DefaultRetry when its Attempts are 0.
	Retry Retry
	// Rand makes the seed partition's GUID; crypto/rand when nil.
	Rand io.Reader
	Log  *slog.Logger
}

// Result is what the disk was proven to hold.
type Result struct {
	SHA256, UnpackedSHA256 string
	BytesWritten           int64
}

// Run writes the image. Until all of it is verified the disk has no partition
// table, so that whatever goes wrong, a machine does not boot half an image.
// Errors: digest-mismatch, no-space, invalid-args, unreachable, and the context's.
func Run(ctx context.Context, job Job) (Result, error) {
	if job.Log == nil {
		job.Log = slog.New(slog.DiscardHandler)
	}
	if job.Progress == nil {
		job.Progress = func(string, uint64, uint64) {}
	}
	if job.Retry.Attempts == 0 {
		job.Retry = DefaultRetry(mathrand.Float64)
	}
	if job.Rand == nil {
		job.Rand = rand.Reader
	}
	if err := job.check(); err != nil {
		return Result{}, err
	}
	dev, err := blockdev.Open(job.Disk)
	if err != nil {
		return Result{}, err
	}
	r := &run{Job: job, dev: dev}
	err = r.run(ctx)
	if cerr := dev.Close(); err == nil && cerr != nil {
		err = fmt.Errorf("close disk: %w", cerr)
	}
	if err != nil {
		return Result{}, err
	}
	return Result{SHA256: job.SHA256, UnpackedSHA256: job.UnpackedSHA256, BytesWritten: job.UnpackedSizeBytes}, nil
}

func (j *Job) check() error {
	for _, digest := range []string{j.SHA256, j.UnpackedSHA256} {
		if b, err := hex.DecodeString(digest); err != nil || len(b) != sha256.Size || hex.EncodeToString(b) != digest {
			return errs.New(errs.InvalidArgs, "digest %q is not a SHA-256 in lower-case hex", digest)
		}
	}
	if j.SizeBytes <= 0 || j.UnpackedSizeBytes <= 0 || j.UnpackedSizeBytes%layout.Sector != 0 {
		return errs.New(errs.InvalidArgs, "an image of %d bytes stored and %d unpacked: want some, and whole sectors", j.SizeBytes, j.UnpackedSizeBytes)
	}
	if j.Seed != nil {
		return j.Seed.Check()
	}
	return nil
}

// run is the state of one Run.
type run struct {
	Job
	dev *blockdev.Device

	head, headWanted []byte // the image's first chunk, and as it goes to the disk
	tail, tailWanted []byte // its last bytes likewise; empty when head has all
	after            []gpt.Patch
	seedAt           int64
	seedImage        []byte
}

func (r *run) tailAt() int64 {
	return max(int64(len(r.head)), r.UnpackedSizeBytes-tailSize)
}

func (r *run) run(ctx context.Context) error {
	if r.UnpackedSizeBytes > r.dev.Size() {
		return errs.New(errs.NoSpace, "disk %s has %d bytes, the image needs %d", r.Disk, r.dev.Size(), r.UnpackedSizeBytes)
	}
	if r.Seed != nil {
		image, err := seed.Build(*r.Seed)
		if err != nil {
			return err
		}
		r.seedImage = image
	}
	buffers, release, err := makeBuffers()
	if err != nil {
		return err
	}
	defer release()
	if err := r.write(ctx, buffers); err != nil {
		return err
	}
	if err := r.finishBody(); err != nil {
		return err
	}
	if err := r.verify(ctx, buffers); err != nil {
		return err
	}
	return r.makeBootable()
}

func makeBuffers() (chan []byte, func(), error) {
	buffers := make(chan []byte, chunks)
	var all [][]byte
	release := func() {
		for _, b := range all {
			blockdev.Free(b)
		}
	}
	for range chunks {
		b, err := blockdev.Buffer(chunkSize)
		if err != nil {
			release()
			return nil, nil, err
		}
		all = append(all, b)
		buffers <- b
	}
	return buffers, release, nil
}

// chunk is a part of the image on its way to the hash and the disk.
type chunk struct {
	off  int64
	data []byte
	left *atomic.Int32 // how many still need it
}

// write streams the image to the disk, all but its first chunk, and checks both digests.
func (r *run) write(ctx context.Context, buffers chan []byte) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	toHash, toDisk := make(chan chunk, chunks), make(chan chunk, chunks)
	done := func(c chunk) {
		if c.left.Add(-1) == 0 {
			buffers <- c.data[:chunkSize] // has room for all of them
		}
	}
	unpacked := sha256.New()
	var owned sync.WaitGroup
	owned.Go(func() {
		for c := range toHash {
			unpacked.Write(c.data)
			done(c)
		}
	})
	for range writers {
		owned.Go(func() {
			for c := range toDisk {
				if ctx.Err() == nil {
					if err := writeSparse(r.dev, c.data, c.off); err != nil {
						cancel(fmt.Errorf("write disk %s: %w", r.Disk, err))
					}
				}
				done(c)
			}
		})
	}
	err := r.unpack(ctx, buffers, toHash, toDisk)
	close(toHash)
	close(toDisk)
	owned.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		return err
	}
	return digest("unpacked", unpacked, r.UnpackedSHA256)
}

func digest(form string, h hash.Hash, want string) error {
	if got := hex.EncodeToString(h.Sum(nil)); got != want {
		return errs.New(errs.DigestMismatch, "the image's %s form has SHA-256 %s, want %s", form, got, want)
	}
	return nil
}

// unpack reads, hashes and decodes the stored form into chunks.
func (r *run) unpack(ctx context.Context, buffers <-chan []byte, toHash, toDisk chan<- chunk) error {
	body := &resuming{ctx: ctx, source: r.Source, size: r.SizeBytes, retry: r.Retry}
	defer body.close()
	stored := sha256.New()
	tee := io.TeeReader(body, stored)
	// The frame's own checksum would say nothing that the digests do not.
	decoder, err := zstd.NewReader(tee, zstd.WithDecoderConcurrency(decoding), zstd.WithDecoderLowmem(false),
		zstd.WithDecoderMaxWindow(maxWindow), zstd.IgnoreChecksum(true))
	if err != nil {
		return fmt.Errorf("open the decoder: %w", err)
	}
	defer decoder.Close()
	failed := r.split(ctx, decoder, buffers, toHash, toDisk)
	var broken decodeError
	if failed != nil && !errors.As(failed, &broken) {
		return failed
	}
	// What the decoder made of the bytes says little while their own digest is
	// open: it decides which of the two is told.
	decoder.Close()
	if _, err := io.Copy(io.Discard, tee); err != nil {
		return err
	}
	if err := digest("stored", stored, r.SHA256); err != nil {
		return err
	}
	if failed != nil {
		return errs.New(errs.DigestMismatch, "the image's stored form is as named, but does not unpack to what is named: %v", failed)
	}
	return nil
}

// decodeError is a fault of the content, not of the way that it came.
type decodeError struct{ error }

func (r *run) split(ctx context.Context, decoder io.Reader, buffers <-chan []byte, toHash, toDisk chan<- chunk) error {
	fault := func(err error) error {
		var coded *errs.Error
		if ctx.Err() != nil || errors.As(err, &coded) {
			return err
		}
		return decodeError{err}
	}
	for off := int64(0); off < r.UnpackedSizeBytes; {
		var data []byte
		select {
		case data = <-buffers:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		data = data[:min(chunkSize, r.UnpackedSizeBytes-off)]
		c := chunk{off, data, new(atomic.Int32)}
		_, err := io.ReadFull(decoder, data)
		if err == nil && off == 0 {
			err = r.begin(data)
			c.left.Store(1)
		} else {
			c.left.Store(2)
		}
		if err != nil {
			// Both users are gone or never come: the buffer goes back by hand.
			c.left.Store(1)
			toHash <- c
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				return decodeError{fmt.Errorf("it ends before byte %d of %d", off+int64(len(data)), r.UnpackedSizeBytes)}
			}
			return fault(err)
		}
		r.keepTail(c)
		toHash <- c
		if off > 0 {
			toDisk <- c
		}
		off += int64(len(data))
		r.Progress("write", uint64(off), uint64(r.UnpackedSizeBytes))
	}
	var more [1]byte
	switch _, err := io.ReadFull(decoder, more[:]); {
	case err == nil:
		return decodeError{fmt.Errorf("it goes on after byte %d", r.UnpackedSizeBytes)}
	case err != io.EOF:
		return fault(err)
	}
	return nil
}

// begin plans the disk's table from the image's first chunk, and then makes
// sure that nothing on the disk boots.
func (r *run) begin(first []byte) error {
	r.head = bytes.Clone(first)
	if err := r.plan(); err != nil {
		return err
	}
	r.Log.Info("writing the disk", "disk", r.Disk, "bytes", r.UnpackedSizeBytes, "direct", r.dev.Direct())
	end := r.dev.Size() - min(r.dev.Size(), 1<<20)
	for _, span := range [][2]int64{{0, min(r.dev.Size(), chunkSize)}, {end, r.dev.Size() - end}} {
		if err := r.dev.Zero(span[0], span[1]); err != nil {
			return fmt.Errorf("wipe the partition table of %s: %w", r.Disk, err)
		}
	}
	return r.dev.Sync()
}

// plan works out every byte that will differ from the image.
func (r *run) plan() error {
	table, err := gpt.Parse(r.head, layout.Sector)
	if errors.Is(err, gpt.ErrNone) {
		if r.Seed != nil {
			return errs.New(errs.InvalidArgs, "the image has no partition table that could take a seed")
		}
		r.headWanted = r.head
		return nil
	}
	if err != nil {
		return errs.New(errs.InvalidArgs, "the image's %v", err)
	}
	if r.dev.SectorSize() != layout.Sector {
		return errs.New(errs.InvalidArgs, "disk %s has sectors of %d bytes, the image is made for %d", r.Disk, r.dev.SectorSize(), layout.Sector)
	}
	sectors := uint64(r.UnpackedSizeBytes / layout.Sector)
	if table.Sectors() != sectors {
		return errs.New(errs.InvalidArgs, "the image's partition table is for %d sectors, the image has %d", table.Sectors(), sectors)
	}
	if table.BackupSectors()*layout.Sector > tailSize {
		return errs.New(errs.InvalidArgs, "the image's partition table takes %d sectors", table.BackupSectors())
	}
	oldBackup := gpt.Patch{Off: int64(sectors-table.BackupSectors()) * layout.Sector, Data: make([]byte, table.BackupSectors()*layout.Sector)}
	if err := table.Fit(uint64(r.dev.Size())); err != nil {
		return errs.New(errs.NoSpace, "disk %s: %v", r.Disk, err)
	}
	if r.Seed != nil {
		if err := r.planSeed(table); err != nil {
			return err
		}
	}
	patches := append([]gpt.Patch{oldBackup}, table.Backup()...)
	r.headWanted = overlay(r.head, 0, append(patches, table.Primary()...))
	r.after = patches
	return nil
}

// planSeed places the seed at the disk's end, so that the room between it and
// the image stays in one piece.
func (r *run) planSeed(table *gpt.Table) error {
	for _, p := range table.Partitions() {
		if p.Name == layout.SeedLabel {
			return errs.New(errs.InvalidArgs, "the image has a %s partition of its own", layout.SeedLabel)
		}
	}
	end := int64(table.LastUsable()+1) * layout.Sector
	at := (end - seed.SizeBytes) &^ (gpt.Align - 1)
	if least := (r.UnpackedSizeBytes + gpt.Align - 1) &^ (gpt.Align - 1); at < least {
		return errs.New(errs.NoSpace, "disk %s has %d bytes, the image and its seed need %d", r.Disk, r.dev.Size(), least+seed.SizeBytes+r.dev.Size()-end)
	}
	id, err := uuid.NewRandomFromReader(r.Rand)
	if err != nil {
		return fmt.Errorf("make a partition's GUID: %w", err)
	}
	p := gpt.Partition{Type: layout.TypeBasic, ID: id, Name: layout.SeedLabel, First: uint64(at / layout.Sector), Last: uint64((at+seed.SizeBytes)/layout.Sector) - 1}
	if _, err := table.Add(p); err != nil {
		return errs.New(errs.InvalidArgs, "the image: %v", err)
	}
	r.seedAt = at
	return nil
}

// overlay is base, which stands at off, with the patches' bytes where they touch it.
func overlay(base []byte, off int64, patches []gpt.Patch) []byte {
	out := bytes.Clone(base)
	for _, p := range patches {
		from := max(p.Off, off)
		to := min(p.Off+int64(len(p.Data)), off+int64(len(out)))
		if from < to {
			copy(out[from-off:], p.Data[from-p.Off:to-p.Off])
		}
	}
	return out
}

// keepTail copies what of the chunk belongs to the image's last bytes.
func (r *run) keepTail(c chunk) {
	at := r.tailAt()
	if from := max(at, c.off); from < c.off+int64(len(c.data)) && from >= c.off {
		r.tail = append(r.tail, c.data[from-c.off:]...)
	}
}

// finishBody writes what stands behind the first chunk and is not the image's:
// the backup table and the seed.
func (r *run) finishBody() error {
	r.tailWanted = overlay(r.tail, r.tailAt(), r.after)
	for _, p := range r.after {
		// The part within the first chunk comes last, with the table.
		if skip := int64(len(r.head)) - p.Off; skip > 0 {
			if skip >= int64(len(p.Data)) {
				continue
			}
			p = gpt.Patch{Off: p.Off + skip, Data: p.Data[skip:]}
		}
		if _, err := r.dev.WriteAt(p.Data, p.Off); err != nil {
			return fmt.Errorf("write the backup partition table: %w", err)
		}
	}
	if r.Seed != nil {
		for off := 0; off < len(r.seedImage); off += chunkSize {
			if err := writeSparse(r.dev, r.seedImage[off:min(off+chunkSize, len(r.seedImage))], r.seedAt+int64(off)); err != nil {
				return fmt.Errorf("write the seed: %w", err)
			}
		}
	}
	return r.dev.Sync()
}

// verify reads everything but the first chunk back and compares: the image by
// its digest, with the bytes that were changed on purpose put back, and these by themselves.
func (r *run) verify(ctx context.Context, buffers chan []byte) error {
	read := make(chan chunk, chunks) // room for every buffer: its sender never waits
	var failed error                 // set before read closes
	go func() {
		defer close(read)
		failed = r.readBack(ctx, buffers, read)
	}()

	r.Progress("verify", 0, uint64(r.UnpackedSizeBytes)) // from here on all is on the medium
	unpacked := sha256.New()
	unpacked.Write(r.head)
	var changed error
	for c := range read { // until readBack has ended
		if at := r.tailAt(); len(r.tail) > 0 && c.off+int64(len(c.data)) > at {
			// The tail lies in the last chunk or in the last two.
			from := max(at, c.off)
			here, kept := c.data[from-c.off:], r.tailWanted[from-at:]
			kept = kept[:len(here)]
			if !bytes.Equal(here, kept) && changed == nil {
				changed = errs.New(errs.DigestMismatch, "disk %s does not hold what was written at its partition table's backup", r.Disk)
			}
			copy(here, r.tail[from-at:][:len(here)])
		}
		unpacked.Write(c.data)
		off := c.off + int64(len(c.data))
		buffers <- c.data[:chunkSize]
		r.Progress("verify", uint64(off), uint64(r.UnpackedSizeBytes))
	}
	if failed != nil {
		return failed
	}
	if changed != nil {
		return changed
	}
	if got := hex.EncodeToString(unpacked.Sum(nil)); got != r.UnpackedSHA256 {
		return errs.New(errs.DigestMismatch, "disk %s reads back as SHA-256 %s, want %s", r.Disk, got, r.UnpackedSHA256)
	}
	for _, p := range r.after {
		// What lies within the image was compared with its tail or comes with its head.
		skip := max(0, r.UnpackedSizeBytes-p.Off)
		if skip < int64(len(p.Data)) {
			if err := r.same(p.Data[skip:], p.Off+skip, "partition table's backup"); err != nil {
				return err
			}
		}
	}
	if r.Seed != nil {
		return r.same(r.seedImage, r.seedAt, "seed")
	}
	return nil
}

func (r *run) readBack(ctx context.Context, buffers <-chan []byte, read chan<- chunk) error {
	for off := int64(len(r.head)); off < r.UnpackedSizeBytes; {
		var data []byte
		select {
		case data = <-buffers:
		case <-ctx.Done():
			return ctx.Err()
		}
		data = data[:min(chunkSize, r.UnpackedSizeBytes-off)]
		if _, err := r.dev.ReadAt(data, off); err != nil {
			return fmt.Errorf("read disk %s back at %d: %w", r.Disk, off, err)
		}
		read <- chunk{off: off, data: data}
		off += int64(len(data))
	}
	return nil
}

// same compares the disk with what was written there.
func (r *run) same(want []byte, off int64, what string) error {
	got := make([]byte, len(want))
	if _, err := r.dev.ReadAt(got, off); err != nil {
		return fmt.Errorf("read disk %s back at %d: %w", r.Disk, off, err)
	}
	if !bytes.Equal(got, want) {
		return errs.New(errs.DigestMismatch, "disk %s does not hold what was written as its %s", r.Disk, what)
	}
	return nil
}

// makeBootable writes the first chunk, with the partition table, now that the
// rest is proven. Where any of it fails, nothing of it stays.
func (r *run) makeBootable() error {
	if err := r.writeHead(); err != nil {
		// Whatever stands there now must not boot.
		return errors.Join(err, r.dev.Zero(0, int64(len(r.headWanted))), r.dev.Sync())
	}
	if err := r.dev.RereadPartitions(); err != nil {
		r.Log.Warn("the kernel keeps the old partitions until a reboot", "disk", r.Disk, "err", err)
	}
	return nil
}

// writeHead writes the first chunk: its first block, without which firmware
// finds no table, only when the rest is on the medium, so that a power cut in
// between leaves nothing that boots.
func (r *run) writeHead() error {
	first := min(blockdev.Align, len(r.headWanted))
	for _, span := range [][2]int{{first, len(r.headWanted)}, {0, first}} {
		if span[0] == span[1] {
			continue
		}
		if _, err := r.dev.WriteAt(r.headWanted[span[0]:span[1]], int64(span[0])); err != nil {
			return fmt.Errorf("write the partition table: %w", err)
		}
		if err := r.dev.Sync(); err != nil {
			return err
		}
	}
	return r.same(r.headWanted, 0, "first bytes")
}

// writeSparse writes data, leaving long runs of zeros to the device.
func writeSparse(dev *blockdev.Device, data []byte, off int64) error {
	for start := 0; start < len(data); {
		zero := isZero(data[start:min(start+zeroGrain, len(data))])
		end := start
		for end < len(data) {
			next := min(end+zeroGrain, len(data))
			if isZero(data[end:next]) != zero {
				break
			}
			end = next
		}
		var err error
		if zero {
			err = dev.Zero(off+int64(start), int64(end-start))
		} else {
			_, err = dev.WriteAt(data[start:end], off+int64(start))
		}
		if err != nil {
			return err
		}
		start = end
	}
	return nil
}

var zeroBlock [zeroGrain]byte

func isZero(b []byte) bool { return bytes.Equal(b, zeroBlock[:len(b)]) }
