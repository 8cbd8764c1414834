package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
)

// answer is all that a call brought.
type answer struct {
	progress []*driverv1.Progress
	results  []string
	errors   []*driverv1.Error
	// late counts messages after the first result or error.
	late int
	// rpc is how the stream itself ended, if not well.
	rpc error
}

// is wants exactly this result, as JSON.
func (a answer) is(want string) error {
	if err := a.whole(); err != nil {
		return err
	}
	if len(a.errors) > 0 {
		return fmt.Errorf("it answers %s: %.200s", a.errors[0].GetCode(), a.errors[0].GetMessage())
	}
	if len(a.results) != 1 {
		return fmt.Errorf("it answers %d results: want 1", len(a.results))
	}
	var got, wanted any
	if err := json.Unmarshal([]byte(a.results[0]), &got); err != nil {
		return fmt.Errorf("the result %.80q is not JSON: %w", a.results[0], err)
	}
	if err := json.Unmarshal([]byte(want), &wanted); err != nil {
		return err
	}
	if !reflect.DeepEqual(got, wanted) {
		return fmt.Errorf("it answers %.200s: want %.200s", a.results[0], want)
	}
	return nil
}

// fails wants exactly one error with this code.
func (a answer) fails(code errs.Code) (*driverv1.Error, error) {
	if err := a.whole(); err != nil {
		return nil, err
	}
	if len(a.results) > 0 {
		return nil, fmt.Errorf("it answers %.80s: want the error %s", a.results[0], code)
	}
	if len(a.errors) != 1 {
		return nil, fmt.Errorf("it answers %d errors: want 1", len(a.errors))
	}
	e := a.errors[0]
	if e.GetCode() != string(code) {
		return nil, fmt.Errorf("it answers %.80q, %.120q: want the code %s", e.GetCode(), e.GetMessage(), code)
	}
	return e, nil
}

func (a answer) whole() error {
	if a.rpc != nil {
		return fmt.Errorf("the call broke: %w", a.rpc)
	}
	return nil
}

// code is fails for those who want no more than the code.
func (a answer) code(code errs.Code) error {
	_, err := a.fails(code)
	return err
}

// request is a call of the driver DriverID.
func request(operation, args string, change ...func(*driverv1.InvokeRequest)) *driverv1.InvokeRequest {
	m := &driverv1.InvokeRequest{
		Driver: DriverID, Kind: DriverID, Operation: operation, ConfigJson: "{}", ArgsJson: args, IdempotencyKey: "conformance",
	}
	for _, f := range change {
		f(m)
	}
	return m
}

func within(d time.Duration) func(*driverv1.InvokeRequest) {
	return func(m *driverv1.InvokeRequest) { m.DeadlineMs = time.Now().Add(d).UnixMilli() }
}

func delivering(ref, value string) func(*driverv1.InvokeRequest) {
	return func(m *driverv1.InvokeRequest) { m.Secrets = map[string]string{ref: value} }
}

func configured(config string) func(*driverv1.InvokeRequest) {
	return func(m *driverv1.InvokeRequest) { m.ConfigJson = config }
}

// call runs m to the end of its stream.
func (r *run) call(p *process, m *driverv1.InvokeRequest, onProgress func(*driverv1.Progress)) answer {
	ctx, cancel := r.wait()
	defer cancel()
	return callIn(ctx, p, m, onProgress)
}

func callIn(ctx context.Context, p *process, m *driverv1.InvokeRequest, onProgress func(*driverv1.Progress)) answer {
	var a answer
	stream, err := p.conn.Invoke(ctx, connect.NewRequest(m))
	if err != nil {
		return answer{rpc: slow(ctx, err)}
	}
	defer stream.Close()
	for stream.Receive() {
		if len(a.results)+len(a.errors) > 0 {
			a.late++
		}
		switch e := stream.Msg().GetEvent().(type) {
		case *driverv1.InvokeResponse_Progress:
			a.progress = append(a.progress, e.Progress)
			if onProgress != nil {
				onProgress(e.Progress)
			}
		case *driverv1.InvokeResponse_Result:
			a.results = append(a.results, e.Result.GetResultJson())
		case *driverv1.InvokeResponse_Error:
			a.errors = append(a.errors, e.Error)
		}
	}
	a.rpc = slow(ctx, stream.Err())
	return a
}

