// Package module loads kernel modules: for the hardware that is there
// (coldplug), for what the kernel asks for itself (as /sbin/modprobe), and by name.
package module

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Index answers which modules serve an alias and which belong together.
type Index struct {
	// by the part of the pattern before the first colon, or all of it
	aliases map[string][]alias
	soft    map[string][]string
	names   map[string]bool
}

type alias struct{ pattern, module string }

// Read loads the index of a modules folder: modules.alias, modules.softdep,
// modules.dep and modules.builtin.
func Read(fsys fs.FS) (*Index, error) {
	x := &Index{aliases: map[string][]alias{}, soft: map[string][]string{}, names: map[string]bool{}}
	for _, f := range []struct {
		name     string
		required bool
		line     func(string)
	}{
		{"modules.dep", true, x.depLine},
		{"modules.builtin", false, x.depLine},
		{"modules.alias", true, x.aliasLine},
		{"modules.softdep", false, x.softLine},
	} {
		r, err := fsys.Open(f.name)
		if errors.Is(err, fs.ErrNotExist) && !f.required {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read module index: %w", err)
		}
		err = lines(r, f.line)
		r.Close()
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", f.name, err)
		}
	}
	return x, nil
}

func lines(r io.Reader, line func(string)) error {
	s := bufio.NewScanner(r)
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		if t := strings.TrimSpace(s.Text()); t != "" && t[0] != '#' {
			line(t)
		}
	}
	return s.Err()
}

// Canonical is the one spelling of a module's name.
func Canonical(name string) string { return strings.ReplaceAll(name, "-", "_") }

func (x *Index) depLine(l string) {
	file, _, _ := strings.Cut(l, ":")
	base, _, _ := strings.Cut(filepath.Base(file), ".ko")
	x.names[Canonical(base)] = true
}

func (x *Index) aliasLine(l string) {
	f := strings.Fields(l)
	if len(f) != 3 || f[0] != "alias" {
		return
	}
	x.aliases[bus(f[1])] = append(x.aliases[bus(f[1])], alias{f[1], Canonical(f[2])})
}

// bus is what a pattern and all that it matches start with.
func bus(s string) string {
	head, _, found := strings.Cut(s, ":")
	if !found || strings.ContainsAny(head, "*?[") {
		return ""
	}
	return head
}

func (x *Index) softLine(l string) {
	f := strings.Fields(l)
	if len(f) < 3 || f[0] != "softdep" {
		return
	}
	name := Canonical(f[1])
	for _, w := range f[2:] {
		if w != "pre:" && w != "post:" {
			x.soft[name] = append(x.soft[name], w)
		}
	}
}

// Resolve names the modules that serve a module name or an alias, sorted.
func (x *Index) Resolve(name string) []string {
	if x.names[Canonical(name)] {
		return []string{Canonical(name)}
	}
	found := map[string]bool{}
	groups := []string{""}
	if b := bus(name); b != "" {
		groups = append(groups, b)
	}
	for _, b := range groups {
		for _, a := range x.aliases[b] {
			if Match(a.pattern, name) {
				found[a.module] = true
			}
		}
	}
	out := make([]string, 0, len(found))
	for m := range found {
		out = append(out, m)
	}
	slices.Sort(out)
	return out
}

// Soft lists the modules that should be there too, though nothing links them.
func (x *Index) Soft(module string) []string {
	var out []string
	for _, name := range x.soft[Canonical(module)] {
		out = append(out, x.Resolve(name)...)
	}
	return out
}

