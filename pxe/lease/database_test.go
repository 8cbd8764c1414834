package lease

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

var t0 = time.Unix(1_800_000_000, 0)

func mac(i int) string { return fmt.Sprintf("52:54:00:00:%02x:%02x", i>>8, i&255) }

// wallClock is a clock that a test sets.
type wallClock struct {
	mu sync.Mutex
	at time.Time
}

func newClock() *wallClock { return &wallClock{at: t0} }

func (c *wallClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at
}

func (c *wallClock) step(by time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = c.at.Add(by)
}

func ip(last int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, byte(last)}) }

// lan is a pool of n addresses from 10.0.0.10 on.
func lan(n int) Pool {
	return Pool{Subnet: netip.MustParsePrefix("10.0.0.0/24"), First: ip(10), Last: ip(9 + n), Exclude: []netip.Addr{ip(1), ip(0), ip(255)}}
}

func opened(t testing.TB, cfg Config) *Database {
	t.Helper()
	if cfg.Path == "" {
		cfg.Path = filepath.Join(t.TempDir(), "leases")
	}
	if cfg.Pools == nil {
		cfg.Pools = []Pool{lan(10)}
	}
	d, err := OpenDatabase(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// committed waits until the disk has what was bound, and gives what Commit said.
func committed(t testing.TB, d *Database) error {
	t.Helper()
	kept := make(chan error, 1)
	if !d.Commit(mac(1), func(err error) { kept <- err }) {
		t.Fatal("Commit refused")
	}
	select {
	case err := <-kept:
		return err
	case <-t.Context().Done():
		t.Fatal("Commit never called back")
		return nil
	}
}

func mustOffer(t testing.TB, d *Database, mac string) netip.Addr {
	t.Helper()
	got, err := d.Offer("", mac, netip.Addr{})
	if err != nil {
		t.Fatalf("Offer(%s) = %v", mac, err)
	}
	return got
}

func mustBind(t testing.TB, d *Database, mac string, at netip.Addr) {
	t.Helper()
	if l, err := d.Bind("", mac, at, time.Hour); err != nil || l.Term != time.Hour {
		t.Fatalf("Bind(%s, %s) = %v, %v, want an hour", mac, at, l, err)
	}
}

// boots takes the whole way of a machine: offer, bind, on disk.
func boots(t testing.TB, d *Database, mac string) netip.Addr {
	t.Helper()
	at := mustOffer(t, d, mac)
	mustBind(t, d, mac, at)
	if err := committed(t, d); err != nil {
		t.Fatal(err)
	}
	return at
}

// runs lets the box run for so long, with its clock written down as it is then.
// A lease of a machine that stays keeps it going.
func runs(d *Database, clock *wallClock, length time.Duration) {
	for ; length > 0; length -= tick {
		clock.step(min(tick, length))
		_, _ = d.Bind("", mac(0xfff), ip(10), time.Hour)
		d.log.writeClock()
	}
}

// sound says what is wrong with how the database files its slots.
func sound(d *Database) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []error
	wrong := func(format string, args ...any) { all = append(all, fmt.Errorf(format, args...)) }
	for _, p := range d.order {
		free, ended, bad := 0, 0, 0
		for i := range p.size {
			at := p.at(i)
			s := d.slots[at]
			want := p.inRange(at) && s == nil && d.reserved[at] == ""
			if p.free.has(i) != want {
				wrong("%s is free: %v, want %v", at, !want, want)
			}
			if want {
				free++
			}
		}
		for at, s := range d.slots {
			if s.pool != p {
				continue
			}
			if s.ip != at {
				wrong("%s stands at %s", s.ip, at)
			}
			leased, held := s.mac != "", s.holder != ""
			if leased && p.leases[s.mac] != s || held && p.offers[s.holder] != s {
				wrong("%s is not its machine's: %+v", at, s)
			}
			if held && s.mac != "" && s.mac != s.holder && s.until > d.clock {
				wrong("%s is leased to %s and offered to %s", at, s.mac, s.holder)
			}
			if s.inBad && (leased || held) {
				wrong("%s is in quarantine and %s's", at, s.mac+s.holder)
			}
			if (s.liveAt >= 0) != (leased && s.until > d.clock) || (s.passingAt >= 0) != (held || s.inBad) {
				wrong("%s is not in its queues: %+v", at, s)
			}
			if leased && !held && s.until <= d.clock && p.inRange(at) && d.reserved[at] == "" {
				ended++
			}
			if s.inBad && d.reserved[at] == "" {
				bad++
			}
		}
		if free != p.free.len() || ended != p.ended.Len() || bad != p.bad.Len() {
			wrong("pool %q counts %d free, %d ended, %d in quarantine, want %d, %d, %d", p.Name, p.free.len(), p.ended.Len(), p.bad.Len(), free, ended, bad)
		}
		if bad > p.badShare()+1 {
			wrong("%d addresses are in quarantine, more than %d and a decline", bad, p.badShare())
		}
		for mac, s := range p.leases {
			if s.mac != mac || d.slots[s.ip] != s {
				wrong("%s has %s, which is %s's", mac, s.ip, s.mac)
			}
		}
		for mac, s := range p.offers {
			if s.holder != mac || d.slots[s.ip] != s {
				wrong("%s is offered %s, which is %s's", mac, s.ip, s.holder)
			}
		}
	}
	return errors.Join(all...)
}

func TestOneAddressThroughABoot(t *testing.T) {
	clock := newClock()
	path := filepath.Join(t.TempDir(), "leases")
	cfg := Config{Path: path, Now: clock.Now, Pools: []Pool{lan(3)}}
	d := opened(t, cfg)
	seen := map[netip.Addr]string{}
	for i := range 3 {
		at := mustOffer(t, d, mac(i))
		if other, ok := seen[at]; ok {
			t.Errorf("Offer(%s) = %s, which %s has", mac(i), at, other)
		}
		seen[at] = mac(i)
		if again := mustOffer(t, d, mac(i)); again != at {
			t.Errorf("Offer(%s) again = %s, want %s", mac(i), again, at)
		}
		mustBind(t, d, mac(i), at)
	}
	if _, err := d.Offer("", mac(9), netip.Addr{}); !errors.Is(err, ErrFull) {
		t.Errorf("Offer of a full pool = %v, want ErrFull", err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	d = opened(t, cfg)
	for at, m := range seen {
		if got, ok := d.Holder(at); !ok || got != m {
			t.Errorf("after a restart: Holder(%s) = %q, %v, want %q", at, got, ok, m)
		}
		if got := mustOffer(t, d, m); got != at {
			t.Errorf("after a restart: Offer(%s) = %s, want %s", m, got, at)
		}
	}
	// An ended lease goes to another machine only when nothing else is free.
	clock.step(time.Hour + Hold)
	got := mustOffer(t, d, mac(9))
	old := seen[got]
	if _, err := d.Bind("", old, got, time.Hour); !errors.Is(err, ErrTaken) {
		t.Errorf("Bind of an address that is offered to another = %v, want ErrTaken", err)
	}
	// The offer alone costs the old machine nothing.
	clock.step(Hold + 1)
	if at := mustOffer(t, d, old); at != got {
		t.Errorf("Offer(%s) after another's offer ran out = %s, want its old %s", old, at, got)
	}
	if err := sound(d); err != nil {
		t.Error(err)
	}
}

func TestWantedAddress(t *testing.T) {
	d := opened(t, Config{Pools: []Pool{lan(100)}})
	for _, tt := range []struct {
		name string
		mac  int
		want netip.Addr
		get  bool
	}{
		{"free", 1, ip(77), true},
		{"another's offer", 2, ip(77), false},
		{"outside", 3, ip(200), false},
		{"of another net", 4, netip.MustParseAddr("192.0.2.1"), false},
		{"none", 5, netip.Addr{}, false},
		{"of version 6", 6, netip.MustParseAddr("fd00::1"), false},
	} {
		got, err := d.Offer("", mac(tt.mac), tt.want)
		if err != nil || (got == tt.want) != tt.get || !d.pools[""].inRange(got) {
			t.Errorf("Offer(%s) = %s, %v, want it: %v", tt.name, got, err, tt.get)
		}
	}
}

func TestBindRefuses(t *testing.T) {
	d := opened(t, Config{})
	mustBind(t, d, mac(1), ip(15)) // without an offer: fine while it is free
	if _, err := d.Offer("", mac(3), ip(19)); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, mac string
		ip        netip.Addr
		want      error
	}{
		{"another's", mac(2), ip(15), ErrTaken},
		{"another's offer", mac(2), ip(19), ErrTaken},
		{"outside of the range", mac(2), ip(20), ErrTaken},
		{"excluded", mac(2), ip(1), ErrTaken},
		{"of another net", mac(2), netip.MustParseAddr("192.0.2.1"), ErrTaken},
		{"own", mac(1), ip(15), nil},
		{"own, moved", mac(1), ip(16), nil},
		{"left by the move", mac(2), ip(15), nil},
	} {
		if _, err := d.Bind("", tt.mac, tt.ip, time.Hour); !errors.Is(err, tt.want) {
			t.Errorf("Bind(%s) = %v, want %v", tt.name, err, tt.want)
		}
	}
	if l, err := d.Bind("", mac(1), ip(16), 1000*time.Hour); err != nil || l.Term != MaxTerm {
		t.Errorf("Bind for 1000 hours = %v, %v, want %s", l, err, MaxTerm)
	}
	if _, err := d.Bind("nowhere", mac(1), ip(16), time.Hour); err == nil {
		t.Error("Bind in a pool that is not there succeeded")
	}
	if err := sound(d); err != nil {
		t.Error(err)
	}
}

func TestSeveralPools(t *testing.T) {
	path := filepath.Join(t.TempDir(), "leases")
	far := Pool{Name: "10.5.0.0/24", Subnet: netip.MustParsePrefix("10.5.0.0/24"), First: netip.MustParseAddr("10.5.0.100"), Last: netip.MustParseAddr("10.5.0.120")}
	cfg := Config{Path: path, Pools: []Pool{lan(10), far}}
	d := opened(t, cfg)
	near := boots(t, d, mac(1))
	moved, err := d.Offer(far.Name, mac(1), near)
	if err != nil || !far.Subnet.Contains(moved) {
		t.Fatalf("Offer in the other subnet = %s, %v", moved, err)
	}
	if _, err := d.Bind(far.Name, mac(1), near, time.Hour); !errors.Is(err, ErrTaken) {
		t.Errorf("Bind of an address of the other pool = %v, want ErrTaken", err)
	}
	if _, err := d.Bind(far.Name, mac(1), moved, time.Hour); err != nil {
		t.Fatal(err)
	}
	d.Close()
	d = opened(t, cfg)
	for name, want := range map[string]netip.Addr{"": near, far.Name: moved} {
		if got, err := d.Offer(name, mac(1), netip.Addr{}); err != nil || got != want {
			t.Errorf("Offer in pool %q after moving about = %s, %v, want %s", name, got, err, want)
		}
	}
}

func TestReservations(t *testing.T) {
	clock := newClock()
	cfg := Config{Path: filepath.Join(t.TempDir(), "leases"), Now: clock.Now, Pools: []Pool{lan(4)},
		Reservations: []Reservation{{"52:54:00:00:00:01", ip(10)}, {"52-54-00-00-00-02", ip(200)}}}
	d := opened(t, cfg)
	seen := map[netip.Addr]bool{}
	for i := 10; i < 13; i++ {
		at, err := d.Offer("", mac(i), ip(10))
		if err != nil || at == ip(10) {
			t.Errorf("Offer to a stranger = %s, %v, want another than the reserved address", at, err)
		}
		seen[at] = true
	}
	if _, err := d.Offer("", mac(13), netip.Addr{}); !errors.Is(err, ErrFull) {
		t.Errorf("Offer beyond the reserved address = %v, want ErrFull", err)
	}
	for m, want := range map[string]netip.Addr{mac(1): ip(10), mac(2): ip(200)} {
		if got := mustOffer(t, d, m); got != want {
			t.Errorf("Offer(%s) = %s, want the reserved %s", m, got, want)
		}
		mustBind(t, d, m, want)
		if _, err := d.Bind("", mac(20), want, time.Hour); !errors.Is(err, ErrTaken) {
			t.Errorf("Bind of %s by a stranger = %v, want ErrTaken", want, err)
		}
	}
	// The reserved addresses stay out of reach when their leases end, and after a restart.
	clock.step(2 * time.Hour)
	d.Close()
	d = opened(t, cfg)
	for i := range 3 {
		if at := mustOffer(t, d, mac(30+i)); at == ip(10) || at == ip(200) {
			t.Errorf("Offer to a stranger = %s, which is reserved", at)
		}
	}
	if got := mustOffer(t, d, mac(2)); got != ip(200) {
		t.Errorf("Offer after a restart = %s, want the reserved address", got)
	}
	if err := sound(d); err != nil {
		t.Error(err)
	}
}

func TestReservedButLeased(t *testing.T) {
	clock := newClock()
	d := opened(t, Config{Now: clock.Now})
	mustBind(t, d, mac(1), ip(15))
	mustBind(t, d, mac(2), ip(16))
	clock.step(20 * time.Minute)
	if err := d.SetReservations([]Reservation{{mac(2), ip(15)}}); err != nil {
		t.Fatal(err)
	}
	var wait *WaitError
	if _, err := d.Offer("", mac(2), netip.Addr{}); !errors.As(err, &wait) || wait.Holder != mac(1) || wait.Left != 40*time.Minute ||
		!strings.Contains(err.Error(), "10.0.0.15 is reserved for this machine, but "+mac(1)+" has it for another 40m0s") {
		t.Errorf("Offer of an address that another has = %v", err)
	}
	if _, _, err := d.Lookup("", mac(2)); !errors.As(err, &wait) {
		t.Errorf("Lookup of who waits = %v, want the reason", err)
	}
	// Neither lease is made longer, and neither is cut.
	for m, at := range map[string]netip.Addr{mac(1): ip(15), mac(2): ip(16)} {
		if l, err := d.Bind("", m, at, time.Hour); err != nil || l.Term != 40*time.Minute {
			t.Errorf("Bind(%s, %s) = %v, %v, want the 40 minutes that are left", m, at, l, err)
		}
	}
	if got := mustOffer(t, d, mac(1)); got == ip(15) {
		t.Errorf("Offer at the holder's next boot = %s, want another address than the reserved one", got)
	}
	clock.step(40 * time.Minute)
	if _, err := d.Bind("", mac(1), ip(15), time.Hour); !errors.Is(err, ErrTaken) {
		t.Errorf("Bind after the end = %v, want ErrTaken", err)
	}
	if got := mustOffer(t, d, mac(2)); got != ip(15) {
		t.Errorf("Offer after the end = %s, want the reserved address", got)
	}
	mustBind(t, d, mac(2), ip(15))
	if got, ok := d.Holder(ip(16)); ok {
		t.Errorf("Holder of the address that was left = %s, want nobody", got)
	}
	if err := sound(d); err != nil {
		t.Error(err)
	}
}

func TestReservationInConflict(t *testing.T) {
	clock := newClock()
	d := opened(t, Config{Now: clock.Now, Reservations: []Reservation{{mac(1), ip(200)}}})
	if taken, err := d.Conflict(ip(200), mac(7)); !taken {
		t.Fatal(err)
	}
	_, err := d.Offer("", mac(1), netip.Addr{})
	if want := "10.0.0.200 is reserved for this machine, but " + mac(7) + " was found at it"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("Offer = %v, want %q", err, want)
	}
	clock.step(quarantine)
	if got := mustOffer(t, d, mac(1)); got != ip(200) {
		t.Errorf("Offer after the quarantine = %s, want the reserved address", got)
	}
}

func TestSetReservationsRefuses(t *testing.T) {
	d := opened(t, Config{Reservations: []Reservation{{mac(1), ip(15)}}})
	for _, tt := range []struct {
		name string
		rs   []Reservation
		want string
	}{
		{"no MAC", []Reservation{{"x", ip(15)}}, `reservation of 10.0.0.15: "x" is not a MAC of six bytes`},
		{"a MAC of eight bytes", []Reservation{{"00:11:22:33:44:55:66:77", ip(15)}}, "is not a MAC of six bytes"},
		{"outside of the subnet", []Reservation{{mac(1), netip.MustParseAddr("192.0.2.1")}}, "in no pool's subnet"},
		{"the box's own", []Reservation{{mac(1), ip(1)}}, "or the box's own"},
		{"two machines", []Reservation{{mac(1), ip(15)}, {mac(2), ip(15)}}, "both " + mac(1) + " and " + mac(2) + " have it"},
		{"two addresses", []Reservation{{mac(1), ip(15)}, {mac(1), ip(16)}}, "it has both 10.0.0.15 and 10.0.0.16"},
	} {
		if err := d.SetReservations(tt.rs); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("SetReservations(%s) = %v, want %q", tt.name, err, tt.want)
		}
		if got, ok := d.Reserved("", mac(1)); !ok || got != ip(15) {
			t.Errorf("after SetReservations(%s) failed: Reserved = %s, %v, want the old one", tt.name, got, ok)
		}
	}
	if err := d.SetReservations([]Reservation{{mac(1), ip(15)}, {mac(1), ip(15)}}); err != nil {
		t.Errorf("SetReservations with one twice = %v", err)
	}
	if err := d.SetReservations(nil); err != nil || !d.pools[""].free.has(5) {
		t.Errorf("SetReservations(none) = %v, and 10.0.0.15 is not free again", err)
	}
}

