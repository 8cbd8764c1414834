// Package gpt edits the bytes of a GUID partition table (UEFI specification,
// chapter 5), so that an image's table fits a larger disk and takes another partition.
package gpt

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"slices"
	"unicode/utf16"
)

// Sector is the only sector size that is understood.
const Sector = 512

const (
	headerSize = 92
	maxEntries = 1024
)

// ErrNone says that there is no table at all.
var ErrNone = errors.New("no GUID partition table")

var signature = []byte("EFI PART")

// GUID is 16 bytes in their order on disk.
type GUID [16]byte

// BasicData is the type of a partition that any system may mount.
var BasicData = GUID{0xa2, 0xa0, 0xd0, 0xeb, 0xe5, 0xb9, 0x33, 0x44, 0x87, 0xc0, 0x68, 0xb6, 0xb7, 0x26, 0x99, 0xc7}

// Partition spans the sectors First to Last, both included.
type Partition struct {
	Type, GUID  GUID
	Name        string
	First, Last uint64
	Attributes  uint64
}

// Table is a parsed primary table. Everything that it does not know about
// stays as it was.
type Table struct {
	mbr     []byte // sector 0
	header  []byte // one sector
	entries []byte // whole sectors
	sectors uint64 // the disk's length
}

// Patch is bytes that belong at an offset of the disk.
type Patch struct {
	Off  int64
	Data []byte
}

func (t *Table) u32(off int) uint32       { return binary.LittleEndian.Uint32(t.header[off:]) }
func (t *Table) u64(off int) uint64       { return binary.LittleEndian.Uint64(t.header[off:]) }
func (t *Table) put32(off int, v uint32)  { binary.LittleEndian.PutUint32(t.header[off:], v) }
func (t *Table) put64(off int, v uint64)  { binary.LittleEndian.PutUint64(t.header[off:], v) }
func (t *Table) entrySectors() uint64     { return uint64(len(t.entries) / Sector) }
func (t *Table) entrySize() int           { return int(t.u32(84)) }
func (t *Table) entryCount() int          { return int(t.u32(80)) }
func (t *Table) entry(i int) []byte       { return t.entries[i*t.entrySize():][:t.entrySize()] }
func used(entry []byte) bool              { return !bytes.Equal(entry[:16], make([]byte, 16)) }
func span(entry []byte) (f, l uint64)     { return le64(entry[32:]), le64(entry[40:]) }
func le64(b []byte) uint64                { return binary.LittleEndian.Uint64(b) }
func (t *Table) Alternate() uint64        { return t.u64(32) }
func (t *Table) FirstUsable() uint64      { return t.u64(40) }
func (t *Table) LastUsable() uint64       { return t.u64(48) }
func (t *Table) BackupSectors() uint64    { return t.entrySectors() + 1 }
func (t *Table) entriesUsedBytes() []byte { return t.entries[:t.entryCount()*t.entrySize()] }

// Parse reads the primary table from the first bytes of a disk or an image,
// which must hold it whole. ErrNone: there is none.
func Parse(head []byte) (*Table, error) {
	if len(head) < 2*Sector || !bytes.Equal(head[Sector:][:8], signature) {
		return nil, ErrNone
	}
	t := &Table{mbr: bytes.Clone(head[:Sector]), header: bytes.Clone(head[Sector:][:Sector])}
	if size := t.u32(12); size < headerSize || size > Sector {
		return nil, fmt.Errorf("partition table: header of %d bytes", size)
	}
	if got, want := t.headerCRC(), t.u32(16); got != want {
		return nil, fmt.Errorf("partition table: header checksum is %08x, want %08x", got, want)
	}
	if own := t.u64(24); own != 1 {
		return nil, fmt.Errorf("partition table: header says that it stands at sector %d, not 1", own)
	}
	size, count, at := t.u32(84), t.u32(80), t.u64(72)
	if size < 128 || size > 4096 || size&(size-1) != 0 || count == 0 || count > maxEntries {
		return nil, fmt.Errorf("partition table: %d entries of %d bytes", count, size)
	}
	length := (uint64(size)*uint64(count) + Sector - 1) / Sector * Sector
	if at < 2 || at > uint64(len(head))/Sector || length > uint64(len(head))-at*Sector {
		return nil, fmt.Errorf("partition table: entries at sector %d lie outside of the first %d bytes", at, len(head))
	}
	t.entries = bytes.Clone(head[at*Sector:][:length])
	if got, want := crc32.ChecksumIEEE(t.entriesUsedBytes()), t.u32(88); got != want {
		return nil, fmt.Errorf("partition table: checksum of the entries is %08x, want %08x", got, want)
	}
	first, last := t.FirstUsable(), t.LastUsable()
	if first < at+t.entrySectors() || last < first || t.Alternate() <= last || t.Alternate() > math.MaxInt64/Sector {
		return nil, fmt.Errorf("partition table: usable sectors %d to %d, backup at %d", first, last, t.Alternate())
	}
	for i := range t.entryCount() {
		e := t.entry(i)
		if f, l := span(e); used(e) && (f < first || l > last || l < f) {
			return nil, fmt.Errorf("partition table: partition %d spans %d to %d, usable are %d to %d", i+1, f, l, first, last)
		}
	}
	t.sectors = t.Alternate() + 1
	return t, nil
}

