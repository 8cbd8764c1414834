package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
)

// What a word allows is carried by the kind that it names.
func TestAllowedAreCarried(t *testing.T) {
	for _, a := range allowed {
		parts := strings.Split(a.form, ":")
		if k, ok := cmdkind.Named(parts[0]); ok && len(k.Operations) > 0 && !slices.Contains(k.Operations, parts[1]) {
			t.Errorf("%s: kind %s carries %q, not %s", a.word, k.Name, k.Operations, parts[1])
		}
		if of := cmdkind.Of(parts[1]); of != "" && of != parts[0] {
			t.Errorf("%s: %s is carried by kind %s, not %s", a.word, parts[1], of, parts[0])
		}
	}
}
