package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/bits"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	pin "github.com/pin/tftp/v3"
	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/site/netnstest"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/tftp"
	"github.com/better-compute/site-appliance/pxe/tftp/tftptest"
)

// tftpSuite measures one client's transfers over a wire between two namespaces.
// Server and client have a core each, alike for all servers, as they have a
// machine each where machines boot.
var tftpSuite = suite{names: []string{"tftp.lockstep.512", "tftp.lockstep.1468", "tftp.window16", "tftp.window16.delay"}, run: measureTFTP}

const (
	tftpName = "loader"
	// tftpServer and a name make this program that server of tftpFolder.
	tftpServer = "tftp-server-"
	tftpFolder = "BENCH_TFTP_FOLDER"
	// tftpClient makes this program the client of the row tftpCase, whose speed it prints.
	tftpClient = "tftp-client"
	tftpCase   = "BENCH_TFTP_CASE"
	tftpDelay  = 5 * time.Millisecond // each way
)

var (
	tftpAt  = netip.MustParseAddrPort("10.69.0.1:69")
	tftpBox = netip.PrefixFrom(tftpAt.Addr(), 24)
)

// tftpCases are the rows: what the client asks for, of how much.
var tftpCases = []struct {
	name            string
	blksize, window int
	bytes           int
	delay           time.Duration
	goal            float64
}{
	{"tftp.lockstep.512", 512, 0, 8 << 20, 0, 0.8},
	{"tftp.lockstep.1468", 1468, 0, 16 << 20, 0, 0.8},
	{"tftp.window16", 1468, 16, 16 << 20, 0, 3},
	{"tftp.window16.delay", 1468, 16, 256 << 10, tftpDelay, 10},
}

// tftpPeers serve a folder at tftpAt; the first that is installed has the row
// of lock-step, the fastest the others.
var tftpPeers = []struct {
	program string
	args    func(dir string) []string
}{
	{"in.tftpd", func(dir string) []string {
		return []string{"-L", "-4", "-a", tftpAt.String(), "-u", "root", "-s", dir}
	}},
	{"dnsmasq", func(dir string) []string {
		return []string{"--keep-in-foreground", "--conf-file=/dev/null", "--port=0", "--user=root", "--bind-interfaces",
			"--listen-address=" + tftpAt.Addr().String(), "--pid-file=", "--enable-tftp", "--tftp-root=" + dir}
	}},
}

// measureTFTP has one client, ours, read from each server in turn.
func measureTFTP(ctx context.Context, s settings) (rows []row, err error) {
	err = withTB(func(tb testing.TB) error {
		w := tftpWorld{box: netnstest.New(tb), far: netnstest.New(tb)}
		w.box.Wire("box0", tftpBox, w.far, "far0", netip.PrefixFrom(tftpAt.Addr().Next(), 24))
		rows, err = w.measure(ctx, s)
		return err
	})
	return rows, err
}

// tftpWorld has the servers in one namespace and the client in the other.
type tftpWorld struct {
	box, far               *netnstest.Namespace
	serverCore, clientCore int
}

func (w *tftpWorld) measure(ctx context.Context, s settings) ([]row, error) {
	dir, err := os.MkdirTemp(s.memory, "bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil {
		return nil, err
	}
	// The library alone is measured for the log: it has no row.
	servers := []string{"ours", "pin"}
	programs := map[string]string{}
	for _, p := range tftpPeers {
		if programs[p.program], err = exec.LookPath(p.program); err != nil {
			fmt.Fprintln(s.log, "bench: tftp: a peer is left out:", err)
			continue
		}
		servers = append(servers, p.program)
	}
	if len(servers) == 2 {
		fmt.Fprintln(s.log, "bench: tftp is left out: no peer is installed")
		return nil, nil
	}
	if w.serverCore, w.clientCore, err = tftpCores(); err != nil {
		return nil, err
	}
	fmt.Fprintf(s.log, "bench: tftp: servers on core %d, the client on core %d\n", w.serverCore, w.clientCore)
	speeds := map[string]map[string][]float64{}
	for row, c := range tftpCases {
		speeds[c.name] = map[string][]float64{}
		if err := os.WriteFile(filepath.Join(dir, tftpName), bytes.Repeat([]byte("boot"), c.bytes/4), 0o644); err != nil {
			return nil, err
		}
		for range s.rounds {
			for _, server := range servers {
				stop, err := w.serve(ctx, server, programs[server], dir)
				if err != nil {
					return nil, fmt.Errorf("%s: %w", server, err)
				}
				speed, err := w.read(ctx, row)
				if err = errors.Join(err, stop()); err != nil {
					return nil, fmt.Errorf("%s of %s: %w", c.name, server, err)
				}
				fmt.Fprintf(s.log, "bench: %s of %s: %.2f MB/s\n", c.name, server, speed)
				speeds[c.name][server] = append(speeds[c.name][server], speed)
			}
		}
	}
	var rows []row
	for _, c := range tftpCases {
		best := servers[2]
		for _, peer := range servers[3:] {
			if c.window > 0 && median(speeds[c.name][peer]) > median(speeds[c.name][best]) {
				best = peer
			}
		}
		rows = append(rows, row{name: c.name, unit: "MB/s", peer: best, goal: c.goal,
			ours: median(speeds[c.name]["ours"]), theirs: median(speeds[c.name][best])})
	}
	return rows, nil
}

