package bcx

import (
	"context"
	"net"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/plugins/bcx/driverv1/driverv1connect"
	"github.com/better-compute/site-appliance/plugins/bcx/h2"
)

// Client is a host's connection to one plugin.
type Client struct {
	driverv1connect.DriverPluginClient
	transport *h2.Client
}

// Dial makes the client for a plugin that said h. It connects at the first call.
func Dial(self *Identity, h Handshake) *Client {
	transport := &h2.Client{
		Dial: func(ctx context.Context) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, StartTimeout)
			defer cancel()
			return new(net.Dialer).DialContext(ctx, "unix", h.Socket)
		},
		TLS: self.client(h.Certificate), Timeout: StartTimeout,
	}
	return &Client{
		// Both ends are on one machine: compressing takes longer than copying.
		DriverPluginClient: driverv1connect.NewDriverPluginClient(transport, "https://"+serverName,
			connect.WithGRPC(), connect.WithAcceptCompression("gzip", nil, nil),
			connect.WithReadMaxBytes(MaxMessage), connect.WithSendMaxBytes(MaxMessage)),
		transport: transport,
	}
}

// Close drops the connection once its calls have ended.
func (c *Client) Close() { c.transport.Close() }
