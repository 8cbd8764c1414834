// Package attempts remembers the last hour's boots of each machine, stage by stage.
package attempts

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/printable"
	"github.com/better-compute/site-appliance/pxe/pxev1"
)

// Bounds of what is remembered.
const (
	Kept        = time.Hour
	maxMACs     = 4096
	maxAttempts = 16
	maxSteps    = 64
	maxText     = 256
	// newAfter is how long a boot may stand still before the next step is another's.
	newAfter = 15 * time.Minute
)

// Step is how far a boot has come.
type Step struct {
	At time.Time
	// Stage is one of: dhcp, tftp, http-loader, script, kernel, initrd, boot, uki, iso, progress, done.
	Stage, Client, Detail string
	// Begins says that firmware asks, which is the start of a boot.
	Begins bool
	// Known says that somebody vouches for the machine.
	Known bool
}

// Attempt is one boot.
type Attempt struct {
	MAC, Interface string
	Steps          []Step
}

// Log is safe for concurrent use. Its zero value is ready.
type Log struct {
	mu    sync.Mutex
	byMAC map[string]*machine
}

type machine struct {
	known    bool
	last     time.Time
	attempts []Attempt
}

// Add notes a step. A flood of made-up MACs pushes out those that were quiet the
// longest, and no machine that is known.
func (l *Log) Add(mac, iface string, s Step) {
	s.Client, s.Detail = printable.ASCII(s.Client, maxText), printable.ASCII(s.Detail, maxText)
	l.mu.Lock()
	defer l.mu.Unlock()
	m := l.byMAC[mac]
	if m == nil {
		if len(l.byMAC) >= maxMACs && !l.pushOut(false) && (!s.Known || !l.pushOut(true)) {
			return
		}
		if l.byMAC == nil {
			l.byMAC = make(map[string]*machine)
		}
		m = &machine{}
		l.byMAC[mac] = m
	}
	m.last, m.known = s.At, s.Known
	m.attempts = add(m.attempts, mac, iface, s)
}

// pushOut drops the quietest eighth of those that are known or of the others at once,
// so that a flood does not look for one each time, and says whether there was any.
func (l *Log) pushOut(known bool) bool {
	var oldest, newest time.Time
	for _, m := range l.byMAC {
		if m.known != known {
			continue
		}
		if oldest.IsZero() || m.last.Before(oldest) {
			oldest = m.last
		}
		if m.last.After(newest) {
			newest = m.last
		}
	}
	until := oldest.Add(newest.Sub(oldest) / 8)
	before := len(l.byMAC)
	for mac, m := range l.byMAC {
		if m.known == known && !m.last.After(until) {
			delete(l.byMAC, mac)
		}
	}
	return len(l.byMAC) < before
}

// add puts a step where it belongs.
func add(attempts []Attempt, mac, iface string, s Step) []Attempt {
	if len(attempts) == 0 || begins(attempts[len(attempts)-1], iface, s) {
		attempts = append(attempts, Attempt{MAC: mac, Interface: iface})
		if len(attempts) > maxAttempts {
			attempts = slices.Delete(attempts, pushed(attempts), pushed(attempts)+1)
		}
	}
	a := &attempts[len(attempts)-1]
	if n := len(a.Steps); n > 0 && same(a.Steps[n-1], s) {
		return attempts // a packet that was sent again
	}
	if len(a.Steps) >= maxSteps {
		// The beginning and the end say the most.
		a.Steps = append(a.Steps[:maxSteps/2:maxSteps/2], a.Steps[maxSteps/2+1:]...)
	}
	a.Steps = append(a.Steps, s)
	return attempts
}

// pushed is the attempt that makes room: the oldest, but for the last one that was given
// something to boot. A machine that asks for its disk over and over does not hide that.
func pushed(attempts []Attempt) int {
	for i := len(attempts) - 1; i > 0; i-- {
		if attempts[i].booted() {
			return 0
		}
	}
	if attempts[0].booted() {
		return 1
	}
	return 0
}

// booted says whether the machine fetched what is booted in the end.
func (a Attempt) booted() bool {
	return slices.ContainsFunc(a.Steps, func(s Step) bool { return s.Stage == "kernel" || s.Stage == "uki" || s.Stage == "iso" })
}

// begins says whether a step is not of the attempt before it any more.
func begins(a Attempt, iface string, s Step) bool {
	if len(a.Steps) == 0 {
		return false
	}
	last := a.Steps[len(a.Steps)-1]
	return a.Interface != iface || s.At.Sub(last.At) > newAfter || s.Begins && last.Stage != "dhcp"
}

func same(a, b Step) bool { return a.Stage == b.Stage && a.Client == b.Client && a.Detail == b.Detail }

// Of are the machine's attempts of the last hour, oldest first.
func (l *Log) Of(mac string, now time.Time) []Attempt {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []Attempt
	if m := l.byMAC[mac]; m != nil {
		for _, a := range m.attempts {
			if len(a.Steps) > 0 && now.Sub(a.Steps[len(a.Steps)-1].At) <= Kept {
				a.Steps = append([]Step(nil), a.Steps...)
				out = append(out, a)
			}
		}
	}
	return out
}

// Wire is an attempt as it is told.
func (a Attempt) Wire() *pxev1.Attempt {
	out := &pxev1.Attempt{Mac: a.MAC, Interface: a.Interface}
	for _, s := range a.Steps {
		out.Steps = append(out.Steps, &pxev1.Step{AtMs: s.At.UnixMilli(), Stage: s.Stage, Client: s.Client, Detail: s.Detail})
	}
	if len(a.Steps) > 0 {
		out.BeganMs = a.Steps[0].At.UnixMilli()
	}
	return out
}

// next is what follows a stage, for people.
var next = map[string]string{
	"dhcp":        "the machine asks for what DHCP named to it",
	"tftp":        "the boot program starts and asks DHCP again",
	"http-loader": "the boot program starts and asks DHCP again",
	"script":      "the machine fetches what the script names",
	"kernel":      "the machine fetches the initrd or starts the kernel",
	"initrd":      "the machine fetches its boot archive or starts the kernel",
	"boot":        "the ramdisk starts and enrols with the gateway",
	"uki":         "the unified kernel image starts",
	"iso":         "the disc image boots; it says nothing more to the box",
	"missing":     "an artifact that cannot be had now; the machine asks again",
	"progress":    "the ramdisk's next report",
	"done":        "nothing: it is done",
}

// WaitsFor says what comes after the last step of the last attempt.
func WaitsFor(attempts []Attempt, now time.Time) string {
	if len(attempts) == 0 {
		return "the machine's first DHCP request: it was not heard in the last hour"
	}
	steps := attempts[len(attempts)-1].Steps
	s := steps[len(steps)-1]
	what, ok := next[s.Stage]
	switch {
	case s.Stage == "done":
		return what
	case s.Stage == "dhcp" && !answered(s.Detail), !ok:
		what = "nothing that the box gives: " + s.Detail
	case s.Stage == "script" && strings.HasPrefix(s.Detail, "local-disk"):
		what = "nothing that the box gives: " + s.Detail
	}
	return fmt.Sprintf("after %s: %s, since %s", s.Stage, what, now.Sub(s.At).Round(time.Second))
}

// answered says whether a decision's detail names something to boot.
func answered(detail string) bool {
	for _, none := range []string{"deny", "none", "local-disk"} {
		if strings.HasPrefix(detail, none) {
			return false
		}
	}
	return true
}