// tftpCores are the cores of server and client: two, where there are two.
func tftpCores() (server, client int, err error) {
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		return 0, 0, fmt.Errorf("cores: %w", err)
	}
	var cores []int
	for c := range len(allowed) * bits.UintSize {
		if allowed.IsSet(c) {
			cores = append(cores, c)
		}
	}
	return cores[0], cores[len(cores)-1], nil
}

// startOn starts a command on one core: it inherits its thread's.
func startOn(core int, cmd *exec.Cmd) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return fmt.Errorf("cores: %w", err)
	}
	one.Set(core)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return fmt.Errorf("core %d: %w", core, err)
	}
	return errors.Join(cmd.Start(), unix.SchedSetaffinity(0, &before))
}

// read is the speed of one whole transfer, in MB/s.
func (w *tftpWorld) read(ctx context.Context, row int) (float64, error) {
	program, err := os.Executable()
	if err != nil {
		return 0, err
	}
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, program)
	cmd.Env = append(os.Environ(), hostVariable+"="+tftpClient, tftpCase+"="+strconv.Itoa(row))
	cmd.Stdout, cmd.Stderr = &out, os.Stderr
	if w.far.Do(func() { err = startOn(w.clientCore, cmd) }); err != nil {
		return 0, err
	}
	if err := cmd.Wait(); err != nil {
		return 0, fmt.Errorf("client: %w", err)
	}
	return strconv.ParseFloat(strings.TrimSpace(out.String()), 64)
}

// beTFTPClient reads the file once.
func beTFTPClient(out io.Writer) error {
	row, err := strconv.Atoi(os.Getenv(tftpCase))
	if err != nil || row < 0 || row >= len(tftpCases) {
		return fmt.Errorf("no row %q", os.Getenv(tftpCase))
	}
	c, at := tftpCases[row], tftpAt
	if c.delay > 0 {
		f, err := tftptest.Forward(at, c.delay, nil)
		if err != nil {
			return err
		}
		defer f.Close()
		at = f.Addr
	}
	began := time.Now()
	n, err := tftptest.Fetch(at, tftpName, c.blksize, c.window, io.Discard)
	took := time.Since(began)
	if err == nil && n != int64(c.bytes) {
		err = fmt.Errorf("read %d bytes of %d", n, c.bytes)
	}
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, float64(n)/1e6/took.Seconds())
	return err
}

// serve starts a server and waits until it has its port.
func (w *tftpWorld) serve(ctx context.Context, name, program, dir string) (stop func() error, err error) {
	ctx, cancel := context.WithCancel(ctx)
	var cmd *exec.Cmd
	if program == "" {
		// In a process of its own as the peers are: within one, a packet wakes no thread.
		program, err = os.Executable()
		if err != nil {
			cancel()
			return nil, err
		}
		cmd = exec.CommandContext(ctx, program)
		cmd.Env = append(os.Environ(), hostVariable+"="+tftpServer+name, tftpFolder+"="+dir)
	}
	for _, p := range tftpPeers {
		if p.program == name {
			cmd = exec.CommandContext(ctx, program, p.args(dir)...)
		}
	}
	cmd.Stderr = os.Stderr
	if w.box.Do(func() { err = startOn(w.serverCore, cmd) }); err != nil {
		cancel()
		return nil, err
	}
	stop = func() error {
		cancel()
		_ = cmd.Wait() // killed
		return nil
	}
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		sockets, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/udp", cmd.Process.Pid))
		if err != nil {
			return nil, errors.Join(err, stop())
		}
		if bytes.Contains(sockets, fmt.Appendf(nil, ":%04X ", tftpAt.Port())) {
			return stop, nil
		}
	}
	return nil, errors.Join(errors.New("it does not take its port"), stop())
}

// beTFTPServer serves the folder with our server, or with the library alone.
func beTFTPServer(ctx context.Context, name string) error {
	dir := files.Dir(os.Getenv(tftpFolder))
	if name == "pin" {
		return pin.NewServer(func(name string, to io.ReaderFrom) error {
			f, err := dir.Open(name)
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = to.ReadFrom(f)
			return err
		}, nil).ListenAndServe(tftpAt.String())
	}
	server, err := tftp.Listen(ctx, tftp.Config{Interface: "box0", Address: tftpAt.Addr(), Log: slog.New(slog.DiscardHandler),
		Open:  func(_ context.Context, _ netip.Addr, name string) (files.File, error) { return dir.Open(name) },
		Ended: func(tftp.Transfer) {}})
	if err != nil {
		return err
	}
	return server.Serve(ctx)
}
