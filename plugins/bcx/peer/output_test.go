package peer

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"
	"testing"

	"github.com/better-compute/site-appliance/appliance/base/secret"
	"github.com/better-compute/site-appliance/plugins/bcx"
)

func TestReadLine(t *testing.T) {
	r := bufio.NewReaderSize(strings.NewReader("one\n"+strings.Repeat("x", 100)+"\n\nlast"), 16)
	for _, want := range []struct {
		text string
		cut  bool
		err  error
	}{{"one", false, nil}, {strings.Repeat("x", 40), true, nil}, {"", false, nil}, {"last", false, io.EOF}} {
		text, cut, err := readLine(r, 40)
		if text != want.text || cut != want.cut || !errors.Is(err, want.err) {
			t.Errorf("readLine = %q, %v, %v, want %+v", text, cut, err, want)
		}
	}
}

func TestHandshakeIsTheFirstLine(t *testing.T) {
	id, err := bcx.NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	line, err := bcx.Handshake{Socket: "/d/plugin.sock", Certificate: id.DER()}.Line()
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct{ stdout, want string }{
		"good":            {line, ""},
		"more after it":   {line + "a stray print\n", ""},
		"a print before":  {"a stray print\n" + line, "not a bcx handshake"},
		"an empty line":   {"\n" + line, "not a bcx handshake"},
		"no newline":      {strings.TrimSuffix(line, "\n"), "ended before the handshake line"},
		"nothing":         {"", "ended before the handshake line"},
		"another folder":  {strings.Replace(line, "/d/", "/e/", 1), "does not lie in /d"},
		"8 KiB and more":  {strings.Repeat("x", bcx.MaxHandshake) + "\n", "longer than a handshake"},
		"just under that": {strings.Repeat("x", bcx.MaxHandshake-1) + "\n", "not a bcx handshake"},
	} {
		o := Watch(strings.NewReader(tt.stdout), strings.NewReader(""), slog.New(slog.DiscardHandler), nil)
		_, err := o.Handshake(t.Context(), "/d")
		o.Wait()
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: Handshake = %v, want %q", name, err, tt.want)
		}
		if (name == "nothing") && !errors.Is(err, ErrEnded) {
			t.Errorf("%s: %v, want ErrEnded", name, err)
		}
	}
	silent, w := io.Pipe()
	o := Watch(silent, strings.NewReader(""), slog.New(slog.DiscardHandler), nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := o.Handshake(ctx, "/d"); !errors.Is(err, context.Canceled) {
		t.Errorf("silent: Handshake = %v", err)
	}
	w.Close()
	o.Wait()
}

// logged is what Watch writes to the log, as JSON lines.
func logged(stderr string, redact *Redactor) []string {
	var b bytes.Buffer
	o := Watch(strings.NewReader(""), strings.NewReader(stderr), slog.New(slog.NewJSONHandler(&b, nil)), redact)
	o.Wait()
	return strings.Split(strings.TrimSpace(b.String()), "\n")
}

func TestLinesAreBounded(t *testing.T) {
	for n, cut := range map[int]bool{maxLine: false, maxLine + 1: true, 1 << 20: true} {
		lines := logged(strings.Repeat("x", n)+"\nnext\n", nil)
		if len(lines) != 2 || strings.Contains(lines[0], `"cut":true`) != cut || strings.Count(lines[0], "x") != min(n, maxLine) ||
			!strings.Contains(lines[1], `"line":"next"`) {
			t.Errorf("line of %d bytes: %d lines, first %.100q of %d bytes", n, len(lines), lines[0], len(lines[0]))
		}
	}
}

// TestSecretAtTheCut: cutting a line leaves no half of a secret.
func TestSecretAtTheCut(t *testing.T) {
	r := NewRedactor()
	defer r.Add(secret.New([]byte("hunter2hunter2")))()
	lines := logged(strings.Repeat("x", maxLine-7)+"hunter2hunter2 and more\n", r)
	if strings.Contains(lines[0], "hunter2") || strings.Count(lines[0], "x") < maxLine-7 {
		t.Errorf("line ends in %q", lines[0][len(lines[0])-60:])
	}
}

// slow is a log that writes nothing until it may.
type slow struct{ may chan struct{} }

func (s slow) Write(p []byte) (int, error) {
	<-s.may
	return len(p), nil
}

// TestSlowLogHoldsNobodyUp: lines are dropped, and counted.
func TestSlowLogHoldsNobodyUp(t *testing.T) {
	var b bytes.Buffer
	s := slow{make(chan struct{})}
	log := slog.New(slog.NewTextHandler(io.MultiWriter(s, &b), nil))
	stderr, w := io.Pipe()
	o := Watch(strings.NewReader(""), stderr, log, nil)
	for range 4 * maxQueue {
		if _, err := io.WriteString(w, "line\n"); err != nil {
			t.Fatal(err)
		}
	}
	w.Close()
	close(s.may)
	o.Wait()
	if !strings.Contains(b.String(), "plugin output dropped") {
		t.Error("dropped lines are not counted")
	}
}
