package dhcp6

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/pxe/inbox"
	"github.com/better-compute/site-appliance/pxe/inet"
	"github.com/better-compute/site-appliance/pxe/limit"
	"github.com/better-compute/site-appliance/pxe/pxetest"
)

// TestKnownFirst: what made-up MACs fill is bounded and not the known machines'
// queue, and one MAC has its limit.
func TestKnownFirst(t *testing.T) {
	s := testServer(t, func(c *Config) { c.Known = func(mac string) bool { return strings.HasPrefix(mac, "52:54:00:") } })
	limiter := limit.NewApart()
	data := with(dhcpv6.MessageTypeSolicit, idLL, ia(1)).ToBytes()
	queued := 0
	for i := range 2 * inbox.Others {
		if s.sort(limiter, data, source{mac: [6]byte{2, 0, 0, 9, byte(i >> 8), byte(i)}}, t0) {
			queued++
		}
	}
	if queued != inbox.Others {
		t.Errorf("of a flood of made-up MACs %d packets wait, want %d", queued, inbox.Others)
	}
	queued = 0
	for range 1000 {
		if s.sort(limiter, data, fromA, t0) {
			queued++
		}
	}
	if first, _ := s.in.Waiting(); queued != limit.PerBurst || first != limit.PerBurst {
		t.Errorf("of one known MAC's flood %d packets wait, %d of them first, want %d", queued, first, limit.PerBurst)
	}
	other := fromA
	other.mac = macB
	if !s.sort(limiter, data, other, t0) {
		t.Error("another known machine finds no place in the queue")
	}
	for name, bad := range map[string][]byte{"too short": data[:3], "passed on by a relay": {byte(dhcpv6.MessageTypeRelayForward), 0, 0, 0}} {
		if s.sort(limiter, bad, other, t0) {
			t.Errorf("a packet that is %s is queued", name)
		}
	}
}

// TestFrames: what the box writes it reads back as it was, with a right checksum;
// and what is none of its own it does not read.
func TestFrames(t *testing.T) {
	src, dst := netip.MustParseAddr("fe80::1"), netip.MustParseAddr("fe80::2")
	for n := range 9 {
		b := frame(src, dst, make([]byte, n))
		pseudo := append(append([]byte{}, b[8:40]...), 0, 0, 0, byte(len(b)-ipHeader), 0, 0, 0, unix.IPPROTO_UDP)
		if got := inet.Sum(0, append(pseudo, b[ipHeader:]...)); got != 0xffff {
			t.Errorf("sum over a frame of %d bytes = %x, want ffff", n, got)
		}
	}
	good := func() []byte {
		b := frame(src, allServers, []byte("message"))
		b[ipHeader+3] = serverPort & 0xff
		b[ipHeader+2] = serverPort >> 8
		return b
	}
	message, from, ok := parseFrame(good())
	if !ok || string(message) != "message" || from.addr != src || !from.group {
		t.Errorf("parseFrame = %q, %+v, %v", message, from, ok)
	}
	if _, from, ok := parseFrame(append(good(), 0, 0, 0)); !ok || from.addr != src {
		t.Error("a frame with padding is not read")
	}
	for name, break_ := range map[string]func([]byte) []byte{
		"another protocol":           func(b []byte) []byte { b[6] = unix.IPPROTO_TCP; return b },
		"IPv4":                       func(b []byte) []byte { b[0] = 0x45; return b },
		"another port":               func(b []byte) []byte { b[ipHeader+3]++; return b },
		"a length beyond the frame":  func(b []byte) []byte { b[ipHeader+5]++; return b },
		"a length under the header":  func(b []byte) []byte { b[ipHeader+5] = 7; return b },
		"a length beyond the packet": func(b []byte) []byte { b[5]--; return b },
		"torn":                       func(b []byte) []byte { return b[:ipHeader+udpHeader-1] },
		"nobody's":                   func(b []byte) []byte { clear(b[8:24]); return b },
		"a group's":                  func(b []byte) []byte { b[8] = 0xff; return b },
		"to another group":           func(b []byte) []byte { b[39] = 3; return b },
		"from the loopback":          func(b []byte) []byte { clear(b[8:24]); b[23] = 1; return b },
	} {
		if _, from, ok := parseFrame(break_(good())); ok {
			t.Errorf("a frame with %s is read: %+v", name, from)
		}
	}
}

func FuzzFrame(f *testing.F) {
	b := frame(netip.MustParseAddr("fe80::1"), allServers, []byte("message"))
	b[ipHeader+2], b[ipHeader+3] = serverPort>>8, serverPort&0xff
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		if message, from, ok := parseFrame(b); ok && (len(message) > len(b) || !from.addr.Is6() || from.addr.IsMulticast()) {
			t.Errorf("%d bytes from %s", len(message), from.addr)
		}
	})
}

// client is a DHCPv6 client inside of a host.
type client struct {
	conn *net.UDPConn
	to   *net.UDPAddr
}

