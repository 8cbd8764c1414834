package relay

import (
	"context"
	"encoding/json"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/metal"
)

// port is a driver's console that the test plays.
type port func(ctx *driver.Context, stream io.ReadWriter) error

func (p port) Open(ctx *driver.Context, stream io.ReadWriter) error { return p(ctx, stream) }

// streamed is a relay whose driver "port" has this console.
func streamed(t *testing.T, p port) *Relay {
	t.Helper()
	d, err := driver.Define(driver.Spec[struct{}]{ID: "port", Version: "1.0.0", RunsOn: "site", Schema: []byte(`{}`),
		Parse: func(json.RawMessage) (struct{}, error) { return struct{}{}, nil },
	}, driver.Implement(metal.ConsoleKind(), func(struct{}, *driver.Context) (metal.Console, error) { return p, nil }))
	if err != nil {
		t.Fatal(err)
	}
	return New(Options{Book: memoryBook(t), BuiltIn: []*driver.Definition{d}})
}

// TestStream: a stream of a driver in this process opens with its first write,
// ends with its error, and is left by Close; its fault is its own.
func TestStream(t *testing.T) {
	failure := errs.Retry(errs.Unreachable, "the line is cut")
	call := Call{Driver: "port", Concern: "console", Operation: "open", Config: []byte(`{}`), Args: []byte(`[]`)}
	left := make(chan error, 1)
	for name, c := range map[string]struct {
		port   port
		opened errs.Code
		text   string
		end    error
	}{
		"says, then fails": {func(_ *driver.Context, s io.ReadWriter) error {
			_, _ = s.Write([]byte("hello"))
			return failure
		}, "", "hello", failure},
		"opens without a word": {func(_ *driver.Context, s io.ReadWriter) error {
			_, _ = s.Write(nil)
			return nil
		}, "", "", nil},
		"never opens":   {func(*driver.Context, io.ReadWriter) error { return nil }, errs.DriverError, "", nil},
		"fails at once": {func(*driver.Context, io.ReadWriter) error { return failure }, errs.Unreachable, "", nil},
		"panics":        {func(*driver.Context, io.ReadWriter) error { panic("oops") }, errs.DriverError, "", nil},
		"is late": {func(ctx *driver.Context, s io.ReadWriter) error {
			_, err := s.Read(make([]byte, 1)) // Close ends it
			left <- err
			return err
		}, errs.Timeout, "", nil},
	} {
		call.Deadline = time.Time{}
		if c.opened == errs.Timeout {
			call.Deadline = time.Now().Add(10 * time.Millisecond)
		}
		s, err := streamed(t, c.port).Stream(t.Context(), call)
		if errs.CodeOf(err) != c.opened {
			t.Errorf("%s: %v, want code %q", name, err, c.opened)
		}
		if err != nil {
			continue
		}
		text, err := io.ReadAll(s)
		if string(text) != c.text || err != c.end {
			t.Errorf("%s: %q, %v; want %q, %v", name, text, err, c.text, c.end)
		}
		_ = s.Close()
	}
	if err := <-left; err != io.EOF {
		t.Errorf("a late driver reads %v, want the end", err)
	}
	if _, err := streamed(t, nil).Stream(t.Context(), Call{Driver: "other"}); errs.CodeOf(err) != errs.UnsupportedDriver {
		t.Errorf("another's driver: %v", err)
	}
	r := streamed(t, nil)
	for op, want := range map[string]bool{"console.open": true, "console.close": false, "power.getPower": false} {
		if got := r.Streams(&bmcv1.BmcOperationRequest{Driver: "port", Operation: op}); got != want {
			t.Errorf("Streams(%s) = %v", op, got)
		}
	}
	// ctx ends a stream too.
	call.Deadline = time.Time{}
	ctx, cancel := context.WithCancel(t.Context())
	s, err := streamed(t, func(ctx *driver.Context, s io.ReadWriter) error {
		_, _ = s.Write(nil)
		<-ctx.Done()
		return ctx.Err()
	}).Stream(ctx, call)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := s.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "canceled") {
		t.Errorf("a stream whose context ended: %v", err)
	}
	_ = s.Close()
}
