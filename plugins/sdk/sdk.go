// Package sdk serves declared drivers as a bcx plugin.
package sdk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// Options of a plugin.
type Options struct {
	// PluginVersion is the plugin's own, apart from its drivers'.
	PluginVersion string
	// Log defaults to JSON lines on stderr, which the host forwards.
	Log *slog.Logger
}

// Main serves drivers until the host ends this process, and returns its exit code.
func Main(opts Options, drivers ...*driver.Definition) int {
	if err := Serve(context.Background(), opts, drivers...); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// Serve serves drivers until ctx ends, SIGTERM comes, or stdin closes. SIGINT is
// ignored: a terminal sends it to the host as well, which decides.
func Serve(ctx context.Context, opts Options, drivers ...*driver.Definition) error {
	if opts.Log == nil {
		opts.Log = slog.New(slog.NewJSONHandler(os.Stderr, nil))
	}
	h, err := newHandler(opts, drivers)
	if err != nil {
		return err
	}
	signal.Ignore(syscall.SIGINT)
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM)
	defer stop()
	if os.Getenv(bcx.CookieVariable) == bcx.Cookie {
		// It ends with the process: a read of stdin cannot be interrupted.
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin)
			stop()
		}()
	}
	err = bcx.Serve(ctx, h, os.Stdout)
	h.wait(time.Second)
	return err
}

type handler struct {
	version string
	log     *slog.Logger
	drivers []*driver.Definition
	// running counts operations, also those that a caller gave up on.
	running sync.WaitGroup
}

func newHandler(opts Options, drivers []*driver.Definition) (*handler, error) {
	if len(drivers) == 0 {
		return nil, errors.New("serve: no driver")
	}
	h := &handler{version: opts.PluginVersion, log: opts.Log, drivers: drivers}
	for i, d := range drivers {
		for _, o := range drivers[:i] {
			if o.Manifest().ID == d.Manifest().ID {
				return nil, fmt.Errorf("serve: driver %s is given twice", d.Manifest().ID)
			}
		}
	}
	return h, nil
}

// wait lets abandoned operations end.
func (h *handler) wait(limit time.Duration) {
	done := make(chan struct{})
	go func() {
		h.running.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(limit):
		h.log.Warn("operations were still running at the end")
	}
}

func (h *handler) find(id string) (*driver.Definition, error) {
	for _, d := range h.drivers {
		if d.Manifest().ID == id {
			return d, nil
		}
	}
	return nil, errs.New(errs.UnsupportedDriver, "this plugin has no driver %.80q", id)
}

// Describe answers what the plugin serves.
func (h *handler) Describe(context.Context, *connect.Request[driverv1.DescribeRequest]) (*connect.Response[driverv1.DescribeResponse], error) {
	r := &driverv1.DescribeResponse{Protocol: bcx.Protocol, PluginVersion: h.version}
	for _, d := range h.drivers {
		r.Drivers = append(r.Drivers, bcx.Described(d.Manifest()))
	}
	return connect.NewResponse(r), nil
}

// Health is NOT_SERVING as soon as one driver cannot serve.
func (h *handler) Health(ctx context.Context, _ *connect.Request[driverv1.HealthRequest]) (*connect.Response[driverv1.HealthResponse], error) {
	r := &driverv1.HealthResponse{Status: driverv1.HealthResponse_STATUS_SERVING}
	var why []string
	for _, d := range h.drivers {
		if err := d.Health(ctx); err != nil {
			r.Status = driverv1.HealthResponse_STATUS_NOT_SERVING
			why = append(why, d.Manifest().ID+": "+err.Error())
		}
	}
	r.Message = strings.Join(why, "; ")
	return connect.NewResponse(r), nil
}

// Validate parses a configuration and runs the driver's live check.
func (h *handler) Validate(ctx context.Context, req *connect.Request[driverv1.ValidateRequest]) (*connect.Response[driverv1.ValidateResponse], error) {
	m := req.Msg
	ctx, cancel := until(ctx, m.GetDeadlineMs())
	defer cancel()
	d, err := h.find(m.GetDriver())
	if err == nil {
		call := driver.NewContext(ctx, secrets(m.GetSecrets()), h.log, nil)
		_, err = h.run(ctx, func() ([]byte, error) { return nil, d.Validate(call, []byte(m.GetConfigJson())) })
	}
	r := &driverv1.ValidateResponse{}
	if err != nil {
		r.Error = bcx.ErrorOf(err, true)
	}
	return connect.NewResponse(r), nil
}

