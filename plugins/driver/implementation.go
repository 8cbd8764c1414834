package driver

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"iter"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// Implementation is one kind of a driver with a configuration, called by the
// names of its operations.
type Implementation struct {
	definition *Definition
	kind       string
	config     json.RawMessage
	ctx        *Context
}

// Implementation binds a kind to a configuration and a call's context. A kind
// that the driver does not serve is unsupported-driver, and a configuration
// that does not fit its schema invalid-config.
func (d *Definition) Implementation(kind string, config json.RawMessage, ctx *Context) (*Implementation, error) {
	if err := d.serves(kind); err != nil {
		return nil, err
	}
	if err := d.CheckConfig(config); err != nil {
		return nil, err
	}
	return &Implementation{definition: d, kind: kind, config: append(json.RawMessage(nil), config...), ctx: ctx}, nil
}

// Use is a driver's implementation of k, for a configuration: its own where the
// driver lives in this process, and k's proxy where another process serves it.
func Use[T any](d *Definition, k Kind[T], config json.RawMessage, ctx *Context) (T, error) {
	var none T
	if err := d.serves(k.Name); err != nil {
		return none, err
	}
	if m, ok := d.backend.(maker); ok {
		v, err := m.implementation(ctx, k.Name, config)
		if err != nil {
			return none, err
		}
		impl, ok := v.(T)
		if !ok {
			return none, errs.New(errs.UnsupportedDriver, "driver %s implements another kind %s: %T", d.manifest.ID, k.Name, v)
		}
		return impl, nil
	}
	if k.Proxy == nil {
		return none, errs.New(errs.UnsupportedDriver, "kind %s has no proxy for drivers of another process", clip(k.Name))
	}
	i, err := d.Implementation(k.Name, config, ctx)
	if err != nil {
		return none, err
	}
	return k.Proxy(i), nil
}

// On is the same implementation for another call's context.
func (i *Implementation) On(ctx *Context) *Implementation {
	j := *i
	j.ctx = ctx
	return &j
}

// Stream runs a stream operation until it ends.
func (i *Implementation) Stream(operation string, stream io.ReadWriter, args ...any) error {
	raw, err := encodeArgs(args)
	if err != nil {
		return err
	}
	if err := i.definition.admit(i.kind, operation, true); err != nil {
		return err
	}
	return i.definition.backend.Stream(i.ctx, i.kind, operation, i.config, raw, stream)
}

// Call prepares a call: Await or Progress runs it, once. Nil arguments at the
// end are left out.
func (i *Implementation) Call(operation string, args ...any) *Call {
	c := &Call{implementation: i, operation: operation}
	c.args, c.err = encodeArgs(args)
	c.done = c.err != nil
	return c
}

func encodeArgs(args []any) (json.RawMessage, error) {
	list := make(Args, 0, len(args))
	for n, a := range args {
		raw, err := json.Marshal(a)
		if err != nil {
			return nil, errs.New(errs.InvalidArgs, "argument %d: %v", n+1, err)
		}
		list = append(list, raw)
	}
	return json.Marshal(trim(list))
}

// Call is one call of an operation. It serves one goroutine.
type Call struct {
	implementation *Implementation
	operation      string
	args           json.RawMessage
	done           bool
	result         json.RawMessage
	err            error
}

// Await runs the call; its progress goes to the context that the
// implementation was made with.
func (c *Call) Await() (json.RawMessage, error) {
	if !c.done {
		c.run(c.implementation.ctx)
	}
	return c.result, c.err
}

// Result is what the call answered, after Progress ended.
func (c *Call) Result() (json.RawMessage, error) { return c.Await() }

func (c *Call) run(ctx *Context) {
	defer func() {
		// A driver's fault is its call's, not that of the program it lives in.
		if r := recover(); r != nil {
			c.result, c.err = nil, errs.New(errs.DriverError, "the operation panicked: %v", r)
		}
		c.done = true
	}()
	i := c.implementation
	if c.err = i.definition.admit(i.kind, c.operation, false); c.err == nil {
		c.result, c.err = i.definition.backend.Invoke(ctx, i.kind, c.operation, i.config, c.args)
	}
}

// errLeft is why a call was cancelled whose progress nobody reads on.
var errLeft = errors.New("the loop over the progress was left")

// Progress runs the call and yields its progress instead of emitting it; an
// error comes last. Leaving the loop early cancels the call and waits for it.
func (c *Call) Progress() iter.Seq2[Progress, error] {
	return func(yield func(Progress, error) bool) {
		if c.done {
			if c.err != nil {
				yield(Progress{}, c.err)
			}
			return
		}
		outer := c.implementation.ctx
		ctx, cancel := context.WithCancelCause(outer.Context)
		defer cancel(nil)
		steps, ended := make(chan Progress), make(chan struct{})
		go func() {
			defer close(ended)
			c.run(outer.with(ctx, func(p Progress) {
				select {
				case steps <- p:
				case <-ctx.Done():
				}
			}))
		}()
		for {
			select {
			case p := <-steps:
				if !yield(p, nil) {
					cancel(errLeft)
					<-ended
					return
				}
			case <-ended:
				if c.err != nil {
					yield(Progress{}, c.err)
				}
				return
			}
		}
	}
}

// Answer awaits a call and decodes what it answered; an answer of another shape
// is driver-error.
func Answer[R any](c *Call) (R, error) {
	var r R
	raw, err := c.Await()
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(raw, &r); err != nil {
		return r, errs.New(errs.DriverError, "the answer of %s.%s: %v", c.implementation.kind, c.operation, err)
	}
	return r, nil
}
