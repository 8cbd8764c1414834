// Package uki makes a unified kernel image: systemd's EFI stub with kernel,
// command line and initrd appended as PE sections (UAPI group's UKI specification).
package uki

import (
	"bytes"
	"debug/pe"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// Parts goes into the image.
type Parts struct {
	Stub      []byte
	OSRelease string
	Cmdline   string
	// Uname is the kernel's release.
	Uname  string
	Initrd []byte
	Linux  []byte
}

const (
	sectionHeader = 40
	// where sections are mapped; the stub's own alignment is smaller.
	pageSize = 4096
	// IMAGE_SCN_CNT_INITIALIZED_DATA and IMAGE_SCN_MEM_READ
	readOnlyData = 0x40000040
)

// Build assembles the image. The same parts give the same bytes.
func Build(p Parts) ([]byte, error) {
	for _, part := range []struct {
		name string
		size int
	}{{"stub", len(p.Stub)}, {"kernel", len(p.Linux)}, {"initrd", len(p.Initrd)}, {"command line", len(p.Cmdline)}} {
		if part.size == 0 {
			return nil, fmt.Errorf("build UKI: %s is empty", part.name)
		}
	}
	f, err := pe.NewFile(bytes.NewReader(p.Stub))
	if err != nil {
		return nil, fmt.Errorf("parse EFI stub: %w", err)
	}
	opt, ok := f.OptionalHeader.(*pe.OptionalHeader64)
	if !ok || opt.FileAlignment == 0 || opt.FileAlignment > pageSize {
		return nil, errors.New("EFI stub is not a 64-bit PE file")
	}
	le := binary.LittleEndian
	peAt := le.Uint32(p.Stub[0x3c:])
	optAt := peAt + 4 + 20
	tableAt := optAt + uint32(f.FileHeader.SizeOfOptionalHeader)
	count := uint32(len(f.Sections))

	firstRaw, endRaw, endMapped := uint32(math.MaxUint32), uint32(0), uint32(0)
	for _, s := range f.Sections {
		if s.Offset != 0 {
			firstRaw = min(firstRaw, s.Offset)
		}
		endRaw = max(endRaw, s.Offset+s.Size)
		endMapped = max(endMapped, s.VirtualAddress+max(s.VirtualSize, s.Size))
	}
	if uint64(endRaw) > uint64(len(p.Stub)) {
		return nil, errors.New("EFI stub is cut short")
	}
	sections := []struct {
		name string
		data []byte
	}{
		{".osrel", []byte(p.OSRelease)},
		{".cmdline", []byte(p.Cmdline)},
		{".uname", []byte(p.Uname)},
		{".initrd", p.Initrd},
		{".linux", p.Linux},
	}
	room := (int64(min(firstRaw, opt.SizeOfHeaders)) - int64(tableAt) - int64(count)*sectionHeader) / sectionHeader
	if room < int64(len(sections)) {
		return nil, fmt.Errorf("EFI stub has room for %d more sections, %d are needed", room, len(sections))
	}

	// What follows the last section is symbols: nothing needs them.
	out := bytes.Clone(p.Stub[:endRaw])
	mapped := alignUp(endMapped, max(opt.SectionAlignment, pageSize))
	initialised := opt.SizeOfInitializedData
	for _, s := range sections {
		out = pad(out, opt.FileAlignment)
		raw := alignUp(uint32(len(s.data)), opt.FileAlignment)
		header := make([]byte, sectionHeader)
		copy(header, s.name)
		le.PutUint32(header[8:], uint32(len(s.data)))
		le.PutUint32(header[12:], mapped)
		le.PutUint32(header[16:], raw)
		le.PutUint32(header[20:], uint32(len(out)))
		le.PutUint32(header[36:], readOnlyData)
		copy(out[tableAt+count*sectionHeader:], header)
		count++
		out = pad(append(out, s.data...), opt.FileAlignment)
		mapped = alignUp(mapped+uint32(len(s.data)), max(opt.SectionAlignment, pageSize))
		initialised += raw
		if len(out) > 1<<30 {
			return nil, errors.New("UKI is over 1 GiB")
		}
	}
	le.PutUint16(out[peAt+6:], uint16(count))
	le.PutUint32(out[peAt+8:], 0)  // time stamp
	le.PutUint32(out[peAt+12:], 0) // symbol table
	le.PutUint32(out[peAt+16:], 0) // symbols
	le.PutUint32(out[optAt+8:], initialised)
	le.PutUint32(out[optAt+56:], mapped) // size when mapped
	le.PutUint32(out[optAt+64:], 0)      // checksum, which nothing checks
	return out, nil
}

// Section reads one section of a UKI back.
func Section(image []byte, name string) ([]byte, error) {
	f, err := pe.NewFile(bytes.NewReader(image))
	if err != nil {
		return nil, fmt.Errorf("parse UKI: %w", err)
	}
	s := f.Section(name)
	if s == nil {
		return nil, fmt.Errorf("UKI has no section %s", name)
	}
	data, err := s.Data()
	if err != nil {
		return nil, fmt.Errorf("read section %s: %w", name, err)
	}
	return data[:min(int(s.VirtualSize), len(data))], nil
}

func alignUp(v, to uint32) uint32 { return (v + to - 1) / to * to }

func pad(b []byte, to uint32) []byte {
	return append(b, make([]byte, alignUp(uint32(len(b)), to)-uint32(len(b)))...)
}