func TestPoolWithoutRange(t *testing.T) {
	d := opened(t, Config{Pools: []Pool{{Subnet: netip.MustParsePrefix("10.0.0.0/24")}}, Reservations: []Reservation{{mac(1), ip(50)}}})
	if got := boots(t, d, mac(1)); got != ip(50) {
		t.Errorf("the reserved machine gets %s", got)
	}
	if _, err := d.Offer("", mac(2), ip(51)); !errors.Is(err, ErrFull) {
		t.Errorf("Offer to another = %v, want ErrFull", err)
	}
	if _, err := d.Bind("", mac(2), ip(51), time.Hour); !errors.Is(err, ErrTaken) {
		t.Errorf("Bind by another = %v, want ErrTaken", err)
	}
	if _, ok := d.Idle("", ip(50)); ok {
		t.Error("Idle finds an address in no range")
	}
}

func TestDeclineReleaseWithdraw(t *testing.T) {
	clock := newClock()
	path := filepath.Join(t.TempDir(), "leases")
	cfg := Config{Path: path, Now: clock.Now, Pools: []Pool{lan(2)}}
	d := opened(t, cfg)
	at := mustOffer(t, d, mac(1))
	if declined, _ := d.Decline(mac(2), at, true); declined {
		t.Error("Decline of another machine's address = true, want false and no effect")
	}
	if got := mustOffer(t, d, mac(1)); got != at {
		t.Errorf("a stranger's decline moved %s to %s", at, got)
	}
	d.Decline(mac(1), at, true)
	if _, err := d.Bind("", mac(1), at, time.Hour); !errors.Is(err, ErrConflict) {
		t.Errorf("Bind of a declined address = %v, want ErrConflict", err)
	}
	other, err := d.Offer("", mac(1), at)
	if err != nil || other == at {
		t.Errorf("Offer after Decline = %s, %v, want another address", other, err)
	}
	if _, err := d.Offer("", mac(2), netip.Addr{}); !errors.Is(err, ErrFull) {
		t.Errorf("Offer of a declined address = %v, want ErrFull", err)
	}
	d.Withdraw("", mac(1))
	if got := mustOffer(t, d, mac(2)); got != other {
		t.Errorf("Offer after Withdraw = %s, want %s", got, other)
	}
	mustBind(t, d, mac(2), other)
	d.Release(mac(3), other) // a stranger's: no effect
	if _, err := d.Offer("", mac(3), netip.Addr{}); !errors.Is(err, ErrFull) {
		t.Errorf("Offer after a stranger's release = %v, want ErrFull", err)
	}
	d.Release(mac(2), other)
	if got := mustOffer(t, d, mac(3)); got != other {
		t.Errorf("Offer after Release = %s, want %s", got, other)
	}
	// The quarantine outlives a restart, for what is left of it.
	clock.step(quarantine - time.Minute)
	d.Close()
	d = opened(t, cfg)
	d.Withdraw("", mac(3))
	if got, err := d.Offer("", mac(4), at); err != nil || got == at {
		t.Errorf("after a restart: Offer = %s, %v, want another than the declined %s", got, err, at)
	}
	clock.step(time.Minute + time.Second)
	if got := mustOffer(t, d, mac(5)); got != at {
		t.Errorf("after the quarantine: Offer = %s, want %s", got, at)
	}
	if err := sound(d); err != nil {
		t.Error(err)
	}
}

