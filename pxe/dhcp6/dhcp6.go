// Package dhcp6 is the DHCPv6 server of one interface, made for machines that network-boot.
//
// It follows RFC 8415 and the boot options of RFC 5970, with these choices. A
// machine is the MAC that its frame came from: firmware, iPXE and system send
// different DUIDs, and one system sends the same DUID from each of its ports. Its
// address is made from its MAC, so that nothing is kept on disk, no pool runs
// out and no flood costs memory. It gets one address, whatever IAIDs it asks for.
// That nobody else uses the address, the machine itself finds out (RFC 4862,
// 5.4); where it declines one, it gets its next. Answers go out as frames, to the
// MAC that asked: forged sources do not fill the kernel's table of neighbours.
// What relays pass on is not answered.
package dhcp6

import (
	"bytes"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"
	"github.com/insomniacslk/dhcp/rfc1035label"

	"github.com/better-compute/site-appliance/pxe/chain"
	"github.com/better-compute/site-appliance/pxe/decide"
)

const (
	// lifetime is how long an address is used without asking again.
	lifetime = time.Hour
	// declinedFor is how long an address that is in use elsewhere is not given out.
	declinedFor = 24 * time.Hour
	// maxDeclined bounds what is remembered of those.
	maxDeclined = 4096
)

// Ask is one question for what to boot.
type Ask struct {
	Who
	// IP is what the machine has or is given; not valid where it asks for no address.
	IP netip.Addr
	// Final says that the answer is the last of its exchange.
	Final bool
}

// Config is one interface's DHCPv6.
type Config struct {
	Interface string
	// Address is the box's own in the network that it gives addresses of, a /64.
	Address netip.Prefix
	// DNS, NTP and Search are told to who asks for them.
	DNS, NTP []netip.Addr
	Search   []string
	// Known says whether a MAC is of a machine that somebody vouches for: those are
	// answered first.
	Known func(mac string) bool
	// Arch is what was heard of a machine's architecture before.
	Arch func(mac string) decide.Arch
	// Boot says what who gets to boot: a URL, empty for nothing. Called from the
	// server's loop: it must not block.
	Boot func(Ask) string
	// Declined is told of each address that its machine found in use; it may be nil.
	Declined func(mac string, ip netip.Addr)
	// Chains is what machines were given before, by DHCPv4 too.
	Chains *chain.Memory
	Now    func() time.Time
	Log    *slog.Logger
}

// source is where a packet came from.
type source struct {
	mac  [6]byte
	addr netip.Addr
	// group says that it was sent to the servers' multicast address.
	group bool
}

// request is a request with all that the answer to it depends on.
type request struct {
	*dhcpv6.Message
	source
	who        Who
	enterprise uint32 // of the vendor class
}

// need is what RFC 8415, section 16, wants of an identifier in a message.
type need int

const (
	may need = iota
	must
	mustNot
)

// served are the messages that are answered, what they must hold, and how they
// are. The server's identifier must be the box's wherever it stands.
var served = map[dhcpv6.MessageType]struct {
	client, server need
	// toOne: the client may send it to the server alone if the server has allowed
	// that, which this one never does.
	toOne  bool
	answer func(*Server, request) *dhcpv6.Message
}{
	dhcpv6.MessageTypeSolicit:            {must, mustNot, false, (*Server).solicit},
	dhcpv6.MessageTypeRequest:            {must, must, true, (*Server).renew},
	dhcpv6.MessageTypeRenew:              {must, must, true, (*Server).renew},
	dhcpv6.MessageTypeRebind:             {must, mustNot, false, (*Server).renew},
	dhcpv6.MessageTypeConfirm:            {must, mustNot, false, (*Server).confirm},
	dhcpv6.MessageTypeRelease:            {must, must, true, (*Server).ended},
	dhcpv6.MessageTypeDecline:            {must, must, true, (*Server).decline},
	dhcpv6.MessageTypeInformationRequest: {may, may, false, (*Server).inform},
}

func (n need) met(there bool) bool {
	switch n {
	case must:
		return there
	case mustNot:
		return !there
	}
	return true
}

