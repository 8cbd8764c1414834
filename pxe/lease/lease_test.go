package lease

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

var t0 = time.Unix(1_800_000_000, 0)

func pool(last string) Pool {
	return Pool{First: netip.MustParseAddr("10.0.0.10"), Last: netip.MustParseAddr(last), Exclude: []netip.Addr{netip.MustParseAddr("10.0.0.11")}}
}

func open(t *testing.T, path string, p Pool) *Table {
	t.Helper()
	table, err := Open(path, p)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { table.Close() })
	return table
}

func mac(i int) string { return fmt.Sprintf("52:54:00:00:%02x:%02x", i>>8, i&255) }

func bind(t *testing.T, table *Table, mac string, ip netip.Addr, now time.Time) {
	t.Helper()
	if kept, err := table.Bind(mac, ip, now, now.Add(time.Hour)); kept != nil || err != nil {
		t.Fatalf("Bind(%s, %s) = %v, %v", mac, ip, kept, err)
	}
}

func TestOneAddressPerMachine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "leases")
	table := open(t, path, pool("10.0.0.13")) // three usable addresses
	seen := map[netip.Addr]string{}
	for i := range 3 {
		ip, err := table.Offer(mac(i), netip.Addr{}, t0)
		if err != nil {
			t.Fatal(err)
		}
		if other, ok := seen[ip]; ok {
			t.Errorf("Offer(%s) = %s, which %s has", mac(i), ip, other)
		}
		if ip == netip.MustParseAddr("10.0.0.11") {
			t.Errorf("Offer(%s) = %s, which is excluded", mac(i), ip)
		}
		seen[ip] = mac(i)
		if again, _ := table.Offer(mac(i), netip.Addr{}, t0); again != ip {
			t.Errorf("Offer(%s) again = %s, want %s", mac(i), again, ip)
		}
		bind(t, table, mac(i), ip, t0)
	}
	if _, err := table.Offer(mac(9), netip.Addr{}, t0); !errors.Is(err, ErrFull) {
		t.Errorf("Offer on a full pool = %v, want ErrFull", err)
	}
	// After a restart everyone has what they had.
	again := open(t, path, pool("10.0.0.13"))
	for ip, m := range seen {
		if got, ok := again.Holder(ip); !ok || got != m {
			t.Errorf("after Open: Holder(%s) = %q, %v, want %q", ip, got, ok, m)
		}
	}
	// An ended lease goes to another machine only when nothing else is free.
	later := t0.Add(2 * time.Hour)
	got, err := again.Offer(mac(9), netip.Addr{}, later)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := again.Bind(seen[got], got, later, later.Add(time.Hour)); !errors.Is(err, ErrTaken) {
		t.Errorf("Bind of an address that is offered to another = %v, want ErrTaken", err)
	}
}

func TestWanted(t *testing.T) {
	table := open(t, filepath.Join(t.TempDir(), "leases"), pool("10.0.0.200"))
	want := netip.MustParseAddr("10.0.0.77")
	if got, _ := table.Offer(mac(1), want, t0); got != want {
		t.Errorf("Offer(wanted) = %s, want %s", got, want)
	}
	if got, _ := table.Offer(mac(2), want, t0); got == want {
		t.Errorf("Offer(wanted by two) = %s twice", got)
	}
	if got, _ := table.Offer(mac(3), netip.MustParseAddr("10.9.9.9"), t0); !table.pool.holds(got) {
		t.Errorf("Offer(outside) = %s, want one of the pool", got)
	}
}

func TestBindRefuses(t *testing.T) {
	table := open(t, filepath.Join(t.TempDir(), "leases"), pool("10.0.0.20"))
	ip := netip.MustParseAddr("10.0.0.15")
	bind(t, table, mac(1), ip, t0) // without an offer: fine while it is free
	for _, tt := range []struct {
		name, mac, ip string
		want          error
	}{
		{"another's", mac(2), "10.0.0.15", ErrTaken},
		{"outside", mac(2), "10.0.0.21", ErrTaken},
		{"excluded", mac(2), "10.0.0.11", ErrTaken},
		{"own", mac(1), "10.0.0.15", nil},
		{"own, moved", mac(1), "10.0.0.16", nil},
		{"left by the move", mac(2), "10.0.0.15", nil},
	} {
		if _, err := table.Bind(tt.mac, netip.MustParseAddr(tt.ip), t0, t0.Add(time.Hour)); !errors.Is(err, tt.want) {
			t.Errorf("Bind(%s) = %v, want %v", tt.name, err, tt.want)
		}
	}
}

