// Package bcx is the protocol between a host and a driver in a process of its
// own: one handshake line, then gRPC over a unix socket with mutual TLS.
package bcx

import "time"

// Protocol is the only version of bcx so far.
const Protocol = 1

// The environment of a plugin.
const (
	CookieVariable     = "BCX_MAGIC_COOKIE"
	SocketDirVariable  = "BCX_SOCKET_DIR"
	ClientCertVariable = "BCX_CLIENT_CERT"

	// Cookie tells a plugin that a host started it. It is no secret.
	Cookie = "bettercompute.driver.v1"
)

// Limits of the protocol.
const (
	// MaxHandshake bounds the handshake line, its newline included.
	MaxHandshake = 8 << 10
	// MaxSocketPath is what a unix socket's address holds.
	MaxSocketPath = 107
	// MaxMessage bounds a message either way.
	MaxMessage = 16 << 20
	// StartTimeout bounds the wait for the handshake line in an agent.
	StartTimeout = 10 * time.Second
	// Grace is how much longer than the call's deadline a host waits for the
	// plugin's own answer.
	Grace = time.Second
	// ShutdownGrace is how long a plugin has to end after SIGTERM.
	ShutdownGrace = 5 * time.Second

	// SocketName is the file that our plugins listen on.
	SocketName = "plugin.sock"
)
