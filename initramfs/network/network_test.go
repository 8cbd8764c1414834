package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/better-compute/site-appliance/appliance/site/config"
)

var (
	eth0 = Interface{"eth0", "52:54:00:00:00:01"}
	eth1 = Interface{"eth1", "52:54:00:00:00:02"}
	eth2 = Interface{"eth2", "52:54:00:00:00:03"}
)

func parse(t *testing.T, text string) *config.Site {
	t.Helper()
	s, err := config.ParseSite("site.toml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestDecide(t *testing.T) {
	lan := "[[lan]]\nmac = \"52:54:00:00:00:02\"\naddress = \"10.77.0.1/24\"\n"
	lanPlan := []Static{{Interface: "eth1", Address: netip.MustParsePrefix("10.77.0.1/24")}}
	fixed := "[uplink]\ninterface = \"eth0\"\naddress = \"192.0.2.10/24\"\ngateway = \"192.0.2.1\"\ndns = [\"192.0.2.53\"]\n"
	for _, tt := range []struct {
		name, text string
		there      []Interface
		want       Plan
	}{
		{"nothing said", "", []Interface{eth0, eth1}, Plan{Uplink: []string{"eth0", "eth1"}}},
		{"a lan is no uplink", lan, []Interface{eth0, eth1, eth2}, Plan{Uplink: []string{"eth0", "eth2"}, LANs: lanPlan}},
		{"uplink by name", "[uplink]\ninterface = \"eth2\"\n", []Interface{eth0, eth2}, Plan{Uplink: []string{"eth2"}}},
		{"uplink by mac", "[uplink]\nmac = \"52:54:00:00:00:01\"\n" + lan, []Interface{eth0, eth1}, Plan{Uplink: []string{"eth0"}, LANs: lanPlan}},
		{"lan not there yet: no uplink is guessed", lan, []Interface{eth0}, Plan{Missing: []string{"lan 1: no interface has MAC 52:54:00:00:00:02"}}},
		{"uplink not there", "[uplink]\ninterface = \"eth9\"\n" + lan, []Interface{eth0, eth1}, Plan{LANs: lanPlan, Missing: []string{`uplink: no interface is named "eth9"`}}},
		{"two VLANs on a port, which is no uplink", "[[lan]]\nmac = \"52:54:00:00:00:02\"\nvlan = 7\naddress = \"10.77.0.1/24\"\n[[lan]]\ninterface = \"eth1\"\nvlan = 8\naddress = \"10.78.0.1/24\"\n", []Interface{eth0, eth1},
			Plan{Uplink: []string{"eth0"}, LANs: []Static{{Interface: "eth1.7", Address: netip.MustParsePrefix("10.77.0.1/24"), VLAN: 7, Port: "eth1"},
				{Interface: "eth1.8", Address: netip.MustParsePrefix("10.78.0.1/24"), VLAN: 8, Port: "eth1"}}}},
		{"a VLAN on the uplink's port", "[uplink]\ninterface = \"eth1\"\n[[lan]]\ninterface = \"eth1\"\nvlan = 7\naddress = \"10.77.0.1/24\"\n", []Interface{eth0, eth1},
			Plan{Uplink: []string{"eth1"}, LANs: []Static{{Interface: "eth1.7", Address: netip.MustParsePrefix("10.77.0.1/24"), VLAN: 7, Port: "eth1"}}}},
		{"a subnet behind a relay", lan + "dhcp = \"relay\"\ngateway = \"10.77.0.254\"\n[[lan.relay]]\nsubnet = \"10.5.0.0/24\"\nrange = [\"10.5.0.9\", \"10.5.0.10\"]\n", []Interface{eth0, eth1},
			Plan{Uplink: []string{"eth0"}, LANs: []Static{{Interface: "eth1", Address: netip.MustParsePrefix("10.77.0.1/24"),
				Routes: []Route{{netip.MustParsePrefix("10.5.0.0/24"), netip.MustParseAddr("10.77.0.254")}}}}}},
		{"uplink is a lan", "[uplink]\ninterface = \"eth1\"\n" + lan, []Interface{eth0, eth1}, Plan{LANs: lanPlan, Missing: []string{"uplink: eth1 is a lan already"}}},
		{"none left", lan, []Interface{eth1}, Plan{LANs: lanPlan, Missing: []string{"uplink: no wired interface is left for it"}}},
		{"fixed", fixed, []Interface{eth0, eth1}, Plan{UplinkStatic: &Static{Interface: "eth0", Address: netip.MustParsePrefix("192.0.2.10/24"),
			Gateway: netip.MustParseAddr("192.0.2.1"), DNS: []netip.Addr{netip.MustParseAddr("192.0.2.53")}}}},
		{"fixed for one of two", strings.Replace(fixed, "interface = \"eth0\"\n", "", 1), []Interface{eth0, eth1},
			Plan{Missing: []string{"uplink: a fixed address needs mac or interface: eth0, eth1 are there"}}},
	} {
		if got := Decide(parse(t, tt.text), tt.there); !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%s: Decide = %+v, want %+v", tt.name, got, tt.want)
		}
	}
}