// ask calls an operation of the driver DriverID on the shared process.
func (r *run) ask(operation, args string, change ...func(*driverv1.InvokeRequest)) (answer, error) {
	p, err := r.plugin()
	if err != nil {
		return answer{}, err
	}
	return r.call(p, request(operation, args, change...), nil), nil
}

// result is ask for a call that must succeed.
func (r *run) result(operation, args string, change ...func(*driverv1.InvokeRequest)) (string, error) {
	a, err := r.ask(operation, args, change...)
	if err != nil {
		return "", err
	}
	if err := a.whole(); err != nil {
		return "", err
	}
	if len(a.errors) > 0 {
		return "", fmt.Errorf("it answers %s: %.200s", a.errors[0].GetCode(), a.errors[0].GetMessage())
	}
	if len(a.results) != 1 {
		return "", fmt.Errorf("it answers %d results: want 1", len(a.results))
	}
	return a.results[0], nil
}

func answers(operation, args, want string, change ...func(*driverv1.InvokeRequest)) func(*run) error {
	return func(r *run) error {
		a, err := r.ask(operation, args, change...)
		if err != nil {
			return err
		}
		return a.is(want)
	}
}

func fails(operation, args string, code errs.Code, change ...func(*driverv1.InvokeRequest)) func(*run) error {
	return func(r *run) error {
		a, err := r.ask(operation, args, change...)
		if err != nil {
			return err
		}
		return a.code(code)
	}
}

// all wants every one of several checks.
func all(checks ...func(*run) error) func(*run) error {
	return func(r *run) error {
		for _, c := range checks {
			if err := c(r); err != nil {
				return err
			}
		}
		return nil
	}
}

// on is the first driver that a plugin serves, for rules that any driver must keep.
func (r *run) on() (*process, *driverv1.DescribedDriver, error) {
	p, err := r.plugin()
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := r.wait()
	defer cancel()
	d, err := p.conn.describe(ctx)
	if err != nil {
		return nil, nil, err
	}
	if len(d.GetDrivers()) == 0 || len(d.GetDrivers()[0].GetManifest().GetKinds()) == 0 {
		return nil, nil, errors.New("it serves no driver")
	}
	return p, d.GetDrivers()[0], nil
}

// invoke calls whatever driver the plugin serves first.
func invoke(code errs.Code, change func(*driverv1.InvokeRequest)) func(*run) error {
	return func(r *run) error {
		p, d, err := r.on()
		if err != nil {
			return err
		}
		m := &driverv1.InvokeRequest{Driver: d.GetManifest().GetId(), Kind: d.GetManifest().GetKinds()[0], Operation: "noSuchOperation", ConfigJson: "{}"}
		change(m)
		return r.call(p, m, nil).code(code)
	}
}

const noDriver = "no-such-driver"

