package isoclass

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf16"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

const (
	sector = 2048
	// Bounds of what is read of one image.
	maxRead        = 32 << 20
	maxDirectory   = 2 << 20
	maxNames       = 20_000
	maxDepth       = 8
	maxDescriptors = 32
	// slack is what writers pad an image by and others cut off again.
	slack = 150 * sector
)

// disc reads an image, so much of it and no more.
type disc struct {
	r    io.ReaderAt
	size int64
	left int64
}

var errMuch = errors.New("it has more in it than is looked at")

// at reads n bytes.
func (d *disc) at(off, n int64) ([]byte, error) {
	switch {
	case off < 0 || n < 0 || off > d.size || n > d.size-off:
		return nil, fmt.Errorf("%d bytes at %d lie outside of it", n, off)
	case n > d.left:
		return nil, errMuch
	}
	d.left -= n
	b := make([]byte, n)
	if _, err := d.r.ReadAt(b, off); err != nil && err != io.EOF {
		return nil, err
	}
	return b, nil
}

// extent is where a file or directory lies.
type extent struct {
	lba, size uint32
}

func (d *disc) extent(e extent, most int64) ([]byte, error) {
	if int64(e.size) > most {
		return nil, fmt.Errorf("a directory of %d bytes is longer than %d", e.size, most)
	}
	return d.at(int64(e.lba)*sector, int64(e.size))
}

// volumes are what the descriptors say.
type volumes struct {
	label        string
	root, joliet extent
	catalog      uint32 // of El Torito; 0: none
	udf          bool
}

// volumes reads the descriptors (ECMA-119, 8).
func (d *disc) volumes() (v volumes, err error) {
	none := errs.New(errs.InvalidArgs, "it is no ISO 9660 image: there is no volume descriptor at byte %d", 16*sector)
	primary := false
	for i := range int64(maxDescriptors) {
		b, err := d.at((16+i)*sector, sector)
		if err != nil {
			if i == 0 {
				return v, none
			}
			break
		}
		if id := string(b[1:6]); id != "CD001" {
			switch {
			case i == 0:
				return v, none
			case id == "BEA01" || id == "NSR02" || id == "NSR03" || id == "TEA01":
				v.udf = true
				continue
			}
			break
		}
		switch b[0] {
		case 0:
			if bytes.HasPrefix(b[7:], []byte("EL TORITO SPECIFICATION")) {
				v.catalog = binary.LittleEndian.Uint32(b[0x47:])
			}
		case 1:
			if primary {
				continue
			}
			primary = true
			if bs := binary.LittleEndian.Uint16(b[128:]); bs != sector {
				return v, errs.New(errs.InvalidArgs, "its blocks have %d bytes; only %d are read", bs, sector)
			}
			if says := int64(binary.LittleEndian.Uint32(b[80:])) * sector; says > d.size+slack {
				return v, errs.New(errs.InvalidArgs, "it is not whole: it says that it has %d bytes, and has %d", says, d.size)
			}
			v.label = strings.TrimRight(string(b[40:72]), " \x00")
			v.root = extentOf(b[156:])
		case 2:
			// Joliet, by its escape sequences.
			if e := string(b[88:91]); e == "%/@" || e == "%/C" || e == "%/E" {
				v.joliet = extentOf(b[156:])
			}
		}
	}
	if !primary {
		return v, errs.New(errs.InvalidArgs, "it is no ISO 9660 image: there is no primary volume descriptor")
	}
	return v, nil
}

func extentOf(record []byte) extent {
	return extent{binary.LittleEndian.Uint32(record[2:]), binary.LittleEndian.Uint32(record[10:])}
}

// The platforms of a boot catalog.
const (
	platformBIOS = 0
	platformEFI  = 0xef
)

// bootEntry is one bootable entry of the catalog.
type bootEntry struct {
	platform byte
	emulates bool
}

// catalog reads the boot catalog's first sector, which has room for 64 entries (El
// Torito, 2).
func (d *disc) catalog(lba uint32) ([]bootEntry, error) {
	if lba == 0 {
		return nil, nil
	}
	b, err := d.at(int64(lba)*sector, sector)
	if err != nil {
		return nil, err
	}
	sum := uint16(0)
	for i := 0; i < 32; i += 2 {
		sum += binary.LittleEndian.Uint16(b[i:])
	}
	if b[0] != 1 || b[30] != 0x55 || b[31] != 0xaa || sum != 0 {
		return nil, errors.New("its first entry is damaged")
	}
	var out []bootEntry
	add := func(e []byte, platform byte) {
		if e[0] == 0x88 {
			out = append(out, bootEntry{platform, e[1]&0xf != 0})
		}
	}
	add(b[32:64], b[1])
	for off := 64; off+32 <= len(b); {
		head := b[off : off+32]
		off += 32
		if head[0] != 0x90 && head[0] != 0x91 {
			break
		}
		for n := binary.LittleEndian.Uint16(head[2:]); n > 0 && off+32 <= len(b); n-- {
			e := b[off : off+32]
			off += 32
			add(e, head[1])
			for more := e[1]&0x20 != 0; more && off+32 <= len(b) && b[off] == 0x44; off += 32 {
				more = b[off+1]&0x20 != 0
			}
		}
		if head[0] == 0x91 {
			break
		}
	}
	return out, nil
}

// tree is what an image holds: paths in lower case, folders with a slash at the end.
type tree struct {
	files map[string]extent
	dirs  map[string]bool
	whole bool
}

