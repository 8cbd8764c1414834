package lease

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// faultyDisk keeps real files, knows what of them was flushed, and fails when told to.
type faultyDisk struct {
	mu       sync.Mutex
	flushed  []byte // what a power cut leaves
	written  []byte // after that, and not flushed yet
	syncs    int
	replaced int
	// fault is asked before each replace, open, write and sync.
	fault func(op string) error
	// synced is called before each flush takes effect.
	synced func()
}

func (f *faultyDisk) check(op string) error {
	if f.fault == nil {
		return nil
	}
	return f.fault(op)
}

func (f *faultyDisk) Replace(path string, data []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.check("replace"); err != nil {
		return err
	}
	f.flushed, f.written = append([]byte(nil), data...), nil
	f.replaced++
	return realDisk{}.Replace(path, data)
}

func (f *faultyDisk) Append(path string) (appender, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.check("open"); err != nil {
		return nil, err
	}
	a, err := realDisk{}.Append(path)
	return &faultyFile{a, f}, err
}

type faultyFile struct {
	appender
	disk *faultyDisk
}

func (f *faultyFile) Write(b []byte) (int, error) {
	f.disk.mu.Lock()
	defer f.disk.mu.Unlock()
	if err := f.disk.check("write"); err != nil {
		// As a disk that fills up does: half of it is there.
		n, _ := f.appender.Write(b[:len(b)/2])
		f.disk.written = append(f.disk.written, b[:n]...)
		return n, err
	}
	f.disk.written = append(f.disk.written, b...)
	return f.appender.Write(b)
}

func (f *faultyFile) Sync() error {
	if f.disk.synced != nil {
		f.disk.synced()
	}
	f.disk.mu.Lock()
	defer f.disk.mu.Unlock()
	if err := f.disk.check("sync"); err != nil {
		return err
	}
	f.disk.syncs++
	f.disk.flushed = append(f.disk.flushed, f.disk.written...)
	f.disk.written = nil
	return nil
}

// cut is the file after a power cut: what was flushed, and of the rest a part,
// nothing, or blocks of zeros in its place.
func (f *faultyDisk) cut(rng *rand.Rand) []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	rest := append([]byte(nil), f.written[:rng.IntN(len(f.written)+1)]...)
	if rng.IntN(2) == 0 && len(rest) > 0 {
		clear(rest[rng.IntN(len(rest)):])
	}
	return append(append([]byte(nil), f.flushed...), rest...)
}

var errNoSpace = fmt.Errorf("write: %w", syscall.ENOSPC)

func TestDiskFull(t *testing.T) {
	for _, op := range []string{"replace", "open", "write", "sync"} {
		t.Run(op, func(t *testing.T) {
			disk := &faultyDisk{}
			path := filepath.Join(t.TempDir(), "leases")
			d := opened(t, Config{Path: path, disk: disk})
			first := boots(t, d, mac(1))
			full := true
			disk.mu.Lock()
			disk.fault = func(at string) error {
				if full && (at == op || at == "write" && op != "sync") {
					return errNoSpace
				}
				return nil
			}
			disk.mu.Unlock()
			second := mustOffer(t, d, mac(2))
			mustBind(t, d, mac(2), second)
			if err := committed(t, d); !errors.Is(err, syscall.ENOSPC) {
				t.Errorf("Commit on a full disk = %v, want ENOSPC", err)
			}
			third := mustOffer(t, d, mac(3))
			mustBind(t, d, mac(3), third)
			if err := committed(t, d); !errors.Is(err, syscall.ENOSPC) {
				t.Errorf("Commit while the disk rests = %v, want ENOSPC", err)
			}
			// Whatever a power cut leaves now has what was there before.
			for seed := range uint64(20) {
				after := openedOn(t, disk.cut(rand.New(rand.NewPCG(seed, 1))), Config{})
				if got, _ := after.Holder(first); got != mac(1) {
					t.Fatalf("after a cut on the full disk: Holder = %q, want %q", got, mac(1))
				}
				after.Close()
			}
			disk.mu.Lock()
			full = false
			disk.mu.Unlock()
			d.log.flush(true) // as it does after a pause
			if err := committed(t, d); err != nil {
				t.Errorf("Commit once there is room = %v", err)
			}
			d.Close()
			after := openedOn(t, disk.flushed, Config{})
			for m, at := range map[string]netip.Addr{mac(1): first, mac(2): second, mac(3): third} {
				if got, _ := after.Holder(at); got != m {
					t.Errorf("after there was room: Holder(%s) = %q, want %q", at, got, m)
				}
			}
		})
	}
}