// callRules are about calls of any driver.
func callRules() []Rule {
	return []Rule{
		{ID: "invoke.driver", Statement: "a driver that it does not serve is unsupported-driver",
			check: invoke(errs.UnsupportedDriver, func(m *driverv1.InvokeRequest) { m.Driver = noDriver })},
		{ID: "invoke.kind", Statement: "a kind that the driver does not implement is unsupported-driver",
			check: invoke(errs.UnsupportedDriver, func(m *driverv1.InvokeRequest) { m.Kind = "no-such-kind" })},
		{ID: "invoke.operation", Statement: "an operation that the kind does not have is unsupported-operation",
			check: invoke(errs.UnsupportedOperation, func(*driverv1.InvokeRequest) {})},
		{ID: "validate.driver", Statement: "Validate of a driver that it does not serve is unsupported-driver", check: func(r *run) error {
			return r.validate(&driverv1.ValidateRequest{Driver: noDriver, ConfigJson: "{}"}, errs.UnsupportedDriver)
		}},
		{ID: "message.request", Statement: "a message over 16 MiB is refused, and the connection lives", check: func(r *run) error {
			p, d, err := r.on()
			if err != nil {
				return err
			}
			before := p.conn.dials.Load()
			a := r.call(p, &driverv1.InvokeRequest{
				Driver: d.GetManifest().GetId(), Kind: d.GetManifest().GetKinds()[0], Operation: "noSuchOperation",
				ArgsJson: `["` + strings.Repeat("x", bcx.MaxMessage) + `"]`,
			}, nil)
			if err := tooLarge(a); err != nil {
				return err
			}
			return r.connectionLives(p, before)
		}},
	}
}

// tooLarge wants invalid-args, or gRPC's own word for it, which a host reads as that.
func tooLarge(a answer) error {
	if connect.CodeOf(a.rpc) == connect.CodeResourceExhausted {
		return nil
	}
	return a.code(errs.InvalidArgs)
}

func (r *run) connectionLives(p *process, dials int32) error {
	ctx, cancel := r.wait()
	defer cancel()
	if _, err := p.conn.describe(ctx); err != nil {
		return fmt.Errorf("afterwards: %w", err)
	}
	if p.conn.dials.Load() != dials {
		return errors.New("afterwards the connection is another one")
	}
	return nil
}

// validate wants an error with this code, or none.
func (r *run) validate(m *driverv1.ValidateRequest, code errs.Code) error {
	p, err := r.plugin()
	if err != nil {
		return err
	}
	ctx, cancel := r.wait()
	defer cancel()
	v, err := p.conn.Validate(ctx, connect.NewRequest(m))
	if err != nil {
		return fmt.Errorf("call Validate: %w", slow(ctx, err))
	}
	if got := v.Msg.GetError().GetCode(); got != string(code) {
		return fmt.Errorf("it answers %.80q, %.120q: want the code %q", got, v.Msg.GetError().GetMessage(), code)
	}
	return nil
}

func validates(config string, code errs.Code, secrets map[string]string, limit time.Duration) func(*run) error {
	return func(r *run) error {
		m := &driverv1.ValidateRequest{Driver: DriverID, ConfigJson: config, Secrets: secrets}
		if limit > 0 {
			m.DeadlineMs = time.Now().Add(limit).UnixMilli()
		}
		return r.validate(m, code)
	}
}

const (
	ref   = "secret://root/conformance"
	value = "s3cret of the suite"
)

func quote(s string) string {
	raw, _ := json.Marshal(s)
	return string(raw)
}

