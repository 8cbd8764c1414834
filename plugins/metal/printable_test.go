package metal

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
)

// hostile is a machine whose every word is an escape sequence.
type hostile struct{}

const escape = "\x1b]0;owned\x07"

func (hostile) Inspect(*driver.Context) (Inspection, error) {
	return Inspection{
		Source: "x", Manufacturer: escape, Model: escape, Serial: escape, AssetTag: escape, ProductUUID: escape,
		Board: &Board{escape, escape, escape, escape}, BMC: &BMC{escape, escape, escape, escape, escape},
		Processors: []Processor{{Model: escape}}, Memory: []Memory{{Slot: escape, Serial: escape}}, Drives: []Drive{{Name: escape, Serial: escape, Model: escape}},
		NICs: []NIC{{MAC: escape, Name: escape}}, Firmware: []Firmware{{escape, escape}}, Sensors: []Sensor{{Name: escape, Unit: escape, Status: escape}},
	}, nil
}
func (hostile) ListFirmware(*driver.Context) ([]Firmware, error) {
	return []Firmware{{escape, escape}}, nil
}
func (hostile) UpdateFirmware(*driver.Context, FirmwareUpdate) (Applied, error) {
	return Applied{}, nil
}
func (hostile) SetBootDevice(*driver.Context, BootDevice) error { return nil }
func (hostile) GetEventLog(*driver.Context) ([]LogEntry, error) {
	return []LogEntry{{ID: escape, Severity: escape, Sensor: escape, Message: escape}}, nil
}

// No terminal escape of a machine goes home, whichever driver read it.
func TestNothingUnprintableGoesHome(t *testing.T) {
	type none struct{}
	d, err := driver.Define(driver.Spec[none]{ID: "hostile", Version: "1", RunsOn: "site", Parse: func(json.RawMessage) (none, error) { return none{}, nil }},
		driver.Implement(InspectKind(), func(none, *driver.Context) (Inspector, error) { return hostile{}, nil }),
		driver.Implement(FirmwareKind(), func(none, *driver.Context) (FirmwareManager, error) { return hostile{}, nil }),
		driver.Implement(ManagementKind(), func(none, *driver.Context) (Management, error) { return hostile{}, nil }))
	if err != nil {
		t.Fatal(err)
	}
	for operation, words := range map[string]int{"inspect.inspect": 27, "firmware.list": 2, "management.getEventLog": 4} {
		ctx, _ := drivertest.Context(t, context.Background(), nil)
		kind, name, _ := strings.Cut(operation, ".")
		out, err := d.Invoke(ctx, kind, name, json.RawMessage("{}"), nil)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(out), "u001b") || strings.Contains(string(out), "u0007") || strings.Count(string(out), "?]0;owned?") != words {
			t.Errorf("%s = %s, want %d words without escapes", operation, out, words)
		}
	}
}
