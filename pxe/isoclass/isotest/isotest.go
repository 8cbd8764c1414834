// Package isotest makes the smallest disc images that tests need.
package isotest

import (
	"bytes"
	"encoding/binary"
)

const sector = 2048

// Options are what an image is to be.
type Options struct {
	Label      string
	BIOS, UEFI bool
	// Files are in its root, by name, with their own name as content.
	Files []string
	// Size is how long the image is to be at least, in bytes.
	Size int
}

// both is a number in both byte orders, as ISO 9660 has them.
func both(b []byte, v uint32) {
	binary.LittleEndian.PutUint32(b, v)
	binary.BigEndian.PutUint32(b[4:], v)
}

func record(id []byte, lba, size uint32, dir bool) []byte {
	r := make([]byte, 33+len(id)+(len(id)+1)%2)
	both(r[2:], lba)
	both(r[10:], size)
	if dir {
		r[25] = 2
	}
	r[32] = byte(len(id))
	copy(r[33:], id)
	r[0] = byte(len(r))
	return r
}

// Image is an ISO 9660 image with plain names.
func Image(o Options) []byte {
	const rootAt, catalogAt, bootAt, filesAt = 20, 21, 22, 23
	sectors := filesAt + len(o.Files)
	out := make([]byte, max(sectors*sector, (o.Size+sector-1)/sector*sector))
	at := func(lba int) []byte { return out[lba*sector : (lba+1)*sector] }
	descriptor := func(lba int, kind byte) []byte {
		b := at(lba)
		b[0], b[6] = kind, 1
		copy(b[1:], "CD001")
		return b
	}
	pvd := descriptor(16, 1)
	copy(pvd[40:72], bytes.Repeat([]byte{' '}, 32))
	copy(pvd[40:72], o.Label)
	both(pvd[80:], uint32(len(out)/sector))
	binary.LittleEndian.PutUint16(pvd[128:], sector)
	copy(pvd[156:], record([]byte{0}, rootAt, sector, true))
	if o.BIOS || o.UEFI {
		boot := descriptor(17, 0)
		copy(boot[7:], "EL TORITO SPECIFICATION")
		binary.LittleEndian.PutUint32(boot[0x47:], catalogAt)
		catalog(at(catalogAt), o, bootAt)
	} else {
		descriptor(17, 255)
	}
	descriptor(18, 255)
	root := append(record([]byte{0}, rootAt, sector, true), record([]byte{1}, rootAt, sector, true)...)
	for i, name := range o.Files {
		root = append(root, record([]byte(name), uint32(filesAt+i), uint32(len(name)), false)...)
		copy(at(filesAt+i), name)
	}
	copy(at(rootAt), root)
	return out
}

func catalog(b []byte, o Options, bootAt uint32) {
	platform := byte(0)
	if !o.BIOS {
		platform = 0xef
	}
	b[0], b[1], b[30], b[31] = 1, platform, 0x55, 0xaa
	entry := func(e []byte) {
		e[0] = 0x88
		binary.LittleEndian.PutUint16(e[6:], 4)
		binary.LittleEndian.PutUint32(e[8:], bootAt)
	}
	entry(b[32:])
	if o.BIOS && o.UEFI {
		b[64], b[65], b[66] = 0x91, 0xef, 1
		entry(b[96:])
	}
	sum := uint16(0)
	for i := 0; i < 32; i += 2 {
		sum += binary.LittleEndian.Uint16(b[i:])
	}
	binary.LittleEndian.PutUint16(b[28:], -sum)
}
