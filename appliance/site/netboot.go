package site

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/agent"
	"github.com/better-compute/site-appliance/appliance/agent/bootinfo"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/artifact"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/site/config"
	"github.com/better-compute/site-appliance/pxe"
	"github.com/better-compute/site-appliance/pxe/assign"
	"github.com/better-compute/site-appliance/pxe/boots"
	"github.com/better-compute/site-appliance/pxe/dhcp"
	"github.com/better-compute/site-appliance/pxe/dhcp6"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/httpboot"
	"github.com/better-compute/site-appliance/pxe/lease"
	"github.com/better-compute/site-appliance/pxe/newc"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// ramdiskCmdline boots the ramdisk. Nothing secret stands on a command line.
const ramdiskCmdline = "console=tty0 console=ttyS0,115200 panic=10 random.trust_cpu=on"

// arm64Cmdline names the two kinds of serial port that arm64 servers have.
const arm64Cmdline = "console=tty0 console=ttyS0,115200 console=ttyAMA0,115200 panic=10 random.trust_cpu=on"

// bootArchive mints a machine's voucher, for one boot, and packs it as an
// initrd. It needs no line home.
func (s *site) bootArchive() func(context.Context, httpboot.Booting) ([]byte, error) {
	return func(_ context.Context, b httpboot.Booting) ([]byte, error) {
		m := b.Machine
		bundle := s.agent.Bundle()
		if bundle == nil {
			return nil, errors.New("the box is not enrolled yet")
		}
		now := s.agent.Clock().Now()
		if end := time.UnixMilli(m.WindowUntilMs); !now.Before(end) {
			return nil, fmt.Errorf("the boot window of %s ended at %s", m.Name, end.UTC().Format(time.RFC3339))
		}
		nonce := make([]byte, 16)
		if _, err := rand.Read(nonce); err != nil {
			return nil, err
		}
		signed, err := s.agent.SignVoucher(&agentv1.Voucher{
			MachineId: m.MachineId, BootNonce: nonce, WindowId: m.WindowId, Purpose: m.Purpose,
			IssuedAtMs: now.UnixMilli(), NotAfterMs: m.WindowUntilMs,
		})
		if err != nil {
			return nil, fmt.Errorf("sign voucher: %w", err)
		}
		voucher, err := proto.Marshal(signed)
		if err != nil {
			return nil, err
		}
		host, err := url.Parse(b.Base)
		if err != nil {
			return nil, fmt.Errorf("the box's own address: %w", err)
		}
		ca, roots := bundle.CASPKI(), bundle.RootSet()
		data, err := json.Marshal(bootinfo.Info{
			MachineID: m.MachineId, SiteID: s.agent.SiteID(), Voucher: voucher,
			GatewayURLs: bundle.URLs(), CASPKI: ca[:], RootSet: roots[:],
			// By the address that the machine came to, which is another one behind a relay.
			Via:       net.JoinHostPort(host.Hostname(), strconv.Itoa(PassthroughPort)),
			Artifacts: b.Base + "/artifacts/",
			Report:    b.Report, Assignment: m.Assignment,
		})
		if err != nil {
			return nil, err
		}
		return newc.BootArchive(bootinfo.Path, data), nil
	}
}

// modes are those of [[lan]] that serve.
var modes = map[string]dhcp.Mode{
	config.DHCPAuthoritative: dhcp.Authoritative, config.DHCPReservations: dhcp.Reservations,
	config.DHCPProxy: dhcp.Proxy, config.DHCPRelay: dhcp.Relay,
}

// netboot serves DHCP, TFTP and HTTP on one LAN, and DHCP alone on one of BMCs.
func (s *site) netboot(l lan) func(context.Context) error {
	told := ""
	return func(ctx context.Context) error {
		state := filepath.Join(s.scratch, "netboot-"+l.name)
		if err := os.MkdirAll(state, 0o700); err != nil {
			return fmt.Errorf("make lease folder: %w", err)
		}
		c := pxeConfig(l.LAN)
		c.Interface, c.StateDir, c.Assign, c.Files = l.name, state, s.assign, files.Dir(s.NetbootDir)
		c.ARM64Cmdline = arm64Cmdline
		c.Cmdline, c.Boot, c.Artifacts, c.Event = ramdiskCmdline, s.bootArchive(), s.openArtifact, s.emit
		c.Counts, c.Heard, c.Attempts, c.Syslog, c.Bindings = s.boots, &s.heard, &s.attempts, &s.syslog, s.bindingsOf(l.name)
		c.Now, c.Log = s.agent.Clock().Now, s.Log.With("part", "netboot", "lan", l.name)
		err := pxe.Run(ctx, c)
		// It is tried again; what stands in its way is told at home once.
		if other := new(dhcp.ForeignError); errors.As(err, &other) && told != other.Foreign.Server.String() {
			told = other.Foreign.Server.String()
			s.emit("box.problem", "audit", "netboot "+l.name, map[string]string{"step": "netboot " + l.name, "message": other.Error()})
		}
		return err
	}
}

// bindingsOf are a LAN's addresses of IPv6, which last as long as the site.
func (s *site) bindingsOf(lan string) *dhcp6.Bindings {
	b, _ := s.bindings.LoadOrStore(lan, new(dhcp6.Bindings))
	return b.(*dhcp6.Bindings)
}

