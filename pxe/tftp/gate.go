package tftp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/pxe/limit"
)

// Opcodes and error codes of RFC 1350.
const (
	opRead    = 1
	opWrite   = 2
	opData    = 3
	opAck     = 4
	opError   = 5
	opOptions = 6

	codeUndefined = 0
	codeNotFound  = 1
	codeAccess    = 2
	codeIllegal   = 4
	codeTID       = 5
)

// request is a read request, with the options that are served.
type request struct {
	name, mode          string
	blksize, tsize      string
	windowsize, timeout string
}

// plain says that the library serves all that is asked: it knows no window and
// no time-out, and no block under 512 bytes.
func (r request) plain() bool {
	_, small := within(r.blksize, 8, 511)
	return r.windowsize == "" && r.timeout == "" && !small
}

var errWrite = errors.New("writing is not served")
var errMalformed = errors.New("malformed request")

// maxName bounds a file name; ours are far shorter.
const maxName = 255

// parse reads a request strictly. Firmware's spellings of a name (leading and
// doubled slashes, backslashes, a trailing 0xff from a NUL-less option) are
// brought to one form, options to lower case.
func parse(p []byte) (request, error) {
	if len(p) < 2 {
		return request{}, errMalformed
	}
	switch binary.BigEndian.Uint16(p) {
	case opRead:
	case opWrite:
		return request{}, errWrite
	default:
		return request{}, errMalformed
	}
	body, ok := bytes.CutSuffix(p[2:], []byte{0})
	if !ok {
		return request{}, errMalformed
	}
	parts := strings.Split(string(body), "\x00")
	if len(parts) < 2 || len(parts)%2 != 0 {
		return request{}, errMalformed
	}
	r := request{name: clean(parts[0]), mode: strings.ToLower(parts[1])}
	if r.name == "" || len(parts[0]) > maxName || r.mode != "octet" {
		return request{}, errMalformed
	}
	for i := 2; i < len(parts); i += 2 {
		name, value := strings.ToLower(parts[i]), parts[i+1]
		if !number(value) {
			continue
		}
		switch name {
		case "blksize":
			r.blksize = value
		case "tsize":
			r.tsize = value
		case "windowsize":
			r.windowsize = value
		case "timeout":
			r.timeout = value
		}
	}
	return r, nil
}

func number(s string) bool {
	return len(s) >= 1 && len(s) <= 12 && strings.Trim(s, "0123456789") == ""
}

