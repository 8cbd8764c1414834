package main

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	bmclib "github.com/bmc-toolbox/bmclib/v2"
	"github.com/go-logr/logr"

	"github.com/better-compute/site-appliance/appliance/agent/grants"
	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/appliance/gateway/commands"
	"github.com/better-compute/site-appliance/appliance/gateway/gatewaytest"
	gatewaygrants "github.com/better-compute/site-appliance/appliance/gateway/grants"
	"github.com/better-compute/site-appliance/appliance/gateway/keys"
	"github.com/better-compute/site-appliance/appliance/gateway/store"
	"github.com/better-compute/site-appliance/appliance/site/netnstest"
	"github.com/better-compute/site-appliance/bmc/bmctest"
	"github.com/better-compute/site-appliance/bmc/bmcv1"
)

// fleetSuite measures commands for many BMCs through one box.
var fleetSuite = suite{
	names: []string{"fleet.query", "fleet.query.ideal", "fleet.on", "fleet.on.ideal", "fleet.off", "fleet.off.ideal", "fleet.rss"},
	run:   measureFleet,
}

const (
	// fleetLane is how many BMCs are spoken with at a time, by both sides.
	fleetLane = 64
	// fleetPeer makes this program the peer: a loop over the BMCs that the file lists.
	fleetPeer = "fleet-peer"
	// fleetFile names the peer's BMCs, and fleetSize how many there are, 1000 unless set.
	fleetFile = "BENCH_FLEET"
	fleetSize = "BENCH_FLEET_SIZE"

	fleetMean, fleetLeast = 541 * time.Millisecond, 333 * time.Millisecond

	fleetUser, fleetPassword = "ADMIN", "bench-only-passphrase"
	fleetCredential          = "secret://default/fleet"
	fleetSite                = "site_1"

	// fleetGoal is the least share of the ideal time, which is 1 / 1.3.
	fleetGoal   = 0.77
	fleetMaxRSS = 160
)

// fleetLatency is how long a BMC takes for a request: the three or four of an
// operation take it one to three seconds.
func fleetLatency() time.Duration {
	return time.Duration(rand.Int64N(int64(2*(fleetMean-fleetLeast)))) + fleetLeast
}

// slept is how long the BMCs have taken for all but log-outs, which nobody waits for.
func slept(f *bmctest.Fleet) (sum time.Duration) {
	for _, b := range f.BMCs {
		sum += b.Slept()
		for _, r := range b.Requests() {
			if strings.HasPrefix(r, "DELETE ") {
				sum -= fleetMean
			}
		}
	}
	return sum
}

// fleetWorld is a network of its own, with two equal fleets, a gateway and a box in it.
type fleetWorld struct {
	tb           testing.TB
	ns           *netnstest.Namespace
	ours, theirs *bmctest.Fleet
	gateway      *gatewaytest.Gateway
	agent        string
	box          *exec.Cmd
	boxLog       string
	people       []ed25519.PrivateKey // who approve
	log          io.Writer
}

