package arp

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
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/pxe/inet"
	"github.com/better-compute/site-appliance/pxe/lease"
	"github.com/better-compute/site-appliance/pxe/pxetest"
)

var t0 = time.Unix(1_800_000_000, 0)

func ip(last int) netip.Addr { return netip.AddrFrom4([4]byte{10, 77, byte(last >> 8), byte(last)}) }

func mac(i int) string { return fmt.Sprintf("52:54:00:00:%02x:%02x", i>>8, i&255) }

// sent are the addresses that are probed until the machine waits again.
func sent(m *machine, now time.Time) (all []netip.Addr) {
	for at, ok := m.due(now); ok; at, ok = m.due(now) {
		all = append(all, at)
	}
	return all
}

func TestAskedTwiceAndFirst(t *testing.T) {
	m := newMachine()
	m.idle(t0, ip(1), true)
	if got := sent(&m, t0); len(got) != 1 || got[0] != ip(1) {
		t.Errorf("probes = %v, want %s", got, ip(1))
	}
	m.offered(t0, ip(2), mac(1))
	m.offered(t0, ip(2), mac(1))
	if got := sent(&m, t0); len(got) != 1 || got[0] != ip(2) {
		t.Errorf("probes after an offer = %v, want %s at once", got, ip(2))
	}
	if got := sent(&m, t0.Add(spacing/2)); len(got) != 0 {
		t.Errorf("probes before the second is due = %v", got)
	}
	if got := m.wait(t0.Add(spacing / 2)); got <= 0 || got > spacing/2 {
		t.Errorf("wait = %s, want no longer than to the second probe", got)
	}
	if got := sent(&m, t0.Add(spacing)); len(got) != 2 {
		t.Errorf("second probes = %v, want both addresses", got)
	}
	if got := sent(&m, t0.Add(time.Hour)); len(got) != 0 {
		t.Errorf("third probes = %v, want none", got)
	}
	if len(m.asked) != 0 {
		t.Errorf("%d questions are open after an hour, want none", len(m.asked))
	}
}

func TestRate(t *testing.T) {
	m := newMachine()
	for i := range 5000 {
		m.offered(t0, ip(i), mac(i))
	}
	if len(m.asked) > maxAsked {
		t.Errorf("%d questions in memory, want at most %d", len(m.asked), maxAsked)
	}
	if got := len(sent(&m, t0)); got < rate || got > rate+1 {
		t.Errorf("a burst of %d probes, want %d", got, rate)
	}
	total := 0
	for i := range 100 {
		total += len(sent(&m, t0.Add(time.Duration(i)*50*time.Millisecond)))
	}
	if most := 5 * rate; total > most || total < most-2*rate {
		t.Errorf("%d probes in 5 seconds, want about %d", total, most)
	}
	if m.wantsIdle(t0.Add(time.Second)) {
		t.Error("the walk goes on while offers wait")
	}
}

func TestAnswers(t *testing.T) {
	m := newMachine()
	m.offered(t0, ip(1), mac(1))
	if got := m.answer(t0, ip(1), mac(9)); got != nothing {
		t.Errorf("an answer before the question = %v, want nothing", got)
	}
	m.idle(t0, ip(2), true)
	sent(&m, t0)
	for _, tt := range []struct {
		name string
		at   time.Duration
		ip   netip.Addr
		mac  string
		want verdict
	}{
		{"the machine that it is offered to", 0, ip(1), mac(1), nothing},
		{"another", 0, ip(1), mac(9), conflict},
		{"at a free address", answerTime, ip(2), mac(9), conflict},
		{"at an address that nobody asked for", 0, ip(3), mac(9), nothing},
		{"too late", answerTime + 1, ip(1), mac(9), nothing},
	} {
		if got := m.answer(t0.Add(tt.at), tt.ip, tt.mac); got != tt.want {
			t.Errorf("answer(%s) = %v, want %v", tt.name, got, tt.want)
		}
	}
}

func TestOneForAllIsNotBelieved(t *testing.T) {
	m := newMachine()
	now := t0
	var got [3]int
	for i := range 50 {
		m.offered(now, ip(i), mac(i))
		sent(&m, now)
		got[m.answer(now, ip(i), mac(999))]++
		now = now.Add(time.Second)
	}
	if want := [3]int{50 - perMAC - 1, perMAC, 1}; got != want {
		t.Errorf("answers of one MAC for 50 addresses: nothing, conflict, disbelieved = %v, want %v", got, want)
	}
	// The others still are, and it is again after an hour.
	m.offered(now, ip(100), mac(1))
	sent(&m, now)
	if v := m.answer(now, ip(100), mac(998)); v != conflict {
		t.Errorf("answer of another = %v, want a conflict", v)
	}
	now = now.Add(disbelief)
	m.offered(now, ip(101), mac(1))
	sent(&m, now)
	if v := m.answer(now, ip(101), mac(999)); v != conflict {
		t.Errorf("answer after an hour = %v, want a conflict", v)
	}
	// A machine with one address, found over and over, is no liar.
	m = newMachine()
	for range 100 {
		m.offered(now, ip(1), mac(1))
		sent(&m, now)
		if v := m.answer(now, ip(1), mac(997)); v != conflict {
			t.Fatalf("answer for one address, again = %v, want a conflict", v)
		}
		now = now.Add(10 * time.Minute)
	}
}

