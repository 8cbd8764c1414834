package dhcp

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/iana"

	"github.com/better-compute/site-appliance/pxe/chain"
	"github.com/better-compute/site-appliance/pxe/limit"
)

// bootFile is what every client of these tests boots.
func bootFile(w Who) string {
	switch {
	case isIPXE(w.Client), w.Client.Looping:
		return "http://10.77.0.1/boot/script.ipxe"
	case isHTTPBoot(w.Client):
		return "http://10.77.0.1/boot/snponly.efi"
	case w.Client == pxeBIOS:
		return "undionly.kpxe"
	case w.Client == pxeX64:
		return "snponly.efi"
	}
	return ""
}

func message(t testing.TB, kind dhcpv4.MessageType, mods ...dhcpv4.Modifier) *dhcpv4.DHCPv4 {
	t.Helper()
	d, err := dhcpv4.New(append([]dhcpv4.Modifier{dhcpv4.WithMessageType(kind), dhcpv4.WithHwAddr(net.HardwareAddr{0x52, 0x54, 0, 0, 0, 1})}, mods...)...)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func as(class string, arch iana.Arch) dhcpv4.Modifier {
	return func(d *dhcpv4.DHCPv4) {
		d.UpdateOption(dhcpv4.OptClassIdentifier(class))
		d.UpdateOption(dhcpv4.OptClientArch(arch))
	}
}

var (
	fromUEFI = as("PXEClient:Arch:00007:UNDI:003016", 7)
	fromBIOS = as("PXEClient:Arch:00000:UNDI:002001", 0)
	fromHTTP = as("HTTPClient:Arch:00016:UNDI:003001", 16)
	fromIPXE = func(d *dhcpv4.DHCPv4) {
		fromUEFI(d)
		d.UpdateOption(dhcpv4.OptGeneric(dhcpv4.OptionUserClassInformation, []byte("iPXE")))
	}
	withUUID   = dhcpv4.WithGeneric(dhcpv4.OptionClientMachineIdentifier, append([]byte{0}, bytes.Repeat([]byte{7}, 16)...))
	emptyClass = dhcpv4.WithGeneric(dhcpv4.OptionClassIdentifier, nil)
)

func ip4(s string) net.IP { return net.ParseIP(s).To4() }

func names(server string) dhcpv4.Modifier {
	return dhcpv4.WithOption(dhcpv4.OptServerIdentifier(ip4(server)))
}

func wants(ip string) dhcpv4.Modifier {
	return dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(ip4(ip)))
}

