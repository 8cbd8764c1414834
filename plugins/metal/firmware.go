package metal

import (
	"encoding/json"

	"github.com/better-compute/site-appliance/plugins/driver"
)

// FirmwareUpdate is one component's new firmware, fetched by its digest.
type FirmwareUpdate struct {
	Component string `json:"component"`
	URL       string `json:"url"`
	// SHA256 is lower-case hex.
	SHA256 string `json:"sha256"`
	// Version is what the component must report afterwards; empty: not checked.
	Version string `json:"version,omitempty"`
}

// FirmwareManager is the kind "firmware".
type FirmwareManager interface {
	ListFirmware(*driver.Context) ([]Firmware, error)
	UpdateFirmware(*driver.Context, FirmwareUpdate) (Applied, error)
}

// FirmwareKind is firmware {list, update}.
func FirmwareKind() driver.Kind[FirmwareManager] {
	return driver.Kind[FirmwareManager]{
		Name: "firmware",
		Operations: map[string]driver.Operation[FirmwareManager]{
			"list": driver.Get(func(m FirmwareManager, ctx *driver.Context) ([]Firmware, error) {
				list, err := m.ListFirmware(ctx)
				return legible(some(list)), err
			}),
			"update": driver.Ask(ParseFirmwareUpdate, FirmwareManager.UpdateFirmware),
		},
		Proxy: func(i *driver.Implementation) FirmwareManager { return firmwareProxy{i} },
	}
}

// ParseFirmwareUpdate reads update's argument, {component, url, sha256; version}.
func ParseFirmwareUpdate(raw json.RawMessage) (FirmwareUpdate, error) {
	var u FirmwareUpdate
	if err := strict(raw, &u, "firmware update", "component", "url", "sha256", "version"); err != nil {
		return u, err
	}
	if err := checkName("firmware update: component", u.Component, 128); err != nil {
		return u, err
	}
	if err := checkURL("firmware update: url", u.URL, "http", "https"); err != nil {
		return u, err
	}
	if u.Version != "" {
		if err := checkName("firmware update: version", u.Version, 128); err != nil {
			return u, err
		}
	}
	return u, checkDigest("firmware update: sha256", u.SHA256)
}

type firmwareProxy struct{ i *driver.Implementation }

func (p firmwareProxy) ListFirmware(ctx *driver.Context) ([]Firmware, error) {
	return ask[[]Firmware](p.i, ctx, "list")
}

func (p firmwareProxy) UpdateFirmware(ctx *driver.Context, u FirmwareUpdate) (Applied, error) {
	return ask[Applied](p.i, ctx, "update", u)
}
