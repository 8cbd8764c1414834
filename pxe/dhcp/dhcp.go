// Package dhcp is the DHCPv4 server of one interface, made for machines that network-boot.
//
// It follows RFC 2131 and the network-boot options of RFC 4578, with these
// choices: a machine is its MAC, whatever client identifier its firmware,
// iPXE and system send; siaddr, the file field and option 67 always say the
// same, and sname nothing; option 60 goes back to HTTP boot, which insists on
// it, and with what a proxy answers, but not with an address, since a
// "PXEClient" there makes firmware look for a boot server. An ACK leaves when
// its lease is on disk, an OFFER at once. A NAK is for systems only: firmware
// and iPXE give up and go to their disk when they get one.
package dhcp

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/iana"
	"github.com/insomniacslk/dhcp/rfc1035label"

	"github.com/better-compute/site-appliance/appliance/base/printable"
	"github.com/better-compute/site-appliance/pxe/chain"
	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/lease"
)

// leaseTime is short enough that a changed pool is taken up within the hour.
const leaseTime = time.Hour

// Mode is what the server gives, and to whom.
type Mode int

const (
	// Authoritative gives addresses to everybody: the only server of its networks.
	Authoritative Mode = iota
	// Reservations gives reserved addresses, and is silent to everybody else.
	Reservations
	// Proxy gives no address: boot options, beside another server.
	Proxy
	// Relay answers what relays pass on, and nobody on its own wire.
	Relay
)

// Step is how far a boot request has come.
type Step string

const (
	Offered      Step = "offer"
	Acknowledged Step = "ack"
	// Proxied is a proxy's offer. Most clients ask the proxy no more after it.
	Proxied Step = "proxy"
)

// Ask is one question for what to boot.
type Ask struct {
	Who
	// IP is what the machine has or is given; not valid where another server gives it.
	IP netip.Addr
	// Server is the box's address as the machine reaches it.
	Server netip.Addr
	Step   Step
	// Asked is when a client that has no address yet asked, as far as it was surely this
	// one; zero otherwise.
	Asked time.Time
}

// Config is one interface's DHCP.
type Config struct {
	Interface string
	Mode      Mode
	// Local is the wire's own network, in which Server is the box's address there.
	Local Subnet
	// Relayed are those behind relays, in modes Authoritative and Relay.
	Relayed []Subnet
	// Takeover serves authoritatively whoever else does.
	Takeover bool
	// BMC gives nothing to boot: what gets an address is told to Seen.
	BMC bool
	// Leases is nil in mode Proxy.
	Leases *lease.Database
	// Known says whether a MAC is of a machine that somebody vouches for: those are
	// answered first.
	Known func(mac string) bool
	// Name is a machine's host name, empty for none.
	Name func(mac string) string
	// Heard is told who asks, before that is answered; it may be nil.
	Heard func(Who)
	// Boot says what who gets to boot: a file name or URL of at most 127 bytes,
	// empty for nothing. Called from the server's loop: it must not block.
	Boot func(Ask) string
	// Offered is told of each address that is offered; it may be nil.
	Offered func(ip netip.Addr, mac string)
	// Seen is told of each machine that was given an address on a BMC network.
	Seen func(who Who, ip netip.Addr)
	// Declined is told of each address that the machine with a lease of it found in
	// use, and whether it is kept for it all the same; it may be nil.
	Declined func(mac string, ip netip.Addr, kept bool)
	// Foreign is told of other servers in mode Authoritative, of each at most once
	// in ten minutes.
	Foreign func(Foreign)
	// Chains is what machines were given before; nil: a memory of this server alone.
	Chains *chain.Memory
	// Probing is DefaultProbing if it is zero.
	Probing Probing
	Now     func() time.Time
	Log     *slog.Logger
}

// source is where a packet came from.
type source struct {
	addr netip.AddrPort
	// proxy says that it came to the proxy's own port, 4011.
	proxy bool
	// at is when it came; zero where it came from another MAC than it names.
	at time.Time
}

// answer is a reply and its way.
type answer struct {
	reply *dhcpv4.DHCPv4
	to    target
	most  int
	// kept says that it must not leave before its lease is on disk.
	kept bool
}

