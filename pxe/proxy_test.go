package pxe

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"

	"github.com/better-compute/site-appliance/pxe/dhcp"
	"github.com/better-compute/site-appliance/pxe/pxetest"
)

// TestProxyTellsOfBoots: iPXE and EDK2 take what to boot from a proxy's offer and ask
// it no more, so that the offer is the stage; what they send again is not another one.
func TestProxyTellsOfBoots(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir)
	h := pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), "m0", macRAM)
	b := start(t, "box0", dir, func(c *Config) { c.Mode, c.RangeStart, c.RangeEnd = dhcp.Proxy, netip.Addr{}, netip.Addr{} }, ramdisk(macRAM))
	discover := func(kind dhcpKind) {
		t.Helper()
		h.Do(func() error {
			c, err := nclient4.New(h.Iface, nclient4.WithTimeout(time.Second), nclient4.WithRetry(2))
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.DiscoverOffer(t.Context(), kind...)
			return err
		})
	}
	const stage = "pxe.stage telemetry " + macRAM + " {MAC:" + macRAM + " MachineID:node_a Stage:dhcp Client:"
	for _, tt := range []struct {
		kind dhcpKind
		want string
	}{
		{asUEFI, "pxe uefi-x64 IP: Detail:agent: "},
		{asUEFI, ""},
		{asIPXE, "ipxe uefi-x64 foreign IP: Detail:agent: "},
		{asIPXE, "ipxe uefi-x64 IP: Detail:agent: "},
		{asBIOS, "pxe bios IP: Detail:agent: "},
	} {
		discover(tt.kind)
		if tt.want != "" {
			b.wait(t, 5*quiet, stage+tt.want)
		}
	}
	if got := strings.Count(b.told(), stage); got != 4 {
		t.Errorf("%d stages, want one of each of four clients:\n%s", got, b.told())
	}
}
