// Package listen opens sockets that one interface alone can reach: Linux
// answers for any of its addresses on any interface, and SO_BINDTODEVICE ends that.
package listen

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// Listen is net.Listen on iface alone.
func Listen(ctx context.Context, network, address, iface string) (net.Listener, error) {
	config, err := bound(iface)
	if err != nil {
		return nil, err
	}
	l, err := config.Listen(ctx, network, address)
	if err != nil {
		return nil, fmt.Errorf("listen on interface %s: %w", iface, err)
	}
	return l, nil
}

// Packet is net.ListenPacket on iface alone.
func Packet(ctx context.Context, network, address, iface string) (net.PacketConn, error) {
	config, err := bound(iface)
	if err != nil {
		return nil, err
	}
	c, err := config.ListenPacket(ctx, network, address)
	if err != nil {
		return nil, fmt.Errorf("listen on interface %s: %w", iface, err)
	}
	return c, nil
}

func bound(iface string) (*net.ListenConfig, error) {
	if iface == "" {
		return nil, errors.New("listen: no interface is named, and a listener on all of them would be on the uplink too")
	}
	return &net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var bind error
		if err := raw.Control(func(fd uintptr) {
			bind = unix.SetsockoptString(int(fd), unix.SOL_SOCKET, unix.SO_BINDTODEVICE, iface)
		}); err != nil {
			return err
		}
		if bind != nil {
			return fmt.Errorf("bind to device: %w", bind)
		}
		return nil
	}}, nil
}
