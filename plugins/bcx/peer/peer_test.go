package peer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1/driverv1connect"
	"github.com/better-compute/site-appliance/plugins/driver"
)

type (
	invocation = connect.ServerStream[driverv1.InvokeResponse]
	duplex     = connect.BidiStream[driverv1.StreamRequest, driverv1.StreamResponse]
)

// fake is a plugin that does what a test says.
type fake struct {
	describe *driverv1.DescribeResponse
	health   func(context.Context) (*driverv1.HealthResponse, error)
	validate func(context.Context, *driverv1.ValidateRequest) (*driverv1.ValidateResponse, error)
	invoke   func(context.Context, *driverv1.InvokeRequest, *invocation) error
	stream   func(context.Context, *duplex) error
}

func (f *fake) Describe(context.Context, *connect.Request[driverv1.DescribeRequest]) (*connect.Response[driverv1.DescribeResponse], error) {
	return connect.NewResponse(f.describe), nil
}

func (f *fake) Health(ctx context.Context, _ *connect.Request[driverv1.HealthRequest]) (*connect.Response[driverv1.HealthResponse], error) {
	m, err := f.health(ctx)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(m), nil
}

func (f *fake) Validate(ctx context.Context, r *connect.Request[driverv1.ValidateRequest]) (*connect.Response[driverv1.ValidateResponse], error) {
	m, err := f.validate(ctx, r.Msg)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(m), nil
}

func (f *fake) Invoke(ctx context.Context, r *connect.Request[driverv1.InvokeRequest], s *invocation) error {
	return f.invoke(ctx, r.Msg, s)
}

func (f *fake) Stream(ctx context.Context, s *duplex) error { return f.stream(ctx, s) }

func acme() *driverv1.DescribeResponse {
	return &driverv1.DescribeResponse{Protocol: bcx.Protocol, PluginVersion: "1.2", Drivers: []*driverv1.DescribedDriver{
		bcx.Described(driver.Manifest{ID: "acme", Version: "1", Kinds: []string{"fan"}, RunsOn: "site", StreamOperations: []string{"fan.open"}}),
	}}
}

// meet serves f and meets it. The server is for tests that break connections.
func meet(t testing.TB, f *fake, o Options) (*Peer, *httptest.Server) {
	t.Helper()
	if f.describe == nil {
		f.describe = acme()
	}
	mux := http.NewServeMux()
	mux.Handle(driverv1connect.NewDriverPluginHandler(f))
	server := httptest.NewUnstartedServer(mux)
	server.EnableHTTP2 = true
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo)
	server.StartTLS()
	client := driverv1connect.NewDriverPluginClient(server.Client(), server.URL,
		connect.WithGRPC(), connect.WithReadMaxBytes(bcx.MaxMessage), connect.WithSendMaxBytes(bcx.MaxMessage),
		connect.WithAcceptCompression("gzip", nil, nil))
	o.Name = "acme"
	p, err := New(t.Context(), client, server.Client().CloseIdleConnections, o)
	if err != nil {
		server.Close()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Close()
		server.CloseClientConnections()
		server.Close()
	})
	return p, server
}

func result(s string) *driverv1.InvokeResponse {
	return &driverv1.InvokeResponse{Event: &driverv1.InvokeResponse_Result{Result: &driverv1.Result{ResultJson: s}}}
}

func failure(code, message string, retryable bool) *driverv1.InvokeResponse {
	return &driverv1.InvokeResponse{Event: &driverv1.InvokeResponse_Error{
		Error: &driverv1.Error{Code: code, Message: message, Retryable: retryable},
	}}
}

func progress(phase, message string, done, total uint64) *driverv1.InvokeResponse {
	return &driverv1.InvokeResponse{Event: &driverv1.InvokeResponse_Progress{
		Progress: &driverv1.Progress{Phase: phase, Message: message, Done: done, Total: total},
	}}
}

// says sends events one after the other, and ends.
func says(events ...*driverv1.InvokeResponse) func(context.Context, *driverv1.InvokeRequest, *invocation) error {
	return func(_ context.Context, _ *driverv1.InvokeRequest, s *invocation) error {
		for _, e := range events {
			if err := s.Send(e); err != nil {
				return err
			}
		}
		return nil
	}
}

