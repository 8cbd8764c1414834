package pxe

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"
	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/pxe/dhcp6"
	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/inet"
	"github.com/better-compute/site-appliance/pxe/pxetest"
	"github.com/better-compute/site-appliance/pxe/pxetest/fleet"
	"github.com/better-compute/site-appliance/pxe/pxev1"
	"github.com/better-compute/site-appliance/pxe/tftp/tftptest"
)

var (
	boxTFTP6 = netip.MustParseAddrPort("[" + boxAddr6 + "]:69")
	boxHTTP6 = netip.MustParseAddrPort("[" + boxAddr6 + "]:80")
)

// frame6 is a packet of IPv6 to all of a multicast group, whose checksum stands at
// check in it.
func frame6(mac [6]byte, to string, next byte, check int, payload []byte) []byte {
	const ether, ip = 14, 40
	b := make([]byte, ether+ip+len(payload))
	src, dst := linkLocalOf(mac).As16(), netip.MustParseAddr(to).As16()
	copy(b, append([]byte{0x33, 0x33}, dst[12:]...))
	copy(b[6:], mac[:])
	binary.BigEndian.PutUint16(b[12:], unix.ETH_P_IPV6)
	b[ether] = 0x60
	binary.BigEndian.PutUint16(b[ether+4:], uint16(len(payload)))
	b[ether+6], b[ether+7] = next, 255
	copy(b[ether+8:], src[:])
	copy(b[ether+24:], dst[:])
	body := b[ether+ip:]
	copy(body, payload)
	binary.BigEndian.PutUint16(body[check:], ^inet.Sum(uint32(inet.Sum(uint32(next)+uint32(len(payload)), b[ether+8:ether+ip])), body))
	return b
}

func linkLocalOf(mac [6]byte) netip.Addr {
	return netip.AddrFrom16([16]byte{0xfe, 0x80, 8: mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]})
}

// message6 is a DHCPv6 message from mac, as a frame.
func message6(mac [6]byte, m *dhcpv6.Message) []byte {
	data := m.ToBytes()
	udp := make([]byte, 8, 8+len(data))
	binary.BigEndian.PutUint16(udp, 546)
	binary.BigEndian.PutUint16(udp[2:], 547)
	binary.BigEndian.PutUint16(udp[4:], uint16(8+len(data)))
	return frame6(mac, "ff02::1:2", unix.IPPROTO_UDP, 6, append(udp, data...))
}

// asks6 is a message of a machine about its address of a generation.
func (e *evil) asks6(kind dhcpv6.MessageType, mac [6]byte, generation uint16, more ...dhcpv6.Option) *dhcpv6.Message {
	m := &dhcpv6.Message{MessageType: kind, TransactionID: dhcpv6.TransactionID{1, 2, 3}}
	na := &dhcpv6.OptIANA{IaId: [4]byte{1}}
	na.Options.Add(&dhcpv6.OptIAAddress{IPv6Addr: dhcp6.AddressOf(boxNet6, mac, generation).AsSlice()})
	for _, o := range append([]dhcpv6.Option{dhcpv6.OptClientID(&dhcpv6.DUIDLL{HWType: iana.HWTypeEthernet, LinkLayerAddr: mac[:]}), na}, more...) {
		m.AddOption(o)
	}
	return m
}

// frames6 floods with frames, as fast as it goes, until ctx ends.
func (e *evil) frames6(ctx context.Context, next func(i uint32) []byte) {
	var ether *fleet.Ether
	e.host.Do(func() (err error) {
		ether, err = fleet.OpenEther(e.host.Iface)
		return err
	})
	e.keep(ether)
	e.wg.Go(func() {
		for i := uint32(0); ctx.Err() == nil; i++ {
			if ether.Frame(next(i)) == nil {
				e.sent.Add(1)
			}
		}
	})
}

// made is a MAC that nobody has.
func made(i uint32) (mac [6]byte) {
	mac[0] = 2
	binary.BigEndian.PutUint32(mac[2:], i)
	return mac
}

