package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/bound"
	"github.com/better-compute/site-appliance/appliance/site/netnstest"
	"github.com/better-compute/site-appliance/pxe/dhcp"
	"github.com/better-compute/site-appliance/pxe/lease"
	"github.com/better-compute/site-appliance/pxe/pxetest/fleet"
)

// dhcpSuite measures whole exchanges, DISCOVER to ACK, of PXE clients.
var dhcpSuite = suite{names: []string{"dhcp.dora", "dhcp.dora.dnsmasq"}, run: measureDHCP}

const (
	// dhcpClients boot in a round, dhcpFlight of them at a time, and each asks as
	// often as a machine does: in its firmware, in iPXE and in its system.
	dhcpClients = 5000
	dhcpPasses  = 3
	dhcpFlight  = 128
	// dnsmasq offers one address to many until one of them takes it: it is fastest
	// with one at a time.
	dnsmasqFlight = 1
	dhcpFile      = "snponly.efi"
)

var (
	dhcpBox   = netip.MustParsePrefix("10.77.0.1/16")
	dhcpFirst = netip.MustParseAddr("10.77.16.0")
	dhcpLast  = netip.MustParseAddr("10.77.63.255")
)

// measureDHCP has one load generator, ours, ask three servers in turn over the
// same wire between two namespaces: ours and dnsmasq, which keep every lease on
// the same disk, and a loop on the same codec that keeps a map.
func measureDHCP(ctx context.Context, s settings) (rows []row, err error) {
	dir, err := os.MkdirTemp(s.dir, "bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	if dir, err = filepath.Abs(dir); err != nil {
		return nil, err
	}
	dnsmasq, err := exec.LookPath("dnsmasq")
	if err != nil {
		fmt.Fprintln(s.log, "bench: dhcp.dora.dnsmasq is left out:", err)
	}
	fmt.Fprintln(s.log, "bench: dhcp: the load is the bench's own")
	err = withTB(func(tb testing.TB) error {
		box, far := netnstest.New(tb), netnstest.New(tb)
		box.Wire("box0", dhcpBox, far, "far0", netip.MustParsePrefix("10.77.0.2/16"))
		w := dhcpWorld{box: box, far: far, dir: dir, dnsmasq: dnsmasq}
		took := map[string][]float64{}
		for i := range s.rounds {
			for _, server := range []struct {
				name   string
				serve  func(ctx context.Context, round int) (stop func() error, err error)
				flight int
			}{{"ours", w.ours, dhcpFlight}, {"bare", w.bare, dhcpFlight}, {"dnsmasq", w.peer, dnsmasqFlight}} {
				if server.name == "dnsmasq" && dnsmasq == "" {
					continue
				}
				fmt.Fprintf(s.log, "bench: dhcp.dora of %s, round %d of %d\n", server.name, i+1, s.rounds)
				stop, err := server.serve(ctx, i)
				if err != nil {
					return fmt.Errorf("%s: %w", server.name, err)
				}
				speed, g, err := w.load(ctx, server.flight)
				if err = errors.Join(err, stop()); err != nil {
					return fmt.Errorf("%s: %w", server.name, err)
				}
				fmt.Fprintf(s.log, "bench: dhcp.dora of %s: %.0f a second, %d packets sent again, %d requests refused\n", server.name, speed, g.repeats, g.refused)
				took[server.name] = append(took[server.name], speed)
			}
		}
		ours := median(took["ours"])
		rows = append(rows, row{name: "dhcp.dora", ours: ours, unit: "exchanges/s", theirs: median(took["bare"]), goal: 0.7,
			peer: "a loop on the same codec that keeps nothing on disk"})
		if dnsmasq != "" {
			rows = append(rows, row{name: "dhcp.dora.dnsmasq", ours: ours, unit: "exchanges/s", theirs: median(took["dnsmasq"]), goal: 5,
				peer: "dnsmasq with its lease file, one client at a time, which it is fastest with"})
		}
		return nil
	})
	return rows, err
}

