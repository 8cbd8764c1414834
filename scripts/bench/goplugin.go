package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os/exec"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"google.golang.org/grpc"

	"github.com/better-compute/site-appliance/plugins/bcx/driverv1"
	"github.com/better-compute/site-appliance/scripts/bench/benchplugin"
)

// peer is a started plugin of the peer.
type peer struct {
	client *plugin.Client
	conn   *grpc.ClientConn
}

// startPeer starts the plugin at path; a sum is its SHA-256, if it is to be checked.
func startPeer(path string, sum []byte) (*peer, error) {
	var pin *plugin.SecureConfig
	if sum != nil {
		pin = &plugin.SecureConfig{Checksum: sum, Hash: sha256.New()}
	}
	c := plugin.NewClient(&plugin.ClientConfig{
		HandshakeConfig: benchplugin.Handshake, Plugins: plugin.PluginSet{"bench": benchplugin.GoPlugin{}}, Cmd: exec.Command(path),
		AllowedProtocols: []plugin.Protocol{plugin.ProtocolGRPC}, AutoMTLS: true, SecureConfig: pin, Logger: hclog.NewNullLogger(),
	})
	rpc, err := c.Client()
	if err != nil {
		c.Kill()
		return nil, fmt.Errorf("start the peer's plugin: %w", err)
	}
	conn, err := rpc.Dispense("bench")
	if err != nil {
		c.Kill()
		return nil, fmt.Errorf("dispense the peer's plugin: %w", err)
	}
	return &peer{c, conn.(*grpc.ClientConn)}, nil
}

func (p *peer) close() { p.client.Kill() }

func (p *peer) call(ctx context.Context) error {
	var r driverv1.Result
	if err := p.conn.Invoke(ctx, benchplugin.EchoMethod, &driverv1.InvokeRequest{
		Driver: "echo", Kind: "echo", Operation: "echo", ArgsJson: echoArgs,
	}, &r); err != nil {
		return err
	}
	if r.GetResultJson() != echoArgs {
		return fmt.Errorf("the peer answered %q", r.GetResultJson())
	}
	return nil
}

func (p *peer) down(ctx context.Context) error {
	s, err := p.conn.NewStream(ctx, &grpc.StreamDesc{StreamName: "Down", ServerStreams: true}, benchplugin.DownMethod)
	if err != nil {
		return err
	}
	if err := errors.Join(s.SendMsg(&driverv1.InvokeRequest{}), s.CloseSend()); err != nil {
		return err
	}
	total := 0
	for {
		var m driverv1.StreamResponse
		if err := s.RecvMsg(&m); errors.Is(err, io.EOF) {
			return whole(total)
		} else if err != nil {
			return err
		}
		total += len(m.GetData())
	}
}

func (p *peer) up(ctx context.Context) error {
	s, err := p.conn.NewStream(ctx, &grpc.StreamDesc{StreamName: "Up", ServerStreams: true, ClientStreams: true}, benchplugin.UpMethod)
	if err != nil {
		return err
	}
	for range benchplugin.Chunks {
		if err := s.SendMsg(&driverv1.StreamRequest{Frame: &driverv1.StreamRequest_Data{Data: benchplugin.Chunk}}); err != nil {
			return err
		}
	}
	if err := s.CloseSend(); err != nil {
		return err
	}
	var m driverv1.Progress
	if err := s.RecvMsg(&m); err != nil {
		return err
	}
	return whole(int(m.GetDone()))
}
