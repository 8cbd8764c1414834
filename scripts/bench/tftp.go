package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	pin "github.com/pin/tftp/v3"

	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/tftp"
	"github.com/better-compute/site-appliance/pxe/tftp/tftptest"
)

// tftpSuite measures one client's transfers, over the loopback.
var tftpSuite = suite{names: []string{"tftp.lockstep.512", "tftp.lockstep.1468", "tftp.window16", "tftp.window16.delay"}, run: measureTFTP}

const (
	tftpName = "loader"
	// tftpServer and a name make this program that server of tftpFolder.
	tftpServer = "tftp-"
	tftpFolder = "BENCH_TFTP_FOLDER"
	tftpDelay  = 5 * time.Millisecond // each way
)

var tftpAt = netip.MustParseAddrPort("127.0.69.1:69")

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
func measureTFTP(ctx context.Context, s settings) ([]row, error) {
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
	speeds := map[string]map[string][]float64{}
	for _, c := range tftpCases {
		speeds[c.name] = map[string][]float64{}
		if err := os.WriteFile(filepath.Join(dir, tftpName), bytes.Repeat([]byte("boot"), c.bytes/4), 0o644); err != nil {
			return nil, err
		}
		for range s.rounds {
			for _, server := range servers {
				stop, err := serveTFTP(ctx, server, programs[server], dir)
				if err != nil {
					return nil, fmt.Errorf("%s: %w", server, err)
				}
				speed, err := readTFTP(c.blksize, c.window, c.bytes, c.delay)
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

// readTFTP is the speed of one whole transfer, in MB/s.
func readTFTP(blksize, window, size int, delay time.Duration) (float64, error) {
	at := tftpAt
	if delay > 0 {
		f, err := tftptest.Forward(at, delay, nil)
		if err != nil {
			return 0, err
		}
		defer f.Close()
		at = f.Addr
	}
	began := time.Now()
	n, err := tftptest.Fetch(at, tftpName, blksize, window, io.Discard)
	if err == nil && n != int64(size) {
		err = fmt.Errorf("read %d bytes of %d", n, size)
	}
	return float64(n) / 1e6 / time.Since(began).Seconds(), err
}

// serveTFTP starts a server and waits until it has its port.
func serveTFTP(ctx context.Context, name, program, dir string) (stop func() error, err error) {
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
	if err := cmd.Start(); err != nil {
		cancel()
		return nil, err
	}
	stop = func() error {
		cancel()
		_ = cmd.Wait() // killed
		return nil
	}
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		probe, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(tftpAt))
		if err != nil { // taken
			return stop, nil
		}
		_ = probe.Close()
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
	server, err := tftp.Listen(ctx, tftp.Config{Interface: "lo", Address: tftpAt.Addr(), Log: slog.New(slog.DiscardHandler),
		Open:  func(_ netip.Addr, name string) (files.File, error) { return dir.Open(name) },
		Ended: func(tftp.Transfer) {}})
	if err != nil {
		return err
	}
	return server.Serve(ctx)
}
