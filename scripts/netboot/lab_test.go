package netboot

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"google.golang.org/protobuf/proto"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/cmdkind"
	"github.com/better-compute/site-appliance/appliance/gateway"
	"github.com/better-compute/site-appliance/appliance/gateway/artifacts"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/keys"
	"github.com/better-compute/site-appliance/appliance/gateway/metal"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/image/builder"
	"github.com/better-compute/site-appliance/image/customize"
	"github.com/better-compute/site-appliance/image/qemutest"
	"github.com/better-compute/site-appliance/pxe"
	"github.com/better-compute/site-appliance/pxe/pxetest"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

const (
	imageDir = "../../out/qemu-amd64"
	siteID   = "site_1"
	// quiet is how long the slowest step takes on an idle machine without KVM.
	quiet = 60 * time.Second
)

// wire is a bridge with a port for the box and one for the machine.
type wire struct {
	name, host string
	mac        string // of the box's port; empty: the box has none there
}

// The addresses exist only inside the test's namespace.
var (
	up    = wire{"up", "10.99.0.1/24", "52:54:00:bc:01:01"}
	lan   = wire{"lan", "10.77.0.254/24", "52:54:00:bc:01:02"}
	proxy = wire{"proxy", "10.78.0.254/24", "52:54:00:bc:01:03"}
	relay = wire{"relay", "10.79.0.254/24", "52:54:00:bc:01:04"}
	far   = wire{"far", "10.80.0.1/24", ""} // behind the namespace as router
)

const boxConfig = `[uplink]
mac = "52:54:00:bc:01:01"
address = "10.99.0.2/24"

[[lan]]
mac = "52:54:00:bc:01:02"
address = "10.77.0.1/24"
ipv6 = "fd00:77::1/64"
dhcp = "authoritative"
range = ["10.77.0.100", "10.77.0.199"]

[[lan]]
mac = "52:54:00:bc:01:03"
address = "10.78.0.1/24"
dhcp = "proxy"

[[lan]]
mac = "52:54:00:bc:01:04"
address = "10.79.0.1/24"
dhcp = "relay"
[[lan.relay]]
subnet = "10.80.0.0/24"
range = ["10.80.0.100", "10.80.0.199"]
gateway = "10.80.0.1"
via = "10.79.0.254"
`

func (w wire) boxPort() string     { return "box-" + w.name }
func (w wire) machinePort() string { return "mach-" + w.name }

func tap(port string) string { return "tap,ifname=" + port + ",script=no,downscript=no" }

// lab is a gateway of this process and the box that is at home there.
type lab struct {
	gateway *gateway.Gateway
	box     *qemutest.VM
	agent   string
	version uint64
	stages  stages
}

// start boots the box and waits until it is home.
func start(t *testing.T) *lab {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: network namespaces")
	}
	qemutest.Need(t, true)
	image := filepath.Join(imageDir, builder.SiteImage)
	for _, name := range []string{image, "/dev/net/tun"} {
		if _, err := os.Stat(name); err != nil {
			t.Skipf("needs the box's image (make image) and taps: %v", err)
		}
	}
	for _, w := range []wire{up, lan, proxy, relay, far} {
		pxetest.Bridge(t, "br-"+w.name, netip.MustParsePrefix(w.host), w.boxPort(), w.machinePort())
	}
	check(t, os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644))
	lo, err := netlink.LinkByName("lo")
	check(t, err)
	check(t, netlink.LinkSetUp(lo))

	l := &lab{stages: stages{changed: make(chan struct{})}}
	home := l.serve(t)
	join, err := l.gateway.Enrol.NewToken(t.Context(), agentv1.Role_ROLE_SITE, siteID, "", time.Hour)
	check(t, err)
	config, err := customize.Configuration([]byte(boxConfig), join)
	check(t, err)
	dir := t.TempDir()
	disk := filepath.Join(dir, "box.img")
	check(t, customize.Image(image, disk, config, time.Unix(1767225600, 0)))
	check(t, os.Truncate(disk, 4<<30))
	vm := qemutest.Config{
		Name: "box", Dir: dir, UEFI: true, MemoryMiB: 1024, Watchdog: true,
		Disks: []qemutest.Disk{{Path: disk, Serial: "BC-BOX-0001", BootIndex: 1}},
	}
	for _, w := range []wire{up, lan, proxy, relay} {
		vm.NICs = append(vm.NICs, qemutest.NIC{Netdev: tap(w.boxPort()), MAC: w.mac, ROM: "none"})
	}
	began := time.Now()
	l.box, err = qemutest.Start(t.Context(), vm)
	check(t, err)
	t.Cleanup(func() {
		_ = l.box.Close()
		if t.Failed() {
			t.Logf("the box's console ends:\n%s", l.box.Tail(60))
		}
	})
	select {
	case l.agent = <-home:
	case <-time.After(qemutest.Slack * quiet):
		t.Fatal("the box did not come home")
	}
	t.Logf("%-40s %5.0f s", "the box is at home", time.Since(began).Seconds())
	return l
}

