package lab

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/atomicfile"
	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/image/qemutest"
)

// BMCUser and BMCPassword open the rig's BMCs; they exist only inside the lab.
const (
	BMCUser     = "ADMIN"
	BMCPassword = "rig-only-passphrase"
)

// Config says what the lab is built from.
type Config struct {
	// Dir takes state and logs; it must exist.
	Dir string
	// Out is the build's folder: bin/ and qemu-amd64/.
	Out string
	// Machine stands behind the rig's BMCs; nil: a virtual machine.
	Machine bmctest.Machine
	// RedfishOptions change what the rig's Redfish BMC does.
	RedfishOptions []bmctest.Option
	// Log gets the CLI calls as a person would type them; nil is silent.
	Log io.Writer
}

// Lab is a running site.
type Lab struct {
	Config
	ctx     context.Context
	cancel  context.CancelFunc
	wires   wires
	procs   *spawner
	plugged bool // the namespace "site" is on the wires
	Gateway *Process
	Site    *Process
	Box     *qemutest.VM
	// Metal is the virtual machine, nil when Config.Machine was given.
	Metal   *Machine
	IPMI    *bmctest.IPMI
	Redfish *bmctest.Redfish
}

// Start makes the wires and the rig; nothing of the product runs yet.
func Start(ctx context.Context, cfg Config) (*Lab, error) {
	if os.Geteuid() != 0 {
		return nil, fmt.Errorf("needs root: network namespaces")
	}
	var err error
	if cfg.Dir, err = filepath.Abs(cfg.Dir); err != nil {
		return nil, err
	}
	if cfg.Out, err = filepath.Abs(cfg.Out); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	l := &Lab{Config: cfg, ctx: ctx, cancel: cancel, procs: newSpawner()}
	if l.wires, err = makeWires(fmt.Sprintf("bc%d", os.Getpid())); err != nil {
		l.Close()
		return nil, err
	}
	for tap, bridge := range map[string]string{"machine0": "br-lan", "box-up": "br-up", "box-lan": "br-lan"} {
		if err := l.wires.tap(tap, bridge); err != nil {
			l.Close()
			return nil, err
		}
	}
	machine := cfg.Machine
	if machine == nil {
		if l.Metal, err = newMachine(ctx, cfg.Dir, l.netns("net")); err != nil {
			l.Close()
			return nil, err
		}
		machine = l.Metal
	}
	err = l.wires.do("bmc", func() error {
		var err error
		if l.IPMI, err = bmctest.StartIPMI(ctx, BMCAddr+":623", BMCUser, BMCPassword, machine); err != nil {
			return err
		}
		opts := append([]bmctest.Option{bmctest.Dial(l.dialFrom("bmc"))}, cfg.RedfishOptions...)
		l.Redfish, err = bmctest.StartRedfish(ctx, BMCAddr+":443", BMCUser, BMCPassword, machine, opts...)
		return err
	})
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("start the rig: %w", err)
	}
	return l, nil
}

func (l *Lab) netns(name string) string { return "/run/netns/" + l.wires.ns(name) }

// Close ends everything that the lab started.
func (l *Lab) Close() {
	l.cancel()
	if l.Metal != nil {
		_ = l.Metal.PowerOff(context.Background())
	}
	if l.Box != nil {
		_ = l.Box.Close()
	}
	l.procs.close()
	if l.IPMI != nil {
		_ = l.IPMI.Close()
	}
	if l.Redfish != nil {
		_ = l.Redfish.Close()
	}
	l.wires.remove()
}

// InNetns runs f inside a namespace: "gw", "site", "bmc", "nb" or "net".
func (l *Lab) InNetns(name string, f func() error) error { return l.wires.do(name, f) }

// dialFrom connects from inside a namespace.
func (l *Lab) dialFrom(name string) func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		err = l.InNetns(name, func() (err error) {
			conn, err = (&net.Dialer{}).DialContext(ctx, network, address)
			return err
		})
		return conn, err
	}
}

// PlugMachine gives the namespace "mach" the machine's network card: for tests
// that play the machine themselves, with a Config.Machine that starts nothing.
func (l *Lab) PlugMachine() error {
	return l.wires.plug(plug{"mach", "eth0", MachineMAC, "", "br-lan"})
}

// Exec runs a program inside a namespace and gives its output.
func (l *Lab) Exec(ctx context.Context, netns string, argv ...string) (string, error) {
	return command(ctx, nil, append(l.wires.exec(netns), argv...)...)
}

// Spawn starts a program inside a namespace; the lab ends it.
func (l *Lab) Spawn(netns, name string, argv ...string) (*Process, error) {
	return l.procs.run(name, l.Dir, nil, append(l.wires.exec(netns), argv...)...)
}

func (l *Lab) bin(name string) string { return filepath.Join(l.Out, "bin", name) }

