// Package driver declares what a driver is: its manifest, its kinds and
// operations, and the context that a call gets.
package driver

import (
	"cmp"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// Manifest says what a driver is and serves. It is data: it never holds a
// configuration or a credential.
type Manifest struct {
	ID      string
	Version string
	// Kinds are lower-case letters, digits and hyphens, 1 to 32 characters.
	Kinds []string
	// RunsOn is control-plane, site, node or ramdisk.
	RunsOn string
	// ConfigSchema is JSON Schema 2020-12; empty: any configuration.
	ConfigSchema json.RawMessage
	Capabilities []string
	// RetrySafe holds "<kind>.<operation>".
	RetrySafe []string
	// StreamOperations holds "<kind>.<operation>".
	StreamOperations []string
}

// DriverError is an error of a driver's own: its code is kebab-case and crosses
// the wire as it is.
type DriverError = errs.Error

// Progress is how far a call is; Total 0 means unknown.
type Progress struct {
	Phase, Message string
	Done, Total    uint64
}

var (
	idForm        = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)
	kindForm      = regexp.MustCompile(`^[a-z][a-z0-9-]{0,31}$`)
	operationForm = regexp.MustCompile(`^[a-z][a-z0-9-]{0,31}\.[a-zA-Z][a-zA-Z0-9]{0,63}$`)
	codeForm      = regexp.MustCompile(`^[a-z][a-z0-9]*(-[a-z0-9]+)*$`)
)

// ValidCode reports whether code is kebab-case.
func ValidCode(code string) bool { return len(code) <= 64 && codeForm.MatchString(code) }

// BuiltIn lists the ids that no plugin may take.
func BuiltIn() []string { return []string{"redfish", "ipxe", "image-stream"} }

// Check refuses a manifest that is not well-formed.
func (m Manifest) Check() error {
	if !idForm.MatchString(m.ID) {
		return fmt.Errorf("driver id %q: want 1 to 63 lower-case letters, digits and hyphens", clip(m.ID))
	}
	if m.Version == "" || len(m.Version) > 64 {
		return fmt.Errorf("driver %s: version %q: want 1 to 64 characters", m.ID, clip(m.Version))
	}
	if len(m.Kinds) == 0 || len(m.Kinds) > 32 {
		return fmt.Errorf("driver %s: %d kinds: want 1 to 32", m.ID, len(m.Kinds))
	}
	for i, k := range m.Kinds {
		if !kindForm.MatchString(k) {
			return fmt.Errorf("driver %s: kind %q: want 1 to 32 lower-case letters, digits and hyphens", m.ID, clip(k))
		}
		if slices.Contains(m.Kinds[:i], k) {
			return fmt.Errorf("driver %s: kind %s is listed twice", m.ID, k)
		}
	}
	switch m.RunsOn {
	case "control-plane", "site", "node", "ramdisk":
	default:
		return fmt.Errorf("driver %s: runsOn %q: want control-plane, site, node or ramdisk", m.ID, clip(m.RunsOn))
	}
	for _, list := range [][]string{m.RetrySafe, m.StreamOperations} {
		for _, op := range list {
			if !operationForm.MatchString(op) {
				return fmt.Errorf("driver %s: operation %q: want <kind>.<operation>", m.ID, clip(op))
			}
			if kind, _, _ := strings.Cut(op, "."); !slices.Contains(m.Kinds, kind) {
				return fmt.Errorf("driver %s: operation %s is of a kind that it does not serve", m.ID, op)
			}
		}
	}
	if len(m.ConfigSchema) > 0 && !json.Valid(m.ConfigSchema) {
		return fmt.Errorf("driver %s: configuration schema is not JSON", m.ID)
	}
	return nil
}

func clip(s string) string { return s[:min(len(s), 80)] }

// IsRetrySafe reports whether running the operation twice does no harm.
func (m Manifest) IsRetrySafe(kind, operation string) bool {
	return slices.Contains(m.RetrySafe, kind+"."+operation)
}

// Same reports whether two manifests declare the same driver.
func (m Manifest) Same(o Manifest) bool {
	return m.ID == o.ID && m.Version == o.Version && m.RunsOn == o.RunsOn &&
		string(m.ConfigSchema) == string(o.ConfigSchema) && sameSet(m.Kinds, o.Kinds) &&
		sameSet(m.Capabilities, o.Capabilities) && sameSet(m.RetrySafe, o.RetrySafe) &&
		sameSet(m.StreamOperations, o.StreamOperations)
}

func sameSet(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

// CompareVersions orders versions as semantic versioning does: numbers by
// value, and a pre-release before its release. Parts that are no numbers are
// compared as text.
func CompareVersions(a, b string) int {
	a, _, _ = strings.Cut(strings.TrimPrefix(a, "v"), "+")
	b, _, _ = strings.Cut(strings.TrimPrefix(b, "v"), "+")
	aCore, aPre, aHas := strings.Cut(a, "-")
	bCore, bPre, bHas := strings.Cut(b, "-")
	if c := compareParts(aCore, bCore); c != 0 {
		return c
	}
	switch {
	case aHas && !bHas:
		return -1
	case !aHas && bHas:
		return 1
	}
	return compareParts(aPre, bPre)
}

func compareParts(a, b string) int {
	return slices.CompareFunc(strings.Split(a, "."), strings.Split(b, "."), func(x, y string) int {
		nx, ex := strconv.ParseUint(x, 10, 64)
		ny, ey := strconv.ParseUint(y, 10, 64)
		switch {
		case ex == nil && ey == nil:
			return cmp.Compare(nx, ny)
		case ex == nil:
			return -1
		case ey == nil:
			return 1
		}
		return cmp.Compare(x, y)
	})
}
