package driver_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"testing"
	"testing/synctest"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
)

// silent is a backend that answers nothing.
type silent struct{}

func (silent) Invoke(*driver.Context, string, string, json.RawMessage, json.RawMessage) (json.RawMessage, error) {
	return json.RawMessage("null"), nil
}

func (silent) Stream(*driver.Context, string, string, json.RawMessage, json.RawMessage, io.ReadWriter) error {
	return nil
}
func (silent) Validate(*driver.Context, json.RawMessage) error { return nil }
func (silent) Health(context.Context) error                    { return nil }

// elsewhere stands for another process: it keeps what it was asked and answers
// by its function.
type elsewhere struct {
	asked  []string
	answer func(ctx *driver.Context, operation string) (json.RawMessage, error)
}

func (e *elsewhere) Invoke(ctx *driver.Context, kind, operation string, config, args json.RawMessage) (json.RawMessage, error) {
	e.asked = append(e.asked, fmt.Sprintf("%s.%s %s %s", kind, operation, config, args))
	return e.answer(ctx, operation)
}

func (e *elsewhere) Stream(_ *driver.Context, kind, operation string, config, args json.RawMessage, stream io.ReadWriter) error {
	e.asked = append(e.asked, fmt.Sprintf("%s.%s %s %s", kind, operation, config, args))
	_, err := io.Copy(stream, stream)
	return err
}

func (e *elsewhere) Validate(_ *driver.Context, config json.RawMessage) error {
	e.asked = append(e.asked, fmt.Sprintf("validate %s", config))
	return nil
}

func (e *elsewhere) Health(context.Context) error { return errors.New("not now") }

func manifest() driver.Manifest {
	return driver.Manifest{
		ID: "acme", Version: "1.0.0", RunsOn: "site", Kinds: []string{"fan"}, RetrySafe: []string{"fan.get"}, StreamOperations: []string{"fan.watch"},
		ConfigSchema: json.RawMessage(`{"type":"object","additionalProperties":false,"properties":{"speed":{"type":"integer","default":3}}}`),
	}
}

func TestRemote(t *testing.T) {
	e := &elsewhere{answer: func(*driver.Context, string) (json.RawMessage, error) { return json.RawMessage(`"yes"`), nil }}
	d, err := driver.Remote(manifest(), e)
	if err != nil {
		t.Fatal(err)
	}
	ctx, _ := drivertest.Context(t, t.Context(), nil)
	for _, tt := range []struct {
		kind, operation, config string
		code                    errs.Code
		asked                   string
	}{
		{"fan", "get", ` {"speed": 7}`, "", `fan.get  {"speed": 7} [1]`},
		{"fan", "unheardOf", `{}`, "", `fan.unheardOf {} [1]`},
		{"fan", "get", `{"speed":"x"}`, errs.InvalidConfig, ""},
		{"fan", "watch", `{}`, errs.UnsupportedOperation, ""},
		{"lamp", "get", `{}`, errs.UnsupportedDriver, ""},
	} {
		e.asked = nil
		_, err := d.Invoke(ctx, tt.kind, tt.operation, json.RawMessage(tt.config), json.RawMessage("[1]"))
		if errs.CodeOf(err) != tt.code || fmt.Sprint(e.asked) != "["+tt.asked+"]" {
			t.Errorf("Invoke(%s.%s, %s) = %v, asked %s, want %q, asked %s", tt.kind, tt.operation, tt.config, err, e.asked, tt.code, tt.asked)
		}
	}

	e.asked = nil
	if err := d.Validate(ctx, json.RawMessage(`{"speed":"x"}`)); errs.CodeOf(err) != errs.InvalidConfig || len(e.asked) != 0 {
		t.Errorf("Validate(bad) = %v, asked %s, want invalid-config and nothing asked", err, e.asked)
	}
	if err := d.Validate(ctx, json.RawMessage(`{}`)); err != nil || fmt.Sprint(e.asked) != "[validate {}]" {
		t.Errorf("Validate({}) = %v, asked %s, want the configuration as it was", err, e.asked)
	}
	if d.Health(t.Context()) == nil {
		t.Error("Health() = nil, want the backend's answer")
	}
	if !d.IsRetrySafe("fan", "get") || d.IsRetrySafe("fan", "set") || d.Extension() != "driver" {
		t.Error("a remote definition does not declare what its manifest does")
	}
	if _, err := driver.Remote(manifest(), nil); err == nil {
		t.Error("Remote() without a backend was accepted")
	}
	bad := manifest()
	bad.ConfigSchema = json.RawMessage(`{"$ref":"https://example.com/x"}`)
	if _, err := driver.Remote(bad, e); err == nil {
		t.Error("Remote() with a schema that refers elsewhere was accepted")
	}
}

