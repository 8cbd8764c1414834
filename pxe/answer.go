package pxe

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/pxe/attempts"
	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/dhcp"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/grub"
	"github.com/better-compute/site-appliance/pxe/httpboot"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// Heard is what DHCP heard of machines that nothing else says again. Its zero
// value is ready.
type Heard struct {
	mu    sync.Mutex
	byMAC map[string]heard
}

type heard struct {
	arch decide.Arch
	uuid string
	// told is whom a proxy's offer was last told of, and when.
	told   decide.Client
	toldAt time.Time
}

const (
	maxHeard = 8192
	// maxLooked bounds the search for a machine to forget.
	maxLooked = 64
	// proxiedFor is how long a client asks in vain before it gives up: what it sends
	// meanwhile is the same request.
	proxiedFor = 30 * time.Second
)

// note keeps what was heard of a machine. Where the memory is full, one that is
// not known is forgotten for it, as far as a look at a few finds one.
func (t *Heard) note(mac string, h heard, known func(mac string) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byMAC == nil {
		t.byMAC = make(map[string]heard)
	}
	before, had := t.byMAC[mac]
	if !had && len(t.byMAC) >= maxHeard {
		last, looked := "", 0
		for last = range t.byMAC {
			if looked++; !known(last) || looked >= maxLooked {
				break
			}
		}
		delete(t.byMAC, last)
	}
	h.told, h.toldAt = before.told, before.toldAt
	t.byMAC[mac] = h
}

// proxied says whether a client's request at a proxy is a new one.
func (t *Heard) proxied(mac string, c decide.Client, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.byMAC[mac]
	if h.told == c && now.Sub(h.toldAt) < proxiedFor && !now.Before(h.toldAt) {
		return false
	}
	h.told, h.toldAt = c, now
	t.byMAC[mac] = h
	return true
}

func (t *Heard) of(mac string) heard {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.byMAC[mac]
}

// request is all that is known of a machine, but for the program that asks.
func (c *Config) request(mac string, h heard) decide.Request {
	m, _ := c.Assign.ByMAC(mac)
	r := decide.Request{Machine: m, Unknown: c.Assign.Unknown(), MAC: mac, UUID: h.uuid, Now: c.Now()}
	r.Client.Arch = h.arch
	if a := r.Assigned(); a != nil {
		r.Boots, r.Done = c.Counts.Of(a.MachineId, a.WindowId)
	}
	return r
}

// ask is request for TFTP and HTTP. A machine that was heard before the box was
// started again is taken for what most are.
func (s *server) ask(mac string) decide.Request {
	h := s.Heard.of(mac)
	if h.arch == decide.OtherArch {
		h.arch = decide.X64
	}
	return s.request(mac, h)
}

// decide is Decide, and a denial where the box has not the files that the client
// needs.
func (c *Config) decide(r decide.Request) decide.Decision {
	d := decide.Decide(r)
	for _, name := range needs(r.Client, d) {
		f, err := c.Files.Open(name)
		if err != nil {
			return decide.Decision{Action: decide.Deny, Reason: fmt.Sprintf("the box has no %s, which %s needs", name, r.Client)}
		}
		_ = f.Close() // it was only looked at
	}
	if d.HTTP && decide.IsGRUB(d.Loader) && !c.speaksHTTP(cmp.Or(decide.Second(d.Loader), d.Loader)) {
		return decide.Decision{Action: decide.Deny, Reason: "the box's GRUB fetches nothing over HTTP, as Debian's before 2.12, or boots on without what it is refused there, as Ubuntu's: this machine boots by PXE"}
	}
	return d
}

// needs are the box's files that a decision comes down to and that not every box has.
func needs(who decide.Client, d decide.Decision) []string {
	var names []string
	if d.Loader != "" {
		names = append(names, d.Loader)
	}
	if second := decide.Second(d.Loader); second != "" {
		names = append(names, second)
	}
	if d.Action == decide.RunAgent && who.Arch == decide.ARM64 {
		names = append(names, files.ARM64Kernel, files.ARM64Initrd)
	}
	return names
}

