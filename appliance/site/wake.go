package site

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/better-compute/site-appliance/appliance/base/bound"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/site/config"
)

// discard is the port that magic packets are sent to; nothing listens there.
const discard = 9

// broadcaster sends datagrams on the LANs that are there, and never on the
// uplink: each from a socket that its LAN alone reaches.
func broadcaster(cfg *config.Site) func(ctx context.Context, at string, packet []byte) error {
	return func(ctx context.Context, at string, packet []byte) error {
		there, err := look()
		if err != nil {
			return err
		}
		now := find(cfg, there)
		chosen := now.list()
		if at != "" {
			if chosen = around(chosen, at); len(chosen) == 0 {
				return errs.New(errs.InvalidAddress, "this site has no LAN %s now", at)
			}
		}
		if len(chosen) == 0 {
			return errs.Retry(errs.Unreachable, "none of the site's LANs is there now")
		}
		// One LAN that takes nothing must not keep the packet from the others.
		var failures []error
		for _, l := range chosen {
			if err := broadcast(ctx, l, packet); err != nil {
				failures = append(failures, fmt.Errorf("LAN %s: %w", l.name, err))
			}
		}
		if len(failures) == len(chosen) {
			return errs.Retry(errs.Unreachable, "no LAN took the packet: %v", errors.Join(failures...))
		}
		return nil
	}
}

// around is the LAN with this interface or around this IPv4 address.
func around(lans []lan, at string) []lan {
	addr, err := netip.ParseAddr(at)
	for _, l := range lans {
		if err == nil && l.Address.Masked().Contains(addr) || l.name == at {
			return []lan{l}
		}
	}
	return nil
}

func broadcast(ctx context.Context, l lan, packet []byte) error {
	conn, err := bound.ListenPacket(ctx, l.name, netip.AddrPortFrom(l.Address.Addr(), 0))
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = conn.WriteToUDPAddrPort(packet, netip.AddrPortFrom(broadcastOf(l.Address), discard))
	return err
}

// broadcastOf is the last address of an IPv4 network.
func broadcastOf(p netip.Prefix) netip.Addr {
	a := p.Addr().As4()
	n := binary.BigEndian.Uint32(a[:]) | uint32(1<<(32-p.Bits())-1)
	binary.BigEndian.PutUint32(a[:], n)
	return netip.AddrFrom4(a)
}
