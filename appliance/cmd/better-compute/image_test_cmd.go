package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/image/qemutest"
)

// runImageTest boots a copy-on-write view of an image under UEFI in QEMU and
// waits until its init is ready.
func runImageTest(ctx context.Context, args []string, std stdio) error {
	flags := newFlags("image test IMG", std)
	flags.about = "Boots IMG in QEMU and leaves it unchanged. ACCEL=kvm uses KVM."
	marker := flags.String("marker", "bc-init: ready", "what the serial line must say")
	quiet := flags.Duration("quiet", 60*time.Second, fmt.Sprintf("time on a quiet machine; %d times that is given", qemutest.Slack))
	memory := flags.Int("memory", 1024, "memory in MiB")
	size := flags.Int64("size", 4096, "the disk's size in MiB, so that a data partition has room")
	verbose := flags.Bool("verbose", false, "show the whole serial line")
	keep := flags.String("keep", "", "a folder for serial.log, which is thrown away otherwise")
	rest, err := flags.parse(args, 1, 1)
	if err != nil {
		return err
	}
	img, err := os.Stat(rest[0])
	if err != nil {
		return fmt.Errorf("image test: %w", err)
	}
	dir, err := os.MkdirTemp("", "better-compute-image-test-")
	if err != nil {
		return fmt.Errorf("image test: %w", err)
	}
	defer os.RemoveAll(dir)
	logs := dir
	if *keep != "" {
		if err := os.MkdirAll(*keep, 0o755); err != nil {
			return fmt.Errorf("image test: %w", err)
		}
		logs = *keep
	}
	disk := filepath.Join(dir, "disk.qcow2")
	if err := qemutest.Overlay(ctx, disk, rest[0], max(*size<<20, img.Size())); err != nil {
		return fmt.Errorf("image test: %w", err)
	}
	console := &stepWriter{out: std.out, all: *verbose, start: time.Now()}
	vm, err := qemutest.Start(ctx, qemutest.Config{
		Name: filepath.Base(rest[0]), Dir: logs, UEFI: true, Vars: filepath.Join(dir, "vars.fd"), MemoryMiB: *memory,
		Disks:    []qemutest.Disk{{Path: disk, Format: "qcow2", Serial: "IMAGETEST", BootIndex: 1}},
		NICs:     []qemutest.NIC{{Netdev: "user", MAC: "52:54:00:1a:9e:01", ROM: "none"}},
		Watchdog: true, VGA: true, Console: console,
	})
	if err != nil {
		return fmt.Errorf("image test: %w", err)
	}
	waited := vm.WaitMarker(ctx, *marker, *quiet)
	took := time.Since(console.start)
	if err := errors.Join(waited, vm.Close()); err != nil {
		return fmt.Errorf("image test: %w", err)
	}
	fmt.Fprintf(std.out, "%s: %q after %.1f s\n", rest[0], *marker, took.Seconds())
	return nil
}

// stepWriter shows the lines of init's steps, or every line, with the seconds since start.
type stepWriter struct {
	out   io.Writer
	all   bool
	start time.Time

	mu   sync.Mutex
	part []byte
}

// maxStepLine bounds a line that never ends.
const maxStepLine = 4096

func (w *stepWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.part = append(w.part, p...)
	for {
		line, rest, found := bytes.Cut(w.part, []byte("\n"))
		if !found {
			break
		}
		w.show(string(line))
		w.part = rest
	}
	if len(w.part) > maxStepLine {
		w.show(string(w.part))
		w.part = nil
	}
	return len(p), nil
}

func (w *stepWriter) show(line string) {
	line = strings.TrimSpace(qemutest.Plain(line))
	if line == "" || !w.all && !strings.Contains(line, "bc-init:") {
		return
	}
	fmt.Fprintf(w.out, "%7.1f  %s\n", time.Since(w.start).Seconds(), line)
}
