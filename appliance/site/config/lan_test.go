package config

import (
	"net"
	"net/netip"
	"strings"
	"testing"
)

const goodLANs = `
[[lan]]
interface = "enp2s0"
vlan = 7
address = "10.0.0.1/24"
ipv6 = "fd00:10::1/64"
dhcp = "authoritative"
range = ["10.0.0.100", "10.0.0.199"]
takeover = true
gateway = "10.0.0.254"
dns = ["10.0.0.53", "fd00:10::53"]
search = ["example.net"]
ntp = ["10.0.0.123"]
routes = ["10.9.0.0/16 via 10.0.0.253"]
mtu = 9000

[[lan.reservation]]
mac = "52:54:00:00:AB:01"
address = "10.0.0.50"

[[lan.reservation]]
mac = "52:54:00:00:AB:01"
address = "10.5.0.50"

[[lan.relay]]
giaddr = "10.5.0.1"
subnet = "10.5.0.0/24"
range = ["10.5.0.100", "10.5.0.199"]
gateway = "10.5.0.1"
server = "10.0.0.1"
circuit_id = "0x0a0b"
remote_id = "switch-7"

[[lan]]
interface = "enp3s0"
address = "10.1.0.1/24"
dhcp = "reservations"
bmc = true

[[lan]]
interface = "enp4s0"
address = "10.2.0.1/24"
dhcp = "proxy"

[[lan]]
interface = "enp5s0"
address = "10.3.0.1/24"
dhcp = "relay"

[[lan.relay]]
subnet = "10.6.0.0/24"
range = ["10.6.0.100", "10.6.0.199"]
via = "10.3.0.2"
`

func TestParseLANs(t *testing.T) {
	s, err := ParseSite("site.toml", []byte(goodLANs))
	if err != nil {
		t.Fatal(err)
	}
	l := s.LAN[0]
	if l.Gateway.String() != "10.0.0.254" || l.Routes[0] != (Route{netip.MustParsePrefix("10.9.0.0/16"), netip.MustParseAddr("10.0.0.253")}) || l.MTU != 9000 || !l.Takeover {
		t.Errorf("lan 1 = %+v", l)
	}
	if l.IPv6 != netip.MustParsePrefix("fd00:10::1/64") || len(l.DNS) != 2 {
		t.Errorf("lan 1: ipv6 %s, dns %v", l.IPv6, l.DNS)
	}
	if id, err := ID(l.Relays[0].CircuitID); err != nil || string(id) != "\x0a\x0b" {
		t.Errorf("ID(%q) = %x, %v", l.Relays[0].CircuitID, id, err)
	}
	if id, err := ID(l.Relays[0].RemoteID); err != nil || string(id) != "switch-7" {
		t.Errorf("ID(%q) = %x, %v", l.Relays[0].RemoteID, id, err)
	}
	for i, want := range []struct {
		mode  string
		boots bool
	}{{DHCPAuthoritative, true}, {DHCPReservations, false}, {DHCPProxy, true}, {DHCPRelay, true}} {
		if l := s.LAN[i]; l.Mode() != want.mode || l.Boots() != want.boots {
			t.Errorf("lan %d: mode %s, boots %v, want %s, %v", i+1, l.Mode(), l.Boots(), want.mode, want.boots)
		}
	}
	last := s.LAN[3]
	if r := last.Relays[0]; r.ServerFor(last).String() != "10.3.0.1" || r.Router(last).String() != "10.3.0.2" {
		t.Errorf("relay without server = %s by %s, want the lan's address and via", r.ServerFor(last), r.Router(last))
	}
}

