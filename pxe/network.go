package pxe

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/better-compute/site-appliance/pxe/arp"
	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/dhcp"
	"github.com/better-compute/site-appliance/pxe/lease"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// Relayed is a subnet behind a DHCP relay, with its range, which may be empty.
type Relayed struct {
	dhcp.Subnet
	RangeStart, RangeEnd netip.Addr
}

// localPool is the name of the interface's own pool in the leases.
const localPool = "lan"

// local is the interface's own network.
func (c *Config) local() dhcp.Subnet {
	n := c.Told
	n.Pool, n.Network, n.Server = localPool, c.Address.Masked(), c.Address.Addr()
	return n
}

// relayed names the pools of the subnets behind relays. A changed order only
// changes which name a lease is found under.
func (c *Config) relayed() []dhcp.Subnet {
	var out []dhcp.Subnet
	for _, r := range c.Relayed {
		n := r.Subnet
		n.Pool = n.Network.String()
		out = append(out, n)
	}
	return out
}

// openLeases opens what the mode gives out; nil where that is nothing.
func (c *Config) openLeases() (*lease.Database, error) {
	if c.Mode == dhcp.Proxy {
		return nil, nil
	}
	var pools []lease.Pool
	if c.Mode != dhcp.Relay {
		pools = append(pools, lease.Pool{Name: localPool, Subnet: c.Address.Masked(), First: c.RangeStart, Last: c.RangeEnd, Exclude: excluded(c.Address)})
	}
	for i, n := range c.relayed() {
		edges := excluded(netip.PrefixFrom(n.Network.Addr(), n.Network.Bits()))
		for _, router := range []netip.Addr{n.Giaddr, n.Router} {
			if router.IsValid() && n.Network.Contains(router) {
				edges = append(edges, router)
			}
		}
		pools = append(pools, lease.Pool{Name: n.Pool, Subnet: n.Network, First: c.Relayed[i].RangeStart, Last: c.Relayed[i].RangeEnd, Exclude: edges})
	}
	if c.Told.Router.IsValid() && len(pools) > 0 && pools[0].Name == localPool {
		pools[0].Exclude = append(pools[0].Exclude, c.Told.Router)
	}
	known := c.known
	if c.BMC {
		known = nil // BMCs are no machines that boot: to what is kept for those they are strangers
	}
	return lease.OpenDatabase(lease.Config{
		Path: filepath.Join(c.StateDir, "leases-"+c.Interface), Pools: pools, Reservations: c.Reservations,
		Known: known, Log: c.Log,
	})
}

// known are the machines that somebody vouches for.
func (c *Config) known(mac string) bool {
	if _, ok := c.reserved[mac]; ok {
		return true
	}
	_, ok := c.Assign.ByMAC(mac)
	return ok
}

// reservations are those of the configuration and, beside them, those of the
// assigned machines. What the configuration says of a MAC or an address holds.
func reservations(own []lease.Reservation, machines []*pxev1.Machine, pools []netip.Prefix, exclude map[netip.Addr]bool) ([]lease.Reservation, []error) {
	all := append([]lease.Reservation{}, own...)
	taken := map[netip.Addr]string{}
	has := map[string]bool{}
	pool := func(ip netip.Addr) int {
		for i, p := range pools {
			if p.Contains(ip) {
				return i
			}
		}
		return -1
	}
	for _, r := range own {
		taken[r.Address] = r.MAC
		has[fmt.Sprintf("%s %d", r.MAC, pool(r.Address))] = true
	}
	var wrong []error
	for _, m := range machines {
		ip, err := netip.ParseAddr(m.Address)
		if err != nil || pool(ip) < 0 {
			continue // none, or one of another LAN
		}
		if len(m.Macs) == 0 {
			continue
		}
		// An address is one port's: the first is the one that boots.
		mac := strings.ToLower(m.Macs[0])
		switch key := fmt.Sprintf("%s %d", mac, pool(ip)); {
		case has[key]:
		case exclude[ip]:
			wrong = append(wrong, fmt.Errorf("%s of machine %s is the box's or a router's", ip, m.Name))
		case taken[ip] != "":
			wrong = append(wrong, fmt.Errorf("%s of machine %s is reserved for %s already", ip, m.Name, taken[ip]))
		default:
			taken[ip], has[key] = mac, true
			all = append(all, lease.Reservation{MAC: mac, Address: ip})
		}
	}
	return all, wrong
}

// followEvery is how often a new snapshot of assignments is looked for.
const followEvery = time.Second

// follow takes up the addresses that assignments reserve.
func (s *server) follow(ctx context.Context) error {
	version := uint64(0)
	for first := true; ; first = false {
		if v := s.Assign.Version(); v != version || first {
			version = v
			if v != s.taken {
				s.takeUp()
			}
			s.forget()
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(followEvery):
		}
	}
}

