package pxetest

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

// Switch makes the interface near in the process's namespace, with address, and a
// host for each MAC on the same wire: they hear each other.
func Switch(t testing.TB, near string, address netip.Prefix, macs ...string) (hosts []*Host) {
	t.Helper()
	Bridge(t, near, address)
	bridge, err := netlink.LinkByName(near)
	check(t, err)
	for i, mac := range macs {
		port, own := fmt.Sprintf("port%d", i), netip.PrefixFrom(netip.AddrFrom4([4]byte{169, 254, byte(i), 1}), 30)
		hosts = append(hosts, Join(t, port, own, fmt.Sprintf("m%d", i), mac))
		link, err := netlink.LinkByName(port)
		check(t, err)
		check(t, netlink.AddrDel(link, &netlink.Addr{IPNet: ipNet(own)}))
		check(t, netlink.LinkSetMaster(link, bridge))
	}
	return hosts
}

// Join makes a second interface of the host, near, and one more host at the other end
// of its wire; the host passes on what is for neither.
func (h *Host) Join(near string, address netip.Prefix, far, mac string) (other *Host) {
	h.t.Helper()
	h.Do(func() error {
		other = Join(h.t, near, address, far, mac)
		return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644)
	})
	return other
}

// Leasing runs dnsmasq on the host, which gives addresses and nothing to boot, and
// returns what ends it. It is there when it says so.
func (h *Host) Leasing(args ...string) (stop func()) {
	h.t.Helper()
	path, err := exec.LookPath("dnsmasq")
	if err != nil {
		h.t.Skip("needs dnsmasq")
	}
	dir := h.t.TempDir()
	said := filepath.Join(dir, "said")
	out, err := os.Create(said)
	if err != nil {
		h.t.Fatal(err)
	}
	defer out.Close()
	cmd := exec.Command(path, append([]string{"--no-daemon", "--conf-file=/dev/null", "--port=0", "--interface=" + h.Iface, "--bind-interfaces",
		"--no-ping", "--user=root", "--dhcp-leasefile=" + filepath.Join(dir, "leases"), "--pid-file=" + filepath.Join(dir, "pid")}, args...)...)
	cmd.Stdout, cmd.Stderr = out, out
	h.Do(cmd.Start)
	stop = sync.OnceFunc(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	h.t.Cleanup(stop)
	for range 400 {
		if text, _ := os.ReadFile(said); strings.Contains(string(text), "DHCP, IP range") {
			return stop
		}
		time.Sleep(50 * time.Millisecond)
	}
	text, _ := os.ReadFile(said)
	h.t.Fatalf("dnsmasq does not start: %s", text)
	return stop
}
