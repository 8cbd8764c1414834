package hosting

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/site/config"
)

// A section that lets no plugin run costs the plugins and not the agent, and the
// log says why.
func TestStartWithoutPlugins(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "pins"), []byte(strings.Repeat("0", 64)+"  acme-bmc\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		section config.Plugins
		want    string
	}{
		"no section":              {config.Plugins{}, ""},
		"cgroup outside the tree": {config.Plugins{Dir: dir, Cgroup: "/tmp/plugins"}, "cgroup /tmp/plugins does not lie in /sys/fs/cgroup"},
		"limits and no cgroup":    {config.Plugins{Dir: dir, PidsMax: 64}, "no cgroup to hold them"},
	} {
		var log bytes.Buffer
		h, err := Start(t.Context(), tt.section, Options{Shim: []string{"/proc/self/exe", "bcx-shim"}, Log: slog.New(slog.NewTextHandler(&log, nil))})
		if err != nil {
			t.Errorf("%s: Start = %v, want a host without plugins", name, err)
			continue
		}
		if got := Advertised(h); len(got) != 0 || len(h.Status()) != 0 {
			t.Errorf("%s: advertised %v, status %+v, want nothing", name, got, h.Status())
		}
		if said := strings.Contains(log.String(), "level=ERROR msg=\"no plugin runs\""); said != (tt.want != "") || !strings.Contains(log.String(), tt.want) {
			t.Errorf("%s: the log is %q, want %q in it", name, log.String(), tt.want)
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}
}