// operationRules need the driver DriverID.
func operationRules() []Rule {
	rules := []Rule{
		{ID: "args.array", Statement: "an array holds the positional arguments", check: all(
			answers("echo", `["a",{"b":[1]},null,false]`, `["a",{"b":[1]},null,false]`), answers("echo", `[]`, `[]`))},
		{ID: "args.single", Statement: "any other value is the single argument", check: all(
			answers("echo", `{"a":1}`, `[{"a":1}]`), answers("echo", `"x"`, `["x"]`), answers("echo", `0`, `[0]`))},
		{ID: "args.absent", Statement: "nothing is no argument", check: answers("echo", "", `[]`)},
		{ID: "args.trailing", Statement: "nulls at the end are arguments that were left out", check: all(
			answers("echo", `[1,null,null]`, `[1]`), answers("echo", `[null,1]`, `[null,1]`))},
		{ID: "args.json", Statement: "arguments that are not JSON are invalid-args", check: fails("echo", `[1`, errs.InvalidArgs)},
		{ID: "result.json", Statement: "a result is JSON", check: answers("echo", `["ä\u2028\"",1.5]`, `["ä\u2028\"",1.5]`)},
		{ID: "result.null", Statement: "an operation that answers nothing answers null", check: func(r *run) error {
			got, err := r.result("nothing", "")
			if err == nil && strings.TrimSpace(got) != "null" {
				err = fmt.Errorf("it answers %q", got)
			}
			return err
		}},
		{ID: "result.once", Statement: "a call ends with exactly one result or error", check: func(r *run) error {
			for _, op := range []string{"nothing", "failPlain"} {
				a, err := r.ask(op, `["x"]`)
				if err != nil {
					return err
				}
				if err := a.whole(); err != nil {
					return err
				}
				if n := len(a.results) + len(a.errors); n != 1 || a.late != 0 {
					return fmt.Errorf("%s: %d results and errors, %d messages after the first", op, n, a.late)
				}
			}
			return nil
		}},
		{ID: "progress.order", Statement: "progress arrives whole and in order, before the result", check: func(r *run) error {
			a, err := r.ask("progress", `[5]`)
			if err != nil {
				return err
			}
			if err := a.is(`5`); err != nil {
				return err
			}
			if len(a.progress) != 5 || a.late != 0 {
				return fmt.Errorf("%d progress messages, %d of them late: want 5", len(a.progress), a.late)
			}
			for i, got := range a.progress {
				want := &driverv1.Progress{Phase: "count", Message: fmt.Sprintf("%d of 5", i+1), Done: uint64(i + 1), Total: 5}
				if !proto.Equal(got, want) {
					return fmt.Errorf("message %d is %v: want %v", i+1, got, want)
				}
			}
			return nil
		}},
		{ID: "progress.live", Statement: "progress arrives while the operation runs", check: func(r *run) error {
			_, err := r.cancelled("live")
			return err
		}},
		{ID: "call.parallel", Statement: "calls run beside each other", check: func(r *run) error { return r.parallel(16) }},
		{ID: "call.context", Statement: "idempotency key, traceparent and target node reach the operation", check: answers("context", "",
			`{"idempotencyKey":"cmd_1","traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01","targetNodeId":"node_1"}`,
			func(m *driverv1.InvokeRequest) {
				m.IdempotencyKey, m.TargetNodeId = "cmd_1", "node_1"
				m.Traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
			})},
		{ID: "call.cancel", Statement: "a cancelled call's operation is told", check: func(r *run) error {
			token, err := r.cancelled("cancel")
			if err != nil {
				return err
			}
			return r.eventually("cancelled", token)
		}},
		{ID: "deadline.kept", Statement: "an operation that lasts longer than its deadline ends with timeout",
			check: fails("sleep", `[600000]`, errs.Timeout, within(200*time.Millisecond))},
		{ID: "deadline.ignored", Statement: "a deadline ends the call even when the operation ignores it", check: func(r *run) error {
			const lasts = 2500 * time.Millisecond
			// Before the call, since a process may have to be started for it.
			if _, err := r.plugin(); err != nil {
				return err
			}
			begun := time.Now()
			a, err := r.ask("ignoreDeadline", fmt.Sprintf("[%d]", lasts.Milliseconds()), within(200*time.Millisecond))
			if err != nil {
				return err
			}
			if err := a.code(errs.Timeout); err != nil {
				return err
			}
			if took := time.Since(begun); took >= lasts {
				return fmt.Errorf("timeout came after %v, when the operation was over", took)
			}
			return nil
		}},
		{ID: "deadline.past", Statement: "a deadline that is over is timeout", check: fails("sleep", `[0]`, errs.Timeout, within(-time.Minute))},
		{ID: "deadline.none", Statement: "0 is no deadline", check: answers("sleep", `[0]`, `"slept"`)},
		{ID: "deadline.far", Statement: "a deadline years away is no timeout", check: answers("sleep", `[1]`, `"slept"`, within(10*365*24*time.Hour))},
		{ID: "secret.delivered", Statement: "a delivered secret resolves", check: answers("secret", quote(ref), quote(value), delivering(ref, value))},
		{ID: "secret.undelivered", Statement: "a secret that was not delivered is credentials-unavailable",
			check: fails("secret", quote("secret://root/other"), errs.CredentialsUnavailable, delivering(ref, value))},
		{ID: "secret.scope", Statement: "a secret of one call does not resolve in the next", check: func(r *run) error {
			if _, err := r.ask("secret", quote(ref), delivering(ref, value)); err != nil {
				return err
			}
			return fails("secret", quote(ref), errs.CredentialsUnavailable)(r)
		}},
		{ID: "error.own", Statement: "a driver's own error keeps its code and message",
			check: failsWith("fail", `{"code":"fan-stuck","message":"fan 3 does not turn"}`, "fan-stuck", "fan 3 does not turn", false)},
		{ID: "error.plain", Statement: "any other error is driver-error with its message",
			check: failsWith("failPlain", `"the fan fell off"`, errs.DriverError, "the fan fell off", false)},
		{ID: "error.compute", Statement: "an upper-case code of the control plane travels in kebab-case",
			check: failsWith("failCompute", `{"code":"INVALID_CONFIG","message":"no fan"}`, errs.InvalidConfig, "no fan", false)},
		{ID: "error.form", Statement: "a code that is not kebab-case is driver-error",
			check: failsWith("fail", `{"code":"Fan Stuck","message":"fan 4 does not turn"}`, errs.DriverError, "fan 4 does not turn", false)},
		{ID: "error.unsafe", Statement: "an error is not retryable unless its operation is retry-safe",
			check: failsWith("fail", `{"code":"fan-busy","message":"later","retryable":true}`, "fan-busy", "later", false)},
		{ID: "error.retrysafe", Statement: "a retryable error of a retry-safe operation says so",
			check: failsWith("failRetrySafe", `{"code":"fan-busy","message":"later","retryable":true}`, "fan-busy", "later", true)},
		{ID: "config.parsed", Statement: "the plugin parses the configuration", check: func(r *run) error {
			got, err := r.result("config", "", configured(`{"greeting":"hi","delayMs":5}`))
			return wantFields(got, err, map[string]any{"greeting": "hi", "delayMs": 5.0})
		}},
		{ID: "config.defaults", Statement: "and applies its defaults", check: func(r *run) error {
			got, err := r.result("config", "")
			return wantFields(got, err, map[string]any{"greeting": "hello", "delayMs": 0.0})
		}},
		{ID: "config.types", Statement: "a value of another type is invalid-config", check: fails("config", "", errs.InvalidConfig, configured(`{"greeting":7}`))},
		{ID: "config.unknown", Statement: "an unknown field is invalid-config", check: fails("config", "", errs.InvalidConfig, configured(`{"greetings":"hi"}`))},
		{ID: "config.json", Statement: "a configuration that is not JSON is invalid-config", check: fails("config", "", errs.InvalidConfig, configured(`{`))},
		{ID: "validate.good", Statement: "Validate of a good configuration answers no error", check: validates(`{"greeting":"hi"}`, "", nil, 0)},
		{ID: "validate.bad", Statement: "Validate of a bad one answers invalid-config", check: validates(`{"delayMs":-1}`, errs.InvalidConfig, nil, 0)},
		{ID: "validate.live", Statement: "Validate runs the live check, with the secrets that were delivered", check: all(
			validates(`{"token":"`+ref+`"}`, "", map[string]string{ref: value}, 0),
			validates(`{"token":"`+ref+`"}`, errs.CredentialsUnavailable, nil, 0))},
		{ID: "validate.deadline", Statement: "a deadline ends Validate with timeout", check: validates(`{"delayMs":60000}`, errs.Timeout, nil, 200*time.Millisecond)},
		{ID: "message.result", Statement: "a result over 16 MiB is invalid-args, and the connection lives", check: func(r *run) error {
			p, err := r.plugin()
			if err != nil {
				return err
			}
			before := p.conn.dials.Load()
			a := r.call(p, request("big", fmt.Sprint(bcx.MaxMessage+1)), nil)
			if err := a.code(errs.InvalidArgs); err != nil {
				return err
			}
			return r.connectionLives(p, before)
		}},
		{ID: "message.large", Statement: "a message of 15 MiB passes both ways", check: func(r *run) error {
			const n = 15 << 20
			got, err := r.result("echo", `["`+strings.Repeat("y", n)+`"]`)
			if err == nil && len(got) < n {
				err = fmt.Errorf("%d bytes came back: want %d", len(got), n)
			}
			return err
		}},
		{ID: "print.harmless", Statement: "a stray print does no harm to the connection", check: all(
			answers("print", `["a stray line"]`, `null`), answers("echo", `[1]`, `[1]`))},
	}
	for i := range rules {
		rules[i].Driver = true
	}
	return rules
}