// forget drops the counts of machines that are not there any more. While there is no
// snapshot, the last was lost or none came yet: the next one may name the same windows.
func (s *server) forget() {
	if s.Assign.Version() == 0 {
		return
	}
	s.Counts.Settle(s.Assign.Window)
	ids := map[string]bool{}
	for _, m := range s.Assign.Machines() {
		ids[m.MachineId] = true
	}
	strangers := s.Assign.Unknown().GetInspect()
	s.Counts.Keep(func(machine string) bool { return ids[machine] || strangers && decide.IsStranger(machine) })
}

func (s *server) takeUp() {
	s.taken = s.Assign.Version()
	if s.leases == nil {
		return
	}
	var pools []netip.Prefix
	exclude := map[netip.Addr]bool{}
	if s.Mode != dhcp.Relay {
		pools = append(pools, s.Address.Masked())
	}
	for _, a := range append(excluded(s.Address), s.Told.Router) {
		exclude[a] = true
	}
	for _, n := range s.relayed() {
		pools = append(pools, n.Network)
		for _, a := range append(excluded(n.Network), n.Giaddr, n.Router) {
			exclude[a] = true
		}
	}
	all, wrong := reservations(s.Reservations, s.Assign.Machines(), pools, exclude)
	for _, err := range wrong {
		s.Log.Warn("an assigned address is left out", "err", err)
	}
	if err := s.leases.SetReservations(all); err != nil {
		s.Log.Error("the reservations of the assignments are not in force", "err", err)
	}
}

var label = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?$`)

// hostName is the machine's name where it can be a host's.
func (s *server) hostName(mac string) string {
	m, ok := s.Assign.ByMAC(mac)
	if !ok || !label.MatchString(m.Name) {
		return ""
	}
	return m.Name
}

// BMC is what bmc.discovered says: something that got an address on a BMC network.
type BMC struct {
	MAC       string `json:"mac"`
	Interface string `json:"interface"`
	IP        string `json:"ip"`
	Class     string `json:"class,omitempty"`
	Hostname  string `json:"hostname,omitempty"`
}

// ForeignServer is what pxe.foreign says: a DHCP server beside the box.
type ForeignServer struct {
	Interface string `json:"interface"`
	Server    string `json:"server"`
	// ServerMAC is where it answered from, and MAC whom.
	ServerMAC string `json:"server_mac,omitempty"`
	MAC       string `json:"mac,omitempty"`
	Offered   string `json:"offered,omitempty"`
}

func (s *server) foreign(f dhcp.Foreign) {
	body := ForeignServer{Interface: s.Interface, Server: f.Server.String(), ServerMAC: f.ServerMAC, MAC: f.MAC}
	if f.Offered.IsValid() {
		body.Offered = f.Offered.String()
	}
	s.events.put("pxe.foreign", "state", s.Interface+" "+body.Server, body)
}

// Conflict is what pxe.conflict says: an address of the pool that somebody uses
// who has no lease of it.
type Conflict struct {
	Interface string `json:"interface"`
	IP        string `json:"ip"`
	// MAC is who answered for it; empty where a machine declined it.
	MAC string `json:"mac,omitempty"`
	// DeclinedBy is the machine that found it in use.
	DeclinedBy string `json:"declined_by,omitempty"`
	// Outcome is "withheld", "kept" or, for one that answers for too much,
	// "disbelieved".
	Outcome string `json:"outcome"`
}

func (s *server) conflict(f arp.Finding) {
	c := Conflict{Interface: s.Interface, IP: f.Address.String(), MAC: f.MAC, Outcome: "withheld"}
	switch {
	case f.Disbelieved:
		c.Outcome = "disbelieved"
	case f.Kept != nil:
		c.Outcome = "kept"
	}
	s.events.put("pxe.conflict", "state", s.Interface+" "+c.IP, c)
}

func (s *server) declined(mac string, ip netip.Addr, kept bool) {
	c := Conflict{Interface: s.Interface, IP: ip.String(), DeclinedBy: mac, Outcome: "withheld"}
	if kept {
		c.Outcome = "kept"
	}
	s.events.put("pxe.conflict", "state", s.Interface+" "+c.IP, c)
}

// maxBMCs bounds what is remembered of those that were told.
const maxBMCs = 4096

// seenBMC tells of a BMC when something about it is new; called from DHCP's one loop.
func (s *server) seenBMC(who dhcp.Who, ip netip.Addr) {
	b := BMC{MAC: who.MAC, Interface: s.Interface, IP: ip.String(), Class: who.Class, Hostname: who.Hostname}
	if s.bmcs[b.MAC] == b {
		return
	}
	if s.bmcs == nil || len(s.bmcs) >= maxBMCs {
		s.bmcs = make(map[string]BMC)
	}
	s.bmcs[b.MAC] = b
	s.events.put("bmc.discovered", "state", b.MAC, b)
}
