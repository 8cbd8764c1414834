package dhcp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/better-compute/site-appliance/appliance/base/bound"
	"github.com/better-compute/site-appliance/pxe/lease"
	"github.com/better-compute/site-appliance/pxe/pxetest"
	"github.com/better-compute/site-appliance/pxe/pxetest/fleet"
)

// wire is a bridge of the box, box0 with 10.77.0.1, and hosts on it.
func wire(t *testing.T, hosts ...string) []*pxetest.Host {
	t.Helper()
	ip(t, "link", "add", "box0", "type", "bridge")
	ip(t, "address", "add", "10.77.0.1/24", "dev", "box0")
	ip(t, "link", "set", "box0", "up")
	var out []*pxetest.Host
	for i, mac := range hosts {
		near := fmt.Sprintf("w%d", i)
		h := pxetest.Join(t, near, netip.MustParsePrefix(fmt.Sprintf("169.254.%d.1/30", i+1)), fmt.Sprintf("m%d", i), mac)
		ip(t, "address", "flush", "dev", near)
		ip(t, "link", "set", near, "master", "box0")
		out = append(out, h)
	}
	return out
}

func ip(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), "ip", args...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// dnsmasq runs a leasing server and returns what ends it. It is there when it says so.
func dnsmasq(t *testing.T, h *pxetest.Host, iface string, args ...string) (stop func()) {
	t.Helper()
	path, err := exec.LookPath("dnsmasq")
	if err != nil {
		t.Skip("needs dnsmasq")
	}
	dir := t.TempDir()
	cmd := exec.Command(path, append([]string{"--no-daemon", "--conf-file=/dev/null", "--port=0", "--interface=" + iface, "--bind-interfaces", "--log-dhcp",
		"--no-ping", "--user=root", "--dhcp-leasefile=" + filepath.Join(dir, "leases"), "--pid-file=" + filepath.Join(dir, "pid")}, args...)...)
	out := &lines{want: []byte("DHCP, IP range"), found: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = out, out
	start := cmd.Start
	if h != nil {
		start = func() error { return h.Try(cmd.Start) }
	}
	if err := start(); err != nil {
		t.Fatal(err)
	}
	stop = sync.OnceFunc(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	t.Cleanup(stop)
	select {
	case <-out.found:
	case <-time.After(20 * time.Second):
		t.Fatalf("dnsmasq does not start: %s", out)
	}
	return stop
}

// lines waits for a word in what is written.
type lines struct {
	mu    sync.Mutex
	all   bytes.Buffer
	want  []byte
	found chan struct{}
	done  bool
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all.Write(b)
	if !l.done && bytes.Contains(l.all.Bytes(), l.want) {
		l.done = true
		close(l.found)
	}
	return len(b), nil
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all.String()
}

var quick = Probing{Every: 300 * time.Millisecond, Tries: 2}

// running is a server on box0.
func running(t *testing.T, edit func(*Config)) (s *Server, ended chan error) {
	t.Helper()
	at := netip.MustParseAddr
	cfg := Config{Interface: "box0", Local: Subnet{Pool: "lan", Network: netip.MustParsePrefix("10.77.0.0/24"), Server: at("10.77.0.1")},
		Boot: func(a Ask) string { return bootFile(a.Who) }, Now: time.Now, Probing: quick,
		Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	edit(&cfg)
	if cfg.Mode != Proxy {
		db, err := lease.OpenDatabase(lease.Config{Path: filepath.Join(t.TempDir(), "leases"), Log: cfg.Log, Known: cfg.Known,
			Pools: []lease.Pool{{Name: "lan", Subnet: cfg.Local.Network, First: at("10.77.0.150"), Last: at("10.77.0.199")}}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { db.Close() })
		cfg.Leases = db
	}
	s, err := Listen(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended = make(chan error, 1)
	done := make(chan struct{})
	go func() { defer close(done); ended <- s.Serve(ctx); s.Close() }()
	t.Cleanup(func() { cancel(); <-done })
	return s, ended
}

// client speaks DHCP from a host, as a machine of any MAC.
type client struct {
	t    *testing.T
	conn *net.UDPConn
	wire *fleet.Ether
}

func newClient(t *testing.T, h *pxetest.Host, port uint16) *client {
	t.Helper()
	c := &client{t: t}
	h.Do(func() (err error) {
		if c.wire, err = fleet.OpenEther(h.Iface); err != nil {
			return err
		}
		c.conn, err = bound.ListenPacket(t.Context(), h.Iface, netip.AddrPortFrom(netip.IPv4Unspecified(), port))
		return err
	})
	t.Cleanup(func() { c.conn.Close(); c.wire.Close() })
	return c
}

var servers = netip.AddrPortFrom(everyone, dhcpv4.ServerPort)

// send broadcasts from the MAC that the message names.
func (c *client) send(d *dhcpv4.DHCPv4, to netip.AddrPort) error {
	if to == servers {
		return c.wire.Broadcast(d.ClientHWAddr, d.ToBytes())
	}
	_, err := c.conn.WriteToUDPAddrPort(d.ToBytes(), to)
	return err
}

// exchange sends a message, again each second, until enough of its answers came.
func (c *client) exchange(d *dhcpv4.DHCPv4, to netip.AddrPort, enough func([]*dhcpv4.DHCPv4) bool) []*dhcpv4.DHCPv4 {
	c.t.Helper()
	var all []*dhcpv4.DHCPv4
	buf := make([]byte, 2048)
	for range 20 {
		if err := c.send(d, to); err != nil {
			c.t.Fatal(err)
		}
		_ = c.conn.SetReadDeadline(time.Now().Add(time.Second))
		for {
			n, _, err := c.conn.ReadFromUDPAddrPort(buf)
			if err != nil {
				break
			}
			if reply, err := dhcpv4.FromBytes(buf[:n]); err == nil && reply.TransactionID == d.TransactionID && reply.OpCode == dhcpv4.OpcodeBootReply {
				if all = append(all, reply); enough(all) {
					return all
				}
			}
		}
	}
	c.t.Fatalf("20 times %s to %s: the answers do not suffice: %v", d.MessageType(), to, all)
	return nil
}

func one(all []*dhcpv4.DHCPv4) bool { return len(all) > 0 }

func (c *client) message(kind dhcpv4.MessageType, mac string, mods ...dhcpv4.Modifier) *dhcpv4.DHCPv4 {
	hw, err := net.ParseMAC(mac)
	if err != nil {
		c.t.Fatal(err)
	}
	return message(c.t, kind, append([]dhcpv4.Modifier{dhcpv4.WithHwAddr(hw), dhcpv4.WithBroadcast(true)}, mods...)...)
}

const (
	macA, macB = "52:54:00:00:00:0a", "52:54:00:00:00:0b"
	leasing    = "--dhcp-range=10.77.0.20,10.77.0.29,255.255.255.0,1h"
)

func TestProbe(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	hosts := wire(t, macA, macB)
	own := netip.MustParseAddr("10.77.0.1")
	probe := func() error { return Probe(t.Context(), "box0", own, quick) }
	if err := probe(); err != nil {
		t.Errorf("Probe of an empty wire = %v, want nil", err)
	}
	hosts[0].SetAddress(netip.MustParsePrefix("10.77.0.2/24"), netip.Addr{})
	stop := dnsmasq(t, hosts[0], "m0", leasing)
	err := probe()
	if other := new(ForeignError); !errors.As(err, &other) || other.Foreign.Server.String() != "10.77.0.2" || !other.Foreign.Offered.IsValid() ||
		!strings.Contains(err.Error(), "10.77.0.2") || !strings.Contains(err.Error(), "box0") {
		t.Errorf("Probe beside dnsmasq = %v, want a *ForeignError that names 10.77.0.2 and box0", err)
	}
	stop()
	if err := probe(); err != nil {
		t.Errorf("Probe after dnsmasq = %v, want nil", err)
	}
	// A link that comes late is waited for.
	far := pxetest.Join(t, "late0", netip.MustParsePrefix("10.78.0.1/24"), "far0", macA)
	setLink := func(state string) {
		far.Do(func() error { return exec.Command("ip", "link", "set", "far0", state).Run() })
	}
	setLink("down")
	got := make(chan error, 1)
	go func() { got <- Probe(t.Context(), "late0", netip.MustParseAddr("10.78.0.1"), quick) }()
	select {
	case err := <-got:
		t.Errorf("Probe without a link = %v, want that it waits", err)
	case <-time.After(2 * time.Second):
	}
	setLink("up")
	select {
	case err := <-got:
		if err != nil {
			t.Errorf("Probe once the link is up = %v, want nil", err)
		}
	case <-time.After(20 * time.Second):
		t.Error("Probe does not see that the link is up")
	}
}

// TestForeignServer: one that was not heard at the start ends the serving within
// the first minute; with takeover it is told of, once.
func TestForeignServer(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	hosts := wire(t, macA, macB)
	_, ended := running(t, func(c *Config) {})
	hosts[0].SetAddress(netip.MustParsePrefix("10.77.0.2/24"), netip.Addr{})
	stop := dnsmasq(t, hosts[0], "m0", leasing)
	select {
	case err := <-ended:
		if other := new(ForeignError); !errors.As(err, &other) || other.Foreign.Server.String() != "10.77.0.2" {
			t.Errorf("Serve beside a server that came late = %v, want a *ForeignError", err)
		}
	case <-time.After(30 * time.Second):
		t.Error("Serve goes on beside a server that came late")
	}
	stop()

	told := make(chan Foreign, 10)
	running(t, func(c *Config) { c.Takeover = true; c.Foreign = func(f Foreign) { told <- f } })
	dnsmasq(t, hosts[0], "m0", leasing)
	c := newClient(t, hosts[1], dhcpv4.ClientPort)
	from := func(server string) func([]*dhcpv4.DHCPv4) bool {
		return func(all []*dhcpv4.DHCPv4) bool { return all[len(all)-1].ServerIdentifier().String() == server }
	}
	for range 3 {
		c.exchange(c.message(dhcpv4.MessageTypeDiscover, macB), servers, from("10.77.0.2"))
		c.exchange(c.message(dhcpv4.MessageTypeDiscover, macB), servers, from("10.77.0.1"))
	}
	select {
	case f := <-told:
		if f.Server.String() != "10.77.0.2" || f.MAC != macB || !f.Offered.IsValid() {
			t.Errorf("told of %+v", f)
		}
	case <-time.After(10 * time.Second):
		t.Error("the foreign server is not told of")
	}
	// One that a client names is told of too: here a third.
	c.exchange(c.message(dhcpv4.MessageTypeRequest, macB, names("10.77.0.2"), wants("10.77.0.25")), servers, one)
	third := c.message(dhcpv4.MessageTypeRequest, macB, names("10.77.0.3"), wants("10.77.0.25"))
	if _, err := c.conn.WriteToUDPAddrPort(third.ToBytes(), servers); err != nil {
		t.Fatal(err)
	}
	select {
	case f := <-told:
		if f.Server.String() != "10.77.0.3" {
			t.Errorf("told again of %+v, want once of each", f)
		}
	case <-time.After(10 * time.Second):
		t.Error("the server that a client names is not told of")
	}
}

// TestProxyBesideLeasing: dnsmasq gives the address and the box what to boot, on
// ports 67 and 4011.
func TestProxyBesideLeasing(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	hosts := wire(t, macA, macB)
	hosts[0].SetAddress(netip.MustParsePrefix("10.77.0.2/24"), netip.Addr{})
	dnsmasq(t, hosts[0], "m0", leasing)
	s, _ := running(t, func(c *Config) { c.Mode = Proxy })
	c := newClient(t, hosts[1], dhcpv4.ClientPort)
	var address, box *dhcpv4.DHCPv4
	c.exchange(c.message(dhcpv4.MessageTypeDiscover, macB, fromUEFI), servers, func(all []*dhcpv4.DHCPv4) bool {
		for _, d := range all {
			switch d.ServerIdentifier().String() {
			case "10.77.0.1":
				box = d
			case "10.77.0.2":
				address = d
			}
		}
		return address != nil && box != nil
	})
	if !box.YourIPAddr.IsUnspecified() || box.BootFileName != "snponly.efi" || box.ClassIdentifier() != "PXEClient" {
		t.Errorf("the box offers %s", box.Summary())
	}
	ack := c.exchange(c.message(dhcpv4.MessageTypeRequest, macB, fromUEFI, names("10.77.0.2"), wants(address.YourIPAddr.String())), servers, one)
	if len(ack) != 1 || ack[0].ServerIdentifier().String() != "10.77.0.2" || ack[0].MessageType() != dhcpv4.MessageTypeAck {
		t.Fatalf("REQUEST = %v, want dnsmasq's ACK alone", ack)
	}
	got := netip.AddrFrom4([4]byte(ack[0].YourIPAddr.To4()))
	if mac, ok := s.Holder(got); !ok || mac != macB {
		t.Errorf("Holder(%s) = %s, %v, want %s: the REQUEST was heard", got, mac, ok, macB)
	}
	askProxy(t, hosts[1], got)
	// The kernel's neighbour counts for more than what was heard.
	s.heard(got, "52:54:00:00:00:99")
	if mac, ok := s.Holder(got); !ok || mac != macB {
		t.Errorf("Holder(%s) = %s, %v, want %s, who answers ARP", got, mac, ok, macB)
	}
	if mac, ok := s.Holder(netip.MustParseAddr("192.0.2.1")); ok {
		t.Errorf("Holder of another network = %s, want none", mac)
	}
}

// askProxy asks on port 4011 as EDK2 does, from the same port, at an address.
func askProxy(t *testing.T, h *pxetest.Host, address netip.Addr) {
	t.Helper()
	h.SetAddress(netip.PrefixFrom(address, 24), netip.Addr{})
	p := newClient(t, h, proxyPort)
	req := p.message(dhcpv4.MessageTypeRequest, macB, fromUEFI, dhcpv4.WithClientIP(address.AsSlice()), dhcpv4.WithBroadcast(false))
	ack := p.exchange(req, netip.MustParseAddrPort("10.77.0.1:4011"), one)
	if ack[0].BootFileName != "snponly.efi" || !ack[0].ServerIPAddr.Equal(ip4("10.77.0.1")) {
		t.Errorf("on 4011 the box answers %s", ack[0].Summary())
	}
}

// TestProxyWhere67IsTaken: another server of this very host leases there.
func TestProxyWhere67IsTaken(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	hosts := wire(t, macA, macB)
	stop := dnsmasq(t, nil, "box0", leasing)
	s, _ := running(t, func(c *Config) { c.Mode = Proxy })
	if s.door.Load() != nil {
		t.Error("port 67 is open beside dnsmasq")
	}
	askProxy(t, hosts[1], netip.MustParseAddr("10.77.0.25"))
	if _, err := Listen(t.Context(), Config{Interface: "box0", Mode: Reservations, Local: s.cfg.Local, Now: time.Now, Log: s.cfg.Log}); err == nil {
		t.Error("Listen(reservations) where port 67 is taken = nil, want an error")
	}
	// Once that server has gone, port 67 is the proxy's as well.
	stop()
	c := newClient(t, hosts[1], dhcpv4.ClientPort)
	if got := c.exchange(c.message(dhcpv4.MessageTypeDiscover, macB, fromUEFI), servers, one)[0]; got.BootFileName != "snponly.efi" || !got.YourIPAddr.IsUnspecified() {
		t.Errorf("after the other server has gone the box offers %s", got.Summary())
	}
}

// TestHostileClients: one MAC that floods, and thousands of made-up ones, keep no
// machine of ours from its address.
func TestHostileClients(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	hosts := wire(t, macA, macB)
	running(t, func(c *Config) {
		c.Takeover = true
		c.Known = func(mac string) bool { return strings.HasPrefix(mac, "52:54:00:00:07:") }
	})
	var sent atomic.Int64
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	flood := newClient(t, hosts[0], 6868)
	d := flood.message(dhcpv4.MessageTypeDiscover, macA, fromUEFI).ToBytes()
	wg.Go(func() {
		b := bytes.Clone(d)
		for i := uint32(0); ctx.Err() == nil; i++ {
			const hardware = 28
			if i%2 == 0 { // every other is of one MAC
				binary.BigEndian.PutUint32(b[hardware+2:], 0x0a0a0a0a)
			} else {
				binary.BigEndian.PutUint32(b[hardware+2:], 0x40000000+i)
			}
			binary.BigEndian.PutUint32(b[4:], i)
			if _, err := flood.conn.WriteToUDPAddrPort(b, servers); err == nil {
				sent.Add(1)
			}
		}
	})
	// The flood is under way before the first machine comes, and after the last.
	flooded := func(n int64) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); sent.Load() < n; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("only %d packets flooded: this proves nothing", sent.Load())
			}
		}
	}
	flooded(1000)
	c := newClient(t, hosts[1], dhcpv4.ClientPort)
	seen := map[string]bool{}
	for i := range 10 {
		mac := fmt.Sprintf("52:54:00:00:07:%02x", i)
		offer := c.exchange(c.message(dhcpv4.MessageTypeDiscover, mac, fromUEFI), servers, one)[0]
		ack := c.exchange(c.message(dhcpv4.MessageTypeRequest, mac, fromUEFI, names("10.77.0.1"), wants(offer.YourIPAddr.String())), servers, one)[0]
		ip := ack.YourIPAddr.String()
		if ack.MessageType() != dhcpv4.MessageTypeAck || ack.BootFileName != "snponly.efi" || seen[ip] {
			t.Errorf("machine %d under a flood = %s, want an ACK of an address of its own", i, ack.Summary())
		}
		seen[ip] = true
	}
	flooded(sent.Load() + 1)
}

// TestOtherSender: nobody but a known machine itself, or its relay, speaks for it
// to the server; who makes up a MAC, as boxes do that look for servers, is answered.
func TestOtherSender(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	// The third's MAC ends as the machine's own.
	hosts := wire(t, macA, macB, "56:54:00:00:00:0a")
	relay := Subnet{Pool: "lan", Network: netip.MustParsePrefix("10.77.0.0/24"), Server: netip.MustParseAddr("10.77.0.1"), Giaddr: netip.MustParseAddr("10.77.0.2")}
	running(t, func(c *Config) {
		c.Takeover, c.Relayed = true, []Subnet{relay}
		c.Known = func(mac string) bool { return mac == macA }
	})
	c, other := newClient(t, hosts[0], dhcpv4.ClientPort), newClient(t, hosts[1], dhcpv4.ClientPort)
	hosts[1].SetAddress(netip.MustParsePrefix("10.77.0.2/24"), netip.Addr{})
	made := "02:00:00:00:00:99"
	spoofed := other.message(dhcpv4.MessageTypeDiscover, macA, fromUEFI)
	third := newClient(t, hosts[2], dhcpv4.ClientPort)
	for range 50 { // more than a machine may send
		for _, from := range []*client{other, third} {
			if _, err := from.conn.WriteToUDPAddrPort(spoofed.ToBytes(), servers); err != nil {
				t.Fatal(err)
			}
		}
	}
	fromOther := func(d *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
		if _, err := other.conn.WriteToUDPAddrPort(d.ToBytes(), servers); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 2048)
		_ = other.conn.SetReadDeadline(time.Now().Add(20 * time.Second))
		for {
			n, _, err := other.conn.ReadFromUDPAddrPort(buf)
			if err != nil {
				t.Fatalf("%s gets no answer: %v", d.ClientHWAddr, err)
			}
			if reply, err := dhcpv4.FromBytes(buf[:n]); err == nil && reply.OpCode == dhcpv4.OpcodeBootReply {
				return reply
			}
		}
	}
	if got := fromOther(other.message(dhcpv4.MessageTypeDiscover, made, fromUEFI)); got.ClientHWAddr.String() != made {
		t.Errorf("the answer is for %s, want that nothing in another's name is answered and %s is", got.ClientHWAddr, made)
	}
	own := c.message(dhcpv4.MessageTypeDiscover, macA, fromUEFI)
	if got := c.exchange(own, servers, one); got[0].MessageType() != dhcpv4.MessageTypeOffer {
		t.Errorf("the machine itself is answered with %s", got[0].MessageType())
	}
	// All hear the answers. What was sent before would have been answered before.
	buf := make([]byte, 2048)
	_ = other.conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	for {
		n, _, err := other.conn.ReadFromUDPAddrPort(buf)
		if err != nil {
			t.Fatalf("the machine's own answer is not heard: %v", err)
		}
		reply, err := dhcpv4.FromBytes(buf[:n])
		if err == nil && reply.TransactionID == spoofed.TransactionID {
			t.Errorf("what came in the machine's name from another is answered: %s", reply.Summary())
			break
		}
		if err == nil && reply.TransactionID == own.TransactionID {
			break
		}
	}
	// A relay's are in its clients' names; the answer goes to its port 67.
	passed := newClient(t, hosts[1], dhcpv4.ServerPort)
	got := passed.exchange(passed.message(dhcpv4.MessageTypeDiscover, macA, fromUEFI, dhcpv4.WithGatewayIP(ip4("10.77.0.2"))), netip.MustParseAddrPort("10.77.0.1:67"), one)
	if got[0].ClientHWAddr.String() != macA || got[0].MessageType() != dhcpv4.MessageTypeOffer {
		t.Errorf("through a relay the machine is answered with %s", got[0].Summary())
	}
}