// target is where a reply goes; without a MAC the kernel finds the way.
type target struct {
	mac  net.HardwareAddr
	addr netip.AddrPort
	// proxy sends it from port 4011.
	proxy bool
}

var (
	everyone     = netip.AddrFrom4([4]byte{255, 255, 255, 255})
	broadcastMAC = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
)

// route picks the way of RFC 2131, section 4.1. What came to the proxy's port
// goes back to where it came from: EDK2 asks there from the same port.
func route(req, reply *dhcpv4.DHCPv4, from source, network netip.Prefix) target {
	all := target{mac: broadcastMAC, addr: netip.AddrPortFrom(everyone, dhcpv4.ClientPort)}
	if from.proxy && from.addr.IsValid() && !from.addr.Addr().IsUnspecified() {
		return target{addr: from.addr, proxy: true}
	}
	if ip, ok := addr(req.GatewayIPAddr); ok {
		return target{addr: netip.AddrPortFrom(ip, dhcpv4.ServerPort)}
	}
	if reply.MessageType() == dhcpv4.MessageTypeNak {
		return all
	}
	// What the client says that it has counts where it was given that. Where it was given
	// nothing, as by an INFORM's answer and a proxy's, any address of the network does: a
	// made-up one costs an ARP request of the kernel's.
	given, gives := addr(reply.YourIPAddr)
	if ip, ok := addr(req.ClientIPAddr); ok && network.Contains(ip) && (!gives || ip == given) {
		return target{addr: netip.AddrPortFrom(ip, dhcpv4.ClientPort)}
	}
	if gives && !req.IsBroadcast() {
		// The client has no address yet and answers no ARP: the frame is made by hand.
		return target{mac: req.ClientHWAddr, addr: netip.AddrPortFrom(given, dhcpv4.ClientPort)}
	}
	return all
}

// request is a request with all that the answer to it depends on.
type request struct {
	*dhcpv4.DHCPv4
	mac    string
	who    Who
	from   source
	agent  agent
	subnet *Subnet
	// server is the identifier that the client knows the box by.
	server netip.Addr
}

// handle is the answer to one packet, false for none.
func (s *Server) handle(req *dhcpv4.DHCPv4, from source) (answer, bool) {
	hw := req.ClientHWAddr
	const mostRelay = 255 // of option 82, which goes back whole
	if req.OpCode != dhcpv4.OpcodeBootRequest || req.HWType != iana.HWTypeEthernet || len(hw) != 6 || hw[0]&1 != 0 ||
		len(req.Options.Get(dhcpv4.OptionRelayAgentInformation)) > mostRelay {
		return answer{}, false
	}
	r := request{DHCPv4: req, mac: hw.String(), from: from, agent: agentOf(req)}
	if r.subnet = s.subnetOf(r); r.subnet == nil {
		return answer{}, false
	}
	r.server = r.subnet.Server
	if r.agent.override.IsValid() && r.agent.giaddr.IsValid() {
		r.server = r.agent.override
	}
	r.who = classify(req)
	if s.known(r.mac) {
		r.who.Client = s.cfg.Chains.Judge(chain.DHCPv4, r.mac, chain.Exchange{ID: binary.BigEndian.Uint32(req.TransactionID[:])}, r.who.Client, s.cfg.Now())
	}
	if s.cfg.Heard != nil {
		s.cfg.Heard(r.who)
	}
	var reply *dhcpv4.DHCPv4
	switch {
	case s.cfg.Mode == Proxy:
		reply = s.proxy(r)
	case from.proxy:
	default:
		reply = s.lease(r)
	}
	if reply == nil {
		return answer{}, false
	}
	kept := reply.MessageType() == dhcpv4.MessageTypeAck && s.cfg.Mode != Proxy && req.MessageType() == dhcpv4.MessageTypeRequest
	return answer{reply: reply, to: route(req, reply, from, r.subnet.Network), most: room(req), kept: kept}, true
}

func (s *Server) known(mac string) bool { return s.cfg.Known != nil && s.cfg.Known(mac) }

