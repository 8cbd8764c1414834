package probe

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"time"
)

// IPMI is what a BMC says before anybody logs in.
type IPMI struct {
	Port uint16 `json:"port"`
	// Ping says that it answered the ASF presence ping.
	Ping bool `json:"ping"`
	// Version2 says that it takes IPMI 2.0 sessions (RMCP+).
	Version2 bool `json:"ipmi_2_0"`
	// Suites are the cipher suites that it offers; empty: it does not say.
	Suites []int `json:"cipher_suites,omitempty"`
	// Weak says what lets anybody in, or makes a password worth little.
	Weak []string `json:"weak,omitempty"`
}

// defaultSuite is what driver ipmi takes unless it is told otherwise; suites are
// all that it takes, best first.
const defaultSuite = 17

var suites = []int{defaultSuite, 12, 8, 3}

// suite is the best of the BMC's cipher suites that driver ipmi takes; 0: none is known.
func (i *IPMI) suite() int {
	for _, s := range suites {
		if slices.Contains(i.Suites, s) {
			return s
		}
	}
	return 0
}

const (
	tries       = 3
	maxDatagram = 512
	channelAuth = 0x38 // IPMI 2.0, 22.13
	channelKeys = 0x54 // IPMI 2.0, 22.15
	thisChannel = 0x0e
)

// errSilent is a BMC that does not answer a question.
var errSilent = errors.New("no answer")

// askIPMI asks what can be asked without a session. It is nil where nothing answers.
func askIPMI(ctx context.Context, address string, timeout time.Duration) (*IPMI, []string) {
	_, port, _ := net.SplitHostPort(address)
	number, _ := strconv.ParseUint(port, 10, 16)
	out := &IPMI{Port: uint16(number)}
	conn, err := (&net.Dialer{Timeout: timeout}).DialContext(ctx, "udp", address)
	if err != nil {
		return nil, []string{"ipmi: " + legible(err.Error())}
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	l := &line{ctx: ctx, conn: conn, wait: timeout / (2 * tries)}

	out.Ping = l.ping() == nil
	auth, err := l.command(channelAuth, []byte{thisChannel | 0x80, 4})
	if err != nil && !out.Ping {
		return nil, []string{"ipmi: UDP " + address + ": " + legible(err.Error())}
	}
	if err != nil {
		return out, []string{"ipmi: Get Channel Authentication Capabilities: " + legible(err.Error())}
	}
	out.judge(auth)
	if out.Version2 {
		out.Suites = l.suites()
		if slices.Contains(out.Suites, 0) {
			out.Weak = append(out.Weak, "cipher suite 0 is offered: it lets anybody in where the BMC allows it")
		}
	}
	return out, nil
}

// judge reads an answer of Get Channel Authentication Capabilities.
func (i *IPMI) judge(data []byte) {
	if len(data) < 4 {
		return
	}
	extended := data[1]&0x80 != 0
	i.Version2 = extended && data[3]&0x02 != 0
	for _, w := range []struct {
		set  bool
		text string
	}{
		{data[2]&0x01 != 0, "anonymous login is enabled"},
		{data[2]&0x02 != 0, "a user without a name is enabled"},
		{data[1]&0x01 != 0, "IPMI 1.5 sessions without authentication are enabled"},
	} {
		if w.set {
			i.Weak = append(i.Weak, w.text)
		}
	}
}

// line asks questions, one after the other, and hears the answers that fit.
type line struct {
	ctx  context.Context
	conn net.Conn
	wait time.Duration
	seq  byte
}

// exchange sends a datagram up to three times, and gives the first answer that fit takes.
func (l *line) exchange(out []byte, fit func([]byte) ([]byte, bool)) ([]byte, error) {
	buf := make([]byte, maxDatagram)
	for range tries {
		if err := l.ctx.Err(); err != nil {
			return nil, err
		}
		if _, err := l.conn.Write(out); err != nil {
			return nil, err
		}
		deadline := time.Now().Add(l.wait)
		for {
			_ = l.conn.SetReadDeadline(deadline)
			n, err := l.conn.Read(buf)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				break
			}
			if err != nil {
				return nil, err
			}
			if data, ok := fit(buf[:n]); ok {
				return bytes.Clone(data), nil
			}
		}
	}
	return nil, errSilent
}