var fan = Call{Driver: "acme", Kind: "fan", Operation: "get"}

func TestDescribeIsChecked(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*driverv1.DescribeResponse)
		want   string
	}{
		"good":       {func(*driverv1.DescribeResponse) {}, ""},
		"protocol":   {func(m *driverv1.DescribeResponse) { m.Protocol = 2 }, "protocol 2: want 1"},
		"no driver":  {func(m *driverv1.DescribeResponse) { m.Drivers = nil }, "no driver"},
		"twice":      {func(m *driverv1.DescribeResponse) { m.Drivers = append(m.Drivers, m.Drivers[0]) }, "acme is described twice"},
		"manifest":   {func(m *driverv1.DescribeResponse) { m.Drivers[0].Manifest.Id = "A" }, "driver id"},
		"nil driver": {func(m *driverv1.DescribeResponse) { m.Drivers[0] = nil }, "driver id"},
		"65 drivers": {func(m *driverv1.DescribeResponse) {
			m.Drivers = slices.Repeat(m.Drivers, 65)
		}, "65 drivers, limit 64"},
		"64 drivers": {func(m *driverv1.DescribeResponse) {
			m.Drivers = nil
			for i := range 64 {
				d := acme().Drivers[0]
				d.Manifest.Id = fmt.Sprint("acme", i)
				m.Drivers = append(m.Drivers, d)
			}
		}, ""},
	} {
		m := acme()
		tt.change(m)
		version, list, err := described(m)
		if tt.want == "" {
			if err != nil || version != "1.2" || len(list) != len(m.Drivers) {
				t.Errorf("%s: described() = %q, %d, %v", name, version, len(list), err)
			}
		} else if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: described() = %v, want %q", name, err, tt.want)
		}
	}
}

// TestInvokeEvents: progress, then exactly one result or error; whatever comes
// after it counts for nothing, and a stream without it is a lost connection.
func TestInvokeEvents(t *testing.T) {
	lost := &errs.Error{Code: errs.Unreachable, Retryable: true}
	for name, tt := range map[string]struct {
		events   []*driverv1.InvokeResponse
		result   string
		want     *errs.Error
		progress int
	}{
		"result":                   {[]*driverv1.InvokeResponse{result("1")}, "1", nil, 0},
		"progress and result":      {[]*driverv1.InvokeResponse{progress("a", "", 1, 2), progress("a", "", 2, 2), result("1")}, "1", nil, 2},
		"error":                    {[]*driverv1.InvokeResponse{failure("fan-stuck", "oh", true)}, "", &errs.Error{Code: "fan-stuck", Message: "oh", Retryable: true}, 0},
		"code that is none":        {[]*driverv1.InvokeResponse{failure("Fan Stuck", "oh", false)}, "", &errs.Error{Code: errs.DriverError, Message: "oh"}, 0},
		"plugin says cancelled":    {[]*driverv1.InvokeResponse{failure("cancelled", "oh", false)}, "", &errs.Error{Code: errs.Cancelled, Message: "oh"}, 0},
		"nothing":                  {nil, "", lost, 0},
		"progress only":            {[]*driverv1.InvokeResponse{progress("a", "", 1, 2)}, "", lost, 1},
		"empty event":              {[]*driverv1.InvokeResponse{{}}, "", lost, 0},
		"two results":              {[]*driverv1.InvokeResponse{result("1"), result("2")}, "1", nil, 0},
		"error after result":       {[]*driverv1.InvokeResponse{result("1"), failure("fan-stuck", "oh", true)}, "1", nil, 0},
		"result after error":       {[]*driverv1.InvokeResponse{failure("fan-stuck", "oh", false), result("1")}, "", &errs.Error{Code: "fan-stuck", Message: "oh"}, 0},
		"progress after result":    {[]*driverv1.InvokeResponse{result("1"), progress("late", "", 1, 2)}, "1", nil, 0},
		"result that is empty":     {[]*driverv1.InvokeResponse{result("")}, "", nil, 0},
		"result that is not JSON":  {[]*driverv1.InvokeResponse{result("{")}, "{", nil, 0},
		"empty event, then result": {[]*driverv1.InvokeResponse{{}, result("1")}, "1", nil, 0},
	} {
		t.Run(name, func(t *testing.T) {
			p, _ := meet(t, &fake{invoke: says(tt.events...)}, Options{})
			n := 0
			c := fan
			c.Progress = func(string, string, uint64, uint64) { n++ }
			got, err := p.Invoke(t.Context(), c)
			if string(got) != tt.result || n != tt.progress || (err == nil) != (tt.want == nil) {
				t.Fatalf("Invoke = %s, %v with %d progress, want %s, %v, %d", got, err, n, tt.result, tt.want, tt.progress)
			}
			if err == nil {
				return
			}
			e := errs.From(err)
			if e.Code != tt.want.Code || e.Retryable != tt.want.Retryable || tt.want.Message != "" && e.Message != tt.want.Message {
				t.Errorf("Invoke = %+v, want %+v", e, tt.want)
			}
		})
	}
}