func TestConflict(t *testing.T) {
	d := opened(t, Config{Pools: []Pool{lan(8)}}) // two may be in quarantine
	offered := mustOffer(t, d, mac(1))
	leased := boots(t, d, mac(2))
	for _, tt := range []struct {
		name  string
		ip    netip.Addr
		found string
		want  error
		bad   int // in quarantine then
	}{
		{"the machine's own answer", offered, mac(1), nil, 0},
		{"the lease's own answer", leased, mac(2), nil, 0},
		{"a live lease", leased, mac(9), ErrTaken, 0},
		{"outside", netip.MustParseAddr("192.0.2.1"), mac(9), nil, 0},
		{"of the subnet, not of the range", ip(100), mac(9), nil, 0},
		{"offered", offered, mac(9), nil, 1},
		{"offered, again", offered, mac(9), nil, 1},
	} {
		if taken, err := d.Conflict(tt.ip, tt.found); !errors.Is(err, tt.want) || taken != (tt.bad > 0) {
			t.Errorf("Conflict(%s) = %v, %v, want %v, %v", tt.name, taken, err, tt.bad > 0, tt.want)
		}
		if got := d.pools[""].bad.Len(); got != tt.bad {
			t.Errorf("after Conflict(%s): %d in quarantine, want %d", tt.name, got, tt.bad)
		}
	}
	if got := mustOffer(t, d, mac(1)); got == offered {
		t.Errorf("Offer after a conflict = %s again", got)
	}
	// Whoever claims everything gets a quarter.
	next := ip(9)
	for range 8 {
		var idle bool
		if next, idle = d.Idle("", next); idle {
			if _, err := d.Conflict(next, mac(9)); err != nil && !errors.Is(err, ErrQuarantine) {
				t.Errorf("Conflict(%s) = %v", next, err)
			}
		}
	}
	if got := d.pools[""].bad.Len(); got != 2 {
		t.Errorf("%d addresses in quarantine, want 2 of 8", got)
	}
	if got := d.Acquit(mac(8)); got != 0 {
		t.Errorf("Acquit of another = %d, want 0", got)
	}
	if got := d.Acquit(mac(9)); got != 2 || d.pools[""].bad.Len() != 0 {
		t.Errorf("Acquit = %d with %d left in quarantine, want 2 and 0", got, d.pools[""].bad.Len())
	}
	if err := sound(d); err != nil {
		t.Error(err)
	}
}