// subnetOf is the network that the client is in, nil where it is not served.
func (s *Server) subnetOf(r request) *Subnet {
	relays := s.cfg.Mode == Authoritative || s.cfg.Mode == Relay
	if r.agent.giaddr.IsValid() {
		if !relays {
			return nil
		}
		n := pick(s.cfg.Relayed, r.agent)
		if n == nil {
			s.cfg.Log.Debug("DHCP request dropped: no relay section is for it", "mac", r.mac, "giaddr", r.agent.giaddr.String(),
				"link", r.agent.link.String(), "circuit", printable.ASCII(string(r.agent.circuit), 64))
		}
		return n
	}
	if ip, ok := addr(r.ClientIPAddr); ok && relays {
		if n := holding(s.cfg.Relayed, ip); n != nil {
			return n
		}
	}
	if s.cfg.Mode == Relay {
		return nil
	}
	return &s.cfg.Local
}

// lease answers as the server of the client's network.
func (s *Server) lease(r request) *dhcpv4.DHCPv4 {
	if _, has := s.cfg.Leases.Reserved(r.subnet.Pool, r.mac); !has && s.cfg.Mode == Reservations {
		return nil
	}
	named, other := addr(r.ServerIdentifier())
	other = other && named != r.server && named != r.subnet.Server && named != s.cfg.Local.Server
	switch r.MessageType() {
	case dhcpv4.MessageTypeDiscover:
		want, _ := addr(r.RequestedIPAddress())
		ip, err := s.cfg.Leases.Offer(r.subnet.Pool, r.mac, want)
		if err != nil {
			s.refused(r, "DHCP request not answered", err)
			return nil
		}
		if s.asks(r) {
			s.cfg.Offered(ip, r.mac)
		}
		return s.reply(r, dhcpv4.MessageTypeOffer, ip, leaseTime)
	case dhcpv4.MessageTypeRequest:
		if other {
			s.cfg.Leases.Withdraw(r.subnet.Pool, r.mac)
			s.foreign(Foreign{Server: named, MAC: r.mac})
			return nil
		}
		return s.request(r)
	case dhcpv4.MessageTypeInform:
		if ip, ok := addr(r.ClientIPAddr); ok && r.subnet.Network.Contains(ip) {
			return s.reply(r, dhcpv4.MessageTypeAck, netip.Addr{}, 0)
		}
	case dhcpv4.MessageTypeRelease:
		if ip, ok := addr(r.ClientIPAddr); ok && !other && r.subnet.Network.Contains(ip) {
			s.cfg.Leases.Release(r.mac, ip)
		}
	case dhcpv4.MessageTypeDecline:
		if ip, ok := addr(r.RequestedIPAddress()); ok && !other && r.subnet.Network.Contains(ip) {
			s.declined(r, ip)
		}
	}
	return nil
}

func (s *Server) declined(r request, ip netip.Addr) {
	declined, kept := s.cfg.Leases.Decline(r.mac, ip, s.asks(r))
	if !declined {
		return
	}
	if kept {
		s.cfg.Offered(ip, r.mac) // who is there answers
	}
	level := slog.LevelWarn
	if told := !s.known(r.mac) && s.told("DHCP address declined"); told {
		level = slog.LevelDebug
	} else if s.cfg.Declined != nil {
		s.cfg.Declined(r.mac, ip, kept)
	}
	s.cfg.Log.Log(context.Background(), level, "DHCP address declined: another machine uses it", "mac", r.mac, "ip", ip.String(), "kept", kept)
}

// asks says whether somebody asks who is at an address of the client's network: behind
// a relay nobody can.
func (s *Server) asks(r request) bool { return s.cfg.Offered != nil && !r.agent.giaddr.IsValid() }

// request answers the states of RFC 2131, section 4.3.2.
func (s *Server) request(r request) *dhcpv4.DHCPv4 {
	ip, ok := addr(r.RequestedIPAddress())
	if !ok {
		ip, ok = addr(r.ClientIPAddr)
	}
	if !ok {
		return nil
	}
	got, err := s.cfg.Leases.Bind(r.subnet.Pool, r.mac, ip, leaseTime)
	if err == nil {
		return s.reply(r, dhcpv4.MessageTypeAck, ip, got.Term)
	}
	s.refused(r, "DHCP request refused", err)
	if !s.mayRefuse(r, ip) {
		return nil
	}
	return s.nak(r)
}

