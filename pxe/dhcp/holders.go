package dhcp

import (
	"bufio"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
)

// maxHolders bounds what a proxy remembers of other servers' leases.
const maxHolders = 4096

// holders remember which machine was heard to have which address, where
// another server gives the addresses.
type holders struct {
	mu   sync.Mutex
	byIP map[netip.Addr]string
}

func (s *Server) heard(ip netip.Addr, mac string) {
	if !s.cfg.Local.Network.Contains(ip) {
		return
	}
	h := &s.holders
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.byIP == nil || len(h.byIP) >= maxHolders {
		h.byIP = make(map[netip.Addr]string) // the kernel's neighbours are asked first
	}
	h.byIP[ip] = mac
}

// Holder is the MAC that has an address: by the leases, or, in mode Proxy, by
// the kernel's neighbours and then by what was heard.
func (s *Server) Holder(ip netip.Addr) (mac string, ok bool) {
	if s.cfg.Mode != Proxy {
		return s.cfg.Leases.Holder(ip)
	}
	if !s.cfg.Local.Network.Contains(ip) {
		return "", false
	}
	if mac, ok := neighbour("/proc/thread-self/net/arp", s.cfg.Interface, ip); ok {
		return mac, true
	}
	s.holders.mu.Lock()
	defer s.holders.mu.Unlock()
	mac, ok = s.holders.byIP[ip]
	return mac, ok
}

// neighbour reads the kernel's table of what answered an ARP request.
func neighbour(path, iface string, ip netip.Addr) (mac string, ok bool) {
	f, err := os.Open(path)
	if err != nil {
		return "", false
	}
	defer f.Close()
	const complete = 2
	for in := bufio.NewScanner(f); in.Scan(); {
		w := strings.Fields(in.Text()) // address, type, flags, MAC, mask, device
		if len(w) != 6 || w[0] != ip.String() || w[5] != iface {
			continue
		}
		flags, err := strconv.ParseUint(w[2], 0, 16)
		return strings.ToLower(w[3]), err == nil && flags&complete != 0
	}
	return "", false
}
