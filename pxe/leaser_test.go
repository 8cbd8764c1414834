package pxe

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"

	"github.com/better-compute/site-appliance/appliance/base/bound"
	"github.com/better-compute/site-appliance/pxe/dhcp"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/pxetest"
)

// TestRunProxy: dnsmasq gives the address, and the box on ports 67 and 4011 what to
// boot; by that address the machine has it over TFTP and HTTP. In the steps of EDK2
// and of iPXE as captures have them, against another server.
func TestRunProxy(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	content := bootFiles(t, dir)
	hosts := pxetest.Switch(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), macRAM, macOther)
	m, leaser := hosts[0], hosts[1]
	leaser.SetAddress(netip.MustParsePrefix("10.77.0.2/24"), netip.Addr{})
	leaser.Leasing(leasing)
	b := start(t, "box0", dir, func(c *Config) { c.Mode, c.RangeStart, c.RangeEnd = dhcp.Proxy, netip.Addr{}, netip.Addr{} }, ramdisk(macRAM))

	// client is one program of the machine: what dnsmasq leases, what the box offers.
	client := func(kind dhcpKind) (ack, proxied *dhcpv4.DHCPv4) {
		t.Helper()
		m.Do(func() error {
			c, err := nclient4.New(m.Iface, nclient4.WithTimeout(time.Second), nclient4.WithRetry(20))
			if err != nil {
				return err
			}
			defer c.Close()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			mods := append([]dhcpv4.Modifier{dhcpv4.WithBroadcast(true), dhcpv4.WithRequestedOptions(dhcpv4.OptionBootfileName)}, kind...)
			from := func(server string) (*dhcpv4.DHCPv4, error) {
				d, err := dhcpv4.NewDiscovery(c.InterfaceAddr(), mods...)
				if err != nil {
					return nil, err
				}
				return c.SendAndRead(ctx, nclient4.DefaultServers, d, func(d *dhcpv4.DHCPv4) bool { return d.ServerIdentifier().Equal(net.ParseIP(server)) })
			}
			offer, err := from("10.77.0.2")
			if err != nil {
				return err
			}
			if proxied, err = from(boxAddr); err != nil {
				return err
			}
			lease, err := c.RequestFromOffer(ctx, offer, mods...)
			if err != nil {
				return err
			}
			ack = lease.ACK
			return nil
		})
		if !ack.ServerIdentifier().Equal(net.ParseIP("10.77.0.2")) || ack.BootFileName != "" || ack.YourIPAddr.IsUnspecified() {
			t.Errorf("the leasing server answers %s, want an address and nothing to boot", ack.Summary())
		}
		if !proxied.YourIPAddr.IsUnspecified() || proxied.ClassIdentifier() != "PXEClient" || !proxied.ServerIPAddr.Equal(net.ParseIP(boxAddr)) {
			t.Errorf("the box offers %s, want no address, and PXEClient", proxied.Summary())
		}
		ip, _ := netip.AddrFromSlice(ack.YourIPAddr.To4())
		m.SetAddress(netip.PrefixFrom(ip, 24), netip.Addr{})
		return ack, proxied
	}

	ack, proxied := client(asUEFI)
	if proxied.BootFileName != "snponly.efi" {
		t.Errorf("firmware is offered %q, want its loader", proxied.BootFileName)
	}
	// EDK2 asks on port 4011, from that port, and takes the answer from there.
	m.Do(func() error {
		conn, err := bound.ListenPacket(t.Context(), m.Iface, netip.AddrPortFrom(netip.IPv4Unspecified(), 4011))
		if err != nil {
			return err
		}
		defer conn.Close()
		mods := append([]dhcpv4.Modifier{dhcpv4.WithMessageType(dhcpv4.MessageTypeRequest), dhcpv4.WithHwAddr(ack.ClientHWAddr), dhcpv4.WithClientIP(ack.YourIPAddr)}, asUEFI...)
		req, err := dhcpv4.New(mods...)
		if err != nil {
			return err
		}
		buf := make([]byte, 2048)
		for range 20 {
			if _, err := conn.WriteToUDPAddrPort(req.ToBytes(), netip.MustParseAddrPort(boxAddr+":4011")); err != nil {
				return err
			}
			_ = conn.SetReadDeadline(time.Now().Add(time.Second))
			n, from, err := conn.ReadFromUDPAddrPort(buf)
			if err != nil {
				continue
			}
			got, err := dhcpv4.FromBytes(buf[:n])
			if err != nil {
				return err
			}
			if from.Port() != 4011 || got.MessageType() != dhcpv4.MessageTypeAck || got.BootFileName != "snponly.efi" || !got.YourIPAddr.IsUnspecified() {
				t.Errorf("on 4011, from %s: %s, want an ACK with the loader", from, got.Summary())
			}
			return nil
		}
		return errors.New("port 4011 does not answer")
	})
	if got, err := fetchTFTP(m, "snponly.efi"); err != nil || !bytes.Equal(got, content[files.UEFILoader]) {
		t.Errorf("TFTP = %d bytes, %v, want the file", len(got), err)
	}
	_, proxied = client(asIPXE)
	if want := "http://10.77.0.1/boot/52-54-00-00-00-0a/script.ipxe"; proxied.BootFileName != want {
		t.Errorf("iPXE is offered %q, want %q", proxied.BootFileName, want)
	}
	if script := string(mustGet(t, m, proxied.BootFileName)); !strings.Contains(script, "kernel http://10.77.0.1/") {
		t.Errorf("script = %q, want the ramdisk's", script)
	}
	for _, stage := range []string{"dhcp", "tftp", "script"} {
		b.wait(t, 10*time.Second, "Stage:"+stage+" ")
	}

	// Whoever boots nothing hears nothing of the box.
	m.SetMAC(macThird)
	m.Do(func() error {
		c, err := nclient4.New(m.Iface, nclient4.WithTimeout(time.Second), nclient4.WithRetry(3))
		if err != nil {
			return err
		}
		defer c.Close()
		d, err := dhcpv4.NewDiscovery(c.InterfaceAddr(), append(asUEFI[:len(asUEFI):len(asUEFI)], dhcpv4.WithBroadcast(true))...)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		var leased bool
		_, err = c.SendAndRead(ctx, nclient4.DefaultServers, d, func(d *dhcpv4.DHCPv4) bool {
			leased = leased || d.ServerIdentifier().Equal(net.ParseIP("10.77.0.2"))
			return d.ServerIdentifier().Equal(net.ParseIP(boxAddr))
		})
		if err == nil || !leased {
			t.Errorf("a stranger is offered an address by dnsmasq: %v, and what to boot: %v, want that and not this", leased, err == nil)
		}
		return nil
	})
}