// mayRefuse says whether a NAK is in place. What boots gets none, for it goes
// to its disk then and does not ask again; silence makes it. A system that took
// the box's offer, or whose address is of no network here or another's, does.
// Of an address of this network about which nothing is known, another server
// may know more (RFC 2131, 4.3.2).
func (s *Server) mayRefuse(r request, ip netip.Addr) bool {
	if !isSystem(r.who.Client) {
		return false
	}
	if _, ours := addr(r.ServerIdentifier()); ours {
		return true
	}
	if _, has := s.cfg.Leases.Reserved(r.subnet.Pool, r.mac); has {
		return true
	}
	if s.cfg.Mode == Reservations {
		return false
	}
	if !r.subnet.Network.Contains(ip) {
		return true
	}
	if l, has, _ := s.cfg.Leases.Lookup(r.subnet.Pool, r.mac); has && l.Address != ip {
		return true
	}
	holder, taken := s.cfg.Leases.Holder(ip)
	return taken && holder != r.mac
}

func (s *Server) nak(r request) *dhcpv4.DHCPv4 {
	reply, err := dhcpv4.NewReplyFromRequest(r.DHCPv4, dhcpv4.WithMessageType(dhcpv4.MessageTypeNak),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(r.server.AsSlice())))
	if err != nil {
		return nil
	}
	if r.agent.giaddr.IsValid() {
		reply.SetBroadcast() // the relay is to send it to all (RFC 2131, 4.3.2)
	}
	return reply
}

// reply builds an OFFER or ACK; without an address it answers an INFORM.
func (s *Server) reply(r request, kind dhcpv4.MessageType, ip netip.Addr, term time.Duration) *dhcpv4.DHCPv4 {
	n := r.subnet
	mask := net.CIDRMask(n.Network.Bits(), 32)
	mods := []dhcpv4.Modifier{
		dhcpv4.WithMessageType(kind),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(r.server.AsSlice())),
		dhcpv4.WithNetmask(mask),
		dhcpv4.WithOption(dhcpv4.OptBroadcastAddress(broadcast(n.Network.Addr().AsSlice(), mask))),
		n.tell(r.DHCPv4),
		echo(r.DHCPv4),
	}
	if kind == dhcpv4.MessageTypeAck {
		mods = append(mods, dhcpv4.WithClientIP(r.ClientIPAddr))
	}
	holder := ip
	if ip.IsValid() {
		mods = append(mods, dhcpv4.WithYourIP(ip.AsSlice()), dhcpv4.WithLeaseTime(uint32(term/time.Second)),
			dhcpv4.WithOption(dhcpv4.OptRenewTimeValue((term / 2).Truncate(time.Second))),
			dhcpv4.WithOption(dhcpv4.OptRebindingTimeValue((term * 7 / 8).Truncate(time.Second))))
	} else {
		holder, _ = addr(r.ClientIPAddr)
	}
	if name := s.name(r.mac); name != "" && asked(r.DHCPv4, dhcpv4.OptionHostName) {
		mods = append(mods, dhcpv4.WithOption(dhcpv4.OptHostName(name)))
	}
	if file := s.boots(r, kind, holder); file != "" {
		mods = append(mods, boot(n.Server, r.who.Client, file))
		if isIPXE(r.who.Client) {
			mods = append(mods, dhcpv4.WithGeneric(dhcpv4.GenericOptionCode(optionIPXE), noProxy))
		}
	}
	reply, err := dhcpv4.NewReplyFromRequest(r.DHCPv4, mods...)
	if err != nil {
		// Only a missing source of random numbers for an xid that is overwritten anyway.
		s.cfg.Log.Error("DHCP answer not built", "err", err)
		return nil
	}
	if kind == dhcpv4.MessageTypeAck && s.cfg.BMC && s.cfg.Seen != nil {
		s.cfg.Seen(r.who, holder)
	}
	return reply
}

