package httpboot

import (
	"bufio"
	"bytes"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

func TestSpanOf(t *testing.T) {
	const gib = 1 << 30
	for _, tt := range []struct {
		loader, in string
		size       int64
		want       span
	}{
		{"iPXE, the first block", "bytes=0-511", gib, span{part, 0, 511}},
		{"iPXE, the volume descriptor of a disc", "bytes=32768-34815", gib, span{part, 32768, 34815}},
		{"iPXE for UEFI beyond 4 GiB", "bytes=4294967296-4294969343", 5 * gib, span{part, 4294967296, 4294969343}},
		{"iPXE, the last block of a disc that is no multiple of it", "bytes=1024-3071", 2000, span{part, 1024, 1999}},
		{"iPXE for BIOS beyond 2 GiB", "bytes=-1540874240--1540857857", 3 * gib, span{part, 2754093056, 2754109439}},
		{"iPXE for BIOS across 2 GiB", "bytes=2147483136--2147481601", 3 * gib, span{part, 2147483136, 2147485695}},
		{"iPXE for BIOS, the last block of 4 GiB", "bytes=-512--1", 4 * gib, span{part, 4*gib - 512, 4*gib - 1}},
		{"iPXE for BIOS, where two bytes have one name", "bytes=-1540874240--1540857857", 5 * gib, span{kind: beyond}},
		{"iPXE for BIOS beyond the disc", "bytes=-1540874240--1540857857", gib, span{kind: beyond}},
		{"iPXE whose printf knows no u", "bytes=u-u", gib, span{}},
		{"GRUB seeks", "bytes=1048576-", gib, span{part, 1048576, gib - 1}},
		{"GRUB seeks to the start", "bytes=0-", gib, span{part, 0, gib - 1}},
		{"GRUB seeks to the end", "bytes=1073741824-", gib, span{kind: beyond}},
		{"EDK2 resumes", "bytes=1000-1073741823", gib, span{part, 1000, gib - 1}},
		{"a loader that asks for more than there is", "bytes=512-99999999999", gib, span{part, 512, gib - 1}},
		{"a loader to which the end is all ones", "bytes=0-18446744073709551615", gib, span{part, 0, gib - 1}},
		{"a loader that starts at all ones", "bytes=18446744073709551615-", gib, span{kind: beyond}},
		{"a suffix", "bytes=-512", gib, span{part, gib - 512, gib - 1}},
		{"a suffix of more than there is", "bytes=-5000", 1000, span{part, 0, 999}},
		{"a suffix of nothing", "bytes=-0", gib, span{kind: beyond}},
		{"reversed", "bytes=9-4", gib, span{kind: beyond}},
		{"the unit in capitals", "Bytes=0-1", gib, span{part, 0, 1}},
		{"with spaces", " bytes = 0-1 ", gib, span{part, 0, 1}},
		{"of several parts", "bytes=0-1,4-5", gib, span{}},
		{"another unit", "blocks=0-1", gib, span{}},
		{"no unit", "0-1", gib, span{}},
		{"no numbers", "bytes=-", gib, span{}},
		{"nothing", "bytes=", gib, span{}},
		{"words", "bytes=a-b", gib, span{}},
		{"signs", "bytes=+0-+1", gib, span{}},
		{"three dashes", "bytes=1---1", gib, span{}},
		{"an empty body", "bytes=0-", 0, span{}},
	} {
		if got := spanOf(tt.in, tt.size); got != tt.want {
			t.Errorf("%s: spanOf(%q, %d) = %v, want %v", tt.loader, tt.in, tt.size, got, tt.want)
		}
	}
}

// FuzzSpan: a part lies in the body, and net/http answers each span as it is meant.
func FuzzSpan(f *testing.F) {
	for _, in := range []string{"bytes=0-511", "bytes=-5--1", "bytes=2-", "bytes=-3", "bytes=9-4", "bytes=0-1,3-4"} {
		f.Add(in)
	}
	const body = "0123456789abcdef"
	f.Fuzz(func(t *testing.T, in string) {
		s := spanOf(in, int64(len(body)))
		req := httptest.NewRequest("GET", "/", nil)
		if h := s.header(int64(len(body))); h != "" {
			req.Header.Set("Range", h)
		}
		w := httptest.NewRecorder()
		http.ServeContent(w, req, "", time.Time{}, strings.NewReader(body))
		code, want := 200, body
		switch s.kind {
		case part:
			if s.first < 0 || s.last < s.first || s.last >= int64(len(body)) {
				t.Fatalf("spanOf(%q) = %v", in, s)
			}
			code, want = 206, body[s.first:s.last+1]
		case beyond:
			code, want = 416, w.Body.String()
		}
		if w.Code != code || w.Body.String() != want {
			t.Errorf("%q: %v = %d %q, want %d %q", in, s, w.Code, w.Body, code, want)
		}
	})
}

// FuzzBlock: what a drive takes for a request for a block is one to net/http too,
// and for the same.
func FuzzBlock(f *testing.F) {
	const line = "GET /d.iso HTTP/1.1\r\n"
	for _, head := range []string{"Host: h\r\nRange: bytes=0-511\r\n", "host:h\r\nRANGE: bytes=-512\r\nConnection: keep-alive\r\n",
		"Range: bytes=0-511\r\n", "Host: h\nRange: bytes=5-6\r\nRange: bytes=1-2\r\n", "Host: h\r\n Range: bytes=0-1\r\n", "Range: bytes=0-1\r\nContent-Length: 5\r\nHost: h\r\n"} {
		f.Add([]byte(head))
	}
	d := &drive{size: 1000, line: []byte(line)}
	f.Fuzz(func(t *testing.T, lines []byte) {
		head := append([]byte(line), lines...)
		if bytes.Contains(head, []byte("\r\n\r\n")) || !bytes.HasSuffix(head, []byte("\r\n")) {
			return // as the drive cuts them, there are none
		}
		s := d.block(head)
		if s.kind != part {
			return
		}
		req, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(append(head, "\r\n"...))))
		if err != nil {
			t.Fatalf("%q is taken, and net/http says %v", head, err)
		}
		if req.Method != "GET" || req.RequestURI != "/d.iso" || req.ContentLength != 0 || req.Close || len(req.Header["Range"]) != 1 || spanOf(req.Header.Get("Range"), d.size) != s || req.Host == "" && !bytes.Contains(bytes.ToLower(lines), []byte("host:")) {
			t.Errorf("%q is taken for %v, and is %+v", head, s, req)
		}
	})
}
