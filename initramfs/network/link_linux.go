package network

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Links changes interfaces.
type Links interface {
	// Up brings an interface up.
	Up(name string) error
	// Set makes address the interface's only IPv4 address, and gateway, if
	// valid, its default route.
	Set(name string, address netip.Prefix, gateway netip.Addr, metric int) error
	// Add6 adds an IPv6 address, unless it is there, and lets the interface take
	// neither another nor a router from what it hears.
	Add6(name string, address netip.Prefix) error
	// Clear takes IPv4 addresses off.
	Clear(name string) error
	// VLAN makes the interface name for an 802.1Q id on a port, unless it is there.
	VLAN(port, name string, id int) error
	// Route leads to a network through a router on the interface.
	Route(name string, r Route) error
}

// Kernel is the running system's links.
type Kernel struct{}

// Up implements Links.
func (Kernel) Up(name string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find interface %s: %w", name, err)
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("bring %s up: %w", name, err)
	}
	return nil
}

// Set implements Links.
func (Kernel) Set(name string, address netip.Prefix, gateway netip.Addr, metric int) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find interface %s: %w", name, err)
	}
	want := &netlink.Addr{IPNet: ipNet(address)}
	old, err := netlink.AddrList(link, netlink.FAMILY_V4)
	if err != nil {
		return fmt.Errorf("list addresses of %s: %w", name, err)
	}
	have := false
	for _, a := range old {
		if a.IPNet.String() == want.IPNet.String() {
			have = true
			continue
		}
		if err := netlink.AddrDel(link, &a); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return fmt.Errorf("take %s off %s: %w", a.IPNet, name, err)
		}
	}
	if !have {
		if err := netlink.AddrAdd(link, want); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("give %s to %s: %w", address, name, err)
		}
	}
	if !gateway.IsValid() {
		return nil
	}
	route := &netlink.Route{LinkIndex: link.Attrs().Index, Gw: gateway.AsSlice(), Priority: metric, Protocol: unix.RTPROT_DHCP}
	if !address.Contains(gateway) { // a point-to-point gateway
		route.Flags = int(netlink.FLAG_ONLINK)
	}
	if err := netlink.RouteReplace(route); err != nil {
		return fmt.Errorf("route by %s on %s: %w", gateway, name, err)
	}
	return nil
}

// Add6 implements Links.
func (Kernel) Add6(name string, address netip.Prefix) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find interface %s: %w", name, err)
	}
	// A machine that says it is a router must not become the box's way out.
	key := filepath.Join("/proc/sys/net/ipv6/conf", name, "accept_ra")
	if err := os.WriteFile(key, []byte("0"), 0o644); err != nil {
		return fmt.Errorf("let %s hear no routers: %w", name, err)
	}
	if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: ipNet(address)}); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("give %s to %s: %w", address, name, err)
	}
	return nil
}

// Clear implements Links.
func (Kernel) Clear(name string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find interface %s: %w", name, err)
	}
	addrs, err := netlink.AddrList(link, netlink.FAMILY_V4)
	if err != nil {
		return fmt.Errorf("list addresses of %s: %w", name, err)
	}
	for _, a := range addrs {
		if err := netlink.AddrDel(link, &a); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return fmt.Errorf("take %s off %s: %w", a.IPNet, name, err)
		}
	}
	return nil
}

// VLAN implements Links.
func (Kernel) VLAN(port, name string, id int) error {
	parent, err := netlink.LinkByName(port)
	if err != nil {
		return fmt.Errorf("find interface %s: %w", port, err)
	}
	want := vlan(parent.Attrs().Index, name, id)
	if there, err := netlink.LinkByName(name); err == nil {
		if is, ok := there.(*netlink.Vlan); !ok || is.VlanId != id || is.ParentIndex != want.ParentIndex {
			return fmt.Errorf("make %s: an interface of that name is there and is not VLAN %d on %s", name, id, port)
		}
		return nil
	}
	if err := netlink.LinkAdd(want); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("make VLAN %d on %s: %w", id, port, err)
	}
	return nil
}

func vlan(parent int, name string, id int) *netlink.Vlan {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex = name, parent
	return &netlink.Vlan{LinkAttrs: attrs, VlanId: id, VlanProtocol: netlink.VLAN_PROTOCOL_8021Q}
}

// Route implements Links.
func (Kernel) Route(name string, r Route) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find interface %s: %w", name, err)
	}
	route := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(r.To), Gw: r.Via.AsSlice()}
	if err := netlink.RouteReplace(route); err != nil {
		return fmt.Errorf("route to %s by %s on %s: %w", r.To, r.Via, name, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// Harden keeps the kernel from forwarding, and from answering on one interface
// for an address of another, and has it remember more neighbours than the thousand
// of its own choice, which a hall of machines, or a host that makes up addresses,
// fills: who is not in the table is out of reach. procSysNet is /proc/sys/net.
func Harden(procSysNet string) error {
	var errs []error
	for _, s := range []struct{ key, value string }{
		{"ipv4/ip_forward", "0"},
		{"ipv4/conf/all/arp_ignore", "1"},
		{"ipv4/conf/all/arp_announce", "2"},
		{"ipv4/conf/all/rp_filter", "1"},
		{"ipv4/conf/default/rp_filter", "1"},
		{"ipv4/conf/all/accept_redirects", "0"},
		{"ipv4/conf/default/accept_redirects", "0"},
		{"ipv4/conf/all/send_redirects", "0"},
	} {
		if err := os.WriteFile(filepath.Join(procSysNet, s.key), []byte(s.value), 0o644); err != nil {
			errs = append(errs, fmt.Errorf("set net.%s: %w", strings.ReplaceAll(s.key, "/", "."), err))
		}
	}
	for _, family := range []string{"ipv4", "ipv6"} {
		table := filepath.Join(procSysNet, family, "neigh", "default")
		if _, err := os.Stat(table); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		for _, s := range []struct{ key, value string }{{"gc_thresh3", "32768"}, {"gc_thresh2", "16384"}, {"gc_thresh1", "4096"}} {
			if err := os.WriteFile(filepath.Join(table, s.key), []byte(s.value), 0o644); err != nil {
				errs = append(errs, fmt.Errorf("set net.%s.neigh.default.%s: %w", family, s.key, err))
			}
		}
	}
	return errors.Join(errs...)
}