// Partitions lists the used entries in their order.
func (t *Table) Partitions() []Partition {
	var out []Partition
	for i := range t.entryCount() {
		e := t.entry(i)
		if !used(e) {
			continue
		}
		p := Partition{Type: GUID(e[:16]), GUID: GUID(e[16:32]), Attributes: le64(e[48:])}
		p.First, p.Last = span(e)
		var name []uint16
		for j := 56; j+1 < 128; j += 2 {
			c := binary.LittleEndian.Uint16(e[j:])
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

// Fit makes the table that of a disk with so many sectors: the backup moves to
// its end. A disk that cuts a partition off is refused.
func (t *Table) Fit(sectors uint64) error {
	if sectors < t.entrySectors()+3 || sectors > math.MaxInt64/Sector {
		return fmt.Errorf("partition table: a disk of %d sectors", sectors)
	}
	last := sectors - 1 - t.BackupSectors()
	for i, p := range t.Partitions() {
		if p.Last > last {
			return fmt.Errorf("partition table: partition %d (%q) ends at sector %d, the disk at %d", i+1, p.Name, p.Last, last)
		}
	}
	if last < t.FirstUsable() {
		return fmt.Errorf("partition table: a disk of %d sectors", sectors)
	}
	t.sectors = sectors
	t.put64(32, sectors-1)
	t.put64(48, last)
	// The protective entry covers the disk, or what 32 bits can say.
	for i := range 4 {
		e := t.mbr[446+16*i:][:16]
		if e[4] == 0xee {
			binary.LittleEndian.PutUint32(e[12:], uint32(min(sectors-uint64(binary.LittleEndian.Uint32(e[8:])), math.MaxUint32)))
		}
	}
	return nil
}

// Add puts a partition into the first free entry.
func (t *Table) Add(p Partition) error {
	name := utf16.Encode([]rune(p.Name))
	switch {
	case p.Type == GUID{}:
		return fmt.Errorf("add partition %q: no type", p.Name)
	case len(name) > 36:
		return fmt.Errorf("add partition %q: the name is over 36 characters", p.Name)
	case p.Last < p.First || p.First < t.FirstUsable() || p.Last > t.LastUsable():
		return fmt.Errorf("add partition %q: sectors %d to %d, usable are %d to %d", p.Name, p.First, p.Last, t.FirstUsable(), t.LastUsable())
	}
	for _, o := range t.Partitions() {
		if p.First <= o.Last && o.First <= p.Last {
			return fmt.Errorf("add partition %q: overlaps %q", p.Name, o.Name)
		}
	}
	for i := range t.entryCount() {
		e := t.entry(i)
		if used(e) {
			continue
		}
		clear(e)
		copy(e, p.Type[:])
		copy(e[16:], p.GUID[:])
		binary.LittleEndian.PutUint64(e[32:], p.First)
		binary.LittleEndian.PutUint64(e[40:], p.Last)
		binary.LittleEndian.PutUint64(e[48:], p.Attributes)
		for j, c := range name {
			binary.LittleEndian.PutUint16(e[56+2*j:], c)
		}
		return nil
	}
	return fmt.Errorf("add partition %q: all %d entries are used", p.Name, t.entryCount())
}

// Primary is the table at the disk's start: protective MBR, header and entries.
func (t *Table) Primary() []Patch {
	return []Patch{
		{0, bytes.Clone(t.mbr)},
		{Sector, t.seal(1, t.sectors-1, t.u64(72))},
		{int64(t.u64(72)) * Sector, bytes.Clone(t.entries)},
	}
}

// Backup is the copy at the disk's end: entries, then header.
func (t *Table) Backup() []Patch {
	at := t.sectors - t.BackupSectors()
	return []Patch{
		{int64(at) * Sector, bytes.Clone(t.entries)},
		{int64(t.sectors-1) * Sector, t.seal(t.sectors-1, 1, at)},
	}
}

// seal makes a header for the place where it stands.
func (t *Table) seal(own, other, entries uint64) []byte {
	h := &Table{header: bytes.Clone(t.header)}
	h.put64(24, own)
	h.put64(32, other)
	h.put64(72, entries)
	h.put32(88, crc32.ChecksumIEEE(t.entriesUsedBytes()))
	h.put32(16, h.headerCRC())
	return slices.Clip(h.header)
}

func (t *Table) headerCRC() uint32 {
	h := bytes.Clone(t.header[:t.u32(12)])
	clear(h[16:20])
	return crc32.ChecksumIEEE(h)
}
