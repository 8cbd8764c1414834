// Package gpt reads, changes and writes GUID partition tables (UEFI 2.10,
// chapter 5) on a disk that is in use: in an order that a power cut cannot break.
package gpt

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"unicode/utf16"

	"github.com/google/uuid"
)

const (
	entrySize  = 128
	entryCount = 128
	// Align is what partitions start at, in bytes.
	Align = 1 << 20
)

// Partition is one entry. Sectors are counted from the disk's start, Last included.
type Partition struct {
	Type, ID    uuid.UUID
	First, Last uint64
	Attributes  uint64
	Name        string
}

// Used reports whether the entry names a partition.
func (p Partition) Used() bool { return p.Type != uuid.UUID{} }

// Table is the partition table of a disk.
type Table struct {
	ID         uuid.UUID
	SectorSize uint64
	// Sectors is the disk's size as the table last knew it.
	Sectors uint64
	// Partitions holds partition n+1 at index n; unused entries are zero.
	Partitions [entryCount]Partition
	// FromBackup says that the first copy was unreadable.
	FromBackup bool
}

// ErrNone: neither copy of the table is there.
var ErrNone = errors.New("no GUID partition table")

func (t *Table) entrySectors() uint64 {
	return (entrySize*entryCount + t.SectorSize - 1) / t.SectorSize
}
func (t *Table) firstUsable() uint64 { return 2 + t.entrySectors() }
func (t *Table) lastUsable() uint64  { return t.Sectors - 2 - t.entrySectors() }

// New is an empty table for a disk.
func New(id uuid.UUID, size, sectorSize uint64) (*Table, error) {
	t := &Table{ID: id, SectorSize: sectorSize, Sectors: size / max(sectorSize, 1)}
	if err := t.checkSize(); err != nil {
		return nil, err
	}
	return t, nil
}

func (t *Table) checkSize() error {
	if t.SectorSize != 512 && t.SectorSize != 4096 {
		return fmt.Errorf("sector size %d: want 512 or 4096", t.SectorSize)
	}
	if t.Sectors < 2*(t.entrySectors()+2)+1 || t.Sectors > 1<<48 {
		return fmt.Errorf("a disk of %d sectors cannot hold a partition table", t.Sectors)
	}
	return nil
}

// Read takes the first copy of the table, or the last one where the first is
// damaged. size is the disk's in bytes.
func Read(r io.ReaderAt, size, sectorSize uint64) (*Table, error) {
	probe := &Table{SectorSize: sectorSize, Sectors: size / max(sectorSize, 1)}
	if err := probe.checkSize(); err != nil {
		return nil, err
	}
	t, err := readAt(r, 1, probe)
	if err == nil {
		return t, nil
	}
	t, berr := readAt(r, probe.Sectors-1, probe)
	if berr == nil {
		t.FromBackup = true
		return t, nil
	}
	if errors.Is(err, ErrNone) && errors.Is(berr, ErrNone) {
		return nil, ErrNone
	}
	if errors.Is(err, ErrNone) {
		err = berr
	}
	return nil, fmt.Errorf("read partition table: %w", err)
}

var signature = []byte("EFI PART")

