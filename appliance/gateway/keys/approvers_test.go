package keys

import (
	"crypto/ed25519"
	"slices"
	"testing"

	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
)

// TestApproversOneByOne: quorum is of two wherever nobody said otherwise, in however
// many steps the people come.
func TestApproversOneByOne(t *testing.T) {
	key := func(n byte) ed25519.PublicKey {
		return ed25519.NewKeyFromSeed(slices.Repeat([]byte{n}, 32)).Public().(ed25519.PublicKey)
	}
	for name, tt := range map[string]struct {
		first, later uint32 // thresholds
		want         uint32
	}{
		"nobody says":          {0, 0, 2},
		"one, said at the end": {0, 1, 1},
		"two, said at the end": {0, 2, 2},
	} {
		b := &agentv1.TrustBundle{}
		for n := range byte(3) {
			threshold := tt.first
			if n == 2 {
				threshold = tt.later
			}
			if err := AddApprovers(b, []ed25519.PublicKey{key(n)}, threshold); err != nil {
				t.Fatal(err)
			}
		}
		if b.ApproverThreshold != tt.want {
			t.Errorf("%s: %d of 3 must agree, want %d", name, b.ApproverThreshold, tt.want)
		}
	}
	// What was chosen for several stays when another comes.
	b := &agentv1.TrustBundle{}
	for _, err := range []error{
		AddApprovers(b, []ed25519.PublicKey{key(0), key(1), key(2)}, 3), AddApprovers(b, []ed25519.PublicKey{key(3)}, 0),
		RemoveApprovers(b, []string{trust.KeyID(key(0))}, 0),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if b.ApproverThreshold != 3 {
		t.Errorf("%d must agree, want the 3 that were chosen", b.ApproverThreshold)
	}
}
