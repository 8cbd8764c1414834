package external

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/peer"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// backend is one driver of a plugin.
type backend struct {
	d          *Driver
	id         string
	definition *driver.Definition
}

var _ driver.Backend = (*backend)(nil)

// secrets resolves what the configuration refers to in its secret fields.
func (b *backend) secrets(ctx context.Context, call *driver.Context, config json.RawMessage) (map[string]secret.Value, error) {
	from := b.d.o.Secrets
	if from == nil {
		from = call.Secrets
	}
	values := map[string]secret.Value{}
	for _, ref := range b.definition.SecretRefs(config) {
		if from == nil {
			return nil, errs.New(errs.CredentialsUnavailable, "nothing resolves secrets for plugin %s", b.d.name)
		}
		v, err := from.Resolve(ctx, ref)
		if coded := new(errs.Error); err != nil && !errors.As(err, &coded) && ctx.Err() == nil {
			err = errs.New(errs.CredentialsUnavailable, "%v", err)
		}
		if err != nil {
			return nil, err
		}
		values[string(ref)] = v
	}
	return values, nil
}

func (b *backend) call(ctx context.Context, c *driver.Context, kind, operation string, config, args json.RawMessage, deadline time.Time) (peer.Call, error) {
	secrets, err := b.secrets(ctx, c, config)
	if err != nil {
		return peer.Call{}, err
	}
	return peer.Call{
		Driver: b.id, Kind: kind, Operation: operation, Config: config, Args: args, Secrets: secrets,
		IdempotencyKey: c.IdempotencyKey, Traceparent: c.Traceparent, TargetNodeID: c.TargetNodeID, Deadline: deadline,
		Progress: func(phase, message string, done, total uint64) {
			c.Emit(driver.Progress{Phase: phase, Message: message, Done: done, Total: total})
		},
	}, nil
}

// Invoke sends a call. Its deadline is the context's, or the call time-out; the
// plugin has a second more to answer for itself.
func (b *backend) Invoke(ctx *driver.Context, kind, operation string, config, args json.RawMessage) (result json.RawMessage, err error) {
	deadline := b.d.deadline(ctx)
	bound, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	call, err := b.call(bound, ctx, kind, operation, config, args, deadline)
	if err != nil {
		return nil, err
	}
	patient, done := cancelOnly(ctx)
	defer done()
	err = b.d.with(bound, func(r *run) (err error) {
		result, err = r.peer.Invoke(patient, call)
		return err
	})
	if err != nil {
		return nil, b.judge(kind, operation, err)
	}
	if !json.Valid(result) {
		return nil, errs.New(errs.DriverError, "plugin %s answered %s.%s with what is not JSON", b.d.name, kind, operation)
	}
	return result, nil
}

// judge takes a plugin's word that a repeat may help only for an operation that
// it listed as retry-safe. What this side finds out by itself stays: that the
// connection broke, or the time was over.
func (b *backend) judge(kind, operation string, err error) error {
	own := new(errs.Error)
	if !errors.As(err, &own) || !own.Retryable || b.definition.IsRetrySafe(kind, operation) ||
		own.Code == errs.Unreachable || own.Code == errs.Timeout {
		return err
	}
	return errs.New(own.Code, "%s", own.Message)
}

// cancelOnly ends when somebody cancels ctx, and not at its deadline.
func cancelOnly(ctx context.Context) (context.Context, context.CancelFunc) {
	c, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		if errors.Is(ctx.Err(), context.Canceled) {
			cancel()
		}
	})
	return c, func() {
		stop()
		cancel()
	}
}

// Validate has the plugin check a configuration.
func (b *backend) Validate(ctx *driver.Context, config json.RawMessage) error {
	deadline := b.d.deadline(ctx)
	bound, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	secrets, err := b.secrets(bound, ctx, config)
	if err != nil {
		return err
	}
	patient, done := cancelOnly(ctx)
	defer done()
	return b.d.with(bound, func(r *run) error { return r.peer.Validate(patient, b.id, config, secrets, deadline) })
}

// Health is nil while the whole plugin serves.
func (b *backend) Health(ctx context.Context) error {
	h, err := b.d.Health(ctx)
	if err == nil && !h.Serving {
		err = errs.New(errs.DriverError, "plugin %s does not serve: %s", b.d.name, h.Message)
	}
	return err
}

// Stream runs until the plugin closes, stream says io.EOF and the plugin has
// then said everything, or ctx is cancelled. The deadline bounds the opening.
// A read of stream that is under way at the end is interrupted if stream has
// SetReadDeadline, and else ends when the caller closes it.
func (b *backend) Stream(ctx *driver.Context, kind, operation string, config, args json.RawMessage, stream io.ReadWriter) error {
	deadline := b.d.deadline(ctx)
	bound, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	call, err := b.call(bound, ctx, kind, operation, config, args, deadline)
	if err != nil {
		return err
	}
	var in *run
	var remote io.ReadWriteCloser
	err = b.d.with(bound, func(r *run) (err error) {
		in = r
		remote, err = r.peer.Stream(ctx, call)
		return err
	})
	if err != nil {
		return b.judge(kind, operation, err)
	}
	defer remote.Close()
	err = pump(stream, remote)
	if lost := new(peer.Lost); errors.As(err, &lost) {
		in.lose()
	}
	return b.judge(kind, operation, err)
}

// pump carries bytes between the caller's stream and the plugin's.
func pump(local io.ReadWriter, remote io.ReadWriteCloser) error {
	// The plugin ends once it knows that no more comes. One that says nothing
	// more and does not end either is left.
	idle := time.AfterFunc(time.Hour, func() { remote.Close() })
	idle.Stop()
	defer idle.Stop()
	var ending atomic.Bool
	sent := make(chan error, 1)
	go func() {
		_, err := io.Copy(onlyWriter{remote}, onlyReader{local})
		if err == nil {
			ending.Store(true)
			idle.Reset(bcx.ShutdownGrace)
			if w, ok := remote.(interface{ CloseWrite() error }); ok {
				err = w.CloseWrite()
			}
		} else if !errors.Is(err, io.ErrClosedPipe) {
			remote.Close()
		}
		sent <- err
	}()
	buffer := make([]byte, 64<<10)
	var received error
	for received == nil {
		var n int
		n, received = remote.Read(buffer)
		if ending.Load() {
			idle.Reset(bcx.ShutdownGrace)
		}
		if n > 0 {
			if _, err := local.Write(buffer[:n]); err != nil {
				received = fmt.Errorf("write the plugin's bytes: %w", err)
			}
		}
	}
	if l, ok := local.(interface{ SetReadDeadline(time.Time) error }); ok {
		_ = l.SetReadDeadline(time.Now())
	}
	switch {
	case errors.Is(received, io.EOF):
		return nil
	case errors.Is(received, io.ErrClosedPipe):
		// Closed from this side: the caller's reading failed, or the plugin
		// did not end after the caller had.
		if ending.Load() {
			return nil
		}
		return fmt.Errorf("read bytes for the plugin: %w", <-sent)
	}
	return received
}

// These hide all but one method, so that io.Copy uses a buffer of its own.
type (
	onlyReader struct{ io.Reader }
	onlyWriter struct{ io.Writer }
)
