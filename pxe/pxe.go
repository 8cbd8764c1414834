// Package pxe network-boots the machines on one interface of the box: DHCP, TFTP and HTTP under one set of decisions.
package pxe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/bound"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/pxe/arp"
	"github.com/better-compute/site-appliance/pxe/assign"
	"github.com/better-compute/site-appliance/pxe/attempts"
	"github.com/better-compute/site-appliance/pxe/boots"
	"github.com/better-compute/site-appliance/pxe/chain"
	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/dhcp"
	"github.com/better-compute/site-appliance/pxe/dhcp6"
	"github.com/better-compute/site-appliance/pxe/discover"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/httpboot"
	"github.com/better-compute/site-appliance/pxe/lease"
	"github.com/better-compute/site-appliance/pxe/limit"
	"github.com/better-compute/site-appliance/pxe/pxev1"
	"github.com/better-compute/site-appliance/pxe/syslog"
	"github.com/better-compute/site-appliance/pxe/tftp"
)

// Config is one interface's network boot.
type Config struct {
	Interface string
	// Address is the box's own on the interface, with its prefix length. It must be there before Run.
	Address netip.Prefix
	// Mode is how DHCP is served.
	Mode dhcp.Mode
	// Takeover serves authoritatively though another server answers; otherwise Run
	// returns a *dhcp.ForeignError then.
	Takeover bool
	// BMC is for an interface of BMCs: addresses, and nothing to boot.
	BMC bool
	// RangeStart and RangeEnd are the ends of the address pool, both included; only
	// mode Authoritative has one.
	RangeStart, RangeEnd netip.Addr
	// Told is what the interface's machines are told of their network; of its other
	// fields none counts.
	Told dhcp.Subnet
	// Relayed are the subnets behind relays.
	Relayed []Relayed
	// Reservations are those of the configuration; assigned machines have theirs beside them.
	Reservations []lease.Reservation
	// IPv6 is served beside IPv4 where it has an address.
	IPv6 IPv6
	// StateDir holds the interface's lease file.
	StateDir string
	Assign   *assign.Store
	Files    files.Source
	// Cmdline is the ramdisk kernel's command line, without initrd= arguments, and
	// ARM64Cmdline the one on arm64.
	Cmdline, ARM64Cmdline string
	// Boot makes the initrd that is appended for one boot of the machine.
	Boot func(ctx context.Context, b httpboot.Booting) ([]byte, error)
	// Counts is how often machines have booted and what is done; one for all interfaces.
	Counts *boots.Store
	// Heard, Attempts and Syslog are what machines are, did and said; nil: of this interface alone.
	Heard    *Heard
	Attempts *attempts.Log
	Syslog   *syslog.Store
	// Bindings are the interface's addresses of IPv6; nil: they are forgotten when Run returns.
	Bindings *dhcp6.Bindings
	// Artifacts opens a stored artifact by its SHA-256; nil serves none.
	Artifacts func(ctx context.Context, sha256 string) (io.ReadSeekCloser, int64, error)
	// Event is given pxe.discovered and pxe.stage with a Discovered or Stage as
	// body, one call at a time; a slow one costs events, never a boot.
	Event func(name, class, key string, body any)
	Log   *slog.Logger
	// HTTPPort is 80 if 0.
	HTTPPort int
	// Now is the trusted time against which boot windows end; nil is time.Now.
	Now func() time.Time

	reserved map[string]bool
	grubs    *grubs
}

// Discovered is an unknown machine that asked to boot.
type Discovered struct {
	MAC       string `json:"mac"`
	Interface string `json:"interface"`
	Client    string `json:"client"`
	// Arch is the number of RFC 4578, -1 if the machine told none.
	Arch        int    `json:"arch"`
	ProductUUID string `json:"product_uuid,omitempty"`
	Class       string `json:"class,omitempty"`
	IP          string `json:"ip,omitempty"`
}