func newClient(t *testing.T, h *pxetest.Host) *client {
	t.Helper()
	h.WaitLinkLocal()
	c := &client{to: &net.UDPAddr{IP: allServers.AsSlice(), Port: serverPort, Zone: h.Iface}}
	h.Do(func() (err error) {
		c.conn, err = net.ListenUDP("udp6", &net.UDPAddr{Port: clientPort})
		return err
	})
	t.Cleanup(func() { c.conn.Close() })
	return c
}

func (c *client) ask(m *dhcpv6.Message, within time.Duration) (*dhcpv6.Message, *net.UDPAddr, error) {
	if _, err := c.conn.WriteToUDP(m.ToBytes(), c.to); err != nil {
		return nil, nil, err
	}
	return c.hear(within)
}

func (c *client) hear(within time.Duration) (*dhcpv6.Message, *net.UDPAddr, error) {
	_ = c.conn.SetReadDeadline(time.Now().Add(within))
	buf := make([]byte, 2048)
	n, from, err := c.conn.ReadFromUDP(buf)
	if err != nil {
		return nil, nil, err
	}
	reply, err := dhcpv6.MessageFromBytes(buf[:n])
	return reply, from, err
}

// TestServe: a machine gets its address over a real wire, from the box's
// link-local address, by its MAC whatever it calls itself; a second server of this
// host is refused the port; and the other wire hears nothing.
func TestServe(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	const mac = "52:54:00:00:00:0a"
	h := pxetest.Join(t, "box0", netip.MustParsePrefix("10.77.0.1/24"), "m0", mac)
	up := pxetest.Join(t, "up0", netip.MustParsePrefix("192.0.2.1/24"), "n0", "52:54:00:00:00:0c")
	pxetest.AddAddress(t, "box0", own)
	pxetest.WaitLinkLocal(t, "box0")
	cfg := testServer(t).cfg
	cfg.Now = time.Now
	s, err := Listen(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx) }()

	c := newClient(t, h)
	solicit := with(dhcpv6.MessageTypeSolicit, append([]dhcpv6.Option{idOther, ia(1)}, asHTTP...)...)
	adv, from, err := c.ask(solicit, 30*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if got := show(adv); got != "ADVERTISE 1 na1[fd00:77::5254:0:0:a/3600] 59 16 7=255 2" || !from.IP.IsLinkLocalUnicast() || from.Port != serverPort {
		t.Errorf("%s from %s, want the machine's address from the box's link-local one", got, from)
	}
	id := adv.GetOneOption(dhcpv6.OptionServerID)
	i, err := net.InterfaceByName("box0")
	if err != nil || !strings.HasSuffix(fmt.Sprintf("%x", id.ToBytes()), strings.ReplaceAll(i.HardwareAddr.String(), ":", "")) {
		t.Errorf("server's identifier %x, want one of %s", id.ToBytes(), i.HardwareAddr)
	}
	reply, _, err := c.ask(with(dhcpv6.MessageTypeRequest, idOther, id, ia(1, addrA)), 30*time.Second)
	if err != nil || show(reply) != "REPLY 1 na1[fd00:77::5254:0:0:a/3600] 2" {
		t.Errorf("REQUEST: %s, %v", show(reply), err)
	}
	// The box resolves no neighbour for that: the MAC is the frame's.
	h.SetMAC("52:54:00:00:00:0b")
	if adv, _, err = c.ask(solicit, 30*time.Second); err != nil || show(adv) != "ADVERTISE 1 na1[fd00:77::5254:0:0:b/3600] 59 16 7=255 2" {
		t.Errorf("another MAC by the same identifier: %s, %v", show(adv), err)
	}
	// A flood of one machine keeps another from nothing.
	h.SetMAC("52:54:00:00:00:0e")
	for range 5000 {
		if _, err := c.conn.WriteToUDP(solicit.ToBytes(), c.to); err != nil {
			t.Fatal(err)
		}
	}
	h.SetMAC(mac)
	renew := with(dhcpv6.MessageTypeRenew, idOther, id, ia(1, addrA))
	renew.TransactionID = dhcpv6.TransactionID{9, 9, 9}
	reply, _, err = c.ask(renew, 30*time.Second)
	for err == nil && reply.TransactionID != renew.TransactionID { // those before are the flood's
		reply, _, err = c.hear(30 * time.Second)
	}
	if err != nil {
		t.Fatalf("after a flood: %v", err)
	}
	if other, _, err := newClient(t, up).ask(solicit, time.Second); err == nil {
		t.Errorf("the other wire is answered: %s", show(other))
	}
	if second, err := Listen(t.Context(), cfg); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("a second server = %v, %v, want that the port is taken", second, err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Serve = %v, want nil", err)
	}
	_ = s.Close()
	if s, err = Listen(t.Context(), cfg); err != nil {
		t.Errorf("after the first has ended: %v", err)
	} else {
		s.Close()
	}
}