func TestAnswerersAreBounded(t *testing.T) {
	m := newMachine()
	now := t0
	for i := range 5 * maxAnswerer {
		m.offered(now, ip(i), "")
		sent(&m, now)
		if v := m.answer(now, ip(i), mac(i)); v != conflict {
			t.Fatalf("answer %d = %v, want a conflict", i, v)
		}
		now = now.Add(50 * time.Millisecond)
	}
	if len(m.answerers) > maxAnswerer {
		t.Errorf("%d answerers in memory, want at most %d", len(m.answerers), maxAnswerer)
	}
	m.due(now.Add(2 * memory))
	if len(m.answerers) != 0 {
		t.Errorf("%d answerers are remembered, want none", len(m.answerers))
	}
}

func reply(ip netip.Addr, mac net.HardwareAddr) []byte {
	b := probe(mac, netip.IPv4Unspecified())
	a := b[headerLen:]
	binary.BigEndian.PutUint16(a[6:], 2)
	copy(a[14:], ip.AsSlice())
	return b
}

func TestParseReply(t *testing.T) {
	hw := net.HardwareAddr{0x52, 0x54, 0, 0, 0, 1}
	change := func(f func(b []byte)) []byte {
		b := reply(ip(5), hw)
		f(b)
		return b
	}
	for _, tt := range []struct {
		name  string
		frame []byte
		ok    bool
	}{
		{"a reply", reply(ip(5), hw), true},
		{"without padding", reply(ip(5), hw)[:42], true},
		{"nothing", nil, false},
		{"cut", reply(ip(5), hw)[:41], false},
		{"a request", change(func(b []byte) { b[21] = 1 }), false},
		{"of another protocol", change(func(b []byte) { b[12] = 0x86 }), false},
		{"of another hardware", change(func(b []byte) { b[15] = 6 }), false},
		{"of long addresses", change(func(b []byte) { b[18] = 8 }), false},
		{"from nobody", reply(ip(5), make(net.HardwareAddr, 6)), false},
		{"from a group", reply(ip(5), net.HardwareAddr{1, 0, 0x5e, 0, 0, 1}), false},
		{"for no address", reply(netip.IPv4Unspecified(), hw), false},
		{"for a group", reply(netip.MustParseAddr("224.0.0.1"), hw), false},
	} {
		at, from, ok := parseReply(tt.frame)
		if ok != tt.ok || ok && (at != ip(5) || from.String() != hw.String()) {
			t.Errorf("parseReply(%s) = %s, %s, %v, want %v", tt.name, at, from, ok, tt.ok)
		}
	}
}

func TestProbeHasNoSender(t *testing.T) {
	hw := net.HardwareAddr{0x52, 0x54, 0, 0, 0, 1}
	want := append(append(bytes.Repeat([]byte{0xff}, 6), hw...), 8, 6, 0, 1, 8, 0, 6, 4, 0, 1)
	want = append(append(want, hw...), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 10, 77, 0, 5)
	if got := probe(hw, ip(5)); !bytes.Equal(got[:42], want) || len(got) != 60 {
		t.Errorf("probe = %x, want %x and padding", got, want)
	}
}

func FuzzParseReply(f *testing.F) {
	f.Add(reply(ip(5), net.HardwareAddr{0x52, 0x54, 0, 0, 0, 1}))
	f.Add(probe(net.HardwareAddr{0x52, 0x54, 0, 0, 0, 1}, ip(5)))
	f.Fuzz(func(t *testing.T, frame []byte) {
		at, from, ok := parseReply(frame)
		if !ok {
			return
		}
		again, mac, ok := parseReply(reply(at, from))
		if !ok || again != at || mac.String() != from.String() {
			t.Errorf("parseReply(%x) = %s, %s, which does not survive writing", frame, at, from)
		}
		m := newMachine()
		m.offered(t0, at, "")
		m.due(t0)
		if v := m.answer(t0, at, mac.String()); v != conflict {
			t.Errorf("an answer to a question is %v, want a conflict", v)
		}
	})
}

