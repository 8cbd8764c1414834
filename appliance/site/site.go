// Package site wires bcd site: the line home, the BMC relay, the plugin host,
// network boot and the artifact cache, each on its own interface.
package site

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/agent"
	"github.com/better-compute/site-appliance/appliance/agent/enroll"
	"github.com/better-compute/site-appliance/appliance/agent/trust"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/artifact"
	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/base/bound"
	"github.com/better-compute/site-appliance/appliance/hosting"
	"github.com/better-compute/site-appliance/appliance/invoke"
	"github.com/better-compute/site-appliance/appliance/site/config"
	"github.com/better-compute/site-appliance/appliance/site/firewall"
	"github.com/better-compute/site-appliance/appliance/site/ident"
	"github.com/better-compute/site-appliance/appliance/site/mediaserver"
	"github.com/better-compute/site-appliance/appliance/site/passthrough"
	"github.com/better-compute/site-appliance/bmc/addressbook"
	"github.com/better-compute/site-appliance/bmc/relay"
	"github.com/better-compute/site-appliance/pxe"
	"github.com/better-compute/site-appliance/pxe/assign"
	"github.com/better-compute/site-appliance/pxe/attempts"
	"github.com/better-compute/site-appliance/pxe/boots"
	"github.com/better-compute/site-appliance/pxe/syslog"
)

// PassthroughPort is where a LAN's machines reach the gateway through the box.
const PassthroughPort = 7443

// Config is what bcd site is started with.
type Config struct {
	ConfigFile, StateDir string
	// IdentityDevice takes a second copy of the identity; empty: none.
	IdentityDevice string
	// NetbootDir holds ipxe/ and ramdisk/.
	NetbootDir string
	// PluginsDir and PluginsCgroup serve where the configuration names no plugin
	// folder; empty: then no plugin runs.
	PluginsDir, PluginsCgroup string
	// ProblemsFile lists what went wrong before, a line each; empty: none.
	ProblemsFile string
	// Shim is the argv prefix of the plugin shim.
	Shim    []string
	Version string
	Build   time.Time
	Log     *slog.Logger
}

// memoryCacheBytes bounds the artifact cache of a box that has no disk for it.
const memoryCacheBytes = 128 << 20

// site is the running wiring.
type site struct {
	Config
	scratch string // folder of what may be lost
	agent   *agent.Agent
	assign  *assign.Store
	// These are what the machines of all LANs are, did and said.
	boots    *boots.Store
	heard    pxe.Heard
	attempts attempts.Log
	syslog   syslog.Store
	bindings sync.Map // a LAN's *dhcp6.Bindings by its name
	cache    *artifact.Cache
	media    *mediaserver.Server // nil: BMCs are served none
	mediaCA  map[string]string   // what the event says of its CA
	rules    string              // the firewall's, as they are in force

	unprotected []string // problems of protections that a damaged file took with it
}

