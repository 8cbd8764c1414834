// Package customize puts a site's configuration into a copy of a box image,
// without rebuilding anything.
package customize

import (
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/image/fat"
	"github.com/better-compute/site-appliance/image/gpt"
	"github.com/better-compute/site-appliance/image/layout"
)

// joinPattern is the form of a join string; the gateway judges the rest.
var joinPattern = regexp.MustCompile(`^bc1\.[A-Za-z0-9_-]{16,}$`)

// ParseJoin takes a join string as a file or a pipe gives it.
func ParseJoin(text []byte) (string, error) {
	join := strings.TrimSpace(string(text))
	if join == "" {
		return "", errors.New("there is none: the input is empty")
	}
	if len(join) > 4096 || !joinPattern.MatchString(join) {
		return "", errors.New(`this is not a join string: it starts with "bc1." and is one long word, as "site add" printed it`)
	}
	return join, nil
}

// Configuration is the text of a site.toml: base with the join string in it.
// An empty join leaves base as it is.
func Configuration(base []byte, join string) ([]byte, error) {
	if join == "" {
		return base, nil
	}
	var out []string
	// A key of the top level has to stand before the first table.
	done := false
	table := false
	line := fmt.Sprintf("join = %q", join)
	for l := range strings.SplitSeq(strings.TrimRight(string(base), "\n"), "\n") {
		t := strings.TrimSpace(l)
		table = table || strings.HasPrefix(t, "[")
		key, _, isKey := strings.Cut(t, "=")
		key = strings.TrimSpace(key)
		if !table && isKey && (key == "join" || key == "join_file") {
			return nil, fmt.Errorf("the configuration has %s already: take it out, or give no join string", key)
		}
		if table && !done {
			out = append(out, line, "")
			done = true
		}
		out = append(out, l)
	}
	if !done {
		out = append(out, line)
	}
	return []byte(strings.Join(out, "\n") + "\n"), nil
}

// Read gives the image's present configuration.
func Read(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open image: %w", err)
	}
	defer f.Close()
	start, size, _, err := find(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return fat.ReadFile(f, start, size, layout.ConfigFile)
}

// find locates the configuration partition.
func find(f *os.File) (start, size int64, serial uint32, err error) {
	st, err := f.Stat()
	if err != nil {
		return 0, 0, 0, fmt.Errorf("look at image: %w", err)
	}
	t, err := gpt.Read(f, uint64(st.Size()), layout.Sector)
	if err != nil {
		return 0, 0, 0, err
	}
	p, ok := t.Find(layout.TypeBasic, layout.ConfigName)
	if !ok {
		return 0, 0, 0, fmt.Errorf("no partition %q: this is not a box image", layout.ConfigName)
	}
	return int64(p.First) * layout.Sector, int64(p.Last-p.First+1) * layout.Sector, layout.Partition{ID: p.ID}.Serial(), nil
}

// Image copies the image at from to the file to, sparsely, and writes config
// as its site.toml. The copy holds a secret: only its owner may read it. It
// appears under its name when it is complete.
func Image(from, to string, config []byte, when time.Time) error {
	if len(config) == 0 {
		return errors.New("customize: the configuration is empty")
	}
	in, err := os.Open(from)
	if err != nil {
		return fmt.Errorf("open image: %w", err)
	}
	defer in.Close()
	start, size, serial, err := find(in)
	if err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}
	if a, err := os.Stat(to); err == nil {
		if b, err := in.Stat(); err == nil && os.SameFile(a, b) {
			return errors.New("customize: the copy would overwrite the image")
		}
		if !a.Mode().IsRegular() {
			return fmt.Errorf("customize: %s is not a file: use image flash for a device", to)
		}
	}
	// A file of its own: one that is there already may be open to others.
	tmp := to + ".tmp"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("make copy: %w", err)
	}
	out, err := os.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("make copy: %w", err)
	}
	defer os.Remove(tmp)
	defer out.Close()
	if err := CopySparse(out, in); err != nil {
		return fmt.Errorf("copy image: %w", err)
	}
	if err := fat.Wipe(out, start, size); err != nil {
		return err
	}
	err = fat.Create(out, fat.Spec{Start: start, Size: size, Label: layout.ConfigLabel, Serial: serial, Time: when,
		Files: []fat.File{{Path: layout.ConfigFile, Content: config}}})
	if err != nil {
		return err
	}
	if err := out.Sync(); err != nil {
		return fmt.Errorf("sync copy: %w", err)
	}
	if err := os.Rename(out.Name(), to); err != nil {
		return fmt.Errorf("make copy: %w", err)
	}
	return nil
}

// CopySparse copies what in holds and leaves its holes out.
func CopySparse(out, in *os.File) error {
	st, err := in.Stat()
	if err != nil {
		return err
	}
	if err := out.Truncate(st.Size()); err != nil {
		return err
	}
	for at := int64(0); at < st.Size(); {
		data, err := in.Seek(at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // only a hole is left
		}
		if err != nil {
			return err
		}
		hole, err := in.Seek(data, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		if _, err := io.Copy(io.NewOffsetWriter(out, data), io.NewSectionReader(in, data, hole-data)); err != nil {
			return err
		}
		at = hole
	}
	return nil
}
