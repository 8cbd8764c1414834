package bcx

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime/debug"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
	"github.com/better-compute/site-appliance/plugins/bcx/driverv1/driverv1connect"
	"github.com/better-compute/site-appliance/plugins/bcx/h2"
)

// ErrNotStartedByHost is Serve's answer to a person who runs a plugin by hand.
var ErrNotStartedByHost = errors.New("this is a bcx driver plugin: a host (bcd or the control plane) starts it")

// Serve serves impl to the host that started this process until ctx ends, then
// lets calls in flight end for ShutdownGrace. It reads the three BCX variables,
// and prints the handshake line on stdout once it listens.
func Serve(ctx context.Context, impl driverv1connect.DriverPluginHandler, stdout io.Writer) error {
	if os.Getenv(CookieVariable) != Cookie {
		return ErrNotStartedByHost
	}
	// A plugin's heap is so small that by default a busy one would be collected a
	// hundred times a second.
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400)
	}
	return serve(ctx, impl, stdout, os.Getenv(SocketDirVariable), os.Getenv(ClientCertVariable))
}

func serve(ctx context.Context, impl driverv1connect.DriverPluginHandler, stdout io.Writer, dir, clientPEM string) error {
	peer, err := parsePEM(clientPEM)
	if err != nil {
		return fmt.Errorf("read %s: %w", ClientCertVariable, err)
	}
	self, err := NewIdentity()
	if err != nil {
		return err
	}
	path := filepath.Join(dir, SocketName)
	line, err := Handshake{Socket: path, Certificate: self.DER()}.Line()
	if err != nil {
		return err
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	_, handler := driverv1connect.NewDriverPluginHandler(impl,
		connect.WithCompression("gzip", nil, nil), connect.WithInterceptors(together{}),
		connect.WithReadMaxBytes(MaxMessage), connect.WithSendMaxBytes(MaxMessage))
	server := &h2.Server{
		Handler: handler, TLS: self.server(peer), Timeout: StartTimeout, Log: slog.New(slog.NewJSONHandler(os.Stderr, nil)),
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	if _, err := io.WriteString(stdout, line); err != nil {
		server.Close()
		<-served
		return fmt.Errorf("write handshake line: %w", err)
	}
	select {
	case err := <-served:
		return fmt.Errorf("serve: %w", err)
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), ShutdownGrace-500*time.Millisecond)
	defer cancel()
	if server.Shutdown(grace) != nil {
		server.Close()
	}
	<-served
	return nil
}

// together lets the last message of an Invoke leave with what ends the call.
type together struct{}

func (together) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc { return next }

func (together) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (together) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		return next(ctx, last{conn, ctx})
	}
}

type last struct {
	connect.StreamingHandlerConn
	ctx context.Context
}

func (l last) Send(m any) error {
	if r, ok := m.(*driverv1.InvokeResponse); ok && r.GetProgress() == nil {
		h2.Hold(l.ctx)
	}
	return l.StreamingHandlerConn.Send(m)
}
