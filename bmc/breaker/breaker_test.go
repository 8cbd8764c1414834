package breaker

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/site-appliance/appliance/base/errs"
)

// step is one call, after some time; want is admitted, or a part of the refusal.
type step struct {
	after time.Duration
	end   error
	want  string
}

var (
	dead  = errs.Retry(errs.Unreachable, "no answer")
	wrong = errs.New(errs.BmcError, "login refused")
)

func TestBreaker(t *testing.T) {
	const in = "admitted"
	for name, steps := range map[string][]step{
		"an answer, whatever it says, starts the count anew": {
			{0, dead, in}, {0, dead, in}, {0, nil, in}, {0, dead, in}, {0, dead, in}, {0, wrong, in}, {0, dead, in}, {0, dead, in}, {0, dead, in}, {0, nil, "3 times; next try in 30s"},
		},
		"what was not sent, and a caller's own deadline, say nothing": {
			{0, dead, in}, {0, dead, in}, {0, ErrNothingLearned, in}, {0, errs.New(errs.InvalidArgs, "x"), in}, {0, errs.Retry(errs.Timeout, "x"), in}, {0, errors.New("x"), in}, {0, dead, in}, {0, nil, "3 times"},
		},
		"open for 30 s, then one trial, then twice as long, at most 5 minutes": {
			{0, dead, in}, {0, dead, in}, {0, dead, in},
			{29 * time.Second, nil, "next try in 1s"}, {time.Second, dead, in},
			{59 * time.Second, nil, "4 times; next try in 1s"}, {time.Second, dead, in},
			{2 * time.Minute, dead, in}, {4 * time.Minute, dead, in},
			{5*time.Minute - time.Second, nil, "next try in 1s"}, {time.Second, dead, in},
			{5*time.Minute - time.Second, nil, "next try in 1s"}, {time.Second, nil, in}, {0, dead, in}, {0, dead, in}, {0, nil, in},
		},
		"a trial that says nothing leaves the next call to try": {
			{0, dead, in}, {0, dead, in}, {0, dead, in},
			{30 * time.Second, errs.Retry(errs.Timeout, "x"), in}, {0, dead, in}, {59 * time.Second, nil, "next try in 1s"},
		},
	} {
		now := time.Unix(1e9, 0)
		b := New(func() time.Time { return now })
		for i, s := range steps {
			now = now.Add(s.after)
			report, err := b.Ask("10.0.0.5:443")
			if s.want == in {
				if err != nil {
					t.Errorf("%s: call %d = %v, want it admitted", name, i, err)
					break
				}
				report(s.end)
				continue
			}
			if errs.CodeOf(err) != errs.Unreachable || !errs.From(err).Retryable || !strings.Contains(err.Error(), s.want) {
				t.Errorf("%s: call %d = %v, want unreachable, retryable, %q", name, i, err, s.want)
				break
			}
		}
	}
}

// TestOneTrial: while one call tries whether the BMC is back, others do not wait
// for a dead one; and no BMC pays for another.
func TestOneTrial(t *testing.T) {
	now := time.Unix(1e9, 0)
	b := New(func() time.Time { return now })
	for range threshold {
		report, err := b.Ask("dead:443")
		if err != nil {
			t.Fatal(err)
		}
		report(dead)
	}
	now = now.Add(minOpen)
	report, err := b.Ask("dead:443")
	if err != nil {
		t.Fatalf("the trial = %v, want it admitted", err)
	}
	if _, err := b.Ask("dead:443"); errs.CodeOf(err) != errs.Unreachable || !strings.Contains(err.Error(), "another call") {
		t.Errorf("a call beside the trial = %v, want unreachable", err)
	}
	if _, err := b.Ask("live:443"); err != nil {
		t.Errorf("a call of another BMC = %v", err)
	}
	report(nil)
	if _, err := b.Ask("dead:443"); err != nil {
		t.Errorf("after the trial's success = %v", err)
	}
	if len(b.circuits) != 0 {
		t.Errorf("%d circuits are kept for BMCs that answer", len(b.circuits))
	}
}

// TestCallsTogether: calls that went out together and found nobody open the
// circuit once, not once each.
func TestCallsTogether(t *testing.T) {
	now := time.Unix(1e9, 0)
	b := New(func() time.Time { return now })
	var reports []func(error)
	for range 2 * threshold {
		report, err := b.Ask("dead:443")
		if err != nil {
			t.Fatal(err)
		}
		reports = append(reports, report)
	}
	for _, report := range reports {
		report(dead)
	}
	if c := b.circuits["dead:443"]; c.Open != minOpen || c.Silent != 2*threshold {
		t.Errorf("circuit = %+v, want open for %s after %d", c, minOpen, 2*threshold)
	}
	b.Reset("dead:443")
	if _, err := b.Ask("dead:443"); err != nil {
		t.Errorf("after Reset = %v", err)
	}
}

// TestHeard: an answer counts for a while, until the BMC is missed.
func TestHeard(t *testing.T) {
	now := time.Unix(1e9, 0)
	b := New(func() time.Time { return now })
	end := func(err error) {
		t.Helper()
		report, aerr := b.Ask("a:443")
		if aerr != nil {
			t.Fatal(aerr)
		}
		report(err)
	}
	want := func(what string, heard bool) {
		t.Helper()
		if got := b.Heard("a:443", time.Minute); got != heard {
			t.Errorf("%s: Heard() = %v, want %v", what, got, heard)
		}
	}
	want("before any call", false)
	end(errs.New(errs.InvalidArgs, "x"))
	want("after a call that was not sent", false)
	end(wrong)
	want("after an answer", true)
	now = now.Add(time.Minute)
	want("a minute later", false)
	end(nil)
	end(dead)
	want("after it was missed", false)
}

// TestLongTrial: a trial that goes on and on, such as a console, locks nobody out.
func TestLongTrial(t *testing.T) {
	now := time.Unix(1e9, 0)
	b := New(func() time.Time { return now })
	for range threshold {
		report, err := b.Ask("back:443")
		if err != nil {
			t.Fatal(err)
		}
		report(dead)
	}
	now = now.Add(minOpen)
	console, err := b.Ask("back:443")
	if err != nil {
		t.Fatal(err)
	}
	now = now.Add(trialLimit)
	second, err := b.Ask("back:443")
	if err != nil {
		t.Fatalf("a call during a long trial = %v, want it admitted", err)
	}
	if _, err := b.Ask("back:443"); errs.CodeOf(err) != errs.Unreachable {
		t.Errorf("a call beside the second trial = %v, want unreachable", err)
	}
	second(nil)
	console(errs.New(errs.Cancelled, "closed"))
	if _, err := b.Ask("back:443"); err != nil {
		t.Errorf("after the second trial's success = %v", err)
	}
}
