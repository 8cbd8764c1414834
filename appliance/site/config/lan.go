package config

import (
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strings"
)

// LAN is an interface towards machines and their BMCs.
type LAN struct {
	Port
	// VLAN is an 802.1Q id on the port; 0: the port itself.
	VLAN int `toml:"vlan"`
	// Address is the box's own, with its prefix length.
	Address netip.Prefix `toml:"address"`
	// IPv6 is the box's own IPv6 address, with its prefix length, 64; not valid: none.
	IPv6 netip.Prefix `toml:"ipv6"`
	// DHCP is one of Modes; empty: off.
	DHCP string `toml:"dhcp"`
	// Range holds the first and the last address of the pool.
	Range []netip.Addr `toml:"range"`
	// Takeover serves authoritatively though another server answers.
	Takeover bool `toml:"takeover"`
	// BMC says that BMCs are on this LAN: they get addresses and nothing to boot.
	BMC bool `toml:"bmc"`
	Told
	Reservations []Reservation `toml:"reservation"`
	Relays       []Relay       `toml:"relay"`
}

// Told is what the machines of a subnet are told beside their address.
type Told struct {
	// Gateway is the router.
	Gateway netip.Addr   `toml:"gateway"`
	DNS     []netip.Addr `toml:"dns"`
	Search  []string     `toml:"search"`
	NTP     []netip.Addr `toml:"ntp"`
	Routes  []Route      `toml:"routes"`
	// MTU is not told when it is 0.
	MTU int `toml:"mtu"`
}

// Reservation keeps an address for one MAC.
type Reservation struct {
	MAC     string     `toml:"mac"`
	Address netip.Addr `toml:"address"`
}

// Relay is a subnet behind a DHCP relay.
type Relay struct {
	// Giaddr is the relay's address in the subnet; not valid: any of the subnet's.
	Giaddr netip.Addr `toml:"giaddr"`
	// CircuitID and RemoteID are option 82's, as text or as 0x and hex digits; empty: any.
	CircuitID string       `toml:"circuit_id"`
	RemoteID  string       `toml:"remote_id"`
	Subnet    netip.Prefix `toml:"subnet"`
	Range     []netip.Addr `toml:"range"`
	// Server is how machines there reach the box; not valid: by the LAN's address.
	Server netip.Addr `toml:"server"`
	// Via is the router on the LAN that leads there; not valid: the LAN's gateway.
	Via netip.Addr `toml:"via"`
	Told
}

// Route is "network via router".
type Route struct {
	To  netip.Prefix
	Via netip.Addr
}

// UnmarshalText reads "10.9.0.0/16 via 10.0.0.254".
func (r *Route) UnmarshalText(text []byte) error {
	to, via, ok := strings.Cut(string(text), " via ")
	err := errors.New("want such as \"10.9.0.0/16 via 10.0.0.254\"")
	if !ok {
		return err
	}
	var err1, err2 error
	r.To, err1 = netip.ParsePrefix(strings.TrimSpace(to))
	r.Via, err2 = netip.ParseAddr(strings.TrimSpace(via))
	if cmp.Or(err1, err2) != nil || !r.To.Addr().Is4() || !r.Via.Is4() {
		return err
	}
	if r.To != r.To.Masked() {
		return fmt.Errorf("%s has bits behind its prefix length: want %s", r.To, r.To.Masked())
	}
	return nil
}

// The DHCP modes of a LAN.
const (
	DHCPOff           = "off"
	DHCPAuthoritative = "authoritative"
	DHCPReservations  = "reservations"
	DHCPProxy         = "proxy"
	DHCPRelay         = "relay"
)

// Modes are the values of dhcp.
var Modes = []string{DHCPOff, DHCPAuthoritative, DHCPReservations, DHCPProxy, DHCPRelay}

// Mode is DHCP with its default.
func (l LAN) Mode() string { return cmp.Or(l.DHCP, DHCPOff) }

// Boots says whether machines boot from the box here.
func (l LAN) Boots() bool { return l.Mode() != DHCPOff && !l.BMC }

// ID is the option's bytes of a text such as "eth0/1/7" or 0x0a0b; nil for none.
func ID(text string) ([]byte, error) {
	digits, ok := strings.CutPrefix(text, "0x")
	if !ok {
		if text == "" {
			return nil, nil
		}
		return []byte(text), nil
	}
	return hex.DecodeString(digits)
}