// lab is a prober on one end of a wire.
func lab(t *testing.T, n int) (*Prober, *lease.Database, *pxetest.Host, *findings) {
	host := pxetest.Join(t, "near0", netip.MustParsePrefix("10.77.0.1/24"), "far0", mac(1))
	leases, err := lease.OpenDatabase(lease.Config{Path: filepath.Join(t.TempDir(), "leases"), Pools: []lease.Pool{{
		Subnet: netip.MustParsePrefix("10.77.0.0/24"), First: ip(10), Last: ip(9 + n)}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { leases.Close() })
	found := &findings{news: make(chan struct{}, 1)}
	p, err := Listen(Config{Interface: "near0", Leases: leases, Found: found.add, Log: slog.New(slog.NewTextHandler(found, nil))})
	if err != nil {
		t.Fatal(err)
	}
	return p, leases, host, found
}

func serve(t *testing.T, p *Prober) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- p.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Serve = %v", err)
		}
	})
}

type findings struct {
	mu   sync.Mutex
	all  []Finding
	log  bytes.Buffer
	news chan struct{}
}

func (f *findings) add(got Finding) {
	f.mu.Lock()
	f.all = append(f.all, got)
	f.mu.Unlock()
	select {
	case f.news <- struct{}{}:
	default:
	}
}

func (f *findings) seen() []Finding {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]Finding(nil), f.all...)
}

func (f *findings) Write(b []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.log.Write(b)
}

func (f *findings) until(t *testing.T, ok func(all []Finding, log string) bool) {
	t.Helper()
	timeout := time.After(time.Minute)
	for {
		f.mu.Lock()
		done, all, log := ok(f.all, f.log.String()), len(f.all), f.log.String()
		f.mu.Unlock()
		if done {
			return
		}
		select {
		case <-f.news:
		case <-timeout:
			t.Fatalf("no such finding among %d:\n%s", all, log)
		}
	}
}

