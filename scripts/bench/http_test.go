package main

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/pxe/httpboot"
)

// TestAskNotices has the load's client ask servers that give something else than
// was asked for: their speed would say nothing.
func TestAskNotices(t *testing.T) {
	for name, tt := range map[string]struct {
		answer func(w http.ResponseWriter, r *http.Request)
		fails  bool
	}{
		"a block": {func(w http.ResponseWriter, r *http.Request) {
			http.ServeContent(w, r, "", time.Time{}, strings.NewReader(strings.Repeat("x", 2*httpRead)))
		}, true}, // for blocks of the whole disc, most are beyond this one
		"any block": {func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", "2048")
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(make([]byte, httpRead))
		}, false},
		"the whole": {func(w http.ResponseWriter, r *http.Request) { _, _ = w.Write(make([]byte, httpRead)) }, true},
		"half a block": {func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(make([]byte, httpRead/2))
		}, true},
	} {
		server := httptest.NewServer(http.HandlerFunc(tt.answer))
		answers, bytes, err := ask(strings.TrimPrefix(server.URL, "http://"), httpDisc, httpRead, 1, time.Now().Add(50*time.Millisecond))
		server.Close()
		if (err != nil) != tt.fails || err == nil && (answers == 0 || bytes != answers*httpRead) {
			t.Errorf("%s: ask = %d answers, %d bytes, %v", name, answers, bytes, err)
		}
	}
}

// TestDiscURL finds the drive in a script as the box writes it.
func TestDiscURL(t *testing.T) {
	const want = "http://127.0.80.1:8080/boot/52-54-00-00-00-01/token/disc.iso"
	script := "#!ipxe\nsanhook --no-describe --drive 0x80 " + want + " || goto failed\n"
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = w.Write([]byte(script)) }))
	defer server.Close()
	if got, err := discURL(httpboot.ScriptURL(server.URL, httpMAC)); err != nil || got != want {
		t.Errorf("discURL = %q, %v, want %q", got, err, want)
	}
	script = "#!ipxe\nexit\n"
	if got, err := discURL(server.URL); err == nil {
		t.Errorf("discURL of a script without a drive = %q", got)
	}
}

// TestDiscSource: the bench's gateway lists its disc as the box checks it.
func TestDiscSource(t *testing.T) {
	path := filepath.Join(t.TempDir(), "disc")
	if err := os.WriteFile(path, make([]byte, discChunk+1), 0o644); err != nil {
		t.Fatal(err)
	}
	s, err := newDiscSource(path)
	if err != nil || len(s.list) != 64 || len(s.sum) != 64 {
		t.Errorf("newDiscSource = %d bytes of list, sum %q, %v, want two digests", len(s.list), s.sum, err)
	}
}
