package driver

import (
	"cmp"
	"slices"
	"sync"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// Registry holds the drivers of a deployment. Its zero value is empty and ready.
type Registry struct {
	mu      sync.RWMutex
	drivers map[string]*Definition
}

// Register adds a driver; a second one of its id and version is invalid-config.
func (r *Registry) Register(d *Definition) error {
	if d == nil {
		return errs.New(errs.InvalidConfig, "no driver was given")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, twice := r.drivers[d.Key()]; twice {
		return errs.New(errs.InvalidConfig, "%s is registered twice", d.Key())
	}
	if r.drivers == nil {
		r.drivers = map[string]*Definition{}
	}
	r.drivers[d.Key()] = d
	return nil
}

// List is what the drivers of a kind, or of any if it is empty, declare: by id,
// then version, with kinds, capabilities and operations sorted.
func (r *Registry) List(kind string) []Manifest {
	r.mu.RLock()
	defer r.mu.RUnlock()
	list := []Manifest{}
	for _, d := range r.drivers {
		if kind != "" && !slices.Contains(d.manifest.Kinds, kind) {
			continue
		}
		m := d.Manifest()
		for _, l := range [][]string{m.Kinds, m.Capabilities, m.RetrySafe, m.StreamOperations} {
			slices.Sort(l)
		}
		list = append(list, m)
	}
	slices.SortFunc(list, func(a, b Manifest) int {
		return cmp.Or(cmp.Compare(a.ID, b.ID), CompareVersions(a.Version, b.Version), cmp.Compare(a.Version, b.Version))
	})
	return list
}

// Find is the driver of that id with the highest version that serves the kind,
// or any kind if it is empty.
func (r *Registry) Find(id, kind string) (*Definition, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	var best *Definition
	for _, d := range r.drivers {
		if d.manifest.ID != id || kind != "" && !slices.Contains(d.manifest.Kinds, kind) {
			continue
		}
		if best == nil || cmp.Or(CompareVersions(d.manifest.Version, best.manifest.Version), cmp.Compare(d.manifest.Version, best.manifest.Version)) > 0 {
			best = d
		}
	}
	return best, best != nil
}