func ack(t testing.TB, mods ...dhcpv4.Modifier) *dhcpv4.DHCPv4 {
	m, err := dhcpv4.New(append([]dhcpv4.Modifier{
		dhcpv4.WithYourIP(net.IPv4(10, 0, 2, 15)), dhcpv4.WithNetmask(net.CIDRMask(24, 32)), dhcpv4.WithRouter(net.IPv4(10, 0, 2, 2)),
		dhcpv4.WithDNS(net.IPv4(10, 0, 2, 3)), dhcpv4.WithLeaseTime(3600), dhcpv4.WithServerIP(net.IPv4(10, 0, 2, 2)),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(net.IPv4(10, 0, 2, 2))),
	}, mods...)...)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestParseAck(t *testing.T) {
	l, err := ParseAck(ack(t))
	if err != nil || l.Address.String() != "10.0.2.15/24" || l.Gateway.String() != "10.0.2.2" || l.Server.String() != "10.0.2.2" || len(l.DNS) != 1 {
		t.Errorf("ParseAck = %+v, %v", l, err)
	}
	if l.Ends != time.Hour || l.T1 != 30*time.Minute || l.T2 != 52*time.Minute+30*time.Second {
		t.Errorf("times = %s, %s, %s", l.T1, l.T2, l.Ends)
	}
	if l, err = ParseAck(ack(t, dhcpv4.WithLeaseTime(0))); err != nil || l.Ends < 30*time.Second || l.T1 <= 0 {
		t.Errorf("a lease of no time = %+v, %v", l, err)
	}
	odd := dhcpv4.WithOption(dhcpv4.Option{Code: dhcpv4.OptionRenewTimeValue, Value: dhcpv4.Duration(2 * time.Hour)})
	if l, err = ParseAck(ack(t, odd)); err != nil || l.T1 >= l.T2 || l.T2 >= l.Ends {
		t.Errorf("times out of order = %+v, %v", l, err)
	}
	for name, m := range map[string]dhcpv4.Modifier{
		"no address": dhcpv4.WithYourIP(net.IPv4zero), "loopback": dhcpv4.WithYourIP(net.IPv4(127, 0, 0, 1)),
		"no mask": dhcpv4.WithNetmask(net.IPMask{0, 0, 0, 0}), "holes in the mask": dhcpv4.WithNetmask(net.IPMask{255, 0, 255, 0}),
	} {
		if _, err := ParseAck(ack(t, m)); err == nil {
			t.Errorf("%s: ParseAck = nil, want an error", name)
		}
	}
}

func FuzzParseAck(f *testing.F) {
	f.Add(ack(f).ToBytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := dhcpv4.FromBytes(b)
		if err != nil {
			return
		}
		if l, err := ParseAck(m); err == nil && (l.T1 <= 0 || l.T1 >= l.T2 || l.T2 >= l.Ends || !l.Address.IsValid()) {
			t.Errorf("ParseAck = %+v", l)
		}
	})
}