// Run serves the site until ctx ends. It fails only on a configuration that
// cannot be served at all; everything else is retried.
func Run(ctx context.Context, c Config) error {
	cfg, err := config.LoadSite(c.ConfigFile)
	if err != nil {
		return err
	}
	s := &site{Config: c, scratch: c.StateDir}
	agentState, bookFile := filepath.Join(c.StateDir, "agent"), filepath.Join(c.StateDir, "addressbook.json")
	if c.StateDir == "" {
		// Identity and journal know that nothing lasts; the rest works from memory.
		c.Log.Error("no place for state: it serves what it can, and refuses what destroys")
		s.scratch, agentState, bookFile = memoryDir, "", ""
		if cfg.Cache.MaxBytes == 0 {
			cfg.Cache.MaxBytes = memoryCacheBytes
		}
	}
	if err := os.MkdirAll(s.scratch, 0o700); err != nil {
		return fmt.Errorf("make state folder: %w", err)
	}
	// Nothing starts before the box is closed. What is missing now is said, and
	// served later.
	there, err := look()
	if err != nil {
		return err
	}
	now := find(cfg, there)
	if err := s.applyRules(rules(cfg, now)); err != nil {
		return err
	}
	book, aside, err := addressbook.OpenOrSetAside(bookFile)
	if err != nil {
		return err
	}
	if aside != "" {
		c.Log.Error("the BMC address book is damaged: it is set aside, and BMCs bind anew", "kept", aside)
	}
	if s.assign, err = assign.Open(filepath.Join(s.scratch, "assignments.json")); err != nil {
		return err
	}
	if s.boots, err = boots.Open(filepath.Join(s.scratch, "boots"), windowOf(s.assign)); err != nil {
		return err
	}
	if err := s.boots.Damaged(); err != nil {
		c.Log.Error("some machines' boots are lost: their windows of now count as done", "err", err)
	}
	section := withDefaults(cfg.Plugins, c)
	egress, release, err := confinePlugins(section, c.Log)
	if err != nil {
		return err
	}
	defer release()
	plugins, err := hosting.Start(ctx, section, hosting.Options{Shim: c.Shim, Egress: egress, Log: c.Log.With("part", "plugins")})
	if err != nil {
		return err
	}
	defer plugins.Close()

	s.lost(book)
	driverKind := invoke.New(invoke.Options{Host: plugins, Book: book, Protected: s.assign.Protected, Log: c.Log.With("part", "invoke")})
	s.openMedia(cfg)
	if s.media != nil {
		defer s.media.Close()
	}
	own, desk, logOut, err := s.builtIn(cfg, book)
	if err != nil {
		return err
	}
	defer logOut()
	r := relay.New(relay.Options{Book: book, BuiltIn: own, Plugins: invoker{plugins}, Media: s.forBMCs(), Log: c.Log.With("part", "relay")})
	join, err := joinString(cfg)
	if err != nil {
		// An enrolled box needs none, and one that is not says so again.
		c.Log.Error("the join string is no good: the box goes on without", "err", err)
	}
	kinds := append(BMCKinds(r), s.lineKinds(cfg, r, plugins, book)...)
	s.agent, err = agent.New(agent.Config{
		Role: agentv1.Role_ROLE_SITE, StateDir: agentState, Identity: identityCopy(c.IdentityDevice),
		Join: join, Version: c.Version, Build: c.Build, Lanes: cfg.Lanes,
		Drivers: hosting.Advertised(plugins), Kinds: append(kinds, assignKind(s.assign, s.emit), explainKind(s.explain), fetchKind(s.prefetch), driverKind, confirmKind(desk)), Log: c.Log.With("part", "agent"),
	})
	if err != nil {
		return err
	}
	if join == nil && s.agent.AgentID() == "" {
		c.Log.Error("this box has nowhere to go: put the line join = \"…\" that \"better-compute site add\" prints into its site.toml, and start it again", "file", c.ConfigFile)
	}
	if s.cache, err = openCache(s, cfg.Cache.MaxBytes); err != nil {
		return err
	}
	s.cache.Keep(func() map[string]bool { return s.assign.Named(s.now()) })
	return supervise(ctx, c.Log, map[string]func(context.Context) error{
		"agent": s.agent.Run, "media ca": s.tellCA, "problems": s.reportProblems, "protections": s.tellLost, "boot decisions": s.tellDecisions, "space": s.watchSpace,
		"ports": func(ctx context.Context) error { return s.watchPorts(ctx, cfg) },
	})
}

// memoryDir is where what may be lost goes when no disk takes it.
const memoryDir = "/run/bcd-site"

// openCache opens the artifact cache on the disk, or, where the disk takes
// nothing more, in memory.
func openCache(s *site, maxBytes int64) (*artifact.Cache, error) {
	log := s.Log.With("part", "cache")
	cache, err := artifact.Open(filepath.Join(s.scratch, "artifacts"), maxBytes, source{s.agent}, log)
	if err == nil || s.scratch == memoryDir {
		return cache, err
	}
	log.Error("the artifact cache is kept in memory", "err", err)
	return artifact.Open(filepath.Join(memoryDir, "artifacts"), memoryCacheBytes, source{s.agent}, log)
}

