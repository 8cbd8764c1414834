package bcx

import (
	"context"
	"net"
	"net/http"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/plugins/bcx/driverv1/driverv1connect"
)

// Client is a host's connection to one plugin.
type Client struct {
	driverv1connect.DriverPluginClient
	transport *http.Transport
}

// Dial makes the client for a plugin that said h. It connects at the first call.
func Dial(self *Identity, h Handshake) *Client {
	protocols := new(http.Protocols)
	protocols.SetHTTP2(true)
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", h.Socket)
		},
		TLSClientConfig:     self.client(h.Certificate),
		TLSHandshakeTimeout: StartTimeout,
		Protocols:           protocols,
		DisableCompression:  true,
		HTTP2:               &http.HTTP2Config{MaxReceiveBufferPerConnection: window, MaxReceiveBufferPerStream: window},
	}
	return &Client{
		DriverPluginClient: driverv1connect.NewDriverPluginClient(&http.Client{Transport: transport}, "https://"+serverName,
			connect.WithGRPC(), connect.WithReadMaxBytes(MaxMessage), connect.WithSendMaxBytes(MaxMessage)),
		transport: transport,
	}
}

// Close drops the connection once its calls have ended.
func (c *Client) Close() { c.transport.CloseIdleConnections() }
