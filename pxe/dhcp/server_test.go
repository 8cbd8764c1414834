package dhcp

import (
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/better-compute/site-appliance/pxe/inbox"
	"github.com/better-compute/site-appliance/pxe/lease"
	"github.com/better-compute/site-appliance/pxe/limit"
)

// TestKnownFirst: what made-up MACs fill is bounded and not the known machines' queue.
func TestKnownFirst(t *testing.T) {
	s := testServer(t, bootFile, func(c *Config) { c.Known = func(mac string) bool { return strings.HasPrefix(mac, "52:54:00:00:07:") } })
	limits := limit.NewApart()
	from := func(mac ...byte) []byte {
		return message(t, dhcpv4.MessageTypeDiscover, dhcpv4.WithHwAddr(net.HardwareAddr(mac))).ToBytes()
	}
	queued := 0
	for i := range 2 * inbox.Others {
		if s.sort(limits, from(2, 0, 0, 9, byte(i>>8), byte(i)), source{}, t0) {
			queued++
		}
	}
	if queued != inbox.Others {
		t.Errorf("of a flood of made-up MACs %d packets wait, want %d", queued, inbox.Others)
	}
	queued = 0
	for range 1000 {
		if s.sort(limits, from(0x52, 0x54, 0, 0, 7, 1), source{}, t0) {
			queued++
		}
	}
	if first, _ := s.in.Waiting(); queued != limit.PerBurst || first != limit.PerBurst {
		t.Errorf("of one known MAC's flood %d packets wait, %d of them first, want %d", queued, first, limit.PerBurst)
	}
	ok := s.sort(limits, from(0x52, 0x54, 0, 0, 7, 2), source{}, t0)
	if first, _ := s.in.Waiting(); !ok || first != limit.PerBurst+1 {
		t.Error("another known machine finds no place in the queue")
	}
	if s.sort(limits, make([]byte, bootpHeader-1), source{}, t0) {
		t.Error("a packet that is too short is queued")
	}
}

// TestKnownAreCountedApart: what a known MAC has sent stays counted, whatever number of
// made-up MACs comes in between.
func TestKnownAreCountedApart(t *testing.T) {
	s := testServer(t, bootFile, func(c *Config) { c.Known = func(mac string) bool { return strings.HasPrefix(mac, "52:54:00:00:07:") } })
	limits := limit.NewApart()
	from := func(mac ...byte) bool {
		for _, others := s.in.Waiting(); others > 0; others-- {
			s.in.Next(t.Context())
		}
		return s.sort(limits, message(t, dhcpv4.MessageTypeDiscover, dhcpv4.WithHwAddr(net.HardwareAddr(mac))).ToBytes(), source{}, t0)
	}
	for range limit.PerBurst {
		from(0x52, 0x54, 0, 0, 7, 1)
	}
	for i := range 50_000 {
		if !from(2, 0, 0, 9, byte(i>>8), byte(i)) {
			t.Fatalf("made-up MAC %d is not read", i)
		}
	}
	if from(0x52, 0x54, 0, 0, 7, 1) {
		t.Error("a known MAC has its burst again, because so many made-up MACs came")
	}
}

// TestDeclinedReservation: a machine that declines what is reserved for it is offered
// that again, after it was asked who is there; and of who declines without end, one
// line a second is written.
func TestDeclinedReservation(t *testing.T) {
	const own = "10.77.0.250"
	var asked, told int
	var logged strings.Builder
	s := testServer(t, bootFile, func(c *Config) {
		c.Log = slog.New(slog.NewTextHandler(&logged, nil))
		c.Offered = func(ip netip.Addr, mac string) {
			if ip.String() == own && mac == "52:54:00:00:00:01" {
				asked++
			}
		}
		c.Declined = func(_ string, _ netip.Addr, kept bool) {
			if told++; !kept {
				t.Error("the reserved address is told as withheld")
			}
		}
	})
	if err := s.cfg.Leases.SetReservations([]lease.Reservation{{MAC: "52:54:00:00:00:01", Address: netip.MustParseAddr(own)}}); err != nil {
		t.Fatal(err)
	}
	for range 50 {
		for _, kind := range []dhcpv4.MessageType{dhcpv4.MessageTypeDiscover, dhcpv4.MessageTypeRequest} {
			if reply := ask(t, s, message(t, kind, wants(own))); reply == nil || !reply.YourIPAddr.Equal(ip4(own)) {
				t.Fatalf("%s after a decline is answered with %v, want the reserved address", kind, reply)
			}
		}
		ask(t, s, message(t, dhcpv4.MessageTypeDecline, wants(own)))
	}
	if asked != 100 || told != 1 || strings.Count(logged.String(), "declined") != 1 {
		t.Errorf("asked %d times who is there, told %d times, log %q, want 100, once and one line", asked, told, logged.String())
	}
	if _, err := s.cfg.Leases.Conflict(netip.MustParseAddr(own), "52:54:00:00:00:02"); err != nil {
		t.Errorf("Conflict at a declined address = %v", err)
	}
	if reply := ask(t, s, message(t, dhcpv4.MessageTypeDiscover)); reply != nil {
		t.Errorf("DISCOVER while another has the address = %s, want silence", reply.Summary())
	}
}