func readAt(r io.ReaderAt, lba uint64, probe *Table) (*Table, error) {
	ss := probe.SectorSize
	sector := make([]byte, ss)
	if _, err := r.ReadAt(sector, int64(lba*ss)); err != nil {
		return nil, fmt.Errorf("read sector %d: %w", lba, err)
	}
	if !bytes.Equal(sector[:8], signature) {
		return nil, ErrNone
	}
	le := binary.LittleEndian
	headerSize := le.Uint32(sector[12:])
	if headerSize < 92 || uint64(headerSize) > ss {
		return nil, fmt.Errorf("header size %d at sector %d", headerSize, lba)
	}
	header := slices.Clone(sector[:headerSize])
	want := le.Uint32(header[16:])
	clear(header[16:20])
	if got := crc32.ChecksumIEEE(header); got != want {
		return nil, fmt.Errorf("header checksum at sector %d is wrong", lba)
	}
	if mine := le.Uint64(header[24:]); mine != lba {
		return nil, fmt.Errorf("header at sector %d says that it is at %d", lba, mine)
	}
	start, n, size := le.Uint64(header[72:]), le.Uint32(header[80:]), le.Uint32(header[84:])
	if size != entrySize || n == 0 || n > entryCount {
		return nil, fmt.Errorf("%d entries of %d bytes: want at most %d of %d", n, size, entryCount, entrySize)
	}
	if start < 2 || start >= probe.Sectors {
		return nil, fmt.Errorf("entries at sector %d are outside of the disk", start)
	}
	entries := make([]byte, entrySize*int(n))
	if _, err := r.ReadAt(entries, int64(start*ss)); err != nil {
		return nil, fmt.Errorf("read entries: %w", err)
	}
	if crc32.ChecksumIEEE(entries) != le.Uint32(header[88:]) {
		return nil, fmt.Errorf("checksum of the entries at sector %d is wrong", start)
	}
	t := &Table{ID: fromDisk(header[56:72]), SectorSize: ss}
	t.Sectors = max(lba, le.Uint64(header[32:])) + 1
	if t.Sectors > probe.Sectors {
		return nil, fmt.Errorf("table is for %d sectors, the disk has %d", t.Sectors, probe.Sectors)
	}
	if err := t.checkSize(); err != nil {
		return nil, err
	}
	for i := range int(n) {
		e := entries[i*entrySize:]
		p := Partition{Type: fromDisk(e[:16]), ID: fromDisk(e[16:32]), First: le.Uint64(e[32:]), Last: le.Uint64(e[40:]), Attributes: le.Uint64(e[48:])}
		if !p.Used() {
			continue
		}
		if p.First < 2 || p.Last < p.First || p.Last >= t.Sectors {
			return nil, fmt.Errorf("partition %d covers sectors %d to %d of %d", i+1, p.First, p.Last, t.Sectors)
		}
		var units []uint16
		for j := 56; j < entrySize; j += 2 {
			if u := le.Uint16(e[j:]); u != 0 {
				units = append(units, u)
			} else {
				break
			}
		}
		p.Name = string(utf16.Decode(units))
		t.Partitions[i] = p
	}
	return t, nil
}

// Grow moves the end of the table to the end of a disk of size bytes. It
// reports whether anything changed.
func (t *Table) Grow(size uint64) (bool, error) {
	sectors := size / t.SectorSize
	if sectors < t.Sectors {
		return false, fmt.Errorf("disk of %d sectors is smaller than its table says (%d)", sectors, t.Sectors)
	}
	grown := sectors > t.Sectors
	t.Sectors = sectors
	return grown, nil
}

// Free is the largest run of unused sectors that starts aligned. ok is false
// where none has at least least bytes.
func (t *Table) Free(least uint64) (first, last uint64, ok bool) {
	var used []Partition
	for _, p := range t.Partitions {
		if p.Used() {
			used = append(used, p)
		}
	}
	slices.SortFunc(used, func(a, b Partition) int {
		if a.First < b.First {
			return -1
		}
		return 1
	})
	align := Align / t.SectorSize
	next := t.firstUsable()
	best := uint64(0)
	try := func(end uint64) { // end is excluded
		from := (next + align - 1) / align * align
		end = end / align * align
		if end > from && end-from > best && (end-from)*t.SectorSize >= least {
			best, first, last, ok = end-from, from, end-1, true
		}
	}
	for _, p := range used {
		if p.First > next {
			try(p.First)
		}
		next = max(next, p.Last+1)
	}
	if end := t.lastUsable() + 1; end > next {
		try(end)
	}
	return first, last, ok
}

// Add puts p into the first unused entry after those in use and returns its number, from 1.
func (t *Table) Add(p Partition) (int, error) {
	slot := -1
	for i, q := range t.Partitions {
		if !q.Used() {
			continue
		}
		slot = i
		if p.First <= q.Last && q.First <= p.Last {
			return 0, fmt.Errorf("partition %q overlaps partition %d", p.Name, i+1)
		}
	}
	if slot+1 >= entryCount {
		return 0, errors.New("partition table is full")
	}
	if !p.Used() || p.First < t.firstUsable() || p.Last > t.lastUsable() || p.Last < p.First {
		return 0, fmt.Errorf("partition %q: sectors %d to %d are outside of %d to %d", p.Name, p.First, p.Last, t.firstUsable(), t.lastUsable())
	}
	if len(utf16.Encode([]rune(p.Name))) > 36 {
		return 0, fmt.Errorf("partition name %q is longer than 36 units", p.Name)
	}
	t.Partitions[slot+1] = p
	return slot + 2, nil
}