// maxGRUB is many times an image's size.
const maxGRUB = 32 << 20

// grubs remember which of the box's GRUBs speak HTTP, as long as their files are
// the same: DHCP asks at every packet. The zero value is ready, and nil remembers
// nothing.
type grubs struct {
	mu     sync.Mutex
	byName map[string]looked
}

// looked is what a file was found to be.
type looked struct {
	info   fs.FileInfo
	speaks bool
}

func (l looked) same(info fs.FileInfo) bool {
	return l.info != nil && os.SameFile(l.info, info) && l.info.Size() == info.Size() && l.info.ModTime().Equal(info.ModTime())
}

// speaksHTTP looks into the box's GRUB.
func (c *Config) speaksHTTP(name string) bool {
	f, err := c.Files.Open(name)
	if err != nil {
		return false
	}
	defer f.Close()
	var info fs.FileInfo
	if plain, ok := f.(interface{ Stat() (fs.FileInfo, error) }); ok && c.grubs != nil {
		if info, err = plain.Stat(); err != nil {
			return false
		}
		c.grubs.mu.Lock()
		defer c.grubs.mu.Unlock()
		if l := c.grubs.byName[name]; l.same(info) {
			return l.speaks
		}
	}
	image, err := io.ReadAll(io.LimitReader(f, maxGRUB))
	speaks := err == nil && grub.SpeaksHTTP(image)
	if err == nil && info != nil {
		if c.grubs.byName == nil {
			c.grubs.byName = make(map[string]looked)
		}
		c.grubs.byName[name] = looked{info, speaks}
	}
	return speaks
}

// bootDHCP is what a boot request is answered with; called from the loops of DHCP
// and DHCPv6.
func (s *server) bootDHCP(ask dhcp.Ask) string {
	who, ip, base := ask.Who, ask.IP, s.baseAt(ask.Server)
	h := heard{arch: who.Client.Arch, uuid: who.UUID}
	s.Heard.note(who.MAC, h, s.known)
	r := s.request(who.MAC, h)
	r.Client = who.Client
	d := s.decide(r)
	if ask.Server.Is6() {
		d = over6(d)
	}
	m := r.Assigned()
	if r.Machine == nil && s.seen.Fresh(who.MAC, s.Now()) {
		level := slog.LevelInfo
		if !s.logged.More("", s.Now()) {
			level = slog.LevelDebug
		}
		s.Log.Log(context.Background(), level, "unknown machine asks to boot", "mac", who.MAC, "client", who.Client.String(), "arch", who.Arch)
		s.events.put("pxe.discovered", "state", who.MAC, Discovered{MAC: who.MAC, Interface: s.Interface, Client: who.Client.String(),
			Arch: who.Arch, ProductUUID: who.UUID, Class: who.Class, IP: text(ip)})
	}
	detail := d.Action.String() + ": " + d.Reason
	switch {
	case m != nil && (ask.Step == dhcp.Acknowledged || ask.Step == dhcp.Proxied && s.Heard.proxied(who.MAC, who.Client, s.Now())):
		s.stage(Stage{MAC: who.MAC, MachineID: m.MachineId, Stage: "dhcp", Client: who.Client.String(), IP: text(ip), Detail: detail})
	default:
		s.remember(who.MAC, "dhcp", who.Client.String(), detail, who.Client.Program != decide.IPXE)
	}
	begins := ask.Step != dhcp.Offered && (who.Client.Program == decide.Firmware || who.Client.Program == decide.HTTPBoot || decide.IsGRUB(d.Loader))
	if begins && !ask.Asked.IsZero() {
		s.http.Reset(who.MAC, ip, ask.Asked)
	}
	file := named(base, who.MAC, d, func() string { return s.http.ImageURL(base, who.MAC, m, d.Action) })
	switch {
	case ask.Step != dhcp.Acknowledged:
		s.awaiting.end(who.MAC) // an iPXE that begins has no address yet
	case who.Client.Program == decide.IPXE && file != "":
		s.awaiting.add(who.MAC, time.Now())
	}
	return file
}

// text is an address, and nothing where another server gives it.
func text(ip netip.Addr) string {
	if !ip.IsValid() {
		return ""
	}
	return ip.String()
}

