package sdk

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// maxText bounds an error's message and each text of a progress report.
const maxText = 64 << 10

// Handler answers bcx for declared drivers. Serve uses it; a program that calls
// bcx.Serve itself may too.
type Handler struct {
	version string
	log     *slog.Logger
	drivers []*driver.Definition
	crew    crew
}

// NewHandler makes the handler of drivers whose ids all differ.
func NewHandler(opts Options, drivers ...*driver.Definition) (*Handler, error) {
	if len(drivers) == 0 {
		return nil, errors.New("serve: no driver")
	}
	h := &Handler{version: opts.PluginVersion, log: opts.Log, drivers: drivers}
	if h.log == nil {
		h.log = slog.New(slog.DiscardHandler)
	}
	h.crew.log = h.log
	for i, d := range drivers {
		if d == nil {
			return nil, errors.New("serve: a driver is nil")
		}
		for _, o := range drivers[:i] {
			if o.ID() == d.ID() {
				return nil, fmt.Errorf("serve: driver %s is given twice", d.ID())
			}
		}
	}
	return h, nil
}

// wait lets abandoned operations end.
func (h *Handler) wait(limit time.Duration) {
	h.crew.dismiss()
	done := make(chan struct{})
	go func() {
		h.crew.running.Wait()
		close(done)
	}()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		h.log.Warn("operations were still running at the end")
	}
}

func (h *Handler) find(id string) (*driver.Definition, error) {
	for _, d := range h.drivers {
		if d.ID() == id {
			return d, nil
		}
	}
	return nil, errs.New(errs.UnsupportedDriver, "this plugin has no driver %.80q", id)
}

// Describe answers what the plugin serves.
func (h *Handler) Describe(context.Context, *connect.Request[driverv1.DescribeRequest]) (*connect.Response[driverv1.DescribeResponse], error) {
	r := &driverv1.DescribeResponse{Protocol: bcx.Protocol, PluginVersion: text(h.version)}
	for _, d := range h.drivers {
		r.Drivers = append(r.Drivers, bcx.Described(d.Manifest()))
	}
	return connect.NewResponse(r), nil
}

// Health is NOT_SERVING as soon as one driver cannot serve.
func (h *Handler) Health(ctx context.Context, _ *connect.Request[driverv1.HealthRequest]) (*connect.Response[driverv1.HealthResponse], error) {
	r := &driverv1.HealthResponse{Status: driverv1.HealthResponse_STATUS_SERVING}
	var why []string
	for _, d := range h.drivers {
		if _, err := h.run(ctx, func() ([]byte, error) { return nil, d.Health(ctx) }); err != nil {
			r.Status = driverv1.HealthResponse_STATUS_NOT_SERVING
			why = append(why, d.ID()+": "+err.Error())
		}
	}
	r.Message = text(strings.Join(why, "; "))
	return connect.NewResponse(r), nil
}

// Validate parses a configuration and runs the driver's live check.
func (h *Handler) Validate(ctx context.Context, req *connect.Request[driverv1.ValidateRequest]) (*connect.Response[driverv1.ValidateResponse], error) {
	r := &driverv1.ValidateResponse{}
	if err := h.validate(ctx, req.Msg); err != nil {
		r.Error = errorOf(err, true)
	}
	return connect.NewResponse(r), nil
}

func (h *Handler) validate(ctx context.Context, m *driverv1.ValidateRequest) error {
	ctx, cancel := until(ctx, m.GetDeadlineMs())
	defer cancel()
	d, err := h.find(m.GetDriver())
	if err != nil {
		return err
	}
	call := driver.NewContext(ctx, secrets(m.GetSecrets()), h.log.With("driver", d.ID()), nil)
	_, err = h.run(ctx, func() ([]byte, error) { return nil, d.Validate(call, []byte(m.GetConfigJson())) })
	return err
}

// Invoke runs one operation.
func (h *Handler) Invoke(ctx context.Context, req *connect.Request[driverv1.InvokeRequest], stream *connect.ServerStream[driverv1.InvokeResponse]) error {
	return h.invoke(ctx, req.Msg, stream.Send)
}