// handle is the answer to one message, nil for none.
func (s *Server) handle(m *dhcpv6.Message, from source) *dhcpv6.Message {
	rule, ok := served[m.MessageType]
	if !ok || !ofOne(from.mac) {
		return nil
	}
	client, server := m.GetOneOption(dhcpv6.OptionClientID), m.GetOneOption(dhcpv6.OptionServerID)
	if !rule.client.met(client != nil) || !rule.server.met(server != nil) || server != nil && !bytes.Equal(server.ToBytes(), s.duid.ToBytes()) {
		return nil
	}
	r := request{Message: m, source: from}
	if !from.group {
		if !rule.toOne {
			return nil
		}
		reply := s.reply(r, dhcpv6.MessageTypeReply)
		reply.AddOption(status(iana.StatusUseMulticast, "send to ff02::1:2"))
		return s.signed(reply)
	}
	mac := net.HardwareAddr(from.mac[:]).String()
	r.who, r.enterprise = classify(m, mac)
	if r.who.Client.Arch == decide.OtherArch && r.who.Client.Program == decide.IPXE {
		if r.who.Client.Arch = s.cfg.Arch(mac); r.who.Client.Arch == decide.OtherArch {
			r.who.Client.Arch = decide.X64
		}
	}
	if s.cfg.Known(mac) {
		// Not every client numbers a REQUEST as its SOLICIT.
		xid := m.TransactionID
		x := chain.Exchange{ID: uint32(xid[0])<<16 | uint32(xid[1])<<8 | uint32(xid[2]), Continued: rule.server == must}
		r.who.Client = s.cfg.Chains.Judge(chain.DHCPv6, mac, x, r.who.Client, s.cfg.Now())
	}
	return s.signed(rule.answer(s, r))
}

// signed puts the server's identifier last: some firmware reads the boot file's
// URL up to a NUL, and the option that follows begins with one.
func (s *Server) signed(reply *dhcpv6.Message) *dhcpv6.Message {
	if reply != nil {
		reply.AddOption(dhcpv6.OptServerID(s.duid))
	}
	return reply
}

// solicit offers, or gives at once where the client asks for that.
func (s *Server) solicit(r request) *dhcpv6.Message {
	kind := dhcpv6.MessageTypeAdvertise
	rapid := r.GetOneOption(dhcpv6.OptionRapidCommit)
	if rapid != nil {
		kind = dhcpv6.MessageTypeReply
	}
	reply := s.reply(r, kind)
	if rapid != nil {
		reply.AddOption(&dhcpv6.OptionGeneric{OptionCode: dhcpv6.OptionRapidCommit})
	}
	ip := s.associate(r, reply, false)
	if s.tell(r, reply, ip, rapid != nil) && rapid == nil {
		// It gets here what it is to boot: it need not wait for other servers.
		reply.AddOption(dhcpv6.OptPreference(255))
	}
	return reply
}

// renew answers REQUEST, RENEW and REBIND. Since an address says by itself whose
// it is, none is ever unknown.
func (s *Server) renew(r request) *dhcpv6.Message {
	reply := s.reply(r, dhcpv6.MessageTypeReply)
	ip := s.associate(r, reply, true)
	s.tell(r, reply, ip, true)
	return reply
}

// confirm says whether the addresses are of this network.
func (s *Server) confirm(r request) *dhcpv6.Message {
	all := listed(r.Message)
	if len(all) == 0 {
		return nil
	}
	code, text := iana.StatusSuccess, ""
	for _, ip := range all {
		if !s.cfg.Address.Contains(ip) {
			code, text = iana.StatusNotOnLink, "the address is of another network"
		}
	}
	reply := s.reply(r, dhcpv6.MessageTypeReply)
	reply.AddOption(status(code, text))
	return reply
}

func (s *Server) decline(r request) *dhcpv6.Message {
	for _, ip := range listed(r.Message) {
		if s.owns(r.mac, ip) && s.setDeclined(ip) {
			s.cfg.Log.Warn("DHCPv6 address declined: another machine uses it", "mac", r.who.MAC, "ip", ip.String())
			if s.cfg.Declined != nil {
				s.cfg.Declined(r.who.MAC, ip)
			}
		}
	}
	return s.ended(r)
}