func clean(name string) string {
	for len(name) > 0 && name[len(name)-1] == 0xff {
		name = name[:len(name)-1]
	}
	var parts []string
	for part := range strings.SplitSeq(strings.ReplaceAll(name, `\`, "/"), "/") {
		if part != "" && part != "." {
			parts = append(parts, part)
		}
	}
	return strings.Join(parts, "/")
}

// marshal writes the request in the one form that is passed on.
func (r request) marshal(b []byte) int {
	out := append(b[:0], 0, opRead)
	for _, s := range []string{r.name, r.mode} {
		out = append(append(out, s...), 0)
	}
	for _, o := range [][2]string{{"blksize", r.blksize}, {"tsize", r.tsize}, {"windowsize", r.windowsize}, {"timeout", r.timeout}} {
		if o[1] != "" {
			out = append(append(out, o[0]...), 0)
			out = append(append(out, o[1]...), 0)
		}
	}
	return len(out)
}

func errorPacket(code byte, message string) []byte {
	return append(append([]byte{0, opError, 0, code}, message...), 0)
}

// gate stands between the socket and the library's server: it lets through
// only well-formed plain read requests, under the caps, hands others to our
// own sender, and answers the rest itself.
type gate struct {
	*net.UDPConn
	max, perClient int
	// counts is whom an address counts for, as Config.CountsFor.
	counts  func(netip.Addr) (machine string, known bool)
	now     func() time.Time
	limiter *limit.Limiter
	// refused answers a request for what its sender may not have, and says so: that
	// costs no transfer's socket. It may be nil.
	refused func(from netip.AddrPort, name string) bool
	// own starts a transfer of our own sender.
	own func(ctx context.Context, r request, s *slot, from netip.AddrPort)

	mu     sync.Mutex
	active map[netip.AddrPort]*slot
	last   netip.AddrPort // the request passed on last
	// passing are the requests passed on whose transfer has not begun.
	passing map[netip.AddrPort]*slot
	passed  int // the library's transfers that no client has answered yet

	drained chan struct{} // closed once the reader has seen the socket's end
	once    sync.Once
}

// slot is one transfer, of either server.
type slot struct {
	machine  string
	known    bool
	began    time.Time
	opening  string // the file that is being opened, which may take long
	answered bool
	library  bool
	drop     context.CancelFunc
}

func newGate(conn *net.UDPConn, most, perClient int, now func() time.Time) *gate {
	byAddress := func(a netip.Addr) (string, bool) { return a.String(), true }
	return &gate{UDPConn: conn, max: most, perClient: perClient, counts: byAddress, now: now, limiter: limit.New(),
		active: make(map[netip.AddrPort]*slot), passing: make(map[netip.AddrPort]*slot), drained: make(chan struct{})}
}

// repeatWindow is how long a request from the same port counts as its repeat, once
// the file is open: the transfer that runs sends its first packet again by itself.
const repeatWindow = 2 * time.Second

func (g *gate) ReadFrom(b []byte) (int, net.Addr, error) {
	buf := make([]byte, 1024)
	for {
		n, from, err := g.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			g.once.Do(func() { close(g.drained) })
			// The library asks again at once until it is told to stop.
			time.Sleep(10 * time.Millisecond)
			return 0, nil, err
		}
		if err != nil {
			time.Sleep(10 * time.Millisecond) // such as ENETDOWN while the link flaps
			continue
		}
		from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
		if !g.limiter.Allow(g.bucket(from), g.now()) {
			continue // a flood must not fill the kernel's queue
		}
		r, err := parse(buf[:n])
		if err != nil {
			code := byte(codeIllegal)
			if errors.Is(err, errWrite) {
				code = codeAccess
			}
			// An error is never answered with an error, or two servers would talk for ever.
			if n < 2 || binary.BigEndian.Uint16(buf) != opError {
				_, _ = g.WriteToUDPAddrPort(errorPacket(code, err.Error()), from)
			}
			continue
		}
		if g.refused != nil && g.refused(from, r.name) {
			continue
		}
		if g.awaits(from, r.name) {
			continue // GRUB asks again until it is answered
		}
		ctx, cancel := context.WithCancelCause(context.Background())
		slot, silent := g.admit(from, r.plain() && g.answers(from), func() { cancel(errDropped) })
		if silent {
			cancel(nil)
			continue
		}
		if slot == nil {
			cancel(nil)
			_, _ = g.WriteToUDPAddrPort(errorPacket(codeUndefined, "too many transfers, try again"), from)
			continue
		}
		if !slot.library {
			g.own(ctx, r, slot, from)
			continue
		}
		return r.marshal(b), net.UDPAddrFromAddrPort(from), nil
	}
}

// answers says that what the library sends to a client leaves from the address
// that the client asked: it lets the kernel choose one by its routes, which lead
// elsewhere where two networks share addresses or the client is behind a relay.
func (g *gate) answers(to netip.AddrPort) bool {
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
	if err != nil {
		return false
	}
	defer c.Close()
	return c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap() == g.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap()
}

// bucket is what a packet counts for: an eighth of an address, by its ports, so
// that a GRUB that fetches its many modules is not held up. Of IPv6 a host has as
// many addresses as it likes: those that are no machine's are one.
func (g *gate) bucket(from netip.AddrPort) (k [6]byte) {
	machine := ""
	if from.Addr().Is6() {
		machine, _ = g.counts(from.Addr())
	}
	if a := from.Addr().As16(); from.Addr().Is4() || machine != "" {
		k = [6]byte(a[10:])
	}
	k[0] = byte(from.Port() % 8)
	return k
}

// Close ends the socket and waits until the reader passes nothing more on.
func (g *gate) Close() error {
	err := g.UDPConn.Close()
	<-g.drained
	return err
}

// errDropped ends a transfer that nobody has answered, for another's sake.
var errDropped = errors.New("another client needed its place")

// admit gives a request its slot; nil: refused, or silent, where it is a repeat or
// there is no place: firmware asks again for half a minute, and gives up on an
// error. At a cap, the oldest transfer that nobody has answered makes room:
// requests with a forged source get no answer, so they keep out nobody who does.
// Machines that nobody vouches for have half of the places together: their MACs can
// be made up.
func (g *gate) admit(from netip.AddrPort, plain bool, drop context.CancelFunc) (s *slot, silent bool) {
	machine, known := g.counts(from.Addr())
	g.mu.Lock()
	defer g.mu.Unlock()
	now := g.now()
	before, running := g.active[from]
	if running && now.Sub(before.began) < repeatWindow {
		return nil, true
	}
	if running {
		g.remove(from, before)
	}
	var all, same, strange share
	for a, s := range g.active {
		all.add(a, s)
		if s.machine == machine {
			same.add(a, s)
		}
		if !s.known {
			strange.add(a, s)
		}
	}
	for _, bound := range []struct {
		share
		reached, silent bool
	}{
		{same, same.n >= g.perClient, false},
		{strange, !known && strange.n >= max(g.max/2, 1), true},
		{all, all.n >= g.max, true},
	} {
		if !bound.reached {
			continue
		}
		if bound.unanswered == nil {
			return nil, bound.silent
		}
		g.remove(bound.oldest, bound.unanswered)
		break // one place is what it takes
	}
	// The library's transfers cannot be dropped, so few may wait there for an answer.
	s = &slot{machine: machine, known: known, began: now, drop: drop, library: plain && g.passed < max(g.max/2, 1) && g.passing[from] == nil}
	if s.library {
		g.passed++
		g.passing[from] = s
		g.last = from
	}
	g.active[from] = s
	return s, false
}

// share are transfers that count together, and the oldest that nobody has answered.
type share struct {
	n          int
	oldest     netip.AddrPort
	unanswered *slot
}

func (h *share) add(a netip.AddrPort, s *slot) {
	h.n++
	if !s.answered && (h.unanswered == nil || s.began.Before(h.unanswered.began)) {
		h.oldest, h.unanswered = a, s
	}
}

// windowBytes is what one more transfer may keep for sending again.
func (g *gate) windowBytes() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return maxWindowBytes * fullWindows / max(len(g.active), fullWindows)
}

// remove forgets a transfer and ends it; the caller holds mu.
func (g *gate) remove(from netip.AddrPort, s *slot) {
	delete(g.active, from)
	s.drop()
}

// begun is the slot of the library's transfer to from, which begins; nil: none was passed on.
func (g *gate) begun(from netip.AddrPort) *slot {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.passing[from]
	delete(g.passing, from)
	return s
}

// opens says which file is being opened for a transfer, and with none that it is open
// and its first packet is sent now.
func (g *gate) opens(s *slot, name string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s.opening, s.began = name, g.now()
}

// awaits says that what from asks for is being opened for it already.
func (g *gate) awaits(from netip.AddrPort, name string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.active[from]
	return s != nil && s.opening == name
}

// established says that the client has answered.
func (g *gate) established(s *slot) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !s.answered && s.library {
		g.passed--
	}
	s.answered = true
}

func (g *gate) done(from netip.AddrPort, s *slot) {
	g.established(s)
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.active[from] == s {
		delete(g.active, from)
	}
	s.drop()
}

// failed drops the last request: the library could not start its transfer.
func (g *gate) failed() {
	g.mu.Lock()
	from := g.last
	g.mu.Unlock()
	if s := g.begun(from); s != nil {
		g.done(from, s)
	}
}
