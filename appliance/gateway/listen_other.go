//go:build !linux

package gateway

import (
	"context"
	"fmt"
	"net"
)

// Listen opens the gateway's socket.
func Listen(ctx context.Context, address string) (net.Listener, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	return l, nil
}