// Match is a shell pattern match in which * and ? take every byte, slashes
// too: aliases of firmware tables hold them.
func Match(pattern, s string) bool {
	// backtrack to the last star only: that is enough for a single star's greed
	star, mark := -1, 0
	p, i := 0, 0
	for i < len(s) {
		if p < len(pattern) {
			switch c := pattern[p]; c {
			case '*':
				star, mark = p, i
				p++
				continue
			case '?':
				p++
				i++
				continue
			case '[':
				if ok, next := class(pattern, p, s[i]); next > 0 {
					if ok {
						p = next
						i++
						continue
					}
					break
				}
				fallthrough
			default:
				if c == s[i] {
					p++
					i++
					continue
				}
			}
		}
		if star < 0 {
			return false
		}
		mark++
		p, i = star+1, mark
	}
	for p < len(pattern) && pattern[p] == '*' {
		p++
	}
	return p == len(pattern)
}

// class matches c against the set at pattern[at]; next is 0 where it has no end.
func class(pattern string, at int, c byte) (ok bool, next int) {
	end := strings.IndexByte(pattern[at:], ']')
	if end < 0 {
		return false, 0
	}
	set := pattern[at+1 : at+end]
	not := strings.HasPrefix(set, "^") || strings.HasPrefix(set, "!")
	if not {
		set = set[1:]
	}
	for k := 0; k < len(set); k++ {
		if k+2 < len(set) && set[k+1] == '-' {
			ok = ok || set[k] <= c && c <= set[k+2]
			k += 2
			continue
		}
		ok = ok || set[k] == c
	}
	return ok != not, at + end + 1
}

// Loader loads modules once each.
type Loader struct {
	index *Index
	load  func(module string) error
	tried map[string]error
	seen  map[string]bool
}

// NewLoader uses load for one module and what it links; it is not safe for
// concurrent use.
func NewLoader(index *Index, load func(module string) error) *Loader {
	return &Loader{index: index, load: load, tried: map[string]error{}, seen: map[string]bool{}}
}

// Load loads what a module name or alias stands for. What only should be there
// as well may fail.
func (l *Loader) Load(name string) error {
	modules := l.index.Resolve(name)
	if len(modules) == 0 {
		return fmt.Errorf("no module serves %q", name)
	}
	var errs []error
	for _, m := range modules {
		errs = append(errs, l.one(m, 0))
	}
	return errors.Join(errs...)
}

func (l *Loader) one(m string, depth int) error {
	if err, done := l.tried[m]; done {
		return err
	}
	l.tried[m] = nil // a circle of soft dependencies ends here
	if depth < 8 {
		for _, s := range l.index.Soft(m) {
			l.one(s, depth+1)
		}
	}
	err := l.load(m)
	if err != nil {
		err = fmt.Errorf("load module %s: %w", m, err)
	}
	l.tried[m] = err
	return err
}

// Alias loads what serves a device's alias. No module for it is no error: much
// hardware needs none.
func (l *Loader) Alias(modalias string) error {
	if l.seen[modalias] {
		return nil
	}
	l.seen[modalias] = true
	var errs []error
	for _, m := range l.index.Resolve(modalias) {
		errs = append(errs, l.one(m, 0))
	}
	return errors.Join(errs...)
}

// Coldplug loads modules for every device below /sys/devices and repeats while
// that brings new devices, at most eight times. settle waits between rounds.
func (l *Loader) Coldplug(devices fs.FS, settle func()) error {
	var errs []error
	for range 8 {
		before := len(l.seen)
		err := fs.WalkDir(devices, ".", func(p string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || d.Name() != "modalias" {
				return nil // devices come and go while we look
			}
			data, err := fs.ReadFile(devices, p)
			if err != nil {
				return nil
			}
			for line := range strings.SplitSeq(strings.TrimSpace(string(data)), "\n") {
				if line != "" {
					if err := l.Alias(line); err != nil {
						errs = append(errs, err)
					}
				}
			}
			return nil
		})
		if err != nil {
			errs = append(errs, err)
		}
		if len(l.seen) == before {
			break
		}
		settle()
	}
	return errors.Join(errs...)
}

// Folder is where the running kernel's modules lie.
func Folder(release string) string { return filepath.Join("/lib/modules", release) }

// Release is the running kernel's, from /proc.
func Release() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return "", fmt.Errorf("read kernel release: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}
