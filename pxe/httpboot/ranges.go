package httpboot

import (
	"math"
	"strconv"
	"strings"
)

// span is a Range header as loaders write it, for a body of size bytes.
type span struct {
	kind        spanKind
	first, last int64 // both included, of a part
}

type spanKind int

const (
	// whole: there is none that a loader could mean, or one of several parts, which
	// none can read (RFC 9110, 14.2 lets a server ignore it).
	whole spanKind = iota
	part
	// beyond: nothing of it is in the body, or it ends before it begins.
	beyond
)

// wrap is where a loader of 32 bits begins to count anew.
const wrap = 1 << 32

// spanOf reads a Range header.
func spanOf(header string, size int64) span {
	unit, set, found := strings.Cut(strings.TrimSpace(header), "=")
	if !found || !strings.EqualFold(strings.TrimSpace(unit), "bytes") || size <= 0 {
		return span{}
	}
	set = strings.TrimSpace(set)
	if s, ok := wrapped(set, size); ok {
		return s
	}
	from, to, found := strings.Cut(set, "-")
	first, fromOK := number(from)
	last, toOK := number(to)
	switch {
	case !found, !fromOK && from != "", !toOK && to != "", from == "" && to == "":
		return span{}
	case from == "" && last == 0:
		return span{kind: beyond}
	case from == "":
		return span{part, max(0, size-last), size - 1}
	case to == "":
		last = size - 1
	case last < first:
		return span{kind: beyond}
	}
	if first >= size {
		return span{kind: beyond}
	}
	return span{part, first, min(last, size-1)}
}

// wrapped reads what an iPXE for BIOS says of bytes beyond 2 GiB: it writes its 32
// bits with a sign, as in "-1540874240--1540857857". Of a body beyond 4 GiB
// nobody could tell which bytes are meant.
func wrapped(set string, size int64) (span, bool) {
	at := strings.Index(set, "--")
	if at < 1 {
		return span{}, false
	}
	first, err := strconv.ParseInt(set[:at], 10, 32)
	last, err2 := strconv.ParseInt(set[at+1:], 10, 32)
	if err != nil || err2 != nil || set[0] == '+' || last == 0 {
		return span{}, false
	}
	if first < 0 {
		first += wrap
	}
	last += wrap
	if size > wrap || first >= size || last < first {
		return span{kind: beyond}, true
	}
	return span{part, first, min(last, size-1)}, true
}

// number reads digits alone; what is too large is as large as it gets.
func number(s string) (int64, bool) {
	if s == "" || strings.Trim(s, "0123456789") != "" {
		return 0, false
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return math.MaxInt64, true
	}
	return n, true
}

// header is the span as net/http takes it, and has it answered.
func (s span) header(size int64) string {
	switch s.kind {
	case part:
		return "bytes=" + strconv.FormatInt(s.first, 10) + "-" + strconv.FormatInt(s.last, 10)
	case beyond:
		return "bytes=" + strconv.FormatInt(size, 10) + "-"
	}
	return ""
}
