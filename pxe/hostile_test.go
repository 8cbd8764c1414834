package pxe

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/bound"
	"github.com/better-compute/site-appliance/pxe/pxetest"
	"github.com/better-compute/site-appliance/pxe/pxetest/fleet"
	"github.com/better-compute/site-appliance/pxe/pxev1"
	"github.com/better-compute/site-appliance/pxe/tftp/tftptest"
)

const (
	macEvil  = "52:54:00:00:66:66"
	evilNet  = "10.77.254."
	boxTFTP  = boxAddr + ":69"
	boxHTTP  = boxAddr + ":80"
	manyLine = 3000
)

// evil is a host on the machines' wire that does not mean well. It is an assigned
// machine itself, so that nothing is refused to it for being a stranger, and has
// addresses beside its own.
type evil struct {
	t    *testing.T
	host *pxetest.Host
	own  net.IP
	// held is the address of each victim, which booted before.
	held  map[string]net.IP
	wg    sync.WaitGroup
	sent  atomic.Int64
	conns []io.Closer
}

func (e *evil) keep(c io.Closer) { e.conns = append(e.conns, c) }

// udp is a socket at one of its addresses.
func (e *evil) udp(from string) *net.UDPConn {
	e.t.Helper()
	var conn *net.UDPConn
	e.host.Do(func() (err error) {
		conn, err = net.ListenUDP("udp4", &net.UDPAddr{IP: net.ParseIP(from)})
		return err
	})
	e.keep(conn)
	return conn
}

// tcp is a connection from one of its addresses, nil if there comes none.
func (e *evil) tcp(from string) net.Conn {
	var conn net.Conn
	if e.host.Try(func() (err error) {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}, Timeout: 2 * time.Second}
		conn, err = d.Dial("tcp4", boxHTTP)
		return err
	}) != nil {
		return nil
	}
	return conn
}

// others are addresses that no lease is of.
func (e *evil) others(n int) (all []string) {
	for i := range n {
		all = append(all, fmt.Sprint(evilNet, 1+i))
	}
	return all
}

// flood sends what next makes, as fast as it goes, until ctx ends.
func (e *evil) flood(ctx context.Context, conn *net.UDPConn, to string, next func(i uint32) []byte) {
	at := netip.MustParseAddrPort(to)
	e.wg.Go(func() {
		for i := uint32(0); ctx.Err() == nil; i++ {
			if _, err := conn.WriteToUDPAddrPort(next(i), at); err == nil {
				e.sent.Add(1)
			}
		}
	})
}

// dhcp floods with DISCOVERs of the MACs that edit writes.
func (e *evil) dhcp(ctx context.Context, kind dhcpv4.MessageType, edit func(mac []byte, i uint32)) {
	var conn *net.UDPConn
	e.host.Do(func() (err error) {
		conn, err = bound.ListenPacket(ctx, e.host.Iface, netip.MustParseAddrPort("0.0.0.0:6868"))
		return err
	})
	e.keep(conn)
	d, err := dhcpv4.New(append([]dhcpv4.Modifier{dhcpv4.WithMessageType(kind), dhcpv4.WithBroadcast(true), dhcpv4.WithHwAddr(make(net.HardwareAddr, 6))}, asUEFI...)...)
	if err != nil {
		e.t.Fatal(err)
	}
	b := d.ToBytes()
	e.flood(ctx, conn, "255.255.255.255:67", func(i uint32) []byte {
		const hardware = 28
		binary.BigEndian.PutUint32(b[4:], i)
		edit(b[hardware:hardware+6], i)
		return b
	})
}

func (e *evil) ether() (ether *fleet.Ether) {
	e.t.Helper()
	e.host.Do(func() (err error) {
		ether, err = fleet.OpenEther(e.host.Iface)
		return err
	})
	e.keep(ether)
	return ether
}