func (s *Server) name(mac string) string {
	if s.cfg.Name == nil {
		return ""
	}
	return s.cfg.Name(mac)
}

// boots is what the client is to boot, empty for nothing.
func (s *Server) boots(r request, kind dhcpv4.MessageType, ip netip.Addr) string {
	if isSystem(r.who.Client) || s.cfg.BMC {
		return ""
	}
	step := Acknowledged
	switch {
	case kind == dhcpv4.MessageTypeOffer && s.cfg.Mode == Proxy:
		step = Proxied
	case kind == dhcpv4.MessageTypeOffer:
		step = Offered
	}
	ask := Ask{Who: r.who, IP: ip, Server: r.subnet.Server, Step: step}
	// Of what relays and routers pass on, and of what comes to port 4011, the sender is not
	// looked at; a client with an address renews it.
	if _, has := addr(r.ClientIPAddr); !has && !r.from.proxy && !r.agent.giaddr.IsValid() {
		ask.Asked = r.from.at
	}
	file := s.cfg.Boot(ask)
	if len(file) >= 128 {
		s.cfg.Log.Error("DHCP boot file left out: its name is too long", "mac", r.mac, "file", file)
		return ""
	}
	return file
}

// noProxy is option 175 of an answer that boots an iPXE: its no-pxedhcp spares it
// the 11 seconds that it would listen for a proxy beside this server.
var noProxy = []byte{0xb0, 1, 1}

// useBootFile is option 43 of what a proxy answers: sub-option 6 with bit 3 set
// says that there is no menu and no boot server to look for, just the file.
var useBootFile = []byte{6, 1, 8, 255}

// proxy answers with boot options alone. A REQUEST on port 67 is meant for the
// server that leases, unless it names the box; what comes to port 4011 is the box's.
func (s *Server) proxy(r request) *dhcpv4.DHCPv4 {
	named, ok := addr(r.ServerIdentifier())
	kind := dhcpv4.MessageTypeAck
	switch r.MessageType() {
	case dhcpv4.MessageTypeDiscover:
		kind = dhcpv4.MessageTypeOffer
	case dhcpv4.MessageTypeRequest:
		if ip, asked := addr(r.RequestedIPAddress()); asked && !r.from.proxy {
			s.heard(ip, r.mac)
		}
		if !r.from.proxy && (!ok || named != r.server) {
			return nil
		}
	case dhcpv4.MessageTypeInform:
	default:
		return nil
	}
	ip, has := addr(r.ClientIPAddr)
	if has {
		s.heard(ip, r.mac)
	}
	file := s.boots(r, kind, ip)
	if file == "" {
		return nil
	}
	mods := []dhcpv4.Modifier{
		dhcpv4.WithMessageType(kind),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(r.server.AsSlice())),
		echo(r.DHCPv4),
		boot(r.server, r.who.Client, file),
		dhcpv4.WithClientIP(r.ClientIPAddr),
	}
	if !isHTTPBoot(r.who.Client) {
		mods = append(mods, dhcpv4.WithOption(dhcpv4.OptClassIdentifier("PXEClient")),
			dhcpv4.WithGeneric(dhcpv4.OptionVendorSpecificInformation, useBootFile))
	}
	reply, err := dhcpv4.NewReplyFromRequest(r.DHCPv4, mods...)
	if err != nil {
		s.cfg.Log.Error("DHCP answer not built", "err", err)
		return nil
	}
	return reply
}

// boot sets what names the boot program, everywhere alike. Some BIOS ROMs read
// option 67 up to a NUL, which the option's length alone does not promise.
func boot(server netip.Addr, client decide.Client, file string) dhcpv4.Modifier {
	return func(d *dhcpv4.DHCPv4) {
		d.ServerIPAddr = server.AsSlice()
		d.BootFileName = file
		d.UpdateOption(dhcpv4.OptBootFileName(file + "\x00"))
		if isHTTPBoot(client) {
			d.UpdateOption(dhcpv4.OptClassIdentifier("HTTPClient"))
		}
	}
}