// Stage is how far a boot has come: dhcp, tftp, http-loader, script, kernel, initrd, boot, uki, iso, missing, progress, done.
type Stage struct {
	MAC       string `json:"mac"`
	MachineID string `json:"machine_id"`
	Stage     string `json:"stage"`
	Client    string `json:"client,omitempty"`
	IP        string `json:"ip,omitempty"`
	Detail    string `json:"detail,omitempty"`
}

// Run serves the interface until ctx ends, and returns nil then. It returns
// an error when it cannot start or a server dies; the caller starts it again.
func Run(ctx context.Context, cfg Config) error {
	if err := cfg.fill(); err != nil {
		return err
	}
	s := &server{Config: cfg, events: newEvents(cfg.Event, cfg.Log), logged: limit.Minute{Most: 512}, staged: limit.Minute{Most: mostStrange}, failed: limit.Minute{Most: mostStrange}}
	if err := cfg.Assign.Damaged(); err != nil {
		cfg.Log.Error("boot assignments lost until the gateway sends them again", "err", err)
	}
	if cfg.Mode == dhcp.Authoritative && !cfg.Takeover {
		if err := dhcp.Probe(ctx, cfg.Interface, cfg.Address.Addr(), dhcp.DefaultProbing); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("pxe on %s: %w", cfg.Interface, err)
		}
	}
	var err error
	if s.leases, err = s.openLeases(); err != nil {
		return fmt.Errorf("pxe on %s: %w", cfg.Interface, err)
	}
	if s.leases != nil {
		defer s.leases.Close()
	}
	if err := s.serve(ctx); err != nil {
		return fmt.Errorf("pxe on %s: %w", cfg.Interface, err)
	}
	return nil
}