// frames floods with DHCP messages of which edit writes the rest: each comes from the
// Ethernet address that it names.
func (e *evil) frames(ctx context.Context, edit func(d *dhcpv4.DHCPv4, i uint32)) {
	ether := e.ether()
	d, err := dhcpv4.New(append([]dhcpv4.Modifier{dhcpv4.WithBroadcast(true), dhcpv4.WithHwAddr(make(net.HardwareAddr, 6))}, asUEFI...)...)
	if err != nil {
		e.t.Fatal(err)
	}
	e.wg.Go(func() {
		for i := uint32(0); ctx.Err() == nil; i++ {
			binary.BigEndian.PutUint32(d.TransactionID[:], 1<<31|i)
			edit(d, i)
			if ether.Broadcast(d.ClientHWAddr, d.ToBytes()) == nil {
				e.sent.Add(1)
			}
		}
	})
}

// madeUp is a MAC of so many that no memory of the box holds them all.
func madeUp(d *dhcpv4.DHCPv4, kind dhcpv4.MessageType, i uint32) {
	d.UpdateOption(dhcpv4.OptMessageType(kind))
	d.ClientHWAddr[0] = 2
	binary.BigEndian.PutUint32(d.ClientHWAddr[2:], i%(1<<16))
}

// asVictims floods in the victims' names and from their Ethernet addresses, by turns.
func (e *evil) asVictims(ctx context.Context, kind dhcpv4.MessageType, edit func(d *dhcpv4.DHCPv4, held net.IP)) {
	e.frames(ctx, func(d *dhcpv4.DHCPv4, i uint32) {
		d.UpdateOption(dhcpv4.OptMessageType(kind))
		d.ClientHWAddr = fleetMAC(victims[int(i)%len(victims)])
		edit(d, e.held[d.ClientHWAddr.String()])
	})
}

// http keeps conns connections from each address busy with talk, and opens them
// again when the box has closed them.
func (e *evil) http(ctx context.Context, from []string, conns int, talk func(ctx context.Context, c net.Conn)) {
	for _, addr := range from {
		for range conns {
			e.wg.Go(func() {
				for ctx.Err() == nil {
					if c := e.tcp(addr); c != nil {
						e.sent.Add(1)
						stop := context.AfterFunc(ctx, func() { c.Close() })
						talk(ctx, c)
						stop()
						c.Close()
					}
					select { // it shares the box's processors
					case <-ctx.Done():
					case <-time.After(250 * time.Millisecond):
					}
				}
			})
		}
	}
}

// wait ends with ctx or with the connection.
func wait(ctx context.Context, c net.Conn) {
	_, _ = io.Copy(io.Discard, c)
}

func request(path string, more ...string) string {
	return "GET " + path + " HTTP/1.1\r\nHost: " + boxAddr + "\r\n" + strings.Join(more, "") + "\r\n"
}

var evilPath = "/boot/" + strings.ReplaceAll(macEvil, ":", "-") + "/"

