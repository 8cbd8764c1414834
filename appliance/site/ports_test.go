package site

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/site/config"
)

func TestFind(t *testing.T) {
	there := func(name string, addrs ...string) port {
		mac, _ := net.ParseMAC("52:54:00:00:00:0" + name[len(name)-1:])
		return port{net.Interface{Name: name, HardwareAddr: mac, Flags: net.FlagUp | net.FlagRunning}, addrs}
	}
	const text = `
[uplink]
interface = "eth0"

[[lan]]
mac = "52:54:00:00:00:01"
address = "10.1.0.1/24"

[[lan]]
interface = "eth2"
address = "10.2.0.1/24"
`
	for _, tt := range []struct {
		name    string
		text    string
		there   []port
		uplink  string
		lans    map[int]string
		missing []string
		out     string
	}{
		{"all there", text, []port{there("eth0", "192.0.2.7/24"), there("eth1", "10.1.0.1/24"), there("eth2", "10.2.0.1/24")},
			"eth0", map[int]string{0: "eth1", 1: "eth2"}, nil, "eth0 192.0.2.7/24"},
		{"a lan's card is missing", text, []port{there("eth0", "192.0.2.7/24"), there("eth2", "10.2.0.1/24")},
			"eth0", map[int]string{1: "eth2"}, []string{"lan 1: no interface has MAC 52:54:00:00:00:01"}, "eth0 192.0.2.7/24"},
		{"a lan has no address yet", text, []port{there("eth0"), there("eth1", "10.1.0.1/24"), there("eth2", "fe80::1/64")},
			"eth0", map[int]string{0: "eth1"}, []string{"lan 2: eth2 has no address 10.2.0.1/24"}, ""},
		{"the uplink's card is missing", text, []port{there("eth1", "10.1.0.1/24"), there("eth2", "10.2.0.1/24")},
			"", map[int]string{0: "eth1", 1: "eth2"}, []string{`uplink: no interface is named "eth0"`}, ""},
		{"one card for two lans", text + "[[lan]]\ninterface = \"eth1\"\naddress = \"10.3.0.1/24\"\n", []port{there("eth0"), there("eth1", "10.1.0.1/24"), there("eth2", "10.2.0.1/24")},
			"eth0", map[int]string{0: "eth1", 1: "eth2"}, []string{"lan 3: eth1 is another lan already"}, ""},
		{"the uplink is a lan", "[uplink]\nmac = \"52:54:00:00:00:01\"\n[[lan]]\ninterface = \"eth1\"\naddress = \"10.1.0.1/24\"\n", []port{there("eth1", "10.1.0.1/24")},
			"", map[int]string{0: "eth1"}, []string{"uplink: eth1 is a lan already"}, ""},
	} {
		cfg, err := config.ParseSite("site.toml", []byte(tt.text))
		if err != nil {
			t.Fatal(err)
		}
		got := find(cfg, tt.there)
		lans := map[int]string{}
		for i, l := range got.lans {
			lans[i] = l.name
		}
		if got.uplink != tt.uplink || !reflect.DeepEqual(lans, tt.lans) || !reflect.DeepEqual(got.missing, tt.missing) || got.out != tt.out {
			t.Errorf("%s: find = uplink %q, lans %v, missing %q, out %q; want %q, %v, %q, %q",
				tt.name, got.uplink, lans, got.missing, got.out, tt.uplink, tt.lans, tt.missing, tt.out)
		}
		if err := rulesFit(got); err != "" {
			t.Errorf("%s: %s", tt.name, err)
		}
	}
}

// rulesFit finds an interface that the firewall would have twice.
func rulesFit(p ports) string {
	seen := map[string]bool{p.uplink: p.uplink != ""}
	for _, l := range p.list() {
		if seen[l.name] {
			return l.name + " stands twice in the firewall's rules"
		}
		seen[l.name] = true
	}
	return ""
}

// What init found goes home once in a boot, however often bcd starts.
func TestProblemsGoHomeOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "problems")
	write := func(text string) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("data: full\nnetwork: lan 1: no interface is named \"x\"\n")
	starts := func() string {
		a, err := agent.New(agent.Config{Role: agentv1.Role_ROLE_SITE, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		s := &site{Config: Config{ProblemsFile: path, Log: slog.New(slog.DiscardHandler)}, agent: a}
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if err := s.reportProblems(ctx); err != nil {
				t.Errorf("reportProblems = %v", err)
			}
		})
		data, err := os.ReadFile(path + ".sent")
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	const two = "data: full\nnetwork: lan 1: no interface is named \"x\"\n"
	if got := starts(); got != two {
		t.Errorf("after the first start, sent is %q, want %q", got, two)
	}
	write(two + "bcd: ended with exit code 2\n")
	if got, want := starts(), two+"bcd: ended with exit code 2\n"; got != want {
		t.Errorf("after the second start, sent is %q, want %q: the new line alone is added", got, want)
	}
}