type dhcpWorld struct {
	box, far     *netnstest.Namespace
	dir, dnsmasq string
}

func (w *dhcpWorld) ours(ctx context.Context, round int) (func() error, error) {
	leases, err := lease.OpenDatabase(lease.Config{Path: filepath.Join(w.dir, fmt.Sprintf("ours-%d", round)),
		Pools: []lease.Pool{{Name: "lan", Subnet: dhcpBox.Masked(), First: dhcpFirst, Last: dhcpLast}},
		Known: func(string) bool { return false }})
	if err != nil {
		return nil, err
	}
	var server *dhcp.Server
	w.box.Do(func() {
		server, err = dhcp.Listen(ctx, dhcp.Config{Interface: "box0", Takeover: true, Leases: leases, Now: time.Now, Log: slog.New(slog.DiscardHandler),
			Local: dhcp.Subnet{Pool: "lan", Network: dhcpBox.Masked(), Server: dhcpBox.Addr()},
			Boot:  func(dhcp.Ask) string { return dhcpFile }})
	})
	if err != nil {
		return nil, errors.Join(err, leases.Close())
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- server.Serve(ctx) }()
	return func() error {
		cancel()
		return errors.Join(<-done, leases.Close())
	}, nil
}

// bare answers everybody with the next address.
func (w *dhcpWorld) bare(ctx context.Context, _ int) (func() error, error) {
	var conn *net.UDPConn
	var err error
	w.box.Do(func() { conn, err = bound.ListenPacket(ctx, "box0", netip.MustParseAddrPort("0.0.0.0:67")) })
	if err != nil {
		return nil, err
	}
	if err := conn.SetReadBuffer(1 << 20); err != nil {
		return nil, err
	}
	done := make(chan error, 1)
	go func() {
		leases := make(map[string]net.IP)
		next := binary.BigEndian.Uint32(dhcpFirst.AsSlice())
		own := net.IP(dhcpBox.Addr().AsSlice())
		buf := make([]byte, 2048)
		for {
			n, err := conn.Read(buf)
			if errors.Is(err, net.ErrClosed) {
				done <- nil
				return
			}
			if err != nil {
				done <- err
				return
			}
			req, err := dhcpv4.FromBytes(buf[:n])
			if err != nil {
				continue
			}
			kind := dhcpv4.MessageTypeOffer
			if req.MessageType() == dhcpv4.MessageTypeRequest {
				kind = dhcpv4.MessageTypeAck
			}
			mac := req.ClientHWAddr.String()
			ip := leases[mac]
			if ip == nil {
				ip = binary.BigEndian.AppendUint32(nil, next)
				leases[mac] = ip
				next++
			}
			reply, err := dhcpv4.NewReplyFromRequest(req, dhcpv4.WithMessageType(kind), dhcpv4.WithServerIP(own), dhcpv4.WithYourIP(ip),
				dhcpv4.WithOption(dhcpv4.OptServerIdentifier(own)), dhcpv4.WithNetmask(net.CIDRMask(16, 32)), dhcpv4.WithLeaseTime(3600),
				dhcpv4.WithOption(dhcpv4.OptRenewTimeValue(30*time.Minute)), dhcpv4.WithOption(dhcpv4.OptRebindingTimeValue(52*time.Minute)),
				dhcpv4.WithOption(dhcpv4.OptBroadcastAddress(net.IPv4(10, 77, 255, 255))), dhcpv4.WithOption(dhcpv4.OptBootFileName(dhcpFile)))
			if err != nil {
				done <- err
				return
			}
			reply.BootFileName = dhcpFile
			if _, err := conn.WriteToUDPAddrPort(reply.ToBytes(), netip.MustParseAddrPort("255.255.255.255:68")); err != nil && !errors.Is(err, net.ErrClosed) {
				done <- err
				return
			}
		}
	}()
	return func() error {
		conn.Close()
		return <-done
	}, nil
}

