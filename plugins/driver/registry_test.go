package driver_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
)

func registered(t *testing.T, id, version string, kinds ...string) *driver.Definition {
	t.Helper()
	d, err := driver.Remote(driver.Manifest{
		ID: id, Version: version, RunsOn: "site", Kinds: kinds, Capabilities: []string{"z", "a"},
		RetrySafe: []string{kinds[0] + ".z", kinds[0] + ".a"},
	}, silent{})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestRegistry(t *testing.T) {
	var r driver.Registry
	if list, err := json.Marshal(r.List("")); err != nil || string(list) != "[]" {
		t.Errorf("List() of nothing = %s, %v, want []", list, err)
	}
	for _, d := range []*driver.Definition{
		registered(t, "b", "1.0.0", "power"), registered(t, "a", "1.10.0", "virtual-media", "power"), registered(t, "a", "1.9.0", "power", "inspect"),
		registered(t, "a", "1.10.0-rc.1", "bios"),
	} {
		if err := r.Register(d); err != nil {
			t.Errorf("Register(%s) = %v", d.Key(), err)
		}
	}
	if err := r.Register(registered(t, "a", "1.9.0", "raid")); errs.CodeOf(err) != errs.InvalidConfig || !strings.Contains(err.Error(), "driver:a@1.9.0") {
		t.Errorf("Register(a second driver:a@1.9.0) = %v, want invalid-config that names it", err)
	}
	if err := r.Register(nil); errs.CodeOf(err) != errs.InvalidConfig {
		t.Errorf("Register(nil) = %v, want invalid-config", err)
	}
	for kind, want := range map[string]string{
		"":      "[driver:a@1.9.0 driver:a@1.10.0-rc.1 driver:a@1.10.0 driver:b@1.0.0]",
		"power": "[driver:a@1.9.0 driver:a@1.10.0 driver:b@1.0.0]",
		"bios":  "[driver:a@1.10.0-rc.1]",
		"lamp":  "[]",
	} {
		keys := []string{}
		for _, m := range r.List(kind) {
			keys = append(keys, m.Key())
			for _, l := range [][]string{m.Kinds, m.Capabilities, m.RetrySafe} {
				if !slices.IsSorted(l) {
					t.Errorf("List(%s) has %v, want it sorted", kind, l)
				}
			}
		}
		if got := fmt.Sprint(keys); got != want {
			t.Errorf("List(%q) = %s, want %s", kind, got, want)
		}
	}
	for _, tt := range []struct{ id, kind, want string }{
		{"a", "power", "driver:a@1.10.0"}, {"a", "inspect", "driver:a@1.9.0"}, {"a", "", "driver:a@1.10.0"}, {"b", "power", "driver:b@1.0.0"},
		{"b", "bios", ""}, {"c", "power", ""},
	} {
		d, ok := r.Find(tt.id, tt.kind)
		got := ""
		if ok {
			got = d.Key()
		}
		if got != tt.want {
			t.Errorf("Find(%s, %q) = %q, want %q", tt.id, tt.kind, got, tt.want)
		}
	}
	// What a caller does to a list stays with the caller.
	r.List("")[0].Kinds[0] = "changed"
	if got := r.List("")[0].Kinds[0]; got != "inspect" {
		t.Errorf("List() after a change of what it answered = %q, want inspect", got)
	}
}