// maxInterface is the longest name of an interface that the kernel takes.
const maxInterface = 15

// Device is the name of the interface that the LAN is on: its port's, or the VLAN's on it.
func (l LAN) Device(ifaces []net.Interface) (string, error) {
	name, err := l.Port.Name(ifaces)
	if err != nil || l.VLAN == 0 {
		return name, err
	}
	device := VLANName(name, l.VLAN)
	if len(device) > maxInterface {
		return "", fmt.Errorf("%s is too long for the name of an interface", device)
	}
	return device, nil
}

// VLANName is the name of the interface for a VLAN on a port.
func VLANName(port string, id int) string { return fmt.Sprintf("%s.%d", port, id) }

// id is Port's, with the VLAN.
func (l LAN) id() string {
	if l.VLAN == 0 {
		return l.Port.id()
	}
	return fmt.Sprintf("%s vlan %d", l.Port.id(), l.VLAN)
}

func (l LAN) checkLAN(where string) error {
	if err := l.Port.check(where); err != nil {
		return err
	}
	if l.MAC == "" && l.Interface == "" {
		return fmt.Errorf("%s: mac or interface is missing", where)
	}
	if l.VLAN < 0 || l.VLAN > 4094 {
		return fmt.Errorf("%s: vlan = %d: want 1 to 4094, or 0 for none", where, l.VLAN)
	}
	if name := VLANName(l.Interface, l.VLAN); l.Interface != "" && l.VLAN != 0 && len(name) > maxInterface {
		return fmt.Errorf("%s: vlan = %d: %s is too long for the name of an interface: pick the port by mac", where, l.VLAN, name)
	}
	if !l.Address.IsValid() || !l.Address.Addr().Is4() {
		return fmt.Errorf("%s: address is missing or not IPv4 with prefix length, such as 10.0.0.1/24", where)
	}
	mode := l.Mode()
	if !slices.Contains(Modes, mode) {
		return fmt.Errorf("%s: dhcp = %q: want one of %s", where, l.DHCP, strings.Join(Modes, ", "))
	}
	if err := l.checkKeys(where, mode); err != nil {
		return err
	}
	network := l.Address.Masked()
	if len(l.Range) > 0 || mode == DHCPAuthoritative {
		if err := checkRange(where, network, l.Range); err != nil {
			return err
		}
		if own := l.Address.Addr(); !own.Less(l.Range[0]) && !l.Range[1].Less(own) {
			return fmt.Errorf("%s: range holds the box's own address %s", where, own)
		}
	}
	if l.Gateway == l.Address.Addr() {
		return fmt.Errorf("%s: gateway = %s is the box's own address, and the box forwards nothing", where, l.Gateway)
	}
	if err := l.Told.check(where, network, l.IPv6.IsValid()); err != nil {
		return err
	}
	if err := l.checkIPv6(where); err != nil {
		return err
	}
	return l.checkSubnets(where)
}

// machineBits are those of an IPv6 address that are made from a machine's MAC.
const machineBits = 64

func (l LAN) checkIPv6(where string) error {
	a := l.IPv6.Addr()
	switch {
	case !l.IPv6.IsValid():
		return nil
	case !a.Is6() || a.Is4In6() || l.IPv6.Bits() != 128-machineBits || !a.IsGlobalUnicast() || l.IPv6 == l.IPv6.Masked():
		return fmt.Errorf("%s: ipv6 = %q: want the box's own address with prefix length %d, such as fd00:10::1/64", where, l.IPv6, 128-machineBits)
	case l.BMC:
		return fmt.Errorf("%s: ipv6 is set and bmc is true: BMCs are given IPv4 addresses only", where)
	case l.MTU != 0 && l.MTU < leastMTU6:
		return fmt.Errorf("%s: mtu = %d: with ipv6 want at least %d", where, l.MTU, leastMTU6)
	}
	return nil
}

// leastMTU6 is what every link with IPv6 carries.
const leastMTU6 = 1280