// TestEndlessAfterResult: a plugin that goes on for ever holds nobody up.
func TestEndlessAfterResult(t *testing.T) {
	left := make(chan struct{})
	p, _ := meet(t, &fake{invoke: func(ctx context.Context, _ *driverv1.InvokeRequest, s *invocation) error {
		defer close(left)
		if err := s.Send(result("1")); err != nil {
			return err
		}
		<-ctx.Done()
		return ctx.Err()
	}}, Options{})
	if got, err := p.Invoke(t.Context(), fan); err != nil || string(got) != "1" {
		t.Errorf("Invoke = %s, %v, want 1", got, err)
	}
	<-left
}

func TestRequestCarriesTheCall(t *testing.T) {
	var got *driverv1.InvokeRequest
	p, _ := meet(t, &fake{invoke: func(_ context.Context, r *driverv1.InvokeRequest, s *invocation) error {
		got = r
		return s.Send(result("null"))
	}}, Options{})
	deadline := time.Now().Add(time.Minute)
	_, err := p.Invoke(t.Context(), Call{Driver: "acme", Kind: "fan", Operation: "set", Config: json.RawMessage(`{ "a":1 }`), Args: json.RawMessage("[1]"),
		Secrets: map[string]secret.Value{"secret://root/bmc": secret.New([]byte("hunter2"))}, IdempotencyKey: "cmd_1", Traceparent: "00-ab", TargetNodeID: "node_1", Deadline: deadline})
	if err != nil || got.GetConfigJson() != `{ "a":1 }` || got.GetArgsJson() != "[1]" || got.GetSecrets()["secret://root/bmc"] != "hunter2" ||
		got.GetIdempotencyKey() != "cmd_1" || got.GetTraceparent() != "00-ab" || got.GetTargetNodeId() != "node_1" || got.GetDeadlineMs() != deadline.UnixMilli() {
		t.Errorf("request = %v, %v", got, err)
	}
	if _, err := p.Invoke(t.Context(), fan); err != nil || got.GetDeadlineMs() != 0 || len(got.GetSecrets()) != 0 {
		t.Errorf("request without deadline = %v, %v", got, err)
	}
}

func TestTextMustBeUTF8(t *testing.T) {
	p, _ := meet(t, &fake{invoke: says(result("1"))}, Options{})
	for name, tt := range map[string]struct {
		c    Call
		code errs.Code
	}{
		"good":   {Call{Args: json.RawMessage(`"ä"`)}, ""},
		"args":   {Call{Args: json.RawMessage("\"\xff\"")}, errs.InvalidArgs},
		"secret": {Call{Secrets: map[string]secret.Value{"a": secret.New([]byte("\xff"))}}, errs.CredentialsUnavailable},
	} {
		if _, err := p.Invoke(t.Context(), tt.c); errs.CodeOf(err) != tt.code {
			t.Errorf("%s: Invoke = %v, want %q", name, err, tt.code)
		}
	}
}