// measureFleet has a real gateway send commands for all BMCs to a real bcd site,
// and a plain loop of as many goroutines as the box has places do the same with
// bmclib's own Redfish client.
func measureFleet(ctx context.Context, s settings) (rows []row, err error) {
	if os.Geteuid() != 0 {
		fmt.Fprintln(s.log, "bench: fleet is left out: bcd site closes its network with rules, which needs root")
		return nil, nil
	}
	n := 1000
	if text := os.Getenv(fleetSize); text != "" {
		if n, err = strconv.Atoi(text); err != nil || n < 1 {
			return nil, fmt.Errorf("%s=%q: want a number", fleetSize, text)
		}
	}
	err = withTB(func(tb testing.TB) error {
		w := &fleetWorld{tb: tb, ns: netnstest.New(tb), log: s.log}
		if err := w.start(ctx, n); err != nil {
			return err
		}
		defer w.stopBox()
		for _, op := range []string{"query", "on", "off"} {
			fmt.Fprintf(s.log, "bench: fleet.%s of %d BMCs through bcd site\n", op, n)
			if op == "off" {
				if err := w.approve(ctx); err != nil {
					return err
				}
			}
			before := slept(w.ours)
			wall, err := w.throughBox(ctx, op)
			if err != nil {
				return fmt.Errorf("%w\n%s", err, w.lastWords())
			}
			ideal := (slept(w.ours) - before).Seconds() / fleetLane
			fmt.Fprintf(s.log, "bench: fleet.%s by %d goroutines on bmclib's own client\n", op, fleetLane)
			before = slept(w.theirs)
			peer, err := w.byPeer(ctx, op)
			if err != nil {
				return err
			}
			fmt.Fprintf(s.log, "bench: fleet.%s: %.1f s of %.1f s, the peer %.1f s of %.1f s\n", op, wall, ideal, peer, (slept(w.theirs)-before).Seconds()/fleetLane)
			rows = append(rows,
				row{name: "fleet." + op, ours: wall, unit: "s", less: true, theirs: peer,
					peer: fmt.Sprintf("%d goroutines on bmclib %s's own Redfish client, the same %d BMCs", fleetLane, "2.3.5", n)},
				row{name: "fleet." + op + ".ideal", ours: wall, unit: "s", less: true, theirs: ideal, goal: fleetGoal,
					peer: fmt.Sprintf("the sum of the BMCs' latencies / %d", fleetLane)})
		}
		peak, err := peakMiB(w.box.Process.Pid)
		if err != nil {
			return err
		}
		rows = append(rows, row{name: "fleet.rss", ours: peak, unit: "MiB", less: true, theirs: fleetMaxRSS, goal: 1, peer: "the most that bcd site may take"})
		return nil
	})
	return rows, err
}

// start brings everything up, and waits until the box is at home.
func (w *fleetWorld) start(ctx context.Context, n int) error {
	dir := w.tb.TempDir()
	bcd := filepath.Join(dir, "bcd")
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w -buildid=", "-o", bcd, "./appliance/cmd/bcd")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build bcd: %w\n%s", err, text)
	}
	var failed error
	w.ns.Do(func() {
		for _, f := range []**bmctest.Fleet{&w.ours, &w.theirs} {
			// Sessions stay open between the two measurements on either side.
			if *f, failed = bmctest.StartFleet(context.WithoutCancel(ctx), n, fleetUser, fleetPassword, fleetLatency); failed != nil {
				return
			}
		}
		w.gateway = gatewaytest.Make(w.tb)
	})
	if failed != nil {
		return failed
	}
	if err := w.approvers(dir); err != nil {
		return err
	}
	for _, f := range []*bmctest.Fleet{w.ours, w.theirs} {
		w.tb.Cleanup(func() { _ = f.Close() })
	}
	w.gateway.Start()
	credential, _ := json.Marshal(map[string]string{"username": fleetUser, "password": fleetPassword})
	if _, err := w.gateway.Secrets.Put(ctx, "default", "fleet", secret.New(credential)); err != nil {
		return err
	}
	if err := w.gateway.Store.AddSite(ctx, store.Site{ID: fleetSite, TenantID: "default", Name: "fleet", Created: time.Now()}); err != nil {
		return err
	}
	join, err := w.gateway.Enrol.NewToken(ctx, agentv1.Role_ROLE_SITE, fleetSite, "", time.Hour)
	if err != nil {
		return err
	}
	config := filepath.Join(dir, "site.toml")
	if err := os.WriteFile(config, fmt.Appendf(nil, "join = %q\n", join), 0o600); err != nil {
		return err
	}
	w.boxLog = filepath.Join(dir, "box.log")
	out, err := os.Create(w.boxLog)
	if err != nil {
		return err
	}
	defer out.Close()
	w.box = exec.Command(bcd, "site", "--config", config, "--state", filepath.Join(dir, "state"), "--netboot", dir)
	w.box.Stdout, w.box.Stderr = out, out
	w.ns.Do(func() { failed = w.box.Start() })
	if failed != nil {
		return fmt.Errorf("start bcd site: %w", failed)
	}
	return w.await(ctx)
}

