package gpt

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	dgpt "github.com/diskfs/go-diskfs/partition/gpt"
	"github.com/google/uuid"
)

var (
	basic = uuid.MustParse("ebd0a0a2-b9e5-4433-87c0-68b6b72699c7")
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
	if err != nil || !got.FromBackup || !has(got, "one") {
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

func has(t *Table, name string) bool {
	p, ok := t.Find(linux, name)
	return ok && p.Number == 1
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
		if err := tab.Grow(64 << 20); err != nil {
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
		if err != nil || !has(got, "one") {
			t.Errorf("after a power cut at write %d: Read = %v: partition one is lost", n, err)
		}
	}
}

func TestGrowAndFree(t *testing.T) {
	tab := table(t, 32<<20, 512)
	for _, tt := range []struct {
		size, sectors uint64
		ok            bool
	}{{32 << 20, 64 << 10, true}, {16 << 20, 64 << 10, false}, {128 << 20, 256 << 10, true}} {
		if err := tab.Grow(tt.size); (err == nil) != tt.ok || tab.Sectors() != tt.sectors {
			t.Errorf("Grow(%d) = %v with %d sectors, want ok %v and %d", tt.size, err, tab.Sectors(), tt.ok, tt.sectors)
		}
	}
	first, last, ok := tab.Free(0)
	if !ok || first*512%Align != 0 || first != 9<<20/512 || last > tab.LastUsable() {
		t.Errorf("Free = %d to %d, %v", first, last, ok)
	}
	if _, _, ok := tab.Free(1 << 40); ok {
		t.Error("Free(1 TiB) on a small disk is ok")
	}
	for _, p := range []Partition{
		{Type: linux, First: first - 1, Last: last, Name: "overlap"},
		{Type: linux, First: first, Last: tab.Sectors() - 1, Name: "over the backup"},
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

const mib = 1 << 20

// sample is an image with two partitions, made by another implementation.
func sample(t testing.TB, size int64) []byte {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "img"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	table := &dgpt.Table{ProtectiveMBR: true, LogicalSectorSize: 512, PhysicalSectorSize: 512, GUID: "5c1f3c5e-0001-4000-8000-000000000000",
		Partitions: []*dgpt.Partition{
			{Index: 1, Start: 2048, Size: mib, Type: dgpt.EFISystemPartition, Name: "esp"},
			{Index: 3, Start: 4096, Size: mib, Type: dgpt.LinuxFilesystem, Name: "größe", Attributes: 5},
		}}
	if err := table.Write(f, size); err != nil {
		t.Fatal(err)
	}
	raw := make([]byte, size)
	if _, err := f.ReadAt(raw, 0); err != nil {
		t.Fatal(err)
	}
	return raw
}

func TestFitAndAdd(t *testing.T) {
	raw := sample(t, 8*mib)
	table, err := Parse(raw[:mib], 512)
	if err != nil {
		t.Fatal(err)
	}
	parts := table.Partitions()
	if len(parts) != 2 || parts[0].Name != "esp" || parts[1].Name != "größe" || parts[1].First != 4096 || parts[1].Last != 6143 || parts[1].Attributes != 5 {
		t.Errorf("Partitions() = %+v", parts)
	}
	// Without a change, the bytes are the same.
	for _, p := range append(table.Primary(), table.Backup()...) {
		if !bytes.Equal(p.Data, raw[p.Off:][:len(p.Data)]) {
			t.Errorf("unchanged table differs at %d", p.Off)
		}
	}
	const sectors = 64 * mib / 512
	if err := table.Fit(64 * mib); err != nil {
		t.Fatal(err)
	}
	added := Partition{Number: 2, Type: basic, ID: id1, Name: "CIDATA", First: 100 * 1024, Last: 101 * 1024}
	if n, err := table.Add(added); n != 2 || err != nil {
		t.Fatalf("Add = %d, %v, want the first free entry, 2", n, err)
	}
	disk := make([]byte, 64*mib)
	copy(disk, raw)
	for _, p := range append(table.Backup(), table.Primary()...) {
		copy(disk[p.Off:], p.Data)
	}
	again, err := Parse(disk, 512)
	if err != nil {
		t.Fatal(err)
	}
	if got := again.Partitions(); len(got) != 3 || got[1] != added || again.Sectors() != sectors || again.LastUsable() != sectors-34 {
		t.Errorf("read back %+v, %d sectors, last usable %d", got, again.Sectors(), again.LastUsable())
	}
	// The other implementation agrees, with both copies.
	f, err := os.Create(filepath.Join(t.TempDir(), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(disk); err != nil {
		t.Fatal(err)
	}
	peer, err := dgpt.Read(f, 512, 512)
	if err != nil {
		t.Fatal(err)
	}
	if err := peer.Verify(f, 64*mib); err != nil {
		t.Errorf("the backup: %v", err)
	}
	if got := binary.LittleEndian.Uint32(disk[446+12:]); got != sectors-1 {
		t.Errorf("the protective entry has %d sectors, want %d", got, sectors-1)
	}
}

func TestRefusals(t *testing.T) {
	raw := sample(t, 8*mib)
	// reseal makes the checksums right after a change.
	reseal := func(b []byte) {
		binary.LittleEndian.PutUint32(b[512+88:], crc32.ChecksumIEEE(b[1024:1024+128*128]))
		clear(b[512+16 : 512+20])
		binary.LittleEndian.PutUint32(b[512+16:], crc32.ChecksumIEEE(b[512:512+92]))
	}
	for name, change := range map[string]func([]byte){
		"header byte":        func(b []byte) { b[512+60] ^= 1 },
		"entry byte":         func(b []byte) { b[1024+60] ^= 1 },
		"header size":        func(b []byte) { b[512+12] = 91 },
		"own sector":         func(b []byte) { b[512+24] = 2; reseal(b) },
		"entry size":         func(b []byte) { b[512+84] = 100; reseal(b) },
		"entry count":        func(b []byte) { b[512+82] = 0xff; reseal(b) },
		"entries outside":    func(b []byte) { b[512+76] = 0xff; reseal(b) },
		"backup in the disk": func(b []byte) { clear(b[512+32 : 512+40]); reseal(b) },
		"partition outside":  func(b []byte) { b[1024+46] = 1; reseal(b) },
		"partition reversed": func(b []byte) { clear(b[1024+40 : 1024+48]); reseal(b) },
	} {
		b := bytes.Clone(raw)
		change(b)
		if _, err := Parse(b, 512); err == nil || errors.Is(err, ErrNone) {
			t.Errorf("%s: Parse() = %v, want an error", name, err)
		}
	}
	for _, b := range [][]byte{nil, make([]byte, 1024), raw[:1023]} {
		if _, err := Parse(b, 512); !errors.Is(err, ErrNone) {
			t.Errorf("Parse(%d bytes) = %v, want ErrNone", len(b), err)
		}
	}
	if _, err := Parse(raw[:8192], 512); err == nil {
		t.Error("a cut table was parsed")
	}
	table, err := Parse(raw, 512)
	if err != nil {
		t.Fatal(err)
	}
	for _, size := range []uint64{0, 10 * 512, (6143 + 33) * 512, 1 << 63} {
		if err := table.Fit(size); err == nil {
			t.Errorf("Fit(%d) succeeded", size)
		}
	}
	if err := table.Fit((6143 + 34) * 512); err != nil {
		t.Errorf("Fit(the least) = %v", err)
	}
	for name, p := range map[string]Partition{
		"no type":       {First: 10000, Last: 10001},
		"overlap":       {Type: basic, First: 4000, Last: 4100},
		"before usable": {Type: basic, First: 2, Last: 3},
		"after usable":  {Type: basic, First: 6144, Last: 1 << 40},
		"reversed":      {Type: basic, First: 50, Last: 40},
		"long name":     {Type: basic, First: 40, Last: 50, Name: "1234567890123456789012345678901234567"},
	} {
		if _, err := table.Add(p); err == nil {
			t.Errorf("%s: Add succeeded", name)
		}
	}
	for range 126 {
		if _, err := table.Add(Partition{Type: basic, First: table.FirstUsable() + uint64(len(table.Partitions())), Last: table.FirstUsable() + uint64(len(table.Partitions()))}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := table.Add(Partition{Type: basic, First: 1000, Last: 1000}); err == nil {
		t.Error("a 129th partition was added")
	}
}

func FuzzParse(f *testing.F) {
	raw := sample(f, 4*mib)[:34*512]
	f.Add(raw)
	f.Add(raw[:1024])
	f.Fuzz(func(t *testing.T, head []byte) {
		// Let changes get past the checksums.
		if len(head) >= 34*512 {
			head = bytes.Clone(head)
			binary.LittleEndian.PutUint32(head[512+88:], crc32.ChecksumIEEE(head[1024:1024+128*128]))
			clear(head[512+16 : 512+20])
			binary.LittleEndian.PutUint32(head[512+16:], crc32.ChecksumIEEE(head[512:512+92]))
		}
		table, err := Parse(head, 512)
		if err != nil {
			return
		}
		if table.Fit(1<<30) == nil {
			table.Add(Partition{Type: basic, First: table.LastUsable(), Last: table.LastUsable(), Name: "x"})
			table.Primary()
			table.Backup()
		}
	})
}

func TestMendsProtectiveMBR(t *testing.T) {
	raw := sample(t, 8*mib)
	want := bytes.Clone(raw[446:512])
	copy(raw, "boot code")
	clear(raw[446:512])
	table, err := Parse(raw, 512)
	if err != nil {
		t.Fatal(err)
	}
	got := table.Primary()[2].Data
	if !bytes.HasPrefix(got, []byte("boot code")) || got[446+4] != 0xee || !bytes.Equal(got[446+8:], want[8:]) {
		t.Errorf("sector 0 = %x, want boot code and a protective entry %x", got, want)
	}
}

func TestRename(t *testing.T) {
	tab := table(t, 32<<20, 512)
	if err := tab.Rename(1, "longer than before"); err != nil {
		t.Fatal(err)
	}
	if err := tab.Rename(1, "new"); err != nil || !has(tab, "new") || has(tab, "one") {
		t.Errorf("Rename = %v, partitions %+v", err, tab.Partitions())
	}
	for n, name := range map[int]string{0: "x", 2: "x", 129: "x", 1: strings.Repeat("n", 37)} {
		if err := tab.Rename(n, name); err == nil || !has(tab, "new") {
			t.Errorf("Rename(%d, %q) = %v, partitions %+v", n, name, err, tab.Partitions())
		}
	}
}
