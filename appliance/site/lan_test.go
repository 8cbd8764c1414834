package site

import (
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"testing"

	"github.com/better-compute/site-appliance/appliance/site/config"
	"github.com/better-compute/site-appliance/appliance/site/firewall"
	"github.com/better-compute/site-appliance/pxe"
	"github.com/better-compute/site-appliance/pxe/dhcp"
	"github.com/better-compute/site-appliance/pxe/lease"
)

const lansText = `
[[lan]]
interface = "eth1"
address = "10.1.0.1/24"
ipv6 = "fd00:10:1::1/64"
dhcp = "authoritative"
range = ["10.1.0.100", "10.1.0.199"]
gateway = "10.1.0.254"
dns = ["10.1.0.53", "fd00:10:1::53"]
search = ["example.net"]
ntp = ["fd00:10:1::123", "10.1.0.123"]
routes = ["10.9.0.0/16 via 10.1.0.253"]
mtu = 1400
[[lan.reservation]]
mac = "52-54-00-00-AB-01"
address = "10.1.0.50"
[[lan.relay]]
giaddr = "10.5.0.1"
circuit_id = "eth7"
remote_id = "0x0a"
subnet = "10.5.0.0/24"
range = ["10.5.0.100", "10.5.0.199"]
gateway = "10.5.0.1"
server = "192.0.2.80"

[[lan]]
interface = "eth2"
address = "10.2.0.1/24"
dhcp = "proxy"

[[lan]]
interface = "eth3"
address = "10.3.0.1/24"
dhcp = "reservations"
bmc = true

[[lan]]
interface = "eth4"
address = "10.4.0.1/24"

[[lan]]
interface = "eth1"
vlan = 7
address = "10.6.0.1/24"
dhcp = "relay"
[[lan.relay]]
subnet = "10.7.0.0/24"
range = ["10.7.0.100", "10.7.0.199"]
via = "10.6.0.2"
`

func lansOf(t *testing.T) *config.Site {
	t.Helper()
	cfg, err := config.ParseSite("site.toml", []byte(lansText))
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// Each mode opens what it serves, and what is behind a relay has its LAN for a home.
func TestRulesOfModes(t *testing.T) {
	cfg := lansOf(t)
	var there []port
	for i, l := range cfg.LAN {
		name := fmt.Sprintf("eth%d", i+1)
		if l.VLAN != 0 {
			name = "eth1.7"
		}
		there = append(there, port{net.Interface{Name: name}, []string{l.Address.String()}})
	}
	now := find(cfg, there)
	if len(now.missing) > 0 {
		t.Fatalf("missing: %q", now.missing)
	}
	got := rules(cfg, now)
	want := []firewall.LANRule{
		{Interface: "eth1", DHCP: true, TFTP: true, HTTP: true, Syslog: true, Passthrough: true, Media: true},
		{Interface: "eth2", DHCP: true, ProxyDHCP: true, TFTP: true, HTTP: true, Syslog: true, Passthrough: true, Media: true},
		{Interface: "eth3", DHCP: true, Passthrough: true, Media: true},
		{Interface: "eth4", Passthrough: true, Media: true},
		{Interface: "eth1.7", DHCP: true, TFTP: true, HTTP: true, Syslog: true, Passthrough: true, Media: true},
	}
	if !reflect.DeepEqual(got.LANs, want) {
		t.Errorf("LANs = %+v, want %+v", got.LANs, want)
	}
	homes := map[string]string{}
	for _, h := range got.Homes {
		homes[h.Network.String()] = h.Interface
	}
	if want := map[string]string{"10.1.0.0/24": "eth1", "10.5.0.0/24": "eth1", "10.2.0.0/24": "eth2", "10.3.0.0/24": "eth3", "10.4.0.0/24": "eth4",
		"10.6.0.0/24": "eth1.7", "10.7.0.0/24": "eth1.7"}; !reflect.DeepEqual(homes, want) {
		t.Errorf("homes = %v, want %v", homes, want)
	}
	// A VLAN that init has not made yet is missing, and nothing else is.
	if now := find(cfg, there[:4]); len(now.lans) != 4 || !reflect.DeepEqual(now.missing, []string{"lan 5: eth1.7 is not made yet"}) {
		t.Errorf("without the VLAN: %d LANs, missing %q", len(now.lans), now.missing)
	}
}

func TestPXEConfig(t *testing.T) {
	cfg := lansOf(t)
	at := netip.MustParseAddr
	c := pxeConfig(cfg.LAN[0])
	if c.Mode != dhcp.Authoritative || c.RangeStart != at("10.1.0.100") || c.RangeEnd != at("10.1.0.199") || c.Takeover || c.BMC {
		t.Errorf("lan 1 = %+v", c)
	}
	if want := (dhcp.Subnet{Router: at("10.1.0.254"), DNS: []netip.Addr{at("10.1.0.53")}, NTP: []netip.Addr{at("10.1.0.123")}, Search: []string{"example.net"},
		Routes: []dhcp.Route{{To: netip.MustParsePrefix("10.9.0.0/16"), Via: at("10.1.0.253")}}, MTU: 1400}); !reflect.DeepEqual(c.Told, want) {
		t.Errorf("told = %+v, want %+v", c.Told, want)
	}
	if want := (pxe.IPv6{Address: netip.MustParsePrefix("fd00:10:1::1/64"), DNS: []netip.Addr{at("fd00:10:1::53")}, NTP: []netip.Addr{at("fd00:10:1::123")}}); !reflect.DeepEqual(c.IPv6, want) {
		t.Errorf("IPv6 = %+v, want %+v", c.IPv6, want)
	}
	if want := []lease.Reservation{{MAC: "52:54:00:00:ab:01", Address: at("10.1.0.50")}}; !reflect.DeepEqual(c.Reservations, want) {
		t.Errorf("reservations = %v, want %v: lower-case with colons", c.Reservations, want)
	}
	want := dhcp.Subnet{Network: netip.MustParsePrefix("10.5.0.0/24"), Giaddr: at("10.5.0.1"), Router: at("10.5.0.1"), Server: at("192.0.2.80"), CircuitID: []byte("eth7"), RemoteID: []byte{10}}
	if r := c.Relayed; len(r) != 1 || !reflect.DeepEqual(r[0].Subnet, want) || r[0].RangeStart != at("10.5.0.100") {
		t.Errorf("relayed = %+v, want %+v", r, want)
	}
	if c := pxeConfig(cfg.LAN[2]); c.Mode != dhcp.Reservations || !c.BMC {
		t.Errorf("lan 3 = %+v", c)
	}
	if c := pxeConfig(cfg.LAN[4]); c.Mode != dhcp.Relay || c.Relayed[0].Server != at("10.6.0.1") {
		t.Errorf("lan 5 = %+v", c)
	}
	for _, mode := range config.Modes {
		if _, ok := modes[mode]; ok == (mode == config.DHCPOff) {
			t.Errorf("mode %s is served: %v", mode, ok)
		}
	}
}

// TestBindingsOf: a LAN that comes again has its bindings, and each has its own.
func TestBindingsOf(t *testing.T) {
	s := new(site)
	if a, b := s.bindingsOf("eth1"), s.bindingsOf("eth2"); a != s.bindingsOf("eth1") || a == b {
		t.Error("bindings are lost, or those of two LANs are one's")
	}
}