// approvers puts two people into the trust bundle: from then on the box refuses to
// switch off many machines that they have not approved.
func (w *fleetWorld) approvers(dir string) error {
	var public []ed25519.PublicKey
	for i := range 2 {
		file := filepath.Join(dir, fmt.Sprintf("approver-%d.key", i))
		key, err := keys.NewApprover(file)
		if err != nil {
			return err
		}
		private, err := keys.ReadPrivate(file)
		if err != nil {
			return err
		}
		public, w.people = append(public, key), append(w.people, private)
	}
	root, err := keys.ReadPrivate(filepath.Join(w.gateway.Dir, keys.RootFile))
	if err != nil {
		return err
	}
	_, err = keys.NextBundle(w.gateway.Dir, []ed25519.PrivateKey{root}, func(b *agentv1.TrustBundle) error { return keys.AddApprovers(b, public, 2) }, time.Now())
	return err
}

// approve has both people approve one power-off of each BMC.
func (w *fleetWorld) approve(ctx context.Context) error {
	if !w.gateway.Grants.InForce() {
		return errors.New("the box would ask nobody")
	}
	p := gatewaygrants.Proposal{TenantID: "default", Reason: "measure the fleet", Operations: []*agentv1.GrantOperation{{Kind: "bmc.power", Operation: "power.setPower", Action: "off"}}}
	for i, b := range w.ours.BMCs {
		p.Machines = append(p.Machines, store.Machine{ID: fmt.Sprint("node_", i), SiteID: fleetSite, BMC: store.BMC{Driver: "redfish", Address: b.Addr()}})
	}
	g, err := w.gateway.Grants.Propose(ctx, p)
	for _, key := range w.people {
		if err == nil {
			_, err = w.gateway.Grants.Approve(ctx, "default", g.ID, grants.Sign(key, g.Payload))
		}
	}
	return err
}

func (w *fleetWorld) stopBox() {
	_ = w.box.Process.Signal(syscall.SIGTERM)
	_ = w.box.Wait()
	fmt.Fprintf(w.log, "bench: bcd site took %.1f s of processor time\n", (w.box.ProcessState.UserTime() + w.box.ProcessState.SystemTime()).Seconds())
}

func (w *fleetWorld) lastWords() string {
	text, _ := os.ReadFile(w.boxLog)
	return string(text[max(0, len(text)-4096):])
}

// await waits for the box's session.
func (w *fleetWorld) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		agents, err := w.gateway.Store.Agents(ctx, store.AgentFilter{})
		if err != nil {
			return err
		}
		for _, a := range agents {
			if w.gateway.Sessions.Online(a.ID) {
				w.agent = a.ID
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the box did not come home\n%s", w.lastWords())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// throughBox sends one command for each BMC and waits for all: the seconds from
// the first to the last.
func (w *fleetWorld) throughBox(ctx context.Context, op string) (float64, error) {
	kind, operation, args := "bmc.query", "power.getPower", ""
	if op != "query" {
		kind, operation, args = "bmc.power", "power.setPower", fmt.Sprintf("[%q]", op)
	}
	begin := time.Now()
	failed := make([]error, len(w.ours.BMCs))
	var wg sync.WaitGroup
	for i, b := range w.ours.BMCs {
		wg.Go(func() {
			id, err := w.gateway.Commands.Submit(ctx, commands.Spec{
				AgentID: w.agent, Kind: kind, TargetNodeID: fmt.Sprint("node_", i), SecretRefs: []string{fleetCredential}, Timeout: 10 * time.Minute,
				Args: &bmcv1.BmcOperationRequest{Driver: "redfish", Address: b.Addr(), CredentialsRef: fleetCredential, TlsSpkiSha256: b.SPKI(), Operation: operation, ArgsJson: args},
			})
			if err != nil {
				failed[i] = err
				return
			}
			out, err := w.gateway.Commands.Wait(ctx, id)
			if err == nil && out.Err != nil {
				err = out.Err
			}
			if err != nil {
				failed[i] = fmt.Errorf("%s of %s: %w", operation, b.Addr(), err)
			}
		})
	}
	wg.Wait()
	return time.Since(begin).Seconds(), some(failed)
}

// some keeps the first few errors: a thousand say no more.
func some(all []error) error {
	var first []error
	n := 0
	for _, err := range all {
		if err == nil {
			continue
		}
		if n++; n <= 5 {
			first = append(first, err)
		}
	}
	if n == 0 {
		return nil
	}
	return fmt.Errorf("%d of %d failed: %w", n, len(all), errors.Join(first...))
}

// peakMiB is the most that a process has held in memory so far.
func peakMiB(pid int) (float64, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, err := strconv.ParseFloat(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 64)
			return kib / 1024, err
		}
	}
	return 0, errors.New("the process's status has no VmHWM")
}

