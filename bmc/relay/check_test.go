package relay

import (
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
)

// Whatever a kind carries to a BMC, the relay knows when it needs grants, and it
// guards nothing else.
func TestEveryKindIsGuarded(t *testing.T) {
	for _, k := range cmdkind.All() {
		if _, guarded := guards[k.Name]; guarded != (len(k.Operations) > 0) {
			t.Errorf("kind %s carries %d operations, guarded = %v", k.Name, len(k.Operations), guarded)
		}
	}
	if got := len(Kinds()); got != len(guards) {
		t.Errorf("%d kinds are guarded, %d served", len(guards), got)
	}
}
