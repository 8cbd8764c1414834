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
	"github.com/better-compute/site-appliance/plugins/bcx/peer"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// liar is a plugin without the sdk that says of everything that it did not run
// and can be repeated.
type liar struct {
	driverv1connect.UnimplementedDriverPluginHandler
}

func (liar) Describe(context.Context, *connect.Request[driverv1.DescribeRequest]) (*connect.Response[driverv1.DescribeResponse], error) {
	return connect.NewResponse(&driverv1.DescribeResponse{Protocol: bcx.Protocol, Drivers: []*driverv1.DescribedDriver{
		bcx.Described(driver.Manifest{ID: "acme", Version: "1", Kinds: []string{"power"}, RunsOn: "site", RetrySafe: []string{"power.getPower"}}),
	}}), nil
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
	theirs, err := peer.New(t.Context(), driverv1connect.NewDriverPluginClient(server.Client(), server.URL), nil, peer.Options{Name: "liar"})
	if err != nil {
		t.Fatal(err)
	}
	p := &plugin{current: &process{peer: theirs}, first: theirs.Manifests()}
	h := &Host{log: slog.New(slog.DiscardHandler), routes: map[route]*plugin{{"acme", "power"}: p}}
	for operation, want := range map[string]bool{"getPower": true, "setPower": false} {
		_, err := h.Invoke(t.Context(), Call{Driver: "acme", Kind: "power", Operation: operation})
		if got := errs.From(err); got == nil || got.Code != errs.Unavailable || got.Retryable != want {
			t.Errorf("%s: %+v, want unavailable, retryable %v", operation, got, want)
		}
	}
}