func TestDeclineReleaseWithdraw(t *testing.T) {
	table := open(t, filepath.Join(t.TempDir(), "leases"), pool("10.0.0.12")) // two usable
	ip, _ := table.Offer(mac(1), netip.Addr{}, t0)
	table.Decline(mac(2), ip, t0) // not its own: no effect
	if got, _ := table.Offer(mac(1), netip.Addr{}, t0); got != ip {
		t.Errorf("a stranger's decline moved %s to %s", ip, got)
	}
	table.Decline(mac(1), ip, t0)
	other, err := table.Offer(mac(1), ip, t0)
	if err != nil || other == ip {
		t.Errorf("Offer after Decline = %s, %v, want another address", other, err)
	}
	if _, err := table.Offer(mac(2), netip.Addr{}, t0); !errors.Is(err, ErrFull) {
		t.Errorf("Offer of a declined address = %v, want ErrFull", err)
	}
	table.Withdraw(mac(1))
	if got, err := table.Offer(mac(2), netip.Addr{}, t0); err != nil || got != other {
		t.Errorf("Offer after Withdraw = %s, %v, want %s", got, err, other)
	}
	bind(t, table, mac(2), other, t0)
	table.Release(mac(2), other, t0)
	if got, err := table.Offer(mac(3), netip.Addr{}, t0); err != nil || got != other {
		t.Errorf("Offer after Release = %s, %v, want %s", got, err, other)
	}
}

func TestHostileFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "leases")
	good := string(line(&entry{ip: netip.MustParseAddr("10.0.0.15"), mac: mac(1), until: t0}))
	outside := string(line(&entry{ip: netip.MustParseAddr("192.0.2.1"), mac: mac(2), until: t0}))
	torn := string(line(&entry{ip: netip.MustParseAddr("10.0.0.16"), mac: mac(3), until: t0}))
	data := "garbage\n\n" + strings.Repeat("x", 10000) + "\n" + outside + good + strings.Replace(torn, "10.0.0.16", "10.0.0.17", 1) + torn[:len(torn)-1]
	if err := os.WriteFile(path, []byte(data), 0o600); err != nil {
		t.Fatal(err)
	}
	table := open(t, path, pool("10.0.0.20"))
	if got, ok := table.Holder(netip.MustParseAddr("10.0.0.15")); !ok || got != mac(1) || len(table.byIP) != 1 {
		t.Errorf("Open(hostile) holds %d leases, Holder = %q, want the one good line", len(table.byIP), got)
	}
	if got, _ := os.ReadFile(path); string(got) != good {
		t.Errorf("file after Open = %q, want %q", got, good)
	}
}

func TestServesWithoutDisk(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "gone")
	table := open(t, filepath.Join(dir, "leases"), pool("10.0.0.20"))
	ip, err := table.Offer(mac(1), netip.Addr{}, t0)
	if err != nil {
		t.Fatal(err)
	}
	kept, err := table.Bind(mac(1), ip, t0, t0.Add(time.Hour))
	if err != nil || kept == nil {
		t.Errorf("Bind without a disk = %v, %v, want a lease in memory and the reason", kept, err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	bind(t, table, mac(1), ip, t0)
	if got, ok := open(t, filepath.Join(dir, "leases"), pool("10.0.0.20")).Holder(ip); !ok || got != mac(1) {
		t.Errorf("once the disk is back: Holder = %q, %v, want %q", got, ok, mac(1))
	}
}

func TestRewrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "leases")
	table := open(t, path, pool("10.0.0.20"))
	ip := netip.MustParseAddr("10.0.0.15")
	bind(t, table, mac(1), ip, t0)
	table.lines = slack + 10
	bind(t, table, mac(1), ip, t0)
	if table.lines != 1 {
		t.Errorf("lines after a rewrite = %d, want 1", table.lines)
	}
}

func TestOpenRefusesPool(t *testing.T) {
	for _, p := range []Pool{
		{},
		{First: netip.MustParseAddr("10.0.0.9"), Last: netip.MustParseAddr("10.0.0.8")},
		{First: netip.MustParseAddr("10.0.0.0"), Last: netip.MustParseAddr("10.255.0.0")},
		{First: netip.MustParseAddr("fd00::1"), Last: netip.MustParseAddr("fd00::2")},
	} {
		if _, err := Open(filepath.Join(t.TempDir(), "leases"), p); err == nil {
			t.Errorf("Open(%s to %s) succeeded, want an error", p.First, p.Last)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(line(&entry{ip: netip.MustParseAddr("10.0.0.15"), mac: mac(1), until: t0}))
	f.Add([]byte("00000000 a b c\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		if e, ok := parse(text); ok {
			if again, ok := parse(line(e)); !ok || *again != *e {
				t.Errorf("parse(%q) = %+v does not survive writing", text, e)
			}
		}
	})
}
