package tftp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"
)

// Opcodes and error codes of RFC 1350.
const (
	opRead  = 1
	opWrite = 2
	opError = 5

	codeUndefined = 0
	codeAccess    = 2
	codeIllegal   = 4
)

// request is a read request, with the options that are served.
type request struct {
	name, mode     string
	blksize, tsize string
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
	for _, o := range [][2]string{{"blksize", r.blksize}, {"tsize", r.tsize}} {
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
// only well-formed read requests, under the caps, and answers the rest itself.
type gate struct {
	*net.UDPConn
	max, perClient int
	now            func() time.Time

	mu     sync.Mutex
	active map[netip.AddrPort]time.Time
	last   netip.AddrPort // the request passed on last

	drained chan struct{} // closed once the reader has seen the socket's end
	once    sync.Once
}

func newGate(conn *net.UDPConn, limit, perClient int, now func() time.Time) *gate {
	return &gate{UDPConn: conn, max: limit, perClient: perClient, now: now,
		active: make(map[netip.AddrPort]time.Time), drained: make(chan struct{})}
}

// repeatWindow is how long a request from the same port counts as its repeat:
// the transfer that runs sends its first packet again by itself.
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
		ok, repeat := g.admit(from)
		if repeat {
			continue
		}
		if !ok {
			_, _ = g.WriteToUDPAddrPort(errorPacket(codeUndefined, "too many transfers, try again"), from)
			continue
		}
		return r.marshal(b), net.UDPAddrFromAddrPort(from), nil
	}
}

// Close ends the socket and waits until the reader passes nothing more on.
func (g *gate) Close() error {
	err := g.UDPConn.Close()
	<-g.drained
	return err
}

func (g *gate) admit(from netip.AddrPort) (ok, repeat bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := g.now()
	if began, running := g.active[from]; running && now.Sub(began) < repeatWindow {
		return false, true
	}
	same := 0
	for a := range g.active {
		if a.Addr() == from.Addr() {
			same++
		}
	}
	if len(g.active) >= g.max || same >= g.perClient {
		return false, false
	}
	g.active[from], g.last = now, from
	return true, false
}

func (g *gate) done(from netip.AddrPort) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.active, from)
}

// failed drops the last request: the library could not start its transfer.
func (g *gate) failed() {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.active, g.last)
}
