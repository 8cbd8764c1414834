package host_test

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/better-compute/site-appliance/plugins/host"
	"github.com/better-compute/site-appliance/plugins/host/hosttest"
)

// logged keeps what a host logs.
type logged struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logged) has(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.buf.String(), text)
}

// A plugin that comes back with other drivers is logged, and what was advertised
// first stays.
func TestOtherDriversAfterRestart(t *testing.T) {
	hosttest.NeedsRoot(t)
	d := hosttest.NewDir(t)
	d.Add("changes", hosttest.Build(t, "./testdata/changes"))
	c := d.Config()
	c.Privileged = []string{"changes"}
	log := new(logged)
	c.Log = slog.New(slog.NewTextHandler(log, nil))
	h := hosttest.Start(t, c)
	invoke := func() string {
		out, err := h.Invoke(t.Context(), host.Call{Driver: "changes", Kind: "echo", Operation: "version"})
		if err != nil {
			return err.Error()
		}
		return string(out)
	}
	if got := invoke(); got != `"1.0.0"` {
		t.Fatalf("the first run answers %s\n%s", got, log.buf.String())
	}
	if err := syscall.Kill(status(t, h, "changes").PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the plugin runs again", func() bool { return invoke() == `"2.0.0"` })
	if !log.has("other drivers") {
		t.Error("it is not logged")
	}
	if got := h.Drivers(); len(got) != 1 || got[0].Version != "1.0.0" {
		t.Errorf("Drivers() = %+v, want the first set", got)
	}
}