// TestProxy: boot options alone, on both ports. "(captured)" is what firmware
// sent; "(built)" is made from what is reported of the firmware named:
// EDK2 of 2017 to 2019, as in Dell's T130 and T430, asks on 4011 from that port
// and takes no answer from another; HPE's DL380 Gen9 in UEFI names the proxy that
// it chose; Supermicro's boards with Intel's ROM send no option 97.
func TestProxy(t *testing.T) {
	const discover, request, inform = dhcpv4.MessageTypeDiscover, dhcpv4.MessageTypeRequest, dhcpv4.MessageTypeInform
	leased := captured(t, "edk2-uefi-request")
	names("10.77.0.2")(leased)
	at := func(s string, proxy bool) source { return source{addr: netip.MustParseAddrPort(s), proxy: proxy} }
	for _, tt := range []struct {
		name  string
		req   *dhcpv4.DHCPv4
		from  source
		kind  dhcpv4.MessageType // None for silence
		file  string
		class string
		to    string // the address, and the port's p if it leaves from 4011
	}{
		{"EDK2 (captured)", captured(t, "edk2-uefi-discover"), source{}, dhcpv4.MessageTypeOffer, "snponly.efi", "PXEClient", "255.255.255.255:68"},
		{"EDK2's REQUEST to the server that leases (captured, with its name changed)", leased, source{}, 0, "", "", ""},
		{"EDK2 on 4011, from port 4011 (built, as proxy-uefi.pcap has it)", message(t, request, fromUEFI, withUUID, dhcpv4.WithClientIP(ip4("10.77.0.231"))), at("10.77.0.231:4011", true),
			dhcpv4.MessageTypeAck, "snponly.efi", "PXEClient", "10.77.0.231:4011p"},
		{"HPE DL380 Gen9 UEFI on 4011, from port 68, naming the box (built)", message(t, request, fromUEFI, withUUID, names("10.77.0.1"), dhcpv4.WithClientIP(ip4("10.77.0.232"))),
			at("10.77.0.232:68", true), dhcpv4.MessageTypeAck, "snponly.efi", "PXEClient", "10.77.0.232:68p"},
		{"Supermicro BIOS, Intel ROM, on 4011 without option 97 (built)", message(t, request, fromBIOS, dhcpv4.WithClientIP(ip4("10.77.0.232"))),
			at("10.77.0.232:68", true), dhcpv4.MessageTypeAck, "undionly.kpxe", "PXEClient", "10.77.0.232:68p"},
		{"HPE DL380 Gen9 UEFI on 4011 before it has an address of its own, broadcast (built)", message(t, request, fromUEFI, withUUID, names("10.77.0.1"), dhcpv4.WithBroadcast(true)),
			at("0.0.0.0:68", true), dhcpv4.MessageTypeAck, "snponly.efi", "PXEClient", "255.255.255.255:68"},
		{"iPXE on 4011 (built)", message(t, request, fromIPXE, names("10.77.0.1"), dhcpv4.WithClientIP(ip4("10.77.0.233")), dhcpv4.WithBroadcast(true)),
			at("10.77.0.233:68", true), dhcpv4.MessageTypeAck, "http://10.77.0.1/boot/script.ipxe", "PXEClient", "10.77.0.233:68p"},
		{"a BIOS ROM (built)", message(t, discover, fromBIOS), source{}, dhcpv4.MessageTypeOffer, "undionly.kpxe", "PXEClient", "255.255.255.255:68"},
		{"a BIOS ROM that asks the proxy on 67 (built)", message(t, request, fromBIOS, names("10.77.0.1"), wants("10.77.0.150")), source{}, dhcpv4.MessageTypeAck, "undionly.kpxe", "PXEClient", "255.255.255.255:68"},
		{"EDK2 HTTP boot (built)", message(t, discover, fromHTTP), source{}, dhcpv4.MessageTypeOffer, "http://10.77.0.1/boot/snponly.efi", "HTTPClient", "255.255.255.255:68"},
		{"an INFORM of PXE (built)", message(t, inform, fromUEFI, dhcpv4.WithClientIP(ip4("10.77.0.234"))), at("10.77.0.234:68", false), dhcpv4.MessageTypeAck, "snponly.efi", "PXEClient", "10.77.0.234:68"},
		{"an INFORM from an address of no network here: to all", message(t, inform, fromUEFI, dhcpv4.WithClientIP(ip4("192.0.2.9"))), source{}, dhcpv4.MessageTypeAck, "snponly.efi", "PXEClient", "255.255.255.255:68"},
		{"a system", message(t, discover), source{}, 0, "", "", ""},
		{"a system's REQUEST naming the box", message(t, request, names("10.77.0.1"), wants("10.77.0.150")), source{}, 0, "", "", ""},
		{"a system that renews what is not the box's: no NAK", message(t, request, dhcpv4.WithClientIP(ip4("10.77.0.170"))), source{}, 0, "", "", ""},
		{"a system from another network: no NAK", message(t, request, wants("192.0.2.9")), source{}, 0, "", "", ""},
		{"relayed", message(t, discover, fromUEFI, dhcpv4.WithGatewayIP(ip4("10.5.0.1"))), source{}, 0, "", "", ""},
		{"a RELEASE", message(t, dhcpv4.MessageTypeRelease, fromUEFI, dhcpv4.WithClientIP(ip4("10.77.0.150"))), source{}, 0, "", "", ""},
	} {
		s := testServer(t, bootFile, func(c *Config) { c.Mode = Proxy })
		reply, a := askFrom(t, s, tt.req, tt.from)
		if reply == nil {
			if tt.kind != 0 {
				t.Errorf("%s: silence, want %s", tt.name, tt.kind)
			}
			continue
		}
		to := a.to.addr.String()
		if a.to.proxy {
			to += "p"
		}
		if reply.MessageType() != tt.kind || reply.BootFileName != tt.file || reply.ClassIdentifier() != tt.class || to != tt.to {
			t.Errorf("%s: %s, file %q, option 60 %q, to %s, want %s, %q, %q, %s", tt.name, reply.MessageType(), reply.BootFileName, reply.ClassIdentifier(), to, tt.kind, tt.file, tt.class, tt.to)
		}
		if !reply.YourIPAddr.IsUnspecified() || reply.IPAddressLeaseTime(-1) != -1 || reply.SubnetMask() != nil {
			t.Errorf("%s: a proxy gave an address: %s", tt.name, reply.Summary())
		}
		// iPXE ignores a file without siaddr, and EDK2 without option 43 asks on.
		if want := ip4("10.77.0.1"); !reply.ServerIPAddr.Equal(want) || !reply.ServerIdentifier().Equal(want) || strings.TrimSuffix(reply.BootFileNameOption(), "\x00") != tt.file {
			t.Errorf("%s: siaddr %s, option 54 %s, option 67 %q", tt.name, reply.ServerIPAddr, reply.ServerIdentifier(), reply.BootFileNameOption())
		}
		control := reply.Options.Get(dhcpv4.OptionVendorSpecificInformation)
		if pxe := tt.class == "PXEClient"; bytes.Equal(control, []byte{6, 1, 8, 255}) != pxe {
			t.Errorf("%s: option 43 = %x", tt.name, control)
		}
		id := dhcpv4.OptionClientMachineIdentifier
		if got, want := reply.Options.Get(id), tt.req.Options.Get(id); !bytes.Equal(got, want) || reply.Options.Has(id) != tt.req.Options.Has(id) {
			t.Errorf("%s: option 97 = %x, want %x as it was asked", tt.name, got, want)
		}
	}
}

