package h2

import (
	"net/http"
	"strings"

	"golang.org/x/net/http/httpguts"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// block is what a message's headers decode to. Its memory is used again by the
// next one.
type block struct {
	id  uint32
	end bool
	// pseudo fields, whose names begin with a colon, come before the regular ones.
	pseudo, regular []hpack.HeaderField
	size            int
	// wire is what the block took on the wire so far.
	wire      int
	malformed bool

	dec *hpack.Decoder
}

func newBlock() *block {
	b := new(block)
	b.dec = hpack.NewDecoder(4096, b.field)
	b.dec.SetMaxStringLength(maxHeaders)
	return b
}

// begin starts the block of a HEADERS frame; write takes its parts, and done
// says what is wrong with the whole.
func (b *block) begin(f *http2.HeadersFrame) {
	b.id, b.end = f.StreamID, f.StreamEnded()
	b.pseudo, b.regular, b.size, b.wire, b.malformed = b.pseudo[:0], b.regular[:0], 0, 0, false
}

func (b *block) write(part []byte) error {
	// One that is only too large is the stream's error, and one without end the
	// connection's.
	if b.wire += frameHeader + len(part); b.wire > maxBlock {
		return http2.ConnectionError(http2.ErrCodeEnhanceYourCalm)
	}
	if _, err := b.dec.Write(part); err != nil {
		return http2.ConnectionError(http2.ErrCodeCompression)
	}
	return nil
}

func (b *block) done() error {
	if err := b.dec.Close(); err != nil {
		return http2.ConnectionError(http2.ErrCodeCompression)
	}
	if b.size > maxHeaders {
		return http2.StreamError{StreamID: b.id, Code: http2.ErrCodeEnhanceYourCalm}
	}
	if b.malformed {
		return http2.StreamError{StreamID: b.id, Code: http2.ErrCodeProtocol}
	}
	return nil
}

// field takes a decoded field. Too many are counted and not kept: the decoder's
// table must go on in step with the other side's.
func (b *block) field(f hpack.HeaderField) {
	if b.size += int(f.Size()); b.size > maxHeaders {
		return
	}
	if !httpguts.ValidHeaderFieldValue(f.Value) {
		b.malformed = true
	}
	if strings.HasPrefix(f.Name, ":") {
		b.malformed = b.malformed || len(b.regular) > 0 || b.value(f.Name) != ""
		b.pseudo = append(b.pseudo, f)
		return
	}
	if _, known := canonicals[f.Name]; !known && !validName(f.Name) {
		b.malformed = true
	}
	b.regular = append(b.regular, f)
}

func validName(name string) bool {
	for _, c := range []byte(name) {
		if c >= 0x80 || 'A' <= c && c <= 'Z' || !httpguts.IsTokenRune(rune(c)) {
			return false
		}
	}
	return name != ""
}

// value is a pseudo field's; its name begins with a colon.
func (b *block) value(name string) string {
	for _, f := range b.pseudo {
		if f.Name == name {
			return f.Value
		}
	}
	return ""
}

// header is the regular fields.
func (b *block) header() http.Header {
	h := make(http.Header, len(b.regular))
	values := make([]string, len(b.regular))
	for i, f := range b.regular {
		name, ok := canonicals[f.Name]
		if !ok {
			name = http.CanonicalHeaderKey(f.Name)
		}
		if had := h[name]; had != nil {
			h[name] = append(had, f.Value)
			continue
		}
		values[i] = f.Value
		h[name] = values[i : i+1 : i+1]
	}
	return h
}

// lowers and canonicals are the headers that gRPC's calls have, as the wire and
// as http.Header spell them.
var lowers, canonicals = func() (l, c map[string]string) {
	l, c = map[string]string{}, map[string]string{}
	for _, name := range []string{
		"content-type", "user-agent", "te", "accept-encoding", "grpc-accept-encoding", "grpc-encoding", "grpc-timeout",
		"grpc-status", "grpc-message", "grpc-status-details-bin", "date", "content-length",
	} {
		canonical := http.CanonicalHeaderKey(name)
		l[canonical], c[name] = name, canonical
	}
	return l, c
}()

// lowerName is a header's name on the wire; "" is none that may be sent.
func lowerName(name string) string {
	if lower, ok := lowers[name]; ok {
		return lower
	}
	if strings.Contains(name, ":") {
		return ""
	}
	return strings.ToLower(name)
}

func connectionSpecific(lower string) bool {
	switch lower {
	case "connection", "proxy-connection", "transfer-encoding", "upgrade", "keep-alive", "host", "trailer", "content-length":
		return true
	}
	return false
}
