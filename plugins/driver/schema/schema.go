// Package schema says what a driver's configuration may hold: built from
// fields, written and read as JSON Schema 2020-12, and checked by structure.
package schema

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

const (
	dialect = "https://json-schema.org/draft/2020-12/schema"
	// MaxBytes bounds a JSON Schema that is read.
	MaxBytes  = 64 << 10
	maxFields = 256
	// shown is how many problems one error names.
	shown = 4
	// A judgement takes that many steps, and as many more per byte of the
	// configuration.
	minSteps, stepsPerByte = 50_000, 16
)

var (
	nameForm = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_-]*$`)
	refForm  = regexp.MustCompile(`^[A-Za-z0-9._/-]+$`)
)

// Fields are a configuration's keys.
type Fields map[string]Field

// Schema is immutable.
type Schema struct {
	raw      json.RawMessage
	root     *node
	fields   Fields // of a schema that New made
	secrets  []string
	defaults map[string]json.RawMessage
}

// New makes the schema of an object with these keys and no others.
func New(fields Fields) (*Schema, error) {
	s, err := build(maps.Clone(fields))
	if err != nil {
		return nil, fmt.Errorf("configuration manifest: %w", err)
	}
	return s, nil
}

func build(fields Fields) (*Schema, error) {
	if len(fields) > maxFields {
		return nil, fmt.Errorf("%d fields, limit %d", len(fields), maxFields)
	}
	properties, required := ordered{}, []string{}
	names := slices.Sorted(maps.Keys(fields))
	for _, name := range names {
		f := fields[name]
		if len(name) > 64 || !nameForm.MatchString(name) {
			return nil, fmt.Errorf("field %q: want 1 to 64 letters, digits, _ and -, a letter first", clip(name))
		}
		if err := f.check(); err != nil {
			return nil, fmt.Errorf("field %s: %w", name, err)
		}
		if f.fallback == nil && !f.optional {
			required = append(required, name)
		}
		properties.set(name, f.document())
	}
	document := ordered{}
	document.set("$schema", dialect).set("type", "object").set("additionalProperties", false).
		set("required", required).set("properties", properties)
	raw, err := json.Marshal(document)
	if err != nil {
		return nil, err
	}
	s, err := read(raw)
	if err != nil {
		return nil, err
	}
	s.fields = fields
	for _, name := range names {
		if fields[name].fallback == nil {
			continue
		}
		v, err := decode(fields[name].fallback)
		if err != nil {
			return nil, fmt.Errorf("field %s: default: %w", name, err)
		}
		j := judgement{steps: minSteps}
		if found := j.judge(s.root.properties[name], v, path{text: "default"}, nil); len(found) > 0 {
			return nil, fmt.Errorf("field %s: %s", name, found[0])
		}
	}
	return s, nil
}

// JSONSchema is the schema as JSON Schema 2020-12. Secrets are writeOnly and
// carry "x-bc":{"kind":"secret"}.
func (s *Schema) JSONSchema() json.RawMessage { return bytes.Clone(s.raw) }

// SecretFields lists the top-level keys that hold secrets, sorted.
func (s *Schema) SecretFields() []string { return slices.Clone(s.secrets) }

// SecretRefs lists the references that a configuration's secret fields hold,
// sorted and each once. A value that is no reference is left alone.
func (s *Schema) SecretRefs(config json.RawMessage) []string {
	v, err := decode(orEmpty(config))
	m, ok := v.(map[string]any)
	if err != nil || !ok {
		return nil
	}
	var refs []string
	for _, name := range s.secrets {
		if text, ok := m[name].(string); ok && IsRef(text) {
			refs = append(refs, text)
		}
	}
	slices.Sort(refs)
	return slices.Compact(refs)
}

// IsRef reports whether text is a secret reference, secret://<tenant>/<name>.
func IsRef(text string) bool {
	path, ok := strings.CutPrefix(text, "secret://")
	tenant, name, _ := strings.Cut(path, "/")
	return ok && len(tenant) >= 1 && len(tenant) <= 64 && len(name) >= 1 && len(name) <= 128 && refForm.MatchString(path)
}

// Check judges a configuration's structure; no configuration is an empty one.
// Its error is invalid-config and names places and what they may hold, never
// what they hold.
func (s *Schema) Check(config json.RawMessage) error {
	_, err := s.check(config)
	return err
}

func (s *Schema) check(config json.RawMessage) (any, error) {
	v, err := decode(orEmpty(config))
	if err != nil {
		return nil, errs.New(errs.InvalidConfig, "configuration: %v", err)
	}
	j := judgement{steps: minSteps + stepsPerByte*len(config)}
	problems := j.judge(s.root, v, path{}, nil)
	if j.spent {
		return nil, errs.New(errs.InvalidConfig, "configuration: the schema's references branch too often to judge it")
	}
	if len(problems) == 0 {
		return v, nil
	}
	var text []string
	for _, p := range problems[:min(len(problems), shown)] {
		text = append(text, p.String())
	}
	if more := len(problems) - shown; more > 0 {
		text = append(text, fmt.Sprintf("and %d more", more))
	}
	return nil, errs.New(errs.InvalidConfig, "configuration: %s", strings.Join(text, "; "))
}

// Parse checks a configuration, puts in the defaults of absent top-level keys,
// and decodes it into a struct by its JSON names. A Duration field decodes into
// a time.Duration.
func (s *Schema) Parse(config json.RawMessage, into any) error {
	full, err := s.complete(config, true)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(full, into); err != nil {
		// The text of encoding/json's error can hold a value.
		var wrong *json.UnmarshalTypeError
		if errors.As(err, &wrong) {
			return errs.New(errs.InvalidConfig, "configuration: %s: does not fit a %s", clip(wrong.Field), wrong.Type)
		}
		return errs.New(errs.InvalidConfig, "configuration: does not fit %T", into)
	}
	return nil
}

// Complete checks a configuration and answers it with the defaults of absent
// top-level keys, and whole numbers of Int fields as plain digits.
func (s *Schema) Complete(config json.RawMessage) (json.RawMessage, error) {
	return s.complete(config, false)
}

func (s *Schema) complete(config json.RawMessage, toGo bool) (json.RawMessage, error) {
	v, err := s.check(config)
	if err != nil {
		return nil, err
	}
	m, ok := v.(map[string]any)
	if !ok {
		return bytes.Clone(orEmpty(config)), nil
	}
	for name, fallback := range s.defaults {
		if _, there := m[name]; there {
			continue
		}
		if m[name], err = decode(fallback); err != nil {
			return nil, errs.New(errs.InvalidConfig, "configuration: default of %s: %v", clip(name), err)
		}
	}
	for name, f := range s.fields {
		if v, there := m[name]; there {
			m[name] = f.plain(v, toGo)
		}
	}
	return json.Marshal(m)
}

// plain writes whole numbers as digits, since a Go integer does not decode from
// 1e3, and durations as a time.Duration's number.
func (f Field) plain(v any, toGo bool) any {
	switch {
	case f.kind == kindDuration && toGo:
		text, _ := v.(string)
		if d, err := time.ParseDuration(text); err == nil {
			return int64(d)
		}
	case f.kind == kindInt:
		if n, ok := whole(v); ok {
			return json.Number(n.String())
		}
	case f.kind == kindList:
		if list, ok := v.([]any); ok {
			for i := range list {
				list[i] = f.item.plain(list[i], toGo)
			}
		}
	}
	return v
}

func orEmpty(config json.RawMessage) json.RawMessage {
	if len(bytes.TrimSpace(config)) == 0 {
		return json.RawMessage("{}")
	}
	return config
}
