package bcx

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1/driverv1connect"
)

// fails echoes one frame, and then ends a stream with an error, as a driver does
// that loses its line.
type fails struct{ describer }

func (fails) Stream(_ context.Context, s *connect.BidiStream[driverv1.StreamRequest, driverv1.StreamResponse]) error {
	m, err := s.Receive()
	if err != nil {
		return err
	}
	return errors.Join(
		s.Send(&driverv1.StreamResponse{Frame: &driverv1.StreamResponse_Data{}}),
		s.Send(&driverv1.StreamResponse{Frame: &driverv1.StreamResponse_Data{Data: m.GetData()}}),
		s.Send(&driverv1.StreamResponse{Frame: &driverv1.StreamResponse_Error{Error: &driverv1.Error{Code: "line-lost"}}}),
	)
}

// What a plugin says last always arrives, whoever's client it is.
func TestLastWords(t *testing.T) {
	host := identity(t)
	h, stop := servingImpl(t, fails{}, host.PEM())
	ours := Dial(host, h)
	protocols := new(http.Protocols)
	protocols.SetHTTP2(true)
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", h.Socket)
		},
		TLSClientConfig: host.client(h.Certificate), Protocols: protocols,
	}
	theirs := driverv1connect.NewDriverPluginClient(&http.Client{Transport: transport}, "https://bcx", connect.WithGRPC())
	var owned sync.WaitGroup
	for _, c := range []driverv1connect.DriverPluginClient{ours, theirs} {
		for range 16 {
			owned.Go(func() {
				for range 50 {
					s := c.Stream(t.Context())
					if err := s.Send(&driverv1.StreamRequest{Frame: &driverv1.StreamRequest_Data{Data: []byte("x")}}); err != nil {
						t.Error(err)
						return
					}
					for i, want := range []string{"", "x", "line-lost"} {
						m, err := s.Receive()
						if err != nil || string(m.GetData())+m.GetError().GetCode() != want {
							t.Errorf("answer %d = %v, %v, want %q", i, m, err, want)
							return
						}
					}
					if m, err := s.Receive(); !errors.Is(err, io.EOF) {
						t.Errorf("after the end comes %v, %v", m, err)
					}
					if err := errors.Join(s.CloseRequest(), s.CloseResponse()); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
	owned.Wait()
	ours.Close()
	transport.CloseIdleConnections()
	if err := stop(); err != nil {
		t.Errorf("serve: %v", err)
	}
}
