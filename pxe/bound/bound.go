// Package bound opens sockets that one network interface alone can reach.
package bound

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

// Listen opens a TCP listener on address that only iface reaches.
func Listen(ctx context.Context, iface string, address netip.AddrPort) (net.Listener, error) {
	lc := net.ListenConfig{Control: toDevice(iface)}
	ln, err := lc.Listen(ctx, "tcp4", address.String())
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", iface, err)
	}
	return ln, nil
}

// ListenPacket opens a UDP socket on address that only iface reaches.
func ListenPacket(ctx context.Context, iface string, address netip.AddrPort) (*net.UDPConn, error) {
	lc := net.ListenConfig{Control: toDevice(iface)}
	conn, err := lc.ListenPacket(ctx, "udp4", address.String())
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", iface, err)
	}
	return conn.(*net.UDPConn), nil
}

func toDevice(iface string) func(network, address string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		// An empty name would unbind, and so open the socket to every interface.
		if iface == "" {
			return unix.ENODEV
		}
		var err error
		if cerr := c.Control(func(fd uintptr) {
			err = unix.BindToDevice(int(fd), iface)
		}); cerr != nil {
			return cerr
		}
		return err
	}
}