// named is the file name or URL of a decision, image that of the image itself; empty:
// none.
func named(base, mac string, d decide.Decision, image func() string) string {
	switch {
	case d.Loader != "" && d.HTTP:
		return httpboot.LoaderURL(base, mac, d.File())
	case d.Loader != "":
		return d.File()
	case !d.HTTP || d.Exit == decide.NotFound || d.Action == decide.Deny || d.Action == decide.None:
		return ""
	case d.Firmware:
		return image()
	}
	// For the local disk too: the script's exit is the quickest way there.
	return httpboot.ScriptURL(base, mac)
}

// openTFTP gives a machine the boot programs that DHCP could name to it, and its
// GRUB what it asks for.
func (s *server) openTFTP(ctx context.Context, client netip.Addr, name string) (files.File, error) {
	mac, ok := s.holder(client)
	if !ok {
		return nil, errors.New("the address holds no lease")
	}
	server := s.serverFor(client)
	if f, ok, err := s.http.OpenTFTP(ctx, mac, httpboot.Home{Server: server, Base: s.baseAt(server)}, name); ok {
		return f, err
	}
	d, ok := decide.Fetchable(s.ask(mac), name)
	if !ok {
		return nil, errors.New(d.Reason)
	}
	return s.Files.Open(d.Loader)
}

// refuseTFTP is what openTFTP would refuse that takes no look at GRUB's paths,
// which mint and count.
func (s *server) refuseTFTP(client netip.Addr, name string) error {
	mac, ok := s.holder(client)
	if !ok {
		return errors.New("the address holds no lease")
	}
	if s.http.IsGRUB(name) {
		return nil
	}
	if d, ok := decide.Fetchable(s.ask(mac), name); !ok {
		return errors.New(d.Reason)
	}
	return nil
}

// serverFor is the address that a machine reaches the box by.
func (s *server) serverFor(client netip.Addr) netip.Addr {
	if client.Is6() {
		return s.IPv6.Address.Addr()
	}
	for _, n := range s.relayed() {
		if n.Network.Contains(client) && n.Server.IsValid() {
			return n.Server
		}
	}
	return s.Address.Addr()
}

func (s *server) remember(mac, stage, client, detail string, begins bool) {
	s.Attempts.Add(mac, s.Interface, attempts.Step{At: s.Now(), Stage: stage, Client: client, Detail: detail, Begins: begins, Known: s.known(mac)})
}

// tail is how many lines of a machine's syslog an explanation has.
const tail = 50

// Explain says what a machine would get over each protocol, and why, and what it did.
func (c *Config) Explain(mac string) *pxev1.ExplainResult {
	out := &pxev1.ExplainResult{Mac: mac}
	now := c.Now()
	r := c.request(mac, c.Heard.of(mac))
	if m := r.Assigned(); m != nil {
		out.MachineId = m.MachineId
	}
	for _, client := range decide.Clients {
		if client.Program == decide.GRUB && client.Arch == decide.X64 && r.Assigned().GetLoader() != "shim" {
			continue // none comes there
		}
		r.Client = client
		d := c.decide(r)
		protocol, file := "dhcp", named("", "<mac>", d, func() string { return "/boot/<mac>/<token>/ (the image itself)" })
		switch {
		case client.Program == decide.GRUB:
			protocol, file = "tftp", "grub/grub.cfg"
		case strings.HasPrefix(file, "/"):
			protocol = "http"
		case file != "":
			protocol = "tftp"
		}
		action := d.Action.String()
		if d.Action == decide.LocalDisk {
			action += " by " + d.Exit.String()
		}
		out.Answers = append(out.Answers, &pxev1.Answer{Protocol: protocol, Client: client.String(), Action: action, File: file, Reason: d.Reason})
	}
	all := c.Attempts.Of(mac, now)
	for _, a := range all {
		out.Attempts = append(out.Attempts, a.Wire())
	}
	out.WaitsFor = attempts.WaitsFor(all, now)
	out.Syslog = c.Syslog.Tail(mac, tail)
	return out
}
