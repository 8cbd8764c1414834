package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/better-compute/site-appliance/appliance/api/agentv1"
	"github.com/better-compute/site-appliance/appliance/api/computev1"
	"github.com/better-compute/site-appliance/appliance/api/computev1/computev1connect"
	"github.com/better-compute/site-appliance/appliance/base/backoff"
)

// consolePatience is how long something may take on a busy machine.
const consolePatience = 30 * time.Second

func TestKeyboard(t *testing.T) {
	for _, tt := range []struct {
		typed, send string
		command     int
	}{
		{"ls\r", "ls\r", keyNone},
		{"~.", "", keyEnd},
		{"a~.", "a~.", keyNone},
		{"a\r~.rest", "a\r", keyEnd},
		{"a\n~.", "a\n", keyEnd},
		{"~?x", "x", keyHelp},
		{"~?~.", "", keyEnd},
		{"~~.", "~.", keyNone},
		{"~~~.", "~~.", keyNone},
		{"\r~x", "\r~x", keyNone},
		{"\r~\r~.", "\r~\r", keyEnd},
		{"\x03\x1c\x1a\x00\xff", "\x03\x1c\x1a\x00\xff", keyNone},
	} {
		whole := keyboard{fresh: true}
		send, command := whole.take([]byte(tt.typed))
		if string(send) != tt.send || command != tt.command {
			t.Errorf("take(%q) = %q, %d, want %q, %d", tt.typed, send, command, tt.send, tt.command)
		}
		// A key at a time it is the same.
		var parts []byte
		k, last := keyboard{fresh: true}, keyNone
		for i := range len(tt.typed) {
			send, command := k.take([]byte{tt.typed[i]})
			parts = append(parts, send...)
			if command != keyNone {
				last = command
			}
			if command == keyEnd {
				break
			}
		}
		if string(parts) != tt.send || last != tt.command {
			t.Errorf("take(%q) key by key = %q, %d, want %q, %d", tt.typed, parts, last, tt.send, tt.command)
		}
	}
}

