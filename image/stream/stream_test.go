package stream

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/diskfs/go-diskfs/backend/file"
	"github.com/diskfs/go-diskfs/filesystem/fat32"
	dgpt "github.com/diskfs/go-diskfs/partition/gpt"
	"github.com/klauspost/compress/zstd"

	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/image/gpt"
	"github.com/better-compute/site-appliance/image/layout"
	"github.com/better-compute/site-appliance/image/stream/blockdev"
	"github.com/better-compute/site-appliance/image/stream/seed"
)

const mib = 1 << 20

// image is a raw disk image and its stored form.
type image struct {
	raw, stored []byte
}

func sum(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}

// newImage makes an image of size bytes with one partition that holds noise, a
// hole and noise.
func newImage(t testing.TB, size int64) image {
	t.Helper()
	path := filepath.Join(t.TempDir(), "raw.img")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	table := &dgpt.Table{ProtectiveMBR: true, LogicalSectorSize: 512, PhysicalSectorSize: 512, Partitions: []*dgpt.Partition{
		{Index: 1, Start: 2048, Size: uint64(size - 2*mib), Type: dgpt.EFISystemPartition, Name: "esp"},
	}}
	if err := table.Write(f, size); err != nil {
		t.Fatal(err)
	}
	raw := make([]byte, size)
	if _, err := f.ReadAt(raw, 0); err != nil {
		t.Fatal(err)
	}
	noise := rand.NewChaCha8([32]byte{1})
	part := raw[mib : size-mib]
	for at := 0; at < len(part); at += 6 * mib {
		noise.Read(part[at:min(at+3*mib+777, len(part))])
	}
	return newStored(t, raw)
}

func newStored(t testing.TB, raw []byte) image {
	t.Helper()
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest))
	if err != nil {
		t.Fatal(err)
	}
	defer enc.Close()
	return image{raw, enc.EncodeAll(raw, nil)}
}

// memory is a Source over bytes.
type memory []byte

func (m memory) Open(_ context.Context, off int64) (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(m[off:])), nil
}

