package firewall

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"github.com/better-compute/site-appliance/appliance/site/netnstest"
)

// site is a box with an uplink to a neighbour and a LAN to a machine.
type site struct {
	t                       *testing.T
	box, neighbour, machine *netnstest.Namespace
}

const (
	boxUplink, neighbourAddr = "192.0.2.1", "192.0.2.2"
	boxLAN, machineAddr      = "10.0.0.1", "10.0.0.2"
)

func newSite(t *testing.T) *site {
	s := &site{t: t, box: netnstest.New(t), neighbour: netnstest.New(t), machine: netnstest.New(t)}
	s.box.Wire("uplink", netip.MustParsePrefix(boxUplink+"/24"), s.neighbour, "eth0", netip.MustParsePrefix(neighbourAddr+"/24"))
	s.box.Wire("lan", netip.MustParsePrefix(boxLAN+"/24"), s.machine, "eth0", netip.MustParsePrefix(machineAddr+"/24"))
	s.neighbour.Route(netip.MustParsePrefix("10.0.0.0/24"), netip.MustParseAddr(boxUplink))
	s.machine.Route(netip.MustParsePrefix("192.0.2.0/24"), netip.MustParseAddr(boxLAN))
	return s
}

// echo answers on network and address inside ns, until the test ends.
func (s *site) echo(ns *netnstest.Namespace, network, address string) {
	s.t.Helper()
	var wg sync.WaitGroup
	ns.Do(func() {
		if network == "udp4" {
			c, err := net.ListenPacket(network, address)
			if err != nil {
				s.t.Error(err)
				return
			}
			s.t.Cleanup(func() { _ = c.Close(); wg.Wait() })
			wg.Go(func() {
				buf := make([]byte, 64)
				for {
					n, from, err := c.ReadFrom(buf)
					if err != nil {
						return
					}
					_, _ = c.WriteTo(buf[:n], from)
				}
			})
			return
		}
		l, err := net.Listen(network, address)
		if err != nil {
			s.t.Error(err)
			return
		}
		s.t.Cleanup(func() { _ = l.Close(); wg.Wait() })
		wg.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				buf := make([]byte, 64)
				_ = c.SetDeadline(time.Now().Add(time.Second))
				if n, err := c.Read(buf); err == nil {
					_, _ = c.Write(buf[:n])
				}
				_ = c.Close()
			}
		})
	})
}

const patience = 250 * time.Millisecond

// try sends a byte and reports whether it came back. source is "" or the port
// to send from.
func try(ns *netnstest.Namespace, network, source, address string) (answered bool) {
	ns.Do(func() { answered = tryHere(network, source, address) })
	return answered
}

