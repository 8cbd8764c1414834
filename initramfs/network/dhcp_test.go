package network

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/backoff"
)

// server answers in a network namespace of its own and counts what it hears.
type server struct {
	mu       sync.Mutex
	requests []string // "new", "renew" (unicast), "rebind" (broadcast with an address)
	down     bool     // silent altogether
	silent   bool     // to renewals by unicast
	nak      bool
	long     bool // a lease that is not to be renewed within the test
}

func (s *server) set(f func()) { s.mu.Lock(); defer s.mu.Unlock(); f() }
func (s *server) count(kind string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, r := range s.requests {
		if r == kind {
			n++
		}
	}
	return n
}

var (
	serverIP = net.IPv4(10, 9, 0, 1)
	leased   = net.IPv4(10, 9, 0, 5)
)

// answer decides on one message; nil is silence.
func (s *server) answer(m *dhcpv4.DHCPv4, unicast bool) *dhcpv4.DHCPv4 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.down {
		s.requests = append(s.requests, "unheard")
		return nil
	}
	typ := dhcpv4.MessageTypeOffer
	if m.MessageType() == dhcpv4.MessageTypeRequest {
		kind := "new"
		if !m.ClientIPAddr.IsUnspecified() {
			if kind = "rebind"; unicast {
				kind = "renew"
			}
		}
		s.requests = append(s.requests, kind)
		typ = dhcpv4.MessageTypeAck
		switch {
		case s.nak:
			typ = dhcpv4.MessageTypeNak
		case s.silent && kind == "renew":
			return nil
		}
	}
	life, t1, t2 := uint32(30), time.Second, 3*time.Second
	if s.long {
		life, t1, t2 = 3600, 1800*time.Second, 3000*time.Second
	}
	r, err := dhcpv4.NewReplyFromRequest(m, dhcpv4.WithMessageType(typ), dhcpv4.WithYourIP(leased), dhcpv4.WithNetmask(net.CIDRMask(24, 32)),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(serverIP)), dhcpv4.WithLeaseTime(life),
		dhcpv4.WithOption(dhcpv4.Option{Code: dhcpv4.OptionRenewTimeValue, Value: dhcpv4.Duration(t1)}),
		dhcpv4.WithOption(dhcpv4.Option{Code: dhcpv4.OptionRebindingTimeValue, Value: dhcpv4.Duration(t2)}))
	if err != nil {
		return nil
	}
	return r
}