// RMCP's header: version 1.0, no acknowledgement, and the class (ASF 2.0, 3.2.2).
var (
	asfHead  = []byte{6, 0, 0xff, 6}
	ipmiHead = []byte{6, 0, 0xff, 7}
	asfIANA  = binary.BigEndian.AppendUint32(nil, 4542)
)

// ping is the ASF presence ping (ASF 2.0, 3.2.4).
func (l *line) ping() error {
	const presencePing, presencePong = 0x80, 0x40
	l.seq++
	tag := l.seq
	_, err := l.exchange(slices.Concat(asfHead, asfIANA, []byte{presencePing, tag, 0, 0}), func(in []byte) ([]byte, bool) {
		ok := len(in) >= 12 && bytes.Equal(in[:2], asfHead[:2]) && in[3] == asfHead[3] && bytes.Equal(in[4:8], asfIANA) && in[8] == presencePong && in[9] == tag
		return in, ok
	})
	return err
}

// command sends an application command outside of any session (IPMI 2.0, 13.6
// and 13.8) and gives what follows the completion code.
func (l *line) command(number byte, data []byte) ([]byte, error) {
	l.seq++
	seq := l.seq & 0x3f << 2
	answer, err := l.exchange(request(seq, number, data), func(in []byte) ([]byte, bool) { return response(in, seq, number) })
	if err != nil {
		return nil, err
	}
	if code := answer[0]; code != 0 {
		return nil, fmt.Errorf("completion code %02xh", code)
	}
	return answer[1:], nil
}

const (
	bmcAddress    = 0x20
	remoteConsole = 0x81
	appRequest    = 0x06 << 2
	appResponse   = 0x07 << 2
)

func request(seq, number byte, data []byte) []byte {
	head := []byte{bmcAddress, appRequest}
	body := append([]byte{remoteConsole, seq, number}, data...)
	message := slices.Concat(head, []byte{checksum(head)}, body, []byte{checksum(body)})
	// No authentication, and sequence number and session of zero.
	return slices.Concat(ipmiHead, make([]byte, 9), []byte{byte(len(message))}, message)
}

// response takes completion code and data out of the answer to a command.
func response(in []byte, seq, number byte) ([]byte, bool) {
	const before = 14 // RMCP's header, the session's, the length
	if len(in) < before || !bytes.Equal(in[:2], ipmiHead[:2]) || in[3] != ipmiHead[3] || in[4] != 0 {
		return nil, false
	}
	m := in[before:]
	if n := int(in[before-1]); n > len(m) {
		return nil, false
	} else {
		m = m[:n]
	}
	// Who is addressed is not looked at: some BMCs put their own address there.
	if len(m) < 8 || m[1]&^3 != appResponse || m[4]&^3 != seq || m[5] != number ||
		checksum(m[:2]) != m[2] || checksum(m[3:len(m)-1]) != m[len(m)-1] {
		return nil, false
	}
	return m[6 : len(m)-1], true
}

// checksum brings the sum of all bytes to zero.
func checksum(b []byte) (sum byte) {
	for _, x := range b {
		sum -= x
	}
	return sum
}

// suites lists the cipher suites, sixteen bytes of their records at a time.
func (l *line) suites() []int {
	const block, maxBlocks = 16, 64
	var records []byte
	for i := range byte(maxBlocks) {
		data, err := l.command(channelKeys, []byte{thisChannel, 0, 0x80 | i})
		if err != nil || len(data) < 1 {
			break
		}
		records = append(records, data[1:]...)
		if len(data) < 1+block {
			break
		}
	}
	return parseSuites(records)
}

// parseSuites reads cipher suite records (IPMI 2.0, table 22-18): a start byte,
// the suite's number, a vendor's three bytes where the start byte says so, and
// the algorithms. Vendors' own suites are left out.
func parseSuites(records []byte) []int {
	var out []int
	for i := 0; i+1 < len(records); {
		start := records[i]
		i++
		if start != 0xc0 && start != 0xc1 {
			continue
		}
		if start == 0xc0 {
			out = append(out, int(records[i]))
		}
		i++
		if start == 0xc1 {
			i += 3
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}
