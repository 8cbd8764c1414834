package main

import (
	"encoding/binary"
	"net"
	"testing"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

// TestBootRequest: the load is what the codec reads as a UEFI machine's.
func TestBootRequest(t *testing.T) {
	for _, kind := range []byte{dhcpDiscover, dhcpRequest} {
		d, err := dhcpv4.FromBytes(bootRequest(258, kind, 0x0a4d1005, 0x0a4d0001))
		if err != nil {
			t.Fatal(err)
		}
		if d.MessageType() != dhcpv4.MessageType(kind) || d.ClientHWAddr.String() != "52:54:01:00:01:02" || d.ClassIdentifier()[:9] != "PXEClient" ||
			binary.BigEndian.Uint32(d.TransactionID[:]) != 259 || !d.IsBroadcast() {
			t.Errorf("bootRequest(%d) = %s", kind, d.Summary())
		}
		if got := d.RequestedIPAddress().String() + " " + d.ServerIdentifier().String(); kind == dhcpRequest && got != "10.77.16.5 10.77.0.1" {
			t.Errorf("bootRequest(%d) asks for %s", kind, got)
		}
	}
}

// TestLoadNoticesSharedAddresses: figures of a server that gives one address to
// two would say nothing.
func TestLoadNoticesSharedAddresses(t *testing.T) {
	ack := func(i int, ip net.IP) []byte {
		req, err := dhcpv4.FromBytes(bootRequest(i, dhcpRequest, 0x0a4d1005, 0x0a4d0001))
		if err != nil {
			t.Fatal(err)
		}
		d, err := dhcpv4.NewReplyFromRequest(req, dhcpv4.WithMessageType(dhcpv4.MessageTypeAck), dhcpv4.WithYourIP(ip))
		if err != nil {
			t.Fatal(err)
		}
		return d.ToBytes()
	}
	g := generator{clients: make([]bootingClient, 2), started: 2, taken: map[uint32]int{}}
	g.clients[0].waits, g.clients[1].waits = true, true
	for range 2 { // the second is late, and nobody waits for it
		if err := g.answer(ack(0, net.IPv4(10, 77, 16, 5))); err != nil || g.done != 1 {
			t.Errorf("answer = %v with %d done, want one", err, g.done)
		}
	}
	if err := g.answer(ack(1, net.IPv4(10, 77, 16, 5))); err == nil {
		t.Error("answer with another client's address succeeded")
	}
}