// run serves until ctx is done. ready gets the namespace, arrived says that the cable's end is in it.
func (s *server) run(ctx context.Context, ready chan<- int, arrived <-chan struct{}) error {
	runtime.LockOSThread() // never unlocked: the namespace ends with the thread
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		close(ready)
		return err
	}
	fd, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		close(ready)
		return err
	}
	defer unix.Close(fd)
	ready <- fd
	<-arrived
	if err := (Kernel{}).Up("v1"); err != nil {
		return err
	}
	if err := (Kernel{}).Set("v1", netip.MustParsePrefix("10.9.0.1/24"), netip.Addr{}, 0); err != nil {
		return err
	}
	var lc net.ListenConfig
	lc.Control = func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) {
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_BROADCAST, 1)
			unix.SetsockoptString(int(fd), unix.SOL_SOCKET, unix.SO_BINDTODEVICE, "v1")
		})
	}
	conn, err := lc.ListenPacket(ctx, "udp4", "0.0.0.0:67")
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	buf := make([]byte, 2048)
	for {
		n, from, err := conn.ReadFrom(buf)
		if err != nil {
			return nil
		}
		m, err := dhcpv4.FromBytes(buf[:n])
		if err != nil {
			continue
		}
		// Raw broadcasts carry no source address.
		unicast := !from.(*net.UDPAddr).IP.IsUnspecified()
		r := s.answer(m, unicast)
		if r == nil {
			continue
		}
		to := &net.UDPAddr{IP: net.IPv4bcast, Port: 68}
		if unicast {
			to = from.(*net.UDPAddr)
		}
		conn.WriteTo(r.ToBytes(), to)
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for range 400 {
		if ok() {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Errorf("%s did not come about", what)
}

// TestDHCP goes through a lease's life on a real wire: first there is no cable,
// then no server, then a lease that is renewed, rebound, lost and got anew.
func TestDHCP(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root for network namespaces")
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	s := &server{down: true}
	ready, arrived := make(chan int), make(chan struct{})
	wg.Go(func() {
		if err := s.run(ctx, ready, arrived); err != nil {
			t.Errorf("server: %v", err)
		}
	})
	peer, ok := <-ready
	if !ok {
		return
	}
	var mu sync.Mutex
	var leases []Lease
	var said []string
	losses, cable := 0, false
	heard := func(part string) func() bool {
		return func() bool {
			mu.Lock()
			defer mu.Unlock()
			return slices.ContainsFunc(said, func(line string) bool { return strings.Contains(line, part) })
		}
	}
	wg.Go(func() {
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			t.Error(err)
			return
		}
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "v0"}, PeerName: "v1", PeerNamespace: netlink.NsFd(peer)}); err != nil {
			t.Errorf("make cable: %v", err)
			return
		}
		close(arrived)
		if err := (Kernel{}).Up("v0"); err != nil {
			t.Error(err)
			return
		}
		d := DHCP{
			Say: func(format string, args ...any) {
				mu.Lock()
				defer mu.Unlock()
				said = append(said, fmt.Sprintf(format, args...))
			},
			Carrier: func(string) bool { mu.Lock(); defer mu.Unlock(); return cable },
			Retry:   backoff.Policy{Min: 200 * time.Millisecond, Max: time.Second},
		}
		d.Hold(ctx, "v0", func(l Lease) error {
			mu.Lock()
			defer mu.Unlock()
			leases = append(leases, l)
			return Kernel{}.Set("v0", l.Address, l.Gateway, 0)
		}, func() {
			mu.Lock()
			defer mu.Unlock()
			losses++
			if err := (Kernel{}).Clear("v0"); err != nil {
				t.Error(err)
			}
		})
	})
	eventually(t, "word of the missing cable", heard("v0: no link"))
	mu.Lock()
	cable = true
	mu.Unlock()
	eventually(t, "word of the missing server", heard("v0: no DHCP answer"))
	eventually(t, "another try", func() bool { return s.count("unheard") >= 3 })
	s.set(func() { s.down = false })
	eventually(t, "a lease", func() bool { mu.Lock(); defer mu.Unlock(); return len(leases) > 0 })
	mu.Lock()
	if l := leases[0]; l.Address.String() != "10.9.0.5/24" || l.T1 != time.Second {
		t.Errorf("lease = %+v", l)
	}
	mu.Unlock()
	eventually(t, "two renewals by unicast", func() bool { return s.count("renew") >= 2 })
	s.set(func() { s.silent = true })
	eventually(t, "a rebinding when the server is silent", func() bool { return s.count("rebind") >= 1 })
	s.set(func() { s.nak = true })
	eventually(t, "the loss of the lease", func() bool { mu.Lock(); defer mu.Unlock(); return losses >= 1 })
	before := s.count("new")
	s.set(func() { s.nak, s.silent = false, false })
	eventually(t, "a new lease", func() bool { return s.count("new") > before })

	s.set(func() { s.long = true })
	eventually(t, "a long lease", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return leases[len(leases)-1].T1 > time.Minute
	})
	mu.Lock()
	cable = false
	mu.Unlock()
	time.Sleep(time.Second)
	mu.Lock()
	had := len(leases)
	cable = true
	mu.Unlock()
	asked := s.count("rebind")
	eventually(t, "the address again after the link was gone, and a word with a server", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(leases) > had && s.count("rebind") > asked
	})
}
