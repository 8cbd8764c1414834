package network

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/site/netnstest"
)

func TestVLANMessage(t *testing.T) {
	got := vlan(7, "eth1.42", 42)
	if got.ParentIndex != 7 || got.Name != "eth1.42" || got.VlanId != 42 || got.VlanProtocol != netlink.VLAN_PROTOCOL_8021Q || got.Type() != "vlan" {
		t.Errorf("vlan(7, eth1.42, 42) = %+v of type %s", got, got.Type())
	}
}

// TestVLANInKernel makes one, twice, and refuses a name that is another's.
func TestVLANInKernel(t *testing.T) {
	a, b := netnstest.New(t), netnstest.New(t)
	a.Wire("eth1", netip.MustParsePrefix("192.0.2.1/24"), b, "far", netip.MustParsePrefix("192.0.2.2/24"))
	a.Do(func() {
		var k Kernel
		if err := k.VLAN("eth1", "eth1", 42); err == nil {
			t.Error("VLAN(eth1, eth1, 42) = nil, want that the name is taken")
		}
		if err := k.VLAN("eth9", "eth9.42", 42); err == nil {
			t.Error("VLAN on a missing port = nil, want an error")
		}
		err := k.VLAN("eth1", "eth1.42", 42)
		if errors.Is(err, unix.EOPNOTSUPP) {
			return // told below, outside of this goroutine
		}
		for _, again := range []int{42, 43} {
			if got := k.VLAN("eth1", "eth1.42", again); err != nil || (got == nil) != (again == 42) {
				t.Errorf("VLAN(eth1, eth1.42, 42) = %v, and %d under that name = %v", err, again, got)
			}
		}
	})
	if !vlansKnown(a) {
		t.Skip("needs 802.1Q in the kernel")
	}
}

func vlansKnown(n *netnstest.Namespace) (known bool) {
	n.Do(func() { _, err := netlink.LinkByName("eth1.42"); known = err == nil })
	return known
}

// TestAdd6InKernel gives an address beside IPv4's, however often it is set, and
// shuts the interface to what says that it is a router.
func TestAdd6InKernel(t *testing.T) {
	a, b := netnstest.New(t), netnstest.New(t)
	a.Wire("eth1", netip.MustParsePrefix("192.0.2.1/24"), b, "far", netip.MustParsePrefix("192.0.2.2/24"))
	a.Do(func() {
		var k Kernel
		address := netip.MustParsePrefix("fd00:77::1/64")
		for range 2 {
			if err := k.Add6("eth1", address); err != nil {
				t.Errorf("Add6 = %v", err)
			}
		}
		if err := k.Set("eth1", netip.MustParsePrefix("192.0.2.1/24"), netip.Addr{}, 0); err != nil {
			t.Errorf("Set = %v", err)
		}
		link, err := netlink.LinkByName("eth1")
		if err != nil {
			t.Error(err)
			return
		}
		addrs, err := netlink.AddrList(link, netlink.FAMILY_ALL)
		if text := fmt.Sprint(addrs); err != nil || !strings.Contains(text, "fd00:77::1/64") || !strings.Contains(text, "192.0.2.1/24") {
			t.Errorf("addresses = %v, %v, want both", addrs, err)
		}
		if got, err := os.ReadFile("/proc/sys/net/ipv6/conf/eth1/accept_ra"); err == nil && strings.TrimSpace(string(got)) != "0" {
			t.Errorf("accept_ra = %s", got)
		}
		if err := k.Add6("eth9", address); err == nil {
			t.Error("Add6 on a missing interface = nil, want an error")
		}
	})
}

// TestRoutes leads to a network behind a router, however often it is set.
func TestRoutes(t *testing.T) {
	a, b := netnstest.New(t), netnstest.New(t)
	a.Wire("eth1", netip.MustParsePrefix("192.0.2.1/24"), b, "far", netip.MustParsePrefix("192.0.2.2/24"))
	a.Do(func() {
		var k Kernel
		r := Route{netip.MustParsePrefix("10.5.0.0/24"), netip.MustParseAddr("192.0.2.2")}
		for range 2 {
			if err := k.Route("eth1", r); err != nil {
				t.Errorf("Route(eth1, %v) = %v", r, err)
			}
		}
		got, err := netlink.RouteGet([]byte{10, 5, 0, 9})
		if err != nil || len(got) != 1 || got[0].Gw.String() != "192.0.2.2" {
			t.Errorf("route to 10.5.0.9 = %v, %v, want it by 192.0.2.2", got, err)
		}
		if err := k.Route("eth1", Route{r.To, netip.MustParseAddr("198.51.100.1")}); err == nil {
			t.Error("a router of another network = nil, want an error")
		}
	})
}
