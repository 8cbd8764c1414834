package attempts

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

var t0 = time.UnixMilli(1_000_000_000)

func TestAttempts(t *testing.T) {
	type step struct {
		after time.Duration
		stage string
		begin bool
	}
	dhcp, again := step{time.Second, "dhcp", true}, step{time.Second, "dhcp", false}
	of := func(stage string) step { return step{time.Second, stage, false} }
	for name, tt := range map[string]struct {
		steps []step
		want  string
	}{
		"a boot":                 {[]step{dhcp, of("tftp"), again, of("script"), of("kernel"), of("initrd"), of("boot"), of("done")}, "dhcp tftp dhcp script kernel initrd boot done"},
		"sent again":             {[]step{dhcp, dhcp, dhcp, of("tftp")}, "dhcp tftp"},
		"two boots":              {[]step{dhcp, of("tftp"), dhcp, of("tftp")}, "dhcp tftp|dhcp tftp"},
		"a pause":                {[]step{dhcp, {time.Hour / 2, "dhcp", true}}, "dhcp|dhcp"},
		"a ramdisk asks anew":    {[]step{dhcp, of("tftp"), again, of("boot"), of("progress")}, "dhcp tftp dhcp boot progress"},
		"older than an hour":     {[]step{dhcp, {2 * time.Hour, "dhcp", true}}, "dhcp"},
		"a step without a start": {[]step{of("script")}, "script"},
	} {
		var l Log
		now := t0
		for _, s := range tt.steps {
			now = now.Add(s.after)
			l.Add("m", "lan0", Step{At: now, Stage: s.stage, Begins: s.begin})
		}
		var got []string
		for _, a := range l.Of("m", now) {
			var stages []string
			for _, s := range a.Wire().Steps {
				stages = append(stages, s.Stage)
			}
			got = append(got, strings.Join(stages, " "))
		}
		if got := strings.Join(got, "|"); got != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}

func TestBounds(t *testing.T) {
	var l Log
	for i := range 3 * maxMACs {
		l.Add(fmt.Sprint(i), "lan0", Step{At: t0.Add(time.Duration(i) * time.Millisecond), Stage: "dhcp"})
	}
	if n := len(l.byMAC); n > maxMACs {
		t.Errorf("%d MACs are remembered, more than %d", n, maxMACs)
	}
	if got := l.Of(fmt.Sprint(3*maxMACs-1), t0); len(got) != 1 {
		t.Error("the newest MAC is forgotten")
	}
	for i := range 100 * maxSteps {
		l.Add("m", "lan0", Step{At: t0, Stage: "progress", Detail: fmt.Sprint(i) + strings.Repeat("\x1bx", maxText)})
	}
	a := l.Of("m", t0)
	if len(a) != 1 || len(a[0].Steps) != maxSteps || a[0].Steps[0].Detail[0] != '0' || !strings.HasPrefix(a[0].Steps[maxSteps-1].Detail, fmt.Sprint(100*maxSteps-1)) {
		t.Errorf("%d attempts, want one of %d steps, with its first and its last", len(a), maxSteps)
	}
	if d := a[0].Steps[0].Detail; len(d) > maxText || strings.Contains(d, "\x1b") {
		t.Errorf("detail = %q, want at most %d printable bytes", d, maxText)
	}
	for i := range 100 * maxAttempts {
		l.Add("m", "lan0", Step{At: t0.Add(time.Duration(i) * time.Hour), Stage: "dhcp"})
	}
	if n := len(l.byMAC["m"].attempts); n != maxAttempts {
		t.Errorf("%d attempts kept, want %d", n, maxAttempts)
	}
}

// TestBootIsNotHidden: a machine that asks for its disk over and over keeps the boot in
// which it was given something, the last one and no more.
func TestBootIsNotHidden(t *testing.T) {
	for _, stage := range []string{"kernel", "uki", "iso"} {
		var l Log
		now := t0
		attempt := func(stages ...string) {
			now = now.Add(15 * time.Second)
			l.Add("m", "lan0", Step{At: now, Stage: "dhcp", Begins: true})
			for _, s := range stages {
				l.Add("m", "lan0", Step{At: now, Stage: s})
			}
		}
		for range 2 {
			attempt("script", stage)
			for range 5 * maxAttempts {
				attempt("script")
			}
		}
		all := l.Of("m", now)
		var booted int
		for _, a := range all {
			if a.booted() {
				booted++
			}
		}
		if len(all) != maxAttempts || booted != 1 || !all[0].booted() || now.Sub(all[1].Steps[0].At) > maxAttempts*15*time.Second {
			t.Errorf("%s: %d attempts, of them %d boots, want the last boot and the %d last", stage, len(all), booted, maxAttempts-1)
		}
	}
}

// TestKnownStay: made-up MACs push out each other, and a known machine one of them.
func TestKnownStay(t *testing.T) {
	var l Log
	at := t0
	add := func(mac string, known bool) []Attempt {
		at = at.Add(time.Millisecond)
		l.Add(mac, "lan0", Step{At: at, Stage: "dhcp", Known: known})
		return l.Of(mac, at)
	}
	const known = 100
	for i := range known {
		add(fmt.Sprint("known ", i), true)
	}
	for i := range 3 * maxMACs {
		if len(add(fmt.Sprint(i), false)) != 1 {
			t.Fatalf("stranger %d is not remembered", i)
		}
	}
	for i := range known {
		if len(l.Of(fmt.Sprint("known ", i), at)) != 1 {
			t.Fatal("made-up MACs push out a known machine")
		}
	}
	for i := range 3 * maxMACs {
		if len(add(fmt.Sprint("also known ", i), true)) != 1 {
			t.Fatalf("known machine %d is not remembered", i)
		}
	}
	if n := len(l.byMAC); n > maxMACs {
		t.Errorf("%d MACs are remembered, more than %d", n, maxMACs)
	}
	for len(l.byMAC) < maxMACs {
		add(fmt.Sprint("and ", len(l.byMAC)), true)
	}
	for mac, m := range l.byMAC {
		if !m.known {
			delete(l.byMAC, mac)
			add("in place of "+mac, true)
		}
	}
	if add("stranger", false) != nil {
		t.Error("a stranger pushes out a known machine")
	}
}

func TestWaitsFor(t *testing.T) {
	for _, tt := range []struct {
		stage, detail, want string
	}{
		{"", "", "the machine's first DHCP request"},
		{"dhcp", "agent: assigned", "after dhcp: the machine asks for what DHCP named to it, since 40s"},
		{"dhcp", "deny: the machine is unknown", "nothing that the box gives: deny: the machine is unknown"},
		{"dhcp", "local-disk: done", "nothing that the box gives"},
		{"tftp", "snponly.efi", "after tftp: the boot program starts"},
		{"script", "agent: assigned", "after script: the machine fetches what the script names, since 40s"},
		{"script", "local-disk: done", "nothing that the box gives: local-disk: done"},
		{"boot", "", "the ramdisk starts"},
		{"done", "", "nothing: it is done"},
	} {
		var l Log
		if tt.stage != "" {
			l.Add("m", "lan0", Step{At: t0, Stage: tt.stage, Detail: tt.detail})
		}
		now := t0.Add(40 * time.Second)
		if got := WaitsFor(l.Of("m", now), now); !strings.Contains(got, tt.want) {
			t.Errorf("WaitsFor(%s, %s) = %q, want %q", tt.stage, tt.detail, got, tt.want)
		}
	}
}
