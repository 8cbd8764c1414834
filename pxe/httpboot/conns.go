package httpboot

import (
	"container/list"
	"net"
	"net/netip"
	"sync"
)

// capped bounds the connections. Above a host's cap a new one is closed at once:
// waiting ones would hold the queue. Above the cap of all, one makes room that no
// request of runs, of the host that has the most of them: whoever opens
// connections and asks for nothing keeps out nobody else.
type capped struct {
	net.Listener
	max, perHost int
	ready        func(*cappedConn) // sees each connection first; nil: none does

	mu      sync.Mutex
	total   int
	hosts   map[netip.Addr]int
	waiting list.List // of *cappedConn, the one that waits the longest first
}

func newCapped(ln net.Listener, limit, perHost int) *capped {
	return &capped{Listener: ln, max: limit, perHost: perHost, hosts: make(map[netip.Addr]int)}
}

func (c *capped) Accept() (net.Conn, error) {
	for {
		conn, err := c.Listener.Accept()
		if err != nil {
			return nil, err
		}
		var host netip.Addr
		if a, ok := conn.RemoteAddr().(*net.TCPAddr); ok {
			host = a.AddrPort().Addr().Unmap()
		}
		if v := c.victim(host); v != nil {
			_ = v.Close()
		}
		if !c.take(host) {
			conn.Close()
			continue
		}
		out := &cappedConn{Conn: conn, limits: usual, caps: c, host: host}
		if c.ready != nil {
			c.ready(out)
		}
		out.wait()
		return out, nil
	}
}

func (c *capped) take(host netip.Addr) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.total >= c.max || c.hosts[host] >= c.perHost {
		return false
	}
	c.total++
	c.hosts[host]++
	return true
}

func (c *capped) give(host netip.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.total--
	if c.hosts[host]--; c.hosts[host] <= 0 {
		delete(c.hosts, host)
	}
}

// victim is what makes room for one more of host; nil: nothing has to, or nothing can.
func (c *capped) victim(host netip.Addr) (v *cappedConn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.total < c.max || c.hosts[host] >= c.perHost {
		return nil
	}
	for e := c.waiting.Front(); e != nil; e = e.Next() {
		if w := e.Value.(*cappedConn); v == nil || c.hosts[w.host] > c.hosts[v.host] {
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
	if c.place == nil && !c.given {
		c.place = c.caps.waiting.PushBack(c)
	}
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
		c.runs--
		last := c.runs == 0
		c.caps.mu.Unlock()
		if last {
			c.wait()
		}
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
	given := c.given
	c.given = true
	c.leave()
	c.caps.mu.Unlock()
	if !given {
		c.caps.give(c.host)
	}
}