func TestDeadline(t *testing.T) {
	t.Parallel()
	p, _ := meet(t, &fake{invoke: func(ctx context.Context, r *driverv1.InvokeRequest, s *invocation) error {
		switch r.GetOperation() {
		case "late": // a plugin that answers for itself, within the grace
			time.Sleep(time.Until(time.UnixMilli(r.GetDeadlineMs())))
			return s.Send(failure("timeout", "the deadline is over", true))
		case "get":
			return s.Send(result("1"))
		}
		<-ctx.Done()
		return ctx.Err()
	}}, Options{})
	c := fan
	c.Deadline = time.Now().Add(50 * time.Millisecond)
	c.Operation = "late"
	if _, err := p.Invoke(t.Context(), c); errs.CodeOf(err) != errs.Timeout || errs.From(err).Message != "the deadline is over" {
		t.Errorf("plugin's own timeout: %v", err)
	}
	c.Deadline = time.Now().Add(50 * time.Millisecond)
	c.Operation = "deaf"
	_, err := p.Invoke(t.Context(), c)
	if errs.CodeOf(err) != errs.Timeout || !errs.From(err).Retryable || time.Now().Before(c.Deadline.Add(bcx.Grace)) {
		t.Errorf("deaf plugin: %v, want timeout a second after the deadline", err)
	}
	c.Operation = "get"
	if _, err := p.Invoke(t.Context(), c); errs.CodeOf(err) != errs.Timeout {
		t.Errorf("past deadline: %v, want timeout", err)
	}
	c.Deadline = time.Now().Add(time.Minute)
	if _, err := p.Invoke(t.Context(), c); err != nil {
		t.Errorf("deadline ahead: %v", err)
	}
}

// TestCancelled: only the caller and the plugin's own word make a call cancelled.
func TestCancelled(t *testing.T) {
	ended := make(chan error, 1)
	p, server := meet(t, &fake{invoke: func(ctx context.Context, r *driverv1.InvokeRequest, s *invocation) error {
		switch r.GetOperation() {
		case "status":
			return connect.NewError(connect.CodeCanceled, errors.New("shutting down"))
		case "get":
			return s.Send(result("1"))
		}
		if err := s.Send(progress("started", "", 0, 0)); err != nil {
			return err
		}
		<-ctx.Done()
		ended <- ctx.Err()
		return ctx.Err()
	}}, Options{})
	ctx, cancel := context.WithCancel(t.Context())
	c := fan
	c.Operation = "wait"
	c.Progress = func(string, string, uint64, uint64) { cancel() }
	_, err := p.Invoke(ctx, c)
	if errs.CodeOf(err) != errs.Cancelled {
		t.Errorf("caller gave up: %v, want cancelled", err)
	}
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("plugin's context ended with %v", err)
	}
	c.Operation = "status"
	if _, err := p.Invoke(t.Context(), c); errs.CodeOf(err) != errs.Cancelled {
		t.Errorf("plugin said so: %v, want cancelled", err)
	}
	c.Operation = "wait"
	c.Progress = func(string, string, uint64, uint64) { server.CloseClientConnections() }
	if _, err := p.Invoke(t.Context(), c); errs.CodeOf(err) != errs.Unreachable || !errs.From(err).Retryable {
		t.Errorf("connection lost: %v, want unreachable, retryable", err)
	}
	<-ended
	if _, err := p.Invoke(t.Context(), fan); err != nil {
		t.Errorf("call after a lost connection: %v", err)
	}
}

// TestFirstCallAfterCrash: the transport calls a dying connection cancelled.
func TestFirstCallAfterCrash(t *testing.T) {
	for range 20 {
		p, server := meet(t, &fake{invoke: says(result("1"))}, Options{})
		if _, err := p.Invoke(t.Context(), fan); err != nil {
			t.Fatal(err)
		}
		server.Listener.Close()
		server.CloseClientConnections()
		for range 3 {
			if _, err := p.Invoke(t.Context(), fan); errs.CodeOf(err) != errs.Unreachable || !errs.From(err).Retryable {
				t.Fatalf("call after a crash: %v, want unreachable, retryable", err)
			}
		}
	}
}

