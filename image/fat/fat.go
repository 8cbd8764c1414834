// Package fat makes the FAT32 file systems of an image, the same bytes for the
// same files, and reads files back from them.
package fat

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
	"time"

	"github.com/diskfs/go-diskfs/backend"
	"github.com/diskfs/go-diskfs/backend/file"
	"github.com/diskfs/go-diskfs/filesystem/fat32"
)

// File is one file of a new file system. Content must not be empty: firmware
// does not agree on what an empty file looks like.
type File struct {
	Path    string
	Content []byte
}

// Spec is a new file system at an offset of a disk or image.
type Spec struct {
	Start, Size int64
	Label       string
	// Serial is the volume's number; 0 is taken as 1, since checkers complain of 0.
	Serial uint32
	// Time is the time stamp of everything.
	Time  time.Time
	Files []File
}

// Create makes the file system in f, whose bytes there must read as zeros.
func Create(f *os.File, spec Spec) error {
	fs, err := fat32.Create(file.New(f, false), spec.Size, spec.Start, 512, spec.Label, true)
	if err != nil {
		return fmt.Errorf("make FAT %s: %w", spec.Label, err)
	}
	total := int64(0)
	for _, c := range spec.Files {
		total += int64(len(c.Content)) + 1<<16
	}
	if total > spec.Size-spec.Size/64 {
		return fmt.Errorf("make FAT %s: %d bytes of files do not fit into %d", spec.Label, total, spec.Size)
	}
	for _, c := range spec.Files {
		if len(c.Content) == 0 {
			return fmt.Errorf("make FAT %s: %s is empty", spec.Label, c.Path)
		}
		at := ""
		for dir := range strings.SplitSeq(path.Dir(c.Path), "/") {
			if dir == "" || dir == "." {
				continue
			}
			at += "/" + dir
			if err := fs.Mkdir(at[1:]); err != nil {
				return fmt.Errorf("make FAT %s: folder %s: %w", spec.Label, at, err)
			}
		}
		w, err := fs.OpenFile(strings.TrimPrefix(c.Path, "/"), os.O_CREATE|os.O_RDWR)
		if err != nil {
			return fmt.Errorf("make FAT %s: %s: %w", spec.Label, c.Path, err)
		}
		// The whole file at once: the library allocates clusters per call.
		_, err = w.Write(c.Content)
		if cerr := w.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			return fmt.Errorf("make FAT %s: write %s: %w", spec.Label, c.Path, err)
		}
	}
	if err := finish(f, spec); err != nil {
		return fmt.Errorf("make FAT %s: %w", spec.Label, err)
	}
	return nil
}

// ReadFile reads one file of the file system at start.
func ReadFile(r io.ReaderAt, start, size int64, name string) ([]byte, error) {
	fs, err := fat32.Read(readOnly(r, start+size), size, start, 512)
	if err != nil {
		return nil, fmt.Errorf("open FAT: %w", err)
	}
	data, err := fs.ReadFile(strings.TrimPrefix(name, "/"))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	return data, nil
}