func (w *dhcpWorld) peer(ctx context.Context, round int) (func() error, error) {
	var said bytes.Buffer
	cmd := exec.CommandContext(ctx, w.dnsmasq, "--keep-in-foreground", "--conf-file=/dev/null", "--port=0", "--user=root", "--group=root", "--pid-file=",
		"--no-ping", "--no-resolv", "--no-hosts", "--quiet-dhcp", "--log-facility=-", "--interface=box0", "--bind-interfaces", "--dhcp-authoritative",
		"--dhcp-lease-max=20000", fmt.Sprintf("--dhcp-leasefile=%s/dnsmasq-%d", w.dir, round),
		fmt.Sprintf("--dhcp-range=%s,%s,255.255.0.0,1h", dhcpFirst, dhcpLast), "--dhcp-boot="+dhcpFile)
	cmd.Stdout, cmd.Stderr = &said, &said
	var err error
	w.box.Do(func() { err = cmd.Start() })
	if err != nil {
		return nil, err
	}
	stop := func() error {
		_ = cmd.Process.Kill()
		var exit *exec.ExitError
		if err := cmd.Wait(); err != nil && (!errors.As(err, &exit) || exit.Exited()) {
			return fmt.Errorf("dnsmasq: %w: %s", err, said.String())
		}
		return nil
	}
	// It serves once it has the port.
	for range 100 {
		if err := w.portTaken(ctx); err != nil {
			return stop, nil
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), stop())
		case <-time.After(50 * time.Millisecond):
		}
	}
	return nil, errors.Join(errors.New("dnsmasq does not open its port"), stop())
}

// portTaken is an error once somebody has port 67.
func (w *dhcpWorld) portTaken(ctx context.Context) (err error) {
	w.box.Do(func() {
		var conn *net.UDPConn
		if conn, err = bound.ListenPacket(ctx, "box0", netip.MustParseAddrPort("0.0.0.0:67")); err == nil {
			conn.Close()
		}
	})
	return err
}

// load boots all clients, pass after pass, and counts whole exchanges a second.
func (w *dhcpWorld) load(ctx context.Context, flight int) (speed float64, g *generator, err error) {
	var conn *net.UDPConn
	var wire *fleet.Ether
	w.far.Do(func() {
		if wire, err = fleet.OpenEther("far0"); err == nil {
			conn, err = bound.ListenPacket(ctx, "far0", netip.MustParseAddrPort("0.0.0.0:68"))
		}
	})
	if wire != nil {
		defer wire.Close()
	}
	if err != nil {
		return 0, nil, err
	}
	defer conn.Close()
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, nil, err
	}
	if cerr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20) }); cerr != nil || err != nil {
		return 0, nil, errors.Join(cerr, err)
	}
	g = &generator{conn: conn, wire: wire, clients: make([]bootingClient, dhcpClients), taken: make(map[uint32]int)}
	start := time.Now()
	for range dhcpPasses {
		if err := g.pass(ctx, flight, start.Add(5*time.Minute)); err != nil {
			return 0, nil, err
		}
	}
	return dhcpPasses * dhcpClients / time.Since(start).Seconds(), g, nil
}

// generator is many clients in one loop.
type generator struct {
	conn             *net.UDPConn
	wire             *fleet.Ether // each client sends from its own MAC
	clients          []bootingClient
	started, done    int // in this pass
	repeats, refused int
	taken            map[uint32]int // which client has an address
}

type bootingClient struct {
	packet []byte // the last that was sent
	at     time.Time
	waits  bool // for an answer
}

const (
	dhcpPatience = time.Second
	dhcpDiscover = 1
	dhcpOffer    = 2
	dhcpRequest  = 3
	dhcpAck      = 5
	dhcpNak      = 6
)

