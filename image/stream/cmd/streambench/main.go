// Command streambench measures image.stream beside dd writing the same bytes to
// the same place, in one run. It prints lines of make bench's table: name, ours,
// unit, peer, peer's value, ratio, goal.
package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/better-compute/site-appliance/image/stream"
)

const mib = 1 << 20

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintf(os.Stderr, "streambench: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	flags := flag.NewFlagSet("streambench", flag.ContinueOnError)
	size := flags.Int64("size", 512, "the image's size in MiB")
	rounds := flags.Int("rounds", 3, "how often each is measured; the median counts")
	disk := flags.String("disk", "", "a disk or file to OVERWRITE; a file of its own when empty")
	source := flags.String("source", "/dev/shm", "a folder in memory, so that reading the image costs nobody anything")
	if err := flags.Parse(args); err != nil {
		return err
	}
	src, err := os.MkdirTemp(*source, "streambench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(src)
	if *disk == "" {
		dir, err := os.MkdirTemp("", "streambench-")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		*disk = filepath.Join(dir, "disk")
		// Allocated, so that neither side measures the growth of a file.
		if err := exec.CommandContext(ctx, "/usr/bin/dd", "if=/dev/zero", "of="+*disk, "bs=4M", fmt.Sprintf("count=%d", *size/4), "status=none").Run(); err != nil {
			return fmt.Errorf("make the disk: %w", err)
		}
	}
	job, raw, err := newImage(src, *size*mib)
	if err != nil {
		return err
	}
	job.Disk = *disk
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	server := &http.Server{Handler: http.FileServer(http.Dir(src)), ReadHeaderTimeout: time.Minute}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	defer func() {
		server.Close()
		if serr := <-served; !errors.Is(serr, http.ErrServerClosed) {
			err = errors.Join(err, serr)
		}
	}()
	job.Source = stream.HTTP{Client: http.DefaultClient, URL: "http://" + listener.Addr().String() + "/image.zst"}

	// The disk's own speed shows in the first line where the disk is slower than
	// a digest; the second line's peer does the same work with the same tools.
	var ours, oursAll, dd, ddAll, piped []float64
	for range *rounds {
		w, all, err := measureStream(ctx, job)
		if err != nil {
			return err
		}
		ours, oursAll = append(ours, w), append(oursAll, all)
		if w, all, err = measureDD(ctx, raw, *disk, *size); err != nil {
			return err
		}
		dd, ddAll = append(dd, w), append(ddAll, all)
		if w, err = measurePipe(ctx, filepath.Join(src, "image.zst"), *disk); err != nil {
			return err
		}
		piped = append(piped, w)
	}
	line := func(name, peer string, a, b []float64, goal string) {
		x, y := median(a), median(b)
		fmt.Fprintf(out, "%s\t%.0f\tMB/s\t%s\t%.0f\t%.2f\t%s\n", name, float64(*size*mib)/x/1e6, peer, float64(*size*mib)/y/1e6, y/x, goal)
	}
	line("image.stream.write", "dd oflag=direct conv=fsync", ours, dd, "0.9")
	line("image.stream.unpack", "zstd -dc | tee >(sha256sum) | dd", ours, piped, "0.9")
	line("image.stream.verified", "dd, then dd iflag=direct | sha256sum", oursAll, ddAll, "0.9")
	return nil
}

func median(s []float64) float64 {
	s = slices.Sorted(slices.Values(s))
	return s[len(s)/2]
}

// newImage makes bytes that compress to a half and hold no run of zeros that a
// disk could be spared, as raw and as image.zst in dir.
func newImage(dir string, size int64) (stream.Job, string, error) {
	raw := filepath.Join(dir, "raw")
	rawFile, err := os.Create(raw)
	if err != nil {
		return stream.Job{}, "", err
	}
	defer rawFile.Close()
	stored, err := os.Create(filepath.Join(dir, "image.zst"))
	if err != nil {
		return stream.Job{}, "", err
	}
	defer stored.Close()
	rawSum, storedSum := sha256.New(), sha256.New()
	enc, err := zstd.NewWriter(io.MultiWriter(stored, storedSum))
	if err != nil {
		return stream.Job{}, "", err
	}
	noise := rand.NewChaCha8([32]byte{7})
	block := make([]byte, mib)
	for range size / mib {
		for at := 0; at < mib; at += 4096 {
			noise.Read(block[at:][:2048])
			copy(block[at+2048:], block[at:][:2048])
		}
		if _, err := io.MultiWriter(rawFile, rawSum, enc).Write(block); err != nil {
			return stream.Job{}, "", err
		}
	}
	if err := enc.Close(); err != nil {
		return stream.Job{}, "", err
	}
	st, err := stored.Stat()
	if err != nil {
		return stream.Job{}, "", err
	}
	return stream.Job{
		SizeBytes: st.Size(), SHA256: hex.EncodeToString(storedSum.Sum(nil)),
		UnpackedSizeBytes: size, UnpackedSHA256: hex.EncodeToString(rawSum.Sum(nil)),
	}, raw, nil
}

func measureStream(ctx context.Context, job stream.Job) (write, all float64, err error) {
	start := time.Now()
	job.Progress = func(phase string, done, _ uint64) {
		if phase == "verify" && done == 0 {
			write = time.Since(start).Seconds()
		}
	}
	_, err = stream.Run(ctx, job)
	return write, time.Since(start).Seconds(), err
}

// measurePipe unpacks, digests and writes with a person's tools.
func measurePipe(ctx context.Context, stored, disk string) (float64, error) {
	const script = `sha256sum "$0" >/dev/null & zstd -dcq "$0" | tee >(sha256sum >/dev/null) | dd of="$1" bs=4M iflag=fullblock oflag=direct conv=fsync,notrunc status=none; wait`
	start := time.Now()
	out, err := exec.CommandContext(ctx, "/bin/bash", "-o", "pipefail", "-c", script, stored, disk).CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("zstd | dd: %w: %s", err, out)
	}
	return time.Since(start).Seconds(), nil
}

func measureDD(ctx context.Context, raw, disk string, size int64) (write, all float64, err error) {
	start := time.Now()
	if out, err := exec.CommandContext(ctx, "/usr/bin/dd", "if="+raw, "of="+disk, "bs=4M", "oflag=direct", "conv=fsync,notrunc", "status=none").CombinedOutput(); err != nil {
		return 0, 0, fmt.Errorf("dd: %w: %s", err, out)
	}
	write = time.Since(start).Seconds()
	read := exec.CommandContext(ctx, "/usr/bin/dd", "if="+disk, "bs=4M", "iflag=direct", fmt.Sprintf("count=%d", size/4), "status=none")
	sum := exec.CommandContext(ctx, "/usr/bin/sha256sum")
	if sum.Stdin, err = read.StdoutPipe(); err != nil {
		return 0, 0, err
	}
	if err := sum.Start(); err != nil {
		return 0, 0, err
	}
	if err := errors.Join(read.Run(), sum.Wait()); err != nil {
		return 0, 0, fmt.Errorf("dd | sha256sum: %w", err)
	}
	return write, time.Since(start).Seconds(), nil
}
