package bcx

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1/driverv1connect"
)

// grpcPlugin is a plugin on another gRPC library.
func grpcPlugin(t *testing.T, self *Identity, host []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), SocketName)
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(grpc.Creds(credentials.NewTLS(self.server(host))), grpc.MaxRecvMsgSize(MaxMessage))
	s.RegisterService(&grpc.ServiceDesc{
		ServiceName: driverv1connect.DriverPluginName, HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Describe", Handler: func(_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			return &driverv1.DescribeResponse{Protocol: Protocol, PluginVersion: "grpc"}, decode(new(driverv1.DescribeRequest))
		}}},
		Streams: []grpc.StreamDesc{
			{StreamName: "Invoke", ServerStreams: true, Handler: func(_ any, s grpc.ServerStream) error {
				var req driverv1.InvokeRequest
				if err := s.RecvMsg(&req); err != nil {
					return err
				}
				if req.GetOperation() == "fail" {
					return status.Error(codes.NotFound, "no such thing, ü")
				}
				if err := s.SendMsg(&driverv1.InvokeResponse{Event: &driverv1.InvokeResponse_Progress{Progress: &driverv1.Progress{Done: 1}}}); err != nil {
					return err
				}
				return s.SendMsg(&driverv1.InvokeResponse{Event: &driverv1.InvokeResponse_Result{Result: &driverv1.Result{ResultJson: req.GetArgsJson()}}})
			}},
			{StreamName: "Stream", ServerStreams: true, ClientStreams: true, Handler: func(_ any, s grpc.ServerStream) error {
				for {
					var m driverv1.StreamRequest
					if err := s.RecvMsg(&m); errors.Is(err, io.EOF) {
						return nil
					} else if err != nil {
						return err
					}
					if err := s.SendMsg(&driverv1.StreamResponse{Frame: &driverv1.StreamResponse_Data{Data: m.GetData()}}); err != nil {
						return err
					}
				}
			}},
		},
	}, nil)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		<-done
	})
	return path
}

// sizes are of messages: small, over a frame, over the windows that an HTTP/2
// connection begins with.
var sizes = []int{1, 20_000, 3 << 20}

func TestClientWithAnotherServer(t *testing.T) {
	host, self := identity(t), identity(t)
	c := Dial(host, Handshake{Socket: grpcPlugin(t, self, host.DER()), Certificate: self.DER()})
	defer c.Close()
	d, err := c.Describe(t.Context(), connect.NewRequest(&driverv1.DescribeRequest{}))
	if err != nil || d.Msg.GetPluginVersion() != "grpc" {
		t.Fatalf("Describe = %v, %v", d, err)
	}
	var owned sync.WaitGroup
	for _, size := range sizes {
		owned.Go(func() {
			args := strings.Repeat("a", size)
			s, err := c.Invoke(t.Context(), connect.NewRequest(&driverv1.InvokeRequest{ArgsJson: args}))
			if err != nil {
				t.Error(err)
				return
			}
			defer s.Close()
			if !s.Receive() || s.Msg().GetProgress().GetDone() != 1 || !s.Receive() || s.Msg().GetResult().GetResultJson() != args || s.Receive() || s.Err() != nil {
				t.Errorf("Invoke with %d bytes: %v", size, s.Err())
			}
		})
		owned.Go(func() {
			data := bytes.Repeat([]byte("d"), size)
			s := c.Stream(t.Context())
			for range 3 {
				if err := s.Send(&driverv1.StreamRequest{Frame: &driverv1.StreamRequest_Data{Data: data}}); err != nil {
					t.Error(err)
				}
				if m, err := s.Receive(); err != nil || !bytes.Equal(m.GetData(), data) {
					t.Errorf("Receive = %d bytes, %v", len(m.GetData()), err)
				}
			}
			if err := s.CloseRequest(); err != nil {
				t.Error(err)
			}
			if m, err := s.Receive(); !errors.Is(err, io.EOF) {
				t.Errorf("Receive after the end = %v, %v", m, err)
			}
			if err := s.CloseResponse(); err != nil {
				t.Error(err)
			}
		})
	}
	owned.Wait()
	s, err := c.Invoke(t.Context(), connect.NewRequest(&driverv1.InvokeRequest{Operation: "fail"}))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if s.Receive() || connect.CodeOf(s.Err()) != connect.CodeNotFound || !strings.Contains(s.Err().Error(), "no such thing, ü") {
		t.Errorf("a failed call = %v", s.Err())
	}
}

