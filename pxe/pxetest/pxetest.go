// Package pxetest is the lab of network-boot tests: network namespaces that a test makes for itself, and what boots in them.
package pxetest

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// inside marks the process that runs one test in its own namespace.
const inside = "BC_PXETEST_NAMESPACE"

var skipped = regexp.MustCompile(`(?m)^ +\S+\.go:\d+: (needs .*)$`)

// InNamespace runs the calling test again in a process with a network
// namespace of its own, and is true there; where it is false, the test is over.
// The whole process is inside, so that servers may start goroutines as they like.
func InNamespace(t *testing.T) bool {
	t.Helper()
	if os.Getenv(inside) == t.Name() {
		lo, err := netlink.LinkByName("lo")
		if err == nil {
			err = netlink.LinkSetUp(lo)
		}
		if err != nil {
			t.Fatalf("loopback: %v", err)
		}
		return true
	}
	if os.Getuid() != 0 {
		t.Skip("needs root: network namespaces")
	}
	args := []string{"-test.run=^" + t.Name() + "$", "-test.v"}
	if deadline, ok := t.Deadline(); ok {
		args = append(args, "-test.timeout="+time.Until(deadline).String())
	}
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), inside+"="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	runtime.LockOSThread() // the death signal follows the thread
	defer runtime.UnlockOSThread()
	err := cmd.Run()
	switch {
	case err != nil:
		t.Errorf("in its namespace: %v\n%s", err, out.String())
	case strings.Contains(out.String(), "--- SKIP"):
		reason := "needs what its output names:\n" + out.String()
		if m := skipped.FindStringSubmatch(out.String()); m != nil {
			reason = m[1]
		}
		t.Skip(reason)
	default:
		t.Log(out.String())
	}
	return false
}

// Host is a network namespace apart from the process's own, with one interface.
type Host struct {
	t     testing.TB
	ns    int
	Iface string
}

// Join makes the interface near in the process's namespace, with address, and
// a host of its own at the other end of the wire, whose interface has mac.
func Join(t testing.TB, near string, address netip.Prefix, far, mac string) *Host {
	t.Helper()
	h := &Host{t: t, Iface: far}
	var err error
	onThread(func() {
		if err = unix.Unshare(unix.CLONE_NEWNET); err == nil {
			h.ns, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		}
	})
	if err != nil {
		t.Fatalf("make a namespace: %v", err)
	}
	t.Cleanup(func() { unix.Close(h.ns) })
	hw, err := net.ParseMAC(mac)
	if err != nil {
		t.Fatal(err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = near
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: far, PeerHardwareAddr: hw}
	check(t, netlink.LinkAdd(veth))
	check(t, netlink.AddrAdd(veth, &netlink.Addr{IPNet: ipNet(address)}))
	check(t, netlink.LinkSetUp(veth))
	peer, err := netlink.LinkByName(far)
	check(t, err)
	check(t, netlink.LinkSetNsFd(peer, h.ns))
	h.Do(func() error {
		link, err := netlink.LinkByName(far)
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(link)
	})
	return h
}

// Do runs f inside of the host. Sockets that f opens stay there.
func (h *Host) Do(f func() error) {
	h.t.Helper()
	if err := h.Try(f); err != nil {
		h.t.Fatalf("in %s's namespace: %v", h.Iface, err)
	}
}

// Try is Do for what may fail.
func (h *Host) Try(f func() error) error {
	var err error
	onThread(func() {
		if err = unix.Setns(h.ns, unix.CLONE_NEWNET); err == nil {
			err = f()
		}
	})
	return err
}

// SetMAC changes the host's MAC, as another machine on the same wire would have.
func (h *Host) SetMAC(mac string) {
	h.t.Helper()
	hw, err := net.ParseMAC(mac)
	check(h.t, err)
	h.Do(func() error {
		link, err := netlink.LinkByName(h.Iface)
		if err != nil {
			return err
		}
		return netlink.LinkSetHardwareAddr(link, hw)
	})
}

// SetAddress replaces the host's addresses, and optionally routes everything to via.
func (h *Host) SetAddress(address netip.Prefix, via netip.Addr) {
	h.t.Helper()
	h.Do(func() error {
		link, err := netlink.LinkByName(h.Iface)
		if err != nil {
			return err
		}
		old, err := netlink.AddrList(link, netlink.FAMILY_V4)
		if err != nil {
			return err
		}
		for _, a := range old {
			if err := netlink.AddrDel(link, &a); err != nil {
				return err
			}
		}
		if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: ipNet(address)}); err != nil || !via.IsValid() {
			return err
		}
		return netlink.RouteReplace(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: via.AsSlice()})
	})
}

