package host

import (
	"encoding/json"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/backoff"
)

// TestRestartPace follows a plugin through runs of these lengths: each end is
// followed by a wait that doubles from a second to a minute, and a run of a
// minute makes the next wait the first again.
func TestRestartPace(t *testing.T) {
	policy := orPolicy(backoff.Policy{})
	n := 0
	for i, tt := range []struct{ ran, wait time.Duration }{
		{0, time.Second}, {time.Second, 2 * time.Second}, {30 * time.Second, 4 * time.Second}, {59 * time.Second, 8 * time.Second},
		{0, 16 * time.Second}, {0, 32 * time.Second}, {0, time.Minute}, {0, time.Minute},
		{time.Minute, time.Second}, {0, 2 * time.Second}, {time.Hour, time.Second},
	} {
		n = attempt(n, tt.ran)
		if got := policy.Delay(n); got != tt.wait {
			t.Errorf("end %d, after %v: wait %v, want %v", i, tt.ran, got, tt.wait)
		}
		n++
	}
}

// TestDefaults: what a configuration leaves out.
func TestDefaults(t *testing.T) {
	h := &Host{log: slog.New(slog.DiscardHandler)}
	if err := h.prepare(Config{Dir: "/plugins", Log: h.log}, []Pin{{Name: "acme-bmc"}}); err != nil {
		t.Fatal(err)
	}
	p := h.plugins[0]
	if p.launch.timeout != 10*time.Second || p.launch.grace != 5*time.Second || p.launch.socketRoot != "/run/bcx" || p.launch.path != "/plugins/acme-bmc" ||
		p.backoff.Min != time.Second || p.backoff.Max != time.Minute {
		t.Errorf("launch %+v with %+v, want 10 s to start, 5 s to end, 1 s to 1 minute between starts", p.launch, p.backoff)
	}
}

func TestTargets(t *testing.T) {
	const schema = `{"properties":{"mirror":{"format":"uri"},"api":{"type":"string","format":"url"},"name":{"type":"string"},"address":{"type":"string"}}}`
	for _, tt := range []struct {
		schema, config string
		want           []string
	}{
		{"", `{"address":"10.0.0.5"}`, []string{"10.0.0.5"}},
		{schema, `{"address":"10.0.0.5:623","tlsSpkiSha256":"ab"}`, []string{"10.0.0.5:623"}},
		{schema, `{"address":"https://bmc.example:8443/redfish","mirror":"http://[fd00::1]/x"}`, []string{"[fd00::1]", "bmc.example:8443"}},
		{schema, `{"api":"https://user:pw@api.example/","name":"10.0.0.6","mirror":"https://api.example"}`, []string{"api.example"}},
		{schema, `{"address":{"host":"10.0.0.5"},"mirror":7,"options":{"address":"10.0.0.7"}}`, nil},
		{schema, `{"address":"10.0.0.5/24 and more"}`, nil},
		{schema, `{"address":""}`, nil},
		{schema, `[]`, nil},
		{schema, ``, nil},
		{`{`, `{"address":"10.0.0.5","mirror":"http://x"}`, []string{"10.0.0.5"}},
	} {
		if got := targets(addresses(json.RawMessage(tt.schema)), json.RawMessage(tt.config)); !slices.Equal(got, tt.want) {
			t.Errorf("targets(%s, %s) = %q, want %q", tt.schema, tt.config, got, tt.want)
		}
	}
}

func FuzzTargets(f *testing.F) {
	f.Add(`{"properties":{"mirror":{"format":"uri"}}}`, `{"address":"10.0.0.5:623","mirror":"https://[::1]:80/"}`)
	f.Add(`{"properties":7}`, `{"address":"%zz://"}`)
	f.Fuzz(func(t *testing.T, schema, config string) {
		for _, s := range targets(addresses(json.RawMessage(schema)), json.RawMessage(config)) {
			if s == "" || len(s) > 2048 {
				t.Errorf("targets(%q, %q) holds %q", schema, config, s)
			}
		}
	})
}

func TestParseEvent(t *testing.T) {
	const memory = "low 0\nhigh 0\nmax 17\noom 1\noom_kill 2\noom_group_kill 0\n"
	for name, want := range map[string]uint64{"oom_kill": 2, "max": 17, "oom": 1, "kill": 0} {
		if got := parseEvent([]byte(memory), name); got != want {
			t.Errorf("parseEvent(%s) = %d, want %d", name, got, want)
		}
	}
	if got := parseEvent([]byte("max -1\nmax"), "max"); got != 0 {
		t.Errorf("parseEvent of nonsense = %d, want 0", got)
	}
}

// Elsewhere than on Linux a shim that confines nothing is not asked for, so that
// sandbox = false runs; sandbox = true keeps it, and is refused.
func TestShimFor(t *testing.T) {
	shim := []string{"/proc/self/exe", "bcx-shim"}
	for _, tt := range []struct {
		goos    string
		sandbox bool
		want    bool
	}{{"linux", true, true}, {"linux", false, true}, {"darwin", true, true}, {"darwin", false, false}, {"windows", false, false}} {
		if got := shimFor(tt.goos, Config{Sandbox: tt.sandbox, Shim: shim}); (got != nil) != tt.want {
			t.Errorf("shimFor(%s, sandbox %v) = %v, want one: %v", tt.goos, tt.sandbox, got, tt.want)
		}
	}
}

func TestUnwalled(t *testing.T) {
	for _, tt := range []struct {
		sandboxed bool
		wall      int
		filtered  bool
		want      []string
	}{
		{true, 2, true, nil},
		{true, 0, true, []string{"A WALL AROUND FILES"}},
		{true, 2, false, []string{"A SYSTEM CALL FILTER"}},
		{true, 0, false, []string{"A WALL AROUND FILES", "A SYSTEM CALL FILTER"}},
		{false, 2, true, []string{"A SANDBOX"}},
	} {
		var got []string
		for _, text := range unwalled(tt.sandboxed, tt.wall, tt.filtered) {
			what, _, _ := strings.Cut(text, ":")
			got = append(got, what)
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("unwalled(%v, %d, %v) = %q, want %q", tt.sandboxed, tt.wall, tt.filtered, got, tt.want)
		}
	}
}
