// Package bound opens sockets that one interface alone can reach: Linux answers
// for any of its addresses on any interface, and SO_BINDTODEVICE ends that.
package bound

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"syscall"
)

// Listen opens a TCP listener on address that only iface reaches.
func Listen(ctx context.Context, iface string, address netip.AddrPort) (net.Listener, error) {
	ln, err := toDevice(iface).Listen(ctx, "tcp"+family(address), address.String())
	if err != nil {
		return nil, fmt.Errorf("listen on interface %q: %w", iface, err)
	}
	return ln, nil
}

// ListenPacket opens a UDP socket on address that only iface reaches.
func ListenPacket(ctx context.Context, iface string, address netip.AddrPort) (*net.UDPConn, error) {
	conn, err := toDevice(iface).ListenPacket(ctx, "udp"+family(address), address.String())
	if err != nil {
		return nil, fmt.Errorf("listen on interface %q: %w", iface, err)
	}
	return conn.(*net.UDPConn), nil
}

// family keeps a socket to its address's own: IPv6 without IPv4 inside.
func family(address netip.AddrPort) string {
	if address.Addr().Is4() {
		return "4"
	}
	return "6"
}

func toDevice(iface string) *net.ListenConfig {
	return &net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		// An empty name would unbind, and so open the socket to every interface.
		if iface == "" {
			return syscall.ENODEV
		}
		var bind error
		if err := c.Control(func(fd uintptr) { bind = syscall.BindToDevice(int(fd), iface) }); err != nil {
			return err
		}
		if bind != nil {
			return fmt.Errorf("bind to device: %w", bind)
		}
		return nil
	}}
}