// serve runs the gateway. The channel gives the first box that comes home.
func (l *lab) serve(t *testing.T) <-chan string {
	t.Helper()
	dir := t.TempDir()
	address := netip.AddrPortFrom(netip.MustParsePrefix(up.host).Addr(), 7443).String()
	_, err := keys.Init(dir, []string{"https://" + address}, time.Now())
	check(t, err)
	hardware, err := metal.Module(metal.Options{})
	check(t, err)
	l.gateway, err = gateway.New(dir, gateway.Options{Log: slog.New(slog.DiscardHandler), Modules: []gateway.Module{hardware}})
	check(t, err)
	check(t, l.gateway.Store.AddSite(t.Context(), store.Site{ID: siteID, TenantID: "default", Name: "site-1", Created: time.Now()}))
	home := make(chan string, 64)
	l.gateway.Sessions.OnState(func(agentID string, online bool) {
		if online {
			select {
			case home <- agentID:
			default:
			}
		}
	})
	l.gateway.Sessions.OnEvent(l.stages.hear)
	listener, err := gateway.Listen(t.Context(), address)
	check(t, err)
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	served := make(chan error, 1)
	go func() { served <- l.gateway.ServeListener(ctx, listener) }()
	t.Cleanup(func() {
		stop()
		if err := <-served; err != nil {
			t.Errorf("gateway: %v", err)
		}
		if err := l.gateway.Close(); err != nil {
			t.Errorf("gateway: %v", err)
		}
	})
	return home
}

// assign makes m the only machine of the box's snapshot; nil: none.
func (l *lab) assign(t *testing.T, m *pxev1.Machine) {
	t.Helper()
	l.version++
	req := &pxev1.AssignRequest{Version: l.version}
	if m != nil {
		req.Machines = append(req.Machines, m)
	}
	l.command(t, cmdkind.Assign, req)
}

// command has the box do something, and gives the result.
func (l *lab) command(t *testing.T, kind string, args proto.Message) []byte {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), qemutest.Slack*quiet)
	defer cancel()
	id, err := l.gateway.Commands.Submit(ctx, commands.Spec{AgentID: l.agent, Kind: kind, Args: args})
	check(t, err)
	out, err := l.gateway.Commands.Wait(ctx, id)
	check(t, err)
	if out.Err != nil {
		t.Fatalf("%s: %v", kind, out.Err)
	}
	return out.Result
}

// explain is what the box itself says of a machine.
func (l *lab) explain(t *testing.T, mac string) *pxev1.ExplainResult {
	t.Helper()
	out := &pxev1.ExplainResult{}
	check(t, proto.Unmarshal(l.command(t, cmdkind.Explain, &pxev1.ExplainRequest{Mac: mac}), out))
	return out
}

// store gives the gateway a file. The box fetches it when a machine asks.
func (l *lab) store(t *testing.T, name, path string) store.Artifact {
	t.Helper()
	f, err := os.Open(path)
	check(t, err)
	defer f.Close()
	a, err := l.gateway.Artifacts.Import(t.Context(), name, "amd64", artifacts.Plain, f)
	check(t, err)
	return a
}

// stages are the pxe.stage events that reached the gateway, in their order.
type stages struct {
	mu      sync.Mutex
	all     []pxe.Stage
	changed chan struct{} // closed and replaced at each event
}

func (s *stages) hear(_ context.Context, _ string, e *agentv1.Event) {
	var stage pxe.Stage
	if e.Name != "pxe.stage" || json.Unmarshal(e.BodyJson, &stage) != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, stage)
	close(s.changed)
	s.changed = make(chan struct{})
}

// of are a machine's.
func (s *stages) of(mac string) ([]pxe.Stage, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []pxe.Stage
	for _, stage := range s.all {
		if stage.MAC == mac {
			out = append(out, stage)
		}
	}
	return out, s.changed
}

// line is a stage as the cells write it down.
func line(s pxe.Stage) string {
	return strings.Join(strings.Fields(s.Stage+" "+s.Client+" "+s.Detail), " ")
}

// wait waits until the machine's stage has come that begins with want, after the
// first n of them, and gives how many there were by then.
func (s *stages) wait(ctx context.Context, mac string, n int, want string) (int, error) {
	limit := time.NewTimer(qemutest.Slack * quiet)
	defer limit.Stop()
	for {
		all, changed := s.of(mac)
		for ; n < len(all); n++ {
			if strings.HasPrefix(line(all[n]), want) {
				return n + 1, nil
			}
		}
		select {
		case <-changed:
		case <-limit.C:
			return n, fmt.Errorf("no stage %q within %v", want, qemutest.Slack*quiet)
		case <-ctx.Done():
			return n, ctx.Err()
		}
	}
}

// spawn runs a program until the test ends.
func spawn(t *testing.T, argv ...string) {
	t.Helper()
	var out bytes.Buffer
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started, ended := make(chan error, 1), make(chan error, 1)
	go func() {
		runtime.LockOSThread() // the death signal follows the thread
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			ended <- cmd.Wait()
		}
	}()
	check(t, <-started)
	t.Cleanup(func() {
		select {
		case err := <-ended:
			t.Errorf("%s ended early: %v\n%s", argv[0], err, out.String())
			return
		default:
		}
		_ = cmd.Process.Kill()
		<-ended
		if t.Failed() {
			t.Logf("%s said:\n%s", argv[0], out.String())
		}
	})
}