// Invoke runs one operation.
func (h *handler) Invoke(ctx context.Context, req *connect.Request[driverv1.InvokeRequest], stream *connect.ServerStream[driverv1.InvokeResponse]) error {
	m := req.Msg
	ctx, cancel := until(ctx, m.GetDeadlineMs())
	defer cancel()
	out := &sender{stream: stream}
	result, retrySafe, err := h.invoke(ctx, m, out)
	if err == nil && len(result) > bcx.MaxMessage-64 {
		err = errs.New(errs.InvalidArgs, "the result has %d bytes, limit %d", len(result), bcx.MaxMessage)
	}
	if err != nil {
		return out.last(&driverv1.InvokeResponse{Event: &driverv1.InvokeResponse_Error{Error: bcx.ErrorOf(err, retrySafe)}})
	}
	return out.last(&driverv1.InvokeResponse{Event: &driverv1.InvokeResponse_Result{Result: &driverv1.Result{ResultJson: string(result)}}})
}

func (h *handler) invoke(ctx context.Context, m *driverv1.InvokeRequest, out *sender) (result []byte, retrySafe bool, err error) {
	d, err := h.find(m.GetDriver())
	if err != nil {
		return nil, false, err
	}
	retrySafe = d.Manifest().IsRetrySafe(m.GetKind(), m.GetOperation())
	log := h.log.With("driver", m.GetDriver(), "operation", m.GetKind()+"."+m.GetOperation(), "idempotency_key", m.GetIdempotencyKey())
	call := driver.NewContext(ctx, secrets(m.GetSecrets()), log, out.progress)
	call.IdempotencyKey, call.Traceparent, call.TargetNodeID = m.GetIdempotencyKey(), m.GetTraceparent(), m.GetTargetNodeId()
	result, err = h.run(ctx, func() ([]byte, error) {
		return d.Invoke(call, m.GetKind(), m.GetOperation(), []byte(m.GetConfigJson()), []byte(m.GetArgsJson()))
	})
	return result, retrySafe, err
}

// run ends with ctx even when f ignores it; f then runs on, counted.
func (h *handler) run(ctx context.Context, f func() ([]byte, error)) ([]byte, error) {
	type answer struct {
		result []byte
		err    error
	}
	done := make(chan answer, 1)
	h.running.Go(func() {
		defer func() {
			if r := recover(); r != nil {
				h.log.Error("operation panicked", "panic", fmt.Sprint(r), "stack", string(debug.Stack()))
				done <- answer{nil, errs.New(errs.DriverError, "the operation panicked: %v", r)}
			}
		}()
		result, err := f()
		done <- answer{result, err}
	})
	select {
	case a := <-done:
		return a.result, a.err
	case <-ctx.Done():
		select {
		case a := <-done:
			return a.result, a.err
		default:
		}
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return nil, errs.Retry(errs.Timeout, "the deadline is over")
		}
		return nil, errs.New(errs.Cancelled, "the caller cancelled")
	}
}

// Stream answers that no operation of these drivers is a stream.
func (h *handler) Stream(_ context.Context, stream *connect.BidiStream[driverv1.StreamRequest, driverv1.StreamResponse]) error {
	m, err := stream.Receive()
	if err != nil {
		return err
	}
	e := errs.New(errs.InvalidArgs, "the first frame is not open")
	if open := m.GetOpen(); open != nil {
		e = errs.New(errs.UnsupportedOperation, "%.80q is not a stream operation", open.GetKind()+"."+open.GetOperation())
	}
	return stream.Send(&driverv1.StreamResponse{Frame: &driverv1.StreamResponse_Error{Error: bcx.ErrorOf(e, false)}})
}

// sender keeps an operation that outlives its call away from the stream.
type sender struct {
	mu     sync.Mutex
	stream *connect.ServerStream[driverv1.InvokeResponse]
	ended  bool
}

func (s *sender) progress(p driver.Progress) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return
	}
	// A lost caller shows at the last message.
	_ = s.stream.Send(&driverv1.InvokeResponse{Event: &driverv1.InvokeResponse_Progress{Progress: &driverv1.Progress{
		Phase: p.Phase, Message: p.Message, Done: p.Done, Total: p.Total,
	}}})
}

func (s *sender) last(m *driverv1.InvokeResponse) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	return s.stream.Send(m)
}

func until(ctx context.Context, deadlineMillis int64) (context.Context, context.CancelFunc) {
	if deadlineMillis == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, time.UnixMilli(deadlineMillis))
}

func secrets(m map[string]string) driver.Secrets {
	s := driver.Secrets{}
	for k, v := range m {
		s[k] = secret.New([]byte(v))
	}
	return s
}
