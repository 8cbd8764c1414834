// Package network brings the box's and the machine's interfaces up, each on
// its own, and keeps their leases.
package network

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/better-compute/site-appliance/appliance/site/config"
)

// Interface is one wired interface of the machine.
type Interface struct {
	Name string
	MAC  string
}

// Wired lists the interfaces that have hardware behind them, by name.
func Wired(sysClassNet string) ([]Interface, error) {
	entries, err := os.ReadDir(sysClassNet)
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	var out []Interface
	for _, e := range entries {
		dir := filepath.Join(sysClassNet, e.Name())
		if _, err := os.Stat(filepath.Join(dir, "device")); err != nil {
			continue
		}
		if _, err := os.Stat(filepath.Join(dir, "wireless")); err == nil {
			continue
		}
		if strings.TrimSpace(read(filepath.Join(dir, "type"))) != "1" { // ARPHRD_ETHER
			continue
		}
		out = append(out, Interface{Name: e.Name(), MAC: strings.TrimSpace(read(filepath.Join(dir, "address")))})
	}
	slices.SortFunc(out, func(a, b Interface) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

func read(path string) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return string(data)
}

// Static is an address that an interface gets without asking.
type Static struct {
	Interface string
	Address   netip.Prefix
	// IPv6 is a further address; not valid: none.
	IPv6    netip.Prefix
	Gateway netip.Addr
	DNS     []netip.Addr
	// VLAN is Interface's 802.1Q id on Port; 0: it is a port itself.
	VLAN int
	Port string
	// Routes lead to what is behind routers on the interface.
	Routes []Route
}

// Route is a network and the router that leads there.
type Route struct {
	To  netip.Prefix
	Via netip.Addr
}

// Plan is what the interfaces that are there are for.
type Plan struct {
	// Uplink lists the candidates that ask for a lease; the first that gets one is it.
	Uplink []string
	// UplinkStatic replaces asking.
	UplinkStatic *Static
	LANs         []Static
	// Missing names what the configuration wants and is not there (yet).
	Missing []string
}

// Decide plans a box's networks.
func Decide(site *config.Site, ifaces []Interface) Plan {
	var plan Plan
	there := make([]net.Interface, 0, len(ifaces))
	for _, i := range ifaces {
		mac, err := net.ParseMAC(i.MAC)
		if err != nil {
			mac = nil
		}
		there = append(there, net.Interface{Name: i.Name, HardwareAddr: mac})
	}
	taken, trunks := map[string]bool{}, map[string]bool{}
	for n, l := range site.LAN {
		name, err := l.Device(there)
		if err != nil {
			plan.Missing = append(plan.Missing, fmt.Sprintf("lan %d: %v", n+1, err))
			continue
		}
		if taken[name] {
			plan.Missing = append(plan.Missing, fmt.Sprintf("lan %d: %s is another lan already", n+1, name))
			continue
		}
		taken[name] = true
		static := Static{Interface: name, Address: l.Address, IPv6: l.IPv6}
		if l.VLAN != 0 {
			static.VLAN = l.VLAN
			static.Port, _ = l.Name(there)
			trunks[static.Port] = true
		}
		for _, r := range l.Relays {
			static.Routes = append(static.Routes, Route{To: r.Subnet, Via: r.Router(l)})
		}
		plan.LANs = append(plan.LANs, static)
	}
	up := site.Uplink
	if up.MAC != "" || up.Interface != "" {
		name, err := up.Name(there)
		switch {
		case err != nil:
			plan.Missing = append(plan.Missing, fmt.Sprintf("uplink: %v", err))
		case taken[name]:
			plan.Missing = append(plan.Missing, fmt.Sprintf("uplink: %s is a lan already", name))
		default:
			plan.Uplink = []string{name}
		}
	} else if len(plan.Missing) == 0 {
		// While a LAN's interface is unknown, none may be taken for the uplink.
		for _, i := range ifaces {
			// What goes untagged beside VLANs is the uplink's only if it is said.
			if !taken[i.Name] && !trunks[i.Name] {
				plan.Uplink = append(plan.Uplink, i.Name)
			}
		}
		if len(plan.Uplink) == 0 {
			plan.Missing = append(plan.Missing, "uplink: no wired interface is left for it")
		}
	}
	if up.Address == "" || up.Address == "dhcp" || len(plan.Uplink) == 0 {
		return plan
	}
	// The configuration was checked when it was read.
	static := &Static{Interface: plan.Uplink[0]}
	static.Address, _ = netip.ParsePrefix(up.Address)
	static.Gateway, _ = netip.ParseAddr(up.Gateway)
	for _, d := range up.DNS {
		if a, err := netip.ParseAddr(d); err == nil {
			static.DNS = append(static.DNS, a)
		}
	}
	if len(plan.Uplink) > 1 {
		plan.Missing = append(plan.Missing, "uplink: a fixed address needs mac or interface: "+strings.Join(plan.Uplink, ", ")+" are there")
		plan.Uplink = nil
		return plan
	}
	plan.UplinkStatic, plan.Uplink = static, nil
	return plan
}

// ResolvConf is the resolver's file.
func ResolvConf(servers []netip.Addr) []byte {
	var b strings.Builder
	for _, s := range servers {
		fmt.Fprintf(&b, "nameserver %s\n", s)
	}
	return []byte(b.String())
}