func openedOn(t testing.TB, data []byte, cfg Config) *Database {
	t.Helper()
	cfg.Path = filepath.Join(t.TempDir(), "leases")
	if err := os.WriteFile(cfg.Path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return opened(t, cfg)
}

// TestNoAnswerBeforeItsLeaseIsFlushed: at each call of Commit, the lease stands
// in what a power cut leaves, and many share a flush.
func TestNoAnswerBeforeItsLeaseIsFlushed(t *testing.T) {
	gate := make(chan struct{})
	disk := &faultyDisk{}
	d := opened(t, Config{Pools: []Pool{lan(200)}, disk: disk})
	disk.mu.Lock()
	disk.synced = func() { <-gate }
	before := disk.syncs
	disk.mu.Unlock()
	const n = 100
	answers := make(chan error, n)
	for i := range n {
		m := mac(i)
		at := mustOffer(t, d, m)
		mustBind(t, d, m, at)
		if !d.Commit(mac(1), func(kept error) {
			disk.mu.Lock()
			data := string(disk.flushed)
			disk.mu.Unlock()
			if want := fmt.Sprintf(" %s %s\n", m, at); kept == nil && !strings.Contains(data, want) {
				kept = fmt.Errorf("answered before %q was flushed", want)
			}
			answers <- kept
		}) {
			t.Fatal("Commit refused")
		}
	}
	select {
	case <-answers:
		t.Error("an answer left before a flush")
	default:
	}
	close(gate)
	for range n {
		select {
		case err := <-answers:
			if err != nil {
				t.Error(err)
			}
		case <-t.Context().Done():
			t.Fatal("answers are missing")
		}
	}
	disk.mu.Lock()
	defer disk.mu.Unlock()
	if got := disk.syncs - before; got > n/4 {
		t.Errorf("%d flushes for %d leases, want them shared", got, n)
	}
}

// TestLaggingDisk: the queue is bounded, and what was dropped of it is written
// all the same.
func TestLaggingDisk(t *testing.T) {
	gate, stuck := make(chan struct{}), make(chan struct{}, 1)
	disk := &faultyDisk{}
	d := opened(t, Config{disk: disk, Known: func(m string) bool { return m == mac(1) }})
	disk.mu.Lock()
	disk.synced = func() {
		select {
		case stuck <- struct{}{}:
		default:
		}
		<-gate
	}
	disk.mu.Unlock()
	mustBind(t, d, mac(1), ip(10))
	<-stuck
	for _, tt := range []struct {
		mac  string
		want int
	}{{mac(2), maxQueue / 2}, {mac(1), maxQueue}} {
		for d.Commit(tt.mac, func(error) {}) {
		}
		d.mu.Lock()
		if got := len(d.log.calls); got != tt.want {
			t.Errorf("after the answers to %s, %d wait for a disk that lags, want %d", tt.mac, got, tt.want)
		}
		d.mu.Unlock()
	}
	mustBind(t, d, mac(2), ip(11))
	for range 2*maxQueue + 10 {
		mustBind(t, d, mac(3), ip(12))
	}
	d.mu.Lock()
	if d.log.n > 2*maxQueue {
		t.Errorf("%d lines wait for the disk, want at most %d", d.log.n, 2*maxQueue)
	}
	d.mu.Unlock()
	close(gate)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	after := openedOn(t, disk.flushed, Config{})
	for i := range 3 {
		if got, _ := after.Holder(ip(10 + i)); got != mac(1+i) {
			t.Errorf("Holder(%s) = %q, want %q", ip(10+i), got, mac(1+i))
		}
	}
}

func TestFileStaysShort(t *testing.T) {
	disk := &faultyDisk{}
	d := opened(t, Config{disk: disk})
	for range 3 * spare {
		mustBind(t, d, mac(1), ip(10))
	}
	d.Close()
	if disk.replaced < 2 || len(disk.flushed) > (spare+4*maxQueue)*80 {
		t.Errorf("the file was written anew %d times and has %d bytes", disk.replaced, len(disk.flushed))
	}
}

// machine is what a client believes, in true time.
type machine struct {
	has     netip.Addr // acknowledged
	until   time.Duration
	offered netip.Addr
	offer   time.Duration // until when the offer stands at least
}

// TestAgainstModel runs random operations, restarts and power cuts, and asks of
// each answer that it could have been given: nobody's address goes to another,
// and whoever has one keeps it.
func TestAgainstModel(t *testing.T) {
	steps := 4000
	if testing.Short() {
		steps = 500
	}
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { runModel(t, rand.New(rand.NewPCG(seed, 7)), steps) })
	}
}

