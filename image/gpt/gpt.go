// Package gpt reads, changes and writes GUID partition tables (UEFI 2.10,
// chapter 5): that of a disk in use, in an order that a power cut cannot break,
// and that of an image on its way to a larger disk. Whatever a table holds that
// this package does not know about stays as it was.
package gpt

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"slices"
	"unicode/utf16"

	"github.com/google/uuid"
)

// Align is what partitions start at, in bytes.
const Align = 1 << 20

const (
	headerBytes = 92
	// What a new table has; one that is read may have larger entries, and more of them.
	entryBytes, entryCount = 128, 128
	maxEntryBytes          = 4096
	maxEntries             = 1024
	maxName                = 36 // UTF-16 units
	maxSectors             = 1 << 48
)

// ErrNone says that no copy of the table is there.
var ErrNone = errors.New("no GUID partition table")

var (
	signature = []byte("EFI PART")
	le        = binary.LittleEndian
)

// Partition is one entry in use. Sectors are counted from the disk's start, Last included.
type Partition struct {
	// Number counts entries from 1; Add chooses it.
	Number      int
	Type, ID    uuid.UUID
	First, Last uint64
	Attributes  uint64
	Name        string
}

// Table is the partition table of a disk.
type Table struct {
	// FromBackup says that the first copy was unreadable.
	FromBackup bool

	sectorSize uint64
	sectors    uint64 // the disk's length, as the table has it
	at         uint64 // where the first copy's entries start
	mbr        []byte // sector 0
	header     []byte // one sector, without what seal fills in
	entries    []byte // whole sectors
}

func (t *Table) entrySize() int       { return int(le.Uint32(t.header[84:])) }
func (t *Table) entryCount() int      { return int(le.Uint32(t.header[80:])) }
func (t *Table) entry(i int) []byte   { return t.entries[i*t.entrySize():][:t.entrySize()] }
func (t *Table) entrySectors() uint64 { return uint64(len(t.entries)) / t.sectorSize }
func (t *Table) entriesCRC() uint32 {
	return crc32.ChecksumIEEE(t.entries[:t.entryCount()*t.entrySize()])
}

// SectorSize is in bytes.
func (t *Table) SectorSize() uint64 { return t.sectorSize }

// Sectors is the disk's size as the table has it.
func (t *Table) Sectors() uint64 { return t.sectors }

// FirstUsable and LastUsable bound the sectors of partitions.
func (t *Table) FirstUsable() uint64 { return le.Uint64(t.header[40:]) }

// LastUsable is included.
func (t *Table) LastUsable() uint64 { return le.Uint64(t.header[48:]) }

// BackupSectors is how many sectors the copy at the disk's end takes.
func (t *Table) BackupSectors() uint64 { return t.entrySectors() + 1 }

func checkSector(size uint64) error {
	if size != 512 && size != 4096 {
		return fmt.Errorf("sector size %d: want 512 or 4096", size)
	}
	return nil
}

// New is an empty table for a disk of size bytes.
func New(id uuid.UUID, size, sectorSize uint64) (*Table, error) {
	if err := checkSector(sectorSize); err != nil {
		return nil, err
	}
	t := &Table{sectorSize: sectorSize, at: 2, header: make([]byte, sectorSize)}
	t.entries = make([]byte, roundUp(entryBytes*entryCount, sectorSize))
	copy(t.header, signature)
	le.PutUint32(t.header[8:], 0x00010000)
	le.PutUint32(t.header[12:], headerBytes)
	le.PutUint64(t.header[40:], t.at+t.entrySectors())
	putID(t.header[56:], id)
	le.PutUint32(t.header[80:], entryCount)
	le.PutUint32(t.header[84:], entryBytes)
	t.mbr = protective(make([]byte, sectorSize))
	if err := t.Fit(size); err != nil {
		return nil, err
	}
	return t, nil
}

// Read takes the first copy of the table, or the last one where the first is
// damaged. size is the disk's in bytes.
func Read(r io.ReaderAt, size, sectorSize uint64) (*Table, error) {
	if err := checkSector(sectorSize); err != nil {
		return nil, err
	}
	disk := io.NewSectionReader(r, 0, int64(min(size/sectorSize*sectorSize, math.MaxInt64)))
	t, err := readCopy(disk, 1, sectorSize)
	if err == nil {
		return t, nil
	}
	t, berr := readCopy(disk, size/sectorSize-1, sectorSize)
	if berr == nil {
		t.FromBackup = true
		return t, nil
	}
	if errors.Is(err, ErrNone) {
		err = berr
	}
	if errors.Is(err, ErrNone) {
		return nil, ErrNone
	}
	return nil, fmt.Errorf("read partition table: %w", err)
}

