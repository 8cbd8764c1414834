package httpboot

import (
	"net/netip"
	"testing"
)

// TestVictim: at the cap, one connection that asks for nothing makes room, of the
// host that has the most, and none that is being served.
func TestVictim(t *testing.T) {
	a, b, d := netip.MustParseAddr(addrA), netip.MustParseAddr(addrB), netip.MustParseAddr(addrC)
	c := newCapped(nil, 4, 3)
	open := func(host netip.Addr) *cappedConn {
		t.Helper()
		if !c.take(host) {
			t.Fatalf("take(%s) = false", host)
		}
		conn := &cappedConn{caps: c, host: host}
		conn.wait()
		return conn
	}
	first := open(b)
	if got := c.victim(d); got != nil {
		t.Errorf("victim under the cap = %v, want none", got)
	}
	busy, idle, next := open(a), open(a), open(a)
	end := busy.begin()
	again := busy.begin() // a drive that was handed back
	again()
	if got := c.victim(a); got != nil {
		t.Error("a host at its own cap gets another's place")
	}
	if got := c.victim(d); got != idle {
		t.Error("the victim is not the one that waits the longest of the host with the most")
	}
	end()
	idle.release()
	idle.release() // as net/http does: twice
	open(d)
	next.release()
	open(d)
	// One each of a and b, two of d.
	if got := c.victim(b); got == nil || got.host != d {
		t.Errorf("victim = %v, want one of %s", got, d)
	}
	defer first.begin()()
	for range c.waiting.Len() {
		defer c.waiting.Front().Value.(*cappedConn).begin()()
	}
	if got := c.victim(b); got != nil {
		t.Error("a connection that is served makes room")
	}
	if c.total != 4 || c.hosts[a] != 1 || c.hosts[b] != 1 || c.hosts[d] != 2 {
		t.Errorf("total %d, hosts %v, want 4 and 1, 1, 2", c.total, c.hosts)
	}
}
