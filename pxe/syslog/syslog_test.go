package syslog

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

var t0 = time.Unix(1_000_000, 0)

func TestAdd(t *testing.T) {
	for in, want := range map[string]string{
		"<30>ipxe: booting":             "ipxe: booting",
		"<30>a\x1b[31mred\x00\nb":       "a[31mred b",
		"no priority":                   "no priority",
		"<not a priority> x":            "<not a priority> x",
		"<30>\x01\x02":                  "",
		"<30> \x01 \x02":                "",
		strings.Repeat("x", 10*maxLine): strings.Repeat("x", maxLine),
	} {
		var s Store
		s.Add("m", true, in, t0)
		got := strings.Join(s.Tail("m", 10), "|")
		if want != "" {
			want = t0.UTC().Format("15:04:05 ") + want
		}
		if got != want {
			t.Errorf("Add(%.60q) = %q, want %q", in, got, want)
		}
	}
}

// TestFlood: one that floods, and made-up machines without end, take no more than
// their part, and a good one is heard beside them.
func TestFlood(t *testing.T) {
	var s Store
	for i := range 100_000 {
		s.Add("bad", true, fmt.Sprint("line ", i), t0)
	}
	if got := s.Tail("bad", 1<<20); len(got) != perMachine || s.missed != 100_000-perMachine {
		t.Errorf("%d lines of a flood kept and %d missed, want %d kept", len(got), s.missed, perMachine)
	}
	s.Add("good", true, "hello", t0)
	if got := s.Tail("good", 10); len(got) != 1 {
		t.Errorf("a good machine's lines beside a flood = %q, want one", got)
	}
	for i := range 10_000 {
		s.Add("bad", true, "line", t0.Add(time.Duration(i)*time.Second))
	}
	if got := s.Tail("bad", 1<<20); len(got) != maxLines {
		t.Errorf("%d lines kept of a machine, want %d", len(got), maxLines)
	}
	for i := range 3 * maxMachines {
		s.Add(fmt.Sprint("m", i), true, "line", t0.Add(time.Duration(i)*time.Hour))
	}
	if n := len(s.byMAC); n != maxMachines {
		t.Errorf("%d machines kept, want %d", n, maxMachines)
	}
}

// TestStrangers: those that are not known, be they one host's inventions, are heard
// beside each other as far as there is room, and take nothing from a known machine.
func TestStrangers(t *testing.T) {
	var s Store
	s.Add("good", true, "hello", t0)
	for i := range 3 * maxMachines {
		s.Add(fmt.Sprint("m", i), false, "line", t0.Add(time.Duration(i)*time.Second))
	}
	if got := s.Tail("good", 10); len(got) != 1 || len(s.byMAC) != maxMachines {
		t.Errorf("%d machines kept and %q of a known one, want %d and its line", len(s.byMAC), got, maxMachines)
	}
	at := t0.Add(24 * time.Hour)
	for i := range inAll {
		s.Add(fmt.Sprint("n", i), false, "line", at)
	}
	if want := inAll - inStrange; s.missed != want {
		t.Errorf("%d of a second's %d lines of strangers missed, want %d", s.missed, inAll, want)
	}
	s.Add("other", true, "hello", at)
	if got := s.Tail("other", 10); len(got) != 1 {
		t.Error("strangers' lines leave none for a known machine")
	}
	for i := range maxMachines {
		s.Add(fmt.Sprint("k", i), true, "line", at.Add(time.Second))
	}
	s.Add("stranger", false, "line", at.Add(time.Minute))
	if got := s.Tail("stranger", 10); len(got) != 0 || len(s.Tail("k0", 10)) != 1 {
		t.Error("a stranger takes the place of a known machine")
	}
}

func FuzzClean(f *testing.F) {
	f.Add("<30>ipxe: x")
	f.Fuzz(func(t *testing.T, in string) {
		got := clean(in)
		if len(got) > maxLine || strings.ContainsFunc(got, func(r rune) bool { return r < ' ' || r > '~' }) {
			t.Errorf("clean(%q) = %q", in, got)
		}
	})
}