// TestRelay: each is built from RFC 2131, 3046, 3527 and 5107, as switches with a
// helper address send what EDK2 and Linux asked; none is captured. The URL names
// the address by which the machines behind the relay reach the box.
func TestRelay(t *testing.T) {
	relayed := func(giaddr string, parts ...byte) dhcpv4.Modifier {
		return func(d *dhcpv4.DHCPv4) {
			d.GatewayIPAddr = ip4(giaddr)
			d.HopCount = 1
			if parts != nil {
				d.UpdateOption(dhcpv4.OptGeneric(dhcpv4.OptionRelayAgentInformation, parts))
			}
		}
	}
	at := netip.MustParseAddr
	edit := func(mode Mode) func(*Config) {
		return func(c *Config) {
			c.Mode = mode
			far := c.Relayed[0]
			circuit := far
			circuit.Pool, circuit.Network, circuit.Giaddr, circuit.CircuitID = "circuit", netip.MustParsePrefix("10.6.0.0/24"), netip.Addr{}, []byte("eth7")
			circuit.Server, circuit.Router = at("192.0.2.80"), at("10.6.0.1")
			c.Relayed = append(c.Relayed, circuit)
		}
	}
	const discover, request = dhcpv4.MessageTypeDiscover, dhcpv4.MessageTypeRequest
	for _, tt := range []struct {
		name   string
		mode   Mode
		req    *dhcpv4.DHCPv4
		kind   dhcpv4.MessageType
		subnet string // of yiaddr, and its router
		server string // option 54 and siaddr
		to     string
	}{
		{"by giaddr", Relay, message(t, discover, fromUEFI, relayed("10.5.0.1")), dhcpv4.MessageTypeOffer, "10.5.0.", "10.77.0.1 10.77.0.1", "10.5.0.1:67"},
		{"beside authoritative", Authoritative, message(t, discover, fromUEFI, relayed("10.5.0.1")), dhcpv4.MessageTypeOffer, "10.5.0.", "10.77.0.1 10.77.0.1", "10.5.0.1:67"},
		{"option 82 comes back", Relay, message(t, discover, fromUEFI, relayed("10.5.0.1", 1, 4, 'a', 'b', 'c', 'd', 2, 2, 9, 9)), dhcpv4.MessageTypeOffer, "10.5.0.", "10.77.0.1 10.77.0.1", "10.5.0.1:67"},
		{"torn option 82 comes back", Relay, message(t, discover, fromUEFI, relayed("10.5.0.1", 1, 40, 'a')), dhcpv4.MessageTypeOffer, "10.5.0.", "10.77.0.1 10.77.0.1", "10.5.0.1:67"},
		{"the link that the relay selects", Relay, message(t, discover, fromUEFI, relayed("10.99.0.1", 5, 4, 10, 5, 0, 0)), dhcpv4.MessageTypeOffer, "10.5.0.", "10.77.0.1 10.77.0.1", "10.99.0.1:67"},
		{"the server that the relay is", Relay, message(t, discover, fromUEFI, relayed("10.5.0.1", 11, 4, 10, 5, 0, 1)), dhcpv4.MessageTypeOffer, "10.5.0.", "10.5.0.1 10.77.0.1", "10.5.0.1:67"},
		{"REQUEST that names it", Relay, message(t, request, fromUEFI, relayed("10.5.0.1", 11, 4, 10, 5, 0, 1), names("10.5.0.1"), wants("10.5.0.105")), dhcpv4.MessageTypeAck, "10.5.0.", "10.5.0.1 10.77.0.1", "10.5.0.1:67"},
		{"by circuit, with a server of its own", Relay, message(t, discover, fromUEFI, relayed("10.5.0.1", 1, 4, 'e', 't', 'h', '7')), dhcpv4.MessageTypeOffer, "10.6.0.", "192.0.2.80 192.0.2.80", "10.5.0.1:67"},
		{"the broadcast flag changes no way", Relay, message(t, discover, fromUEFI, relayed("10.5.0.1"), dhcpv4.WithBroadcast(true)), dhcpv4.MessageTypeOffer, "10.5.0.", "10.77.0.1 10.77.0.1", "10.5.0.1:67"},
		{"renewal past the relay", Relay, message(t, request, dhcpv4.WithClientIP(ip4("10.5.0.103"))), dhcpv4.MessageTypeAck, "10.5.0.", "10.77.0.1 0.0.0.0", "10.5.0.103:68"},
		{"NAK through the relay", Relay, message(t, request, relayed("10.5.0.1"), wants("192.0.2.9")), dhcpv4.MessageTypeNak, "", "10.77.0.1 0.0.0.0", "10.5.0.1:67"},
		{"another relay", Relay, message(t, discover, fromUEFI, relayed("10.8.0.1")), 0, "", "", ""},
		{"another link", Relay, message(t, discover, fromUEFI, relayed("10.5.0.1", 5, 4, 10, 8, 0, 0)), 0, "", "", ""},
		{"nobody on the wire itself", Relay, message(t, discover, fromUEFI), 0, "", "", ""},
		{"nobody's renewal on the wire itself", Relay, message(t, request, dhcpv4.WithClientIP(ip4("10.77.0.170"))), 0, "", "", ""},
		{"not with reservations", Reservations, message(t, discover, fromUEFI, relayed("10.5.0.1")), 0, "", "", ""},
	} {
		s := testServer(t, bootFile, edit(tt.mode))
		s.cfg.Boot = func(a Ask) string { return "http://" + a.Server.String() + "/" }
		reply, a := askFrom(t, s, tt.req, source{})
		if reply == nil {
			if tt.kind != 0 {
				t.Errorf("%s: silence, want %s", tt.name, tt.kind)
			}
			continue
		}
		if siaddr := reply.ServerIPAddr; !siaddr.IsUnspecified() && reply.BootFileName != "http://"+siaddr.String()+"/" {
			t.Errorf("%s: the URL is %s, and siaddr %s", tt.name, reply.BootFileName, siaddr)
		}
		if reply.MessageType() != tt.kind || a.to.addr.String() != tt.to || a.to.mac != nil {
			t.Errorf("%s: %s to %s, want %s to %s", tt.name, reply.MessageType(), a.to.addr, tt.kind, tt.to)
		}
		if got := fmt.Sprint(reply.ServerIdentifier(), " ", reply.ServerIPAddr); got != tt.server {
			t.Errorf("%s: server and siaddr = %s, want %s", tt.name, got, tt.server)
		}
		if got, want := reply.Options.Get(dhcpv4.OptionRelayAgentInformation), tt.req.Options.Get(dhcpv4.OptionRelayAgentInformation); !bytes.Equal(got, want) {
			t.Errorf("%s: option 82 = %x, want %x", tt.name, got, want)
		}
		if !reply.GatewayIPAddr.Equal(tt.req.GatewayIPAddr) {
			t.Errorf("%s: giaddr = %s", tt.name, reply.GatewayIPAddr)
		}
		if tt.kind == dhcpv4.MessageTypeNak {
			if !reply.IsBroadcast() {
				t.Errorf("%s: the relay is not told to send it to all", tt.name)
			}
			continue
		}
		if router := reply.Router(); !strings.HasPrefix(reply.YourIPAddr.String(), tt.subnet) || len(router) != 1 || router[0].String() != tt.subnet+"1" {
			t.Errorf("%s: %s by %v, want an address of %s0/24 by its .1", tt.name, reply.YourIPAddr, router, tt.subnet)
		}
	}
}