func runModel(t *testing.T, rng *rand.Rand, steps int) {
	const (
		machines = 24
		pools    = 2
	)
	reservations := []Reservation{{mac(0), ip(10)}, {mac(1), ip(200)}}
	reserved := map[netip.Addr]string{ip(10): mac(0), ip(200): mac(1)}
	far := Pool{Name: "far", First: netip.MustParseAddr("10.5.0.1"), Last: netip.MustParseAddr("10.5.0.12")}
	clock := newClock()
	var now time.Duration // true time; the box's own is what it makes of clock
	pass := func(by time.Duration) { now += by; clock.step(by) }
	disk := &faultyDisk{}
	cfg := Config{Path: filepath.Join(t.TempDir(), "leases"), Pools: []Pool{lan(16), far}, Reservations: reservations, Now: clock.Now, disk: disk,
		Known: func(m string) bool { return m < mac(12) }}
	d := opened(t, cfg)
	names := [pools]string{"", "far"}
	var state [pools][machines]machine
	bad := map[netip.Addr]time.Duration{}
	claimed := func(p, i int, at netip.Addr, what string) {
		t.Helper()
		for j, other := range state[p] {
			if j == i {
				continue
			}
			if other.has == at && other.until > now {
				t.Fatalf("%s: %s gets %s, which %s has for %s", what, mac(i), at, mac(j), other.until-now)
			}
			if other.offered == at && other.offer > now {
				t.Fatalf("%s: %s gets %s, which is offered to %s", what, mac(i), at, mac(j))
			}
		}
		if m := reserved[at]; m != "" && m != mac(i) {
			t.Fatalf("%s: %s gets %s, which is reserved for %s", what, mac(i), at, m)
		}
		if bad[at] > now {
			t.Fatalf("%s: %s gets %s, which is in quarantine", what, mac(i), at)
		}
	}
	for range steps {
		p, i := rng.IntN(pools), rng.IntN(machines)
		m, me := mac(i), &state[p][i]
		switch op := rng.IntN(100); {
		case op < 35:
			at, err := d.Offer(names[p], m, me.has)
			var wait *WaitError
			switch {
			case err == nil:
				claimed(p, i, at, "Offer")
				if want := reservations[min(i, 1)].Address; p == 0 && i < 2 && at != want {
					t.Fatalf("Offer(%s) = %s, want the reserved %s", m, at, want)
				}
				if me.has.IsValid() && me.until > now && at != me.has {
					t.Fatalf("Offer(%s) = %s, though it has %s for %s", m, at, me.has, me.until-now)
				}
				me.offered, me.offer = at, now+Hold/8
			case errors.As(err, &wait):
				if reserved[wait.Address] != m {
					t.Fatalf("Offer(%s) = %v", m, err)
				}
			case me.has.IsValid() && me.until > now, !errors.Is(err, ErrFull):
				t.Fatalf("Offer(%s) = %v, though it has %s", m, err, me.has)
			}
		case op < 70:
			at := me.offered
			if rng.IntN(4) == 0 || !at.IsValid() {
				at = me.has
			}
			if rng.IntN(20) == 0 {
				at = ip(rng.IntN(256))
			}
			l, err := d.Bind(names[p], m, at, time.Hour)
			if err != nil {
				if at == me.has && at.IsValid() && me.until > now {
					t.Fatalf("Bind(%s, %s) = %v, though it has it for %s", m, at, err, me.until-now)
				}
				if at == me.offered && at.IsValid() && me.offer > now {
					t.Fatalf("Bind(%s, %s) = %v, though it is offered", m, at, err)
				}
				continue
			}
			claimed(p, i, at, "Bind")
			if rng.IntN(3) > 0 { // else its answer is lost with a cut, or left
				if err := committed(t, d); err != nil {
					t.Fatal(err)
				}
				*me = machine{has: at, until: now + l.Term}
			} else {
				// In memory only: the machine knows nothing, the next power cut may forget it.
				*me = machine{}
			}
		case op < 74:
			if me.has.IsValid() {
				d.Release(m, me.has)
				*me = machine{}
			}
		case op < 77:
			d.Withdraw(names[p], m)
			me.offered = netip.Addr{}
		case op < 79:
			at := me.has
			if me.offered.IsValid() {
				at = me.offered
			}
			if me.until <= now && me.offer <= now || !at.IsValid() {
				continue
			}
			d.Decline(m, at, true)
			if err := committed(t, d); err != nil {
				t.Fatal(err)
			}
			*me = machine{}
			clear(bad) // another may have come back for it
			if d.pools[names[p]].bad.Back() != nil {
				if s := d.pools[names[p]].bad.Back().Value.(*slot); s.ip == at {
					bad[at] = now + quarantine - time.Second
				}
			}
		case op < 81:
			at := ip(10 + rng.IntN(16))
			if taken, _ := d.Conflict(at, mac(99)); taken {
				for j := range machines {
					if o := &state[0][j]; o.offered == at {
						o.offered = netip.Addr{}
					}
					if o := state[0][j]; o.has == at && o.until > now {
						t.Fatalf("Conflict took %s, which %s has", at, mac(j))
					}
				}
			}
		case op < 96:
			pass(time.Duration(rng.IntN(int(10 * time.Minute))))
		case op < 98:
			// A restart, with whatever the wall clock says then.
			d.Close()
			clock.mu.Lock()
			clock.at = time.Unix(rng.Int64N(4_000_000_000), 0)
			clock.mu.Unlock()
			d = opened(t, cfg)
			forgetOffers(&state)
			clear(bad)
		default:
			data := disk.cut(rng)
			d.Close()
			if err := os.WriteFile(cfg.Path, data, 0o600); err != nil {
				t.Fatal(err)
			}
			d = opened(t, cfg)
			forgetOffers(&state)
			clear(bad)
		}
		if err := sound(d); err != nil {
			t.Fatal(err)
		}
	}
}

