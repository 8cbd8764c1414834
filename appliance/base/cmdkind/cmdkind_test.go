package cmdkind

import (
	"slices"
	"strings"
	"testing"
)

// Each kind and each operation stands once, and only what asks or sets a state
// may run twice.
func TestKinds(t *testing.T) {
	lanes := []string{"query", "power", "provision", "transfer", "proxy"}
	named, carried := map[string]bool{}, map[string]string{}
	for _, k := range All() {
		if noun, verb, ok := strings.Cut(k.Name, "."); !ok || noun == "" || verb == "" || named[k.Name] {
			t.Errorf("kind %q is no noun.verb, or stands twice", k.Name)
		}
		named[k.Name] = true
		if !slices.Contains(lanes, k.Lane) || Lane(k.Name) != k.Lane {
			t.Errorf("kind %s waits in lane %q, and Lane says %q: want one of %v", k.Name, k.Lane, Lane(k.Name), lanes)
		}
		for _, op := range k.Operations {
			if other := carried[op]; other != "" {
				t.Errorf("%s is carried by %s and %s", op, other, k.Name)
			}
			if carried[op] = k.Name; Of(op) != k.Name {
				t.Errorf("Of(%s) = %q, want %q", op, Of(op), k.Name)
			}
		}
		if got, ok := Named(k.Name); !ok || got.Lane != k.Lane || got.RetrySafe != k.RetrySafe || !slices.Equal(got.Operations, k.Operations) {
			t.Errorf("Named(%s) = %v, %v, want %v", k.Name, got, ok, k)
		}
	}
	for _, name := range []string{"", "bmc", "bmc.Query"} {
		if k, ok := Named(name); ok || Lane(name) != "" || Of(name) != "" {
			t.Errorf("Named(%q) = %v, want none", name, k)
		}
	}
}

// Whoever changes what it is given changes nobody else's.
func TestAllIsACopy(t *testing.T) {
	All()[0].Operations[0] = "power.setPower"
	if k, _ := Named(Query); slices.Contains(k.Operations, "power.setPower") {
		t.Errorf("Named(%s) carries %v after a caller's change", Query, k.Operations)
	}
}