func TestStatusCodes(t *testing.T) {
	for status, want := range map[connect.Code]errs.Error{
		connect.CodeCanceled:          {Code: errs.Cancelled},
		connect.CodeDeadlineExceeded:  {Code: errs.Timeout, Retryable: true},
		connect.CodeResourceExhausted: {Code: errs.InvalidArgs},
		connect.CodeUnimplemented:     {Code: errs.UnsupportedOperation},
		connect.CodeUnavailable:       {Code: errs.Unreachable, Retryable: true},
		connect.CodeInternal:          {Code: errs.DriverError},
	} {
		fail := connect.NewError(status, errors.New("oh"))
		p, _ := meet(t, &fake{
			invoke: func(context.Context, *driverv1.InvokeRequest, *invocation) error { return fail },
			health: func(context.Context) (*driverv1.HealthResponse, error) { return nil, fail },
			validate: func(context.Context, *driverv1.ValidateRequest) (*driverv1.ValidateResponse, error) {
				return nil, fail
			},
			stream: func(context.Context, *duplex) error { return fail },
		}, Options{})
		_, invoke := p.Invoke(t.Context(), fan)
		_, _, health := p.Health(t.Context())
		_, stream := p.Stream(t.Context(), fan)
		for name, err := range map[string]error{"Invoke": invoke, "Health": health, "Stream": stream,
			"Validate": p.Validate(t.Context(), "acme", nil, nil, time.Time{})} {
			if e := errs.From(err); e == nil || e.Code != want.Code || e.Retryable != want.Retryable {
				t.Errorf("%s with status %v = %+v, want %v %v", name, status, e, want.Code, want.Retryable)
			}
		}
	}
}

// TestMessageLimit: too much is invalid-args either way, and the connection lives.
func TestMessageLimit(t *testing.T) {
	p, _ := meet(t, &fake{invoke: func(_ context.Context, r *driverv1.InvokeRequest, s *invocation) error {
		if r.GetOperation() == "big" {
			return s.Send(result(strings.Repeat("x", bcx.MaxMessage+1)))
		}
		return s.Send(result(r.GetArgsJson()))
	}}, Options{})
	big := fan
	big.Args = json.RawMessage(`"` + strings.Repeat("x", bcx.MaxMessage) + `"`)
	if _, err := p.Invoke(t.Context(), big); errs.CodeOf(err) != errs.InvalidArgs {
		t.Errorf("arguments over the limit: %.200v, want invalid-args", err)
	}
	big.Args, big.Operation = nil, "big"
	if _, err := p.Invoke(t.Context(), big); errs.CodeOf(err) != errs.InvalidArgs {
		t.Errorf("result over the limit: %.200v, want invalid-args", err)
	}
	big.Operation = "get"
	big.Args = json.RawMessage(`"` + strings.Repeat("x", bcx.MaxMessage-1024) + `"`)
	if got, err := p.Invoke(t.Context(), big); err != nil || len(got) != len(big.Args) {
		t.Errorf("just under the limit: %d bytes, %.200v", len(got), err)
	}
}

func TestResultCap(t *testing.T) {
	for n, want := range map[int]errs.Code{100: "", 101: errs.DriverError} {
		p, _ := meet(t, &fake{invoke: says(result(strings.Repeat("1", n)))}, Options{MaxResultBytes: 100})
		if _, err := p.Invoke(t.Context(), fan); errs.CodeOf(err) != want {
			t.Errorf("result of %d bytes with a cap of 100: %v, want %q", n, err, want)
		}
	}
}

