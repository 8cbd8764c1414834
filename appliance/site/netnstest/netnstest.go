// Package netnstest makes network namespaces and the wires between them, for
// tests that need a neighbour.
package netnstest

import (
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Namespace is a network namespace that ends with its test.
type Namespace struct {
	t  testing.TB
	fd int
}

// New makes a namespace with its loopback up. Without root the test is skipped.
func New(t testing.TB) *Namespace {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: network namespaces")
	}
	n := &Namespace{t: t, fd: -1}
	onThread(func() {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			t.Errorf("make a network namespace: %v", err)
			return
		}
		fd, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Errorf("open the network namespace: %v", err)
			return
		}
		n.fd = fd
	})
	if n.fd < 0 {
		t.FailNow()
	}
	t.Cleanup(func() { _ = unix.Close(n.fd) })
	n.Do(func() { n.up("lo") })
	return n
}

// onThread runs f on a thread of its own, which ends with it, so that no other
// goroutine ever finds itself in the thread's namespace.
func onThread(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked
		f()
	}()
	<-done
}

// Do runs f inside the namespace. Sockets that f opens stay in it; goroutines
// that f starts are outside.
func (n *Namespace) Do(f func()) {
	n.t.Helper()
	onThread(func() {
		if err := unix.Setns(n.fd, unix.CLONE_NEWNET); err != nil {
			n.t.Errorf("enter the network namespace: %v", err)
			return
		}
		f()
	})
}

// Wire joins interface a of n to interface b of other, with an address each.
func (n *Namespace) Wire(a string, addrA netip.Prefix, other *Namespace, b string, addrB netip.Prefix) {
	n.t.Helper()
	n.Do(func() {
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: a}, PeerName: b, PeerNamespace: netlink.NsFd(other.fd)}
		if err := netlink.LinkAdd(veth); err != nil {
			n.t.Errorf("make wire %s-%s: %v", a, b, err)
		}
	})
	n.Do(func() { n.address(a, addrA) })
	other.Do(func() { other.address(b, addrB) })
	if n.t.Failed() {
		n.t.FailNow()
	}
}

func (n *Namespace) address(name string, addr netip.Prefix) {
	link, err := netlink.LinkByName(name)
	if err == nil {
		var parsed *netlink.Addr
		if parsed, err = netlink.ParseAddr(addr.String()); err == nil {
			err = netlink.AddrAdd(link, parsed)
		}
	}
	if err != nil {
		n.t.Errorf("give %s address %s: %v", name, addr, err)
		return
	}
	n.up(name)
}

func (n *Namespace) up(name string) {
	link, err := netlink.LinkByName(name)
	if err == nil {
		err = netlink.LinkSetUp(link)
	}
	if err != nil {
		n.t.Errorf("bring %s up: %v", name, err)
	}
}

// Route sends what goes to dst through the gateway.
func (n *Namespace) Route(dst netip.Prefix, gateway netip.Addr) {
	n.t.Helper()
	n.Do(func() {
		parsed, err := netlink.ParseIPNet(dst.String())
		if err == nil {
			err = netlink.RouteAdd(&netlink.Route{Dst: parsed, Gw: gateway.AsSlice()})
		}
		if err != nil {
			n.t.Errorf("route %s through %s: %v", dst, gateway, err)
		}
	})
}

// Sysctl writes a value under /proc/sys of the namespace.
func (n *Namespace) Sysctl(path, value string) {
	n.t.Helper()
	n.Do(func() {
		if err := os.WriteFile("/proc/sys/"+path, []byte(value+"\n"), 0o644); err != nil {
			n.t.Errorf("set %s: %v", path, err)
		}
	})
}

// ReadSysctl reads a value under /proc/sys of the namespace.
func (n *Namespace) ReadSysctl(path string) (value string) {
	n.t.Helper()
	n.Do(func() {
		data, err := os.ReadFile("/proc/sys/" + path)
		if err != nil {
			n.t.Errorf("read %s: %v", path, err)
		}
		_, _ = fmt.Sscan(string(data), &value)
	})
	return value
}