// links remembers what was done.
type links struct {
	mu   sync.Mutex
	addr map[string]string
	ups  map[string]int
	// made are VLANs and routes, each as often as it was asked for.
	made []string
	// broken is an interface that takes no address.
	broken string
}

func (l *links) Up(name string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ups == nil {
		l.ups = map[string]int{}
	}
	l.ups[name]++
	return nil
}
func (l *links) Set(name string, a netip.Prefix, _ netip.Addr, _ int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.broken == name {
		return errors.New("the kernel refuses")
	}
	l.addr[name] = a.String()
	return nil
}
func (l *links) VLAN(port, name string, id int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ups[port] == 0 {
		return errors.New("the port is down")
	}
	l.made = append(l.made, fmt.Sprintf("%s on %s: %d", name, port, id))
	return nil
}
func (l *links) Add6(name string, a netip.Prefix) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.made = append(l.made, fmt.Sprintf("%s on %s", a, name))
	if l.broken == "IPv6" {
		return errors.New("the kernel has no IPv6")
	}
	return nil
}
func (l *links) Route(name string, r Route) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.made = append(l.made, fmt.Sprintf("%s by %s on %s", r.To, r.Via, name))
	return nil
}
func (l *links) addresses() map[string]string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.addr)
}
func (l *links) Clear(name string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.addr, name)
	return nil
}

// servers gives each interface a lease after its delay, and takes it back after held, once.
type servers struct {
	delay map[string]time.Duration
	held  time.Duration
}

func (s servers) Hold(ctx context.Context, iface string, got func(Lease) error, lost func()) {
	d, ok := s.delay[iface]
	if !ok || !sleep(ctx, d) {
		<-ctx.Done()
		return
	}
	l := Lease{Address: netip.MustParsePrefix("192.0.2.7/24"), Gateway: netip.MustParseAddr("192.0.2.1"), DNS: []netip.Addr{netip.MustParseAddr("192.0.2.53")}}
	if got(l) == nil && s.held > 0 && sleep(ctx, s.held) {
		lost()
	}
	<-ctx.Done()
}

func manager(t *testing.T, s servers, there ...Interface) (*Manager, *links) {
	dir := t.TempDir()
	l := &links{addr: map[string]string{}}
	m := &Manager{Links: l, Client: s, Wired: func() ([]Interface, error) { return there, nil }, Say: t.Logf,
		Resolv: filepath.Join(dir, "resolv.conf"), StateFile: filepath.Join(dir, "network.json"), Poll: time.Second}
	m.Start()
	return m, l
}

func TestFirstLeaseIsTheUplink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, l := manager(t, servers{delay: map[string]time.Duration{"eth0": 5 * time.Second, "eth2": 2 * time.Second}}, eth0, eth1, eth2)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			m.RunSite(ctx, parse(t, "[[lan]]\ninterface = \"eth1\"\naddress = \"10.77.0.1/24\"\n"))
		}()
		time.Sleep(10 * time.Second)
		want := map[string]string{"eth1": "10.77.0.1/24", "eth2": "192.0.2.7/24"}
		if s := m.Snapshot(); s.Uplink != "eth2" || !reflect.DeepEqual(s.Interfaces, want) || !reflect.DeepEqual(l.addresses(), want) {
			t.Errorf("state = %+v, addresses = %v: want eth2 as the uplink and eth0 without an address", s, l.addresses())
		}
		var s State
		data, err := os.ReadFile(m.StateFile)
		if err != nil || json.Unmarshal(data, &s) != nil || s.Uplink != "eth2" {
			t.Errorf("state file = %q, %v", data, err)
		}
		if data, err := os.ReadFile(m.Resolv); err != nil || string(data) != "nameserver 192.0.2.53\n" {
			t.Errorf("resolv.conf = %q, %v", data, err)
		}
		cancel()
		<-done
	})
}

