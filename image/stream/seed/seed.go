// Package seed builds the NoCloud file system that tells a freshly written
// machine who it is (cloud-init's NoCloud data source, label CIDATA).
package seed

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path"
	"regexp"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/image/fat"
	"github.com/better-compute/site-appliance/image/layout"
)

// SizeBytes is the file system's size: the least, rounded, that holds the 65,525
// clusters which make a FAT a FAT32 to every reader.
const SizeBytes = 36 << 20

// maxContent bounds all the text of a seed, far below what the file system holds.
const maxContent = 1 << 20

// Seed is what the machine learns.
type Seed struct {
	InstanceID        string
	Hostname          string
	SSHAuthorizedKeys []string
	Files             []File
}

// File is written on the machine at first boot, owned by root.
type File struct {
	Path    string
	Content secret.Value
	// Mode is octal, such as "0600".
	Mode string
}

var (
	instancePattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`)
	labelPattern    = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?$`)
	modePattern     = regexp.MustCompile(`^0[0-7]{3}$`)
)

// Check refuses what a machine would stumble over; errors are invalid-args.
func (s Seed) Check() error {
	if !instancePattern.MatchString(s.InstanceID) {
		return errs.New(errs.InvalidArgs, "seed: instance id %q: want letters, digits, dots, dashes and underscores", s.InstanceID)
	}
	if len(s.Hostname) > 253 {
		return errs.New(errs.InvalidArgs, "seed: the host name is over 253 bytes")
	}
	for label := range strings.SplitSeq(s.Hostname, ".") {
		if !labelPattern.MatchString(label) {
			return errs.New(errs.InvalidArgs, "seed: host name %q is not one (RFC 1123)", s.Hostname)
		}
	}
	total := 0
	for i, key := range s.SSHAuthorizedKeys {
		if strings.TrimSpace(key) == "" || strings.ContainsFunc(key, func(r rune) bool { return r < 0x20 || r == 0x7f }) || !utf8.ValidString(key) {
			return errs.New(errs.InvalidArgs, "seed: SSH key %d is empty or not one line of text", i+1)
		}
		total += len(key)
	}
	for _, f := range s.Files {
		if !path.IsAbs(f.Path) || path.Clean(f.Path) != f.Path || f.Path == "/" {
			return errs.New(errs.InvalidArgs, "seed: file path %q is not absolute and clean", f.Path)
		}
		if !modePattern.MatchString(f.Mode) {
			return errs.New(errs.InvalidArgs, "seed: mode %q of %s: want four octal digits", f.Mode, f.Path)
		}
		if !utf8.Valid(f.Content.Reveal()) {
			return errs.New(errs.InvalidArgs, "seed: %s is not text", f.Path)
		}
		total += len(f.Content.Reveal())
	}
	if total > maxContent {
		return errs.New(errs.InvalidArgs, "seed: %d bytes of text, at most %d fit", total, maxContent)
	}
	return nil
}

// metaData and userData are JSON, which is YAML too and needs no quoting rules of its own.
func (s Seed) metaData() ([]byte, error) {
	return encode(struct {
		InstanceID string `json:"instance-id"`
		Hostname   string `json:"local-hostname"`
	}{s.InstanceID, s.Hostname})
}

type writeFile struct {
	Path        string `json:"path"`
	Content     string `json:"content"`
	Permissions string `json:"permissions"`
	Owner       string `json:"owner"`
}

func (s Seed) userData() ([]byte, error) {
	files := []writeFile{}
	for _, f := range s.Files {
		files = append(files, writeFile{f.Path, string(f.Content.Reveal()), f.Mode, "root:root"})
	}
	keys := s.SSHAuthorizedKeys
	if keys == nil {
		keys = []string{}
	}
	body, err := encode(struct {
		Hostname string      `json:"hostname"`
		Keys     []string    `json:"ssh_authorized_keys"`
		Files    []writeFile `json:"write_files"`
	}{s.Hostname, keys, files})
	return append([]byte("#cloud-config\n"), body...), err
}

func encode(v any) ([]byte, error) {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode seed: %w", err)
	}
	return append(b, '\n'), nil
}

// Build makes the file system's bytes, SizeBytes of them.
func Build(s Seed) ([]byte, error) {
	if err := s.Check(); err != nil {
		return nil, err
	}
	image, err := build(s)
	if err != nil {
		return nil, fmt.Errorf("build the seed: %w", err)
	}
	return image, nil
}

func build(s Seed) (image []byte, err error) {
	meta, err := s.metaData()
	if err != nil {
		return nil, err
	}
	user, err := s.userData()
	if err != nil {
		return nil, err
	}
	// A file in memory: what the library writes on must be one, and the seed
	// holds a secret that no disk of ours should see.
	fd, err := unix.MemfdCreate("seed", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	mem := os.NewFile(uintptr(fd), "seed")
	defer func() { err = errors.Join(err, mem.Close()) }()
	if err := mem.Truncate(SizeBytes); err != nil {
		return nil, err
	}
	err = fat.Create(mem, fat.Spec{Size: SizeBytes, Label: layout.SeedLabel, Serial: crc32.ChecksumIEEE([]byte(s.InstanceID)), Files: []fat.File{
		{Path: "meta-data", Content: meta}, {Path: "user-data", Content: user},
	}})
	if err != nil {
		return nil, err
	}
	image = make([]byte, SizeBytes)
	if _, err := mem.ReadAt(image, 0); err != nil {
		return nil, err
	}
	return image, nil
}
