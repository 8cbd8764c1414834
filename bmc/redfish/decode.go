package redfish

import (
	"bytes"
	"encoding/json"
	"strings"
	"unicode"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// object is a JSON object of which only what is asked for is decoded: a field
// of the wrong type, common on BMCs, counts as absent and spoils nothing else.
type object map[string]json.RawMessage

// maxDepth is how deep JSON may nest; real answers stay under twenty.
const maxDepth = 64

func parseObject(data []byte) (object, error) {
	data = bytes.TrimPrefix(bytes.TrimSpace(data), []byte("\xef\xbb\xbf"))
	if tooDeep(data) {
		return nil, errs.New(errs.BmcError, "the BMC's answer nests deeper than %d levels", maxDepth)
	}
	var o object
	if err := json.Unmarshal(data, &o); err != nil || o == nil {
		return nil, errs.New(errs.BmcError, "the BMC's answer is not a JSON object")
	}
	return o, nil
}

// tooDeep counts brackets outside of strings, before anything is built of them.
func tooDeep(data []byte) bool {
	depth, quoted := 0, false
	for i := 0; i < len(data); i++ {
		switch c := data[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{' || c == '[':
			if depth++; depth > maxDepth {
				return true
			}
		case c == '}' || c == ']':
			depth--
		}
	}
	return false
}

func (o object) text(key string) string {
	var s string
	if json.Unmarshal(o[key], &s) != nil {
		return ""
	}
	return s
}

func (o object) texts(key string) []string {
	var raw []json.RawMessage
	if json.Unmarshal(o[key], &raw) != nil {
		return nil
	}
	var out []string
	for _, r := range raw {
		var s string
		if json.Unmarshal(r, &s) == nil && s != "" {
			out = append(out, s)
		}
	}
	return out
}

func (o object) object(key string) object {
	var inner object
	if json.Unmarshal(o[key], &inner) != nil {
		return nil
	}
	return inner
}

// objects are the objects of an array; what else it holds is left out.
func (o object) objects(key string) []object {
	var raw []json.RawMessage
	if json.Unmarshal(o[key], &raw) != nil {
		return nil
	}
	var out []object
	for _, r := range raw {
		var inner object
		if json.Unmarshal(r, &inner) == nil && inner != nil {
			out = append(out, inner)
		}
	}
	return out
}

// boolean is a field's value, and whether it is one.
func (o object) boolean(key string) (value, ok bool) {
	var b *bool
	if json.Unmarshal(o[key], &b) != nil || b == nil {
		return false, false
	}
	return *b, true
}

// number is a field's value, and whether it is one.
func (o object) number(key string) (value float64, ok bool) {
	var n *float64
	if json.Unmarshal(o[key], &n) != nil || n == nil {
		return 0, false
	}
	return *n, true
}

// links are the @odata.id values of an array of references.
func (o object) links(key string) []string {
	var members []json.RawMessage
	if json.Unmarshal(o[key], &members) != nil {
		return nil
	}
	var out []string
	for _, m := range members {
		var member object
		if json.Unmarshal(m, &member) == nil && member.text("@odata.id") != "" {
			out = append(out, member.text("@odata.id"))
		}
	}
	return out
}

// pick is the first of words that allowed holds, as the BMC spells it. A BMC
// that does not say what it allows is taken at the standard's word.
func pick[S ~string](allowed []string, words ...S) (string, bool) {
	if allowed == nil {
		return string(words[0]), true
	}
	for _, word := range words {
		for _, a := range allowed {
			if strings.EqualFold(a, string(word)) {
				return a, true
			}
		}
	}
	return "", false
}

// maxReason is how much of a BMC's own words goes into an error.
const maxReason = 200

// printable makes a BMC's words safe to print and short. Nothing that it said goes
// home without it: what stands in a serial number may end in a terminal.
func printable(s string) string {
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
	if runes := []rune(s); len(runes) > maxReason {
		return string(runes[:maxReason]) + "..."
	}
	return s
}