// TestMissingLAN: one of two LANs has no card. That is said once and kept for
// home, everything else comes up, and so does the LAN when its card is there.
func TestMissingLAN(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := manager(t, servers{delay: map[string]time.Duration{"eth0": 0}})
		var mu sync.Mutex
		there := []Interface{eth0, eth1}
		var said []string
		m.Wired = func() ([]Interface, error) { mu.Lock(); defer mu.Unlock(); return there, nil }
		m.Say = func(format string, args ...any) {
			mu.Lock()
			defer mu.Unlock()
			said = append(said, fmt.Sprintf(format, args...))
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			m.RunSite(ctx, parse(t, "[uplink]\ninterface = \"eth0\"\n[[lan]]\ninterface = \"eth1\"\naddress = \"10.1.0.1/24\"\n[[lan]]\ninterface = \"eth2\"\naddress = \"10.2.0.1/24\"\n"))
		}()
		time.Sleep(time.Minute)
		const missing = `lan 2: no interface is named "eth2"`
		s := m.Snapshot()
		if want := map[string]string{"eth0": "192.0.2.7/24", "eth1": "10.1.0.1/24"}; s.Uplink != "eth0" || !reflect.DeepEqual(s.Interfaces, want) {
			t.Errorf("state = %+v, want the uplink and lan 1", s)
		}
		mu.Lock()
		n := 0
		for _, line := range said {
			if line == missing {
				n++
			}
		}
		if n != 1 {
			t.Errorf("%q was said %d times, want once: %q", missing, n, said)
		}
		there = append(there, eth2)
		mu.Unlock()
		var kept State
		if data, err := os.ReadFile(m.StateFile); err != nil || json.Unmarshal(data, &kept) != nil || !reflect.DeepEqual(kept.Missing, []string{missing}) {
			t.Errorf("state file: %+v, %v, want it to name what is missing", kept, err)
		}
		time.Sleep(5 * time.Second)
		if s := m.Snapshot(); s.Interfaces["eth2"] != "10.2.0.1/24" {
			t.Errorf("with the card: %+v", s)
		}
		cancel()
		<-done
	})
}

func TestLostLeaseIsCleared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, l := manager(t, servers{delay: map[string]time.Duration{"eth0": 0}, held: 30 * time.Second}, eth0)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); m.RunAll(ctx) }()
		time.Sleep(10 * time.Second)
		if s := m.Snapshot(); s.Uplink != "eth0" {
			t.Errorf("with the lease: %+v", s)
		}
		time.Sleep(30 * time.Second)
		if s := m.Snapshot(); s.Uplink != "" || len(s.Interfaces) != 0 || len(l.addresses()) != 0 {
			t.Errorf("after the lease: %+v, addresses %v", s, l.addresses())
		}
		cancel()
		<-done
	})
}

// TestReturningInterfaceIsBroughtUp: a card on USB that was reset comes back
// under its name, and down. Nothing else brings it up again.
func TestReturningInterfaceIsBroughtUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, l := manager(t, servers{delay: map[string]time.Duration{"eth0": time.Second}}, eth0, eth1)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			m.RunSite(ctx, parse(t, "[[lan]]\ninterface = \"eth1\"\naddress = \"10.77.0.1/24\"\n"))
		}()
		time.Sleep(10 * time.Second)
		l.mu.Lock()
		clear(l.ups)
		l.mu.Unlock()
		time.Sleep(10 * time.Second)
		l.mu.Lock()
		if l.ups["eth0"] == 0 || l.ups["eth1"] == 0 {
			t.Errorf("brought up within 10 s: %v, want the uplink eth0 and the LAN eth1", l.ups)
		}
		l.mu.Unlock()
		cancel()
		<-done
	})
}

// TestUplinkMoves: when the uplink has lost its lease, another interface may
// become it. Who moves a cable, or has two, does not have to start the box again.
func TestUplinkMoves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, l := manager(t, servers{delay: map[string]time.Duration{"eth0": 0, "eth1": 2 * time.Second}, held: 30 * time.Second}, eth0, eth1)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); m.RunSite(ctx, parse(t, "")) }()
		time.Sleep(20 * time.Second)
		if s := m.Snapshot(); s.Uplink != "eth0" || len(l.addresses()) != 1 {
			t.Errorf("at first: %+v, addresses %v, want eth0 alone", s, l.addresses())
		}
		time.Sleep(20 * time.Second)
		if s := m.Snapshot(); s.Uplink != "eth1" || len(l.addresses()) != 1 {
			t.Errorf("after eth0 has lost its lease: %+v, addresses %v, want eth1 alone", s, l.addresses())
		}
		cancel()
		<-done
	})
}