// TestOfferedNeverWaits: an offer waits neither for a socket that takes nothing more
// nor for a queue that is full.
func TestOfferedNeverWaits(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fds[1]) })
	for err == nil {
		_, err = unix.Write(fds[0], make([]byte, 42))
	}
	if !errors.Is(err, unix.EAGAIN) {
		t.Fatalf("fill the socket: %v", err)
	}
	leases, err := lease.OpenDatabase(lease.Config{Path: filepath.Join(t.TempDir(), "leases"), Pools: []lease.Pool{{First: ip(10), Last: ip(49)}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { leases.Close() })
	p := &Prober{cfg: Config{Leases: leases, Log: slog.New(slog.DiscardHandler)}, sock: os.NewFile(uintptr(fds[0]), "blocked"),
		offer: make(chan offer, 256), state: newMachine(), told: make(map[netip.Addr]time.Time)}
	serve(t, p)
	const offers = 10_000
	offered := make(chan struct{})
	go func() {
		defer close(offered)
		for i := range offers {
			p.Offered(ip(i%4096), mac(i%4096))
		}
	}()
	select {
	case <-offered:
	case <-time.After(time.Minute):
		t.Fatal("an offer waits for its probe")
	}
	if n := len(p.offer); n < cap(p.offer)-1 { // one may be in the prober's hands
		t.Errorf("%d offers wait to be probed, want a full queue of %d: the socket was not blocked", n, cap(p.offer))
	}
}

// TestFindsWhoAnswers: a machine with an address of its own choice, which the
// kernel answers for, loses nobody an offer.
func TestFindsWhoAnswers(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	p, leases, host, found := lab(t, 40)
	squatted := ip(12)
	host.SetAddress(netip.PrefixFrom(squatted, 24), netip.Addr{})
	// The offer goes out before any answer, and is void after it.
	if got, err := leases.Offer("", mac(50), squatted); err != nil || got != squatted {
		t.Fatalf("Offer = %s, %v", got, err)
	}
	serve(t, p)
	p.Offered(squatted, mac(50))
	found.until(t, func(all []Finding, _ string) bool {
		return len(all) > 0 && all[0] == Finding{Interface: "near0", Address: squatted, MAC: mac(1)}
	})
	if got, err := leases.Offer("", mac(50), squatted); err != nil || got == squatted {
		t.Errorf("Offer after the answer = %s, %v, want another address", got, err)
	}
	if _, err := leases.Bind("", mac(50), squatted, time.Hour); !errors.Is(err, lease.ErrConflict) {
		t.Errorf("Bind after the answer = %v, want ErrConflict", err)
	}
}

// TestWalkFindsBeforeAnyOffer: nobody asked for an address yet.
func TestWalkFindsBeforeAnyOffer(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	p, leases, host, found := lab(t, 8)
	host.SetAddress(netip.PrefixFrom(ip(14), 24), netip.Addr{})
	serve(t, p)
	found.until(t, func(all []Finding, _ string) bool { return len(all) > 0 && all[0].Address == ip(14) })
	if got, err := leases.Offer("", mac(50), ip(14)); err != nil || got == ip(14) {
		t.Errorf("Offer = %s, %v, want another address than the one that answers", got, err)
	}
}

// TestOwnAnswerIsNoConflict: a machine whose firmware still has its address up
// asks again.
func TestOwnAnswerIsNoConflict(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	p, leases, host, found := lab(t, 8)
	host.SetAddress(netip.PrefixFrom(ip(12), 24), netip.Addr{})
	if got, err := leases.Offer("", mac(1), ip(12)); err != nil || got != ip(12) {
		t.Fatalf("Offer = %s, %v", got, err)
	}
	answers := sniff(t, host)
	serve(t, p)
	p.Offered(ip(12), mac(1))
	select {
	case <-answers:
	case <-t.Context().Done():
		t.Fatal("the machine was never asked")
	}
	host.Do(func() error { return squat(host.Iface, func(at netip.Addr) bool { return at == ip(13) }, mac(9)) })
	found.until(t, func(all []Finding, _ string) bool { return len(all) > 0 })
	if got := found.seen(); got[0].Address != ip(13) {
		t.Errorf("finding = %v, want only the other machine's", got[0])
	}
	if got, err := leases.Offer("", mac(1), netip.Addr{}); err != nil || got != ip(12) {
		t.Errorf("Offer = %s, %v, want %s again", got, err, ip(12))
	}
}

// TestHostileAnswererLosesThePool: one that claims every address is found out,
// and what it took comes back.
func TestHostileAnswererLosesThePool(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	p, leases, host, found := lab(t, 80)
	host.Do(func() error { return squat(host.Iface, func(netip.Addr) bool { return true }, mac(9)) })
	serve(t, p)
	found.until(t, func(all []Finding, log string) bool {
		return len(all) > 0 && all[len(all)-1].Disbelieved && strings.Contains(log, "look for proxy ARP, or for an attacker")
	})
	if got := len(found.seen()); got != perMAC+1 {
		t.Errorf("%d findings, want %d and that it is not believed", got, perMAC)
	}
	for i := range 80 {
		if _, err := leases.Offer("", mac(100+i), netip.Addr{}); err != nil {
			t.Fatalf("Offer %d of 80 after the lies = %v", i+1, err)
		}
	}
}

// sniff hears probes at the far end.
func sniff(t *testing.T, host *pxetest.Host) <-chan netip.Addr {
	heard := make(chan netip.Addr, 1)
	var sock *os.File
	host.Do(func() (err error) { sock, err = rawSocket(host.Iface); return err })
	t.Cleanup(func() { sock.Close() })
	go func() {
		buf := make([]byte, 128)
		for {
			n, err := sock.Read(buf)
			if err != nil {
				return
			}
			if n >= 42 && buf[21] == 1 && netip.AddrFrom4([4]byte(buf[38:42])) == ip(12) {
				select {
				case heard <- ip(12):
				default:
				}
			}
		}
	}()
	return heard
}

func rawSocket(iface string) (*os.File, error) {
	i, err := net.InterfaceByName(iface)
	if err != nil {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: inet.HostToNet(unix.ETH_P_ARP), Ifindex: i.Index}); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), "arp"), nil
}

// squat answers as mac for the addresses that it likes, until the process ends.
func squat(iface string, likes func(netip.Addr) bool, as string) error {
	sock, err := rawSocket(iface)
	if err != nil {
		return err
	}
	hw, err := net.ParseMAC(as)
	if err != nil {
		return err
	}
	go func() {
		buf := make([]byte, 128)
		for {
			n, err := sock.Read(buf)
			if err != nil {
				return
			}
			if at := netip.AddrFrom4([4]byte(buf[38:42])); n >= 42 && buf[21] == 1 && likes(at) {
				if _, err := sock.Write(reply(at, hw)); err != nil {
					return
				}
			}
		}
	}()
	return nil
}

func TestListenRefuses(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	for iface, want := range map[string]string{"nothing0": "arp: interface nothing0", "lo": "arp: interface lo is no Ethernet"} {
		if _, err := Listen(Config{Interface: iface}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Listen(%s) = %v, want %q", iface, err, want)
		}
	}
}

// TestInterfaceGone: the prober ends with an error, so that whoever runs it starts
// it again.
func TestInterfaceGone(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	p, _, host, _ := lab(t, 8)

	done := make(chan error, 1)
	go func() { done <- p.Serve(t.Context()) }()
	host.Do(func() error {
		out, err := exec.Command("ip", "link", "delete", host.Iface).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	select {
	case err := <-done:
		if err == nil {
			t.Error("Serve without its interface = nil, want an error")
		}
	case <-time.After(time.Minute):
		t.Error("Serve goes on without its interface")
	}
}
