package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/site/config"
)

// State is what the rest of the box may read about its networks, as JSON.
type State struct {
	// Uplink is the interface that has the way out; empty while there is none.
	Uplink string `json:"uplink"`
	// Interfaces maps a name to its address with prefix length.
	Interfaces map[string]string `json:"interfaces"`
	// Missing names what the configuration wants and is not there, a line each.
	Missing []string `json:"missing,omitempty"`
}

// Client holds one interface's lease for as long as ctx lasts.
type Client interface {
	// Hold calls got for every lease that it gets or renews, and lost when one
	// ended. It returns only when ctx is done.
	Hold(ctx context.Context, iface string, got func(Lease) error, lost func())
}

// Manager runs the interfaces.
type Manager struct {
	Links  Links
	Client Client
	// Wired lists the interfaces that are there now.
	Wired func() ([]Interface, error)
	// Say reports, one line each.
	Say func(format string, args ...any)
	// Resolv and StateFile are written when what they say changes.
	Resolv, StateFile string
	// Poll is how often missing interfaces are looked for.
	Poll time.Duration

	mu    sync.Mutex
	state State
}

// Start prepares Ready.
func (m *Manager) Start() {
	m.state = State{Interfaces: map[string]string{}}
}

// Snapshot is the present state.
func (m *Manager) Snapshot() State {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := State{Uplink: m.state.Uplink, Interfaces: map[string]string{}}
	for k, v := range m.state.Interfaces {
		s.Interfaces[k] = v
	}
	return s
}

// update changes the state and writes it down.
func (m *Manager) update(change func(*State), dns []netip.Addr) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change(&m.state)
	data, err := json.Marshal(m.state)
	if err == nil {
		err = atomicfile.Write(m.StateFile, append(data, '\n'), 0o644)
	}
	if err == nil && dns != nil {
		err = atomicfile.Write(m.Resolv, ResolvConf(dns), 0o644)
	}
	if err != nil {
		m.Say("%v", err)
	}
}

// RunSite keeps a box's networks until ctx is done: LANs with their fixed
// addresses, and the uplink.
func (m *Manager) RunSite(ctx context.Context, site *config.Site) {
	var wg sync.WaitGroup
	defer wg.Wait()
	lans := map[string]bool{}
	uplink := &race{}
	told := ""
	for {
		ifaces, err := m.Wired()
		if err != nil {
			m.Say("%v", err)
		}
		plan := Decide(site, ifaces)
		if missing := strings.Join(plan.Missing, "; "); missing != told {
			told = missing
			for _, line := range plan.Missing {
				m.Say("%s", line)
			}
			m.update(func(s *State) { s.Missing = plan.Missing }, nil)
		}
		for _, l := range plan.LANs {
			if !lans[l.Interface] {
				lans[l.Interface] = true
				wg.Go(func() { m.hold(ctx, l, false) })
			}
		}
		if s := plan.UplinkStatic; s != nil && uplink.join(s.Interface) {
			wg.Go(func() { m.hold(ctx, *s, true) })
		}
		for _, name := range plan.Uplink {
			if uplink.join(name) {
				wg.Go(func() { m.lease(ctx, name, 0, uplink, site.LAN) })
			}
		}
		if !sleep(ctx, m.Poll) {
			return
		}
	}
}

// RunAll asks for a lease on every wired interface until ctx is done.
func (m *Manager) RunAll(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	all := &race{open: true}
	for {
		ifaces, err := m.Wired()
		if err != nil {
			m.Say("%v", err)
		}
		for i, iface := range ifaces {
			if all.join(iface.Name) {
				wg.Go(func() { m.lease(ctx, iface.Name, 100+i, all, nil) })
			}
		}
		if !sleep(ctx, m.Poll) {
			return
		}
	}
}

// race lets several interfaces ask and, unless it is open, one win.
type race struct {
	open bool

	mu     sync.Mutex
	in     map[string]bool
	winner string
	stop   map[string]func()
}

// join reports whether name is to start now.
func (r *race) join(name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.in[name] || r.winner != "" && !r.open {
		return false
	}
	if r.in == nil {
		r.in, r.stop = map[string]bool{}, map[string]func(){}
	}
	r.in[name] = true
	return true
}

// leave undoes join: name may start again.
func (r *race) leave(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.in, name)
	delete(r.stop, name)
}

// win reports whether name may keep its lease; it ends the others' asking.
func (r *race) win(name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.open {
		return true
	}
	if r.winner == "" {
		r.winner = name
		for other, stop := range r.stop {
			if other != name {
				stop()
			}
		}
	}
	return r.winner == name
}

// lose opens the race anew: the way out may be another interface's by now.
func (r *race) lose(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.winner == name {
		r.winner = ""
	}
}

// onLoss has stop called when another than name wins.
func (r *race) onLoss(name string, stop func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.winner != "" && r.winner != name && !r.open {
		stop()
		return
	}
	r.stop[name] = stop
}

