package driver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver/schema"
)

// Spec declares a driver whose parsed configuration is a C.
type Spec[C any] struct {
	ID, Version string
	// RunsOn is control-plane, site, node or ramdisk.
	RunsOn string
	// Config is the configuration manifest. Without Parse it decodes into C.
	Config *schema.Schema
	// Schema describes the configuration as JSON Schema 2020-12, for drivers
	// whose configuration no manifest can say. It needs Parse, which alone
	// judges what the driver takes.
	Schema json.RawMessage
	// Parse reads a configuration; with Config it gets one that was checked and
	// has its defaults. Its errors are invalid-config unless they carry another
	// code.
	Parse        func(json.RawMessage) (C, error)
	Capabilities []string
	// RetrySafe holds "<kind>.<operation>": only what does no harm when it runs
	// twice.
	RetrySafe []string
	// Validate is a live check, such as one log-in; nil: Parse is all.
	Validate func(ctx *Context, config C) error
	// Health says why the driver cannot serve now; nil: it always can.
	Health func(ctx context.Context) error
}

// Backend answers the calls of one driver.
type Backend interface {
	Invoke(ctx *Context, kind, operation string, config, args json.RawMessage) (json.RawMessage, error)
	Stream(ctx *Context, kind, operation string, config, args json.RawMessage, stream io.ReadWriter) error
	Validate(ctx *Context, config json.RawMessage) error
	Health(ctx context.Context) error
}

// Definition is a declared driver. Nothing changes it.
type Definition struct {
	manifest Manifest
	schema   *schema.Schema // nil: any configuration
	backend  Backend
}

// Define checks a declaration and freezes it.
func Define[C any](s Spec[C], parts ...Part[C]) (*Definition, error) {
	fail := func(format string, args ...any) (*Definition, error) {
		return nil, fmt.Errorf("define driver %s: %w", clip(s.ID), fmt.Errorf(format, args...))
	}
	switch {
	case s.Config != nil && s.Schema != nil:
		return fail("Config and Schema are both given")
	case s.Config == nil && s.Parse == nil:
		return fail("Config and Parse are both missing")
	}
	local := &inside[C]{parse: s.parser(), validate: s.Validate, health: s.Health, kinds: map[string]Part[C]{}}
	m := Manifest{
		ID: s.ID, Version: s.Version, RunsOn: s.RunsOn, ConfigSchema: slices.Clone(s.Schema),
		Capabilities: slices.Sorted(slices.Values(s.Capabilities)),
		RetrySafe:    slices.Sorted(slices.Values(s.RetrySafe)),
	}
	for _, p := range parts {
		if p.err != nil {
			return fail("%w", p.err)
		}
		if p.make == nil {
			return fail("the zero Part is no part")
		}
		if _, twice := local.kinds[p.kind]; twice {
			return fail("kind %s is implemented twice", p.kind)
		}
		if len(p.operations)+len(p.streams) == 0 {
			return fail("kind %s has no operation", clip(p.kind))
		}
		local.kinds[p.kind] = p
		for name := range p.operations {
			if !ValidOperation(p.kind + "." + name) {
				return fail("operation %q: want <kind>.<operation>", clip(p.kind+"."+name))
			}
		}
		for name := range p.streams {
			m.StreamOperations = append(m.StreamOperations, p.kind+"."+name)
		}
	}
	slices.Sort(m.StreamOperations)
	m.Kinds = slices.Sorted(maps.Keys(local.kinds))
	config := s.Config
	if config != nil {
		m.ConfigSchema = config.JSONSchema()
	} else if len(s.Schema) > 0 {
		var err error
		if config, err = schema.Read(s.Schema); err != nil {
			return fail("%w", err)
		}
	}
	if err := m.check(); err != nil {
		return nil, fmt.Errorf("define driver: %w", err)
	}
	for _, op := range s.RetrySafe {
		kind, name, _ := strings.Cut(op, ".")
		if _, ok := local.kinds[kind].operations[name]; !ok {
			return fail("retry-safe operation %s is not one of its kinds'", op)
		}
	}
	return &Definition{manifest: m, schema: config, backend: local}, nil
}

func (s Spec[C]) parser() func(json.RawMessage) (C, error) {
	config, parse := s.Config, s.Parse
	return func(raw json.RawMessage) (c C, err error) {
		switch {
		case parse == nil:
			err = config.Parse(raw, &c)
			return c, err
		case config != nil:
			if raw, err = config.Complete(raw); err != nil {
				return c, err
			}
		}
		c, err = parse(raw)
		// What carries no code of its own is about the configuration.
		var coded *errs.Error
		if err != nil && !errors.As(err, &coded) {
			err = errs.New(errs.InvalidConfig, "%v", err)
		}
		return c, err
	}
}

// Remote is a definition whose parts another process serves. Its
// configurations are checked by m's schema and handed on as they are.
func Remote(m Manifest, b Backend) (*Definition, error) {
	if b == nil {
		return nil, fmt.Errorf("driver %s: nothing serves it", clip(m.ID))
	}
	if err := m.check(); err != nil {
		return nil, err
	}
	d := &Definition{manifest: m.clone(), backend: b}
	if len(m.ConfigSchema) > 0 {
		s, err := schema.Read(m.ConfigSchema)
		if err != nil {
			return nil, fmt.Errorf("driver %s: %w", m.ID, err)
		}
		d.schema = s
	}
	return d, nil
}

// Extension is the kind of extension that a definition is.
func (d *Definition) Extension() string { return "driver" }

// Key names the driver and its version among all extensions.
func (d *Definition) Key() string { return d.manifest.Key() }