func (h *Handler) invoke(ctx context.Context, m *driverv1.InvokeRequest, send func(*driverv1.InvokeResponse) error) error {
	ctx, cancel := until(ctx, m.GetDeadlineMs())
	defer cancel()
	out := &sender{send: send}
	d, err := h.find(m.GetDriver())
	if err != nil {
		return out.last(failed(err, false))
	}
	call := h.context(ctx, m, out.progress)
	result, err := h.run(ctx, func() ([]byte, error) {
		return d.Invoke(call, m.GetKind(), m.GetOperation(), []byte(m.GetConfigJson()), []byte(m.GetArgsJson()))
	})
	if err != nil {
		return out.last(failed(err, d.IsRetrySafe(m.GetKind(), m.GetOperation())))
	}
	answer := &driverv1.InvokeResponse{Event: &driverv1.InvokeResponse_Result{
		Result: &driverv1.Result{ResultJson: strings.ToValidUTF8(string(result), "\ufffd")},
	}}
	if n := proto.Size(answer); n > bcx.MaxMessage {
		answer = failed(errs.New(errs.InvalidArgs, "the result has %d bytes, limit %d", n, bcx.MaxMessage), false)
	}
	return out.last(answer)
}

func failed(err error, retrySafe bool) *driverv1.InvokeResponse {
	return &driverv1.InvokeResponse{Event: &driverv1.InvokeResponse_Error{Error: errorOf(err, retrySafe)}}
}

func (h *Handler) context(ctx context.Context, m *driverv1.InvokeRequest, emit func(driver.Progress)) *driver.Context {
	call := driver.NewContext(ctx, secrets(m.GetSecrets()), h.logOf(m), emit)
	call.IdempotencyKey, call.Traceparent, call.TargetNodeID = m.GetIdempotencyKey(), m.GetTraceparent(), m.GetTargetNodeId()
	return call
}

// run ends with ctx even when f ignores it; f then runs on, counted.
func (h *Handler) run(ctx context.Context, f func() ([]byte, error)) ([]byte, error) {
	if err := over(ctx); err != nil {
		return nil, err
	}
	w := h.crew.begin(f)
	select {
	case a := <-w.done:
		h.crew.end(w, a)
		// What an operation without a word of its own says once its time is over
		// is that its time is over.
		var own *errs.Error
		if a.err != nil && !errors.As(a.err, &own) {
			if err := over(ctx); err != nil {
				return nil, err
			}
		}
		return a.result, a.err
	case <-ctx.Done():
		close(w.jobs)
		select {
		case a := <-w.done:
			if a.err == nil {
				return a.result, nil
			}
		default:
		}
		return nil, over(ctx)
	}
}

// over says why a call's context has ended, if it has.
func over(ctx context.Context) error {
	var own *errs.Error
	switch cause := context.Cause(ctx); {
	case ctx.Err() == nil:
		return nil
	case errors.As(cause, &own):
		return own
	case errors.Is(cause, context.DeadlineExceeded):
		return errs.Retry(errs.Timeout, "the deadline is over")
	}
	return errs.New(errs.Cancelled, "the caller cancelled")
}

// sender keeps an operation that outlives its call away from the stream.
type sender struct {
	mu    sync.Mutex
	send  func(*driverv1.InvokeResponse) error
	ended bool
}

func (s *sender) progress(p driver.Progress) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return
	}
	// A lost caller shows at the last message.
	_ = s.send(&driverv1.InvokeResponse{Event: &driverv1.InvokeResponse_Progress{Progress: &driverv1.Progress{
		Phase: text(p.Phase), Message: text(p.Message), Done: p.Done, Total: p.Total,
	}}})
}

func (s *sender) last(m *driverv1.InvokeResponse) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	return s.send(m)
}

// computeForm is a code of the control plane's API.
var computeForm = regexp.MustCompile(`^[A-Z][A-Z0-9]*(_[A-Z0-9]+)*$`)

// errorOf is err as the wire carries it: INVALID_CONFIG travels as
// invalid-config, and the rest as bcx says.
func errorOf(err error, retrySafe bool) *driverv1.Error {
	e := *errs.From(err)
	if computeForm.MatchString(string(e.Code)) {
		e.Code = errs.Code(strings.ReplaceAll(strings.ToLower(string(e.Code)), "_", "-"))
		err = &e
	}
	w := bcx.ErrorOf(err, retrySafe)
	w.Message = text(w.Message)
	return w
}

// text is what a protobuf string can hold, within bounds.
func text(s string) string {
	return strings.ToValidUTF8(s[:min(len(s), maxText)], "\ufffd")
}

// until bounds ctx, which is a served call's and ends with it.
func until(ctx context.Context, deadlineMillis int64) (context.Context, context.CancelFunc) {
	if deadlineMillis == 0 {
		return ctx, func() {}
	}
	return context.WithDeadline(ctx, time.UnixMilli(deadlineMillis))
}

func secrets(m map[string]string) driver.Delivered {
	if len(m) == 0 {
		return nil
	}
	s := make(driver.Delivered, len(m))
	for k, v := range m {
		s[k] = secret.New([]byte(v))
	}
	return s
}