// server6 is the box's identifier.
func server6(t *testing.T) dhcpv6.Option {
	t.Helper()
	i, err := net.InterfaceByName("box0")
	if err != nil {
		t.Fatal(err)
	}
	return dhcpv6.OptServerID(&dhcpv6.DUIDLL{HWType: iana.HWTypeEthernet, LinkLayerAddr: i.HardwareAddr})
}

var rapid6 = &dhcpv6.OptionGeneric{OptionCode: dhcpv6.OptionRapidCommit}

// others6 are addresses of the network beside its own: of machines that were made up,
// and every fourth of a generation that is not given.
func (e *evil) others6() (all []string) {
	for i := range uint32(inventions) {
		generation := uint16(0)
		if i%4 == 0 {
			generation = 7
		}
		all = append(all, dhcp6.AddressOf(boxNet6, made(i), generation).String())
	}
	return all
}

// inventions are as many machines as it has addresses.
const inventions = 60

// udp6 is a socket at one of its addresses.
func (e *evil) udp6(from string) *net.UDPConn {
	e.t.Helper()
	var conn *net.UDPConn
	e.host.Do(func() (err error) {
		conn, err = net.ListenUDP("udp6", &net.UDPAddr{IP: net.ParseIP(from)})
		return err
	})
	e.keep(conn)
	return conn
}

// from6 sends a datagram from each of many addresses, over and over.
func (e *evil) from6(ctx context.Context, port uint16, data []byte) {
	var conns []*net.UDPConn
	for _, a := range e.others6() {
		conns = append(conns, e.udp6(a))
	}
	e.wg.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			if _, err := conns[i%len(conns)].WriteToUDPAddrPort(data, netip.AddrPortFrom(boxTFTP6.Addr(), port)); err == nil {
				e.sent.Add(1)
			}
		}
	})
}

// http6 keeps 24 connections from each of many addresses busy: those of machines that
// were given addresses are more than the box has places for.
func (e *evil) http6(ctx context.Context, talk func(c net.Conn, machine string)) {
	for i, a := range e.others6() {
		mac := made(uint32(i))
		machine := strings.ReplaceAll(net.HardwareAddr(mac[:]).String(), ":", "-")
		for range 24 {
			e.wg.Go(func() {
				for ctx.Err() == nil {
					var c net.Conn
					err := e.host.Try(func() (err error) {
						d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(a)}, Timeout: 2 * time.Second}
						c, err = d.DialContext(ctx, "tcp6", boxHTTP6.String())
						return err
					})
					if err == nil {
						e.sent.Add(1)
						stop := context.AfterFunc(ctx, func() { c.Close() })
						talk(c, machine)
						stop()
						c.Close()
					}
					select {
					case <-ctx.Done():
					case <-time.After(500 * time.Millisecond):
					}
				}
			})
		}
	}
}

// bind has the box give addresses to the machines of http6.
func (e *evil) bind(ctx context.Context) {
	e.frames6(ctx, func(i uint32) []byte {
		time.Sleep(time.Millisecond)
		mac := made(i % inventions)
		return message6(mac, e.asks6(dhcpv6.MessageTypeSolicit, mac, 0, rapid6))
	})
}

