// Package pxe network-boots the machines on one interface of the box: DHCP, TFTP and HTTP under one set of decisions.
package pxe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"path/filepath"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/bound"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/pxe/assign"
	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/dhcp"
	"github.com/better-compute/site-appliance/pxe/discover"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/httpboot"
	"github.com/better-compute/site-appliance/pxe/lease"
	"github.com/better-compute/site-appliance/pxe/pxev1"
	"github.com/better-compute/site-appliance/pxe/tftp"
)

// Config is one interface's network boot.
type Config struct {
	Interface string
	// Address is the box's own on the interface, with its prefix length. It must be there before Run.
	Address netip.Prefix
	// RangeStart and RangeEnd are the ends of the address pool, both included.
	RangeStart, RangeEnd netip.Addr
	// StateDir holds the interface's lease file.
	StateDir string
	Assign   *assign.Store
	Files    files.Source
	// Cmdline is the ramdisk kernel's command line, without initrd= arguments.
	Cmdline string
	// Boot makes the initrd that is appended for one boot of the machine.
	Boot func(ctx context.Context, m *pxev1.Machine) ([]byte, error)
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

// Stage is how far a boot has come: dhcp, tftp, http-loader, script, kernel, initrd, boot.
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
	s := &server{Config: cfg, events: newEvents(cfg.Event, cfg.Log)}
	if err := cfg.Assign.Damaged(); err != nil {
		cfg.Log.Error("boot assignments lost until the gateway sends them again", "err", err)
	}
	var err error
	s.leases, err = lease.Open(filepath.Join(cfg.StateDir, "leases-"+cfg.Interface), lease.Pool{
		First: cfg.RangeStart, Last: cfg.RangeEnd, Exclude: excluded(cfg.Address)})
	if err != nil {
		return fmt.Errorf("pxe on %s: %w", cfg.Interface, err)
	}
	defer s.leases.Close()
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
	case !c.Address.Masked().Contains(c.RangeStart) || !c.Address.Masked().Contains(c.RangeEnd):
		return errs.New(errs.InvalidConfig, "pxe on %s: range %s to %s is not inside of %s", c.Interface, c.RangeStart, c.RangeEnd, c.Address.Masked())
	case c.Assign == nil || c.Files == nil || c.Boot == nil || c.Event == nil || c.Log == nil:
		return errs.New(errs.InvalidConfig, "pxe on %s: the wiring is incomplete", c.Interface)
	}
	if c.HTTPPort == 0 {
		c.HTTPPort = 80
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Artifacts == nil {
		c.Artifacts = func(context.Context, string) (io.ReadSeekCloser, int64, error) {
			return nil, 0, errs.New(errs.Unavailable, "no artifacts are served here")
		}
	}
	c.Log = c.Log.With("interface", c.Interface)
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
	leases *lease.Table
	events *events
	base   string // http://…
	seen   discover.Filter
}