func forgetOffers(state *[2][24]machine) {
	for p := range state {
		for i := range state[p] {
			state[p][i].offered = netip.Addr{}
		}
	}
}

// sealed gives a line the checksum that it should have.
func sealed(line []byte) []byte {
	line, _ = bytes.CutSuffix(line, []byte("\n"))
	body := line[min(len(line), 9):]
	return fmt.Appendf(nil, "%08x %s\n", crc32.ChecksumIEEE(body), body)
}

// plainDisk flushes nothing.
type plainDisk struct{}

func (plainDisk) Replace(path string, data []byte) error { return os.WriteFile(path, data, 0o600) }

func (plainDisk) Append(path string) (appender, error) {
	a, err := realDisk{}.Append(path)
	return unflushed{a}, err
}

type unflushed struct{ appender }

func (unflushed) Sync() error { return nil }

func FuzzOpen(f *testing.F) {
	f.Add([]byte(text(leased(1, 15), leased(2, 16), record{kind: kindTime, clock: time.Hour}, record{kind: kindBad, clock: time.Hour, left: time.Minute, ip: ip(17)})))
	f.Add([]byte(text(leased(1, 15), leased(1, 16), leased(2, 16)) + "\x00\x00"))
	f.Add([]byte("00000000 lease 1 1 52:54:00:00:00:01 10.0.0.15\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		// The lines are given good checksums, so that more than the sums is tried.
		var b []byte
		for line := range bytes.Lines(data) {
			if rec, ok := parseRecord(sealed(line)); ok {
				if again, ok := parseRecord(rec.append(nil)); rec.kind != kindOld && (!ok || again != rec) {
					t.Errorf("%q does not survive writing: %+v, %+v", line, rec, again)
				}
			}
			b = append(b, sealed(line)...)
		}
		for _, content := range [][]byte{data, b} {
			clock := newClock()
			d := openedOn(t, content, Config{Now: clock.Now, Reservations: []Reservation{{mac(1), ip(12)}}, disk: plainDisk{}})
			if err := sound(d); err != nil {
				t.Error(err)
			}
			held := map[netip.Addr]string{}
			for i := range 256 {
				if m, ok := d.Holder(ip(i)); ok {
					held[ip(i)] = m
				}
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
			again := opened(t, d.cfg)
			for at, m := range held {
				if got, _ := again.Holder(at); got != m {
					t.Errorf("Holder(%s) = %q after another start, want %q", at, got, m)
				}
			}
			// It serves, and nothing lasts for ever.
			if _, err := again.Offer("", mac(77), netip.Addr{}); err != nil && !errors.Is(err, ErrFull) {
				t.Error(err)
			}
			clock.step(MaxTerm + Hold)
			if got := mustOffer(t, again, mac(78)); !again.pools[""].inRange(got) {
				t.Errorf("Offer = %s", got)
			}
			if err := sound(again); err != nil {
				t.Error(err)
			}
			again.Close()
		}
	})
}
