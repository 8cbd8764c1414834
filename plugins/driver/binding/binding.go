// Package binding says which driver serves each kind of a machine, as data: a
// hardware profile, a machine and a workflow's profile all hold the same form.
package binding

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/schema"
)

// Bounds of what a person may bind.
const (
	// MaxConfigBytes bounds one binding's configuration.
	MaxConfigBytes = 64 << 10
	// MaxKinds bounds the kinds of one machine.
	MaxKinds = 32
)

// Binding names the driver of one kind. Its JSON and TOML form is the driver's
// id, or an object of driver and config.
type Binding struct {
	Driver string
	// Config is a JSON object, nil where there is none. Secrets in it are
	// secret:// references.
	Config json.RawMessage
}

// object is the long form.
type object struct {
	Driver string          `json:"driver"`
	Config json.RawMessage `json:"config,omitempty"`
}

// MarshalJSON writes the short form where there is no configuration.
func (b Binding) MarshalJSON() ([]byte, error) {
	if len(b.Config) == 0 {
		return json.Marshal(b.Driver)
	}
	return json.Marshal(object(b))
}

// UnmarshalJSON reads either form strictly.
func (b *Binding) UnmarshalJSON(raw []byte) error {
	got, err := Parse(raw)
	if err != nil {
		return err
	}
	*b = got
	return nil
}

// Parse reads a binding's JSON: an id, or an object of driver and config.
func Parse(raw []byte) (Binding, error) {
	trimmed := bytes.TrimSpace(raw)
	var o object
	if len(trimmed) > 0 && trimmed[0] == '"' {
		if err := json.Unmarshal(trimmed, &o.Driver); err != nil {
			return Binding{}, fmt.Errorf("binding: %w", err)
		}
	} else if err := driver.StrictJSON(trimmed, &o, "driver", "config"); err != nil {
		return Binding{}, fmt.Errorf("binding: want a driver's id or {driver, config}: %w", err)
	}
	return New(o.Driver, o.Config)
}

// UnmarshalTOML reads what a TOML decoder made of either form.
func (b *Binding) UnmarshalTOML(v any) error {
	switch v := v.(type) {
	case string:
		got, err := New(v, nil)
		*b = got
		return err
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(v)) {
			if key != "driver" && key != "config" {
				return fmt.Errorf("unknown key %.80q: want driver and config", key)
			}
		}
		id, ok := v["driver"].(string)
		if !ok {
			return errors.New("driver is missing or no string")
		}
		var config json.RawMessage
		if table, has := v["config"]; has {
			if _, ok := table.(map[string]any); !ok {
				return errors.New("config is no table")
			}
			var err error
			if config, err = FromTOML(table); err != nil {
				return fmt.Errorf("config: %w", err)
			}
		}
		got, err := New(id, config)
		*b = got
		return err
	}
	return errors.New("want a driver's id or a table of driver and config")
}

// FromTOML is a decoded TOML value as JSON. Numbers that JSON has not are
// refused, and so are dates, which JSON has no form for.
func FromTOML(v any) (json.RawMessage, error) {
	if err := plain(v); err != nil {
		return nil, err
	}
	return json.Marshal(v)
}

func plain(v any) error {
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			if err := plain(value); err != nil {
				return fmt.Errorf("%.80s: %w", key, err)
			}
		}
	case []map[string]any:
		for _, value := range v {
			if err := plain(value); err != nil {
				return err
			}
		}
	case []any:
		for _, value := range v {
			if err := plain(value); err != nil {
				return err
			}
		}
	case float64:
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return errors.New("a number that is none")
		}
	case time.Time:
		return errors.New("a date: write it as a string")
	}
	return nil
}

