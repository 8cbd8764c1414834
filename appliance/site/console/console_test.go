package console

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/backoff"
	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// rig is a desk with one BMC and those who come to it.
type rig struct {
	t    *testing.T
	desk *Desk

	mu       sync.Mutex
	bmcs     []net.Conn // the far ends of what was opened, in order
	asked    []bool     // takeover, per opening
	answers  []error    // of the next openings; nil or none: it opens
	audits   []string
	auditErr error
}

func newRig(t *testing.T) *rig {
	return &rig{t: t, desk: New(Options{Retry: backoff.Policy{Min: time.Second, Max: 30 * time.Second}})}
}

func (r *rig) open(_ context.Context, takeover bool) (io.ReadWriteCloser, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked = append(r.asked, takeover)
	if len(r.answers) > 0 {
		err := r.answers[0]
		r.answers = r.answers[1:]
		if err != nil {
			return nil, err
		}
	}
	near, far := net.Pipe()
	r.bmcs = append(r.bmcs, far)
	return near, nil
}

func (r *rig) bmc(n int) net.Conn {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n >= len(r.bmcs) {
		r.t.Fatalf("the console was opened %d times, want %d", len(r.bmcs), n+1)
	}
	return r.bmcs[n]
}

// person is one command's far end.
type person struct {
	net.Conn
	ended  chan struct{}
	report Report
	err    error

	mu   sync.Mutex
	seen bytes.Buffer
}

// come serves a console to a new person, who reads all that is shown unless deaf.
func (r *rig) come(ctx context.Context, command string, takeover, deaf bool, history int) *person {
	near, far := net.Pipe()
	p := &person{Conn: far, ended: make(chan struct{})}
	go func() {
		defer close(p.ended)
		defer near.Close()
		p.report, p.err = r.desk.Serve(ctx, Session{
			BMC: "bmc:623", Command: command, Takeover: takeover, History: history, Open: r.open,
			Line: func(context.Context) (io.ReadWriteCloser, error) { return near, nil },
			Audit: func(name string, details map[string]string) error {
				r.mu.Lock()
				defer r.mu.Unlock()
				r.audits = append(r.audits, fmt.Sprint(name, " ", details["command"], " ", details["from"], details["code"]))
				return r.auditErr
			},
		})
	}()
	if !deaf {
		go func() {
			buf := make([]byte, 1<<10)
			for {
				n, err := far.Read(buf)
				p.mu.Lock()
				p.seen.Write(buf[:n])
				p.mu.Unlock()
				if err != nil {
					return
				}
			}
		}()
	}
	synctest.Wait()
	return p
}

func (p *person) text() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.seen.String()
}

func (p *person) over() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

func say(t *testing.T, to io.Writer, text string) {
	t.Helper()
	if _, err := to.Write([]byte(text)); err != nil {
		t.Fatalf("write %q: %v", text, err)
	}
	synctest.Wait()
}

func TestBothWaysUntilThePersonLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		p := r.come(t.Context(), "cmd_1", false, false, 0)
		say(t, r.bmc(0), "login: \x00\xff")
		if p.text() != "login: \x00\xff" {
			t.Errorf("seen %q", p.text())
		}
		go p.Write([]byte("root\r"))
		got := make([]byte, 5)
		if _, err := io.ReadFull(r.bmc(0), got); err != nil || string(got) != "root\r" {
			t.Errorf("the machine was told %q, %v", got, err)
		}
		p.Close()
		<-p.ended
		if p.err != nil || p.report != (Report{Received: 9, Sent: 5}) {
			t.Errorf("Serve() = %+v, %v, want 9 and 5 bytes", p.report, p.err)
		}
		if _, err := r.bmc(0).Read(got); !errors.Is(err, io.EOF) {
			t.Errorf("the BMC's end: %v, want closed", err)
		}
		if got := strings.Join(r.audits, "; "); got != "console.opened cmd_1 ; console.closed cmd_1 " {
			t.Errorf("audit: %s", got)
		}
	})
}