// TestDeclinedReservation: a decline, which anybody can forge, does not take a machine's
// own address from it; somebody who is found there does.
func TestDeclinedReservation(t *testing.T) {
	d := opened(t, Config{Reservations: []Reservation{{mac(1), ip(200)}}})
	offered, leased := func() { mustOffer(t, d, mac(1)) }, func() { boots(t, d, mac(1)) }
	for _, tt := range []struct {
		name     string
		begin    func()
		by       string
		declined bool
	}{
		{"what it was never given", func() {}, mac(1), false},
		{"an offer", offered, mac(1), true},
		{"a lease", leased, mac(1), true},
		{"the same again", func() {}, mac(1), false},
		{"a lease and an offer", func() { leased(); offered() }, mac(1), true},
		{"another's", leased, mac(2), false},
	} {
		tt.begin()
		if declined, kept := d.Decline(tt.by, ip(200), true); declined != tt.declined || declined && !kept {
			t.Errorf("Decline of %s = %v, kept %v, want %v", tt.name, declined, kept, tt.declined)
		}
		if err := sound(d); err != nil {
			t.Errorf("after Decline of %s: %v", tt.name, err)
		}
	}
	if got := boots(t, d, mac(1)); got != ip(200) {
		t.Errorf("after a decline the machine gets %s, want its own", got)
	}
	d.Decline(mac(1), ip(200), true)
	if at, _ := d.Holder(ip(200)); at != mac(1) {
		t.Errorf("after a decline %q holds the address: the machine's boot is over", at)
	}
	if taken, err := d.Conflict(ip(200), mac(7)); !taken {
		t.Errorf("Conflict after a decline = %v", err)
	}
	if _, err := d.Offer("", mac(1), netip.Addr{}); err == nil {
		t.Error("the address is offered though another was found at it")
	}
}

