package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/host"
	"github.com/better-compute/site-appliance/plugins/host/hosttest"
	"github.com/better-compute/site-appliance/plugins/sdk"
)

var bcxSuite = suite{names: []string{"bcx.invoke"}, run: measureBCX}

// bareVariable makes this program the bare server on the socket that it names.
const bareVariable = "BENCH_BARE_SOCKET"

// measureBCX times a call to a plugin in its sandbox beside one to a process
// that has nothing around it.
func measureBCX(ctx context.Context, s settings) (rows []row, err error) {
	if os.Geteuid() != 0 {
		fmt.Fprintln(s.log, "bench: bcx.invoke is left out: plugins get a uid of their own, which needs root")
		return nil, nil
	}
	err = withTB(func(tb testing.TB) error {
		d := hosttest.NewDir(tb)
		d.Add("echo", hosttest.Self(tb))
		c := d.Config()
		c.Log = slog.New(slog.DiscardHandler)
		h := hosttest.Start(tb, c)
		invoke := func(ctx context.Context) error {
			_, err := h.Invoke(ctx, host.Call{Driver: "echo", Kind: "echo", Operation: "echo", Args: json.RawMessage(`["hello"]`)})
			return err
		}
		bare, stop, err := startBare(ctx, filepath.Join(c.SocketRoot, "bare.sock"))
		if err != nil {
			return err
		}
		var ours, theirs []float64
		for i := range s.rounds {
			fmt.Fprintf(s.log, "bench: bcx.invoke, round %d of %d\n", i+1, s.rounds)
			for _, side := range []struct {
				call func(context.Context) error
				p50  *[]float64
			}{{invoke, &ours}, {bare, &theirs}} {
				_, p50, err := calls(ctx, 1, side.call)
				if err != nil {
					return errors.Join(err, stop())
				}
				*side.p50 = append(*side.p50, p50*1e6)
			}
		}
		rows = []row{{name: "bcx.invoke", ours: median(ours), unit: "µs", theirs: median(theirs), less: true,
			peer: "bare connect unary echo of another process, unix socket and TLS, p50 of both"}}
		return stop()
	})
	return rows, err
}

// startBare runs the bare server in a process of its own, as a plugin is.
func startBare(ctx context.Context, socket string) (call func(context.Context) error, stop func() error, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), bareVariable+"="+socket)
	cmd.Stderr = os.Stderr
	life, err := cmd.StdinPipe() // its end ends the server
	if err != nil {
		return nil, nil, err
	}
	ready, err := cmd.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, nil, err
	}
	stop = func() error { return errors.Join(life.Close(), cmd.Wait()) }
	if _, err := io.ReadFull(ready, make([]byte, 1)); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("wait for the bare server: %w", err), stop())
	}
	protocols := new(http.Protocols)
	protocols.SetHTTP2(true)
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
		// The peer is measured, not trusted.
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, Protocols: protocols, DisableCompression: true,
	}
	return bareClient(&http.Client{Transport: transport, Timeout: time.Minute}, "https://bare"), stop, nil
}

// serveBare serves on socket until stdin ends.
func serveBare(socket string) error {
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle(barePath, bareHandler())
	server := httptest.NewUnstartedServer(mux)
	server.Listener.Close()
	server.Listener, server.EnableHTTP2 = listener, true
	server.StartTLS()
	defer server.Close()
	if _, err := os.Stdout.WriteString("."); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// servePlugin is the plugin's side.
func servePlugin() error {
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
