package daemontest_test

import (
	"log/slog"
	"os"
	"testing"

	"github.com/better-compute/site-appliance/appliance/daemontest"
	"github.com/better-compute/site-appliance/appliance/invoke"
	"github.com/better-compute/site-appliance/plugins/external"
	"github.com/better-compute/site-appliance/plugins/host/hosttest"
)

// plugin runs this test's binary as a plugin of the control plane's host, in a
// process of its own, and hosts what it serves for a fake daemon.
func plugin(t *testing.T) invoke.Host {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	sum, err := external.SHA256File(self)
	if err != nil {
		t.Fatal(err)
	}
	d := external.New(external.Options{Command: []string{self}, SHA256: sum, Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	drivers, err := d.Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return daemontest.FakeDriverInvoke(drivers)
}

// hosted runs it under bcd's plugin host instead.
func hosted(t *testing.T) invoke.Host {
	t.Helper()
	dir := hosttest.NewDir(t)
	dir.Add("acme-bmc", hosttest.Self(t))
	c := dir.Config()
	c.Sandbox = false
	return hosttest.Start(t, c)
}
