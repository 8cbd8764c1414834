package driver

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// Kind is one hardware job, served by implementations of T.
type Kind[T any] struct {
	Name       string
	Operations map[string]Operation[T]
}

// Operation runs one operation on an implementation. Its result is encoded as JSON.
type Operation[T any] func(ctx *Context, impl T, args Args) (any, error)

// Get is an operation without arguments that answers a value.
func Get[T, R any](f func(T, *Context) (R, error)) Operation[T] {
	return func(ctx *Context, impl T, args Args) (any, error) {
		if err := args.Expect(0); err != nil {
			return nil, err
		}
		return f(impl, ctx)
	}
}

// Set is an operation with one argument and no answer.
func Set[T, A any](decode func(json.RawMessage) (A, error), f func(T, *Context, A) error) Operation[T] {
	return func(ctx *Context, impl T, args Args) (any, error) {
		if err := args.Expect(1); err != nil {
			return nil, err
		}
		if len(args) == 0 {
			return nil, errs.New(errs.InvalidArgs, "an argument is missing")
		}
		a, err := decode(args[0])
		if err != nil {
			return nil, err
		}
		return nil, f(impl, ctx, a)
	}
}

// Optional is op for implementations that also satisfy O; others answer
// unsupported-operation.
func Optional[T, O any](op Operation[O]) Operation[T] {
	return func(ctx *Context, impl T, args Args) (any, error) {
		o, ok := any(impl).(O)
		if !ok {
			return nil, errs.New(errs.UnsupportedOperation, "the driver does not implement this operation")
		}
		return op(ctx, o, args)
	}
}

// Spec declares a driver whose parsed configuration is a C.
type Spec[C any] struct {
	ID, Version string
	RunsOn      string
	// Schema describes the configuration as JSON Schema 2020-12.
	Schema json.RawMessage
	// Parse reads a configuration and applies defaults; its errors are
	// invalid-config unless they carry another code.
	Parse        func(json.RawMessage) (C, error)
	Capabilities []string
	RetrySafe    []string
	// Validate is a live check, such as one log-in; nil: Parse is all.
	Validate func(ctx *Context, config C) error
	// Health says why the driver cannot serve now; nil: it always can.
	Health func(ctx context.Context) error
}

// Part is a kind that a driver implements.
type Part[C any] struct {
	kind       string
	operations map[string]func(ctx *Context, config C, args Args) (any, error)
}

// Implement serves kind by what factory makes for a configuration.
func Implement[C, T any](kind Kind[T], factory func(config C, ctx *Context) (T, error)) Part[C] {
	p := Part[C]{kind: kind.Name, operations: map[string]func(*Context, C, Args) (any, error){}}
	for name, op := range kind.Operations {
		p.operations[name] = func(ctx *Context, config C, args Args) (any, error) {
			impl, err := factory(config, ctx)
			if err != nil {
				return nil, err
			}
			return op(ctx, impl, args)
		}
	}
	return p
}

type call func(ctx *Context, config json.RawMessage, args Args) (any, error)

// Definition is a declared driver, ready to be served.
type Definition struct {
	manifest Manifest
	kinds    map[string]map[string]call
	validate func(ctx *Context, config json.RawMessage) error
	health   func(ctx context.Context) error
}

// Define checks a declaration and freezes it.
func Define[C any](s Spec[C], parts ...Part[C]) (*Definition, error) {
	if s.Parse == nil {
		return nil, fmt.Errorf("define driver %s: Parse is missing", s.ID)
	}
	parse := func(raw json.RawMessage) (C, error) {
		c, err := s.Parse(raw)
		if err != nil && errs.CodeOf(err) == errs.Internal {
			err = errs.New(errs.InvalidConfig, "%v", err)
		}
		return c, err
	}
	d := &Definition{kinds: map[string]map[string]call{}, health: s.Health}
	for _, p := range parts {
		if _, twice := d.kinds[p.kind]; twice {
			return nil, fmt.Errorf("define driver %s: kind %s is implemented twice", s.ID, p.kind)
		}
		ops := map[string]call{}
		for name, op := range p.operations {
			ops[name] = func(ctx *Context, raw json.RawMessage, args Args) (any, error) {
				c, err := parse(raw)
				if err != nil {
					return nil, err
				}
				return op(ctx, c, args)
			}
		}
		d.kinds[p.kind] = ops
	}
	d.validate = func(ctx *Context, raw json.RawMessage) error {
		c, err := parse(raw)
		if err != nil || s.Validate == nil {
			return err
		}
		return s.Validate(ctx, c)
	}
	d.manifest = Manifest{
		ID: s.ID, Version: s.Version, RunsOn: s.RunsOn, ConfigSchema: s.Schema,
		Kinds:        slices.Sorted(maps.Keys(d.kinds)),
		Capabilities: slices.Sorted(slices.Values(s.Capabilities)),
		RetrySafe:    slices.Sorted(slices.Values(s.RetrySafe)),
	}
	if err := d.manifest.Check(); err != nil {
		return nil, fmt.Errorf("define driver: %w", err)
	}
	for _, op := range s.RetrySafe {
		kind, name, _ := strings.Cut(op, ".")
		if _, ok := d.kinds[kind][name]; !ok {
			return nil, fmt.Errorf("define driver %s: retry-safe operation %s is not one of its kinds'", s.ID, op)
		}
	}
	return d, nil
}

// Manifest is what the driver declares.
func (d *Definition) Manifest() Manifest { return d.manifest }

// Validate parses a configuration and runs the driver's live check.
func (d *Definition) Validate(ctx *Context, config json.RawMessage) error {
	return d.validate(ctx, config)
}

// Health is nil while the driver can serve.
func (d *Definition) Health(ctx context.Context) error {
	if d.health == nil {
		return nil
	}
	return d.health(ctx)
}

// Invoke runs one operation and answers its result as JSON.
func (d *Definition) Invoke(ctx *Context, kind, operation string, config, args json.RawMessage) (json.RawMessage, error) {
	ops, ok := d.kinds[kind]
	if !ok {
		return nil, errs.New(errs.UnsupportedDriver, "driver %s does not implement %q", d.manifest.ID, clip(kind))
	}
	op, ok := ops[operation]
	if !ok {
		return nil, errs.New(errs.UnsupportedOperation, "driver %s has no operation %q", d.manifest.ID, clip(kind+"."+operation))
	}
	list, err := ParseArgs(args)
	if err != nil {
		return nil, err
	}
	result, err := op(ctx, config, list)
	if err != nil {
		return nil, err
	}
	raw, err := json.Marshal(result)
	if err != nil {
		return nil, fmt.Errorf("encode the result of %s.%s: %w", kind, operation, err)
	}
	return raw, nil
}