// TestReservations: silence to everybody without one, and a NAK to nobody else.
func TestReservations(t *testing.T) {
	mine := dhcpv4.WithHwAddr(net.HardwareAddr{0x52, 0x54, 0, 0, 0, 0x50})
	const discover, request = dhcpv4.MessageTypeDiscover, dhcpv4.MessageTypeRequest
	for _, tt := range []struct {
		name string
		req  *dhcpv4.DHCPv4
		want dhcpv4.MessageType
	}{
		{"DISCOVER", message(t, discover, fromUEFI, mine), dhcpv4.MessageTypeOffer},
		{"DISCOVER for another address", message(t, discover, mine, wants("10.77.0.160")), dhcpv4.MessageTypeOffer},
		{"REQUEST", message(t, request, mine, names("10.77.0.1"), wants("10.77.0.50")), dhcpv4.MessageTypeAck},
		{"REQUEST to another server", message(t, request, mine, names("10.77.0.2"), wants("10.77.0.160")), 0},
		{"a system with another address", message(t, request, mine, wants("10.77.0.160")), dhcpv4.MessageTypeNak},
		{"firmware with another address", message(t, request, mine, fromUEFI, wants("10.77.0.160")), 0},
		{"a stranger's DISCOVER", message(t, discover, fromUEFI), 0},
		{"a stranger's REQUEST", message(t, request, names("10.77.0.1"), wants("10.77.0.160")), 0},
		{"a stranger's renewal", message(t, request, dhcpv4.WithClientIP(ip4("10.77.0.160"))), 0},
		{"a stranger from another network", message(t, request, wants("192.0.2.9")), 0},
		{"a stranger with the reserved address", message(t, request, wants("10.77.0.50")), 0},
		{"a stranger's INFORM", message(t, dhcpv4.MessageTypeInform, dhcpv4.WithClientIP(ip4("10.77.0.160"))), 0},
	} {
		s := testServer(t, bootFile, func(c *Config) { c.Mode = Reservations })
		reply := ask(t, s, tt.req)
		got := dhcpv4.MessageTypeNone
		if reply != nil {
			got = reply.MessageType()
		}
		if got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
		if reply != nil && got != dhcpv4.MessageTypeNak && reply.YourIPAddr.String() != "10.77.0.50" {
			t.Errorf("%s: %s, want 10.77.0.50", tt.name, reply.YourIPAddr)
		}
	}
}