// attacks6 are what a host can do over IPv6.
var attacks6 = []struct {
	name  string
	least int64
	run   func(ctx context.Context, e *evil)
	// forged says that it comes from the victim's own Ethernet address: that one boots
	// when it has ended, and another meanwhile.
	forged bool
}{
	{name: "SOLICITs of made-up MACs, each from its own", least: 10000, run: func(ctx context.Context, e *evil) {
		e.frames6(ctx, func(i uint32) []byte {
			return message6(made(i), e.asks6(dhcpv6.MessageTypeSolicit, made(i), 0, asUEFI6...))
		})
	}},
	{name: "made-up MACs that take addresses", least: 10000, run: func(ctx context.Context, e *evil) {
		e.frames6(ctx, func(i uint32) []byte {
			return message6(made(i), e.asks6(dhcpv6.MessageTypeSolicit, made(i), 0, append(asUEFI6, rapid6)...))
		})
	}},
	{name: "made-up MACs that take addresses and decline them", least: 10000, run: func(ctx context.Context, e *evil) {
		server := server6(e.t)
		e.frames6(ctx, func(i uint32) []byte {
			mac := made(i / 2)
			if i%2 == 0 {
				return message6(mac, e.asks6(dhcpv6.MessageTypeSolicit, mac, 0, rapid6))
			}
			return message6(mac, e.asks6(dhcpv6.MessageTypeDecline, mac, 0, server))
		})
	}},
	{name: "router solicitations", least: 10000, run: func(ctx context.Context, e *evil) {
		e.frames6(ctx, func(i uint32) []byte { return frame6(made(i), "ff02::2", unix.IPPROTO_ICMPV6, 2, []byte{133, 7: 0}) })
	}},
	{name: "DECLINE and RELEASE in a good machine's name", least: 10000, run: func(ctx context.Context, e *evil) {
		server, good := server6(e.t), macOf(macDisk)
		e.frames6(ctx, func(i uint32) []byte {
			kind := dhcpv6.MessageTypeDecline
			if i%2 == 0 {
				kind = dhcpv6.MessageTypeRelease
			}
			return message6(macOf(macEvil), e.asks6(kind, good, 0, server))
		})
	}},
	{name: "DECLINE and RELEASE from the victim's MAC", least: 10000, forged: true, run: func(ctx context.Context, e *evil) {
		server, victim := server6(e.t), macOf(macRAM)
		e.frames6(ctx, func(i uint32) []byte {
			switch i % 3 {
			case 0:
				return message6(victim, e.asks6(dhcpv6.MessageTypeSolicit, victim, 0, rapid6))
			case 1:
				return message6(victim, e.asks6(dhcpv6.MessageTypeRelease, victim, 0, server))
			}
			return message6(victim, e.asks6(dhcpv6.MessageTypeDecline, victim, uint16(i/3%64), server))
		})
	}},
	{name: "TFTP requests from many addresses", least: 10000, run: func(ctx context.Context, e *evil) {
		e.bind(ctx)
		e.from6(ctx, 69, tftptest.Request(1, "snponly.efi", "octet"))
	}},
	{name: "syslog from many addresses", least: 10000, run: func(ctx context.Context, e *evil) {
		e.bind(ctx)
		e.from6(ctx, 514, []byte("<30>ipxe: "+strings.Repeat("x", 900)+"\n"))
	}},
	{name: "HTTP connections that say nothing, from many addresses", least: 1000, run: func(ctx context.Context, e *evil) {
		e.bind(ctx)
		e.http6(ctx, func(c net.Conn, _ string) { wait(ctx, c) })
	}},
	{name: "HTTP that reads nothing, by strangers who are given files", least: 1000, run: func(ctx context.Context, e *evil) {
		e.bind(ctx)
		var served atomic.Int64
		e.http6(ctx, func(c net.Conn, machine string) {
			ask := "GET /boot/" + machine + "/snponly.efi HTTP/1.1\r\nHost: box\r\n\r\n"
			_, err := io.WriteString(c, strings.Repeat(ask, 50))
			status := make([]byte, len("HTTP/1.1 200"))
			if _, short := io.ReadFull(c, status); err == nil && short == nil && string(status[9:]) == "200" {
				served.Add(1)
				<-ctx.Done()
			}
		})
		// They have all that they get.
		for last := int64(-1); served.Load() != last; time.Sleep(2 * time.Second) {
			last = served.Load()
		}
	}},
}

func macOf(text string) [6]byte {
	hw, err := net.ParseMAC(text)
	if err != nil {
		panic(err)
	}
	return [6]byte(hw)
}

