package pxe

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"

	"github.com/better-compute/site-appliance/pxe/dhcp"
	"github.com/better-compute/site-appliance/pxe/pxetest"
)

// TestRunSlowPorts: a switch with the spanning tree protocol, the kernel's own, lets
// nothing through a port whose link has just come. A machine behind such a port asks
// on and boots. A box behind one does not hear the server that is there already; once
// it does, within its first minute, it stops serving. Built: no capture has it.
func TestRunSlowPorts(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir)
	sw := pxetest.Join(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), "p0", macThird)
	m := sw.Join("p1", netip.MustParsePrefix("169.254.1.1/30"), "m0", macRAM)
	leaser := sw.Join("p2", netip.MustParsePrefix("169.254.2.1/30"), "m1", macOther)
	run := func(line string) string {
		t.Helper()
		var out []byte
		sw.Do(func() (err error) {
			if out, err = exec.Command("ip", strings.Fields(line)...).CombinedOutput(); err != nil {
				return fmt.Errorf("ip %s: %w: %s", line, err, out)
			}
			return nil
		})
		return string(out)
	}
	// A port stands still for twice as many hundredths of a second.
	run("link add name sw0 type bridge stp_state 1 forward_delay 200")
	for _, port := range []string{"p0", "p1", "p2"} {
		run("address flush dev " + port)
		run("link set " + port + " master sw0")
	}
	run("link set sw0 up")
	flap := func(port string) {
		t.Helper()
		run("link set " + port + " down")
		run("link set " + port + " up")
	}
	state := func(port string) string {
		t.Helper()
		_, after, _ := strings.Cut(run("-d link show "+port), "bridge_slave state ")
		word, _, _ := strings.Cut(after, " ")
		return word
	}
	forwards := func(port string) {
		t.Helper()
		for range 1200 {
			if state(port) == "forwarding" {
				return
			}
			time.Sleep(50 * time.Millisecond)
		}
		t.Fatalf("port %s is %s", port, state(port))
	}
	for _, port := range []string{"p0", "p1", "p2"} {
		forwards(port)
	}

	var cfg Config
	b := start(t, "box0", dir, func(c *Config) { cfg = *c }, ramdisk(macRAM))
	flap("p1")
	if got := state("p1"); got == "forwarding" {
		t.Errorf("the port is %s at once: the test would show nothing", got)
	}
	var lease *nclient4.Lease
	m.Do(func() error {
		c, err := nclient4.New("m0", nclient4.WithTimeout(time.Second), nclient4.WithRetry(30))
		if err != nil {
			return err
		}
		defer c.Close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		lease, err = c.Request(ctx, append(asUEFI[:len(asUEFI):len(asUEFI)], dhcpv4.WithBroadcast(true))...)
		return err
	})
	if got := lease.ACK.BootFileName; got != "snponly.efi" {
		t.Errorf("behind a slow port the machine is told %q, want its loader", got)
	}
	ip, _ := netip.AddrFromSlice(lease.ACK.YourIPAddr.To4())
	m.SetAddress(netip.PrefixFrom(ip, 24), netip.Addr{})
	if _, err := fetchTFTP(m, "snponly.efi"); err != nil {
		t.Errorf("TFTP behind what was a slow port: %v", err)
	}
	if err := b.stop(); err != nil {
		t.Fatalf("Run = %v, want nil", err)
	}

	// Twice as long as the box listens before it serves.
	leaser.SetAddress(netip.MustParsePrefix("10.77.0.2/24"), netip.Addr{})
	leaser.Leasing(leasing)
	run("link set sw0 type bridge forward_delay 900")
	log := &record{}
	cfg.Takeover, cfg.Log = false, slog.New(slog.NewTextHandler(log, nil))
	flap("p0")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	err := Run(ctx, cfg)
	if other := new(dhcp.ForeignError); !errors.As(err, &other) || other.Foreign.Server.String() != "10.77.0.2" {
		t.Errorf("Run behind a slow port beside another = %v, want a *dhcp.ForeignError that names 10.77.0.2", err)
	}
	if !strings.Contains(strings.Join(log.lines(), "\n"), "network boot is served") {
		t.Error("the other server was heard at the start: the test shows nothing of slow ports")
	}
}