// List names the files of a folder.
func List(r io.ReaderAt, start, size int64, dir string) ([]string, error) {
	fs, err := fat32.Read(readOnly(r, start+size), size, start, 512)
	if err != nil {
		return nil, fmt.Errorf("open FAT: %w", err)
	}
	entries, err := fs.ReadDir(strings.TrimPrefix(dir, "/"))
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", dir, err)
	}
	var names []string
	for _, e := range entries {
		if !e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

func readOnly(r io.ReaderAt, size int64) backend.Storage {
	return storage{io.NewSectionReader(r, 0, size)}
}

// storage is the library's view of bytes that are only read.
type storage struct{ *io.SectionReader }

func (storage) Close() error                            { return nil }
func (storage) Stat() (os.FileInfo, error)              { return nil, errors.ErrUnsupported }
func (storage) Sys() (*os.File, error)                  { return nil, backend.ErrNotSuitable }
func (storage) Writable() (backend.WritableFile, error) { return nil, backend.ErrIncorrectOpenMode }
func (storage) Path() string                            { return "" }

// volume is what finish needs to know of a FAT32 file system.
type volume struct {
	f             *os.File
	start         int64
	cluster, data int64
	fat           []byte
	clusters      uint32
	date, time    uint32
}

// finish mends what the library leaves: the volume's number, the count of free
// clusters, a ".." that names the root by number, a FAT shorter than its volume, and time
// stamps of now.
func finish(f *os.File, spec Spec) error {
	boot := make([]byte, 512)
	if _, err := f.ReadAt(boot, spec.Start); err != nil {
		return fmt.Errorf("read boot sector: %w", err)
	}
	le := binary.LittleEndian
	sector := int64(le.Uint16(boot[11:]))
	perCluster, reserved := int64(boot[13]), int64(le.Uint16(boot[14:]))
	fatSectors, total := int64(le.Uint32(boot[36:])), int64(le.Uint32(boot[32:]))
	info, backup := int64(le.Uint16(boot[48:])), int64(le.Uint16(boot[50:]))
	le.PutUint32(boot[67:], max(spec.Serial, 1))
	// The library can make the FAT a few entries too short for the volume.
	clusters := min((total-reserved-2*fatSectors)/perCluster, fatSectors*sector/4-2)
	total = min(total, reserved+2*fatSectors+clusters*perCluster)
	le.PutUint32(boot[32:], uint32(total))
	for _, at := range []int64{0, backup} {
		if _, err := f.WriteAt(boot, spec.Start+at*sector); err != nil {
			return fmt.Errorf("write boot sector: %w", err)
		}
	}
	v := volume{f: f, start: spec.Start, cluster: sector * perCluster, data: (reserved + 2*fatSectors) * sector, fat: make([]byte, fatSectors*sector)}
	v.clusters = uint32(clusters)
	if _, err := f.ReadAt(v.fat, spec.Start+reserved*sector); err != nil {
		return fmt.Errorf("read FAT: %w", err)
	}
	t := spec.Time.UTC()
	if t.Year() < 1980 || t.Year() > 2107 {
		t = time.Date(1980, 1, 1, 0, 0, 0, 0, time.UTC)
	}
	v.date = uint32(t.Year()-1980)<<9 | uint32(t.Month())<<5 | uint32(t.Day())
	v.time = uint32(t.Hour())<<11 | uint32(t.Minute())<<5 | uint32(t.Second())/2
	if err := v.walk(2, 0); err != nil {
		return err
	}
	free, next := uint32(0), uint32(0)
	for c := uint32(2); c < v.clusters+2; c++ {
		if le.Uint32(v.fat[4*c:])&0x0fffffff == 0 {
			free++
			if next == 0 {
				next = c
			}
		}
	}
	fsinfo := make([]byte, 512)
	if _, err := f.ReadAt(fsinfo, spec.Start+info*sector); err != nil {
		return fmt.Errorf("read FSInfo: %w", err)
	}
	le.PutUint32(fsinfo[488:], free)
	le.PutUint32(fsinfo[492:], next)
	for _, at := range []int64{info, backup + info} {
		if _, err := f.WriteAt(fsinfo, spec.Start+at*sector); err != nil {
			return fmt.Errorf("write FSInfo: %w", err)
		}
	}
	return nil
}

// walk goes through the folder that starts at cluster.
func (v *volume) walk(cluster uint32, depth int) error {
	if depth > 16 {
		return errors.New("folders are too deep")
	}
	le := binary.LittleEndian
	var below []uint32
	buf := make([]byte, v.cluster)
	for steps := uint32(0); cluster >= 2 && cluster < v.clusters+2; steps++ {
		if steps > v.clusters {
			return errors.New("a folder's cluster chain has no end")
		}
		at := v.start + v.data + int64(cluster-2)*v.cluster
		if _, err := v.f.ReadAt(buf, at); err != nil {
			return fmt.Errorf("read folder: %w", err)
		}
		for e := buf; len(e) >= 32 && e[0] != 0; e = e[32:] {
			attr := e[11]
			if e[0] == 0xe5 || attr == 0x0f {
				continue
			}
			e[13] = 0
			for _, field := range []struct {
				at    int
				value uint32
			}{{14, v.time}, {16, v.date}, {18, v.date}, {22, v.time}, {24, v.date}} {
				le.PutUint16(e[field.at:], uint16(field.value))
			}
			if attr&0x10 == 0 {
				continue
			}
			first := uint32(le.Uint16(e[20:]))<<16 | uint32(le.Uint16(e[26:]))
			switch {
			case string(e[:2]) == "..":
				if first == 2 {
					le.PutUint16(e[20:], 0)
					le.PutUint16(e[26:], 0)
				}
			case e[0] != '.':
				below = append(below, first)
			}
		}
		if _, err := v.f.WriteAt(buf, at); err != nil {
			return fmt.Errorf("write folder: %w", err)
		}
		cluster = le.Uint32(v.fat[4*cluster:]) & 0x0fffffff
	}
	for _, c := range below {
		if err := v.walk(c, depth+1); err != nil {
			return err
		}
	}
	return nil
}

// Wipe makes the range read as zeros again, as Create wants it.
func Wipe(f *os.File, start, size int64) error {
	zero := make([]byte, 1<<20)
	for at := start; at < start+size; {
		n := min(int64(len(zero)), start+size-at)
		if _, err := f.WriteAt(zero[:n], at); err != nil {
			return fmt.Errorf("wipe: %w", err)
		}
		at += n
	}
	return nil
}
