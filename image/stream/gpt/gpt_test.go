package gpt

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"os"
	"path/filepath"
	"testing"

	dgpt "github.com/diskfs/go-diskfs/partition/gpt"
)

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
	table, err := Parse(raw[:mib])
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
	if err := table.Fit(sectors); err != nil {
		t.Fatal(err)
	}
	added := Partition{Type: BasicData, GUID: GUID{1, 2, 3}, Name: "CIDATA", First: 100 * 1024, Last: 101 * 1024}
	if err := table.Add(added); err != nil {
		t.Fatal(err)
	}
	disk := make([]byte, 64*mib)
	copy(disk, raw)
	for _, p := range append(table.Backup(), table.Primary()...) {
		copy(disk[p.Off:], p.Data)
	}
	again, err := Parse(disk)
	if err != nil {
		t.Fatal(err)
	}
	if got := again.Partitions(); len(got) != 3 || got[1] != added || again.Alternate() != sectors-1 || again.LastUsable() != sectors-34 {
		t.Errorf("read back %+v, backup at %d, last usable %d", got, again.Alternate(), again.LastUsable())
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
		if _, err := Parse(b); err == nil || errors.Is(err, ErrNone) {
			t.Errorf("%s: Parse() = %v, want an error", name, err)
		}
	}
	for _, b := range [][]byte{nil, make([]byte, 1024), raw[:1023]} {
		if _, err := Parse(b); !errors.Is(err, ErrNone) {
			t.Errorf("Parse(%d bytes) = %v, want ErrNone", len(b), err)
		}
	}
	if _, err := Parse(raw[:8192]); err == nil {
		t.Error("a cut table was parsed")
	}
	table, err := Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	for _, sectors := range []uint64{0, 10, 6143 + 33, 1 << 60} {
		if err := table.Fit(sectors); err == nil {
			t.Errorf("Fit(%d) succeeded", sectors)
		}
	}
	if err := table.Fit(6143 + 34); err != nil {
		t.Errorf("Fit(the least) = %v", err)
	}
	for name, p := range map[string]Partition{
		"no type":       {First: 10000, Last: 10001},
		"overlap":       {Type: BasicData, First: 4000, Last: 4100},
		"before usable": {Type: BasicData, First: 2, Last: 3},
		"after usable":  {Type: BasicData, First: 6144, Last: 1 << 40},
		"reversed":      {Type: BasicData, First: 50, Last: 40},
		"long name":     {Type: BasicData, First: 40, Last: 50, Name: "1234567890123456789012345678901234567"},
	} {
		if err := table.Add(p); err == nil {
			t.Errorf("%s: Add succeeded", name)
		}
	}
	for range 126 {
		if err := table.Add(Partition{Type: BasicData, First: table.FirstUsable() + uint64(len(table.Partitions())), Last: table.FirstUsable() + uint64(len(table.Partitions()))}); err != nil {
			t.Fatal(err)
		}
	}
	if err := table.Add(Partition{Type: BasicData, First: 1000, Last: 1000}); err == nil {
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
		table, err := Parse(head)
		if err != nil {
			return
		}
		if table.Fit(1<<21) == nil {
			table.Add(Partition{Type: BasicData, First: table.LastUsable(), Last: table.LastUsable(), Name: "x"})
			table.Primary()
			table.Backup()
		}
	})
}
