package bmctest

import (
	"bufio"
	"context"
	"crypto/sha1" //nolint:gosec // WebSocket has it
	"encoding/base64"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"
)

// WebConsole is how a Redfish BMC has its machine's serial console.
type WebConsole struct {
	// Path is where its web service has it as a WebSocket, as OpenBMC's does; empty:
	// nowhere.
	Path string
	// OpenBMC marks the manager as OpenBMC's.
	OpenBMC bool
	// Types are the ConnectTypesSupported that the manager says; nil: it has no
	// SerialConsole.
	Types []string
	// Off: the manager says that the service is switched off.
	Off bool
	// Text: what the machine says comes in text frames, cut into pieces.
	Text bool
	// Refuse answers the upgrade with this status instead; 0: it does not.
	Refuse int
	// Stale refuses so many sessions at the upgrade, each for good.
	Stale int
	// Raw is sent instead of the answer to the upgrade, and RawFrames instead of
	// what the machine says; the connection stays open after either.
	Raw, RawFrames string
	// Repeat sends RawFrames without end.
	Repeat bool
}

// WithWebConsole gives the BMC such a console.
func WithWebConsole(w WebConsole) Option { return func(o *options) { o.console = &w } }

// webConsole is a BMC's side of it.
type webConsole struct {
	WebConsole

	mu    sync.Mutex
	stale map[string]bool
	open  map[net.Conn]bool
	seen  []string // values of X-Auth-Token
	quits int      // clients that said so
}

// DropWebConsoles cuts all that are open.
func (r *Redfish) DropWebConsoles() {
	w := r.webConsole
	w.mu.Lock()
	defer w.mu.Unlock()
	for conn := range w.open {
		_ = conn.Close()
	}
}

// WebConsoles counts those that are open, and the clients that left with a word.
func (r *Redfish) WebConsoles() (open, left int) {
	w := r.webConsole
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.open), w.quits
}

// WebConsoleTokens are the tokens that upgrades came with.
func (r *Redfish) WebConsoleTokens() []string {
	w := r.webConsole
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.seen...)
}

// describe adds what the manager says of the console.
func (w *webConsole) describe(manager object) {
	if w == nil {
		return
	}
	if w.OpenBMC {
		manager["Oem"] = object{"OpenBmc": object{"@odata.type": "#OpenBMCManager.v1_0_0.Manager"}}
	}
	if w.Types != nil {
		manager["SerialConsole"] = object{"ServiceEnabled": !w.Off, "MaxConcurrentSessions": 15, "ConnectTypesSupported": w.Types}
	}
}