// byPeer runs the peer in the same network, as a process of its own as the box is.
func (w *fleetWorld) byPeer(ctx context.Context, op string) (float64, error) {
	var list []string
	for _, b := range w.theirs.BMCs {
		list = append(list, b.Addr())
	}
	file := filepath.Join(w.tb.TempDir(), "fleet")
	if err := os.WriteFile(file, []byte(op+"\n"+strings.Join(list, "\n")), 0o600); err != nil {
		return 0, err
	}
	var out, notes bytes.Buffer
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Env = append(os.Environ(), hostVariable+"="+fleetPeer, fleetFile+"="+file)
	cmd.Stdout, cmd.Stderr = &out, &notes
	var failed error
	w.ns.Do(func() { failed = cmd.Start() })
	if failed == nil {
		failed = cmd.Wait()
	}
	if failed != nil {
		return 0, fmt.Errorf("the peer: %w\n%s", failed, notes.Bytes()[:min(notes.Len(), 4096)])
	}
	return strconv.ParseFloat(strings.TrimSpace(out.String()), 64)
}

// beFleetPeer does what the file asks for, and prints the seconds that it took.
func beFleetPeer(ctx context.Context, out io.Writer) error {
	text, err := os.ReadFile(os.Getenv(fleetFile))
	if err != nil {
		return err
	}
	lines := strings.Split(string(text), "\n")
	op, addresses := lines[0], lines[1:]
	failed := make([]error, len(addresses))
	next := make(chan int)
	begin := time.Now()
	var wg sync.WaitGroup
	for range fleetLane {
		wg.Go(func() {
			for i := range next {
				if err := peerOperation(ctx, addresses[i], op); err != nil {
					failed[i] = fmt.Errorf("%s of %s: %w", op, addresses[i], err)
				}
			}
		})
	}
	for i := range addresses {
		next <- i
	}
	close(next)
	wg.Wait()
	if err := some(failed); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%f\n", time.Since(begin).Seconds())
	return err
}

// peerOperation is bmclib as its documentation shows it, with its Redfish provider alone.
func peerOperation(ctx context.Context, address, op string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return err
	}
	// The rig's certificates are self-signed, and bmclib has no pins.
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	defer transport.CloseIdleConnections()
	c := bmclib.NewClient(host, fleetUser, fleetPassword, bmclib.WithHTTPClient(&http.Client{Transport: transport}), bmclib.WithRedfishPort(port),
		bmclib.WithLogger(logr.Discard()), bmclib.WithPerProviderTimeout(2*time.Minute))
	c.Registry.Drivers = c.Registry.For("gofish")
	if err := c.Open(ctx); err != nil {
		return err
	}
	defer func() { _ = c.Close(ctx) }()
	if op != "query" {
		_, err = c.SetPowerState(ctx, op)
		return err
	}
	_, err = c.GetPowerState(ctx)
	return err
}
