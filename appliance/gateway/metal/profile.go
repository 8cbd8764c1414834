package metal

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"

	"github.com/better-compute/site-appliance/appliance/gateway/api/apierr"
	"github.com/better-compute/site-appliance/appliance/gateway/secretstore"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/plugins/driver/binding"
)

// HardwareProfile is what machines of one make share.
type HardwareProfile struct {
	Description string
	// Drivers are bound by kind.
	Drivers map[string]binding.Binding
	// BIOS and RAID are JSON objects, nil where there is none: settings and
	// layout that commissioning applies.
	BIOS, RAID json.RawMessage
}

// Options are what a deployment says about its hardware.
type Options struct {
	HardwareProfiles map[string]HardwareProfile
	// BMCDrivers are the operations, "<concern>.<operation>", of BMC drivers that
	// metal does not know by itself.
	BMCDrivers map[string][]string
}

// Metal is what a gateway knows about hardware. It never changes.
type Metal struct{ options Options }

var (
	profileName   = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	operationForm = regexp.MustCompile(`^[a-z][a-z0-9-]{0,31}\.[a-zA-Z][a-zA-Z0-9]{0,63}$`)
)

// Bounds of a hardware profile.
const (
	maxDescription = 1 << 10
	maxLayout      = 64 << 10
	maxOperations  = 256
)

// New checks the options; what is wrong with them is INVALID_CONFIG.
func New(o Options) (*Metal, error) {
	own := Options{HardwareProfiles: map[string]HardwareProfile{}, BMCDrivers: map[string][]string{}}
	for _, name := range slices.Sorted(maps.Keys(o.HardwareProfiles)) {
		p := o.HardwareProfiles[name]
		err := p.check(name)
		if err != nil {
			return nil, apierr.BadConfig("hardware profile %.80q: %v", name, err)
		}
		own.HardwareProfiles[name] = HardwareProfile{Description: p.Description, Drivers: binding.Resolve(p.Drivers), BIOS: slices.Clone(p.BIOS), RAID: slices.Clone(p.RAID)}
	}
	for _, id := range slices.Sorted(maps.Keys(o.BMCDrivers)) {
		operations := o.BMCDrivers[id]
		_, err := binding.New(id, nil)
		switch {
		case err != nil:
		case serves[id] != nil:
			err = fmt.Errorf("metal knows what it serves")
		case len(operations) == 0 || len(operations) > maxOperations:
			err = fmt.Errorf("%d operations: want 1 to %d", len(operations), maxOperations)
		}
		for _, operation := range operations {
			if err == nil && !operationForm.MatchString(operation) {
				err = fmt.Errorf("operation %.80q: want <concern>.<operation>", operation)
			}
		}
		if err != nil {
			return nil, apierr.BadConfig("BMC driver %.80q: %v", id, err)
		}
		own.BMCDrivers[id] = slices.Clone(operations)
	}
	return &Metal{own}, nil
}

func (p HardwareProfile) check(name string) error {
	if !profileName.MatchString(name) {
		return fmt.Errorf("want a name of lower-case letters, digits and inner hyphens, at most 63")
	}
	if len(p.Description) > maxDescription {
		return fmt.Errorf("the description has over %d bytes", maxDescription)
	}
	if err := binding.Check(p.Drivers); err != nil {
		return fmt.Errorf("drivers: %w", err)
	}
	for what, raw := range map[string]json.RawMessage{"bios": p.BIOS, "raid": p.RAID} {
		if len(raw) == 0 {
			continue
		}
		if len(raw) > maxLayout || !json.Valid(raw) || bytes.TrimSpace(raw)[0] != '{' {
			return fmt.Errorf("%s: want a JSON object of at most %d bytes", what, maxLayout)
		}
	}
	return nil
}

// Profile is a hardware profile by name.
func (m *Metal) Profile(name string) (HardwareProfile, bool) {
	p, ok := m.options.HardwareProfiles[name]
	return p, ok
}

// Layout is the BIOS settings and the RAID layout of a hardware profile; nil
// where it has none, or is none.
func (m *Metal) Layout(profile string) (bios, raid json.RawMessage) {
	p := m.options.HardwareProfiles[profile]
	return p.BIOS, p.RAID
}

// CheckName wants the name of a hardware profile, or nothing.
func (m *Metal) CheckName(what, name string) error {
	if _, ok := m.options.HardwareProfiles[name]; name != "" && !ok {
		return apierr.Invalid("%s %.80q is none of the gateway's", what, name)
	}
	return nil
}

// Bindings are a new machine's, in three layers per kind: the BMC's, the
// hardware profile's (named, else the pool's), the overrides. profile is the
// name of the one that counted, or empty.
func (m *Metal) Bindings(tenantID string, bmc store.BMC, named, pools string, overrides map[string]binding.Binding) (bindings map[string]binding.Binding, profile string, err error) {
	what := "hardware_profile"
	profile = named
	if profile == "" {
		what, profile = "the pool's hardware_profile", pools
	}
	if err := m.CheckName(what, profile); err != nil {
		return nil, "", err
	}
	if err := binding.Check(overrides); err != nil {
		return nil, "", apierr.Invalid("drivers: %v", err)
	}
	for _, ref := range binding.References(overrides) {
		tenant, err := secretstore.TenantOf(ref)
		switch {
		case err != nil:
			return nil, "", apierr.Invalid("drivers: a reference to a secret is not secret://<tenant>/<name>")
		case tenant != tenantID:
			return nil, "", apierr.Denied("drivers: a configuration names another tenant's secret")
		}
	}
	bindings = binding.Resolve(binding.BMC(bmc.Driver, bmc.Address, bmc.CredentialsRef), m.options.HardwareProfiles[profile].Drivers, overrides)
	if err := binding.Check(bindings); err != nil {
		return nil, "", apierr.Invalid("drivers: %v", err)
	}
	return bindings, profile, nil
}
