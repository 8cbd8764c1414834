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
		if isSolicitation(b, maxHops, from) && (b[0] != typeSolicitation || len(b)%8 != 0) {
			t.Errorf("%x is taken for a solicitation", b)
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
	var conn net.PacketConn
	var p *ipv6.PacketConn
	h.Do(func() (err error) {
		if conn, err = net.ListenPacket("ip6:ipv6-icmp", "::"); err != nil {
			return err
		}
		iface, err := net.InterfaceByName("m0")
		if err != nil {
			return err
		}
		p = ipv6.NewPacketConn(conn)
		var only ipv6.ICMPFilter
		only.SetAll(true)
		only.Accept(ipv6.ICMPTypeRouterAdvertisement)
		for _, err := range []error{p.SetICMPFilter(&only), p.SetMulticastInterface(iface), p.SetMulticastHopLimit(255),
			p.SetControlMessage(ipv6.FlagHopLimit, true), p.JoinGroup(iface, allNodes)} {
			if err != nil {
				return err
			}
		}
		return nil
	})
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
