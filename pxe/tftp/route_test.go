package tftp

import (
	"bytes"
	"context"
	"encoding/binary"
	"log/slog"
	"net"
	"net/netip"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/pxe/files"
	"github.com/better-compute/site-appliance/pxe/pxetest"
)

// TestAnswersLeaveAsTheyCame has two networks of the same addresses: the box's
// routes lead to the first, also for the machines of the second, each of which is
// answered on its own wire from the address that it asked.
func TestAnswersLeaveAsTheyCame(t *testing.T) {
	if !pxetest.InNamespace(t) {
		return
	}
	var lans []*pxetest.Host
	for i, near := range []string{"lan0", "lan1"} {
		own := netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)})
		lan := pxetest.Join(t, near, netip.PrefixFrom(own, 24), "eth0", "52:54:00:00:00:0"+near[3:])
		lan.Do(func() error {
			return exec.Command("ip", "address", "add", "10.0.0.5"+near[3:]+"/24", "dev", "eth0").Run()
		})
		lans = append(lans, lan)
		srv, err := Listen(t.Context(), Config{Interface: near, Address: own, Log: slog.New(slog.DiscardHandler),
			Open: func(context.Context, netip.Addr, string) (files.File, error) {
				return memory{bytes.NewReader(content)}, nil
			},
			Ended: func(Transfer) {}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		var serving sync.WaitGroup
		serving.Go(func() {
			if err := srv.Serve(ctx); err != nil {
				t.Errorf("Serve = %v, want nil", err)
			}
		})
		defer serving.Wait()
		defer cancel()
		// The library has the requests that it can answer.
		if got, want := srv.gate.answers(netip.MustParseAddrPort("10.0.0.50:2000")), near == "lan0"; got != want {
			t.Errorf("on %s the library answers from the address asked: %v, want %v", near, got, want)
		}
	}
	for i, lan := range lans {
		for _, options := range [][]string{nil, {"blksize", "1468"}, {"windowsize", "4"}} {
			asked := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), Port)
			var conn *net.UDPConn
			lan.Do(func() (err error) {
				conn, err = net.ListenUDP("udp4", nil)
				return err
			})
			defer conn.Close()
			if _, err := conn.WriteToUDPAddrPort(packetOf(1, append([]string{"snponly.efi", "octet"}, options...)...), asked); err != nil {
				t.Fatal(err)
			}
			buf := make([]byte, 2000)
			_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
			n, from, err := conn.ReadFromUDPAddrPort(buf)
			if err != nil || from.Addr() != asked.Addr() || n < 2 || binary.BigEndian.Uint16(buf) == opError {
				t.Errorf("request of %s with %q = %q from %s, %v, want an answer from %s", lan.Iface, options, buf[:n], from, err, asked.Addr())
			}
			_, _ = conn.WriteToUDPAddrPort(errorPacket(0, "enough"), from)
		}
	}
}
