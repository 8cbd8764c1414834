package ra

import (
	"bytes"
	"context"
	"encoding/binary"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/net/ipv6"

	"github.com/better-compute/site-appliance/pxe/pxetest"
)

var (
	network = netip.MustParsePrefix("fd00:77::1/64")
	mac     = net.HardwareAddr{2, 0, 0, 0, 0, 1}
	t0      = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
)

// TestAdvertisement: what machines read out of it.
func TestAdvertisement(t *testing.T) {
	for _, tt := range []struct {
		mtu  uint32
		want []byte
	}{
		{0, []byte{134, 0, 0, 0, 64, 0xc0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
			1, 1, 2, 0, 0, 0, 0, 1,
			3, 4, 64, 0x80, 0, 0, 0x0e, 0x10, 0, 0, 0x0e, 0x10, 0, 0, 0, 0, 0xfd, 0, 0, 0x77, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
		{1400, []byte{134, 0, 0, 0, 64, 0xc0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
			1, 1, 2, 0, 0, 0, 0, 1,
			5, 1, 0, 0, 0, 0, 0x05, 0x78,
			3, 4, 64, 0x80, 0, 0, 0x0e, 0x10, 0, 0, 0x0e, 0x10, 0, 0, 0, 0, 0xfd, 0, 0, 0x77, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
	} {
		if got := advertisement(network, mac, tt.mtu); !bytes.Equal(got, tt.want) {
			t.Errorf("advertisement with MTU %d = %x, want %x", tt.mtu, got, tt.want)
		}
	}
}

func TestIsSolicitation(t *testing.T) {
	from, nobody := netip.MustParseAddr("fe80::1"), netip.IPv6Unspecified()
	source := []byte{1, 1, 2, 0, 0, 0, 0, 9}
	good := []byte{133, 0, 0, 0, 0, 0, 0, 0}
	with := func(more ...byte) []byte { return append(bytes.Clone(good), more...) }
	for _, tt := range []struct {
		name string
		b    []byte
		hops int
		from netip.Addr
		want bool
	}{
		{"EDK2's and iPXE's first, which have no address yet", good, 255, nobody, true},
		{"Linux's", with(source...), 255, from, true},
		{"with an unknown option", with(200, 1, 0, 0, 0, 0, 0, 0), 255, from, true},
		{"over a router", good, 254, from, false},
		{"a source without an address", with(source...), 255, nobody, false},
		{"an option without a length", with(200, 0, 0, 0, 0, 0, 0, 0), 255, from, false},
		{"a torn option", with(1, 2, 0, 0, 0, 0, 0, 0), 255, from, false},
		{"half an option", with(1), 255, from, false},
		{"a code", []byte{133, 1, 0, 0, 0, 0, 0, 0}, 255, from, false},
		{"too short", good[:7], 255, from, false},
		{"another type", []byte{134, 0, 0, 0, 0, 0, 0, 0}, 255, from, false},
		{"nothing", nil, 255, from, false},
	} {
		if got := isSolicitation(tt.b, tt.hops, tt.from); got != tt.want {
			t.Errorf("isSolicitation(%s) = %v, want %v", tt.name, got, tt.want)
		}
	}
}

func FuzzIsSolicitation(f *testing.F) {
	f.Add([]byte{133, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 9}, true)
	f.Add([]byte{133, 0, 0, 0, 0, 0, 0, 0}, false)
	f.Fuzz(func(t *testing.T, b []byte, has bool) {
		from := netip.IPv6Unspecified()
		if has {
			from = netip.MustParseAddr("fe80::1")
		}
		if !isSolicitation(b, maxHops, from) {
			return
		}
		if b[0] != typeSolicitation || len(b)%8 != 0 {
			t.Errorf("%x is taken for a solicitation", b)
		}
		if mac, ok := solicitor(b); ok && len(mac) != 6 {
			t.Errorf("%x comes from %s", b, mac)
		}
	})
}

// TestSchedule: the first at once, the next two soon, all others minutes apart;
// and what is asked for comes within half a second, but never within three seconds
// of another.
func TestSchedule(t *testing.T) {
	for _, random := range []float64{0, 0.5, 0.999} {
		upTo := func(d time.Duration) time.Duration { return time.Duration(random * float64(d)) }
		s := newSchedule(t0, upTo)
		now := t0
		for i := range 6 {
			wait := s.next.Sub(now)
			least, most := minInterval, maxInterval
			switch {
			case i == 0:
				least, most = 0, 0
			case i < initial:
				least, most = 0, initialInterval
			}
			if wait < least || wait > most {
				t.Errorf("random %v: advertisement %d after %s, want %s to %s", random, i+1, wait, least, most)
			}
			now = s.next
			s.wentOut(now)
		}
		now = now.Add(time.Minute)
		s.asked(now)
		if wait := s.next.Sub(now); wait < 0 || wait > maxDelay {
			t.Errorf("random %v: answer after %s, want at most %s", random, wait, maxDelay)
		}
		before := s.next
		s.asked(now.Add(100 * time.Millisecond)) // a second machine has the same answer
		if s.next.After(before) {
			t.Errorf("random %v: a second question puts the answer off", random)
		}
		s.wentOut(s.next)
		last := s.last
		// A flood: one in three seconds and no more.
		sent := 0
		for at := last; at.Before(last.Add(time.Minute)); at = at.Add(10 * time.Millisecond) {
			s.asked(at)
			if !at.Before(s.next) {
				if gap := at.Sub(s.last); gap < apart {
					t.Fatalf("random %v: two answers %s apart", random, gap)
				}
				s.wentOut(at)
				sent++
			}
		}
		if sent < 15 || sent > 20 {
			t.Errorf("random %v: a minute's flood has %d answers, want 15 to 20", random, sent)
		}
		s.failed(now)
		if wait := s.next.Sub(now); wait != time.Second {
			t.Errorf("random %v: after a failure %s, want a second", random, wait)
		}
	}
}

// hearing is a socket inside of the host that hears advertisements and solicits them.
func hearing(t *testing.T, h *pxetest.Host) (conn net.PacketConn, p *ipv6.PacketConn) {
	t.Helper()
	h.Do(func() (err error) {
		if conn, err = net.ListenPacket("ip6:ipv6-icmp", "::"); err != nil {
			return err
		}
		iface, err := net.InterfaceByName(h.Iface)
		if err != nil {
			return err
		}
		p = ipv6.NewPacketConn(conn)
		var only ipv6.ICMPFilter
		only.SetAll(true)
		only.Accept(ipv6.ICMPTypeRouterAdvertisement)
		for _, err := range []error{p.SetICMPFilter(&only), p.SetMulticastInterface(iface), p.SetMulticastHopLimit(255),
			p.SetControlMessage(ipv6.FlagHopLimit|ipv6.FlagDst, true), p.JoinGroup(iface, allNodes)} {
			if err != nil {
				return err
			}
		}
		return nil
	})
	return conn, p
}

// TestServe: a machine on the wire hears an advertisement of its own accord and
// on asking; from the box's link-local address and its own MAC.
func TestServe(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	h := pxetest.Join(t, "box0", netip.MustParsePrefix("10.77.0.1/24"), "m0", "52:54:00:00:00:0a")
	// The link-local addresses are made once both ends are up.
	pxetest.WaitLinkLocal(t, "box0")
	h.WaitLinkLocal()
	s, err := Listen(t.Context(), Config{Interface: "box0", Network: network, MTU: 1400, Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
	if err != nil {
		t.Fatal(err)
	}
	s.plan.sent = initial // the next of its own accord comes minutes later
	conn, p := hearing(t, h)
	defer conn.Close()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx) }()
	hear := func(why string) {
		t.Helper()
		_ = conn.SetReadDeadline(time.Now().Add(30 * time.Second))
		buf := make([]byte, 1500)
		n, cm, from, err := p.ReadFrom(buf)
		if err != nil {
			t.Fatalf("%s: %v", why, err)
		}
		i, err := net.InterfaceByName("box0")
		if err != nil {
			t.Fatal(err)
		}
		want := advertisement(network, i.HardwareAddr, 1400)
		binary.BigEndian.PutUint16(want[2:], binary.BigEndian.Uint16(buf[2:])) // the kernel's checksum
		if ip := from.(*net.IPAddr).IP; !bytes.Equal(buf[:n], want) || !ip.IsLinkLocalUnicast() || cm.HopLimit != 255 {
			t.Errorf("%s: %x from %s with hop limit %d, want %x from a link-local address with 255", why, buf[:n], ip, cm.HopLimit, want)
		}
	}
	hear("of its own accord")
	if _, err := p.WriteTo([]byte{133, 0, 0, 0, 0, 0, 0, 0}, nil, allRouters); err != nil {
		t.Fatal(err)
	}
	hear("asked")
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Serve = %v, want nil", err)
	}
}

// TestBare: who is expected is answered with nothing at all, and nobody else hears that;
// who is not, or does not say who it is, hears nothing.
func TestBare(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	const mac, other = "52:54:00:00:00:0a", "52:54:00:00:00:0b"
	hosts := pxetest.Switch(t, "box0", netip.MustParsePrefix("10.77.0.1/24"), mac, other)
	pxetest.WaitLinkLocal(t, "box0")
	b, err := ListenBare(t.Context(), "box0", func(m string) bool { return m == mac }, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- b.Serve(ctx) }()
	var ears []*ipv6.PacketConn
	for _, h := range hosts {
		h.WaitLinkLocal()
		conn, p := hearing(t, h)
		defer conn.Close()
		ears = append(ears, p)
	}
	solicit := func(p *ipv6.PacketConn, options ...byte) {
		t.Helper()
		if _, err := p.WriteTo(append([]byte{133, 7: 0}, options...), nil, allRouters); err != nil {
			t.Fatal(err)
		}
	}
	hear := func(p *ipv6.PacketConn, within time.Duration) (got []byte, cm *ipv6.ControlMessage, err error) {
		buf := make([]byte, 1500)
		_ = p.SetReadDeadline(time.Now().Add(within))
		n, cm, _, err := p.ReadFrom(buf)
		return buf[:n], cm, err
	}
	source := func(last byte) []byte { return []byte{1, 1, 0x52, 0x54, 0, 0, 0, last} }
	// In this order: were those before the last answered, their answers would come first.
	solicit(ears[1], source(0x0b)...)
	solicit(ears[1])
	solicit(ears[1], source(0x0a)...) // in another's name
	solicit(ears[0])
	solicit(ears[0], source(0x0a)...)
	got, cm, err := hear(ears[0], 30*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	want := append([]byte{134, 0, got[2], got[3]}, make([]byte, 12)...) // the kernel's checksum
	if !bytes.Equal(got, want) || cm.HopLimit != 255 || !cm.Dst.IsLinkLocalUnicast() {
		t.Errorf("%x to %s with hop limit %d, want %x to the machine's own address with 255", got, cm.Dst, cm.HopLimit, want)
	}
	for i, p := range ears {
		if got, cm, err := hear(p, 200*time.Millisecond); err == nil {
			t.Errorf("host %d hears %x to %s as well", i, got, cm.Dst)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Serve = %v, want nil", err)
	}
}

// TestBareBesideRouter: once a router was heard, of the LAN or on the box itself, nobody
// is answered.
func TestBareBesideRouter(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	hosts := pxetest.Switch(t, "box0", netip.MustParsePrefix("10.77.0.1/24"), "52:54:00:00:00:0a", "52:54:00:00:00:0b")
	pxetest.WaitLinkLocal(t, "box0")
	for _, h := range hosts {
		h.WaitLinkLocal()
	}
	for name, router := range map[string]*pxetest.Host{"of the LAN": hosts[1], "on the box": nil} {
		b, err := ListenBare(t.Context(), "box0", func(string) bool { return true }, slog.New(slog.NewTextHandler(t.Output(), nil)))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- b.Serve(ctx) }()
		conn, p := hearing(t, hosts[0])
		// heard is what comes from the first that advertises.
		heard := func(within time.Duration) []byte {
			buf := make([]byte, 1500)
			_ = p.SetReadDeadline(time.Now().Add(within))
			n, _, _, _ := p.ReadFrom(buf)
			return buf[:n]
		}
		solicit := func() {
			t.Helper()
			if _, err := p.WriteTo([]byte{133, 7: 0, 8: 1, 9: 1, 10: 0x52, 11: 0x54, 15: 0x0a}, nil, allRouters); err != nil {
				t.Fatal(err)
			}
		}
		solicit()
		if got := heard(30 * time.Second); len(got) != len(bare) {
			t.Fatalf("without a router: %x, want an answer", got)
		}
		advertise(t, router)
		if got := heard(30 * time.Second); len(got) < 16 || got[7] != 30 {
			t.Fatalf("%s: %x, want the router's", name, got)
		}
		for range 3 {
			solicit()
		}
		if got := heard(500 * time.Millisecond); len(got) > 0 {
			t.Errorf("beside a router %s: %x, want nothing", name, got)
		}
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Serve = %v, want nil", err)
		}
		conn.Close()
		b.Close()
	}
}

// advertise is what a router does, on the box where it is nil.
func advertise(t *testing.T, router *pxetest.Host) {
	t.Helper()
	send := func(iface string) error {
		i, err := net.InterfaceByName(iface)
		if err != nil {
			return err
		}
		conn, err := net.ListenPacket("ip6:ipv6-icmp", "::")
		if err != nil {
			return err
		}
		defer conn.Close()
		p := ipv6.NewPacketConn(conn)
		_ = p.SetMulticastHopLimit(255)
		_, err = p.WriteTo([]byte{134, 4: 64, 7: 30, 15: 0}, &ipv6.ControlMessage{IfIndex: i.Index}, allNodes)
		return err
	}
	if router != nil {
		router.Do(func() error { return send(router.Iface) })
	} else if err := send("box0"); err != nil {
		t.Fatal(err)
	}
}

// TestQuiet: for how long a router is there, and what is taken for one.
func TestQuiet(t *testing.T) {
	b := new(Bare)
	if b.quiet(t0) {
		t.Error("quiet without a router")
	}
	b.router = t0
	for after, want := range map[time.Duration]bool{0: true, quietFor - 1: true, quietFor: false} {
		if got := b.quiet(t0.Add(after)); got != want {
			t.Errorf("quiet %s after a router = %v, want %v", after, got, want)
		}
	}
	good := []byte{134, 15: 0}
	for _, tt := range []struct {
		name string
		b    []byte
		hops int
		from string
		want bool
	}{
		{"a router's", good, 255, "fe80::1", true},
		{"with an option", append(bytes.Clone(good), 5, 1, 0, 0, 0, 0, 5, 220), 255, "fe80::1", true},
		{"over another", good, 254, "fe80::1", false},
		{"from elsewhere", good, 255, "fd00::1", false},
		{"too short", good[:15], 255, "fe80::1", false},
		{"a code", []byte{134, 1, 15: 0}, 255, "fe80::1", false},
		{"another type", []byte{133, 15: 0}, 255, "fe80::1", false},
		{"nothing", nil, 255, "fe80::1", false},
	} {
		if got := isAdvertisement(tt.b, tt.hops, netip.MustParseAddr(tt.from)); got != tt.want {
			t.Errorf("isAdvertisement(%s) = %v, want %v", tt.name, got, tt.want)
		}
	}
}