func local(t *testing.T) *driver.Definition {
	t.Helper()
	d, err := driver.Define(spec(), driver.Implement(kind(), func(n int, _ *driver.Context) (*fan, error) { return &fan{n}, nil }))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestStream(t *testing.T) {
	d := local(t)
	ctx, _ := drivertest.Context(t, t.Context(), nil)
	var out bytes.Buffer
	if err := d.Stream(ctx, "fan", "watch", json.RawMessage("7"), json.RawMessage(`["a",null]`), &out); err != nil || out.String() != `7 ["a"]` {
		t.Errorf("Stream(fan.watch) = %v, wrote %q, want %q", err, out.String(), `7 ["a"]`)
	}
	for _, tt := range []struct {
		kind, operation, config, args string
		code                          errs.Code
	}{
		{"fan", "get", "7", "", errs.UnsupportedOperation},
		{"fan", "none", "7", "", errs.UnsupportedOperation},
		{"lamp", "watch", "7", "", errs.UnsupportedDriver},
		{"fan", "watch", "x", "", errs.InvalidConfig},
		{"fan", "watch", "7", "[1,2]", errs.InvalidArgs},
		{"fan", "watch", "7", "[", errs.InvalidArgs},
	} {
		err := d.Stream(ctx, tt.kind, tt.operation, json.RawMessage(tt.config), json.RawMessage(tt.args), &out)
		if errs.CodeOf(err) != tt.code {
			t.Errorf("Stream(%s.%s, %s, %s) = %v, want %s", tt.kind, tt.operation, tt.config, tt.args, err, tt.code)
		}
	}
	if _, err := d.Invoke(ctx, "fan", "watch", json.RawMessage("7"), nil); errs.CodeOf(err) != errs.UnsupportedOperation {
		t.Errorf("Invoke(fan.watch) = %v, want unsupported-operation", err)
	}
	if !d.IsStream("fan", "watch") || d.IsStream("fan", "get") {
		t.Error("the manifest does not tell streams from operations")
	}

	e := &elsewhere{}
	r, err := driver.Remote(manifest(), e)
	if err != nil {
		t.Fatal(err)
	}
	i, err := r.Implementation("fan", json.RawMessage(`{}`), ctx)
	if err != nil {
		t.Fatal(err)
	}
	echo := bytes.NewBufferString("hello")
	if err := i.Stream("watch", echo, "x", nil); err != nil || fmt.Sprint(e.asked) != `[fan.watch {} ["x"]]` {
		t.Errorf("Stream(watch) of an implementation = %v, asked %s", err, e.asked)
	}
}

func TestCall(t *testing.T) {
	e := &elsewhere{answer: func(ctx *driver.Context, operation string) (json.RawMessage, error) {
		for n := range uint64(3) {
			ctx.Emit(driver.Progress{Phase: operation, Done: n + 1, Total: 3})
		}
		if operation == "fail" {
			return nil, errs.Retry("fan-stuck", "it does not turn")
		}
		return json.RawMessage(`{"speed":7}`), nil
	}}
	d, err := driver.Remote(manifest(), e)
	if err != nil {
		t.Fatal(err)
	}
	ctx, recorder := drivertest.Context(t, t.Context(), nil)
	i, err := d.Implementation("fan", json.RawMessage(`{"speed":1}`), ctx)
	if err != nil {
		t.Fatal(err)
	}

	// Awaited: progress goes to the context.
	c := i.Call("get", 1, nil, map[string]any{"a": "b"}, nil, nil)
	raw, err := c.Await()
	if err != nil || string(raw) != `{"speed":7}` || fmt.Sprint(e.asked) != `[fan.get {"speed":1} [1,null,{"a":"b"}]]` {
		t.Errorf("Await() = %s, %v, asked %s", raw, err, e.asked)
	}
	if n := len(recorder.Progress()); n != 3 {
		t.Errorf("Await() emitted %d, want 3", n)
	}
	if _, err := c.Await(); err != nil || len(e.asked) != 1 {
		t.Errorf("a second Await() asked again: %s, %v", e.asked, err)
	}

	// Iterated: progress is yielded instead.
	c = i.Call("get")
	var got []driver.Progress
	for p, err := range c.Progress() {
		if err != nil {
			t.Errorf("Progress() yielded %v", err)
		}
		got = append(got, p)
	}
	if raw, err := c.Result(); err != nil || string(raw) != `{"speed":7}` || len(got) != 3 || got[2].Done != 3 {
		t.Errorf("Progress() yielded %v, Result() = %s, %v", got, raw, err)
	}
	if n := len(recorder.Progress()); n != 3 {
		t.Errorf("an iterated call emitted %d of its steps", n-3)
	}

	// An error comes last.
	c = i.Call("fail")
	var last error
	steps := 0
	for _, err := range c.Progress() {
		steps++
		last = err
	}
	if _, err := c.Result(); steps != 4 || errs.CodeOf(last) != "fan-stuck" || errs.CodeOf(err) != "fan-stuck" {
		t.Errorf("Progress() of a failing call = %d steps, last %v, Result() %v", steps, last, err)
	}

	e.asked = nil
	if _, err := i.Call("get", func() {}).Await(); errs.CodeOf(err) != errs.InvalidArgs || len(e.asked) != 0 {
		t.Errorf("Call(a function).Await() = %v, asked %s, want invalid-args and nothing asked", err, e.asked)
	}
	for _, err := range i.Call("get", func() {}).Progress() {
		if errs.CodeOf(err) != errs.InvalidArgs {
			t.Errorf("Call(a function).Progress() = %v, want invalid-args", err)
		}
	}
	if _, err := d.Implementation("lamp", nil, ctx); errs.CodeOf(err) != errs.UnsupportedDriver {
		t.Errorf("Implementation(lamp) = %v, want unsupported-driver", err)
	}
	if _, err := d.Implementation("fan", json.RawMessage(`{"speed":"x"}`), ctx); errs.CodeOf(err) != errs.InvalidConfig {
		t.Errorf("Implementation(bad configuration) = %v, want invalid-config", err)
	}
}

// TestPanic: a driver that panics fails its call, awaited or iterated.
func TestPanic(t *testing.T) {
	d, err := driver.Remote(manifest(), &elsewhere{answer: func(*driver.Context, string) (json.RawMessage, error) { panic("at the disco") }})
	if err != nil {
		t.Fatal(err)
	}
	ctx, _ := drivertest.Context(t, t.Context(), nil)
	i, err := d.Implementation("fan", nil, ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := i.Call("get").Await(); errs.CodeOf(err) != errs.DriverError {
		t.Errorf("Await() = %v, want driver-error", err)
	}
	for _, err := range i.Call("get").Progress() {
		if errs.CodeOf(err) != errs.DriverError {
			t.Errorf("Progress() = %v, want driver-error", err)
		}
	}
}

// TestLeftLoop: who stops reading progress ends the call, and nothing runs on.
func TestLeftLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ended := false
		d, err := driver.Remote(manifest(), &elsewhere{answer: func(ctx *driver.Context, _ string) (json.RawMessage, error) {
			defer func() { ended = true }()
			for ctx.Err() == nil {
				ctx.Emit(driver.Progress{Phase: "turning"})
			}
			return nil, ctx.Err()
		}})
		if err != nil {
			t.Fatal(err)
		}
		i, err := d.Implementation("fan", nil, driver.NewContext(t.Context(), nil, nil, nil))
		if err != nil {
			t.Fatal(err)
		}
		c := i.Call("turn")
		steps := 0
		for range c.Progress() {
			if steps++; steps == 3 {
				break
			}
		}
		if !ended {
			t.Error("the call ran on after the loop")
		}
		if _, err := c.Result(); errs.CodeOf(err) != errs.Cancelled {
			t.Errorf("Result() = %v, want cancelled", err)
		}
	})
}