// upEvery is how often an interface is made sure of.
const upEvery = 5 * time.Second

// apart refuses a lease that would draw what is meant for a LAN, such as the
// words to its BMCs, to the interface that asks: whoever answers there chooses it.
func apart(lease netip.Prefix, lans []config.LAN) error {
	for _, l := range lans {
		if lan := l.Address.Masked(); lan.Contains(lease.Addr()) || lease.Bits() >= lan.Bits() && lan.Overlaps(lease) {
			return fmt.Errorf("the lease of %s is refused: it is in the lan %s", lease, lan)
		}
	}
	return nil
}

// lease keeps one interface's lease, which must be apart from lans.
func (m *Manager) lease(ctx context.Context, name string, metric int, r *race, lans []config.LAN) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer r.leave(name)
	r.onLoss(name, cancel)
	m.up(ctx, name)
	// A card that went and came back under its name is down, and without a link.
	var kept sync.WaitGroup
	defer kept.Wait()
	defer cancel()
	kept.Go(func() {
		for sleep(ctx, upEvery) {
			_ = m.Links.Up(name) // it may be away just now
		}
	})
	last := ""
	m.Client.Hold(ctx, name, func(l Lease) error {
		if err := apart(l.Address, lans); err != nil {
			return err
		}
		if !r.win(name) {
			return errors.New("another interface is the uplink")
		}
		if err := m.Links.Set(name, l.Address, l.Gateway, metric); err != nil {
			m.Say("%s: %v", name, err)
			r.lose(name)
			return err
		}
		m.update(func(s *State) {
			s.Interfaces[name] = l.Address.String()
			if s.Uplink == "" {
				s.Uplink = name
			}
		}, l.DNS)
		if text := fmt.Sprintf("%s via %s", l.Address, l.Gateway); text != last {
			last = text
			m.Say("%s has %s by DHCP", name, text)
		}
		return nil
	}, func() {
		last = ""
		if err := m.Links.Clear(name); err != nil {
			m.Say("%s: %v", name, err)
		}
		m.update(func(s *State) {
			delete(s.Interfaces, name)
			if s.Uplink == name {
				s.Uplink = ""
			}
		}, nil)
		m.Say("%s lost its lease", name)
		r.lose(name)
	})
}

// hold gives an interface its fixed address and gives it again should it go.
func (m *Manager) hold(ctx context.Context, s Static, uplink bool) {
	if s.VLAN != 0 {
		m.up(ctx, s.Port)
	} else {
		m.up(ctx, s.Interface)
	}
	told, told6 := "", ""
	for ctx.Err() == nil {
		err := m.set(s)
		text := fmt.Sprintf("%s has %s", s.Interface, s.Address)
		if err != nil {
			text = fmt.Sprintf("%s: %v", s.Interface, err)
		}
		if text != told {
			told = text
			m.Say("%s", text)
			if err == nil {
				var dns []netip.Addr
				if uplink {
					dns = append([]netip.Addr{}, s.DNS...)
				}
				m.update(func(st *State) {
					st.Interfaces[s.Interface] = s.Address.String()
					if uplink {
						st.Uplink = s.Interface
					}
				}, dns)
			}
		}
		if s.IPv6.IsValid() {
			text := fmt.Sprintf("%s has %s", s.Interface, s.IPv6)
			if err := m.Links.Add6(s.Interface, s.IPv6); err != nil {
				text = fmt.Sprintf("%s: %v", s.Interface, err) // IPv4 is there without it
			}
			if text != told6 {
				told6 = text
				m.Say("%s", text)
			}
		}
		if !sleep(ctx, upEvery) {
			return
		}
	}
}

// set gives an interface what it is to have; it may have been away.
func (m *Manager) set(s Static) error {
	if s.VLAN != 0 {
		if err := m.Links.Up(s.Port); err != nil {
			return err
		}
		if err := m.Links.VLAN(s.Port, s.Interface, s.VLAN); err != nil {
			return err
		}
	}
	if err := m.Links.Up(s.Interface); err != nil {
		return err
	}
	if err := m.Links.Set(s.Interface, s.Address, s.Gateway, 0); err != nil {
		return err
	}
	for _, r := range s.Routes {
		if err := m.Links.Route(s.Interface, r); err != nil {
			return err
		}
	}
	return nil
}

// up repeats until the interface is up.
func (m *Manager) up(ctx context.Context, name string) {
	wait := backoff.Policy{Min: time.Second, Max: time.Minute}
	for n := 0; ; n++ {
		err := m.Links.Up(name)
		if err == nil {
			return
		}
		m.Say("%v", err)
		if wait.Wait(ctx, n, nil) != nil {
			return
		}
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// Carrier reports whether a cable is in. sys is /sys/class/net.
func Carrier(sys, name string) bool {
	data, err := os.ReadFile(filepath.Join(sys, name, "carrier"))
	return err == nil && strings.TrimSpace(string(data)) == "1"
}
