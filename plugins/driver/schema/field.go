package schema

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"
)

type form string

const (
	kindURL      form = "url"
	kindSecret   form = "secret"
	kindDuration form = "duration"
	kindString   form = "string"
	kindInt      form = "int"
	kindBool     form = "bool"
	kindEnum     form = "enum"
	kindList     form = "list"
)

// Field is what one key of a configuration may hold. It is a value: every
// method answers a changed copy.
type Field struct {
	kind        form
	description string
	pattern     string
	values      []string
	item        *Field
	min, max    *int64
	fallback    json.RawMessage
	optional    bool
	err         error
}

// URL is an absolute URL with a host.
func URL() Field { return Field{kind: kindURL} }

// Secret is a credential, given as a secret:// reference.
func Secret() Field { return Field{kind: kindSecret} }

// Duration is a length of time such as "30s" or "1m30s".
func Duration() Field { return Field{kind: kindDuration} }

// String is any text.
func String() Field { return Field{kind: kindString} }

// Int is a whole number of 64 bits.
func Int() Field { return Field{kind: kindInt} }

// Bool is true or false.
func Bool() Field { return Field{kind: kindBool} }

// Enum is one of these words.
func Enum(values ...string) Field { return Field{kind: kindEnum, values: slices.Clone(values)} }

// List holds any number of items.
func List(item Field) Field { return Field{kind: kindList, item: &item} }

// Optional lets the key be absent.
func (f Field) Optional() Field { f.optional = true; return f }

// Default is what an absent key means; a Duration's may be a time.Duration.
func (f Field) Default(v any) Field {
	if d, ok := v.(time.Duration); ok {
		v = d.String()
	}
	raw, err := json.Marshal(v)
	if err != nil {
		f.err = fmt.Errorf("default: %w", err)
	}
	f.fallback = raw
	return f
}

// Describe says what the key is for.
func (f Field) Describe(text string) Field { f.description = text; return f }

// Min is the least value of an Int, and the least length of a String, Secret,
// URL or List.
func (f Field) Min(n int64) Field { f.min = &n; return f }

// Max is the greatest value of an Int, and the greatest length of a String,
// Secret, URL or List. Text is counted in characters.
func (f Field) Max(n int64) Field { f.max = &n; return f }

// Pattern is a regular expression, in Go's syntax, that a String must match
// somewhere: anchor it to bind all of it.
func (f Field) Pattern(expr string) Field {
	f.pattern = expr
	return f
}

// check refuses a field that contradicts itself.
func (f Field) check() error {
	if f.err != nil {
		return f.err
	}
	switch {
	case f.pattern != "" && f.kind != kindString:
		return fmt.Errorf("a pattern is for strings, not for a %s", f.kind)
	case (f.min != nil || f.max != nil) && !slices.Contains([]form{kindInt, kindString, kindSecret, kindURL, kindList}, f.kind):
		return fmt.Errorf("a %s has no bounds", f.kind)
	case f.kind != kindInt && (f.min != nil && *f.min < 0 || f.max != nil && *f.max < 0):
		return errors.New("a length is never negative")
	case f.min != nil && f.max != nil && *f.min > *f.max:
		return fmt.Errorf("the least, %d, is more than the greatest, %d", *f.min, *f.max)
	case f.kind == kindEnum && len(f.values) == 0:
		return errors.New("an enum has no values")
	case f.kind == kindSecret && f.fallback != nil:
		return errors.New("a secret has no default")
	case f.kind == "":
		return errors.New("the zero Field is no field")
	}
	for i, v := range f.values {
		if slices.Contains(f.values[:i], v) {
			return fmt.Errorf("the value %q is listed twice", v)
		}
	}
	if f.item != nil {
		// The host finds secrets at the top only.
		if f.item.kind == kindSecret {
			return errors.New("secrets stand at the top, not in a list")
		}
		if f.item.optional || f.item.fallback != nil {
			return errors.New("an item is neither optional nor has a default")
		}
		if err := f.item.check(); err != nil {
			return fmt.Errorf("item: %w", err)
		}
	}
	return nil
}

// document is the field in JSON Schema.
func (f Field) document() ordered {
	d := ordered{}
	switch f.kind {
	case kindURL:
		d.set("type", "string").set("format", "uri").set("pattern", urlPattern)
	case kindDuration:
		d.set("type", "string").set("pattern", durationPattern)
	case kindEnum:
		d.set("type", "string").set("enum", f.values)
	case kindInt:
		d.set("type", "integer")
	case kindBool:
		d.set("type", "boolean")
	case kindList:
		d.set("type", "array").set("items", f.item.document())
	case kindSecret:
		d.set("type", "string").set("writeOnly", true)
	default:
		d.set("type", "string")
		if f.pattern != "" {
			d.set("pattern", f.pattern)
		}
	}
	low, high := "minLength", "maxLength"
	switch f.kind {
	case kindInt:
		low, high = "minimum", "maximum"
		// Without these a number that no int64 holds would pass elsewhere.
		if f.min == nil {
			d.set(low, int64(math.MinInt64))
		}
		if f.max == nil {
			d.set(high, int64(math.MaxInt64))
		}
	case kindList:
		low, high = "minItems", "maxItems"
	}
	if f.min != nil {
		d.set(low, *f.min)
	}
	if f.max != nil {
		d.set(high, *f.max)
	}
	if f.description != "" {
		d.set("description", f.description)
	}
	if f.fallback != nil {
		d.set("default", f.fallback)
	}
	if f.kind == kindURL || f.kind == kindDuration || f.kind == kindSecret {
		d.set("x-bc", map[string]string{"kind": string(f.kind)})
	}
	return d
}