func TestValidateAndHealth(t *testing.T) {
	f := &fake{}
	p, _ := meet(t, f, Options{})
	f.validate = func(_ context.Context, r *driverv1.ValidateRequest) (*driverv1.ValidateResponse, error) {
		if r.GetDriver() == "acme" && r.GetConfigJson() == "{}" && r.GetSecrets()["a"] == "b" && r.GetDeadlineMs() > 0 {
			return &driverv1.ValidateResponse{}, nil
		}
		return &driverv1.ValidateResponse{Error: &driverv1.Error{Code: "invalid-config", Message: "no"}}, nil
	}
	secrets := map[string]secret.Value{"a": secret.New([]byte("b"))}
	soon := time.Now().Add(time.Minute)
	for config, want := range map[string]errs.Code{"{}": "", "[]": errs.InvalidConfig, "\xff": errs.InvalidArgs, strings.Repeat("x", bcx.MaxMessage): errs.InvalidArgs} {
		if err := p.Validate(t.Context(), "acme", json.RawMessage(config), secrets, soon); errs.CodeOf(err) != want {
			t.Errorf("Validate(%.20s) = %v, want %q", config, err, want)
		}
	}
	if err := p.Validate(t.Context(), "acme", nil, nil, time.Now()); errs.CodeOf(err) != errs.Timeout {
		t.Errorf("past deadline: %v, want timeout", err)
	}
	for status, want := range map[driverv1.HealthResponse_Status]bool{
		driverv1.HealthResponse_STATUS_SERVING: true, driverv1.HealthResponse_STATUS_NOT_SERVING: false, 0: false, 9: false,
	} {
		f.health = func(context.Context) (*driverv1.HealthResponse, error) {
			return &driverv1.HealthResponse{Status: status, Message: "why"}, nil
		}
		if serving, message, err := p.Health(t.Context()); serving != want || message != "why" || err != nil {
			t.Errorf("Health with %v = %v, %q, %v", status, serving, message, err)
		}
	}
}

// TestNothingSecretInMessages: what was delivered comes back in no message.
func TestNothingSecretInMessages(t *testing.T) {
	p, _ := meet(t, &fake{
		invoke: says(progress("hunter2", "login with hunter2", 1, 2), failure("bmc-error", "hunter2 was refused", false)),
		validate: func(context.Context, *driverv1.ValidateRequest) (*driverv1.ValidateResponse, error) {
			return &driverv1.ValidateResponse{Error: &driverv1.Error{Code: "bmc-error", Message: "hunter2 was refused"}}, nil
		},
	}, Options{})
	c := fan
	c.Secrets = map[string]secret.Value{"password": secret.New([]byte("hunter2"))}
	var shown []string
	c.Progress = func(phase, message string, _, _ uint64) { shown = append(shown, phase, message) }
	_, err := p.Invoke(t.Context(), c)
	shown = append(shown, err.Error(), p.Validate(t.Context(), "acme", nil, c.Secrets, time.Time{}).Error())
	want := []string{"[redacted]", "login with [redacted]", "bmc-error: [redacted] was refused", "bmc-error: [redacted] was refused"}
	if !slices.Equal(shown, want) {
		t.Errorf("shown %q, want %q", shown, want)
	}
	c.Secrets = nil
	shown = nil
	other, _ := meet(t, &fake{invoke: says(progress("hunter2", "", 1, 2), result("1"))}, Options{})
	if _, err := other.Invoke(t.Context(), c); err != nil || shown[0] != "hunter2" {
		t.Errorf("a word that is nobody's secret was shown as %q, %v", shown, err)
	}
}

func TestLongMessagesAreCut(t *testing.T) {
	p, _ := meet(t, &fake{invoke: says(failure("oh", strings.Repeat("ä", 1<<20), false))}, Options{})
	_, err := p.Invoke(t.Context(), fan)
	if n := len(errs.From(err).Message); n != maxText {
		t.Errorf("message has %d bytes, want %d", n, maxText)
	}
}

func TestConnectionsAndGoroutinesEnd(t *testing.T) {
	before := runtime.NumGoroutine()
	t.Run("calls", func(t *testing.T) {
		p, _ := meet(t, &fake{invoke: says(result("1")), stream: echo}, Options{})
		for range 10 {
			if _, err := p.Invoke(t.Context(), fan); err != nil {
				t.Fatal(err)
			}
			s, err := p.Stream(t.Context(), fan)
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			if _, err := p.Stream(ctx, fan); err != nil {
				t.Fatal(err)
			}
			cancel()
		}
	})
	settle(t, before)
}

// settle waits for goroutines to end.
func settle(t *testing.T, want int) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > want; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			var b bytes.Buffer
			_, _ = io.Copy(&b, strings.NewReader(stacks()))
			t.Fatalf("%d goroutines are left, had %d:\n%s", runtime.NumGoroutine(), want, b.String())
		}
	}
}

func stacks() string {
	b := make([]byte, 1<<20)
	return string(b[:runtime.Stack(b, true)])
}
