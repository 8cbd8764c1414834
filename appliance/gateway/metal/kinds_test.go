package metal

import (
	"slices"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
)

// The gateway sends every kind that the boxes serve, in their lane, and a
// command says as much as its kind.
func TestKindsAreTheBoxes(t *testing.T) {
	kinds := Kinds()
	if len(kinds) != len(cmdkind.All()) {
		t.Errorf("metal brings %d kinds, want %d", len(kinds), len(cmdkind.All()))
	}
	for _, k := range kinds {
		want, ok := cmdkind.Named(k.Name)
		if !ok || k.Lane != want.Lane || k.RetrySafe != want.RetrySafe || k.Timeout <= 0 || len(k.Roles) != 1 {
			t.Errorf("kind %+v, want lane and retries of %+v, with a time-out and a role", k, want)
		}
		if c := CommandOf(k.Name); c.Kind != k.Name || c.Lane != k.Lane || c.Timeout != k.Timeout || c.RetrySafe != k.RetrySafe {
			t.Errorf("CommandOf(%s) = %+v, want what the kind says: %+v", k.Name, c, k)
		}
	}
}

// Every operation that a kind carries can be asked for, consoles apart, which are opened.
func TestOperationsAreTheBoxes(t *testing.T) {
	var want, got []string
	for _, k := range cmdkind.All() {
		if k.Name != cmdkind.Console {
			want = append(want, k.Operations...)
		}
	}
	for _, r := range relayed {
		got = append(got, r.operation)
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("relayed operations = %q, want %q", got, want)
	}
}
