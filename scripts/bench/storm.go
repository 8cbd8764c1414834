package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/site/netnstest"
	"github.com/better-compute/site-appliance/pxe"
	"github.com/better-compute/site-appliance/pxe/assign"
	"github.com/better-compute/site-appliance/pxe/boots"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/httpboot"
	"github.com/better-compute/site-appliance/pxe/newc"
	"github.com/better-compute/site-appliance/pxe/pxetest/fleet"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// stormSuite boots a hall of machines that was switched on, from each one's first
// DISCOVER to its last report. One that does not boot fails the run.
var stormSuite = suite{names: []string{"storm"}, run: measureStorm}

const (
	// stormServer and stormClients make this program the box, and the machines.
	stormServer   = "storm-box"
	stormClients  = "storm-machines"
	stormFolder   = "BENCH_STORM_FOLDER"
	stormMachines = 500
	stormQuiet    = 40
	stormPool     = 1024
	// stormSwitch is how long it takes until all of them have asked for the first time:
	// their firmware is done at different times.
	stormSwitch = 5 * time.Second
	// stormLink is what the box's own port carries: 1 Gbit/s.
	stormLink = 125e6
)

// stormFiles are what each machine reads.
var stormFiles = map[string]int{files.UEFILoader: 300 << 10, files.Kernel: 4 << 20, files.Initrd: 8 << 20}

func stormMAC(i int) net.HardwareAddr {
	return net.HardwareAddr{0x52, 0x54, 3, 0, byte(i >> 8), byte(i)}
}

// storm is what the machines saw of it.
type storm struct {
	// Alone and Together are the times to an OFFER, in milliseconds.
	Alone, Together []float64
	Booted, Most    int
	Repeats         int
	Bytes           int64
	Seconds         float64
	Errors          []string
}

// measureStorm compares the time to an OFFER in the storm with that of machines
// that boot alone. The box and the machines are processes of their own, each in its
// namespace and, where there are several cores, on cores of its own: machines cost
// a box no time but by what they ask.
func measureStorm(ctx context.Context, s settings) (rows []row, err error) {
	dir, err := os.MkdirTemp(s.dir, "bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	if dir, err = filepath.Abs(dir); err != nil {
		return nil, err
	}
	for name, size := range stormFiles {
		b := make([]byte, size)
		_, _ = rand.Read(b) // never fails
		path := filepath.Join(dir, "netboot", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return nil, err
		}
		if err := os.WriteFile(path, b, 0o644); err != nil {
			return nil, err
		}
	}
	err = withTB(func(tb testing.TB) error {
		box, far := netnstest.New(tb), netnstest.New(tb)
		box.Wire("box0", dhcpBox, far, "far0", netip.MustParsePrefix("10.77.255.1/16"))
		var far0 *net.Interface
		far.Do(func() { far0, err = net.InterfaceByName("far0") })
		if err == nil {
			box.Do(func() { err = fleet.Neighbours("box0", dhcpFirst, stormPool, far0.HardwareAddr) })
		}
		if err != nil {
			return err
		}
		var worst, alone []float64
		for i := range s.rounds {
			fmt.Fprintf(s.log, "bench: storm, round %d of %d\n", i+1, s.rounds)
			got, err := stormRound(ctx, filepath.Join(dir, fmt.Sprint(i)), box, far)
			if err != nil {
				return err
			}
			slices.Sort(got.Together)
			p99 := got.Together[len(got.Together)*99/100]
			fmt.Fprintf(s.log, "bench: storm: %d of %d booted in %.1f s, %d at a time at most, %.0f MB/s, %d DHCP messages sent again; OFFER alone median %.3f ms, worst %.3f, in the storm median %.3f, 99%% %.3f, worst %.3f\n",
				got.Booted, stormMachines, got.Seconds, got.Most, float64(got.Bytes)/1e6/got.Seconds, got.Repeats,
				median(got.Alone), slices.Max(got.Alone), median(got.Together), p99, got.Together[len(got.Together)-1])
			if len(got.Errors) > 0 {
				return fmt.Errorf("%d did not boot: %s", len(got.Errors), got.Errors[0])
			}
			alone, worst = append(alone, median(got.Alone)), append(worst, p99)
		}
		rows = []row{{name: "storm", ours: median(worst), unit: "ms", theirs: median(alone), less: true, goal: 0.2,
			peer: fmt.Sprintf("the median time to an OFFER of one machine alone, beside the 99th percentile of %d", stormMachines)}}
		return nil
	})
	return rows, err
}

// stormProgram is this program in one of its parts, on the cores that part has.
func stormProgram(ctx context.Context, part, dir, cores string) (*exec.Cmd, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	args := []string{program}
	if taskset, err := exec.LookPath("taskset"); err == nil && runtime.NumCPU() > 1 {
		args = []string{taskset, "-c", cores, program}
	}
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Env = append(os.Environ(), hostVariable+"="+part, stormFolder+"="+dir)
	cmd.Stderr = os.Stderr
	return cmd, nil
}

