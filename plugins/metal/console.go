package metal

import (
	"io"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// Console is the kind "console": a machine's serial port.
type Console interface {
	// Open carries bytes both ways until the stream or the call's context ends.
	Open(ctx *driver.Context, stream io.ReadWriter) error
}

// ConsoleTaker is a Console that can end the session that somebody else has with
// the same serial port.
type ConsoleTaker interface {
	Take(ctx *driver.Context, stream io.ReadWriter) error
}

// ConsoleOpening is open's optional argument.
type ConsoleOpening struct {
	// Takeover ends another session with the port first; without it such a port is
	// operation-not-allowed.
	Takeover bool `json:"takeover,omitempty"`
}

// ConsoleKind is console {open}, a stream.
func ConsoleKind() driver.Kind[Console] {
	return driver.Kind[Console]{
		Name: "console",
		Streams: map[string]driver.StreamOperation[Console]{
			"open": func(ctx *driver.Context, c Console, args driver.Args, stream io.ReadWriter) error {
				if err := args.Expect(1); err != nil {
					return err
				}
				var how ConsoleOpening
				if len(args) == 1 {
					if err := driver.StrictJSON(args[0], &how, "takeover"); err != nil {
						return errs.New(errs.InvalidArgs, "open: %v", err)
					}
				}
				if !how.Takeover {
					return c.Open(ctx, stream)
				}
				taker, ok := c.(ConsoleTaker)
				if !ok {
					return errs.New(errs.UnsupportedOperation, "the driver takes over nobody's console")
				}
				return taker.Take(ctx, stream)
			},
		},
		Proxy: func(i *driver.Implementation) Console { return consoleProxy{i} },
	}
}

type consoleProxy struct{ i *driver.Implementation }

func (p consoleProxy) Open(ctx *driver.Context, stream io.ReadWriter) error {
	return p.i.On(ctx).Stream("open", stream)
}

func (p consoleProxy) Take(ctx *driver.Context, stream io.ReadWriter) error {
	return p.i.On(ctx).Stream("open", stream, ConsoleOpening{Takeover: true})
}