// TestDeclinedBehindARelay: nobody can ask who is at an address there, so that what a
// machine declines is not given to it again, reserved or not.
func TestDeclinedBehindARelay(t *testing.T) {
	const own = "10.5.0.50"
	var told []bool
	s := testServer(t, bootFile, func(c *Config) {
		c.Offered = func(ip netip.Addr, _ string) { t.Errorf("asked who is at %s", ip) }
		c.Declined = func(_ string, _ netip.Addr, kept bool) { told = append(told, kept) }
	})
	if err := s.cfg.Leases.SetReservations([]lease.Reservation{{MAC: "52:54:00:00:00:01", Address: netip.MustParseAddr(own)}}); err != nil {
		t.Fatal(err)
	}
	far := dhcpv4.WithGatewayIP(ip4("10.5.0.1"))
	for _, kind := range []dhcpv4.MessageType{dhcpv4.MessageTypeDiscover, dhcpv4.MessageTypeRequest} {
		if reply := ask(t, s, message(t, kind, wants(own), far)); reply == nil || !reply.YourIPAddr.Equal(ip4(own)) {
			t.Fatalf("%s is answered with %v, want the reserved address", kind, reply)
		}
	}
	ask(t, s, message(t, dhcpv4.MessageTypeDecline, wants(own), far))
	if reply := ask(t, s, message(t, dhcpv4.MessageTypeDiscover, far)); reply != nil {
		t.Errorf("DISCOVER after a DECLINE = %s, want silence", reply.Summary())
	}
	if !slices.Equal(told, []bool{false}) {
		t.Errorf("told that the address is kept: %v, want once that it is not", told)
	}
}

// TestKnownMachinesAreHeard: of each known machine it is told what it declines and why it
// is not answered, whatever number of them and of others there is; of the others, of one
// in a second, and of the rest where everything is logged.
func TestKnownMachinesAreHeard(t *testing.T) {
	const each = 100
	var logged strings.Builder
	told := map[bool]int{}
	known := func(mac string) bool { return strings.HasPrefix(mac, "52:54:00:00:07:") }
	s := testServer(t, bootFile, func(c *Config) {
		c.Known = known
		c.Log = slog.New(slog.NewTextHandler(&logged, &slog.HandlerOptions{Level: slog.LevelDebug}))
		c.Declined = func(mac string, _ netip.Addr, _ bool) { told[known(mac)]++ }
	})
	for i := range each {
		for _, mac := range []net.HardwareAddr{{2, 0, 0, 0, 7, byte(i)}, {0x52, 0x54, 0, 0, 7, byte(i)}} {
			from := dhcpv4.WithHwAddr(mac)
			reply := ask(t, s, message(t, dhcpv4.MessageTypeDiscover, from))
			if reply == nil {
				t.Fatalf("%s gets no offer", mac)
			}
			ask(t, s, message(t, dhcpv4.MessageTypeDecline, from, wants(reply.YourIPAddr.String())))
			ask(t, s, message(t, dhcpv4.MessageTypeRequest, from, wants("10.77.0.40"))) // of no range
		}
	}
	got := map[string]int{}
	for line := range strings.Lines(logged.String()) {
		level, rest, _ := strings.Cut(line[strings.Index(line, "level="):], " ")
		mac := rest[strings.Index(rest, "mac=")+4:]
		if what := rest[len("msg="):]; known(mac) {
			got[level+" "+what[:len("\"DHCP request")]]++
		} else {
			got[level+" of others"]++
		}
	}
	want := map[string]int{`level=WARN "DHCP address`: each, `level=WARN "DHCP request`: each, "level=WARN of others": 1, "level=INFO of others": 1, "level=DEBUG of others": 2*each - 2}
	if !maps.Equal(got, want) {
		t.Errorf("the log has %v, want %v", got, want)
	}
	if told[true] != each || told[false] != 1 {
		t.Errorf("told of %d declines of known machines and %d of others, want %d and 1", told[true], told[false], each)
	}
}