// consoleTakes reports whether the request is the console's, which is served then.
func (r *Redfish) consoleTakes(rw http.ResponseWriter, req *http.Request) bool {
	w := r.webConsole
	if w == nil || w.Path == "" || req.URL.Path != w.Path {
		return false
	}
	token := req.Header.Get("X-Auth-Token")
	w.mu.Lock()
	w.seen = append(w.seen, token)
	if w.Stale > 0 && !w.stale[token] {
		w.Stale--
		w.stale[token] = true
	}
	stale := w.stale[token]
	w.mu.Unlock()
	answer := r.authorize(req)
	switch {
	case stale:
		r.mu.Lock()
		delete(r.sessions, token)
		r.mu.Unlock()
		bad := fail(http.StatusUnauthorized, "Base.1.8.InsufficientPrivilege", "The session "+token+" is not valid.")
		answer = &bad
	case answer == nil && w.Refuse != 0:
		bad := reply{status: w.Refuse, header: map[string]string{"Location": r.options.foreign + "/console0"}}
		answer = &bad
	}
	if answer != nil {
		r.write(rw, req, *answer)
		return true
	}
	conn, buffered, err := rw.(http.Hijacker).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	w.mu.Lock()
	w.open[conn] = true
	w.mu.Unlock()
	stop := context.AfterFunc(req.Context(), func() { _ = conn.Close() })
	defer func() {
		stop()
		_ = conn.Close()
		w.mu.Lock()
		delete(w.open, conn)
		w.mu.Unlock()
	}()
	_ = conn.SetDeadline(time.Time{})
	if w.Raw != "" {
		_, _ = io.WriteString(conn, w.Raw)
		_, _ = io.Copy(io.Discard, buffered)
		return true
	}
	sum := sha1.Sum([]byte(req.Header.Get("Sec-WebSocket-Key") + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11")) //nolint:gosec // as above
	_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "+
		base64.StdEncoding.EncodeToString(sum[:])+"\r\n\r\n")
	if w.RawFrames != "" {
		for {
			if _, err := io.WriteString(conn, strings.ReplaceAll(w.RawFrames, "TOKEN", token)); err != nil || !w.Repeat {
				break
			}
		}
		_, _ = io.Copy(io.Discard, buffered)
		return true
	}
	w.serve(conn, buffered.Reader, r.serial)
	return true
}

// serve joins the serial port and a client until either leaves.
func (w *webConsole) serve(conn net.Conn, in *bufio.Reader, port *Console) {
	serial, err := port.Open(context.Background())
	if err != nil {
		return
	}
	var writing sync.Mutex
	send := func(kind byte, payload []byte) error {
		writing.Lock()
		defer writing.Unlock()
		head := []byte{kind, 126}
		_, err := conn.Write(append(binary.BigEndian.AppendUint16(head, uint16(len(payload))), payload...)) //nolint:gosec // small pieces
		return err
	}
	gone := make(chan struct{})
	defer close(gone)
	go func() {
		buf := make([]byte, 1024)
		for {
			n, _ := serial.ReadAvailable(buf)
			switch {
			case n > 1 && w.Text:
				err = send(0x01, buf[:1])
				if err == nil {
					err = w.ping(conn, &writing)
				}
				if err == nil {
					err = send(0x80, buf[1:n])
				}
			case n > 0:
				err = send(0x82, buf[:n])
			default:
				select {
				case <-gone:
					return
				case <-time.After(2 * time.Millisecond): // the port is asked, as in IPMI's
				}
				continue
			}
			if err != nil {
				return
			}
		}
	}()
	for {
		kind, payload, err := readMasked(in)
		switch {
		case err != nil:
			return
		case kind == 0x88:
			w.mu.Lock()
			w.quits++
			w.mu.Unlock()
			writing.Lock()
			_, _ = conn.Write([]byte{0x88, 0})
			writing.Unlock()
			return
		case kind == 0x81 || kind == 0x82:
			_, _ = serial.Write(payload)
		}
	}
}

func (w *webConsole) ping(conn net.Conn, writing *sync.Mutex) error {
	writing.Lock()
	defer writing.Unlock()
	_, err := conn.Write([]byte{0x89, 2, 'h', 'i'})
	return err
}

// readMasked reads one frame of a client; one that is not masked is an error.
func readMasked(r *bufio.Reader) (kind byte, payload []byte, err error) {
	var head [2]byte
	if _, err = io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	n := int(head[1] & 0x7f)
	if n == 126 {
		var long [2]byte
		if _, err = io.ReadFull(r, long[:]); err != nil {
			return 0, nil, err
		}
		n = int(binary.BigEndian.Uint16(long[:]))
	}
	if n == 127 || head[1]&0x80 == 0 {
		return 0, nil, io.ErrUnexpectedEOF
	}
	var mask [4]byte
	if _, err = io.ReadFull(r, mask[:]); err != nil {
		return 0, nil, err
	}
	payload = make([]byte, n)
	if _, err = io.ReadFull(r, payload); err != nil {
		return 0, nil, err
	}
	for i := range payload {
		payload[i] ^= mask[i%4]
	}
	return head[0], payload, nil
}

// Console is the machine's serial port.
func (r *Redfish) Console() *Console { return r.serial }
