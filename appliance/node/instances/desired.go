package instances

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"slices"

	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/instance"
)

// Spec is an instance and the runtime that is to run it.
type Spec struct {
	Runtime string `json:"runtime"`
	instance.Spec
}

// entry is an instance that somebody asked for, or asked to be removed.
type entry struct {
	Spec
	// Removing says that the removal was asked for, at this generation.
	Removing bool `json:"removing,omitempty"`
	// Left are the runtimes that it moved away from, until each was seen without
	// it: until then no other one starts it.
	Left []string `json:"left,omitempty"`
}

// grave remembers a removal, so that a late apply does not bring back what is
// older, and what turns up again is removed again.
type grave struct {
	ID         string `json:"id"`
	Generation uint64 `json:"generation"`
}

const (
	// MaxInstances is how many a node takes.
	MaxInstances = 512
	// maxGraves bounds what is remembered of removals; the oldest goes first.
	maxGraves = 1024
	maxConfig = 256 << 10
	maxName   = 253
	maxFile   = MaxInstances*(maxConfig+4<<10) + maxGraves*256
)

var idForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$`)

// check wants what any runtime could be handed. Its errors are invalid-args.
func (s Spec) check() error {
	switch {
	case !idForm.MatchString(s.ID):
		return errs.New(errs.InvalidArgs, "instance id %.80q: want 1 to 64 letters, digits, _ and -", s.ID)
	case !driver.ValidID(s.Runtime):
		return errs.New(errs.InvalidArgs, "runtime %.80q: want a driver's id", s.Runtime)
	case s.Generation == 0:
		return errs.New(errs.InvalidArgs, "generation 0: the first is 1")
	case len(s.Name) > maxName:
		return errs.New(errs.InvalidArgs, "instance name: %d bytes, limit %d", len(s.Name), maxName)
	case len(s.Config) > maxConfig:
		return errs.New(errs.InvalidArgs, "spec_json: %d bytes, limit %d", len(s.Config), maxConfig)
	}
	var object map[string]json.RawMessage
	if json.Unmarshal(s.Config, &object) != nil || object == nil {
		return errs.New(errs.InvalidArgs, "spec_json: want a JSON object")
	}
	return nil
}

// desired is what this node is to run, kept on disk.
type desired struct {
	path    string
	entries map[string]entry
	graves  []grave
}

type desiredFile struct {
	Version   int     `json:"version"`
	Instances []entry `json:"instances"`
	Graves    []grave `json:"removed"`
}

// openDesired reads the file; a damaged one is set aside, and what still runs
// shows up as orphans until the gateway says again what is wanted.
func openDesired(path string) (d *desired, damaged error, err error) {
	d = &desired{path: path, entries: map[string]entry{}}
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return d, nil, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("read desired instances: %w", err)
	}
	f, damaged := parseDesired(data)
	if damaged != nil {
		if _, err := atomicfile.SetAside(path); err != nil {
			return nil, nil, err
		}
		return d, damaged, nil
	}
	for _, e := range f.Instances {
		d.entries[e.ID] = e
	}
	d.graves = f.Graves
	return d, nil, nil
}

func parseDesired(data []byte) (desiredFile, error) {
	var f desiredFile
	if len(data) > maxFile {
		return f, errors.New("the file is too long")
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&f); err != nil {
		return f, err
	}
	if f.Version != 1 {
		return f, fmt.Errorf("version %d: want 1", f.Version)
	}
	if len(f.Instances) > MaxInstances || len(f.Graves) > maxGraves {
		return f, errors.New("it lists too much")
	}
	seen := map[string]bool{}
	for _, e := range f.Instances {
		if err := e.check(); err != nil {
			return f, err
		}
		if seen[e.ID] {
			return f, fmt.Errorf("instance %s is there twice", e.ID)
		}
		seen[e.ID] = true
	}
	return f, nil
}

// save writes what next holds, and takes it over only then.
func (d *desired) save(next *desired) error {
	f := desiredFile{Version: 1, Instances: []entry{}, Graves: next.graves}
	for _, e := range next.entries {
		f.Instances = append(f.Instances, e)
	}
	slices.SortFunc(f.Instances, func(a, b entry) int { return bytes.Compare([]byte(a.ID), []byte(b.ID)) })
	data, err := json.Marshal(f)
	if err != nil {
		return fmt.Errorf("encode desired instances: %w", err)
	}
	if err := atomicfile.Write(d.path, data, 0o600); err != nil {
		return errs.New(errs.NoSpace, "keep desired instances: %v", err)
	}
	d.entries, d.graves = next.entries, next.graves
	return nil
}

func (d *desired) clone() *desired {
	next := &desired{path: d.path, entries: make(map[string]entry, len(d.entries)), graves: slices.Clone(d.graves)}
	for id, e := range d.entries {
		next.entries[id] = e
	}
	return next
}

// grave is the generation at which an instance was removed; 0: never.
func (d *desired) grave(id string) uint64 {
	for _, g := range d.graves {
		if g.ID == id {
			return g.Generation
		}
	}
	return 0
}

func (d *desired) bury(id string, generation uint64) {
	generation = max(generation, d.grave(id))
	d.graves = slices.DeleteFunc(d.graves, func(g grave) bool { return g.ID == id })
	d.graves = append(d.graves, grave{id, generation})
	if n := len(d.graves) - maxGraves; n > 0 {
		d.graves = slices.Delete(d.graves, 0, n)
	}
}

// apply takes a spec in. An older generation never replaces a newer one.
func (d *desired) apply(s Spec) error {
	have, known := d.entries[s.ID]
	switch {
	case known && have.Generation > s.Generation, !known && d.grave(s.ID) >= s.Generation, known && have.Removing && have.Generation >= s.Generation:
		return errs.New(errs.OperationNotAllowed, "generation %d of instance %s is older than %d, which this node knows", s.Generation, s.ID, max(have.Generation, d.grave(s.ID)))
	case known && have.Generation == s.Generation:
		if have.Runtime != s.Runtime || have.Name != s.Name || !sameJSON(have.Config, s.Config) {
			return errs.New(errs.DuplicateMismatch, "generation %d of instance %s came before with other content", s.Generation, s.ID)
		}
		return nil
	case !known && len(d.entries) >= MaxInstances:
		return errs.New(errs.NoSpace, "this node has %d instances, which is all it takes", len(d.entries))
	}
	e := entry{Spec: s}
	if known {
		e.Left = without(have.Left, s.Runtime)
		if have.Runtime != s.Runtime {
			e.Left = append(e.Left, have.Runtime)
		}
	}
	next := d.clone()
	next.entries[s.ID] = e
	return d.save(next)
}

// without is a copy of names that lacks name.
func without(names []string, name string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(n string) bool { return n == name })
}

// let notes that a runtime was seen without instances that had moved away from it.
func (d *desired) let(runtime string, ids []string) error {
	next := d.clone()
	for _, id := range ids {
		e := next.entries[id]
		e.Left = without(e.Left, runtime)
		next.entries[id] = e
	}
	return d.save(next)
}

// sameJSON compares but for white space, which the file does not keep.
func sameJSON(a, b json.RawMessage) bool {
	var x, y bytes.Buffer
	return json.Compact(&x, a) == nil && json.Compact(&y, b) == nil && bytes.Equal(x.Bytes(), y.Bytes())
}

// remove notes that an instance is to go. One that is not known is noted too.
func (d *desired) remove(id string, generation uint64) error {
	have, known := d.entries[id]
	switch {
	case known && have.Generation > generation:
		return errs.New(errs.OperationNotAllowed, "generation %d of instance %s is older than %d, which this node knows", generation, id, have.Generation)
	case known && have.Removing && have.Generation == generation, !known && d.grave(id) >= generation:
		return nil
	}
	next := d.clone()
	if known {
		have.Removing, have.Generation = true, generation
		next.entries[id] = have
	} else {
		next.bury(id, generation)
	}
	return d.save(next)
}

// gone notes that a removal is done.
func (d *desired) gone(id string, generation uint64) error {
	have, known := d.entries[id]
	if !known || !have.Removing || have.Generation != generation {
		return nil
	}
	next := d.clone()
	delete(next.entries, id)
	next.bury(id, generation)
	return d.save(next)
}