// ended answers RELEASE and DECLINE.
func (s *Server) ended(r request) *dhcpv6.Message {
	reply := s.reply(r, dhcpv6.MessageTypeReply)
	for _, ia := range r.Options.IANA() {
		mine := false
		for _, ip := range addresses(ia) {
			mine = mine || s.owns(r.mac, ip)
		}
		if !mine {
			reply.AddOption(&dhcpv6.OptIANA{IaId: ia.IaId, Options: refused(iana.StatusNoBinding, "no such address is given to this machine")})
		}
	}
	reply.AddOption(status(iana.StatusSuccess, ""))
	return reply
}

// inform answers who needs no address. An association in the question makes it
// no such one (RFC 8415, 16.12).
func (s *Server) inform(r request) *dhcpv6.Message {
	if len(r.Options.IANA())+len(r.Options.IATA())+len(r.Options.IAPD()) > 0 {
		return nil
	}
	reply := s.reply(r, dhcpv6.MessageTypeReply)
	var ip netip.Addr
	if s.cfg.Address.Contains(r.addr) {
		ip = r.addr
	}
	s.tell(r, reply, ip, true)
	return reply
}

// reply begins an answer.
func (s *Server) reply(r request, kind dhcpv6.MessageType) *dhcpv6.Message {
	reply := &dhcpv6.Message{MessageType: kind, TransactionID: r.TransactionID}
	if id := r.GetOneOption(dhcpv6.OptionClientID); id != nil {
		reply.AddOption(id)
	}
	return reply
}

// associate answers each association: the first gets the machine's address, and
// others, temporary ones and prefixes are refused. Where the answer binds, an
// address that is not the machine's is taken back.
func (s *Server) associate(r request, reply *dhcpv6.Message, binds bool) (ip netip.Addr) {
	for i, ia := range r.Options.IANA() {
		out := &dhcpv6.OptIANA{IaId: ia.IaId}
		has := addresses(ia)
		given := netip.Addr{}
		if i == 0 {
			given = s.current(r.mac, has)
		}
		if given.IsValid() {
			ip = given
			out.T1, out.T2 = lifetime/2, lifetime*4/5
			out.Options.Add(&dhcpv6.OptIAAddress{IPv6Addr: ip.AsSlice(), PreferredLifetime: lifetime, ValidLifetime: lifetime})
		}
		taken := false
		for _, other := range has {
			if binds && other != given {
				out.Options.Add(&dhcpv6.OptIAAddress{IPv6Addr: other.AsSlice()})
				taken = true
			}
		}
		if !given.IsValid() && !taken {
			out.Options = refused(iana.StatusNoAddrsAvail, "a machine has one address")
		}
		reply.AddOption(out)
	}
	for _, ia := range r.Options.IATA() {
		reply.AddOption(&dhcpv6.OptIATA{IaId: ia.IaId, Options: refused(iana.StatusNoAddrsAvail, "no temporary addresses are given")})
	}
	for _, pd := range r.Options.IAPD() {
		var o dhcpv6.PDOptions
		o.Add(status(iana.StatusNoPrefixAvail, "no prefixes are delegated"))
		reply.AddOption(&dhcpv6.OptIAPD{IaId: pd.IaId, Options: o})
	}
	return ip
}