func TestParseLANErrors(t *testing.T) {
	for _, tt := range []struct{ old, new, want string }{
		{`mtu = 9000`, `mut = 9000`, `unknown key "lan.mut"`},
		{`giaddr =`, `giaddress =`, `unknown key "lan.relay.giaddress"`},
		{`mtu = 9000`, `mtu = 60`, "lan 1: mtu = 60: want 576 to 9216"},
		{`vlan = 7`, `vlan = 4095`, "lan 1: vlan = 4095: want 1 to 4094"},
		{`"enp2s0"`, `"enp2s0f0np0abc"`, "too long"},
		{`"10.0.0.254"`, `"10.7.0.254"`, "lan 1: gateway = 10.7.0.254: want an address of 10.0.0.0/24"},
		{`"10.0.0.254"`, `"10.0.0.1"`, "the box forwards nothing"},
		{`"fd00:10::1/64"`, `"fd00:10::1"`, "site.toml:6"},
		{`"fd00:10::1/64"`, `"fd00:10::1/48"`, "lan 1: ipv6 = \"fd00:10::1/48\": want the box's own address with prefix length 64"},
		{`"fd00:10::1/64"`, `"fd00:10::/64"`, "lan 1: ipv6 = "},
		{`"fd00:10::1/64"`, `"fe80::1/64"`, "lan 1: ipv6 = "},
		{`"fd00:10::1/64"`, `"ff02::1/64"`, "lan 1: ipv6 = "},
		{`"fd00:10::1/64"`, `"10.0.0.1/24"`, "lan 1: ipv6 = "},
		{`mtu = 9000`, `mtu = 1279`, "lan 1: mtu = 1279: with ipv6 want at least 1280"},
		{`"fd00:10::53"`, `"fe80::1%eth0"`, "without a zone"},
		{"ipv6 = \"fd00:10::1/64\"\n", "", "lan 1: dns holds \"fd00:10::53\": want IPv4 addresses, for ipv6 is not served here"},
		{"gateway = \"10.5.0.1\"", "gateway = \"10.5.0.1\"\ndns = [\"fd00:10::53\"]", "lan 1, relay 1: dns holds"},
		{"bmc = true", "bmc = true\nipv6 = \"fd00:11::1/64\"", "lan 2: ipv6 is set but dhcp is reservations: want it with authoritative only"},
		{"dhcp = \"reservations\"\nbmc = true", "dhcp = \"authoritative\"\nrange = [\"10.1.0.5\", \"10.1.0.9\"]\nbmc = true\nipv6 = \"fd00:11::1/64\"", "lan 2: ipv6 is set and bmc is true"},
		{`dhcp = "proxy"`, "dhcp = \"proxy\"\nipv6 = \"fd00:11::1/64\"", "lan 3: ipv6 is set but dhcp is proxy: want it with authoritative only"},
		{`dhcp = "proxy"`, "dhcp = \"authoritative\"\nrange = [\"10.2.0.5\", \"10.2.0.9\"]\nipv6 = \"fd00:10::2/64\"", "lan 3: ipv6 = fd00:10::2/64 is in the network of lan 1"},
		{`["10.0.0.53", "fd00:10::53"]`, `["10.0.0.300"]`, "dns"},
		{`["example.net"]`, `["-x-.net"]`, `lan 1: search holds "-x-.net"`},
		{`via 10.0.0.253`, `via 10.7.0.253`, "lan 1: routes holds one by 10.7.0.253"},
		{`10.9.0.0/16 via`, `10.9.0.1/16 via`, "want 10.9.0.0/16"},
		{`10.9.0.0/16 via`, `10.9.0.0/16`, `want such as "10.9.0.0/16 via`},
		{`52:54:00:00:AB:01`, `52:54:00`, "lan 1, reservation 1: mac = "},
		{`"10.0.0.50"`, `"10.8.0.50"`, "lan 1, reservation 1: address = \"10.8.0.50\": want one of 10.0.0.0/24, 10.5.0.0/24"},
		{`"10.0.0.50"`, `"10.0.0.1"`, "is the box's own"},
		{`"10.5.0.50"`, `"10.0.0.51"`, "lan 1, reservation 2: 52:54:00:00:ab:01 has an address in 10.0.0.0/24 already"},
		{"mac = \"52:54:00:00:AB:01\"\naddress = \"10.5.0.50\"", "mac = \"52:54:00:00:ab:02\"\naddress = \"10.0.0.50\"", "10.0.0.50 is reserved for another already"},
		{`"10.5.0.0/24"`, `"10.5.0.1/24"`, "lan 1, relay 1: subnet = "},
		{`"10.5.0.0/24"`, `"10.0.0.0/16"`, "relay 1"},
		{`["10.5.0.100", "10.5.0.199"]`, `["10.5.0.100"]`, "lan 1, relay 1: range needs two addresses"},
		{`0x0a0b`, `0x0a0`, "lan 1, relay 1: circuit_id = "},
		{"via = \"10.3.0.2\"\n", "", "lan 4, relay 1: no router leads to 10.6.0.0/24"},
		{`via = "10.3.0.2"`, `via = "10.4.0.2"`, "lan 4, relay 1: no router leads"},
		{"bmc = true", "bmc = true\nrange = [\"10.1.0.5\", \"10.1.0.9\"]", "lan 2: range is set but dhcp is reservations"},
		{`dhcp = "proxy"`, "dhcp = \"proxy\"\ntakeover = true", "lan 3: takeover is set but dhcp is proxy: want it with authoritative only"},
		{`dhcp = "proxy"`, "dhcp = \"proxy\"\nbmc = true", "lan 3: bmc is set but dhcp is proxy"},
		{`dhcp = "proxy"`, "dhcp = \"relay\"", "lan 3: dhcp is relay: want a [[lan.relay]]"},
		{"dhcp = \"relay\"", "dhcp = \"off\"", "lan 4: relay is set but dhcp is off"},
		{`"enp3s0"`, `"enp2s0"` + "\nvlan = 7", "is lan 1's too"},
	} {
		text := strings.Replace(goodLANs, tt.old, tt.new, 1)
		if text == goodLANs {
			t.Fatalf("%q is not in the good text", tt.old)
		}
		_, err := ParseSite("site.toml", []byte(text))
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("with %q: error %v, want it to hold %q", tt.new, err, tt.want)
		}
	}
}

// Two VLANs and the port itself are three LANs, by name and by MAC.
func TestDevice(t *testing.T) {
	mac, _ := net.ParseMAC("52:54:00:00:00:02")
	there := []net.Interface{{Name: "eth1.9", HardwareAddr: mac}, {Name: "eth1", HardwareAddr: mac}}
	for _, tt := range []struct {
		port Port
		vlan int
		want string
	}{
		{Port{MAC: "52:54:00:00:00:02"}, 0, "eth1"},
		{Port{MAC: "52:54:00:00:00:02"}, 9, "eth1.9"},
		{Port{Interface: "eth1"}, 4094, "eth1.4094"},
		{Port{Interface: "eth1.9"}, 0, "eth1.9"},
		{Port{Interface: "eth2"}, 9, ""},
	} {
		got, err := LAN{Port: tt.port, VLAN: tt.vlan}.Device(there)
		if got != tt.want || (err == nil) != (tt.want != "") {
			t.Errorf("Device(%+v, vlan %d) = %q, %v, want %q", tt.port, tt.vlan, got, err, tt.want)
		}
	}
}