func failsWith(operation, args string, code errs.Code, message string, retryable bool) func(*run) error {
	return func(r *run) error {
		a, err := r.ask(operation, args)
		if err != nil {
			return err
		}
		e, err := a.fails(code)
		if err != nil {
			return err
		}
		if e.GetMessage() != message {
			return fmt.Errorf("the message is %.120q: want %q", e.GetMessage(), message)
		}
		if e.GetRetryable() != retryable {
			return fmt.Errorf("retryable is %v", e.GetRetryable())
		}
		return nil
	}
}

func wantFields(got string, err error, want map[string]any) error {
	if err != nil {
		return err
	}
	var fields map[string]any
	if err := json.Unmarshal([]byte(got), &fields); err != nil {
		return fmt.Errorf("it answers %.200q: %w", got, err)
	}
	for name, v := range want {
		if !reflect.DeepEqual(fields[name], v) {
			return fmt.Errorf("it answers %.200s: want %s to be %v", got, name, v)
		}
	}
	return nil
}

// token names one wait, so that a plugin remembers which were cancelled.
func token(name string) string { return fmt.Sprintf("%s-%d", name, time.Now().UnixNano()) }

// cancelled starts an operation that waits, and cancels it once it has said so.
func (r *run) cancelled(name string) (string, error) {
	p, err := r.plugin()
	if err != nil {
		return "", err
	}
	t := token(name)
	ctx, cancel := r.wait()
	defer cancel()
	heard := false
	callIn(ctx, p, request("wait", quote(t)), func(*driverv1.Progress) {
		heard = true
		cancel()
	})
	if !heard {
		return "", errors.New("no progress came while the operation ran")
	}
	return t, nil
}

// eventually waits for the plugin to remember that t was cancelled.
func (r *run) eventually(operation, t string) error {
	ctx, cancel := r.wait()
	defer cancel()
	for {
		got, err := r.result(operation, quote(t))
		if err != nil {
			return err
		}
		if strings.TrimSpace(got) == "true" {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.New("the operation was not told")
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// parallel starts n waiting operations and wants to hear of all before any ends.
func (r *run) parallel(n int) error {
	p, err := r.plugin()
	if err != nil {
		return err
	}
	ctx, cancel := r.wait()
	defer cancel()
	heard := make(chan struct{}, n)
	var calls sync.WaitGroup
	for i := range n {
		calls.Go(func() {
			callIn(ctx, p, request("wait", quote(token(fmt.Sprint("parallel", i)))), func(*driverv1.Progress) { heard <- struct{}{} })
		})
	}
	defer calls.Wait()
	defer cancel()
	for i := range n {
		select {
		case <-heard:
		case <-ctx.Done():
			return fmt.Errorf("%d of %d calls run at a time", i, n)
		}
	}
	return nil
}
