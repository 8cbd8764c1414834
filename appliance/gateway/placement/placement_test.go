package placement

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
)

func advertised(id, version string, kinds ...string) *agentv1.AdvertisedDriver {
	return &agentv1.AdvertisedDriver{Id: id, Version: version, Kinds: kinds}
}

func TestLabels(t *testing.T) {
	for _, tt := range []struct {
		name         string
		drivers      []*agentv1.AdvertisedDriver
		capabilities []string
		want         map[string]string
	}{
		{"nothing", nil, nil, map[string]string{}},
		{"a driver, its kinds, a capability", []*agentv1.AdvertisedDriver{advertised("ipmi", "1.2.0", "power", "inspect")}, []string{"instance.network-policy"},
			map[string]string{"bc.dev/driver.ipmi": "1.2.0", "bc.dev/driver-kind.ipmi.power": "1", "bc.dev/driver-kind.ipmi.inspect": "1", "bc.dev/cap.instance.network-policy": "1"}},
		{"malformed kinds are skipped, the rest stays", []*agentv1.AdvertisedDriver{advertised("a", "1", "power", "Power", "", "1st", "a.b", "a b", "-x", strings.Repeat("k", 33), strings.Repeat("k", 32))}, nil,
			map[string]string{"bc.dev/driver.a": "1", "bc.dev/driver-kind.a.power": "1", "bc.dev/driver-kind.a." + strings.Repeat("k", 32): "1"}},
		{"malformed drivers are skipped", []*agentv1.AdvertisedDriver{nil, advertised("", "1", "power"), advertised("A", "1"), advertised("a.b", "1"), advertised("ok", ""), advertised("ok2", "1\n2"), advertised(strings.Repeat("a", 65), "1"), advertised("v", strings.Repeat("1", 65)), advertised("good", "1.0.0+b")}, nil,
			map[string]string{"bc.dev/driver.good": "1.0.0+b"}},
		{"malformed capabilities are skipped", nil, []string{"", "A", "a=b", "a b", strings.Repeat("c", 65), "x", "x"}, map[string]string{"bc.dev/cap.x": "1"}},
		{"two versions of one driver", []*agentv1.AdvertisedDriver{advertised("a", "1.9.0", "power"), advertised("a", "1.10.0", "bios"), advertised("a", "1.2.0", "raid")}, nil,
			map[string]string{"bc.dev/driver.a": "1.10.0", "bc.dev/driver-kind.a.power": "1", "bc.dev/driver-kind.a.bios": "1", "bc.dev/driver-kind.a.raid": "1"}},
	} {
		if got := Labels(tt.drivers, tt.capabilities); !maps.Equal(got, tt.want) {
			t.Errorf("%s: Labels() = %v, want %v", tt.name, got, tt.want)
		}
	}
}

// TestLabelBounds: an agent that advertises without end gets a bounded number
// of labels, the same ones whatever the order.
func TestLabelBounds(t *testing.T) {
	var kinds, capabilities []string
	for i := range 100 {
		kinds = append(kinds, fmt.Sprintf("k%02d", i))
	}
	for i := range 500 {
		capabilities = append(capabilities, fmt.Sprintf("c%03d", i))
	}
	var drivers []*agentv1.AdvertisedDriver
	for i := range 200 {
		drivers = append(drivers, advertised(fmt.Sprintf("d%03d", i), "1", kinds...))
	}
	got := Labels(drivers, capabilities)
	if want := MaxDrivers*(1+MaxKinds) + MaxCapabilities; len(got) != want {
		t.Errorf("%d labels, want %d", len(got), want)
	}
	if n := len(Kinds(got, "d000")); n != 32 {
		t.Errorf("%d kinds of a driver, want 32", n)
	}
	slices.Reverse(drivers)
	slices.Reverse(capabilities)
	for _, d := range drivers {
		slices.Reverse(d.Kinds)
	}
	if again := Labels(drivers, capabilities); !maps.Equal(got, again) {
		t.Error("another order made other labels")
	}
	if one := Labels(drivers[:1], nil); len(one) != 33 {
		t.Errorf("%d labels of one driver, want 33", len(one))
	}
}

func TestKinds(t *testing.T) {
	labels := Labels([]*agentv1.AdvertisedDriver{advertised("acme", "1", "power", "bios"), advertised("acme-2", "1", "raid"), advertised("bare", "1")}, nil)
	for id, want := range map[string][]string{"acme": {"bios", "power"}, "acme-2": {"raid"}, "bare": nil, "none": nil, "": nil} {
		if got := Kinds(labels, id); !slices.Equal(got, want) || (got == nil) != (want == nil) {
			t.Errorf("Kinds(%q) = %q, want %q", id, got, want)
		}
	}
}

func TestWant(t *testing.T) {
	many := map[string]string{}
	for i := range maxWanted + 1 {
		many[fmt.Sprint(i)] = "x"
	}
	for name, tt := range map[string]struct {
		in, want map[string]string
		ok       bool
	}{
		"nothing":    {nil, map[string]string{}, true},
		"a value":    {map[string]string{"k": "v"}, map[string]string{"k": "v"}, true},
		"any":        {map[string]string{"k": "*"}, map[string]string{"k": ""}, true},
		"a star in":  {map[string]string{"k": "1.*"}, map[string]string{"k": "1.*"}, true},
		"no key":     {map[string]string{"": "v"}, nil, false},
		"no value":   {map[string]string{"k": ""}, nil, false},
		"long key":   {map[string]string{strings.Repeat("k", maxKey+1): "v"}, nil, false},
		"long value": {map[string]string{"k": strings.Repeat("v", maxValue+1)}, nil, false},
		"too many":   {many, nil, false},
	} {
		got, err := Want(tt.in)
		if (err == nil) != tt.ok || !maps.Equal(got, tt.want) {
			t.Errorf("%s: Want(%v) = %v, %v, want %v", name, tt.in, got, err, tt.want)
		}
	}
}

func FuzzLabels(f *testing.F) {
	f.Add("ipmi", "1.0.0", "power", "instance.network-policy")
	f.Add("A=b\n", "\x00", "a.b", "*")
	f.Fuzz(func(t *testing.T, id, version, kind, capability string) {
		for key, value := range Labels([]*agentv1.AdvertisedDriver{advertised(id, version, kind)}, []string{capability}) {
			if len(key) > maxKey || len(value) > 64 || !strings.HasPrefix(key, "bc.dev/") || strings.ContainsAny(key+value, " \n\x00") {
				t.Errorf("label %q=%q", key, value)
			}
		}
	})
}
