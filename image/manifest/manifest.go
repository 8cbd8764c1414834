// Package manifest is the record of a build: its files with sizes and digests,
// and what they were made of.
package manifest

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
)

// Manifest is manifest.json.
type Manifest struct {
	Board   string `json:"board"`
	Version string `json:"version"`
	// Built is the time that the build carries, not when it ran.
	Built time.Time `json:"built"`
	Arch  string    `json:"arch"`
	// Kernel is the release that uname shows.
	Kernel string `json:"kernel"`
	// Release images have no rescue entry.
	Release bool   `json:"release"`
	Files   []File `json:"files"`
	// Parts are sizes in bytes of what the files are made of.
	Parts    map[string]int64 `json:"parts"`
	Packages []Package        `json:"packages"`
	Go       string           `json:"go"`
}

// File is one file of the build, beside the manifest.
type File struct {
	Name   string `json:"name"`
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
	// UnpackedSize and UnpackedSHA256 are there for compressed files.
	UnpackedSize   int64  `json:"unpacked_size,omitempty"`
	UnpackedSHA256 string `json:"unpacked_sha256,omitempty"`
}

// Package is a Debian package that bytes came from.
type Package struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	// SHA256 is the package file's, where the build unpacked one.
	SHA256 string `json:"sha256,omitempty"`
	// Locked says whether it is the one that the board's lock file names.
	Locked bool `json:"locked,omitempty"`
}

// Describe reads a file of the build.
func Describe(dir, name string) (File, error) {
	f, err := os.Open(filepath.Join(dir, name))
	if err != nil {
		return File{}, fmt.Errorf("describe %s: %w", name, err)
	}
	defer f.Close()
	h := sha256.New()
	n, err := io.Copy(h, f)
	if err != nil {
		return File{}, fmt.Errorf("describe %s: %w", name, err)
	}
	return File{Name: name, Size: n, SHA256: hex.EncodeToString(h.Sum(nil))}, nil
}

// Store writes the manifest, sorted.
func (m *Manifest) Store(path string) error {
	slices.SortFunc(m.Files, func(a, b File) int { return strings.Compare(a.Name, b.Name) })
	slices.SortFunc(m.Packages, func(a, b Package) int { return strings.Compare(a.Name, b.Name) })
	data, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return fmt.Errorf("encode manifest: %w", err)
	}
	return atomicfile.Write(path, append(data, '\n'), 0o644)
}

// Load reads a manifest strictly.
func Load(path string) (*Manifest, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read manifest: %w", err)
	}
	return Parse(data)
}

// Parse is Load on bytes.
func Parse(data []byte) (*Manifest, error) {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	var m Manifest
	if err := dec.Decode(&m); err != nil {
		return nil, fmt.Errorf("parse manifest: %w", err)
	}
	for _, f := range m.Files {
		if !filepath.IsLocal(f.Name) || f.Size < 0 || len(f.SHA256) != 64 {
			return nil, fmt.Errorf("parse manifest: file %q is not well described", f.Name)
		}
	}
	return &m, nil
}

// Verify compares the files in dir with the manifest. The error names every
// file that differs.
func (m *Manifest) Verify(dir string) error {
	var errs []error
	for _, want := range m.Files {
		got, err := Describe(dir, want.Name)
		switch {
		case err != nil:
			errs = append(errs, err)
		case got.Size != want.Size:
			errs = append(errs, fmt.Errorf("%s has %d bytes, the manifest says %d", want.Name, got.Size, want.Size))
		case got.SHA256 != want.SHA256:
			errs = append(errs, fmt.Errorf("%s has digest %s, the manifest says %s", want.Name, got.SHA256, want.SHA256))
		}
	}
	return errors.Join(errs...)
}