// TestVLANsAndRelays: a VLAN is made on a port that is up, has its address, and
// leads to the subnets behind the relays on it.
func TestVLANsAndRelays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, l := manager(t, servers{}, eth1)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		site := parse(t, "[[lan]]\nmac = \"52:54:00:00:00:02\"\nvlan = 7\naddress = \"10.77.0.1/24\"\ndhcp = \"relay\"\n"+
			"[[lan.relay]]\nsubnet = \"10.5.0.0/24\"\nrange = [\"10.5.0.9\", \"10.5.0.10\"]\nvia = \"10.77.0.254\"\n")
		go func() { defer close(done); m.RunSite(ctx, site) }()
		time.Sleep(2 * time.Second)
		l.mu.Lock()
		want := []string{"eth1.7 on eth1: 7", "10.5.0.0/24 by 10.77.0.254 on eth1.7"}
		if !reflect.DeepEqual(l.made, want) || l.addr["eth1.7"] != "10.77.0.1/24" || l.ups["eth1.7"] == 0 {
			t.Errorf("made %q, addresses %v, up %v, want %q, 10.77.0.1/24 on eth1.7, and it up", l.made, l.addr, l.ups, want)
		}
		l.mu.Unlock()
		cancel()
		<-done
	})
}

// TestIPv6: a LAN has both its addresses, again and again, and IPv4 where the
// kernel has no IPv6.
func TestIPv6(t *testing.T) {
	for _, broken := range []string{"", "IPv6"} {
		synctest.Test(t, func(t *testing.T) {
			m, l := manager(t, servers{}, eth1)
			l.broken = broken
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			site := parse(t, "[[lan]]\nmac = \"52:54:00:00:00:02\"\naddress = \"10.77.0.1/24\"\nipv6 = \"fd00:77::1/64\"\ndhcp = \"authoritative\"\nrange = [\"10.77.0.9\", \"10.77.0.10\"]\n")
			go func() { defer close(done); m.RunSite(ctx, site) }()
			time.Sleep(upEvery + upEvery/2)
			l.mu.Lock()
			want := []string{"fd00:77::1/64 on eth1", "fd00:77::1/64 on eth1"}
			if !reflect.DeepEqual(l.made, want) || l.addr["eth1"] != "10.77.0.1/24" {
				t.Errorf("broken %q: made %q, addresses %v, want %q, and 10.77.0.1/24 on eth1", broken, l.made, l.addr, want)
			}
			l.mu.Unlock()
			if got := m.Snapshot().Interfaces["eth1"]; got != "10.77.0.1/24" {
				t.Errorf("broken %q: state has %q for eth1", broken, got)
			}
			cancel()
			<-done
		})
	}
}

// TestLeaseInALAN: whoever answers on the uplink must not draw the box's LANs there.
func TestLeaseInALAN(t *testing.T) {
	for _, tt := range []struct {
		lan  string
		free bool
	}{
		{"10.77.0.1/24", true},
		{"192.0.2.1/24", false}, // the same network
		{"192.0.2.1/16", false}, // the lease's is more specific
		{"192.0.2.7/32", false}, // the same address
		{"192.0.2.65/26", true}, // the LAN's is more specific
		{"192.0.2.1/29", false}, // the lease's address is in it
		{"198.51.100.1/24", true},
	} {
		synctest.Test(t, func(t *testing.T) {
			m, l := manager(t, servers{delay: map[string]time.Duration{"eth0": 0}}, eth0, eth1)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			site := &config.Site{LAN: []config.LAN{{Port: config.Port{Interface: "eth1"}, Address: netip.MustParsePrefix(tt.lan)}}}
			go func() { defer close(done); m.RunSite(ctx, site) }()
			time.Sleep(12 * time.Second)
			if _, has := l.addresses()["eth0"]; has != tt.free || m.Snapshot().Uplink == "eth0" != tt.free {
				t.Errorf("lan %s, lease 192.0.2.7/24: addresses %v, state %+v, want the lease to be taken: %v", tt.lan, l.addresses(), m.Snapshot(), tt.free)
			}
			cancel()
			<-done
		})
	}
}

