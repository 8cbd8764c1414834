package metal

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// Settings are firmware settings by the vendor's names. A value is text, a
// json.Number or a bool.
type Settings map[string]any

// Applied says what an operation left to do.
type Applied struct {
	// RebootNeeded is true while the change waits for the machine's next boot.
	RebootNeeded bool `json:"rebootNeeded"`
	// AlreadyInstalled is true where a firmware update had nothing to do: the
	// component has the wanted version.
	AlreadyInstalled bool `json:"alreadyInstalled,omitempty"`
}

// BIOS is the kind "bios".
type BIOS interface {
	GetSettings(*driver.Context) (Settings, error)
	// ApplySettings changes these settings and leaves the others.
	ApplySettings(*driver.Context, Settings) (Applied, error)
}

// SettingsResetter is bios' optional resetSettings: all to the maker's defaults.
type SettingsResetter interface {
	ResetSettings(*driver.Context) (Applied, error)
}

// BIOSKind is bios {getSettings, applySettings; resetSettings}.
func BIOSKind() driver.Kind[BIOS] {
	return driver.Kind[BIOS]{
		Name: "bios",
		Operations: map[string]driver.Operation[BIOS]{
			"getSettings": driver.Get(func(b BIOS, ctx *driver.Context) (Settings, error) {
				s, err := b.GetSettings(ctx)
				if s == nil {
					s = Settings{}
				}
				return s, err
			}),
			"applySettings": driver.Ask(ParseSettings, BIOS.ApplySettings),
			"resetSettings": driver.Optional[BIOS](driver.Get(SettingsResetter.ResetSettings)),
		},
		Proxy: func(i *driver.Implementation) BIOS { return biosProxy{i} },
	}
}

const maxSettings = 1024

// ParseSettings reads applySettings' argument: an object of 1 to 1024 settings
// whose values are text, numbers, true or false.
func ParseSettings(raw json.RawMessage) (Settings, error) {
	s, err := settings(raw)
	if err != nil {
		return nil, errs.New(errs.InvalidArgs, "settings: want an object")
	}
	if len(s) == 0 || len(s) > maxSettings {
		return nil, errs.New(errs.InvalidArgs, "settings: %d of them: want 1 to %d", len(s), maxSettings)
	}
	for _, name := range slices.Sorted(maps.Keys(s)) {
		if err := checkName("setting's name", name, 128); err != nil {
			return nil, err
		}
		switch v := s[name].(type) {
		case bool, json.Number:
		case string:
			if len(v) > 1024 {
				return nil, errs.New(errs.InvalidArgs, "setting %q: %d bytes, limit 1024", name, len(v))
			}
		default:
			return nil, errs.New(errs.InvalidArgs, "setting %q: want text, a number, true or false", name)
		}
	}
	return s, nil
}

// settings decodes without losing a digit of a number.
func settings(raw json.RawMessage) (Settings, error) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	var s Settings
	if err := dec.Decode(&s); err != nil {
		return nil, err
	}
	return s, nil
}

type biosProxy struct{ i *driver.Implementation }

func (p biosProxy) GetSettings(ctx *driver.Context) (Settings, error) {
	raw, err := ask[json.RawMessage](p.i, ctx, "getSettings")
	if err != nil {
		return nil, err
	}
	s, err := settings(raw)
	if err != nil {
		return nil, strange("getSettings", "want an object")
	}
	return s, nil
}

func (p biosProxy) ApplySettings(ctx *driver.Context, s Settings) (Applied, error) {
	return ask[Applied](p.i, ctx, "applySettings", s)
}

func (p biosProxy) ResetSettings(ctx *driver.Context) (Applied, error) {
	return ask[Applied](p.i, ctx, "resetSettings")
}