// TestConflictsOfReservations: whoever was found at a reserved address, and what a machine
// declines where nobody can ask who is there, count whatever number of them there is.
func TestConflictsOfReservations(t *testing.T) {
	for name, pool := range map[string]Pool{"no range": {Subnet: netip.MustParsePrefix("10.0.0.0/24")}, "a small range": lan(4)} {
		cfg := Config{Path: filepath.Join(t.TempDir(), "leases"), Pools: []Pool{pool}, Reservations: []Reservation{{mac(1), ip(201)}, {mac(2), ip(202)}, {mac(3), ip(203)}, {mac(4), ip(204)}}}
		d := opened(t, cfg)
		for i := range pool.Size() { // the range's own share is used up
			_, _ = d.Conflict(ip(10+i), mac(70))
		}
		for i := 1; i <= 2; i++ {
			if taken, err := d.Conflict(ip(200+i), mac(70+i)); !taken {
				t.Errorf("%s: Conflict %d = %v, want it taken", name, i, err)
			}
		}
		for i := 3; i <= 4; i++ {
			mustOffer(t, d, mac(i))
			if declined, kept := d.Decline(mac(i), ip(200+i), false); !declined || kept {
				t.Errorf("%s: Decline %d where nobody asks = %v, kept %v, want it taken", name, i, declined, kept)
			}
		}
		for range 2 {
			for i := 1; i <= 4; i++ {
				if at, err := d.Offer("", mac(i), netip.Addr{}); err == nil {
					t.Errorf("%s: %s is offered though another is at it", name, at)
				}
			}
			if err := sound(d); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			d.Close()
			d = opened(t, cfg) // the second time it is started again
		}
		for i := 1; i <= 2; i++ {
			if got := d.Acquit(mac(70 + i)); got != 1 {
				t.Errorf("%s: Acquit = %d, want 1", name, got)
			}
			mustOffer(t, d, mac(i))
		}
	}
}

// TestDeclinesAcquitNobody: what machines decline, made-up ones too, gives no address back
// at which somebody was found, nor keeps one from being taken away for that.
func TestDeclinesAcquitNobody(t *testing.T) {
	d := opened(t, Config{Pools: []Pool{lan(8)}, Reservations: []Reservation{{mac(1), ip(200)}}})
	declines := func() {
		for i := range 10 {
			d.Decline(mac(100+i), mustOffer(t, d, mac(100+i)), true)
		}
	}
	found := func(at netip.Addr) {
		t.Helper()
		if taken, err := d.Conflict(at, mac(7)); !taken {
			t.Errorf("Conflict(%s) = %v, want it taken", at, err)
		}
	}
	bad := func(want int) {
		t.Helper()
		if got := d.pools[""].bad.Len(); got != want {
			t.Errorf("%d addresses of the range in quarantine, want %d", got, want)
		}
	}
	found(ip(200))
	found(ip(10))
	declines()
	bad(2)
	next, _ := d.Idle("", ip(10))
	for d.slots[next] != nil {
		next, _ = d.Idle("", next)
	}
	found(next)
	bad(2)
	declines()
	bad(3) // a decline is always believed
	if _, err := d.Conflict(mustOffer(t, d, mac(3)), mac(7)); !errors.Is(err, ErrQuarantine) {
		t.Errorf("Conflict = %v, want ErrQuarantine", err)
	}
	bad(3)
	for _, at := range []netip.Addr{ip(200), ip(10), next} {
		if s := d.slots[at]; s == nil || !s.inBad || s.found != mac(7) {
			t.Errorf("declines gave %s back, where somebody was found", at)
		}
	}
	mustOffer(t, d, mac(2))
	if err := sound(d); err != nil {
		t.Error(err)
	}
}

// TestKnownInItsPool: who has a lease of one pool has no share of what another keeps.
func TestKnownInItsPool(t *testing.T) {
	other := Pool{Name: "b", Subnet: netip.MustParsePrefix("10.1.0.0/24"), First: netip.MustParseAddr("10.1.0.10"), Last: netip.MustParseAddr("10.1.0.17")}
	good := mac(1)
	d := opened(t, Config{Pools: []Pool{lan(40), other}, Known: func(m string) bool { return m == good }})
	for i := range 20 {
		boots(t, d, mac(100+i))
		_, _ = d.Offer("b", mac(100+i), netip.Addr{})
	}
	if at, err := d.Offer("b", good, netip.Addr{}); err != nil {
		t.Errorf("Offer to a known machine = %s, %v, want an address", at, err)
	}
}

func TestDeclinesDoNotEmptyThePool(t *testing.T) {
	d := opened(t, Config{Pools: []Pool{lan(40)}})
	for i := range 400 {
		at := mustOffer(t, d, mac(i))
		mustBind(t, d, mac(i), at)
		d.Decline(mac(i), at, true)
	}
	if got := d.pools[""].bad.Len(); got != 10 {
		t.Errorf("%d addresses in quarantine, want a quarter of 40", got)
	}
	mustOffer(t, d, mac(1000))
	if err := sound(d); err != nil {
		t.Error(err)
	}
}

