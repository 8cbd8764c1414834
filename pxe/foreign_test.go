package pxe

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"

	"github.com/better-compute/site-appliance/pxe/dhcp"
	"github.com/better-compute/site-appliance/pxe/pxetest"
)

const (
	macOther, macThird = "52:54:00:00:00:02", "52:54:00:00:00:03"
	leasing            = "--dhcp-range=10.77.0.20,10.77.0.29,255.255.255.0,1h"
)

// offeredBy asks for an address until a server offers one: another one may be faster.
func offeredBy(t *testing.T, h *pxetest.Host, server string) {
	t.Helper()
	h.Do(func() error {
		c, err := nclient4.New(h.Iface, nclient4.WithTimeout(time.Second), nclient4.WithRetry(20))
		if err != nil {
			return err
		}
		defer c.Close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		d, err := dhcpv4.NewDiscovery(c.InterfaceAddr(), dhcpv4.WithBroadcast(true))
		if err != nil {
			return err
		}
		_, err = c.SendAndRead(ctx, nclient4.DefaultServers, d, func(d *dhcpv4.DHCPv4) bool { return d.ServerIdentifier().Equal(net.ParseIP(server)) })
		return err
	})
}

// TestRunTellsOfAnother: a DHCP server that comes to the wire while the box serves is
// an event that names its address and MAC, once however often it answers, and so is
// one more; the box goes on serving. What starts beside one serves with takeover only.
func TestRunTellsOfAnother(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir)
	hosts := pxetest.Switch(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), macRAM, macOther, macThird)
	m, other, third := hosts[0], hosts[1], hosts[2]
	other.SetAddress(netip.MustParsePrefix("10.77.0.2/24"), netip.Addr{})
	third.SetAddress(netip.MustParsePrefix("10.77.0.3/24"), netip.Addr{})
	b := start(t, "box0", dir, nil, ramdisk(macRAM))
	mustDORA(t, m, asUEFI)
	if strings.Contains(b.told(), "pxe.foreign") {
		t.Errorf("alone on the wire the box tells of another:\n%s", b.told())
	}
	stop := other.Leasing(leasing)
	const event = "pxe.foreign state box0 10.77.0.2 {Interface:box0 Server:10.77.0.2 ServerMAC:" + macOther + " MAC:" + macRAM + " Offered:10.77.0.2"
	for range 3 {
		offeredBy(t, m, "10.77.0.2")
		offeredBy(t, m, boxAddr)
	}
	b.wait(t, 10*time.Second, event)
	third.Leasing("--dhcp-range=10.77.0.30,10.77.0.39,255.255.255.0,1h")
	for range 3 {
		offeredBy(t, m, "10.77.0.2")
		offeredBy(t, m, "10.77.0.3")
	}
	b.wait(t, 10*time.Second, "pxe.foreign state box0 10.77.0.3 {Interface:box0 Server:10.77.0.3 ServerMAC:"+macThird+" ")
	if n := strings.Count(b.told(), "pxe.foreign"); n != 2 {
		t.Errorf("%d events of two other servers, want one of each:\n%s", n, b.told())
	}

	// Takeover: it starts beside both.
	if err := b.stop(); err != nil {
		t.Fatalf("Run = %v, want nil", err)
	}
	var cfg Config
	b = start(t, "box0", dir, func(c *Config) { cfg = *c }, ramdisk(macRAM))
	offeredBy(t, m, boxAddr)
	if err := b.stop(); err != nil {
		t.Fatalf("Run = %v, want nil", err)
	}
	// Without it nothing is served at all, not even at first.
	stop()
	log := &record{}
	cfg.Takeover, cfg.Log = false, slog.New(slog.NewTextHandler(log, nil))
	err := Run(t.Context(), cfg)
	if other := new(dhcp.ForeignError); !errors.As(err, &other) || other.Foreign.Server.String() != "10.77.0.3" || other.Foreign.ServerMAC != macThird {
		t.Errorf("Run beside another = %v, want a *dhcp.ForeignError that names 10.77.0.3", err)
	}
	if said := strings.Join(log.lines(), "\n"); strings.Contains(said, "is served") {
		t.Errorf("beside another the box served before it found that out:\n%s", said)
	}
}