// Bridge makes a bridge with address and taps for QEMU in the process's namespace.
func Bridge(t testing.TB, name string, address netip.Prefix, taps ...string) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	bridge := &netlink.Bridge{LinkAttrs: attrs}
	check(t, netlink.LinkAdd(bridge))
	check(t, netlink.AddrAdd(bridge, &netlink.Addr{IPNet: ipNet(address)}))
	check(t, netlink.LinkSetUp(bridge))
	for _, tap := range taps {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MasterIndex = tap, bridge.Index
		link := &netlink.Tuntap{LinkAttrs: attrs, Mode: netlink.TUNTAP_MODE_TAP, Flags: netlink.TUNTAP_NO_PI | netlink.TUNTAP_VNET_HDR}
		check(t, netlink.LinkAdd(link))
		for _, fd := range link.Fds {
			fd.Close()
		}
		made, err := netlink.LinkByName(tap)
		check(t, err)
		check(t, netlink.LinkSetMaster(made, bridge))
		check(t, netlink.LinkSetUp(made))
	}
}

// onThread runs f on a thread that ends with it, so that its namespace touches nothing else.
func onThread(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread is not used again
		f()
	}()
	<-done
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(fmt.Errorf("network of the test: %w", err))
	}
}

// AddAddress gives an interface of the process's namespace one more address, which
// is there at once: nobody else can have it.
func AddAddress(t testing.TB, iface string, address netip.Prefix) {
	t.Helper()
	link, err := netlink.LinkByName(iface)
	check(t, err)
	check(t, netlink.AddrAdd(link, &netlink.Addr{IPNet: ipNet(address), Flags: unix.IFA_F_NODAD}))
}

// WaitLinkLocal waits until an interface of the process's namespace may use its
// link-local address: nobody else was found to have it.
func WaitLinkLocal(t testing.TB, iface string) {
	t.Helper()
	check(t, waitLinkLocal(iface))
}

// WaitLinkLocal is the same for the host's interface.
func (h *Host) WaitLinkLocal() {
	h.t.Helper()
	h.Do(func() error { return waitLinkLocal(h.Iface) })
}

func waitLinkLocal(iface string) error {
	link, err := netlink.LinkByName(iface)
	if err != nil {
		return err
	}
	for range 600 {
		addrs, err := netlink.AddrList(link, netlink.FAMILY_V6)
		if err != nil {
			return err
		}
		for _, a := range addrs {
			if a.IP.IsLinkLocalUnicast() && a.Flags&unix.IFA_F_TENTATIVE == 0 {
				return nil
			}
		}
		time.Sleep(50 * time.Millisecond)
	}
	return fmt.Errorf("%s gets no link-local address", iface)
}

// AddAddress gives the host one more address, which is there at once.
func (h *Host) AddAddress(address netip.Prefix) {
	h.t.Helper()
	h.Do(func() error {
		link, err := netlink.LinkByName(h.Iface)
		if err != nil {
			return err
		}
		err = netlink.AddrAdd(link, &netlink.Addr{IPNet: ipNet(address), Flags: unix.IFA_F_NODAD})
		if errors.Is(err, unix.EEXIST) {
			return nil
		}
		return err
	})
}

// DropAddress takes an address off the host.
func (h *Host) DropAddress(address netip.Prefix) {
	h.t.Helper()
	h.Do(func() error {
		link, err := netlink.LinkByName(h.Iface)
		if err != nil {
			return err
		}
		return netlink.AddrDel(link, &netlink.Addr{IPNet: ipNet(address)})
	})
}