// ID is the driver's id.
func (d *Definition) ID() string { return d.manifest.ID }

// IsRetrySafe reports whether running the operation twice does no harm.
func (d *Definition) IsRetrySafe(kind, operation string) bool {
	return d.manifest.IsRetrySafe(kind, operation)
}

// IsStream reports whether the operation carries bytes both ways.
func (d *Definition) IsStream(kind, operation string) bool {
	return d.manifest.IsStream(kind, operation)
}

// Manifest is what the driver declares, as a copy.
func (d *Definition) Manifest() Manifest { return d.manifest.clone() }

// CheckConfig judges a configuration's structure by the schema; invalid-config.
// What the values mean is the driver's to say, in Validate.
func (d *Definition) CheckConfig(config json.RawMessage) error {
	if d.schema == nil {
		return nil
	}
	return d.schema.Check(config)
}

// SecretRefs lists the references in a configuration that a host resolves and
// delivers with a call.
func (d *Definition) SecretRefs(config json.RawMessage) []Ref {
	if d.schema == nil {
		return nil
	}
	var refs []Ref
	for _, r := range d.schema.SecretRefs(config) {
		refs = append(refs, Ref(r))
	}
	return refs
}

// Validate parses a configuration and runs the driver's live check.
func (d *Definition) Validate(ctx *Context, config json.RawMessage) error {
	if err := d.hostCheck(config); err != nil {
		return err
	}
	return d.backend.Validate(ctx, config)
}

// Health is nil while the driver can serve.
func (d *Definition) Health(ctx context.Context) error { return d.backend.Health(ctx) }

// Invoke runs one operation and answers its result as JSON.
func (d *Definition) Invoke(ctx *Context, kind, operation string, config, args json.RawMessage) (json.RawMessage, error) {
	if err := d.admit(kind, operation, false); err != nil {
		return nil, err
	}
	if err := d.hostCheck(config); err != nil {
		return nil, err
	}
	return d.backend.Invoke(ctx, kind, operation, config, args)
}

// Stream runs one stream operation until it ends.
func (d *Definition) Stream(ctx *Context, kind, operation string, config, args json.RawMessage, stream io.ReadWriter) error {
	if err := d.admit(kind, operation, true); err != nil {
		return err
	}
	if err := d.hostCheck(config); err != nil {
		return err
	}
	return d.backend.Stream(ctx, kind, operation, config, args, stream)
}

// admit refuses what need not reach the backend.
func (d *Definition) admit(kind, operation string, stream bool) error {
	if err := d.serves(kind); err != nil {
		return err
	}
	switch is := d.manifest.IsStream(kind, operation); {
	case is && !stream:
		return errs.New(errs.UnsupportedOperation, "%s.%s of driver %s is a stream", kind, operation, d.manifest.ID)
	case !is && stream:
		return errs.New(errs.UnsupportedOperation, "driver %s has no stream operation %q", d.manifest.ID, clip(kind+"."+operation))
	}
	return nil
}

// hostCheck judges a configuration before it leaves this process; a driver in
// it parses, and says it better.
func (d *Definition) hostCheck(config json.RawMessage) error {
	if _, local := d.backend.(maker); local {
		return nil
	}
	return d.CheckConfig(config)
}

func (d *Definition) serves(kind string) error {
	if !slices.Contains(d.manifest.Kinds, kind) {
		return errs.New(errs.UnsupportedDriver, "driver %s does not implement %q", d.manifest.ID, clip(kind))
	}
	return nil
}

// maker is a backend in this process, which can hand out an implementation.
type maker interface {
	implementation(ctx *Context, kind string, config json.RawMessage) (any, error)
}

// inside serves a driver in this process.
type inside[C any] struct {
	parse    func(json.RawMessage) (C, error)
	validate func(*Context, C) error
	health   func(context.Context) error
	kinds    map[string]Part[C]
}

func (p *inside[C]) implementation(ctx *Context, kind string, config json.RawMessage) (any, error) {
	c, err := p.parse(config)
	if err != nil {
		return nil, err
	}
	return p.kinds[kind].make(c, ctx)
}

func (p *inside[C]) Invoke(ctx *Context, kind, operation string, config, args json.RawMessage) (json.RawMessage, error) {
	op, ok := p.kinds[kind].operations[operation]
	if !ok {
		return nil, errs.New(errs.UnsupportedOperation, "the driver has no operation %q", clip(kind+"."+operation))
	}
	list, err := ParseArgs(args)
	if err != nil {
		return nil, err
	}
	impl, err := p.implementation(ctx, kind, config)
	if err != nil {
		return nil, err
	}
	result, err := op(ctx, impl, list)
	if err != nil {
		return nil, err
	}
	raw, err := json.Marshal(result)
	if err != nil {
		return nil, fmt.Errorf("encode the result of %s.%s: %w", kind, operation, err)
	}
	return raw, nil
}

func (p *inside[C]) Stream(ctx *Context, kind, operation string, config, args json.RawMessage, stream io.ReadWriter) error {
	list, err := ParseArgs(args)
	if err != nil {
		return err
	}
	impl, err := p.implementation(ctx, kind, config)
	if err != nil {
		return err
	}
	return p.kinds[kind].streams[operation](ctx, impl, list, stream)
}

func (p *inside[C]) Validate(ctx *Context, config json.RawMessage) error {
	c, err := p.parse(config)
	if err != nil || p.validate == nil {
		return err
	}
	return p.validate(ctx, c)
}

func (p *inside[C]) Health(ctx context.Context) error {
	if p.health == nil {
		return nil
	}
	return p.health(ctx)
}
