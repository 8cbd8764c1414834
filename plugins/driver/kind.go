package driver

import (
	"encoding/json"
	"fmt"
	"io"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// Kind is one hardware job, served by implementations of T. This package has
// none: any package opens one by making a value.
type Kind[T any] struct {
	Name       string
	Operations map[string]Operation[T]
	// Streams are the operations that carry bytes both ways.
	Streams map[string]StreamOperation[T]
	// Proxy makes a T out of a driver in another process; nil: the kind's
	// operations are called by name only.
	Proxy func(*Implementation) T
}

// Operation runs one operation on an implementation. Its result is encoded as JSON.
type Operation[T any] func(ctx *Context, impl T, args Args) (any, error)

// StreamOperation runs until the stream's other end closes or the operation
// has said everything.
type StreamOperation[T any] func(ctx *Context, impl T, args Args, stream io.ReadWriter) error

// Get is an operation without arguments that answers a value.
func Get[T, R any](f func(T, *Context) (R, error)) Operation[T] {
	return func(ctx *Context, impl T, args Args) (any, error) {
		if err := args.Expect(0); err != nil {
			return nil, err
		}
		return f(impl, ctx)
	}
}

// Do is an operation with neither argument nor answer.
func Do[T any](f func(T, *Context) error) Operation[T] {
	return Get(func(impl T, ctx *Context) (any, error) { return nil, f(impl, ctx) })
}

// Set is an operation with one argument and no answer.
func Set[T, A any](decode func(json.RawMessage) (A, error), f func(T, *Context, A) error) Operation[T] {
	return Ask(decode, func(impl T, ctx *Context, a A) (any, error) { return nil, f(impl, ctx, a) })
}

// Ask is an operation with one argument that answers a value.
func Ask[T, A, R any](decode func(json.RawMessage) (A, error), f func(T, *Context, A) (R, error)) Operation[T] {
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
		return f(impl, ctx, a)
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

// Part is a kind that a driver implements, for a configuration C.
type Part[C any] struct {
	kind       string
	make       func(config C, ctx *Context) (any, error)
	operations map[string]func(ctx *Context, impl any, args Args) (any, error)
	streams    map[string]func(ctx *Context, impl any, args Args, stream io.ReadWriter) error
	err        error
}

// Implement serves kind by what factory makes for a parsed configuration. The
// factory runs once per call.
func Implement[C, T any](kind Kind[T], factory func(config C, ctx *Context) (T, error)) Part[C] {
	p := Part[C]{
		kind:       kind.Name,
		operations: map[string]func(*Context, any, Args) (any, error){},
		streams:    map[string]func(*Context, any, Args, io.ReadWriter) error{},
	}
	if factory == nil {
		p.err = fmt.Errorf("kind %s has no factory", clip(kind.Name))
		return p
	}
	p.make = func(config C, ctx *Context) (any, error) {
		impl, err := factory(config, ctx)
		if err != nil {
			return nil, err
		}
		if any(impl) == nil {
			return nil, errs.New(errs.DriverError, "the driver made no implementation of %s", kind.Name)
		}
		return impl, nil
	}
	for name, op := range kind.Operations {
		if op == nil {
			p.err = fmt.Errorf("operation %s.%s has no function", clip(kind.Name), clip(name))
		}
		p.operations[name] = func(ctx *Context, impl any, args Args) (any, error) { return op(ctx, impl.(T), args) }
	}
	for name, op := range kind.Streams {
		if op == nil {
			p.err = fmt.Errorf("stream operation %s.%s has no function", clip(kind.Name), clip(name))
		}
		if _, twice := p.operations[name]; twice {
			p.err = fmt.Errorf("%s.%s is both an operation and a stream", clip(kind.Name), clip(name))
		}
		p.streams[name] = func(ctx *Context, impl any, args Args, stream io.ReadWriter) error {
			return op(ctx, impl.(T), args, stream)
		}
	}
	return p
}
