package firewall

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// EgressTable is the name of the table, of family inet, that holds plugins back.
const EgressTable = "bc-egress"

const (
	// linger lets a call's connections end after it: a BMC that never hears the
	// last packet of one keeps a session open.
	linger = 5 * time.Second
	// maxTargets bounds the addresses of one call.
	maxTargets = 64
	// resolverPort is DNS.
	resolverPort = 53
)

// UIDRange is the first and the last of the uids that are held back.
type UIDRange struct{ First, Last uint32 }

// Egress lets the processes of some uids reach what the calls that run name,
// and the host's resolvers, and nothing else: no neighbour, no gateway, no
// service of the box itself. Its table is apart from that of Apply: a packet
// has to pass both.
type Egress struct {
	resolvConf string
	linger     time.Duration
	netns      *os.File // rules are changed from other threads, too
	resolve    func(ctx context.Context, host string) ([]netip.Addr, error)

	mu        sync.Mutex
	closed    bool
	table     *nftables.Table
	allowed   map[bool]*nftables.Set // by whether the address is IPv6
	resolvers map[bool]*nftables.Set
	known     []netip.Addr   // resolvers in force
	use       map[target]int // how many calls need it, those that linger included
	timers    map[*time.Timer]struct{}
}

type target struct {
	uid  uint32
	addr netip.Addr
}

// Confine puts the rules in force, for good until Close. It acts on the
// network namespace of the calling thread.
func Confine(uids []UIDRange) (*Egress, error) {
	return confine(&Egress{resolvConf: "/etc/resolv.conf", linger: linger, resolve: lookup}, uids)
}

func confine(e *Egress, uids []UIDRange) (_ *Egress, err error) {
	e.use, e.timers = map[target]int{}, map[*time.Timer]struct{}{}
	if e.netns, err = os.Open("/proc/thread-self/ns/net"); err != nil {
		return nil, fmt.Errorf("confine plugins' network: %w", err)
	}
	err = e.change(func(conn *nftables.Conn) error {
		if err := e.build(conn, uids); err != nil {
			return err
		}
		return e.refreshResolvers(conn)
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("confine plugins' network: %w", err), e.netns.Close())
	}
	return e, nil
}

func lookup(ctx context.Context, host string) ([]netip.Addr, error) {
	return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
}

// change makes one atomic change of the rules.
func (e *Egress) change(f func(*nftables.Conn) error) error {
	conn, err := nftables.New(nftables.WithNetNSFd(int(e.netns.Fd())))
	if err != nil {
		return err
	}
	if err := f(conn); err != nil {
		return err
	}
	return conn.Flush()
}

func (e *Egress) build(conn *nftables.Conn, uids []UIDRange) error {
	e.table = &nftables.Table{Family: nftables.TableFamilyINet, Name: EgressTable}
	conn.DelTable(conn.AddTable(e.table))
	conn.AddTable(e.table)
	e.allowed, e.resolvers = map[bool]*nftables.Set{}, map[bool]*nftables.Set{}
	for six, kind := range map[bool]nftables.SetDatatype{false: nftables.TypeIPAddr, true: nftables.TypeIP6Addr} {
		pair, err := nftables.ConcatSetType(nftables.TypeUID, kind)
		if err != nil {
			return err
		}
		e.allowed[six] = &nftables.Set{Table: e.table, Name: "allowed-" + kind.Name, KeyType: pair, Concatenation: true}
		e.resolvers[six] = &nftables.Set{Table: e.table, Name: "resolvers-" + kind.Name, KeyType: kind}
		for _, set := range []*nftables.Set{e.allowed[six], e.resolvers[six]} {
			if err := conn.AddSet(set, nil); err != nil {
				return err
			}
		}
	}
	held := conn.AddChain(&nftables.Chain{Name: "held", Table: e.table})
	for six, set := range e.resolvers {
		for _, proto := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
			conn.AddRule(&nftables.Rule{Table: e.table, Chain: held, Exprs: join(family(six), protocol(proto), field(2, number(resolverPort)), rule{
				destination(six, 1),
				&expr.Lookup{SourceRegister: 1, SetName: set.Name, SetID: set.ID},
			}, accept())})
		}
	}
	refused := rule{
		&expr.Counter{}, &expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED},
	}
	// What is for any of the box's own addresses goes by the loopback. No call opens
	// that, whatever it names or a name resolves to.
	conn.AddRule(&nftables.Rule{Table: e.table, Chain: held, Exprs: join(leaving("lo"), refused)})
	for six, set := range e.allowed {
		conn.AddRule(&nftables.Rule{Table: e.table, Chain: held, Exprs: join(family(six), rule{
			&expr.Meta{Key: expr.MetaKeySKUID, Register: unix.NFT_REG32_00},
			destination(six, unix.NFT_REG32_01),
			&expr.Lookup{SourceRegister: unix.NFT_REG32_00, SetName: set.Name, SetID: set.ID},
		}, accept())})
	}
	// Refused rather than dropped: the driver hears of it at once.
	conn.AddRule(&nftables.Rule{Table: e.table, Chain: held, Exprs: refused})
	accepted := nftables.ChainPolicyAccept
	output := conn.AddChain(&nftables.Chain{
		Name: "output", Table: e.table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityFilter, Policy: &accepted,
	})
	for _, r := range uids {
		conn.AddRule(&nftables.Rule{Table: e.table, Chain: output, Exprs: rule{
			&expr.Meta{Key: expr.MetaKeySKUID, Register: 1},
			// Ranges compare as big-endian numbers.
			&expr.Byteorder{SourceRegister: 1, DestRegister: 1, Op: expr.ByteorderHton, Len: 4, Size: 4},
			&expr.Range{Op: expr.CmpOpEq, Register: 1, FromData: binary.BigEndian.AppendUint32(nil, r.First), ToData: binary.BigEndian.AppendUint32(nil, r.Last)},
			&expr.Verdict{Kind: expr.VerdictJump, Chain: held.Name},
		}})
	}
	return nil
}