// attacks are what a machine can do that was taken over, or that somebody brought.
var attacks = []struct {
	name string
	// least is how often it must have happened, or the test says nothing.
	least int64
	run   func(ctx context.Context, e *evil)
	// forged says that it comes from the victims' own addresses, so that the box tells
	// nothing of it from them while it lasts: another machine boots then, and they do
	// when it has ended.
	forged bool
	// declines says that it makes the box believe that an address is in use.
	declines bool
}{
	{name: "DHCP of one MAC", least: 1000, run: func(ctx context.Context, e *evil) {
		e.dhcp(ctx, dhcpv4.MessageTypeDiscover, func(mac []byte, _ uint32) { copy(mac, []byte{2, 6, 6, 6, 6, 6}) })
	}},
	{name: "DHCP of made-up MACs", least: 1000, run: func(ctx context.Context, e *evil) {
		e.dhcp(ctx, dhcpv4.MessageTypeDiscover, func(mac []byte, i uint32) { mac[0] = 2; binary.BigEndian.PutUint32(mac[2:], i) })
	}},
	{name: "DHCP in the good machine's name", least: 1000, run: func(ctx context.Context, e *evil) {
		e.dhcp(ctx, dhcpv4.MessageTypeDiscover, func(mac []byte, _ uint32) { copy(mac, fleetMAC(bystander)) })
	}},
	{name: "DHCP in the good machine's name, declining", least: 1000, run: func(ctx context.Context, e *evil) {
		e.dhcp(ctx, dhcpv4.MessageTypeDecline, func(mac []byte, _ uint32) { copy(mac, fleetMAC(bystander)) })
	}},
	{name: "DHCP of made-up MACs, each from its own", least: 10000, run: func(ctx context.Context, e *evil) {
		e.frames(ctx, func(d *dhcpv4.DHCPv4, i uint32) { madeUp(d, dhcpv4.MessageTypeDiscover, i) })
	}},
	{name: "DHCP of made-up MACs that take every address", least: 10000, run: func(ctx context.Context, e *evil) {
		e.frames(ctx, func(d *dhcpv4.DHCPv4, i uint32) {
			madeUp(d, dhcpv4.MessageTypeRequest, i)
			d.UpdateOption(dhcpv4.OptRequestedIPAddress(net.IPv4(10, 77, 16+byte(i>>8)%8, byte(i))))
		})
	}},
	{name: "DHCP of made-up MACs that decline what they are offered", least: 10000, run: func(ctx context.Context, e *evil) {
		e.frames(ctx, func(d *dhcpv4.DHCPv4, i uint32) {
			madeUp(d, []dhcpv4.MessageType{dhcpv4.MessageTypeDiscover, dhcpv4.MessageTypeDecline}[i%2], i/2)
			d.UpdateOption(dhcpv4.OptRequestedIPAddress(net.IPv4(10, 77, 16+byte(i>>9)%8, byte(i>>1))))
		})
	}},
	{name: "DHCP from the victims' MACs", least: 10000, forged: true, run: func(ctx context.Context, e *evil) {
		e.asVictims(ctx, dhcpv4.MessageTypeDiscover, func(*dhcpv4.DHCPv4, net.IP) {})
	}},
	{name: "DHCP from the victims' MACs, declining", least: 10000, forged: true, declines: true, run: func(ctx context.Context, e *evil) {
		e.asVictims(ctx, dhcpv4.MessageTypeDecline, func(d *dhcpv4.DHCPv4, held net.IP) { d.UpdateOption(dhcpv4.OptRequestedIPAddress(held)) })
	}},
	{name: "DHCP from the victims' MACs, releasing", least: 10000, forged: true, run: func(ctx context.Context, e *evil) {
		e.asVictims(ctx, dhcpv4.MessageTypeRelease, func(d *dhcpv4.DHCPv4, held net.IP) { d.ClientIPAddr = held })
	}},
	{name: "TFTP requests from the victims' addresses", least: 10000, forged: true, run: func(ctx context.Context, e *evil) {
		ether, to := e.ether(), netip.MustParseAddrPort(boxTFTP)
		rrq := tftptest.Request(1, "snponly.efi", "octet", "blksize", "1468", "windowsize", "4")
		own, err := net.ParseMAC(macEvil)
		if err != nil {
			e.t.Fatal(err)
		}
		e.wg.Go(func() {
			for i := uint16(0); ctx.Err() == nil; i++ {
				for _, v := range victims {
					from, _ := netip.AddrFromSlice(e.held[fleetMAC(v).String()].To4())
					if ether.SendUDP(own, netip.AddrPortFrom(from, 1024+i%60000), to, rrq) == nil {
						e.sent.Add(1)
					}
				}
			}
		})
	}},
	{name: "TFTP with huge windows that nobody acknowledges", least: 100, run: func(ctx context.Context, e *evil) {
		for range 16 {
			conn := e.udp(e.own.String())
			e.wg.Go(func() {
				for n := 0; ctx.Err() == nil; n++ {
					if _, err := conn.WriteToUDPAddrPort(tftptest.Request(1, "snponly.efi", "octet", "blksize", "65464", "windowsize", "65535", "timeout", "255"), netip.MustParseAddrPort(boxTFTP)); err == nil {
						e.sent.Add(1)
					}
					time.Sleep(10 * time.Millisecond)
				}
			})
		}
	}},
	{name: "TFTP that acknowledges its options and then nothing", least: 16, run: func(ctx context.Context, e *evil) {
		for range 16 {
			conn := e.udp(e.own.String())
			e.wg.Go(func() {
				buf := make([]byte, 9000)
				_, _ = conn.WriteToUDPAddrPort(tftptest.Request(1, "snponly.efi", "octet", "blksize", "1468", "windowsize", "64"), netip.MustParseAddrPort(boxTFTP))
				for ctx.Err() == nil {
					_ = conn.SetReadDeadline(time.Now().Add(time.Second))
					n, from, err := conn.ReadFromUDPAddrPort(buf)
					if err == nil && n > 1 && buf[1] == 6 {
						_, _ = conn.WriteToUDPAddrPort([]byte{0, 4, 0, 0}, from)
					}
					e.sent.Add(1)
				}
			})
		}
	}},
	{name: "TFTP requests from many ports", least: 1000, run: func(ctx context.Context, e *evil) {
		var conns []*net.UDPConn
		for range 200 {
			conns = append(conns, e.udp(e.own.String()))
		}
		rrq := tftptest.Request(1, "snponly.efi", "octet", "blksize", "1468", "windowsize", "4")
		e.wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				if _, err := conns[i%len(conns)].WriteToUDPAddrPort(rrq, netip.MustParseAddrPort(boxTFTP)); err == nil {
					e.sent.Add(1)
				}
			}
		})
	}},
	{name: "TFTP requests from many addresses", least: 1000, run: func(ctx context.Context, e *evil) {
		var conns []*net.UDPConn
		for _, a := range e.others(100) {
			conns = append(conns, e.udp(a))
		}
		plain := tftptest.Request(1, "snponly.efi", "octet")
		e.wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				if _, err := conns[i%len(conns)].WriteToUDPAddrPort(plain, netip.MustParseAddrPort(boxTFTP)); err == nil {
					e.sent.Add(1)
				}
			}
		})
	}},
	{name: "HTTP that never ends its request", least: 100, run: func(ctx context.Context, e *evil) {
		e.http(ctx, append(e.others(100), e.own.String()), 11, func(ctx context.Context, c net.Conn) {
			if _, err := io.WriteString(c, "GET "+evilPath+"script.ipxe HTTP/1.1\r\n"); err != nil {
				return
			}
			wait(ctx, c)
		})
	}},
	{name: "HTTP connections that say nothing", least: 100, run: func(ctx context.Context, e *evil) {
		e.http(ctx, append(e.others(100), e.own.String()), 11, wait)
	}},
	{name: "HTTP that reads nothing of a large file", least: 10, run: func(ctx context.Context, e *evil) {
		e.http(ctx, append(e.others(100), e.own.String()), 11, func(ctx context.Context, c net.Conn) {
			if _, err := io.WriteString(c, strings.Repeat(request(evilPath+"snponly.efi"), 50)); err != nil {
				return
			}
			<-ctx.Done()
		})
	}},
	{name: "HTTP with broken ranges, over and over", least: 1000, run: func(ctx context.Context, e *evil) {
		e.http(ctx, []string{e.own.String()}, 4, func(ctx context.Context, c net.Conn) {
			go wait(ctx, c)
			for ctx.Err() == nil {
				if _, err := io.WriteString(c, request(evilPath+"snponly.efi", "Range: bytes=4294967296-1,9-,-\r\n")+request(evilPath+"snponly.efi", "Range: bytes=1-\r\n")); err != nil {
					return
				}
				e.sent.Add(2)
			}
		})
	}},
	{name: "HTTP for its script, over and over", least: 1000, run: func(ctx context.Context, e *evil) {
		e.http(ctx, []string{e.own.String()}, 4, func(ctx context.Context, c net.Conn) {
			go wait(ctx, c)
			for ctx.Err() == nil {
				if _, err := io.WriteString(c, request(evilPath+"script.ipxe")); err != nil {
					return
				}
				e.sent.Add(1)
			}
		})
	}},
	{name: "reports with wrong tokens", least: 1000, run: func(ctx context.Context, e *evil) {
		e.http(ctx, append(e.others(10), e.own.String()), 2, func(ctx context.Context, c net.Conn) {
			go wait(ctx, c)
			good := "/boot/" + strings.ReplaceAll(fleetMAC(bystander).String(), ":", "-") + "/"
			for i := 0; ctx.Err() == nil; i++ {
				path := evilPath
				if i%2 == 0 {
					path = good
				}
				if _, err := fmt.Fprintf(c, "POST %s%032x/done HTTP/1.1\r\nHost: %s\r\nContent-Length: 4\r\n\r\nhalf", path, i, boxAddr); err != nil {
					return
				}
				e.sent.Add(1)
			}
		})
	}},
	{name: "router solicitations, some in the good machine's name", least: 10000, run: func(ctx context.Context, e *evil) {
		good, evilMAC := macOf(fleetMAC(bystander).String()), macOf(macEvil)
		e.frames6(ctx, func(i uint32) []byte {
			who := made(i)
			if i%2 == 0 {
				who = good
			}
			b := frame6(who, "ff02::2", unix.IPPROTO_ICMPV6, 2, append([]byte{133, 7: 0, 8: 1, 9: 1}, who[:]...))
			copy(b[6:], evilMAC[:]) // what the good machine is sent must still find it
			return b
		})
	}},
	{name: "syslog", least: 1000, run: func(ctx context.Context, e *evil) {
		line := []byte("<30>ipxe: " + strings.Repeat("x", 900) + "\n")
		for _, from := range []string{e.own.String(), e.others(1)[0]} {
			e.flood(ctx, e.udp(from), boxAddr+":514", func(uint32) []byte { return line })
		}
	}},
}

