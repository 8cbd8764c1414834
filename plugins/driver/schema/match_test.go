package schema

import (
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"
)

// TestMatchers holds what is matched by hand against the patterns that go out.
func TestMatchers(t *testing.T) {
	pieces := map[matcher][]string{
		durationMatcher{}: {"1", "0", "999999999", "1000000", "99999", ".", ".5", ".123456789", ".1234567890", "ns", "us", "ms", "s", "m", "h", "1s", "2m", "-", " ", "\n"},
		urlMatcher{}:      {"http", "a", "A9", "+", "1", "://", ":", "/", "?", "#", "@", `\`, " ", "host", "ä", "\n", "[::1]", ""},
	}
	r := rand.New(rand.NewPCG(5, 6))
	for m, list := range pieces {
		form, matched := regexp.MustCompile(m.String()), 0
		for range 30_000 {
			var b strings.Builder
			if _, url := m.(urlMatcher); url && r.IntN(3) > 0 {
				b.WriteString("http://")
			}
			for range r.IntN(7) {
				b.WriteString(list[r.IntN(len(list))])
			}
			text := b.String()
			got, want := m.MatchString(text), form.MatchString(text)
			if got != want {
				t.Fatalf("%T.MatchString(%q) = %v, the pattern says %v", m, text, got, want)
			}
			if want {
				matched++
			}
		}
		if matched < 100 {
			t.Errorf("%T: only %d texts matched: the comparison says little", m, matched)
		}
	}
}