// TestKept: an ACK of a lease waits for the disk, and nothing else does.
func TestKept(t *testing.T) {
	for _, tt := range []struct {
		name string
		req  *dhcpv4.DHCPv4
		mode Mode
		kind dhcpv4.MessageType
		kept bool
	}{
		{"OFFER", message(t, dhcpv4.MessageTypeDiscover), Authoritative, dhcpv4.MessageTypeOffer, false},
		{"ACK", message(t, dhcpv4.MessageTypeRequest, wants("10.77.0.160")), Authoritative, dhcpv4.MessageTypeAck, true},
		{"NAK", message(t, dhcpv4.MessageTypeRequest, wants("192.0.2.9")), Authoritative, dhcpv4.MessageTypeNak, false},
		{"ACK of an INFORM", message(t, dhcpv4.MessageTypeInform, dhcpv4.WithClientIP(ip4("10.77.0.9"))), Authoritative, dhcpv4.MessageTypeAck, false},
		{"a proxy's ACK", message(t, dhcpv4.MessageTypeRequest, fromUEFI, names("10.77.0.1")), Proxy, dhcpv4.MessageTypeAck, false},
	} {
		s := testServer(t, bootFile, func(c *Config) { c.Mode = tt.mode })
		reply, a := askFrom(t, s, tt.req, source{})
		if reply == nil || reply.MessageType() != tt.kind || a.kept != tt.kept {
			t.Errorf("%s: %v waits for the disk: %v, want %v", tt.name, reply, a.kept, tt.kept)
		}
	}
}

// TestReleaseDecline: what is released is its machine's until somebody needs it,
// and what is declined is not offered again at once.
func TestReleaseDecline(t *testing.T) {
	s := testServer(t, bootFile)
	ask(t, s, message(t, dhcpv4.MessageTypeRequest, wants("10.77.0.160")))
	far := dhcpv4.WithGatewayIP(ip4("10.5.0.1"))
	for _, tt := range []struct {
		name        string
		req         *dhcpv4.DHCPv4
		ended, same bool
	}{
		{"a RELEASE for another server", message(t, dhcpv4.MessageTypeRelease, names("10.77.0.2"), dhcpv4.WithClientIP(ip4("10.77.0.160"))), false, true},
		{"a RELEASE by another subnet's relay", message(t, dhcpv4.MessageTypeRelease, far, dhcpv4.WithClientIP(ip4("10.77.0.160"))), false, true},
		{"a RELEASE", message(t, dhcpv4.MessageTypeRelease, names("10.77.0.1"), dhcpv4.WithClientIP(ip4("10.77.0.160"))), true, true},
		{"a DECLINE for another server", message(t, dhcpv4.MessageTypeDecline, names("10.77.0.2"), wants("10.77.0.160")), true, true},
		{"a DECLINE by another subnet's relay", message(t, dhcpv4.MessageTypeDecline, far, wants("10.77.0.160")), true, true},
		{"a DECLINE", message(t, dhcpv4.MessageTypeDecline, names("10.77.0.1"), wants("10.77.0.160")), true, false},
	} {
		if reply := ask(t, s, tt.req); reply != nil {
			t.Errorf("%s is answered with %s", tt.name, reply.MessageType())
		}
		l, _, _ := s.cfg.Leases.Lookup("lan", "52:54:00:00:00:01")
		if ended := l.Term <= 0; ended != tt.ended {
			t.Errorf("after %s the lease has ended: %v", tt.name, ended)
		}
		reply := ask(t, s, message(t, dhcpv4.MessageTypeDiscover, wants("10.77.0.160")))
		if reply == nil || reply.YourIPAddr.Equal(ip4("10.77.0.160")) != tt.same {
			t.Errorf("after %s, DISCOVER is offered %v, want the same address: %v", tt.name, reply, tt.same)
		}
	}
}
