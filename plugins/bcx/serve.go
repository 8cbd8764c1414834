package bcx

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"connectrpc.com/connect"

	"github.com/better-compute/site-appliance/plugins/bcx/driverv1/driverv1connect"
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
	mux := http.NewServeMux()
	mux.Handle(driverv1connect.NewDriverPluginHandler(impl,
		connect.WithReadMaxBytes(MaxMessage), connect.WithSendMaxBytes(MaxMessage)))
	protocols := new(http.Protocols)
	protocols.SetHTTP2(true)
	server := &http.Server{
		Handler: mux, TLSConfig: self.server(peer), Protocols: protocols,
		HTTP2:             &http.HTTP2Config{MaxReceiveBufferPerConnection: window, MaxReceiveBufferPerStream: window},
		ReadHeaderTimeout: StartTimeout,
	}
	served := make(chan error, 1)
	go func() { served <- server.ServeTLS(listener, "", "") }()
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
