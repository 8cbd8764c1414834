package benchplugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1/driverv1connect"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/sdk"
)

// rawPlugin is a bcx plugin without our SDK: what its streams carry is bounded
// by the wire alone.
type rawPlugin struct {
	driverv1connect.UnimplementedDriverPluginHandler
}

func (rawPlugin) Describe(context.Context, *connect.Request[driverv1.DescribeRequest]) (*connect.Response[driverv1.DescribeResponse], error) {
	return connect.NewResponse(&driverv1.DescribeResponse{Protocol: bcx.Protocol}), nil
}

func (rawPlugin) Invoke(_ context.Context, req *connect.Request[driverv1.InvokeRequest], s *connect.ServerStream[driverv1.InvokeResponse]) error {
	return s.Send(&driverv1.InvokeResponse{Event: &driverv1.InvokeResponse_Result{Result: &driverv1.Result{ResultJson: req.Msg.GetArgsJson()}}})
}

func (rawPlugin) Stream(_ context.Context, s *connect.BidiStream[driverv1.StreamRequest, driverv1.StreamResponse]) error {
	first, err := s.Receive()
	if err != nil {
		return err
	}
	if first.GetOpen().GetOperation() == "down" {
		for range Chunks {
			if err := s.Send(&driverv1.StreamResponse{Frame: &driverv1.StreamResponse_Data{Data: Chunk}}); err != nil {
				return err
			}
		}
		return nil
	}
	total := 0
	for {
		m, err := s.Receive()
		if errors.Is(err, io.EOF) {
			return s.Send(&driverv1.StreamResponse{Frame: &driverv1.StreamResponse_Data{Data: []byte(strconv.Itoa(total))}})
		} else if err != nil {
			return err
		}
		total += len(m.GetData())
	}
}

// servePlugin is the plugin's side.
func servePlugin() error {
	if os.Getenv(RawVariable) != "" {
		ctx, stop := context.WithCancel(context.Background())
		defer stop()
		go func() { // ends with the process
			_, _ = io.Copy(io.Discard, os.Stdin)
			stop()
		}()
		return bcx.Serve(ctx, rawPlugin{}, os.Stdout)
	}
	echo := driver.Kind[struct{}]{Name: "echo", Operations: map[string]driver.Operation[struct{}]{
		"echo": func(_ *driver.Context, _ struct{}, args driver.Args) (any, error) { return args, nil },
	}}
	d, err := driver.Define(driver.Spec[struct{}]{
		ID: "echo", Version: "1.0.0", RunsOn: "site",
		Parse: func(json.RawMessage) (struct{}, error) { return struct{}{}, nil },
	}, driver.Implement(echo, func(struct{}, *driver.Context) (struct{}, error) { return struct{}{}, nil }))
	if err != nil {
		return err
	}
	if code := sdk.Main(sdk.Options{PluginVersion: "bench"}, d); code != 0 {
		return fmt.Errorf("the plugin ended with code %d", code)
	}
	return nil
}