// GatewayDir is where the gateway keeps its keys and store.
func (l *Lab) GatewayDir() string { return filepath.Join(l.Dir, "gateway") }

// Keys makes the gateway's keys and store.
func (l *Lab) Keys(ctx context.Context) error {
	_, err := l.CLI(ctx, nil, "gateway", "init", "--dir", l.GatewayDir(), "--url", GatewayURL)
	return err
}

// Serve starts the gateway and waits until it listens.
func (l *Lab) Serve(ctx context.Context) error {
	p, err := l.Spawn("gw", "gateway", l.bin("better-compute"), "gateway", "serve", "--dir", l.GatewayDir(), "--listen", GatewayAddr+":7443")
	if err != nil {
		return err
	}
	l.Gateway = p
	return p.WaitFor(ctx, "gateway serves")
}

// CLI runs better-compute as a person at the gateway would, and gives its output.
func (l *Lab) CLI(ctx context.Context, stdin []byte, args ...string) (string, error) {
	if l.Log != nil {
		fmt.Fprintf(l.Log, "  $ better-compute %s\n", strings.Join(shown(args), " "))
	}
	argv := append(l.wires.exec("gw"), "env", "BETTER_COMPUTE_CLIENT="+filepath.Join(l.GatewayDir(), "client.toml"), l.bin("better-compute"))
	return command(ctx, bytes.NewReader(stdin), append(argv, args...)...)
}

// shown quotes what a shell would need quoted.
func shown(args []string) []string {
	out := make([]string, len(args))
	for i, a := range args {
		out[i] = a
		if a == "" || strings.ContainsAny(a, " \"'{}$") {
			out[i] = "'" + a + "'"
		}
	}
	return out
}

// SiteOptions change how bcd site is started, for what must fail.
type SiteOptions struct {
	// Plugins is the plugin folder; empty: one with bcx-ipmi and its pin.
	Plugins string
	// Hide covers files with an empty one, as if they were not installed.
	Hide []string
	// Extra is appended to site.toml.
	Extra string
}

// StartSite runs bcd site as a process in its namespace.
func (l *Lab) StartSite(ctx context.Context, join string, opt SiteOptions) error {
	dir := filepath.Join(l.Dir, "site")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if opt.Plugins == "" {
		opt.Plugins = filepath.Join(dir, "plugins")
		if err := l.WritePlugins(opt.Plugins); err != nil {
			return err
		}
	}
	netboot, err := l.netboot(dir)
	if err != nil {
		return err
	}
	if join != "" {
		if err := os.WriteFile(filepath.Join(dir, "join"), []byte(join), 0o600); err != nil {
			return err
		}
	}
	config := fmt.Sprintf("join_file = %q\n[uplink]\ninterface = \"up0\"\naddress = %q\n%s\n[plugins]\ndir = %q\n%s",
		filepath.Join(dir, "join"), SiteUplink+"/24", lanConfig("interface = \"lan0\""), opt.Plugins, opt.Extra)
	if err := os.WriteFile(filepath.Join(dir, "site.toml"), []byte(config), 0o600); err != nil {
		return err
	}
	if !l.plugged {
		for _, p := range []plug{{"site", "up0", "", SiteUplink, "br-up"}, {"site", "lan0", "", SiteLAN, "br-lan"}} {
			if err := l.wires.plug(p); err != nil {
				return err
			}
		}
		l.plugged = true
	}
	argv := []string{l.bin("bcd"), "site", "--config", filepath.Join(dir, "site.toml"), "--state", filepath.Join(dir, "state"), "--netboot", netboot}
	if len(opt.Hide) > 0 {
		// ip netns exec gives the program a mount namespace of its own.
		script := "for f in"
		for _, f := range opt.Hide {
			script += " '" + f + "'"
		}
		argv = append([]string{"sh", "-c", script + `; do mount --bind /dev/null "$f" || exit 1; done; exec "$@"`, "sh"}, argv...)
	}
	l.Site, err = l.Spawn("site", "site", argv...)
	return err
}

// lanConfig is the lab's [[lan]].
func lanConfig(port string) string {
	return fmt.Sprintf("[[lan]]\n%s\naddress = \"%s/24\"\ndhcp = \"authoritative\"\nrange = [\"10.77.0.100\", \"10.77.0.199\"]\n", port, SiteLAN)
}

// WritePlugins fills a plugin folder with bcx-ipmi and its pin.
func (l *Lab) WritePlugins(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	data, err := os.ReadFile(l.bin("bcx-ipmi"))
	if err != nil {
		return err
	}
	// By rename: a plugin of the site before may still run from the old file.
	if err := atomicfile.Write(filepath.Join(dir, "bcx-ipmi"), data, 0o755); err != nil {
		return err
	}
	sum := sha256.Sum256(data)
	return os.WriteFile(filepath.Join(dir, "pins"), []byte(hex.EncodeToString(sum[:])+"  bcx-ipmi\n"), 0o644)
}

