// Package archive gathers the files of an initramfs and writes them as a cpio
// archive: the same files give the same bytes.
package archive

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"
	"github.com/u-root/mkuimage/cpio"
)

// Tree is a file tree in the making. Paths have no leading slash; folders on
// the way are made with mode 0755.
type Tree struct {
	records map[string]cpio.Record
}

// New is a tree that holds only its root. Mode 0755 matters: a root of 0700
// shuts out every plugin that runs under its own uid.
func New() *Tree {
	t := &Tree{records: map[string]cpio.Record{}}
	t.records["."] = cpio.Directory(".", 0o755)
	return t
}

func clean(name string) string { return path.Clean(strings.TrimPrefix(name, "/")) }

func (t *Tree) parents(name string) {
	for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
		if _, ok := t.records[dir]; !ok {
			t.records[dir] = cpio.Directory(dir, 0o755)
		}
	}
}

// Dir adds a folder.
func (t *Tree) Dir(name string, mode fs.FileMode) {
	name = clean(name)
	t.parents(name)
	r := cpio.Directory(name, uint64(mode.Perm()))
	if mode&fs.ModeSticky != 0 {
		r.Mode |= 0o1000
	}
	t.records[name] = r
}

// File adds a file.
func (t *Tree) File(name string, content []byte, mode fs.FileMode) {
	name = clean(name)
	t.parents(name)
	t.records[name] = cpio.StaticFile(name, string(content), uint64(mode.Perm()))
}

// Copy adds a file of the build machine.
func (t *Tree) Copy(name, from string, mode fs.FileMode) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return fmt.Errorf("add %s: %w", name, err)
	}
	t.File(name, data, mode)
	return nil
}

// CopyDir adds every file below dir under the folder name, mode 0644.
func (t *Tree) CopyDir(name, dir string) error {
	return filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		return t.Copy(path.Join(name, filepath.ToSlash(rel)), p, 0o644)
	})
}

// Link adds a symbolic link.
func (t *Tree) Link(name, target string) {
	name = clean(name)
	t.parents(name)
	t.records[name] = cpio.Symlink(name, target)
}

// Device adds a character device.
func (t *Tree) Device(name string, mode fs.FileMode, major, minor uint64) {
	name = clean(name)
	t.parents(name)
	t.records[name] = cpio.CharDev(name, uint64(mode.Perm()), major, minor)
}

// Has reports whether there is such a path.
func (t *Tree) Has(name string) bool {
	_, ok := t.records[clean(name)]
	return ok
}

// Cpio is the archive, sorted by name, padded so that another archive may be
// appended to it.
func (t *Tree) Cpio() ([]byte, error) {
	names := make([]string, 0, len(t.records))
	for name := range t.records {
		names = append(names, name)
	}
	slices.Sort(names)
	var buf bytes.Buffer
	w := cpio.Newc.Writer(&buf)
	for _, name := range names {
		if err := w.WriteRecord(cpio.MakeReproducible(t.records[name])); err != nil {
			return nil, fmt.Errorf("write %s to archive: %w", name, err)
		}
	}
	if err := cpio.WriteTrailer(w); err != nil {
		return nil, fmt.Errorf("end archive: %w", err)
	}
	return pad(buf.Bytes()), nil
}

// window is what the kernel's decompressor has to keep.
const window = 8 << 20

// Compress packs an archive with zstd as the kernel reads it, padded so that
// another archive may be appended.
func Compress(data []byte, level zstd.EncoderLevel) ([]byte, error) {
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(level), zstd.WithWindowSize(window), zstd.WithEncoderConcurrency(1))
	if err != nil {
		return nil, fmt.Errorf("set up zstd: %w", err)
	}
	return pad(enc.EncodeAll(data, nil)), nil
}

func pad(b []byte) []byte { return append(b, make([]byte, (4-len(b)%4)%4)...) }
