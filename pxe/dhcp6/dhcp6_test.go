package dhcp6

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"

	"github.com/better-compute/site-appliance/pxe/chain"
	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/limit"
)

var (
	t0      = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	own     = netip.MustParsePrefix("fd00:77::1/64")
	macA    = [6]byte{0x52, 0x54, 0, 0, 0, 0x0a}
	macB    = [6]byte{0x52, 0x54, 0, 0, 0, 0x0b}
	fromA   = source{mac: macA, addr: netip.MustParseAddr("fe80::5054:ff:fe00:a"), group: true}
	addrA   = netip.MustParseAddr("fd00:77::5254:0:0:a")
	nextA   = netip.MustParseAddr("fd00:77::5254:0:100:a")
	boxDUID = &dhcpv6.DUIDLL{HWType: iana.HWTypeEthernet, LinkLayerAddr: net.HardwareAddr{2, 0, 0, 0, 0, 1}}
)

const bootURL = "tftp://[fd00:77::1]/snponly.efi"

// testServer answers without sockets.
func testServer(t testing.TB, edit ...func(*Config)) *Server {
	cfg := Config{
		Interface: "box0", Address: own, DNS: addrs("fd00:77::53"), NTP: addrs("fd00:77::123"), Search: []string{"example.net"},
		Known: func(string) bool { return true }, Arch: func(string) decide.Arch { return decide.OtherArch },
		Boot:   func(Ask) string { return bootURL },
		Chains: new(chain.Memory), Now: func() time.Time { return t0 }, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
	for _, e := range edit {
		e(&cfg)
	}
	s := newServer(cfg)
	s.duid = boxDUID
	return s
}

func addrs(text ...string) (all []netip.Addr) {
	for _, a := range text {
		all = append(all, netip.MustParseAddr(a))
	}
	return all
}

// with builds a message of options.
func with(kind dhcpv6.MessageType, options ...dhcpv6.Option) *dhcpv6.Message {
	m := &dhcpv6.Message{MessageType: kind, TransactionID: dhcpv6.TransactionID{1, 2, 3}}
	for _, o := range options {
		m.AddOption(o)
	}
	return m
}

func ia(id byte, has ...netip.Addr) *dhcpv6.OptIANA {
	o := &dhcpv6.OptIANA{IaId: [4]byte{0, 0, 0, id}}
	for _, ip := range has {
		o.Options.Add(&dhcpv6.OptIAAddress{IPv6Addr: ip.AsSlice(), PreferredLifetime: time.Minute, ValidLifetime: time.Minute})
	}
	return o
}

var (
	uuidOfA  = [16]byte{4, 3, 2, 1, 6, 5, 8, 7, 9, 10, 11, 12, 13, 14, 15, 16}
	idUUID   = dhcpv6.OptClientID(&dhcpv6.DUIDUUID{UUID: uuidOfA})
	idLL     = dhcpv6.OptClientID(&dhcpv6.DUIDLL{HWType: iana.HWTypeEthernet, LinkLayerAddr: macA[:]})
	idOther  = dhcpv6.OptClientID(&dhcpv6.DUIDEN{EnterpriseNumber: 43793, EnterpriseIdentifier: []byte("12345678")})
	idBox    = dhcpv6.OptServerID(boxDUID)
	idForein = dhcpv6.OptServerID(&dhcpv6.DUIDLL{HWType: iana.HWTypeEthernet, LinkLayerAddr: net.HardwareAddr{2, 0, 0, 0, 0, 9}})
	rapid    = &dhcpv6.OptionGeneric{OptionCode: dhcpv6.OptionRapidCommit}
)

func class(text string) dhcpv6.Option {
	return &dhcpv6.OptVendorClass{EnterpriseNumber: 343, Data: [][]byte{[]byte(text)}}
}

func archIs(a iana.Arch) dhcpv6.Option { return dhcpv6.OptClientArchType(a) }

func user(text string) dhcpv6.Option {
	return &dhcpv6.OptUserClass{UserClasses: [][]byte{[]byte(text)}}
}

var (
	asUEFI = []dhcpv6.Option{class("PXEClient:Arch:00007:UNDI:003001"), archIs(7)}
	asHTTP = []dhcpv6.Option{class("HTTPClient:Arch:00016:UNDI:003001"), archIs(16)}
)

// show is a reply in one line: its type, its associations, its status, and the
// codes of the rest.
func show(m *dhcpv6.Message) string {
	if m == nil {
		return "nothing"
	}
	out := []string{m.MessageType.String()}
	state := func(o dhcpv6.Options) string {
		var parts []string
		for _, o := range o {
			switch o := o.(type) {
			case *dhcpv6.OptIAAddress:
				ip, _ := netip.AddrFromSlice(o.IPv6Addr)
				parts = append(parts, fmt.Sprintf("%s/%d", ip, o.ValidLifetime/time.Second))
			case *dhcpv6.OptStatusCode:
				parts = append(parts, o.StatusCode.String())
			}
		}
		return strings.Join(parts, " ")
	}
	for _, o := range m.Options.Options {
		switch o := o.(type) {
		case *dhcpv6.OptIANA:
			out = append(out, fmt.Sprintf("na%d[%s]", o.IaId[3], state(o.Options.Options)))
		case *dhcpv6.OptIATA:
			out = append(out, fmt.Sprintf("ta%d[%s]", o.IaId[3], state(o.Options.Options)))
		case *dhcpv6.OptIAPD:
			out = append(out, fmt.Sprintf("pd%d[%s]", o.IaId[3], state(o.Options.Options)))
		case *dhcpv6.OptStatusCode:
			out = append(out, o.StatusCode.String())
		default:
			text := fmt.Sprint(uint16(o.Code()))
			if o.Code() == dhcpv6.OptionPreference {
				text += fmt.Sprintf("=%d", m.Options.Preference())
			}
			out = append(out, text)
		}
	}
	return strings.Join(out, " ")
}

// TestMessages: every message of RFC 8415 that a server hears, and what it must
// not answer. 1 is the client's identifier and 2 the server's; 7 the preference,
// 14 rapid commit, 59 the URL, 16 the vendor class.
func TestMessages(t *testing.T) {
	foreign, otherMachine := netip.MustParseAddr("2001:db8::7"), AddressOf(own, macB, 0)
	oro := dhcpv6.OptRequestedOption(dhcpv6.OptionDNSRecursiveNameServer, dhcpv6.OptionDomainSearchList, dhcpv6.OptionNTPServer, dhcpv6.OptionSNTPServerList)
	unicast := fromA
	unicast.group = false
	group := fromA
	group.mac[0] |= 1
	const (
		solicit, request, confirm, renew, rebind = dhcpv6.MessageTypeSolicit, dhcpv6.MessageTypeRequest, dhcpv6.MessageTypeConfirm, dhcpv6.MessageTypeRenew, dhcpv6.MessageTypeRebind
		release, decline, inform                 = dhcpv6.MessageTypeRelease, dhcpv6.MessageTypeDecline, dhcpv6.MessageTypeInformationRequest
	)
	for _, tt := range []struct {
		name string
		m    *dhcpv6.Message
		from source
		want string
	}{
		{"SOLICIT", with(solicit, idLL, ia(1)), fromA, "ADVERTISE 1 na1[fd00:77::5254:0:0:a/3600] 2"},
		{"SOLICIT of firmware", with(solicit, append([]dhcpv6.Option{idUUID, ia(1)}, asUEFI...)...), fromA, "ADVERTISE 1 na1[fd00:77::5254:0:0:a/3600] 59 7=255 2"},
		{"SOLICIT of HTTP boot", with(solicit, append([]dhcpv6.Option{idUUID, ia(1)}, asHTTP...)...), fromA, "ADVERTISE 1 na1[fd00:77::5254:0:0:a/3600] 59 16 7=255 2"},
		{"SOLICIT that is in a hurry", with(solicit, idLL, ia(1), rapid), fromA, "REPLY 1 14 na1[fd00:77::5254:0:0:a/3600] 2"},
		{"SOLICIT without an association", with(solicit, idLL), fromA, "ADVERTISE 1 2"},
		{"SOLICIT for two", with(solicit, idLL, ia(1), ia(2)), fromA, "ADVERTISE 1 na1[fd00:77::5254:0:0:a/3600] na2[NoAddrsAvail] 2"},
		{"SOLICIT for what is not given", with(solicit, idLL, &dhcpv6.OptIATA{}, &dhcpv6.OptIAPD{}), fromA, "ADVERTISE 1 ta0[NoAddrsAvail] pd0[NoPrefixAvail] 2"},
		{"SOLICIT that hopes for another's", with(solicit, idLL, ia(1, otherMachine)), fromA, "ADVERTISE 1 na1[fd00:77::5254:0:0:a/3600] 2"},
		{"SOLICIT that hopes for its second", with(solicit, idLL, ia(1, nextA)), fromA, "ADVERTISE 1 na1[fd00:77::5254:0:100:a/3600] 2"},
		{"SOLICIT without a client's identifier", with(solicit, ia(1)), fromA, "nothing"},
		{"SOLICIT with a server's identifier", with(solicit, idLL, idBox, ia(1)), fromA, "nothing"},
		{"SOLICIT to the box alone", with(solicit, idLL, ia(1)), unicast, "nothing"},
		{"SOLICIT from a group's MAC", with(solicit, idLL, ia(1)), group, "nothing"},

		{"REQUEST", with(request, idLL, idBox, ia(1, addrA)), fromA, "REPLY 1 na1[fd00:77::5254:0:0:a/3600] 2"},
		{"REQUEST of firmware", with(request, append([]dhcpv6.Option{idUUID, idBox, ia(1, addrA)}, asUEFI...)...), fromA, "REPLY 1 na1[fd00:77::5254:0:0:a/3600] 59 2"},
		{"REQUEST with what is asked for", with(request, idLL, idBox, ia(1, addrA), oro), fromA, "REPLY 1 na1[fd00:77::5254:0:0:a/3600] 23 24 56 31 2"},
		{"REQUEST for another's", with(request, idLL, idBox, ia(1, otherMachine)), fromA, "REPLY 1 na1[fd00:77::5254:0:0:a/3600 fd00:77::5254:0:0:b/0] 2"},
		{"REQUEST to another server", with(request, idLL, idForein, ia(1, addrA)), fromA, "nothing"},
		{"REQUEST without a server's identifier", with(request, idLL, ia(1, addrA)), fromA, "nothing"},
		{"REQUEST to the box alone", with(request, idLL, idBox, ia(1, addrA)), unicast, "REPLY 1 UseMulticast 2"},

		{"RENEW", with(renew, idLL, idBox, ia(1, addrA)), fromA, "REPLY 1 na1[fd00:77::5254:0:0:a/3600] 2"},
		{"RENEW of the second", with(renew, idLL, idBox, ia(1, nextA)), fromA, "REPLY 1 na1[fd00:77::5254:0:100:a/3600] 2"},
		{"RENEW of both", with(renew, idLL, idBox, ia(1, addrA, nextA)), fromA, "REPLY 1 na1[fd00:77::5254:0:0:a/3600 fd00:77::5254:0:100:a/0] 2"},
		{"RENEW after a new network", with(renew, idLL, idBox, ia(1, foreign)), fromA, "REPLY 1 na1[fd00:77::5254:0:0:a/3600 2001:db8::7/0] 2"},
		{"RENEW of two", with(renew, idLL, idBox, ia(1, addrA), ia(2, nextA)), fromA, "REPLY 1 na1[fd00:77::5254:0:0:a/3600] na2[fd00:77::5254:0:100:a/0] 2"},
		{"RENEW to the box alone", with(renew, idLL, idBox, ia(1, addrA)), unicast, "REPLY 1 UseMulticast 2"},
		{"RENEW to another server", with(renew, idLL, idForein, ia(1, addrA)), fromA, "nothing"},

		{"REBIND", with(rebind, idLL, ia(1, addrA)), fromA, "REPLY 1 na1[fd00:77::5254:0:0:a/3600] 2"},
		{"REBIND with a server's identifier", with(rebind, idLL, idBox, ia(1, addrA)), fromA, "nothing"},
		{"REBIND to the box alone", with(rebind, idLL, ia(1, addrA)), unicast, "nothing"},

		{"CONFIRM", with(confirm, idLL, ia(1, addrA)), fromA, "REPLY 1 Success 2"},
		{"CONFIRM of another network", with(confirm, idLL, ia(1, addrA), ia(2, foreign)), fromA, "REPLY 1 NotOnLink 2"},
		{"CONFIRM of nothing", with(confirm, idLL, ia(1)), fromA, "nothing"},
		{"CONFIRM with a server's identifier", with(confirm, idLL, idBox, ia(1, addrA)), fromA, "nothing"},

		{"RELEASE", with(release, idLL, idBox, ia(1, addrA)), fromA, "REPLY 1 Success 2"},
		{"RELEASE of another's", with(release, idLL, idBox, ia(1, otherMachine)), fromA, "REPLY 1 na1[NoBinding] Success 2"},
		{"RELEASE to another server", with(release, idLL, idForein, ia(1, addrA)), fromA, "nothing"},
		{"DECLINE of another's", with(decline, idLL, idBox, ia(1, otherMachine)), fromA, "REPLY 1 na1[NoBinding] Success 2"},
		{"DECLINE to the box alone", with(decline, idLL, idBox, ia(1, addrA)), unicast, "REPLY 1 UseMulticast 2"},

		{"INFORMATION-REQUEST", with(inform, oro), fromA, "REPLY 23 24 56 31 2"},
		{"INFORMATION-REQUEST of firmware", with(inform, append([]dhcpv6.Option{idUUID}, asUEFI...)...), fromA, "REPLY 1 59 2"},
		{"INFORMATION-REQUEST with an association", with(inform, idLL, ia(1)), fromA, "nothing"},
		{"INFORMATION-REQUEST to another server", with(inform, idLL, idForein, oro), fromA, "nothing"},

		{"a server's ADVERTISE", with(dhcpv6.MessageTypeAdvertise, idLL, idForein, ia(1, addrA)), fromA, "nothing"},
		{"a server's REPLY", with(dhcpv6.MessageTypeReply, idLL, idBox, ia(1, addrA)), fromA, "nothing"},
		{"RECONFIGURE", with(dhcpv6.MessageTypeReconfigure, idLL, idBox), fromA, "nothing"},
	} {
		// A server of its own for each: a DECLINE is remembered. And over the wire's
		// bytes, as packets come.
		s := testServer(t)
		m, err := dhcpv6.MessageFromBytes(tt.m.ToBytes())
		if err != nil {
			t.Fatal(err)
		}
		reply := s.handle(m, tt.from)
		if got := show(reply); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
		if reply != nil && reply.TransactionID != tt.m.TransactionID {
			t.Errorf("%s: transaction %x, want the client's", tt.name, reply.TransactionID)
		}
	}
}

// TestLifetimes: T1 and T2 as RFC 8415, 21.4, recommends them.
func TestLifetimes(t *testing.T) {
	reply := testServer(t).handle(with(dhcpv6.MessageTypeRequest, idLL, idBox, ia(1, addrA)), fromA)
	got := reply.Options.OneIANA()
	if a := got.Options.OneAddress(); got.T1 != 30*time.Minute || got.T2 != 48*time.Minute || a.PreferredLifetime != time.Hour || a.ValidLifetime != time.Hour {
		t.Errorf("T1 %s, T2 %s, preferred %s, valid %s, want half, four fifths, and an hour", got.T1, got.T2, a.PreferredLifetime, a.ValidLifetime)
	}
}

// TestOneAddress: whatever identifiers a machine's firmware, iPXE and system send,
// it is its MAC; and one identifier from two ports is two.
func TestOneAddress(t *testing.T) {
	s := testServer(t)
	for _, tt := range []struct {
		name string
		from source
		m    *dhcpv6.Message
		want netip.Addr
	}{
		{"firmware", fromA, with(dhcpv6.MessageTypeSolicit, append([]dhcpv6.Option{idUUID, ia(1)}, asUEFI...)...), addrA},
		{"iPXE", fromA, with(dhcpv6.MessageTypeSolicit, idLL, ia(200), user("iPXE")), addrA},
		{"a system with an address of its own making", source{mac: macA, addr: netip.MustParseAddr("fe80::1234:5678:9abc:def0"), group: true},
			with(dhcpv6.MessageTypeSolicit, idOther, ia(7)), addrA},
		{"its other port, by the same identifier", source{mac: macB, addr: netip.MustParseAddr("fe80::5054:ff:fe00:b"), group: true},
			with(dhcpv6.MessageTypeSolicit, idOther, ia(7)), AddressOf(own, macB, 0)},
	} {
		reply := s.handle(tt.m, tt.from)
		if got := listed(reply); len(got) != 1 || got[0] != tt.want {
			t.Errorf("%s: %v, want %s", tt.name, got, tt.want)
		}
	}
}

// exchange is what a machine does to get an address: SOLICIT and REQUEST.
func exchange(s *Server, from source) netip.Addr {
	ip := offered(s, from)
	if got := listed(s.handle(with(dhcpv6.MessageTypeRequest, idLL, idBox, ia(1, ip)), from)); len(got) == 1 && got[0] == ip {
		return ip
	}
	return netip.Addr{}
}

// offered is what an ADVERTISE names.
func offered(s *Server, from source) netip.Addr {
	if got := listed(s.handle(with(dhcpv6.MessageTypeSolicit, idLL, ia(1)), from)); len(got) == 1 {
		return got[0]
	}
	return netip.Addr{}
}

func decline(s *Server, from source, ip netip.Addr) {
	s.handle(with(dhcpv6.MessageTypeDecline, idLL, idBox, ia(1, ip)), from)
}

func as(mac [6]byte) source { return source{mac: mac, addr: fromA.addr, group: true} }

// TestDecline: who finds an address in use gets another and keeps it, and the first
// again when it was away for a day. It is never left without any, however many it
// declines.
func TestDecline(t *testing.T) {
	now := t0
	var told []string
	s := testServer(t, func(c *Config) {
		c.Now = func() time.Time { return now }
		c.Declined = func(mac string, ip netip.Addr) { told = append(told, mac+" "+ip.String()) }
	})
	decline(s, fromA, addrA) // before it was given
	if got := exchange(s, fromA); got != addrA {
		t.Fatalf("after a DECLINE of what was not given: %s, want %s", got, addrA)
	}
	decline(s, as(macB), addrA)
	if got := exchange(s, fromA); got != addrA {
		t.Fatalf("after another machine's DECLINE: %s, want %s", got, addrA)
	}
	decline(s, fromA, addrA)
	decline(s, fromA, addrA) // told once
	if want := []string{"52:54:00:00:00:0a " + addrA.String()}; !slices.Equal(told, want) {
		t.Errorf("told %q, want %q", told, want)
	}
	decline(s, fromA, nextA) // nor is the next one lost before it is given
	if got := exchange(s, fromA); got != nextA {
		t.Fatalf("after a DECLINE: %s, want %s", got, nextA)
	}
	if got := show(s.handle(with(dhcpv6.MessageTypeRenew, idLL, idBox, ia(1, addrA)), fromA)); got != "REPLY 1 na1[fd00:77::5254:0:100:a/3600 fd00:77::5254:0:0:a/0] 2" {
		t.Errorf("RENEW of what was declined: %s", got)
	}
	now = now.Add(heldFor - 1)
	if got := show(s.handle(with(dhcpv6.MessageTypeRenew, idLL, idBox, ia(1, nextA)), fromA)); got != "REPLY 1 na1[fd00:77::5254:0:100:a/3600] 2" {
		t.Errorf("RENEW of the second a day later: %s", got)
	}
	now = now.Add(heldFor - 1)
	if got := offered(s, fromA); got != nextA {
		t.Errorf("SOLICIT less than a day after the second was renewed: %s, want %s", got, nextA)
	}
	now = now.Add(1)
	if got := offered(s, fromA); got != addrA {
		t.Errorf("SOLICIT after a day away: %s, want %s", got, addrA)
	}
	seen := map[netip.Addr]bool{}
	told = nil
	for range 1000 {
		ip := exchange(s, fromA)
		if seen[ip] || !ip.IsValid() {
			t.Fatalf("after %d declines: %s", len(seen), ip)
		}
		seen[ip] = true
		decline(s, fromA, ip)
	}
	if len(told) != mostTold {
		t.Errorf("%d of 1000 declines in a minute are told of, want %d", len(told), mostTold)
	}
}

// TestPreference: an answer with something to boot and no address does not end the
// search for other servers.
func TestPreference(t *testing.T) {
	s := testServer(t)
	for _, tt := range []struct {
		name    string
		options []dhcpv6.Option
		want    string
	}{
		{"an address", []dhcpv6.Option{ia(1)}, "ADVERTISE 1 na1[fd00:77::5254:0:0:a/3600] 59 7=255 2"},
		{"no association", nil, "ADVERTISE 1 59 2"},
		{"only what is not given", []dhcpv6.Option{&dhcpv6.OptIAPD{}}, "ADVERTISE 1 pd0[NoPrefixAvail] 59 2"},
	} {
		m := with(dhcpv6.MessageTypeSolicit, append(append([]dhcpv6.Option{idUUID}, tt.options...), asUEFI...)...)
		if got := show(s.handle(m, fromA)); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
}

// TestHolder: an address is the machine's that it was made for, once it was given,
// and one at a time.
func TestHolder(t *testing.T) {
	now := t0
	s := testServer(t, func(c *Config) { c.Now = func() time.Time { return now } })
	holds := func(when string, ip netip.Addr, want string) {
		t.Helper()
		if mac, ok := s.cfg.Bindings.Holder(own, ip, now); mac != want || ok != (want != "") {
			t.Errorf("%s: Holder(%s) = %q, %v, want %q", when, ip, mac, ok, want)
		}
	}
	const a = "52:54:00:00:00:0a"
	holds("before it asks", addrA, "")
	offered(s, fromA)
	holds("advertised", addrA, "")
	exchange(s, fromA)
	holds("given", addrA, a)
	holds("given another", nextA, "")
	s.handle(with(dhcpv6.MessageTypeRelease, idLL, idBox, ia(1, addrA)), fromA)
	holds("released", addrA, a)
	decline(s, fromA, addrA) // who forged that takes nothing from the machine
	holds("declined", addrA, a)
	holds("declined, the next", nextA, "")
	exchange(s, fromA)
	holds("given the next", nextA, a)
	holds("given the next, the first", addrA, "")
	now = now.Add(heldFor)
	holds("a day later", nextA, "")
	s.handle(with(dhcpv6.MessageTypeSolicit, idLL, ia(1), rapid), fromA)
	holds("given at once", addrA, a)
	// As after the box was started again: what a machine says that it has is bound anew.
	s.cfg.Bindings = new(Bindings)
	s.handle(with(dhcpv6.MessageTypeRebind, idLL, ia(1, nextA)), fromA)
	holds("renewed without a binding", nextA, a)
	confirm := func(ip netip.Addr) string {
		return show(s.handle(with(dhcpv6.MessageTypeConfirm, idLL, ia(1, ip)), fromA))
	}
	s.cfg.Bindings = new(Bindings)
	if got := confirm(AddressOf(own, macB, 0)); got != "REPLY 1 Success 2" { // that is all that it asks
		t.Errorf("CONFIRM of another's address: %s", got)
	}
	holds("confirmed by another", AddressOf(own, macB, 0), "")
	for range 2 {
		if got := confirm(nextA); got != "REPLY 1 Success 2" {
			t.Errorf("CONFIRM: %s", got)
		}
		holds("confirmed", nextA, a)
	}
	if got := confirm(addrA); got != "nothing" {
		t.Errorf("CONFIRM of an address that is not the machine's now: %s", got)
	}
	holds("another confirmed", nextA, a)
}

// TestBindingsAreBounded: made-up MACs push out each other, and no known machine.
func TestBindingsAreBounded(t *testing.T) {
	s := testServer(t, func(c *Config) { c.Known = func(mac string) bool { return mac == "52:54:00:00:00:0a" } })
	exchange(s, fromA)
	for i := range 2 * mostOthers {
		exchange(s, as([6]byte{2, 0, 0, 1, byte(i >> 8), byte(i)}))
	}
	b := s.cfg.Bindings
	if len(b.others) != mostOthers || len(b.known) != 1 {
		t.Errorf("%d and %d bindings, want %d and 1", len(b.others), len(b.known), mostOthers)
	}
	if _, ok := b.Holder(own, addrA, t0); !ok {
		t.Error("made-up MACs take a known machine's address away")
	}
	// Whom somebody vouches for later, or no more, is bound once.
	for i, known := range []bool{true, false} {
		b.give(macB, 0, known, t0)
		if len(b.known) != 2-i || len(b.others) != mostOthers {
			t.Errorf("known %v: %d and %d bindings", known, len(b.known), len(b.others))
		}
	}
	b.give([6]byte{2, 9, 9, 9, 9, 9}, 0, false, t0.Add(heldFor))
	if len(b.others) != mostOthers {
		t.Errorf("%d bindings, want %d", len(b.others), mostOthers)
	}
}

// TestOverAreForgottenFirst: of known machines too so many are remembered; who was away
// for a day gives way to who comes, and nobody else while there is one.
func TestOverAreForgottenFirst(t *testing.T) {
	b, later := new(Bindings), t0.Add(heldFor)
	mac := func(kind byte, i int) [6]byte { return [6]byte{2, kind, 0, 0, byte(i >> 8), byte(i)} }
	for i := range mostKnown / 2 {
		b.give(mac(1, i), 0, true, t0)
		b.give(mac(2, i), 0, true, later)
	}
	for i := range mostKnown / 4 {
		b.give(mac(3, i), 0, true, later)
	}
	if len(b.known) != mostKnown {
		t.Errorf("%d are remembered, want %d", len(b.known), mostKnown)
	}
	for i := range mostKnown / 2 {
		if _, ok := b.of(mac(2, i), later); !ok {
			t.Fatalf("machine %d is forgotten, and %d are kept whose time is over", i, mostKnown/4)
		}
	}
	for i := range mostKnown {
		b.give(mac(4, i), 0, true, later)
	}
	if len(b.known) != mostKnown {
		t.Errorf("where nobody's time is over %d are remembered, want %d", len(b.known), mostKnown)
	}
}

// TestDeclinesCountApart: a flood of a machine's own DECLINEs and RELEASEs leaves it
// what it needs to ask.
func TestDeclinesCountApart(t *testing.T) {
	s, limiter := testServer(t), limit.NewApart()
	for _, kind := range []dhcpv6.MessageType{dhcpv6.MessageTypeDecline, dhcpv6.MessageTypeRelease} {
		passed := 0
		for range 10 * limit.PerBurst {
			if s.sort(limiter, with(kind, idLL, idBox, ia(1, addrA)).ToBytes(), fromA, t0) {
				passed++
			}
		}
		if passed > limit.PerBurst {
			t.Errorf("of a flood of %s pass %d, want at most %d", kind, passed, limit.PerBurst)
		}
	}
	if !s.sort(limiter, with(dhcpv6.MessageTypeSolicit, idLL, ia(1)).ToBytes(), fromA, t0) {
		t.Error("the machine's SOLICIT is dropped")
	}
}

func TestAddresses(t *testing.T) {
	for _, tt := range []struct {
		ip, mac    string
		generation uint16
	}{
		{"fd00:77::5254:0:0:a", "52:54:00:00:00:0a", 0},
		{"fd00:77::5254:0:f00:a", "52:54:00:00:00:0a", 15},
		{"fd00:77::5254:ff:ff00:a", "52:54:00:00:00:0a", 0xffff},
		{"fd00:77::", "", 0},                   // nobody
		{"fd00:77::2", "00:00:00:00:00:02", 0}, // a MAC like any other
		{"fd00:77::ff54:0:0:a", "", 0},         // a group
		{"fd00:78::5254:0:0:a", "", 0},         // another network
		{"fe80::5254:0:0:a", "", 0},            //
		{"10.77.0.1", "", 0},                   //
		{"fd00:77::5254:0:0:a%eth0", "", 0},    // a zone
		{"fd00:77::a8bb:cc00:0dd:eeff", "a8:bb:cc:dd:ee:ff", 0},
	} {
		ip := netip.MustParseAddr(tt.ip)
		mac, generation, ok := machineAt(own, ip)
		if ok != (tt.mac != "") || ok && (net.HardwareAddr(mac[:]).String() != tt.mac || generation != tt.generation) {
			t.Errorf("machineAt(%s) = %x, %d, %v, want %q, %d", tt.ip, mac, generation, ok, tt.mac, tt.generation)
		}
		if ok && AddressOf(own, mac, generation) != ip {
			t.Errorf("AddressOf is not the inverse for %s", tt.ip)
		}
	}
	// What is a server's by chance is not a machine's.
	s := testServer(t, func(c *Config) { c.DNS = addrs("fd00:77::2") })
	if got := exchange(s, as([6]byte{0, 0, 0, 0, 0, 2})); got != netip.MustParseAddr("fd00:77::100:2") {
		t.Errorf("the machine whose first address is the DNS server's gets %v", got)
	}
	// Nor is the box's own.
	if got := exchange(s, as([6]byte{0, 0, 0, 0, 0, 1})); got != netip.MustParseAddr("fd00:77::100:1") {
		t.Errorf("the machine whose first address is the box's gets %v", got)
	}
}

// TestClassify: what real firmware sends. EDK2's and iPXE's as captured.
func TestClassify(t *testing.T) {
	for _, tt := range []struct {
		name    string
		options []dhcpv6.Option
		heard   decide.Arch
		client  string
		arch    int
		uuid    string
	}{
		{"EDK2 PXE", append([]dhcpv6.Option{idUUID}, asUEFI...), 0, "pxe uefi-x64", 7, "01020304-0506-0708-090a-0b0c0d0e0f10"},
		{"EDK2 HTTP boot", append([]dhcpv6.Option{idUUID}, asHTTP...), 0, "http-boot uefi-x64", 16, "01020304-0506-0708-090a-0b0c0d0e0f10"},
		{"EDK2 HTTP boot on arm64", []dhcpv6.Option{idUUID, class("HTTPClient:Arch:00019:UNDI:003001"), archIs(19)}, 0, "http-boot uefi-arm64", 19, "01020304-0506-0708-090a-0b0c0d0e0f10"},
		{"iPXE", []dhcpv6.Option{idUUID, user("iPXE"), class("PXEClient:Arch:00007:UNDI:003010"), archIs(7)}, 0, "ipxe uefi-x64", 7, "04030201-0605-0807-090a-0b0c0d0e0f10"},
		{"an iPXE that tells nothing of itself", []dhcpv6.Option{idLL, user("iPXE")}, 0, "ipxe uefi-x64", -1, ""},
		{"the same, heard before", []dhcpv6.Option{idLL, user("iPXE")}, decide.ARM64, "ipxe uefi-arm64", -1, ""},
		{"a class alone", []dhcpv6.Option{idLL, class("PXEClient:Arch:00009:UNDI:003000")}, 0, "pxe uefi-x64", 9, ""},
		{"a system", []dhcpv6.Option{idUUID}, 0, "system", -1, ""},
		{"no UUID", []dhcpv6.Option{dhcpv6.OptClientID(&dhcpv6.DUIDUUID{}), class("PXEClient:Arch:00007:UNDI:003001")}, 0, "pxe uefi-x64", 7, ""},
	} {
		var asked *Ask
		s := testServer(t, func(c *Config) {
			c.Arch = func(string) decide.Arch { return tt.heard }
			c.Boot = func(a Ask) string { asked = &a; return "" }
			c.Known = func(string) bool { return false } // what the memory adds has its own test
		})
		s.handle(with(dhcpv6.MessageTypeInformationRequest, tt.options...), fromA)
		if asked == nil {
			if tt.client != "system" {
				t.Errorf("%s: not asked what to boot", tt.name)
			}
			continue
		}
		if asked.Client.String() != tt.client || asked.Arch != tt.arch || asked.UUID != tt.uuid || asked.MAC != "52:54:00:00:00:0a" {
			t.Errorf("%s: %s, arch %d, UUID %q of %s, want %s, %d, %q", tt.name, asked.Client, asked.Arch, asked.UUID, asked.MAC, tt.client, tt.arch, tt.uuid)
		}
	}
}

// TestAsk: what Boot is told, and where its answer goes.
func TestAsk(t *testing.T) {
	var asked []string
	s := testServer(t, func(c *Config) {
		c.Boot = func(a Ask) string {
			asked = append(asked, fmt.Sprintf("%s %v", a.IP, a.Final))
			return bootURL
		}
	})
	firmware := func(more ...dhcpv6.Option) []dhcpv6.Option { return append(slices.Clone(more), asHTTP...) }
	inside := fromA
	inside.addr = addrA
	for _, tt := range []struct {
		m    *dhcpv6.Message
		from source
		want string
	}{
		{with(dhcpv6.MessageTypeSolicit, firmware(idUUID, ia(1))...), fromA, addrA.String() + " false"},
		{with(dhcpv6.MessageTypeSolicit, firmware(idUUID, ia(1), rapid)...), fromA, addrA.String() + " true"},
		{with(dhcpv6.MessageTypeRequest, firmware(idUUID, idBox, ia(1, addrA))...), fromA, addrA.String() + " true"},
		{with(dhcpv6.MessageTypeInformationRequest, firmware()...), inside, addrA.String() + " true"},
		{with(dhcpv6.MessageTypeInformationRequest, firmware()...), fromA, "invalid IP true"},
	} {
		asked = nil
		reply := s.handle(tt.m, tt.from)
		if len(asked) != 1 || asked[0] != tt.want {
			t.Errorf("%s: asked %q, want %q once", tt.m.MessageType, asked, tt.want)
		}
		if got := reply.Options.BootFileURL(); got != bootURL {
			t.Errorf("%s: URL %q", tt.m.MessageType, got)
		}
		if got := reply.Options.VendorClass(343); len(got) != 1 || string(got[0]) != "HTTPClient" {
			t.Errorf("%s: vendor class %q, want HTTPClient of the client's own enterprise", tt.m.MessageType, got)
		}
		if all := reply.Options.Options; all[len(all)-1].Code() != dhcpv6.OptionServerID {
			t.Errorf("%s: the URL may stand last", tt.m.MessageType)
		}
	}
	asked = nil
	s.handle(with(dhcpv6.MessageTypeSolicit, idLL, ia(1)), fromA)
	if asked != nil {
		t.Errorf("a system is asked about: %q", asked)
	}
}

// TestLongAnswer: what asks for so much that the answer would be in fragments gets none.
func TestLongAnswer(t *testing.T) {
	s := testServer(t)
	m := with(dhcpv6.MessageTypeSolicit, idLL)
	for i := range 60 {
		m.AddOption(ia(byte(i)))
		data := s.respond(packetIn{m.ToBytes(), fromA})
		if len(data) > maxReply {
			t.Fatalf("%d associations: an answer of %d bytes, want at most %d", i+1, len(data), maxReply)
		}
		if i == 2 && data == nil {
			t.Fatal("three associations: no answer")
		}
		if i == 59 && data != nil {
			t.Error("sixty associations: an answer")
		}
	}
}

// TestAsked: that a client begins is said of who has no address yet.
func TestAsked(t *testing.T) {
	var asked []Ask
	s := testServer(t, func(c *Config) {
		c.Boot = func(a Ask) string { asked = append(asked, a); return bootURL }
	})
	client, server := dhcpv6.OptClientID(&dhcpv6.DUIDUUID{UUID: uuidOfA}), dhcpv6.OptServerID(boxDUID)
	class, arch := &dhcpv6.OptVendorClass{EnterpriseNumber: 343, Data: [][]byte{[]byte("PXEClient:Arch:00007:UNDI:003000")}}, dhcpv6.OptClientArchType(7)
	for _, tt := range []struct {
		m           *dhcpv6.Message
		want, final bool
	}{
		{with(dhcpv6.MessageTypeSolicit, client, class, arch, ia(1)), true, false},
		{with(dhcpv6.MessageTypeRequest, client, server, class, arch, ia(1, addrA)), true, true},
		{with(dhcpv6.MessageTypeRenew, client, server, class, arch, ia(1, addrA)), false, true},
		{with(dhcpv6.MessageTypeRebind, client, class, arch, ia(1, addrA)), false, true},
	} {
		asked = nil
		s.sort(limit.NewApart(), tt.m.ToBytes(), fromA, t0)
		p, ok := s.in.Next(t.Context())
		if !ok {
			t.Fatal("no packet")
		}
		s.respond(p)
		if len(asked) != 1 || asked[0].Asked.Equal(t0) != tt.want || asked[0].Asked.IsZero() == tt.want || asked[0].Final != tt.final {
			t.Errorf("%s: asked %+v, want once, and that it begins: %v", tt.m.MessageType, asked, tt.want)
		}
	}
}