func stormRound(ctx context.Context, dir string, box, far *netnstest.Namespace) (got storm, err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return got, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	server, err := stormProgram(ctx, stormServer, dir, "0")
	if err != nil {
		return got, err
	}
	box.Do(func() { err = server.Start() })
	if err != nil {
		return got, err
	}
	defer func() { cancel(); _ = server.Wait() }() // killed
	machines, err := stormProgram(ctx, stormClients, dir, fmt.Sprintf("1-%d", runtime.NumCPU()-1))
	if err != nil {
		return got, err
	}
	var said bytes.Buffer
	machines.Stdout = &said
	far.Do(func() { err = machines.Start() })
	if err == nil {
		err = machines.Wait()
	}
	if err != nil {
		return got, err
	}
	return got, json.Unmarshal(said.Bytes(), &got)
}

// beStormClients boots all machines, first some of them alone, and says how it went.
func beStormClients(ctx context.Context, out io.Writer) error {
	var want fleet.Want
	for name, sum := range map[string]*uint32{files.UEFILoader: &want.Loader, files.Kernel: &want.Kernel, files.Initrd: &want.Initrd} {
		b, err := os.ReadFile(filepath.Join(filepath.Dir(os.Getenv(stormFolder)), "netboot", name))
		if err != nil {
			return err
		}
		*sum = fleet.Sum(b)
	}
	wire, err := fleet.Open("far0", nil)
	if err != nil {
		return err
	}
	defer wire.Close()
	wire.Link(stormLink)
	var got storm
	for i := range stormQuiet {
		res, err := wire.Boot(ctx, stormMAC(stormMachines+i), want)
		if err != nil {
			return fmt.Errorf("alone: %w", err)
		}
		if i > 0 { // the first waits for the server to be there
			got.Alone = append(got.Alone, milliseconds(res.Offers)...)
		}
	}
	var mu sync.Mutex
	there := 0
	began := time.Now()
	var wg sync.WaitGroup
	for i := range stormMachines {
		wg.Go(func() {
			time.Sleep(time.Duration(i) * stormSwitch / stormMachines)
			mu.Lock()
			there++
			got.Most = max(got.Most, there)
			mu.Unlock()
			res, err := wire.Boot(ctx, stormMAC(i), want)
			mu.Lock()
			defer mu.Unlock()
			there--
			got.Together = append(got.Together, milliseconds(res.Offers)...)
			got.Repeats += res.Repeats
			got.Bytes += res.Bytes
			if err != nil {
				got.Errors = append(got.Errors, err.Error())
			} else {
				got.Booted++
			}
		})
	}
	wg.Wait()
	got.Seconds = time.Since(began).Seconds()
	return json.NewEncoder(out).Encode(got)
}

func milliseconds(all []time.Duration) (ms []float64) {
	for _, d := range all {
		ms = append(ms, d.Seconds()*1e3)
	}
	return ms
}

func stormLast() netip.Addr {
	last := dhcpFirst
	for range stormPool - 1 {
		last = last.Next()
	}
	return last
}

// beStormServer is the box, as its wiring runs it.
func beStormServer(ctx context.Context) error {
	dir := os.Getenv(stormFolder)
	store, err := assign.Open(filepath.Join(dir, "assign"))
	if err != nil {
		return err
	}
	var machines []*pxev1.Machine
	for i := range stormMachines + stormQuiet {
		machines = append(machines, &pxev1.Machine{MachineId: fmt.Sprintf("node_%d", i), Macs: []string{stormMAC(i).String()}, Action: pxev1.Action_ACTION_RAMDISK,
			Purpose: "inspect", WindowId: "w1", WindowUntilMs: time.Now().Add(time.Hour).UnixMilli()})
	}
	if _, err := store.Apply(&pxev1.AssignRequest{Version: 1, Machines: machines}); err != nil {
		return err
	}
	counts, err := boots.Open(filepath.Join(dir, "boots"), store.Window)
	if err != nil {
		return err
	}
	return pxe.Run(ctx, pxe.Config{
		Interface: "box0", Address: dhcpBox, RangeStart: dhcpFirst, RangeEnd: stormLast(), Takeover: true, StateDir: dir, Assign: store,
		Files: files.Dir(filepath.Join(filepath.Dir(dir), "netboot")), Cmdline: "console=ttyS0", Counts: counts,
		Boot: func(_ context.Context, b httpboot.Booting) ([]byte, error) {
			return newc.BootArchive("/etc/bc/boot.json", []byte(b.Report)), nil
		},
		Event: func(string, string, string, any) {}, Log: slog.New(slog.DiscardHandler),
	})
}