// Parse reads the first copy of the table from the first bytes of a disk or an
// image, which must hold it whole; how long the disk is, the table alone says.
func Parse(head []byte, sectorSize uint64) (*Table, error) {
	if err := checkSector(sectorSize); err != nil {
		return nil, err
	}
	if uint64(len(head)) < 2*sectorSize {
		return nil, ErrNone
	}
	t, err := decode(io.NewSectionReader(bytes.NewReader(head), 0, int64(len(head))), 1, sectorSize)
	if err != nil && !errors.Is(err, ErrNone) {
		return nil, fmt.Errorf("partition table: %w", err)
	}
	return t, err
}

// readCopy is decode for a whole disk.
func readCopy(disk *io.SectionReader, own, sectorSize uint64) (*Table, error) {
	sectors := uint64(disk.Size()) / sectorSize
	if sectors < 3 || sectors > maxSectors {
		return nil, fmt.Errorf("a disk of %d sectors cannot hold a partition table", sectors)
	}
	t, err := decode(disk, own, sectorSize)
	if err == nil && t.sectors > sectors {
		return nil, fmt.Errorf("table is for %d sectors, the disk has %d", t.sectors, sectors)
	}
	return t, err
}

// decode reads the copy whose header is at sector own.
func decode(r *io.SectionReader, own, sectorSize uint64) (*Table, error) {
	t := &Table{sectorSize: sectorSize, mbr: make([]byte, sectorSize), header: make([]byte, sectorSize)}
	if _, err := r.ReadAt(t.header, int64(own*sectorSize)); err != nil {
		return nil, fmt.Errorf("read sector %d: %w", own, err)
	}
	if !bytes.HasPrefix(t.header, signature) {
		return nil, ErrNone
	}
	if size := le.Uint32(t.header[12:]); size < headerBytes || uint64(size) > sectorSize {
		return nil, fmt.Errorf("header of %d bytes at sector %d", size, own)
	}
	if got, want := headerCRC(t.header), le.Uint32(t.header[16:]); got != want {
		return nil, fmt.Errorf("header checksum at sector %d is %08x, want %08x", own, got, want)
	}
	if mine := le.Uint64(t.header[24:]); mine != own {
		return nil, fmt.Errorf("header at sector %d says that it is at %d", own, mine)
	}
	size, count, at := le.Uint32(t.header[84:]), le.Uint32(t.header[80:]), le.Uint64(t.header[72:])
	if size < entryBytes || size > maxEntryBytes || size&(size-1) != 0 || count == 0 || count > maxEntries {
		return nil, fmt.Errorf("%d entries of %d bytes", count, size)
	}
	length, end := roundUp(uint64(size)*uint64(count), sectorSize), uint64(r.Size())
	if at < 2 || at > end/sectorSize || length > end-at*sectorSize {
		return nil, fmt.Errorf("entries at sector %d are outside of the first %d bytes", at, end)
	}
	t.entries = make([]byte, length)
	if _, err := r.ReadAt(t.entries, int64(at*sectorSize)); err != nil {
		return nil, fmt.Errorf("read entries: %w", err)
	}
	if got, want := t.entriesCRC(), le.Uint32(t.header[88:]); got != want {
		return nil, fmt.Errorf("checksum of the entries at sector %d is %08x, want %08x", at, got, want)
	}
	other := le.Uint64(t.header[32:])
	if other >= maxSectors {
		return nil, fmt.Errorf("the other copy is said to be at sector %d", other)
	}
	t.sectors, t.at = max(own, other)+1, at
	if own != 1 {
		t.at = 2
	}
	first, last := t.FirstUsable(), t.LastUsable()
	if first < t.at+t.entrySectors() || last < first || t.sectors < t.BackupSectors()+1 || last > t.lastOf(t.sectors) {
		return nil, fmt.Errorf("usable sectors %d to %d of %d", first, last, t.sectors)
	}
	for _, p := range t.Partitions() {
		if p.First < first || p.Last > last || p.Last < p.First {
			return nil, fmt.Errorf("partition %d spans %d to %d, usable are %d to %d", p.Number, p.First, p.Last, first, last)
		}
	}
	if _, err := r.ReadAt(t.mbr, 0); err != nil {
		return nil, fmt.Errorf("read sector 0: %w", err)
	}
	if t.mbr[510] != 0x55 || t.mbr[511] != 0xaa {
		t.mbr = protective(t.mbr)
		t.cover()
	}
	for _, field := range [][2]int{{16, 20}, {24, 40}, {72, 80}, {88, 92}} { // seal fills these in
		clear(t.header[field[0]:field[1]])
	}
	return t, nil
}

