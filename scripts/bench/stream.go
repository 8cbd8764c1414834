package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/better-compute/site-appliance/image/stream"
)

const mib = 1 << 20

var streamSuite = suite{
	names: []string{"image.stream.write", "image.stream.unpack", "image.stream.verified", "image.stream.whole", "image.stream.sata"},
	run:   measureStream,
}

// measureStream puts image.stream beside dd and a person's other tools. All of
// them read from memory and write the same bytes to the same file, past the page
// cache and flushed at the end.
func measureStream(ctx context.Context, s settings) (rows []row, err error) {
	source, err := os.MkdirTemp(s.memory, "bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(source)
	dir, err := os.MkdirTemp(s.dir, "bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	fmt.Fprintf(s.log, "bench: making an image of %d MiB\n", s.sizeMiB)
	raw, stored, disk := filepath.Join(source, "raw"), filepath.Join(source, "image.zst"), filepath.Join(dir, "disk")
	job, err := makeImage(raw, stored, s.sizeMiB*mib)
	if err != nil {
		return nil, err
	}
	job.Disk = disk
	// Written to before, so that nobody measures the growth of a file.
	if err := tool(ctx, `dd if=/dev/zero of="$0" bs=4M count="$1" conv=fsync status=none`, disk, fmt.Sprint(s.sizeMiB/4)); err != nil {
		return nil, err
	}
	const (
		write  = `dd if="$0" of="$1" bs=4M oflag=direct conv=fsync,notrunc status=none`
		read   = `dd if="$1" bs=4M iflag=direct status=none`
		unpack = `zstd -dcq "$0"`
		place  = `dd of="$1" bs=4M iflag=fullblock oflag=direct conv=fsync,notrunc status=none`
		sum    = `openssl dgst -sha256` // several times as fast as sha256sum
	)
	var ours, oursAll, dd, ddAll, pipe, pipeAll []float64
	peers := []struct {
		script, from string
		took         *[]float64
	}{
		{write, raw, &dd},
		{unpack + " | " + place, stored, &pipe},
		{write + " && " + read + " | " + sum, raw, &ddAll},
		{sum + ` "$0" & ` + unpack + " | tee >(" + sum + ") | " + place + " && wait && " + read + " | " + sum, stored, &pipeAll},
	}
	for i := range s.rounds {
		fmt.Fprintf(s.log, "bench: image.stream, round %d of %d\n", i+1, s.rounds)
		written, all, err := timeStream(ctx, job)
		if err != nil {
			return nil, err
		}
		ours, oursAll = append(ours, written), append(oursAll, all)
		for _, p := range peers {
			start := time.Now()
			if err := tool(ctx, p.script, p.from, disk); err != nil {
				return nil, err
			}
			*p.took = append(*p.took, time.Since(start).Seconds())
		}
	}
	line := func(name string, ours []float64, peer string, theirs []float64, goal float64) {
		speed := func(took []float64) float64 { return float64(s.sizeMiB*mib) / median(took) / 1e6 }
		rows = append(rows, row{name: name, ours: speed(ours), unit: "MB/s", peer: peer, theirs: speed(theirs), goal: goal})
	}
	line("image.stream.write", ours, "dd oflag=direct conv=fsync of the unpacked bytes", dd, 0.9)
	line("image.stream.unpack", ours, "zstd -dc | dd oflag=direct conv=fsync", pipe, 0)
	line("image.stream.verified", oursAll, "dd of the unpacked bytes, dd iflag=direct | openssl sha256", ddAll, 0)
	line("image.stream.whole", oursAll, "zstd -dc | dd with both digests, dd iflag=direct | openssl sha256", pipeAll, 0)

	var slow, slowDD []float64
	err = throttled(dir, sata, func() error {
		for i := range s.rounds {
			fmt.Fprintf(s.log, "bench: image.stream at the speed of SATA, round %d of %d\n", i+1, s.rounds)
			written, _, err := timeStream(ctx, job)
			if err != nil {
				return err
			}
			slow = append(slow, written)
			start := time.Now()
			if err := tool(ctx, write, raw, disk); err != nil {
				return err
			}
			slowDD = append(slowDD, time.Since(start).Seconds())
		}
		return nil
	})
	if errors.Is(err, errNoThrottle) {
		fmt.Fprintln(s.log, "bench: image.stream.sata is left out:", err)
		return rows, nil
	}
	if err != nil {
		return nil, err
	}
	line("image.stream.sata", slow, fmt.Sprintf("dd oflag=direct conv=fsync, both held to %d MB/s", int(sata/1e6)), slowDD, 0.9)
	return rows, nil
}

// tool runs a script of a person's tools. Its arguments are $0 and $1.
func tool(ctx context.Context, script string, args ...string) error {
	out, err := exec.CommandContext(ctx, "/bin/bash", append([]string{"-o", "pipefail", "-c", script}, args...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", script, err, out)
	}
	return nil
}

// timeStream gives the seconds until all is on the disk, and until all is verified.
func timeStream(ctx context.Context, job stream.Job) (written, all float64, err error) {
	start := time.Now()
	job.Progress = func(phase string, done, _ uint64) {
		if phase == "verify" && done == 0 {
			written = time.Since(start).Seconds()
		}
	}
	_, err = stream.Run(ctx, job)
	return written, time.Since(start).Seconds(), err
}

// file is a stream.Source, so that what is measured is not a web server.
type file string

func (f file) Open(_ context.Context, off int64) (io.ReadCloser, error) {
	r, err := os.Open(string(f))
	if err != nil {
		return nil, err
	}
	if _, err := r.Seek(off, io.SeekStart); err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

// makeImage makes an image, raw and stored, of what fills a server's disk: the
// files of this system. Blocks of zeros are left out, as a stream would skip them.
func makeImage(raw, stored string, size int64) (stream.Job, error) {
	job := stream.Job{Source: file(stored), UnpackedSizeBytes: size}
	rawFile, err := os.Create(raw)
	if err != nil {
		return job, err
	}
	defer rawFile.Close()
	storedFile, err := os.Create(stored)
	if err != nil {
		return job, err
	}
	defer storedFile.Close()
	rawSum, storedSum := sha256.New(), sha256.New()
	enc, err := zstd.NewWriter(io.MultiWriter(storedFile, storedSum))
	if err != nil {
		return job, err
	}
	w := &filler{w: io.MultiWriter(rawFile, rawSum, enc), left: size}
	for before := int64(-1); w.left > 0; { // again from the start where there are few
		if w.left == before {
			return job, errors.New("no files to make an image of")
		}
		before = w.left
		for _, root := range []string{"/usr/bin", "/usr/lib", "/usr/share"} {
			if err := filepath.WalkDir(root, w.add); err != nil {
				return job, err
			}
		}
	}
	if err := enc.Close(); err != nil {
		return job, err
	}
	st, err := storedFile.Stat()
	if err != nil {
		return job, err
	}
	job.SizeBytes, job.SHA256, job.UnpackedSHA256 = st.Size(), hex.EncodeToString(storedSum.Sum(nil)), hex.EncodeToString(rawSum.Sum(nil))
	return job, nil
}

// filler writes files, in blocks, until it has enough.
type filler struct {
	w    io.Writer
	left int64
}

func (f *filler) add(path string, entry fs.DirEntry, err error) error {
	if f.left == 0 {
		return fs.SkipAll
	}
	if err != nil || !entry.Type().IsRegular() {
		return nil // what others may not read is no loss
	}
	content, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	const block = 4096
	for len(content) >= block && f.left > 0 {
		if strings.Trim(string(content[:block]), "\x00") != "" {
			if _, err := f.w.Write(content[:block]); err != nil {
				return err
			}
			f.left -= block
		}
		content = content[block:]
	}
	return nil
}