func (t tree) has(name string) bool { _, ok := t.files[name]; return ok }
func (t tree) dir(name string) bool { return t.dirs[name] }

// tree walks the folders, those nearer to the root first. What it found is good with
// an error too.
func (d *disc) tree(v volumes) (tree, error) {
	t := tree{files: map[string]extent{}, dirs: map[string]bool{}}
	root, joliet := v.root, false
	records, err := d.directory(root, false)
	if err == nil && v.joliet.size > 0 && !rockRidge(records) {
		if long, jerr := d.directory(v.joliet, true); jerr == nil {
			root, joliet, records = v.joliet, true, long
		}
	}
	if err != nil {
		return t, err
	}
	type folder struct {
		path  string
		depth int
		at    extent
	}
	todo := []folder{{"", 0, root}}
	t.whole = true
	names := 0
	for first := true; len(todo) > 0; first = false {
		f := todo[0]
		todo = todo[1:]
		if !first {
			if records, err = d.directory(f.at, joliet); err != nil {
				t.whole = false
				return t, fmt.Errorf("folder %.80q: %w", f.path, err)
			}
		}
		for _, r := range records {
			if names++; names > maxNames {
				t.whole = false
				return t, nil
			}
			name := f.path + strings.ToLower(r.name)
			if !r.dir {
				t.files[name] = r.at
				continue
			}
			t.dirs[name+"/"] = true
			if f.depth+1 >= maxDepth { // a folder that is in itself, too
				t.whole = false
				continue
			}
			todo = append(todo, folder{name + "/", f.depth + 1, r.at})
		}
	}
	return t, nil
}

// record is one file or folder of a directory.
type record struct {
	name  string
	at    extent
	dir   bool
	rocky bool // the name is Rock Ridge's
}

func rockRidge(records []record) bool {
	for _, r := range records {
		if r.rocky {
			return true
		}
	}
	return false
}

// directory reads a directory's records (ECMA-119, 9.1).
func (d *disc) directory(e extent, joliet bool) ([]record, error) {
	b, err := d.extent(e, maxDirectory)
	if err != nil {
		return nil, err
	}
	var out []record
	for off := 0; off < len(b); {
		n := int(b[off])
		if n == 0 { // the rest of the sector is empty
			off = (off/sector + 1) * sector
			continue
		}
		if n < 34 || off+n > len(b) || 33+int(b[off+32]) > n {
			return nil, fmt.Errorf("a record at byte %d of a directory is damaged", off)
		}
		r := b[off : off+n]
		off += n
		id := r[33 : 33+int(r[32])]
		if len(id) == 1 && id[0] <= 1 { // the directory itself, and its parent
			continue
		}
		one := record{at: extentOf(r), dir: r[25]&2 != 0}
		switch name, ok := "", false; {
		case joliet:
			one.name = ucs2(id)
		default:
			if name, ok = rockRidgeName(r[min(n, 33+len(id)+(len(id)+1)%2):]); ok {
				one.name, one.rocky = name, true
			} else {
				one.name = string(id)
			}
		}
		if !one.rocky && !one.dir {
			one.name, _, _ = strings.Cut(one.name, ";")
			one.name = strings.TrimSuffix(one.name, ".")
		}
		if one.name == "" || strings.ContainsAny(one.name, "/\x00") {
			return nil, errors.New("a file has no name, or one with a slash in it")
		}
		out = append(out, one)
	}
	return out, nil
}

// rockRidgeName is what the NM entries of a record's system use area say (RRIP
// 1.12, 4.1.4). Names that go on in a continuation area stay ISO 9660's.
func rockRidgeName(area []byte) (name string, ok bool) {
	for len(area) >= 4 {
		n := int(area[2])
		if n < 4 || n > len(area) {
			break
		}
		if string(area[:2]) == "NM" && n >= 5 {
			name, ok = name+string(area[5:n]), true
		}
		area = area[n:]
	}
	return name, ok && name != ""
}

// ucs2 decodes big-endian UCS-2.
func ucs2(b []byte) string {
	var u []uint16
	for ; len(b) >= 2; b = b[2:] {
		u = append(u, binary.BigEndian.Uint16(b))
	}
	return string(utf16.Decode(u))
}

// signed looks whether the first of the image's UEFI programs has a signature. It
// does not verify one: firmware does.
func (d *disc) signed(t tree) (signed, known bool) {
	for _, name := range []string{"efi/boot/bootx64.efi", "efi/boot/bootaa64.efi", "efi/boot/bootia32.efi"} {
		e, ok := t.files[name]
		if !ok {
			continue
		}
		e.size = min(e.size, 4<<10)
		b, err := d.extent(e, 4<<10)
		if err != nil || len(b) < 0x40 || string(b[:2]) != "MZ" {
			return false, false
		}
		// The certificate table's entry of the optional header's data directories.
		at := int64(binary.LittleEndian.Uint32(b[0x3c:]))
		if at+24+2 > int64(len(b)) || string(b[at:at+4]) != "PE\x00\x00" {
			return false, false
		}
		directory := at + 24 + 112
		if binary.LittleEndian.Uint16(b[at+24:]) == 0x10b {
			directory -= 16
		}
		directory += 4 * 8
		if directory+8 > int64(len(b)) {
			return false, false
		}
		return binary.LittleEndian.Uint32(b[directory+4:]) > 0, true
	}
	return false, false
}