// checkKeys refuses what a mode would not look at: nobody is to believe in it.
func (l LAN) checkKeys(where, mode string) error {
	gives := []string{DHCPAuthoritative, DHCPReservations}
	for _, k := range []struct {
		key   string
		set   bool
		modes []string
	}{
		{"range", len(l.Range) > 0, []string{DHCPAuthoritative}},
		{"ipv6", l.IPv6.IsValid(), []string{DHCPAuthoritative}},
		{"takeover", l.Takeover, []string{DHCPAuthoritative}},
		{"bmc", l.BMC, []string{DHCPAuthoritative, DHCPReservations, DHCPRelay}},
		{"gateway", l.Gateway.IsValid(), []string{DHCPAuthoritative, DHCPReservations, DHCPRelay}},
		{"dns", len(l.DNS) > 0, gives},
		{"search", len(l.Search) > 0, gives},
		{"ntp", len(l.NTP) > 0, gives},
		{"routes", len(l.Routes) > 0, gives},
		{"mtu", l.MTU != 0, gives},
		{"reservation", len(l.Reservations) > 0, []string{DHCPAuthoritative, DHCPReservations, DHCPRelay}},
		{"relay", len(l.Relays) > 0, []string{DHCPAuthoritative, DHCPRelay}},
	} {
		if k.set && !slices.Contains(k.modes, mode) {
			return fmt.Errorf("%s: %s is set but dhcp is %s: want it with %s only", where, k.key, mode, strings.Join(k.modes, ", "))
		}
	}
	if mode == DHCPRelay && len(l.Relays) == 0 {
		return fmt.Errorf("%s: dhcp is relay: want a [[lan.relay]] for each subnet behind one", where)
	}
	return nil
}

func checkRange(where string, network netip.Prefix, ends []netip.Addr) error {
	if len(ends) != 2 {
		return fmt.Errorf("%s: range needs two addresses, the first and the last", where)
	}
	for _, a := range ends {
		if !network.Contains(a) {
			return fmt.Errorf("%s: range address %s is outside of %s", where, a, network)
		}
	}
	if ends[1].Less(ends[0]) {
		return fmt.Errorf("%s: range ends (%s) before it starts (%s)", where, ends[1], ends[0])
	}
	return nil
}

var domainName = regexp.MustCompile(`^([a-zA-Z0-9_]([a-zA-Z0-9_-]{0,61}[a-zA-Z0-9_])?\.)*[a-zA-Z0-9_]([a-zA-Z0-9_-]{0,61}[a-zA-Z0-9_])?$`)

// check takes what one DHCP answer can hold. IPv6 servers are told where ipv6 is served.
func (t Told) check(where string, network netip.Prefix, ipv6 bool) error {
	if t.Gateway.IsValid() && !network.Contains(t.Gateway) {
		return fmt.Errorf("%s: gateway = %s: want an address of %s", where, t.Gateway, network)
	}
	for _, list := range []struct {
		key   string
		addrs []netip.Addr
	}{{"dns", t.DNS}, {"ntp", t.NTP}} {
		if len(list.addrs) > 8 {
			return fmt.Errorf("%s: %s holds %d addresses: want at most 8", where, list.key, len(list.addrs))
		}
		for _, a := range list.addrs {
			switch {
			case a.Is4():
			case !a.Is6() || a.Is4In6() || a.Zone() != "":
				return fmt.Errorf("%s: %s holds %q: want IP addresses, without a zone", where, list.key, a)
			case !ipv6:
				return fmt.Errorf("%s: %s holds %q: want IPv4 addresses, for ipv6 is not served here", where, list.key, a)
			}
		}
	}
	if len(t.Search) > 6 {
		return fmt.Errorf("%s: search holds %d names: want at most 6", where, len(t.Search))
	}
	for _, name := range t.Search {
		if len(name) > 253 || !domainName.MatchString(name) {
			return fmt.Errorf("%s: search holds %.100q: want domain names such as example.net", where, name)
		}
	}
	if len(t.Routes) > 16 {
		return fmt.Errorf("%s: routes holds %d: want at most 16", where, len(t.Routes))
	}
	for _, r := range t.Routes {
		if !network.Contains(r.Via) {
			return fmt.Errorf("%s: routes holds one by %s: want a router in %s", where, r.Via, network)
		}
	}
	if t.MTU != 0 && (t.MTU < 576 || t.MTU > 9216) {
		return fmt.Errorf("%s: mtu = %d: want 576 to 9216, or 0 for none", where, t.MTU)
	}
	return nil
}

