package data

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/better-compute/site-appliance/image/gpt"
	"github.com/better-compute/site-appliance/image/layout"
)

func box(t *testing.T, extra ...gpt.Partition) *gpt.Table {
	l := layout.Site()
	tab, err := l.Table()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range extra {
		if err := tab.Fit((p.Last + 100) * layout.Sector); err != nil {
			t.Fatal(err)
		}
		if _, err := tab.Add(p); err != nil {
			t.Fatal(err)
		}
	}
	return tab
}

func TestDecide(t *testing.T) {
	size := uint64(layout.Site().Size)
	after := uint64(581 * layout.MiB / layout.Sector)
	part := func(name string) gpt.Partition {
		return gpt.Partition{Type: layout.TypeLinux, ID: uuid.New(), First: after, Last: after + 9999, Name: name}
	}
	for _, tt := range []struct {
		name  string
		table *gpt.Table
		size  uint64
		want  Plan
		err   error
	}{
		{"first boot", box(t), 2048 * layout.MiB, Plan{Step: Create, First: after, Last: 2047*layout.MiB/layout.Sector - 1}, nil},
		{"later boot", box(t, part(layout.DataName)), 2048 * layout.MiB, Plan{Step: Use, Number: 4}, nil},
		{"cut off in mke2fs", box(t, part(layout.NewDataName)), 2048 * layout.MiB, Plan{Step: Format, Number: 4}, nil},
		{"disk as small as the image", box(t), size, Plan{}, ErrNoRoom},
	} {
		got, err := Decide(tt.table, tt.size)
		if got != tt.want || !errors.Is(err, tt.err) {
			t.Errorf("%s: Decide = %+v, %v, want %+v, %v", tt.name, got, err, tt.want, tt.err)
		}
	}
	if _, err := Decide(box(t), size/2); err == nil {
		t.Error("a disk smaller than its table was taken")
	}
}

func TestComplaint(t *testing.T) {
	out := "e2fsck 1.47.0 (5-Feb-2023)\n/usr/sbin/e2fsck: Superblock invalid, trying backup blocks...\n" +
		"/usr/sbin/e2fsck: Bad magic number in super-block while trying to open /dev/vda4\n\nThe superblock could not be read\n    e2fsck -b 32768 <device>\n"
	if got, want := complaint(out), "Bad magic number in super-block while trying to open /dev/vda4"; got != want {
		t.Errorf("complaint = %q, want %q", got, want)
	}
	if got := complaint("/dev/vda4: UNEXPECTED INCONSISTENCY; RUN fsck MANUALLY.\n"); got != "/dev/vda4: UNEXPECTED INCONSISTENCY; RUN fsck MANUALLY." {
		t.Errorf("complaint without a line of e2fsck's own = %q", got)
	}
}

// fsck answers with one code per call.
type fsck struct {
	codes []int
	calls []string
}

func (f *fsck) Run(_ context.Context, argv ...string) (int, string, error) {
	f.calls = append(f.calls, strings.Join(argv, " "))
	code := f.codes[0]
	f.codes = f.codes[1:]
	return code, "a\nlast words\n", nil
}

func TestCheck(t *testing.T) {
	for _, tt := range []struct {
		codes []int
		calls int
		want  string
	}{
		{[]int{0}, 1, ""},
		{[]int{1}, 1, ""},
		{[]int{4, 1}, 2, ""},
		{[]int{8, 8}, 2, "cannot be repaired and is left as it is: e2fsck exit code 8: last words"},
	} {
		f := &fsck{codes: tt.codes}
		err := Setup{Runner: f, Say: func(string, ...any) {}}.check(context.Background(), "/dev/x")
		if len(f.calls) != tt.calls || (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("check with codes %v = %v after %q, want %q", tt.codes, err, f.calls, tt.want)
		}
	}
}

// programs runs for real.
type programs struct{}

func (programs) Run(ctx context.Context, argv ...string) (int, string, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState != nil {
		err = nil
	}
	return cmd.ProcessState.ExitCode(), string(out), err
}

// TestCheckRepairs gives e2fsck itself what a power cut and a dying disk leave.
func TestCheckRepairs(t *testing.T) {
	for _, p := range []string{"/usr/sbin/mke2fs", "/usr/sbin/e2fsck", "/usr/sbin/debugfs"} {
		if _, err := os.Stat(p); err != nil {
			t.Skipf("needs e2fsprogs: %v", err)
		}
	}
	for _, tt := range []struct {
		name  string
		spoil func(f *os.File, path string) error
		says  string
		want  string
	}{
		{"clean", func(*os.File, string) error { return nil }, "", ""},
		{"not unmounted, counts wrong", func(_ *os.File, path string) error {
			return exec.Command("/usr/sbin/debugfs", "-w", "-R", "set_super_value free_blocks_count 7", path).Run()
		}, "", ""},
		{"a folder is gone", func(_ *os.File, path string) error {
			if err := exec.Command("/usr/sbin/debugfs", "-w", "-R", "clri /lost+found", path).Run(); err != nil {
				return err
			}
			return exec.Command("/usr/sbin/debugfs", "-w", "-R", "set_super_value state 2", path).Run()
		}, "repaired", ""},
		{"the superblock is gone, its copy is not", func(f *os.File, _ string) error {
			_, err := f.WriteAt(make([]byte, 1024), 1024)
			return err
		}, "repaired", ""},
		{"nothing is left", func(f *os.File, _ string) error {
			_, err := f.WriteAt(make([]byte, 40<<20), 0)
			return err
		}, "needs a full repair: Bad magic", "cannot be repaired and is left as it is: e2fsck exit code 8: Bad magic number in super-block"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "data")
			f, err := os.Create(path)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if err := f.Truncate(40 << 20); err != nil {
				t.Fatal(err)
			}
			if out, err := exec.Command("/usr/sbin/mke2fs", "-q", "-F", "-t", "ext4", path).CombinedOutput(); err != nil {
				t.Fatalf("mke2fs: %v: %s", err, out)
			}
			if err := tt.spoil(f, path); err != nil {
				t.Fatal(err)
			}
			var said []string
			s := Setup{Runner: programs{}, Say: func(format string, args ...any) { said = append(said, fmt.Sprintf(format, args...)) }}
			err = s.check(t.Context(), path)
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("check = %v, want %q", err, tt.want)
			}
			if !strings.Contains(strings.Join(said, "\n"), tt.says) {
				t.Errorf("check said %q, want %q", said, tt.says)
			}
			if tt.want != "" {
				return
			}
			if code, out, err := s.Runner.Run(t.Context(), "/usr/sbin/e2fsck", "-f", "-n", path); code != 0 || err != nil {
				t.Errorf("after check, e2fsck = %d, %v: %s", code, err, out)
			}
		})
	}
}
