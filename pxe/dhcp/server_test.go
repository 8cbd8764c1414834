package dhcp

import (
	"net"
	"strings"
	"testing"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/better-compute/site-appliance/pxe/limit"
)

// TestKnownFirst: what made-up MACs fill is bounded and not the known machines' queue.
func TestKnownFirst(t *testing.T) {
	s := testServer(t, bootFile, func(c *Config) { c.Known = func(mac string) bool { return strings.HasPrefix(mac, "52:54:00:00:07:") } })
	limiter := limit.New()
	from := func(mac ...byte) []byte {
		return message(t, dhcpv4.MessageTypeDiscover, dhcpv4.WithHwAddr(net.HardwareAddr(mac))).ToBytes()
	}
	queued := 0
	for i := range 2 * maxUnknown {
		if s.sort(limiter, from(2, 0, 0, 9, byte(i>>8), byte(i)), source{}, t0) {
			queued++
		}
	}
	if queued != maxUnknown {
		t.Errorf("of a flood of made-up MACs %d packets wait, want %d", queued, maxUnknown)
	}
	queued = 0
	for range 1000 {
		if s.sort(limiter, from(0x52, 0x54, 0, 0, 7, 1), source{}, t0) {
			queued++
		}
	}
	if queued != limit.PerBurst || len(s.first) != limit.PerBurst {
		t.Errorf("of one known MAC's flood %d packets wait, %d of them first, want %d", queued, len(s.first), limit.PerBurst)
	}
	if !s.sort(limiter, from(0x52, 0x54, 0, 0, 7, 2), source{}, t0) || len(s.first) != limit.PerBurst+1 {
		t.Error("another known machine finds no place in the queue")
	}
	if s.sort(limiter, make([]byte, bootpHeader-1), source{}, t0) {
		t.Error("a packet that is too short is queued")
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
	for _, tt := range []struct {
		name string
		req  *dhcpv4.DHCPv4
		same bool
	}{
		{"a RELEASE for another server", message(t, dhcpv4.MessageTypeRelease, names("10.77.0.2"), dhcpv4.WithClientIP(ip4("10.77.0.160"))), true},
		{"a RELEASE", message(t, dhcpv4.MessageTypeRelease, names("10.77.0.1"), dhcpv4.WithClientIP(ip4("10.77.0.160"))), true},
		{"a DECLINE for another server", message(t, dhcpv4.MessageTypeDecline, names("10.77.0.2"), wants("10.77.0.160")), true},
		{"a DECLINE", message(t, dhcpv4.MessageTypeDecline, names("10.77.0.1"), wants("10.77.0.160")), false},
	} {
		if reply := ask(t, s, tt.req); reply != nil {
			t.Errorf("%s is answered with %s", tt.name, reply.MessageType())
		}
		l, _, _ := s.cfg.Leases.Lookup("lan", "52:54:00:00:00:01")
		if released := l.Term <= 0; tt.same && released != (tt.name != "a RELEASE for another server") {
			t.Errorf("after %s the lease has ended: %v", tt.name, released)
		}
		reply := ask(t, s, message(t, dhcpv4.MessageTypeDiscover, wants("10.77.0.160")))
		if reply == nil || reply.YourIPAddr.Equal(ip4("10.77.0.160")) != tt.same {
			t.Errorf("after %s, DISCOVER is offered %v, want the same address: %v", tt.name, reply, tt.same)
		}
	}
}