// terminal is a pseudo-terminal: its two ends.
func terminal(t *testing.T) (far, near *os.File) {
	t.Helper()
	far, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { far.Close() })
	if err := unix.IoctlSetPointerInt(int(far.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(far.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	near, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { near.Close() })
	return far, near
}

// TestRawTerminal: every key arrives as it is, and the terminal is as it was after.
func TestRawTerminal(t *testing.T) {
	far, near := terminal(t)
	before, err := unix.IoctlGetTermios(int(near.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	restore, err := rawTerminal(near)
	if err != nil {
		t.Fatal(err)
	}
	keys := "\x03\x1a\x04\r\n\x11\x13\xff~."
	if _, err := far.WriteString(keys); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(keys))
	if _, err := io.ReadFull(near, got); err != nil || string(got) != keys {
		t.Errorf("read %q, %v, want %q", got, err, keys)
	}
	if _, err := near.WriteString("a\nb\x00\xff"); err != nil {
		t.Fatal(err)
	}
	got = make([]byte, 5)
	if _, err := io.ReadFull(far, got); err != nil || string(got) != "a\nb\x00\xff" {
		t.Errorf("shown %q, %v, want it as it was printed", got, err)
	}
	restore()
	after, err := unix.IoctlGetTermios(int(near.Fd()), unix.TCGETS)
	if err != nil || *after != *before {
		t.Errorf("after restore the terminal is %+v, %v, want %+v", after, err, before)
	}
	file, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if restore, err := rawTerminal(file); err != nil {
		t.Errorf("rawTerminal(no terminal) = %v", err)
	} else {
		restore()
	}
}

// far is a gateway's console: each opening is the next of a list.
type far struct {
	computev1connect.UnimplementedMetalServiceHandler
	mu    sync.Mutex
	calls []func(ctx context.Context, open *computev1.ConsoleOpen, s *connect.BidiStream[computev1.ConsoleRequest, computev1.ConsoleResponse]) error
	opens []*computev1.ConsoleOpen
}

func (f *far) Console(ctx context.Context, s *connect.BidiStream[computev1.ConsoleRequest, computev1.ConsoleResponse]) error {
	m, err := s.Receive()
	if err != nil {
		return err
	}
	f.mu.Lock()
	f.opens = append(f.opens, m.GetOpen())
	call := f.calls[0]
	if len(f.calls) > 1 {
		f.calls = f.calls[1:]
	}
	f.mu.Unlock()
	return call(ctx, m.GetOpen(), s)
}

func wireError(code connect.Code, reason, text string) error {
	e := connect.NewError(code, errors.New(text))
	d, _ := connect.NewErrorDetail(&agentv1.Error{Code: "DRIVER_ERROR/" + reason, Message: text})
	e.AddDetail(d)
	return e
}

type openings = func(ctx context.Context, open *computev1.ConsoleOpen, s *connect.BidiStream[computev1.ConsoleRequest, computev1.ConsoleResponse]) error

func fails(err error) openings {
	return func(context.Context, *computev1.ConsoleOpen, *connect.BidiStream[computev1.ConsoleRequest, computev1.ConsoleResponse]) error {
		return err
	}
}

// says opens, prints, and ends as end says.
func says(text string, end func(ctx context.Context) error) openings {
	return func(ctx context.Context, _ *computev1.ConsoleOpen, s *connect.BidiStream[computev1.ConsoleRequest, computev1.ConsoleResponse]) error {
		if err := errors.Join(s.Send(&computev1.ConsoleResponse{}), s.Send(&computev1.ConsoleResponse{Data: []byte(text)})); err != nil {
			return err
		}
		return end(ctx)
	}
}

// TestConsoleComesBack: after a lost line, and while its own lost console is still
// held, but not after an end that was meant.
func TestConsoleComesBack(t *testing.T) {
	lost := func(context.Context) error {
		return wireError(connect.CodeUnavailable, "draining", "the gateway is stopping")
	}
	held := fails(wireError(connect.CodeAborted, "operation-not-allowed", "the console is open"))
	taken := func(context.Context) error {
		return wireError(connect.CodeAborted, "cancelled", "the console was taken over by another person")
	}
	abort := func(context.Context) error { panic(http.ErrAbortHandler) } // the line breaks without a word
	plainEnd := func(context.Context) error { return nil }
	for _, tt := range []struct {
		name  string
		calls []openings
		out   string
		notes []string
		err   string
		opens int
	}{
		{"refused at first", []openings{held}, "", nil, "the console is open", 1},
		{"unavailable at first", []openings{fails(wireError(connect.CodeUnavailable, "unavailable", "the box is offline"))}, "", nil, "the box is offline", 1},
		{"closed", []openings{says("one ", plainEnd)}, "one ", []string{"console of web-1 is open", "closed at the far end"}, "", 1},
		{"lost", []openings{says("one ", lost), says("two ", abort), held, held, says("three ", plainEnd)}, "one two three ", []string{"the line was lost", "the line was lost", "Enter ~ . ends", "closed at the far end"}, "", 5},
		{"taken over", []openings{says("one ", taken), says("never ", plainEnd)}, "one ", []string{"is open"}, "taken over", 1},
		{"denied later", []openings{says("one ", lost), fails(wireError(connect.CodePermissionDenied, "x", "the token lacks it"))}, "one ", []string{"the line was lost"}, "the token lacks it", 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := &far{calls: tt.calls}
			p, out, notes := newPerson(t, f)
			err := p.run()
			if fmt.Sprint(err) != "<nil>" && tt.err == "" || tt.err != "" && !strings.Contains(fmt.Sprint(err), tt.err) {
				t.Errorf("run() = %v, want %q", err, tt.err)
			}
			if out.String() != tt.out || len(f.opens) != tt.opens {
				t.Errorf("printed %q after %d openings, want %q after %d", out.String(), len(f.opens), tt.out, tt.opens)
			}
			rest := notes.String()
			for _, want := range tt.notes {
				_, after, ok := strings.Cut(rest, want)
				if !ok {
					t.Fatalf("notes %q, want %q in order", notes.String(), tt.notes)
				}
				rest = after
			}
			for i, open := range f.opens {
				if first := i == 0; open.Takeover != first || open.HistoryBytes > 0 != first {
					t.Errorf("opening %d: %v, want takeover and history at the first alone", i, open)
				}
			}
		})
	}
}

type testPerson struct {
	run  func() error
	keys *io.PipeWriter
}

func newPerson(t *testing.T, f *far) (p *testPerson, out, notes *bytes.Buffer) {
	t.Helper()
	mux := http.NewServeMux()
	mux.Handle(computev1connect.NewMetalServiceHandler(f))
	server := httptest.NewUnstartedServer(mux)
	server.EnableHTTP2 = true
	server.Config.ErrorLog = nil
	server.StartTLS()
	t.Cleanup(server.Close)
	in, keys := io.Pipe()
	t.Cleanup(func() { keys.Close() })
	out, notes = &bytes.Buffer{}, &bytes.Buffer{}
	var mu sync.Mutex
	near := &person{
		open:  &computev1.ConsoleOpen{TenantId: "acme", Machine: "web-1", Takeover: true, HistoryBytes: 5},
		typed: make(chan []byte), left: make(chan struct{}), out: out,
		note: func(format string, args ...any) {
			mu.Lock()
			defer mu.Unlock()
			fmt.Fprintf(notes, format+"\n", args...)
		},
		retry: backoff.Policy{Min: time.Millisecond, Max: 10 * time.Millisecond},
	}
	go near.listen(in)
	ctx, cancel := context.WithTimeout(t.Context(), consolePatience)
	t.Cleanup(cancel)
	return &testPerson{func() error {
		return near.run(ctx, computev1connect.NewMetalServiceClient(server.Client(), server.URL))
	}, keys}, out, notes
}

// TestConsoleKeysReachTheMachine: what is typed goes out, and leaving ends the far
// end's stream, also while the line is lost.
func TestConsoleKeysReachTheMachine(t *testing.T) {
	heard := make(chan string, 1)
	f := &far{calls: []openings{func(_ context.Context, _ *computev1.ConsoleOpen, s *connect.BidiStream[computev1.ConsoleRequest, computev1.ConsoleResponse]) error {
		if err := s.Send(&computev1.ConsoleResponse{}); err != nil {
			return err
		}
		got := ""
		for {
			m, err := s.Receive()
			if err != nil {
				heard <- got
				return nil
			}
			got += string(m.GetData())
		}
	}}}
	p, _, _ := newPerson(t, f)
	go io.WriteString(p.keys, "root\r~~x\r~.never")
	if err := p.run(); err != nil {
		t.Fatal(err)
	}
	if got := <-heard; got != "root\r~x\r" {
		t.Errorf("the machine was told %q", got)
	}

	f = &far{calls: []openings{says("one", func(context.Context) error { return wireError(connect.CodeUnavailable, "draining", "stop") }),
		fails(wireError(connect.CodeUnavailable, "draining", "stop"))}}
	p, _, notes := newPerson(t, f)
	done := make(chan error, 1)
	go func() { done <- p.run() }()
	go io.WriteString(p.keys, "typed into nothing\r~.")
	if err := <-done; err != nil || !strings.Contains(notes.String(), "console left") {
		t.Errorf("leaving while the line is lost: %v, %q", err, notes.String())
	}
}

func TestSiteHTTPCleansTheTerminal(t *testing.T) {
	var out bytes.Buffer
	if n, err := (cleaner{&out}).Write([]byte("a\x1b[2J\tb\n\x07\xff\u009bü")); err != nil || n != 14 || out.String() != "a.[2J\tb\n...ü" {
		t.Errorf("printed %q, %d, %v", out.String(), n, err)
	}
}

// TestConsoleRefusedWithoutKeys: who has nothing to type is told too that the
// console was refused.
func TestConsoleRefusedWithoutKeys(t *testing.T) {
	hung := make(chan struct{})
	f := &far{calls: []openings{func(_ context.Context, _ *computev1.ConsoleOpen, s *connect.BidiStream[computev1.ConsoleRequest, computev1.ConsoleResponse]) error {
		_, err := s.Receive() // the near end has hung up
		close(hung)
		if !errors.Is(err, io.EOF) {
			t.Errorf("the near end sent %v, want its end", err)
		}
		return wireError(connect.CodeNotFound, "not-found", "there is no such machine")
	}}}
	p, _, _ := newPerson(t, f)
	p.keys.Close()
	if err := p.run(); err == nil || !strings.Contains(err.Error(), "no such machine") {
		t.Errorf("run() = %v, want the refusal", err)
	}
	<-hung
}
