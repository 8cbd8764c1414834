package dhcp

import (
	"bytes"
	"net/netip"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

// relayOption is RFC 3046's, whose parts are below.
const (
	relayOption    = 82
	circuitID      = 1
	remoteID       = 2
	linkSelection  = 5  // RFC 3527
	serverOverride = 11 // RFC 5107
)

// Subnet is one network of machines, and what they are told of it.
type Subnet struct {
	// Pool is the name of its addresses in the leases.
	Pool    string
	Network netip.Prefix
	// Server is the box's address as the machines there reach it.
	Server netip.Addr
	// Router is their default route; none if it is not valid.
	Router   netip.Addr
	DNS, NTP []netip.Addr
	Search   []string
	Routes   []Route
	// MTU is told unless it is 0.
	MTU uint16

	// The rest is for a subnet behind a relay. Giaddr is the relay's address there,
	// or not valid: then any inside Network is. CircuitID and RemoteID, where they
	// are set, must be option 82's.
	Giaddr              netip.Addr
	CircuitID, RemoteID []byte
}

// Route is a network and the router that leads there (RFC 3442).
type Route struct {
	To  netip.Prefix
	Via netip.Addr
}

// agent is what a relay says of the packet that it passed on.
type agent struct {
	giaddr   netip.Addr
	circuit  []byte
	remote   []byte
	link     netip.Addr // not valid: the relay's own address says where the client is
	override netip.Addr // what the relay wants as the server's identifier
}

// agentOf reads giaddr and option 82. What is torn in the option is not there.
func agentOf(req *dhcpv4.DHCPv4) agent {
	var a agent
	a.giaddr, _ = addr(req.GatewayIPAddr)
	for b := req.Options.Get(dhcpv4.OptionRelayAgentInformation); len(b) >= 2 && len(b) >= 2+int(b[1]); b = b[2+int(b[1]):] {
		v := b[2 : 2+int(b[1])]
		switch b[0] {
		case circuitID:
			a.circuit = v
		case remoteID:
			a.remote = v
		case linkSelection:
			a.link, _ = addr(v)
		case serverOverride:
			a.override, _ = addr(v)
		}
	}
	return a
}

// pick finds the subnet of a relayed request. Those that name a circuit or a
// remote come first: they are the narrower ones.
func pick(subnets []Subnet, a agent) *Subnet {
	for _, narrow := range []bool{true, false} {
		for i := range subnets {
			n := &subnets[i]
			if (n.CircuitID != nil || n.RemoteID != nil) == narrow && n.serves(a) {
				return n
			}
		}
	}
	return nil
}

func (n *Subnet) serves(a agent) bool {
	switch {
	case n.CircuitID != nil && !bytes.Equal(n.CircuitID, a.circuit), n.RemoteID != nil && !bytes.Equal(n.RemoteID, a.remote):
		return false
	case a.link.IsValid():
		return n.Network.Contains(a.link)
	case n.Giaddr.IsValid():
		return n.Giaddr == a.giaddr
	case n.CircuitID != nil, n.RemoteID != nil:
		return true
	}
	return n.Network.Contains(a.giaddr)
}

// holding finds the subnet behind a relay that an address lies in: a client
// that renews its lease asks without the relay.
func holding(subnets []Subnet, ip netip.Addr) *Subnet {
	for i := range subnets {
		if subnets[i].Network.Contains(ip) {
			return &subnets[i]
		}
	}
	return nil
}
