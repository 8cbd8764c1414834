package site

import (
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/appliance/site/config"
	"github.com/better-compute/site-appliance/appliance/site/firewall"
)

// portsEvery is how often the interfaces are looked at.
const portsEvery = 2 * time.Second

// port is one interface that is there, with its addresses.
type port struct {
	net.Interface
	addrs []string // with prefix length
}

// ports is one look at the box's interfaces.
type ports struct {
	// uplink is empty where none is configured or there: then every interface
	// that is no LAN is closed as the uplink is.
	uplink string
	// lans can be served now; the key counts [[lan]] sections from 0.
	lans map[int]lan
	// missing says of each port that cannot be used why, one line each.
	missing []string
	// out is how the box may get home: every other interface's addresses.
	out string
}

// lan is a configured LAN whose interface was found.
type lan struct {
	config.LAN
	name string
}

// find matches the configured ports with those that are there. A LAN counts
// once its interface has the LAN's address: nothing can listen on it before.
func find(cfg *config.Site, there []port) ports {
	p := ports{lans: map[int]lan{}}
	ifaces := make([]net.Interface, len(there))
	for i := range there {
		ifaces[i] = there[i].Interface
	}
	taken := map[string]bool{}
	for i, l := range cfg.LAN {
		name, err := l.Device(ifaces)
		at := slices.IndexFunc(there, func(p port) bool { return p.Name == name })
		if err == nil && at < 0 {
			err = fmt.Errorf("%s is not made yet", name)
		}
		if err == nil && taken[name] {
			err = fmt.Errorf("%s is another lan already", name)
		}
		if err == nil {
			taken[name] = true
			if !slices.Contains(there[at].addrs, l.Address.String()) {
				err = fmt.Errorf("%s has no address %s", name, l.Address)
			}
		}
		if err != nil {
			p.missing = append(p.missing, fmt.Sprintf("lan %d: %v", i+1, err))
			continue
		}
		p.lans[i] = lan{l, name}
	}
	if up := cfg.Uplink.Port; up.MAC != "" || up.Interface != "" {
		name, err := up.Name(ifaces)
		if err == nil && taken[name] {
			err = fmt.Errorf("%s is a lan already", name)
		}
		if err != nil {
			p.missing = append(p.missing, fmt.Sprintf("uplink: %v", err))
		} else {
			p.uplink = name
		}
	}
	var out []string
	for _, i := range there {
		if !taken[i.Name] && i.Flags&net.FlagLoopback == 0 && i.Flags&net.FlagRunning != 0 && len(i.addrs) > 0 {
			out = append(out, i.Name+" "+strings.Join(i.addrs, " "))
		}
	}
	p.out = strings.Join(out, ", ")
	return p
}

// look lists the interfaces that are there.
func look() ([]port, error) {
	ifaces, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	there := make([]port, len(ifaces))
	for i, iface := range ifaces {
		there[i].Interface = iface
		addrs, err := iface.Addrs()
		if err != nil {
			continue // it went away in between
		}
		for _, a := range addrs {
			there[i].addrs = append(there[i].addrs, a.String())
		}
		slices.Sort(there[i].addrs)
	}
	return there, nil
}

// serving is one LAN that is served.
type serving struct {
	lan   lan
	index int // of the interface: another one may come back under its name
	stop  context.CancelFunc
	done  chan struct{}
}

// watchPorts serves each LAN while its interface is there. Ports come late,
// and those on USB come and go: none of them may keep the box from the rest.
func (s *site) watchPorts(ctx context.Context, cfg *config.Site) error {
	serves := map[int]*serving{}
	end := func(i int) {
		serves[i].stop()
		<-serves[i].done
		delete(serves, i)
	}
	defer func() {
		for _, v := range serves {
			v.stop()
		}
		for i := range serves {
			end(i)
		}
	}()
	var told []string
	out := ""
	for first := true; ; first = false {
		there, err := look()
		if err != nil {
			return err
		}
		now := find(cfg, there)
		for _, m := range now.missing {
			if !slices.Contains(told, m) {
				s.Log.Error("a port is missing: the box serves on without it", "port", m)
			}
		}
		told = now.missing
		// Closed first, opened after: no service is there without its rules.
		for i, v := range serves {
			if l, ok := now.lans[i]; !ok || l.name != v.lan.name || indexOf(there, l.name) != v.index {
				s.Log.Error("a LAN went away", "lan", v.lan.name)
				end(i)
			}
		}
		if err := s.applyRules(rules(cfg, now)); err != nil {
			return err
		}
		for i, l := range now.lans {
			if serves[i] == nil {
				serves[i] = s.serveLAN(ctx, l, indexOf(there, l.name))
				s.Log.Info("LAN is served", "lan", l.name, "address", l.Address)
			}
		}
		if now.out != out {
			out = now.out
			if out != "" && !first {
				s.agent.LinkUp() // the back-off that an outage has built up counts no longer
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(portsEvery):
		}
	}
}

// list gives the LANs in the order of the configuration.
func (p ports) list() []lan {
	var out []lan
	for _, i := range slices.Sorted(maps.Keys(p.lans)) {
		out = append(out, p.lans[i])
	}
	return out
}

func indexOf(there []port, name string) int {
	for _, p := range there {
		if p.Name == name {
			return p.Index
		}
	}
	return 0
}

// applyRules puts the firewall's rules in force where they changed.
func (s *site) applyRules(r firewall.Rules) error {
	text := fmt.Sprint(r)
	if s.rules == text {
		return nil
	}
	if err := firewall.Apply(r); err != nil {
		return fmt.Errorf("close the uplink: %w", err)
	}
	s.rules = text
	return nil
}

// serveLAN runs what one LAN is served with until ctx ends or stop is called.
func (s *site) serveLAN(ctx context.Context, l lan, index int) *serving {
	services := map[string]func(context.Context) error{"passthrough " + l.name: s.passthrough(l)}
	if s.media != nil {
		services["media "+l.name] = s.serveMedia(l)
	}
	if l.Mode() != config.DHCPOff {
		services["netboot "+l.name] = s.netboot(l)
	}
	ctx, stop := context.WithCancel(ctx)
	v := &serving{lan: l, index: index, stop: stop, done: make(chan struct{})}
	go func() {
		defer close(v.done)
		_ = supervise(ctx, s.Log, services) // it returns when ctx has ended
	}()
	return v
}