// Partitions lists the entries in use in their order.
func (t *Table) Partitions() []Partition {
	var out []Partition
	for i := range t.entryCount() {
		e := t.entry(i)
		if !used(e) {
			continue
		}
		p := Partition{Number: i + 1, Type: getID(e), ID: getID(e[16:]), First: le.Uint64(e[32:]), Last: le.Uint64(e[40:]), Attributes: le.Uint64(e[48:])}
		var name []uint16
		for j := range maxName {
			c := le.Uint16(e[56+2*j:])
			if c == 0 {
				break
			}
			name = append(name, c)
		}
		p.Name = string(utf16.Decode(name))
		out = append(out, p)
	}
	return out
}

// Find returns the only partition with this type and name.
func (t *Table) Find(typ uuid.UUID, name string) (p Partition, ok bool) {
	for _, q := range t.Partitions() {
		if q.Type == typ && q.Name == name {
			if ok {
				return Partition{}, false
			}
			p, ok = q, true
		}
	}
	return p, ok
}

// lastOf is the last usable sector of a disk with so many.
func (t *Table) lastOf(sectors uint64) uint64 { return sectors - 1 - t.BackupSectors() }

// Fit makes the table that of a disk of size bytes: the backup moves to its
// end. A disk that cuts a partition off is refused.
func (t *Table) Fit(size uint64) error {
	sectors := size / t.sectorSize
	if sectors > maxSectors || sectors < t.BackupSectors()+2 || t.lastOf(sectors) < t.FirstUsable() {
		return fmt.Errorf("a disk of %d sectors cannot hold the partition table", sectors)
	}
	last := t.lastOf(sectors)
	for _, p := range t.Partitions() {
		if p.Last > last {
			return fmt.Errorf("partition %d (%q) ends at sector %d, the disk at %d", p.Number, p.Name, p.Last, last)
		}
	}
	t.sectors = sectors
	le.PutUint64(t.header[48:], last)
	t.cover()
	return nil
}

// Grow is Fit for a disk that can only have become larger.
func (t *Table) Grow(size uint64) error {
	if sectors := size / t.sectorSize; sectors < t.sectors {
		return fmt.Errorf("disk of %d sectors is smaller than its table says (%d)", sectors, t.sectors)
	}
	return t.Fit(size)
}

// Free is the largest run of unused sectors that starts aligned. ok is false
// where none has at least least bytes.
func (t *Table) Free(least uint64) (first, last uint64, ok bool) {
	parts := t.Partitions()
	slices.SortFunc(parts, func(a, b Partition) int { return cmp.Compare(a.First, b.First) })
	align := Align / t.sectorSize
	next := t.FirstUsable()
	best := uint64(0)
	try := func(end uint64) { // end is excluded
		from := roundUp(next, align)
		end = end / align * align
		if end > from && end-from > best && (end-from)*t.sectorSize >= least {
			best, first, last, ok = end-from, from, end-1, true
		}
	}
	for _, p := range parts {
		try(p.First)
		next = max(next, p.Last+1)
	}
	try(t.LastUsable() + 1)
	return first, last, ok
}

// Add puts a partition into the first free entry and returns its number.
func (t *Table) Add(p Partition) (int, error) {
	switch {
	case p.Type == uuid.Nil:
		return 0, fmt.Errorf("add partition %q: no type", p.Name)
	case p.Last < p.First || p.First < t.FirstUsable() || p.Last > t.LastUsable():
		return 0, fmt.Errorf("add partition %q: sectors %d to %d, usable are %d to %d", p.Name, p.First, p.Last, t.FirstUsable(), t.LastUsable())
	}
	for _, o := range t.Partitions() {
		if p.First <= o.Last && o.First <= p.Last {
			return 0, fmt.Errorf("add partition %q: overlaps partition %d (%q)", p.Name, o.Number, o.Name)
		}
	}
	for i := range t.entryCount() {
		e := t.entry(i)
		if used(e) {
			continue
		}
		if err := putName(e, p.Name); err != nil {
			return 0, fmt.Errorf("add partition %q: %w", p.Name, err)
		}
		putID(e, p.Type)
		putID(e[16:], p.ID)
		le.PutUint64(e[32:], p.First)
		le.PutUint64(e[40:], p.Last)
		le.PutUint64(e[48:], p.Attributes)
		clear(e[entryBytes:])
		return i + 1, nil
	}
	return 0, fmt.Errorf("add partition %q: all %d entries are used", p.Name, t.entryCount())
}

