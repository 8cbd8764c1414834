package pxe

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/pxe/assign"
	"github.com/better-compute/site-appliance/pxe/attempts"
	"github.com/better-compute/site-appliance/pxe/decide"
	"github.com/better-compute/site-appliance/pxe/dhcp6"
	"github.com/better-compute/site-appliance/pxe/limit"
	"github.com/better-compute/site-appliance/pxe/pxev1"
	"github.com/better-compute/site-appliance/pxe/tftp"
)

// TestStrangersAreToldOfTogether: however many machines one host makes up, their stages
// and failures are so many events and lines in a minute, and a known machine's are told
// beside them.
func TestStrangersAreToldOfTogether(t *testing.T) {
	store, err := assign.Open(filepath.Join(t.TempDir(), "assign"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.Apply(&pxev1.AssignRequest{Version: 1, Machines: []*pxev1.Machine{ramdisk(macRAM)}}); err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	strange, known := 0, 0
	now := time.Now()
	s := &server{Config: Config{Assign: store, Heard: new(Heard), Attempts: new(attempts.Log), Now: func() time.Time { return now },
		Bindings: new(dhcp6.Bindings), IPv6: IPv6{Address: boxNet6}, Log: slog.New(slog.NewTextHandler(&log, nil))}, staged: limit.Minute{Most: mostStrange}, failed: limit.Minute{Most: mostStrange}}
	s.events = newEvents(func(_, _, _ string, body any) {
		if decide.IsStranger(body.(Stage).MachineID) {
			strange++
		} else {
			known++
		}
	}, s.Log)
	done := make(chan struct{})
	go func() { s.events.run(); close(done) }()
	for i := range 4 * mostStrange {
		mac := fmt.Sprintf("52:54:00:01:%02x:%02x", i>>8, i&0xff)
		s.stage(Stage{MAC: mac, MachineID: decide.Stranger(mac, nil).MachineId, Stage: "dhcp"})
		s.endedTFTP(tftp.Transfer{Client: netip.AddrFrom16([16]byte{0xfd, 14: byte(i >> 8), 15: byte(i)}), Outcome: tftp.Failed, Err: errors.New("nobody answers")})
	}
	for range 3 {
		s.stage(Stage{MAC: macRAM, MachineID: "node_a", Stage: "dhcp"})
	}
	s.events.end()
	<-done
	if lines := strings.Count(log.String(), "\n"); strange != mostStrange || known != 3 || lines != 2*mostStrange+3 {
		t.Errorf("%d stages of strangers, %d of a known machine and %d lines, want %d, 3 and %d", strange, known, lines, mostStrange, 2*mostStrange+3)
	}
}
