package metal_test

import (
	"encoding/json"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/metal"
)

func TestParseAction(t *testing.T) {
	for in, ok := range map[string]bool{
		`"on"`: true, `"off"`: true, `"soft"`: true, `"cycle"`: true, `"reset"`: true, `"nmi"`: true,
		`"ON"`: false, `""`: false, `"explode"`: false, `1`: false, `null`: false, `{"action":"on"}`: false,
	} {
		if _, err := metal.ParseAction(json.RawMessage(in)); (err == nil) != ok || err != nil && errs.CodeOf(err) != errs.InvalidArgs {
			t.Errorf("ParseAction(%s) = %v, want ok %v", in, err, ok)
		}
	}
}

func TestParseBootDevice(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want metal.BootDevice
		ok   bool
	}{
		{`{"device":"pxe"}`, metal.BootDevice{Device: "pxe"}, true},
		{`{"device":"disk","persistent":true,"efi":true}`, metal.BootDevice{Device: "disk", Persistent: true, EFI: true}, true},
		{`{"device":"none"}`, metal.BootDevice{Device: "none"}, true},
		{`{"device":"floppy"}`, metal.BootDevice{}, false},
		{`{"device":"pxe","once":true}`, metal.BootDevice{}, false},
		{`{"device":"pxe","efi":"yes"}`, metal.BootDevice{}, false},
		{`{"Device":"pxe"}`, metal.BootDevice{}, false},
		{`{}`, metal.BootDevice{}, false},
		{`"pxe"`, metal.BootDevice{}, false},
	} {
		got, err := metal.ParseBootDevice(json.RawMessage(tt.in))
		if (err == nil) != tt.ok || err == nil && got != tt.want || err != nil && errs.CodeOf(err) != errs.InvalidArgs {
			t.Errorf("ParseBootDevice(%s) = %+v, %v, want %+v", tt.in, got, err, tt.want)
		}
	}
}