func TestFlood(t *testing.T) {
	good, veteran := mac(1), mac(2)
	for _, tt := range []struct {
		name  string
		flood func(d *Database, m string, i int) error
	}{
		{"offers", func(d *Database, m string, i int) error { _, err := d.Offer("", m, netip.Addr{}); return err }},
		{"whole leases", func(d *Database, m string, i int) error {
			at, err := d.Offer("", m, netip.Addr{})
			if err == nil {
				_, err = d.Bind("", m, at, time.Hour)
			}
			return err
		}},
		{"requests without an offer", func(d *Database, m string, i int) error {
			_, err := d.Bind("", m, ip(10+i%40), time.Hour)
			return err
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			clock := newClock()
			d := opened(t, Config{Now: clock.Now, Pools: []Pool{lan(40)}, Known: func(m string) bool { return m == good }})
			old := boots(t, d, veteran)
			other := boots(t, d, mac(3))
			clock.step(2 * time.Hour) // their leases are over
			full := false
			for round := range 20 {
				for i := range 200 {
					err := tt.flood(d, mac(10000+round*200+i), i)
					full = full || errors.Is(err, ErrFull)
				}
				clock.step(time.Second)
			}
			if !full {
				t.Error("the flood never met the share that is kept")
			}
			if len(d.slots) > 40 {
				t.Errorf("%d slots in memory, want at most 40", len(d.slots))
			}
			if got := boots(t, d, veteran); got != old {
				t.Errorf("a machine that was here before gets %s, want its old %s", got, old)
			}
			if at, _ := d.Holder(other); at != mac(3) {
				t.Errorf("the flood took %s's ended lease: %s has it", mac(3), at)
			}
			boots(t, d, good)
			if err := sound(d); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestPressureShortensOffers: what a flood of offers holds comes back while good
// machines still ask.
func TestPressureShortensOffers(t *testing.T) {
	clock := newClock()
	d := opened(t, Config{Now: clock.Now, Pools: []Pool{lan(40)}, Known: func(string) bool { return false }})
	first := mustOffer(t, d, mac(0))
	waits := map[time.Duration]int{Hold: 1}
	for i := range 34 {
		mustOffer(t, d, mac(1+i))
		l, _, _ := d.Lookup("", mac(1+i))
		waits[l.Term]++
	}
	// Of the 35 that they may have, so many are left when the wait is cut: 20, and 10.
	if want := map[time.Duration]int{Hold: 16, Hold / 4: 10, Hold / 8: 9}; !maps.Equal(waits, want) {
		t.Errorf("offers wait for %v, want %v", waits, want)
	}
	if _, err := d.Offer("", mac(100), netip.Addr{}); !errors.Is(err, ErrFull) || !strings.Contains(err.Error(), "5 that are kept for machines that are known") {
		t.Errorf("Offer of the last addresses = %v, want ErrFull and what is kept", err)
	}
	clock.step(Hold / 8)
	mustOffer(t, d, mac(100))
	if _, err := d.Bind("", mac(0), first, time.Hour); err != nil {
		t.Errorf("Bind of an offer from before the pressure = %v", err)
	}
	clock.step(Hold)
	d.Withdraw("", mac(0))
	if got := d.pools[""].idle(); got != 39 {
		t.Errorf("%d addresses are free after all offers ran out, want 39", got)
	}
}

// TestRestartsAndClocks: the wall clock says nothing; what counts is how long the
// box ran for, over restarts.
func TestRestartsAndClocks(t *testing.T) {
	path := filepath.Join(t.TempDir(), "leases")
	clock := newClock()
	cfg := Config{Path: path, Now: clock.Now, Pools: []Pool{lan(2)}}
	d := opened(t, cfg)
	boots(t, d, mac(1))
	boots(t, d, mac(2))
	for i, at := range []time.Time{time.Unix(0, 0), t0.AddDate(50, 0, 0), time.Unix(300, 0), t0} {
		clock.step(10 * time.Minute)
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		clock.mu.Lock()
		clock.at = at
		clock.mu.Unlock()
		d = opened(t, cfg)
		if _, err := d.Offer("", mac(9), netip.Addr{}); !errors.Is(err, ErrFull) {
			t.Fatalf("restart %d at %s: Offer = %v, want ErrFull: both leases live", i, at, err)
		}
	}
	// 40 of the 60 minutes are over; rounding up may add a second for each restart.
	l, ok, err := d.Lookup("", mac(1))
	if err != nil || !ok || l.Term < 20*time.Minute || l.Term > 20*time.Minute+5*time.Second {
		t.Errorf("Lookup after four restarts = %v, %v, %v, want 20 minutes left", l, ok, err)
	}
	clock.step(20*time.Minute + 5*time.Second)
	mustOffer(t, d, mac(9))
}

// TestRestartLoopEndsLeases: a box that is restarted over and over still gets
// through its leases, without a machine's help.
func TestRestartLoopEndsLeases(t *testing.T) {
	clock := newClock()
	cfg := Config{Path: filepath.Join(t.TempDir(), "leases"), Now: clock.Now, Pools: []Pool{lan(1)}}
	d := opened(t, cfg)
	boots(t, d, mac(1))
	for range 13 {
		d.log.writeClock()
		clock.step(tick)
		d.log.writeClock()
		if err := committed(t, d); err != nil {
			t.Fatal(err)
		}
		d = crashed(t, d, cfg)
	}
	mustOffer(t, d, mac(2))
}

// crashed opens the file again without closing d first.
func crashed(t *testing.T, d *Database, cfg Config) *Database {
	t.Helper()
	data, err := os.ReadFile(cfg.Path)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(cfg.Path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return opened(t, cfg)
}

func text(rs ...record) string {
	var b []byte
	for _, r := range rs {
		b = r.append(b)
	}
	return string(b)
}

func leased(i, last int) record {
	return record{kind: kindLease, clock: time.Minute, left: time.Hour, mac: mac(i), ip: ip(last)}
}

func TestHostileFile(t *testing.T) {
	good := text(leased(1, 15))
	other := text(leased(2, 16))
	const body = "52:54:00:00:00:01 10.0.0.15 1800000000"
	old := fmt.Sprintf("%08x %s\n", crc32.ChecksumIEEE([]byte(body)), body)
	year := 365 * 24 * time.Hour
	at := func(clock time.Duration) string {
		r := leased(3, 17)
		r.clock = clock
		return text(r)
	}
	long := leased(3, 17)
	long.left = 100 * year
	ago := leased(3, 17)
	ago.left = -50 * year
	for _, tt := range []struct {
		name, data string
		want       map[int]string // of 10.0.0.N
	}{
		{"empty", "", nil},
		{"good", good + other, map[int]string{15: mac(1), 16: mac(2)}},
		{"the first edition's", old, map[int]string{15: mac(1)}},
		{"garbage around", "garbage\n\n" + good + "\x00\xff\n" + other, map[int]string{15: mac(1), 16: mac(2)}},
		{"a line of 100 kB", strings.Repeat("x", 100_000) + "\n" + good, map[int]string{15: mac(1)}},
		{"a line without an end", good + strings.Repeat("x", 1_000_000), map[int]string{15: mac(1)}},
		{"torn", good + other[:len(other)-1], map[int]string{15: mac(1)}},
		{"torn in the middle", good + other[:20] + other, map[int]string{15: mac(1)}},
		{"changed", good + strings.Replace(other, "10.0.0.16", "10.0.0.17", 1), map[int]string{15: mac(1)}},
		{"NULs before a line", good + strings.Repeat("\x00", 1000) + other, map[int]string{15: mac(1), 16: mac(2)}},
		{"NULs at the end", good + strings.Repeat("\x00", 9000), map[int]string{15: mac(1)}},
		{"an address twice", good + text(leased(2, 15)), map[int]string{15: mac(2)}},
		{"a machine twice", good + text(leased(1, 16)), map[int]string{16: mac(1)}},
		{"an address of another net", text(record{kind: kindLease, left: time.Hour, mac: mac(3), ip: netip.MustParseAddr("192.0.2.1")}) + good, map[int]string{15: mac(1)}},
		{"an address of version 6", text(record{kind: kindLease, left: time.Hour, mac: mac(3), ip: netip.MustParseAddr("fd00::1")}) + good, map[int]string{15: mac(1)}},
		{"a clock far ahead", good + at(100*year) + other, map[int]string{15: mac(1), 16: mac(2), 17: mac(3)}},
		{"a clock past every bound", good + at(200*year) + other, map[int]string{15: mac(1), 16: mac(2)}},
		{"a clock that goes back", at(time.Hour) + good, map[int]string{15: mac(1), 17: mac(3)}},
		{"a lease for a century", text(long) + good, map[int]string{15: mac(1), 17: mac(3)}},
		{"a lease that ended half a century ago", text(ago) + good, map[int]string{15: mac(1), 17: mac(3)}},
		{"CRLF", strings.ReplaceAll(good, "\n", "\r\n") + other, map[int]string{16: mac(2)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "leases")
			if err := os.WriteFile(path, []byte(tt.data), 0o600); err != nil {
				t.Fatal(err)
			}
			clock := newClock()
			d := opened(t, Config{Path: path, Now: clock.Now})
			for i := range 256 {
				if got, _ := d.Holder(ip(i)); got != tt.want[i] {
					t.Errorf("Holder(%s) = %q, want %q", ip(i), got, tt.want[i])
				}
			}
			for i, m := range tt.want {
				if l, ok, err := d.Lookup("", m); !ok || err != nil || l.Term > MaxTerm || i < 17 && l.Term < 59*time.Minute {
					t.Errorf("Lookup(%s) = %v, %v, %v", m, l, ok, err)
				}
			}
			// Nothing lasts for ever.
			runs(d, clock, MaxTerm+tick)
			d.Close()
			d = opened(t, Config{Path: path, Now: clock.Now})
			for i := range 9 {
				mustOffer(t, d, mac(100+i))
			}
			if err := sound(d); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestHugeFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "leases")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	// A file of 8 GiB, most of it a hole.
	if _, err := f.WriteString(text(leased(1, 15))); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("\n"+text(leased(2, 16))), 8<<30); err != nil {
		t.Fatal(err)
	}
	f.Close()
	d := opened(t, Config{Path: path})
	for i, m := range map[int]string{15: mac(1), 16: mac(2)} {
		if got, _ := d.Holder(ip(i)); got != m {
			t.Errorf("Holder(%s) = %q, want %q", ip(i), got, m)
		}
	}
	if st, err := os.Stat(path); err != nil || st.Size() > 1000 {
		t.Errorf("the file is still of %d bytes, %v", st.Size(), err)
	}
}

// TestWhatIsNoFile: it starts with whatever stands at its path, and keeps leases
// as soon as there is a place for them.
func TestWhatIsNoFile(t *testing.T) {
	for _, tt := range []struct {
		name string
		make func(path string) error
		kept bool
	}{
		{"a folder", func(path string) error { return os.Mkdir(path, 0o700) }, false},
		{"a pipe that nobody writes", func(path string) error { return syscall.Mkfifo(path, 0o600) }, true},
		{"a link to a device without an end", func(path string) error { return os.Symlink("/dev/zero", path) }, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var log bytes.Buffer
			path := filepath.Join(t.TempDir(), "leases")
			if err := tt.make(path); err != nil {
				t.Fatal(err)
			}
			d := opened(t, Config{Path: path, Log: slog.New(slog.NewTextHandler(&log, nil))})
			at := mustOffer(t, d, mac(1))
			mustBind(t, d, mac(1), at)
			if err := committed(t, d); (err == nil) != tt.kept {
				t.Errorf("Commit = %v, want it kept: %v", err, tt.kept)
			}
			d.Close()
			for want, said := range map[string]bool{"cannot be read": true, "is no regular file": true, "in memory only": !tt.kept} {
				if strings.Contains(log.String(), want) != said {
					t.Errorf("the log says %q: %v, want %v:\n%s", want, !said, said, log.String())
				}
			}
		})
	}
}

func TestChangedPoolKeepsLeases(t *testing.T) {
	path := filepath.Join(t.TempDir(), "leases")
	clock := newClock()
	wide := Config{Path: path, Now: clock.Now, Pools: []Pool{lan(10)}}
	d := opened(t, wide)
	mustBind(t, d, mac(1), ip(12))
	mustBind(t, d, mac(2), ip(18))
	d.Close()
	for _, tt := range []struct {
		name  string
		pools []Pool
	}{
		{"a narrower range", []Pool{lan(5)}},
		{"another subnet", []Pool{{Subnet: netip.MustParsePrefix("10.9.0.0/24"), First: netip.MustParseAddr("10.9.0.1"), Last: netip.MustParseAddr("10.9.0.9")}}},
	} {
		d = opened(t, Config{Path: path, Now: clock.Now, Pools: tt.pools})
		if got, _ := d.Holder(ip(18)); got != mac(2) {
			t.Errorf("%s: Holder = %q, want %q until its lease ends", tt.name, got, mac(2))
		}
		for i := range 4 {
			if at := mustOffer(t, d, mac(20+i)); !d.pools[""].inRange(at) || at == ip(12) {
				t.Errorf("%s: Offer = %s", tt.name, at)
			}
		}
		if err := sound(d); err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		d.Close()
	}
	d = opened(t, wide)
	for m, want := range map[string]netip.Addr{mac(1): ip(12), mac(2): ip(18)} {
		if got := mustOffer(t, d, m); got != want {
			t.Errorf("back to the first range: Offer(%s) = %s, want %s", m, got, want)
		}
	}
	// In the end they are forgotten.
	d.Close()
	narrow := Config{Path: path, Now: clock.Now, Pools: []Pool{lan(5)}}
	d = opened(t, narrow)
	mustBind(t, d, mac(1), ip(12))
	runs(d, clock, forget+2*MaxTerm)
	d.Close()
	d = opened(t, narrow)
	if got, ok := d.Holder(ip(18)); ok {
		t.Errorf("after a month outside of the range: Holder = %q, want nobody", got)
	}
}

func TestOpenRefusesPools(t *testing.T) {
	a := netip.MustParseAddr
	for _, tt := range []struct {
		name  string
		pools []Pool
		want  string
	}{
		{"empty", []Pool{{}}, "want 1 to 65536"},
		{"backwards", []Pool{{First: a("10.0.0.9"), Last: a("10.0.0.8")}}, "want 1 to 65536"},
		{"too large", []Pool{{First: a("10.0.0.0"), Last: a("10.255.0.0")}}, "want 1 to 65536"},
		{"version 6", []Pool{{First: a("fd00::1"), Last: a("fd00::2")}}, "want 1 to 65536"},
		{"a subnet of version 6", []Pool{{Subnet: netip.MustParsePrefix("fd00::/64")}}, "is not inside of"},
		{"outside of its subnet", []Pool{{Subnet: netip.MustParsePrefix("10.0.0.0/24"), First: a("10.0.0.9"), Last: a("10.0.1.8")}}, "is not inside of"},
		{"one name twice", []Pool{lan(5), lan(5)}, "is there twice"},
		{"overlapping subnets", []Pool{lan(5), {Name: "b", Subnet: netip.MustParsePrefix("10.0.0.128/25")}}, "overlap"},
		{"overlapping ranges", []Pool{{First: ip(1), Last: ip(9)}, {Name: "b", First: ip(9), Last: ip(12)}}, "overlap"},
		{"a range in another's subnet", []Pool{lan(5), {Name: "b", First: ip(200), Last: ip(210)}}, "overlap"},
	} {
		if d, err := OpenDatabase(Config{Path: filepath.Join(t.TempDir(), "leases"), Pools: tt.pools}); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("OpenDatabase(%s) = %v, want %q", tt.name, err, tt.want)
			if err == nil {
				d.Close()
			}
		}
	}
}

// TestManyAtOnce is for the race detector, and counts the commits.
func TestManyAtOnce(t *testing.T) {
	d := opened(t, Config{Pools: []Pool{lan(200)}, Known: func(string) bool { return true }})
	var acks atomic.Int64
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			for i := range 20 {
				m := mac(worker*100 + i)
				at, err := d.Offer("", m, netip.Addr{})
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := d.Bind("", m, at, time.Hour); err != nil {
					t.Error(err)
				}
				d.Commit(mac(1), func(kept error) {
					if kept == nil {
						acks.Add(1)
					}
				})
				d.Holder(at)
				d.Idle("", at)
				_, _ = d.Conflict(at, mac(9999))
				d.Lookup("", m)
			}
			_ = d.SetReservations([]Reservation{{mac(worker), ip(220 + worker)}})
		})
	}
	wg.Wait()
	d.Close()
	if got := acks.Load(); got != 160 {
		t.Errorf("%d commits called back, want 160", got)
	}
	if err := sound(d); err != nil {
		t.Error(err)
	}
}

