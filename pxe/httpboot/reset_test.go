package httpboot

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"
)

// wire has the handler serve machines on the loopback: macA has 127.0.0.2 and 127.0.0.3,
// macB 127.0.0.4. open is a connection from one of them; closed hears when the box closes one.
func wire(t *testing.T, r *rig, l limits) (open func(from string) *client, closed chan struct{}) {
	t.Helper()
	macs := map[string]string{"127.0.0.2": macA, "127.0.0.3": macA, "127.0.0.4": macB}
	r.h.cfg.Holder = func(ip netip.Addr) (string, bool) { mac, ok := macs[ip.String()]; return mac, ok }
	r.h.cfg.CountsFor = func(ip netip.Addr) (string, bool) { return macs[ip.String()], true }
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed = make(chan struct{}, 1)
	serving(t, closing{ln, closed}, r.h, l)
	open = func(from string) *client {
		t.Helper()
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		conn, err := d.Dial("tcp4", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return &client{t, conn.(*net.TCPConn), bufio.NewReader(conn)}
	}
	return open, closed
}

type client struct {
	t  *testing.T
	to *net.TCPConn
	in *bufio.Reader
}

// script asks for macA's, and reads it.
func (c *client) script() {
	c.t.Helper()
	say(c.t, c.to, c.in, edk2("GET", "/boot/52-54-00-00-00-0a/script.ipxe", ""), "GET")
}

// begin asks and reads a few bytes of the answer.
func (c *client) begin(text string) {
	c.t.Helper()
	_ = c.to.SetDeadline(time.Now().Add(20 * time.Second))
	_, err := io.WriteString(c.to, text)
	if err == nil {
		_, err = io.ReadFull(c.in, make([]byte, 100))
	}
	if err != nil {
		c.t.Fatal(err)
	}
}

// end is how the connection ends.
func (c *client) end() error {
	_ = c.to.SetDeadline(time.Now().Add(20 * time.Second))
	_, err := io.Copy(io.Discard, c.in)
	return err
}

func wasReset(err error) bool { return errors.Is(err, syscall.ECONNRESET) }

// TestReset: what a machine had open at its address when it began to start again is
// reset, at rest and in the middle of an answer; what it opens from then on is not, nor
// what it has at another address, nor another machine's.
func TestReset(t *testing.T) {
	r := newRig(t)
	_, path := withDisc(t, r, 64<<20)
	open, _ := wire(t, r, usual)
	const addr, other, machineB = "127.0.0.2", "127.0.0.3", "127.0.0.4"
	rests, takes, mine, theirs := open(addr), open(addr), open(other), open(machineB)
	rests.script()
	takes.begin(edk2("GET", path, ""))
	mine.script()
	theirs.script()
	before := time.Now()
	later := open(addr)
	later.script()
	r.h.Reset("", netip.Addr{}, time.Now())
	r.h.Reset(macC, netip.Addr{}, time.Now())
	r.h.Reset(macA, netip.MustParseAddr(addr), before)
	for name, c := range map[string]*client{"at rest": rests, "in the middle of an answer": takes} {
		if err := c.end(); !wasReset(err) {
			t.Errorf("a connection %s ended by %v, want a reset", name, err)
		}
	}
	later.script()
	mine.script()
	r.h.Reset(macA, netip.Addr{}, time.Now())
	for _, c := range []*client{later, mine} {
		if err := c.end(); !wasReset(err) {
			t.Errorf("without an address a connection ended by %v, want a reset", err)
		}
	}
	theirs.script()
}

// TestNothingIsLeftOfWhoIsGone: a connection that the box closes since its client is late
// is reset, and one that an answer ends is not.
func TestNothingIsLeftOfWhoIsGone(t *testing.T) {
	r := newRig(t)
	_, path := withDisc(t, r, 64<<20)
	short := limits{request: 300 * time.Millisecond, idle: 300 * time.Millisecond, stall: 300 * time.Millisecond}
	open, _ := wire(t, r, short)
	for name, does := range map[string]func(c *client){
		"asks nothing":      func(*client) {},
		"asks nothing more": func(c *client) { c.script() },
	} {
		c := open("127.0.0.2")
		does(c)
		if err := c.end(); !wasReset(err) {
			t.Errorf("a client that %s ended by %v, want a reset", name, err)
		}
	}
	first, closed := wire(t, r, short)
	c := first("127.0.0.2")
	c.begin(edk2("GET", path, ""))
	select {
	case <-closed:
	case <-time.After(20 * time.Second):
		t.Fatal("the box waits on for a client that takes nothing")
	}
	if err := c.end(); !wasReset(err) {
		t.Errorf("a client that took nothing ended by %v, want a reset", err)
	}
	c = open("127.0.0.2")
	if _, body := say(t, c.to, c.in, edk2("GET", "/boot/52-54-00-00-00-0a/script.ipxe", "Connection: close\r\n"), "GET"); !strings.HasPrefix(string(body), "#!ipxe") {
		t.Errorf("script = %.40q", body)
	}
	if err := c.end(); err != nil {
		t.Errorf("a connection that its answer ends ended by %v, want an end", err)
	}
}

// TestSlowAnswerIsNoReset: an answer that takes longer than a request may does not cost its
// last bytes.
func TestSlowAnswerIsNoReset(t *testing.T) {
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := limits{request: 100 * time.Millisecond, idle: 20 * time.Second, stall: 20 * time.Second}
	serving(t, ln, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Connection", "close")
		w.Header().Set("Content-Length", "3")
		_, _ = io.WriteString(w, "few")
		_ = http.NewResponseController(w).Flush()
		time.Sleep(5 * l.request)
	}), l)
	conn, in := dial(t, ln.Addr())
	if _, body := say(t, conn, in, edk2("GET", "/", ""), "GET"); string(body) != "few" {
		t.Errorf("answer %q", body)
	}
	if _, err := in.ReadByte(); !errors.Is(err, io.EOF) {
		t.Errorf("it ended by %v, want an end", err)
	}
}

// TestGRUBsEnd: what GRUB closes is reset, after an answer and in the middle of one, and
// what another client closes is not.
func TestGRUBsEnd(t *testing.T) {
	r := newRig(t)
	_, path := withDisc(t, r, 64<<20)
	open, _ := wire(t, r, usual)
	for name, tt := range map[string]struct {
		text  string
		whole bool
		reset bool
	}{
		"GRUB, after an answer":           {grubGet("/grub/x86_64-efi/command.lst", ""), true, true},
		"GRUB, in the middle of one":      {grubGet(path, ""), false, true},
		"another client, after an answer": {edk2("GET", "/boot/52-54-00-00-00-0a/script.ipxe", ""), true, false},
	} {
		c := open("127.0.0.2")
		if tt.whole {
			say(t, c.to, c.in, tt.text, "GET")
		} else {
			c.begin(tt.text)
		}
		if err := c.to.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if err := c.end(); wasReset(err) != tt.reset || !tt.reset && err != nil {
			t.Errorf("%s: it ended by %v, want a reset: %v", name, err, tt.reset)
		}
	}
}