// Find returns the number of the only partition with this type and name; 0
// where there is none.
func (t *Table) Find(typ uuid.UUID, name string) int {
	found := 0
	for i, p := range t.Partitions {
		if p.Type == typ && p.Name == name {
			if found != 0 {
				return 0
			}
			found = i + 1
		}
	}
	return found
}

// Target is a disk that a table is written to.
type Target interface {
	io.WriterAt
	Sync() error
}

// Write stores both copies and the protective MBR: first the one at the
// disk's end, and only when that is on the disk the one that is read first.
func (t *Table) Write(w Target) error {
	if err := t.checkSize(); err != nil {
		return err
	}
	entries := make([]byte, entrySize*entryCount)
	le := binary.LittleEndian
	for i, p := range t.Partitions {
		if !p.Used() {
			continue
		}
		e := entries[i*entrySize:]
		toDisk(e[:16], p.Type)
		toDisk(e[16:32], p.ID)
		le.PutUint64(e[32:], p.First)
		le.PutUint64(e[40:], p.Last)
		le.PutUint64(e[48:], p.Attributes)
		for j, u := range utf16.Encode([]rune(p.Name)) {
			if j < 36 {
				le.PutUint16(e[56+2*j:], u)
			}
		}
	}
	last := t.Sectors - 1
	header := func(mine, other, at uint64) []byte {
		h := make([]byte, t.SectorSize)
		copy(h, signature)
		le.PutUint32(h[8:], 0x00010000)
		le.PutUint32(h[12:], 92)
		le.PutUint64(h[24:], mine)
		le.PutUint64(h[32:], other)
		le.PutUint64(h[40:], t.firstUsable())
		le.PutUint64(h[48:], t.lastUsable())
		toDisk(h[56:72], t.ID)
		le.PutUint64(h[72:], at)
		le.PutUint32(h[80:], entryCount)
		le.PutUint32(h[84:], entrySize)
		le.PutUint32(h[88:], crc32.ChecksumIEEE(entries))
		le.PutUint32(h[16:], crc32.ChecksumIEEE(h[:92]))
		return h
	}
	ss := int64(t.SectorSize)
	put := func(what string, b []byte, sector uint64) error {
		if _, err := w.WriteAt(b, int64(sector)*ss); err != nil {
			return fmt.Errorf("write %s: %w", what, err)
		}
		return nil
	}
	if err := put("backup entries", entries, last-t.entrySectors()); err != nil {
		return err
	}
	if err := put("backup header", header(last, 1, last-t.entrySectors()), last); err != nil {
		return err
	}
	if err := w.Sync(); err != nil {
		return fmt.Errorf("sync backup table: %w", err)
	}
	if err := put("entries", entries, 2); err != nil {
		return err
	}
	if err := put("header", header(1, last, 2), 1); err != nil {
		return err
	}
	if err := put("protective MBR", protectiveMBR(t.Sectors), 0); err != nil {
		return err
	}
	if err := w.Sync(); err != nil {
		return fmt.Errorf("sync table: %w", err)
	}
	return nil
}

func protectiveMBR(sectors uint64) []byte {
	b := make([]byte, 512)
	e := b[446:]
	copy(e, []byte{0, 0, 2, 0, 0xee, 0xff, 0xff, 0xff})
	binary.LittleEndian.PutUint32(e[8:], 1)
	binary.LittleEndian.PutUint32(e[12:], uint32(min(sectors-1, 0xffffffff)))
	b[510], b[511] = 0x55, 0xaa
	return b
}

// GUIDs lie on disk with their first three fields little-endian.
func fromDisk(b []byte) (u uuid.UUID) {
	copy(u[:], b)
	swap(&u)
	return u
}

func toDisk(b []byte, u uuid.UUID) {
	swap(&u)
	copy(b, u[:])
}

func swap(u *uuid.UUID) {
	slices.Reverse(u[:4])
	slices.Reverse(u[4:6])
	slices.Reverse(u[6:8])
}
