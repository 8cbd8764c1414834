// Package dhcp is the authoritative DHCPv4 server of one interface, made for machines that network-boot.
//
// It follows RFC 2131 and the network-boot options of RFC 4578, with these
// choices: a machine is its MAC, whatever client identifier its firmware,
// iPXE and system send; siaddr, the file field and option 67 always say the
// same; option 60 goes back to HTTP boot only, which insists on it, since a
// "PXEClient" in the answer makes firmware look for a boot server. Relayed
// requests are not served.
package dhcp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/iana"

	"github.com/better-compute/site-appliance/appliance/base/bound"
	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/lease"
)

// leaseTime is short enough that a changed pool is taken up within the hour.
const leaseTime = time.Hour

// Step is how far a boot request has come.
type Step string

const (
	Offered      Step = "offer"
	Acknowledged Step = "ack"
)

// Config is one interface's DHCP.
type Config struct {
	Interface string
	// Address is the box's own on that interface, with its prefix length.
	Address netip.Prefix
	Leases  *lease.Table
	// Boot says what who gets to boot: a file name or URL of at most 127 bytes,
	// empty for nothing. Called from the server's loop: it must not block.
	Boot func(who Who, ip netip.Addr, step Step) string
	Now  func() time.Time
	Log  *slog.Logger
}

// Server answers the requests of one interface.
type Server struct {
	cfg   Config
	conn  *net.UDPConn
	frame *framer
	kept  bool // whether the last lease went to disk
}

// Listen opens the sockets. It fails if another server on this host has the port.
func Listen(ctx context.Context, cfg Config) (*Server, error) {
	conn, err := bound.ListenPacket(ctx, cfg.Interface, netip.AddrPortFrom(netip.IPv4Unspecified(), dhcpv4.ServerPort))
	if err != nil {
		return nil, fmt.Errorf("dhcp: %w", err)
	}
	frame, err := newFramer(cfg.Interface, cfg.Address.Addr())
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("dhcp: %w", err)
	}
	return &Server{cfg: cfg, conn: conn, frame: frame, kept: true}, nil
}

// Close releases the sockets and ends Serve.
func (s *Server) Close() error {
	return errors.Join(s.conn.Close(), s.frame.Close())
}

// Serve answers one packet after the other until ctx ends or the socket fails.
// The kernel's receive buffer is the queue: what does not fit is lost, and clients ask again.
func (s *Server) Serve(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { s.conn.Close() })
	defer stop()
	buf := make([]byte, 4096)
	for {
		n, _, err := s.conn.ReadFromUDPAddrPort(buf)
		if ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, net.ErrClosed) {
			return fmt.Errorf("dhcp: %w", err)
		}
		if err != nil {
			// Such as ENETDOWN while the link flaps: the socket lives on.
			s.cfg.Log.Warn("DHCP receive failed", "err", err)
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(time.Second):
			}
			continue
		}
		req, err := dhcpv4.FromBytes(buf[:n])
		if err != nil {
			s.cfg.Log.Debug("DHCP packet dropped", "err", err)
			continue
		}
		if reply := s.handle(req); reply != nil {
			if err := s.send(req, reply); err != nil {
				s.cfg.Log.Warn("DHCP answer not sent", "mac", req.ClientHWAddr.String(), "err", err)
			}
		}
	}
}

// send picks the way of RFC 2131 section 4.1 for a client that is not behind a relay.
func (s *Server) send(req, reply *dhcpv4.DHCPv4) error {
	to := route(req, reply)
	if to.mac == nil {
		_, err := s.conn.WriteToUDPAddrPort(reply.ToBytes(), netip.AddrPortFrom(to.ip, dhcpv4.ClientPort))
		return err
	}
	return s.frame.send(to.mac, to.ip, reply.ToBytes())
}

// target is where a reply goes; without a MAC the kernel finds the way.
type target struct {
	mac net.HardwareAddr
	ip  netip.Addr
}

var broadcastMAC = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

func route(req, reply *dhcpv4.DHCPv4) target {
	everyone := target{broadcastMAC, netip.AddrFrom4([4]byte{255, 255, 255, 255})}
	if reply.MessageType() == dhcpv4.MessageTypeNak {
		return everyone
	}
	if ip, ok := addr(req.ClientIPAddr); ok {
		return target{ip: ip}
	}
	if ip, ok := addr(reply.YourIPAddr); ok && !req.IsBroadcast() {
		// The client has no address yet and answers no ARP: the frame is made by hand.
		return target{req.ClientHWAddr, ip}
	}
	return everyone
}

// handle is the answer to one request, nil for none.
func (s *Server) handle(req *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
	hw := req.ClientHWAddr
	switch {
	case req.OpCode != dhcpv4.OpcodeBootRequest, req.HWType != iana.HWTypeEthernet, len(hw) != 6, hw[0]&1 != 0:
		return nil
	}
	if _, relayed := addr(req.GatewayIPAddr); relayed {
		s.cfg.Log.Debug("DHCP request dropped: relays are not served", "mac", hw.String(), "relay", req.GatewayIPAddr.String())
		return nil
	}
	switch req.MessageType() {
	case dhcpv4.MessageTypeDiscover:
		return s.discover(req)
	case dhcpv4.MessageTypeRequest:
		return s.request(req)
	case dhcpv4.MessageTypeInform:
		if _, ok := addr(req.ClientIPAddr); ok {
			return s.reply(req, dhcpv4.MessageTypeAck, netip.Addr{})
		}
	case dhcpv4.MessageTypeRelease:
		if ip, ok := addr(req.ClientIPAddr); ok {
			s.cfg.Leases.Release(hw.String(), ip, s.cfg.Now())
		}
	case dhcpv4.MessageTypeDecline:
		if ip, ok := addr(req.RequestedIPAddress()); ok {
			s.cfg.Log.Warn("DHCP address declined: another machine uses it", "mac", hw.String(), "ip", ip.String())
			s.cfg.Leases.Decline(hw.String(), ip, s.cfg.Now())
		}
	}
	return nil
}

