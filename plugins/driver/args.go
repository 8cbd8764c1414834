package driver

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// Args are an operation's positional arguments.
type Args []json.RawMessage

// ParseArgs reads args_json: an array holds the positional arguments, any other
// value is the single argument, and nothing is no argument. A null at the end
// is an argument that was left out.
func ParseArgs(raw []byte) (Args, error) {
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 {
		return nil, nil
	}
	if !json.Valid(raw) {
		return nil, errs.New(errs.InvalidArgs, "arguments are not JSON")
	}
	if raw[0] != '[' {
		return trim(Args{raw}), nil
	}
	var list Args
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, errs.New(errs.InvalidArgs, "arguments: %v", err)
	}
	return trim(list), nil
}

func trim(a Args) Args {
	for len(a) > 0 && string(bytes.TrimSpace(a[len(a)-1])) == "null" {
		a = a[:len(a)-1]
	}
	return a
}

// Expect refuses more arguments than n.
func (a Args) Expect(n int) error {
	if len(a) > n {
		return errs.New(errs.InvalidArgs, "%d arguments: want at most %d", len(a), n)
	}
	return nil
}

// StrictJSON decodes one JSON value into v and refuses unknown fields, field
// names of another case, and anything after the value.
func StrictJSON(raw []byte, v any, fields ...string) error {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return errors.New(clip(strings.TrimPrefix(err.Error(), "json: ")))
	}
	if _, err := dec.Token(); err != io.EOF {
		return errors.New("data after the value")
	}
	if len(fields) == 0 {
		return nil
	}
	// encoding/json matches names without regard to case.
	var object map[string]json.RawMessage
	if err := json.Unmarshal(raw, &object); err != nil || object == nil {
		return errors.New("not an object")
	}
	for _, name := range slices.Sorted(maps.Keys(object)) {
		if !slices.Contains(fields, name) {
			return fmt.Errorf("unknown field %q", clip(name))
		}
	}
	return nil
}