// TestNAK: what boots gets none, whatever it asks for, since it goes to its disk
// then; nor does a system whose address another server may know. Each is built:
// EDK2 and BIOS ROMs end on a NAK, and an iPXE of 2017 to 2023 takes one from any
// server, not from the one alone that it chose.
func TestNAK(t *testing.T) {
	const request = dhcpv4.MessageTypeRequest
	for _, who := range []struct {
		name string
		mod  dhcpv4.Modifier
		nak  bool
	}{{"a system", emptyClass, true}, {"EDK2", fromUEFI, false}, {"BIOS", fromBIOS, false}, {"HTTP boot", fromHTTP, false}, {"iPXE", fromIPXE, false}} {
		for _, tt := range []struct {
			name string
			mods []dhcpv4.Modifier
			nak  bool
			ack  bool
		}{
			{"takes the box's offer of what another has now", []dhcpv4.Modifier{names("10.77.0.1"), wants("10.77.0.170")}, true, false},
			{"comes back to what another has", []dhcpv4.Modifier{wants("10.77.0.170")}, true, false},
			{"renews what another has", []dhcpv4.Modifier{dhcpv4.WithClientIP(ip4("10.77.0.170"))}, true, false},
			{"comes from another network", []dhcpv4.Modifier{wants("192.0.2.9")}, true, false},
			{"takes another server's offer", []dhcpv4.Modifier{names("10.77.0.2"), wants("10.77.0.170")}, false, false},
			{"comes back to an address outside of the range, of which nothing is known", []dhcpv4.Modifier{wants("10.77.0.9")}, false, false},
			{"renews an address outside of the range, of which nothing is known", []dhcpv4.Modifier{dhcpv4.WithClientIP(ip4("10.77.0.9"))}, false, false},
			{"comes back to a free one of the range", []dhcpv4.Modifier{wants("10.77.0.171")}, false, true},
			{"renews a free one of the range", []dhcpv4.Modifier{dhcpv4.WithClientIP(ip4("10.77.0.171"))}, false, true},
		} {
			s := testServer(t, bootFile)
			if _, err := s.cfg.Leases.Bind("lan", "52:54:00:00:00:99", netip.MustParseAddr("10.77.0.170"), time.Hour); err != nil {
				t.Fatal(err)
			}
			reply := ask(t, s, message(t, request, append(tt.mods, who.mod)...))
			want := dhcpv4.MessageTypeNone
			switch {
			case tt.ack:
				want = dhcpv4.MessageTypeAck
			case tt.nak && who.nak:
				want = dhcpv4.MessageTypeNak
			}
			got := dhcpv4.MessageTypeNone
			if reply != nil {
				got = reply.MessageType()
			}
			if got != want {
				t.Errorf("%s that %s: %s, want %s", who.name, tt.name, got, want)
			}
		}
	}
}

// told is a subnet with all that can be told.
func told(c *Config) {
	at := netip.MustParseAddr
	c.Local.Router = at("10.77.0.254")
	c.Local.DNS = []netip.Addr{at("10.77.0.53"), at("10.77.0.54")}
	c.Local.NTP = []netip.Addr{at("10.77.0.123")}
	c.Local.Search = []string{"example.net", "lab.example.net"}
	c.Local.Routes = []Route{{netip.MustParsePrefix("10.9.0.0/16"), at("10.77.0.253")}}
	c.Local.MTU = 9000
	c.Name = func(string) string { return "node-1" }
}

func TestOptions(t *testing.T) {
	s := testServer(t, bootFile, told)
	reply := ask(t, s, message(t, dhcpv4.MessageTypeDiscover, fromUEFI, withUUID))
	for code, want := range map[uint8]string{
		3: "0a4d00fe", 6: "0a4d00350a4d0036", 42: "0a4d007b", 26: "2328", 1: "ffffff00", 28: "0a4d00ff", 51: "00000e10", 58: "00000708", 59: "00000c4e",
		121: "100a090a4d00fd" + "000a4d00fe", 119: "076578616d706c65036e657400036c6162076578616d706c65036e657400", 12: "6e6f64652d31",
		67: "736e706f6e6c792e65666900", 97: "0007070707070707070707070707070707", 54: "0a4d0001",
	} {
		if got := fmt.Sprintf("%x", reply.Options[code]); got != want {
			t.Errorf("option %d = %s, want %s", code, got, want)
		}
	}
	if reply.Options.Has(dhcpv4.OptionClassIdentifier) || reply.ServerHostName != "" {
		t.Errorf("option 60 %q and sname %q, want neither", reply.ClassIdentifier(), reply.ServerHostName)
	}
	// Only what is asked for, beside what everybody needs.
	list := dhcpv4.WithRequestedOptions(dhcpv4.OptionSubnetMask, dhcpv4.OptionDomainNameServer)
	reply = ask(t, s, message(t, dhcpv4.MessageTypeDiscover, fromUEFI, list))
	for code, want := range map[uint8]bool{3: true, 6: true, 42: false, 26: false, 121: false, 119: false, 12: false, 67: true, 51: true} {
		if _, got := reply.Options[code]; got != want {
			t.Errorf("option %d is there: %v, want %v for a client that asks for 1 and 6", code, got, want)
		}
	}
}