// TestHistory: what was said in earlier consoles is shown as far as it was asked
// for and is kept, also what came before the person's line was there.
func TestHistory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		p := r.come(t.Context(), "cmd_1", false, false, 0)
		say(t, r.bmc(0), "first words")
		p.Close()
		<-p.ended
		const mark = "\r\n[better-compute: opened again; what the machine said in between was not kept]\r\n"
		p = r.come(t.Context(), "cmd_2", false, false, len("words"+mark))
		say(t, r.bmc(1), "next")
		if got := p.text(); got != "words"+mark+"next" {
			t.Errorf("seen %q", got)
		}
		p.Close()
		<-p.ended
		p = r.come(t.Context(), "cmd_3", false, false, 0)
		say(t, r.bmc(2), "third")
		if got := p.text(); got != "third" {
			t.Errorf("without history: seen %q", got)
		}
		// A flood keeps the last of it.
		flood := strings.Repeat("0123456789abcdef", 64<<10)
		say(t, r.bmc(2), flood)
		p.Close()
		<-p.ended
		p = r.come(t.Context(), "cmd_4", false, false, HistoryBytes)
		if got := p.text(); len(got) != HistoryBytes || !strings.HasSuffix(got, flood[len(flood)-1000:]+mark) {
			t.Errorf("history of %d bytes, want the last %d", len(got), HistoryBytes)
		}
		p.Close()
		<-p.ended
		if n := cap(r.desk.consoles["bmc:623"].said.data); n > 2*(HistoryBytes+slack) {
			t.Errorf("%d bytes are held for one console", n)
		}
	})
}

// TestReconnects: a lost session is opened again with growing pauses, and the
// person is told, without what could steer a terminal.
func TestReconnects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		p := r.come(t.Context(), "cmd_1", false, false, 0)
		say(t, r.bmc(0), "one ")
		down := errs.New(errs.Unreachable, "BMC did not \x1b[2Janswer")
		r.answers = []error{down, down, errs.New(errs.OperationNotAllowed, "another session"), nil}
		r.bmc(0).Close()
		synctest.Wait()
		// What is typed while it is lost goes nowhere, and holds nobody up.
		say(t, p, "lost")
		time.Sleep(16 * time.Second) // 1, 2, 4 and 8, and a little
		synctest.Wait()
		say(t, r.bmc(1), "two")
		want := []string{"one ", "the console was lost", "not open yet: BMC did not .[2Janswer", "not open yet: another session", "open again", "two"}
		rest := p.text()
		for _, w := range want {
			i := strings.Index(rest, w)
			if i < 0 {
				t.Fatalf("seen %q, want %q in order", p.text(), want)
			}
			rest = rest[i+len(w):]
		}
		if n := strings.Count(p.text(), "not open yet"); n != 2 || strings.Contains(p.text(), "\x1b") {
			t.Errorf("seen %q: want each reason once, and no escape", p.text())
		}
		go p.Write([]byte("x"))
		b := make([]byte, 8)
		if n, err := r.bmc(1).Read(b); err != nil || string(b[:n]) != "x" {
			t.Errorf("the machine was told %q, %v after the reconnection, want x", b[:n], err)
		}
		for i, takeover := range r.asked {
			if takeover {
				t.Errorf("opening %d took over", i)
			}
		}
		p.Close()
		<-p.ended
		if p.report.Reconnects != 1 {
			t.Errorf("report %+v, want 1 reconnection", p.report)
		}
	})
}

// TestHopelessEnds: what no attempt changes ends the console.
func TestHopelessEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.answers = []error{errs.New(errs.CredentialsUnavailable, "no")}
		if p := r.come(t.Context(), "cmd_0", false, false, 0); !p.over() || errs.CodeOf(p.err) != errs.CredentialsUnavailable {
			t.Errorf("a first opening that fails: %v, want its error", p.err)
		}
		p := r.come(t.Context(), "cmd_1", false, false, 0)
		r.answers = []error{errs.New(errs.BindingMismatch, "bound anew")}
		r.bmc(0).Close()
		time.Sleep(time.Minute)
		if !p.over() || errs.CodeOf(p.err) != errs.BindingMismatch {
			t.Errorf("ended %v with %v, want binding-mismatch", p.over(), p.err)
		}
	})
}

