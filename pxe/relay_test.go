package pxe

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"

	"github.com/better-compute/site-appliance/appliance/base/bound"
	"github.com/better-compute/site-appliance/pxe/dhcp"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/pxetest"
)

const relayIn, relayOut = "10.5.0.254", "10.77.0.254"

// relay passes DHCP on between the machines' side and the box, as RFC 2131 and 3046
// have it, and knows nothing of what it carries.
type relay struct {
	down, up *net.UDPConn

	mu     sync.Mutex
	option []byte // 82's, for what the machines ask
	wrong  []string
}

func startRelay(t *testing.T, h *pxetest.Host, down string) *relay {
	t.Helper()
	r := &relay{}
	open := func(iface string) (conn *net.UDPConn) {
		h.Do(func() (err error) {
			conn, err = bound.ListenPacket(t.Context(), iface, netip.AddrPortFrom(netip.IPv4Unspecified(), dhcpv4.ServerPort))
			return err
		})
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	r.down, r.up = open(down), open(h.Iface)
	go r.carry(r.down, func(d *dhcpv4.DHCPv4) (*net.UDPConn, netip.AddrPort) {
		if d.OpCode != dhcpv4.OpcodeBootRequest {
			return nil, netip.AddrPort{}
		}
		d.HopCount++
		d.GatewayIPAddr = net.ParseIP(relayIn)
		d.UpdateOption(dhcpv4.OptGeneric(dhcpv4.OptionRelayAgentInformation, r.added()))
		return r.up, netip.MustParseAddrPort(boxAddr + ":67")
	})
	go r.carry(r.up, func(d *dhcpv4.DHCPv4) (*net.UDPConn, netip.AddrPort) {
		if got := d.Options.Get(dhcpv4.OptionRelayAgentInformation); !bytes.Equal(got, r.added()) || !d.GatewayIPAddr.Equal(net.ParseIP(relayIn)) {
			r.mu.Lock()
			r.wrong = append(r.wrong, fmt.Sprintf("giaddr %s, option 82 %x, want as it was sent", d.GatewayIPAddr, got))
			r.mu.Unlock()
		}
		d.Options.Del(dhcpv4.OptionRelayAgentInformation)
		return r.down, netip.MustParseAddrPort("255.255.255.255:68")
	})
	return r
}

func (r *relay) carry(from *net.UDPConn, on func(*dhcpv4.DHCPv4) (*net.UDPConn, netip.AddrPort)) {
	buf := make([]byte, 2048)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		if d, err := dhcpv4.FromBytes(buf[:n]); err == nil {
			if to, at := on(d); to != nil {
				_, _ = to.WriteToUDPAddrPort(d.ToBytes(), at)
			}
		}
	}
}

func (r *relay) added() []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.option
}

// circuit has the relay name another port of its switch from now on.
func (r *relay) circuit(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.option = append([]byte{1, byte(len(name))}, name...)
	r.option = append(r.option, 2, 2, 0xab, 0xcd)
}