func newDisk(t testing.TB, size int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk.img")
	// The disk is not empty, and a table of something else is on it.
	old := make([]byte, size)
	rand.NewChaCha8([32]byte{2}).Read(old)
	copy(old[512:], "EFI PART")
	old[510], old[511] = 0x55, 0xaa
	if err := os.WriteFile(path, old, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func testSeed() *seed.Seed {
	return &seed.Seed{InstanceID: "wf_1", Hostname: "node-1", SSHAuthorizedKeys: []string{"ssh-ed25519 AAAA a"},
		Files: []seed.File{{Path: "/etc/bcd/join", Content: secret.New([]byte("bc1.x")), Mode: "0600"}}}
}

func job(img image, disk string) Job {
	return Job{
		Source: memory(img.stored), SizeBytes: int64(len(img.stored)), SHA256: sum(img.stored),
		UnpackedSizeBytes: int64(len(img.raw)), UnpackedSHA256: sum(img.raw), Disk: disk,
		Retry: Retry{Backoff: backoff.Policy{Min: time.Millisecond, Max: time.Millisecond}, Attempts: 5, Stall: 5 * time.Second},
		Rand:  rand.NewChaCha8([32]byte{3}),
	}
}

func readDisk(t testing.TB, disk string) []byte {
	t.Helper()
	got, err := os.ReadFile(disk)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// bootable reports whether firmware finds anything on the disk.
func bootable(disk []byte) bool {
	return bytes.Equal(disk[512:520], []byte("EFI PART")) || disk[510] == 0x55 || bytes.Equal(disk[len(disk)-512:][:8], []byte("EFI PART"))
}

// checkDisk compares every byte outside of the partition tables and the seed.
func checkDisk(t *testing.T, disk []byte, raw []byte, seeded bool) {
	t.Helper()
	const table = 34 * 512
	if !bytes.Equal(disk[table:len(raw)-table+512], raw[table:len(raw)-table+512]) {
		t.Error("the disk differs from the image outside of the tables and the seed")
	}
	if !bytes.Equal(disk[:440], raw[:440]) {
		t.Error("the boot code differs")
	}
	got, err := gpt.Parse(disk, 512)
	if err != nil {
		t.Fatalf("the disk's table: %v", err)
	}
	if want := uint64(len(disk) / 512); got.Sectors() != want {
		t.Errorf("the table is for %d sectors, want %d", got.Sectors(), want)
	}
	want, err := gpt.Parse(raw, 512)
	if err != nil {
		t.Fatal(err)
	}
	parts := got.Partitions()
	if seeded {
		if len(parts) == 0 || parts[len(parts)-1].Name != layout.SeedLabel {
			t.Fatalf("partitions = %+v, want a %s at the end", parts, layout.SeedLabel)
		}
		cidata := parts[len(parts)-1]
		parts = parts[:len(parts)-1]
		checkSeed(t, disk[cidata.First*512:(cidata.Last+1)*512])
	}
	if fmt.Sprint(parts) != fmt.Sprint(want.Partitions()) {
		t.Errorf("partitions = %v, want %v", parts, want.Partitions())
	}
	if sgdisk, err := exec.LookPath("/usr/sbin/sgdisk"); err == nil {
		path := filepath.Join(t.TempDir(), "copy.img")
		if err := os.WriteFile(path, disk, 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command(sgdisk, "--verify", path).CombinedOutput()
		if err != nil || !bytes.Contains(out, []byte("No problems found")) {
			t.Errorf("sgdisk --verify: %v\n%s", err, out)
		}
	}
}

func checkSeed(t *testing.T, part []byte) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "seed.img")
	if err := os.WriteFile(path, part, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fs, err := fat32.Read(file.New(f, true), int64(len(part)), 0, 512)
	if err != nil {
		t.Fatal(err)
	}
	if user, err := fs.ReadFile("user-data"); err != nil || !bytes.Contains(user, []byte("bc1.x")) {
		t.Errorf("user-data = %q, %v", user, err)
	}
}

func TestRun(t *testing.T) {
	for name, tt := range map[string]struct {
		image, disk int64
		seed        bool
	}{
		"seeded":           {24 * mib, 80 * mib, true},
		"seeded, odd disk": {24*mib + 512*7, 80*mib + 512*3, true},
		"no seed":          {24 * mib, 32 * mib, false},
		"same size":        {24 * mib, 24 * mib, false},
		"one sector more":  {24 * mib, 24*mib + 512, false},
		"one chunk":        {4 * mib, 8 * mib, false},
		"less than that":   {3 * mib, 3 * mib, false},
		"short tail":       {4*mib + 512, 4*mib + 512*40, false},
		"tail over chunks": {12*mib + 32*1024, 13 * mib, false},
		"exact for seed":   {24 * mib, 24*mib + seed.SizeBytes + 33*512, true},
	} {
		t.Run(name, func(t *testing.T) {
			img, disk := newImage(t, tt.image), newDisk(t, tt.disk)
			j := job(img, disk)
			if tt.seed {
				j.Seed = testSeed()
			}
			phases := map[string]uint64{}
			j.Progress = func(phase string, done, total uint64) {
				if done < phases[phase] || total != uint64(tt.image) {
					t.Errorf("progress %s %d of %d after %d", phase, done, total, phases[phase])
				}
				phases[phase] = done
			}
			got, err := Run(t.Context(), j)
			if err != nil {
				t.Fatal(err)
			}
			if want := (Result{sum(img.stored), sum(img.raw), tt.image}); got != want {
				t.Errorf("Run() = %+v, want %+v", got, want)
			}
			if phases["write"] != uint64(tt.image) {
				t.Errorf("the last progress is %v", phases)
			}
			checkDisk(t, readDisk(t, disk), img.raw, tt.seed)
		})
	}
}

func TestRunWithoutTable(t *testing.T) {
	raw := make([]byte, 6*mib)
	rand.NewChaCha8([32]byte{4}).Read(raw)
	img, disk := newStored(t, raw), newDisk(t, 8*mib)
	if _, err := Run(t.Context(), job(img, disk)); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(readDisk(t, disk)[:len(raw)], raw) {
		t.Error("the disk differs from the image")
	}
	j := job(img, disk)
	j.Seed = testSeed()
	if _, err := Run(t.Context(), j); errs.CodeOf(err) != errs.InvalidArgs {
		t.Errorf("Run(seed, no table) = %v, want %s", err, errs.InvalidArgs)
	}
}

// Each of these must leave a disk that does not boot.
func TestRunRefusesWrongBytes(t *testing.T) {
	img := newImage(t, 24*mib)
	flip := func(b []byte, at int) []byte {
		out := bytes.Clone(b)
		out[at] ^= 1
		return out
	}
	other := newStored(t, flip(img.raw, 10*mib))
	for name, tt := range map[string]struct {
		change func(*Job)
		form   string
	}{
		"flipped stored byte at the start": {func(j *Job) { j.Source = memory(flip(img.stored, 5)) }, "stored"},
		"flipped stored byte in the middle": {func(j *Job) {
			j.Source = memory(flip(img.stored, len(img.stored)/2))
		}, "stored"},
		"flipped stored byte at the end": {func(j *Job) { j.Source = memory(flip(img.stored, len(img.stored)-1)) }, "stored"},
		"wrong stored digest":            {func(j *Job) { j.SHA256 = sum(nil) }, "stored"},
		"wrong unpacked digest":          {func(j *Job) { j.UnpackedSHA256 = sum(nil) }, "unpacked"},
		"another image, right stored digest": {func(j *Job) {
			j.Source, j.SizeBytes, j.SHA256 = memory(other.stored), int64(len(other.stored)), sum(other.stored)
		}, "unpacked"},
		"longer than named":  {func(j *Job) { j.UnpackedSizeBytes -= 512; j.UnpackedSHA256 = sum(img.raw[:24*mib-512]) }, ""},
		"shorter than named": {func(j *Job) { j.UnpackedSizeBytes += 512 }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			disk := newDisk(t, 32*mib)
			j := job(img, disk)
			tt.change(&j)
			_, err := Run(t.Context(), j)
			if tt.form == "" {
				// The table tells of the lie before the digest can.
				if c := errs.CodeOf(err); c != errs.InvalidArgs && c != errs.DigestMismatch {
					t.Errorf("Run() = %v, want a refusal", err)
				}
				return
			}
			if errs.CodeOf(err) != errs.DigestMismatch || !strings.Contains(err.Error(), tt.form+" form") {
				t.Errorf("Run() = %v, want %s of the %s form", err, errs.DigestMismatch, tt.form)
			}
			if strings.Contains(name, "start") {
				return // nothing was unpacked, so that the old disk is whole
			}
			if bootable(readDisk(t, disk)) {
				t.Error("the disk still boots")
			}
		})
	}
}

func TestRunRefusesDisks(t *testing.T) {
	img := newImage(t, 24*mib)
	for name, tt := range map[string]struct {
		disk   int64
		seed   bool
		change func(*Job)
		want   errs.Code
	}{
		"too small":          {24*mib - 512, false, nil, errs.NoSpace},
		"too small for seed": {24*mib + seed.SizeBytes + 32*512, true, nil, errs.NoSpace},
		"bad digest text":    {32 * mib, false, func(j *Job) { j.SHA256 = strings.ToUpper(j.SHA256) }, errs.InvalidArgs},
		"no size":            {32 * mib, false, func(j *Job) { j.SizeBytes = 0 }, errs.InvalidArgs},
		"half a sector":      {32 * mib, false, func(j *Job) { j.UnpackedSizeBytes-- }, errs.InvalidArgs},
		"bad seed":           {80 * mib, true, func(j *Job) { j.Seed.Hostname = "-" }, errs.InvalidArgs},
		"character device":   {32 * mib, false, func(j *Job) { j.Disk = "/dev/null" }, errs.InvalidArgs},
	} {
		t.Run(name, func(t *testing.T) {
			disk := newDisk(t, tt.disk)
			before := sum(readDisk(t, disk))
			j := job(img, disk)
			if tt.seed {
				j.Seed = testSeed()
			}
			if tt.change != nil {
				tt.change(&j)
			}
			if _, err := Run(t.Context(), j); errs.CodeOf(err) != tt.want {
				t.Errorf("Run() = %v, want %s", err, tt.want)
			}
			if sum(readDisk(t, disk)) != before {
				t.Error("a refused job changed the disk")
			}
		})
	}
	j := job(img, filepath.Join(t.TempDir(), "absent"))
	if _, err := Run(t.Context(), j); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Run(absent disk) = %v, want %v", err, os.ErrNotExist)
	}
}

func TestRunRefusesImageWithItsOwnSeed(t *testing.T) {
	img := newImage(t, 24*mib)
	disk := newDisk(t, 80*mib)
	j := job(img, disk)
	j.Seed = testSeed()
	if _, err := Run(t.Context(), j); err != nil {
		t.Fatal(err)
	}
	again := newStored(t, readDisk(t, disk))
	j = job(again, newDisk(t, 160*mib))
	j.Seed = testSeed()
	if _, err := Run(t.Context(), j); errs.CodeOf(err) != errs.InvalidArgs || !strings.Contains(err.Error(), "CIDATA") {
		t.Errorf("Run(image with CIDATA) = %v, want %s", err, errs.InvalidArgs)
	}
}

// A broken disk: bytes change between the write and the verification.
func TestRunReadsBack(t *testing.T) {
	img := newImage(t, 24*mib)
	for name, at := range map[string]int64{
		"in the middle":    12 * mib,
		"in the last part": 24*mib - 20*512,
		"in the backup":    80*mib - 600,
		"in the seed":      79*mib - 5,
	} {
		t.Run(name, func(t *testing.T) {
			disk := newDisk(t, 80*mib)
			j := job(img, disk)
			j.Seed = testSeed()
			once := false
			j.Progress = func(phase string, done, _ uint64) {
				// The first chunks of the verification are read ahead: the fault
				// comes with the last progress of the write, before the flush; the
				// backup and the seed are written after it.
				trigger := phase == "write" && done == 24*mib
				if at > 24*mib-1 {
					trigger = phase == "verify" && done == 24*mib
				}
				if !trigger || once {
					return
				}
				once = true
				if at < 24*mib {
					// The last chunks may still be on their way to the disk.
					time.Sleep(300 * time.Millisecond)
				}
				f, err := os.OpenFile(disk, os.O_RDWR, 0)
				if err != nil {
					t.Error(err)
					return
				}
				defer f.Close()
				b := []byte{0}
				f.ReadAt(b, at)
				b[0] ^= 0x10
				f.WriteAt(b, at)
				f.Sync()
			}
			_, err := Run(t.Context(), j)
			if at > 24*mib-mib && at < 24*mib {
				// The old backup table's place is overwritten afterwards anyway.
				if err != nil {
					t.Errorf("Run() = %v", err)
				}
				return
			}
			if !once || errs.CodeOf(err) != errs.DigestMismatch {
				t.Errorf("Run() = %v, want %s", err, errs.DigestMismatch)
			}
			if d := readDisk(t, disk); bytes.Equal(d[512:520], []byte("EFI PART")) {
				t.Error("the disk still boots")
			}
		})
	}
}

func TestRunCancelled(t *testing.T) {
	img, disk := newImage(t, 24*mib), newDisk(t, 32*mib)
	ctx, cancel := context.WithCancel(t.Context())
	j := job(img, disk)
	j.Progress = func(string, uint64, uint64) { cancel() }
	if _, err := Run(ctx, j); !errors.Is(err, context.Canceled) {
		t.Errorf("Run() = %v, want %v", err, context.Canceled)
	}
	if bootable(readDisk(t, disk)) {
		t.Error("the disk still boots")
	}
}

func TestRunFullFileSystem(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: mounts a small file system")
	}
	dir := t.TempDir()
	if out, err := exec.Command("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", dir).CombinedOutput(); err != nil {
		t.Skipf("needs root: mount: %s", out)
	}
	defer exec.Command("umount", dir).Run()
	disk := filepath.Join(dir, "disk")
	if err := os.WriteFile(disk, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(disk, 32*mib); err != nil {
		t.Fatal(err)
	}
	if _, err := Run(t.Context(), job(newImage(t, 24*mib), disk)); errs.CodeOf(err) != errs.NoSpace {
		t.Errorf("Run() = %v, want %s", err, errs.NoSpace)
	}
}

// TestRunLastWriteFails: the disk gives up within the very last write, that of
// the first bytes. What it took of them must not boot.
func TestRunLastWriteFails(t *testing.T) {
	img := newImage(t, 9*mib)
	disk := newDisk(t, 64*mib)
	signal.Ignore(syscall.SIGXFSZ)
	defer signal.Reset(syscall.SIGXFSZ)
	var free syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &free); err != nil {
		t.Fatal(err)
	}
	j := job(img, disk)
	j.Progress = func(phase string, done, total uint64) {
		if phase == "verify" && done == total {
			// From here on nothing behind the first 2 MiB of a file can be written.
			if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &syscall.Rlimit{Cur: 2 * mib, Max: free.Max}); err != nil {
				t.Error(err)
			}
		}
	}
	_, err := Run(t.Context(), j)
	if serr := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &free); serr != nil {
		t.Fatal(serr)
	}
	if err == nil {
		t.Fatal("Run = nil, want a write error")
	}
	head := readDisk(t, disk)[:chunkSize]
	if !bytes.Equal(head, make([]byte, chunkSize)) {
		t.Errorf("after %v the disk's first bytes hold something: it boots half an image", err)
	}
}

