package httpboot

import (
	"fmt"
	"net"
	"testing"
)

// opened is a connection that has a place and waits.
func opened(t *testing.T, c *capped, from host) *cappedConn {
	t.Helper()
	if !c.take(from) {
		t.Fatalf("take(%v) = false", from)
	}
	conn := &cappedConn{caps: c, host: from}
	conn.wait()
	return conn
}

// TestVictim: at the cap, one connection that asks for nothing makes room, of the
// host that has the most, and none that is being served.
func TestVictim(t *testing.T) {
	a, b, d := host{addrA, true}, host{addrB, true}, host{addrC, true}
	c := newCapped(nil, 4, 3)
	open := func(from host) *cappedConn { return opened(t, c, from) }
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
		t.Errorf("victim = %v, want one of %v", got, d)
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

// TestStrangersShare: hosts that nobody vouches for have half of the places, nobody's
// addresses as few as one host, and neither takes a known machine's.
func TestStrangersShare(t *testing.T) {
	c := newCapped(nil, 8, 3)
	var nobody host
	for range 3 {
		opened(t, c, nobody)
	}
	if c.take(nobody) {
		t.Error("addresses that are nobody's have more than one host may")
	}
	stranger := func(i int) host { return host{machine: fmt.Sprint("stranger ", i)} }
	first := opened(t, c, stranger(1))
	known := opened(t, c, host{"known", true})
	if c.take(stranger(2)) {
		t.Error("strangers have more than half")
	}
	if v := c.victim(stranger(2)); v == nil || v.host != nobody {
		t.Errorf("victim = %v, want a connection that is nobody's", v)
	}
	for c.waiting.Len() > 1 {
		if w := c.waiting.Front().Value.(*cappedConn); w != known {
			defer w.begin()()
		} else {
			c.waiting.MoveToBack(c.waiting.Front())
		}
	}
	if v := c.victim(stranger(2)); v != nil {
		t.Errorf("victim for a stranger = %v, want none: a known machine's is not given to it", v)
	}
	first.release()
	opened(t, c, stranger(2)).release()
	for i := range 3 {
		opened(t, c, host{fmt.Sprint("known ", i), true})
	}
	if c.strange != 3 || c.total != 7 {
		t.Errorf("%d connections, %d of strangers, want 7 and 3", c.total, c.strange)
	}
}

// come are connections that come one after the other.
type come struct {
	net.Listener
	conns chan net.Conn
}

func (l come) Accept() (net.Conn, error) { return <-l.conns, nil }

// told is a connection that says when it is closed.
type told struct {
	net.Conn
	from   string
	closed func()
}

func (c told) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.ParseIP(c.from)} }

func (c told) Close() error {
	c.closed()
	return nil
}

// TestRoomIsMadeBeforeRequestsBegin: between the choice of a connection that makes room
// and its end no request of it begins, which would be cut.
func TestRoomIsMadeBeforeRequestsBegin(t *testing.T) {
	ln := come{conns: make(chan net.Conn, 2)}
	c := newCapped(ln, 1, 1)
	closed := 0
	ln.conns <- told{from: addrA, closed: func() {
		closed++
		if c.mu.TryLock() {
			c.mu.Unlock()
			t.Error("a request can begin while its connection makes room")
		}
	}}
	ln.conns <- told{from: addrB}
	for range 2 {
		if _, err := c.Accept(); err != nil {
			t.Fatal(err)
		}
	}
	if closed != 1 || c.total != 1 || c.hosts[host{addrB, true}] != 1 {
		t.Errorf("%d closed, hosts %v, want the first to have made room for the second", closed, c.hosts)
	}
}

// TestWaitsOnlyWithoutRequests: a request that begins while the one before it ends, as
// after a drive, keeps its connection from making room.
func TestWaitsOnlyWithoutRequests(t *testing.T) {
	c := newCapped(nil, 1, 1)
	conn := &cappedConn{caps: c, host: host{addrA, true}}
	c.take(conn.host)
	end := conn.begin()
	for range 500_000 {
		began := make(chan func(), 1)
		go func() { began <- conn.begin() }()
		end()
		end = <-began
		if c.victim(host{addrB, true}) != nil {
			t.Fatal("a connection that is served makes room")
		}
	}
}
