package metal

import (
	"io"

	"github.com/better-compute/site-appliance/plugins/driver"
)

// Console is the kind "console": a machine's serial port.
type Console interface {
	// Open carries bytes both ways until the stream or the call's context ends.
	Open(ctx *driver.Context, stream io.ReadWriter) error
}

// ConsoleKind is console {open}, a stream.
func ConsoleKind() driver.Kind[Console] {
	return driver.Kind[Console]{
		Name: "console",
		Streams: map[string]driver.StreamOperation[Console]{
			"open": func(ctx *driver.Context, c Console, args driver.Args, stream io.ReadWriter) error {
				if err := args.Expect(0); err != nil {
					return err
				}
				return c.Open(ctx, stream)
			},
		},
		Proxy: func(i *driver.Implementation) Console { return consoleProxy{i} },
	}
}

type consoleProxy struct{ i *driver.Implementation }

func (p consoleProxy) Open(ctx *driver.Context, stream io.ReadWriter) error {
	return p.i.On(ctx).Stream("open", stream)
}
