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

	"github.com/better-compute/site-appliance/appliance/base/bound"
	"github.com/better-compute/site-appliance/pxe/pxetest"
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
	t     *testing.T
	host  *pxetest.Host
	own   net.IP
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

// http keeps conns connections from each address busy with talk, and opens them
// again when the box has closed them.
func (e *evil) http(ctx context.Context, from []string, conns int, talk func(ctx context.Context, c net.Conn)) {
	for _, addr := range from {
		for range conns {
			e.wg.Go(func() {
				for ctx.Err() == nil {
					c := e.tcp(addr)
					if c == nil {
						select {
						case <-ctx.Done():
						case <-time.After(50 * time.Millisecond):
						}
						continue
					}
					e.sent.Add(1)
					stop := context.AfterFunc(ctx, func() { c.Close() })
					talk(ctx, c)
					stop()
					c.Close()
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
}{
	{"DHCP of one MAC", 1000, func(ctx context.Context, e *evil) {
		e.dhcp(ctx, dhcpv4.MessageTypeDiscover, func(mac []byte, _ uint32) { copy(mac, []byte{2, 6, 6, 6, 6, 6}) })
	}},
	{"DHCP of made-up MACs", 1000, func(ctx context.Context, e *evil) {
		e.dhcp(ctx, dhcpv4.MessageTypeDiscover, func(mac []byte, i uint32) { mac[0] = 2; binary.BigEndian.PutUint32(mac[2:], i) })
	}},
	{"DHCP in the good machine's name", 1000, func(ctx context.Context, e *evil) {
		e.dhcp(ctx, dhcpv4.MessageTypeDiscover, func(mac []byte, _ uint32) { copy(mac, fleetMAC(0)) })
	}},
	{"DHCP in the good machine's name, declining", 1000, func(ctx context.Context, e *evil) {
		e.dhcp(ctx, dhcpv4.MessageTypeDecline, func(mac []byte, _ uint32) { copy(mac, fleetMAC(0)) })
	}},
	{"TFTP with huge windows that nobody acknowledges", 100, func(ctx context.Context, e *evil) {
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
	{"TFTP that acknowledges its options and then nothing", 16, func(ctx context.Context, e *evil) {
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
	{"TFTP requests from many ports", 1000, func(ctx context.Context, e *evil) {
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
	{"TFTP requests from many addresses", 1000, func(ctx context.Context, e *evil) {
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
	{"HTTP that never ends its request", 100, func(ctx context.Context, e *evil) {
		e.http(ctx, append(e.others(100), e.own.String()), 11, func(ctx context.Context, c net.Conn) {
			if _, err := io.WriteString(c, "GET "+evilPath+"script.ipxe HTTP/1.1\r\n"); err != nil {
				return
			}
			wait(ctx, c)
		})
	}},
	{"HTTP connections that say nothing", 100, func(ctx context.Context, e *evil) {
		e.http(ctx, append(e.others(100), e.own.String()), 11, wait)
	}},
	{"HTTP that reads nothing of a large file", 10, func(ctx context.Context, e *evil) {
		e.http(ctx, append(e.others(100), e.own.String()), 11, func(ctx context.Context, c net.Conn) {
			if _, err := io.WriteString(c, strings.Repeat(request(evilPath+"snponly.efi"), 50)); err != nil {
				return
			}
			<-ctx.Done()
		})
	}},
	{"HTTP with broken ranges, over and over", 1000, func(ctx context.Context, e *evil) {
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
	{"HTTP for its script, over and over", 1000, func(ctx context.Context, e *evil) {
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
	{"reports with wrong tokens", 1000, func(ctx context.Context, e *evil) {
		e.http(ctx, append(e.others(10), e.own.String()), 2, func(ctx context.Context, c net.Conn) {
			go wait(ctx, c)
			good := "/boot/" + strings.ReplaceAll(fleetMAC(0).String(), ":", "-") + "/"
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
	{"syslog", 1000, func(ctx context.Context, e *evil) {
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

// TestHostile: whatever one host on the wire does, a good machine boots, from its
// first DISCOVER to its last report, and the box's log stays readable.
func TestHostile(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	run := func(args ...string) {
		t.Helper()
		if out, err := exec.CommandContext(t.Context(), "ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
	run("link", "add", "box0", "type", "bridge")
	run("address", "add", boxAddr+"/16", "dev", "box0")
	run("link", "set", "box0", "up")
	var hosts []*pxetest.Host
	for i, mac := range []string{macStranger, macEvil} {
		near := fmt.Sprintf("w%d", i)
		hosts = append(hosts, pxetest.Join(t, near, netip.MustParsePrefix(fmt.Sprintf("169.254.%d.1/30", i+1)), fmt.Sprintf("m%d", i), mac))
		run("address", "flush", "dev", near)
		run("link", "set", near, "master", "box0")
	}
	for _, attack := range attacks {
		dir := t.TempDir()
		bootFiles(t, dir)
		lines := new(atomic.Int64)
		b := start(t, "box0", dir, func(c *Config) {
			wide(c)
			reporting(c)
			c.Log = slog.New(counted{slog.NewTextHandler(io.Discard, nil), lines})
		}, append(fleetMachines(1), ramdisk(macEvil))...)
		w, want := onWire(t, hosts[0], dir, netip.MustParsePrefix("10.77.255.1/16"))

		e := &evil{t: t, host: hosts[1]}
		e.own = mustDORA(t, e.host, asUEFI).ACK.YourIPAddr
		e.host.Do(func() error {
			for _, a := range append(e.others(100), "10.77.254.200/16") {
				if !strings.Contains(a, "/") {
					a += "/32"
				}
				if out, err := exec.Command("ip", "address", "add", a, "dev", e.host.Iface).CombinedOutput(); err != nil {
					return fmt.Errorf("%w: %s", err, out)
				}
			}
			return nil
		})
		ctx, cancel := context.WithCancel(t.Context())
		attack.run(ctx, e)
		for end := time.Now().Add(20 * time.Second); e.sent.Load() < attack.least && time.Now().Before(end); {
			time.Sleep(10 * time.Millisecond)
		}
		boot, stop := context.WithTimeout(t.Context(), time.Minute)
		before := e.sent.Load()
		res, err := w.Boot(boot, fleetMAC(0), want)
		stop()
		t.Logf("under %s: %v, %s, %d DHCP messages again, %d log lines, %d of the attack", attack.name, err, res.Took.Round(time.Millisecond), res.Repeats, lines.Load(), e.sent.Load())
		if err != nil {
			t.Errorf("under %s: %v", attack.name, err)
		}
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
		w.Close()
		if err := b.stop(); err != nil {
			t.Errorf("after %s: Run = %v", attack.name, err)
		}
	}
}