// TestSlowPorts: a switch port that lets nothing through for a while after the
// link came up, as with the spanning tree protocol, and links that go and come
// back. The machine asks on, and the box is still there. Built: ports of Cisco's
// and others without portfast let nothing through for 30 seconds, in which a
// Raspberry Pi 3 asks five times, and iPXE, which resets its port, ten seconds long.
func TestSlowPorts(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	hosts := wire(t, macA, macB)
	_, ended := running(t, func(c *Config) { c.Takeover = true })
	c := newClient(t, hosts[1], dhcpv4.ClientPort)
	serves := func(when string) {
		t.Helper()
		offer := c.exchange(c.message(dhcpv4.MessageTypeDiscover, macB, fromUEFI), servers, one)[0]
		ack := c.exchange(c.message(dhcpv4.MessageTypeRequest, macB, fromUEFI, names("10.77.0.1"), wants(offer.YourIPAddr.String())), servers, one)[0]
		if ack.MessageType() != dhcpv4.MessageTypeAck {
			t.Errorf("%s: %s, want an ACK", when, ack.MessageType())
		}
	}
	serves("at first")
	discover := c.message(dhcpv4.MessageTypeDiscover, macB, fromUEFI).ToBytes()
	// Off the bridge, the port loses what is sent, with its link up: three questions.
	ip(t, "link", "set", "w1", "nomaster")
	for range 3 {
		if _, err := c.conn.WriteToUDPAddrPort(discover, servers); err != nil {
			t.Fatal(err)
		}
	}
	_ = c.conn.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
	if n, _, err := c.conn.ReadFromUDPAddrPort(make([]byte, 2048)); err == nil {
		t.Errorf("a blocked port let %d bytes through: this proves nothing", n)
	}
	ip(t, "link", "set", "w1", "master", "box0")
	serves("after the port was blocked")
	for _, link := range []string{"w1", "box0"} {
		ip(t, "link", "set", link, "down")
		ip(t, "link", "set", link, "up")
		serves("after " + link + " was down")
	}
	select {
	case err := <-ended:
		t.Errorf("the server ended: %v", err)
	default:
	}
}
