package benchplugin

import (
	"context"
	"errors"
	"io"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"google.golang.org/grpc"

	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
)

// Handshake tells the program, by its environment, that it is the peer's
// plugin.
var Handshake = plugin.HandshakeConfig{ProtocolVersion: 1, MagicCookieKey: "BENCH_PEER_PLUGIN", MagicCookieValue: "1"}

const (
	Service    = "bench.Peer"
	EchoMethod = "/" + Service + "/Echo"
	DownMethod = "/" + Service + "/Down"
	UpMethod   = "/" + Service + "/Up"
)

// GoPlugin offers over go-plugin what our plugin offers over bcx, with the
// same messages.
type GoPlugin struct{ plugin.NetRPCUnsupportedPlugin }

func (GoPlugin) GRPCServer(_ *plugin.GRPCBroker, s *grpc.Server) error {
	s.RegisterService(&grpc.ServiceDesc{
		ServiceName: Service, HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Echo", Handler: echoes}},
		Streams: []grpc.StreamDesc{
			{StreamName: "Down", Handler: sends, ServerStreams: true},
			{StreamName: "Up", Handler: takes, ServerStreams: true, ClientStreams: true},
		},
	}, nil)
	return nil
}

func (GoPlugin) GRPCClient(_ context.Context, _ *plugin.GRPCBroker, c *grpc.ClientConn) (any, error) {
	return c, nil
}

func echoes(_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
	var req driverv1.InvokeRequest
	if err := decode(&req); err != nil {
		return nil, err
	}
	return &driverv1.Result{ResultJson: req.GetArgsJson()}, nil
}

func sends(_ any, s grpc.ServerStream) error {
	if err := s.RecvMsg(new(driverv1.InvokeRequest)); err != nil {
		return err
	}
	for range Chunks {
		if err := s.SendMsg(&driverv1.StreamResponse{Frame: &driverv1.StreamResponse_Data{Data: Chunk}}); err != nil {
			return err
		}
	}
	return nil
}

func takes(_ any, s grpc.ServerStream) error {
	var total uint64
	for {
		var m driverv1.StreamRequest
		if err := s.RecvMsg(&m); errors.Is(err, io.EOF) {
			return s.SendMsg(&driverv1.Progress{Done: total})
		} else if err != nil {
			return err
		}
		total += uint64(len(m.GetData()))
	}
}

// serveGoPlugin is the process of the peer's plugin.
func serveGoPlugin() {
	plugin.Serve(&plugin.ServeConfig{
		HandshakeConfig: Handshake, Plugins: plugin.PluginSet{"bench": GoPlugin{}}, GRPCServer: plugin.DefaultGRPCServer,
		Logger: hclog.NewNullLogger(),
	})
}
