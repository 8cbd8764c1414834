package agent

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/appliance/agent/enroll"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/agent/tunnel"
	"github.com/better-compute/site-appliance/appliance/api/agentv1/agentv1connect"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

const (
	dialWithin = 15 * time.Second
	// deadAfter is how long data may stay unacknowledged.
	deadAfter = 60 * time.Second
	// maxMessageBytes bounds one message from the gateway.
	maxMessageBytes = 16 << 20
)

var clientOptions = connect.WithClientOptions(connect.WithReadMaxBytes(maxMessageBytes))

// tlsFor makes the client configuration for one host.
type tlsFor func(host string) (*tls.Config, error)

// pinned trusts what the join string or boot file pins; it shows no certificate.
func (a *Agent) pinned(caSPKI [32]byte) tlsFor {
	return func(host string) (*tls.Config, error) {
		return trust.PinnedTLS(caSPKI, host, a.clock.Judge), nil
	}
}

// mutual trusts the bundle in force and shows the agent's certificate.
func (a *Agent) mutual(host string) (*tls.Config, error) {
	id := a.identity.Load()
	if id == nil {
		return nil, errs.New(errs.NotEnrolled, "the agent is not enrolled yet")
	}
	return withIdentity(id, host, a.clock.Judge), nil
}

func withIdentity(id *enroll.Identity, host string, judge trust.Judge) *tls.Config {
	c := id.Bundle.TLS(host, judge)
	// The library would hold the certificate back where the server names other CAs.
	c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return id.Certificate(), nil }
	return c
}

// transport speaks HTTP/2 alone, to whom config trusts, through Via if there is one.
func (a *Agent) transport(config tlsFor) *http.Transport {
	var protocols http.Protocols
	protocols.SetHTTP2(true)
	return &http.Transport{
		Protocols:       &protocols,
		IdleConnTimeout: 90 * time.Second,
		HTTP2: &http.HTTP2Config{
			SendPingTimeout:  15 * time.Second,
			PingTimeout:      15 * time.Second,
			WriteByteTimeout: 30 * time.Second,
		},
		DialTLSContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, dialWithin)
			defer cancel()
			host, _, err := net.SplitHostPort(addr)
			if err != nil {
				return nil, err
			}
			c, err := config(host)
			if err != nil {
				return nil, err
			}
			if a.via != "" {
				addr = a.via
			}
			raw, err := a.dial(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			setUserTimeout(raw, deadAfter)
			conn := tls.Client(raw, c)
			if err := conn.HandshakeContext(ctx); err != nil {
				raw.Close()
				return nil, fmt.Errorf("TLS with %s: %w", host, err)
			}
			return conn, nil
		},
	}
}

// openTunnel opens the tunnel of a command in flight.
func (a *Agent) openTunnel(ctx context.Context, commandID string) (io.ReadWriteCloser, error) {
	c, err := tunnel.Open(ctx, agentv1connect.NewTunnelServiceClient(a.tunnels, a.BaseURL(), clientOptions), commandID, tunnel.DefaultTiming)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// noRedirect keeps the agent's certificate where it was meant to go.
func noRedirect(*http.Request, []*http.Request) error {
	return errors.New("the gateway must not redirect")
}