func TestServerWithAnotherClient(t *testing.T) {
	host := identity(t)
	h, stop := servingImpl(t, echo{}, host.PEM())
	conn, err := grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(credentials.NewTLS(host.client(h.Certificate))),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", h.Socket)
		}), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage)))
	if err != nil {
		t.Fatal(err)
	}
	var described driverv1.DescribeResponse
	if err := conn.Invoke(t.Context(), driverv1connect.DriverPluginDescribeProcedure, &driverv1.DescribeRequest{}, &described); err != nil || described.GetProtocol() != Protocol {
		t.Fatalf("Describe = %v, %v", &described, err)
	}
	invoke := func(args string) error {
		s, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true}, driverv1connect.DriverPluginInvokeProcedure)
		if err != nil {
			return err
		}
		if err := errors.Join(s.SendMsg(&driverv1.InvokeRequest{ArgsJson: args}), s.CloseSend()); err != nil {
			return err
		}
		var m driverv1.InvokeResponse
		if err := s.RecvMsg(&m); err != nil {
			return err
		}
		if m.GetResult().GetResultJson() != args {
			return fmt.Errorf("%d bytes came back of %d", len(m.GetResult().GetResultJson()), len(args))
		}
		if err := s.RecvMsg(&m); !errors.Is(err, io.EOF) {
			return fmt.Errorf("the end is %w", err)
		}
		return nil
	}
	var owned sync.WaitGroup
	for _, size := range sizes {
		for range 4 {
			owned.Go(func() {
				if err := invoke(strings.Repeat("a", size)); err != nil {
					t.Errorf("Invoke with %d bytes: %v", size, err)
				}
			})
		}
	}
	owned.Wait()
	s, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, driverv1connect.DriverPluginStreamProcedure)
	if err != nil {
		t.Fatal(err)
	}
	for _, size := range sizes {
		data := bytes.Repeat([]byte("d"), size)
		if err := s.SendMsg(&driverv1.StreamRequest{Frame: &driverv1.StreamRequest_Data{Data: data}}); err != nil {
			t.Fatal(err)
		}
		var m driverv1.StreamResponse
		if err := s.RecvMsg(&m); err != nil || !bytes.Equal(m.GetData(), data) {
			t.Errorf("%d bytes of a stream = %d, %v", size, len(m.GetData()), err)
		}
	}
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	if err := stop(); err != nil {
		t.Errorf("serve: %v", err)
	}
}

// Between two processes of one machine compressing takes longer than copying: no
// side does it.
func TestNothingIsCompressed(t *testing.T) {
	host := identity(t)
	h, stop := servingImpl(t, echo{}, host.PEM())
	c := Dial(host, h)
	s, err := c.Invoke(t.Context(), connect.NewRequest(&driverv1.InvokeRequest{ArgsJson: strings.Repeat("a", 100_000)}))
	if err != nil {
		t.Fatal(err)
	}
	if !s.Receive() {
		t.Fatal(s.Err())
	}
	for _, name := range []string{"Grpc-Encoding", "Grpc-Accept-Encoding"} {
		if v := s.ResponseHeader().Get(name); v != "" && v != "identity" {
			t.Errorf("%s is %q", name, v)
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	c.Close()
	if err := stop(); err != nil {
		t.Errorf("serve: %v", err)
	}
}
