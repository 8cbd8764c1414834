package lab

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Addresses of the lab. They exist only inside its namespaces.
const (
	GatewayAddr   = "10.99.0.1"
	SiteUplink    = "10.99.0.2"
	NeighbourAddr = "10.99.0.66"
	SiteLAN       = "10.77.0.1"
	BMCAddr       = "10.77.0.2"
	GatewayURL    = "https://" + GatewayAddr + ":7443"

	BoxUplinkMAC = "52:54:00:bc:00:01"
	BoxLANMAC    = "52:54:00:bc:00:02"
	MachineMAC   = "52:54:00:bc:00:10"
)

// wires are the lab's namespaces: "net" holds only the bridges and the taps.
type wires struct{ prefix string }

func (w wires) ns(name string) string { return w.prefix + "-" + name }

var namespaces = []string{"net", "gw", "site", "bmc", "nb", "mach"}

// makeWires builds the namespaces and links of the package comment.
func makeWires(prefix string) (wires, error) {
	w := wires{prefix}
	for _, n := range namespaces {
		if err := ip("netns", "add", w.ns(n)); err != nil {
			w.remove()
			return w, err
		}
	}
	steps := [][]string{}
	in := func(ns string, args ...string) {
		steps = append(steps, append([]string{"-n", w.ns(ns)}, args...))
	}
	for _, n := range namespaces {
		in(n, "link", "set", "lo", "up")
	}
	for _, br := range []string{"br-up", "br-lan"} {
		in("net", "link", "add", br, "type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
		in("net", "link", "set", br, "up")
	}
	for _, s := range steps {
		if err := ip(s...); err != nil {
			w.remove()
			return w, err
		}
	}
	for _, p := range []plug{
		{"gw", "eth0", "", GatewayAddr, "br-up"},
		{"nb", "eth0", "", NeighbourAddr, "br-up"},
		{"bmc", "eth0", "", BMCAddr, "br-lan"},
	} {
		if err := w.plug(p); err != nil {
			w.remove()
			return w, err
		}
	}
	return w, nil
}

// plug is a cable from a namespace's interface to a bridge. mac and addr may be empty.
type plug struct{ ns, dev, mac, addr, bridge string }

// plug makes the cable. Whatever takes the box's or the machine's place is
// plugged in only where it does: two of one address on a wire answer in turns.
func (w wires) plug(p plug) error {
	peer := p.ns + "-" + p.dev
	steps := [][]string{
		{"-n", w.ns("net"), "link", "add", peer, "type", "veth", "peer", "name", p.dev, "netns", w.ns(p.ns)},
		{"-n", w.ns("net"), "link", "set", peer, "master", p.bridge, "up"},
	}
	if p.mac != "" {
		steps = append(steps, []string{"-n", w.ns(p.ns), "link", "set", p.dev, "address", p.mac})
	}
	if p.addr != "" {
		steps = append(steps, []string{"-n", w.ns(p.ns), "addr", "add", p.addr + "/24", "dev", p.dev})
	}
	steps = append(steps, []string{"-n", w.ns(p.ns), "link", "set", p.dev, "up"})
	for _, s := range steps {
		if err := ip(s...); err != nil {
			return err
		}
	}
	return nil
}

// tap adds a tap to a bridge and gives its name.
func (w wires) tap(name, bridge string) error {
	for _, s := range [][]string{
		{"-n", w.ns("net"), "tuntap", "add", "dev", name, "mode", "tap"},
		{"-n", w.ns("net"), "link", "set", name, "master", bridge, "up"},
	} {
		if err := ip(s...); err != nil {
			return err
		}
	}
	return nil
}

func (w wires) remove() {
	for _, n := range namespaces {
		if _, err := os.Stat("/run/netns/" + w.ns(n)); err == nil {
			_ = ip("netns", "del", w.ns(n))
		}
	}
}

// do runs f on a thread inside a namespace: sockets that f opens stay there.
func (w wires) do(name string, f func() error) error {
	fd, err := os.Open("/run/netns/" + w.ns(name))
	if err != nil {
		return err
	}
	defer fd.Close()
	result := make(chan error)
	go func() {
		// Never unlocked: the thread ends with the goroutine, so that no other
		// goroutine runs in the namespace by accident.
		runtime.LockOSThread()
		if err := unix.Setns(int(fd.Fd()), unix.CLONE_NEWNET); err != nil {
			result <- fmt.Errorf("enter namespace %s: %w", name, err)
			return
		}
		result <- f()
	}()
	return <-result
}

// exec is the argv prefix that runs a command in a namespace.
func (w wires) exec(name string) []string { return []string{"ip", "netns", "exec", w.ns(name)} }

func ip(args ...string) error {
	out, err := exec.Command("ip", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}