// flaky serves bytes over HTTP and breaks each connection after some.
func flaky(t *testing.T, stored []byte, each int64, ranges *atomic.Int32) *httptest.Server {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		off := int64(0)
		if h := req.Header.Get("Range"); h != "" {
			ranges.Add(1)
			fmt.Sscanf(h, "bytes=%d-", &off)
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", off, len(stored)-1, len(stored)))
			w.Header().Set("Content-Length", fmt.Sprint(int64(len(stored))-off))
			w.WriteHeader(http.StatusPartialContent)
		}
		w.Write(stored[off:min(off+each, int64(len(stored)))])
		_ = http.NewResponseController(w).Flush() // a few last bytes would lie in its buffer
		panic(http.ErrAbortHandler)
	}))
	t.Cleanup(srv.Close)
	return srv
}

func TestHTTPResumes(t *testing.T) {
	img, disk := newImage(t, 24*mib), newDisk(t, 32*mib)
	var ranges atomic.Int32
	srv := flaky(t, img.stored, int64(len(img.stored)-3)/5, &ranges)
	j := job(img, disk)
	j.Source = HTTP{srv.Client(), srv.URL}
	if _, err := Run(t.Context(), j); err != nil {
		t.Fatal(err)
	}
	if ranges.Load() < 4 {
		t.Errorf("%d Range requests, want at least 4", ranges.Load())
	}
	checkDisk(t, readDisk(t, disk), img.raw, false)
}

