package node_test

import (
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/plugins/conformance"
	"github.com/better-compute/site-appliance/plugins/driver"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
	"github.com/better-compute/site-appliance/plugins/external"
)

// TestScriptInControlPlane has the control plane's host run the script, pinned.
func TestScriptInControlPlane(t *testing.T) {
	b := build(t)
	command := []string{b.Node, b.Script}
	file, err := external.PinnedFile(command)
	if err != nil || file != b.Script {
		t.Fatalf("PinnedFile(%v) = %s, %v, want the script", command, file, err)
	}
	sum, err := external.SHA256File(file)
	if err != nil {
		t.Fatal(err)
	}
	plugin := external.New(external.Options{
		Command: command, SHA256: sum, StartTimeout: time.Minute, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	})
	t.Cleanup(func() {
		if err := plugin.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	definitions, err := plugin.Start(t.Context())
	if err != nil || len(definitions) != 1 || definitions[0].Key() != "driver:conformance@1.0.0" {
		t.Fatalf("Start = %v, %v, want the driver conformance", definitions, err)
	}
	d := definitions[0]
	if h, err := plugin.Health(t.Context()); err != nil || !h.Serving || h.Message != "" {
		t.Errorf("Health = %+v, %v", h, err)
	}

	ctx, emitted := drivertest.Context(t, t.Context(), map[string]string{ref: "hunter2"})
	use := func(config string) *driver.Implementation {
		t.Helper()
		i, err := d.Implementation(conformance.DriverID, json.RawMessage(config), ctx)
		if err != nil {
			t.Fatal(err)
		}
		return i
	}
	if got, err := use(`{}`).Call("echo", "a", map[string]int{"b": 1}, nil).Await(); err != nil || string(got) != `["a",{"b":1}]` {
		t.Errorf("echo = %s, %v", got, err)
	}
	if got, err := use(`{}`).Call("progress", 3).Await(); err != nil || string(got) != "3" || len(emitted.Progress()) != 3 {
		t.Errorf("progress = %s, %v after %v", got, err, emitted.Progress())
	}
	iterated := use(`{}`).Call("progress", 4)
	n := 0
	for p, err := range iterated.Progress() {
		if n++; err != nil || p.Done != uint64(n) {
			t.Errorf("progress %d = %+v, %v", n, p, err)
		}
	}
	if got, err := iterated.Result(); err != nil || string(got) != "4" || n != 4 {
		t.Errorf("iterated = %s, %v after %d, want 4", got, err, n)
	}
	if got, err := use(`{"token":"`+ref+`"}`).Call("secret", ref).Await(); err != nil || string(got) != `"hunter2"` {
		t.Errorf("a secret of the configuration = %s, %v", got, err)
	}
	if _, err := use(`{}`).Call("secret", ref).Await(); errs.CodeOf(err) != errs.CredentialsUnavailable {
		t.Errorf("a secret that no configuration names = %v, want credentials-unavailable", err)
	}
	if err := d.Validate(ctx, json.RawMessage(`{"greeting":7}`)); errs.CodeOf(err) != errs.InvalidConfig {
		t.Errorf("Validate of a bad configuration = %v, want invalid-config", err)
	}
	if err := d.Validate(ctx, json.RawMessage(`{"token":"`+ref+`"}`)); err != nil {
		t.Errorf("Validate = %v", err)
	}

	ours, theirs := net.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := d.Stream(ctx, conformance.DriverID, "pipe", json.RawMessage(`{}`), nil, theirs)
		ended <- errors.Join(err, theirs.Close())
	}()
	if _, err := io.WriteString(ours, "hello"); err != nil {
		t.Errorf("write: %v", err)
	}
	got := make([]byte, 5)
	if _, err := io.ReadFull(ours, got); err != nil || string(got) != "hello" {
		t.Errorf("read = %q, %v, want hello", got, err)
	}
	ours.Close()
	if err := <-ended; err != nil {
		t.Errorf("Stream = %v", err)
	}
}