// netboot gives a folder with what the box serves to machines. The ramdisk is
// left out where no image was built: then only machines that need it notice.
func (l *Lab) netboot(dir string) (string, error) {
	netboot := filepath.Join(dir, "netboot")
	for name, source := range map[string]string{
		"ipxe/snponly.efi": "/usr/lib/ipxe/snponly.efi", "ipxe/undionly.kpxe": "/usr/lib/ipxe/undionly.kpxe",
		"ramdisk/vmlinuz": l.artifact("ramdisk/vmlinuz"), "ramdisk/initrd": l.artifact("ramdisk/initrd"),
	} {
		path := filepath.Join(netboot, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return "", err
		}
		data, err := os.ReadFile(source)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err == nil {
			err = os.WriteFile(path, data, 0o644)
		}
		if err != nil {
			return "", err
		}
	}
	return netboot, nil
}

// BoxConfig is the site.toml of the lab's box.
func BoxConfig() string {
	return fmt.Sprintf("[uplink]\nmac = %q\n%s", BoxUplinkMAC, lanConfig(fmt.Sprintf("mac = %q", BoxLANMAC)))
}

// StartBox boots a customized image with its two network cards on the wires.
func (l *Lab) StartBox(ctx context.Context, image string) error {
	dir := filepath.Join(l.Dir, "box")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	var err error
	l.Box, err = qemutest.Start(l.ctx, qemutest.Config{
		Name: "box", Dir: dir, UEFI: true, MemoryMiB: 1024, Watchdog: true,
		Disks: []qemutest.Disk{{Path: image, Serial: "BC-BOX-0001", BootIndex: 1}},
		NICs: []qemutest.NIC{
			{Netdev: "tap,ifname=box-up,script=no,downscript=no", MAC: BoxUplinkMAC, ROM: "none"},
			{Netdev: "tap,ifname=box-lan,script=no,downscript=no", MAC: BoxLANMAC, ROM: "none"},
		},
		Netns: l.netns("net"),
	})
	return err
}

// UplinkDHCP serves addresses on the uplink, as a site's router would.
func (l *Lab) UplinkDHCP() error {
	_, err := l.Spawn("gw", "uplink-dhcp", "dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--port=0", "--no-ping",
		"--interface=eth0", "--bind-interfaces", "--dhcp-range=10.99.0.100,10.99.0.150,1h", "--dhcp-authoritative",
		"--dhcp-leasefile="+filepath.Join(l.Dir, "uplink.leases"), "--pid-file=", "--user=root")
	return err
}

// BoxUplink is the address that the box got on its uplink.
func (l *Lab) BoxUplink() (string, error) {
	leases, err := os.ReadFile(filepath.Join(l.Dir, "uplink.leases"))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(leases)) {
		if f := strings.Fields(line); len(f) > 2 && f[1] == BoxUplinkMAC {
			return f[2], nil
		}
	}
	return "", fmt.Errorf("no lease for %s", BoxUplinkMAC)
}

// Dial tries a TCP port from a namespace, for a second.
func (l *Lab) Dial(netns, addr string) error {
	return l.wires.do(netns, func() error {
		c, err := net.DialTimeout("tcp", addr, time.Second)
		if err == nil {
			c.Close()
		}
		return err
	})
}

// Silent checks that no address and port answers a namespace in any way: not
// even with a refusal.
func (l *Lab) Silent(netns string, hosts, ports []string) error {
	var mu sync.Mutex
	var wg sync.WaitGroup
	var answers []error
	for _, host := range hosts {
		for _, port := range ports {
			wg.Go(func() {
				err := l.Dial(netns, net.JoinHostPort(host, port))
				var timeout net.Error
				if errors.As(err, &timeout) && timeout.Timeout() {
					return
				}
				mu.Lock()
				defer mu.Unlock()
				answers = append(answers, fmt.Errorf("%s port %s answers %s (%v), want silence", host, port, netns, err))
			})
		}
	}
	wg.Wait()
	return errors.Join(answers...)
}

// Poll repeats f every half second until it reports true, fails, or ctx ends.
func Poll(ctx context.Context, what string, f func() (bool, error)) error {
	for {
		ok, err := f()
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		if ok {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", what, ctx.Err())
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// Hints says which commands to try while the lab runs.
func (l *Lab) Hints() string {
	cli := fmt.Sprintf("ip netns exec %s env BETTER_COMPUTE_CLIENT=%s %s", l.wires.ns("gw"), filepath.Join(l.GatewayDir(), "client.toml"), l.bin("better-compute"))
	return fmt.Sprintf(`It all runs on. Try, in another terminal as root:

  bc="%s"
  $bc site list
  $bc metal show %s
  $bc metal power %s
  $bc metal power %s cycle
  $bc workflow list
  $bc events
  tail -f %s`, cli, MachineName, MachineName, MachineName, filepath.Join(l.Dir, "box", "serial.log"))
}