// New makes a checked binding; config may be empty or null.
func New(id string, config json.RawMessage) (Binding, error) {
	if id == "" {
		return Binding{}, errors.New("binding: driver is missing")
	}
	if !driver.ValidID(id) {
		return Binding{}, fmt.Errorf("binding: driver %.80q: want lower-case letters, digits and hyphens, a letter first, at most 64", id)
	}
	config = bytes.TrimSpace(config)
	if len(config) == 0 || string(config) == "null" {
		return Binding{Driver: id}, nil
	}
	if len(config) > MaxConfigBytes {
		return Binding{}, fmt.Errorf("binding of %s: config has over %d bytes", id, MaxConfigBytes)
	}
	var compact bytes.Buffer
	if config[0] != '{' || json.Compact(&compact, config) != nil {
		return Binding{}, fmt.Errorf("binding of %s: config is no JSON object", id)
	}
	return Binding{Driver: id, Config: compact.Bytes()}, nil
}

// Check refuses kinds that no driver can have, and too many of them.
func Check(bindings map[string]Binding) error {
	if len(bindings) > MaxKinds {
		return fmt.Errorf("%d kinds are bound: at most %d", len(bindings), MaxKinds)
	}
	for _, kind := range slices.Sorted(maps.Keys(bindings)) {
		if !driver.ValidKind(kind) {
			return fmt.Errorf("kind %.80q: want 1 to 32 lower-case letters, digits and hyphens, a letter first", kind)
		}
		b := bindings[kind]
		if _, err := New(b.Driver, b.Config); err != nil {
			return fmt.Errorf("kind %s: %w", kind, err)
		}
		if err := b.ByReference("credentials"); err != nil {
			return fmt.Errorf("kind %s: %w", kind, err)
		}
	}
	return nil
}

// ByReference refuses a secret itself in the fields of the configuration that
// hold references: a binding is stored and shown in clear.
func (b Binding) ByReference(fields ...string) error {
	var config map[string]json.RawMessage
	if len(b.Config) > 0 && json.Unmarshal(b.Config, &config) != nil {
		return fmt.Errorf("binding of %s: config is no JSON object", b.Driver)
	}
	for _, name := range fields {
		var ref string
		if raw, given := config[name]; given && (json.Unmarshal(raw, &ref) != nil || !schema.IsRef(ref)) {
			return fmt.Errorf("binding of %s: config.%s: want a reference secret://<tenant>/<name>, never a secret", b.Driver, name)
		}
	}
	return nil
}

// BMC is the layer of an enrolled BMC: it serves power, management and
// virtual-media, and takes its address and the reference of its credential,
// where it has one.
func BMC(id, address, credentialsRef string) map[string]Binding {
	config, _ := json.Marshal(struct { // strings always encode
		Address     string `json:"address"`
		Credentials string `json:"credentials,omitempty"`
	}{address, credentialsRef})
	layer := map[string]Binding{}
	for _, kind := range []string{"power", "management", "virtual-media"} {
		layer[kind] = Binding{Driver: id, Config: slices.Clone(config)}
	}
	return layer
}

// Resolve lays bindings over each other: per kind the last layer that names it
// wins, with its driver and its configuration together.
func Resolve(layers ...map[string]Binding) map[string]Binding {
	out := map[string]Binding{}
	for _, layer := range layers {
		for kind, b := range layer {
			out[kind] = Binding{Driver: b.Driver, Config: slices.Clone(b.Config)}
		}
	}
	return out
}

// References are the secret:// references anywhere in the configurations, sorted.
func References(bindings map[string]Binding) []string {
	found := map[string]bool{}
	for _, b := range bindings {
		var v any
		if json.Unmarshal(b.Config, &v) == nil {
			references(v, found)
		}
	}
	return slices.Sorted(maps.Keys(found))
}

func references(v any, found map[string]bool) {
	switch v := v.(type) {
	case string:
		if strings.HasPrefix(v, "secret://") {
			found[v] = true
		}
	case []any:
		for _, inner := range v {
			references(inner, found)
		}
	case map[string]any:
		for _, inner := range v {
			references(inner, found)
		}
	}
}
