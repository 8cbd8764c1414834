// Package firewall closes the box: nothing new comes in from the uplink, a LAN
// reaches the listed services, and nothing is forwarded.
package firewall

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Table is the name of the table, of family inet, that is ours.
const Table = "bc-site"

// Rules say what a box lets in.
type Rules struct {
	// Uplink is the interface towards the gateway. When it is empty, every
	// interface that is no LAN counts as the uplink.
	Uplink string
	LANs   []LANRule
	Homes  []Home
}

// Home keeps what is for a network on its own interface: when that is away, the
// route over the uplink must not lead a BMC's credential to whoever answers there.
type Home struct {
	// Network is IPv4.
	Network netip.Prefix
	// Interface is the network's own; empty: it is away.
	Interface string
}

// LANRule is what machines and BMCs on one interface may reach. A service
// without its own port number has the standard one.
type LANRule struct {
	Interface                            string
	DHCP, TFTP, HTTP, Passthrough, Media bool
	// ProxyDHCP is where firmware asks a DHCP proxy, and Syslog where machines that
	// boot say what they do.
	ProxyDHCP, Syslog bool
	// HTTPPort is 80, PassthroughPort 7443 and MediaPort 7444 when they are 0.
	HTTPPort, PassthroughPort, MediaPort uint16
}

const (
	defaultHTTP        = 80
	defaultPassthrough = 7443
	defaultMedia       = 7444
)

// Apply puts the rules in place of earlier ones, all at once, and turns
// forwarding off. It acts on the network namespace of the calling thread.
func Apply(r Rules) error {
	if err := r.check(); err != nil {
		return err
	}
	for _, path := range []string{"/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding"} {
		// A kernel without IPv6 has nothing to turn off.
		if err := os.WriteFile(path, []byte("0\n"), 0o644); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("turn forwarding off: %w", err)
		}
	}
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("apply firewall: %w", err)
	}
	r.write(conn)
	if err := conn.Flush(); err != nil {
		return fmt.Errorf("apply firewall: %w", err)
	}
	return nil
}

// Remove takes the rules away; forwarding stays off. There being none is no error.
func Remove() error {
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("remove firewall: %w", err)
	}
	clearTable(conn)
	if err := conn.Flush(); err != nil {
		return fmt.Errorf("remove firewall: %w", err)
	}
	return nil
}

func (r Rules) check() error {
	seen := map[string]bool{}
	for _, name := range r.interfaces() {
		if name == "" || len(name) >= unix.IFNAMSIZ || strings.ContainsAny(name, "/ \t\n") || name == "." || name == ".." {
			return fmt.Errorf("firewall: %q is not the name of an interface", name)
		}
		if seen[name] {
			return fmt.Errorf("firewall: interface %s stands twice: the uplink cannot be a LAN, nor a LAN be two", name)
		}
		seen[name] = true
	}
	for _, h := range r.Homes {
		if !h.Network.IsValid() || !h.Network.Addr().Is4() || len(h.Interface) >= unix.IFNAMSIZ {
			return fmt.Errorf("firewall: home %s on %q: want an IPv4 network and an interface", h.Network, h.Interface)
		}
	}
	return nil
}

// interfaces are those that are named: the uplink, if it is, and the LANs.
func (r Rules) interfaces() []string {
	var names []string
	if r.Uplink != "" {
		names = append(names, r.Uplink)
	}
	for _, l := range r.LANs {
		names = append(names, l.Interface)
	}
	return names
}

// matches are the interfaces as from takes them.
func (r Rules) matches() []string {
	names := r.interfaces()
	if r.Uplink == "" {
		names = append(names, "")
	}
	return names
}

// clearTable deletes the table. Adding it first makes the deletion of a table that
// is not there no error.
func clearTable(conn *nftables.Conn) {
	conn.DelTable(conn.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: Table}))
}

func (r Rules) write(conn *nftables.Conn) {
	clearTable(conn)
	table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: Table})
	drop := nftables.ChainPolicyDrop
	chain := func(name string, hook *nftables.ChainHook) *nftables.Chain {
		return conn.AddChain(&nftables.Chain{
			Name: name, Table: table, Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: nftables.ChainPriorityFilter, Policy: &drop,
		})
	}
	input := chain("input", nftables.ChainHookInput)
	chain("forward", nftables.ChainHookForward) // empty: its policy is all it does
	for _, rule := range r.input() {
		conn.AddRule(&nftables.Rule{Table: table, Chain: input, Exprs: rule})
	}
	accepted := nftables.ChainPolicyAccept
	output := conn.AddChain(&nftables.Chain{
		Name: "output", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityFilter, Policy: &accepted,
	})
	for _, h := range r.Homes {
		for _, rule := range h.rules() {
			conn.AddRule(&nftables.Rule{Table: table, Chain: output, Exprs: rule})
		}
	}
}

