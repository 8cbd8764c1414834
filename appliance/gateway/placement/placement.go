// Package placement turns what an agent advertises into labels, and judges what
// a caller asks of them.
package placement

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// Any is the value that matches every value of a label.
const Any = "*"

// What the gateway labels agents with begins with these.
const (
	driverPrefix     = "bc.dev/driver."
	kindPrefix       = "bc.dev/driver-kind."
	capabilityPrefix = "bc.dev/cap."
)

// Bounds of what one agent's labels hold. What is over them is left out, from
// the end of the sorted names, so that every Hello of one agent leaves out the same.
const (
	MaxDrivers      = 64
	MaxKinds        = 32 // per driver
	MaxCapabilities = 128
)

var (
	versionForm    = regexp.MustCompile(`^[!-~]{1,64}$`)
	capabilityForm = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{0,63}$`)
)

// Labels are an agent's labels by what its Hello advertises: each driver with
// its version, each kind that it serves, each capability. Of one driver in two
// versions the highest counts, with the kinds of both. Names that are not
// well-formed are left out.
func Labels(drivers []*agentv1.AdvertisedDriver, capabilities []string) map[string]string {
	versions, kinds := map[string]string{}, map[string]map[string]bool{}
	for _, d := range drivers {
		id, version := d.GetId(), d.GetVersion()
		if !driver.ValidID(id) || !versionForm.MatchString(version) {
			continue
		}
		if have, ok := versions[id]; !ok || cmp.Or(driver.CompareVersions(version, have), cmp.Compare(version, have)) > 0 {
			versions[id] = version
		}
		if kinds[id] == nil {
			kinds[id] = map[string]bool{}
		}
		for _, kind := range d.GetKinds() {
			if driver.ValidKind(kind) {
				kinds[id][kind] = true
			}
		}
	}
	labels := map[string]string{}
	for _, id := range first(maps.Keys(versions), MaxDrivers) {
		labels[driverPrefix+id] = versions[id]
		for _, kind := range first(maps.Keys(kinds[id]), MaxKinds) {
			labels[KindLabel(id, kind)] = "1"
		}
	}
	well := map[string]bool{}
	for _, name := range capabilities {
		if capabilityForm.MatchString(name) {
			well[name] = true
		}
	}
	for _, name := range first(maps.Keys(well), MaxCapabilities) {
		labels[capabilityPrefix+name] = "1"
	}
	return labels
}

func first(names func(yield func(string) bool), n int) []string {
	sorted := slices.Sorted(names)
	return sorted[:min(n, len(sorted))]
}

// KindLabel is the label of a driver that serves a kind.
func KindLabel(id, kind string) string { return kindPrefix + id + "." + kind }

// Kinds are the kinds that labels name for a driver, sorted; nil where they
// name none.
func Kinds(labels map[string]string, id string) []string {
	var kinds []string
	prefix := kindPrefix + id + "."
	for key := range labels {
		if len(key) > len(prefix) && key[:len(prefix)] == prefix {
			kinds = append(kinds, key[len(prefix):])
		}
	}
	slices.Sort(kinds)
	return kinds
}

// Bounds of a request.
const (
	maxWanted = 64
	maxKey    = 256
	maxValue  = 256
)

// Want checks the labels of a request and answers them as the store takes them:
// an empty value stands for any.
func Want(labels map[string]string) (map[string]string, error) {
	if len(labels) > maxWanted {
		return nil, fmt.Errorf("node_labels: at most %d, not %d", maxWanted, len(labels))
	}
	want := map[string]string{}
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		value := labels[key]
		switch {
		case key == "" || len(key) > maxKey:
			return nil, fmt.Errorf("node_labels: a key is empty or has over %d bytes", maxKey)
		case value == "" || len(value) > maxValue:
			return nil, fmt.Errorf("node_labels: %q: the value is empty or has over %d bytes; %q takes any", key, maxValue, Any)
		case value == Any:
			value = ""
		}
		want[key] = value
	}
	return want, nil
}
