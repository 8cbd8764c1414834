package httpboot

import (
	"container/list"
	"net"
	"net/netip"
	"sync"
	"time"
)

// host is whom a connection counts for: the machine that has its address, nobody
// where none has, and whether somebody vouches for that machine. Of IPv6 a host has
// as many addresses as it likes.
type host struct {
	machine string
	known   bool
}

// capped bounds the connections. Above a host's cap a new one is closed at once:
// waiting ones would hold the queue. Above the cap of all, one makes room that no
// request of runs, of the host that has the most of them: whoever opens
// connections and asks for nothing keeps out nobody else. Hosts that nobody vouches
// for have half of all, so that one that makes up machines keeps out no known one.
type capped struct {
	net.Listener
	max, perHost int
	counts       func(netip.Addr) (machine string, known bool)
	ready        func(*cappedConn) // sees each connection first; nil: none does

	mu      sync.Mutex
	total   int
	strange int // of hosts that are not known
	hosts   map[host]int
	open    map[*cappedConn]struct{}
	waiting list.List // of *cappedConn, the one that waits the longest first
}

func newCapped(ln net.Listener, limit, perHost int) *capped {
	return &capped{Listener: ln, max: limit, perHost: perHost, counts: byAddress, hosts: make(map[host]int), open: make(map[*cappedConn]struct{})}
}

// byAddress counts each address by itself.
func byAddress(a netip.Addr) (machine string, known bool) { return a.String(), true }

func (c *capped) Accept() (net.Conn, error) {
	for {
		conn, err := c.Listener.Accept()
		if err != nil {
			return nil, err
		}
		var from host
		if a, ok := conn.RemoteAddr().(*net.TCPAddr); ok {
			from.machine, from.known = c.counts(a.AddrPort().Addr().Unmap())
		}
		c.room(from)
		if !c.take(from) {
			conn.Close()
			continue
		}
		out := &cappedConn{Conn: conn, limits: usual, caps: c, host: from, since: time.Now()}
		if c.ready != nil {
			c.ready(out)
		}
		c.mu.Lock()
		c.open[out] = struct{}{}
		c.mu.Unlock()
		out.wait()
		return out, nil
	}
}

func (c *capped) take(from host) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.total >= c.max || c.crowded(from) || c.hosts[from] >= c.perHost {
		return false
	}
	c.count(from, 1)
	return true
}

// crowded says that hosts that are not known have all that they may, and from is one;
// the caller holds mu.
func (c *capped) crowded(from host) bool { return !from.known && c.strange >= c.max/2 }

// count adds n connections of from; the caller holds mu.
func (c *capped) count(from host, n int) {
	c.total += n
	if !from.known {
		c.strange += n
	}
	if c.hosts[from] += n; c.hosts[from] <= 0 {
		delete(c.hosts, from)
	}
}

// room closes what makes room for one more of from, while no request of it can begin.
func (c *capped) room(from host) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if v := c.victim(from); v != nil {
		v.free()
		_ = v.Conn.Close()
	}
}

// reset takes out what a machine had open at one of its addresses before a time, at
// every one where none is given: for the caller to break off, which may wait for a disk
// that a connection is sent from.
func (c *capped) reset(machine string, at netip.Addr, before time.Time) (gone []*cappedConn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if machine == "" || c.hosts[host{machine, true}]+c.hosts[host{machine, false}] == 0 {
		return nil
	}
	for conn := range c.open {
		from, ok := conn.RemoteAddr().(*net.TCPAddr)
		if conn.host.machine != machine || !conn.since.Before(before) || at.IsValid() && (!ok || from.AddrPort().Addr().Unmap() != at) {
			continue
		}
		conn.free()
		gone = append(gone, conn)
	}
	return gone
}

// victim is what makes room for one more of from; nil: nothing has to, or nothing can.
// The caller holds mu.
func (c *capped) victim(from host) (v *cappedConn) {
	crowded := c.crowded(from)
	if c.total < c.max && !crowded || c.hosts[from] >= c.perHost {
		return nil
	}
	for e := c.waiting.Front(); e != nil; e = e.Next() {
		w := e.Value.(*cappedConn)
		if (!crowded || !w.host.known) && (v == nil || c.hosts[w.host] > c.hosts[v.host]) {
			v = w
		}
	}
	return v
}

// wait says that no request of the connection runs, until begin does.
func (c *cappedConn) wait() {
	if c.caps == nil {
		return
	}
	c.caps.mu.Lock()
	defer c.caps.mu.Unlock()
	c.join()
}

// begin says that a request runs; end is called when it does no more.
func (c *cappedConn) begin() (end func()) {
	if c.caps == nil {
		return func() {}
	}
	c.caps.mu.Lock()
	defer c.caps.mu.Unlock()
	c.runs++
	c.leave()
	return func() {
		c.caps.mu.Lock()
		defer c.caps.mu.Unlock()
		// A drive that was given back may have its next request begun already.
		if c.runs--; c.runs == 0 {
			c.join()
		}
	}
}

// join puts the connection among those that wait; the caller holds mu.
func (c *cappedConn) join() {
	if c.place == nil && !c.given {
		c.place = c.caps.waiting.PushBack(c)
	}
}

// leave takes the connection out of those that wait; the caller holds mu.
func (c *cappedConn) leave() {
	if c.place != nil {
		c.caps.waiting.Remove(c.place)
		c.place = nil
	}
}

// release gives the connection's place back, once.
func (c *cappedConn) release() {
	if c.caps == nil {
		return
	}
	c.caps.mu.Lock()
	defer c.caps.mu.Unlock()
	c.free()
}

// free is release for one who holds mu.
func (c *cappedConn) free() {
	if c.given {
		return
	}
	c.given = true
	delete(c.caps.open, c)
	c.leave()
	c.caps.count(c.host, -1)
}
