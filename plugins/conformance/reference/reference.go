// Package reference declares the driver that lets a plugin take every rule of
// the conformance suite: an operation for each thing that bcx asks for.
package reference

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/schema"
)

// id is the driver's, and its only kind's.
const id = "conformance"

// keep bounds how many cancelled waits are remembered.
const keep = 1024

// Config is the driver's configuration.
type Config struct {
	Greeting string     `json:"greeting"`
	Token    driver.Ref `json:"token,omitempty"`
	// DelayMs is how long Validate takes.
	DelayMs int64 `json:"delayMs"`
}

// part is the driver under one configuration.
type part struct {
	config Config
	memory *memory
}

// memory holds which waits were cancelled, for the calls that ask.
type memory struct {
	mu     sync.Mutex
	tokens []string
}

func (m *memory) add(token string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.tokens) == keep {
		m.tokens = m.tokens[1:]
	}
	m.tokens = append(m.tokens, token)
}

func (m *memory) has(token string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Contains(m.tokens, token)
}

// failure is an error that a caller asks for.
type failure struct {
	Code      string `json:"code"`
	Message   string `json:"message"`
	Retryable bool   `json:"retryable"`
}

func (f failure) err() error {
	return &errs.Error{Code: errs.Code(f.Code), Message: f.Message, Retryable: f.Retryable}
}

// Driver is the driver conformance.
func Driver() (*driver.Definition, error) {
	config, err := schema.New(schema.Fields{
		"greeting": schema.String().Max(64).Default("hello"),
		"token":    schema.Secret().Optional(),
		"delayMs":  schema.Int().Min(0).Max(60_000).Default(0),
	})
	if err != nil {
		return nil, err
	}
	memory := &memory{}
	return driver.Define(driver.Spec[Config]{
		ID: id, Version: "1.0.0", RunsOn: "site", Config: config, Capabilities: []string{id},
		RetrySafe: []string{
			id + ".config", id + ".context", id + ".echo", id + ".failRetrySafe", id + ".nothing", id + ".secret",
		},
		Validate: func(ctx *driver.Context, c Config) error {
			if c.Token != "" {
				if _, err := ctx.Secrets.Resolve(ctx, c.Token); err != nil {
					return err
				}
			}
			return pause(ctx, time.Duration(c.DelayMs)*time.Millisecond)
		},
	}, driver.Implement(kind(), func(c Config, _ *driver.Context) (*part, error) { return &part{c, memory}, nil }))
}

func kind() driver.Kind[*part] {
	fail := driver.Ask(decode[failure], func(_ *part, _ *driver.Context, f failure) (any, error) { return nil, f.err() })
	return driver.Kind[*part]{
		Name: id,
		Operations: map[string]driver.Operation[*part]{
			"echo": func(_ *driver.Context, _ *part, args driver.Args) (any, error) {
				return append([]json.RawMessage{}, args...), nil
			},
			"nothing":        func(*driver.Context, *part, driver.Args) (any, error) { return nil, nil },
			"config":         driver.Get(func(p *part, _ *driver.Context) (Config, error) { return p.config, nil }),
			"context":        driver.Get(contextOf),
			"sleep":          driver.Ask(millis, (*part).sleep),
			"ignoreDeadline": driver.Ask(millis, (*part).ignoreDeadline),
			"wait":           driver.Ask(decode[string], (*part).wait),
			"cancelled":      driver.Ask(decode[string], func(p *part, _ *driver.Context, t string) (bool, error) { return p.memory.has(t), nil }),
			"progress":       driver.Ask(decode[uint64], (*part).progress),
			"fail":           fail,
			"failRetrySafe":  fail,
			"failCompute":    fail,
			"failPlain": driver.Ask(decode[string], func(_ *part, _ *driver.Context, m string) (any, error) {
				return nil, errors.New(m)
			}),
			"secret": driver.Ask(decode[driver.Ref], func(_ *part, ctx *driver.Context, r driver.Ref) (string, error) {
				v, err := ctx.Secrets.Resolve(ctx, r)
				return string(v.Reveal()), err
			}),
			"big":   driver.Ask(decode[uint32], func(_ *part, _ *driver.Context, n uint32) (string, error) { return strings.Repeat("x", int(n)), nil }),
			"log":   driver.Set(decode[string], func(_ *part, ctx *driver.Context, m string) error { ctx.Log.Info(m); return nil }),
			"print": driver.Set(decode[string], func(_ *part, _ *driver.Context, m string) error { fmt.Println(m); return nil }),
		},
		Streams: map[string]driver.StreamOperation[*part]{"pipe": func(ctx *driver.Context, p *part, args driver.Args, stream io.ReadWriter) error {
			return p.pipe(ctx, args, stream)
		}},
	}
}

func decode[A any](raw json.RawMessage) (a A, err error) {
	if json.Unmarshal(raw, &a) != nil {
		return a, errs.New(errs.InvalidArgs, "want a %T", a)
	}
	return a, nil
}

func millis(raw json.RawMessage) (time.Duration, error) {
	n, err := decode[uint32](raw)
	return time.Duration(n) * time.Millisecond, err
}

func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func contextOf(_ *part, ctx *driver.Context) (map[string]string, error) {
	return map[string]string{
		"idempotencyKey": ctx.IdempotencyKey, "traceparent": ctx.Traceparent, "targetNodeId": ctx.TargetNodeID,
	}, nil
}

func (p *part) sleep(ctx *driver.Context, d time.Duration) (string, error) {
	ctx.Emit(driver.Progress{Phase: "sleep"})
	return "slept", pause(ctx, d)
}

func (p *part) ignoreDeadline(_ *driver.Context, d time.Duration) (string, error) {
	time.Sleep(d)
	return "slept", nil
}

func (p *part) wait(ctx *driver.Context, token string) (any, error) {
	ctx.Emit(driver.Progress{Phase: "wait"})
	<-ctx.Done()
	p.memory.add(token)
	return nil, ctx.Err()
}

func (p *part) progress(ctx *driver.Context, n uint64) (uint64, error) {
	for i := range n {
		ctx.Emit(driver.Progress{Phase: "count", Message: fmt.Sprintf("%d of %d", i+1, n), Done: i + 1, Total: n})
	}
	return n, nil
}

// pipe sends back what it gets.
func (p *part) pipe(ctx *driver.Context, args driver.Args, stream io.ReadWriter) error {
	var how struct {
		OpenDelayMs  int64    `json:"openDelayMs"`
		Refuse, Fail *failure `json:",omitempty"`
		Token        string   `json:"token"`
	}
	if len(args) > 0 && json.Unmarshal(args[0], &how) != nil {
		return errs.New(errs.InvalidArgs, "want an object")
	}
	if how.Refuse != nil {
		return how.Refuse.err()
	}
	if err := pause(ctx, time.Duration(how.OpenDelayMs)*time.Millisecond); err != nil {
		return err
	}
	if how.Token != "" {
		defer context.AfterFunc(ctx, func() { p.memory.add(how.Token) })()
	}
	buf := make([]byte, 64<<10)
	for {
		n, err := stream.Read(buf)
		if err == io.EOF {
			return nil
		}
		if err == nil {
			_, err = stream.Write(buf[:n])
		}
		if err == nil && how.Fail != nil {
			err = how.Fail.err()
		}
		if err != nil {
			return err
		}
	}
}
