// Package sdk serves declared drivers as a bcx plugin.
package sdk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/better-compute/site-appliance/plugins/bcx"
	"github.com/better-compute/site-appliance/plugins/driver"
)

// Options of a plugin.
type Options struct {
	// PluginVersion is the plugin's own, apart from its drivers'.
	PluginVersion string
	// Log defaults to JSON lines on stderr, which the host forwards.
	Log *slog.Logger
}

func (o Options) log() *slog.Logger {
	if o.Log != nil {
		return o.Log
	}
	return slog.New(slog.NewJSONHandler(os.Stderr, nil))
}

// lingering is how long operations that their callers gave up on may run on
// once the plugin ends.
const lingering = time.Second

// Main serves drivers until the host ends this process, and returns its exit code.
func Main(opts Options, drivers ...*driver.Definition) int {
	err := Serve(context.Background(), opts, drivers...)
	switch {
	case errors.Is(err, bcx.ErrNotStartedByHost):
		fmt.Fprintln(os.Stderr, err)
	case err != nil:
		opts.log().Error("plugin ends", "reason", err.Error())
	default:
		return 0
	}
	return 1
}

// Serve serves drivers until ctx ends, SIGTERM comes, or stdin ends; calls in
// flight may then end. SIGINT is ignored: a terminal sends it to the host as
// well, which decides. So is SIGPIPE, since a host that died shows on stdin.
//
// From its beginning on, what the program prints on stdout goes to stderr: the
// handshake line alone belongs there. What it logs by package log or slog goes to
// opts.Log as well. A program calls Serve before all else.
func Serve(ctx context.Context, opts Options, drivers ...*driver.Definition) error {
	if os.Getenv(bcx.CookieVariable) != bcx.Cookie {
		return bcx.ErrNotStartedByHost
	}
	stdout, err := takeStdout()
	if err != nil {
		return fmt.Errorf("take stdout: %w", err)
	}
	// Open to the end: a host may take its end for the plugin's.
	defer stdout.Close()
	opts.Log = opts.log()
	slog.SetDefault(opts.Log)
	h, err := NewHandler(opts, drivers...)
	if err != nil {
		return err
	}
	// Not signal.Ignore: programs that a driver runs would inherit that.
	ignored := make(chan os.Signal, 1)
	signal.Notify(ignored, syscall.SIGINT, syscall.SIGPIPE)
	defer signal.Stop(ignored)
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM)
	defer stop()
	// It ends with the process: a read of stdin cannot be interrupted.
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	err = bcx.Serve(ctx, h, stdout)
	h.wait(lingering)
	return err
}