func (c *Config) fill() error {
	switch {
	case c.Interface == "":
		return errs.New(errs.InvalidConfig, "pxe: the interface is missing")
	case !c.Address.IsValid() || !c.Address.Addr().Is4():
		return errs.New(errs.InvalidConfig, "pxe on %s: the address is missing or not IPv4", c.Interface)
	case c.Mode == dhcp.Authoritative && (!c.Address.Masked().Contains(c.RangeStart) || !c.Address.Masked().Contains(c.RangeEnd)):
		return errs.New(errs.InvalidConfig, "pxe on %s: range %s to %s is not inside of %s", c.Interface, c.RangeStart, c.RangeEnd, c.Address.Masked())
	case c.Assign == nil || c.Counts == nil || c.Files == nil || c.Boot == nil || c.Event == nil || c.Log == nil:
		return errs.New(errs.InvalidConfig, "pxe on %s: the wiring is incomplete", c.Interface)
	}
	if err := c.check6(); err != nil {
		return err
	}
	if c.HTTPPort == 0 {
		c.HTTPPort = 80
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Heard == nil {
		c.Heard = new(Heard)
	}
	if c.Attempts == nil {
		c.Attempts = new(attempts.Log)
	}
	if c.Syslog == nil {
		c.Syslog = new(syslog.Store)
	}
	if c.Bindings == nil {
		c.Bindings = new(dhcp6.Bindings)
	}
	if c.Artifacts == nil {
		c.Artifacts = func(context.Context, string) (io.ReadSeekCloser, int64, error) {
			return nil, 0, errs.New(errs.Unavailable, "no artifacts are served here")
		}
	}
	c.Log = c.Log.With("interface", c.Interface)
	c.grubs = new(grubs)
	c.reserved = make(map[string]bool)
	for _, r := range c.Reservations {
		hw, err := net.ParseMAC(r.MAC)
		if err != nil {
			return errs.New(errs.InvalidConfig, "pxe on %s: reservation of %s: %q is not a MAC", c.Interface, r.Address, r.MAC)
		}
		c.reserved[hw.String()] = true
	}
	return nil
}

// excluded are the addresses of a subnet that are no machine's.
func excluded(own netip.Prefix) []netip.Addr {
	network := own.Masked().Addr()
	last := network.As4()
	for bit := own.Bits(); bit < 32; bit++ {
		last[bit/8] |= 0x80 >> (bit % 8)
	}
	return []netip.Addr{own.Addr(), network, netip.AddrFrom4(last)}
}

type server struct {
	Config
	leases   *lease.Database // nil in mode Proxy
	dhcpd    *dhcp.Server
	events   *events
	http     *httpboot.Handler
	seen     discover.Filter
	logged   limit.Minute // strangers that are logged
	staged   limit.Minute // their stages that are told
	failed   limit.Minute // their failed transfers that are logged
	chains   chain.Memory
	awaiting awaiting
	bmcs     map[string]BMC
	taken    uint64 // the version of the assignments whose addresses are reserved
}

// serve opens every socket before the first request is answered, so that no
// machine is sent to a server that is not there.
func (s *server) serve(ctx context.Context) error {
	services := []func(context.Context) error{s.follow}
	if !s.BMC {
		ln, err := bound.Listen(ctx, s.Interface, netip.AddrPortFrom(s.Address.Addr(), uint16(s.HTTPPort)))
		if err != nil {
			return fmt.Errorf("http: %w", err)
		}
		defer ln.Close()
		tftpd, err := tftp.Listen(ctx, s.tftpConfig(s.Address.Addr()))
		if err != nil {
			return err
		}
		defer tftpd.Close()
		lines, err := syslog.Listen(ctx, syslog.Config{Interface: s.Interface, Address: s.Address.Addr(), Holder: s.holder, Known: s.known, Store: s.Syslog, Now: s.Now, Log: s.Log})
		if err != nil {
			// Machines boot without being heard.
			s.Log.Warn("what machines say while they boot is not kept", "err", err)
		} else {
			defer lines.Close()
			services = append(services, lines.Serve)
		}
		s.http = httpboot.New(httpboot.Config{
			Holder: s.asksHTTP, CountsFor: s.countsFor, Request: s.ask, Counts: s.Counts, Files: s.Files, Cmdline: s.Cmdline, ARM64Cmdline: s.ARM64Cmdline, Boot: s.bootArchive,
			Artifacts: s.Artifacts, Stage: s.stageHTTP, Syslog: lines != nil, Now: s.Now, Log: s.Log,
		})
		services = append(services, tftpd.Serve, func(ctx context.Context) error { return httpboot.Serve(ctx, ln, s.http, s.Log) })
	}
	var offered func(netip.Addr, string)
	if s.Mode == dhcp.Authoritative || s.Mode == dhcp.Reservations {
		prober, err := arp.Listen(arp.Config{Interface: s.Interface, Pool: localPool, Leases: s.leases, Found: s.conflict, Log: s.Log})
		if err != nil {
			return err
		}
		defer prober.Close()
		offered = prober.Offered
		services = append(services, prober.Serve)
	}
	var err error
	s.dhcpd, err = dhcp.Listen(ctx, dhcp.Config{
		Interface: s.Interface, Mode: s.Mode, Local: s.local(), Relayed: s.relayed(), Takeover: s.Takeover, BMC: s.BMC, Leases: s.leases,
		Known: s.known, Name: s.hostName, Heard: s.heardDHCP, Boot: s.bootDHCP, Offered: offered, Seen: s.seenBMC, Declined: s.declined, Foreign: s.foreign, Chains: &s.chains, Now: time.Now, Log: s.Log,
	})
	if err != nil {
		return err
	}
	defer s.dhcpd.Close()
	s.takeUp() // before the first offer, which could be of such an address
	services = append(services, s.dhcpd.Serve)
	switch {
	case s.IPv6.Address.IsValid():
		services = append(services, s.serve6)
	case s.sparesWait():
		services = append(services, s.serveBare)
	}
	s.Log.Info("network boot is served", "address", s.Address.String(), "assignment", s.Assign.Version())

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	errc := make(chan error, len(services))
	for _, run := range services {
		wg.Go(func() {
			errc <- run(ctx)
			cancel() // one without the others would strand machines half-way
		})
	}
	stopped := make(chan struct{})
	go func() { s.events.run(); close(stopped) }()
	wg.Wait()
	s.events.end()
	<-stopped
	close(errc)
	var all []error
	for err := range errc {
		all = append(all, err)
	}
	return errors.Join(all...)
}

// holder is the MAC that has an address.
func (s *server) holder(ip netip.Addr) (mac string, ok bool) {
	if ip.Is6() {
		return s.Bindings.Holder(s.IPv6.Address, ip, time.Now())
	}
	return s.dhcpd.Holder(ip)
}

// asksHTTP is holder for HTTP, which nothing asks that looks for a router.
func (s *server) asksHTTP(ip netip.Addr) (mac string, ok bool) {
	if mac, ok = s.holder(ip); ok {
		s.awaiting.end(mac)
	}
	return mac, ok
}

// countsFor is whom caps count an address for: all that are nobody's are one.
func (s *server) countsFor(ip netip.Addr) (machine string, known bool) {
	machine, _ = s.holder(ip)
	return machine, s.known(machine)
}

func (s *server) tftpConfig(own netip.Addr) tftp.Config {
	return tftp.Config{Interface: s.Interface, Address: own, CountsFor: s.countsFor, Ended: s.endedTFTP, Log: s.Log,
		Open: s.openTFTP, Refuse: s.refuseTFTP}
}

// baseAt is how URLs begin for who reaches the box at an address.
func (s *server) baseAt(server netip.Addr) string {
	return httpboot.Base(netip.AddrPortFrom(server, uint16(s.HTTPPort)))
}

func (s *server) endedTFTP(t tftp.Transfer) {
	mac, _ := s.holder(t.Client)
	m := s.ask(mac).Assigned()
	switch {
	case t.Outcome == tftp.Probed:
		s.Log.Debug("TFTP size asked", "client", t.Client.String(), "file", t.Name)
	case t.Outcome == tftp.Failed && !s.known(mac) && !s.failed.More("", s.Now()):
	case t.Outcome == tftp.Failed:
		s.Log.Warn("TFTP transfer failed", "client", t.Client.String(), "file", t.Name, "bytes", t.Bytes, "err", t.Err)
	case m != nil && !strings.Contains(t.Name, "/"): // GRUB's files have stages of their own
		if s.known(mac) { // of others nothing is judged by it
			s.chains.Loaded(protocolOf(t.Client), mac, time.Now())
		}
		s.stage(Stage{MAC: mac, MachineID: m.MachineId, Stage: "tftp", IP: t.Client.String(), Detail: t.Name})
	}
}

// protocolOf is what told a client of its boot program.
func protocolOf(client netip.Addr) chain.Protocol {
	if client.Is6() {
		return chain.DHCPv6
	}
	return chain.DHCPv4
}

func (s *server) stageHTTP(mac string, m *pxev1.Machine, stage, detail string) {
	if stage == "http-loader" && s.known(mac) {
		s.chains.LoadedHTTP(mac, time.Now())
	}
	s.stage(Stage{MAC: mac, MachineID: m.MachineId, Stage: stage, Detail: detail})
}

// mostStrange is how many stages of machines that nobody enrolled are told of in a minute,
// and how many of their failed transfers, of all together: one host can make them up, each with an address of its own.
const mostStrange = 512

func (s *server) stage(st Stage) {
	s.remember(st.MAC, st.Stage, st.Client, st.Detail, st.Stage == "dhcp" && !strings.HasPrefix(st.Client, decide.IPXE.String()))
	if decide.IsStranger(st.MachineID) && !s.staged.More("", s.Now()) {
		return
	}
	s.Log.Info("boot stage", "mac", st.MAC, "machine", st.MachineID, "stage", st.Stage, "client", st.Client, "ip", st.IP, "detail", st.Detail)
	if st.Stage == "done" {
		s.events.keep("pxe.stage", "state", st.MAC, st)
		return
	}
	s.events.put("pxe.stage", "telemetry", st.MAC, st)
}