// echo gives option 97 back where it came (RFC 4578, 2.3); some firmware sends none.
func echo(req *dhcpv4.DHCPv4) dhcpv4.Modifier {
	return func(d *dhcpv4.DHCPv4) {
		if id := req.Options.Get(dhcpv4.OptionClientMachineIdentifier); id != nil {
			d.UpdateOption(dhcpv4.OptGeneric(dhcpv4.OptionClientMachineIdentifier, id))
		}
	}
}

// asked says whether the client wants an option: those that firmware has no use
// for would only push others out.
func asked(req *dhcpv4.DHCPv4, code dhcpv4.OptionCode) bool {
	list := req.ParameterRequestList()
	return len(list) == 0 || list.Has(code)
}

// tell sets what the machines of the subnet are told.
func (n *Subnet) tell(req *dhcpv4.DHCPv4) dhcpv4.Modifier {
	return func(d *dhcpv4.DHCPv4) {
		if n.Router.IsValid() {
			d.UpdateOption(dhcpv4.OptRouter(n.Router.AsSlice()))
		}
		for _, o := range []struct {
			code   dhcpv4.OptionCode
			set    bool
			option func() dhcpv4.Option
		}{
			{dhcpv4.OptionDomainNameServer, len(n.DNS) > 0, func() dhcpv4.Option { return dhcpv4.OptDNS(ips(n.DNS)...) }},
			{dhcpv4.OptionNTPServers, len(n.NTP) > 0, func() dhcpv4.Option { return dhcpv4.OptNTPServers(ips(n.NTP)...) }},
			{dhcpv4.OptionDNSDomainSearchList, len(n.Search) > 0, func() dhcpv4.Option {
				return dhcpv4.OptDomainSearch(&rfc1035label.Labels{Labels: n.Search})
			}},
			{dhcpv4.OptionInterfaceMTU, n.MTU != 0, func() dhcpv4.Option {
				return dhcpv4.OptGeneric(dhcpv4.OptionInterfaceMTU, []byte{byte(n.MTU >> 8), byte(n.MTU)})
			}},
			{dhcpv4.OptionClasslessStaticRoute, len(n.Routes) > 0, func() dhcpv4.Option { return dhcpv4.OptClasslessStaticRoute(n.routes()...) }},
		} {
			if o.set && asked(req, o.code) {
				d.UpdateOption(o.option())
			}
		}
	}
}

// routes are those for option 121. Who reads it ignores option 3, so that the
// router stands in it too (RFC 3442).
func (n *Subnet) routes() []*dhcpv4.Route {
	all := n.Routes
	if n.Router.IsValid() {
		all = append(all[:len(all):len(all)], Route{To: netip.PrefixFrom(netip.IPv4Unspecified(), 0), Via: n.Router})
	}
	var routes []*dhcpv4.Route
	for _, r := range all {
		routes = append(routes, &dhcpv4.Route{Router: r.Via.AsSlice(),
			Dest: &net.IPNet{IP: r.To.Addr().AsSlice(), Mask: net.CIDRMask(r.To.Bits(), 32)}})
	}
	return routes
}

func ips(addrs []netip.Addr) []net.IP {
	var out []net.IP
	for _, a := range addrs {
		out = append(out, a.AsSlice())
	}
	return out
}

func broadcast(own net.IP, mask net.IPMask) net.IP {
	ip := make(net.IP, 4)
	for i := range ip {
		ip[i] = own[i] | ^mask[i]
	}
	return ip
}

// addr is ip as an address, false for none or 0.0.0.0.
func addr(ip net.IP) (netip.Addr, bool) {
	a, ok := netip.AddrFromSlice(ip)
	a = a.Unmap()
	if !ok || !a.Is4() || a.IsUnspecified() {
		return netip.Addr{}, false
	}
	return a, true
}

// refused says why a machine gets no address. A full pool under a flood would fill the log.
func (s *Server) refused(r request, what string, err error) {
	level := slog.LevelInfo
	var waits *lease.WaitError
	if errors.As(err, &waits) || s.known(r.mac) {
		level = slog.LevelWarn
	} else if s.told(what) {
		level = slog.LevelDebug
	}
	s.cfg.Log.Log(context.Background(), level, what, "mac", r.mac, "err", err)
}
