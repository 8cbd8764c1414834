package instances

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strconv"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/host"
	"github.com/better-compute/site-appliance/plugins/instance"
)

// Host runs operations of drivers in plugins.
type Host interface {
	Drivers() []driver.Manifest
	Invoke(ctx context.Context, c host.Call) (json.RawMessage, error)
}

// runtimeKind is the kind whose drivers are runtimes.
var runtimeKind = instance.RuntimeKind().Name

// Hosted are the drivers of kind runtime that h hosts, as runtimes with the
// configurations given by driver id. A driver whose id is a built-in runtime's
// is left out, and so is one whose configuration its schema refuses.
func Hosted(h Host, builtIn []string, configs map[string]json.RawMessage, log *slog.Logger) map[string]Runtime {
	all := map[string]Runtime{}
	for _, m := range h.Drivers() {
		switch {
		case !slices.Contains(m.Kinds, runtimeKind):
			continue
		case slices.Contains(builtIn, m.ID):
			log.Error("a hosted runtime is left out: its id is a built-in runtime's", "driver", m.ID)
			continue
		case !driver.ValidID(m.ID):
			log.Error("a hosted runtime is left out: its id names no runtime", "driver", m.ID)
			continue
		}
		config := configs[m.ID]
		if config == nil {
			config = json.RawMessage("{}")
		}
		d, err := driver.Remote(m, backend{h, m.ID})
		if err == nil {
			err = d.CheckConfig(config)
		}
		if err != nil {
			// That runtime is lost, not the node.
			log.Error("a hosted runtime is left out", "driver", m.ID, "reason", err.Error())
			continue
		}
		all[m.ID] = hosted{d, config, log}
	}
	for id := range maps.Keys(configs) {
		if all[id] == nil {
			log.Warn("a runtime is configured that no plugin here serves", "runtime", id)
		}
	}
	return all
}

// hosted is one driver of kind runtime, in a plugin.
type hosted struct {
	driver *driver.Definition
	config json.RawMessage
	log    *slog.Logger
}

func (r hosted) use(ctx context.Context, key string) (instance.Runtime, *driver.Context, error) {
	c := driver.NewContext(ctx, nil, r.log, func(p driver.Progress) {
		r.log.Info("runtime at work", "runtime", r.driver.ID(), "key", key, "phase", p.Phase, "progress", p.Message, "done", p.Done, "total", p.Total)
	})
	c.IdempotencyKey = key
	impl, err := driver.Use(r.driver, instance.RuntimeKind(), r.config, c)
	return impl, c, err
}

func (r hosted) List(ctx context.Context) ([]instance.Status, error) {
	impl, c, err := r.use(ctx, "")
	if err != nil {
		return nil, err
	}
	return impl.List(c)
}

func (r hosted) Apply(ctx context.Context, s instance.Spec) error {
	impl, c, err := r.use(ctx, s.ID+"/"+strconv.FormatUint(s.Generation, 10))
	if err != nil {
		return err
	}
	return impl.Apply(c, s)
}

func (r hosted) Remove(ctx context.Context, id string) error {
	impl, c, err := r.use(ctx, id+"/remove")
	if err != nil {
		return err
	}
	return impl.Remove(c, id)
}

// backend carries a definition's calls to the plugin that serves it.
type backend struct {
	host Host
	id   string
}

func (b backend) Invoke(ctx *driver.Context, kind, operation string, config, args json.RawMessage) (json.RawMessage, error) {
	deadline, _ := ctx.Deadline()
	return b.host.Invoke(ctx, host.Call{
		Driver: b.id, Kind: kind, Operation: operation, Config: config, Args: args,
		IdempotencyKey: ctx.IdempotencyKey, Traceparent: ctx.Traceparent, TargetNodeID: ctx.TargetNodeID, Deadline: deadline,
		Progress: func(phase, message string, done, total uint64) {
			ctx.Emit(driver.Progress{Phase: phase, Message: message, Done: done, Total: total})
		},
	})
}

func (b backend) Stream(*driver.Context, string, string, json.RawMessage, json.RawMessage, io.ReadWriter) error {
	return errs.New(errs.UnsupportedOperation, "a runtime has no streams")
}

func (b backend) Validate(*driver.Context, json.RawMessage) error {
	return errs.New(errs.UnsupportedOperation, "a runtime is validated by the call that uses it")
}

func (b backend) Health(context.Context) error { return nil }
