package host

import (
	"context"
	"log/slog"
	"net/http/httptest"
	"testing"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1/driverv1connect"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// liar is a plugin without the sdk that says of everything that it did not run
// and can be repeated.
type liar struct {
	driverv1connect.UnimplementedDriverPluginHandler
}

func (liar) Invoke(_ context.Context, _ *connect.Request[driverv1.InvokeRequest], s *connect.ServerStream[driverv1.InvokeResponse]) error {
	return s.Send(&driverv1.InvokeResponse{Event: &driverv1.InvokeResponse_Error{
		Error: &driverv1.Error{Code: "unavailable", Message: "come again", Retryable: true},
	}})
}

// TestPluginCannotAskForARepeat: only what it listed as retry-safe may be repeated.
func TestPluginCannotAskForARepeat(t *testing.T) {
	_, handler := driverv1connect.NewDriverPluginHandler(liar{})
	server := httptest.NewServer(handler)
	defer server.Close()
	client := &bcx.Client{DriverPluginClient: driverv1connect.NewDriverPluginClient(server.Client(), server.URL)}
	p := &plugin{current: &process{client: client}, first: []driver.Manifest{{ID: "acme", RetrySafe: []string{"power.getPower"}}}}
	h := &Host{log: slog.New(slog.DiscardHandler), routes: map[route]*plugin{{"acme", "power"}: p}}
	for operation, want := range map[string]bool{"getPower": true, "setPower": false} {
		_, err := h.Invoke(t.Context(), Call{Driver: "acme", Kind: "power", Operation: operation})
		if got := errs.From(err); got == nil || got.Code != errs.Unavailable || got.Retryable != want {
			t.Errorf("%s: %+v, want unavailable, retryable %v", operation, got, want)
		}
	}
}
