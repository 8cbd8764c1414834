package gpt

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/google/uuid"
)

var (
	linux = uuid.MustParse("0fc63daf-8483-4772-8e79-3d69d8477de4")
	id1   = uuid.MustParse("5c1f3c5e-0001-4000-8000-000000000001")
)

func disk(t *testing.T, size int64) *os.File {
	f, err := os.Create(filepath.Join(t.TempDir(), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	return f
}

func table(t *testing.T, size, sector uint64) *Table {
	tab, err := New(id1, size, sector)
	if err != nil {
		t.Fatal(err)
	}
	first, _, ok := tab.Free(8 << 20)
	if !ok {
		t.Fatal("no room on an empty disk")
	}
	if _, err := tab.Add(Partition{Type: linux, ID: id1, First: first, Last: first + 8<<20/sector - 1, Name: "one"}); err != nil {
		t.Fatal(err)
	}
	return tab
}

func TestRoundTrip(t *testing.T) {
	for _, sector := range []uint64{512, 4096} {
		f := disk(t, 64<<20)
		want := table(t, 64<<20, sector)
		if err := want.Write(f); err != nil {
			t.Fatal(err)
		}
		got, err := Read(f, 64<<20, sector)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("Read after Write with %d bytes a sector = %+v, %v", sector, got, err)
		}
	}
}

func TestBackupIsRead(t *testing.T) {
	f := disk(t, 64<<20)
	want := table(t, 64<<20, 512)
	if err := want.Write(f); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte{0xff}, 2*512+33); err != nil {
		t.Fatal(err)
	}
	got, err := Read(f, 64<<20, 512)
	if err != nil || !got.FromBackup || got.Find(linux, "one") != 1 {
		t.Errorf("Read of a disk with a damaged first copy = %+v, %v, want the backup", got, err)
	}
	if _, err := f.WriteAt([]byte{0xff}, 64<<20-512+60); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(f, 64<<20, 512); err == nil || errors.Is(err, ErrNone) {
		t.Errorf("Read of a disk with both copies damaged = %v, want an error other than ErrNone", err)
	}
	if _, err := Read(disk(t, 64<<20), 64<<20, 512); !errors.Is(err, ErrNone) {
		t.Errorf("Read of an empty disk = %v, want ErrNone", err)
	}
}

// failing takes n writes, then loses power.
type failing struct {
	f *os.File
	n int
}

func (w *failing) WriteAt(b []byte, off int64) (int, error) {
	if w.n--; w.n < 0 {
		return 0, errors.New("power is gone")
	}
	return w.f.WriteAt(b, off)
}
func (w *failing) Sync() error { return nil }

func TestPowerCutAtEachWrite(t *testing.T) {
	for n := range 5 {
		f := disk(t, 64<<20)
		tab := table(t, 32<<20, 512)
		if err := tab.Write(f); err != nil {
			t.Fatal(err)
		}
		if _, err := tab.Grow(64 << 20); err != nil {
			t.Fatal(err)
		}
		first, last, ok := tab.Free(1 << 20)
		if !ok {
			t.Fatal("no room after growing")
		}
		if _, err := tab.Add(Partition{Type: linux, ID: uuid.New(), First: first, Last: last, Name: "two"}); err != nil {
			t.Fatal(err)
		}
		if err := tab.Write(&failing{f, n}); err == nil {
			t.Fatalf("write %d did not fail", n)
		}
		got, err := Read(f, 64<<20, 512)
		if err != nil || got.Find(linux, "one") != 1 {
			t.Errorf("after a power cut at write %d: Read = %v: partition one is lost", n, err)
		}
	}
}

func TestGrowAndFree(t *testing.T) {
	tab := table(t, 32<<20, 512)
	if grown, err := tab.Grow(32 << 20); grown || err != nil {
		t.Errorf("Grow(same) = %v, %v", grown, err)
	}
	if _, err := tab.Grow(16 << 20); err == nil {
		t.Error("a table was shrunk")
	}
	if grown, err := tab.Grow(128 << 20); !grown || err != nil {
		t.Errorf("Grow(more) = %v, %v", grown, err)
	}
	first, last, ok := tab.Free(0)
	if !ok || first*512%Align != 0 || first != 9<<20/512 || last > tab.lastUsable() {
		t.Errorf("Free = %d to %d, %v", first, last, ok)
	}
	if _, _, ok := tab.Free(1 << 40); ok {
		t.Error("Free(1 TiB) on a small disk is ok")
	}
	for _, p := range []Partition{
		{Type: linux, First: first - 1, Last: last, Name: "overlap"},
		{Type: linux, First: first, Last: tab.Sectors - 1, Name: "over the backup"},
		{Type: linux, First: first, Last: last, Name: strings.Repeat("n", 37)},
	} {
		if _, err := tab.Add(p); err == nil {
			t.Errorf("Add(%q) = nil, want an error", p.Name)
		}
	}
}

func TestAgainstSgdisk(t *testing.T) {
	sgdisk, err := exec.LookPath("sgdisk")
	if err != nil {
		t.Skip("needs sgdisk")
	}
	f := disk(t, 64<<20)
	if err := table(t, 64<<20, 512).Write(f); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(sgdisk, "-v", f.Name()).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "No problems found") {
		t.Errorf("sgdisk -v: %v\n%s", err, out)
	}
}

func FuzzRead(f *testing.F) {
	tab, err := New(id1, 1<<20, 512)
	if err != nil {
		f.Fatal(err)
	}
	m := make(memory, 1<<20)
	if err := tab.Write(m); err != nil {
		f.Fatal(err)
	}
	f.Add([]byte(m[512:1024]), []byte(m[1024:1152]))
	f.Fuzz(func(t *testing.T, header, entries []byte) {
		m := make(memory, 1<<20)
		copy(m[512:1024], header)
		copy(m[1024:], entries)
		copy(m[1<<20-512:], header)
		if got, err := Read(m, 1<<20, 512); err == nil {
			got.Free(0)
		}
	})
}

type memory []byte

func (m memory) WriteAt(b []byte, off int64) (int, error) { return copy(m[off:], b), nil }
func (m memory) ReadAt(b []byte, off int64) (int, error) {
	if off < 0 || off+int64(len(b)) > int64(len(m)) {
		return 0, errors.New("out of range")
	}
	return copy(b, m[off:]), nil
}
func (m memory) Sync() error { return nil }