func TestHTTPAnswers(t *testing.T) {
	img := newImage(t, 6*mib)
	for name, tt := range map[string]struct {
		handler  http.HandlerFunc
		attempts int32
		want     errs.Code
	}{
		"not found": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(404) }, 1, errs.Unreachable},
		"forbidden": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(403) }, 1, errs.Unreachable},
		"busy":      {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) }, 5, errs.Unreachable},
		"range ignored": {func(w http.ResponseWriter, req *http.Request) {
			w.Header().Set("Content-Length", fmt.Sprint(len(img.stored)))
			w.Write(img.stored[:len(img.stored)/2])
			panic(http.ErrAbortHandler)
		}, 2, errs.Unreachable},
		"silent": {func(w http.ResponseWriter, req *http.Request) { <-req.Context().Done() }, 5, errs.Unreachable},
	} {
		t.Run(name, func(t *testing.T) {
			var calls atomic.Int32
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				calls.Add(1)
				tt.handler(w, req)
			}))
			defer srv.Close()
			j := job(img, newDisk(t, 8*mib))
			j.Source = HTTP{srv.Client(), srv.URL}
			j.Retry.Stall = 30 * time.Millisecond
			_, err := Run(t.Context(), j)
			if errs.CodeOf(err) != tt.want {
				t.Errorf("Run() = %v, want %s", err, tt.want)
			}
			if got := calls.Load(); got != tt.attempts {
				t.Errorf("%d requests, want %d", got, tt.attempts)
			}
		})
	}
}

