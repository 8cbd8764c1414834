package host_test

import (
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/plugins/host/hosttest"
)

// The shim starts while its plugin is hashed; what has another hash is not
// executed. The file is so large that hashing takes longer than a start.
func TestMismatchNeverRuns(t *testing.T) {
	hosttest.NeedsRoot(t)
	content := slices.Concat(hosttest.Self(t), make([]byte, 128<<20))
	d := hosttest.NewDir(t)
	d.Add("tells", content)
	d.AddPinned("pretends", content, strings.Repeat("0", 64))
	c := d.Config()
	c.StartTimeout = time.Second
	log := new(logged)
	c.Log = slog.New(slog.NewTextHandler(log, nil))
	h := hosttest.Start(t, c)
	for name, want := range map[string]string{"tells": "no handshake line", "pretends": "pin mismatch"} {
		if s := status(t, h, name); s.State != "failed" || !strings.Contains(s.Reason, want) {
			t.Errorf("%s: %s, %q, want failed, %q", name, s.State, s.Reason, want)
		}
	}
	if !log.has("tells has run") || log.has("pretends has run") {
		t.Errorf("want that the pinned one ran, and the other did not\n%s", log.buf.String())
	}
}
