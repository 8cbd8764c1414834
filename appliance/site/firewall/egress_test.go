package firewall

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/site/netnstest"
)

const pluginUID, otherUID, agentUID = 61007, 61008, 0

// tryAs is try by a process of another uid: a socket belongs to the file system
// uid of the thread that opens it.
func tryAs(ns *netnstest.Namespace, uid int, network, address string) (answered bool) {
	ns.Do(func() {
		_, _, _ = unix.RawSyscall(unix.SYS_SETFSUID, uintptr(uid), 0, 0)
		defer unix.RawSyscall(unix.SYS_SETFSUID, 0, 0, 0)
		answered = tryHere(network, "", address)
	})
	return answered
}

type held struct {
	*site
	e *Egress
}

func newHeld(t *testing.T, resolvConf string) *held {
	s := newSite(t)
	path := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(path, []byte(resolvConf), 0o644); err != nil {
		t.Fatal(err)
	}
	names := func(_ context.Context, host string) ([]netip.Addr, error) {
		if host == "bmc.example" {
			return []netip.Addr{netip.MustParseAddr(machineAddr)}, nil
		}
		return nil, os.ErrNotExist
	}
	h := &held{site: s}
	s.box.Do(func() {
		var err error
		h.e, err = confine(&Egress{resolvConf: path, linger: 200 * time.Millisecond, resolve: names}, []UIDRange{{61000, 61183}, {999, 999}})
		if err != nil {
			t.Error(err)
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	t.Cleanup(func() {
		if err := h.e.Close(); err != nil {
			t.Errorf("Close() = %v", err)
		}
	})
	return h
}

func (h *held) check(when string, uid int, network, address string, want bool) {
	h.t.Helper()
	if got := tryAs(h.box, uid, network, address); got != want {
		h.t.Errorf("%s: uid %d to %s %s got an answer: %v, want %v", when, uid, network, address, got, want)
	}
}

// A plugin reaches what its running call names, and nothing before, after, or
// by another's call.
func TestEgress(t *testing.T) {
	h := newHeld(t, "nameserver "+neighbourAddr+"\n")
	h.echo(h.machine, "udp4", ":623")
	h.echo(h.machine, "tcp4", ":443")
	h.echo(h.machine, "udp4", ":53")
	h.echo(h.neighbour, "tcp4", ":443")
	h.echo(h.neighbour, "udp4", ":53")
	h.echo(h.box, "tcp4", "127.0.0.1:7443")
	bmc, web, gateway := machineAddr+":623", machineAddr+":443", neighbourAddr+":443"

	// The attempts can succeed: to the agent all is open.
	for _, a := range [][2]string{{"udp4", bmc}, {"tcp4", web}, {"tcp4", gateway}, {"udp4", machineAddr + ":53"}, {"tcp4", "127.0.0.1:7443"}} {
		h.check("the agent", agentUID, a[0], a[1], true)
		h.check("no call runs", pluginUID, a[0], a[1], false)
	}
	h.check("the resolver", pluginUID, "udp4", neighbourAddr+":53", true)
	h.check("a shared user", 999, "udp4", bmc, false)
	h.check("a uid that is no plugin's", 998, "udp4", bmc, true)

	h.box.Wire("lan6", netip.MustParsePrefix("fd00::1/64"), h.machine, "eth6", netip.MustParsePrefix("fd00::2/64"))
	const web6 = "[fd00::2]:7444"
	h.echo(h.machine, "tcp6", ":7444")
	// An IPv6 address takes a while until nobody else has it.
	for end := time.Now().Add(10 * time.Second); !tryAs(h.box, agentUID, "tcp6", web6) && time.Now().Before(end); {
	}
	h.check("IPv6, the agent", agentUID, "tcp6", web6, true)
	h.check("IPv6, no call runs", pluginUID, "tcp6", web6, false)
	release6, err := h.e.Allow(t.Context(), pluginUID, []string{web6})
	if err != nil {
		t.Fatal(err)
	}
	h.check("IPv6, its call runs", pluginUID, "tcp6", web6, true)
	release6()

	release, err := h.e.Allow(t.Context(), pluginUID, []string{bmc, "nowhere.example"})
	if err != nil {
		t.Fatal(err)
	}
	second, err := h.e.Allow(t.Context(), pluginUID, []string{"bmc.example:443"})
	if err != nil {
		t.Fatal(err)
	}
	h.check("its call runs", pluginUID, "udp4", bmc, true)
	h.check("its call runs", pluginUID, "tcp4", web, true)
	h.check("its call runs", pluginUID, "tcp4", gateway, false)
	h.check("another's call runs", otherUID, "udp4", bmc, false)

	// The site's own rules come and go beside them.
	h.apply(Rules{Uplink: "uplink", LANs: []LANRule{{Interface: "lan"}}})
	h.check("beside the site's rules", pluginUID, "udp4", bmc, true)
	h.check("beside the site's rules", otherUID, "udp4", bmc, false)

	release()
	release() // twice is once
	time.Sleep(2 * h.e.linger)
	h.check("one of two calls ended", pluginUID, "udp4", bmc, true)
	second()
	h.check("the calls just ended", pluginUID, "udp4", bmc, true)
	deadline := time.Now().Add(10 * time.Second)
	for tryAs(h.box, pluginUID, "udp4", bmc) && time.Now().Before(deadline) {
	}
	h.check("the calls ended", pluginUID, "udp4", bmc, false)
	h.check("the calls ended", agentUID, "udp4", bmc, true)

	if err := h.e.Close(); err != nil {
		t.Errorf("Close() = %v", err)
	}
	h.check("after Close", pluginUID, "udp4", bmc, true)
	if _, err := h.e.Allow(t.Context(), pluginUID, nil); err == nil {
		t.Error("Allow after Close = nil, want an error")
	}
}

// A call that names the box itself, or a name that resolves to it, opens nothing:
// only the resolver may be the box's.
func TestEgressKeepsTheBoxClosed(t *testing.T) {
	h := newHeld(t, "nameserver 127.0.0.1\n")
	resolve := h.e.resolve
	h.e.resolve = func(ctx context.Context, host string) ([]netip.Addr, error) {
		if host == "box.example" {
			return []netip.Addr{netip.MustParseAddr("127.0.0.2"), netip.MustParseAddr(boxUplink)}, nil
		}
		return resolve(ctx, host)
	}
	h.echo(h.box, "tcp4", ":7443")
	h.echo(h.box, "udp4", ":53")
	h.echo(h.box, "tcp6", "[::1]:7444")
	h.echo(h.machine, "tcp4", ":7443")
	release, err := h.e.Allow(t.Context(), pluginUID, []string{"127.0.0.1", "0.0.0.0", "[::1]:7444", "::ffff:127.0.0.1", boxLAN, "box.example", machineAddr})
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	for _, a := range [][2]string{{"tcp4", "127.0.0.1:7443"}, {"tcp4", "127.0.0.2:7443"}, {"tcp4", "0.0.0.0:7443"}, {"tcp4", boxLAN + ":7443"}, {"tcp4", boxUplink + ":7443"}, {"tcp6", "[::1]:7444"}} {
		h.check("the agent", agentUID, a[0], a[1], true)
		h.check("a call that names the box", pluginUID, a[0], a[1], false)
	}
	h.check("the same call's machine", pluginUID, "tcp4", machineAddr+":7443", true)
	h.check("the resolver", pluginUID, "udp4", "127.0.0.1:53", true)
}

func TestEgressTakesNewResolvers(t *testing.T) {
	h := newHeld(t, "")
	h.echo(h.neighbour, "udp4", ":53")
	h.check("no resolver", pluginUID, "udp4", neighbourAddr+":53", false)
	if err := os.WriteFile(h.e.resolvConf, []byte("search x\nnameserver "+neighbourAddr+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	release, err := h.e.Allow(t.Context(), pluginUID, nil)
	if err != nil {
		t.Fatal(err)
	}
	release()
	h.check("a new resolver", pluginUID, "udp4", neighbourAddr+":53", true)
}

func TestNameservers(t *testing.T) {
	got := nameservers([]byte("# nameserver 1.1.1.1\nnameserver 10.0.0.2\nnameserver fe80::1%eth0\nnameserver 10.0.0.2\nnameserver x\nnameserver\nsearch a\n"))
	want := []netip.Addr{netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fe80::1")}
	if !slices.Equal(got, want) {
		t.Errorf("nameservers() = %v, want %v", got, want)
	}
}

func TestAllowRefuses(t *testing.T) {
	e := &Egress{resolve: lookup}
	for name, c := range map[string]struct {
		uid     int
		targets []string
	}{
		"no uid":           {-1, []string{"10.0.0.2"}},
		"too many targets": {pluginUID, slices.Repeat([]string{"10.0.0.2"}, maxTargets+1)},
	} {
		if _, err := e.addresses(t.Context(), c.uid, c.targets); err == nil {
			t.Errorf("%s: addresses() = nil, want an error", name)
		}
	}
}