// TestOptionsFit: a client gets no more than it takes, and what boots it first.
func TestOptionsFit(t *testing.T) {
	s := testServer(t, func(Who) string { return "http://10.77.0.1/" + strings.Repeat("b", 110) }, told)
	s.cfg.Local.Search = []string{strings.Repeat("a", 60) + ".example.net", strings.Repeat("b", 60) + ".example.net"}
	size := func(n uint16) dhcpv4.Modifier {
		return dhcpv4.WithOption(dhcpv4.OptMaxMessageSize(n))
	}
	relayed := func(d *dhcpv4.DHCPv4) {
		d.GatewayIPAddr = ip4("10.5.0.1")
		d.UpdateOption(dhcpv4.OptGeneric(dhcpv4.OptionRelayAgentInformation, bytes.Repeat([]byte{1, 2, 3, 4}, 60)))
	}
	for _, tt := range []struct {
		name    string
		mods    []dhcpv4.Modifier
		most    int
		dropped bool
	}{
		{"says nothing", nil, 548, true},
		{"says less than everybody must take", []dhcpv4.Modifier{size(300)}, 548, true},
		{"says 1472", []dhcpv4.Modifier{size(1472)}, 1444, false},
		{"says 65280, as EDK2 does", []dhcpv4.Modifier{size(0xff00)}, 1472, false},
		{"is behind a relay that says much", []dhcpv4.Modifier{relayed}, 548, true},
	} {
		req, err := dhcpv4.FromBytes(message(t, dhcpv4.MessageTypeDiscover, append(tt.mods, fromUEFI, withUUID)...).ToBytes())
		if err != nil {
			t.Fatal(err)
		}
		a, ok := s.handle(req, source{})
		if !ok {
			t.Fatalf("%s: no answer", tt.name)
		}
		b := encode(a.reply, a.most)
		if a.most != tt.most || len(b) > tt.most || len(b) < bootpLeast {
			t.Errorf("%s: %d bytes of at most %d, want %d to %d", tt.name, len(b), a.most, bootpLeast, tt.most)
		}
		d, err := dhcpv4.FromBytes(b)
		if err != nil {
			t.Fatal(err)
		}
		for _, code := range []uint8{53, 54, 51, 1} {
			if _, ok := d.Options[code]; !ok {
				t.Errorf("%s: option %d is left out", tt.name, code)
			}
		}
		if got, want := d.Options[82], req.Options[82]; !bytes.Equal(got, want) {
			t.Errorf("%s: option 82 is %d bytes, want %d", tt.name, len(got), len(want))
		}
		if got := !d.Options.Has(dhcpv4.OptionDNSDomainSearchList); got != tt.dropped && req.Options[82] == nil {
			t.Errorf("%s: search is left out: %v, want %v", tt.name, got, tt.dropped)
		}
		if !d.Options.Has(dhcpv4.OptionBootfileName) && req.Options[82] == nil {
			t.Errorf("%s: option 67 is left out", tt.name)
		}
	}
	// Whatever a reply has is known to the order, or it would never be sent.
	for _, mode := range []Mode{Authoritative, Proxy} {
		s := testServer(t, bootFile, told, func(c *Config) { c.Mode = mode })
		for _, mod := range []dhcpv4.Modifier{fromUEFI, fromHTTP, fromIPXE} {
			req := message(t, dhcpv4.MessageTypeDiscover, mod, withUUID, dhcpv4.WithGeneric(dhcpv4.OptionClientIdentifier, []byte{1, 2}))
			a, _ := s.handle(req, source{})
			for code := range a.reply.Options {
				if !slices.Contains(order, code) {
					t.Errorf("option %d is set, and has no place in the order", code)
				}
			}
		}
	}
}

// TestWithoutUUID: what sends no option 97, or a torn one, is served as others
// are, and gets none made up. Built: Supermicro's boards with Intel's ROM send
// none, Raspberry Pi 4 of before 2020 the serial number four times.
func TestWithoutUUID(t *testing.T) {
	plain := message(t, dhcpv4.MessageTypeDiscover, fromUEFI)
	for _, mode := range []Mode{Authoritative, Proxy} {
		var with *dhcpv4.DHCPv4
		for _, tt := range []struct {
			name string
			id   []byte
		}{
			{"as EDK2 sends it (captured)", captured(t, "edk2-uefi-discover").Options.Get(dhcpv4.OptionClientMachineIdentifier)},
			{"none (built)", nil},
			{"empty (built)", []byte{}},
			{"of another kind (built)", append([]byte{1}, bytes.Repeat([]byte{7}, 16)...)},
			{"four serial numbers (built)", append([]byte{0}, bytes.Repeat([]byte{0x80, 1, 2, 3}, 4)...)},
			{"torn (built)", []byte{0, 1, 2}},
		} {
			req := message(t, dhcpv4.MessageTypeDiscover, fromUEFI, dhcpv4.WithTransactionID(plain.TransactionID))
			if tt.id != nil {
				req.UpdateOption(dhcpv4.OptGeneric(dhcpv4.OptionClientMachineIdentifier, tt.id))
			}
			reply := ask(t, testServer(t, bootFile, func(c *Config) { c.Mode = mode }), req)
			if reply == nil {
				t.Errorf("option 97 %s: silence", tt.name)
				continue
			}
			if got := reply.Options.Get(dhcpv4.OptionClientMachineIdentifier); !bytes.Equal(got, tt.id) || reply.Options.Has(dhcpv4.OptionClientMachineIdentifier) != (len(tt.id) > 0) {
				t.Errorf("option 97 %s: %x comes back, want %x", tt.name, got, tt.id)
			}
			reply.DeleteOption(dhcpv4.OptionClientMachineIdentifier)
			if with == nil {
				with = reply
			}
			if !bytes.Equal(reply.ToBytes(), with.ToBytes()) || reply.BootFileName != "snponly.efi" {
				t.Errorf("option 97 %s: %s, want what others get: %s", tt.name, reply.Summary(), with.Summary())
			}
		}
	}
}