type rule = []expr.Any

// ICMP types that a host needs to answer or to hear: for IPv4 echo,
// unreachable (path MTU), time exceeded, parameter problem; for IPv6 also
// neighbour discovery, and the question of switches who listens to which group:
// without an answer they end what is sent to it, as to DHCPv6 servers.
var (
	icmp4 = []byte{8, 3, 11, 12}
	icmp6 = []byte{128, 1, 2, 3, 4, 130, 133, 134, 135, 136}
)

// input are the accepting rules, in order; what none of them takes is counted
// and dropped.
func (r Rules) input() []rule {
	rules := []rule{
		join(from("lo"), accept()),
		join(state(expr.CtStateBitINVALID), verdict(expr.VerdictDrop)),
		// Answers to what the box asked: the gateway's, and the BMCs'. A TFTP
		// transfer is one too, since the box sends its first block.
		join(state(expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), accept()),
	}
	for _, name := range r.matches() {
		for _, kind := range icmp4 {
			rules = append(rules, join(from(name), protocol(unix.IPPROTO_ICMP), field(0, []byte{kind}), accept()))
		}
		for _, kind := range icmp6 {
			rules = append(rules, join(from(name), protocol(unix.IPPROTO_ICMPV6), field(0, []byte{kind}), accept()))
		}
	}
	// A DHCP server's answer can come to an address that asked by broadcast, so
	// that connection tracking does not know it.
	rules = append(rules,
		join(from(r.Uplink), protocol(unix.IPPROTO_UDP), ports(67, 68), accept()),
		join(from(r.Uplink), protocol(unix.IPPROTO_UDP), ports(547, 546), accept()),
	)
	for _, l := range r.LANs {
		rules = append(rules, l.rules()...)
	}
	return append(rules, rule{&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}})
}

func (l LANRule) rules() []rule {
	var rules []rule
	service := func(on bool, proto byte, port uint16) {
		if on {
			rules = append(rules, join(from(l.Interface), protocol(proto), field(2, number(port)), accept()))
		}
	}
	service(l.DHCP, unix.IPPROTO_UDP, 67)
	service(l.ProxyDHCP, unix.IPPROTO_UDP, 4011)
	service(l.TFTP, unix.IPPROTO_UDP, 69)
	service(l.Syslog, unix.IPPROTO_UDP, 514)
	service(l.HTTP, unix.IPPROTO_TCP, cmp.Or(l.HTTPPort, defaultHTTP))
	service(l.Passthrough, unix.IPPROTO_TCP, cmp.Or(l.PassthroughPort, defaultPassthrough))
	service(l.Media, unix.IPPROTO_TCP, cmp.Or(l.MediaPort, defaultMedia))
	return rules
}

// rules let a network's packets out by its interface, and the box's to itself
// by the loopback; the rest is dropped.
func (h Home) rules() []rule {
	var rules []rule
	for _, name := range []string{"lo", h.Interface} {
		if name != "" {
			rules = append(rules, join(to(h.Network), leaving(name), accept()))
		}
	}
	return append(rules, join(to(h.Network), rule{&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}}))
}

// to matches the IPv4 network that a packet is for.
func to(n netip.Prefix) rule {
	return rule{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.NFPROTO_IPV4}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: net.CIDRMask(n.Bits(), 32), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: n.Masked().Addr().AsSlice()},
	}
}

func join(parts ...rule) rule {
	var out rule
	for _, p := range parts {
		out = append(out, p...)
	}
	return out
}

func accept() rule { return verdict(expr.VerdictAccept) }

func verdict(kind expr.VerdictKind) rule { return rule{&expr.Verdict{Kind: kind}} }

// from matches the interface that a packet came in on; "" is any.
func from(name string) rule { return on(expr.MetaKeyIIFNAME, name) }

// leaving matches the interface that a packet goes out by.
func leaving(name string) rule { return on(expr.MetaKeyOIFNAME, name) }

func on(side expr.MetaKey, name string) rule {
	if name == "" {
		return nil
	}
	padded := make([]byte, unix.IFNAMSIZ)
	copy(padded, name)
	return rule{
		&expr.Meta{Key: side, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: padded},
	}
}

// state matches packets of which connection tracking says one of bits.
func state(bits uint32) rule {
	mask := make([]byte, 4)
	binary.NativeEndian.PutUint32(mask, bits)
	return rule{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: mask, Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
	}
}

func protocol(number byte) rule {
	return rule{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{number}},
	}
}

// field matches bytes of the transport header at offset.
func field(offset uint32, data []byte) rule {
	return rule{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: uint32(len(data))},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: data},
	}
}

// ports matches source and destination port.
func ports(source, destination uint16) rule {
	return field(0, append(number(source), number(destination)...))
}

func number(port uint16) []byte { return binary.BigEndian.AppendUint16(nil, port) }