// Rename names the partition with this number.
func (t *Table) Rename(number int, name string) error {
	if number < 1 || number > t.entryCount() || !used(t.entry(number-1)) {
		return fmt.Errorf("name partition %d: there is none", number)
	}
	if err := putName(t.entry(number-1), name); err != nil {
		return fmt.Errorf("name partition %d: %w", number, err)
	}
	return nil
}

func putName(entry []byte, name string) error {
	units := utf16.Encode([]rune(name))
	if len(units) > maxName {
		return fmt.Errorf("the name is over %d characters", maxName)
	}
	field := entry[56:entryBytes]
	clear(field)
	for i, u := range units {
		le.PutUint16(field[2*i:], u)
	}
	return nil
}

// Patch is bytes that belong at an offset of the disk.
type Patch struct {
	Off  int64
	Data []byte
	what string
}

func (t *Table) patch(sector uint64, data []byte, what string) Patch {
	return Patch{int64(sector * t.sectorSize), data, what}
}

// Primary is the table at the disk's start: entries, header and protective MBR.
func (t *Table) Primary() []Patch {
	return []Patch{
		t.patch(t.at, bytes.Clone(t.entries), "entries"),
		t.patch(1, t.seal(1, t.sectors-1, t.at), "header"),
		t.patch(0, bytes.Clone(t.mbr), "protective MBR"),
	}
}

// Backup is the copy at the disk's end: entries, then header.
func (t *Table) Backup() []Patch {
	at := t.sectors - t.BackupSectors()
	return []Patch{
		t.patch(at, bytes.Clone(t.entries), "backup entries"),
		t.patch(t.sectors-1, t.seal(t.sectors-1, 1, at), "backup header"),
	}
}

// seal makes a header for the place where it stands.
func (t *Table) seal(own, other, entries uint64) []byte {
	h := bytes.Clone(t.header)
	le.PutUint64(h[24:], own)
	le.PutUint64(h[32:], other)
	le.PutUint64(h[72:], entries)
	le.PutUint32(h[88:], t.entriesCRC())
	le.PutUint32(h[16:], headerCRC(h))
	return h
}

// Target is a disk that a table is written to.
type Target interface {
	io.WriterAt
	Sync() error
}

// Write stores both copies and the protective MBR: first the one at the
// disk's end, and only when that is on the disk the one that is read first.
func (t *Table) Write(w Target) error {
	for _, patches := range [][]Patch{t.Backup(), t.Primary()} {
		for _, p := range patches {
			if _, err := w.WriteAt(p.Data, p.Off); err != nil {
				return fmt.Errorf("write partition table: %s: %w", p.what, err)
			}
		}
		if err := w.Sync(); err != nil {
			return fmt.Errorf("sync partition table: %w", err)
		}
	}
	return nil
}

// protective gives a sector 0 without a partition table of its own one that
// keeps those who know no other away. cover sets how much it covers.
func protective(sector []byte) []byte {
	b := bytes.Clone(sector)
	clear(b[446:510])
	copy(b[446:], []byte{0, 0, 2, 0, 0xee, 0xff, 0xff, 0xff, 1})
	b[510], b[511] = 0x55, 0xaa
	return b
}

// cover makes the protective entry cover the disk, or what 32 bits can say.
func (t *Table) cover() {
	for i := range 4 {
		e := t.mbr[446+16*i:][:16]
		if e[4] == 0xee {
			first := uint64(le.Uint32(e[8:]))
			le.PutUint32(e[12:], uint32(min(t.sectors-min(first, t.sectors), math.MaxUint32)))
		}
	}
}

func headerCRC(header []byte) uint32 {
	h := bytes.Clone(header[:le.Uint32(header[12:])])
	clear(h[16:20])
	return crc32.ChecksumIEEE(h)
}

func used(entry []byte) bool { return getID(entry) != uuid.Nil }

func roundUp(n, to uint64) uint64 { return (n + to - 1) / to * to }

// GUIDs lie on disk with their first three fields little-endian.
func getID(b []byte) (u uuid.UUID) {
	copy(u[:], b)
	swap(&u)
	return u
}

func putID(b []byte, u uuid.UUID) {
	swap(&u)
	copy(b, u[:])
}

func swap(u *uuid.UUID) {
	slices.Reverse(u[:4])
	slices.Reverse(u[4:6])
	slices.Reverse(u[6:8])
}