// TestTakeover: another's console is refused, and ended on request only, which is
// written down.
func TestTakeover(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		first := r.come(t.Context(), "cmd_1", false, false, 0)
		second := r.come(t.Context(), "cmd_2", false, false, 0)
		if !second.over() || errs.CodeOf(second.err) != errs.OperationNotAllowed || !strings.Contains(second.err.Error(), "cmd_1") || first.over() {
			t.Fatalf("beside another: %v, want operation-not-allowed that names it", second.err)
		}
		third := r.come(t.Context(), "cmd_3", true, false, 0)
		if !first.over() || errs.CodeOf(first.err) != errs.Cancelled || !strings.Contains(first.err.Error(), "taken over") {
			t.Fatalf("the first ended %v with %v, want cancelled, taken over", first.over(), first.err)
		}
		say(t, r.bmc(1), "yours")
		if !strings.HasSuffix(third.text(), "yours") {
			t.Errorf("the third saw %q", third.text())
		}
		if got := fmt.Sprint(r.asked); got != "[false false]" {
			t.Errorf("openings took over: %s, want none: nobody else had the BMC", got)
		}
		if !strings.Contains(strings.Join(r.audits, ";"), "console.taken cmd_3 cmd_1") {
			t.Errorf("audit: %q", r.audits)
		}
		third.Close()
		<-third.ended

		// A session with the BMC that is not ours.
		r.audits, r.asked = nil, nil
		held := errs.New(errs.OperationNotAllowed, "open in another session")
		r.answers = []error{held}
		if p := r.come(t.Context(), "cmd_4", false, false, 0); errs.CodeOf(p.err) != errs.OperationNotAllowed || len(r.audits) != 0 {
			t.Errorf("a port that is held: %v, audit %q", p.err, r.audits)
		}
		r.asked, r.answers = nil, []error{held, nil}
		p := r.come(t.Context(), "cmd_5", true, false, 0)
		if p.over() || fmt.Sprint(r.asked) != "[false true]" || !strings.HasPrefix(strings.Join(r.audits, ";"), "console.taken cmd_5 another session with the BMC") {
			t.Errorf("takeover of a port that is held: %v, openings %v, audit %q", p.err, r.asked, r.audits)
		}
		p.Close()
		<-p.ended

		// What cannot be written down is not done.
		p = r.come(t.Context(), "cmd_6", false, false, 0)
		r.auditErr = errors.New("full")
		if q := r.come(t.Context(), "cmd_7", true, false, 0); errs.CodeOf(q.err) != errs.NoSpace || p.over() {
			t.Errorf("takeover without room for its audit event: %v, the other ended %v", q.err, p.over())
		}
		p.Close()
		<-p.ended
	})
}

// TestSlowPersonHoldsNobodyUp: the machine is read on, and the person is told of
// what was lost.
func TestSlowPersonHoldsNobodyUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		p := r.come(t.Context(), "cmd_1", false, true, 0)
		part := bytes.Repeat([]byte("x"), 64<<10)
		for range 32 { // 2 MiB; the person reads nothing
			say(t, r.bmc(0), string(part))
		}
		say(t, r.bmc(0), "the end")
		var seen bytes.Buffer
		buf := make([]byte, 4<<10)
		for !bytes.HasSuffix(seen.Bytes(), []byte("the end")) {
			n, err := p.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			seen.Write(buf[:n])
		}
		if seen.Len() > HistoryBytes+slack+40<<10 || !strings.Contains(seen.String(), "bytes were not shown: the line is too slow]") {
			t.Errorf("%d bytes were shown, want the last, and a word about the rest", seen.Len())
		}
		p.Close()
		<-p.ended
	})
}

// TestCancelledCommandEnds: whoever ends the command's context ends the console.
func TestCancelledCommandEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		ctx, cancel := context.WithCancelCause(t.Context())
		p := r.come(ctx, "cmd_1", false, true, 0) // nobody reads
		cancel(errs.New(errs.Cancelled, "cancelled by the gateway"))
		<-p.ended
		if errs.CodeOf(p.err) != errs.Cancelled {
			t.Errorf("Serve() = %v, want cancelled", p.err)
		}
		if q := r.come(t.Context(), "cmd_2", false, false, 0); q.over() {
			t.Errorf("the console is not free: %v", q.err)
		} else {
			q.Close()
			<-q.ended
		}
	})
}

// TestHistoriesAreBounded: those of machines that nobody looks at go first.
func TestHistoriesAreBounded(t *testing.T) {
	d := New(Options{})
	at := time.Unix(0, 0)
	d.now = func() time.Time { at = at.Add(time.Second); return at }
	for i := range maxHistories + 10 {
		_, _, leave, err := d.claim(t.Context(), Session{BMC: fmt.Sprint("bmc", i), Command: "cmd"}, func(error) {})
		if err != nil {
			t.Fatal(err)
		}
		if i > 0 { // the first stays in use
			leave()
		}
	}
	if len(d.consoles) != maxHistories || d.consoles["bmc0"] == nil || d.consoles["bmc1"] != nil || d.consoles[fmt.Sprint("bmc", maxHistories+9)] == nil {
		t.Errorf("%d histories are kept, want %d: those in use and the latest", len(d.consoles), maxHistories)
	}
}
