package reach

import (
	"net/netip"
	"slices"
	"testing"
)

func TestRefuse(t *testing.T) {
	own := []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("2001:db8::1")}
	bmc := netip.MustParseAddr("10.0.0.5")
	for in, want := range map[string]string{
		"10.0.0.9": "", "203.0.113.7": "", "2001:db8::9": "", "fd00::9": "",
		"10.0.0.1": "is the box itself", "2001:db8::1": "is the box itself", "127.0.0.1": "is the box itself", "127.9.9.9": "is the box itself", "::1": "is the box itself",
		"10.0.0.5": "is a BMC",
		"0.0.0.0":  "is no address of one host", "::": "is no address of one host", "224.0.0.1": "is no address of one host", "ff02::1": "is no address of one host", "255.255.255.255": "is no address of one host",
		"169.254.169.254": "is a link-local address", "fe80::9": "is a link-local address",
		"fe80::9%eth0":    "has a zone",
		"::ffff:10.0.0.9": "is an IPv4 address in IPv6's form",
		"64:ff9b::a00:5":  "is an IPv6 address that stands for an IPv4 one", "2002:a00:5::1": "is an IPv6 address that stands for an IPv4 one",
	} {
		got := Refuse(netip.MustParseAddr(in), own, func(a netip.Addr) bool { return a == bmc })
		if got != want {
			t.Errorf("Refuse(%s) = %q, want %q", in, got, want)
		}
	}
}

func TestOwnHasTheLoopback(t *testing.T) {
	own, err := Own()
	if err != nil {
		t.Fatal(err)
	}
	if want := netip.MustParseAddr("127.0.0.1"); !slices.Contains(own, want) {
		t.Errorf("Own() = %v, want %v among them", own, want)
	}
}
