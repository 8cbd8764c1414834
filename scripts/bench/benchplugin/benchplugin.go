// Package benchplugin is a plugin that serves the same over bcx and over
// hashicorp/go-plugin, so that the two are measured with one binary.
package benchplugin

import (
	"bytes"
	"errors"
	"os"

	"github.com/better-compute/site-appliance/plugins/bcx"
)

const (
	// Chunks of ChunkSize bytes are what a stream moves.
	Chunks    = 4096
	ChunkSize = 32 << 10
)

// Chunk is what one message of a stream carries.
var Chunk = bytes.Repeat([]byte("0123456789abcdef"), ChunkSize/16)

// Main serves whichever host started this process.
func Main() error {
	switch {
	case os.Getenv(bcx.CookieVariable) != "":
		return servePlugin()
	case os.Getenv(Handshake.MagicCookieKey) != "":
		serveGoPlugin()
		return nil
	}
	return errors.New("a bench starts this")
}