// loop attaches a file to a loop device and names it in a sysfs of its own.
func loop(t testing.TB, size int64) (dev string) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: attaches a loop device")
	}
	path := newDisk(t, size)
	out, err := exec.Command("losetup", "--find", "--show", "--direct-io=on", path).CombinedOutput()
	if err != nil {
		t.Skipf("needs root: losetup: %s", out)
	}
	dev = strings.TrimSpace(string(out))
	t.Cleanup(func() { exec.Command("losetup", "-d", dev).Run() })
	return dev
}

// sysfs makes a folder that looks like /sys with these disks.
func sysfs(t testing.TB, serials map[string]string, sizes map[string]int64) string {
	t.Helper()
	sys := t.TempDir()
	for name, serial := range serials {
		dir := filepath.Join(sys, "block", name)
		if err := os.MkdirAll(filepath.Join(dir, "device"), 0o755); err != nil {
			t.Fatal(err)
		}
		for attr, text := range map[string]string{"serial": serial, "size": fmt.Sprint(sizes[name] / 512), "ro": "0"} {
			if err := os.WriteFile(filepath.Join(dir, attr), []byte(text+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	return sys
}

func TestRunOnBlockDevice(t *testing.T) {
	dev := loop(t, 80*mib)
	name := filepath.Base(dev)
	disks, err := blockdev.List(sysfs(t, map[string]string{name: "DISK0001"}, map[string]int64{name: 80 * mib}), "/dev")
	if err != nil {
		t.Fatal(err)
	}
	disk, err := blockdev.Find(disks, "DISK0001")
	if err != nil || disk.Path != dev {
		t.Fatalf("Find() = %v, %v, want %s", disk, err, dev)
	}
	img := newImage(t, 24*mib)
	j := job(img, disk.Path)
	j.Seed = testSeed()
	if _, err := Run(t.Context(), j); err != nil {
		t.Fatal(err)
	}
	checkDisk(t, readDisk(t, dev), img.raw, true)

	// While somebody else has it, nothing is written.
	claim, err := os.OpenFile(dev, os.O_RDWR|os.O_EXCL, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer claim.Close()
	if _, err := Run(t.Context(), j); errs.CodeOf(err) != errs.InvalidArgs || !strings.Contains(err.Error(), "in use") {
		t.Errorf("Run(claimed disk) = %v, want that it is in use", err)
	}
}