// TestUplinkThatTakesNoAddress does not keep the others from being it.
func TestUplinkThatTakesNoAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, l := manager(t, servers{delay: map[string]time.Duration{"eth0": 0, "eth1": 2 * time.Second}}, eth0, eth1)
		l.broken = "eth0"
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); m.RunSite(ctx, parse(t, "")) }()
		time.Sleep(20 * time.Second)
		if s := m.Snapshot(); s.Uplink != "eth1" {
			t.Errorf("state = %+v, want eth1 as the uplink", s)
		}
		cancel()
		<-done
	})
}

func TestFixedUplinkAndLateInterface(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := manager(t, servers{})
		var mu sync.Mutex
		var there []Interface
		m.Wired = func() ([]Interface, error) { mu.Lock(); defer mu.Unlock(); return there, nil }
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			m.RunSite(ctx, parse(t, "[uplink]\ninterface = \"eth0\"\naddress = \"192.0.2.10/24\"\n"))
		}()
		time.Sleep(5 * time.Second)
		if s := m.Snapshot(); s.Uplink != "" {
			t.Errorf("without the card: %+v", s)
		}
		mu.Lock()
		there = []Interface{eth0}
		mu.Unlock()
		time.Sleep(5 * time.Second)
		if s := m.Snapshot(); s.Uplink != "eth0" || s.Interfaces["eth0"] != "192.0.2.10/24" {
			t.Errorf("with the card: %+v", s)
		}
		cancel()
		<-done
	})
}

func TestWired(t *testing.T) {
	sys := t.TempDir()
	put := func(name, text string) {
		p := filepath.Join(sys, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for name, typ := range map[string]string{"eth0": "1", "wlan0": "1", "lo": "772", "ib0": "32", "veth0": "1"} {
		put(name+"/type", typ+"\n")
		put(name+"/address", fmt.Sprintf("52:54:00:00:00:0%d\n", len(name)))
		if name != "lo" && name != "veth0" {
			put(name+"/device/vendor", "x")
		}
	}
	put("wlan0/wireless/x", "")
	put("eth0/carrier", "1\n")
	got, err := Wired(sys)
	if err != nil || len(got) != 1 || got[0] != (Interface{"eth0", "52:54:00:00:00:04"}) {
		t.Errorf("Wired = %+v, %v, want eth0 alone", got, err)
	}
	if !Carrier(sys, "eth0") || Carrier(sys, "wlan0") {
		t.Error("Carrier is wrong")
	}
}

// TestRest: a link that comes back ends the wait, one that stays away the lease.
func TestRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var from, to time.Duration
		d := DHCP{Carrier: func(string) bool {
			at := time.Since(began)
			return at < from || at >= to
		}}
		var gone time.Time
		from, to = 10*time.Second, 20*time.Second
		if back, err := d.rest(t.Context(), "eth0", 12*time.Second, &gone); back || err != nil || time.Since(began) != 12*time.Second {
			t.Errorf("rest over the link's going = %v, %v after %s", back, err, time.Since(began))
		}
		if back, err := d.rest(t.Context(), "eth0", time.Hour, &gone); !back || err != nil || time.Since(began) != 20*time.Second {
			t.Errorf("rest over the link's return = %v, %v after %s", back, err, time.Since(began))
		}
		from, to = 30*time.Second, time.Hour
		if back, err := d.rest(t.Context(), "eth0", time.Hour, &gone); back || err == nil || time.Since(began) != 30*time.Second+unlinked {
			t.Errorf("rest without a link = %v, %v after %s", back, err, time.Since(began))
		}
	})
}
