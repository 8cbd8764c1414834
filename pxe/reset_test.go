package pxe

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"github.com/insomniacslk/dhcp/dhcpv6"

	"github.com/better-compute/site-appliance/pxe/dhcp"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/pxetest"
	"github.com/better-compute/site-appliance/pxe/pxetest/fleet"
)

// kept is a connection that stays open over requests.
type kept struct {
	net.Conn
	in *bufio.Reader
}

func keep(t *testing.T, h *pxetest.Host, box string) *kept {
	t.Helper()
	var conn net.Conn
	var err error
	for range 20 { // an address that was just given is not known to both ends at once
		if err = h.Try(func() (err error) {
			conn, err = net.DialTimeout("tcp", net.JoinHostPort(box, "80"), time.Second)
			return err
		}); err == nil {
			break
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	k := &kept{conn, bufio.NewReader(conn)}
	if err := k.asks(); err != nil {
		t.Fatal(err)
	}
	return k
}

// asks says why the connection serves no request more, nil if it does.
func (k *kept) asks() error {
	_ = k.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := io.WriteString(k, request("/none")); err != nil {
		return err
	}
	resp, err := http.ReadResponse(k.in, nil)
	if err == nil {
		_, err = io.Copy(io.Discard, resp.Body)
	}
	return err
}

// reset says whether the box resets it.
func (k *kept) reset() error {
	_ = k.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := k.in.ReadByte(); !errors.Is(err, syscall.ECONNRESET) {
		return errors.Join(errors.New("not reset"), err)
	}
	return nil
}

// TestRestartIsToldByDHCP: what a machine has open is reset when its firmware is given
// its address anew, or its card's iPXE that is sent to GRUB, and not when another iPXE
// is, when it renews, when another machine is or when another speaks in its name.
func TestRestartIsToldByDHCP(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir)
	for _, name := range []string{files.Shim, files.ShimSecond} {
		path := filepath.Join(dir, "netboot", name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte("MZ"), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	hosts := pxetest.Switch(t, "br0", netip.MustParsePrefix(boxAddr+"/24"), macRAM, macEvil, macShim)
	m, other, card := hosts[0], hosts[1], hosts[2]
	shim := ramdisk(macShim)
	shim.MachineId, shim.Loader = "node_shim", "shim"
	start(t, "br0", dir, nil, ramdisk(macRAM), localDisk(macEvil), shim)
	mustDORA(t, card, asUEFI)
	grub := keep(t, card, boxAddr)
	lease := mustDORA(t, m, asUEFI)
	mustDORA(t, other, asUEFI)
	mine, theirs := keep(t, m, boxAddr), keep(t, other, boxAddr)

	var ether *fleet.Ether
	other.Do(func() (err error) {
		ether, err = fleet.OpenEther(other.Iface)
		return err
	})
	defer ether.Close()
	ask := func(from net.HardwareAddr, opts ...dhcpv4.Modifier) {
		t.Helper()
		d, err := dhcpv4.New(append(append([]dhcpv4.Modifier{dhcpv4.WithMessageType(dhcpv4.MessageTypeRequest), dhcpv4.WithHwAddr(lease.ACK.ClientHWAddr), dhcpv4.WithBroadcast(true)}, asUEFI...), opts...)...)
		if err == nil {
			err = ether.Broadcast(from, d.ToBytes())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	evil, err := net.ParseMAC(macEvil)
	if err != nil {
		t.Fatal(err)
	}
	ask(evil, dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(lease.ACK.YourIPAddr)))
	ask(lease.ACK.ClientHWAddr, dhcpv4.WithClientIP(lease.ACK.YourIPAddr))
	// Packets are answered one after the other: these have been by the time that what follows has.
	mustDORA(t, other, asIPXE)
	mustDORA(t, m, asIPXE)
	if err := mine.asks(); err != nil {
		t.Errorf("after DHCP of another, of iPXE and in the machine's name: %v", err)
	}
	if err := theirs.asks(); err != nil {
		t.Errorf("the other machine's, after its iPXE's DHCP: %v", err)
	}
	mustDORA(t, card, asIPXE)
	if err := grub.reset(); err != nil {
		t.Errorf("after DHCP of a card's iPXE that is sent to GRUB: %v", err)
	}
	for _, kind := range []dhcpKind{asUEFI, asHTTP} {
		mustDORA(t, m, kind)
		if err := mine.reset(); err != nil {
			t.Errorf("after the firmware's DHCP: %v", err)
		}
		mine = keep(t, m, boxAddr)
	}
	if err := theirs.asks(); err != nil {
		t.Errorf("the other machine's: %v", err)
	}
}

// TestRestartIsToldByAProxysOffer: so it is where another server gives the addresses.
func TestRestartIsToldByAProxysOffer(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir)
	m := pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), "m0", macRAM)
	m.SetAddress(netip.MustParsePrefix("10.77.0.50/24"), netip.Addr{})
	start(t, "box0", dir, func(c *Config) { c.Mode, c.RangeStart, c.RangeEnd = dhcp.Proxy, netip.Addr{}, netip.Addr{} }, ramdisk(macRAM))
	discover := func(kind dhcpKind) {
		t.Helper()
		m.Do(func() error {
			c, err := nclient4.New(m.Iface, nclient4.WithTimeout(time.Second), nclient4.WithRetry(20))
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.DiscoverOffer(t.Context(), kind...)
			return err
		})
	}
	discover(asUEFI)
	conn := keep(t, m, boxAddr)
	discover(asIPXE)
	if err := conn.asks(); err != nil {
		t.Errorf("after a proxy's offer to iPXE: %v", err)
	}
	discover(asUEFI)
	if err := conn.reset(); err != nil {
		t.Errorf("after a proxy's offer to firmware: %v", err)
	}
}

// TestRestartIsToldByDHCPv6: and so over IPv6.
func TestRestartIsToldByDHCPv6(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir)
	m := pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), "m0", macRAM)
	pxetest.AddAddress(t, "box0", boxNet6)
	pxetest.WaitLinkLocal(t, "box0")
	start(t, "box0", dir, func(c *Config) { c.IPv6.Address = boxNet6 }, ramdisk(macRAM))
	sarr(t, m, asUEFI6...)
	conn := keep(t, m, boxAddr6)
	sarr(t, m, asIPXE6...)
	if err := conn.asks(); err != nil {
		t.Errorf("after iPXE's DHCPv6: %v", err)
	}
	for _, options := range [][]dhcpv6.Option{asUEFI6, asHTTP6} {
		sarr(t, m, options...)
		if err := conn.reset(); err != nil {
			t.Errorf("after the firmware's DHCPv6: %v", err)
		}
		conn = keep(t, m, boxAddr6)
	}
}