// counted is a log that counts its lines.
type counted struct {
	slog.Handler
	lines *atomic.Int64
}

func (c counted) Handle(ctx context.Context, r slog.Record) error {
	c.lines.Add(1)
	return c.Handler.Handle(ctx, r)
}

func (c counted) WithAttrs(a []slog.Attr) slog.Handler {
	return counted{c.Handler.WithAttrs(a), c.lines}
}

// victims are the machines in whose names frames are forged: one with a lease, and
// one with an address of its own. bystander is another.
var victims = [2]int{1, 2}

const (
	bystander = 0
	reserved  = "10.77.30.1"
)

// TestHostile: whatever one host on the wire does, a good machine boots, from its
// first DISCOVER to its last report, and the box's log stays readable. Those whose
// very frames are forged boot afterwards, at the address that they had unless that
// was declined.
func TestHostile(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	hosts := pxetest.Switch(t, "box0", netip.MustParsePrefix(boxAddr+"/16"), macStranger, macEvil)
	for _, attack := range attacks {
		dir := t.TempDir()
		bootFiles(t, dir)
		lines := new(atomic.Int64)
		b := start(t, "box0", dir, func(c *Config) {
			wide(c)
			reporting(c)
			c.Log = slog.New(counted{slog.NewTextHandler(io.Discard, nil), lines})
		}, inWindow("w1")...)
		w, want := onWire(t, hosts[0], dir, netip.MustParsePrefix("10.77.255.1/16"))
		boots := func(when string, machine int) fleet.Result {
			t.Helper()
			ctx, stop := context.WithTimeout(t.Context(), time.Minute)
			defer stop()
			res, err := w.Boot(ctx, fleetMAC(machine), want)
			t.Logf("%s %s machine %d: %v, %s, %d DHCP messages again, %d log lines", when, attack.name, machine, err, res.Took.Round(time.Millisecond), res.Repeats, lines.Load())
			if err != nil {
				t.Errorf("%s %s: %v", when, attack.name, err)
			}
			return res
		}

		e := &evil{t: t, host: hosts[1], held: make(map[string]net.IP)}
		for _, v := range victims {
			if attack.forged {
				e.held[fleetMAC(v).String()] = boots("before", v).Address
			}
		}
		e.own = mustDORA(t, e.host, asUEFI).ACK.YourIPAddr
		e.host.Do(func() error {
			var batch strings.Builder
			for _, a := range append(e.others(100), "10.77.254.200/16") {
				fmt.Fprintln(&batch, "address add", a, "dev", e.host.Iface)
			}
			ip := exec.Command("ip", "-batch", "-")
			ip.Stdin = strings.NewReader(batch.String())
			if out, err := ip.CombinedOutput(); err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		})
		ctx, cancel := context.WithCancel(t.Context())
		attack.run(ctx, e)
		for end := time.Now().Add(20 * time.Second); e.sent.Load() < attack.least && time.Now().Before(end); {
			time.Sleep(10 * time.Millisecond)
		}
		before := e.sent.Load()
		boots("under", bystander)
		if before < attack.least {
			t.Errorf("%s came %d times: this proves nothing", attack.name, before)
		}
		if n := lines.Load(); n > manyLine {
			t.Errorf("%s makes %d lines of log, more than %d", attack.name, n, manyLine)
		}
		cancel()
		for _, c := range e.conns {
			c.Close()
		}
		e.wg.Wait()
		if attack.forged {
			if _, err := b.store.Apply(&pxev1.AssignRequest{Version: b.store.Version() + 1, Machines: inWindow("w2")}); err != nil {
				t.Fatal(err)
			}
		}
		for _, v := range victims {
			had := e.held[fleetMAC(v).String()]
			if had == nil {
				continue
			}
			if got := boots("after", v).Address; !got.Equal(had) && (!attack.declines || had.String() == reserved) {
				t.Errorf("after %s machine %d has %s, want %s as before", attack.name, v, got, had)
			}
		}
		w.Close()
		if err := b.stop(); err != nil {
			t.Errorf("after %s: Run = %v", attack.name, err)
		}
	}
}