// TestHostileIPv6: whatever one host on the wire does over IPv6, a good machine gets
// its address, its boot program, its script and its kernel over IPv6, and the box's log
// stays readable. The one whose very frames are forged does so afterwards: no DECLINE
// shuts it out.
func TestHostileIPv6(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	hosts := pxetest.Switch(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), macRAM, macDisk, macEvil)
	if out, err := exec.CommandContext(t.Context(), "ip", "address", "add", boxNet6.String(), "dev", "box0", "nodad").CombinedOutput(); err != nil {
		t.Fatalf("ip address add: %v: %s", err, out)
	}
	pxetest.WaitLinkLocal(t, "box0")
	for _, h := range hosts {
		h.WaitLinkLocal()
	}
	evilHost := hosts[2]
	e := &evil{t: t, host: evilHost}
	for _, a := range e.others6() {
		evilHost.AddAddress(netip.PrefixFrom(netip.MustParseAddr(a), 64))
	}
	for _, attack := range attacks6 {
		dir := t.TempDir()
		content := bootFiles(t, dir)
		lines := new(atomic.Int64)
		other := ramdisk(macDisk)
		other.MachineId = "node_b"
		b := start(t, "box0", dir, func(c *Config) {
			c.IPv6.Address = boxNet6
			c.Log = slog.New(counted{slog.NewTextHandler(io.Discard, nil), lines})
		}, ramdisk(macRAM), other)
		if _, err := b.store.Apply(&pxev1.AssignRequest{Version: b.store.Version() + 1, Machines: b.store.Machines(),
			Unknown: &pxev1.Unknown{Inspect: true, WindowId: "u1", WindowUntilMs: time.Now().Add(time.Hour).UnixMilli()}}); err != nil {
			t.Fatal(err)
		}
		boots := func(when string, h *pxetest.Host, mac string) netip.Addr {
			t.Helper()
			began := time.Now()
			ip, url := sarr(t, h, asUEFI6...)
			if url != "tftp://[fd00:77::1]/snponly.efi" {
				t.Errorf("%s %s: %q", when, attack.name, url)
			}
			if got, err := fetchTFTP6(h, "snponly.efi", 4); err != nil || !bytes.Equal(got, content[files.UEFILoader]) {
				t.Errorf("%s %s: TFTP = %d bytes, %v", when, attack.name, len(got), err)
			}
			b.wait(t, 20*time.Second, "{MAC:"+mac+" MachineID:"+map[string]string{macRAM: "node_a", macDisk: "node_b"}[mac]+" Stage:tftp ")
			now, url := sarr(t, h, asIPXE6...)
			if want := "http://[fd00:77::1]/boot/" + strings.ReplaceAll(mac, ":", "-") + "/script.ipxe"; url != want || now != ip {
				t.Errorf("%s %s: iPXE has %s and %q, want %s and %q", when, attack.name, now, url, ip, want)
			}
			for word := range strings.FieldsSeq(string(mustGet6(t, h, url))) {
				if strings.HasSuffix(word, "/vmlinuz") && !bytes.Equal(mustGet6(t, h, word), content[files.Kernel]) {
					t.Errorf("%s %s: not the kernel", when, attack.name)
				}
			}
			t.Logf("%s %s: %s in %s, %d log lines", when, attack.name, mac, time.Since(began).Round(time.Millisecond), lines.Load())
			return ip
		}
		e := &evil{t: t, host: evilHost}
		ctx, cancel := context.WithCancel(t.Context())
		attack.run(ctx, e)
		for end := time.Now().Add(20 * time.Second); e.sent.Load() < attack.least && time.Now().Before(end); {
			time.Sleep(10 * time.Millisecond)
		}
		if before := e.sent.Load(); before < attack.least {
			t.Errorf("%s came %d times: this proves nothing", attack.name, before)
		}
		ip := boots("under", hosts[1], macDisk)
		if n := lines.Load(); n > manyLine {
			t.Errorf("%s makes %d lines of log, more than %d", attack.name, n, manyLine)
		}
		cancel()
		for _, c := range e.conns {
			c.Close()
		}
		e.wg.Wait()
		hosts[1].DropAddress(netip.PrefixFrom(ip, 64))
		if attack.forged {
			ip := boots("after", hosts[0], macRAM)
			hosts[0].DropAddress(netip.PrefixFrom(ip, 64))
			if ip == dhcp6.AddressOf(boxNet6, macOf(macRAM), 0) {
				t.Errorf("%s is not believed: this proves nothing", attack.name)
			}
		}
		if err := b.stop(); err != nil {
			t.Errorf("after %s: Run = %v", attack.name, err)
		}
	}
}