// serve opens every socket before the first request is answered, so that no
// machine is sent to a server that is not there.
func (s *server) serve(ctx context.Context) error {
	s.base = "http://" + s.Address.Addr().String()
	if s.HTTPPort != 80 {
		s.base = fmt.Sprintf("%s:%d", s.base, s.HTTPPort)
	}
	ln, err := bound.Listen(ctx, s.Interface, netip.AddrPortFrom(s.Address.Addr(), uint16(s.HTTPPort)))
	if err != nil {
		return fmt.Errorf("http: %w", err)
	}
	defer ln.Close()
	tftpd, err := tftp.Listen(ctx, tftp.Config{Interface: s.Interface, Address: s.Address.Addr(), Open: s.openTFTP, Ended: s.endedTFTP, Log: s.Log})
	if err != nil {
		return err
	}
	dhcpd, err := dhcp.Listen(ctx, dhcp.Config{Interface: s.Interface, Address: s.Address, Leases: s.leases, Boot: s.bootDHCP, Now: time.Now, Log: s.Log})
	if err != nil {
		return errors.Join(err, tftpd.Close())
	}
	defer dhcpd.Close()
	handler := httpboot.New(httpboot.Config{
		Base: s.base, Holder: s.leases.Holder, ByMAC: s.Assign.ByMAC, Files: s.Files, Cmdline: s.Cmdline,
		Boot: s.Boot, Artifacts: s.Artifacts, Stage: s.stageHTTP, Now: s.Now, Log: s.Log,
	})
	s.Log.Info("network boot is served", "address", s.Address.String(), "assignment", s.Assign.Version())

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	errc := make(chan error, 3)
	for _, run := range []func(context.Context) error{
		dhcpd.Serve,
		tftpd.Serve,
		func(ctx context.Context) error { return httpboot.Serve(ctx, ln, handler, s.Log) },
	} {
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

// bootDHCP is what a boot request is answered with; called from DHCP's one loop.
func (s *server) bootDHCP(who dhcp.Who, ip netip.Addr, step dhcp.Step) string {
	m, known := s.Assign.ByMAC(who.MAC)
	if !known {
		if s.seen.Fresh(who.MAC, s.Now()) {
			s.Log.Info("unknown machine asks to boot", "mac", who.MAC, "client", who.Client.String(), "arch", who.Arch)
			s.events.put("pxe.discovered", "state", who.MAC, Discovered{MAC: who.MAC, Interface: s.Interface, Client: who.Client.String(),
				Arch: who.Arch, ProductUUID: who.UUID, Class: who.Class, IP: ip.String()})
		}
		return ""
	}
	d := decide.Decide(decide.Request{Machine: m, Client: who.Client, Now: s.Now()})
	if step == dhcp.Acknowledged {
		s.stage(Stage{MAC: who.MAC, MachineID: m.MachineId, Stage: "dhcp", Client: who.Client.String(), IP: ip.String(),
			Detail: d.Action.String() + ": " + d.Reason})
	}
	switch {
	case d.Action == decide.Chain && who.Client == decide.UEFIHTTP:
		return httpboot.LoaderURL(s.base, who.MAC)
	case d.Action == decide.Chain:
		return d.File
	case who.Client == decide.IPXE && d.Action != decide.None:
		// For the local disk too: the script's exit is the quickest way there.
		return httpboot.ScriptURL(s.base, who.MAC)
	}
	return ""
}

// openTFTP gives a machine the one loader that DHCP named to it.
func (s *server) openTFTP(client netip.Addr, name string) (files.File, error) {
	mac, ok := s.leases.Holder(client)
	if !ok {
		return nil, errors.New("the address holds no lease")
	}
	asked, file := decide.UEFI, files.UEFILoader
	switch name {
	case decide.UEFIFile:
	case decide.BIOSFile:
		asked, file = decide.BIOS, files.BIOSLoader
	default:
		return nil, errors.New("no such file")
	}
	m, _ := s.Assign.ByMAC(mac)
	if d := decide.Decide(decide.Request{Machine: m, Client: asked, Now: s.Now()}); d.Action != decide.Chain {
		return nil, errors.New(d.Reason)
	}
	return s.Files.Open(file)
}

func (s *server) endedTFTP(t tftp.Transfer) {
	mac, _ := s.leases.Holder(t.Client)
	m, known := s.Assign.ByMAC(mac)
	switch {
	case t.Outcome == tftp.Probed:
		s.Log.Debug("TFTP size asked", "client", t.Client.String(), "file", t.Name)
	case t.Outcome == tftp.Failed:
		s.Log.Warn("TFTP transfer failed", "client", t.Client.String(), "file", t.Name, "bytes", t.Bytes, "err", t.Err)
	case known:
		s.stage(Stage{MAC: mac, MachineID: m.MachineId, Stage: "tftp", IP: t.Client.String(), Detail: t.Name})
	}
}

func (s *server) stageHTTP(mac string, m *pxev1.Machine, stage, detail string) {
	s.stage(Stage{MAC: mac, MachineID: m.MachineId, Stage: stage, Detail: detail})
}

func (s *server) stage(st Stage) {
	s.Log.Info("boot stage", "mac", st.MAC, "machine", st.MachineID, "stage", st.Stage, "client", st.Client, "ip", st.IP, "detail", st.Detail)
	s.events.put("pxe.stage", "telemetry", st.MAC, st)
}
