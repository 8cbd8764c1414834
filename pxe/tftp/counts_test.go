package tftp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/pxe/limit"
)

// countsTest has addresses of one known machine, of strangers and of nobody.
func countsTest(a netip.Addr) (machine string, known bool) {
	b := a.As16()
	switch b[7] {
	case 1:
		return "known", true
	case 2:
		return fmt.Sprint("stranger ", a), false
	}
	return "", false
}

// from is an address of the kind that countsTest sees in it.
func from(kind byte, i int) netip.AddrPort {
	a := netip.MustParseAddr("fd00:77::").As16()
	a[7] = kind
	binary.BigEndian.PutUint16(a[14:], uint16(i))
	return netip.AddrPortFrom(netip.AddrFrom16(a), 1000)
}

// TestCountsByMachine: the caps count a machine's addresses together; strangers, who
// may be one host that makes them up, have half of the places, and those who answer
// keep theirs.
func TestCountsByMachine(t *testing.T) {
	const most, perClient = 20, 4
	now := time.Unix(0, 0)
	g := newGate(client(t), most, perClient, func() time.Time { return now })
	g.counts = countsTest
	dropped := 0
	admit := func(a netip.AddrPort) (s *slot, silent bool) {
		now = now.Add(time.Millisecond)
		return g.admit(a, false, func() { dropped++ })
	}
	answered := func(kind byte, n int) (placed int) {
		for i := range n {
			if s, _ := admit(from(kind, i)); s != nil {
				g.established(s)
				placed++
			}
		}
		return placed
	}
	if got := answered(2, 3*most); got != most/2 {
		t.Errorf("%d strangers have a place, want %d", got, most/2)
	}
	if s, silent := admit(from(2, 1000)); s != nil || !silent {
		t.Error("a stranger for whom there is no place is answered, want silence")
	}
	if got := answered(1, 3*perClient); got != perClient {
		t.Errorf("%d transfers of one machine by many addresses, want %d", got, perClient)
	}
	if dropped != 0 {
		t.Errorf("%d transfers that were answered made room", dropped)
	}
	// Those of strangers that nobody answers make room for strangers, not for one more.
	g = newGate(client(t), most, perClient, func() time.Time { return now })
	g.counts = countsTest
	for i := range most {
		if s, _ := admit(from(2, i)); s == nil {
			t.Fatalf("stranger %d is refused", i)
		}
	}
	if len(g.active) != most/2 || dropped != most/2 {
		t.Errorf("%d of strangers run and %d made room, want %d and %d", len(g.active), dropped, most/2, most/2)
	}
}

// TestNobodysAddressesAreOne: of IPv6 a host has as many addresses as it likes. Those
// that are no machine's are read and told of as one; and strangers' refusals, as of so
// many as there may be.
func TestNobodysAddressesAreOne(t *testing.T) {
	now := time.Unix(0, 0)
	g := newGate(client(t), 1, 1, func() time.Time { return now })
	g.counts = countsTest
	passes := func(kind byte) (n int) {
		for i := range 10 * limit.PerBurst {
			if g.limiter.Allow(g.bucket(from(kind, i)), now) {
				n++
			}
		}
		return n
	}
	if got := passes(0); got != limit.PerBurst {
		t.Errorf("%d packets from as many addresses of nobody's are read, want %d", got, limit.PerBurst)
	}
	if got := passes(2); got < 5*limit.PerBurst {
		t.Errorf("%d packets of %d machines are read, want nearly all", got, 10*limit.PerBurst)
	}
	var log strings.Builder
	s := &Server{gate: g, refusals: limit.Minute{Most: perMinute}, others: limit.Minute{Most: othersPerMinute},
		cfg: Config{Log: slog.New(slog.NewTextHandler(&log, nil))}}
	for i := range 10 * othersPerMinute {
		s.refused(from(2*byte(i%2), i).Addr(), "x", errors.New("refused"))
	}
	s.refused(from(1, 0).Addr(), "x", errors.New("refused"))
	if got, want := strings.Count(log.String(), "\n"), othersPerMinute+1; got != want {
		t.Errorf("%d refusals are logged, want %d", got, want)
	}
}