// checkSubnets checks relays and reservations, which lie in the LAN or behind one.
func (l LAN) checkSubnets(where string) error {
	subnets := []netip.Prefix{l.Address.Masked()}
	seen := map[string]int{}
	for i, r := range l.Relays {
		at := fmt.Sprintf("%s, relay %d", where, i+1)
		if err := r.check(at, l); err != nil {
			return err
		}
		key := fmt.Sprintf("%s %s %q %q", r.Giaddr, r.Subnet, r.CircuitID, r.RemoteID)
		for _, other := range subnets {
			if other.Overlaps(r.Subnet) {
				return fmt.Errorf("%s: subnet %s overlaps %s", at, r.Subnet, other)
			}
		}
		if first, ok := seen[key]; ok {
			return fmt.Errorf("%s: it is for the same requests as relay %d", at, first)
		}
		seen[key] = i + 1
		subnets = append(subnets, r.Subnet)
	}
	byMAC, byAddress := map[string]bool{}, map[netip.Addr]bool{}
	for i, r := range l.Reservations {
		at := fmt.Sprintf("%s, reservation %d", where, i+1)
		mac, err := net.ParseMAC(r.MAC)
		if err != nil || len(mac) != 6 {
			return fmt.Errorf("%s: mac = %q: want six bytes such as 52:54:00:12:34:56", at, r.MAC)
		}
		in := slices.IndexFunc(subnets, func(p netip.Prefix) bool { return p.Contains(r.Address) })
		if in < 0 {
			return fmt.Errorf("%s: address = %q: want one of %s", at, r.Address, join(subnets))
		}
		if r.Address == l.Address.Addr() {
			return fmt.Errorf("%s: address = %s is the box's own", at, r.Address)
		}
		key := fmt.Sprintf("%s %d", mac, in)
		if byMAC[key] {
			return fmt.Errorf("%s: %s has an address in %s already", at, mac, subnets[in])
		}
		byMAC[key] = true
		if byAddress[r.Address] {
			return fmt.Errorf("%s: %s is reserved for another already", at, r.Address)
		}
		byAddress[r.Address] = true
	}
	return nil
}

func (r Relay) check(where string, l LAN) error {
	if !r.Subnet.IsValid() || !r.Subnet.Addr().Is4() || r.Subnet != r.Subnet.Masked() {
		return fmt.Errorf("%s: subnet = %q: want an IPv4 network such as 10.5.0.0/24", where, r.Subnet)
	}
	for _, a := range []struct {
		key  string
		addr netip.Addr
	}{{"giaddr", r.Giaddr}, {"server", r.Server}, {"via", r.Via}} {
		if a.addr.IsValid() && !a.addr.Is4() {
			return fmt.Errorf("%s: %s = %q: want an IPv4 address", where, a.key, a.addr)
		}
	}
	for _, id := range []struct{ key, text string }{{"circuit_id", r.CircuitID}, {"remote_id", r.RemoteID}} {
		if b, err := ID(id.text); err != nil || len(b) > 255 || id.text == "0x" {
			return fmt.Errorf("%s: %s = %.100q: want text, or 0x and pairs of hex digits, of at most 255 bytes", where, id.key, id.text)
		}
	}
	if len(r.Range) > 0 || len(l.Reservations) == 0 {
		if err := checkRange(where, r.Subnet, r.Range); err != nil {
			return err
		}
	}
	if via := r.Router(l); !l.Address.Masked().Contains(via) || via == l.Address.Addr() {
		return fmt.Errorf("%s: no router leads to %s: want via, or the lan's gateway, to be another address of %s", where, r.Subnet, l.Address.Masked())
	}
	return r.Told.check(where, r.Subnet, false)
}

// Router is the LAN's router towards the subnet.
func (r Relay) Router(l LAN) netip.Addr {
	if r.Via.IsValid() {
		return r.Via
	}
	return l.Gateway
}

// ServerFor is the box's address for the machines there.
func (r Relay) ServerFor(l LAN) netip.Addr {
	if r.Server.IsValid() {
		return r.Server
	}
	return l.Address.Addr()
}

func join(prefixes []netip.Prefix) string {
	var b strings.Builder
	for i, p := range prefixes {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(p.String())
	}
	return b.String()
}