type turner interface {
	Turn(*driver.Context) (int, error)
}

type turning int

func (n turning) Turn(*driver.Context) (int, error) { return int(n), nil }

type turnProxy struct{ i *driver.Implementation }

func (p turnProxy) Turn(ctx *driver.Context) (int, error) {
	return driver.Answer[int](p.i.On(ctx).Call("turn"))
}

func TestUse(t *testing.T) {
	k := driver.Kind[turner]{
		Name: "fan", Operations: map[string]driver.Operation[turner]{"turn": driver.Get(turner.Turn)},
		Proxy: func(i *driver.Implementation) turner { return turnProxy{i} },
	}
	here, err := driver.Define(unsafeSpec(), driver.Implement(k, func(n int, _ *driver.Context) (turner, error) {
		if n == 0 {
			return nil, nil
		}
		return turning(n), nil
	}))
	if err != nil {
		t.Fatal(err)
	}
	answer := json.RawMessage("8")
	there, err := driver.Remote(manifest(), &elsewhere{answer: func(*driver.Context, string) (json.RawMessage, error) { return answer, nil }})
	if err != nil {
		t.Fatal(err)
	}
	ctx, _ := drivertest.Context(t, t.Context(), nil)
	impl, err := driver.Use(here, k, json.RawMessage("7"), ctx)
	if _, own := impl.(turning); err != nil || !own {
		t.Fatalf("Use(local) = %T, %v, want the implementation itself", impl, err)
	}
	if impl, err = driver.Use(there, k, json.RawMessage(`{}`), ctx); err != nil {
		t.Fatal(err)
	}
	if n, err := impl.Turn(ctx); n != 8 || err != nil {
		t.Errorf("Turn() over a proxy = %d, %v, want 8", n, err)
	}
	answer = json.RawMessage(`"eight"`)
	if _, err := impl.Turn(ctx); errs.CodeOf(err) != errs.DriverError {
		t.Errorf("Turn() answered with text = %v, want driver-error", err)
	}

	other := driver.Kind[*fan]{Name: "fan"}
	if _, err := driver.Use(here, other, json.RawMessage("7"), ctx); errs.CodeOf(err) != errs.UnsupportedDriver {
		t.Errorf("Use(another kind of that name) = %v, want unsupported-driver", err)
	}
	if _, err := driver.Use(there, other, nil, ctx); errs.CodeOf(err) != errs.UnsupportedDriver {
		t.Errorf("Use(remote, no proxy) = %v, want unsupported-driver", err)
	}
	lamp := k
	lamp.Name = "lamp"
	if _, err := driver.Use(here, lamp, json.RawMessage("7"), ctx); errs.CodeOf(err) != errs.UnsupportedDriver {
		t.Errorf("Use(lamp) = %v, want unsupported-driver", err)
	}
	if _, err := driver.Use(here, k, json.RawMessage("x"), ctx); errs.CodeOf(err) != errs.InvalidConfig {
		t.Errorf("Use(bad configuration) = %v, want invalid-config", err)
	}
	if _, err := driver.Use(here, k, json.RawMessage("0"), ctx); errs.CodeOf(err) != errs.DriverError {
		t.Errorf("Use(factory that makes nothing) = %v, want driver-error", err)
	}
	if _, err := here.Invoke(ctx, "fan", "turn", json.RawMessage("0"), nil); errs.CodeOf(err) != errs.DriverError {
		t.Errorf("Invoke(factory that makes nothing) = %v, want driver-error", err)
	}
	// By name, a driver of this process works like one of another.
	i, err := here.Implementation("fan", json.RawMessage("7"), ctx)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := driver.Answer[int](i.Call("turn")); n != 7 || err != nil {
		t.Errorf("Call(turn) of a local driver = %d, %v, want 7", n, err)
	}
}

// unsafeSpec is spec with nothing retry-safe.
func unsafeSpec() driver.Spec[int] {
	s := spec()
	s.RetrySafe = nil
	return s
}
