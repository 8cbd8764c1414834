package pxe

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"golang.org/x/net/ipv6"

	"github.com/better-compute/site-appliance/pxe/dhcp"
	"github.com/better-compute/site-appliance/pxe/pxetest"
)

// TestIPXEWaitsForNoRouter: an iPXE that has its address is answered when it looks for an
// IPv6 router, which it would wait for; what has none yet, or goes on to something
// else, is not.
func TestIPXEWaitsForNoRouter(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	bootFiles(t, dir)
	hosts := pxetest.Switch(t, "box0", netip.MustParsePrefix(boxAddr+"/24"), macRAM, macStranger)
	pxetest.WaitLinkLocal(t, "box0")
	start(t, "box0", dir, nil, ramdisk(macRAM))
	m := hosts[0]
	// answers asks up to so many times, as iPXE does.
	answers := func(h *pxetest.Host, last byte, tries int) bool {
		t.Helper()
		h.WaitLinkLocal()
		var conn net.PacketConn
		h.Do(func() (err error) {
			conn, err = net.ListenPacket("ip6:ipv6-icmp", "::")
			return err
		})
		defer conn.Close()
		p := ipv6.NewPacketConn(conn)
		var only ipv6.ICMPFilter
		only.SetAll(true)
		only.Accept(ipv6.ICMPTypeRouterAdvertisement)
		if err := errors.Join(p.SetICMPFilter(&only), p.SetMulticastHopLimit(255)); err != nil {
			t.Fatal(err)
		}
		for range tries {
			if _, err := p.WriteTo([]byte{133, 7: 0, 8: 1, 9: 1, 10: 0x52, 11: 0x54, 15: last}, nil, &net.IPAddr{IP: net.ParseIP("ff02::2"), Zone: h.Iface}); err != nil {
				t.Fatal(err)
			}
			_ = p.SetReadDeadline(time.Now().Add(250 * time.Millisecond))
			if _, _, _, err := p.ReadFrom(make([]byte, 1500)); err == nil {
				return true
			}
		}
		return false
	}
	// awaited has the box expect the machine; that it is answered shows that the box
	// listens, and that a router's time is over.
	awaited := func() {
		t.Helper()
		mustDORA(t, m, asIPXE)
		if !answers(m, 0x0a, 40) {
			t.Fatal("iPXE is not answered")
		}
	}
	for name, then := range map[string]func(){
		"has its script":               func() { mustGet(t, m, "http://"+boxAddr+"/boot/52-54-00-00-00-0a/script.ipxe") },
		"asked for what there is not":  func() { _, _, _ = get(m, "http://"+boxAddr+"/nothing") },
		"is another program's by now":  func() { mustDORA(t, m, asUEFI) },
		"is a system's by now":         func() { mustDORA(t, m, nil) },
		"begins anew and has no lease": func() { offeredIPXE(t, m) },
	} {
		awaited()
		then()
		if answers(m, 0x0a, 6) {
			t.Errorf("what %s is answered", name)
		}
	}
	mustDORA(t, hosts[1], asIPXE)
	if answers(hosts[1], 0x0c, 6) {
		t.Error("an iPXE to which the box gives nothing is answered: another may boot it")
	}
	awaited()
}

// offeredIPXE asks as iPXE for an address, and takes none.
func offeredIPXE(t *testing.T, h *pxetest.Host) {
	t.Helper()
	h.Do(func() error {
		c, err := nclient4.New(h.Iface, nclient4.WithTimeout(time.Second), nclient4.WithRetry(5))
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.DiscoverOffer(t.Context(), asIPXE...)
		return err
	})
}

// TestSparesWait: where an iPXE is answered.
func TestSparesWait(t *testing.T) {
	for name, tt := range map[string]struct {
		c    Config
		want bool
	}{
		"machines":                 {Config{}, true},
		"with IPv6":                {Config{IPv6: IPv6{Address: boxNet6}}, false},
		"BMCs":                     {Config{BMC: true}, false},
		"reservations":             {Config{Mode: dhcp.Reservations}, false},
		"beside another server":    {Config{Mode: dhcp.Proxy}, false},
		"only machines behind one": {Config{Mode: dhcp.Relay}, false},
	} {
		if got := tt.c.sparesWait(); got != tt.want {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}

// TestAwaiting: who is answered when and how often, and who is forgotten.
func TestAwaiting(t *testing.T) {
	now := time.Now()
	for _, tt := range []struct {
		name  string
		mac   string
		after []time.Duration
		want  string
	}{
		{"a router is first", "m", []time.Duration{0, routersFirst - 1, routersFirst, awaitingFor - 1, awaitingFor}, "--aa-"},
		{"of a few answers one arrives", "m", []time.Duration{routersFirst, 2 * routersFirst, 3 * routersFirst, 4 * routersFirst, 5 * routersFirst}, "aaaa-"},
		{"nobody", "n", []time.Duration{2 * routersFirst}, "-"},
	} {
		var a awaiting
		a.add("m", now)
		a.add("m", now.Add(routersFirst/2)) // DHCP repeats itself
		got := ""
		for _, after := range tt.after {
			if a.answer(tt.mac, now.Add(after)) {
				got += "a"
			} else {
				got += "-"
			}
		}
		if got != tt.want {
			t.Errorf("%s: answers %s, want %s", tt.name, got, tt.want)
		}
		a.add("m", now.Add(awaitingFor))
		if !a.answer("m", now.Add(awaitingFor+routersFirst)) {
			t.Errorf("%s: one that boots again is not answered", tt.name)
		}
		a.end("m")
		if a.answer("m", now.Add(awaitingFor+routersFirst)) {
			t.Errorf("%s: one that has ended is answered", tt.name)
		}
	}
	var a awaiting
	for i := range 2 * maxAwaiting {
		a.add(fmt.Sprint(i), now)
	}
	if len(a.byMAC) != maxAwaiting {
		t.Errorf("%d are remembered, want %d", len(a.byMAC), maxAwaiting)
	}
}
