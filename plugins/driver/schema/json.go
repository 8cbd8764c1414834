package schema

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
)

// Bounds of what is read, so that a configuration cannot exhaust its reader.
const (
	maxDepth  = 32
	maxConfig = 1 << 20
	// maxDigits bounds a number's text, and maxExponent what it stands for.
	maxDigits   = 64
	maxExponent = 308
)

// decode reads one JSON value. Numbers stay text. A key that an object has
// twice is refused: readers disagree on which of the two counts.
func decode(raw []byte) (any, error) {
	if len(raw) > maxConfig {
		return nil, fmt.Errorf("%d bytes, limit %d", len(raw), maxConfig)
	}
	// The decoder of tokens is lax about some malformed text.
	if !json.Valid(raw) {
		return nil, errors.New("not JSON")
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	v, err := value(dec, 0)
	if err != nil {
		return nil, err
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, errors.New("data after the value")
	}
	return v, nil
}

func value(dec *json.Decoder, depth int) (any, error) {
	if depth > maxDepth {
		return nil, fmt.Errorf("nested deeper than %d", maxDepth)
	}
	token, err := dec.Token()
	if err != nil {
		return nil, errors.New("not JSON")
	}
	switch t := token.(type) {
	case json.Number:
		return t, checkNumber(t.String())
	case json.Delim:
		if t == '[' {
			list := []any{}
			for dec.More() {
				v, err := value(dec, depth+1)
				if err != nil {
					return nil, err
				}
				list = append(list, v)
			}
			_, err := dec.Token()
			return list, err
		}
		m := map[string]any{}
		for dec.More() {
			token, err := dec.Token()
			if err != nil {
				return nil, errors.New("not JSON")
			}
			key, _ := token.(string)
			if _, twice := m[key]; twice {
				return nil, fmt.Errorf("the key %q stands twice in one object", clip(key))
			}
			if m[key], err = value(dec, depth+1); err != nil {
				return nil, err
			}
		}
		_, err := dec.Token()
		return m, err
	}
	return token, nil
}

func checkNumber(text string) error {
	mantissa, exponent, _ := strings.Cut(strings.ToLower(text), "e")
	digits := strings.TrimLeft(exponent, "+-0")
	if len(mantissa) > maxDigits || len(digits) > 3 || len(digits) == 3 && digits > fmt.Sprint(maxExponent) {
		return errors.New("a number is too long")
	}
	return nil
}

// ordered is a JSON object that keeps the order of its keys.
type ordered struct {
	keys   []string
	values []any
}

func (o *ordered) set(key string, v any) *ordered {
	o.keys = append(o.keys, key)
	o.values = append(o.values, v)
	return o
}

// MarshalJSON writes the keys in the order in which they were set.
func (o ordered) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, key := range o.keys {
		if i > 0 {
			b.WriteByte(',')
		}
		k, err := json.Marshal(key)
		if err != nil {
			return nil, err
		}
		v, err := json.Marshal(o.values[i])
		if err != nil {
			return nil, err
		}
		b.Write(k)
		b.WriteByte(':')
		b.Write(v)
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}