// TestPickIsOneStep: a full pool of 65,536 costs no more than a small one.
func TestPickIsOneStep(t *testing.T) {
	took := func(n int) float64 {
		first := number(netip.MustParseAddr("10.1.0.0"))
		clock := newClock()
		d := opened(t, Config{Now: clock.Now, Pools: []Pool{{First: address(first), Last: address(first + uint32(n) - 1)}}})
		for i := range n {
			if _, err := d.Bind("", fmt.Sprintf("52:54:00:%02x:%02x:%02x", i>>16, i>>8&255, i&255), address(first+uint32(i)), time.Hour); err != nil {
				t.Fatal(err)
			}
		}
		clock.step(2 * time.Hour)
		i := 0
		best := time.Duration(1 << 62)
		for range 20 {
			start := time.Now()
			for range 100 {
				i++
				if _, err := d.Offer("", fmt.Sprintf("02:00:00:00:%02x:%02x", i>>8, i&255), netip.Addr{}); err != nil && !errors.Is(err, ErrFull) {
					t.Fatal(err)
				}
			}
			best = min(best, time.Since(start))
		}
		return float64(best)
	}
	small, large := took(4096), took(65536)
	if large > 8*small {
		t.Errorf("100 offers of a pool of 65536 ended leases take %.1f times those of 4096, want one step whatever the size", large/small)
	}
	t.Logf("65536 addresses: %.2f times the time of 4096", large/small)
}