// tell adds what the client is told, and says whether that is something to boot.
func (s *Server) tell(r request, reply *dhcpv6.Message, ip netip.Addr, final bool) (boots bool) {
	if r.who.Client.Program != decide.System {
		if url := s.cfg.Boot(Ask{Who: r.who, IP: ip, Final: final}); url != "" {
			boots = true
			reply.AddOption(dhcpv6.OptBootFileURL(url))
			if r.who.Client.Program == decide.HTTPBoot {
				// It takes no other answer for one to HTTP boot. A "PXEClient" would make
				// PXE look for a boot server.
				reply.AddOption(&dhcpv6.OptVendorClass{EnterpriseNumber: r.enterprise, Data: [][]byte{[]byte("HTTPClient")}})
			}
		}
	}
	for _, o := range []struct {
		code   dhcpv6.OptionCode
		set    bool
		option func() dhcpv6.Option
	}{
		{dhcpv6.OptionDNSRecursiveNameServer, len(s.cfg.DNS) > 0, func() dhcpv6.Option { return dhcpv6.OptDNS(ips(s.cfg.DNS)...) }},
		{dhcpv6.OptionDomainSearchList, len(s.cfg.Search) > 0, func() dhcpv6.Option {
			return dhcpv6.OptDomainSearchList(&rfc1035label.Labels{Labels: s.cfg.Search})
		}},
		{dhcpv6.OptionNTPServer, len(s.cfg.NTP) > 0, func() dhcpv6.Option {
			var all dhcpv6.OptNTPServer
			for _, ip := range ips(s.cfg.NTP) {
				a := dhcpv6.NTPSuboptionSrvAddr(ip)
				all.Suboptions.Add(&a)
			}
			return &all
		}},
		{dhcpv6.OptionSNTPServerList, len(s.cfg.NTP) > 0, func() dhcpv6.Option { return dhcpv6.OptSNTP(ips(s.cfg.NTP)...) }},
	} {
		if o.set && r.IsOptionRequested(o.code) {
			reply.AddOption(o.option())
		}
	}
	return boots
}

// current is a machine's address: one that it has, or else the first that nobody
// was found to use beside it. Not valid: all are.
func (s *Server) current(mac [6]byte, has []netip.Addr) netip.Addr {
	for _, ip := range has {
		if s.owns(mac, ip) && !s.isDeclined(ip) {
			return ip
		}
	}
	for g := range uint16(generations) {
		if ip := AddressOf(s.cfg.Address, mac, g); s.owns(mac, ip) && !s.isDeclined(ip) {
			return ip
		}
	}
	return netip.Addr{}
}

// owns says whether an address was made from the machine's MAC, and is not by
// chance the box's or a server's.
func (s *Server) owns(mac [6]byte, ip netip.Addr) bool {
	m, ok := machineAt(s.cfg.Address, ip)
	return ok && m == mac && !s.taken[ip]
}

func (s *Server) isDeclined(ip netip.Addr) bool {
	at, ok := s.declined[ip]
	return ok && s.cfg.Now().Sub(at) < declinedFor
}

// setDeclined reports whether that is new. Where the memory is full, another
// machine finds out again what it had found out.
func (s *Server) setDeclined(ip netip.Addr) bool {
	now := s.cfg.Now()
	known := s.isDeclined(ip)
	if len(s.declined) >= maxDeclined {
		for other, at := range s.declined {
			if now.Sub(at) >= declinedFor {
				delete(s.declined, other)
			}
		}
		for other := range s.declined {
			if len(s.declined) < maxDeclined {
				break
			}
			delete(s.declined, other)
		}
	}
	s.declined[ip] = now
	return !known
}

// listed are the addresses of all associations.
func listed(m *dhcpv6.Message) (all []netip.Addr) {
	for _, ia := range m.Options.IANA() {
		all = append(all, addresses(ia)...)
	}
	return all
}

func addresses(ia *dhcpv6.OptIANA) (all []netip.Addr) {
	for _, o := range ia.Options.Addresses() {
		if ip, ok := netip.AddrFromSlice(o.IPv6Addr); ok {
			all = append(all, ip)
		}
	}
	return all
}

func status(code iana.StatusCode, text string) dhcpv6.Option {
	return &dhcpv6.OptStatusCode{StatusCode: code, StatusMessage: text}
}

func refused(code iana.StatusCode, text string) (o dhcpv6.IdentityOptions) {
	o.Add(status(code, text))
	return o
}

func ips(addrs []netip.Addr) []net.IP {
	var out []net.IP
	for _, a := range addrs {
		out = append(out, a.AsSlice())
	}
	return out
}
