package e2e

import (
	"bytes"
	"encoding/json"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/scripts/lab"
)

// asked is what the gateway says that people are asked to do with a machine.
func (b *bench) asked(machine string) string {
	b.t.Helper()
	var view struct {
		Machine struct {
			PowerAsked string `json:"power_asked"`
		} `json:"machine"`
	}
	if err := json.Unmarshal([]byte(b.cli("metal", "show", machine, "--json")), &view); err != nil {
		b.t.Fatal(err)
	}
	return view.Machine.PowerAsked
}

func (b *bench) waitAsked(machine, action string) {
	b.t.Helper()
	b.must(lab.Poll(b.ctx, "asked "+action, func() (bool, error) { return b.asked(machine) == action, nil }))
}

// TestMachinesWithoutABMC: people switch one machine and say so, a packet wakes
// another, and neither needs a credential.
func TestMachinesWithoutABMC(t *testing.T) {
	b := ready(t, lab.SiteOptions{})
	b.cli("metal", "enroll", "shelf", "--pool", lab.PoolName, "--driver", "manual", "--address", "Rack3-Shelf2")
	if got := b.cli("metal", "power", "shelf"); got != "unknown" {
		t.Errorf("power before any word = %q, want unknown", got)
	}
	b.refused([]string{"bmc-driver-unsupported"}, "metal", "confirm-power", lab.MachineName, "on")
	b.refused([]string{"INVALID_INPUT"}, "metal", "confirm-power", "shelf", "reset")
	b.refused([]string{"bmc-driver-unsupported"}, "metal", "boot", "shelf", "pxe")

	b.cli("metal", "power", "shelf", "on")
	b.waitAsked("shelf", "on")
	// The wait holds neither the machine's queue nor anybody else's.
	if got := b.cli("metal", "power", "shelf"); got != "unknown" {
		t.Errorf("power while a person is asked = %q, want unknown", got)
	}
	if got := b.cli("metal", "power", lab.MachineName); got != "off" {
		t.Errorf("another machine's power = %q, want off", got)
	}
	// A box that restarts asks again.
	b.Site.Kill()
	b.must(b.StartSite(b.ctx, "", lab.SiteOptions{}))
	b.must(b.Site.WaitFor(b.ctx, "session is up"))
	b.waitAsked("shelf", "on")
	b.cli("metal", "confirm-power", "shelf", "on")
	b.waitAsked("shelf", "")
	if got := b.cli("metal", "power", "shelf"); got != "on" {
		t.Errorf("power after the word = %q, want on", got)
	}
	// What was said is kept.
	b.Site.Kill()
	b.must(b.StartSite(b.ctx, "", lab.SiteOptions{}))
	b.must(b.Site.WaitFor(b.ctx, "session is up"))
	if got := b.cli("metal", "power", "shelf"); got != "on" {
		t.Errorf("power after a restart = %q, want on", got)
	}

	const mac = "52:54:00:be:ef:01"
	b.cli("metal", "enroll", "sleeper", "--pool", lab.PoolName, "--driver", "wol", "--address", mac)
	if got := b.cli("metal", "power", "sleeper"); got != "unknown" {
		t.Errorf("power of a machine that only wakes = %q, want unknown", got)
	}
	b.refused([]string{"unsupported-operation"}, "metal", "power", "sleeper", "off")
	packets := b.listenOnLAN()
	b.cli("metal", "power", "sleeper", "on")
	raw, _ := net.ParseMAC(mac)
	want := append(bytes.Repeat([]byte{0xff}, 6), bytes.Repeat(raw, 16)...)
	select {
	case got := <-packets:
		if !bytes.Equal(got, want) {
			t.Errorf("the LAN got %x, want a magic packet", got)
		}
	case <-b.ctx.Done():
		t.Error("no packet reached the LAN")
	}
	if got := b.cli("metal", "list"); strings.Contains(got, "secret://default/ ") {
		t.Errorf("metal list:\n%s", got)
	}
}

// listenOnLAN is a neighbour on the site's LAN that hears broadcasts to port 9.
func (b *bench) listenOnLAN() <-chan []byte {
	b.t.Helper()
	var conn net.PacketConn
	b.must(b.InNetns("bmc", func() (err error) {
		conn, err = net.ListenPacket("udp4", "0.0.0.0:9")
		return err
	}))
	b.t.Cleanup(func() { conn.Close() })
	got := make(chan []byte, 16)
	go func() {
		buf := make([]byte, 256)
		for {
			n, _, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			select {
			case got <- bytes.Clone(buf[:n]):
			case <-time.After(time.Second):
			}
		}
	}()
	return got
}
