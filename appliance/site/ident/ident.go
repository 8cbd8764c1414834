// Package ident keeps the identity a second time, on a small raw partition
// apart from the data: losing data does not lose the box.
package ident

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
)

// Layout: two slots. Each starts with a header: magic (8 bytes), generation
// (8), length (4), CRC-32C of generation, length and content (4), all little-endian.
const (
	slotBytes  = 2 << 20
	headerSize = 24
	magic      = "BCIDENT1"
)

// MaxBytes is the most that a slot holds.
const MaxBytes = slotBytes - headerSize

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Partition is a block device, or a file, of at least 4 MiB.
type Partition struct{ path string }

// New names the device; it is opened at each use.
func New(path string) *Partition { return &Partition{path} }

type slot struct {
	generation uint64
	content    []byte
}

// Load gives the newest content that is whole, and nil when there is none.
func (p *Partition) Load() ([]byte, error) {
	f, err := os.Open(p.path)
	if err != nil {
		return nil, fmt.Errorf("open identity partition: %w", err)
	}
	defer f.Close()
	newest, _ := newest(f)
	return newest.content, nil
}

// newest reads both slots and says which one holds the newer content.
func newest(f *os.File) (slot, int) {
	var best slot
	at := 1 // so that the first write goes to slot 0
	for i := range 2 {
		if s, err := read(f, i); err == nil && s.generation > best.generation {
			best, at = s, i
		}
	}
	return best, at
}

func read(f *os.File, i int) (slot, error) {
	header := make([]byte, headerSize)
	if _, err := f.ReadAt(header, int64(i)*slotBytes); err != nil {
		return slot{}, err
	}
	length := binary.LittleEndian.Uint32(header[16:])
	if string(header[:8]) != magic || length > MaxBytes {
		return slot{}, errors.New("no identity")
	}
	content := make([]byte, length)
	if _, err := f.ReadAt(content, int64(i)*slotBytes+headerSize); err != nil {
		return slot{}, err
	}
	if sum(header[8:20], content) != binary.LittleEndian.Uint32(header[20:]) {
		return slot{}, errors.New("damaged identity")
	}
	return slot{binary.LittleEndian.Uint64(header[8:]), content}, nil
}

func sum(head, content []byte) uint32 {
	return crc32.Update(crc32.Checksum(head, castagnoli), castagnoli, content)
}

// Store writes content to the slot that does not hold the newest one, so that a
// power cut leaves the old content or the new.
func (p *Partition) Store(content []byte) error {
	if len(content) > MaxBytes {
		return fmt.Errorf("identity of %d bytes: at most %d fit", len(content), MaxBytes)
	}
	f, err := os.OpenFile(p.path, os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("open identity partition: %w", err)
	}
	defer f.Close()
	old, at := newest(f)
	record := make([]byte, headerSize, headerSize+len(content))
	copy(record, magic)
	binary.LittleEndian.PutUint64(record[8:], old.generation+1)
	binary.LittleEndian.PutUint32(record[16:], uint32(len(content)))
	binary.LittleEndian.PutUint32(record[20:], sum(record[8:20], content))
	record = append(record, content...)
	if _, err := f.WriteAt(record, int64(1-at)*slotBytes); err != nil {
		return fmt.Errorf("write identity partition: %w", err)
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("write identity partition: %w", err)
	}
	return nil
}
