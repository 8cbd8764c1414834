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
	"github.com/better-compute/site-appliance/plugins/driver/schema"
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
	idForm         = regexp.MustCompile(`^[a-z][a-z0-9-]*$`)
	versionForm    = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z.+_-]*$`)
	nameForm       = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9]*$`)
	capabilityForm = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]*$`)
	codeForm       = regexp.MustCompile(`^[a-z][a-z0-9]*(-[a-z0-9]+)*$`)
)

// Bounds of a manifest.
const (
	maxKinds        = 32
	maxCapabilities = 64
	maxOperations   = 256
)

// ValidID reports whether id can name a driver: 1 to 64 lower-case letters,
// digits and hyphens, a letter first. It is the rule wherever an id is read.
func ValidID(id string) bool { return len(id) <= 64 && idForm.MatchString(id) }

// ValidKind reports whether kind can name a kind: 1 to 32 lower-case letters,
// digits and hyphens, a letter first.
func ValidKind(kind string) bool { return len(kind) <= 32 && idForm.MatchString(kind) }

// ValidOperation reports whether operation is <kind>.<operation>: a kind, and 1
// to 64 letters and digits, a letter first.
func ValidOperation(operation string) bool {
	kind, name, _ := strings.Cut(operation, ".")
	return ValidKind(kind) && len(name) <= 64 && nameForm.MatchString(name)
}

func validVersion(version string) bool { return len(version) <= 64 && versionForm.MatchString(version) }

func validCapability(name string) bool { return len(name) <= 64 && capabilityForm.MatchString(name) }

// ValidCode reports whether code is kebab-case.
func ValidCode(code string) bool { return len(code) <= 64 && codeForm.MatchString(code) }

// BuiltIn lists the ids that no plugin may take.
func BuiltIn() []string { return []string{"redfish", "wol", "manual", "ipxe", "image-stream"} }

// Check refuses a manifest that is not well-formed, or whose schema does not
// compile on its own.
func (m Manifest) Check() error {
	if err := m.check(); err != nil {
		return err
	}
	if len(m.ConfigSchema) > 0 {
		if _, err := schema.Read(m.ConfigSchema); err != nil {
			return fmt.Errorf("driver %s: %w", m.ID, err)
		}
	}
	return nil
}

// check is Check without reading the schema.
func (m Manifest) check() error {
	if !ValidID(m.ID) {
		return fmt.Errorf("driver id %q: want 1 to 64 lower-case letters, digits and hyphens, a letter first", clip(m.ID))
	}
	if !validVersion(m.Version) {
		return fmt.Errorf("driver %s: version %q: want 1 to 64 letters, digits, dots, +, _ and -", m.ID, clip(m.Version))
	}
	if len(m.Kinds) == 0 || len(m.Kinds) > maxKinds {
		return fmt.Errorf("driver %s: %d kinds: want 1 to %d", m.ID, len(m.Kinds), maxKinds)
	}
	switch m.RunsOn {
	case "control-plane", "site", "node", "ramdisk":
	default:
		return fmt.Errorf("driver %s: runsOn %q: want control-plane, site, node or ramdisk", m.ID, clip(m.RunsOn))
	}
	for _, l := range []struct {
		name       string
		items      []string
		operations bool
		max        int
		valid      func(string) bool
		want       string
	}{
		{"kind", m.Kinds, false, maxKinds, ValidKind, "1 to 32 lower-case letters, digits and hyphens, a letter first"},
		{"capability", m.Capabilities, false, maxCapabilities, validCapability, "1 to 64 lower-case letters, digits, dots and hyphens"},
		{"retry-safe operation", m.RetrySafe, true, maxOperations, ValidOperation, "<kind>.<operation>"},
		{"stream operation", m.StreamOperations, true, maxOperations, ValidOperation, "<kind>.<operation>"},
	} {
		if len(l.items) > l.max {
			return fmt.Errorf("driver %s: %d entries of %s, limit %d", m.ID, len(l.items), l.name, l.max)
		}
		seen := map[string]bool{}
		for _, item := range l.items {
			if !l.valid(item) {
				return fmt.Errorf("driver %s: %s %q: want %s", m.ID, l.name, clip(item), l.want)
			}
			if seen[item] {
				return fmt.Errorf("driver %s: %s %s is listed twice", m.ID, l.name, item)
			}
			seen[item] = true
			if kind, _, _ := strings.Cut(item, "."); l.operations && !slices.Contains(m.Kinds, kind) {
				return fmt.Errorf("driver %s: %s %s is of a kind that it does not serve", m.ID, l.name, item)
			}
		}
	}
	if len(m.ConfigSchema) > schema.MaxBytes {
		return fmt.Errorf("driver %s: configuration schema: %d bytes, limit %d", m.ID, len(m.ConfigSchema), schema.MaxBytes)
	}
	return nil
}

func (m Manifest) clone() Manifest {
	m.Kinds = slices.Clone(m.Kinds)
	m.ConfigSchema = slices.Clone(m.ConfigSchema)
	m.Capabilities = slices.Clone(m.Capabilities)
	m.RetrySafe = slices.Clone(m.RetrySafe)
	m.StreamOperations = slices.Clone(m.StreamOperations)
	return m
}

// Key names the driver and its version: driver:<id>@<version>.
func (m Manifest) Key() string { return "driver:" + m.ID + "@" + m.Version }

func clip(s string) string { return strings.ToValidUTF8(s[:min(len(s), 80)], "") }

// IsRetrySafe reports whether running the operation twice does no harm.
func (m Manifest) IsRetrySafe(kind, operation string) bool {
	return slices.Contains(m.RetrySafe, kind+"."+operation)
}

// IsStream reports whether the operation carries bytes both ways.
func (m Manifest) IsStream(kind, operation string) bool {
	return len(m.StreamOperations) > 0 && slices.Contains(m.StreamOperations, kind+"."+operation)
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
