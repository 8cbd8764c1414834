package pxe

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/bound"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/dhcp"
	"github.com/better-compute/site-appliance/pxe/dhcp6"
	"github.com/better-compute/site-appliance/pxe/httpboot"
	"github.com/better-compute/site-appliance/pxe/ra"
	"github.com/better-compute/site-appliance/pxe/syslog"
	"github.com/better-compute/site-appliance/pxe/tftp"
)

// IPv6 is what is served beside IPv4: nothing without an address.
type IPv6 struct {
	// Address is the box's own, a /64. Other than Config.Address it may come later.
	Address netip.Prefix
	// DNS and NTP are IPv6 addresses that machines are told.
	DNS, NTP []netip.Addr
}

// ipv6Bits is the prefix length: the rest of an address is made from a MAC.
const ipv6Bits = 64

func (c *Config) check6() error {
	a := c.IPv6.Address
	switch {
	case !a.IsValid():
		return nil
	case !a.Addr().Is6() || a.Addr().Is4In6() || a.Bits() != ipv6Bits || !a.Addr().IsGlobalUnicast():
		return errs.New(errs.InvalidConfig, "pxe on %s: %s is not an IPv6 address of machines' with prefix length %d", c.Interface, a, ipv6Bits)
	case c.Mode != dhcp.Authoritative || c.BMC:
		return errs.New(errs.InvalidConfig, "pxe on %s: IPv6 is served in mode authoritative only, and not to BMCs", c.Interface)
	}
	return nil
}

// again6 is the wait before IPv6 is tried again.
const again6 = 5 * time.Second

// serve6 serves IPv6 for as long as ctx lasts. What keeps it from that, such as an
// address that is not there yet, keeps no machine from booting over IPv4.
func (s *server) serve6(ctx context.Context) error {
	told, last := "", ""
	for {
		began := time.Now()
		err := s.once6(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if time.Since(began) > again6 {
			told = "" // it was served meanwhile
		}
		// An address that was just given is not the box's yet: that is told the second time.
		text := fmt.Sprint(err)
		again := text == last
		last = text
		if again && text != told {
			told = text
			s.Log.Error("IPv6 is not served; it is tried again, and IPv4 is served meanwhile", "address", s.IPv6.Address.String(), "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(again6):
		}
	}
}

func (s *server) once6(ctx context.Context) error {
	own := s.IPv6.Address.Addr()
	ln, err := bound.Listen(ctx, s.Interface, netip.AddrPortFrom(own, uint16(s.HTTPPort)))
	if err != nil {
		return fmt.Errorf("http: %w", err)
	}
	defer ln.Close()
	tftpd, err := tftp.Listen(ctx, s.tftpConfig(own))
	if err != nil {
		return err
	}
	defer tftpd.Close()
	services := []func(context.Context) error{tftpd.Serve, func(ctx context.Context) error { return httpboot.Serve(ctx, ln, s.http, s.Log) }}
	lines, err := syslog.Listen(ctx, syslog.Config{Interface: s.Interface, Address: own, Holder: s.holder, Known: s.known, Store: s.Syslog, Now: s.Now, Log: s.Log})
	if err != nil {
		s.Log.Warn("what machines say over IPv6 while they boot is not kept", "err", err)
	} else {
		defer lines.Close()
		services = append(services, lines.Serve)
	}
	dhcpd, err := dhcp6.Listen(ctx, dhcp6.Config{
		Interface: s.Interface, Address: s.IPv6.Address, DNS: s.IPv6.DNS, NTP: s.IPv6.NTP, Search: s.Told.Search,
		Known: s.known, Arch: func(mac string) decide.Arch { return s.Heard.of(mac).arch }, Boot: s.bootDHCP6,
		Declined: func(mac string, ip netip.Addr) { s.declined(mac, ip, false) }, Chains: &s.chains, Bindings: s.Bindings, Now: time.Now, Log: s.Log,
	})
	if err != nil {
		return err
	}
	defer dhcpd.Close()
	// The advertisements come last: they are what sends machines here.
	adverts, err := ra.Listen(ctx, ra.Config{Interface: s.Interface, Network: s.IPv6.Address, MTU: uint32(s.Told.MTU), Log: s.Log})
	if err != nil {
		return err
	}
	defer adverts.Close()
	services = append(services, dhcpd.Serve, adverts.Serve)
	s.Log.Info("network boot is served over IPv6", "address", s.IPv6.Address.String())

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	all := make([]error, len(services))
	for i, run := range services {
		wg.Go(func() {
			defer cancel()
			all[i] = run(ctx)
		})
	}
	wg.Wait()
	return errors.Join(all...)
}

// bootDHCP6 is bootDHCP for DHCPv6, in which even a name for TFTP is a URL; called
// from DHCPv6's one loop.
func (s *server) bootDHCP6(ask dhcp6.Ask) string {
	step := dhcp.Offered
	if ask.Final {
		step = dhcp.Acknowledged
	}
	own := s.IPv6.Address.Addr()
	file := s.bootDHCP(dhcp.Ask{
		// What DHCPv4 heard before stays known: not every DUID says it.
		Who: dhcp.Who{MAC: ask.MAC, Client: ask.Client, Arch: ask.Arch, Class: ask.Class, UUID: cmp.Or(ask.UUID, s.Heard.of(ask.MAC).uuid)},
		IP:  ask.IP, Server: own, Step: step, Asked: ask.Asked,
	})
	if file != "" && !strings.Contains(file, "://") {
		return "tftp://[" + own.String() + "]/" + file
	}
	return file
}

// bootArchive is Boot, by the box's IPv4 address: the ramdisk speaks no other,
// whatever its firmware came by.
func (s *server) bootArchive(ctx context.Context, b httpboot.Booting) ([]byte, error) {
	if s.IPv6.Address.IsValid() && b.Base == s.baseAt(s.IPv6.Address.Addr()) {
		base := s.baseAt(s.Address.Addr())
		b.Base, b.Report = base, base+strings.TrimPrefix(b.Report, b.Base)
	}
	return s.Boot(ctx, b)
}

// over6 denies what boots over IPv4 only: firmware goes on to its entry for that.
func over6(d decide.Decision) decide.Decision {
	if decide.IsGRUB(d.Loader) {
		return decide.Decision{Action: decide.Deny, Reason: "GRUB finds the box over IPv4 only"}
	}
	return d
}