func tryHere(network, source, address string) bool {
	dialer := net.Dialer{Timeout: patience}
	if source != "" {
		dialer.LocalAddr, _ = net.ResolveUDPAddr(network, ":"+source)
	}
	c, err := dialer.Dial(network, address)
	if err != nil {
		return false
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write([]byte("x")); err != nil {
		return false
	}
	n, err := c.Read(make([]byte, 8))
	return err == nil && n == 1
}

func ping(t *testing.T, ns *netnstest.Namespace, address string) (answered bool) {
	ns.Do(func() {
		c, err := icmp.ListenPacket("ip4:icmp", "0.0.0.0")
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		message := icmp.Message{Type: ipv4.ICMPTypeEcho, Body: &icmp.Echo{ID: 7, Seq: 1, Data: []byte("x")}}
		data, err := message.Marshal(nil)
		if err != nil {
			t.Error(err)
			return
		}
		_ = c.SetDeadline(time.Now().Add(patience))
		if _, err := c.WriteTo(data, &net.IPAddr{IP: net.ParseIP(address)}); err != nil {
			return
		}
		buf := make([]byte, 512)
		for {
			n, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			got, err := icmp.ParseMessage(1, buf[:n])
			if err == nil && got.Type == ipv4.ICMPTypeEchoReply && from.String() == address {
				answered = true
				return
			}
		}
	})
	return answered
}

func (s *site) apply(r Rules) {
	s.t.Helper()
	s.box.Do(func() {
		if err := Apply(r); err != nil {
			s.t.Errorf("Apply(%+v) = %v", r, err)
		}
	})
	if s.t.Failed() {
		s.t.FailNow()
	}
}

// A neighbour on the uplink tries every port that a machine on the LAN may use,
// and some that nobody may.
func TestApply(t *testing.T) {
	s := newSite(t)
	for _, p := range []string{":22", ":80", ":7443", ":7444", ":9000"} {
		s.echo(s.box, "tcp4", p)
	}
	for _, p := range []string{":67", ":68", ":69", ":123", ":514", ":4011"} {
		s.echo(s.box, "udp4", p)
	}
	s.echo(s.box, "udp4", boxLAN+":70")
	s.echo(s.neighbour, "tcp4", ":443")
	s.echo(s.neighbour, "udp4", ":53")
	s.echo(s.machine, "udp4", ":623")
	s.echo(s.machine, "tcp4", ":443")
	s.box.Sysctl("net/ipv4/ip_forward", "1")

	type attempt struct {
		name            string
		from            *netnstest.Namespace
		network, source string
		address         string
		allowed         bool
	}
	attempts := []attempt{
		{"uplink ssh", s.neighbour, "tcp4", "", boxUplink + ":22", false},
		{"uplink HTTP", s.neighbour, "tcp4", "", boxUplink + ":80", false},
		{"uplink pass-through", s.neighbour, "tcp4", "", boxUplink + ":7443", false},
		{"uplink media", s.neighbour, "tcp4", "", boxUplink + ":7444", false},
		{"uplink to the LAN address, media", s.neighbour, "tcp4", "", boxLAN + ":7444", false},
		{"uplink other", s.neighbour, "tcp4", "", boxUplink + ":9000", false},
		{"uplink DHCP", s.neighbour, "udp4", "", boxUplink + ":67", false},
		{"uplink TFTP", s.neighbour, "udp4", "", boxUplink + ":69", false},
		{"uplink NTP", s.neighbour, "udp4", "", boxUplink + ":123", false},
		{"uplink to the DHCP client's port, from another than the server's", s.neighbour, "udp4", "", boxUplink + ":68", false},
		{"uplink DHCP server's answer", s.neighbour, "udp4", "67", boxUplink + ":68", true},
		{"uplink to another port, from the DHCP server's", s.neighbour, "udp4", "67", boxUplink + ":69", false},
		{"uplink to the LAN address, HTTP", s.neighbour, "tcp4", "", boxLAN + ":80", false},
		{"uplink to the LAN address, UDP", s.neighbour, "udp4", "", boxLAN + ":70", false},
		{"uplink through the box to a BMC", s.neighbour, "udp4", "", machineAddr + ":623", false},
		{"uplink through the box to a BMC's web", s.neighbour, "tcp4", "", machineAddr + ":443", false},
		{"machine through the box to the uplink", s.machine, "tcp4", "", neighbourAddr + ":443", false},
		{"LAN HTTP", s.machine, "tcp4", "", boxLAN + ":80", true},
		{"LAN pass-through", s.machine, "tcp4", "", boxLAN + ":7443", true},
		{"LAN media", s.machine, "tcp4", "", boxLAN + ":7444", true},
		{"LAN DHCP", s.machine, "udp4", "", boxLAN + ":67", true},
		{"LAN TFTP", s.machine, "udp4", "", boxLAN + ":69", true},
		{"LAN ssh", s.machine, "tcp4", "", boxLAN + ":22", false},
		{"LAN other", s.machine, "tcp4", "", boxLAN + ":9000", false},
		{"LAN other UDP", s.machine, "udp4", "", boxLAN + ":4011", false},
		{"LAN syslog that is not served", s.machine, "udp4", "", boxLAN + ":514", false},
		{"LAN to the DHCP client's port", s.machine, "udp4", "67", boxLAN + ":68", false},
		{"the box to the gateway", s.box, "tcp4", "", neighbourAddr + ":443", true},
		{"the box to a resolver", s.box, "udp4", "", neighbourAddr + ":53", true},
		{"the box to a BMC", s.box, "udp4", "", machineAddr + ":623", true},
		{"the box to a BMC's web", s.box, "tcp4", "", machineAddr + ":443", true},
		{"the box to itself", s.box, "tcp4", "", "127.0.0.1:9000", true},
	}
	// Without the rules all of them work: the attempts can succeed.
	for _, a := range attempts {
		if !try(a.from, a.network, a.source, a.address) {
			t.Errorf("no firewall: %s (%s) got no answer", a.name, a.address)
		}
	}

	rules := Rules{Uplink: "uplink", LANs: []LANRule{{Interface: "lan", DHCP: true, TFTP: true, HTTP: true, Passthrough: true, Media: true}}}
	s.apply(rules)
	if got := s.box.ReadSysctl("net/ipv4/ip_forward"); got != "0" {
		t.Errorf("ip_forward = %s, want 0", got)
	}
	s.box.Sysctl("net/ipv4/ip_forward", "1") // the chain alone must hold, too
	for _, a := range attempts {
		if got := try(a.from, a.network, a.source, a.address); got != a.allowed {
			t.Errorf("firewall: %s (%s) got an answer: %v, want %v", a.name, a.address, got, a.allowed)
		}
	}
	for name, from := range map[string]*netnstest.Namespace{"neighbour": s.neighbour, "machine": s.machine} {
		address := map[string]string{"neighbour": boxUplink, "machine": boxLAN}[name]
		if !ping(t, from, address) {
			t.Errorf("ping from the %s got no answer", name)
		}
	}

	// A proxy's port and syslog open where they are served, and on the LAN alone.
	proxy := rules
	proxy.LANs = []LANRule{{Interface: "lan", DHCP: true, ProxyDHCP: true, Syslog: true}}
	s.apply(proxy)
	for _, port := range []string{":4011", ":514"} {
		if !try(s.machine, "udp4", "", boxLAN+port) {
			t.Errorf("firewall: LAN to %s got no answer", port)
		}
		if try(s.neighbour, "udp4", "", boxUplink+port) {
			t.Errorf("firewall: uplink to %s got an answer", port)
		}
	}

	// A second Apply replaces the first.
	s.apply(Rules{LANs: []LANRule{{Interface: "lan", HTTP: true, HTTPPort: 9000}}})
	for _, a := range []attempt{
		{"LAN HTTP on its own port", s.machine, "tcp4", "", boxLAN + ":9000", true},
		{"LAN on the port of before", s.machine, "tcp4", "", boxLAN + ":80", false},
		{"LAN media, not listed now", s.machine, "tcp4", "", boxLAN + ":7444", false},
		{"LAN TFTP, not listed now", s.machine, "udp4", "", boxLAN + ":69", false},
		{"unnamed uplink HTTP", s.neighbour, "tcp4", "", boxUplink + ":9000", false},
		{"unnamed uplink DHCP server's answer", s.neighbour, "udp4", "67", boxUplink + ":68", true},
		{"the box to the gateway", s.box, "tcp4", "", neighbourAddr + ":443", true},
	} {
		if got := try(a.from, a.network, a.source, a.address); got != a.allowed {
			t.Errorf("second firewall: %s (%s) got an answer: %v, want %v", a.name, a.address, got, a.allowed)
		}
	}
	// What is for the LAN leaves by the LAN alone. The neighbour takes a BMC's
	// place: a more specific route over the uplink, as a lost LAN would leave.
	const bmc = "10.0.0.77"
	lan := netip.MustParsePrefix("10.0.0.0/24")
	s.box.Route(netip.MustParsePrefix(bmc+"/32"), netip.MustParseAddr(neighbourAddr))
	s.neighbour.Wire("fake", netip.MustParsePrefix(bmc+"/32"), netnstest.New(t), "eth0", netip.MustParsePrefix("10.9.0.9/32"))
	s.echo(s.neighbour, "udp4", bmc+":623")
	if !try(s.box, "udp4", "", bmc+":623") {
		t.Fatal("the neighbour does not answer for the BMC: the attempt cannot succeed")
	}
	for _, name := range []string{"lan", ""} {
		s.apply(Rules{Uplink: "uplink", Homes: []Home{{lan, name}}})
		if try(s.box, "udp4", "", bmc+":623") {
			t.Errorf("home %q: the neighbour hears what is for the BMC", name)
		}
	}
	s.apply(Rules{Uplink: "uplink", Homes: []Home{{lan, "uplink"}}})
	if !try(s.box, "udp4", "", bmc+":623") {
		t.Error("a home does not let out what is for it")
	}
	s.apply(Rules{})

	if !ping(t, s.neighbour, boxUplink) {
		t.Error("ping over an unnamed uplink got no answer")
	}

	s.box.Do(func() {
		for range 2 { // there being none is no error
			if err := Remove(); err != nil {
				t.Errorf("Remove() = %v", err)
			}
		}
	})
	if !try(s.neighbour, "tcp4", "", boxUplink+":22") {
		t.Error("after Remove: the neighbour got no answer")
	}
}

// A TFTP server sends from a port of its own; the client's answers to it come in.
func TestTransferFromAnotherPort(t *testing.T) {
	s := newSite(t)
	s.apply(Rules{Uplink: "uplink", LANs: []LANRule{{Interface: "lan", TFTP: true}}})
	var request, transfer, client net.PacketConn
	s.box.Do(func() {
		request, _ = net.ListenPacket("udp4", boxLAN+":69")
		transfer, _ = net.ListenPacket("udp4", boxLAN+":0")
	})
	s.machine.Do(func() { client, _ = net.ListenPacket("udp4", machineAddr+":0") })
	for _, c := range []net.PacketConn{request, transfer, client} {
		if c == nil {
			t.Fatal("a socket could not be opened")
		}
		defer c.Close()
	}
	hear := func(c net.PacketConn) (net.Addr, error) {
		_ = c.SetReadDeadline(time.Now().Add(patience))
		_, from, err := c.ReadFrom(make([]byte, 8))
		return from, err
	}
	_, _ = client.WriteTo([]byte("x"), transfer.LocalAddr())
	if _, err := hear(transfer); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a transfer's port heard a machine that it had not sent to: %v", err)
	}
	_, _ = client.WriteTo([]byte("rrq"), request.LocalAddr())
	from, err := hear(request)
	if err != nil {
		t.Fatalf("the request did not arrive: %v", err)
	}
	_, _ = transfer.WriteTo([]byte("data"), from)
	back, err := hear(client)
	if err != nil {
		t.Fatalf("the first block did not arrive: %v", err)
	}
	_, _ = client.WriteTo([]byte("ack"), back)
	if _, err := hear(transfer); err != nil {
		t.Errorf("the acknowledgement did not arrive: %v", err)
	}
}

