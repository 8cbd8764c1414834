// Package dhcp6 is the DHCPv6 server of one interface, made for machines that network-boot.
//
// It follows RFC 8415 and the boot options of RFC 5970, with these choices. A
// machine is the MAC that its frame came from: firmware, iPXE and system send
// different DUIDs, and one system sends the same DUID from each of its ports. Its
// address is made from its MAC, so that nothing is kept on disk, no pool runs
// out and a flood costs little memory. It gets one address, whatever IAIDs it asks for.
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

// lifetime is how long an address is used without asking again.
const lifetime = time.Hour

// Ask is one question for what to boot.
type Ask struct {
	Who
	// IP is what the machine has or is given; not valid where it asks for no address.
	IP netip.Addr
	// Final says that the answer is the last of its exchange.
	Final bool
	// Asked is when a client that has no address yet asked; zero otherwise.
	Asked time.Time
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
	// Bindings are the addresses that they were given; nil: by this server alone.
	Bindings *Bindings
	Now      func() time.Time
	Log      *slog.Logger
}

// source is where a packet came from.
type source struct {
	mac  [6]byte
	addr netip.Addr
	// group says that it was sent to the servers' multicast address.
	group bool
	at    time.Time
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
	if rapid != nil {
		s.bind(r, ip)
	}
	if s.tell(r, reply, ip, rapid != nil) && rapid == nil && ip.IsValid() {
		// It gets here what it needs to boot: it need not wait for other servers.
		reply.AddOption(dhcpv6.OptPreference(255))
	}
	return reply
}

// renew answers REQUEST, RENEW and REBIND. An address that was made for the machine is
// its own where nothing else is known, as after the box was started again.
func (s *Server) renew(r request) *dhcpv6.Message {
	reply := s.reply(r, dhcpv6.MessageTypeReply)
	ip := s.associate(r, reply, true)
	s.bind(r, ip)
	s.tell(r, reply, ip, true)
	return reply
}

// confirm says whether the addresses are of this network, and binds the machine's own,
// as renew does. One that is bound to another is not told to go on with this one.
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
	for _, ip := range all {
		if code != iana.StatusSuccess || !s.owns(r.mac, ip) {
			continue
		}
		e, bound := s.cfg.Bindings.of(r.mac, s.cfg.Now())
		if _, generation, _ := machineAt(s.cfg.Address, ip); bound && e.given != generation {
			return nil
		}
		if !bound {
			s.bind(r, ip)
		}
	}
	reply := s.reply(r, dhcpv6.MessageTypeReply)
	reply.AddOption(status(code, text))
	return reply
}

// bind notes that the answer gives the address.
func (s *Server) bind(r request, ip netip.Addr) {
	if mac, generation, ok := machineAt(s.cfg.Address, ip); ok {
		s.cfg.Bindings.give(mac, generation, s.cfg.Known(r.who.MAC), s.cfg.Now())
	}
}

func (s *Server) decline(r request) *dhcpv6.Message {
	for _, ip := range listed(r.Message) {
		if mac, generation, ok := machineAt(s.cfg.Address, ip); ok && mac == r.mac && s.cfg.Bindings.decline(mac, generation) {
			s.declined(r.who.MAC, ip)
		}
	}
	return s.ended(r)
}

// declined tells of it: of one known machine, and of all others together, so often in
// a minute.
func (s *Server) declined(mac string, ip netip.Addr) {
	who := mac
	if !s.cfg.Known(mac) {
		who = ""
	}
	if !s.declines.More(who, s.cfg.Now()) {
		return
	}
	s.cfg.Log.Warn("DHCPv6 address declined: another machine uses it", "mac", mac, "ip", ip.String())
	if s.cfg.Declined != nil {
		s.cfg.Declined(mac, ip)
	}
}

// ended answers RELEASE and DECLINE. What is released stays the machine's: nobody
// else can have it, and who forges a RELEASE takes nothing away.
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

// ask is the question for what to boot.
func (r request) ask(ip netip.Addr, final bool) Ask {
	a := Ask{Who: r.who, IP: ip, Final: final}
	if r.MessageType == dhcpv6.MessageTypeSolicit || r.MessageType == dhcpv6.MessageTypeRequest {
		a.Asked = r.at
	}
	return a
}

// tell adds what the client is told, and says whether that is something to boot.
func (s *Server) tell(r request, reply *dhcpv6.Message, ip netip.Addr, final bool) (boots bool) {
	if r.who.Client.Program != decide.System {
		if url := s.cfg.Boot(r.ask(ip, final)); url != "" {
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

// current is a machine's address: the one that it is bound to, or without a binding
// one that it says it has.
func (s *Server) current(mac [6]byte, has []netip.Addr) netip.Addr {
	e, bound := s.cfg.Bindings.of(mac, s.cfg.Now())
	for _, ip := range has {
		if !bound && s.owns(mac, ip) {
			return ip
		}
	}
	for g := e.next; ; g++ { // few are taken
		if ip := AddressOf(s.cfg.Address, mac, g); !s.taken[ip] {
			return ip
		}
	}
}

// owns says whether an address was made from the machine's MAC, and is not by
// chance the box's or a server's.
func (s *Server) owns(mac [6]byte, ip netip.Addr) bool {
	m, _, ok := machineAt(s.cfg.Address, ip)
	return ok && m == mac && !s.taken[ip]
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