// TestRunRelay: machines behind a router that relays DHCP get address, router, boot
// program and URLs of their own subnet, and boot by them over TFTP and HTTP; whom no
// relay speaks for is not answered. Built: no capture has a relay.
func TestRunRelay(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	content := bootFiles(t, dir)
	router := pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), "r0", macOther)
	router.SetAddress(netip.MustParsePrefix(relayOut+"/24"), netip.Addr{})
	m := router.Join("r1", netip.MustParsePrefix(relayIn+"/24"), "m0", macRAM)
	run := func(args ...string) {
		t.Helper()
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
	run("ip", "route", "add", "10.5.0.0/24", "via", relayOut)
	run("ip", "route", "add", "10.6.0.0/24", "via", relayOut)
	r := startRelay(t, router, "r1")
	r.circuit("port 7")

	at := netip.MustParseAddr
	b := start(t, "box0", dir, func(c *Config) {
		c.Mode, c.RangeStart, c.RangeEnd = dhcp.Relay, netip.Addr{}, netip.Addr{}
		c.Relayed = []Relayed{
			{Subnet: dhcp.Subnet{Network: netip.MustParsePrefix("10.5.0.0/24"), Server: at(boxAddr), Router: at(relayIn), Giaddr: at(relayIn)},
				RangeStart: at("10.5.0.100"), RangeEnd: at("10.5.0.109")},
			// The router gives the box another address for these.
			{Subnet: dhcp.Subnet{Network: netip.MustParsePrefix("10.6.0.0/24"), Server: at("192.0.2.80"), Router: at("10.6.0.254"), CircuitID: []byte("port 9")},
				RangeStart: at("10.6.0.100"), RangeEnd: at("10.6.0.109")},
		}
	}, ramdisk(macRAM))

	const path = "/boot/52-54-00-00-00-0a/"
	relayed := func(kind dhcpKind) *nclient4.Lease {
		t.Helper()
		l, err := dora(m, kind, dhcpv4.WithRequestedOptions(dhcpv4.OptionRouter))
		if err != nil {
			t.Fatalf("DHCP through the relay: %v", err)
		}
		ip, _ := netip.AddrFromSlice(l.ACK.YourIPAddr.To4())
		via, _ := netip.AddrFromSlice(l.ACK.Router()[0].To4())
		m.SetAddress(netip.PrefixFrom(ip, 24), via)
		return l
	}
	for _, tt := range []struct {
		circuit             string
		kind                dhcpKind
		subnet, server, url string
	}{
		{"port 7", asUEFI, "10.5.0.", boxAddr, "snponly.efi"},
		{"port 7", asHTTP, "10.5.0.", boxAddr, "http://10.77.0.1" + path + "snponly.efi"},
		{"port 9", asHTTP, "10.6.0.", "192.0.2.80", "http://192.0.2.80" + path + "snponly.efi"},
		{"port 9", asUEFI, "10.6.0.", "192.0.2.80", "snponly.efi"},
	} {
		r.circuit(tt.circuit)
		ack := relayed(tt.kind).ACK
		if got := ack.YourIPAddr.String(); !strings.HasPrefix(got, tt.subnet+"10") || ack.Router()[0].String() != tt.subnet+"254" {
			t.Errorf("on %s: %s by %s, want of %s0/24 by its router", tt.circuit, got, ack.Router(), tt.subnet)
		}
		if ack.ServerIPAddr.String() != tt.server || ack.BootFileName != tt.url {
			t.Errorf("on %s: %q of %s, want %q of %s", tt.circuit, ack.BootFileName, ack.ServerIPAddr, tt.url, tt.server)
		}
	}

	// The whole boot, from the address that the first of them has. Its router is only
	// the next hop: the box knows it by its lease.
	r.circuit("port 7")
	ack := relayed(asUEFI).ACK
	if got, err := fetchTFTP(m, "snponly.efi"); err != nil || !bytes.Equal(got, content[files.UEFILoader]) {
		t.Errorf("TFTP through the router = %d bytes, %v, want the file", len(got), err)
	}
	script := relayed(asIPXE).ACK.BootFileName
	if want := "http://10.77.0.1" + path + "script.ipxe"; script != want {
		t.Errorf("iPXE is told %q, want %q", script, want)
	}
	boot := func(script, base string) {
		t.Helper()
		text := string(mustGet(t, m, script))
		named := 0
		for word := range strings.FieldsSeq(text) {
			if !strings.HasPrefix(word, "http://") {
				continue
			}
			if named++; !strings.HasPrefix(word, base+"/") {
				t.Errorf("the script of %s names %s, want all of %s", script, word, base)
			}
			if strings.HasSuffix(word, "/vmlinuz") && !bytes.Equal(mustGet(t, m, word), content[files.Kernel]) {
				t.Errorf("GET %s: other bytes than the kernel's", word)
			}
		}
		if named < 4 {
			t.Errorf("the script of %s names %d URLs: the test would show nothing:\n%s", script, named, text)
		}
	}
	boot(script, "http://10.77.0.1")
	for _, stage := range []string{"dhcp", "tftp", "script", "kernel"} {
		b.wait(t, 5*time.Second, "Stage:"+stage+" ")
	}

	// A renewal goes past the relay, and comes from the router's MAC.
	m.Do(func() error {
		conn, err := bound.ListenPacket(t.Context(), "m0", netip.AddrPortFrom(netip.IPv4Unspecified(), dhcpv4.ClientPort))
		if err != nil {
			return err
		}
		defer conn.Close()
		req, err := dhcpv4.New(dhcpv4.WithMessageType(dhcpv4.MessageTypeRequest), dhcpv4.WithHwAddr(ack.ClientHWAddr), dhcpv4.WithClientIP(ack.YourIPAddr))
		if err != nil {
			return err
		}
		buf := make([]byte, 2048)
		for range 10 {
			if _, err := conn.WriteToUDPAddrPort(req.ToBytes(), netip.MustParseAddrPort(boxAddr+":67")); err != nil {
				return err
			}
			_ = conn.SetReadDeadline(time.Now().Add(time.Second))
			n, err := conn.Read(buf)
			if err != nil {
				continue
			}
			reply, err := dhcpv4.FromBytes(buf[:n])
			if err != nil || reply.MessageType() != dhcpv4.MessageTypeAck || !reply.YourIPAddr.Equal(ack.YourIPAddr) {
				return fmt.Errorf("the renewal is answered with %v, %v, want an ACK of %s", reply, err, ack.YourIPAddr)
			}
			return nil
		}
		return fmt.Errorf("the renewal is not answered")
	})

	// What the machines of the other subnet know as the box.
	router.Do(func() error {
		for _, rule := range []string{"add table ip way", "add chain ip way in { type nat hook prerouting priority -100; }", "add rule ip way in ip daddr 192.0.2.80 dnat to " + boxAddr} {
			if out, err := exec.Command("nft", rule).CombinedOutput(); err != nil {
				return fmt.Errorf("nft %s: %w: %s", rule, err, out)
			}
		}
		return exec.Command("ip", "address", "add", "10.6.0.254/24", "dev", "r1").Run()
	})
	r.circuit("port 9")
	boot(relayed(asIPXE).ACK.BootFileName, "http://192.0.2.80")

	// A circuit that no section names is the first's by its relay; without a relay
	// nobody is answered.
	r.circuit("port 8")
	if got := relayed(asUEFI).ACK.YourIPAddr.String(); !strings.HasPrefix(got, "10.5.0.") {
		t.Errorf("on a port that no section names: %s, want one of the relay's subnet", got)
	}
	r.mu.Lock()
	for _, wrong := range r.wrong {
		t.Errorf("to the relay: %s", wrong)
	}
	r.mu.Unlock()
	router.Do(func() error {
		c, err := nclient4.New("r0", nclient4.WithTimeout(time.Second), nclient4.WithRetry(2))
		if err != nil {
			return err
		}
		defer c.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if offer, err := c.DiscoverOffer(ctx, asUEFI...); err == nil {
			t.Errorf("on the box's own wire %s is offered, want silence", offer.YourIPAddr)
		}
		return nil
	})
}