// inWindow are the machines of the test.
func inWindow(window string) []*pxev1.Machine {
	all := append(fleetMachines(3), ramdisk(macEvil))
	all[victims[1]].Address = reserved
	for _, m := range all {
		m.WindowId = window
	}
	return all
}

// TestFloodLeavesMachinesTheirAddresses: made-up MACs that take all the addresses that
// they can leave an eighth of the pool to assigned machines, beside an address of its
// own. Of a network of BMCs, which nobody assigned, nothing is kept from them.
func TestFloodLeavesMachinesTheirAddresses(t *testing.T) {
	const machines, pool = 13, 100
	for _, tt := range []struct {
		name string
		bmc  bool
		kept int
	}{{"machines", false, pool / 8}, {"BMCs", true, 0}} {
		t.Run(tt.name, func(t *testing.T) {
			all := fleetMachines(machines + 1)
			all[machines].Address = "10.77.0.20"
			c := explainer(t, nil, all...)
			c.Interface, c.StateDir, c.Address, c.BMC = "box0", t.TempDir(), netip.MustParsePrefix(boxAddr+"/24"), tt.bmc
			c.RangeStart, c.RangeEnd = netip.MustParseAddr("10.77.0.100"), netip.MustParseAddr("10.77.0.199")
			s := &server{Config: *c}
			var err error
			if s.leases, err = s.openLeases(); err != nil {
				t.Fatal(err)
			}
			defer s.leases.Close()
			s.takeUp()
			took := func(mac string) bool {
				at, err := s.leases.Offer(localPool, mac, netip.Addr{})
				if err == nil {
					_, err = s.leases.Bind(localPool, mac, at, time.Hour)
				}
				return err == nil
			}
			strangers := 0
			for i := range 2 * pool {
				if took(fmt.Sprintf("02:00:00:00:00:%02x", i)) {
					strangers++
				}
			}
			if strangers != pool-tt.kept {
				t.Errorf("%d made-up MACs take an address, want %d", strangers, pool-tt.kept)
			}
			for i := range machines + 1 {
				if got, want := took(all[i].Macs[0]), i < tt.kept || i == machines; got != want {
					t.Errorf("machine %d finds an address: %v, want %v", i, got, want)
				}
			}
		})
	}
}
