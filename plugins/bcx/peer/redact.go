package peer

import (
	"encoding/base64"
	"encoding/json"
	"net/url"
	"slices"
	"strings"
	"sync"

	"github.com/better-compute/site-appliance/appliance/base/secret"
)

const (
	redacted = "[redacted]"
	// minSecret is the shortest secret that is looked for: a shorter one would
	// blot out ordinary words.
	minSecret = 4
	// maxKept bounds the secrets of calls that have ended. What a plugin
	// printed during a call may be read after it.
	maxKept = 256
)

// Redactor takes secrets out of text. It holds those of calls in flight and the
// last ones of calls that ended.
type Redactor struct {
	mu       sync.Mutex
	held     map[string]int // by value, how many calls deliver it
	ended    []string       // values that no call delivers any more, oldest first
	replacer *strings.Replacer
}

// NewRedactor makes one that knows no secret.
func NewRedactor() *Redactor { return &Redactor{held: map[string]int{}} }

// Add puts values on the list until release.
func (r *Redactor) Add(values ...secret.Value) (release func()) {
	var own []string
	for _, v := range values {
		if s := string(v.Reveal()); len(s) >= minSecret {
			own = append(own, s)
		}
	}
	if len(own) == 0 {
		return func() {}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range own {
		n, known := r.held[s]
		if !known {
			r.replacer = nil
		} else if n == 0 {
			r.ended = slices.DeleteFunc(r.ended, func(e string) bool { return e == s })
		}
		r.held[s] = n + 1
	}
	return sync.OnceFunc(func() { r.release(own) })
}

func (r *Redactor) release(own []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range own {
		if r.held[s]--; r.held[s] == 0 {
			r.ended = append(r.ended, s)
		}
	}
	for len(r.ended) > maxKept {
		delete(r.held, r.ended[0])
		r.ended = slices.Delete(r.ended, 0, 1)
		r.replacer = nil
	}
}

// Scrub is s without the secrets, in any form that a plugin is likely to print:
// as they are, escaped for JSON or a URL, or in base64, also as a part of
// something longer.
func (r *Redactor) Scrub(s string) string {
	r.mu.Lock()
	if len(r.held) == 0 {
		r.mu.Unlock()
		return s
	}
	if r.replacer == nil {
		var all []string
		for value := range r.held {
			all = append(all, forms(value)...)
		}
		// A secret that holds another one goes first.
		slices.SortFunc(all, func(a, b string) int {
			if len(a) != len(b) {
				return len(b) - len(a)
			}
			return strings.Compare(a, b)
		})
		pairs := make([]string, 0, 2*len(all))
		for _, f := range slices.Compact(all) {
			pairs = append(pairs, f, redacted)
		}
		r.replacer = strings.NewReplacer(pairs...)
	}
	replacer := r.replacer
	r.mu.Unlock()
	return replacer.Replace(s)
}

// forms are the ways in which value may appear.
func forms(value string) []string {
	list := []string{value, url.QueryEscape(value), url.PathEscape(value)}
	for _, f := range list[1:] {
		list = append(list, lowerEscapes(f))
	}
	for _, html := range []bool{true, false} {
		var b strings.Builder
		enc := json.NewEncoder(&b)
		enc.SetEscapeHTML(html)
		if enc.Encode(value) == nil {
			escaped := strings.TrimSuffix(b.String(), "\n")
			list = append(list, escaped[1:len(escaped)-1])
		}
	}
	// A log's line holds one line of a key.
	if strings.ContainsAny(value, "\r\n") {
		list = append(list, strings.FieldsFunc(value, func(c rune) bool { return c == '\r' || c == '\n' })...)
	}
	for before := range 3 {
		for _, e := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
			list = append(list, inBase64(e, value, before))
		}
	}
	return slices.DeleteFunc(list, func(f string) bool { return len(f) < minSecret })
}

// inBase64 is the part of the encoding that value alone decides when `before`
// bytes, modulo three, stand before it and others may follow.
func inBase64(e *base64.Encoding, value string, before int) string {
	whole := e.EncodeToString([]byte(strings.Repeat("\x00", before) + value))
	from := []int{0, 2, 3}[before]
	bits := 8 * (before + len(value))
	return whole[min(from, bits/6) : bits/6]
}

// lowerEscapes writes %2F as %2f.
func lowerEscapes(s string) string {
	b := []byte(s)
	for i := 0; i+2 < len(b); i++ {
		if b[i] == '%' {
			copy(b[i+1:i+3], strings.ToLower(string(b[i+1:i+3])))
		}
	}
	return string(b)
}
