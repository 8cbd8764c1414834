package bound

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/site/netnstest"
)

// dial waits for what is to be reached as long as it takes: a wire's first packets
// may be lost.
func dial(ns *netnstest.Namespace, network, address string, reached bool) (err error) {
	within := time.Second
	if reached {
		within = 20 * time.Second
	}
	ns.Do(func() {
		var c net.Conn
		if c, err = net.DialTimeout(network, address, within); err == nil {
			_ = c.Close()
		}
	})
	return err
}

// A neighbour on the uplink can send to the box's LAN address, and Linux hands
// it to any listener there: the bound one alone is out of reach.
func TestListenIsOnOneInterface(t *testing.T) {
	box, neighbour, machine := netnstest.New(t), netnstest.New(t), netnstest.New(t)
	box.Wire("uplink", netip.MustParsePrefix("192.0.2.1/24"), neighbour, "eth0", netip.MustParsePrefix("192.0.2.2/24"))
	box.Wire("lan", netip.MustParsePrefix("10.0.0.1/24"), machine, "eth0", netip.MustParsePrefix("10.0.0.2/24"))
	neighbour.Route(netip.MustParsePrefix("10.0.0.0/24"), netip.MustParseAddr("192.0.2.1"))

	var bound, open net.Listener
	var boundUDP *net.UDPConn
	var openUDP net.PacketConn
	box.Do(func() {
		var errs [4]error
		bound, errs[0] = Listen(t.Context(), "lan", netip.MustParseAddrPort("10.0.0.1:80"))
		open, errs[1] = net.Listen("tcp", "10.0.0.1:81")
		boundUDP, errs[2] = ListenPacket(t.Context(), "lan", netip.MustParseAddrPort("0.0.0.0:67"))
		openUDP, errs[3] = net.ListenPacket("udp4", "0.0.0.0:69")
		for _, err := range errs {
			if err != nil {
				t.Error(err)
			}
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	for _, c := range []interface{ Close() error }{bound, open, boundUDP, openUDP} {
		defer c.Close()
	}
	for _, tt := range []struct {
		name    string
		from    *netnstest.Namespace
		address string
		reached bool
	}{
		{"the machine, bound", machine, "10.0.0.1:80", true},
		{"the machine, open", machine, "10.0.0.1:81", true},
		{"the neighbour, bound", neighbour, "10.0.0.1:80", false},
		{"the neighbour, open", neighbour, "10.0.0.1:81", true},
	} {
		if err := dial(tt.from, "tcp", tt.address, tt.reached); (err == nil) != tt.reached {
			t.Errorf("%s: dial(%s) = %v, want reached %v", tt.name, tt.address, err, tt.reached)
		}
	}
	for _, tt := range []struct {
		name    string
		from    *netnstest.Namespace
		address string
		on      net.PacketConn
		reached bool
	}{
		{"the machine, bound", machine, "10.0.0.1:67", boundUDP, true},
		{"the neighbour, open", neighbour, "192.0.2.1:69", openUDP, true},
		{"the neighbour, bound", neighbour, "192.0.2.1:67", boundUDP, false},
	} {
		tt.from.Do(func() {
			c, err := net.Dial("udp4", tt.address)
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			_, _ = c.Write([]byte("x"))
		})
		within := 300 * time.Millisecond
		if tt.reached {
			within = 20 * time.Second
		}
		_ = tt.on.SetReadDeadline(time.Now().Add(within))
		if _, _, err := tt.on.ReadFrom(make([]byte, 8)); (err == nil) != tt.reached {
			t.Errorf("%s: UDP to %s arrived: %v, want %v", tt.name, tt.address, err == nil, tt.reached)
		}
	}
}

func TestNeedsAnInterface(t *testing.T) {
	at := netip.MustParseAddrPort("127.0.0.1:0")
	for iface, want := range map[string]bool{"": false, "nosuch0": false, "lo": true} {
		ln, err := Listen(t.Context(), iface, at)
		if (err == nil) != want {
			t.Errorf("Listen(%q) = %v, want success %v", iface, err, want)
		}
		if err == nil {
			ln.Close()
		}
		conn, err := ListenPacket(t.Context(), iface, at)
		if (err == nil) != want {
			t.Errorf("ListenPacket(%q) = %v, want success %v", iface, err, want)
		}
		if err == nil {
			conn.Close()
		}
	}
}

// An IPv6 socket is IPv6's alone: both kinds can have the port.
func TestFamilies(t *testing.T) {
	all, err := Listen(t.Context(), "lo", netip.MustParseAddrPort("0.0.0.0:0"))
	if err != nil {
		t.Fatal(err)
	}
	defer all.Close()
	port := netip.MustParseAddrPort(all.Addr().String()).Port()
	six, err := Listen(t.Context(), "lo", netip.AddrPortFrom(netip.IPv6Unspecified(), port))
	if err != nil {
		t.Fatalf("beside IPv4: %v", err)
	}
	six.Close()
	conn, err := ListenPacket(t.Context(), "lo", netip.MustParseAddrPort("[::1]:0"))
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
}
