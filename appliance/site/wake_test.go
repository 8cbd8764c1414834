package site

import (
	"bytes"
	"context"
	"encoding/json"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/base/bound"
	"github.com/better-compute/site-appliance/appliance/base/errs"
	"github.com/better-compute/site-appliance/appliance/site/config"
	"github.com/better-compute/site-appliance/appliance/site/firewall"
	"github.com/better-compute/site-appliance/appliance/site/netnstest"
	"github.com/better-compute/site-appliance/bmc/wol"
	"github.com/better-compute/site-appliance/plugins/driver/drivertest"
)

func TestBroadcastOf(t *testing.T) {
	for in, want := range map[string]string{"10.1.0.1/24": "10.1.0.255", "10.1.2.3/16": "10.1.255.255", "192.0.2.9/30": "192.0.2.11", "10.0.0.1/8": "10.255.255.255"} {
		if got := broadcastOf(netip.MustParsePrefix(in)); got.String() != want {
			t.Errorf("broadcastOf(%s) = %s, want %s", in, got, want)
		}
	}
}

// tap is a raw socket that sees every frame that reaches an interface.
type tap struct {
	t  *testing.T
	fd int
}

func newTap(t *testing.T, n *netnstest.Namespace) *tap {
	t.Helper()
	v := &tap{t: t, fd: -1}
	n.Do(func() {
		all := uint16(unix.ETH_P_ALL)
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(all<<8|all>>8))
		if err == nil {
			err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 20})
		}
		if err != nil {
			t.Errorf("tap: %v", err)
			return
		}
		v.fd = fd
	})
	if t.Failed() {
		t.FailNow()
	}
	t.Cleanup(func() { _ = unix.Close(v.fd) })
	return v
}

// before counts the frames with magic that came before one with mark.
func (v *tap) before(mark, magic []byte) (n int) {
	v.t.Helper()
	buf := make([]byte, 2048)
	for {
		size, from, err := unix.Recvfrom(v.fd, buf, 0)
		if err != nil {
			v.t.Fatalf("the mark did not come: %v", err)
		}
		// A veth's other end sees what it sends too; what arrives is not outgoing.
		if ll, ok := from.(*unix.SockaddrLinklayer); ok && ll.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		if bytes.Contains(buf[:size], mark) {
			return n
		}
		if bytes.Contains(buf[:size], magic) {
			n++
		}
	}
}

// A magic packet leaves by every LAN, or by the one that the address names,
// and never by the uplink, under the firewall that the box puts in force.
func TestMagicPacketsLeaveByTheLANsAlone(t *testing.T) {
	box := netnstest.New(t)
	ends := map[string]string{"up0": "192.0.2.1/24", "lan0": "10.1.0.1/24", "lan1": "10.2.0.1/24"}
	taps := map[string]*tap{}
	for name, addr := range ends {
		neighbour := netnstest.New(t)
		own := netip.MustParsePrefix(addr)
		box.Wire(name, own, neighbour, "peer", netip.PrefixFrom(own.Addr().Next(), own.Bits()))
		taps[name] = newTap(t, neighbour)
	}
	box.Route(netip.MustParsePrefix("0.0.0.0/0"), netip.MustParseAddr("192.0.2.2"))
	cfg, err := config.ParseSite("site.toml", []byte("[uplink]\ninterface = \"up0\"\n[[lan]]\ninterface = \"lan0\"\naddress = \"10.1.0.1/24\"\n[[lan]]\ninterface = \"lan1\"\naddress = \"10.2.0.1/24\"\n[[lan]]\ninterface = \"lan2\"\naddress = \"10.3.0.1/24\"\n"))
	if err != nil {
		t.Fatal(err)
	}
	send, stop := broadcaster(cfg), func() {}
	d, err := wol.New(wol.Options{Broadcast: func(ctx context.Context, at string, packet []byte) error {
		defer stop() // one packet is enough here
		return send(ctx, at, packet)
	}})
	if err != nil {
		t.Fatal(err)
	}
	box.Do(func() {
		there, err := look()
		if err == nil {
			err = firewall.Apply(rules(cfg, find(cfg, there)))
		}
		if err != nil {
			t.Error(err)
		}
	})
	mac := []byte{0x52, 0x54, 0, 0xab, 0xcd, 0xef}
	magic := append(bytes.Repeat([]byte{0xff}, 6), bytes.Repeat(mac, 16)...)
	for i, tt := range []struct {
		address string
		lans    []string // nil: refused
	}{
		{"52:54:00:ab:cd:ef", []string{"lan0", "lan1"}},
		{"52:54:00:ab:cd:ef@lan1", []string{"lan1"}},
		{"52:54:00:ab:cd:ef@10.1.0.255", []string{"lan0"}},
		{"52:54:00:ab:cd:ef@up0", nil},
		{"52:54:00:ab:cd:ef@192.0.2.255", nil},
		{"52:54:00:ab:cd:ef@lan2", nil},
	} {
		config, _ := json.Marshal(map[string]string{"address": tt.address})
		box.Do(func() {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			stop = cancel
			call, _ := drivertest.Context(t, ctx, nil)
			_, err := d.Invoke(call, "power", "setPower", config, json.RawMessage(`"on"`))
			if code := errs.CodeOf(err); tt.lans == nil && code != errs.InvalidAddress || tt.lans != nil && code != errs.Cancelled {
				t.Errorf("setPower of %s = %v", tt.address, err)
			}
		})
		mark := []byte("mark-of-this-round-" + string(rune('a'+i)))
		for name, addr := range ends {
			box.Do(func() {
				own := netip.MustParsePrefix(addr)
				conn, err := bound.ListenPacket(t.Context(), name, netip.AddrPortFrom(own.Addr(), 0))
				if err != nil {
					t.Error(err)
					return
				}
				defer conn.Close()
				if _, err := conn.WriteToUDPAddrPort(mark, netip.AddrPortFrom(broadcastOf(own), discard)); err != nil {
					t.Error(err)
				}
			})
			want := 0
			for _, l := range tt.lans {
				if l == name {
					want = 1
				}
			}
			if got := taps[name].before(mark, magic); got != want {
				t.Errorf("%s: %d magic packets left by %s, want %d", tt.address, got, name, want)
			}
		}
	}
}
