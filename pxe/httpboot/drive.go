package httpboot

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// Pieces is a body that lies in a file, of which not all may be there yet: what
// Config.Artifacts opens is sent by the kernel, and read as a drive, if it is one.
type Pieces interface {
	// Next moves on by n bytes, at least one and at most limit, and tells where they
	// are: in the file from off on. The file is not the caller's to move or close.
	Next(limit int64) (f *os.File, off, n int64, err error)
	// Has says that Next does not wait for any of the n bytes from off on.
	Has(off, n int64) bool
	Seek(offset int64, whence int) (int64, error)
}

const (
	// driveFor is how long a drive is read before it is asked again whether it may be,
	// and how long it may be at rest before it is a connection like any other.
	driveFor = time.Second
	// driveHead bounds a request's head, and driveBlock a block that is sent with its head.
	driveHead, driveBlock = 2 << 10, 32 << 10
)

// plainHeaders are those of a request for a block that have no say in its answer.
var plainHeaders = []string{"host", "user-agent", "accept", "connection", "range"}

// drive is a connection on which one body is read block after block, as iPXE reads
// a drive: a request for a block costs a read, a read of the file and a write.
// All that is not such a request goes back to net/http as it came, and so does one
// for a block that has yet to arrive: net/http sees when the client closes meanwhile,
// unless it has sent more behind its request.
type drive struct {
	conn *cappedConn
	body Pieces
	size int64
	line []byte // the first line of its requests
	head []byte // of an answer, from behind the status and Content-Range on
	in   []byte // read and not answered yet
	out  []byte
}

// drives serves r and the blocks that follow on its connection, and reports
// whether it did: then w is not to be used any more.
func drives(w http.ResponseWriter, r *http.Request, body any, size int64) bool {
	conn, _ := r.Context().Value(connKey{}).(*cappedConn)
	content, ok := body.(Pieces)
	if conn == nil || conn.again == nil || !ok || r.Method != http.MethodGet || !r.ProtoAtLeast(1, 1) || r.Close || r.ContentLength != 0 {
		return false
	}
	for name := range r.Header {
		if !slices.Contains(plainHeaders, strings.ToLower(name)) {
			return false
		}
	}
	s := spanOf(r.Header.Get("Range"), size)
	if s.kind != part || !content.Has(s.first, s.last-s.first+1) {
		return false
	}
	d := &drive{conn: conn, body: content, size: size}
	// Before the headers are lost with w.
	head := w.Header().Clone()
	head.Del("Retry-After")
	head.Set("Accept-Ranges", "bytes")
	var text bytes.Buffer
	_ = head.Write(&text) // a buffer takes everything
	d.head = append(text.Bytes(), "\r\n"...)
	d.line = []byte("GET " + r.RequestURI + " HTTP/1.1\r\n")
	_, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return false
	}
	in, _ := buffered.Reader.Peek(buffered.Reader.Buffered())
	d.in = append(make([]byte, 0, driveHead), in...)
	d.run(r.Context(), s)
	return true
}

func (d *drive) run(ctx context.Context, s span) {
	// It ends with the server.
	goesOn := context.AfterFunc(ctx, func() { _ = d.conn.Close() })
	err := d.conn.SetReadDeadline(time.Now().Add(driveFor))
	for err == nil && s.kind == part {
		if err = d.answer(s); err == nil {
			s, err = d.next()
		}
	}
	if err != nil {
		_ = d.conn.Close()
	} else if goesOn() {
		d.conn.again(d.in)
	}
}

// next takes the next request if it is one for a block that is there and comes in time.
func (d *drive) next() (span, error) {
	for {
		if at := bytes.Index(d.in, []byte("\r\n\r\n")); at >= 0 {
			s := d.block(d.in[:at+2])
			if s.kind != part || !d.body.Has(s.first, s.last-s.first+1) {
				return span{}, nil
			}
			d.in = d.in[:copy(d.in, d.in[at+4:])]
			return s, nil
		}
		if len(d.in) >= len(d.line) && !bytes.HasPrefix(d.in, d.line) || len(d.in) == cap(d.in) {
			return span{}, nil
		}
		n, err := d.conn.Read(d.in[len(d.in):cap(d.in)])
		d.in = d.in[:len(d.in)+n]
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return span{}, nil
		}
		if err != nil {
			return span{}, err
		}
	}
}

// block is what a request's head asks for, if it asks for a block and nothing else.
func (d *drive) block(head []byte) (s span) {
	lines, ok := bytes.CutPrefix(head, d.line)
	hosts := 0
	for ok && len(lines) > 0 {
		line, rest, _ := bytes.Cut(lines, []byte("\r\n"))
		lines = rest
		name, value, found := bytes.Cut(line, []byte(":"))
		switch {
		case !found || !slices.ContainsFunc(plainHeaders, func(p string) bool { return equalFold(name, p) }), bytes.ContainsFunc(line, unicode.IsControl):
			return span{}
		case equalFold(name, "host"):
			hosts++
		case equalFold(name, "range") && s.kind == whole:
			if s = spanOf(string(value), d.size); s.kind != part {
				return span{}
			}
		case equalFold(name, "range"):
			return span{}
		case equalFold(name, "connection") && !equalFold(bytes.TrimSpace(value), "keep-alive"):
			return span{}
		}
	}
	if hosts != 1 {
		return span{}
	}
	return s
}

// equalFold is strings.EqualFold for plain lower-case letters, without a copy.
func equalFold(b []byte, lower string) bool {
	if len(b) != len(lower) {
		return false
	}
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		if c != lower[i] {
			return false
		}
	}
	return true
}

// answer sends a block.
func (d *drive) answer(s span) error {
	if _, err := d.body.Seek(s.first, 0); err != nil {
		return err
	}
	left := s.last - s.first + 1
	// Nothing is promised before its first bytes are there.
	f, off, n, err := d.body.Next(left)
	if err != nil {
		return err
	}
	d.out = append(d.out[:0], "HTTP/1.1 206 Partial Content\r\nContent-Length: "...)
	d.out = strconv.AppendInt(d.out, left, 10)
	d.out = append(d.out, "\r\nContent-Range: bytes "...)
	d.out = append(strconv.AppendInt(d.out, s.first, 10), '-')
	d.out = append(strconv.AppendInt(d.out, s.last, 10), '/')
	d.out = strconv.AppendInt(d.out, d.size, 10)
	d.out = append(d.out, "\r\nDate: "...)
	d.out = time.Now().UTC().AppendFormat(d.out, http.TimeFormat)
	d.out = append(append(d.out, "\r\n"...), d.head...)
	if n == left && n <= driveBlock {
		at := len(d.out)
		d.out = slices.Grow(d.out, int(n))[:at+int(n)]
		if _, err := f.ReadAt(d.out[at:], off); err != nil {
			return err
		}
		_, err := d.conn.Write(d.out)
		return err
	}
	if _, err := d.conn.Write(d.out); err != nil {
		return err
	}
	for {
		if err := d.conn.sendfile(f, off, n); err != nil {
			return err
		}
		if left -= n; left == 0 {
			return nil
		}
		if f, off, n, err = d.body.Next(left); err != nil {
			return err
		}
	}
}