// rules opens on each LAN what it serves, and nothing anywhere else.
// What is for a LAN, or for a subnet behind a relay on it, leaves by that LAN,
// or not at all while it is away.
func rules(cfg *config.Site, now ports) firewall.Rules {
	r := firewall.Rules{Uplink: now.uplink}
	for i, l := range cfg.LAN {
		home := func(network netip.Prefix) {
			r.Homes = append(r.Homes, firewall.Home{Network: network, Interface: now.lans[i].name})
		}
		home(l.Address.Masked())
		for _, relay := range l.Relays {
			home(relay.Subnet)
		}
	}
	for _, l := range now.list() {
		mode, boot := l.Mode(), l.Boots()
		r.LANs = append(r.LANs, firewall.LANRule{Interface: l.name, DHCP: mode != config.DHCPOff, ProxyDHCP: mode == config.DHCPProxy,
			TFTP: boot, HTTP: boot, Syslog: boot, Passthrough: true, Media: true})
	}
	return r
}

// What a plugin of the image may take.
const (
	pluginMemoryBytes = 256 << 20
	pluginTasks       = 128
)

// withDefaults is the [plugins] section with the image's folder where it names none.
func withDefaults(p config.Plugins, c Config) config.Plugins {
	if p.Dir == "" {
		p.Dir = c.PluginsDir
	}
	if p.Cgroup == "" && c.PluginsCgroup != "" {
		p.Cgroup = c.PluginsCgroup
		p.MemoryMax, p.PidsMax = cmp.Or(p.MemoryMax, pluginMemoryBytes), cmp.Or(p.PidsMax, pluginTasks)
	}
	return p
}

// joinString reads the join string, if there is one: an enrolled box needs none.
func joinString(cfg *config.Site) (*trust.Join, error) {
	text := cfg.Join
	if cfg.JoinFile != "" {
		data, err := os.ReadFile(cfg.JoinFile)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("read join string: %w", err)
		}
		text = string(data)
	}
	if text = strings.TrimSpace(text); text == "" {
		return nil, nil
	}
	join, err := trust.ParseJoin(text)
	if err != nil {
		return nil, fmt.Errorf("join string: %w", err)
	}
	return &join, nil
}

func identityCopy(device string) enroll.Copy {
	if device == "" {
		return nil
	}
	return ident.New(device)
}

// passthrough serves the machines' way to the gateway on one LAN.
func (s *site) passthrough(l lan) func(context.Context) error {
	return func(ctx context.Context) error {
		ln, err := bound.Listen(ctx, l.name, netip.AddrPortFrom(l.Address.Addr(), PassthroughPort))
		if err != nil {
			return err
		}
		return passthrough.Serve(ctx, ln, s.gatewayAddrs, s.Log.With("part", "passthrough", "lan", l.name))
	}
}

// now is the box's trusted time, and the system's until there is one.
func (s *site) now() time.Time {
	if s.agent == nil {
		return time.Now()
	}
	return s.agent.Clock().Now()
}

func (s *site) emit(name, class, key string, body any) {
	if err := s.agent.Emit(name, class, key, body); err != nil {
		s.Log.Error("event not kept", "event", name, "err", err)
	}
}

// supervise runs every service, restarts what ends with back-off, and returns
// when ctx has ended and all have stopped.
func supervise(ctx context.Context, log *slog.Logger, services map[string]func(context.Context) error) error {
	policy := backoff.Policy{Min: time.Second, Max: time.Minute}
	var wg sync.WaitGroup
	for name, run := range services {
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				start := time.Now()
				err := protect(ctx, run)
				if ctx.Err() != nil {
					return
				}
				if time.Since(start) > policy.Max {
					n = 0
				}
				log.Error("service ended: it starts again", "service", name, "err", err, "in", policy.Delay(n))
				_ = policy.Wait(ctx, n, nil)
			}
		})
	}
	wg.Wait()
	return nil
}

// protect turns a service's panic into an error: one service must not take the box down.
func protect(ctx context.Context, run func(context.Context) error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v", r)
		}
	}()
	return run(ctx)
}