// windowOf is the boot window that is in force for a machine, or any where the box has
// no boot decisions (any more).
func windowOf(decisions *assign.Store) func(machine string) (window string, ok bool) {
	return func(machine string) (string, bool) {
		if decisions.Version() == 0 {
			return boots.AnyWindow, true
		}
		return decisions.Window(machine)
	}
}

// tellEvery is how often a box says that it lost its boot decisions, until it has them.
const tellEvery = 10 * time.Minute

// tellDecisions has the gateway send the boot decisions again, where they are lost.
func (s *site) tellDecisions(ctx context.Context) error {
	for lostDecisions(s.assign, s.boots) {
		s.emit(assigned, "state", "", map[string]uint64{"version": 0})
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(tellEvery):
		}
	}
	<-ctx.Done()
	return nil
}

// lostDecisions says whether the box has no boot decisions and had some: their file was
// damaged, now or at a start before, or is missing though boots were counted. One that
// starts with nothing does not ask for windows in which it does not know what was booted.
func lostDecisions(decisions *assign.Store, counts *boots.Store) bool {
	return decisions.Version() == 0 && (decisions.Suspect() || counts.Any())
}

// explain says what a machine would get now. Every LAN boots from the same
// assignments and files.
func (s *site) explain(mac string) (*pxev1.ExplainResult, error) {
	c := pxe.Config{Assign: s.assign, Counts: s.boots, Heard: &s.heard, Attempts: &s.attempts, Syslog: &s.syslog, Files: files.Dir(s.NetbootDir), Now: s.agent.Clock().Now}
	return c.Explain(mac), nil
}

// pxeConfig is what a [[lan]] says of network boot.
func pxeConfig(l config.LAN) pxe.Config {
	c := pxe.Config{Address: l.Address, Mode: modes[l.Mode()], Takeover: l.Takeover, BMC: l.BMC, Told: tell(l.Told)}
	c.IPv6 = pxe.IPv6{Address: l.IPv6, DNS: family(l.DNS, netip.Addr.Is6), NTP: family(l.NTP, netip.Addr.Is6)}
	if len(l.Range) == 2 {
		c.RangeStart, c.RangeEnd = l.Range[0], l.Range[1]
	}
	for _, r := range l.Relays {
		n := pxe.Relayed{Subnet: tell(r.Told)}
		n.Network, n.Giaddr, n.Server = r.Subnet, r.Giaddr, r.ServerFor(l)
		// They were checked when the configuration was read.
		n.CircuitID, _ = config.ID(r.CircuitID)
		n.RemoteID, _ = config.ID(r.RemoteID)
		if len(r.Range) == 2 {
			n.RangeStart, n.RangeEnd = r.Range[0], r.Range[1]
		}
		c.Relayed = append(c.Relayed, n)
	}
	for _, r := range l.Reservations {
		if mac, err := net.ParseMAC(r.MAC); err == nil {
			c.Reservations = append(c.Reservations, lease.Reservation{MAC: mac.String(), Address: r.Address})
		}
	}
	return c
}

// family are the addresses of one kind.
func family(all []netip.Addr, is func(netip.Addr) bool) (some []netip.Addr) {
	for _, a := range all {
		if is(a) {
			some = append(some, a)
		}
	}
	return some
}

func tell(t config.Told) dhcp.Subnet {
	n := dhcp.Subnet{Router: t.Gateway, DNS: family(t.DNS, netip.Addr.Is4), NTP: family(t.NTP, netip.Addr.Is4), Search: t.Search, MTU: uint16(t.MTU)}
	for _, r := range t.Routes {
		n.Routes = append(n.Routes, dhcp.Route{To: r.To, Via: r.Via})
	}
	return n
}

// gatewayAddrs are the only places that the passthrough leads to.
func (s *site) gatewayAddrs() []string {
	bundle := s.agent.Bundle()
	if bundle == nil {
		return nil
	}
	var addrs []string
	for _, text := range bundle.URLs() {
		u, err := url.Parse(text)
		if err != nil {
			continue
		}
		addrs = append(addrs, net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), "443")))
	}
	return addrs
}

var _ httpboot.Pieces = (*artifact.Reader)(nil)

func (s *site) openArtifact(ctx context.Context, sha string) (io.ReadSeekCloser, int64, error) {
	r, err := s.cache.Open(ctx, sha)
	if err != nil {
		return nil, 0, err
	}
	return r, r.Size(), nil
}

// source fetches artifacts from the gateway for the cache.
type source struct{ agent *agent.Agent }

func (s source) Locate(ctx context.Context, ref string) (*agentv1.LocateResponse, error) {
	return s.agent.Locate(ctx, ref, "")
}

func (s source) Fetch(ctx context.Context, location string, offset int64) (io.ReadCloser, error) {
	base, err := url.Parse(s.agent.BaseURL())
	if err != nil {
		return nil, err
	}
	target, err := base.Parse(location)
	if err != nil {
		return nil, fmt.Errorf("artifact URL %q: %w", location, err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target.String(), nil)
	if err != nil {
		return nil, err
	}
	want := http.StatusOK
	if offset > 0 {
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-", offset))
		want = http.StatusPartialContent
	}
	resp, err := s.agent.HTTPClient().Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != want {
		resp.Body.Close()
		if resp.StatusCode >= 400 && resp.StatusCode < 500 {
			return nil, errs.New(errs.Unavailable, "GET %s: the gateway answers %s", target.Path, resp.Status)
		}
		return nil, errs.Retry(errs.Unavailable, "GET %s: the gateway answers %s", target.Path, resp.Status)
	}
	return resp.Body, nil
}