func TestINFORM(t *testing.T) {
	s := testServer(t, bootFile, told)
	reply, a := askFrom(t, s, message(t, dhcpv4.MessageTypeInform, fromUEFI, dhcpv4.WithClientIP(ip4("10.77.0.9"))), source{})
	if reply == nil || reply.MessageType() != dhcpv4.MessageTypeAck || !reply.YourIPAddr.IsUnspecified() || reply.IPAddressLeaseTime(-1) != -1 ||
		len(reply.DNS()) != 2 || reply.BootFileName != "snponly.efi" || a.to.addr.String() != "10.77.0.9:68" || a.kept {
		t.Errorf("INFORM = %v to %s, want options alone, at once, to 10.77.0.9:68", reply, a.to.addr)
	}
}

// TestBMC: addresses, no boot, and who it was.
func TestBMC(t *testing.T) {
	var seen []string
	s := testServer(t, bootFile, func(c *Config) {
		c.BMC = true
		c.Seen = func(w Who, ip netip.Addr) {
			seen = append(seen, fmt.Sprint(w.MAC, " ", ip, " ", w.Class, " ", w.Hostname))
		}
	})
	id := func(d *dhcpv4.DHCPv4) {
		d.UpdateOption(dhcpv4.OptClassIdentifier("iDRAC\x00"))
		d.UpdateOption(dhcpv4.OptHostName("idrac-7X\n"))
	}
	if reply := ask(t, s, message(t, dhcpv4.MessageTypeDiscover, id)); reply == nil || len(seen) != 0 {
		t.Fatalf("DISCOVER = %v, seen %q, want an offer and nothing yet", reply, seen)
	}
	ask(t, s, message(t, dhcpv4.MessageTypeRequest, id, names("10.77.0.1"), wants("10.77.0.160")))
	if want := []string{"52:54:00:00:00:01 10.77.0.160 iDRAC idrac-7X"}; !slices.Equal(seen, want) {
		t.Errorf("seen = %q, want %q", seen, want)
	}
	if reply := ask(t, s, message(t, dhcpv4.MessageTypeDiscover, fromUEFI)); reply == nil || reply.BootFileName != "" || !reply.ServerIPAddr.IsUnspecified() {
		t.Errorf("firmware on a BMC network = %v, want an address and nothing to boot", reply)
	}
}

// TestBurst: 64 machines at once, each asking twice and out of order, have 64
// addresses. Built: 64 of EDK2 behind one switch that was switched on.
func TestBurst(t *testing.T) {
	s := testServer(t, bootFile, func(c *Config) {
		further := c.Relayed[0]
		further.Pool, further.Network, further.Giaddr = "further", netip.MustParsePrefix("10.6.0.0/24"), netip.MustParseAddr("10.6.0.1")
		c.Relayed = append(c.Relayed, further)
	})
	mac := func(i int) dhcpv4.Modifier { return dhcpv4.WithHwAddr(net.HardwareAddr{0x52, 0x54, 0, 0, 2, byte(i)}) }
	far, further := dhcpv4.WithGatewayIP(ip4("10.5.0.1")), dhcpv4.WithGatewayIP(ip4("10.6.0.1"))
	offers := map[int]string{}
	holder := map[string]int{}
	offer := func(i int, mods ...dhcpv4.Modifier) {
		reply := ask(t, s, message(t, dhcpv4.MessageTypeDiscover, append(mods, mac(i), fromUEFI)...))
		if reply == nil {
			t.Fatalf("machine %d is offered nothing", i)
		}
		ip := reply.YourIPAddr.String()
		if was, ok := offers[i]; ok && was != ip {
			t.Errorf("machine %d is offered %s, and was %s", i, ip, was)
		}
		if other, ok := holder[ip]; ok && other != i {
			t.Errorf("%s is offered to machines %d and %d", ip, other, i)
		}
		offers[i], holder[ip] = ip, i
	}
	for range 2 {
		for i := range 50 {
			offer(i)
		}
		for i := 50; i < 60; i++ {
			offer(i, far)
		}
		for i := 60; i < 64; i++ {
			offer(i, further)
		}
	}
	if len(holder) != 64 {
		t.Errorf("64 machines have %d addresses", len(holder))
	}
	for i := 49; i >= 0; i-- {
		reply := ask(t, s, message(t, dhcpv4.MessageTypeRequest, mac(i), fromUEFI, names("10.77.0.1"), wants(offers[i])))
		if reply == nil || reply.MessageType() != dhcpv4.MessageTypeAck || reply.YourIPAddr.String() != offers[i] {
			t.Errorf("machine %d asks for %s and gets %v", i, offers[i], reply)
		}
	}
}