func (s *Server) discover(req *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
	want, _ := addr(req.RequestedIPAddress())
	ip, err := s.cfg.Leases.Offer(req.ClientHWAddr.String(), want, s.cfg.Now())
	if err != nil {
		s.cfg.Log.Warn("DHCP request not answered", "mac", req.ClientHWAddr.String(), "err", err)
		return nil
	}
	return s.reply(req, dhcpv4.MessageTypeOffer, ip)
}

// request answers the states of RFC 2131 section 4.3.2.
func (s *Server) request(req *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
	mac := req.ClientHWAddr.String()
	if server, ok := addr(req.ServerIdentifier()); ok && server != s.cfg.Address.Addr() {
		s.cfg.Leases.Withdraw(mac)
		return nil
	}
	ip, ok := addr(req.RequestedIPAddress())
	if !ok {
		ip, ok = addr(req.ClientIPAddr)
	}
	if !ok {
		return nil
	}
	now := s.cfg.Now()
	kept, err := s.cfg.Leases.Bind(mac, ip, now, now.Add(leaseTime))
	if err != nil {
		s.cfg.Log.Info("DHCP request refused", "mac", mac, "ip", ip.String(), "err", err)
		return s.nak(req)
	}
	if (kept == nil) != s.kept {
		s.kept = kept == nil
		if s.kept {
			s.cfg.Log.Info("DHCP leases are kept on disk again")
		} else {
			s.cfg.Log.Error("DHCP leases are in memory only", "err", kept)
		}
	}
	return s.reply(req, dhcpv4.MessageTypeAck, ip)
}

func (s *Server) nak(req *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
	reply, err := dhcpv4.NewReplyFromRequest(req,
		dhcpv4.WithMessageType(dhcpv4.MessageTypeNak),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(s.cfg.Address.Addr().AsSlice())))
	if err != nil {
		return nil
	}
	return reply
}

// reply builds an OFFER or ACK; without an address it answers an INFORM.
func (s *Server) reply(req *dhcpv4.DHCPv4, kind dhcpv4.MessageType, ip netip.Addr) *dhcpv4.DHCPv4 {
	own := net.IP(s.cfg.Address.Addr().AsSlice())
	mask := net.CIDRMask(s.cfg.Address.Bits(), 32)
	mods := []dhcpv4.Modifier{
		dhcpv4.WithMessageType(kind),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(own)),
		dhcpv4.WithNetmask(mask),
		dhcpv4.WithOption(dhcpv4.OptBroadcastAddress(broadcast(own, mask))),
	}
	if kind == dhcpv4.MessageTypeAck {
		mods = append(mods, dhcpv4.WithClientIP(req.ClientIPAddr))
	}
	holder := ip
	if ip.IsValid() {
		mods = append(mods,
			dhcpv4.WithYourIP(ip.AsSlice()),
			dhcpv4.WithLeaseTime(uint32(leaseTime/time.Second)),
			dhcpv4.WithOption(dhcpv4.OptRenewTimeValue(leaseTime/2)),
			dhcpv4.WithOption(dhcpv4.OptRebindingTimeValue(leaseTime*7/8)))
	} else {
		holder, _ = addr(req.ClientIPAddr)
	}
	step := Acknowledged
	if kind == dhcpv4.MessageTypeOffer {
		step = Offered
	}
	who := classify(req)
	if who.Client != decide.System {
		if file := s.cfg.Boot(who, holder, step); file != "" && len(file) < 128 {
			mods = append(mods, boot(own, who.Client, file))
		}
	}
	reply, err := dhcpv4.NewReplyFromRequest(req, mods...)
	if err != nil {
		// Only a missing source of random numbers for an xid that is overwritten anyway.
		s.cfg.Log.Error("DHCP answer not built", "err", err)
		return nil
	}
	return reply
}

// boot sets what names the boot program, everywhere alike. Some BIOS ROMs read
// option 67 up to a NUL, which the option's length alone does not promise.
func boot(own net.IP, client decide.Client, file string) dhcpv4.Modifier {
	return func(d *dhcpv4.DHCPv4) {
		d.ServerIPAddr = own
		d.BootFileName = file
		d.UpdateOption(dhcpv4.OptBootFileName(file + "\x00"))
		if client == decide.UEFIHTTP {
			d.UpdateOption(dhcpv4.OptClassIdentifier("HTTPClient"))
		}
	}
}

func broadcast(own net.IP, mask net.IPMask) net.IP {
	ip := make(net.IP, 4)
	for i := range ip {
		ip[i] = own[i] | ^mask[i]
	}
	return ip
}

// addr is ip as an address, false for none or 0.0.0.0.
func addr(ip net.IP) (netip.Addr, bool) {
	a, ok := netip.AddrFromSlice(ip)
	a = a.Unmap()
	return a, ok && a.Is4() && !a.IsUnspecified()
}