// TestIPv6 reaches a LAN's services over IPv6 as over IPv4, and lets in what
// routers' and switches' part of IPv6 needs.
func TestIPv6(t *testing.T) {
	s := newSite(t)
	s.box.Wire("lan6", netip.MustParsePrefix("fd00::1/64"), s.machine, "eth6", netip.MustParsePrefix("fd00::2/64"))
	s.echo(s.box, "tcp6", ":80")
	s.echo(s.box, "tcp6", ":81")
	// An IPv6 address takes a while until nobody else has it.
	for end := time.Now().Add(10 * time.Second); !try(s.machine, "tcp6", "", "[fd00::1]:80") && time.Now().Before(end); {
	}
	s.apply(Rules{Uplink: "uplink", LANs: []LANRule{{Interface: "lan6", DHCP: true, TFTP: true, HTTP: true}}})
	for port, want := range map[string]bool{"80": true, "81": false} {
		if got := try(s.machine, "tcp6", "", "[fd00::1]:"+port); got != want {
			t.Errorf("port %s over IPv6 answers: %v, want %v", port, got, want)
		}
	}
	var hears, asks *icmp.PacketConn
	for ns, conn := range map[*netnstest.Namespace]**icmp.PacketConn{s.box: &hears, s.machine: &asks} {
		ns.Do(func() {
			var err error
			if *conn, err = icmp.ListenPacket("ip6:ipv6-icmp", "::"); err != nil {
				t.Error(err)
			}
		})
		if t.Failed() {
			t.FailNow()
		}
		defer (*conn).Close()
	}
	for kind, want := range map[ipv6.ICMPType]bool{
		ipv6.ICMPTypeMulticastListenerQuery: true, ipv6.ICMPTypeRouterSolicitation: true, ipv6.ICMPTypeMulticastListenerDone: false, ipv6.ICMPTypeRedirect: false,
	} {
		var only ipv6.ICMPFilter
		only.SetAll(true)
		only.Accept(kind)
		if err := hears.IPv6PacketConn().SetICMPFilter(&only); err != nil {
			t.Fatal(err)
		}
		data, err := (&icmp.Message{Type: kind, Body: &icmp.RawBody{Data: make([]byte, 20)}}).Marshal(nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := asks.WriteTo(data, &net.IPAddr{IP: net.ParseIP("fd00::1")}); err != nil {
			t.Fatal(err)
		}
		_ = hears.SetReadDeadline(time.Now().Add(patience))
		if _, _, err := hears.ReadFrom(make([]byte, 64)); (err == nil) != want {
			t.Errorf("ICMPv6 %s arrives: %v, want %v", kind, err == nil, want)
		}
	}
}

func TestApplyRefuses(t *testing.T) {
	for name, r := range map[string]Rules{
		"a LAN without a name":     {Uplink: "eth0", LANs: []LANRule{{}}},
		"a name that is too long":  {Uplink: "interface-with-16"},
		"a name with a space":      {Uplink: "eth 0"},
		"the uplink as a LAN":      {Uplink: "eth0", LANs: []LANRule{{Interface: "eth0"}}},
		"a LAN twice":              {Uplink: "eth0", LANs: []LANRule{{Interface: "eth1"}, {Interface: "eth1"}}},
		"a name that is no single": {Uplink: "../eth0"},
		"a home without a network": {Uplink: "eth0", Homes: []Home{{Interface: "eth1"}}},
	} {
		if err := r.check(); err == nil {
			t.Errorf("%s: check() = nil, want an error", name)
		}
	}
}
