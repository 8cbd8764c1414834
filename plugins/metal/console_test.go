package metal_test

import (
	"bytes"
	"encoding/json"
	"io"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
	"github.com/better-compute/site-appliance/plugins/metal"
)

type port struct{}

func (port) Open(_ *driver.Context, s io.ReadWriter) error {
	_, err := s.Write([]byte("open"))
	return err
}

type takenPort struct{ port }

func (takenPort) Take(_ *driver.Context, s io.ReadWriter) error {
	_, err := s.Write([]byte("taken"))
	return err
}

// TestConsoleTakeover: open's argument chooses, and a driver that takes over
// nobody's console says so.
func TestConsoleTakeover(t *testing.T) {
	define := func(c metal.Console) *driver.Definition {
		d, err := driver.Define(driver.Spec[struct{}]{ID: "acme", Version: "1.0.0", RunsOn: "site", Parse: func(json.RawMessage) (struct{}, error) { return struct{}{}, nil }},
			driver.Implement(metal.ConsoleKind(), func(struct{}, *driver.Context) (metal.Console, error) { return c, nil }))
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	ctx, _ := drivertest.Context(t, t.Context(), nil)
	for _, tt := range []struct {
		console    metal.Console
		args, said string
		code       errs.Code
	}{
		{port{}, "", "open", ""},
		{port{}, `[{}]`, "open", ""},
		{port{}, `[{"takeover":false}]`, "open", ""},
		{port{}, `[{"takeover":true}]`, "", errs.UnsupportedOperation},
		{takenPort{}, `[{"takeover":true}]`, "taken", ""},
		{takenPort{}, `{"takeover":true}`, "taken", ""},
		{takenPort{}, `[{"takeover":true},1]`, "", errs.InvalidArgs},
		{takenPort{}, `[{"Takeover":true}]`, "", errs.InvalidArgs},
		{takenPort{}, `["yes"]`, "", errs.InvalidArgs},
	} {
		var screen bytes.Buffer
		err := define(tt.console).Stream(ctx, "console", "open", nil, json.RawMessage(tt.args), &screen)
		if errs.CodeOf(err) != tt.code || screen.String() != tt.said {
			t.Errorf("%T open(%s) said %q, %v, want %q, %s", tt.console, tt.args, screen.String(), err, tt.said, tt.code)
		}
	}
	// A driver of another process gets the same argument.
	far, err := driver.Remote(define(takenPort{}).Manifest(), define(takenPort{}))
	if err != nil {
		t.Fatal(err)
	}
	proxy, err := driver.Use(far, metal.ConsoleKind(), nil, ctx)
	if err != nil {
		t.Fatal(err)
	}
	var screen bytes.Buffer
	if err := proxy.(metal.ConsoleTaker).Take(ctx, &screen); err != nil || screen.String() != "taken" {
		t.Errorf("Take() of a driver elsewhere said %q, %v, want taken", screen.String(), err)
	}
}