func (g *generator) pass(ctx context.Context, flight int, end time.Time) error {
	g.started, g.done = 0, 0
	for g.started < min(flight, len(g.clients)) {
		if err := g.begin(); err != nil {
			return err
		}
	}
	buf := make([]byte, 2048)
	checked := time.Now()
	for g.done < len(g.clients) {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err := g.conn.SetReadDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
			return err
		}
		n, err := g.conn.Read(buf)
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		if err == nil {
			if err := g.answer(buf[:n]); err != nil {
				return err
			}
		}
		if time.Since(checked) < dhcpPatience/4 {
			continue
		}
		checked = time.Now()
		if checked.After(end) {
			return fmt.Errorf("%d of %d clients got an address before the time was up", g.done, len(g.clients))
		}
		for i := range g.clients {
			if c := &g.clients[i]; c.waits && checked.Sub(c.at) >= dhcpPatience {
				g.repeats++
				if err := g.send(c, c.packet); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (g *generator) send(c *bootingClient, packet []byte) error {
	c.packet, c.at, c.waits = packet, time.Now(), true
	return g.wire.Broadcast(packet[28:34], packet)
}

func (g *generator) begin() error {
	i := g.started
	g.started++
	return g.send(&g.clients[i], bootRequest(i, dhcpDiscover, 0, 0))
}

// answer takes one reply; what is late or for nobody is left.
func (g *generator) answer(b []byte) error {
	if len(b) < 243 || b[0] != 2 {
		return nil
	}
	i := int(binary.BigEndian.Uint32(b[4:])) - 1
	if i < 0 || i >= len(g.clients) || !g.clients[i].waits {
		return nil
	}
	c := &g.clients[i]
	ip := binary.BigEndian.Uint32(b[16:])
	kind, server := byte(0), uint32(0)
	for o := b[240:]; len(o) >= 2 && o[0] != 255 && len(o) >= 2+int(o[1]); o = o[2+int(o[1]):] {
		switch {
		case o[0] == 53 && o[1] == 1:
			kind = o[2]
		case o[0] == 54 && o[1] == 4:
			server = binary.BigEndian.Uint32(o[2:])
		}
	}
	switch kind {
	case dhcpOffer:
		if c.packet[242] == dhcpRequest {
			return nil
		}
		return g.send(c, bootRequest(i, dhcpRequest, ip, server))
	case dhcpAck:
		if other, ok := g.taken[ip]; ok && other != i {
			return fmt.Errorf("clients %d and %d both got %x", other, i, ip)
		}
		g.taken[ip] = i
		c.waits = false
		g.done++
		if g.started < len(g.clients) {
			return g.begin()
		}
		return nil
	}
	if kind == dhcpNak {
		// dnsmasq may offer one address to two.
		g.refused++
		return g.send(c, bootRequest(i, dhcpDiscover, 0, 0))
	}
	return fmt.Errorf("client %d got message %d", i, kind)
}

// bootRequest is what UEFI's PXE sends, as a broadcast to be answered by one.
func bootRequest(i int, kind byte, ip, server uint32) []byte {
	b := make([]byte, 240, 320)
	b[0], b[1], b[2] = 1, 1, 6
	binary.BigEndian.PutUint32(b[4:], uint32(i)+1)
	b[10] = 0x80
	copy(b[28:], []byte{0x52, 0x54, 0x01, 0, byte(i >> 8), byte(i)})
	copy(b[236:], []byte{99, 130, 83, 99})
	b = append(b, 53, 1, kind, 57, 2, 5, 192)
	if kind == dhcpRequest {
		b = binary.BigEndian.AppendUint32(append(b, 50, 4), ip)
		b = binary.BigEndian.AppendUint32(append(b, 54, 4), server)
	}
	b = append(b, 55, 6, 1, 3, 6, 51, 66, 67, 93, 2, 0, 7, 94, 3, 1, 3, 0)
	class := "PXEClient:Arch:00007:UNDI:003000"
	b = append(append(b, 60, byte(len(class))), class...)
	b = append(b, 255)
	for len(b) < 300 {
		b = append(b, 0)
	}
	return b
}
