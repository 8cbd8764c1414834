package sdk

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protodelim"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/schema"
)

type part struct{}

// define is a driver with an operation for each thing that can go wrong.
func define(t testing.TB, id string, health error) *driver.Definition {
	t.Helper()
	config, err := schema.New(schema.Fields{"n": schema.Int().Default(1), "token": schema.Secret().Optional()})
	if err != nil {
		t.Fatal(err)
	}
	op := func(f func(*driver.Context, driver.Args) (any, error)) driver.Operation[*part] {
		return func(ctx *driver.Context, _ *part, args driver.Args) (any, error) { return f(ctx, args) }
	}
	fail := func(err error) driver.Operation[*part] {
		return op(func(*driver.Context, driver.Args) (any, error) { return nil, err })
	}
	sized := func(n int) driver.Operation[*part] {
		return op(func(*driver.Context, driver.Args) (any, error) { return strings.Repeat("x", n), nil })
	}
	kind := driver.Kind[*part]{Name: "test", Operations: map[string]driver.Operation[*part]{
		"echo":   op(func(_ *driver.Context, args driver.Args) (any, error) { return args, nil }),
		"panics": op(func(*driver.Context, driver.Args) (any, error) { panic("at the disco") }),
		"leaves": op(func(*driver.Context, driver.Args) (any, error) { runtime.Goexit(); return nil, nil }),
		"own":    fail(errs.Retry("fan-stuck", "fan 3")),
		"safe":   fail(errs.Retry("fan-stuck", "fan 3")),
		"binary": fail(errors.New("a \xff b")),
		"long":   fail(errors.New(strings.Repeat("y", 2*maxText))),
		"cable":  op(func(*driver.Context, driver.Args) (any, error) { return json.RawMessage("\"\xff\""), nil }),
		"talk": op(func(ctx *driver.Context, _ driver.Args) (any, error) {
			ctx.Emit(driver.Progress{Phase: "\xff", Message: strings.Repeat("z", 2*maxText)})
			return nil, nil
		}),
		"late": op(func(ctx *driver.Context, _ driver.Args) (any, error) {
			<-ctx.Done()
			ctx.Emit(driver.Progress{Phase: "too late"})
			return nil, errors.New("i/o timeout")
		}),
		"most": sized(bcx.MaxMessage - 12),
		"more": sized(bcx.MaxMessage - 11),
	}, Streams: map[string]driver.StreamOperation[*part]{
		"pipe": func(_ *driver.Context, _ *part, _ driver.Args, s io.ReadWriter) error {
			_, err := io.Copy(s, s)
			return err
		},
		"silent": func(*driver.Context, *part, driver.Args, io.ReadWriter) error { return nil },
		"says": func(_ *driver.Context, _ *part, _ driver.Args, s io.ReadWriter) error {
			_, err := io.WriteString(s, strings.Repeat("w", maxFrame+1))
			return err
		},
		"refuses": func(*driver.Context, *part, driver.Args, io.ReadWriter) error { return errs.New("line-busy", "in use") },
		"breaks": func(_ *driver.Context, _ *part, _ driver.Args, s io.ReadWriter) error {
			if _, err := s.Write(nil); err != nil {
				return err
			}
			panic("at the bus stop")
		},
		"opens": func(ctx *driver.Context, _ *part, _ driver.Args, s io.ReadWriter) error {
			<-ctx.Done()
			_, err := s.Write([]byte("hello"))
			return err
		},
	}}
	d, err := driver.Define(driver.Spec[struct{}]{
		ID: id, Version: "1.0.0", RunsOn: "site", Config: config, RetrySafe: []string{"test.safe"},
		Health: func(context.Context) error { return health },
	}, driver.Implement(kind, func(struct{}, *driver.Context) (*part, error) { return &part{}, nil }))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func handler(t testing.TB, drivers ...*driver.Definition) *Handler {
	t.Helper()
	h, err := NewHandler(Options{PluginVersion: "test", Log: slog.New(slog.DiscardHandler)}, drivers...)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func TestNewHandlerRefuses(t *testing.T) {
	a, b := define(t, "a", nil), define(t, "b", nil)
	for name, tt := range map[string]struct {
		drivers []*driver.Definition
		ok      bool
	}{
		"two": {[]*driver.Definition{a, b}, true}, "none": {nil, false}, "nil": {[]*driver.Definition{nil}, false},
		"one id twice": {[]*driver.Definition{a, b, define(t, "a", nil)}, false},
	} {
		if _, err := NewHandler(Options{}, tt.drivers...); (err == nil) != tt.ok {
			t.Errorf("%s: NewHandler = %v, want ok %v", name, err, tt.ok)
		}
	}
}

// ask runs one Invoke and answers its messages.
func ask(t testing.TB, h *Handler, ctx context.Context, m *driverv1.InvokeRequest) []*driverv1.InvokeResponse {
	t.Helper()
	var got []*driverv1.InvokeResponse
	if err := h.invoke(ctx, m, func(r *driverv1.InvokeResponse) error {
		// What cannot be marshalled would break the connection.
		if _, err := proto.Marshal(r); err != nil {
			return err
		}
		got = append(got, r)
		return nil
	}); err != nil {
		t.Fatalf("invoke %v: %v", m, err)
	}
	return got
}

func TestInvoke(t *testing.T) {
	h := handler(t, define(t, "acme", nil))
	soon, past := time.Now().Add(50*time.Millisecond).UnixMilli(), int64(1)
	for _, tt := range []struct {
		operation string
		deadline  int64
		code      string
		message   string
		retryable bool
	}{
		{"echo", 0, "", "", false},
		{"panics", 0, "driver-error", "the operation panicked: at the disco", false},
		{"leaves", 0, "driver-error", "the operation ended its goroutine", false},
		{"own", 0, "fan-stuck", "fan 3", false},
		{"safe", 0, "fan-stuck", "fan 3", true},
		{"binary", 0, "driver-error", "a \ufffd b", false},
		{"long", 0, "driver-error", strings.Repeat("y", maxText), false},
		{"cable", 0, "", "", false},
		{"talk", 0, "", "", false},
		{"late", soon, "timeout", "the deadline is over", false},
		{"echo", past, "timeout", "the deadline is over", false},
		{"echo", -1, "timeout", "the deadline is over", false},
		{"most", 0, "", "", false},
		{"more", 0, "invalid-args", fmt.Sprintf("the result has %d bytes, limit %d", bcx.MaxMessage+1, bcx.MaxMessage), false},
		{"none", 0, "unsupported-operation", `the driver has no operation "test.none"`, false},
		{"pipe", 0, "unsupported-operation", "test.pipe of driver acme is a stream", false},
	} {
		got := ask(t, h, t.Context(), &driverv1.InvokeRequest{Driver: "acme", Kind: "test", Operation: tt.operation, DeadlineMs: tt.deadline})
		e := got[len(got)-1].GetError()
		if e.GetCode() != tt.code || e.GetMessage() != tt.message || e.GetRetryable() != tt.retryable {
			t.Errorf("%s = %s %.90q %v, want %s %.90q %v", tt.operation, e.GetCode(), e.GetMessage(), e.GetRetryable(), tt.code, tt.message, tt.retryable)
		}
	}
	h.crew.running.Wait()
}

func TestInvokeCancelled(t *testing.T) {
	h := handler(t, define(t, "acme", nil))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	got := ask(t, h, ctx, &driverv1.InvokeRequest{Driver: "acme", Kind: "test", Operation: "echo"})
	if code := got[0].GetError().GetCode(); code != "cancelled" {
		t.Errorf("a cancelled call = %s, want cancelled", code)
	}
}

func TestHealth(t *testing.T) {
	well, ill := define(t, "well", nil), define(t, "ill", errors.New("no ipmitool \xff"))
	for _, tt := range []struct {
		drivers []*driver.Definition
		status  driverv1.HealthResponse_Status
		message string
	}{
		{[]*driver.Definition{well}, driverv1.HealthResponse_STATUS_SERVING, ""},
		{[]*driver.Definition{well, ill}, driverv1.HealthResponse_STATUS_NOT_SERVING, "ill: no ipmitool \ufffd"},
	} {
		r, err := handler(t, tt.drivers...).Health(t.Context(), connect.NewRequest(&driverv1.HealthRequest{}))
		if err != nil || r.Msg.GetStatus() != tt.status || r.Msg.GetMessage() != tt.message {
			t.Errorf("Health = %v, %v, want %v %q", r, err, tt.status, tt.message)
		}
	}
}

func TestErrorOf(t *testing.T) {
	for _, tt := range []struct {
		in        error
		retrySafe bool
		want      string
		retryable bool
	}{
		{errs.New("INVALID_CONFIG", "m"), false, "invalid-config", false},
		{errs.Retry("DRIVER_ERROR", "m"), true, "driver-error", true},
		{errs.Retry("DRIVER_ERROR", "m"), false, "driver-error", false},
		{fmt.Errorf("read: %w", errs.New("NOT_FOUND", "m")), false, "not-found", false},
		{errs.New("NOT__FOUND", "m"), false, "driver-error", false},
		{errs.New("Not-Found", "m"), false, "driver-error", false},
		{errs.New("fan-stuck", "m"), false, "fan-stuck", false},
		{errors.New("m"), true, "driver-error", false},
	} {
		got := errorOf(tt.in, tt.retrySafe)
		if got.GetCode() != tt.want || got.GetRetryable() != tt.retryable || !strings.HasSuffix(got.GetMessage(), "m") {
			t.Errorf("errorOf(%v, %v) = %v, want %s %v", tt.in, tt.retrySafe, got, tt.want, tt.retryable)
		}
	}
}

// script is the wire of one stream: frames to receive, then their end.
type script struct {
	in  chan *driverv1.StreamRequest
	end error
	out []*driverv1.StreamResponse
	// opened, if there is one, holds the end back until the stream is open.
	opened chan struct{}
}

func (s *script) Receive() (*driverv1.StreamRequest, error) {
	m, ok := <-s.in
	if !ok && s.opened != nil {
		<-s.opened
	}
	if !ok {
		return nil, s.end
	}
	return m, nil
}

func (s *script) Send(m *driverv1.StreamResponse) error {
	if _, err := proto.Marshal(m); err != nil {
		return err
	}
	s.out = append(s.out, proto.Clone(m).(*driverv1.StreamResponse))
	if len(s.out) == 1 && s.opened != nil {
		close(s.opened)
	}
	return nil
}

func play(frames ...*driverv1.StreamRequest) *script {
	s := &script{in: make(chan *driverv1.StreamRequest, len(frames)), end: io.EOF}
	for _, f := range frames {
		s.in <- f
	}
	close(s.in)
	return s
}

func open(operation string, deadline int64) *driverv1.StreamRequest {
	return &driverv1.StreamRequest{Frame: &driverv1.StreamRequest_Open{Open: &driverv1.InvokeRequest{
		Driver: "acme", Kind: "test", Operation: operation, DeadlineMs: deadline,
	}}}
}

func data(b string) *driverv1.StreamRequest {
	return &driverv1.StreamRequest{Frame: &driverv1.StreamRequest_Data{Data: []byte(b)}}
}

// told writes frames as a test reads them.
func told(out []*driverv1.StreamResponse) string {
	var b strings.Builder
	for _, m := range out {
		switch f := m.GetFrame().(type) {
		case *driverv1.StreamResponse_Data:
			if len(f.Data) > 8 {
				fmt.Fprintf(&b, "(%d bytes)", len(f.Data))
			} else {
				fmt.Fprintf(&b, "(%s)", f.Data)
			}
		case *driverv1.StreamResponse_Error:
			fmt.Fprintf(&b, "error %s", f.Error.GetCode())
		case *driverv1.StreamResponse_Close:
			b.WriteString("close")
		}
	}
	return b.String()
}

func TestStream(t *testing.T) {
	h := handler(t, define(t, "acme", nil))
	end := &driverv1.StreamRequest{Frame: &driverv1.StreamRequest_Close{}}
	broken := play(open("pipe", 0))
	broken.end, broken.opened = errors.New("reset"), make(chan struct{})
	for _, tt := range []struct {
		name string
		wire *script
		want string
	}{
		{"nothing", play(), ""},
		{"bytes", play(open("pipe", 0), data("a"), data(""), data("bc"), end), "()(a)(bc)close"},
		{"half close", play(open("pipe", 0), data("a")), "()(a)close"},
		{"after close", play(open("pipe", 0), end, data("a")), "()close"},
		{"broken", broken, "()error cancelled"},
		{"no use", play(open("silent", 0)), "()close"},
		{"large", play(open("says", 0)), fmt.Sprintf("()(%d bytes)(w)close", maxFrame)},
		{"refusal", play(open("refuses", 0)), "error line-busy"},
		{"panic", play(open("breaks", 0)), "()error driver-error"},
		{"no open", play(data("a")), "error invalid-args"},
		{"empty frame", play(&driverv1.StreamRequest{}), "error invalid-args"},
		{"unary", play(open("echo", 0)), "error unsupported-operation"},
		{"unknown", play(open("none", 0)), "error unsupported-operation"},
		{"another driver", play(&driverv1.StreamRequest{Frame: &driverv1.StreamRequest_Open{Open: &driverv1.InvokeRequest{Driver: "x"}}}), "error unsupported-driver"},
		{"deadline over", play(open("pipe", 1)), "error timeout"},
		{"never opens", play(open("opens", time.Now().Add(50*time.Millisecond).UnixMilli())), "error timeout"},
	} {
		if err := h.stream(t.Context(), tt.wire); err != nil {
			t.Errorf("%s: stream = %v", tt.name, err)
		}
		if got := told(tt.wire.out); got != tt.want {
			t.Errorf("%s: stream says %s, want %s", tt.name, got, tt.want)
		}
	}
	h.crew.running.Wait()
}

// TestStreamOpensTwice has the operation wait for input, so that the wrong
// frame always comes first.
func TestStreamOpensTwice(t *testing.T) {
	h := handler(t, define(t, "acme", nil))
	wire := &script{in: make(chan *driverv1.StreamRequest), end: io.EOF}
	done := make(chan error)
	go func() { done <- h.stream(t.Context(), wire) }()
	wire.in <- open("pipe", 0)
	wire.in <- data("a")
	wire.in <- open("pipe", 0)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	close(wire.in)
	if got := told(wire.out); !strings.HasSuffix(got, "error invalid-args") {
		t.Errorf("stream says %s, want it to end with invalid-args", got)
	}
	h.crew.running.Wait()
}

func FuzzInvoke(f *testing.F) {
	for _, m := range []*driverv1.InvokeRequest{
		{Driver: "acme", Kind: "test", Operation: "echo", ConfigJson: `{"n":2}`, ArgsJson: `[1,null]`},
		{Driver: "acme", Kind: "test", Operation: "safe", ArgsJson: `{}`, Secrets: map[string]string{"a": "b"}, DeadlineMs: 1 << 50},
		{Driver: "acme", Kind: "test", Operation: "talk", ConfigJson: `{`, DeadlineMs: -5},
		{Driver: "acme", Kind: "power", Operation: "getPower"},
	} {
		raw, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	h := handler(f, define(f, "acme", nil))
	f.Fuzz(func(t *testing.T, raw []byte) {
		m := &driverv1.InvokeRequest{}
		if proto.Unmarshal(raw, m) != nil || slices.Contains([]string{"late", "most", "more"}, m.GetOperation()) {
			return
		}
		got := ask(t, h, t.Context(), m)
		for i, r := range got {
			last := r.GetResult() != nil || r.GetError() != nil
			if last != (i == len(got)-1) {
				t.Errorf("%v: answers %v, want one result or error at the end", m, got)
			}
		}
		last := got[len(got)-1]
		if e := last.GetError(); e != nil && !driver.ValidCode(e.GetCode()) {
			t.Errorf("%v: code %q", m, e.GetCode())
		}
		if r := last.GetResult(); r != nil && !json.Valid([]byte(r.GetResultJson())) {
			t.Errorf("%v: result %q", m, r.GetResultJson())
		}
	})
}

func FuzzValidate(f *testing.F) {
	for _, m := range []*driverv1.ValidateRequest{
		{Driver: "acme", ConfigJson: `{"n":2}`}, {Driver: "acme", ConfigJson: `[`, DeadlineMs: 1}, {Driver: "x", Secrets: map[string]string{"": ""}},
	} {
		raw, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	h := handler(f, define(f, "acme", nil))
	f.Fuzz(func(t *testing.T, raw []byte) {
		m := &driverv1.ValidateRequest{}
		if proto.Unmarshal(raw, m) != nil {
			return
		}
		r, err := h.Validate(t.Context(), connect.NewRequest(m))
		if err != nil {
			t.Fatalf("Validate(%v) = %v", m, err)
		}
		if e := r.Msg.GetError(); e != nil && !driver.ValidCode(e.GetCode()) {
			t.Errorf("Validate(%v) = code %q", m, e.GetCode())
		}
		if _, err := proto.Marshal(r.Msg); err != nil {
			t.Errorf("Validate(%v): %v", m, err)
		}
	})
}

func FuzzStream(f *testing.F) {
	for _, frames := range [][]*driverv1.StreamRequest{
		{open("pipe", 0), data("a"), {Frame: &driverv1.StreamRequest_Close{}}},
		{open("says", 1<<50), open("says", 0)}, {data("a")}, {open("breaks", 0), {}},
	} {
		var b strings.Builder
		for _, m := range frames {
			if _, err := protodelim.MarshalTo(&b, m); err != nil {
				f.Fatal(err)
			}
		}
		f.Add([]byte(b.String()))
	}
	h := handler(f, define(f, "acme", nil))
	f.Fuzz(func(t *testing.T, raw []byte) {
		var frames []*driverv1.StreamRequest
		for r := strings.NewReader(string(raw)); ; {
			m := &driverv1.StreamRequest{}
			if protodelim.UnmarshalFrom(r, m) != nil {
				break
			}
			if m.GetOpen().GetOperation() == "opens" {
				return
			}
			frames = append(frames, m)
		}
		wire := play(frames...)
		if err := h.stream(t.Context(), wire); err != nil {
			t.Fatalf("stream(%v) = %v", frames, err)
		}
		if len(frames) == 0 {
			return
		}
		for i, m := range wire.out {
			last := m.GetClose() != nil || m.GetError() != nil
			if last != (i == len(wire.out)-1) || i == 0 && !last && len(m.GetData()) > 0 {
				t.Errorf("stream(%v) says %s", frames, told(wire.out))
			}
		}
	})
}