// TestChains: ours is told from other iPXEs by what the machine was given.
func TestChains(t *testing.T) {
	type step struct {
		after time.Duration
		// "ipxe", "uefi", or "load" for a boot program that was fetched
		what string
		want string // "", "foreign" or "looping"
	}
	for name, steps := range map[string][]step{
		"ours after firmware":                   {{0, "uefi", ""}, {time.Second, "load", ""}, {9 * time.Second, "ipxe", ""}, {9 * time.Second, "ipxe", ""}},
		"a foreign one gets ours, once":         {{0, "ipxe", "foreign"}, {9 * time.Second, "ipxe", ""}, {9 * time.Second, "ipxe", ""}},
		"and again after a while":               {{0, "ipxe", "foreign"}, {time.Hour, "ipxe", "foreign"}},
		"one that hides is not looped":          {{0, "uefi", ""}, {time.Second, "load", ""}, {9 * time.Second, "uefi", ""}, {time.Second, "load", ""}, {9 * time.Second, "uefi", "looping"}, {9 * time.Second, "uefi", ""}},
		"firmware that never fetched":           {{0, "uefi", ""}, {9 * time.Second, "uefi", ""}, {9 * time.Second, "uefi", ""}, {9 * time.Second, "uefi", ""}},
		"a machine that is started again":       {{0, "uefi", ""}, {time.Second, "load", ""}, {4 * time.Minute, "uefi", ""}, {time.Second, "load", ""}, {4 * time.Minute, "uefi", ""}},
		"a machine whose iPXE came, and resets": {{0, "uefi", ""}, {time.Second, "load", ""}, {time.Second, "ipxe", ""}, {time.Minute, "uefi", ""}, {time.Second, "load", ""}, {time.Second, "ipxe", ""}, {time.Minute, "uefi", ""}},
	} {
		s := testServer(t, bootFile, func(c *Config) { c.Known = func(string) bool { return true } })
		now := t0
		s.cfg.Now = func() time.Time { return now }
		var asked Ask
		s.cfg.Boot = func(a Ask) string { asked = a; return "file" }
		const mac = "52:54:00:00:00:01"
		for i, st := range steps {
			now = now.Add(st.after)
			if st.what == "load" {
				s.cfg.Chains.Loaded(chain.DHCPv4, mac, s.cfg.Now())
				continue
			}
			mod := fromIPXE
			if st.what == "uefi" {
				mod = fromUEFI
			}
			discover := message(t, dhcpv4.MessageTypeDiscover, mod)
			for _, kind := range []dhcpv4.MessageType{dhcpv4.MessageTypeDiscover, dhcpv4.MessageTypeDiscover, dhcpv4.MessageTypeRequest} {
				req := message(t, kind, mod, dhcpv4.WithTransactionID(discover.TransactionID), wants("10.77.0.160"))
				ask(t, s, req)
				got := ""
				switch {
				case asked.Client.Foreign:
					got = "foreign"
				case asked.Client.Looping:
					got = "looping"
				}
				if got != st.want {
					t.Errorf("%s: step %d, %s of %s = %q, want %q", name, i+1, kind, st.what, got, st.want)
				}
			}
		}
	}
}

// TestAsked: that a client begins is said of what came from the MAC that it names, on the
// wire itself and to port 67, and that has no address yet.
func TestAsked(t *testing.T) {
	const discover, request = dhcpv4.MessageTypeDiscover, dhcpv4.MessageTypeRequest
	selects := func(more ...dhcpv4.Modifier) *dhcpv4.DHCPv4 {
		return message(t, request, append([]dhcpv4.Modifier{fromUEFI, wants("10.77.0.150")}, more...)...)
	}
	for _, tt := range []struct {
		name    string
		mode    Mode
		req     *dhcpv4.DHCPv4
		proxy   bool
		strange bool
		want    bool
	}{
		{"itself", Authoritative, selects(), false, false, true},
		{"a proxy", Proxy, message(t, discover, fromUEFI), false, false, true},
		{"a proxy's port", Proxy, message(t, request, fromUEFI), true, false, false},
		{"another", Authoritative, selects(), false, true, false},
		{"who renews", Authoritative, message(t, request, fromUEFI, dhcpv4.WithClientIP(ip4("10.77.0.150"))), false, false, false},
		{"a relay", Authoritative, message(t, discover, fromUEFI, dhcpv4.WithGatewayIP(ip4("10.5.0.1"))), false, false, false},
	} {
		var asked []Ask
		s := testServer(t, bootFile, func(c *Config) { c.Mode = tt.mode })
		s.cfg.Boot = func(a Ask) string { asked = append(asked, a); return "file" }
		from, limits := source{addr: netip.MustParseAddrPort("10.77.0.150:68"), proxy: tt.proxy}, limit.NewApart()
		if tt.strange {
			s.sortStrange(limits, tt.req.ToBytes(), [6]byte{2, 6, 6, 6, 6, 6}, from.addr, t0)
		} else {
			s.sort(limits, tt.req.ToBytes(), from, t0)
		}
		p, ok := s.in.Next(t.Context())
		if !ok {
			t.Fatal("no packet")
		}
		s.respond(p)
		want := time.Time{}
		if tt.want {
			want = t0
		}
		if len(asked) != 1 || !asked[0].Asked.Equal(want) {
			t.Errorf("%s: asked %v, want once, at %v", tt.name, asked, want)
		}
	}
}