func family(six bool) rule {
	proto := byte(unix.NFPROTO_IPV4)
	if six {
		proto = unix.NFPROTO_IPV6
	}
	return rule{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{proto}},
	}
}

// destination loads the packet's destination address.
func destination(six bool, register uint32) expr.Any {
	if six {
		return &expr.Payload{DestRegister: register, Base: expr.PayloadBaseNetworkHeader, Offset: 24, Len: 16}
	}
	return &expr.Payload{DestRegister: register, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4}
}

func (t target) element() nftables.SetElement {
	return nftables.SetElement{Key: append(binary.NativeEndian.AppendUint32(nil, t.uid), t.addr.AsSlice()...)}
}

// Allow opens the way to targets (hosts or addresses, with or without a port)
// for a uid until release is called, and a little longer. The rules are in
// force when it returns. A name that cannot be resolved is left out: the
// driver's own attempt says so better.
func (e *Egress) Allow(ctx context.Context, uid int, targets []string) (release func(), err error) {
	wanted, err := e.addresses(ctx, uid, targets)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, errors.New("allow a plugin's targets: closed")
	}
	err = e.change(func(conn *nftables.Conn) error {
		for _, t := range wanted {
			if e.use[t] == 0 {
				if err := conn.SetAddElements(e.allowed[t.addr.Is6()], []nftables.SetElement{t.element()}); err != nil {
					return err
				}
			}
		}
		return e.refreshResolvers(conn)
	})
	if err != nil {
		e.known = nil // whether the kernel took them is not known
		return nil, fmt.Errorf("allow a plugin's targets: %w", err)
	}
	for _, t := range wanted {
		e.use[t]++
	}
	return sync.OnceFunc(func() { e.later(wanted) }), nil
}

func (e *Egress) addresses(ctx context.Context, uid int, targets []string) ([]target, error) {
	if uid < 0 {
		return nil, fmt.Errorf("allow a plugin's targets: uid %d", uid)
	}
	if len(targets) > maxTargets {
		return nil, fmt.Errorf("allow a plugin's targets: %d, at most %d", len(targets), maxTargets)
	}
	var out []target
	for _, text := range targets {
		host := text
		if h, _, err := net.SplitHostPort(text); err == nil {
			host = h
		}
		addr, err := netip.ParseAddr(strings.Trim(host, "[]"))
		addrs := []netip.Addr{addr}
		if err != nil {
			if addrs, err = e.resolve(ctx, host); err != nil {
				continue
			}
		}
		for _, a := range addrs {
			if t := (target{uint32(uid), a.Unmap().WithZone("")}); !slices.Contains(out, t) {
				out = append(out, t)
			}
		}
	}
	if len(out) > maxTargets {
		return nil, fmt.Errorf("allow a plugin's targets: %d addresses, at most %d", len(out), maxTargets)
	}
	return out, nil
}

// later closes the way once what the call left open had time to end.
func (e *Egress) later(targets []target) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed || len(targets) == 0 {
		return
	}
	var timer *time.Timer
	timer = time.AfterFunc(e.linger, func() { e.release(timer, targets) })
	e.timers[timer] = struct{}{}
}

func (e *Egress) release(timer *time.Timer, targets []target) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.timers, timer)
	if e.closed {
		return
	}
	var over []target
	for _, t := range targets {
		if e.use[t]--; e.use[t] == 0 {
			delete(e.use, t)
			over = append(over, t)
		}
	}
	// A change that the kernel refuses leaves open, until the next start, what
	// this uid was given before. There is nobody left to tell.
	_ = e.change(func(conn *nftables.Conn) error {
		for _, t := range over {
			if err := conn.SetDeleteElements(e.allowed[t.addr.Is6()], []nftables.SetElement{t.element()}); err != nil {
				return err
			}
		}
		return nil
	})
}

// refreshResolvers takes over what resolv.conf says now.
func (e *Egress) refreshResolvers(conn *nftables.Conn) error {
	data, err := os.ReadFile(e.resolvConf)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("read the resolvers: %w", err)
	}
	now := nameservers(data)
	if slices.Equal(now, e.known) {
		return nil
	}
	for six, set := range e.resolvers {
		conn.FlushSet(set)
		var elements []nftables.SetElement
		for _, a := range now {
			if a.Is6() == six {
				elements = append(elements, nftables.SetElement{Key: a.AsSlice()})
			}
		}
		if err := conn.SetAddElements(set, elements); len(elements) > 0 && err != nil {
			return err
		}
	}
	e.known = now
	return nil
}

// nameservers are the addresses of a resolv.conf, sorted.
func nameservers(data []byte) []netip.Addr {
	var out []netip.Addr
	lines := bufio.NewScanner(bytes.NewReader(data))
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		if len(words) < 2 || words[0] != "nameserver" {
			continue
		}
		if addr, err := netip.ParseAddr(words[1]); err == nil {
			out = append(out, addr.Unmap().WithZone(""))
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}

// Close takes the rules away.
func (e *Egress) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil
	}
	e.closed = true
	for t := range e.timers {
		t.Stop()
	}
	err := e.change(func(conn *nftables.Conn) error {
		conn.DelTable(conn.AddTable(e.table))
		return nil
	})
	if err = errors.Join(err, e.netns.Close()); err != nil {
		return fmt.Errorf("remove plugins' network rules: %w", err)
	}
	return nil
}
